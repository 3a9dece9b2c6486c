"""What runs beside requests: it goes on after a fault, says so, and what hung on it has a typed end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="serving needs aiohttp")
pytest.importorskip("prometheus_client", reason="serving needs prometheus-client")

import aiodatadist as adt
from aiodatadist import _hixl
from aiodatadist.serve import pushing
from aiodatadist.serve.background import Tasks, beside, forever
from aiodatadist.serve.config import HealthLimits, RouterConfig, Timeouts, WorkerConfig
from aiodatadist.serve.dispatch import Dispatcher
from aiodatadist.serve.flows import Pair
from aiodatadist.serve.metrics import RouterMetrics
from aiodatadist.serve.openai import read_request
from aiodatadist.serve.protocol import MODE_HEADER, Generation, Peer, ReserveJob
from aiodatadist.serve.pushing import Reservations, Word, _Entry, _Speaker
from aiodatadist.serve.registry import Registry
from aiodatadist.serve.router import Router, router
from aiodatadist.serve.worker import Worker, worker

from .test_serve import client, complete, post
from .test_serve_parts import Pieces, registration
from .waiting import until


class Once:
    """Raises at the first call, and then does what it stands for."""

    def __init__(self, instead: Any) -> None:
        self.calls = 0
        self._instead = instead

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        if self.calls == 1:
            raise RuntimeError("a fault of the first call")
        return self._instead(*arguments)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, "aiodatadist"):
        yield caplog


async def test_work_that_fails_is_logged_and_begun_anew(log: pytest.LogCaptureFixture) -> None:
    done = asyncio.Event()

    async def work() -> None:
        done.set()
        await asyncio.sleep(3600)

    async def fail() -> None:
        raise RuntimeError("nobody awaits this")

    first = Once(work)
    async with beside(forever("the work", first, pause=0.001)):
        await done.wait()
    assert first.calls == 2
    assert "begins anew part='serve' task='the work'" in log.text
    tasks = Tasks()
    tasks.start(fail())
    await tasks.wait()
    await until(lambda: "nobody awaits this" in log.text)
    assert len(tasks) == 0


async def test_work_that_waits_for_nothing_does_not_keep_the_loop() -> None:
    async def nothing() -> None:
        pass

    async with beside(forever("nothing", nothing)):
        await asyncio.sleep(0.001)


# Processes in one loop. -------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def one_loop(
    *roles: str, mode: str = "push", timeouts: Timeouts | None = None, **options: Any
) -> AsyncIterator[tuple[Router, list[Worker]]]:
    """Run a router and workers in this loop, where their faults can be made."""
    timeouts = Timeouts() if timeouts is None else timeouts
    async with contextlib.AsyncExitStack() as stack:
        here = await stack.enter_async_context(
            router(RouterConfig(port=0, modes=(mode,), timeouts=timeouts, **options))
        )
        workers = [
            await stack.enter_async_context(
                worker(WorkerConfig(role=role, routers=(here.url,), modes=(mode,), num_blocks=256, timeouts=timeouts))
            )
            for role in roles
        ]
        await until(lambda: len(here.registry.members()) == len(roles))
        yield here, workers


async def test_a_word_that_is_not_understood_costs_its_request_alone(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    hear = Reservations.hear
    first = Once(hear)
    monkeypatch.setattr(Reservations, "hear", lambda *arguments: first(*arguments))
    async with client() as http, one_loop("prefill", "decode", timeouts=Timeouts(transfer=1.0)) as (here, _):
        asked = {"prompt": "Once upon a time", "temperature": 0}
        # Its writer waits for a grant, gives up, and another attempt goes well.
        assert (await complete(http, here.url, False, **asked))["tokens"]
        assert here.metrics.retries == {"transfer_timeout": 1}
        assert (await complete(http, here.url, True, **asked))["tokens"]
    assert first.calls > 2
    assert "was not understood" in log.text


async def test_listening_begins_anew_and_looks_at_the_links_that_ended_meanwhile(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    first = Once(pushing._hear_links)
    monkeypatch.setattr(pushing, "_hear_links", lambda *arguments: first(*arguments))
    async with client() as http, one_loop("prefill", "decode") as (here, _):
        await until(lambda: first.calls >= 3)  # of two workers, one of them twice
        assert (await complete(http, here.url, False, prompt="Once"))["tokens"]
    assert "begins anew part='serve' task='the words of pushes'" in log.text


async def test_a_heartbeat_that_fails_is_followed_by_the_next(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    first = Once(Worker.registration)
    monkeypatch.setattr(Worker, "registration", lambda self: first(self))
    async with one_loop("mixed") as (here, _):
        assert len(here.registry.members()) == 1
    assert "begins anew part='serve' task='the heartbeat'" in log.text


async def test_the_sweep_and_the_probes_survive_a_fault(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    sweep, members = Once(Registry.sweep), Once(Registry.members)
    monkeypatch.setattr(Registry, "sweep", lambda *arguments: sweep(*arguments))
    monkeypatch.setattr(Registry, "members", lambda *arguments: members(*arguments))
    health = HealthLimits(probe_period=0.05, probe_failures=1)
    async with router(RouterConfig(port=0, health=health)) as here:
        await until(lambda: members.calls)
        silent = here.registry.put(registration("a", "mixed", ttl_s=1.5, url="http://127.0.0.1:1"))
        await until(lambda: not silent.health.answering)
        await until(lambda: here.registry.find("a") is None)
        assert here.metrics.lost == 1
    assert "begins anew part='serve' task='the sweep'" in log.text
    assert "begins anew part='serve' task='the probes'" in log.text


async def test_the_period_of_heartbeats_says_when_a_worker_is_lost() -> None:
    async with one_loop("mixed", heartbeat=1.5) as (here, _):
        (member,) = here.registry.members()
        assert member.registration.ttl_s == 4.5


# Draining. --------------------------------------------------------------------------------------------------


async def test_a_worker_that_drains_reserves_nothing_and_serves_what_it_had_reserved() -> None:
    async with client() as http, one_loop("decode", timeouts=Timeouts(transfer=0.1)) as (_, (decode,)):

        def job(request_id: str) -> dict[str, Any]:
            generation = {"request_id": request_id, "model": "small", "created": 1, "prompt": "a"}
            return {"generation": generation, "attempt": 0, "writer": 7}

        status, reserved = await post(http, f"{decode.url}/pd/reserve", **job("r"))
        assert status == 200
        drained = asyncio.create_task(decode.drain(60.0))
        await until(lambda: decode.running.closed)
        status, refused = await post(http, f"{decode.url}/pd/reserve", **job("s"))
        assert (status, refused["error"]["code"]) == (503, "draining")
        assert not drained.done()  # for what is reserved
        for request_id, code in (("r", "transfer_timeout"), ("s", "draining")):
            ticket = {
                "request_id": request_id, "attempt": 0, "owner": reserved["owner"], "lease": 0, "blocks": [],
                "prompt_tokens": 1, "cached_tokens": 0, "token": 1, "ttl_s": 1.0, "pushed": True,
            }  # fmt: skip
            generation = job(request_id)["generation"] | {"prompt": ""}
            _, ended = await post(http, f"{decode.url}/pd/decode", generation=generation, ticket=ticket)
            # The first is let in, and waits for a commit that nobody sends.
            assert ended["error"]["code"] == code
        await drained


# Pushes. ----------------------------------------------------------------------------------------------------


async def test_a_prompt_that_takes_longer_than_a_reservation_lasts_is_pushed_all_the_same() -> None:
    timeouts = Timeouts(reservation=1.0)
    async with client() as http, one_loop("prefill", "decode", timeouts=timeouts) as (here, (prefill, _)):
        slow = prefill.units.first.prefill

        async def slowly(*arguments: Any) -> int:
            await asyncio.sleep(1.5 * timeouts.reservation)
            return await slow(*arguments)

        prefill.units.first.prefill = slowly  # type: ignore[method-assign]
        assert (await complete(http, here.url, False, prompt="Once upon a time"))["tokens"]
        assert not here.metrics.retries


async def test_a_reservation_that_nobody_begins_to_write_runs_out() -> None:
    async with client() as http, one_loop("decode", timeouts=Timeouts(reservation=0.1)) as (_, (decode,)):
        generation = Generation(request_id="r", model="small", created=1, prompt="a")
        job = ReserveJob(generation=generation, attempt=0, writer=7)
        async with http.post(f"{decode.url}/pd/reserve", data=pushing.encode(job)) as reply:
            assert reply.status == 200
        assert isinstance(decode.pushes, Reservations)
        await until(lambda: not any(decode.pushes.counts().values()))  # type: ignore[union-attr]
        assert decode.units.load().free_blocks == 256


class Node:
    """A node whose link ends badly: stands for a DataDist."""

    def __init__(self, *faults: Exception) -> None:
        self.links: dict[int, object] = {}
        self.asked = 0
        self._faults = list(faults)

    async def unlink(self, info: adt.ClusterInfo, timeout: float) -> None:
        del self.links[info.cluster_id]
        raise adt.LinkTimeout("no answer")

    async def fence(self, cluster_id: int, timeout: float) -> None:
        self.asked += 1
        if self._faults:
            raise self._faults.pop(0)


async def test_blocks_stay_in_quarantine_until_their_link_is_known_to_be_quiet(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pushing, "_ASK_AGAIN", 0.01)
    node: Any = Node(adt.PeerLostError("died"), adt.LinkTimeout("stands still"), adt.InternalError("strange"))
    pieces: Any = Pieces()
    pieces.unit.cache = object()
    node.cache_manager = pieces.cache_manager
    reservations = Reservations(node, Peer(cluster_id=1, incarnation="1"), pieces, 30.0, 0.02)
    entry = reservations._entries["r", 1] = _Entry(("r", 1), pieces, 7)
    node.links[7] = object()
    reservations.hear(7, Word(word="begin", request_id="r", attempt=1))
    assert entry.state == "receiving"
    assert reservations.release("r", 1) == 1
    await until(lambda: node.asked == 3)
    assert (pieces.freed, reservations.counts()["quarantined"]) == (0, 1)
    await until(lambda: pieces.freed == 1)
    assert node.asked == 4
    assert log.text.count("blocks stay in quarantine") == 4  # for the unlink, too


@pytest.mark.parametrize("late", [False, True], ids=["at the call", "later"])
async def test_a_word_that_cannot_be_said_is_noticed(late: bool, log: pytest.LogCaptureFixture) -> None:
    fault: adt.DataDistError = adt.CacheAccessError("not to be written")

    def push_blocks(*_: Any, notify: bytes) -> asyncio.Future[None]:
        if not late:
            raise fault
        said = asyncio.get_running_loop().create_future()
        said.set_exception(fault)
        return said

    dd: Any = SimpleNamespace(cache_manager=SimpleNamespace(push_blocks=push_blocks))
    cache: Any = object()
    heard: list[adt.DataDistError] = []
    speaker = _Speaker(dd, cache, owner=False)
    speaker.say(7, "begin", ("r", 1), heard.append)
    await until(lambda: heard)
    assert heard == [fault]
    assert "a word of a push was not said" in log.text
    log.clear()
    fault = adt.PeerLostError("gone")  # the other side sees it as well
    speaker.say(7, "begin", ("r", 1), heard.append)
    await until(lambda: len(heard) == 2)
    assert not log.text


# Turns. -----------------------------------------------------------------------------------------------------


async def test_workers_that_take_turns_get_both_modes() -> None:
    registry = Registry()
    both = {"modes": ["pull", "push"]}
    for name in ("p0", "p1"):
        registry.put(registration(name, **both))
    for name in ("d0", "d1"):
        registry.put(registration(name, "decode", **both))
    config = RouterConfig(modes=("pull", "push"))
    legs: Any = None
    dispatcher = Dispatcher(config, registry, legs, RouterMetrics())
    seen: dict[tuple[str, str], int] = {}

    class Flow:
        def __init__(self, mode: str) -> None:
            self.mode = mode

        async def open(self, call: Any, pair: Pair) -> Any:
            for half in pair:
                key = half.worker_id, self.mode
                seen[key] = seen.get(key, 0) + 1
            return SimpleNamespace(member=pair.decode)

    dispatcher._flows = {mode: Flow(mode) for mode in config.modes}
    generation = read_request(b'{"model": "m", "prompt": "a"}', chat=False)
    for _ in range(400):
        await dispatcher.open(generation)
    assert set(seen) == {(name, mode) for name in ("p0", "p1", "d0", "d1") for mode in config.modes}
    # 100 are to be expected; 50 fewer come once in 10**11 runs.
    assert min(seen.values()) > 50
    assert sum(count for (name, mode), count in seen.items() if mode == "pull") == 400  # two halves of 200


async def test_workers_that_know_one_hand_over_serve_a_router_of_both() -> None:
    registry = Registry()
    registry.put(registration("p", modes=["pull"]))
    registry.put(registration("d", "decode", modes=["pull"]))
    registry.put(registration("m", "mixed"))  # for where there is no pair
    legs: Any = None
    dispatcher = Dispatcher(RouterConfig(modes=("pull", "push")), registry, legs, RouterMetrics())

    class Flow:
        async def open(self, call: Any, pair: Pair) -> Any:
            return SimpleNamespace(member=pair.decode, mode=call.mode)

    dispatcher._flows = {"pull": Flow()}
    generation = read_request(b'{"model": "m", "prompt": "a"}', chat=False)
    found = [await dispatcher.open(generation) for _ in range(4)]  # two of them in the other's turn
    assert {(each.member.worker_id, each.route[MODE_HEADER]) for each in found} == {("d", "pull")}
    assert all(each.mode == "pull" for each in found)  # type: ignore[attr-defined]


async def test_a_worker_says_of_its_transports_those_that_work_here(monkeypatch: pytest.MonkeyPatch) -> None:
    # Where another test has loaded the libraries of HIXL, they are there until the process ends.
    monkeypatch.setattr(_hixl, "open_engine", lambda *_: (None, "no HIXL"))
    config = WorkerConfig(role="decode", num_blocks=8, transports=("hixl", "tcp"))
    async with worker(config) as here:
        assert here.registration().transports == ["tcp"]
