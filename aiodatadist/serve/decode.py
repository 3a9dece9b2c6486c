"""The decode worker's part: take prompts over, and write the answers."""

from __future__ import annotations

from aiohttp import web

from aiodatadist.model import Tokenizer

from .errors import ServeError
from .fetching import Fetcher
from .http import answer
from .metrics import WorkerMetrics
from .prefill import tokenize
from .protocol import DecodeJob, ReleaseJob, ReserveJob, Ticket, decode
from .pushing import Reservations
from .responding import write_answer
from .running import Running
from .units import Placed, Units, answer_room

__all__ = ["DecodePart"]


class DecodePart:
    """Handlers of a decode worker.

    Parameters
    ----------
    units : Units
    fetcher : Fetcher
    running : Running
    tokenizer : Tokenizer
    vocabulary : int
        Number of tokens.
    metrics : WorkerMetrics
    reservations : Reservations, optional
        None: it takes no pushes.
    """

    def __init__(
        self,
        units: Units,
        fetcher: Fetcher,
        running: Running,
        tokenizer: Tokenizer,
        vocabulary: int,
        metrics: WorkerMetrics,
        reservations: Reservations | None = None,
    ) -> None:
        self._units = units
        self._fetcher = fetcher
        self._running = running
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._metrics = metrics
        self._reservations = reservations

    def routes(self) -> list[web.RouteDef]:
        """Return what this part serves."""
        return [
            web.post("/pd/decode", self._decode),
            web.post("/pd/reserve", self._reserve),
            web.post("/pd/release", self._release),
        ]

    async def _reserve(self, request: web.Request) -> web.Response:
        job = decode(await request.read(), ReserveJob)
        if self._reservations is None:
            raise ServeError("unsupported", "this decode worker does not take pushes")
        self._running.check_open()
        tokens = len(tokenize(self._tokenizer, job.generation, self._vocabulary))
        limit = answer_room(job.generation, tokens, self._units.first.card.max_positions)
        return answer(self._reservations.reserve(job, tokens, tokens + limit))

    async def _release(self, request: web.Request) -> web.Response:
        job = decode(await request.read(), ReleaseJob)
        released = 0 if self._reservations is None else self._reservations.release(job.request_id, job.attempt)
        return answer({"released": released})

    async def _decode(self, request: web.Request) -> web.StreamResponse:
        job = decode(await request.read(), DecodeJob)
        generation, ticket = job.generation, job.ticket
        # What was reserved here before a drain began is served to its end.
        promised = self._reservations is not None and (ticket.request_id, ticket.attempt) in self._reservations
        with self._running.enter(ticket.request_id, ticket.attempt, promised=promised):
            limit = answer_room(generation, ticket.prompt_tokens, self._units.first.card.max_positions)
            placed = await self._take(ticket, ticket.prompt_tokens + limit)
            try:
                with self._metrics.phase("transfer"):
                    # Also for an answer of one token, so that all tickets end the same way.
                    if not ticket.pushed:
                        await self._fetcher.fetch(ticket, placed)
                    self._fetcher.look_at(ticket, placed)
                with self._metrics.phase("decode"):
                    return await write_answer(
                        request, generation, placed, self._tokenizer, token=ticket.token, limit=limit,
                        prompt_tokens=ticket.prompt_tokens, cached_tokens=ticket.cached_tokens,
                    )  # fmt: skip
            finally:
                placed.free()

    async def _take(self, ticket: Ticket, positions: int) -> Placed:
        """Return the blocks that the prompt has, or will have."""
        if not ticket.pushed:
            return self._units.place(positions, full="no_blocks")
        if self._reservations is None:
            raise ServeError("unsupported", "this decode worker does not take pushes")
        with self._metrics.phase("handover"):
            return await self._reservations.take(ticket)
