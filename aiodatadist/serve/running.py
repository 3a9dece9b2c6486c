"""The requests that a process works on: no id twice at once, and each can be aborted by it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from .errors import ServeError
from .protocol import AbortJob

__all__ = ["Running"]


class Running:
    """Requests by id and attempt.

    Attributes
    ----------
    closed : bool
        True: it takes no more.
    """

    def __init__(self) -> None:
        self.closed = False
        self._tasks: dict[tuple[str, int], asyncio.Task[object]] = {}
        self._aborted: set[tuple[str, int]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def check_open(self) -> None:
        """Raise ServeError ``draining`` if it is `closed`."""
        if self.closed:
            raise ServeError("draining", "this worker finishes what it has, and takes no more")

    @contextlib.contextmanager
    def enter(self, request_id: str, attempt: int = 0, *, promised: bool = False) -> Iterator[None]:
        """Work on a request in the body, in this task.

        Parameters
        ----------
        request_id : str
        attempt : int
        promised : bool
            It was taken before, in a first part, and is worked on also by whoever takes no more.

        Raises
        ------
        ServeError
            ``duplicate_request``: it is being worked on; ``aborted``: `abort` named it; ``draining``: `closed`.
        """
        if not promised:
            self.check_open()
        key = (request_id, attempt)
        if key in self._tasks:
            raise ServeError("duplicate_request", f"request {request_id}, attempt {attempt}, is being worked on")
        task = asyncio.current_task()
        assert task is not None
        self._tasks[key] = task
        try:
            yield
        except asyncio.CancelledError:
            if key in self._aborted and task.uncancel() == 0:
                raise ServeError("aborted", f"request {request_id} was aborted") from None
            raise
        finally:
            del self._tasks[key]
            self._aborted.discard(key)

    def abort(self, job: AbortJob) -> int:
        """Abort requests; return how many there were."""
        wanted = set(job.request_ids)
        count = 0
        for key, task in self._tasks.items():
            if (job.abort_all or key[0] in wanted) and key not in self._aborted:
                self._aborted.add(key)
                task.cancel()
                count += 1
        return count
