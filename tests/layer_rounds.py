"""Rounds of layer-wise transfers against numpy that also try to catch late touches: for the tests of layers and `soak`.

One DataDist, `mine`, pushes to two others, `theirs` and `others`, in lanes: each lane has blocks of its own everywhere.
A round is a task with some targets, a model that computes the layers in some order, in the loop, in a thread or through
native signals, and a cause and a moment at which the task ends, all of which follow from a seed.

The source of a layer holds a pattern of bytes from 0x80 on until the model has computed it, and again from the moment
the task is done. What the model computes is below. So a layer that is read too early or too late carries pattern bytes
into the memory of the peers, which may never hold one. What the task may not write keeps what numpy says it holds; and
what was given back to its owner, by a fence or the end of a link, is filled with something that has to survive.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import aiodatadist as adt

from . import quiet
from .quiet import DATA_LIMIT, FENCED, Broken, Bytes, Tally, pause, same_at
from .waiting import PATIENCE, until

TENSORS = 12
LANES = 3
LANE_BLOCKS = 1024
BLOCK_BYTES = 64
GAP = 32  # between blocks of a strided cache
SLOT = 1000 * BLOCK_BYTES + 24  # bytes of a batch slot: a list of blocks ends with a piece of one
SLOT_BLOCKS = 1001
NOBODY = 99_999  # a cluster that is never linked

_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_ids = itertools.count(50_000)


class Region:
    """Memory of one owner that is pushed into: the tensors of one cache, or of several.

    Attributes
    ----------
    caches : list of Cache
    tensors : list of arrays
        Of all caches, in the order of the layers; rows are blocks, or batch slots.
    """

    def __init__(self, name: str, owner: adt.DataDist, caches: Sequence[adt.Cache], tensors: Sequence[Bytes]) -> None:
        self.name = name
        self.owner = owner
        self.caches = list(caches)
        self.tensors = list(tensors)
        self.addresses = [int(tensor.ctypes.data) for tensor in tensors]

    def view(self, lane: int) -> list[Bytes]:
        """Return what belongs to a lane."""
        if self.name == "slots":
            return [tensor[lane] for tensor in self.tensors]
        return [tensor[lane * LANE_BLOCKS : (lane + 1) * LANE_BLOCKS] for tensor in self.tensors]


def _allocate(dd: adt.DataDist, shape: tuple[int, ...], memory: str, **options: Any) -> tuple[adt.Cache, list[Bytes]]:
    count = options.pop("tensors", TENSORS)
    manager = dd.cache_manager
    slots = options.pop("slots", False)
    if memory == "library":
        desc = adt.CacheDesc(count, shape, "uint8")
        cache = manager.allocate_cache(desc, **options) if slots else manager.allocate_blocks_cache(desc, **options)
    else:
        arrays = [np.zeros(shape, np.uint8) for _ in range(count)]
        cache = manager.register_cache(arrays, **options) if slots else manager.register_blocks_cache(arrays, **options)
    return cache, list(cache.tensors)


def _regions(dd: adt.DataDist, memory: str) -> dict[str, Region]:
    shape = (LANES * LANE_BLOCKS, BLOCK_BYTES)
    blocks = _allocate(dd, shape, memory, key=adt.BlocksCacheKey(dd.cluster_id, 1))
    slots = _allocate(dd, (LANES, SLOT), memory, slots=True)
    halves = [_allocate(dd, shape, memory, tensors=TENSORS // 2) for _ in range(2)]
    wide = [np.zeros((shape[0], BLOCK_BYTES + GAP), np.uint8)[:, :BLOCK_BYTES] for _ in range(TENSORS)]
    strided = dd.cache_manager.register_blocks_cache(wide, key=adt.BlocksCacheKey(dd.cluster_id, 2))
    return {
        "blocks": Region("blocks", dd, [blocks[0]], blocks[1]),
        "slots": Region("slots", dd, [slots[0]], slots[1]),
        # Tensors of one layer lie in two caches, and where a layer is one tensor, every other layer in each.
        "split": Region("split", dd, [half[0] for half in halves], [halves[t % 2][1][t // 2] for t in range(TENSORS)]),
        "strided": Region("strided", dd, [strided], wide),
    }


@dataclass
class Target:
    """One config, and what it has to do."""

    config: adt.TransferConfig | adt.TransferWithCacheKeyConfig
    region: Region | None  # None: it cannot work
    source: range = field(default_factory=lambda: range(0))  # layers
    into: range = field(default_factory=lambda: range(0))
    impossible: tuple[type[BaseException], ...] = ()


@dataclass
class Plan:
    """What a round does, all of it from its seed."""

    direction: str  # "blocks", "slot to blocks", "slots"
    per_layer: int
    src_blocks: Any
    dst_blocks: Any
    targets: list[Target]
    order: list[int]  # of recording
    fails: int | None  # a layer
    dropped: bool  # after `order`, which is then short
    deadline: float | None
    recorder: str
    data: list[Bytes]  # what the model computes, a tensor each

    @property
    def layers(self) -> int:
        return TENSORS // self.per_layer

    def tensors_of(self, layer: int) -> range:
        return range(layer * self.per_layer, (layer + 1) * self.per_layer)

    def missing(self, target: Target) -> bool:
        """Say whether a layer of a target never comes."""
        return any(layer not in self.order or layer == self.fails for layer in target.source)


class Lane:
    """Blocks of its own everywhere, and one task at a time."""

    def __init__(self, bench: LayerBench, index: int) -> None:
        self.bench = bench
        self.index = index
        self.first = index * LANE_BLOCKS
        self.local = {
            "blocks": [tensor[self.first : self.first + LANE_BLOCKS] for tensor in bench.blocks_rows],
            "slots": [tensor[index] for tensor in bench.slots_rows],
        }
        self.pattern = DATA_LIMIT
        self.seed = -1
        self.said = ""
        self.mirror = {
            (region.owner.cluster_id, region.name): [view.copy() for view in region.view(index)]
            for region in bench.regions
        }
        self.over = threading.Event()
        self._ours = threading.Lock()  # the model's thread and this one take turns
        self.fill()

    def broken(self, what: str) -> Broken:
        return Broken(f"{what} (path {self.bench.path}, seed {self.seed}, {self.said})")

    def fill(self) -> None:
        """Take the source back."""
        self.pattern = DATA_LIMIT | (self.pattern + 1) % 0x80
        with self._ours:
            for tensors in self.local.values():
                for tensor in tensors:
                    tensor[:] = self.pattern

    # Plans. ----------------------------------------------------------------------------------------------

    def plan(self, rng: random.Random) -> Plan:
        direction = rng.choice(("blocks", "blocks", "slot to blocks", "slots"))
        per_layer = rng.choice((1, 2, 3))
        layers = TENSORS // per_layer
        order_of = np.random.default_rng(rng.getrandbits(64))
        count = rng.choice((0, 1, 7, 200, LANE_BLOCKS))
        src: Any = None
        dst: Any = None
        if direction == "blocks":
            if rng.random() < 0.7:
                src = self.first + order_of.permutation(LANE_BLOCKS)[:count]
                dst = self.first + order_of.permutation(LANE_BLOCKS)[:count]
            else:
                src = dst = list(range(self.first, self.first + count))
        elif direction == "slot to blocks":
            count = min(count, SLOT_BLOCKS)
            dst = self.first + order_of.permutation(LANE_BLOCKS)[:count]
        names = ("slots", "split") if direction == "slots" else ("blocks", "split", "strided")
        places = [(region, by) for region in self.bench.regions if region.name in names for by in ("key", "address")]
        usable = [
            (region, by)
            for region, by in places
            # Only a key names a strided cache's blocks as they lie, or one list and the other side's blocks.
            if not (region.name == "split" and by == "key")
            and not (region.name == "strided" and by == "address" and direction == "blocks")
        ]
        targets: list[Target] = []
        taken: set[tuple[int, str]] = set()
        for region, by in rng.sample(usable, min(len(usable), rng.randint(1, 3))):
            place = (region.owner.cluster_id, region.name)
            if place not in taken:
                taken.add(place)
                targets.append(self._target(rng, region, by, direction, per_layer, layers))
        if rng.random() < 0.2:
            targets.insert(rng.randint(0, len(targets)), self._impossible(rng, direction, per_layer))
        order = list(range(layers))
        rng.shuffle(order)
        chance = rng.random()
        dropped = chance < 0.1
        return Plan(
            direction,
            per_layer,
            src,
            dst,
            targets,
            order[: rng.randrange(layers)] if dropped else order,
            rng.randrange(layers) if 0.1 <= chance < 0.25 else None,
            dropped,
            # Of every order of magnitude: on an idle machine most tasks are over within a few milliseconds.
            10 ** rng.uniform(-5.0, -2.0) if rng.random() < 0.15 else None,
            rng.choice(("before", "loop", "loop", "thread", "thread", "native")),
            [np.resize(_DATA[rng.randrange(4096) :], tensor.shape) for tensor in self.local[_source_of(direction)]],
        )

    def _target(
        self, rng: random.Random, region: Region, by: str, direction: str, per_layer: int, layers: int
    ) -> Target:
        length = rng.choice((0, 1, layers // 2, layers, layers))
        source_start, into_start = rng.randint(0, layers - length), rng.randint(0, layers - length)
        source, into = range(source_start, source_start + length), range(into_start, into_start + length)
        whole = length == layers and rng.random() < 0.5
        batch = 0 if direction == "blocks" else self.index
        cluster = region.owner.cluster_id
        if by == "address":
            addresses = [
                region.addresses[t] for layer in into for t in range(layer * per_layer, (layer + 1) * per_layer)
            ]
            if direction == "slots":
                row = SLOT if region.name == "slots" else LANE_BLOCKS * BLOCK_BYTES
                addresses = [address + self.index * row for address in addresses]
            named: Any = adt.TransferConfig(cluster, addresses, None if whole else source, batch)
        else:
            key: Any = adt.BlocksCacheKey(cluster, 2 if region.name == "strided" else 1)
            if direction == "slots":
                key = adt.CacheKeyByIdAndIndex(cluster, region.caches[0].id, self.index)
            elif rng.random() < 0.3:
                key = adt.CacheKeyByIdAndIndex(cluster, region.caches[0].id)
            ranges = (None, None) if whole else (source, into)
            named = adt.TransferWithCacheKeyConfig(key, *ranges, batch)
        return Target(named, region, source, into)

    def _impossible(self, rng: random.Random, direction: str, per_layer: int) -> Target:
        batch = 0 if direction == "blocks" else self.index
        cluster = rng.choice((NOBODY, self.bench.theirs.cluster_id))
        if rng.random() < 0.5:
            config: Any = adt.TransferConfig(cluster, [64] * per_layer, range(1), batch)
        else:
            config = adt.TransferWithCacheKeyConfig(adt.CacheKeyByIdAndIndex(cluster, 10**9), None, None, batch)
        return Target(config, None, impossible=(adt.NotLinkedError,) if cluster == NOBODY else (adt.CacheNotFound,))

    # The model. ------------------------------------------------------------------------------------------

    def compute(self, plan: Plan, layer: int) -> None:
        """Compute a layer; once the task is over its memory is somebody else's."""
        with self._ours:
            for t in plan.tensors_of(layer):
                self.local[_source_of(plan.direction)][t][:] = self.pattern if self.over.is_set() else plan.data[t]

    def _say(self, plan: Plan, gate: adt.LayerGate, layer: int) -> None:
        if layer == plan.fails:
            gate.fail(layer, ArithmeticError(str(layer)))
            return
        self.compute(plan, layer)
        if plan.recorder == "native":
            signal = gate.native(layer)
            _CALLBACK(signal.function)(signal.context)
        else:
            gate.record(layer)

    async def _model(self, plan: Plan, gate: adt.LayerGate, pauses: list[float]) -> None:
        for layer, seconds in zip(plan.order, pauses, strict=True):
            await pause(seconds)
            self._say(plan, gate, layer)

    def _thread(self, plan: Plan, gate: adt.LayerGate, pauses: list[float]) -> threading.Thread:
        failures = self.bench.failures

        def run(gate: adt.LayerGate) -> None:
            try:
                for layer, seconds in zip(plan.order, pauses, strict=True):
                    time.sleep(seconds)
                    self._say(plan, gate, layer)
            except BaseException as why:
                failures.append(why)

        thread = threading.Thread(target=run, args=(gate,))
        thread.start()
        return thread

    # A round. --------------------------------------------------------------------------------------------

    def start(self, plan: Plan, gate: adt.LayerGate) -> adt.TransferTask:
        bench = self.bench
        self.said = f"{plan.direction}, {plan.recorder}, {len(plan.targets)} targets, {plan.per_layer} a layer"
        cache = bench.slots if _source_of(plan.direction) == "slots" else bench.blocks
        return bench.manager.transfer_cache_async(
            cache,
            gate,
            [target.config for target in plan.targets],
            plan.src_blocks,
            plan.dst_blocks,
            tensor_num_per_layer=plan.per_layer,
            timeout=plan.deadline,
        )

    def watch(self, task: adt.TransferTask, plan: Plan) -> list[str]:
        """Check the data and take the source back the moment the task is done; the list is filled with its ends."""
        ends: list[str] = []

        def done(future: asyncio.Future[Any]) -> None:
            assert isinstance(future, adt.TransferTask)
            self.over.set()
            try:
                moved, whole = future.progress
                self.bench.tally.midway += 0 < moved < whole
                if future.cancelled():
                    ends.append("cancelled")
                    return
                results = future.result()
                if [result.config for result in results] != [target.config for target in plan.targets]:
                    raise self.broken("results are not those of the configs, in order")
                for target, result in zip(plan.targets, results, strict=True):
                    ends.append("ok" if result.error is None else type(result.error).__name__)
                    self._judge(plan, target, result)
                if moved != sum(result.bytes_done for result in results):
                    raise self.broken(f"progress says {moved} bytes")
            except BaseException as why:
                self.bench.failures.append(why)
            finally:
                self.fill()

        task.add_done_callback(done)
        return ends

    def _judge(self, plan: Plan, target: Target, result: adt.LayerTransferResult) -> None:
        error = result.error
        if target.region is None:
            if not isinstance(error, target.impossible):
                raise self.broken(f"an impossible target ended with {error!r}")
            return
        if error is None:
            if plan.missing(target):
                raise self.broken("ended well without all its layers")
            if result.layers_done != len(target.source):
                raise self.broken(f"ended well after {result.layers_done} of {len(target.source)} layers")
            self.apply(plan, target, target.source)
            self.compare(target.region, "ended well, and")
        elif isinstance(error, adt.LayerFailed):
            if not plan.missing(target):
                raise self.broken(f"ended with {error!r}, and all its layers came") from error
            if plan.fails is not None and not isinstance(error.__cause__, ArithmeticError):
                raise self.broken(f"ended without the cause: {error!r}") from error
        elif not isinstance(error, self.bench.allowed) and not (
            plan.deadline is not None and isinstance(error, adt.TransferTimeout)
        ):
            raise self.broken(f"ended with {error!r}") from error

    def apply(self, plan: Plan, target: Target, layers: Sequence[int]) -> None:
        """Do with numpy what the target has to do for some of its layers."""
        assert target.region is not None
        mirror = self.mirror[target.region.owner.cluster_id, target.region.name]
        for layer in layers:
            there = target.into[layer - target.source.start]
            for s, d in zip(plan.tensors_of(layer), plan.tensors_of(there), strict=True):
                data, into = plan.data[s], mirror[d]
                if plan.direction == "blocks":
                    into[np.asarray(plan.dst_blocks, int) - self.first] = data[
                        np.asarray(plan.src_blocks, int) - self.first
                    ]
                elif plan.direction == "slots":
                    flat = into.reshape(-1)
                    flat[:SLOT] = data
                else:
                    flat = data[: len(plan.dst_blocks) * BLOCK_BYTES]
                    full = len(flat) // BLOCK_BYTES
                    blocks = np.asarray(plan.dst_blocks, int) - self.first
                    into[blocks[:full]] = flat[: full * BLOCK_BYTES].reshape(full, BLOCK_BYTES)
                    if rest := len(flat) - full * BLOCK_BYTES:
                        into[blocks[full], :rest] = flat[full * BLOCK_BYTES :]

    def compare(self, region: Region, when: str) -> None:
        mirror = self.mirror[region.owner.cluster_id, region.name]
        for t, (got, expected) in enumerate(zip(region.view(self.index), mirror, strict=True)):
            if not np.array_equal(got, expected):
                raise self.broken(f"{when} tensor {t} of {region.name} differs from what numpy says")

    def no_pattern(self, when: str) -> None:
        for region in self.bench.regions:
            for view in region.view(self.index):
                if int(view.max()) >= DATA_LIMIT:
                    raise self.broken(f"{when}, {region.name} hold what was never recorded, or was taken back")

    async def look(self, task: adt.TransferTask, plan: Plan) -> None:
        """Read layers as they land: their bytes are there at that moment."""
        async for index, layer in task.layers():
            target = plan.targets[index]
            if self.over.is_set() or target.region is None:
                continue
            there = plan.tensors_of(target.into[layer - target.source.start])
            kept = self.mirror[target.region.owner.cluster_id, target.region.name]
            before = [kept[t].copy() for t in there]
            self.apply(plan, target, [layer])
            views = target.region.view(self.index)
            wrong = [t for t in there if not np.array_equal(views[t], kept[t])]
            for t, was in zip(there, before, strict=True):
                kept[t][:] = was
            if wrong:
                raise self.broken(f"layer {layer} of target {index} was said to have landed and is not there")

    async def round(self, seed: int) -> None:
        bench = self.bench
        self.seed = seed
        rng = random.Random(seed)
        plan = self.plan(rng)
        gate = adt.LayerGate(plan.layers)
        self.over.clear()
        pauses = [rng.choice((0.0, 0.0, quiet.TURN, 2 * quiet.TURN, 0.001)) for _ in plan.order]
        if plan.recorder == "before":
            await self._model(plan, gate, [0.0] * len(plan.order))
        task = self.start(plan, gate)
        ends = self.watch(task, plan)
        looking = asyncio.create_task(self.look(task, plan)) if rng.random() < 0.5 else None
        model: asyncio.Task[None] | threading.Thread | None = None
        if plan.recorder == "loop":
            model = asyncio.create_task(self._model(plan, gate, pauses))
        elif plan.recorder != "before":
            model = self._thread(plan, gate, pauses)
        del gate
        cause = quiet.to_the_end if rng.random() < 0.4 else rng.choice(quiet.CAUSES)
        seconds = rng.choice((0.0, 0.0, quiet.TURN, 4 * quiet.TURN, 0.001, 0.003))
        began = time.monotonic()
        await cause(task, seconds)  # type: ignore[arg-type]  # what it gives is looked at by the callback
        if not task.done():
            raise self.broken(f"{cause.__name__} returned while the task was running")
        if time.monotonic() - began > bench.patience:
            raise self.broken(f"{cause.__name__} took {time.monotonic() - began:.1f} s")
        if isinstance(model, asyncio.Task):
            await model
        elif model is not None:
            await until(lambda: not model.is_alive(), "the model does not end")
        if looking is not None:
            await looking
        await asyncio.sleep(0)
        bench.raise_failures()
        if "cancelled" in ends and cause in (quiet.to_the_end, quiet.given_up):
            raise self.broken("cancelled, and nobody asked for it")
        await pause(rng.choice((0.0, 0.0005, 0.003)))
        self.no_pattern("a little later")
        await self._settle(task, plan, ends, rng)
        bench.tally.rounds += 1
        bench.tally.causes[cause.__name__] += 1
        bench.tally.ends.update(ends)

    async def _settle(self, task: adt.TransferTask, plan: Plan, ends: list[str], rng: random.Random) -> None:
        """Take over what the targets that did not end well have left, and nothing else."""
        bench = self.bench
        ops = {part.op for target in task._targets for part in target._parts}
        # What was ended by force is over on the wire a little later than in memory.
        await until(lambda: ops.isdisjoint(row.id for row in bench.mine.dump()), "something is left on the wire")
        landed = [one async for one in task.layers()]
        patient = bench.path != "tcp" or bench.mine._config.drain_timeout > 0
        for index, target in enumerate(plan.targets):
            region = target.region
            if region is None or ends[min(index, len(ends) - 1)] == "ok":
                continue
            views = region.view(self.index)
            mirror = self.mirror[region.owner.cluster_id, region.name]
            self.apply(plan, target, [layer for at, layer in landed if at == index])
            done = {t for at, layer in landed if at == index for t in self._there(plan, target, layer)}
            mine = {t for layer in target.source for t in self._there(plan, target, layer)}
            for t, (view, kept) in enumerate(zip(views, mirror, strict=True)):
                if t in mine and t not in done:
                    self._forgive(plan, view, kept)
            self.compare(region, "after the end,")
            if patient and rng.random() < 0.2:
                await region.owner.fence(bench.mine.cluster_id)
                for view in views:
                    view[:] = FENCED
                await pause(rng.choice((0.0, 0.001, 0.005)))
                for view, kept in zip(views, mirror, strict=True):
                    if not same_at(view, FENCED):
                        raise self.broken("their memory was written after a fence")
                    kept[:] = FENCED

    @staticmethod
    def _there(plan: Plan, target: Target, layer: int) -> range:
        return plan.tensors_of(target.into[layer - target.source.start])

    def _forgive(self, plan: Plan, view: Bytes, kept: Bytes) -> None:
        """Take over what one tensor of a target without success may hold."""
        if plan.direction == "slots":
            kept.reshape(-1)[:SLOT] = view.reshape(-1)[:SLOT]
        else:
            blocks = np.asarray(plan.dst_blocks, int) - self.first
            kept[blocks] = view[blocks]


def _source_of(direction: str) -> str:
    return "blocks" if direction == "blocks" else "slots"


class LayerBench:
    """Three linked DataDists in this process with caches of all kinds.

    Attributes
    ----------
    mine : DataDist
        Which pushes.
    theirs, others : DataDist
        Owners of the regions.
    """

    patience = PATIENCE
    allowed: tuple[type[BaseException], ...] = ()

    def __init__(self, path: str, mine: adt.DataDist, theirs: adt.DataDist, others: adt.DataDist) -> None:
        self.path = path
        self.mine = mine
        self.theirs = theirs
        self.others = others
        self.manager = mine.cache_manager
        self.tally = Tally()
        self.failures: list[BaseException] = []

    async def _set_up(self) -> None:
        memory = quiet.memory_of(self.path)
        shape = (LANES * LANE_BLOCKS, BLOCK_BYTES)
        self.blocks, self.blocks_rows = _allocate(self.mine, shape, memory, remote=None)
        self.slots, self.slots_rows = _allocate(self.mine, (LANES, SLOT), memory, slots=True, remote=None)
        self.by_name = {dd.cluster_id: _regions(dd, memory) for dd in (self.theirs, self.others)}
        self.regions = [region for regions in self.by_name.values() for region in regions.values()]
        # What the endings of `quiet` take back.
        self.local = self.blocks
        self.target = self.by_name[self.theirs.cluster_id]["blocks"].caches[0]
        self.source = self.by_name[self.theirs.cluster_id]["slots"].caches[0]
        for cache in (self.blocks, self.slots, *(cache for region in self.regions for cache in region.caches)):
            await cache.ready()
        for dd in (self.theirs, self.others):
            link = await self.mine.link(adt.ClusterInfo(dd.cluster_id, str(dd.listen_address)))
            assert (link.path.transport,) == self.mine._config.transports, link.path
            ids = [cache.id for region in self.by_name[dd.cluster_id].values() for cache in region.caches]
            names = [adt.CacheKeyByIdAndIndex(dd.cluster_id, number) for number in ids]
            await until(lambda: all(name in link.table for name in names))  # noqa: B023
        self.lanes = [Lane(self, index) for index in range(LANES)]

    def raise_failures(self) -> None:
        if self.failures:
            raise self.failures[0]

    async def rounds(self, seeds: Iterator[int]) -> Tally:
        """Let the lanes work on the seeds side by side; the iterator may look at `tally`."""
        began = time.monotonic()

        async def work(lane: Lane) -> None:
            for seed in seeds:
                await lane.round(seed)

        async with asyncio.TaskGroup() as group:
            for lane in self.lanes:
                group.create_task(work(lane))
        await until(lambda: not self.mine.dump(), "something is left on the wire")
        await asyncio.sleep(0.01)
        self.raise_failures()
        for lane in self.lanes:
            lane.no_pattern("at the end")
            for region in self.regions:
                lane.compare(region, "at the end")
        for link in self.mine.links.values():
            assert link.state is adt.LinkState.READY
            assert link._counters.pending == 0
        self.tally.seconds += time.monotonic() - began
        return self.tally


# Rows that differ, so that a block in the wrong place shows.
_DATA = np.random.default_rng(7).integers(0, FENCED, 70_001, np.uint8)


@contextlib.asynccontextmanager
async def bench(path: str, **options: Any) -> AsyncIterator[LayerBench]:
    """Open and link; `options` are those of Config."""
    config = quiet.config_of(path, **options)
    first, second, third = next(_ids), next(_ids), next(_ids)
    async with (
        adt.DataDist(second, listen="127.0.0.1:0", config=config) as theirs,
        adt.DataDist(third, listen="127.0.0.1:0", config=config) as others,
        adt.DataDist(first, config=config) as mine,
    ):
        made = LayerBench(path, mine, theirs, others)
        await made._set_up()
        yield made


# Ends of a whole DataDist, of a link or of a cache. -------------------------------------------------------------------

PHASES = ("before", "between", "in flight", "after")
_OF_THEIRS = (
    "_abort_theirs",
    "_close_theirs",
    "_unlink",
    "_unlink_by_force",
    "_unlinked_by_them",
    "_unregister_theirs",
)
_ENDS = (adt.PeerLostError, adt.ClosedError, adt.TransferAborted, adt.CacheNotFound)


async def reach(lane: Lane, task: adt.TransferTask, plan: Plan, gate: adt.LayerGate, phase: str) -> list[int]:
    """Bring a task into a phase; return the layers that are still to be recorded."""
    order = list(plan.order)

    async def record(count: int) -> None:
        for _ in range(count):
            layer = order.pop(0)
            lane.compute(plan, layer)
            gate.record(layer)

    if phase == "between" or phase == "in flight":
        first = order[0]
        await record(1)
        wanted = {(index, first) for index, target in enumerate(plan.targets) if first in target.source}
        async for landed in task.layers():
            wanted.discard(landed)
            if not wanted:
                break
    if phase == "in flight":
        await record(1)
    elif phase == "after":
        await record(len(order))
    return order


async def ending_round(path: str, seed: int, phase: str | None = None) -> Tally:
    """End something while all lanes have a task in some phase; as many rounds as there are lanes."""
    rng = random.Random(seed)
    began = time.monotonic()
    ending: Callable[[Any], Any] = rng.choice(quiet.ENDINGS)
    async with bench(path, drain_timeout=rng.choice((0.0, 1.0))) as made:
        made.allowed = _ENDS
        running = []
        blocks = [made.by_name[dd.cluster_id]["blocks"] for dd in (made.theirs, made.others)]
        for lane in made.lanes:
            lane.seed = seed
            where = phase or rng.choice(PHASES)
            order = np.random.default_rng(rng.getrandbits(64))
            both = [lane.first + order.permutation(LANE_BLOCKS) for _ in range(2)]
            layers = range(TENSORS // 2)
            keys = [adt.BlocksCacheKey(region.owner.cluster_id, 1) for region in blocks]
            plan = Plan(
                "blocks", 2, *both,
                [Target(adt.TransferWithCacheKeyConfig(key), region, layers, layers)
                 for key, region in zip(keys, blocks, strict=True)],
                rng.sample(layers, len(layers)), None, False, None, "by hand",
                [np.resize(_DATA[rng.randrange(4096) :], (LANE_BLOCKS, BLOCK_BYTES)) for _ in range(TENSORS)],
            )  # fmt: skip
            lane.over.clear()
            gate = adt.LayerGate(len(layers))
            task = lane.start(plan, gate)
            ends = lane.watch(task, plan)
            lane.said += f", {ending.__name__}, {where}"
            left = await reach(lane, task, plan, gate, where)
            running.append((lane, task, plan, gate, left, ends))
        await pause(rng.choice((0.0, 0.0001, 0.0008, 0.002)))

        def record_the_rest() -> None:
            for lane, _, plan, gate, left, _ in running:
                for layer in left:
                    lane.compute(plan, layer)
                    gate.record(layer)

        ended = asyncio.ensure_future(ending(made))
        if ending.__name__ in ("_close_mine", "_cancel_the_closing"):
            await pause(rng.choice((0.0, 0.001)))
            record_the_rest()  # an orderly close waits for what runs
            await ended
        else:
            await ended
            record_the_rest()
        _, late = await asyncio.wait([task for _, task, *_ in running], timeout=made.patience)
        if late:
            raise made.lanes[0].broken(f"{len(late)} tasks did not end: {[str(row) for row in made.mine.dump()]}")
        await asyncio.sleep(0)
        made.raise_failures()
        for lane, *_, ends in running:
            lane.no_pattern("at once")
            if ending.__name__ in _OF_THEIRS and ends[1] != "ok":
                raise lane.broken(f"the end of another target's link ended this one with {ends[1]}")
        given_back = ending.__name__ != "_unregister_mine"
        if ending.__name__ in ("_abort_theirs", "_close_theirs", "_unregister_theirs"):
            pass
        elif given_back:
            await made.theirs.fence(made.mine.cluster_id)
        if given_back:
            for tensor in blocks[0].tensors:
                tensor[:] = FENCED
        await pause(rng.choice((0.0, 0.001, 0.005)))
        for lane, *_, ends in running:
            lane.no_pattern("a little later")
            made.tally.rounds += 1
            made.tally.causes[ending.__name__] += 1
            made.tally.ends.update(ends)
        if given_back and not all(same_at(tensor, FENCED) for tensor in blocks[0].tensors):
            raise made.lanes[0].broken("their blocks were written after they had been given back")
    made.tally.seconds += time.monotonic() - began
    return made.tally
