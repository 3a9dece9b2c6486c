"""Two native nodes wired to each other in one process, and a peer spoken by hand: for the tests of the engine."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import select
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import pytest

from aiodatadist import _cann, _core

PATHS = ("shm-mapped", "shm-process_vm", "tcp", "tcp-short")
MODES = ("threads", "step")
LOCAL_CASES = (
    *((path, mode) for path in PATHS for mode in MODES if (path, mode) != ("tcp-short", "step")),
    ("sim", "step"),
)
CASES = (
    *LOCAL_CASES,
    pytest.param("verbs", "threads", marks=pytest.mark.verbs, id="verbs-threads"),
    pytest.param("hixl", "threads", marks=pytest.mark.hixl, id="hixl-threads"),
)
# Transports whose endpoints say when they are of use.
SETTLING = ("verbs", "hixl")
OK, BOUNDS, CANCELLED, TIMEOUT, PEER_LOST, ABORTED, CLOSED, FENCED = 0, -3, -6, -7, -8, -9, -10, -15
NOT_FOUND, PERMISSION, PROTOCOL, LAYER_FAILED = -2, -4, -14, -20
SECOND = 1_000_000_000
STEPS = 100_000

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
Geometry: TypeAlias = tuple[int, int, int, int]


class Call:
    """What a Transfer is to the engine: told at most once that it started, and exactly once that it ended."""

    def __init__(self, then: Callable[[Call], None] | None = None) -> None:
        self.op = 0
        self.nbytes = -1
        self.status: int | None = None
        self.done = 0
        self.then = then
        self.landed: list[int] = []

    def _native_started(self, native: _core.Pair, op: int, nbytes: int) -> None:
        assert self.nbytes == -1, "started twice"
        self.op, self.nbytes = op, nbytes

    def _native_layer(self, layer: int, elapsed_ns: int) -> None:
        assert self.status is None, "a layer after the end"
        assert layer not in self.landed, "landed twice"
        self.landed.append(layer)

    def _native_done(self, status: int, nbytes: int) -> None:
        assert self.status is None, "ended twice"
        self.status, self.done = status, nbytes
        if self.then is not None:
            self.then(self)

    @property
    def ended(self) -> bool:
        return self.status is not None


@dataclasses.dataclass(frozen=True)
class Event:
    kind: int
    peer: int
    token: int
    status: int
    cache: int
    nbytes: int
    opcode: int


class Tensors:
    """Tensors of a cache, the gaps between strided blocks included; `blocks` are views that leave the gaps out."""

    def __init__(self, geometry: Geometry, region: bool) -> None:
        self.geometry = geometry
        count, num_blocks, block_bytes, stride = geometry
        extent = (num_blocks - 1) * stride + block_bytes
        # Room after the last block, so that all rows of the view have a stride's length.
        size = num_blocks * stride
        self.region = _core.Region(count * size) if region else None
        raw = np.frombuffer(self.region, np.uint8) if self.region is not None else np.zeros(count * size, np.uint8)
        self.raw: list[Bytes] = [raw[i * size : (i + 1) * size] for i in range(count)]
        self.extent = extent

    @property
    def addresses(self) -> list[int]:
        return [int(t.ctypes.data) for t in self.raw]

    @property
    def blocks(self) -> list[Bytes]:
        _, num_blocks, block_bytes, stride = self.geometry
        return [t.reshape(num_blocks, stride)[:, :block_bytes] for t in self.raw]

    def fill(self, value: int) -> None:
        for t in self.raw:
            t[:] = value

    def randomize(self, seed: int) -> None:
        # A pattern of a prime length repeats at no block's size, and costs less than random bytes.
        pattern = np.random.default_rng(seed).integers(0, 0x80, size=65521, dtype=np.uint8)
        for i, t in enumerate(self.raw):
            t[:] = np.resize(np.roll(pattern, i), t.size)

    def copy(self) -> list[Bytes]:
        return [t.copy() for t in self.raw]


class Side:
    """One node, the engine that runs it, and its one peer."""

    def __init__(self, engine: _core.Engine, ring: _core.Ring, cluster: int, options: dict[str, Any]) -> None:
        self.engine = engine
        self.ring = ring
        self.events: list[Event] = []
        self.peer: _core.Peer | None = None
        self.node = _core.Node(engine, ring, cluster, lambda *event: self.events.append(Event(*event)), **options)
        self.next_cache = cluster * 1000

    @property
    def to_peer(self) -> _core.Peer:
        assert self.peer is not None
        return self.peer

    def register(
        self, tensors: Tensors, readable: bool = True, writable: bool = True, cache_id: int | None = None
    ) -> _core.LocalCache:
        self.next_cache += 1
        _, num_blocks, block_bytes, stride = tensors.geometry
        return self.node.register_cache(
            self.next_cache if cache_id is None else cache_id,
            tensors.addresses,
            num_blocks,
            block_bytes,
            stride,
            readable,
            writable,
            tensors.region,
        )

    def seen(self, kind: int, token: int | None = None) -> list[Event]:
        return [e for e in self.events if e.kind == kind and token in (None, e.token)]


class Rig:
    """Nodes `user` and `owner`, linked over one path, in one engine or in one stepped engine each."""

    def __init__(
        self,
        path: str,
        mode: str = "threads",
        *,
        engines: int = 1,
        connections: int = 2,
        drain_timeout: float = 5.0,
        heartbeat_limit: float = 60.0,
        inline_bytes: int = 0,
    ) -> None:
        assert engines == 1 or mode == "step"
        self.path = path
        self.stepped = mode == "step"
        self.network = _core.SimNetwork(1) if path == "sim" else None
        self.engines = [
            _core.Engine.stepped(self.network, place) if self.stepped else _core.Engine.acquire(2, 2)
            for place in range(engines)
        ]
        self.links = 0
        self.rings = [_core.Ring(engine) for engine in self.engines]
        self.running = list(self.engines)
        options = {
            "drain_timeout": drain_timeout,
            "heartbeat_limit": heartbeat_limit,
            "inline_bytes": inline_bytes,
            "populate_limit": 1 << 30,
        }
        if path == "verbs":
            usable, device, gid_index, words = _core.choose_rdma([], -1)
            assert usable, words
            options["rdma"] = (device, gid_index, 0, 0, 14, 7)
        # Engines of HIXL belong to one node each.
        engines = [{"hixl": self._open_hixl(drain_timeout)} if path == "hixl" else {} for _ in range(2)]
        self.user = Side(self.engines[0], self.rings[0], 1, options | engines[0])
        self.owner = Side(self.engines[-1], self.rings[-1], 2, options | engines[1])
        self.sides = (self.user, self.owner)
        self.loop_fds: dict[int, _core.Peer] = {}
        self.link(4 if path == "tcp-short" else connections)

    @staticmethod
    def _open_hixl(drain_timeout: float) -> _core.HixlEngine:
        found = _cann.find_libraries()
        libraries = (found.metadef, found.hixl, found.acl, _cann.shim_path())
        return _core.HixlEngine(
            libraries, 0, "127.0.0.1", {}, alignment=0, drain_timeout=drain_timeout, connect_timeout=5.0
        )

    @property
    def transport(self) -> str:
        return "shm" if self.path.startswith("shm") else self.path.removesuffix("-short")

    def link(self, connections: int = 2) -> None:
        """Connect both sides (again)."""
        shm = self.path.startswith("shm")
        wire = socket.socketpair()
        data = [socket.socketpair() for _ in range(0 if self.transport in ("sim", *SETTLING) else connections)]
        self.links += 1
        for i, side in enumerate(self.sides):
            if self.network is not None:
                self.network.bind(wire[i].fileno(), self.links, i, self.engines.index(self.sides[1 - i].engine))
            side.peer = side.node.connect(
                wire[i].detach(),
                [pair[i].detach() for pair in data],
                pid=os.getpid() if shm else 0,
                pidfd=os.pidfd_open(os.getpid()) if shm else -1,
                process_vm=True,
                transports=["shm", "tcp"] if shm else [self.transport],
                dialed=i == 0,
                cluster_id=(2, 1)[i],
                layers_told=True,
            )
            fd = -1 if self.stepped else side.peer.loop_fd()
            if fd >= 0:
                self.loop_fds[fd] = side.peer
        if self.path in SETTLING:
            for side in self.sides:
                self.run(lambda side=side: side.seen(_core.EVENT_ENDPOINT_SETTLED))
                assert side.to_peer.unsettled(self.path) == ""

    def tensors(self, geometry: Geometry, *, owner: bool = True, seed: int | None = None) -> Tensors:
        made = Tensors(geometry, region=owner and self.path == "shm-mapped")
        if seed is not None:
            made.randomize(seed)
        return made

    def cache(self, tensors: Tensors, **access: bool) -> tuple[_core.LocalCache, _core.RemoteCache]:
        """Register tensors at the owner and import them at the user."""
        local = self.owner.register(tensors, **access)
        return local, self.bring(local, tensors)

    def bring(self, local: _core.LocalCache, tensors: Tensors) -> _core.RemoteCache:
        keys = [key for key in local.export_keys() if key[0] == self.transport]
        remote = self.user.to_peer.import_cache(local.id, tensors.geometry, keys)
        assert remote.path == self.path.removesuffix("-short")
        return remote

    def pair(self, here: Tensors, there: Tensors, **access: bool) -> _core.Pair:
        local = self.user.register(here)
        _, remote = self.cache(there, **access)
        return _core.Pair(local, remote, (here, there))

    def turn(self, seconds: float = 0.2, advance_ns: int = 1000) -> None:
        """Let the engines work once and hand over what is complete."""
        if self.stepped:
            if self.network is not None:
                self.network.advance(advance_ns)
            for engine in self.running:
                engine.step(0 if self.network else advance_ns)
        else:
            ready, _, _ = select.select([ring.fd for ring in self.rings] + list(self.loop_fds), [], [], seconds)
            for fd in ready:
                peer = self.loop_fds.get(fd)
                if peer is not None and not peer.loop_progress():
                    del self.loop_fds[fd]
                    os.close(fd)
        for ring in self.rings:
            ring.drain()

    def run(self, until: Callable[[], Any], advance_ns: int = 1000) -> None:
        """Work until something is true. The suite's hang limit ends what never comes; in step mode a count does."""
        # Turns of a stepped engine are work; with threads they are looks, of which there may be any number.
        for _ in range(STEPS) if self.stepped else itertools.count():
            if until():
                return
            self.turn(advance_ns=advance_ns)
        raise AssertionError("nothing came of it")

    def advance(self, ns: int, step_ns: int) -> None:
        """Move the clock of the running engines."""
        for _ in range(ns // step_ns):
            self.turn(advance_ns=step_ns)

    def start(
        self,
        pair: _core.Pair,
        opcode: int,
        local: Sequence[int],
        remote: Sequence[int],
        *,
        tensors: tuple[int, int, int] | None = None,
        timeout: float = 0.0,
        inline: bool = False,
        then: Callable[[Call], None] | None = None,
    ) -> Call:
        call = Call(then)
        first, second, count = tensors or (0, 0, pair.local_tensors)
        pair.submit(call, opcode, local, remote, first, second, count, timeout, inline)
        return call

    def move(self, *args: Any, **options: Any) -> Call:
        """Transfer and wait for the end."""
        call = self.start(*args, **options)
        self.run(lambda: call.ended)
        return call

    def start_layers(
        self,
        pair: _core.Pair,
        gate: _core.Gate,
        local: Sequence[int],
        remote: Sequence[int],
        layers: Sequence[Sequence[tuple[int, int, int]]],
        *,
        first_layer: int = 0,
        per_layer: int = 1,
        view: Geometry,
        timeout: float = 0.0,
    ) -> Call:
        """Start a write layer by layer: `layers` holds (local tensor, remote tensor, offset) of each tensor of each."""
        call = Call()
        tensors = [tensor for layer in layers for tensor in layer]
        starts = list(itertools.accumulate((len(layer) for layer in layers), initial=0))
        pair.submit_layers(call, local, remote, gate, first_layer, per_layer, tensors, starts, view, timeout)
        return call

    def fence(self, side: Side) -> Event:
        token = side.to_peer.fence()
        self.run(lambda: side.seen(_core.EVENT_FENCED, token))
        return side.seen(_core.EVENT_FENCED, token)[0]

    def close(self) -> None:
        self.running = list(self.engines)
        for side in self.sides:
            side.node.abort()
        self.run(lambda: all(side.node.quiet() for side in self.sides), advance_ns=SECOND // 100)
        for fd in self.loop_fds:
            os.close(fd)
        self.loop_fds.clear()
        for side in self.sides:
            side.node.close()
            side.peer = None
        for ring in self.rings:
            ring.drain()
            ring.close()
        for engine in self.engines:
            engine.release()


@contextlib.contextmanager
def rig(path: str, mode: str = "threads", **options: Any) -> Iterator[Rig]:
    made = Rig(path, mode, **options)
    try:
        yield made
    finally:
        made.close()


# --- a peer spoken by hand ------------------------------------------------------------------------

HEARTBEAT, PING, PONG, ABORT, ENDED, FENCE, FENCE_DONE, DISCONNECT, GOODBYE = range(9)
ADOPT, RELEASE, LEASE_ANSWER, RENEW, LEASE_OVER = range(9, 14)
LAYER = 14
READ_FRAME, WRITE_FRAME, READ_DONE, WRITE_DONE = 1, 2, 3, 4
MAGIC = 0x31465441
MESSAGE = struct.Struct("<BBHiQQQ")
HEADER = struct.Struct("<IBBHiIQQQQII")
RUN = struct.Struct("<QII")
TRAILER = struct.Struct("<iI")


def message(kind: int, *, flags: int = 0, status: int = 0, a: int = 0, b: int = 0, c: int = 0) -> bytes:
    return MESSAGE.pack(kind, flags, 0, status, a, b, c)


def request(
    kind: int,
    cache: int,
    runs: Sequence[tuple[int, int, int]],
    *,
    payload: bytes = b"",
    seq: int = 1,
    op: int = 1,
    nbytes: int | None = None,
    count: int | None = None,
    epoch: int = 0,
    magic: int = MAGIC,
    trailer: int = 0,
) -> bytes:
    """Make a request: `runs` are (tensor, offset, length); `nbytes` and `count` may lie."""
    total = sum(run[2] for run in runs) if nbytes is None else nbytes
    head = HEADER.pack(magic, kind, 0, 0, 0, len(runs) if count is None else count, seq, cache, op, total, epoch, 0)
    body = b"".join(RUN.pack(offset, tensor, length) for tensor, offset, length in runs)
    return head + body + (payload + TRAILER.pack(trailer, 0) if kind == WRITE_FRAME else b"")


def answer(
    kind: int, seq: int, *, status: int = 0, payload: bytes = b"", nbytes: int | None = None, trailer: int = 0
) -> bytes:
    size = len(payload) if nbytes is None else nbytes
    head = HEADER.pack(MAGIC, kind, 0, 0, status, 0, seq, 0, 0, size, 0, 0)
    return head + (payload + TRAILER.pack(trailer, 0) if size else b"")


@dataclasses.dataclass(frozen=True)
class Header:
    kind: int
    status: int
    count: int
    seq: int
    cache: int
    op: int
    payload: int
    epoch: int


class Hand:
    """One real node, and this test at the other end of its sockets."""

    def __init__(
        self,
        mode: str = "threads",
        *,
        connections: int = 1,
        drain_timeout: float = 5.0,
        heartbeat_limit: float = 60.0,
        buffers: int = 0,
    ) -> None:
        self.stepped = mode == "step"
        self.engine = _core.Engine.stepped() if self.stepped else _core.Engine.acquire(2, 2)
        self.ring = _core.Ring(self.engine)
        options = {
            "drain_timeout": drain_timeout,
            "heartbeat_limit": heartbeat_limit,
            "inline_bytes": 0,
            "populate_limit": 0,
        }
        self.side = Side(self.engine, self.ring, 1, options)
        wire = socket.socketpair()
        data = [socket.socketpair() for _ in range(connections)]
        for ours, theirs in data:
            if buffers:
                ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffers)
                theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffers)
        self.side.peer = self.side.node.connect(
            wire[0].detach(),
            [pair[0].detach() for pair in data],
            pid=0,
            pidfd=-1,
            process_vm=False,
            transports=["tcp"],
            cluster_id=2,
        )
        self.wire = wire[1]
        self.data = [pair[1] for pair in data]
        for sock in (self.wire, *self.data):
            sock.setblocking(False)
        self.said: list[tuple[int, int, int, int, int, int]] = []
        self._wire_bytes = b""
        # Memory and objects that operations use: whoever starts one keeps them until its end.
        self.kept: list[object] = []

    def turn(self, advance_ns: int = 1000) -> None:
        if self.stepped:
            self.engine.step(advance_ns)
        else:
            select.select([self.ring.fd, *(s for s in (self.wire, *self.data) if s.fileno() >= 0)], [], [], 0.02)
        self.ring.drain()
        self.listen()

    def listen(self) -> None:
        """Note what the node says on the engine connection; nothing is answered."""
        if self.wire.fileno() < 0:
            return
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while got := self.wire.recv(65536):
                self._wire_bytes += got
        while len(self._wire_bytes) >= MESSAGE.size:
            kind, flags, _, status, a, b, c = MESSAGE.unpack_from(self._wire_bytes)
            self._wire_bytes = self._wire_bytes[MESSAGE.size :]
            self.said.append((kind, flags, status, a, b, c))

    def heard(self, kind: int) -> list[tuple[int, int, int, int, int, int]]:
        return [m for m in self.said if m[0] == kind]

    def run(self, until: Callable[[], Any], advance_ns: int = 1000) -> None:
        """Work until something is true; see `Rig.run`."""
        for _ in range(STEPS) if self.stepped else itertools.count():
            if until():
                return
            self.turn(advance_ns)
        raise AssertionError("nothing came of it")

    def say(self, text: bytes) -> None:
        """Send on the engine connection."""
        self.wire.setblocking(True)
        self.wire.sendall(text)
        self.wire.setblocking(False)

    def send(self, frame: bytes, connection: int = 0) -> None:
        """Send on a data connection, letting the node work as needed; stops if the node ends it."""
        view = memoryview(frame)
        while view:
            try:
                view = view[self.data[connection].send(view) :]
            except BlockingIOError:
                self.turn()
            except ConnectionError:
                return

    def receive(self, size: int, connection: int = 0) -> bytes:
        """Take exactly so many bytes from a data connection; fewer if it ends."""
        parts = []
        while size > 0:
            try:
                part = self.data[connection].recv(size)
            except BlockingIOError:
                self.turn()
                continue
            except ConnectionError:
                break
            if not part:
                break
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def header(self, connection: int = 0) -> Header | None:
        """Take one frame header, or None if the connection ends."""
        text = self.receive(HEADER.size, connection)
        if len(text) < HEADER.size:
            return None
        magic, kind, _, _, status, count, seq, cache, op, payload, epoch, _ = HEADER.unpack(text)
        assert magic == MAGIC
        return Header(kind, status, count, seq, cache, op, payload, epoch)

    def lost(self) -> int:
        """Wait for the loss of the link; the status the node's loop was told."""
        self.run(lambda: self.side.seen(_core.EVENT_PEER_LOST))
        (event,) = self.side.seen(_core.EVENT_PEER_LOST)
        return event.status

    def close(self) -> None:
        for sock in (self.wire, *self.data):
            sock.close()
        self.side.node.abort()
        self.run(self.side.node.quiet, advance_ns=SECOND // 100)
        self.side.node.close()
        self.side.peer = None
        self.ring.drain()
        self.ring.close()
        self.engine.release()
        # pytest keeps a fixture's value beyond its end; what is native must go now.
        self.__dict__.clear()


@contextlib.contextmanager
def hand(mode: str = "threads", **options: Any) -> Iterator[Hand]:
    made = Hand(mode, **options)
    try:
        yield made
    finally:
        made.close()
