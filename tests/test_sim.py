"""The simulated network: ordinary DataDists on a virtual clock, and the same run from the same seed."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

import aiodatadist as adt
from aiodatadist import testing
from aiodatadist.testing import Fault, FaultScript, SimCluster, Trace, Way

from .pairs import pattern

OWNER, USER = 1, 2
KEY = adt.BlocksCacheKey(OWNER)
TRANSPORTS = ("sim", "tcp")
BAD = Way(
    latency=(1e-5, 2e-3),
    bandwidth=1e8,
    loss=0.05,
    duplicate=0.2,
    reorder=0.3,
    visible=(0.0, 1e-3),
    split=0.3,
    fragment=512,
)


async def two(sim: SimCluster, shape: tuple[int, ...] = (64, 64), **options: Any) -> tuple[adt.Cache, adt.Cache]:
    """Link two DataDists with a cache each; return the owner's and the user's."""
    owner = await sim.datadist(OWNER, adt.Role.PROMPT, **options)
    user = await sim.datadist(USER, adt.Role.DECODER, **options)
    theirs = owner.cache_manager.register_blocks_cache(pattern(1, shape), key=KEY)
    mine = user.cache_manager.register_blocks_cache(pattern(2, shape))
    await theirs.ready()
    link = await user.link(sim.info(OWNER))
    await seen(link, theirs)
    return theirs, mine


async def seen(link: adt.Link, cache: adt.Cache) -> None:
    while adt.CacheKeyByIdAndIndex(OWNER, cache.id) not in link.table:
        await asyncio.sleep(1e-3)


async def some_traffic(sim: SimCluster, transport: str) -> None:
    theirs, mine = await two(sim, transports=(transport,))
    pull, push = sim[USER].cache_manager.pull_blocks, sim[USER].cache_manager.push_blocks
    for number in range(4):
        blocks = sim.random.sample(range(64), 8)
        await pull(KEY, mine, blocks, blocks, notify=b"pulled")
        for ours, of_owner in zip(mine.tensors, theirs.tensors, strict=True):
            np.testing.assert_array_equal(ours[blocks], of_owner[blocks])
            ours[blocks] = number
        await push(KEY, mine, blocks, blocks)
        assert all((tensor[blocks] == number).all() for tensor in theirs.tensors)
    late = pull(KEY, mine, list(range(64)), list(range(64)))
    await asyncio.sleep(1e-4)
    late.cancel()
    await asyncio.wait([late])
    await sim[OWNER].fence(USER)


def traffic(seed: int, transport: str, way: Way, **options: Any) -> testing.Trace:
    async def main() -> testing.Trace:
        async with SimCluster(seed, way=way, **options) as sim:
            await some_traffic(sim, transport)
        return sim.trace

    return testing.run(main())


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("way", [Way(), BAD], ids=["good", "bad"])
def test_blocks_arrive(transport: str, way: Way) -> None:
    assert traffic(1, transport, way).events


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_same_seed_is_the_same_run(transport: str) -> None:
    first, second = traffic(7, transport, BAD), traffic(7, transport, BAD)
    assert first.events == second.events
    assert first.hash == second.hash != traffic(8, transport, BAD).hash


def test_another_process_has_the_same_run(tmp_path: Any) -> None:
    """Neither addresses nor the seed of hashes decide anything."""
    code = "from tests.test_sim import *; print(traffic(3, 'sim', BAD).hash, traffic(3, 'tcp', BAD).hash)"
    said = set()
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        said.add(done.stdout)
    assert said == {f"{traffic(3, 'sim', BAD).hash} {traffic(3, 'tcp', BAD).hash}\n"}


# The clock. -------------------------------------------------------------------------------------------------


def test_waiting_costs_no_time() -> None:
    """A year of waits, and the hang limit of the suite as the only clock."""

    async def main() -> float:
        loop = asyncio.get_running_loop()
        start = loop.time()
        for _ in range(365):
            await asyncio.sleep(86400.0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30.0):
                await loop.create_future()
        assert await asyncio.to_thread(lambda: 5) == 5
        return loop.time() - start

    elapsed = testing.run(main())
    assert 365 * 86400.0 + 30.0 <= elapsed < 365 * 86400.0 + 31.0


def test_what_nothing_can_wake_is_stuck_without_a_cluster_as_well() -> None:
    """As long as no descriptor, thread or signal could still call into the loop."""

    async def woken() -> int:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            readable = loop.create_future()
            loop.add_reader(ours, readable.set_result, 1)
            threading.Timer(0.05, theirs.send, (b"x",)).start()
            await readable
            loop.remove_reader(ours)
        done: asyncio.Future[int] = loop.create_future()
        threading.Timer(0.05, loop.call_soon_threadsafe, (done.set_result, 2)).start()
        return await done

    assert testing.run(woken()) == 2
    # Where there is no other thread for certain.
    code = "import asyncio; from aiodatadist import testing; testing.run(asyncio.Event().wait())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "SimulationStuck: at 1.0" in done.stderr


def test_sets_of_futures_have_the_same_order_in_each_run() -> None:
    kept: list[Any] = []  # or the futures of the second run would have the addresses of the first

    async def main() -> list[list[int]]:
        async with SimCluster(3) as sim:
            _, mine = await two(sim)
            pulls = [sim[USER].cache_manager.pull_blocks(KEY, mine, [number], [number]) for number in range(32)]
            plain = [asyncio.get_running_loop().create_future() for _ in range(32)]
            kept.append((pulls, plain))
            for future in plain:
                future.set_result(None)
            sets: list[list[asyncio.Future[None]]] = [[*pulls], plain]
            return [[futures.index(one) for one in (await asyncio.wait(futures))[0]] for futures in sets]

    assert testing.run(main()) == testing.run(main())


def test_who_polls_gets_on() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + 1e-3
        while loop.time() < until:
            await asyncio.sleep(0)

    testing.run(main())


async def test_a_cluster_needs_the_virtual_clock() -> None:
    with pytest.raises(RuntimeError, match="virtual clock"):
        async with SimCluster():
            pass


@pytest.mark.parametrize("linked", [False, True])
def test_what_can_never_go_on_is_an_error_that_names_the_seed(linked: bool) -> None:
    """Without a link nothing is planned any more; with one the heartbeats go on for ever."""

    async def main() -> None:
        async with SimCluster(seed=77, limit=100.0) as sim:
            if linked:
                await two(sim)
            else:
                await sim.datadist(OWNER)
            await asyncio.get_running_loop().create_future()

    with pytest.raises(testing.SimulationStuck, match=r"seed 77(.|\n)*cluster 1: open"):
        testing.run(main())


def test_a_failing_seed_is_named() -> None:
    async def main() -> None:
        async with SimCluster(seed=99):
            raise ValueError("a test fails")

    with pytest.raises(ValueError, match="a test fails") as raised:
        testing.run(main())
    assert "seed 99" in "".join(raised.value.__notes__)


# Traces. ----------------------------------------------------------------------------------------------------


def test_a_trace_is_saved_and_replayed(tmp_path: Any) -> None:
    script = FaultScript.random(random.Random(5), [OWNER, USER], seconds=0.01)
    assert FaultScript.from_list(script.as_list()).as_list() == script.as_list()
    script = FaultScript([Fault(0.004, "stall", (OWNER, USER, 0.01)), Fault(0.001, "stop", (USER,))])
    script.faults.append(Fault(0.006, "resume", (USER,)))
    first = traffic(5, "sim", BAD, script=script)
    first.save(tmp_path / "trace.json")
    saved = Trace.load(tmp_path / "trace.json")
    assert (saved.hash, saved.seed) == (first.hash, 5)
    assert traffic(0, "sim", BAD, replay=saved).hash == first.hash
    with pytest.raises(testing.ReplayDiverged, match="event"):
        traffic(0, "sim", BAD.replace(loss=0.2), replay=saved)
    text = (tmp_path / "trace.json").read_text()
    (tmp_path / "trace.json").write_text(text.replace('"seed":5', '"seed":6').replace('"start"', '"begin"', 1))
    with pytest.raises(ValueError, match="hash"):
        Trace.load(tmp_path / "trace.json")


def test_a_script_names_what_there_is() -> None:
    with pytest.raises(ValueError, match="explode"):
        FaultScript([Fault(1.0, "explode", (1,))])


def test_a_fault_of_a_script_that_cannot_come_fails_the_test() -> None:
    async def check(sim: SimCluster) -> None:
        await sim.datadist(OWNER)
        sim.play(FaultScript([Fault(1.0, "crash", (77,)), Fault(2.0, "stop", (OWNER,))]))
        await asyncio.sleep(10.0)

    with pytest.raises(adt.ArgumentError, match="cluster_id=77 was never started") as raised:
        simulated(check)
    assert "at=1.0, name='crash'" in "".join(raised.value.__notes__)


def test_a_cluster_leaves_nothing_planned() -> None:
    async def main() -> None:
        async with SimCluster() as sim:
            await two(sim)
            sim.stall(OWNER, USER, 1000.0)
        before = sim.trace.hash
        await asyncio.sleep(2000.0)
        assert sim.trace.hash == before

    testing.run(main())


# Input. -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "error", "said"),
    [
        ({"latency": 1e-3}, TypeError, "latency must be a pair"),
        ({"latency": (1e-3,)}, TypeError, "latency must be a pair"),
        ({"latency": (2e-3, 1e-3)}, ValueError, "the least is more than the most"),
        ({"latency": (-1.0, 1.0)}, ValueError, "latency=-1.0 must be finite and not negative"),
        ({"visible": (0.0, float("nan"))}, ValueError, "visible=nan"),
        ({"bandwidth": -1.0}, ValueError, "bandwidth=-1.0"),
        ({"bandwidth": "1G"}, TypeError, "bandwidth must be a number, got '1G'"),
        ({"resend": -1.0}, ValueError, "resend=-1.0"),
        ({"reorder_by": float("inf")}, ValueError, "reorder_by=inf"),
        ({"loss": 1.0}, ValueError, "loss=1.0 must be from 0 to 0.9; .*blocked=True"),
        ({"duplicate": 1.5}, ValueError, "duplicate=1.5 must be from 0 to 1"),
        ({"reorder": -0.1}, ValueError, "reorder=-0.1"),
        ({"split": 2}, ValueError, "split=2"),
        ({"fragment": 0}, ValueError, "fragment=0"),
        ({"fragment": 1.5}, ValueError, "fragment=1.5"),
    ],
)
def test_a_way_that_cannot_be_is_refused(fields: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(adt.UsageError, match=said) as raised:
        Way(**fields)
    assert isinstance(raised.value, error)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda sim: sim.crash(7), "cluster_id=7 was never started in this simulation; started are: 1"),
        (lambda sim: sim.info(7), "cluster_id=7 was never started"),
        (lambda sim: sim[7], "cluster_id=7 was never started"),
        (lambda sim: sim.lag(OWNER, 2.0, 1.0), "lag="),
        (lambda sim: sim.stall(OWNER, USER, -1.0), "seconds must not be negative, got -1.0"),
        (lambda sim: SimCluster(limit=0.0), "limit must be more than 0"),
        (lambda sim: sim.datadist(USER, config=adt.Config(), drain_timeout=1.0), "not both; got config and drain_"),
    ],
)
def test_a_call_that_cannot_be_is_refused(call: Callable[[SimCluster], Any], said: str) -> None:
    async def check(sim: SimCluster) -> None:
        await sim.datadist(OWNER)
        with pytest.raises(adt.UsageError, match=said):
            coming = call(sim)
            if asyncio.iscoroutine(coming):
                await coming

    simulated(check)


# Faults. ----------------------------------------------------------------------------------------------------


def simulated(check: Callable[[SimCluster], Coroutine[Any, Any, None]], seed: int = 1, **options: Any) -> testing.Trace:
    """Run a check in a cluster of its own."""

    async def main() -> testing.Trace:
        async with SimCluster(seed, **options) as sim:
            await check(sim)
        return sim.trace

    return testing.run(main())


SLOW = Way(bandwidth=1e7)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("silent", [False, True])
def test_a_crash_ends_what_runs_with_it(transport: str, silent: bool) -> None:
    """The peer hears of it by the end of its connections, or by the silence."""

    async def check(sim: SimCluster) -> None:
        _, mine = await two(sim, (64, 16384), transports=(transport,))
        pull = sim[USER].cache_manager.pull_blocks(KEY, mine, list(range(64)), list(range(64)))
        await asyncio.sleep(1e-3)
        before = sim.now()
        sim.crash(OWNER, silent=silent)
        with pytest.raises(adt.PeerLostError):
            await pull
        if silent:
            assert 9.0 < sim.now() - before < 14.0  # Config.heartbeat_limit, and a quarter of it between two looks
        else:
            assert sim.now() - before < 1.0
        with pytest.raises((adt.NotLinkedError, adt.PeerLostError)):
            await sim[USER].cache_manager.pull_blocks(KEY, mine, [1], [1])

    simulated(check, way=SLOW)


@pytest.mark.parametrize("silent", [False, True])
def test_a_new_incarnation_takes_the_place_of_a_dead_one(silent: bool) -> None:
    async def check(sim: SimCluster) -> None:
        _, mine = await two(sim)
        epoch = sim[USER].links[OWNER].epoch
        sim.crash(OWNER, silent=silent)
        owner = await sim.restart(OWNER)
        theirs = owner.cache_manager.register_blocks_cache(pattern(9, (64, 64)), key=KEY)
        while True:
            try:
                link = await sim[USER].link(sim.info(OWNER))
                await asyncio.wait_for(seen(link, theirs), 1.0)
                await sim[USER].cache_manager.pull_blocks(KEY, mine, [3], [4])
                break
            except (adt.LinkError, TimeoutError):
                await asyncio.sleep(0.1)
        assert link.epoch > epoch
        np.testing.assert_array_equal(mine.tensors[0][4], theirs.tensors[0][3])
        assert sim.network.host(OWNER).incarnation == 2

    simulated(check)


def test_a_stopped_process_does_nothing_until_it_goes_on() -> None:
    async def check(sim: SimCluster) -> None:
        theirs, mine = await two(sim)
        pull = sim[USER].cache_manager.pull_blocks(KEY, mine, [1], [1])
        sim.stop(OWNER)
        events = len(sim.trace.events)
        done, _ = await asyncio.wait([pull], timeout=5.0)
        assert not done
        assert not [event for event in sim.trace.events[events:] if event[1:3] == ("stream", OWNER)]
        sim.resume(OWNER)
        await pull
        np.testing.assert_array_equal(mine.tensors[0][1], theirs.tensors[0][1])

    simulated(check)


def test_a_process_that_is_killed_while_it_is_stopped_leaves_nothing_to_do() -> None:
    """What has come for it meanwhile comes to nobody, and certainly not for ever."""

    async def check(sim: SimCluster) -> None:
        _, mine = await two(sim)
        sim.stop(OWNER)
        push = sim[USER].cache_manager.push_blocks(KEY, mine, [1], [1])
        await asyncio.sleep(1.0)
        sim.crash(OWNER)
        await sim.restart(OWNER)
        sim.stop(OWNER)
        with pytest.raises(adt.PeerLostError):
            await push
        await asyncio.sleep(1.0)

    simulated(check)


def test_a_blocked_way_delays_and_loses_nothing() -> None:
    async def check(sim: SimCluster) -> None:
        _, mine = await two(sim)
        sim.stall(OWNER, USER, 5.0)
        before = sim.now()
        await sim[USER].cache_manager.pull_blocks(KEY, mine, [1], [1], notify=b"x")
        assert 5.0 <= sim.now() - before < 5.1

    simulated(check)


def test_ways_count_for_processes_to_come() -> None:
    """Also where one end is every one; and who was only named was not started by it."""

    async def check(sim: SimCluster) -> None:
        sim.set_way(Way(latency=(0.5, 0.5)), OWNER)
        sim.set_way(Way(latency=(1.0, 1.0)), USER, OWNER)
        assert not [event for event in sim.trace.events if event[1] == "start"]
        for cluster_id in (OWNER, USER, 3):
            await sim.datadist(cluster_id)
            assert sim.network.host(cluster_id).incarnation == 1
        assert [sim.network.way_between(OWNER, other).latency[0] for other in (USER, 3)] == [0.5, 0.5]
        assert sim.network.way_between(USER, OWNER).latency[0] == 1.0
        before = sim.now()
        await sim[3].link(sim.info(OWNER))
        assert sim.now() - before >= 0.5

    simulated(check)


def test_healing_opens_every_way() -> None:
    async def check(sim: SimCluster) -> None:
        sim.set_way(Way(blocked=True), OWNER)
        await sim.datadist(OWNER)
        user = await sim.datadist(USER)
        asyncio.get_running_loop().call_later(3.0, sim.heal)
        await user.link(sim.info(OWNER), timeout=10.0)
        await (await sim.datadist(3)).link(sim.info(OWNER))

    simulated(check, way=Way(blocked=True))


def test_a_cut_breaks_the_link_and_both_may_link_anew() -> None:
    async def check(sim: SimCluster) -> None:
        theirs, mine = await two(sim)
        sim.cut(OWNER, USER)
        while sim[USER].links or sim[OWNER].links:
            await asyncio.sleep(1e-3)
        await seen(await sim[USER].link(sim.info(OWNER)), theirs)
        await sim[USER].cache_manager.pull_blocks(KEY, mine, [1], [1])

    simulated(check)


def test_writes_are_seen_while_they_happen() -> None:
    """A push is done when its bytes are visible, and each byte of it was written once, by that operation."""

    async def check(sim: SimCluster) -> None:
        theirs, mine = await two(sim)
        seen_: list[testing.Access] = []
        sim.watch(seen_.append)
        push = sim[USER].cache_manager.push_blocks(KEY, mine, [5, 9], [2, 3])
        await push
        writes = [access for access in seen_ if access.write]
        assert {(access.cluster_id, access.cache_id, access.by_cluster) for access in writes} == {
            (OWNER, theirs.id, USER)
        }
        assert sorted((access.tensor, access.offset, access.nbytes) for access in writes) == [
            (tensor, offset, 32) for tensor in (0, 1) for offset in (128, 160, 192, 224)
        ]
        base = theirs.tensors[1].ctypes.data
        assert {access.address for access in writes if access.tensor == 1} == {base + at for at in (128, 160, 192, 224)}
        assert len({(access.by_incarnation, access.op_id) for access in seen_}) == 1
        assert sum(access.nbytes for access in seen_ if not access.write) == 4 * 64

    simulated(check, way=Way(fragment=32, duplicate=0.5, reorder=0.5, visible=(0.0, 0.1)))


def test_latencies_are_those_of_the_virtual_clock() -> None:
    stats: list[dict[str, Any]] = []

    async def check(sim: SimCluster) -> None:
        _, mine = await two(sim)
        sim.stall(OWNER, USER, 2.0)
        await sim[USER].cache_manager.pull_blocks(KEY, mine, [1], [1])
        stats.append(sim[USER].stats()["total"])

    simulated(check)
    simulated(check)
    assert stats[0] == stats[1]
    assert 2.0 <= stats[0]["latency"]["total"] < 2.1


def test_slow_processes_see_the_same_in_the_end() -> None:
    async def check(sim: SimCluster) -> None:
        sim_ = sim
        await two(sim_)
        sim.lag(OWNER, 1e-4, 5e-3)
        sim.lag(USER, 0.0, 1e-3)
        mine = next(iter(sim[USER].cache_manager.caches.values()))
        for number in range(5):
            await sim[USER].cache_manager.pull_blocks(KEY, mine, [number], [number], notify=b"x")
        await sim[OWNER].fence(USER)

    assert simulated(check).hash == simulated(check).hash
