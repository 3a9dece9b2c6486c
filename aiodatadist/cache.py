"""Caches and their transfers: `CacheManager`, one per DataDist.

Memory. A registered cache keeps its tensors alive until `CacheManager.unregister_cache` has ended: then no peer and no
operation can touch them. A running transfer keeps both caches alive by itself.
"""

from __future__ import annotations

import asyncio
import copy
import enum
import itertools
import math
import os
import weakref
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final, Literal, SupportsIndex, TypeAlias

import numpy as np

from . import _core
from ._buffers import BufferView, collect
from .control.table import LocalRecord, RemoteEntry
from .copies import BlockPairs, Copies
from .errors import (
    ArgumentError,
    ArgumentTypeError,
    CacheAccessError,
    CacheExists,
    CacheMismatch,
    CacheNotFound,
    ClosedError,
    LinkError,
    MemoryStillExposed,
    NotLinkedError,
    PeerLostError,
    RegistrationError,
    TransferTimeout,
)
from .observe import PendingOperation, get_logger
from .transfer import Operation, Transfer
from .types import BlocksCacheKey, CacheDesc, CacheKeyByIdAndIndex, Geometry, as_integer, shown

if TYPE_CHECKING:
    from .control.leases import Lease
    from .datadist import DataDist

__all__ = ["DEFAULT_TIMEOUT", "Cache", "CacheManager"]

_log = get_logger()


class _Default(enum.Enum):
    TIMEOUT = "Config's default"


DEFAULT_TIMEOUT: Final = _Default.TIMEOUT
"""Stands for the default of `Config` where a timeout is omitted; None means none."""

Timeout: TypeAlias = float | Literal[_Default.TIMEOUT] | None
Blocks: TypeAlias = Sequence[SupportsIndex] | np.ndarray[Any, Any]
RemoteKey: TypeAlias = BlocksCacheKey | CacheKeyByIdAndIndex
Access: TypeAlias = Literal["r", "rw"] | None

# What numpy calls the bits of a dtype that it does not have.
_BITS: Final = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
_ALIGNMENT: Final = 4096


class Cache:
    """A cache of this DataDist: same-shaped tensors ``[num_blocks, ...]``, usually K, V of each layer in turn.

    Made by `CacheManager.register_blocks_cache` and `CacheManager.allocate_blocks_cache`.

    Attributes
    ----------
    id : int
        Never used again by this DataDist; peers may name the cache by it.
    geometry : Geometry
        Shape, dtype and strides, in elements and bytes.
    key : BlocksCacheKey or None
        Under which peers find it.
    remote : {"rw", "r", None}
        What peers may do: read and write, read, or nothing.
    tensors : tuple
        The tensors as registered; for an allocated cache numpy arrays over library memory. dtypes that numpy lacks
        (bfloat16, float8) show as unsigned integers of the same size. Kept alive, and then emptied, when the
        unregistering has ended.
    read_only : bool
        The memory cannot be written, so nothing can be pulled into it.
    """

    def __init__(
        self,
        manager: CacheManager,
        cache_id: int,
        views: list[BufferView],
        geometry: Geometry,
        key: BlocksCacheKey | None,
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
        # Weak: transfers hold caches, and must not keep a DataDist from being dropped.
        self._manager = manager._weak
        self._views = views
        self._region = region
        self._native: _core.LocalCache | None = None
        self._state: Literal["registering", "ready", "failed", "closing", "closed"] = "registering"
        self._registered: asyncio.Future[None] = manager._runtime.future()
        self._quiet: asyncio.Future[None] = manager._runtime.future()

    def __repr__(self) -> str:
        g = self.geometry
        return f"<Cache {self.id}: {self._state}, {g.num_tensors} x {g.shape} {g.dtype}>"

    @property
    def closed(self) -> bool:
        """Whether unregistering has begun."""
        return self._state in ("closing", "closed", "failed")

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


class CacheManager:
    """Registers caches and moves blocks: `DataDist.cache_manager`.

    Belongs to the loop and the thread of its DataDist: every method raises `WrongLoopError` elsewhere, `ClosedError`
    when the DataDist is closed and `ForkedError` in a forked child. All are plain functions that return at once; those
    that start something return a `Transfer`.
    """

    def __init__(self, dd: DataDist) -> None:
        self._dd = dd
        self._weak = weakref.ref(self)
        self._runtime = dd._runtime
        self._loop = dd._runtime.loop  # for the futures of the hot path
        self._caches: dict[int, Cache] = {}
        self._keys: dict[int, Cache] = {}
        self._ids = itertools.count(1)
        self._waiting: dict[Transfer[Any], tuple[str, float]] = {}
        self._copies = Copies(self, dd._center.copied)
        self._default_seconds = dd._config.transfer_timeout or 0.0

    @property
    def caches(self) -> dict[int, Cache]:
        """The registered caches by id, as a snapshot."""
        return dict(self._caches)

    # Registering. --------------------------------------------------------------------------------------------

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
            the buffer protocol or DLPack, or raw addresses (int) with `desc`; kinds may be mixed. Dimension 0 may have
            gaps; within a block memory is C-contiguous. Tensors of one cache do not overlap. Nothing is copied.
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
            The memory is a device's, which no transport of this version reaches.
        """
        self._dd._check_usable()
        self._check_registration(key, remote)
        views, geometry = collect(x, desc)
        if remote == "rw":
            for index, view in enumerate(views):
                if view.readonly:
                    raise CacheAccessError(
                        f"tensor {index} is read-only and remote='rw' lets peers write it",
                        hint='register it with remote="r" (peers may only read) or remote=None',
                    )
        read_only = _check_mapped(views, writable=remote == "rw")
        cache = self._add(views, geometry, key, remote, tuple(x), None)
        cache.read_only |= read_only
        return cache

    def allocate_blocks_cache(
        self, desc: CacheDesc, *, key: BlocksCacheKey | None = None, remote: Access = "rw"
    ) -> Cache:
        """Allocate a cache in library memory, which same-host peers map: the fastest path between processes.

        Parameters
        ----------
        desc : CacheDesc
            Number of tensors, shape ``[num_blocks, ...]`` and dtype. Strides with gaps are not supported here.
        key, remote
            As for `register_blocks_cache`.

        Returns
        -------
        Cache
            With zeroed, page-aligned `tensors`. The memory is freed when the cache is deallocated and the last array
            over it is gone.

        Raises
        ------
        ArgumentError, ArgumentTypeError, CacheExists
            As for `register_blocks_cache`.
        OutOfMemoryError
            The kernel gives no more memory or descriptors.
        """
        self._dd._check_usable()
        self._check_registration(key, remote)
        if not isinstance(desc, CacheDesc):
            raise ArgumentTypeError(f"desc must be a CacheDesc, got {type(desc).__name__}")
        if desc.stride not in (None, desc.block_bytes):
            raise ArgumentError(f"stride={desc.stride} leaves gaps in a cache to allocate", hint="omit stride")
        step = -(-desc.tensor_bytes // _ALIGNMENT) * _ALIGNMENT
        region = _core.Region(step * desc.num_tensors)
        dtype = np.dtype(_BITS.get(desc.dtype, desc.dtype))
        count = math.prod(desc.shape)
        tensors = tuple(
            np.frombuffer(memoryview(region), dtype=dtype, count=count, offset=i * step).reshape(desc.shape)
            for i in range(desc.num_tensors)
        )
        views, geometry = collect(tensors, desc)
        return self._add(views, geometry, key, remote, tensors, region)

    def _check_registration(self, key: BlocksCacheKey | None, remote: Access) -> None:
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

    def _add(
        self,
        views: list[BufferView],
        geometry: Geometry,
        key: BlocksCacheKey | None,
        remote: Access,
        tensors: tuple[Any, ...],
        region: _core.Region | None,
    ) -> Cache:
        cache = Cache(self, next(self._ids), views, geometry, key, remote, tensors, region)
        self._caches[cache.id] = cache
        if key is not None:
            self._keys[key.model_id] = cache
        populate = self._dd._config.populate_limit if region is not None else 0
        work = self._runtime.in_thread(self._register_natively, cache)
        work.add_done_callback(lambda done: self._registered(cache, done))
        if region is not None and populate > 0:
            # Its end matters to nobody; the thread holds the region until then.
            _ = self._runtime.in_thread(region.populate, populate)
        return cache

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
            return
        native = cache._native = done.result()
        if cache._state == "closing":  # unregistered before it was ready
            _settle(cache._registered, ClosedError(f"cache {cache.id} was unregistered before it was ready"))
            native.close()
            return
        cache._state = "ready"
        if cache.remote is not None:
            self._dd._table.add(LocalRecord(cache.id, cache.key, cache.geometry, cache.remote, native))
        _settle(cache._registered, None)

    def _forget(self, cache: Cache) -> None:
        self._caches.pop(cache.id, None)
        if cache.key is not None and self._keys.get(cache.key.model_id) is cache:
            del self._keys[cache.key.model_id]

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
        transfer: Operation[None] = Operation(loop=self._loop)
        transfer._on_cancel = transfer._finish_cancelled
        if cache._state in ("registering", "ready"):
            registered = cache._state == "ready"
            cache._state = "closing"
            for link in self._dd._links.values():
                for entry in link.table.values():
                    entry.pairs.pop(cache.id, None)
            self._dd._table.remove(cache.id)
            if cache.key is not None and self._keys.get(cache.key.model_id) is cache:
                del self._keys[cache.key.model_id]
            if registered and cache._native is not None:
                cache._native.close()
        quiet = cache._quiet
        timer = None
        if seconds:
            timer = self._runtime.call_later(
                seconds,
                lambda: transfer._fail(
                    MemoryStillExposed(
                        f"cache {cache.id} may still be touched by a peer after {seconds} s",
                        caches=(repr(cache),),
                    )
                ),
            )

        def finish(done: asyncio.Future[None]) -> None:
            if timer is not None:
                timer.cancel()
            transfer._finish(None)

        quiet.add_done_callback(finish)
        return transfer

    def deallocate_cache(self, cache: Cache, *, timeout: float | None = None) -> Transfer[None]:
        """Take back a cache of `allocate_blocks_cache`; its memory goes with the last array over it.

        As `unregister_cache`, and an ArgumentError for caches that were registered.
        """
        self._check_own(cache)
        if cache._region is None:
            raise ArgumentError(f"cache {cache.id} was registered, not allocated", hint="use unregister_cache")
        return self.unregister_cache(cache, timeout=timeout)

    def _check_own(self, cache: Cache) -> None:
        if not isinstance(cache, Cache):
            raise ArgumentTypeError(f"expected a Cache, got {type(cache).__name__}")
        if cache._manager is not self._weak:
            raise ArgumentError(f"cache {cache.id} belongs to another DataDist", hint="use its own cache_manager")

    def _on_cache_quiet(self, cache_id: int) -> None:
        self._copies.forget(cache_id)
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

    # Leases. -------------------------------------------------------------------------------------------------

    def hold(self, cache: Cache, blocks: Blocks, ttl: float, *, peer: SupportsIndex | None = None) -> Lease:
        """Hold blocks for a peer that is going to pull them; tell it the lease's `id`, which it adopts.

        Holding is bookkeeping, and forbids nothing: an allocator asks `held` which blocks it must not give away.

        Parameters
        ----------
        cache : Cache
            Of this DataDist.
        blocks : sequence or array of int
            May be empty; named twice is held once. Read during the call only.
        ttl : float
            Seconds, 0.01 to 30 days. The lease ends when so much time has passed since the call, its adoption and the
            last renewal, never before. Adopted, it is renewed by the peer's engine for as long as peer and link live.
        peer : int, optional
            The cluster id that may adopt and release it, linked or not. Omitted: that of any linked peer, until one has
            adopted it.

        Returns
        -------
        Lease
            Held from now on; dropping the object changes nothing. Its end is told by `Lease.wait_over`, and by
            `LeaseExpired` or `LeaseReleased` in ``DataDist.events()``. Unregistering the cache ends it as well.

        Raises
        ------
        BlockIndexError
            A block is not in the cache.
        ArgumentError, ArgumentTypeError
            The TTL, the peer or the list cannot be used.
        ClosedError
            The cache is unregistered.
        """
        self._dd._check_usable()
        self._check_own(cache)
        return self._dd._center.leases.hold(cache, blocks, ttl, peer)

    def held(self, cache: Cache) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Say which blocks of a cache are held by leases that are not over.

        Returns
        -------
        ndarray
            A new bool array ``[num_blocks]``.
        """
        self._dd._check_usable()
        self._check_own(cache)
        return self._dd._center.leases.held(cache)

    # Transfers. ----------------------------------------------------------------------------------------------

    def pull_blocks(
        self,
        src_key: RemoteKey,
        dst_cache: Cache,
        src_blocks: Blocks,
        dst_blocks: Blocks,
        *,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
        timeout: Timeout = DEFAULT_TIMEOUT,
        notify: bytes | None = None,
    ) -> Transfer[None]:
        """Copy blocks of a peer's cache into a cache of this DataDist.

        Parameters
        ----------
        src_key : BlocksCacheKey or CacheKeyByIdAndIndex
            Names the peer and its cache.
        dst_cache : Cache
            Writable.
        src_blocks, dst_blocks : sequence or array of int
            Block ``src_blocks[i]`` of each tensor goes to block ``dst_blocks[i]``. Of one length, which may be 0: then
            the transfer ends well at once. A destination may appear once, a source any number of times. Read during
            the call only.
        src_layer_range, dst_layer_range : range, optional
            Layers to copy, step 1: tensors ``start * tensor_num_per_layer`` to ``stop * tensor_num_per_layer``.
            Omitted: all tensors of that side. Both sides must name the same number of tensors.
        tensor_num_per_layer : int
            Tensors that make a layer, next to each other in the cache: 2 for K and V.
        timeout : float or None, optional
            Seconds until the transfer is ended; omitted: `Config.transfer_timeout`, None: no deadline.
        notify : bytes, optional
            Delivered to the peer's `DataDist.notifications` after the data has landed; at most
            `Config.notify_max_bytes` of either side. The transfer is done when it was sent, which may have to wait
            until the peer has read earlier ones. A transfer that fails sends none.

        Returns
        -------
        Transfer
            Started. Small ones over shm may be done already. The library owns the destination blocks until it is done,
            whatever the outcome; cancelling drains first. Their content is undefined unless it ended well. What it may
            raise when awaited is listed at `Transfer`.

        Raises
        ------
        BlockIndexError, CacheMismatch, CacheNotFound, CacheAccessError, NotLinkedError, ArgumentError, ClosedError
            What is wrong with the call; nothing has started.
        """
        dd = self._dd
        try:
            pair = dd._links[src_key[0]].table[src_key].pairs[dst_cache.id]
            if (
                get_ident() != dd._thread_id
                or not self._loop.is_running()
                or dst_cache._manager is not self._weak
                or dst_cache._state != "ready"
            ):
                pair = None
        except (KeyError, TypeError, AttributeError, IndexError):
            pair = None
        return self._start(
            _core.READ, pair, src_key, dst_cache, src_blocks, dst_blocks, src_layer_range, dst_layer_range,
            tensor_num_per_layer, timeout, notify,
        )  # fmt: skip

    def push_blocks(
        self,
        dst_key: RemoteKey,
        src_cache: Cache,
        src_blocks: Blocks,
        dst_blocks: Blocks,
        *,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
        timeout: Timeout = DEFAULT_TIMEOUT,
        notify: bytes | None = None,
    ) -> Transfer[None]:
        """Copy blocks of a cache of this DataDist into a peer's cache.

        Parameters
        ----------
        dst_key : BlocksCacheKey or CacheKeyByIdAndIndex
            Names the peer and its cache, which it registered with ``remote="rw"``.
        src_cache : Cache
            Of this DataDist; may be read-only.
        src_blocks, dst_blocks, src_layer_range, dst_layer_range, tensor_num_per_layer, timeout, notify
            As for `pull_blocks`. The notification arrives after the data is visible at the peer.

        Returns
        -------
        Transfer
            Done when the bytes are visible in the peer's memory. Do not change the source blocks until then. If it ends
            other than well, the content of the peer's blocks is undefined; the peer's `DataDist.fence` tells when they
            are quiet there.

        Raises
        ------
        BlockIndexError, CacheMismatch, CacheNotFound, CacheAccessError, NotLinkedError, ArgumentError, ClosedError
            What is wrong with the call; nothing has started.
        """
        dd = self._dd
        try:
            pair = dd._links[dst_key[0]].table[dst_key].pairs[src_cache.id]
            if (
                get_ident() != dd._thread_id
                or not self._loop.is_running()
                or src_cache._manager is not self._weak
                or src_cache._state != "ready"
            ):
                pair = None
        except (KeyError, TypeError, AttributeError, IndexError):
            pair = None
        return self._start(
            _core.WRITE, pair, dst_key, src_cache, src_blocks, dst_blocks, src_layer_range, dst_layer_range,
            tensor_num_per_layer, timeout, notify,
        )  # fmt: skip

    # Copies within this DataDist. ----------------------------------------------------------------------------

    def copy_cache(
        self,
        dst: Cache,
        src: Cache,
        *,
        dst_batch_index: SupportsIndex = 0,
        src_batch_index: SupportsIndex = 0,
        offset: SupportsIndex = 0,
        size: SupportsIndex = -1,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> Transfer[None]:
        """Copy a part of one slot of a cache to a slot of the same or another cache of this DataDist.

        Parameters
        ----------
        dst, src : Cache
            Of this DataDist, with as many tensors of the same dtype; shapes may differ. `dst` is writable.
        dst_batch_index, src_batch_index : int
            Entries of dimension 0. Within one cache they differ.
        offset : int
            Bytes from the start of both slots.
        size : int
            Bytes of each tensor; -1: to the end of the source slot. Both slots must hold them.
        timeout : float or None, optional
            As for `pull_blocks`.

        Returns
        -------
        Transfer
            As for `copy_blocks`.

        Raises
        ------
        BlockIndexError, CacheMismatch, CacheAccessError, ArgumentError, ArgumentTypeError, ClosedError
            What is wrong with the call; nothing has started.
        """
        seconds = self._default_seconds if timeout is DEFAULT_TIMEOUT else seconds_of(timeout, 0.0)
        return self._copies.cache(dst, src, dst_batch_index, src_batch_index, offset, size, seconds)

    def copy_blocks(
        self, cache: Cache, copy_block_info: BlockPairs, *, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> Transfer[None]:
        """Copy blocks of a cache to other blocks of the same cache, in every tensor.

        Parameters
        ----------
        cache : Cache
            Of this DataDist, and writable.
        copy_block_info : mapping or array
            Each source block with the sequence of its destinations, or an integer array ``[n, 2]`` of sources and
            destinations. Read during the call only. A destination may appear once, and no block is source and
            destination of one call: blocks move in any order. Nothing to copy is success.
        timeout : float or None, optional
            As for `pull_blocks`.

        Returns
        -------
        Transfer
            Started; small ones may be done already. Until it is done the library reads the sources and owns the
            destinations, whose content is undefined unless it ended well. Cancelling drains, as for all transfers.
            Peers may use the cache meanwhile.

        Raises
        ------
        BlockIndexError, CacheAccessError, ArgumentError, ArgumentTypeError, ClosedError
            What is wrong with the call; nothing has started.
        """
        seconds = self._default_seconds if timeout is DEFAULT_TIMEOUT else seconds_of(timeout, 0.0)
        return self._copies.blocks(cache, copy_block_info, seconds)

    def swap_blocks(
        self, src_cache: Cache, dst_cache: Cache, src_to_dst: BlockPairs, *, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> Transfer[None]:
        """Copy blocks of one cache to another one of this DataDist: swap them out, or in again.

        Parameters
        ----------
        src_cache, dst_cache : Cache
            Two caches of one geometry but for the number of blocks and the stride, over memory of their own. The source
            is left as it is. `dst_cache` is writable.
        src_to_dst : mapping or array
            Each source block with its destination, or an integer array ``[n, 2]``. As for `copy_blocks`, but both sides
            may name the same number.
        timeout : float or None, optional
            As for `pull_blocks`.

        Returns
        -------
        Transfer
            As for `copy_blocks`.

        Raises
        ------
        BlockIndexError, CacheMismatch, CacheAccessError, ArgumentError, ArgumentTypeError, ClosedError
            What is wrong with the call; nothing has started.
        """
        seconds = self._default_seconds if timeout is DEFAULT_TIMEOUT else seconds_of(timeout, 0.0)
        return self._copies.swap(src_cache, dst_cache, src_to_dst, seconds)

    def _start(
        self,
        opcode: int,
        pair: _core.Pair | None,
        key: RemoteKey,
        cache: Cache,
        src_blocks: Blocks,
        dst_blocks: Blocks,
        src_layer_range: range | None,
        dst_layer_range: range | None,
        tensor_num_per_layer: int,
        timeout: Timeout,
        notify: bytes | None,
    ) -> Transfer[None]:
        if pair is None:
            entry = self._entry(key, cache)
            self._check_pair(entry, cache)
            if cache._native is not None:
                pair = self._pair(entry, cache)
        else:
            entry = pair.pin[0]
        if opcode == _core.READ:
            if cache.read_only:
                raise CacheAccessError(
                    f"cache {cache.id} is read-only memory and cannot be pulled into",
                    hint="register writable memory as a destination",
                )
            local_blocks, remote_blocks = dst_blocks, src_blocks
        else:
            if entry.access != "rw":
                raise CacheAccessError(
                    f"the peer registered its cache {entry.cache_id} for reading only",
                    peer=key[0],
                    hint='register it with remote="rw" there',
                )
            local_blocks, remote_blocks = src_blocks, dst_blocks
        if src_layer_range is None and dst_layer_range is None:
            tensors = cache.geometry.num_tensors
            local_tensor = remote_tensor = 0
            if type(tensor_num_per_layer) is not int or not 0 < tensor_num_per_layer < 2**32:
                _check_per_layer(tensor_num_per_layer)
            if tensors != entry.geometry.num_tensors:
                cache.geometry.require_match(entry.geometry, ("num_tensors",), peer=key[0])
        else:
            local_range, remote_range = (
                (dst_layer_range, src_layer_range) if opcode == _core.READ else (src_layer_range, dst_layer_range)
            )
            local_tensor, tensors = _tensor_range(local_range, tensor_num_per_layer, cache.geometry, "local")
            remote_tensor, remote_tensors = _tensor_range(remote_range, tensor_num_per_layer, entry.geometry, "remote")
            if tensors != remote_tensors:
                raise CacheMismatch(
                    f"the layer ranges name {tensors} local and {remote_tensors} remote tensors",
                    field="num_tensors",
                    local=tensors,
                    remote=remote_tensors,
                    peer=key[0],
                    hint="give layer ranges of one length",
                )
        seconds = self._default_seconds if timeout is DEFAULT_TIMEOUT else seconds_of(timeout, 0.0)
        transfer: Transfer[None] = Transfer(loop=self._loop)
        counters = entry.link._counters
        transfer._counters = counters
        transfer._pull = opcode == _core.READ
        transfer._peer = key[0]
        if notify is not None:
            transfer._then = self._notifier(entry, notify, seconds)
        if pair is None:
            # The lists are the caller's again when this returns.
            local_blocks, remote_blocks = _core.checked_sides(
                opcode, local_blocks, remote_blocks, _native_geometry(cache), _native_geometry(entry)
            )
            counters.started += 1
            request = (opcode, local_blocks, remote_blocks, local_tensor, remote_tensor, tensors)
            self._start_when_ready(transfer, entry, cache, seconds, request)
            return transfer
        counters.started += 1
        try:
            pair.submit(transfer, opcode, local_blocks, remote_blocks, local_tensor, remote_tensor, tensors, seconds)
        except BaseException:
            counters.started -= 1
            raise
        return transfer

    def _entry(self, key: RemoteKey, cache: Cache) -> RemoteEntry:
        """Find the peer's cache, or explain why there is none."""
        dd = self._dd
        dd._check_usable()
        if not isinstance(key, (BlocksCacheKey, CacheKeyByIdAndIndex)):
            raise ArgumentTypeError(f"expected a BlocksCacheKey or CacheKeyByIdAndIndex, got {type(key).__name__}")
        self._check_own(cache)
        if cache.closed:
            if cache._state == "failed" and (failure := cache._registered.exception()) is not None:
                raise copy.copy(failure) from failure.__cause__
            raise ClosedError(f"cache {cache.id} is unregistered")
        if key.cluster_id == dd.cluster_id:
            raise ArgumentError(
                f"cluster {key.cluster_id} is this DataDist itself", hint="use copy_cache, copy_blocks or swap_blocks"
            )
        link = dd._links.get(key.cluster_id)
        if link is None:
            raise NotLinkedError(
                f"cluster {key.cluster_id} is not linked",
                peer=key.cluster_id,
                hint=f"await dd.link(ClusterInfo({key.cluster_id}, ...)) first",
            )
        entry = link.table.get(key)
        if (
            entry is None
            and isinstance(key, CacheKeyByIdAndIndex)
            and key.batch_index != 0
            and CacheKeyByIdAndIndex(key.cluster_id, key.cache_id) in link.table
        ):
            raise ArgumentError(
                f"batch_index={key.batch_index} on a cache that is accessed by blocks", hint="omit batch_index"
            )
        if entry is None:
            raise CacheNotFound(
                f"cluster {key.cluster_id} has no cache under {key}",
                peer=key.cluster_id,
                hint="the peer registers it under that key, and unregisters it only afterwards",
            )
        return entry

    def _check_pair(self, entry: RemoteEntry, cache: Cache) -> None:
        """Compare the geometries."""
        if entry.native is None:
            raise (
                entry.error
                if entry.error is not None
                else CacheNotFound(f"cache {entry.cache_id} was closed by its owner", peer=entry.link.cluster_id)
            )
        cache.geometry.require_match(entry.geometry, ("dtype", "block_shape"), peer=entry.link.cluster_id)

    def _pair(self, entry: RemoteEntry, cache: Cache) -> _core.Pair:
        """Keep what was compared for the next transfers."""
        assert cache._native is not None
        assert entry.native is not None
        # The pins: a transfer that holds the pair holds the tensors of its own side.
        pair = _core.Pair(cache._native, entry.native, (entry, cache))
        entry.pairs[cache.id] = pair
        return pair

    def _start_when_ready(
        self,
        transfer: Transfer[None],
        entry: RemoteEntry,
        cache: Cache,
        seconds: float,
        request: tuple[int, Blocks, Blocks, int, int, int],
    ) -> None:
        """Start a transfer, checked already, once its cache is registered. Its deadline runs meanwhile."""
        runtime = self._dd._center.runtime
        until = runtime.now() + seconds
        transfer._on_cancel = lambda: transfer._told(asyncio.CancelledError())
        timer = None
        if seconds:
            late = TransferTimeout(
                f"cache {cache.id} was not registered within the {seconds:g} s of the transfer",
                peer=entry.link.cluster_id,
                bytes_done=0,
            )
            timer = runtime.call_later(seconds, transfer._told, late)
        transfer._bytes_done = 0
        waiting = self._waiting
        waiting[transfer] = ("waiting for the registration of its cache", runtime.now())

        def begin(registered: asyncio.Future[None]) -> None:
            waiting.pop(transfer, None)
            if timer is not None:
                timer.cancel()
            if transfer.done():
                transfer._told(asyncio.CancelledError())  # counted, if somebody else set a result
                return
            transfer._on_cancel = None
            error = registered.exception()
            if error is None:
                left = max(until - runtime.now(), 1e-6) if seconds else 0.0
                try:
                    self._check_pair(entry, cache)
                    pair = entry.pairs.get(cache.id) or self._pair(entry, cache)
                    pair.submit(transfer, *request, left)
                    return
                except Exception as why:  # whatever it is, whoever waits must hear of it
                    error = why
            transfer._told(error)

        cache._registered.add_done_callback(begin)

    def _rows(self) -> list[PendingOperation]:
        """Return the rows of `DataDist.dump` for transfers that the engine does not have, yet or any more."""
        now = self._dd._center.runtime.now()
        return [
            PendingOperation(
                id=getattr(transfer, "_op", 0),
                kind="copy" if transfer._peer is None else "pull" if transfer._pull else "push",
                peer=transfer._peer,
                age=now - since,
                state=what,
                bytes_done=transfer.progress.bytes_done,
                bytes_total=transfer.progress.bytes_total,
            )
            for transfer, (what, since) in self._waiting.items()
            if not transfer.done()
        ]

    def _notifier(self, entry: RemoteEntry, payload: bytes, seconds: float) -> Callable[[Transfer[Any]], None]:
        """Return what ends a transfer after its notification was handed over, within its deadline."""
        if not isinstance(payload, (bytes, bytearray, memoryview)):
            raise ArgumentTypeError(f"notify must be bytes, got {type(payload).__name__}")
        payload = bytes(payload)
        here, there = self._dd._config.notify_max_bytes, entry.link.notify_max_bytes
        if len(payload) > min(here, there):
            raise ArgumentError(
                f"notify has {len(payload)} bytes, more than "
                + (f"{here}" if here <= there else f"the {there} that the peer accepts"),
                hint="send a reference, or raise notify_max_bytes",
            )
        # Not the manager itself: a transfer must not keep its DataDist from being dropped.
        runtime, waiting, weak = self._dd._center.runtime, self._waiting, self._weak
        until = runtime.now() + seconds

        def why(told: asyncio.Future[None]) -> BaseException | None:
            """Say the end of a link as transfers say it that are still in the engine."""
            error = told.exception()
            if not isinstance(error, LinkError) or isinstance(error, PeerLostError):
                return error
            manager = weak()
            if manager is None or manager._dd._thread_id != manager._dd._center.thread_id:
                return ClosedError("the DataDist was closed", peer=error.peer)
            return PeerLostError(error.message, peer=error.peer, hint=error.hint)

        def then(transfer: Transfer[Any]) -> None:
            told = entry.link.post_notification(payload)
            if told.done():
                transfer._told(why(told))
                return
            waiting[transfer] = ("waiting for the peer to read its notifications", runtime.now())
            # No deadline of the engine's is left; few transfers ever wait for a credit.
            transfer._on_cancel = told.cancel

            def late() -> None:
                transfer._told(
                    TransferTimeout(
                        f"the peer has not read its notifications for the {seconds:g} s of the transfer",
                        peer=entry.link.cluster_id,
                        hint="read DataDist.notifications there, or raise notify_credits",
                        bytes_done=transfer.progress.bytes_done,
                        bytes_total=transfer.progress.bytes_total,
                    )
                )
                told.cancel()

            timer = runtime.call_later(max(0.0, until - runtime.now()), late) if seconds else None

            def end(done: asyncio.Future[None]) -> None:
                waiting.pop(transfer, None)
                if timer is not None:
                    timer.cancel()
                transfer._told(asyncio.CancelledError() if done.cancelled() else why(done))

            told.add_done_callback(end)

        return then


def _native_geometry(cache: Cache | RemoteEntry) -> tuple[int, int, int, int]:
    g = cache.geometry
    return g.num_tensors, g.num_blocks, g.block_bytes, g.stride


def _refused(cache: Cache, failure: BaseException, others: int) -> RegistrationError:
    """Make the error for a cache that a transport does not take."""
    views = cache._views
    error = RegistrationError(
        f"cache {cache.id}, {len(views)} tensors of {sum(view.nbytes for view in views)} bytes in all, cannot be "
        f"registered beside {others} others: {failure}",
        hint=None
        if isinstance(failure, ClosedError)
        else "free caches, or raise the limit (by ulimit): memory (-v, -l), open files (-n), threads (-u)",
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


def _check_per_layer(per_layer: int) -> int:
    return as_integer(per_layer, "tensor_num_per_layer", low=1, high=2**32 - 1)


def _tensor_range(layers: range | None, per_layer: int, geometry: Geometry, side: str) -> tuple[int, int]:
    """Return the first tensor and the number of tensors of a layer range."""
    count = _check_per_layer(per_layer)
    if layers is None:
        return 0, geometry.num_tensors
    if not isinstance(layers, range):
        raise ArgumentTypeError(f"a layer range must be a range, got {type(layers).__name__}")
    said = f"range({shown(layers.start)}, {shown(layers.stop)}, {shown(layers.step)})"
    if layers.step != 1 or layers.start < 0:
        raise ArgumentError(f"{said} must start at 0 or above and have step 1", hint="give range(start, stop)")
    if geometry.num_tensors % count:
        raise ArgumentError(
            f"the {side} cache has {geometry.num_tensors} tensors, not a multiple of tensor_num_per_layer={count}",
            hint="give the number of tensors that make a layer",
        )
    if layers.start >= layers.stop:
        return 0, 0
    in_all = geometry.num_tensors // count
    if layers.stop > in_all:
        raise ArgumentError(f"{said} exceeds the {in_all} layers of the {side} cache")
    return layers.start * count, (layers.stop - layers.start) * count


def _check_mapped(views: list[BufferView], *, writable: bool) -> bool:
    """Refuse raw addresses that are not mapped, instead of dying of them in a copy thread; True if one is read-only.

    The kernel's list of mappings covers every page and its permissions; reading the first and the last byte by
    process_vm on oneself finds file mappings cut short. Neither touches the memory in a way that could crash.
    """
    raw = [(index, view) for index, view in enumerate(views) if view.owner is None]
    if not raw:
        return False
    readable, writeable = _mappings()
    read_only = False
    for index, view in raw:
        gap = _first_gap(view, writeable if writable else readable)
        read_only |= _first_gap(view, writeable) is not None
        edges = (view.address, view.address + view.nbytes - 1)
        if gap is not None or any(_core.readable(os.getpid(), edge, 1) for edge in edges):
            raise RegistrationError(
                f"tensor {index}: {view.nbytes} bytes at {view.address:#x} are not mapped "
                f"{'writable' if writable else 'readable'} in this process"
                + (f" (from {gap:#x} on)" if gap is not None else ""),
                hint="give the address of live memory, and check shape and dtype of the CacheDesc",
            )
    return read_only


def _first_gap(view: BufferView, mapped: list[tuple[int, int]]) -> int | None:
    """Return the first address of a view outside the mappings, which are in rising order."""
    at = view.address
    for start, stop in mapped:
        if start <= at < stop:
            at = stop
            if at >= view.address + view.nbytes:
                return None
    return at


def _mappings() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return this process's mappings that can be read, and those that can be read and written."""
    readable = []
    writable = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, permissions, *_ = line.split(maxsplit=2)
            if "r" not in permissions:
                continue
            start, stop = (int(edge, 16) for edge in span.split("-"))
            readable.append((start, stop))
            if "w" in permissions:
                writable.append((start, stop))
    return readable, writable
