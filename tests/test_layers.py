"""Layer-wise transfers: gates, targets, results."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import pytest

import aiodatadist as adt

from .pairs import OWNER, USER, Pair, linked, pattern

pytestmark = pytest.mark.loop

LAYERS = 4
SRC, DST = [1, 2, 3, 7], [5, 6, 4, 0]
KEY = adt.BlocksCacheKey(OWNER)
CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


async def both(pair: Pair) -> tuple[adt.Cache, adt.Cache]:
    """Return the user's cache, which is pushed, and the owner's, which is pushed into."""
    there = await pair.offer(pattern(1, (8, 512), tensors=2 * LAYERS))
    return await pair.take(pattern(2, (8, 512), tensors=2 * LAYERS)), there


def push(pair: Pair, cache: adt.Cache, gate: Any, *targets: Any, **options: Any) -> adt.TransferTask:
    return pair.user.cache_manager.transfer_cache_async(cache, gate, targets, SRC, DST, **options)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_layers_land_as_a_thread_records_them(transport: str) -> None:
    async with linked(transport) as pair:
        here, there = await both(pair)
        events = pair.owner.events()
        gate = adt.LayerGate(LAYERS)
        addressed = adt.TransferConfig(OWNER, there.addresses[4:], range(2, 4))
        task = push(pair, here, gate, adt.TransferWithCacheKeyConfig(KEY), addressed, notify=b"all")
        signal = gate.native(3)

        def model() -> None:
            for layer in (0, 2, 1):
                gate.record(layer)
            CALLBACK(signal.function)(signal.context)

        thread = threading.Thread(target=model)
        thread.start()
        landed = [one async for one in task.layers()]
        results = await task
        thread.join()
        assert not signal.pending
        assert sorted(landed) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
        assert [(one.error, one.layers_done, one.bytes_done) for one in results] == [
            (None, 4, 4 * 8 * 512),
            (None, 2, 4 * 4 * 512),
        ]
        assert results[1].config is addressed
        for mine, theirs in zip(here.tensors, there.tensors, strict=True):
            assert np.array_equal(theirs[DST], mine[SRC])
        task.raise_for_errors()
        arrived = []
        async for event in events:
            if isinstance(event, adt.LayerArrived):
                arrived.append(event)
                if len(arrived) == len(landed):
                    break
        assert {event.cluster_id for event in arrived} == {USER}
        assert sorted(event.layer for event in arrived) == [0, 1, 2, 2, 3, 3]
        assert sum(event.layers_left == 0 for event in arrived) == 2


async def test_a_failed_layer_ends_only_the_targets_that_need_it() -> None:
    async with linked() as pair:
        here, _ = await both(pair)
        gate = adt.LayerGate(LAYERS)
        whole = adt.TransferWithCacheKeyConfig(KEY)
        half = adt.TransferWithCacheKeyConfig(KEY, range(2), range(2))
        task = push(pair, here, gate, whole, half)
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
