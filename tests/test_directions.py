"""Every direction, kind of key, layer range and batch slot gives what numpy gives, over every transport."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import aiodatadist as adt

from .hixl_standin import HIXL
from .pairs import OWNER, Pair, linked, pattern

SLOTS, POSITIONS, WIDTH = 5, 24, 3  # a batch slot takes 24 positions of 3 elements
BLOCKS, BLOCK = 16, 5  # a block takes 5: a slot fills 4 of them and 4 positions of the fifth
LAYERS = 3
TENSORS = 2 * LAYERS
WAYS = ("batch to batch", "batch to blocks", "blocks to batch", "blocks to blocks")

Arrays = list[np.ndarray[Any, Any]]


@dataclass(eq=False)
class Side:
    """One side's two caches, one of batch slots and one of blocks, and what numpy says they hold."""

    slots: adt.Cache
    blocks: adt.Cache
    expected: dict[int, Arrays] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for cache in (self.slots, self.blocks):
            self.expected[cache.id] = [np.array(tensor) for tensor in cache.tensors]

    def check(self) -> None:
        for cache in (self.slots, self.blocks):
            for i, (tensor, expected) in enumerate(zip(cache.tensors, self.expected[cache.id], strict=True)):
                np.testing.assert_array_equal(tensor, expected, err_msg=f"tensor {i} of {cache}")


def slot_keys() -> list[adt.CacheKey]:
    """Slot 0 has a request's key, 1 none, 2 a prefix's, 3 one of both (found by the prefix), 4 none."""
    return [
        adt.CacheKey(OWNER, 70, 1),
        adt.CacheKey(OWNER),
        adt.CacheKey(OWNER, model_id=1, prefix_id=72),
        adt.CacheKey(OWNER, 73, 1, 173),
    ]


def key_of(slot: int, cache: adt.Cache, by_key: bool) -> adt.CacheKey | adt.CacheKeyByIdAndIndex:
    named = {
        0: adt.CacheKey(OWNER, 70, 1),
        2: adt.CacheKey(OWNER, adt.NO_ID, 1, 72),
        3: adt.CacheKey(OWNER, adt.NO_ID, 1, 173),
    }
    if by_key and slot in named:
        return named[slot]
    return adt.CacheKeyByIdAndIndex(OWNER, cache.id, slot)


@contextlib.asynccontextmanager
async def sides(
    transport: str, allocated: bool, dtype: str, **options: dict[str, Any]
) -> AsyncIterator[tuple[Pair, Side, Side]]:
    """Link two nodes with caches; `options` are those of `pairs.linked`."""
    async with linked(transport, **options) as pair:
        made = []
        for number, dd in enumerate((pair.owner, pair.user)):
            caches, remote = dd.cache_manager, "rw" if dd is pair.owner else None
            keys = slot_keys() if dd is pair.owner else []
            shapes = ((SLOTS, POSITIONS, WIDTH), (BLOCKS, BLOCK, WIDTH))
            fill = [pattern(10 * number + i, shape, dtype, TENSORS) for i, shape in enumerate(shapes)]
            if allocated:
                slots = caches.allocate_cache(adt.CacheDesc(TENSORS, shapes[0], dtype), keys=keys, remote=remote)
                blocks = caches.allocate_blocks_cache(
                    adt.CacheDesc(TENSORS, shapes[1], dtype),
                    key=adt.BlocksCacheKey(OWNER) if dd is pair.owner else None,
                    remote=remote,
                )
                for cache, tensors in zip((slots, blocks), fill, strict=True):
                    for mine, wanted in zip(cache.tensors, tensors, strict=True):
                        mine[...] = wanted
            else:
                slots = caches.register_cache(fill[0], keys=keys, remote=remote)
                blocks = caches.register_blocks_cache(
                    fill[1], key=adt.BlocksCacheKey(OWNER) if dd is pair.owner else None, remote=remote
                )
            for cache in (slots, blocks):
                await (pair.shown(cache) if dd is pair.owner else cache.ready())
            made.append(Side(slots, blocks))
        yield pair, *made


@st.composite
def moves(draw: st.DrawFn) -> dict[str, Any]:
    way = draw(st.sampled_from(WAYS))
    count = draw(st.integers(0, 5))
    unique = st.lists(st.integers(0, BLOCKS - 1), min_size=count, max_size=count, unique=True)
    layers = draw(st.integers(1, LAYERS))
    per_layer = draw(st.sampled_from((1, 2, 3, 6)))
    in_all = TENSORS // per_layer
    length = draw(st.integers(0, in_all))
    ranges = draw(
        st.one_of(
            st.none(),
            st.tuples(st.integers(0, in_all - length), st.integers(0, in_all - length)).map(
                lambda starts: tuple(range(start, start + length) for start in starts)
            ),
        )
    )
    slot_elements = POSITIONS * WIDTH
    fits = (
        st.integers(max(0, (count - 1) * BLOCK * WIDTH + 1), min(count * BLOCK * WIDTH, slot_elements))
        if count
        else st.just(0)
    )
    size = draw(st.one_of(st.just(-1), st.integers(0, slot_elements) if way == WAYS[0] else fits))
    return {
        "way": way,
        "push": draw(st.booleans()),
        "by_key": draw(st.booleans()),
        "slots": (draw(st.integers(0, SLOTS - 1)), draw(st.integers(0, SLOTS - 1))),
        "source": draw(st.lists(st.integers(0, BLOCKS - 1), min_size=count, max_size=count)),
        "destination": draw(unique),
        "ranges": ranges,
        "per_layer": per_layer,
        "elements": size,
        "layers": layers,
    }


def expect(move: dict[str, Any], source: Side, destination: Side) -> None:
    """Move as numpy does."""
    way, (src_slot, dst_slot), n = move["way"], move["slots"], move["elements"]
    tensors = range(TENSORS)
    pairs = list(zip(tensors, tensors, strict=True))
    if move["ranges"] is not None:
        (src, dst), per = move["ranges"], move["per_layer"]
        pairs = list(zip(range(src.start * per, src.stop * per), range(dst.start * per, dst.stop * per), strict=True))
    read_slots, read_blocks = (source.expected[cache.id] for cache in (source.slots, source.blocks))
    into_slots, into_blocks = (destination.expected[cache.id] for cache in (destination.slots, destination.blocks))
    for s, d in pairs:
        if way == "batch to batch":
            many = POSITIONS * WIDTH if n == -1 else n
            into_slots[d][dst_slot].reshape(-1)[:many] = read_slots[s][src_slot].reshape(-1)[:many]
        elif way == "blocks to blocks":
            into_blocks[d][move["destination"]] = read_blocks[s][move["source"]]
        elif way == "batch to blocks":
            flat, at = read_slots[s][src_slot].reshape(-1), 0
            flat = flat if n == -1 else flat[:n]
            for block in move["destination"]:
                piece = flat[at : at + BLOCK * WIDTH]
                into_blocks[d][block].reshape(-1)[: len(piece)] = piece
                at += len(piece)
        else:
            flat, at = into_slots[d][dst_slot].reshape(-1), 0
            flat = flat if n == -1 else flat[:n]
            for block in move["source"]:
                piece = flat[at : at + BLOCK * WIDTH]
                piece[...] = read_blocks[s][block].reshape(-1)[: len(piece)]
                at += len(piece)


def start(pair: Pair, move: dict[str, Any], owner: Side, user: Side) -> adt.Transfer[None]:
    caches, push, way = pair.user.cache_manager, move["push"], move["way"]
    itemsize = user.slots.geometry.itemsize
    options: dict[str, Any] = {"tensor_num_per_layer": move["per_layer"]}
    if move["ranges"] is not None:
        options |= {"src_layer_range": move["ranges"][0], "dst_layer_range": move["ranges"][1]}
    if move["elements"] != -1 and way != "blocks to blocks":
        options["size"] = move["elements"] * itemsize
    from_blocks, to_blocks = way.startswith("blocks"), way.endswith("blocks")
    there_blocks, here_blocks = (to_blocks, from_blocks) if push else (from_blocks, to_blocks)
    there_slot, here_slot = move["slots"][::-1] if push else move["slots"]
    key = adt.BlocksCacheKey(OWNER) if there_blocks else key_of(there_slot, owner.slots, move["by_key"])
    if there_blocks and not move["by_key"]:
        key = adt.CacheKeyByIdAndIndex(OWNER, owner.blocks.id)
    cache = user.blocks if here_blocks else user.slots
    if not here_blocks:
        options["src_batch_index" if push else "dst_batch_index"] = here_slot
    if way == "batch to batch":
        return (caches.push_cache if push else caches.pull_cache)(key, cache, **options)
    source = move["source"] if from_blocks else None
    destination = move["destination"] if to_blocks else None
    return (caches.push_blocks if push else caches.pull_blocks)(key, cache, source, destination, **options)


async def run_moves(
    sequence: list[dict[str, Any]], pair: Pair, owner: Side, user: Side, *, allocated: bool = False
) -> None:
    """Make the moves one after the other, and compare all memory with numpy's at the end."""
    for move in sequence:
        source, destination = (user, owner) if move["push"] else (owner, user)
        if allocated and not move["push"] and move["slots"][0] == 0 and "batch to" in move["way"]:
            continue  # the first such pull takes the key, which has tests of its own
        expect(move, source, destination)
        await start(pair, move, owner, user)
    owner.check()
    user.check()


@pytest.mark.sanitize
@pytest.mark.parametrize("allocated", [True, False], ids=["library", "ordinary"])
@pytest.mark.parametrize("transport", ["shm", "tcp", pytest.param("verbs", marks=pytest.mark.verbs), HIXL])
def test_every_direction_equals_numpy(transport: str, allocated: bool, scale: Callable[[int], int]) -> None:
    @settings(max_examples=scale(40), deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(moves(), min_size=1, max_size=25), st.sampled_from(["uint8", "float16", "int64"]))
    def run(sequence: list[dict[str, Any]], dtype: str) -> None:
        async def body() -> None:
            async with sides(transport, allocated, dtype) as (pair, owner, user):
                await run_moves(sequence, pair, owner, user, allocated=allocated)

        asyncio.run(body())

    run()
