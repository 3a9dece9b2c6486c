"""Scopes of time and of tasks: thin anyio, made to survive a loop that is closed under them.

When a closed loop throws a coroutine away, GeneratorExit leaves its ``async with`` and ``with`` blocks, and there is no
loop to wait in. Leaving one of these then does nothing. `_loop` hands them on to the other modules.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import sys
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.abc

__all__ = ["Deadline", "Tasks", "shielded"]


class Deadline:
    """``with Deadline(seconds) as limit:`` cancels what is inside at the deadline; then ``limit.expired``.

    Parameters
    ----------
    seconds : float or None
        None never expires.

    Notes
    -----
    A thin anyio cancel scope. The difference: when a closed loop throws the coroutine away, leaving the scope
    does nothing, because a scope needs a running loop.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._scope: anyio.CancelScope | None = None

    def __enter__(self) -> Self:
        end = float("inf") if self._seconds is None else anyio.current_time() + self._seconds
        self._scope = anyio.CancelScope(deadline=end)
        self._scope.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        assert self._scope is not None
        return kind is not GeneratorExit and bool(self._scope.__exit__(kind, error, trace))

    @property
    def expired(self) -> bool:
        """Whether the deadline, or `cancel`, ended what was inside."""
        return self._scope is not None and self._scope.cancelled_caught

    def cancel(self) -> None:
        """End what is inside now. Does nothing before it has begun, or without a running loop."""
        if self._scope is not None and asyncio._get_running_loop() is not None:
            self._scope.cancel()


class shielded:
    """``with shielded():`` keeps cancel scopes outside from cancelling what is inside."""

    def __init__(self) -> None:
        self._scope = anyio.CancelScope(shield=True)

    def __enter__(self) -> None:
        self._scope.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return kind is not GeneratorExit and bool(self._scope.__exit__(kind, error, trace))


class Tasks:
    """An anyio task group that may be thrown away by a closed loop without waiting for its tasks."""

    def __init__(self) -> None:
        self._group: anyio.abc.TaskGroup = anyio.create_task_group()

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if kind is GeneratorExit:
            return None
        return await self._group.__aexit__(kind, error, trace)

    def start(self, function: Callable[..., Coroutine[Any, Any, Any]], *args: Any, name: str | None = None) -> None:
        """Start a task in the group, from a task or a callback of the loop."""
        start: Callable[[], object] = functools.partial(self._group.start_soon, function, *args, name=name)
        sniffio: Any = sys.modules.get("sniffio")
        if sniffio is None or asyncio.current_task() is not None:
            start()
            return
        # Where sniffio is installed, anyio asks it which loop is running, and it knows of none outside of tasks.
        context = contextvars.copy_context()
        context.run(sniffio.current_async_library_cvar.set, "asyncio")
        context.run(start)

    def cancel(self) -> None:
        """Cancel all tasks of the group and what the group's block does."""
        self._group.cancel_scope.cancel()
