"""Wrong input is a typed error at the call, and nothing has moved; every right form works, and zero work too."""

from __future__ import annotations

import array
import asyncio
import contextlib
import ctypes
import itertools
import math
import mmap
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import pytest_asyncio

import aiodatadist as adt

from .pairs import OWNER, USER, Pair, linked, pattern
from .waiting import PATIENCE, until_now

BLOCKS, SHAPE, TENSORS = 8, (8, 3, 4), 4
KEY = adt.BlocksCacheKey(OWNER)
HUGE = 10**5000


class Setting:
    """A linked pair with a cache on either side, which `untouched` compares with what they were."""

    def __init__(self, pair: Pair, theirs: adt.Cache, ours: adt.Cache) -> None:
        self.pair = pair
        self.theirs = theirs
        self.ours = ours
        self.caches = pair.user.cache_manager
        self.was = [tensor.copy() for cache in (theirs, ours) for tensor in cache.tensors]

    def forget(self) -> None:
        """Let go of everything: pytest keeps what a fixture has given until after the check for native objects."""
        vars(self).clear()

    def untouched(self) -> None:
        now = [tensor for cache in (self.theirs, self.ours) for tensor in cache.tensors]
        for tensor, before in zip(now, self.was, strict=True):
            np.testing.assert_array_equal(tensor, before)
        counts = self.pair.user.stats()["total"]
        assert counts["started"] == 0
        assert self.pair.user.dump() == self.pair.owner.dump() == []
        assert self.pair.owner.stats()["unread"] == 0

    def call(self, opcode: str, src: Any, dst: Any, **options: Any) -> adt.Transfer[None]:
        method = self.caches.pull_blocks if opcode == "pull" else self.caches.push_blocks
        return method(options.pop("key", KEY), options.pop("cache", self.ours), src, dst, **options)

    def refuses(self, error: type[Exception], opcode: str, src: Any, dst: Any, **options: Any) -> str:
        with pytest.raises(error) as caught:
            self.call(opcode, src, dst, **options)
        assert isinstance(caught.value, adt.DataDistError)
        self.untouched()
        return str(caught.value)


@pytest_asyncio.fixture(params=["shm", "tcp"])
async def setting(request: pytest.FixtureRequest) -> AsyncIterator[Setting]:
    async with linked(request.param) as pair:
        theirs = await pair.offer(pattern(1, SHAPE, tensors=TENSORS))
        ours = await pair.take(pattern(2, SHAPE, tensors=TENSORS))
        setting = Setting(pair, theirs, ours)
        yield setting
    setting.forget()


@pytest_asyncio.fixture(params=["before the first transfer", "after one", "registering"])
async def stage(request: pytest.FixtureRequest) -> AsyncIterator[Setting]:
    """Yield a setting in which the cached pair does not exist yet, exists, or cannot exist yet."""
    async with linked("shm") as pair:
        theirs = await pair.offer(pattern(1, SHAPE, tensors=TENSORS))
        ours = await pair.take(pattern(2, SHAPE, tensors=TENSORS))
        if request.param == "after one":
            # Nothing moves in it, and the counts of the transfers that follow begin at zero.
            await pair.user.cache_manager.pull_blocks(KEY, ours, [], [])
            setting = Setting(pair, theirs, ours)
            assert ours.id in pair.link.table[KEY].pairs
            counters = pair.link._counters
            counters.started -= 1
            counters.ok -= 1
        elif request.param == "registering":
            setting = Setting(pair, theirs, held_back(pair))
        else:
            setting = Setting(pair, theirs, ours)
        yield setting
        let_go(pair)
    setting.forget()


def held_back(pair: Pair) -> adt.Cache:
    """Return a cache that stays unregistered until `let_go`."""
    manager, gate = pair.user.cache_manager, threading.Event()
    register = manager._register_natively
    HELD[pair] = gate

    def wait(cache: adt.Cache) -> Any:
        gate.wait()
        return register(cache)

    manager._register_natively = wait  # type: ignore[method-assign]
    return manager.register_blocks_cache(pattern(2, SHAPE, tensors=TENSORS))


HELD: weakref.WeakKeyDictionary[Pair, threading.Event] = weakref.WeakKeyDictionary()


def let_go(pair: Pair) -> None:
    if pair in HELD:
        HELD.pop(pair).set()


@contextlib.contextmanager
def case(what: Any) -> Iterator[None]:
    """Name the case in the error."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(ValueError):  # Python prints no huge numbers
            error.add_note(f"case: {what!r:.200}")
        raise


class Index:
    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


# --- block lists ----------------------------------------------------------------------------------

RANGE_FAULTS = {
    "negative": [0, -1],
    "one too high": [0, BLOCKS],
    "beyond int32": [0, 2**31],
    "int64's end": [0, 2**63 - 1],
    "beyond int64": [0, 2**63],
    "beyond uint64": [0, 2**64],
    "huge": [0, HUGE],
    "huge negative": [0, -HUGE],
    "wraps to 0": [1, 2**64],
    "uint64 array": np.array([0, 2**63], np.uint64),
    "uint64 array's end": np.array([0, 2**64 - 1], np.uint64),
    "int8 array": np.array([0, -1], np.int8),
    "uint8 array": np.array([0, 255], np.uint8),
    "int32 array": np.array([0, -(2**31)], np.int32),
    "array.array": array.array("q", [0, -1]),
    "range": range(BLOCKS - 1, BLOCKS + 1),
    "index object": [0, Index(BLOCKS)],
}

TYPE_FAULTS = {
    "float": [0, 1.0],
    "string in a list": [0, "1"],
    "string": "01",
    "None in a list": [0, None],
    "int": 2,
    "bool": [0, True],
    "numpy bool": [0, np.True_],
    "nested": [[0], [1]],
    "dict": {0: 1, 1: 0},
    "set": {0, 1},
    "float array": np.array([0.0, 1.0]),
    "float16 array": np.array([0, 1], np.float16),
    "complex array": np.array([0, 1j]),
    "mask": np.array([True, True] + [False] * (BLOCKS - 2)),
    "short mask": np.array([False, True]),
    "mask as a list": [True, True, False],
    "2-D array": np.array([[0], [1]]),
    "0-D array": np.array(1),
    "object array": np.array([0, 1], object),
    "string array": np.array(["0", "1"]),
    "datetime array": np.array([0, 1], "M8[s]"),
    "foreign byte order": np.array([0, 1], ">i8"),
    "structured array": np.zeros(2, [("a", "i4"), ("b", "i4")]),
    "float array.array": array.array("d", [0, 1]),
    "char memoryview": memoryview(b"ab").cast("c"),
    "2-D memoryview": memoryview(b"\0\1").cast("B", (1, 2)),
    "bool ctypes": (ctypes.c_bool * 2)(False, True),
}


@pytest.mark.parametrize("opcode", ["pull", "push"])
@pytest.mark.parametrize("side", ["src", "dst"])
async def test_block_outside(stage: Setting, opcode: str, side: str) -> None:
    for name, blocks in RANGE_FAULTS.items():
        with case(name):
            lists = (blocks, [0, 1]) if side == "src" else ([0, 1], blocks)
            said = stage.refuses(adt.BlockIndexError, opcode, *lists)
            assert f"{side}_blocks[1]" in said or name == "wraps to 0"


@pytest.mark.parametrize("opcode", ["pull", "push"])
@pytest.mark.parametrize("side", ["src", "dst"])
async def test_block_of_wrong_type(stage: Setting, opcode: str, side: str) -> None:
    for name, blocks in TYPE_FAULTS.items():
        with case(name):
            lists = (blocks, [0, 1]) if side == "src" else ([0, 1], blocks)
            said = stage.refuses(adt.ArgumentTypeError, opcode, *lists)
            assert f"{side}_blocks" in said


@pytest.mark.parametrize("opcode", ["pull", "push"])
async def test_lists_that_do_not_go_together(stage: Setting, opcode: str) -> None:
    said = stage.refuses(adt.BlockIndexError, opcode, [0, 1, 2], [0, 1])
    assert "src_blocks has 3" in said
    assert "dst_blocks has 2" in said
    stage.refuses(adt.BlockIndexError, opcode, [], [0])
    stage.refuses(adt.BlockIndexError, opcode, [0], [])
    stage.refuses(adt.BlockIndexError, opcode, range(3), np.arange(4))
    said = stage.refuses(adt.BlockIndexError, opcode, [0, 1, 2, 3], [4, 5, 6, 5])
    assert "dst_blocks[3]=5 is named twice" in said
    stage.refuses(adt.BlockIndexError, opcode, [0, 0], [0, 0])
    # A source may be named any number of times.
    let_go(stage.pair)
    await stage.call(opcode, [3, 3, 3], [0, 1, 2])
    source, target = (stage.theirs, stage.ours) if opcode == "pull" else (stage.ours, stage.theirs)
    for a, b in zip(source.tensors, target.tensors, strict=True):
        for block in range(3):
            np.testing.assert_array_equal(a[3], b[block])


async def test_blocks_that_change_while_they_are_read(setting: Setting) -> None:
    """An index object that runs code shortens the list, or starts another transfer, under our hands."""
    blocks: list[Any] = []

    class Shortens:
        def __index__(self) -> int:
            blocks.clear()
            return 0

    class Starts:
        def __index__(self) -> int:
            setting.call("pull", [7] * 5, [3, 4, 5, 6, 7])
            return 0

    setting.refuses(adt.ArgumentError, "pull", [0, 1], [Starts(), 1])
    blocks += [Shortens(), 1, 2, 3]
    await setting.call("pull", blocks, [0, 1, 2, 3])
    for theirs, ours in zip(setting.theirs.tensors, setting.ours.tensors, strict=True):
        np.testing.assert_array_equal(ours[:4], theirs[:4])


async def test_blocks_are_read_during_the_call(stage: Setting) -> None:
    src, dst = [0, 1], np.array([2, 3])
    transfer = stage.call("pull", src, dst)
    src[:] = [6, 7]
    dst[:] = 4
    let_go(stage.pair)
    await transfer
    for index, (theirs, ours) in enumerate(zip(stage.theirs.tensors, stage.ours.tensors, strict=True)):
        expected = stage.was[TENSORS + index].copy()
        expected[[2, 3]] = theirs[[0, 1]]
        np.testing.assert_array_equal(ours, expected)


def good_blocks() -> dict[str, Callable[[list[int]], Any]]:
    """Return every form in which block indices may be given."""
    forms: dict[str, Callable[[list[int]], Any]] = {
        "list": list,
        "tuple": tuple,
        "ints of numpy": lambda b: [np.int32(i) for i in b],
        "index objects": lambda b: [Index(i) for i in b],
        "memoryview": lambda b: memoryview(array.array("i", b)),
        "memoryview backwards": lambda b: memoryview(array.array("l", b[::-1]))[::-1],
        "read-only array": lambda b: np.frombuffer(np.array(b, np.int64).tobytes(), np.int64),
        "bytearray": bytearray,
        "generator": lambda b: (i for i in b),
        "dict keys": lambda b: dict.fromkeys(b).keys(),
    }
    for code in "bBhHiIlLqQ":
        forms[f"array.array {code}"] = lambda b, code=code: array.array(code, b)
    # Their format names the byte order, which a memoryview does not read.
    for bits in (8, 16, 32, 64):
        for kind in (f"c_int{bits}", f"c_uint{bits}"):
            forms[f"ctypes {kind}"] = lambda b, kind=kind: (getattr(ctypes, kind) * len(b))(*b)
    for dtype in ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "intp", "uintp"):
        forms[dtype] = lambda b, dtype=dtype: np.array(b, dtype)
        forms[f"{dtype} strided"] = lambda b, dtype=dtype: np.repeat(np.array(b, dtype), 3)[::3]
        forms[f"{dtype} backwards"] = lambda b, dtype=dtype: np.array(b[::-1], dtype)[::-1]
        forms[f"{dtype} column"] = lambda b, dtype=dtype: np.array([b, b], dtype).T.copy()[:, 0]
    return forms


@pytest.mark.parametrize("opcode", ["pull", "push"])
async def test_every_form_of_blocks(setting: Setting, opcode: str) -> None:
    indices = [5, 0, 6, 3]
    source, target = (setting.theirs, setting.ours) if opcode == "pull" else (setting.ours, setting.theirs)
    for name, form in good_blocks().items():
        with case(name):
            for tensor in target.tensors:
                tensor[:] = 0
            await setting.call(opcode, form(indices), form(indices))
            for a, b in zip(source.tensors, target.tensors, strict=True):
                expected = np.zeros_like(a)
                expected[indices] = a[indices]
                np.testing.assert_array_equal(b, expected)
    # A range names neighbours, forwards, backwards and with gaps.
    for blocks in (range(2, 6), range(6, 2, -1), range(1, 8, 3)):
        for tensor in target.tensors:
            tensor[:] = 0
        await setting.call(opcode, blocks, blocks)
        for a, b in zip(source.tensors, target.tensors, strict=True):
            expected = np.zeros_like(a)
            expected[list(blocks)] = a[list(blocks)]
            np.testing.assert_array_equal(b, expected)


# --- layers, deadlines, notifications ----------------------------------------------------------------

LAYER_FAULTS: list[tuple[type[Exception], dict[str, Any]]] = [
    (adt.ArgumentTypeError, {"src_layer_range": (0, 1), "dst_layer_range": range(1)}),
    (adt.ArgumentTypeError, {"src_layer_range": range(1), "dst_layer_range": [0]}),
    (adt.ArgumentTypeError, {"src_layer_range": slice(0, 1), "dst_layer_range": range(1)}),
    (adt.ArgumentTypeError, {"src_layer_range": 1, "dst_layer_range": range(1)}),
    (adt.ArgumentTypeError, {"src_layer_range": "01", "dst_layer_range": range(1)}),
    (adt.ArgumentError, {"src_layer_range": range(-1, 1), "dst_layer_range": range(2)}),
    (adt.ArgumentError, {"src_layer_range": range(-1, -1), "dst_layer_range": range(0)}),
    (adt.ArgumentError, {"src_layer_range": range(0, 2, 2), "dst_layer_range": range(1)}),
    (adt.ArgumentError, {"src_layer_range": range(1, -1, -1), "dst_layer_range": range(2)}),
    (adt.ArgumentError, {"src_layer_range": range(3), "dst_layer_range": range(3)}),
    (adt.ArgumentError, {"src_layer_range": range(2, 3), "dst_layer_range": range(1)}),
    (adt.ArgumentError, {"src_layer_range": range(1), "dst_layer_range": range(2, 3)}),
    (adt.ArgumentError, {"src_layer_range": range(2**70), "dst_layer_range": range(1)}),
    (adt.ArgumentError, {"src_layer_range": range(HUGE, HUGE + 1), "dst_layer_range": range(1)}),
    (adt.ArgumentError, {"src_layer_range": range(HUGE, 2 * HUGE), "dst_layer_range": range(1)}),
    (adt.CacheMismatch, {"src_layer_range": range(2), "dst_layer_range": range(1)}),
    (adt.CacheMismatch, {"src_layer_range": range(1)}),
    (adt.CacheMismatch, {"dst_layer_range": range(1)}),
    (adt.CacheMismatch, {"dst_layer_range": range(0)}),
    (adt.ArgumentError, {"src_layer_range": range(1), "dst_layer_range": range(1), "tensor_num_per_layer": 3}),
    (adt.ArgumentError, {"src_layer_range": range(1), "dst_layer_range": range(1), "tensor_num_per_layer": 8}),
]
COUNT_FAULTS: list[tuple[type[Exception], Any]] = [
    (adt.ArgumentError, 0),
    (adt.ArgumentError, -2),
    (adt.ArgumentError, 2**32),
    (adt.ArgumentError, HUGE),
    (adt.ArgumentTypeError, 2.0),
    (adt.ArgumentTypeError, True),
    (adt.ArgumentTypeError, "2"),
    (adt.ArgumentTypeError, None),
]


@pytest.mark.parametrize("opcode", ["pull", "push"])
async def test_wrong_layers(stage: Setting, opcode: str) -> None:
    for error, options in LAYER_FAULTS:
        with case(options):
            stage.refuses(error, opcode, [0], [0], **options)
    for error, count in COUNT_FAULTS:
        with case(count):
            stage.refuses(error, opcode, [0], [0], tensor_num_per_layer=count)
            layers = {"src_layer_range": range(1), "dst_layer_range": range(1)}
            stage.refuses(error, opcode, [0], [0], tensor_num_per_layer=count, **layers)
    for wrong, right in (("src_layer_range", "dst_layer_range"), ("dst_layer_range", "src_layer_range")):
        options = {wrong: range(3), right: range(1)}
        assert f"{wrong}=range(0, 3, 1) exceeds" in stage.refuses(adt.ArgumentError, opcode, [0], [0], **options)


TIMEOUT_FAULTS: list[tuple[type[Exception], Any]] = [
    (adt.ArgumentError, 0),
    (adt.ArgumentError, -1),
    (adt.ArgumentError, -0.0),
    (adt.ArgumentError, math.nan),
    (adt.ArgumentError, math.inf),
    (adt.ArgumentError, -math.inf),
    (adt.ArgumentError, 1e10),
    (adt.ArgumentError, HUGE),
    (adt.ArgumentError, -HUGE),
    (adt.ArgumentTypeError, True),
    (adt.ArgumentTypeError, "1"),
    (adt.ArgumentTypeError, [1]),
    (adt.ArgumentTypeError, np.array([1.0, 2.0])),
    (adt.ArgumentTypeError, 1j),
]


@pytest.mark.parametrize("opcode", ["pull", "push"])
async def test_wrong_timeout(stage: Setting, opcode: str) -> None:
    for error, timeout in TIMEOUT_FAULTS:
        with case(timeout):
            stage.refuses(error, opcode, [0], [0], timeout=timeout)


async def test_wrong_timeout_elsewhere(setting: Setting) -> None:
    user, info = setting.pair.user, adt.ClusterInfo(OWNER, str(setting.pair.owner.listen_address))
    for error, timeout in TIMEOUT_FAULTS:
        calls: list[Callable[[], Any]] = [
            lambda timeout=timeout: user.link(info, timeout=timeout),
            lambda timeout=timeout: user.unlink(info, timeout=timeout),
            lambda timeout=timeout: user.fence(OWNER, timeout=timeout),
            lambda timeout=timeout: setting.caches.unregister_cache(setting.ours, timeout=timeout),
        ]
        for number, call in enumerate(calls):
            with case((number, timeout)), pytest.raises(error):
                call()
    # None of them has ended the link or the cache.
    assert user.links[OWNER] is setting.pair.link
    assert not setting.ours.closed
    setting.untouched()


async def test_right_timeouts(setting: Setting) -> None:
    for timeout in (1, 5.0, np.float32(2), np.int64(3), None, 1e9, adt.DEFAULT_TIMEOUT):
        await setting.call("pull", [0], [0], timeout=timeout)


@pytest.mark.parametrize("opcode", ["pull", "push"])
async def test_wrong_notification(stage: Setting, opcode: str) -> None:
    limit = stage.pair.user._config.notify_max_bytes
    for error, notify in [
        (adt.ArgumentTypeError, "text"),
        (adt.ArgumentTypeError, 1),
        (adt.ArgumentTypeError, True),
        (adt.ArgumentTypeError, [1, 2]),
        (adt.ArgumentError, bytes(limit + 1)),
    ]:
        with case(notify):
            stage.refuses(error, opcode, [0], [0], notify=notify)


@pytest.mark.parametrize("opcode", ["pull", "push"])
async def test_notification_longer_than_the_peer_takes(opcode: str) -> None:
    async with linked("shm", owner={"notify_max_bytes": 10}) as pair:
        theirs = await pair.offer(pattern(1, SHAPE, tensors=TENSORS))
        ours = await pair.take(pattern(2, SHAPE, tensors=TENSORS))
        setting = Setting(pair, theirs, ours)
        setting.refuses(adt.ArgumentError, opcode, [0], [0], notify=bytes(11))
        await setting.call(opcode, [0], [0], notify=bytes(10))


# --- names ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opcode", ["pull", "push"])
async def test_unknown_names(stage: Setting, opcode: str) -> None:
    refuses = stage.refuses
    refuses(adt.NotLinkedError, opcode, [0], [0], key=adt.BlocksCacheKey(77))
    refuses(adt.NotLinkedError, opcode, [0], [0], key=adt.CacheKeyByIdAndIndex(77, 1))
    refuses(adt.CacheNotFound, opcode, [0], [0], key=adt.BlocksCacheKey(OWNER, 1))
    refuses(adt.CacheNotFound, opcode, [0], [0], key=adt.CacheKeyByIdAndIndex(OWNER, stage.theirs.id + 1000))
    refuses(adt.ArgumentError, opcode, [0], [0], key=adt.CacheKeyByIdAndIndex(OWNER, stage.theirs.id, 1))
    refuses(adt.ArgumentError, opcode, [0], [0], key=adt.BlocksCacheKey(USER))
    refuses(adt.CacheNotFound, opcode, [0], [0], key=adt.CacheKey(OWNER, 1))
    for key in (OWNER, None, "key", [OWNER, 0]):
        refuses(adt.ArgumentTypeError, opcode, [0], [0], key=key)
    for cache in (None, 1, stage.ours.id, stage.ours.tensors):
        refuses(adt.ArgumentTypeError, opcode, [0], [0], cache=cache)
    refuses(adt.ArgumentError, opcode, [0], [0], cache=stage.theirs)


@pytest.mark.parametrize("value", [-1, 2**64, pytest.param(HUGE, id="huge"), 1.0, True, "1", None])
def test_wrong_ids(value: Any) -> None:
    for make in (
        lambda: adt.BlocksCacheKey(value),
        lambda: adt.BlocksCacheKey(1, value),
        lambda: adt.CacheKeyByIdAndIndex(value, 1),
        lambda: adt.CacheKeyByIdAndIndex(1, value),
        lambda: adt.CacheKeyByIdAndIndex(1, 1, value),
        lambda: adt.ClusterInfo(value),
        lambda: adt.DataDist(value),
    ):
        with pytest.raises((adt.ArgumentError, adt.ArgumentTypeError)):
            make()


async def test_wrong_peers(setting: Setting) -> None:
    user = setting.pair.user
    for wrong in (OWNER, "127.0.0.1:1", None, (1, "127.0.0.1:1")):
        with pytest.raises(adt.ArgumentTypeError):
            user.link(wrong)  # type: ignore[arg-type]
        with pytest.raises(adt.ArgumentTypeError):
            user.unlink(wrong)  # type: ignore[arg-type]
    with pytest.raises(adt.ArgumentError, match="no address"):
        user.link(adt.ClusterInfo(99))
    with pytest.raises(adt.NotLinkedError):
        user.fence(99)
    for wrong in (-1, 1.0, True, "1", HUGE):
        with pytest.raises((adt.ArgumentError, adt.ArgumentTypeError)):
            user.fence(wrong)  # type: ignore[arg-type]
    setting.untouched()


# --- geometry ------------------------------------------------------------------------------------------

MISMATCHES = {
    "dtype": pattern(3, SHAPE, np.int8, TENSORS),
    "block_shape": pattern(3, (8, 4, 3), tensors=TENSORS),
    "num_tensors": pattern(3, SHAPE, tensors=TENSORS - 1),
}


@pytest.mark.parametrize("field", MISMATCHES)
@pytest.mark.parametrize("opcode", ["pull", "push"])
@pytest.mark.parametrize("ready", [True, False])
async def test_d5_geometry_that_differs(setting: Setting, opcode: str, field: str, ready: bool) -> None:
    cache = setting.caches.register_blocks_cache(MISMATCHES[field])
    if ready:
        await cache.ready()
    before = [tensor.copy() for tensor in cache.tensors]
    with pytest.raises(adt.CacheMismatch, match=field) as caught:
        setting.call(opcode, [0], [0], cache=cache)
    assert caught.value.field == field
    assert getattr(cache.geometry, field) == caught.value.local
    assert getattr(setting.theirs.geometry, field) == caught.value.remote
    setting.untouched()
    for tensor, was in zip(cache.tensors, before, strict=True):
        np.testing.assert_array_equal(tensor, was)


async def test_more_blocks_on_one_side(setting: Setting) -> None:
    """The number of blocks may differ; each side's indices keep to their own."""
    cache = await setting.pair.take(pattern(3, (20, 3, 4), tensors=TENSORS))
    setting.refuses(adt.BlockIndexError, "pull", [8], [19], cache=cache)
    setting.refuses(adt.BlockIndexError, "push", [19], [8], cache=cache)
    await setting.call("pull", [7], [19], cache=cache)
    np.testing.assert_array_equal(cache.tensors[0][19], setting.theirs.tensors[0][7])


async def test_bfloat16_is_a_dtype_of_its_own(setting: Setting) -> None:
    """Its bits travel as they are, and a cache of another type of the same size does not fit."""
    pair = setting.pair
    bits = pattern(5, SHAPE, np.uint16)
    desc = adt.CacheDesc(2, SHAPE, "bf16")
    key = adt.BlocksCacheKey(OWNER, 1)
    await pair.offer(bits, desc=desc, key=key)
    ours = await pair.take([np.zeros_like(t) for t in bits], desc=desc)
    assert ours.geometry.dtype == "bfloat16"
    await setting.caches.pull_blocks(key, ours, range(8), range(8))
    for a, b in zip(bits, ours.tensors, strict=True):
        np.testing.assert_array_equal(a, b)
    plain = await pair.take([np.zeros_like(t) for t in bits])
    with pytest.raises(adt.CacheMismatch, match="dtype"):
        setting.caches.pull_blocks(key, plain, [0], [0])


# --- memory ----------------------------------------------------------------------------------------------


async def test_read_only_memory(setting: Setting) -> None:
    frozen = [np.frombuffer(bytes(96), np.uint8).reshape(SHAPE) for _ in range(TENSORS)]
    with pytest.raises(adt.CacheAccessError, match="tensor 0"):
        setting.caches.register_blocks_cache(frozen)
    cache = await setting.pair.take(frozen, remote=None)
    setting.refuses(adt.CacheAccessError, "pull", [0], [0], cache=cache)
    late = setting.caches.register_blocks_cache(frozen, remote="r")
    assert late._state == "registering"
    setting.refuses(adt.CacheAccessError, "pull", [0], [0], cache=late)
    assert not any(tensor.any() for tensor in frozen)
    await setting.call("push", [0], [0], cache=cache)


async def test_cache_that_peers_may_only_read(setting: Setting) -> None:
    key = adt.BlocksCacheKey(OWNER, 1)
    source = await setting.pair.offer(pattern(4, SHAPE, tensors=TENSORS), key=key, remote="r")
    before = [tensor.copy() for tensor in source.tensors]
    setting.refuses(adt.CacheAccessError, "push", [0], [0], key=key)
    late = setting.caches.register_blocks_cache(pattern(5, SHAPE, tensors=TENSORS))
    setting.refuses(adt.CacheAccessError, "push", [0], [0], key=key, cache=late)
    await setting.call("pull", [0], [0], key=key)
    for tensor, was in zip(source.tensors, before, strict=True):
        np.testing.assert_array_equal(tensor, was)


async def test_address_that_is_not_mapped(setting: Setting) -> None:
    register = setting.caches.register_blocks_cache
    desc = adt.CacheDesc(1, (4, mmap.PAGESIZE), "uint8")
    memory = mmap.mmap(-1, 8 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    page = mmap.PAGESIZE
    for wrong in (page, address - (address % 2**40) + 2**46, 2**63):
        with pytest.raises((adt.RegistrationError, adt.ArgumentError)):
            register([wrong], desc=desc)
    # One page in the middle that cannot be read, and then one that cannot be written.
    assert libc.mprotect(address + 2 * page, page, 0) == 0
    with pytest.raises(adt.RegistrationError, match=f"{address + 2 * page:#x}"):
        register([address], desc=desc)
    assert libc.mprotect(address + 2 * page, page, mmap.PROT_READ) == 0
    with pytest.raises(adt.RegistrationError, match="writable"):
        register([address], desc=desc)
    cache = register([address], desc=desc, remote="r")
    await cache.ready()
    whole = adt.BlocksCacheKey(OWNER, 1)
    await setting.pair.offer([np.zeros((4, page), np.uint8)], key=whole)
    with pytest.raises(adt.CacheAccessError):
        setting.caches.pull_blocks(whole, cache, [0], [0])
    await setting.caches.push_blocks(whole, cache, [0, 1, 2, 3], [0, 1, 2, 3])
    await setting.caches.unregister_cache(cache)
    assert libc.mprotect(address + 2 * page, page, mmap.PROT_READ | mmap.PROT_WRITE) == 0
    await setting.caches.unregister_cache(register([address], desc=desc))
    # A file that is shorter than its mapping: the pages beyond are mapped, and reading them would be a SIGBUS.
    fd = os.memfd_create("short")
    os.ftruncate(fd, 4 * page)
    short = mmap.mmap(fd, 4 * page)
    os.ftruncate(fd, 2 * page)
    try:
        with pytest.raises(adt.RegistrationError):
            register([ctypes.addressof(ctypes.c_char.from_buffer(short))], desc=desc)
    finally:
        os.close(fd)
    for wrong in (0, -1, 2**64, HUGE, True, 1.0):
        with pytest.raises((adt.ArgumentError, adt.ArgumentTypeError, adt.RegistrationError)):
            register([wrong], desc=desc)
    with pytest.raises(adt.ArgumentError, match="desc"):
        register([address])


async def test_wrong_registrations(setting: Setting) -> None:
    register, allocate = setting.caches.register_blocks_cache, setting.caches.allocate_blocks_cache
    tensor = np.zeros(SHAPE, np.uint8)
    desc = adt.CacheDesc(1, SHAPE, "uint8")
    caches = dict(setting.caches.caches)
    for wrong in (tensor, None, 5, "tensors", [], [None], [tensor, tensor[:4].copy()], [tensor, tensor.view(np.int8)]):
        with pytest.raises(adt.DataDistError):
            register(wrong)
    with pytest.raises(adt.ArgumentError):
        register([tensor, tensor])  # two tensors on the same memory
    with pytest.raises(adt.ArgumentError):
        register([np.zeros((8, 4, 4), np.uint8)[:, :, :3]])  # gaps inside a block
    for key in (adt.BlocksCacheKey(OWNER), adt.CacheKeyByIdAndIndex(USER, 1), (USER, 0), USER, "key"):
        with pytest.raises((adt.ArgumentError, adt.ArgumentTypeError)):
            register([tensor], key=key)  # type: ignore[arg-type]
    for remote in ("w", "rwx", "", True, 1):
        with pytest.raises(adt.ArgumentError):
            register([tensor], remote=remote)  # type: ignore[arg-type]
    with pytest.raises(adt.ArgumentError):
        register([tensor], key=adt.BlocksCacheKey(USER), remote=None)
    for wrong in (None, SHAPE, "uint8", desc.geometry()):
        with pytest.raises(adt.ArgumentTypeError):
            allocate(wrong)  # type: ignore[arg-type]
    with pytest.raises(adt.ArgumentError):
        allocate(adt.CacheDesc(1, SHAPE, "uint8", stride=32))
    assert setting.caches.caches == caches
    taken = register([tensor], key=adt.BlocksCacheKey(USER))
    with pytest.raises(adt.CacheExists):
        register([tensor.copy()], key=adt.BlocksCacheKey(USER))
    with pytest.raises(adt.CacheExists):
        allocate(desc, key=adt.BlocksCacheKey(USER))
    with pytest.raises(adt.ArgumentError, match="allocated"):
        setting.caches.deallocate_cache(taken)
    for wrong in (None, 1, "cache"):
        with pytest.raises(adt.ArgumentTypeError):
            setting.caches.unregister_cache(wrong)  # type: ignore[arg-type]
    with pytest.raises(adt.ArgumentError, match="another DataDist"):
        setting.caches.unregister_cache(setting.theirs)
    setting.untouched()


async def test_more_memory_than_there_is(setting: Setting) -> None:
    with pytest.raises(adt.OutOfMemoryError):
        setting.caches.allocate_blocks_cache(adt.CacheDesc(1, (2, 2**59), "uint8"))


# --- where and when --------------------------------------------------------------------------------------


def usages(setting: Setting) -> Iterator[Callable[[], Any]]:
    """Yield everything that a DataDist that cannot be used must refuse."""
    user, caches, ours = setting.pair.user, setting.caches, setting.ours
    tensor, info = np.zeros(SHAPE, np.uint8), adt.ClusterInfo(OWNER, "127.0.0.1:1")
    yield lambda: caches.pull_blocks(KEY, ours, [0], [0])
    yield lambda: caches.push_blocks(KEY, ours, [0], [0])
    yield lambda: caches.register_blocks_cache([tensor])
    yield lambda: caches.allocate_blocks_cache(adt.CacheDesc(1, SHAPE, "uint8"))
    yield lambda: caches.unregister_cache(ours)
    yield lambda: user.link(info)
    yield lambda: user.unlink(info)
    yield lambda: user.fence(OWNER)
    yield user.events
    yield user.notifications
    yield user.stats
    yield user.dump


def refused_by_all(setting: Setting, kind: type[adt.DataDistError]) -> list[str]:
    """Return what is wrong."""
    wrong = []
    for number, use in enumerate(usages(setting)):
        try:
            use()
        except kind:
            continue
        except BaseException as error:
            wrong.append(f"{number}: {error!r}")
        else:
            wrong.append(f"{number}: no error")
    return wrong


class ByBlocks(NamedTuple):
    cluster_id: int
    model_id: int


class ById(NamedTuple):
    cluster_id: int
    cache_id: int
    batch_index: int


@pytest.mark.parametrize("opcode", ["pull", "push"])
async def test_a_tuple_that_equals_a_key_is_no_key(setting: Setting, opcode: str) -> None:
    for key, other in ((KEY, ByBlocks), (adt.CacheKeyByIdAndIndex(OWNER, setting.theirs.id), ById)):
        for _ in range(2):  # before and after the short way knows the pair, whose keys equal tuples
            for wrong in (tuple(key), other(*key)):
                with pytest.raises(adt.ArgumentTypeError, match=f"got {type(wrong).__name__}"):
                    setting.call(opcode, [0], [1], key=wrong)
            await setting.call(opcode, [], [], key=key)


async def test_what_looks_like_a_cache_is_none(setting: Setting) -> None:
    class Like:
        @property
        def id(self) -> int:
            raise ValueError("nobody asks")

    await setting.call("pull", [], [])
    for opcode in ("pull", "push"):
        with pytest.raises(adt.ArgumentTypeError, match="got Like"):
            setting.call(opcode, [0], [1], cache=Like())


@pytest.mark.parametrize("opcode", ["pull", "push"])
async def test_iterators_are_read_once(setting: Setting, opcode: str) -> None:
    """What the engine knows before the loop does is told as it is: reading again would find other numbers of blocks."""
    await setting.call(opcode, [0], [1])
    _ = setting.pair.owner.cache_manager.unregister_cache(setting.theirs)

    def gone() -> bool:
        try:
            setting.call(opcode, [], [])
        except adt.CacheNotFound:
            return True
        return False

    until_now(gone)
    assert KEY in setting.pair.link.table  # the loop has not heard of it
    for src, dst in (([2], [3]), (iter([2]), [3]), ([2], iter([3])), (iter([2]), iter([3]))):
        with pytest.raises(adt.CacheNotFound, match="no such cache"):
            setting.call(opcode, src, dst)


@pytest.mark.loop
async def test_foreign_thread_and_loop(setting: Setting) -> None:
    # With a transfer before: the short way of a known pair must notice it as well.
    await setting.call("pull", [], [])
    wrong = await asyncio.to_thread(refused_by_all, setting, adt.WrongLoopError)
    assert wrong == []

    def with_a_loop() -> list[str]:
        async def use() -> list[str]:
            return refused_by_all(setting, adt.WrongLoopError)

        return asyncio.run(use())

    assert await asyncio.to_thread(with_a_loop) == []
    assert not setting.ours.closed
    await setting.call("pull", [0], [0])


def test_foreign_loop_of_the_same_thread() -> None:
    """One loop pauses, and another one runs in its thread."""
    first, second = asyncio.new_event_loop(), asyncio.new_event_loop()

    async def enter() -> tuple[Any, Setting]:
        context = linked("shm")
        pair = await context.__aenter__()
        theirs = await pair.offer(pattern(1, SHAPE, tensors=TENSORS))
        ours = await pair.take(pattern(2, SHAPE, tensors=TENSORS))
        setting = Setting(pair, theirs, ours)
        await setting.call("pull", [], [])
        return context, setting

    async def use() -> list[str]:
        return refused_by_all(setting, adt.WrongLoopError)

    try:
        context, setting = first.run_until_complete(enter())
        assert second.run_until_complete(use()) == []
        assert refused_by_all(setting, adt.WrongLoopError) == []  # no loop runs at all
        np.testing.assert_array_equal(setting.ours.tensors[0], setting.was[TENSORS])
        first.run_until_complete(context.__aexit__(None, None, None))
    finally:
        first.run_until_complete(first.shutdown_default_executor())
        first.close()
        second.close()


async def test_closed_datadist(setting: Setting) -> None:
    ours = setting.ours
    tensors = ours.tensors
    await setting.call("pull", [], [])
    await setting.pair.user.aclose()
    assert refused_by_all(setting, adt.ClosedError) == []
    assert ours.tensors == ()
    assert ours.closed
    np.testing.assert_array_equal(tensors[0], setting.was[TENSORS])
    with pytest.raises(adt.ClosedError):
        await setting.pair.user.open()
    await setting.pair.user.aclose()


async def test_datadist_that_was_not_opened() -> None:
    dd = adt.DataDist(5)
    info = adt.ClusterInfo(1, "127.0.0.1:1")
    for use in (lambda: dd.cache_manager, lambda: dd.link(info), lambda: dd.unlink(info), lambda: dd.fence(1)):
        with pytest.raises(adt.ClosedError, match="not open"):
            use()
    for use in (dd.events, dd.notifications, dd.stats, dd.dump):
        with pytest.raises(adt.ClosedError, match="not open"):
            use()
    await dd.aclose()
    with pytest.raises(adt.ClosedError):
        await dd.open()


async def test_closed_cache(setting: Setting) -> None:
    await setting.call("pull", [], [])
    tensors = setting.ours.tensors
    closing = setting.caches.unregister_cache(setting.ours)
    # From the call on, not from its end.
    for opcode in ("pull", "push"):
        with pytest.raises(adt.ClosedError):
            setting.call(opcode, [0], [0])
    await closing
    for opcode in ("pull", "push"):
        with pytest.raises(adt.ClosedError):
            setting.call(opcode, [0], [0])
    np.testing.assert_array_equal(tensors[0], setting.was[TENSORS])
    await setting.caches.unregister_cache(setting.ours)  # again is no error


async def test_forked_child(setting: Setting) -> None:
    await setting.call("pull", [], [])
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.write(write, "\n".join(refused_by_all(setting, adt.ForkedError)).encode())
        except BaseException as error:
            os.write(write, repr(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        assert pipe.read() == b""
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    # The parent's link is as it was.
    await setting.call("pull", [0], [0])
    np.testing.assert_array_equal(setting.ours.tensors[0][0], setting.theirs.tensors[0][0])


# --- zero work -------------------------------------------------------------------------------------------

NOTHING: list[tuple[Any, Any, dict[str, Any]]] = [
    ([], [], {}),
    ((), np.array([], np.int64), {}),
    (range(0), memoryview(b""), {}),
    (np.zeros(0, np.uint8), array.array("q"), {}),
    ([0], [0], {"src_layer_range": range(0), "dst_layer_range": range(0)}),
    ([0], [0], {"src_layer_range": range(2, 2), "dst_layer_range": range(1, 1)}),
    ([0, 1], [1, 0], {"src_layer_range": range(5, 2), "dst_layer_range": range(0)}),
]


@pytest.mark.parametrize("opcode", ["pull", "push"])
async def test_l5_zero_work_is_success_and_notifies(setting: Setting, opcode: str) -> None:
    notes = aiter(setting.pair.owner.notifications())
    for number, (src, dst, options) in enumerate(NOTHING):
        transfer = setting.call(opcode, src, dst, notify=b"%d" % number, **options)
        assert await transfer is None
        assert transfer.progress == (0, 0)
        note = await asyncio.wait_for(anext(notes), PATIENCE)
        assert note == adt.Notification(USER, b"%d" % number)
    counts = setting.pair.user.stats()["total"]
    assert counts["ok"] == counts["started"] == len(NOTHING)
    assert counts["bytes_pulled"] == counts["bytes_pushed"] == 0
    for tensor, was in zip((*setting.theirs.tensors, *setting.ours.tensors), setting.was, strict=True):
        np.testing.assert_array_equal(tensor, was)


async def test_zero_work_does_not_excuse_wrong_input(setting: Setting) -> None:
    empty = {"src_layer_range": range(0), "dst_layer_range": range(0)}
    setting.refuses(adt.BlockIndexError, "pull", [BLOCKS], [0], **empty)
    setting.refuses(adt.CacheNotFound, "pull", [], [], key=adt.BlocksCacheKey(OWNER, 9))
    setting.refuses(adt.ArgumentTypeError, "pull", [], [], notify="text")


# --- layers against numpy ----------------------------------------------------------------------------------


@st.composite
def layered(draw: st.DrawFn) -> dict[str, Any]:
    per_layer = draw(st.integers(1, 3))
    counts = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    layers = draw(st.integers(0, min(counts)))
    starts = [draw(st.integers(0, count - layers)) for count in counts]
    blocks = draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    dst = draw(st.lists(st.integers(0, blocks[1] - 1), unique=True))
    src = draw(st.lists(st.integers(0, blocks[0] - 1), min_size=len(dst), max_size=len(dst)))
    return {
        "per_layer": per_layer,
        "counts": counts,
        "ranges": [range(start, start + layers) for start in starts],
        "omit": counts[0] == counts[1] == layers and draw(st.booleans()),
        "blocks": blocks,
        "lists": (src, dst),
        # From inline copies to several batches; a stride leaves gaps between blocks on either side.
        "elements": draw(st.sampled_from([1, 7, 4096, 200_000])),
        "gaps": draw(st.tuples(st.booleans(), st.booleans())),
        "dtype": draw(st.sampled_from(["u1", "f4"])),
    }


def with_gaps(tensors: list[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    """Return the same blocks as every second of a larger array."""
    wide = [np.full((len(t), 2, *t.shape[1:]), 0x55).astype(t.dtype) for t in tensors]
    for tensor, larger in zip(tensors, wide, strict=True):
        larger[:, 1] = tensor
    return [larger[:, 1] for larger in wide]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("opcode", ["pull", "push"])
@hypothesis.given(case=layered())
@hypothesis.settings(max_examples=max(5, hypothesis.settings.default.max_examples // 4))
async def test_layers_against_numpy(transport: str, opcode: str, case: dict[str, Any]) -> None:
    sides = []
    for side, seed in enumerate((1, 2)):
        shape = (case["blocks"][side], case["elements"])
        tensors = pattern(seed, shape, case["dtype"], case["counts"][side] * case["per_layer"])
        sides.append(with_gaps(tensors) if case["gaps"][side] else tensors)
    source, target = sides
    src, dst = case["lists"]
    expected = [tensor.base.copy() if tensor.base is not None else tensor.copy() for tensor in target]
    first = [layers.start * case["per_layer"] for layers in case["ranges"]]
    for t in range(len(case["ranges"][0]) * case["per_layer"]):
        there = expected[first[1] + t]
        (there[:, 1] if case["gaps"][1] else there)[dst] = source[first[0] + t][src]
    unchanged = [tensor.copy() for tensor in source]

    options: dict[str, Any] = {"tensor_num_per_layer": case["per_layer"]}
    if not case["omit"]:
        options.update(src_layer_range=case["ranges"][0], dst_layer_range=case["ranges"][1])
    async with linked(transport) as pair:
        theirs, ours = (source, target) if opcode == "pull" else (target, source)
        await pair.offer(theirs)
        cache = await pair.take(ours)
        manager = pair.user.cache_manager
        method = manager.pull_blocks if opcode == "pull" else manager.push_blocks
        transfer = method(KEY, cache, src, dst, **options)
        await transfer
        moved = len(dst) * len(case["ranges"][0]) * case["per_layer"] * source[0][0].nbytes
        assert transfer.progress == (moved, moved)
    for tensor, right in zip(target, expected, strict=True):
        np.testing.assert_array_equal(tensor.base if tensor.base is not None else tensor, right)
    for tensor, right in zip(source, unchanged, strict=True):
        np.testing.assert_array_equal(tensor, right)


# --- tensors -------------------------------------------------------------------------------------------------


class Interface:
    """Nothing but the array interface, over memory of its own."""

    def __init__(self, data: bytes) -> None:
        self.memory = np.frombuffer(data, np.uint8).reshape(SHAPE).copy()

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return dict(self.memory.__array_interface__)


class Exported:
    """Nothing but DLPack."""

    def __init__(self, data: bytes) -> None:
        self.memory = np.frombuffer(data, np.uint8).reshape(SHAPE).copy()

    def __dlpack__(self, **options: Any) -> Any:
        return self.memory.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.memory.__dlpack_device__()


def in_mmap(data: bytes) -> memoryview:
    memory = mmap.mmap(-1, len(data))
    memory[:] = data
    return memoryview(memory).cast("B", SHAPE)


def in_ctypes(data: bytes) -> Any:
    return (ctypes.c_ubyte * 4 * 3 * 8).from_buffer_copy(data)


def in_halves(data: bytes, half: int) -> np.ndarray[Any, Any]:
    """K or V of one interleaved array: ``kv[:, 0]``."""
    kv = np.zeros((8, 2, 3, 4), np.uint8)
    kv[:, half] = np.frombuffer(data, np.uint8).reshape(SHAPE)
    return kv[:, half]


TENSOR_FORMS: dict[str, tuple[Callable[[bytes], Any], Callable[[Any], bytes]]] = {
    "numpy": (lambda d: np.frombuffer(d, np.uint8).reshape(SHAPE).copy(), lambda x: x.tobytes()),
    "kv[:, 0]": (lambda d: in_halves(d, 0), lambda x: x.tobytes()),
    "kv[:, 1]": (lambda d: in_halves(d, 1), lambda x: x.tobytes()),
    "array interface": (Interface, lambda x: x.memory.tobytes()),
    "DLPack": (Exported, lambda x: x.memory.tobytes()),
    "bytearray": (lambda d: memoryview(bytearray(d)).cast("B", SHAPE), lambda x: x.tobytes()),
    "mmap": (in_mmap, lambda x: x.tobytes()),
    "ctypes": (in_ctypes, bytes),
}


def library_or(name: str) -> Any:
    return pytest.param(name, marks=[pytest.mark.torch] if name == "torch" else [])


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("form", [*TENSOR_FORMS, library_or("torch"), "raw address", "library memory"])
async def test_every_form_of_tensors(form: str, transport: str) -> None:
    """What was pulled is in the object that was registered, and pushing brings it back elsewhere."""
    data = [tensor.tobytes() for tensor in pattern(1, SHAPE)]
    options: dict[str, Any] = {}
    if form == "torch":
        import torch

        def make(d: bytes) -> Any:
            return torch.tensor(list(d), dtype=torch.uint8).reshape(SHAPE)

        def read(x: Any) -> bytes:
            return bytes(x.numpy().tobytes())
    elif form == "raw address":
        kept = []

        def make(d: bytes) -> Any:
            kept.append(np.frombuffer(d, np.uint8).reshape(SHAPE).copy())
            return kept[-1].ctypes.data

        def read(x: Any) -> bytes:
            return next(array for array in kept if array.ctypes.data == x).tobytes()

        options["desc"] = adt.CacheDesc(2, SHAPE, "uint8")
    elif form != "library memory":
        make, read = TENSOR_FORMS[form]

    async with linked(transport) as pair:
        theirs: Sequence[Any]
        ours: Sequence[Any]
        if form == "library memory":
            desc = adt.CacheDesc(2, SHAPE, "uint8")
            theirs = (await pair.allocate(desc)).tensors
            for tensor, d in zip(theirs, data, strict=True):
                tensor[:] = np.frombuffer(d, np.uint8).reshape(SHAPE)
            cache = pair.user.cache_manager.allocate_blocks_cache(desc)
            await cache.ready()
            ours, read = cache.tensors, lambda x: x.tobytes()
        else:
            theirs = [make(d) for d in data]
            ours = [make(bytes(96)) for _ in data]
            await pair.offer(theirs, **options)
            cache = await pair.take(ours, **options)
        await pair.user.cache_manager.pull_blocks(KEY, cache, range(8), range(7, -1, -1))
        for d, there, here in zip(data, theirs, ours, strict=True):
            assert read(there) == d
            backwards = np.frombuffer(d, np.uint8).reshape(SHAPE)[::-1].tobytes()
            assert read(here) == backwards
        await pair.user.cache_manager.push_blocks(KEY, cache, range(8), range(8))
        for there, here in zip(theirs, ours, strict=True):
            assert read(there) == read(here)


@pytest.mark.torch
async def test_torch_tensors(setting: Setting) -> None:
    import torch

    shape = (8, 2, 16)
    bf16 = torch.arange(256, dtype=torch.float32).reshape(shape).to(torch.bfloat16)
    key = adt.BlocksCacheKey(OWNER, 1)
    await setting.pair.offer([bf16, -bf16], key=key)
    ours = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(2)]
    cache = await setting.pair.take(ours)
    assert cache.geometry.dtype == "bfloat16"
    await setting.caches.pull_blocks(key, cache, torch.arange(8), torch.arange(7, -1, -1))
    assert torch.equal(ours[0], bf16.flip(0))
    assert torch.equal(ours[1], -bf16.flip(0))
    strided = torch.zeros((8, 2, 2, 16), dtype=torch.bfloat16)
    halves = await setting.pair.take([strided[:, 0], strided[:, 1]])
    await setting.caches.pull_blocks(key, halves, range(8), range(8))
    assert torch.equal(strided[:, 0], bf16)
    assert torch.equal(strided[:, 1], -bf16)


@pytest.mark.torch
async def test_torch_tensors_that_are_no_indices(stage: Setting) -> None:
    import torch

    for wrong in (
        torch.tensor([0.0, 1.0]),
        torch.tensor([False, True]),
        torch.tensor([[0], [1]]),
        torch.tensor(1),
    ):
        stage.refuses(adt.ArgumentTypeError, "pull", wrong, [0, 1])
        stage.refuses(adt.ArgumentTypeError, "pull", [0, 1], wrong)


def test_all_faults_are_faults() -> None:
    """The tables would be worth nothing if a typing mistake made an entry empty."""
    assert all(len(list(itertools.islice(iter(blocks), 2))) == 2 for blocks in RANGE_FAULTS.values())
    assert threading.current_thread() is threading.main_thread()
