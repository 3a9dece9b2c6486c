"""The router process: OpenAI's front end, the registry of workers, and nothing of KV."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import TYPE_CHECKING, Final

from aiohttp import ClientSession, ClientTimeout, web
from msgspec.structs import replace
from prometheus_client.core import GaugeMetricFamily, Metric

import aiodatadist as adt

from . import openai
from .admission import Admission
from .background import beside, forever
from .config import RUNNING_PER_SLOT, RouterConfig
from .dispatch import Dispatcher
from .errors import ServeError
from .http import REQUEST_ID, STREAM, answer, make_app, serving
from .legs import Legs, Upstream
from .metrics import CONTENT_TYPE, RouterMetrics
from .migrating import Migrating
from .probing import Prober, check_address
from .protocol import (
    ROLES,
    AbortJob,
    Deregistration,
    Generation,
    Id,
    Message,
    Registered,
    Registration,
    decode,
)
from .registry import Member, Registry

if TYPE_CHECKING:
    from .redis_scheduler import RedisScheduler, Scheduled

__all__ = ["Router", "router"]

_CLIENT_PATHS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/abort_requests")
_SWEEP: Final = 0.5
_BEATS: Final = 3
"""Heartbeats that may be missing before a worker is gone."""
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
        self.registry = Registry(config.health)
        self.metrics = RouterMetrics()
        self.admission = Admission(self._room, config.queue_size if config.wait_for_room else 0, config.queue_wait)
        self.metrics.gauge("router_queue", "Requests that wait to be let in", lambda: self.admission.waiting)
        self.metrics.watch_members(self._member_metrics)
        self.dispatcher = Dispatcher(config, self.registry, legs, self.metrics)
        self.scheduler: RedisScheduler | None = None
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
        """After a while, forget silent workers, and end drains that last too long."""
        await asyncio.sleep(_SWEEP)
        self.metrics.lost += len(self.registry.sweep())
        self.admission.wake()
        for member in self.registry.overdue():
            self._legs.tell(member, "/pd/abort", AbortJob(abort_all=True))

    def _room(self) -> int:
        """Return how many requests may be with workers at once; 0: nobody can serve, or the scheduler bounds it."""
        if self.config.scheduler is not None:
            return 0
        members = [*self.registry.usable("decode"), *self.registry.usable("mixed")]
        if not members or self.config.max_running is not None:
            return self.config.max_running or 0
        return RUNNING_PER_SLOT * sum(member.registration.slots for member in members)

    # Clients. -----------------------------------------------------------------------------------------------

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, chat=True)

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, chat=False)

    async def _serve(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        began = time.perf_counter()
        self.metrics.in_flight += 1
        status, code = 499, "client_gone"
        try:
            generation = openai.read_request(await request.read(), chat=chat)
            try:
                async with asyncio.timeout(self.config.timeouts.request), self.admission.enter():
                    self.metrics.seconds["queue"].observe(time.perf_counter() - began)
                    response, broken = await self._forward(request, generation, began)
            except TimeoutError as why:
                raise ServeError("request_timeout", f"not done in {self.config.timeouts.request:g} s") from why
            status, code = response.status, "ok" if broken is None else broken.code
            if broken is None:
                self.metrics.seconds["e2e"].observe(time.perf_counter() - began)
            return response
        except ConnectionResetError:
            raise  # a write found the client gone before the server's own look did
        except Exception as why:
            known = why if isinstance(why, ServeError) else ServeError("internal_error", str(why))
            status, code = known.status, known.code
            raise
        finally:
            self.metrics.in_flight -= 1
            self.metrics.ended(status, code)

    async def _forward(
        self, request: web.Request, generation: Generation, began: float
    ) -> tuple[web.StreamResponse, ServeError | None]:
        """Pass an answer on; returns it, and what broke it after it had begun well."""
        upstream = await self._open(generation)
        self.metrics.seconds["ttft"].observe(time.perf_counter() - began)
        headers = {REQUEST_ID: generation.request_id, "Content-Type": upstream.content_type, **upstream.route}
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

    async def _open(self, generation: Generation) -> Upstream | Scheduled | Migrating:
        if self.scheduler is not None:
            return await self.scheduler.open(generation)
        if self.config.migrate:
            return await Migrating(self.dispatcher, generation).open()
        return await self.dispatcher.open(generation)

    async def _stream(
        self,
        request: web.Request,
        response: web.StreamResponse,
        chunks: AsyncGenerator[bytes],
        upstream: Upstream | Scheduled | Migrating,
    ) -> ServeError | None:
        broken: ServeError | None = None
        STREAM.set(response)  # for an error that comes from outside, as by the deadline of the whole request
        await response.prepare(request)
        first = last = time.perf_counter()
        pieces = 0
        try:
            async for chunk in chunks:
                last = time.perf_counter()
                pieces += chunk.count(b"data: {")
                await response.write(chunk)
            self.metrics.streamed(first, last, pieces)
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
                said = await self._legs.ask(member, "/pd/abort", job, dict, _PROBE_TIMEOUT, aside=True)
                return int(said.get("aborted", 0))
            return 0

        counts = await asyncio.gather(*map(tell, self.registry.members()))
        return answer({"aborted": sum(counts)})

    # Workers. -----------------------------------------------------------------------------------------------

    async def _register(self, request: web.Request) -> web.Response:
        registration = decode(await request.read(), Registration)
        registration = replace(registration, ttl_s=_BEATS * self.config.heartbeat)
        if not self.registry.knows(registration.worker_id, registration.incarnation):
            await check_address(self._probes, registration)
        self.registry.put(registration)
        self.admission.wake()
        return answer(Registered(router_id=self.router_id, heartbeat_s=self.config.heartbeat))

    async def _deregister(self, request: web.Request) -> web.Response:
        return answer({"removed": self.registry.remove(decode(await request.read(), Deregistration))})

    async def _drain(self, request: web.Request) -> web.Response:
        job = decode(await request.read(), _Drain)
        member = self.registry.find(job.worker_id)
        if member is None:
            raise ServeError("not_found", f"no worker {job.worker_id!r} is registered", param="worker_id")
        if not job.drain:
            member.drain_since = None
        elif member.drain_since is None:
            member.drain_since = time.monotonic()
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
        if self.scheduler is not None:
            self.scheduler.check()
        return answer({"status": "ready", **self._numbers()})

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=self.metrics.page(), headers={"Content-Type": CONTENT_TYPE})

    def _member_metrics(self) -> Iterator[Metric]:
        there = GaugeMetricFamily("aiodatadist_router_workers", "Workers that are registered", labels=["role"])
        for role, count in self._numbers().items():
            there.add_metric([role], count)
        yield there
        members = self.registry.members()
        leases = sum(member.requests for member in members)
        yield GaugeMetricFamily("aiodatadist_router_load_leases", "Requests that are with workers", value=leases)
        for name, help, value in (
            ("breaker", "The breaker: 0 closed, 1 half open, 2 open", lambda m: m.health.breaker.value),
            ("unanswering", "1: does not answer probes", lambda m: not m.health.answering),
            ("slow_start", "What is missing to its full share of requests", lambda m: 1 - m.health.weight),
            ("draining", "1: gets no new requests", lambda m: m.draining),
            ("tokens", "Tokens of prompts in flight", lambda m: m.tokens),
        ):
            family = GaugeMetricFamily(f"aiodatadist_router_worker_{name}", help, labels=["worker", "role"])
            for member in members:
                family.add_metric([member.worker_id, member.registration.role], value(member))
            yield family


@contextlib.asynccontextmanager
async def router(config: RouterConfig) -> AsyncIterator[Router]:
    """Run a router around the body. Its open requests end with it."""
    async with contextlib.AsyncExitStack() as stack:
        legs = Legs(config.timeouts, config.cluster_key)
        stack.push_async_callback(legs.close)
        probes = await stack.enter_async_context(ClientSession(timeout=ClientTimeout(total=_PROBE_TIMEOUT)))
        here = Router(config, legs, probes)
        if config.scheduler is not None:
            from .redis_scheduler import redis_scheduler  # Redis is for those who use it

            here.scheduler = await stack.enter_async_context(
                redis_scheduler(config.scheduler, config.timeouts, here.dispatcher, here.router_id)
            )
        port = await stack.enter_async_context(serving(here.app, config.host, config.port))
        here.url = f"http://{adt.Address(config.host, port)}"
        prober = Prober(probes, here.registry, config.health.probe_period)
        async with beside(forever("the sweep", here.sweep), forever("the probes", prober.round)):
            yield here
