"""A router and workers as processes on this machine: for ``serve pd``, and for tests."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Final

from .children import child_environment
from .failure import CommandError

__all__ = ["READY", "Cluster", "ServeProcess", "local_cluster"]

READY: Final = "ready"
"""First word of the line that a serving process prints when it is up; its role and its URL follow."""
_START_LIMIT: Final = 300.0
_REGISTER_LIMIT: Final = 60.0
_STOP_LIMIT: Final = 20.0


class ServeProcess:
    """A child that runs ``aiodatadist serve ROLE``.

    Attributes
    ----------
    name : str
        Such as ``prefill-0``.
    role : str
    url : str
        Where its HTTP listens.
    process : asyncio.subprocess.Process
    """

    def __init__(self, name: str, role: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.role = role
        self.url = ""
        self.process = process
        self._errors = asyncio.create_task(self._forward())

    async def _forward(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            print(f"[{self.name}] {line.decode(errors='replace').rstrip()}", file=sys.stderr, flush=True)

    async def wait_ready(self) -> None:
        """Wait for its line. Raises CommandError if it ends, or takes too long."""
        assert self.process.stdout is not None
        try:
            async with asyncio.timeout(_START_LIMIT):
                async for line in self.process.stdout:
                    word, *rest = line.decode(errors="replace").split()
                    if word == READY:
                        self.url = rest[-1]
                        return
        except TimeoutError:
            raise CommandError(f"{self.name} was not up within {_START_LIMIT:g} s") from None
        raise CommandError(f"{self.name} ended with exit code {await self.process.wait()} before it was up")

    def kill(self) -> None:
        """Send SIGKILL."""
        self._signal(signal.SIGKILL)

    async def stop(self) -> None:
        """Ask it to end, by force if it does not, and read what it left."""
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(_STOP_LIMIT):
                await self.process.wait()
        except TimeoutError:
            self.kill()
            await self.process.wait()
        assert self.process.stdout is not None
        assert self.process.stdin is not None
        self.process.stdin.close()
        await self.process.stdout.read()
        await self._errors

    def _signal(self, number: int) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)


class Cluster:
    """Processes that serve together; `local_cluster` makes it.

    Attributes
    ----------
    router : ServeProcess
    workers : dict of str to ServeProcess
        By name: ``prefill-0``, ``decode-0``, ...
    """

    def __init__(self) -> None:
        self.router: ServeProcess
        self.workers: dict[str, ServeProcess] = {}
        self._count: dict[str, int] = {}

    @property
    def url(self) -> str:
        """Where clients go."""
        return self.router.url

    @property
    def processes(self) -> list[ServeProcess]:
        """All of them."""
        return [self.router, *self.workers.values()]

    async def wait_ready(self) -> None:
        """Wait until the router has workers that can serve a request. Raises CommandError."""
        from aiohttp import ClientSession

        try:
            async with asyncio.timeout(_REGISTER_LIMIT), ClientSession() as http:
                while (await http.get(f"{self.url}/ready")).status != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise CommandError(f"no workers came to {self.url} within {_REGISTER_LIMIT:g} s") from None

    async def start(self, role: str, options: Sequence[str] = ()) -> ServeProcess:
        """Start a process; `ServeProcess.wait_ready` says when it is up."""
        number = self._count[role] = self._count.get(role, -1) + 1
        name = role if role == "router" else f"{role}-{number}"
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-X", "faulthandler", "-m", "aiodatadist", "serve", role, "--with-parent", *options,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=child_environment(),
            start_new_session=True,  # Ctrl-C is for the parent, which then ends them
        )  # fmt: skip
        child = ServeProcess(name, role, process)
        if role == "router":
            self.router = child
        else:
            self.workers[name] = child
        return child


@contextlib.asynccontextmanager
async def local_cluster(
    counts: dict[str, int], *, router_options: Sequence[str] = (), worker_options: Sequence[str] = ()
) -> AsyncIterator[Cluster]:
    """Run a router and workers around the body, which begins when each process listens.

    Parameters
    ----------
    counts : dict
        Number of workers by role.
    router_options, worker_options : sequence of str
        Of ``aiodatadist serve``; where none says otherwise, ports are any.
    """
    cluster = Cluster()
    try:
        router = await cluster.start("router", ("--port", "0", *router_options))
        await router.wait_ready()
        options = ("--router", router.url, *worker_options)
        started = [await cluster.start(role, options) for role, count in counts.items() for _ in range(count)]
        for child in started:
            await child.wait_ready()
        yield cluster
    finally:
        # Workers first: they say good-bye to the router.
        await asyncio.gather(*(child.stop() for child in cluster.workers.values()))
        if hasattr(cluster, "router"):
            await cluster.router.stop()
