"""What else runs in the loop, and on the machine, keeps running: nothing of ours is in its way."""

from __future__ import annotations

import asyncio
import gc
import math
import time
from asyncio import events
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import aiodatadist as adt

from .conftest import Scale
from .endless import Endless
from .pairs import OWNER, Pair, linked, pattern
from .peers import spawn
from .waiting import PATIENCE, until

KEY = adt.BlocksCacheKey(OWNER)
TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "tcp"])
MAY_HOLD = 0.005


async def offer(pair: Pair, memory: str, blocks: int, width: int) -> None:
    if memory == "library":
        await pair.allocate(adt.CacheDesc(1, (blocks, width), "uint8"))
    else:
        await pair.offer([np.zeros((blocks, width), np.uint8)])


# --- a loop of awaits -------------------------------------------------------------------------------


@pytest.mark.loop
@pytest.mark.parametrize("opcode", ["pull", "push"])
@pytest.mark.parametrize(("transport", "memory"), [("shm", "library"), ("shm", "ordinary"), ("tcp", "ordinary")])
async def test_tight_loop_of_awaits_starves_nobody(transport: str, memory: str, opcode: str, scale: Scale) -> None:
    """Other tasks take their turns and timers fire, although each await may be done at once."""
    rounds = scale(1500, least=500)
    async with linked(transport) as pair:
        await offer(pair, memory, 16, 4096)
        cache = await pair.take(pattern(1, (16, 4096), tensors=1))
        manager = pair.user.cache_manager
        start = manager.pull_blocks if opcode == "pull" else manager.push_blocks
        turns = fired = 0
        over = False

        async def other() -> None:
            nonlocal turns
            while not over:
                turns += 1
                await asyncio.sleep(0)

        loop = asyncio.get_running_loop()

        def timer() -> None:
            nonlocal fired
            fired += 1
            if not over:
                loop.call_later(0, timer)

        task = asyncio.create_task(other())
        loop.call_later(0, timer)
        at_once = 0
        for _ in range(rounds):
            transfer = start(KEY, cache, [1], [2])
            at_once += transfer.done()
            await transfer
        over = True
        await task
        # The inline budget of 200 us covers some hundreds of small copies a turn, never thousands.
        assert turns > rounds / 400
        assert fired > rounds / 400
        if transport == "shm":
            assert at_once > rounds / 2, "the way that is tested here was not taken"


@pytest.mark.loop
async def test_inline_budget_of_zero_gives_a_turn_each() -> None:
    async with linked("shm", user={"inline_budget": 0.0}, owner={"inline_budget": 0.0}) as pair:
        await offer(pair, "library", 16, 4096)
        cache = await pair.take(pattern(1, (16, 4096), tensors=1))
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        for _ in range(200):
            await pair.user.cache_manager.pull_blocks(KEY, cache, [1], [2])
        task.cancel()
        assert turns >= 200


@pytest.mark.loop
async def test_a_failure_while_one_is_told_keeps_none_of_the_others_from_their_ends(loop_errors: list[Any]) -> None:
    async with linked("shm", user={"inline_budget": 0.0}, owner={"inline_budget": 0.0}) as pair:
        await offer(pair, "library", 16, 4096)
        cache = await pair.take(pattern(1, (16, 4096), tensors=1))
        pulls = [pair.user.cache_manager.pull_blocks(KEY, cache, [1], [2], notify=b"") for _ in range(3)]

        def fails(transfer: adt.Transfer[Any]) -> None:
            transfer._told(None)
            raise ZeroDivisionError

        pulls[0]._then = fails
        await asyncio.wait_for(asyncio.gather(*pulls), PATIENCE)
        assert ["ZeroDivisionError" in error["exception"] for error in loop_errors] == [True]
        loop_errors.clear()


@pytest.mark.loop
@pytest.mark.parametrize("opcode", ["pull", "push"])
async def test_what_is_told_a_turn_later_ends_as_any_other(opcode: str) -> None:
    """The bytes are there, and the future not yet done: it may be cancelled, or ended by somebody else, as ever."""
    async with linked("shm", user={"inline_budget": 0.0}, owner={"inline_budget": 0.0}) as pair:
        await offer(pair, "library", 16, 4096)
        cache = await pair.take(pattern(1, (16, 4096), tensors=1))
        manager = pair.user.cache_manager
        start = manager.pull_blocks if opcode == "pull" else manager.push_blocks
        counters = pair.link._counters
        for notify in (None, None, b"the long way"):  # the first makes what the second finds
            before = dict(counters)
            told: list[Any] = []
            transfers = [start(KEY, cache, [1], [2], notify=notify) for _ in range(5)]
            ended, cancelled, waited, set_early, dropped = transfers
            assert not any(transfer.done() for transfer in transfers)
            assert [transfer.progress for transfer in transfers] == [(0, 4096)] * 5
            assert counters.pending == 5
            ended.add_done_callback(told.append)
            waiting = asyncio.create_task(waited.wait())
            assert cancelled.cancel("first")
            assert cancelled.cancel("second")
            assert cancelled.cancelling()
            assert not cancelled.done()
            set_early.set_result(None)
            assert not set_early.cancel()
            del transfers, dropped
            await asyncio.wait([ended, cancelled, waiting])
            assert told == [ended]
            with pytest.raises(asyncio.CancelledError) as raised:
                cancelled.result()
            assert raised.value.args == ("first",)
            assert [one.progress for one in (ended, cancelled, waited, set_early)] == [(4096, 4096)] * 4
            after = dict(counters)
            gained = {name: after[name] - before[name] for name in after if after[name] != before[name]}
            assert gained == {"started": 5, "ok": 4, "cancelled": 1, f"bytes_{opcode}ed": 5 * 4096}
            assert counters.latency.count == counters.ok
            assert counters.pending == 0


# --- an idle pair ------------------------------------------------------------------------------------


@pytest.mark.loop
@TRANSPORTS
async def test_idle_pair_uses_no_cpu(transport: str, scale: Scale) -> None:
    seconds = 3.0 * max(1.0, min(scale.factor, 10.0))
    async with (
        spawn(OWNER, transports=(transport,)) as peer,
        adt.DataDist(2, config=adt.Config(transports=(transport,))) as dd,
    ):
        await peer.cache("kv", tensors=1, shape=(16, 4096), memory="library")
        link = await dd.link(peer.info)
        while KEY not in link.table:
            await asyncio.sleep(0.001)
        cache = dd.cache_manager.register_blocks_cache(pattern(1, (16, 4096), tensors=1))
        await dd.cache_manager.pull_blocks(KEY, cache, [0], [0])
        reading = [asyncio.ensure_future(anext(stream)) for stream in (dd.events(), dd.notifications())]
        gc.collect()
        # Whoever polls does so every time; what is still being populated, or what a busy machine adds, passes.
        for _ in range(5):
            theirs = (await peer.call("resources"))["cpu_ns"]
            ours = time.process_time_ns()
            await asyncio.sleep(seconds)
            ours = time.process_time_ns() - ours
            theirs = (await peer.call("resources"))["cpu_ns"] - theirs
            # Commands cost a little there: collecting the garbage and counting descriptors, some milliseconds.
            if ours < seconds * 0.01 * 1e9 and theirs < seconds * 0.01 * 1e9 + 30e6:
                break
        assert ours < seconds * 0.01 * 1e9, f"{ours / 1e6} ms"
        assert theirs < seconds * 0.01 * 1e9 + 30e6, f"{theirs / 1e6} ms"
        await dd.cache_manager.pull_blocks(KEY, cache, [0], [0])
        for task in reading:
            task.cancel()


# --- how long callbacks hold the loop ------------------------------------------------------------------


class Holds:
    """CPU time of this thread in each callback of the loop, by what it runs."""

    def __init__(self) -> None:
        self.count = 0
        self.long: list[tuple[float, str]] = []

    def note(self, seconds: float, handle: Any) -> None:
        self.count += 1
        if seconds > MAY_HOLD:
            # A step of a task says nothing about itself; the task does.
            task = getattr(handle._callback, "__self__", None)
            self.long.append((seconds, repr(task if isinstance(task, asyncio.Task) else handle)))


@pytest.fixture
def holds(monkeypatch: pytest.MonkeyPatch) -> Iterator[Holds]:
    """Measure every Handle.run of asyncio's own loops."""
    found = Holds()
    run = events.Handle._run

    def measured(self: Any) -> None:
        began = time.thread_time()
        run(self)
        found.note(time.thread_time() - began, self)

    monkeypatch.setattr(events.Handle, "_run", measured)
    # A collection of the whole heap would be counted for whoever happens to trigger it.
    gc.collect()
    gc.freeze()
    gc.disable()
    yield found
    gc.enable()


@pytest.mark.hang_limit(240)
async def test_no_callback_holds_the_loop(holds: Holds, scale: Scale, request: pytest.FixtureRequest) -> None:
    """64 DataDists link one at once, and pull 1 GiB in all, while another task counts the turns."""
    if request.config.getoption("--loop") != "asyncio":
        pytest.skip("measures asyncio's own loop, without its debug mode")
    # Once is enough: what holds the loop does so every time, and what a busy machine adds, it does not.
    for _ in range(5):
        long = await link_and_pull(holds, scale)
        if not long:
            break
    assert long == []


async def link_and_pull(holds: Holds, scale: Scale) -> list[tuple[float, str]]:
    # Memory enough to be worth a measure; of much more, the kernel would need all that a callback may take to free it.
    links, blocks, width = 64, 32, 1 << 18
    total = int((1 << 30) * min(1.0, scale.factor))
    content = pattern(3, (blocks, width), tensors=1)
    await asyncio.sleep(0)
    # From here on every callback counts, also those of this test, which do little but call the library.
    holds.long.clear()
    async with adt.DataDist(OWNER, listen="127.0.0.1:0", config=adt.Config(transports=("tcp",))) as owner:
        source = owner.cache_manager.register_blocks_cache(content, key=KEY)
        shm = await adt.DataDist(1000, listen="127.0.0.1:0").open()
        mapped = shm.cache_manager.allocate_blocks_cache(
            adt.CacheDesc(1, (blocks, width), "uint8"), key=adt.BlocksCacheKey(1000)
        )
        await source.ready()
        await mapped.ready()
        users = []
        try:
            for number in range(links):
                transports = ("tcp",) if number % 2 else ("shm",)
                users.append(await adt.DataDist(2000 + number, config=adt.Config(transports=transports)).open())
            peers = [(shm, owner)[number % 2] for number in range(links)]
            # One call a turn: 64 at once in one callback would be the caller's doing.
            linking, caches = [], []
            for user, peer in zip(users, peers, strict=True):
                linking.append(user.link(adt.ClusterInfo(peer.cluster_id, str(peer.listen_address))))
                await asyncio.sleep(0)
            for user in users:
                tensor = np.empty((blocks, width), np.uint8)
                caches.append(user.cache_manager.register_blocks_cache([tensor]))
                await asyncio.sleep(0)
            found = await asyncio.gather(*linking)
            for link, peer, cache in zip(found, peers, caches, strict=True):
                await cache.ready()
                while adt.BlocksCacheKey(peer.cluster_id) not in link.table:
                    await asyncio.sleep(0.001)
            turns = 0

            async def other() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await asyncio.sleep(0)

            task = asyncio.create_task(other())

            async def pull(user: adt.DataDist, peer: adt.DataDist, cache: adt.Cache) -> None:
                key = adt.BlocksCacheKey(peer.cluster_id)
                left = total // links
                while left > 0:
                    await user.cache_manager.pull_blocks(key, cache, range(blocks), range(blocks), timeout=None)
                    left -= blocks * width

            await asyncio.gather(*(pull(*work) for work in zip(users, peers, caches, strict=True)))
            task.cancel()
            assert turns > 100
            pulled = [cache.tensors[0] for cache in caches[1::2]]
        finally:
            for user in users:
                await user.aclose(5.0)
            await shm.aclose(5.0)
    assert holds.count > 1000
    long = list(holds.long)
    for tensor in pulled:
        np.testing.assert_array_equal(tensor, content[0])
    return long


async def test_the_measure_finds_what_holds_the_loop(holds: Holds, request: pytest.FixtureRequest) -> None:
    """Else the test above could not fail."""
    if request.config.getoption("--loop") != "asyncio":
        pytest.skip("measures asyncio's own loop, without its debug mode")

    def spin() -> None:
        end = time.thread_time() + 2 * MAY_HOLD
        while time.thread_time() < end:
            pass

    asyncio.get_running_loop().call_soon(spin)
    await asyncio.sleep(0)
    assert any("spin" in what for _, what in holds.long)

    async def step() -> None:
        spin()

    await asyncio.create_task(step())
    assert any("step" in what for _, what in holds.long)


# --- small beside big ----------------------------------------------------------------------------------


@pytest.mark.loop
@pytest.mark.parametrize(("transport", "memory"), [("shm", "library"), ("shm", "ordinary"), ("tcp", "ordinary")])
async def test_small_pulls_progress_during_a_big_one(transport: str, memory: str) -> None:
    """Round robin: small ones end, although big ones were there first and never do."""
    # Nothing inline: both kinds go the same way.
    async with linked(transport, user={"inline_bytes": 0}) as pair:
        await offer(pair, memory, 16, 1 << 19)
        small = await pair.take([np.ones((16, 1 << 19), np.uint8)])
        endless = await Endless(pair.owner, pair.user).ready()
        big = [endless.start() for _ in range(3)]
        for number in range(16):
            before = [transfer.progress.bytes_done for transfer in big]
            await asyncio.wait_for(pair.user.cache_manager.pull_blocks(KEY, small, [5], [number]), PATIENCE)
            assert not small.tensors[0][number].any()
            # The big ones go on as well.
            for transfer, done in zip(big, before, strict=True):
                await until(lambda transfer=transfer, done=done: transfer.progress.bytes_done > done)  # type: ignore[misc]
        assert not any(transfer.done() for transfer in big)
        for transfer in big:
            transfer.cancel()
        await asyncio.wait(big)


# --- submitting ------------------------------------------------------------------------------------------


@TRANSPORTS
async def test_submitting_ten_thousand_blocks_is_cheap(transport: str) -> None:
    """It costs about as much as a plain Python loop over the list, and not one over blocks times tensors."""
    count, tensors = 10_000, 64
    async with linked(transport) as pair:
        await pair.offer([np.zeros((count, 16), np.uint8) for _ in range(tensors)])
        cache = await pair.take([np.zeros((count, 16), np.uint8) for _ in range(tensors)])
        random = np.random.default_rng(1)
        src, dst = random.permutation(count), random.permutation(count)
        lists = src.tolist(), dst.tolist()
        manager = pair.user.cache_manager
        await manager.pull_blocks(KEY, cache, src, dst)

        def plain() -> float:
            began = time.thread_time()
            total = 0
            for a, b in zip(*lists, strict=True):
                total += a ^ b
            return time.thread_time() - began

        async def submit(*blocks: Any) -> float:
            began = time.thread_time()
            transfer = manager.pull_blocks(KEY, cache, *blocks)
            took = time.thread_time() - began
            assert not transfer.done()
            transfer.cancel()
            await asyncio.wait((transfer,), timeout=PATIENCE)
            return took

        # The best of many: a busy machine makes everything slower now and then.
        measured = arrays = plain_lists = math.inf
        for _ in range(200):
            measured = min(measured, plain())
            arrays, plain_lists = min(arrays, await submit(src, dst)), min(plain_lists, await submit(*lists))
            if max(arrays, plain_lists) < 2 * measured:
                break
        assert max(arrays, plain_lists) < 2 * measured, (measured, arrays, plain_lists)
