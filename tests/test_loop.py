"""The event loop seam: streams, listeners, unix channels, deadlines, and what a fork leaves."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import resource
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest

from aiodatadist import _loop
from aiodatadist._loop import Deadline, HostChannel, Runtime, SocketStream, Stream, Tasks
from aiodatadist.types import Address, parse_address

from .waiting import reserved_address, until

pytestmark = pytest.mark.loop

LOCAL = Address("127.0.0.1", 0)


def open_fds() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/fd")}


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def no_fd_leaks() -> Iterator[None]:
    gc.collect()
    before = len(open_fds())
    yield
    gc.collect()
    assert len(open_fds()) <= before


async def pair() -> tuple[SocketStream, SocketStream]:
    """Return two ends of a TCP connection with small buffers: some MiB never fit, however this machine is set up."""
    runtime = Runtime()
    accepted = runtime.future()
    listener = await runtime.listen(LOCAL, accepted.set_result)
    one = await runtime.connect(listener.address)
    two = await accepted
    listener.close()
    assert isinstance(one, SocketStream)
    for stream in (one, two):
        stream._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        stream._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    return one, two


async def unix_pair() -> tuple[HostChannel, HostChannel]:
    runtime = Runtime()
    accepted = runtime.future()
    listener = runtime.listen_host(
        f"aiodatadist-test-{os.getpid()}-{time.monotonic_ns()}".encode(), accepted.set_result
    )
    one = await runtime.connect_host(listener.name)
    two = await accepted
    listener.close()
    return one, two


# Streams. ---------------------------------------------------------------------------------------------------


async def test_bytes_go_both_ways_and_end() -> None:
    one, two = await pair()
    one.send(b"hello")
    assert await two.receive() == b"hello"
    two.send(b"to")
    two.send(b"gether")
    assert await one.receive_exactly(8) == b"together"
    one.close()
    assert await two.receive() == b""
    two.close()


async def test_receive_exactly_takes_no_byte_more() -> None:
    one, two = await pair()
    one.send(b"x" * 64 + b"engine")
    assert await two.receive_exactly(64) == b"x" * 64
    fd = two.detach()
    with socket.socket(fileno=fd) as raw:
        assert raw.recv(10) == b"engine"
    one.close()


async def test_receive_exactly_of_a_stream_that_is_cut() -> None:
    one, two = await pair()
    one.send(b"half")
    one.close()
    with pytest.raises(EOFError, match="4 of 64"):
        await two.receive_exactly(64)
    two.close()


async def test_sending_never_waits_and_flush_does() -> None:
    one, two = await pair()
    payload = os.urandom(1 << 20) * 16
    one.send(payload)
    one.send(b"end")
    assert one.unsent > 0
    flushing = asyncio.ensure_future(one.flush())
    half = asyncio.ensure_future(one.flush(8 << 20))
    received = bytearray()
    while len(received) < len(payload) + 3:
        received += await two.receive()
    await flushing
    await half
    assert one.unsent == 0
    assert bytes(received) == payload + b"end"
    one.close()
    two.close()


async def test_closing_wakes_whoever_waits() -> None:
    one, two = await pair()
    one.send(bytes(32 << 20))
    receiving = asyncio.ensure_future(one.receive())
    flushing = asyncio.ensure_future(one.flush())
    await asyncio.sleep(0.01)
    one.close()
    one.close()
    for waiting in (receiving, flushing):
        with pytest.raises(ConnectionAbortedError):
            await waiting
    with pytest.raises(ConnectionAbortedError):
        await one.receive()
    one.send(b"into the void")
    two.close()


async def test_a_reset_reaches_reader_and_writer() -> None:
    one, two = await pair()
    one.send(bytes(32 << 20))
    receiving = asyncio.ensure_future(one.receive())
    flushing = asyncio.ensure_future(one.flush())
    await asyncio.sleep(0.01)
    fd = two.detach()
    with socket.socket(fileno=fd) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    for waiting in (receiving, flushing):
        with pytest.raises(OSError):
            await waiting
    assert one.unsent == 0
    one.close()


async def test_cancelled_waits_leave_the_stream_usable() -> None:
    one, two = await pair()
    for _ in range(20):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(two.receive(), 0.001)
    one.send(b"still there")
    assert await two.receive() == b"still there"
    one.send(bytes(32 << 20))
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(one.flush(), 0.001)
    assert one._flushers == []
    one.close()
    two.close()


async def test_a_peer_that_never_pauses_lets_others_run() -> None:
    one, two = await pair()
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.ensure_future(count())
    one.send(bytes(8 << 20))
    left = 8 << 20
    while left:
        left -= len(await two.receive(4096))
    counting.cancel()
    assert turns > 100
    one.close()
    two.close()


async def test_wait_readable_takes_nothing() -> None:
    one, two = await pair()
    one.send(b"x")
    assert await two.wait_readable()
    assert await two.receive() == b"x"
    one.close()
    assert not await two.wait_readable()
    two.close()


async def test_connect_fails_typed_and_clean() -> None:
    runtime = Runtime()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = Address(*taken.getsockname())
        with no_fd_leaks(), pytest.raises(ConnectionRefusedError):
            await runtime.connect(address)
    with pytest.raises(OSError):
        await runtime.connect(Address("no-such-host.invalid", 1))


async def test_a_socket_connected_to_itself_is_refused() -> None:
    """On a port of the ephemeral range where nobody listens, the kernel may join both ends of one socket."""
    runtime = Runtime()
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    address = sock.getsockname()
    stream = SocketStream(runtime.loop, sock, Address(*address))
    with pytest.raises(ConnectionRefusedError):
        await stream.connect(address)
    stream.close()


async def test_cancelled_connect_closes_its_socket() -> None:
    runtime = Runtime()
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = Address(*full.getsockname())
        kept = [await runtime.connect(address)]
        with no_fd_leaks():
            try:
                # The queue is full soon; then connecting hangs.
                while len(kept) < 10:
                    kept += [await asyncio.wait_for(runtime.connect(address), 0.05)]
            except TimeoutError:
                pass
            else:
                pytest.skip("this kernel queues any number of connections")
            while len(kept) > 1:
                kept.pop().close()
        kept.pop().close()


# Listening. -------------------------------------------------------------------------------------------------


async def test_many_connect_at_once() -> None:
    runtime = Runtime()
    streams: list[Stream] = []
    listener = await runtime.listen(LOCAL, streams.append)
    mine = await asyncio.gather(*(runtime.connect(listener.address) for _ in range(200)))
    await until(lambda: len(streams) == 200)
    for stream in (*mine, *streams):
        stream.close()
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        await runtime.connect(listener.address)


async def test_accepting_pauses_without_descriptors_and_goes_on() -> None:
    runtime = Runtime()
    streams: list[Stream] = []
    listener = await runtime.listen(LOCAL, streams.append)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    client = socket.socket()
    client.setblocking(False)
    calls = 0
    accept = listener._accept  # type: ignore[attr-defined]

    def counted() -> None:
        nonlocal calls
        calls += 1
        accept()

    runtime.loop.remove_reader(listener._fd)  # type: ignore[attr-defined]
    runtime.loop.add_reader(listener._fd, counted)  # type: ignore[attr-defined]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(open_fds()) + 8, hard))
    fillers: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.dup(client.fileno()))
        client.connect_ex(listener.address)
        began = time.monotonic()
        await asyncio.sleep(1.5 * _loop._ACCEPT_PAUSE)
        assert streams == []
        assert calls <= 2 + (time.monotonic() - began) / _loop._ACCEPT_PAUSE
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in fillers:
            os.close(fd)
    await until(lambda: streams)
    streams[0].close()
    client.close()
    listener.close()


async def test_closing_a_pausing_listener_cancels_its_timer() -> None:
    runtime = Runtime()
    listener = await runtime.listen(LOCAL, lambda stream: stream.close())
    listener._stop_accepting()  # type: ignore[attr-defined]
    listener._pause = runtime.loop.call_later(0.01, listener._accept_again)  # type: ignore[attr-defined]
    listener.close()
    await asyncio.sleep(0.03)


async def test_the_port_is_free_again_at_once() -> None:
    runtime = Runtime()
    with reserved_address() as address:
        port = parse_address(address)
        for _ in range(20):
            accepted = runtime.future()
            listener = await runtime.listen(port, accepted.set_result)
            assert listener.address == port
            one = await runtime.connect(port)
            two = await accepted
            two.close()
            one.close()
            listener.close()


async def test_listening_where_somebody_listens_fails() -> None:
    runtime = Runtime()
    listener = await runtime.listen(LOCAL, lambda stream: stream.close())
    with no_fd_leaks(), pytest.raises(OSError) as caught:
        await runtime.listen(listener.address, lambda stream: stream.close())
    assert caught.value.errno == errno.EADDRINUSE
    listener.close()


# Unix channels. ---------------------------------------------------------------------------------------------


async def test_descriptors_travel_and_close_on_exec() -> None:
    one, two = await unix_pair()
    assert one.credentials() == (os.getpid(), os.geteuid())
    read, write = os.pipe()
    await one.send(b"pipe", write)
    os.close(write)
    data, fds = await two.receive()
    assert data == b"pipe"
    (got,) = fds
    assert not os.get_inheritable(got)
    os.write(got, b"through")
    assert os.read(read, 10) == b"through"
    for fd in (read, got):
        os.close(fd)
    assert two.receive_nowait() is None
    one.close()
    assert two.receive_nowait() == (b"", [])
    two.close()


async def test_too_many_descriptors_are_closed_and_refused() -> None:
    one, two = await unix_pair()
    with no_fd_leaks():
        null = os.open("/dev/null", os.O_RDONLY)
        socket.send_fds(one._sock, [b"many"], [null] * 50)
        os.close(null)
        with pytest.raises(OSError, match="do not fit"):
            await two.receive()
    one.close()
    two.close()


async def test_a_full_channel_makes_the_sender_wait() -> None:
    one, two = await unix_pair()

    async def send_all() -> None:
        for number in range(2000):
            await one.send(number.to_bytes(8, "little"))

    sending = asyncio.ensure_future(send_all())
    await asyncio.sleep(0.01)
    assert not sending.done()
    for number in range(2000):
        data, _ = await two.receive()
        assert int.from_bytes(data, "little") == number
    await sending
    one.close()
    two.close()


# Deadlines and tasks. ---------------------------------------------------------------------------------------


async def test_deadline_expires_or_not() -> None:
    with Deadline(0.01) as limit:
        await asyncio.sleep(5)
    assert limit.expired
    with Deadline(5) as limit:
        await asyncio.sleep(0)
    assert not limit.expired
    with Deadline(None) as limit:
        asyncio.get_running_loop().call_later(0.01, limit.cancel)
        await asyncio.sleep(5)
    assert limit.expired


async def test_a_cancel_from_outside_is_no_expiry() -> None:
    async def work() -> None:
        with Deadline(5):
            await asyncio.sleep(5)

    task = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_closed_loop_throws_scopes_away_silently() -> None:
    async def inner() -> None:
        with Deadline(5):
            await asyncio.get_running_loop().create_future()

    async def outer() -> None:
        async with Tasks() as tasks:
            tasks.start(inner)
            await asyncio.get_running_loop().create_future()

    reports: list[dict[str, Any]] = []
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda loop, context: reports.append({"message": context["message"]}))
    task: Any = loop.create_task(outer())
    loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()
    del task
    gc.collect()
    # asyncio's own words; pytest would fail the test if a scope had raised on the way.
    assert {report["message"] for report in reports} <= {"Task was destroyed but it is pending!"}


# Fork. ------------------------------------------------------------------------------------------------------


async def test_a_forked_child_closes_our_sockets_and_touches_nothing_else() -> None:
    one, two = await pair()
    channel, other = await unix_pair()
    runtime = Runtime()
    listener = await runtime.listen(LOCAL, lambda stream: stream.close())
    waiting = asyncio.ensure_future(two.receive())
    await asyncio.sleep(0)
    ours = [one._fd, two._fd, channel._fd, other._fd, listener._fd]  # type: ignore[attr-defined]

    pid = os.fork()
    if not pid:
        try:
            left = [fd for fd in ours if is_open(fd)]
            closed = runtime.closed
            one.send(b"from the child")
            one.close()
            two.close()
            os._exit(0 if not left and closed and _loop.fork_generation() == 1 else 1)
        except BaseException:
            os._exit(2)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert not runtime.closed
    one.send(b"from the parent")
    assert await waiting == b"from the parent"
    for thing in (one, two, channel, other, listener):
        thing.close()
