"""Routers that share their work by a real Redis: deaths, and a Redis that is full, away, slow, restarted, flushed."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="serving needs aiohttp")
pytest.importorskip("redis", reason="the scheduler needs redis")

from aiohttp import ClientSession
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from aiodatadist.commands.serve_cluster import Cluster, ServeProcess, local_cluster
from aiodatadist.serve.background import beside
from aiodatadist.serve.config import SchedulerConfig, Timeouts
from aiodatadist.serve.errors import ServeError
from aiodatadist.serve.openai import read_request
from aiodatadist.serve.redis_scheduler import RedisScheduler, Scheduled
from aiodatadist.serve.redis_store import Store, pack
from aiodatadist.serve.results import Result

from .serve_local import inner_cluster, local_worker
from .test_serve import Server, client, complete, events, get, post, wait_for
from .waiting import PATIENCE, until

pytestmark = [pytest.mark.redis, pytest.mark.hang_limit(240)]

TOPIC = "test"
LONG: dict[str, Any] = {
    "model": "small",
    "prompt": "Once upon a time",
    "temperature": 0,
    "max_tokens": 300,
    "ignore_eos": True,
}


class RedisServer:
    """A redis-server of our own."""

    def __init__(self, folder: Path, port: int, appendonly: bool) -> None:
        self.port = port
        self._command = [
            "redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", "",
            "--appendonly", "yes" if appendonly else "no", "--daemonize", "no",
        ]  # fmt: skip
        self.process: asyncio.subprocess.Process
        self.redis: Any = None

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(*self._command, stdout=asyncio.subprocess.DEVNULL)
        self.redis = Redis(port=self.port, retry=Retry(NoBackoff(), 0), protocol=2)

        async def answers() -> bool:
            with contextlib.suppress(Exception):
                return bool(await self.redis.ping())
            return False

        await until_async(answers)

    async def kill(self) -> None:
        """As by SIGKILL, which closes nothing well."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        await self.redis.aclose()

    def options(self) -> tuple[str, ...]:
        return ("--scheduler-name", "splitwise", "--scheduler-port", str(self.port), "--scheduler-topic", TOPIC)

    async def is_empty(self) -> bool:
        """Tell if no request is left, of whatever kind."""
        pending = (await self.redis.xpending(f"{TOPIC}.requests", "routers"))["pending"]
        return not pending and not await self.redis.xlen(f"{TOPIC}.requests") and not await self.redis.keys("*.job.*")

    async def owners(self) -> list[str]:
        """Return who works on the requests: ids of routers."""
        pending = await self.redis.xpending_range(f"{TOPIC}.requests", "routers", "-", "+", 100)
        return [entry["consumer"].decode() for entry in pending]


async def until_async(reached: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not await reached():
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def redis_server(folder: Path, *, appendonly: bool = True) -> AsyncIterator[RedisServer]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = RedisServer(folder, port, appendonly)
    await server.start()
    try:
        yield server
    finally:
        if server.process.returncode is None:
            server.process.send_signal(signal.SIGCONT)
        await server.kill()


@contextlib.asynccontextmanager
async def two_fronts(server: RedisServer, *, killable: bool = False) -> AsyncIterator[tuple[Cluster, Server]]:
    """Run two routers of one topic; the worker knows the first alone, so that it serves all.

    The first is a process, to be killed; so is the second if it is `killable`.
    """
    options = server.options()
    async with local_cluster({}, router_options=options) as cluster, local_worker("mixed", routers=(cluster.url,)):
        if not killable:
            async with inner_cluster({}, router_options=options) as other:
                yield cluster, other.router
            return
        served = cluster.router
        front = await cluster.start("router", ("--port", "0", *options))
        cluster.router = served
        try:
            await front.wait_ready()
            yield cluster, front
        finally:
            await front.stop()


async def streaming(http: ClientSession, url: str, begun: asyncio.Event) -> tuple[list[int], str, Any]:
    """Stream the long answer; returns tokens, text, and the last event."""
    body = {**LONG, "stream": True, "return_token_ids": True}
    parts: list[bytes] = []
    async with http.post(f"{url}/v1/completions", json=body) as reply:
        assert reply.status == 200, await reply.text()
        async for part in reply.content.iter_any():
            parts.append(part)
            begun.set()
    *found, end = events(b"".join(parts).decode())
    if end is not None:
        assert "error" in end, end
    choices = [event["choices"][0] for event in found]
    return [t for c in choices for t in c["token_ids"]], "".join(c["text"] for c in choices), end


async def test_any_router_is_a_front_of_what_another_serves(tmp_path: Path, need: Callable[[str], None]) -> None:
    need("redis")
    async with (
        client() as http,
        redis_server(tmp_path) as server,
        inner_cluster(
            {"prefill": 1, "decode": 1}, router_options=server.options(), worker_options=("--num-blocks", "1024")
        ) as served,
        inner_cluster({}, router_options=server.options()) as front,
        local_worker("mixed", num_blocks=1024) as mixed,
    ):
        for case in ({"temperature": 0}, {"temperature": 0.8, "seed": 3}):
            asked = {"prompt": "Once upon a time", "max_tokens": 100, **case}
            expected = await complete(http, mixed.url, False, **asked)
            for stream in (False, True):
                for url in (front.url, served.url):
                    assert await complete(http, url, stream, **asked) == expected
        many = [{"prompt": "a" * (20 * n + 1), "seed": n, "ignore_eos": True} for n in range(24)]
        wanted = await asyncio.gather(*(complete(http, mixed.url, False, **case) for case in many))
        assert await asyncio.gather(*(complete(http, front.url, True, **case) for case in many)) == wanted
        # Errors of workers come as themselves.
        status, answer = await post(http, f"{front.url}/v1/completions", model="small", prompt=[1] * 3000)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        chat = {
            "model": "small",
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 9,
            "seed": 1,
        }
        said = [(await post(http, f"{u}/v1/chat/completions", **chat))[1] for u in (front.url, mixed.url)]
        assert said[0]["choices"] == said[1]["choices"]
        assert said[0]["usage"]["total_tokens"] == said[1]["usage"]["total_tokens"]
        await until_async(server.is_empty)
        assert await server.redis.xlen(f"{TOPIC}.results.{await router_id(http, front.router)}") == 0


async def router_id(http: ClientSession, router: Server) -> str:
    return str((await get(http, f"{router.url}/health"))["router_id"])


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
async def test_another_router_goes_on_with_the_work_of_one_that_is_gone(
    tmp_path: Path, need: Callable[[str], None], how: signal.Signals
) -> None:
    need("redis")
    async with (
        client() as http,
        redis_server(tmp_path) as server,
        two_fronts(server) as (cluster, front),
        contextlib.AsyncExitStack() as stack,
    ):
        await wait_for(http, cluster, mixed=1)
        expected = await streaming(http, front.url, asyncio.Event())
        begun = asyncio.Event()
        asked = asyncio.create_task(streaming(http, front.url, begun))
        await begun.wait()
        owner = cluster.router
        assert set(await server.owners()) == {await router_id(http, owner)}
        # Only now can the front serve at all.
        await stack.enter_async_context(local_worker("mixed", routers=(front.url,)))
        owner.process.send_signal(how)
        try:
            tokens, text, end = await asked
            assert end is None, end
            assert (tokens, text) == expected[:2]
            assert len(tokens) == LONG["max_tokens"]
            assert not (await server.owners())
        finally:
            if how is signal.SIGSTOP:
                owner.process.send_signal(signal.SIGCONT)
        # Whoever comes back finds that it is not its any more, and does no harm.
        assert await streaming(http, front.url, asyncio.Event()) == expected
        await until_async(server.is_empty)


async def test_a_client_that_goes_or_a_front_that_dies_ends_the_work(
    tmp_path: Path, need: Callable[[str], None]
) -> None:
    need("redis")
    async with (
        client() as http,
        redis_server(tmp_path) as server,
        two_fronts(server, killable=True) as (cluster, front),
    ):
        await wait_for(http, cluster, mixed=1)
        begun = asyncio.Event()
        asked = asyncio.create_task(streaming(http, front.url, begun))
        await begun.wait()
        asked.cancel()
        await asyncio.wait([asked])
        await until_async(server.is_empty)

        begun.clear()
        asked = asyncio.create_task(streaming(http, front.url, begun))
        await begun.wait()
        assert isinstance(front, ServeProcess)
        front.kill()
        with contextlib.suppress(Exception):
            await asked

        async def idle() -> bool:
            return await server.is_empty() and not await server.owners()

        await until_async(idle)
        answer = await complete(http, cluster.url, False, prompt="b")
        assert answer["tokens"]


async def test_requests_wait_for_workers_and_are_refused_beyond_the_limit_but_never_trimmed(
    tmp_path: Path, need: Callable[[str], None]
) -> None:
    need("redis")
    async with client() as http, redis_server(tmp_path) as server:  # noqa: SIM117
        async with inner_cluster({}, router_options=server.options()) as cluster:
            waiting = asyncio.create_task(complete(http, cluster.url, False, prompt="b"))

            async def submitted() -> bool:
                return bool(await server.redis.xlen(f"{TOPIC}.requests"))

            await until_async(submitted)
            for _ in range(1023):
                await server.redis.xadd(f"{TOPIC}.requests", {"job": b"no request"})
            async with http.post(f"{cluster.url}/v1/completions", json={"model": "small", "prompt": "a"}) as reply:
                assert (reply.status, (await reply.json())["error"]["code"]) == (429, "queue_full")
                assert "Retry-After" in reply.headers
            assert await server.redis.xlen(f"{TOPIC}.requests") == 1024
            async with local_worker("mixed", routers=(cluster.url,)):
                # What is no request is put aside, and the one that waited is served.
                assert (await waiting)["tokens"]
                await until_async(server.is_empty)


@pytest.mark.parametrize("appendonly", [True, False])
async def test_a_restarted_redis_costs_no_request(
    tmp_path: Path, need: Callable[[str], None], appendonly: bool
) -> None:
    need("redis")
    async with client() as http, redis_server(tmp_path, appendonly=appendonly) as server:  # noqa: SIM117
        async with two_fronts(server) as (cluster, front):
            await wait_for(http, cluster, mixed=1)
            expected = await streaming(http, front.url, asyncio.Event())
            begun = asyncio.Event()
            asked = [asyncio.create_task(streaming(http, front.url, begun)) for _ in range(3)]
            await begun.wait()
            await server.kill()
            # Away: new requests are refused, with a word of when to come again.
            async with http.post(f"{front.url}/v1/completions", json=LONG) as reply:
                assert (reply.status, (await reply.json())["error"]["code"]) == (503, "scheduler_unavailable")
                assert "Retry-After" in reply.headers

            async def unready() -> bool:
                return (await http.get(f"{cluster.url}/ready")).status == 503

            await until_async(unready)
            assert not any(task.done() for task in asked)
            await server.start()
            assert await asyncio.gather(*asked) == [expected] * 3
            await until_async(server.is_empty)


async def test_a_flushed_redis_costs_no_request(tmp_path: Path, need: Callable[[str], None]) -> None:
    need("redis")
    async with client() as http, redis_server(tmp_path) as server, two_fronts(server) as (cluster, front):
        await wait_for(http, cluster, mixed=1)
        expected = await streaming(http, front.url, asyncio.Event())
        begun = asyncio.Event()
        asked = [asyncio.create_task(streaming(http, front.url, begun)) for _ in range(3)]
        await begun.wait()
        for _ in range(2):
            await server.redis.flushall()
            await asyncio.sleep(0.3)
        assert await asyncio.gather(*asked) == [expected] * 3
        await until_async(server.is_empty)


async def test_a_redis_that_stands_still_holds_requests_up_and_loses_none(
    tmp_path: Path, need: Callable[[str], None]
) -> None:
    need("redis")
    async with client() as http, redis_server(tmp_path) as server, two_fronts(server) as (cluster, front):
        await wait_for(http, cluster, mixed=1)
        expected = await streaming(http, front.url, asyncio.Event())
        begun = asyncio.Event()
        asked = asyncio.create_task(streaming(http, front.url, begun))
        await begun.wait()
        server.process.send_signal(signal.SIGSTOP)
        async with http.post(f"{front.url}/v1/completions", json=LONG) as reply:
            assert (reply.status, (await reply.json())["error"]["code"]) == (503, "scheduler_unavailable")
        server.process.send_signal(signal.SIGCONT)
        assert await asked == expected
        await until_async(server.is_empty)


async def test_a_step_that_fails_is_taken_again(caplog: pytest.LogCaptureFixture) -> None:
    store = Store(SchedulerConfig(), "r")
    taken = 0

    async def step() -> None:
        nonlocal taken
        taken += 1
        if taken == 1:
            raise ValueError("no answer of Redis is like this")
        await asyncio.sleep(3600)

    async with beside(store.forever(step)):
        await until(lambda: taken == 2)
    assert "no answer of Redis is like this" in caplog.text


async def test_a_result_that_cannot_be_taken_ends_its_request_and_is_not_read_again() -> None:
    read: list[bytes] = []

    class Answers:
        async def xread(self, streams: Any, **_: Any) -> Any:
            results = (Result(request_id=name) for name in ("bad", "good"))
            return [("s", [(b"%d" % n, {b"result": pack(each)}) for n, each in enumerate(results)])]

        async def xdel(self, stream: str, *entries: bytes) -> None:
            read.extend(entries)

    store: Any = SimpleNamespace(redis=Answers(), results="s")
    scheduler = RedisScheduler(store, Timeouts())
    bad, good = scheduled(), scheduled()
    bad._merge = None  # type: ignore[method-assign,assignment]
    scheduler._open = {"bad": bad, "good": good}
    await scheduler._read()
    assert read == [b"0", b"1"]
    with pytest.raises(ServeError) as failed:
        await bad.wait_begun()
    assert failed.value.code == "internal_error"
    await good.wait_begun()


# Results of several runs. -----------------------------------------------------------------------------------


class _Nobody:
    def forget(self, call: Scheduled) -> None: ...


def scheduled() -> Scheduled:
    generation = read_request(b'{"model": "m", "prompt": "a", "stream": true, "return_token_ids": true}', chat=False)
    return Scheduled(_Nobody(), generation, 5.0)  # type: ignore[arg-type]


async def body(call: Scheduled) -> list[tuple[str, list[int]]]:
    text = b"".join([chunk async for chunk in call.chunks()]).decode()
    return [(e["choices"][0]["text"], e["choices"][0]["token_ids"]) for e in events(text)[:-1]]


async def test_what_two_runs_wrote_is_told_once() -> None:
    call = scheduled()

    def say(at: int, text_at: int, tokens: list[int], text: str, **more: Any) -> None:
        call.take(Result(request_id="x", at=at, text_at=text_at, tokens=tokens, text=text, **more))

    say(0, 0, [1, 2], "ab")
    say(0, 0, [1], "a")
    say(1, 1, [2, 3], "bc")
    assert not call.lost
    say(5, 5, [6], "f")
    assert call.lost
    say(2, 2, [3, 4], "cd", finish="stop")
    say(4, 4, [], "", last=True, prompt_tokens=1)
    say(0, 0, [9], "z")
    assert await body(call) == [("ab", [1, 2]), ("c", [3]), ("d", [4]), ("", [])][:3]


async def test_a_second_run_that_writes_something_else_is_an_error() -> None:
    call = scheduled()
    call.take(Result(request_id="x", tokens=[1, 2], text="ab"))
    call.take(Result(request_id="x", tokens=[1, 3], text="ac"))
    with pytest.raises(ServeError, match="another one") as raised:
        await body(call)
    assert raised.value.code == "stream_broken"
