"""`bench fairness`: what small pulls wait for while a large one is under way on the same link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Final

import numpy as np

from .bench_rows import Progress, Rows, in_turn, size_text
from .bench_transfers import Seconds, Session, Site, Window
from .failure import CommandError

__all__ = ["FairnessScale", "measure_fairness"]

_SMALL: Final = 65536
_BULK: Final = 65536
_POOL: Final = 1024
"""Blocks of the pool that small pulls go through."""
_TARGET: Final = 5.0
_LEAST: Final = 100
"""Small pulls a round: a 99th percentile of fewer is none."""


@dataclass(frozen=True, slots=True)
class FairnessScale:
    """How much is measured.

    Attributes
    ----------
    nbytes : int
        Bytes of each large pull.
    total : int
        Bytes that large pulls move, one after the other, in all rounds.
    repeat : int
        Rounds.
    """

    nbytes: int
    total: int
    repeat: int


async def measure_fairness(
    session: Session, paths: Sequence[str], scale: FairnessScale, rows: Rows, progress: Progress
) -> None:
    """Measure for each path the 99th percentile of small pulls, alone and while large ones follow each other."""
    for path in paths:
        progress(f"fairness: {path}, {size_text(_SMALL)} beside pulls of {size_text(scale.nbytes)}")
        async with (
            session.site(path, _SMALL, _POOL) as small,
            session.site(path, _BULK, max(1, scale.nbytes // _BULK)) as bulk,
        ):
            found = await _measure_path(small, bulk, path, scale)
        micros = {name: [float(np.percentile(each, 99)) * 1e6 for each in rounds] for name, rounds in found.items()}
        rows.add(
            "fairness pull p99 beside a large pull", path, _SMALL, micros["beside"], "us", "lower",
            ("alone", micros["alone"]), _TARGET,
        )  # fmt: skip


async def _measure_path(small: Site, bulk: Site, path: str, scale: FairnessScale) -> dict[str, list[Seconds]]:
    window = Window(_POOL, 1)
    caches = small.dd.cache_manager
    here, there = small.here.index.tolist(), small.remote.index.tolist()

    async def one() -> int:
        at = window.advance()
        began = perf_counter_ns()
        await caches.pull_blocks(small.key, small.cache, [there[at]], [here[at]])
        return perf_counter_ns() - began

    counted = _LEAST

    async def beside() -> Seconds:
        """Pull small blocks while one large pull or the next is under way; what ends after it does not count."""
        nonlocal counted
        took: list[int] = []
        moved = 0
        while moved * scale.repeat < scale.total or len(took) < _LEAST:
            large = bulk.move("pull")
            while not large.done():
                nanoseconds = await one()
                if not large.done():
                    took.append(nanoseconds)
            await large
            moved += bulk.here.nbytes
        counted = len(took)
        return np.array(took) * 1e-9

    async def alone() -> Seconds:
        """As many as beside a large pull."""
        return np.array([await one() for _ in range(counted)]) * 1e-9

    # Once beforehand: it warms up, and its data is looked at.
    small.here.clear()
    bulk.here.clear()
    for _ in range(_POOL):
        await one()
    await beside()
    for site, what in ((small, "small"), (bulk, "large")):
        if wrong := site.here.wrong(site.remote.index):
            raise CommandError(f"{what} pulls over {path}: {wrong} of {len(site.here.index)} blocks are not as sent")
    return await in_turn({"beside": beside, "alone": alone}, scale.repeat)
