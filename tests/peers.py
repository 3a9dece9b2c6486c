"""Real peer processes for tests: `spawn` starts one that holds an open DataDist and does what it is told.

    async with spawn(1, transports=("shm",), heartbeat_limit=1.0) as peer:
        await peer.cache("kv", memory="library", model_id=0, value=0x11)
        await dd.link(peer.info)
        await dd.cache_manager.pull_blocks(adt.BlocksCacheKey(1), mine, [0, 1], [2, 3])
        number = await peer.call("begin_traffic", kind="push", name="kv", cluster_id=2)
        peer.stop(); ...; peer.resume(); peer.kill()

The commands are the coroutine functions of `peer_main.Peer`. A command that fails there raises `PeerFailure` here, with
the peer's traceback. The process is killed when the block is left, whatever happens, and so are children it forked.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import aiodatadist as adt

from .waiting import PATIENCE

ROOT = Path(__file__).resolve().parent.parent
_CARRIED = ("ASCEND_HOME_PATH", "HIXL_STANDIN_")


class PeerFailure(Exception):
    """A command failed in the peer. `kind` is the name of the exception's class there."""

    def __init__(self, kind: str, message: str, trace: str) -> None:
        super().__init__(f"{kind}: {message}\n--- in the peer:\n{trace}")
        self.kind = kind
        self.message = message


class PeerDied(Exception):
    """The peer's process ended."""


class _Nursery:
    """The process that forks the peers: started once, ended with the tests."""

    def __init__(self) -> None:
        self._orders: socket.socket | None = None

    def _start(self) -> socket.socket:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        here.settimeout(PATIENCE)
        with there:
            process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-m", "tests.peer_main", str(there.fileno())],
                cwd=ROOT,
                # One thread: a child of fork has no others.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                pass_fds=(there.fileno(),),
            )
        atexit.register(self._end, process, here)
        return here

    def _end(self, process: subprocess.Popen[bytes], orders: socket.socket) -> None:
        orders.close()
        process.kill()
        process.wait()

    def _order(self, order: dict[str, Any], fds: Sequence[int] = ()) -> int:
        if self._orders is None:
            self._orders = self._start()
        socket.send_fds(self._orders, [json.dumps(order).encode()], fds)
        return int(json.loads(self._orders.recv(4096)))

    def fork(self, control: int, log: int, environ: dict[str, str]) -> int:
        """Fork a peer; return its pid."""
        return self._order({"environ": environ}, [control, log])

    def reap(self, pid: int) -> int:
        """Wait for a peer that has ended, or is about to; return its exit code."""
        return self._order({"reap": pid})


_nursery = _Nursery()


class PeerProcess:
    """A running peer process.

    Attributes
    ----------
    cluster_id : int
    pid : int
    address : str or None
        Where its DataDist listens.
    """

    def __init__(self, cluster_id: int, pid: int, control: socket.socket, log: Any) -> None:
        self.cluster_id = cluster_id
        self.pid = pid
        self.address: str | None = None
        self._pidfd = os.pidfd_open(pid)
        self._exit_code: int | None = None
        self._control = control
        self._log = log
        self._log_shown = 0
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._children: list[int] = []
        self._over = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def _connect(self) -> None:
        reader, self._writer = await asyncio.open_connection(sock=self._control, limit=1 << 26)
        self._task = asyncio.create_task(self._read(reader))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                reply = json.loads(line)
                waiter = self._waiting.pop(reply["id"])
                if waiter.done():
                    continue
                if (error := reply.get("error")) is not None:
                    waiter.set_exception(PeerFailure(error["kind"], error["message"], error["traceback"]))
                    waiter.exception()
                else:
                    waiter.set_result(reply["result"])
        except ConnectionError:
            pass
        finally:
            self._over.set()
            for waiter in self._waiting.values():
                if not waiter.done():
                    waiter.set_exception(PeerDied(f"peer {self.cluster_id} has ended\n{self._said()}"))
                    waiter.exception()
            self._waiting.clear()

    def _said(self) -> str:
        """Return what the peer has written to its stderr since the last look."""
        self._log.seek(self._log_shown)
        text = self._log.read()
        self._log_shown += len(text)
        return str(text.decode(errors="replace"))

    @property
    def info(self) -> adt.ClusterInfo:
        """What to link."""
        assert self.address is not None, "this peer does not listen"
        return adt.ClusterInfo(self.cluster_id, self.address)

    def post(self, command: str, **arguments: Any) -> asyncio.Future[Any]:
        """Send a command and return a future of its answer."""
        number = next(self._numbers)
        waiter: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._over.is_set():
            waiter.set_exception(PeerDied(f"peer {self.cluster_id} has ended"))
            waiter.exception()
        else:
            self._waiting[number] = waiter
            self._writer.write(json.dumps({"id": number, "do": command, **arguments}).encode() + b"\n")
        return waiter

    async def call(self, command: str, **arguments: Any) -> Any:
        """Send a command and return its answer."""
        async with asyncio.timeout(PATIENCE):
            return await self.post(command, **arguments)

    async def run(self, source: str, **values: Any) -> Any:
        """Run the body of a coroutine function in the peer: see `peer_main.Peer.run`."""
        return await self.call("run", source=source, **values)

    async def run_and_stop(self, source: str, **values: Any) -> asyncio.Future[Any]:
        """Run something in the peer, and stop it before its loop turns again: what it started is still pending there.

        Returns a future of what `run` returns, once the process has stopped. `resume` is what wakes it.
        """
        stop = "\nimport os, signal\nos.kill(os.getpid(), signal.SIGSTOP)"
        running = self.post("run", source=source + stop, **values)
        limit = time.monotonic() + PATIENCE
        while not all(state in "TtZX" for state in self._states()):
            assert time.monotonic() < limit, "the peer does not stop"
            assert not running.done(), running
            await asyncio.sleep(0.0005)
        return running

    @contextlib.asynccontextmanager
    async def blocked(self, way: str = "sleeps") -> AsyncIterator[None]:
        """Keep the peer's loop from running for as long as the block lasts; see `peer_main.Peer.block` for the ways."""
        with tempfile.TemporaryDirectory() as folder:
            gate = Path(folder, "gate")
            os.mkfifo(gate)
            blocking = self.post("block", gate=str(gate), way=way)
            try:
                while not Path(f"{gate}.begun").exists():
                    assert not blocking.done(), blocking
                    await asyncio.sleep(0.002)
                yield
                assert not blocking.done(), blocking
            finally:
                Path(f"{gate}.over").touch()
                # Does not wait for a reader, which there may be none of.
                fd = os.open(gate, os.O_RDWR | os.O_NONBLOCK)
                try:
                    async with asyncio.timeout(PATIENCE):
                        await blocking
                finally:
                    os.close(fd)

    async def cache(
        self,
        name: str,
        *,
        tensors: int = 4,
        shape: tuple[int, ...] = (64, 16384),
        dtype: str = "uint8",
        memory: str = "ordinary",
        model_id: int | None = 0,
        remote: str | None = "rw",
        value: int = 0,
    ) -> int:
        """Make a cache there, ``memory="library"`` or ``"ordinary"``; return its id."""
        arguments = {"tensors": tensors, "shape": shape, "dtype": dtype, "memory": memory, "model_id": model_id}
        return int(await self.call("cache", name=name, remote=remote, value=value, **arguments))

    async def fork(self) -> int:
        """Have the peer fork a child that outlives it; return the child's pid."""
        pid = int(await self.call("fork"))
        self._children.append(os.pidfd_open(pid))
        return pid

    # The process.

    @property
    def alive(self) -> bool:
        return self._exit_code is None and not select.select([self._pidfd], [], [], 0)[0]

    def stop(self) -> None:
        """Send SIGSTOP and return when every thread of the process has stopped."""
        self._signal(signal.SIGSTOP)
        limit = time.monotonic() + PATIENCE
        while self.alive and any(state not in "TtZX" for state in self._states()):
            assert time.monotonic() < limit, "the peer does not stop"
            time.sleep(0.0005)

    def _states(self) -> list[str]:
        states = []
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            with contextlib.suppress(OSError):
                states.append((task / "stat").read_text().rpartition(")")[2].split()[0])
        return states

    def resume(self) -> None:
        """Send SIGCONT."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Send SIGKILL. It is reaped at the end of the block, or by `wait_gone`."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    async def wait_gone(self) -> int:
        """Wait until the process has ended; return its exit code."""
        limit = time.monotonic() + PATIENCE
        while self.alive:
            assert time.monotonic() < limit, "the peer does not end"
            await asyncio.sleep(0.002)
        return self._reap()

    def _reap(self) -> int:
        if self._exit_code is None:
            self._exit_code = _nursery.reap(self.pid)
        return self._exit_code

    async def finish(self) -> int:
        """Have the peer close its DataDist and exit; return the exit code."""
        self._writer.close()
        return await self.wait_gone()

    async def _end(self) -> None:
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(child, signal.SIGKILL)
            os.close(child)
        self.kill()
        self._reap()
        os.close(self._pidfd)
        if self._task is not None:
            self._writer.close()
            self._task.cancel()
            await asyncio.wait((self._task,))
        if text := self._said():
            print(f"--- peer {self.cluster_id} wrote:\n{text}", file=sys.stderr)
        self._log.close()


@contextlib.asynccontextmanager
async def spawn(
    cluster_id: int = 1,
    *,
    role: str = "mix",
    listen: str | None = "127.0.0.1:0",
    env: dict[str, str] | None = None,
    **config: Any,
) -> AsyncIterator[PeerProcess]:
    """Start a peer process, open its DataDist with this `Config`, and kill it at the end of the block."""
    # The process that forks it may be older than what a test has set.
    env = {
        **{name: value for name, value in os.environ.items() if name.startswith(_CARRIED)},
        "HIXL_STANDIN_ABORT": "1",
        **(env or {}),
    }
    here, there = socket.socketpair()
    log = tempfile.TemporaryFile()  # noqa: SIM115  # closed by _end
    try:
        with there:
            pid = _nursery.fork(there.fileno(), log.fileno(), env)
    except BaseException:
        here.close()
        log.close()
        raise
    peer = PeerProcess(cluster_id, pid, here, log)
    try:
        await peer._connect()
        peer.address = await peer.call("open", cluster_id=cluster_id, role=role, listen=listen, config=config)
        yield peer
    finally:
        await peer._end()


def rows(cache: adt.Cache) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
    """Return the tensors of a local numpy cache as bytes, a row for each block."""
    return [tensor.view(np.uint8).reshape(len(tensor), -1) for tensor in cache.tensors]


def checksums(cache: adt.Cache) -> list[list[int]]:
    """Return what the peer's command ``checksums`` does, for a local cache."""
    return [[zlib.crc32(row.tobytes()) for row in tensor] for tensor in rows(cache)]


def random_bytes(seed: int, tensor: int, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return what the peer's command ``fill_random`` writes to the rows of one tensor."""
    return np.random.default_rng((seed, tensor)).integers(0, 256, shape, np.uint8)
