"""Which worker gets a request: loads, shares, prefixes."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("aiohttp", reason="serving needs aiohttp")

from aiodatadist.serve.config import HealthLimits
from aiodatadist.serve.policies import POLICIES, Prefix, Question, make_policy
from aiodatadist.serve.prefix_tree import PIECE, PrefixTree
from aiodatadist.serve.protocol import Load
from aiodatadist.serve.registry import Member, Registry

from .test_serve_parts import registration

QUESTION = Question(b"x" * 100, 100)


def members(*ids: str, role: str = "prefill") -> list[Member]:
    registry = Registry()
    return [registry.put(registration(each, role)) for each in ids]


def shares(name: str, among: list[Member], rounds: int = 3000) -> dict[str, float]:
    policy = make_policy(name, "prefill")
    counts = Counter(policy.choose(among, QUESTION).worker_id for _ in range(rounds))
    return {member.worker_id: counts[member.worker_id] / rounds for member in among}


def test_least_load_counts_tokens_for_prefill_and_requests_for_decode() -> None:
    a, b = members("a", "b")
    leases = [a.take(10) for _ in range(5)]
    long = b.take(1000)
    assert make_policy("least_load", "prefill").choose([a, b], QUESTION) is a
    roomy = [registration(each, "decode", load=Load(free_blocks=99, num_blocks=99)) for each in "ab"]
    for member, said in zip((a, b), roomy, strict=True):
        member.registration = said
    assert make_policy("least_load", "decode").choose([a, b], QUESTION) is b
    a.registration = registration("a", "decode", load=Load(free_blocks=1, num_blocks=99))
    for lease in leases:
        lease.release()
    assert make_policy("least_load", "decode").choose([a, b], QUESTION) is b  # the prompt does not fit into a
    long.release()


def test_what_others_have_given_counts_and_what_is_ours_counts_once() -> None:
    registry = Registry()
    member = registry.put(registration("a"))
    lease = member.take(100)
    registry.put(registration("a", load=Load(tokens=150, running=1, waiting=2)))
    assert (member.all_tokens, member.all_requests) == (150, 3)
    lease.release()
    registry.put(registration("a"))
    assert (member.all_tokens, member.all_requests) == (0, 0)


def test_power_of_two_never_takes_the_busiest() -> None:
    among = members("a", "b", "c")
    lease = among[0].take(10_000)
    found = shares("power_of_two", among)
    assert found["a"] == 0
    assert 0.4 < found["b"] < 0.6
    lease.release()


@pytest.mark.parametrize("name", ["random", "round_robin"])
def test_a_new_worker_gets_its_share_little_by_little(name: str) -> None:
    now = [0.0]
    registry = Registry(HealthLimits(slow_start=10), clock=lambda: now[0])
    old = registry.put(registration("a"))
    now[0] = 100.0
    new = registry.put(registration("b"))
    found = []
    for age in (0, 5, 10):
        now[0] = 100.0 + age
        found.append(shares(name, [old, new])["b"])
    for got, wanted in zip(found, (0.1 / 1.1, 0.5 / 1.5, 0.5), strict=True):
        assert abs(got - wanted) < 0.05


def test_least_load_spares_a_new_worker() -> None:
    now = [0.0]
    registry = Registry(HealthLimits(slow_start=10), clock=lambda: now[0])
    old = registry.put(registration("a"))
    now[0] = 100.0
    new = registry.put(registration("b"))
    lease = old.take(50)
    policy = make_policy("least_load", "prefill")
    assert policy.choose([old, new], QUESTION) is old
    now[0] = 110.0
    assert policy.choose([old, new], QUESTION) is new
    lease.release()


# Prefixes. --------------------------------------------------------------------------------------------------


def text(*pieces: str) -> bytes:
    return b"".join(piece.encode() * PIECE for piece in pieces)


def test_a_prompt_goes_where_its_beginning_is_until_that_worker_is_too_busy() -> None:
    among = members("a", "b", "c")
    policy = Prefix()
    prompt = text("p", "q", "r", "s")
    first = policy.choose(among, Question(prompt, len(prompt)))
    longer = Question(prompt + text("t"), 5 * PIECE)
    assert all(policy.choose(among, longer) is first for _ in range(20))
    # As busy as the beginning saves is one token short of too busy.
    lease = first.take(5 * PIECE + 1)
    assert policy.choose(among, longer) is not first
    lease.release()


def test_the_tree_knows_common_beginnings_and_no_more() -> None:
    tree = PrefixTree()
    tree.put(text("a", "b", "c"), "one")
    tree.put(text("a", "x"), "two")
    assert tree.match(text("a", "b", "z")) == {"one": 2 * PIECE, "two": PIECE}
    assert tree.match(text("b", "c")) == {}
    assert tree.match(text("a")[:-1]) == {}


def test_the_tree_forgets_what_is_old_and_stays_small() -> None:
    now = [0.0]
    tree = PrefixTree(most_nodes=4, idle=10, clock=lambda: now[0])
    tree.put(text("a", "b"), "one")
    now[0] = 9.0
    tree.put(text("a", "c"), "one")
    now[0] = 11.0
    assert tree.match(text("a", "b")) == {"one": PIECE}  # its end was not asked for again
    tree.put(text("d", "e", "f", "g"), "two")
    assert len(tree) == 4
    assert tree.match(text("d", "e", "f", "g")) == {"two": 4 * PIECE}
    for each in range(200):
        tree.put(text("h"), str(each))
    assert len(tree.match(text("h"))) == 64


def test_decode_workers_are_not_chosen_by_prefix() -> None:
    assert not isinstance(POLICIES["prefix"]("decode"), Prefix)
    assert isinstance(POLICIES["prefix"]("mixed"), Prefix)
