"""Checks of arguments, with the exception types of the original.

A value of a wrong type raises `TypeError`, a number out of range `ValueError`. Integers of numpy count as integers,
which the original refuses; so does bool.
"""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import Any, TypeAlias

__all__ = [
    "check_dict",
    "check_inner",
    "check_int32",
    "check_int64",
    "check_isinstance",
    "check_list_int32",
    "check_list_int64",
    "check_list_uint64",
    "check_positive_or_set_default",
    "check_uint8",
    "check_uint16",
    "check_uint32",
    "check_uint64",
]

Types: TypeAlias = type[Any] | Iterable[type[Any]]


def _as_types(types: Types) -> tuple[type[Any], ...]:
    given = (types,) if isinstance(types, type) else tuple(types)
    return (*given, Integral) if int in given else given


def check_isinstance(
    name: str, value: object, types: Types, element_types: Types | None = None, allow_none: bool = True
) -> None:
    """Check the type of an argument, and of its elements.

    Parameters
    ----------
    name : str
        Of the argument, for the message.
    value : object
    types : type or sequence of types
    element_types : type or sequence of types, optional
        Of each element; of each key where `value` is a dict.
    allow_none : bool
        Whether None passes, as it does in most calls of the original.

    Raises
    ------
    TypeError
        `value` or an element is of another type.
    """
    if value is None and allow_none:
        return
    exact = types if isinstance(types, (type, tuple)) else tuple(types)
    # In two steps, because the second one costs more and hardly anybody needs it.
    if not isinstance(value, exact) and not isinstance(value, _as_types(exact)):
        raise TypeError(f"{name} only support {_names(types)}, got {value!r:.80} of type {type(value).__name__}")
    if element_types is not None:
        check_inner(name, value, element_types)


def check_inner(name: str, values: Any, element_types: Types) -> None:
    """Check the type of each element; of each key of a dict.

    Raises
    ------
    TypeError
        An element is of another type.
    """
    for kind in set(map(type, values)):  # lists of blocks are long, and of one kind
        if kind is not element_types and not issubclass(kind, _as_types(element_types)):
            raise TypeError(f"elements of {name} only support {_names(element_types)}, got one of type {kind.__name__}")


def check_dict(name: str, value: Any, key_type: Types, value_type: Types) -> None:
    """Check the types of the keys and values of a dict.

    Raises
    ------
    TypeError
        A key or a value is of another type.
    """
    check_isinstance(name, value, dict, allow_none=False)
    check_inner(f"{name} (keys)", value.keys(), key_type)
    check_inner(f"{name} (values)", value.values(), value_type)


def _names(types: Types) -> str:
    return ", ".join(kind.__name__ for kind in ((types,) if isinstance(types, type) else tuple(types)))


# Numbers. ---------------------------------------------------------------------------------------------------


def _check_number(name: str, value: Any, low: int, high: int) -> None:
    if not isinstance(value, Integral):
        raise TypeError(f"{name} only support int, got {value!r:.80} of type {type(value).__name__}")
    if not low <= int(value) <= high:
        raise ValueError(f"{name}={value} is outside {low}..{high}")


def check_uint8(name: str, value: object) -> None:
    """Check for an integer from 0 to 2**8 - 1."""
    _check_number(name, value, 0, 2**8 - 1)


def check_uint16(name: str, value: object) -> None:
    """Check for an integer from 0 to 2**16 - 1."""
    _check_number(name, value, 0, 2**16 - 1)


def check_uint32(name: str, value: object) -> None:
    """Check for an integer from 0 to 2**32 - 1."""
    _check_number(name, value, 0, 2**32 - 1)


def check_uint64(name: str, value: object) -> None:
    """Check for an integer from 0 to 2**64 - 1."""
    _check_number(name, value, 0, 2**64 - 1)


def check_int32(name: str, value: object) -> None:
    """Check for an integer from -2**31 to 2**31 - 1."""
    _check_number(name, value, -(2**31), 2**31 - 1)


def check_int64(name: str, value: object) -> None:
    """Check for an integer from -2**63 to 2**63 - 1."""
    _check_number(name, value, -(2**63), 2**63 - 1)


def _check_list(name: str, values: Any, low: int, high: int) -> None:
    check_isinstance(name, values, (list, tuple), int, allow_none=False)
    if len(values) > 0 and not (low <= min(values) and max(values) <= high):
        for index, value in enumerate(values):
            _check_number(f"{name}[{index}]", value, low, high)


def check_list_int32(name: str, values: object) -> None:
    """Check for a list or tuple of integers from -2**31 to 2**31 - 1."""
    _check_list(name, values, -(2**31), 2**31 - 1)


def check_list_int64(name: str, values: object) -> None:
    """Check for a list or tuple of integers from -2**63 to 2**63 - 1."""
    _check_list(name, values, -(2**63), 2**63 - 1)


def check_list_uint64(name: str, values: object) -> None:
    """Check for a list or tuple of integers from 0 to 2**64 - 1."""
    _check_list(name, values, 0, 2**64 - 1)


def check_positive_or_set_default(name: str, value: Any, default: int) -> int:
    """Return a positive integer, or `default` for None.

    Raises
    ------
    TypeError, ValueError
        It is no integer, or not positive.
    """
    if value is None:
        return default
    _check_number(name, value, 1, 2**31 - 1)
    return int(value)
