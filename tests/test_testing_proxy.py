"""`aiodatadist.testing.FaultProxy`: each fault on bare connections, and on a link."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Literal

import numpy as np
import pytest

import aiodatadist as adt
from aiodatadist.testing import FaultProxy

from .pairs import pattern
from .waiting import descriptors, until

pytestmark = pytest.mark.loop

TCP = adt.Config(transports=("tcp",), heartbeat_limit=60.0)
MESSAGE = bytes(range(256)) * 1024  # 256 KiB


class Echo:
    """A server that sends back what it gets, and says `goodbye` after the end."""

    def __init__(self) -> None:
        self.begun = 0
        self.ends: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.begun += 1
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
            self.ends.append("end")
            writer.write(b"goodbye")
            await writer.drain()
        except ConnectionError:
            self.ends.append("reset")
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def echo() -> AsyncIterator[tuple[FaultProxy, Echo]]:
    served = Echo()
    server = await asyncio.start_server(served.serve, "127.0.0.1", 0)
    try:
        async with FaultProxy(server.sockets[0].getsockname()) as proxy:
            yield proxy, served
    finally:
        server.close()
        # The handlers of connections that were cut have still to hear of it.
        await until(lambda: len(served.ends) == served.begun)


async def dial(proxy: FaultProxy) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = proxy.address.split(":")
    return await asyncio.open_connection(host, int(port))


async def test_everything_passes_and_ends_pass_each_way() -> None:
    async with echo() as (proxy, _):
        pass  # what the loop opens for its first server is its own
    before = descriptors()
    async with echo() as (proxy, served):
        reader, writer = await dial(proxy)
        writer.write(MESSAGE)
        assert await reader.readexactly(len(MESSAGE)) == MESSAGE
        assert proxy.passed("up") == proxy.passed("down") == len(MESSAGE)
        assert (proxy.connections, proxy.accepted) == (1, 1)
        writer.write_eof()
        assert await reader.read() == b"goodbye"
        writer.close()
        await until(lambda: proxy.connections == 0)
        assert served.ends == ["end"]
    await until(lambda: descriptors() <= before)


async def test_slices_delays_and_throttles_change_no_byte() -> None:
    async with echo() as (proxy, _):
        proxy.slice(1000)
        proxy.delay(0.01, jitter=0.02)
        proxy.throttle(4e6, direction="up")
        reader, writer = await dial(proxy)
        began = asyncio.get_running_loop().time()
        writer.write(MESSAGE)
        assert await reader.readexactly(len(MESSAGE)) == MESSAGE
        took = asyncio.get_running_loop().time() - began
        assert took > 0.02 + len(MESSAGE) / 4e6  # never sooner, however fast the machine is
        writer.close()


@pytest.mark.parametrize("direction", ["up", "down"])
async def test_a_stall_holds_every_byte_until_it_heals(direction: Literal["up", "down"]) -> None:
    async with echo() as (proxy, _):
        reader, writer = await dial(proxy)
        proxy.stall(after=1000, direction=direction)
        writer.write(MESSAGE)
        await proxy.wait_passed(1000, direction)
        late, late_writer = await dial(proxy)  # connects all the same
        late_writer.write(b"x")
        for _ in range(20):
            await asyncio.sleep(0.001)
            assert proxy.passed(direction) == 1000
        proxy.heal()
        assert await reader.readexactly(len(MESSAGE)) == MESSAGE
        assert await late.readexactly(1) == b"x"
        writer.close()
        late_writer.close()


async def test_a_cut_resets_at_its_byte_and_new_connections_pass() -> None:
    async with echo() as (proxy, served):
        reader, writer = await dial(proxy)
        other, other_writer = await dial(proxy)
        proxy.cut(after=5000, direction="down")
        writer.write(MESSAGE)
        received = b""
        with pytest.raises(ConnectionResetError):
            while True:
                received += await reader.readexactly(1)
        assert MESSAGE.startswith(received)  # a reset may overtake what was sent before it
        assert proxy.passed("down") == 5000
        other_writer.write(b"still here")
        assert await other.readexactly(10) == b"still here"
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            await other.readexactly(1)
        again, again_writer = await dial(proxy)
        again_writer.write(b"x")
        assert await again.readexactly(1) == b"x"
        for each in (writer, other_writer, again_writer):
            each.close()
    assert served.ends.count("reset") == 2


async def test_a_cut_of_both_directions_comes_once() -> None:
    async with echo() as (proxy, _):
        reader, writer = await dial(proxy)
        proxy.cut(after=5000)
        writer.write(MESSAGE)
        with pytest.raises(ConnectionResetError):
            while True:
                await reader.readexactly(1)
        again, again_writer = await dial(proxy)
        again_writer.write(MESSAGE)
        assert await again.readexactly(len(MESSAGE)) == MESSAGE
        assert proxy.passed("up") > 5000
        assert proxy.passed("down") > 5000
        for each in (writer, again_writer):
            each.close()


async def test_a_half_close_ends_one_direction() -> None:
    async with echo() as (proxy, served):
        reader, writer = await dial(proxy)
        proxy.half_close(after=10, direction="up")
        writer.write(b"0123456789, and what is lost")
        assert await reader.read() == b"0123456789goodbye"
        assert served.ends == ["end"]
        writer.close()


async def test_dropped_bytes_are_lost_with_their_connection() -> None:
    async with echo() as (proxy, _):
        reader, writer = await dial(proxy)
        proxy.drop(after=4, direction="up")
        writer.write(b"1234lost")
        assert await reader.readexactly(4) == b"1234"
        await proxy.wait_passed(8, "up")
        proxy.heal()
        with pytest.raises(ConnectionResetError):
            await reader.readexactly(1)
        writer.close()


async def test_refused_until_it_heals_on_the_same_port() -> None:
    async with echo() as (proxy, _):
        reader, writer = await dial(proxy)
        proxy.refuse()
        with pytest.raises(ConnectionRefusedError):
            await dial(proxy)
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"  # what is there stays
        address = proxy.address
        proxy.heal()
        assert proxy.address == address
        _, again = await dial(proxy)
        again.close()
        writer.close()


async def test_a_target_that_is_not_there() -> None:
    async with echo() as (proxy, _):
        pass
    async with FaultProxy(proxy.target) as second:
        reader, writer = await dial(second)
        with pytest.raises(ConnectionResetError):
            await reader.readexactly(1)
        writer.close()


async def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(adt.ArgumentError, match="port"):
        FaultProxy("127.0.0.1")
    proxy = FaultProxy("127.0.0.1:1")
    with pytest.raises(adt.UsageError, match="not open"):
        _ = proxy.address
    async with proxy:
        for wrong in (
            lambda: proxy.delay(-1),
            lambda: proxy.throttle(0),
            lambda: proxy.slice(0),
            lambda: proxy.cut(after=-1),
            lambda: proxy.stall(direction="left"),  # type: ignore[arg-type]
        ):
            with pytest.raises(adt.ArgumentError, match="must"):
                wrong()
    with pytest.raises(adt.UsageError, match="once"):
        async with proxy:
            pass


# A link. ----------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def linked() -> AsyncIterator[tuple[FaultProxy, adt.DataDist, adt.Cache, adt.Cache]]:
    """A user linked to an owner through a proxy; the caches of owner and user."""
    async with (
        adt.DataDist(1, listen="127.0.0.1:0", config=TCP) as owner,
        FaultProxy(str(owner.listen_address)) as proxy,
        adt.DataDist(2, config=TCP) as user,
    ):
        theirs = owner.cache_manager.register_blocks_cache(
            pattern(1, (16, 1 << 18)), key=adt.BlocksCacheKey(1), remote="r"
        )
        mine = user.cache_manager.register_blocks_cache(
            [np.zeros((16, 1 << 18), np.uint8) for _ in range(2)], remote=None
        )
        await theirs.ready()
        link = await user.link(adt.ClusterInfo(1, proxy.address))
        assert link.path.transport == "tcp"
        yield proxy, user, theirs, mine


def pull(user: adt.DataDist, mine: adt.Cache) -> adt.Transfer[None]:
    return user.cache_manager.pull_blocks(adt.BlocksCacheKey(1), mine, range(16), range(16))


async def test_a_pull_passes_and_one_that_is_cut_midway_ends_quiet() -> None:
    async with linked() as (proxy, user, theirs, mine):
        await pull(user, mine)
        for one, other in zip(theirs.tensors, mine.tensors, strict=True):
            np.testing.assert_array_equal(one, other)
        for tensor in mine.tensors:
            tensor[:] = 0
        proxy.cut(after=1 << 20, direction="down")
        with pytest.raises(adt.PeerLostError):
            await pull(user, mine)
        after = [tensor.copy() for tensor in mine.tensors]
        await user.link(adt.ClusterInfo(1, proxy.address))
        for one, other in zip(after, mine.tensors, strict=True):
            np.testing.assert_array_equal(one, other)
        await pull(user, mine)
        np.testing.assert_array_equal(theirs.tensors[1], mine.tensors[1])


async def test_a_stalled_pull_is_cancelled_and_drains() -> None:
    async with linked() as (proxy, user, theirs, mine):
        proxy.stall(after=1 << 20, direction="down")
        transfer = pull(user, mine)
        await proxy.wait_passed(proxy.passed("down") + (1 << 20), "down")
        assert not transfer.done()
        transfer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await transfer
        quiet = [tensor.copy() for tensor in mine.tensors]
        proxy.heal()
        await pull(user, mine)
        assert not np.array_equal(quiet[1], mine.tensors[1])
        np.testing.assert_array_equal(theirs.tensors[1], mine.tensors[1])


async def test_a_link_through_refusals_and_silence() -> None:
    async with linked() as (proxy, user, _, mine):
        proxy.refuse()
        await user.unlink(adt.ClusterInfo(1))
        with pytest.raises(adt.LinkError):
            await user.link(adt.ClusterInfo(1, proxy.address))
        proxy.heal()
        proxy.stall()
        with pytest.raises(adt.LinkTimeout):
            await user.link(adt.ClusterInfo(1, proxy.address), timeout=0.2)
        proxy.heal()
        await user.link(adt.ClusterInfo(1, proxy.address))
        await pull(user, mine)
