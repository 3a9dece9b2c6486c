"""The drop-in links and unlinks: results, both backends, roles, and what becomes of peers that have gone."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import aiodatadist as adt
from aiodatadist.llm_datadist import (
    BlocksCacheKey,
    CacheKeyByIdAndIndex,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    MemInfo,
    Memtype,
    _engine,
)

from .llm_nodes import (
    DECODER,
    INVALID,
    PROMPT,
    SUCCESS,
    Memory,
    cluster,
    linked_ids,
    node,
    options,
    pair,
    until_linked,
)
from .waiting import reserved_address, until_now

pytestmark = pytest.mark.filterwarnings("ignore:Placement.DEVICE means host memory")

ALREADY = LLMStatusCode.LLM_ALREADY_LINK
FAILED = LLMStatusCode.LLM_LINK_FAILED
NOT_LINKED = LLMStatusCode.LLM_NOT_YET_LINK
SECONDS = 60_000


def link(one: LLMDataDist, cluster_id: int, address: str, timeout: int = SECONDS) -> LLMStatusCode:
    status, (each,) = one.link_clusters(cluster(cluster_id, address), timeout)
    assert status is each
    return each


def unlink(one: LLMDataDist, cluster_id: int, force: bool = False) -> LLMStatusCode:
    status, (each,) = one.unlink_clusters(cluster(cluster_id), SECONDS, force)
    assert status is each
    return each


@contextlib.contextmanager
def nodes(*cluster_ids: int, **changes: Any) -> Iterator[list[tuple[LLMDataDist, str]]]:
    """Have listening nodes, each with its address."""
    with contextlib.ExitStack() as stack:
        made = []
        for cluster_id in cluster_ids:
            address = stack.enter_context(reserved_address())
            made.append((stack.enter_context(node(cluster_id, address, **changes)), address))
        yield made


# Results. ---------------------------------------------------------------------------------------------------


def test_linking_and_unlinking() -> None:
    with nodes(1, 2) as [(prompt, address), (decoder, _)]:
        assert unlink(decoder, 1) is SUCCESS  # of one that is not linked
        assert link(decoder, 1, address) is SUCCESS
        assert link(decoder, 1, address) is ALREADY
        until_linked(prompt, 2)
        assert link(prompt, 2, "127.0.0.1:1") is ALREADY  # one link for both
        assert unlink(prompt, 2) is SUCCESS  # also by who was linked
        until_linked(decoder)
        assert link(decoder, 1, address) is SUCCESS
        assert unlink(decoder, 1, force=True) is SUCCESS
        until_linked(prompt)
        assert linked_ids(decoder) == set()


def test_many_at_once_have_a_result_each(capsys: pytest.CaptureFixture[str]) -> None:
    with nodes(1, 2, 3) as [(one, _), (_, second), (_, third)], reserved_address() as nobody:
        clusters = [
            *cluster(2, second), *cluster(8, nobody), *cluster(3, third), *cluster(2, second), *cluster(9),
            *cluster(7, third),
        ]  # fmt: skip
        clusters[2].append_local_ip_info("127.0.0.1", 1)
        status, each = one.link_clusters(clusters, SECONDS)
        assert each == [SUCCESS, FAILED, INVALID, ALREADY, INVALID, FAILED]
        assert status is FAILED  # the last that is no success
        assert linked_ids(one) == {2}
        said = capsys.readouterr().out
        assert "cluster 8 cannot be linked" in said
        assert "cluster 7 was meant, but cluster 3 listens here" in said
        two = [*cluster(3, third), *cluster(2)]
        two[0].append_remote_ip_info("127.0.0.1", 5)
        assert one.link_clusters(two, SECONDS)[1] == [INVALID, INVALID]
        assert one.unlink_clusters([*cluster(2), *cluster(3)], SECONDS) == (SUCCESS, [SUCCESS, SUCCESS])


def test_a_silent_peer_takes_no_longer_than_the_timeout() -> None:
    with node(1) as one, socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        assert link(one, 2, where, 50) is LLMStatusCode.LLM_TIMEOUT


def test_oneself(capsys: pytest.CaptureFixture[str]) -> None:
    with nodes(1, 1) as [(one, mine), (_, other)]:
        assert link(one, 1, mine) is SUCCESS
        assert link(one, 1, mine) is ALREADY
        held, cache = Memory(one, contiguous=True), Memory(one, contiguous=True, seed=2).cache
        with pytest.raises(LLMException) as why:
            one.cache_manager.pull_cache(CacheKeyByIdAndIndex(1, held.cache.cache_id), cache)
        assert why.value.status_code is INVALID
        one.cache_manager.remap_registered_memory(MemInfo(Memtype.MEM_TYPE_DEVICE, 1, 1))
        with pytest.raises(LLMException) as why:
            one.switch_role(LLMRole.MIX)
        assert why.value.status_code is LLMStatusCode.LLM_EXIST_LINK
        assert unlink(one, 1) is SUCCESS
        one.switch_role(LLMRole.MIX, {"llm.listenIpInfo": mine})
        # Another live node with this id is an error that names it.
        assert link(one, 1, other) is FAILED
        assert "cluster id 1 is that of the DataDist that listens here" in capsys.readouterr().out


def test_two_live_nodes_with_one_id(capsys: pytest.CaptureFixture[str]) -> None:
    with nodes(1, 2, 2) as [(_, prompt), (first, _), (second, _)]:
        assert link(first, 1, prompt) is SUCCESS
        assert link(second, 1, prompt) is FAILED
        assert "cluster id 2" in capsys.readouterr().out
        assert linked_ids(first) == {1}
        assert unlink(first, 1) is SUCCESS
        assert link(second, 1, prompt) is SUCCESS


@pytest.mark.parametrize("backend", [None, "hixl"])
def test_a_second_peer_with_the_id_of_the_first(backend: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where both listen on one port, of different hosts."""
    with nodes(1, 2, 3, transfer_backend=backend) as [(_, first), (decoder, _), (other, third)]:
        second = first.replace("127.0.0.1", "127.0.0.2")
        with node(1, second, transfer_backend=backend) as same:
            assert link(decoder, 1, first) is SUCCESS
            assert link(decoder, 1, second) is FAILED
            assert (
                f"cluster id 1 is that of a live node that is linked already, and of another one at {second}"
                in capsys.readouterr().out
            )
            until_linked(same)
            assert link(decoder, 1, first) is ALREADY
            assert link(decoder, 1, third) is FAILED
            assert "cluster 1 was meant, but cluster 3 listens" in capsys.readouterr().out
            assert linked_ids(decoder) == {1}
            assert linked_ids(other) == set()


def test_a_peer_has_more_than_one_address() -> None:
    with reserved_address() as address, nodes(2) as [(decoder, back)]:
        everywhere = address.replace("127.0.0.1", "0.0.0.0")
        with node(1, everywhere) as prompt:
            assert link(decoder, 1, address) is SUCCESS
            assert link(decoder, 1, address.replace("127.0.0.1", "127.0.0.3")) is ALREADY
            until_linked(prompt, 2)
            assert link(prompt, 2, back) is ALREADY
            assert linked_ids(decoder) == {1}
            assert linked_ids(prompt) == {2}


def test_modes_need_not_agree() -> None:
    with reserved_address() as address, node(1, address, remote=True) as prompt, node(2, remote=False) as decoder:
        theirs, mine = Memory(prompt), Memory(decoder, seed=2)
        assert link(decoder, 1, address) is SUCCESS
        decoder.cache_manager.pull_blocks(BlocksCacheKey(1), mine.cache, [0], [1])
        assert np.array_equal(theirs.tensors[0][0], mine.tensors[0][1])


def test_a_rank_table_that_cannot_be_used(capsys: pytest.CaptureFixture[str]) -> None:
    with nodes(1) as [(_, address)]:
        with node(2, local_comm_res='{"version": "1.3"}') as one:
            assert link(one, 1, address) is INVALID
            assert "local_comm_res" in capsys.readouterr().out
        with node(3, local_comm_res="") as one:
            assert link(one, 1, address) is SUCCESS


def test_with_a_rank_table_no_local_address_is_needed() -> None:
    table = (
        '{"version": "1.0", "status": "completed", "server_count": "1", "server_list": [{"server_id": "127.0.0.1", '
        '"device": [{"device_id": "0", "rank_id": "0", "device_ip": "127.0.0.1"}]}]}'
    )
    with nodes(1) as [(_, address)], node(2, local_comm_res=table) as one:
        (info,) = cluster(1, address)
        info.local_ip_info_list.clear()
        assert one.link_clusters([info], SECONDS) == (SUCCESS, [SUCCESS])


# Both backends. ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def both() -> Iterator[tuple[LLMDataDist, str, LLMDataDist, str]]:
    with nodes(1, 2, transfer_backend="hixl") as [(first, one), (second, two)]:
        yield first, one, second, two


def test_each_side_links() -> None:
    with both() as (first, one, second, two):
        theirs, mine = Memory(first), Memory(second, seed=2)
        for _ in range(3):
            assert (link(second, 1, one), link(first, 2, two)) == (SUCCESS, SUCCESS)
            assert (link(second, 1, one), link(first, 2, two)) == (ALREADY, ALREADY)
            assert unlink(first, 2) is SUCCESS
            second.cache_manager.pull_blocks(BlocksCacheKey(1), mine.cache, [0], [1])  # the other one counts still
            assert np.array_equal(theirs.tensors[0][0], mine.tensors[0][1])
            assert link(first, 2, two) is SUCCESS  # and counts again
            assert (unlink(first, 2), unlink(second, 1)) == (SUCCESS, SUCCESS)
            until_linked(first)
            until_linked(second)
            with pytest.raises(LLMException) as why:
                second.cache_manager.pull_blocks(BlocksCacheKey(1), mine.cache, [0], [1])
            assert why.value.status_code is NOT_LINKED


def test_force_ends_it_for_both() -> None:
    with both() as (first, one, second, two):
        assert (link(second, 1, one), link(first, 2, two)) == (SUCCESS, SUCCESS)
        assert unlink(first, 2, force=True) is SUCCESS
        until_linked(first)
        until_linked(second)
        # What was counted has gone with it.
        assert link(first, 2, two) is SUCCESS
        assert unlink(first, 2) is SUCCESS
        until_linked(second)


def test_a_side_that_has_not_linked_does_not_count() -> None:
    with both() as (first, one, second, _):
        assert link(second, 1, one) is SUCCESS
        assert unlink(first, 2) is SUCCESS
        assert linked_ids(first) == {2}
        assert unlink(second, 1) is SUCCESS
        until_linked(first)


def test_both_at_once(scale: Any) -> None:
    with both() as (first, one, second, two):
        for _ in range(scale(10)):
            for name, expected in (("link_clusters", {2}), ("unlink_clusters", set())):
                threads = [
                    threading.Thread(target=getattr(node, name), args=(cluster(peer, address), SECONDS))
                    for node, peer, address in ((first, 2, two), (second, 1, one))
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                until_linked(first, *expected)
            until_linked(second)


def test_what_hixl_refuses() -> None:
    with both() as (first, one, second, _):
        assert link(first, 1, one) is INVALID  # oneself
        assert link(second, 1, one) is SUCCESS
        first.switch_role(LLMRole.DECODER)
        first.switch_role(LLMRole.PROMPT, {"llm.listenIpInfo": one})
        with pytest.raises(LLMException) as why:
            first.switch_role(LLMRole.PROMPT, {"llm.listenIpInfo": "127.0.0.1:1"})
        assert why.value.status_code is LLMStatusCode.LLM_FEATURE_NOT_ENABLED
        assert linked_ids(first) == {2}


def test_peers_that_are_not_of_the_drop_in() -> None:
    """A native node neither counts nor answers."""
    with nodes(1, transfer_backend="hixl") as [(one, address)]:
        engine = one._llm_datadist
        assert engine is not None

        async def open_native() -> adt.DataDist:
            return await adt.DataDist(2, listen="127.0.0.1:0").open()

        native = engine.run("test", open_native)
        try:
            assert link(one, 2, str(native.listen_address)) is SUCCESS
            assert unlink(one, 2) is SUCCESS
            until_now(lambda: not native.links)
            engine.run("test", lambda: native.link(adt.ClusterInfo(1, address)))
            cache = native.cache_manager
            assert cache is not None
            until_linked(one, 2)
            assert link(one, 2, str(native.listen_address)) is SUCCESS
        finally:
            engine.run("test", native.aclose)
        until_linked(one)


# Roles. -----------------------------------------------------------------------------------------------------


def test_switching_roles() -> None:
    with nodes(1, 2) as [(one, first), (other, _)], reserved_address() as second:
        one.switch_role(LLMRole.DECODER)  # stops listening
        assert link(other, 1, first) is FAILED
        one.switch_role(LLMRole.DECODER)
        one.switch_role(LLMRole.PROMPT, {**options(first), "unknown": "ignored"})
        assert link(other, 1, first) is SUCCESS
        until_linked(one, 2)
        with pytest.raises(LLMException) as why:
            one.switch_role(LLMRole.DECODER)
        assert why.value.status_code is LLMStatusCode.LLM_EXIST_LINK
        assert unlink(one, 2) is SUCCESS
        until_linked(one)
        port = first.rpartition(":")[2]
        one.switch_role(LLMRole.PROMPT, {"llm.listenIpInfo": f"192.0.2.1:{port}"})  # the port is the same
        one.switch_role(LLMRole.PROMPT, {"llm.listenIpInfo": second})
        assert link(other, 1, second) is SUCCESS
        assert unlink(other, 1) is SUCCESS
        until_linked(one)
        with pytest.raises(LLMException) as why:
            one.switch_role(LLMRole.MIX, {"llm.listenIpInfo": "192.0.2.1:1"})
        assert why.value.status_code is LLMStatusCode.LLM_FAILED
        assert link(other, 1, second) is SUCCESS  # it listens where it did


# Peers that go. ---------------------------------------------------------------------------------------------

SCRIPT = """
import sys
import numpy as np
from aiodatadist.llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMConfig, LLMDataDist, LLMRole, Placement
config = LLMConfig()
config.enable_cache_manager = config.enable_remote_cache_accessible = True
config.listen_ip_info = sys.argv[1]
node = LLMDataDist(LLMRole.PROMPT, 1)
node.init(config.generate_options())
tensors = [np.full((8, 64), int(sys.argv[2]), np.uint8) for _ in range(4)]
desc = CacheDesc(4, [8, 64], DataType.DT_UINT8, Placement.HOST)
addrs = [int(tensor.ctypes.data) for tensor in tensors]
cache = node.cache_manager.register_blocks_cache(desc, addrs, BlocksCacheKey(1), remote_accessible=True)
print("ready", flush=True)
sys.stdin.read()
node.finalize()
"""


@contextlib.contextmanager
def prompt_process(address: str, fill: int) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(SCRIPT), address, str(fill)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()


def test_a_peer_that_crashed_is_linked_anew_without_force() -> None:
    with reserved_address() as address, node(DECODER) as decoder:
        mine = Memory(decoder)
        for fill in (1, 2):
            with prompt_process(address, fill) as process:
                # At once, whether or not the end of the last one was heard of.
                assert link(decoder, PROMPT, address) is SUCCESS
                decoder.cache_manager.pull_blocks(BlocksCacheKey(PROMPT), mine.cache, [0], [0])
                assert [int(tensor[0, 0]) for tensor in mine.tensors] == [fill] * 4
                if fill == 2:
                    assert process.stdin is not None
                    process.stdin.close()
                    assert process.wait(60) == 0  # it may end before those that it serves
        until_linked(decoder)
        with pytest.raises(LLMException) as why:
            decoder.cache_manager.pull_blocks(BlocksCacheKey(PROMPT), mine.cache, [0], [0])
        assert why.value.status_code is NOT_LINKED
        assert unlink(decoder, PROMPT) is SUCCESS
        assert link(decoder, PROMPT, address) is FAILED


def test_unlinking_a_peer_that_does_not_answer() -> None:
    with reserved_address() as address, node(DECODER) as decoder, prompt_process(address, 1) as process:
        mine = Memory(decoder)
        assert link(decoder, PROMPT, address) is SUCCESS
        process.send_signal(signal.SIGSTOP)
        status, each = decoder.unlink_clusters(cluster(PROMPT), 50)
        assert (status, each) == (LLMStatusCode.LLM_TIMEOUT, [LLMStatusCode.LLM_TIMEOUT])
        assert linked_ids(decoder) == set()  # ended here all the same
        with pytest.raises(LLMException) as why:
            decoder.cache_manager.pull_blocks(BlocksCacheKey(PROMPT), mine.cache, [0], [0])
        assert why.value.status_code is NOT_LINKED
        assert unlink(decoder, PROMPT, force=True) is SUCCESS


def test_memory_that_a_stopped_peer_may_touch_is_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_engine, "_QUIET_SECONDS", 0.05)
    with reserved_address() as address, node(DECODER) as decoder, prompt_process(address, 1) as process:
        mine = Memory(decoder)
        assert link(decoder, PROMPT, address) is SUCCESS
        process.send_signal(signal.SIGSTOP)
        for _ in range(2):
            with pytest.raises(LLMException, match="may still be touched"):
                decoder.cache_manager.unregister_cache(mine.cache.cache_id)
        process.send_signal(signal.SIGCONT)
        monkeypatch.setattr(_engine, "_QUIET_SECONDS", 60.0)
        for _ in range(2):  # the second time it is unknown
            decoder.cache_manager.unregister_cache(mine.cache.cache_id)


def test_closing_a_node_ends_its_links() -> None:
    with pair() as (prompt, decoder):
        prompt.finalize()
        until_linked(decoder)
        assert unlink(decoder, PROMPT) is SUCCESS
