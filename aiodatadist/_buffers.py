"""From numpy arrays, torch tensors, other buffers and raw addresses to pointers.

`collect` turns what a caller registers into one `BufferView` per tensor and the `Geometry` they share.
Nothing is copied: a view names the caller's memory, and its `owner` keeps that memory alive. torch is never
imported here; whoever holds a torch tensor has imported it already. An NPU's memory is named as well, and never
touched: its addresses mean nothing to the processor.

Dimension 0 of a tensor counts blocks and may have any stride of at least a block, so ``kv[:, 0]`` of an
array ``[blocks, 2, ...]`` is fine. Within a block the memory must be contiguous in C order.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from . import _core
from .errors import ArgumentError, ArgumentTypeError, CacheMismatch, RegistrationError
from .types import (
    DTYPE_SIZES,
    U32_MAX,
    U64_MAX,
    CacheDesc,
    Geometry,
    Placement,
    as_integer,
    as_shape,
    dtype_name,
)

__all__ = ["BufferView", "check_mapped", "collect", "view_of"]

_HINT_LAYOUT: Final = "only dimension 0 may have gaps; make the blocks C-contiguous before registering"
_HINT_KINDS: Final = (
    "give a numpy array, a torch tensor, an object with the array interface, the buffer protocol or DLPack, "
    "or an address together with a CacheDesc"
)
_HINT_BITS: Final = (
    "give its bits as integers of the same size, such as a uint16 view, with a CacheDesc that names the dtype"
)

# DLDeviceType of DLPack -> name. Those of host memory are readable by the processor.
_DLPACK_HOST: Final = {1: "cpu", 3: "pinned host memory", 11: "pinned host memory"}
_DLPACK_DEVICE: Final = {
    2: "cuda",
    4: "opencl",
    7: "vulkan",
    8: "metal",
    10: "rocm",
    13: "managed cuda",
    14: "oneapi",
}

_WHERE: Final = {Placement.HOST: "host", Placement.DEVICE: "NPU"}

# Dtypes that may carry the bits of another dtype of the same size.
_CARRIERS: Final = frozenset(name for name in DTYPE_SIZES if name.startswith(("int", "uint")))


@dataclass(frozen=True, slots=True)
class BufferView:
    """One tensor's memory.

    Attributes
    ----------
    address : int
        Of the first byte of block 0.
    nbytes : int
        From the first to the last byte of the tensor. Gaps between blocks are counted, though never touched.
    shape : tuple of int
        Dimension 0 counts blocks.
    strides : tuple of int
        In bytes. Those of dimensions of size 1 are what contiguous memory would have.
    dtype : str
        Canonical name, or that of the CacheDesc for memory that carries bits.
    itemsize : int
        Bytes of one element.
    readonly : bool
        The memory must not be written. False for raw addresses, about which nothing is known here.
    placement : Placement
        Where the memory lives.
    owner : object
        Keeps the memory alive, and a buffer exported, for as long as this view lives. None for raw addresses,
        whose memory the caller keeps.
    device : int or None
        Which NPU has it, as torch_npu counts them; None for host memory, and where nobody knows.
    """

    address: int
    nbytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int
    readonly: bool
    placement: Placement
    owner: object = field(repr=False, compare=False)
    device: int | None = None

    @property
    def num_blocks(self) -> int:
        """Entries of dimension 0."""
        return self.shape[0]

    @property
    def stride(self) -> int:
        """Bytes from one block to the next."""
        return self.strides[0]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return math.prod(self.shape[1:]) * self.itemsize


# What each kind of object says about itself. ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Memory:
    """What an object says about its memory, not checked yet. `dtype` None: bits without a meaning."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str | None
    itemsize: int
    readonly: bool
    owner: object
    placement: Placement = Placement.HOST
    device: int | None = None


class _ArrayInterface:
    """Shows numpy the array interface of an object and nothing else of it, lest ``__array__`` made a copy."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, interface: object, owner: object) -> None:
        self.__array_interface__ = interface
        self.owner = owner


def _has_base(x: object, name: str) -> bool:
    """Tell whether a class of torch of that name is among an object's, without importing torch."""
    return any(base.__name__ == name and base.__module__.partition(".")[0] == "torch" for base in type(x).__mro__)


def _is_torch_tensor(x: object) -> bool:
    return _has_base(x, "Tensor")


def _from_torch(tensor: Any, name: str) -> _Memory:
    device = tensor.device
    on_npu = device.type == "npu"
    if device.type != "cpu" and not on_npu:
        why = "which has no memory" if device.type == "meta" else "whose memory no transport reaches"
        raise ArgumentError(f"{name} is on device {device}, {why}", hint="register a cpu or npu tensor")
    if str(tensor.layout) != "torch.strided":
        raise ArgumentError(f"{name} has the layout {tensor.layout}", hint="register a dense tensor")
    if tensor.is_neg() or tensor.is_conj():
        raise ArgumentError(
            f"{name} is a lazily negated or conjugated view",
            hint="call resolve_neg() or resolve_conj() on it first",
        )
    itemsize = int(tensor.element_size())
    shape = tuple(int(n) for n in tensor.shape)
    if 0 in shape:
        raise _zero_size(name, shape)
    no_memory = f"{name} of type {type(tensor).__name__} has no memory of its own"
    if _has_base(tensor, "FakeTensor"):  # Asked for its address, it would warn.
        raise ArgumentError(no_memory, hint="register a plain tensor")
    try:
        # Detached, it stays the same memory even if the caller assigns other memory to tensor.data.
        held = tensor.detach()
        address = int(held.data_ptr())
    except RuntimeError as why:
        raise ArgumentError(f"{no_memory}: {why}", hint="register a plain tensor") from why
    if address == 0:
        raise ArgumentError(no_memory, hint="register a plain tensor")
    return _Memory(
        address=address,
        shape=shape,
        strides=tuple(int(n) * itemsize for n in tensor.stride()),
        dtype=_named(tensor.dtype, name),
        itemsize=itemsize,
        readonly=False,
        owner=held,
        placement=Placement.DEVICE if on_npu else Placement.HOST,
        device=None if not on_npu or device.index is None else int(device.index),
    )


def _from_numpy(array: np.ndarray[Any, Any], name: str) -> _Memory:
    dtype = array.dtype
    # Plain void and single bytes carry bits. (Those of ml_dtypes are of kind "V" too, but have names.)
    bits = (dtype.type is np.void and dtype.names is None) or dtype.str == "|S1"
    named = None if bits else _named(dtype, name)
    return _Memory(
        address=int(array.__array_interface__["data"][0]),
        shape=array.shape,
        strides=array.strides,
        dtype=named,
        itemsize=dtype.itemsize,
        readonly=not array.flags.writeable,
        owner=array,
    )


def _from_dlpack(x: Any, name: str) -> _Memory:
    try:
        device = int(x.__dlpack_device__()[0])
    except Exception as why:
        raise ArgumentTypeError(f"{name} has __dlpack__ and cannot tell its device: {why}", hint=_HINT_KINDS) from why
    if device not in _DLPACK_HOST:
        where = _DLPACK_DEVICE.get(device, f"of DLPack type {device}")
        raise ArgumentError(
            f"{name} is on a device ({where}) whose memory no transport reaches", hint="copy it to the host"
        )
    try:
        array = np.from_dlpack(x)
    except Exception as why:
        raise ArgumentError(f"{name} cannot be read through DLPack: {why}", hint=_HINT_BITS) from why
    return _from_numpy(array, name)


def _from_object(x: Any, name: str) -> _Memory:
    """Ask an object that is neither numpy's nor torch's for its memory, by the protocol that it has."""
    if hasattr(x, "__cuda_array_interface__"):
        raise ArgumentError(
            f"{name} is on a device (cuda) whose memory no transport reaches", hint="copy it to the host"
        )
    if (interface := getattr(x, "__array_interface__", None)) is not None:
        try:
            array = np.asarray(_ArrayInterface(interface, x))
        except Exception as why:
            raise ArgumentError(f"{name} has an array interface that cannot be read: {why}", hint=_HINT_KINDS) from why
        return _from_numpy(array, name)
    refused: Exception | None = None
    try:
        exported = memoryview(x)
    except (TypeError, BufferError, ValueError) as why:
        refused = why
    else:
        # The array holds the memoryview, and so the export: no bytearray is resized, no mmap closed.
        return _from_numpy(_array_of_memoryview(exported, name), name)
    if hasattr(x, "__dlpack__"):
        return _from_dlpack(x, name)
    raise ArgumentTypeError(f"{name} of type {type(x).__name__} shows no memory: {refused}", hint=_HINT_KINDS) from None


def _array_of_memoryview(exported: memoryview, name: str) -> np.ndarray[Any, Any]:
    if exported.nbytes == 0:
        raise _zero_size(name, exported.shape)
    try:
        return np.asarray(exported)
    except Exception as why:
        raise ArgumentError(
            f"{name} has the buffer format {exported.format!r}, which cannot be read: {why}",
            hint="cast it to bytes and give a CacheDesc",
        ) from why


def _is_address(x: object) -> bool:
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def _memory_of(x: object, name: str) -> _Memory:
    if _is_torch_tensor(x):
        return _from_torch(x, name)
    if isinstance(x, np.ndarray):
        return _from_numpy(x, name)
    return _from_object(x, name)


def _named(dtype: object, name: str) -> str:
    try:
        return dtype_name(dtype)
    except ArgumentError as why:
        raise ArgumentError(f"{name}: {why.message}", hint=why.hint) from None


def _zero_size(name: str, shape: tuple[int, ...] | None) -> ArgumentError:
    return ArgumentError(f"{name} of shape {shape} holds no bytes", hint="register tensors of at least one element")


# From what objects say to views. ----------------------------------------------------------------------------


def _contiguous(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = [itemsize] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    return tuple(strides)


def _view_of_address(x: object, name: str, desc: CacheDesc | None) -> BufferView:
    if desc is None:
        raise ArgumentError(f"{name} is a raw address without a description", hint="give desc=CacheDesc(...)")
    address = as_integer(x, name, low=1)  # type: ignore[arg-type]  # _is_address() said so
    if address + desc.tensor_bytes > U64_MAX + 1:
        raise ArgumentError(
            f"{name}={address:#x} and {desc.tensor_bytes} bytes from there exceed the address space (2**64)",
            hint="check address, shape and stride",
        )
    inner = _contiguous(desc.shape, desc.itemsize)
    return BufferView(
        address=address,
        nbytes=desc.tensor_bytes,
        shape=desc.shape,
        strides=(desc.stride or desc.block_bytes, *inner[1:]),
        dtype=desc.dtype,
        itemsize=desc.itemsize,
        readonly=False,
        placement=desc.placement,
        device=None,
        owner=None,
    )


def _described(memory: _Memory, name: str, desc: CacheDesc) -> tuple[tuple[int, ...], tuple[int, ...], str, int]:
    """Reconcile memory with its description; return shape, strides, dtype and itemsize."""
    if desc.placement is not memory.placement:
        raise CacheMismatch(
            f"{name} is {_WHERE[memory.placement]} memory, and its CacheDesc says {desc.placement.name}",
            field="placement",
            local=desc.placement,
            remote=memory.placement,
            hint=f"give placement=Placement.{memory.placement.name}",
        )
    if memory.dtype is None or memory.dtype in _CARRIERS:
        flat_bytes = memory.itemsize == 1 and len(memory.shape) == 1 and memory.strides[0] == 1
        if flat_bytes and memory.shape != desc.shape:
            if memory.shape[0] != desc.tensor_bytes:
                raise CacheMismatch(
                    f"{name} has {memory.shape[0]} bytes, and "
                    f"shape {desc.shape} of {desc.dtype} takes {desc.tensor_bytes}",
                    field="nbytes",
                    local=desc.tensor_bytes,
                    remote=memory.shape[0],
                    hint="give exactly the bytes that the CacheDesc describes",
                )
            inner = _contiguous(desc.shape, desc.itemsize)
            return desc.shape, (desc.stride or desc.block_bytes, *inner[1:]), desc.dtype, desc.itemsize
        carries = memory.itemsize == desc.itemsize
    else:
        carries = memory.dtype == desc.dtype
    if not carries:
        found = memory.dtype or f"{memory.itemsize} raw bytes"
        raise CacheMismatch(
            f"{name} has dtype {found}, and its CacheDesc says {desc.dtype}",
            field="dtype",
            local=desc.dtype,
            remote=found,
            hint="name the tensor's own dtype; only integers of the same size may carry another one's bits",
        )
    if memory.shape != desc.shape:
        raise CacheMismatch(
            f"{name} has shape {memory.shape}, and its CacheDesc says {desc.shape}",
            field="shape",
            local=desc.shape,
            remote=memory.shape,
            hint="describe the tensors as they are",
        )
    return memory.shape, memory.strides, desc.dtype, desc.itemsize


def view_of(x: object, name: str = "tensor", *, desc: CacheDesc | None = None) -> BufferView:
    """Find the memory of one tensor.

    Parameters
    ----------
    x : object
        A numpy array, a torch CPU or NPU tensor (``requires_grad`` is fine: its memory is used), an object with the
        array interface, the buffer protocol or DLPack, or an address in this process, or of an NPU where `desc` says
        so. (numpy before 2.2.5 takes DLPack memory for read-only.)
    name : str
        What to call it in errors.
    desc : CacheDesc, optional
        Required for addresses. Gives shape and dtype to flat bytes, and the dtype to integers and void
        elements that carry its bits (bfloat16 in a uint16 array). Otherwise it must agree with `x`.

    Returns
    -------
    BufferView
        Holds `x`, or what keeps its memory alive.

    Raises
    ------
    ArgumentTypeError
        `x` shows no memory.
    ArgumentError
        `x` is empty, on a device that is no NPU, of an unknown dtype, or its layout cannot be used; or a bad address.
    CacheMismatch
        `x` and `desc` differ.
    """
    if _is_address(x):
        return _view_of_address(x, name, desc)
    memory = _memory_of(x, name)
    if 0 in memory.shape or memory.itemsize == 0:
        raise _zero_size(name, memory.shape)
    if desc is not None:
        shape, strides, dtype, itemsize = _described(memory, name, desc)
    elif memory.dtype is None:
        raise ArgumentError(f"{name} has elements of {memory.itemsize} bytes without a dtype", hint="give a CacheDesc")
    else:
        shape, strides, dtype, itemsize = memory.shape, memory.strides, memory.dtype, memory.itemsize
    shape = as_shape(shape, f"shape of {name}")
    expected = _contiguous(shape, itemsize)
    for i in range(1, len(shape)):
        if shape[i] > 1 and strides[i] != expected[i]:
            raise ArgumentError(
                f"{name} of shape {shape} has strides {strides} in bytes, and dimension {i} needs {expected[i]}",
                hint=_HINT_LAYOUT,
            )
    stride = strides[0] if shape[0] > 1 else expected[0]
    if stride < expected[0]:
        raise ArgumentError(
            f"{name} of shape {shape} has strides {strides} in bytes, "
            f"and dimension 0 needs {expected[0]} or more, or blocks would overlap",
            hint=_HINT_LAYOUT,
        )
    if desc is not None and desc.stride is not None and shape[0] > 1 and stride != desc.stride:
        raise CacheMismatch(
            f"{name} has a stride of {stride} bytes, and its CacheDesc says {desc.stride}",
            field="stride",
            local=desc.stride,
            remote=stride,
            hint="leave stride out to take the tensor's own",
        )
    return BufferView(
        address=memory.address,
        nbytes=(shape[0] - 1) * stride + expected[0],
        shape=shape,
        strides=(stride, *expected[1:]),
        dtype=dtype,
        itemsize=itemsize,
        readonly=memory.readonly,
        placement=memory.placement,
        device=memory.device,
        owner=memory.owner,
    )


# Whole caches. ----------------------------------------------------------------------------------------------


def _require_list(tensors: object) -> Sequence[object]:
    one = _is_torch_tensor(tensors) or isinstance(tensors, (np.ndarray, bytes, bytearray, memoryview, str))
    if one or not isinstance(tensors, Sequence):
        raise ArgumentTypeError(
            f"tensors must be a list of tensors, got {type(tensors).__name__}",
            hint="give [x] for a single tensor, list(x) for one whose dimension 0 counts tensors",
        )
    if not 1 <= len(tensors) <= U32_MAX:
        raise ArgumentError(
            f"tensors has {len(tensors)} entries, outside 1..{U32_MAX}", hint="give at least one tensor"
        )
    return tensors


def _require_disjoint(views: Sequence[BufferView]) -> None:
    """Refuse tensors that share bytes. They have one shape and one stride; interleaved ones are fine."""
    order = sorted(range(len(views)), key=lambda i: views[i].address)
    for position, i in enumerate(order):
        end = views[i].address + views[i].nbytes
        for j in order[position + 1 :]:
            if views[j].address >= end:
                break
            if _overlap(views[i], views[j]):
                low, high = sorted((i, j))
                raise ArgumentError(
                    f"tensors[{low}] at {views[low].address:#x} and tensors[{high}] at "
                    f"{views[high].address:#x} overlap ({views[low].nbytes} bytes each)",
                    hint="give every tensor memory of its own",
                )


def _overlap(earlier: BufferView, later: BufferView) -> bool:
    """Say whether two tensors share bytes, of which one begins inside the other; where in doubt, that they do."""
    stride, last = earlier.stride, earlier.num_blocks - 1
    if stride != later.stride or last == 0:
        return True
    # Block b of the later tensor begins `gap` bytes after block b + `steps` of the earlier one does.
    steps, gap = divmod(later.address - earlier.address, stride)
    return (steps <= last and gap < earlier.block_bytes) or (steps + 1 <= last and stride - gap < later.block_bytes)


def share_memory(some: Sequence[BufferView], others: Sequence[BufferView]) -> bool:
    """Say whether tensors of two caches share bytes; interleaved ones of one stride do not."""
    both = sorted([(view.address, 0, view) for view in some] + [(view.address, 1, view) for view in others], key=_place)
    for position, (start, side, view) in enumerate(both):
        end = start + view.nbytes
        for address, other_side, other in both[position + 1 :]:
            if address >= end:
                break
            if side != other_side and _overlap(view, other):
                return True
    return False


def _place(entry: tuple[int, int, BufferView]) -> int:
    return entry[0]


def collect(tensors: object, desc: CacheDesc | None = None) -> tuple[list[BufferView], Geometry]:
    """Find the memory of all tensors of one cache.

    Parameters
    ----------
    tensors : sequence
        One entry per tensor, each anything that `view_of` takes; kinds may be mixed.
    desc : CacheDesc, optional
        As in `view_of`; its `num_tensors` must be the number of entries.

    Returns
    -------
    views : list of BufferView
        In the order given. Hold them for as long as the cache is registered.
    geometry : Geometry
        What they have in common.

    Raises
    ------
    ArgumentTypeError, ArgumentError, TransportUnavailable
        As `view_of`; also no list, an empty one, or tensors that overlap.
    CacheMismatch
        A tensor differs from the first or from `desc`; names its index and the field (``num_tensors``,
        ``shape``, ``dtype``, ``strides``).
    """
    items = _require_list(tensors)
    if desc is not None and not isinstance(desc, CacheDesc):
        raise ArgumentTypeError(
            f"desc must be a CacheDesc, got {type(desc).__name__}", hint="give CacheDesc(...) or None"
        )
    if desc is not None and desc.num_tensors != len(items):
        raise CacheMismatch(
            f"{len(items)} tensors are given, and the CacheDesc says num_tensors={desc.num_tensors}",
            field="num_tensors",
            local=desc.num_tensors,
            remote=len(items),
            hint="give as many tensors as the CacheDesc says",
        )
    views = [view_of(x, f"tensors[{i}]", desc=desc) for i, x in enumerate(items)]
    first = views[0]
    for i, view in enumerate(views):
        # Nobody knows of a raw address which NPU has it.
        numbers = {view.device, first.device} - {None}
        if view.placement is not first.placement or len(numbers) > 1:
            raise ArgumentError(
                f"tensors[{i}] is in {_whose(view)}, and tensors[0] in {_whose(first)}",
                hint="register one cache for each kind of memory and each NPU",
            )
        for name in ("dtype", "shape", "strides"):
            expected, found = getattr(first, name), getattr(view, name)
            if found != expected:
                raise CacheMismatch(
                    f"tensors[{i}] has {name} {found}, and tensors[0] has {expected}",
                    field=name,
                    local=expected,
                    remote=found,
                    hint="all tensors of a cache need the same shape, dtype and strides",
                )
    geometry = Geometry.of(first.dtype, first.shape, len(views), stride=first.stride)
    _require_disjoint(views)
    return views, geometry


def _whose(view: BufferView) -> str:
    if view.placement is Placement.HOST:
        return "host memory"
    return "memory of an NPU" if view.device is None else f"memory of NPU {view.device}"


def check_mapped(views: Sequence[BufferView], *, writable: bool) -> bool:
    """Refuse raw addresses that are not mapped, instead of dying of them in a copy thread; True if one is read-only.

    The kernel's list of mappings covers every page and its permissions; reading the first and the last byte by
    process_vm on oneself finds file mappings cut short. Neither touches the memory in a way that could crash. Addresses
    of an NPU mean nothing to the kernel: HIXL checks them.
    """
    host = Placement.HOST
    raw = [(index, view) for index, view in enumerate(views) if view.owner is None and view.placement is host]
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
