"""Random rounds in the simulated cluster, and the proof that they notice when a rule is left out."""

from __future__ import annotations

import itertools

import pytest

from aiodatadist.testing import SimulationStuck

from . import sim_rounds
from .conftest import Scale
from .quiet import Broken


@pytest.mark.parametrize("part", range(5))
def test_no_round_breaks_a_rule(part: int, scale: Scale) -> None:
    count = scale(40)
    tally = sim_rounds.play_all(range(part * count, (part + 1) * count))
    assert tally.rounds == count
    assert tally.ends["ok"] > count // 4, str(tally)


def broken(seed: int, rule: str) -> str | None:
    """Play a round without a rule, and return what it broke. The address of the memory is no part of that."""
    try:
        sim_rounds.play(seed, left_out=(rule,))
    except Broken as why:
        return str(why).split(" address=")[0]
    except SimulationStuck:
        pass  # noticed as well, but not by the shadow
    return None


@pytest.mark.parametrize("rule", ["drain", "epoch", "fence", "key"])
def test_a_rule_that_is_left_out_is_noticed(rule: str) -> None:
    """Without the wait for what is posted, the check of old requests, fences, or keys of memory, some round breaks.

    Which, changes with the code; with the rule the same round breaks nothing, and without it the same thing each time.
    """
    seed, said = next((seed, said) for seed in itertools.count() if (said := broken(seed, rule)) is not None)
    assert f"seed {seed}:" in said
    assert broken(seed, rule) == said
    assert sim_rounds.play(seed).rounds == 1
