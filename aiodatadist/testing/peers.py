"""Real peer processes: a coroutine function of a test module runs in a process of its own.

::

    async def prefill(test: TestSide) -> None:
        async with adt.DataDist(1, adt.Role.PROMPT, listen="127.0.0.1:0") as dd:
            ...
            test.send(str(dd.listen_address))
            await test.receive()  # until the test has seen enough

    async def test_the_decode_side():
        async with spawn_peer(prefill) as peer:
            await dd.link(adt.ClusterInfo(1, await peer.receive()))
            ...
            peer.kill()

Where the function fails, its traceback is part of the failure of the test. No process outlives its block.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import importlib
import importlib.util
import inspect
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from types import ModuleType
from typing import Any, Concatenate, Final, ParamSpec

from ..errors import ArgumentError, ArgumentTypeError
from .clock import need_real_time

__all__ = ["PeerDied", "PeerError", "PeerFailed", "PeerProcess", "TestSide", "spawn_peer"]

_P = ParamSpec("_P")

# A peer that is asked to end may have to drain transfers and to close links, on a machine that does ten other things.
_GRACE: Final = 30.0
_PR_SET_PDEATHSIG: Final = 1
_LENGTH: Final = struct.Struct("<Q")
_MAIN: Final = "__main__"


class PeerError(Exception):
    """A peer process did not do what the test wants of it."""


class PeerFailed(PeerError):
    """The function raised in the peer.

    Attributes
    ----------
    kind : str
        The name of the exception's class there.
    message : str
        Its text there.
    """

    def __init__(self, name: str, kind: str, message: str, trace: str) -> None:
        super().__init__(f"{name} raised {kind}: {message}\n\n--- in the peer process:\n{trace}")
        self.kind = kind
        self.message = message


class PeerDied(PeerError):
    """The process ended before its function did.

    Attributes
    ----------
    exit_code : int
        Negative: the signal that ended it.
    """

    def __init__(self, name: str, exit_code: int) -> None:
        how = f"was ended by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exited with {exit_code}"
        super().__init__(f"the process of {name} {how}")
        self.exit_code = exit_code


# What both sides do. ----------------------------------------------------------------------------------------


async def _read(reader: asyncio.StreamReader) -> Any:
    """Return the next message. Raises EOFError."""
    try:
        (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        data = await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError):
        raise EOFError from None
    return pickle.loads(data)


def _write(writer: asyncio.StreamWriter, message: Any) -> None:
    data = pickle.dumps(message)
    writer.write(_LENGTH.pack(len(data)) + data)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class _Inbox:
    """Messages, and the error that comes after the last one."""

    def __init__(self) -> None:
        self._messages: deque[Any] = deque()
        self._changed = asyncio.Event()
        self._end: BaseException | None = None

    def put(self, message: Any) -> None:
        self._messages.append(message)
        self._changed.set()

    def close(self, end: BaseException) -> None:
        if self._end is None:
            self._end = end
            self._changed.set()

    async def get(self) -> Any:
        while not self._messages:
            if self._end is not None:
                raise self._end
            self._changed.clear()
            await self._changed.wait()
        return self._messages.popleft()


# The side of the test. --------------------------------------------------------------------------------------


class PeerProcess:
    """A running peer process. `spawn_peer` makes it.

    Attributes
    ----------
    name : str
        Of its function.
    pid : int
    """

    def __init__(self, name: str, process: subprocess.Popen[bytes], writer: asyncio.StreamWriter) -> None:
        self.name = name
        self.pid = process.pid
        self._process = process
        self._pidfd = os.pidfd_open(process.pid)
        self._writer = writer
        self._inbox = _Inbox()
        self._result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._stopped = False
        self._killed = False
        # Whether the test has heard of the failure, and by which error.
        self._told: BaseException | None = None

    # Messages.

    def send(self, message: Any) -> None:
        """Send something that can be pickled; the function gets it from `TestSide.receive`."""
        _write(self._writer, ("message", message))

    async def receive(self) -> Any:
        """Return what the function sends next.

        Raises
        ------
        PeerFailed
            The function raised.
        PeerDied
            The process ended before its function.
        PeerError
            The function returned, and sent nothing more.
        """
        try:
            return await self._inbox.get()
        except PeerError as why:
            self._told = why
            raise

    async def result(self) -> Any:
        """Wait until the function has ended, and return what it returned. Raises as `receive` does.

        Cancelling it leaves the function running.
        """
        try:
            return await asyncio.shield(self._result)
        except PeerError as why:
            self._told = why
            raise

    def cancel(self) -> None:
        """Cancel the function's task, as leaving the block does."""
        if not self._writer.is_closing():
            _write(self._writer, ("cancel", None))

    async def _pump(self, reader: asyncio.StreamReader) -> None:
        """Take in what the process says until it has ended."""
        error: PeerError | None = None
        end = asyncio.create_task(self._end_reading(), name=f"end of {self.name}")
        try:
            while True:
                kind, value = await _read(reader)
                if kind == "message":
                    self._inbox.put(value)
                    continue
                if kind == "result":
                    self._result.set_result(value)
                    error = PeerError(f"{self.name} has returned {value!r}, and sent nothing more")
                elif kind == "cancelled":
                    error = PeerError(f"{self.name} was cancelled")
                else:
                    error = PeerFailed(self.name, *value)
                break
        except EOFError:
            error = PeerDied(self.name, await self._gone())
        except Exception as why:  # what was sent cannot be unpickled here
            error = PeerError(f"a message of {self.name} cannot be read: {why!r}")
        finally:
            end.cancel()
        self._inbox.close(error)
        if not self._result.done():
            self._result.set_exception(error)
            self._result.exception()  # nobody has to ask

    async def _end_reading(self) -> None:
        """Have the stream end with the process, also where a process that it has forked keeps the other end open."""
        await self._gone()
        # The loop's own object cannot be shut down everywhere: uvloop's refuses.
        with (
            contextlib.suppress(OSError),
            socket.socket(fileno=os.dup(self._writer.get_extra_info("socket").fileno())) as sock,
        ):
            sock.shutdown(socket.SHUT_RD)  # what was sent can still be read

    @property
    def failure(self) -> PeerError | None:
        """Why the function has failed, or the process ended before it; None: neither is known."""
        if not self._result.done() or self._result.cancelled():
            return None
        error = self._result.exception()
        return error if isinstance(error, (PeerFailed, PeerDied)) else None

    # The process.

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return not select.select([self._pidfd], [], [], 0)[0]

    def stop(self) -> None:
        """Send SIGSTOP, and return when every thread of the process has stopped."""
        self._stopped = True
        self._signal(signal.SIGSTOP)
        limit = time.monotonic() + _GRACE
        while self.alive and not all(state in "TtZX" for state in self._states()):
            if time.monotonic() > limit:
                raise PeerError(f"the process of {self.name} does not stop")
            time.sleep(0.0005)

    def _states(self) -> list[str]:
        states = []
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{self.pid}/task").iterdir():
                with contextlib.suppress(OSError):
                    states.append((task / "stat").read_text().rpartition(")")[2].split()[0])
        return states

    def resume(self) -> None:
        """Send SIGCONT."""
        self._stopped = False
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Send SIGKILL. From now on the end of the process is no failure."""
        self._killed = True
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    async def wait_gone(self) -> int:
        """Wait until the process has ended; return its exit code, or the negative number of the signal."""
        return await self._gone()

    async def _gone(self) -> int:
        if self.alive:
            loop = asyncio.get_running_loop()
            gone = loop.create_future()
            # Several may wait, and a loop watches a descriptor for one.
            fd = os.dup(self._pidfd)
            loop.add_reader(fd, _set, gone)
            try:
                await gone
            finally:
                loop.remove_reader(fd)
                os.close(fd)
        return self._process.wait()

    # The end of the block.

    async def _finish(self, pump: asyncio.Task[None]) -> None:
        """End the process; raise what the test has not heard of."""
        late = False
        try:
            try:
                if self._stopped:
                    self.kill()
                self.cancel()
                try:
                    async with asyncio.timeout(_GRACE):
                        await self._gone()
                except TimeoutError:
                    late = True
            finally:
                self._signal(signal.SIGKILL)
                self._process.wait()
            await asyncio.wait((pump,))
        finally:
            pump.cancel()
            self._writer.close()
            os.close(self._pidfd)
        error = self._result.exception()
        if late:
            raise PeerError(f"{self.name} did not end within {_GRACE:g} s after it was cancelled, and was killed")
        if isinstance(error, PeerDied) and self._killed:
            return
        if error is not self._told and isinstance(error, (PeerFailed, PeerDied)):
            raise error


@contextlib.asynccontextmanager
async def spawn_peer(
    function: Callable[Concatenate[TestSide, _P], Coroutine[Any, Any, Any]] | str,
    *args: _P.args,
    **kwargs: _P.kwargs,
) -> AsyncIterator[PeerProcess]:
    """Run a coroutine function in a new process for as long as the block lasts.

    Parameters
    ----------
    function : coroutine function or str
        At the level of a module, so that the process can import it; or its name, ``"package.module:function"``.
        Its first argument is a `TestSide`.
    *args, **kwargs
        The rest of its arguments: whatever can be pickled.

    Yields
    ------
    PeerProcess

    Raises
    ------
    PeerFailed, PeerDied
        At the end of the block, where the function had failed, or fails while it ends, and nothing has told the test.
        If the block itself fails, its exception gets a note with the peer's traceback.
    PeerError
        The function goes on for 30 s after it was cancelled.
    ArgumentError, ArgumentTypeError
        The function cannot be found in another process, or an argument cannot be pickled.

    Notes
    -----
    The process is a fresh interpreter with this one's `sys.path` and environment; it inherits stdout and stderr, which
    pytest captures. It imports the module of the function, so what that module does when it is imported happens there
    too. At the end of the block the function is cancelled, as by `asyncio.Task.cancel`; the process is killed when it
    is stopped, or does not end within 30 s. It does not outlive the test's process.
    """
    need_real_time("a process")
    name, job = _job(function, args, kwargs)
    here, there = socket.socketpair()
    with there:
        process = subprocess.Popen(  # noqa: ASYNC220  # returns as soon as it is started
            [
                sys.executable,
                *subprocess._args_from_interpreter_flags(),  # type: ignore[attr-defined]
                "-c",
                f"import sys; sys.path[:] = {sys.path!r}\n"
                f"from {__name__} import _peer_main\n"
                f"_peer_main({there.fileno()}, {threading.current_thread() is threading.main_thread()})",
            ],
            stdin=subprocess.DEVNULL,
            pass_fds=(there.fileno(),),
        )
    try:
        reader, writer = await asyncio.open_connection(sock=here)
    except BaseException:
        here.close()
        process.kill()
        process.wait()
        raise
    peer = PeerProcess(name, process, writer)
    _write(writer, job)
    pump = asyncio.create_task(peer._pump(reader), name=f"peer {name}")
    try:
        yield peer
    except BaseException as why:
        try:
            await peer._finish(pump)
        except PeerError as more:
            why.add_note(f"and in the process of {name}: {more}")
        raise
    else:
        await peer._finish(pump)


def _job(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, tuple[Any, ...]]:
    """Return a name for messages, and what the process needs to find the function and its arguments."""
    if isinstance(function, str):
        module_name, colon, name = function.partition(":")
        if not colon or not module_name or not name:
            raise ArgumentError(f"function must look like 'package.module:function', got {function!r}")
        file = None
    else:
        if not inspect.iscoroutinefunction(function):
            raise ArgumentTypeError(f"function must be a coroutine function (async def), got {function!r}")
        module_name, name = function.__module__, function.__qualname__
        if "<" in name:
            raise ArgumentError(
                f"{name} cannot be found by another process", hint="move it out of the function it is defined in"
            )
        file = getattr(sys.modules.get(module_name), "__file__", None)
    try:
        arguments = pickle.dumps((args, kwargs))
    except Exception as why:
        raise ArgumentError(f"the arguments of {name} cannot be pickled: {why}") from why
    return name, (module_name, file and os.path.abspath(file), name, arguments)


# The side of the peer. --------------------------------------------------------------------------------------


class TestSide:
    """What the function of a peer process gets: its connection to the test."""

    __test__ = False  # whatever pytest makes of the name

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._inbox = _Inbox()

    def send(self, message: Any) -> None:
        """Send something that can be pickled; the test gets it from `PeerProcess.receive`."""
        _write(self._writer, ("message", message))

    async def receive(self) -> Any:
        """Return what the test sends next. Raises EOFError when the test's process is gone."""
        return await self._inbox.get()


def _module(name: str, file: str | None) -> ModuleType:
    """Import the module that the test has under this name, also where no path leads to it."""
    if name == _MAIN:
        if file is None:
            raise ImportError("functions of an interactive session cannot be found by another process")
    else:
        with contextlib.suppress(ImportError):
            found = importlib.import_module(name)
            if file is None or os.path.abspath(getattr(found, "__file__", None) or "") == file:
                return found
        if file is None:
            return importlib.import_module(name)  # once more, for its error
    # A script, or pytest's import mode "importlib".
    spec = importlib.util.spec_from_file_location("__parent_main__" if name == _MAIN else name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


async def _serve(sock: socket.socket) -> int:
    reader, writer = await asyncio.open_connection(sock=sock)
    test = TestSide(writer)

    async def run() -> Any:
        module_name, file, name, arguments = await _read(reader)
        function: Any = _module(module_name, file)
        for part in name.split("."):
            function = getattr(function, part)
        args, kwargs = pickle.loads(arguments)
        tasks.append(asyncio.create_task(pump(asyncio.current_task()), name="messages of the test"))
        return await function(test, *args, **kwargs)

    async def pump(task: asyncio.Task[Any] | None) -> None:
        assert task is not None
        with contextlib.suppress(EOFError):
            while True:
                kind, value = await _read(reader)
                if kind == "message":
                    test._inbox.put(value)
                else:
                    task.cancel()
        test._inbox.close(EOFError("the test is gone"))
        task.cancel()

    tasks: list[asyncio.Task[None]] = []
    main = asyncio.create_task(run(), name="peer")
    await asyncio.wait((main,))
    failed = False
    try:
        _write(writer, ("result", main.result()))
    except asyncio.CancelledError:
        _write(writer, ("cancelled", None))
    except BaseException as why:  # also what cannot be pickled
        failed = True
        trace = why.__traceback__
        while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next  # what calls the function says nothing about it
        text = "".join(traceback.format_exception(type(why), why, trace))
        _write(writer, ("error", (type(why).__name__, str(why), text)))
    for task in tasks:
        task.cancel()
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return int(failed)


def _peer_main(fd: int, dies_with_parent: bool) -> None:
    """Run the one function that the test asks for."""
    if dies_with_parent:
        # The kernel means the thread that started this process: the main thread is there until the end.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    faulthandler.enable()
    sys.exit(asyncio.run(_serve(socket.socket(fileno=fd))))
