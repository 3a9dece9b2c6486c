"""What can be seen from outside: the logger, counters and latencies, and the rows of `dump()`.

The library logs through the standard logger ``aiodatadist`` and configures nothing; an application that wants
the messages adds a handler to that logger, as with any other library.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import structlog

from . import _core
from .errors import PeerLostError, TransferAborted

__all__ = ["OUTCOMES", "Counters", "Histogram", "PendingOperation", "get_logger", "outcome_of"]

# The logger. ------------------------------------------------------------------------------------------------

_LOGGER_NAME: Final = "aiodatadist"
_STANDARD: Final = logging.getLogger(_LOGGER_NAME)
_STANDARD.addHandler(logging.NullHandler())


def _to_standard(_logger: object, _method: str, event: MutableMapping[str, Any]) -> tuple[tuple[str], dict[str, Any]]:
    """Turn an event into a standard record: readable text, and the fields as ``record.aiodatadist``."""
    text = str(event.pop("event", ""))
    passed = {name: event.pop(name) for name in ("exc_info", "stack_info") if name in event}
    fields = dict(event)
    if fields:
        text += " " + " ".join(f"{name}={value!r}" for name, value in fields.items())
    # structlog's frames stand between the caller and the standard logger, which is to name the caller.
    frame, level = sys._getframe(1).f_back, 1
    while frame is not None and frame.f_globals.get("__name__", "").startswith("structlog"):
        frame, level = frame.f_back, level + 1
    # A percent sign must not be taken for a format: a record without arguments is not formatted.
    return (text,), {"extra": {"aiodatadist": fields}, "stacklevel": level, **passed}


_PROCESSORS: Final[list[Any]] = [
    structlog.stdlib.filter_by_level,
    structlog.contextvars.merge_contextvars,
    _to_standard,
]


def get_logger(**initial: object) -> structlog.stdlib.BoundLogger:
    """Return the library's logger: structlog's manners over the standard logger ``aiodatadist``.

    Parameters
    ----------
    **initial
        Fields of every message of this logger, such as ``cluster_id=2``.

    Returns
    -------
    structlog.stdlib.BoundLogger
        Independent of the application's structlog configuration; fields bound with ``structlog.contextvars``
        are included. Records carry their fields as the dict ``record.aiodatadist``.
    """
    logger = structlog.wrap_logger(
        _STANDARD, processors=_PROCESSORS, wrapper_class=structlog.stdlib.BoundLogger, context_class=dict
    )
    return cast("structlog.stdlib.BoundLogger", logger.bind(**initial))


# Latencies. -------------------------------------------------------------------------------------------------


class Histogram:
    """Counts durations in fixed buckets, each twice as wide as the one before.

    Bucket 0 counts what takes less than 1 us, bucket `i` what takes 2**(i-1) to 2**i us, and the last
    everything longer.

    Attributes
    ----------
    buckets : list of int
        `SIZE` counts.
    count : int
        Durations recorded.
    total : float
        Their sum, in seconds.
    """

    __slots__ = ("buckets", "count", "total")

    SIZE: Final = 32
    BOUNDS: Final = (*(2.0**i * 1e-6 for i in range(31)), float("inf"))
    """Upper bounds of the buckets, in seconds."""

    def __init__(self) -> None:
        self.buckets = [0] * self.SIZE
        self.count = 0
        self.total = 0.0

    def record(self, seconds: float, times: int = 1) -> None:
        """Count a duration. A negative one, from a clock that was set back, counts as 0."""
        seconds = max(seconds, 0.0)
        self.buckets[min(int(seconds * 1e6).bit_length(), self.SIZE - 1)] += times
        self.count += times
        self.total += seconds * times

    def add(self, buckets: Sequence[int], total: float) -> None:
        """Count durations that were counted elsewhere, in the same buckets; `total` is their sum in seconds."""
        self.buckets = [a + b for a, b in zip(self.buckets, buckets, strict=True)]
        self.count += sum(buckets)
        self.total += total

    def quantile(self, q: float) -> float:
        """Return an upper bound of the `q`-quantile in seconds, at most twice too high; 0.0 without records.

        Parameters
        ----------
        q : float
            0.0 to 1.0.
        """
        if not 0.0 <= q <= 1.0:
            raise ValueError(f"q={q} is outside 0..1")
        seen, wanted = 0, max(1.0, q * self.count)
        for bound, number in zip(self.BOUNDS, self.buckets, strict=True):
            seen += number
            if seen >= wanted:
                return bound
        return 0.0

    def __iadd__(self, other: Histogram) -> Histogram:
        self.add(other.buckets, other.total)
        return self

    def as_dict(self) -> dict[str, Any]:
        """Return a snapshot of plain values: ``buckets``, ``count``, ``total``."""
        return {"buckets": list(self.buckets), "count": self.count, "total": self.total}


# Counters. --------------------------------------------------------------------------------------------------

OUTCOMES: Final = ("ok", "failed", "cancelled", "timed_out", "peer_lost", "aborted", "lease_expired")
"""How a transfer can end. Each has a counter of its own, so that causes can be told apart."""


def outcome_of(error: BaseException | None) -> str:
    """Return which of `OUTCOMES` stands for how a transfer ended; None is success."""
    match error:
        case None:
            return "ok"
        case asyncio.CancelledError():
            return "cancelled"
        case TimeoutError():
            return "timed_out"
        case PeerLostError():
            return "peer_lost"
        case TransferAborted():
            return "aborted"
        case _:
            return "failed"


class Counters(_core.Counts):
    """Counts of one link or one transport since it was made. Belongs to one thread.

    Attributes
    ----------
    started : int
        Transfers started.
    ok, failed, cancelled, timed_out, peer_lost, aborted, lease_expired : int
        Transfers ended, by outcome. What has not ended is `pending`.
    bytes_pulled, bytes_pushed : int
        Bytes that landed, also of transfers that failed later.
    """

    __slots__ = ("_latency",)

    NUMBERS: Final = ("started", *OUTCOMES, "bytes_pulled", "bytes_pushed")

    def __init__(self) -> None:
        self._latency = Histogram()

    @property
    def latency(self) -> Histogram:
        """From start to end, of transfers that ended well. Those that were done at once count as 0."""
        if self.at_once:
            self._latency.record(0.0, self.at_once)
            self.at_once = 0
        if (found := self.latencies()) is not None:
            self._latency.add(*found)
        return self._latency

    def end(self, outcome: str, *, seconds: float = 0.0, pulled: int = 0, pushed: int = 0) -> None:
        """Count the end of a transfer that was counted in `started`.

        Parameters
        ----------
        outcome : str
            One of `OUTCOMES`.
        seconds : float
            From start to end.
        pulled, pushed : int
            Bytes that landed here, and at the peer.

        Raises
        ------
        ValueError
            `outcome` is none of `OUTCOMES`.
        """
        if outcome not in OUTCOMES:
            raise ValueError(f"outcome={outcome!r} is none of {', '.join(OUTCOMES)}")
        setattr(self, outcome, getattr(self, outcome) + 1)
        self.bytes_pulled += pulled
        self.bytes_pushed += pushed
        if outcome == "ok":
            self._latency.record(seconds)

    @property
    def ended(self) -> int:
        """Transfers ended, whatever the outcome."""
        return sum(getattr(self, name) for name in OUTCOMES)

    @property
    def pending(self) -> int:
        """Transfers started and not ended."""
        return self.started - self.ended

    def __getitem__(self, name: str) -> int:
        if name not in self.NUMBERS:
            raise KeyError(name)
        return cast("int", getattr(self, name))

    def __iter__(self) -> Iterator[str]:
        return iter(self.NUMBERS)

    def __len__(self) -> int:
        return len(self.NUMBERS)

    def keys(self) -> tuple[str, ...]:
        """Return the names of the counts, so that ``dict(counters)`` works."""
        return self.NUMBERS

    def __iadd__(self, other: Counters) -> Counters:
        """Add another's counts, to sum up links or to keep those of a link that closed."""
        for name in self.NUMBERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self._latency += other.latency
        return self

    def as_dict(self) -> dict[str, Any]:
        """Return a snapshot of plain values: every count, ``pending`` and ``latency``."""
        return {**dict(self), "pending": self.pending, "latency": self.latency.as_dict()}


# Dump. ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PendingOperation:
    """One row of ``DataDist.dump()``: an operation that has not ended.

    Attributes
    ----------
    id : int
        Number of the operation in this DataDist.
    kind : str
        Such as ``"pull"``, ``"push"``, ``"link"`` or ``"fence"``.
    peer : int or None
        Cluster id; None for local copies.
    age : float
        Seconds since it was started.
    state : str
        What it waits for, such as ``"queued"``, ``"moving"`` or ``"draining"``.
    bytes_done, bytes_total : int
        Progress. Both 0 for operations that move no bytes.
    transport : str or None
        Name of the transport, when one has been chosen.
    """

    id: int
    kind: str
    peer: int | None
    age: float
    state: str
    bytes_done: int = 0
    bytes_total: int = 0
    transport: str | None = None

    def __str__(self) -> str:
        text = f"#{self.id} {self.kind}"
        if self.peer is not None:
            text += f" cluster {self.peer}"
        if self.transport is not None:
            text += f" over {self.transport}"
        text += f": {self.state} for {self.age:.3f} s"
        if self.bytes_total:
            text += f", {self.bytes_done} of {self.bytes_total} bytes"
        return text
