"""The pytest plug-in, as users see it: each test runs pytest on a small suite.

In this process, because a new one costs seconds; what pytest imports for a suite is forgotten after it, and what is
imported here before stays.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import textwrap
from pathlib import Path

import pytest

from aiodatadist import testing

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.hang_limit(300)

LOADED = [getattr(testing, name) for name in testing.__all__]


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Return an empty suite of a project that uses pytest-asyncio in its strict mode, and our plug-in."""
    # Where the project is installed, the inner run, which shares this process, would have its assertions rewritten.
    rewrite = "ignore:Module already imported so cannot be rewritten"
    pytester.makeini(
        f"[pytest]\nasyncio_default_fixture_loop_scope = function\nfilterwarnings =\n    error\n    {rewrite}\n"
    )
    # As if installed: neither the checkout's conftest.py nor its settings are in sight.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, sys.path)]))
    return pytester


def run(suite: pytest.Pytester, source: str, *options: str) -> pytest.RunResult:
    suite.makepyfile(source)
    return again(suite, *options)


def again(suite: pytest.Pytester, *options: str) -> pytest.RunResult:
    result = suite.runpytest_inprocess("-p", "pytest_aiodatadist", *options)
    # pytest leaves the last failure there for debuggers, and with it everything in its frames.
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):
        vars(sys).pop(name, None)
    return result


def test_unused_it_imports_nothing_and_changes_no_loop(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        """
        import asyncio, sys
        import pytest

        def test_plain(request):
            assert request.config.pluginmanager.has_plugin("pytest_aiodatadist")
            assert not {"aiodatadist", "numpy", "structlog"} & set(sys.modules)

        @pytest.mark.asyncio
        async def test_asynchronous(request):
            assert not request.config.hook.pytest_asyncio_loop_factories.get_hookimpls()
            assert type(asyncio.get_running_loop()).__module__ == "asyncio.unix_events"
        """
    )
    suite.runpytest_subprocess("-p", "pytest_aiodatadist").assert_outcomes(passed=2)


PEER = """
    import asyncio
    import pytest

    async def works(test, number):
        test.send(number + 1)
        await test.receive()

    async def fails(test):
        raise LookupError("the planted failure")
"""


def test_peers_live_until_the_test_ends_and_their_tracebacks_are_in_its_report(suite: pytest.Pytester) -> None:
    result = run(
        suite,
        PEER
        + """
    pids = []

    @pytest.mark.asyncio
    async def test_good(spawn_peer):
        one, other = await spawn_peer(works, 1), await spawn_peer(works, 2)
        assert (await one.receive(), await other.receive()) == (2, 3)
        pids.extend([one.pid, other.pid])

    def test_gone():
        import os
        assert len(pids) == 2
        assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)

    @pytest.mark.asyncio
    async def test_bad(spawn_peer):
        peer = await spawn_peer(fails)
        while peer.failure is None:
            await asyncio.sleep(0.001)
        raise TimeoutError("what the test waits for")
        """,
        "-p",
        "no:cacheprovider",
    )
    result.assert_outcomes(passed=2, failed=1, errors=1)
    result.stdout.fnmatch_lines(["*TimeoutError: what the test waits for*"])
    result.stdout.fnmatch_lines(["*aiodatadist peer fails*", '*raise LookupError("the planted failure")*'])


def test_a_proxy_until_the_test_ends(suite: pytest.Pytester) -> None:
    result = run(
        suite,
        """
        import asyncio
        import pytest

        @pytest.mark.asyncio
        async def test_proxied(fault_proxy):
            server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
            proxy = await fault_proxy(server.sockets[0].getsockname(), seed=3)
            reader, writer = await asyncio.open_connection(*proxy.address.split(":"))
            assert await reader.read() == b""
            writer.close()
            server.close()
            assert proxy.accepted == 1
        """,
    )
    result.assert_outcomes(passed=1)


def test_without_pytest_asyncio_the_fixtures_say_what_is_missing(suite: pytest.Pytester) -> None:
    source = "def test_simulated(sim_cluster):\n    pass\n\ndef test_plain(sim_seed):\n    assert sim_seed == 5\n"
    result = run(suite, source, "-p", "no:asyncio", "-o", "filterwarnings=", "--sim-seed", "5")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*the fixture sim_cluster needs pytest-asyncio: pip install*"])


# Simulations. -----------------------------------------------------------------------------------------------

NETWORK = """
    import asyncio
    import numpy as np
    import pytest
    import aiodatadist as adt
    from aiodatadist import testing

    pytestmark = pytest.mark.asyncio

    async def linked(sim):
        one, two = await sim.datadist(1), await sim.datadist(2)
        await two.link(sim.info(1))
        return one, two
"""


def test_time_that_passes_costs_nothing(suite: pytest.Pytester) -> None:
    result = run(
        suite,
        NETWORK
        + """
    import time

    async def test_a_day(virtual_clock):
        real, virtual = time.monotonic(), virtual_clock.time()
        await asyncio.sleep(86400.0)
        assert virtual_clock.time() - virtual >= 86400.0
        assert time.monotonic() - real < 3600.0
        assert asyncio.get_running_loop() is virtual_clock

    async def test_a_peer_that_falls_silent(sim_cluster):
        one, two = await linked(sim_cluster)
        began = sim_cluster.now()
        sim_cluster.crash(1, silent=True)
        async for event in two.events():
            if isinstance(event, adt.LinkStateChanged):
                break
        assert event.new is adt.LinkState.BROKEN
        assert 5.0 < sim_cluster.now() - began < 20.0

    async def work(test):
        pass

    async def test_what_needs_real_time_is_refused(virtual_clock):
        with pytest.raises(adt.UsageError, match="a process cannot be started on a virtual clock; it needs real time"):
            async with testing.spawn_peer(work):
                pass
        with pytest.raises(adt.UsageError, match="a proxy cannot be started"):
            async with testing.FaultProxy("127.0.0.1:1"):
                pass

    async def test_both(sim_cluster, virtual_clock):
        assert sim_cluster.now() == virtual_clock.time()

    async def test_real_time_is_real():
        assert type(asyncio.get_running_loop()).__module__ == "asyncio.unix_events"
        """,
    )
    result.assert_outcomes(passed=5)


SEEDS = (
    NETWORK
    + """
    @pytest.mark.sim(seeds=4)
    async def test_drawn(sim_cluster):
        one, two = await linked(sim_cluster)
        await asyncio.sleep(sim_cluster.random.random())
        assert sim_cluster.seed != {bad}, "the planted failure"

    async def test_one(sim_cluster, sim_seed):
        assert sim_cluster.seed == sim_seed

    def test_synchronous(sim_seed):
        assert sim_seed < 1000
"""
).replace("    pytestmark = pytest.mark.asyncio\n", "    pytestmark = pytest.mark.filterwarnings('ignore')\n")


def test_seeds_are_chosen_by_the_marker_and_by_options(suite: pytest.Pytester) -> None:
    suite.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function\nasyncio_mode = auto\n")
    suite.makepyfile(SEEDS.format(bad=-1))
    for options, names in (
        ((), ["test_drawn[seed-0]", "test_drawn[seed-3]", "test_one", "test_synchronous"]),
        (("--sim-seeds", "9"), ["test_drawn[seed-8]", "test_one", "test_synchronous"]),
        (("--sim-seed", "77"), ["test_drawn[seed-77]", "test_one", "test_synchronous"]),
        (("--sim-seed", "5,8-9"), ["test_drawn[seed-9]", "test_one[seed-5]", "test_synchronous[seed-8]"]),
    ):
        result = again(suite, "--collect-only", "-q", *options)
        result.stdout.fnmatch_lines([f"*::{name.replace('[', '[[]')}" for name in names])
    for wrong in (("--sim-seed", "seven"), ("--sim-seed", "9-5"), ("--sim-seeds", "0")):
        result = again(suite, *wrong)
        assert result.ret == pytest.ExitCode.USAGE_ERROR


def test_a_failing_seed_is_printed_and_comes_again(suite: pytest.Pytester) -> None:
    suite.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function\nasyncio_mode = auto\n")
    result = run(suite, SEEDS.format(bad=2))
    result.assert_outcomes(passed=5, failed=1)
    result.stdout.fnmatch_lines(["*- aiodatadist simulation -*", "seed 2, * events in * s, hash *", "again: *"])
    said = str(result.stdout)
    happened = re.search(r"^seed 2, (\d+ events in .* s, hash \w+)$", said, re.M)
    seed = re.search(r"^again: +pytest (.*)$", said, re.M)
    compare = re.search(r"^compare: +pytest (.*)$", said, re.M)
    assert happened
    assert seed
    assert compare
    for command in (seed[1], compare[1]):
        result = again(suite, *shlex.split(command))
        result.assert_outcomes(failed=1)
        assert happened[1] in str(result.stdout)

    # The same seed of another program: the first event that differs fails the test.
    suite.makepyfile(SEEDS.format(bad=2).replace("one, two = await sim", "await sim.datadist(3); one, two = await sim"))
    result = again(suite, *shlex.split(compare[1]))
    assert result.parseoutcomes().get("passed", 0) == 0
    result.stdout.fnmatch_lines(["*ReplayDiverged: event 0 was *"])

    result = again(suite, "--sim-replay", "nowhere.json")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--sim-replay: nowhere.json is no trace that can be read*"])


def test_a_cluster_in_a_test_that_pytest_asyncio_does_not_run_says_what_it_needs(suite: pytest.Pytester) -> None:
    result = run(suite, "def test_synchronous(sim_cluster):\n    pass\n")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*RuntimeError: a SimCluster needs a virtual clock: run the test with *"])


def test_commands_are_for_the_folder_in_which_pytest_was_called(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function\nasyncio_mode = auto\n")
    below = suite.mkdir("below")
    (below / "test_below.py").write_text(textwrap.dedent(SEEDS.format(bad=2)))
    monkeypatch.chdir(below)
    result = again(suite)
    result.assert_outcomes(passed=5, failed=1)
    for kind in ("again", "compare"):
        command = re.search(rf"^{kind}: +pytest (.*)$", str(result.stdout), re.M)
        assert command
        again(suite, *shlex.split(command[1])).assert_outcomes(failed=1)


@pytest.mark.parametrize("scope", ["module", "session"])
def test_a_seed_is_the_same_run_in_a_loop_that_others_have_used(suite: pytest.Pytester, scope: str) -> None:
    source = SEEDS.format(bad=2)
    said = set()
    for used in (scope, "function"):
        scopes = "".join(f"asyncio_default_{what}_loop_scope = {used}\n" for what in ("fixture", "test"))
        suite.makeini(f"[pytest]\n{scopes}asyncio_mode = auto\n")
        result = run(suite, source)
        result.assert_outcomes(passed=5, failed=1)
        said.add(re.findall(r"^seed 2, .* hash \w+$", str(result.stdout), re.M)[0])
    assert len(said) == 1, said


def test_a_replay_stops_at_any_event_that_differs(suite: pytest.Pytester) -> None:
    """Also at one of a stream, which comes in a callback of the loop."""
    suite.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function\nasyncio_mode = auto\n")
    result = run(suite, SEEDS.format(bad=2))
    compare = re.search(r"^compare: +pytest (.*)$", str(result.stdout), re.M)
    assert compare
    arguments = shlex.split(compare[1])
    trace = testing.Trace.load(arguments[-1])
    number = max(number for number, event in enumerate(trace.events) if event[1] == "stream")
    trace.events[number:] = [(*trace.events[number][:-1], "something else")]
    trace.save(arguments[-1])
    result = again(suite, *arguments)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"*ReplayDiverged: event {number} was *something else*", f"seed 2, {number} events*"])


def test_what_hangs_fails_at_once(suite: pytest.Pytester) -> None:
    result = run(
        suite,
        NETWORK
        + """
    async def test_nothing_can_happen(sim_cluster):
        await linked(sim_cluster)
        await asyncio.Event().wait()

    @pytest.mark.sim(limit=60.0)
    async def test_for_ever(sim_cluster):
        while True:
            await asyncio.sleep(1.0)
        """,
    )
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*SimulationStuck: *"])


# The example. -----------------------------------------------------------------------------------------------


def test_the_example_passes_and_its_planted_bug_is_found(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite.makepyfile(test_my_scheduler=(ROOT / "examples/test_my_scheduler.py").read_text())
    again(suite).assert_outcomes(passed=17)
    monkeypatch.setenv("PLANTED_BUG", "1")
    result = again(suite, "-x", "-k", "kv_cache")
    result.assert_outcomes(passed=result.parseoutcomes().get("passed", 0), failed=1)
    result.stdout.fnmatch_lines(["*WrongBlocks: *", "*- aiodatadist simulation -*", "seed *", "again: *", "compare: *"])
