"""The mixed worker's part: prefill and decode in one process, without a transfer; the reference for both others.

It also serves clients directly, without a router.
"""

from __future__ import annotations

from aiohttp import web

from aiodatadist.model import Tokenizer

from . import openai
from .errors import ServeError
from .http import answer
from .metrics import WorkerMetrics
from .prefill import tokenize
from .protocol import GenerateJob, Generation, decode
from .responding import write_answer
from .running import Running
from .units import Units, answer_room

__all__ = ["MixedPart"]


class MixedPart:
    """Handlers of a mixed worker.

    Parameters
    ----------
    units : Units
    running : Running
    tokenizer : Tokenizer
    vocabulary : int
        Number of tokens.
    metrics : WorkerMetrics
    """

    def __init__(
        self, units: Units, running: Running, tokenizer: Tokenizer, vocabulary: int, metrics: WorkerMetrics
    ) -> None:
        self._units = units
        self._running = running
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._metrics = metrics

    def routes(self) -> list[web.RouteDef]:
        """Return what this part serves."""
        return [
            web.post("/pd/generate", self._generate),
            web.post("/v1/chat/completions", self._chat),
            web.post("/v1/completions", self._completion),
            web.get("/v1/models", self._models),
        ]

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        job = decode(await request.read(), GenerateJob)
        return await self._answer(request, job.generation, job.attempt)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._direct(request, chat=True)

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._direct(request, chat=False)

    async def _direct(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        generation = openai.read_request(await request.read(), chat=chat)
        name = self._units.first.card.name
        if generation.model != name:
            raise ServeError("model_not_found", f"model {generation.model!r} is not here, {name!r} is", param="model")
        return await self._answer(request, generation)

    async def _models(self, _request: web.Request) -> web.Response:
        return answer(openai.models([self._units.first.card.name]))

    async def _answer(self, request: web.Request, generation: Generation, attempt: int = 0) -> web.StreamResponse:
        with self._running.enter(generation.request_id, attempt):
            prompt = tokenize(self._tokenizer, generation, self._vocabulary)
            limit = answer_room(generation, len(prompt), self._units.first.card.max_positions)
            placed = self._units.place(len(prompt) + limit, prompt, full="prefill_busy")
            try:
                with self._metrics.phase("prefill"):
                    token = await placed.unit.engine.prefill(placed.reserved, generation.sampling)
                with self._metrics.phase("decode"):
                    return await write_answer(
                        request, generation, placed, self._tokenizer, token=token, limit=limit,
                        prompt_tokens=len(prompt), cached_tokens=placed.reserved.cached,
                    )  # fmt: skip
            finally:
                placed.free()
