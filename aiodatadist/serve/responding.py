"""How a worker sends an answer, to a router or to a client."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from aiohttp import web

from .errors import ServeError
from .http import REQUEST_ID, STREAM
from .openai import Answer, error_event
from .protocol import Generation
from .text import Piece

__all__ = ["respond"]


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
    response = request[STREAM] = web.StreamResponse(headers=headers)
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
