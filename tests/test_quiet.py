"""Done means quiet: once a transfer has ended, in whatever way, the library never touches the caller's memory again."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import random
import socket
import stat
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import anyio
import numpy as np
import pytest

import aiodatadist as adt
from aiodatadist import _core

from . import quiet
from .endless import Endless
from .hixl_standin import HIXL
from .peers import PeerFailure, PeerProcess, rows, spawn
from .quiet import PATHS, same_at
from .waiting import PATIENCE, until

LINK_ENDED = ("PeerLostError", "ClosedError", "NotLinkedError", "LinkError")
_ids = itertools.count(1000)
VERBS = pytest.param("verbs", marks=pytest.mark.verbs)
EVERY_PATH = pytest.mark.parametrize("path", [*PATHS, VERBS, HIXL])


# Cancels, deadlines, closings and kills at random moments. ------------------------------------------------------------


@pytest.mark.loop
@pytest.mark.sanitize
@pytest.mark.parametrize("drain_timeout", [1.0, 0.0])
@EVERY_PATH
async def test_u1_memory_is_quiet_after_a_cancel_or_a_deadline(path: str, drain_timeout: float, scale: Any) -> None:
    # Over HIXL fewer, because the suite should cost no more for it.
    rounds = scale(150 if path == "hixl" else 500, least=40)
    # What drains and what is flushed is a matter of the moment for verbs: many cancels, beside the other ends.
    cancels = scale(1000, least=200) if path == "verbs" else 1
    async with quiet.bench(path, drain_timeout=drain_timeout) as bench:

        def seeds() -> Iterator[int]:
            """So many, and more until every kind of end was met, without which the rounds would prove nothing."""
            first, tally = 1_000_000 * (*PATHS, "verbs", "hixl").index(path), bench.tally
            for seed in itertools.count(first):
                met = tally.midway and all(tally.ends[end] for end in ("cancelled", "TransferTimeout", "ok"))
                met = met and tally.ends["cancelled"] >= cancels
                if seed - first >= rounds and met:
                    return
                yield seed

        tally = await bench.rounds(seeds())
    assert tally.rounds >= rounds


@pytest.mark.loop
@pytest.mark.sanitize
@EVERY_PATH
async def test_memory_is_quiet_after_the_datadist_or_the_link_has_ended(path: str, scale: Any) -> None:
    tally = quiet.Tally()
    rounds = scale(3 * len(quiet.ENDINGS), least=4)
    # On an idle machine most transfers are over before the ending comes: go on until some were not, to prove something.
    for seed in itertools.count():
        tally += await quiet.ending_round(path, seed)
        if seed + 1 >= rounds and tally.rounds > tally.ends["ok"] > 0:
            break


@EVERY_PATH
async def test_t8_u1_memory_is_quiet_after_the_peer_was_killed(path: str, scale: Any) -> None:
    kills = scale(5 if path == "hixl" else 17, least=3)
    async with quiet.kill_bench(path) as bench:
        # As above: few kills may all come too late to meet a running transfer.
        for seed in itertools.count():
            await bench.kill(seed)
            if seed + 1 >= kills and bench.tally.ends["PeerLostError"] > 0:
                break


# One of many. ---------------------------------------------------------------------------------------------------------


def _sockets() -> set[str]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if target.startswith("socket:"):
                found.add(target)
    return found


@pytest.mark.loop
@pytest.mark.parametrize("end", ["cancel", "deadline"])
@pytest.mark.parametrize("drain_timeout", [1.0, 0.0])
@EVERY_PATH
async def test_ending_1_of_20_pulls_leaves_19_and_the_connections(
    path: str, drain_timeout: float, end: str, scale: Any
) -> None:
    cut_short = 0
    async with quiet.bench(path, lanes=20, drain_timeout=drain_timeout) as bench:
        before, epoch = _sockets(), bench.link.epoch
        rebuilt = _core.rdma_stats()["rebuilds"]
        blocks = np.random.default_rng(0).permutation(bench.lane_blocks)
        for turn in itertools.count():
            if turn >= scale(4, least=2) and cut_short:
                break  # else each was over before it was ended, which proves nothing
            for lane in bench.lanes:
                lane.fill()
            victim = random.Random(turn).randrange(20)
            pulls = [
                bench.manager.pull_blocks(
                    bench.source_key,
                    bench.local,
                    lane.first + blocks,
                    lane.first + blocks[::-1],
                    timeout=0.0005 if end == "deadline" and index == victim else 60.0,
                )
                for index, lane in enumerate(bench.lanes)
            ]
            await quiet.pause(random.Random(turn).choice((0.0, quiet.TURN, 0.001)))
            if end == "cancel":
                pulls[victim].cancel()
            ends = await asyncio.gather(*pulls, return_exceptions=True)
            cut_short += ends[victim] is not None
            bench.lanes[victim].fill()
            for index, lane in enumerate(bench.lanes):
                if index != victim:
                    assert ends[index] is None, (turn, index, ends[index])
                    for local, source in zip(lane.local, lane.source, strict=True):
                        assert (local[blocks[::-1]] == source[blocks]).all(), (turn, index)
            bench.lanes[victim].check("after the other 19 had ended")
        assert bench.link.state is adt.LinkState.READY
        assert bench.mine.links[bench.theirs.cluster_id] is bench.link
        assert bench.link.epoch == epoch
        # HIXL can end what does not drain only with its connection, and makes another.
        assert _sockets() == before or (path, drain_timeout) == ("hixl", 0.0)
        if drain_timeout:
            assert _core.rdma_stats()["rebuilds"] == rebuilt


@pytest.mark.loop
@EVERY_PATH
async def test_u2_a_fence_waits_for_what_runs(path: str, scale: Any) -> None:
    async with quiet.bench(path, lanes=2, inline_bytes=0) as bench:
        blocks = np.random.default_rng(0).permutation(2 * bench.lane_blocks)
        for turn in range(scale(50, least=10)):
            for rows_ in bench.local_rows:
                rows_[:] = turn % quiet.FENCED
            pushes = [bench.manager.push_blocks(bench.target_key, bench.local, blocks, blocks) for _ in range(2)]
            assert not pushes[1].done()  # the loop has not turned since
            await bench.theirs.fence(bench.mine.cluster_id)
            for target in bench.target_rows:
                target[:] = quiet.FENCED
            await asyncio.gather(*pushes)
            await quiet.pause(0.001)
            assert all(same_at(target, quiet.FENCED) for target in bench.target_rows), turn


# Waiting. -------------------------------------------------------------------------------------------------------------


@pytest.mark.loop
async def test_a_task_cancelled_before_its_first_step_waits_for_the_end() -> None:
    async with quiet.bench("ordinary", lanes=1, inline_bytes=0) as bench:
        endless = await Endless(bench.theirs, bench.mine).ready()

        async def running() -> adt.Transfer[None]:
            transfer = endless.start()
            await until(lambda: transfer.progress.bytes_done)
            return transfer

        def quiet_now(transfer: adt.Transfer[None]) -> None:
            assert transfer.cancelled()
            endless.memory[:] = 0xEE

        transfer = await running()
        task = asyncio.create_task(transfer.wait())
        task.cancel("why")
        await asyncio.wait((task,))
        quiet_now(transfer)
        assert task.cancelled()
        await asyncio.sleep(0.01)
        assert same_at(endless.memory, 0xEE)

        transfer = await running()
        with pytest.raises(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                group.create_task(transfer.wait())
                raise ZeroDivisionError
        quiet_now(transfer)

        transfer = await running()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(transfer.wait(), 0)
        quiet_now(transfer)
        await asyncio.sleep(0.01)
        assert same_at(endless.memory, 0xEE)

        transfer = bench.manager.pull_blocks(bench.source_key, bench.local, [0], [0])
        await transfer.wait()
        task = asyncio.create_task(transfer.wait())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not transfer.cancelled()
        transfer.wait().close()


@pytest.mark.loop
async def test_u4_dropping_a_transfer_changes_nothing() -> None:
    async with quiet.bench("ordinary", lanes=1, inline_bytes=0) as bench:
        (lane,) = bench.lanes
        for _ in range(20):
            bench.manager.pull_blocks(  # type: ignore[unused-awaitable]
                bench.source_key, bench.local, range(quiet.LANE_BLOCKS), range(quiet.LANE_BLOCKS)
            )
            gc.collect()
        while bench.mine.dump():
            await asyncio.sleep(0.001)
        for local, source in zip(lane.local, lane.source, strict=True):
            assert (local == source).all()


# Stopped processes. ---------------------------------------------------------------------------------------------------
#
# Fast: every limit here is far below the time that the peer stays stopped, and above what a busy machine keeps a thread
# waiting.

# Small blocks in any order: a batch is many pieces then, and the peer is stopped between two of them.
SHAPE = (2048, 1024)
TENSORS = 2
HEARTBEAT = 1.5
DRAIN = 0.1
FAST: dict[str, Any] = {"heartbeat_limit": HEARTBEAT, "drain_timeout": DRAIN}
LONGER_THAN_ALL = HEARTBEAT + 5 * DRAIN
DATA, AGAIN, PATTERN = 0x11, 0x22, 0xEE


class Stopped:
    """This process, with two caches that a peer process pushes to or pulls from, and the peer is stopped then.

    Attributes
    ----------
    bytes : list of list of arrays
        The memory of both caches, which outlives them.
    """

    def __init__(self, dd: adt.DataDist, peer: PeerProcess, memory: str) -> None:
        self.dd = dd
        self.peer = peer
        self.caches: list[adt.Cache] = []
        self.bytes: list[list[quiet.Bytes]] = []
        for model_id in (1, 2):
            key = adt.BlocksCacheKey(dd.cluster_id, model_id=model_id)
            if memory == "library":
                cache = dd.cache_manager.allocate_blocks_cache(adt.CacheDesc(TENSORS, SHAPE, "uint8"), key=key)
            else:
                tensors = [np.zeros(SHAPE, np.uint8) for _ in range(TENSORS)]
                cache = dd.cache_manager.register_blocks_cache(tensors, key=key)
            self.caches.append(cache)
            self.bytes.append(rows(cache))

    async def begin(self, kind: str, memory: str, rng: random.Random) -> None:
        """Have the peer transfer in both caches, and stop it in the middle."""
        for name in ("first", "second"):
            await self.peer.cache(name, tensors=TENSORS, shape=SHAPE, memory=memory, model_id=None, value=DATA)
        await self.dd.link(self.peer.info)
        self.traffic = []
        for model_id, name in ((1, "first"), (2, "second")):
            arguments = {"kind": kind, "name": name, "cluster_id": self.dd.cluster_id, "model_id": model_id}
            arguments["blocks"] = [np.random.default_rng(seed).permutation(SHAPE[0]).tolist() for seed in (1, 2)]
            self.traffic.append(await self.peer.call("begin_traffic", depth=3, **arguments))
        while not all([(await self.peer.call("traffic", number=number))["done"] > 2 for number in self.traffic]):
            await asyncio.sleep(0.001)
        await asyncio.sleep(rng.uniform(0, 0.02))
        self.peer.stop()

    def reuse(self, index: int) -> None:
        for view in self.bytes[index]:
            view[:] = PATTERN

    def check(self, *indices: int) -> None:
        for index in indices:
            for view in self.bytes[index]:
                wrong = int(np.count_nonzero(view != PATTERN))
                assert wrong == 0, f"cache {index + 1}: {wrong} bytes were written after it was given back"

    async def wake(self, kind: str, *indices: int) -> None:
        """Wake the peer, and check for a while that nothing lands in these caches, or is taken from them."""
        self.peer.resume()
        for _ in range(5):
            await asyncio.sleep(0.03)
            self.check(*indices)
        await self.no_pattern(kind, *indices)

    async def no_pattern(self, kind: str, *indices: int) -> None:
        if kind == "pull":
            for index in indices:
                name = ("first", "second")[index]
                assert await self.peer.call("count", name=name, value=PATTERN) == 0

    async def errors(self) -> set[str | None]:
        """Return how the peer's transfers have ended."""
        found = set()
        for number in self.traffic:
            async with asyncio.timeout(PATIENCE):
                while (error := (await self.peer.call("traffic", number=number))["error"]) is None:
                    await asyncio.sleep(0.005)
            found.add(error)
        return found


@contextlib.asynccontextmanager
async def stopped(path: str, kind: str, seed: int, **options: Any) -> AsyncIterator[Stopped]:
    """Open, link, and stop the peer in the middle of its transfers. Leaving closes by force if need be."""
    memory = "ordinary" if path == "ordinary" else "library"
    config = quiet.config_of(path, **{**FAST, **options})
    peer_id = next(_ids)
    async with spawn(peer_id, transports=config.transports, **{**FAST, **options}) as peer:
        dd = adt.DataDist(next(_ids), listen="127.0.0.1:0", config=config)
        await dd.open()
        try:
            case = Stopped(dd, peer, memory)
            await case.begin(kind, memory, random.Random(seed))
            yield case
        finally:
            peer.kill()
            dd.abort()
            async with asyncio.timeout(PATIENCE):
                await dd.wait_closed()


async def _together(case: Callable[[int], Any], count: int) -> None:
    """Run so many at a time: they wait more than they work."""
    async with asyncio.TaskGroup() as group:
        for seed in range(count):
            group.create_task(case(seed))


@pytest.mark.parametrize("kind", ["push", "pull"])
@pytest.mark.parametrize("path", ["library", "ordinary"])
async def test_shm_memory_is_not_given_back_while_a_stopped_peer_may_touch_it(path: str, kind: str, scale: Any) -> None:
    async def case(seed: int) -> None:
        async with stopped(path, kind, seed) as c:
            manager, peer_id = c.dd.cache_manager, c.peer.cluster_id
            late, exposed = await asyncio.gather(
                c.dd.fence(peer_id, timeout=LONGER_THAN_ALL),
                manager.unregister_cache(c.caches[1], timeout=LONGER_THAN_ALL),
                return_exceptions=True,
            )
            assert isinstance(late, adt.LinkTimeout), late
            assert isinstance(exposed, adt.MemoryStillExposed), exposed
            await until(lambda: peer_id not in c.dd.links)  # silent for longer than the heartbeat limit
            assert len(c.caches[1].tensors) == TENSORS  # referenced until it is quiet
            waiting = [c.dd.fence(peer_id, timeout=None), manager.unregister_cache(c.caches[1])]
            await asyncio.sleep(0.05)
            assert not any(wait.done() for wait in waiting)
            c.peer.resume()
            async with asyncio.timeout(PATIENCE):
                await waiting[0]
                c.reuse(0)
                await waiting[1]
            c.reuse(1)
            assert c.caches[1].tensors == ()
            await c.wake(kind, 0, 1)
            assert await c.errors() <= {*LINK_ENDED, "CacheNotFound"}
            await c.no_pattern(kind, 0, 1)
            c.check(0, 1)

    await _together(case, scale(4))


@pytest.mark.parametrize("kind", ["push", "pull"])
async def test_closing_names_the_caches_that_a_stopped_peer_may_touch(kind: str, scale: Any) -> None:
    async def case(seed: int) -> None:
        async with stopped("library", kind, seed) as c:
            closing = [c.dd.aclose(0.2), c.dd.aclose(0.3)] if seed % 2 else [c.dd.aclose(0.2)]
            ends = await asyncio.gather(*closing, return_exceptions=True)
            for end in ends:
                assert isinstance(end, adt.MemoryStillExposed), end
                assert len(end.caches) == 2, end.caches
                for cache in c.caches:
                    assert any(repr(cache) == name for name in end.caches), end.caches
            assert all(len(cache.tensors) == TENSORS for cache in c.caches)
            waiting = asyncio.create_task(c.dd.wait_closed())
            await asyncio.sleep(LONGER_THAN_ALL if seed % 3 == 0 else 0.05)
            assert not waiting.done()
            c.peer.resume()
            async with asyncio.timeout(PATIENCE):
                await waiting
            for index in (0, 1):
                c.reuse(index)
            assert all(cache.tensors == () for cache in c.caches)
            await c.wake(kind, 0, 1)
            assert await c.errors() <= {*LINK_ENDED}
            c.check(0, 1)

    await _together(case, scale(4))


@pytest.mark.parametrize("path", ["library", "ordinary"])
async def test_the_exit_of_a_stopped_peer_gives_the_memory_back(path: str, scale: Any) -> None:
    async def case(seed: int) -> None:
        async with stopped(path, "push", seed) as c:
            peer_id = c.peer.cluster_id
            with pytest.raises(adt.LinkTimeout):
                await c.dd.fence(peer_id, timeout=LONGER_THAN_ALL if seed % 2 else 0.1)
            waiting = [c.dd.fence(peer_id, timeout=None), c.dd.cache_manager.unregister_cache(c.caches[1])]
            await asyncio.sleep(0.05)
            assert not any(wait.done() for wait in waiting)
            c.peer.kill()
            async with asyncio.timeout(PATIENCE):
                await asyncio.gather(*waiting)
            for index in (0, 1):
                c.reuse(index)
            await asyncio.sleep(0.1)
            c.check(0, 1)

    await _together(case, scale(4))


@pytest.mark.parametrize("kind", ["push", "pull"])
@pytest.mark.parametrize("heartbeat", [HEARTBEAT, 60.0])
async def test_tcp_memory_is_given_back_without_waiting_for_a_stopped_peer(
    kind: str, heartbeat: float, scale: Any
) -> None:
    async def case(seed: int) -> None:
        async with stopped("tcp", kind, seed, heartbeat_limit=heartbeat) as c:
            manager, peer_id = c.dd.cache_manager, c.peer.cluster_id
            # The peer stays stopped until all this is over.
            async with asyncio.timeout(PATIENCE):
                if seed % 2:
                    await c.dd.fence(peer_id)
                    c.reuse(0)
                await manager.unregister_cache(c.caches[1])
                c.reuse(1)
                if not seed % 2:
                    await c.dd.fence(peer_id)
                    c.reuse(0)
            if heartbeat == 60.0:
                assert peer_id in c.dd.links
            if heartbeat == 60.0:
                # Of the link nothing is lost, so that new operations of the peer may touch what was only fenced.
                assert peer_id in c.dd.links
                await c.wake(kind, 1)
                assert c.dd.links[peer_id].state is adt.LinkState.READY
            else:
                await until(lambda: peer_id not in c.dd.links)
                c.check(0, 1)
                await c.wake(kind, 0, 1)
                assert await c.errors() <= {*LINK_ENDED, "CacheNotFound", "TransferAborted"}
                c.check(0, 1)

    await _together(case, scale(4))


@pytest.mark.parametrize("kind", ["push", "pull"])
async def test_a_fence_over_tcp_ends_a_transfer_of_a_stopped_peer_and_not_the_link(kind: str, scale: Any) -> None:
    config = quiet.config_of("tcp", drain_timeout=DRAIN, heartbeat_limit=60.0)
    shape = (16384, 1024)
    aborted = 0
    async with (
        spawn(next(_ids), transports=("tcp",)) as peer,
        adt.DataDist(next(_ids), listen="127.0.0.1:0", config=config) as dd,
    ):
        memory = np.zeros(shape, np.uint8)
        cache = dd.cache_manager.register_blocks_cache([memory], key=adt.BlocksCacheKey(dd.cluster_id))
        await cache.ready()
        await peer.cache("kv", tensors=1, shape=shape, model_id=None, value=DATA)
        link = await dd.link(peer.info)
        blocks = [np.random.default_rng(seed).permutation(shape[0]).tolist() for seed in (1, 2)]
        arguments = {"kind": kind, "name": "kv", "cluster_id": dd.cluster_id, "blocks": blocks}
        for seed in itertools.count():
            if seed >= scale(10) and aborted:
                break  # else all were over before the stop, which proves nothing
            memory[:] = DATA
            begin = "kept['running'] = peer._start(kind, 'kv', to, 0, blocks, None)"
            if seed % 2 == 0:
                await peer.run_and_stop(begin, kind=kind, to=dd.cluster_id, blocks=blocks)
            else:
                # It has begun when this returns, and may be over before the stop.
                await peer.run(begin, kind=kind, to=dd.cluster_id, blocks=blocks)
                await asyncio.sleep(random.Random(seed).uniform(0.0, 0.008))
                peer.stop()
            async with asyncio.timeout(PATIENCE):
                await dd.fence(peer.cluster_id)
            memory[:] = PATTERN
            peer.resume()
            transfer = peer.post("run", source="await kept['running']")
            await asyncio.wait((transfer,))
            end = transfer.exception()
            if isinstance(end, PeerFailure) and end.kind == "TransferAborted":
                aborted += 1
            else:
                assert end is None, end
            await asyncio.sleep(0.01)
            if kind == "pull":
                assert end is not None or await peer.call("count", name="kv", value=PATTERN) == 0
            assert same_at(memory, PATTERN)
            assert dd.links[peer.cluster_id] is link
            memory[:] = 0x22
            await peer.call("fill", name="kv", value=0x22)
            await peer.call("transfer", **arguments)
            assert same_at(memory, 0x22)
            await peer.call("fill", name="kv", value=DATA)


def _shrink_send_buffers() -> None:
    """Have no frame fit into the kernel as a whole."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # gone by now
            if not stat.S_ISSOCK(os.stat(int(fd)).st_mode):
                continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(fd))) as sock:
            if sock.family == socket.AF_INET and sock.type == socket.SOCK_STREAM:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 * 1024)


@pytest.mark.loop
@pytest.mark.parametrize("kind", ["push", "pull"])
async def test_u8_a_cancel_that_does_not_drain_ends_by_force(kind: str, scale: Any) -> None:
    """The peer does not answer: anyio asks again in every turn of the loop until force has ended the transfer."""
    config = quiet.config_of("tcp", drain_timeout=0.15, heartbeat_limit=60.0)
    async with (
        spawn(next(_ids), transports=("tcp",)) as peer,
        adt.DataDist(next(_ids), config=config) as dd,
    ):
        shape = (16384, 1024)
        await peer.cache("kv", tensors=2, shape=shape, model_id=1, value=DATA)
        cache = dd.cache_manager.register_blocks_cache([np.zeros(shape, np.uint8) for _ in range(2)])
        await cache.ready()
        link = await dd.link(peer.info)
        _shrink_send_buffers()
        key = adt.BlocksCacheKey(peer.cluster_id, model_id=1)
        order = np.random.default_rng(0).permutation(shape[0])
        for turn in range(scale(6)):
            for view in rows(cache):
                view[:] = DATA
            start = dd.cache_manager.pull_blocks if kind == "pull" else dd.cache_manager.push_blocks
            # A peer that is stopped before leaves the wire full; one that is stopped later, in the middle of a frame.
            if turn % 2 == 0:
                peer.stop()
            half = [start(key, cache, part, part) for part in (order[: shape[0] // 2], order[shape[0] // 2 :])]
            await asyncio.sleep(random.Random(turn).uniform(0.0, 0.004))
            if turn % 2 == 1:
                peer.stop()
            turns = 0

            async def count(half: list[adt.Transfer[None]] = half) -> None:
                nonlocal turns
                while not all(transfer.done() for transfer in half):
                    turns += 1
                    await asyncio.sleep(0)

            counting = asyncio.create_task(count())
            with anyio.move_on_after(0.02) as scope:
                await half[0]
            ended = half[0].done()
            with anyio.move_on_after(0.02):
                async with anyio.create_task_group() as group:
                    group.start_soon(half[1].wait)
            assert ended
            assert half[1].done()
            for view in rows(cache):
                view[:] = PATTERN
            await counting
            if scope.cancelled_caught:
                assert half[0].cancelled()
            if turn % 2 == 0:
                assert scope.cancelled_caught
                assert turns > 2  # it was slow, and the loop ran on, as often as the machine let it
            peer.resume()
            for _ in range(10):
                await asyncio.sleep(0.01)
                assert all(same_at(view, PATTERN) for view in rows(cache))
            # What was forced off the wire has left it in order: the link goes on.
            assert dd.links[peer.cluster_id] is link
            await peer.call("fence", cluster_id=dd.cluster_id)
            assert await peer.call("count", name="kv", value=PATTERN) == 0
            await peer.call("fill", name="kv", value=DATA)
            await dd.cache_manager.pull_blocks(key, cache, order, order)
            assert all(same_at(view, DATA) for view in rows(cache))


@pytest.mark.parametrize("kind", ["short", "long"])
async def test_a_push_is_not_overwritten_by_one_that_force_ended_before(kind: str, scale: Any) -> None:
    config = quiet.config_of("tcp", drain_timeout=0.01, heartbeat_limit=60.0)
    shape = (512, 32768)
    # The end of the first is written last.
    first, second = range(16), range(15 if kind == "short" else 12, 16)
    async with (
        spawn(next(_ids), transports=("tcp",)) as peer,
        adt.DataDist(next(_ids), config=config) as dd,
    ):
        await peer.cache("kv", tensors=2, shape=shape, model_id=1, value=0)
        cache = dd.cache_manager.register_blocks_cache([np.zeros(shape, np.uint8) for _ in range(2)])
        await cache.ready()
        await dd.link(peer.info)
        key = adt.BlocksCacheKey(peer.cluster_id, model_id=1)
        for _ in range(scale(20)):
            for view in rows(cache):
                view[:] = DATA
            peer.stop()
            with pytest.raises(adt.TransferTimeout):
                await dd.cache_manager.push_blocks(key, cache, first, first, timeout=0.001)
            for view in rows(cache):
                view[:] = AGAIN
            again = dd.cache_manager.push_blocks(key, cache, second, second, timeout=60.0)
            await asyncio.sleep(0.005)
            late = dd.cache_manager.push_blocks(key, cache, second, second, timeout=0.001)
            with pytest.raises(adt.TransferTimeout):
                await late
            cancelled = dd.cache_manager.push_blocks(key, cache, second, second, timeout=60.0)
            cancelled.cancel()
            await asyncio.wait((cancelled,))
            assert not again.done()
            peer.resume()
            await again
            await asyncio.sleep(0.005)
            arguments = {"name": "kv", "value": AGAIN, "blocks": list(second)}
            assert await peer.call("count", **arguments) == 2 * len(second) * shape[1]


async def test_tensors_outlive_a_datadist_that_was_dropped_while_exposed() -> None:
    """Nobody but the library holds the tensors, and a stopped peer may still write to them."""
    config = quiet.config_of("ordinary", **FAST)
    async with spawn(next(_ids), transports=("shm",), **FAST) as peer:
        dd = adt.DataDist(next(_ids), listen="127.0.0.1:0", config=config)
        await dd.open()
        tensors = [np.zeros(SHAPE, np.uint8) for _ in range(TENSORS)]
        alive = [weakref.ref(tensor) for tensor in tensors]
        cache = dd.cache_manager.register_blocks_cache(tensors, key=adt.BlocksCacheKey(dd.cluster_id))
        del tensors
        await cache.ready()
        await dd.link(peer.info)
        peer.stop()
        with pytest.raises(adt.MemoryStillExposed):
            await dd.aclose(0.1)
        closed = asyncio.create_task(dd.wait_closed())
        del cache
        gc.collect()
        assert all(ref() is not None for ref in alive)
        center = dd._center
        closed.cancel()
        await asyncio.wait((closed,))
        del dd, closed
        gc.collect()
        assert all(ref() is not None for ref in alive), "freed while a stopped peer could still write to it"
        peer.resume()
        async with asyncio.timeout(PATIENCE):
            await center.wait_closed()
        del center
        await until(lambda: (gc.collect(), all(ref() is None for ref in alive))[1])


async def test_a_failure_in_the_peer_comes_back_with_its_traceback() -> None:
    async with spawn(next(_ids)) as peer:
        with pytest.raises(PeerFailure, match=r"KeyError: 'nothing'") as caught:
            await peer.call("unregister", name="nothing")
        assert caught.value.kind == "KeyError"
        assert "peer_main.py" in str(caught.value)
