"""How a worker writes an answer and sends it, to a router or to a client."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from aiohttp import web

from aiodatadist.model import Tokenizer

from .errors import ServeError
from .http import REQUEST_ID, STREAM
from .openai import Answer, error_event
from .protocol import Generation
from .text import Piece, TextStream, pieces
from .units import Placed

__all__ = ["respond", "write_answer"]


async def write_answer(
    request: web.Request,
    generation: Generation,
    placed: Placed,
    tokenizer: Tokenizer,
    *,
    token: int,
    limit: int,
    prompt_tokens: int,
    cached_tokens: int,
) -> web.StreamResponse:
    """Go on from a prompt whose KV is in the cache, and send the answer. Raises as `respond`.

    Parameters
    ----------
    request : web.Request
    generation : Generation
    placed : Placed
        Where the prompt lies, with room for the answer.
    tokenizer : Tokenizer
    token : int
        The first new one.
    limit : int
        Most new tokens, that one included.
    prompt_tokens, cached_tokens : int
        For the usage, and the position to go on from.
    """
    engine, sampling = placed.unit.engine, generation.sampling
    ends = token in engine.card.end_tokens and not sampling.ignore_end
    decoding = None
    if not ends and limit > 1:
        decoding = engine.decode(placed.reserved, token, prompt_tokens, sampling, limit - 1)
    answer = Answer(generation, prompt_tokens, cached_tokens)
    stream = TextStream(tokenizer, generation.stop)
    return await respond(request, generation, answer, pieces(stream, token, ends, decoding, "length"))


async def respond(
    request: web.Request, generation: Generation, answer: Answer, pieces: AsyncIterator[Piece]
) -> web.StreamResponse:
    """Send an answer: piece by piece, or whole.

    The headers go with the first piece, so that what fails before it has its own status.

    Raises
    ------
    ServeError
        The model failed, and nothing has been sent. In a stream that has begun it becomes the last event.
    """
    headers = {REQUEST_ID: generation.request_id, "Content-Type": answer.content_type, "Cache-Control": "no-cache"}
    if not generation.stream:
        return web.Response(body=answer.whole([piece async for piece in pieces]), headers=headers)
    response = web.StreamResponse(headers=headers)
    STREAM.set(response)
    try:
        async for piece in pieces:
            event = answer.event(piece)
            if not response.prepared:
                await response.prepare(request)
            if event:
                await response.write(event)
        await response.write(answer.last())
    except ServeError as why:
        if not response.prepared:
            raise
        await response.write(error_event(why))
    except ConnectionError:
        return response  # the client is gone
    with contextlib.suppress(ConnectionError):
        await response.write_eof()
    return response
