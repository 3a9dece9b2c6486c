"""The values of the interface: descriptions, keys, caches, and what a layer-wise transfer is told."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any, Final

from ..data_type import DataType, calc_tensor_size
from ..status import LLMException, raise_if_false, raise_if_true
from ..utils.utils import (
    check_int32,
    check_int64,
    check_isinstance,
    check_list_uint64,
    check_uint32,
    check_uint64,
)
from .llm_utils import CacheTask, check_layer_range

if TYPE_CHECKING:
    from .cache_manager import CacheManager

__all__ = [
    "BlocksCacheKey",
    "Cache",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "CacheTask",
    "DataType",
    "KvCache",
    "LayerSynchronizer",
    "MemInfo",
    "Memtype",
    "Placement",
    "PushType",
    "RegisterMemStatus",
    "TransferConfig",
    "TransferWithCacheKeyConfig",
]

INVALID_ID: Final = 2**64 - 1
"""The request or prefix id that stands for none."""


class Placement(IntEnum):
    """Where the memory of a cache lives. Without an NPU both mean host memory."""

    HOST = 0
    DEVICE = 1

    def __str__(self) -> str:
        return f"Placement.{self.name}"


class Memtype(Enum):
    """Where a piece of memory lives."""

    MEM_TYPE_DEVICE = 0
    MEM_TYPE_HOST = 1


class RegisterMemStatus(Enum):
    """How far the memory of a two-sided link is."""

    OK = 0
    PREPARING = 1
    FAILED = 2


class PushType(Enum):
    """What a layer-wise transfer names its target by."""

    NO_CACHE_KEY = 0
    BLOCKS_CACHE_KEY = 1
    CACHE_KEY_BY_ID = 2


class CacheDesc:
    """Describes the tensors of a cache.

    Parameters
    ----------
    num_tensors : int
        0 to 2**32 - 1, though a cache needs at least one.
    shape : list or tuple of int
        Of one tensor; dimension 0 counts batch slots or blocks. Kept as it is given, not copied.
    data_type : DataType
    placement : Placement
    batch_dim_index, seq_len_dim_index : int
        Dimensions with a meaning for the caller; dimension 0 is the one that counts. -1: no sequence dimension.
    kv_tensor_format : str, optional
        For the caller.

    Raises
    ------
    TypeError, ValueError
        An argument has a wrong type, or a number does not fit.
    LLMException
        A dimension index is outside the shape.
    """

    def __init__(
        self,
        num_tensors: int,
        shape: Sequence[int],
        data_type: DataType,
        placement: Placement = Placement.DEVICE,
        batch_dim_index: int = 0,
        seq_len_dim_index: int = -1,
        kv_tensor_format: str | None = None,
    ) -> None:
        check_uint32("num_tensors", num_tensors)
        check_isinstance("shape", shape, (list, tuple), int)
        check_isinstance("data_type", data_type, DataType)
        check_isinstance("placement", placement, Placement)
        check_isinstance("batch_dim_index", batch_dim_index, int)
        check_int32("seq_len_dim_index", seq_len_dim_index)
        check_isinstance("kv_tensor_format", kv_tensor_format, str)
        rank = len(shape)
        raise_if_false(
            0 <= batch_dim_index < rank, "batch_dim_index={} is outside a shape of {}", batch_dim_index, rank
        )
        raise_if_false(
            seq_len_dim_index == -1 or 0 <= seq_len_dim_index < rank,
            "seq_len_dim_index={} is neither -1 nor inside a shape of {}", seq_len_dim_index, rank,
        )  # fmt: skip
        for index, dim in enumerate(shape):
            check_int64(f"shape[{index}]", dim)
        self._num_tensors = int(num_tensors)
        self._shape = shape
        self._data_type = data_type
        self._placement = placement
        self._batch_dim_index = batch_dim_index
        self._batch_size = shape[batch_dim_index]
        self._seq_len_dim_index = seq_len_dim_index
        self._kv_tensor_format = kv_tensor_format
        self._size: int | None = None
        self._is_blocks = False

    def __repr__(self) -> str:
        return (
            f"CacheDesc(num_tensors={self._num_tensors}, shape={self._shape}, data_type={self._data_type}, "
            f"placement={self._placement!s}, batch_dim_index={self._batch_dim_index}, "
            f"seq_len_dim_index={self._seq_len_dim_index}, kv_tensor_format={self._kv_tensor_format!r})"
        )

    @property
    def num_tensors(self) -> int:
        """Number of tensors."""
        return self._num_tensors

    @property
    def shape(self) -> Sequence[int]:
        """Shape of one tensor: the object that was given."""
        return self._shape

    @property
    def data_type(self) -> DataType:
        """Type of the elements."""
        return self._data_type

    @property
    def placement(self) -> Placement:
        """Where the memory lives."""
        return self._placement

    @property
    def batch_dim(self) -> int:
        """The argument `batch_dim_index`."""
        return self._batch_dim_index

    @property
    def batch_size(self) -> int:
        """Dimension `batch_dim` of the shape when this was made."""
        return self._batch_size

    @property
    def seq_len_dim_index(self) -> int:
        """Dimension of the sequence, or -1."""
        return self._seq_len_dim_index

    @property
    def kv_tensor_format(self) -> str | None:
        """What the caller calls the format."""
        return self._kv_tensor_format

    @property
    def size(self) -> int:
        """Bytes of one tensor.

        Raises
        ------
        LLMException
            A dimension is negative, or the bytes exceed 64 bits. Its status is ``LLM_SUCCESS``, as in the original.
        """
        if self._size is None:
            size = calc_tensor_size(self._shape, DataType(self._data_type.value))  # None is found out here
            if size < 0:
                raise LLMException(f"a tensor of shape {self._shape} and {self._data_type} has no size in 64 bits")
            self._size = size
        return self._size

    def update_dim(self, dim_index: int, dim_value: int) -> None:
        """Change a dimension of the shape, in the list that was given. `batch_size` stays as it was."""
        self._shape[dim_index] = dim_value  # type: ignore[index]  # a tuple raises TypeError, as it should
        self._size = None


# Keys. ------------------------------------------------------------------------------------------------------


def _named(kind: str, names: tuple[str, ...], args: tuple[object, ...], kwargs: dict[str, object]) -> dict[str, object]:
    """Return the arguments of a key by name; `names[0]` has an alias."""
    raise_if_false(len(args) <= len(names), "{} takes {} values, got {}", kind, len(names), len(args))
    values = dict(kwargs)
    if "prompt_cluster_id" in values:
        values.setdefault(names[0], values["prompt_cluster_id"])
        del values["prompt_cluster_id"]
    for name in values:
        raise_if_false(name in names, "Unsupported argument {} of {}", name, kind)
    values.update(zip(names, args, strict=False))
    raise_if_false(names[0] in values, "{} is required", names[0])
    return values


class CacheKey:
    """Names a batch slot by its request, or by its prefix.

    ``CacheKey(cluster_id, req_id, model_id=0, prefix_id=2**64 - 1)``, by position or by name; ``prompt_cluster_id`` is
    another name of the first. All are 0 to 2**64 - 1, and 2**64 - 1 stands for no request or prefix.

    Raises
    ------
    TypeError, ValueError
        A value is no integer, or out of range.
    LLMException
        Too many values, an unknown name, or no cluster or request id.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        values: dict[str, Any] = _named("CacheKey", ("cluster_id", "req_id", "model_id", "prefix_id"), args, kwargs)
        raise_if_false("req_id" in values, "req_id is required")
        values = {"model_id": 0, "prefix_id": INVALID_ID, **values}
        for name, value in values.items():
            check_uint64(name, value)
        self._cluster_id = int(values["cluster_id"])
        self._req_id = int(values["req_id"])
        self._model_id = int(values["model_id"])
        self._prefix_id = int(values["prefix_id"])

    def __repr__(self) -> str:
        return (
            f"CacheKey(cluster_id={self._cluster_id}, req_id={self._req_id}, model_id={self._model_id}, "
            f"prefix_id={self._prefix_id})"
        )

    @property
    def cluster_id(self) -> int:
        """Owner of the cache."""
        return self._cluster_id

    @property
    def prompt_cluster_id(self) -> int:
        """The same as `cluster_id`."""
        return self._cluster_id

    @property
    def req_id(self) -> int:
        """The request."""
        return self._req_id

    @property
    def model_id(self) -> int:
        """The model."""
        return self._model_id

    @property
    def prefix_id(self) -> int:
        """The prefix."""
        return self._prefix_id


class BlocksCacheKey:
    """Names the one blocks cache of a model: ``BlocksCacheKey(cluster_id, model_id=0)``, by position or by name.

    Raises
    ------
    TypeError
        A value is no integer.
    LLMException
        Too many values, an unknown name, or no cluster id.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        values: dict[str, Any] = _named("BlocksCacheKey", ("cluster_id", "model_id"), args, kwargs)
        for name, value in values.items():
            check_isinstance(name, value, int)
        self._cluster_id = values["cluster_id"]
        self._model_id = values.get("model_id", 0)

    def __repr__(self) -> str:
        return f"BlocksCacheKey(cluster_id={self._cluster_id}, model_id={self._model_id})"

    @property
    def cluster_id(self) -> int:
        """Owner of the cache."""
        return self._cluster_id  # type: ignore[no-any-return]

    @property
    def prompt_cluster_id(self) -> int:
        """The same as `cluster_id`."""
        return self._cluster_id  # type: ignore[no-any-return]

    @property
    def model_id(self) -> int:
        """The model."""
        return self._model_id  # type: ignore[no-any-return]


class CacheKeyByIdAndIndex:
    """Names a cache by the id that its owner has given it, and a batch slot of it.

    Parameters
    ----------
    cluster_id : int
        Owner of the cache, 0 to 2**64 - 1.
    cache_id : int
        Of 64 bits. 0 and below stand for the key of request 0 of model 0, as in the original.
    batch_index : int
        0 to 2**32 - 1.

    Raises
    ------
    TypeError, ValueError
        A value is no integer, or out of range.
    """

    def __init__(self, cluster_id: int, cache_id: int, batch_index: int = 0) -> None:
        check_uint64("cluster_id", cluster_id)
        check_int64("cache_id", cache_id)
        check_uint32("batch_index", batch_index)
        self._cluster_id = int(cluster_id)
        self._cache_id = int(cache_id)
        self._batch_index = int(batch_index)

    def __repr__(self) -> str:
        return (
            f"CacheKeyByIdAndIndex(cluster_id={self._cluster_id}, cache_id={self._cache_id}, "
            f"batch_index={self._batch_index})"
        )

    @property
    def cluster_id(self) -> int:
        """Owner of the cache."""
        return self._cluster_id

    @property
    def cache_id(self) -> int:
        """Id of the cache there."""
        return self._cache_id

    @property
    def batch_index(self) -> int:
        """The batch slot."""
        return self._batch_index


# Caches. ----------------------------------------------------------------------------------------------------


class Cache:
    """A cache of this node; made by `CacheManager`, or by `create_cpu_cache`."""

    def __init__(
        self,
        cache_id: int,
        cache_desc: CacheDesc,
        tensor_addrs: list[int],
        cache_manager: CacheManager | None,
        is_registered: bool,
        is_blocks_cache: bool,
    ) -> None:
        self._cache_id = cache_id
        self._cache_desc = cache_desc
        self._tensor_addrs = tensor_addrs
        self._cache_manager = cache_manager
        self._is_registered = is_registered
        self._is_blocks_cache = is_blocks_cache
        self._valid = True

    def __repr__(self) -> str:
        return f"Cache(cache_id={self._cache_id}, cache_desc={self._cache_desc!r})"

    @classmethod
    def create_cpu_cache(cls, cache_desc: CacheDesc, addrs: list[int]) -> Cache:
        """Describe memory of the host for `CacheManager.swap_blocks`; nothing is registered.

        Parameters
        ----------
        cache_desc : CacheDesc
            Its placement is ``Placement.HOST``.
        addrs : list of int
            One for each tensor.

        Returns
        -------
        Cache
            With the id -1. The memory stays the caller's.

        Raises
        ------
        TypeError
            An argument has a wrong type.
        LLMException
            The placement is another, or the number of addresses is not that of tensors.
        """
        check_isinstance("cache_desc", cache_desc, CacheDesc)
        check_isinstance("addrs", addrs, list, int)
        raise_if_false(cache_desc.placement == Placement.HOST, "a cpu cache needs Placement.HOST")
        raise_if_false(
            len(addrs) == cache_desc.num_tensors, "{} addresses for {} tensors", len(addrs), cache_desc.num_tensors
        )
        return cls(-1, cache_desc, addrs, None, False, True)

    @property
    def cache_id(self) -> int:
        """Id by which peers may name the cache; -1 where no peer knows it."""
        return self._cache_id

    @property
    def cache_desc(self) -> CacheDesc:
        """Its description."""
        return self._cache_desc

    @property
    def tensor_addrs(self) -> list[int]:
        """Address of each tensor; empty when the cache is deallocated."""
        return self._tensor_addrs

    @property
    def per_device_tensor_addrs(self) -> list[list[int]]:
        """`tensor_addrs` of the one device, as the published guide reads them."""
        return [self._tensor_addrs]

    @property
    def is_blocks_cache(self) -> bool:
        """Whether dimension 0 counts blocks."""
        return self._is_blocks_cache


class KvCache:
    """A cache of the first version, which this package does not have; only `create_cpu_cache` makes one."""

    def __init__(
        self, cache_id: int, cache_desc: CacheDesc, per_device_tensor_addrs: list[list[int]], kv_cache_manager: Any
    ) -> None:
        self._cache_id = cache_id
        self._cache_desc = cache_desc
        self._per_device_tensor_addrs = per_device_tensor_addrs
        self._kv_cache_manager = kv_cache_manager

    def __del__(self) -> None:
        manager = getattr(self, "_kv_cache_manager", None)
        if manager is not None:
            manager.deallocate_cache(self)

    @classmethod
    def create_cpu_cache(cls, cache_desc: CacheDesc, addrs: list[int] | list[list[int]]) -> KvCache:
        """Describe memory of the host.

        Parameters
        ----------
        cache_desc : CacheDesc
            Its placement is ``Placement.HOST``.
        addrs : list of int, or list of lists of int
            One for each tensor, of one device or of each.

        Raises
        ------
        TypeError
            An argument has a wrong type.
        LLMException
            The placement is another, the list is empty or mixed, or a number is not that of tensors.
        """
        check_isinstance("cache_desc", cache_desc, CacheDesc)
        check_isinstance("addrs", addrs, list, (int, list))
        raise_if_false(cache_desc.placement == Placement.HOST, "a cpu cache needs Placement.HOST")
        raise_if_false(len(addrs) > 0, "addrs is empty")
        nested = [isinstance(one, list) for one in addrs]
        raise_if_false(all(nested) or not any(nested), "addrs mixes addresses and lists of them")
        devices: Any = addrs if all(nested) else [addrs]
        for one in devices:
            check_isinstance("addrs", one, list, int)
            raise_if_false(
                len(one) == cache_desc.num_tensors, "{} addresses for {} tensors", len(one), cache_desc.num_tensors
            )
        return cls(-1, cache_desc, devices, None)

    @property
    def cache_id(self) -> int:
        """Id of the cache."""
        return self._cache_id

    @property
    def cache_desc(self) -> CacheDesc:
        """Its description."""
        return self._cache_desc

    @property
    def per_device_tensor_addrs(self) -> list[list[int]]:
        """Address of each tensor, for each device."""
        return self._per_device_tensor_addrs


class MemInfo:
    """A piece of memory, for `CacheManager.remap_registered_memory`.

    Parameters
    ----------
    mem_type : Memtype
    addr, size : int
    """

    def __init__(self, mem_type: Memtype, addr: int, size: int) -> None:
        check_isinstance("mem_type", mem_type, Memtype)
        check_isinstance("addr", addr, int)
        check_isinstance("size", size, int)
        self._mem_type = mem_type
        self._addr = addr
        self._size = size

    @property
    def mem_type(self) -> Memtype:
        """Where it lives."""
        return self._mem_type

    @property
    def addr(self) -> int:
        """Its address."""
        return self._addr

    @property
    def size(self) -> int:
        """Its bytes."""
        return self._size


# Layer-wise transfers. --------------------------------------------------------------------------------------


class _LayerTarget:
    """What both kinds of targets of a layer-wise transfer name of the source."""

    _src_layer_range: range | None
    _src_batch_index: int

    @property
    def src_layer_range(self) -> range | None:
        """Layers of the source; None for all."""
        return self._src_layer_range

    @src_layer_range.setter
    def src_layer_range(self, src_layer_range: range | None) -> None:
        check_layer_range("src_layer_range", src_layer_range)
        self._src_layer_range = src_layer_range

    @property
    def src_batch_index(self) -> int:
        """Batch slot of the source."""
        return self._src_batch_index

    @src_batch_index.setter
    def src_batch_index(self, src_batch_index: int) -> None:
        check_uint32("src_batch_index", src_batch_index)
        self._src_batch_index = int(src_batch_index)


class TransferConfig(_LayerTarget):
    """One target of a layer-wise transfer, by addresses.

    Parameters
    ----------
    dst_cluster_id : int
        The peer.
    dst_addrs : list or tuple of int
        Two addresses for each layer, in memory that the peer has registered.
    src_layer_range : range, optional
        Layers of the source to send; all if omitted.
    src_batch_index : int
        Batch slot of the source.

    Raises
    ------
    TypeError, ValueError
        An argument has a wrong type, or a number does not fit.
    LLMException
        The range is empty, or has a step.
    """

    def __init__(
        self, dst_cluster_id: int, dst_addrs: Sequence[int], src_layer_range: range | None = None,
        src_batch_index: int = 0,
    ) -> None:  # fmt: skip
        self.dst_cluster_id = dst_cluster_id
        self.dst_addrs = dst_addrs
        self.src_layer_range = src_layer_range
        self.src_batch_index = src_batch_index
        self.dst_layer_range = None

    @property
    def dst_cluster_id(self) -> int:
        """The peer."""
        return self._dst_cluster_id

    @dst_cluster_id.setter
    def dst_cluster_id(self, dst_cluster_id: int) -> None:
        check_uint64("dst_cluster_id", dst_cluster_id)
        self._dst_cluster_id = int(dst_cluster_id)

    @property
    def dst_addrs(self) -> Sequence[int]:
        """Two addresses for each layer."""
        return self._dst_addrs

    @dst_addrs.setter
    def dst_addrs(self, dst_addrs: Sequence[int]) -> None:
        check_list_uint64("dst_addrs", dst_addrs)
        self._dst_addrs = dst_addrs


class TransferWithCacheKeyConfig(_LayerTarget):
    """One target of a layer-wise transfer, by a key of the peer's cache.

    Parameters
    ----------
    cache_key : BlocksCacheKey or CacheKeyByIdAndIndex
        The peer and its cache.
    src_layer_range, dst_layer_range : range
        Layers of the source and of the target, of one length.
    src_batch_index : int
        Batch slot of the source; 0 with a BlocksCacheKey.

    Raises
    ------
    TypeError, ValueError
        An argument has a wrong type, or a number does not fit.
    LLMException
        A range is empty or has a step, their lengths differ, or the slot and the key do not fit.
    """

    def __init__(
        self,
        cache_key: BlocksCacheKey | CacheKeyByIdAndIndex,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        src_batch_index: int = 0,
    ) -> None:
        check_isinstance("cache_key", cache_key, (BlocksCacheKey, CacheKeyByIdAndIndex), allow_none=False)
        check_layer_range("src_layer_range", src_layer_range, allow_none=False)
        check_layer_range("dst_layer_range", dst_layer_range, allow_none=False)
        assert src_layer_range is not None
        assert dst_layer_range is not None
        raise_if_false(
            len(src_layer_range) == len(dst_layer_range),
            "src_layer_range has {} layers and dst_layer_range {}", len(src_layer_range), len(dst_layer_range),
        )  # fmt: skip
        check_uint32("src_batch_index", src_batch_index)
        raise_if_true(
            isinstance(cache_key, BlocksCacheKey) and src_batch_index != 0,
            "src_batch_index={} has no meaning with a BlocksCacheKey", src_batch_index,
        )  # fmt: skip
        self._cache_key = cache_key
        self._src_layer_range: range | None = src_layer_range
        self._dst_layer_range: range | None = dst_layer_range
        self._src_batch_index = int(src_batch_index)

    @property
    def dst_cluster_id(self) -> int:
        """The peer, as `cache_key` names it."""
        return self._cache_key.cluster_id

    @property
    def cache_key(self) -> BlocksCacheKey | CacheKeyByIdAndIndex:
        """The peer and its cache."""
        return self._cache_key

    @cache_key.setter
    def cache_key(self, cache_key: BlocksCacheKey | CacheKeyByIdAndIndex) -> None:
        check_isinstance("cache_key", cache_key, (BlocksCacheKey, CacheKeyByIdAndIndex))
        self._cache_key = cache_key

    @property
    def dst_layer_range(self) -> range | None:
        """Layers of the target."""
        return self._dst_layer_range

    @dst_layer_range.setter
    def dst_layer_range(self, dst_layer_range: range | None) -> None:
        check_layer_range("dst_layer_range", dst_layer_range)
        self._dst_layer_range = dst_layer_range


class LayerSynchronizer(ABC):
    """Says when a layer of the source has been computed."""

    @abstractmethod
    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        """Wait until a layer may be sent.

        Parameters
        ----------
        layer_index : int
            Of the source.
        timeout_in_millis : int or None
            Always None.

        Returns
        -------
        bool
            False: it never will be.
        """
