"""Which worker gets a request.

Not built yet, and belongs here: ``power_of_two``, ``least_load`` (tokens in flight for prefill; requests and free
blocks for decode) and ``prefix`` (routing history; its tree in a file of its own). A policy may divide a load by
`Health.weight`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

from aiodatadist.errors import ConfigError

from .registry import Member

__all__ = ["POLICIES", "Policy", "Question", "make_policy"]


class Question(NamedTuple):
    """What a policy may know of a request.

    Attributes
    ----------
    prompt : bytes
        A text or tokens that begin alike where prompts begin alike.
    tokens : int
        Of the prompt, estimated.
    """

    prompt: bytes
    tokens: int


class Policy(Protocol):
    """Chooses; it counts nothing itself, because members know their load."""

    def choose(self, members: Sequence[Member], question: Question) -> Member:
        """Return one of the members, of which there is at least one."""


class Random:
    """Any."""

    def choose(self, members: Sequence[Member], question: Question) -> Member:
        """See `Policy`."""
        return random.choice(members)


class RoundRobin:
    """Each in its turn, by the order of their ids, whoever comes and goes."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, members: Sequence[Member], question: Question) -> Member:
        """See `Policy`."""
        ordered = sorted(members, key=lambda member: member.worker_id)
        chosen = next((member for member in ordered if member.worker_id > self._last), ordered[0])
        self._last = chosen.worker_id
        return chosen


POLICIES: Final[dict[str, Callable[[str], Policy]]] = {
    "random": lambda role: Random(),
    "round_robin": lambda role: RoundRobin(),
}
"""Makers of policies by name; each takes the role that it will choose workers of."""


def make_policy(name: str, role: str) -> Policy:
    """Return a policy by its name. Raises ConfigError."""
    if name not in POLICIES:
        raise ConfigError(f"{name!r} is no policy; give one of {', '.join(POLICIES)}")
    return POLICIES[name](role)
