"""The demo's child processes: the prefill node, the decode node and the single-process reference.

Started by `demo` as ``python -m aiodatadist.commands.demo_nodes NAME``, with one BLAS thread. Each is told on stdin
which model to load and then its job, which decides what it is, and reports on stdout; a failure ends the process with a
traceback on stderr.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import sys
import time
from pathlib import Path
from typing import Final, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

import aiodatadist as adt
from aiodatadist.model import TENSORS_PER_LAYER, KVCache, Model, block_digests, find_model, one_blas_thread

from .demo_messages import (
    BLOCK_SIZE,
    DECODE_ID,
    PREFILL_ID,
    CacheDigest,
    DecodeJob,
    Digests,
    Finish,
    Generated,
    Handoff,
    Linked,
    Load,
    Loaded,
    Measured,
    Message,
    Order,
    Prefilled,
    PrefillJob,
    Pulled,
    ReferenceJob,
    read_order,
    write,
)

_START_LIMIT: Final = 60.0
"""Seconds until a node is told what to load."""
_STEP: Final = 20.0
"""Seconds for one step that depends on the other node."""
_WHOLE_ROUNDS: Final = 9
_AGAIN_ROUNDS: Final = 50
_MEASURE_SECONDS: Final = 1.0
_LINE_LIMIT: Final = 1 << 20

Indices: TypeAlias = NDArray[np.int64]

PREFILL_CACHE: Final = adt.BlocksCacheKey(PREFILL_ID)
DECODE_CACHE: Final = adt.BlocksCacheKey(DECODE_ID)


class Console:
    """The line to the demo: orders in, reports out."""

    def __init__(self, reader: asyncio.StreamReader, out: int) -> None:
        self._reader = reader
        self._out = out

    @classmethod
    async def open(cls) -> Console:
        """Take stdin and stdout. What else the process prints goes to stderr from now on."""
        out = os.dup(1)
        os.dup2(2, 1)
        reader = asyncio.StreamReader(limit=_LINE_LIMIT)
        # The pipe's own file object: the loop closes it.
        pipe = open(os.dup(0), "rb", buffering=0)  # noqa: ASYNC230, SIM115
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        return cls(reader, out)

    async def order(self) -> Order:
        """Wait for an order. A demo that is gone orders to finish."""
        line = await self._reader.readline()
        return read_order(line) if line else Finish()

    def report(self, message: Message) -> None:
        """Send a report. They are few and short, and the demo always reads: writing them may block."""
        left = memoryview(write(message))
        while left:
            left = left[os.write(self._out, left) :]


def _config(transport: str) -> adt.Config:
    if transport == "auto":
        return adt.Config.from_env()
    # For shm, tcp stays second: a link that cannot use shm then exists, and can say why it does not.
    return adt.Config(transports=("shm", "tcp") if transport == "shm" else ("tcp",))


def _register(dd: adt.DataDist, model: Model, num_blocks: int, memory: str, key: adt.BlocksCacheKey) -> adt.Cache:
    shapes = model.kv_shapes(num_blocks, BLOCK_SIZE)
    if memory == "library":
        return dd.cache_manager.allocate_blocks_cache(adt.CacheDesc(len(shapes), shapes[0], "float32"), key=key)
    return dd.cache_manager.register_blocks_cache([np.empty(shape, np.float32) for shape in shapes], key=key)


def _digests(kv: KVCache, blocks: list[int]) -> Digests:
    # Whole blocks: a transfer that damages the rows behind the prompt's end is damaged, too.
    found = block_digests(kv, blocks, len(blocks) * BLOCK_SIZE)
    return [(digest.layer, digest.logical_block, digest.hexdigest) for digest in found]


def _cache_digest(kv: KVCache, order: Indices) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in kv:
        digest.update(tensor[order].data)
    return digest.hexdigest()


# Prefill. ---------------------------------------------------------------------------------------------------


async def prefill(console: Console, model: Model, num_blocks: int, job: PrefillJob) -> None:
    """Fill a cache from the prompt, hand it over to the decode node, and serve it until the demo ends."""
    rng = np.random.default_rng(job.layout_seed)
    config = _config(job.transport)
    async with adt.DataDist(PREFILL_ID, adt.Role.PREFILL, listen="127.0.0.1:0", config=config) as dd:
        cache = _register(dd, model, num_blocks, job.memory, PREFILL_CACHE)
        kv: KVCache = cache.tensors
        for tensor in kv:
            # As after earlier requests: no block is empty, and each has a digest of its own.
            tensor.reshape(-1).view(np.uint32)[:] = rng.integers(0, 2**32, tensor.size, dtype=np.uint32)
        blocks = rng.permutation(num_blocks)[: -(-len(job.tokens) // BLOCK_SIZE)].tolist()
        events = dd.events()
        began = time.perf_counter()
        # A thread: the event loop of a serving node must not stand still while the model computes.
        logits = await asyncio.to_thread(model.prefill, job.tokens, kv, blocks)
        seconds = time.perf_counter() - began
        await cache.ready()
        console.report(
            Prefilled(
                address=str(dd.listen_address),
                blocks=blocks,
                layers=model.config.layers,
                seconds=seconds,
                digests=_digests(kv, blocks),
            )
        )
        async with asyncio.timeout(_STEP):
            async for event in events:
                if isinstance(event, adt.LinkStateChanged) and event.new is adt.LinkState.READY:
                    break
            handoff = Handoff(int(np.argmax(logits)), len(job.tokens), blocks)
            # A push of no blocks is only its notification.
            await dd.cache_manager.push_blocks(DECODE_CACHE, cache, [], [], notify=msgspec.msgpack.encode(handoff))
            async for _ in dd.notifications():
                break  # the decode node has its blocks: from here on a real node may reuse them
        while not isinstance(await console.order(), Finish):
            digest = await asyncio.to_thread(_cache_digest, kv, np.arange(num_blocks))
            console.report(CacheDigest(digest))


# Decode. ----------------------------------------------------------------------------------------------------


async def decode(console: Console, model: Model, num_blocks: int, job: DecodeJob) -> None:
    """Pull the blocks that the prefill node hands over into others, and go on generating from them."""
    rng = random.Random(job.layout_seed)
    config = _config(job.transport)
    async with adt.DataDist(DECODE_ID, adt.Role.DECODE, config=config) as dd:
        cache = _register(dd, model, num_blocks, job.memory, DECODE_CACHE)
        kv: KVCache = cache.tensors
        for tensor in kv:
            tensor.fill(np.nan)  # a block that does not arrive shows in every token after it
        await cache.ready()
        began = time.perf_counter()
        link = await dd.link(adt.ClusterInfo(PREFILL_ID, job.address))
        seconds = time.perf_counter() - began
        remote = link.table[PREFILL_CACHE]
        if remote.native is None:
            raise remote.error or adt.TransportError("the prefill node's cache cannot be reached")
        native = remote.native
        console.report(Linked(seconds, str(link.path), native.path, native.reasons, list(config.transports)))

        async with asyncio.timeout(_STEP):
            payload = (await anext(aiter(dd.notifications()))).payload
        handoff = msgspec.msgpack.decode(payload, type=Handoff)
        free = list(set(range(num_blocks)) - set(handoff.blocks))
        table = rng.sample(free, -(-(handoff.length + job.max_new_tokens) // BLOCK_SIZE))
        blocks = table[: len(handoff.blocks)]
        damage = Damage(job.control, rng, model.config.layers, len(blocks))
        began = time.perf_counter()
        nbytes = await _pull(dd.cache_manager, cache, handoff.blocks, blocks, damage)
        seconds = time.perf_counter() - began
        damage.after(kv, blocks)
        console.report(Pulled(blocks, nbytes, seconds, len(payload), _digests(kv, blocks), damage.text))

        began = time.perf_counter()
        tokens = await asyncio.to_thread(
            model.decode_greedy, handoff.first_token, handoff.length, kv, table, job.max_new_tokens
        )
        console.report(Generated(tokens, time.perf_counter() - began))
        while not isinstance(await console.order(), Finish):
            console.report(await _measure(dd.cache_manager, cache, handoff.blocks))


async def _pull(caches: adt.CacheManager, cache: adt.Cache, src: list[int], dst: list[int], damage: Damage) -> int:
    """Pull the blocks and tell the prefill node that they are here. Returns the bytes moved."""
    done = b"pulled"
    if damage.swapped is not None:
        a, b = damage.swapped
        dst = dst.copy()
        dst[a], dst[b] = dst[b], dst[a]
    if damage.dropped_layer is None:
        await caches.pull_blocks(PREFILL_CACHE, cache, src, dst, notify=done)
        moved = cache.geometry.num_tensors
    else:
        layers, dropped = cache.geometry.num_tensors // TENSORS_PER_LAYER, damage.dropped_layer
        for part in (range(dropped), range(dropped + 1, layers)):
            if part:
                await caches.pull_blocks(PREFILL_CACHE, cache, src, dst, src_layer_range=part, dst_layer_range=part)
        await caches.pull_blocks(PREFILL_CACHE, cache, [], [], notify=done)
        moved = (layers - 1) * TENSORS_PER_LAYER
    return moved * len(src) * cache.geometry.block_bytes


class Damage:
    """The damage of ``--control``: swapped blocks and a dropped layer in the pull, the others after it.

    Attributes
    ----------
    text : str
        What is done, for people.
    swapped : pair of int or None
        Logical blocks that are pulled into each other's place.
    dropped_layer : int or None
        Layer that is not pulled.
    """

    def __init__(self, control: str | None, rng: random.Random, layers: int, blocks: int) -> None:
        self.swapped: tuple[int, int] | None = None
        self.dropped_layer: int | None = None
        self.text = ""
        self._control = control
        self._layer, self._block = rng.randrange(layers), rng.randrange(blocks)
        if control == "flip-byte":
            self.text = f"flipped one byte of V in layer {self._layer}, block {self._block}"
        elif control == "swap-blocks":
            a, b = sorted(rng.sample(range(blocks), 2))
            self.swapped = a, b
            self.text = f"swapped blocks {a} and {b} in all layers"
        elif control == "drop-layer":
            self.dropped_layer = self._layer
            self.text = f"did not pull layer {self._layer}"
        elif control == "zero":
            self.text = f"zeroed block {self._block} in all layers"

    def after(self, kv: KVCache, blocks: list[int]) -> None:
        """Damage what was pulled."""
        block = blocks[self._block]
        if self._control == "zero":
            for tensor in kv:
                tensor[block] = 0.0
        elif self._control == "flip-byte":
            # In the block's first row, which always belongs to a token; the largest value below 2, whose exponent
            # this bit makes huge. A small change would be noticed as well, but only by its digest.
            values = kv[TENSORS_PER_LAYER * self._layer + 1]
            sizes = np.abs(values[block, 0, 0])
            index = int(np.argmax(np.where(sizes < 2, sizes, -1)))
            high = 3 if sys.byteorder == "little" else 0
            values.view(np.uint8)[block, 0, 0, values.itemsize * index + high] ^= 0x40


async def _measure(caches: adt.CacheManager, cache: adt.Cache, request: list[int]) -> Measured:
    """Pull the whole cache, several times, and the request's blocks: one first pull tells little of the speed."""
    num_blocks = len(cache.tensors[0])
    rng = np.random.default_rng(num_blocks)
    src, dst = rng.permutation(num_blocks), rng.permutation(num_blocks)
    for tensor in cache.tensors:
        tensor.fill(np.nan)
    # The first is the warm-up: it meets pages that nobody has touched.
    _, *whole = await _time_pulls(caches, cache, src, dst, _WHOLE_ROUNDS + 1)
    digest = await asyncio.to_thread(_cache_digest, cache.tensors, dst[np.argsort(src)])
    _, *again = await _time_pulls(caches, cache, request, dst[: len(request)].tolist(), _AGAIN_ROUNDS + 1)
    geometry = cache.geometry
    nbytes = geometry.num_tensors * num_blocks * geometry.block_bytes
    return Measured(again, whole, nbytes, geometry.block_bytes, digest)


async def _time_pulls(
    caches: adt.CacheManager, cache: adt.Cache, src: list[int] | Indices, dst: list[int] | Indices, rounds: int
) -> list[float]:
    """Return the seconds of each pull: `rounds` of them, or at least two, until the time is up."""
    seconds: list[float] = []
    end = time.perf_counter() + _MEASURE_SECONDS
    while len(seconds) < rounds and (len(seconds) < 2 or time.perf_counter() < end):
        began = time.perf_counter()
        await caches.pull_blocks(PREFILL_CACHE, cache, src, dst)
        seconds.append(time.perf_counter() - began)
    return seconds


# Reference. -------------------------------------------------------------------------------------------------


async def reference(console: Console, model: Model, job: ReferenceJob) -> None:
    """Generate in this one process."""
    blocks = -(-(len(job.tokens) + job.max_new_tokens) // BLOCK_SIZE)
    kv = model.allocate_kv(blocks, BLOCK_SIZE)
    began = time.perf_counter()
    tokens = model.generate_greedy(job.tokens, kv, range(blocks), job.max_new_tokens)
    console.report(Generated(tokens, time.perf_counter() - began))
    await console.order()  # to finish


# The process. -----------------------------------------------------------------------------------------------


async def run() -> None:
    """Load the model, take the job and do it."""
    # The demo itself ends earlier: the limits are for a node whose demo is gone.
    async with asyncio.timeout(_START_LIMIT) as until:
        console = await Console.open()
        order = await console.order()
        if not isinstance(order, Load):
            return
        until.reschedule(asyncio.get_running_loop().time() + order.limit)
        began = time.perf_counter()
        cache_dir = None if order.cache_dir is None else Path(order.cache_dir)
        model = await asyncio.to_thread(find_model(order.model, cache_dir).load)
        c = model.config
        console.report(Loaded(time.perf_counter() - began, c.layers, c.d_model, c.heads, c.kv_heads))
        match await console.order():
            case PrefillJob() as job:
                await prefill(console, model, order.num_blocks, job)
            case DecodeJob() as job:
                await decode(console, model, order.num_blocks, job)
            case ReferenceJob() as job:
                await reference(console, model, job)


if __name__ == "__main__":
    # The demo has set variables that say so to every BLAS it knows; where threadpoolctl is installed, it knows more.
    with one_blas_thread():
        asyncio.run(run())
