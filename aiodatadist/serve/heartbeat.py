"""A worker tells its routers that it is there, and all about itself, again and again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from aiohttp import ClientError, ClientSession, ClientTimeout

from aiodatadist.observe import get_logger

from .errors import ServeError
from .protocol import Deregistration, Message, Registered, Registration, decode, encode

__all__ = ["announce", "deregister", "keep_registered"]

_UNTOLD_PERIOD: Final = 0.5
"""Seconds between two attempts while a router does not answer."""
_TIMEOUT: Final = ClientTimeout(total=5.0)

_log = get_logger().bind(part="serve")


async def keep_registered(http: ClientSession, router: str, registration: Callable[[], Registration]) -> None:
    """Send heartbeats until cancelled.

    Parameters
    ----------
    http : ClientSession
        With the header that proves the cluster key.
    router : str
        URL of the router.
    registration : callable
        Returns what to say now.
    """
    said, router_id = "", ""
    while True:
        period = _UNTOLD_PERIOD
        try:
            async with http.post(f"{router}/register", data=encode(registration()), timeout=_TIMEOUT) as reply:
                body = await reply.read()
            if reply.status != 200:
                trouble = f"{reply.status}: {body[:500].decode(errors='replace')}"
            else:
                registered = decode(body, Registered)
                trouble, period = "", registered.heartbeat_s
                if registered.router_id != router_id:
                    _log.info("registered", router=router, router_id=registered.router_id)
                    router_id = registered.router_id
        except (ClientError, TimeoutError, OSError, ServeError) as why:  # the last: an answer of something else
            trouble = f"{type(why).__name__}: {why}"
        if trouble and trouble != said:
            _log.warning("the router does not take the registration", router=router, reason=trouble)
        said = trouble
        await asyncio.sleep(period)


async def announce(http: ClientSession, router: str, registration: Callable[[], Registration]) -> None:
    """Send one heartbeat out of turn, if the router hears it."""
    await _say(http, f"{router}/register", registration())


async def deregister(http: ClientSession, router: str, farewell: Deregistration) -> None:
    """Say good-bye, if the router hears it."""
    await _say(http, f"{router}/deregister", farewell)


async def _say(http: ClientSession, url: str, message: Message) -> None:
    with contextlib.suppress(ClientError, TimeoutError, OSError):
        async with http.post(url, data=encode(message), timeout=ClientTimeout(total=1.0)):
            pass
