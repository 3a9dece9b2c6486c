"""The drop-in's rules for arguments, one row each: what is wrong, the exception, and its status."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from aiodatadist.llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    CacheTask,
    DataType,
    LayerSynchronizer,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    MemInfo,
    Memtype,
    Placement,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from aiodatadist.llm_datadist.v2.cache_manager import CacheManager

from .llm_nodes import DECODER, INVALID, POOL, PROMPT, SUCCESS, Memory, cluster, node, options, pair, status_of

# The nodes live as long as the module.
pytestmark = [pytest.mark.keeps_native, pytest.mark.filterwarnings("ignore:Placement.DEVICE means host memory")]

DISABLED = LLMStatusCode.LLM_FEATURE_NOT_ENABLED
NOT_LINKED = LLMStatusCode.LLM_NOT_YET_LINK
NO_MEMORY = LLMStatusCode.LLM_OUT_OF_MEMORY
MISSING = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
NONE = 2**64 - 1
BAD: Any = None
KEY = BlocksCacheKey(PROMPT)
SLOT = CacheKeyByIdAndIndex(PROMPT, 2)
Kind = type[Exception] | LLMStatusCode


class Synchronizer(LayerSynchronizer):
    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return True


@dataclass
class Stage:
    """What the rows use: a decoder linked to a prompt, both with remote-accessible caches, and one with neither."""

    node: LLMDataDist
    caches: CacheManager
    blocks: Cache
    slots: Cache
    odd: Cache
    host: Cache
    pooled: Cache
    pooled_blocks: Cache
    hidden: Cache
    plain_node: LLMDataDist
    plain: CacheManager
    plain_slots: Cache


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with pair(mem_pool_cfg=POOL, host_mem_pool_cfg=POOL) as (prompt, decoder), node(9, remote=False) as plain_node:
        held = [Memory(prompt), Memory(prompt, contiguous=True)]
        blocks, slots = Memory(decoder), Memory(decoder, contiguous=True)
        odd = Memory(decoder, contiguous=True, tensors=5)
        hidden = Memory(decoder, contiguous=True, remote_accessible=False)
        desc = CacheDesc(4, [8, 64], DataType.DT_UINT8)
        cpu = [np.zeros((8, 64), np.uint8) for _ in range(4)]
        host = Cache.create_cpu_cache(
            CacheDesc(4, [8, 64], DataType.DT_UINT8, Placement.HOST), [int(one.ctypes.data) for one in cpu]
        )
        plain_slots = Memory(plain_node, contiguous=True)
        caches = decoder.cache_manager
        yield Stage(
            decoder, caches, blocks.cache, slots.cache, odd.cache, host, caches.allocate_cache(desc),
            caches.allocate_blocks_cache(desc), hidden.cache, plain_node, plain_node.cache_manager,
            plain_slots.cache,
        )  # fmt: skip
        del held, cpu


DESC = CacheDesc(2, [4, 8], DataType.DT_UINT8)
HOST_DESC = CacheDesc(2, [4, 8], DataType.DT_UINT8, Placement.HOST)
Row = tuple[str, Callable[[Stage], object], Kind]


def _of_node(name: str, call: Callable[[Any], object]) -> Callable[[Stage], object]:
    return lambda s: call(getattr(s.node, name))


def _of_caches(name: str, call: Callable[[Any], object]) -> Callable[[Stage], object]:
    return lambda s: call(getattr(s.caches, name))


def _with(call: Callable[[Stage, dict[str, Any]], object], extra: dict[str, Any]) -> Callable[[Stage], object]:
    return lambda s: call(s, extra)


def _task(s: Stage) -> CacheTask:
    return s.caches.transfer_cache_async(s.blocks, Synchronizer(), [])


def _async(s: Stage, *args: Any, cache: Any = None, configs: Any = None, sync: Any = None) -> CacheTask:
    config = TransferWithCacheKeyConfig(KEY, range(2), range(2))
    return s.caches.transfer_cache_async(
        s.blocks if cache is None else cache,
        Synchronizer() if sync is None else sync,
        [config] if configs is None else configs,
        *args,
    )


def _swap(s: Stage, pairs: Any = None, host: Any = None) -> None:
    s.caches.swap_blocks(s.host if host is None else host, s.blocks, {} if pairs is None else pairs)


ROWS: list[Row] = [
    # Life and roles.
    ("check_link_status", lambda s: s.node.check_link_status(1), INVALID),
    ("kv_cache_manager", lambda s: s.node.kv_cache_manager, INVALID),
    ("switch: role of text", lambda s: s.node.switch_role("MIX"), TypeError),
    ("switch: no role", lambda s: s.node.switch_role(BAD), KeyError),
    ("switch: options of text", lambda s: s.node.switch_role(LLMRole.MIX, "x"), TypeError),
    ("switch: no port", lambda s: s.plain_node.switch_role(LLMRole.MIX, {"llm.listenIpInfo": "1.2.3.4"}), INVALID),
    ("switch: IPv6", lambda s: s.plain_node.switch_role(LLMRole.MIX, {"llm.listenIpInfo": "[::1]:5"}), INVALID),
    ("switch: port of text", lambda s: s.plain_node.switch_role(LLMRole.MIX, {"llm.listenIpInfo": "a:b"}), ValueError),
    ("switch: linked", lambda s: s.node.switch_role(LLMRole.DECODER), LLMStatusCode.LLM_EXIST_LINK),
    # Linking.
    *[
        (f"{name}: {what}", _of_node(name, call), kind)
        for name in ("link_clusters", "unlink_clusters")
        for what, call, kind in (
            ("timeout 0", lambda link: link(cluster(1), 0), INVALID),
            ("timeout negative", lambda link: link(cluster(1), -1), INVALID),
            ("timeout of text", lambda link: link(cluster(1), "1"), TypeError),
            ("timeout None", lambda link: link(cluster(1), None), TypeError),
            ("timeout beyond int32", lambda link: link(cluster(1), 2**31), ValueError),
            ("clusters of text", lambda link: link("x"), TypeError),
            ("clusters None", lambda link: link(None), TypeError),
            ("one cluster alone", lambda link: link(cluster(1)[0]), TypeError),
            ("cluster of text", lambda link: link(["x"]), TypeError),
            ("no cluster id", lambda link: link([_without_id()]), TypeError),
        )
    ],
    ("link: no local address", lambda s: s.node.link_clusters([_without_local()]), INVALID),
    ("unlink: force of text", lambda s: s.node.unlink_clusters(cluster(7), 1000, "yes"), TypeError),
    ("link: address beyond IPv4", lambda s: s.node.link_clusters([_beyond_ipv4()]), TypeError),
    # Registering.
    *[
        (f"{name}: {what}", _of_caches(name, call), kind)
        for name in ("register_cache", "register_blocks_cache")
        for what, call, kind in (
            ("desc of int", lambda register: register(1, [1, 2]), TypeError),
            ("addrs of tuple", lambda register: register(DESC, (1, 2)), TypeError),
            ("addrs of text", lambda register: register(DESC, ["1", "2"]), TypeError),
            ("addrs None", lambda register: register(DESC, None), (TypeError, AttributeError)),
            ("desc None", lambda register: register(None, [1, 2]), (TypeError, AttributeError)),
            ("type None", lambda register: register(CacheDesc(2, [4, 8], BAD), [1, 2]), AttributeError),
            ("placement None", lambda register: register(_desc(placement=BAD), [1, 2]), AttributeError),
            ("no addrs", lambda register: register(DESC, []), INVALID),
            ("too few addrs", lambda register: register(DESC, [4096]), INVALID),
            ("address 0", lambda register: register(DESC, [4096, 0]), INVALID),
            ("key of int", lambda register: register(DESC, [1, 2], 1), TypeError),
            ("accessible of int", lambda register: register(DESC, [1, 2], remote_accessible=1), TypeError),
            ("no dims", lambda register: register(_desc(shape=[0, 8]), [1, 2]), INVALID),
            ("32 dims", lambda register: register(_desc(shape=[1] * 32), [1, 2]), INVALID),
            ("too large", lambda register: register(_desc(shape=[2**62, 8]), [1, 2]), INVALID),
            ("address negative", lambda register: register(DESC, [-1, 2]), TypeError),
        )
    ],
    ("register_cache: keys of blocks", lambda s: s.caches.register_cache(DESC, [1, 2], [KEY]), TypeError),
    ("register_cache: no tensors", lambda s: s.caches.register_cache(_desc(num_tensors=0), []), INVALID),
    ("register_blocks_cache: key of slots", lambda s: s.caches.register_blocks_cache(DESC, [1, 2], SLOT), TypeError),
    ("register: model taken", lambda s: Memory(s.node), INVALID),
    (
        "register: key twice",
        lambda s: Memory(s.node, contiguous=True, cache_keys=[CacheKey(1, 5), CacheKey(2, 5)]),
        INVALID,
    ),
    ("unregister: None", lambda s: s.caches.unregister_cache(BAD), TypeError),
    ("unregister: text", lambda s: s.caches.unregister_cache("1"), TypeError),
    ("unregister: beyond int64", lambda s: s.caches.unregister_cache(2**63), ValueError),
    # Allocating.
    ("allocate: desc of int", lambda s: s.caches.allocate_cache(1), TypeError),
    ("allocate: keys of text", lambda s: s.caches.allocate_cache(DESC, ["x"]), TypeError),
    ("allocate: type None", lambda s: s.caches.allocate_cache(CacheDesc(2, [4, 8], BAD)), AttributeError),
    ("allocate: no tensors", lambda s: s.caches.allocate_cache(_desc(num_tensors=0)), INVALID),
    ("allocate: no pool", lambda s: s.plain.allocate_cache(DESC), INVALID),
    (
        "allocate: too large",
        lambda s: s.caches.allocate_cache(_desc(shape=[2**20, 8])),
        NO_MEMORY,
    ),
    (
        "allocate: keys beyond slots",
        lambda s: s.caches.allocate_cache(DESC, [CacheKey(1, i) for i in range(5)]),
        INVALID,
    ),
    ("allocate: key twice", lambda s: s.caches.allocate_cache(DESC, [CacheKey(1, 5), CacheKey(1, 5)]), INVALID),
    ("allocate blocks: key of text", lambda s: s.caches.allocate_blocks_cache(DESC, "x"), TypeError),
    ("allocate blocks: no pool", lambda s: s.plain.allocate_blocks_cache(HOST_DESC), INVALID),
    ("allocate blocks: model taken", lambda s: s.caches.allocate_blocks_cache(DESC, KEY), INVALID),
    ("deallocate: id", lambda s: s.caches.deallocate_cache(1), TypeError),
    ("deallocate: blocks", lambda s: s.caches.deallocate_cache(s.pooled_blocks), INVALID),
    ("deallocate: no pool", lambda s: s.plain.deallocate_cache(s.plain_slots), DISABLED),
    ("deallocate blocks: id", lambda s: s.caches.deallocate_blocks_cache(1), TypeError),
    ("deallocate blocks: slots", lambda s: s.caches.deallocate_blocks_cache(s.pooled), INVALID),
    ("remove key: blocks", lambda s: s.caches.remove_cache_key(KEY), TypeError),
    ("remove key: no pool", lambda s: s.plain.remove_cache_key(CacheKey(1, 2)), DISABLED),
    # Copying.
    ("copy: dst of int", lambda s: s.caches.copy_cache(1, s.slots), TypeError),
    ("copy: src of int", lambda s: s.caches.copy_cache(s.slots, 1), TypeError),
    ("copy: blocks", lambda s: s.caches.copy_cache(s.slots, s.blocks), INVALID),
    ("copy: index negative", lambda s: s.caches.copy_cache(s.slots, s.slots, -1), ValueError),
    ("copy: index of text", lambda s: s.caches.copy_cache(s.slots, s.slots, 0, "1"), TypeError),
    ("copy: offset negative", lambda s: s.caches.copy_cache(s.slots, s.slots, 0, 1, -1), ValueError),
    ("copy: size 0", lambda s: s.caches.copy_cache(s.slots, s.slots, 0, 1, 0, 0), INVALID),
    ("copy: size -2", lambda s: s.caches.copy_cache(s.slots, s.slots, 0, 1, 0, -2), INVALID),
    ("copy: size beyond int64", lambda s: s.caches.copy_cache(s.slots, s.slots, 0, 1, 0, 2**63), ValueError),
    ("copy: size of the slot", lambda s: s.caches.copy_cache(s.slots, s.slots, 0, 1, 1, 64), INVALID),
    ("copy: offset of the slot", lambda s: s.caches.copy_cache(s.slots, s.slots, 0, 1, 65), INVALID),
    ("copy: index beyond", lambda s: s.caches.copy_cache(s.slots, s.slots, 8), INVALID),
    ("copy: other tensors", lambda s: s.caches.copy_cache(s.odd, s.slots), INVALID),
    ("copy: request negative", lambda s: s.caches.copy_cache(s.slots, s.slots, 0, 1, req_id=-1), ValueError),
    ("copy: unknown", lambda s: s.caches.copy_cache(s.slots, _unknown(False)), MISSING),
    ("copy_blocks: id", lambda s: s.caches.copy_blocks(1, {}), TypeError),
    ("copy_blocks: list", lambda s: s.caches.copy_blocks(s.blocks, [(1, 2)]), TypeError),
    ("copy_blocks: tuple values", lambda s: s.caches.copy_blocks(s.blocks, {1: (2,)}), TypeError),
    ("copy_blocks: text", lambda s: s.caches.copy_blocks(s.blocks, {1: ["2"]}), TypeError),
    ("copy_blocks: slots", lambda s: s.caches.copy_blocks(s.slots, {1: [2]}), INVALID),
    ("copy_blocks: beyond", lambda s: s.caches.copy_blocks(s.blocks, {1: [8]}), INVALID),
    ("swap: id", lambda s: s.caches.swap_blocks(1, s.blocks, {}), TypeError),
    ("swap: slots", lambda s: s.caches.swap_blocks(s.host, s.slots, {}), INVALID),
    ("swap: list", lambda s: _swap(s, [(0, 1)]), TypeError),
    ("swap: text", lambda s: _swap(s, {"0": 1}), TypeError),
    ("swap: source beyond", lambda s: _swap(s, {8: 0}), INVALID),
    ("swap: target beyond", lambda s: _swap(s, {0: 8}), INVALID),
    ("swap: one placement", lambda s: _swap(s, host=s.pooled_blocks), INVALID),
    ("swap: block size", lambda s: _swap(s, host=_cpu(4, [8, 32])), INVALID),
    ("swap: tensors", lambda s: _swap(s, host=_cpu(2, [8, 64])), INVALID),
    ("swap: None", lambda s: s.caches.swap_blocks(BAD, s.blocks, {}), AttributeError),
    # Pulling.
    ("pull_cache: by request", lambda s: s.caches.pull_cache(CacheKey(PROMPT, 1), s.slots), TypeError),
    ("pull_cache: by blocks", lambda s: s.caches.pull_cache(KEY, s.slots), TypeError),
    ("pull_cache: by text", lambda s: s.plain.pull_cache("x", s.plain_slots), TypeError),
    ("pull_cache: id", lambda s: s.caches.pull_cache(SLOT, 1), TypeError),
    ("pull_cache: blocks", lambda s: s.caches.pull_cache(SLOT, s.blocks), INVALID),
    ("pull_cache: no cache", lambda s: s.caches.pull_cache(SLOT, BAD), AttributeError),
    ("pull_cache: index negative", lambda s: s.caches.pull_cache(SLOT, s.slots, -1), ValueError),
    ("pull_cache: index None", lambda s: s.caches.pull_cache(SLOT, s.slots, BAD), TypeError),
    ("pull_cache: index beyond", lambda s: s.caches.pull_cache(SLOT, s.slots, 8), INVALID),
    ("pull_cache: size 0", lambda s: s.caches.pull_cache(SLOT, s.slots, 0, 0), INVALID),
    ("pull_cache: size -2", lambda s: s.caches.pull_cache(SLOT, s.slots, 0, -2), INVALID),
    ("pull_cache: size of text", lambda s: s.caches.pull_cache(SLOT, s.slots, 0, "1"), TypeError),
    ("pull_cache: size beyond", lambda s: s.caches.pull_cache(SLOT, s.slots, 0, 65), INVALID),
    ("pull_cache: peer's slot", lambda s: s.caches.pull_cache(CacheKeyByIdAndIndex(PROMPT, 2, 8), s.slots), MISSING),
    ("pull_cache: peer's cache", lambda s: s.caches.pull_cache(CacheKeyByIdAndIndex(PROMPT, 77), s.slots), MISSING),
    ("pull_cache: neither id", lambda s: s.plain.pull_cache(CacheKey(1, NONE), s.plain_slots), INVALID),
    ("pull_cache: both ids", lambda s: s.plain.pull_cache(CacheKey(1, 1, 0, 1), s.plain_slots), INVALID),
    ("pull_cache: not linked", lambda s: s.plain.pull_cache(CacheKey(1, 1), s.plain_slots), NOT_LINKED),
    ("pull_cache: from oneself", lambda s: s.caches.pull_cache(CacheKeyByIdAndIndex(DECODER, 2), s.slots), INVALID),
    ("pull_cache: unknown", lambda s: s.caches.pull_cache(SLOT, _unknown(False)), MISSING),
    ("pull_cache: not accessible", lambda s: s.caches.pull_cache(SLOT, s.hidden), INVALID),
    ("pull_blocks: by text", lambda s: s.caches.pull_blocks("x", s.blocks, [0], [0]), TypeError),
    ("pull_blocks: id", lambda s: s.caches.pull_blocks(KEY, 1, [0], [0]), TypeError),
    ("pull_blocks: slots", lambda s: s.caches.pull_blocks(KEY, s.slots, [0], [0]), INVALID),
    ("pull_blocks: sources of text", lambda s: s.caches.pull_blocks(KEY, s.blocks, "0", [0]), TypeError),
    ("pull_blocks: source of text", lambda s: s.caches.pull_blocks(KEY, s.blocks, ["0"], [0]), TypeError),
    ("pull_blocks: targets of range", lambda s: s.caches.pull_blocks(KEY, s.blocks, [0], range(1)), TypeError),
    ("pull_blocks: no targets", lambda s: s.caches.pull_blocks(KEY, s.blocks, [0]), INVALID),
    ("pull_blocks: no sources", lambda s: s.caches.pull_blocks(KEY, s.blocks, [], [0]), INVALID),
    ("pull_blocks: sources by id", lambda s: s.caches.pull_blocks(SLOT, s.blocks, [0], [0]), INVALID),
    ("pull_blocks: negative", lambda s: s.caches.pull_blocks(KEY, s.blocks, [-1], [0]), TypeError),
    ("pull_blocks: other length", lambda s: s.caches.pull_blocks(KEY, s.blocks, [0, 1], [0]), INVALID),
    ("pull_blocks: source beyond", lambda s: s.caches.pull_blocks(KEY, s.blocks, [8], [0]), INVALID),
    ("pull_blocks: target beyond", lambda s: s.caches.pull_blocks(KEY, s.blocks, [0], [8]), INVALID),
    ("pull_blocks: target twice", lambda s: s.caches.pull_blocks(KEY, s.blocks, [0, 1], [0, 0]), INVALID),
    ("pull_blocks: model None", lambda s: s.caches.pull_blocks(BlocksCacheKey(1, None), s.blocks, [0], [0]), TypeError),
    ("pull_blocks: cluster -1", lambda s: s.caches.pull_blocks(BlocksCacheKey(-1), s.blocks, [0], [0]), TypeError),
    ("pull_blocks: unknown model", lambda s: s.caches.pull_blocks(BlocksCacheKey(1, 9), s.blocks, [0], [0]), MISSING),
    ("pull_blocks: slot's end", lambda s: s.caches.pull_blocks(SLOT, s.blocks, [], [0, 1]), INVALID),
    *[
        (f"{name}: {what}", _with(pull, extra), kind)
        for name, pull in (
            ("pull_cache", lambda s, extra: s.caches.pull_cache(SLOT, s.slots, **extra)),
            ("pull_blocks", lambda s, extra: s.caches.pull_blocks(KEY, s.blocks, [0], [0], **extra)),
        )
        for what, extra, kind in (
            ("float a layer", {"tensor_num_per_layer": 2.0}, TypeError),
            ("text a layer", {"tensor_num_per_layer": "x"}, TypeError),
            ("None a layer", {"tensor_num_per_layer": None}, TypeError),
            ("-1 a layer", {"tensor_num_per_layer": -1}, ValueError),
            ("0 a layer", {"tensor_num_per_layer": 0}, INVALID),
            ("3 a layer", {"tensor_num_per_layer": 3, "src_layer_range": range(1)}, INVALID),
            ("layers of list", {"src_layer_range": [0]}, TypeError),
            ("layers with step", {"dst_layer_range": range(0, 2, 2)}, INVALID),
            ("layers negative", {"dst_layer_range": range(-1, 1)}, INVALID),
            ("layers beyond uint32", {"src_layer_range": range(2**32, 2**32 + 1)}, ValueError),
            ("layers beyond", {"src_layer_range": range(1, 3), "dst_layer_range": range(2)}, INVALID),
            ("other layers", {"src_layer_range": range(1), "dst_layer_range": range(2)}, INVALID),
            ("only target layers", {"dst_layer_range": range(1)}, INVALID),
        )
    ],
    # Pushing.
    ("push_cache: not enabled", lambda s: s.plain.push_cache(SLOT, s.plain_slots), INVALID),
    ("push_cache: no key", lambda s: s.caches.push_cache(BAD, s.slots), TypeError),
    ("push_cache: by blocks", lambda s: s.caches.push_cache(KEY, s.slots), TypeError),
    ("push_cache: no cache", lambda s: s.caches.push_cache(SLOT, BAD), TypeError),
    ("push_cache: blocks", lambda s: s.caches.push_cache(SLOT, s.blocks), INVALID),
    ("push_cache: index negative", lambda s: s.caches.push_cache(SLOT, s.slots, -1), ValueError),
    ("push_cache: index beyond", lambda s: s.caches.push_cache(SLOT, s.slots, 8), INVALID),
    ("push_cache: size", lambda s: s.caches.push_cache(SLOT, s.slots, size=64), INVALID),
    ("push_cache: size of text", lambda s: s.caches.push_cache(SLOT, s.slots, size="64"), TypeError),
    ("push_cache: peer's slot", lambda s: s.caches.push_cache(CacheKeyByIdAndIndex(PROMPT, 2, 8), s.slots), INVALID),
    ("push_cache: peer's cache", lambda s: s.caches.push_cache(CacheKeyByIdAndIndex(PROMPT, 77), s.slots), MISSING),
    ("push_cache: not accessible", lambda s: s.caches.push_cache(SLOT, s.hidden), INVALID),
    ("push_blocks: not enabled", lambda s: s.plain.push_blocks(KEY, s.plain_slots, [0], [0]), INVALID),
    ("push_blocks: by id", lambda s: s.caches.push_blocks(SLOT, s.blocks, [0], [0]), TypeError),
    ("push_blocks: no key", lambda s: s.caches.push_blocks(BAD, s.blocks, [0], [0]), AttributeError),
    ("push_blocks: slots", lambda s: s.caches.push_blocks(KEY, s.slots, [0], [0]), INVALID),
    ("push_blocks: text", lambda s: s.caches.push_blocks(KEY, s.blocks, ["0"], [0]), TypeError),
    ("push_blocks: no targets", lambda s: s.caches.push_blocks(KEY, s.blocks, [0], []), INVALID),
    ("push_blocks: no sources", lambda s: s.caches.push_blocks(KEY, s.blocks, [], [0]), INVALID),
    ("push_blocks: negative", lambda s: s.caches.push_blocks(KEY, s.blocks, [0], [-1]), TypeError),
    *[
        (f"{name}: {what}", _with(push, extra), kind)
        for name, push in (
            ("push_cache", lambda s, extra: s.caches.push_cache(SLOT, s.slots, **extra)),
            ("push_blocks", lambda s, extra: s.caches.push_blocks(KEY, s.blocks, [0], [0], **extra)),
        )
        for what, extra, kind in (
            ("float a layer", {"tensor_num_per_layer": 1.0}, TypeError),
            ("text a layer", {"tensor_num_per_layer": "x"}, TypeError),
            ("-1 a layer", {"tensor_num_per_layer": -1}, ValueError),
            ("0 a layer", {"tensor_num_per_layer": 0}, INVALID),
            ("3 a layer", {"tensor_num_per_layer": 3}, INVALID),
            ("layers of list", {"src_layer_range": [0]}, TypeError),
            ("layers empty", {"src_layer_range": range(0)}, INVALID),
            ("layers with step", {"dst_layer_range": range(0, 2, 2)}, INVALID),
            ("other layers", {"src_layer_range": range(1)}, INVALID),
            ("layers beyond", {"src_layer_range": range(1, 3)}, INVALID),
        )
    ],
    # Layer by layer.
    ("async: cache of text", lambda s: _async(s, cache="x"), TypeError),
    ("async: no cache", lambda s: s.caches.transfer_cache_async(BAD, Synchronizer(), []), TypeError),
    ("async: host", lambda s: _async(s, cache=s.host), INVALID),
    ("async: target of text", lambda s: _async(s, [0], ["0"]), TypeError),
    ("async: source negative", lambda s: _async(s, [-1], [0]), ValueError),
    ("async: target negative", lambda s: _async(s, [0], [-1]), ValueError),
    ("async: size of text", lambda s: _async(s, [0], [0], "64"), TypeError),
    ("async: size negative", lambda s: _async(s, [0], [0], -1), ValueError),
    ("async: no targets", lambda s: _async(s, [0]), INVALID),
    ("async: other length", lambda s: _async(s, [0], [0, 1]), INVALID),
    ("async: no size", lambda s: _async(s, None, [0]), INVALID),
    ("async: size alone", lambda s: _async(s, None, None, 64), INVALID),
    ("async: no synchronizer", lambda s: s.caches.transfer_cache_async(s.blocks, BAD, []), TypeError),
    ("async: synchronizer of text", lambda s: _async(s, [0], [0], sync="x"), TypeError),
    ("async: no configs", lambda s: s.caches.transfer_cache_async(s.blocks, Synchronizer(), BAD), TypeError),
    ("async: by address", lambda s: _async(s, [0], [0], configs=[TransferConfig(1, [1] * 4)]), TypeError),
    (
        "async: by key",
        lambda s: s.plain.transfer_cache_async(s.plain_slots, Synchronizer(), [_keyed(range(2))]),
        TypeError,
    ),
    ("async: odd tensors", lambda s: _async(s, cache=s.odd), INVALID),
    ("async: layers beyond", lambda s: _async(s, [0], [0], configs=[_keyed(range(1, 3))]), INVALID),
    ("async: changed ranges", lambda s: _async(s, [0], [0], configs=[_changed()]), INVALID),
    (
        "async: batch index",
        lambda s: _async(s, [0], [0], configs=[TransferWithCacheKeyConfig(SLOT, range(2), range(2), 1)]),
        INVALID,
    ),
    (
        "async: too few addresses",
        lambda s: s.plain.transfer_cache_async(s.plain_slots, Synchronizer(), [TransferConfig(1, [1])]),
        INVALID,
    ),
    ("async: unknown", lambda s: _async(s, [0], [0], cache=_unknown(True)), MISSING),
    ("task: timeout of text", lambda s: _task(s).synchronize("1"), TypeError),
    ("task: timeout negative", lambda s: _task(s).get_results(-1), ValueError),
    # Memory.
    ("remap: text", lambda s: s.caches.remap_registered_memory("x"), INVALID),
    ("remap: text in a list", lambda s: s.caches.remap_registered_memory(["x"]), INVALID),
    ("remap: host", lambda s: s.caches.remap_registered_memory(MemInfo(Memtype.MEM_TYPE_HOST, 1, 1)), INVALID),
    ("remap: address 0", lambda s: s.caches.remap_registered_memory(MemInfo(Memtype.MEM_TYPE_DEVICE, 0, 1)), INVALID),
    ("remap: size -1", lambda s: s.caches.remap_registered_memory(MemInfo(Memtype.MEM_TYPE_DEVICE, 1, -1)), INVALID),
    ("remap: not linked", lambda s: s.plain.remap_registered_memory([]), NOT_LINKED),
    ("size: type None", lambda s: CacheDesc(2, [4, 8], BAD).size, AttributeError),
    ("check key", lambda s: CacheManager.check_cache_key(CacheKey(1, NONE)), INVALID),
]


def _desc(num_tensors: int = 2, shape: Any = (4, 8), placement: Placement = Placement.DEVICE) -> CacheDesc:
    return CacheDesc(num_tensors, shape, DataType.DT_UINT8, placement)


def _unknown(is_blocks: bool) -> Cache:
    return Cache(999, CacheDesc(4, [8, 64], DataType.DT_UINT8), [1, 2, 3, 4], None, True, is_blocks)


def _cpu(tensors: int, shape: list[int]) -> Cache:
    desc = CacheDesc(tensors, shape, DataType.DT_UINT8, Placement.HOST)
    return Cache.create_cpu_cache(desc, list(range(1, tensors + 1)))


def _keyed(layers: range) -> TransferWithCacheKeyConfig:
    return TransferWithCacheKeyConfig(KEY, layers, layers)


def _changed() -> TransferWithCacheKeyConfig:
    config = _keyed(range(1))
    config.dst_layer_range = range(2)
    return config


def _without_id() -> Any:
    info = type(cluster(1)[0])()
    info.append_local_ip_info("127.0.0.1", 0)
    return info


def _without_local() -> Any:
    info = type(cluster(1)[0])()
    info.remote_cluster_id = 1
    return info


def _beyond_ipv4() -> Any:
    (info,) = cluster(5)
    info.append_remote_ip_info(2**32, 1)
    return info


@pytest.mark.parametrize(("call", "kind"), [pytest.param(*row[1:], id=row[0]) for row in ROWS])
def test_a_wrong_argument(stage: Stage, call: Callable[[Stage], object], kind: Any) -> None:
    with pytest.raises(LLMException if isinstance(kind, LLMStatusCode) else kind) as why:
        call(stage)
    assert status_of(why.value) == (kind if isinstance(kind, LLMStatusCode) else None)


def test_right_arguments_still_work(stage: Stage) -> None:
    """After all rows: none of them has changed anything."""
    s = stage
    s.caches.pull_blocks(KEY, s.blocks, (np.int64(0), 1), [2, np.uint8(3)])
    s.caches.pull_cache(SLOT, s.slots, np.int32(1), 64, src_layer_range=range(0), tensor_num_per_layer=np.int64(1))
    s.caches.push_blocks(KEY, s.blocks, [0], [0], range(1), range(1, 2))
    s.caches.push_cache(SLOT, s.slots)
    s.caches.copy_cache(s.slots, s.slots, 0, 1, req_id=5)
    s.caches.copy_blocks(s.blocks, {})
    s.caches.remap_registered_memory([])
    s.caches.remap_registered_memory([MemInfo(Memtype.MEM_TYPE_DEVICE, 1, 1)])
    s.caches.unregister_cache(12345)
    s.caches.remove_cache_key(CacheKey(1, 2))
    assert _task(s).synchronize(0) is SUCCESS
    assert s.node.link_clusters([]) == (INVALID, [])
    assert s.node.unlink_clusters(()) == (INVALID, [])
    assert s.node.unlink_clusters(cluster(77), 1000, None) == (SUCCESS, [SUCCESS])


def test_unknown_keywords_of_a_pull_warn(stage: Stage) -> None:
    with pytest.warns(UserWarning, match="pull_blocks has no parameters src_layer_rnage, x; they are ignored"):
        stage.caches.pull_blocks(KEY, stage.blocks, [0], [0], src_layer_rnage=range(1), x=1)
    with pytest.warns(UserWarning, match="pull_cache has no parameters timeout"):
        stage.caches.pull_cache(SLOT, stage.slots, timeout=1)


# Opening. ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "cluster_id", "kind"),
    [
        ("PROMPT", 1, TypeError),
        (1, 1, TypeError),
        (LLMRole.PROMPT, None, TypeError),
        (LLMRole.PROMPT, "1", TypeError),
        (LLMRole.PROMPT, -1, ValueError),
        (LLMRole.PROMPT, 2**64, ValueError),
    ],
)
def test_a_node_with_wrong_arguments(role: Any, cluster_id: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        LLMDataDist(role, cluster_id)


HIXL = {"transfer_backend": "hixl"}


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ("x", TypeError, "options"),
        (None, AttributeError, ""),
        ({"ge.flowGraphMemMaxSize": 1024}, TypeError, ""),
        ({"ge.flowGraphMemMaxSize": "1024,2048"}, INVALID, ""),
        ({"ge.flowGraphMemMaxSize": "1.23"}, INVALID, ""),
        ({"ge.flowGraphMemMaxSize": "-1"}, INVALID, ""),
        ({}, ImportError, "llm_datadist_v1"),
        ({"llm.EnableCacheManager": "0"}, ImportError, ""),
        ({"llm.LocalCommRes": "", "llm.EnableCacheManager": "0"}, INVALID, "EnableCacheManager"),
        ({"llm.TransferBackend": "hixl"}, INVALID, "EnableCacheManager"),
        (
            {"llm.TransferBackend": "hixl", "llm.EnableCacheManager": "1", "llm.EnableRemoteCacheAccessible": "0"},
            INVALID,
            "EnableRemoteCacheAccessible",
        ),
        ({"llm.TransferBackend": "hixl", "llm.EnableCacheManager": "1"}, INVALID, "listenIpInfo"),
        (options("127.0.0.1"), INVALID, "listenIpInfo"),
        (options("[::1]:26000"), INVALID, ""),
        (options("127.0.0.1:x"), ValueError, ""),
        (options("127.0.0.1:70000"), INVALID, ""),
        (options("203.0.113.7:26000"), LLMStatusCode.LLM_FAILED, "203.0.113.7"),
        (options(device_id=[0, 1]), INVALID, "deviceId"),
        (options("127.0.0.1:1", transfer_backend=""), INVALID, "hixl"),
        (options("127.0.0.1:1", rdma_traffic_class=133, **HIXL), INVALID, "TrafficClass"),
        (options("127.0.0.1:1", rdma_traffic_class=256, **HIXL), INVALID, "TrafficClass"),
        (options("127.0.0.1:1", rdma_service_level=8, **HIXL), INVALID, "ServiceLevel"),
        (options(link_total_time=2**31), INVALID, "LinkTotalTime"),
        (options(ge_options={"llm.SyncKvCacheWaitTime": "0"}) | {"llm.SyncKvCacheWaitTime": "x"}, INVALID, "Wait"),
        (options(mem_pool_cfg="{"), INVALID, "MemPoolConfig"),
        (options(mem_pool_cfg="[]"), INVALID, ""),
        (options(mem_pool_cfg="{}"), INVALID, "memory_size"),
        (options(mem_pool_cfg='{"memory_size": "1"}'), INVALID, ""),
        (options(mem_pool_cfg='{"memory_size": -1}'), INVALID, ""),
        (options(mem_pool_cfg='{"memory_size": 65535}'), INVALID, "pages"),
        (options(host_mem_pool_cfg='{"memory_size": 65536, "page_shift": 9}'), INVALID, "page_shift"),
        (options(host_mem_pool_cfg='{"memory_size": 65536, "page_shift": 31}'), INVALID, "page_shift"),
        (
            options(mem_pool_cfg=f'{{"memory_size": {2**61}, "page_shift": 30}}'),
            NO_MEMORY,
            "",
        ),
    ],
)
def test_options_that_cannot_be_used(stage: Stage, given: Any, kind: Any, text: str) -> None:
    made = LLMDataDist(LLMRole.MIX, 5)
    with pytest.raises(LLMException if isinstance(kind, LLMStatusCode) else kind, match=text or None) as why:
        made.init(given)
    assert status_of(why.value) == (kind if isinstance(kind, LLMStatusCode) else None)
    assert LLMDataDist.llm_engine_instance is None
    made.finalize()
    with pytest.raises(RuntimeError, match="not initialized"):
        _ = made.cache_manager


def test_no_role_is_found_out_late() -> None:
    made = LLMDataDist(BAD, 5)
    with pytest.raises(KeyError):
        made.init(options())


NOT_OPEN: list[Callable[[LLMDataDist], object]] = [
    lambda node: node.cache_manager,
    lambda node: node.kv_cache_manager,
    lambda node: node.link_clusters([]),
    lambda node: node.unlink_clusters([]),
    lambda node: node.check_link_status(1),
    lambda node: node.switch_role(LLMRole.MIX),
    lambda node: node.link("x", {}, ""),
    lambda node: node.unlink(1),
    lambda node: node.query_register_mem_status(1),
]


def test_what_needs_an_open_node() -> None:
    made = LLMDataDist(LLMRole.MIX, 2**64 - 1)
    assert made.cluster_id == 2**64 - 1
    made.finalize()
    for state in ("new", "closed"):
        for call in NOT_OPEN:
            with pytest.raises(RuntimeError, match="not initialized") as why:
                call(made)
            assert type(why.value) is RuntimeError, state
        made.init(options())
        made.finalize()
