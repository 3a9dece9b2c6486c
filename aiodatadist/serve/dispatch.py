"""Chooses workers for a request, and tries again elsewhere while the client has not seen a byte."""

from __future__ import annotations

import random
import secrets
from typing import Final

import msgspec

from aiodatadist.observe import get_logger

from .config import RouterConfig
from .errors import Retry, ServeError
from .flows import Flow, MixedFlow, Pair, PullFlow, PushFlow
from .legs import Legs, Upstream
from .metrics import RouterMetrics
from .policies import Question, make_policy
from .protocol import DECODE_HEADER, MODE_HEADER, PREFILL_HEADER, Generation
from .registry import Member, Registry, fits

__all__ = ["Dispatcher"]

_log = get_logger().bind(part="serve")

_RETRY_SHARE: Final = 0.1
_RETRIES_AT_ONCE: Final = 10.0


class _Budget:
    """Retries of all requests together: a share of the traffic, so that they cannot multiply a fault."""

    def __init__(self) -> None:
        self._left = _RETRIES_AT_ONCE

    def earn(self) -> None:
        self._left = min(self._left + _RETRY_SHARE, _RETRIES_AT_ONCE)

    def spend(self) -> bool:
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Attempts:
    """One request's attempts; a `flows.Call`."""

    def __init__(self, dispatcher: Dispatcher, generation: Generation, number: int) -> None:
        self._dispatcher = dispatcher
        self.generation = generation
        self.number = number
        self.question = _question(generation)
        self.tokens = self.question.tokens
        self.avoid: set[str] = set()
        self.suspects: set[str] = set()
        self.mode = ""
        self._left = dispatcher.config.retries

    def may_retry(self, why: ServeError) -> bool:
        """Spend an attempt, if there is one."""
        if self._left == 0 or not self._dispatcher.budget.spend():
            return False
        self._left -= 1
        self._dispatcher.metrics.retried(why.code)
        _log.info("trying again", request_id=self.generation.request_id, reason=f"{why.code}: {why}")
        return True

    def other_decode(self, prefill: Member, why: ServeError, failed: Member) -> Member | None:
        """See `flows.Call`."""
        self.avoid.add(failed.worker_id)
        left = self._dispatcher.decodes(prefill, self.mode, self.avoid)
        if not left or not self.may_retry(why):
            return None
        return self._dispatcher.decode_policy.choose(left, self.question)


class Dispatcher:
    """Brings requests to workers.

    Parameters
    ----------
    config : RouterConfig
    registry : Registry
    legs : Legs
    metrics : RouterMetrics
    """

    def __init__(self, config: RouterConfig, registry: Registry, legs: Legs, metrics: RouterMetrics) -> None:
        self.config = config
        self.registry = registry
        self.metrics = metrics
        self.budget = _Budget()
        self.prefill_policy = make_policy(config.prefill_policy, "prefill")
        self.decode_policy = make_policy(config.decode_policy, "decode")
        self._mixed_policy = make_policy(config.mixed_policy, "mixed")
        flows: dict[str, Flow] = {
            "pull": PullFlow(legs, config.timeouts),
            "push": PushFlow(legs, config.timeouts),
        }
        self._flows = flows
        self._modes: list[str] = []
        self._mixed = MixedFlow(legs, config.timeouts)

    def ready(self) -> bool:
        """Tell if there is somebody who can serve a request."""
        return bool(self.registry.usable("mixed")) or any(
            self.decodes(prefill, mode) for mode in self.config.modes for prefill in self.registry.usable("prefill")
        )

    def decodes(self, prefill: Member, mode: str, avoid: set[str] | None = None) -> list[Member]:
        """Return the decode workers that can take over from a prefill worker."""
        return [
            member
            for member in self.registry.usable("decode", prefill.registration.model, avoid or ())
            if fits(prefill.registration, member.registration, mode)
        ]

    async def open(self, generation: Generation, *, first_attempt: int = 0, suspect: str = "") -> Upstream:
        """Have a request served; returns with the first bytes of its answer. Raises ServeError.

        Pairs are preferred; a mixed worker serves where there is no pair. Workers tell attempts apart by their
        numbers, which count up from `first_attempt`. The worker `suspect` gets it only if there is no other.
        """
        self._check_model(generation.model)
        self.budget.earn()
        attempts = Attempts(self, generation, first_attempt)
        attempts.suspects.add(suspect)
        last: ServeError | None = None
        while True:
            mode = self._next_mode()
            chosen = self._choose(attempts, mode, attempts.avoid | attempts.suspects) or self._choose(
                attempts, mode, attempts.avoid
            )
            if chosen is None:
                raise last or ServeError("no_workers", "no pair of prefill and decode workers, and no mixed worker")
            try:
                if not isinstance(chosen, Pair):
                    return await self._mixed.open(attempts, chosen)
                upstream = await self._flows[attempts.mode].open(attempts, chosen)
                upstream.route = {
                    MODE_HEADER: attempts.mode,
                    PREFILL_HEADER: chosen.prefill.url,
                    DECODE_HEADER: upstream.member.url,
                }
                return upstream
            except ServeError as why:
                last = why
                if why.retry is Retry.NEVER or not attempts.may_retry(why):
                    raise
                attempts.number += 1
                # The other half of the pair may be tried again; so may this one, if nothing says it was its fault.
                (attempts.avoid if why.at_fault or why.retry_after else attempts.suspects).add(why.worker_id)

    async def open_again(self, generation: Generation, suspect: str = "") -> Upstream:
        """Begin a request that may have been begun before, and may still be under way somewhere. See `open`."""
        # No other run of this request has such numbers.
        return await self.open(generation, first_attempt=secrets.randbits(48), suspect=suspect)

    def _next_mode(self) -> str:
        """Return the hand-over of the next attempt: all come equally often, and at no beat.

        Workers that take turns, too, would else get one mode each.
        """
        if not self._modes:
            self._modes = random.sample(self.config.modes, len(self.config.modes))
        return self._modes.pop()

    def _choose(self, attempts: Attempts, mode: str, avoid: set[str]) -> Pair | Member | None:
        """Return a pair for this hand-over, or another one where there is none; else a mixed worker."""
        model, question = attempts.generation.model, attempts.question
        for attempts.mode in sorted(self.config.modes, key=lambda each: each != mode):
            halves = {
                member.worker_id: self.decodes(member, attempts.mode, avoid)
                for member in self.registry.usable("prefill", model, avoid)
            }
            prefills = [member for member in self.registry.usable("prefill", model, avoid) if halves[member.worker_id]]
            if prefills:
                prefill = self.prefill_policy.choose(prefills, question)
                return Pair(prefill, self.decode_policy.choose(halves[prefill.worker_id], question))
        mixed = self.registry.usable("mixed", model, avoid)
        return self._mixed_policy.choose(mixed, question) if mixed else None

    def _check_model(self, name: str) -> None:
        known = {member.registration.model for member in self.registry.members()}
        if known and name not in known:
            there = ", ".join(map(repr, sorted(known)))
            raise ServeError("model_not_found", f"model {name!r} is not here; there is {there}", param="model")


def _question(generation: Generation) -> Question:
    prompt = generation.prompt
    if prompt is None:
        prompt = "\n".join(f"{role}\n{text}" for role, text in generation.turns)
    if isinstance(prompt, str):
        return Question(prompt.encode(), len(prompt))
    return Question(msgspec.json.encode(prompt)[:-1], len(prompt))
