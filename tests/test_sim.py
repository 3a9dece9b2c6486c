"""The simulated network: ordinary DataDists on a virtual clock, and the same run from the same seed."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import aiodatadist as adt
from aiodatadist import testing
from aiodatadist.testing import SimCluster, Way

from .pairs import pattern

OWNER, USER = 1, 2
KEY = adt.BlocksCacheKey(OWNER)
TRANSPORTS = ("sim", "tcp")
BAD = Way(
    latency=(1e-5, 2e-3),
    bandwidth=1e8,
    loss=0.05,
    duplicate=0.2,
    reorder=0.3,
    visible=(0.0, 1e-3),
    split=0.3,
    fragment=512,
)


async def two(sim: SimCluster, shape: tuple[int, ...] = (64, 64), **options: Any) -> tuple[adt.Cache, adt.Cache]:
    """Link two DataDists with a cache each; return the owner's and the user's."""
    owner = await sim.datadist(OWNER, adt.Role.PROMPT, **options)
    user = await sim.datadist(USER, adt.Role.DECODER, **options)
    theirs = owner.cache_manager.register_blocks_cache(pattern(1, shape), key=KEY)
    mine = user.cache_manager.register_blocks_cache(pattern(2, shape))
    await theirs.ready()
    link = await user.link(sim.info(OWNER))
    await seen(link, theirs)
    return theirs, mine


async def seen(link: adt.Link, cache: adt.Cache) -> None:
    while adt.CacheKeyByIdAndIndex(OWNER, cache.id) not in link.table:
        await asyncio.sleep(1e-3)


async def some_traffic(sim: SimCluster, transport: str) -> None:
    theirs, mine = await two(sim, transports=(transport,))
    pull, push = sim[USER].cache_manager.pull_blocks, sim[USER].cache_manager.push_blocks
    for number in range(4):
        blocks = sim.random.sample(range(64), 8)
        await pull(KEY, mine, blocks, blocks, notify=b"pulled")
        for ours, of_owner in zip(mine.tensors, theirs.tensors, strict=True):
            np.testing.assert_array_equal(ours[blocks], of_owner[blocks])
            ours[blocks] = number
        await push(KEY, mine, blocks, blocks)
        assert all((tensor[blocks] == number).all() for tensor in theirs.tensors)
    late = pull(KEY, mine, list(range(64)), list(range(64)))
    await asyncio.sleep(1e-4)
    late.cancel()
    await asyncio.wait([late])
    await sim[OWNER].fence(USER)


def traffic(seed: int, transport: str, way: Way, **options: Any) -> testing.Trace:
    async def main() -> testing.Trace:
        async with SimCluster(seed, way=way, **options) as sim:
            await some_traffic(sim, transport)
        return sim.trace

    return testing.run(main())


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("way", [Way(), BAD], ids=["good", "bad"])
def test_blocks_arrive(transport: str, way: Way) -> None:
    assert traffic(1, transport, way).events


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_same_seed_is_the_same_run(transport: str) -> None:
    first, second = traffic(7, transport, BAD), traffic(7, transport, BAD)
    assert first.events == second.events
    assert first.hash == second.hash != traffic(8, transport, BAD).hash
