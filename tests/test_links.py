"""Links in one process: linking, crossing, epochs, relinking, the live table, notifications, events, fences."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import subprocess
import sys
import warnings
from collections.abc import AsyncIterator
from typing import Any

import anyio
import numpy as np
import pytest

from aiodatadist import _core
from aiodatadist.config import Config
from aiodatadist.control import events, linking, links, wire
from aiodatadist.control.events import EventsLagged
from aiodatadist.datadist import DataDist
from aiodatadist.errors import (
    ArgumentError,
    ArgumentTypeError,
    ClosedError,
    DataDistError,
    LinkError,
    LinkRefusedError,
    LinkTimeout,
    NotLinkedError,
    PeerLostError,
    Status,
)
from aiodatadist.keys import BlocksCacheKey, CacheKeyByIdAndIndex
from aiodatadist.types import CacheAnnounced, CacheGone, ClusterInfo, LinkState, LinkStateChanged, Notification, Role

from .waiting import PATIENCE, descriptors, reserved_address, until

pytestmark = pytest.mark.loop

LISTEN = "127.0.0.1:0"
TRANSPORTS = [("shm", "tcp"), ("tcp",)]


def array(value: int = 0) -> list[np.ndarray[Any, Any]]:
    return [np.full((8, 64), value, np.uint8) for _ in range(2)]


@pytest.fixture(params=TRANSPORTS, ids=lambda names: names[0])
def config(request: pytest.FixtureRequest) -> Config:
    return Config(transports=request.param)


@pytest.fixture
async def two(config: Config) -> AsyncIterator[list[DataDist]]:
    """Two open nodes, 1 and 2; both listen, and neither is linked."""
    async with (
        DataDist(1, Role.PROMPT, listen=LISTEN, config=config) as a,
        DataDist(2, Role.DECODER, listen=LISTEN, config=config) as b,
    ):
        both = [a, b]
        yield both
    both.clear()  # pytest keeps what fixtures gave, and nothing native may be left


def info(dd: DataDist) -> ClusterInfo:
    return ClusterInfo(dd.cluster_id, dd.listen_address)


# Linking. ---------------------------------------------------------------------------------------------------


async def test_a_link_says_what_it_is(two: list[DataDist], config: Config) -> None:
    a, b = two
    transfer = b.link(info(a))
    assert isinstance(transfer, asyncio.Future)
    link = await transfer
    assert link.cluster_id == 1
    assert link.state is LinkState.READY
    assert link.epoch == 1
    assert link.role is Role.PROMPT
    assert link.path.transport == config.transports[0]
    assert link.peer_listens_at == (str(a.listen_address),)
    assert b.links == {1: link}
    await until(lambda: 2 in a.links)
    assert a.links[2].role is Role.DECODER
    assert "cluster 1" in repr(link)


async def test_linking_again_returns_the_link(two: list[DataDist]) -> None:
    a, b = two
    link = await b.link(info(a))
    assert b.link(info(a)).result() is link
    assert await b.link(ClusterInfo(1)) is link
    await until(lambda: 2 in a.links)
    assert await a.link(ClusterInfo(2)) is a.links[2]


async def test_p5_a_hundred_callers_share_one_handshake(two: list[DataDist], monkeypatch: pytest.MonkeyPatch) -> None:
    """faults.md P5."""
    a, b = two
    connected = 0
    connect = b._center.links._handshaker.connect

    async def counted(*args: Any) -> bool:
        nonlocal connected
        connected += 1
        return await connect(*args)

    monkeypatch.setattr(b._center.links._handshaker, "connect", counted)
    found = await asyncio.gather(*(b.link(info(a)) for _ in range(100)))
    assert len(set(map(id, found))) == 1
    assert connected == 1
    assert b._center.operations.rows() == []


async def test_cancelling_one_caller_leaves_the_others(two: list[DataDist]) -> None:
    a, b = two
    first, second, third = (b.link(info(a)) for _ in range(3))
    await asyncio.sleep(0)
    assert first.cancel()
    third.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert (await second).state is LinkState.READY
    assert first.cancelled()
    assert not first.cancel()


@pytest.mark.parametrize("turns", range(0, 40, 3))
async def test_cancelling_the_only_caller_at_any_moment_leaves_nothing(two: list[DataDist], turns: int) -> None:
    a, b = two
    transfer = b.link(info(a))
    for _ in range(turns):
        await asyncio.sleep(0)
    cancelled = transfer.cancel()
    try:
        link = await transfer
    except asyncio.CancelledError:
        assert cancelled
        # Either there is nothing, or the link was ready in the very turn of the cancel.
        await until(lambda: b.links or not (len(b._center.peers) or len(a._center.peers)))
        await until(lambda: set(a.links) == ({2} if b.links else set()))
        assert (await b.link(info(a))).state is LinkState.READY
        await until(lambda: 2 in a.links)
        await a.fence(2)
    else:
        assert link.state is LinkState.READY


async def test_callers_that_give_up_one_by_one(two: list[DataDist]) -> None:
    a, b = two
    for round_ in range(20):
        callers = [b.link(info(a)) for _ in range(3)]
        for caller in callers:
            await asyncio.sleep(0)
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
        if round_ % 5 == 0:
            assert (await b.link(info(a))).state is LinkState.READY
            await b.unlink(info(a))


async def test_timeouts_cancels_and_scopes_around_a_link(two: list[DataDist]) -> None:
    a, b = two
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await b.link(info(a))
    with anyio.move_on_after(0) as scope:
        await b.link(info(a))
    assert scope.cancelled_caught
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(b.link(info(a)).wait()) for _ in range(3)]
    assert {task.result().state for task in tasks} == {LinkState.READY}


async def test_both_link_each_other_at_once(two: list[DataDist]) -> None:
    """However the handshakes cross, both sides end with one link, the same one."""
    a, b = two
    for round_ in range(60):
        mine = a.link(info(b))
        for _ in range(round_ % 20):
            await asyncio.sleep(0)
        theirs = b.link(info(a))
        one, other = await asyncio.gather(mine, theirs)
        assert one.state is other.state is LinkState.READY
        await until(lambda one=one, other=other: a.links == {2: one} and b.links == {1: other})  # type: ignore[misc]
        assert await b._center.links.ready[1]._answers()
        await (a if round_ % 2 else b).unlink(info(b if round_ % 2 else a))
        await until(lambda: not a.links and not b.links)
    await until(lambda: not len(a._center.peers) and not len(b._center.peers))


async def test_crossed_but_only_one_side_is_reachable(two: list[DataDist]) -> None:
    a, b = two
    wrong = ClusterInfo(2, "127.0.0.1:1")
    mine, theirs = a.link(wrong), b.link(info(a))
    results = await asyncio.gather(mine, theirs, return_exceptions=True)
    assert not isinstance(results[1], BaseException)
    assert results[1].state is LinkState.READY


async def test_many_nodes_link_each_other_all_at_once() -> None:
    config = Config(transports=("tcp",))
    async with contextlib.AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(DataDist(number, listen=LISTEN, config=config)) for number in range(6)]
        await asyncio.gather(*(one.link(info(other)) for one in nodes for other in nodes if one is not other))
        for one in nodes:
            everybody = {other.cluster_id for other in nodes if other is not one}
            await until(lambda one=one, everybody=everybody: set(one.links) == everybody)  # type: ignore[misc]
            assert all(link.state is LinkState.READY for link in one.links.values())


@pytest.mark.seeds(25)
async def test_t5_however_linking_and_unlinking_interleave_it_ends_well(seed: int) -> None:
    """faults.md T5: no order of links, unlinks, cancels, deadlines, breaks and crashes leaves anybody waiting."""
    rng = random.Random(seed)
    config = Config(transports=rng.choice(TRANSPORTS), link_timeout=PATIENCE)
    nodes: list[DataDist] = []
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("error")
        ports = [stack.enter_context(reserved_address()) for _ in range(3)]
        nodes += [await DataDist(number, listen=ports[number], config=config).open() for number in range(3)]
        addresses = [node.listen_address for node in nodes]
        running: list[asyncio.Future[Any]] = []
        for _ in range(60):
            me, other = rng.sample(range(3), 2)
            node, peer = nodes[me], ClusterInfo(other, addresses[other])
            match rng.choice(["link"] * 5 + ["unlink", "unlink", "force", "short", "break", "cancel", "restart"]):
                case "link":
                    running.append(node.link(peer))
                case "unlink":
                    running.append(node.unlink(peer))
                case "force":
                    running.append(node.unlink(peer, force=True))
                case "short":
                    running.append(node.link(peer, timeout=rng.choice([1e-6, 0.001, 0.003])))
                case "break":
                    if other in node.links:
                        node.links[other]._channel.stream.close()
                case "cancel":
                    if running:
                        rng.choice(running).cancel()
                case "restart" if rng.random() < 0.5:
                    node.abort()
                    await node.wait_closed()
                    nodes[me] = await DataDist(me, listen=addresses[me], config=config).open()
            for _ in range(rng.choice([0, 0, 1, 3, 10, 30])):
                await asyncio.sleep(0)
        results = await asyncio.gather(*running, return_exceptions=True)
        allowed = (type(None), links.Link, LinkError, ClosedError, asyncio.CancelledError)
        assert all(isinstance(result, allowed) for result in results), results
        assert [str(result) for result in results if f"missed its deadline of {PATIENCE:g}" in str(result)] == []
        assert all(not node.dump() for node in nodes)
        for one in nodes:
            for other_node in nodes:
                if one is not other_node:
                    # The other side may be learning that it has lost a link; then this one ends, and is made again.
                    await until_linked(one, other_node)
        for node in nodes:
            await node.aclose(PATIENCE)
            assert len(node._center.peers) == 0


async def until_linked(one: DataDist, other: DataDist) -> None:
    with anyio.fail_after(PATIENCE):
        while True:
            link = await one.link(info(other))
            await one.fence(other.cluster_id)
            if link.state is LinkState.READY:
                return


async def test_linking_oneself(two: list[DataDist]) -> None:
    a, _ = two
    link = await a.link(info(a))
    assert (link.state, link.path.transport) == (LinkState.READY, "self")
    assert await a.link(ClusterInfo(1)) is link
    await a.fence(1)
    assert a.links == {}
    assert link.table == link.slots == {}
    with pytest.raises(ArgumentError):
        _ = link._post_notification(b"x")
    await a.unlink(info(a))
    assert link.state is LinkState.CLOSED
    assert (await a.link(ClusterInfo(1))) is not link


async def test_two_with_the_same_id_cannot_link(two: list[DataDist]) -> None:
    a, _ = two
    async with DataDist(1) as twin:
        with pytest.raises(LinkRefusedError, match="cluster id 1") as caught:
            await twin.link(info(a))
        assert caught.value.status == Status.ALREADY_LINK


async def test_a_second_live_node_of_the_same_id_is_refused(two: list[DataDist]) -> None:
    a, b = two
    link = await b.link(info(a))
    await until(lambda: 2 in a.links)
    async with DataDist(2) as twin:
        with pytest.raises(LinkRefusedError, match="linked and alive") as caught:
            await twin.link(info(a))
        assert caught.value.status == Status.ALREADY_LINK
        assert caught.value.hint
    assert link.state is LinkState.READY
    await a.fence(2)


async def test_a_new_incarnation_takes_the_place_of_one_that_does_not_answer(
    two: list[DataDist], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = two
    monkeypatch.setattr(linking, "_PING_SECONDS", 0.05)
    await b.link(info(a))
    await until(lambda: 2 in a.links)
    old = a.links[2]

    async def never() -> bool:
        await asyncio.sleep(60)
        return True

    monkeypatch.setattr(old, "_answers", never)
    async with DataDist(2) as newcomer:
        link = await newcomer.link(info(a))
        assert link.state is LinkState.READY
        await until(lambda: 2 in a.links)
        assert a.links[2] is not old
        assert a.links[2].epoch > old.epoch
        assert old.state is LinkState.BROKEN
        assert isinstance(old.error, PeerLostError)
        await until(lambda: not b.links)


async def test_no_address() -> None:
    async with DataDist(2) as b:
        with pytest.raises(ArgumentError, match="no address of cluster 1"):
            _ = b.link(ClusterInfo(1))
        with pytest.raises(ArgumentTypeError):
            _ = b.link(1)  # type: ignore[arg-type]
        for bad in (0, -1, float("nan"), 1e10):
            with pytest.raises(ArgumentError):
                _ = b.link(ClusterInfo(1, "127.0.0.1:1"), timeout=bad)
        for wrong in ("1", True, object()):
            with pytest.raises(ArgumentTypeError):
                _ = b.link(ClusterInfo(1, "127.0.0.1:1"), timeout=wrong)  # type: ignore[arg-type]
        assert b._center.links._slots == {}


# Unlinking and relinking. -----------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["the one that linked", "the other"])
@pytest.mark.parametrize("force", [False, True])
async def test_either_side_unlinks(two: list[DataDist], side: str, force: bool) -> None:
    a, b = two
    link = await b.link(info(a))
    await until(lambda: 2 in a.links)
    other = a.links[2]
    if side == "the other":
        await a.unlink(ClusterInfo(2), force=force)
        assert other.state is LinkState.CLOSED
    else:
        await b.unlink(ClusterInfo(1), force=force)
        assert link.state is LinkState.CLOSED
    await until(lambda: not a.links and not b.links)
    if not force:
        assert {link.state, other.state} == {LinkState.CLOSED}
    assert link.table == other.table == {}
    assert isinstance(link.error, DataDistError)
    await until(lambda: not len(a._center.peers) and not len(b._center.peers))


async def test_both_unlink_at_once(two: list[DataDist]) -> None:
    a, b = two
    for _ in range(20):
        await b.link(info(a))
        await until(lambda: 2 in a.links)
        await asyncio.gather(a.unlink(info(b)), b.unlink(info(a)), b.unlink(info(a)))
        assert not a.links
        assert not b.links
    assert not len(b._center.peers)


async def test_unlinking_what_is_not_linked_is_no_error(two: list[DataDist]) -> None:
    a, _ = two
    await a.unlink(ClusterInfo(77))
    await a.unlink(ClusterInfo(77), force=True)


async def test_unlinking_ends_an_attempt(two: list[DataDist]) -> None:
    a, b = two
    transfer = b.link(info(a))
    await asyncio.sleep(0)
    await b.unlink(info(a))
    with pytest.raises(LinkError, match="unlinked"):
        await transfer
    assert (await b.link(info(a))).state is LinkState.READY


@pytest.mark.parametrize("turns", range(1, 16, 2))
async def test_linking_right_after_an_attempt_was_ended_begins_anew(two: list[DataDist], turns: int) -> None:
    """An attempt that was given up takes some turns to its end. Whoever comes meanwhile must not share its fate."""
    a, b = two
    ended = b.link(info(a))
    for _ in range(turns):
        await asyncio.sleep(0)
    _ = b.unlink(info(a), force=True)
    again = b.link(info(a))
    await asyncio.gather(ended, return_exceptions=True)
    assert (await again).state is LinkState.READY


async def test_whoever_links_while_it_closes_is_told_so(two: list[DataDist]) -> None:
    """A link made after all were unlinked would be one that nobody ends, and closing would wait for it."""
    a, b = two
    late = b.link(info(a), auto_relink=True)
    b._center.links.stop_linking()  # as closing does first; then it waits for transfers, and unlinks
    with pytest.raises(ClosedError, match="closing"):
        await late


async def test_relinking_makes_new_epochs_and_no_leaks(two: list[DataDist]) -> None:
    a, b = two
    for _ in range(3):
        await b.link(info(a))
        await b.unlink(info(a))
    fds = descriptors()
    old: list[links.Link] = []
    for number in range(30):
        link = await b.link(info(a))
        assert link.epoch == number + 4
        assert link not in old
        old.append(link)
        await (b.unlink(info(a)) if number % 2 else a.unlink(info(b)))
        await until(lambda: not a.links and not b.links)
    await until(lambda: not len(a._center.peers) and not len(b._center.peers))
    await until(lambda: len(asyncio.all_tasks()) <= 3)
    # A wire may linger until the peer's goodbye was read.
    await until(lambda: descriptors() <= fds)


async def test_linking_while_the_old_link_is_being_unlinked(two: list[DataDist]) -> None:
    a, b = two
    for round_ in range(20):
        old = await b.link(info(a))
        leaving = b.unlink(info(a))
        assert 1 not in b.links  # at the call
        if round_ % 2:
            await asyncio.sleep(0)
        link = await b.link(info(a))
        await leaving
        assert link is not old
        assert link.state is LinkState.READY
        assert b.links == {1: link}
        await until(lambda: 2 in a.links)
        await a.fence(2)


async def test_t7_a_link_whose_control_connection_breaks_is_broken(two: list[DataDist]) -> None:
    a, b = two
    stream = b.events()
    link = await b.link(info(a))
    await until(lambda: 2 in a.links)
    other = a.links[2]
    other._channel.stream.close()
    await until(lambda: not a.links and not b.links)
    assert other.state is LinkState.BROKEN
    assert link.state in (LinkState.BROKEN, LinkState.CLOSED)
    assert isinstance(link.error, PeerLostError)
    changes = []
    async for event in stream:
        assert isinstance(event, LinkStateChanged)
        changes.append((event.old, event.new))
        if event.new is link.state:
            assert event.reason
            break
    assert [new for _, new in changes][:2] == [LinkState.LINKING, LinkState.READY]
    assert (await b.link(info(a))).epoch == 2


@pytest.mark.parametrize(
    "message",
    [
        wire.Ready(),
        wire.TableEnd(version=9),
        wire.UnlinkAck(),
        wire.Attached(),
        wire.CacheWithdraw(version=99, cache_id=99),
        wire.Notify(payload=bytes(100_000)),
        b"\xff\xff\xff\xff",
        b"\x01\0\0\0\xc1",
    ],
    ids=lambda message: type(message).__name__,
)
async def test_a_peer_that_breaks_the_protocol_loses_its_link(
    two: list[DataDist], message: Any, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = two
    link = await b.link(info(a))
    await until(lambda: 2 in a.links)
    other = a.links[2]
    if isinstance(message, bytes):
        link._channel.stream.send(message)
    else:
        link._channel.send(message)
    await until(lambda: not a.links and not b.links)
    assert other.state is LinkState.BROKEN
    assert other.error is not None
    assert other.error.peer == 2
    assert type(other.error).__name__ == "ProtocolError"
    assert (await b.link(info(a))).state is LinkState.READY


async def test_a_fault_of_ours_ends_the_link_with_an_internal_error(
    two: list[DataDist], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = two
    link = await b.link(info(a))
    monkeypatch.setattr(link, "_handle", lambda message: 1 / 0)
    await until(lambda: 2 in a.links)
    a.links[2]._channel.send(wire.NotifyCredit(count=1))
    await until(lambda: not b.links)
    assert type(link.error).__name__ == "InternalError"
    assert link.error is not None
    assert isinstance(link.error.__cause__, ZeroDivisionError)


# The live table. --------------------------------------------------------------------------------------------


async def test_caches_show_before_and_after_linking_and_go(two: list[DataDist]) -> None:
    a, b = two
    first = a.cache_manager.register_blocks_cache(array(), key=BlocksCacheKey(1, 5))
    await first.ready()
    hidden = a.cache_manager.register_blocks_cache(array(), remote=None)
    await hidden.ready()
    stream = b.events()
    link = await b.link(info(a))
    assert set(link.table) == {BlocksCacheKey(1, 5), CacheKeyByIdAndIndex(1, first.id)}
    entry = link.table[BlocksCacheKey(1, 5)]
    assert entry.geometry == first.geometry
    assert (entry.access, entry.link, entry.cache_id) == ("rw", link, first.id)
    second = a.cache_manager.register_blocks_cache(array(), remote="r")
    await second.ready()
    await until(lambda: CacheKeyByIdAndIndex(1, second.id) in link.table)
    assert link.table[CacheKeyByIdAndIndex(1, second.id)].access == "r"
    await a.cache_manager.unregister_cache(first)
    await until(lambda: BlocksCacheKey(1, 5) not in link.table)
    assert set(link.table) == {CacheKeyByIdAndIndex(1, second.id)}
    again = a.cache_manager.register_blocks_cache(array(), key=BlocksCacheKey(1, 5))
    await until(lambda: BlocksCacheKey(1, 5) in link.table)
    assert link.table[BlocksCacheKey(1, 5)].cache_id == again.id
    await b.unlink(info(a))
    said: list[tuple[str, int]] = []
    while True:
        event = await anext(stream)
        if isinstance(event, (CacheAnnounced, CacheGone)):
            said.append((type(event).__name__, event.cache_id))
        if said.count(("CacheGone", second.id)) and said.count(("CacheGone", again.id)):
            break
    assert said[:4] == [
        ("CacheAnnounced", first.id),
        ("CacheAnnounced", second.id),
        ("CacheGone", first.id),
        ("CacheAnnounced", again.id),
    ]


async def test_registering_and_unregistering_while_linking(two: list[DataDist]) -> None:
    a, b = two
    kept = []

    async def churn() -> None:
        for number in range(40):
            cache = a.cache_manager.register_blocks_cache(array(number), key=BlocksCacheKey(1, number))
            await cache.ready()
            if number % 2:
                kept.append(cache)
            else:
                await a.cache_manager.unregister_cache(cache)

    churning = asyncio.ensure_future(churn())
    for _ in range(5):
        link = await b.link(info(a))
        await asyncio.sleep(0.002)
        await b.unlink(info(a))
    link = await b.link(info(a))
    await churning
    expected = {CacheKeyByIdAndIndex(1, cache.id) for cache in kept} | {cache.key for cache in kept}
    await until(lambda: set(link.table) == expected)
    assert link._remote.version == a._table.version


async def test_library_memory_travels_by_descriptor(two: list[DataDist]) -> None:
    from aiodatadist.types import CacheDesc

    a, b = two
    cache = a.cache_manager.allocate_blocks_cache(CacheDesc(2, (8, 64), "uint8"), key=BlocksCacheKey(1))
    await cache.ready()
    link = await b.link(info(a))
    entry = link.table[BlocksCacheKey(1)]
    assert entry.native is not None
    assert entry.native.path == ("shm-mapped" if link.path.transport == "shm" else "tcp")
    cache.tensors[0][3] = 7
    mine = b.cache_manager.register_blocks_cache(array(), remote=None)
    await b.cache_manager.pull_blocks(BlocksCacheKey(1), mine, [3], [0])
    assert (mine.tensors[0][0] == 7).all()


async def test_a_thousand_caches(two: list[DataDist]) -> None:
    a, b = two
    tensors = array()
    caches = [a.cache_manager.register_blocks_cache(tensors) for _ in range(1000)]
    await asyncio.gather(*(cache.ready() for cache in caches))
    link = await b.link(info(a))
    assert len(link.table) == 1000
    for cache in caches:
        a.cache_manager.unregister_cache(cache).add_done_callback(lambda done: None)
    await until(lambda: not link.table)


# Notifications. ---------------------------------------------------------------------------------------------


async def test_notifications_arrive_in_order(two: list[DataDist]) -> None:
    a, b = two
    link = await b.link(info(a))
    for number in range(50):
        await link._post_notification(b"%d" % number)
    inbox = a.notifications()
    got = [await anext(inbox) for _ in range(50)]
    assert got == [Notification(2, b"%d" % number) for number in range(50)]
    await until(lambda: 2 in a.links)
    await a.links[2]._post_notification(b"back")
    assert await anext(b.notifications()) == Notification(1, b"back")


async def test_without_credits_senders_wait_and_nothing_is_lost() -> None:
    config = Config(notify_credits=4, transports=("tcp",))
    async with DataDist(1, listen=LISTEN, config=config) as a, DataDist(2) as b:
        link = await b.link(info(a))
        posts = [link._post_notification(b"%d" % number) for number in range(20)]
        await until(lambda: a.stats()["unread"] == sum(post.done() for post in posts) == 4)
        await asyncio.sleep(0.01)
        assert a.stats()["unread"] == sum(post.done() for post in posts) == 4
        posts[10].cancel()
        inbox = a.notifications()
        got = [(await anext(inbox)).payload for _ in range(19)]
        assert got == [b"%d" % number for number in range(20) if number != 10]
        await asyncio.gather(*(post for post in posts if not post.cancelled()))


@pytest.mark.parametrize("credits", [1, 2, 3])
async def test_a_peer_gains_no_credits_by_linking_again(credits: int) -> None:
    config = Config(notify_credits=credits, transports=("tcp",))
    async with DataDist(1, listen=LISTEN, config=config) as a, DataDist(2) as b:
        for _ in range(5):
            link = await b.link(info(a))
            for _ in range(credits + 2):
                _ = link._post_notification(b"x")
            await asyncio.sleep(0.02)
            await b.unlink(info(a))
        assert a.stats()["unread"] == credits
        link = await b.link(info(a))
        posts = [link._post_notification(b"late") for _ in range(3 * credits)]
        inbox = a.notifications()
        for _ in range(4 * credits):
            await asyncio.wait_for(anext(inbox), PATIENCE)
        await asyncio.gather(*posts)


async def test_a_notification_without_a_credit_breaks_the_protocol() -> None:
    config = Config(notify_credits=2, transports=("tcp",))
    async with DataDist(1, listen=LISTEN, config=config) as a, DataDist(2) as b:
        link = await b.link(info(a))
        link._credits = 100
        for _ in range(3):
            _ = link._post_notification(b"x")
        await until(lambda: not b.links)
        assert link.error is not None
        assert a.stats()["unread"] == 2


async def test_readers_compete_and_a_cancelled_one_loses_nothing(two: list[DataDist]) -> None:
    a, b = two
    link = await b.link(info(a))
    got: list[bytes] = []

    async def read() -> None:
        async for notification in a.notifications():
            got.append(notification.payload)
            await asyncio.sleep(0)

    readers = [asyncio.ensure_future(read()) for _ in range(4)]
    await asyncio.sleep(0)
    for number in range(200):
        _ = link._post_notification(b"%d" % number)
        if number % 20 == 10:
            await asyncio.sleep(0.002)
            readers.pop(0).cancel()
            readers.append(asyncio.ensure_future(read()))
    await until(lambda: len(got) == 200)
    assert sorted(got, key=int) == [b"%d" % number for number in range(200)]
    for reader in readers:
        reader.cancel()


async def test_waiting_notifications_fail_with_the_link() -> None:
    config = Config(notify_credits=1, transports=("tcp",))
    async with DataDist(1, listen=LISTEN, config=config) as a, DataDist(2) as b:
        link = await b.link(info(a))
        posts = [link._post_notification(b"x") for _ in range(3)]
        await b.unlink(info(a))
        results = await asyncio.gather(*posts, return_exceptions=True)
        assert results[0] is None
        assert all(isinstance(result, LinkError) for result in results[1:])
        assert results[1] is not results[2]
        with pytest.raises(LinkError):
            await link._post_notification(b"too late")


async def test_too_long_a_notification(two: list[DataDist]) -> None:
    a, b = two
    link = await b.link(info(a))
    assert link.notify_max_bytes == Config().notify_max_bytes
    await link._post_notification(bytes(link.notify_max_bytes))
    with pytest.raises(ArgumentError, match="the peer accepts"):
        await link._post_notification(bytes(link.notify_max_bytes + 1))
    assert link.state is LinkState.READY


# Events. ----------------------------------------------------------------------------------------------------


async def test_every_reader_gets_every_event_from_its_start_on(two: list[DataDist]) -> None:
    a, b = two
    early, also = b.events(), b.events()
    await b.link(info(a))
    late = b.events()
    await b.unlink(info(a))
    for stream in (early, also):
        states = [(await anext(stream)).new for _ in range(3)]  # type: ignore[union-attr]
        assert states == [LinkState.LINKING, LinkState.READY, LinkState.CLOSED]
    event = await anext(late)
    assert isinstance(event, LinkStateChanged)
    assert event.new is LinkState.CLOSED


async def test_a_slow_reader_is_told_what_it_missed(two: list[DataDist], monkeypatch: pytest.MonkeyPatch) -> None:
    _, b = two
    monkeypatch.setattr(events, "EVENTS_KEPT", 3)
    stream = b.events()
    sent = [CacheGone(1, number) for number in range(8)]
    for event in sent[:6]:
        b._center.events.publish(event)
    assert [await anext(stream) for _ in range(4)] == [*sent[:3], EventsLagged(3)]
    b._center.events.publish(sent[6])
    assert await anext(stream) == sent[6]


async def test_event_streams_end_and_let_go(two: list[DataDist]) -> None:
    _, b = two
    stream, other = b.events(), b.events()
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    await stream.aclose()
    with pytest.raises(StopAsyncIteration):
        await waiting
    del other
    gc.collect()
    assert len(b._center.events._streams) == 0
    last = b.events()
    await b.aclose()
    assert [event async for event in last] == []


# Fences. ----------------------------------------------------------------------------------------------------


async def test_fences_on_both_sides(two: list[DataDist]) -> None:
    a, b = two
    with pytest.raises(NotLinkedError, match="never linked"):
        _ = a.fence(2)
    await b.link(info(a))
    await until(lambda: 2 in a.links)
    await asyncio.gather(*(a.fence(2) for _ in range(50)), *(b.fence(1) for _ in range(50)))
    await b.unlink(info(a))
    await a.fence(2)
    await b.fence(1)


async def test_a_fence_waits_for_a_link_that_is_gone_but_not_quiet(two: list[DataDist]) -> None:
    a, b = two
    await b.link(info(a))
    await until(lambda: 2 in a.links)
    (peer,) = a._center.peers
    hold_back = peer._quiet_event
    a._center.peers._peers[peer.id] = peer
    # As if a stopped process held its mapping: the link is gone, and the peer is not quiet.
    peer.quiet = False
    peer.lost = True
    fence = a.fence(2, timeout=0.05)
    with pytest.raises(LinkTimeout, match="fence missed its deadline"):
        await fence
    fence = a.fence(2)
    await asyncio.sleep(0.01)
    assert not fence.done()
    assert [row.kind for row in a.dump()] == ["fence"]
    hold_back()
    await fence


async def test_transfers_end_typed_when_the_link_goes(two: list[DataDist]) -> None:
    a, b = two
    theirs = a.cache_manager.register_blocks_cache(array(3), key=BlocksCacheKey(1))
    mine = b.cache_manager.register_blocks_cache(array(), remote=None)
    await asyncio.gather(theirs.ready(), mine.ready())
    await b.link(info(a))
    await b.cache_manager.pull_blocks(BlocksCacheKey(1), mine, [0], [1])
    await a.unlink(info(b))
    await until(lambda: not b.links)
    with pytest.raises(NotLinkedError):
        _ = b.cache_manager.pull_blocks(BlocksCacheKey(1), mine, [0], [1])
    assert b.stats()["total"]["ok"] == 1


def test_the_native_side_says_when_objects_are_left() -> None:
    if _core.debug:
        assert not any(_core.live_objects().values())


@pytest.mark.parametrize("installed", [False, True])
def test_links_where_sniffio_is_and_is_not_installed(installed: bool) -> None:
    """With it, anyio sees no loop in a callback; many packages bring it, and the extra `test` does."""
    code = f"""
import asyncio, sys
if not {installed}:
    sys.modules["sniffio"] = None
import aiodatadist as adt

async def main():
    async with adt.DataDist(1, listen="127.0.0.1:0") as one, adt.DataDist(2) as two:
        info, linking = adt.ClusterInfo(1, one.listen_address), []
        asyncio.get_running_loop().call_soon(lambda: linking.append(two.link(info)))
        await asyncio.sleep(0)
        assert (await linking[0]).state is adt.LinkState.READY

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
