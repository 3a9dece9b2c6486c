"""The router asks its workers who they are: at registration, and then again and again."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from aiohttp import ClientError, ClientSession

from aiodatadist.observe import get_logger

from .errors import ServeError
from .protocol import Health, Registration, decode
from .registry import Member, Registry

__all__ = ["Prober", "check_address"]

_log = get_logger().bind(part="serve")

_AT_ONCE: Final = 64


async def check_address(http: ClientSession, registration: Registration) -> None:
    """Check that the advertised address leads to whom it says. Raises ServeError ``registration_refused``."""
    url = f"{registration.url}/health"
    try:
        async with http.get(url) as reply:
            health = decode(await reply.read(), Health)
    except (ClientError, TimeoutError, OSError, ServeError) as why:
        raise ServeError("registration_refused", f"{url} cannot be reached from the router: {why!r}") from why
    if health.incarnation != registration.incarnation:
        raise ServeError("registration_refused", f"at {url} is {health.worker_id}, not {registration.worker_id}")


class Prober:
    """Probes each worker every few seconds: a heartbeat tells that it reaches the router, not the other way round.

    Parameters
    ----------
    http : ClientSession
        Its timeout is that of a probe.
    registry : Registry
    period : float
        Seconds between two probes of a worker.
    """

    def __init__(self, http: ClientSession, registry: Registry, period: float) -> None:
        self._http = http
        self._registry = registry
        self._period = period
        self._turn = asyncio.Semaphore(_AT_ONCE)

    async def round(self) -> None:
        """Probe each worker once, and wait for the rest of the period."""
        began = time.monotonic()
        await asyncio.gather(*map(self._probe, self._registry.members()))
        await asyncio.sleep(max(self._period - (time.monotonic() - began), 0.0))

    async def _probe(self, member: Member) -> None:
        health = member.health
        async with self._turn:
            try:
                await check_address(self._http, member.registration)
            except Exception as why:  # a probe that cannot be made has failed, whatever the reason
                good, reason = False, str(why)
            else:
                good, reason = True, ""
        before = health.answering
        health.probed(good)
        if before and not health.answering:
            _log.warning("worker does not answer", worker=member.worker_id, reason=reason)
        elif health.answering and not before:
            _log.info("worker answers again", worker=member.worker_id)
