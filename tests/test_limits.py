"""Numbers at their limits: of tensors and of blocks, and what a peer says of itself."""

from __future__ import annotations

import asyncio
import errno
import os

import numpy as np
import pytest

import aiodatadist as adt
from aiodatadist import _core
from aiodatadist.control import handshake, wire

from .pairs import OWNER, linked, pattern

KEY = adt.BlocksCacheKey(OWNER)


@pytest.mark.parametrize(
    ("tensors", "room", "path"),
    [(600, 4 << 20, "shm-process_vm"), (9000, 4 << 20, "shm-process_vm"), (9000, 65 << 10, "tcp")],
)
async def test_caches_of_many_tensors(tensors: int, room: int, path: str) -> None:
    """The key of shm grows with them. Where it is too long for the peer, the cache goes over tcp."""
    config = {"control_max_bytes": room}
    async with linked("shm", "tcp", owner=config, user=config) as pair:
        await asyncio.wait_for(pair.offer([np.full((2, 8), i % 251, np.uint8) for i in range(tensors)]), 60)
        native = pair.link.table[KEY].native
        assert native is not None
        assert native.path == path
        mine = await pair.take([np.zeros((2, 8), np.uint8) for _ in range(tensors)])
        await pair.user.cache_manager.pull_blocks(KEY, mine, [0], [1])
        assert all((tensor[1] == i % 251).all() for i, tensor in enumerate(mine.tensors))


async def test_library_memory_goes_over_tcp_when_descriptors_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(fd: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async with linked("shm", "tcp") as pair:
        with monkeypatch.context() as patched:
            patched.setattr("aiodatadist.control.links.os.dup", no_more)
            cache = await pair.allocate(adt.CacheDesc(num_tensors=1, shape=(4, 64), dtype="uint8"))
        native = pair.link.table[KEY].native
        assert native is not None
        assert native.path == "tcp"
        cache.tensors[0][:] = 7
        mine = await pair.take(pattern(2, (4, 64), tensors=1))
        await pair.user.cache_manager.pull_blocks(KEY, mine, [0], [1])
        assert (mine.tensors[0][1] == 7).all()


async def test_a_peer_whose_limits_contradict_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts longer notifications than messages: an error at the call, not a transfer that never ends."""
    fields = handshake.Own.fields

    def lying(own: handshake.Own, credits: int) -> dict[str, object]:
        told: dict[str, object] = fields(own, credits)
        return {**told, "max_message": wire.HANDSHAKE_MAX_BYTES, "notify_max_bytes": 2**32 - 1}

    with monkeypatch.context() as patched:
        patched.setattr(handshake.Own, "fields", lying)
        async with linked("tcp", user={"notify_max_bytes": 1 << 20}) as pair:
            await pair.offer(pattern(1, (4, 64)))
            mine = await pair.take(pattern(2, (4, 64)))
            pull = pair.user.cache_manager.pull_blocks
            with pytest.raises(adt.ArgumentError, match="notify has 65536 bytes"):
                pull(KEY, mine, [0], [1], notify=bytes(wire.HANDSHAKE_MAX_BYTES))
            await asyncio.wait_for(pull(KEY, mine, [0], [1], notify=bytes(pair.link.notify_max_bytes)), 60)


@pytest.mark.parametrize(
    ("blocks", "fault"),
    [
        ([5, 4, 3], ""),
        ([5, 4, 4], "dst_blocks[2]=4"),
        ([9, 2**49, 9, 2**49], "dst_blocks[2]=9"),
        ([2, 1, 1, 2], "[2]=1"),
    ],
)
def test_repeats_are_found_without_memory_for_each_block_that_a_peer_names(blocks: list[int], fault: str) -> None:
    here, there = (1, 8, 1, 1), (1, 2**50, 1, 1)
    sources = list(range(len(blocks)))
    if not fault:
        assert _core.checked_blocks(_core.WRITE, sources, blocks, here, there) == (tuple(sources), tuple(blocks))
        return
    with pytest.raises(adt.BlockIndexError) as raised:
        _core.checked_blocks(_core.WRITE, sources, blocks, here, there)
    assert fault in str(raised.value)
    assert "twice" in str(raised.value)
