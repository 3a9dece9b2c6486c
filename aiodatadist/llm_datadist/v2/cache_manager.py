"""`CacheManager`: registers caches and moves them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ... import BlocksCacheKey as NativeBlocksCacheKey
from ... import Cache as NativeCache
from ... import CacheKey as NativeCacheKey
from ... import CacheKeyByIdAndIndex as NativeCacheKeyByIdAndIndex
from ... import CacheManager as NativeCacheManager
from ... import DataDistError, LayerGate, TransferTask
from ... import TransferConfig as NativeTransferConfig
from ... import TransferWithCacheKeyConfig as NativeTransferWithCacheKeyConfig
from .._engine import Engine, Key, Tensors
from ..data_type import DataType
from ..status import LLMStatusCode, raise_if_false, raise_if_true
from ..utils.utils import (
    check_dict,
    check_inner,
    check_int64,
    check_isinstance,
    check_list_uint64,
    check_uint32,
    check_uint64,
)
from .layers import check_block_bytes, layers_of, pulled_layers, pushed_layers
from .llm_types import (
    INVALID_ID,
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    LayerSynchronizer,
    MemInfo,
    Memtype,
    Placement,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from .llm_utils import Begin, CacheTask

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CacheManager"]

AnyKey = CacheKey | CacheKeyByIdAndIndex | BlocksCacheKey


class CacheManager:
    """Registers caches and moves them: `LLMDataDist.cache_manager`.

    Every call may come from any thread, blocks that thread until it has ended, and delays no other. An interrupt
    cancels what the call waits for; once the call has raised, nothing touches the memory for it any more.

    Moving raises `LLMException` with ``LLM_NOT_YET_LINK`` (there is no link, or the peer is gone), ``LLM_TIMEOUT``
    (after ``sync_kv_timeout``), ``LLM_KV_CACHE_NOT_EXIST`` (a cache, key or batch slot is not there) or
    ``LLM_PARAM_INVALID`` (sizes, indices, shapes or permissions do not fit).
    """

    def __init__(self, llm_datadist: Engine, options: Mapping[str, str]) -> None:
        self._engine = llm_datadist
        self._options = options
        self._remote_accessible = llm_datadist.config.remote_accessible
        self._call_linked = False

    def set_is_call_linked(self) -> None:
        """Take note of a two-sided link: memory that is registered from now on is not for peers."""
        self._call_linked = True

    # Registering. -------------------------------------------------------------------------------------------

    def register_cache(
        self,
        cache_desc: CacheDesc,
        addrs: list[int],
        cache_keys: Sequence[CacheKey] = (),
        remote_accessible: bool | None = None,
    ) -> Cache:
        """Register memory whose dimension 0 counts batch slots.

        Parameters
        ----------
        cache_desc : CacheDesc
        addrs : list of int
            One for each tensor. The memory stays the caller's to keep, until `unregister_cache` has returned.
        cache_keys : list or tuple of CacheKey
            ``cache_keys[i]`` names batch slot ``i``; their cluster ids are ignored.
        remote_accessible : bool, optional
            Whether peers may read and write it. Omitted: for ``Placement.DEVICE`` yes; for ``Placement.HOST`` no, but
            peers reach it all the same where the option of that name is off.

        Returns
        -------
        Cache
            Peers that are linked see it, too.

        Raises
        ------
        TypeError
            An argument has a wrong type.
        LLMException
            ``LLM_PARAM_INVALID``: numbers do not fit, or a key is taken.
        """
        check_isinstance("cache_desc", cache_desc, CacheDesc)
        check_isinstance("addrs", addrs, list, int)
        check_isinstance("cache_keys", cache_keys, (list, tuple), CacheKey)
        check_isinstance("remote_accessible", remote_accessible, bool)
        self._check_not_after_link(remote_accessible)
        raise_if_false(len(addrs) > 0, "addrs is empty")
        raise_if_false(
            len(addrs) == cache_desc.num_tensors, "{} addresses for {} tensors", len(addrs), cache_desc.num_tensors
        )
        raise_if_true(0 in addrs, "addrs[{}] is 0", addrs.index(0) if 0 in addrs else None)
        keys = [self._own_key(key) for key in cache_keys]
        return self._register(cache_desc, addrs, remote_accessible, False, keys=keys)

    def register_blocks_cache(
        self,
        cache_desc: CacheDesc,
        addrs: list[int],
        blocks_cache_key: BlocksCacheKey | None = None,
        remote_accessible: bool | None = None,
    ) -> Cache:
        """Register memory whose dimension 0 counts blocks.

        Parameters
        ----------
        cache_desc, addrs, remote_accessible
            As for `register_cache`.
        blocks_cache_key : BlocksCacheKey, optional
            Names the cache; one of a model id. Its cluster id is ignored.

        Returns
        -------
        Cache

        Raises
        ------
        TypeError, LLMException
            As `register_cache`.
        """
        check_isinstance("cache_desc", cache_desc, CacheDesc)
        check_isinstance("addrs", addrs, list, int)
        check_isinstance("blocks_cache_key", blocks_cache_key, BlocksCacheKey)
        check_isinstance("remote_accessible", remote_accessible, bool)
        self._check_not_after_link(remote_accessible)
        raise_if_false(len(addrs) > 0, "addrs is empty")
        return self._register(cache_desc, addrs, remote_accessible, True, key=self._own_blocks_key(blocks_cache_key))

    def _check_not_after_link(self, remote_accessible: bool | None) -> None:
        raise_if_true(self._call_linked and remote_accessible, "remote_accessible=True is too late after link()")

    def _register(
        self, desc: CacheDesc, addrs: list[int], remote_accessible: bool | None, is_blocks: bool, **keys: Any
    ) -> Cache:
        for address in addrs:
            if not 0 <= address < 2**64:
                raise TypeError(f"address {address} does not fit into 64 bits")
        device = desc.placement.value == Placement.DEVICE  # a placement of None is found out here
        reachable = remote_accessible
        if reachable is None:
            reachable = device and not self._call_linked
        cache_id = self._engine.register(
            _tensors(desc),
            addrs,
            device=device,
            reachable=reachable,
            # Where the option is off the original does not look at the flag; what was never said is no "no".
            offered=reachable or (remote_accessible is None and not self._remote_accessible),
            **keys,
        )
        return Cache(cache_id, desc, addrs, self, True, is_blocks)

    def unregister_cache(self, cache_id: int) -> None:
        """Take a cache back; an unknown id is no error. When it returns, nobody touches the memory any more.

        Raises
        ------
        TypeError, ValueError
            No integer of 64 bits.
        LLMException
            A peer may still touch the memory, after half a minute: a process of this host is stopped, perhaps.
        """
        check_int64("cache_id", cache_id)
        self._engine.unregister(int(cache_id))

    # Allocating. --------------------------------------------------------------------------------------------

    def allocate_cache(self, cache_desc: CacheDesc, cache_keys: Sequence[CacheKey] = ()) -> Cache:
        """Allocate a cache from the pool of its placement; dimension 0 counts batch slots.

        Parameters
        ----------
        cache_desc : CacheDesc
        cache_keys : list or tuple of CacheKey
            As for `register_cache`, but a key of a request goes when a peer has pulled it.

        Returns
        -------
        Cache
            Its memory is the pool's, and goes back with `deallocate_cache`.

        Raises
        ------
        TypeError, LLMException
            As `register_cache`; ``LLM_OUT_OF_MEMORY``: the pool has no room.
        """
        check_isinstance("cache_desc", cache_desc, CacheDesc)
        check_isinstance("cache_keys", cache_keys, (list, tuple), CacheKey)
        return self._allocate(cache_desc, False, keys=[self._own_key(key) for key in cache_keys])

    def allocate_blocks_cache(self, cache_desc: CacheDesc, blocks_cache_key: BlocksCacheKey | None = None) -> Cache:
        """Allocate a cache from the pool of its placement; dimension 0 counts blocks.

        Parameters
        ----------
        cache_desc : CacheDesc
        blocks_cache_key : BlocksCacheKey, optional
            As for `register_blocks_cache`.

        Returns
        -------
        Cache
            Its memory is the pool's, and goes back with `deallocate_blocks_cache`.

        Raises
        ------
        TypeError, LLMException
            As `allocate_cache`.
        """
        check_isinstance("cache_desc", cache_desc, CacheDesc)
        check_isinstance("blocks_cache_key", blocks_cache_key, BlocksCacheKey)
        return self._allocate(cache_desc, True, key=self._own_blocks_key(blocks_cache_key))

    def _allocate(self, desc: CacheDesc, is_blocks: bool, **keys: Any) -> Cache:
        raise_if_false(desc.num_tensors > 0, "num_tensors must be above 0")
        device = desc.placement.value == Placement.DEVICE
        raise_if_false(
            self._engine.has_pool(device),
            "there is no pool of {} memory; give {}",
            "device" if device else "host", "mem_pool_cfg" if device else "host_mem_pool_cfg",
        )  # fmt: skip
        cache_id, addrs = self._engine.allocate(_tensors(desc), device=device, **keys)
        return Cache(cache_id, desc, addrs, self, False, is_blocks)

    def deallocate_cache(self, cache: Cache) -> None:
        """Give an allocated cache back to its pool, when its last key has been pulled or removed.

        A registered or unknown cache is left as it is. `Cache.tensor_addrs` is empty afterwards.

        Raises
        ------
        TypeError
            No Cache.
        LLMException
            It is a blocks cache, or there is no pool (``LLM_FEATURE_NOT_ENABLED``).
        """
        check_isinstance("cache", cache, Cache)
        raise_if_true(cache.is_blocks_cache, "use deallocate_blocks_cache for a blocks cache")
        self._check_pools("deallocate_cache")
        self._engine.deallocate(cache.cache_id, at_once=False)
        cache._valid, cache._tensor_addrs = False, []

    def deallocate_blocks_cache(self, cache: Cache) -> None:
        """Give an allocated blocks cache back to its pool, at once. Another one is left as it is.

        Raises
        ------
        TypeError
            No Cache.
        LLMException
            It is no blocks cache.
        """
        check_isinstance("cache", cache, Cache)
        raise_if_false(cache.is_blocks_cache, "use deallocate_cache for a cache of batch slots")
        self._engine.deallocate(cache.cache_id, at_once=True)
        cache._valid, cache._tensor_addrs = False, []

    def remove_cache_key(self, cache_key: CacheKey) -> None:
        """Take a key off its batch slot of an allocated cache. Another key is no error.

        Raises
        ------
        TypeError
            No CacheKey.
        LLMException
            ``LLM_FEATURE_NOT_ENABLED``: there is no pool.
        """
        check_isinstance("cache_key", cache_key, CacheKey)
        self._check_pools("remove_cache_key")
        self._engine.remove_key(self._own_key(cache_key))

    def _check_pools(self, call: str) -> None:
        raise_if_false(
            self._engine.has_pools,
            "{} needs mem_pool_cfg or host_mem_pool_cfg", call,
            status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
        )  # fmt: skip

    # Copying within this node. ------------------------------------------------------------------------------

    def copy_cache(
        self,
        dst: Cache,
        src: Cache,
        dst_batch_index: int = 0,
        src_batch_index: int = 0,
        offset: int = 0,
        size: int = -1,
        req_id: int | None = None,
    ) -> None:
        """Copy a part of a batch slot to another one of this node, in every tensor.

        Parameters
        ----------
        dst, src : Cache
        dst_batch_index, src_batch_index : int
        offset : int
            Bytes from the start of both slots.
        size : int
            Bytes; -1: to the end of the source slot.
        req_id : int, optional
            Has no effect.

        Raises
        ------
        TypeError, ValueError, LLMException
            What is wrong with the arguments.
        """
        check_isinstance("dst", dst, Cache)
        check_isinstance("src", src, Cache)
        check_uint32("dst_batch_index", dst_batch_index)
        check_uint32("src_batch_index", src_batch_index)
        check_uint64("offset", offset)
        check_int64("size", size)
        raise_if_true(dst.is_blocks_cache or src.is_blocks_cache, "copy_cache is for caches of batch slots")
        raise_if_false(size == -1 or size > 0, "size={} must be -1 or above 0", size)
        if req_id is not None:
            check_uint64("req_id", req_id)
        self._engine.local(
            "copy_cache",
            (dst.cache_id, src.cache_id),
            lambda caches, into, out_of: caches.copy_cache(
                into, out_of, dst_batch_index=dst_batch_index, src_batch_index=src_batch_index, offset=offset, size=size
            ),
        )

    def copy_blocks(self, cache: Cache, copy_block_info: dict[int, list[int]]) -> None:
        """Copy blocks of a cache to other blocks of it, in every tensor.

        Parameters
        ----------
        cache : Cache
        copy_block_info : dict of int to list of int
            Each source with its destinations. No block is both, and no destination appears twice.

        Raises
        ------
        TypeError, LLMException
            What is wrong with the arguments.
        """
        check_isinstance("cache", cache, Cache)
        check_dict("copy_block_info", copy_block_info, int, list)
        for blocks in copy_block_info.values():
            check_inner("copy_block_info", blocks, int)
        raise_if_false(cache.is_blocks_cache, "copy_blocks is for blocks caches")
        self._engine.local(
            "copy_blocks", (cache.cache_id,), lambda caches, one: caches.copy_blocks(one, copy_block_info)
        )

    def swap_blocks(self, src_cache: Cache, dst_cache: Cache, src_to_dst: dict[int, int]) -> None:
        """Copy blocks between a cache of the host and one of the device; their addresses are what counts.

        Parameters
        ----------
        src_cache, dst_cache : Cache
            One of each placement, with blocks of one size.
        src_to_dst : dict of int to int
            Each source with its destination.

        Raises
        ------
        TypeError, LLMException
            What is wrong with the arguments.
        """
        check_isinstance("src_cache", src_cache, Cache)
        check_isinstance("dst_cache", dst_cache, Cache)
        raise_if_false(src_cache.is_blocks_cache and dst_cache.is_blocks_cache, "swap_blocks is for blocks caches")
        check_isinstance("src_to_dst", src_to_dst, dict, int)
        here, there = src_cache.cache_desc, dst_cache.cache_desc
        blocks = here.shape[0], there.shape[0]
        raise_if_false(here.size // blocks[0] == there.size // blocks[1], "the blocks of both caches differ in size")
        raise_if_false(here.num_tensors == there.num_tensors, "the caches differ in the number of tensors")
        for source, target in src_to_dst.items():
            raise_if_false(0 <= source < blocks[0], "source block {} is outside 0..{}", source, blocks[0] - 1)
            raise_if_false(0 <= target < blocks[1], "target block {} is outside 0..{}", target, blocks[1] - 1)
        raise_if_true(here.placement == there.placement, "one cache must be of the host, and one of the device")
        self._engine.swap(
            _tensors(here).as_bytes(), src_cache.tensor_addrs,
            _tensors(there).as_bytes(), dst_cache.tensor_addrs,
            src_to_dst,
        )  # fmt: skip

    # Pulling. -----------------------------------------------------------------------------------------------

    def pull_cache(
        self,
        cache_key: CacheKey | CacheKeyByIdAndIndex,
        cache: Cache,
        batch_index: int = 0,
        size: int = -1,
        **kwargs: Any,
    ) -> None:
        """Copy a batch slot of a peer's cache into one of this node.

        Parameters
        ----------
        cache_key : CacheKey or CacheKeyByIdAndIndex
            The peer's cache and slot. With the option remote_cache_accessible, only by id.
        cache : Cache
        batch_index : int
            The slot of `cache`.
        size : int
            Bytes of each tensor, from the start of the slot; -1: all of the slot of `cache`.
        src_layer_range, dst_layer_range : range, optional
            Layers to copy; None or an empty one: all.
        tensor_num_per_layer : int
            2 if omitted.

        Raises
        ------
        TypeError, ValueError, LLMException
            What is wrong with the arguments, or how it ended.

        Warns
        -----
        UserWarning
            An unknown keyword; the original ignores it silently.
        """
        kinds = (CacheKeyByIdAndIndex,) if self._remote_accessible else (CacheKey, CacheKeyByIdAndIndex)
        check_isinstance("cache_key", cache_key, kinds)
        check_isinstance("cache", cache, Cache)
        check_uint32("batch_index", batch_index)
        check_int64("size", size)
        raise_if_false(size == -1 or size > 0, "size={} must be -1 or above 0", size)
        raise_if_true(cache.is_blocks_cache, "pull_cache is for caches of batch slots; use pull_blocks")
        key = self._native_slot(cache_key)
        layers = pulled_layers("pull_cache", kwargs)
        nbytes = size if size != -1 else self._engine.slot_bytes(cache.cache_id)
        self._engine.transfer(
            "pull_cache",
            cache.cache_id,
            key,
            lambda caches, into: caches.pull_cache(key, into, dst_batch_index=batch_index, size=nbytes, **layers),
            reading=True,
        )

    def pull_blocks(
        self,
        src_cache_key: AnyKey,
        dst_cache: Cache,
        src_blocks: Sequence[int] = (),
        dst_blocks: Sequence[int] = (),
        **kwargs: Any,
    ) -> None:
        """Copy blocks, or a batch slot, of a peer's cache into blocks of one of this node.

        Parameters
        ----------
        src_cache_key : BlocksCacheKey, CacheKey or CacheKeyByIdAndIndex
            The peer's cache; the last two name a batch slot of it.
        dst_cache : Cache
        src_blocks : list or tuple of int
            With a BlocksCacheKey: block ``src_blocks[i]`` goes to ``dst_blocks[i]``. Otherwise empty.
        dst_blocks : list or tuple of int
            Blocks of `dst_cache`; the pieces of a slot fill them in turn.
        src_layer_range, dst_layer_range, tensor_num_per_layer
            As for `pull_cache`.

        Raises
        ------
        TypeError, ValueError, LLMException
            What is wrong with the arguments, or how it ended.

        Warns
        -----
        UserWarning
            An unknown keyword; the original ignores it silently.
        """
        check_isinstance("src_cache_key", src_cache_key, (CacheKey, CacheKeyByIdAndIndex, BlocksCacheKey))
        check_isinstance("dst_cache", dst_cache, Cache)
        check_isinstance("src_blocks", src_blocks, (list, tuple), int)
        check_isinstance("dst_blocks", dst_blocks, (list, tuple), int)
        raise_if_false(dst_cache.is_blocks_cache, "pull_blocks is for blocks caches; use pull_cache")
        raise_if_false(len(dst_blocks) > 0, "dst_blocks is empty")
        key: Key
        sources = None
        if isinstance(src_cache_key, BlocksCacheKey):
            raise_if_false(len(src_blocks) > 0, "src_blocks is empty, and a BlocksCacheKey names no slot")
            sources = src_blocks
            key = _blocks_key(src_cache_key.cluster_id, src_cache_key.model_id)
        else:
            raise_if_true(len(src_blocks) > 0, "src_blocks needs a BlocksCacheKey")
            key = self._native_slot(src_cache_key)
        layers = pulled_layers("pull_blocks", kwargs)
        _check_not_negative("src_blocks", src_blocks)
        _check_not_negative("dst_blocks", dst_blocks)
        self._engine.transfer(
            "pull_blocks",
            dst_cache.cache_id,
            key,
            lambda caches, into: caches.pull_blocks(key, into, sources, dst_blocks, **layers),
            reading=True,
        )

    # Pushing. -----------------------------------------------------------------------------------------------

    def push_cache(
        self,
        dst_cache_key: CacheKeyByIdAndIndex,
        src_cache: Cache,
        src_batch_index: int = 0,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        size: int = -1,
        tensor_num_per_layer: int = 2,
    ) -> None:
        """Copy a batch slot of a cache of this node into one of a peer's cache. Needs remote_cache_accessible.

        Parameters
        ----------
        dst_cache_key : CacheKeyByIdAndIndex
            The peer's cache and slot.
        src_cache : Cache
        src_batch_index : int
            The slot of `src_cache`.
        src_layer_range, dst_layer_range : range, optional
            Layers to copy, as many on both sides; None: all that `src_cache` has, none of which is no error.
        size : int
            -1.
        tensor_num_per_layer : int

        Raises
        ------
        TypeError, ValueError, LLMException
            What is wrong with the arguments, or how it ended. The content of the peer's slot is then undefined.
        """
        self._check_pushing()
        check_isinstance("dst_cache_key", dst_cache_key, CacheKeyByIdAndIndex, allow_none=False)
        check_isinstance("src_cache", src_cache, Cache, allow_none=False)
        check_uint32("src_batch_index", src_batch_index)
        check_int64("size", size)
        raise_if_false(size == -1, "size={} must be -1", size)
        raise_if_true(src_cache.is_blocks_cache, "push_cache is for caches of batch slots; use push_blocks")
        layers = pushed_layers(src_cache, src_layer_range, dst_layer_range, tensor_num_per_layer)
        if layers is None:
            return
        key = self._native_slot(dst_cache_key)
        nbytes = self._engine.slot_bytes(src_cache.cache_id)
        self._engine.transfer(
            "push_cache",
            src_cache.cache_id,
            key,
            lambda caches, out_of: caches.push_cache(
                key, out_of, src_batch_index=src_batch_index, size=nbytes, **layers
            ),
            reading=False,
        )

    def push_blocks(
        self,
        dst_cache_key: BlocksCacheKey,
        src_cache: Cache,
        src_blocks: Sequence[int] = (),
        dst_blocks: Sequence[int] = (),
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
    ) -> None:
        """Copy blocks of a cache of this node into blocks of a peer's cache. Needs remote_cache_accessible.

        Parameters
        ----------
        dst_cache_key : BlocksCacheKey
            The peer's cache.
        src_cache : Cache
        src_blocks, dst_blocks : list or tuple of int
            Block ``src_blocks[i]`` goes to ``dst_blocks[i]``.
        src_layer_range, dst_layer_range, tensor_num_per_layer
            As for `push_cache`.

        Raises
        ------
        TypeError, ValueError, LLMException
            What is wrong with the arguments, or how it ended. The content of the peer's blocks is then undefined.
        """
        self._check_pushing()
        check_isinstance("dst_cache_key", dst_cache_key, BlocksCacheKey)
        check_isinstance("src_cache", src_cache, Cache)
        check_isinstance("src_blocks", src_blocks, (list, tuple), int)
        check_isinstance("dst_blocks", dst_blocks, (list, tuple), int)
        raise_if_false(src_cache.is_blocks_cache, "push_blocks is for blocks caches; use push_cache")
        raise_if_false(len(dst_blocks) > 0, "dst_blocks is empty")
        layers = pushed_layers(src_cache, src_layer_range, dst_layer_range, tensor_num_per_layer)
        key = _blocks_key(dst_cache_key.cluster_id, dst_cache_key.model_id)
        _check_not_negative("src_blocks", src_blocks)
        _check_not_negative("dst_blocks", dst_blocks)
        if layers is None:
            return
        self._engine.transfer(
            "push_blocks",
            src_cache.cache_id,
            key,
            lambda caches, out_of: caches.push_blocks(key, out_of, src_blocks, dst_blocks, **layers),
            reading=False,
        )

    def _check_pushing(self) -> None:
        raise_if_false(self._remote_accessible, "pushing needs enable_remote_cache_accessible")

    def transfer_cache_async(
        self,
        src_cache: Cache,
        layer_synchronizer: LayerSynchronizer,
        transfer_configs: Sequence[TransferConfig] | Sequence[TransferWithCacheKeyConfig],
        src_block_indices: Sequence[int] | None = None,
        dst_block_indices: Sequence[int] | None = None,
        dst_block_memory_size: int | None = None,
    ) -> CacheTask:
        """Send each layer of a cache to one or more peers as soon as it has been computed; returns at once.

        Parameters
        ----------
        src_cache : Cache
            Of ``Placement.DEVICE``, with two tensors for each layer.
        layer_synchronizer : LayerSynchronizer
            Asked for each layer that a config needs, in rising order, in a thread of the task.
        transfer_configs : list or tuple
            Of TransferWithCacheKeyConfig where remote_cache_accessible is on, otherwise of TransferConfig. Never
            changed. Layers of both ranges of one are paired from their starts.
        src_block_indices, dst_block_indices : list or tuple of int, optional
            Blocks, the same for all configs. Only the second: a batch slot goes to blocks. Neither: to a batch slot.
        dst_block_memory_size : int, optional
            Bytes of a block of the peers, which must be right; required where only `dst_block_indices` is given.

        Returns
        -------
        CacheTask
            Says how it ended. The memory is read until then.

        Raises
        ------
        TypeError, ValueError, LLMException
            What is wrong with the arguments. What is wrong with one config alone is in its result.
        """
        check_isinstance("src_cache", src_cache, Cache, allow_none=False)
        raise_if_true(src_cache.cache_desc.placement == Placement.HOST, "src_cache must be of Placement.DEVICE")
        for name, blocks in (("dst_block_indices", dst_block_indices), ("src_block_indices", src_block_indices)):
            if blocks is not None:
                check_list_uint64(name, blocks)
        if dst_block_memory_size is not None:
            check_uint64("dst_block_memory_size", dst_block_memory_size)
        sources = tuple(src_block_indices) if src_block_indices else None
        targets = tuple(dst_block_indices) if dst_block_indices else None
        if sources is not None:
            raise_if_true(targets is None, "src_block_indices needs dst_block_indices")
            raise_if_false(
                targets is not None and len(sources) == len(targets),
                "{} src_block_indices and {} dst_block_indices", len(sources), len(targets or ()),
            )  # fmt: skip
        raise_if_true(
            sources is None and targets is not None and dst_block_memory_size is None,
            "dst_block_indices alone needs dst_block_memory_size",
        )
        check_isinstance("layer_synchronizer", layer_synchronizer, LayerSynchronizer, allow_none=False)
        kind = TransferWithCacheKeyConfig if self._remote_accessible else TransferConfig
        check_isinstance("transfer_configs", transfer_configs, (list, tuple), kind, allow_none=False)
        raise_if_true(targets is None and dst_block_memory_size, "dst_block_memory_size needs dst_block_indices")
        num_tensors = src_cache.cache_desc.num_tensors
        raise_if_false(num_tensors % 2 == 0, "{} tensors are no whole layers of 2", num_tensors)
        ranges = [layers_of(config, num_tensors // 2, sources is not None) for config in transfer_configs]
        task = CacheTask(
            self._engine,
            src_cache.cache_id,
            num_tensors // 2,
            ranges,
            [self._begin_layers(config, sources, targets, dst_block_memory_size or 0) for config in transfer_configs],
        )
        task._start(layer_synchronizer)
        return task

    def _begin_layers(
        self,
        config: TransferConfig | TransferWithCacheKeyConfig,
        sources: Sequence[int] | None,
        targets: Sequence[int] | None,
        block_bytes: int,
    ) -> Begin:
        """Return what starts the transfer to one target; what is given is copied here."""
        target: NativeTransferConfig | NativeTransferWithCacheKeyConfig
        if isinstance(config, TransferConfig):
            cluster_id = config.dst_cluster_id
            target = NativeTransferConfig(
                cluster_id, tuple(config.dst_addrs), config.src_layer_range, config.src_batch_index
            )
        else:
            cluster_id = config.cache_key.cluster_id
            key = config.cache_key
            target = NativeTransferWithCacheKeyConfig(
                _blocks_key(cluster_id, key.model_id) if isinstance(key, BlocksCacheKey) else self._native_slot(key),
                config.src_layer_range,
                config.dst_layer_range,
                config.src_batch_index,
            )

        def begin(caches: NativeCacheManager, cache: NativeCache, gate: LayerGate) -> TransferTask:
            if block_bytes:
                here = cache.geometry.block_bytes if sources is not None else None
                check_block_bytes(block_bytes, here, self._engine.node.links.get(cluster_id), target)
            return caches.transfer_cache_async(cache, gate, [target], sources, targets, timeout=None)

        return begin

    # The rest. ----------------------------------------------------------------------------------------------

    def remap_registered_memory(self, mem_infos: MemInfo | list[MemInfo]) -> None:
        """Check the arguments: memory of the host, which is what there is, needs no mapping anew.

        Raises
        ------
        LLMException
            What is wrong with the arguments, or ``LLM_NOT_YET_LINK``: there is no link.
        """
        infos: list[Any] = mem_infos if isinstance(mem_infos, list) else [mem_infos]
        for info in infos:
            raise_if_false(isinstance(info, MemInfo), "mem_infos only support MemInfo, got {}", type(info).__name__)
            raise_if_false(info.mem_type == Memtype.MEM_TYPE_DEVICE, "mem_type must be MEM_TYPE_DEVICE")
            raise_if_false(bool(info.addr), "addr must not be 0")
            raise_if_false(info.size is not None and info.size > 0, "size={} must be above 0", info.size)
        raise_if_false(
            self._engine.has_links,
            "there is no link, so there is nothing to remap",
            status_code=LLMStatusCode.LLM_NOT_YET_LINK,
        )

    @staticmethod
    def check_cache_key(cache_key: CacheKey) -> None:
        """Check that a key for pulling names either a request or a prefix.

        Raises
        ------
        LLMException
            It names both, or neither.
        """
        request, prefix = cache_key.req_id != INVALID_ID, cache_key.prefix_id != INVALID_ID
        raise_if_false(request != prefix, "{!r} must name either a request or a prefix", cache_key)

    # Keys. --------------------------------------------------------------------------------------------------

    def _own_key(self, key: CacheKey) -> NativeCacheKey:
        return NativeCacheKey(self._engine.config.cluster_id, key.req_id, key.model_id, key.prefix_id)

    def _own_blocks_key(self, key: BlocksCacheKey | None) -> NativeBlocksCacheKey | None:
        return None if key is None else _blocks_key(self._engine.config.cluster_id, key.model_id)

    def _native_slot(self, key: CacheKey | CacheKeyByIdAndIndex) -> NativeCacheKey | NativeCacheKeyByIdAndIndex:
        if isinstance(key, CacheKey):
            self.check_cache_key(key)
            return NativeCacheKey(key.cluster_id, key.req_id, key.model_id, key.prefix_id)
        if key.cache_id <= 0:
            return NativeCacheKey(key.cluster_id, 0, 0)
        return NativeCacheKeyByIdAndIndex(key.cluster_id, key.cache_id, key.batch_index)


def _blocks_key(cluster_id: int, model_id: int) -> NativeBlocksCacheKey:
    try:
        return NativeBlocksCacheKey(cluster_id, model_id)
    except DataDistError as why:  # what the original says about numbers that do not fit
        raise TypeError(f"BlocksCacheKey({cluster_id}, {model_id}) cannot be used: {why}") from why


def _tensors(desc: CacheDesc) -> Tensors:
    # A data_type of None is found out here.
    return Tensors(desc.num_tensors, tuple(desc.shape), DataType(desc.data_type.value))


def _check_not_negative(name: str, blocks: Sequence[int]) -> None:
    if len(blocks) > 0 and min(blocks) < 0:
        raise TypeError(f"{name} has the negative index {min(blocks)}")
