"""What routers and workers count. The other modules call these methods and know no more of metrics.

Not built yet: the Prometheus names, histograms and labels of docs/serving.md. They belong into this file alone;
`render` is what ``GET /metrics`` answers.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Iterator

from .protocol import Load

__all__ = ["RouterMetrics", "WorkerMetrics"]


class WorkerMetrics:
    """Counters of a worker."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.count: Counter[str] = Counter()
        self.running: Counter[str] = Counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the body: one request's ``prefill``, ``transfer`` or ``decode``."""
        began = time.perf_counter()
        self.running[name] += 1
        try:
            yield
        finally:
            self.running[name] -= 1
            self.count[name] += 1
            self.seconds[name] += time.perf_counter() - began

    def render(self, load: Load, tickets: int) -> str:
        """Return the text of ``/metrics``.

        Parameters
        ----------
        load : Load
            Now.
        tickets : int
            Held now.
        """
        lines = [f"aiodatadist_{name} {getattr(load, name)}" for name in Load.__struct_fields__]
        lines.append(f"aiodatadist_tickets {tickets}")
        for name in self.count | self.running:
            lines.append(f'aiodatadist_phase_running{{phase="{name}"}} {self.running[name]}')
            lines.append(f'aiodatadist_phase_seconds_count{{phase="{name}"}} {self.count[name]}')
            lines.append(f'aiodatadist_phase_seconds_sum{{phase="{name}"}} {self.seconds[name]}')
        return "\n".join(lines) + "\n"


class RouterMetrics:
    """Counters of a router."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[int, str]] = Counter()
        self.retries: Counter[str] = Counter()
        self.in_flight = 0

    def ended(self, status: int, code: str) -> None:
        """Count a request that has ended; `code` is ``ok``, ``client_gone`` or one of `errors.CODES`."""
        self.requests[status, code] += 1

    def retried(self, code: str) -> None:
        """Count another attempt, by the code of the error before it."""
        self.retries[code] += 1

    def render(self, load: int, workers: dict[str, int]) -> str:
        """Return the text of ``/metrics``.

        Parameters
        ----------
        load : int
            Load leases in use.
        workers : dict
            Number of workers by role.
        """
        lines = [f"aiodatadist_router_in_flight {self.in_flight}", f"aiodatadist_router_load_leases {load}"]
        lines += [f'aiodatadist_router_workers{{role="{role}"}} {count}' for role, count in workers.items()]
        lines += [
            f'aiodatadist_router_requests_total{{status="{status}",code="{code}"}} {count}'
            for (status, code), count in self.requests.items()
        ]
        lines += [f'aiodatadist_router_retries_total{{code="{code}"}} {count}' for code, count in self.retries.items()]
        return "\n".join(lines) + "\n"
