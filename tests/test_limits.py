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

from .engine_rig import ENDED, FENCE, PONG, PROTOCOL, Hand, hand, message
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
                _ = pull(KEY, mine, [0], [1], notify=bytes(wire.HANDSHAKE_MAX_BYTES))
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
        assert _core.checked_sides(_core.WRITE, sources, blocks, here, there) == (tuple(sources), tuple(blocks))
        return
    with pytest.raises(adt.BlockIndexError) as raised:
        _core.checked_sides(_core.WRITE, sources, blocks, here, there)
    assert fault in str(raised.value)
    assert "twice" in str(raised.value)


@pytest.mark.parametrize("number", [1, 2, 3, 8])
@pytest.mark.parametrize("transports", [("shm", "tcp"), ("tcp",)])
async def test_connections_for_short_requests_come_beside_those_asked_for(
    monkeypatch: pytest.MonkeyPatch, transports: tuple[str, ...], number: int
) -> None:
    """The engine takes two of three or more for short requests, so there must be two more."""
    opened = []
    open_connections = handshake.Handshaker._open_connections

    async def watched(self: handshake.Handshaker, session: handshake.Session, token: bytes, count: int) -> None:
        opened.append(count)
        await open_connections(self, session, token, count)

    monkeypatch.setattr(handshake.Handshaker, "_open_connections", watched)
    config = {"tcp_connections": number}
    async with linked(*transports, owner=config, user=config):
        assert [count - 2 if count >= 3 else count for count in opened] == [number]


async def test_a_transfer_that_waited_for_its_cache_ends_whatever_goes_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*args: object) -> None:
        raise MemoryError

    async with linked("tcp") as pair:
        await pair.offer(pattern(1, (4, 64)))
        mine = pair.user.cache_manager.register_blocks_cache(pattern(2, (4, 64)))
        pull = pair.user.cache_manager.pull_blocks(KEY, mine, [0], [1])
        with monkeypatch.context() as patched:
            patched.setattr(pair.user.cache_manager, "_pair", no_memory)
            await mine.ready()
            await asyncio.sleep(0)
        assert pull.done()
        assert isinstance(pull.exception(), MemoryError)
        assert pair.user.dump() == []


# --- a peer that floods --------------------------------------------------------------------------------

ROUND = 2048


def flood(h: Hand, messages: list[bytes]) -> None:
    """Send messages on the engine connection while the node's loop is blocked; stops if the node ends the link."""
    for i in range(0, len(messages), ROUND):
        try:
            h.say(b"".join(messages[i : i + ROUND]))
        except ConnectionError:
            return
        for _ in range(ROUND // 1024 + 1):
            h.engine.step(1)
        h.listen()


def drained(h: Hand) -> int:
    total = 0
    while count := h.ring.drain():
        total += count
    return total


@pytest.mark.sanitize
def test_a_busy_loop_is_not_flooded_with_ends() -> None:
    with hand("step") as h:
        flood(h, [message(ENDED, status=-6, a=i) for i in range(80_000)])
        assert 1000 < drained(h) <= 1 << 16
        h.say(message(ENDED, status=-6, a=1))
        h.run(lambda: h.side.events[-1].token == 1)


@pytest.mark.sanitize
def test_pongs_that_nobody_asked_for_are_no_events() -> None:
    with hand("step") as h:
        token = h.side.to_peer.ping()
        flood(h, [message(PONG, a=i) for i in (token + 1, 2**64 - 1, token, token, token)])
        assert drained(h) == 1
        assert [event.token for event in h.side.events] == [token]


@pytest.mark.sanitize
@pytest.mark.parametrize("step", [1, -1, 2, -2])
def test_caches_that_a_peer_closes(step: int) -> None:
    """All numbers in turn take no room; every other one is a flood."""
    numbers = range(200_000, 1000, step) if step < 0 else range(1000, 200_000, step)
    with hand("step") as h:
        flood(h, [message(FENCE, flags=1, a=1, b=number) for number in numbers])
        if abs(step) == 2:
            assert h.lost() == PROTOCOL
            return
        assert not h.side.seen(_core.EVENT_PEER_LOST)
        for closed in (numbers[0], numbers[-1], numbers[500]):
            with pytest.raises(adt.CacheNotFound):
                h.side.to_peer.import_cache(closed, (1, 1, 8, 8), [("tcp", b"", -1)])
        for live in (min(numbers) - 1, max(numbers) + 1):
            assert h.side.to_peer.import_cache(live, (1, 1, 8, 8), [("tcp", b"", -1)]).id == live
