"""Random geometries, block lists and ranges of tensors, over every path, verbs among them, against numpy."""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodatadist import _core
from aiodatadist.errors import BlockIndexError, CacheMismatch

from .engine_rig import CASES, OK, PATHS, Geometry, Rig, rig

READ, WRITE = _core.READ, _core.WRITE


class Case(NamedTuple):
    here: Geometry
    there: Geometry
    opcode: int
    local: list[int]
    remote: list[int]
    which: tuple[int, int, int]
    inline: bool
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    # Sizes around those at which copies, vectors and batches change their ways.
    size = draw(st.one_of(st.integers(1, 70), st.sampled_from([511, 512, 513, 4095, 4096, 4097, 16384, 70_001])))
    geometries = []
    for _ in range(2):
        gap = draw(st.sampled_from([0, 0, 0, 1, 3, 64, size]))
        geometries.append((draw(st.integers(1, 4)), draw(st.integers(1, 40)), size, size + gap))
    here, there = geometries
    opcode = draw(st.sampled_from([READ, WRITE]))
    destination, source = (here, there) if opcode == READ else (there, here)
    to = draw(st.lists(st.integers(0, destination[1] - 1), unique=True, max_size=destination[1]))
    if draw(st.booleans()):
        to.sort()  # neighbours, which merge
    start = draw(st.integers(0, source[1] - 1))
    if draw(st.booleans()) and start + len(to) <= source[1]:
        of = list(range(start, start + len(to)))
    else:
        of = draw(st.lists(st.integers(0, source[1] - 1), min_size=len(to), max_size=len(to)))
    local, remote = (to, of) if opcode == READ else (of, to)
    count = draw(st.integers(0, min(here[0], there[0])))
    first, second = draw(st.integers(0, here[0] - count)), draw(st.integers(0, there[0] - count))
    return Case(
        here, there, opcode, local, remote, (first, second, count), draw(st.booleans()), draw(st.integers(0, 99))
    )


def apply(case: Case, mine: list[np.ndarray], theirs: list[np.ndarray]) -> None:  # type: ignore[type-arg]
    """Do with numpy what the transfer has to do."""
    first, second, count = case.which
    size = case.here[2]
    for t in range(count):
        for a, b in zip(case.local, case.remote, strict=True):
            left = mine[first + t][a * case.here[3] :][:size]
            right = theirs[second + t][b * case.there[3] :][:size]
            if case.opcode == READ:
                left[:] = right
            else:
                right[:] = left


def run_case(r: Rig, case: Case) -> None:
    here, there = r.tensors(case.here, owner=False, seed=case.seed), r.tensors(case.there, seed=case.seed + 1)
    mine, theirs = here.copy(), there.copy()
    local = r.user.register(here)
    shown, remote = r.cache(there)
    pair = _core.Pair(local, remote, (here, there))
    apply(case, mine, theirs)
    call = r.move(pair, case.opcode, case.local, case.remote, tensors=case.which, inline=case.inline)
    assert (call.status, call.done) == (OK, len(case.local) * case.here[2] * case.which[2])
    for got, want in zip(here.raw + there.raw, mine + theirs, strict=True):
        np.testing.assert_array_equal(got, want)
    remote.release()
    shown.close()
    local.close()
    r.run(lambda: r.owner.seen(_core.EVENT_CACHE_QUIET, shown.id) and r.user.seen(_core.EVENT_CACHE_QUIET, local.id))


@pytest.mark.parametrize(("path", "mode"), [case for case in CASES if case[0] != "tcp-short"])
def test_against_numpy(path: str, mode: str) -> None:
    with rig(path, mode, inline_bytes=20_000) as r:

        @settings(max_examples=max(5, settings.default.max_examples // 2))
        @given(cases())
        def check(case: Case) -> None:
            run_case(r, case)

        check()


@settings(max_examples=max(5, settings.default.max_examples))
@given(
    st.lists(st.integers(-3, 40), max_size=12),
    st.lists(st.integers(-3, 40), max_size=12),
    st.sampled_from([READ, WRITE]),
    st.tuples(*[st.sampled_from([0, 1, 2, 3, 4, 2**31, 2**32 - 1])] * 3),
    st.booleans(),
)
def test_what_numpy_would_refuse_is_refused(
    local: list[int], remote: list[int], opcode: int, which: tuple[int, int, int], inline: bool
) -> None:
    """Exactly the right calls are taken, and a refused one changes nothing."""
    with rig("shm-mapped", "step", inline_bytes=20_000) as r:
        here, there = r.tensors((2, 30, 16, 24), owner=False, seed=1), r.tensors((3, 20, 16, 16), seed=2)
        pair = r.pair(here, there)
        before = here.copy() + there.copy()
        first, second, count = which
        ranges = first + count <= 2 and second + count <= 3
        target = local if opcode == READ else remote
        blocks = (
            len(local) == len(remote)
            and all(0 <= i < 30 for i in local)
            and all(0 <= i < 20 for i in remote)
            and len(set(target)) == len(target)
        )
        if ranges and blocks:
            assert r.move(pair, opcode, local, remote, tensors=which, inline=inline).status == OK
            return
        with pytest.raises((BlockIndexError, CacheMismatch)) as caught:
            r.start(pair, opcode, local, remote, tensors=which, inline=inline)
        if blocks:
            assert caught.type is CacheMismatch
        for got, want in zip(here.raw + there.raw, before, strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.sanitize
@pytest.mark.seeds(3)
def test_many_at_once(seed: int) -> None:
    """Random transfers side by side on disjoint caches, on all paths at once, each checked at its end."""
    rng = random.Random(seed)
    rigs = [Rig(path) for path in PATHS]
    try:
        running = []
        for r in rigs:
            for _ in range(6):
                size = rng.choice([1, 100, 4096, 70_000])
                blocks = rng.randrange(1, 60)
                here = r.tensors((2, blocks, size, size + rng.choice([0, 5])), owner=False, seed=rng.randrange(99))
                there = r.tensors((2, blocks, size, size + rng.choice([0, 5])), seed=rng.randrange(99))
                pair = r.pair(here, there)
                n = rng.randrange(blocks + 1)
                case = Case(
                    here.geometry,
                    there.geometry,
                    rng.choice([READ, WRITE]),
                    rng.sample(range(blocks), n),
                    rng.sample(range(blocks), n),
                    (0, 0, 2),
                    False,
                    0,
                )
                mine, theirs = here.copy(), there.copy()
                apply(case, mine, theirs)
                call = r.start(pair, case.opcode, case.local, case.remote)
                running.append((call, here, there, mine + theirs))
        while not all(call.ended for call, *_ in running):
            for r in rigs:
                r.turn(0.001)
        for call, here, there, want in running:
            assert call.status == OK
            for got, expected in zip(here.raw + there.raw, want, strict=True):
                np.testing.assert_array_equal(got, expected)
    finally:
        for r in rigs:
            r.close()
