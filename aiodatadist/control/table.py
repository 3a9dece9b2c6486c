"""Who holds which cache: the local table, what each link still has to say about it, and the peer's side.

Nothing here waits. `LocalTable` is changed by the cache manager; each link hangs a `TableFeed` on it and
takes announcements and withdrawals from there when its connection has room. What is announced and withdrawn
before it was sent costs nothing, so a slow peer holds at most one entry for each cache it may know.
`RemoteTable` is the other end of a feed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np

from .. import _core
from ..errors import ArgumentError, ArgumentTypeError, DataDistError, InternalError, ProtocolError
from ..keys import NO_ID, BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, Key
from ..observe import get_logger
from ..types import Geometry, Placement
from . import wire

if TYPE_CHECKING:
    import asyncio

    from ..registry import Cache
    from .links import Link

__all__ = [
    "DEVICE_TRANSPORTS",
    "Delta",
    "LocalRecord",
    "LocalTable",
    "RemoteEntry",
    "RemoteTable",
    "TableFeed",
    "wire_geometry",
    "wire_slots",
]

MAX_REMOTE_CACHES: Final = 65536
"""Caches that one peer may have announced at a time."""

MAX_REMOTE_ADDRESSES: Final = 2**20
"""Addresses of tensors that are kept of one peer; caches beyond that are known by their keys alone."""

DEVICE_TRANSPORTS: Final = ("hixl",)
"""Transports that reach the memory of an NPU."""

_log = get_logger()

Addresses: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]
_NO_ADDRESSES: Final = np.empty(0, np.uint64)

Access = Literal["r", "rw"]
RemoteKey = BlocksCacheKey | CacheKeyByIdAndIndex


@dataclass(frozen=True, slots=True, eq=False)
class LocalRecord:
    """A local cache that is ready and that peers may use.

    Parameters
    ----------
    cache_id : int
        Never used again by this DataDist.
    key : BlocksCacheKey or None
    geometry : Geometry
    access : str
        What peers may do, ``"r"`` or ``"rw"``.
    native : _core.LocalCache
    slots : dict
        The key of each batch slot that has one, as it is now.
    counted : bool
        Peers tell when they have pulled a slot by its request.
    addresses : tuple of int
        Of the tensors, in this process.
    """

    cache_id: int
    key: BlocksCacheKey | None
    geometry: Geometry
    access: Access
    native: _core.LocalCache
    slots: Mapping[int, CacheKey] = field(default_factory=dict)
    counted: bool = False
    addresses: tuple[int, ...] = ()

    def __str__(self) -> str:
        named = f" of model {self.key.model_id}" if self.key is not None else ""
        return f"cache {self.cache_id}{named} ({self.geometry.num_tensors} x {self.geometry.shape})"


class Delta(NamedTuple):
    """One change of the local table, to be told to a peer.

    Parameters
    ----------
    version : int
        Version of the table at the change.
    cache_id : int
    record : LocalRecord or None
        None: the cache is withdrawn.
    gone : list of int or None
        The peer knows the cache, and these slots have lost their keys.
    """

    version: int
    cache_id: int
    record: LocalRecord | None
    gone: list[int] | None = None


class LocalTable:
    """The local caches that peers may use. Changes reach all links.

    Attributes
    ----------
    version : int
        Grows by one with each change.
    on_pulled : callable
        ``(cache_id, slot, tensor, count)``: a peer has pulled tensors of a slot whose pulls are counted.
    """

    def __init__(self) -> None:
        self.version = 0
        self.on_pulled: Callable[[int, int, int, int], None] = lambda *_: None
        self._records: dict[int, LocalRecord] = {}
        self._feeds: dict[TableFeed, None] = {}

    @property
    def records(self) -> Mapping[int, LocalRecord]:
        """The caches by id."""
        return self._records

    def add(self, record: LocalRecord) -> None:
        """Announce a cache to all links, present and future."""
        if record.cache_id in self._records:
            raise InternalError(f"cache {record.cache_id} is in the table already")
        self.version += 1
        self._records[record.cache_id] = record
        for feed in tuple(self._feeds):
            feed._changed(Delta(self.version, record.cache_id, record))

    def slot_gone(self, cache_id: int, slot: int) -> None:
        """Tell all links that a slot has lost its key. The record's `slots` no longer has it."""
        record = self._records.get(cache_id)
        if record is None:
            return  # not announced yet, or withdrawn
        self.version += 1
        for feed in tuple(self._feeds):
            feed._slot_gone(Delta(self.version, cache_id, record, [slot]))

    def remove(self, cache_id: int) -> None:
        """Withdraw a cache from all links. An unknown id is no error: the cache was never announced."""
        if self._records.pop(cache_id, None) is None:
            return
        self.version += 1
        for feed in tuple(self._feeds):
            feed._changed(Delta(self.version, cache_id, None))

    def clear(self) -> None:
        """Let go of all caches, when no link is left to hear of it."""
        self._records.clear()

    def feed(self, wake: Callable[[], None]) -> TableFeed:
        """Open a feed that begins with all present caches.

        Parameters
        ----------
        wake : callable
            Called when the feed has something to take and had nothing before.
        """
        feed = TableFeed(self, wake)
        self._feeds[feed] = None
        return feed


class TableFeed:
    """What one peer has not been told yet. Made by `LocalTable.feed`."""

    def __init__(self, table: LocalTable, wake: Callable[[], None]) -> None:
        self._table = table
        self._wake = wake
        self._announced: set[int] = set()
        # All of the snapshot carries the version at its beginning; later changes have higher ones.
        self._pending = {
            record.cache_id: Delta(table.version, record.cache_id, record) for record in table.records.values()
        }

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def version(self) -> int:
        """Version of the table that the peer has when nothing is pending."""
        return self._table.version

    def _changed(self, delta: Delta) -> None:
        idle = not self._pending
        unsent = self._pending.get(delta.cache_id)
        if unsent is not None and unsent.gone is not None:
            # In the place of what it makes superfluous: a cache that waits behind may have taken over a key.
            self._pending[delta.cache_id] = delta._replace(version=unsent.version)
            return
        # The entry moves to the end, so that versions grow in the order in which changes are taken.
        self._pending.pop(delta.cache_id, None)
        if delta.record is None and delta.cache_id not in self._announced:
            if unsent is None:
                raise InternalError(f"cache {delta.cache_id} leaves a feed that never had it")
            return
        self._pending[delta.cache_id] = delta
        if idle:
            self._wake()

    def _slot_gone(self, delta: Delta) -> None:
        idle = not self._pending
        unsent = self._pending.get(delta.cache_id)
        if unsent is not None and unsent.gone is not None and delta.gone is not None:
            # It stays in its place: a cache that waits behind may have taken over a key that went before.
            unsent.gone.extend(delta.gone)
            return
        # One that is not announced yet will be announced without the key.
        self._pending.pop(delta.cache_id, None)
        self._pending[delta.cache_id] = delta if unsent is None else unsent._replace(version=delta.version)
        if idle:
            self._wake()

    def take(self) -> Delta | None:
        """Return the oldest change that was not taken yet."""
        for cache_id in self._pending:
            delta = self._pending.pop(cache_id)
            if delta.record is None:
                self._announced.discard(cache_id)
            else:
                self._announced.add(cache_id)
            return delta
        return None

    def close(self) -> None:
        """Take the feed off the table."""
        self._table._feeds.pop(self, None)
        self._pending.clear()


def wire_geometry(geometry: Geometry) -> wire.WireGeometry:
    """Return a geometry as it travels."""
    return wire.WireGeometry(
        dtype=geometry.dtype,
        itemsize=geometry.itemsize,
        shape=list(geometry.shape),
        num_tensors=geometry.num_tensors,
        num_blocks=geometry.num_blocks,
        block_bytes=geometry.block_bytes,
        stride=geometry.stride,
    )


def wire_slots(slots: Mapping[int, CacheKey]) -> list[wire.SlotKey]:
    """Return the keys of slots as they travel."""
    return [
        wire.SlotKey(slot=slot, model_id=key.model_id, prefix_id=key.prefix_id)
        if key.prefix_id != NO_ID
        else wire.SlotKey(slot=slot, model_id=key.model_id, req_id=key.req_id)
        for slot, key in slots.items()
    ]


def _read_addresses(sent: bytes, geometry: Geometry) -> Addresses:
    addresses = np.frombuffer(sent[: len(sent) // 8 * 8], "<u8")
    if sent and len(sent) != 8 * geometry.num_tensors:
        raise ProtocolError(f"the peer announced {len(sent)} bytes of addresses for {geometry.num_tensors} tensors")
    if len(addresses) and int(addresses.max()) + _extent(geometry) > 2**64:
        raise ProtocolError(f"the peer announced a tensor at {int(addresses.max()):#x} that ends beyond all memory")
    return addresses


def _read_geometry(sent: wire.WireGeometry) -> Geometry:
    try:
        return Geometry(
            dtype=sent.dtype,
            itemsize=sent.itemsize,
            shape=tuple(sent.shape),
            num_tensors=sent.num_tensors,
            num_blocks=sent.num_blocks,
            block_bytes=sent.block_bytes,
            stride=sent.stride,
        )
    except (ArgumentError, ArgumentTypeError) as why:
        raise ProtocolError(f"the peer announced an impossible geometry: {why}") from why


class RemoteEntry(_core.HasPairs):
    """A peer's cache, as this side reaches it.

    Attributes
    ----------
    cache_id : int
        Its id at the owner.
    key : BlocksCacheKey or None
    geometry : Geometry
    access : str
        What this side may do, ``"r"`` or ``"rw"``.
    native : _core.RemoteCache or None
        None where no transport of the link reaches the memory; `error` says why. For host memory of this side.
    native_device : _core.RemoteCache or None
        The same for an NPU's memory of this side, which fewer transports bring together with the peer's.
    native_refused : _core.RemoteCache or None
        The same for host memory of this side that HIXL refuses.
    error : DataDistError or None
    pairs : dict
        By local cache id; kept by the cache manager, emptied when the entry ends.
    link : Link
    slots : dict
        The key of each batch slot that has one.
    counted : bool
        The owner wants to hear of pulls by request.
    addresses : array
        Where the tensors lie in the owner's process; empty where it has not said so.
    """

    __slots__ = (
        "access",
        "addresses",
        "cache_id",
        "counted",
        "error",
        "geometry",
        "key",
        "link",
        "native",
        "native_device",
        "native_refused",
        "slots",
    )

    def __init__(
        self, link: Link, cache_id: int, key: BlocksCacheKey | None, geometry: Geometry, access: Access
    ) -> None:
        self.link = link
        self.cache_id = cache_id
        self.key = key
        self.geometry = geometry
        self.access = access
        self.native: _core.RemoteCache | None = None
        self.native_device: _core.RemoteCache | None = None
        self.native_refused: _core.RemoteCache | None = None
        self.error: DataDistError | None = None
        self.pairs = {}
        self.slots: dict[int, CacheKey] = {}
        self.counted = False
        self.addresses: Addresses = _NO_ADDRESSES

    def __repr__(self) -> str:
        reached = self.native.path if self.native is not None else f"unreachable: {self.error}"
        return f"<RemoteEntry cache {self.cache_id} key={self.key} access={self.access} {reached}>"

    def native_for(self, cache: Cache) -> _core.RemoteCache | None:
        """Return what reaches the peer's cache from a local one."""
        if cache.placement is not Placement.HOST:
            return self.native_device
        if self.native is None or self.native.transport not in DEVICE_TRANSPORTS or cache._native is None:
            return self.native  # of a cache that is not registered yet it is asked again when it is
        return self.native if cache._native.served_by(self.native.transport) else self.native_refused

    def _end(self) -> None:
        self.pairs.clear()
        for native in (self.native, self.native_device, self.native_refused):
            if native is not None:
                native.release()


def _wake(waiting: Sequence[asyncio.Future[None]]) -> None:
    for future in waiting:
        if not future.done() and not future.get_loop().is_closed():
            future.set_result(None)


def _extent(geometry: Geometry) -> int:
    """Return the bytes from the beginning of a tensor to its end."""
    return geometry.stride * (geometry.num_blocks - 1) + geometry.block_bytes


class _Places(NamedTuple):
    """The tensors that a peer lets be written by address, in the order of their beginnings, of equal ones by age."""

    starts: Addresses
    ends: Addresses  # the last byte's address
    entries: list[RemoteEntry]
    which: np.ndarray[Any, np.dtype[np.int64]]  # of the entries
    tensors: np.ndarray[Any, np.dtype[np.int64]]


ImportKeys = Sequence[tuple[str, bytes, int]]


class RemoteTable:
    """The caches that the peer of one link has announced.

    Parameters
    ----------
    link : Link
    cluster_id : int
        The peer.
    import_cache : callable
        ``(cache_id, (num_tensors, num_blocks, block_bytes, stride), keys) -> _core.RemoteCache``.

    Attributes
    ----------
    by_key : dict
        Each entry under `CacheKeyByIdAndIndex` with batch index 0, and under its own key if it has one. The
        cache manager's hot path looks entries up here.
    by_slot_key : dict
        Entry and slot of each batch slot that has a key; keys name either a request or a prefix.
    version : int
        Version of the peer's table, as far as it was told.
    """

    def __init__(
        self,
        link: Link,
        cluster_id: int,
        import_cache: Callable[[int, tuple[int, int, int, int], ImportKeys], _core.RemoteCache],
    ) -> None:
        self._link = link
        self._cluster_id = cluster_id
        self._import = import_cache
        self._entries: dict[int, RemoteEntry] = {}
        self.by_key: dict[RemoteKey, RemoteEntry] = {}
        self.by_slot_key: dict[CacheKey, tuple[RemoteEntry, int]] = {}
        self._wanted: dict[Key, list[asyncio.Future[None]]] = {}
        self._places: _Places | None = None  # made when asked for
        self._addresses = 0  # in all entries
        self.version = 0

    def __len__(self) -> int:
        return len(self._entries)

    def announce(self, message: wire.CacheAnnounce, keys: ImportKeys) -> RemoteEntry:
        """Take an announcement in.

        Parameters
        ----------
        message : wire.CacheAnnounce
        keys : sequence of (str, bytes, int)
            Transport, key and descriptor or -1, in this side's order of preference. Descriptors are borrowed.

        Returns
        -------
        RemoteEntry
            Without `native` where the cache cannot be reached, or the peer has closed it meanwhile.

        Raises
        ------
        ProtocolError
            The announcement contradicts what the peer said before, or itself.
        """
        self._advance(message.version, same=True)
        cache_id = message.cache_id
        if cache_id in self._entries:
            raise ProtocolError(f"the peer announced cache {cache_id} twice")
        if len(self._entries) >= MAX_REMOTE_CACHES:
            raise ProtocolError(f"the peer announced more than {MAX_REMOTE_CACHES} caches")
        key = None if message.model_id is None else BlocksCacheKey(self._cluster_id, message.model_id)
        if key is not None and key in self.by_key:
            raise ProtocolError(
                f"the peer announced model {key.model_id} for cache {cache_id}, but it belongs to cache "
                f"{self.by_key[key].cache_id}"
            )
        geometry = _read_geometry(message.geometry)
        access: Access = "rw" if message.access == "rw" else "r"
        entry = RemoteEntry(self._link, cache_id, key, geometry, access)
        entry.counted = message.counted
        addresses = _read_addresses(message.addresses, geometry)
        if access == "rw" and self._addresses + len(addresses) <= MAX_REMOTE_ADDRESSES:
            entry.addresses = addresses
        slots = self._read_slots(entry, message.slots)
        shape = (geometry.num_tensors, geometry.num_blocks, geometry.block_bytes, geometry.stride)
        try:
            entry.native = self._import(cache_id, shape, keys)
        except DataDistError as why:
            # One cache out of reach is no reason to lose the others: whoever uses it gets the error.
            entry.error = why
        entry.native_device = self._import_also(entry, shape, keys, device=True)
        entry.native_refused = self._import_also(entry, shape, keys, device=False)
        self._entries[cache_id] = entry
        self._addresses += len(entry.addresses)
        self._places = None
        self.by_key[CacheKeyByIdAndIndex(self._cluster_id, cache_id, 0)] = entry
        if key is not None:
            self.by_key[key] = entry
        entry.slots = slots
        self.by_slot_key.update((name, (entry, slot)) for slot, name in slots.items())
        if self._wanted:
            for name in (CacheKeyByIdAndIndex(self._cluster_id, cache_id, 0), key, *slots.values()):
                if name is not None:
                    _wake(self._wanted.get(name, ()))
        return entry

    def _import_also(
        self, entry: RemoteEntry, shape: tuple[int, int, int, int], keys: ImportKeys, *, device: bool
    ) -> _core.RemoteCache | None:
        """Reach a peer's cache for memory of an NPU here, or for what HIXL refuses; None where that cannot be."""
        reaching = [key for key in keys if (key[0] in DEVICE_TRANSPORTS) is device]
        if not reaching or entry.native is None:
            return None
        if (entry.native.transport in DEVICE_TRANSPORTS) is device:
            return entry.native
        try:
            return self._import(entry.cache_id, shape, reaching)
        except DataDistError as why:
            _log.warning(
                "a cache of the peer cannot be reached from some memory here",
                device=device,
                cluster_id=self._cluster_id,
                cache_id=entry.cache_id,
                error=str(why),
            )
            return None

    def find_address(self, address: int) -> tuple[RemoteEntry, int, int] | None:
        """Find the writable cache, the tensor and the byte offset in it that an address of the owner's process names.

        Where memory is registered several times, that of the tensors counts which begins nearest; of equal ones the
        newest.
        """
        if not 0 <= address < 2**64:
            return None
        places = self._places
        if places is None:
            places = self._places = self._sort()
        key = np.uint64(address)
        at = int(np.searchsorted(places.starts, key, "right")) - 1
        if at >= 0 and address > int(places.ends[at]):
            # One that begins earlier and reaches further: looked for without a loop, because a peer may say anything.
            holding = np.flatnonzero(places.ends[:at] >= key)
            at = int(holding[-1]) if len(holding) else -1
        if at < 0:
            return None
        return places.entries[places.which[at]], int(places.tensors[at]), address - int(places.starts[at])

    def _sort(self) -> _Places:
        entries = [entry for entry in self._entries.values() if len(entry.addresses)]
        each = np.array([len(entry.addresses) for entry in entries], np.int64)
        starts = np.concatenate([_NO_ADDRESSES, *(entry.addresses for entry in entries)])
        which = np.repeat(np.arange(len(entries)), each)
        last = np.array([_extent(entry.geometry) - 1 for entry in entries], np.uint64)
        tensors = np.arange(len(starts)) - np.repeat(np.cumsum(each) - each, each)
        order = np.argsort(starts, kind="stable")
        return _Places(starts[order], (starts + last[which])[order], entries, which[order], tensors[order])

    def want(self, key: Key, announced: asyncio.Future[None]) -> None:
        """Have a future done when a cache is announced under `key`, or the table is cleared."""
        self._wanted.setdefault(key, []).append(announced)

        def forget(_: asyncio.Future[None]) -> None:
            waiting = self._wanted.get(key, [])
            waiting.remove(announced)
            if not waiting:
                self._wanted.pop(key, None)

        announced.add_done_callback(forget)

    def slots_gone(self, message: wire.SlotsGone) -> None:
        """Take in that slots have lost their keys.

        Raises
        ------
        ProtocolError
            The peer never announced the cache.
        """
        self._advance(message.version, same=True)
        entry = self._entries.get(message.cache_id)
        if entry is None:
            raise ProtocolError(f"the peer changed cache {message.cache_id}, which it never announced")
        for slot in message.slots:
            # One that went while its cache was being announced was never known here.
            key = entry.slots.pop(slot, None)
            if key is not None:
                del self.by_slot_key[key]

    def _read_slots(self, entry: RemoteEntry, sent: Sequence[wire.SlotKey]) -> dict[int, CacheKey]:
        slots: dict[int, CacheKey] = {}
        for item in sent:
            if item.slot >= entry.geometry.num_blocks or item.slot in slots:
                raise ProtocolError(f"the peer announced slot {item.slot} of cache {entry.cache_id} wrongly")
            if (item.req_id is None) == (item.prefix_id is None) or NO_ID in (item.req_id, item.prefix_id):
                raise ProtocolError("the peer announced a slot that is named by neither a request nor a prefix")
            request, prefix = (NO_ID if number is None else number for number in (item.req_id, item.prefix_id))
            slots[item.slot] = CacheKey(self._cluster_id, request, item.model_id, prefix)
        if len(set(slots.values())) != len(slots) or any(key in self.by_slot_key for key in slots.values()):
            raise ProtocolError(f"the peer announced a slot key twice for cache {entry.cache_id}")
        return slots

    def withdraw(self, message: wire.CacheWithdraw) -> RemoteEntry:
        """Drop an entry.

        Raises
        ------
        ProtocolError
            The peer never announced it.
        """
        self._advance(message.version, same=False)
        entry = self._entries.pop(message.cache_id, None)
        self._places = None
        if entry is None:
            raise ProtocolError(f"the peer withdrew cache {message.cache_id}, which it never announced")
        self._addresses -= len(entry.addresses)
        self._forget(entry)
        return entry

    def clear(self) -> list[RemoteEntry]:
        """Drop all entries and return them."""
        entries = list(self._entries.values())
        self._entries.clear()
        self._addresses = 0
        self._places = None
        self.by_key.clear()
        self.by_slot_key.clear()
        for entry in entries:
            entry._end()
        for waiting in self._wanted.values():
            _wake(waiting)
        return entries

    def _advance(self, version: int, *, same: bool) -> None:
        if version < self.version or (version == self.version and not same):
            raise ProtocolError(f"the peer's cache table went from version {self.version} to {version}")
        self.version = version

    def _forget(self, entry: RemoteEntry) -> None:
        self.by_key.pop(CacheKeyByIdAndIndex(self._cluster_id, entry.cache_id, 0), None)
        if entry.key is not None:
            self.by_key.pop(entry.key, None)
        for key in entry.slots.values():
            self.by_slot_key.pop(key, None)
        entry._end()
