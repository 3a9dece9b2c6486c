"""Before and after the engine: transfers that first wait for a cache, and what is told when one has ended well."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import _core
from ._sides import Named, Sides, resolve
from .errors import (
    ArgumentError,
    ArgumentTypeError,
    CacheNotFound,
    ClosedError,
    LinkError,
    PeerLostError,
    TransferTimeout,
)
from .keys import NO_ID, CacheKey, CacheKeyByIdAndIndex, Key
from .transfer import Transfer

if TYPE_CHECKING:
    from .cache import CacheManager
    from .control.links import Link
    from .control.table import RemoteEntry
    from .registry import Cache

__all__ = ["Late", "find", "index_key", "notifier", "not_found", "told_after"]

Then = Callable[[Transfer[Any]], None]


# Keys. ------------------------------------------------------------------------------------------------------


def index_key(key: Key) -> Key:
    """Return the key under which a link's tables have what `key` names.

    Raises
    ------
    ArgumentError
        A CacheKey that names both a request and a prefix, or neither.
    """
    if isinstance(key, CacheKey):
        if (key.req_id == NO_ID) == (key.prefix_id == NO_ID):
            given = "neither req_id nor prefix_id" if key.is_placeholder else "both req_id and prefix_id"
            raise ArgumentError(f"{key} has {given}", hint="name a batch slot by one of both")
        return key
    return CacheKeyByIdAndIndex(key.cluster_id, key.cache_id) if isinstance(key, CacheKeyByIdAndIndex) else key


def find(link: Link, key: Key) -> tuple[RemoteEntry, int | None] | None:
    """Find the peer's cache, and the batch slot that the key names: None where it names a whole cache."""
    if isinstance(key, CacheKey):
        return link.slots.get(key)
    if isinstance(key, CacheKeyByIdAndIndex):
        entry = link.table.get(CacheKeyByIdAndIndex(key.cluster_id, key.cache_id))
        return None if entry is None else (entry, key.batch_index)
    entry = link.table.get(key)
    return None if entry is None else (entry, None)


def not_found(key: Key) -> CacheNotFound:
    """Return the error for a key that the peer has nothing under."""
    return CacheNotFound(
        f"cluster {key.cluster_id} has no cache under {key}",
        peer=key.cluster_id,
        hint="the peer has to register it first, and a counted key goes with its pull; wait=True waits for it",
    )


# Before. ----------------------------------------------------------------------------------------------------


class Late:
    """A transfer that cannot start yet: the peer has not registered the cache, or the local one is not ready.

    It waits within the deadline of the transfer, and starts as soon as both are there. Holds the manager weakly: a
    waiting transfer must not keep its DataDist from being dropped.

    Parameters
    ----------
    manager : CacheManager
    transfer : Transfer
    link : Link
        The one that was there at the call; its end ends the transfer.
    named : Named
        With lists that nobody changes.
    cache : Cache
    then : callable or None
        What follows the landing, see `notifier`.
    seconds : float
        Of the deadline; 0: none.
    wait : bool
        Whether to wait for the peer's cache.
    """

    def __init__(
        self,
        manager: CacheManager,
        transfer: Transfer[None],
        link: Link,
        named: Named,
        cache: Cache,
        then: Then | None,
        seconds: float,
        wait: bool,
    ) -> None:
        self._manager = weakref.ref(manager)
        self._runtime = manager._runtime
        self._waiting = manager._waiting
        self._transfer = transfer
        self._link = link
        self._named = named
        self._cache = cache
        self._then = then
        self._seconds = seconds
        self._wait = wait
        self._until = self._runtime.now() + seconds
        self._stage = ""
        self._announced: asyncio.Future[None] | None = None
        transfer._bytes_done = 0
        transfer._on_cancel = lambda: self._end(asyncio.CancelledError())
        self._timer = self._runtime.call_later(seconds, self._late) if seconds else None
        # What the peer registers later is of no use to a cache that has gone meanwhile.
        cache._late[self] = None
        self._go_on()

    def _go_on(self, _: object = None) -> None:
        """Start, or wait for what is still missing."""
        transfer, cache, link = self._transfer, self._cache, self._link
        if transfer.done():
            self._end(asyncio.CancelledError())  # counted, if somebody else set a result
            return
        manager = self._manager()
        if manager is None:
            self._end(ClosedError("the DataDist was dropped"))
            return
        if link.error is not None:
            self._end(end_of_link(link.error, manager))
            return
        error = cache._registered.exception() if cache._registered.done() else None
        if error is None and cache.closed:
            error = ClosedError(f"cache {cache.id} is unregistered")
        if error is not None:
            self._end(error)
            return
        found = find(link, self._named.key)
        if found is None:
            if not self._wait:
                self._end(not_found(self._named.key))
                return
            self._note(f"waiting until the peer registers a cache under {self._named.key}")
            self._announced = link._wait_for_key(index_key(self._named.key))
            self._announced.add_done_callback(self._go_on)
            return
        if not cache._registered.done():
            self._note("waiting for the registration of its cache")
            cache._registered.add_done_callback(self._go_on)
            return
        entry, slot = found
        left = max(self._until - self._runtime.now(), 1e-6) if self._seconds else 0.0
        try:
            sides = resolve(self._named, cache, entry, slot)
            then = told_after(self._named.opcode, entry, slot, sides, self._then)
            if then is not None:
                transfer._then = then
            pair = manager._pair(entry, cache)
            self._over()
            pair.submit(transfer, self._named.opcode, *sides, left)
        except Exception as why:  # whatever it is, whoever waits must hear of it
            self._end(why)

    def _note(self, stage: str) -> None:
        self._stage = stage
        self._waiting.add(self._transfer, stage, self._end)

    def _late(self) -> None:
        self._end(
            TransferTimeout(
                f"the {self._seconds:g} s of the transfer passed while {self._stage}",
                peer=self._link.cluster_id,
                bytes_done=0,
            )
        )

    def _end(self, error: BaseException) -> None:
        self._over()
        self._transfer._told(error)

    def _over(self) -> None:
        self._transfer._on_cancel = None  # what has ended, or begun, lets go of the cache
        self._waiting.remove(self._transfer)
        if self._timer is not None:
            self._timer.cancel()
        self._cache._late.pop(self, None)
        announced, self._announced = self._announced, None
        if announced is not None and not announced.done():
            announced.remove_done_callback(self._go_on)
            announced.cancel()


def end_of_link(error: BaseException, manager: CacheManager | None) -> BaseException:
    """Say the end of a link as transfers say it that are in the engine."""
    if not isinstance(error, LinkError) or isinstance(error, PeerLostError):
        return error
    if manager is None or manager._dd._thread_id != manager._dd._center.thread_id:
        return ClosedError("the DataDist was closed", peer=error.peer)
    return PeerLostError(error.message, peer=error.peer, hint=error.hint)


# After. -----------------------------------------------------------------------------------------------------


def told_after(opcode: int, entry: RemoteEntry, slot: int | None, sides: Sides, then: Then | None) -> Then | None:
    """Return what follows a pull of a slot whose pulls the owner counts: telling it, and then `then`."""
    if opcode != _core.READ or not entry.counted or type(sides.remote) is not _core.Slot or slot not in entry.slots:
        return then
    if entry.slots[slot].req_id == NO_ID:
        return then  # prefixes are pulled again and again
    link, cache_id, tensor, count = entry.link, entry.cache_id, sides.remote_tensor, sides.num_tensors

    def tell(transfer: Transfer[Any]) -> None:
        link._tell_pulled(cache_id, slot, tensor, count)
        if then is None:
            transfer._told(None)
        else:
            then(transfer)

    return tell


def notifier(manager: CacheManager, link: Link, payload: bytes, seconds: float) -> Then:
    """Return what ends a transfer after its notification was handed over, within its deadline."""
    if not isinstance(payload, (bytes, bytearray, memoryview)):
        raise ArgumentTypeError(f"notify must be bytes, got {type(payload).__name__}")
    payload = bytes(payload)
    here, there = manager._dd._config.notify_max_bytes, link.notify_max_bytes
    if len(payload) > min(here, there):
        raise ArgumentError(
            f"notify has {len(payload)} bytes, more than "
            + (f"{here}" if here <= there else f"the {there} that the peer accepts"),
            hint="send a reference, or raise notify_max_bytes",
        )
    # Not the manager itself: a transfer must not keep its DataDist from being dropped.
    runtime, waiting, weak = manager._runtime, manager._waiting, manager._weak
    until = runtime.now() + seconds

    def why(told: asyncio.Future[None]) -> BaseException | None:
        error = told.exception()
        return None if error is None else end_of_link(error, weak())

    def then(transfer: Transfer[Any]) -> None:
        told = link._post_notification(payload)
        if told.done():
            transfer._told(why(told))
            return
        waiting.add(transfer, "waiting for the peer to read its notifications", lambda _: told.cancel())
        # No deadline of the engine's is left; few transfers ever wait for a credit.
        transfer._on_cancel = told.cancel

        def late() -> None:
            transfer._told(
                TransferTimeout(
                    f"the peer has not read its notifications for the {seconds:g} s of the transfer",
                    peer=link.cluster_id,
                    hint="read DataDist.notifications there, or raise notify_credits",
                    bytes_done=transfer.progress.bytes_done,
                    bytes_total=transfer.progress.bytes_total,
                )
            )
            told.cancel()

        timer = runtime.call_later(max(0.0, until - runtime.now()), late) if seconds else None

        def end(done: asyncio.Future[None]) -> None:
            waiting.remove(transfer)
            if timer is not None:
                timer.cancel()
            transfer._told(asyncio.CancelledError() if done.cancelled() else why(done))

        told.add_done_callback(end)

    return then
