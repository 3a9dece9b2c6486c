"""Layer-wise transfers at gates: targets, results, and everything that may be done to a gate."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import itertools
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiodatadist as adt

from .engine_rig import Call, rig
from .hixl_standin import HIXL
from .layer_pairs import KEY, LAYERS, WHOLE, both, landed, layers_there, part, push
from .pairs import OWNER, USER, linked, pattern
from .peers import ROOT
from .waiting import PATIENCE, native_threads, until

pytestmark = pytest.mark.loop

# Called in this thread, without the GIL.
CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "tcp", pytest.param("verbs", marks=pytest.mark.verbs), HIXL])


@TRANSPORTS
async def test_layers_land_as_a_thread_records_them(transport: str) -> None:
    async with linked(transport) as pair:
        here, there = await both(pair)
        events = pair.owner.events()
        gate = adt.LayerGate(LAYERS)
        addressed = adt.TransferConfig(OWNER, there.addresses[4:], range(2, 4))
        task = push(pair, here, gate, WHOLE, addressed, notify=b"all")
        signal = gate.native(3)

        def model() -> None:
            for layer in (0, 2, 1):
                gate.record(layer)
            CALLBACK(signal.function)(signal.context)

        thread = threading.Thread(target=model)
        thread.start()
        said = [one async for one in task.layers()]
        results = await task
        thread.join()
        assert not signal.pending
        assert sorted(said) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
        assert [(one.error, one.layers_done, one.bytes_done) for one in results] == [
            (None, 4, 4 * 8 * 512),
            (None, 2, 4 * 4 * 512),
        ]
        assert results[1].config is addressed
        assert layers_there(here, there) == [0, 1, 2, 3]
        task.raise_for_errors()
        arrived = []
        async for event in events:
            if isinstance(event, adt.LayerArrived):
                arrived.append(event)
                if len(arrived) == len(said):
                    break
        assert {event.cluster_id for event in arrived} == {USER}
        assert sorted(event.layer for event in arrived) == [0, 1, 2, 2, 3, 3]
        assert sum(event.layers_left == 0 for event in arrived) == 2


async def test_a_failed_layer_ends_only_the_targets_that_need_it() -> None:
    async with linked() as pair:
        here, _ = await both(pair)
        gate = adt.LayerGate(LAYERS)
        task = push(pair, here, gate, WHOLE, part(0, 1))
        gate.record(1)
        why = ValueError("nan")
        gate.fail(2, why)
        gate.record(0)
        first, second = await task
        assert isinstance(first.error, adt.LayerFailed)
        assert (first.error.layer, first.error.__cause__, first.error.peer) == (2, why, OWNER)
        assert (second.error, second.layers_done) == (None, 2)
        with pytest.raises(ExceptionGroup) as raised:
            task.raise_for_errors()
        assert raised.value.exceptions == (first.error,)


# Wrong calls. -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, -1, 1_000_001, 1 << 70])
def test_a_gate_has_between_one_and_a_million_layers(number: int) -> None:
    with pytest.raises(adt.ArgumentError, match=f"num_layers.*{number}"):
        adt.LayerGate(number)


@pytest.mark.parametrize("number", ["4", 4.0, None, True])
def test_the_number_of_layers_is_an_integer(number: Any) -> None:
    with pytest.raises(adt.ArgumentTypeError, match="num_layers"):
        adt.LayerGate(number)


CALLS: list[Callable[[adt.LayerGate, Any], object]] = [
    adt.LayerGate.record,
    adt.LayerGate.fail,
    adt.LayerGate.recorded,
    adt.LayerGate.native,
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_layers_outside_the_gate(call: Callable[[adt.LayerGate, Any], object]) -> None:
    gate = adt.LayerGate(4)
    for layer in (-1, 4, 1 << 40, -(1 << 70), 1 << 70):
        with pytest.raises(adt.ArgumentError, match=rf"layer {layer} is outside this gate's 0\.\.3; make the gate"):
            call(gate, layer)
    for wrong in ("1", 1.0, None, False):
        with pytest.raises(adt.ArgumentTypeError, match="layer must be an integer"):
            call(gate, wrong)
    assert (gate.count, gate.failures) == (0, {})


def test_any_integer_names_a_layer() -> None:
    gate = adt.LayerGate(np.int64(2))
    gate.record(np.int32(1))
    assert [gate.recorded(layer) for layer in range(2)] == [False, True]
    assert (gate.num_layers, gate.count) == (2, 1)


def test_each_layer_is_recorded_or_fails_once() -> None:
    gate = adt.LayerGate(3)
    why, other = ValueError("first"), ValueError("second")
    gate.record(0)
    gate.fail(1, why)
    gate.fail(2)
    with pytest.raises(adt.GateError, match="layer 0 was recorded before; each layer is recorded once"):
        gate.record(0)
    with pytest.raises(adt.GateError, match="layer 0 was recorded before; a layer is recorded or fails, once"):
        gate.fail(0, other)
    for layer in (1, 2):
        with pytest.raises(adt.GateError, match=f"layer {layer} failed before"):
            gate.record(layer)
        with pytest.raises(adt.GateError, match=f"layer {layer} failed before"):
            gate.fail(layer, other)
    assert (gate.count, gate.failures) == (1, {1: why, 2: None})


@pytest.mark.parametrize("error", ["text", ValueError, 3])
def test_the_error_of_a_layer_is_an_exception(error: Any) -> None:
    gate = adt.LayerGate(1)
    with pytest.raises(adt.ArgumentTypeError, match=f"error must be an exception, got {type(error).__name__}"):
        gate.fail(0, error)
    gate.record(0)


async def test_a_failure_after_the_recording_changes_nothing() -> None:
    async with linked() as pair:
        here, there = await both(pair)
        gate = adt.LayerGate(LAYERS)
        task = push(pair, here, gate)
        for layer in range(LAYERS - 1):
            gate.record(layer)
            with pytest.raises(adt.GateError):
                gate.fail(layer, ValueError())
        assert not task.done()
        gate.record(LAYERS - 1)
        await task
        task.raise_for_errors()
        assert layers_there(here, there) == [0, 1, 2, 3]


async def test_gates_have_the_layers_that_are_needed() -> None:
    async with linked() as pair:
        here, there = await both(pair)
        gate = adt.LayerGate(2)
        for targets in ([WHOLE], [part(0, 1), part(2, 2)]):
            with pytest.raises(
                adt.ArgumentError, match=r"layer [23] is outside the gate's 0\.\.1; make the gate for the 4"
            ):
                push(pair, here, gate, *targets)
        assert gate.waiting == 0
        gate.record(1)
        gate.record(0)
        assert [one.layers_done for one in await push(pair, here, gate, part(0, 1))] == [2]
        assert layers_there(here, there) == [0, 1]
        # One for a model of which this node holds the first layers.
        longer = adt.LayerGate(100)
        task = push(pair, here, longer)
        for layer in reversed(range(100)):
            longer.record(layer)
        assert [one.error for one in await task] == [None]
        assert layers_there(here, there) == [0, 1, 2, 3]


# Gates that are given up, or late. --------------------------------------------------------------------------


async def test_tasks_may_start_after_the_recording() -> None:
    async with linked() as pair:
        here, there = await both(pair)
        gate = adt.LayerGate(LAYERS)
        for layer in (3, 1):
            gate.record(layer)
        first = push(pair, here, gate)
        await landed(first, 2)
        assert sorted(first._log) == [(0, 1), (0, 3)]
        assert layers_there(here, there) == [1, 3]
        gate.record(0)
        gate.record(2)
        await first
        for tensor in there.tensors:
            tensor[:] = 0
        # The gate stays as it is.
        assert [one.layers_done for one in await push(pair, here, gate)] == [LAYERS]
        assert layers_there(here, there) == [0, 1, 2, 3]


async def test_records_after_a_cancel_go_nowhere() -> None:
    async with linked() as pair:
        here, there = await both(pair)
        gate = adt.LayerGate(LAYERS)
        task = push(pair, here, gate)
        gate.record(0)
        await landed(task, 1)
        assert gate.waiting == 1
        task.cancel("enough")
        with pytest.raises(asyncio.CancelledError, match="enough"):
            await task
        assert gate.waiting == 0
        for tensor in there.tensors:
            tensor[:] = 0
        for layer in range(1, LAYERS):
            gate.record(layer)
        with pytest.raises(adt.GateError):
            gate.record(0)
        await pair.owner.fence(USER)
        assert not any(tensor.any() for tensor in there.tensors)
        await push(pair, here, gate)
        assert layers_there(here, there) == [0, 1, 2, 3]


@TRANSPORTS
async def test_layers_that_never_come_end_by_the_deadline(transport: str) -> None:
    async with linked(transport) as pair:
        here, there = await both(pair)
        gate = adt.LayerGate(LAYERS)
        for layer in range(LAYERS - 1):
            gate.record(layer)
        for seconds in (0.1, 1.0, 10.0):  # within which all that is recorded is to land, on a busy machine as well
            task = push(pair, here, gate, WHOLE, part(0, 1), timeout=seconds)
            first, second = await task
            assert isinstance(first.error, adt.TransferTimeout)
            if len(task._log) == LAYERS - 1 + 2:
                break
        assert (first.error.peer, first.layers_done) == (OWNER, LAYERS - 1)
        assert (second.error, second.layers_done) == (None, 2)
        assert gate.waiting == 0
        gate.record(LAYERS - 1)
        await pair.owner.fence(USER)
        assert layers_there(here, there) == [0, 1, 2]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("where", ["before the engine", "at the engine"])
async def test_an_error_of_any_kind_ends_its_target_alone(
    where: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def submit_layers(self, *_: object) -> None:
            raise MemoryError("no room for the tensors")

    async with linked() as pair:
        there = [await pair.offer(pattern(seed, (8, 512), tensors=LAYERS), key=None) for seed in (3, 4)]
        here = pair.user.cache_manager.register_blocks_cache(pattern(2, (8, 512), tensors=2 * LAYERS))
        if not late:
            await here.ready()
        manager, calls = pair.user.cache_manager, itertools.count()
        real = manager._pair

        def made(*arguments: Any) -> Any:
            if next(calls) not in (1, 3):  # the second half of the first target, and the last one
                return real(*arguments)
            if where == "before the engine":
                raise MemoryError("no room for the tensors")
            return Broken()

        monkeypatch.setattr(manager, "_pair", made)
        gate = adt.LayerGate(LAYERS)
        split = adt.TransferConfig(OWNER, [*there[0].addresses, *there[1].addresses])
        half = adt.TransferConfig(OWNER, there[0].addresses, range(2))
        task = push(pair, here, gate, split, half, half)
        assert late == (here._native is None)
        await here.ready()
        for layer in range(LAYERS):
            gate.record(layer)
        results = await asyncio.wait_for(task, PATIENCE)
        assert [type(one.error) for one in results] == [MemoryError, type(None), MemoryError]
        assert results[1].layers_done == 2
        assert gate.waiting == 0
        assert pair.user.dump() == []
        assert pair.link._counters.pending == 0


async def test_a_gate_that_is_dropped_ends_who_waits() -> None:
    async with linked() as pair:
        here, there = await both(pair)
        gate = adt.LayerGate(LAYERS)
        task = push(pair, here, gate, WHOLE, part(0, 1))
        gate.record(1)
        gate.record(0)
        await landed(task, 4)
        del gate
        first, second = await task
        assert isinstance(first.error, adt.LayerFailed)
        assert (first.error.layer, first.error.__cause__, first.layers_done) == (None, None, 2)
        assert "the gate was dropped before all layers were recorded" in str(first.error)
        assert first.error.status is adt.Status.PARAM_INVALID
        assert (second.error, second.layers_done) == (None, 2)
        assert layers_there(here, there) == [0, 1]


async def test_a_gate_may_be_dropped_when_all_is_recorded() -> None:
    async with linked() as pair:
        here, _ = await both(pair)
        gate = adt.LayerGate(LAYERS)
        kept = weakref.ref(gate)
        task = push(pair, here, gate)
        for layer in range(LAYERS):
            gate.record(layer)
        del gate
        assert kept() is None
        assert [(one.error, one.layers_done) for one in await task] == [(None, LAYERS)]


async def test_a_gate_that_is_dropped_before_the_cache_is_registered() -> None:
    async with linked() as pair:
        await pair.offer(pattern(1, (8, 512), tensors=2 * LAYERS))
        here = pair.user.cache_manager.register_blocks_cache(pattern(2, (8, 512), tensors=2 * LAYERS))
        gate = adt.LayerGate(LAYERS)
        task = push(pair, here, gate)
        assert here._native is None, "this is about a cache that is not ready"
        del gate
        (result,) = await task
        assert isinstance(result.error, adt.LayerFailed)


@pytest.mark.parametrize("end", ["unregister here", "unregister there", "unlink", "close", "close there", "abort"])
async def test_waiting_at_a_gate_holds_no_closing_up(end: str) -> None:
    async with linked() as pair:
        here, there = await both(pair)
        gate = adt.LayerGate(LAYERS)
        task = push(pair, here, gate, timeout=None)
        gate.record(0)
        await landed(task, 1)
        expected: type[adt.DataDistError] = adt.ClosedError
        match end:
            case "unregister here":
                await pair.user.cache_manager.unregister_cache(here)
            case "unregister there":
                await pair.owner.cache_manager.unregister_cache(there)
                expected = adt.CacheNotFound
            case "unlink":
                await pair.owner.unlink(adt.ClusterInfo(USER))
                expected = adt.PeerLostError
            case "close":
                await pair.user.aclose(timeout=0.1)  # it would let the transfer run to its end
            case "close there":
                await pair.owner.aclose()
                expected = adt.PeerLostError
            case "abort":
                pair.user.abort()
        (result,) = await task
        assert isinstance(result.error, expected), result
        assert result.layers_done == 1
        assert gate.waiting == 0
        gate.record(1)


# Wrong calls. -----------------------------------------------------------------------------------------------

# What differs from a good call, the error, and what it names.
WRONG: list[tuple[dict[str, Any], type[adt.DataDistError], str]] = [
    (
        {"targets": WHOLE},
        adt.ArgumentTypeError,
        "a sequence of configs, got TransferWithCacheKeyConfig",
    ),
    ({"targets": {0: WHOLE}}, adt.ArgumentTypeError, "targets must be a sequence of configs, got dict"),
    ({"targets": [WHOLE, 1]}, adt.ArgumentTypeError, r"targets\[1\] must be a TransferConfig or"),
    ({"targets": [adt.TransferConfig(OWNER, [1, 2])]}, adt.ArgumentError, "2 addresses, and its 4 layers have 8"),
    ({"targets": [adt.TransferConfig(OWNER, [0] * 8)]}, adt.ArgumentError, r"dst_addrs\[0\]=0 is outside"),
    ({"targets": [adt.TransferConfig(OWNER, [1.5] * 8)]}, adt.ArgumentTypeError, r"dst_addrs\[0\] must be an integer"),
    (
        {"targets": [adt.TransferConfig(OWNER, np.ones(8, np.uint64))]},
        adt.ArgumentTypeError,
        "ndarray; give a list",
    ),
    ({"targets": [adt.TransferConfig(True, [1] * 8)]}, adt.ArgumentTypeError, "dst_cluster_id must be an integer"),
    ({"targets": [adt.TransferConfig(USER, [1] * 8)]}, adt.ArgumentError, "cluster 2 is this DataDist itself"),
    ({"targets": [adt.TransferConfig(OWNER, [1] * 8, None, 1)]}, adt.ArgumentError, "src_batch_index=1 names a batch"),
    (
        {"targets": [adt.TransferWithCacheKeyConfig(tuple(KEY))]},
        adt.ArgumentTypeError,
        "cache_key must be .* got tuple",
    ),
    ({"targets": [adt.TransferWithCacheKeyConfig(adt.CacheKey(OWNER, 1))]}, adt.ArgumentError, "omit dst_blocks"),
    ({"targets": [adt.TransferWithCacheKeyConfig(adt.CacheKey(OWNER))]}, adt.ArgumentError, "neither req_id nor"),
    ({"targets": [part(0, 4)]}, adt.ArgumentError, r"src_layer_range=range\(0, 5, 1\) exceeds the 4 layers"),
    (
        {"targets": [adt.TransferWithCacheKeyConfig(KEY, range(2), range(1))]},
        adt.ArgumentError,
        "2 source layers and 1 destination layers",
    ),
    ({"src_blocks": None, "dst_blocks": None}, adt.ArgumentError, "names no batch slot; give dst_blocks"),
    ({"dst_blocks": None}, adt.ArgumentError, "src_blocks is given without dst_blocks"),
    ({"dst_blocks": [1]}, adt.BlockIndexError, "src_blocks has 2 entries and dst_blocks has 1"),
    ({"dst_blocks": [1, 1]}, adt.BlockIndexError, r"dst_blocks\[1\]=1 is named twice"),
    ({"dst_blocks": [1, -1]}, adt.BlockIndexError, r"dst_blocks\[1\]=-1 is negative"),
    ({"src_blocks": [0, 8]}, adt.BlockIndexError, r"src_blocks\[1\]=8 is outside the local cache's 0\.\.7"),
    ({"src_blocks": [0, 1.0]}, adt.ArgumentTypeError, r"src_blocks\[1\]=1.0"),
    ({"tensor_num_per_layer": 3}, adt.ArgumentError, "8 tensors, not a multiple of tensor_num_per_layer=3"),
    ({"tensor_num_per_layer": 0}, adt.ArgumentError, "tensor_num_per_layer=0 is outside"),
    ({"timeout": 0.0}, adt.ArgumentError, "timeout=0.0 is not a positive number"),
    ({"timeout": "1"}, adt.ArgumentTypeError, "timeout must be seconds or None"),
    ({"notify": "text"}, adt.ArgumentTypeError, "notify must be bytes, got str"),
    ({"notify": bytes(1 << 20)}, adt.ArgumentError, "notify has 1048576 bytes, more than"),
]


async def test_wrong_calls_start_nothing() -> None:
    async with linked() as pair:
        here, there = await both(pair)
        gate = adt.LayerGate(LAYERS)
        for changed, error, said in WRONG:
            options = {"targets": [WHOLE], "src_blocks": [1, 2], "dst_blocks": [3, 4], **changed}
            with pytest.raises(error, match=said):
                pair.user.cache_manager.transfer_cache_async(here, gate, **options)
        for layer in range(LAYERS):
            gate.record(layer)
        await until(lambda: gate.waiting == 0, "a transfer has not heard of all its layers")
        assert (pair.link._counters.started, pair.user.dump()) == (0, [])
        await pair.owner.fence(USER)
        assert layers_there(here, there) == []


# Many at once. ----------------------------------------------------------------------------------------------


async def test_many_threads_record_at_once() -> None:
    count, threads = 64, 8
    async with linked() as pair:
        there = await pair.offer(pattern(1, (2, 64), tensors=2 * count))
        here = await pair.take(pattern(2, (2, 64), tensors=2 * count))
        gate = adt.LayerGate(count)
        task = pair.user.cache_manager.transfer_cache_async(here, gate, [WHOLE], [0, 1], [1, 0])
        refused = itertools.count()
        barrier = threading.Barrier(threads)

        def model(number: int) -> None:
            barrier.wait()
            for layer in range(count):  # all of them record all layers, from another beginning
                try:
                    gate.record((layer + number * 5) % count)
                except adt.GateError:
                    next(refused)

        models = [threading.Thread(target=model, args=(i,)) for i in range(threads)]
        for thread in models:
            thread.start()
        said = [layer async for _, layer in task.layers()]
        await task
        for thread in models:
            thread.join()
        assert sorted(said) == list(range(count))
        assert next(refused) == (threads - 1) * count
        task.raise_for_errors()
        for mine, theirs in zip(here.tensors, there.tensors, strict=True):
            assert np.array_equal(mine, theirs[::-1])


async def test_one_gate_for_many_tasks_of_many_nodes() -> None:
    """Of two loops, too: what a thread records is pushed by all."""
    gate = adt.LayerGate(LAYERS)
    begun = threading.Semaphore(0)
    found: list[list[int]] = []

    async def node() -> None:
        async with linked("shm") as one, linked("tcp") as other:
            caches = [await both(pair) for pair in (one, other)]
            tasks = [
                push(pair, here, gate, WHOLE, part(0, 2))
                for pair, (here, _) in zip((one, other), caches, strict=True)
                for _ in range(3)
            ]
            begun.release()
            for results in await asyncio.gather(*tasks):
                assert [(result.error, result.layers_done) for result in results] == [(None, 4), (None, 3)]
            found.extend(layers_there(*each) for each in caches)

    def elsewhere() -> None:
        asyncio.run(node())

    def model() -> None:
        for _ in range(2):
            assert begun.acquire(timeout=60)
        assert gate.waiting == 2 * 2 * 3 * 2
        for layer in range(LAYERS):
            gate.record(layer)

    await asyncio.gather(asyncio.to_thread(model), asyncio.to_thread(elsewhere), node())
    assert found == [[0, 1, 2, 3]] * 4
    assert gate.waiting == 0
    # And once more, with an engine that is not the one that it knew.
    await until(lambda: native_threads() == 0)
    async with linked() as pair:
        here, there = await both(pair)
        await push(pair, here, gate)
        assert layers_there(here, there) == [0, 1, 2, 3]


class LayerCall(Call):
    def __init__(self) -> None:
        super().__init__()
        self.layers: list[int] = []

    def _native_layer(self, layer: int, elapsed_ns: int) -> None:
        assert elapsed_ns >= 0
        self.layers.append(layer)


def test_one_gate_for_several_engines() -> None:
    geometry = (4, 8, 256, 256)
    gate = adt.LayerGate(2)
    with rig("shm-mapped", "step") as one, rig("tcp", "step") as other, rig("shm-mapped") as threads:
        rigs = (one, other, threads)
        calls, ends = [], []
        for number, r in enumerate(rigs):
            here, there = r.tensors(geometry, owner=False, seed=number), r.tensors(geometry)
            call = LayerCall()
            tensors = [(i, i, 0) for i in range(4)]
            r.pair(here, there).submit_layers(call, [1, 2], [5, 3], gate, 0, 2, tensors, [0, 2, 4], geometry, 0.0)
            calls.append(call)
            ends.append((here, there))
        assert gate.waiting == 3
        gate.record(1)
        for r, call in zip(rigs, calls, strict=True):
            r.run(lambda call=call: call.layers == [1])  # type: ignore[misc]
        gate.record(0)
        for r, call, (here, there) in zip(rigs, calls, ends, strict=True):
            r.run(lambda call=call: call.ended)  # type: ignore[misc]
            assert (call.layers, call.status, call.done) == ([1, 0], 0, 4 * 2 * 256)
            for mine, theirs in zip(here.blocks, there.blocks, strict=True):
                assert np.array_equal(mine[[1, 2]], theirs[[5, 3]])
        assert gate.waiting == 0


# Signals for native code. -----------------------------------------------------------------------------------


async def test_a_signal_works_once() -> None:
    async with linked() as pair:
        here, there = await both(pair)
        gate = adt.LayerGate(LAYERS)
        task = push(pair, here, gate)
        signals = [gate.native(layer) for layer in range(LAYERS)]
        assert len({signal.context for signal in signals}) == LAYERS
        fire = CALLBACK(signals[0].function)
        for _ in range(3):
            fire(signals[0].context)
        assert not signals[0].pending
        signals[1].release()
        fire(signals[1].context)
        signals[1].release()
        fire(None)
        fire(1 << 60)
        assert [gate.recorded(layer) for layer in range(LAYERS)] == [True, False, False, False]
        # What is recorded is recorded, whoever did it; a signal has nobody to complain to.
        gate.record(2)
        fire(signals[2].context)
        gate.fail(3, ValueError("late"))
        fire(signals[3].context)
        (result,) = await task
        assert isinstance(result.error, adt.LayerFailed)
        assert (result.error.layer, gate.count) == (3, 2)
        assert not any(signal.pending for signal in signals)
        assert 1 not in layers_there(here, there)


async def test_a_pending_signal_keeps_the_gate() -> None:
    async with linked() as pair:
        here, _ = await both(pair)
        gate = adt.LayerGate(LAYERS)
        kept = weakref.ref(gate)
        task, other = push(pair, here, gate), push(pair, here, gate)
        for layer in range(LAYERS - 2):
            gate.record(layer)
        signals = [gate.native(layer) for layer in (2, 3)]
        fire, context = CALLBACK(signals[0].function), signals[0].context
        await landed(task, 2)
        del gate
        gc.collect()
        assert kept() is None  # only the Python object is gone
        fire(context)
        await landed(task, 3)
        assert not task.done()
        signals[1].release()  # the last who could record
        for (result,) in (await task, await other):
            assert isinstance(result.error, adt.LayerFailed)
            assert result.layers_done == 3
        # The transfers are over, and so is the gate.
        fire(signals[1].context)
        fire(context)


async def test_a_signal_after_its_transfers_and_its_node() -> None:
    gate = adt.LayerGate(LAYERS)
    signal = gate.native(0)
    async with linked() as pair:
        here, _ = await both(pair)
        task = push(pair, here, gate)
        task.cancel()
        await asyncio.wait([task])
    await until(lambda: native_threads() == 0)
    assert signal.pending
    CALLBACK(signal.function)(signal.context)
    assert gate.recorded(0)


async def test_a_thread_of_c_signals_while_python_holds_the_gil() -> None:
    """Neither that thread nor the engine's need the GIL: the bytes are there before this function gives it up."""
    libc = ctypes.PyDLL(None)  # whose calls keep the GIL
    libc.pthread_create.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    libc.pthread_join.argtypes = [ctypes.c_ulong, ctypes.c_void_p]
    async with linked("shm") as pair:
        here, there = await both(pair)
        gate = adt.LayerGate(LAYERS)
        task = push(pair, here, gate)
        signals = [gate.native(layer) for layer in range(LAYERS)]
        thread = ctypes.c_ulong()
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1000)  # no other thread of Python runs from here on
        try:
            for signal in signals:
                assert libc.pthread_create(ctypes.byref(thread), None, signal.function, signal.context) == 0
                assert libc.pthread_join(thread, None) == 0
            limit = time.monotonic() + 60
            while layers_there(here, there) != [0, 1, 2, 3] and time.monotonic() < limit:
                libc.usleep(1000)
        finally:
            sys.setswitchinterval(interval)
        assert layers_there(here, there) == [0, 1, 2, 3]
        assert not task.done()
        assert [one.error for one in await task] == [None]


# What gates cost, and what is left of them. -----------------------------------------------------------------


async def test_idle_gates_cost_nothing() -> None:
    async with linked() as pair:
        here, _ = await both(pair)
        before = threading.active_count(), native_threads()
        gates = [adt.LayerGate(80) for _ in range(300)]
        tasks = [push(pair, here, gate) for gate in gates]
        await asyncio.sleep(0)
        assert (threading.active_count(), native_threads()) == before
        for _ in range(20):  # whoever polled would do so every time; a busy machine disturbs some of them
            cpu, began = time.process_time(), time.monotonic()
            await asyncio.sleep(0.1)
            if time.process_time() - cpu < 0.02 * (time.monotonic() - began):
                break
        else:
            pytest.fail("gates at which somebody waits take processor time")
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert not any(gate.waiting for gate in gates)


async def test_a_gate_forgets_who_has_waited() -> None:
    async with linked() as pair:
        here, _ = await both(pair)
        gate = adt.LayerGate(LAYERS)
        gate.record(0)
        for _ in range(3):
            tasks = [push(pair, here, gate, part(0, 1), timeout=None) for _ in range(20)]
            assert gate.waiting == 20
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            assert gate.waiting == 0


async def test_layers_wake_a_loop_only_while_somebody_reads_them() -> None:
    async with linked() as pair:
        here, there = await both(pair)
        wakes: list[None] = []  # both sides share the loop, and so its ring
        pair.user._center._watch.add_listener(lambda: wakes.append(None))

        def start() -> tuple[adt.LayerGate, adt.TransferTask]:
            for tensor in there.tensors:
                tensor[:] = 0
            gate = adt.LayerGate(LAYERS)
            return gate, push(pair, here, gate)

        async def silent() -> bool:
            await asyncio.sleep(0.05)  # what wakes the loop would have done so
            return not wakes

        async def never_read() -> bool:
            gate, task = start()
            wakes.clear()
            for layer in range(3):
                gate.record(layer)
            await until(lambda: layers_there(here, there) == [0, 1, 2])
            unheard = await silent()
            async with asyncio.timeout(PATIENCE):
                landed = [await anext(reader) for reader in [task.layers()] for _ in range(3)]
            assert landed == [(0, 0), (0, 1), (0, 2)]
            gate.record(3)
            assert (await task)[0].error is None
            return unheard

        async def read_no_more() -> bool:
            events = pair.owner.events()
            gate, task = start()
            gate.record(0)
            async with asyncio.timeout(PATIENCE):
                while not isinstance(await anext(events), adt.LayerArrived):
                    pass
            del events
            gc.collect()
            gate.record(1)  # is told to nobody, who hears no more from then on
            await until(lambda: not pair.owner._center.readers._of_peers)
            wakes.clear()
            gate.record(2)
            await until(lambda: 2 in layers_there(here, there))
            unheard = await silent()
            gate.record(3)
            assert (await task)[0].error is None
            return unheard

        for step in (never_read, read_no_more):
            # Not every time: a thread that lost its core before it wrote the wake-up for something earlier is late.
            for _ in range(5):
                if await step():
                    break
            else:
                pytest.fail(f"each time the loop was woken: {step.__name__}")


def threads_named(name: str) -> list[int]:
    """Return the ids of the threads of this name."""
    found = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/comm") as comm:
            if comm.read() == f"{name}\n":
                found.append(int(task))
    return found


def policies(name: str) -> list[int]:
    """Return the scheduling policies of the threads of this name."""
    return [os.sched_getscheduler(thread) for thread in threads_named(name)]


async def test_copy_threads_leave_the_processor_of_a_model_and_keep_their_own() -> None:
    usable = os.sched_getaffinity(0)

    def model(gate: adt.LayerGate, cpu: int) -> None:
        os.sched_setaffinity(0, {cpu})
        for layer in range(LAYERS):
            gate.record(layer)
            until = time.thread_time() + 0.002
            while time.thread_time() < until:
                pass

    async with linked() as pair:
        here, there = await both(pair)
        for cpu in sorted(usable):
            for _ in range(10):
                there.tensors[0][:] = 0
                gate = adt.LayerGate(LAYERS)
                task = push(pair, here, gate)
                thread = threading.Thread(target=model, args=(gate, cpu))
                thread.start()
                await task
                thread.join()
                assert layers_there(here, there) == [0, 1, 2, 3]
        affinities = [os.sched_getaffinity(thread) for thread in threads_named("adt-copy")]
        assert affinities == [usable] * adt.Config().copy_threads


async def test_threads_that_a_post_wakes_do_not_take_its_core() -> None:
    # One that the whole process runs under is kept.
    own = os.sched_getscheduler(0)
    wanted = os.SCHED_BATCH if own == os.SCHED_OTHER else own
    config = adt.Config()
    async with linked():
        await until(lambda: policies("adt-copy") == [wanted] * config.copy_threads)
        await until(lambda: policies("adt-io") == [wanted] * config.io_threads)
        # An answer to a short request must not wait for others' slices.
        assert policies("adt-short") == [own]


async def test_the_progress_thread_waits_for_its_turn_only_to_start_a_long_transfer() -> None:
    own = os.sched_getscheduler(0)
    blocks = 4096
    async with linked() as pair:
        await pair.offer([np.zeros((blocks, 64), np.uint8)])
        here = await pair.take([np.zeros((blocks, 64), np.uint8)], remote=None)
        assert policies("adt-progress") == [own]
        for _ in range(20):
            order = np.random.default_rng(0).permutation(blocks)
            await pair.user.cache_manager.pull_blocks(adt.BlocksCacheKey(OWNER), here, order, order)
            # Deadlines and fences are its work again, which a slice of others' would make late.
            await until(lambda: policies("adt-progress") == [own])


class WhyNot(Exception):
    """Can be referred to weakly."""


async def test_nothing_keeps_gates_and_tasks() -> None:
    async with linked() as pair:
        here, _ = await both(pair)
        gone: list[weakref.ref[Any]] = []

        async def run(fail: bool) -> None:
            gate = adt.LayerGate(LAYERS)
            why = WhyNot()
            task = push(pair, here, gate)
            gone.extend((weakref.ref(gate), weakref.ref(task), weakref.ref(why)))
            for layer in range(LAYERS):
                if fail and layer == 2:
                    gate.fail(layer, why)
                else:
                    gate.record(layer)
            async for _ in task.layers():
                pass
            assert [one.error is None for one in await task] == [not fail]

        await run(False)
        await run(True)
        gc.collect()
        await until(lambda: not any(one() for one in gone))


FORK = """
import asyncio, ctypes, os, sys
import numpy as np
import aiodatadist as adt

async def main():
    gate = adt.LayerGate(4)
    signal = gate.native(1)
    async with adt.DataDist(1, listen="127.0.0.1:0"):
        if os.fork() == 0:
            try:
                for call in (lambda: gate.record(0), lambda: gate.fail(0), lambda: gate.recorded(0),
                             lambda: gate.native(0), lambda: gate.count, lambda: gate.waiting):
                    try:
                        call()
                    except adt.ForkedError as why:
                        assert "forked" in str(why)
                    else:
                        print("a gate does something in a child", flush=True)
                ctypes.CFUNCTYPE(None, ctypes.c_void_p)(signal.function)(signal.context)
                signal.release()
                assert not signal.pending and gate.num_layers == 4
                print("inert", flush=True)
            finally:
                os._exit(0)
        os.wait()
        assert signal.pending and gate.count == 0
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(signal.function)(signal.context)
        gate.record(0)
        print(gate.count, flush=True)

asyncio.run(main())
"""


def test_gates_are_inert_in_a_forked_child() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", FORK], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert (ran.returncode, ran.stdout.split(), ran.stderr) == (0, ["inert", "2"], "")
