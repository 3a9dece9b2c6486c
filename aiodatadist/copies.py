"""Copies between the caches of one DataDist: what `CacheManager.copy_cache`, `copy_blocks` and `swap_blocks` do.

They are operations of the engine like any other, as pulls from the DataDist itself: they move in the copy threads, take
turns with transfers, and end by deadline, cancel or closing in the same way.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias

import numpy as np

from . import _core
from ._buffers import share_memory
from .errors import (
    ArgumentError,
    ArgumentTypeError,
    BlockIndexError,
    CacheAccessError,
    ClosedError,
    TransferTimeout,
    TransportUnavailable,
)
from .observe import Counters
from .transfer import Transfer
from .types import Placement, as_integer

if TYPE_CHECKING:
    from .cache import CacheManager
    from .registry import Cache

__all__ = ["BlockPairs", "Copies"]

BlockPairs: TypeAlias = Mapping[Any, Any] | Sequence[Sequence[SupportsIndex]] | np.ndarray[Any, Any]
Side: TypeAlias = _core.Slot | list[Any] | np.ndarray[Any, Any]

_PAIRS_HINT = "give a mapping, or an integer array of shape [n, 2] with a source and a destination in each row"


class Copies:
    """The copies of one `CacheManager`."""

    def __init__(self, manager: CacheManager, counters: Counters) -> None:
        self._manager = manager
        self._counters = counters
        self._sources: dict[int, _core.RemoteCache] = {}
        # By the ids of destination and source; None once they are known to fit, until the native side is there.
        self._pairs: dict[tuple[int, int], _core.Pair | None] = {}

    def forget(self, cache_id: int) -> None:
        """Let go of a cache that is closed."""
        self._sources.pop(cache_id, None)
        for ids in [ids for ids in self._pairs if cache_id in ids]:
            del self._pairs[ids]

    def cache(
        self,
        dst: Cache,
        src: Cache,
        dst_index: SupportsIndex,
        src_index: SupportsIndex,
        offset: SupportsIndex,
        size: SupportsIndex,
        seconds: float,
    ) -> Transfer[None]:
        """Start `CacheManager.copy_cache`."""
        self._check(dst, src, ("dtype", "num_tensors"))
        into = _index(dst_index, "dst_batch_index", dst, "destination")
        out_of = _index(src_index, "src_batch_index", src, "source")
        start, wanted = as_integer(offset, "offset"), as_integer(size, "size", low=-1)
        nbytes = max(src.geometry.block_bytes - start, 0) if wanted == -1 else wanted
        for cache, side in ((src, "source"), (dst, "destination")):
            slot = cache.geometry.block_bytes
            if start > slot or nbytes > slot - start:
                raise ArgumentError(
                    f"offset={start} and size={wanted} exceed the {slot} bytes of a slot of the {side} cache",
                    hint="give an offset and a size that fit both slots",
                )
        if dst is src and into == out_of and nbytes:
            raise BlockIndexError(
                f"slot {into} of cache {dst.id} is source and destination", hint="copy to another slot"
            )
        return self._start(dst, src, _core.Slot(into, start, nbytes), _core.Slot(out_of, start, nbytes), seconds)

    def blocks(self, cache: Cache, pairs: BlockPairs, seconds: float) -> Transfer[None]:
        """Start `CacheManager.copy_blocks`."""
        self._check(cache, cache, ())
        sources, destinations = _block_pairs(pairs, "copy_block_info", several=True)
        return self._start(cache, cache, destinations, sources, seconds)

    def swap(self, src: Cache, dst: Cache, pairs: BlockPairs, seconds: float) -> Transfer[None]:
        """Start `CacheManager.swap_blocks`."""
        self._check(dst, src, ("dtype", "block_shape", "num_tensors"))
        if src is dst:
            raise ArgumentError(f"cache {src.id} is source and destination", hint="use copy_blocks within one cache")
        sources, destinations = _block_pairs(pairs, "src_to_dst", several=False)
        return self._start(dst, src, destinations, sources, seconds)

    def _check(self, dst: Cache, src: Cache, fields: tuple[str, ...]) -> None:
        manager = self._manager
        manager._dd._check_usable()
        for cache in (dst, src):
            manager._check_own(cache)
            if cache.closed:
                raise ClosedError(f"cache {cache.id} is unregistered")
            if cache.placement is not Placement.HOST:
                raise TransportUnavailable(
                    f"cache {cache.id} is memory of an NPU, and the processor copies host memory only",
                    transport="shm",
                    reason="the processor does not reach the memory of an NPU",
                    hint="copy with torch: dst[i].copy_(src[j])",
                )
        if dst.read_only:
            raise CacheAccessError(
                f"cache {dst.id} is read-only memory and cannot be copied into",
                hint="register writable memory as a destination",
            )
        dst.geometry.require_match(src.geometry, fields)
        if (dst.id, src.id) not in self._pairs:
            if dst is not src and share_memory(dst._views, src._views):
                raise ArgumentError(
                    f"caches {dst.id} and {src.id} share memory, and a copy could read what it has written",
                    hint="copy within one cache of that memory",
                )
            self._pairs[dst.id, src.id] = None

    def _pair(self, dst: Cache, src: Cache) -> _core.Pair | None:
        """Return what the engine needs; None before both caches are ready."""
        pair = self._pairs.get((dst.id, src.id))
        if pair is None and dst._native is not None and src._native is not None:
            source = self._sources.get(src.id)
            if source is None:
                source = self._sources[src.id] = src._native.source()
            # The pins: a transfer that holds the pair holds the tensors.
            pair = self._pairs[dst.id, src.id] = _core.Pair(dst._native, source, (dst, src))
        return pair

    def _start(self, dst: Cache, src: Cache, into: Side, out_of: Side, seconds: float) -> Transfer[None]:
        tensors = dst.geometry.num_tensors
        transfer: Transfer[None] = Transfer(loop=self._manager._loop)
        transfer._counters = self._counters
        transfer._pull = True
        transfer._peer = None
        pair = self._pair(dst, src)
        if pair is None:
            sides = _core.checked_sides(
                _core.READ, into, out_of, _shape(dst), _shape(src), copying=True, same_cache=dst is src
            )
            self._counters.started += 1
            self._start_when_ready(transfer, dst, src, sides, seconds)
            return transfer
        self._counters.started += 1
        try:
            pair.submit(transfer, _core.READ, into, out_of, 0, 0, tensors, seconds)
        except BaseException:
            self._counters.started -= 1
            raise
        return transfer

    def _start_when_ready(
        self, transfer: Transfer[None], dst: Cache, src: Cache, sides: tuple[Any, Any], seconds: float
    ) -> None:
        """Start a copy, checked already, once both caches are registered. Its deadline runs meanwhile."""
        runtime = self._manager._runtime
        until = runtime.now() + seconds
        transfer._on_cancel = lambda: transfer._told(asyncio.CancelledError())
        timer = None
        if seconds:
            late = TransferTimeout(
                f"caches {dst.id} and {src.id} were not registered within the {seconds:g} s of the copy", bytes_done=0
            )
            timer = runtime.call_later(seconds, transfer._told, late)
        transfer._bytes_done = 0
        waiting = self._manager._waiting

        def end(error: BaseException) -> None:
            waiting.remove(transfer)
            if timer is not None:
                timer.cancel()
            transfer._told(error)

        waiting.add(transfer, "waiting for the registration of its caches", end)
        registrations = [cache._registered for cache in ((dst,) if dst is src else (dst, src))]

        def begin(_: asyncio.Future[None]) -> None:
            ended = [registration for registration in registrations if registration.done()]
            error = next((why for registration in ended if (why := registration.exception()) is not None), None)
            if error is None and len(ended) < len(registrations):
                return
            if not waiting.remove(transfer):
                return  # told by the other's end
            if timer is not None:
                timer.cancel()
            if transfer.done():
                transfer._told(asyncio.CancelledError())  # counted, if somebody else set a result
                return
            transfer._on_cancel = None
            if error is None:
                left = max(until - runtime.now(), 1e-6) if seconds else 0.0
                try:
                    for cache in (dst, src):
                        if cache.closed:
                            raise ClosedError(f"cache {cache.id} was unregistered before the copy began")
                    pair = self._pair(dst, src)
                    assert pair is not None
                    pair.submit(transfer, _core.READ, *sides, 0, 0, dst.geometry.num_tensors, left)
                    return
                except Exception as why:  # whatever it is, whoever waits must hear of it
                    error = why
            transfer._told(error)

        for registration in registrations:
            registration.add_done_callback(begin)


def _shape(cache: Cache) -> tuple[int, int, int, int]:
    g = cache.geometry
    return g.num_tensors, g.num_blocks, g.block_bytes, g.stride


def _index(index: SupportsIndex, name: str, cache: Cache, side: str) -> int:
    value, slots = as_integer(index, name), cache.geometry.num_blocks
    if value >= slots:
        raise BlockIndexError(
            f"{name}={value} is outside the {side} cache's 0..{slots - 1}", hint="give an index below its slots"
        )
    return value


def _block_pairs(pairs: BlockPairs, name: str, *, several: bool) -> tuple[Any, Any]:
    """Return the sources and the destinations; the engine checks the indices."""
    if isinstance(pairs, Mapping):
        if not several:
            return list(pairs), list(pairs.values())
        sources: list[Any] = []
        destinations: list[Any] = []
        for source, targets in pairs.items():
            if isinstance(targets, (str, bytes, Mapping, Set)) or not isinstance(targets, Iterable):
                raise ArgumentTypeError(
                    f"{name}[{source!r:.80}] must be a sequence of block indices, got {type(targets).__name__}",
                    hint="give a list of destinations for each source",
                )
            destinations.extend(targets)
            sources.extend(itertools.repeat(source, len(destinations) - len(sources)))
        return sources, destinations
    try:
        array = np.asarray(pairs)
    except Exception as e:
        raise ArgumentTypeError(f"{name} is neither a mapping nor an array: {e}", hint=_PAIRS_HINT) from e
    if array.ndim > 0 and array.size == 0:
        return [], []
    if array.ndim != 2 or array.shape[1] != 2 or array.dtype.kind not in "iu":
        raise ArgumentTypeError(
            f"{name} must hold pairs of block indices, got an array of shape {array.shape} and dtype {array.dtype}",
            hint=_PAIRS_HINT,
        )
    # Above 2**63 an unsigned index turns negative, and is refused as out of range.
    array = array.astype(np.int64, copy=False)
    return array[:, 0], array[:, 1]
