"""The engine by itself: two native nodes in one process, every path, verbs too, with threads and in step mode."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from aiodatadist import _core
from aiodatadist.errors import (
    ArgumentError,
    ArgumentTypeError,
    BlockIndexError,
    CacheMismatch,
    CacheNotFound,
    ClosedError,
    DataDistError,
    PeerLostError,
    TransportUnavailable,
)

from .conftest import Scale
from .engine_rig import (
    ABORTED,
    CANCELLED,
    CASES,
    CLOSED,
    FENCE,
    FENCE_DONE,
    FENCED,
    GOODBYE,
    HEARTBEAT,
    LOCAL_CASES,
    MODES,
    NOT_FOUND,
    OK,
    PATHS,
    PEER_LOST,
    PERMISSION,
    PING,
    PONG,
    READ_DONE,
    READ_FRAME,
    RUN,
    SECOND,
    TIMEOUT,
    WRITE_DONE,
    WRITE_FRAME,
    Call,
    Geometry,
    Hand,
    Rig,
    Tensors,
    answer,
    hand,
    message,
    request,
    rig,
)
from .waiting import native_threads, until_now

READ, WRITE = _core.READ, _core.WRITE
SMALL: Geometry = (3, 64, 4096, 4096)
PLAIN = tuple(case for case in CASES if case[0] != "tcp-short")

every_case = pytest.mark.parametrize(("path", "mode"), CASES)
plain_case = pytest.mark.parametrize(("path", "mode"), PLAIN)
both_ways = pytest.mark.parametrize("opcode", [READ, WRITE], ids=["pull", "push"])


def expect(
    pair_tensors: tuple[Tensors, Tensors],
    opcode: int,
    local: list[int],
    remote: list[int],
    tensors: tuple[int, int, int],
) -> Callable[[], None]:
    """Work out with numpy what a transfer must make of both sides; the result checks it, gaps and all."""
    here, there = pair_tensors
    want_here, want_there = here.copy(), there.copy()
    first, second, count = tensors
    _, _, size, stride_here = here.geometry
    stride_there = there.geometry[3]
    for t in range(count):
        for a, b in zip(local, remote, strict=True):
            mine = slice(a * stride_here, a * stride_here + size)
            theirs = slice(b * stride_there, b * stride_there + size)
            if opcode == READ:
                want_here[first + t][mine] = there.raw[second + t][theirs]
            else:
                want_there[second + t][theirs] = here.raw[first + t][mine]

    def check() -> None:
        for got, want in zip(here.raw + there.raw, want_here + want_there, strict=True):
            np.testing.assert_array_equal(got, want)

    return check


def move_and_check(
    r: Rig,
    pair: _core.Pair,
    tensors: tuple[Tensors, Tensors],
    opcode: int,
    local: list[int],
    remote: list[int],
    which: tuple[int, int, int],
    inline: bool = False,
) -> None:
    check = expect(tensors, opcode, local, remote, which)
    call = r.move(pair, opcode, local, remote, tensors=which, inline=inline)
    assert (call.status, call.done) == (OK, len(local) * tensors[0].geometry[2] * which[2])
    check()


# --- moving bytes ---------------------------------------------------------------------------------


@pytest.mark.sanitize
@every_case
@both_ways
def test_scattered_blocks(path: str, mode: str, opcode: int) -> None:
    rng = random.Random(1)
    with rig(path, mode) as r:
        both = r.tensors(SMALL, owner=False, seed=1), r.tensors(SMALL, seed=2)
        pair = r.pair(*both)
        for count in (1, 2, 17, 64):
            local, remote = rng.sample(range(64), count), rng.sample(range(64), count)
            move_and_check(r, pair, both, opcode, local, remote, (0, 0, 3))


@every_case
@both_ways
@pytest.mark.parametrize("strides", [(1024, 1536), (1536, 1024), (1500, 2500)], ids=str)
def test_gaps_of_strided_tensors_stay(path: str, mode: str, opcode: int, strides: tuple[int, int]) -> None:
    with rig(path, mode) as r:
        both = (
            r.tensors((2, 50, 1000, strides[0]), owner=False, seed=1),
            r.tensors((2, 40, 1000, strides[1]), seed=2),
        )
        pair = r.pair(*both)
        # Neighbours on both sides: only contiguous tensors may merge them.
        move_and_check(r, pair, both, opcode, list(range(10, 40)), list(range(30)), (0, 0, 2))
        move_and_check(r, pair, both, opcode, [49, 0, 7], [39, 1, 0], (1, 0, 1))


@every_case
@both_ways
def test_ranges_of_tensors(path: str, mode: str, opcode: int) -> None:
    with rig(path, mode) as r:
        both = r.tensors((5, 8, 512, 512), owner=False, seed=1), r.tensors((7, 9, 512, 512), seed=2)
        pair = r.pair(*both)
        for which in ((0, 0, 5), (4, 6, 1), (1, 3, 3), (0, 0, 0)):
            move_and_check(r, pair, both, opcode, [7, 0, 1, 2], [8, 3, 4, 5], which)


@every_case
@both_ways
def test_blocks_larger_than_a_batch(path: str, mode: str, opcode: int) -> None:
    size = (4 << 20) + 13
    with rig(path, mode) as r:
        both = (
            r.tensors((1, 2, size, size), owner=False, seed=1),
            r.tensors((1, 2, size, size + 7), seed=2),
        )
        pair = r.pair(*both)
        move_and_check(r, pair, both, opcode, [1, 0], [0, 1], (0, 0, 1))


@every_case
@both_ways
def test_merged_runs_and_repeated_sources(path: str, mode: str, opcode: int) -> None:
    geometry = (1, 3000, 1024, 1024)
    with rig(path, mode) as r:
        both = r.tensors(geometry, owner=False, seed=1), r.tensors(geometry, seed=2)
        pair = r.pair(*both)
        move_and_check(r, pair, both, opcode, list(range(3000)), list(range(3000)), (0, 0, 1))
        source, destination = [5] * 40 + [6, 7, 7], list(range(100, 143))
        local, remote = (destination, source) if opcode == READ else (source, destination)
        move_and_check(r, pair, both, opcode, local, remote, (0, 0, 1))


@plain_case
@both_ways
def test_small_transfers_may_finish_inline(path: str, mode: str, opcode: int) -> None:
    with rig(path, mode, inline_bytes=64 * 1024) as r:
        both = r.tensors(SMALL, owner=False, seed=1), r.tensors(SMALL, seed=2)
        pair = r.pair(*both)
        move_and_check(r, pair, both, opcode, [1, 2, 9], [3, 4, 0], (0, 0, 3), inline=True)
        call = r.start(pair, opcode, [3], [4], inline=True)
        assert call.ended is path.startswith("shm")
        r.run(lambda: call.ended)


@every_case
def test_no_work_is_success(path: str, mode: str) -> None:
    with rig(path, mode, inline_bytes=4096) as r:
        both = r.tensors(SMALL, owner=False, seed=1), r.tensors(SMALL, seed=2)
        pair = r.pair(*both)
        for inline in (False, True):
            for blocks, which in (([], (0, 0, 3)), ([1], (3, 3, 0))):
                move_and_check(r, pair, both, READ, blocks, blocks, which, inline=inline)


@pytest.mark.parametrize("blocks", [[3, 1], (3, 1), np.array([3, 1]), np.array([3, 1], np.uint8), range(3, -1, -2)])
def test_any_integer_sequence(blocks: list[int]) -> None:
    with rig("shm-mapped", "step") as r:
        both = r.tensors(SMALL, owner=False, seed=1), r.tensors(SMALL, seed=2)
        pair = r.pair(*both)
        check = expect(both, READ, [int(block) for block in blocks], [0, 1], (0, 0, 3))
        assert r.move(pair, READ, blocks, [0, 1]).status == OK
        check()
        every_second = np.array([3, 9, 1, 9], np.int32)[::2]
        assert r.move(pair, READ, every_second, [np.int16(0), np.uint64(1)]).status == OK
        check()


# --- what is refused ------------------------------------------------------------------------------


@plain_case
def test_wrong_block_lists_move_nothing(path: str, mode: str) -> None:
    with rig(path, mode, inline_bytes=1 << 20) as r:
        here, there = r.tensors(SMALL, owner=False, seed=1), r.tensors((3, 32, 4096, 4096), seed=2)
        pair = r.pair(here, there)
        before = here.copy(), there.copy()
        wrong = [
            ([0], [32], "src_blocks[0]=32", "dst_blocks[0]=32"),
            ([64], [0], "dst_blocks[0]=64", "src_blocks[0]=64"),
            ([0, -1], [0, 1], "dst_blocks[1]=-1", "src_blocks[1]=-1"),
            ([0, 1], [0, -(2**63)], "src_blocks[1]", "dst_blocks[1]"),
            ([0, 1, 2], [0, 1], "dst_blocks has 3", "src_blocks has 3 entries"),
            ([2**63], [0], "dst_blocks[0]", "src_blocks[0]"),
            (np.array([2**63], np.uint64), [0], "dst_blocks[0]", "src_blocks[0]"),
        ]
        for inline in (False, True):
            for local, remote, pulling, pushing in wrong:
                for opcode, text in ((READ, pulling), (WRITE, pushing)):
                    with pytest.raises(BlockIndexError) as caught:
                        r.start(pair, opcode, local, remote, inline=inline)
                    assert text in str(caught.value)
            with pytest.raises(BlockIndexError, match=r"dst_blocks\[2\]=5 is named twice"):
                r.start(pair, READ, [5, 4, 5], [0, 1, 2], inline=inline)
            with pytest.raises(BlockIndexError, match=r"dst_blocks\[1\]=7 is named twice"):
                r.start(pair, WRITE, [5, 4], [7, 7], inline=inline)
            for bad in ([True], ["1"], [1.0], 5, "1", {1}, np.zeros((1, 1), np.int64), np.zeros(1), None):
                with pytest.raises(ArgumentTypeError):
                    r.start(pair, READ, bad, [0], inline=inline)  # type: ignore[arg-type]
        for got, want in zip(here.raw + there.raw, before[0] + before[1], strict=True):
            np.testing.assert_array_equal(got, want)
        assert r.user.node.pending() == []


@pytest.mark.parametrize(
    "which",
    [(0, 0, 4), (3, 0, 1), (0, 3, 1), (2**32 - 1, 0, 1), (0, 2**32 - 1, 1), (2**32 - 1, 2**32 - 1, 2)],
    ids=str,
)
def test_tensor_ranges_outside_the_cache(which: tuple[int, int, int]) -> None:
    """Ranges near 2**32 must not wrap into the cache."""
    with rig("shm-mapped", "step", inline_bytes=1 << 20) as r:
        pair = r.pair(r.tensors(SMALL, owner=False), r.tensors(SMALL))
        for inline in (False, True):
            with pytest.raises(CacheMismatch):
                r.start(pair, READ, [0], [0], tensors=which, inline=inline)


def test_blocks_of_different_size() -> None:
    with rig("tcp", "step") as r:
        pair = r.pair(r.tensors((1, 4, 512, 512), owner=False), r.tensors((1, 4, 1024, 1024)))
        with pytest.raises(CacheMismatch):
            r.start(pair, READ, [0], [0])


def test_a_list_that_changes_while_it_is_read() -> None:
    class Shortens:
        def __index__(self) -> int:
            blocks.clear()
            blocks.append(1)
            return 0

    with rig("shm-mapped", "step") as r:
        pair = r.pair(r.tensors(SMALL, owner=False), r.tensors(SMALL))
        blocks: list[object] = [Shortens(), *range(1, 60)]
        call = r.move(pair, READ, blocks, range(60))  # type: ignore[arg-type]
        assert call.status == OK  # the list as it was when the call began
        assert blocks == [1]


@plain_case
def test_rights_of_peers(path: str, mode: str) -> None:
    with rig(path, mode) as r:
        for readable, writable in ((True, False), (False, True)):
            here, there = r.tensors(SMALL, owner=False, seed=1), r.tensors(SMALL, seed=2)
            pair = r.pair(here, there, readable=readable, writable=writable)
            before = here.copy() + there.copy()
            allowed, refused = (READ, WRITE) if readable else (WRITE, READ)
            assert r.move(pair, refused, [1], [2]).status == PERMISSION
            for got, want in zip(here.raw + there.raw, before, strict=True):
                np.testing.assert_array_equal(got, want)
            move_and_check(r, pair, (here, there), allowed, [1], [2], (0, 0, 3))
        r.run(lambda: len(r.owner.seen(_core.EVENT_TRANSFER_ENDED)) == 2)


@pytest.mark.parametrize("mode", MODES)
def test_caches_of_one_region_with_different_rights(mode: str) -> None:
    """The mapping made for a read-only cache must not serve a writable one of the same memfd."""
    with rig("shm-mapped", mode) as r:
        whole = r.tensors((2, 16, 4096, 4096), seed=3)
        halves = []
        for i in range(2):
            half = Tensors((1, 16, 4096, 4096), region=False)
            half.region, half.raw = whole.region, [whole.raw[i]]
            halves.append(half)
        here = r.tensors((1, 16, 4096, 4096), owner=False, seed=4)
        local = r.user.register(here)
        pairs = []
        for half, writable in zip(halves, (False, True), strict=True):
            _, remote = r.cache(half, writable=writable)
            pairs.append(_core.Pair(local, remote, None))
        assert r.move(pairs[0], WRITE, [0], [0]).status == PERMISSION
        move_and_check(r, pairs[1], (here, halves[1]), WRITE, [0, 3], [5, 4], (0, 0, 1))
        move_and_check(r, pairs[0], (here, halves[0]), READ, [1], [2], (0, 0, 1))


def test_cache_ids_are_used_once() -> None:
    with rig("shm-process_vm", "step") as r:
        first, second = r.tensors(SMALL, seed=1), r.tensors(SMALL, seed=2)
        kept = r.owner.register(first, cache_id=77)
        with pytest.raises(DataDistError, match="registered already"):
            r.owner.register(second, cache_id=77)
        with pytest.raises(DataDistError, match="0 stands for all"):
            r.owner.register(second, cache_id=0)
        here = r.tensors(SMALL, owner=False)
        pair = _core.Pair(r.user.register(here), r.bring(kept, first), None)
        move_and_check(r, pair, (here, first), READ, [1], [2], (0, 0, 3))
        kept.close()
        r.run(lambda: r.owner.seen(_core.EVENT_CACHE_QUIET, 77))


def test_a_cache_that_comes_after_the_end_is_refused_and_not_pinned() -> None:
    with rig("tcp", "step") as r:
        r.owner.node.abort()
        r.run(r.owner.node.quiet)
        r.owner.node.close()
        memory = np.zeros(64, np.uint8)
        alive = weakref.ref(memory)
        with pytest.raises(ClosedError):
            r.owner.node.register_cache(9, [memory.ctypes.data], 8, 8, 8, True, True, pin=memory)
        del memory
        gc.collect()
        assert alive() is None


@pytest.mark.parametrize(
    "shape",
    [(1, 0, 8, 8), (1, 8, 0, 8), (1, 8, 8, 7), (1, 2**40, 2**40, 2**40), (1, 2**63, 1, 1), (1, 2, 2**63, 2**63)],
)
def test_impossible_geometries(shape: Geometry) -> None:
    with rig("tcp", "step") as r:
        memory = np.zeros(64, np.uint8)
        with pytest.raises(DataDistError):
            r.owner.node.register_cache(5, [memory.ctypes.data], *shape[1:], True, True)
        with pytest.raises(DataDistError):
            r.user.to_peer.import_cache(5, shape, [("tcp", b"", -1)])
        with pytest.raises(DataDistError):
            r.owner.node.register_cache(6, [], 1, 8, 8, True, True)


def test_device_memory_is_refused_where_no_transport_reaches_it() -> None:
    with rig("tcp", "step") as r, pytest.raises(DataDistError, match="no transport of this DataDist reaches device"):
        r.owner.node.register_cache(5, [1 << 40], 8, 8, 8, True, True, device=True)


def test_keys_that_do_not_fit() -> None:
    with rig("shm-mapped", "step") as r:
        there = r.tensors(SMALL, seed=1)
        local = r.owner.register(there)
        name, key, fd = local.export_keys()[0]
        assert name == "shm"
        unsealed = os.memfd_create("unsealed")
        os.ftruncate(unsealed, 1 << 20)
        small = _core.Region(4096)
        try:
            for bad, with_fd in (
                (b"", fd),
                (key[:-1], fd),
                (key + b"x", fd),
                (b"X" + key[1:], fd),
                (key, -1),
                (key, unsealed),
                (key, small.fd),
                (key[:-8] + b"\xff" * 8, fd),  # a tensor beyond the region
                (key[:-8] + (1).to_bytes(8, "little"), unsealed),
            ):
                with pytest.raises(TransportUnavailable, match="shm: "):
                    r.user.to_peer.import_cache(local.id, there.geometry, [("shm", bad, with_fd)])
            with pytest.raises(TransportUnavailable):
                r.user.to_peer.import_cache(local.id, (2, *SMALL[1:]), [("shm", key, fd)])
            with pytest.raises(TransportUnavailable):
                # One block more than the region holds.
                r.user.to_peer.import_cache(local.id, (3, 65, 4096, 4096), [("shm", key, fd)])
            with pytest.raises(TransportUnavailable, match="no keys"):
                r.user.to_peer.import_cache(local.id, there.geometry, [])
        finally:
            os.close(unsealed)
        assert r.bring(local, there).path == "shm-mapped"


def test_pairs_join_caches_of_one_node() -> None:
    with rig("shm-mapped", "step") as r, rig("shm-mapped", "step") as other:
        _, remote = r.cache(r.tensors(SMALL))
        stranger = other.user.register(other.tensors(SMALL, owner=False))
        with pytest.raises(ArgumentError, match="different nodes"):
            _core.Pair(stranger, remote, None)


# --- ending transfers -----------------------------------------------------------------------------

LARGE: Geometry = (4, 1024, 16384, 16384)  # 64 MiB


def check_pattern(tensors: Tensors, pattern: int) -> None:
    for raw in tensors.raw:
        assert bool((raw == pattern).all())


@pytest.mark.sanitize
@every_case
@both_ways
def test_cancelled_at_any_moment_is_quiet(path: str, mode: str, opcode: int, scale: Scale) -> None:
    """When an operation is told, its memory keeps what is written there, and others on the link finish right."""
    rng = random.Random(5)
    with rig(path, mode) as r:
        geometry = (2, 256, 16384, 16384)  # 8 MiB: many batches
        here, there = r.tensors(geometry, owner=False), r.tensors(geometry, seed=2)
        pair = r.pair(here, there)
        lively = r.tensors(SMALL, owner=False, seed=3), r.tensors(SMALL, seed=4)
        other = r.pair(*lively)
        spoiled = 0

        def fill(call: Call) -> None:
            here.fill(0xEE)

        for i in range(scale(12, least=3)):
            if opcode == WRITE:
                here.randomize(7)
            local, remote = rng.sample(range(256), 256), rng.sample(range(256), 256)
            call = r.start(pair, opcode, local, remote, then=fill)
            blocks = rng.sample(range(64), 30), rng.sample(range(64), 30)
            check = expect(lively, READ, *blocks, (0, 0, 3))
            beside = r.start(other, READ, *blocks)
            for _ in range(rng.choice([0, 0, 1, 1, 2, 3]) if i else 0):
                r.turn(0.0)
            pair.cancel(call.op)
            pair.cancel(call.op)
            r.run(lambda call=call: call.ended)  # type: ignore[misc]
            assert call.status in (OK, CANCELLED)
            spoiled += call.status == CANCELLED
            r.run(lambda beside=beside: beside.ended)  # type: ignore[misc]
            assert beside.status == OK
            check()
            r.fence(r.owner)
            check_pattern(here, 0xEE)
            if opcode == WRITE:
                # The pattern was written after the end: none of it may have been sent.
                assert not any(bool((raw == 0xEE).any()) for raw in there.raw)
        assert spoiled > 0 or not r.stepped  # threads may be faster than the cancel
        r.run(lambda: len(r.owner.seen(_core.EVENT_TRANSFER_ENDED)) == spoiled)


@pytest.mark.parametrize("path", PATHS)
def test_deadline(path: str) -> None:
    with rig(path) as r:
        here, there = r.tensors(LARGE, owner=False), r.tensors(LARGE, seed=1)
        pair = r.pair(here, there)
        blocks = list(range(0, 1024, 2))
        late = r.start(pair, READ, blocks, blocks, timeout=1e-9)
        calm = r.start(pair, READ, [1], [1], timeout=1e9)
        r.run(lambda: late.ended and calm.ended)
        assert late.status == TIMEOUT
        assert (calm.status, calm.done) == (OK, 4 * 16384)
        here.fill(0xEE)
        r.fence(r.owner)
        check_pattern(here, 0xEE)


def test_t3_deadline_by_the_clock() -> None:
    """It falls at its time, not before; the peer is not served, so nothing else can end the operation."""
    with rig("tcp", "step", engines=2, drain_timeout=100.0) as r:
        pair = r.pair(r.tensors(SMALL, owner=False), r.tensors(SMALL))
        r.running = [r.engines[0]]
        call = r.start(pair, READ, [0], [0], timeout=2.0)
        assert r.user.node.pending()[0][3:5] == (READ, OK)
        r.advance(2 * SECOND - 1, 2 * SECOND - 1)
        assert r.user.node.pending()[0][4] == OK
        r.turn(advance_ns=1)
        r.turn(advance_ns=0)
        (row,) = r.user.node.pending()
        assert row[4] == TIMEOUT
        assert row[5] == pytest.approx(2.0)
        assert not call.ended  # posted, so it drains first
        r.running = list(r.engines)
        r.run(lambda: call.ended)
        assert call.status == TIMEOUT


@pytest.mark.parametrize("path", ["shm-mapped", "shm-process_vm"])
def test_nothing_is_posted_after_the_deadline(path: str) -> None:
    """Also when completions keep the engine from its timers: each makes room for a batch of the late operation."""
    with rig(path, "step") as r:
        here, there = r.tensors(LARGE, owner=False), r.tensors(LARGE, seed=1)
        pair = r.pair(here, there)
        blocks = list(range(1024))
        call = r.start(pair, READ, blocks, blocks, timeout=2.0)
        r.turn(advance_ns=2 * SECOND)
        r.run(lambda: call.ended)
        assert call.status == TIMEOUT
        assert call.done < len(blocks) * LARGE[0] * LARGE[2]


@pytest.mark.parametrize("mode", MODES)
@both_ways
def test_a_cancel_that_does_not_drain_is_forced(mode: str, opcode: int) -> None:
    """The peer takes no byte and sends none: after the drain time the operation ends, detached, and is quiet."""
    with hand(mode, connections=2, drain_timeout=0.05, buffers=4096) as h:
        size = 256 * 1024
        here = Tensors((1, 32, size, size), region=False)
        here.randomize(1)
        data = here.copy()[0]
        local = h.side.register(here)
        remote = h.side.to_peer.import_cache(9, here.geometry, [("tcp", b"", -1)])
        pair = _core.Pair(local, remote, None)
        call, blocks = Call(), list(range(32))
        pair.submit(call, opcode, blocks, blocks, 0, 0, 1, 0.0, False)
        begun_on_the_wire(h)
        pair.cancel(call.op)
        h.turn(0)
        if mode == "step":
            assert not call.ended
            h.turn(SECOND // 20 - 2)
            assert not call.ended
        h.run(lambda: call.ended, advance_ns=SECOND // 100)
        assert call.status == CANCELLED
        assert [row[0] for row in h.side.node.pending()] == [call.op]  # not over on the wire
        here.fill(0xEE)
        # Now the peer comes back to life and serves what it finds.
        answered = 0
        while h.side.node.pending():
            c = next((c for c in range(2) if readable(h.data[c])), None)
            if c is None:
                h.turn()
                continue
            head = h.header(c)
            assert head is not None
            h.receive(head.count * RUN.size, c)
            answered += 1
            if head.kind == READ_FRAME:
                h.send(answer(READ_DONE, head.seq, payload=b"\xaa" * head.payload), c)
                continue
            got = np.frombuffer(h.receive(head.payload, c), np.uint8)
            status = int.from_bytes(h.receive(8, c)[:4], "little", signed=True)
            # What left before the end is data, what left after it is filler; never the pattern.
            assert not bool((got == 0xEE).any())
            if status == OK and answered == 1 and c == 0:
                assert bool((got == data[: got.size]).all())
            h.send(answer(WRITE_DONE, head.seq, status=min(status, 0)), c)
        assert answered > 0
        check_pattern(here, 0xEE)  # the bytes of the late answers went to a sink
        # The link is as good as ever.
        again = Call()
        pair.submit(again, READ, [3], [4], 0, 0, 1, 0.0, False)
        h.run(lambda: any(readable(data) for data in h.data))
        c = next(c for c in range(2) if readable(h.data[c]))
        head = h.header(c)
        assert head is not None
        h.receive(head.count * RUN.size, c)
        h.send(answer(READ_DONE, head.seq, payload=b"\x55" * head.payload), c)
        h.run(lambda: again.ended)
        assert again.status == OK
        assert bool((here.blocks[0][3] == 0x55).all())
        assert not h.side.seen(_core.EVENT_PEER_LOST)


def readable(sock: socket.socket) -> bool:
    return bool(select.select([sock], [], [], 0)[0])


def begun_on_the_wire(h: Hand) -> None:
    """Wait until the node has sent something on both data connections, and so cannot take it back."""
    h.run(lambda: all(readable(data) for data in h.data))


# --- fences and closing ---------------------------------------------------------------------------


@pytest.mark.sanitize
@every_case
def test_fences_wait_for_what_came_before(path: str, mode: str) -> None:
    """When a fence is told, every operation that the peer had started before it has ended."""
    with rig(path, mode) as r:
        here, there = r.tensors(LARGE, owner=False), r.tensors(LARGE)
        pair = r.pair(here, there)
        back = _pair_back(r)
        # Disjoint, so that the thread sanitizer sees the library's races only.
        apart = {READ: list(range(0, 1024, 4)), WRITE: list(range(1, 1024, 4))}
        for _ in range(3):
            before = [r.start(pair, op, apart[op], apart[op]) for op in (READ, WRITE)]
            fenced = r.owner.to_peer.fence()
            twice = r.owner.to_peer.fence()
            other_way = r.user.to_peer.fence()
            after = r.start(pair, WRITE, [2], [2])
            from_owner = r.start(back, READ, [0, 1], [2, 3])
            r.run(lambda fenced=fenced: r.owner.seen(_core.EVENT_FENCED, fenced))  # type: ignore[misc]
            # The ring is shared and in order: what ended before the fence was told before it.
            assert all(call.status == OK for call in before)
            r.run(
                lambda calls=(after, from_owner), tokens=(twice, other_way): (  # type: ignore[misc]
                    all(call.status == OK for call in calls)
                    and r.owner.seen(_core.EVENT_FENCED, tokens[0])
                    and r.user.seen(_core.EVENT_FENCED, tokens[1])
                )
            )
        assert all(event.status == OK for side in r.sides for event in side.seen(_core.EVENT_FENCED))


def _pair_back(r: Rig) -> _core.Pair:
    """Make a pair by which the owner reaches a cache of the user's."""
    theirs, mine = Tensors(SMALL, region=r.path == "shm-mapped"), Tensors(SMALL, region=False)
    shown = r.user.register(theirs)
    keys = [key for key in shown.export_keys() if key[0] == r.transport]
    remote = r.owner.to_peer.import_cache(shown.id, SMALL, keys)
    return _core.Pair(r.owner.register(mine), remote, (theirs, mine))


def test_fence_waits_for_the_peer_and_not_for_silence() -> None:
    """A same-host peer can touch the memory by itself: nothing but its word may end a fence."""
    for path in ("shm-mapped", "shm-process_vm"):
        with rig(path, "step", engines=2, drain_timeout=1.0, heartbeat_limit=1000.0) as r:
            r.pair(r.tensors(SMALL, owner=False), r.tensors(SMALL))
            r.running = [r.engines[1]]
            token = r.owner.to_peer.fence()
            r.advance(50 * SECOND, SECOND // 10)
            assert not r.owner.seen(_core.EVENT_FENCED)
            r.running = list(r.engines)
            r.run(lambda r=r, token=token: r.owner.seen(_core.EVENT_FENCED, token))  # type: ignore[misc]


@pytest.mark.sanitize
@every_case
@both_ways
def test_cache_is_quiet_after_its_operations(path: str, mode: str, opcode: int) -> None:
    """The owner takes a cache back during transfers: they end well, and only then it is quiet, for good."""
    with rig(path, mode) as r:
        here, there = r.tensors(LARGE, owner=False), r.tensors(LARGE)
        local, remote = r.cache(there)
        pairs = [_core.Pair(r.user.register(here), remote, None), None]
        # A second handle on the same cache must be shut as well.
        second = r.bring(local, there)
        pairs[1] = _core.Pair(pairs[0].local, second, None)
        order: list[str] = []
        calls = [
            r.start(p, opcode, blocks, blocks, then=lambda call: order.append("ended"))
            for p, blocks in zip(pairs, (list(range(0, 1024, 2)), list(range(1, 1024, 2))), strict=True)
        ]
        local.close()
        local.close()
        with pytest.raises(ClosedError):
            local.export_keys()
        r.run(lambda: r.owner.seen(_core.EVENT_CACHE_QUIET, local.id))
        assert [call.ended for call in calls] == [True, True]
        there.fill(0xEE)
        # The owner may see a tcp request only after it closed the cache; then it refuses it.
        assert {call.status for call in calls} <= ({OK} if path.startswith("shm") else {OK, NOT_FOUND})
        for p in pairs:
            with pytest.raises(CacheNotFound):
                r.start(p, opcode, [1], [1])
        wanted = r.transport
        with pytest.raises(CacheNotFound):
            r.user.to_peer.import_cache(local.id, there.geometry, [(wanted, b"", -1)])
        r.fence(r.owner)
        check_pattern(there, 0xEE)
        assert len(r.owner.seen(_core.EVENT_CACHE_QUIET, local.id)) == 1


def test_import_after_close_is_refused() -> None:
    for path in PATHS[:3]:
        with rig(path, "step") as r:
            there = r.tensors(SMALL)
            local = r.owner.register(there)
            keys = [key for key in local.export_keys() if key[0] == ("tcp" if path == "tcp" else "shm")]
            local.close()
            r.run(lambda r=r: r.owner.seen(_core.EVENT_CACHE_QUIET))  # type: ignore[misc]
            with pytest.raises(CacheNotFound):
                r.user.to_peer.import_cache(local.id, SMALL, keys)


def test_the_initiators_own_cache_closes_after_its_operations() -> None:
    with rig("shm-process_vm") as r:
        here, there = r.tensors(LARGE, owner=False), r.tensors(LARGE)
        pair = r.pair(here, there)
        call = r.start(pair, READ, list(range(1024)), list(range(1024)))
        pair.local.close()
        with pytest.raises(ClosedError):
            r.start(pair, READ, [0], [0])
        r.run(lambda: r.user.seen(_core.EVENT_CACHE_QUIET, pair.local.id))
        assert call.status == OK


@pytest.mark.sanitize
def test_closed_caches_are_unmapped_when_the_owner_takes_them_back() -> None:
    """A handle that Python still holds must not keep a peer's memory mapped."""
    with rig("shm-mapped") as r:
        there = r.tensors((1, 16, 65536, 65536))
        local, remote = r.cache(there)
        pair = _core.Pair(r.user.register(r.tensors((1, 16, 65536, 65536), owner=False)), remote, None)
        mapped = _mappings()
        local.close()
        r.run(lambda: r.owner.seen(_core.EVENT_CACHE_QUIET, local.id))
        r.run(lambda: _mappings() < mapped)
        remote.release()
        with pytest.raises(CacheNotFound):
            r.start(pair, READ, [0], [0])


def _mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum("memfd:aiodatadist" in line for line in maps)


@pytest.mark.parametrize("mode", MODES)
@both_ways
def test_fence_on_a_silent_tcp_peer_is_forced(mode: str, opcode: int) -> None:
    """All bytes of a tcp peer pass through this engine: it is shut out, not waited for."""
    with hand(mode, drain_timeout=0.05) as h:
        there = Tensors((1, 4, 1 << 20, 1 << 20), region=False)
        there.fill(0x11)
        cache = h.side.register(there)
        if opcode == WRITE:
            # Half of a write's payload: it is being served, and its rest never comes.
            whole = request(WRITE_FRAME, cache.id, [(0, 0, 1 << 20)], payload=b"\x22" * (1 << 20))
            h.send(whole[: len(whole) // 2])
            h.run(lambda: bool((there.raw[0][: 1 << 18] == 0x22).all()))
        else:
            # Answers that nobody takes.
            for seq in range(1, 9):
                h.send(request(READ_FRAME, cache.id, [(0, 0, 1 << 20)], seq=seq))
        begun = h.data[0] if opcode == READ else None
        h.run(lambda: begun is None or readable(begun))  # the first of its answers is on the wire
        token = h.side.to_peer.fence()
        h.run(lambda: h.heard(FENCE), advance_ns=1)
        h.run(lambda: h.side.seen(_core.EVENT_FENCED, token), advance_ns=SECOND // 200)
        there.fill(0xEE)
        if opcode == WRITE:
            h.send(whole[len(whole) // 2 :])
            head = h.header()
            assert head is not None
            assert (head.kind, head.status) == (WRITE_DONE, FENCED)
            check_pattern(there, 0xEE)
        else:
            for seq in range(1, 9):
                head = h.header()
                assert head is not None
                assert (head.kind, head.seq) == (READ_DONE, seq)
                if head.status == FENCED:
                    continue
                got = h.receive(head.payload)
                assert b"\xee" not in got
                trailer = int.from_bytes(h.receive(8)[:4], "little", signed=True)
                assert trailer == FENCED or got == b"\x11" * len(got)
        # What it started before the fence is refused from now on; what it starts with the fence seen is served.
        h.send(request(READ_FRAME, cache.id, [(0, 0, 8)], seq=20, epoch=0))
        head = h.header()
        assert head is not None
        assert head.status == FENCED
        h.send(request(READ_FRAME, cache.id, [(0, 0, 8)], seq=21, epoch=1))
        head = h.header()
        assert head is not None
        assert (head.status, h.receive(head.payload + 8)[:8]) == (OK, b"\xee" * 8)


@pytest.mark.parametrize("mode", MODES)
@both_ways
def test_cache_closes_while_its_forced_operation_is_still_on_the_wire(mode: str, opcode: int) -> None:
    """A silent tcp peer is not waited for: the local memory is quiet although the frame has not left."""
    with hand(mode, connections=2, drain_timeout=0.05, buffers=4096) as h:
        size = 256 * 1024
        here = Tensors((1, 32, size, size), region=False)
        local = h.side.register(here)
        remote = h.side.to_peer.import_cache(9, here.geometry, [("tcp", b"", -1)])
        pair = _core.Pair(local, remote, None)
        call, blocks = Call(), list(range(32))
        pair.submit(call, opcode, blocks, blocks, 0, 0, 1, 0.0, False)
        begun_on_the_wire(h)
        local.close()
        h.turn(0)
        assert not h.side.seen(_core.EVENT_CACHE_QUIET)  # the operation uses it
        pair.cancel(call.op)
        h.run(lambda: h.side.seen(_core.EVENT_CACHE_QUIET, local.id), advance_ns=SECOND // 100)
        assert call.status == CANCELLED
        assert [row[0] for row in h.side.node.pending()] == [call.op]  # not over on the wire


@pytest.mark.parametrize("mode", MODES)
def test_cache_of_a_silent_tcp_peer_closes_by_force(mode: str) -> None:
    with hand(mode, drain_timeout=0.05) as h:
        there = Tensors((1, 4, 1 << 20, 1 << 20), region=False)
        other = Tensors(SMALL, region=False)
        other.fill(0x33)
        cache, kept = h.side.register(there), h.side.register(other)
        whole = request(WRITE_FRAME, cache.id, [(0, 0, 1 << 20)], payload=b"\x22" * (1 << 20))
        h.send(whole[:5000])
        h.run(lambda: bool((there.raw[0][:64] == 0x22).all()))
        cache.close()
        h.turn(0)
        if h.stepped:  # else the time may be over
            assert not h.side.seen(_core.EVENT_CACHE_QUIET)
        h.run(lambda: h.side.seen(_core.EVENT_CACHE_QUIET, cache.id), advance_ns=SECOND // 200)
        there.fill(0xEE)
        h.send(whole[5000:])
        h.send(request(READ_FRAME, cache.id, [(0, 0, 8)], seq=2))
        h.send(request(READ_FRAME, kept.id, [(0, 0, 8)], seq=3))
        assert [(h.header() or pytest.fail("ended")).status for _ in range(2)] == [FENCED, NOT_FOUND]
        head = h.header()
        assert head is not None
        assert (head.status, h.receive(16)[:8]) == (OK, b"\x33" * 8)
        check_pattern(there, 0xEE)


@pytest.mark.parametrize("mode", MODES)
def test_fence_is_not_forced_on_a_peer_that_answers(mode: str) -> None:
    """A peer with a long transfer answers pings: it is waited for, however long the transfer takes."""
    # By the real clock, so long that a busy machine answers in time.
    drain, enough = (0.05, 30) if mode == "step" else (2.0, 3)
    with hand(mode, drain_timeout=drain) as h:
        token = h.side.to_peer.fence()
        pongs = 0

        def answered() -> bool:
            nonlocal pongs
            asked = [m for m in h.said if m[0] == PING]
            h.said = [m for m in h.said if m[0] != PING]
            for m in asked:
                h.say(message(PONG, a=m[3]))
                pongs += 1
            return pongs >= enough

        h.run(answered, advance_ns=SECOND // 100)
        assert not h.side.seen(_core.EVENT_FENCED)
        ((_, _, _, seq, _, _),) = h.heard(FENCE)
        h.say(message(FENCE_DONE, a=seq + 7))  # of some other fence
        h.turn()
        assert not h.side.seen(_core.EVENT_FENCED)
        h.say(message(FENCE_DONE, a=seq))
        h.run(lambda: h.side.seen(_core.EVENT_FENCED, token))


# --- the end of links -----------------------------------------------------------------------------


def busy_rig(r: Rig) -> tuple[list[Call], Tensors, Tensors, _core.Pair]:
    """Start a few long transfers in both directions of the bytes."""
    here, there = r.tensors(LARGE, owner=False), r.tensors(LARGE)
    pair = r.pair(here, there)
    calls = []
    for i, op in enumerate((READ, WRITE, READ)):
        blocks = list(range(i, 1024, 3))
        calls.append(r.start(pair, op, blocks, blocks))
    for _ in range(2):
        if not r.stepped:
            r.turn(0.0)
    return calls, here, there, pair


@pytest.mark.sanitize
@every_case
@pytest.mark.parametrize("who", ["user", "owner"])
@pytest.mark.parametrize("how", ["disconnect", "abort"])
def test_disconnect_during_transfers(path: str, mode: str, who: str, how: str) -> None:
    with rig(path, mode) as r:
        calls, here, there, pair = busy_rig(r)
        side, other = (r.user, r.owner) if who == "user" else (r.owner, r.user)
        fence = other.to_peer.fence()
        if how == "disconnect":
            side.to_peer.disconnect(CLOSED)
        else:
            side.node.abort()
        r.run(lambda: all(call.ended for call in calls))
        # CLOSED is for those who closed their own node; the end of a link is the loss of the peer.
        mine = CLOSED if who == "user" and how == "abort" else PEER_LOST
        assert {call.status for call in calls} <= {OK, mine}
        r.run(lambda: all(s.seen(_core.EVENT_PEER_QUIET) for s in r.sides))
        here.fill(0xEE)
        there.fill(0xDD)
        assert side.seen(_core.EVENT_PEER_LOST) == []
        (lost,) = other.seen(_core.EVENT_PEER_LOST)
        assert lost.status == CLOSED
        r.run(lambda: other.seen(_core.EVENT_FENCED, fence))
        assert all(s.node.quiet() for s in r.sides)
        with pytest.raises((PeerLostError, CacheNotFound)):
            r.start(pair, READ, [0], [0])
        with pytest.raises(PeerLostError):
            r.user.to_peer.import_cache(4242, SMALL, [("tcp", b"", -1)])
        late = side.to_peer.fence()  # of a link that is quiet: at once
        r.run(lambda: side.seen(_core.EVENT_FENCED, late))
        for _ in range(3):
            r.turn(0.005)
        check_pattern(here, 0xEE)
        check_pattern(there, 0xDD)
        # The end of a link closes nothing else: caches, and a new link, work as ever.
        if how == "disconnect":
            r.link(4 if path == "tcp-short" else 2)
            both = r.tensors(SMALL, owner=False, seed=1), r.tensors(SMALL, seed=2)
            fresh = r.pair(*both)
            move_and_check(r, fresh, both, READ, [1, 5], [7, 3], (0, 0, 3))


@every_case
def test_caches_that_close_as_the_link_ends(path: str, mode: str) -> None:
    with rig(path, mode) as r:
        calls, _, _, pair = busy_rig(r)
        other = r.owner.register(r.tensors(SMALL))
        r.owner.to_peer.disconnect(CLOSED)
        other.close()
        pair.local.close()
        r.run(lambda: r.owner.seen(_core.EVENT_CACHE_QUIET, other.id))
        r.run(lambda: r.user.seen(_core.EVENT_CACHE_QUIET, pair.local.id))
        r.run(lambda: all(call.ended for call in calls))


@pytest.mark.sanitize
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("what", ["engine", "data", "half-closed data"])
def test_cut_connections(mode: str, what: str) -> None:
    """Any of a link's connections ending ends the link, with every operation told once and quiet."""
    with hand(mode, connections=2, buffers=65536) as h:
        here = Tensors((1, 64, 65536, 65536), region=False)
        local = h.side.register(here)
        remote = h.side.to_peer.import_cache(9, here.geometry, [("tcp", b"", -1)])
        pair = _core.Pair(local, remote, None)
        calls = []
        for i, op in enumerate((READ, WRITE, READ, WRITE)):
            calls.append(Call())
            pair.submit(calls[-1], op, range(i, 64, 4), range(i, 64, 4), 0, 0, 1, 0.0, False)
        h.turn()
        closing = h.side.register(Tensors(SMALL, region=False))
        closing.close()
        token = h.side.to_peer.fence()
        if what == "engine":
            h.wire.close()
        elif what == "data":
            h.data[1].close()
        else:
            h.data[0].shutdown(socket.SHUT_WR)
        assert h.lost() == PEER_LOST
        h.run(lambda: all(call.ended for call in calls))
        here.fill(0xEE)
        assert {call.status for call in calls} == {PEER_LOST}
        h.run(lambda: h.side.seen(_core.EVENT_PEER_QUIET))
        h.run(lambda: h.side.seen(_core.EVENT_FENCED, token))
        h.run(lambda: h.side.seen(_core.EVENT_CACHE_QUIET, closing.id))
        check_pattern(here, 0xEE)


@pytest.mark.sanitize
def test_many_waiting_operations_when_a_data_connection_ends(scale: Scale) -> None:
    """The queue of a lane is emptied in a loop: recursion would overrun an I/O thread's stack."""
    count = scale(40_000, least=2000)
    for mode in MODES:
        with hand(mode) as h:
            here = Tensors(SMALL, region=False)
            remote = h.side.to_peer.import_cache(9, SMALL, [("tcp", b"", -1)])
            pair = _core.Pair(h.side.register(here), remote, None)
            calls = [Call() for _ in range(count)]
            for call in calls:
                pair.submit(call, READ, [0], [0], 0, 0, 1, 0.0, False)
            h.data[0].close()
            h.run(lambda calls=calls: all(call.ended for call in calls))  # type: ignore[misc]
            assert {call.status for call in calls} == {PEER_LOST}


@pytest.mark.parametrize("path", PATHS[:3])
def test_heartbeat_loss_by_the_clock(path: str) -> None:
    """A silent peer is lost at the limit and not before; whether its memory is quiet is another question."""
    with rig(path, "step", engines=2, heartbeat_limit=8.0, drain_timeout=1.0) as r:
        pair = r.pair(r.tensors(SMALL, owner=False), r.tensors(SMALL))
        r.run(lambda: r.move(pair, READ, [0], [0]).ended)
        # Idle and both alive: nothing happens for a long time.
        r.advance(100 * SECOND, SECOND)
        assert not any(side.seen(_core.EVENT_PEER_LOST) for side in r.sides)
        # Now the other engine stands still. What was heard last is at most a step and a beat old.
        r.running = [r.engines[0]]
        r.advance(7 * SECOND, SECOND // 4)
        assert not r.user.seen(_core.EVENT_PEER_LOST)
        closing = r.user.register(r.tensors(SMALL, owner=False))
        closing.close()
        r.advance(4 * SECOND, SECOND // 4)
        (lost,) = r.user.seen(_core.EVENT_PEER_LOST)
        assert lost.status == PEER_LOST
        r.advance(20 * SECOND, SECOND)
        shm = path.startswith("shm")
        # A same-host process that stands still may wake and write: only its own word or its exit is proof.
        assert bool(r.user.seen(_core.EVENT_PEER_QUIET)) is not shm
        assert bool(r.user.seen(_core.EVENT_CACHE_QUIET, closing.id)) is not shm
        assert r.user.node.quiet() is not shm
        r.running = list(r.engines)
        r.run(lambda: r.user.node.quiet() and r.owner.node.quiet())
        (told,) = r.owner.seen(_core.EVENT_PEER_LOST)
        assert told.status == PEER_LOST
        r.run(lambda: r.user.seen(_core.EVENT_CACHE_QUIET, closing.id))


def test_a_node_that_was_stopped_itself_does_not_blame_its_peer() -> None:
    """What arrived while this process stood still counts, although the clock has jumped over the limit."""
    with hand("step", heartbeat_limit=8.0) as h:
        h.turn(SECOND)
        h.say(message(HEARTBEAT))
        h.turn(100 * SECOND)
        assert not h.side.seen(_core.EVENT_PEER_LOST)
        h.turn(9 * SECOND)
        h.turn(9 * SECOND)
        assert h.side.seen(_core.EVENT_PEER_LOST)


@pytest.mark.parametrize("mode", MODES)
def test_limits_of_zero_do_not_spin(mode: str) -> None:
    with rig("tcp", mode, drain_timeout=0.0, heartbeat_limit=0.0) as r:
        r.owner.to_peer.fence()
        for _ in range(5):
            r.turn(0.01)


@pytest.mark.parametrize("limit", [1e-9, 1e-300, 1e300, float("inf"), float("nan"), -1.0])
def test_limits_that_a_peer_names(limit: float) -> None:
    """Heartbeats keep its pace, within reason."""
    for mode in MODES:
        with rig("tcp", mode) as r:
            wire, data = socket.socketpair(), socket.socketpair()
            peer = r.user.node.connect(
                wire[0].detach(),
                [data[0].detach()],
                pid=0,
                pidfd=-1,
                process_vm=False,
                transports=["tcp"],
                peer_limit=limit,
            )
            for _ in range(5):
                r.turn(0.005, advance_ns=SECOND // 1000)
            assert peer.id
            wire[1].close()
            data[1].close()


@pytest.mark.parametrize("timeout", [0.0, 1e12, 1e300, float("inf")])
def test_deadlines_beyond_the_clock(timeout: float) -> None:
    with rig("tcp", "step") as r:
        pair = r.pair(r.tensors(SMALL, owner=False), r.tensors(SMALL))
        call = r.start(pair, READ, [0], [0], timeout=timeout)
        r.run(lambda: call.ended, advance_ns=1000 * SECOND)
        assert call.status == OK


def test_goodbye_of_a_same_host_peer_and_nothing_else_makes_it_quiet() -> None:
    with rig("shm-mapped", "step", engines=2, drain_timeout=1.0) as r:
        calls, _, _, _ = busy_rig(r)
        r.running = [r.engines[1]]
        r.owner.to_peer.disconnect(CLOSED)
        r.advance(30 * SECOND, SECOND)
        assert not r.owner.node.quiet()
        r.running = list(r.engines)
        r.run(lambda: r.owner.node.quiet() and r.user.node.quiet())
        assert all(call.ended for call in calls)


def test_a_stepped_engine_that_ends_says_goodbye() -> None:
    """Its peers must not wait for ever because operations were in flight."""
    options = {"drain_timeout": 1.0, "heartbeat_limit": 60.0, "inline_bytes": 0, "populate_limit": 0}
    with rig("shm-process_vm", "step", engines=2) as r:
        engine = _core.Engine.stepped()
        ring = _core.Ring(engine)
        node = _core.Node(engine, ring, 7, lambda *event: None, **options)  # type: ignore[arg-type]
        wire, data = socket.socketpair(), socket.socketpair()
        pid = os.getpid()
        side = r.owner
        kept = side.peer
        side.peer = side.node.connect(
            wire[0].detach(),
            [data[0].detach()],
            pid=pid,
            pidfd=os.pidfd_open(pid),
            process_vm=True,
            transports=["shm", "tcp"],
        )
        peer = node.connect(
            wire[1].detach(),
            [data[1].detach()],
            pid=pid,
            pidfd=os.pidfd_open(pid),
            process_vm=True,
            transports=["shm", "tcp"],
        )
        there, here = Tensors(SMALL, region=False), Tensors(SMALL, region=False)
        cache = side.register(there)
        remotes = [peer.import_cache(cache.id, SMALL, [key]) for key in cache.export_keys() if key[0] != "sim"]
        local = node.register_cache(3, here.addresses, 64, 4096, 4096, True, True)
        for remote in remotes:
            pair = _core.Pair(local, remote, None)
            pair.submit(Call(), READ, range(64), range(64), 0, 0, 3, 0.0, False)
        engine.step()
        for remote in remotes:
            pair = _core.Pair(local, remote, None)
            pair.submit(Call(), READ, range(64), range(64), 0, 0, 3, 0.0, False)
        gone = side.peer.id
        engine.release()
        r.run(lambda: [e for e in side.seen(_core.EVENT_PEER_QUIET) if e.peer == gone])
        ring.drain()
        ring.close()
        side.peer = kept


# --- completions ----------------------------------------------------------------------------------


@pytest.mark.sanitize
@every_case
def test_thousands_of_operations_each_end_once(path: str, mode: str, scale: Scale) -> None:
    rng = random.Random(11)
    with rig(path, mode, inline_bytes=8192) as r:
        # Each operation has blocks of its own until it ends: a slot of ten.
        slots = 100
        geometry = (2, 10 * slots, 512, 512)
        pair = r.pair(r.tensors(geometry, owner=False, seed=1), r.tensors(geometry, seed=2))
        calls: list[Call] = []
        count = scale(3000, least=200)
        cancelled = 0
        for i in range(count):
            if i >= slots:
                r.run(lambda earlier=calls[i - slots]: earlier.ended)  # type: ignore[misc]
            blocks = [i % slots * 10 + k for k in rng.sample(range(10), rng.choice([0, 1, 3, 10]))]
            call = r.start(
                pair,
                rng.choice([READ, WRITE]),
                blocks,
                blocks,
                timeout=rng.choice([0.0, 1e-9, 100.0]),
                inline=rng.random() < 0.3,
            )
            calls.append(call)
            if rng.random() < 0.2 and call.op:
                pair.cancel(call.op)
                cancelled += 1
            if i % 100 == 0:
                r.turn(0.0)
        r.run(lambda: all(call.ended for call in calls))
        assert {call.status for call in calls} <= {OK, CANCELLED, TIMEOUT}
        assert cancelled > 0
        assert r.user.node.pending() == []
        for call in calls:
            pair.cancel(call.op)  # of what has ended: nothing
        assert pair.progress(calls[0].op) is None
        for _ in range(3):
            r.turn(0.0)


@pytest.mark.sanitize
def test_no_completion_falls_between_the_last_look_and_the_arming(scale: Scale) -> None:
    """Loops that sleep on the descriptor until it is readable must see every completion of four engines' threads."""
    with rig("shm-process_vm") as r:
        both = r.tensors((1, 64, 256, 256), owner=False, seed=1), r.tensors((1, 64, 256, 256), seed=2)
        pair = r.pair(*both)
        poll = select.poll()
        poll.register(r.rings[0].fd, select.POLLIN)
        rng = random.Random(3)
        for _ in range(scale(3000, least=100)):
            calls = [r.start(pair, READ, [i], [i]) for i in range(rng.choice([1, 1, 2, 5]))]
            while not all(call.ended for call in calls):
                # Without a limit: a lost wake-up is a hang, which the suite's guard reports.
                poll.poll()
                r.rings[0].drain()


@pytest.mark.sanitize
def test_rings_with_many_pushers(scale: Scale) -> None:
    """Several links' engine connections, copy and I/O threads push into one ring while its loop drains it."""
    with rig("shm-process_vm") as a:
        peers = [a]
        b = Rig("tcp")
        try:
            peers.append(b)
            pairs = []
            for r in peers:
                both = r.tensors((1, 64, 512, 512), owner=False), r.tensors((1, 64, 512, 512))
                pairs.append(r.pair(*both))
            for _ in range(scale(40, least=3)):
                calls = []
                tokens = []
                for r, pair in zip(peers, pairs, strict=True):
                    calls += [r.start(pair, (READ, WRITE)[i % 2], [i], [i]) for i in range(40)]
                    tokens += [(side, side.to_peer.fence(), side.to_peer.ping()) for side in r.sides]
                while not (
                    all(call.ended for call in calls)
                    and all(s.seen(_core.EVENT_FENCED, f) and s.seen(_core.EVENT_PONG, p) for s, f, p in tokens)
                ):
                    select.select([ring.fd for r in peers for ring in r.rings], [], [], 10)
                    for r in peers:
                        r.rings[0].drain()
                for side in (s for r in peers for s in r.sides):
                    side.events.clear()
        finally:
            b.close()


def test_handlers_that_raise_do_not_stop_the_others() -> None:
    with rig("shm-mapped", "step") as r:
        pair = r.pair(r.tensors(SMALL, owner=False), r.tensors(SMALL))

        def fail(call: Call) -> None:
            raise RuntimeError("first")

        calls = [r.start(pair, READ, [0], [0], then=fail if i in (0, 3) else None) for i in range(5)]
        r.engines[0].step()
        with pytest.raises(RuntimeError, match="first"):
            r.rings[0].drain()
        assert all(call.ended for call in calls)
        assert r.rings[0].drain() == 0


def test_a_flood_of_completions_is_drained_in_portions() -> None:
    with rig("shm-mapped", "step") as r:
        pair = r.pair(r.tensors(SMALL, owner=False), r.tensors(SMALL))
        calls = [r.start(pair, READ, [0], [0]) for _ in range(1000)]
        r.engines[0].step()
        portions = []
        while select.select([r.rings[0].fd], [], [], 0)[0]:
            portions.append(r.rings[0].drain())
        assert all(call.ended for call in calls)
        assert max(portions) <= 256
        assert sum(portions) >= 1000


@pytest.mark.parametrize("path", PATHS[:3])
def test_small_transfers_are_not_starved_by_a_large_one(path: str) -> None:
    """Operations of a link take turns, batch by batch."""
    with rig(path, "step") as r:
        large = r.pair(r.tensors(LARGE, owner=False), r.tensors(LARGE))
        small = r.pair(r.tensors(SMALL, owner=False), r.tensors(SMALL))
        order: list[str] = []
        blocks = list(range(1024))
        calls = [r.start(large, READ, blocks, blocks[::-1], then=lambda call: order.append("large"))]
        calls += [r.start(small, READ, [i], [i], then=lambda call: order.append("small")) for i in range(20)]
        r.run(lambda: all(call.ended for call in calls))
        assert order == ["small"] * 20 + ["large"]


# --- objects that outlive each other ---------------------------------------------------------------


@pytest.mark.sanitize
@pytest.mark.parametrize("path", PATHS[:3])
def test_late_objects_are_closed_and_not_dangling(path: str) -> None:
    r = Rig(path, "step")
    here, there = r.tensors(SMALL, owner=False), r.tensors(SMALL)
    pair = r.pair(here, there)
    call = r.move(pair, READ, [0], [0])
    peer, node, ring = r.user.to_peer, r.user.node, r.rings[0]
    r.close()
    pair.cancel(call.op)
    assert pair.progress(call.op) is None
    for late in (
        lambda: pair.submit(Call(), READ, [0], [0], 0, 0, 1, 0.0, True),
        peer.fence,
        peer.ping,
        lambda: peer.disconnect(CLOSED),
        node.abort,
        node.quiet,
        node.pending,
        pair.local.export_keys,
        pair.local.close,
        lambda: r.engines[0].step(),
        lambda: _core.Ring(r.engines[0]) and _core.Node(r.engines[0], ring, 1, print),  # type: ignore[call-arg]
    ):
        with pytest.raises((ClosedError, TypeError)):
            late()
    assert ring.drain() == 0
    r.engines[0].release()


def test_remote_caches_in_a_cycle_are_collected() -> None:
    r = Rig("shm-mapped", "step")
    pair = r.pair(r.tensors(SMALL, owner=False), r.tensors(SMALL))
    cycle = [pair, pair.remote, r]
    cycle.append(cycle)
    # The ring holds what holds the ring.
    r.rings[0].call_soon = lambda function, held=cycle: None  # type: ignore[misc]
    r.user.events.append(cycle)  # type: ignore[arg-type]
    del cycle, pair
    r.user.events.clear()
    r.close()
    del r
    gc.collect()


def test_two_engines_of_one_process_are_one() -> None:
    until_now(lambda: native_threads() == 0)
    before = threading.active_count()
    first, second = _core.Engine.acquire(2, 2), _core.Engine.acquire(3, 3)
    assert native_threads() == 6
    first.release()
    first.release()
    assert native_threads() == 6
    second.release()
    until_now(lambda: native_threads() == 0)
    assert threading.active_count() == before


@pytest.mark.parametrize("path", PATHS)
def test_the_last_release_ends_the_threads(path: str) -> None:
    for _ in range(5):
        with rig(path) as r:
            r.move(r.pair(r.tensors(SMALL, owner=False), r.tensors(SMALL)), READ, [0], [0])
        until_now(lambda: native_threads() == 0)


def test_descriptors_are_given_back() -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    with rig("shm-mapped"):
        pass
    before = count()
    for path, mode in LOCAL_CASES:
        with rig(path, mode) as r:
            r.move(r.pair(r.tensors(SMALL, owner=False), r.tensors(SMALL)), READ, [0], [0])
        del r
        gc.collect()
        assert count() == before, (path, mode)
    with rig("tcp", "step") as r:
        inside = count()
        for transports, fds in ((["shm"], 1), (["tcp"], 0), (["shm", "tcp"], 1), (["nonsense"], 1)):
            pairs = [socket.socketpair() for _ in range(fds + 1)]
            with pytest.raises(DataDistError):
                r.user.node.connect(
                    pairs[0][0].detach(),
                    [pair[0].detach() for pair in pairs[1:]],
                    pid=0,
                    pidfd=-1,
                    process_vm=False,
                    transports=transports,
                )
            for pair in pairs:
                pair[1].close()
            r.advance(20 * SECOND, SECOND)
            assert count() == inside, transports


# --- other processes -------------------------------------------------------------------------------


@pytest.fixture
def child() -> Iterator[Callable[[Callable[[], None]], int]]:
    """Fork, run something in the child and return its pid; the child never comes back to pytest."""
    pids = []

    def run(work: Callable[[], None]) -> int:
        pid = os.fork()
        if pid == 0:
            status = 99
            try:
                # The guards of the suite are the parent's.
                signal.setitimer(signal.ITIMER_REAL, 0)
                work()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        pids.append(pid)
        return pid

    yield run
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("path", PATHS)
def test_a_forked_child_is_inert(path: str, child: Callable[[Callable[[], None]], int]) -> None:
    """Its copies of our descriptors are closed, its objects say so, and the parent goes on as if nothing happened."""
    before = _descriptors()
    with rig(path) as r:
        both = r.tensors(SMALL, owner=False, seed=1), r.tensors(SMALL, seed=2)
        pair = r.pair(*both)
        running = r.start(pair, READ, list(range(64)), list(range(64)))
        ours = {fd: name for fd, name in _descriptors().items() if before.get(fd) != name and fd not in r.loop_fds}
        assert len(ours) >= 10

        def inert() -> None:
            assert _core.forked()
            now = _descriptors()
            # Numbers of anonymous descriptors say nothing; what the child has open by now is few: one for the listing,
            # and libuv, once it is loaded, makes a pipe in every child.
            assert [fd for fd, name in ours.items() if name.startswith("socket:") and now.get(fd) == name] == []
            assert len([fd for fd in ours if fd in now]) <= 3
            with pytest.raises(ClosedError):
                pair.submit(Call(), READ, [0], [0], 0, 0, 3, 0.0, True)
            with pytest.raises(ClosedError):
                _core.Engine.acquire(1, 1)
            with pytest.raises(ClosedError):
                _core.Engine.stepped()
            pair.cancel(running.op)
            r.user.node.abort()
            r.user.to_peer.disconnect(CLOSED)
            assert r.user.to_peer.fence() == 0
            assert r.user.to_peer.ping() == 0
            assert r.user.node.quiet()
            assert r.rings[0].drain() == 0
            r.user.node.close()
            pair.remote.release()
            r.rings[0].close()
            r.engines[0].release()

        pid = child(inert)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        r.run(lambda: running.ended)
        assert running.status == OK
        move_and_check(r, pair, both, WRITE, [1, 2], [3, 4], (0, 0, 3))


def _descriptors() -> dict[int, str]:
    found = {}
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
    return found


FORKING_PEER = """
import os, sys, time
from aiodatadist import _core

wire, data = map(int, sys.argv[1:])
engine = _core.Engine.acquire(1, 1)
ring = _core.Ring(engine)
node = _core.Node(engine, ring, 9, lambda *event: None, drain_timeout=1.0, heartbeat_limit=60.0, inline_bytes=0,
                  populate_limit=0)
peer = node.connect(wire, [data], pid=0, pidfd=-1, process_vm=False, transports=["tcp"])
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(60)
"""


def test_the_death_of_a_parent_is_seen_although_its_child_lives() -> None:
    """The peer's child has a copy of every socket of the peer; closed at fork, they end with their process."""
    with rig("tcp", heartbeat_limit=60.0) as r:
        wire, data = socket.socketpair(), socket.socketpair()
        fds = (wire[1].fileno(), data[1].fileno())
        process = subprocess.Popen(
            [sys.executable, "-c", FORKING_PEER, *map(str, fds)],
            pass_fds=fds,
            stdout=subprocess.PIPE,
            text=True,
        )
        wire[1].close()
        data[1].close()
        peer = r.user.node.connect(
            wire[0].detach(), [data[0].detach()], pid=0, pidfd=-1, process_vm=False, transports=["tcp"]
        )
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            pong = peer.ping()
            r.run(lambda: r.user.seen(_core.EVENT_PONG, pong))
            process.kill()
            process.wait()
            r.run(lambda: [e for e in r.user.seen(_core.EVENT_PEER_LOST) if e.peer == peer.id])
            os.kill(child, 0)  # it still runs
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
            os.kill(child, signal.SIGKILL)


def test_goodbye_is_the_last_word() -> None:
    with hand() as h:
        h.side.to_peer.disconnect(CLOSED)
        h.run(lambda: h.heard(GOODBYE))
        assert h.said[-1][0] == GOODBYE
        h.say(message(GOODBYE))
        h.run(lambda: h.side.seen(_core.EVENT_PEER_QUIET))
        assert ABORTED not in {e.status for e in h.side.events}
