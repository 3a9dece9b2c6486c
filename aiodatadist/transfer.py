"""Transfers: futures that end only when the library no longer touches the caller's memory.

Rules (docs/design.md, "rules of meaning"): a `Transfer` is done once it is quiet, whatever the outcome. Cancelling asks
the engine to stop; the future ends cancelled when what was posted has drained, always with the first cancel's message,
even if all bytes had landed. So ``asyncio.timeout``, ``wait_for``, task groups and anyio scopes may cancel a wait, and
when they return the blocks are free for reuse.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import time
from collections.abc import Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from .errors import error_from_native
from .observe import Counters, outcome_of

if TYPE_CHECKING:
    from . import _core

__all__ = ["Operation", "Progress", "Transfer"]

T = TypeVar("T")


def measured_time(loop: asyncio.AbstractEventLoop) -> float:
    """Return the time by which latencies are measured, in seconds.

    Not the loop's, which uvloop keeps in milliseconds, unless that is a virtual one.
    """
    virtual: Callable[[], float] | None = getattr(loop, "virtual_time", None)
    return time.monotonic() if virtual is None else virtual()


class Progress(NamedTuple):
    """Bytes of a transfer.

    Attributes
    ----------
    bytes_done : int
        Bytes that have landed.
    bytes_total : int
        Bytes that the transfer moves in all; 0 before that is known, and for work that moves none.
    """

    bytes_done: int
    bytes_total: int


class Transfer(asyncio.Future[T]):
    """A running operation; await it, gather it, time it out, or add a done callback.

    The work has started when the call returns. The object belongs to the loop of its DataDist and is not thread-safe,
    as any asyncio future. Dropping it changes nothing: the operation goes on and keeps the memory alive.

    Cancelling is draining: `cancel` returns True while the future is not done, costs nothing when repeated, and the
    future then ends cancelled once the memory is quiet. A wait that was cut short can leave it running only until its
    deadline or its drain, and the content of the destination is undefined after anything but success.

    Raises (when awaited)
    ---------------------
    TransferTimeout
        The deadline passed.
    PeerLostError
        The peer died, fell silent, cut the connection or closed, or either side unlinked.
    ClosedError
        This DataDist was closed.
    TransferAborted
        The owner of the remote memory fenced it off.
    CacheNotFound, CacheAccessError
        The owner refused the request: it was unregistering the cache.
    RegistrationError
        The local cache could not be registered.
    """

    # Set when the transfer is pending; a transfer that is done at once has only `_bytes_total`, which keeps it cheap.
    __slots__ = (
        "_bytes_done",
        "_bytes_total",
        "_cancel_message",
        "_cancelling",
        "_counters",
        "_native",
        "_number",
        "_on_cancel",
        "_op",
        "_peer",
        "_plain",
        "_pull",
        "_started",
        "_then",
    )

    _bytes_done: int
    _bytes_total: int
    _cancel_message: Any
    _cancelling: bool
    _counters: Counters | None
    _native: _core.Pair | None
    _number: int  # in a simulation, which hashes by it
    _on_cancel: Callable[[], object] | None
    _op: int
    _peer: int | None
    _plain: _core.Pair | None  # ends it well in native code: it hangs on nothing else
    _pull: bool
    _started: float
    _then: Callable[[Transfer[Any]], None]

    def cancel(self, msg: Any | None = None) -> bool:
        """Ask the operation to end; True while it has not.

        The future ends cancelled, with the message of the first call, once the memory is quiet.
        """
        if self.done():
            return False
        if not getattr(self, "_cancelling", False):
            self._cancelling = True
            self._cancel_message = msg
            native = getattr(self, "_native", None)
            if native is not None and self._op:
                native.cancel(self._op)
            on_cancel = getattr(self, "_on_cancel", None)
            if on_cancel is not None:
                on_cancel()
        return True

    def cancelling(self) -> bool:
        """Say whether a cancel was asked for."""
        return getattr(self, "_cancelling", False)

    @property
    def progress(self) -> Progress:
        """Bytes that have landed and bytes in all, also after the end. Exact once the transfer is done."""
        total = getattr(self, "_bytes_total", 0)
        done = getattr(self, "_bytes_done", None)
        if done is None:
            done = total if self.done() else 0
        native = getattr(self, "_native", None)
        if native is not None and self._op:
            running = native.progress(self._op)
            if running is not None:
                self._bytes_done = done = running  # remembered until the end is told
        return Progress(done, total)

    def wait(self) -> Coroutine[Any, Any, T]:
        """Wait for the end: the coroutine for ``TaskGroup.create_task`` and anyio's ``start_soon``.

        A task of it that is cancelled before its first step ends when the transfer has, as any other.
        """
        return _Wait(self)

    if sys.version_info >= (3, 12):
        inspect.markcoroutinefunction(wait)

    # Driven by the engine (called from _core). ---------------------------------------------------------------

    def _native_started(self, native: _core.Pair, op: int, nbytes: int) -> None:
        """Note that the native operation `op` moves `nbytes`; 0 is one that has ended and is told a turn later."""
        self._native = native
        self._op = op
        self._bytes_total = nbytes
        self._started = measured_time(self.get_loop())

    def _native_done(self, status: int, nbytes: int) -> None:
        """End the future: the engine touches the memory no more."""
        self._bytes_done = nbytes
        native = getattr(self, "_native", None)
        self._native = self._plain = None  # lets go of the caches
        if not hasattr(self, "_bytes_total"):
            self._bytes_total = nbytes
        if self.done():
            self._count(None if status == 0 else asyncio.CancelledError(), nbytes)  # somebody else set a result
            return
        if self.cancelling():
            self._count(asyncio.CancelledError(), nbytes)
            super().cancel(self._cancel_message)
            return
        if status != 0:
            error = error_from_native(
                status,
                peer=getattr(self, "_peer", None),
                transport=native.remote.transport if native is not None else None,
                bytes_done=nbytes,
                bytes_total=self._bytes_total,
            )
            self._count(error, nbytes)
            self.set_exception(error)
            return
        then = getattr(self, "_then", None)
        if then is not None:
            then(self)
            return
        self._count(None, nbytes)
        self.set_result(None)  # type: ignore[arg-type]  # native transfers are Transfer[None]

    def _told(self, error: BaseException | None) -> None:
        """End the future: the bytes have landed, and the notification was handed over unless `error` says why not."""
        if self.cancelling() and not self.done():
            error = asyncio.CancelledError()
        self._count(error, self._bytes_done)
        if self.done():
            return
        if isinstance(error, asyncio.CancelledError):
            super().cancel(getattr(self, "_cancel_message", None))
        elif error is not None:
            self.set_exception(error)
        else:
            self.set_result(None)  # type: ignore[arg-type]

    def _count(self, error: BaseException | None, nbytes: int) -> None:
        counters = getattr(self, "_counters", None)
        if counters is None:
            return
        self._counters = None  # once, whoever ends it: closing waits for all that are counted as started
        pulled, pushed = (nbytes, 0) if self._pull else (0, nbytes)
        elapsed = measured_time(self.get_loop()) - self._started if hasattr(self, "_started") else 0.0
        counters.end(outcome_of(error), seconds=elapsed, pulled=pulled, pushed=pushed)

    # Driven by Python. ---------------------------------------------------------------------------------------

    def _finish(self, result: T) -> None:
        """End the future well, or cancelled if that was asked for before."""
        if self.done():
            return
        if self.cancelling():
            super().cancel(self._cancel_message)
        else:
            self.set_result(result)

    def _fail(self, error: BaseException) -> None:
        """End the future with an error, or cancelled if that was asked for before."""
        if self.done():
            return
        if self.cancelling() or isinstance(error, asyncio.CancelledError):
            super().cancel(getattr(self, "_cancel_message", None))
        else:
            self.set_exception(error)

    def _finish_cancelled(self) -> None:
        """End the future cancelled."""
        if not self.done():
            super().cancel(getattr(self, "_cancel_message", None))


class _Wait(Coroutine[Any, Any, T]):
    """What `Transfer.wait` returns.

    A task that is cancelled before its first step throws into a coroutine that has not begun. An ordinary one would end
    there, and a task group with a failing sibling return while the transfer runs on; this one passes the cancel on and
    waits.
    """

    __slots__ = ("_inner", "_transfer")

    def __init__(self, transfer: Transfer[T]) -> None:
        async def wait() -> T:
            return await transfer

        self._transfer = transfer
        self._inner = wait()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # cr_frame and the like, for those who look at tasks

    def __await__(self) -> Generator[Any, Any, T]:
        return self._inner.__await__()

    def send(self, value: Any) -> Any:
        """Go on; see `Coroutine`."""
        return self._inner.send(value)

    def throw(self, kind: Any, value: Any = None, traceback: Any = None) -> Any:
        """Raise inside; see `Coroutine`."""
        error = value if isinstance(value, BaseException) else kind
        begun = inspect.getcoroutinestate(self._inner) != inspect.CORO_CREATED
        if begun or not isinstance(error, asyncio.CancelledError) or self._transfer.done():
            return self._inner.throw(error)
        self._transfer.cancel(*error.args[:1])
        return self._inner.send(None)

    def close(self) -> None:
        """Give the wait up; see `Coroutine`."""
        self._inner.close()


class Operation(Transfer[T]):
    """A transfer driven by Python: linking, unregistering, or a transfer that first waits for its cache.

    Parameters
    ----------
    loop : asyncio.AbstractEventLoop
        The DataDist's.
    on_cancel : callable, optional
        Called once, at the first cancel. Whoever drives the operation then ends it.
    """

    __slots__ = ()

    def __init__(self, *, loop: asyncio.AbstractEventLoop, on_cancel: Callable[[], object] | None = None) -> None:
        super().__init__(loop=loop)
        self._on_cancel = on_cancel

    def _follow(self, inner: asyncio.Future[T]) -> None:
        """End as `inner` ends, and pass a cancel on to it."""
        self._on_cancel = lambda: inner.cancel(self._cancel_message)
        if self.cancelling():
            inner.cancel(self._cancel_message)
        inner.add_done_callback(self._take)

    def _take(self, inner: asyncio.Future[T]) -> None:
        if isinstance(inner, Transfer):
            self._bytes_done, self._bytes_total = inner.progress
        if inner.cancelled():
            self._finish_cancelled()
            return
        error = inner.exception()
        if error is None:
            self._finish(inner.result())
        else:
            self._fail(error)
