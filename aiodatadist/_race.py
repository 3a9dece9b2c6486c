"""Several ways to the same peer, tried in order: each has a head start before the next one, and the first wins."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol, TypeVar

import anyio

from ._scopes import Deadline, Tasks

__all__ = ["HEAD_START", "race"]

HEAD_START: Final = 0.25
"""Seconds before the next way is tried beside one that neither works nor fails."""


class _Closable(Protocol):
    def close(self) -> None: ...


Way = TypeVar("Way")
Stream = TypeVar("Stream", bound=_Closable)


async def race(
    ways: Sequence[Way], connect: Callable[[Way], Awaitable[Stream]], failures: list[tuple[Way, OSError]]
) -> tuple[Way, Stream] | None:
    """Connect by the first of several ways that works.

    A way that fails makes room for the next at once, and one that hangs after `HEAD_START`; it goes on beside it.

    Parameters
    ----------
    ways : sequence
        At least one, best first.
    connect : callable
        A coroutine function that takes a way. Its OSError is a failure; anything else ends the race.
    failures : list
        Gets a pair for each way that failed, in the order of the failures.

    Returns
    -------
    tuple or None
        The way that won, and what `connect` returned for it; None when all have failed.
    """
    won: list[tuple[Way, Stream]] = []
    over: set[int] = set()
    moved = anyio.Event()

    async def run(number: int, way: Way) -> None:
        try:
            stream = await connect(way)
        except OSError as why:
            failures.append((way, why))
        else:
            if won:
                stream.close()
            else:
                won.append((way, stream))
        over.add(number)
        moved.set()

    if len(ways) == 1:
        await run(0, ways[0])
        return won[0] if won else None
    try:
        async with Tasks() as tasks:
            for number, way in enumerate(ways):
                tasks.start(run, number, way, name="aiodatadist-connect")
                last = number == len(ways) - 1
                with Deadline(None if last else HEAD_START):
                    while not won and (len(over) < len(ways) if last else number not in over):
                        moved = anyio.Event()
                        await moved.wait()
                if won:
                    break
            tasks.cancel()
    except BaseException:
        for _, stream in won:
            stream.close()
        raise
    return won[0] if won else None
