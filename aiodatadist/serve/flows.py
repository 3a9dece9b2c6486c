"""The orders in which a request goes through its workers: one class for each hand-over.

Not built yet: `PushFlow` (``/pd/reserve`` at the decode worker, ``/pd/prefill`` with the reservation, and then
``/pd/decode``); see `pushing`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from msgspec.structs import replace

from .config import Timeouts
from .errors import Retry, ServeError
from .legs import Legs, Upstream
from .protocol import DecodeJob, GenerateJob, Generation, PrefillJob, ReleaseJob, Ticket
from .registry import Member

__all__ = ["Call", "Flow", "MixedFlow", "Pair", "PullFlow"]


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
            # What was the prompt is in the cache now, and need not travel.
            rest = DecodeJob(generation=replace(generation, turns=[], prompt=generation.prompt and ""), ticket=ticket)
            while True:
                try:
                    time = _answer_time(generation, self._timeouts)
                    return await self._legs.open(lease, "/pd/decode", rest, time)
                except ServeError as why:
                    # A worker that was not reached, or said no, has not touched the ticket.
                    again = why.retry is Retry.DECODE or why.code == "worker_unreachable"
                    other = call.other_decode(prefill, why, lease.member) if again else None
                    if other is None:
                        raise
                    lease.release()
                    lease = other.take(call.tokens)
        except BaseException:
            lease.release()
            # Also where the ticket is not known here: its owner may have made it meanwhile.
            self._legs.tell(prefill, "/pd/release", ReleaseJob(request_id=generation.request_id, attempt=call.number))
            raise


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
