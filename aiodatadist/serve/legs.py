"""The router's HTTP calls to workers: one place for their timeouts, their errors, and what these say of health."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TypeVar

import msgspec
from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, TCPConnector

from .background import Tasks
from .config import Timeouts
from .errors import ServeError
from .protocol import KEY_HEADER, Message, encode, internal_token
from .registry import LoadLease, Member

__all__ = ["Legs", "Upstream"]

T = TypeVar("T")


class Upstream:
    """An answer that a worker has begun: `status`, `content_type`, and the body.

    `route` has headers that tell the client how its request went: by which hand-over, and through whom.

    `close` must be called in the end; it ends the worker's work on it if the body was not read to its end.
    """

    def __init__(self, response: ClientResponse, first: bytes, lease: LoadLease, idle: float) -> None:
        self.status = response.status
        self.content_type = response.headers.get("Content-Type", "application/json")
        self.member = lease.member
        self.route: dict[str, str] = {}
        self._response = response
        self._first = first
        self._lease = lease
        self._idle = idle

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Yield the body as it comes.

        Raises
        ------
        ServeError
            ``stream_broken``: the worker is gone, or has been silent for too long.
        """
        loop = asyncio.get_running_loop()
        member, idle = self.member, self._idle
        yield self._first
        timer: asyncio.TimerHandle
        since = loop.time()  # when this began to wait for the worker; 0: the client's pace is not the worker's silence

        def look() -> None:
            # One timer that looks again: to move a timeout twice for each piece took a seventh of the router's time.
            nonlocal timer
            left = since + idle - loop.time() if since else idle
            if left <= 0:
                silence.reschedule(loop.time())
            timer = loop.call_later(left if left > 0 else idle, look)

        timer = loop.call_later(idle, look)
        try:
            async with asyncio.timeout(None) as silence:
                async for chunk in self._response.content.iter_any():
                    since = 0.0
                    if silence.when() is not None:
                        silence.reschedule(None)  # it spoke at the last moment
                    yield chunk
                    since = loop.time()
        except TimeoutError as why:
            member.health.failed()
            raise ServeError("stream_broken", f"{member.worker_id} was silent for {idle:g} s") from why
        except (ClientError, OSError) as why:
            member.health.failed()
            raise ServeError("stream_broken", f"{member.worker_id} broke off: {type(why).__name__}") from why
        finally:
            timer.cancel()
        member.health.succeeded()

    def close(self) -> None:
        """Give everything back."""
        self._lease.release()
        self._response.close()


class Legs:
    """Calls to workers.

    Parameters
    ----------
    timeouts : Timeouts
    cluster_key : bytes, optional
    """

    def __init__(self, timeouts: Timeouts, cluster_key: bytes | None) -> None:
        self._timeouts = timeouts
        headers = {} if cluster_key is None else {KEY_HEADER: internal_token(cluster_key)}
        self._http = ClientSession(
            connector=TCPConnector(limit=0),
            headers=headers,
            timeout=ClientTimeout(total=None, sock_connect=timeouts.connect),
            auto_decompress=False,
        )
        self._background = Tasks()

    async def close(self) -> None:
        """Let what was to be told be told, and close the connections."""
        await self._background.wait(self._timeouts.connect)
        self._background.cancel()
        await self._background.wait()
        await self._http.close()

    async def ask(
        self, member: Member, path: str, job: Message, kind: type[T], timeout: float, *, aside: bool = False
    ) -> T:
        """Give a job, and return its result. Raises ServeError.

        What is said `aside`, such as a release, says nothing of how the worker does its work.
        """
        async with self._calling(member, timeout, aside=aside):
            async with self._http.post(member.url + path, data=encode(job)) as response:
                body = await response.read()
            if response.status != 200:
                raise _error(response.status, body)
            result = msgspec.json.decode(body, type=kind)
        if not aside:
            member.health.answered()
            member.health.succeeded()
        return result

    async def open(self, lease: LoadLease, path: str, job: Message, timeout: float) -> Upstream:
        """Give a job whose answer is the client's; returns with its first bytes. Raises ServeError.

        The lease is the upstream's from then on, and only then.
        """
        async with self._calling(lease.member, timeout):
            response = await self._http.post(lease.member.url + path, data=encode(job))
            try:
                if response.status != 200:
                    raise _error(response.status, await response.read())
                # The first bytes, before the client is told that all is well.
                first = await response.content.readany()
            except BaseException:
                response.close()
                raise
        lease.member.health.answered()
        return Upstream(response, first, lease, self._timeouts.idle)

    def tell(self, member: Member, path: str, job: Message) -> None:
        """Give a job in the background, and forget about it."""
        self._background.start(self._tell(member, path, job))

    async def _tell(self, member: Member, path: str, job: Message) -> None:
        # A worker that cannot be told is gone, or its lease runs out.
        with contextlib.suppress(ServeError):
            await self.ask(member, path, job, dict, 5.0, aside=True)

    @contextlib.asynccontextmanager
    async def _calling(self, member: Member, timeout: float, *, aside: bool = False) -> AsyncIterator[None]:
        """Make a ServeError, which names the worker, of whatever goes wrong in the body."""
        try:
            async with asyncio.timeout(timeout):
                yield
            return
        except ServeError as why:
            error = why
        except TimeoutError:
            error = ServeError("worker_timeout", f"{member.worker_id} has not answered within {timeout:g} s")
        except (ClientError, OSError) as why:
            error = ServeError("worker_unreachable", f"{member.worker_id}: {type(why).__name__}: {why}")
        except msgspec.DecodeError as why:
            error = ServeError("worker_failed", f"{member.worker_id} answered something else: {why}")
        error.worker_id = member.worker_id
        if error.at_fault and not aside:
            member.health.failed()
        raise error


def _error(status: int, body: bytes) -> ServeError:
    try:
        said = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        said = None
    return ServeError.of_answer(status, said)
