"""Lost peers: linking again in the background, unlinking what is dead, what waits for a handshake that dies."""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
from collections.abc import AsyncIterator

import anyio
import numpy as np
import pytest

import aiodatadist as adt
from aiodatadist.control import relink
from aiodatadist.control.relink import Backoff
from aiodatadist.types import LinkState, LinkStateChanged

from .peers import PeerProcess, spawn
from .test_hostile import BAD, CONFIG, VICTIM, attacker
from .waiting import PATIENCE, reserved_address, until

pytestmark = pytest.mark.loop

TRANSPORTS = [("shm", "tcp"), ("tcp",), pytest.param(("hixl",), marks=pytest.mark.hixl)]


@pytest.fixture(params=TRANSPORTS, ids=lambda names: names[0])
def transports(request: pytest.FixtureRequest) -> tuple[str, ...]:
    names: tuple[str, ...] = request.param
    return names


@pytest.fixture
async def dd(
    transports: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> AsyncIterator[adt.DataDist]:
    """Node 2, which listens, and links again within milliseconds."""
    monkeypatch.setattr(relink, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(relink, "LONGEST_PAUSE", 0.05)
    config = adt.Config(transports=transports, link_timeout=20.0)
    async with adt.DataDist(2, listen="127.0.0.1:0", config=config) as node:
        yield node
    # pytest keeps what fixtures gave, and nothing native may be left.
    request.node.funcargs.clear()


def cache_of(dd: adt.DataDist) -> adt.Cache:
    return dd.cache_manager.register_blocks_cache([np.zeros((64, 16384), np.uint8) for _ in range(4)], remote=None)


async def offer(peer: PeerProcess, value: int) -> None:
    await peer.cache("kv", value=value)


async def pull(dd: adt.DataDist, mine: adt.Cache) -> int:
    """Pull one block, and return the byte it is full of."""
    await dd.cache_manager.pull_blocks(adt.BlocksCacheKey(1), mine, [3], [5])
    block = mine.tensors[0][5]
    assert (block == block[0]).all()
    return int(block[0])


class Changes:
    """The changes of a link's state, as they come."""

    def __init__(self, dd: adt.DataDist) -> None:
        self._events = dd.events()
        self.seen: list[LinkStateChanged] = []

    async def until(self, new: LinkState, *, attempt: int | None = None) -> LinkStateChanged:
        with anyio.fail_after(PATIENCE):
            async for event in self._events:
                if isinstance(event, LinkStateChanged):
                    self.seen.append(event)
                    if event.new is new and attempt in (None, event.attempt):
                        return event
        raise AssertionError("the events ended")


# Linking again. ---------------------------------------------------------------------------------------------


async def test_p3_a_killed_peer_that_comes_back_is_linked_again_with_its_new_memory(
    dd: adt.DataDist, transports: tuple[str, ...]
) -> None:
    """faults.md P3: the table is the new incarnation's, and nothing is read at the old addresses."""
    with reserved_address() as address:
        await come_back(dd, address, transports)


async def come_back(dd: adt.DataDist, address: str, transports: tuple[str, ...]) -> None:
    mine = cache_of(dd)
    changes = Changes(dd)
    async with spawn(1, listen=address, transports=transports) as first:
        await offer(first, 0x11)
        link = await dd.link(first.info, auto_relink=True)
        assert await pull(dd, mine) == 0x11
        first.kill()
        lost = await changes.until(LinkState.BROKEN)
        assert (lost.attempt, lost.epoch) == (0, 1)
        # Nothing is queued for a link that is not there.
        with pytest.raises(adt.NotLinkedError):
            _ = dd.cache_manager.pull_blocks(adt.BlocksCacheKey(1), mine, [3], [5])
        failed = await changes.until(LinkState.BROKEN, attempt=3)
        assert "Connection refused" in failed.reason
    async with spawn(1, listen=address, transports=transports) as second:
        await second.run("kept['ballast'] = np.ones(1 << 20)")  # other memory at other places
        await offer(second, 0x22)
        ready = await changes.until(LinkState.READY, attempt=None)
        while ready.epoch == 1:
            ready = await changes.until(LinkState.READY)
        again = dd.links[1]
        assert again is not link
        assert (again.epoch, link.state, link.table) == (ready.epoch, LinkState.BROKEN, {})
        assert ready.attempt >= 4
        await until(lambda: adt.BlocksCacheKey(1) in again.table)
        assert await pull(dd, mine) == 0x22
        # Each attempt begins and ends, one after the other.
        attempts = [change for change in changes.seen if change.attempt]
        assert [change.attempt for change in attempts] == [
            number for number in range(1, ready.attempt + 1) for _ in range(2)
        ]
        assert {change.new for change in attempts[::2]} == {LinkState.LINKING}
        assert {change.new for change in attempts[1:-1:2]} == {LinkState.BROKEN}
        await dd.unlink(second.info)


async def test_p6_p7_after_a_relink_nothing_is_resumed(dd: adt.DataDist, transports: tuple[str, ...]) -> None:
    """faults.md P6, P7: what ran when the link broke has failed for good, and the next transfer begins anew."""
    mine = cache_of(dd)
    async with spawn(1, transports=transports) as peer:
        await offer(peer, 0x11)
        await dd.link(peer.info, auto_relink=True)
        changes = Changes(dd)
        key, all_blocks = adt.BlocksCacheKey(1), list(range(64))
        for number in itertools.count():
            old = dd.links[1]
            running = [dd.cache_manager.pull_blocks(key, mine, all_blocks, all_blocks) for _ in range(2)]
            await asyncio.sleep(0)
            old._channel.stream.close()
            results = await asyncio.gather(*running, return_exceptions=True)
            assert {type(result) for result in results} <= {adt.PeerLostError, type(None)}, results
            progress = [transfer.progress for transfer in running]
            for tensor in mine.tensors:
                tensor[:] = 0
            await changes.until(LinkState.READY)
            assert dd.links[1].epoch > old.epoch
            # A late byte of what has failed would show.
            assert not any(tensor.any() for tensor in mine.tensors)
            assert [transfer.progress for transfer in running] == progress
            await until(lambda: key in dd.links[1].table)
            assert await pull(dd, mine) == 0x11
            if number >= 3 and any(isinstance(result, adt.PeerLostError) for result in results):
                break
        await dd.unlink(peer.info)


async def test_the_side_that_asked_dials_and_both_may(dd: adt.DataDist, transports: tuple[str, ...]) -> None:
    async with spawn(1, transports=transports) as peer:
        await dd.link(peer.info, auto_relink=True)
        script = "await dd.link(adt.ClusterInfo(2, address), auto_relink=True)"
        await peer.run(script, address=str(dd.listen_address))
        changes = Changes(dd)
        for _ in range(8):
            await until(lambda: 1 in dd.links)
            dd.links[1]._channel.stream.close()
            await changes.until(LinkState.BROKEN)
            await changes.until(LinkState.READY)
        await until(lambda: 1 in dd.links)
        assert await peer.run("return sorted(dd.links)") == [2]
        # An end by one side is the end of it on both.
        await dd.unlink(peer.info)
        await asyncio.sleep(0.2)
        assert dd.links == {}
        assert await peer.run("return sorted(dd.links)") == []


@pytest.mark.parametrize("end_relink", [False, True])
async def test_the_background_tells_nothing_twice_while_the_peer_links_itself(
    monkeypatch: pytest.MonkeyPatch, end_relink: bool
) -> None:
    monkeypatch.setattr(relink, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(relink, "LONGEST_PAUSE", 0.05)
    async with adt.DataDist(VICTIM, listen="127.0.0.1:0", config=CONFIG) as victim:
        changes = Changes(victim)
        nowhere = adt.ClusterInfo(BAD, "127.0.0.1:1")
        async with attacker(victim):
            await victim.link(nowhere, auto_relink=True)
        await changes.until(LinkState.BROKEN)
        async with attacker(victim, ready=False) as peer:
            slot = victim._center.links._slots[BAD]
            # The background joins in. It may have been first, and was refused.
            await until(lambda: slot.attempt is not None and "the peer has made" in slot.attempt.stage)
            if end_relink:
                mine = victim.link(nowhere, auto_relink=False)
                await until(lambda: not [task for task in asyncio.all_tasks() if "relink" in task.get_name()])
            else:
                mine = victim.link(nowhere)
            await peer.table()
            assert (await mine).state is LinkState.READY
            await changes.until(LinkState.READY)
            await victim.unlink(nowhere, force=True)
        assert all(one.new is other.old for one, other in itertools.pairwise(changes.seen)), changes.seen


@pytest.mark.parametrize("end", ["unlink", "force", "peer unlinks", "peer closes", "auto_relink=False"])
async def test_what_ends_linking_again(dd: adt.DataDist, transports: tuple[str, ...], end: str) -> None:
    async with spawn(1, transports=transports) as peer:
        await dd.link(peer.info, auto_relink=True)
        match end:
            case "unlink" | "force":
                await dd.unlink(peer.info, force=end == "force")
            case "peer unlinks":
                await peer.call("unlink", cluster_id=2)
            case "peer closes":
                await peer.call("aclose")
            case _:
                await dd.link(peer.info, auto_relink=False)
                dd.links[1]._channel.stream.close()
        await until(lambda: not dd.links)
        await asyncio.sleep(0.15)
        assert dd.links == {}
        slot = dd._center.links._slots[1]
        assert (slot.relink, slot.attempt) == (None, None)
        assert [task for task in asyncio.all_tasks() if "relink" in task.get_name()] == []


async def test_unlinking_ends_an_attempt_to_link_again(dd: adt.DataDist, transports: tuple[str, ...]) -> None:
    changes = Changes(dd)
    async with spawn(1, transports=transports) as peer:
        await dd.link(peer.info, auto_relink=True)
        peer.kill()
        await changes.until(LinkState.LINKING, attempt=2)
        await dd.unlink(peer.info)
    await asyncio.sleep(0.1)
    assert [task for task in asyncio.all_tasks() if "relink" in task.get_name() or "attempt" in task.get_name()] == []
    assert not dd.dump()


async def test_closing_does_not_wait_for_attempts(transports: tuple[str, ...]) -> None:
    config = adt.Config(transports=transports)
    async with spawn(1, transports=transports) as peer, adt.DataDist(2, config=config) as dd:
        changes = Changes(dd)
        await dd.link(peer.info, auto_relink=True)
        peer.kill()
        await changes.until(LinkState.BROKEN)
        with anyio.fail_after(PATIENCE):
            await dd.aclose()


async def test_p2_a_call_tries_at_once_whatever_failed_before(
    dd: adt.DataDist, transports: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """faults.md P2: failures lengthen the pauses of the background only, and the peer is used again when it is back."""
    with reserved_address() as address:
        await try_at_once(dd, address, transports, monkeypatch)


async def try_at_once(
    dd: adt.DataDist, address: str, transports: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = Changes(dd)
    async with spawn(1, listen=address, transports=transports) as first:
        await dd.link(first.info, auto_relink=True)
        first.kill()
        await changes.until(LinkState.BROKEN, attempt=3)
    monkeypatch.setattr(relink, "LONGEST_PAUSE", 3600.0)
    monkeypatch.setattr(relink, "FIRST_PAUSE", 3600.0)
    await changes.until(LinkState.BROKEN, attempt=4)  # from here on the background waits for an hour
    for _ in range(3):
        with pytest.raises(adt.LinkError, match="Connection refused"):
            await dd.link(adt.ClusterInfo(1, address))
    async with spawn(1, listen=address, transports=transports) as second:
        link = await dd.link(adt.ClusterInfo(1, address))
        assert link.state is LinkState.READY
        monkeypatch.setattr(relink, "LONGEST_PAUSE", 0.05)
        # It is still held.
        dd.links[1]._channel.stream.close()
        await changes.until(LinkState.READY)
        await changes.until(LinkState.READY)
        await dd.unlink(second.info)


async def test_a_caller_who_knows_another_address_is_not_held_up_by_the_background(
    dd: adt.DataDist, transports: tuple[str, ...]
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        await _relink_to(dd, silent.getsockname(), transports)


async def _relink_to(dd: adt.DataDist, silent: tuple[str, int], transports: tuple[str, ...]) -> None:
    changes = Changes(dd)
    async with spawn(1, transports=transports) as peer:
        await dd.link(peer.info)
        # Where it is said to be now, nobody answers.
        assert await dd.link(adt.ClusterInfo(1, silent), auto_relink=True) is dd.links[1]
        dd.links[1]._channel.stream.close()
        await changes.until(LinkState.LINKING, attempt=1)
        await until(lambda: (slot := dd._center.links._slots[1]).attempt is not None and slot.attempt.greeted)
        given_up = dd.link(adt.ClusterInfo(1, silent))  # joins the background's attempt, and leaves it to it again
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        link = await dd.link(peer.info, auto_relink=True)
        assert link.state is LinkState.READY
        dd.links[1]._channel.stream.close()
        await changes.until(LinkState.READY)
        await changes.until(LinkState.READY)
        await dd.unlink(peer.info)


async def test_wrong_use(dd: adt.DataDist) -> None:
    with pytest.raises(adt.ArgumentError, match="no address of cluster 1 is given"):
        _ = dd.link(adt.ClusterInfo(1), auto_relink=True)
    with pytest.raises(adt.ArgumentTypeError, match="auto_relink"):
        _ = dd.link(adt.ClusterInfo(1, "127.0.0.1:1"), auto_relink=1)  # type: ignore[arg-type]
    with pytest.raises(adt.LinkError, match="Connection refused"):
        await dd.link(adt.ClusterInfo(1, "127.0.0.1:1"), auto_relink=True)
    assert dd._center.links._slots == {}  # what never was a link is not linked again
    own = await dd.link(adt.ClusterInfo(2), auto_relink=True)
    assert own.path.transport == "self"
    await dd.unlink(adt.ClusterInfo(2))


def test_pauses_double_up_to_a_limit_and_differ() -> None:
    random.seed(7)
    many = [Backoff(random.Random()) for _ in range(200)]
    for failures in range(20):
        most = min(relink.LONGEST_PAUSE, relink.FIRST_PAUSE * 2**failures)
        pauses = [backoff.pause() for backoff in many]
        assert most / 2 <= min(pauses) < 0.6 * most
        assert 0.9 * most < max(pauses) <= most
    backoff = many[0]
    for _ in range(5000):
        assert backoff.pause() <= relink.LONGEST_PAUSE
    backoff.reset()
    assert backoff.pause() <= relink.FIRST_PAUSE


async def test_a_peer_that_dies_at_each_link_gets_longer_pauses(
    dd: adt.DataDist, transports: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    steady = 3600.0
    monkeypatch.setattr(relink, "STEADY", steady)
    async with spawn(1, transports=transports) as peer:
        await dd.link(peer.info, auto_relink=True)
        wish = dd._center.links._slots[1].relink
        assert wish is not None
        changes = Changes(dd)
        for number in range(1, 4):
            dd.links[1]._channel.stream.close()
            await changes.until(LinkState.READY)
            assert wish.backoff._failures == number
        await dd.unlink(peer.info)


# Unlinking what is dead. ------------------------------------------------------------------------------------


async def test_unlinking_a_dead_peer_cleans_up_here(dd: adt.DataDist, transports: tuple[str, ...]) -> None:
    async with spawn(1, transports=transports) as peer:
        link = await dd.link(peer.info)
        peer.kill()
        await dd.unlink(peer.info)
        assert link.state in (LinkState.BROKEN, LinkState.CLOSED)
        assert dd.links == {}
        await dd.unlink(peer.info)
        await until(lambda: not len(dd._center.peers))


async def test_unlinking_a_stopped_peer_ends_the_link_and_says_that_it_did_not_answer(
    dd: adt.DataDist, transports: tuple[str, ...]
) -> None:
    async with spawn(1, transports=transports) as peer, spawn(3, transports=transports) as other:
        await offer(peer, 0x11)
        link, good = await dd.link(peer.info), await dd.link(other.info)
        await until(lambda: adt.BlocksCacheKey(1) in link.table)
        peer.stop()
        unlinking = dd.unlink(peer.info, timeout=0.3)
        await until(lambda: 1 not in dd.links)
        assert link.table == {} or link.state is LinkState.CLOSED
        # Nothing of it holds up the others.
        await dd.unlink(other.info)
        assert good.state is LinkState.CLOSED
        with pytest.raises(adt.LinkTimeout, match="unlink missed its deadline"):
            await unlinking
        assert link.state is LinkState.CLOSED
        peer.resume()
        with anyio.fail_after(PATIENCE):
            while await peer.run("return list(dd.links)"):
                await asyncio.sleep(0.01)
        assert (await dd.link(peer.info)).state is LinkState.READY
        await dd.unlink(peer.info)


async def test_a_peer_that_became_another_program_can_touch_nothing(
    dd: adt.DataDist, transports: tuple[str, ...]
) -> None:
    """Exec keeps the process, and so its pidfd silent, but not the memory that it had mapped."""
    shared = dd.cache_manager.allocate_blocks_cache(adt.CacheDesc(2, (64, 4096), "uint8"), key=adt.BlocksCacheKey(2))
    ordinary = dd.cache_manager.register_blocks_cache([np.zeros((64, 4096), np.uint8)])
    async with spawn(1, transports=transports) as peer:
        await peer.cache("kv", shape=(64, 4096), tensors=2)
        link = await dd.link(peer.info)
        if transports[0] == "shm" and link.path.memory["ordinary"] != "process_vm":
            pytest.skip(f"process_vm cannot be used here: {link.path.reasons}")
        await peer.run("while 2 not in dd.links or not dd.links[2].table: await asyncio.sleep(0.01)")
        await peer.call("transfer", kind="push", name="kv", cluster_id=2)
        running = await peer.call("begin_traffic", kind="push", name="kv", cluster_id=2)
        assert running
        _ = peer.post("run", source="import os\nos.execvp('sleep', ['sleep', '600'])")
        await until(lambda: not dd.links)
        with anyio.fail_after(30):
            await dd.fence(1)
            await dd.cache_manager.unregister_cache(ordinary)
            await dd.cache_manager.deallocate_cache(shared)
        assert len(dd._center.peers) == 0
        assert peer.alive


# Handshakes that die. ---------------------------------------------------------------------------------------

_DIES_AT_HELLO = """
import os, signal
async def on_connection(reader, writer):
    await reader.readexactly(64 + 4)
    os.kill(os.getpid(), signal.SIGKILL)
server = await asyncio.start_server(on_connection, "127.0.0.1", 0)
kept["server"] = server
return server.sockets[0].getsockname()[1]
"""


async def test_t4_a_peer_killed_after_the_first_frame_fails_all_who_wait(dd: adt.DataDist) -> None:
    """faults.md T4: each waiter has an error of its own, with its cause, and nothing is left pending."""
    async with spawn(9, listen=None) as peer:
        port = await peer.run(_DIES_AT_HELLO)
        waiters = [dd.link(adt.ClusterInfo(1, ("127.0.0.1", port)), timeout=None) for _ in range(20)]
        results = await asyncio.gather(*waiters, return_exceptions=True)
        assert {type(result) for result in results} == {adt.PeerLostError}, results
        assert len(set(map(id, results))) == len(results)
        assert all(result.peer == 1 for result in results)  # type: ignore[union-attr]
        assert not dd.dump()
        assert dd._center.links._slots == {}
