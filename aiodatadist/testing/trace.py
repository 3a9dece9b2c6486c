"""What happened in a simulation, in order: to compare two runs, to save one, and to replay it."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Self

__all__ = ["ReplayDiverged", "Trace"]


class ReplayDiverged(AssertionError):
    """A replay does something else than the run that was saved."""


class Trace:
    """The events of one simulation: each a tuple of plain values that begins with its time in ns and its kind.

    Parameters
    ----------
    seed : int
    script : list, optional
        The fault script, as `FaultScript.as_list` gives it.
    expected : Trace, optional
        A saved one. Each event is compared with it as it happens, as far as it goes.

    Attributes
    ----------
    events : list of tuple
    diverged : bool
        Whether the saved run did something else.
    """

    def __init__(self, seed: int, script: list[Any] | None = None, expected: Trace | None = None) -> None:
        self.seed = seed
        self.script = script
        self.events: list[tuple[Any, ...]] = []
        self.diverged = False
        self._expected = expected

    def add(self, *event: Any) -> None:
        """Note an event. Raises `ReplayDiverged` if the saved run did something else; what comes then is not noted."""
        if self.diverged:
            return
        if self._expected is not None:
            number = len(self.events)
            # What comes after the end of what was saved is not compared: a test that failed was saved there.
            if number < len(self._expected.events) and (then := self._expected.events[number]) != event:
                self.diverged = True
                raise ReplayDiverged(f"event {number} was {then} and is now {event}")
        self.events.append(event)

    @property
    def hash(self) -> str:
        """A digest of all events: equal for equal runs, on every machine."""
        digest = hashlib.blake2b(digest_size=16)
        for event in self.events:
            digest.update(repr(event).encode())
        return digest.hexdigest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a JSON file."""
        text = {"seed": self.seed, "script": self.script, "hash": self.hash, "events": self.events}
        Path(path).write_text(json.dumps(text, separators=(",", ":")))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote.

        Raises
        ------
        ValueError
            The file was changed, or is none.
        """
        read = json.loads(Path(path).read_text())
        trace = cls(read["seed"], read["script"])
        trace.events = [tuple(event) for event in read["events"]]
        if trace.hash != read["hash"]:
            raise ValueError(f"{os.fspath(path)} does not hold what its hash says")
        return trace
