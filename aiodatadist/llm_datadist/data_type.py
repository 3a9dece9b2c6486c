"""`DataType`: the element types of caches, with the numbers of the original."""

from __future__ import annotations

from enum import Enum
from typing import Any, Final

__all__ = ["DataType", "dtype_to_np_dtype", "np_dtype_to_dtype", "valid_np_dtypes"]  # noqa: F822  # see __getattr__


class DataType(Enum):
    """Type of the elements of a cache."""

    DT_FLOAT = 0
    DT_FLOAT16 = 1
    DT_INT8 = 2
    DT_INT32 = 3
    DT_UINT8 = 4
    DT_INT16 = 6
    DT_UINT16 = 7
    DT_UINT32 = 8
    DT_INT64 = 9
    DT_UINT64 = 10
    DT_DOUBLE = 11
    DT_BOOL = 12
    DT_STRING = 13
    DT_BF16 = 27


# The names that aiodatadist has for them. A string is two numbers of 64 bits.
NATIVE_NAMES: Final = {
    DataType.DT_FLOAT: "float32",
    DataType.DT_FLOAT16: "float16",
    DataType.DT_INT8: "int8",
    DataType.DT_INT32: "int32",
    DataType.DT_UINT8: "uint8",
    DataType.DT_INT16: "int16",
    DataType.DT_UINT16: "uint16",
    DataType.DT_UINT32: "uint32",
    DataType.DT_INT64: "int64",
    DataType.DT_UINT64: "uint64",
    DataType.DT_DOUBLE: "float64",
    DataType.DT_BOOL: "bool",
    DataType.DT_STRING: "uint64",
    DataType.DT_BF16: "bfloat16",
}

ITEM_BYTES: Final = {
    DataType.DT_FLOAT: 4,
    DataType.DT_FLOAT16: 2,
    DataType.DT_INT8: 1,
    DataType.DT_INT32: 4,
    DataType.DT_UINT8: 1,
    DataType.DT_INT16: 2,
    DataType.DT_UINT16: 2,
    DataType.DT_UINT32: 4,
    DataType.DT_INT64: 8,
    DataType.DT_UINT64: 8,
    DataType.DT_DOUBLE: 8,
    DataType.DT_BOOL: 1,
    DataType.DT_STRING: 16,
    DataType.DT_BF16: 2,
}
"""Bytes of one element."""


def calc_tensor_size(shape: Any, data_type: DataType) -> int:
    """Return the bytes of a tensor; -1 where a dimension is negative or they exceed 64 bits."""
    size = ITEM_BYTES[data_type]
    for dim in shape:
        if dim < 0:
            return -1
        size *= int(dim)
    return size if size < 2**63 else -1


def __getattr__(name: str) -> Any:
    # Made at their first use, because they alone need numpy.
    if name not in ("dtype_to_np_dtype", "np_dtype_to_dtype", "valid_np_dtypes"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import numpy as np

    to_numpy = {
        kind: np.dtype("float16" if kind is DataType.DT_BF16 else native).type
        for kind, native in NATIVE_NAMES.items()
        if kind is not DataType.DT_STRING
    }
    from_numpy = {numpy: kind for kind, numpy in to_numpy.items() if kind is not DataType.DT_BF16}
    globals().update(dtype_to_np_dtype=to_numpy, np_dtype_to_dtype=from_numpy, valid_np_dtypes=tuple(from_numpy))
    return globals()[name]
