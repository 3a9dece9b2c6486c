"""The working side of the Redis scheduler: take requests, have workers serve them, write the results.

A request is taken by one router of the group, which refreshes its entry while it works on it. Where that router dies,
or stands still, another claims the entry and serves the request from its beginning; the front drops what it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from typing import Final

import msgspec

from aiodatadist.observe import get_logger

from .background import beside, log_failure
from .dispatch import Dispatcher
from .errors import ServeError
from .legs import Upstream
from .migrating import Moves
from .protocol import Generation
from .redis_store import GROUP, TROUBLE, Outbox, ScheduledJob, Store, pack
from .results import Result

__all__ = ["Runs"]

_HOLD_PERIOD: Final = 0.5
_IDLE_LIMIT: Final = 5.0
"""Seconds without a sign of life of its owner after which a request is anybody's."""
_MOST_DELIVERIES: Final = 4
"""A request that has outlived so many owners may be what ended them."""
_AT_ONCE: Final = 8
_BLOCK_MS: Final = 500
_NOT_READY: Final = 0.1
_WANT_OF_ROOM: Final = ("no_workers", "no_blocks", "prefill_busy", "draining", "queue_full", "queue_timeout")
_ROOM_PAUSE: Final = 0.2
_TIDY_EVERY: Final = 120
"""Holds between two looks for consumers that are gone."""
_GONE_AFTER_MS: Final = 60_000
_FLUSH: Final = 2.0

_log = get_logger().bind(part="serve")


class Runs:
    """What this router works on for all routers of the topic.

    Parameters
    ----------
    store : Store
    dispatcher : Dispatcher
    """

    def __init__(self, store: Store, dispatcher: Dispatcher) -> None:
        self._store = store
        self._dispatcher = dispatcher
        self._outbox = Outbox(store)
        self._jobs: dict[bytes, ScheduledJob] = {}
        self._tasks: dict[bytes, asyncio.Task[None]] = {}
        self._cursor: bytes | str = "0-0"
        self._holds = 0

    @contextlib.asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """Work beside the body. At its end others get what is not done."""
        store = self._store
        async with beside(store.forever(self._outbox.step)):
            try:
                async with beside(store.forever(self._pull), store.forever(self._hold)):
                    yield
            finally:
                left = list(self._jobs)
                await self._cancel(left)
                await self._outbox.flush(_FLUSH)
                with contextlib.suppress(*TROUBLE):
                    async with asyncio.timeout(_FLUSH):
                        await store.give_back(left)

    def _room(self) -> int:
        """Return how many more to take: the model shall find prompts that are computed, and others the rest."""
        if not self._dispatcher.ready():
            return 0
        registry = self._dispatcher.registry
        slots = sum(member.registration.slots for role in ("decode", "mixed") for member in registry.usable(role))
        return min(2 * slots - len(self._jobs), _AT_ONCE)

    async def _pull(self) -> None:
        room = self._room()
        if room <= 0:
            await asyncio.sleep(_NOT_READY)
            return
        # What is read here while the answer gets lost is claimed a little later, by whomever.
        found = await self._store.redis.xreadgroup(
            GROUP, self._store.router_id, {self._store.requests: ">"}, count=room, block=_BLOCK_MS
        )
        for _, entries in found or ():
            await self._take(entries)

    async def _hold(self) -> None:
        await asyncio.sleep(_HOLD_PERIOD)
        now = dict(self._jobs)
        if now:
            try:
                kept = await self._store.hold(now)
            except TROUBLE as why:
                if "NOGROUP" in str(why):  # all is lost, and will be submitted again
                    await self._cancel(list(now))
                raise
            await self._cancel([entry for entry in now if entry not in kept])
        if (room := self._room()) > 0:
            await self._claim(room)
        self._holds += 1
        if self._holds % _TIDY_EVERY == 0:
            await self._tidy()

    async def _claim(self, room: int) -> None:
        """Take what others have let lie."""
        self._cursor, entries, *_ = await self._store.redis.xautoclaim(
            self._store.requests,
            GROUP,
            self._store.router_id,
            min_idle_time=round(_IDLE_LIMIT * 1000),
            start_id=self._cursor,
            count=room,
        )
        for entry, fields in entries:
            if fields is None:  # deleted meanwhile; of Redis before 7
                self._outbox.tell("XACK", self._store.requests, GROUP, entry)
                continue
            pending = await self._store.redis.xpending_range(self._store.requests, GROUP, entry, entry, 1)
            times = pending[0]["times_delivered"] if pending else 0
            _log.warning("taking over a request", entry=entry.decode(), deliveries=times)
            await self._take([(entry, fields)], give_up=times > _MOST_DELIVERIES)

    async def _take(self, entries: list[tuple[bytes, dict[bytes, bytes]]], *, give_up: bool = False) -> None:
        jobs: dict[bytes, ScheduledJob] = {}
        for entry, fields in entries:
            if entry in self._jobs:  # claimed from ourselves: an answer to `hold` took too long
                continue
            try:
                jobs[entry] = msgspec.msgpack.decode(fields[b"job"], type=ScheduledJob)
            except (KeyError, msgspec.DecodeError) as why:
                _log.warning("not a request", entry=entry.decode(), reason=str(why))
                self._outbox.tell("XACK", self._store.requests, GROUP, entry)
                self._outbox.tell("XDEL", self._store.requests, entry)
        if not jobs:
            return
        for entry in await self._store.hold(jobs):
            job = self._jobs[entry] = jobs[entry]
            if give_up:
                text = f"{_MOST_DELIVERIES} routers did not survive this request"
                self._end(entry, job, Result(request_id=job.generation.request_id, error="worker_failed", text=text))
                del self._jobs[entry]
                continue
            task = self._tasks[entry] = asyncio.create_task(self._run(entry, job))
            task.add_done_callback(functools.partial(self._gone, entry))

    def _gone(self, entry: bytes, task: asyncio.Task[None]) -> None:
        del self._jobs[entry], self._tasks[entry]
        log_failure(task)

    async def _cancel(self, entries: list[bytes]) -> None:
        tasks = [self._tasks[entry] for entry in entries if entry in self._tasks]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _tidy(self) -> None:
        for about in await self._store.redis.xinfo_consumers(self._store.requests, GROUP):
            if about["pending"] == 0 and about["idle"] > _GONE_AFTER_MS:
                await self._store.leave(about["name"])

    async def _run(self, entry: bytes, job: ScheduledJob) -> None:
        """Have a request served; whatever comes of it is the result."""
        request_id = job.generation.request_id
        try:
            end = await self._serve(job)
        except ServeError as why:
            end = Result(request_id=request_id, error=why.code, text=why.message)
        except Exception as why:
            _log.exception("a request failed", request_id=request_id)
            end = Result(request_id=request_id, error="internal_error", text=f"{type(why).__name__}: {why}")
        self._end(entry, job, end)

    def _end(self, entry: bytes, job: ScheduledJob, result: Result) -> None:
        self._publish(job, result)
        # In one transaction with the last result, or after it: never before.
        self._outbox.tell(*self._store.finish(entry, result.request_id))

    def _publish(self, job: ScheduledJob, result: Result) -> None:
        key = self._store.results_of(job.router_id)
        self._outbox.tell("XADD", key, "*", "result", pack(result))
        self._outbox.tell("EXPIRE", key, self._store.config.ttl)

    async def _serve(self, job: ScheduledJob) -> Result:
        # The front makes of it what its client asked for, and drops what it has after a move.
        moves = Moves(self._dispatcher, job.generation, self._open)
        end = Result(request_id=job.generation.request_id)
        async with contextlib.aclosing(moves.results()) as results:
            async for result in results:
                if result.last:
                    end = result
                else:
                    self._publish(job, result)
        return end

    async def _open(self, generation: Generation, suspect: str) -> Upstream:
        while True:
            try:
                return await self._dispatcher.open_again(generation, suspect)
            except ServeError as why:
                if why.code not in _WANT_OF_ROOM or not self._dispatcher.config.wait_for_room:
                    raise
            # It waits, as in the stream. Whoever wants it no more says so there.
            await asyncio.sleep(_ROOM_PAUSE)
