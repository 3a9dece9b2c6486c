"""The handshake: agreement, identity, same-host proof, and peers that lie, stall or speak something else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from aiodatadist._loop import Runtime, Stream
from aiodatadist.config import Config
from aiodatadist.control import hostproof, reception, wire
from aiodatadist.control.handshake import Channel, Refusal, negotiate, refusal_error
from aiodatadist.datadist import DataDist
from aiodatadist.errors import (
    DataDistError,
    HandshakeError,
    LinkError,
    LinkRefusedError,
    LinkTimeout,
    PeerLostError,
    ProtocolError,
    Status,
    TransportError,
)
from aiodatadist.types import Address, ClusterInfo, LinkState

from .waiting import PATIENCE, until

pytestmark = pytest.mark.loop

LISTEN = "127.0.0.1:0"
# For those that nothing but a limit can end; whoever has to get somewhere in time gets time.
QUICK = Config(handshake_timeout=0.3, link_timeout=2.0, tcp_connections=2)
CALM = Config(handshake_timeout=600.0, link_timeout=600.0, tcp_connections=2)
TCP = Config(transports=("tcp",))


def identity(cluster_id: int = 9, **changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "version": 1,
        "min_version": 1,
        "cluster_id": cluster_id,
        "incarnation": secrets.token_bytes(16),
        "role": 3,
        "listen": [],
        "capabilities": [],
        "transports": ["tcp"],
        "heartbeat_limit": 10.0,
        "notify_credits": 8,
        "notify_max_bytes": 1024,
        "max_message": 1 << 20,
        "tcp_connections": 2,
    }
    return {**fields, **changes}


async def dial(address: Address | None, preamble: wire.Preamble | bytes | None = None) -> Channel:
    """Connect by hand and send a preamble."""
    assert address is not None
    stream = await Runtime().connect(address)
    if preamble is None:
        preamble = wire.Preamble(wire.ConnectionKind.CONTROL)
    stream.send(preamble if isinstance(preamble, bytes) else preamble.pack())
    return Channel(stream)


@contextlib.asynccontextmanager
async def fake_peer(script: Callable[[Channel], Any]) -> AsyncIterator[Address]:
    """Listen and run a script on each control connection."""
    runtime = Runtime()
    tasks: set[asyncio.Task[None]] = set()
    streams: list[Stream] = []

    async def serve(stream: Stream) -> None:
        with contextlib.suppress(OSError, EOFError, DataDistError):
            preamble = wire.Preamble.unpack(await stream.receive_exactly(64))
            if preamble.kind is wire.ConnectionKind.CONTROL:
                await script(Channel(stream))

    def on_stream(stream: Stream) -> None:
        streams.append(stream)
        task = asyncio.ensure_future(serve(stream))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    listener = await runtime.listen(Address("127.0.0.1", 0), on_stream)
    try:
        yield listener.address
    finally:
        listener.close()
        for stream in streams:
            stream.close()
        for task in tuple(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def closed_by_peer(channel: Channel, within: float = PATIENCE) -> None:
    """Wait until the other side has closed the connection."""
    async with asyncio.timeout(within):
        while True:
            try:
                if await channel.receive() is None:
                    break
            except PeerLostError:
                break
    channel.close()


def idle(dd: DataDist) -> None:
    """Check that nothing of a handshake is left."""
    center = dd._center
    assert center.links._handshaker._sessions._sessions == {}
    assert center._host_door._awaited == {}
    assert center._reception._unknown == {}
    assert center.links._incoming == 0
    assert len(center.peers) == 0
    assert len(center.operations) == 0
    assert all(slot.attempt is None and slot.incoming is None for slot in center.links._slots.values())


async def until_idle(dd: DataDist, within: float = PATIENCE) -> None:
    end = time.monotonic() + within
    while True:
        try:
            idle(dd)
        except AssertionError:
            if time.monotonic() > end:
                raise
            await asyncio.sleep(0.01)
        else:
            return


# Agreement. -------------------------------------------------------------------------------------------------


def test_the_lower_version_counts_if_both_speak_it() -> None:
    old = wire.Identity(**identity(1, version=3, min_version=2))
    new = wire.Identity(**identity(2, version=9, min_version=3))
    assert negotiate(old, new).version == negotiate(new, old).version == 3
    newer = wire.Identity(**identity(2, version=9, min_version=4))
    with pytest.raises(Refusal, match=r"cluster 1 speaks versions 2 to 3 .* cluster 2 speaks 4 to 9"):
        negotiate(old, newer)


def test_transports_follow_the_order_of_the_side_that_asks() -> None:
    one = wire.Identity(**identity(1, transports=["shm", "tcp"], tcp_connections=4))
    two = wire.Identity(**identity(2, transports=["tcp", "verbs", "shm"], tcp_connections=3))
    assert negotiate(one, two).transports == ("shm", "tcp")
    assert negotiate(two, one).transports == ("tcp", "shm")
    assert negotiate(one, two).data_connections == negotiate(two, one).data_connections == 3
    with pytest.raises(Refusal, match=r"cluster 1 .*shm, tcp.* cluster 2 .*verbs"):
        negotiate(one, wire.Identity(**identity(2, transports=["verbs"])))


@pytest.mark.parametrize("kind", [*wire.RefusalKind, "of a later version"])
def test_every_refusal_becomes_a_typed_error(kind: str) -> None:
    error = refusal_error(kind, "why", 0x5010B008, 5)
    assert isinstance(error, LinkError)
    assert (error.peer, error.message) == (5, "why")
    assert isinstance(refusal_error(kind, "why", 12345, 5), LinkError)
    assert refusal_error(kind, "why", 0, 5).status != Status.SUCCESS


# The connecting side, against peers by hand. ----------------------------------------------------------------


async def test_another_cluster_id_listens_there() -> None:
    async with DataDist(1, listen=LISTEN) as a, DataDist(2) as b:
        with pytest.raises(HandshakeError, match=r"cluster 7 was meant, but cluster 1 listens") as caught:
            await b.link(ClusterInfo(7, a.listen_address))
        assert caught.value.peer == 7
        await until_idle(a)
        idle(b)


async def test_another_cluster_id_answers_though_it_was_told_whom_is_meant() -> None:
    async def script(channel: Channel) -> None:
        await channel.expect(wire.Hello)
        channel.send(wire.HelloReply(token=bytes(16), **identity(8)))
        await channel.receive()

    async with fake_peer(script) as address, DataDist(2, config=TCP) as b:
        with pytest.raises(HandshakeError, match=r"cluster 7 was meant, but cluster 8 listens"):
            await b.link(ClusterInfo(7, address))
        idle(b)


async def test_nobody_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = free.getsockname()
        async with DataDist(2) as b:
            with pytest.raises(LinkError, match="Connection refused") as caught:
                await b.link(ClusterInfo(1, address))
            assert isinstance(caught.value.__cause__, ConnectionRefusedError)
            assert caught.value.status == Status.LINK_FAILED
            idle(b)


async def test_the_second_address_is_tried() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        async with DataDist(1, listen=LISTEN) as a, DataDist(2) as b:
            assert a.listen_address is not None
            link = await b.link(ClusterInfo(1, [free.getsockname(), a.listen_address]))
            assert link.state is LinkState.READY


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ("connected", "the answer to Hello"),
        ("half a frame", "the answer to Hello"),
        ("replied", "engine"),
    ],
)
async def test_a_silent_peer_runs_into_the_deadline_which_says_where(stage: str, words: str) -> None:
    async def script(channel: Channel) -> None:
        await channel.expect(wire.Hello)
        if stage == "half a frame":
            channel.stream.send(b"\x10\x00")
        if stage == "replied":
            channel.send(wire.HelloReply(token=bytes(16), **identity(7)))
        await asyncio.sleep(30)

    async with DataDist(2, config=TCP) as b, fake_peer(script) as address:
        # A busy machine may need more time to get there.
        for timeout in (0.2, 2.0, 20.0):
            with pytest.raises(LinkTimeout) as caught:
                await b.link(ClusterInfo(7, address), timeout=timeout)
            if words in str(caught.value):
                break
        assert words in str(caught.value)
        assert caught.value.peer == 7
        assert isinstance(caught.value, TimeoutError)
        await until_idle(b)


async def test_t4_all_waiters_fail_when_the_peer_dies_in_the_handshake() -> None:
    """faults.md T4 and H5: the failure reaches every waiter, each with its own exception and the cause."""

    async def script(channel: Channel) -> None:
        await channel.expect(wire.Hello)
        channel.close()

    async with fake_peer(script) as address, DataDist(2, config=TCP) as b:
        links = [b.link(ClusterInfo(7, address)) for _ in range(50)]
        errors = await asyncio.gather(*links, return_exceptions=True)
        assert {type(error) for error in errors} == {PeerLostError}
        assert len({id(error) for error in errors}) == 50
        idle(b)


async def test_h5_the_cause_reaches_each_waiter() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = free.getsockname()
        async with DataDist(2) as b:
            errors: list[Any] = await asyncio.gather(
                *(b.link(ClusterInfo(1, address)) for _ in range(5)), return_exceptions=True
            )
            assert all(isinstance(error.__cause__, ConnectionRefusedError) for error in errors)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0" * 100, b"\xff" * 8, b"\x04\0\0\0abcd"])
async def test_something_else_listens_there(answer: bytes) -> None:
    async def script(channel: Channel) -> None:
        channel.stream.send(answer)
        await asyncio.sleep(30)

    async with DataDist(2, config=TCP) as b, fake_peer(script) as address:
        with pytest.raises(ProtocolError):
            await b.link(ClusterInfo(7, address), timeout=5)
        idle(b)


async def test_a_peer_that_repeats_our_own_incarnation_is_not_taken_for_ourselves() -> None:
    async def script(channel: Channel) -> None:
        hello = await channel.expect(wire.Hello)
        channel.send(wire.HelloReply(token=bytes(16), **identity(7, incarnation=hello.incarnation)))
        await asyncio.sleep(30)

    async with DataDist(2, config=TCP) as b, fake_peer(script) as address:
        with pytest.raises(ProtocolError, match="own incarnation"):
            await b.link(ClusterInfo(7, address))
        idle(b)


async def test_an_unexpected_message() -> None:
    async def script(channel: Channel) -> None:
        channel.send(wire.Ready())
        await asyncio.sleep(30)

    async with DataDist(2, config=TCP) as b, fake_peer(script) as address:
        with pytest.raises(ProtocolError, match="Ready instead of HelloReply"):
            await b.link(ClusterInfo(7, address))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 9, "min_version": 2}, r"speaks versions 1 to 1 .* speaks 2 to 9"),
        ({"transports": ["hixl"]}, r"no transport works between cluster 2 .*tcp.* cluster 7 .*hixl"),
    ],
)
async def test_a_peer_with_which_there_is_no_agreement(changes: dict[str, Any], words: str) -> None:
    refused = asyncio.get_running_loop().create_future()

    async def script(channel: Channel) -> None:
        await channel.expect(wire.Hello)
        channel.send(wire.HelloReply(token=bytes(16), **identity(7, **changes)))
        refused.set_result(await channel.receive())

    async with fake_peer(script) as address, DataDist(2, config=TCP) as b:
        with pytest.raises(HandshakeError, match=words):
            await b.link(ClusterInfo(7, address))
        message = await refused
        assert isinstance(message, wire.Refused)
        assert message.kind in ("version", "transports")


# The listening side, against clients by hand. ---------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [b"", b"ADT", b"GET / HTTP/1.1\r\n" + b"x" * 64, bytes(64), secrets.token_bytes(64)],
    ids=["silent", "half", "http", "zeros", "noise"],
)
async def test_what_is_no_preamble_is_dropped(data: bytes) -> None:
    async with DataDist(1, listen=LISTEN, config=QUICK) as a:
        channel = await dial(a.listen_address, data)
        await closed_by_peer(channel)
        await until_idle(a)


@pytest.mark.parametrize("data", [b"", b"\xff\xff\xff\xff", b"\x10\0\0\0abc", b"\x04\0\0\0abcd"])
async def test_what_is_no_hello_is_dropped(data: bytes) -> None:
    async with DataDist(1, listen=LISTEN, config=QUICK) as a:
        channel = await dial(a.listen_address)
        channel.stream.send(data)
        await closed_by_peer(channel)
        await until_idle(a)


async def test_slow_loris_costs_one_timer() -> None:
    async with DataDist(1, listen=LISTEN, config=QUICK) as a, DataDist(2) as b:

        async def drip() -> None:
            channel = await dial(a.listen_address, b"")
            for byte in wire.Preamble(wire.ConnectionKind.CONTROL).pack():
                channel.stream.send(bytes([byte]))
                await asyncio.sleep(0.02)
            await closed_by_peer(channel)

        dripping = [asyncio.ensure_future(drip()) for _ in range(20)]
        await asyncio.sleep(0.05)
        await b.link(ClusterInfo(1, a.listen_address))
        await asyncio.gather(*dripping, return_exceptions=True)


async def test_above_the_limit_the_oldest_unknown_connection_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reception, "MAX_UNKNOWN", 8)
    async with DataDist(1, listen=LISTEN) as a, DataDist(2) as b:
        silent = [await dial(a.listen_address, b"") for _ in range(20)]
        await b.link(ClusterInfo(1, a.listen_address))
        assert len(a._center._reception._unknown) <= 8
        for channel in silent[:12]:
            await closed_by_peer(channel)
        for channel in silent[12:]:
            channel.close()
        await b.unlink(ClusterInfo(1))
        await until_idle(a)


@pytest.mark.parametrize(
    ("fields", "target", "kind"),
    [
        (identity(9), 5, "identity"),
        (identity(9, version=7, min_version=7), 1, "version"),
        (identity(9, transports=["verbs"]), 1, "transports"),
        (identity(1), 1, "duplicate"),
    ],
    ids=["target", "version", "transports", "duplicate"],
)
async def test_refusals_are_told(fields: dict[str, Any], target: int, kind: str) -> None:
    async with DataDist(1, listen=LISTEN, config=CALM) as a:
        channel = await dial(a.listen_address)
        channel.send(wire.Hello(target=target, **fields))
        message = await channel.receive()
        assert isinstance(message, wire.Refused)
        assert message.kind == kind
        await closed_by_peer(channel)
        await until_idle(a)
        assert a._center.links._slots == {}


async def greet(a: DataDist, **changes: Any) -> tuple[Channel, wire.HelloReply]:
    channel = await dial(a.listen_address)
    channel.send(wire.Hello(target=a.cluster_id, **identity(9, **changes)))
    return channel, await channel.expect(wire.HelloReply)


async def open_connections(a: DataDist, reply: wire.HelloReply) -> list[Channel]:
    kinds = (wire.ConnectionKind.ENGINE, wire.ConnectionKind.DATA)
    return [await dial(a.listen_address, wire.Preamble(kind, 0, reply.token)) for kind in kinds]


@pytest.mark.parametrize(
    "message",
    [
        wire.Agree(transports=["shm"], data_connections=0),
        wire.Agree(transports=[], data_connections=0),
        wire.Agree(transports=["tcp"], data_connections=0),
        wire.Agree(transports=["tcp"], data_connections=5),
        wire.Ready(),
        wire.HostProof(proved=True),
    ],
)
async def test_impossible_choices_end_the_handshake(message: wire.Message) -> None:
    async with DataDist(1, listen=LISTEN, config=CALM) as a:
        channel, _ = await greet(a)
        channel.send(message)
        await closed_by_peer(channel)
        await until_idle(a)


async def test_connections_need_the_token_and_it_is_good_once() -> None:
    async with DataDist(1, listen=LISTEN, config=CALM) as a:
        wrong = await dial(a.listen_address, wire.Preamble(wire.ConnectionKind.ENGINE, 0, secrets.token_bytes(16)))
        await closed_by_peer(wrong)
        channel, reply = await greet(a)
        engine = wire.Preamble(wire.ConnectionKind.ENGINE, 0, reply.token)
        first = await dial(a.listen_address, engine)
        second = await dial(a.listen_address, engine)
        await closed_by_peer(second)
        for preamble in (
            wire.Preamble(wire.ConnectionKind.ENGINE, 1, reply.token),
            wire.Preamble(wire.ConnectionKind.DATA, 4, reply.token),
        ):
            await closed_by_peer(await dial(a.listen_address, preamble))
        channel.send(wire.Agree(transports=["tcp"], data_connections=1))
        data = await dial(a.listen_address, wire.Preamble(wire.ConnectionKind.DATA, 0, reply.token))
        channel.send(wire.Attached())
        await channel.expect(wire.Attached)
        replayed = await dial(a.listen_address, engine)
        await closed_by_peer(replayed)
        for one in (channel, first, data):
            one.close()
        await until_idle(a)


async def test_more_data_connections_than_agreed() -> None:
    async with DataDist(1, listen=LISTEN, config=CALM) as a:
        channel, reply = await greet(a)
        data = [await dial(a.listen_address, wire.Preamble(wire.ConnectionKind.DATA, i, reply.token)) for i in (0, 1)]
        (arrivals,) = a._center.links._handshaker._sessions._sessions.values()
        await until(lambda: len(arrivals.data) == 2)
        channel.send(wire.Agree(transports=["tcp"], data_connections=1))
        channel.send(wire.Attached())
        await closed_by_peer(channel)
        for one in data:
            await closed_by_peer(one)
        await until_idle(a)


@pytest.mark.parametrize("when", ["after Hello", "after Agree", "before Ready"])
async def test_a_client_that_dies_leaves_nothing(when: str) -> None:
    async with DataDist(1, listen=LISTEN) as a:
        channel, reply = await greet(a)
        others: list[Channel] = []
        if when != "after Hello":
            channel.send(wire.Agree(transports=["tcp"], data_connections=1))
        if when == "before Ready":
            others += await open_connections(a, reply)
            channel.send(wire.Attached())
            await channel.expect(wire.Attached)
        for one in (channel, *others):
            one.close()
        await until_idle(a)


@pytest.mark.parametrize("messages", [[wire.Ready()], [wire.Attached(), wire.Ready()], [wire.Attached()] * 2])
async def test_a_client_that_speaks_out_of_turn(messages: list[wire.Message]) -> None:
    async with DataDist(1, listen=LISTEN, config=CALM) as a:
        channel, _ = await greet(a)
        channel.send(wire.Agree(transports=["tcp"], data_connections=1))
        for message in messages:
            channel.send(message)
        await closed_by_peer(channel)
        await until_idle(a)


async def test_a_client_that_never_gets_ready_is_given_up() -> None:
    config = Config(handshake_timeout=60.0, link_timeout=3.0)
    async with DataDist(1, listen=LISTEN, config=config) as a:
        channel, reply = await greet(a)
        channel.send(wire.Agree(transports=["tcp"], data_connections=1))
        others = await open_connections(a, reply)
        channel.send(wire.Attached())
        await channel.expect(wire.Attached)
        await closed_by_peer(channel)
        for one in others:
            one.close()
        await until_idle(a)


async def test_a_listener_that_sends_its_table_before_its_engine_is_there() -> None:
    async def script(channel: Channel) -> None:
        await channel.expect(wire.Hello)
        channel.send(wire.HelloReply(token=bytes(16), **identity(7)))
        await channel.expect(wire.Agree)
        channel.send(wire.TableEnd(version=0))
        await channel.receive()
        await channel.receive()

    async with fake_peer(script) as address, DataDist(2, config=TCP) as b:
        with pytest.raises(ProtocolError, match="before its engine was there"):
            await b.link(ClusterInfo(7, address))
        await until_idle(b)


async def test_a_listener_that_refuses_at_the_end() -> None:
    async def script(channel: Channel) -> None:
        await channel.expect(wire.Hello)
        channel.send(wire.HelloReply(token=bytes(16), **identity(7)))
        await channel.expect(wire.Agree)
        channel.send(wire.Refused(kind="busy", reason="out of descriptors", status=0))
        await channel.receive()
        await channel.receive()

    async with fake_peer(script) as address, DataDist(2, config=TCP) as b:
        with pytest.raises(LinkRefusedError, match="out of descriptors"):
            await b.link(ClusterInfo(7, address))
        await until_idle(b)


# The same host. ---------------------------------------------------------------------------------------------


async def test_two_of_one_host_share_memory() -> None:
    async with DataDist(1, listen=LISTEN) as a, DataDist(2) as b:
        link = await b.link(ClusterInfo(1, a.listen_address))
        await until(lambda: 2 in a.links)
        assert link.path.transport == "shm"
        assert link.path.memory == {"library": "mapped", "ordinary": "process_vm"}
        assert a.links[2].path.transport == "shm"


async def test_a_side_that_does_not_list_shm_gets_tcp_and_the_reason() -> None:
    async with DataDist(1, listen=LISTEN) as a, DataDist(2, config=TCP) as b:
        link = await b.link(ClusterInfo(1, a.listen_address))
        assert link.path.transport == "tcp"
        await until(lambda: 2 in a.links)
        assert a.links[2].path.reasons == {"shm": "the peer does not list it as usable"}


async def test_transports_that_are_not_usable_are_named_with_the_reason() -> None:
    config = Config(transports=("sim", "hixl", "tcp"))
    async with DataDist(1, listen=LISTEN) as a, DataDist(2, config=config) as b:
        link = await b.link(ClusterInfo(1, a.listen_address))
        assert link.path.transport == "tcp"
        assert all(name in link.path.reasons for name in ("sim", "hixl"))
    with pytest.raises(TransportError, match="no transport of Config"):
        await DataDist(3, config=Config(transports=("sim",))).open()


async def test_shm_alone_across_hosts_is_refused_with_both_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    async def elsewhere(*args: Any) -> Any:
        raise hostproof.HostRefused("the peer runs on another host or in another network namespace")

    monkeypatch.setattr("aiodatadist.control.handshake.prove_same_host", elsewhere)
    async with DataDist(1, listen=LISTEN) as a, DataDist(2, config=Config(transports=("shm",))) as b:
        with pytest.raises(HandshakeError, match=r"cluster 2 .*shm.* cluster 1 .*shm, tcp.* another host"):
            await b.link(ClusterInfo(1, a.listen_address))
        await until_idle(a)
        idle(b)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("os.geteuid", lambda: 12345, "runs as user"),
        ("os.pidfd_open", lambda pid: _raise(OSError(3, "No such process")), "pidfd_open"),
        ("os.memfd_create", lambda *args: _raise(OSError(24, "Too many open files")), "Too many open files"),
        ("aiodatadist._loop.HostChannel.credentials", lambda self: (0, os.getuid()), "PID namespace"),
    ],
)
async def test_e8_a_failing_proof_is_a_reason_and_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, value: Any, reason: str
) -> None:
    """faults.md E8: a slow path is visible, and warned about."""
    monkeypatch.setattr(name, value)
    async with DataDist(1, listen=LISTEN) as a, DataDist(2) as b:
        link = await b.link(ClusterInfo(1, a.listen_address))
        assert link.path.transport == "tcp"
        assert reason in link.path.reasons["shm"]
        assert "a slow path to a peer" in caplog.text
        assert reason in caplog.text
        await until(lambda: 2 in a.links)
        assert a.links[2].path.transport == "tcp"
        monkeypatch.undo()
    assert len(a._center.peers) == 0


def _raise(error: OSError) -> Any:
    raise error


async def test_process_vm_refused_leaves_mapped_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from aiodatadist import _core

    monkeypatch.setattr(hostproof, "_core", _Refusing(_core))
    async with DataDist(1, listen=LISTEN) as a, DataDist(2) as b:
        link = await b.link(ClusterInfo(1, a.listen_address))
        assert link.path.transport == "shm"
        assert link.path.memory == {"library": "mapped", "ordinary": "tcp"}
        assert "Operation not permitted" in link.path.reasons["process_vm"]


class _Refusing:
    def __init__(self, core: Any) -> None:
        self._core = core

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def probe_process_vm(self, pid: int, address: int, expected: bytes) -> int:
        return 1


@pytest.mark.parametrize("lie", ["nonce", "no fd", "pipe", "short memfd", "silent", "two fds"])
async def test_lies_at_the_unix_socket(lie: str) -> None:
    """Whoever fails there is told so and gone; the handshake goes on without shm."""
    limits = Config(handshake_timeout=1.0 if lie == "silent" else 600.0, link_timeout=600.0, tcp_connections=2)
    async with DataDist(1, listen=LISTEN, config=limits) as a:
        channel, reply = await greet(a, transports=["shm", "tcp"])
        assert reply.host is not None
        unix = await Runtime().connect_host(reply.host.name)
        memfd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        nonce = secrets.token_bytes(16) if lie == "nonce" else reply.host.nonce
        os.write(memfd, nonce + bytes(32) if lie != "short memfd" else nonce[:4])
        read, write = os.pipe()
        if lie == "no fd":
            await unix.send(b"ADT1")
        elif lie == "pipe":
            await unix.send(b"ADT1", read)
        elif lie == "two fds":
            socket.send_fds(unix._sock, [b"ADT1"], [memfd, memfd])
        elif lie != "silent":
            await unix.send(b"ADT1", memfd)
        data, _ = await asyncio.wait_for(unix.receive(), PATIENCE)
        assert data != b"+"
        for fd in (memfd, read, write):
            os.close(fd)
        unix.close()
        channel.send(wire.HostProof(proved=True, nonce=bytes(16), answer=bytes(16)))
        proof = await channel.expect(wire.HostProof)
        assert not proof.proved
        channel.close()
        await until_idle(a)


async def test_the_unix_and_the_control_connection_must_lead_to_the_same_process() -> None:
    async with DataDist(1, listen=LISTEN, config=CALM) as a:
        channel, reply = await greet(a, transports=["shm", "tcp"])
        assert reply.host is not None
        peer = await hostproof.prove_same_host(Runtime(), reply.host, None, 2.0)
        assert peer.pid == os.getpid()
        channel.send(wire.HostProof(proved=True, nonce=peer.nonce, answer=bytes(16)))
        proof = await channel.expect(wire.HostProof)
        assert not proof.proved
        assert "different processes" in proof.reason
        peer.close()
        channel.close()
        await until_idle(a)


async def test_a_descriptor_that_was_named_but_not_sent() -> None:
    one, two = _seqpacket_pair()
    runtime = Runtime()
    from aiodatadist._loop import HostChannel

    sender = hostproof.HostPeer(HostChannel(runtime.loop, one), 1, -1, b"", b"")
    taker = hostproof.HostPeer(HostChannel(runtime.loop, two), 1, -1, b"", b"")
    null = os.open("/dev/null", os.O_RDONLY)
    numbers = [await sender.send_fd(null) for _ in range(3)]
    assert numbers == [1, 2, 3]
    for number in (2, 1, 3):
        os.close(taker.receive_fd(number))
    with pytest.raises(ProtocolError, match="did not send"):
        taker.receive_fd(4)
    await sender.channel.send(b"nonsense", null)
    with pytest.raises(ProtocolError):
        taker.receive_fd(5)
    await sender.channel.send((9).to_bytes(8, "little"))
    with pytest.raises(ProtocolError, match="0 descriptors"):
        taker.receive_fd(9)
    os.close(null)
    sender.close()
    with pytest.raises(ProtocolError):
        taker.receive_fd(10)
    taker.close()


def _seqpacket_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def test_yama_keeps_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two processes that live, and are nobody's parent: those of a test run in a container may be one and the same.
    living = [subprocess.Popen(["sleep", "1000"]) for _ in range(2)]
    try:
        keeps_one_name(monkeypatch, *(process.pid for process in living))
    finally:
        for process in living:
            process.kill()
            process.wait()


def keeps_one_name(monkeypatch: pytest.MonkeyPatch, alive: int, other: int) -> None:
    named: list[int] = []

    class Core:
        def set_ptracer(self, pid: int) -> int:
            named.append(pid)
            return 0

    monkeypatch.setattr(hostproof, "_core", Core())
    monkeypatch.setattr(hostproof, "_tracer", 0)
    monkeypatch.setattr(hostproof, "ptrace_scope", lambda: 1)
    hostproof.allow_ptracer(os.getpid(), allow_any=False)
    assert named == []
    hostproof.allow_ptracer(alive, allow_any=False)
    hostproof.allow_ptracer(alive, allow_any=False)
    assert named == [alive]
    hostproof.allow_ptracer(other, allow_any=False)
    assert named == [alive]
    hostproof.allow_ptracer(other, allow_any=True)
    assert named == [alive, -1]
    hostproof.allow_ptracer(alive, allow_any=False)
    assert named == [alive, -1]
    monkeypatch.setattr(hostproof, "_tracer", 2**22 - 1)  # a process that is gone
    hostproof.allow_ptracer(other, allow_any=False)
    assert named[-1] == other


def test_hello_of_a_later_version_with_more_fields_is_read() -> None:
    body = msgspec.msgpack.encode({"t": 1, "target": 1, "more": [1, 2], **identity()})
    reader = wire.FrameReader()
    reader.feed(len(body).to_bytes(4, "little") + body)
    assert isinstance(reader.next_message(), wire.Hello)


async def test_closing_refuses_newcomers() -> None:
    async with DataDist(1, listen=LISTEN) as a, DataDist(2) as b:
        a._center.links._closing = True
        with pytest.raises(LinkRefusedError, match="closing"):
            await b.link(ClusterInfo(1, a.listen_address))
        a._center.links._closing = False
