"""Tensors, buffers and raw addresses: what `collect` finds, holds and refuses."""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import mmap
import subprocess
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodatadist._buffers import BufferView, check_mapped, collect, view_of
from aiodatadist.errors import (
    ArgumentError,
    ArgumentTypeError,
    CacheMismatch,
    DataDistError,
    RegistrationError,
)
from aiodatadist.types import DTYPE_SIZES, CacheDesc, Geometry, Placement

# Here rather than in a test, so that the suite's collector does not walk torch after each test.
with contextlib.suppress(ImportError):
    import torch  # noqa: F401

NUMPY_DTYPES = [name for name in DTYPE_SIZES if not name.startswith(("bfloat", "float8"))]


def _address(x: np.ndarray[Any, Any]) -> int:
    return int(x.__array_interface__["data"][0])


# --- numpy ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_numpy(dtype: str) -> None:
    tensors = [np.zeros((4, 3, 2), dtype) for _ in range(3)]
    views, geometry = collect(tensors)
    itemsize = DTYPE_SIZES[dtype]
    assert geometry == Geometry.of(dtype, (4, 3, 2), 3)
    for view, tensor in zip(views, tensors, strict=True):
        assert view.address == _address(tensor)
        assert view.owner is tensor
        assert view == BufferView(
            address=_address(tensor),
            nbytes=tensor.nbytes,
            shape=(4, 3, 2),
            strides=(6 * itemsize, 2 * itemsize, itemsize),
            dtype=dtype,
            itemsize=itemsize,
            readonly=False,
            placement=Placement.HOST,
            owner=None,
        )
        assert (view.num_blocks, view.stride, view.block_bytes) == (4, 6 * itemsize, 6 * itemsize)


def test_views_of_an_interleaved_array() -> None:
    kv = np.zeros((5, 2, 3), np.float32)
    views, geometry = collect([kv[:, 0], kv[:, 1]])
    assert geometry.stride == 24
    assert geometry.block_bytes == 12
    assert not geometry.is_contiguous
    assert views[1].address - views[0].address == 12
    assert views[0].nbytes == 4 * 24 + 12


def test_every_other_block() -> None:
    views, geometry = collect([np.zeros((6, 4), np.int8)[::2]])
    assert geometry.shape == (3, 4)
    assert geometry.stride == views[0].stride == 8


def test_one_block_has_no_stride() -> None:
    # The stride of a dimension of size 1 means nothing, and numpy keeps whatever it was.
    whole = np.zeros((8, 4), np.float32)
    views, geometry = collect([whole[::4][:1], np.zeros((1, 4), np.float32)])
    assert geometry.stride == 16
    assert views[0].nbytes == 16
    odd = np.lib.stride_tricks.as_strided(whole, (8, 1, 4), (16, 999, 4))
    assert collect([odd])[1].shape == (8, 1, 4)


def test_one_dimension() -> None:
    assert collect([np.zeros(7, np.float16)])[1] == Geometry.of("float16", (7,), 1)


@pytest.mark.parametrize(
    ("tensor", "match"),
    [
        (np.zeros((4, 3, 2), np.int8).transpose(0, 2, 1), "dimension 1 needs"),
        (np.asfortranarray(np.zeros((4, 3), np.int8)), "dimension 1 needs"),
        (np.zeros((4, 6), np.int8)[:, ::2], r"strides \(6, 2\)"),
        (np.zeros((4, 3, 2), np.int8)[:, :, :1], "dimension 1 needs"),
        (np.zeros((4, 3), np.int8)[::-1], "dimension 0 needs"),
        (np.zeros((4, 3), np.int8)[:, ::-1], "dimension 1 needs"),
        (np.broadcast_to(np.zeros(3, np.int8), (4, 3)), "dimension 0 needs"),
        (np.lib.stride_tricks.sliding_window_view(np.zeros(9, np.int8), 4), "dimension 0 needs"),
    ],
)
def test_layouts_that_cannot_be_used(tensor: Any, match: str) -> None:
    with pytest.raises(ArgumentError, match=match) as caught:
        collect([tensor])
    assert "strides" in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(
    "tensor",
    [
        np.zeros((0, 4)),
        np.zeros((4, 0)),
        np.zeros(()),
        np.zeros((1,) * 32),
        np.zeros(4, "c8"),
        np.zeros(4, "O"),
        np.zeros(4, "M8[s]"),
        np.zeros(4, "U3"),
        np.zeros(4, "S4"),
        np.zeros(4, [("a", "i4")]),
        np.zeros(4, ">f4" if sys.byteorder == "little" else "<f4"),
        np.zeros(4, "V2"),
        np.zeros(4, "V0"),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tensor.ndim}",
)
def test_arrays_that_cannot_be_used(tensor: Any) -> None:
    with pytest.raises(ArgumentError, match=r"tensors\[0\]") as caught:
        collect([tensor])
    assert caught.value.hint


def test_readonly_is_told() -> None:
    tensor = np.zeros((4, 3))
    tensor.flags.writeable = False
    assert view_of(tensor).readonly
    assert view_of(np.frombuffer(b"12345678", np.int8)).readonly
    assert not view_of(np.frombuffer(bytearray(8), np.int8)).readonly


def test_the_owner_keeps_the_memory() -> None:
    tensor = np.arange(12.0).reshape(4, 3)
    gone = weakref.ref(tensor)
    view = view_of(tensor)
    del tensor
    gc.collect()
    assert gone() is not None
    del view
    gc.collect()
    assert gone() is None


def test_a_registered_array_cannot_be_resized() -> None:
    tensor = np.zeros(12)
    view = view_of(tensor)
    with pytest.raises(ValueError, match="resize"):
        tensor.resize(100000)
    assert view.address == _address(tensor)


# --- dtype by description -------------------------------------------------------------------------


@pytest.mark.parametrize("carrier", ["uint16", "int16", "V2"])
def test_bits_of_bfloat16(carrier: str) -> None:
    tensors = [np.zeros((4, 3), carrier) for _ in range(2)]
    views, geometry = collect(tensors, CacheDesc(2, (4, 3), "bf16"))
    assert geometry == Geometry.of("bfloat16", (4, 3), 2)
    assert {view.dtype for view in views} == {"bfloat16"}


@pytest.mark.parametrize(
    ("found", "wanted"),
    [("float16", "bfloat16"), ("uint32", "bfloat16"), ("bool", "int8"), ("V4", "float16")],
)
def test_other_dtypes_carry_no_bits(found: str, wanted: str) -> None:
    with pytest.raises(CacheMismatch, match="dtype") as caught:
        collect([np.zeros((4, 3), found)], CacheDesc(1, (4, 3), wanted))
    assert caught.value.field == "dtype"
    assert caught.value.local == wanted


def test_ml_dtypes_by_name() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        tensor = np.zeros((4, 3), getattr(ml_dtypes, name))
        assert collect([tensor])[1].dtype == name
        assert collect([tensor], CacheDesc(1, (4, 3), name))[1].dtype == name
    with pytest.raises(ArgumentError, match="not supported"):
        collect([np.zeros((4, 3), ml_dtypes.float8_e4m3b11fnuz)])


@pytest.mark.parametrize(
    ("desc", "field"),
    [
        (CacheDesc(3, (4, 3), "float32"), "num_tensors"),
        (CacheDesc(2, (4, 4), "float32"), "shape"),
        (CacheDesc(2, (12,), "float32"), "shape"),
        (CacheDesc(2, (4, 3), "int32"), "dtype"),
        (CacheDesc(2, (4, 3), "float32", stride=16), "stride"),
        (CacheDesc(2, (4, 3), "float32", placement=Placement.DEVICE), "placement"),
    ],
)
def test_a_description_must_agree(desc: CacheDesc, field: str) -> None:
    with pytest.raises(CacheMismatch, match=field) as caught:
        collect([np.zeros((4, 3), np.float32), np.zeros((4, 3), np.float32)], desc)
    assert caught.value.field == field
    assert caught.value.hint


def test_a_description_that_agrees() -> None:
    kv = np.zeros((4, 2, 3), np.float32)
    assert collect([kv[:, 0], kv[:, 1]], CacheDesc(2, (4, 3), "fp32", stride=24))[1].stride == 24
    assert collect([kv[:, 0], kv[:, 1]], CacheDesc(2, (4, 3), "fp32"))[1].stride == 24
    with pytest.raises(ArgumentTypeError):
        collect([kv], "float32")  # type: ignore[arg-type]


# --- whole caches ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (np.zeros((4, 3), np.float64), "dtype"),
        (np.zeros((5, 3), np.float32), "shape"),
        (np.zeros((4, 6), np.float32), "shape"),
        (np.zeros((4, 2, 3), np.float32)[:, 0], "strides"),
    ],
)
def test_tensors_of_a_cache_agree(other: Any, field: str) -> None:
    with pytest.raises(CacheMismatch, match=rf"tensors\[2\] has {field}") as caught:
        collect([np.zeros((4, 3), np.float32), np.zeros((4, 3), np.float32), other])
    assert caught.value.field == field


@pytest.mark.parametrize(
    "tensors",
    [None, 5, "ab", b"ab", bytearray(4), np.zeros((2, 4, 3)), {"a": np.zeros(4)}, iter(()), memoryview(b"a")],
)
def test_no_list_of_tensors(tensors: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="list of tensors") as caught:
        collect(tensors)
    assert caught.value.hint


def test_an_empty_list() -> None:
    with pytest.raises(ArgumentError, match="0 entries"):
        collect([])


def test_overlapping_tensors() -> None:
    whole = np.zeros((8, 4), np.float32)
    kv = np.zeros((4, 2, 3), np.float32)
    collect([whole[:4], whole[4:]])
    collect([whole[::2], whole[1::2]])
    for one, other in (
        (whole, whole),
        (whole[:4], whole[3:7]),
        (whole[4:], whole[1:5]),
        (whole[::2], whole[::2]),
        (whole[:6:2], whole[2:8:2]),
        (kv[:, 0], kv[:, 0]),
    ):
        with pytest.raises(ArgumentError, match=r"tensors\[0\].*tensors\[1\].*overlap"):
            collect([one, other])
    with pytest.raises(ArgumentError, match=r"tensors\[0\].*tensors\[3\].*overlap"):
        collect([whole[2:4], whole[4:6], whole[6:], whole[3:5]])


@given(
    num_blocks=st.integers(1, 6),
    block=st.integers(1, 5),
    gap=st.integers(0, 8),
    starts=st.lists(st.integers(0, 60), min_size=2, max_size=4),
)
def test_overlap_is_found_exactly(num_blocks: int, block: int, gap: int, starts: list[int]) -> None:
    stride = block + gap
    memory = np.zeros(200, np.uint8)
    tensors = [np.lib.stride_tricks.as_strided(memory[start:], (num_blocks, block), (stride, 1)) for start in starts]
    touched = np.zeros(200, int)
    for start in starts:
        for i in range(num_blocks):
            touched[start + i * stride : start + i * stride + block] += 1
    if touched.max() > 1:
        with pytest.raises(ArgumentError, match="overlap"):
            collect(tensors)
    else:
        assert len(collect(tensors)[0]) == len(starts)


@given(st.data())
def test_geometry_says_where_each_block_lies(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    dtype = data.draw(st.sampled_from(NUMPY_DTYPES))
    pad = data.draw(st.integers(1, 3))
    step = data.draw(st.integers(1, 3))
    memory = np.zeros((shape[0] * step, pad, *shape[1:]), dtype)
    tensors = [memory[::step, i] for i in range(pad)]
    views, geometry = collect(tensors)
    for view, tensor in zip(views, tensors, strict=True):
        for i in range(shape[0]):
            block = tensor[i]
            assert view.address + i * geometry.stride == _address(np.atleast_1d(block)) if block.ndim else True
        assert view.address == _address(tensor)
        assert geometry.block_bytes == tensor[0].nbytes
        assert view.nbytes == geometry.tensor_bytes


# --- other protocols ------------------------------------------------------------------------------


class Interface:
    """Has the array interface and an `__array__` that must not be called."""

    def __init__(self, tensor: Any, **changes: Any) -> None:
        self.kept = tensor
        self.__array_interface__ = {**tensor.__array_interface__, **changes}

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("a copy was asked for")


def test_array_interface() -> None:
    tensor = np.zeros((4, 2, 3), np.float16)[:, 1]
    x = Interface(tensor)
    view = view_of(x)
    assert (view.address, view.stride, view.dtype) == (_address(tensor), 12, "float16")
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is not None
    del view
    gc.collect()
    assert gone() is None


def test_array_interface_read_only() -> None:
    tensor = np.zeros((4, 3), np.float16)
    assert view_of(Interface(tensor, data=(_address(tensor), True))).readonly


@pytest.mark.parametrize("changes", [{"shape": (-1,)}, {"typestr": "nonsense"}, {"data": "x"}, {"strides": (1,)}])
def test_broken_array_interface(changes: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="array interface"):
        view_of(Interface(np.zeros((4, 3), np.float16), **changes))


def test_buffer_protocol() -> None:
    numbers = array.array("f", range(12))
    view = view_of(numbers)
    assert (view.address, view.shape, view.dtype) == (numbers.buffer_info()[0], (12,), "float32")
    shaped = view_of(memoryview(numbers).cast("B").cast("f", (4, 3)))
    assert (shaped.address, shaped.shape) == (numbers.buffer_info()[0], (4, 3))
    table = ((ctypes.c_int32 * 3) * 4)()
    view = view_of(table)
    assert (view.address, view.shape, view.dtype) == (ctypes.addressof(table), (4, 3), "int32")


def test_bytes_with_a_description() -> None:
    desc = CacheDesc(1, (4, 3), "bfloat16")
    for x in (bytearray(24), np.zeros(24, np.uint8), np.zeros(24, np.int8), ctypes.create_string_buffer(24)):
        view = view_of(x, desc=desc)
        assert (view.shape, view.dtype, view.stride, view.readonly) == ((4, 3), "bfloat16", 6, False)
    assert view_of(bytes(24), desc=desc).readonly
    wide = view_of(bytearray(3 * 8 + 6), desc=CacheDesc(1, (4, 3), "bfloat16", stride=8))
    assert (wide.stride, wide.nbytes) == (8, 30)
    for size in (23, 25):
        with pytest.raises(CacheMismatch, match="takes 24") as caught:
            view_of(bytearray(size), desc=desc)
        assert caught.value.field == "nbytes"
    with pytest.raises(CacheMismatch, match="dtype"):
        view_of(np.zeros(48, np.uint8)[::2], desc=desc)


def test_exported_buffers_stay_exported() -> None:
    memory = bytearray(64)
    views, _ = collect([memory])
    with pytest.raises(BufferError):
        memory.extend(b"x")
    pages = mmap.mmap(-1, 8192)
    page_views, _ = collect([pages], CacheDesc(1, (2, 1024), "float32"))
    with pytest.raises(BufferError):
        pages.close()
    del views, page_views
    gc.collect()
    memory.extend(b"x")
    pages.close()


def test_a_released_memoryview() -> None:
    view = memoryview(bytearray(4))
    view.release()
    with pytest.raises(DataDistError):
        view_of(view)


class DLPack:
    """A DLPack exporter without any other protocol."""

    def __init__(self, tensor: Any, device: int = 1) -> None:
        self.tensor = tensor
        self.device = device

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.device, 0)

    def __dlpack__(self, **options: Any) -> Any:
        return self.tensor.__dlpack__(**options)


def test_dlpack() -> None:
    tensor = np.zeros((4, 2, 3), np.float32)
    view = view_of(DLPack(tensor[:, 1]))
    assert (view.address, view.stride) == (_address(tensor) + 12, 24)
    old = np.lib.NumpyVersion(np.__version__) < "2.2.5"
    assert view.readonly is old
    gone = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert gone() is not None
    del view
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(("device", "name"), [(2, "cuda"), (10, "rocm"), (12, "12")])
def test_dlpack_on_a_device(device: int, name: str) -> None:
    with pytest.raises(ArgumentError, match=name) as caught:
        view_of(DLPack(np.zeros(4), device))
    assert caught.value.hint


def test_cuda_array_interface() -> None:
    class Cuda:
        __cuda_array_interface__: Any = None

    with pytest.raises(ArgumentError, match="cuda"):
        view_of(Cuda())


def test_objects_without_memory() -> None:
    class OnlyArray:
        def __array__(self, *_: Any, **__: Any) -> Any:
            raise AssertionError("a copy was asked for")

    class BrokenDLPack:
        def __dlpack__(self) -> None:
            raise AssertionError

        def __dlpack_device__(self) -> None:
            raise RuntimeError("no device")

    for x in (None, "text", 1.5, [1.0], object(), OnlyArray(), BrokenDLPack(), True):
        with pytest.raises(ArgumentTypeError) as caught:
            collect([x])
        assert "tensors[0]" in str(caught.value)
        assert caught.value.hint


def test_empty_buffers() -> None:
    for x in (b"", bytearray(), memoryview(b"")):
        with pytest.raises(ArgumentError, match="no bytes"):
            view_of(x)


# --- raw addresses --------------------------------------------------------------------------------


def test_addresses() -> None:
    memory = np.zeros((2, 4, 3), np.float32)
    base = _address(memory)
    views, geometry = collect([base, np.uint64(base + 48)], CacheDesc(2, (4, 3), "float32"))
    assert [view.address for view in views] == [base, base + 48]
    assert geometry == Geometry.of("float32", (4, 3), 2)
    assert all(view.owner is None and not view.readonly and type(view.address) is int for view in views)
    mixed, _ = collect([memory[0], base + 48], CacheDesc(2, (4, 3), "float32"))
    assert mixed[1].address == base + 48
    wide = view_of(4096, desc=CacheDesc(1, (4, 3), "float32", stride=100))
    assert (wide.stride, wide.nbytes) == (100, 312)


@pytest.mark.parametrize(
    "address",
    [0, -1, 2**64, 2**64 - 47, 2**63 * 3, 10**30],
    ids=["0", "-1", "2^64", "end", "3*2^63", "10^30"],
)
def test_bad_addresses(address: int) -> None:
    with pytest.raises(ArgumentError, match=r"tensors\[0\]") as caught:
        collect([address], CacheDesc(1, (4, 3), "float32"))
    assert caught.value.hint


def test_the_last_address() -> None:
    assert view_of(2**64 - 48, desc=CacheDesc(1, (4, 3), "float32")).nbytes == 48


def test_addresses_need_a_description() -> None:
    with pytest.raises(ArgumentError, match="description"):
        collect([4096])


def test_addresses_that_overlap() -> None:
    with pytest.raises(ArgumentError, match="overlap"):
        collect([4096, 4096 + 47], CacheDesc(2, (4, 3), "float32"))


# --- torch ----------------------------------------------------------------------------------------


def test_torch_is_never_imported() -> None:
    code = """
import sys
import numpy as np
from aiodatadist._buffers import collect
collect([np.zeros((4, 3))])
assert "torch" not in sys.modules and "ml_dtypes" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


class Npu:
    """What a torch tensor says of itself, of an NPU's memory at an address that nothing may touch."""

    __module__ = "torch"
    layout = "torch.strided"

    def __init__(self, address: int = 1 << 50, shape: tuple[int, ...] = (4, 3), number: int | None = 0) -> None:
        self.address, self.shape = address, shape
        self.device = SimpleNamespace(type="npu", index=number)
        self.dtype = "torch.float16"

    def is_neg(self) -> bool:
        return False

    is_conj = is_neg

    def element_size(self) -> int:
        return 2

    def stride(self) -> tuple[int, ...]:
        return (self.shape[1], 1)

    def data_ptr(self) -> int:
        return self.address

    def detach(self) -> Npu:
        return self

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"{name} of memory of an NPU")


Npu.__name__ = "Tensor"
ON_NPU = CacheDesc(1, (4, 3), "float16", placement=Placement.DEVICE)


def test_tensors_on_an_npu() -> None:
    views, geometry = collect([Npu(), Npu(2 << 50)])
    assert geometry == Geometry.of("float16", (4, 3), 2)
    assert [(view.address, view.placement, view.device) for view in views] == [
        (1 << 50, Placement.DEVICE, 0),
        (2 << 50, Placement.DEVICE, 0),
    ]
    # No list of the kernel's has them, and nobody asks it.
    assert not check_mapped(views, writable=True)
    (view,), _ = collect([Npu(number=3)], ON_NPU)
    assert view.device == 3
    with pytest.raises(CacheMismatch, match=r"tensors\[0\] is NPU memory, and its CacheDesc says HOST") as caught:
        collect([Npu()], CacheDesc(1, (4, 3), "float16"))
    assert (caught.value.field, caught.value.hint) == ("placement", "give placement=Placement.DEVICE")
    with pytest.raises(CacheMismatch, match="dtype"):
        collect([Npu()], CacheDesc(1, (4, 3), "float32", placement=Placement.DEVICE))


def test_addresses_of_an_npu() -> None:
    (view,), _ = collect([1 << 50], ON_NPU)
    assert (view.placement, view.device, view.owner) == (Placement.DEVICE, None, None)
    assert not check_mapped([view], writable=True)
    (host,), _ = collect([1 << 50], CacheDesc(1, (4, 3), "float16"))
    with pytest.raises(RegistrationError, match="not mapped"):
        check_mapped([host], writable=True)
    with pytest.raises(CacheMismatch, match="is host memory, and its CacheDesc says DEVICE"):
        collect([np.zeros((4, 3), np.float16)], ON_NPU)


def test_one_cache_is_in_one_place() -> None:
    two = CacheDesc(2, (4, 3), "float16", placement=Placement.DEVICE)
    with pytest.raises(ArgumentError, match=r"tensors\[1\] is in host memory, and tensors\[0\] in memory of NPU 0"):
        collect([Npu(), np.zeros((4, 3), np.float16)])
    with pytest.raises(ArgumentError, match=r"tensors\[1\] is in memory of NPU 1, and tensors\[0\] in memory of NPU 0"):
        collect([Npu(), Npu(2 << 50, number=1)])
    # Nobody knows where an address is.
    assert len(collect([Npu(), 2 << 50], two)[0]) == 2
    with pytest.raises(ArgumentError, match="overlap"):
        collect([Npu(), Npu((1 << 50) + 2)])


@pytest.mark.torch
@pytest.mark.parametrize("dtype", sorted(DTYPE_SIZES))
def test_torch(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    tensors = [torch.zeros((4, 3, 2), dtype=getattr(torch, dtype)) for _ in range(2)]
    views, geometry = collect(tensors)
    assert geometry == Geometry.of(dtype, (4, 3, 2), 2)
    assert [view.address for view in views] == [tensor.data_ptr() for tensor in tensors]
    assert not views[0].readonly


@pytest.mark.torch
def test_torch_views() -> None:
    torch = pytest.importorskip("torch")
    kv = torch.zeros((5, 2, 3), dtype=torch.bfloat16)
    views, geometry = collect([kv[:, 0], kv[:, 1]])
    assert (geometry.stride, geometry.block_bytes) == (12, 6)
    assert views[1].address == kv.data_ptr() + 6
    for bad in (kv.transpose(1, 2), kv[:, :, :2], torch.zeros(3).expand(4, 3), torch.zeros((0, 3))):
        with pytest.raises(ArgumentError):
            collect([bad])
    assert collect([torch.zeros((8, 4))[::4][:1], torch.zeros((1, 4))])[1].stride == 16


@pytest.mark.torch
def test_torch_bits_of_bfloat16() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros((4, 3), dtype=torch.bfloat16)
    assert collect([tensor.view(torch.uint16)], CacheDesc(1, (4, 3), "bf16"))[1].dtype == "bfloat16"
    with pytest.raises(CacheMismatch):
        collect([tensor], CacheDesc(1, (4, 3), "float16"))


@pytest.mark.torch
def test_torch_parameters_share_their_memory() -> None:
    torch = pytest.importorskip("torch")
    parameter = torch.nn.Parameter(torch.zeros((4, 3)))
    view = view_of(parameter)
    assert view.address == parameter.data_ptr()
    assert not view.owner.requires_grad  # type: ignore[attr-defined]
    # Other memory assigned later does not take the registered one away.
    parameter.data = torch.ones((4, 3))
    gc.collect()
    assert view.owner.data_ptr() == view.address  # type: ignore[attr-defined]
    assert view_of(torch.zeros((4, 3), requires_grad=True) * 2).shape == (4, 3)


@pytest.mark.torch
def test_torch_owner_keeps_the_memory() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.full((1024, 1024), 7.0)
    view = view_of(tensor)
    del tensor
    gc.collect()
    assert float((ctypes.c_float * 1).from_address(view.address)[0]) == 7.0


@pytest.mark.torch
def test_torch_tensors_that_cannot_be_used() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(ArgumentError, match="meta"):
        collect([torch.zeros((4, 3), device="meta")])
    with pytest.raises(ArgumentError, match="sparse"):
        collect([torch.eye(3).to_sparse()])
    with pytest.raises(ArgumentError, match="not supported"):
        collect([torch.zeros(3, dtype=torch.complex64)])
    with pytest.raises(ArgumentError, match="negated"):
        collect([torch.zeros((4, 2), dtype=torch.complex64).conj().imag])
    with pytest.raises(ArgumentTypeError, match="list"):
        collect(torch.zeros((2, 4, 3)))


@pytest.mark.torch
def test_torch_tensors_without_memory() -> None:
    # In a process of its own: fake tensors import so much that the collector is slow ever after.
    code = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from aiodatadist._buffers import collect
from aiodatadist.errors import ArgumentError

with FakeTensorMode():
    fakes = {"cuda:1": torch.empty((4, 3), device="cuda:1"), "no memory of its own": torch.empty((4, 3))}
for words, fake in fakes.items():
    try:
        collect([fake])
    except ArgumentError as why:
        assert words in str(why), why
    else:
        raise AssertionError(words)
"""
    subprocess.run([sys.executable, "-W", "error:Accessing the data pointer", "-c", code], check=True)


@pytest.mark.torch
def test_torch_subclasses() -> None:
    torch = pytest.importorskip("torch")

    class Mine(torch.Tensor):  # type: ignore[misc, name-defined]
        pass

    tensor = torch.zeros((4, 3)).as_subclass(Mine)
    assert view_of(tensor).address == tensor.data_ptr()


@pytest.mark.torch
def test_torch_through_dlpack() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros((4, 3))
    assert view_of(DLPack(tensor)).address == tensor.data_ptr()
    with pytest.raises(ArgumentError, match="DLPack") as caught:
        view_of(DLPack(torch.zeros((4, 3), dtype=torch.bfloat16)))
    assert "uint16" in str(caught.value)
