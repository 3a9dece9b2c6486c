"""The errors of aiodatadist: one tree, and the map from native status codes to its classes.

::

    DataDistError
    ├── UsageError                  the call was wrong; nothing was started
    │   ├── ArgumentError           a bad value                                  (also ValueError)
    │   ├── ArgumentTypeError       a value of a wrong type                      (also TypeError)
    │   ├── ConfigError             a bad Config field or environment variable   (also ValueError)
    │   ├── ClosedError             the object is closed, or was never opened; also ends what ran meanwhile
    │   ├── BusyError               the object cannot do that at present
    │   ├── GateError               a layer was recorded, or failed, twice
    │   ├── WrongLoopError          called outside the event loop it belongs to
    │   └── ForkedError             called in a forked child, where it is inert
    ├── LinkError                   the link to a peer
    │   ├── NotLinkedError          no link to that cluster id
    │   ├── HandshakeError          versions, identity or proof did not fit
    │   ├── LinkRefusedError        the peer answered, and said no
    │   ├── FileLimitError          this process may not open the files it needs
    │   ├── LinkTimeout             link or unlink missed its deadline           (also TimeoutError)
    │   ├── PeerLostError           the peer died or went silent                 (also ConnectionError)
    │   └── ProtocolError           the peer sent something it must not send
    ├── TransferError               a transfer that had started
    │   ├── TransferTimeout         missed its deadline                          (also TimeoutError)
    │   ├── TransferAborted         the peer, a fence or force ended it
    │   ├── LayerFailed             a layer that it waited for will not come
    │   └── PartialTransferError    some bytes landed, the rest failed
    ├── CacheError                  a cache, its keys or its blocks
    │   ├── CacheNotFound           no such cache or key, here or at the peer
    │   ├── CacheExists             the key is taken already
    │   ├── CacheMismatch           local and remote side differ in one field
    │   ├── CacheAccessError        the cache does not permit that access
    │   ├── LeaseError              a lease is over, or not for this node
    │   └── BlockIndexError         duplicate, out of range, or lists of different length  (also ValueError)
    ├── TransportError              the machinery under a link
    │   ├── TransportUnavailable    not usable on this machine or for this memory
    │   └── RegistrationError       memory could not be registered
    ├── MemoryStillExposed          a closing ended while peers may still touch memory
    ├── OutOfMemoryError            a pool or the system has no memory left
    ├── ExtraMissing                a package of one of our extras is not installed  (also ImportError)
    ├── ModelError                  a model's file cannot be fetched, read or run
    └── InternalError               a fault of this library

Every error carries `status` (the LLM-DataDist code), `peer` (a cluster id), `transport`, and `hint`: the fix.
Wrong use raises at the call; what goes wrong later is raised by the await.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, ClassVar, Final

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "BlockIndexError",
    "BusyError",
    "CacheAccessError",
    "CacheError",
    "CacheExists",
    "CacheMismatch",
    "CacheNotFound",
    "ClosedError",
    "ConfigError",
    "DataDistError",
    "ExtraMissing",
    "FileLimitError",
    "ForkedError",
    "GateError",
    "HandshakeError",
    "InternalError",
    "LayerFailed",
    "LeaseError",
    "LinkError",
    "LinkRefusedError",
    "LinkTimeout",
    "MemoryStillExposed",
    "ModelError",
    "NativeStatus",
    "NotLinkedError",
    "OutOfMemoryError",
    "PartialTransferError",
    "PeerLostError",
    "ProtocolError",
    "RegistrationError",
    "Status",
    "TransferAborted",
    "TransferError",
    "TransferTimeout",
    "TransportError",
    "TransportUnavailable",
    "UsageError",
    "WrongLoopError",
    "error_from_native",
]


class Status(IntEnum):
    """The status codes of LLM-DataDist, under their names without the ``LLM_`` prefix.

    Codes that the original only defines are here too, so that a code from elsewhere always has a name.
    """

    SUCCESS = 0x0
    FAILED = 0xFFFFFFFF
    WAIT_PROCESS_TIMEOUT = 0x5010B001
    KV_CACHE_NOT_EXIST = 0x5010B002
    REPEAT_REQUEST = 0x5010B003
    REQUEST_ALREADY_COMPLETED = 0x5010B004
    PARAM_INVALID = 0x5010B005
    ENGINE_FINALIZED = 0x5010B006
    NOT_YET_LINK = 0x5010B007
    ALREADY_LINK = 0x5010B008
    LINK_FAILED = 0x5010B009
    UNLINK_FAILED = 0x5010B00A
    NOTIFY_PROMPT_UNLINK_FAILED = 0x5010B00B
    CLUSTER_NUM_EXCEED_LIMIT = 0x5010B00C
    PROCESSING_LINK = 0x5010B00D
    DEVICE_OUT_OF_MEMORY = 0x5010B00E
    PREFIX_ALREADY_EXIST = 0x5010B00F
    PREFIX_NOT_EXIST = 0x5010B010
    SEQ_LEN_OVER_LIMIT = 0x5010B011
    NO_FREE_BLOCK = 0x5010B012
    BLOCKS_OUT_OF_MEMORY = 0x5010B013
    EXIST_LINK = 0x5010B018
    FEATURE_NOT_ENABLED = 0x5010B019
    TIMEOUT = 0x5010B01A
    LINK_BUSY = 0x5010B01B
    OUT_OF_MEMORY = 0x5010B01C
    DEVICE_MEM_ERROR = 507053
    SUSPECT_REMOTE_ERROR = 507057
    UNKNOWN_ERROR = -1


class NativeStatus(IntEnum):
    """The status codes of the native engine (``include/aiodatadist/transport.h``)."""

    OK = 0
    PENDING = 1
    INVALID = -1
    NOT_FOUND = -2
    BOUNDS = -3
    PERMISSION = -4
    GEOMETRY = -5
    CANCELLED = -6
    TIMEOUT = -7
    PEER_LOST = -8
    ABORTED = -9
    CLOSED = -10
    UNSUPPORTED = -11
    NO_MEMORY = -12
    IO = -13
    PROTOCOL = -14
    FENCED = -15
    BUSY = -16
    AGAIN = -17
    INTERNAL = -18
    NOT_MAPPED = -19
    LAYER = -20


def _restore(cls: type[DataDistError], args: tuple[Any, ...], state: dict[str, Any]) -> DataDistError:
    """Rebuild a pickled or copied error without `__init__`, whose parameters differ from class to class."""
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class DataDistError(Exception):
    """Base of every error that aiodatadist raises.

    Parameters
    ----------
    message : str
        What happened, naming the value and the limit it broke.
    status : Status, optional
        The LLM-DataDist code; each class has a default.
    peer : int, optional
        Cluster id of the peer concerned.
    transport : str, optional
        Name of the transport concerned, such as ``"shm"`` or ``"tcp"``.
    hint : str, optional
        What to do about it.

    Attributes
    ----------
    message, status, peer, transport, hint
        As given. `args` holds the message alone; ``str()`` shows message, peer, transport and hint.

    Notes
    -----
    Errors pickle and copy with all their attributes. As with any exception, cause and traceback stay behind.
    """

    default_status: ClassVar[Status] = Status.FAILED

    message: str
    status: Status
    peer: int | None
    transport: str | None
    hint: str | None

    def __init__(
        self,
        message: str = "",
        *,
        status: Status | None = None,
        peer: int | None = None,
        transport: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = self.default_status if status is None else status
        self.peer = peer
        self.transport = transport
        self.hint = hint

    def __str__(self) -> str:
        text = self.message or type(self).__name__
        where = []
        if self.peer is not None:
            where.append(f"cluster {self.peer}")
        if self.transport is not None:
            where.append(self.transport)
        if where:
            text += f" [{', '.join(where)}]"
        if self.hint:
            text += f"; {self.hint}"
        return text

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (_restore, (type(self), self.args, dict(self.__dict__)))


# Wrong use. -------------------------------------------------------------------------------------------------


class UsageError(DataDistError):
    """The call itself was wrong. Raised at the call, before anything was started."""

    default_status = Status.PARAM_INVALID


class ArgumentError(UsageError, ValueError):
    """An argument has the right type and a value that cannot be used."""


class ArgumentTypeError(UsageError, TypeError):
    """An argument has a type that cannot be used."""


class ConfigError(UsageError, ValueError):
    """A field of `Config` or an ``AIODATADIST_*`` variable has a value that cannot be used."""


class ClosedError(UsageError):
    """The DataDist, link or cache is closed or was never opened.

    Raised at the call, and also by the await of a transfer whose link or DataDist was closed in good order
    while it ran.
    """

    default_status = Status.ENGINE_FINALIZED


class BusyError(UsageError):
    """The object cannot do that while something else goes on; the message says what."""

    default_status = Status.LINK_BUSY


class GateError(UsageError):
    """A layer of a gate was recorded or failed twice."""


class WrongLoopError(UsageError):
    """A DataDist was used outside the event loop and thread in which it was opened."""


class ForkedError(UsageError):
    """A DataDist was used in a forked child. It belongs to the parent, and the child can open none."""


# Links. -----------------------------------------------------------------------------------------------------


class LinkError(DataDistError):
    """Something about the link to a peer went wrong."""

    default_status = Status.LINK_FAILED


class NotLinkedError(LinkError):
    """There is no ready link to that cluster id."""

    default_status = Status.NOT_YET_LINK


class HandshakeError(LinkError):
    """The two ends could not agree: version, identity, proof or capabilities."""


class LinkRefusedError(LinkError):
    """The peer answered and refused the link; the message carries its reason."""


class FileLimitError(LinkError):
    """The process may not open the files that another link needs. The links that exist go on."""


class LinkTimeout(LinkError, TimeoutError):
    """`link`, `unlink` or `fence` missed its deadline."""

    default_status = Status.TIMEOUT


class PeerLostError(LinkError, ConnectionError):
    """The peer died, was killed, or sent no heartbeat within the limit.

    The status is NOT_YET_LINK: of the codes a transfer can end with, the one whose remedy is to link again.
    """

    default_status = Status.NOT_YET_LINK


class ProtocolError(LinkError):
    """The peer sent something that the protocol does not allow. The connection is dropped."""


# Transfers. -------------------------------------------------------------------------------------------------


class TransferError(DataDistError):
    """A transfer started and did not succeed. Its memory is quiet, and the destination's content undefined.

    Parameters
    ----------
    message, status, peer, transport, hint
        As in `DataDistError`.
    bytes_done : int, optional
        Bytes known to have landed.
    bytes_total : int, optional
        Bytes the transfer was to move.
    """

    bytes_done: int | None
    bytes_total: int | None

    def __init__(
        self,
        message: str = "",
        *,
        status: Status | None = None,
        peer: int | None = None,
        transport: str | None = None,
        hint: str | None = None,
        bytes_done: int | None = None,
        bytes_total: int | None = None,
    ) -> None:
        super().__init__(message, status=status, peer=peer, transport=transport, hint=hint)
        self.bytes_done = bytes_done
        self.bytes_total = bytes_total


class TransferTimeout(TransferError, TimeoutError):
    """A transfer missed its deadline. It was drained or ended by force before this was raised."""

    default_status = Status.TIMEOUT


class TransferAborted(TransferError):
    """The peer, a fence, a closing or force ended the transfer; a caller's cancel is a CancelledError."""


class LayerFailed(TransferError):
    """A layer that a transfer waited for will not come; what its source raised is the cause.

    Parameters
    ----------
    message, status, peer, transport, hint
        As in `DataDistError`.
    layer : int, optional
        The layer.
    bytes_done, bytes_total : int, optional
        As in `TransferError`.
    """

    default_status = Status.PARAM_INVALID
    layer: int | None

    def __init__(
        self,
        message: str = "",
        *,
        layer: int | None = None,
        status: Status | None = None,
        peer: int | None = None,
        transport: str | None = None,
        hint: str | None = None,
        bytes_done: int | None = None,
        bytes_total: int | None = None,
    ) -> None:
        super().__init__(
            message,
            status=status,
            peer=peer,
            transport=transport,
            hint=hint,
            bytes_done=bytes_done,
            bytes_total=bytes_total,
        )
        self.layer = layer


class PartialTransferError(TransferError):
    """Part of the transfer landed and the rest failed; `bytes_done` says how much landed."""


# Caches. ----------------------------------------------------------------------------------------------------


class CacheError(DataDistError):
    """Something about a cache, its keys or its blocks is wrong."""

    default_status = Status.PARAM_INVALID


class CacheNotFound(CacheError):
    """No cache or key of that name here or at the peer.

    Not a KeyError, whose text would be the repr of the message.
    """

    default_status = Status.KV_CACHE_NOT_EXIST


class CacheExists(CacheError):
    """The key is bound to another cache already."""


class CacheMismatch(CacheError):
    """Two sides that must agree differ in one field. Raised before a byte moves.

    Parameters
    ----------
    message : str, optional
        Made from `field`, `local` and `remote` when empty.
    field : str
        Name of the field that differs, such as ``"dtype"`` or ``"block_bytes"``.
    local, remote : object
        The two values. Within one cache: the expected and the found one. Kept as given, so give plain values.
    status, peer, transport, hint
        As in `DataDistError`.
    """

    field: str
    local: object
    remote: object

    def __init__(
        self,
        message: str = "",
        *,
        field: str = "",
        local: object = None,
        remote: object = None,
        status: Status | None = None,
        peer: int | None = None,
        transport: str | None = None,
        hint: str | None = None,
    ) -> None:
        if not message and field:
            message = f"{field} differs: {local!r} here, {remote!r} at the other side"
        super().__init__(message, status=status, peer=peer, transport=transport, hint=hint)
        self.field = field
        self.local = local
        self.remote = remote


class CacheAccessError(CacheError):
    """The cache does not permit that access: read-only destination, ``remote="r"``, or ``remote=None``."""


class LeaseError(CacheError):
    """A lease of a peer is over, was never held for this node, or cannot be adopted."""

    default_status = Status.KV_CACHE_NOT_EXIST


class BlockIndexError(CacheError, ValueError):
    """A block index is out of range or repeated in a destination, or two block lists differ in length."""


# Transports and resources. ----------------------------------------------------------------------------------


class TransportError(DataDistError):
    """A transport failed in a way that no narrower class describes."""


class TransportUnavailable(TransportError):
    """A transport cannot be used here, or cannot do what was asked.

    Parameters
    ----------
    message : str, optional
        Made from `transport` and `reason` when empty.
    reason : str
        Exactly why, such as ``"libibverbs.so.1 is missing"``.
    status, peer, transport, hint
        As in `DataDistError`.
    """

    default_status = Status.FEATURE_NOT_ENABLED

    reason: str

    def __init__(
        self,
        message: str = "",
        *,
        reason: str = "",
        status: Status | None = None,
        peer: int | None = None,
        transport: str | None = None,
        hint: str | None = None,
    ) -> None:
        if not message:
            message = f"transport {transport or 'unknown'} is not usable: {reason or 'no reason given'}"
        super().__init__(message, status=status, peer=peer, transport=transport, hint=hint)
        self.reason = reason or message


class RegistrationError(TransportError):
    """Memory could not be registered with a transport, or an address is not mapped."""


class MemoryStillExposed(DataDistError):
    """A closing had to end while a peer may still touch local memory.

    The tensors of the caches named stay referenced until it is safe.

    Parameters
    ----------
    message : str, optional
        Made from `caches` when empty.
    caches : tuple of str
        What identifies each cache that is still exposed.
    status, peer, transport, hint
        As in `DataDistError`.
    """

    default_status = Status.UNLINK_FAILED

    caches: tuple[str, ...]

    def __init__(
        self,
        message: str = "",
        *,
        caches: tuple[str, ...] = (),
        status: Status | None = None,
        peer: int | None = None,
        transport: str | None = None,
        hint: str | None = None,
    ) -> None:
        caches = tuple(caches)
        if not message:
            names = ", ".join(caches) or "none named"
            message = f"peers may still touch the memory of {len(caches)} cache(s): {names}"
        if hint is None:
            hint = "keep their tensors untouched until wait_closed() returns, or close the peers first"
        super().__init__(message, status=status, peer=peer, transport=transport, hint=hint)
        self.caches = caches


class OutOfMemoryError(DataDistError):
    """A memory pool, the system or the device has no memory left for the request.

    Not a MemoryError, whose instances CPython makes in a way that cannot be shared with another base.
    """

    default_status = Status.OUT_OF_MEMORY


class ExtraMissing(DataDistError, ImportError):
    """Something needs packages that a plain install leaves out.

    Parameters
    ----------
    message : str, optional
        Made from `extra` and `packages` when empty.
    extra : str
        Name of the extra, such as ``"demo"``.
    packages : tuple of str
        Those of its packages that are not installed.
    status, peer, transport, hint
        As in `DataDistError`; the hint defaults to the pip line that installs the extra.
    """

    default_status = Status.FEATURE_NOT_ENABLED

    extra: str
    packages: tuple[str, ...]

    def __init__(
        self,
        message: str = "",
        *,
        extra: str = "",
        packages: tuple[str, ...] = (),
        status: Status | None = None,
        peer: int | None = None,
        transport: str | None = None,
        hint: str | None = None,
    ) -> None:
        packages = tuple(packages)
        if not message:
            message = f"not installed: {', '.join(packages)}"
        if hint is None and extra:
            hint = f"run `pip install 'aiodatadist[{extra}]'`"
        super().__init__(message, status=status, peer=peer, transport=transport, hint=hint)
        self.extra = extra
        self.packages = packages


class ModelError(DataDistError):
    """A model cannot be had: its file cannot be fetched, is damaged, or holds what this version cannot run."""


class InternalError(DataDistError):
    """A fault of this library. Please report it with the message and `dump()`."""


# Native statuses. -------------------------------------------------------------------------------------------

# status -> (class, LLM-DataDist code or None for the class's own, what happened, hint)
_FROM_NATIVE: dict[NativeStatus, tuple[type[DataDistError], Status | None, str, str | None]] = {
    NativeStatus.INVALID: (ArgumentError, None, "the engine refused an argument", None),
    NativeStatus.NOT_FOUND: (
        CacheNotFound,
        None,
        "no such cache or key",
        "register it first, and check key and cluster id",
    ),
    NativeStatus.BOUNDS: (
        BlockIndexError,
        None,
        "the request reaches outside the cache",
        "check block indices, batch indices and sizes against the cache's geometry",
    ),
    NativeStatus.PERMISSION: (
        CacheAccessError,
        None,
        "the cache does not permit that access",
        'register it with remote="rw", and use writable memory as a destination',
    ),
    NativeStatus.GEOMETRY: (
        CacheMismatch,
        None,
        "the geometries of the two caches do not fit",
        "register both sides with the same dtype, block shape and tensor count",
    ),
    NativeStatus.CANCELLED: (TransferAborted, None, "the transfer was cancelled", None),
    NativeStatus.TIMEOUT: (
        TransferTimeout,
        None,
        "the transfer missed its deadline",
        "raise timeout= or look at dump() for what it waited for",
    ),
    NativeStatus.PEER_LOST: (PeerLostError, None, "the peer is gone", "link it again when it is back"),
    NativeStatus.ABORTED: (TransferAborted, None, "the transfer was aborted", None),
    NativeStatus.CLOSED: (ClosedError, None, "the object is closed", "open it again"),
    NativeStatus.UNSUPPORTED: (TransportUnavailable, None, "", "see `aiodatadist doctor`"),
    NativeStatus.NO_MEMORY: (
        OutOfMemoryError,
        None,
        "no memory left",
        "free caches or raise the limit: of memory, or of open files (ulimit -n)",
    ),
    NativeStatus.IO: (TransportError, None, "an input or output operation failed", None),
    NativeStatus.PROTOCOL: (
        ProtocolError,
        None,
        "the peer broke the protocol",
        "run the same aiodatadist version on both sides",
    ),
    NativeStatus.FENCED: (
        TransferAborted,
        None,
        "a fence or an unregister ended the transfer",
        "start it again if the cache is still registered",
    ),
    NativeStatus.BUSY: (BusyError, None, "the object is busy", "try again when what it waits for has ended"),
    NativeStatus.AGAIN: (BusyError, None, "a queue is full", "try again when earlier work has ended"),
    NativeStatus.INTERNAL: (InternalError, None, "the engine failed", "report this with dump()"),
    NativeStatus.LAYER: (LayerFailed, None, "a layer failed", "look at what its source raised"),
    NativeStatus.NOT_MAPPED: (
        RegistrationError,
        Status.PARAM_INVALID,
        "the address is not mapped in this process",
        "give the address of memory that is mapped, readable and, for a destination, writable",
    ),
}


_WORK: Final = -100
# Why a work request of verbs has failed, by the number of ibv_wc_status.
_WORK_FAILURES: Final[Mapping[int, tuple[str, str | None]]] = {
    1: ("local length error", None),
    2: ("local queue pair operation error", None),
    4: ("local protection error: the local memory is not registered for this", None),
    5: ("flushed with its queue pair", None),
    7: ("bad response from the peer's device", None),
    8: ("local access error", None),
    9: ("the peer's device refused the request as invalid", None),
    10: (
        "remote access error: the peer's device does not permit this access to that memory",
        "check that the peer's cache is still registered, and writable for a push",
    ),
    11: ("the peer's device could not complete the request", "look at the peer's device and its log"),
    12: (
        "transport retry counter exceeded: the peer's device has not acknowledged in time",
        "check cable, switch and address (GID), or raise rdma_timeout and rdma_retry_count",
    ),
    13: ("the peer's device was not ready for too long", None),
    16: ("the peer's device aborted the request", None),
    19: ("fatal error of the device", "look at the kernel's log"),
    20: ("no response in time", None),
    21: ("general error of the device", "look at the kernel's log"),
}


def error_from_native(
    status: int,
    *,
    peer: int | None = None,
    transport: str | None = None,
    detail: str | None = None,
    bytes_done: int | None = None,
    bytes_total: int | None = None,
) -> DataDistError:
    """Make the error that stands for a native status code.

    Each call makes a new object: one exception raised in several tasks would collect all their tracebacks.

    Parameters
    ----------
    status : int
        A `NativeStatus`, or -100 minus an ibv_wc_status. OK, PENDING and unknown codes are no failure to report and
        give an InternalError.
    peer : int, optional
        Cluster id.
    transport : str, optional
        Name of the transport.
    detail : str, optional
        The engine's own words (operation, cause, errno text). Put as they are, never formatted.
    bytes_done, bytes_total : int, optional
        Progress in bytes, kept by the classes under `TransferError`.

    Returns
    -------
    DataDistError
        To be raised or set on a future by the caller.
    """
    if (failed := _WORK_FAILURES.get(_WORK - status)) is not None:
        words, hint = failed
        said = f"RDMA: {words} (ibv_wc_status {_WORK - status})" + (f": {detail}" if detail else "")
        return TransportError(said, peer=peer, transport=transport or "verbs", hint=hint)
    try:
        native = NativeStatus(status)
        cls, code, text, hint = _FROM_NATIVE[native]
    except (KeyError, ValueError):
        named = NativeStatus(status).name if status in (NativeStatus.OK, NativeStatus.PENDING) else "unknown"
        message = f"native status {status} ({named}) is no failure this version knows"
        if detail:
            message += f": {detail}"
        return InternalError(message, peer=peer, transport=transport, hint="report this with dump()")
    message = f"{text}: {detail}" if text and detail else text or detail or ""
    if transport == "hixl" and native is NativeStatus.NO_MEMORY:
        hint = "unregister caches, or use fewer and larger tensors: no limit of this machine is at fault"
    if issubclass(cls, TransferError):
        return cls(
            message,
            status=code,
            peer=peer,
            transport=transport,
            hint=hint,
            bytes_done=bytes_done,
            bytes_total=bytes_total,
        )
    if cls is TransportUnavailable:
        reason = detail or "it does not support this operation"
        return TransportUnavailable(reason=reason, status=code, peer=peer, transport=transport, hint=hint)
    return cls(message, status=code, peer=peer, transport=transport, hint=hint)
