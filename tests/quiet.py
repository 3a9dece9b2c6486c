"""Rounds that try to catch the library touching memory after a transfer has ended: for `test_quiet` and `soak`.

Two DataDists, `mine` and `theirs`, and lanes: each lane has blocks of its own on both sides and transfers them, ending
the transfer by a cause and at a moment that follow from the round's seed. The moment the future is done, a callback
checks the data, if all went well, and fills the local blocks with a pattern. What a transfer may move is below 0x80
everywhere, and patterns are not, so:

* a pull that goes on writes into the pattern, which is checked a little later and before the lane's next round;
* a push that goes on reading carries pattern bytes into the other side's blocks, which never may hold one. After a
  fence those blocks, too, are filled with something that has to survive.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, TypeAlias

import anyio
import numpy as np

import aiodatadist as adt

from .peers import spawn
from .waiting import PATIENCE, until

PATHS = ("library", "ordinary", "tcp")
# Those that name a transport; the others are memory, moved by shm.
_TRANSPORTS = {"tcp": "tcp", "verbs": "verbs", "hixl": "hixl"}
# Small blocks: 1,024 of them in any order are a batch, so that a transfer takes many batches and long, and the filling
# and checking around it does not.
TENSORS = 4
LANE_BLOCKS = 4096
# Over verbs each block is a request of its own, and where there is no NIC the kernel makes packets of them.
LANE_BLOCKS_VERBS = 512
BLOCK_BYTES = 64
LANES = 4
_BRAKE_BLOCKS = 32 * LANE_BLOCKS
TURN = 0.00005  # a pause of this stands for one turn of the loop
DATA_LIMIT = 0x80
FENCED = 0x7F  # fills their blocks after a fence; no push carries it

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]


class Broken(AssertionError):
    """A rule was broken. The message names the seed."""


def same_at(view: Bytes, value: int) -> bool:
    """Say whether every byte has this value."""
    return bool((view == value).all())


@dataclasses.dataclass
class Tally:
    """What the rounds came to."""

    rounds: int = 0
    midway: int = 0
    ends: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    causes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    seconds: float = 0.0

    def __iadd__(self, other: Tally) -> Tally:
        self.rounds += other.rounds
        self.midway += other.midway
        self.ends += other.ends
        self.causes += other.causes
        self.seconds += other.seconds
        return self

    def __str__(self) -> str:
        rate = self.rounds / self.seconds if self.seconds else 0.0
        ends = ", ".join(f"{count} {end}" for end, count in sorted(self.ends.items()))
        return f"{self.rounds} rounds ({rate:.0f} a second), {self.midway} ended midway: {ends}"


# How a wait is ended. Each gets a transfer and a number of seconds, and returns when the wait is over. ----------------


async def pause(seconds: float) -> None:
    """Wait; what is shorter than the resolution of the loop's timers is counted in turns of the loop."""
    if seconds >= 0.001:
        await asyncio.sleep(seconds)
    else:
        for _ in range(round(seconds / TURN)):
            await asyncio.sleep(0)


async def cancel_transfer(transfer: adt.Transfer[None], seconds: float) -> None:
    await pause(seconds)
    done = transfer.done()
    assert transfer.cancel("first") is not done
    assert transfer.cancel("second") is not done
    (end,) = await asyncio.gather(transfer, return_exceptions=True)
    assert done or (isinstance(end, asyncio.CancelledError) and end.args == ("first",)), repr(end)


async def cancel_task(transfer: adt.Transfer[None], seconds: float) -> None:
    task = asyncio.create_task(transfer.wait())
    await pause(seconds)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def cancel_again_and_again(transfer: adt.Transfer[None], seconds: float) -> None:
    task = asyncio.create_task(transfer.wait())
    await pause(seconds)
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)
    await asyncio.gather(task, return_exceptions=True)


async def wait_for(transfer: adt.Transfer[None], seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(transfer, seconds)


async def asyncio_timeout(transfer: adt.Transfer[None], seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await transfer


async def failing_sibling(transfer: adt.Transfer[None], seconds: float) -> None:
    async def fail() -> None:
        await pause(seconds)
        raise ZeroDivisionError

    with contextlib.suppress(BaseExceptionGroup):
        async with asyncio.TaskGroup() as group:
            group.create_task(transfer.wait())
            group.create_task(fail())


async def gathered(transfer: adt.Transfer[None], seconds: float) -> None:
    both = asyncio.gather(transfer, pause(0), return_exceptions=True)
    await pause(seconds)
    both.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await both
    await asyncio.wait((transfer,))


async def move_on_after(transfer: adt.Transfer[None], seconds: float) -> None:
    with anyio.move_on_after(seconds):
        await transfer


async def fail_after(transfer: adt.Transfer[None], seconds: float) -> None:
    with contextlib.suppress(TimeoutError), anyio.fail_after(seconds):
        await transfer


async def anyio_group(transfer: adt.Transfer[None], seconds: float) -> None:
    with contextlib.suppress(ExceptionGroup):
        async with anyio.create_task_group() as group:
            group.start_soon(transfer.wait)
            await pause(seconds)
            group.cancel_scope.cancel()


async def to_the_end(transfer: adt.Transfer[None], seconds: float) -> None:
    await transfer


async def given_up(transfer: adt.Transfer[None], seconds: float) -> None:
    """Give the wait up, but not the transfer."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.shield(transfer), seconds)
    await asyncio.wait((transfer,))


Cause: TypeAlias = Callable[[adt.Transfer[None], float], Awaitable[None]]

CAUSES: tuple[Cause, ...] = (
    cancel_transfer,
    cancel_task,
    cancel_again_and_again,
    wait_for,
    asyncio_timeout,
    failing_sibling,
    gathered,
    move_on_after,
    fail_after,
    anyio_group,
    given_up,
    to_the_end,
)


# The bench. -----------------------------------------------------------------------------------------------------------


class Lane:
    """Blocks of its own on both sides, and one transfer at a time."""

    def __init__(self, bench: Bench, index: int) -> None:
        self.bench = bench
        self.first = index * bench.lane_blocks
        span = slice(self.first, self.first + bench.lane_blocks)
        self.local = [rows[span] for rows in bench.local_rows]
        self.source = [rows[span] for rows in bench.source_rows]
        self.target = [rows[span] for rows in bench.target_rows]
        self.pattern = DATA_LIMIT
        self.seed = -1
        self.cut = ""
        self.fill()

    def broken(self, what: str) -> Broken:
        return Broken(f"{what} (path {self.bench.path}, seed {self.seed}, {self.cut})")

    def fill(self) -> None:
        self.pattern = DATA_LIMIT | (self.pattern + 1) % 0x80
        for rows in self.local:
            rows[:] = self.pattern

    def check(self, when: str) -> None:
        """Check that nothing but us has touched the blocks."""
        for tensor, rows in enumerate(self.local):
            if not same_at(rows, self.pattern):
                wrong = np.argwhere(rows != self.pattern)
                raise self.broken(
                    f"{when}, {len(wrong)} bytes of the local blocks were written after the transfer had ended, the "
                    f"first at tensor {tensor}, block {wrong[0][0]}, byte {wrong[0][1]}"
                )
        for rows in self.target:
            if int(rows.max()) >= DATA_LIMIT:
                raise self.broken(f"{when}, local blocks were read after the push had ended")

    def start(
        self, rng: random.Random, timeout: float | None
    ) -> tuple[adt.Transfer[None], Callable[[adt.Transfer[None]], None]]:
        """Start a transfer; return it and what checks its data."""
        bench = self.bench
        size = bench.lane_blocks
        count = rng.choice((0, 1, size // 20, size * 3 // 10, size * 7 // 10, size, size, size))
        pull = rng.random() < 0.5
        if rng.random() < 0.75:
            order = np.random.default_rng(rng.getrandbits(64))
            here, there = order.permutation(size)[:count], order.permutation(size)[:count]
        else:
            here = np.arange(count) + rng.randint(0, size - count)
            there = np.arange(count) + rng.randint(0, size - count)
        value = rng.randrange(FENCED)
        self.cut = f"{'pull' if pull else 'push'} of {count} blocks"
        if pull:
            transfer = bench.manager.pull_blocks(
                bench.source_key, bench.local, self.first + there, self.first + here, timeout=timeout
            )
        else:
            for rows in self.local:
                rows[:] = value
            transfer = bench.manager.push_blocks(
                bench.target_key, bench.local, self.first + here, self.first + there, timeout=timeout
            )

        def verify(done: adt.Transfer[None]) -> None:
            if done.progress != (count * BLOCK_BYTES * TENSORS,) * 2:
                raise self.broken(f"ended well with {done.progress}")
            for local, source, target in zip(self.local, self.source, self.target, strict=True):
                if pull and not (local[here] == source[there]).all():
                    raise self.broken("a pull ended well with wrong data")
                if not pull and not same_at(target[there], value):
                    raise self.broken("a push ended well and its data is not there")

        return transfer, verify

    def watch(
        self,
        transfer: adt.Transfer[None],
        verify: Callable[[adt.Transfer[None]], None],
        allowed: tuple[type[BaseException], ...],
    ) -> list[str]:
        """Check the data and reuse the blocks the moment the future is done; the list is then filled with its end."""
        ends: list[str] = []

        def reuse(done: asyncio.Future[None]) -> None:
            assert isinstance(done, adt.Transfer)
            try:
                moved, whole = done.progress
                if 0 < moved < whole:
                    self.bench.tally.midway += 1
                if done.cancelled():
                    ends.append("cancelled")
                elif (error := done.exception()) is None:
                    ends.append("ok")
                    verify(done)
                else:
                    ends.append(type(error).__name__)
                    if not isinstance(error, allowed):
                        raise self.broken(f"ended with {error!r}") from error
            except BaseException as why:
                self.bench.failures.append(why)
            finally:
                self.fill()

        transfer.add_done_callback(reuse)
        return ends

    async def round(self, seed: int) -> None:
        """Transfer once, and end it somehow."""
        bench = self.bench
        self.seed = seed
        rng = random.Random(seed)
        cause = rng.choice(CAUSES)
        seconds = rng.choice((0.0, 0.0, TURN, TURN, 2 * TURN, 4 * TURN, 0.001, 0.002))
        # Of every order of magnitude: on an idle machine most transfers are over within a millisecond.
        deadline = 10 ** rng.uniform(-6.0, -2.2) if rng.random() < 0.2 else None
        transfer, verify = self.start(rng, deadline)
        allowed = (adt.TransferTimeout,) if deadline is not None else ()
        ends = self.watch(transfer, verify, allowed)
        began = time.monotonic()
        with contextlib.suppress(adt.TransferTimeout):
            await cause(transfer, seconds)
        if not transfer.done():
            raise self.broken(f"{cause.__name__} returned while the transfer was running")
        if time.monotonic() - began > bench.patience:
            raise self.broken(f"{cause.__name__} took {time.monotonic() - began:.1f} s")
        await asyncio.sleep(0)
        bench.raise_failures()
        if not ends:
            raise self.broken("the done callback was not called in time")
        if ends[0] == "cancelled" and cause in (to_the_end, given_up):
            raise self.broken("cancelled, and nobody asked for it")
        await pause(rng.choice((0.0, 0.0005, 0.003)))
        self.check("a little later")
        # Without any time to drain a fence shuts the peer out but for shm, and the other lanes with it.
        patient = transport_of(bench.path) == "shm" or bench.mine._config.drain_timeout > 0
        if rng.random() < 0.1 and patient and self.cut.startswith("push"):
            await bench.theirs.fence(bench.mine.cluster_id)
            for rows in self.target:
                rows[:] = FENCED
            await pause(rng.choice((0.0, 0.001, 0.005)))
            for rows in self.target:
                if not same_at(rows, FENCED):
                    raise self.broken("their blocks were written after a fence")
        bench.tally.rounds += 1
        bench.tally.causes["deadline" if deadline is not None and ends[0] == "TransferTimeout" else cause.__name__] += 1
        bench.tally.ends[ends[0]] += 1


class Bench:
    """A linked pair in this process with caches of both kinds.

    Attributes
    ----------
    mine, theirs : DataDist
        Transfers are started by `mine`.
    local : Cache
        Of `mine`; its tensors as bytes are `local_rows`.
    """

    patience = PATIENCE

    def __init__(self, path: str, mine: adt.DataDist, theirs: adt.DataDist) -> None:
        self.path = path
        self.lane_blocks = lane_blocks(path)
        self.mine = mine
        self.theirs = theirs
        self.manager = mine.cache_manager
        self.tally = Tally()
        self.failures: list[BaseException] = []

    async def _set_up(self, memory: str, lanes: int) -> None:
        blocks = lanes * self.lane_blocks
        self.local, self.local_rows = make_cache(self.mine, blocks, memory, None)
        self.source, self.source_rows = make_cache(self.theirs, blocks, memory, 1)
        self.target, self.target_rows = make_cache(self.theirs, blocks, memory, 2)
        self.source_key = adt.BlocksCacheKey(self.theirs.cluster_id, model_id=1)
        self.target_key = adt.BlocksCacheKey(self.theirs.cluster_id, model_id=2)
        for rows in self.source_rows:
            rows[:] = _SOURCE[:blocks]
        for rows in self.target_rows:
            rows[:] = FENCED
        for cache in (self.local, self.source, self.target):
            await cache.ready()
        assert self.theirs.listen_address is not None
        self.link = await self.mine.link(adt.ClusterInfo(self.theirs.cluster_id, str(self.theirs.listen_address)))
        assert self.link.path.transport == transport_of(self.path), self.link.path
        self.lanes = [Lane(self, index) for index in range(lanes)]

    def raise_failures(self) -> None:
        if self.failures:
            raise self.failures[0]

    def check(self, when: str) -> None:
        self.raise_failures()
        for lane in self.lanes:
            lane.check(when)

    async def _brake(self) -> None:
        """Keep the copy threads busy: a transfer would be over before anything could end it."""
        blocks = np.random.default_rng(0).permutation(_BRAKE_BLOCKS)
        far, _ = make_cache(self.theirs, _BRAKE_BLOCKS, "library", 3)
        near, _ = make_cache(self.mine, _BRAKE_BLOCKS, "library", None)
        await far.ready()
        await near.ready()
        key = adt.BlocksCacheKey(self.theirs.cluster_id, model_id=3)
        while True:
            try:
                some = [self.manager.pull_blocks(key, near, blocks, blocks) for _ in range(1)]
                await asyncio.gather(*some, return_exceptions=True)  # waits for all, also when it is cancelled
            except adt.CacheNotFound:  # not announced yet
                await asyncio.sleep(0.001)

    async def rounds(self, seeds: Iterator[int]) -> Tally:
        """Let the lanes work on the seeds side by side; the iterator may look at `tally`."""
        began = time.monotonic()
        brake = asyncio.create_task(self._brake()) if self.path == "library" else None

        async def work(lane: Lane) -> None:
            for seed in seeds:
                await lane.round(seed)

        async with asyncio.TaskGroup() as group:
            for lane in self.lanes:
                group.create_task(work(lane))
        if brake is not None:
            brake.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await brake
        # What was ended by force is over on the wire a little later than in memory.
        await until(lambda: not self.mine.dump(), "something is left on the wire")
        await asyncio.sleep(0.01)
        self.check("at the end")
        assert self.link.state is adt.LinkState.READY
        self.tally.seconds += time.monotonic() - began
        return self.tally


# Rows that differ, so that a block in the wrong place shows.
_SOURCE = np.tile(np.random.default_rng(0).integers(0, DATA_LIMIT, (257, BLOCK_BYTES), np.uint8), (320, 1))
_ids = itertools.count(100)


def make_cache(dd: adt.DataDist, blocks: int, memory: str, model_id: int | None) -> tuple[adt.Cache, list[Bytes]]:
    """Make a cache; return it and its bytes, which outlive it."""
    key = None if model_id is None else adt.BlocksCacheKey(dd.cluster_id, model_id=model_id)
    shape = (blocks, BLOCK_BYTES)
    if memory == "library":
        cache = dd.cache_manager.allocate_blocks_cache(adt.CacheDesc(TENSORS, shape, "uint8"), key=key)
    else:
        cache = dd.cache_manager.register_blocks_cache([np.zeros(shape, np.uint8) for _ in range(TENSORS)], key=key)
    return cache, list(cache.tensors)


def lane_blocks(path: str) -> int:
    return LANE_BLOCKS_VERBS if path == "verbs" else LANE_BLOCKS


def transport_of(path: str) -> str:
    return _TRANSPORTS.get(path, "shm")


def memory_of(path: str) -> str:
    return "ordinary" if path in ("ordinary", "verbs", "hixl") else "library"


def config_of(path: str, **options: Any) -> adt.Config:
    return adt.Config(transports=(transport_of(path),), **options)


@contextlib.asynccontextmanager
async def bench(path: str, *, lanes: int = LANES, **options: Any) -> AsyncIterator[Bench]:
    """Open and link a pair; `options` are those of Config."""
    config = config_of(path, **options)
    first, second = next(_ids), next(_ids)
    async with (
        adt.DataDist(second, listen="127.0.0.1:0", config=config) as theirs,
        adt.DataDist(first, config=config) as mine,
    ):
        made = Bench(path, mine, theirs)
        await made._set_up(memory_of(path), lanes)
        yield made


# Ends of the whole DataDist. ------------------------------------------------------------------------------------------


async def _abort_mine(made: Bench) -> None:
    made.mine.abort()
    await made.mine.wait_closed()


async def _abort_theirs(made: Bench) -> None:
    made.theirs.abort()
    await made.theirs.wait_closed()


async def _close_mine(made: Bench) -> None:
    await made.mine.aclose(PATIENCE)


async def _close_mine_late(made: Bench) -> None:
    with contextlib.suppress(adt.MemoryStillExposed):  # what a busy machine did not get done by then
        await made.mine.aclose(0.001)
    await made.mine.wait_closed()


async def _close_theirs(made: Bench) -> None:
    await made.theirs.aclose(PATIENCE)


async def _cancel_the_closing(made: Bench) -> None:
    task = asyncio.create_task(made.mine.aclose(PATIENCE))
    await pause(0.0002)
    task.cancel()
    await asyncio.wait((task,))
    await made.mine.wait_closed()


async def _unlink(made: Bench) -> None:
    await made.mine.unlink(adt.ClusterInfo(made.theirs.cluster_id))


async def _unlink_by_force(made: Bench) -> None:
    await made.mine.unlink(adt.ClusterInfo(made.theirs.cluster_id), force=True)


async def _unlinked_by_them(made: Bench) -> None:
    await made.theirs.unlink(adt.ClusterInfo(made.mine.cluster_id))


async def _unregister_theirs(made: Bench) -> None:
    await asyncio.gather(
        made.theirs.cache_manager.unregister_cache(made.source), made.theirs.cache_manager.unregister_cache(made.target)
    )


async def _unregister_mine(made: Bench) -> None:
    await made.manager.unregister_cache(made.local)


ENDINGS: tuple[Callable[[Bench], Awaitable[None]], ...] = (
    _abort_mine,
    _abort_theirs,
    _close_mine,
    _close_mine_late,
    _close_theirs,
    _cancel_the_closing,
    _unlink,
    _unlink_by_force,
    _unlinked_by_them,
    _unregister_theirs,
    _unregister_mine,
)
_ENDS = (adt.PeerLostError, adt.ClosedError, adt.TransferAborted, adt.CacheNotFound, adt.TransferTimeout)


async def ending_round(path: str, seed: int) -> Tally:
    """End a whole pair while all lanes have a transfer running; as many rounds as there are lanes."""
    rng = random.Random(seed)
    began = time.monotonic()
    ending = rng.choice(ENDINGS)
    async with bench(path, drain_timeout=rng.choice((0.0, 1.0))) as made:
        running = []
        for lane in made.lanes:
            lane.seed = seed
            transfer, verify = lane.start(rng, rng.choice((None, None, None, 0.002)))
            lane.cut += f", {ending.__name__}"
            ends = lane.watch(transfer, verify, _ENDS)
            running.append((transfer, ends))
        await pause(rng.choice((0.0, 0.0001, 0.0003, 0.0008, 0.002)))
        # What has returned when an ending returns is quiet on the side that has ended, and the transfers are over.
        await ending(made)
        unfinished = [transfer for transfer, _ in running if not transfer.done()]
        if unfinished:
            _, late = await asyncio.wait(unfinished, timeout=made.patience)
            if late:
                raise made.lanes[0].broken(f"{len(late)} transfers did not end")
        await asyncio.sleep(0)
        made.check("at once")
        if ending in (_abort_theirs, _close_theirs, _unregister_theirs):
            given_back = True
        elif ending in (_unregister_mine,):
            given_back = False
        else:
            # The link is gone, but this DataDist lives: the fence waits for the rest of it.
            await made.theirs.fence(made.mine.cluster_id)
            given_back = True
        made.check("before their blocks were given back")
        if given_back:
            for rows in made.target_rows:
                rows[:] = FENCED
        await pause(rng.choice((0.0, 0.001, 0.005)))
        made.check("a little later")
        if given_back and not all(same_at(rows, FENCED) for rows in made.target_rows):
            raise made.lanes[0].broken("their blocks were written after they had been given back")
        for _, ends in running:
            made.tally.rounds += 1
            made.tally.ends[ends[0]] += 1
            made.tally.causes[ending.__name__] += 1
    made.tally.seconds += time.monotonic() - began
    return made.tally


# Kills. ---------------------------------------------------------------------------------------------------------------


class KillBench:
    """A DataDist of which one peer process after the other dies, while both sides pull and push."""

    PEER = 1
    patience = PATIENCE

    def __init__(self, path: str, mine: adt.DataDist) -> None:
        self.path = path
        self.mine = mine
        self.memory = memory_of(path)
        self.lane_blocks = lane_blocks(path)
        self.blocks = LANES * self.lane_blocks
        self.tally = Tally()

    async def _set_up(self) -> None:
        self.local, rows = make_cache(self.mine, self.blocks, self.memory, None)
        self.exposed, self.exposed_rows = make_cache(self.mine, self.blocks, self.memory, 1)
        size = self.lane_blocks
        self.lanes = [[tensor[index * size : (index + 1) * size] for tensor in rows] for index in range(LANES)]
        await self.local.ready()
        await self.exposed.ready()

    async def _lane(self, index: int, rng: random.Random, value: int, pattern: int) -> None:
        """Transfer until the peer is lost."""
        rows = self.lanes[index]
        size = self.lane_blocks
        first = index * size
        order = np.random.default_rng(rng.getrandbits(64)).permutation(size) + first
        wrong: list[str] = []
        while True:
            pull = rng.random() < 0.5
            blocks = order[: rng.choice((1, size * 3 // 10, size))]
            start = self.mine.cache_manager.pull_blocks if pull else self.mine.cache_manager.push_blocks
            if not pull:
                for tensor in rows:
                    tensor[:] = value
            try:
                transfer = start(adt.BlocksCacheKey(self.PEER, model_id=1), self.local, blocks, blocks, timeout=60.0)
            except (adt.NotLinkedError, adt.PeerLostError, adt.CacheNotFound):
                for tensor in rows:
                    tensor[:] = pattern
                return

            own = blocks - first

            def reuse(done: asyncio.Future[None], pull: bool = pull, own: Any = own) -> None:
                well = not done.cancelled() and done.exception() is None
                if well and pull and not all(same_at(tensor[own], value) for tensor in rows):
                    wrong.append("a pull ended well with wrong data")
                for tensor in rows:
                    tensor[:] = pattern

            transfer.add_done_callback(reuse)
            try:
                await transfer
            except adt.PeerLostError:
                self.tally.ends["PeerLostError"] += 1
                moved, whole = transfer.progress
                self.tally.midway += 0 < moved < whole
                return
            finally:
                await asyncio.sleep(0)  # one that was done at once has not called back yet
                assert not wrong, wrong
            self.tally.ends["ok"] += 1

    async def kill(self, seed: int) -> None:
        """Have one peer live for a while, and die."""
        rng = random.Random(seed)
        value, pattern = rng.randrange(FENCED), DATA_LIMIT | rng.randrange(0x80)
        began = time.monotonic()
        async with spawn(self.PEER, transports=self.mine._config.transports) as peer:
            shape = (self.blocks, BLOCK_BYTES)
            await peer.cache("kv", tensors=TENSORS, shape=shape, memory=self.memory, model_id=1, value=value)
            link = await self.mine.link(peer.info)
            assert link.path.transport == transport_of(self.path), link.path
            # What the peer pushes and what it pulls into is not what is pulled from it.
            await peer.cache("own", tensors=TENSORS, shape=shape, memory=self.memory, model_id=None, value=value)
            for kind in ("push", "pull") if rng.random() < 0.3 else ("push",):
                traffic = {"kind": kind, "name": "own", "cluster_id": self.mine.cluster_id, "model_id": 1}
                await peer.call("begin_traffic", **traffic)
            if rng.random() < 0.1:
                await peer.fork()
            lanes = [
                asyncio.create_task(self._lane(index, random.Random(seed + index), value, pattern))
                for index in range(LANES)
            ]
            await pause(rng.choice((0.0, TURN, 4 * TURN, 0.001, rng.uniform(0.0, 0.02))))
            peer.kill()
            _, late = await asyncio.wait(lanes, timeout=self.patience)
            if late:
                rows = [str(row) for row in self.mine.dump()]
                raise Broken(f"transfers outlive the peer (path {self.path}, seed {seed}): {rows}")
            for task in lanes:
                task.result()
            await self.mine.fence(self.PEER, timeout=self.patience)
            for tensor in self.exposed_rows:
                tensor[:] = pattern
            await pause(rng.choice((0.0, 0.002, 0.005)))
            for name, views in (("local", [t for rows in self.lanes for t in rows]), ("exposed", self.exposed_rows)):
                if not all(same_at(view, pattern) for view in views):
                    raise Broken(f"{name} blocks were written after the end (path {self.path}, seed {seed})")
        self.tally.rounds += 1
        self.tally.seconds += time.monotonic() - began


@contextlib.asynccontextmanager
async def kill_bench(path: str, **options: Any) -> AsyncIterator[KillBench]:
    """Open a DataDist for kills."""
    async with adt.DataDist(next(_ids), listen="127.0.0.1:0", config=config_of(path, **options)) as mine:
        made = KillBench(path, mine)
        await made._set_up()
        yield made
