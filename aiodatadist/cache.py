"""Transfers of caches: `CacheManager`, one per DataDist."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from . import _core, layerwise
from ._sides import Blocks, Named, check_access, check_reachable, check_size, resolve
from ._starting import Late, find, index_key, not_found, notifier, told_after
from .control.table import RemoteEntry
from .copies import BlockPairs, Copies
from .errors import (
    ArgumentError,
    ArgumentTypeError,
    ClosedError,
    NotLinkedError,
)
from .keys import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, Key
from .layers import LayerSource
from .layerwise import TransferConfig, TransferTask, TransferWithCacheKeyConfig
from .observe import PendingOperation
from .registry import DEFAULT_TIMEOUT, Cache, CacheRegistry, Timeout, seconds_of
from .transfer import Transfer
from .types import U32_MAX, as_integer

if TYPE_CHECKING:
    from .control.leases import Lease
    from .control.links import Link
    from .datadist import DataDist

__all__ = ["DEFAULT_TIMEOUT", "Cache", "CacheManager"]


class CacheManager(CacheRegistry, _core.ShortWay):
    """Registers caches and moves blocks: `DataDist.cache_manager`.

    Belongs to the loop and the thread of its DataDist: every method raises `WrongLoopError` elsewhere, `ClosedError`
    when the DataDist is closed and `ForkedError` in a forked child. All are plain functions that return at once; those
    that start something return a `Transfer`.
    """

    def __init__(self, dd: DataDist) -> None:
        super().__init__(dd)
        self._waiting = dd._center.waiting_transfers
        self._copies = Copies(self, dd._center.copied)
        self._default_seconds = dd._config.transfer_timeout or 0.0
        self._open_short_way(
            dd._links, dd._thread_id, self._loop, DEFAULT_TIMEOUT, Cache, BlocksCacheKey, CacheKeyByIdAndIndex
        )

    def _on_cache_quiet(self, cache_id: int) -> None:
        self._copies.forget(cache_id)
        super()._on_cache_quiet(cache_id)

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

    def pull_cache(
        self,
        src_key: CacheKey | CacheKeyByIdAndIndex,
        dst_cache: Cache,
        *,
        dst_batch_index: int = 0,
        size: int = -1,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
        timeout: Timeout = DEFAULT_TIMEOUT,
        notify: bytes | None = None,
        wait: bool = False,
    ) -> Transfer[None]:
        """Copy a batch slot of a peer's cache into a batch slot of a cache of this DataDist.

        Parameters
        ----------
        src_key : CacheKey or CacheKeyByIdAndIndex
            Names the peer, its cache and the slot: by request or prefix, or by the cache's id and the slot's index.
        dst_cache : Cache
            Writable.
        dst_batch_index : int
            The slot it goes to.
        size : int
            Bytes from the start of the slot, in each tensor; -1: all, and both caches' slots must have one shape.
        src_layer_range, dst_layer_range, tensor_num_per_layer, timeout, notify, wait
            As for `pull_blocks`.

        Returns
        -------
        Transfer
            As for `pull_blocks`. Where the owner counts the key (see `allocate_cache`), it is told that the pull has
            ended well.

        Raises
        ------
        BlockIndexError, CacheMismatch, CacheNotFound, CacheAccessError, NotLinkedError, ArgumentError, ClosedError
            What is wrong with the call; nothing has started.
        """
        return self._start_checked(
            Named(_core.READ, src_key, None, None, dst_batch_index, size, src_layer_range, dst_layer_range,
                  tensor_num_per_layer),
            dst_cache, timeout, notify, wait,
        )  # fmt: skip

    def push_cache(
        self,
        dst_key: CacheKey | CacheKeyByIdAndIndex,
        src_cache: Cache,
        *,
        src_batch_index: int = 0,
        size: int = -1,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
        timeout: Timeout = DEFAULT_TIMEOUT,
        notify: bytes | None = None,
    ) -> Transfer[None]:
        """Copy a batch slot of a cache of this DataDist into a batch slot of a peer's cache.

        Parameters
        ----------
        dst_key : CacheKey or CacheKeyByIdAndIndex
            Names the peer, its cache and the slot.
        src_cache : Cache
            Of this DataDist; may be read-only.
        src_batch_index : int
            The slot to copy.
        size, src_layer_range, dst_layer_range, tensor_num_per_layer, timeout, notify
            As for `pull_cache`.

        Returns
        -------
        Transfer
            As for `push_blocks`.

        Raises
        ------
        BlockIndexError, CacheMismatch, CacheNotFound, CacheAccessError, NotLinkedError, ArgumentError, ClosedError
            What is wrong with the call; nothing has started.
        """
        return self._start_checked(
            Named(_core.WRITE, dst_key, None, None, src_batch_index, size, src_layer_range, dst_layer_range,
                  tensor_num_per_layer),
            src_cache, timeout, notify, False,
        )  # fmt: skip

    @_core.short_pull(DEFAULT_TIMEOUT)
    def pull_blocks(
        self,
        src_key: Key,
        dst_cache: Cache,
        src_blocks: Blocks | None = None,
        dst_blocks: Blocks | None = None,
        *,
        dst_batch_index: int | None = None,
        size: int = -1,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
        timeout: Timeout = DEFAULT_TIMEOUT,
        notify: bytes | None = None,
        wait: bool = False,
    ) -> Transfer[None]:
        """Copy blocks of a peer's cache into a cache of this DataDist; either side may be a batch slot instead.

        Parameters
        ----------
        src_key : BlocksCacheKey, CacheKeyByIdAndIndex or CacheKey
            Names the peer and its cache; without `src_blocks` also the batch slot, so that it is one of the last two.
        dst_cache : Cache
            Writable.
        src_blocks, dst_blocks : sequence or array of int, optional
            Block ``src_blocks[i]`` of each tensor goes to block ``dst_blocks[i]``. Of one length, which may be 0: then
            the transfer ends well at once. A destination may appear once, a source any number of times. Read during
            the call only. Omitting one of them makes that side a batch slot: its pieces of the size of a block are the
            other side's blocks in turn, the last one shorter where the slot ends within it. Fewer blocks move the
            beginning of the slot; more than it fills are an error.
        dst_batch_index : int, optional
            The batch slot of `dst_cache` where `dst_blocks` is omitted; 0 if omitted, too.
        size : int
            Where one side is a slot: bytes of it in each tensor; -1: as many as the blocks take.
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
        wait : bool
            If the peer has not registered a cache under the key, wait for it within the deadline instead of raising.
            What does not fit it is then raised when awaited.

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
        _check_lists(src_blocks, dst_blocks, "pull_cache")
        return self._start_checked(
            Named(_core.READ, src_key, src_blocks, dst_blocks, dst_batch_index, size, src_layer_range,
                  dst_layer_range, tensor_num_per_layer),
            dst_cache, timeout, notify, wait,
        )  # fmt: skip

    @_core.short_push(DEFAULT_TIMEOUT)
    def push_blocks(
        self,
        dst_key: Key,
        src_cache: Cache,
        src_blocks: Blocks | None = None,
        dst_blocks: Blocks | None = None,
        *,
        src_batch_index: int | None = None,
        size: int = -1,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
        timeout: Timeout = DEFAULT_TIMEOUT,
        notify: bytes | None = None,
    ) -> Transfer[None]:
        """Copy blocks of a cache of this DataDist into a peer's cache; either side may be a batch slot instead.

        Parameters
        ----------
        dst_key : BlocksCacheKey, CacheKeyByIdAndIndex or CacheKey
            Names the peer and its cache, which it registered with ``remote="rw"``; without `dst_blocks` also the batch
            slot.
        src_cache : Cache
            Of this DataDist; may be read-only.
        src_blocks, dst_blocks
            As for `pull_blocks`.
        src_batch_index : int, optional
            The batch slot of `src_cache` where `src_blocks` is omitted; 0 if omitted, too.
        size, src_layer_range, dst_layer_range, tensor_num_per_layer, timeout, notify
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
        _check_lists(src_blocks, dst_blocks, "push_cache")
        return self._start_checked(
            Named(_core.WRITE, dst_key, src_blocks, dst_blocks, src_batch_index, size, src_layer_range,
                  dst_layer_range, tensor_num_per_layer),
            src_cache, timeout, notify, False,
        )  # fmt: skip

    def transfer_cache_async(
        self,
        cache: Cache,
        layers: LayerSource,
        targets: Sequence[TransferConfig | TransferWithCacheKeyConfig],
        src_blocks: Blocks | None = None,
        dst_blocks: Blocks | None = None,
        *,
        tensor_num_per_layer: int = 2,
        timeout: Timeout = DEFAULT_TIMEOUT,
        notify: bytes | None = None,
    ) -> TransferTask:
        """Push each layer of a cache to one or more peers as soon as it is computed.

        Parameters
        ----------
        cache : Cache
            Of this DataDist; may be read-only. Tensors of a layer lie next to each other.
        layers : LayerGate, LayerSynchronizer, or sequence of events or futures
            Says which layers are final; in a sequence, element ``i`` stands for layer ``i``. See `aiodatadist.layers`.
            Let go of when the task ends.
        targets : sequence of TransferConfig or TransferWithCacheKeyConfig
            What goes where. One that fails does not stop the others. Never changed.
        src_blocks, dst_blocks : sequence or array of int, optional
            As for `push_blocks`, the same for all targets. `dst_blocks` alone: a batch slot of `cache` goes to blocks.
            Neither: batch slot to batch slot. Read during the call only.
        tensor_num_per_layer : int
            Tensors that make a layer: 2 for K and V.
        timeout : float or None, optional
            Seconds from now until every target is ended, the time to compute the layers included; omitted:
            `Config.transfer_timeout`, None: no deadline.
        notify : bytes, optional
            Delivered to each target's peer after all its layers have landed, as for `push_blocks`.

        Returns
        -------
        TransferTask
            Await it for the results. Do not change a layer's source blocks from its recording on until the task is
            done, nor those of layers that are not recorded once they are.

        Raises
        ------
        BlockIndexError, ArgumentError, ArgumentTypeError, ClosedError
            What is wrong with the call whatever the peers have; nothing has started. That a peer is not linked, has no
            such cache, or one that does not fit, is in that target's result.
        OutOfMemoryError
            There is no thread to be had for the source.
        """
        self._dd._check_usable()
        self._check_own(cache)
        self._check_open(cache)
        seconds = self._default_seconds if timeout is DEFAULT_TIMEOUT else seconds_of(timeout, 0.0)
        return layerwise.start(
            self, cache, layers, targets, src_blocks, dst_blocks, tensor_num_per_layer, seconds, notify
        )

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

    def _start_checked(
        self, named: Named, cache: Cache, timeout: Timeout, notify: bytes | None, wait: bool
    ) -> Transfer[None]:
        """Check everything that a call has named, and start the transfer, or have it wait for what is missing."""
        link = self._link(named.key, cache)
        reading = named.opcode == _core.READ
        named = _checked(named, "dst_batch_index" if reading else "src_batch_index")
        index_key(named.key)
        found = find(link, named.key)
        if found is None and not wait:
            raise not_found(named.key)
        seconds = self._default_seconds if timeout is DEFAULT_TIMEOUT else seconds_of(timeout, 0.0)
        transfer: Transfer[None] = Transfer(loop=self._loop)
        transfer._counters = counters = link._counters
        transfer._pull = reading
        transfer._peer = named.key.cluster_id
        then = notifier(self, link, notify, seconds) if notify is not None else None
        if found is None:
            check_access(named.opcode, None, cache)
            # The lists are the caller's again when this returns.
            source, destination = (
                blocks if blocks is None else _core.frozen_blocks(blocks, name)
                for blocks, name in ((named.src_blocks, "src_blocks"), (named.dst_blocks, "dst_blocks"))
            )
            counters.started += 1
            Late(self, transfer, link, named._replace(src_blocks=source, dst_blocks=destination), cache, then, seconds,
                 wait)  # fmt: skip
            return transfer
        entry, slot = found
        sides = resolve(named, cache, entry, slot)
        if cache._native is None:
            local, remote = _core.checked_sides(
                named.opcode, sides.local, sides.remote, _native_geometry(cache), _native_geometry(entry)
            )
            source, destination = (remote, local) if reading else (local, remote)
            counters.started += 1
            Late(
                self, transfer, link,
                named._replace(
                    src_blocks=named.src_blocks if named.src_blocks is None else source,
                    dst_blocks=named.dst_blocks if named.dst_blocks is None else destination,
                ),
                cache, then, seconds, wait,
            )  # fmt: skip
            return transfer
        then = told_after(named.opcode, entry, slot, sides, then)
        if then is not None:
            transfer._then = then
        pair = self._pair(entry, cache)
        counters.started += 1
        try:
            pair.submit(transfer, named.opcode, *sides, seconds)
        except BaseException:
            counters.started -= 1
            raise
        return transfer

    def _link(self, key: Key, cache: Cache) -> Link:
        """Find the link of a key, or explain why there is none."""
        dd = self._dd
        dd._check_usable()
        if not isinstance(key, (BlocksCacheKey, CacheKeyByIdAndIndex, CacheKey)):
            raise ArgumentTypeError(
                f"expected a BlocksCacheKey, CacheKeyByIdAndIndex or CacheKey, got {type(key).__name__}"
            )
        self._check_own(cache)
        self._check_open(cache)
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
        return link

    def _check_open(self, cache: Cache) -> None:
        if cache.closed:
            if cache._state == "failed" and (failure := cache._registered.exception()) is not None:
                raise copy.copy(failure) from failure.__cause__
            raise ClosedError(f"cache {cache.id} is unregistered")

    def _pair(self, entry: RemoteEntry, cache: Cache) -> _core.Pair:
        """Return what transfers between the two caches go through, kept for the next ones where blocks agree."""
        pair = entry.pairs.get(cache.id)
        if pair is None:
            assert cache._native is not None
            native = entry.native_for(cache)
            if native is None:
                check_reachable(entry, cache)  # raises
            assert native is not None
            # The pins: a transfer that holds the pair holds the tensors of its own side.
            pair = _core.Pair(cache._native, native, (entry, cache))
            here, there = cache.geometry, entry.geometry
            if here.dtype == there.dtype and here.block_shape == there.block_shape:
                entry.pairs[cache.id] = pair
                if here.num_tensors == there.num_tensors:
                    pair.prepare(
                        cache, entry.link.cluster_id, entry.link._counters, Transfer, self._loop,
                        self._default_seconds, here.num_tensors, not cache.read_only, entry.access == "rw",
                    )  # fmt: skip
        return pair

    def _rows(self) -> list[PendingOperation]:
        """Return the rows of `DataDist.dump` for transfers that the engine does not have, yet or any more."""
        return self._waiting.rows()


def _check_lists(src_blocks: Blocks | None, dst_blocks: Blocks | None, whole: str) -> None:
    if src_blocks is None and dst_blocks is None:
        raise ArgumentError("neither src_blocks nor dst_blocks is given", hint=f"{whole} moves batch slots")


def _checked(named: Named, index_name: str) -> Named:
    """Check what needs no cache."""
    for name, layers in (("src_layer_range", named.src_layers), ("dst_layer_range", named.dst_layers)):
        if layers is not None and not isinstance(layers, range):
            raise ArgumentTypeError(f"{name} must be a range, got {type(layers).__name__}")
    index = named.batch_index
    return named._replace(
        batch_index=None if index is None else as_integer(index, index_name, high=U32_MAX),
        size=check_size(named.size),
    )


def _native_geometry(cache: Cache | RemoteEntry) -> tuple[int, int, int, int]:
    g = cache.geometry
    return g.num_tensors, g.num_blocks, g.block_bytes, g.stride
