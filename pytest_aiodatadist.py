"""The pytest plug-in of aiodatadist: fixtures for a simulated cluster, a virtual clock and real peer processes.

pytest loads it by its entry point; docs/testing.md shows what it is for. It is a module of its own, because an entry
point in the package would import all of it, numpy included, into every run of pytest. Nothing of aiodatadist is
imported before a test asks for one of the fixtures.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import asyncio

    from aiodatadist.testing import FaultProxy, PeerProcess, SimCluster, Trace, VirtualLoop

__all__: list[str] = []

_ON_VIRTUAL_TIME = ("sim_cluster", "virtual_clock")

_cluster: pytest.StashKey[SimCluster] = pytest.StashKey()
_peers: pytest.StashKey[list[PeerProcess]] = pytest.StashKey()
_failure: pytest.StashKey[BaseException] = pytest.StashKey()
_replay: pytest.StashKey[Trace] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add our options."""
    group = parser.getgroup("aiodatadist", "simulations of aiodatadist")
    group.addoption(
        "--sim-seed",
        type=_seeds,
        metavar="SEEDS",
        help="run each simulated test with these seeds only: 7, or 3,7, or 100-199",
    )
    group.addoption(
        "--sim-seeds", type=int, metavar="N", help="run each simulated test that draws seeds with the seeds 0 to N - 1"
    )
    group.addoption(
        "--sim-replay",
        metavar="FILE",
        help="run simulated tests with the seed of this trace, and fail at the first event that differs from it",
    )


def _seeds(text: str) -> tuple[int, ...]:
    """Read ``3,7,100-199``."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise ValueError(text)
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(found)


def pytest_configure(config: pytest.Config) -> None:
    """Name our marker; add what needs pytest-asyncio where that is there."""
    config.addinivalue_line(
        "markers",
        "sim(seeds=1, **options): for a test with the fixture sim_cluster or sim_seed: how many seeds to run it with, "
        "and what to make the SimCluster with",
    )
    if (count := config.getoption("--sim-seeds")) is not None and count < 1:
        raise pytest.UsageError("--sim-seeds must be at least 1")
    if path := config.getoption("--sim-replay"):
        from aiodatadist.testing import Trace

        try:
            config.stash[_replay] = Trace.load(path)
        except (OSError, ValueError, KeyError) as why:
            raise pytest.UsageError(f"--sim-replay: {path} is no trace that can be read: {why}") from None
    fixtures = _fixtures() if _loops_can_be_chosen(config) else _WithoutAsyncio()
    config.pluginmanager.register(fixtures, "aiodatadist fixtures")


def _loops_can_be_chosen(config: pytest.Config) -> bool:
    """Whether there is pytest-asyncio, and as new as we need it."""
    return hasattr(config.hook, "pytest_asyncio_loop_factories")


# Seeds. -----------------------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None]:
    """Parametrise simulated tests with their seeds, and have pytest-asyncio run them on a virtual clock."""
    if "sim_seed" in metafunc.fixturenames:
        _parametrise(metafunc)
    virtual = any(name in metafunc.fixturenames for name in _ON_VIRTUAL_TIME)
    if not virtual or not _loops_can_be_chosen(metafunc.config):
        return (yield)
    # pytest-asyncio asks here, for this test, which loops to run it in. Whoever answers has to answer for every test,
    # so our answer is there for this moment only, and all other tests are as if we were not installed.
    manager, answer = metafunc.config.pluginmanager, _VirtualLoops()
    manager.register(answer)
    try:
        return (yield)
    finally:
        manager.unregister(answer)


class _VirtualLoops:
    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_asyncio_loop_factories(
        self, config: pytest.Config, item: pytest.Item
    ) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
        from aiodatadist.testing import VirtualLoop

        return {"virtual": VirtualLoop}


def _options_of(item: Any) -> dict[str, Any]:
    """Return what the marker `sim` says."""
    marker = item.get_closest_marker("sim")
    if marker is None:
        return {}
    if marker.args:
        raise pytest.UsageError(f"{item.nodeid}: the marker sim takes keywords only, as in sim(seeds=100)")
    return dict(marker.kwargs)


def _parametrise(metafunc: pytest.Metafunc) -> None:
    config, count = metafunc.config, _options_of(metafunc.definition).get("seeds")
    if count is not None and (not isinstance(count, int) or count < 1):
        raise pytest.UsageError(f"{metafunc.definition.nodeid}: sim(seeds=) must be at least 1, got {count!r}")
    chosen: Sequence[int]
    if (trace := config.stash.get(_replay, None)) is not None:
        chosen = (trace.seed,)
    elif config.getoption("--sim-seed") is not None:
        chosen = config.getoption("--sim-seed")
    elif count is not None:
        chosen = range(config.getoption("--sim-seeds") or count)
    else:
        return
    ids: list[Any] = [f"seed-{seed}" for seed in chosen]
    if count is None and len(ids) == 1 and hasattr(pytest, "HIDDEN_PARAM"):
        ids = [pytest.HIDDEN_PARAM]  # the test has the same name with a chosen seed as without
    metafunc.parametrize("sim_seed", chosen, ids=ids, indirect=True)


@pytest.fixture
def sim_seed(request: pytest.FixtureRequest) -> int:
    """Return the seed of a simulated test: 0, or one of those that the marker ``sim(seeds=N)`` or an option wants."""
    return int(getattr(request, "param", 0))


# Fixtures of asynchronous tests. ----------------------------------------------------------------------------


def _fixtures() -> object:
    # Loaded already: pytest-asyncio is a plug-in itself. Only its own decorator makes fixtures that it runs in every
    # mode.
    import pytest_asyncio

    class Fixtures:
        @pytest_asyncio.fixture
        async def sim_cluster(self, request: pytest.FixtureRequest, sim_seed: int) -> AsyncIterator[SimCluster]:
            """Return an open `SimCluster` with the test's seed, on a virtual clock; it is closed after the test."""
            import asyncio

            from aiodatadist.testing import SimCluster, VirtualLoop

            options = _options_of(request.node)
            options.pop("seeds", None)
            replay = request.config.stash.get(_replay, None)
            cluster = SimCluster(sim_seed, replay=replay, **options)
            if isinstance(loop := asyncio.get_running_loop(), VirtualLoop):
                loop.start_anew()  # it may be that of other tests too, and each seed is the same run all the same
            await cluster.__aenter__()
            request.node.stash[_cluster] = cluster
            yield cluster
            # After a failure nothing waits for the end of what hangs.
            failure = request.node.stash.get(_failure, None)
            await cluster.__aexit__(None if failure is None else type(failure), failure, None)
            del request.node.stash[_cluster]
            if replay is not None and not cluster.trace.diverged and len(cluster.trace.events) < len(replay.events):
                happened = f"{len(cluster.trace.events)} of {len(replay.events)}"
                pytest.fail(f"the replay has ended after {happened} events of the trace", pytrace=False)

        @pytest_asyncio.fixture
        async def virtual_clock(self) -> VirtualLoop:
            """Return the test's event loop, whose time moves only when there is nothing left to do."""
            import asyncio

            from aiodatadist.testing import VirtualLoop

            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualLoop)
            return loop

        @pytest_asyncio.fixture
        async def spawn_peer(
            self, request: pytest.FixtureRequest
        ) -> AsyncIterator[Callable[..., Coroutine[Any, Any, PeerProcess]]]:
            """Return ``await spawn_peer(function, *args, **kwargs)``: a peer process that lives until the test ends."""
            from aiodatadist import testing

            peers = request.node.stash.setdefault(_peers, [])
            async with contextlib.AsyncExitStack() as stack:

                async def spawn(function: Any, *args: Any, **kwargs: Any) -> PeerProcess:
                    peer = await stack.enter_async_context(testing.spawn_peer(function, *args, **kwargs))
                    peers.append(peer)
                    return peer

                yield spawn
            del request.node.stash[_peers]

        @pytest_asyncio.fixture
        async def fault_proxy(self) -> AsyncIterator[Callable[..., Awaitable[FaultProxy]]]:
            """Return ``await fault_proxy(target, **options)``: a `FaultProxy` that is open until the test ends."""
            from aiodatadist.testing import FaultProxy

            async with contextlib.AsyncExitStack() as stack:

                async def open_proxy(target: Any, **options: Any) -> FaultProxy:
                    return await stack.enter_async_context(FaultProxy(target, **options))

                yield open_proxy

    return Fixtures()


class _WithoutAsyncio:
    """The same names where pytest-asyncio is missing, or too old."""

    @pytest.fixture
    def sim_cluster(self, request: pytest.FixtureRequest) -> None:
        """Say what is missing."""
        pytest.fail(
            f"the fixture {request.fixturename} needs pytest-asyncio: pip install 'pytest-asyncio>=1.5'", pytrace=False
        )

    virtual_clock = spawn_peer = fault_proxy = sim_cluster


# Reports. ---------------------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Say how a failure comes again."""
    report = yield
    if report.failed:
        if call.excinfo is not None and call.when != "teardown":
            item.stash[_failure] = call.excinfo.value
        if "sim_seed" in getattr(item, "fixturenames", ()):
            report.sections.append(("aiodatadist simulation", _about_simulation(item)))
        for peer in item.stash.get(_peers, []):
            if (error := peer.failure) is not None:
                report.sections.append((f"aiodatadist peer {peer.name}", str(error)))
    return report


def _about_simulation(item: pytest.Item) -> str:
    callspec = getattr(item, "callspec", None)
    seed = callspec.params.get("sim_seed", 0) if callspec is not None else 0
    # The id is relative to pytest's root, and the command is for the folder in which pytest was called.
    path, *names = item.nodeid.split("::", 1)
    path = os.path.relpath(item.config.rootpath / path, item.config.invocation_params.dir)
    again = f"pytest {shlex.quote('::'.join([path, *names]))}"
    lines = [f"seed {seed}", f"again:   {again} --sim-seed {seed}"]
    if (cluster := item.stash.get(_cluster, None)) is not None:
        trace = cluster.trace
        lines[0] += f", {len(trace.events)} events in {cluster.now():.6f} s, hash {trace.hash}"
        if (folder := _trace_folder(item.config)) is not None:
            name = re.sub(r"[^\w.-]+", "-", item.name)[:80].strip("-")
            digest = hashlib.blake2b(item.nodeid.encode(), digest_size=4).hexdigest()
            saved = folder / f"{name}-{digest}.json"
            trace.save(saved)
            with contextlib.suppress(ValueError):
                saved = saved.relative_to(item.config.invocation_params.dir)
            lines += [f"compare: {again} --sim-replay {shlex.quote(str(saved))}"]
    return "\n".join(lines)


def _trace_folder(config: pytest.Config) -> Path | None:
    """Return where traces of failures are kept, in pytest's cache; None without one."""
    cache = getattr(config, "cache", None)
    return None if cache is None else Path(cache.mkdir("aiodatadist-traces"))
