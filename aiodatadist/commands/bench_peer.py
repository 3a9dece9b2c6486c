"""The passive process of `bench`: it owns what is pulled and pushed, and is asked over a socket pair.

The measuring process starts it with `Peer.start` and calls methods of `Owner` by name. It ends when that process closes
its end of the pair, or is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import mmap
import os
import resource
import socket
import struct
import subprocess
import sys
import sysconfig
import time
import traceback
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

import aiodatadist as adt

from .bench_memory import PEER_ID, Half, scattered
from .failure import CommandError

__all__ = ["Peer", "allocate", "child_environment", "config", "main", "raise_files", "resident", "sparse"]

# Not -m: the package imports this module, too.
_START: Final = f"from {__name__} import main; main()"
_LENGTH: Final = struct.Struct("<I")
_EXIT_SECONDS: Final = 10.0


def config(*transports: str) -> adt.Config:
    """Return the settings of the environment with these transports and patience for large transfers."""
    return adt.Config.from_env(transports=transports, transfer_timeout=120.0, link_timeout=60.0)


def allocate(dd: adt.DataDist, memory: str, blocks: int, block: int, tensors: int, **options: Any) -> adt.Cache:
    """Make a cache of uint8 blocks.

    Parameters
    ----------
    dd : DataDist
    memory : str
        ``library`` or ``ordinary``.
    blocks, block, tensors : int
        Blocks of each tensor, bytes of a block, number of tensors.
    **options
        `key` and `remote`.

    Returns
    -------
    Cache
    """
    if memory == "library":
        desc = adt.CacheDesc(tensors, (blocks, block), "uint8")
        return dd.cache_manager.allocate_blocks_cache(desc, **options)
    arrays = [np.zeros((blocks, block), np.uint8) for _ in range(tensors)]
    for array in arrays:
        array[:, :: os.sysconf("SC_PAGE_SIZE")] = 0  # no page is left to be taken in the first transfer
    return dd.cache_manager.register_blocks_cache(arrays, **options)


def sparse(nbytes: int, block: int) -> NDArray[np.uint8]:
    """Return blocks of memory that is taken page by page as it is touched, however much that is in all."""
    # Python names the flag from 3.13 on; this is its value on x86-64 and aarch64.
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000))
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_NOHUGEPAGE)  # a huge page for each block would be all of it, or much
    return np.frombuffer(memory, np.uint8).reshape(-1, block)


def raise_files() -> int:
    """Allow this process all the open files that it may have; return how many."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else sys.maxsize


def resident() -> int:
    """Return the bytes of memory that this process has touched and not given back."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def child_environment() -> dict[str, str]:
    """Return the environment for a process that runs this very package, also from a checkout that is not installed."""
    environment = dict(os.environ)
    root = str(Path(adt.__file__).parent.parent)
    if root not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
    return environment


# Both ends of the line. -------------------------------------------------------------------------------------


async def _read(reader: asyncio.StreamReader) -> Any:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return msgspec.msgpack.decode(await reader.readexactly(length))


def _frame(message: object) -> bytes:
    data = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(data)) + data


class Peer:
    """The passive process, from outside.

    Attributes
    ----------
    pid : int
    address : str
        Where its DataDist listens.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self.pid = process.pid
        self.address = ""
        self._raw = ""

    @classmethod
    @contextlib.asynccontextmanager
    async def start(cls) -> AsyncIterator[Peer]:
        """Run the process around the body."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(  # noqa: ASYNC220 - nothing else runs yet
                [sys.executable, "-P", "-X", "faulthandler", "-c", _START, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # its reports come over the pair; what else it prints is trouble
                pass_fds=[theirs.fileno()],
                env=child_environment(),
                # Ctrl-C is for the measuring process; this one ends with it.
                start_new_session=True,
            )
        writer: asyncio.StreamWriter | None = None
        try:
            reader, writer = await asyncio.open_connection(sock=ours)
            peer = cls(process, reader, writer)
            peer.address, peer._raw = await peer.call("hello")
            yield peer
        finally:
            if writer is None:
                ours.close()
            else:
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()
            try:
                await asyncio.to_thread(process.wait, _EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                pass
            finally:
                process.kill()
                process.wait()

    async def call(self, name: str, **arguments: Any) -> Any:
        """Call a method of `Owner`. Raises CommandError when it failed, or the process is gone."""
        try:
            self._writer.write(_frame([name, arguments]))
            fault, value = await _read(self._reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, _EXIT_SECONDS)
            code = self._process.poll()
            raise CommandError(f"the passive process {self.pid} ended early, with exit code {code}") from None
        if fault:
            raise CommandError(f"the passive process: {fault}")
        return value

    async def connect_raw(self, streams: int) -> list[socket.socket]:
        """Connect plain TCP sockets to the process, for the limits; they block."""
        host, _, port = self._raw.rpartition(":")
        sockets = []
        for _ in range(streams):
            sockets.append(socket.create_connection((host, int(port)), timeout=_EXIT_SECONDS))
            sockets[-1].settimeout(None)
            sockets[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await self.call("accept_raw", streams=streams)
        return sockets


# The passive process. ---------------------------------------------------------------------------------------


class Owner:
    """What the passive process can be asked for; every public method is a call."""

    def __init__(self, dd: adt.DataDist, listener: socket.socket, leave: contextlib.AsyncExitStack) -> None:
        self._dd = dd
        self._listener = listener
        self._leave = leave
        self._caches: dict[int, tuple[adt.Cache, Half]] = {}
        self._raw: list[socket.socket] = []
        self._serving: asyncio.Task[Any] | None = None
        self._others = contextlib.AsyncExitStack()
        self._open_others: list[adt.DataDist] = []

    async def hello(self) -> tuple[str, str]:
        """Return the addresses for links and for raw connections."""
        host, port = self._listener.getsockname()
        return str(self._dd.listen_address), f"{host}:{port}"

    async def prepare(self, model_id: int, memory: str, blocks: int, block: int, tensors: int, taking_part: int) -> int:
        """Make a cache whose first tensor holds the pattern; return the address of that tensor."""
        key = adt.BlocksCacheKey(PEER_ID, model_id)
        cache = allocate(self._dd, memory, blocks, block, tensors, key=key)
        half = Half.of(cache.tensors[0], scattered(blocks, taking_part, model_id))
        half.fill()
        await cache.ready()
        self._caches[model_id] = cache, half
        return half.address

    async def prepare_sparse(self, model_id: int, nbytes: int, block: int, index: list[int]) -> int:
        """Make a sparse cache in which the blocks `index` hold the pattern; return its address."""
        cache = self._dd.cache_manager.register_blocks_cache(
            [sparse(nbytes, block)], key=adt.BlocksCacheKey(PEER_ID, model_id)
        )
        half = Half.of(cache.tensors[0], np.array(index))
        half.fill_blocks()
        await cache.ready()
        self._caches[model_id] = cache, half
        return half.address

    async def forget(self, model_id: int) -> None:
        """Unregister a cache."""
        cache, _ = self._caches.pop(model_id)
        await self._dd.cache_manager.unregister_cache(cache)

    async def clear(self, model_id: int) -> None:
        """Zero the blocks of a cache that take part."""
        self._caches[model_id][1].clear()

    async def wrong(self, model_id: int, first: int, count: int) -> int:
        """Count those of a part of the blocks of a cache that do not hold what they held at first."""
        part = self._caches[model_id][1].part(first, count)
        return part.wrong(part.index)

    async def clear_layers(self, model_id: int) -> None:
        """Zero all blocks of all tensors of a cache."""
        for tensor in self._caches[model_id][0].tensors:
            tensor[:] = 0

    async def wrong_layers(self, model_id: int, seed: int) -> list[int]:
        """Count for each tensor of a cache the blocks that do not hold what was pushed into them.

        `seed` is that of the pusher's `scattered`: its tensors are pools with one pattern.
        """
        cache, first = self._caches[model_id]
        pushed = scattered(len(first.words), len(first.index), seed)
        return [Half.of(tensor, first.index, number).wrong(pushed) for number, tensor in enumerate(cache.tensors)]

    async def accept_raw(self, streams: int) -> None:
        """Accept raw connections that were made."""
        for _ in range(streams):
            sock, _ = self._listener.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._raw.append(self._leave.enter_context(sock))

    async def serve_raw(self, model_id: int, sends: bool, streams: int = 0, first: int = 0, count: int = 0) -> None:
        """Be the other end of `streams` raw sockets, or of one for `count` single blocks; see `served_raw`."""
        half = self._caches[model_id][1]
        descriptors = [sock.fileno() for sock in self._raw]
        if streams:
            work: Callable[[], object] = partial(half.sockets, descriptors[:streams], sends=sends, asks=False)
        else:
            work = partial(half.part(first, count).socket_each, descriptors[0], sends=sends, asks=False)
        self._serving = asyncio.create_task(asyncio.to_thread(work))

    async def served_raw(self) -> None:
        """Wait for the end of what `serve_raw` started."""
        assert self._serving is not None
        await self._serving

    async def cpu(self) -> float:
        """Return the CPU seconds of this process."""
        return time.process_time()

    async def resident(self) -> int:
        """Return the bytes of memory that this process has touched."""
        gc.collect()
        return resident()

    async def open_others(self, count: int, transports: list[str]) -> list[str]:
        """Open more DataDists, with cluster ids from `PEER_ID` + 1000; return where they listen."""
        settings = config(*transports)
        addresses = []
        for number in range(count):
            dd = adt.DataDist(PEER_ID + 1000 + number, listen="127.0.0.1:0", config=settings)
            self._open_others.append(await self._others.enter_async_context(dd))
            addresses.append(str(dd.listen_address))
        return addresses

    async def offer_from_others(self, model_id: int, memory: str, blocks: int, block: int) -> None:
        """Make a cache at each of them; all hold different patterns, numbered in their order."""
        caches = []
        for number, dd in enumerate(self._open_others):
            cache = allocate(dd, memory, blocks, block, 1, key=adt.BlocksCacheKey(dd.cluster_id, model_id))
            Half.of(cache.tensors[0], np.arange(1), number).fill()
            caches.append(cache)
        for cache in caches:
            await cache.ready()

    async def close_others(self) -> None:
        """Close what `open_others` opened."""
        self._open_others.clear()
        await self._others.aclose()

    async def raise_files(self) -> int:
        """Allow this process all the open files that it may have."""
        return raise_files()

    async def finish(self) -> None:
        """Come to an end, whatever was asked for last. The other ends of raw sockets are gone, so they wait no more."""
        if self._serving is not None:
            await asyncio.gather(self._serving, return_exceptions=True)
        await self.close_others()


async def _run(line: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=line)
    async with contextlib.AsyncExitStack() as leave:
        listener = leave.enter_context(socket.create_server(("127.0.0.1", 0)))
        dd = adt.DataDist(PEER_ID, adt.Role.PROMPT, listen="127.0.0.1:0", config=config("shm", "tcp"))
        owner = Owner(await leave.enter_async_context(dd), listener, leave)
        leave.push_async_callback(owner.finish)
        while True:
            try:
                name, arguments = await _read(reader)
            except (asyncio.IncompleteReadError, ConnectionError):
                break
            try:
                answer = ["", await getattr(owner, name)(**arguments)]
            except Exception as why:
                traceback.print_exc()
                answer = [f"{type(why).__name__}: {why}", None]
            writer.write(_frame(answer))
    writer.close()


def main() -> None:
    """Run the passive process; its argument is the descriptor of its end of the pair."""
    asyncio.run(_run(socket.socket(fileno=int(sys.argv[1]))))
