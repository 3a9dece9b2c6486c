"""Redis as the scheduler uses it: names, messages, the scripts that must be one step, and calls that are sent again.

=========================  ============  ===================================================================
key                        type          holds
=========================  ============  ===================================================================
``TOPIC.requests``         stream        requests, waiting and being worked on; group ``routers``
``TOPIC.results.ROUTER``   stream        what is written for the clients of one router, which deletes what it read
``TOPIC.job.REQUEST``      string        the entry in ``TOPIC.requests`` that counts, or ``done``
``TOPIC.router.ROUTER``    string        a sign of life
=========================  ============  ===================================================================

All that is sent may be sent twice: an entry counts only while its job names it, and results say where they belong.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError, ResponseError

from aiodatadist.errors import ConfigError
from aiodatadist.observe import get_logger

from .background import forever
from .config import SchedulerConfig
from .errors import ServeError
from .protocol import Generation, Id, Message

__all__ = ["GROUP", "LIFE", "TROUBLE", "Outbox", "ScheduledJob", "Store", "pack"]

GROUP: Final = "routers"
TROUBLE: Final = (RedisError, OSError, TimeoutError)
"""What a call may raise while Redis is away, slow, full or new."""
LIFE: Final = 6
"""Seconds without a sign of life after which nobody works for a router any more."""

_OLDEST: Final = (6, 2)
_ANSWER_LIMIT: Final = 3.0
"""Seconds for an answer; more than a blocking read blocks."""
_CONNECT_LIMIT: Final = 1.0
_PAUSE: Final = 0.2
"""Seconds between two attempts while Redis is away."""
_CALLS_AT_ONCE: Final = 16
_BATCH: Final = 500

_log = get_logger().bind(part="serve")

pack = msgspec.msgpack.encode


class ScheduledJob(Message, frozen=True):
    """A request, and the router whose client waits for it."""

    router_id: Id
    generation: Generation


# Take a request in, unless it is known or there is no room. With force it is known no more.
_SUBMIT: Final = """
redis.call('SET', KEYS[3], '1', 'EX', ARGV[5])
local held = redis.call('GET', KEYS[2])
if held and ARGV[4] == '0' then return 'known' end
local limit = tonumber(ARGV[2])
if limit > 0 and redis.call('XLEN', KEYS[1]) >= limit then return 'full' end
if held and held ~= 'done' then redis.call('XDEL', KEYS[1], held) end
local entry = redis.call('XADD', KEYS[1], '*', 'job', ARGV[1])
redis.call('SET', KEYS[2], entry, 'EX', ARGV[3])
return 'taken'
"""

# For each entry: still mine and still wanted? Then it is as fresh as new; if it is mine and unwanted, it goes.
_HOLD: Final = """
local kept = {}
for i = 3, #ARGV do
  local entry, job, router = ARGV[i], KEYS[2 * (i - 2)], KEYS[2 * (i - 2) + 1]
  kept[i - 2] = 0
  if #redis.call('XPENDING', KEYS[1], ARGV[1], entry, entry, 1, ARGV[2]) > 0 then
    local current = redis.call('GET', job) == entry
    if current and redis.call('EXISTS', router) == 1 then
      redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, entry, 'JUSTID')
      kept[i - 2] = 1
    else
      redis.call('XACK', KEYS[1], ARGV[1], entry)
      redis.call('XDEL', KEYS[1], entry)
      if current then redis.call('DEL', job) end
    end
  end
end
return kept
"""

_FINISH: Final = """
redis.call('XACK', KEYS[1], ARGV[1], ARGV[2])
redis.call('XDEL', KEYS[1], ARGV[2])
if redis.call('GET', KEYS[2]) == ARGV[2] then redis.call('SET', KEYS[2], 'done', 'EX', ARGV[3]) end
"""

_FORGET: Final = """
local held = redis.call('GET', KEYS[2])
redis.call('DEL', KEYS[2])
if held and held ~= 'done' then redis.call('XDEL', KEYS[1], held) end
"""

# Make entries of mine so old that the next who looks takes them.
_GIVE_BACK: Final = """
for i = 3, #ARGV do
  if #redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1, ARGV[2]) > 0 then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[i], 'IDLE', 86400000, 'JUSTID')
  end
end
"""

# Deleting a consumer would delete what it has not given back.
_LEAVE: Final = """
if #redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2]) == 0 then
  redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
end
"""


class Store:
    """One router's view of Redis.

    Parameters
    ----------
    config : SchedulerConfig
    router_id : str
        Names this router's results, and it as a consumer.

    Attributes
    ----------
    redis : redis.asyncio.Redis
    trouble : str
        What is wrong with Redis now; empty: nothing.
    """

    def __init__(self, config: SchedulerConfig, router_id: str) -> None:
        self.config = config
        self.router_id = router_id
        self.requests = f"{config.topic}.requests"
        self.results = self.results_of(router_id)
        self.trouble = ""
        # The types of its answers differ between versions of the package.
        self.redis: Any = Redis(
            host=config.host,
            port=config.port,
            password=config.password,
            socket_timeout=_ANSWER_LIMIT,
            socket_connect_timeout=_CONNECT_LIMIT,
            # What is repeated, and for how long, is said here and not in the client.
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
        self._calls = asyncio.Semaphore(_CALLS_AT_ONCE)

    def results_of(self, router_id: str) -> str:
        """Return the key of a router's results."""
        return f"{self.config.topic}.results.{router_id}"

    def job(self, request_id: str) -> str:
        """Return the key of a request's state."""
        return f"{self.config.topic}.job.{request_id}"

    def life(self, router_id: str) -> str:
        """Return the key of a router's sign of life."""
        return f"{self.config.topic}.router.{router_id}"

    async def check(self) -> None:
        """Look what Redis this is.

        Raises
        ------
        ConfigError
            It is too old, or the password is wrong.
        RedisError, OSError, TimeoutError
            It cannot be asked now.
        """
        where = f"Redis at {self.config.host}:{self.config.port}"
        try:
            about = await self.redis.info()
        except AuthenticationError as why:
            raise ConfigError(f"{where} refuses us: {why}", hint="give its password by a file") from why
        version = tuple(int(part) for part in str(about["redis_version"]).split(".")[:2])
        if version < _OLDEST:
            raise ConfigError(f"{where} has version {about['redis_version']}; 6.2 or newer is needed")
        _log.info("scheduler", redis=about["redis_version"], appendonly=bool(about.get("aof_enabled")))

    async def make_group(self) -> None:
        """Make the group of the requests, if it is not there: also of those that came before it."""
        try:
            await self.redis.xgroup_create(self.requests, GROUP, id="0", mkstream=True)
        except ResponseError as why:
            if "BUSYGROUP" not in str(why):  # it is
                raise

    async def submit(self, job: ScheduledJob, *, limit: int, force: bool = False) -> str:
        """Submit a request; returns ``taken``, ``known`` or ``full``.

        Parameters
        ----------
        job : ScheduledJob
        limit : int
            Requests in the stream, beyond which there is no room; 0: there is always room.
        force : bool
            Begin again even if it is known.

        Raises
        ------
        ServeError
            ``scheduler_unavailable``: nobody knows whether Redis has taken it.
        """
        keys = (self.requests, self.job(job.generation.request_id), self.life(job.router_id))
        settings = (limit, self.config.ttl, int(force), LIFE)
        try:
            async with asyncio.timeout(_ANSWER_LIMIT), self._calls:
                return str((await self._eval(_SUBMIT, keys, pack(job), *settings)).decode())
        except TROUBLE as why:
            raise ServeError("scheduler_unavailable", f"the scheduler does not answer: {describe(why)}") from why

    async def hold(self, entries: dict[bytes, ScheduledJob]) -> list[bytes]:
        """Refresh entries that are being worked on; returns those that are still this router's, and wanted."""
        keys = [self.requests]
        for job in entries.values():
            keys += (self.job(job.generation.request_id), self.life(job.router_id))
        kept = await self._eval(_HOLD, keys, GROUP, self.router_id, *entries)
        return [entry for entry, still in zip(entries, kept, strict=True) if still]

    async def give_back(self, entries: list[bytes]) -> None:
        """Let others have entries at once, and leave the group if that was all."""
        await self._eval(_GIVE_BACK, [self.requests], GROUP, self.router_id, *entries)
        await self.leave(self.router_id)

    async def leave(self, consumer: str | bytes) -> None:
        """Take a consumer out of the group, unless it has something."""
        await self._eval(_LEAVE, [self.requests], GROUP, consumer)

    def finish(self, entry: bytes, request_id: str) -> tuple[Any, ...]:
        """Return the command that ends an entry, for an `Outbox`.

        That it is done is remembered for as long as its router gives signs of life.
        """
        return ("EVAL", _FINISH, 2, self.requests, self.job(request_id), GROUP, entry, 2 * LIFE)

    def forget(self, request_id: str) -> tuple[Any, ...]:
        """Return the command that says that nobody wants a request any more, for an `Outbox`."""
        return ("EVAL", _FORGET, 2, self.requests, self.job(request_id))

    async def forever(self, step: Callable[[], Awaitable[None]]) -> None:
        """Take a step again and again until cancelled, whatever becomes of Redis."""

        async def take() -> None:
            try:
                await step()
            except TROUBLE as why:
                await self.wait(why)

        await forever(step.__qualname__, take)

    def well(self) -> None:
        """Hear that Redis takes what is written."""
        if self.trouble:
            _log.info("Redis answers again", host=self.config.host, port=self.config.port)
        self.trouble = ""

    async def wait(self, why: BaseException) -> None:
        """Hear of a call that did not, and wait a little before the next."""
        if "NOGROUP" in str(why):  # flushed, or restarted without its data
            with contextlib.suppress(*TROUBLE):
                await self.make_group()
                return
        if not self.trouble:
            _log.warning("trouble with Redis", reason=describe(why))
        self.trouble = describe(why)
        await asyncio.sleep(_PAUSE)

    async def _eval(self, script: str, keys: Any, *arguments: Any) -> Any:
        return await self.redis.execute_command("EVAL", script, len(keys), *keys, *arguments)


class Outbox:
    """Commands that are sent in their order, many at once, and again until Redis has taken them.

    Their number is bounded by the requests under way and the lengths of their answers.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: list[tuple[Any, ...]] = []
        self._more = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def tell(self, *command: Any) -> None:
        """Have a command sent."""
        self._waiting.append(command)
        self._idle.clear()
        self._more.set()

    async def flush(self, seconds: float) -> None:
        """Wait until all is sent, or the time is up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()

    async def step(self) -> None:
        """Send what waits; for `Store.forever`."""
        await self._more.wait()
        batch = self._waiting[:_BATCH]
        async with self._store.redis.pipeline(transaction=True) as pipe:
            for command in batch:
                pipe.execute_command(*command)
            await pipe.execute()
        del self._waiting[: len(batch)]
        if not self._waiting:
            self._more.clear()
            self._idle.set()


def describe(why: BaseException) -> str:
    """Return what went wrong, in a few words."""
    return f"{type(why).__name__}: {why}" if str(why) else type(why).__name__
