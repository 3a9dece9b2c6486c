"""Awaitables of the control plane: link, unlink, fence; and transfers while the engine does not have them.

Each is an `Operation` that the caller holds and a task that does the work, in the task group of the DataDist.
The deadline and a cancel both end the task's scope; the future ends when the task has.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from .._loop import Deadline
from ..errors import DataDistError, InternalError, LinkTimeout
from ..observe import PendingOperation, get_logger
from ..transfer import Operation, Transfer

if TYPE_CHECKING:
    from .._loop import Runtime, Tasks, Timer

__all__ = ["Operations", "Running", "WaitingTransfers"]

_log = get_logger()

T = TypeVar("T")


class Running:
    """One operation that has not ended.

    Attributes
    ----------
    state : callable
        Returns what the operation waits for, in words.
    """

    def __init__(self, runtime: Runtime, number: int, kind: str, peer: int, timeout: float | None) -> None:
        self.state: Callable[[], str] = lambda: "starting"
        self.number = number
        self.kind = kind
        self.peer = peer
        self._runtime = runtime
        self._timeout = timeout
        self._since = runtime.now()
        self._limit: Deadline | None = None
        self._cancelled = False
        self._late: LinkTimeout | None = None
        self.transfer: Operation[Any] = Operation(loop=runtime.loop, on_cancel=self._cancel)

    def _cancel(self) -> None:
        self._cancelled = True
        if self._limit is not None:
            self._limit.cancel()

    def _expire(self) -> None:
        # The words are taken now: once the work has been told to stop, it waits for something else.
        self._late = LinkTimeout(
            f"{self.kind} missed its deadline of {self._timeout:g} s while {self.state()}",
            peer=self.peer,
            hint="raise timeout= if the peer is only slow",
        )
        if self._limit is not None:
            self._limit.cancel()

    async def run(self, work: Callable[[Running], Awaitable[Any]]) -> None:
        """Do the work and end the future."""
        timer: Timer | None = None
        if self._timeout is not None:
            left = self._since + self._timeout - self._runtime.now()
            timer = self._runtime.call_later(max(0.0, left), self._expire)
        try:
            with Deadline(None) as self._limit:
                if self._cancelled:
                    self._limit.cancel()
                self.transfer._finish(await work(self))
            if self._late is not None:
                self.transfer._fail(self._late)
        except DataDistError as why:
            self.transfer._fail(self._late or why)
        except Exception as why:
            _log.exception("an operation failed", kind=self.kind, cluster_id=self.peer)
            fault = InternalError(f"{self.kind} failed: {why!r}", peer=self.peer)
            fault.__cause__ = why
            self.transfer._fail(fault)
        finally:
            if timer is not None:
                timer.cancel()
            if self._cancelled and not self._runtime.closed:
                self.transfer._finish_cancelled()

    def row(self) -> PendingOperation:
        """Return the row of `dump()`."""
        return PendingOperation(self.number, self.kind, self.peer, self._runtime.now() - self._since, self.state())


class Operations:
    """The operations of a DataDist that have not ended.

    Parameters
    ----------
    runtime : Runtime
    tasks : Tasks
        Owns the tasks.
    """

    def __init__(self, runtime: Runtime, tasks: Tasks) -> None:
        self._runtime = runtime
        self._tasks = tasks
        self._numbers = itertools.count(1)
        self._running: dict[int, Running] = {}

    def __len__(self) -> int:
        return len(self._running)

    def done(self, result: T) -> Transfer[T]:
        """Return a future that is done."""
        transfer: Operation[T] = Operation(loop=self._runtime.loop)
        transfer._finish(result)
        return transfer

    def start(
        self, kind: str, peer: int, timeout: float | None, work: Callable[[Running], Awaitable[T]]
    ) -> Transfer[T]:
        """Start the work and return the future that ends with it."""
        running = Running(self._runtime, next(self._numbers), kind, peer, timeout)
        self._running[running.number] = running
        running.transfer.add_done_callback(lambda _: self._running.pop(running.number, None))
        self._tasks.start(running.run, work, name=f"aiodatadist-{kind}-{peer}")
        return running.transfer

    def fail_all(self, make_error: Callable[[], DataDistError]) -> None:
        """End all futures now; a task that never began could not."""
        for running in tuple(self._running.values()):
            running.transfer._fail(make_error())

    def rows(self) -> list[PendingOperation]:
        """Return a row of `dump()` for each."""
        return [running.row() for running in self._running.values()]


class WaitingTransfers:
    """The transfers of a DataDist that the engine does not have, yet or any more, and what they wait for."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._why: dict[Transfer[Any], tuple[str, float, Callable[[BaseException], object]]] = {}

    def add(self, transfer: Transfer[Any], why: str, end: Callable[[BaseException], object]) -> None:
        """Note what a transfer waits for from now on; its age goes on if it was waiting before.

        Parameters
        ----------
        transfer : Transfer
        why : str
            For `DataDist.dump`.
        end : callable
            Ends the transfer early, with the error given.
        """
        since = self._why[transfer][1] if transfer in self._why else self._now()
        self._why[transfer] = (why, since, end)

    def remove(self, transfer: Transfer[Any]) -> bool:
        """Note that a transfer waits no more; False if it did not."""
        return self._why.pop(transfer, None) is not None

    def end_all(self, make_error: Callable[[], DataDistError]) -> None:
        """End all: what they wait for does not come any more."""
        for _, _, end in tuple(self._why.values()):
            end(make_error())

    def rows(self) -> list[PendingOperation]:
        """Return the rows of `DataDist.dump`."""
        now = self._now()
        return [
            PendingOperation(
                id=getattr(transfer, "_op", 0),
                kind="copy" if transfer._peer is None else "pull" if transfer._pull else "push",
                peer=transfer._peer,
                age=now - since,
                state=why,
                bytes_done=transfer.progress.bytes_done,
                bytes_total=transfer.progress.bytes_total,
            )
            for transfer, (why, since, _) in self._why.items()
            if not transfer.done()
        ]
