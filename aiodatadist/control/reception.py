"""What comes in at the one port: the preamble is read, then a connection goes where it belongs."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final

from .._loop import Deadline
from ..errors import ClosedError, ProtocolError
from ..observe import get_logger
from . import wire
from .filelimit import most_files

if TYPE_CHECKING:
    from .._loop import Runtime, Stream, StreamListener, Tasks
    from ..types import Address
    from .handshake import SessionDoor

__all__ = ["Reception"]

_log = get_logger()

MAX_UNKNOWN: Final = 4096
"""Connections that have not said what they are, or (control connections) who and, with a cluster key, not proved it.
Above, or above a half of the limit of open files, the oldest of them is closed: honest peers are through in a few round
trips, and hundreds that link at once have some thousand connections."""


class Reception:
    """Listens, reads preambles, and sorts.

    Parameters
    ----------
    runtime : Runtime
    tasks : Tasks
        Owns one task for each connection until it is sorted, and for a control connection the whole link.
    timeout : float
        Seconds that a connection may take for its preamble.
    sessions : SessionDoor
        Gets engine and data connections.
    on_control : callable
        A coroutine function that serves a control connection and closes it. Its second argument is to be called when
        the peer is known: until then the connection may be closed for newer ones.
    """

    def __init__(
        self,
        runtime: Runtime,
        tasks: Tasks,
        timeout: float,
        sessions: SessionDoor,
        on_control: Callable[[Stream, Callable[[], None]], Coroutine[Any, Any, None]],
    ) -> None:
        self._runtime = runtime
        self._tasks = tasks
        self._timeout = timeout
        self._sessions = sessions
        self._on_control = on_control
        self._unknown: dict[Stream, None] = {}
        self._listener: StreamListener | None = None
        self._closed = False

    async def listen(self, address: Address) -> Address:
        """Start listening, and stop where it did before; return the address with its port.

        Nothing changes if it listens there already, or if it fails with an OSError.
        """
        while True:
            current = self._listener
            listener = await self._runtime.listen(address, self._on_stream, current)
            if listener is not current or current is self._listener:
                break  # else another call has taken it away meanwhile
        if self._closed:
            listener.close()
            raise ClosedError("the DataDist was closed meanwhile")
        if listener is not self._listener:
            self.stop()
            self._listener = listener
        return listener.address

    def stop(self) -> None:
        """Stop listening. What has come in stays."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def close(self) -> None:
        """Stop listening for good, and close what has not said what it is."""
        self._closed = True
        self.stop()
        for stream in tuple(self._unknown):
            stream.close()

    def _on_stream(self, stream: Stream) -> None:
        if len(self._unknown) >= min(MAX_UNKNOWN, most_files() // 2):
            oldest = next(iter(self._unknown))
            del self._unknown[oldest]  # at once: more may come before its task has seen it
            oldest.close()
        self._unknown[stream] = None
        self._tasks.start(self._sort, stream, name="aiodatadist-preamble")

    async def _sort(self, stream: Stream) -> None:
        def known() -> None:
            self._unknown.pop(stream, None)

        preamble: wire.Preamble | None = None
        try:
            with Deadline(self._timeout):
                preamble = wire.Preamble.unpack(await stream.receive_exactly(wire.PREAMBLE_SIZE))
            if preamble is not None and preamble.kind is wire.ConnectionKind.CONTROL:
                await self._on_control(stream, known)
        except (OSError, EOFError, ProtocolError) as why:
            _log.debug("dropped a connection", peer=stream.peer, reason=str(why))
        finally:
            known()
            if preamble is None:
                stream.close()
        if preamble is not None and preamble.kind is not wire.ConnectionKind.CONTROL:
            self._sessions.admit(preamble, stream)
