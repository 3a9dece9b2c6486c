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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

import aiodatadist as adt
from aiodatadist.model import TENSORS_PER_LAYER, KVCache, Model, block_digests, find_model, one_blas_thread

from .demo_messages import (
    BLOCK_SIZE,
    DECODE_ID,
    PREFILL_ID,
    Arrived,
    CacheDigest,
    Computed,
    DecodeJob,
    Digests,
    Finish,
    FirstToken,
    Generated,
    Handoff,
    Landing,
    Linked,
    Listening,
    Load,
    Loaded,
    Measured,
    Message,
    Offer,
    Order,
    Places,
    Prefilled,
    PrefillJob,
    ReferenceJob,
    Repeat,
    Repeated,
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
Choose: TypeAlias = "Callable[[int, list[int]], Request]"
R = TypeVar("R")

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
    # tcp stays second: a link that cannot use what was asked for then exists, and can say why it does not.
    transports = ("tcp",) if transport == "tcp" else (transport, "tcp")
    if transport != "verbs":
        return adt.Config(transports=transports)
    # The environment names the NICs. The demo's own limit is enough: devices in software are slow.
    return adt.Config.from_env(transports=transports, transfer_timeout=None)


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


def _now() -> float:
    return time.clock_gettime(time.CLOCK_MONOTONIC)


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
        await cache.ready()
        console.report(Listening(str(dd.listen_address)))
        if job.mode == "pull":
            await _prefill_then_hand_over(console, model, job, dd, events, cache, blocks)
        else:
            await _prefill_layer_by_layer(console, model, job, dd, events, cache, blocks)


async def _until_linked(events: adt.EventStream) -> None:
    async with asyncio.timeout(_STEP):
        async for event in events:
            if isinstance(event, adt.LinkStateChanged) and event.new is adt.LinkState.READY:
                break


async def _tell_decode_node(dd: adt.DataDist, cache: adt.Cache, message: Handoff | Offer | FirstToken) -> None:
    # A push of no blocks is only its notification.
    await dd.cache_manager.push_blocks(DECODE_CACHE, cache, [], [], notify=msgspec.msgpack.encode(message))


async def _prefill_then_hand_over(
    console: Console,
    model: Model,
    job: PrefillJob,
    dd: adt.DataDist,
    events: adt.EventStream,
    cache: adt.Cache,
    blocks: list[int],
) -> None:
    kv: KVCache = cache.tensors
    began = time.perf_counter()
    # A thread: the event loop of a serving node must not stand still while the model computes.
    logits = await asyncio.to_thread(model.prefill, job.tokens, kv, blocks)
    seconds = time.perf_counter() - began
    console.report(Prefilled(blocks, model.config.layers, seconds, _digests(kv, blocks), []))
    await _until_linked(events)
    await _tell_decode_node(dd, cache, Handoff(int(np.argmax(logits)), len(job.tokens), blocks))
    async with asyncio.timeout(_STEP):
        async for _ in dd.notifications():
            break  # the decode node has its blocks: from here on a real node may reuse them
    while not isinstance(await console.order(), Finish):
        digest = await asyncio.to_thread(_cache_digest, kv, np.arange(len(kv[0])))
        console.report(CacheDigest(digest))


async def _prefill_layer_by_layer(
    console: Console,
    model: Model,
    job: PrefillJob,
    dd: adt.DataDist,
    events: adt.EventStream,
    cache: adt.Cache,
    blocks: list[int],
) -> None:
    kv: KVCache = cache.tensors
    notes = dd.notifications()

    def compute(on_layer: Callable[[int], None]) -> tuple[int, float]:
        began = time.perf_counter()
        logits = model.prefill(job.tokens, kv, blocks, on_layer=on_layer)
        return int(np.argmax(logits)), time.perf_counter() - began

    async def answer() -> tuple[tuple[int, float], list[float]]:
        async with asyncio.timeout(_STEP):
            payload = (await anext(notes)).payload
        places = msgspec.msgpack.decode(payload, type=Places)
        return await push_layers(dd.cache_manager, cache, compute, blocks, places)

    await _until_linked(events)
    await _tell_decode_node(dd, cache, Offer(len(job.tokens)))
    (token, seconds), computed = await answer()
    await _tell_decode_node(dd, cache, FirstToken(token))
    console.report(Prefilled(blocks, model.config.layers, seconds, _digests(kv, blocks), computed))
    while isinstance(order := await console.order(), Repeat):
        rounds = [(await answer())[1] for _ in range(2 * order.pairs)]
        console.report(Computed(rounds))


async def push_layers(
    caches: adt.CacheManager,
    cache: adt.Cache,
    compute: Callable[[Callable[[int], None]], R],
    blocks: list[int],
    places: Places,
) -> tuple[R, list[float]]:
    """Compute in a thread, and push each layer from there as soon as its keys and values are in the cache.

    Parameters
    ----------
    caches, cache
        Of the prefill node.
    compute : callable
        Called in a thread, with what it shall call after each layer.
    blocks : list of int
        What to push.
    places : Places
        Where to.

    Returns
    -------
    result
        Of `compute`.
    computed : list of float
        When each layer was in the cache.
    """
    layers = cache.geometry.num_tensors // TENSORS_PER_LAYER
    gate = adt.LayerGate(layers)
    computed: list[float] = []

    def on_layer(layer: int) -> None:
        computed.append(_now())
        if not places.at_end:
            gate.record(layer)
        elif len(computed) == layers:
            for each in range(layers):
                gate.record(each)

    wanted = [range(first, end) for first, end in places.layers]
    task = caches.transfer_cache_async(
        cache,
        gate,
        [adt.TransferWithCacheKeyConfig(DECODE_CACHE, part, part) for part in wanted],
        blocks,
        places.blocks,
        tensor_num_per_layer=TENSORS_PER_LAYER,
        timeout=None,  # how long the model takes is not known; the node itself has a limit
    )
    result = await asyncio.to_thread(compute, on_layer)
    await task
    task.raise_for_errors()
    return result, computed


# Decode. ----------------------------------------------------------------------------------------------------


async def decode(console: Console, model: Model, num_blocks: int, job: DecodeJob) -> None:
    """Take the blocks that the prefill node hands over into others, and go on generating from them."""
    rng = random.Random(job.layout_seed)
    config = _config(job.transport)

    def choose(length: int, avoid: list[int]) -> Request:
        free = list(set(range(num_blocks)) - set(avoid))
        table = rng.sample(free, -(-(length + job.max_new_tokens) // BLOCK_SIZE))
        count = -(-length // BLOCK_SIZE)
        return Request(length, table, table[:count], Damage(job.control, rng, model.config.layers, count))

    async with adt.DataDist(DECODE_ID, adt.Role.DECODE, config=config) as dd:
        cache = _register(dd, model, num_blocks, job.memory, DECODE_CACHE)
        kv: KVCache = cache.tensors
        for tensor in kv:
            tensor.fill(np.nan)  # a block that does not arrive shows in every token after it
        await cache.ready()
        events = dd.events()
        began = time.perf_counter()
        link = await dd.link(adt.ClusterInfo(PREFILL_ID, job.address))
        seconds = time.perf_counter() - began
        remote = link.table[PREFILL_CACHE]
        if remote.native is None:
            raise remote.error or adt.TransportError("the prefill node's cache cannot be reached")
        native = remote.native
        console.report(Linked(seconds, str(link.path), native.path, native.reasons, list(config.transports)))

        if job.mode == "pull":
            request = await _pull_blocks(dd, cache, choose)
        else:
            request = await _take_layers(dd, events, cache, choose)
        blocks, damage = request.blocks, request.damage
        damage.after(kv, blocks)
        digests = _digests(kv, blocks)
        console.report(
            Arrived(
                blocks, request.nbytes, request.seconds, request.received, digests, damage.text, request.landings
            )
        )  # fmt: skip

        began = time.perf_counter()
        tokens = await asyncio.to_thread(
            model.decode_greedy, request.first_token, request.length, kv, request.table, job.max_new_tokens
        )
        console.report(Generated(tokens, time.perf_counter() - began))
        while not isinstance(order := await console.order(), Finish):
            if isinstance(order, Repeat):
                console.report(await _repeat(dd, events, cache, blocks, order.pairs))
            else:
                console.report(await _measure(dd.cache_manager, cache, request.there))


@dataclass
class Request:
    """What the decode node knows of its request.

    Attributes
    ----------
    length : int
        Tokens of the prompt.
    table, blocks : list of int
        The blocks of prompt and continuation, and those of the prompt.
    damage : Damage
    there : list of int
        When pulling, where the prompt lies in the prefill node's cache.
    first_token, nbytes, seconds, received, landings
        As in `FirstToken` and `Arrived`.
    """

    length: int
    table: list[int]
    blocks: list[int]
    damage: Damage
    there: list[int] = field(default_factory=list)
    first_token: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    received: int = 0
    landings: list[Landing] = field(default_factory=list)


async def _hear(dd: adt.DataDist) -> bytes:
    async with asyncio.timeout(_STEP):
        return (await anext(aiter(dd.notifications()))).payload


async def _pull_blocks(dd: adt.DataDist, cache: adt.Cache, choose: Choose) -> Request:
    """Pull what the prefill node hands over."""
    payload = await _hear(dd)
    handoff = msgspec.msgpack.decode(payload, type=Handoff)
    request = choose(handoff.length, handoff.blocks)
    request.there = handoff.blocks
    request.first_token = handoff.first_token
    request.received = len(payload)
    began = time.perf_counter()
    request.nbytes = await _pull(dd.cache_manager, cache, handoff.blocks, request.blocks, request.damage)
    request.seconds = time.perf_counter() - began
    return request


async def _take_layers(dd: adt.DataDist, events: adt.EventStream, cache: adt.Cache, choose: Choose) -> Request:
    """Say where the layers shall go, wait for them, and for the first token."""
    offer = await _hear(dd)
    request = choose(msgspec.msgpack.decode(offer, type=Offer).length, [])
    layers, dropped = cache.geometry.num_tensors // TENSORS_PER_LAYER, request.damage.dropped_layer
    wanted = [(0, layers)]
    if dropped is not None:
        wanted = [(first, end) for first, end in ((0, dropped), (dropped + 1, layers)) if first < end]
    count = sum(end - first for first, end in wanted)
    began = time.perf_counter()
    await _tell_prefill_node(dd, cache, Places(request.damage.swap(request.blocks), wanted))
    request.landings = await _landings(events, count)
    request.seconds = time.perf_counter() - began
    request.nbytes = count * TENSORS_PER_LAYER * len(request.blocks) * cache.geometry.block_bytes
    token = await _hear(dd)
    request.first_token = msgspec.msgpack.decode(token, type=FirstToken).token
    request.received = len(offer) + len(token)
    return request


async def _tell_prefill_node(dd: adt.DataDist, cache: adt.Cache, places: Places) -> None:
    # A pull of no blocks is only its notification.
    await dd.cache_manager.pull_blocks(PREFILL_CACHE, cache, [], [], notify=msgspec.msgpack.encode(places))


async def _landings(events: adt.EventStream, count: int) -> list[Landing]:
    """Wait for as many layers, for as long as the prefill takes: only the end of the link ends it."""
    landings: list[Landing] = []
    while len(landings) < count:
        event = await anext(events)
        if isinstance(event, adt.LayerArrived):
            landings.append((event.layer, _now()))
        elif isinstance(event, adt.LinkStateChanged) and event.new in (adt.LinkState.BROKEN, adt.LinkState.CLOSED):
            raise adt.PeerLostError(
                f"{len(landings)} of {count} layers came before the link ended: {event.reason}", peer=event.cluster_id
            )
    return landings


async def _repeat(
    dd: adt.DataDist, events: adt.EventStream, cache: adt.Cache, blocks: list[int], pairs: int
) -> Repeated:
    """Have the prompt computed and pushed again, into emptied blocks: layer by layer, and at the end, by turns."""
    layers = cache.geometry.num_tensors // TENSORS_PER_LAYER
    rounds, digests = [], []
    for turn in range(2 * pairs):
        for tensor in cache.tensors:
            tensor[blocks] = np.nan
        await _tell_prefill_node(dd, cache, Places(blocks, [(0, layers)], at_end=turn % 2 == 1))
        rounds.append(await _landings(events, layers))
        digests.append(_digests(cache.tensors, blocks))
    return Repeated(rounds, digests)


async def _pull(caches: adt.CacheManager, cache: adt.Cache, src: list[int], dst: list[int], damage: Damage) -> int:
    """Pull the blocks and tell the prefill node that they are here. Returns the bytes moved."""
    done = b"pulled"
    dst = damage.swap(dst)
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
    """The damage of ``--control``: swapped blocks and a dropped layer in the transfer, the others after it.

    Attributes
    ----------
    text : str
        What is done, for people.
    dropped_layer : int or None
        Layer that is not transferred.
    """

    def __init__(self, control: str | None, rng: random.Random, layers: int, blocks: int) -> None:
        self._swapped: tuple[int, int] | None = None
        self.dropped_layer: int | None = None
        self.text = ""
        self._control = control
        self._layer, self._block = rng.randrange(layers), rng.randrange(blocks)
        if control == "flip-byte":
            self.text = f"flipped one byte of V in layer {self._layer}, block {self._block}"
        elif control == "swap-blocks":
            a, b = sorted(rng.sample(range(blocks), 2))
            self._swapped = a, b
            self.text = f"swapped blocks {a} and {b} in all layers"
        elif control == "drop-layer":
            self.dropped_layer = self._layer
            self.text = f"left out layer {self._layer}"
        elif control == "zero":
            self.text = f"zeroed block {self._block} in all layers"

    def swap(self, blocks: list[int]) -> list[int]:
        """Return where to transfer to instead of `blocks`."""
        blocks = blocks.copy()
        if self._swapped is not None:
            a, b = self._swapped
            blocks[a], blocks[b] = blocks[b], blocks[a]
        return blocks

    def after(self, kv: KVCache, blocks: list[int]) -> None:
        """Damage what has arrived."""
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
    # In the order of the prefill node's blocks. No argsort: numpy's uses AVX2, which some emulated processors do wrong.
    lies = np.empty_like(dst)
    lies[src] = dst
    digest = await asyncio.to_thread(_cache_digest, cache.tensors, lies)
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
