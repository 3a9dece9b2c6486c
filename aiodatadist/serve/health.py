"""What a router thinks of a worker's health, from the requests it sent there.

Not built yet, and belongs into this file alone: the circuit breaker (5 failures in a row open it for 10 s, 2 good
requests close it), slow start (a new or recovered worker's share ramps over 10 s), drain (60 s) and probes of
``GET /health``. `registry.Member` has one `Health`, `legs` reports to it, and `dispatch` asks `usable` and `weight`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Health"]


class Health:
    """One worker's.

    Parameters
    ----------
    clock : callable, optional
        Seconds, for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.since = clock()
        self.failures = 0

    @property
    def usable(self) -> bool:
        """Whether requests may be sent there."""
        return True

    @property
    def weight(self) -> float:
        """The share of requests that it should get, 0 to 1; policies may divide loads by it."""
        return 1.0

    def succeeded(self) -> None:
        """Hear of a request that the worker answered well."""
        self.failures = 0

    def failed(self) -> None:
        """Hear of one that it did not, through its own fault."""
        self.failures += 1
