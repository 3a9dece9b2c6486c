"""The life of a DataDist: opening, closing, misuse, and real peers that crash, stop, block and come back."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import socket
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from aiodatadist import _core
from aiodatadist._loop import Runtime
from aiodatadist.config import Config
from aiodatadist.datadist import DataDist
from aiodatadist.errors import (
    ArgumentError,
    ArgumentTypeError,
    ClosedError,
    DataDistError,
    ForkedError,
    LinkTimeout,
    MemoryStillExposed,
    NotLinkedError,
    PeerLostError,
    TransportError,
    WrongLoopError,
)
from aiodatadist.keys import BlocksCacheKey, CacheKeyByIdAndIndex
from aiodatadist.observe import PendingOperation
from aiodatadist.types import CacheDesc, ClusterInfo, LinkState, LinkStateChanged, Role

from .hixl_standin import HIXL
from .peers import spawn
from .waiting import PATIENCE, held, native_threads, no_more, reserved_address, until, until_now

pytestmark = pytest.mark.loop

LISTEN = "127.0.0.1:0"
TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "tcp"])
VERBS = pytest.param("verbs", marks=pytest.mark.verbs)
EVERY_TRANSPORT = pytest.mark.parametrize("transport", ["shm", "tcp", VERBS, HIXL])
WITH_HIXL = pytest.mark.parametrize("transport", ["shm", "tcp", HIXL])


def config(transport: str = "shm", **changes: Any) -> Config:
    transports = {"shm": ("shm", "tcp"), "verbs": ("verbs",), "hixl": ("hixl",)}.get(transport, ("tcp",))
    return Config(transports=transports, **changes)


def info(dd: DataDist) -> ClusterInfo:
    return ClusterInfo(dd.cluster_id, dd.listen_address)


# Opening. ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"cluster_id": -1}, ArgumentError),
        ({"cluster_id": 2**64}, ArgumentError),
        ({"cluster_id": "1"}, ArgumentTypeError),
        ({"cluster_id": True}, ArgumentTypeError),
        ({"cluster_id": 1, "role": 9}, ArgumentError),
        ({"cluster_id": 1, "listen": "nowhere"}, ArgumentError),
        ({"cluster_id": 1, "listen": "127.0.0.1:70000"}, ArgumentError),
        ({"cluster_id": 1, "listen": 26000}, ArgumentTypeError),
        ({"cluster_id": 1, "config": {}}, ArgumentTypeError),
    ],
    ids=str,
)
def test_wrong_arguments_raise_at_the_call(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        DataDist(**arguments)


async def test_open_listens_and_says_where() -> None:
    dd = DataDist(np.uint64(2**64 - 1), Role.DECODER, listen=("127.0.0.1", 0))
    assert "listening" not in repr(dd)
    assert "not open yet" in repr(dd)
    assert await dd.open() is dd
    assert dd.listen_address is not None
    assert dd.listen_address.port > 0
    assert str(dd.listen_address) in repr(dd)
    with pytest.raises(ClosedError, match="opens once"):
        await dd.open()
    await dd.aclose()
    with pytest.raises(ClosedError):
        await dd.open()


async def test_before_open_everything_says_so() -> None:
    dd = DataDist(1)
    uses: list[Callable[[], Any]] = [
        lambda: dd.link(ClusterInfo(2, "127.0.0.1:1")),
        lambda: dd.unlink(ClusterInfo(2)),
        lambda: dd.fence(2),
        lambda: dd.cache_manager,
        dd.events,
        dd.notifications,
        dd.stats,
        dd.dump,
    ]
    for use in uses:
        with pytest.raises(ClosedError, match="open"):
            use()
    assert dd.links == {}
    await dd.wait_closed()
    await dd.aclose()
    dd.abort()


async def test_an_address_in_use_is_a_clear_error_and_leaves_nothing() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        await until(lambda: not native_threads())
        before = held()
        for _ in range(3):
            with pytest.raises(TransportError, match="Address already in use"):
                await DataDist(1, listen=taken.getsockname()).open()
        await until(lambda: no_more(held(), before))
    with pytest.raises(TransportError, match="cannot listen"):
        await DataDist(1, listen="no-such-host.invalid:0").open()


async def test_cancelled_while_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*args: Any) -> Any:
        await asyncio.sleep(60)

    await until(lambda: not native_threads())
    before = held()
    monkeypatch.setattr(Runtime, "listen", never)
    for pause in (0.0, 0.01):
        opening = asyncio.ensure_future(DataDist(1, listen=LISTEN).open())
        await asyncio.sleep(pause)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
    await until(lambda: no_more(held(), before))


async def test_listening_beyond_the_host_without_a_key_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "aiodatadist"):
        async with DataDist(1, listen="127.0.0.1:0"):
            pass
        assert "cluster key" not in caplog.text
        async with DataDist(1, listen="0.0.0.0:0"):
            pass
        assert "without a cluster key" in caplog.text


async def test_several_nodes_in_one_loop_share_threads_and_ring() -> None:
    async with contextlib.AsyncExitStack() as stack:
        await until(lambda: not native_threads())
        first = await stack.enter_async_context(DataDist(0, listen=LISTEN))
        count = native_threads()
        others = [await stack.enter_async_context(DataDist(number)) for number in range(1, 6)]
        assert native_threads() == count
        assert {id(dd._ring) for dd in (first, *others)} == {id(first._ring)}
        await asyncio.gather(*(dd.link(info(first)) for dd in others))
        await until(lambda: set(first.links) == {1, 2, 3, 4, 5})


async def test_open_and_close_again_and_again_leaves_nothing() -> None:
    async def once() -> None:
        async with DataDist(1, listen=LISTEN) as a, DataDist(2) as b:
            await b.link(info(a))

    for _ in range(3):
        await once()
    await until(lambda: not native_threads())
    before = (*held(), len(asyncio.all_tasks()))
    for _ in range(30):
        await once()
    await until(lambda: no_more((*held(), len(asyncio.all_tasks())), before))


# Closing. ---------------------------------------------------------------------------------------------------


async def test_after_closing_everything_says_so() -> None:
    async with DataDist(1, listen=LISTEN) as dd:
        cache = dd.cache_manager.register_blocks_cache([np.zeros((4, 8))])
        await cache.ready()
    uses: list[Callable[[], Any]] = [
        lambda: dd.link(ClusterInfo(2, "127.0.0.1:1")),
        lambda: dd.fence(2),
        dd.events,
        dd.notifications,
        dd.stats,
        lambda: dd.cache_manager.register_blocks_cache([np.zeros((4, 8))]),
        lambda: dd.cache_manager.pull_blocks(BlocksCacheKey(2), cache, [0], [0]),
    ]
    for use in uses:
        with pytest.raises(ClosedError):
            use()
    assert cache.tensors == ()
    await dd.aclose()
    await dd.wait_closed()
    dd.abort()


@WITH_HIXL
async def test_closing_unlinks_and_the_peer_sees_it(transport: str) -> None:
    async with DataDist(1, listen=LISTEN, config=config(transport)) as a:
        async with DataDist(2, config=config(transport)) as b:
            await b.link(info(a))
            await until(lambda: 2 in a.links)
            stream, link = a.events(), a.links[2]
        assert link.state is LinkState.CLOSED
        event = await anext(stream)
        assert isinstance(event, LinkStateChanged)
        assert event.new is LinkState.CLOSED
        assert "closing" in event.reason
        assert a.links == {}


@EVERY_TRANSPORT
async def test_closing_lets_running_transfers_end(transport: str) -> None:
    tensors = [np.full((64, 1 << 20), 5, np.uint8)]
    async with DataDist(1, listen=LISTEN, config=config(transport)) as a:
        theirs = a.cache_manager.register_blocks_cache(tensors, key=BlocksCacheKey(1))
        await theirs.ready()
        mine = [np.zeros((64, 1 << 20), np.uint8)]
        async with DataDist(2, config=config(transport)) as b:
            cache = b.cache_manager.register_blocks_cache(mine)
            await cache.ready()
            await b.link(info(a))
            pull = b.cache_manager.pull_blocks(BlocksCacheKey(1), cache, range(64), range(64))
        await pull
        assert (mine[0] == 5).all()


@pytest.mark.parametrize("stage", ["registering", "landed"])
@WITH_HIXL
async def test_closing_lets_transfers_end_that_the_engine_does_not_have(transport: str, stage: str) -> None:
    shape = (16, 1 << 19)  # short ones over tcp are received by the loop itself
    there, here = np.full(shape, 5, np.uint8), np.zeros(shape, np.uint8)
    async with DataDist(1, listen=LISTEN, config=config(transport, inline_bytes=0)) as a:
        theirs = a.cache_manager.register_blocks_cache([there], key=BlocksCacheKey(1))
        await theirs.ready()
        async with DataDist(2, config=config(transport, inline_bytes=0)) as b:
            await b.link(info(a))
            cache = b.cache_manager.register_blocks_cache([here])
            if stage == "landed":
                await cache.ready()
            pull = b.cache_manager.pull_blocks(BlocksCacheKey(1), cache, range(16), range(16), notify=b"all")
            if stage == "landed":
                until_now(lambda: not b._node.pending())  # blocks the loop, so that nobody hears of the end
            assert not pull.done()
        await pull
        assert (here == 5).all()
        async with asyncio.timeout(PATIENCE):
            assert (await anext(a.notifications())).payload == b"all"


@WITH_HIXL
async def test_closing_does_not_wait_for_a_transfer_that_somebody_else_ended(transport: str) -> None:
    async with DataDist(1, listen=LISTEN, config=config(transport)) as a:
        theirs = a.cache_manager.register_blocks_cache([np.ones((16, 1 << 19), np.uint8)], key=BlocksCacheKey(1))
        await theirs.ready()
        b = await DataDist(2, config=config(transport)).open()
        await b.link(info(a))
        cache = b.cache_manager.register_blocks_cache([np.zeros((16, 1 << 19), np.uint8)])
        registering = b.cache_manager.pull_blocks(BlocksCacheKey(1), cache, range(16), range(16))
        registering.set_result(None)
        await cache.ready()
        moving = b.cache_manager.pull_blocks(BlocksCacheKey(1), cache, range(16), range(16), notify=b"x")
        moving.set_result(None)
        async with asyncio.timeout(PATIENCE):
            await b.aclose()


@EVERY_TRANSPORT
async def test_abort_ends_everything_at_once(transport: str) -> None:
    async with DataDist(1, listen=LISTEN, config=config(transport)) as a:
        theirs = a.cache_manager.register_blocks_cache([np.ones((64, 1 << 20), np.uint8)], key=BlocksCacheKey(1))
        await theirs.ready()
        b = await DataDist(2, config=config(transport)).open()
        cache = b.cache_manager.register_blocks_cache([np.zeros((64, 1 << 20), np.uint8)])
        await cache.ready()
        link = await b.link(info(a))
        waiting = b.link(ClusterInfo(7, "10.255.255.1:9"))
        stream = b.events()
        pull = b.cache_manager.pull_blocks(BlocksCacheKey(1), cache, range(64), range(64))
        b.abort()
        b.abort()
        assert b.links == {}
        assert link.state is LinkState.CLOSED
        with pytest.raises(ClosedError):
            b.stats()
        with pytest.raises(DataDistError):
            await waiting
        await b.wait_closed()
        with pytest.raises(DataDistError):
            pull.result()
        assert cache.tensors == ()
        assert [event async for event in stream]
        await until(lambda: not a.links)


async def test_two_closings_at_once() -> None:
    async with DataDist(1, listen=LISTEN) as a:
        b = await DataDist(2).open()
        await b.link(info(a))
        await asyncio.gather(b.aclose(), b.aclose(), b.wait_closed(), b.aclose(5.0))
        assert b._center.state.name == "CLOSED"


@pytest.mark.parametrize("turns", [1, 3, 8])
async def test_an_abort_ends_a_closing_that_runs(turns: int) -> None:
    async with DataDist(1, listen=LISTEN) as a:
        theirs = a.cache_manager.register_blocks_cache([np.ones((64, 1 << 20), np.uint8)], key=BlocksCacheKey(1))
        await theirs.ready()
        b = await DataDist(2).open()
        cache = b.cache_manager.register_blocks_cache([np.zeros((64, 1 << 20), np.uint8)])
        await cache.ready()
        await b.link(info(a))
        pulls = [b.cache_manager.pull_blocks(BlocksCacheKey(1), cache, range(64), range(64)) for _ in range(4)]
        closings = [asyncio.ensure_future(closing) for closing in (b.aclose(), b.aclose(5.0), b.wait_closed())]
        for _ in range(turns):
            await asyncio.sleep(0)
        b.abort()
        assert await asyncio.gather(*closings) == [None] * 3
        assert all(pull.done() for pull in pulls)
        await asyncio.gather(*pulls, return_exceptions=True)
        assert cache.tensors == ()


async def test_a_closed_datadist_that_is_still_held_holds_no_library_memory() -> None:
    def memory_files() -> int:
        found = 0
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                found += os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:")
        return found

    gc.collect()
    before = memory_files()
    gc.disable()
    try:
        async with DataDist(1, listen=LISTEN) as a, DataDist(2) as b:
            cache = a.cache_manager.allocate_blocks_cache(CacheDesc(1, (8, 64), "int8"), key=BlocksCacheKey(1))
            await cache.ready()
            await b.link(info(a))
            assert memory_files() > before
        await until(lambda: memory_files() <= before)
        assert a._center.state.name == "CLOSED"
    finally:
        gc.enable()


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8])
async def test_a_cancelled_aclose_finishes_by_abort(turns: int) -> None:
    async with DataDist(1, listen=LISTEN) as a:
        b = await DataDist(2).open()
        await b.link(info(a))
        closing = asyncio.ensure_future(b.aclose())
        for _ in range(turns):
            await asyncio.sleep(0)
        closing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await closing
        if turns:
            await b.wait_closed()
        else:
            await b.aclose()  # it was cancelled before it began
        await until(lambda: not a.links)


async def test_readers_come_to_the_end() -> None:
    async def read(stream: Any) -> int:
        return len([item async for item in stream])

    async with DataDist(1) as dd:
        readers = [asyncio.ensure_future(read(stream)) for stream in (dd.events(), dd.notifications())]
        await asyncio.sleep(0)
    assert await asyncio.gather(*readers) == [0, 0]


async def test_an_unclosed_datadist_is_stopped_and_warned_about() -> None:
    await until(lambda: not native_threads())
    before = held()
    dd = await DataDist(1, listen=LISTEN).open()
    alive = weakref.ref(dd)
    del dd
    with pytest.warns(ResourceWarning, match="unclosed DataDist of cluster 1"):
        # A thread that worked for it may hold it for another moment.
        await until(lambda: (gc.collect(), alive())[1] is None)
    await until(lambda: no_more(held(), before))


@pytest.mark.parametrize("timeout", [-1, 0, float("nan"), True, "1"])
async def test_a_wrong_timeout_closes_nothing(timeout: Any) -> None:
    async with DataDist(1, listen=LISTEN) as dd:
        with pytest.raises((ArgumentError, ArgumentTypeError), match="timeout"):
            await dd.aclose(timeout)
        assert dd.stats()["links"] == {}
        assert repr(dd) == f"<DataDist 1: open, listening on {dd.listen_address}>"
    assert repr(dd) == "<DataDist 1: closed>"


async def test_e6_all_tasks_cancelled_is_an_abort() -> None:
    await until(lambda: not native_threads())
    before = held()
    dd = await DataDist(1, listen=LISTEN).open()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        while others:
            others.pop().cancel()
        await dd.wait_closed()
    await dd.aclose()
    with pytest.raises(ClosedError):
        dd.stats()
    del dd
    await until(lambda: no_more(held(), before))


# Threads, loops, processes. ---------------------------------------------------------------------------------


async def test_s1_another_thread_or_loop_is_told() -> None:
    async with DataDist(1, listen=LISTEN) as dd:
        cache = dd.cache_manager.register_blocks_cache([np.zeros((4, 8))])
        await cache.ready()
        uses: list[Callable[[], Any]] = [
            lambda: dd.link(ClusterInfo(2, "127.0.0.1:1")),
            lambda: dd.unlink(ClusterInfo(2)),
            lambda: dd.fence(2),
            dd.events,
            dd.stats,
            dd.dump,
            dd.abort,
            lambda: dd.cache_manager.pull_blocks(BlocksCacheKey(2), cache, [0], [0]),
            lambda: dd.cache_manager.register_blocks_cache([np.zeros((4, 8))]),
        ]
        caught: list[BaseException] = []

        def without_a_loop() -> None:
            for use in uses:
                try:
                    use()
                except BaseException as why:
                    caught.append(why)

        async def in_a_loop() -> None:
            without_a_loop()
            try:
                await dd.aclose()
            except BaseException as why:
                caught.append(why)

        await asyncio.to_thread(without_a_loop)
        await asyncio.to_thread(lambda: asyncio.run(in_a_loop()))
        assert len(caught) == 2 * len(uses) + 1
        assert {type(error) for error in caught} == {WrongLoopError}
        assert dd.stats()["links"] == {}


@EVERY_TRANSPORT
async def test_a_forked_child_is_inert(transport: str) -> None:
    async with DataDist(1, listen=LISTEN, config=config(transport)) as a, DataDist(2, config=config(transport)) as b:
        cache = b.cache_manager.register_blocks_cache([np.zeros((4, 8), np.uint8)])
        theirs = a.cache_manager.register_blocks_cache([np.ones((4, 8), np.uint8)], key=BlocksCacheKey(1))
        await asyncio.gather(cache.ready(), theirs.ready())
        await b.link(info(a))
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            said = []
            for use in (
                b.stats,
                lambda: b.link(ClusterInfo(1)),
                lambda: b.fence(1),
                b.events,
                lambda: b.unlink(info(a)),
            ):
                try:
                    use()
                except BaseException as why:
                    said.append(type(why).__name__)
                else:
                    said.append("nothing")
            with contextlib.suppress(BaseException):
                b.abort()
            os.write(write, ",".join(said).encode())
            os._exit(0)
        os.close(write)
        with open(read) as pipe:
            assert set(pipe.read().split(",")) == {ForkedError.__name__}
        assert os.waitpid(pid, 0)[1] == 0
        await b.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [0], [1])
        assert (cache.tensors[0][1] == 1).all()
        await a.fence(2)


async def test_a_forked_child_cannot_open_one_of_its_own() -> None:
    read, write = os.pipe()
    async with DataDist(1):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            try:
                DataDist(2).open().send(None)  # without the loop, whose descriptors are the parent's
            except BaseException as error:
                os.write(write, f"{type(error).__name__}: {error}".encode())
            finally:
                os._exit(0)
        os.close(write)
        os.waitpid(pid, 0)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    assert said.startswith("ForkedError: ")
    assert "spawn" in said


def test_a_child_forked_when_all_are_closed_opens_its_own() -> None:
    async def use() -> None:
        config = Config(link_timeout=None)
        async with DataDist(1, listen="127.0.0.1:0", config=config) as a, DataDist(2, config=config) as b:
            theirs = a.cache_manager.register_blocks_cache([np.full((4, 64), 7, np.uint8)], key=BlocksCacheKey(1))
            await theirs.ready()
            assert (await b.link(info(a))).path.transport == "shm"
            mine = b.cache_manager.register_blocks_cache([np.zeros((4, 64), np.uint8)], remote=None)
            await b.cache_manager.pull_blocks(BlocksCacheKey(1), mine, [1], [2])
            assert (mine.tensors[0][2] == 7).all()

    kept = DataDist(3)
    region = _core.Region(4096)  # library memory may outlive its DataDist
    asyncio.run(use())
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            code = 1
            try:
                assert not _core.forked()
                asyncio.run(use())
                with pytest.raises(ClosedError):
                    kept.stats()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    asyncio.run(use())
    assert memoryview(region).nbytes == 4096


def test_loops_one_after_the_other_in_one_thread() -> None:
    async def use(dd: DataDist) -> None:
        with pytest.raises(WrongLoopError):
            dd.stats()

    loop = asyncio.new_event_loop()
    dd = loop.run_until_complete(DataDist(1).open())
    asyncio.run(use(dd))
    loop.run_until_complete(dd.aclose())
    loop.close()


# Real peers. ------------------------------------------------------------------------------------------------


@EVERY_TRANSPORT
async def test_killing_the_peer_fails_all_that_is_pending_and_relinking_needs_no_force(transport: str) -> None:
    # A death is seen, and not waited for until heartbeats are missed.
    slow = {"transports": config(transport).transports, "heartbeat_limit": 600.0}
    with reserved_address() as address:
        async with DataDist(2, config=Config(**slow)) as dd:
            await kill_and_relink(dd, address, slow)


async def kill_and_relink(dd: DataDist, address: str, slow: dict[str, Any]) -> None:
    mine = dd.cache_manager.register_blocks_cache([np.zeros((64, 16384), np.uint8)])
    await mine.ready()
    stream = dd.events()
    async with spawn(1, listen=address, **slow) as peer:
        await peer.cache("kv", tensors=1, value=3)
        link = await dd.link(peer.info)
        await until(lambda: BlocksCacheKey(1) in link.table)
        peer.stop()
        fence = dd.fence(1, timeout=None)
        notes = [link._post_notification(b"x") for _ in range(600)]
        peer.kill()
        async with asyncio.timeout(PATIENCE):
            await fence
            results = await asyncio.gather(*notes, return_exceptions=True)
        assert {type(result) for result in results} == {type(None), PeerLostError}
        assert link.state is LinkState.BROKEN
        assert isinstance(link.error, PeerLostError)
        assert dd.links == {}
        with pytest.raises(NotLinkedError):
            _ = dd.cache_manager.pull_blocks(BlocksCacheKey(1), mine, [0], [0])
    async with spawn(1, listen=address, **slow) as peer:
        await peer.cache("kv", tensors=1, value=4)
        link = await dd.link(peer.info)
        assert link.epoch == 2
        await until(lambda: BlocksCacheKey(1) in link.table)
        await dd.cache_manager.pull_blocks(BlocksCacheKey(1), mine, [0], [0])
        assert (mine.tensors[0][0] == 4).all()
    seen = []
    while LinkState.BROKEN not in seen:
        event = await anext(stream)
        if isinstance(event, LinkStateChanged):
            seen.append(event.new)
    assert seen == [LinkState.LINKING, LinkState.READY, LinkState.BROKEN]


@EVERY_TRANSPORT
@pytest.mark.hang_limit(300)
async def test_fifty_crashes_and_relinks_leave_nothing(transport: str, scale: Callable[..., int]) -> None:
    transports = config(transport).transports
    async with contextlib.AsyncExitStack() as stack:
        address = stack.enter_context(reserved_address())
        dd = await stack.enter_async_context(DataDist(2, listen=LISTEN, config=config(transport)))
        mine = dd.cache_manager.register_blocks_cache([np.zeros((64, 16384), np.uint8)], key=BlocksCacheKey(2))
        await mine.ready()
        before: tuple[int, ...] | None = None
        # Verbs are tested on emulated processors, where each is a matter of seconds.
        for number in range(scale(15 if transport == "verbs" else 50, least=5)):
            async with spawn(1, listen=address, transports=transports) as peer:
                await peer.cache("kv", tensors=1, value=number % 251)
                if number % 2:
                    link = await dd.link(peer.info)
                else:
                    await peer.call("link", cluster_id=2, address=str(dd.listen_address))
                    await until(lambda: 1 in dd.links)
                    link = dd.links[1]
                assert link.epoch == number + 1
                await until(functools.partial(link.table.__contains__, BlocksCacheKey(1)))
                await dd.cache_manager.pull_blocks(BlocksCacheKey(1), mine, [5], [7])
                assert (mine.tensors[0][7] == number % 251).all()
                peer.kill()
                await peer.wait_gone()
                await until(lambda: not dd.links and not len(dd._center.peers))
            if number == 3:
                before = (*held(), len(asyncio.all_tasks()))
        assert before is not None
        assert len(dd._center.links._slots) == 1
        await until(lambda: no_more((*held(), len(asyncio.all_tasks())), before))


SILENCE = 2.8
"""Seconds that are too many for a heartbeat limit of 1.5, at which whoever says nothing is lost after 1.9 at most."""


@TRANSPORTS
async def test_a_peer_whose_python_blocks_stays_linked(transport: str) -> None:
    """The engines keep the link alive, and answer fences, while Python does nothing for longer than the limit."""
    async with (
        spawn(1, transports=config(transport).transports, heartbeat_limit=1.5) as peer,
        DataDist(2, config=config(transport, heartbeat_limit=1.5)) as dd,
    ):
        link = await dd.link(peer.info)
        async with peer.blocked():
            await dd.fence(1)
            await asyncio.sleep(SILENCE)
            await dd.fence(1)
        assert link.state is LinkState.READY
        await dd.fence(1)


@pytest.mark.parametrize("transport", ["shm", "shm, nothing shared", "tcp"])
async def test_t3_a_silent_peer_is_lost_at_the_limit(transport: str) -> None:
    async with (
        spawn(1, transports=config(transport).transports, heartbeat_limit=1.5) as peer,
        DataDist(2, config=config(transport, heartbeat_limit=1.5)) as dd,
    ):
        if transport == "shm":
            cache = dd.cache_manager.register_blocks_cache([np.zeros((4, 8))])
            await cache.ready()
        link = await dd.link(peer.info)
        peer.stop()
        await until(lambda: not dd.links)
        assert link.state is LinkState.BROKEN
        if transport == "shm":
            # It may wake and write: a fence waits for its word or its end.
            with pytest.raises(LinkTimeout):
                await dd.fence(1, timeout=0.2)
        else:
            await dd.fence(1)
        peer.resume()
        await dd.fence(1)
        link = await dd.link(peer.info)
        assert link.epoch == 2


@TRANSPORTS
@pytest.mark.parametrize("limits", [(1.5, 60.0), (60.0, 1.5)])
async def test_the_more_impatient_side_sets_the_pace_of_heartbeats(transport: str, limits: tuple[float, float]) -> None:
    async with (
        spawn(1, transports=config(transport).transports, heartbeat_limit=limits[0]) as peer,
        DataDist(2, config=config(transport, heartbeat_limit=limits[1])) as dd,
    ):
        link = await dd.link(peer.info)
        await asyncio.sleep(SILENCE)
        assert link.state is LinkState.READY
        await dd.fence(1)


async def test_closing_beside_a_stopped_process_of_this_host_names_what_it_may_touch() -> None:
    async with spawn(1) as peer:
        dd = await DataDist(2, listen=LISTEN, config=Config(drain_timeout=0.1)).open()
        cache = dd.cache_manager.register_blocks_cache([np.zeros((4, 8), np.uint8)], key=BlocksCacheKey(2))
        tensors = cache.tensors
        await cache.ready()
        await dd.link(peer.info)
        peer.stop()
        with pytest.raises(MemoryStillExposed) as caught:
            await dd.aclose(0.2)
        assert len(caught.value.caches) == 1
        assert "Cache 1" in caught.value.caches[0]
        assert cache.tensors == tensors
        closing = asyncio.ensure_future(dd.wait_closed())
        await asyncio.sleep(0.05)
        assert not closing.done()
        with pytest.raises(MemoryStillExposed):
            await dd.aclose(0.05)
        peer.resume()
        await closing
        assert cache.tensors == ()


async def test_closing_beside_a_stopped_tcp_peer_needs_no_waiting_for_it() -> None:
    async with spawn(1, transports=("tcp",)) as peer:
        dd = await DataDist(2, config=config("tcp", drain_timeout=0.1)).open()
        await dd.link(peer.info)
        peer.stop()
        await dd.aclose(0.3)


@pytest.mark.parametrize("force", [False, True])
async def test_unlinking_a_stopped_peer(force: bool) -> None:
    async with spawn(1, transports=("tcp",)) as peer, DataDist(2, config=config("tcp")) as dd:
        link = await dd.link(peer.info)
        peer.stop()
        if force:
            await dd.unlink(ClusterInfo(1), force=True)
        else:
            with pytest.raises(LinkTimeout, match="waiting for the peer to unlink"):
                await dd.unlink(ClusterInfo(1), timeout=0.2)
        assert link.state is LinkState.CLOSED
        assert dd.links == {}
        peer.resume()
        link = await dd.link(peer.info)
        assert link.state is LinkState.READY
        await dd.fence(1)


async def test_both_processes_link_each_other_at_once() -> None:
    async with spawn(1) as peer, DataDist(2, listen=LISTEN) as dd:
        for round_ in range(20):
            theirs = peer.post("link", cluster_id=2, address=str(dd.listen_address))
            await asyncio.sleep(0.0005 * (round_ % 8))
            link = await dd.link(peer.info)
            await theirs
            assert link.state is LinkState.READY
            await dd.fence(1)
            if round_ % 2:
                await peer.call("unlink", cluster_id=2)
            else:
                await dd.unlink(ClusterInfo(1))
            await until(lambda: not dd.links)


async def test_a_forked_child_of_the_peer_does_not_hide_its_death() -> None:
    async with spawn(1, heartbeat_limit=600.0) as peer, DataDist(2, config=Config(heartbeat_limit=600.0)) as dd:
        await dd.link(peer.info)
        await peer.fork()
        peer.kill()
        await until(lambda: not dd.links)
        await dd.fence(1)


# Work and rest. ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def longest_callback() -> Iterator[Callable[[], float]]:
    """Measure the most CPU time of this thread that one callback of the loop takes."""
    longest = 0.0
    run = asyncio.Handle._run

    def timed(self: asyncio.Handle) -> None:
        nonlocal longest
        began = time.thread_time()
        run(self)
        longest = max(longest, time.thread_time() - began)

    asyncio.Handle._run = timed  # type: ignore[method-assign]
    try:
        yield lambda: longest
    finally:
        asyncio.Handle._run = run  # type: ignore[method-assign]


async def test_e1_e2_sixty_four_links_at_once_hold_the_loop_for_no_more_than_5_ms(
    request: pytest.FixtureRequest,
) -> None:
    """faults.md E1 and E2."""
    if request.config.getoption("--loop") != "asyncio":
        pytest.skip("measured through asyncio's handles")
    tensors = [np.zeros((4, 8), np.uint8)]
    async with contextlib.AsyncExitStack() as stack:
        hub = await stack.enter_async_context(DataDist(0, listen=LISTEN))
        caches = [hub.cache_manager.register_blocks_cache(tensors) for _ in range(20)]
        await asyncio.gather(*(cache.ready() for cache in caches))
        nodes = [await stack.enter_async_context(DataDist(number)) for number in range(1, 65)]
        gc.collect()
        gc.disable()
        try:
            # Once is enough: what holds the loop does so every time, and what a busy machine adds, it does not.
            for _ in range(10):
                with longest_callback() as longest:
                    links = await asyncio.gather(*(node.link(info(hub)) for node in nodes))
                assert all(len(link.table) == 20 for link in links)
                await until(lambda: len(hub.links) == 64)
                if longest() < 0.005:
                    break
                await asyncio.gather(*(node.unlink(info(hub)) for node in nodes))
                await until(lambda: not hub.links)
            assert longest() < 0.005
        finally:
            gc.enable()


# To look at. ------------------------------------------------------------------------------------------------


async def test_stats_and_dump() -> None:
    async def script(stream: Any) -> None:
        await asyncio.sleep(30)

    runtime = Runtime()
    streams: list[Any] = []
    from aiodatadist.types import Address

    listener = await runtime.listen(Address("127.0.0.1", 0), streams.append)
    async with DataDist(1, listen=LISTEN) as a, DataDist(2) as b:
        link = b.link(ClusterInfo(9, listener.address), timeout=5)
        await until(lambda: "Hello" in b.dump()[0].state)
        (row,) = b.dump()
        assert isinstance(row, PendingOperation)
        assert (row.kind, row.peer, row.bytes_total) == ("link", 9, 0)
        assert "link cluster 9" in str(row)
        assert b.stats()["pending"] == 1
        link.cancel()
        with pytest.raises(asyncio.CancelledError):
            await link
        assert b.dump() == []
        await b.link(info(a))
        stats = b.stats()
        assert stats["links"][1]["state"] == "ready"
        assert stats["links"][1]["epoch"] == 1
        assert stats["unread"] == stats["pending"] == 0
        assert stats["total"]["started"] == 0
    listener.close()
    for stream in streams:
        stream.close()


async def test_links_is_a_view_that_cannot_be_written() -> None:
    async with DataDist(1, listen=LISTEN) as a, DataDist(2) as b:
        view = b.links
        await b.link(info(a))
        assert set(view) == {1}
        with pytest.raises(TypeError):
            view[1] = None  # type: ignore[index]


async def test_an_unknown_batch_key_is_found_by_nobody() -> None:
    async with DataDist(1, listen=LISTEN) as a, DataDist(2) as b:
        link = await b.link(info(a))
        assert CacheKeyByIdAndIndex(1, 1, 0) not in link.table
