"""A hostile network: peers that link and then break every rule, and clients that never get that far.

The victim has a good peer all along. After each attack it is open, the good peer's link works, memory that the attacker
may not touch is as it was, the attacker is gone with a typed reason or still bounded, and no descriptor is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import secrets
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

import aiodatadist as adt
from aiodatadist._loop import Stream
from aiodatadist.config import Config
from aiodatadist.control import reception, table, wire
from aiodatadist.control.handshake import Channel
from aiodatadist.datadist import DataDist
from aiodatadist.errors import DataDistError, LinkError, PeerLostError, ProtocolError
from aiodatadist.types import ClusterInfo, LinkState

from . import engine_rig as rig
from .conftest import Scale
from .test_handshake import LISTEN, closed_by_peer, dial, fake_peer, identity
from .test_handshake_key import until_linked_only
from .waiting import PATIENCE

pytestmark = pytest.mark.loop

VICTIM, GOOD, BAD = 1, 2, 9
CONFIG = Config(transports=("tcp",), handshake_timeout=5.0, link_timeout=20.0, tcp_connections=1, drain_timeout=0.05)
OK, BOUNDS, NOT_FOUND, PERMISSION = 0, -3, -2, -4
SECRET, OPEN = 0xA5, 0x11


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


class Scene:
    """The victim, its caches, and its good peer."""

    def __init__(self, victim: DataDist, good: DataDist) -> None:
        self.victim = victim
        self.good = good
        # One array, so that whatever lies between and behind the caches is looked at, too.
        self.memory = np.full(16384, SECRET, np.uint8)
        self.shared = self.memory[1024:2048].reshape(8, 128)
        self.shared[:] = OPEN
        self.readable = self.memory[4096:5120].reshape(8, 128)
        self.readable[:] = OPEN
        self.hidden = self.memory[8192:9216].reshape(8, 128)
        caches = victim.cache_manager
        self.rw = caches.register_blocks_cache([self.shared], key=adt.BlocksCacheKey(VICTIM, 0))
        self.r = caches.register_blocks_cache([self.readable], key=adt.BlocksCacheKey(VICTIM, 1), remote="r")
        self.local = caches.register_blocks_cache([self.hidden], remote=None)
        self.mine = good.cache_manager.register_blocks_cache([np.zeros((8, 128), np.uint8)])
        self.before = self.memory.copy()

    def writable_was_written(self) -> None:
        """Take what the cache that may be written holds now for right."""
        self.before[1024:2048] = self.memory[1024:2048]

    def untouched(self) -> bool:
        return bool((self.memory == self.before).all())

    async def works(self) -> None:
        """The good peer's link does what it is there for."""
        target = self.mine.tensors[0]
        target[:] = 0
        key = adt.BlocksCacheKey(VICTIM, 1)
        while key not in self.good.links[VICTIM].table:
            await asyncio.sleep(0.001)
        await self.good.cache_manager.pull_blocks(key, self.mine, range(8), range(8), timeout=PATIENCE)
        assert bool((target == OPEN).all())
        assert self.victim.links[GOOD].state is LinkState.READY


@contextlib.asynccontextmanager
async def scene(config: Config = CONFIG) -> AsyncIterator[Scene]:
    async with DataDist(VICTIM, listen=LISTEN, config=config) as victim, DataDist(GOOD, config=config) as good:
        made = Scene(victim, good)
        for cache in (made.rw, made.r, made.local, made.mine):
            await cache.ready()
        await good.link(ClusterInfo(VICTIM, victim.listen_address))
        await made.works()
        fds = open_fds()
        yield made
        await made.works()
        assert made.untouched()
        while BAD in victim.links or len(victim._center.peers) > 1 or victim._center.links._incoming:
            await asyncio.sleep(0.005)
        while open_fds() > fds:
            await asyncio.sleep(0.005)


class Attacker:
    """A peer that has linked by hand. `control` speaks messages, `engine` and `data` are raw."""

    def __init__(self, victim: DataDist, control: Channel, engine: Stream, data: Stream) -> None:
        self.victim = victim
        self.control = control
        self.engine = engine
        self.data = data
        self.announced: dict[int, wire.CacheAnnounce] = {}

    async def table(self) -> None:
        """Take the victim's caches, and become ready."""
        control = self.control
        while not isinstance(message := await control.receive(), wire.TableEnd):
            assert isinstance(message, wire.CacheAnnounce)
            self.announced[message.cache_id] = message
        control.send(wire.TableEnd(version=0))
        control.send(wire.Ready())
        await control.expect(wire.Ready)
        while BAD not in self.victim.links:
            await asyncio.sleep(0.001)

    def close(self) -> None:
        for one in (self.control, self.engine, self.data):
            one.close()

    async def ask(self, kind: int, cache: int, runs: list[tuple[int, int, int]], **changes: Any) -> tuple[int, bytes]:
        """Send a request on the data connection: status and bytes of the answer."""
        payload = b"\xee" * sum(run[2] for run in runs)
        self.data.send(rig.request(kind, cache, runs, payload=payload, **changes))
        head = rig.HEADER.unpack(await self.data.receive_exactly(rig.HEADER.size))
        size = head[9]
        if not size:
            return head[4], b""
        got = bytes(await self.data.receive_exactly(size))
        return struct.unpack("<iI", await self.data.receive_exactly(8))[0], got

    async def dropped(self) -> None:
        """Wait until the victim has ended the link and all its connections."""
        await closed_by_peer(self.control)
        for stream in (self.engine, self.data):
            with contextlib.suppress(OSError):
                while await stream.receive():
                    pass
        self.close()


@contextlib.asynccontextmanager
async def attacker(victim: DataDist, *, ready: bool = True, **changes: Any) -> AsyncIterator[Attacker]:
    control = await dial(victim.listen_address)
    control.send(wire.Hello(target=VICTIM, **identity(BAD, tcp_connections=1, **changes)))
    reply = await control.expect(wire.HelloReply)
    control.send(wire.Agree(transports=["tcp"], data_connections=1))
    kinds = (wire.ConnectionKind.ENGINE, wire.ConnectionKind.DATA)
    engine, data = [(await dial(victim.listen_address, wire.Preamble(kind, 0, reply.token))).stream for kind in kinds]
    control.send(wire.Attached())
    await control.expect(wire.Attached)
    control.finish(1 << 22, 1 << 22)
    made = Attacker(victim, control, engine, data)
    try:
        if ready:
            await made.table()
        yield made
    finally:
        made.close()


class Reasons:
    """Why links of the attacker ended, as the victim's events tell."""

    def __init__(self, victim: DataDist) -> None:
        self._events = victim.events()

    async def ended(self) -> adt.LinkStateChanged:
        async for event in self._events:
            if (
                isinstance(event, adt.LinkStateChanged)
                and event.cluster_id == BAD
                and event.new in (LinkState.BROKEN, LinkState.CLOSED)
            ):
                return event
        raise AssertionError("the victim closed")


# The control stream of a ready link. ------------------------------------------------------------------------


def announce(cache_id: int = 1, version: int = 1, **changes: Any) -> wire.CacheAnnounce:
    fields: dict[str, Any] = {
        "dtype": "uint8",
        "itemsize": 1,
        "shape": [8, 128],
        "num_tensors": 1,
        "num_blocks": 8,
        "block_bytes": 128,
        "stride": 128,
    }
    keys = changes.pop("keys", [wire.ExportedKey(transport="tcp", data=b"")])
    model_id = changes.pop("model_id", None)
    geometry = wire.WireGeometry(**{**fields, **changes})
    return wire.CacheAnnounce(
        version=version, cache_id=cache_id, model_id=model_id, access="rw", geometry=geometry, keys=keys
    )


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


def sent(*messages: wire.Message) -> bytes:
    return b"".join(wire.encode(message, 1 << 24) for message in messages)


ID, MAC = bytes(16), bytes(32)
OUT_OF_TURN: dict[str, wire.Message] = {
    "Hello": wire.Hello(target=VICTIM, **identity(BAD)),
    "HelloReply": wire.HelloReply(token=ID, **identity(BAD)),
    "Challenge": wire.Challenge(challenge=MAC),
    "Proof": wire.Proof(mac=MAC),
    "HostProof": wire.HostProof(proved=True),
    "Agree": wire.Agree(transports=["tcp"], data_connections=1),
    "Attached": wire.Attached(),
    "TableEnd": wire.TableEnd(version=0),
    "Ready": wire.Ready(),
    "Refused": wire.Refused(kind="busy", reason="no"),
    "UnlinkAck": wire.UnlinkAck(),
    "Withdraw": wire.CacheWithdraw(version=1, cache_id=1),
}

RULES_BROKEN: dict[str, bytes] = {
    **{f"{name} out of turn": sent(message) for name, message in OUT_OF_TURN.items()},
    "garbage": secrets.token_bytes(4096),
    "zeros": bytes(64),
    "giant frame": b"\xff\xff\xff\xff",
    "no message": frame(b"\x00"),
    "nested": frame(b"\x91" * 4000 + b"\xc0"),
    "unknown message": frame(b"\x81\xa1t\x7f"),
    "notification above the limit": sent(wire.Notify(payload=bytes(1 << 17))),
    "no tensors": sent(announce(num_tensors=0)),
    "blocks overlap": sent(announce(stride=64)),
    "blocks of the wrong size": sent(announce(block_bytes=100)),
    "blocks of the wrong number": sent(announce(num_blocks=9)),
    "an unknown dtype": sent(announce(dtype="complex4096")),
    "an item of the wrong size": sent(announce(itemsize=7)),
    "an overflow": sent(announce(shape=[2**62, 128], num_blocks=2**62)),
    "another overflow": sent(announce(stride=2**63 - 1)),
    "the same cache twice": sent(announce(), announce(version=2)),
    "a model twice": sent(announce(model_id=1), announce(2, 2, model_id=1)),
    "a version that goes back": sent(announce(version=5), announce(2, 4)),
    "a descriptor on tcp": sent(announce(keys=[wire.ExportedKey(transport="tcp", data=b"", fd=3)])),
    "withdrawn twice": sent(announce(), *(wire.CacheWithdraw(version=n, cache_id=1) for n in (2, 3))),
    "more notifications than credits": sent(*(wire.Notify(payload=b"x") for _ in range(300))),
}


@pytest.mark.parametrize("name", RULES_BROKEN)
async def test_x1_a_peer_that_breaks_the_rules_loses_its_link(name: str) -> None:
    async with scene() as it:
        reasons = Reasons(it.victim)
        async with attacker(it.victim) as bad:
            bad.control.stream.send(RULES_BROKEN[name])
            await bad.dropped()
        event = await reasons.ended()
        assert event.new is LinkState.BROKEN
        assert event.reason
        assert BAD not in it.victim.links


async def test_x1_keys_that_lead_nowhere_make_a_cache_unreachable_and_no_more() -> None:
    keys = [
        wire.ExportedKey(transport="shm", data=bytes(1 << 20)),
        wire.ExportedKey(transport="verbs", data=b"x"),
        wire.ExportedKey(transport="", data=b""),
    ]
    async with scene() as it, attacker(it.victim) as bad:
        bad.control.send_limit = 1 << 22
        bad.control.send(announce(keys=keys, model_id=7))
        link = it.victim.links[BAD]
        while adt.BlocksCacheKey(BAD, 7) not in link.table:
            await asyncio.sleep(0.001)
        with pytest.raises(DataDistError):
            await it.victim.cache_manager.pull_blocks(adt.BlocksCacheKey(BAD, 7), it.local, [0], [0])
        assert link.state is LinkState.READY


async def test_x1_credits_without_end_and_floods_leave_the_others_served(scale: Scale) -> None:
    """What a peer may say as often as it likes costs no memory, and the loop goes on."""
    async with scene() as it, attacker(it.victim) as bad:
        many = scale(20_000, least=2000)
        credit = sent(wire.NotifyCredit(count=2**32 - 1)) * 100

        async def flood() -> None:
            for _ in range(many // 100):
                bad.control.stream.send(credit)
                await bad.control.stream.flush()

        flooding = asyncio.ensure_future(flood())
        for _ in range(5):
            await it.works()
        await flooding
        # Caches that come and go.
        for version in range(1, many // 10, 2):
            bad.control.stream.send(
                sent(announce(version, version), wire.CacheWithdraw(version=version + 1, cache_id=version))
            )
            await bad.control.stream.flush()
        last = sent(announce(2**40, 2**40, model_id=3))
        bad.control.stream.send(last)
        while adt.BlocksCacheKey(BAD, 3) not in it.victim.links[BAD].table:
            await asyncio.sleep(0.001)
        assert len(it.victim.links[BAD].table) == 2


async def test_x1_caches_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "MAX_REMOTE_CACHES", 50)
    async with scene() as it:
        reasons = Reasons(it.victim)
        async with attacker(it.victim) as bad:
            bad.control.stream.send(sent(*(announce(number, number) for number in range(1, 60))))
            await bad.dropped()
        assert "more than 50 caches" in (await reasons.ended()).reason


async def test_x1_a_peer_that_never_reads_is_bounded() -> None:
    """Notifications for it wait, and end with the link."""
    generous = {"notify_credits": 2**32 - 1, "notify_max_bytes": 1 << 16}
    async with scene() as it, attacker(it.victim, **generous) as bad:
        bad.control.send(announce(model_id=0))
        key = adt.BlocksCacheKey(BAD, 0)
        while key not in it.victim.links[BAD].table:
            await asyncio.sleep(0.001)
        push = it.victim.cache_manager.push_blocks
        pushes = [push(key, it.rw, [], [], notify=bytes(60_000), timeout=None) for _ in range(500)]
        await it.works()
        assert it.victim.links[BAD]._channel.stream.unsent < 1 << 20
        bad.close()
        ends = {type(end) for end in await asyncio.gather(*pushes, return_exceptions=True)}
        assert PeerLostError in ends
        assert ends <= {type(None), PeerLostError, adt.TransferAborted}


# Out of order, in every state of the handshake. -------------------------------------------------------------

STATES = ("before Hello", "after Hello", "after Agree", "after the connections", "linking")
FITS = {
    "before Hello": {"Hello"},
    # An early Agree is simply right.
    "after Hello": {"Agree"},
    "after Agree": {"Attached"},
    "after the connections": {"Attached"},
    "linking": {"TableEnd", "Ready"},
}


@pytest.mark.parametrize("state", STATES)
async def test_x1_messages_out_of_order_in_every_state(state: str) -> None:
    async with scene() as it:
        address = it.victim.listen_address
        for name, message in OUT_OF_TURN.items():
            if name in FITS[state]:
                continue
            others: list[Channel] = []
            control = await dial(address)
            if state != "before Hello":
                control.send(wire.Hello(target=VICTIM, **identity(BAD, tcp_connections=1)))
                reply = await control.expect(wire.HelloReply)
                if state != "after Hello":
                    control.send(wire.Agree(transports=["tcp"], data_connections=1))
                if state in ("after the connections", "linking"):
                    kinds = (wire.ConnectionKind.ENGINE, wire.ConnectionKind.DATA)
                    others = [await dial(address, wire.Preamble(kind, 0, reply.token)) for kind in kinds]
                if state == "linking":
                    control.send(wire.Attached())
                    await control.expect(wire.Attached)
            control.finish(1 << 20, 1 << 20)
            control.send(message)
            await closed_by_peer(control)
            for other in others:
                other.close()
        assert set(it.victim.links) == {GOOD}


DIALED_STATES = ("instead of HelloReply", "instead of Attached", "while linking")
DIALED_FITS = {
    "instead of HelloReply": {"HelloReply", "Refused"},
    "instead of Attached": {"Attached", "Refused"},
    "while linking": {"TableEnd", "Ready"},
}


@pytest.mark.parametrize("state", DIALED_STATES)
async def test_x1_a_listener_that_speaks_out_of_order(state: str) -> None:
    """The connecting side's caller gets a typed error, and its other links go on."""
    async with scene() as it:
        for name, message in OUT_OF_TURN.items():
            if name in DIALED_FITS[state]:
                continue

            async def script(channel: Channel, message: wire.Message = message) -> None:
                await channel.expect(wire.Hello)
                if state != "instead of HelloReply":
                    channel.send(wire.HelloReply(token=ID, **identity(BAD)))
                    await channel.expect(wire.Agree)
                if state == "while linking":
                    channel.send(wire.Attached())
                channel.send(message)
                while await channel.receive() is not None:
                    pass

            async with fake_peer(script) as address:
                with pytest.raises(LinkError) as caught:
                    await it.victim.link(ClusterInfo(BAD, address), timeout=PATIENCE)
                assert isinstance(caught.value, (ProtocolError, LinkError))
                assert not isinstance(caught.value, TimeoutError), name


# Preambles. -------------------------------------------------------------------------------------------------


async def test_x2_connections_that_claim_every_kind_with_every_token() -> None:
    async with scene() as it, attacker(it.victim) as bad:
        spent = it.victim._center.links._handshaker._sessions
        assert spent._sessions == {}
        tokens = [ID, secrets.token_bytes(16), b"\xff" * 16]
        preambles = [
            struct.pack("<4sBBH16s40s", b"ADT1", kind, version, index, token, rest)
            for kind in (0, 2, 3, 4, 255)
            for version in (0, 1, 2, 255)
            for index in (0, 65535)
            for token in tokens
            for rest in (bytes(40), b"\1" + bytes(39), bytes(39) + b"\1")
        ]
        streams = [await dial(it.victim.listen_address, preamble) for preamble in preambles]
        for channel in streams:
            await closed_by_peer(channel)
        assert it.victim.links[BAD].state is LinkState.READY
        bad.close()


async def test_x2_bytes_after_the_preamble_of_a_stranger_are_never_looked_at() -> None:
    async with scene() as it:
        for kind in (wire.ConnectionKind.ENGINE, wire.ConnectionKind.DATA):
            channel = await dial(it.victim.listen_address, wire.Preamble(kind, 0, secrets.token_bytes(16)))
            with contextlib.suppress(OSError):
                channel.stream.send(rig.request(rig.WRITE_FRAME, it.rw.id, [(0, 0, 64)], payload=b"\xee" * 64))
            await closed_by_peer(channel)


# The engine: data frames and messages. ----------------------------------------------------------------------


async def test_x2_requests_for_what_is_not_theirs() -> None:
    """Outside of registered memory, unregistered caches, the wrong permission."""
    async with scene() as it, attacker(it.victim) as bad:
        assert set(bad.announced) == {it.rw.id, it.r.id}  # the local one is not even named
        everything = [(0, 0, 1024)]
        assert await bad.ask(rig.READ_FRAME, it.r.id, everything) == (OK, bytes([OPEN]) * 1024)
        for runs in (
            [(0, 0, 1025)],
            [(0, 1, 1024)],
            [(0, 2**64 - 1, 1)],
            [(0, 2**64 - 512, 1024)],
            [(1, 0, 1)],
            [(2**32 - 1, 0, 1)],
            [(0, 0, 128), (0, 1024, 1)],
            [(0, 2**63, 128)],
        ):
            for kind in (rig.READ_FRAME, rig.WRITE_FRAME):
                assert await bad.ask(kind, it.rw.id, runs) == (BOUNDS, b"")
        assert await bad.ask(rig.WRITE_FRAME, it.r.id, everything) == (PERMISSION, b"")
        for cache in (it.local.id,):
            for kind in (rig.READ_FRAME, rig.WRITE_FRAME):
                assert (await bad.ask(kind, cache, everything))[0] in (PERMISSION, NOT_FOUND)
        for unknown in (0, 2**32, 2**64 - 1, it.mine.id + 1000):
            assert await bad.ask(rig.READ_FRAME, unknown, everything) == (NOT_FOUND, b"")
        await it.victim.cache_manager.unregister_cache(it.rw)
        assert await bad.ask(rig.WRITE_FRAME, it.rw.id, everything) == (NOT_FOUND, b"")
        assert it.victim.links[BAD].state is LinkState.READY


HALF = rig.request(rig.WRITE_FRAME, 1, [(0, 0, 512)], payload=b"\xee" * 512)
# Where it is sent, what, and whether that alone ends the link.
WRECKS: dict[str, tuple[str, bytes, bool]] = {
    "garbage frames": ("data", secrets.token_bytes(4096), True),
    "giant count": ("data", rig.request(rig.READ_FRAME, 1, [(0, 0, 1)], count=2**32 - 1), True),
    "giant payload": ("data", rig.request(rig.WRITE_FRAME, 1, [(0, 0, 1)], nbytes=2**63), True),
    "http": ("data", b"GET / HTTP/1.1\r\nHost: here\r\nUser-Agent: a browser perhaps\r\n\r\n", True),
    "an answer to nothing": ("data", rig.answer(rig.READ_DONE, 1, payload=b"x" * 8), True),
    "a control message": ("data", sent(wire.Ready()) * 40, True),
    "half a header": ("data", HALF[:20], False),
    "half the runs": ("data", HALF[:60], False),
    "half a payload": ("data", HALF[:200], False),
    "no trailer": ("data", HALF[:-4], False),
    "garbage messages": ("engine", b"\xfe" * 3200, True),
    "half a message": ("engine", rig.message(rig.PING)[:5], False),
    "a preamble again": ("engine", wire.Preamble(wire.ConnectionKind.ENGINE).pack(), True),
    "a lease that ended in no way": ("engine", rig.message(rig.LEASE_OVER, status=-99), True),
    "an answer about no lease": ("engine", rig.message(rig.LEASE_ANSWER, status=-99), True),
    "goodbye at once": ("engine", rig.message(rig.GOODBYE), True),
}


@pytest.mark.parametrize("name", WRECKS)
async def test_x1_frames_and_messages_that_wreck_their_own_link_only(name: str) -> None:
    where, data, ends = WRECKS[name]
    async with scene() as it:
        reasons = Reasons(it.victim)
        async with attacker(it.victim) as bad:
            stream = bad.data if where == "data" else bad.engine
            stream.send(data)
            if ends:
                await bad.dropped()
            else:
                # Half of something is waited for, and costs nobody else anything.
                await it.works()
                assert it.victim.links[BAD].state is LinkState.READY
                stream.close()
                await bad.dropped()
                it.writable_was_written()
        assert (await reasons.ended()).new in (LinkState.BROKEN, LinkState.CLOSED)


async def test_x1_a_flood_of_engine_messages_leaves_the_others_served(scale: Scale) -> None:
    async with scene() as it, attacker(it.victim) as bad:
        kinds = (rig.message(rig.PING, a=1), rig.message(rig.ENDED, status=-6), rig.message(rig.PONG, a=77))
        kinds += (rig.message(rig.ADOPT, a=1), rig.message(rig.RELEASE, a=2), rig.message(rig.RENEW))
        chunk = b"".join(kinds) * 300

        async def flood() -> None:
            with contextlib.suppress(OSError):
                for _ in range(scale(100, least=10)):
                    bad.engine.send(chunk)
                    await bad.engine.flush()

        flooding = asyncio.ensure_future(flood())
        for _ in range(5):
            await it.works()
        bad.close()
        await flooding


# Connections that are only there. ---------------------------------------------------------------------------


@pytest.mark.parametrize("slow", ["preamble", "Hello", "Agree"])
async def test_x2_slow_loris(slow: str) -> None:
    """Time is limited from the first byte, not from the last."""
    config = dataclasses.replace(CONFIG, handshake_timeout=1.0, link_timeout=3.0)
    async with scene(config) as it:
        preamble = wire.Preamble(wire.ConnectionKind.CONTROL).pack()
        agree = sent(wire.Agree(transports=["tcp"], data_connections=1))
        cut: list[int] = []

        async def drip(number: int) -> None:
            hello = sent(wire.Hello(target=VICTIM, **identity(BAD + number)))
            fast, rest = {"preamble": (b"", preamble), "Hello": (preamble, hello), "Agree": (preamble + hello, agree)}[
                slow
            ]
            channel = await dial(it.victim.listen_address, fast)
            for sent_so_far, byte in enumerate(rest):
                try:
                    channel.stream.send(bytes([byte]))
                    await asyncio.sleep(0.1)
                    await channel.stream.flush()
                except OSError:
                    cut.append(sent_so_far)
                    break
            channel.close()

        dripping = [asyncio.ensure_future(drip(number)) for number in range(20)]
        for _ in range(3):
            await it.works()
        await asyncio.gather(*dripping)
        assert len(cut) == 20, "some got to the end"
        await until_linked_only(it.victim, {GOOD})


async def test_x2_the_oldest_without_a_proof_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim to be a control connection, and even a Hello, buys no place among those who have proved the key."""
    monkeypatch.setattr(reception, "MAX_UNKNOWN", 8)
    key = secrets.token_bytes(32)
    config = dataclasses.replace(CONFIG, cluster_key=key)
    async with scene(config) as it, DataDist(3, config=config) as late:
        fds = open_fds()
        claims = [await dial(it.victim.listen_address) for _ in range(30)]
        for channel in claims[10:]:
            channel.start_proving(key, dialed=True)
            hello = wire.Hello(target=VICTIM, challenge=secrets.token_bytes(32), **identity(BAD))
            with contextlib.suppress(OSError):
                channel.send(hello)
        await late.link(ClusterInfo(VICTIM, it.victim.listen_address))
        await it.works()
        assert len(it.victim._center._reception._unknown) <= 8
        assert it.victim._center.links._incoming == 0
        for channel in claims[:20]:
            await closed_by_peer(channel)
        for channel in claims[20:]:
            channel.close()
        await late.unlink(ClusterInfo(VICTIM))
        while open_fds() > fds:
            await asyncio.sleep(0.005)


# Opens connections of several kinds and leaves them there; says how many, and ends with its input.
IDLE = """
import resource, socket, sys
host, port, wanted = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
preamble = bytes.fromhex(sys.argv[4])
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
room = wanted + 64
if soft != resource.RLIM_INFINITY and soft < room:
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (room, max(hard, room)))
    except (ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
open_ones = []
try:
    for number in range(wanted):
        open_ones.append(socket.create_connection((host, port)))
        if number % 2:
            open_ones[-1].send(preamble[: 64 if number % 4 == 1 else 17])
except OSError as why:
    print(why, file=sys.stderr)
print(len(open_ones), flush=True)
sys.stdin.read()
"""


async def test_x2_ten_thousand_idle_connections(scale: Scale) -> None:
    """They cost some memory and time, both bounded; a good peer links meanwhile, and nothing of them stays."""
    wanted = scale(10_000, least=1000)
    async with scene() as it, DataDist(3, config=CONFIG) as late:
        address = it.victim.listen_address
        assert address is not None
        fds, most = open_fds(), 0
        preamble = wire.Preamble(wire.ConnectionKind.CONTROL).pack().hex()
        crowd = subprocess.Popen(
            [sys.executable, "-c", IDLE, address.host, str(address.port), str(wanted), preamble],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert crowd.stdin is not None
        assert crowd.stdout is not None
        counting = asyncio.ensure_future(asyncio.to_thread(crowd.stdout.readline))
        try:
            while not counting.done():
                most = max(most, open_fds())
                await it.works()
                await asyncio.sleep(0.02)
            connected = int(counting.result())
            await late.link(ClusterInfo(VICTIM, address), timeout=30)
            await it.works()
            assert most - fds < reception.MAX_UNKNOWN + 100
            # Those that are left are silent: they cost one timer each, and no time.
            began, clock = time.process_time(), time.monotonic()
            await asyncio.sleep(0.2)
            assert time.process_time() - began < max(0.5 * (time.monotonic() - clock), 0.2)
        finally:
            crowd.stdin.close()
            await counting
            crowd.stdout.close()
            crowd.wait()
        await late.unlink(ClusterInfo(VICTIM))
        while open_fds() > fds or it.victim._center._reception._unknown:
            await asyncio.sleep(0.01)
        if connected < wanted:
            pytest.skip(f"only {connected} of {wanted} connections: the limit of open files forbids more")
