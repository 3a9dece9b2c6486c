"""What runs in the peer processes of the tests; `peers.py` starts them and speaks to them.

One process, the nursery, has imported everything and forks the peers, which so start within milliseconds. It has no
threads and never opens a DataDist itself.

A peer holds one DataDist and its caches by name, and answers commands that come as JSON lines: ``{"id", "do", ...}``
gives ``{"id", "result"}`` or ``{"id", "error"}``. Commands run at the same time, each in a task of its own. The public
coroutine functions of `Peer` are the commands, and their keywords the arguments.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import gc
import itertools
import json
import os
import signal
import socket
import sys
import time
import traceback
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np

import aiodatadist as adt

_PR_SET_PDEATHSIG = 1
_FORKED_CHILD_LIVES = 60.0


class Peer:
    """The commands."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.dd: adt.DataDist | None = None
        self.caches: dict[str, adt.Cache] = {}
        self.values: dict[str, Any] = {"peer": self, "adt": adt, "np": np, "asyncio": asyncio}
        self._traffic: dict[int, tuple[asyncio.Task[None], dict[str, Any]]] = {}
        self._numbers = itertools.count(1)

    @property
    def node(self) -> adt.DataDist:
        assert self.dd is not None, "send open first"
        return self.dd

    # Life.

    async def open(self, cluster_id: int, role: str, listen: str | None, config: dict[str, Any]) -> str | None:
        """Open the DataDist; return where it listens."""
        if "transports" in config:
            config["transports"] = tuple(config["transports"])
        self.dd = adt.DataDist(cluster_id, adt.Role[role.upper()], listen=listen, config=adt.Config(**config))
        await self.dd.open()
        return None if self.dd.listen_address is None else str(self.dd.listen_address)

    async def aclose(self, timeout: float | None = None) -> None:
        await self.node.aclose(timeout)

    async def abort(self) -> None:
        self.node.abort()
        await self.node.wait_closed()

    async def block(self, gate: str, way: str) -> None:
        """Keep the event loop from running until somebody opens the fifo `gate`, and there is a file `gate`.over.

        ``"sleeps"`` in a system call; ``"computes"`` in pure Python, which keeps the GIL busy; ``"holds the GIL"``,
        which is never given up, for anybody.
        """
        Path(f"{gate}.begun").touch()
        match way:
            case "sleeps":
                os.close(os.open(gate, os.O_RDONLY))
            case "computes":
                while not os.path.exists(f"{gate}.over"):
                    sum(range(1000))
            case "holds the GIL":
                os.close(ctypes.PyDLL(None).open(gate.encode(), os.O_RDONLY))
            case _:
                raise ValueError(way)

    async def fork(self) -> int:
        """Fork a child that goes on living when this process dies, as a worker of a framework may; return its pid."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            # Else nobody would see the end of this process. What belongs to the library is not touched here.
            os.close(self.control.fileno())
            time.sleep(_FORKED_CHILD_LIVES)
            os._exit(0)
        return pid

    async def resources(self) -> dict[str, int]:
        """Count what must not grow."""
        gc.collect()
        with open("/proc/self/statm") as statm:
            resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return {
            "fds": len(os.listdir("/proc/self/fd")) - 1,
            "threads": len(os.listdir("/proc/self/task")),
            "resident": resident,
            "maps": sum(1 for _ in open("/proc/self/maps")),
            "cpu_ns": time.process_time_ns(),
        }

    async def run(self, source: str, **values: Any) -> Any:
        """Run the body of a coroutine function with `peer`, `dd`, `adt`, `np`, `asyncio` and `values` in sight.

        What it returns goes back, if JSON can hold it. ``values`` of the module stay from one run to the next.
        """
        body = "".join(f"    {line}\n" for line in source.splitlines()) or "    pass\n"
        scope = {**self.values, "dd": self.dd, "kept": self.values, **values}
        exec(compile(f"async def _main():\n{body}", "<run>", "exec"), scope)
        return await scope["_main"]()

    # Links.

    async def link(self, cluster_id: int, address: str, timeout: float | None = 10.0) -> str:
        """Link; return the transport chosen."""
        link = await self.node.link(adt.ClusterInfo(cluster_id, address), timeout=timeout)
        return link.path.transport

    async def unlink(self, cluster_id: int, timeout: float | None = 10.0, force: bool = False) -> None:
        await self.node.unlink(adt.ClusterInfo(cluster_id), timeout=timeout, force=force)

    async def fence(self, cluster_id: int, timeout: float | None = 10.0) -> None:
        await self.node.fence(cluster_id, timeout=timeout)

    async def stats(self) -> dict[str, Any]:
        stats = self.node.stats()
        stats["links"] = {str(cluster_id): link for cluster_id, link in stats["links"].items()}
        return stats

    # Caches.

    async def cache(
        self,
        name: str,
        tensors: int,
        shape: list[int],
        dtype: str,
        memory: str,
        model_id: int | None,
        remote: str | None,
        value: int,
    ) -> int:
        """Make a cache of which each byte is `value`; return its id."""
        manager = self.node.cache_manager
        key = None if model_id is None else adt.BlocksCacheKey(self.node.cluster_id, model_id=model_id)
        if memory == "library":
            desc = adt.CacheDesc(tensors, tuple(shape), dtype)
            cache = manager.allocate_blocks_cache(desc, key=key, remote=remote)  # type: ignore[arg-type]
        else:
            arrays = [np.empty(shape, dtype) for _ in range(tensors)]
            cache = manager.register_blocks_cache(arrays, key=key, remote=remote)  # type: ignore[arg-type]
        self.caches[name] = cache
        await self.fill(name, value)
        await cache.ready()
        return cache.id

    async def unregister(self, name: str, timeout: float | None = None) -> None:
        cache = self.caches[name]
        await self.node.cache_manager.unregister_cache(cache, timeout=timeout)
        self.caches.pop(name, None)

    async def fill(self, name: str, value: int, blocks: list[int] | None = None) -> None:
        """Set each byte of the blocks, or of all."""
        for rows in self._rows(name):
            rows[slice(None) if blocks is None else blocks] = value

    async def fill_random(self, name: str, seed: int) -> None:
        """Fill the cache with bytes that depend on the seed: see `peers.random_bytes`."""
        for index, rows in enumerate(self._rows(name)):
            rows[:] = np.random.default_rng((seed, index)).integers(0, 256, rows.shape, np.uint8)

    async def checksums(self, name: str, blocks: list[int] | None = None) -> list[list[int]]:
        """Return crc32 of each block, a list for each tensor."""
        return [
            [zlib.crc32(rows[block].tobytes()) for block in (range(len(rows)) if blocks is None else blocks)]
            for rows in self._rows(name)
        ]

    async def count(self, name: str, value: int, blocks: list[int] | None = None) -> int:
        """Return how many bytes of the blocks have this value."""
        found = 0
        for rows in self._rows(name):
            found += int(np.count_nonzero((rows if blocks is None else rows[blocks]) == value))
        return found

    def _rows(self, name: str) -> list[np.ndarray[Any, Any]]:
        """Return the tensors as bytes, a row for each block."""
        found = []
        for tensor in self.caches[name].tensors:
            rows = tensor.view(np.uint8).reshape(len(tensor), -1)
            assert np.shares_memory(rows, tensor)
            found.append(rows)
        return found

    # Transfers.

    def _start(
        self,
        kind: str,
        name: str,
        cluster_id: int,
        model_id: int,
        blocks: list[list[int]] | None,
        timeout: float | None,
        notify: str | None = None,
    ) -> adt.Transfer[None]:
        cache = self.caches[name]
        src, dst = blocks if blocks is not None else [list(range(cache.geometry.shape[0]))] * 2
        manager = self.node.cache_manager
        start = manager.pull_blocks if kind == "pull" else manager.push_blocks
        key = adt.BlocksCacheKey(cluster_id, model_id=model_id)
        payload = None if notify is None else notify.encode()
        return start(key, cache, src, dst, timeout=timeout, notify=payload)

    async def transfer(
        self,
        kind: str,
        name: str,
        cluster_id: int,
        model_id: int = 0,
        blocks: list[list[int]] | None = None,
        timeout: float | None = 30.0,
        notify: str | None = None,
    ) -> list[int]:
        """Pull or push the blocks ``[src, dst]``, or all; return the bytes done and in all."""
        transfer = self._start(kind, name, cluster_id, model_id, blocks, timeout, notify)
        await transfer
        return list(transfer.progress)

    async def begin_traffic(
        self,
        kind: str,
        name: str,
        cluster_id: int,
        model_id: int = 0,
        blocks: list[list[int]] | None = None,
        depth: int = 2,
    ) -> int:
        """Pull or push again and again, `depth` at a time, until `end_traffic` or an error; return a number for it."""
        counts: dict[str, Any] = {"done": 0, "error": None}

        async def go_on() -> None:
            try:
                while counts["error"] is None:
                    await self._start(kind, name, cluster_id, model_id, blocks, None)
                    counts["done"] += 1
                    await asyncio.sleep(0)
            except adt.DataDistError as why:
                counts["error"] = type(why).__name__

        async def go() -> None:
            await asyncio.gather(*(go_on() for _ in range(depth)))

        number = next(self._numbers)
        self._traffic[number] = asyncio.create_task(go()), counts
        return number

    async def traffic(self, number: int) -> dict[str, Any]:
        """Return how many transfers have ended well, and the class of the error that ended them."""
        return self._traffic[number][1]

    async def end_traffic(self, number: int) -> dict[str, Any]:
        """End it by cancelling; return what `traffic` does."""
        task, counts = self._traffic.pop(number)
        task.cancel()
        await asyncio.wait((task,))
        return counts


async def _serve(control: socket.socket) -> None:
    peer = Peer(control)
    reader, writer = await asyncio.open_connection(sock=control, limit=1 << 26)
    tasks: set[asyncio.Task[None]] = set()

    async def answer(message: dict[str, Any]) -> None:
        reply: dict[str, Any] = {"id": message.pop("id")}
        try:
            reply["result"] = await getattr(peer, message.pop("do"))(**message)
        except BaseException as why:
            text = "".join(traceback.format_exception(why))
            reply["error"] = {"kind": type(why).__name__, "message": str(why), "traceback": text}
        writer.write(json.dumps(reply).encode() + b"\n")
        await writer.drain()

    while line := await reader.readline():
        task = asyncio.create_task(answer(json.loads(line)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    writer.close()
    for task in tuple(tasks):
        task.cancel()
    if peer.dd is not None:
        await peer.dd.aclose(30.0)


def _die_with_parent() -> None:
    # Whatever becomes of the tests, this process does not outlive them, not even stopped.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _peer(control: socket.socket, log: int, environ: dict[str, str]) -> None:
    _die_with_parent()
    os.dup2(log, 2)
    os.close(log)
    os.environ.update(environ)
    asyncio.run(_serve(control))


def nursery(orders: socket.socket) -> None:
    """Fork a peer, or reap one, for each order."""
    while True:
        data, fds, _, _ = socket.recv_fds(orders, 1 << 20, 2)
        if not data:
            return
        order = json.loads(data)
        if "reap" in order:
            orders.send(json.dumps(os.waitstatus_to_exitcode(os.waitpid(order["reap"], 0)[1])).encode())
            continue
        control, log = fds
        pid = os.fork()
        if pid == 0:
            orders.close()
            faulthandler.enable(file=log)
            try:
                _peer(socket.socket(fileno=control), log, order["environ"])
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            # Not through the nursery's frames, but with all that a process does at its end.
            sys.exit(0)
        os.close(control)
        os.close(log)
        orders.send(json.dumps(pid).encode())


def main() -> None:
    _die_with_parent()
    nursery(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
