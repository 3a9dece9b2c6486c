"""Tasks that wait for something here to change."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

    from .._loop import Runtime

__all__ = ["Waiting"]


class Waiting:
    """Everybody who waits is woken at each change, and looks again whether it is the one that was waited for."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._futures: list[asyncio.Future[None]] = []

    async def changed(self) -> None:
        """Wait for the next `wake`."""
        future = self._runtime.future()
        self._futures.append(future)
        try:
            await future
        finally:
            self._futures.remove(future)

    def wake(self) -> None:
        """Wake all. Does nothing when the loop is closed: nobody can be woken there."""
        if self._runtime.closed:
            return
        for future in self._futures:
            if not future.done():
                future.set_result(None)
