"""Routers and workers in the test's own process, and workers that fail as they are told: for tests of serving.

They talk over real sockets, as in processes of their own; here a test can look at what they hold.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

import msgspec
from aiohttp import ClientSession, web
from msgspec.structs import replace

from aiodatadist.commands import serve
from aiodatadist.commands.serve_check import busy_gauges
from aiodatadist.serve.config import HealthLimits, RouterConfig, Timeouts, WorkerConfig
from aiodatadist.serve.errors import ServeError
from aiodatadist.serve.http import answer, serving
from aiodatadist.serve.protocol import Generation, Health, Load, Message, PrefillJob, Sampling, Ticket, encode
from aiodatadist.serve.router import Router, router
from aiodatadist.serve.worker import Worker, worker

T = TypeVar("T")

BLOCKS = 256
QUICK = Timeouts(connect=2.0, prefill=2.0, first_token=2.0, transfer=2.0, lease=5.0, reservation=5.0)
"""For faults that only time tells of."""


def generation(request_id: str, prompt: Sequence[int] | str, max_tokens: int = 4, **more: Any) -> Generation:
    """Return a request as a router passes it on."""
    return Generation(
        request_id=request_id,
        model="small",
        created=int(time.time()),
        prompt=prompt if isinstance(prompt, str) else list(prompt),
        max_tokens=max_tokens,
        sampling=Sampling(temperature=0.0, ignore_end=True),
        return_token_ids=True,
        **more,
    )


async def tell(http: ClientSession, url: str, job: Message, kind: type[T]) -> T:
    """Give a worker a job as a router does. Raises the ServeError that it answers."""
    async with http.post(url, data=encode(job)) as reply:
        body = await reply.read()
    if reply.status != 200:
        raise ServeError.of_answer(reply.status, msgspec.json.decode(body))
    return msgspec.json.decode(body, type=kind)


async def ticket_of(http: ClientSession, url: str, job: PrefillJob) -> Ticket:
    return await tell(http, f"{url}/pd/prefill", job, Ticket)


async def within(seconds: float, reached: Callable[[], Any], what: str) -> None:
    """Wait for something that must not take long. A time in which all processes stand still is not counted."""
    for _ in range(round(seconds / 0.01)):
        if reached():
            return
        await asyncio.sleep(0.01)
    assert reached(), f"{what}, after {seconds:g} s"


async def idle_within(seconds: float, http: ClientSession, urls: Sequence[str]) -> None:
    """Wait until no process has anything under way."""
    left: dict[str, Any] = dict.fromkeys(urls, "unknown")
    for _ in range(round(seconds / 0.01)):
        left = {url: busy for url in left if (busy := await busy_gauges(http, url))}
        if not left:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"after {seconds:g} s there is still {left}")


@contextlib.asynccontextmanager
async def local_router(**settings: Any) -> AsyncIterator[Router]:
    """Run a router here."""
    settings = {"timeouts": QUICK, "health": HealthLimits(slow_start=0.0)} | settings
    async with router(RouterConfig(port=0, **settings)) as here:
        yield here


@contextlib.asynccontextmanager
async def local_worker(role: str, **settings: Any) -> AsyncIterator[Worker]:
    """Run a worker here, with both hand-overs."""
    settings = {"num_blocks": BLOCKS, "modes": ("pull", "push"), "timeouts": QUICK} | settings
    async with worker(WorkerConfig(role, **settings)) as here:
        yield here


class Front:
    """Registers in a worker's place, and passes on what it is asked, or answers as `script` says for a path.

    Attributes
    ----------
    script : dict of str to str
        By path: ``400``, ``500``, ``refuse``, ``reset``, ``hang``, ``stall`` behind the first piece of a
        stream; others are passed on.
    calls : Counter of str
        By path.
    ticket : Ticket or None
        What prefill is answered with, instead of what the worker says.
    """

    def __init__(self, http: ClientSession, behind: Worker) -> None:
        self.script: dict[str, str] = {}
        self.calls: Counter[str] = Counter()
        self.ticket: Callable[[Ticket], Ticket] | None = None
        self._http = http
        self._behind = behind
        self.incarnation = secrets.token_hex(8)
        self.worker_id = f"front-{secrets.token_hex(4)}"
        self.app = web.Application()
        self.app.add_routes([web.get("/health", self._health), web.post("/pd/{what}", self._serve)])

    async def _health(self, _request: web.Request) -> web.Response:
        role = self._behind.config.role
        return answer(
            Health(worker_id=self.worker_id, incarnation=self.incarnation, role=role, model="small", load=Load())
        )

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        path, body = request.path, await request.read()
        self.calls[path] += 1
        how = self.script.get(path)
        if how == "400":
            return answer(ServeError("invalid_request", "as the script says").body(), 400)
        if how == "500":
            return web.Response(status=500, text="as the script says")
        if how == "refuse":
            return answer(ServeError("no_blocks", "as the script says").body(), 503)
        if how == "reset":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if how == "hang":
            await asyncio.Event().wait()
        async with self._http.post(self._behind.url + path, data=body) as reply:
            if path == "/pd/decode":
                response = web.StreamResponse(status=reply.status, headers={"Content-Type": reply.content_type})
                await response.prepare(request)
                async for chunk in reply.content.iter_any():
                    await response.write(chunk)
                    if how == "stall":
                        await asyncio.Event().wait()
                return response
            said = await reply.read()
        if self.ticket is not None and path == "/pd/prefill" and reply.status == 200:
            said = encode(self.ticket(msgspec.json.decode(said, type=Ticket)))
        return web.Response(body=said, status=reply.status, content_type=reply.content_type)

    async def register(self, router: Router, url: str) -> None:
        """Register with a router, for the rest of the test."""
        said = replace(
            self._behind.registration(),
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            url=url,
            ttl_s=3600.0,
        )
        await tell(self._http, f"{router.url}/register", said, dict)


@contextlib.asynccontextmanager
async def front(http: ClientSession, router: Router, behind: Worker) -> AsyncIterator[Front]:
    """Run a `Front` of a worker that itself knows no router."""
    here = Front(http, behind)
    async with serving(here.app, "127.0.0.1", 0) as port:
        await here.register(router, f"http://127.0.0.1:{port}")
        yield here


# Whole clusters. --------------------------------------------------------------------------------------------


class Inner:
    """A router or a worker of an `inner_cluster`, with the names that a `ServeProcess` has."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.url = url


class InnerCluster:
    """Router and workers in this process, with the names that a `Cluster` has: for tests that kill nobody."""

    def __init__(self, router: Router) -> None:
        self.router = Inner("router", router.url)
        self.workers: dict[str, Inner] = {}
        self.routing = router
        self.working: dict[str, Worker] = {}

    @property
    def url(self) -> str:
        return self.router.url

    @property
    def processes(self) -> list[Inner]:
        return [self.router, *self.workers.values()]


def _parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args(words)


@contextlib.asynccontextmanager
async def inner_cluster(
    counts: dict[str, int], *, router_options: Sequence[str] = (), worker_options: Sequence[str] = ()
) -> AsyncIterator[InnerCluster]:
    """Do what `local_cluster` does, without processes: that saves the time that they take to start.

    The body begins when all workers are registered.
    """
    async with contextlib.AsyncExitStack() as stack:
        config = serve._router_config(_parsed("router", "--port", "0", *router_options))
        cluster = InnerCluster(await stack.enter_async_context(router(config)))
        for role, count in counts.items():
            for number in range(count):
                asked = _parsed(role, "--router", cluster.url, "--num-blocks", str(BLOCKS), *worker_options)
                here = await stack.enter_async_context(worker(serve._worker_config(asked)))
                name = f"{role}-{number}"
                cluster.working[name] = here
                cluster.workers[name] = Inner(name, here.url)
        while len(cluster.routing.registry.members()) < len(cluster.workers):
            await asyncio.sleep(0.005)
        yield cluster
