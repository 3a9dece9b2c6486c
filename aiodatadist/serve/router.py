"""The router process: OpenAI's front end, the registry of workers, and nothing of KV."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Final

from aiohttp import ClientError, ClientSession, ClientTimeout, web

import aiodatadist as adt

from . import openai
from .admission import Admission
from .config import RouterConfig
from .dispatch import Dispatcher
from .errors import ServeError
from .http import REQUEST_ID, answer, make_app, serving
from .legs import Legs, Upstream
from .metrics import RouterMetrics
from .protocol import (
    ROLES,
    AbortJob,
    Deregistration,
    Generation,
    Health,
    Id,
    Message,
    Registered,
    Registration,
    decode,
)
from .registry import Member, Registry

__all__ = ["Router", "router"]

_CLIENT_PATHS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/abort_requests")
_SWEEP: Final = 0.5
_PROBE_TIMEOUT: Final = 3.0


class _Drain(Message, frozen=True):
    worker_id: Id
    drain: bool = True


class Router:
    """A router that is up. `router` makes it.

    Attributes
    ----------
    url : str
        Where it listens.
    router_id : str
        Random for this start.
    registry : Registry
    dispatcher : Dispatcher
    metrics : RouterMetrics
    """

    def __init__(self, config: RouterConfig, legs: Legs, probes: ClientSession) -> None:
        self.config = config
        self.url = ""
        self.router_id = secrets.token_hex(8)
        self.registry = Registry()
        self.metrics = RouterMetrics()
        self.admission = Admission()
        self.dispatcher = Dispatcher(config, self.registry, legs, self.metrics)
        self._legs = legs
        self._probes = probes
        self.app = make_app(
            cluster_key=config.cluster_key,
            api_key=config.api_key,
            public=_CLIENT_PATHS,
            open_to_all=("/health", "/ready", "/metrics"),
        )
        self.app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completion),
                web.get("/v1/models", self._models),
                web.post("/v1/abort_requests", self._abort),
                web.post("/register", self._register),
                web.post("/deregister", self._deregister),
                web.post("/drain", self._drain),
                web.get("/registered", self._registered),
                web.get("/registered_number", self._registered_number),
                web.get("/health", self._health),
                web.get("/ready", self._ready),
                web.get("/metrics", self._metrics),
            ]
        )

    async def sweep(self) -> None:
        """Forget silent workers, until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP)
            self.registry.sweep()

    # Clients. -----------------------------------------------------------------------------------------------

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, chat=True)

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, chat=False)

    async def _serve(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        self.metrics.in_flight += 1
        status, code = 499, "client_gone"
        try:
            generation = openai.read_request(await request.read(), chat=chat)
            try:
                async with asyncio.timeout(self.config.timeouts.request), self.admission.enter():
                    response, broken = await self._forward(request, generation)
            except TimeoutError as why:
                raise ServeError("request_timeout", f"not done in {self.config.timeouts.request:g} s") from why
            status, code = response.status, "ok" if broken is None else broken.code
            return response
        except Exception as why:
            known = why if isinstance(why, ServeError) else ServeError("internal_error", str(why))
            status, code = known.status, known.code
            raise
        finally:
            self.metrics.in_flight -= 1
            self.metrics.ended(status, code)

    async def _forward(
        self, request: web.Request, generation: Generation
    ) -> tuple[web.StreamResponse, ServeError | None]:
        """Pass an answer on; returns it, and what broke it after it had begun well."""
        upstream = await self.dispatcher.open(generation)
        headers = {REQUEST_ID: generation.request_id, "Content-Type": upstream.content_type}
        try:
            async with contextlib.aclosing(upstream.chunks()) as chunks:
                if not generation.stream:
                    body = b"".join([chunk async for chunk in chunks])
                    return web.Response(body=body, status=upstream.status, headers=headers), None
                headers["Cache-Control"] = "no-cache"
                response = web.StreamResponse(status=upstream.status, headers=headers)
                return response, await self._stream(request, response, chunks, upstream)
        finally:
            upstream.close()

    async def _stream(
        self, request: web.Request, response: web.StreamResponse, chunks: AsyncGenerator[bytes], upstream: Upstream
    ) -> ServeError | None:
        broken: ServeError | None = None
        await response.prepare(request)
        try:
            async for chunk in chunks:
                await response.write(chunk)
        except ServeError as why:
            broken = why
            await response.write(openai.error_event(why))
        await response.write_eof()
        return broken

    async def _models(self, _request: web.Request) -> web.Response:
        return answer(openai.models(list({member.registration.model for member in self.registry.members()})))

    async def _abort(self, request: web.Request) -> web.Response:
        """Have every worker abort them; answers when all have been told."""
        job = decode(await request.read(), AbortJob)

        async def tell(member: Member) -> int:
            with contextlib.suppress(ServeError):
                said = await self._legs.ask(member, "/pd/abort", job, dict, _PROBE_TIMEOUT)
                return int(said.get("aborted", 0))
            return 0

        counts = await asyncio.gather(*map(tell, self.registry.members()))
        return answer({"aborted": sum(counts)})

    # Workers. -----------------------------------------------------------------------------------------------

    async def _register(self, request: web.Request) -> web.Response:
        registration = decode(await request.read(), Registration)
        if not self.registry.knows(registration.worker_id, registration.incarnation):
            await self._probe(registration)
        self.registry.put(registration)
        return answer(Registered(router_id=self.router_id, heartbeat_s=self.config.heartbeat))

    async def _probe(self, registration: Registration) -> None:
        """Check that the advertised address leads to whom it says."""
        url = f"{registration.url}/health"
        try:
            async with self._probes.get(url) as reply:
                health = decode(await reply.read(), Health)
        except (ClientError, TimeoutError, OSError, ServeError) as why:
            raise ServeError("registration_refused", f"{url} cannot be reached from the router: {why!r}") from why
        if health.incarnation != registration.incarnation:
            raise ServeError("registration_refused", f"at {url} is {health.worker_id}, not {registration.worker_id}")

    async def _deregister(self, request: web.Request) -> web.Response:
        return answer({"removed": self.registry.remove(decode(await request.read(), Deregistration))})

    async def _drain(self, request: web.Request) -> web.Response:
        job = decode(await request.read(), _Drain)
        member = self.registry.find(job.worker_id)
        if member is None:
            raise ServeError("not_found", f"no worker {job.worker_id!r} is registered", param="worker_id")
        member.told_to_drain = job.drain
        return answer({"worker_id": job.worker_id, "draining": member.draining, "requests": member.requests})

    async def _registered(self, _request: web.Request) -> web.Response:
        return answer({role: [member.registration for member in self.registry.members(role)] for role in ROLES})

    def _numbers(self) -> dict[str, int]:
        return {role: len(self.registry.members(role)) for role in ROLES}

    async def _registered_number(self, _request: web.Request) -> web.Response:
        return answer(self._numbers())

    async def _health(self, _request: web.Request) -> web.Response:
        return answer({"status": "ok", "router_id": self.router_id})

    async def _ready(self, _request: web.Request) -> web.Response:
        if not self.dispatcher.ready():
            raise ServeError("no_workers", "no pair of prefill and decode workers, and no mixed worker")
        return answer({"status": "ready", **self._numbers()})

    async def _metrics(self, _request: web.Request) -> web.Response:
        load = sum(member.requests for member in self.registry.members())
        return web.Response(text=self.metrics.render(load, self._numbers()))


@contextlib.asynccontextmanager
async def router(config: RouterConfig) -> AsyncIterator[Router]:
    """Run a router around the body. Its open requests end with it."""
    async with contextlib.AsyncExitStack() as stack:
        legs = Legs(config.timeouts, config.cluster_key)
        stack.push_async_callback(legs.close)
        probes = await stack.enter_async_context(ClientSession(timeout=ClientTimeout(total=_PROBE_TIMEOUT)))
        here = Router(config, legs, probes)
        port = await stack.enter_async_context(serving(here.app, config.host, config.port))
        here.url = f"http://{adt.Address(config.host, port)}"
        sweeping = asyncio.create_task(here.sweep())
        try:
            yield here
        finally:
            sweeping.cancel()
            await asyncio.wait([sweeping])
