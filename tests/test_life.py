"""Peers that block, fork, die and come back, as real processes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import time
from typing import Any

import numpy as np
import pytest

import aiodatadist as adt

from .conftest import Scale
from .peers import PeerProcess, spawn
from .waiting import PATIENCE, descriptors, native_threads, open_descriptors, reserved_address, until

OWNER, USER = 1, 2
KEY = adt.BlocksCacheKey(OWNER)
BLOCKS, BLOCK_BYTES = 64, 1 << 20
TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "tcp"])


def node(transport: str, **options: Any) -> adt.DataDist:
    return adt.DataDist(USER, config=adt.Config(transports=(transport,), **options))


async def shown(link: adt.Link) -> None:
    while adt.BlocksCacheKey(link.cluster_id) not in link.table:
        assert link.error is None
        await asyncio.sleep(0.001)


async def take(dd: adt.DataDist, tensors: int = 1, blocks: int = BLOCKS) -> adt.Cache:
    cache = dd.cache_manager.register_blocks_cache([np.zeros((blocks, BLOCK_BYTES), np.uint8) for _ in range(tensors)])
    await cache.ready()
    return cache


def resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


# --- a peer whose Python does nothing ------------------------------------------------------------------

WAYS = ("sleeps", "computes", "holds the GIL")
LIMIT = 2.0  # of silence


@TRANSPORTS
async def test_peers_that_block_their_loops_stay_linked(transport: str) -> None:
    """They say nothing for much longer than the limit: who is silent is lost after 1.25 times that, at most."""
    async with contextlib.AsyncExitStack() as stack:
        dd = await stack.enter_async_context(node(transport, heartbeat_limit=LIMIT))
        events = dd.events()
        peers, links = [], []
        cache = await take(dd)
        for cluster_id in range(11, 11 + len(WAYS)):
            peer = await stack.enter_async_context(spawn(cluster_id, transports=(transport,), heartbeat_limit=LIMIT))
            await peer.cache("kv", tensors=1, shape=(BLOCKS, BLOCK_BYTES), value=cluster_id)
            links.append(await dd.link(peer.info))
            await shown(links[-1])
            peers.append(peer)
        async with contextlib.AsyncExitStack() as blocking:
            for peer, way in zip(peers, WAYS, strict=True):
                await blocking.enter_async_context(peer.blocked(way))
            began = time.monotonic()
            while time.monotonic() - began < 1.9 * LIMIT:
                for peer in peers:
                    key = adt.BlocksCacheKey(peer.cluster_id)
                    cache.tensors[0][:] = 0
                    await dd.cache_manager.pull_blocks(key, cache, range(BLOCKS), range(BLOCKS), timeout=PATIENCE)
                    assert (cache.tensors[0] == peer.cluster_id).all()
                    await dd.cache_manager.push_blocks(key, cache, [0, 1], [0, 1], timeout=PATIENCE)
                await asyncio.sleep(0.05)
        for peer, link in zip(peers, links, strict=True):
            # And the blocked side has not lost this one, either.
            await asyncio.sleep(0.1)
            assert dd.links[peer.cluster_id] is link
            assert link.error is None
            assert await peer.run("return [(link.epoch, str(link.state)) for link in dd.links.values()]") == [
                [1, "ready"]
            ]
        await events.aclose()
        ends = [event async for event in events if isinstance(event, adt.LinkStateChanged)]
        assert [event.new for event in ends if event.new not in (adt.LinkState.LINKING, adt.LinkState.READY)] == []


# --- a peer that dies ----------------------------------------------------------------------------------


async def all_pending(dd: adt.DataDist, peer: PeerProcess, cache: adt.Cache) -> dict[str, asyncio.Future[Any]]:
    """Start one of everything that can be pending on a peer, which is stopped for it."""
    await dd.cache_manager.pull_blocks(KEY, cache, [0], [0], notify=b"takes the only credit")
    waiting = dd.cache_manager.pull_blocks(KEY, cache, [0], [0], notify=b"has none", timeout=None)
    peer.stop()
    pending: dict[str, asyncio.Future[Any]] = {"a notification": waiting, "a fence": dd.fence(OWNER, timeout=None)}
    if dd.links[OWNER].path.transport == "tcp":
        for number in range(3):
            pending[f"pull {number}"] = dd.cache_manager.pull_blocks(
                KEY, cache, range(BLOCKS), range(BLOCKS), timeout=None
            )
        pending["a small pull"] = dd.cache_manager.pull_blocks(KEY, cache, [1], [1], timeout=None)
        pending["push"] = dd.cache_manager.push_blocks(KEY, cache, range(BLOCKS), range(BLOCKS), timeout=None)
    await asyncio.sleep(0.1)
    assert not any(future.done() for future in pending.values())
    return pending


@pytest.mark.parametrize("child", [None, "os.fork", "subprocess"])
@TRANSPORTS
async def test_t8_killing_a_peer_fails_every_pending_operation(transport: str, child: str | None) -> None:
    """Long before its heartbeats are missed, and a child that lives on does not hide it."""
    async with (
        spawn(OWNER, transports=(transport,), notify_credits=1, heartbeat_limit=600.0) as peer,
        node(transport, heartbeat_limit=600.0) as dd,
    ):
        await peer.cache("kv", tensors=1, shape=(BLOCKS, BLOCK_BYTES))
        link = await dd.link(peer.info)
        await shown(link)
        cache = await take(dd)
        other = 0
        if child == "os.fork":
            other = await peer.fork()
        elif child == "subprocess":
            other = await peer.run(
                "import subprocess\n"
                "kept['child'] = subprocess.Popen(['sleep', '60'], close_fds=False, stdin=subprocess.DEVNULL)\n"
                "return kept['child'].pid"
            )
        pending = await all_pending(dd, peer, cache)
        events = dd.events()
        try:
            peer.kill()
            await asyncio.wait_for(asyncio.gather(*pending.values(), return_exceptions=True), PATIENCE)
            if other:
                os.kill(other, 0)  # it does live
        finally:
            if child == "subprocess":
                os.kill(other, 9)
        for name, future in pending.items():
            error = future.exception()
            # What waits until the peer is quiet ends well: a dead process is.
            if name == "a fence":
                assert error is None or isinstance(error, adt.PeerLostError), name
            else:
                assert isinstance(error, adt.PeerLostError), (name, error)
                assert error.peer == OWNER
        assert link.state is adt.LinkState.BROKEN
        assert isinstance(link.error, adt.PeerLostError)
        assert OWNER not in dd.links
        changed = await asyncio.wait_for(anext(events), PATIENCE)
        assert isinstance(changed, adt.LinkStateChanged)
        assert changed.new is adt.LinkState.BROKEN
        with pytest.raises(adt.NotLinkedError):
            dd.cache_manager.pull_blocks(KEY, cache, [0], [0])
        # The memory is quiet.
        cache.tensors[0][:] = 0x33
        await asyncio.wait_for(dd.cache_manager.unregister_cache(cache), PATIENCE)


async def test_linking_a_peer_that_dies_meanwhile() -> None:
    async with spawn(OWNER) as peer, node("tcp") as dd:
        info = peer.info
        peer.stop()
        linking = [dd.link(info, timeout=None) for _ in range(5)]
        await asyncio.sleep(0.1)
        assert not any(link.done() for link in linking)
        peer.kill()
        results = await asyncio.wait_for(asyncio.gather(*linking, return_exceptions=True), PATIENCE)
        assert all(isinstance(result, adt.LinkError) for result in results)


@pytest.mark.hang_limit(300)
@TRANSPORTS
async def test_restarting_a_peer_again_and_again(transport: str, scale: Scale) -> None:
    """Under the same address and cluster id, and with other content each time; nothing grows here."""
    rounds = scale(50, least=6)
    with reserved_address() as address:
        async with node(transport) as dd:
            await restart_again_and_again(dd, transport, address, rounds)


async def restart_again_and_again(dd: adt.DataDist, transport: str, address: str, rounds: int) -> None:
    width, marks = BLOCK_BYTES // 16, []
    cache = dd.cache_manager.register_blocks_cache([np.zeros((BLOCKS, width), np.uint8)])
    events = dd.events()
    engine = native_threads()
    for number in range(rounds):
        async with spawn(OWNER, listen=address, transports=(transport,)) as peer:
            assert peer.address == address
            kind = ("library", "ordinary")[number % 2]
            await peer.cache("kv", tensors=1, shape=(BLOCKS, width), memory=kind, value=number + 1)
            link = await dd.link(peer.info)
            assert link.epoch == number + 1
            await shown(link)
            await dd.cache_manager.pull_blocks(KEY, cache, range(BLOCKS), range(BLOCKS))
            assert (cache.tensors[0] == number + 1).all()
            # Killed in the middle of work, which ends with the one typed error, or before the death was seen.
            busy = [
                dd.cache_manager.pull_blocks(KEY, cache, range(BLOCKS), range(BLOCKS), timeout=None)
                for _ in range(number % 4)
            ]
            peer.kill()
            for result in await asyncio.gather(*busy, return_exceptions=True):
                assert result is None or isinstance(result, adt.PeerLostError)
            # What says that it is lost; every second time the next one does not even wait for it.
            while number % 2:
                event = await asyncio.wait_for(anext(events), PATIENCE)
                if not isinstance(event, adt.LinkStateChanged):
                    continue
                if (event.new, event.epoch) == (adt.LinkState.BROKEN, link.epoch):
                    assert isinstance(link.error, adt.PeerLostError)
                    break
        if number >= rounds // 3:
            await until(lambda: OWNER not in dd.links, "the peer is not missed")
            await until(lambda: not len(dd._center.peers), "what is left of the peer does not end")
            gc.collect()
            await until(lambda: native_threads() == engine, "threads grow")
            marks.append((descriptors(), resident()))
    await until(lambda: descriptors() <= marks[0][0], "descriptors grow")
    # What an allocator keeps goes up and down.
    half = len(marks) // 2
    assert min(mark[1] for mark in marks[half:]) - max(mark[1] for mark in marks[:half]) < 4 << 20, marks


# --- two with one name --------------------------------------------------------------------------------------


@TRANSPORTS
async def test_second_live_process_with_the_same_id_is_refused(transport: str) -> None:
    async with (
        adt.DataDist(USER, listen="127.0.0.1:0", config=adt.Config(transports=(transport,))) as dd,
        spawn(OWNER, transports=(transport,)) as first,
        spawn(OWNER, transports=(transport,)) as second,
    ):
        await first.cache("kv", tensors=1, shape=(BLOCKS, BLOCK_BYTES), value=1)
        await second.cache("kv", tensors=1, shape=(BLOCKS, BLOCK_BYTES), value=2)
        await first.call("link", cluster_id=USER, address=str(dd.listen_address))
        await until(lambda: OWNER in dd.links, "no link")
        link = dd.links[OWNER]
        await shown(link)
        cache = await take(dd)
        for _ in range(3):
            refused = (await asyncio.gather(
                second.call("link", cluster_id=USER, address=str(dd.listen_address)), return_exceptions=True
            ))[0]  # fmt: skip
            assert getattr(refused, "kind", None) == "LinkRefusedError", refused
            assert "alive" in str(refused)
            await dd.cache_manager.pull_blocks(KEY, cache, range(4), range(4))
            assert (cache.tensors[0][:4] == 1).all()
        assert dd.links[OWNER] is link
        # It may take the place when the first is gone, and needs no force.
        first.kill()
        await first.wait_gone()
        await second.call("link", cluster_id=USER, address=str(dd.listen_address))
        await until(lambda: OWNER in dd.links and dd.links[OWNER] is not link, "no new link")
        assert dd.links[OWNER].epoch > link.epoch
        await shown(dd.links[OWNER])
        await dd.cache_manager.pull_blocks(KEY, cache, range(4), range(4))
        assert (cache.tensors[0][:4] == 2).all()


# --- without privileges ------------------------------------------------------------------------------------


@pytest.mark.unprivileged
async def test_process_vm_between_processes_of_one_user() -> None:
    async with spawn(OWNER, transports=("shm",)) as peer, node("shm") as dd:
        await peer.cache("kv", tensors=2, shape=(BLOCKS, 4096), memory="ordinary", value=5)
        link = await dd.link(peer.info)
        await shown(link)
        assert link.path.memory["ordinary"] == "process_vm", str(link.path)
        cache = dd.cache_manager.register_blocks_cache([np.zeros((BLOCKS, 4096), np.uint8) for _ in range(2)])
        await dd.cache_manager.pull_blocks(KEY, cache, range(BLOCKS), range(BLOCKS))
        assert all((tensor == 5).all() for tensor in cache.tensors)
        for tensor in cache.tensors:
            tensor[:] = 6
        await dd.cache_manager.push_blocks(KEY, cache, range(BLOCKS), range(BLOCKS))
        assert await peer.call("count", name="kv", value=6) == 2 * BLOCKS * 4096


@contextlib.contextmanager
def few_descriptors(more: int) -> Any:
    """Allow this many descriptors beyond those that are open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(open_descriptors())
    # The limit is for numbers: fill the gaps below.
    fillers = []
    while (fd := os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)) < highest:
        fillers.append(fd)
    os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in fillers:
            os.close(fd)


@pytest.mark.unprivileged
async def test_running_out_of_descriptors() -> None:
    """No limit of root's is needed for it, but a limit that holds for everybody is the one that users meet."""
    await running_out_of_descriptors()


async def test_running_out_of_descriptors_as_anybody() -> None:
    await running_out_of_descriptors()


async def running_out_of_descriptors() -> None:
    async with spawn(OWNER) as peer, adt.DataDist(USER) as dd:
        await peer.cache("kv", tensors=1, shape=(BLOCKS, 4096), value=3)
        before = descriptors()
        outcomes: list[adt.DataDistError | None] = []

        async def settled() -> None:
            await until(lambda: not len(dd._center.peers), "what is left of the peer does not end")
            await until(lambda: descriptors() <= before, "descriptors are left")

        for more in range(12):
            with few_descriptors(more):
                try:
                    await dd.link(peer.info, timeout=PATIENCE)
                except adt.DataDistError as error:
                    # Whatever was opened on the way is closed again.
                    outcomes.append(error)
                else:
                    outcomes.append(None)
                    # With few it links, and perhaps without shm.
                    await dd.unlink(adt.ClusterInfo(OWNER))
            await settled()
            with few_descriptors(more):
                for make in (
                    lambda: dd.cache_manager.allocate_blocks_cache(adt.CacheDesc(1, (4, 4096), "uint8")),
                    lambda: dd.cache_manager.register_blocks_cache([np.zeros((4, 4096), np.uint8)]),
                ):
                    try:
                        cache = make()
                    except adt.OutOfMemoryError:
                        assert more == 0
                    else:
                        await dd.cache_manager.unregister_cache(cache)
                        del cache
                other = adt.DataDist(3, listen="127.0.0.1:0")
                try:
                    await other.open()
                except adt.DataDistError as error:
                    outcomes.append(error)
                finally:
                    await other.aclose()
                del other
            await settled()
        assert not [error for error in outcomes if error is not None and "open files" not in str(error)]
        assert not [error for error in outcomes if isinstance(error, adt.InternalError)]
        assert [error for error in outcomes if isinstance(error, adt.LinkError)]
        assert [error for error in outcomes if isinstance(error, adt.TransportError)]
        assert None in outcomes
        link = await dd.link(peer.info)
        await shown(link)
        cache = dd.cache_manager.register_blocks_cache([np.zeros((BLOCKS, 4096), np.uint8)])
        await dd.cache_manager.pull_blocks(KEY, cache, range(BLOCKS), range(BLOCKS))
        assert (cache.tensors[0] == 3).all()
        await dd.unlink(adt.ClusterInfo(OWNER))
        await settled()
