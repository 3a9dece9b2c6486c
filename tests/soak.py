"""The random rounds of the suite, for as long as they are given.

`.ci/soak` calls it.

    python -m tests.soak PART --seconds N --state FILE [--seed-from N]

FILE keeps the next seed and the counts, and is written after every batch, so that a run that was ended at any moment is
taken up by the next. The first round that breaks a rule is named by its seed, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import concurrent.futures
import json
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from . import cycles, layer_rounds, lease_rounds, quiet, sim_rounds
from .pairs import linked

GOALS = {
    "cancel": 100_000,
    "kill": 1_000,
    "lease": 100_000,
    "layers": 50_000,
    "cycles": 10_000,
    "failures": 10_000,
    "sim": 100_000,
    "serving": 10_000,
}
CANCELS_A_BATCH = 1_000
KILLS_A_BATCH = 10
LEASES_A_BATCH = 1_000
LAYERS_A_BATCH = 500
CYCLES_A_BATCH = 250
FAILURES_A_BATCH = 1_000
SIMULATIONS_A_TASK = 50
SERVINGS_A_BATCH = 8
SERVING_CLIENTS = 60
WARM_UP = 100


class Stop(Exception):
    """The time is over."""


class Soak:
    """What one part has reached.

    Attributes
    ----------
    seed : int
        The next one.
    tally : Tally
    """

    def __init__(self, part: str, state: Path, seed_from: int | None, seconds: float) -> None:
        self.part = part
        self.seed = 0
        self.tally = quiet.Tally()
        self.watch: cycles.Watch | None = None
        self.pool: concurrent.futures.Executor | None = None
        self._watched = 0
        self._state = state
        self._end = time.monotonic() + seconds
        if seed_from is not None:
            self.seed = seed_from
        elif state.exists():
            kept = json.loads(state.read_text())
            self.seed = kept.pop("seed")
            for name, value in kept.items():
                setattr(self.tally, name, collections.Counter(value) if isinstance(value, dict) else value)

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._end

    def save(self, seed: int, tally: quiet.Tally) -> None:
        """Keep what a batch has reached. Replaced in one step: the run may be ended at any moment."""
        self.seed = seed
        self.tally += tally
        new = self._state.with_suffix(".new")
        new.write_text(json.dumps({"seed": self.seed, **vars(self.tally)}))
        os.replace(new, self._state)
        print(f"soak {self.part}: {self}", flush=True)

    async def check(self, rounds: int) -> None:
        """Compare what the process holds with what it held after the first rounds, which this begins with."""
        if self.watch is None:
            self.watch = cycles.Watch()
        else:
            self._watched += rounds
            await self.watch.check(self._watched)

    def seeds(self, count: int) -> Iterator[int]:
        """Yield the seeds of a batch; fewer if the time is over."""
        for seed in range(self.seed, self.seed + count):
            if self.over:
                return
            yield seed

    def __str__(self) -> str:
        return f"{self.tally}; next seed {self.seed}, {self.tally.rounds} of {GOALS[self.part]}"


async def cancel(soak: Soak) -> None:
    """A batch: cancels and deadlines on one path, then ends of whole pairs."""
    batch = soak.seed // CANCELS_A_BATCH
    path = quiet.PATHS[batch % len(quiet.PATHS)]
    options = ({"drain_timeout": 1.0}, {"drain_timeout": 0.0}, {"inline_bytes": 0})[batch // len(quiet.PATHS) % 3]
    tally = quiet.Tally()
    async with quiet.bench(path, **options) as bench:
        tally += await bench.rounds(soak.seeds(CANCELS_A_BATCH))
    for seed in soak.seeds(CANCELS_A_BATCH // 50):
        tally += await quiet.ending_round(path, seed)
    if not tally.rounds:
        raise Stop
    # The end of the time may cut a batch short; its seeds are used up all the same.
    soak.save(soak.seed + CANCELS_A_BATCH, tally)


async def kill(soak: Soak) -> None:
    """A batch: peers of one path die, one after the other."""
    path = quiet.PATHS[soak.seed // KILLS_A_BATCH % len(quiet.PATHS)]
    next_seed = soak.seed
    async with quiet.kill_bench(path) as bench:
        for seed in soak.seeds(KILLS_A_BATCH):
            await bench.kill(seed)
            next_seed = seed + 1
        tally = bench.tally
    if next_seed == soak.seed:
        raise Stop
    soak.save(next_seed, tally)


async def lease(soak: Soak) -> None:
    """A batch: requests that hold, adopt and release, over one transport."""
    names = (("shm", "tcp"), ("tcp",))[soak.seed // LEASES_A_BATCH % 2]
    async with linked(*names) as pair:
        tally = await lease_rounds.rounds(pair, soak.seeds(LEASES_A_BATCH))
    if not tally.rounds:
        raise Stop
    soak.save(soak.seed + LEASES_A_BATCH, tally)


async def layers(soak: Soak) -> None:
    """A batch: layer-wise transfers on one path, then ends of what they use in every phase."""
    batch = soak.seed // LAYERS_A_BATCH
    path = quiet.PATHS[batch % len(quiet.PATHS)]
    tally = quiet.Tally()
    async with layer_rounds.bench(path, drain_timeout=(1.0, 0.0)[batch // len(quiet.PATHS) % 2]) as bench:
        tally += await bench.rounds(soak.seeds(LAYERS_A_BATCH))
    for seed in soak.seeds(LAYERS_A_BATCH // 50):
        tally += await layer_rounds.ending_round(path, seed)
    if not tally.rounds:
        raise Stop
    soak.save(soak.seed + LAYERS_A_BATCH, tally)


async def open_and_close(soak: Soak) -> None:
    """A batch: pairs are opened and closed, with transfers under way; nothing is left of them."""
    if soak.watch is None:
        await cycles.open_and_close_all(range(WARM_UP))
        await soak.check(0)
    tally = await cycles.open_and_close_all(soak.seeds(CYCLES_A_BATCH))
    if not tally.rounds:
        raise Stop
    await soak.check(tally.rounds)
    soak.save(soak.seed + tally.rounds, tally)


async def fail(soak: Soak) -> None:
    """A batch: operations of one pair fail; nothing is left of them, nor of the pair."""
    path = quiet.PATHS[soak.seed // FAILURES_A_BATCH % len(quiet.PATHS)]
    if soak.watch is None:
        for each in quiet.PATHS:
            async with cycles.failing_pair(each) as failing:
                await cycles.fail_all(failing, range(WARM_UP))
        await soak.check(0)
    async with cycles.failing_pair(path) as failing:
        await cycles.fail_all(failing, range(WARM_UP))
        watch = cycles.Watch()
        tally = await cycles.fail_all(failing, soak.seeds(FAILURES_A_BATCH))
        await watch.check(tally.rounds)
    if not tally.rounds:
        raise Stop
    await soak.check(tally.rounds)
    soak.save(soak.seed + FAILURES_A_BATCH, tally)


async def simulate(soak: Soak) -> None:
    """A batch: rounds in simulated clusters, in a process for each processor. None of them has anything to wait for."""
    if soak.pool is None:
        context = multiprocessing.get_context("spawn")
        soak.pool = concurrent.futures.ProcessPoolExecutor(len(os.sched_getaffinity(0)), context)
    loop, count, began = asyncio.get_running_loop(), len(os.sched_getaffinity(0)), time.monotonic()
    starts = range(soak.seed, soak.seed + 4 * count * SIMULATIONS_A_TASK, SIMULATIONS_A_TASK)
    tasks = [range(start, start + SIMULATIONS_A_TASK) for start in starts]
    tally = quiet.Tally()
    for part in await asyncio.gather(*(loop.run_in_executor(soak.pool, sim_rounds.play_all, seeds) for seeds in tasks)):
        tally += part
    tally.seconds = time.monotonic() - began
    soak.save(soak.seed + tally.rounds, tally)


async def serve(soak: Soak) -> None:
    """A batch: clients of one serving cluster, whose workers die; its router may not grow."""
    from . import serve_rounds  # needs the extra `serve`

    tally, sizes = quiet.Tally(), []
    next_seed, began = soak.seed, time.monotonic()
    async with serve_rounds.bench(("shm", "tcp")[soak.seed // SERVINGS_A_BATCH % 2]) as bench:
        for seed in soak.seeds(SERVINGS_A_BATCH):
            ends = await bench.round(seed, SERVING_CLIENTS)
            tally += quiet.Tally(
                rounds=ends.total(), midway=ends.total() - ends[serve_rounds.GOOD], ends=collections.Counter(ends)
            )
            sizes.append(serve_rounds.resident(bench.cluster.router.process.pid))
            next_seed = seed + 1
    if next_seed == soak.seed:
        raise Stop
    # What it needs for that many clients it has after two rounds.
    if len(sizes) > 2 and sizes[-1] > 1.3 * sizes[1]:
        raise quiet.Broken(f"the router has grown, from seed {soak.seed} on: {sizes} bytes")
    tally.seconds = time.monotonic() - began
    soak.save(next_seed, tally)


PARTS: dict[str, Callable[[Soak], Awaitable[None]]] = {
    "cancel": cancel,
    "kill": kill,
    "lease": lease,
    "layers": layers,
    "cycles": open_and_close,
    "failures": fail,
    "sim": simulate,
    "serving": serve,
}


async def run(soak: Soak) -> None:
    """Do batch after batch until the time is over."""
    failures: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: failures.append(context))
    while not soak.over:
        try:
            await PARTS[soak.part](soak)
        except Stop:
            break
        if failures:
            raise quiet.Broken(f"the event loop's exception handler was called, from seed {soak.seed} on: {failures}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("part", choices=sorted(PARTS))
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--seed-from", type=int)
    options = parser.parse_args()
    warnings.simplefilter("error")
    soak = Soak(options.part, options.state, options.seed_from, options.seconds)
    try:
        asyncio.run(run(soak))
    except BaseException:
        traceback.print_exc()
        print(f"soak {soak.part}: FAILED in the batch from seed {soak.seed} on, after {soak}", file=sys.stderr)
        return 1
    finally:
        if soak.pool is not None:
            soak.pool.shutdown(cancel_futures=True)
    print(f"soak {soak.part}: reached {soak}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
