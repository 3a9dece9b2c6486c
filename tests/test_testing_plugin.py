"""The pytest plug-in, as users see it: each test runs pytest on a small suite in a process of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.hang_limit(300)


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Return an empty suite of a project that uses pytest-asyncio in its strict mode, and our plug-in."""
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function\nfilterwarnings = error\n")
    # As if installed: neither the checkout's conftest.py nor its settings are in sight.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, sys.path)]))
    return pytester


def run(suite: pytest.Pytester, source: str, *options: str) -> pytest.RunResult:
    suite.makepyfile(source)
    return suite.runpytest_subprocess("-p", "pytest_aiodatadist", *options)


def test_unused_it_imports_nothing_and_changes_no_loop(suite: pytest.Pytester) -> None:
    result = run(
        suite,
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
        """,
    )
    result.assert_outcomes(passed=2)


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
