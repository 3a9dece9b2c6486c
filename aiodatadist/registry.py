"""Caches and their memory: `Cache`, and the half of the cache manager that registers, allocates and takes back.

Memory. A registered cache keeps its tensors alive until `CacheManager.unregister_cache` has ended: then no peer and no
operation can touch them. A running transfer keeps both caches alive by itself.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import math
import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, SupportsIndex, TypeAlias

import numpy as np

from . import _core
from ._buffers import BufferView, check_mapped, collect
from .control.table import LocalRecord
from .control.wire import SLOT_KEYS_MAX
from .errors import (
    ArgumentError,
    ArgumentTypeError,
    CacheAccessError,
    CacheExists,
    ClosedError,
    DataDistError,
    MemoryStillExposed,
    ProtocolError,
    RegistrationError,
    TransportUnavailable,
)
from .keys import NO_ID, BlocksCacheKey, CacheKey
from .observe import get_logger
from .pool import MemoryPool
from .transfer import Operation, Transfer
from .types import CacheDesc, Geometry, Placement, shown

if TYPE_CHECKING:
    from ._starting import Late
    from .datadist import DataDist
    from .layerwise import Starter

__all__ = ["DEFAULT_TIMEOUT", "Cache", "CacheRegistry", "Timeout", "seconds_of"]


_log = get_logger()


class _Default(enum.Enum):
    TIMEOUT = "Config's default"


DEFAULT_TIMEOUT: Final = _Default.TIMEOUT
"""Stands for the default of `Config` where a timeout is omitted; None means none."""

Timeout: TypeAlias = float | Literal[_Default.TIMEOUT] | None
Access: TypeAlias = Literal["r", "rw"] | None

# What numpy calls the bits of a dtype that it does not have.
_BITS: Final = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
_ALIGNMENT: Final = 4096


class Cache:
    """A cache of this DataDist: same-shaped tensors ``[num_blocks, ...]``, usually K, V of each layer in turn.

    Made by the registering and allocating methods of `CacheManager`. Dimension 0 counts blocks or batch slots; every
    cache may be accessed both ways, also at once.

    Attributes
    ----------
    id : int
        Never used again by this DataDist; peers may name the cache by it.
    geometry : Geometry
        Shape, dtype and strides, in elements and bytes.
    key : BlocksCacheKey or None
        Under which peers find the whole cache.
    remote : {"rw", "r", None}
        What peers may do: read and write, read, or nothing.
    tensors : tuple
        The tensors as registered; for an allocated cache numpy arrays over library memory. dtypes that numpy lacks
        (bfloat16, float8) show as unsigned integers of the same size. Kept alive, and then emptied, when the
        unregistering has ended.
    read_only : bool
        The memory cannot be written, so nothing can be pulled into it.
    placement : Placement
        Where the memory lies. That of an NPU travels over hixl alone, and is not copied within this DataDist.
    """

    def __init__(
        self,
        manager: CacheRegistry,
        cache_id: int,
        views: list[BufferView],
        geometry: Geometry,
        key: BlocksCacheKey | None,
        slots: dict[int, CacheKey],
        remote: Access,
        tensors: tuple[Any, ...],
        region: _core.Region | None,
    ) -> None:
        self.id = cache_id
        self.geometry = geometry
        self.key = key
        self.remote = remote
        self.tensors = tensors
        self.read_only = any(view.readonly for view in views)
        self.placement = views[0].placement
        # Weak: transfers hold caches, and must not keep a DataDist from being dropped.
        self._manager = manager._weak
        self._views = views
        self._region = region
        self._slots = slots
        self._unpulled: dict[int, int] = {}  # slot -> bits of the tensors that nobody has pulled yet
        self._native: _core.LocalCache | None = None
        self._state: Literal["registering", "ready", "failed", "closing", "closed"] = "registering"
        self._released = False  # deallocated, and kept by its keys
        self._late: dict[Late | Starter, None] = {}  # transfers on it that wait for a peer's cache
        self._registered: asyncio.Future[None] = manager._runtime.future()
        self._quiet: asyncio.Future[None] = manager._runtime.future()

    def __repr__(self) -> str:
        g = self.geometry
        state = "released" if self._released and self._state in ("registering", "ready") else self._state
        where = " on an NPU" if self.placement is Placement.DEVICE else ""
        return f"<Cache {self.id}: {state}, {g.num_tensors} x {g.shape} {g.dtype}{where}>"

    @property
    def addresses(self) -> tuple[int, ...]:
        """Address of each tensor in this process: what a peer names as `TransferConfig.dst_addrs`."""
        return tuple(view.address for view in self._views)

    @property
    def closed(self) -> bool:
        """Whether unregistering or deallocating has begun."""
        return self._released or self._state in ("closing", "closed", "failed")

    @property
    def keys(self) -> Mapping[int, CacheKey]:
        """The key of each batch slot that has one now: a view that changes as keys are pulled or removed."""
        return MappingProxyType(self._slots)

    async def ready(self) -> None:
        """Wait until the transports know the memory; from then on peers see the cache.

        Transfers on the cache wait for this by themselves. Cancelling the wait changes nothing else.

        Raises
        ------
        RegistrationError
            A transport refused the memory, or an address is not mapped.
        ClosedError
            The cache was unregistered meanwhile.
        """
        await asyncio.shield(self._registered)


class CacheRegistry:
    """The caches of a DataDist: what `CacheManager` does before and after transfers."""

    def __init__(self, dd: DataDist) -> None:
        self._dd = dd
        self._weak: weakref.ref[Any] = weakref.ref(self)
        self._runtime = dd._runtime
        self._loop = dd._runtime.loop  # for the futures of the hot path
        self._caches: dict[int, Cache] = {}
        self._keys: dict[int, Cache] = {}
        self._slot_keys: dict[CacheKey, tuple[Cache, int]] = {}
        self._ids = itertools.count(1)
        weak = self._weak

        def on_pulled(cache_id: int, slot: int, tensor: int, count: int) -> None:
            if (registry := weak()) is not None:
                registry._pulled(cache_id, slot, tensor, count)

        dd._table.on_pulled = on_pulled

    @property
    def caches(self) -> dict[int, Cache]:
        """The registered caches by id, as a snapshot."""
        return dict(self._caches)

    # Registering. --------------------------------------------------------------------------------------------

    def register_cache(
        self,
        x: Sequence[Any],
        *,
        desc: CacheDesc | None = None,
        keys: Sequence[CacheKey] = (),
        remote: Access = "rw",
    ) -> Cache:
        """Register tensors whose dimension 0 counts batch slots, each for one request or prefix.

        Parameters
        ----------
        x, desc, remote
            As for `register_blocks_cache`.
        keys : sequence of CacheKey
            ``keys[i]`` lets peers find batch slot ``i``; at most one for each slot, and 65536 of one cache. A key
            without request and prefix id skips a slot, one with both counts as the prefix's. Their cluster id must be
            this DataDist's. They stay until `remove_cache_key` or the end of the cache, however often they are pulled.

        Returns
        -------
        Cache
            As for `register_blocks_cache`.

        Raises
        ------
        ArgumentError, ArgumentTypeError, CacheMismatch, CacheAccessError, RegistrationError, TransportUnavailable
            As for `register_blocks_cache`.
        CacheExists
            A key is taken, or named twice; nothing was registered.
        """
        return self._register(x, desc, None, keys, remote)

    def register_blocks_cache(
        self,
        x: Sequence[Any],
        *,
        desc: CacheDesc | None = None,
        key: BlocksCacheKey | None = None,
        remote: Access = "rw",
    ) -> Cache:
        """Register tensors whose dimension 0 counts blocks.

        Parameters
        ----------
        x : sequence
            Tensors of one shape, dtype and stride: numpy arrays, torch CPU tensors, objects with the array interface,
            the buffer protocol or DLPack, or raw addresses (int) with `desc`; kinds may be mixed. Or all of them on the
            NPU `Config.device_id`: torch_npu tensors, or addresses with a `desc` that says ``Placement.DEVICE``, which
            need the transport hixl. Dimension 0 may have gaps; within a block memory is C-contiguous. Tensors of one
            cache do not overlap. Nothing is copied.
        desc : CacheDesc, optional
            Required for raw addresses; gives shape and dtype to flat bytes, and the dtype to integer arrays that carry
            the bits of another one (bfloat16). Otherwise it must agree with the tensors.
        key : BlocksCacheKey, optional
            Lets peers find the cache. One cache a model id. Its cluster id must be this DataDist's.
        remote : {"rw", "r", None}
            What peers may do: read and write, read, or nothing. Read-only memory takes ``"r"`` or None.

        Returns
        -------
        Cache
            At once; registering goes on off the loop, see `Cache.ready`. Transfers wait for it by themselves. The
            cache keeps the tensors alive; memory behind raw addresses stays the caller's to keep until
            `unregister_cache` has ended.

        Raises
        ------
        ArgumentError, ArgumentTypeError, CacheMismatch
            What is wrong with the tensors, with the index of the first that is.
        CacheAccessError
            Read-only memory with ``remote="rw"``.
        CacheExists
            The key's model id is taken.
        RegistrationError
            A raw address is not mapped, or not with the permissions needed.
        TransportUnavailable
            The memory is an NPU's, and the transport hixl is not in `Config.transports`, or cannot be used.
        """
        return self._register(x, desc, key, (), remote)

    def _register(
        self,
        x: Sequence[Any],
        desc: CacheDesc | None,
        key: BlocksCacheKey | None,
        keys: Sequence[CacheKey],
        remote: Access,
    ) -> Cache:
        self._dd._check_usable()
        self._check_remote(key, remote)
        views, geometry = collect(x, desc)
        self._check_place(views[0])
        slots = self._check_slot_keys(keys, geometry.num_blocks, remote)
        if remote == "rw":
            for index, view in enumerate(views):
                if view.readonly:
                    raise CacheAccessError(
                        f"tensor {index} is read-only and remote='rw' lets peers write it",
                        hint='register it with remote="r" (peers may only read) or remote=None',
                    )
        read_only = check_mapped(views, writable=remote == "rw")
        cache = self._add(views, geometry, key, slots, remote, tuple(x), None)
        cache.read_only |= read_only
        return cache

    def _check_place(self, view: BufferView) -> None:
        """Refuse memory of an NPU that HIXL does not reach from here."""
        if view.placement is Placement.HOST:
            return
        own = self._dd._center.own
        if "hixl" not in own.usable:
            why = own.unusable.get("hixl", "Config.transports does not have it")
            raise TransportUnavailable(
                f"the tensors are memory of an NPU, which only the transport hixl reaches: {why}",
                transport="hixl",
                reason=why,
                hint='put "hixl" into Config.transports, and see `aiodatadist doctor ascend`',
            )
        number = own.config.device_id or 0
        if view.device not in (None, number):
            raise ArgumentError(
                f"the tensors are on NPU {view.device}, and this DataDist uses NPU {number}",
                hint=f"give Config(device_id={view.device}), or open another DataDist for it",
            )

    def allocate_cache(
        self,
        desc: CacheDesc,
        *,
        keys: Sequence[CacheKey] = (),
        remote: Access = "rw",
        pool: MemoryPool | None = None,
    ) -> Cache:
        """Allocate a cache in library memory whose dimension 0 counts batch slots.

        A key that names a request is counted: it goes when a peer's pull by it has ended well (by batch index too, but
        not by lists of blocks; with layer ranges once all tensors were pulled), or by `remove_cache_key`. After
        `deallocate_cache` the memory stays until the last key has gone. Keys of prefixes stay until they are removed.

        Parameters
        ----------
        desc, remote, pool
            As for `allocate_blocks_cache`.
        keys
            As for `register_cache`.

        Returns
        -------
        Cache
            As for `allocate_blocks_cache`.

        Raises
        ------
        ArgumentError, ArgumentTypeError, CacheExists, OutOfMemoryError
            As for `register_cache` and `allocate_blocks_cache`.
        """
        return self._allocate(desc, None, keys, remote, pool)

    def allocate_blocks_cache(
        self,
        desc: CacheDesc,
        *,
        key: BlocksCacheKey | None = None,
        remote: Access = "rw",
        pool: MemoryPool | None = None,
    ) -> Cache:
        """Allocate a cache in library memory, which same-host peers map: the fastest path between processes.

        Parameters
        ----------
        desc : CacheDesc
            Number of tensors, shape ``[num_blocks, ...]`` and dtype. Strides with gaps are not supported here.
        key, remote
            As for `register_blocks_cache`.
        pool : MemoryPool, optional
            Where to take the memory from; its content is then undefined. Omitted: memory of its own, zeroed.

        Returns
        -------
        Cache
            With page-aligned `tensors`. The memory is freed when the cache is deallocated and the last array over it
            is gone.

        Raises
        ------
        ArgumentError, ArgumentTypeError, CacheExists
            As for `register_blocks_cache`.
        OutOfMemoryError
            The pool has no gap that is large enough, or the kernel gives no more memory or descriptors.
        """
        return self._allocate(desc, key, (), remote, pool)

    def _allocate(
        self,
        desc: CacheDesc,
        key: BlocksCacheKey | None,
        keys: Sequence[CacheKey],
        remote: Access,
        pool: MemoryPool | None,
    ) -> Cache:
        self._dd._check_usable()
        self._check_remote(key, remote)
        if not isinstance(desc, CacheDesc):
            raise ArgumentTypeError(f"desc must be a CacheDesc, got {type(desc).__name__}")
        if desc.stride not in (None, desc.block_bytes):
            raise ArgumentError(f"stride={desc.stride} leaves gaps in a cache to allocate", hint="omit stride")
        if desc.placement is not Placement.HOST:
            raise ArgumentError(
                "placement=Placement.DEVICE, and library memory is the host's",
                hint="allocate tensors with torch_npu, and register those",
            )
        if pool is not None and not isinstance(pool, MemoryPool):
            raise ArgumentTypeError(f"pool must be a MemoryPool, got {type(pool).__name__}")
        slots = self._check_slot_keys(keys, desc.num_blocks, remote)
        step = -(-desc.tensor_bytes // _ALIGNMENT) * _ALIGNMENT
        memory: _core.Region | _core.Span
        if pool is None:
            memory = region = _core.Region(step * desc.num_tensors)
        else:
            memory, region = pool._take(step * desc.num_tensors), pool._region
        dtype = np.dtype(_BITS.get(desc.dtype, desc.dtype))
        count = math.prod(desc.shape)
        tensors = tuple(
            np.frombuffer(memoryview(memory), dtype=dtype, count=count, offset=i * step).reshape(desc.shape)
            for i in range(desc.num_tensors)
        )
        views, geometry = collect(tensors, desc)
        cache = self._add(views, geometry, key, slots, remote, tensors, region)
        if pool is None:  # a pool was populated once for all
            self._populate(region)
        return cache

    def memory_pool(self, nbytes: SupportsIndex, *, page_bytes: SupportsIndex = 65536) -> MemoryPool:
        """Take library memory once, for caches that come and go.

        Parameters
        ----------
        nbytes : int
            Bytes of the pool, rounded up to whole pages.
        page_bytes : int
            A power of two from 4096 to 2**30. Every cache takes whole pages.

        Returns
        -------
        MemoryPool
            For the `pool` of `allocate_cache` and `allocate_blocks_cache`, of any DataDist of this process.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            A number is out of range.
        OutOfMemoryError
            The kernel does not give the memory.
        """
        self._dd._check_usable()
        pool = MemoryPool(nbytes, page_bytes)
        self._populate(pool._region)
        return pool

    def _check_remote(self, key: BlocksCacheKey | None, remote: Access) -> None:
        if remote not in ("rw", "r", None):
            raise ArgumentError(f"remote={remote!r} is unknown", hint='give "rw", "r" or None')
        if key is None:
            return
        if not isinstance(key, BlocksCacheKey):
            raise ArgumentTypeError(f"key must be a BlocksCacheKey, got {type(key).__name__}")
        if key.cluster_id != self._dd.cluster_id:
            raise ArgumentError(
                f"key names cluster {key.cluster_id}, and this is cluster {self._dd.cluster_id}",
                hint=f"give BlocksCacheKey({self._dd.cluster_id}, model_id={key.model_id})",
            )
        if remote is None:
            raise ArgumentError("a key is for peers, and remote=None keeps them out", hint="omit key")
        taken = self._keys.get(key.model_id)
        if taken is not None:
            raise CacheExists(
                f"model_id={key.model_id} belongs to cache {taken.id}", hint="unregister that cache first"
            )

    def _check_slot_keys(self, keys: Sequence[CacheKey], num_slots: int, remote: Access) -> dict[int, CacheKey]:
        """Return the key of each slot that gets one, as it is found by."""
        if not isinstance(keys, (list, tuple)) or isinstance(keys, CacheKey):  # a key is a tuple, too
            raise ArgumentTypeError(f"keys must be a list or tuple of CacheKey, got {type(keys).__name__}")
        if len(keys) > num_slots:
            raise ArgumentError(
                f"{len(keys)} keys for {num_slots} batch slots", hint="give at most one key for each slot"
            )
        slots: dict[int, CacheKey] = {}
        names: dict[CacheKey, int] = {}
        for slot, key in enumerate(keys):
            if not isinstance(key, CacheKey):
                raise ArgumentTypeError(f"keys[{slot}] must be a CacheKey, got {type(key).__name__}")
            if key.cluster_id != self._dd.cluster_id:
                raise ArgumentError(
                    f"keys[{slot}] names cluster {key.cluster_id}, and this is cluster {self._dd.cluster_id}",
                    hint="give this DataDist's cluster id",
                )
            if key.is_placeholder:
                continue
            if remote is None:
                raise ArgumentError("keys are for peers, and remote=None keeps them out", hint="omit keys")
            name = _found_by(key)
            if name in names:
                raise CacheExists(f"keys[{slot}]={key} names what keys[{names[name]}] names", hint="give it once")
            if name in self._slot_keys:
                owner, taken = self._slot_keys[name]
                raise CacheExists(
                    f"keys[{slot}]={key} belongs to slot {taken} of cache {owner.id}", hint="remove that key first"
                )
            names[name] = slot
            slots[slot] = name
        if len(slots) > SLOT_KEYS_MAX:
            raise ArgumentError(
                f"{len(slots)} batch slots with keys, and one cache has at most {SLOT_KEYS_MAX}",
                hint="make several caches",
            )
        return slots

    def _add(
        self,
        views: list[BufferView],
        geometry: Geometry,
        key: BlocksCacheKey | None,
        slots: dict[int, CacheKey],
        remote: Access,
        tensors: tuple[Any, ...],
        region: _core.Region | None,
    ) -> Cache:
        cache = Cache(self, next(self._ids), views, geometry, key, slots, remote, tensors, region)
        self._caches[cache.id] = cache
        if key is not None:
            self._keys[key.model_id] = cache
        for slot, name in slots.items():
            self._slot_keys[name] = (cache, slot)
        work = self._runtime.in_thread(self._register_natively, cache)
        work.add_done_callback(lambda done: self._registered(cache, done))
        return cache

    def _populate(self, region: _core.Region) -> None:
        limit = self._dd._config.populate_limit
        if limit > 0:
            # Its end matters to nobody; the thread holds the region until then.
            _ = self._runtime.in_thread(region.populate, limit)

    def _register_natively(self, cache: Cache) -> _core.LocalCache:
        """Register with the transports; runs in a worker thread, because pinning large memory takes long."""
        if cache._state == "failed":  # for want of a thread, and now there is one
            raise ClosedError(f"cache {cache.id} has failed before")
        geometry = cache.geometry
        return self._dd._node.register_cache(
            cache.id,
            [view.address for view in cache._views],
            geometry.num_blocks,
            geometry.block_bytes,
            geometry.stride,
            cache.remote is not None,
            cache.remote == "rw",
            cache._region,
            (cache.tensors, cache._views),
            device=cache.placement is Placement.DEVICE,
        )

    def _registered(self, cache: Cache, done: asyncio.Future[_core.LocalCache]) -> None:
        failure = done.exception() if not done.cancelled() else ClosedError("the DataDist was closed")
        if failure is not None:
            error = _refused(cache, failure, len(self._caches) - 1)
            if not isinstance(failure, ClosedError):
                # Whoever waits gets it, and so does every transfer; but perhaps only peers wait, for what never comes.
                _log.error("a cache cannot be registered", cluster_id=self._dd.cluster_id, error=str(error))
            cache._state = "failed"
            self._forget(cache)
            _settle(cache._registered, error)
            _settle(cache._quiet, None)
            _end_waiting(cache)
            return
        native = cache._native = done.result()
        if cache._state == "closing":  # unregistered before it was ready
            _settle(cache._registered, ClosedError(f"cache {cache.id} was unregistered before it was ready"))
            native.close()
            return
        cache._state = "ready"
        if cache.remote is not None:
            counted = cache._region is not None and bool(cache._slots)
            self._dd._table.add(
                LocalRecord(
                    cache.id, cache.key, cache.geometry, cache.remote, native, cache._slots, counted, cache.addresses
                )
            )
        _settle(cache._registered, None)

    def _forget(self, cache: Cache) -> None:
        self._caches.pop(cache.id, None)
        self._forget_keys(cache)

    def _forget_keys(self, cache: Cache) -> None:
        if cache.key is not None and self._keys.get(cache.key.model_id) is cache:
            del self._keys[cache.key.model_id]
        for name in cache._slots.values():
            self._slot_keys.pop(name, None)
        cache._slots.clear()

    # Unregistering. ------------------------------------------------------------------------------------------

    def unregister_cache(self, cache: Cache, *, timeout: float | None = None) -> Transfer[None]:
        """Take a cache back.

        New transfers on it are refused at once, here and at every peer; running ones finish. The transfer ends when
        neither a peer nor an operation can touch the memory any more. A silent tcp peer is shut out after
        `Config.drain_timeout`; a stopped process on this host must answer or exit first.

        Parameters
        ----------
        cache : Cache
            Of this DataDist.
        timeout : float or None
            Seconds to wait; None waits as long as it takes.

        Returns
        -------
        Transfer
            Ends well for a cache that was unregistered before. Cancelling the wait does not undo the unregistering,
            which goes on; the tensors stay referenced until the memory is quiet.

        Raises (when awaited)
        ---------------------
        MemoryStillExposed
            The time passed. Waiting again (another call) is fine.
        """
        self._dd._check_usable()
        self._check_own(cache)
        seconds = seconds_of(timeout, 0.0)
        self._close(cache)
        return self._until_quiet(cache, seconds, f"cache {cache.id} may still be touched by a peer after {seconds} s")

    def _close(self, cache: Cache) -> None:
        """Refuse new use of a cache everywhere; it becomes quiet by itself."""
        if cache._state not in ("registering", "ready"):
            return
        registered = cache._state == "ready"
        cache._state = "closing"
        self._forget_use(cache)
        self._dd._table.remove(cache.id)
        self._forget_keys(cache)
        if registered and cache._native is not None:
            cache._native.close()

    def _forget_use(self, cache: Cache) -> None:
        """Let go of what makes new transfers on a closed cache."""
        for link in self._dd._links.values():
            for entry in link.table.values():
                entry.pairs.pop(cache.id, None)
        _end_waiting(cache)

    def _until_quiet(self, cache: Cache, seconds: float, late: str) -> Transfer[None]:
        transfer: Operation[None] = Operation(loop=self._loop)
        transfer._on_cancel = transfer._finish_cancelled
        timer = None
        if seconds:
            timer = self._runtime.call_later(
                seconds, lambda: transfer._fail(MemoryStillExposed(late, caches=(repr(cache),)))
            )

        def finish(done: asyncio.Future[None]) -> None:
            if timer is not None:
                timer.cancel()
            transfer._finish(None)

        cache._quiet.add_done_callback(finish)
        return transfer

    def deallocate_cache(self, cache: Cache, *, timeout: float | None = None) -> Transfer[None]:
        """Take back a cache of `allocate_cache` or `allocate_blocks_cache`; its memory goes with the last array.

        As `unregister_cache`, except that keys of batch slots keep the cache for the peers: it can no longer be used
        here at once, and is taken back when the last key was pulled or removed. `unregister_cache` does not wait for
        them.

        Parameters
        ----------
        cache : Cache
            Of this DataDist.
        timeout : float or None
            Seconds to wait; None waits as long as it takes.

        Returns
        -------
        Transfer
            Ends when the memory is quiet and gone. Not awaiting it, or cancelling it, changes nothing.

        Raises
        ------
        ArgumentError
            The cache was registered, not allocated.

        Raises (when awaited)
        ---------------------
        MemoryStillExposed
            The time passed.
        """
        self._dd._check_usable()
        self._check_own(cache)
        seconds = seconds_of(timeout, 0.0)
        if cache._region is None and cache._state in ("registering", "ready"):
            raise ArgumentError(f"cache {cache.id} was registered, not allocated", hint="use unregister_cache")
        late = f"cache {cache.id} may still be touched by a peer after {seconds} s"
        if cache._slots and cache._state in ("registering", "ready"):
            cache._released = True
            self._forget_use(cache)
            late = f"cache {cache.id} was kept by {len(cache._slots)} keys or by running transfers for {seconds} s"
        else:
            self._close(cache)
        return self._until_quiet(cache, seconds, late)

    def remove_cache_key(self, key: CacheKey) -> bool:
        """Take a key off its batch slot. Pulls by it that are running go on.

        Parameters
        ----------
        key : CacheKey
            Its cluster id must be this DataDist's.

        Returns
        -------
        bool
            Whether the key was there.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            Not a CacheKey, a placeholder, or another cluster's.
        """
        self._dd._check_usable()
        if not isinstance(key, CacheKey):
            raise ArgumentTypeError(f"expected a CacheKey, got {type(key).__name__}")
        if key.cluster_id != self._dd.cluster_id:
            raise ArgumentError(
                f"key names cluster {key.cluster_id}, and this is cluster {self._dd.cluster_id}",
                hint="give a key of this DataDist",
            )
        if key.is_placeholder:
            raise ArgumentError(f"{key} has neither req_id nor prefix_id", hint="name a batch slot by one of both")
        found = self._slot_keys.get(_found_by(key))
        if found is None:
            return False
        self._drop_key(*found)
        return True

    def _drop_key(self, cache: Cache, slot: int) -> None:
        name = cache._slots.pop(slot)
        cache._unpulled.pop(slot, None)
        del self._slot_keys[name]
        self._dd._table.slot_gone(cache.id, slot)
        if cache._released and not cache._slots:
            self._close(cache)

    def _pulled(self, cache_id: int, slot: int, tensor: int, count: int) -> None:
        """Take note that a peer has pulled tensors of a slot."""
        cache = self._caches.get(cache_id)
        if cache is None or cache._region is None or slot not in cache._slots:
            return  # the key has gone meanwhile
        num_tensors = cache.geometry.num_tensors
        if tensor + count > num_tensors:
            raise ProtocolError(
                f"the peer says it pulled tensors {tensor} to {tensor + count - 1} of cache {cache_id}, "
                f"which has {num_tensors}"
            )
        if cache._slots[slot].req_id == NO_ID:
            return
        left = cache._unpulled.get(slot, (1 << num_tensors) - 1) & ~(((1 << count) - 1) << tensor)
        if left:
            cache._unpulled[slot] = left
        else:
            self._drop_key(cache, slot)

    def _check_own(self, cache: Cache) -> None:
        if not isinstance(cache, Cache):
            raise ArgumentTypeError(f"expected a Cache, got {type(cache).__name__}")
        if cache._manager is not self._weak:
            raise ArgumentError(f"cache {cache.id} belongs to another DataDist", hint="use its own cache_manager")

    def _on_cache_quiet(self, cache_id: int) -> None:
        cache = self._caches.get(cache_id)
        if cache is None:
            return
        cache._state = "closed"
        self._forget(cache)
        # The caller's memory is the caller's again.
        cache.tensors = ()
        cache._views = []
        cache._region = None
        cache._native = None
        _settle(cache._quiet, None)


def _found_by(key: CacheKey) -> CacheKey:
    """Return the key under which a slot is found: the prefix alone where there is one."""
    return key if NO_ID in (key.req_id, key.prefix_id) else CacheKey(key.cluster_id, NO_ID, key.model_id, key.prefix_id)


def _end_waiting(cache: Cache) -> None:
    """End the transfers that wait for a peer's cache and cannot begin on this one any more."""
    for late in tuple(cache._late):
        late._go_on()


def _refused(cache: Cache, failure: BaseException, others: int) -> RegistrationError:
    """Make the error for a cache that a transport does not take."""
    views = cache._views
    hint: str | None = "free caches, or raise the limit (by ulimit): memory (-v, -l), open files (-n), threads (-u)"
    if isinstance(failure, ClosedError):
        hint = None
    elif isinstance(failure, DataDistError) and failure.transport == "hixl":
        hint = failure.hint
    error = RegistrationError(
        f"cache {cache.id}, {len(views)} tensors of {sum(view.nbytes for view in views)} bytes in all, cannot be "
        f"registered beside {others} others: {failure}",
        hint=hint,
    )
    error.__cause__ = failure
    return error


def _settle(future: asyncio.Future[None], error: BaseException | None) -> None:
    if future.done() or future.get_loop().is_closed():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
        future.exception()  # whoever waits still gets it; nobody has to


def seconds_of(timeout: float | None, none: float) -> float:
    """Check a timeout in seconds; `none` stands for None."""
    if timeout is None:
        return none
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float, np.floating, np.integer)):
        raise ArgumentTypeError(f"timeout must be seconds or None, got {timeout!r:.80}")
    if not 0.0 < timeout <= 1e9:  # compared as it is: a huge int does not fit a float
        number = shown(timeout) if isinstance(timeout, int) else timeout
        raise ArgumentError(
            f"timeout={number} is not a positive number of seconds up to 1e9", hint="None means no deadline"
        )
    return float(timeout)
