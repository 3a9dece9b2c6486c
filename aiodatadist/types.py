"""The values of aiodatadist: roles, addresses, cache descriptions, geometry, links and events; keys are in keys.py.

All of them are frozen, compare by value and can be copied and pickled. None holds memory, a task or a
descriptor. Whatever is checked is checked when a value is made, so that code further down may rely on it.
"""

from __future__ import annotations

import ipaddress
import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, SupportsIndex

from .errors import ArgumentError, ArgumentTypeError, CacheMismatch, Status

if TYPE_CHECKING:
    from .keys import BlocksCacheKey

__all__ = [
    "DTYPE_SIZES",
    "MAX_RANK",
    "Address",
    "CacheAnnounced",
    "CacheDesc",
    "CacheGone",
    "ClusterInfo",
    "Event",
    "Geometry",
    "LayerArrived",
    "LeaseEnd",
    "LeaseExpired",
    "LeaseLost",
    "LeaseReleased",
    "LinkPath",
    "LinkState",
    "LinkStateChanged",
    "Notification",
    "PeerChanged",
    "Placement",
    "Role",
    "TransferEnded",
    "as_integer",
    "dtype_name",
    "parse_address",
]

U16_MAX: Final = 2**16 - 1
U32_MAX: Final = 2**32 - 1
U64_MAX: Final = 2**64 - 1
I64_MAX: Final = 2**63 - 1

MAX_RANK: Final = 31
"""Most dimensions of one tensor, as in the original."""


# Integers. --------------------------------------------------------------------------------------------------


def as_integer(value: SupportsIndex, name: str, *, low: int = 0, high: int = U64_MAX) -> int:
    """Check an integer argument and return it as an `int`.

    Parameters
    ----------
    value : SupportsIndex
        Anything with ``__index__`` (numpy integers included) except bool.
    name : str
        Name of the argument, for the message.
    low, high : int
        Smallest and largest value allowed.

    Returns
    -------
    int

    Raises
    ------
    ArgumentTypeError
        `value` is a bool or no integer.
    ArgumentError
        `value` is out of range.
    """
    if type(value).__name__ in ("bool", "bool_"):  # Python's and numpy's
        raise ArgumentTypeError(
            f"{name} must be an integer, got the bool {value}", hint=f"give {int(value)} if you mean it"
        )
    try:
        number = operator.index(value)
    except TypeError:
        raise ArgumentTypeError(
            f"{name} must be an integer, got {value!r:.80} of type {type(value).__name__}",
            hint="give an int or an integer of numpy",
        ) from None
    if not low <= number <= high:
        raise ArgumentError(f"{name}={shown(number)} is outside {low}..{high}", hint="give a value inside that range")
    return number


def shown(number: int) -> str:
    """Return an integer for a message: one of thousands of digits is described, as Python refuses to print it."""
    return str(number) if number.bit_length() <= 4096 else f"an integer of {number.bit_length()} bits"


# Dtypes. ----------------------------------------------------------------------------------------------------

DTYPE_SIZES: Final[Mapping[str, int]] = MappingProxyType(
    {
        "float32": 4,
        "float16": 2,
        "bfloat16": 2,
        "float64": 8,
        "int8": 1,
        "int16": 2,
        "int32": 4,
        "int64": 8,
        "uint8": 1,
        "uint16": 2,
        "uint32": 4,
        "uint64": 8,
        "bool": 1,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
    }
)
"""Bytes of one element of each dtype, under its canonical name."""

# "float" is missing on purpose: it means float64 to Python and float32 to torch.
_DTYPE_ALIASES: Final[Mapping[str, str]] = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "fp64": "float64",
    "double": "float64",
    "bool_": "bool",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e4m3fn": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "i8": "int8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
    "u8": "uint8",
    "u16": "uint16",
    "u32": "uint32",
    "u64": "uint64",
}


def dtype_name(dtype: object) -> str:
    """Return the canonical name of a dtype.

    Parameters
    ----------
    dtype : object
        A name or alias (``"bfloat16"``, ``"bf16"``, ``"torch.bfloat16"``), a numpy dtype or scalar type, or a
        torch dtype. Neither torch nor ml_dtypes is imported.

    Returns
    -------
    str
        A key of `DTYPE_SIZES`.

    Raises
    ------
    ArgumentTypeError
        `dtype` is nothing that names a dtype.
    ArgumentError
        The dtype is not one that aiodatadist knows, or has foreign byte order.
    """
    if isinstance(dtype, str):
        given = dtype
    elif isinstance(dtype, type):
        given = dtype.__name__
    elif type(dtype).__module__.partition(".")[0] == "torch":
        given = str(dtype)
    elif isinstance(getattr(dtype, "name", None), str):
        if getattr(dtype, "isnative", True) is False:
            raise ArgumentError(
                f"dtype {dtype!r} has foreign byte order", hint="convert the array to native byte order"
            )
        given = dtype.name  # type: ignore[attr-defined]
    else:
        raise ArgumentTypeError(
            f"dtype must be a name, a numpy dtype or a torch dtype, got {dtype!r:.80} of type {type(dtype).__name__}",
            hint='give a name such as "bfloat16"',
        )
    name = given.strip().lower().removeprefix("torch.")
    name = _DTYPE_ALIASES.get(name, name)
    if name not in DTYPE_SIZES:
        raise ArgumentError(f"dtype {given!r} is not supported", hint=f"use one of {', '.join(DTYPE_SIZES)}")
    return name


# Shapes. ----------------------------------------------------------------------------------------------------


def as_shape(shape: Sequence[SupportsIndex], name: str = "shape") -> tuple[int, ...]:
    """Check the shape of one tensor: 1 to `MAX_RANK` dimensions, each of at least 1.

    Raises
    ------
    ArgumentTypeError
        `shape` is no sequence of integers.
    ArgumentError
        It has too few or too many dimensions, or a dimension below 1.
    """
    if isinstance(shape, (str, bytes, bytearray)):
        raise ArgumentTypeError(
            f"{name} must be a sequence of integers, got {shape!r:.80}", hint="give a tuple of ints"
        )
    try:
        dims = tuple(shape)
    except TypeError:
        raise ArgumentTypeError(
            f"{name} must be a sequence of integers, got {shape!r:.80} of type {type(shape).__name__}",
            hint="give a tuple of ints, dimension 0 counting blocks",
        ) from None
    if not 1 <= len(dims) <= MAX_RANK:
        raise ArgumentError(
            f"{name} has {len(dims)} dimensions, outside 1..{MAX_RANK}",
            hint="give a tensor of [num_blocks, ...]",
        )
    return tuple(as_integer(dim, f"{name}[{i}]", low=1, high=I64_MAX) for i, dim in enumerate(dims))


# Roles and places. ------------------------------------------------------------------------------------------


class Role(IntEnum):
    """What a DataDist is for. Told to peers; it restricts nothing."""

    PROMPT = 1
    DECODER = 2
    MIX = 3
    PREFILL = 1
    DECODE = 2


class Placement(IntEnum):
    """Where memory lives, with the original's numbers."""

    HOST = 0
    DEVICE = 1


# Addresses. -------------------------------------------------------------------------------------------------

_HOST_NAME = re.compile(r"(?=.{1,253}\Z)(?!-)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?(?<!-)\Z")
_ADDRESS_HINT = 'write "10.0.0.1:26000", "node-1:26000" or "[::1]:26000"'


class Address(NamedTuple):
    """A host and a TCP port. ``str()`` puts IPv6 hosts into brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(address: str | tuple[Any, ...], name: str = "address", *, port_zero: bool = False) -> Address:
    """Read ``"host:port"`` or ``(host, port)``. Names are not resolved.

    Parameters
    ----------
    address : str or tuple
        ``"10.0.0.1:26000"``, ``"node-1:26000"``, ``"[::1]:26000"``, or a pair of host and port, an IPv6 host
        then without brackets.
    name : str
        Name of the argument, for the message.
    port_zero : bool
        Allow port 0 (to listen on any free port).

    Returns
    -------
    Address

    Raises
    ------
    ArgumentTypeError
        `address` is neither a string nor a pair.
    ArgumentError
        Host or port cannot be used. IPv4 must be four decimal numbers: the short forms of inet_aton, such as
        "127.1", are refused.
    """
    low = 0 if port_zero else 1
    if isinstance(address, tuple):
        if len(address) != 2 or not isinstance(address[0], str):
            raise ArgumentTypeError(f"{name} must be a pair (host, port), got {address!r:.80}", hint=_ADDRESS_HINT)
        host, port = address[0], as_integer(address[1], f"port of {name}", low=low, high=U16_MAX)
        bracketed = ":" in host
    elif isinstance(address, str):
        host, colon, digits = address.strip().rpartition(":")
        if not colon:
            raise ArgumentError(f"{name}={address!r:.200} has no port", hint=_ADDRESS_HINT)
        if not (digits.isascii() and digits.isdecimal() and len(digits) <= 5):
            raise ArgumentError(f"{name}={address!r:.200} has a port that is no number", hint=_ADDRESS_HINT)
        port = as_integer(int(digits), f"port of {name}", low=low, high=U16_MAX)
        bracketed = host.startswith("[") and host.endswith("]")
        if bracketed:
            host = host[1:-1]
        elif ":" in host:
            raise ArgumentError(f"{name}={address!r:.200} has an IPv6 host without brackets", hint=_ADDRESS_HINT)
    else:
        raise ArgumentTypeError(
            f"{name} must be a string, got {address!r:.80} of type {type(address).__name__}",
            hint=_ADDRESS_HINT,
        )
    try:
        if bracketed:
            host = str(ipaddress.IPv6Address(host))
        elif host and not host.strip("0123456789."):
            host = str(ipaddress.IPv4Address(host))
        elif not _HOST_NAME.match(host):
            raise ValueError(
                "a host name has 1 to 253 ASCII letters, digits, dots, hyphens and underscores, 1 to 63 between dots"
            )
    except ValueError as why:
        raise ArgumentError(
            f"{name}={address!r:.200} has a host that cannot be used: {why}", hint=_ADDRESS_HINT
        ) from None
    return Address(host, port)


@dataclass(frozen=True, slots=True, init=False)
class ClusterInfo:
    """A peer: its cluster id and where it listens.

    Parameters
    ----------
    cluster_id : int
        0 to 2**64 - 1.
    address : str, pair, sequence of them, or None
        ``"host:port"``, ``(host, port)``, or several, tried in order. None suffices to unlink, or where the
        peer is known.

    Attributes
    ----------
    cluster_id : int
    addresses : tuple of Address
        Empty when no address was given.

    Raises
    ------
    ArgumentTypeError, ArgumentError
        As `as_integer` and `parse_address`; also an empty sequence of addresses.
    """

    cluster_id: int
    addresses: tuple[Address, ...]

    def __init__(
        self,
        cluster_id: SupportsIndex,
        address: str | tuple[Any, ...] | Sequence[str | tuple[Any, ...]] | None = None,
    ) -> None:
        object.__setattr__(self, "cluster_id", as_integer(cluster_id, "cluster_id"))
        object.__setattr__(self, "addresses", self._read_addresses(address))

    @staticmethod
    def _read_addresses(address: object) -> tuple[Address, ...]:
        if address is None:
            return ()
        if isinstance(address, str):
            return (parse_address(address),)
        if isinstance(address, tuple) and len(address) == 2 and not isinstance(address[1], (str, tuple)):
            return (parse_address(address),)
        if not isinstance(address, Sequence):
            raise ArgumentTypeError(
                f"address must be a string or a sequence of strings, got {address!r:.80} "
                f"of type {type(address).__name__}",
                hint=_ADDRESS_HINT,
            )
        if not address:
            raise ArgumentError("address is an empty sequence", hint="give at least one, or None to unlink")
        return tuple(parse_address(one, f"address[{i}]") for i, one in enumerate(address))

    def __reduce__(self) -> tuple[Any, ...]:
        return (ClusterInfo, (self.cluster_id, self.addresses or None))


# Caches. ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, init=False)
class CacheDesc:
    """Describes a cache that is to be allocated, given by raw addresses, or checked against.

    Parameters
    ----------
    num_tensors : int
        Number of tensors, 1 to 2**32 - 1. For a KV cache usually two for each layer: K, V, K, V, ...
    shape : sequence of int
        Shape of one tensor, ``[num_blocks, ...]`` or ``[batch, ...]``; 1 to 31 dimensions, each at least 1.
    dtype : str or dtype
        Anything `dtype_name` reads; stored as the canonical name.
    placement : Placement
        Where the memory lives.
    stride : int, optional
        Bytes from one entry of dimension 0 to the next, where it exceeds the entry: raw addresses into
        interleaved memory.

    Raises
    ------
    ArgumentTypeError, ArgumentError
        A field is of a wrong type or out of range, or the tensor would exceed 2**63 - 1 bytes.
    """

    num_tensors: int
    shape: tuple[int, ...]
    dtype: str
    placement: Placement
    stride: int | None

    def __init__(
        self,
        num_tensors: SupportsIndex,
        shape: Sequence[SupportsIndex],
        dtype: object,
        *,
        placement: Placement = Placement.HOST,
        stride: SupportsIndex | None = None,
    ) -> None:
        set_field = object.__setattr__
        set_field(self, "num_tensors", as_integer(num_tensors, "num_tensors", low=1, high=U32_MAX))
        set_field(self, "shape", as_shape(shape))
        set_field(self, "dtype", dtype_name(dtype))
        try:
            set_field(self, "placement", Placement(placement))
        except ValueError:
            raise ArgumentError(
                f"placement={placement!r} is unknown", hint="use Placement.HOST or Placement.DEVICE"
            ) from None
        if stride is not None:
            stride = as_integer(stride, "stride", low=self.block_bytes, high=I64_MAX)
        set_field(self, "stride", stride)
        if self.tensor_bytes > I64_MAX:
            raise ArgumentError(
                f"a tensor of shape {self.shape} and dtype {self.dtype} takes {self.tensor_bytes} bytes, "
                f"more than {I64_MAX}",
                hint="give the shape of one tensor in elements",
            )

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPE_SIZES[self.dtype]

    @property
    def num_blocks(self) -> int:
        """Entries of dimension 0."""
        return self.shape[0]

    @property
    def block_bytes(self) -> int:
        """Bytes of one entry of dimension 0."""
        return math.prod(self.shape[1:]) * self.itemsize

    @property
    def tensor_bytes(self) -> int:
        """Bytes from the first to the last byte of one tensor, gaps between blocks included."""
        return (self.num_blocks - 1) * (self.stride or self.block_bytes) + self.block_bytes

    def geometry(self) -> Geometry:
        """Return the geometry of a cache of this description."""
        return Geometry.of(self.dtype, self.shape, self.num_tensors, stride=self.stride)


@dataclass(frozen=True, slots=True)
class Geometry:
    """How the tensors of a cache lie in memory. Travels with the cache table.

    Parameters
    ----------
    dtype : str
        Canonical name.
    itemsize : int
        Bytes of one element.
    shape : tuple of int
        Shape of one tensor, dimension 0 counting blocks.
    num_tensors : int
        Number of tensors.
    num_blocks : int
        ``shape[0]``.
    block_bytes : int
        Bytes of one block in one tensor; blocks are contiguous inside.
    stride : int
        Bytes from one block to the next in the same tensor, at least `block_bytes`.

    Raises
    ------
    ArgumentTypeError, ArgumentError
        A field is of a wrong type or out of range, or contradicts the others. (A peer's geometry is checked
        this way too.)
    """

    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    num_tensors: int
    num_blocks: int
    block_bytes: int
    stride: int

    COMPARED: ClassVar[tuple[str, ...]] = ("dtype", "block_shape", "num_tensors")
    """What `require_match` compares when nothing else is asked for."""

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        set_field(self, "dtype", dtype_name(self.dtype))
        set_field(self, "shape", as_shape(self.shape))
        set_field(self, "num_tensors", as_integer(self.num_tensors, "num_tensors", low=1, high=U32_MAX))
        itemsize = DTYPE_SIZES[self.dtype]
        for name, expected in (
            ("itemsize", itemsize),
            ("num_blocks", self.shape[0]),
            ("block_bytes", math.prod(self.shape[1:]) * itemsize),
        ):
            value = as_integer(getattr(self, name), name, high=I64_MAX)
            if value != expected:
                raise ArgumentError(
                    f"{name}={value} contradicts shape {self.shape} of dtype {self.dtype}, which make it {expected}",
                    hint="use Geometry.of()",
                )
            set_field(self, name, value)
        set_field(self, "stride", as_integer(self.stride, "stride", low=self.block_bytes, high=I64_MAX))
        if self.tensor_bytes > I64_MAX:
            raise ArgumentError(
                f"a tensor of shape {self.shape}, dtype {self.dtype} and stride {self.stride} spans "
                f"{self.tensor_bytes} bytes, more than {I64_MAX}",
                hint="give shapes in elements and strides in bytes",
            )

    @classmethod
    def of(
        cls,
        dtype: object,
        shape: Sequence[SupportsIndex],
        num_tensors: SupportsIndex,
        *,
        stride: int | None = None,
    ) -> Geometry:
        """Derive the rest. `stride`, in bytes, defaults to the bytes of a block."""
        name = dtype_name(dtype)
        dims = as_shape(shape)
        itemsize = DTYPE_SIZES[name]
        block_bytes = math.prod(dims[1:]) * itemsize
        return cls(
            dtype=name,
            itemsize=itemsize,
            shape=dims,
            num_tensors=as_integer(num_tensors, "num_tensors", low=1, high=U32_MAX),
            num_blocks=dims[0],
            block_bytes=block_bytes,
            stride=block_bytes if stride is None else stride,
        )

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Shape of one block in one tensor."""
        return self.shape[1:]

    @property
    def tensor_bytes(self) -> int:
        """Bytes from the first to the last byte of one tensor, gaps between blocks included."""
        return (self.num_blocks - 1) * self.stride + self.block_bytes

    @property
    def is_contiguous(self) -> bool:
        """Whether the blocks of a tensor follow each other without a gap."""
        return self.stride == self.block_bytes

    def require_match(
        self,
        remote: Geometry,
        fields: Sequence[str] = COMPARED,
        *,
        peer: int | None = None,
        hint: str | None = None,
    ) -> None:
        """Check that two caches agree in what a transfer between them needs.

        Parameters
        ----------
        remote : Geometry
            The peer's geometry.
        fields : sequence of str
            Fields or properties of Geometry to compare, in this order. The number of blocks and the stride
            may differ between two ends; with layer ranges the number of tensors may, too.
        peer : int, optional
            Cluster id, for the error.
        hint : str, optional
            What to do about a difference.

        Raises
        ------
        CacheMismatch
            Names the first field that differs, with both values.
        """
        for name in fields:
            mine, theirs = getattr(self, name), getattr(remote, name)
            if mine != theirs:
                raise CacheMismatch(
                    field=name,
                    local=mine,
                    remote=theirs,
                    peer=peer,
                    hint=hint or f"register both caches with the same {name}",
                )


# Links. -----------------------------------------------------------------------------------------------------


class LinkState(StrEnum):
    """States of a link."""

    IDLE = "idle"
    LINKING = "linking"
    READY = "ready"
    BROKEN = "broken"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class LinkPath:
    """Which transport a link uses, and why no other.

    Parameters
    ----------
    transport : str
        The transport chosen, such as ``"shm"`` or ``"tcp"``.
    memory : mapping of str to str
        How each kind of memory travels, such as ``{"library": "mapped", "ordinary": "process_vm"}``.
    reasons : mapping of str to str
        For each transport or path not chosen, exactly why.
    """

    transport: str
    memory: Mapping[str, str] = field(default_factory=dict, hash=False)
    reasons: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory", MappingProxyType(dict(self.memory)))
        object.__setattr__(self, "reasons", MappingProxyType(dict(self.reasons)))

    def __reduce__(self) -> tuple[Any, ...]:
        return (LinkPath, (self.transport, dict(self.memory), dict(self.reasons)))

    def __str__(self) -> str:
        notes = [f"{kind}: {how}" for kind, how in self.memory.items()]
        notes += [f"not {name}: {why}" for name, why in self.reasons.items()]
        return f"{self.transport} ({'; '.join(notes)})" if notes else self.transport


# Events. ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinkStateChanged:
    """A link went from one state to another.

    Attributes
    ----------
    cluster_id : int
        The peer.
    old, new : LinkState
        The states.
    epoch : int
        Epoch of the link after the change; grows with each new incarnation or relink.
    reason : str
        Why, in words; empty for what was asked for.
    attempt : int
        Which attempt of ``auto_relink=`` this belongs to, from 1; 0 outside of them. An attempt begins with a change to
        ``LINKING`` and ends with one to ``READY`` or ``BROKEN``.
    """

    cluster_id: int
    old: LinkState
    new: LinkState
    epoch: int = 0
    reason: str = ""
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class PeerChanged:
    """A linked peer has switched its role, or listens elsewhere or no longer. Its link goes on.

    Attributes
    ----------
    cluster_id : int
        The peer.
    role : Role or None
        What it is for now; None if this version does not know it.
    listens_at : tuple of str
        Addresses that it names; empty when it does not listen.
    """

    cluster_id: int
    role: Role | None
    listens_at: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CacheAnnounced:
    """A peer registered a cache, and it is ready.

    Attributes
    ----------
    cluster_id : int
        The owner.
    cache_id : int
        Its id there.
    key : BlocksCacheKey or None
        The key it was registered with, if any.
    geometry : Geometry
        How it lies in the owner's memory.
    """

    cluster_id: int
    cache_id: int
    key: BlocksCacheKey | None
    geometry: Geometry


@dataclass(frozen=True, slots=True)
class CacheGone:
    """A peer unregistered a cache, or its link went away.

    Attributes
    ----------
    cluster_id : int
        The owner.
    cache_id : int
        Its id there.
    """

    cluster_id: int
    cache_id: int


@dataclass(frozen=True, slots=True)
class TransferEnded:
    """A peer's transfer on local memory failed or was aborted. The memory is quiet for it by now.

    Attributes
    ----------
    cluster_id : int
        The peer that had started it.
    cache_id : int
        The local cache.
    op_id : int
        The peer's number for the operation.
    kind : str
        ``"pull"`` or ``"push"``, as the peer called it.
    status : Status
        How it ended.
    bytes_done : int
        Bytes moved before it ended, as far as known here.
    """

    cluster_id: int
    cache_id: int
    op_id: int
    kind: str
    status: Status
    bytes_done: int = 0


class LeaseEnd(StrEnum):
    """How a lease ended."""

    RELEASED = "released"
    """By its owner, or by the peer that it was held for."""
    EXPIRED = "expired"
    """Nobody adopted it within its TTL, or the peer stayed linked and did not renew it."""
    PEER_LOST = "peer_lost"
    """The link over which it was adopted ended, and it was not adopted again within its TTL."""
    CLOSED = "closed"
    """Its cache was unregistered, or the DataDist that held it was closed."""


@dataclass(frozen=True, slots=True)
class LeaseExpired:
    """A lease of this DataDist ran out, and is over: no operation of the peer can touch the blocks on its account.

    Attributes
    ----------
    lease_id : int
    cache_id : int
        The local cache.
    cluster_id : int or None
        The peer that it was held for; None: any.
    nbytes : int
        Bytes of its blocks.
    end : LeaseEnd
        ``EXPIRED`` or ``PEER_LOST``.
    """

    lease_id: int
    cache_id: int
    cluster_id: int | None
    nbytes: int
    end: LeaseEnd


@dataclass(frozen=True, slots=True)
class LeaseReleased:
    """A lease of this DataDist was ended, and is over: no operation of the peer can touch the blocks on its account.

    Attributes
    ----------
    lease_id, cache_id, cluster_id, nbytes
        As of `LeaseExpired`.
    end : LeaseEnd
        ``RELEASED`` or ``CLOSED``.
    """

    lease_id: int
    cache_id: int
    cluster_id: int | None
    nbytes: int
    end: LeaseEnd


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """A lease of a peer that was adopted here is no longer; what it held may change at any moment.

    Attributes
    ----------
    cluster_id : int
        The owner.
    lease_id : int
    end : LeaseEnd
        How the owner says it ended. ``PEER_LOST``: the link to the owner did; the blocks stay held until the TTL is
        over, and the lease can be adopted again over a new link.
    """

    cluster_id: int
    lease_id: int
    end: LeaseEnd


@dataclass(frozen=True, slots=True)
class Notification:
    """A peer's ``notify=``. What the transfer moved is visible here by the time this arrives.

    Attributes
    ----------
    cluster_id : int
        The peer.
    payload : bytes
        Its words.
    """

    cluster_id: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class LayerArrived:
    """A peer has pushed a layer, all of whose bytes are in local memory.

    Told of layer-wise transfers only. Where memory is named by addresses, layers count as the peer's do.

    Attributes
    ----------
    cluster_id : int
        The peer.
    cache_id : int
        The local cache.
    op_id : int
        The peer's number of the transfer, the same for all layers of one target.
    layer : int
        Layer of the local cache.
    layers_left : int
        Of that transfer, those that have not arrived; 0: this was the last.
    """

    cluster_id: int
    cache_id: int
    op_id: int
    layer: int
    layers_left: int


Event = (
    LinkStateChanged
    | PeerChanged
    | CacheAnnounced
    | CacheGone
    | TransferEnded
    | LayerArrived
    | LeaseExpired
    | LeaseReleased
    | LeaseLost
)
"""What ``DataDist.events()`` yields."""
