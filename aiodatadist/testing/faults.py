"""What can go wrong in a simulated network: the quality of its ways, and scripts of faults."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterable, Sequence
from typing import Any, Final

from ..errors import ArgumentError, ArgumentTypeError

__all__ = ["Fault", "FaultScript", "Way", "check_pair"]

Range = tuple[float, float]

_MICRO: Final = 1e-6


def _check(name: str, value: Any, most: float, *, hint: str | None = None) -> None:
    """Refuse what is no number from 0 to `most`, or not finite."""
    if not isinstance(value, (int, float)):
        raise ArgumentTypeError(f"{name} must be a number, got {value!r}")
    if not (0 <= value <= most and math.isfinite(value)):
        limits = "finite and not negative" if most == math.inf else f"from 0 to {most:g}"
        raise ArgumentError(f"{name}={value!r} must be {limits}", hint=hint)


def check_pair(name: str, pair: Any) -> None:
    """Refuse what are not the least and the most number of seconds."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ArgumentTypeError(f"{name} must be a pair (least, most) of seconds, got {pair!r}")
    for value in pair:
        _check(name, value, math.inf)
    if pair[0] > pair[1]:
        raise ArgumentError(f"{name}={pair!r}: the least is more than the most")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """How messages go from one process to another. Times are seconds; pairs are least and most, drawn for each message.

    Control streams, engine connections and data go the same ways. Streams keep their order, as TCP does: what is lost
    there arrives late, with all that comes after it. Data goes in fragments that may overtake each other.

    Parameters
    ----------
    latency : pair of float
        From sending to arriving.
    bandwidth : float
        Bytes a second; 0: no limit.
    loss : float
        Probability that a message, or a fragment of data, is lost and sent again after `resend`, which doubles each
        time. At most 0.9, or hardly anything would ever arrive.
    resend : float
    duplicate : float
        Probability that a fragment arrives twice.
    reorder : float
        Probability that a fragment is late by up to `reorder_by`.
    reorder_by : float
    visible : pair of float
        From the arrival of a fragment until its bytes are in memory.
    split : float
        Probability that what a stream sends arrives in two parts: a partial write.
    fragment : int
        Bytes of a fragment of data, at most.
    blocked : bool
        Nothing arrives until the way is open again. Nothing is lost.
    """

    latency: Range = (50 * _MICRO, 100 * _MICRO)
    bandwidth: float = 0.0
    loss: float = 0.0
    resend: float = 0.2
    duplicate: float = 0.0
    reorder: float = 0.0
    reorder_by: float = 1e-3
    visible: Range = (0.0, 0.0)
    split: float = 0.0
    fragment: int = 65536
    blocked: bool = False

    def __post_init__(self) -> None:
        check_pair("latency", self.latency)
        check_pair("visible", self.visible)
        for name in ("bandwidth", "resend", "reorder_by"):
            _check(name, getattr(self, name), math.inf)
        for name in ("duplicate", "reorder", "split"):
            _check(name, getattr(self, name), 1.0)
        _check("loss", self.loss, 0.9, hint="a way on which nothing arrives is blocked=True")
        _check("fragment", self.fragment, math.inf)
        if self.fragment < 1 or self.fragment != int(self.fragment):
            raise ArgumentError(f"fragment={self.fragment!r} must be a whole number of bytes, at least 1")

    def replace(self, **changes: Any) -> Way:
        """Return a way that differs in these fields."""
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True)
class Fault:
    """One thing that happens at a time.

    Attributes
    ----------
    at : float
        Seconds from the start of the script.
    name : str
        A method of `SimCluster`: ``crash``, ``restart``, ``stop``, ``resume``, ``block``, ``unblock``, ``cut``,
        ``heal`` or ``stall``.
    args : tuple
        Its arguments: cluster ids and numbers.
    """

    at: float
    name: str
    args: tuple[Any, ...] = ()


class FaultScript:
    """Faults in the order of their times. Can be saved with a trace, and made from a seed.

    Parameters
    ----------
    faults : iterable of Fault
    """

    NAMES: Final = ("crash", "restart", "stop", "resume", "block", "unblock", "cut", "heal", "stall")

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self.faults = sorted(faults, key=lambda fault: fault.at)
        for fault in self.faults:
            if fault.name not in self.NAMES:
                raise ValueError(f"a fault called {fault.name!r} is none of {', '.join(self.NAMES)}")

    def __repr__(self) -> str:
        return f"FaultScript({self.faults!r})"

    @classmethod
    def random(cls, chance: random.Random, processes: Sequence[int], *, seconds: float, faults: int = 3) -> FaultScript:
        """Draw stalls, stops and cuts that all end by themselves, within `seconds`.

        Parameters
        ----------
        chance : random.Random
        processes : sequence of int
            Cluster ids.
        seconds : float
        faults : int
        """
        if not processes:
            raise ArgumentError("processes must name one cluster id at least, got none")
        drawn = []
        for _ in range(faults):
            at, length = chance.uniform(0, seconds), chance.uniform(0, seconds / 2)
            one, other = chance.sample(list(processes), 2) if len(processes) > 1 else (processes[0],) * 2
            name = chance.choice(("stall", "stop", "cut"))
            if name == "stall":
                drawn.append(Fault(at, "stall", (one, other, length)))
            elif name == "stop":
                drawn += [Fault(at, "stop", (one,)), Fault(at + length, "resume", (one,))]
            else:
                drawn.append(Fault(at, "cut", (one, other)))
        return cls(drawn)

    def as_list(self) -> list[list[Any]]:
        """Return plain values, to save."""
        return [[fault.at, fault.name, list(fault.args)] for fault in self.faults]

    @classmethod
    def from_list(cls, values: Iterable[Sequence[Any]]) -> FaultScript:
        """Return the script of what `as_list` gave."""
        return cls(Fault(float(at), str(name), tuple(args)) for at, name, args in values)
