"""The drop-in's two-sided link: rank tables are read and checked, and the members find each other."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

import aiodatadist as adt
from aiodatadist.llm_datadist import BlocksCacheKey, LLMException, LLMStatusCode, RegisterMemStatus
from aiodatadist.llm_datadist.communicators import Communicators
from aiodatadist.llm_datadist.rank_table import check_link_arguments, check_local_comm_res, members_of

from .llm_nodes import Memory, linked_ids
from .llm_nodes import node as opened
from .waiting import reserved_address, until, until_now

pytestmark = pytest.mark.filterwarnings("ignore:Placement.DEVICE means host memory")

SECONDS = 60
INVALID = LLMStatusCode.LLM_PARAM_INVALID


def table(*servers: str, **changes: Any) -> dict[str, Any]:
    """Return a rank table of version 1.0 with rank `i` on `servers[i]`, numbers as strings, as HCCL writes them."""
    held: dict[str, list[dict[str, str]]] = {}
    for rank, server in enumerate(servers):
        device = {"rank_id": str(rank), "device_id": str(rank), "device_ip": f"192.168.0.{rank + 1}"}
        held.setdefault(server, []).append(device)
    made = {
        "version": "1.0",
        "status": "completed",
        "server_count": str(len(held)),
        "server_list": [{"server_id": server, "device": devices} for server, devices in held.items()],
    }
    return {**made, **changes}


def pod_table(*servers: str, **changes: Any) -> dict[str, Any]:
    """Return one of version 1.2."""
    made = table(*servers, version="1.2")
    for server in made["server_list"]:
        for device in server["device"]:
            device["super_device_id"] = device["rank_id"]
    pods = [{"super_pod_id": "0", "server_list": [{"server_id": server} for server in dict.fromkeys(servers)]}]
    return {**made, "super_pod_list": pods, **changes}


# Reading. -----------------------------------------------------------------------------------------------------


def test_where_members_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HCCL_IF_BASE_PORT", raising=False)
    for made in (table, pod_table):
        places = made("10.0.0.1", "10.0.0.2", "node-3", "10.0.0.1")
        places["server_list"][2]["host_ip"] = "fd00::3"
        places["something"] = {"unknown": [1]}
        first, second, third, last = members_of(json.dumps(places), {70: 0, 80: 1, 90: 2, 60: 3})
        assert [one.cluster_id for one in (first, second, third, last)] == [70, 80, 90, 60]
        assert (first.host, second.host, third.host, last.host) == ("10.0.0.1", "10.0.0.2", "fd00::3", "10.0.0.1")
        assert (first.port, third.port) == (60000, 60002)
        monkeypatch.setenv("HCCL_IF_BASE_PORT", "50000")
        assert (first.port, third.port) == (50000, 50002)
        monkeypatch.delenv("HCCL_IF_BASE_PORT")
        check_local_comm_res(json.dumps(places))


def test_a_server_without_an_address_has_none() -> None:
    assert [one.host for one in members_of(json.dumps(table("a", "b")), {1: 0, 2: 1})] == ["", ""]


def test_numbers_may_be_numbers() -> None:
    places = table("a", server_count=1)
    places["server_list"][0]["device"] = [{"rank_id": 0, "device_id": 7}, {"rank_id": 1, "device_id": 3}]
    assert [one.device_id for one in members_of(json.dumps(places), {1: 0, 2: 1})] == [7, 3]


@pytest.mark.parametrize("port", ["", "x", "70000", "-1", "1023"])
def test_a_base_port_that_is_none(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HCCL_IF_BASE_PORT", port)
    (member, _) = members_of(json.dumps(table("a", "a")), {1: 0, 2: 1})
    if not port:
        assert member.port == 60000
        return
    with pytest.raises(LLMException, match="HCCL_IF_BASE_PORT") as caught:
        _ = member.port
    assert caught.value.status_code == INVALID


def wrong_tables() -> dict[str, Any]:
    """Return tables that cannot be used for ranks 0 and 1, by what the error says."""

    def device(**changes: Any) -> dict[str, Any]:
        changed = table("a", "a")
        changed["server_list"][0]["device"][1].update(changes)
        return changed

    def without(name: str, made: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in made.items() if key != name}

    twice = table("a", "b", "c")
    twice["server_list"][2]["server_id"] = "a"
    bare = device()
    del bare["server_list"][0]["device"][1]["rank_id"]
    flat = pod_table("a", "a")
    del flat["server_list"][0]["device"][1]["super_device_id"]
    host = table("a", "a")
    host["server_list"][0]["host_ip"] = "node-1"
    pod = {"super_pod_id": "0", "server_list": [{"server_id": "a"}]}
    return {
        "version is '1.3'": table("a", "a", version="1.3"),
        "version is '2'": table("a", "a", version="2"),
        "`version`": without("version", table("a", "a")),
        "status is 'initializing'": table("a", "a", status="initializing"),
        "server_count is 2": table("a", "a", server_count="2"),
        "server_list`": without("server_list", table("a", "a")),
        "server_list": table("a", "a", server_list=[]),
        "server_id 'a'": twice,
        r"server_list\[0\].device": table("a", "a", server_list=[{"server_id": "a", "device": []}]),
        "server_id": table("a", "a", server_list=[{"server_id": "", "device": [{"device_id": 0}]}]),
        r"device\[1\].device_id": device(device_id="x"),
        "device_id": device(device_id="-1"),
        "device_id 0": device(device_id="0"),
        "rank_id 0": device(rank_id="0"),
        "has no rank_id": bare,
        "ranks are 0, 2": device(rank_id="2"),
        "ranks are 0, 1, 2": table("a", "a", "a"),
        "device_ip": device(device_ip="1.2.3"),
        "host_ip": host,
        "no super_pod_list": without("super_pod_list", pod_table("a", "a")),
        "no super_device_id": flat,
        "super_pod_list has the servers a, server_list has a, b": pod_table("a", "b", super_pod_list=[pod]),
        "super_pod_id '0'": pod_table("a", "a", super_pod_list=[pod, pod]),
        "server_id 'a' twice": pod_table("a", "a", super_pod_list=[pod, {**pod, "super_pod_id": "1"}]),
        "object": [],
        "null": None,
    }


@pytest.mark.parametrize("said", wrong_tables())
def test_wrong_rank_tables(said: str) -> None:
    with pytest.raises(LLMException, match=f"rank_table cannot be used: .*{said}") as caught:
        members_of(json.dumps(wrong_tables()[said]), {1: 0, 2: 1})
    assert caught.value.status_code == INVALID


@pytest.mark.parametrize("text", ["", "{", "{}", "\ud800", "[" * 100_000, '{"version": "1.0"} x'])
def test_text_that_is_no_rank_table(text: str) -> None:
    with pytest.raises(LLMException, match="rank_table cannot be used") as caught:
        members_of(text, {1: 0, 2: 1})
    assert caught.value.status_code == INVALID


def test_local_comm_res() -> None:
    check_local_comm_res("")
    fragment = {"version": "1.0", "server_list": [{"server_id": "a", "device": [{"device_id": "0"}]}]}
    check_local_comm_res(json.dumps(fragment))
    end = {"protocol": "roce", "comm_id": "10.0.0.1", "placement": "host"}
    newer = {"version": "1.3", "net_instance_id": "x", "endpoint_list": [end]}
    for usable in ({"version": "1.3"}, newer, fragment):
        check_local_comm_res(json.dumps(usable), hixl=True)
    for text, hixl in (
        (json.dumps(newer), False),
        (json.dumps({**newer, "endpoint_list": [{**end, "protocol": "udp"}]}), True),
        (json.dumps({**newer, "endpoint_list": [{**end, "placement": "shelf"}]}), True),
        (json.dumps({**newer, "endpoint_list": [{"protocol": "roce"}]}), True),
        (json.dumps({**fragment, "version": "1.2"}), True),
        ("{", True),
        ("{", False),
    ):
        with pytest.raises(LLMException, match="local_comm_res cannot be used") as caught:
            check_local_comm_res(text, hixl=hixl)
        assert caught.value.status_code == INVALID


GOOD = json.dumps(table("a", "a"))


@pytest.mark.parametrize(
    ("name", "ranks", "rank_table", "error"),
    [
        (None, {1: 0, 2: 1}, GOOD, TypeError),
        (7, {1: 0, 2: 1}, GOOD, TypeError),
        ("", {1: 0, 2: 1}, GOOD, LLMException),
        ("x" * 128, {1: 0, 2: 1}, GOOD, LLMException),
        ("x", [1, 2], GOOD, TypeError),
        ("x", None, GOOD, TypeError),
        ("x", {"1": 0, 2: 1}, GOOD, TypeError),
        ("x", {1: "0", 2: 1}, GOOD, TypeError),
        ("x", {1: 0, 2: 1, 3: 2, 4: 3, 5: 4}, GOOD, LLMException),
        ("x", {-1: 0, 2: 1}, GOOD, ValueError),
        ("x", {1: 0, 2**64: 1}, GOOD, ValueError),
        ("x", {1: 0, 2: 2**32}, GOOD, ValueError),
        ("x", {1: 0, 2: -1}, GOOD, ValueError),
        ("x", {1: 0, 2: 1}, 1, TypeError),
        ("x", {1: 0, 2: 1}, None, TypeError),
        ("x", {1: 0, 2: 1}, {}, TypeError),
        ("x", {1: 0}, GOOD, LLMException),
        ("x", {}, GOOD, LLMException),
        ("x", {1: 1, 2: 0}, GOOD, LLMException),
        ("x", {1: 0, 2: 0}, GOOD, LLMException),
        ("x", {1: 0, 2: 1}, "{}", LLMException),
    ],
)
def test_arguments_of_link(name: Any, ranks: Any, rank_table: Any, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        check_link_arguments(name, ranks, rank_table)
    if isinstance(caught.value, LLMException):
        assert caught.value.status_code == INVALID


def test_good_arguments_of_link() -> None:
    assert len(check_link_arguments("x" * 127, {1: 0, 2: 1}, GOOD)) == 2


# Meeting. -----------------------------------------------------------------------------------------------------


class Node:
    """A DataDist with its communicators."""

    def __init__(self, dd: adt.DataDist, seconds: int = SECONDS) -> None:
        self.dd = dd
        self.communicators = Communicators(dd, seconds)

    async def link(self, name: str, ranks: dict[int, int], *servers: str) -> int:
        members = check_link_arguments(name, ranks, json.dumps(table(*servers)))
        return await self.communicators.link(name, members, self.dd.cluster_id)

    def has(self, comm_id: int, status: RegisterMemStatus) -> bool:
        return self.communicators.status(comm_id) is status

    async def until(self, comm_id: int, status: RegisterMemStatus = RegisterMemStatus.OK) -> None:
        await until(lambda: not self.has(comm_id, RegisterMemStatus.PREPARING))
        assert self.has(comm_id, status)


@contextlib.asynccontextmanager
async def nodes(*clusters: int, seconds: int = SECONDS, listen: str | None = None) -> AsyncIterator[list[Node]]:
    async with contextlib.AsyncExitStack() as stack:
        made = [
            Node(await stack.enter_async_context(adt.DataDist(cluster, listen=listen)), seconds) for cluster in clusters
        ]
        yield made
        for node in made:
            await node.communicators.close()
            assert not node.communicators._places


NAMES = iter(range(1000))


@pytest.fixture
def name(tmp_path: Any) -> str:
    """A name for a communicator that no other run uses at the same time."""
    return f"{tmp_path}-{next(NAMES)}"[-127:]


@pytest.mark.loop
@pytest.mark.parametrize(
    "servers",
    [("a", "a"), ("127.0.0.1", "127.0.0.1"), ("a", "b", "a"), ("a",) * 4],
    ids=["name", "address of one host", "no address", "four"],
)
async def test_members_meet_by_name(servers: Sequence[str], name: str) -> None:
    ranks = {10 * (4 - rank): rank for rank in range(len(servers))}
    async with nodes(*ranks) as members:
        # The lowest rank comes last.
        ids = {node.dd.cluster_id: await node.link(name, ranks, *servers) for node in reversed(members)}
        for node in members:
            assert ids[node.dd.cluster_id] == 1
            await node.until(1)
            assert set(node.dd.links) == set(ranks) - {node.dd.cluster_id}
            # It had not listened before, and does not now.
            await until(lambda node=node: node.dd.listen_address is None)
        for node in members:
            await node.communicators.unlink(1)
            assert not node.dd.links


@contextlib.contextmanager
def base_port(monkeypatch: pytest.MonkeyPatch) -> Any:
    with reserved_address() as address:
        monkeypatch.setenv("HCCL_IF_BASE_PORT", address.rpartition(":")[2])
        yield


@pytest.mark.loop
async def test_members_of_different_hosts_meet_over_tcp(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = {1: 0, 2: 1, 3: 2}
    with base_port(monkeypatch):
        async with nodes(*ranks) as members:
            # As on another host, where the name is not to be found.
            monkeypatch.setattr("anyio.connect_unix", refuse)
            for node in members:
                await node.link(name, ranks, "127.0.0.1", "127.0.0.2", "127.0.0.3")
            for node in members:
                await node.until(1)
            assert set(members[0].dd.links) == {2, 3}
            assert set(members[2].dd.links) == {1, 2}


async def refuse(path: str) -> Any:
    raise ConnectionRefusedError(path)


@pytest.mark.loop
async def test_who_listens_goes_on_listening(name: str) -> None:
    async with nodes(1, 2, listen="127.0.0.1:0") as (first, second):
        address = first.dd.listen_address
        for node in (first, second):
            await node.link(name, {1: 0, 2: 1}, "a", "a")
        for node in (first, second):
            await node.until(1)
        assert first.dd.listen_address == address


async def link_both(both: Sequence[Node], name: str) -> list[int]:
    ids = [await node.link(name, {1: 0, 2: 1}, "a", "a") for node in both]
    for node, comm_id in zip(both, ids, strict=True):
        await node.until(comm_id)
    return ids


@pytest.mark.loop
async def test_a_link_ends_with_the_last_communicator(name: str) -> None:
    async with nodes(1, 2) as both:
        first, second = both
        for one in (1, 2):
            assert await link_both(both, f"{name}{one}") == [one, one]
        await first.communicators.unlink(1)
        await second.communicators.unlink(1)
        assert 2 in first.dd.links
        await first.communicators.unlink(2)
        assert 2 not in first.dd.links
        await second.communicators.unlink(2)
        # And again, with a name that was used.
        assert await link_both(both, f"{name}1") == [3, 3]


@pytest.mark.loop
async def test_a_link_that_was_there_before_stays(name: str) -> None:
    async with nodes(1, 2, listen="127.0.0.1:0") as both:
        first, second = both
        await first.dd.link(adt.ClusterInfo(2, str(second.dd.listen_address)))
        await until(lambda: second.dd.links)
        for one in (1, 2):
            await link_both(both, f"{name}{one}")
        for comm_id in (1, 2):
            for node in both:
                await node.communicators.unlink(comm_id)
        assert 2 in first.dd.links
        # Not one that was made since.
        await link_both(both, name)
        await first.dd.unlink(adt.ClusterInfo(2))
        await until(lambda: not second.dd.links)
        await link_both(both, f"{name}4")
        for comm_id in (3, 4):
            await first.communicators.unlink(comm_id)
        assert not first.dd.links


@pytest.mark.loop
async def test_no_member_and_no_communicator(name: str) -> None:
    async with nodes(3) as (node,):
        with pytest.raises(LLMException, match="cluster 3") as caught:
            await node.link(name, {1: 0, 2: 1}, "a", "a")
        assert caught.value.status_code == INVALID
        for call in (node.communicators.status, node.communicators.unlink):
            with pytest.raises(LLMException, match="no communicator 1") as caught:
                result = call(1)
                assert asyncio.iscoroutine(result)
                await result
            assert caught.value.status_code == LLMStatusCode.LLM_NOT_YET_LINK


@pytest.mark.loop
async def test_who_comes_alone_fails_and_may_try_again(name: str, llm_log: list[str]) -> None:
    for cluster in (1, 2):
        async with nodes(cluster, seconds=1) as (node,):
            await node.link(name, {1: 0, 2: 1}, "a", "a")
            await node.until(1, RegisterMemStatus.FAILED)
            assert f"after 1 s these clusters are not linked: [{3 - cluster}]" in llm_log[-1]
            assert node.dd.listen_address is None
            await node.communicators.unlink(1)
            async with nodes(3 - cluster) as (other,):
                comm_id = await node.link(name, {1: 0, 2: 1}, "a", "a")
                await other.link(name, {1: 0, 2: 1}, "a", "a")
                await node.until(comm_id)
                await other.until(1)


@pytest.mark.loop
async def test_unlinking_and_closing_end_the_wait(name: str) -> None:
    async with nodes(1, 2, 3) as (first, second, third):
        ranks = {1: 0, 2: 1, 3: 2, 4: 3}
        for node in (first, second, third):
            await node.link(name, ranks, *"aaaa")
        await until(lambda: len(first.communicators._all[1].present) == 3)
        # One that leaves is no longer there.
        await second.communicators.unlink(1)
        assert second.dd.listen_address is None
        await until(lambda: 2 not in first.communicators._all[1].present)
        with pytest.raises(LLMException) as caught:
            await first.link(name, ranks, *"aaaa")
        assert caught.value.status_code == LLMStatusCode.LLM_LINK_FAILED
        await first.communicators.unlink(1)
        assert first.dd.listen_address is None
        assert third.has(1, RegisterMemStatus.PREPARING)


class Held:
    """A DataDist whose links are held up, or fail."""

    def __init__(self, dd: adt.DataDist) -> None:
        self._dd = dd
        self.asked, self.go = asyncio.Event(), asyncio.Event()
        self.error: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dd, name)

    async def link(self, info: adt.ClusterInfo, **options: Any) -> adt.Link:
        self.asked.set()
        await self.go.wait()
        if self.error is not None:
            raise self.error
        return await self._dd.link(info, **options)


@pytest.mark.loop
async def test_nobody_is_ready_before_all_are_linked(name: str) -> None:
    async with nodes(1, 2, 3) as members:
        first, _, third = members
        held = third.communicators._dd = Held(third.dd)  # type: ignore[assignment]
        for node in members:
            await node.link(name, {1: 0, 2: 1, 3: 2}, *"aaa")
        await held.asked.wait()
        await until(lambda: first.communicators._all[1].linked == {2})
        assert all(node.has(1, RegisterMemStatus.PREPARING) for node in members)
        held.go.set()
        for node in members:
            await node.until(1)
            assert len(node.dd.links) == 2


@pytest.mark.loop
async def test_one_that_cannot_link_fails_all_at_once(name: str, llm_log: list[str]) -> None:
    async with nodes(1, 2, 3) as members:
        held = members[2].communicators._dd = Held(members[2].dd)  # type: ignore[assignment]
        held.error = adt.LinkError("as the test wants")
        for node in members:
            await node.link(name, {1: 0, 2: 1, 3: 2}, *"aaa")
        await until(lambda: members[0].communicators._all[1].linked == {2})
        held.go.set()
        for node in members:
            await node.until(1, RegisterMemStatus.FAILED)
        assert sorted(line.partition("not linked: ")[2] for line in llm_log) == [
            "as the test wants",
            "cluster 1 left before all were linked",
            "cluster 3 left before all were linked",
        ]


@pytest.mark.loop
async def test_other_ranks_are_refused(name: str, llm_log: list[str]) -> None:
    async with nodes(1, 2, 3) as (first, second, third):
        await first.link(name, {1: 0, 2: 1, 3: 2}, *"aaa")
        await second.link(name, {1: 0, 3: 1, 2: 2}, *"aaa")
        await second.until(1, RegisterMemStatus.FAILED)
        assert "cluster 1 refuses: cluster_rank_info is" in llm_log[-1]
        await second.communicators.unlink(1)
        for node in (second, third):
            await node.link(name, {1: 0, 2: 1, 3: 2}, *"aaa")
        for node, comm_id in ((first, 1), (second, 2), (third, 1)):
            await node.until(comm_id)


@pytest.mark.loop
async def test_a_taken_port_is_an_error_at_the_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with nodes(1) as (node,):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            monkeypatch.setenv("HCCL_IF_BASE_PORT", str(taken.getsockname()[1]))
            with pytest.raises(LLMException, match=r"members cannot come to 127\.0\.0\.1:") as caught:
                await node.link(name, {1: 0, 2: 1}, "127.0.0.1", "127.0.0.2")
        assert caught.value.status_code == LLMStatusCode.LLM_LINK_FAILED
        assert not node.communicators._places
        # Nothing of it is left, not even the number.
        with base_port(monkeypatch):
            await node.link(name, {1: 0, 2: 1}, "127.0.0.1", "127.0.0.2")


@pytest.mark.loop
@pytest.mark.parametrize("said", [b"", b"\n", b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b"x" * 70_000])
async def test_strangers_do_no_harm(said: bytes, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with base_port(monkeypatch):
        async with nodes(1, 2) as both:
            await both[0].link(name, {1: 0, 2: 1}, "127.0.0.1", "127.0.0.2")
            place = next(place for place in both[0].communicators._places if isinstance(place, adt.Address))
            reader, writer = await asyncio.open_connection(*place)
            writer.write(said)
            if said:
                assert await reader.read() == b""
            await both[1].link(name, {1: 0, 2: 1}, "127.0.0.1", "127.0.0.2")
            for node in both:
                await node.until(1)
            writer.close()


@pytest.mark.loop
async def test_a_crowd_does_not_grow(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiodatadist.llm_datadist.communicators._MOST_GUESTS", 3)
    with base_port(monkeypatch):
        async with nodes(1, 2) as both:
            await both[0].link(name, {1: 0, 2: 1}, "127.0.0.1", "127.0.0.2")
            place = next(place for place in both[0].communicators._places if isinstance(place, adt.Address))
            silent = [await asyncio.open_connection(*place) for _ in range(3)]
            await until(lambda: both[0].communicators._guests == 3)
            reader, writer = await asyncio.open_connection(*place)
            assert await reader.read() == b""
            silent.append((reader, writer))
            await both[1].link(name, {1: 0, 2: 1}, "127.0.0.1", "127.0.0.2")
            for _, writer in silent:
                writer.close()
            for node in both:
                await node.until(1)


# By LLMDataDist. ----------------------------------------------------------------------------------------------


def test_the_calls_of_a_node(name: str) -> None:
    with opened(1) as one:
        with pytest.raises(LLMException) as caught:
            one.link(name, {2: 0, 3: 1}, GOOD)
        assert caught.value.status_code == INVALID
        for comm_id in (1, 2):
            assert one.link(f"{name}{comm_id}", {1: 0, 2: 1}, GOOD) == comm_id
            assert one.query_register_mem_status(comm_id) is RegisterMemStatus.PREPARING
        for call in (one.unlink, one.query_register_mem_status):
            for wrong, error in (("1", TypeError), (None, TypeError), (-1, ValueError), (2**64, ValueError)):
                with pytest.raises(error):
                    call(wrong)  # type: ignore[arg-type]
            with pytest.raises(LLMException) as caught:
                call(3)
            assert caught.value.status_code == LLMStatusCode.LLM_NOT_YET_LINK
        one.unlink(1)
        with pytest.raises(LLMException) as caught:
            one.query_register_mem_status(1)
        assert caught.value.status_code == LLMStatusCode.LLM_NOT_YET_LINK
        assert one.query_register_mem_status(2) is RegisterMemStatus.PREPARING
        # Ids go on until the node is opened anew. The second one still waits when it is closed.
        assert one.link(f"{name}1", {1: 0, 2: 1}, GOOD) == 3
    with opened(1) as one:
        assert one.link(f"{name}1", {1: 0, 2: 1}, GOOD) == 1


def test_what_is_linked_moves_blocks_both_ways(name: str) -> None:
    with opened(1) as first, opened(2) as second:
        both = [(first, Memory(first, seed=1)), (second, Memory(second, seed=2))]
        for one, _ in both:
            assert one.link(name, {1: 0, 2: 1}, GOOD) == 1
        for one, _ in both:
            until_now(lambda one=one: one.query_register_mem_status(1) is RegisterMemStatus.OK)
        for (one, mine), (other, theirs) in (both, both[::-1]):
            one.cache_manager.pull_blocks(BlocksCacheKey(other.cluster_id), mine.cache, [3], [5])
            assert all((here[5] == there[3]).all() for here, there in zip(mine.tensors, theirs.tensors, strict=True))
        # Caches that come later are not for peers, unless the node is opened anew.
        late = Memory(first, model=1)
        with pytest.raises(LLMException) as caught:
            second.cache_manager.pull_blocks(BlocksCacheKey(1, 1), both[1][1].cache, [0], [0])
        assert caught.value.status_code == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
        with pytest.raises(LLMException) as caught:
            first.cache_manager.pull_blocks(BlocksCacheKey(2), late.cache, [0], [0])
        assert caught.value.status_code == INVALID
        for one, _ in both:
            one.unlink(1)
            assert not linked_ids(one)


def test_not_with_hixl(name: str) -> None:
    with opened(1, transfer_backend="hixl", enable_remote_cache_accessible=True, listen_ip_info="127.0.0.1:0") as one:
        for call in (
            lambda: one.link(name, {1: 0, 2: 1}, GOOD),
            lambda: one.unlink(1),
            lambda: one.query_register_mem_status(1),
        ):
            with pytest.raises(LLMException) as caught:
                call()
            assert caught.value.status_code == LLMStatusCode.LLM_FEATURE_NOT_ENABLED


@pytest.fixture
def llm_log(caplog: pytest.LogCaptureFixture) -> Any:
    """Return what the drop-in logs."""
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("LLM_DATADIST"), Lines()
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)
