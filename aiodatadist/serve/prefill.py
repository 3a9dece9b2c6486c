"""The prefill worker's part: compute prompts, and hand them over."""

from __future__ import annotations

from aiohttp import web

from aiodatadist.model import Tokenizer

from .errors import ServeError
from .http import answer
from .metrics import WorkerMetrics
from .protocol import Generation, PrefillJob, ReleaseJob, decode
from .pushing import Pusher
from .running import Running
from .tickets import Tickets
from .units import Units, answer_room

__all__ = ["PrefillPart", "tokenize"]


def tokenize(tokenizer: Tokenizer, generation: Generation, vocabulary: int) -> list[int]:
    """Return the tokens of a request's prompt."""
    prompt = generation.prompt
    if prompt is None:
        return tokenizer.encode_chat(generation.turns)
    if isinstance(prompt, str):
        return tokenizer.encode_text(prompt)
    if bad := [token for token in prompt if not 0 <= token < vocabulary]:
        raise ServeError("invalid_request", f"token {bad[0]} is outside 0..{vocabulary - 1}", param="prompt")
    return prompt


class PrefillPart:
    """Handlers of a prefill worker.

    Parameters
    ----------
    units : Units
    tickets : Tickets
    pusher : Pusher
    running : Running
    tokenizer : Tokenizer
    vocabulary : int
        Number of tokens.
    metrics : WorkerMetrics
    """

    def __init__(
        self,
        units: Units,
        tickets: Tickets,
        pusher: Pusher,
        running: Running,
        tokenizer: Tokenizer,
        vocabulary: int,
        metrics: WorkerMetrics,
    ) -> None:
        self._units = units
        self._tickets = tickets
        self._pusher = pusher
        self._running = running
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._metrics = metrics

    def routes(self) -> list[web.RouteDef]:
        """Return what this part serves."""
        return [web.post("/pd/prefill", self._prefill), web.post("/pd/release", self._release)]

    async def _prefill(self, request: web.Request) -> web.Response:
        job = decode(await request.read(), PrefillJob)
        generation = job.generation
        with self._running.enter(generation.request_id, job.attempt), self._metrics.phase("prefill"):
            if (generation.request_id, job.attempt) in self._tickets:
                raise ServeError("duplicate_request", f"{generation.request_id}, attempt {job.attempt}, has a ticket")
            prompt = tokenize(self._tokenizer, generation, self._vocabulary)
            answer_room(generation, len(prompt), self._units.first.card.max_positions)
            placed = self._units.place(len(prompt), prompt, full="prefill_busy")
            if job.reservation is not None:
                # The pusher frees the blocks, when nothing reads them any more.
                pushed = await self._pusher.push(job.reservation, placed, generation.sampling)
                return answer(self._tickets.pushed(generation, job.attempt, placed, pushed))
            held = False
            try:
                token = await placed.unit.engine.prefill(placed.reserved, generation.sampling)
                ticket = self._tickets.hold(generation, job.attempt, placed, token)
                held = True
            finally:
                if not held:
                    placed.free()
        return answer(ticket)

    async def _release(self, request: web.Request) -> web.Response:
        job = decode(await request.read(), ReleaseJob)
        return answer({"released": self._tickets.release(job.request_id, job.attempt)})
