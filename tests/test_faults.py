"""Faults that users of other transfer libraries met, and that no other file tests. `test_project` keeps the list."""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

import aiodatadist as adt
from aiodatadist import _cann, _core

from .pairs import OWNER, USER, linked, pattern

KEY = adt.BlocksCacheKey(OWNER)
TOKENS, HEADS, SIZE = 16, 4, 8


@pytest.mark.parametrize("transports", [("shm", "tcp"), ("tcp",)])
@pytest.mark.parametrize("opcode", ["pull", "push"])
async def test_d1_another_layout_of_the_same_bytes_is_refused(transports: tuple[str, ...], opcode: str) -> None:
    """Tokens before heads here and heads before tokens there: the same dtype, and as many bytes."""
    async with linked(*transports) as pair:
        theirs = await pair.offer(pattern(1, (8, TOKENS, HEADS, SIZE)))
        mine = await pair.take(pattern(2, (8, HEADS, TOKENS, SIZE)))
        before = [tensor.copy() for tensor in (*theirs.tensors, *mine.tensors)]
        move = pair.user.cache_manager.pull_blocks if opcode == "pull" else pair.user.cache_manager.push_blocks
        with pytest.raises(adt.CacheMismatch) as raised:
            _ = move(KEY, mine, [0], [1])
        assert raised.value.field == "block_shape"
        assert str((HEADS, TOKENS, SIZE)) in str(raised.value)
        assert str((TOKENS, HEADS, SIZE)) in str(raised.value)
        for tensor, was in zip((*theirs.tensors, *mine.tensors), before, strict=True):
            np.testing.assert_array_equal(tensor, was)


@pytest.mark.parametrize("transports", [("shm", "tcp"), ("tcp",)])
async def test_d2_what_holds_for_one_group_of_caches_holds_for_all(transports: tuple[str, ...]) -> None:
    """Three groups of their own shape and dtype: each arrives where it belongs, and none takes another's rules."""
    groups: list[tuple[tuple[int, ...], Any]] = [
        ((8, TOKENS, HEADS, SIZE), np.float16),
        ((12, TOKENS, 1, SIZE), np.float32),
        ((8, HEADS, TOKENS, SIZE), np.uint8),
    ]
    async with linked(*transports) as pair:
        theirs, mine = [], []
        for number, (shape, dtype) in enumerate(groups):
            key = adt.BlocksCacheKey(OWNER, model_id=number)
            theirs.append(await pair.offer(pattern(10 + number, shape, dtype), key=key))
            mine.append(await pair.take(pattern(20 + number, shape, dtype)))
        src, dst = [5, 0, 3], [1, 7, 2]
        pulls = [
            pair.user.cache_manager.pull_blocks(adt.BlocksCacheKey(OWNER, model_id=number), cache, src, dst)
            for number, cache in enumerate(mine)
        ]
        await asyncio.gather(*pulls)
        for there, here in zip(theirs, mine, strict=True):
            for tensor, own in zip(there.tensors, here.tensors, strict=True):
                assert tensor[src].tobytes() == own[dst].tobytes()
        for number, cache in enumerate(mine):
            with pytest.raises(adt.CacheMismatch):
                _ = pair.user.cache_manager.pull_blocks(
                    adt.BlocksCacheKey(OWNER, model_id=(number + 1) % 3), cache, [0], [0]
                )


@pytest.mark.loop
@pytest.mark.parametrize("transports", [("shm", "tcp"), ("tcp",)])
async def test_e6_whatever_ends_the_tasks_of_a_node_no_future_is_left(transports: tuple[str, ...]) -> None:
    """All that waits in the loop is cancelled, in the middle of transfers: each future has its end."""
    async with linked(*transports, user={"inline_bytes": 0}) as pair:
        await pair.offer(pattern(1, (4096, 64)))
        mine = await pair.take(pattern(2, (4096, 64)))
        order = np.random.default_rng(3).permutation(4096)
        transfers = [
            pair.user.cache_manager.pull_blocks(KEY, mine, lane, lane, timeout=None)
            for lane in np.array_split(order, 8)
        ]
        fence = pair.owner.fence(USER, timeout=None)
        for _ in range(10):  # a task that is cancelled before its first step leaves a coroutine that Python warns about
            await asyncio.sleep(0)

        async def end_all() -> None:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await asyncio.wait([*transfers, fence], timeout=60.0)
            await pair.user.wait_closed()
            await pair.owner.wait_closed()

        with pytest.warns(ResourceWarning, match="unclosed DataDist"):
            await end_all()
        assert all(future.done() for future in (*transfers, fence))
        for future in (*transfers, fence):
            error = None if future.cancelled() else future.exception()
            assert error is None or isinstance(error, adt.DataDistError), error


@pytest.mark.parametrize("level", [logging.DEBUG, logging.CRITICAL])
async def test_e7_the_log_level_changes_nothing(level: int, caplog: pytest.LogCaptureFixture) -> None:
    """Failures, cancels and successes come out alike, said or not."""
    ends = []
    with caplog.at_level(level, "aiodatadist"):
        async with linked("tcp", user={"inline_bytes": 0}) as pair:
            await pair.offer(pattern(1, (64, 64)), remote="r")
            mine = await pair.take(pattern(2, (64, 64)))
            pull, push = pair.user.cache_manager.pull_blocks, pair.user.cache_manager.push_blocks
            for start in (
                lambda: pull(KEY, mine, [0], [1]),
                lambda: push(KEY, mine, [0], [1]),
                lambda: pull(KEY, mine, [0], [1], notify=b"x"),
                lambda: pull(adt.BlocksCacheKey(OWNER, 5), mine, [0], [1]),
                lambda: pair.user.link(adt.ClusterInfo(9, "127.0.0.1:1")),
            ):
                try:
                    await start()
                except adt.DataDistError as error:
                    ends.append(type(error).__name__)
                else:
                    ends.append("ok")
            late = pull(KEY, mine, [2], [3])
            late.cancel()
            await asyncio.wait([late])
            ends.append("cancelled" if late.cancelled() else "other")
    assert ends == ["ok", "CacheAccessError", "ok", "CacheNotFound", "LinkError", "cancelled"]


async def test_v4_a_wall_clock_that_jumps_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Durations and deadlines come from a clock that only goes on; no time of day crosses the wire."""
    hours = iter(range(0, -(10**9), -3600))
    monkeypatch.setattr(time, "time", lambda: float(next(hours)))
    monkeypatch.setattr(time, "time_ns", lambda: next(hours) * 10**9)
    async with linked("shm", "tcp") as pair:
        await pair.offer(pattern(1, (64, 64)))
        mine = await pair.take(pattern(2, (64, 64)))
        for number in range(20):
            await pair.user.cache_manager.pull_blocks(KEY, mine, [number], [number], timeout=30.0, notify=b"x")
        stats = pair.user.stats()["links"][OWNER]
        assert stats["counters"]["ok"] >= 20
        assert stats["counters"]["timed_out"] == 0
        waiting = pair.owner.fence(USER)
        assert all(row.age >= 0 for row in (*pair.owner.dump(), *pair.user.dump()))
        await waiting


def _readelf(*options: str) -> str:
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("there is no readelf")
    return subprocess.run([readelf, "-W", *options], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("library", [str(_core.__file__), _cann.shim_path()], ids=["core", "shim"])
def test_k2_nothing_of_an_accelerator_is_linked(library: str) -> None:
    """Verbs, CANN and CUDA are opened at run time, if at all: the package needs the C and C++ runtimes only."""
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", _readelf("-d", library)))
    assert needed
    allowed = r"(libc|libm|libpthread|libstdc\+\+|libgcc_s|ld-linux[\w-]*|lib[atu][a-z]*san|libpython[\d.]*)\.so[\d.]*"
    assert not [name for name in needed if not re.fullmatch(allowed, name)]


def test_k2_the_shim_asks_for_the_published_class_only() -> None:
    """What it leaves undefined is HIXL's class, its strings, and the C and C++ runtimes; no std::string crosses."""
    rows = [line.split() for line in _readelf("--dyn-syms", _cann.shim_path()).splitlines()]
    undefined = {row[7]: row[4] for row in rows if len(row) > 7 and row[6] == "UND"}
    of_runtime = re.compile(r"@(GLIBC|GLIBCXX|CXXABI|GCC)_[\d.]+$|^_ITM_|^__gmon_start__$|^__[atu]b?[a-z]*san_")
    of_cann = {name for name in undefined if not of_runtime.search(name)}
    assert of_cann == set(_core.hixl_symbols())
    assert all(name.startswith(("_ZN4hixl4Hixl", "_ZN2ge12AscendString", "_ZNK2ge12AscendString")) for name in of_cann)
    assert not [name for name in undefined if "basic_string" in name]
    defined = {row[7] for row in rows if len(row) > 7 and row[6] not in ("UND", "Ndx") and row[4] == "GLOBAL"}
    assert defined == {"adt_hixl_shim"}


def test_k2_importing_needs_no_framework() -> None:
    """What is installed is not loaded, and what is missing is not missed."""
    code = """
import sys
for name in ("torch", "torch_npu", "uvloop", "aiohttp", "redis"):
    sys.modules[name] = None
import aiodatadist
print(aiodatadist.DataDist(1))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "DataDist 1" in done.stdout
