"""Notifications: after the data, exactly once, in order, bounded by credits; and what the owner hears of bad ends."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest

import aiodatadist as adt

from .conftest import Scale
from .endless import Endless
from .pairs import OWNER, USER, Pair, linked, pattern
from .peers import spawn
from .waiting import PATIENCE, until

KEY = adt.BlocksCacheKey(OWNER)
TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "tcp"])
OPCODES = pytest.mark.parametrize("opcode", ["pull", "push"])


async def small(pair: Pair, blocks: int = 16, width: int = 64) -> adt.Cache:
    """Give both sides a cache; return the user's."""
    await pair.offer(pattern(1, (blocks, width)))
    return await pair.take(pattern(2, (blocks, width)))


async def large(pair: Pair) -> adt.Cache:
    """Give both sides a cache that takes a while to move."""
    await pair.offer([np.zeros((64, 1 << 20), np.uint8)])
    return await pair.take([np.zeros((64, 1 << 20), np.uint8)])


def start(pair: Pair, opcode: str, cache: adt.Cache, src: Any, dst: Any, **options: Any) -> adt.Transfer[None]:
    manager = pair.user.cache_manager
    return (manager.pull_blocks if opcode == "pull" else manager.push_blocks)(KEY, cache, src, dst, **options)


async def read(pair: Pair, count: int) -> list[bytes]:
    notes = aiter(pair.owner.notifications())
    return [(await asyncio.wait_for(anext(notes), PATIENCE)).payload for _ in range(count)]


async def nothing_more(pair: Pair) -> None:
    """All that was sent before has arrived by now, and nothing is unread."""
    cache = next(iter(pair.user.cache_manager.caches.values()))
    await pair.user.cache_manager.pull_blocks(KEY, cache, [], [], notify=b"!")
    assert await read(pair, 1) == [b"!"]
    assert pair.owner.stats()["unread"] == 0


# --- between processes ------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["library", "ordinary"])
@TRANSPORTS
async def test_u6_push_is_visible_when_its_notification_arrives(transport: str, memory: str, scale: Scale) -> None:
    rounds, blocks, width = scale(400), 16, 3000
    # So few credits that no block is written again before its notification was read.
    async with spawn(OWNER, transports=(transport,), notify_credits=blocks // 2) as peer:
        await peer.cache("kv", tensors=2, shape=(blocks, width), memory=memory)
        seen = peer.post(
            "run",
            source="""
            tensors = peer.caches["kv"].tensors
            wrong, order = [], []
            async for note in dd.notifications():
                number = int(note.payload)
                order.append(number)
                for tensor in tensors:
                    if not (tensor[number % blocks] == number % 251).all():
                        wrong.append(number)
                if len(order) == rounds:
                    return {"wrong": wrong, "order": order, "unread": dd.stats()["unread"]}
            """.replace("\n            ", "\n"),
            rounds=rounds,
            blocks=blocks,
        )
        async with adt.DataDist(USER, config=adt.Config(transports=(transport,))) as dd:
            await dd.link(peer.info)
            source = dd.cache_manager.allocate_blocks_cache(adt.CacheDesc(2, (blocks, width), "uint8"))
            await source.ready()
            for number in range(rounds):
                block = number % blocks
                for tensor in source.tensors:
                    tensor[block] = number % 251
                await dd.cache_manager.push_blocks(KEY, source, [block], [block], notify=b"%d" % number)
            result = await asyncio.wait_for(seen, PATIENCE)
    assert result == {"wrong": [], "order": list(range(rounds)), "unread": 0}


# --- in one process -----------------------------------------------------------------------------------


@pytest.mark.loop
@TRANSPORTS
@OPCODES
async def test_each_exactly_once(transport: str, opcode: str) -> None:
    """Many at once, small and large: each arrives once, whatever order they end in."""
    async with linked(transport) as pair:
        cache = await large(pair)
        transfers = []
        for number in range(150):
            blocks = range(40) if number % 50 == 0 else range(40 + number % 24, 41 + number % 24)
            transfers.append(start(pair, opcode, cache, blocks, blocks, notify=b"%d" % number))
        await asyncio.gather(*transfers)
        got = await read(pair, 150)
        assert sorted(map(int, got)) == list(range(150))
        await nothing_more(pair)


@TRANSPORTS
@OPCODES
async def test_in_the_order_of_their_ends(transport: str, opcode: str) -> None:
    async with linked(transport) as pair:
        cache = await small(pair)
        ended: list[bytes] = []
        for number in range(60):
            payload = b"%d" % number
            transfer = start(pair, opcode, cache, [0] if number % 3 else [], [0] if number % 3 else [], notify=payload)
            await transfer
            ended.append(payload)
        assert await read(pair, 60) == ended


@pytest.mark.loop
async def test_readers_compete() -> None:
    async with linked() as pair:
        cache = await small(pair)
        got: list[list[bytes]] = [[], [], []]

        async def reader(mine: list[bytes]) -> None:
            async for note in pair.owner.notifications():
                mine.append(note.payload)
                await asyncio.sleep(0)

        readers = [asyncio.create_task(reader(mine)) for mine in got]
        for number in range(90):
            await start(pair, "pull", cache, [0], [0], notify=b"%d" % number)
        while sum(map(len, got)) < 90:
            await asyncio.sleep(0.001)
        assert sorted(int(payload) for mine in got for payload in mine) == list(range(90))
        assert all(mine == sorted(mine, key=int) and mine for mine in got)
        await nothing_more_by(readers, pair)


async def nothing_more_by(readers: list[asyncio.Task[None]], pair: Pair) -> None:
    """Close the owner: readers come to the end by themselves."""
    await pair.user.aclose()
    await pair.owner.aclose()
    await asyncio.wait_for(asyncio.gather(*readers), PATIENCE)


@pytest.mark.loop
async def test_cancelled_readers_lose_nothing() -> None:
    async with linked() as pair:
        cache = await small(pair)
        got: list[bytes] = []

        async def one() -> None:
            got.append((await anext(aiter(pair.owner.notifications()))).payload)

        for number in range(100):
            tasks = [asyncio.create_task(one()) for _ in range(3)]
            await asyncio.sleep(0)
            await start(pair, "pull", cache, [0], [0], notify=b"%d" % number)
            # Some are cancelled while they wait, some in the very turn in which they are woken.
            for _ in range(number % 5):
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        left = pair.owner.stats()["unread"]
        got += await read(pair, 100 - len(got)) if len(got) < 100 else []
        assert got == [b"%d" % number for number in sorted(map(int, got))]
        assert len(got) == 100 >= left


async def test_unread_notifications_outlive_the_link() -> None:
    async with linked() as pair:
        cache = await small(pair)
        await start(pair, "push", cache, [0], [0], notify=b"last words")
        await pair.user.aclose()
        while pair.owner.links:
            await asyncio.sleep(0.001)
        assert await read(pair, 1) == [b"last words"]


# --- credits --------------------------------------------------------------------------------------------


@TRANSPORTS
@OPCODES
async def test_a_peer_that_does_not_read_makes_senders_wait(transport: str, opcode: str) -> None:
    async with linked(transport, owner={"notify_credits": 4}) as pair:
        cache = await small(pair)
        for number in range(4):
            await start(pair, opcode, cache, [0], [0], notify=b"%d" % number)
        began = time.monotonic()
        # Long enough for the bytes, however busy the machine is.
        late = [start(pair, opcode, cache, [1], [1], notify=b"late", timeout=2.0) for _ in range(3)]
        patient = start(pair, opcode, cache, [2], [2], notify=b"patient", timeout=None)
        # What needs no credit goes on.
        await start(pair, opcode, cache, [3], [3])
        for transfer in late:
            with pytest.raises(adt.TransferTimeout, match="notifications") as caught:
                await transfer
            # The bytes had landed, and were told as such.
            assert caught.value.bytes_done == caught.value.bytes_total == 128
            assert caught.value.peer == OWNER
        assert time.monotonic() - began >= 1.9
        assert not patient.done()
        assert pair.owner.stats()["unread"] == 4
        [row] = pair.user.dump()
        assert "read its notifications" in row.state
        assert (row.kind, row.peer) == (opcode, OWNER)
        counts = pair.user.stats()["total"]
        assert (counts["ok"], counts["timed_out"], counts["pending"]) == (5, 3, 1)

        assert await read(pair, 4) == [b"0", b"1", b"2", b"3"]
        await asyncio.wait_for(patient, PATIENCE)
        assert await read(pair, 1) == [b"patient"]
        await nothing_more(pair)
        assert pair.user.dump() == []


async def test_credits_come_back() -> None:
    """Far more notifications than credits, with a reader that takes its time."""
    async with linked(owner={"notify_credits": 3}) as pair:
        cache = await small(pair)
        transfers = [start(pair, "pull", cache, [0], [0], notify=b"%d" % number) for number in range(200)]
        most = 0
        got = []
        async for note in pair.owner.notifications():
            most = max(most, pair.owner.stats()["unread"] + 1)
            got.append(note.payload)
            await asyncio.sleep(0)
            if len(got) == 200:
                break
        await asyncio.gather(*transfers)
        assert got == [b"%d" % number for number in range(200)]
        assert most <= 3


async def test_a_new_link_gives_no_new_credits() -> None:
    async with linked(owner={"notify_credits": 2}) as pair:
        cache = await small(pair)
        for _ in range(2):
            await start(pair, "pull", cache, [0], [0], notify=b"first")
        await pair.user.unlink(adt.ClusterInfo(OWNER))
        pair.link = await pair.user.link(adt.ClusterInfo(OWNER, str(pair.owner.listen_address)))
        while KEY not in pair.link.table:
            await asyncio.sleep(0.001)
        waiting = start(pair, "pull", cache, [0], [0], notify=b"second", timeout=None)
        await asyncio.sleep(0.05)
        assert not waiting.done()
        assert await read(pair, 2) == [b"first"] * 2
        await asyncio.wait_for(waiting, PATIENCE)
        assert await read(pair, 1) == [b"second"]


@pytest.mark.loop
@OPCODES
async def test_cancel_while_waiting_for_a_credit(opcode: str) -> None:
    async with linked(owner={"notify_credits": 1}) as pair:
        cache = await small(pair)
        await start(pair, opcode, cache, [0], [0], notify=b"first")
        waiting = [start(pair, opcode, cache, [1], [1], notify=b"%d" % n, timeout=None) for n in range(3)]
        await until(lambda: all(transfer.progress == (128, 128) for transfer in waiting))
        assert waiting[0].cancel("no longer")
        assert waiting[0].cancel("other words")
        with pytest.raises(asyncio.CancelledError, match="no longer"):
            await asyncio.wait_for(waiting[0], PATIENCE)
        assert waiting[0].progress == (128, 128)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(waiting[1], 0.05)
        assert waiting[1].cancelled()
        assert pair.user.stats()["total"]["cancelled"] == 2
        # Neither has taken the credit of the third.
        assert await read(pair, 1) == [b"first"]
        await asyncio.wait_for(waiting[2], PATIENCE)
        assert await read(pair, 1) == [b"2"]
        await nothing_more(pair)


@pytest.mark.parametrize("end", ["unlink", "peer unlinks", "peer aborts", "close", "abort"])
async def test_the_link_ends_while_waiting_for_a_credit(end: str) -> None:
    async with linked(owner={"notify_credits": 1}) as pair:
        cache = await small(pair)
        await start(pair, "pull", cache, [0], [0], notify=b"first")
        waiting = start(pair, "pull", cache, [1], [1], notify=b"second", timeout=None)
        await until(lambda: waiting.progress == (128, 128))
        if end == "unlink":
            await pair.user.unlink(adt.ClusterInfo(OWNER))
        elif end == "peer unlinks":
            await pair.owner.unlink(adt.ClusterInfo(USER))
        elif end == "peer aborts":
            pair.owner.abort()
        elif end == "close":
            await pair.user.aclose(1.0)
        else:
            pair.user.abort()
        # As a transfer that is still moving bytes ends, and as the guide says.
        with pytest.raises(adt.ClosedError if end in ("close", "abort") else adt.PeerLostError):
            await asyncio.wait_for(waiting, PATIENCE)


@OPCODES
async def test_notification_of_a_transfer_that_waits_for_its_cache(opcode: str) -> None:
    async with linked() as pair:
        await small(pair)
        late = pair.user.cache_manager.register_blocks_cache(pattern(2, (16, 64)))
        assert late._state == "registering"
        transfer = start(pair, opcode, late, [0], [0], notify=b"late")
        assert not transfer.done()
        [row] = pair.user.dump()
        assert "registration" in row.state
        await transfer
        assert pair.user.dump() == []
        assert await read(pair, 1) == [b"late"]


# --- what the owner hears of bad ends ---------------------------------------------------------------------


async def ended(stream: Any) -> adt.TransferEnded:
    while True:
        event = await asyncio.wait_for(anext(stream), PATIENCE)
        if isinstance(event, adt.TransferEnded):
            return event


@TRANSPORTS
@OPCODES
@pytest.mark.parametrize("end", ["cancel", "deadline"])
async def test_t1_owner_hears_of_ends_that_are_no_success(transport: str, opcode: str, end: str) -> None:
    async with linked(transport) as pair:
        cache = await small(pair)
        endless = await Endless(pair.owner, pair.user, opcode).ready()
        stream = aiter(pair.owner.events())
        await start(pair, opcode, cache, range(4), range(4))
        transfer = endless.start(notify=b"never", timeout=0.05 if end == "deadline" else None)
        if end == "cancel":
            await until(lambda: transfer.progress.bytes_done)
            transfer.cancel()
        with pytest.raises(asyncio.CancelledError if end == "cancel" else adt.TransferTimeout):
            await transfer
        event = await ended(stream)
        assert (event.cluster_id, event.cache_id, event.kind) == (USER, endless.owned.id, opcode)
        assert event.status == (adt.Status.TIMEOUT if end == "deadline" else event.status) != adt.Status.SUCCESS
        assert event.bytes_done == transfer.progress.bytes_done < transfer.progress.bytes_total
        # The success before it, and its notification, were not told.
        await start(pair, opcode, cache, [0], [0], notify=b"!")
        assert await read(pair, 1) == [b"!"]
        counts = pair.user.stats()["total"]
        assert (counts["ok"], counts["cancelled" if end == "cancel" else "timed_out"]) == (2, 1)


@OPCODES
async def test_owner_hears_of_the_refusal_of_its_own_engine(opcode: str) -> None:
    """The cache goes while a transfer is on its way: both sides hear how it ended."""
    async with linked("tcp") as pair:
        cache = await large(pair)
        owned = next(iter(pair.owner.cache_manager.caches.values()))
        stream = aiter(pair.owner.events())
        transfer = start(pair, opcode, cache, range(64), range(64), timeout=None)
        closing = pair.owner.cache_manager.unregister_cache(owned)
        outcome = (await asyncio.gather(transfer, return_exceptions=True))[0]
        await asyncio.wait_for(closing, PATIENCE)
        if outcome is not None:
            assert isinstance(outcome, adt.DataDistError)
            event = await ended(stream)
            assert (event.cluster_id, event.cache_id, event.kind) == (USER, owned.id, opcode)
