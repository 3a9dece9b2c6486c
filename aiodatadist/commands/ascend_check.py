"""A run over the transport hixl between two NPUs, step by step, for people who have them to report back.

One side serves: it registers memory of its NPU and of its host, fills it as it is told, and says what it finds there.
The other side links it and takes the steps. Everything goes by the public interface; what the two sides tell each other
are notifications.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import time
import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

import aiodatadist as adt
from aiodatadist.errors import DataDistError

from .failure import CommandError

__all__ = ["Memory", "Step", "check", "serve"]

SERVER: Final = 1
CHECKER: Final = 2
TRANSPORTS: Final = ("hixl", "tcp")  # tcp carries host memory where HIXL does not reach it

_NPU, _HOST, _LATE, _CONTROL = range(4)  # models of the caches
_TENSORS, _BLOCKS, _BLOCK_BYTES = 4, 64, 65536
_PATIENCE: Final = 60.0
_NOTE_BYTES: Final = 4096

Ping: TypeAlias = Callable[[Sequence[str]], Awaitable[str | None]]
_SPEED_ROUNDS: Final = 8


class Memory(Protocol):
    """Where the caches of a check lie."""

    placement: adt.Placement

    def take(self, nbytes: int) -> int:
        """Return the address of new memory."""
        ...

    def write(self, address: int, content: bytes) -> None:
        """Copy bytes there."""
        ...

    def read(self, address: int, nbytes: int) -> bytes:
        """Copy bytes from there."""
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the check.

    Attributes
    ----------
    name : str
    outcome : str
        ``"ok"``, ``"FAILED"`` or ``"skipped"``.
    detail : str
        What was found, or what went wrong.
    seconds : float
    """

    name: str
    outcome: str
    detail: str
    seconds: float


class _Blocks:
    """A cache in some memory, and what lies in it."""

    def __init__(self, dd: adt.DataDist, memory: Memory, model: int) -> None:
        self.memory = memory
        nbytes = _BLOCKS * _BLOCK_BYTES
        self.addresses = [memory.take(nbytes) for _ in range(_TENSORS)]
        desc = adt.CacheDesc(_TENSORS, (_BLOCKS, _BLOCK_BYTES), "uint8", placement=memory.placement)
        self.cache = dd.cache_manager.register_blocks_cache(
            self.addresses, desc=desc, key=adt.BlocksCacheKey(dd.cluster_id, model)
        )

    def fill(self, seed: int) -> None:
        """Write bytes that follow from a number."""
        for address, content in zip(self.addresses, _content(seed), strict=True):
            self.memory.write(address, content)

    def sums(self, blocks: Sequence[int]) -> list[int]:
        """Return a checksum of each tensor's blocks."""
        read = self.memory.read
        return [
            zlib.crc32(b"".join(read(address + block * _BLOCK_BYTES, _BLOCK_BYTES) for block in blocks))
            for address in self.addresses
        ]


@functools.lru_cache(maxsize=2)
def _content(seed: int) -> list[bytes]:
    random = np.random.default_rng(seed)
    return [random.bytes(_BLOCKS * _BLOCK_BYTES) for _ in range(_TENSORS)]


def _expected(seed: int, blocks: Sequence[int]) -> list[int]:
    """Return the checksums that `_Blocks.sums` has where these blocks of `fill(seed)` arrived."""
    return [
        zlib.crc32(b"".join(tensor[block * _BLOCK_BYTES : (block + 1) * _BLOCK_BYTES] for block in blocks))
        for tensor in _content(seed)
    ]


class _Talk:
    """Questions and answers by notifications."""

    def __init__(self, dd: adt.DataDist, host: Memory, peer: int) -> None:
        self._caches = dd.cache_manager
        self._peer = adt.BlocksCacheKey(peer, _CONTROL)
        # Of the kind that HIXL takes everywhere: other host memory could keep it from connecting.
        self._own = self._caches.register_blocks_cache(
            [host.take(_NOTE_BYTES)],
            desc=adt.CacheDesc(1, (1, _NOTE_BYTES), "uint8"),
            key=adt.BlocksCacheKey(dd.cluster_id, _CONTROL),
        )
        self._notes = dd.notifications()

    async def tell(self, **message: Any) -> None:
        """Send a message: with a push of no blocks at all."""
        async with asyncio.timeout(_PATIENCE):
            while True:
                try:
                    await self._caches.push_blocks(self._peer, self._own, [], [], notify=json.dumps(message).encode())
                    return
                except adt.CacheNotFound:
                    await asyncio.sleep(0.05)  # the peer has not announced it yet

    async def hear(self) -> dict[str, Any]:
        """Wait for a message."""
        note = await anext(self._notes)
        message: dict[str, Any] = json.loads(note.payload)
        return message

    async def ask(self, **message: Any) -> Any:
        """Send a question, and wait for its answer."""
        await self.tell(**message)
        async with asyncio.timeout(_PATIENCE):
            answer = await self.hear()
        if "error" in answer:
            raise CommandError(f"the peer says: {answer['error']}")
        return answer["answer"]


# The side that serves. --------------------------------------------------------------------------------------


async def serve(
    config: adt.Config,
    listen: str,
    npu: Memory,
    host: Memory,
    about: dict[str, Any],
    ready: Callable[[str], None],
) -> None:
    """Serve one check, until its other side says that it is over.

    Parameters
    ----------
    config : Config
    listen : str
        Address; port 0: any.
    npu, host : Memory
    about : dict
        What this side says about itself.
    ready : callable
        Called with the address once the other side may come.

    Raises
    ------
    DataDistError, CommandError
        It cannot serve.
    """
    async with adt.DataDist(SERVER, adt.Role.PROMPT, listen=listen, config=config) as dd:
        caches = {_NPU: _Blocks(dd, npu, _NPU), _HOST: _Blocks(dd, host, _HOST)}
        talk = _Talk(dd, host, CHECKER)
        for blocks in caches.values():
            await blocks.cache.ready()
        ready(str(dd.listen_address))

        async def answer(message: dict[str, Any]) -> Any:
            match message["do"]:
                case "hello":
                    return about
                case "fill":
                    caches[message["model"]].fill(message["seed"])
                case "sums":
                    return caches[message["model"]].sums(message["blocks"])
                case "register":
                    caches[_LATE] = _Blocks(dd, npu, _LATE)
                    caches[_LATE].fill(message["seed"])
                    await caches[_LATE].cache.ready()
                case "unregister":
                    await dd.cache_manager.unregister_cache(caches.pop(_LATE).cache, timeout=_PATIENCE)
            return None

        while True:
            message = await talk.hear()
            if message["do"] == "bye":
                return
            try:
                said = {"answer": await answer(message)}
            except (DataDistError, CommandError, KeyError, TypeError) as why:
                said = {"error": f"{type(why).__name__}: {' '.join(str(why).split())}"}
            # Where the link is gone, the other side says so.
            with contextlib.suppress(DataDistError, TimeoutError):
                await talk.tell(**said)


# The side that checks. --------------------------------------------------------------------------------------


class _Failed(Exception):
    """A step has found something wrong; its text says what."""


class _Skipped(Exception):
    """A step cannot be taken; its text says why."""


class _Check:
    """The steps, in their order."""

    def __init__(self, dd: adt.DataDist, where: str, npu: Memory, host: Memory, ping: Ping) -> None:
        self.dd = dd
        self.caches = dd.cache_manager
        self.info = adt.ClusterInfo(SERVER, where)
        self.npu, self.host = _Blocks(dd, npu, _NPU), _Blocks(dd, host, _HOST)
        self.talk = _Talk(dd, host, SERVER)
        self._ping = ping
        self._seed = int(time.time()) & 0xFFFF
        self._addresses: list[str] = []

    def seed(self) -> int:
        self._seed += 1
        return self._seed

    async def link(self) -> str:
        link = await self.dd.link(self.info, timeout=_PATIENCE)
        if self.npu.memory.placement is adt.Placement.DEVICE and link.path.memory.get("device") != "hixl":
            raise _Failed(f"the link does not reach NPU memory: {link.path}")
        return f"{link.path}"

    async def peer(self) -> str:
        about = await self.talk.ask(do="hello")
        self._addresses = list(about.get("addresses", ()))
        return json.dumps(about)

    async def ping(self) -> str:
        said = await self._ping(self._addresses)
        if said is None:
            raise _Skipped("no hccn_tool here, or the peer's NPU has no address that it knows")
        return said

    async def registered(self) -> str:
        for blocks in (self.npu, self.host):
            await blocks.cache.ready()
        return f"{_TENSORS} tensors of {_BLOCKS} x {_BLOCK_BYTES} bytes on the NPU, and as many in host memory"

    async def pull(self, there: int, here: _Blocks) -> str:
        """Pull blocks in another order, and compare them."""
        seed = self.seed()
        await self.talk.ask(do="fill", model=there, seed=seed)
        source = list(range(0, _BLOCKS, 3))
        target = [_BLOCKS - 1 - block for block in source]
        here.fill(self.seed())
        await self.caches.pull_blocks(adt.BlocksCacheKey(SERVER, there), here.cache, source, target)
        if here.sums(target) != _expected(seed, source):
            raise _Failed("the bytes that arrived are not those that were sent")
        return f"{len(source)} blocks of {_TENSORS} tensors are right"

    async def push(self, there: int, here: _Blocks) -> str:
        """Push blocks in another order, and have the peer look at them."""
        seed = self.seed()
        here.fill(seed)
        source = list(range(1, _BLOCKS, 3))
        target = [_BLOCKS - 1 - block for block in source]
        await self.caches.push_blocks(adt.BlocksCacheKey(SERVER, there), here.cache, source, target)
        if await self.talk.ask(do="sums", model=there, blocks=target) != _expected(seed, source):
            raise _Failed("the bytes that arrived are not those that were sent")
        return f"{len(source)} blocks of {_TENSORS} tensors are right"

    async def layers(self) -> str:
        seed, blocks = self.seed(), list(range(8))
        self.npu.fill(seed)
        gate = adt.LayerGate(_TENSORS // 2)
        key = adt.BlocksCacheKey(SERVER, _NPU)
        whole = adt.TransferWithCacheKeyConfig(key, range(_TENSORS // 2), range(_TENSORS // 2))
        task = self.caches.transfer_cache_async(self.npu.cache, gate, [whole], blocks, blocks)
        for layer in range(_TENSORS // 2):
            gate.record(layer)
        (result,) = await task
        if result.error is not None:
            raise result.error
        if await self.talk.ask(do="sums", model=_NPU, blocks=blocks) != _expected(seed, blocks):
            raise _Failed("the layers that arrived are not those that were sent")
        return f"{result.layers_done} layers are right"

    async def cancel(self) -> str:
        """Cancel one of two pulls: it is quiet then, and the other one is right."""
        seed = self.seed()
        await self.talk.ask(do="fill", model=_NPU, seed=seed)
        half = _BLOCKS // 2
        first, second = list(range(half)), list(range(half, _BLOCKS))
        key = adt.BlocksCacheKey(SERVER, _NPU)
        cancelled = self.caches.pull_blocks(key, self.npu.cache, first, first)
        other = self.caches.pull_blocks(key, self.npu.cache, second, second)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        before = self.npu.sums(first)
        await other
        if self.npu.sums(second) != _expected(seed, second):
            raise _Failed("cancelling one pull has damaged the other one")
        await asyncio.sleep(0.5)
        if self.npu.sums(first) != before:
            raise _Failed("memory changed after the cancelled pull had ended")
        return "ended, quiet, and the other one is right" if cancelled.cancelled() else "it had ended already"

    async def late(self) -> str:
        """Reach a cache that the peer registers on a link that is there."""
        seed = self.seed()
        await self.talk.ask(do="register", seed=seed)
        blocks = list(range(4))
        key = adt.BlocksCacheKey(SERVER, _LATE)
        await self.caches.pull_blocks(key, self.npu.cache, blocks, blocks, wait=True, timeout=_PATIENCE)
        if self.npu.sums(blocks) != _expected(seed, blocks):
            raise _Failed("the bytes that arrived are not those that were sent")
        await self.talk.ask(do="unregister")
        return "registered, pulled from, and taken back while linked"

    async def speed(self) -> str:
        """Measure pulls and pushes of the whole cache."""
        everything = list(range(_BLOCKS))
        key = adt.BlocksCacheKey(SERVER, _NPU)
        moved = _SPEED_ROUNDS * _TENSORS * _BLOCKS * _BLOCK_BYTES
        said = []
        for name, start in (("pulled", self.caches.pull_blocks), ("pushed", self.caches.push_blocks)):
            began = time.perf_counter()
            await asyncio.gather(*(start(key, self.npu.cache, everything, everything) for _ in range(_SPEED_ROUNDS)))
            said.append(f"{name} {moved / (time.perf_counter() - began) / 1e9:.2f} GB/s")
        began = time.perf_counter()
        for _ in range(100):
            await self.caches.pull_blocks(key, self.npu.cache, [0], [0])
        said.append(f"one block {(time.perf_counter() - began) / 100 * 1e6:.0f} us")
        return ", ".join(said)

    async def relink(self) -> str:
        await self.dd.unlink(self.info, timeout=_PATIENCE)
        await self.link()
        return await self.pull(_NPU, self.npu)

    def steps(self) -> list[tuple[str, Callable[[], Awaitable[str]]]]:
        return [
            ("register here", self.registered),
            ("link", self.link),
            ("the other side", self.peer),
            ("hccn_tool ping", self.ping),
            ("pull, NPU to NPU", lambda: self.pull(_NPU, self.npu)),
            ("push, NPU to NPU", lambda: self.push(_NPU, self.npu)),
            ("pull, host to NPU", lambda: self.pull(_HOST, self.npu)),
            ("push, NPU to host", lambda: self.push(_HOST, self.npu)),
            ("pull, NPU to host", lambda: self.pull(_NPU, self.host)),
            ("push, host to NPU", lambda: self.push(_NPU, self.host)),
            ("layer by layer", self.layers),
            ("cancel", self.cancel),
            ("register late", self.late),
            ("speed", self.speed),
            ("unlink and link again", self.relink),
        ]


# Nothing else makes sense after one of them has failed.
_NEEDED: Final = ("register here", "link", "the other side")


async def check(
    config: adt.Config, where: str, npu: Memory, host: Memory, ping: Ping, told: Callable[[Step], None]
) -> list[Step]:
    """Take all steps with a side that serves.

    Parameters
    ----------
    config : Config
    where : str
        Address of the side that serves.
    npu, host : Memory
        Of this side.
    ping : callable
        Pings addresses of the peer's NPU, and returns what came of it; None: it cannot.
    told : callable
        Called with each step when it is over.

    Returns
    -------
    list of Step

    Raises
    ------
    DataDistError
        There is no node on this side.
    """
    done: list[Step] = []
    async with adt.DataDist(CHECKER, adt.Role.DECODER, config=config) as dd:
        run = _Check(dd, where, npu, host, ping)
        over = ""
        for name, take in run.steps():
            step = Step(name, "skipped", over, 0.0) if over else await _taken(name, take)
            done.append(step)
            told(step)
            if step.outcome == "FAILED" and name in _NEEDED:
                over = f"{name} has failed"
        with contextlib.suppress(DataDistError, TimeoutError):
            await run.talk.tell(do="bye")
    return done


async def _taken(name: str, take: Callable[[], Awaitable[str]]) -> Step:
    began = time.perf_counter()
    try:
        async with asyncio.timeout(4 * _PATIENCE):
            detail = await take()
        outcome = "ok"
    except _Skipped as why:
        outcome, detail = "skipped", str(why)
    except (_Failed, CommandError) as why:
        outcome, detail = "FAILED", str(why)
    except (DataDistError, TimeoutError) as why:
        outcome, detail = "FAILED", f"{type(why).__name__}: {' '.join(str(why).split())}"
    return Step(name, outcome, detail, round(time.perf_counter() - began, 3))
