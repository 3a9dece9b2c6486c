"""The cluster key: both ends prove it, nothing is told or kept before, and what was overheard is good for nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aiodatadist as adt
from aiodatadist._loop import Runtime, Stream
from aiodatadist.config import Config
from aiodatadist.control import hostproof, wire
from aiodatadist.control.clusterproof import KeyProof, SessionKey
from aiodatadist.control.handshake import Channel, SessionDoor
from aiodatadist.datadist import DataDist
from aiodatadist.errors import DataDistError, HandshakeError, LinkError, PeerLostError, Status
from aiodatadist.types import Address, ClusterInfo, LinkState

from .test_handshake import LISTEN, closed_by_peer, dial, fake_peer, identity, idle, until_idle
from .waiting import PATIENCE

pytestmark = pytest.mark.loop

KEY, OTHER = b"correct horse battery", b"wrong horse, no battery"
KEYED = Config(cluster_key=KEY)
KEYED_TCP = Config(cluster_key=KEY, transports=("tcp",), handshake_timeout=600.0, link_timeout=600.0)
CHALLENGE = bytes(range(32))
ENGINE, DATA = wire.ConnectionKind.ENGINE, wire.ConnectionKind.DATA


# What is computed. ------------------------------------------------------------------------------------------


def both(key: bytes = KEY, other: bytes = KEY) -> tuple[KeyProof, KeyProof]:
    return KeyProof(key, dialed=True), KeyProof(other, dialed=False)


def talk(connecting: KeyProof, listening: KeyProof, *messages: bytes) -> None:
    """Let the sides say the messages in turn."""
    for turn, message in enumerate(messages):
        (listening if turn % 2 else connecting).said(message)
        (connecting if turn % 2 else listening).heard(message)


def test_x2_sides_with_one_key_agree_and_the_directions_differ() -> None:
    here, there = both()
    talk(here, there, b"hello", b"challenge")
    assert here.mine() == there.theirs() != here.theirs() == there.mine()
    assert here.session_key().host_nonce(bytes(16)) == there.session_key().host_nonce(bytes(16))
    before = here.mine()
    talk(here, there, b"more")
    assert here.mine() == there.theirs() != before


@given(st.lists(st.binary(max_size=20), max_size=5), st.data())
def test_x2_whatever_is_changed_on_the_way_makes_the_proofs_differ(said: list[bytes], data: st.DataObject) -> None:
    heard = data.draw(st.lists(st.binary(max_size=20), max_size=5))
    here, there = KeyProof(KEY, dialed=True), KeyProof(KEY, dialed=False)
    for one in said:
        here.said(one)
    for one in heard:
        there.heard(one)
    assert (here.mine() == there.theirs()) == (said == heard)
    assert here.mine() != there.mine()


def test_x2_another_key_and_another_side_make_the_proofs_differ() -> None:
    here, there = both(KEY, OTHER)
    talk(here, there, b"hello", b"challenge")
    assert here.mine() != there.theirs()
    here.said(b"once more")
    there.said(b"once more")  # both claim to have said it
    assert KeyProof(KEY, dialed=True).mine() != KeyProof(KEY, dialed=False).mine()


def test_x2_seals_name_kind_index_and_token() -> None:
    key = SessionKey(bytes(32))
    macs = {
        key.seal(wire.Preamble(kind, index, token)).mac
        for kind in (ENGINE, DATA)
        for index in (0, 1, 256)
        for token in (bytes(16), secrets.token_bytes(16))
    }
    assert len(macs) == 12
    assert SessionKey(bytes(31) + b"1").seal(wire.Preamble(ENGINE)).mac not in macs


def test_x2_keys_do_not_show() -> None:
    proof = KeyProof(KEY, dialed=True)
    for shown in (repr(proof), str(proof), repr(proof.session_key()), repr(KEYED)):
        assert "horse" not in shown


# Two DataDists. ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["shm", "tcp"])
async def test_x2_both_have_the_key(path: str, caplog: pytest.LogCaptureFixture) -> None:
    config = Config(cluster_key=KEY, transports=(path,))
    async with DataDist(1, listen=LISTEN, config=config) as a, DataDist(2, config=config) as b:
        theirs = a.cache_manager.register_blocks_cache([np.arange(64, dtype=np.uint8)], key=adt.BlocksCacheKey(1))
        mine = b.cache_manager.register_blocks_cache([np.zeros(64, np.uint8)])
        await theirs.ready()
        link = await b.link(ClusterInfo(1, a.listen_address))
        assert link.path.transport == path
        await b.cache_manager.pull_blocks(adt.BlocksCacheKey(1), mine, [5, 9], [0, 1], notify=b"done")
        await b.unlink(ClusterInfo(1))
        assert (await b.link(ClusterInfo(1, a.listen_address))).epoch == 2
    assert "horse" not in caplog.text


async def test_x2_with_a_key_both_sides_may_link_at_once() -> None:
    async with DataDist(1, listen=LISTEN, config=KEYED) as a, DataDist(2, listen=LISTEN, config=KEYED) as b:
        links = await asyncio.gather(a.link(ClusterInfo(2, b.listen_address)), b.link(ClusterInfo(1, a.listen_address)))
        assert [link.state for link in links] == [LinkState.READY] * 2


async def test_x2_with_a_key_a_datadist_links_itself() -> None:
    async with DataDist(1, listen=LISTEN, config=KEYED) as a:
        assert (await a.link(ClusterInfo(1, a.listen_address))).path.transport == "self"


@pytest.mark.parametrize(
    ("listening", "connecting", "words"),
    [
        (KEY, OTHER, "different ones"),
        (KEY, None, "the listening side has a cluster key, and the connecting side none"),
        (None, KEY, "the connecting side has a cluster key, and the listening side none"),
    ],
    ids=["wrong", "missing there", "missing here"],
)
async def test_x2_another_key_is_refused_at_both_sides(
    listening: bytes | None, connecting: bytes | None, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with (
        DataDist(1, listen=LISTEN, config=Config(cluster_key=listening)) as a,
        DataDist(2, config=Config(cluster_key=connecting)) as b,
    ):
        events = a.events()
        with pytest.raises(HandshakeError, match=words) as caught:
            await b.link(ClusterInfo(1, a.listen_address))
        assert caught.value.peer == 1
        assert caught.value.status == Status.LINK_FAILED
        assert caught.value.hint is not None
        assert "Config(cluster_key=...)" in caught.value.hint
        await until_idle(a)
        idle(b)
        assert a._center.links._slots == {} == b._center.links._slots
        assert a.links == {}
        await events.aclose()
    assert "refused a link" in caplog.text
    assert words in caplog.text
    assert "horse" not in caplog.text + str(caught.value)


async def test_d6_h2_a_refused_peer_leaves_the_others_linked() -> None:
    """faults.md D6, H2: who cannot be agreed with is refused, and nothing else happens."""
    async with DataDist(1, listen=LISTEN, config=KEYED) as a, DataDist(2, config=KEYED) as b:
        link = await b.link(ClusterInfo(1, a.listen_address))
        async with DataDist(3, config=Config(cluster_key=OTHER)) as stranger, DataDist(4, config=KEYED) as lost:
            with pytest.raises(HandshakeError):
                await stranger.link(ClusterInfo(1, a.listen_address))
            with pytest.raises(HandshakeError, match="cluster 7 was meant"):
                await lost.link(ClusterInfo(7, a.listen_address))
        # Not even with the linked peer's name.
        async with DataDist(2, config=Config(cluster_key=OTHER)) as impostor:
            with pytest.raises(HandshakeError, match="different ones"):
                await impostor.link(ClusterInfo(1, a.listen_address))
        assert link.state is LinkState.READY
        await b.fence(1)
        await until_linked_only(a, {2})


async def until_linked_only(dd: DataDist, ids: set[int]) -> None:
    while set(dd.links) != ids or dd._center.links._incoming:
        await asyncio.sleep(0.01)


# The listening side, by hand. -------------------------------------------------------------------------------


class Client:
    """A connecting side with the key, one step at a time."""

    def __init__(self, dd: DataDist, channel: Channel, key: bytes | None) -> None:
        self.dd = dd
        self.channel = channel
        self.channel.start_proving(key, dialed=True)

    @classmethod
    async def hello(cls, dd: DataDist, key: bytes | None = KEY, **changes: Any) -> Client:
        client = cls(dd, await dial(dd.listen_address), key)
        challenge = None if key is None else secrets.token_bytes(32)
        client.channel.send(wire.Hello(target=dd.cluster_id, challenge=challenge, **identity(9, **changes)))
        return client

    async def proved(self) -> tuple[wire.HelloReply, SessionKey]:
        await self.channel.expect(wire.Challenge)
        self.channel.prove()
        reply = await self.channel.expect(wire.HelloReply)
        await self.channel.check_proof()
        assert self.channel.key_proof is not None
        return reply, self.channel.key_proof.session_key()

    async def refused(self) -> wire.Refused:
        message = await self.channel.receive()
        assert isinstance(message, wire.Refused)
        await closed_by_peer(self.channel)
        await until_idle(self.dd)
        return message


@contextlib.asynccontextmanager
async def listening(config: Config = KEYED_TCP) -> AsyncIterator[DataDist]:
    async with DataDist(1, listen=LISTEN, config=config) as a:
        yield a
        await until_idle(a)


async def test_x2_before_the_proof_a_client_learns_a_challenge_and_costs_nothing() -> None:
    async with listening(Config(cluster_key=KEY, handshake_timeout=2.0)) as a:
        client = await Client.hello(a, transports=["shm", "tcp"])
        message = await client.channel.expect(wire.Challenge)
        assert message.__struct_fields__ == ("challenge",)
        # No session, no slot, no offer, no handshake that counts; only a connection that the next ones may push out.
        center = a._center
        assert center.links._handshaker._sessions._sessions == {}
        assert center._host_door._awaited == {}
        assert center.links._slots == {}
        assert center.links._incoming == 0
        assert len(center._reception._unknown) == 1
        await closed_by_peer(client.channel)  # the time for the proof is over


async def test_x2_without_a_proof_a_client_gets_little_memory() -> None:
    """Thousands of connections may wait, and each may send a frame. The longest Hello that there can be fits."""
    names = ["n" * 64] * 32
    fields = identity(2**64 - 1, capabilities=names, transports=names, listen=["h" * 300] * 32, max_message=2**32 - 1)
    wire.encode(wire.Hello(target=2**64 - 1, challenge=CHALLENGE, **fields), wire.HELLO_MAX_BYTES)
    async with listening() as a:
        client = await dial(a.listen_address)
        client.stream.send((wire.HELLO_MAX_BYTES + 1).to_bytes(4, "little"))
        await closed_by_peer(client)


@pytest.mark.parametrize(
    "answer",
    [
        wire.Proof(mac=bytes(32)),
        wire.Proof(mac=b"\xff" * 32),
    ],
    ids=["zeros", "ones"],
)
async def test_x2_wrong_proofs_are_refused(answer: wire.Message) -> None:
    async with listening() as a:
        client = await Client.hello(a)
        await client.channel.expect(wire.Challenge)
        client.channel.send(answer)
        refused = await client.refused()
        assert refused.kind == "key"
        assert "1" not in refused.reason  # not even who listens here


@pytest.mark.parametrize("message", [wire.Agree(transports=["tcp"], data_connections=1), wire.Ready(), wire.Attached()])
async def test_x2_the_proof_cannot_be_left_out(message: wire.Message) -> None:
    async with listening() as a:
        client = await Client.hello(a)
        await client.channel.expect(wire.Challenge)
        client.channel.send(message)
        await closed_by_peer(client.channel)


async def test_x2_every_challenge_is_new() -> None:
    async with listening() as a:
        seen = set()
        for _ in range(8):
            client = await Client.hello(a)
            seen.add((await client.channel.expect(wire.Challenge)).challenge)
            client.channel.close()
        assert len(seen) == 8


@contextlib.asynccontextmanager
async def wiretap(target: Address | None, rewrite: Callable[[str, int, bytes], bytes]) -> AsyncIterator[Tap]:
    assert target is not None
    tap = Tap(target, rewrite)
    listener = await tap.runtime.listen(Address("127.0.0.1", 0), tap.on_stream)
    tap.address = listener.address
    try:
        yield tap
    finally:
        listener.close()
        for stream in tap.streams:
            stream.close()
        for task in tap.tasks:
            task.cancel()
        await asyncio.gather(*tap.tasks, return_exceptions=True)


class Tap:
    """Somebody on the way, who reads all and may change frames: `rewrite` gets the side, a count and each body."""

    def __init__(self, target: Address, rewrite: Callable[[str, int, bytes], bytes]) -> None:
        self.runtime = Runtime()
        self.target = target
        self.rewrite = rewrite
        self.address = target
        self.preambles: list[bytes] = []
        self.heard: dict[str, list[bytes]] = {"c": [], "l": []}
        self.streams: list[Stream] = []
        self.tasks: list[asyncio.Task[None]] = []

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.ensure_future(coroutine))

    def on_stream(self, stream: Stream) -> None:
        self.streams.append(stream)
        self.start(self.serve(stream))

    async def serve(self, client: Stream) -> None:
        with contextlib.suppress(OSError, EOFError):
            preamble = bytes(await client.receive_exactly(64))
            self.preambles.append(preamble)
            server = await self.runtime.connect(self.target)
            self.streams.append(server)
            server.send(preamble)
            control = preamble[4] == wire.ConnectionKind.CONTROL
            self.start(self.pump(client, server, "c", control))
            self.start(self.pump(server, client, "l", control))

    async def pump(self, source: Stream, sink: Stream, side: str, control: bool) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                if control:
                    length = int.from_bytes(await source.receive_exactly(4), "little")
                    body = bytes(await source.receive_exactly(length))
                    self.heard[side].append(body)
                    body = self.rewrite(side, len(self.heard[side]) - 1, body)
                    data = len(body).to_bytes(4, "little") + body
                else:
                    data = bytes(await source.receive())
                if not data:
                    break
                sink.send(data)
        sink.close()

    def messages(self, side: str) -> list[wire.Message]:
        return [wire._decoder.decode(body) for body in self.heard[side]]


def changed(number: int, side: str, change: Callable[[Any], wire.Message]) -> Callable[[str, int, bytes], bytes]:
    def rewrite(of: str, at: int, body: bytes) -> bytes:
        if (of, at) != (side, number):
            return body
        return wire._encoder.encode(change(wire._decoder.decode(body)))

    return rewrite


def unchanged(side: str, number: int, body: bytes) -> bytes:
    return body


async def test_x2_the_key_is_never_on_the_wire_and_what_was_overheard_is_refused() -> None:
    async with (
        DataDist(1, listen=LISTEN, config=KEYED_TCP) as a,
        DataDist(2, config=KEYED_TCP) as b,
        wiretap(a.listen_address, unchanged) as tap,
    ):
        link = await b.link(ClusterInfo(1, tap.address))
        said = b"".join(tap.heard["c"] + tap.heard["l"] + tap.preambles)
        assert KEY not in said
        assert [type(message).__name__ for message in tap.messages("c")[:4]] == ["Hello", "Proof", "Agree", "Proof"]
        macs = [message.mac for side in "cl" for message in tap.messages(side) if isinstance(message, wire.Proof)]
        assert len(set(macs)) == 3

        # The whole of what the client said, once more: the challenge is another one.
        replay = await dial(a.listen_address)
        for body in tap.heard["c"]:
            replay.stream.send(len(body).to_bytes(4, "little") + body)
        assert isinstance(await replay.receive(), wire.Challenge)
        refused = await replay.receive()
        assert isinstance(refused, wire.Refused)
        assert refused.kind == "key"
        await closed_by_peer(replay)
        # Engine and data connections, once more: the session's handshake is over.
        for preamble in tap.preambles[1:]:
            await closed_by_peer(await dial(a.listen_address, preamble))
        assert link.state is LinkState.READY
        await b.fence(1)
        await b.unlink(ClusterInfo(1))


async def test_x2_a_listener_that_repeats_what_it_overheard_is_refused() -> None:
    async with DataDist(1, listen=LISTEN, config=KEYED_TCP) as a, DataDist(2, config=KEYED_TCP) as b:
        async with wiretap(a.listen_address, unchanged) as tap:
            await b.link(ClusterInfo(1, tap.address))
            await b.unlink(ClusterInfo(1))

        async def repeat(channel: Channel) -> None:
            await channel.expect(wire.Hello)
            for body in tap.heard["l"]:
                channel.stream.send(len(body).to_bytes(4, "little") + body)
            await asyncio.sleep(30)

        async with fake_peer(repeat) as address:
            with pytest.raises(HandshakeError, match="proof of the cluster key is wrong"):
                await b.link(ClusterInfo(1, address))
        idle(b)


async def test_x2_a_proof_sent_back_is_no_proof() -> None:
    """Reflection: a listener without the key answers with the client's own messages and proofs."""

    async def mirror(channel: Channel) -> None:
        hello = await channel.expect(wire.Hello)
        assert hello.challenge is not None
        channel.send(wire.Challenge(challenge=hello.challenge))
        proof = await channel.expect(wire.Proof)
        channel.send(wire.HelloReply(token=bytes(16), **identity(7)))
        channel.send(proof)
        with contextlib.suppress(DataDistError):
            refusals.append(await channel.receive())
        await asyncio.sleep(30)

    refusals: list[Any] = []
    async with fake_peer(mirror) as address, DataDist(2, config=KEYED_TCP) as b:
        with pytest.raises(HandshakeError, match="proof of the cluster key is wrong"):
            await b.link(ClusterInfo(7, address))
        idle(b)
        while not refusals:
            await asyncio.sleep(0.01)
        assert refusals[0].kind == "key"


@pytest.mark.parametrize("reply", ["plain", "challenged"])
async def test_x2_a_listener_without_the_key_gets_nothing(reply: str) -> None:
    """A listener that leaves the proof out, or makes one up, learns no cache and gets no connection."""

    async def script(channel: Channel) -> None:
        await channel.expect(wire.Hello)
        if reply == "challenged":
            channel.send(wire.Challenge(challenge=CHALLENGE))
            await channel.expect(wire.Proof)
        channel.send(wire.HelloReply(token=bytes(16), **identity(7)))
        if reply == "challenged":
            channel.send(wire.Proof(mac=bytes(32)))
        after.append(await channel.receive())
        await asyncio.sleep(30)

    after: list[Any] = []
    async with fake_peer(script) as address, DataDist(2, config=KEYED_TCP) as b:
        with pytest.raises(HandshakeError, match="cluster key") as caught:
            await b.link(ClusterInfo(7, address))
        assert caught.value.hint is not None
        idle(b)
        while not after:
            await asyncio.sleep(0.01)
        assert isinstance(after[0], wire.Refused)


def altered(**changes: Any) -> Callable[[Any], wire.Message]:
    def change(message: Any) -> wire.Message:
        fields = {name: getattr(message, name) for name in message.__struct_fields__}
        return type(message)(**{**fields, **changes})  # type: ignore[no-any-return]

    return change


@pytest.mark.parametrize(
    ("side", "number", "change"),
    [
        ("c", 0, altered(challenge=None)),
        ("c", 0, altered(challenge=CHALLENGE)),
        ("c", 0, altered(cluster_id=5)),
        ("c", 0, altered(tcp_connections=1)),
        ("c", 0, altered(max_message=1 << 16)),
        ("c", 1, altered(mac=CHALLENGE)),
        ("l", 0, altered(challenge=CHALLENGE)),
        ("l", 1, altered(token=bytes(16))),
        ("l", 1, altered(tcp_connections=1)),
        ("l", 2, altered(mac=CHALLENGE)),
        ("c", 2, altered(data_connections=1)),
        ("c", 3, altered(mac=CHALLENGE)),
    ],
)
async def test_x2_downgrades_and_changes_on_the_way_are_refused(
    side: str, number: int, change: Callable[[Any], wire.Message], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with DataDist(1, listen=LISTEN, config=KEYED_TCP) as a, DataDist(2, config=KEYED_TCP) as b:
        async with wiretap(a.listen_address, changed(number, side, change)) as tap:
            with pytest.raises(LinkError) as caught:
                await b.link(ClusterInfo(1, tap.address))
            # After its last proof the connecting side may see its other connections end before it sees why.
            last = (side, number) in (("c", 2), ("c", 3))
            assert isinstance(caught.value, (HandshakeError, PeerLostError) if last else HandshakeError)
            assert last or "cluster key" in str(caught.value)
        await until_idle(a)
        await until_idle(b)
        assert a.links == b.links == {}
        assert (side == "l" and number > 0) or "kind='key'" in caplog.text
        # And the same two link, when nobody is between them.
        await b.link(ClusterInfo(1, a.listen_address))


async def test_x2_a_change_after_the_first_proofs_is_noticed_by_the_last(caplog: pytest.LogCaptureFixture) -> None:
    """Here somebody takes shared memory off the table."""
    caplog.set_level(logging.INFO)
    config = Config(cluster_key=KEY, handshake_timeout=600.0)
    refuse = altered(proved=False, reason="no")
    async with DataDist(1, listen=LISTEN, config=config) as a, DataDist(2, config=config) as b:
        async with wiretap(a.listen_address, changed(2, "c", refuse)) as tap:
            with pytest.raises((HandshakeError, PeerLostError)):
                await b.link(ClusterInfo(1, tap.address))
        await until_idle(a)
        assert "kind='key'" in caplog.text


# The other connections. -------------------------------------------------------------------------------------


async def test_x2_a_stolen_token_is_good_for_nothing() -> None:
    async with listening() as a:
        client = await Client.hello(a)
        reply, key = await client.proved()
        stolen = reply.token
        other = SessionKey(secrets.token_bytes(32))
        good = key.seal(wire.Preamble(ENGINE, 0, stolen))
        for preamble in (
            wire.Preamble(ENGINE, 0, stolen),
            wire.Preamble(DATA, 0, stolen),
            wire.Preamble(ENGINE, 0, stolen, bytes(31) + b"\1"),
            other.seal(wire.Preamble(ENGINE, 0, stolen)),
            # Macs of other connections of the same session.
            wire.Preamble(ENGINE, 0, stolen, key.seal(wire.Preamble(DATA, 0, stolen)).mac),
            wire.Preamble(DATA, 0, stolen, good.mac),
            wire.Preamble(DATA, 0, stolen, key.seal(wire.Preamble(DATA, 1, stolen)).mac),
            wire.Preamble(ENGINE, 0, secrets.token_bytes(16), good.mac),
        ):
            await closed_by_peer(await dial(a.listen_address, preamble))
        # None of them took the place of the right ones, which work once.
        channel = client.channel
        channel.send(wire.Agree(transports=["tcp"], data_connections=1))
        channel.prove()
        engine = await dial(a.listen_address, good)
        await closed_by_peer(await dial(a.listen_address, good))
        data = await dial(a.listen_address, key.seal(wire.Preamble(DATA, 0, stolen)))
        channel.send(wire.Attached())
        channel.finish(1 << 20, 1 << 20)
        await channel.expect(wire.Attached)
        await closed_by_peer(await dial(a.listen_address, good))
        for one in (channel, engine, data):
            one.close()


async def test_x2_nobody_joins_the_connections_of_a_session_once_all_are_there() -> None:
    door = SessionDoor(Runtime())
    token, arrivals = door.open(3)
    arrivals.expect(1)
    engine, data, late = (Mock(spec=Stream) for _ in range(3))
    door.admit(wire.Preamble(ENGINE, 0, token), engine)
    door.admit(wire.Preamble(DATA, 0, token), data)
    assert arrivals.complete.done()
    door.admit(wire.Preamble(DATA, 1, token), late)
    late.close.assert_called_once()
    assert arrivals.take() == (engine, [data])
    door.shut(token)


async def test_x2_macs_without_a_key_are_refused() -> None:
    async with DataDist(1, listen=LISTEN, config=Config(handshake_timeout=600.0)) as a:
        client = await Client.hello(a, key=None)
        reply = await client.channel.expect(wire.HelloReply)
        preamble = SessionKey(bytes(32)).seal(wire.Preamble(ENGINE, 0, reply.token))
        await closed_by_peer(await dial(a.listen_address, preamble))
        client.channel.close()
        await until_idle(a)


async def test_x2_the_host_nonce_alone_opens_no_unix_socket() -> None:
    """What the handshake says in the clear is not what the memfd has to hold."""
    async with listening(Config(cluster_key=KEY, handshake_timeout=600.0)) as a:
        client = await Client.hello(a, transports=["shm", "tcp"])
        reply, key = await client.proved()
        assert reply.host is not None
        for stolen in (None, SessionKey(secrets.token_bytes(32))):
            with pytest.raises(hostproof.HostRefused, match="not one that was offered"):
                await hostproof.prove_same_host(Runtime(), reply.host, stolen, PATIENCE)
        peer = await hostproof.prove_same_host(Runtime(), reply.host, key, PATIENCE)
        assert peer.pid == os.getpid()
        with pytest.raises(hostproof.HostRefused, match="not one that was offered"):
            await hostproof.prove_same_host(Runtime(), reply.host, key, PATIENCE)
        peer.close()
        client.channel.close()


async def test_h4_a_session_that_is_over_lets_nobody_in() -> None:
    """faults.md H4: what a handshake handed out is worth nothing once it has expired."""
    config = Config(cluster_key=KEY, link_timeout=2.0, handshake_timeout=2.0)
    async with listening(config) as a:
        client = await Client.hello(a, transports=["shm", "tcp"])
        reply, key = await client.proved()
        assert reply.host is not None
        await closed_by_peer(client.channel)
        await closed_by_peer(await dial(a.listen_address, key.seal(wire.Preamble(ENGINE, 0, reply.token))))
        with pytest.raises(hostproof.HostRefused, match="not one that was offered"):
            await hostproof.prove_same_host(Runtime(), reply.host, key, PATIENCE)


async def test_x2_without_a_key_listening_beyond_this_host_warns(caplog: pytest.LogCaptureFixture) -> None:
    async with DataDist(1, listen="0.0.0.0:0", config=KEYED):
        assert "cluster key" not in caplog.text
    async with DataDist(1, listen="0.0.0.0:0", config=Config(cluster_key=None)):
        assert "without a cluster key" in caplog.text
