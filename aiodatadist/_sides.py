"""What a transfer names on its two sides, checked against both caches: blocks or batch slots, sizes, layers.

Four directions, each for reading and for writing: blocks to blocks, batch slot to batch slot, and between a slot and
blocks, where piece ``j`` of the slot, of the size of a block, belongs to the ``j``-th block named.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex, TypeAlias

import numpy as np

from . import _core
from .errors import (
    ArgumentError,
    ArgumentTypeError,
    BlockIndexError,
    CacheAccessError,
    CacheMismatch,
    CacheNotFound,
    TransportUnavailable,
)
from .keys import CacheKey, Key
from .types import Geometry, Placement, as_integer, shown

if TYPE_CHECKING:
    from .control.table import RemoteEntry
    from .registry import Cache

__all__ = [
    "Blocks",
    "Named",
    "Sides",
    "check_access",
    "check_reachable",
    "check_size",
    "layer_range",
    "match_tensors",
    "resolve",
]

Blocks: TypeAlias = Sequence[SupportsIndex] | np.ndarray[Any, Any]


class Named(NamedTuple):
    """What a call has named, before it is known whether it fits.

    Parameters
    ----------
    opcode : int
        ``_core.READ`` or ``_core.WRITE``.
    key : Key
        The peer's cache, and perhaps its batch slot.
    src_blocks, dst_blocks : sequence of int or None
        None: that side is a batch slot.
    batch_index : int or None
        Batch slot of the local side; None: not given.
    size : int
        Bytes of each tensor; -1: all.
    src_layers, dst_layers : range or None
    per_layer : int
    """

    opcode: int
    key: Key
    src_blocks: Blocks | None
    dst_blocks: Blocks | None
    batch_index: int | None
    size: int
    src_layers: range | None
    dst_layers: range | None
    per_layer: int

    @property
    def local_is_source(self) -> bool:
        """Whether bytes leave this process."""
        return self.opcode == _core.WRITE


class Sides(NamedTuple):
    """What `_core.Pair.submit` takes."""

    local: Any
    remote: Any
    local_tensor: int
    remote_tensor: int
    num_tensors: int


def check_size(size: int) -> int:
    """Check a number of bytes, where -1 means all."""
    return as_integer(size, "size", low=-1, high=2**63 - 1)


def check_access(opcode: int, entry: RemoteEntry | None, cache: Cache) -> None:
    """Refuse to write where only reading is possible or allowed. `entry` is None where the peer has none yet."""
    if opcode == _core.READ:
        if cache.read_only:
            raise CacheAccessError(
                f"cache {cache.id} is read-only memory and cannot be pulled into",
                hint="register writable memory as a destination",
            )
    elif entry is not None and entry.access != "rw":
        raise CacheAccessError(
            f"the peer registered its cache {entry.cache_id} for reading only",
            peer=entry.link.cluster_id,
            hint='register it with remote="rw" there',
        )


def check_reachable(entry: RemoteEntry, cache: Cache) -> None:
    """Refuse a peer's cache that no transport of the link brings together with the local one."""
    if entry.native is not None and entry.native_for(cache) is None:
        if cache.placement is Placement.HOST:
            raise TransportUnavailable(
                f"HIXL does not connect with the memory of cache {cache.id}, and the peer's cache {entry.cache_id} is "
                f"reached over {entry.native.path} alone",
                peer=entry.link.cluster_id,
                transport=entry.native.transport,
                reason="over RoCE it reaches host memory of aclrtMallocHost only",
                hint="allocate it by aclrtMallocHost, or put tcp into Config.transports on both sides",
            )
        why = entry.link.path.reasons.get("hixl", "the peer's cache has no key for it")
        raise TransportUnavailable(
            f"cache {cache.id} is memory of an NPU, which only hixl reaches, and the peer's cache {entry.cache_id} is "
            f"reached over {entry.native.path}: {why}",
            peer=entry.link.cluster_id,
            transport="hixl",
            reason=why,
            hint="link.path says what the link can move; see `aiodatadist doctor ascend` on both sides",
        )
    if entry.native is None:
        raise (
            entry.error
            if entry.error is not None
            else CacheNotFound(f"cache {entry.cache_id} was closed by its owner", peer=entry.link.cluster_id)
        )


def resolve(named: Named, cache: Cache, entry: RemoteEntry, slot: int | None) -> Sides:
    """Check everything that does not need the lists' values, and say what the two sides are.

    Parameters
    ----------
    named : Named
    cache : Cache
        The local one.
    entry : RemoteEntry
        What the key names at the peer.
    slot : int or None
        The batch slot that the key names; None where it names a whole cache.

    Raises
    ------
    ArgumentError, ArgumentTypeError, BlockIndexError, CacheMismatch, CacheAccessError, CacheNotFound
        What does not fit.
    """
    check_reachable(entry, cache)
    check_access(named.opcode, entry, cache)
    peer = entry.link.cluster_id
    here, there = cache.geometry, entry.geometry
    source, destination = named.src_blocks, named.dst_blocks
    local, remote = (source, destination) if named.local_is_source else (destination, source)
    local_name, remote_name = ("src", "dst") if named.local_is_source else ("dst", "src")
    if local is not None and named.batch_index is not None:
        raise ArgumentError(
            f"{local_name}_batch_index={named.batch_index} names a batch slot, and {local_name}_blocks names blocks",
            hint="give one of both",
        )
    if remote is not None and (isinstance(named.key, CacheKey) or slot):
        raise ArgumentError(
            f"{named.key} names a batch slot, and {remote_name}_blocks names blocks",
            hint=f"omit {remote_name}_blocks, or name the cache by a BlocksCacheKey or by its id alone",
        )
    here.require_match(there, ("dtype",), peer=peer)
    if local is not None and remote is not None:
        if named.size != -1:
            raise ArgumentError(
                f"size={named.size} is for batch slots, and both sides are blocks",
                hint="blocks are moved whole; omit size",
            )
        here.require_match(there, ("block_shape",), peer=peer)
        return Sides(local, remote, *match_tensors(named, here, there, peer))

    if remote is None and slot is None:
        raise ArgumentError(
            f"{named.key} names no batch slot",
            hint=f"give {'' if local is None else f'{remote_name}_blocks, or '}a CacheKey or CacheKeyByIdAndIndex",
        )
    index = 0 if named.batch_index is None else named.batch_index
    if local is None and index >= here.num_blocks:
        raise BlockIndexError(
            f"{local_name}_batch_index={index} is outside the local cache's 0..{here.num_blocks - 1}",
            hint="give an index below the cache's number of batch slots",
        )
    if remote is None and slot is not None and slot >= there.num_blocks:
        raise BlockIndexError(
            f"batch_index={slot} is outside the peer's cache, 0..{there.num_blocks - 1}",
            peer=peer,
            hint="give an index below the peer's number of batch slots",
        )
    if local is None and remote is None:
        if named.size == -1:
            here.require_match(
                there, ("block_shape",), peer=peer, hint="register both with the same batch slots, or give size"
            )
        most = min(here.block_bytes, there.block_bytes)
    else:
        most = here.block_bytes if local is None else there.block_bytes
        _match_rows(here, there, peer)
    if named.size > most:
        raise ArgumentError(
            f"size={named.size} exceeds the {most} bytes of a batch slot in one tensor", hint="give at most that"
        )
    nbytes = named.size if named.size != -1 else most if local is None and remote is None else _core.WHOLE
    return Sides(
        _core.Slot(index, 0, nbytes) if local is None else local,
        _core.Slot(slot, 0, nbytes) if remote is None and slot is not None else remote,
        *match_tensors(named, here, there, peer),
    )


def _match_rows(here: Geometry, there: Geometry, peer: int) -> None:
    """Compare what a position takes, ``shape[2:]``, in a slot and in a block.

    Where either side has no such dimensions, it is flat, and only bytes count.
    """
    mine, theirs = here.shape[2:], there.shape[2:]
    if mine and theirs and mine != theirs:
        raise CacheMismatch(
            field="shape[2:]",
            local=mine,
            remote=theirs,
            peer=peer,
            hint="batch slots [batch, positions, ...] and blocks [blocks, positions, ...] must agree in the rest",
        )


def match_tensors(named: Named, here: Geometry, there: Geometry, peer: int) -> tuple[int, int, int]:
    """Return the first local and the first remote tensor, and how many."""
    if named.src_layers is None and named.dst_layers is None:
        _check_per_layer(named.per_layer)
        here.require_match(there, ("num_tensors",), peer=peer)
        return 0, 0, here.num_tensors
    mine, theirs = (
        (named.src_layers, named.dst_layers) if named.local_is_source else (named.dst_layers, named.src_layers)
    )
    names = ("src_layer_range", "dst_layer_range") if named.local_is_source else ("dst_layer_range", "src_layer_range")
    local_tensor, local_count = _tensor_range(mine, names[0], named.per_layer, here, "local")
    remote_tensor, remote_count = _tensor_range(theirs, names[1], named.per_layer, there, "remote")
    if local_count != remote_count:
        raise CacheMismatch(
            f"the layer ranges name {local_count} local and {remote_count} remote tensors",
            field="num_tensors",
            local=local_count,
            remote=remote_count,
            peer=peer,
            hint="give layer ranges of one length",
        )
    return local_tensor, remote_tensor, local_count


def _check_per_layer(per_layer: int) -> int:
    return as_integer(per_layer, "tensor_num_per_layer", low=1, high=2**32 - 1)


def layer_range(layers: range | None, name: str, num_layers: int, side: str) -> range:
    """Check a range of layers against how many there are; None stands for all."""
    if layers is None:
        return range(num_layers)
    if not isinstance(layers, range):
        raise ArgumentTypeError(f"{name} must be a range, got {type(layers).__name__}")
    said = f"{name}=range({shown(layers.start)}, {shown(layers.stop)}, {shown(layers.step)})"
    if layers.step != 1 or layers.start < 0:
        raise ArgumentError(f"{said} must start at 0 or above and have step 1", hint="give range(start, stop)")
    if layers.start >= layers.stop:
        return range(0)
    if layers.stop > num_layers:
        raise ArgumentError(f"{said} exceeds the {num_layers} layers of the {side} cache", hint="give at most that")
    return layers


def _tensor_range(layers: range | None, name: str, per_layer: int, geometry: Geometry, side: str) -> tuple[int, int]:
    """Return the first tensor and the number of tensors of a layer range."""
    count = _check_per_layer(per_layer)
    if layers is None:
        return 0, geometry.num_tensors
    if geometry.num_tensors % count:
        raise ArgumentError(
            f"the {side} cache has {geometry.num_tensors} tensors, not a multiple of tensor_num_per_layer={count}",
            hint="give the number of tensors that make a layer",
        )
    checked = layer_range(layers, name, geometry.num_tensors // count, side)
    return checked.start * count, len(checked) * count
