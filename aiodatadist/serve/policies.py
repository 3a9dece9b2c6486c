"""Which worker gets a request.

Each policy divides by `Health.weight`, so that a new or recovered worker gets its share little by little.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

from aiodatadist.errors import ConfigError

from .prefix_tree import PrefixTree
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
        return random.choices(members, [member.health.weight for member in members])[0]


class RoundRobin:
    """Each in its turn, by the order of their ids, whoever comes and goes."""

    def __init__(self) -> None:
        self._credit: dict[str, float] = {}

    def choose(self, members: Sequence[Member], question: Question) -> Member:
        """See `Policy`."""
        if len(self._credit) > 16 * len(members) + 1024:
            self._credit.clear()  # of workers that have gone
        # Everyone earns its weight; the richest is chosen, and pays for all.
        credit, total = self._credit, 0.0
        for member in members:
            weight = member.health.weight
            credit[member.worker_id] = credit.get(member.worker_id, 0.0) + weight
            total += weight
        chosen = min(members, key=lambda member: (-credit[member.worker_id], member.worker_id))
        credit[chosen.worker_id] -= total
        return chosen


Cost = Callable[[Member, Question], tuple[float, ...]]


def _prefill_cost(member: Member, question: Question) -> tuple[float, ...]:
    """Return the prompt tokens that would be in flight there."""
    return ((member.all_tokens + question.tokens + 1) / member.health.weight,)


def _decode_cost(member: Member, question: Question) -> tuple[float, ...]:
    """Return how full its slots would be; one that seems to have no blocks for the prompt comes behind all others."""
    registration = member.registration
    load = registration.load
    short = load.free_blocks * registration.layout.block_tokens < question.tokens
    full = (member.all_requests + 1) / (max(registration.slots, 1) * member.health.weight)
    return (short, full, -load.free_blocks)


def _cost(role: str) -> Cost:
    return _prefill_cost if role == "prefill" else _decode_cost


def _cheapest(members: Sequence[Member], cost: Callable[[Member], tuple[float, ...]]) -> Member:
    # Equals by lot: several routers would all begin with the same one.
    return min(members, key=lambda member: (*cost(member), random.random()))


class LeastLoad:
    """Who has the least to do: for prefill by tokens in flight, else by requests, slots and free blocks."""

    def __init__(self, role: str) -> None:
        self._cost = _cost(role)

    def choose(self, members: Sequence[Member], question: Question) -> Member:
        """See `Policy`."""
        return _cheapest(members, lambda member: self._cost(member, question))


class PowerOfTwo(LeastLoad):
    """The one of two, drawn by lot, that has less to do: nearly as good as the least, and no herd runs to one."""

    def choose(self, members: Sequence[Member], question: Question) -> Member:
        """See `Policy`."""
        return super().choose(random.sample(members, min(2, len(members))), question)


class Prefix:
    """The least to compute: tokens in flight, and those of the prompt that the worker has not had before.

    So a worker that knows the beginning is preferred for as long as its queue is shorter than what it saves.
    """

    def __init__(self, tree: PrefixTree | None = None) -> None:
        self._tree = PrefixTree() if tree is None else tree

    def choose(self, members: Sequence[Member], question: Question) -> Member:
        """See `Policy`."""
        known = self._tree.match(question.prompt)
        saved = question.tokens / max(len(question.prompt), 1)

        def cost(member: Member) -> tuple[float, ...]:
            rest = question.tokens - known.get(member.worker_id, 0) * saved
            return ((member.all_tokens + rest + 1) / member.health.weight,)

        chosen = _cheapest(members, cost)
        self._tree.put(question.prompt, chosen.worker_id)
        return chosen


POLICIES: Final[dict[str, Callable[[str], Policy]]] = {
    "random": lambda role: Random(),
    "round_robin": lambda role: RoundRobin(),
    "power_of_two": PowerOfTwo,
    "least_load": LeastLoad,
    # A decode worker gets its KV from elsewhere, whatever it has had before.
    "prefix": lambda role: LeastLoad(role) if role == "decode" else Prefix(),
}
"""Makers of policies by name; each takes the role that it will choose workers of."""


def make_policy(name: str, role: str) -> Policy:
    """Return a policy by its name. Raises ConfigError."""
    if name not in POLICIES:
        raise ConfigError(f"{name!r} is no policy; give one of {', '.join(POLICIES)}")
    return POLICIES[name](role)
