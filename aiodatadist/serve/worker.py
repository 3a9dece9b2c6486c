"""A worker process: engines, the library, HTTP, and the heartbeat to its routers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, Final, Literal

import numpy as np
from aiohttp import ClientSession, web

import aiodatadist as adt
from aiodatadist.model import Tokenizer, find_model

from .background import beside, forever
from .config import WorkerConfig
from .decode import DecodePart
from .engine import Engine
from .fetching import Fetcher
from .heartbeat import announce, deregister, keep_registered
from .http import answer, make_app, serving
from .metrics import CONTENT_TYPE, WorkerMetrics
from .mixed import MixedPart
from .numpy_engine import NumpyEngine
from .prefill import PrefillPart
from .protocol import (
    KEY_HEADER,
    AbortJob,
    Deregistration,
    Health,
    Peer,
    Registration,
    decode,
    internal_token,
)
from .pushing import STATES, Pusher, Reservations, listen
from .running import Running
from .tickets import Tickets
from .units import Unit, Units

__all__ = ["DEFAULT_BLOCKS", "Worker", "load_engines", "worker"]

DEFAULT_BLOCKS: Final = {"small": 2048, "smollm2": 256}
"""Blocks of an engine's cache by model: 64 and 180 MiB."""
_DRAIN_LOOK: Final = 0.05
_CLIENT_PATHS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/models")


def load_engines(config: WorkerConfig) -> tuple[list[Engine], Tokenizer, int]:
    """Load the built-in model; blocks. Returns engines, tokenizer and the number of its tokens."""
    found = find_model(config.model)
    model = found.load()
    blocks = DEFAULT_BLOCKS[config.model] if config.num_blocks is None else config.num_blocks
    fingerprint = model.fingerprint()
    engines: list[Engine] = [
        NumpyEngine(model, config.model, blocks, config.slots, fingerprint=fingerprint) for _ in range(config.engines)
    ]
    return engines, found.load_tokenizer(), model.config.vocab


class Worker:
    """A worker that is up. `worker` makes it.

    Attributes
    ----------
    url : str
        Where its HTTP listens.
    worker_id, incarnation : str
        Random for this start.
    units : Units
    tickets : Tickets or None
    pushes : Pusher, Reservations or None
    running : Running
    """

    def __init__(
        self,
        config: WorkerConfig,
        engines: list[Engine],
        tokenizer: Tokenizer,
        vocabulary: int,
        dd: adt.DataDist | None,
    ) -> None:
        self.config = config
        self.worker_id = f"{config.role}-{secrets.token_hex(4)}"
        self.incarnation = secrets.token_hex(8)
        self.url = ""
        self.metrics = WorkerMetrics()
        self.running = Running()
        self.draining = False
        self._dd = dd
        self.peer = self._peer()
        self.units = Units(_open_units(config, engines, dd))
        self.metrics.watch_load(self.units.load)
        self.metrics.watch_prefixes(lambda: (self.units.prompt_tokens, self.units.cached_tokens))
        self.metrics.gauge("tickets", "Prompts that are held for decode workers", lambda: len(self.tickets or ()))
        self.metrics.gauge("pushes", "Prompts that are pushed from here", self._pushing)
        for state in STATES:
            self.metrics.gauge(
                f"reservations_{state}", f"Reservations that are {state}", functools.partial(self._reservations, state)
            )
        self.tickets: Tickets | None = None
        self.pushes: Pusher | Reservations | None = None
        part: PrefillPart | DecodePart | MixedPart
        if dd is None:
            part = MixedPart(self.units, self.running, tokenizer, vocabulary, self.metrics)
        elif config.role == "prefill":
            assert self.peer is not None
            self.tickets = Tickets(dd, self.peer, config.timeouts.lease, digests=config.digests)
            self.pushes = Pusher(dd, self.units, config.timeouts.transfer, self.metrics, digests=config.digests)
            part = PrefillPart(self.units, self.tickets, self.pushes, self.running, tokenizer, vocabulary, self.metrics)
        else:
            assert self.peer is not None
            fetcher = Fetcher(dd, config.timeouts.transfer, self.metrics, config.damage)
            reservations = None
            if "push" in config.modes:
                reservations = self.pushes = Reservations(
                    dd, self.peer, self.units, config.timeouts.reservation, config.timeouts.transfer
                )
            part = DecodePart(self.units, fetcher, self.running, tokenizer, vocabulary, self.metrics, reservations)
        self.app = make_app(
            cluster_key=config.cluster_key,
            api_key=config.api_key,
            public=_CLIENT_PATHS,
            open_to_all=("/health", "/metrics"),
        )
        self.app.add_routes(
            [
                *part.routes(),
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.post("/pd/abort", self._abort),
            ]
        )

    def registration(self) -> Registration:
        """Return what a router has to know now."""
        card = self.units.first.card
        # Of those that were asked for: a pair must not be made for one that cannot be used here.
        usable = [] if self._dd is None else [name for name, why in self._dd.transports.items() if not why]
        return Registration(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            role=self.config.role,
            url=self.url,
            model=card.name,
            model_hash=card.fingerprint,
            layout=self.units.first.layout,
            max_positions=card.max_positions,
            slots=self.units.first.slots * self.config.engines,
            transports=usable,
            modes=list(self.config.modes) if self._dd is not None else [],
            peer=self.peer,
            load=self.units.load(),
            draining=self.draining,
        )

    async def drain(self, seconds: float, announcements: Sequence[Coroutine[Any, Any, object]] = ()) -> None:
        """Take no more requests, and wait until those that are here, and the tickets, have ended, or time is up."""
        self.draining = self.running.closed = True
        limit = time.monotonic() + seconds
        await asyncio.gather(*announcements)
        # Requests and what is held for them: one may begin as another ends, so that no event says that all is done.
        while (len(self.running) or self.tickets or self._promised()) and time.monotonic() < limit:  # noqa: ASYNC110
            await asyncio.sleep(_DRAIN_LOOK)

    def metrics_app(self) -> web.Application:
        """Return an application that serves ``/metrics`` alone."""
        app = web.Application()
        app.add_routes([web.get("/metrics", self._metrics)])
        return app

    def _peer(self) -> Peer | None:
        if self._dd is None:
            return None
        listening = self._dd.listen_address
        return Peer(
            cluster_id=self._dd.cluster_id,
            incarnation=self.incarnation,
            listen=[] if listening is None else [str(adt.Address(self.config.reachable_host, listening.port))],
        )

    async def _health(self, _request: web.Request) -> web.Response:
        name = self.units.first.card.name
        return answer(Health(
            worker_id=self.worker_id, incarnation=self.incarnation, role=self.config.role, model=name,
            load=self.units.load(),
        ))  # fmt: skip

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=self.metrics.page(), headers={"Content-Type": CONTENT_TYPE})

    def _promised(self) -> int:
        """Return the number of reservations that will be asked for."""
        return sum(self._reservations(state) for state in STATES if state != "quarantined")

    def _pushing(self) -> int:
        return len(self.pushes) if isinstance(self.pushes, Pusher) else 0

    def _reservations(self, state: str) -> int:
        return self.pushes.counts()[state] if isinstance(self.pushes, Reservations) else 0

    async def _abort(self, request: web.Request) -> web.Response:
        return answer({"aborted": self.running.abort(decode(await request.read(), AbortJob))})


def _open_units(config: WorkerConfig, engines: list[Engine], dd: adt.DataDist | None) -> list[Unit]:
    """Give each engine its memory: of the library where blocks are to travel."""
    units = []
    remote: Literal["r", "rw"] | None = "rw" if "push" in config.modes else None
    if config.role == "prefill":
        remote = "r"
    for rank, engine in enumerate(engines):
        shapes = engine.tensor_shapes()
        if dd is None:
            engine.bind([np.zeros(shape, engine.layout.dtype) for shape in shapes])
            units.append(Unit(rank, engine, None))
            continue
        cache = dd.cache_manager.allocate_blocks_cache(
            adt.CacheDesc(len(shapes), shapes[0], engine.layout.dtype),
            # A pull reads at the prefill worker and concerns nobody at the decode worker; a push writes there.
            key=None if remote is None else adt.BlocksCacheKey(dd.cluster_id, rank),
            remote=remote,
        )
        engine.bind(cache.tensors)
        units.append(Unit(rank, engine, cache))
    return units


@contextlib.asynccontextmanager
async def worker(config: WorkerConfig) -> AsyncIterator[Worker]:
    """Run a worker around the body.

    At the end it finishes what is under way, where `WorkerConfig.drain` leaves time for it. It leaves its routers, ends
    its requests, waits for the model and the library to be done with the memory, and only then goes.
    """
    engines, tokenizer, vocabulary = await asyncio.to_thread(load_engines, config)
    async with contextlib.AsyncExitStack() as stack:
        dd: adt.DataDist | None = None
        if config.role != "mixed":
            dd = await stack.enter_async_context(
                adt.DataDist(
                    secrets.randbits(63),  # another one for each start: nothing of a dead process can be taken for it
                    adt.Role.PREFILL if config.role == "prefill" else adt.Role.DECODE,
                    listen=str(adt.Address(config.host, config.kv_port)),
                    config=adt.Config.from_env(transports=config.transports, cluster_key=config.cluster_key),
                )
            )
        here = Worker(config, engines, tokenizer, vocabulary, dd)
        for unit in here.units:
            if unit.cache is not None:
                await unit.cache.ready()
            await unit.engine.start()
            stack.push_async_callback(unit.engine.close)
        if here.tickets is not None:
            stack.push_async_callback(here.tickets.close)
        if here.pushes is not None:
            assert dd is not None
            await stack.enter_async_context(
                beside(forever("the words of pushes", functools.partial(listen, dd, here.pushes)))
            )
            stack.push_async_callback(here.pushes.close)
        port = await stack.enter_async_context(serving(here.app, config.host, config.port))
        here.url = f"http://{adt.Address(config.reachable_host, port)}"
        if config.metrics_port is not None:
            await stack.enter_async_context(serving(here.metrics_app(), config.host, config.metrics_port))
        headers = {} if config.cluster_key is None else {KEY_HEADER: internal_token(config.cluster_key)}
        http = await stack.enter_async_context(ClientSession(headers=headers))
        beats = [
            forever("the heartbeat", functools.partial(keep_registered, http, router, here.registration))
            for router in config.routers
        ]
        try:
            async with beside(*beats):
                try:
                    yield here
                finally:
                    if config.drain > 0:
                        announcements = [announce(http, router, here.registration) for router in config.routers]
                        await here.drain(config.drain, announcements)
        finally:
            farewell = Deregistration(worker_id=here.worker_id, incarnation=here.incarnation)
            for router in config.routers:
                await deregister(http, router, farewell)
            here.running.abort(AbortJob(abort_all=True))
