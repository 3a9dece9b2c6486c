"""Who may get requests, and how many: the breaker, probes, slow start, drain, the queue."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("aiohttp", reason="serving needs aiohttp")
pytest.importorskip("prometheus_client", reason="serving needs prometheus-client")

from aiohttp import ClientSession

from aiodatadist.commands.serve_cluster import local_cluster
from aiodatadist.serve.admission import Admission
from aiodatadist.serve.config import HealthLimits
from aiodatadist.serve.errors import ServeError
from aiodatadist.serve.health import Breaker, Health
from aiodatadist.serve.registry import Registry

from .conftest import Scale
from .serve_rounds import resident
from .test_serve import all_idle, client, complete, events, gauges, post, wait_for
from .test_serve_parts import registration
from .waiting import until

LIMITS = HealthLimits(failures=3, open_time=10, passes=2, slow_start=10)


def state(health: Health) -> Breaker:
    return health.breaker


def usable(health: Health) -> bool:
    return health.usable


def opened(now: list[float]) -> Health:
    health = Health(LIMITS, clock=lambda: now[0])
    for _ in range(3):
        assert usable(health)
        health.failed()
    return health


def test_failures_in_a_row_open_the_breaker_and_successes_between_do_not() -> None:
    health = Health(LIMITS)
    for _ in range(10):
        health.failed()
        health.failed()
        health.succeeded()
    assert state(health) is Breaker.CLOSED
    health = opened([0.0])
    assert state(health) is Breaker.OPEN
    assert not usable(health)


def test_trials_go_one_by_one_and_close_it_also_while_their_answers_go_on() -> None:
    now = [0.0]
    health = opened(now)
    now[0] = 10.0
    assert usable(health)
    health.begin("first")
    assert not usable(health)
    health.answered()
    assert state(health) is Breaker.HALF_OPEN
    assert usable(health)
    health.begin("second")
    health.answered()
    assert state(health) is Breaker.CLOSED
    assert health.weight == 0.1
    now[0] = 20.0
    assert health.weight == 1.0


def test_a_trial_that_ends_without_a_result_leaves_its_place_and_one_that_fails_opens_again() -> None:
    now = [0.0]
    health = opened(now)
    health.failed()  # sent before it opened: it opens no later
    now[0] = 10.0
    health.begin("cancelled")
    health.end("cancelled")
    assert usable(health)
    health.begin("failed")
    health.failed()
    health.end("failed")
    assert state(health) is Breaker.OPEN
    now[0] = 20.0
    assert usable(health)


def test_probes_take_a_worker_out_and_bring_it_back() -> None:
    now = [0.0]
    health = Health(LIMITS, clock=lambda: now[0])
    for good in (False, False, True, False, False):
        health.probed(good)
        assert usable(health)
    health.probed(False)
    assert not usable(health)
    health.probed(True)
    assert not usable(health)
    health.probed(True)
    assert usable(health)
    assert health.weight == 0.1


def test_a_lease_is_a_trial_for_as_long_as_it_is_held() -> None:
    now = [0.0]
    registry = Registry(LIMITS, clock=lambda: now[0])
    member = registry.put(registration("a"))
    for _ in range(3):
        member.health.failed()
    assert registry.usable("prefill") == []
    now[0] = 10.0
    assert registry.usable("prefill") == [member]
    lease = member.take(1)
    assert registry.usable("prefill") == []
    lease.release()
    assert registry.usable("prefill") == [member]


def test_a_drain_that_lasts_too_long_is_found() -> None:
    now = [0.0]
    registry = Registry(HealthLimits(drain=60), clock=lambda: now[0])
    member = registry.put(registration("a"))
    lease = member.take(1)
    member.drain_since = 0.0
    assert registry.usable("prefill") == []
    now[0] = 59.0
    assert registry.overdue() == []
    now[0] = 60.0
    assert registry.overdue() == [member]
    lease.release()
    assert registry.overdue() == []


# The queue. -------------------------------------------------------------------------------------------------


async def test_the_queue_is_bounded_in_order_and_leaks_nothing() -> None:
    door = Admission(lambda: 1, queue_size=2, queue_wait=60)
    order: list[str] = []
    go = asyncio.Event()

    async def visit(name: str) -> None:
        async with door.enter():
            order.append(name)
            await go.wait()

    tasks = [asyncio.create_task(visit(name)) for name in "abc"]
    await until(lambda: door.waiting == 2)
    with pytest.raises(ServeError) as caught:
        await visit("d")
    assert (caught.value.code, caught.value.status, caught.value.retry_after) == ("queue_full", 429, 1)
    tasks[1].cancel()
    await asyncio.wait([tasks[1]])
    assert (door.inside, door.waiting) == (1, 1)
    go.set()
    await asyncio.gather(tasks[0], tasks[2])
    assert order == ["a", "c"]
    assert (door.inside, door.waiting) == (0, 0)


async def test_a_place_that_is_given_to_somebody_who_goes_is_passed_on() -> None:
    door = Admission(lambda: 1, queue_size=9, queue_wait=60)

    async def visit() -> None:
        async with door.enter():
            pass

    async with door.enter():
        leaving, staying = asyncio.create_task(visit()), asyncio.create_task(visit())
        await until(lambda: door.waiting == 2)
    leaving.cancel()  # it was let in by now, and has not run since
    await asyncio.wait([leaving])
    await staying
    assert (door.inside, door.waiting) == (0, 0)


async def test_who_waits_too_long_is_told_so_and_who_has_no_worker_at_once() -> None:
    room = [1]
    door = Admission(lambda: room[0], queue_size=9, queue_wait=0.01)
    async with door.enter():
        with pytest.raises(ServeError) as caught:
            async with door.enter():
                pass
        assert (caught.value.code, caught.value.status) == ("queue_timeout", 503)
        room[0] = 0
        async with door.enter():
            assert door.inside == 2
    assert (door.inside, door.waiting) == (0, 0)


# Processes. -------------------------------------------------------------------------------------------------


@pytest.mark.hang_limit(240)
async def test_overload_is_answered_by_429_and_503_with_retry_after(scale: Scale) -> None:
    options = ("--max-running", "2", "--queue", "3", "--queue-wait", "0.2")
    async with client() as http, local_cluster({"mixed": 1}, router_options=options) as cluster:
        await wait_for(http, cluster, mixed=1)
        body = {"model": "small", "prompt": "a", "max_tokens": 900, "ignore_eos": True}
        room = 2 + 3

        async def ask() -> tuple[int, str, bool]:
            async with http.post(f"{cluster.url}/v1/completions", json=body) as reply:
                answer = await reply.json()
                code = answer["error"]["code"] if reply.status != 200 else "ok"
                return reply.status, code, "Retry-After" in reply.headers

        sizes = []
        for _ in range(scale(2, least=2)):
            found = await asyncio.gather(*(ask() for _ in range(10 * room)))
            assert set(found) == {(200, "ok", False), (429, "queue_full", True), (503, "queue_timeout", True)}
            assert found.count((429, "queue_full", True)) == 9 * room
            await all_idle(http, cluster)
            sizes.append([resident(process.process.pid) for process in cluster.processes])
        # What they need for that they have after the first time.
        assert all(last < 1.1 * first for first, last in zip(sizes[0], sizes[-1], strict=True)), sizes


@pytest.mark.hang_limit(240)
async def test_a_worker_that_drains_finishes_its_streams_and_gets_no_more() -> None:
    async with client() as http, local_cluster({"mixed": 1}, worker_options=("--drain", "60")) as cluster:
        second = await cluster.start("mixed", ("--router", cluster.url))
        await second.wait_ready()
        await wait_for(http, cluster, mixed=2)
        body = {"model": "small", "prompt": "a", "max_tokens": 700, "ignore_eos": True, "stream": True}
        replies = [await http.post(f"{cluster.url}/v1/completions", json=body) for _ in range(2)]
        first = cluster.workers["mixed-0"]
        streams = (await gauges(http, second)).get('aiodatadist_phase_running{phase="decode"}', 0)
        first.process.terminate()
        await wait_for_draining(http, cluster.url)
        for _ in range(4):
            await complete(http, cluster.url, True, prompt="b", max_tokens=2)
        assert [events(await reply.text())[-1] for reply in replies] == [None, None]
        assert await first.process.wait() == 0
        await wait_for(http, cluster, mixed=1)
        del cluster.workers["mixed-0"]
        numbers = await gauges(http, second)
        assert numbers['aiodatadist_phase_seconds_count{phase="decode"}'] == streams + 4
        # And by the router's word.
        (left,) = (await (await http.get(f"{cluster.url}/registered")).json())["mixed"]
        status, said = await post(http, f"{cluster.url}/drain", worker_id=left["worker_id"])
        assert (status, said["draining"]) == (200, True)
        status, refused = await post(http, f"{cluster.url}/v1/completions", model="small", prompt="a")
        assert (status, refused["error"]["code"]) == (503, "no_workers")
        await post(http, f"{cluster.url}/drain", worker_id=left["worker_id"], drain=False)
        assert (await complete(http, cluster.url, False, prompt="a"))["tokens"]


async def wait_for_draining(http: ClientSession, url: str) -> None:
    while True:
        numbers = await (await http.get(f"{url}/registered")).json()
        if any(worker["draining"] for worker in numbers["mixed"]):
            return
        await asyncio.sleep(0.01)
