"""The drop-in moves caches: the original's flows in one process, its quirks, threads, interrupts and ends."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import aiodatadist as adt
from aiodatadist.llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LayerSynchronizer,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    Placement,
    TransferConfig,
    TransferWithCacheKeyConfig,
    _engine,
    llm_datadist_wrapper,
)

from .endless import BLOCK_BYTES, BLOCKS, memory
from .llm_nodes import (
    DECODER,
    INVALID,
    POOL,
    PROMPT,
    SUCCESS,
    Memory,
    Waiter,
    cluster,
    fails,
    linked_ids,
    node,
    options,
    pair,
    until_linked,
)
from .waiting import reserved_address, until_now

pytestmark = pytest.mark.filterwarnings("ignore:Placement.DEVICE means host memory")

KEY = BlocksCacheKey(PROMPT)
TIMEOUT = LLMStatusCode.LLM_TIMEOUT
MISSING = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
NOT_LINKED = LLMStatusCode.LLM_NOT_YET_LINK
DEVICE_WARNING = "Placement.DEVICE means host memory"


@pytest.fixture
def where(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the tensors of `Memory` are: "host", or "npu" of the stand-in for HIXL."""
    with Memory.on_npu() if request.param == "npu" else contextlib.nullcontext():
        yield request.param


BOTH = pytest.mark.parametrize("where", ["host", pytest.param("npu", marks=pytest.mark.hixl)], indirect=True)


def equal(some: list[np.ndarray], others: list[np.ndarray], of: Any, to: Any) -> bool:
    return all(np.array_equal(one[of], other[to]) for one, other in zip(some, others, strict=True))


# The flows. -------------------------------------------------------------------------------------------------


@BOTH
def test_blocks(where: str) -> None:
    with pair() as (prompt, decoder):
        theirs, mine = Memory(prompt), Memory(decoder, seed=2)
        assert (theirs.cache.cache_id, mine.cache.cache_id) == (1, 1)
        assert mine.cache.tensor_addrs == mine.addrs
        assert mine.cache.per_device_tensor_addrs == [mine.addrs]
        assert mine.cache.is_blocks_cache
        decoder.cache_manager.pull_blocks(KEY, mine.cache, [0, 1, 5], [7, 2, 3])
        assert equal(theirs.tensors, mine.tensors, [0, 1, 5], [7, 2, 3])
        decoder.cache_manager.pull_blocks(
            KEY, mine.cache, [4], [4], src_layer_range=range(1), dst_layer_range=range(1, 2)
        )
        assert equal(theirs.tensors[:2], mine.tensors[2:], 4, 4)
        decoder.cache_manager.push_blocks(KEY, mine.cache, [6], [6], range(1, 2), range(1))
        assert equal(mine.tensors[2:], theirs.tensors[:2], 6, 6)
        # The link carries both directions.
        prompt.cache_manager.pull_blocks(BlocksCacheKey(DECODER), theirs.cache, [7], [0])
        assert equal(theirs.tensors, mine.tensors, 0, 7)


@BOTH
def test_slots(where: str) -> None:
    with pair() as (prompt, decoder):
        theirs, mine = Memory(prompt, contiguous=True), Memory(decoder, contiguous=True, seed=2)
        before = [tensor.copy() for tensor in mine.tensors]
        slot = CacheKeyByIdAndIndex(PROMPT, 1, 3)
        decoder.cache_manager.pull_cache(slot, mine.cache, 5)
        assert equal(theirs.tensors, mine.tensors, 3, 5)
        decoder.cache_manager.pull_cache(slot, mine.cache, 1, size=10)
        assert equal(theirs.tensors, mine.tensors, np.s_[3, :10], np.s_[1, :10])
        assert equal(before, mine.tensors, np.s_[1, 10:], np.s_[1, 10:])
        decoder.cache_manager.push_cache(CacheKeyByIdAndIndex(PROMPT, 1, 7), mine.cache, 2, range(1), range(1, 2))
        assert equal(mine.tensors[:2], theirs.tensors[2:], 2, 7)


@BOTH
def test_a_shorter_slot_takes_what_it_holds(where: str) -> None:
    """Without a size, as many bytes move as the local slot has."""
    with pair() as (prompt, decoder):
        theirs = Memory(prompt, contiguous=True)
        mine = Memory(decoder, contiguous=True, nbytes=16, seed=2)
        decoder.cache_manager.pull_cache(CacheKeyByIdAndIndex(PROMPT, 1, 3), mine.cache, 0)
        assert equal(theirs.tensors, mine.tensors, np.s_[3, :16], 0)


@BOTH
def test_a_slot_into_blocks(where: str) -> None:
    with pair() as (prompt, decoder):
        theirs = Memory(prompt, contiguous=True, nbytes=40)
        mine = Memory(decoder, nbytes=16, seed=2)
        before = [tensor.copy() for tensor in mine.tensors]
        decoder.cache_manager.pull_blocks(CacheKeyByIdAndIndex(PROMPT, 1, 2), mine.cache, [], [6, 1, 3])
        assert equal(theirs.tensors, mine.tensors, np.s_[2, :16], 6)
        assert equal(theirs.tensors, mine.tensors, np.s_[2, 16:32], 1)
        assert equal(theirs.tensors, mine.tensors, np.s_[2, 32:], np.s_[3, :8])
        assert equal(before, mine.tensors, np.s_[3, 8:], np.s_[3, 8:])


def test_by_request_and_by_prefix() -> None:
    with pair(remote=False) as (prompt, decoder):
        keys = [CacheKey(77, 5), CacheKey(77, 2**64 - 1), CacheKey(77, 2**64 - 1, 0, 6), CacheKey(77, 5, 1)]
        theirs = Memory(prompt, contiguous=True, cache_keys=keys)
        mine = Memory(decoder, contiguous=True, seed=2)
        for key, slot in (
            (CacheKey(PROMPT, 5), 0),
            (CacheKey(PROMPT, 5, 1), 3),
            (CacheKey(PROMPT, 2**64 - 1, prefix_id=6), 2),
            (CacheKeyByIdAndIndex(PROMPT, 1, 2), 2),  # a prefix's, which the original does not find
        ):
            for _ in range(2):  # registered caches keep their keys
                mine.tensors[0][...] = 0
                decoder.cache_manager.pull_cache(key, mine.cache, 7)
                assert equal(theirs.tensors, mine.tensors, slot, 7)
        into = Memory(decoder, nbytes=32, model=3, seed=3)
        decoder.cache_manager.pull_blocks(CacheKey(PROMPT, 5), into.cache, (), (1, 0))
        assert equal(theirs.tensors, into.tensors, np.s_[0, 32:], 0)
        with fails(MISSING, "request|req_id"):
            decoder.cache_manager.pull_cache(CacheKey(PROMPT, 99), mine.cache)
        with fails(INVALID, "enable_remote_cache_accessible"):
            decoder.cache_manager.push_blocks(KEY, into.cache, [0], [0])


def test_what_was_registered_after_linking_is_seen() -> None:
    with pair() as (prompt, decoder):
        mine = Memory(decoder, seed=2)
        for model in range(20):
            theirs = Memory(prompt, model=model, seed=model)
            decoder.cache_manager.pull_blocks(BlocksCacheKey(PROMPT, model), mine.cache, [1], [2])
            assert equal(theirs.tensors, mine.tensors, 1, 2)
            theirs = Memory(prompt, contiguous=True, seed=model)
            decoder.cache_manager.push_cache(CacheKeyByIdAndIndex(PROMPT, theirs.cache.cache_id, 4), slots(decoder), 3)


def test_a_link_is_used_as_soon_as_its_maker_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other side may hear a moment later that the link is ready, and its user earlier."""
    late, check_ready = [], adt.Link._check_ready
    came = threading.Event()

    def check_late(link: adt.Link) -> None:
        if link.cluster_id == DECODER and not came.is_set():
            late.append(link)
        else:
            check_ready(link)

    monkeypatch.setattr(adt.Link, "_check_ready", check_late)
    with reserved_address() as address, node(PROMPT, address) as prompt, node(DECODER) as decoder:
        held, mine = Memory(prompt), Memory(decoder, seed=2)
        assert decoder.link_clusters(cluster(PROMPT, address), 60_000)[0] is SUCCESS
        assert linked_ids(prompt) == set()
        key = BlocksCacheKey(DECODER)
        waiters = [
            Waiter(lambda: prompt.cache_manager.push_blocks(key, held.cache, [1], [2])),
            Waiter(
                lambda: prompt.cache_manager.transfer_cache_async(
                    held.cache, Model(), [keyed(range(2), range(2), key)], [3], [4]
                ).synchronize()
            ),
        ]
        until_now(lambda: late and late[0]._owner._slots[DECODER].attempt is not None)
        came.set()
        late[0]._runtime.loop.call_soon_threadsafe(check_ready, late[0])
        assert [waiter.join() for waiter in waiters] == [None, SUCCESS]
        assert equal(held.tensors, mine.tensors, [1, 3], [2, 4])


def slots(owner: LLMDataDist) -> Cache:
    return Memory(owner, contiguous=True).cache


def test_element_types() -> None:
    with pair() as (prompt, decoder):
        for number, kind in enumerate(DataType):
            both = []
            for owner, fill in ((prompt, 7), (decoder, 0)):
                desc = CacheDesc(2, [4, 3, 2], kind)
                raw = [np.full(desc.size, fill, np.uint8) for _ in range(2)]
                addrs = [int(one.ctypes.data) for one in raw]
                key = BlocksCacheKey(owner.cluster_id, number)
                both.append((raw, owner.cache_manager.register_blocks_cache(desc, addrs, key)))
            (_, _), (mine, cache) = both
            decoder.cache_manager.pull_blocks(BlocksCacheKey(PROMPT, number), cache, [0], [3])
            size = len(mine[0])
            assert [int(one.sum()) for one in mine] == [7 * size // 4] * 2


# Quirks. ----------------------------------------------------------------------------------------------------


def test_ids_begin_anew_with_each_init() -> None:
    made = LLMDataDist(LLMRole.MIX, 5)
    for _ in range(3):
        made.init(options(mem_pool_cfg=POOL))
        manager = made.cache_manager
        made.init({})  # ignored
        assert made.cache_manager is manager
        ids = [Memory(made).cache.cache_id]
        ids.append(manager.allocate_cache(CacheDesc(1, [4, 8], DataType.DT_INT8)).cache_id)
        host, device = cpu(), Memory(made, model=1)
        manager.swap_blocks(host[0], device.cache, {0: 1})
        ids.append(device.cache.cache_id)
        ids.append(Memory(made, model=2).cache.cache_id)
        assert ids == [1, 2, 3, 4]
        other = LLMDataDist(LLMRole.MIX, 6)
        with fails(LLMStatusCode.LLM_FAILED, "another LLMDataDist is live"):
            other.init(options())
        made.finalize()
        made.finalize()


@BOTH
def test_id_zero_is_the_key_of_request_zero(where: str) -> None:
    with pair() as (prompt, decoder):
        theirs = Memory(prompt, contiguous=True, cache_keys=[CacheKey(PROMPT, 9), CacheKey(PROMPT, 0)])
        mine = Memory(decoder, contiguous=True, seed=2)
        decoder.cache_manager.pull_cache(CacheKeyByIdAndIndex(PROMPT, 0), mine.cache, 4)
        assert equal(theirs.tensors, mine.tensors, 1, 4)
        decoder.cache_manager.push_cache(CacheKeyByIdAndIndex(PROMPT, -3), mine.cache, 5)
        assert equal(mine.tensors, theirs.tensors, 5, 1)


def test_one_tensor_is_no_layer() -> None:
    with pair() as (prompt, decoder):
        theirs = Memory(prompt, contiguous=True, tensors=1)
        mine = Memory(decoder, contiguous=True, tensors=1, seed=2)
        slot = CacheKeyByIdAndIndex(PROMPT, 1)
        with fails(INVALID):
            decoder.cache_manager.pull_cache(slot, mine.cache, src_layer_range=range(1), dst_layer_range=range(1))
        decoder.cache_manager.pull_cache(slot, mine.cache)
        assert equal(theirs.tensors, mine.tensors, 0, 0)
        mine.tensors[0][1] = 1
        decoder.cache_manager.push_cache(slot, mine.cache, 1)  # no layers: nothing to do
        assert equal(theirs.tensors, mine.tensors, 0, 0)


def test_numbers_that_are_no_memory() -> None:
    with pair() as (_, decoder):
        caches = decoder.cache_manager
        desc = CacheDesc(2, [4, 8], DataType.DT_INT8)
        for addrs in ([1, 2], [1, 1], [1 << 46, 2 << 46]):
            with pytest.warns(RuntimeWarning, match="is no memory of this process"):
                cache = caches.register_blocks_cache(desc, addrs)
            assert cache.tensor_addrs == addrs
            with fails(INVALID, "memory|mapped"):
                caches.pull_blocks(KEY, cache, [0], [0])
            with fails(INVALID):
                caches.copy_blocks(cache, {0: [1]})
            caches.unregister_cache(cache.cache_id)
            caches.unregister_cache(cache.cache_id)
            with fails(MISSING):
                caches.pull_blocks(KEY, cache, [0], [0])
        assert cache.cache_id == 3


@pytest.mark.filterwarnings("default")
def test_device_memory_is_host_memory_with_one_warning() -> None:
    _engine._warn_of_host_memory.cache_clear()
    with node(1) as one, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for model in range(3):
            Memory(one, model=model)
    assert [str(one.message).startswith(DEVICE_WARNING) for one in caught] == [True]


def test_what_peers_may_reach() -> None:
    """DEVICE is for peers and HOST is not, unless the option is off, where the original does not look."""
    desc = CacheDesc(2, [4, 8], DataType.DT_UINT8, Placement.HOST)
    for remote, reached in ((True, False), (False, True)):
        with pair(remote=remote) as (prompt, decoder):
            theirs, mine = Memory(prompt, tensors=2), Memory(decoder, blocks=4, nbytes=8, tensors=2, seed=2)
            assert theirs.cache.cache_id == 1
            raw = [np.full((4, 8), 3, np.uint8) for _ in range(2)]
            addrs = [int(one.ctypes.data) for one in raw]
            prompt.cache_manager.register_blocks_cache(desc, addrs, BlocksCacheKey(1, 5))
            prompt.cache_manager.register_blocks_cache(desc, addrs, BlocksCacheKey(1, 6), False)
            prompt.cache_manager.register_blocks_cache(desc, addrs, BlocksCacheKey(1, 7), True)
            for model, found in ((5, reached), (6, False), (7, True)):
                with contextlib.nullcontext() if found else fails(MISSING):
                    decoder.cache_manager.pull_blocks(BlocksCacheKey(PROMPT, model), mine.cache, [0], [0])


# Within a node. ---------------------------------------------------------------------------------------------


def cpu(fill: int = 9) -> tuple[Cache, list[np.ndarray]]:
    raw = [np.full((8, 64), fill, np.uint8) for _ in range(4)]
    desc = CacheDesc(4, [8, 64], DataType.DT_UINT8, Placement.HOST)
    return Cache.create_cpu_cache(desc, [int(one.ctypes.data) for one in raw]), raw


def test_copies() -> None:
    with node(1) as one:
        caches = one.cache_manager
        first, second = Memory(one, contiguous=True), Memory(one, contiguous=True, seed=2)
        caches.copy_cache(second.cache, first.cache, 3, 4)
        assert equal(first.tensors, second.tensors, 4, 3)
        caches.copy_cache(first.cache, first.cache, 0, 1, offset=8, size=4)
        assert equal(first.tensors, first.tensors, np.s_[0, 8:12], np.s_[1, 8:12])
        assert not equal(first.tensors, first.tensors, 0, 1)
        blocks = Memory(one)
        caches.copy_blocks(blocks.cache, {0: [1, 2], 3: [4]})
        assert equal(blocks.tensors, blocks.tensors, [0, 0, 3], [1, 2, 4])


def test_swapping_out_and_in() -> None:
    with node(1) as one:
        caches, device, (host, raw) = one.cache_manager, Memory(one), cpu()
        caches.swap_blocks(device.cache, host, {0: 3, 1: 4})
        assert equal(device.tensors, raw, [0, 1], [3, 4])
        caches.swap_blocks(host, device.cache, {3: 7, 0: 6})
        assert equal(device.tensors, device.tensors, 0, 7)
        assert equal(raw, device.tensors, 0, 6)
        with fails(LLMStatusCode.LLM_FAILED, "mapped"):
            caches.swap_blocks(
                Cache.create_cpu_cache(host.cache_desc, [(1 << 46) + 512 * i for i in range(4)]), device.cache, {0: 0}
            )


def test_pools() -> None:
    desc = CacheDesc(4, [8, 64], DataType.DT_UINT8)
    host_desc = CacheDesc(4, [8, 64], DataType.DT_UINT8, Placement.HOST)
    with pair(remote=False, mem_pool_cfg=POOL, host_mem_pool_cfg=POOL) as (prompt, decoder):
        caches, mine = prompt.cache_manager, Memory(decoder, contiguous=True, seed=2)

        def allocate(*keys: CacheKey, of: CacheDesc = desc, fill: int = 5) -> Cache:
            cache = caches.allocate_cache(of, keys)
            for address in cache.tensor_addrs:
                ctypes.memset(address, fill, desc.size)
            return cache

        def pull(key: CacheKey) -> None:
            decoder.cache_manager.pull_cache(key, mine.cache)

        def is_gone(key: CacheKey) -> bool:
            """A key goes with its pull, or by its owner; peers hear of that a moment later."""
            try:
                pull(key)
            except LLMException as why:
                return why.status_code is MISSING
            return False

        kept = allocate(CacheKey(PROMPT, 1), CacheKey(PROMPT, 2), CacheKey(PROMPT, 2**64 - 1, 0, 3))
        pull(CacheKey(PROMPT, 1))
        assert [int(one[0].sum()) for one in mine.tensors] == [5 * 64] * 4
        until_now(lambda: is_gone(CacheKey(PROMPT, 1)))
        caches.deallocate_cache(kept)
        assert kept.tensor_addrs == []
        pull(CacheKey(PROMPT, 2))  # the other keys keep the memory
        for _ in range(2):
            pull(CacheKey(PROMPT, 2**64 - 1, 0, 3))  # a prefix is not counted
        caches.remove_cache_key(CacheKey(PROMPT, 2**64 - 1, 0, 3))
        until_now(lambda: is_gone(CacheKey(PROMPT, 2**64 - 1, 0, 3)))
        # All the memory is there again and again.
        large = CacheDesc(1, [16, 65536], DataType.DT_UINT8)
        for _ in range(3):
            cache = caches.allocate_blocks_cache(large, BlocksCacheKey(PROMPT, 8))
            with fails(LLMStatusCode.LLM_OUT_OF_MEMORY):
                allocate()
            allocate(of=host_desc)  # of the other pool
            caches.deallocate_blocks_cache(cache)
        caches.deallocate_blocks_cache(cpu()[0])
        registered = Memory(prompt, contiguous=True, cache_keys=[CacheKey(PROMPT, 50)])
        caches.remove_cache_key(CacheKey(PROMPT, 50))
        caches.deallocate_cache(registered.cache)
        pull(CacheKey(PROMPT, 50))  # neither touches a registered one


# Layer by layer. --------------------------------------------------------------------------------------------


class Model(LayerSynchronizer):
    """Computes layers: writes them, and says so."""

    def __init__(self, compute: Callable[[int], object] = lambda layer: True) -> None:
        self.compute = compute
        self.asked: list[tuple[int, int | None]] = []

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        self.asked.append((layer_index, timeout_in_millis))
        return bool(self.compute(layer_index))


def keyed(source: range, target: range, key: Any = KEY) -> TransferWithCacheKeyConfig:
    return TransferWithCacheKeyConfig(key, source, target)


@BOTH
def test_layers_by_key(where: str) -> None:
    with pair() as (prompt, decoder):
        theirs, mine = Memory(prompt, tensors=8), Memory(decoder, tensors=8, seed=2)

        def compute(layer: int) -> bool:
            for tensor in (2 * layer, 2 * layer + 1):
                mine.write(tensor, layer + 1)
            return True

        model = Model(compute)
        configs = [keyed(range(1, 3), range(2)), keyed(range(3, 4), range(3, 4))]
        task = decoder.cache_manager.transfer_cache_async(mine.cache, model, configs, [0, 1], [5, 6])
        assert task.synchronize() is SUCCESS
        assert task.get_results(60_000) == [SUCCESS, SUCCESS]  # two of one peer have a result each
        assert model.asked == [(1, None), (2, None), (3, None)]
        assert [int(one[5, 0]) for one in theirs.tensors][:4] == [2, 2, 3, 3]
        assert [int(one[6, 0]) for one in theirs.tensors][6:] == [4, 4]


@BOTH
def test_layers_of_slots_and_into_blocks(where: str) -> None:
    with pair() as (prompt, decoder):
        slot, blocks = Memory(prompt, contiguous=True), Memory(prompt, nbytes=32)
        mine = Memory(decoder, contiguous=True, seed=2)
        start = decoder.cache_manager.transfer_cache_async
        config = TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(PROMPT, 1, 6), range(2), range(2), 3)
        assert start(mine.cache, Model(), [config]).synchronize() is SUCCESS
        assert equal(mine.tensors, slot.tensors, 3, 6)
        into = keyed(range(2), range(2))
        assert start(mine.cache, Model(), (into,), None, [7, 1], 32).synchronize() is SUCCESS
        assert equal(mine.tensors, blocks.tensors, np.s_[0, :32], 7)
        assert equal(mine.tensors, blocks.tensors, np.s_[0, 32:], 1)
        assert start(mine.cache, Model(), [into], None, [7], 16).get_results() == [INVALID]  # not the peer's size


@BOTH
def test_layers_by_address(where: str) -> None:
    with pair(remote=False) as (prompt, decoder):
        theirs, mine = Memory(prompt, contiguous=True), Memory(decoder, contiguous=True, seed=2)
        offset = 3 * 64
        config = TransferConfig(PROMPT, [address + offset for address in theirs.addrs], src_batch_index=2)
        task = decoder.cache_manager.transfer_cache_async(mine.cache, Model(), [config])
        assert task.get_results() == [SUCCESS]
        assert equal(mine.tensors, theirs.tensors, 2, 3)
        assert config.src_layer_range is None  # ours to read, not to change
        blocks, source = Memory(prompt, model=1), Memory(decoder, model=1, seed=3)
        config = TransferConfig(PROMPT, blocks.addrs[2:], range(1, 2))
        task = decoder.cache_manager.transfer_cache_async(source.cache, Model(), [config], [1, 2], [4, 5], 64)
        assert task.get_results() == [SUCCESS]
        assert equal(source.tensors[2:], blocks.tensors[2:], [1, 2], [4, 5])
        wrong = TransferConfig(PROMPT, [1 << 46] * 4)
        assert decoder.cache_manager.transfer_cache_async(mine.cache, Model(), [wrong]).get_results() == [MISSING]


@BOTH
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failing_layer_stops_only_who_needs_it(where: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pair() as (prompt, decoder):
        theirs, mine = Memory(prompt, tensors=8), Memory(decoder, tensors=8, seed=2)
        configs = [
            keyed(range(4), range(4)),
            keyed(range(1), range(1)),
            keyed(range(2, 4), range(2, 4)),
            keyed(range(1), range(1), BlocksCacheKey(PROMPT, 99)),
            keyed(range(1), range(1), BlocksCacheKey(99)),
        ]

        def start(compute: Callable[[int], object]) -> tuple[Any, Model]:
            model = Model(compute)
            return decoder.cache_manager.transfer_cache_async(mine.cache, model, configs, [0], [0]), model

        task, model = start(lambda layer: layer != 1)
        assert task.get_results() == [INVALID, SUCCESS, SUCCESS, MISSING, NOT_LINKED]
        assert task.synchronize() is INVALID
        assert [layer for layer, _ in model.asked] == [0, 1, 2, 3]
        assert equal(mine.tensors[4:], theirs.tensors[4:], 0, 0)
        task, model = start(lambda layer: layer < 1 or 1 / 0)
        assert task.get_results() == [LLMStatusCode.LLM_FAILED, SUCCESS, LLMStatusCode.LLM_FAILED, MISSING, NOT_LINKED]
        assert [layer for layer, _ in model.asked] == [0, 1, 2]  # nobody needs layer 3 any more
        assert "ZeroDivisionError" in capsys.readouterr().out


def test_waiting_for_layers_ends_in_time() -> None:
    go = threading.Event()
    with pair() as (prompt, decoder):
        held, mine = Memory(prompt), Memory(decoder, seed=2)
        task = decoder.cache_manager.transfer_cache_async(
            mine.cache, Model(lambda layer: go.wait(60)), [keyed(range(2), range(2))] * 3, [0], [0]
        )
        assert task.synchronize(1) is TIMEOUT
        assert task.get_results(1) == [TIMEOUT] * 3
        go.set()
        assert task.get_results() == [SUCCESS] * 3  # it went on
        go.clear()
        task = decoder.cache_manager.transfer_cache_async(
            mine.cache, Model(lambda layer: go.wait(60)), [keyed(range(2), range(2))], [0], [0]
        )
        decoder.finalize()
        assert task.synchronize() is LLMStatusCode.LLM_FAILED
        go.set()
        del held


# Threads. ---------------------------------------------------------------------------------------------------


def test_eight_threads_pull_on_four_links(scale: Callable[[int], int]) -> None:
    pulls = scale(1000)
    with contextlib.ExitStack() as stack:
        decoder = stack.enter_context(node(100))
        sources = []
        for number in range(4):
            address = stack.enter_context(reserved_address())
            prompt = stack.enter_context(node(number + 1, address))
            sources.append(Memory(prompt, blocks=16, nbytes=256, tensors=2, seed=number))
            assert decoder.link_clusters(cluster(number + 1, address), 60_000)[0] is SUCCESS
        mine = Memory(decoder, blocks=8, nbytes=256, tensors=2, seed=99)
        wrong: list[Any] = []
        barrier = threading.Barrier(8)

        def pull(number: int) -> None:
            try:
                barrier.wait(60)
                for i in range(pulls):
                    owner, block = (number + i) % 4, (7 * i + number) % 16
                    decoder.cache_manager.pull_blocks(BlocksCacheKey(owner + 1), mine.cache, [block], [number])
                    if not equal(sources[owner].tensors, mine.tensors, block, number):
                        wrong.append((number, i))
            except BaseException as why:
                wrong.append(why)

        threads = [threading.Thread(target=pull, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


def test_a_call_wakes_the_loop_once_and_is_woken_once() -> None:
    with pair() as (prompt, decoder):
        held, mine = Memory(prompt), Memory(decoder, seed=2)
        assert decoder._llm_datadist is not None
        portal = decoder._llm_datadist._portal
        wakes: list[Any] = []

        class Counted:
            def call_soon_threadsafe(self, callback: Callable[[], object]) -> None:
                wakes.append(callback)
                loop.call_soon_threadsafe(callback)

        loop = portal._loop
        portal._loop = Counted()
        for count in range(1, 4):
            decoder.cache_manager.pull_blocks(KEY, mine.cache, [0], [0])
            assert len(wakes) == count
        assert len({id(wake.__self__._ended) for wake in wakes}) == 3  # one lock each is all that is waited for
        del held


class Endless:
    """A pull of a TiB, from a prompt to a decoder."""

    def __init__(self, prompt: LLMDataDist, decoder: LLMDataDist) -> None:
        self._decoder = decoder
        self._caches = decoder.cache_manager
        self._source = np.ones((1, BLOCK_BYTES), np.uint8)
        self.target = memory()
        self._key = BlocksCacheKey(prompt.cluster_id, 1 << 40)
        for owner, tensor, key in ((prompt, self._source, self._key), (decoder, self.target, None)):
            desc = CacheDesc(1, list(tensor.shape), DataType.DT_UINT8)
            self._cache = owner.cache_manager.register_blocks_cache(desc, [int(tensor.ctypes.data)], key)
        self._lists = [0] * BLOCKS, list(range(BLOCKS))

    def pull(self) -> None:
        self._caches.pull_blocks(self._key, self._cache, *self._lists)

    @property
    def runs(self) -> bool:
        engine = self._decoder._llm_datadist
        return engine is not None and any(engine._moving.values())


def test_a_blocked_call_delays_no_other() -> None:
    with contextlib.ExitStack() as stack:
        addresses = [stack.enter_context(reserved_address()) for _ in range(3)]
        prompts = [stack.enter_context(node(number + 1, addresses[number])) for number in range(2)]
        decoder = stack.enter_context(node(100))
        for number in range(2):
            assert decoder.link_clusters(cluster(number + 1, addresses[number]), 60_000)[0] is SUCCESS
        endless = Endless(prompts[0], decoder)
        theirs, mine = Memory(prompts[1]), Memory(decoder, seed=2)
        pulling = Waiter(endless.pull)
        until_now(lambda: endless.runs)
        # One that accepts and stays silent.
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        linking = Waiter(lambda: decoder.link_clusters(cluster(50, where), 60_000))
        unlinking = Waiter(lambda: decoder.unlink_clusters(cluster(1), 60_000))  # waits for the pull
        layers = threading.Event()
        task = decoder.cache_manager.transfer_cache_async(
            mine.cache, Model(lambda layer: layers.wait(60)), [keyed(range(2), range(2), BlocksCacheKey(2))], [1], [7]
        )
        for block in range(8):
            decoder.cache_manager.pull_blocks(BlocksCacheKey(2), mine.cache, [block], [block])
            assert equal(theirs.tensors, mine.tensors, block, block)
        third = stack.enter_context(node(3, addresses[2]))
        assert decoder.link_clusters(cluster(3, addresses[2]), 60_000)[0] is SUCCESS
        assert decoder.unlink_clusters(cluster(3), 60_000)[0] is SUCCESS
        assert linked_ids(third) <= {100}
        layers.set()
        assert task.synchronize() is SUCCESS
        assert all(waiter.thread.is_alive() for waiter in (pulling, linking, unlinking))
        assert decoder.unlink_clusters(cluster(1), 60_000, True)[0] is SUCCESS  # without waiting
        assert pulling.join() in (NOT_LINKED, LLMStatusCode.LLM_ENGINE_FINALIZED)
        assert unlinking.join()[0] is SUCCESS
        silent.close()
        # The quiet after it all.
        endless.target[0] = 7
        assert (endless.target[1] == 7).all()
        Waiter(decoder.finalize).join()
        assert linking.join()[0] is not SUCCESS


def test_an_interrupt_ends_the_call_and_the_transfer() -> None:
    with pair() as (prompt, decoder):
        endless = Endless(prompt, decoder)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        main = threading.get_ident()

        def interrupt() -> None:
            until_now(lambda: endless.runs)
            signal.pthread_kill(main, signal.SIGINT)

        other = threading.Thread(target=interrupt)
        other.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                endless.pull()
        finally:
            signal.signal(signal.SIGINT, before)
            other.join()
        endless.target[0] = 7
        assert (endless.target[1] == 7).all()
        assert not endless.runs
        mine, theirs = Memory(decoder, seed=2), Memory(prompt)
        decoder.cache_manager.pull_blocks(KEY, mine.cache, [0], [0])
        assert equal(theirs.tensors, mine.tensors, 0, 0)


def test_a_transfer_ends_in_time() -> None:
    with pair(sync_kv_timeout=50) as (prompt, decoder):
        endless = Endless(prompt, decoder)
        with fails(TIMEOUT, "deadline"):
            endless.pull()
        mine, theirs = Memory(decoder, seed=2), Memory(prompt)
        decoder.cache_manager.pull_blocks(KEY, mine.cache, [0], [0])  # the link has survived it
        assert equal(theirs.tensors, mine.tensors, 0, 0)


def test_closing_ends_what_other_threads_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_engine, "_CLOSE_SECONDS", 0.1)
    with pair() as (prompt, decoder):
        endless = Endless(prompt, decoder)
        pulling = Waiter(endless.pull)
        until_now(lambda: endless.runs)
        decoder.finalize()
        assert pulling.join() is LLMStatusCode.LLM_ENGINE_FINALIZED
        with pytest.raises(RuntimeError, match="not initialized"):
            decoder.link_clusters([])
        with fails(LLMStatusCode.LLM_ENGINE_FINALIZED):
            endless.pull()  # by a manager that somebody kept


# The native module. -----------------------------------------------------------------------------------------


def test_functions_of_the_native_module() -> None:
    w = llm_datadist_wrapper
    none, unknown = w.kFailed, w.kParamInvalid
    desc = (4, DataType.DT_UINT8.value, -1, [8, 64], Placement.DEVICE.value, True)
    slots_desc = (*desc[:5], False)
    assert w.register_cache(desc, [1], [], True) == (none, (-1, []))
    assert (w.unregister_cache(1), w.link_clusters_v2([], 1)) == (none, (none, []))
    assert (w.pull_cache_v2(1, _key(), _pull()), w.switch_role_v2("Mix", {})) == (unknown, unknown)
    w.finalize_v2()
    assert w.initialize_v2(DECODER, {"llm.Role": "Decoder", "llm.SyncKvCacheWaitTime": "x"}) == w.kParamInvalid
    given = {**options(mem_pool_cfg=POOL), "llm.Role": "Decoder"}
    assert w.initialize_v2(DECODER, given) == w.kSuccess
    try:
        assert w.initialize_v2(DECODER, given) == w.kFailed
        with reserved_address() as address, node(PROMPT, address) as prompt:
            theirs, their_slots = Memory(prompt), Memory(prompt, contiguous=True)
            raw = [np.zeros((8, 64), np.uint8) for _ in range(8)]
            addrs = [int(one.ctypes.data) for one in raw]
            status, (mine, told) = w.register_cache(desc, addrs[:4], [(0, -1, 0, 0, 0, 5, True)], True)
            assert (status, told) == (w.kSuccess, [addrs[:4]])
            status, (mine_slots, _) = w.register_cache(
                slots_desc, addrs[4:], [(0, -1, 0, 7, 2**64 - 1, 0, False)], True
            )
            assert (status, mine, mine_slots) == (w.kSuccess, 1, 2)
            where = cluster(PROMPT, address)[0]
            peer = (PROMPT, 0, where.local_ip_info_list, where.remote_ip_info_list)
            assert w.link_clusters_v2([peer], 60_000) == (w.kSuccess, [w.kSuccess])
            assert w.link_clusters_v2([peer], 60_000) == (w.kAlreadyLink, [w.kAlreadyLink])
            assert w.pull_cache_v2(mine, _key(), _pull(sources=[1], targets=[2])) == w.kSuccess
            assert equal(theirs.tensors, raw[:4], 1, 2)
            by_id = _key(cache_id=2, batch_index=3, is_blocks=False)
            assert w.pull_cache_v2(mine_slots, by_id, _pull(batch_index=4, tensors=[2, 3])) == w.kSuccess
            assert equal(their_slots.tensors[2:], raw[6:], 3, 4)
            assert w.pull_cache_v2(mine, _key(model=9), _pull(sources=[1], targets=[2])) == w.kLLMKVCacheNotExist
            to_blocks = (mine, 0, 1, [], PROMPT, 0, 0, 1, 0, 2)
            assert w.transfer_cache_v2(0, to_blocks, (64, [2], [6])) == w.kSuccess
            assert equal(raw[2:4], theirs.tensors[:2], 2, 6)
            to_slot = (mine_slots, 4, 1, [], PROMPT, 2, 5, 2, 1, 2)
            assert w.transfer_cache_v2(0, to_slot, (0, [], [])) == w.kSuccess
            assert equal(raw[6:], their_slots.tensors[2:], 4, 5)
            missing = (mine, 0, 1, [], PROMPT, 9, 0, 1, 0, 2)
            assert w.transfer_cache_v2(0, missing, (64, [2], [6])) == w.kLLMKVCacheNotExist
            assert w.copy_cache_v2((mine, mine, 0, 0, 0, -1, 0, [(2, 7)])) == w.kSuccess
            assert w.copy_cache_v2((mine_slots, mine_slots, 1, 4, 0, -1, 0, [])) == w.kSuccess
            assert equal(raw[6:], raw[6:], 1, 4)
            assert w.swap_blocks_v2(addrs[:1], addrs[4:5], 64, 0, [(2, 0)]) == w.kSuccess
            assert equal(raw[:1], raw[4:5], 2, 0)
            status, (pooled, _) = w.allocate_cache_v2(slots_desc, [(0, -1, 0, 8, 2**64 - 1, 0, False)])
            assert (status, w.check_capacity_v2(4096), w.check_capacity_v2(2**30)) == (
                w.kSuccess, w.kSuccess, w.kLLMOutOfMemory,
            )  # fmt: skip
            assert w.remove_cache_key_v2((0, -1, 0, 8, 2**64 - 1, 0, False)) == w.kSuccess
            assert w.deallocate_cache_v2(pooled) == w.kSuccess
            assert w.remap_registered_memory([]) == w.kSuccess
            assert w.switch_role_v2("Mix", {}) == w.kLLMExistLink
            assert w.unlink_clusters_v2([peer], 60_000, False) == (w.kSuccess, [w.kSuccess])
            assert w.switch_role_v2("Mix", {}) == w.kSuccess
            assert (w.unlink(5), w.query_register_mem_status(5)[0]) == (w.kLLMNotYetLink, w.kLLMNotYetLink)
            assert w.remap_registered_memory([]) == w.kLLMNotYetLink
            assert w.unregister_cache(mine) == w.kSuccess
            until_linked(prompt)
    finally:
        w.finalize_v2()


def _key(cache_id: int = -1, batch_index: int = 0, model: int = 0, is_blocks: bool = True) -> tuple[Any, ...]:
    return (PROMPT, cache_id, batch_index, 2**64 - 1, 2**64 - 1, model, is_blocks)


def _pull(batch_index: int = 0, sources: Any = (), targets: Any = (), tensors: Any = ()) -> tuple[Any, ...]:
    return (-1, batch_index, list(sources), list(targets), list(tensors), list(tensors), -1, -1, 2)


# Over HIXL. -------------------------------------------------------------------------------------------------


@pytest.mark.hixl
@pytest.mark.parametrize("backend", [None, "hixl"])
def test_npus_of_both_backends(backend: str | None) -> None:
    """Memory of an NPU goes over HIXL whatever the backend, and beside it the host's over what serves it best."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(Memory.on_npu())
        addresses = [stack.enter_context(reserved_address()) for _ in range(2)]
        backends = {} if backend is None else {"transfer_backend": backend}
        prompt, decoder = (
            stack.enter_context(node(number, addresses[number - 1], **backends)) for number in (PROMPT, DECODER)
        )
        theirs = Memory(prompt)
        assert decoder.link_clusters(cluster(PROMPT, addresses[0]), 60_000) == (SUCCESS, [SUCCESS])
        if backend is not None:
            assert prompt.link_clusters(cluster(DECODER, addresses[1]), 60_000) == (SUCCESS, [SUCCESS])
        until_linked(prompt, DECODER)
        mine = Memory(decoder, seed=2)  # after the link
        decoder.cache_manager.pull_blocks(KEY, mine.cache, [0, 3], [1, 2])
        assert equal(theirs.tensors, mine.tensors, [0, 3], [1, 2])
        prompt.cache_manager.push_blocks(BlocksCacheKey(DECODER), theirs.cache, [5], [6])
        assert equal(theirs.tensors, mine.tensors, 5, 6)
        desc = CacheDesc(4, [8, 64], DataType.DT_UINT8, Placement.HOST)
        raw = [np.full((8, 64), 3, np.uint8) for _ in range(4)]
        host = prompt.cache_manager.register_blocks_cache(
            desc, [int(one.ctypes.data) for one in raw], BlocksCacheKey(PROMPT, 5), True
        )
        decoder.cache_manager.pull_blocks(BlocksCacheKey(PROMPT, 5), mine.cache, [0], [0])
        assert all((one[0] == 3).all() for one in mine.tensors)
        decoder.cache_manager.push_blocks(BlocksCacheKey(PROMPT, 5), mine.cache, [1], [4])
        assert equal(raw, mine.tensors, 4, 1)
        prompt.cache_manager.unregister_cache(host.cache_id)
        prompt.cache_manager.unregister_cache(theirs.cache.cache_id)
        with fails(MISSING):
            decoder.cache_manager.pull_blocks(KEY, mine.cache, [0], [0])
