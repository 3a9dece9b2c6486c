"""Copies between the caches of one DataDist, alone and beside everything else."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import random
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aiodatadist as adt
from aiodatadist import _core
from aiodatadist._buffers import collect, share_memory

from .conftest import Scale
from .engine_rig import CANCELLED, CLOSED, OK, PERMISSION, SECOND, TIMEOUT, Call, Geometry, Side, Tensors
from .pairs import OWNER, linked, pattern

BATCH = 1 << 20  # bytes of a batch, and blocks of one that are apart: 1024
POSTED = 4  # batches that are posted at most
# Blocks this small make a batch of 64 KiB, so that a copy takes many batches and long.
SMALL_BLOCK = 64


@contextlib.asynccontextmanager
async def one(**options: Any) -> AsyncIterator[adt.CacheManager]:
    async with adt.DataDist(7, config=adt.Config(**options)) as dd:
        yield dd.cache_manager


def take(manager: adt.CacheManager, blocks: int = 16, width: int = 512, tensors: int = 2, seed: int = 1) -> adt.Cache:
    return manager.register_blocks_cache(pattern(seed, (blocks, width), tensors=tensors))


async def ready(manager: adt.CacheManager, *args: Any, **options: Any) -> adt.Cache:
    cache = take(manager, *args, **options)
    await cache.ready()
    return cache


def half(blocks: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Pairs of all blocks in random order, each of them source or destination."""
    return np.random.default_rng(seed).permutation(blocks).reshape(-1, 2)


# --- against numpy -----------------------------------------------------------------------------------

DTYPES = ("uint8", "float16", "bfloat16", "int32", "float64")


class Case(NamedTuple):
    dtype: str
    elements: int
    src_gap: int
    dst_gap: int
    src_blocks: int
    dst_blocks: int
    tensors: int
    pairs: list[tuple[int, int]]
    within: dict[int, list[int]]
    slots: tuple[int, int]
    offset: int
    size: int
    form: str
    inline: bool


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dtype = draw(st.sampled_from(DTYPES))
    elements = draw(st.one_of(st.integers(1, 40), st.sampled_from([511, 512, 513, 2048, 9001])))
    src, dst = draw(st.integers(1, 30)), draw(st.integers(1, 30))
    to = draw(st.lists(st.integers(0, dst - 1), unique=True, max_size=dst))
    pairs = [(draw(st.integers(0, src - 1)), block) for block in to]
    if draw(st.booleans()):
        pairs = [(i, i) for i in range(min(src, dst))]  # neighbours, which merge
    order = draw(st.permutations(range(src)))
    cut = draw(st.integers(0, src))
    within: dict[int, list[int]] = {}
    for block in order[cut:]:
        if cut:
            within.setdefault(order[draw(st.integers(0, cut - 1))], []).append(block)
    item = {"uint8": 1, "float16": 2, "bfloat16": 2, "int32": 4, "float64": 8}[dtype]
    offset = draw(st.integers(0, elements * item))
    size = draw(st.one_of(st.just(-1), st.integers(0, elements * item - offset)))
    return Case(
        dtype, elements, draw(st.sampled_from([0, 0, 1, 3, 64])), draw(st.sampled_from([0, 0, 1, 5])), src, dst,
        draw(st.integers(1, 4)), pairs, within, (draw(st.integers(0, src - 1)), draw(st.integers(0, dst - 1))),
        offset, size, draw(st.sampled_from(["mapping", "array", "list", "int32"])), draw(st.booleans()),
    )  # fmt: skip


class Memory:
    """Strided tensors at raw addresses, and their blocks as bytes."""

    def __init__(self, manager: adt.CacheManager, case: Case, blocks: int, gap: int, seed: int) -> None:
        item = {"bfloat16": 2}.get(case.dtype) or np.dtype(case.dtype).itemsize
        self.width, stride = case.elements * item, (case.elements + gap) * item
        self.raw = pattern(seed, (blocks, stride), tensors=case.tensors)
        desc = adt.CacheDesc(case.tensors, (blocks, case.elements), case.dtype, stride=stride)
        self.cache = manager.register_blocks_cache([int(t.ctypes.data) for t in self.raw], desc=desc)

    @property
    def rows(self) -> list[np.ndarray[Any, Any]]:
        return [t[:, : self.width] for t in self.raw]

    def copy(self) -> list[np.ndarray[Any, Any]]:
        return [t.copy() for t in self.raw]


def in_form(pairs: list[tuple[int, int]], form: str) -> Any:
    match form:
        case "mapping" if len({source for source, _ in pairs}) == len(pairs):
            return dict(pairs)
        case "int32":
            return np.array(pairs, np.int32).reshape(-1, 2)
        case "array":
            # Neither contiguous nor in the order of rows.
            return np.asfortranarray(np.array(pairs, np.int64).reshape(-1, 2))
    return pairs


async def run_case(manager: adt.CacheManager, case: Case) -> None:
    src = Memory(manager, case, case.src_blocks, case.src_gap, 1)
    dst = Memory(manager, case, case.dst_blocks, case.dst_gap, 2)
    if case.inline:
        await asyncio.gather(src.cache.ready(), dst.cache.ready())
    for_src, for_dst = src.copy(), dst.copy()

    def check(transfer: adt.Transfer[None], nbytes: int) -> None:
        assert transfer.progress == (nbytes * case.tensors,) * 2
        for got, want in zip(src.raw + dst.raw, for_src + for_dst, strict=True):
            np.testing.assert_array_equal(got, want)

    transfer = manager.swap_blocks(src.cache, dst.cache, in_form(case.pairs, case.form))
    await transfer
    for source, target in case.pairs:
        for t in range(case.tensors):
            for_dst[t][target, : dst.width] = for_src[t][source, : src.width]
    check(transfer, len(case.pairs) * src.width)

    flat = [(source, target) for source, targets in case.within.items() for target in targets]
    transfer = manager.copy_blocks(src.cache, case.within if case.form == "mapping" else in_form(flat, case.form))
    await transfer
    for source, target in flat:
        for t in range(case.tensors):
            for_src[t][target, : src.width] = for_src[t][source, : src.width]
    check(transfer, len(flat) * src.width)

    slot, into = case.slots
    transfer = manager.copy_cache(
        dst.cache, src.cache, src_batch_index=slot, dst_batch_index=into, offset=case.offset, size=case.size
    )
    await transfer
    size = src.width - case.offset if case.size == -1 else case.size
    piece = slice(case.offset, case.offset + size)
    for t in range(case.tensors):
        for_dst[t][into, piece] = for_src[t][slot, piece]
    check(transfer, size)
    await asyncio.gather(manager.unregister_cache(src.cache), manager.unregister_cache(dst.cache))


@pytest.mark.parametrize("inline", [64 * 1024, 0], ids=["inline", "in threads"])
def test_copies_equal_numpy(inline: int) -> None:
    with asyncio.Runner() as runner:
        dd = runner.run(adt.DataDist(1, config=adt.Config(inline_bytes=inline)).open())

        @given(case=cases())
        def check(case: Case) -> None:
            runner.run(run_case(dd.cache_manager, case))

        check()
        runner.run(dd.aclose())


async def test_copies_within_one_cache_between_slots_and_to_a_cache_of_another_shape() -> None:
    async with one() as manager:
        cache = await ready(manager, 8, 512)
        before = [t.copy() for t in cache.tensors]
        await manager.copy_cache(cache, cache, dst_batch_index=3, src_batch_index=5, offset=100, size=50)
        for t, old in zip(cache.tensors, before, strict=True):
            old[3, 100:150] = old[5, 100:150]
            np.testing.assert_array_equal(t, old)
        wide = manager.allocate_blocks_cache(adt.CacheDesc(2, (2, 4, 300), "uint8"))
        await manager.copy_cache(wide, cache, dst_batch_index=np.int64(1), src_batch_index=7)
        for t, old in zip(wide.tensors, before, strict=True):
            flat = t.reshape(2, -1)
            np.testing.assert_array_equal(flat[1, :512], old[7])
            assert not flat[0].any()
            assert not flat[1, 512:].any()


async def test_slots_of_one_pool_and_blocks_are_copied_alike() -> None:
    async with one() as manager:
        pool = manager.memory_pool(1 << 20)
        slots = [manager.allocate_cache(adt.CacheDesc(2, (4, 256), "uint16"), pool=pool) for _ in range(2)]
        blocks = manager.register_blocks_cache(pattern(3, (8, 128), np.uint16))
        for tensor in slots[0].tensors:
            tensor[:] = np.arange(1024).reshape(4, 256)
        await manager.copy_cache(slots[1], slots[0], src_batch_index=2, dst_batch_index=1, offset=64)
        await manager.copy_cache(blocks, slots[0], src_batch_index=3, dst_batch_index=7, size=256)
        await manager.copy_blocks(slots[0], {3: [0]})
        await manager.swap_blocks(slots[0], slots[1], {1: 3})
        for first, second, block in zip(slots[0].tensors, slots[1].tensors, blocks.tensors, strict=True):
            np.testing.assert_array_equal(second[1, 32:], np.arange(2 * 256 + 32, 3 * 256))
            assert not second[1, :32].any()
            np.testing.assert_array_equal(block[7], np.arange(768, 768 + 128))
            np.testing.assert_array_equal(first[0], np.arange(768, 1024))
            np.testing.assert_array_equal(second[3], np.arange(256, 512))


@pytest.mark.parametrize("transports", [("shm", "tcp"), ("tcp",)])
async def test_copies_need_no_transport_of_the_config(transports: tuple[str, ...]) -> None:
    async with one(transports=transports, inline_bytes=0) as manager:
        cache = take(manager)
        await manager.copy_blocks(cache, {1: [2]})
        assert (cache.tensors[0][1] == cache.tensors[0][2]).all()


@pytest.mark.loop
async def test_a_copy_of_a_million_blocks() -> None:
    blocks = 1 << 20
    async with one() as manager:
        tensor = np.arange(2 * blocks, dtype=np.uint64)
        cache = manager.register_blocks_cache([tensor])
        pairs = half(2 * blocks)
        transfer = manager.copy_blocks(cache, pairs, timeout=None)
        await transfer
        assert transfer.progress == (8 * blocks, 8 * blocks)
        expected = np.arange(2 * blocks, dtype=np.uint64)
        expected[pairs[:, 1]] = expected[pairs[:, 0]]
        np.testing.assert_array_equal(tensor, expected)


# --- what is wrong with a call -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pairs", "error", "text"),
    [
        ({1: [2], 2: [3]}, adt.BlockIndexError, "block 2 is source and destination"),
        ({1: [1]}, adt.BlockIndexError, "block 1 is source and destination"),
        (np.array([[4, 5], [6, 4]]), adt.BlockIndexError, "block 4 is source and destination"),
        ({1: [2, 3], 4: [3]}, adt.BlockIndexError, r"dst_blocks\[2\]=3 is named twice"),
        ({1: [16]}, adt.BlockIndexError, r"dst_blocks\[0\]=16 is outside the destination cache's 0\.\.15"),
        ({-1: [2]}, adt.BlockIndexError, r"src_blocks\[0\]=-1 is outside the source cache's"),
        (np.array([[1, 2**64 - 1]], np.uint64), adt.BlockIndexError, "is outside the destination"),
        ({1: 2}, adt.ArgumentTypeError, r"copy_block_info\[1\] must be a sequence"),
        ({1: {2}}, adt.ArgumentTypeError, r"copy_block_info\[1\] must be a sequence"),
        ({1: [True]}, adt.ArgumentTypeError, "is a bool"),
        ({1.5: [2]}, adt.ArgumentTypeError, "is not an integer"),
        ({"1": [2]}, adt.ArgumentTypeError, "is not an integer"),
        (np.array([[1.0, 2.0]]), adt.ArgumentTypeError, "dtype float64"),
        (np.array([[True, False]]), adt.ArgumentTypeError, "dtype bool"),
        (np.array([1, 2]), adt.ArgumentTypeError, r"shape \(2,\)"),
        ([(1, 2), (3,)], adt.ArgumentTypeError, "neither a mapping nor an array"),
        ([(1, 2, 3)], adt.ArgumentTypeError, r"shape \(1, 3\)"),
        (None, adt.ArgumentTypeError, "must hold pairs"),
        ([(1, 2**70)], adt.ArgumentTypeError, "dtype object"),
    ],
)
async def test_wrong_pairs_raise_at_the_call(pairs: Any, error: type[Exception], text: str) -> None:
    async with one() as manager:
        cache = take(manager)
        before = [t.copy() for t in cache.tensors]
        for wait in (lambda: asyncio.sleep(0), cache.ready):
            # Before the cache is ready, and afterwards.
            with pytest.raises(error, match=text):
                _ = manager.copy_blocks(cache, pairs)
            await wait()
        with pytest.raises(error, match=text):
            _ = manager.copy_blocks(cache, pairs)
        assert manager._dd.stats()["copies"]["started"] == 0
        for t, old in zip(cache.tensors, before, strict=True):
            np.testing.assert_array_equal(t, old)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda m, a, b: m.copy_cache(a, a), adt.BlockIndexError, "slot 0 of cache 1 is source and destination"),
        (lambda m, a, b: m.copy_cache(a, b, offset=513), adt.ArgumentError, "offset=513 and size=-1 exceed the 512"),
        (lambda m, a, b: m.copy_cache(a, b, offset=500, size=13), adt.ArgumentError, "size=13 exceed the 512 bytes"),
        (lambda m, a, b: m.copy_cache(a, b, size=-2), adt.ArgumentError, "size=-2"),
        (lambda m, a, b: m.copy_cache(a, b, size=True), adt.ArgumentTypeError, "size must be an integer"),
        (lambda m, a, b: m.copy_cache(a, b, dst_batch_index=16), adt.BlockIndexError, "dst_batch_index=16"),
        (lambda m, a, b: m.copy_cache(a, b, src_batch_index=16), adt.BlockIndexError, "src_batch_index=16"),
        (lambda m, a, b: m.copy_cache(a, b, src_batch_index=-1), adt.ArgumentError, "src_batch_index=-1"),
        (lambda m, a, b: m.copy_cache(a, None), adt.ArgumentTypeError, "expected a Cache"),
        (lambda m, a, b: m.copy_cache(a, b, timeout=-1), adt.ArgumentError, "timeout=-1"),
        (lambda m, a, b: m.copy_blocks(None, {}), adt.ArgumentTypeError, "expected a Cache"),
        (lambda m, a, b: m.swap_blocks(a, a, {}), adt.ArgumentError, "use copy_blocks"),
        (lambda m, a, b: m.swap_blocks(a, b, {1: [2]}), adt.ArgumentTypeError, "is not an integer"),
        (lambda m, a, b: m.swap_blocks(a, b, {1: 2, 3: 2}), adt.BlockIndexError, "=2 is named twice"),
    ],
)
async def test_wrong_calls_raise_at_the_call(call: Any, error: type[Exception], text: str) -> None:
    async with one() as manager:
        a, b = take(manager), take(manager)
        with pytest.raises(error, match=text):
            call(manager, a, b)
        await asyncio.gather(a.ready(), b.ready())
        with pytest.raises(error, match=text):
            call(manager, a, b)


@pytest.mark.parametrize(
    ("other", "field", "calls"),
    [
        ({"dtype": np.uint16, "shape": (16, 512)}, "dtype", ("cache", "swap")),
        ({"dtype": np.uint8, "shape": (16, 512), "tensors": 3}, "num_tensors", ("cache", "swap")),
        ({"dtype": np.uint8, "shape": (16, 256, 2)}, "block_shape", ("swap",)),
        ({"dtype": np.uint8, "shape": (16, 511)}, "block_shape", ("swap",)),
    ],
)
async def test_d5_caches_that_do_not_fit_name_the_field(other: Any, field: str, calls: tuple[str, ...]) -> None:
    async with one() as manager:
        a = take(manager)
        b = manager.register_blocks_cache(pattern(3, **other))
        for name in calls:
            with pytest.raises(adt.CacheMismatch) as caught:
                _ = manager.copy_cache(a, b) if name == "cache" else manager.swap_blocks(a, b, {1: 1})
            assert caught.value.field == field


async def test_read_only_memory_is_a_source_and_no_destination() -> None:
    async with one() as manager:
        fixed = pattern(5, (16, 512))
        for tensor in fixed:
            tensor.flags.writeable = False
        shown = manager.register_blocks_cache(fixed, remote=None)
        cache = take(manager)
        await manager.swap_blocks(shown, cache, {1: 2})
        assert (cache.tensors[1][2] == fixed[1][1]).all()
        for call in (
            lambda: manager.swap_blocks(cache, shown, {1: 2}),
            lambda: manager.copy_blocks(shown, {1: [2]}),
            lambda: manager.copy_cache(shown, cache),
        ):
            with pytest.raises(adt.CacheAccessError, match="read-only memory and cannot be copied into"):
                _ = call()


async def test_what_peers_may_do_with_a_cache_does_not_matter() -> None:
    async with one() as manager:
        a = manager.register_blocks_cache(pattern(1, (4, 8)), remote=None)
        b = manager.register_blocks_cache(pattern(2, (4, 8)), remote="r")
        await manager.swap_blocks(a, b, [(0, 3)])
        await manager.swap_blocks(b, a, [(1, 2)])
        assert (a.tensors[0][0] == b.tensors[0][3]).all()
        assert (a.tensors[1][2] == b.tensors[1][1]).all()


async def test_caches_that_share_memory_are_refused() -> None:
    async with one() as manager:
        memory = pattern(1, (16, 4, 32), tensors=1)[0]
        whole = manager.register_blocks_cache([memory])
        part = manager.register_blocks_cache([memory[4:8]])
        keys, values = (manager.register_blocks_cache([memory[:, i]]) for i in (0, 2))
        for pair in ((whole, part), (part, whole)):
            with pytest.raises(adt.ArgumentError, match="share memory"):
                _ = manager.swap_blocks(*pair, {0: 1})
        with pytest.raises(adt.ArgumentError, match="share memory"):
            _ = manager.copy_cache(whole, keys, size=32)
        # Interleaved, but without a common byte.
        await manager.swap_blocks(keys, values, {3: 4})
        assert (memory[4, 2] == memory[3, 0]).all()


@given(st.data())
def test_shared_memory_is_found(data: st.DataObject) -> None:
    """Never missed; and for one stride, never without cause."""
    base = np.zeros(400, np.uint8)
    owner = np.zeros((2, 400), bool)
    caches: list[Any] = []
    strides = []
    for side in range(2):
        width, blocks = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 6))
        stride = data.draw(st.sampled_from([12, 12, 12, 17, width]))
        stride = max(stride, width)
        start = data.draw(st.integers(0, 400 - blocks * stride))
        rows = base[start : start + blocks * stride].reshape(blocks, stride)[:, :width]
        owner[side, start : start + blocks * stride].reshape(blocks, stride)[:, :width] = True
        caches.append(collect([rows])[0])
        strides.append(stride if blocks > 1 else None)
    shared = bool((owner[0] & owner[1]).any())
    found = share_memory(*caches)
    assert found or not shared
    if strides[0] == strides[1] is not None:
        assert found == shared


async def test_closed_and_foreign_caches_raise() -> None:
    async with one() as manager, adt.DataDist(8) as other:
        a, b = await ready(manager), await ready(manager)
        theirs = other.cache_manager.register_blocks_cache(pattern(1, (16, 512)))
        with pytest.raises(adt.ArgumentError, match="another DataDist"):
            _ = manager.swap_blocks(a, theirs, {1: 1})
        with pytest.raises(adt.ArgumentError, match="another DataDist"):
            _ = manager.copy_cache(theirs, a)
        await manager.swap_blocks(a, b, {1: 1})
        await manager.unregister_cache(b)
        for call in (
            lambda: manager.copy_blocks(b, {}),
            lambda: manager.swap_blocks(a, b, {}),
            lambda: manager.copy_cache(a, b),
        ):
            with pytest.raises(adt.ClosedError, match="cache 2 is unregistered"):
                _ = call()
        await manager.copy_blocks(a, {1: [2]})
    with pytest.raises(adt.ClosedError):
        _ = manager.copy_blocks(a, {})


async def test_s1_copies_elsewhere_than_in_the_loop_raise() -> None:
    async with one() as manager:
        cache = await ready(manager)

        def elsewhere() -> None:
            with pytest.raises(adt.WrongLoopError):
                _ = manager.copy_blocks(cache, {1: [2]})

        async def in_another_loop() -> None:
            elsewhere()

        await asyncio.to_thread(elsewhere)
        await asyncio.to_thread(lambda: asyncio.run(in_another_loop()))
        await manager.copy_blocks(cache, {1: [2]})


async def test_a_forked_child_cannot_copy_and_the_parent_can() -> None:
    async with one() as manager:
        cache = await ready(manager, 4096, 4096)
        read, write = os.pipe()
        running = manager.copy_blocks(cache, half(4096), timeout=None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if not pid:
            said = "nothing"
            try:
                _ = manager.copy_blocks(cache, {1: [2]})
            except BaseException as why:
                said = type(why).__name__
            running.cancel()
            os.write(write, said.encode())
            os._exit(0)
        os.close(write)
        with open(read) as pipe:
            assert pipe.read() == "ForkedError"
        assert os.waitpid(pid, 0)[1] == 0
        await running


# --- waiting for registration ------------------------------------------------------------------------


@pytest.mark.loop
async def test_copies_wait_until_both_caches_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    async with one() as manager:
        gates = [asyncio.get_running_loop().create_future() for _ in range(2)]
        real = manager._runtime.in_thread

        async def later(gate: asyncio.Future[None], work: Any) -> Any:
            await gate
            return await work

        def held(work: Any, *args: Any) -> Any:
            return asyncio.ensure_future(later(next(order), real(work, *args)))

        order: Iterator[Any] = iter(gates)
        with monkeypatch.context() as patched:
            patched.setattr(manager._runtime, "in_thread", held)
            a, b = take(manager, seed=1), take(manager, seed=2)
        pairs = [[1, 2], [3, 4]]
        copies = [manager.swap_blocks(a, b, pairs), manager.copy_blocks(a, {5: [6]}), manager.copy_cache(b, a)]
        cancelled, late = manager.swap_blocks(a, b, {1: 5}), manager.swap_blocks(a, b, {1: 6}, timeout=0.001)
        pairs[0][0] = 7  # the list is the caller's again
        assert [(row.kind, row.peer) for row in manager._dd.dump()] == [("copy", None)] * 5
        cancelled.cancel("enough")
        with pytest.raises(asyncio.CancelledError, match="enough"):
            await cancelled
        with pytest.raises(adt.TransferTimeout, match="caches 2 and 1 were not registered within"):
            await late
        gates[0].set_result(None)
        await a.ready()
        await copies[1]
        assert not copies[0].done()
        gates[1].set_result(None)
        await asyncio.gather(*copies)
        for x, y in zip(a.tensors, b.tensors, strict=True):
            assert (y[2] == x[1]).all()
            assert (y[4] == x[3]).all()
            assert (x[5] == x[6]).all()
            assert (y[0] == x[0]).all()
        counts = manager._dd.stats()["copies"]
        assert (counts["started"], counts["ok"], counts["cancelled"], counts["timed_out"]) == (5, 3, 1, 1)
        assert manager._dd.dump() == []


@pytest.mark.parametrize("fails", ["source", "destination", "both"])
async def test_copies_end_when_a_registration_fails(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with one() as manager:
        real = manager._register_natively

        def refuse(cache: adt.Cache) -> Any:
            if fails in ("both", {1: "source", 2: "destination"}[cache.id]):
                raise adt.OutOfMemoryError("no more")
            return real(cache)

        monkeypatch.setattr(manager, "_register_natively", refuse)
        a, b = take(manager), take(manager)
        transfer = manager.swap_blocks(a, b, {1: 1})
        with pytest.raises(adt.RegistrationError, match="no more"):
            await transfer
        assert manager._dd.stats()["copies"]["failed"] == 1


async def test_copies_end_when_a_cache_is_unregistered_before_it_is_ready() -> None:
    async with one() as manager:
        a, b = take(manager), take(manager)
        transfer = manager.swap_blocks(a, b, {1: 1})
        await manager.unregister_cache(a)
        with pytest.raises(adt.ClosedError, match="was unregistered before"):
            await transfer
        await b.ready()


# --- done means quiet --------------------------------------------------------------------------------


@pytest.mark.loop
@pytest.mark.sanitize
async def test_u1_memory_is_quiet_after_a_cancel_or_a_deadline(scale: Scale) -> None:
    """The moment a copy is done, both its sides are filled with something that has to survive."""
    blocks, midway = 8192, 0
    rounds = scale(150, least=20)
    async with one() as manager:
        cache = manager.register_blocks_cache([np.zeros((blocks, SMALL_BLOCK), np.uint8) for _ in range(4)])
        await cache.ready()
        ends = {"ok": 0, "cancelled": 0, "late": 0}
        for seed in itertools.count():
            rng = random.Random(seed)
            pairs = half(blocks, seed)[: rng.choice((1, 1500, blocks // 2))]
            value, poison = rng.randrange(0x40), 0x80 | rng.randrange(0x40)
            for tensor in cache.tensors:
                tensor[:] = value
            transfer = manager.copy_blocks(cache, pairs, timeout=rng.choice((None, None, 0.0005)))

            def reuse(done: asyncio.Future[None], pairs: Any = pairs, poison: int = poison) -> None:
                for tensor in cache.tensors:
                    tensor[pairs[:, 1]] = poison
                    tensor[pairs[:, 0]] = poison | 0x40

            transfer.add_done_callback(reuse)
            for _ in range(rng.choice((0, 0, 1, 4))):
                await asyncio.sleep(0)
            if rng.random() < 0.6 and transfer.cancel("first"):
                transfer.cancel("second")
            (end,) = await asyncio.gather(transfer, return_exceptions=True)
            if isinstance(end, asyncio.CancelledError):
                assert end.args == ("first",)
                ends["cancelled"] += 1
            elif isinstance(end, adt.TransferTimeout):
                ends["late"] += 1
            else:
                assert end is None
                ends["ok"] += 1
            await asyncio.sleep(rng.choice((0, 0, 0.0005)))
            done, total = transfer.progress
            midway += 0 < done < total
            for tensor in cache.tensors:
                assert (tensor[pairs[:, 1]] == poison).all()
                assert (tensor[pairs[:, 0]] == (poison | 0x40)).all()
            if seed >= rounds and all(ends.values()) and midway:
                break
        assert manager._dd.dump() == []


async def test_u4_a_copy_that_nobody_holds_goes_on_and_keeps_its_memory() -> None:
    async with one() as manager:
        tensor = np.zeros((8192, SMALL_BLOCK), np.uint8)
        tensor[:4096] = 5
        cache = manager.register_blocks_cache([tensor])
        await cache.ready()
        _ = manager.copy_blocks(cache, np.arange(8192).reshape(2, -1).T, timeout=None)
        del _
        gc.collect()
        await manager.unregister_cache(cache)
        assert (tensor == 5).all()


async def met_running(start: Callable[[], adt.Transfer[None]], then: Callable[[adt.Transfer[None]], Any]) -> Any:
    """Start copies until one is running when `then` has been called; return what it returned, and that copy."""
    while True:
        transfer = start()
        if not transfer.done():
            made = then(transfer)
            if not transfer.done():
                return made, transfer
        await transfer


@pytest.mark.loop
@pytest.mark.sanitize
@pytest.mark.parametrize("which", ["source", "destination"])
async def test_unregistering_waits_for_copies(which: str) -> None:
    async with one() as manager:
        a = await ready(manager, 16384, SMALL_BLOCK, 4, seed=1)
        b = await ready(manager, 16384, SMALL_BLOCK, 4, seed=2)
        order = np.random.default_rng(0).permutation(16384)
        pairs = np.stack([order, order[::-1]], 1)
        tensors = (a.tensors, b.tensors)
        gone = a if which == "source" else b
        # Unregistering is for once: it begins while the copy has not been told, which is as good as running.
        transfer = manager.swap_blocks(a, b, pairs, timeout=None)
        unregistering = manager.unregister_cache(gone)
        with pytest.raises(adt.ClosedError):
            _ = manager.swap_blocks(a, b, {1: 1})
        ended: list[str] = []
        transfer.add_done_callback(lambda _: ended.append("copy"))
        unregistering.add_done_callback(lambda _: ended.append("unregistering"))
        await asyncio.gather(transfer, unregistering)
        assert ended == ["copy", "unregistering"]
        for x, y in zip(*tensors, strict=True):
            np.testing.assert_array_equal(y[pairs[:, 1]], x[pairs[:, 0]])
        await manager.copy_blocks(b if which == "source" else a, {1: [2]})


@pytest.mark.loop
@pytest.mark.sanitize
@pytest.mark.parametrize("way", ["aclose", "abort", "unlink"])
async def test_closing_during_a_copy(way: str) -> None:
    """Closing in good order lets it end; an abort ends it, quietly; a link that ends has nothing to do with it."""
    while True:
        async with adt.DataDist(1) as dd:
            manager = dd.cache_manager
            cache = await ready(manager, 16384, SMALL_BLOCK, 4)
            tensors = cache.tensors
            pairs = half(16384)
            transfer = manager.copy_blocks(cache, pairs, timeout=None)
            if way == "aclose":
                await dd.aclose()
                assert transfer.done()
                await transfer
                for tensor in tensors:
                    np.testing.assert_array_equal(tensor[pairs[:, 1]], tensor[pairs[:, 0]])
                return
            if way == "unlink":
                await dd.unlink(adt.ClusterInfo(2))
                await transfer
                return
            dd.abort()
            (end,) = await asyncio.gather(transfer, return_exceptions=True)
            await dd.wait_closed()
            before = [tensor.copy() for tensor in tensors]
            with pytest.raises(adt.ClosedError):
                _ = manager.copy_blocks(cache, {1: [2]})
            await asyncio.sleep(0.001)
            for tensor, old in zip(tensors, before, strict=True):
                np.testing.assert_array_equal(tensor, old)
            if end is not None:
                assert isinstance(end, adt.ClosedError), end
                return  # else the copy was over before the abort


# --- beside others -----------------------------------------------------------------------------------


@pytest.mark.loop
@pytest.mark.sanitize
@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_copies_and_pulls_of_one_cache_at_once(transport: str, scale: Scale) -> None:
    """Disjoint blocks of one cache: copied here, pulled here, and pulled by the peer."""
    part = 512
    async with linked(transport) as pair:
        theirs = await pair.offer(pattern(1, (3 * part, 256)))
        manager = pair.user.cache_manager
        mine = await pair.take(pattern(2, (4 * part, 256)), key=adt.BlocksCacheKey(2))
        before = [tensor.copy() for tensor in mine.tensors]
        await pair.owner.link(adt.ClusterInfo(2))
        back = pair.owner.links[2]
        while adt.BlocksCacheKey(2) not in back.table:
            await asyncio.sleep(0.001)
        order = np.random.default_rng(3).permutation(part)
        for _ in range(scale(10, least=2)):
            await asyncio.gather(
                manager.copy_blocks(mine, np.stack([order, part + order], 1)),
                manager.pull_blocks(adt.BlocksCacheKey(OWNER), mine, order, 2 * part + order),
                manager.copy_blocks(mine, np.stack([order, 3 * part + order[::-1]], 1)),
                pair.owner.cache_manager.pull_blocks(adt.BlocksCacheKey(2), theirs, order, 2 * part + order),
            )
            for m, old, t in zip(mine.tensors, before, theirs.tensors, strict=True):
                np.testing.assert_array_equal(m[:part], old[:part])
                np.testing.assert_array_equal(m[part : 2 * part], old[:part])
                np.testing.assert_array_equal(m[2 * part : 3 * part], t[:part])
                np.testing.assert_array_equal(m[3 * part :][order[::-1]], old[:part][order])
                np.testing.assert_array_equal(t[2 * part :], old[:part])


@pytest.mark.loop
async def test_a_long_copy_starves_neither_short_copies_nor_pulls() -> None:
    async with linked("shm", user={"inline_bytes": 0}) as pair:
        await pair.offer(pattern(1, (16, 4096)))
        manager = pair.user.cache_manager
        long = await pair.take([np.zeros((1 << 18, SMALL_BLOCK), np.uint8) for _ in range(4)])
        short = await pair.take(pattern(2, (16, 4096)))

        async def beside(running: adt.Transfer[None]) -> bool:
            await manager.copy_blocks(short, {1: [2]})
            await manager.pull_blocks(adt.BlocksCacheKey(OWNER), short, [1], [3])
            return not running.done()

        while True:
            running = manager.copy_blocks(long, half(1 << 18), timeout=None)
            first = await beside(running)
            await running
            if first:
                return  # short ones have overtaken the long one


async def test_small_copies_finish_at_once_and_the_loop_gets_its_turns() -> None:
    async with one() as manager:
        cache = await ready(manager)
        turns = at_once = 0
        over = False

        async def other() -> None:
            nonlocal turns
            while not over:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        for _ in range(2000):
            transfer = manager.copy_blocks(cache, [(1, 2)])
            at_once += transfer.done()
            await transfer
        over = True
        await task
        assert at_once > 1000
        assert turns > 5


async def test_l5_nothing_to_copy_is_success() -> None:
    async with one() as manager:
        a, b = take(manager), take(manager)
        empty: list[Any] = [{}, [], np.empty((0, 2), np.int64)]
        for _ in range(2):
            before = [t.copy() for t in a.tensors + b.tensors]
            for nothing in empty:
                await manager.copy_blocks(a, nothing)
                await manager.swap_blocks(a, b, nothing)
            await manager.copy_blocks(a, {1: []})
            await manager.copy_cache(a, b, size=0)
            await manager.copy_cache(a, a, offset=512)
            for tensor, old in zip(a.tensors + b.tensors, before, strict=True):
                np.testing.assert_array_equal(tensor, old)
            await asyncio.gather(a.ready(), b.ready())
        assert manager._dd.stats()["copies"]["ok"] == 18


@pytest.mark.loop
async def test_v3_rows_and_counts_of_copies() -> None:
    async with one() as manager:
        dd = manager._dd
        cache = await ready(manager, 1 << 17, SMALL_BLOCK, 4)
        (rows, stats), transfer = await met_running(
            lambda: manager.copy_blocks(cache, half(1 << 17), timeout=None), lambda _: (dd.dump(), dd.stats())
        )
        (row,) = rows
        assert (row.kind, row.peer, row.state, row.transport) == ("copy", None, "moving", None)
        assert row.bytes_total == transfer.progress.bytes_total == (1 << 16) * SMALL_BLOCK * 4
        assert stats["pending"] == 1
        assert stats["copies"]["pending"] == 1
        await transfer
        counts = dd.stats()["copies"]
        assert counts["ok"] == counts["started"] == counts["latency"]["count"]
        assert counts["bytes_pulled"] == counts["ok"] * row.bytes_total
        assert counts["bytes_pushed"] == 0
        assert dd.stats()["total"]["started"] == 0
        assert dd.dump() == []


# --- the engine by itself ----------------------------------------------------------------------------


class Stepped:
    """A node of a stepped engine, with two caches and the pair that copies from one to the other."""

    APART: Geometry = (2, 8192, 64, 128)  # blocks that do not merge: 1024 of them are a batch

    def __init__(self, engine: _core.Engine | None = None) -> None:
        self.engine = _core.Engine.stepped() if engine is None else engine
        self.ring = _core.Ring(self.engine)
        options = {"drain_timeout": 5.0, "heartbeat_limit": 60.0, "inline_bytes": 0, "populate_limit": 0}
        self.side = Side(self.engine, self.ring, 1, options)
        self.src, self.dst = Tensors(self.APART, region=True), Tensors(self.APART, region=False)
        self.src.randomize(1)
        self.local = self.side.register(self.dst)
        self.shown = self.side.register(self.src, readable=False, writable=False)
        self.source = self.shown.source()
        self.pair = _core.Pair(self.local, self.source, (self.dst, self.src))

    def start(self, blocks: int = 8192, *, opcode: int = _core.READ, timeout: float = 0.0) -> Call:
        call = Call()
        self.pair.submit(call, opcode, range(blocks), range(blocks), 0, 0, 2, timeout, False)
        return call

    def step(self, ns: int = 1000) -> None:
        self.engine.step(ns)
        self.ring.drain()

    def quiet(self, cache: _core.LocalCache) -> bool:
        return bool(self.side.seen(_core.EVENT_CACHE_QUIET, cache.id))

    def close(self) -> None:
        self.side.node.abort()
        self.step(SECOND)
        assert self.side.node.quiet()
        self.side.node.close()
        self.ring.drain()
        self.ring.close()
        self.engine.release()


@pytest.fixture
def stepped() -> Iterator[Stepped]:
    made = Stepped()
    yield made
    made.close()
    # pytest keeps a fixture's value beyond its end; what is native must go now.
    made.__dict__.clear()


@pytest.mark.sanitize
def test_a_node_copies_without_any_link(stepped: Stepped) -> None:
    assert (stepped.source.path, stepped.source.transport, stepped.source.id) == ("local", "local", stepped.shown.id)
    assert stepped.side.node.quiet()
    call = stepped.start()
    assert not stepped.side.node.quiet()
    ((op, _, cache, opcode, stop, _, done, total, path, *layers),) = stepped.side.node.pending()
    assert (op, cache, opcode, stop, done, total, path, layers) == (
        call.op, stepped.shown.id, _core.READ, 0, 0, 2 * 8192 * 64, "local", [False, 0, 0],
    )  # fmt: skip
    stepped.step()
    assert (call.status, call.done) == (OK, 2 * 8192 * 64)
    assert stepped.side.node.quiet()
    for there, here in zip(stepped.src.blocks, stepped.dst.blocks, strict=True):
        np.testing.assert_array_equal(there, here)
    assert all(not tensor.reshape(-1, 128)[:, 64:].any() for tensor in stepped.dst.raw), "gaps were written"
    assert stepped.side.events == []


@pytest.mark.sanitize
def test_a_copy_stopped_midway_ends_with_what_was_posted(stepped: Stepped) -> None:
    call = stepped.start()
    stepped.pair.cancel(call.op)
    assert stepped.pair.progress(call.op) == 0
    stepped.step()
    assert (call.status, call.done) == (CANCELLED, POSTED * 1024 * 64)
    late = stepped.start(timeout=1.0)
    stepped.step(SECOND)
    assert (late.status, late.done) == (TIMEOUT, POSTED * 1024 * 64)
    assert stepped.side.node.pending() == []


@pytest.mark.sanitize
@pytest.mark.parametrize("which", ["source", "destination", "both"])
def test_closing_a_cache_waits_for_its_copies(stepped: Stepped, which: str) -> None:
    call = stepped.start()
    caches = {"source": [stepped.shown], "destination": [stepped.local], "both": [stepped.local, stepped.shown]}[which]
    for cache in caches:
        cache.close()
    stepped.ring.drain()
    assert not any(stepped.quiet(cache) for cache in caches)
    with pytest.raises(adt.ClosedError):
        stepped.start(1)
    stepped.step()
    assert (call.status, call.done) == (OK, 2 * 8192 * 64)
    assert all(stepped.quiet(cache) for cache in caches)
    with pytest.raises(adt.ClosedError):
        stepped.start(1)
    if stepped.shown in caches:
        with pytest.raises(adt.ClosedError):
            stepped.shown.source()


@pytest.mark.sanitize
@pytest.mark.parametrize("how", ["abort", "close"])
def test_the_end_of_the_node_ends_its_copies(stepped: Stepped, how: str) -> None:
    call = stepped.start()
    getattr(stepped.side.node, how)()
    assert not stepped.side.node.quiet()
    with pytest.raises(adt.ClosedError):
        stepped.start(1)
    with pytest.raises(adt.ClosedError):
        stepped.shown.source()
    stepped.step()
    assert (call.status, call.done) == (CLOSED, POSTED * 1024 * 64)
    assert stepped.side.node.quiet()
    assert not stepped.side.seen(_core.EVENT_PEER_LOST)
    assert not stepped.side.seen(_core.EVENT_PEER_QUIET)


@pytest.mark.sanitize
@pytest.mark.parametrize("with_threads", [False, True])
def test_the_end_of_the_engine_ends_its_copies(with_threads: bool) -> None:
    """Nothing is left of what was posted, and the ring gives the call back."""
    made = Stepped(_core.Engine.acquire(2, 2) if with_threads else None)
    call = made.start()
    made.engine.release()
    before = made.dst.copy()
    made.ring.drain()
    assert call.ended
    for tensor, old in zip(made.dst.raw, before, strict=True):
        np.testing.assert_array_equal(tensor, old)
    made.ring.close()


def test_own_caches_are_read_only_from_there(stepped: Stepped) -> None:
    """Copies are pulls; a push into the own cache is refused, and no byte moves."""
    before = stepped.src.copy()
    call = stepped.start(opcode=_core.WRITE)
    stepped.step()
    assert (call.status, call.done) == (PERMISSION, 0)
    for tensor, old in zip(stepped.src.raw, before, strict=True):
        np.testing.assert_array_equal(tensor, old)
    assert stepped.start(0).ended is False
    stepped.step()


def test_caches_of_different_nodes_do_not_pair(stepped: Stepped) -> None:
    other = Stepped()
    with pytest.raises(adt.ArgumentError, match="different nodes"):
        _core.Pair(stepped.local, other.source, None)
    other.close()


def test_many_sources_come_and_go(stepped: Stepped) -> None:
    """A cache's sources end with it, and those that were dropped leave nothing behind."""
    for _ in range(50):
        tensors = Tensors((1, 4, 64, 64), region=True)
        cache = stepped.side.register(tensors)
        for _ in range(3):
            pair = _core.Pair(stepped.side.register(Tensors((1, 4, 64, 64), region=False)), cache.source(), None)
            call = Call()
            pair.submit(call, _core.READ, [1], [2], 0, 0, 1, 0.0, False)
            stepped.step()
            assert call.status == OK
            pair.local.close()
        held = cache.source()
        cache.close()
        stepped.ring.drain()
        assert stepped.quiet(cache)
        held.release()
