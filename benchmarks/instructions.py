"""What instructions.sh runs: `measure` under callgrind, `report` behind it.

Both ends of the link are in this one process, so that callgrind sees both. The collector is off while a step is
counted, because it comes when it likes.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

import aiodatadist as adt
from aiodatadist import _core, _limits
from aiodatadist.commands.bench_memory import Half, scattered

BLOCK = 4096
POOL = 8192
BLOCKS = 4096
AWAITS = 512
TASKS = 64


class Counted:
    """Runs steps and notes which of callgrind's counts are theirs."""

    def __init__(self, mark: Callable[[], object]) -> None:
        self._mark = mark
        self.cases: list[dict[str, Any]] = []
        self._marks = 0

    async def step(self, name: str, path: str, unit: str, number: int, step: Callable[[], Awaitable[object]]) -> None:
        """Run a step twice, and count the second time."""
        await step()
        gc.collect()
        gc.disable()
        self._mark()
        await step()
        self._mark()
        gc.enable()
        self._marks += 2
        self.cases.append({"name": name, "path": path, "unit": unit, "number": number, "dump": self._marks})


@asynccontextmanager
async def linked(transport: str, memory: str) -> AsyncIterator[tuple[adt.DataDist, adt.Cache, adt.Cache]]:
    """Two DataDists over a transport, the first one's cache and the second one's."""
    config = adt.Config(transports=(transport,), heartbeat_limit=120.0, link_timeout=120.0, transfer_timeout=None)
    async with (
        adt.DataDist(1, listen="127.0.0.1:0", config=config) as owner,
        adt.DataDist(2, config=config) as user,
    ):
        link = await user.link(adt.ClusterInfo(1, str(owner.listen_address)))
        caches = []
        for dd, key in ((owner, adt.BlocksCacheKey(1)), (user, None)):
            if memory == "library":
                desc = adt.CacheDesc(1, (POOL, BLOCK), "uint8")
                caches.append(dd.cache_manager.allocate_blocks_cache(desc, key=key))
            else:
                caches.append(dd.cache_manager.register_blocks_cache([np.zeros((POOL, BLOCK), np.uint8)], key=key))
            caches[-1].tensors[0][:] = 1
            await caches[-1].ready()
        events = user.events()
        while adt.BlocksCacheKey(1) not in link.table:
            await anext(events)
        yield user, caches[0], caches[1]


async def measure(counted: Counted, path: str) -> None:
    """Count what pulls over a path take."""
    transport, memory = path.partition("-")[0], "library" if path == "shm-mapped" else "ordinary"
    async with linked(transport, memory) as (user, theirs, mine):
        key = adt.BlocksCacheKey(1)
        native = user.links[1].table[key].native
        found = native.path if native is not None else "unreachable"
        if found != path:
            print(f"{path} is left out: it is {found} here", file=sys.stderr)
            return
        there, here = (Half.of(cache.tensors[0], scattered(POOL, BLOCKS, i)) for i, cache in enumerate((theirs, mine)))
        there.fill()
        pull = user.cache_manager.pull_blocks
        pairs = [([int(a)], [int(b)]) for a, b in zip(there.index[:AWAITS], here.index[:AWAITS], strict=True)]

        async def bulk() -> None:
            await pull(key, mine, there.index, here.index)

        async def in_turn(part: list[tuple[list[int], list[int]]] = pairs) -> None:
            for source, target in part:
                await pull(key, mine, source, target)

        async def tasks() -> None:
            async with asyncio.TaskGroup() as group:
                for number in range(TASKS):
                    group.create_task(in_turn(pairs[number::TASKS]))

        async def gathered() -> None:
            for at in range(0, AWAITS, TASKS):
                await asyncio.gather(*(pull(key, mine, *pair) for pair in pairs[at : at + TASKS]))

        await bulk()
        if wrong := here.wrong(there.index):
            raise SystemExit(f"{path}: {wrong} blocks are not what was sent")
        await counted.step("one transfer of many blocks", path, "block", BLOCKS, bulk)
        await counted.step("awaited one by one", path, "transfer", AWAITS, in_turn)
        await counted.step(f"awaited by {TASKS} tasks", path, "transfer", AWAITS, tasks)
        await counted.step(f"awaited by gather of {TASKS}", path, "transfer", AWAITS, gathered)

        async def memcpy() -> None:
            here.copy(there, 1, "memcpy")

        async def stream() -> None:
            here.copy(there, 1, "stream")

        if path == "shm-mapped":
            await counted.step("raw loop: memcpy", path, "block", BLOCKS, memcpy)
            await counted.step("raw loop: copies that bypass the cache", path, "block", BLOCKS, stream)


def report(cases: list[dict[str, Any]], counts: str) -> None:
    """Print what callgrind has counted."""
    print(f"{'what':42}{'path':16}{'instructions':>14}  for each")
    for case in cases:
        text = Path(f"{counts}.{case['dump']}").read_text()
        found = re.search(r"^(?:totals|summary): (\d+)", text, re.M)
        assert found is not None, f"callgrind left no total in {counts}.{case['dump']}"
        print(f"{case['name']:42}{case['path']:16}{int(found[1]) / case['number']:14,.0f}  {case['unit']}")


def main() -> None:
    """Run one of the two halves."""
    if sys.argv[1] == "report":
        report(json.loads(Path(sys.argv[2]).read_text()), sys.argv[3])
        return
    if fault := _limits.build_fault():
        raise SystemExit(f"this is {fault}; count a release build")
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        # Older versions of valgrind (3.19) do not have this system call. The peer whose end it would tell is this very
        # process: a descriptor that is never ready says the same.
        os.pidfd_open = lambda pid, flags=0: os.eventfd(0)
    counted = Counted(ctypes.CDLL(sys.argv[3]).mark)
    for path in ("shm-mapped", "shm-process_vm", "tcp"):
        asyncio.run(measure(counted, path))
    Path(sys.argv[2]).write_text(json.dumps(counted.cases))
    print(f"aiodatadist {adt.__version__}, Python {sys.version.split()[0]}, copies by {_core.copy_kernel()}")


if __name__ == "__main__":
    main()
