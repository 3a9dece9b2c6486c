"""Where events and notifications wait for their readers.

Events go to every reader, from the moment its stream was made. Notifications go to one reader each: there is
one inbox, and readers compete.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from ..types import Event, Notification

if TYPE_CHECKING:
    import asyncio

    from .. import _core
    from .._loop import Runtime

__all__ = ["EventHub", "EventStream", "EventsLagged", "Inbox", "NotificationStream", "Readers"]

EVENTS_KEPT: Final = 4096
"""Events that wait for one slow reader."""


@dataclass(frozen=True, slots=True)
class EventsLagged:
    """The reader was too slow: events after the last one it got, and before the next, are lost to it.

    Attributes
    ----------
    missed : int
        How many.
    """

    missed: int


class _Waiters:
    """Readers that wait for something to come. Waking one that was cancelled meanwhile wakes the next."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._futures: deque[asyncio.Future[Any]] = deque()

    async def wait(self) -> None:
        future = self._runtime.future()
        self._futures.append(future)
        try:
            await future
        except BaseException:
            if future.done() and not future.cancelled():
                self.wake()
            raise
        finally:
            if not future.done() or future.cancelled():
                self._drop(future)

    def _drop(self, future: asyncio.Future[Any]) -> None:
        if future in self._futures:
            self._futures.remove(future)

    def wake(self) -> None:
        while self._futures:
            future = self._futures.popleft()
            if not future.done():
                future.set_result(None)
                return

    def wake_all(self) -> None:
        while self._futures:
            self.wake()


class EventStream:
    """The events of a DataDist from now on, as an asynchronous iterator.

    It ends when the DataDist is closed, after the last event. A reader that falls more than `EVENTS_KEPT`
    events behind gets an `EventsLagged` in the place of those it missed. Dropping the stream ends the
    subscription.
    """

    def __init__(self, hub: EventHub) -> None:
        self._hub = hub
        self._events: deque[Event | EventsLagged] = deque()
        self._missed = 0
        self._ended = hub.closed
        self._waiters = _Waiters(hub._runtime)

    def _put(self, event: Event) -> None:
        if self._missed or len(self._events) >= EVENTS_KEPT:
            self._missed += 1
        else:
            self._events.append(event)
            self._waiters.wake()

    def _end(self) -> None:
        self._ended = True
        self._waiters.wake_all()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event | EventsLagged:
        while True:
            if self._events:
                return self._events.popleft()
            if self._missed:
                missed, self._missed = self._missed, 0
                return EventsLagged(missed)
            if self._ended:
                raise StopAsyncIteration
            await self._waiters.wait()

    async def aclose(self) -> None:
        """End the subscription; whoever iterates comes to the end."""
        self._hub._streams.discard(self)
        self._end()


class Readers:
    """What wakes the event loop only while somebody reads it: what peers did to local memory, and layers that land.

    A model that computes beside the loop pays for each time the loop wakes.

    Parameters
    ----------
    node : _core.Node
    """

    def __init__(self, node: _core.Node) -> None:
        self._node = node
        self._of_peers = False
        self._of_layers = 0
        self._tell()

    def read_peers(self, reading: bool) -> None:
        """Say whether anybody reads what peers do."""
        if reading is not self._of_peers:
            self._of_peers = reading
            self._tell()

    @contextlib.contextmanager
    def of_layers(self) -> Iterator[None]:
        """Read layers that land, and first those that have."""
        self._of_layers += 1
        if self._of_layers == 1:
            self._tell()
        try:
            yield
        finally:
            self._of_layers -= 1
            if not self._of_layers:
                self._tell()

    def _tell(self) -> None:
        self._node.tell(peers=self._of_peers, layers=self._of_layers > 0)


class EventHub:
    """Gives events to all streams."""

    def __init__(self, runtime: Runtime, readers: Readers) -> None:
        self._runtime = runtime
        self._readers = readers
        self._streams: weakref.WeakSet[EventStream] = weakref.WeakSet()
        self.closed = False

    def publish(self, event: Event) -> None:
        """Give an event to every stream."""
        streams = tuple(self._streams)
        for stream in streams:
            stream._put(event)
        if not streams:  # the last may just have been dropped
            self._readers.read_peers(False)

    def stream(self) -> EventStream:
        """Make a stream that begins now."""
        stream = EventStream(self)
        self._streams.add(stream)
        self._readers.read_peers(True)
        return stream

    def close(self) -> None:
        """End all streams after what they hold."""
        self.closed = True
        for stream in tuple(self._streams):
            stream._end()


class Inbox:
    """Notifications that arrived and were not read yet.

    Peers send no more than the credits they were given, so the inbox is bounded without dropping anything.
    What is unread counts by cluster id, not by link: a peer cannot gain credits by linking again.

    Parameters
    ----------
    runtime : Runtime
    on_read : callable
        Called with the cluster id for each notification that was read.
    """

    def __init__(self, runtime: Runtime, on_read: Callable[[int], None]) -> None:
        self._waiters = _Waiters(runtime)
        self._on_read = on_read
        self._items: deque[Notification] = deque()
        self._unread: dict[int, int] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._items)

    def unread(self, cluster_id: int) -> int:
        """Return how many notifications of this peer wait."""
        return self._unread.get(cluster_id, 0)

    def put(self, notification: Notification) -> None:
        """Add one."""
        self._items.append(notification)
        self._unread[notification.cluster_id] = self.unread(notification.cluster_id) + 1
        self._waiters.wake()

    async def get(self) -> Notification | None:
        """Wait for one; None when the inbox is closed and empty."""
        while not self._items:
            if self._closed:
                return None
            await self._waiters.wait()
        notification = self._items.popleft()
        left = self._unread[notification.cluster_id] - 1
        if left:
            self._unread[notification.cluster_id] = left
        else:
            del self._unread[notification.cluster_id]
        self._on_read(notification.cluster_id)
        return notification

    def close(self) -> None:
        """Let readers come to the end after what is there."""
        self._closed = True
        self._waiters.wake_all()


class NotificationStream:
    """Notifications of all peers, as an asynchronous iterator. Several compete for the same inbox."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Notification:
        notification = await self._inbox.get()
        if notification is None:
            raise StopAsyncIteration
        return notification
