"""What every HTTP server here does the same way: errors, keys, request ids, listening."""

from __future__ import annotations

import contextlib
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextvars import ContextVar
from typing import Any, Final

from aiohttp import web

from aiodatadist.observe import get_logger

from .errors import ServeError
from .openai import error_event
from .protocol import KEY_HEADER, encode, internal_token

__all__ = ["BODY_LIMIT", "REQUEST_ID", "STREAM", "answer", "make_app", "serving"]

BODY_LIMIT: Final = 8 << 20
"""Bytes of a request."""
REQUEST_ID: Final = "X-Request-Id"
STREAM: Final[ContextVar[web.StreamResponse | None]] = ContextVar("STREAM", default=None)
"""The streamed response of the request that is being handled, by whoever begins one."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_log = get_logger().bind(part="serve")


def answer(message: Any, status: int = 200) -> web.Response:
    """Answer with a message as JSON."""
    return web.Response(body=encode(message), status=status, content_type="application/json")


def error_answer(error: ServeError) -> web.Response:
    """Answer with an error in OpenAI's shape."""
    response = answer(error.body(), error.status)
    if error.retry_after is not None:
        response.headers["Retry-After"] = str(error.retry_after)
    return response


def make_app(
    *, cluster_key: bytes | None, api_key: str | None, public: Collection[str], open_to_all: Collection[str]
) -> web.Application:
    """Make an application whose errors all have OpenAI's shape.

    Parameters
    ----------
    cluster_key : bytes, optional
        Asked for by every path that is in neither of the two collections.
    api_key : str, optional
        Asked for by the paths in `public`.
    public, open_to_all : collection of str
        Paths of clients, and of everybody.
    """
    token = None if cluster_key is None else internal_token(cluster_key)

    def check(request: web.Request) -> None:
        path = request.path
        if path in open_to_all:
            return
        if path in public:
            given = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if api_key is not None and not _same(given, api_key):
                raise ServeError("invalid_api_key", "the API key is missing or wrong; send Authorization: Bearer KEY")
        elif token is not None and not _same(request.headers.get(KEY_HEADER, ""), token):
            raise ServeError("forbidden", "only for members of the cluster: both sides need the same cluster key")

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        STREAM.set(None)
        try:
            check(request)
            return await handler(request)
        except ServeError as error:
            return await _end(error)
        except web.HTTPException as why:
            code = "not_found" if why.status in (404, 405) else "invalid_request"
            response = answer(ServeError(code, f"{request.method} {request.path}: {why.reason}").body(), why.status)
            response.headers.update({k: v for k, v in why.headers.items() if k == "Allow"})
            return response
        except ConnectionError:
            return web.Response(status=499)  # the client is gone: nobody to answer, and no error of this server
        except Exception as why:
            _log.exception("a request failed", path=request.path)
            return await _end(ServeError("internal_error", f"{type(why).__name__}: {why}"))

    return web.Application(middlewares=[guard], client_max_size=BODY_LIMIT)


async def _end(error: ServeError) -> web.StreamResponse:
    """End a request with an error: by an answer, or by the last event of a stream that has begun well."""
    stream = STREAM.get()
    if stream is None or not stream.prepared:
        return error_answer(error)
    with contextlib.suppress(ConnectionError):
        await stream.write(error_event(error))
        await stream.write_eof()
    return stream


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())


@contextlib.asynccontextmanager
async def serving(app: web.Application, host: str, port: int) -> AsyncIterator[int]:
    """Serve around the body; yields the port."""
    # Handlers are cancelled when their client goes: that is how an abort reaches the model.
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, backlog=1024).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
