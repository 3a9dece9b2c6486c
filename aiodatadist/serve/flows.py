"""The orders in which a request goes through its workers: one class for each hand-over."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from msgspec.structs import replace

from .config import Timeouts
from .errors import Retry, ServeError
from .legs import Legs, Upstream
from .protocol import (
    DecodeJob,
    GenerateJob,
    Generation,
    PrefillJob,
    ReleaseJob,
    Reservation,
    ReserveJob,
    Ticket,
)
from .registry import Member

__all__ = ["Call", "Flow", "MixedFlow", "Pair", "PullFlow", "PushFlow"]


class Pair(NamedTuple):
    """Workers that were chosen together."""

    prefill: Member
    decode: Member


class Call(Protocol):
    """A request under way, as flows see it (`dispatch.Attempts` is it).

    Attributes
    ----------
    generation : Generation
    number : int
        Of this attempt; tickets and reservations carry it.
    tokens : int
        Of the prompt, estimated.
    """

    generation: Generation
    number: int
    tokens: int

    def other_decode(self, prefill: Member, why: ServeError, failed: Member) -> Member | None:
        """Return another decode worker for the same ticket; None: there is none, or this was the last attempt."""


class Flow(Protocol):
    """One order of things."""

    async def open(self, call: Call, pair: Pair) -> Upstream:
        """Do all that comes before the answer's first bytes. Raises ServeError; then nothing is held anywhere."""


def _answer_time(generation: Generation, timeouts: Timeouts) -> float:
    """Return the seconds until the first bytes: of a whole answer they are the last ones, too."""
    return timeouts.first_token if generation.stream else timeouts.request


def _decode_job(generation: Generation, ticket: Ticket) -> DecodeJob:
    # What was the prompt is in the cache now, and need not travel.
    return DecodeJob(generation=replace(generation, turns=[], prompt=generation.prompt and ""), ticket=ticket)


def _next_decode(call: Call, prefill: Member, why: ServeError, failed: Member) -> Member:
    """Return the decode worker to ask next; raises `why` if there is none.

    One that was not reached, or said no, has touched nothing.
    """
    again = why.retry is Retry.DECODE or why.code == "worker_unreachable"
    other = call.other_decode(prefill, why, failed) if again else None
    if other is None:
        raise why
    return other


class PullFlow:
    """Prefill first; the decode worker pulls by the ticket."""

    def __init__(self, legs: Legs, timeouts: Timeouts) -> None:
        self._legs = legs
        self._timeouts = timeouts

    async def open(self, call: Call, pair: Pair) -> Upstream:
        """See `Flow`."""
        generation, prefill = call.generation, pair.prefill
        # The pair is a unit: the decode worker counts this request from the beginning.
        lease = pair.decode.take(call.tokens)
        try:
            load = prefill.take(call.tokens)
            try:
                job = PrefillJob(generation=generation, attempt=call.number)
                ticket = await self._legs.ask(prefill, "/pd/prefill", job, Ticket, self._timeouts.prefill)
            finally:
                load.release()
            rest = _decode_job(generation, ticket)
            while True:
                try:
                    time = _answer_time(generation, self._timeouts)
                    return await self._legs.open(lease, "/pd/decode", rest, time)
                except ServeError as why:
                    other = _next_decode(call, prefill, why, lease.member)
                    lease.release()
                    lease = other.take(call.tokens)
        except BaseException:
            lease.release()
            # Also where the ticket is not known here: its owner may have made it meanwhile.
            self._legs.tell(prefill, "/pd/release", ReleaseJob(request_id=generation.request_id, attempt=call.number))
            raise


class PushFlow:
    """The decode worker reserves; the prefill worker pushes while it computes; then the answer is asked for."""

    def __init__(self, legs: Legs, timeouts: Timeouts) -> None:
        self._legs = legs
        self._timeouts = timeouts

    async def open(self, call: Call, pair: Pair) -> Upstream:
        """See `Flow`."""
        generation, prefill = call.generation, pair.prefill
        # The pair is a unit: both count this request from the beginning, and neither goes on without the other.
        load, lease = prefill.take(call.tokens), pair.decode.take(call.tokens)
        undo = ReleaseJob(request_id=generation.request_id, attempt=call.number)
        try:
            reservation: Reservation | None = None
            while reservation is None:
                try:
                    reservation = await self._reserve(call, prefill, lease.member)
                except ServeError as why:
                    other = _next_decode(call, prefill, why, lease.member)
                    self._legs.tell(lease.member, "/pd/release", undo)
                    lease.release()
                    lease = other.take(call.tokens)
            try:
                job = PrefillJob(generation=generation, attempt=call.number, reservation=reservation)
                ticket = await self._legs.ask(prefill, "/pd/prefill", job, Ticket, self._timeouts.prefill)
            except ServeError as why:
                if why.code in ("transfer_failed", "transfer_timeout"):
                    why.worker_id = lease.member.worker_id  # the prefill worker can still say so
                raise
            load.release()
            time = _answer_time(generation, self._timeouts)
            return await self._legs.open(lease, "/pd/decode", _decode_job(generation, ticket), time)
        except BaseException:
            load.release()
            lease.release()
            # It stops the prefill worker as well, which does not write any more when the blocks are free again.
            self._legs.tell(lease.member, "/pd/release", undo)
            raise

    async def _reserve(self, call: Call, prefill: Member, decode: Member) -> Reservation:
        assert prefill.registration.peer is not None
        job = ReserveJob(generation=call.generation, attempt=call.number, writer=prefill.registration.peer.cluster_id)
        return await self._legs.ask(decode, "/pd/reserve", job, Reservation, self._timeouts.transfer)


class MixedFlow:
    """One worker does everything."""

    def __init__(self, legs: Legs, timeouts: Timeouts) -> None:
        self._legs = legs
        self._timeouts = timeouts

    async def open(self, call: Call, member: Member) -> Upstream:
        """See `Flow`; of one worker."""
        lease = member.take(call.tokens)
        try:
            job = GenerateJob(generation=call.generation, attempt=call.number)
            return await self._legs.open(lease, "/pd/generate", job, _answer_time(call.generation, self._timeouts))
        except BaseException:
            lease.release()
            raise
