"""The event loop as the library uses it: streams, timers, time, tasks and the completion ring.

This is the only module that touches the event loop. `Runtime` is what everything else is given; a simulated
network replaces its `connect` and `listen`, and a virtual clock comes with the loop itself, because all times
here are the loop's.

Sockets are our own `socket.socket` objects, watched with ``add_reader`` and ``add_writer`` by number. So a
socket can be taken off the loop and handed to the engine at any moment, nothing is closed behind the loop's
back, and a forked child can close what it must not hold. All descriptors close on exec.
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread  # noqa: F401  # asyncio's first use would load it, when descriptors may have run out
import contextlib
import errno
import os
import random
import socket
import struct
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import anyio
import anyio.lowlevel

from ._race import race
from ._scopes import Deadline, Tasks, shielded
from .observe import get_logger
from .types import Address

if TYPE_CHECKING:
    from . import _core
    from .config import Config

__all__ = [
    "Deadline",
    "HostChannel",
    "HostListener",
    "Listener",
    "RingWatch",
    "Runtime",
    "SocketStream",
    "SocketWatch",
    "Stream",
    "StreamListener",
    "Tasks",
    "Timer",
    "adopt_socket",
    "at_fork_in_child",
    "close_all",
    "fork_generation",
    "shielded",
]

_log = get_logger()

RECEIVE_BYTES: Final = 64 * 1024
_ACCEPTS_PER_TURN: Final = 16
_RECEIVES_PER_TURN: Final = 8
_SENDS_PER_TURN: Final = 8
_BACKLOG: Final = 1024
_ACCEPT_PAUSE: Final = 0.1
_NO_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


# Fork. ------------------------------------------------------------------------------------------------------
#
# A child shares the parent's sockets and its epoll instance. It closes the descriptors, and nothing else: an
# epoll_ctl from the child would change what the parent watches.

_generation = 0
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_fork_hooks: weakref.WeakSet[Any] = weakref.WeakSet()


def fork_generation() -> int:
    """Return a number that differs between a process and its forked children."""
    return _generation


def adopt_socket(sock: socket.socket) -> socket.socket:
    """Have a forked child close this socket."""
    _sockets.add(sock)
    return sock


class _ForkHook(Protocol):
    def _after_fork_in_child(self) -> None: ...


def at_fork_in_child(target: _ForkHook) -> None:
    """Call ``target._after_fork_in_child()`` in forked children, as long as it lives."""
    _fork_hooks.add(target)


def _after_fork_in_child() -> None:
    global _generation
    _generation += 1
    for sock in tuple(_sockets):
        fd = sock.detach()
        if fd >= 0:
            os.close(fd)
    _sockets.clear()
    _rings.clear()
    for target in tuple(_fork_hooks):
        target._after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)


# Time. -----------------------------------------------------------------------------------------------------


class Timer(Protocol):
    """What `Runtime.call_later` returns."""

    def cancel(self) -> None:
        """Call it off. Harmless when it has fired."""


# Watched sockets. -------------------------------------------------------------------------------------------


class _Watched:
    """A non-blocking socket of ours, with at most one waiting reader and one waiting writer."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._loop = loop
        self._sock = adopt_socket(sock)
        self._fd = sock.fileno()
        self._generation = _generation
        self._reading: asyncio.Future[None] | None = None
        self._writing: asyncio.Future[None] | None = None
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether `close` or `detach` was called."""
        return self._closed

    def _check_open(self) -> None:
        if self._closed or self._generation != _generation:
            raise ConnectionAbortedError(errno.ECONNABORTED, "the connection was closed on this side")

    async def _readable(self) -> None:
        assert self._reading is None, "one reader at a time"
        self._check_open()
        self._reading = waiter = self._loop.create_future()
        self._loop.add_reader(self._fd, _wake, waiter)
        try:
            await waiter
        finally:
            self._stop_reading()

    async def _writable(self) -> None:
        assert self._writing is None, "one writer at a time"
        self._check_open()
        self._writing = waiter = self._loop.create_future()
        self._loop.add_writer(self._fd, _wake, waiter)
        try:
            await waiter
        finally:
            self._stop_writing()

    def _on_loop(self) -> bool:
        return not self._closed and self._generation == _generation and not self._loop.is_closed()

    def _stop_reading(self) -> None:
        if self._reading is not None:
            self._reading = None
            if self._on_loop():
                self._loop.remove_reader(self._fd)

    def _stop_writing(self) -> None:
        if self._writing is not None:
            self._writing = None
            if self._on_loop():
                self._loop.remove_writer(self._fd)

    def _fail_waiters(self, error: OSError) -> None:
        for waiter in (self._reading, self._writing):
            if waiter is not None and not waiter.done() and not self._loop.is_closed():
                waiter.set_exception(_again(error))

    def _leave_loop(self) -> None:
        """Take the socket off the loop; whoever waits for it gets ConnectionAbortedError."""
        reading, writing = self._reading, self._writing
        self._stop_reading()
        self._stop_writing()
        self._reading, self._writing = reading, writing
        self._fail_waiters(ConnectionAbortedError(errno.ECONNABORTED, "the connection was closed on this side"))
        self._reading = self._writing = None

    def close(self) -> None:
        """Close at once; what was not sent is lost. May be called again."""
        if not self._closed:
            if self._generation == _generation:
                self._leave_loop()
            self._closed = True
            _sockets.discard(self._sock)
            self._sock.close()

    def detach(self) -> int:
        """Take the socket off the loop and return its descriptor, which the caller owns from now on."""
        self._check_open()
        self._leave_loop()
        self._closed = True
        _sockets.discard(self._sock)
        return self._sock.detach()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _again(error: OSError) -> OSError:
    """Return a new error of the same kind: one object raised in two tasks would mix their tracebacks."""
    return OSError(error.errno, error.strerror)


class SocketWatch(_Watched):
    """Calls back whenever a socket of the engine is readable. Owns the descriptor, which is a duplicate.

    Parameters
    ----------
    loop : asyncio.AbstractEventLoop
    fd : int
        Of a stream socket; closed by `close`.
    callback : callable
        Reads what is there, or closes the watch.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int, callback: Callable[[], None]) -> None:
        super().__init__(loop, socket.socket(fileno=fd))
        loop.add_reader(self._fd, callback)

    def _leave_loop(self) -> None:
        if self._on_loop():
            self._loop.remove_reader(self._fd)


class Stream(ABC):
    """A byte stream. One task receives; sending never waits.

    Attributes
    ----------
    peer : str
        The other end, for messages.
    remote : Address
        The other end, to connect to it once more: a number, never a name.
    """

    peer: str
    remote: Address

    @abstractmethod
    async def receive(self, limit: int = RECEIVE_BYTES) -> bytes:
        """Return what has arrived, at least one byte; ``b""`` at the end. Raises OSError."""

    @abstractmethod
    async def wait_readable(self) -> bool:
        """Wait until something has arrived. False: the other side has closed. Raises OSError."""

    @abstractmethod
    def send(self, data: bytes) -> None:
        """Send, now or when there is room. An error shows at `receive` and `flush`."""

    @property
    @abstractmethod
    def unsent(self) -> int:
        """Bytes that found no room yet."""

    @abstractmethod
    async def flush(self, below: int = 0) -> None:
        """Wait until at most `below` bytes are unsent. Raises OSError."""

    @abstractmethod
    def close(self) -> None:
        """Close at once."""

    @abstractmethod
    def detach(self) -> int:
        """Give the descriptor away. Nothing may be unsent."""

    async def receive_exactly(self, size: int) -> bytes:
        """Return `size` bytes and take no byte more. Raises OSError; EOFError when the other side closes."""
        data = bytearray()
        while len(data) < size:
            more = await self.receive(size - len(data))
            if not more:
                raise EOFError(f"the other side closed after {len(data)} of {size} bytes")
            data += more
        return bytes(data)


class SocketStream(_Watched, Stream):
    """A TCP connection.

    Parameters
    ----------
    loop : asyncio.AbstractEventLoop
    sock : socket.socket
        Owned from now on.
    remote : Address
    peer : str, optional
        `remote` where it is left out.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, sock: socket.socket, remote: Address, peer: str | None = None
    ) -> None:
        super().__init__(loop, sock)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.remote = remote
        self.peer = str(remote) if peer is None else peer
        self._error: OSError | None = None
        self._out: deque[memoryview] = deque()
        self._unsent = 0
        self._sending = False
        self._flushers: list[tuple[int, asyncio.Future[None]]] = []
        self._received_in_turn = 0

    async def connect(self, sockaddr: tuple[Any, ...]) -> None:
        """Connect. Raises OSError."""
        code = self._sock.connect_ex(sockaddr)
        if code in (errno.EINPROGRESS, errno.EAGAIN, errno.EINTR):
            await self._writable()
            code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        # Where nobody listens on a port of the ephemeral range, the kernel may connect a socket to itself.
        if self._sock.getsockname() == self._sock.getpeername():
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))

    async def receive(self, limit: int = RECEIVE_BYTES) -> bytes:
        """Return what has arrived; see `Stream.receive`."""
        while True:
            self._check_usable()
            try:
                data = self._sock.recv(limit)
            except (BlockingIOError, InterruptedError):
                self._received_in_turn = 0
                await self._readable()
            except OSError as why:
                self._fail(why)
                raise
            else:
                self._received_in_turn += 1
                # A peer that never pauses must not keep the loop's other work from running.
                if self._received_in_turn >= _RECEIVES_PER_TURN:
                    self._received_in_turn = 0
                    await anyio.lowlevel.checkpoint()
                return data

    async def wait_readable(self) -> bool:
        """Wait until something has arrived; see `Stream.wait_readable`."""
        while True:
            self._check_usable()
            try:
                return self._sock.recv(1, socket.MSG_PEEK) != b""
            except (BlockingIOError, InterruptedError):
                await self._readable()
            except OSError as why:
                self._fail(why)
                raise

    def _check_usable(self) -> None:
        self._check_open()
        if self._error is not None:
            raise _again(self._error)

    def send(self, data: bytes) -> None:
        """Send, now or when there is room; see `Stream.send`."""
        if self._closed or self._error is not None or self._generation != _generation or not data:
            return
        view = memoryview(data)
        if not self._out:
            try:
                view = view[self._sock.send(view) :]
            except (BlockingIOError, InterruptedError):
                pass
            except OSError as why:
                self._fail(why)
                return
            if not view:
                return
        self._out.append(view)
        self._unsent += len(view)
        if not self._sending:
            self._sending = True
            self._loop.add_writer(self._fd, self._send_more)

    def _send_more(self) -> None:
        try:
            for _ in range(_SENDS_PER_TURN):
                if not self._out:
                    break
                sent = self._sock.send(self._out[0])
                self._unsent -= sent
                if sent == len(self._out[0]):
                    self._out.popleft()
                else:
                    self._out[0] = self._out[0][sent:]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as why:
            self._fail(why)
            return
        if not self._out:
            self._stop_sending()
        self._wake_flushers()

    def _stop_sending(self) -> None:
        if self._sending:
            self._sending = False
            if self._on_loop():
                self._loop.remove_writer(self._fd)

    def _wake_flushers(self) -> None:
        for flusher in tuple(self._flushers):
            below, waiter = flusher
            if self._unsent <= below:
                self._flushers.remove(flusher)
                _wake(waiter)

    @property
    def unsent(self) -> int:
        """Bytes that found no room yet."""
        return self._unsent

    async def flush(self, below: int = 0) -> None:
        """Wait until at most `below` bytes are unsent; see `Stream.flush`."""
        self._check_usable()
        if self._unsent <= below:
            return
        flusher = (below, self._loop.create_future())
        self._flushers.append(flusher)
        try:
            await flusher[1]
        finally:
            if flusher in self._flushers:
                self._flushers.remove(flusher)

    def _fail(self, error: OSError) -> None:
        """Keep the first error; everybody who waits or comes later gets it."""
        if self._error is None and not self._closed:
            self._error = error
            self._stop_sending()
            self._out.clear()
            self._unsent = 0
            self._fail_flushers(error)
            self._fail_waiters(error)

    def _fail_flushers(self, error: OSError) -> None:
        flushers, self._flushers = self._flushers, []
        for _, waiter in flushers:
            if not waiter.done() and not self._loop.is_closed():
                waiter.set_exception(_again(error))

    def _leave_loop(self) -> None:
        self._stop_sending()
        super()._leave_loop()
        self._out.clear()
        self._unsent = 0
        self._fail_flushers(ConnectionAbortedError(errno.ECONNABORTED, "the connection was closed on this side"))

    def detach(self) -> int:
        """Give the descriptor away; see `Stream.detach`."""
        assert not self._unsent, "unsent bytes would be lost"
        return super().detach()


# Listening. -------------------------------------------------------------------------------------------------


class StreamListener(ABC):
    """Accepts streams until it is closed."""

    address: Address

    @abstractmethod
    def close(self) -> None:
        """Stop accepting."""


class _Acceptor(_Watched, ABC):
    """Accepts a bounded number of connections in each turn of the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        super().__init__(loop, sock)
        self._pause: asyncio.TimerHandle | None = None
        self._accepting = True
        loop.add_reader(self._fd, self._accept)

    @abstractmethod
    def _accepted(self, sock: socket.socket, address: Any) -> None: ...

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            if self._closed:
                return
            try:
                sock, address = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as why:
                if why.errno in _NO_DESCRIPTORS:
                    # The connection stays in the queue and would wake the loop at once, again and again.
                    _log.warning("cannot accept for now", error=str(why), pause=_ACCEPT_PAUSE)
                    self._stop_accepting()
                    self._pause = self._loop.call_later(_ACCEPT_PAUSE, self._accept_again)
                    return
                continue  # that one connection was gone before it was accepted
            try:
                self._accepted(sock, address)
            except OSError:
                sock.close()  # it broke between accept and the first setsockopt

    def _stop_accepting(self) -> None:
        if self._accepting:
            self._accepting = False
            if self._on_loop():
                self._loop.remove_reader(self._fd)

    def _accept_again(self) -> None:
        self._pause = None
        if not self._closed and self._generation == _generation:
            self._accepting = True
            self._loop.add_reader(self._fd, self._accept)

    def _leave_loop(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        self._stop_accepting()
        super()._leave_loop()


class Listener(_Acceptor, StreamListener):
    """Listens on a TCP port.

    Parameters
    ----------
    loop : asyncio.AbstractEventLoop
    sock : socket.socket
        Bound and listening; owned from now on.
    on_stream : callable
        Called with each accepted stream, which it owns.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, sock: socket.socket, on_stream: Callable[[Stream], None]
    ) -> None:
        self.address = _address_of(sock.getsockname())
        self._on_stream = on_stream
        super().__init__(loop, sock)

    def _accepted(self, sock: socket.socket, address: Any) -> None:
        self._on_stream(SocketStream(self._loop, sock, _address_of(address)))


def _address_of(sockaddr: tuple[Any, ...]) -> Address:
    """Return the address as it can be connected to again."""
    host, port = sockaddr[:2]
    if len(sockaddr) == 4 and sockaddr[3] and "%" not in host:
        host = f"{host}%{sockaddr[3]}"  # a link-local address means nothing without its interface
    return Address(host.removeprefix("::ffff:") if "." in host else host, port)


# The unix side of a same-host link. -------------------------------------------------------------------------

_CREDENTIALS: Final = struct.Struct("3i")
_FD: Final = struct.Struct("i")
_FDS_SPACE: Final = socket.CMSG_SPACE(4 * _FD.size)


class HostChannel(_Watched):
    """A unix seqpacket connection to a process of the same host, which can carry descriptors."""

    def credentials(self) -> tuple[int, int]:
        """Return pid and uid of the other side, as the kernel tells; pid 0 if it is not visible from here."""
        raw = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(raw)
        return pid, uid

    async def send(self, data: bytes, fd: int = -1) -> None:
        """Send one message, and a descriptor, of which the other side gets a copy. Raises OSError."""
        fds = [fd] if fd >= 0 else []
        while True:
            self._check_open()
            try:
                socket.send_fds(self._sock, [data], fds)
                return
            except (BlockingIOError, InterruptedError):
                await self._writable()

    def receive_nowait(self, limit: int = 256) -> tuple[bytes, list[int]] | None:
        """Return one message and the descriptors with it, which the caller owns; None if there is none.

        The data is empty when the other side has closed. Raises OSError.
        """
        self._check_open()
        try:
            # Not socket.recv_fds, which drops its flags: these must close on exec from the first moment.
            data, control, flags, _ = self._sock.recvmsg(limit, _FDS_SPACE, socket.MSG_CMSG_CLOEXEC)
        except (BlockingIOError, InterruptedError):
            return None
        fds: list[int] = []
        for level, kind, content in control:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds += memoryview(content)[: len(content) // _FD.size * _FD.size].cast("i")
        if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
            close_all(fds)
            raise OSError(errno.EMSGSIZE, "the message or its descriptors do not fit")
        return data, fds

    async def receive(self, limit: int = 256) -> tuple[bytes, list[int]]:
        """Wait for one message; see `receive_nowait`."""
        while True:
            message = self.receive_nowait(limit)
            if message is not None:
                return message
            await self._readable()


class HostListener(_Acceptor):
    """Listens on an abstract unix socket; the name exists only in the kernel and needs no cleaning up."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        name: bytes,
        on_channel: Callable[[HostChannel], None],
    ) -> None:
        self.name = name
        self._on_channel = on_channel
        super().__init__(loop, sock)

    def _accepted(self, sock: socket.socket, address: Any) -> None:
        self._on_channel(HostChannel(self._loop, sock))


def close_all(fds: list[int]) -> None:
    """Close descriptors that nobody wants."""
    for fd in fds:
        os.close(fd)


# The completion ring. ---------------------------------------------------------------------------------------


_rings: dict[asyncio.AbstractEventLoop, RingWatch] = {}


class RingWatch:
    """The completion ring of one loop, shared by the DataDists there.

    Attributes
    ----------
    ring : _core.Ring
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, engine: _core.Engine, inline_budget: float, *, shared: bool
    ) -> None:
        from . import _core

        self._loop = loop
        self._shared = shared
        self._users = 0
        self._listeners: dict[Callable[[], None], None] = {}
        self.ring = _core.Ring(engine, loop.call_soon, inline_budget)
        self._fd = self.ring.fd
        loop.add_reader(self._fd, self._drain)

    @classmethod
    def acquire(
        cls, loop: asyncio.AbstractEventLoop, engine: _core.Engine, inline_budget: float, *, shared: bool
    ) -> RingWatch:
        """Return the watch of this loop, counting its users.

        Parameters
        ----------
        loop : asyncio.AbstractEventLoop
        engine : _core.Engine
        inline_budget : float
            Seconds; that of the first user counts.
        shared : bool
            Whether `engine` is the one of the process. An engine in step mode has a ring of its own.
        """
        watch = _rings.get(loop) if shared else None
        if watch is None:
            watch = cls(loop, engine, inline_budget, shared=shared)
            if shared:
                _rings[loop] = watch
        watch._users += 1
        return watch

    def _drain(self) -> None:
        try:
            self.ring.drain()
        finally:
            for listener in tuple(self._listeners):
                listener()

    def drain_all(self) -> None:
        """Hand over everything that waits, now. Failures of handlers go to the log."""
        while True:
            try:
                if not self.ring.drain():
                    break
            except Exception:
                _log.exception("a completion could not be handed over")
        self.ring.new_turn()

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each batch of completions."""
        self._listeners[listener] = None

    def remove_listener(self, listener: Callable[[], None]) -> None:
        """Undo `add_listener`."""
        self._listeners.pop(listener, None)

    def release(self) -> None:
        """Give one use back; the last one takes the ring off the loop."""
        self._users -= 1
        if self._users:
            return
        if self._shared:
            _rings.pop(self._loop, None)
        if not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
        # Whatever is left has no loop to hear of it, and would hold its caches for ever.
        self.ring.close()


# The runtime. -----------------------------------------------------------------------------------------------


class Runtime:
    """Streams, timers, time, tasks and chance of the running event loop.

    Attributes
    ----------
    loop : asyncio.AbstractEventLoop
    chance : random.Random
        All that is drawn at random, secrets included: the operating system's. A simulation has one with a seed.
    """

    chance: random.Random = random.SystemRandom()

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.loop = asyncio.get_running_loop() if loop is None else loop
        self._generation = _generation

    @property
    def closed(self) -> bool:
        """Whether the loop is closed, or belongs to the parent of this forked process."""
        return self.loop.is_closed() or self._generation != _generation

    def now(self) -> float:
        """Return the loop's time in seconds."""
        return self.loop.time()

    def future(self) -> asyncio.Future[Any]:
        """Return a new future."""
        return self.loop.create_future()

    def event(self) -> asyncio.Event:
        """Return a new event."""
        return asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        """Wait; 0 lets others run once."""
        await anyio.sleep(seconds)

    def is_current(self) -> bool:
        """Whether the caller runs in this loop, and so in its thread."""
        return asyncio._get_running_loop() is self.loop

    def call_soon(self, callback: Callable[..., Any], *args: Any) -> None:
        """Call in the next turn of the loop."""
        self.loop.call_soon(callback, *args)

    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any) -> None:
        """Call in the loop's thread, from any other. Does nothing if the loop is closed meanwhile."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(callback, *args)

    def call_later(self, seconds: float, callback: Callable[..., Any], *args: Any) -> Timer:
        """Call after `seconds`."""
        return self.loop.call_later(seconds, callback, *args)

    def root_task(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start the one task of a DataDist that is not in a task group: the one that holds the group."""
        return self.loop.create_task(coroutine, name=name)

    def free_task(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start a task that runs code of the user's: in no group, which would wait for it, or end by its failure."""
        task = self.loop.create_task(coroutine, name=name)
        # Nobody can end it once the loop was closed under it, and there is no use in saying so.
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        return task

    def being_cancelled(self) -> bool:
        """Whether somebody has asked the current task to end, and not only what it awaits."""
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0

    async def until_done(self, task: asyncio.Task[Any]) -> None:
        """Wait until a task has ended, however it ended."""
        await asyncio.wait((task,))

    def probe_transports(self, names: Sequence[str]) -> list[tuple[str, bool, str]]:
        """Return name, whether it is usable, and what was found or why not, of these transports but verbs and hixl.

        For those see `choose_rdma` and `open_hixl`: they open devices, which may take long.
        """
        from . import _core

        return _core.probe_transports([name for name in names if name not in ("verbs", "hixl")])

    async def choose_rdma(self, devices: tuple[str, ...], gid_index: int | None) -> tuple[bool, str, int, str]:
        """Find the RDMA device to use; see `_core.choose_rdma`."""
        from . import _core

        found: tuple[bool, str, int, str] = await self.in_thread(
            _core.choose_rdma, devices, -1 if gid_index is None else gid_index
        )
        return found

    async def open_hixl(self, config: Config, listen: str | None) -> tuple[_core.HixlEngine | None, str]:
        """Open the HIXL engine of a DataDist that listens at this address; None, and why, where that cannot be done."""
        from . import _hixl

        opened: tuple[_core.HixlEngine | None, str] = await self.in_thread(_hixl.open_engine, config, listen)
        return opened

    def acquire_engine(self, copy_threads: int, io_threads: int) -> tuple[_core.Engine, bool]:
        """Return the engine to use, and whether it is the one of the process."""
        from . import _core

        return _core.Engine.acquire(copy_threads, io_threads), True

    def ring(self, engine: _core.Engine, inline_budget: float, *, shared: bool = True) -> RingWatch:
        """Return the completion ring of this loop; see `RingWatch.acquire`."""
        return RingWatch.acquire(self.loop, engine, inline_budget, shared=shared)

    def in_thread(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Call in a worker thread what may take long in the kernel.

        Where there is no thread to be had, the future fails, and the call may still be made when there is one.
        """
        try:
            return self.loop.run_in_executor(None, function, *args)
        except RuntimeError as why:
            failed = self.loop.create_future()
            failed.set_exception(why)
            failed.exception()  # nobody has to ask
            return failed

    def watch(self, fd: int, callback: Callable[[], None]) -> SocketWatch:
        """Call back whenever a socket of the engine is readable; takes the descriptor over."""
        return SocketWatch(self.loop, fd, callback)

    async def resolve(self, address: Address, *, passive: bool = False) -> list[tuple[int, tuple[Any, ...]]]:
        """Return families and socket addresses of a host, best first; only names take a thread. Raises OSError."""
        flags = socket.AI_PASSIVE if passive else 0
        try:
            found = socket.getaddrinfo(
                address.host,
                address.port,
                type=socket.SOCK_STREAM,
                flags=flags | socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
        except socket.gaierror:
            found = await self.loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=flags)
        return list(dict.fromkeys((family, sockaddr) for family, _, _, _, sockaddr in found))

    async def connect(self, address: Address) -> Stream:
        """Connect to the first socket address of `address` that answers. Raises OSError, which names them all."""

        async def connect_to(target: tuple[int, tuple[Any, ...]]) -> Stream:
            family, sockaddr = target
            sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            try:
                stream = SocketStream(self.loop, sock, _address_of(sockaddr), str(address))
            except BaseException:
                sock.close()
                raise
            try:
                await stream.connect(sockaddr)
            except BaseException:
                stream.close()
                raise
            return stream

        failures: list[tuple[tuple[int, tuple[Any, ...]], OSError]] = []
        won = await race(await self.resolve(address), connect_to, failures)
        if won is not None:
            return won[1]
        first = failures[0][1]
        if len(failures) == 1:
            raise first
        said = "; ".join(f"{_address_of(sockaddr)}: {why.strerror or why}" for (_, sockaddr), why in failures)
        raise OSError(first.errno, said) from first

    async def listen(
        self, address: Address, on_stream: Callable[[Stream], None], current: StreamListener | None = None
    ) -> StreamListener:
        """Listen on a TCP port, 0 for any, of the first address of a host that can be had. Raises OSError.

        Nothing is waited for after the port was taken. `current` is returned if it listens there already.
        """
        targets = await self.resolve(address, passive=True)
        if current is not None:
            for _, sockaddr in targets:
                wanted = _address_of(sockaddr)
                if current.address == wanted._replace(port=wanted.port or current.address.port):
                    return current
        failure: OSError | None = None
        for family, sockaddr in targets:
            try:
                return self._listen_at(family, sockaddr, on_stream)
            except OSError as why:
                failure = failure or why
        assert failure is not None
        raise failure

    def _listen_at(self, family: int, sockaddr: tuple[Any, ...], on_stream: Callable[[Stream], None]) -> StreamListener:
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6 and sockaddr[0] == "::":
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # whatever the system's default is
            sock.bind(sockaddr)
            sock.listen(_BACKLOG)
            return Listener(self.loop, sock, on_stream)
        except BaseException:
            sock.close()
            raise

    def listen_host(self, name: bytes, on_channel: Callable[[HostChannel], None]) -> HostListener:
        """Listen on an abstract unix socket. Raises OSError."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            sock.bind(b"\0" + name)
            sock.listen(_BACKLOG)
            return HostListener(self.loop, sock, name, on_channel)
        except BaseException:
            sock.close()
            raise

    async def connect_host(self, name: bytes) -> HostChannel:
        """Connect to an abstract unix socket. Raises OSError."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        channel = HostChannel(self.loop, sock)
        try:
            pause = 0.001
            while True:
                try:
                    sock.connect(b"\0" + name)
                    return channel
                except BlockingIOError:
                    # The listener's queue is full; there is no event for room in it.
                    await self.sleep(pause)
                    pause = min(2 * pause, 0.05)
        except BaseException:
            channel.close()
            raise
