"""The workers that a router knows, and how much it has given each to do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from aiodatadist.observe import get_logger

from .config import DEFAULT_LIMITS, HealthLimits
from .errors import ServeError
from .health import Health
from .protocol import ROLES, Deregistration, Registration

__all__ = ["LoadLease", "Member", "Registry", "fits"]

_log = get_logger().bind(part="serve")


class Member:
    """A worker, as the router sees it.

    Attributes
    ----------
    registration : Registration
        The last heartbeat.
    health : Health
    requests, tokens : int
        In flight there, of this router's requests: their number, and the tokens of their prompts.
    all_requests, all_tokens : int
        The same with what others have given it, as far as its last heartbeat tells.
    draining : bool
        It gets no new requests.
    drain_since : float or None
        When this router was told so.
    """

    def __init__(self, registration: Registration, now: float, health: Health) -> None:
        self.health = health
        self.requests = 0
        self.tokens = 0
        self.drain_since: float | None = None
        self._others_requests = 0
        self._others_tokens = 0
        self.hear(registration, now)

    def hear(self, registration: Registration, now: float) -> None:
        """Hear a heartbeat."""
        self.registration = registration
        self.seen = now
        load = registration.load
        self._others_requests = max(load.running + load.waiting - self.requests, 0)
        self._others_tokens = max(load.tokens - self.tokens, 0)

    @property
    def all_requests(self) -> int:
        """See above."""
        return self.requests + self._others_requests

    @property
    def all_tokens(self) -> int:
        """See above."""
        return self.tokens + self._others_tokens

    @property
    def worker_id(self) -> str:
        """Its id."""
        return self.registration.worker_id

    @property
    def url(self) -> str:
        """Where its HTTP listens."""
        return self.registration.url

    @property
    def draining(self) -> bool:
        """Whether it or somebody else has said so."""
        return self.drain_since is not None or self.registration.draining

    def take(self, tokens: int) -> LoadLease:
        """Count a request in, until the lease is released."""
        return LoadLease(self, tokens)


class LoadLease:
    """One request's share of a worker's load."""

    def __init__(self, member: Member, tokens: int) -> None:
        self.member = member
        self._tokens = tokens
        self._held = True
        member.requests += 1
        member.tokens += tokens
        member.health.begin(self)

    def release(self) -> None:
        """Count it out. Again is no error."""
        if self._held:
            self._held = False
            self.member.requests -= 1
            self.member.tokens -= self._tokens
            self.member.health.end(self)


def fits(prefill: Registration, decode: Registration, mode: str) -> bool:
    """Tell if KV of one can go to the other: refused here, not in the middle of a transfer."""
    return (
        prefill.model_hash == decode.model_hash
        and prefill.layout == decode.layout
        and mode in prefill.modes
        and mode in decode.modes
        and not set(prefill.transports).isdisjoint(decode.transports)
    )


class Registry:
    """Workers by id.

    Parameters
    ----------
    limits : HealthLimits, optional
    clock : callable, optional
        Seconds, for tests.
    """

    def __init__(self, limits: HealthLimits = DEFAULT_LIMITS, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._limits = limits
        self._born = clock()
        self._members: dict[str, Member] = {}

    def knows(self, worker_id: str, incarnation: str) -> bool:
        """Tell if this very process is registered."""
        member = self._members.get(worker_id)
        return member is not None and member.registration.incarnation == incarnation

    def put(self, registration: Registration) -> Member:
        """Hear a heartbeat.

        Raises
        ------
        ServeError
            ``registration_refused``: it says what cannot be.
        """
        _check(registration)
        now = self._clock()
        if self.knows(registration.worker_id, registration.incarnation):
            member = self._members[registration.worker_id]
            member.hear(registration, now)
            return member
        # Those that a router finds when it starts were there before it, or are all new: none of them is slowed down.
        warm = now - self._born < self._limits.slow_start
        health = Health(self._limits, warm=warm, clock=self._clock)
        member = self._members[registration.worker_id] = Member(registration, now, health)
        _log.info("worker registered", worker=registration.worker_id, role=registration.role, url=registration.url)
        return member

    def remove(self, farewell: Deregistration) -> bool:
        """Forget a worker, unless another process has its id by now."""
        if not self.knows(farewell.worker_id, farewell.incarnation):
            return False
        del self._members[farewell.worker_id]
        _log.info("worker left", worker=farewell.worker_id)
        return True

    def sweep(self) -> list[Member]:
        """Forget the workers that have been silent for their TTL, and return them."""
        now = self._clock()
        gone = [m for m in self._members.values() if now - m.seen > m.registration.ttl_s]
        for member in gone:
            del self._members[member.worker_id]
            _log.warning("worker lost", worker=member.worker_id, silent_s=round(now - member.seen, 1))
        return gone

    def overdue(self) -> list[Member]:
        """Return the workers that were told to drain and have not done so in time."""
        latest = self._clock() - self._limits.drain
        return [
            member
            for member in self._members.values()
            if member.requests and member.drain_since is not None and member.drain_since <= latest
        ]

    def members(self, role: str | None = None, model: str | None = None) -> list[Member]:
        """Return the workers of a role and a model, those that drain included."""
        return [
            member
            for member in self._members.values()
            if role in (None, member.registration.role) and model in (None, member.registration.model)
        ]

    def usable(self, role: str, model: str | None = None, avoid: Iterable[str] = ()) -> list[Member]:
        """Return those that may be given requests, but for the ids `avoid`."""
        left_out = set(avoid)
        return [
            member
            for member in self.members(role, model)
            if member.health.usable and not member.draining and member.worker_id not in left_out
        ]

    def find(self, worker_id: str) -> Member | None:
        """Return a worker by its id."""
        return self._members.get(worker_id)


def _check(registration: Registration) -> None:
    if registration.role not in ROLES:
        raise ServeError("registration_refused", f"role {registration.role!r} is none of {', '.join(ROLES)}")
    if not registration.url.startswith(("http://", "https://")):
        raise ServeError("registration_refused", f"url {registration.url!r} is no URL")
    if registration.role != "mixed":
        if registration.peer is None or not registration.peer.listen:
            raise ServeError("registration_refused", f"a {registration.role} worker has to say where to link it")
        if not registration.transports or not registration.modes:
            raise ServeError("registration_refused", f"a {registration.role} worker needs transports and modes")
    if not 0.1 <= registration.ttl_s <= 3600:
        raise ServeError("registration_refused", f"ttl_s is {registration.ttl_s}; give 0.1 to 3600")
