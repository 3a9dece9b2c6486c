"""Framing and messages of the control stream, without any input or output.

A connection starts with a 64-byte preamble that says what it is. A control connection then carries frames: an
unsigned 32-bit length (little endian) and that many bytes of one msgpack map, whose field ``t`` names the
message. Lengths are checked before anything is kept, decoding is bounded by the frame, and whatever a peer
sends ends either in a message of this module or in a `ProtocolError`.

Rule for skew: each side names the newest and the oldest version it speaks. The lower of both newest counts,
if both speak it. Unknown fields are ignored, so that a message may grow; an unknown message is an error, so
that a new one is sent only where the agreed version has it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Annotated, Final

import msgspec

from ..errors import ProtocolError

__all__ = [
    "HANDSHAKE_MAX_BYTES",
    "HELLO_MAX_BYTES",
    "KEY_MAX_BYTES",
    "MIN_PROTOCOL_VERSION",
    "PREAMBLE_SIZE",
    "PROTOCOL_VERSION",
    "Agree",
    "Attached",
    "CacheAnnounce",
    "CacheWithdraw",
    "Challenge",
    "Changed",
    "ConnectionKind",
    "ExportedKey",
    "FrameReader",
    "Hello",
    "HelloReply",
    "HostOffer",
    "HostProof",
    "Identity",
    "Message",
    "Notify",
    "NotifyCredit",
    "Preamble",
    "Proof",
    "Ready",
    "RefusalKind",
    "Refused",
    "Settled",
    "SlotKey",
    "SlotPulled",
    "SlotsGone",
    "TableEnd",
    "Unlink",
    "UnlinkAck",
    "WireGeometry",
    "encode",
]

PROTOCOL_VERSION: Final = 1
MIN_PROTOCOL_VERSION: Final = 1

PREAMBLE_SIZE: Final = 64
HANDSHAKE_MAX_BYTES: Final = 64 * 1024
"""Longest frame before both sides have said what they accept."""

HELLO_MAX_BYTES: Final = 16 * 1024
"""Longest frame that the listening side takes until then: thousands that prove nothing may send one. A Hello fits."""

KEY_MAX_BYTES: Final = 1024 * 1024
"""Longest key of a cache; that of shm takes 8 bytes a tensor."""

ID_SIZE: Final = 16
"""Bytes of incarnations, session tokens and nonces."""

MAC_SIZE: Final = 32
"""Bytes of challenges and of proofs of the cluster key."""

NO_MAC: Final = bytes(MAC_SIZE)
"""In place of a proof, where there is no cluster key."""

_MAGIC: Final = b"ADT1"
_PREAMBLE: Final = struct.Struct("<4sBBH16s32s8s")
_PREAMBLE_VERSION: Final = 1
_NO_TOKEN: Final = bytes(ID_SIZE)
_NO_REST: Final = bytes(8)
_LENGTH: Final = struct.Struct("<I")
LENGTH_SIZE: Final = _LENGTH.size
"""Bytes in front of a message."""


class ConnectionKind(IntEnum):
    """What a connection to the one port is for."""

    CONTROL = 1
    ENGINE = 2
    DATA = 3


@dataclass(frozen=True, slots=True)
class Preamble:
    """The first 64 bytes of every connection.

    Parameters
    ----------
    kind : ConnectionKind
    index : int
        Number of a data connection among those of its link; 0 for the other kinds.
    token : bytes
        The session token of the handshake; zeros for a control connection.
    mac : bytes
        Proof that the sender has the key of the session; zeros without a cluster key, and for a control connection.
    """

    kind: ConnectionKind
    index: int = 0
    token: bytes = _NO_TOKEN
    mac: bytes = NO_MAC

    def pack(self) -> bytes:
        """Return the 64 bytes."""
        return _PREAMBLE.pack(_MAGIC, self.kind, _PREAMBLE_VERSION, self.index, self.token, self.mac, _NO_REST)

    @classmethod
    def unpack(cls, data: bytes | bytearray) -> Preamble:
        """Read the 64 bytes.

        Raises
        ------
        ProtocolError
            These are not the first bytes of an aiodatadist connection.
        """
        if len(data) != PREAMBLE_SIZE:
            raise ProtocolError(f"a preamble has {PREAMBLE_SIZE} bytes, got {len(data)}")
        magic, kind, version, index, token, mac, rest = _PREAMBLE.unpack(data)
        if magic != _MAGIC:
            raise ProtocolError(f"the connection began with {magic!r} instead of {_MAGIC!r}")
        try:
            known = ConnectionKind(kind)
        except ValueError:
            raise ProtocolError(f"connection kind {kind} is unknown") from None
        # A later preamble may use the rest; a control connection of any version is let in, so that the
        # handshake can answer it with the versions spoken here.
        if known is ConnectionKind.CONTROL:
            if version == _PREAMBLE_VERSION and (index, token, mac, rest) != (0, _NO_TOKEN, NO_MAC, _NO_REST):
                raise ProtocolError("the unused bytes of the preamble are not zero")
            return cls(known)
        if version != _PREAMBLE_VERSION:
            raise ProtocolError(f"preamble version {version} is unknown")
        if rest != _NO_REST:
            raise ProtocolError("the unused bytes of the preamble are not zero")
        return cls(known, index, token, mac)


# Messages. --------------------------------------------------------------------------------------------------

_U64 = Annotated[int, msgspec.Meta(ge=0)]  # msgpack has no integer above 2**64 - 1
_U32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
_U16 = Annotated[int, msgspec.Meta(ge=0, le=2**16 - 1)]
_I64 = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
_Id = Annotated[bytes, msgspec.Meta(min_length=ID_SIZE, max_length=ID_SIZE)]
_Mac = Annotated[bytes, msgspec.Meta(min_length=MAC_SIZE, max_length=MAC_SIZE)]
_Name = Annotated[str, msgspec.Meta(max_length=64)]
_Names = Annotated[list[_Name], msgspec.Meta(max_length=32)]
_Host = Annotated[str, msgspec.Meta(max_length=300)]
_Text = Annotated[str, msgspec.Meta(max_length=1000)]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="t"):
    """Base of all messages."""


class Identity(Message, frozen=True, kw_only=True):
    """What both sides say about themselves.

    Parameters
    ----------
    version, min_version : int
        Newest and oldest protocol version spoken.
    cluster_id : int
    incarnation : bytes
        Random, made anew each time a DataDist opens.
    role : int
        A `Role`.
    listen : list of str
        Addresses at which this side listens; empty for a client.
    capabilities : list of str
        Optional features, used only where both sides name them.
    transports : list of str
        Names, best first.
    heartbeat_limit : float
        Seconds of silence after which this side gives the peer up.
    notify_credits : int
        Notifications the other side may send before the first credit is returned.
    notify_max_bytes : int
        Largest notification accepted.
    max_message : int
        Longest frame accepted once the handshake is through.
    tcp_connections : int
        Data connections wanted; the lower number of both counts.
    """

    version: _U16
    min_version: _U16
    cluster_id: _U64
    incarnation: _Id
    role: _U16
    listen: Annotated[list[_Host], msgspec.Meta(max_length=32)]
    capabilities: _Names
    transports: _Names
    heartbeat_limit: Annotated[float, msgspec.Meta(ge=0.1, le=1e6)]
    notify_credits: _U32
    notify_max_bytes: _U32
    max_message: Annotated[int, msgspec.Meta(ge=HANDSHAKE_MAX_BYTES, le=2**32 - 1)]
    tcp_connections: Annotated[int, msgspec.Meta(ge=1, le=1024)]


class Hello(Identity, frozen=True, kw_only=True, tag=1):
    """First message of the side that connects.

    Parameters
    ----------
    target : int
        The cluster id it means to link.
    challenge : bytes or None
        Random: what the listening side's proof of the cluster key has to contain. None: there is no key here.
    """

    target: _U64
    challenge: _Mac | None = None


class HostOffer(msgspec.Struct, frozen=True, kw_only=True):
    """Where a peer of the same host can prove that it is one.

    Parameters
    ----------
    name : bytes
        Name of an abstract unix socket, without the leading zero byte.
    nonce : bytes
        What the peer's memfd must hold.
    """

    name: Annotated[bytes, msgspec.Meta(max_length=100)]
    nonce: _Id


class HelloReply(Identity, frozen=True, kw_only=True, tag=2):
    """Answer to a Hello that is accepted.

    Parameters
    ----------
    token : bytes
        The session token that engine and data connections of this link carry.
    host : HostOffer or None
        None where this side does not offer shm to the peer.
    """

    token: _Id
    host: HostOffer | None = None


class RefusalKind(StrEnum):
    """Why a link is refused, for programs."""

    VERSION = "version"
    IDENTITY = "identity"
    DUPLICATE = "duplicate"
    CROSSED = "crossed"
    TRANSPORTS = "transports"
    CLOSING = "closing"
    BUSY = "busy"
    KEY = "key"


class Refused(Message, frozen=True, kw_only=True, tag=3):
    """Answer to a Hello, or to any later message of the handshake, that ends it.

    Parameters
    ----------
    kind : str
        A `RefusalKind`; later versions may know more.
    reason : str
        For people.
    status : int
        A `Status`.
    """

    kind: _Name
    reason: _Text
    status: int = 0


class HostProof(Message, frozen=True, kw_only=True, tag=4):
    """What one side knows about both being on the same host. Sent by both, the connecting side first.

    Parameters
    ----------
    proved : bool
        Whether the unix connection proved it to the sender.
    reason : str
        Why not.
    nonce : bytes
        The connecting side's nonce in the memfd.
    answer : bytes
        The listening side's nonce in the memfd.
    address : int
        Where `secret` lies in the sender's memory, to probe process_vm.
    secret : bytes
    """

    proved: bool
    reason: _Text = ""
    nonce: _Id = _NO_TOKEN
    answer: _Id = _NO_TOKEN
    address: _U64 = 0
    secret: Annotated[bytes, msgspec.Meta(max_length=64)] = b""


class Agree(Message, frozen=True, kw_only=True, tag=5):
    """The connecting side's decision, followed by its engine and data connections.

    Parameters
    ----------
    transports : list of str
        Those that the link may use.
    data_connections : int
        How many data connections follow; 0 without tcp.
    """

    transports: _Names
    data_connections: Annotated[int, msgspec.Meta(ge=0, le=1024)]


class Attached(Message, frozen=True, kw_only=True, tag=6):
    """The listening side's engine has taken over engine and data connections."""


class Settled(Message, frozen=True, kw_only=True, tag=18):
    """Which of the agreed transports move bytes from this side. Sent by both where there are some to ask.

    Parameters
    ----------
    failed : dict
        Why those that do not do not, by name. Neither side uses them.
    """

    failed: Annotated[dict[_Name, _Text], msgspec.Meta(max_length=8)]


class WireGeometry(msgspec.Struct, frozen=True, kw_only=True):
    """Geometry of a cache; the fields are those of `types.Geometry`."""

    dtype: _Name
    itemsize: _U32
    shape: Annotated[list[_I64], msgspec.Meta(min_length=1, max_length=32)]
    num_tensors: _U32
    num_blocks: _I64
    block_bytes: _I64
    stride: _I64


class ExportedKey(msgspec.Struct, frozen=True, kw_only=True):
    """How one transport reaches a cache.

    Parameters
    ----------
    transport : str
    data : bytes
        Opaque.
    fd : int
        Number of the descriptor that was sent over the unix connection for this key; 0 for none.
    """

    transport: _Name
    data: Annotated[bytes, msgspec.Meta(max_length=KEY_MAX_BYTES)]
    fd: _U64 = 0


class SlotKey(msgspec.Struct, frozen=True, kw_only=True):
    """Names a batch slot by a request, or by a prefix; one of both ids is there.

    Parameters
    ----------
    slot : int
    model_id : int
    req_id, prefix_id : int or None
    """

    slot: _U32
    model_id: _U64
    req_id: _U64 | None = None
    prefix_id: _U64 | None = None


SLOT_KEYS_MAX: Final = 65536
"""Batch slots of one cache that may have a key."""
SLOT_KEY_MAX_BYTES: Final = 56
"""Longest `SlotKey` in a message."""

_SlotKeys = Annotated[list[SlotKey], msgspec.Meta(max_length=SLOT_KEYS_MAX)]


class CacheAnnounce(Message, frozen=True, kw_only=True, tag=7):
    """A cache is ready and may be used.

    Parameters
    ----------
    version : int
        Version of the sender's table; grows with every announcement and withdrawal.
    cache_id : int
    model_id : int or None
        None for a cache without a blocks key.
    access : str
        ``"r"`` or ``"rw"``.
    geometry : WireGeometry
    keys : list of ExportedKey
        Best first.
    slots : list of SlotKey
        Keys of its batch slots.
    counted : bool
        The owner counts pulls of slots that are named by a request: `SlotPulled` tells it of each that ended well.
    addresses : bytes
        Address of each tensor in the owner's process, 8 bytes each, by which peers may name it; empty: not told.
    """

    version: _U64
    cache_id: _I64
    model_id: _U64 | None
    access: Annotated[str, msgspec.Meta(pattern="^rw?$")]
    geometry: WireGeometry
    keys: Annotated[list[ExportedKey], msgspec.Meta(max_length=32)]
    slots: _SlotKeys = []
    counted: bool = False
    addresses: Annotated[bytes, msgspec.Meta(max_length=KEY_MAX_BYTES)] = b""


class CacheWithdraw(Message, frozen=True, kw_only=True, tag=8):
    """A cache that was announced is no longer to be used."""

    version: _U64
    cache_id: _I64


class TableEnd(Message, frozen=True, kw_only=True, tag=9):
    """All caches that were there when the link began have been announced."""

    version: _U64


class Ready(Message, frozen=True, kw_only=True, tag=10):
    """The sender has the receiver's caches; transfers may start."""


class Unlink(Message, frozen=True, kw_only=True, tag=11):
    """The sender ends the link and waits for UnlinkAck.

    Parameters
    ----------
    reason : str
        For people.
    """

    reason: _Text = ""


class UnlinkAck(Message, frozen=True, kw_only=True, tag=12):
    """The sender has ended the link, too."""


class Notify(Message, frozen=True, kw_only=True, tag=13):
    """A notification; takes one credit."""

    payload: bytes


class NotifyCredit(Message, frozen=True, kw_only=True, tag=14):
    """Notifications were read: that many more may be sent."""

    count: Annotated[int, msgspec.Meta(ge=1, le=2**32 - 1)]


class Challenge(Message, frozen=True, kw_only=True, tag=20):
    """Answer to a Hello where a cluster key is needed. Says nothing else about the listening side.

    Parameters
    ----------
    challenge : bytes
        Random: what the connecting side's proof has to contain.
    """

    challenge: _Mac


class Proof(Message, frozen=True, kw_only=True, tag=21):
    """Proof of the cluster key, over all messages so far. Sent with a key only.

    Parameters
    ----------
    mac : bytes
        See `clusterproof.KeyProof`.
    """

    mac: _Mac


class Changed(Message, frozen=True, kw_only=True, tag=15):
    """The sender has another role, or listens elsewhere, than it said before.

    Parameters
    ----------
    role : int
        A `Role`.
    listen : list of str
        As in `Identity`.
    """

    role: _U16
    listen: Annotated[list[_Host], msgspec.Meta(max_length=32)]


class SlotsGone(Message, frozen=True, kw_only=True, tag=16):
    """Slots of an announced cache have lost their keys.

    Parameters
    ----------
    version : int
        As in CacheAnnounce.
    cache_id : int
    slots : list of int
    """

    version: _U64
    cache_id: _I64
    slots: Annotated[list[_U32], msgspec.Meta(max_length=65536)]


class SlotPulled(Message, frozen=True, kw_only=True, tag=17):
    """The sender has pulled tensors of a slot of the receiver's, which counts such pulls.

    Parameters
    ----------
    cache_id : int
    slot : int
    tensor, count : int
        The first tensor, and how many.
    """

    cache_id: _I64
    slot: _U32
    tensor: _U32
    count: _U32


AnyMessage = (
    Hello
    | HelloReply
    | Refused
    | HostProof
    | Agree
    | Attached
    | CacheAnnounce
    | CacheWithdraw
    | TableEnd
    | Ready
    | Unlink
    | UnlinkAck
    | Notify
    | NotifyCredit
    | Challenge
    | Proof
    | Changed
    | SlotsGone
    | SlotPulled
    | Settled
)

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(AnyMessage)


# Frames. ----------------------------------------------------------------------------------------------------


def encode(message: Message, limit: int = HANDSHAKE_MAX_BYTES) -> bytes:
    """Return the frame of a message.

    Parameters
    ----------
    message : Message
    limit : int
        Longest message that the receiver accepts, in bytes.

    Raises
    ------
    ProtocolError
        The message is longer. It was not sent.
    """
    body = _encoder.encode(message)
    if len(body) > limit:
        raise ProtocolError(
            f"a {type(message).__name__} message has {len(body)} bytes, and the peer accepts {limit}",
            hint="raise control_max_bytes at the peer",
        )
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Turns received bytes into messages.

    Holds at most one unfinished frame, that is `limit` bytes, plus what the caller has fed and not taken yet.

    Parameters
    ----------
    limit : int
        Longest message accepted, in bytes. May be changed between messages.

    Attributes
    ----------
    on_taken : callable or None
        Called with the bytes of each message that is taken.
    """

    def __init__(self, limit: int = HANDSHAKE_MAX_BYTES) -> None:
        self.limit = limit
        self.on_taken: Callable[[memoryview], None] | None = None
        self._buffer = bytearray()
        self._start = 0

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Add received bytes."""
        if self._start:
            del self._buffer[: self._start]
            self._start = 0
        self._buffer += data

    def next_message(self) -> AnyMessage | None:
        """Return the next message, or None if more bytes are needed.

        Raises
        ------
        ProtocolError
            The bytes are no message that this version knows. The connection cannot go on.
        """
        buffer, start = self._buffer, self._start
        if len(buffer) - start < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(buffer, start)
        if not 0 < length <= self.limit:
            raise ProtocolError(
                f"the peer announced a message of {length} bytes, outside 1..{self.limit}",
                hint="run the same aiodatadist version and control_max_bytes on both sides",
            )
        begin = start + _LENGTH.size
        end = begin + length
        if len(buffer) < end:
            return None
        self._start = end
        try:
            with memoryview(buffer) as view, view[begin:end] as body:
                if self.on_taken is not None:
                    self.on_taken(body)
                return _decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeError, RecursionError, OverflowError) as why:
            raise ProtocolError(f"the peer sent a message that cannot be read: {why}") from why

    @property
    def pending(self) -> int:
        """Bytes fed and not taken yet; not 0 at the end of a stream means that it was cut."""
        return len(self._buffer) - self._start
