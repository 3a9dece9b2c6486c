"""What becomes of a request, and of all that is held for it, when a worker fails or a client goes: phase by phase.

The acceptance tests of disaggregated serving, and where they are:

====================================================  ==============================================================
item                                                  tests
====================================================  ==============================================================
identity: both modes, 1x1, 2x1, 1x2, 2x2, digests     test_serve_check, test_serve_push
controls: a byte flipped, blocks swapped, a layer     test_serve_quarantine: test_kv_that_was_damaged_is_found_out;
missing, zeros                                        test_serve_check
P answers 400, 500, resets, hangs                     test_a_prefill_worker_that_fails_leaves_nothing_behind
D refuses, resets, hangs before the first chunk       test_another_decode_worker_takes_over
D silent in a stream                                  test_a_stream_that_falls_silent_is_broken_off
D killed in a stream                                  test_serve: test_a_decode_worker_that_dies_in_a_stream_...;
                                                      with --migrate: test_serve_migrate
P killed while a pull or a push runs: guard pattern   test_serve_quarantine
client closes in each phase                           test_a_client_may_go_in_every_phase
worker restarts on its port                           test_serve_restart: test_a_worker_that_is_restarted_...
router restarts                                       test_serve_restart: test_a_router_that_is_restarted_...
Redis restarts                                        test_serve_redis
breaker, drain, slow start by metrics                 test_the_breaker_is_seen_in_the_metrics; test_serve_health
duplicate and client-supplied ids                     test_ids_of_clients_pair_nothing_and_ids_of_jobs_are_unique
overload                                              test_serve_health: test_overload_...
soak                                                  test_serve_load, and the part `serving` of `.ci/soak`
====================================================  ==============================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="serving needs aiohttp")
pytest.importorskip("prometheus_client", reason="serving needs prometheus-client")
pytest.importorskip("threadpoolctl", reason="serving needs threadpoolctl")

from aiohttp import ClientError, ClientSession, web
from msgspec.structs import replace

from aiodatadist.serve.config import HealthLimits
from aiodatadist.serve.errors import ServeError
from aiodatadist.serve.http import make_app
from aiodatadist.serve.protocol import DecodeJob, Peer, PrefillJob, Ticket
from aiodatadist.serve.router import Router
from aiodatadist.serve.worker import Worker

from .serve_local import (
    BLOCKS,
    QUICK,
    front,
    generation,
    idle_within,
    local_router,
    local_worker,
    tell,
    ticket_of,
    within,
)
from .test_serve import client, complete, events
from .waiting import until

ASKED: dict[str, Any] = {"prompt": "Once upon a time there was", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def free_blocks(worker: Worker) -> int:
    return worker.units.load().free_blocks


async def ask(http: ClientSession, router: Router, **more: Any) -> tuple[int, str]:
    """Return the status of an answer, and the code of its error or none."""
    body = {"model": "small", **ASKED, **more}
    async with http.post(f"{router.url}/v1/completions", json=body) as reply:
        if reply.status != 200:
            return reply.status, str((await reply.json())["error"]["code"])
        if not body.get("stream"):
            return 200, "" if (await reply.json())["choices"] else "nothing"
        end = events(await reply.text())[-1]
        return 200, "" if end is None else str(end["error"]["code"])


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_a_prefill_worker_that_fails_leaves_nothing_behind(mode: str, transport: str) -> None:
    async with (
        client() as http,
        local_router(modes=(mode,)) as router,
        local_worker("prefill", transports=(transport,)) as prefill,
        local_worker("decode", routers=(router.url,), transports=(transport,)) as decode,
        front(http, router, prefill) as fault,
    ):
        await until(lambda: len(router.registry.members()) == 2)
        assert await ask(http, router) == (200, "")
        for how, expected in (
            ("400", (400, "invalid_request")),
            ("500", (502, "worker_failed")),
            ("reset", (502, "worker_unreachable")),
            ("hang", (504, "worker_timeout")),
        ):
            fault.calls.clear()
            fault.script = {"/pd/prefill": how}
            assert await ask(http, router) == expected
            assert fault.calls["/pd/prefill"] == 1  # there is no other
            await within(1.0, lambda: free_blocks(decode) == BLOCKS, f"{how}: blocks are still taken")
            await idle_within(1.0, http, [router.url, prefill.url, decode.url])
        fault.script = {}
        assert await ask(http, router) == (200, "")


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize(("how", "transport"), [("refuse", "shm"), ("reset", "tcp"), ("hang", "shm")])
async def test_another_decode_worker_takes_over(mode: str, how: str, transport: str) -> None:
    async with (
        client() as http,
        local_router(modes=(mode,)) as router,
        local_worker("prefill", routers=(router.url,), transports=(transport,)) as prefill,
        local_worker("decode", routers=(router.url,), transports=(transport,)) as decode,
        local_worker("decode", transports=(transport,)) as behind,
        front(http, router, behind) as fault,
    ):
        await until(lambda: len(router.registry.members()) == 3)
        path = "/pd/decode" if mode == "pull" else "/pd/reserve"
        fault.script = {path: how}
        for _ in range(4):  # their turns
            assert await ask(http, router, stream=True) == (200, "")
        assert fault.calls[path] >= 1
        await within(1.0, lambda: free_blocks(prefill) == BLOCKS, "the prefill worker still holds blocks")
        await idle_within(1.0, http, [router.url, prefill.url, decode.url, behind.url])


async def test_a_decode_worker_that_hangs_behind_a_push_is_given_up() -> None:
    async with (
        client() as http,
        local_router(modes=("push",)) as router,
        local_worker("prefill", routers=(router.url,)) as prefill,
        local_worker("decode") as behind,
        front(http, router, behind) as fault,
    ):
        await until(lambda: len(router.registry.members()) == 2)
        for how, code in (("hang", "worker_timeout"), ("reset", "worker_unreachable")):
            fault.script = {"/pd/decode": how}
            assert (await ask(http, router, stream=True))[1] == code
            # What was pushed is given up by the router's word.
            await within(1.0, lambda: free_blocks(behind) == BLOCKS, f"{how}: the reservation is still there")
        await idle_within(1.0, http, [router.url, prefill.url, behind.url])


async def test_a_stream_that_falls_silent_is_broken_off() -> None:
    async with (
        client() as http,
        local_router(timeouts=dataclasses.replace(QUICK, idle=0.3)) as router,
        local_worker("prefill", routers=(router.url,)) as prefill,
        local_worker("decode") as behind,
        front(http, router, behind) as fault,
    ):
        await until(lambda: len(router.registry.members()) == 2)
        fault.script = {"/pd/decode": "stall"}
        assert await ask(http, router, stream=True, max_tokens=200) == (200, "stream_broken")
        await idle_within(1.0, http, [router.url, prefill.url, behind.url])


# Clients. ---------------------------------------------------------------------------------------------------


async def go(task: asyncio.Task[Any]) -> None:
    """Have a client close its connection."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, ClientError):
        await task


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_a_client_may_go_in_every_phase(mode: str, transport: str) -> None:
    slow = replace_timeouts(60.0)

    async def silent(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await _reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with (
        client() as http,
        local_router(modes=(mode,), max_running=1, timeouts=slow) as router,
        local_worker("prefill", timeouts=slow, transports=(transport,)) as prefill,
        local_worker("decode", timeouts=slow, transports=(transport,)) as decode,
        front(http, router, prefill) as before,
        front(http, router, decode) as behind,
    ):
        urls = [router.url, prefill.url, decode.url]

        def start(**more: Any) -> asyncio.Task[Any]:
            return asyncio.create_task(ask(http, router, **more))

        # In the prefill: with a prompt that takes its time.
        task = start(prompt="a" * 1900)
        await until(lambda: prefill.metrics.running["prefill"])
        await go(task)
        await idle_within(2.0, http, urls)

        # Between the legs: the prompt is computed, and the decode worker has not begun. And in the queue behind that.
        behind.script = {"/pd/decode": "hang"}
        task = start()
        await until(lambda: behind.calls["/pd/decode"])
        queued = start()
        await until(lambda: router.admission.waiting == 1)
        await go(queued)
        await within(2.0, lambda: router.admission.waiting == 0, "the request is still in the queue")
        await go(task)
        await idle_within(2.0, http, urls)
        behind.script = {}

        # In the transfer: to a peer that accepts and says nothing, or to a reservation that nobody grants.
        def elsewhere(ticket: Ticket) -> Ticket:
            return replace(ticket, owner=Peer(cluster_id=77, incarnation="x", listen=[f"127.0.0.1:{port}"]))

        if mode == "pull":
            before.ticket = elsewhere
            task = start()
            await until(lambda: decode.metrics.running["transfer"])
        else:
            before.script = {"/pd/prefill": "hang"}
            task = start()
            await until(lambda: before.calls["/pd/prefill"] == 3)
            assert free_blocks(decode) < BLOCKS
        await go(task)
        await idle_within(2.0, http, [router.url, decode.url])
        before.ticket, before.script = None, {}

        # In the stream.
        body = {"model": "small", **ASKED, "max_tokens": 1500, "stream": True}
        async with http.post(f"{router.url}/v1/completions", json=body) as reply:
            await reply.content.readany()
            assert decode.metrics.running["decode"] == 1
            reply.close()
        await idle_within(2.0, http, urls)
        assert await ask(http, router) == (200, "")
    server.close()
    await server.wait_closed()


def replace_timeouts(seconds: float, **more: float) -> Any:
    return dataclasses.replace(QUICK, prefill=seconds, first_token=seconds, transfer=seconds, **more)


async def test_a_client_that_a_write_finds_gone_is_no_error_of_the_server(caplog: pytest.LogCaptureFixture) -> None:
    ends: list[str] = []

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        assert request.transport is not None
        request.transport.abort()
        try:
            while True:
                await response.write(b"x" * 1000)
                await asyncio.sleep(0)
        except ConnectionError:
            ends.append("gone")
            raise

    app = make_app(cluster_key=None, api_key=None, public=(), open_to_all=())
    app.add_routes([web.get("/", stream)])
    # Without cancellation, as where the write is faster than the server's own look.
    runner = web.AppRunner(app, handler_cancellation=False, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with client() as http:
        with contextlib.suppress(ClientError):
            async with http.get(f"http://127.0.0.1:{runner.addresses[0][1]}/") as reply:
                await reply.read()
        await until(lambda: ends)
    await runner.cleanup()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


class _Decoding:
    """Of a model that writes nothing more, or fails in a way that nobody foresaw."""

    finish = ""

    def __init__(self, fault: Exception | None) -> None:
        self._fault = fault

    def __aiter__(self) -> _Decoding:
        return self

    async def __anext__(self) -> list[int]:
        if self._fault is not None:
            raise self._fault
        await asyncio.Event().wait()
        raise AssertionError


@pytest.mark.parametrize(
    ("fault", "code"), [(None, "request_timeout"), (RuntimeError("unforeseen"), "internal_error")], ids=["slow", "bad"]
)
async def test_an_error_in_a_stream_that_has_begun_is_its_last_event(fault: Exception | None, code: str) -> None:
    async with (
        client() as http,
        local_router(timeouts=replace_timeouts(60.0, request=3.0)) as router,
        local_worker("mixed", routers=(router.url,)) as mixed,
    ):
        await until(lambda: router.registry.members())
        mixed.units.first.decode = lambda *_: _Decoding(fault)  # type: ignore[method-assign]
        body = {"model": "small", **ASKED, "stream": True}
        async with http.post(f"{router.url}/v1/completions", json=body) as reply:
            assert reply.status == 200
            *pieces, end = events(await reply.text())  # which is whole: no second answer in the middle of it
        assert pieces
        assert end is not None
        assert end["error"]["code"] == code
        await idle_within(2.0, http, [router.url, mixed.url])


# Ids, leases, the breaker. ----------------------------------------------------------------------------------


async def test_ids_of_clients_pair_nothing_and_ids_of_jobs_are_unique() -> None:
    async with (
        client() as http,
        local_router() as router,
        local_worker("prefill", routers=(router.url,)) as prefill,
        local_worker("decode", routers=(router.url,)) as decode,
    ):
        await until(lambda: len(router.registry.members()) == 2)

        async def named() -> tuple[int, str]:
            body = {"model": "small", "request_id": "mine", "id": "mine", **ASKED}
            headers = {"X-Request-Id": "mine"}
            async with http.post(f"{router.url}/v1/completions", json=body, headers=headers) as reply:
                return reply.status, (await reply.json())["id"]

        found = await asyncio.gather(*(named() for _ in range(4)))
        assert {status for status, _ in found} == {200}
        assert len({name for _, name in found} | {"mine"}) == 5

        long = PrefillJob(generation=generation("twice", [65] * 1500))
        first = asyncio.create_task(ticket_of(http, prefill.url, long))
        await until(lambda: prefill.metrics.running["prefill"])
        with pytest.raises(ServeError) as refused:
            await ticket_of(http, prefill.url, long)
        assert (refused.value.code, refused.value.status) == ("duplicate_request", 409)
        ticket = await first
        # Nor while the first one's blocks are held for its ticket.
        held = free_blocks(prefill)
        with pytest.raises(ServeError) as refused:
            await ticket_of(http, prefill.url, long)
        assert (refused.value.code, refused.value.status) == ("duplicate_request", 409)
        assert free_blocks(prefill) == held < BLOCKS

        job = DecodeJob(generation=generation("twice", "", 400), ticket=ticket)
        answers = await asyncio.gather(
            *(tell(http, f"{decode.url}/pd/decode", job, dict) for _ in range(2)), return_exceptions=True
        )
        (failed,) = [each for each in answers if isinstance(each, ServeError)]
        assert (failed.code, failed.status) == ("duplicate_request", 409)
        # And once it is over, its ticket is no good any more.
        with pytest.raises(ServeError) as gone:
            await tell(http, f"{decode.url}/pd/decode", job, dict)
        assert gone.value.code == "ticket_gone"
        await idle_within(2.0, http, [router.url, prefill.url, decode.url])


async def test_a_ticket_that_nobody_brings_ends_by_its_lease() -> None:
    import dataclasses

    async with client() as http, local_worker("prefill", timeouts=dataclasses.replace(QUICK, lease=0.5)) as prefill:
        await ticket_of(http, prefill.url, PrefillJob(generation=generation("left", [65] * 100)))
        assert free_blocks(prefill) < BLOCKS
        assert prefill.tickets is not None
        assert len(prefill.tickets) == 1
        await until(lambda: free_blocks(prefill) == BLOCKS)
        await idle_within(1.0, http, [prefill.url])


async def test_the_breaker_is_seen_in_the_metrics() -> None:
    limits = HealthLimits(failures=3, open_time=0.5, passes=2, slow_start=60.0)
    async with (
        client() as http,
        local_router(retries=0, health=limits) as router,
        local_worker("prefill") as prefill,
        local_worker("decode", routers=(router.url,)),
        front(http, router, prefill) as fault,
    ):
        await until(lambda: len(router.registry.members()) == 2)

        async def seen(name: str) -> float:
            async with http.get(f"{router.url}/metrics") as reply:
                lines = (await reply.text()).splitlines()
            start = f'aiodatadist_router_worker_{name}{{role="prefill",worker="{fault.worker_id}"}} '
            (line,) = [line for line in lines if line.startswith(start)]
            return float(line.removeprefix(start))

        assert (await seen("breaker"), await seen("slow_start")) == (0, 0)
        fault.script = {"/pd/prefill": "500"}
        for _ in range(3):
            assert await ask(http, router) == (502, "worker_failed")
        assert await seen("breaker") == 2
        assert await ask(http, router) == (503, "no_workers")
        assert fault.calls["/pd/prefill"] == 3
        fault.script = {}
        while await seen("breaker") == 2:
            await asyncio.sleep(0.02)
        assert await seen("breaker") == 1
        for _ in range(2):
            assert await ask(http, router) == (200, "")
        assert await seen("breaker") == 0
        # It is back, and gets little at first.
        assert await seen("slow_start") > 0.5


async def test_tokens_by_both_modes_are_those_of_one_process() -> None:
    async with (
        client() as http,
        local_router(modes=("pull", "push")) as router,
        local_worker("prefill", routers=(router.url,), digests=True) as prefill,
        local_worker("decode", routers=(router.url,)) as decode,
        local_worker("mixed") as mixed,
    ):
        await until(lambda: len(router.registry.members()) == 2)
        expected = await complete(http, mixed.url, False, **ASKED)
        for stream in (False, True, False, True):
            assert await complete(http, router.url, stream, **ASKED) == expected
        await idle_within(2.0, http, [router.url, prefill.url, decode.url])
