"""Two linked nodes, one of which pushes a cache of few layers into the other's: for the tests of layers."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

import aiodatadist as adt

from .pairs import OWNER, Pair, pattern
from .waiting import PATIENCE

LAYERS = 4
SRC, DST = [1, 2, 3, 7], [5, 6, 4, 0]
KEY = adt.BlocksCacheKey(OWNER)
WHOLE = adt.TransferWithCacheKeyConfig(KEY)


def part(*layers: int) -> adt.TransferWithCacheKeyConfig:
    """Return a target for a range of layers."""
    named = range(layers[0], layers[-1] + 1)
    return adt.TransferWithCacheKeyConfig(KEY, named, named)


async def both(pair: Pair) -> tuple[adt.Cache, adt.Cache]:
    """Return the user's cache, which is pushed, and the owner's, which is pushed into."""
    there = await pair.offer(pattern(1, (8, 512), tensors=2 * LAYERS))
    return await pair.take(pattern(2, (8, 512), tensors=2 * LAYERS)), there


def push(pair: Pair, cache: adt.Cache, layers: Any, *targets: Any, **options: Any) -> adt.TransferTask:
    """Push layer by layer, to one target with all layers unless others are named."""
    options.setdefault("timeout", PATIENCE)
    return pair.user.cache_manager.transfer_cache_async(cache, layers, targets or [WHOLE], SRC, DST, **options)


def layers_there(here: adt.Cache, there: adt.Cache) -> list[int]:
    """Return the layers that have arrived."""
    return [
        layer
        for layer in range(LAYERS)
        if all(np.array_equal(there.tensors[i][DST], here.tensors[i][SRC]) for i in (2 * layer, 2 * layer + 1))
    ]


async def landed(task: adt.TransferTask, count: int) -> None:
    """Wait until so many layers of so many targets have landed."""
    seen = 0
    async with asyncio.timeout(PATIENCE):
        async for _ in task.layers():
            seen += 1
            if seen == count:
                return
