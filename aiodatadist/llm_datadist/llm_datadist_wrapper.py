"""The original's native module: a number for each status, and functions that return them instead of raising.

Programs use the numbers; the functions are what its own Python code calls, and what tests put others in the place of.
They act on the engine of the live `LLMDataDist`, or on one of `initialize_v2`. Arguments are tuples:

=================== ==============================================================================================
description         number of tensors, data type, sequence dimension, shape, placement, whether dimension 0 is blocks
key                 cluster id, cache id or -1, batch index, request, prefix, model, whether it names a blocks cache
pull                size, batch index, source and target blocks, source and target tensors, -1, -1, tensors a layer
transfer            cache id, batch index, layer, target addresses, cluster id, model or cache id of the target, its
                    batch index, `PushType`, target layer, tensors a layer
blocks              bytes of a target block, source blocks, target blocks
copy                target and source cache id, target and source batch index, offset, size, request, pairs of blocks
cluster             cluster id, 0, local addresses, remote addresses
=================== ==============================================================================================
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from .. import (
    BlocksCacheKey,
    Cache,
    CacheKey,
    CacheKeyByIdAndIndex,
    CacheManager,
    DataDistError,
    LayerGate,
    Transfer,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from ._engine import Engine, Key, Peer, Tensors
from .data_type import DataType
from .data_type import calc_tensor_size as _calc_tensor_size
from .rank_table import check_link_arguments
from .status import LLMException, llm_error
from .status import LLMStatusCode as _Code
from .utils import log
from .v2.config import EngineConfig
from .v2.llm_datadist import ROLE_NAMES, LLMDataDist, listen_address
from .v2.llm_types import Placement, PushType, RegisterMemStatus

T = TypeVar("T")

kSuccess = int(_Code.LLM_SUCCESS)
kFailed = int(_Code.LLM_FAILED)
kParamInvalid = int(_Code.LLM_PARAM_INVALID)
kLLMWaitProcessTimeOut = int(_Code.LLM_WAIT_PROCESS_TIMEOUT)
kLLMKVCacheNotExist = int(_Code.LLM_KV_CACHE_NOT_EXIST)
kLLMRepeatRequest = int(_Code.LLM_REPEAT_REQUEST)
kLLMRequestAlreadyCompleted = int(_Code.LLM_REQUEST_ALREADY_COMPLETED)
kLLMEngineFinalized = int(_Code.LLM_ENGINE_FINALIZED)
kLLMNotYetLink = int(_Code.LLM_NOT_YET_LINK)
kAlreadyLink = int(_Code.LLM_ALREADY_LINK)
kLinKFailed = int(_Code.LLM_LINK_FAILED)  # spelled so in the original
kUnlinkFailed = int(_Code.LLM_UNLINK_FAILED)
kNotifyPromptUnlinkFailed = int(_Code.LLM_NOTIFY_PROMPT_UNLINK_FAILED)
kLLMClusterNumExceedLimit = int(_Code.LLM_CLUSTER_NUM_EXCEED_LIMIT)
kProcessingLink = int(_Code.LLM_PROCESSING_LINK)
kDeviceOutOfMemory = int(_Code.LLM_DEVICE_OUT_OF_MEMORY)
kPrefixAlreadyExist = int(_Code.LLM_PREFIX_ALREADY_EXIST)
kPrefixNotExist = int(_Code.LLM_PREFIX_NOT_EXIST)
kLLMSeqLenOverLimit = int(_Code.LLM_SEQ_LENOVERLIMIT)
kLLMNoFreeBlock = int(_Code.LLM_NO_FREE_BLOCK)
kLLMBlocksOutOfMemory = int(_Code.LLM_BLOCKS_OUT_OF_MEMORY)
kLLMExistLink = int(_Code.LLM_EXIST_LINK)
kLLMFeatureNotEnabled = int(_Code.LLM_FEATURE_NOT_ENABLED)
kLLMTimeout = int(_Code.LLM_TIMEOUT)
kLLMLinkBusy = int(_Code.LLM_LINK_BUSY)
kLLMOutOfMemory = int(_Code.LLM_OUT_OF_MEMORY)
kLLMDeviceMemError = int(_Code.LLM_DEVICE_MEM_ERROR)
kLLMSuspectRemoteError = int(_Code.LLM_SUSPECT_REMOTE_ERROR)

# The engine. ------------------------------------------------------------------------------------------------

_engine: Engine | None = None


def _live() -> Engine | None:
    node = LLMDataDist.llm_engine_instance
    return _engine if node is None else node._llm_datadist


def _result(call: Callable[[Engine], T], nothing: T, without: int = kFailed) -> tuple[int, T]:
    """Call with the engine; return the status and the result, or `nothing`. `without` is the status without engine."""
    engine = _live()
    if engine is None:
        return without, nothing
    try:
        return kSuccess, call(engine)
    except LLMException as why:
        log.error("%s", why)
        return int(why.status_code), nothing


def _status(call: Callable[[Engine], object], without: int = kFailed) -> int:
    return _result(call, None, without)[0]


def calc_tensor_size(shape: Sequence[int], dtype: int) -> int:
    """Return the bytes of a tensor; negative where it has no size."""
    return _calc_tensor_size(shape, DataType(dtype))


def dict_to_vector(pairs: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    """Return the items of a dict."""
    return list(pairs.items())


def initialize_v2(cluster_id: int, options: Mapping[str, str]) -> int:
    """Open an engine; the options name the role as ``llm.Role``."""
    global _engine
    if _live() is not None:
        return kFailed
    roles = {name: role for role, name in ROLE_NAMES.items()}
    try:
        _engine = Engine(EngineConfig.from_options(cluster_id, roles[options["llm.Role"]], options))
    except LLMException as why:
        log.error("%s", why)
        return int(why.status_code)
    return kSuccess


def finalize_v2() -> None:
    """Close the engine that `initialize_v2` has opened."""
    global _engine
    engine, _engine = _engine, None
    if engine is not None:
        engine.finalize()


# Links. -----------------------------------------------------------------------------------------------------


def link(name: str, ranks: dict[int, int], rank_table: str) -> tuple[int, int]:
    """Return the status and the id of a communicator."""
    return _result(lambda engine: engine.join(name, check_link_arguments(name, ranks, rank_table)), 0)


def unlink(comm_id: int) -> int:
    """Leave a communicator."""
    return _status(lambda engine: engine.leave(comm_id))


def query_register_mem_status(comm_id: int) -> tuple[int, int]:
    """Return the status and the `RegisterMemStatus` of a communicator."""
    status, state = _result(lambda engine: engine.joined(comm_id), RegisterMemStatus.FAILED, kParamInvalid)
    return status, state.value


def link_clusters_v2(clusters: Sequence[tuple[Any, ...]], timeout: int) -> tuple[int, list[int]]:
    """Link peers; return a status and one of each. `timeout` is in milliseconds."""
    return _clusters(clusters, lambda engine, peers: engine.link_clusters(peers, timeout / 1000))


def unlink_clusters_v2(clusters: Sequence[tuple[Any, ...]], timeout: int, force: bool) -> tuple[int, list[int]]:
    """Unlink peers; return a status and one of each. `timeout` is in milliseconds."""
    return _clusters(clusters, lambda engine, peers: engine.unlink_clusters(peers, timeout / 1000, force))


def _clusters(
    clusters: Sequence[tuple[Any, ...]], call: Callable[[Engine, list[Peer]], list[_Code]]
) -> tuple[int, list[int]]:
    peers = [Peer(cluster_id, local, remote) for cluster_id, _, local, remote in clusters]
    nothing: list[_Code] = []
    status, codes = _result(lambda engine: call(engine, peers), nothing)
    if status == kSuccess:
        failed = [code for code in codes if code != _Code.LLM_SUCCESS]
        status = int(failed[-1]) if failed else kSuccess if codes else kParamInvalid
    return status, [int(code) for code in codes]


def switch_role_v2(role: str, options: Mapping[str, str]) -> int:
    """Take another role, by its name, and listen where the options say."""
    roles = {name: member for member, name in ROLE_NAMES.items()}
    return _status(lambda engine: engine.switch_role(roles[role], listen_address(options)), kParamInvalid)


# Caches. ----------------------------------------------------------------------------------------------------


def _described(desc: tuple[Any, ...]) -> tuple[Tensors, bool]:
    """Return what a cache consists of, and whether it is a device's."""
    num_tensors, data_type, _, shape, placement, _ = desc
    return Tensors(num_tensors, shape, DataType(data_type)), placement == Placement.DEVICE.value


def _own_keys(engine: Engine, desc: tuple[Any, ...], keys: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    own = engine.config.cluster_id
    if desc[5]:
        return {"key": BlocksCacheKey(own, keys[0][5]) if keys else None}
    return {"keys": [_own_key(engine, key) for key in keys]}


def _own_key(engine: Engine, key: tuple[Any, ...]) -> CacheKey:
    return CacheKey(engine.config.cluster_id, key[3], key[5], key[4])


def _key(key: tuple[Any, ...]) -> Key:
    cluster_id, cache_id, batch_index, request, prefix, model, is_blocks = key
    if is_blocks:
        return BlocksCacheKey(cluster_id, model)
    if cache_id > 0:
        return CacheKeyByIdAndIndex(cluster_id, cache_id, batch_index)
    return CacheKey(cluster_id, request, model, prefix)


def register_cache(
    desc: tuple[Any, ...], addrs: Sequence[int], keys: Sequence[tuple[Any, ...]], remote_accessible: bool
) -> tuple[int, tuple[int, list[list[int]]]]:
    """Register memory; return a status, the id of the cache and its addresses."""
    tensors, device = _described(desc)

    def register(engine: Engine) -> tuple[int, list[list[int]]]:
        cache_id = engine.register(
            tensors, addrs, device=device, reachable=remote_accessible, offered=remote_accessible,
            **_own_keys(engine, desc, keys),
        )  # fmt: skip
        return cache_id, [list(addrs)]

    return _result(register, (-1, []))


def unregister_cache(cache_id: int) -> int:
    """Take a registered cache back."""
    return _status(lambda engine: engine.unregister(cache_id))


def allocate_cache_v2(
    desc: tuple[Any, ...], keys: Sequence[tuple[Any, ...]]
) -> tuple[int, tuple[int, list[list[int]]]]:
    """Allocate a cache; return a status, its id and its addresses."""
    tensors, device = _described(desc)

    def allocate(engine: Engine) -> tuple[int, list[list[int]]]:
        if not engine.has_pool(device):
            raise LLMException("there is no pool of that memory", status_code=_Code.LLM_FEATURE_NOT_ENABLED)
        cache_id, addrs = engine.allocate(tensors, device=device, **_own_keys(engine, desc, keys))
        return cache_id, [addrs]

    return _result(allocate, (-1, []))


def deallocate_cache_v2(cache_id: int) -> int:
    """Give an allocated cache back."""
    return _status(lambda engine: engine.deallocate(cache_id, at_once=False))


def remove_cache_key_v2(key: tuple[Any, ...]) -> int:
    """Take a key off its batch slot."""
    return _status(lambda engine: engine.remove_key(_own_key(engine, key)), kParamInvalid)


def check_capacity_v2(nbytes: int) -> int:
    """Say whether a pool has room for so many bytes."""
    return _status(lambda engine: engine.check_capacity(nbytes), kParamInvalid)


def remap_registered_memory(mem_infos: Sequence[tuple[int, int, int]]) -> int:
    """Do nothing: memory of the host needs no mapping anew. There must be a link."""

    def remap(engine: Engine) -> None:
        if not engine.has_links:
            raise LLMException("there is no link", status_code=_Code.LLM_NOT_YET_LINK)

    return _status(remap, kParamInvalid)


# Moving. ----------------------------------------------------------------------------------------------------


def _tensor_range(tensors: Sequence[int]) -> range | None:
    return range(tensors[0], tensors[-1] + 1) if tensors else None


def pull_cache_v2(cache_id: int, key: tuple[Any, ...], param: tuple[Any, ...]) -> int:
    """Pull blocks, or a batch slot, from a peer."""
    size, batch_index, sources, targets, source_tensors, target_tensors = param[:6]
    source = _key(key)
    options: dict[str, Any] = {
        "src_layer_range": _tensor_range(source_tensors),
        "dst_layer_range": _tensor_range(target_tensors),
        "tensor_num_per_layer": 1,
    }

    def pull(engine: Engine) -> None:
        nbytes = size if size != -1 else engine.slot_bytes(cache_id)
        slot: Any = source

        def start(caches: CacheManager, into: Cache) -> Transfer[None]:
            if targets:
                return caches.pull_blocks(source, into, sources or None, targets, **options)
            return caches.pull_cache(slot, into, dst_batch_index=batch_index, size=nbytes, **options)

        engine.transfer("pull_cache_v2", cache_id, source, start, reading=True)

    return _status(pull, kParamInvalid)


def transfer_cache_v2(task: object, config: tuple[Any, ...], blocks: tuple[Any, ...]) -> int:
    """Push one layer to a peer. `task` has no effect."""
    cache_id, batch_index, layer, addrs, cluster_id, name, target_index, kind, target_layer, per_layer = config
    _, sources, targets = blocks
    target: TransferConfig | TransferWithCacheKeyConfig
    if kind == PushType.NO_CACHE_KEY.value:
        target = TransferConfig(cluster_id, addrs, range(layer, layer + 1), batch_index)
    else:
        by_blocks = kind == PushType.BLOCKS_CACHE_KEY.value
        key = BlocksCacheKey(cluster_id, name) if by_blocks else CacheKeyByIdAndIndex(cluster_id, name, target_index)
        there = range(target_layer, target_layer + 1)
        target = TransferWithCacheKeyConfig(key, range(layer, layer + 1), there, batch_index)
    gate = LayerGate(layer + 1)
    gate.record(layer)
    over = threading.Event()
    ended: list[BaseException | None] = []

    def tell(_: int, why: BaseException | None) -> None:
        ended.append(why)
        over.set()

    def push(engine: Engine) -> None:
        tasks = engine.start_layerwise(
            cache_id,
            [
                lambda caches, cache: caches.transfer_cache_async(
                    cache, gate, [target], sources or None, targets or None, tensor_num_per_layer=per_layer
                )
            ],
            tell,
        )
        try:
            over.wait()
        except BaseException:  # KeyboardInterrupt
            engine.cancel(tasks)
            over.wait()
            raise
        (why,) = ended
        if why is not None:
            raise llm_error("transfer_cache_v2", why) if isinstance(why, DataDistError) else why

    return _status(push, kParamInvalid)


def copy_cache_v2(param: tuple[Any, ...]) -> int:
    """Copy within this node: pairs of blocks, or a part of a batch slot."""
    target, source, target_index, source_index, offset, size, _, pairs = param
    if pairs:
        return _status(
            lambda engine: engine.local(
                "copy_cache_v2",
                (target,),
                lambda caches, cache: caches.copy_blocks(cache, [list(one) for one in pairs]),
            ),
            kParamInvalid,
        )
    return _status(
        lambda engine: engine.local(
            "copy_cache_v2", (target, source),
            lambda caches, into, out_of: caches.copy_cache(
                into, out_of, dst_batch_index=target_index, src_batch_index=source_index, offset=offset, size=size
            ),
        ),
        kParamInvalid,
    )  # fmt: skip


def swap_blocks_v2(
    sources: Sequence[int], targets: Sequence[int], block_bytes: int, kind: int, pairs: Sequence[tuple[int, int]]
) -> int:
    """Copy blocks of `block_bytes` between memory at addresses. `kind`, into or out of the device, has no effect."""

    def swap(engine: Engine) -> None:
        both = [
            Tensors(len(addrs), (max(pair[side] for pair in pairs) + 1, block_bytes), DataType.DT_UINT8)
            for side, addrs in enumerate((sources, targets))
        ]
        engine.swap(both[0], sources, both[1], targets, dict(pairs))

    return _status(swap, kParamInvalid) if pairs else kSuccess
