"""Layer-wise transfers of every kind give what numpy gives, and whatever ends them leaves the rest alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodatadist.control import table, wire
from aiodatadist.control.table import wire_geometry
from aiodatadist.errors import CacheNotFound, ProtocolError
from aiodatadist.types import Geometry

from . import layer_rounds
from .hixl_standin import HIXL
from .quiet import PATHS


@pytest.mark.loop
@pytest.mark.sanitize
@pytest.mark.parametrize("drain_timeout", [1.0, 0.0])
@pytest.mark.parametrize("path", [*PATHS, HIXL])
async def test_u1_u6_layers_equal_numpy_and_memory_is_quiet(
    path: str, drain_timeout: float, scale: Callable[..., int]
) -> None:
    rounds = scale(45 if path in PATHS else 15, least=15)
    async with layer_rounds.bench(path, drain_timeout=drain_timeout) as bench:

        def seeds() -> Iterator[int]:
            """So many, and more until every kind of end was met, without which the rounds would prove nothing."""
            first, tally = 1_000_000 * (*PATHS, "hixl").index(path), bench.tally
            for seed in itertools.count(first):
                ends = ("cancelled", "TransferTimeout", "LayerFailed", "ok")
                if seed - first >= rounds and tally.midway and all(tally.ends[end] for end in ends):
                    return
                yield seed

        tally = await bench.rounds(seeds())
    assert tally.rounds >= rounds


@pytest.mark.loop
@pytest.mark.sanitize
@pytest.mark.parametrize("phase", layer_rounds.PHASES)
@pytest.mark.parametrize("path", PATHS)
async def test_memory_is_quiet_after_an_end_in_every_phase(path: str, phase: str, scale: Callable[..., int]) -> None:
    first = 1000 * PATHS.index(path) + 100 * layer_rounds.PHASES.index(phase)
    for seed in range(first, first + scale(1)):
        await layer_rounds.ending_round(path, seed, phase)


# What a peer says of its addresses. -----------------------------------------------------------------------------------


class Announced:
    """The table of a peer's caches, into which this peer has put some."""

    def __init__(self) -> None:
        def unreachable(*_: Any) -> Any:
            raise CacheNotFound("nobody is there")

        link: Any = None
        self.table = table.RemoteTable(link, 1, unreachable)
        self.version = 0

    def add(
        self, number: int, starts: Sequence[int], block_bytes: int = 16, stride: int = 16, blocks: int = 4, **other: Any
    ) -> None:
        self.version += 1
        tensors = other.pop("num_tensors", len(starts))
        geometry = wire_geometry(Geometry("uint8", 1, (blocks, block_bytes), tensors, blocks, block_bytes, stride))
        message = wire.CacheAnnounce(
            version=self.version,
            cache_id=number,
            model_id=None,
            access=other.pop("access", "rw"),
            geometry=geometry,
            keys=[],
            addresses=other.pop("addresses", np.array(starts, "<u8").tobytes()),
        )
        self.table.announce(message, [])

    def find(self, address: int) -> tuple[int, int, int] | None:
        found = self.table.find_address(address)
        return None if found is None else (found[0].cache_id, *found[1:])


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 400), min_size=1, max_size=4),
            st.sampled_from([1, 16, 100]),
            st.sampled_from([0, 8]),
            st.integers(1, 4),
            st.booleans(),
        ),
        max_size=8,
    ),
    st.lists(st.integers(0, 1000), min_size=1, max_size=20),
)
def test_addresses_are_found_as_by_looking_at_each(caches: list[Any], asked: list[int]) -> None:
    announced = Announced()
    places = []
    for number, (starts, size, gap, blocks, writable) in enumerate(caches, 1):
        announced.add(number, starts, size, size + gap, blocks, access="rw" if writable else "r")
        extent = (blocks - 1) * (size + gap) + size
        places += [(start, number, tensor, extent) for tensor, start in enumerate(starts) if writable]
    for address in (*asked, -1, 2**64, 2**64 - 1):
        holding = [place[:3] for place in places if place[0] <= address < place[0] + place[3]]
        if not holding:
            assert announced.find(address) is None
            continue
        start, number, tensor = max(holding)
        assert announced.find(address) == (number, tensor, address - start)


def test_lies_about_addresses_hurt_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    announced = Announced()
    for wrong in (b"x", bytes(8), bytes(24)):
        with pytest.raises(ProtocolError, match=r"bytes of addresses for 2 tensors"):
            announced.add(1, [], num_tensors=2, addresses=wrong)
    with pytest.raises(ProtocolError, match=r"ends beyond all memory"):
        announced.add(1, [0, 2**64 - 63])
    announced.add(1, [0, 2**64 - 64])
    assert announced.find(2**64 - 1) == (1, 1, 63)
    # Of more than that no addresses are kept; the caches are known by their keys all the same.
    monkeypatch.setattr(table, "MAX_REMOTE_ADDRESSES", 4)
    announced.add(2, [1000, 2000])
    announced.add(3, [3000])
    assert announced.find(2000) == (2, 1, 0)
    assert announced.find(3000) is None
    assert len(announced.table) == 3
    announced.version += 1
    announced.table.withdraw(wire.CacheWithdraw(version=announced.version, cache_id=2))
    assert announced.find(2000) is None
    announced.add(4, [3000])
    assert announced.find(3000) == (4, 0, 0)
