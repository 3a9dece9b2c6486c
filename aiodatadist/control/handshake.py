"""The handshake: who is there, which version and transports, and the connections that the engine gets.

The connecting side (C) and the listening side (L) speak in turn::

    C  Hello                     who I am, whom I mean; with a cluster key a challenge
    L  Challenge                 with a cluster key only, like Proof
    C  Proof
    L  HelloReply | Refused      who I am, session token, where to prove the same host
    L  Proof
    C  HostProof                 only if L offered it; C has been at L's unix socket by now
    L  HostProof
    C  Agree                     the transports; then C opens engine and data connections with the token
    C  Proof
    C  Attached                  C's engine has them
    L  Attached                  all of them have come, and L's engine has them, too

The first Proof stands before all that L says or does for a peer, the second before C goes on, and the last covers
what came after those. Either side may send Refused instead and close. Every step is part of one deadline,
`Session.stage` says which one is under way, and whatever ends a handshake early closes all it has opened. Attached
is sent by the `Link`, which names its caches only when the other's is there. So whoever has a key has an engine that
says goodbye, and a side that gives up before that leaves nothing to wait for.
"""

from __future__ import annotations

import hmac
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from .. import _core
from .._loop import RECEIVE_BYTES, Runtime, Stream, Tasks
from ..errors import (
    DataDistError,
    HandshakeError,
    LinkError,
    LinkRefusedError,
    PeerLostError,
    ProtocolError,
    Status,
)
from ..types import LinkPath, Role
from . import wire
from .clusterproof import KeyProof, SessionKey
from .filelimit import OUT_OF_FILES, file_limit_error
from .hostproof import ELSEWHERE, HostDoor, HostPeer, HostRefused, allow_ptracer, prove_same_host
from .table import DEVICE_TRANSPORTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..config import Config

__all__ = [
    "Agreement",
    "Channel",
    "Crossed",
    "Handshaker",
    "Own",
    "Refusal",
    "Session",
    "SessionDoor",
    "negotiate",
    "refusal_error",
]

_HOST_PROOF_TIMEOUT: Final = 2.0
_KEY_HINT: Final = "give both ends the same Config(cluster_key=...), or none to both"
_SHM: Final = "shm"
_TCP: Final = "tcp"

SHORT_CONNECTIONS: Final = 2
"""Data connections for short requests beside the bulk ones, one for each side's; none beside shm and one or two."""

M = TypeVar("M", bound=wire.Message)


# What both sides are. ---------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False, kw_only=True)
class Own:
    """What a DataDist says about itself.

    Parameters
    ----------
    cluster_id : int
    incarnation : bytes
        Random, one for each opening.
    role : Role
    config : Config
    usable : tuple of str
        The transports of `config` that work here, best first.
    unusable : mapping of str to str
        Why the others do not.
    secret : _core.Secret
        For the peer's process_vm probe.
    listen : tuple of str
        Where it listens; empty while it does not.
    changes : int
        How often role or listening have changed.
    """

    cluster_id: int
    incarnation: bytes
    role: Role
    config: Config
    usable: tuple[str, ...]
    unusable: Mapping[str, str]
    secret: _core.Secret
    listen: tuple[str, ...] = ()
    changes: int = 0

    def fields(self, notify_credits: int) -> dict[str, Any]:
        """Return the fields of an `Identity` message."""
        config = self.config
        return {
            "version": wire.PROTOCOL_VERSION,
            "min_version": wire.MIN_PROTOCOL_VERSION,
            "cluster_id": self.cluster_id,
            "incarnation": self.incarnation,
            "role": int(self.role),
            "listen": list(self.listen),
            "capabilities": ["layers", "leases"],
            "transports": list(self.usable),
            "heartbeat_limit": config.heartbeat_limit,
            "notify_credits": notify_credits,
            "notify_max_bytes": config.notify_max_bytes,
            "max_message": config.control_max_bytes,
            "tcp_connections": config.tcp_connections,
        }


class Refusal(Exception):
    """Ends a handshake; the peer is told why."""

    def __init__(self, kind: wire.RefusalKind, reason: str, status: Status = Status.LINK_FAILED) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason
        self.status = status

    def message(self) -> wire.Refused:
        """Return what the peer is sent."""
        return wire.Refused(kind=self.kind.value, reason=self.reason[:1000], status=int(self.status))


class Crossed(LinkRefusedError):
    """Both sides link each other at once, and the peer's connection is the one that counts."""


def refusal_error(kind: str, reason: str, status: int, peer: int | None) -> DataDistError:
    """Return the error that a refusal becomes."""
    try:
        known = Status(status)
    except ValueError:
        known = Status.LINK_FAILED
    if known is Status.SUCCESS:
        known = Status.LINK_FAILED  # whatever the peer says, it is an error
    match kind:
        case wire.RefusalKind.VERSION | wire.RefusalKind.IDENTITY | wire.RefusalKind.TRANSPORTS:
            return HandshakeError(reason, peer=peer)
        case wire.RefusalKind.KEY:
            return HandshakeError(reason, peer=peer, hint=_KEY_HINT)
        case wire.RefusalKind.CROSSED:
            return Crossed(reason, peer=peer)
        case wire.RefusalKind.DUPLICATE:
            return LinkRefusedError(
                reason,
                peer=peer,
                status=Status.ALREADY_LINK,
                hint="give every DataDist a cluster id of its own",
            )
        case _:
            return LinkRefusedError(reason, peer=peer, status=known)


@dataclass(frozen=True, slots=True)
class Agreement:
    """What two identities have in common.

    Parameters
    ----------
    version : int
    transports : tuple of str
        In the order of the side that asks; shm still has to be proved.
    data_connections : int
        0 without tcp.
    """

    version: int
    transports: tuple[str, ...]
    data_connections: int


def negotiate(own: wire.Identity, theirs: wire.Identity) -> Agreement:
    """Find what both sides have in common.

    Raises
    ------
    Refusal
        Nothing: both sides' versions or transports are named.
    """
    version = min(own.version, theirs.version)
    if version < max(own.min_version, theirs.min_version):
        raise Refusal(
            wire.RefusalKind.VERSION,
            f"cluster {own.cluster_id} speaks versions {own.min_version} to {own.version} of the protocol, "
            f"cluster {theirs.cluster_id} speaks {theirs.min_version} to {theirs.version}",
        )
    transports = tuple(name for name in own.transports if name in theirs.transports)
    if not transports:
        raise _no_transport(own, theirs)
    connections = min(own.tcp_connections, theirs.tcp_connections) if _TCP in transports else 0
    return Agreement(version, transports, connections)


def _no_transport(own: wire.Identity, theirs: wire.Identity, why: str = "") -> Refusal:
    return Refusal(
        wire.RefusalKind.TRANSPORTS,
        f"no transport works between cluster {own.cluster_id} (usable there: "
        f"{', '.join(own.transports) or 'none'}) and cluster {theirs.cluster_id} (usable there: "
        f"{', '.join(theirs.transports) or 'none'}){why and '; shm: '}{why}",
    )


# The control stream. ----------------------------------------------------------------------------------------


class Channel:
    """Messages over a stream.

    Attributes
    ----------
    stream : Stream
    peer : int or None
        Cluster id, for errors; None until it is known.
    send_limit : int
        Longest message that the peer accepts.
    key_proof : KeyProof or None
        While a handshake with a cluster key is under way: takes note of all messages.
    """

    def __init__(
        self, stream: Stream, peer: int | None = None, *, receive_limit: int = wire.HANDSHAKE_MAX_BYTES
    ) -> None:
        self.stream = stream
        self.peer = peer
        self.send_limit = wire.HANDSHAKE_MAX_BYTES
        self.key_proof: KeyProof | None = None
        self._frames = wire.FrameReader(receive_limit)

    def start_proving(self, key: bytes | None, *, dialed: bool) -> None:
        """Call before the first message of a handshake."""
        if key is not None:
            self.key_proof = KeyProof(key, dialed=dialed)
            self._frames.on_taken = self.key_proof.heard

    def prove(self) -> None:
        """Send a proof of the cluster key over all that was said so far, if there is one."""
        if self.key_proof is not None:
            self.send(wire.Proof(mac=self.key_proof.mine()))

    async def check_proof(self) -> None:
        """Wait for the peer's proof of the cluster key over all that was said so far, if there is one.

        Raises
        ------
        Refusal
            The peer has another key, or somebody between the two changed what was said.
        """
        if self.key_proof is None:
            return
        wanted = self.key_proof.theirs()
        proof = await self.expect(wire.Proof)
        if not hmac.compare_digest(proof.mac, wanted):
            raise Refusal(wire.RefusalKind.KEY, "the proof of the cluster key is wrong: the sides have different ones")

    def finish(self, send: int, receive: int) -> None:
        """End the handshake: set the longest messages for after it, and take no more notes."""
        self.send_limit = send
        self._frames.limit = receive
        self._frames.on_taken = self.key_proof = None

    def send(self, message: wire.Message) -> None:
        """Send now, or when there is room.

        Raises
        ------
        ProtocolError
            The message is longer than the peer accepts.
        """
        frame = wire.encode(message, self.send_limit)
        if self.key_proof is not None:
            self.key_proof.said(frame[wire.LENGTH_SIZE :])
        self.stream.send(frame)

    @property
    def has_more(self) -> bool:
        """Whether more has been received than was asked for."""
        return self._frames.pending > 0

    async def receive(self) -> wire.AnyMessage | None:
        """Return the next message; None when the peer has closed the connection.

        Raises
        ------
        PeerLostError
            The connection broke, also in the middle of a message.
        ProtocolError
            What came is no message.
        """
        while True:
            message = self._frames.next_message()
            if message is not None:
                return message
            try:
                data = await self.stream.receive(min(RECEIVE_BYTES, self._frames.limit))
            except OSError as why:
                raise PeerLostError(f"the control connection broke: {why.strerror or why}", peer=self.peer) from why
            if not data:
                if self._frames.pending:
                    raise PeerLostError("the control connection broke inside a message", peer=self.peer)
                return None
            self._frames.feed(data)

    async def expect(self, *kinds: type[M]) -> M:
        """Return the next message of the handshake, which must be of one of these kinds.

        Raises
        ------
        DataDistError
            The peer refused, closed, or sent something else.
        """
        wanted = kinds[0].__name__
        message = await self.receive()
        if isinstance(message, kinds):
            return message
        if message is None:
            raise PeerLostError(f"{self.stream.peer} closed the connection instead of sending {wanted}", peer=self.peer)
        if isinstance(message, wire.Refused):
            raise refusal_error(message.kind, message.reason, message.status, self.peer)
        raise ProtocolError(f"the peer sent {type(message).__name__} instead of {wanted}", peer=self.peer)

    def close(self) -> None:
        """Close the connection."""
        self.stream.close()


# A session, from Hello to the link. -------------------------------------------------------------------------


class Session:
    """A handshake under way, or done: what it knows and what it holds.

    Attributes
    ----------
    channel : Channel
    theirs : wire.Identity
    granted : int
        Notification credits that the peer was given.
    stage : str
        What the handshake does or waits for.
    transports : tuple of str
        Agreed, in this side's order.
    dropped : dict
        Why transports that were agreed are not used.
    host : HostPeer or None
        The peer on the same host, if shm is agreed.
    peer_attached : bool
        Whether the peer's engine is known to have its connections.
    dialed : bool
        This side opened the connections.
    key : SessionKey or None
        With a cluster key, once it is proved: binds the other connections to this session.
    """

    def __init__(self, channel: Channel, *, granted: int, dialed: bool = False) -> None:
        self.channel = channel
        self.dialed = dialed
        self.key: SessionKey | None = None
        self.granted = granted
        self.stage = "connecting"
        self.theirs: wire.Identity | None = None
        self.peer_attached = False
        self.transports: tuple[str, ...] = ()
        self.host: HostPeer | None = None
        self.host_reason = ""
        self.dropped: dict[str, str] = {}
        self.engine: Stream | None = None
        self.data: list[Stream] = []

    @property
    def peer(self) -> wire.Identity:
        """The peer's identity, once it is known."""
        assert self.theirs is not None
        return self.theirs

    def drop_shm(self, reason: str) -> None:
        """Go on without shm."""
        self.host_reason = reason
        self.transports = tuple(name for name in self.transports if name != _SHM)
        if self.host is not None:
            self.host.close()
            self.host = None

    def drop(self, name: str, reason: str) -> None:
        """Go on without a transport that was agreed and does not work after all."""
        if name in self.transports:
            self.transports = tuple(other for other in self.transports if other != name)
            self.dropped[name] = reason

    def take_connections(self) -> tuple[int, list[int]]:
        """Give the engine's descriptors away."""
        assert self.engine is not None
        engine, data = self.engine.detach(), [stream.detach() for stream in self.data]
        self.engine, self.data = None, []
        return engine, data

    def path(self, own: Own) -> LinkPath:
        """Return which transport the link uses, and why no other."""
        reasons = {}
        memory = {}
        for name in own.config.transports:
            if name in self.transports:
                continue
            if name in self.dropped:
                reasons[name] = self.dropped[name]
            elif name in own.unusable:
                reasons[name] = f"not usable here: {own.unusable[name]}"
            elif name not in self.peer.transports:
                reasons[name] = "the peer does not list it as usable"
            else:
                reasons[name] = self.host_reason or "the peer decided against it"
        if self.transports[0] == _SHM and self.host is not None:
            memory["library"] = "mapped"
            if self.host.process_vm:
                memory["ordinary"] = "process_vm"
            else:
                reasons["process_vm"] = self.host.process_vm_reason
                memory["ordinary"] = self.transports[1] if len(self.transports) > 1 else "none"
        reaching = [name for name in own.config.transports if name in DEVICE_TRANSPORTS]
        if reaching:
            memory["device"] = next((name for name in reaching if name in self.transports), "none")
        return LinkPath(self.transports[0], memory, reasons)

    def slow_path(self) -> str:
        """Return why the link is slower than two processes of one host could expect; empty if it is not."""
        if self.host is not None:
            return self.host.process_vm_reason
        return "" if ELSEWHERE in self.host_reason else self.host_reason

    def close(self) -> None:
        """Close whatever was not given away."""
        self.channel.close()
        self.drop_connections()

    def drop_connections(self) -> None:
        """Close all but the control connection."""
        if self.host is not None:
            self.host.close()
        for stream in (self.engine, *self.data):
            if stream is not None:
                stream.close()
        self.engine, self.data = None, []


# Engine and data connections that come in. ------------------------------------------------------------------


class _Arrivals:
    """The connections of one session on the listening side."""

    def __init__(self, runtime: Runtime, most: int) -> None:
        self._most = most
        self._expected: int | None = None
        self.key: SessionKey | None = None
        self.engine: Stream | None = None
        self.data: dict[int, Stream] = {}
        self.complete = runtime.future()

    def add(self, preamble: wire.Preamble, stream: Stream) -> bool:
        mac = wire.NO_MAC if self.key is None else self.key.seal(preamble).mac
        if not hmac.compare_digest(preamble.mac, mac):
            return False
        if self.complete.done():
            return False  # the agreed ones are there, and about to be taken
        if preamble.kind is wire.ConnectionKind.ENGINE:
            if self.engine is not None or preamble.index:
                return False
            self.engine = stream
        else:
            if preamble.index in self.data or preamble.index >= self._most:
                return False
            self.data[preamble.index] = stream
        self._check()
        return True

    def expect(self, data_connections: int) -> None:
        self._expected = data_connections
        self._check()

    def _check(self) -> None:
        if self._expected is None or self.complete.done():
            return
        if any(index >= self._expected for index in self.data):
            self.complete.set_exception(ProtocolError("the peer opened more data connections than agreed"))
        elif self.engine is not None and len(self.data) == self._expected:
            self.complete.set_result(None)

    def take(self) -> tuple[Stream, list[Stream]]:
        assert self.engine is not None
        engine, data = self.engine, [self.data[index] for index in sorted(self.data)]
        self.engine, self.data = None, {}
        return engine, data

    def close(self) -> None:
        for stream in (self.engine, *self.data.values()):
            if stream is not None:
                stream.close()
        if not self.complete.cancel() and not self.complete.cancelled():
            self.complete.exception()  # nobody may have come to see it


class SessionDoor:
    """Sorts incoming engine and data connections to the handshakes that wait for them."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._sessions: dict[bytes, _Arrivals] = {}

    def open(self, most: int) -> tuple[bytes, _Arrivals]:
        """Make a session token, good for one engine connection and up to `most` data connections."""
        token = self._runtime.chance.randbytes(wire.ID_SIZE)
        self._sessions[token] = arrivals = _Arrivals(self._runtime, most)
        return token, arrivals

    def shut(self, token: bytes) -> None:
        """Forget a token and close what came with it and was not taken."""
        self._sessions.pop(token).close()

    def admit(self, preamble: wire.Preamble, stream: Stream) -> None:
        """Take a connection in, or close it."""
        arrivals = self._sessions.get(preamble.token)
        if arrivals is None or not arrivals.add(preamble, stream):
            stream.close()


# Both sides of the handshake. -------------------------------------------------------------------------------


class Handshaker:
    """Runs handshakes of one DataDist, in both directions.

    Parameters
    ----------
    runtime : Runtime
    own : Own
    sessions : SessionDoor
    host_door : HostDoor
    """

    def __init__(self, runtime: Runtime, own: Own, sessions: SessionDoor, host_door: HostDoor) -> None:
        self._runtime = runtime
        self.own = own
        self._sessions = sessions
        self._host_door = host_door

    # The connecting side.

    async def connect(self, session: Session, cluster_id: int) -> bool:
        """Run the handshake on a connection that was just made.

        Parameters
        ----------
        session : Session
            Holds what the handshake opens; the caller closes it if this raises or is cancelled.
        cluster_id : int
            The peer that is meant.

        Returns
        -------
        bool
            False: the other end is this very DataDist, and the handshake went no further.

        Raises
        ------
        DataDistError
            The peer refused, is another one, cannot be agreed with, or is gone.
        """
        try:
            return await self._connect(session, cluster_id)
        except Refusal as why:
            session.channel.send(why.message())
            raise refusal_error(why.kind, why.reason, why.status, cluster_id) from None

    async def _connect(self, session: Session, cluster_id: int) -> bool:
        channel = session.channel
        key = self.own.config.cluster_key
        challenge = None if key is None else self._runtime.chance.randbytes(wire.MAC_SIZE)
        channel.start_proving(key, dialed=True)
        channel.stream.send(wire.Preamble(wire.ConnectionKind.CONTROL).pack())
        mine = wire.Hello(target=cluster_id, challenge=challenge, **self.own.fields(session.granted))
        channel.send(mine)
        session.stage = "waiting for the answer to Hello"
        if key is not None:
            answer = await channel.expect(wire.Challenge, wire.HelloReply)
            if isinstance(answer, wire.HelloReply):
                raise Refusal(wire.RefusalKind.KEY, "the listening side asked for no proof of the cluster key")
            channel.prove()
        reply = await channel.expect(wire.HelloReply)
        await channel.check_proof()
        if reply.cluster_id != cluster_id:
            where = channel.stream.peer
            raise HandshakeError(
                f"cluster {cluster_id} was meant, but cluster {reply.cluster_id} listens at {where}",
                peer=cluster_id,
                hint="check cluster id and address",
            )
        if reply.incarnation == self.own.incarnation:
            if cluster_id != self.own.cluster_id:
                raise ProtocolError("the peer calls itself by this DataDist's own incarnation", peer=cluster_id)
            return False
        session.theirs = reply
        session.key = None if channel.key_proof is None else channel.key_proof.session_key()
        agreed = negotiate(mine, reply)
        session.transports = agreed.transports
        if _SHM in agreed.transports:
            await self._prove_to(session, reply.host)
        if not session.transports:
            raise _no_transport(mine, reply, session.host_reason)
        count = agreed.data_connections if _TCP in session.transports else 0
        # Beside shm two do without; of more the engine keeps two for short requests whatever else there is.
        if count and (_SHM not in session.transports or count > SHORT_CONNECTIONS):
            count += SHORT_CONNECTIONS
        channel.send(wire.Agree(transports=list(session.transports), data_connections=count))
        channel.prove()
        session.stage = "opening engine and data connections"
        await self._open_connections(session, reply.token, count)
        channel.finish(reply.max_message, self.own.config.control_max_bytes)
        return True

    async def _prove_to(self, session: Session, offer: wire.HostOffer | None) -> None:
        if offer is None:
            session.drop_shm("the peer offers no same-host proof")
            return
        session.stage = "proving the same host"
        channel = session.channel
        try:
            session.host = await prove_same_host(self._runtime, offer, session.key, _HOST_PROOF_TIMEOUT)
        except HostRefused as why:
            session.drop_shm(str(why))
            channel.send(wire.HostProof(proved=False, reason=str(why)[:1000]))
        else:
            channel.send(self._host_proof(session.host))
        session.stage = "waiting for the peer's same-host proof"
        proof = await channel.expect(wire.HostProof)
        self._check_proof(session, proof)

    def _host_proof(self, host: HostPeer) -> wire.HostProof:
        # Before the peer probes: it does so when it has this message.
        allow_ptracer(host.pid, allow_any=self.own.config.allow_any_ptracer)
        secret = self.own.secret
        return wire.HostProof(
            proved=True, nonce=host.nonce, answer=host.answer, address=secret.address, secret=secret.value
        )

    def _check_proof(self, session: Session, proof: wire.HostProof) -> None:
        if session.host is None:
            return
        if not proof.proved:
            session.drop_shm(f"the peer found no proof of the same host: {proof.reason}")
        elif (proof.nonce, proof.answer) != (session.host.nonce, session.host.answer):
            session.drop_shm("the unix connection and the control connection lead to different processes")
        else:
            session.host.probe(proof.address, proof.secret)

    async def _open_connections(self, session: Session, token: bytes, count: int) -> None:
        address = session.channel.stream.remote
        wanted = [wire.Preamble(wire.ConnectionKind.ENGINE, 0, token)]
        wanted += [wire.Preamble(wire.ConnectionKind.DATA, index, token) for index in range(count)]
        if session.key is not None:
            wanted = [session.key.seal(preamble) for preamble in wanted]
        streams: dict[int, Stream] = {}
        failures: list[OSError] = []

        async def open_one(number: int, preamble: wire.Preamble) -> None:
            try:
                streams[number] = stream = await self._runtime.connect(address)
                stream.send(preamble.pack())
                await stream.flush()
            except OSError as why:
                failures.append(why)

        try:
            async with Tasks() as tasks:
                for number, preamble in enumerate(wanted):
                    tasks.start(open_one, number, preamble, name="aiodatadist-connect")
        finally:
            session.engine = streams.pop(0, None)
            session.data = [streams[number] for number in sorted(streams)]
        if failures:
            why = failures[0]
            if why.errno in OUT_OF_FILES:
                raise file_limit_error(os.strerror(why.errno), session.peer.cluster_id) from why
            raise LinkError(
                f"cannot open engine and data connections to {address}: {why.strerror or why}",
                peer=session.peer.cluster_id,
            ) from why

    # The listening side.

    async def welcome(self, channel: Channel) -> wire.Hello:
        """Return the Hello of a control connection. With a cluster key, the peer has proved it then.

        Until it has, it is told nothing, and nothing is kept for it.

        Raises
        ------
        Refusal
            It has no key, another one, or one where there is none.
        DataDistError
            The peer is gone or breaks the protocol.
        """
        key = self.own.config.cluster_key
        channel.start_proving(key, dialed=False)
        hello = await channel.expect(wire.Hello)
        if (hello.challenge is None) != (key is None):
            having, lacking = ("connecting", "listening") if key is None else ("listening", "connecting")
            raise Refusal(wire.RefusalKind.KEY, f"the {having} side has a cluster key, and the {lacking} side none")
        if key is not None:
            channel.send(wire.Challenge(challenge=self._runtime.chance.randbytes(wire.MAC_SIZE)))
            await channel.check_proof()
        return hello

    async def accept(self, session: Session, hello: wire.Hello) -> None:
        """Run the handshake after a Hello that is to be accepted.

        Parameters
        ----------
        session : Session
            As in `connect`.
        hello : wire.Hello

        Raises
        ------
        Refusal
            The peer is to be told.
        DataDistError
            The peer is gone or breaks the protocol.
        """
        channel = session.channel
        config = self.own.config
        session.theirs = hello
        token, arrivals = self._sessions.open(config.tcp_connections + SHORT_CONNECTIONS)
        offer: wire.HostOffer | None = None
        awaited = b""
        proved: list[HostPeer] = []
        try:
            fields = self.own.fields(session.granted)
            mine = wire.Identity(**fields)
            session.transports = negotiate(mine, hello).transports
            if _SHM in session.transports:
                offer = self._host_door.offer()
            channel.send(wire.HelloReply(token=token, host=offer, **fields))
            channel.prove()
            if channel.key_proof is not None:
                session.key = arrivals.key = channel.key_proof.session_key()
            if _SHM in session.transports:
                if offer is None:
                    session.drop_shm("this side offers no same-host proof")
                else:
                    awaited = self._host_door.expect(offer, session.key, proved.append)
                    session.stage = "waiting for the peer's same-host proof"
                    await self._await_proof(session, proved)
            session.stage = "waiting for the peer's choice of transports"
            agree = await channel.expect(wire.Agree)
            await channel.check_proof()
            self._check_agree(session, agree)
            session.stage = "waiting for engine and data connections"
            arrivals.expect(agree.data_connections)
            await channel.expect(wire.Attached)
            session.peer_attached = True
            await _unless_gone(channel, arrivals)
            session.engine, session.data = arrivals.take()
            channel.finish(hello.max_message, config.control_max_bytes)
        finally:
            self._sessions.shut(token)
            self._host_door.withdraw(awaited)
            for peer in proved:
                if peer is not session.host:
                    peer.close()

    async def _await_proof(self, session: Session, proved: list[HostPeer]) -> None:
        proof = await session.channel.expect(wire.HostProof)
        if not proof.proved:
            session.drop_shm(f"the peer found no proof of the same host: {proof.reason}")
        elif not proved:
            session.drop_shm("nobody came to the unix socket")
        else:
            session.host = proved[0]
            self._check_proof(session, proof)
        if session.host is not None:
            session.channel.send(self._host_proof(session.host))
        else:
            session.channel.send(wire.HostProof(proved=False, reason=session.host_reason[:1000]))

    def _check_agree(self, session: Session, agree: wire.Agree) -> None:
        chosen = tuple(name for name in session.transports if name in agree.transports)
        if set(agree.transports) - set(chosen):
            raise ProtocolError(
                f"the peer chose {', '.join(agree.transports)} out of {', '.join(session.transports)}",
                peer=session.peer.cluster_id,
            )
        if _SHM not in chosen and session.host is not None:
            session.drop_shm("the peer decided against it")
        session.transports = chosen
        most = min(self.own.config.tcp_connections, session.peer.tcp_connections) + SHORT_CONNECTIONS
        fits = 1 <= agree.data_connections <= most if _TCP in chosen else agree.data_connections == 0
        if not chosen or not fits:
            names = ", ".join(chosen) or "no transport"
            raise ProtocolError(
                f"the peer chose {agree.data_connections} data connections for {names}",
                peer=session.peer.cluster_id,
            )


async def _unless_gone(channel: Channel, arrivals: _Arrivals) -> None:
    """Wait for the connections, but no longer than the peer lives, which sends nothing meanwhile."""

    async def watch() -> None:
        error: DataDistError
        try:
            if channel.has_more or await channel.stream.wait_readable():
                error = ProtocolError("the peer spoke out of turn", peer=channel.peer)
            else:
                error = PeerLostError("the peer closed the connection during the handshake", peer=channel.peer)
        except OSError as why:
            error = PeerLostError(f"the control connection broke: {why.strerror or why}", peer=channel.peer)
        if not arrivals.complete.done():
            arrivals.complete.set_exception(error)

    failure: DataDistError | None = None
    async with Tasks() as tasks:
        tasks.start(watch, name="aiodatadist-handshake-watch")
        try:
            await arrivals.complete
        except DataDistError as why:
            failure = why
        tasks.cancel()
    if failure is not None:
        raise failure
