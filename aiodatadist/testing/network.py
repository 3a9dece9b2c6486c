"""A simulated network: processes, streams between them, and the runtime that a DataDist of such a process is given.

Control streams are simulated here, byte by byte at virtual times. A stream that is handed to an engine becomes one end
of a socket pair, whose other end stays here: what the engine writes is read as soon as it has had its turn, and goes on
as a stream; so the engine needs no change, and neither does tcp, which can be simulated in the same way. Data of the
transport `sim` is carried natively (``_native/sim.cpp``), on the same ways and the same clock.

A stream keeps its order, as TCP's do: loss is delay, and what is blocked waits. Only a crash or `Network.cut` breaks
one.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import itertools
import os
import random
import select
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from .. import _core
from .._loop import RECEIVE_BYTES, Runtime, Stream, StreamListener, adopt_socket
from ..config import Config
from ..errors import ArgumentError
from ..types import Address
from .clock import HOST, SimulationStuck, VirtualLoop
from .faults import Way
from .trace import ReplayDiverged, Trace

__all__ = ["Access", "Host", "Network", "SimRuntime"]

WINDOW: Final = 256 * 1024
"""Bytes of a stream that may be under way; what is sent beyond them counts as unsent."""
FIRST_PORT: Final = 26000
_SYN_AGAIN: Final = 1.0
_CLEANING_NS: Final = 600 * 10**9
_MOST_TURNS: Final = 100_000


class Access(NamedTuple):
    """One access to memory by the transport `sim`.

    Attributes
    ----------
    at : float
        Virtual time in seconds.
    write : bool
        Whether memory was written; else it was read.
    cluster_id, incarnation : int
        Whose memory: which process of that cluster id, from 1.
    cache_id, tensor, offset, nbytes : int
        Which bytes.
    address : int
        Where they are. Differs from run to run.
    by_cluster, by_incarnation, op_id : int
        The operation that did it: who started it, and its number there.
    """

    at: float
    write: bool
    cluster_id: int
    incarnation: int
    cache_id: int
    tensor: int
    offset: int
    nbytes: int
    address: int
    by_cluster: int
    by_incarnation: int
    op_id: int


class _Mark:
    """What travels on a stream besides bytes."""

    def __init__(self, name: str) -> None:
        self.name = name


_END: Final = _Mark("end")
_RESET: Final = _Mark("reset")


class _Pipe:
    """One direction of a connection. Whatever is sent arrives in this order."""

    def __init__(self, network: Network, number: int, source: Host, target: Host) -> None:
        self.network = network
        self.number = number
        self.source = source
        self.target = target
        self.sink: SimStream | _Relay | None = None
        self.reverse: _Pipe
        self.in_flight = 0
        self.ended = False  # nothing but a reset is sent any more
        self.dead = False  # nothing at all
        self.on_room: Callable[[], None] | None = None
        self._queue: deque[bytes | _Mark] = deque()
        self._waiting = 0  # those of the queue that wait for the way to open
        self._last_ns = 0

    def send(self, part: bytes | _Mark) -> None:
        if self.dead or (self.ended and part is not _RESET):
            return
        if isinstance(part, _Mark):
            self.ended = True
            self.dead = part is _RESET
            self._send(part, 1)
            return
        self.in_flight += len(part)
        way = self.network.way(self.source, self.target)
        if way.split and len(part) > 1 and self.network.chance.random() < way.split:
            at = self.network.chance.randrange(1, len(part))
            self._send(part[:at], at)
            part = part[at:]
        self._send(part, len(part))

    def _send(self, part: bytes | _Mark, size: int) -> None:
        self._queue.append(part)
        if self.network.way(self.source, self.target).blocked:
            self._waiting += 1
            self.network.blocked_pipes[self] = None
        else:
            self._schedule(size)

    def _schedule(self, size: int) -> None:
        delay = self.network.delay_ns(self.source, self.target, size)
        self._last_ns = max(self._last_ns, self.network.loop.now_ns + delay)
        self.network.loop.call_at(self._last_ns / 1e9, self._arrive, context=self.network.context)

    def open(self) -> None:
        """Let what waited go on."""
        waiting, self._waiting = self._waiting, 0
        for _ in range(waiting):
            self._schedule(1)

    def _arrive(self) -> None:
        if self.network.way(self.source, self.target).blocked:
            self._waiting += 1
            self.network.blocked_pipes[self] = None
            return
        part = self._queue.popleft()
        said: int | str
        if isinstance(part, _Mark):
            said = part.name
        else:
            said = len(part)
            self.in_flight -= len(part)
        self.network.note("stream", self.source.cluster_id, self.target.cluster_id, self.number, said)
        if self.target.silent and self.network.hosts[self.target.place] is not self.target and part is not _RESET:
            self.reverse.dead = False  # the host is back, and knows nothing of this connection
            self.reverse.send(_RESET)
        elif self.sink is not None:
            self.sink.take(part)
        if self.on_room is not None:
            self.on_room()


class SimStream(Stream):
    """One end of a simulated connection."""

    def __init__(self, host: Host, out: _Pipe, into: _Pipe, end: int, remote: Address, peer: str) -> None:
        self.remote = remote
        self.peer = peer
        self._host = host
        self._network = host.network
        self._out = out
        self._into = into
        self._end = end
        self._buffer = bytearray()
        self._ended = False
        self._error: int | None = None
        self._closed = False
        self._waiter: asyncio.Future[None] | None = None
        self._flushers: list[tuple[int, asyncio.Future[None]]] = []
        into.sink = self
        out.on_room = self._room
        host.ends[self] = None

    def __repr__(self) -> str:
        return f"<SimStream {self._out.number} of {self._host.cluster_id} to {self.peer}>"

    # From the network.

    def take(self, part: bytes | _Mark) -> None:
        """Take what has arrived."""
        if self._closed:
            if not isinstance(part, _Mark):
                self._out.send(_RESET)
            return
        if part is _RESET:
            self._out.dead = True
            self._fail(errno.ECONNRESET)
        elif part is _END:
            self._ended = True
        elif isinstance(part, bytes):
            self._buffer += part
        self._wake()

    def _fail(self, code: int) -> None:
        if self._error is None:
            self._error = code
            flushers, self._flushers = self._flushers, []
            for _, waiter in flushers:
                if not waiter.done():
                    waiter.set_exception(OSError(code, os.strerror(code)))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _room(self) -> None:
        for flusher in tuple(self._flushers):
            below, waiter = flusher
            if self.unsent <= below:
                self._flushers.remove(flusher)
                if not waiter.done():
                    waiter.set_result(None)

    def drop(self, mark: _Mark | None) -> None:
        """End it from outside: its process crashes, or the connection is cut."""
        if mark is not None:
            self._out.send(mark)
        self._out.dead = True
        self._host.ends.pop(self, None)
        self._fail(errno.ECONNRESET if mark is _RESET else errno.ECONNABORTED)
        self._wake()

    # From the process.

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectionAbortedError(errno.ECONNABORTED, "the connection was closed on this side")

    def _check(self) -> None:
        self._check_open()
        if self._error is not None and not self._buffer:
            raise OSError(self._error, os.strerror(self._error))

    async def _readable(self) -> None:
        assert self._waiter is None, "one reader at a time"
        self._waiter = self._network.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    async def receive(self, limit: int = RECEIVE_BYTES) -> bytes:
        """Return what has arrived; see `Stream.receive`."""
        while True:
            self._check()
            if self._buffer:
                data = bytes(self._buffer[:limit])
                del self._buffer[:limit]
                return data
            if self._ended:
                return b""
            await self._readable()

    async def wait_readable(self) -> bool:
        """Wait until something has arrived; see `Stream.wait_readable`."""
        while True:
            self._check()
            if self._buffer or self._ended:
                return bool(self._buffer)
            await self._readable()

    def send(self, data: bytes) -> None:
        """Send; see `Stream.send`."""
        if data and not self._closed:
            self._out.send(bytes(data))

    @property
    def unsent(self) -> int:
        """Bytes beyond what may be under way."""
        return max(0, self._out.in_flight - WINDOW)

    async def flush(self, below: int = 0) -> None:
        """Wait until at most `below` bytes are unsent; see `Stream.flush`."""
        self._check()
        if self._error is not None:
            raise OSError(self._error, os.strerror(self._error))
        if self.unsent <= below:
            return
        flusher = (below, self._network.loop.create_future())
        self._flushers.append(flusher)
        try:
            await flusher[1]
        finally:
            if flusher in self._flushers:
                self._flushers.remove(flusher)

    def close(self) -> None:
        """Close at once. What was sent arrives, unless something that had arrived was not read."""
        if self._closed:
            return
        self._out.send(_RESET if self._buffer else _END)
        self._leave(errno.ECONNABORTED)

    def _leave(self, code: int) -> None:
        self._closed = True
        self._host.ends.pop(self, None)
        self._fail(code)
        self._buffer.clear()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(OSError(code, "the connection was closed on this side"))

    def detach(self) -> int:
        """Give it to an engine, as the descriptor that is returned. One that was reset is found so by the engine."""
        self._check_open()
        ours, theirs = socket.socketpair()
        relay = _Relay(self._host, self._out, self._into, adopt_socket(theirs))
        self._network.native.bind(ours.fileno(), self._out.number, self._end, self._out.target.place)
        if self._buffer:
            relay.take(bytes(self._buffer))
        if self._error is not None:
            relay.take(_RESET)
        elif self._ended:
            relay.take(_END)
        self._leave(errno.ECONNABORTED)
        return ours.detach()


class _Relay:
    """The other end of a socket pair of an engine."""

    def __init__(self, host: Host, out: _Pipe, into: _Pipe, sock: socket.socket) -> None:
        self._host = host
        self._network = host.network
        self._out = out
        self._sock = sock
        self._left: deque[bytes] = deque()
        self._ended = False  # nothing more comes for the engine
        self._closed = False
        sock.setblocking(False)
        self.fd = sock.fileno()
        into.sink = self
        out.on_room = None
        host.ends[self] = None
        self._network.add_relay(self)

    def take(self, part: bytes | _Mark) -> None:
        """Take what has arrived for the engine."""
        self._host.dirty = True
        if self._closed:
            if not isinstance(part, _Mark):
                self._out.send(_RESET)
        elif part is _RESET:
            self._out.dead = True
            self.close()
        elif part is _END:
            self._ended = True
            self.flush()
        elif isinstance(part, bytes):
            self._left.append(part)
            self.flush()

    @property
    def unsent(self) -> bool:
        """Whether the engine has to read before more can be written."""
        return bool(self._left)

    def flush(self) -> bool:
        """Hand over what fits. True: something did."""
        moved = False
        try:
            while self._left:
                sent = self._sock.send(self._left[0])
                moved = True
                if sent == len(self._left[0]):
                    self._left.popleft()
                else:
                    self._left[0] = self._left[0][sent:]
            if self._ended:
                self._sock.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError:  # the engine has closed it
            self._left.clear()
            self._out.send(_RESET)
        return moved

    def pump(self) -> bool:
        """Take what the engine has written. True: something was there."""
        if self._out.in_flight >= WINDOW or self._closed:
            return False
        try:
            data = self._sock.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            self._out.send(_RESET)
            self.close()
            return True
        if data:
            self._out.send(data)
        else:
            self._out.send(_END)
            self.close()
        return True

    def drop(self, mark: _Mark | None) -> None:
        """End it from outside: its process crashes, or the connection is cut."""
        self.pump()  # what was written before
        if mark is not None:
            self._out.send(mark)
        self._out.dead = True
        self.close()

    def close(self) -> None:
        """Close this side; the engine reads the end."""
        if not self._closed:
            self._closed = True
            self._host.dirty = True
            self._host.ends.pop(self, None)
            self._network.remove_relay(self)
            self._sock.close()


class SimListener(StreamListener):
    """A port of a simulated process."""

    def __init__(self, host: Host, address: Address, on_stream: Callable[[Stream], None]) -> None:
        self.address = address
        self.on_stream = on_stream
        self._host = host

    def close(self) -> None:
        """Stop accepting."""
        if self._host.listeners.get(self.address.port) is self:
            del self._host.listeners[self.address.port]


class Host:
    """A simulated process: one incarnation of one cluster id.

    Attributes
    ----------
    cluster_id : int
    incarnation : int
        Counts the processes of this cluster id, from 1.
    ip : str
        Its address, the same for all incarnations.
    crashed, silent, stopped : bool
    """

    def __init__(self, network: Network, cluster_id: int, place: int, incarnation: int) -> None:
        self.network = network
        self.cluster_id = cluster_id
        self.place = place
        self.incarnation = incarnation
        self.ip = f"127.1.{(place + 1) >> 8}.{(place + 1) & 255}"
        self.chance = random.Random(f"{network.seed}/{place}/{incarnation}")
        self.crashed = False
        self.silent = False
        self.stopped = False
        self.parked: list[asyncio.Handle] = []
        self.lag = (0.0, 0.0)
        self.dirty = True
        self.not_before: int | None = None
        self.engine: _core.Engine | None = None
        self.listeners: dict[int, SimListener] = {}
        self.ends: dict[SimStream | _Relay, None] = {}
        self.context = contextvars.copy_context()
        self.context.run(HOST.set, self)
        self._ports = 40000

    def free_port(self) -> int:
        """Return a port number for the outgoing end of a connection."""
        self._ports += 1
        return self._ports


class Network:
    """What is between simulated processes, on the clock of a `VirtualLoop`.

    Parameters
    ----------
    loop : VirtualLoop
    seed : int
    way : Way
        How messages go unless `set_way` says otherwise.
    trace : Trace
    left_out : sequence of str
        Rules that the engines break, for tests of the tests; see `_core.SimNetwork`.

    Attributes
    ----------
    on_access : list of callable
        Called with each `Access` to memory, in order.
    describe : callable
        Returns lines that say what is under way, for `SimulationStuck`.
    """

    def __init__(self, loop: VirtualLoop, seed: int, way: Way, trace: Trace, left_out: tuple[str, ...] = ()) -> None:
        self.loop = loop
        self.seed = seed
        self.trace = trace
        self.chance = random.Random(f"{seed}/network")
        self.native = _core.SimNetwork(self.chance.getrandbits(64), left_out)
        self.native.advance(loop.now_ns - self.native.now_ns())
        self.context = contextvars.Context()
        self.blocked_pipes: dict[_Pipe, None] = {}
        self.on_access: list[Callable[[Access], None]] = []
        self.describe: Callable[[], list[str]] = list
        self.hosts: dict[int, Host] = {}  # by place, the newest
        self.running: list[Host] = []  # with an engine
        self._places: dict[int, int] = {}
        self._clusters: list[int] = []
        self._way = way
        self._ways: dict[tuple[int, int], Way] = {}
        # Source or target, and how messages go from or to it, for processes to come.
        self._ways_of_one: list[tuple[int | None, int | None, Way]] = []
        self._free_at: dict[tuple[int, int], float] = {}
        self._connections = 0
        self._changed: asyncio.Future[None] | None = None
        self._relays: dict[int, _Relay] = {}
        self._order: dict[int, int] = {}
        self._relays_made = 0
        self._poll = select.epoll()

    def close(self) -> None:
        """Let go of what the kernel lends."""
        for relay in tuple(self._relays.values()):
            relay.close()
        self._poll.close()

    def note(self, *event: Any) -> None:
        """Add to the trace what happens now. A replay that differs fails in the next turn of the loop."""
        try:
            self.trace.add(self.loop.now_ns, *event)
        except ReplayDiverged as why:
            self.loop.failure = why

    # Processes. ---------------------------------------------------------------------------------------------

    def new_host(self, cluster_id: int) -> Host:
        """Start a process. The last one of this cluster id has to be gone."""
        place = self._place(cluster_id)
        old = self.hosts.get(place)
        host = self.hosts[place] = Host(self, cluster_id, place, old.incarnation + 1 if old is not None else 1)
        self.note("start", cluster_id, host.incarnation)
        self._wake()
        return host

    def host(self, cluster_id: int) -> Host:
        """Return the newest process of a cluster id. Raises ArgumentError if there never was one."""
        host = self.hosts.get(self._places.get(cluster_id, -1))
        if host is None:
            started = ", ".join(str(host.cluster_id) for host in self.hosts.values()) or "none"
            raise ArgumentError(
                f"cluster_id={cluster_id!r} was never started in this simulation; started are: {started}",
                hint="start it first, with SimCluster.datadist",
            )
        return host

    def crash(self, host: Host, *, silent: bool) -> None:
        """End a process at once. Unless `silent`, its host closes its connections; else nothing tells its peers."""
        self.native.crash(host.place)
        host.crashed, host.silent = True, silent
        host.listeners.clear()
        for end in tuple(host.ends):
            end.drop(None if silent else _RESET)
        self.note("crash", host.cluster_id, host.incarnation)

    def stop(self, host: Host) -> None:
        """Stop a process as SIGSTOP does: neither its engine nor its tasks go on."""
        if not host.stopped:
            host.stopped = True
            self.loop.frozen += 1
            self.note("stop", host.cluster_id)

    def resume(self, host: Host) -> None:
        """Undo `stop`."""
        if host.stopped:
            host.stopped = False
            host.dirty = True
            self.loop.frozen -= 1
            self.loop.thaw(host)
            self.note("resume", host.cluster_id)

    def cut(self, one: Host, other: Host) -> None:
        """Break all connections between two processes."""
        for host, peer in ((one, other), (other, one)):
            for end in tuple(host.ends):
                if end._out.target is peer:
                    end.drop(_RESET)
        self.note("cut", one.cluster_id, other.cluster_id)

    # Ways. --------------------------------------------------------------------------------------------------

    def way(self, source: Host, target: Host) -> Way:
        """Return how messages go from one process to another."""
        return self._ways.get((source.place, target.place), self._way)

    def set_way(self, way: Way, source: int | None = None, target: int | None = None) -> None:
        """Say how messages go from one cluster id to another from now on; None is every one."""
        one = None if source is None else self._place(source)
        other = None if target is None else self._place(target)
        if one is None and other is None:
            self._way = way
            self._ways_of_one.clear()
        elif one is None or other is None:
            self._ways_of_one = [rule for rule in self._ways_of_one if rule[:2] != (one, other)]
            self._ways_of_one.append((one, other, way))
        places = range(len(self._clusters))
        for pair in itertools.product(places if one is None else (one,), places if other is None else (other,)):
            if pair[0] != pair[1]:
                self._ways[pair] = way
                self._tell_native(*pair)
        if not way.blocked:
            pipes, self.blocked_pipes = self.blocked_pipes, {}
            for pipe in pipes:
                if self.way(pipe.source, pipe.target).blocked:
                    self.blocked_pipes[pipe] = None
                else:
                    pipe.open()
        self._wake()

    def way_between(self, source: int, target: int) -> Way:
        """Return how messages go from one cluster id to another."""
        return self._ways.get((self._place(source), self._place(target)), self._way)

    def _place(self, cluster_id: int) -> int:
        """Return the place of a cluster id, whose first process may still have to come."""
        place = self._places.get(cluster_id)
        if place is None:
            place = self._places[cluster_id] = len(self._clusters)
            self._clusters.append(cluster_id)
            for other in range(place):
                for pair in ((place, other), (other, place)):
                    for source, target, way in self._ways_of_one:
                        if pair[0] == source or pair[1] == target:
                            self._ways[pair] = way
                    self._tell_native(*pair)
        return place

    def _tell_native(self, source: int, target: int) -> None:
        way = self._ways.get((source, target), self._way)
        self.native.set_way(
            source,
            target,
            latency=_ns_pair(way.latency),
            bytes_per_second=int(way.bandwidth),
            fragment_bytes=way.fragment,
            loss=way.loss,
            resend=int(way.resend * 1e9),
            duplicate=way.duplicate,
            reorder=way.reorder,
            reorder_most=int(way.reorder_by * 1e9),
            visible=_ns_pair(way.visible),
            blocked=way.blocked,
        )

    def delay_ns(self, source: Host, target: Host, size: int) -> int:
        """Draw how long a message takes."""
        way = self.way(source, target)
        seconds = self.chance.uniform(*way.latency)
        if way.loss:
            resend = way.resend
            while self.chance.random() < min(way.loss, 0.9):
                seconds += resend
                resend *= 2
        if way.bandwidth:
            key = source.place, target.place
            free_at = max(self._free_at.get(key, 0.0), self.loop.time()) + size / way.bandwidth
            self._free_at[key] = free_at
            seconds += free_at - self.loop.time()
        if target.lag[1]:
            seconds += self.chance.uniform(*target.lag)
        return int(seconds * 1e9)

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)
        self._changed = None

    async def _trip(self, source: Host, target: Host) -> None:
        """Wait as long as a message takes."""
        while self.way(source, target).blocked:
            if self._changed is None:
                self._changed = self.loop.create_future()
            await asyncio.shield(self._changed)
        await asyncio.sleep(self.delay_ns(source, target, 1) / 1e9)

    # Connections. -------------------------------------------------------------------------------------------

    async def connect(self, source: Host, address: Address) -> Stream:
        """Connect to a port. Raises OSError."""
        target = self._host_at(source, address.host)
        while True:
            await self._trip(source, target)
            target = self.hosts[target.place]
            if not (target.crashed and target.silent):
                break
            await asyncio.sleep(_SYN_AGAIN)  # nobody answers
        listener = target.listeners.get(address.port)
        if listener is None or source.crashed:
            await self._trip(target, source)
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        self._connections += 1
        there = _Pipe(self, self._connections, source, target)
        back = _Pipe(self, self._connections, target, source)
        there.reverse, back.reverse = back, there
        port = Address(source.ip, source.free_port())
        ours = SimStream(source, there, back, 0, address, str(address))
        theirs = SimStream(target, back, there, 1, port, str(port))
        self.note("connect", source.cluster_id, target.cluster_id, self._connections)
        self.loop.call_soon(listener.on_stream, theirs, context=target.context)
        try:
            await self._trip(target, source)
        except BaseException:
            ours.close()
            raise
        return ours

    def _host_at(self, source: Host, name: str) -> Host:
        if name in ("127.0.0.1", "localhost", source.ip):
            return source
        for host in self.hosts.values():
            if host.ip == name:
                return host
        raise OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH))

    def listen(self, host: Host, address: Address, on_stream: Callable[[Stream], None]) -> SimListener:
        """Listen on a port of a process. Raises OSError."""
        if address.host not in ("0.0.0.0", "::", "127.0.0.1", "localhost", host.ip):
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
        port = address.port
        if not port:
            port = next(port for port in range(FIRST_PORT, 65536) if port not in host.listeners)
        if port in host.listeners:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        listener = host.listeners[port] = SimListener(host, Address(host.ip, port), on_stream)
        return listener

    def add_relay(self, relay: _Relay) -> None:
        """Look at a relay from now on."""
        self._relays_made += 1
        self._relays[relay.fd] = relay
        self._order[relay.fd] = self._relays_made
        self._poll.register(relay.fd, select.EPOLLIN)

    def remove_relay(self, relay: _Relay) -> None:
        """Look at it no more."""
        if self._relays.get(relay.fd) is relay:
            del self._relays[relay.fd]
            self._poll.unregister(relay.fd)

    # The world of the loop. ---------------------------------------------------------------------------------

    def advance(self, ns: int) -> None:
        """Follow the loop's clock."""
        self.native.advance(ns)

    def settle(self) -> None:
        """Let all engines do what they can do now."""
        for _ in range(_MOST_TURNS):
            again = False
            now = self.loop.now_ns
            for host in tuple(self.running):
                engine = host.engine
                if engine is None or engine.released:
                    self.running.remove(host)
                    continue
                if host.stopped:
                    continue
                if host.lag[1] and not self._rested(host, engine, now):
                    continue
                engine.step()
            moved = self._pump()
            self._tell_accesses()
            for host in self.running:
                if not host.stopped and self._due(host) <= now:
                    again = True
            if not moved and not again:
                return
        raise SimulationStuck(f"the engines do not come to rest at {self.loop.time():.6f} s (seed {self.seed})")

    def _rested(self, host: Host, engine: _core.Engine, now: int) -> bool:
        """Whether an engine whose process is slow gets its turn."""
        if not host.dirty and engine.next_due() > now:
            return False
        if host.not_before is None:
            host.not_before = now + int(self.chance.uniform(*host.lag) * 1e9)
        if now < host.not_before:
            return False
        host.not_before, host.dirty = None, False
        return True

    def _due(self, host: Host) -> int:
        assert host.engine is not None
        if host.engine.released:
            return _core.NEVER
        due = host.engine.next_due()
        if host.lag[1]:
            if host.not_before is not None:
                return host.not_before
            if host.dirty:
                return self.loop.now_ns + 1
        return due

    def _pump(self) -> bool:
        moved = False
        for fd in sorted((fd for fd, _ in self._poll.poll(0)), key=self._order.__getitem__):
            relay = self._relays.get(fd)
            if relay is not None and relay.pump():
                moved = True
        for relay in tuple(self._relays.values()):
            if relay.unsent and relay.flush():
                moved = True
        return moved

    def _tell_accesses(self) -> None:
        for row in self.native.take_accesses():
            at, place, life, cache, address, nbytes, tensor, write, by, by_life, op, offset = row
            access = Access(
                at / 1e9,
                write,
                self._clusters[place],
                life,
                cache,
                tensor,
                offset,
                nbytes,
                address,
                self._clusters[by],
                by_life,
                op,
            )
            kind = "write" if write else "read"
            self.note(kind, access.cluster_id, cache, tensor, offset, nbytes, access.by_cluster, op)
            for hook in self.on_access:
                hook(access)

    def next_due(self) -> int | None:
        """Return when an engine has something to do, in ns."""
        due = min((self._due(host) for host in self.running if not host.stopped), default=_core.NEVER)
        return None if due == _core.NEVER else due

    def stuck(self) -> Exception:
        """Say that nothing goes on, or everything for too long, and leave time to clean up."""
        now = self.loop.now_ns
        over = self.loop.end_ns is not None and (self.next_due() is not None)
        why = "the simulation goes on for longer than its limit" if over else "nothing more can happen"
        if self.loop.end_ns is not None:
            self.loop.end_ns = max(now, self.loop.end_ns) + _CLEANING_NS
        said = "".join(f"\n  {line}" for line in self.describe())
        return SimulationStuck(f"seed {self.seed}, at {now / 1e9:.6f} s: {why}{said}")

    def heal(self) -> None:
        """Open all ways, and let all processes go on."""
        self._ways_of_one = [(one, other, way.replace(blocked=False)) for one, other, way in self._ways_of_one]
        everywhere, self._way = self._way, self._way.replace(blocked=False)
        for source, target in itertools.permutations(range(len(self._clusters)), 2):
            way = self._ways.get((source, target), everywhere)
            if way.blocked:
                self.note("unblock", self._clusters[source], self._clusters[target])
                self.set_way(way.replace(blocked=False), self._clusters[source], self._clusters[target])
        for host in self.hosts.values():
            self.resume(host)


def _ns_pair(pair: tuple[float, float]) -> tuple[int, int]:
    return int(pair[0] * 1e9), int(pair[1] * 1e9)


class SimRuntime(Runtime):
    """The runtime of a DataDist in a simulated process.

    Parameters
    ----------
    host : Host
    """

    def __init__(self, host: Host) -> None:
        super().__init__(host.network.loop)
        self.host = host
        self.chance = host.chance

    async def choose_rdma(self, devices: tuple[str, ...], gid_index: int | None) -> tuple[bool, str, int, str]:
        """Find no RDMA device."""
        return False, "", -1, "simulated processes have no RDMA"

    async def open_hixl(self, config: Config, listen: str | None) -> tuple[_core.HixlEngine | None, str]:
        """Open no HIXL engine."""
        return None, "simulated processes have no HIXL"

    def probe_transports(self, names: Sequence[str]) -> list[tuple[str, bool, str]]:
        """Return which transports there are: `sim`, and tcp over the simulated network."""
        return [
            ("sim", True, "simulated"),
            ("tcp", True, "over the simulated network"),
            ("shm", False, "simulated processes share no memory"),
        ]

    def acquire_engine(self, copy_threads: int, io_threads: int) -> tuple[_core.Engine, bool]:
        """Return a stepped engine of its own."""
        engine = _core.Engine.stepped(self.host.network.native, self.host.place)
        self.host.engine = engine
        self.host.network.running.append(self.host)
        return engine, False

    def in_thread(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Call at once: there are no threads."""
        return self.loop.run_in_executor(None, function, *args)

    async def connect(self, address: Address) -> Stream:
        """Connect to a simulated process. Raises OSError."""
        return await self.host.network.connect(self.host, address)

    async def listen(
        self, address: Address, on_stream: Callable[[Stream], None], current: StreamListener | None = None
    ) -> StreamListener:
        """Listen on a simulated port; see `Runtime.listen`."""
        if current is not None and current.address == Address(self.host.ip, address.port or current.address.port):
            return current
        return self.host.network.listen(self.host, address, on_stream)
