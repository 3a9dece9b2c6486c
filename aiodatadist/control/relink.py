"""What `auto_relink=` keeps of a peer, and how long it waits between attempts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from random import Random

    from ..types import ClusterInfo

__all__ = ["Backoff", "Relink"]

FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 15.0
"""Seconds between two attempts, at most: a peer that is back is linked within that."""
STEADY: Final = 10.0
"""Seconds that a link has to last before the pauses begin anew; a peer that dies at each link gets no storm of them."""


class Backoff:
    """Pauses that double up to a limit. Each is shortened by up to a half, at random.

    So the many peers of a node that died do not all come back at the same moment. Nothing is ever given up.
    """

    def __init__(self, chance: Random) -> None:
        self._failures = 0
        self._chance = chance

    def pause(self) -> float:
        """Return how long to wait now, in seconds; longer each time."""
        most = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(self._failures, 64))
        self._failures += 1
        return most * self._chance.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Begin anew."""
        self._failures = 0


class Relink:
    """The wish that a peer is linked again whenever it was lost.

    Attributes
    ----------
    info : ClusterInfo
        Where to.
    attempt : int
        Which attempt to link again is under way, from 1; 0 while there is none.
    """

    def __init__(self, info: ClusterInfo, chance: Random) -> None:
        self.info = info
        self.attempt = 0
        self.backoff = Backoff(chance)
