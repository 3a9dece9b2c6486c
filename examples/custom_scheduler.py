"""A scheduler with a loop of its own, and no event loop: aiodatadist behind anyio's blocking portal.

    python examples/custom_scheduler.py                    # starts a prefill process, schedules some requests, checks

The scheduler is an ordinary synchronous loop: it admits requests while blocks are free, runs the model for those whose
KV cache has arrived, and gives blocks back. The event loop lives in a thread of the portal. The two halves meet in two
places only: `Mover.submit`, one call for all that a step starts and aborts, and `Mover.ended`, a queue of ends.

What to look at is `Scheduler.collect`: blocks go back to the allocator when the *end* of their transfer was reported,
never when it was asked to end. There is no model in here: the prefill side writes values that follow from the number
of the block, and "decoding" reads them. Freed blocks are filled with a pattern, which must still be there when they are
taken again: a late write would show.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import queue
import random
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from anyio.from_thread import BlockingPortal, start_blocking_portal

import aiodatadist as adt

PREFILL, DECODE = 1, 2  # cluster ids
KEY = adt.BlocksCacheKey(PREFILL)
TENSORS = 8  # K and V of four layers
BLOCK_SHAPE = (16, 8, 128)  # tokens, heads, head size; 64 KiB of uint32 in each tensor
PREFILL_BLOCKS, DECODE_BLOCKS = 64, 96
FREED = 0xFFFFFFFF
LAST_WORD = b"that is all"


def content(block: int, tensor: int) -> int:
    """Return what each word of a block holds on the prefill side."""
    return block * TENSORS + tensor


# The prefill process: asyncio as usual. -----------------------------------------------------------------------


async def prefill(config: adt.Config) -> None:
    async with adt.DataDist(PREFILL, adt.Role.PROMPT, listen="127.0.0.1:0", config=config) as dd:
        desc = adt.CacheDesc(TENSORS, (PREFILL_BLOCKS, *BLOCK_SHAPE), "uint32")
        kv = dd.cache_manager.allocate_blocks_cache(desc, key=KEY, remote="r")
        for index, tensor in enumerate(kv.tensors):
            for block in range(PREFILL_BLOCKS):
                tensor[block] = content(block, index)
        await kv.ready()
        print(f"listening on {dd.listen_address}", flush=True)
        fetched = 0
        async for note in dd.notifications():
            if note.payload == LAST_WORD:
                break
            fetched += 1  # here the blocks of this request would be freed
        print(f"{fetched} requests were fetched", flush=True)


@contextlib.contextmanager
def prefill_process(transports: str) -> Iterator[subprocess.Popen[str]]:
    this = (sys.executable, __file__, "--transports", transports)
    with subprocess.Popen([*this, "--prefill"], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
            process.wait(timeout=30)
        finally:
            process.kill()


# The asynchronous half. ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pull:
    """What the scheduler wants moved."""

    number: int
    src_blocks: list[int]
    dst_blocks: list[int]


@dataclass(frozen=True)
class Ended:
    """A transfer is over, and nobody touches its blocks any more."""

    number: int
    aborted: bool
    error: BaseException | None


class Mover:
    """Pulls for a scheduler in another thread. What has an underscore runs in the portal's thread."""

    def __init__(self, portal: BlockingPortal, dd: adt.DataDist, kv: adt.Cache) -> None:
        self.ended: queue.SimpleQueue[Ended] = queue.SimpleQueue()
        self._portal = portal
        self._caches = dd.cache_manager
        self._kv = kv
        self._running: dict[int, adt.Transfer[None]] = {}

    def submit(self, pulls: list[Pull], aborts: list[int]) -> None:
        """Start pulls and abort others: one visit to the other thread, however many there are."""
        if pulls or aborts:
            self._portal.call(self._submit, pulls, aborts)

    def _submit(self, pulls: list[Pull], aborts: list[int]) -> None:
        for pull in pulls:
            try:
                transfer = self._caches.pull_blocks(
                    KEY, self._kv, pull.src_blocks, pull.dst_blocks, notify=b"%d" % pull.number
                )
            except adt.DataDistError as error:  # the link is down, perhaps: nothing was started
                self.ended.put(Ended(pull.number, False, error))
                continue
            self._running[pull.number] = transfer
            # A transfer is a future: no task is needed to wait for it.
            transfer.add_done_callback(functools.partial(self._on_done, pull.number))
        for number in aborts:
            if number in self._running:
                self._running[number].cancel()

    def _on_done(self, number: int, transfer: asyncio.Future[None]) -> None:
        del self._running[number]
        aborted = transfer.cancelled()
        self.ended.put(Ended(number, aborted, None if aborted else transfer.exception()))


# The synchronous half. ----------------------------------------------------------------------------------------


class Blocks:
    """Allocates block numbers, and sees to it that free blocks stay as they are."""

    def __init__(self, tensors: list[np.ndarray[Any, Any]]) -> None:
        self.tensors = tensors
        self.free = deque(range(DECODE_BLOCKS))
        for tensor in tensors:
            tensor[:] = FREED

    def take(self, count: int) -> list[int] | None:
        if count > len(self.free):
            return None
        taken = [self.free.popleft() for _ in range(count)]
        for tensor in self.tensors:
            if not (tensor[taken] == FREED).all():
                raise RuntimeError(f"somebody wrote into one of the free blocks {taken}")
        return taken

    def give(self, blocks: list[int]) -> None:
        for tensor in self.tensors:
            tensor[blocks] = FREED
        self.free += blocks


@dataclass
class Request:
    number: int
    src_blocks: list[int]  # where the prefill side has put it: whoever routes requests knows
    steps: int  # that it wants of the model
    hangs_up_after: int | None  # steps of the scheduler after its pull began; None: it stays
    blocks: list[int] = field(default_factory=list)


@dataclass
class Tally:
    finished: int = 0
    hung_up: int = 0  # of them, some in the middle of their pull:
    aborted_pulls: int = 0
    failed: int = 0


class Scheduler:
    """The loop: `step` again and again until it returns False."""

    def __init__(self, mover: Mover, tensors: list[np.ndarray[Any, Any]]) -> None:
        self.mover = mover
        self.blocks = Blocks(tensors)
        self.waiting: deque[Request] = deque()
        self.pulling: dict[int, Request] = {}
        self.leaving: dict[int, Request] = {}  # told to abort, and not quiet yet
        self.running: dict[int, Request] = {}
        self.tally = Tally()

    def step(self) -> bool:
        # With nothing for the model to do, there is nothing to do until a transfer ends.
        self.collect(wait=not self.running and bool(self.pulling or self.leaving))
        self.decode()
        pulls = self.admit()
        self.mover.submit(pulls, self.hang_ups())
        return bool(self.waiting or self.pulling or self.leaving or self.running)

    def collect(self, *, wait: bool) -> None:
        """Take what has ended. Only here do the blocks of a pull change hands."""
        while True:
            try:
                ended = self.mover.ended.get(block=wait, timeout=60.0)
            except queue.Empty:
                if wait:
                    raise RuntimeError("no transfer ends") from None
                return
            wait = False
            request = self.pulling.pop(ended.number, None)
            if request is not None and ended.error is None and not ended.aborted:
                self.running[request.number] = request
                continue
            request = request or self.leaving.pop(ended.number)
            self.blocks.give(request.blocks)
            if ended.error is not None:
                print(f"request {ended.number} failed: {ended.error}", file=sys.stderr)
                self.tally.failed += 1
            self.tally.aborted_pulls += ended.aborted

    def decode(self) -> None:
        """Run the model one step for each request whose KV cache is here."""
        for request in list(self.running.values()):
            for src, dst in zip(request.src_blocks, request.blocks, strict=True):
                for index, tensor in enumerate(self.blocks.tensors):
                    if not (tensor[dst] == content(src, index)).all():
                        raise RuntimeError(f"request {request.number} has the wrong KV cache in block {dst}")
            request.steps -= 1
            if request.steps == 0:
                del self.running[request.number]
                self.blocks.give(request.blocks)
                self.tally.finished += 1

    def admit(self) -> list[Pull]:
        pulls = []
        while self.waiting:
            taken = self.blocks.take(len(self.waiting[0].src_blocks))
            if taken is None:
                break
            request = self.waiting.popleft()
            request.blocks = taken
            self.pulling[request.number] = request
            pulls.append(Pull(request.number, request.src_blocks, taken))
        return pulls

    def hang_ups(self) -> list[int]:
        """Return the pulls to abort: their clients have gone. Their blocks are not free yet."""
        aborts = []
        for request in [*self.pulling.values(), *self.running.values()]:
            if request.hangs_up_after is None:
                continue
            request.hangs_up_after -= 1
            if request.hangs_up_after >= 0:
                continue
            self.tally.hung_up += 1
            if self.running.pop(request.number, None) is not None:
                self.blocks.give(request.blocks)  # its transfer ended long ago
            else:
                self.leaving[request.number] = self.pulling.pop(request.number)
                aborts.append(request.number)
        return aborts


def requests(count: int) -> Iterator[Request]:
    dice = random.Random(5)
    for number in range(1, count + 1):
        src_blocks = dice.sample(range(PREFILL_BLOCKS), dice.randint(1, 32))
        hangs_up_after = dice.randint(0, 2) if number % 4 == 0 else None
        yield Request(number, src_blocks, dice.randint(1, 4), hangs_up_after)


def schedule(count: int, transports: str, config: adt.Config) -> Tally:
    # Left in the opposite order: memory is quiet and the link told before the loop's thread ends.
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(prefill_process(transports))
        assert process.stdout is not None
        said = process.stdout.readline()
        if "listening on " not in said:
            sys.exit("the prefill process did not come up")

        portal = stack.enter_context(start_blocking_portal())
        # Opened in the portal's thread, where it belongs from then on.
        dd = stack.enter_context(portal.wrap_async_context_manager(adt.DataDist(DECODE, config=config)))
        desc = adt.CacheDesc(TENSORS, (DECODE_BLOCKS, *BLOCK_SHAPE), "uint32")
        kv = portal.call(functools.partial(dd.cache_manager.allocate_blocks_cache, desc, remote=None))
        link = portal.call(dd.link, adt.ClusterInfo(PREFILL, said.split()[-1]))
        print(f"linked over {link.path}", flush=True)

        # The tensors are memory: any thread may use them, whenever no transfer does.
        scheduler = Scheduler(Mover(portal, dd, kv), list(kv.tensors))
        scheduler.waiting.extend(requests(count))
        while scheduler.step():
            pass
        if len(scheduler.blocks.free) != DECODE_BLOCKS:
            raise RuntimeError(f"{DECODE_BLOCKS - len(scheduler.blocks.free)} blocks were lost")

        # No blocks, and still a notification: a way to say something to a peer.
        last_word = functools.partial(dd.cache_manager.pull_blocks, KEY, kv, [], [], notify=LAST_WORD)
        portal.call(last_word)
        print(f"prefill: {process.stdout.readline()}", end="", flush=True)
        return scheduler.tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--transports", default="shm,tcp", help="best first")
    parser.add_argument("--prefill", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    config = adt.Config(transports=tuple(options.transports.split(",")))
    if options.prefill:
        asyncio.run(prefill(config))
        return
    tally = schedule(options.requests, options.transports, config)
    print(
        f"{tally.finished} requests finished, every block right; {tally.hung_up} hung up, "
        f"{tally.aborted_pulls} of them during their pull; {tally.failed} failed"
    )
    if tally.failed or tally.finished + tally.hung_up != options.requests:
        sys.exit("not every request came to its end")


if __name__ == "__main__":
    main()
