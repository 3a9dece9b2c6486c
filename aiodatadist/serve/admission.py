"""How many requests a router takes: so many at once, some more wait in a queue, and the rest is told to come back."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable

from .errors import ServeError

__all__ = ["Admission"]


class Admission:
    """The router's door. First come, first in.

    Parameters
    ----------
    room : callable
        Returns how many requests may be inside now. 0: nobody is there to serve, and each may come in and hear that.
    queue_size : int
        Most requests that wait.
    queue_wait : float
        Seconds that a request waits.

    Attributes
    ----------
    inside : int
        Requests that were let in and have not ended.
    """

    def __init__(self, room: Callable[[], int], queue_size: int, queue_wait: float) -> None:
        self._room = room
        self._queue_size = queue_size
        self._queue_wait = queue_wait
        self._queue: deque[asyncio.Future[None]] = deque()
        self.inside = 0

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @contextlib.asynccontextmanager
    async def enter(self) -> AsyncIterator[None]:
        """Be inside during the body. Raises ServeError ``queue_full`` or ``queue_timeout``."""
        await self._come_in()
        try:
            yield
        finally:
            self.inside -= 1
            self.wake()

    def wake(self) -> None:
        """Let in who may come in: to be called when there is more room than before."""
        while self._queue and self._has_room():
            place = self._queue.popleft()
            if not place.done():
                self.inside += 1  # for it, so that nobody gets ahead meanwhile
                place.set_result(None)

    def _has_room(self) -> bool:
        room = self._room()
        return room == 0 or self.inside < room

    async def _come_in(self) -> None:
        if not self._queue and self._has_room():
            self.inside += 1
            return
        if len(self._queue) >= self._queue_size:
            raise ServeError("queue_full", f"{len(self._queue)} requests are waiting already; come back later")
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(place)
        try:
            async with asyncio.timeout(self._queue_wait):
                await place
        except BaseException as why:
            if place.done() and not place.cancelled():
                self.inside -= 1  # it was let in, and goes
                self.wake()
            else:
                with contextlib.suppress(ValueError):
                    self._queue.remove(place)
            if isinstance(why, TimeoutError):
                raise ServeError("queue_timeout", f"no room within {self._queue_wait:g} s; come back later") from None
            raise
