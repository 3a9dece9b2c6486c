"""The transport verbs where a device does not let go, and where queue pairs have to be flushed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import aiodatadist as adt
from aiodatadist import _core

from .conftest import Scale
from .pairs import linked, pattern

KEY = adt.BlocksCacheKey(1)
BLOCKS, BLOCK_BYTES = 256, 4096
PATIENT: dict[str, Any] = {"transfer_timeout": None}
# The ends of the wire of the virtual machine.
OWNER: dict[str, Any] = {**PATIENT, "rdma_devices": ("rxe1",)}
USER: dict[str, Any] = {**PATIENT, "rdma_devices": ("rxe2",), "drain_timeout": 0.05}

pytestmark = [pytest.mark.verbs, pytest.mark.hang_limit(300)]
on_the_wire = pytest.mark.skipif("IN_TEST_VM" not in os.environ, reason="cuts a wire that tests/vm/run.sh makes")


@contextlib.contextmanager
def stuck(**faults: int) -> Iterator[None]:
    """Have the device refuse to let go, so many times."""
    _core.limit_rdma(**faults)
    try:
        yield
    finally:
        _core.limit_rdma()


def _tc(*arguments: str) -> None:
    tc = shutil.which("tc", path=os.environ["PATH"] + ":/usr/sbin:/sbin")
    assert tc is not None
    for end in ("veth0", "veth1"):
        subprocess.run([tc, "qdisc", arguments[0], "dev", end, "root", *arguments[1:]], check=True)


@contextlib.contextmanager
def cut_wire() -> Iterator[None]:
    """Lose every packet."""
    _tc("add", "netem", "loss", "100%")
    try:
        yield
    finally:
        _tc("del")


def now() -> float:
    return asyncio.get_running_loop().time()


async def ended_by_force(transfer: adt.Transfer[None]) -> float:
    """Cancel; return how long the end took."""
    began = now()
    transfer.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await transfer
    assert transfer.cancelled()
    return now() - began


@on_the_wire
async def test_a_queue_pair_that_is_not_destroyed_keeps_its_transfers() -> None:
    """Nothing is said to be over before the device has let go, and then all goes on."""
    async with linked("verbs", owner=OWNER, user=USER) as pair:
        theirs, mine = pattern(1, (BLOCKS, BLOCK_BYTES)), pattern(2, (BLOCKS, BLOCK_BYTES))
        await pair.offer(theirs)
        target = await pair.take(mine)
        before = _core.rdma_stats()["rebuilds"]
        with cut_wire():
            pull = pair.user.cache_manager.pull_blocks(KEY, target, range(1, BLOCKS), range(1, BLOCKS))
            other = pair.user.cache_manager.pull_blocks(KEY, target, [0], [0])
            await asyncio.sleep(0.05)
            with stuck(stuck_queue_pairs=4):
                # At least three whole pauses of the thread that asks the device again.
                assert await ended_by_force(pull) > 0.15
            for tensor in mine:
                tensor[1:] = 0xEE
        await other
        assert all((a[0] == b[0]).all() and (b[1:] == 0xEE).all() for a, b in zip(theirs, mine, strict=True))
        assert _core.rdma_stats()["rebuilds"] > before
        await pair.user.cache_manager.pull_blocks(KEY, target, range(BLOCKS), range(BLOCKS))
        assert all((a == b).all() for a, b in zip(theirs, mine, strict=True))
        assert pair.link.state is adt.LinkState.READY


async def test_a_link_is_not_over_while_the_device_holds_its_queue_pair() -> None:
    async with linked("verbs", owner=PATIENT, user=PATIENT) as pair:
        await pair.offer(pattern(1, (BLOCKS, BLOCK_BYTES)))
        with stuck(stuck_queue_pairs=4):
            began = now()
            await pair.user.unlink(adt.ClusterInfo(1))
            await pair.owner.fence(2)
            assert now() - began > 0.05
    assert _core.rdma_stats()["queue_pairs"] == 0


async def test_memory_is_not_given_back_while_the_device_holds_it() -> None:
    async with linked("verbs", owner=PATIENT, user=PATIENT) as pair:
        before = _core.rdma_stats()["registrations"]
        cache = await pair.offer(pattern(1, (BLOCKS, BLOCK_BYTES), tensors=1))
        assert _core.rdma_stats()["registrations"] == before + 1
        with stuck(stuck_registrations=4):
            began = now()
            await pair.owner.cache_manager.unregister_cache(cache)
            assert now() - began > 0.15
        assert _core.rdma_stats()["registrations"] == before


@on_the_wire
async def test_no_transfer_ends_by_what_became_of_another(scale: Scale) -> None:
    """Batches are used again as soon as they are over: what became of a cut one must not end the next."""
    async with linked("verbs", owner=OWNER, user=USER) as pair:
        theirs, mine = pattern(1, (BLOCKS, BLOCK_BYTES)), pattern(2, (BLOCKS, BLOCK_BYTES))
        await pair.offer(theirs)
        target = await pair.take(mine)
        caches = pair.user.cache_manager

        async def check(blocks: Any) -> None:
            for tensor in mine:
                tensor[blocks] = 0xEE
            await caches.pull_blocks(KEY, target, blocks, blocks)
            assert all((a[blocks] == b[blocks]).all() for a, b in zip(theirs, mine, strict=True))

        async def cut(blocks: Any, turn: int) -> None:
            move = caches.push_blocks if turn % 2 else caches.pull_blocks
            transfer = move(KEY, target, blocks, blocks)
            # Once while what it has posted is on the wire, once while it is to be posted again.
            await asyncio.sleep(0.01 * (turn % 7))
            await ended_by_force(transfer)

        for turn in range(scale(20, least=4)):
            parts = np.array_split(np.random.default_rng(turn).permutation(BLOCKS), 8)
            for tensor, source in zip(mine, theirs, strict=True):
                for part in parts[:4]:  # which a push may leave half written, with what was there
                    tensor[part] = source[part]
            before = _core.rdma_stats()["rebuilds"]
            checks = asyncio.gather(*(check(part) for part in parts[4:]))
            with cut_wire():
                await asyncio.gather(*(cut(part, number + turn) for number, part in enumerate(parts[:4])))
            await asyncio.gather(checks, *(check(part) for part in parts[:4]))
            assert _core.rdma_stats()["rebuilds"] > before
        assert pair.link.state is adt.LinkState.READY


@on_the_wire
async def test_what_a_forced_fence_refused_is_not_posted_again(scale: Scale) -> None:
    """The owner does not wait and shuts the user out: whoever makes the next queue pair, no byte lands after that."""
    owner = {**OWNER, "drain_timeout": 0.001, "heartbeat_limit": 60.0}
    async with linked("verbs", owner=owner, user=PATIENT | {"rdma_devices": ("rxe2",)}) as pair:
        theirs, mine = pattern(1, (BLOCKS, BLOCK_BYTES)), pattern(2, (BLOCKS, BLOCK_BYTES))
        await pair.offer(theirs)
        target = await pair.take(mine)
        caches = pair.user.cache_manager
        turn = aborted = 0
        # Where the user answers soon enough nothing is forced, and its pushes fail for want of a wire.
        while turn < scale(10, least=3) or not aborted:
            parts = np.array_split(np.random.default_rng(turn).permutation(BLOCKS), 4)
            with cut_wire():
                pushes = [caches.push_blocks(KEY, target, part, part) for part in parts]
                await asyncio.sleep(0.01 * (turn % 4))
                await pair.owner.fence(2)
                for tensor in theirs:
                    tensor[:] = 0xEE
            ended = await asyncio.gather(*pushes, return_exceptions=True)
            assert all(one is None or isinstance(one, adt.TransportError | adt.TransferAborted) for one in ended), ended
            aborted += sum(isinstance(one, adt.TransferAborted) for one in ended)
            await caches.pull_blocks(KEY, target, range(BLOCKS), range(BLOCKS))
            assert all((tensor == 0xEE).all() for tensor in (*theirs, *mine)), f"turn {turn}"
            for tensor in mine:
                tensor[:] = turn
            turn += 1
        assert pair.link.state is adt.LinkState.READY
