"""A proxy for real TCP that delays, slows down, holds, loses and cuts what passes.

::

    async with FaultProxy(prefill.listen_address) as proxy:
        await decode.link(adt.ClusterInfo(1, proxy.address))
        proxy.cut(after=100_000, direction="down")  # in the middle of what the target sends
        ...

All connections of a link go through the address that was dialled, so one proxy stands between two nodes for control and
data alike. It is real TCP only where the link is: ``Config(transports=("tcp",))`` keeps two nodes of one host from
sharing memory instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Literal, Self

from ..errors import ArgumentError, UsageError
from ..types import Address, parse_address
from .clock import need_real_time

__all__ = ["Direction", "FaultProxy"]

Direction = Literal["up", "down", "both"]
"""``"up"``: from who connects to the target; ``"down"``: from the target; ``"both"``."""

_Way = Literal["up", "down"]
_Action = Literal["stall", "drop", "cut", "half_close"]

_CHUNK: Final = 64 * 1024
# What one direction of a connection may hold: as much as a fast network keeps on its way for a second or so.
_HELD: Final = 64 << 20
_RESET: Final = struct.pack("ii", 1, 0)


@dataclass
class _Trigger:
    """A fault that waits for its byte."""

    at: int
    action: _Action


class _Rules:
    """What happens to one direction of all connections."""

    def __init__(self) -> None:
        self.passed = 0  # bytes that were let through, or swallowed
        self.delay = self.jitter = 0.0
        self.rate: float | None = None
        self.free_at = 0.0  # when the wire has sent what it was given, at that rate
        self.piece = _CHUNK
        self.trigger: _Trigger | None = None
        self.stalled = self.dropping = False

    def heal(self) -> None:
        self.delay = self.jitter = 0.0
        self.rate, self.free_at, self.piece, self.trigger = None, 0.0, _CHUNK, None
        self.stalled = self.dropping = False


class _Flow:
    """One direction of one connection: a task reads, another writes when the time has come."""

    def __init__(
        self, proxy: FaultProxy, pair: _Connection, way: _Way, source: socket.socket, sink: socket.socket
    ) -> None:
        self._proxy, self._pair, self._way = proxy, pair, way
        self._source, self._sink = source, sink
        self._held: deque[tuple[float, bytes]] = deque()  # when to let go, and what; b"" is the end
        self._bytes = 0
        self._last = 0.0
        self.swallowed = False

    async def read(self) -> None:
        loop, rules = self._proxy._loop, self._proxy._rules[self._way]
        while True:
            while self._bytes >= _HELD:
                await self._proxy._wait()
            data = await loop.sock_recv(self._source, _CHUNK)
            late = rules.delay + (self._proxy._random.uniform(0.0, rules.jitter) if rules.jitter else 0.0)
            # Whatever the delays are, a byte stream has one order.
            self._last = max(self._last, loop.time() + late)
            self._held.append((self._last, data))
            self._bytes += len(data)
            self._proxy._wake()
            if not data:
                return

    async def write(self) -> None:
        loop, rules = self._proxy._loop, self._proxy._rules[self._way]
        while True:
            while not self._held or rules.stalled:
                await self._proxy._wait()
            if self._pair.ended:
                return
            due, data = self._held[0]
            due = max(due, rules.free_at)
            if (now := loop.time()) < due:
                # A change of the rules may come first.
                await self._proxy._wait(due - now)
                continue
            if not data:
                if not self.swallowed:
                    self._sink.shutdown(socket.SHUT_WR)
                return
            room = min(len(data), rules.piece)
            if rules.rate is not None:
                room = min(room, max(1, int(rules.rate * 0.01)))
            if rules.trigger is not None:
                room = min(room, rules.trigger.at - rules.passed)
            if room:
                piece, rest = data[:room], data[room:]
                if rest:
                    self._held[0] = (due, rest)
                else:
                    self._held.popleft()
                self._bytes -= room
                rules.passed += room
                if rules.rate is not None:
                    rules.free_at = max(now, rules.free_at) + room / rules.rate
                if rules.dropping or self.swallowed:
                    self.swallowed = self._pair.damaged = True
                else:
                    await loop.sock_sendall(self._sink, piece)
                self._proxy._wake()
            if rules.trigger is not None and rules.passed >= rules.trigger.at:
                action, rules.trigger = rules.trigger.action, None
                self._proxy._act(action, self._way, self)


class _Connection:
    """A client's connection and ours to the target."""

    def __init__(self, proxy: FaultProxy, client: socket.socket) -> None:
        self._proxy, self._client = proxy, client
        self._target: socket.socket | None = None
        self.flows: dict[_Way, _Flow] = {}
        self.damaged = False  # bytes were swallowed: it can never go on
        self.ended = False  # no byte passes any more: it is being cut
        self.task = asyncio.create_task(self._run(), name="proxied connection")

    async def _run(self) -> None:
        try:
            target = await self._connect()
            self._target = target
            self.flows = {
                "up": _Flow(self._proxy, self, "up", self._client, target),
                "down": _Flow(self._proxy, self, "down", target, self._client),
            }
            async with asyncio.TaskGroup() as group:
                for flow in self.flows.values():
                    group.create_task(flow.read())
                    group.create_task(flow.write())
        except* OSError:
            self.ended = True  # one side has broken it, and so the other sees it broken
        finally:
            for sock in (self._client, self._target):
                if sock is not None:
                    if self.ended:
                        with contextlib.suppress(OSError):
                            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                    sock.close()
            self._proxy._connections.discard(self)
            self._proxy._wake()

    async def _connect(self) -> socket.socket:
        loop, address = self._proxy._loop, self._proxy.target
        found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        family, _, _, _, sockaddr = found[0]
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, sockaddr)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except BaseException:
            sock.close()
            raise
        return sock

    def cut(self) -> None:
        """Reset both sides."""
        self.ended = True
        self.task.cancel()

    def half_close(self, way: _Way) -> None:
        """Tell the receiver of one direction that no more will come; what comes all the same is swallowed."""
        if (flow := self.flows.get(way)) is not None and not flow.swallowed:
            flow.swallowed = True
            with contextlib.suppress(OSError):
                flow._sink.shutdown(socket.SHUT_WR)


class FaultProxy:
    """Stands between who connects and a target, on a port of its own of 127.0.0.1.

    Use it as ``async with FaultProxy(address) as proxy:``, in the event loop of the test, whose turns carry every byte:
    a test that blocks its loop holds up the connections. The methods take effect before another byte passes. Each sets
    one fault for all connections, those to come included; `heal` ends them all.

    Parameters
    ----------
    target : str, pair or Address
        Where to connect to: ``"host:port"`` or ``(host, port)``.
    seed : int, optional
        Of the jitter.

    Attributes
    ----------
    target : Address
        May be changed; it counts for new connections.

    Notes
    -----
    A byte on its way through TCP is late or lost with its connection, never changed, and never lost alone; so the proxy
    has no such faults.
    """

    def __init__(self, target: str | tuple[str, int] | Address, *, seed: int = 0) -> None:
        self.target: Address = parse_address(target)
        self._random = random.Random(seed)
        self._rules: dict[_Way, _Rules] = {"up": _Rules(), "down": _Rules()}
        self._connections: set[_Connection] = set()
        self._accepted = 0
        self._address: Address | None = None
        self._keeper: socket.socket | None = None
        self._listener: socket.socket | None = None

    async def __aenter__(self) -> Self:
        if self._address is not None:
            raise UsageError("a FaultProxy is opened once")
        need_real_time("a proxy")
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        # Keeps the port while the proxy refuses: nobody else can get it meanwhile.
        self._keeper = socket.socket()
        self._keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._keeper.bind(("127.0.0.1", 0))
        self._address = Address(*self._keeper.getsockname())
        self._listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_listening()
        tasks = [connection.task for connection in self._connections]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._keeper is not None:
            self._keeper.close()

    # What to look at.

    @property
    def address(self) -> str:
        """Where to connect to instead of the target: ``"127.0.0.1:port"``."""
        if self._address is None:
            raise UsageError("the proxy is not open", hint="use it as `async with FaultProxy(...) as proxy:`")
        return str(self._address)

    @property
    def connections(self) -> int:
        """How many connections there are."""
        return len(self._connections)

    @property
    def accepted(self) -> int:
        """How many connections there have been in all."""
        return self._accepted

    def passed(self, direction: Direction = "both") -> int:
        """Return how many bytes have been passed on, or swallowed, over all connections."""
        return sum(self._rules[way].passed for way in _ways(direction))

    async def wait_passed(self, count: int, direction: Direction = "both") -> None:
        """Wait until `count` bytes in all have been passed on, or swallowed."""
        while self.passed(direction) < count:
            await self._wait()

    # Faults.

    def delay(self, seconds: float, *, jitter: float = 0.0, direction: Direction = "both") -> None:
        """Let each byte arrive `seconds` later, and up to `jitter` seconds more; their order stays."""
        _check(seconds >= 0 and jitter >= 0, f"delay and jitter must not be negative, got {seconds!r} and {jitter!r}")
        for way in _ways(direction):
            self._rules[way].delay, self._rules[way].jitter = seconds, jitter
        self._wake()

    def throttle(self, bytes_per_second: float, *, direction: Direction = "both") -> None:
        """Let no more pass than this, over all connections of a direction together."""
        _check(bytes_per_second > 0, f"bytes_per_second must be positive, got {bytes_per_second!r}")
        for way in _ways(direction):
            self._rules[way].rate, self._rules[way].free_at = bytes_per_second, 0.0
        self._wake()

    def slice(self, size: int, *, direction: Direction = "both") -> None:
        """Pass on at most `size` bytes at a time: receivers see partial messages."""
        _check(size > 0, f"size must be positive, got {size!r}")
        for way in _ways(direction):
            self._rules[way].piece = size
        self._wake()

    def stall(self, *, after: int = 0, direction: Direction = "both") -> None:
        """Hold everything after the next `after` bytes, until `heal`. Connections stay, and new ones are made."""
        self._arm("stall", after, direction)

    def drop(self, *, after: int = 0, direction: Direction = "both") -> None:
        """Swallow everything after the next `after` bytes, as a host that dies with what it has acknowledged.

        A connection that has lost a byte passes on nothing of that direction any more; `heal` cuts it.
        """
        self._arm("drop", after, direction)

    def cut(self, *, after: int = 0, direction: Direction = "both") -> None:
        """Reset connections after the next `after` bytes.

        At once: all of them. Later: the one that carries the last of these bytes, in the direction that comes to it
        first. New connections pass.
        """
        self._arm("cut", after, direction)

    def half_close(self, *, after: int = 0, direction: Direction = "both") -> None:
        """Tell receivers that no more will come, after the next `after` bytes; the other direction goes on.

        Which connections: see `cut`.
        """
        self._arm("half_close", after, direction)

    def refuse(self) -> None:
        """Refuse new connections, until `heal`."""
        self._stop_listening()

    def heal(self) -> None:
        """End all faults: what was held goes on, and connections that have lost bytes are cut."""
        for rules in self._rules.values():
            rules.heal()
        for connection in tuple(self._connections):
            if connection.damaged:
                connection.cut()
        if self._listener is None and self._keeper is not None:
            self._listen()
        self._wake()

    def _arm(self, action: _Action, after: int, direction: Direction) -> None:
        _check(after >= 0, f"after must not be negative, got {after!r}")
        for way in _ways(direction):
            rules = self._rules[way]
            if after:
                rules.trigger = _Trigger(rules.passed + after, action)
            else:
                self._act(action, way, None)
        self._wake()

    def _act(self, action: _Action, way: _Way, flow: _Flow | None) -> None:
        connections = tuple(self._connections) if flow is None else (flow._pair,)
        match action:
            case "stall":
                self._rules[way].stalled = True
            case "drop":
                self._rules[way].dropping = True
            case "cut":
                for rules in self._rules.values():  # once
                    if rules.trigger is not None and rules.trigger.action == "cut":
                        rules.trigger = None
                for connection in connections:
                    connection.cut()
            case "half_close":
                for connection in connections:
                    connection.half_close(way)

    # Waiting: every change wakes all, who look for themselves.

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait(self, seconds: float | None = None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    # Listening.

    def _listen(self) -> None:
        assert self._address is not None
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self._address.host, self._address.port))
            listener.listen(1024)
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
        self._listener = listener
        self._loop.add_reader(listener.fileno(), self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        try:
            client, _ = listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # it was gone before it was accepted
        client.setblocking(False)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._accepted += 1
        self._connections.add(_Connection(self, client))
        self._wake()

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None


def _ways(direction: Direction) -> tuple[_Way, ...]:
    if direction == "both":
        return ("up", "down")
    _check(direction in ("up", "down"), f"direction must be 'up', 'down' or 'both', got {direction!r}")
    return (direction,)


def _check(right: bool, message: str) -> None:
    if not right:
        raise ArgumentError(message)
