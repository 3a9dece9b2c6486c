"""`aiodatadist.testing.spawn_peer`: what a peer process says, and how its failures reach the test."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import aiodatadist as adt
from aiodatadist.testing import PeerDied, PeerError, PeerFailed, PeerProcess, TestSide, spawn_peer

from .waiting import held, no_more, until

pytestmark = pytest.mark.loop

BLOCKS = 8


@dataclass
class Report:
    """What a peer sends: the class is found in this module on both sides."""

    pid: int
    values: list[int]


async def echo(test: TestSide, first: Any, *, twice: bool = False) -> Report:
    for _ in range(2 if twice else 1):
        test.send(first)
    values = []
    while (value := await test.receive()) is not None:
        values.append(value)
        test.send(value + 1)
    return Report(os.getpid(), values)


async def fail(test: TestSide, when: str) -> None:
    if when == "asked":
        await test.receive()
    try:
        if when == "cancelled":
            await asyncio.Event().wait()
        raise LookupError("no such thing")
    finally:
        if when == "cancelled":
            raise ZeroDivisionError("in the middle of the end")


async def hang(test: TestSide) -> None:
    test.send("hanging")
    await asyncio.Event().wait()


async def fork(test: TestSide) -> None:
    """Leave a process behind that has all descriptors, and ends when the test says so."""
    mine, its = os.pipe()
    if os.fork() == 0:
        os.close(its)
        os.read(mine, 1)
        os._exit(0)
    os.close(mine)
    test.send(its)
    await test.receive()


async def exit_at_once(test: TestSide, code: int) -> None:
    os._exit(code)


async def unpicklable(test: TestSide) -> Any:
    return lambda: None


async def prefill(test: TestSide) -> None:
    async with adt.DataDist(1, adt.Role.PROMPT, listen="127.0.0.1:0") as dd:
        tensors = [np.repeat(np.arange(BLOCKS, dtype=np.uint8), 64).reshape(BLOCKS, 64)]
        cache = dd.cache_manager.register_blocks_cache(tensors, key=adt.BlocksCacheKey(1))
        await cache.ready()
        test.send(dd.listen_address)
        await test.receive()


async def test_messages_and_the_result() -> None:
    async with spawn_peer(echo, {"a": np.arange(3)}, twice=True) as peer:
        assert (await peer.receive())["a"].tolist() == [0, 1, 2]
        await peer.receive()
        for value in (1, 10):
            peer.send(value)
            assert await peer.receive() == value + 1
        peer.send(None)
        assert await peer.result() == Report(peer.pid, [1, 10])
        with pytest.raises(PeerError, match=r"has returned Report.* and sent nothing more"):
            await peer.receive()
        assert await peer.wait_gone() == 0
    assert not os.path.exists(f"/proc/{peer.pid}")


async def test_a_failure_comes_with_its_traceback() -> None:
    async with spawn_peer(f"{__name__}:fail", "at once") as peer:
        for way in (peer.receive, peer.result):
            with pytest.raises(PeerFailed, match="fail raised LookupError: no such thing") as raised:
                await way()
        assert raised.value.kind == "LookupError"
        assert "test_testing_peers.py" in str(raised.value)
        assert "_serve" not in str(raised.value)
        assert 'raise LookupError("no such thing")' in str(raised.value)
        assert await peer.wait_gone() == 1
    # It has told the test: leaving the block raises nothing more.


@pytest.mark.parametrize("when", ["at once", "cancelled"])
async def test_a_failure_that_nobody_asked_for_ends_the_block(when: str) -> None:
    with pytest.raises(PeerFailed, match="LookupError" if when == "at once" else "ZeroDivisionError"):
        async with spawn_peer(fail, when) as peer:
            if when == "at once":
                await peer.wait_gone()
            else:
                await asyncio.sleep(0.3)  # not needed: only makes it likely that the function runs already


async def test_a_failure_is_noted_where_the_test_fails_because_of_it() -> None:
    with pytest.raises(TimeoutError) as raised:
        async with spawn_peer(fail, "asked") as peer:
            peer.send("go")
            await peer.wait_gone()
            await until(lambda: peer.failure)
            raise TimeoutError("the test waits for something else")
    (note,) = raised.value.__notes__
    assert 'raise LookupError("no such thing")' in note


async def test_a_process_that_exits() -> None:
    with pytest.raises(PeerDied, match="exited with 7") as raised:
        async with spawn_peer(exit_at_once, 7) as peer:
            assert await peer.wait_gone() == 7
    assert raised.value.exit_code == 7


async def test_a_process_that_has_forked_ends_all_the_same() -> None:
    """The other process keeps the connection open, and nobody waits for it."""
    async with spawn_peer(fork) as peer:
        keeper = os.open(f"/proc/{peer.pid}/fd/{await peer.receive()}", os.O_WRONLY)
        try:
            peer.kill()
            with pytest.raises(PeerDied, match="SIGKILL"):
                await peer.receive()
        finally:
            os.close(keeper)


async def test_what_cannot_be_sent_is_said() -> None:
    async with spawn_peer(unpicklable) as peer:
        with pytest.raises(PeerFailed, match="pickle"):
            await peer.result()


@pytest.mark.parametrize("way", ["kill", "stop", "cancel"])
async def test_no_process_outlives_its_block(way: str) -> None:
    # What a loop opens for its first connection, once in a process, stays.
    here, there = socket.socketpair()
    _, writer = await asyncio.open_connection(sock=here)
    writer.close()
    there.close()
    await writer.wait_closed()
    before = held()
    async with spawn_peer(hang) as peer:
        assert await peer.receive() == "hanging"
        if way == "kill":
            peer.kill()
            assert await peer.wait_gone() == -signal.SIGKILL
            with pytest.raises(PeerDied, match="SIGKILL"):
                await peer.receive()
        elif way == "stop":
            peer.stop()
            peer.resume()
            peer.stop()
        elif way == "cancel":
            peer.cancel()
            with pytest.raises(PeerError, match="was cancelled"):
                await peer.result()
    assert not os.path.exists(f"/proc/{peer.pid}")
    await until(lambda: no_more(held(), before), "descriptors are left")


async def test_a_cancelled_test_leaves_no_process() -> None:
    peers: list[PeerProcess] = []

    async def body() -> None:
        async with spawn_peer(hang) as peer:
            peers.append(peer)
            await asyncio.Event().wait()

    task = asyncio.create_task(body())
    await until(lambda: peers)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not os.path.exists(f"/proc/{peers[0].pid}")


async def test_what_another_process_cannot_find_is_refused() -> None:
    async def nested(test: TestSide) -> None: ...

    def plain(test: TestSide) -> None: ...

    for function, error, match in (
        (nested, adt.ArgumentError, "cannot be found by another process; move it out"),
        (plain, adt.ArgumentTypeError, "must be a coroutine function"),
        ("echo", adt.ArgumentError, "must look like 'package.module:function'"),
    ):
        with pytest.raises(error, match=match):
            async with spawn_peer(function):  # type: ignore[arg-type]
                pass
    with pytest.raises(adt.ArgumentError, match="arguments of echo cannot be pickled"):
        async with spawn_peer(echo, lambda: None):
            pass
    with pytest.raises(PeerFailed, match="ModuleNotFoundError"):
        async with spawn_peer("no.such.module:function") as peer:
            await peer.result()


async def test_a_node_in_a_peer() -> None:
    async with spawn_peer(prefill) as peer, adt.DataDist(2, adt.Role.DECODER) as dd:
        await dd.link(adt.ClusterInfo(1, str(await peer.receive())))
        mine = np.zeros((BLOCKS, 64), np.uint8)
        cache = dd.cache_manager.register_blocks_cache([mine], remote=None)
        await dd.cache_manager.pull_blocks(adt.BlocksCacheKey(1), cache, [3, 5], [0, 1])
        assert (mine[:3, 0].tolist(), mine[1, 63]) == ([3, 5, 0], 5)
        peer.kill()
        await until(lambda: not dd.links)
