"""An event loop in a thread of its own, and blocking calls into it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import anyio
from anyio.from_thread import BlockingPortal

from ..errors import ClosedError, ForkedError

__all__ = ["Portal"]

T = TypeVar("T")


class Portal:
    """Runs an event loop in a thread, and starts there what callers in other threads wait for.

    A call costs two wake-ups of a thread, one to the loop and one back, and no task where what is started is a future:
    `BlockingPortal.call` would cost twice as many.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        # Not anyio's own starter: what it returns stops the loop when it is collected, and in a forked child, which has
        # no such thread, it would wait for that forever.
        started: Future[BlockingPortal] = Future()
        self._thread = threading.Thread(target=_serve, args=(started,), name="llm-datadist-loop", daemon=True)
        self._thread.start()
        self._portal = started.result()
        self._loop: asyncio.AbstractEventLoop = self._portal.call(asyncio.get_running_loop)
        # Held while a call is handed over, never while one waits: what was handed over before `close` is seen by it.
        self._gate = threading.Lock()
        self._closed = False
        self._running: set[asyncio.Future[Any]] = set()  # touched by the loop's thread only

    def run(self, start: Callable[[], Awaitable[T]]) -> T:
        """Start something in the loop, and wait for its end.

        Parameters
        ----------
        start : callable
            Called in the loop's thread; returns a future or a coroutine.

        Returns
        -------
        object
            The result.

        Raises
        ------
        ClosedError
            The portal is closed.
        ForkedError
            This process was forked from the one that has the loop.
        KeyboardInterrupt
            While it waited. What was started was cancelled and has ended: nothing touches memory for it any more. A
            second interrupt does not wait for that.
        Exception
            Whatever `start` or what it started raised.
        """
        if os.getpid() != self._pid:
            raise ForkedError(
                "this process was forked from the one that has opened it",
                hint="start workers with spawn, or fork before init",
            )
        call = _Call(start, self._running)
        try:
            with self._gate:
                if self._closed:
                    raise ClosedError("it is finalized")
                self._loop.call_soon_threadsafe(call.begin)
            call.wait()
        except ClosedError:
            raise
        except BaseException:  # KeyboardInterrupt, or whatever else a signal handler raises, at any place above
            self._loop.call_soon_threadsafe(call.cancel)
            call.wait()
            raise
        return call.result()

    @property
    def closed(self) -> bool:
        """Whether it takes no more calls."""
        return self._closed

    def soon(self, callback: Callable[[], object]) -> None:
        """Have a function called in the loop's thread, without waiting. Nothing where the portal is closed."""
        if os.getpid() != self._pid:
            return
        with self._gate:
            if not self._closed:
                self._loop.call_soon_threadsafe(callback)

    def close(self, last: Callable[[], Awaitable[None]] | None = None) -> None:
        """Refuse new calls, wait for `last` and for the calls that run, and stop the loop.

        Parameters
        ----------
        last : callable, optional
            Ends what makes calls end. The loop is stopped also if it fails.
        """
        if os.getpid() != self._pid:
            return  # another thread of the parent may have held the gate when this process was forked
        with self._gate:
            closed, self._closed = self._closed, True
        if closed:
            return

        async def end() -> None:
            try:
                if last is not None:
                    await last()
            finally:
                while others := self._running - {asyncio.current_task()}:
                    await asyncio.wait(others)

        try:
            self._portal.call(end)
        finally:
            self._portal.call(self._portal.stop)
            self._thread.join()


def _serve(started: Future[BlockingPortal]) -> None:
    """Run a loop until its portal is stopped."""

    async def serve() -> None:
        async with BlockingPortal() as portal:
            started.set_result(portal)
            await portal.sleep_until_stopped()

    try:
        anyio.run(serve)
    except BaseException as why:
        if started.done():
            raise
        started.set_exception(why)


class _Call(Generic[T]):
    """One call: begun, cancelled and ended in the loop's thread, waited for in the caller's."""

    __slots__ = ("_begun", "_ended", "_error", "_future", "_result", "_running", "_start")

    _result: T

    def __init__(self, start: Callable[[], Awaitable[T]], running: set[asyncio.Future[Any]]) -> None:
        self._start = start
        self._running = running
        self._begun = False
        self._future: asyncio.Future[T] | None = None
        self._error: BaseException | None = None
        # A bare lock: waiting for it is what a signal can interrupt at the least cost.
        self._ended = threading.Lock()
        self._ended.acquire()

    def begin(self) -> None:
        if self._begun:
            return  # cancelled before
        self._begun = True
        try:
            future = asyncio.ensure_future(self._start())
        except BaseException as why:  # whatever it is, the caller waits for it
            self._error = why
            self._ended.release()
            return
        if future.done():
            self._end(future)
            return
        self._future = future
        self._running.add(future)
        future.add_done_callback(self._end)

    def cancel(self) -> None:
        if not self._begun:
            self._begun = True
            self._ended.release()
        elif self._future is not None:
            self._future.cancel()

    def _end(self, future: asyncio.Future[T]) -> None:
        self._running.discard(future)
        if future.cancelled():
            self._error = ClosedError("the call was cancelled")
        elif (error := future.exception()) is not None:
            self._error = error
        else:
            self._result = future.result()
        self._ended.release()

    def wait(self) -> None:
        with self._ended:  # given back, so that one who was interrupted may wait again
            pass

    def result(self) -> T:
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # its traceback holds this object
        return self._result
