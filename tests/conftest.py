"""Options, guards and fixtures of the whole suite. CONTRIBUTING.md explains the options."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import functools
import gc
import importlib.util
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping

    from .hixl_standin import Controls

REQUIRABLE = ("torch", "npu", "uvloop", "verbs", "hixl", "redis", "unprivileged", "smollm2")
# A test that swallowed the failure of the hang limit ends the whole run this many seconds later.
HARD_LIMIT_AFTER = 30.0
# Native threads may still be letting go of what they hold when a test returns.
SETTLE_SECONDS = 30.0

_required: set[str] = set()
_scale = 1.0
_loop_errors: list[dict[str, Any]] = []
# Native objects by kind that were alive after the last test: without a failure, none.
_left_behind: dict[str, int] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("aiodatadist")
    group.addoption(
        "--require",
        action="append",
        default=[],
        metavar="NAME",
        help=f"a skip for want of NAME is a failure; one or more of {', '.join(REQUIRABLE)}",
    )
    group.addoption("--scale", type=float, default=1.0, help="multiplies rounds, seeds and examples")
    group.addoption("--loop", choices=("asyncio", "debug", "uvloop"), default="asyncio", help="event loop")
    group.addoption("--hang-limit", type=float, default=120.0, metavar="SECONDS", help="per test (120)")
    group.addoption("--min-passed", type=int, default=0, metavar="N", help="fewer passed tests are a failure")


def pytest_configure(config: pytest.Config) -> None:
    global _scale
    for value in config.getoption("--require"):
        _required.update(name.strip() for name in value.split(",") if name.strip())
    if unknown := _required - set(REQUIRABLE):
        raise pytest.UsageError(f"--require: unknown {', '.join(sorted(unknown))}; one of {', '.join(REQUIRABLE)}")
    _scale = config.getoption("--scale")
    if not _scale > 0:
        raise pytest.UsageError("--scale must be positive")
    if config.getoption("--loop") == "debug":
        # The runner sets the loop's debug flag from this option, after the factory.
        config.option.asyncio_debug = True
    # Machines differ in speed: examples have no deadline of their own, the hang limit is enough.
    hypothesis.settings.register_profile(
        "aiodatadist",
        deadline=None,
        max_examples=max(5, round(100 * _scale)),
        print_blob=True,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("aiodatadist")


def pytest_report_header(config: pytest.Config) -> str:
    required = ", ".join(sorted(_required)) or "nothing"
    return f"aiodatadist: loop {config.getoption('--loop')}, scale {_scale:g}, required: {required}"


# --- the tests of verbs ---------------------------------------------------------------------------
#
# They run on emulated processors, on which importing every module takes minutes: with `-m verbs`, a module is only
# looked at if its text has the word. That this leaves none out is checked wherever all are collected.


def _names_verbs(path: Path) -> bool:
    return "verbs" in path.read_text().casefold()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    wanted = config.getoption("markexpr") == "verbs" and collection_path.match("test_*.py")
    return True if wanted and not _names_verbs(collection_path) else None


def _check_names(items: list[pytest.Item]) -> None:
    unnamed = {item.path for item in items if item.get_closest_marker("verbs") and not _names_verbs(item.path)}
    if unnamed:
        raise pytest.UsageError(f"has tests of verbs, and must name it: {', '.join(map(str, sorted(unnamed)))}")


def pytest_collection_finish(session: pytest.Session) -> None:
    # Collecting after each test is cheap when what was imported so far is left out of it.
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    passed = len(reporter.stats.get("passed", ())) if reporter else 0
    wanted = session.config.getoption("--min-passed")
    if passed < wanted and exitstatus == pytest.ExitCode.OK:
        if reporter:
            reporter.write_line(f"{passed} tests passed, at least {wanted} had to", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


# --- what a test needs ----------------------------------------------------------------------------


def _missing_module(name: str) -> str | None:
    return None if importlib.util.find_spec(name) else f"{name} is not installed"


def _missing_transport(name: str) -> str | None:
    from aiodatadist import _core

    for found, usable, detail in _core.probe_transports():
        if found == name:
            return None if usable else str(detail)
    return f"this build knows no transport {name}"


@functools.cache
def _missing_smollm2() -> str | None:
    """Fetch the model into the usual cache folder, once for all tests: 98 MB."""
    from aiodatadist.errors import DataDistError
    from aiodatadist.model import find_model

    try:
        find_model("smollm2").fetch(lambda text: None)
    except DataDistError as why:
        return str(why)
    return None


def _missing(name: str) -> str | None:
    """Say why a requirement is not met, or None."""
    if name == "npu":
        return _missing_module("torch_npu")
    if name == "verbs":
        return _missing_transport(name)
    if name == "hixl":
        from . import hixl_standin

        return hixl_standin.missing()
    if name == "redis":
        return _missing_module("redis") or (None if shutil.which("redis-server") else "no redis-server on PATH")
    if name == "unprivileged":
        return "running as root" if os.geteuid() == 0 else None
    if name == "smollm2":
        return _missing_smollm2()
    return _missing_module(name)


def _lack(name: str, reason: str) -> None:
    """Skip for want of a requirement, or fail where it is required."""
    if name in _required:
        pytest.fail(f"requires {name}, which --require demands: {reason}", pytrace=False)
    pytest.skip(f"requires {name}: {reason}")


@pytest.fixture
def hixl(monkeypatch: pytest.MonkeyPatch) -> Iterator[Controls]:
    """Have the library find the stand-in for HIXL, built at the first call, where CANN would be; no rule may break."""
    from . import hixl_standin

    monkeypatch.setenv("ASCEND_HOME_PATH", str(hixl_standin.build()))
    controls = hixl_standin.Controls()
    controls.reset()
    yield controls
    controls.reset()
    assert controls.violations() == []


@pytest.fixture(autouse=True)
def _hixl_where_marked(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("hixl"):
        request.getfixturevalue("hixl")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _check_names(items)


@pytest.fixture
def need() -> Callable[[str], None]:
    """Skip (or fail, with --require) from inside a test: ``need("torch")``."""

    def check(name: str) -> None:
        if reason := _missing(name):
            _lack(name, reason)

    return check


def _required_import(reason: str) -> str | None:
    """Return the required name whose import a skip was made for, by pytest.importorskip."""
    for name in _required:
        if f"could not import '{name}" in reason:
            return name
    return None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    report = yield
    if report.skipped and (name := _required_import(str(report.longrepr))):
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid}: skipped for want of {name}, which --require demands"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and (name := _required_import(str(report.longrepr))):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid}: skipped for want of {name}, which --require demands"
    if report.failed:
        item.stash[_failed] = True
    return report


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    for name in REQUIRABLE:
        if item.get_closest_marker(name) and (reason := _missing(name)):
            _lack(name, reason)
    with _hang_limit(_limit_of(item), _stderr_of(item.config)):
        return (yield)


# --- scale and seeds ------------------------------------------------------------------------------


class Scale:
    """Multiplies a number of rounds by --scale: ``scale(1000)``."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, rounds: int, *, least: int = 1) -> int:
        return max(least, round(rounds * self.factor))


@pytest.fixture(scope="session")
def scale() -> Scale:
    """Return what turns a full number of rounds into the number for this run."""
    return Scale(_scale)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("seeds")
    if marker and "seed" in metafunc.fixturenames:
        (count,) = marker.args
        metafunc.parametrize("seed", range(Scale(_scale)(count)))


# --- the event loop -------------------------------------------------------------------------------


def _on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # The text is taken now: holding on to the context would keep tasks, and what they hold, alive.
    text = {key: repr(value) for key, value in context.items()}
    _loop_errors.append(text)
    loop.default_exception_handler(context)


@pytest.hookimpl(wrapper=True)
def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Generator[None, Any, Mapping[str, Callable[[], asyncio.AbstractEventLoop]]]:
    chosen: Mapping[str, Callable[[], asyncio.AbstractEventLoop]] | None = yield
    kind = config.getoption("--loop")

    def new_loop() -> asyncio.AbstractEventLoop:
        if kind == "uvloop":
            import uvloop

            loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
            return loop
        return asyncio.new_event_loop()

    def guarded(factory: Callable[[], asyncio.AbstractEventLoop]) -> asyncio.AbstractEventLoop:
        loop = factory()
        loop.set_exception_handler(_on_loop_error)
        return loop

    # Simulated tests have chosen theirs: a virtual one.
    return {name: functools.partial(guarded, factory) for name, factory in (chosen or {kind: new_loop}).items()}


@pytest.fixture
def loop_errors() -> list[dict[str, Any]]:
    """Hold what reached the loop's exception handler, as texts; what is left at the end fails the test."""
    return _loop_errors


# --- guards around every test ---------------------------------------------------------------------

_failed = pytest.StashKey[bool]()


@contextlib.contextmanager
def _hang_limit(seconds: float, stderr: int) -> Iterator[None]:
    """Fail a test that hangs, with the stacks of all threads; end the process if that does not help."""

    def on_alarm(signum: int, frame: object) -> None:
        os.write(stderr, b"\nThe test reached its hang limit. Stacks of all Python threads:\n")
        faulthandler.dump_traceback(file=stderr, all_threads=True)
        pytest.fail(f"reached the hang limit of {seconds:g} s; the stacks of all threads are on stderr")

    previous = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(seconds + HARD_LIMIT_AFTER, exit=True, file=stderr)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        faulthandler.cancel_dump_traceback_later()


def _limit_of(item: pytest.Item) -> float:
    marker = item.get_closest_marker("hang_limit")
    return float(marker.args[0] if marker else item.config.getoption("--hang-limit"))


def _stderr_of(config: pytest.Config) -> int:
    """Return a descriptor of the real stderr: pytest captures number 2."""
    return config.stash.get(fault_handler_stderr_fd_key, 2)


def _live_objects() -> dict[str, int]:
    """Return the native objects alive, by kind; always empty but in a debug build."""
    core = sys.modules.get("aiodatadist._core")
    count = getattr(core, "live_objects", None)
    return {kind: n for kind, n in count().items() if n} if count else {}


def _still_alive() -> dict[str, int]:
    """Return the native objects that are alive after a test and were not left by one before it, by kind."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        alive = {kind: n for kind, n in _live_objects().items() if n > _left_behind.get(kind, 0)}
        if not alive or time.monotonic() >= deadline:
            return alive
        time.sleep(0.01)
        gc.collect()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    with _hang_limit(_limit_of(item), _stderr_of(item.config)):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    global _left_behind
    with _hang_limit(_limit_of(item), _stderr_of(item.config)):
        result = yield
        # All function fixtures are down, the loop is closed: nothing of the test may be left.
        gc.collect()
        errors = list(_loop_errors)
        _loop_errors.clear()
        keeps = item.get_closest_marker("keeps_native") is not None
        # The traceback of a failed test keeps its frames, and with them its objects: the next tests bear no blame.
        alive = {} if keeps or item.stash.get(_failed, False) else _still_alive()
        if not keeps:
            _left_behind = _live_objects()
        if alive:
            pytest.fail(f"native objects are still alive after the test: {alive}", pytrace=False)
        if errors:
            listed = "\n".join(f"  {error}" for error in errors)
            pytest.fail(f"the event loop's exception handler was called:\n{listed}", pytrace=False)
        return result
