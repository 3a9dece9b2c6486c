"""`bench layerwise`: layers pushed while a model thread computes the next ones, and what recording a layer takes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter, perf_counter_ns
from typing import TYPE_CHECKING, Final

import numpy as np

import aiodatadist as adt

from .bench_memory import Half
from .bench_rows import Progress, Rows, in_turn, size_text
from .bench_transfers import Session, Site
from .failure import CommandError

if TYPE_CHECKING:
    from aiodatadist.layers import LayerSource

__all__ = ["LayersScale", "measure_layers"]

_LAYERS: Final = 16
_TIMES: Final = (1, 2)
"""How long a layer is computed, in pushes of one."""
_PUSHES: Final = 5
"""Pushes of one layer a round, whose median counts."""
_OVERLAP_TARGET: Final = 1.1

_RECORD_LAYERS: Final = 100
_RECORD_BLOCK: Final = 4096
_OTHER_BLOCK: Final = 65536
_GAP_NS: Final = 300_000
"""Pure Python between two layers."""
_RECORD_MICROS: Final = 1000.0

_MATRICES: Final = 16
_SIDE: Final = 64
_TIMEOUT: Final = 120.0


@dataclass(frozen=True, slots=True)
class LayersScale:
    """How much is measured.

    Attributes
    ----------
    nbytes : int
        Bytes of all layers, and of the transfer beside which layers are recorded.
    repeat : int
        Rounds.
    records : int
        Layers recorded a round, at least.
    """

    nbytes: int
    repeat: int
    records: int


async def measure_layers(
    session: Session, paths: Sequence[str], blocks: Sequence[int], scale: LayersScale, rows: Rows, progress: Progress
) -> None:
    """Measure for each path how far pushing and computing overlap, and what recording takes from a model thread."""
    block = min(blocks, key=lambda size: abs(size - 65536))
    layers = max(1, min(_LAYERS, scale.nbytes // block))
    for path in paths:
        progress(f"layerwise: {path}, {layers} layers in blocks of {size_text(block)}")
        async with session.site(path, block, max(1, scale.nbytes // layers // block), tensors=layers) as site:
            await _Overlap(session, site, path, rows).measure(scale)
    for path in paths:
        progress(f"layerwise: {path}, recording layers")
        async with (
            session.site(path, _RECORD_BLOCK, 1, tensors=_RECORD_LAYERS) as site,
            session.site(path, _OTHER_BLOCK, max(1, scale.nbytes // _OTHER_BLOCK)) as other,
        ):
            await _Recording(session, site, path, rows, other).measure(scale)


class _Layers:
    """A site whose tensors are layers, all different, that are pushed to the peer."""

    def __init__(self, session: Session, site: Site, path: str, rows: Rows) -> None:
        self._session = session
        self._site = site
        self._path = path
        self._rows = rows
        self._count = len(site.cache.tensors)
        self._caches = site.dd.cache_manager
        for number, tensor in enumerate(site.cache.tensors):
            Half.of(tensor, site.here.index, number).fill()

    def _start(self, layers: LayerSource) -> adt.TransferTask:
        return self._caches.transfer_cache_async(
            self._site.cache,
            layers,
            [adt.TransferWithCacheKeyConfig(self._site.key)],
            self._site.here.index,
            self._site.remote.index,
            tensor_num_per_layer=1,
            timeout=_TIMEOUT,
        )

    async def _verify(self, what: str, step: Callable[[], Awaitable[object]]) -> None:
        """Run a step once, which also warms up, and look at every block of every layer."""
        model_id = self._site.key.model_id
        await self._session.peer.call("clear_layers", model_id=model_id)
        await step()
        wrong = await self._session.peer.call("wrong_layers", model_id=model_id, seed=-model_id & 0xFFFF)
        if any(wrong):
            first = next(number for number, blocks in enumerate(wrong) if blocks)
            raise CommandError(
                f"{what} over {self._path} with blocks of {size_text(self._site.here.block)}: {sum(wrong)} of "
                f"{len(wrong) * len(self._site.here.index)} blocks are not what was sent, the first in layer {first}"
            )


# Overlap. ---------------------------------------------------------------------------------------------------


class _Model:
    """Computes, with one thread: products too small for BLAS to share out, many in each call without the GIL."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self._matrices = random.standard_normal((_MATRICES, _SIDE, _SIDE), np.float32)
        self._factor = random.standard_normal((_SIDE, _SIDE), np.float32)
        self._products = np.empty_like(self._matrices)
        self.seconds = 0.0
        """CPU time of a layer."""

    def compute_layer(self) -> None:
        ends = time.thread_time() + self.seconds
        while time.thread_time() < ends:
            self.compute_some()

    def compute_some(self) -> None:
        np.matmul(self._matrices, self._factor, out=self._products)


class _Synchronizer(adt.LayerSynchronizer):
    """What the thread of a transfer asks, layer by layer; the model's thread answers."""

    def __init__(self, layers: int) -> None:
        self.computed = [threading.Event() for _ in range(layers)]

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return self.computed[layer_index].wait(timeout_in_millis and timeout_in_millis / 1000)


class _Overlap(_Layers):
    async def measure(self, scale: LayersScale) -> None:
        self._model = _Model()
        push = self._pushed(range(self._count))
        await self._verify("push", push)
        await self._verify("LayerGate", self._gate)
        await self._verify("LayerSynchronizer", self._synchronizer)
        for times in _TIMES:
            self._model.seconds = float(np.median([await self._one_beside() for _ in range(_PUSHES)])) * times
            steps = {
                "compute": self._compute,
                "one": self._one,
                "one beside": self._one_beside,
                "push at the end": self._at_the_end,
                "LayerSynchronizer": self._synchronizer,
                "LayerGate": self._gate,
            }
            self._add_rows(times, await in_turn(steps, scale.repeat))

    def _add_rows(self, times: int, found: dict[str, list[float]]) -> None:
        c = "c = t" if times == 1 else f"c = {times} t"
        millis = {name: [each * 1e3 for each in seconds] for name, seconds in found.items()}
        layer = [each / self._count for each in millis["compute"]]

        def add(name: str, samples: Sequence[float], beside: tuple[str, Sequence[float]], target: float | None) -> None:
            block = self._site.here.block
            self._rows.add(f"layerwise {name}, {c}", self._path, block, samples, "ms", "lower", beside, target)

        beside_model = millis["one beside"]
        add("t, one layer pushed beside a model", beside_model, ("pushed alone", millis["one"]), None)
        add("c, one layer computed", layer, ("t", beside_model), None)
        least = [sum(pair) for pair in zip(millis["compute"], beside_model, strict=True)]
        for name in ("push at the end", "LayerSynchronizer", "LayerGate"):
            wanted = name == "LayerGate" and self._path != "tcp"
            beside = f"{self._count} c + t", least
            add(name, millis[name], beside, _OVERLAP_TARGET if wanted else None)

    def _run(self, computed: Callable[[int], object]) -> None:
        for layer in range(self._count):
            self._model.compute_layer()
            computed(layer)

    async def _compute(self) -> float:
        began = perf_counter()
        await asyncio.to_thread(self._run, int)
        return perf_counter() - began

    def _pushed(self, layers: range) -> Callable[[], Awaitable[float]]:
        async def step() -> float:
            began = perf_counter()
            await self._caches.push_blocks(
                self._site.key,
                self._site.cache,
                self._site.here.index,
                self._site.remote.index,
                src_layer_range=layers,
                dst_layer_range=layers,
                tensor_num_per_layer=1,
            )
            return perf_counter() - began

        return step

    async def _one(self) -> float:
        layers = [number % self._count for number in range(_PUSHES)]
        return float(np.median([await self._pushed(range(layer, layer + 1))() for layer in layers]))

    async def _one_beside(self) -> float:
        """Push one layer while a model computes: what is left of the machine then is what pushing has."""
        ended = threading.Event()

        def compute() -> None:
            while not ended.is_set():
                self._model.compute_some()

        model = asyncio.create_task(asyncio.to_thread(compute))
        try:
            return await self._one()
        finally:
            ended.set()
            await model

    async def _at_the_end(self) -> float:
        return await self._compute() + await self._pushed(range(self._count))()

    async def _gate(self) -> float:
        gate = adt.LayerGate(self._count)
        return await self._overlapped(gate, gate.record)

    async def _synchronizer(self) -> float:
        synchronizer = _Synchronizer(self._count)
        return await self._overlapped(synchronizer, lambda layer: synchronizer.computed[layer].set())

    async def _overlapped(self, source: LayerSource, computed: Callable[[int], object]) -> float:
        began = perf_counter()
        task = self._start(source)
        await asyncio.to_thread(self._run, computed)
        await task
        took = perf_counter() - began
        task.raise_for_errors()
        return took


# Recording. -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Records:
    """Nanoseconds of one round.

    Attributes
    ----------
    calls : list of int
        What `LayerGate.record` took.
    landings : list of int
        From its beginning until all bytes of the layer were visible at the peer.
    hops : list of int
        From a ``call_soon_threadsafe`` in the same thread until the event loop made the call.
    """

    calls: list[int] = field(default_factory=list)
    landings: list[int] = field(default_factory=list)
    hops: list[int] = field(default_factory=list)


_SPIN: Final = """
import os
parent = os.getppid()
print(flush=True)
while os.getppid() == parent:
    for _ in range(100_000):
        pass
"""


@contextlib.contextmanager
def _busy_cores() -> Iterator[None]:
    """Have other processes that never sleep around the body, as many as there are cores."""
    with contextlib.ExitStack() as stack:
        spinners = []
        for _ in os.sched_getaffinity(0):
            command = [sys.executable, "-S", "-c", _SPIN]
            spinners.append(stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE)))
            stack.callback(spinners[-1].kill)
        for spinner in spinners:
            assert spinner.stdout is not None
            spinner.stdout.readline()
        yield


class _Recording(_Layers):
    """Small layers, recorded by a thread that runs pure Python and so keeps the GIL."""

    def __init__(self, session: Session, site: Site, path: str, rows: Rows, other: Site) -> None:
        super().__init__(session, site, path, rows)
        self._other = other
        self._last = other.here.words[other.here.index[-1]]

    async def measure(self, scale: LayersScale) -> None:
        async def alone() -> _Records:
            return await self._alone(scale.records)

        async def copying() -> _Records:
            return await self._beside_pulls(scale.records)

        async def crowded() -> _Records:
            with _busy_cores():
                return await self._alone(scale.records)

        await self._verify("recorded layers", alone)
        await self._verify("layers recorded beside a pull", copying)
        steps = {"GIL kept": alone, "GIL kept, copying": copying, "GIL kept, cores busy": crowded}
        found = await in_turn(steps, scale.repeat)
        for when, rounds in found.items():
            for percent in (50, 99):
                self._add(f"record p{percent}, {when}", [each.calls for each in rounds], percent)
        for when, rounds in found.items():
            for percent in (50, 99):
                self._add(f"record to landed p{percent}, {when}", [each.landings for each in rounds], percent)
        for when, rounds in found.items():
            self._add(f"a hop to the event loop, {when}", [each.hops for each in rounds], 50)

    def _add(self, name: str, rounds: Sequence[Sequence[int]], percent: int) -> None:
        micros = [float(np.percentile(each, percent)) / 1e3 for each in rounds]
        limited = name.startswith("record p99")
        limit = ("1 ms", [_RECORD_MICROS]) if limited else None
        name = f"layerwise {name}"
        self._rows.add(name, self._path, _RECORD_BLOCK, micros, "us", "lower", limit, 1.0 if limited else None)

    async def _alone(self, wanted: int) -> _Records:
        records = _Records()
        while len(records.calls) < wanted:
            await self._round(lambda: True, records)
        return records

    async def _beside_pulls(self, wanted: int) -> _Records:
        """Record while pulls are under way: their last block has not come."""
        records = _Records()
        while len(records.calls) < wanted:
            self._last[:] = 0
            pull = self._other.move("pull")
            await self._round(lambda: not self._last[-1], records)
            await pull
        return records

    async def _round(self, going: Callable[[], bool], records: _Records) -> None:
        gate = adt.LayerGate(self._count)
        task = self._start(gate)
        counted = await asyncio.to_thread(self._record, gate, going, records, asyncio.get_running_loop())
        await task
        task.raise_for_errors()
        landed = {layer: elapsed for (_, layer), elapsed in zip(task._log, task._times, strict=True)}
        records.landings.extend(landed[layer] for layer in range(counted))

    def _record(
        self, gate: adt.LayerGate, going: Callable[[], bool], records: _Records, loop: asyncio.AbstractEventLoop
    ) -> int:
        """Record one layer, more while `going`, and then what is left; return how many count."""
        asked = perf_counter_ns()
        loop.call_soon_threadsafe(lambda: records.hops.append(perf_counter_ns() - asked))
        counted = 0
        while counted < self._count and (going() or not counted):
            began = perf_counter_ns()
            gate.record(counted)
            records.calls.append(perf_counter_ns() - began)
            counted += 1
            until = perf_counter_ns() + _GAP_NS
            while perf_counter_ns() < until and going():
                pass
        for layer in range(counted, self._count):
            gate.record(layer)
        return counted
