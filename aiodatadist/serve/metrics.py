"""What routers and workers count, and how Prometheus reads it. The other modules know no more of metrics than this.

Counting is an addition or two; names, labels and text are made when somebody asks for them. When nothing is under way
every gauge is 0, but for those of `LASTING`, which say what is there.
"""

from __future__ import annotations

import bisect
import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from .protocol import Load

__all__ = ["CONTENT_TYPE", "LASTING", "Histogram", "RouterMetrics", "WorkerMetrics"]

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
LASTING: Final = ("aiodatadist_free_blocks", "aiodatadist_num_blocks", "aiodatadist_router_workers")
"""The gauges that are not 0 when nothing is under way."""
_BOUNDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_LOAD_HELP: Final = {
    "free_blocks": "KV blocks that a request could get",
    "num_blocks": "KV blocks of all engines",
    "running": "Requests that the model works on",
    "waiting": "Requests that wait for the model",
    "tokens": "Prompt tokens that are not prefilled yet",
}


class Histogram:
    """Seconds, by size."""

    def __init__(self) -> None:
        self.sum = 0.0
        self.counts = [0] * (len(_BOUNDS) + 1)

    def observe(self, seconds: float) -> None:
        """Count one."""
        self.sum += seconds
        self.counts[bisect.bisect_left(_BOUNDS, seconds)] += 1

    def buckets(self) -> list[tuple[str, float]]:
        """Return upper bounds with how many there are up to them."""
        total, found = 0, []
        for bound, count in zip((*map(str, _BOUNDS), "+Inf"), self.counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found


class _Page:
    """What ``GET /metrics`` answers. Subclasses collect their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self._gauges: dict[str, tuple[str, Callable[[], float]]] = {}

    def gauge(self, name: str, help: str, value: Callable[[], float]) -> None:
        """Have a gauge ``aiodatadist_NAME`` whose value is asked for when it is read."""
        self._gauges[name] = (help, value)

    def describe(self) -> list[Metric]:
        """Claim no names: there is only this collector."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        yield CounterMetricFamily(
            "process_cpu_seconds", "Processor time of this process, all of its threads", value=time.process_time()
        )
        for name, (help, value) in self._gauges.items():
            yield GaugeMetricFamily(f"aiodatadist_{name}", help, value=value())
        yield from self._own()

    def _own(self) -> Iterable[Metric]:
        raise NotImplementedError

    def page(self) -> bytes:
        """Return the text of ``/metrics``, of `CONTENT_TYPE`."""
        return bytes(generate_latest(self._registry))


class WorkerMetrics(_Page):
    """Counters of a worker."""

    def __init__(self) -> None:
        super().__init__()
        self.phases: dict[str, Histogram] = defaultdict(Histogram)
        self.running: Counter[str] = Counter()
        self._kv_bytes: Counter[str] = Counter()
        self._kv_seconds: dict[str, Histogram] = defaultdict(Histogram)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the body: one request's ``prefill``, ``handover``, ``transfer`` or ``decode``."""
        began = time.perf_counter()
        self.running[name] += 1
        try:
            yield
        finally:
            self.running[name] -= 1
            self.phases[name].observe(time.perf_counter() - began)

    def moved(self, mode: str, nbytes: int, seconds: float) -> None:
        """Count the KV of one request that has been moved; `mode` is ``pull`` or ``push``."""
        self._kv_bytes[mode] += nbytes
        self._kv_seconds[mode].observe(seconds)

    def watch_load(self, load: Callable[[], Load]) -> None:
        """Show what the engines have to do, and room for."""
        for name, help in _LOAD_HELP.items():
            self.gauge(name, help, lambda name=name: getattr(load(), name))  # type: ignore[misc]
        self.gauge("used_blocks", "KV blocks in use", lambda: load().num_blocks - load().free_blocks)

    def watch_prefixes(self, counts: Callable[[], tuple[int, int]]) -> None:
        """Show how many tokens of prompts there were, and how many of them were in the cache already."""
        self._prefixes = counts

    _prefixes: Callable[[], tuple[int, int]] | None = None

    def _own(self) -> Iterator[Metric]:
        running = GaugeMetricFamily("aiodatadist_phase_running", "Requests in a phase", labels=["phase"])
        for name, count in self.running.items():
            running.add_metric([name], count)
        yield running
        yield _histograms("aiodatadist_phase_seconds", "Seconds of one request in a phase", "phase", self.phases)
        yield _counters("aiodatadist_kv_bytes", "Bytes of KV that were moved", ["mode"], self._kv_bytes)
        yield _histograms(
            "aiodatadist_kv_transfer_seconds", "Seconds to move one request's KV", "mode", self._kv_seconds
        )
        if self._prefixes is not None:
            prompt, cached = self._prefixes()
            yield CounterMetricFamily("aiodatadist_prompt_tokens", "Tokens of prompts", value=prompt)
            yield CounterMetricFamily(
                "aiodatadist_prefix_hit_tokens", "Tokens of prompts that were in the cache already", value=cached
            )


class RouterMetrics(_Page):
    """Counters of a router.

    Attributes
    ----------
    in_flight : int
        Requests of clients that are under way, in the queue or behind it.
    seconds : dict of str to Histogram
        ``queue``, ``ttft`` (until the first bytes of an answer), ``tpot`` (mean time between two pieces of a stream),
        ``e2e``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.requests: Counter[tuple[int, str]] = Counter()
        self.retries: Counter[str] = Counter()
        self.lost = 0
        self.migrations = 0
        self.in_flight = 0
        self.seconds: dict[str, Histogram] = {name: Histogram() for name in ("queue", "ttft", "tpot", "e2e")}
        self.gauge("router_in_flight", "Requests of clients under way", lambda: self.in_flight)
        self._members: Callable[[], Iterable[Metric]] = tuple

    def ended(self, status: int, code: str) -> None:
        """Count a request that has ended; `code` is ``ok``, ``client_gone`` or one of `errors.CODES`."""
        self.requests[status, code] += 1

    def retried(self, code: str) -> None:
        """Count another attempt, by the code of the error before it."""
        self.retries[code] += 1

    def streamed(self, first: float, last: float, pieces: int) -> None:
        """Count a stream by when its first and last bytes came, and its number of pieces."""
        if pieces > 1:
            self.seconds["tpot"].observe((last - first) / (pieces - 1))

    def watch_members(self, collect: Callable[[], Iterable[Metric]]) -> None:
        """Show what `collect` yields of the workers."""
        self._members = collect

    def _own(self) -> Iterator[Metric]:
        yield from self._members()
        yield _counters(
            "aiodatadist_router_requests",
            "Requests that have ended",
            ["status", "code"],
            {(str(status), code): count for (status, code), count in self.requests.items()},
        )
        yield _counters(
            "aiodatadist_router_retries", "Attempts after the first, by the error before", ["code"], self.retries
        )
        yield CounterMetricFamily(
            "aiodatadist_router_migrations", "Answers that another worker went on with", value=self.migrations
        )
        yield CounterMetricFamily("aiodatadist_router_lost_workers", "Workers that fell silent", value=self.lost)
        helps = {
            "queue": "Seconds before a request was let in",
            "ttft": "Seconds until the first bytes of an answer",
            "tpot": "Mean seconds between two pieces of a stream",
            "e2e": "Seconds of a whole request that ended well",
        }
        for name, help in helps.items():
            family = HistogramMetricFamily(f"aiodatadist_router_{name}_seconds", help)
            family.add_metric([], self.seconds[name].buckets(), self.seconds[name].sum)
            yield family


def _counters(name: str, help: str, labels: list[str], counts: Mapping[Any, int]) -> Metric:
    family = CounterMetricFamily(name, help, labels=labels)
    for key, count in counts.items():
        family.add_metric([key] if isinstance(key, str) else list(key), count)
    return family


def _histograms(name: str, help: str, label: str, found: dict[str, Histogram]) -> Metric:
    family = HistogramMetricFamily(name, help, labels=[label])
    for key, histogram in found.items():
        family.add_metric([key], histogram.buckets(), histogram.sum)
    return family
