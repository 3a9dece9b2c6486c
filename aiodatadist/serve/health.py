"""What a router thinks of a worker's health: by the requests it sent there, and by probes.

``closed`` is the breaker's usual state. Failures in a row open it; after some time it lets a few requests pass, one at
a time (half open), and closes when they went well, or opens again. Probes that fail in a row take a worker out as well,
until as many as it takes were answered. Whoever returns, and whoever is new, gets its share little by little.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable

from .config import DEFAULT_LIMITS, HealthLimits

__all__ = ["Breaker", "Health"]

_LEAST_WEIGHT = 0.1


class Breaker(enum.Enum):
    """States of a circuit breaker."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Health:
    """One worker's.

    Parameters
    ----------
    limits : HealthLimits
    warm : bool
        True: it gets its full share from the beginning.
    clock : callable, optional
        Seconds, for tests.

    Attributes
    ----------
    answering : bool
        Whether probes are answered.
    opened : int
        How often the breaker has opened.
    """

    def __init__(
        self,
        limits: HealthLimits = DEFAULT_LIMITS,
        *,
        warm: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._ramp_from = clock() - (limits.slow_start if warm else 0.0)
        self._failures = 0
        self._passes = 0
        self._opened_at: float | None = None  # None: closed
        self._trials: set[object] = set()
        self.opened = 0
        self.answering = True
        self._missed = 0
        self._answered = 0

    @property
    def breaker(self) -> Breaker:
        """The state of the breaker."""
        if self._opened_at is None:
            return Breaker.CLOSED
        return Breaker.HALF_OPEN if self._clock() - self._opened_at >= self._limits.open_time else Breaker.OPEN

    @property
    def usable(self) -> bool:
        """Whether a request may be sent there now."""
        if not self.answering:
            return False
        state = self.breaker
        return state is Breaker.CLOSED or (state is Breaker.HALF_OPEN and not self._trials)

    @property
    def weight(self) -> float:
        """The share of requests that it should get, above 0 to 1."""
        if self._limits.slow_start <= 0:
            return 1.0
        return min(max((self._clock() - self._ramp_from) / self._limits.slow_start, _LEAST_WEIGHT), 1.0)

    # Requests: `begin`, then perhaps `answered` and in the end perhaps `succeeded` or `failed`, and `end` always.

    def begin(self, request: object) -> None:
        """Hear that a request is sent there. While the breaker is half open it is a trial."""
        if self.breaker is Breaker.HALF_OPEN:
            self._trials.add(request)

    def end(self, request: object) -> None:
        """Hear that this request is over, in whatever way. Again is no error."""
        self._trials.discard(request)

    def answered(self) -> None:
        """Hear that the worker has begun an answer well: for a trial that is enough, whose answer may take minutes."""
        if self.breaker is not Breaker.HALF_OPEN:
            return
        self._passes += 1
        if self._passes >= self._limits.passes:
            self._opened_at = None
            self._failures = 0
            self._trials.clear()
            self._ramp_from = self._clock()
        else:
            self._trials.clear()  # the next may come while this one still runs

    def succeeded(self) -> None:
        """Hear of a request that the worker answered well to its end."""
        self._failures = 0

    def failed(self) -> None:
        """Hear of one that it did not, through its own fault."""
        state = self.breaker
        self._failures += 1
        # What was sent before it opened and fails now says nothing new.
        if state is Breaker.HALF_OPEN or (state is Breaker.CLOSED and self._failures >= self._limits.failures):
            self._opened_at = self._clock()
            self._passes = 0
            self._trials.clear()
            self.opened += 1

    def probed(self, good: bool) -> None:
        """Hear of a probe."""
        if good:
            self._missed = 0
            self._answered += 1
            if not self.answering and self._answered >= self._limits.probe_passes:
                self.answering = True
                self._ramp_from = self._clock()
        else:
            self._answered = 0
            self._missed += 1
            if self._missed >= self._limits.probe_failures:
                self.answering = False
