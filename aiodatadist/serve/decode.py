"""The decode worker's part: take prompts over, and write the answers."""

from __future__ import annotations

from aiohttp import web

from aiodatadist.model import Tokenizer

from .errors import ServeError
from .fetching import Fetcher
from .metrics import WorkerMetrics
from .openai import Answer
from .protocol import DecodeJob, decode
from .responding import respond
from .running import Running
from .text import TextStream, pieces
from .units import Units, answer_room

__all__ = ["DecodePart"]


class DecodePart:
    """Handlers of a decode worker.

    Reservations for pushes (``/pd/reserve``, ``/pd/release``, and a ticket that says `pushed`) belong into `pushing`.

    Parameters
    ----------
    units : Units
    fetcher : Fetcher
    running : Running
    tokenizer : Tokenizer
    metrics : WorkerMetrics
    """

    def __init__(
        self, units: Units, fetcher: Fetcher, running: Running, tokenizer: Tokenizer, metrics: WorkerMetrics
    ) -> None:
        self._units = units
        self._fetcher = fetcher
        self._running = running
        self._tokenizer = tokenizer
        self._metrics = metrics

    def routes(self) -> list[web.RouteDef]:
        """Return what this part serves."""
        return [web.post("/pd/decode", self._decode)]

    async def _decode(self, request: web.Request) -> web.StreamResponse:
        job = decode(await request.read(), DecodeJob)
        generation, ticket = job.generation, job.ticket
        with self._running.enter(ticket.request_id, ticket.attempt):
            card = self._units.first.card
            limit = answer_room(generation, ticket.prompt_tokens, card.max_positions)
            if ticket.pushed:
                raise ServeError("unsupported", "this decode worker does not take pushes")
            # Also for an answer of one token: the blocks are pulled, so that all tickets end the same way.
            placed = self._units.place(ticket.prompt_tokens + limit, full="no_blocks")
            try:
                with self._metrics.phase("transfer"):
                    await self._fetcher.fetch(ticket, placed)
                sampling = generation.sampling
                ends = ticket.token in card.end_tokens and not sampling.ignore_end
                decoding = None
                if not ends and limit > 1:
                    decoding = placed.unit.engine.decode(
                        placed.reserved, ticket.token, ticket.prompt_tokens, sampling, limit - 1
                    )
                stream = TextStream(self._tokenizer, generation.stop)
                answer = Answer(generation, ticket.prompt_tokens, ticket.cached_tokens)
                with self._metrics.phase("decode"):
                    return await respond(
                        request, generation, answer, pieces(stream, ticket.token, ends, decoding, "length")
                    )
            finally:
                placed.free()
