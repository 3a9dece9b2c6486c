"""Requests and results by way of Redis: routers of one topic share their work, and survive each other.

What FastDeploy calls its splitwise scheduler, without its losses. The router that a client talks to is the front of
its request: it submits it to a stream and reads the results from another. Any router of the topic serves it
(`redis_runs`), perhaps the same one. Each worker registers with all of them.

=========================  ======================================================================================
Redis ...                  then
=========================  ======================================================================================
is full of requests        new ones get ``queue_full`` (429); nothing is trimmed
is away, or slow           new requests get ``scheduler_unavailable`` (503); those under way go on when it is back,
                           if that is within their timeouts
was restarted or flushed   fronts notice that requests are missing, and submit them again under their ids
=========================  ======================================================================================

With ``appendonly yes`` an accepted request survives a restart of Redis by itself; without, by its front.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Final

import msgspec

from aiodatadist.observe import get_logger

from .background import beside
from .config import SchedulerConfig, Timeouts
from .dispatch import Dispatcher
from .errors import ServeError
from .protocol import Generation
from .redis_runs import Runs
from .redis_store import LIFE, TROUBLE, Outbox, ScheduledJob, Store
from .results import Merged, Result

__all__ = ["RedisScheduler", "Scheduled", "redis_scheduler"]

_KEEP_PERIOD: Final = 1.0
_READ_COUNT: Final = 500
_BLOCK_MS: Final = 500
_FLUSH: Final = 2.0

_log = get_logger().bind(part="serve")


class Scheduled(Merged):
    """A request of a client of this router, under way; to be used like a `legs.Upstream`.

    Parameters
    ----------
    scheduler : RedisScheduler
    generation : Generation
    idle : float
        Seconds of silence in a stream after which it is broken.
    """

    status: Final = 200

    def __init__(self, scheduler: RedisScheduler, generation: Generation, idle: float) -> None:
        super().__init__(generation)
        self.route: dict[str, str] = {}  # it is another router that knows
        self.submitted = False
        self._scheduler = scheduler
        self._idle = idle
        self._news = asyncio.Event()

    def take(self, result: Result) -> bool:
        """See `Merged`."""
        taken = super().take(result)
        if taken:
            self._news.set()
        return taken

    def fail(self, error: ServeError) -> None:
        """End it with an error."""
        self.error = error
        self._news.set()

    async def wait_begun(self) -> None:
        """Wait for the first result. Raises ServeError if it is an error."""
        await self._news.wait()
        if self.error is not None and not self.begun:
            raise self.error

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Yield the body as it comes. Raises ServeError."""
        while True:
            try:
                async with asyncio.timeout(self._idle):
                    await self._news.wait()
            except TimeoutError as why:
                raise ServeError("stream_broken", f"no word of the request for {self._idle:g} s") from why
            self._news.clear()
            for chunk in self.write():
                yield chunk
            if self.error is not None:
                raise self.error
            if self.complete:
                return

    def close(self) -> None:
        """Say that nobody waits for it any more. Again is no error."""
        self._scheduler.forget(self)


class RedisScheduler:
    """The front's side; `redis_scheduler` makes it.

    Parameters
    ----------
    store : Store
    timeouts : Timeouts
    """

    def __init__(self, store: Store, timeouts: Timeouts) -> None:
        self._store = store
        self._timeouts = timeouts
        self._open: dict[str, Scheduled] = {}
        self._outbox = Outbox(store)

    def check(self) -> None:
        """Raise ServeError ``scheduler_unavailable`` if Redis is known to be away."""
        if self._store.trouble:
            raise ServeError("scheduler_unavailable", f"the scheduler does not answer: {self._store.trouble}")

    async def open(self, generation: Generation) -> Scheduled:
        """Have a request served; returns when its answer has begun.

        Raises
        ------
        ServeError
            ``queue_full``, ``scheduler_unavailable``, or why it cannot be served.
        """
        call = self._open[generation.request_id] = Scheduled(self, generation, self._timeouts.idle)
        try:
            if await self._store.submit(self._job(call), limit=self._store.config.limit) == "full":
                raise ServeError("queue_full", f"{self._store.config.limit} requests are with the scheduler")
            call.submitted = True
            await call.wait_begun()
        except BaseException:
            call.close()
            raise
        return call

    def forget(self, call: Scheduled) -> None:
        """See `Scheduled.close`."""
        if self._open.pop(call.generation.request_id, None) is not None:
            # Also where Redis did not answer: it may have taken the request.
            self._outbox.tell(*self._store.forget(call.generation.request_id))

    @contextlib.asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """Read results beside the body."""
        store = self._store
        async with beside(store.forever(self._outbox.step)):
            try:
                async with beside(store.forever(self._read), store.forever(self._keep)):
                    yield
            finally:
                self._outbox.tell("DEL", store.life(store.router_id), store.results)
                await self._outbox.flush(_FLUSH)

    def _job(self, call: Scheduled) -> ScheduledJob:
        return ScheduledJob(router_id=self._store.router_id, generation=call.generation)

    async def _read(self) -> None:
        # Always from the beginning: a Redis that was flushed may begin to count anew.
        found = await self._store.redis.xread({self._store.results: "0"}, count=_READ_COUNT, block=_BLOCK_MS)
        for _, entries in found or ():
            for entry, fields in entries:
                try:
                    result = msgspec.msgpack.decode(fields[b"result"], type=Result)
                except (KeyError, msgspec.DecodeError) as why:
                    _log.warning("not a result", entry=entry.decode(), reason=str(why))
                    continue
                if (call := self._open.get(result.request_id)) is not None:
                    try:
                        call.take(result)
                    except Exception as why:  # it must not stay in the stream and be read again for ever
                        _log.exception("a result was not understood", request_id=result.request_id)
                        call.fail(ServeError("internal_error", f"{type(why).__name__}: {why}"))
            await self._store.redis.xdel(self._store.results, *(entry for entry, _ in entries))

    async def _keep(self) -> None:
        """Give a sign of life, and look whether Redis still knows the requests."""
        store = self._store
        calls = [call for call in self._open.values() if call.submitted]
        async with store.redis.pipeline(transaction=False) as pipe:
            pipe.set(store.life(store.router_id), 1, ex=LIFE)
            for call in calls:
                pipe.expire(store.job(call.generation.request_id), store.config.ttl)
            _, *known = await pipe.execute()
        store.well()
        for call, there in zip(calls, known, strict=True):
            request_id = call.generation.request_id
            if (call.lost or not there) and self._open.get(request_id) is call:
                _log.warning("submitting a request again", request_id=request_id)
                with contextlib.suppress(ServeError):  # in a second, then
                    await store.submit(self._job(call), limit=0, force=call.lost)
                    call.lost = False
        await asyncio.sleep(_KEEP_PERIOD)


@contextlib.asynccontextmanager
async def redis_scheduler(
    config: SchedulerConfig, timeouts: Timeouts, dispatcher: Dispatcher, router_id: str
) -> AsyncIterator[RedisScheduler]:
    """Run a router's part of the scheduler around the body.

    Parameters
    ----------
    config : SchedulerConfig
    timeouts : Timeouts
    dispatcher : Dispatcher
        Serves what this router takes from the stream.
    router_id : str

    Raises
    ------
    ConfigError
        Redis is too old, or refuses the password. That it is away is no error.
    """
    store = Store(config, router_id)
    try:
        try:
            await store.check()
            await store.make_group()
        except TROUBLE as why:
            await store.wait(why)
        here = RedisScheduler(store, timeouts)
        async with here.working(), Runs(store, dispatcher).working():
            yield here
    finally:
        await store.redis.aclose()
