"""Keys: how a cache of a peer, or a batch slot of it, is named.

Keys are tuples, because a look-up of a tuple in a dict costs a quarter of one of a frozen dataclass. The three kinds
have two, three and four fields, so that keys of different kinds are never equal, and they hash at C speed. (A key does
equal the plain tuple of its fields.)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple, Self, SupportsIndex

from .types import I64_MAX, U32_MAX, U64_MAX, as_integer

__all__ = ["NO_ID", "BlocksCacheKey", "CacheKey", "CacheKeyByIdAndIndex", "Key"]

NO_ID: Final = U64_MAX
"""The request or prefix id that stands for "none", as in the original."""


class _BlocksCacheKeyFields(NamedTuple):
    cluster_id: int
    model_id: int


class BlocksCacheKey(_BlocksCacheKeyFields):
    """Names the one blocks cache that a cluster registered for a model.

    Parameters
    ----------
    cluster_id : int
        The owner of the cache, 0 to 2**64 - 1. Registering takes only the DataDist's own.
    model_id : int
        0 to 2**64 - 1.

    Raises
    ------
    ArgumentTypeError, ArgumentError
        As `as_integer`.
    """

    __slots__ = ()

    def __new__(cls, cluster_id: SupportsIndex, model_id: SupportsIndex = 0) -> Self:
        """Check the fields; plain ints take the short way."""
        if type(cluster_id) is not int or not 0 <= cluster_id <= U64_MAX:
            cluster_id = as_integer(cluster_id, "cluster_id")
        if type(model_id) is not int or not 0 <= model_id <= U64_MAX:
            model_id = as_integer(model_id, "model_id")
        return tuple.__new__(cls, (cluster_id, model_id))

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> Self:  # type: ignore[override]  # checks; mypy wants a generic cls
        return cls(*iterable)


class _CacheKeyByIdAndIndexFields(NamedTuple):
    cluster_id: int
    cache_id: int
    batch_index: int


class CacheKeyByIdAndIndex(_CacheKeyByIdAndIndexFields):
    """Names a cache by the id its owner gave it, and one batch slot of it.

    Parameters
    ----------
    cluster_id : int
        The owner of the cache, 0 to 2**64 - 1.
    cache_id : int
        1 to 2**63 - 1. (The original takes 0 and below and silently looks up a key instead.)
    batch_index : int
        0 to 2**32 - 1. 0 for access by blocks.

    Raises
    ------
    ArgumentTypeError, ArgumentError
        As `as_integer`.
    """

    __slots__ = ()

    def __new__(cls, cluster_id: SupportsIndex, cache_id: SupportsIndex, batch_index: SupportsIndex = 0) -> Self:
        """Check the fields; plain ints take the short way."""
        if type(cluster_id) is not int or not 0 <= cluster_id <= U64_MAX:
            cluster_id = as_integer(cluster_id, "cluster_id")
        if type(cache_id) is not int or not 1 <= cache_id <= I64_MAX:
            cache_id = as_integer(cache_id, "cache_id", low=1, high=I64_MAX)
        if type(batch_index) is not int or not 0 <= batch_index <= U32_MAX:
            batch_index = as_integer(batch_index, "batch_index", high=U32_MAX)
        return tuple.__new__(cls, (cluster_id, cache_id, batch_index))

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> Self:  # type: ignore[override]  # checks; mypy wants a generic cls
        return cls(*iterable)


class _CacheKeyFields(NamedTuple):
    cluster_id: int
    req_id: int
    model_id: int
    prefix_id: int


class CacheKey(_CacheKeyFields):
    """Names a batch slot by the request, or by the prefix, whose cache it holds.

    Parameters
    ----------
    cluster_id : int
        The owner of the cache, 0 to 2**64 - 1. Registering takes only the DataDist's own.
    req_id : int
        0 to 2**64 - 1; `NO_ID` for none.
    model_id : int
        0 to 2**64 - 1.
    prefix_id : int
        0 to 2**64 - 1; `NO_ID` for none. A key with a prefix id is found by the prefix alone.

    Raises
    ------
    ArgumentTypeError, ArgumentError
        As `as_integer`.

    Notes
    -----
    Registering takes a key without any id as a placeholder that skips a batch slot, and one with both as the prefix's.
    Pulling and pushing want exactly one.
    """

    __slots__ = ()

    def __new__(
        cls,
        cluster_id: SupportsIndex,
        req_id: SupportsIndex = NO_ID,
        model_id: SupportsIndex = 0,
        prefix_id: SupportsIndex = NO_ID,
    ) -> Self:
        """Check the fields; plain ints take the short way."""
        if type(cluster_id) is not int or not 0 <= cluster_id <= U64_MAX:
            cluster_id = as_integer(cluster_id, "cluster_id")
        if type(req_id) is not int or not 0 <= req_id <= U64_MAX:
            req_id = as_integer(req_id, "req_id")
        if type(model_id) is not int or not 0 <= model_id <= U64_MAX:
            model_id = as_integer(model_id, "model_id")
        if type(prefix_id) is not int or not 0 <= prefix_id <= U64_MAX:
            prefix_id = as_integer(prefix_id, "prefix_id")
        return tuple.__new__(cls, (cluster_id, req_id, model_id, prefix_id))

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> Self:  # type: ignore[override]  # checks; mypy wants a generic cls
        return cls(*iterable)

    def __repr__(self) -> str:
        request, prefix = (
            "" if value == NO_ID else f", {name}={value}"
            for name, value in (("req_id", self.req_id), ("prefix_id", self.prefix_id))
        )
        return f"CacheKey(cluster_id={self.cluster_id}{request}, model_id={self.model_id}{prefix})"

    @property
    def is_placeholder(self) -> bool:
        """Whether neither request nor prefix id is given."""
        return self.req_id == NO_ID and self.prefix_id == NO_ID


Key = BlocksCacheKey | CacheKeyByIdAndIndex | CacheKey
"""Anything that names a cache at a peer."""
