"""Random requests that hold, adopt, pull and release, and are cut anywhere: for `test_leases` and `soak`.

The rule: whatever becomes of a request, its lease ends and nothing is left. Where the owner was told, that is at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Iterable

import numpy as np

import aiodatadist as adt

from .pairs import OWNER, USER, Pair
from .quiet import Broken, Tally

BLOCKS, BLOCK_BYTES, AT_ONCE = 64, 4096, 32
LONG, SHORT = 3600.0, 0.02


async def _consume(pair: Pair, mine: adt.Cache, lease_id: int, block: int) -> None:
    """Do as a scheduler does: however it ends, the owner is told."""
    try:
        await pair.user.adopt_lease(OWNER, lease_id)
        await pair.user.cache_manager.pull_blocks(adt.BlocksCacheKey(OWNER), mine, [block], [block])
        await asyncio.sleep(0)
    finally:
        pair.user.release_lease(OWNER, lease_id)


async def _request(pair: Pair, cache: adt.Cache, mine: adt.Cache, seed: int, tally: Tally) -> None:
    draw = random.Random(seed)
    block = draw.randrange(BLOCKS)
    cause = draw.choice(("cancel", "cancel", "owner", "expire", "never"))
    ttl = SHORT if cause in ("expire", "never") else LONG
    lease = pair.owner.cache_manager.hold(cache, [block], ttl, peer=draw.choice((None, USER)))
    task = asyncio.create_task(_consume(pair, mine, lease.id, block)) if cause != "never" else None
    for _ in range(draw.randrange(12)):
        await asyncio.sleep(0)
    if cause == "cancel" and task is not None:
        task.cancel()
    if cause == "owner":
        lease.release()
    if task is not None:
        with contextlib.suppress(asyncio.CancelledError, adt.LeaseError):
            await task
        # A task that was cancelled before its first step has told nobody.
        lease.release()
    end = await lease.wait_over()
    if end is not (adt.LeaseEnd.EXPIRED if cause == "never" else adt.LeaseEnd.RELEASED) and ttl == LONG:
        raise Broken(f"seed {seed}: the lease ended as {end} after {cause}")
    tally.rounds += 1
    tally.causes[cause] += 1
    tally.ends[end.value] += 1


async def rounds(pair: Pair, seeds: Iterable[int]) -> Tally:
    """Run a request for each seed, some at a time, and see that nothing is left."""
    tally, began = Tally(), time.monotonic()
    source = [np.zeros((BLOCKS, BLOCK_BYTES), np.uint8) for _ in range(2)]
    cache = await pair.offer(source)
    mine = await pair.take([np.zeros((BLOCKS, BLOCK_BYTES), np.uint8) for _ in range(2)])
    waiting = iter(seeds)

    async def lane() -> None:
        for seed in waiting:
            await _request(pair, cache, mine, seed, tally)

    await asyncio.gather(*(lane() for _ in range(AT_ONCE)))
    for dd in (pair.owner, pair.user):
        stats = dd.stats()["leases"]
        left = {name: stats[name] for name in ("held", "ending", "adopted", "blocks", "deferred_bytes") if stats[name]}
        if left or stats["next_expiry"] is not None:
            raise Broken(f"leases are left after {tally}: {left}")
    if pair.owner.cache_manager.held(cache).any():
        raise Broken("blocks are held by no lease")
    for dd, used in ((pair.owner, cache), (pair.user, mine)):
        await dd.cache_manager.unregister_cache(used)
    tally.seconds = time.monotonic() - began
    return tally
