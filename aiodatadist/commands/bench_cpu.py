"""`bench cpu`: what transfers take from the processors on both sides, and what an idle pair takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Final, NamedTuple

from .bench_rows import Progress, Rows, in_turn, size_text
from .bench_transfers import DIRECTIONS, Direction, Session, Site

__all__ = ["CpuScale", "measure_cpu"]

_SECONDS: Final = 0.25
"""How long transfers follow each other, each round."""
_PERCENT: Final = ("1 % of a core", [1.0])
"""What the passive side of a pull over shm, and an idle pair, may take: what the clock and heartbeats cost."""


@dataclass(frozen=True, slots=True)
class CpuScale:
    """How much is measured.

    Attributes
    ----------
    nbytes : int
        Bytes of one transfer.
    repeat : int
        Rounds.
    idle_seconds : float
        How long an idle pair is watched, each round.
    """

    nbytes: int
    repeat: int
    idle_seconds: float


class _Cores(NamedTuple):
    """Percent of a core."""

    owner: float
    initiator: float


async def measure_cpu(
    session: Session, paths: Sequence[str], blocks: Sequence[int], scale: CpuScale, rows: Rows, progress: Progress
) -> None:
    """Measure for each path the CPU of both processes while transfers follow each other, then that of an idle pair."""
    block = min(blocks, key=lambda size: abs(size - 65536))
    for path in paths:
        progress(f"cpu: {path}, blocks of {size_text(block)}")
        async with session.site(path, block, max(1, scale.nbytes // block)) as site:
            await _measure_path(session, site, path, scale, rows)
    progress("cpu: an idle pair")

    async def idle() -> float:
        before, began = await _both(session), perf_counter()
        await asyncio.sleep(scale.idle_seconds)
        after = await _both(session)
        return sum(y - x for x, y in zip(before, after, strict=True)) / (perf_counter() - began) * 100

    found = await in_turn({"idle": idle}, scale.repeat)
    rows.add(
        "cpu both sides, idle", "+".join(session.nodes), None, found["idle"], "% of a core", "lower", _PERCENT, 1.0
    )


async def _measure_path(session: Session, site: Site, path: str, scale: CpuScale, rows: Rows) -> None:
    def moved(direction: Direction) -> Callable[[], Awaitable[_Cores]]:
        async def step() -> _Cores:
            before, began = await _both(session), perf_counter()
            while perf_counter() - began < _SECONDS:
                await site.move(direction)
            after = await _both(session)
            took = perf_counter() - began
            return _Cores(*((y - x) / took * 100 for x, y in zip(before, after, strict=True)))

        return step

    for direction in DIRECTIONS:
        await site.move(direction)
    found = await in_turn({direction: moved(direction) for direction in DIRECTIONS}, scale.repeat)
    for name, rounds in found.items():
        for side in _Cores._fields:
            samples = [getattr(cores, side) for cores in rounds]
            costless = (side, name) == ("owner", "pull") and path != "tcp"
            limit, target = (_PERCENT, 1.0) if costless else (None, None)
            rows.add(f"cpu {side}, {name}", path, site.here.block, samples, "% of a core", "lower", limit, target)


async def _both(session: Session) -> _Cores:
    """Return the CPU seconds of both processes."""
    return _Cores(float(await session.peer.call("cpu")), time.process_time())
