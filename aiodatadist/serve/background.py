"""What runs beside requests: none of it ends unseen.

Work that a process cannot do without runs by `forever`, which begins it anew when it fails. Work that is done once, and
that nobody awaits, is a task of a `Tasks`. Both log what goes wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Final

from aiodatadist.observe import get_logger

__all__ = ["Tasks", "beside", "forever", "have_seen", "log_failure"]

_PAUSE: Final = 0.5

_log = get_logger().bind(part="serve")


async def forever(name: str, work: Callable[[], Awaitable[None]], pause: float = _PAUSE) -> None:
    """Do a piece of work again and again until cancelled; one that fails is logged, and begun anew after a pause.

    Parameters
    ----------
    name : str
        For the log.
    work : callable
        Returns an awaitable.
    pause : float
        Seconds after a failure.
    """
    while True:
        try:
            await work()
        except Exception:
            _log.exception("a background task failed, and begins anew", task=name)
            await asyncio.sleep(pause)
        else:
            await asyncio.sleep(0)  # also where the work did not wait for anything


class Tasks:
    """Tasks that nobody awaits. One that fails is logged."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Begin a task."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def wait(self, seconds: float | None = None) -> None:
        """Wait until those that run now have ended, or for so long."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)

    def cancel(self) -> None:
        """Cancel all."""
        for task in self._tasks:
            task.cancel()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        log_failure(task)


@contextlib.asynccontextmanager
async def beside(*works: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run coroutines, such as those of `forever`, beside the body, and cancel them at its end."""
    tasks = Tasks()
    for work in works:
        tasks.start(work)
    try:
        yield
    finally:
        tasks.cancel()
        await tasks.wait()


def log_failure(task: asyncio.Task[Any]) -> None:
    """Look how a task has ended that nobody awaits."""
    if not task.cancelled() and (why := task.exception()) is not None:
        _log.error("a background task failed", task=repr(task.get_coro()), exc_info=why)


def have_seen(done: asyncio.Future[Any]) -> None:
    """Have seen how a future ended, which somebody else deals with."""
    if not done.cancelled():
        done.exception()
