"""The logger, counters, latencies and rows of dump."""

from __future__ import annotations

import asyncio
import logging
import pickle
import subprocess
import sys

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from aiodatadist import errors
from aiodatadist.observe import OUTCOMES, Counters, Histogram, PendingOperation, get_logger, outcome_of

# --- the logger -----------------------------------------------------------------------------------


def test_messages_reach_the_standard_logger(caplog: pytest.LogCaptureFixture) -> None:
    log = get_logger(cluster_id=2)
    with caplog.at_level(logging.INFO, logger="aiodatadist"):
        log.debug("not shown")
        log.info("linked, 100 %s of it", peer=3, path="shm")
        with structlog.contextvars.bound_contextvars(request="r1"):
            log.bind(peer=4).warning("slow path")
    first, second = caplog.records
    assert first.name == "aiodatadist"
    assert first.getMessage() == "linked, 100 %s of it cluster_id=2 peer=3 path='shm'"
    assert first.aiodatadist == {"cluster_id": 2, "peer": 3, "path": "shm"}  # type: ignore[attr-defined]
    assert second.levelno == logging.WARNING
    assert second.aiodatadist == {"cluster_id": 2, "peer": 4, "request": "r1"}  # type: ignore[attr-defined]


def test_records_name_the_caller_and_the_exception(caplog: pytest.LogCaptureFixture) -> None:
    log = get_logger()
    with caplog.at_level(logging.DEBUG, logger="aiodatadist"):
        log.debug("x")
        try:
            raise errors.PeerLostError("gone", peer=1)
        except errors.PeerLostError:
            log.exception("lost")
    for record in caplog.records:
        assert record.funcName == "test_records_name_the_caller_and_the_exception"
        assert record.filename == "test_observe.py"
    lost = caplog.records[1]
    assert lost.exc_info is not None
    assert isinstance(lost.exc_info[1], errors.PeerLostError)


def test_the_library_configures_nothing() -> None:
    code = """
import logging, structlog
import aiodatadist.observe as observe
observe.get_logger().warning("must not be seen", secret=1)
logger = logging.getLogger("aiodatadist")
assert [type(h) for h in logger.handlers] == [logging.NullHandler], logger.handlers
assert logger.level == logging.NOTSET and logger.propagate
assert not logging.getLogger().handlers
assert not structlog.is_configured()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_structlog_of_the_application_does_not_matter(caplog: pytest.LogCaptureFixture) -> None:
    log = get_logger()
    with structlog.testing.capture_logs() as captured, caplog.at_level(logging.INFO, logger="aiodatadist"):
        log.info("ours")
    assert captured == []
    assert [record.getMessage() for record in caplog.records] == ["ours"]


# --- latencies ------------------------------------------------------------------------------------


@given(st.floats(0, 1e9))
def test_each_duration_falls_into_its_bucket(seconds: float) -> None:
    histogram = Histogram()
    histogram.record(seconds)
    index = histogram.buckets.index(1)
    assert sum(histogram.buckets) == histogram.count == 1
    assert int(seconds * 1e6) < round(Histogram.BOUNDS[index] * 1e6) if index < 31 else seconds >= 2**30 * 1e-6
    if index:
        assert int(seconds * 1e6) >= round(Histogram.BOUNDS[index - 1] * 1e6)
    assert histogram.quantile(0.5) == Histogram.BOUNDS[index]


@given(st.lists(st.floats(1e-6, 1000), min_size=1, max_size=50), st.floats(0, 1))
def test_quantiles_are_at_most_twice_too_high(durations: list[float], q: float) -> None:
    histogram = Histogram()
    for seconds in durations:
        histogram.record(seconds)
    true = sorted(durations)[max(0, -int(-q * len(durations) // 1) - 1)]
    assert true * 0.999 <= histogram.quantile(q) <= true * 2.001


def test_histogram_edges() -> None:
    histogram = Histogram()
    assert histogram.quantile(0.99) == 0.0
    histogram.record(-5.0)
    assert histogram.total == 0.0
    assert histogram.quantile(1.0) == 1e-6
    with pytest.raises(ValueError, match=r"0\.\.1"):
        histogram.quantile(1.5)
    other = Histogram()
    other.record(3e-6)
    histogram += other
    assert histogram.as_dict() == {"buckets": [1, 0, 1] + [0] * 29, "count": 2, "total": 3e-6}
    assert len(Histogram.BOUNDS) == Histogram.SIZE


# --- counters -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "ok"),
        (errors.TransferError("x"), "failed"),
        (errors.InternalError("x"), "failed"),
        (OSError("x"), "failed"),
        (asyncio.CancelledError(), "cancelled"),
        (errors.TransferTimeout("x"), "timed_out"),
        (TimeoutError(), "timed_out"),
        (errors.PeerLostError("x"), "peer_lost"),
        (errors.TransferAborted("x"), "aborted"),
    ],
)
def test_v1_causes_are_told_apart(error: BaseException | None, outcome: str) -> None:
    assert outcome_of(error) == outcome
    counters = Counters()
    counters.started += 1
    assert counters.pending == 1
    counters.end(outcome_of(error), seconds=0.5, pulled=10, pushed=20)
    assert counters.pending == 0
    assert {name: number for name, number in counters.as_dict().items() if name in OUTCOMES and number} == {outcome: 1}
    assert (counters["bytes_pulled"], counters["bytes_pushed"]) == (10, 20)
    assert counters.latency.count == (1 if outcome == "ok" else 0)


def test_counters_look_like_a_dict() -> None:
    counters = Counters()
    counters.started = 3
    counters.end("ok")
    counters.end("lease_expired")
    assert dict(counters)["started"] == 3
    assert list(counters) == list(counters.keys())
    assert len(counters) == len(dict(counters))
    assert not hasattr(counters, "__dict__")
    with pytest.raises(KeyError):
        counters["latency"]
    with pytest.raises(ValueError, match="vanished"):
        counters.end("vanished")
    with pytest.raises(ValueError, match="started"):
        counters.end("started")
    total = Counters()
    total += counters
    total += counters
    assert (total.started, total.ok, total.lease_expired, total.pending) == (6, 2, 2, 2)
    assert total.latency.count == 2
    assert counters.started == 3


# --- dump -----------------------------------------------------------------------------------------


def test_v3_rows_of_dump() -> None:
    row = PendingOperation(7, "pull", 3, 1.25, "draining", 4096, 8192, "tcp")
    assert str(row) == "#7 pull cluster 3 over tcp: draining for 1.250 s, 4096 of 8192 bytes"
    assert str(PendingOperation(8, "copy", None, 0.0, "queued")) == "#8 copy: queued for 0.000 s"
    assert pickle.loads(pickle.dumps(row)) == row
