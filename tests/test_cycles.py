"""Ten thousand times, in `.ci/soak`; here fewer: what opens and closes, and what fails, leaves nothing."""

from __future__ import annotations

import itertools
import os

import pytest

from . import cycles
from .conftest import Scale
from .quiet import PATHS, Broken

# Every path, every end: after these, caches and threads are there that stay.
WARM_UP = 24


@pytest.mark.loop
@pytest.mark.sanitize
@pytest.mark.hang_limit(300)
async def test_s3_opening_and_closing_with_transfers_under_way_leaves_nothing(scale: Scale) -> None:
    await cycles.open_and_close_all(range(WARM_UP))
    watch = cycles.Watch()
    assert watch.before.threads == 0
    rounds = scale(120, least=12)
    tally = await cycles.open_and_close_all(range(WARM_UP, WARM_UP + rounds))
    # Until one was closed in the middle of a transfer.
    for seed in itertools.count(WARM_UP + rounds):
        if tally.midway:
            break
        tally += await cycles.open_and_close(seed)
    await watch.check(tally.rounds)


@pytest.mark.sanitize
@pytest.mark.parametrize("path", PATHS)
async def test_failing_leaves_nothing(path: str, scale: Scale) -> None:
    async with cycles.failing_pair(path) as failing:
        await cycles.fail_all(failing, range(4 * WARM_UP))
        watch = cycles.Watch()
        tally = await cycles.fail_all(failing, range(1000, 1000 + scale(300, least=20)))
        await watch.check(tally.rounds)
        assert tally.ends["failed"] > 0


def test_every_failure_is_one_of_those_that_are_tried() -> None:
    tried = {name for name, value in vars(cycles.Failing).items() if callable(value) and not name.startswith("_")}
    assert tried - {"set_up"} == set(cycles.EXPECTED)


@pytest.mark.keeps_native
async def test_the_watch_finds_what_was_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cycles, "PATIENCE", 0.1)
    watch = cycles.Watch()
    kept = os.open("/dev/null", os.O_RDONLY)
    with pytest.raises(Broken, match="fds grew in 1 rounds"):
        await watch.check(1)
    os.close(kept)
    await watch.check(1)
    hoard = [[number] for number in range(100_000)]
    with pytest.raises(Broken, match=r"objects.* grew"):
        await watch.check(1)
    del hoard
    await watch.check(1)
