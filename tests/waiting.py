"""Waiting for a state for as long as the machine takes, and what a process holds that others might change meanwhile.

A test never waits for a time and then expects something to have happened: it waits for that, with `until`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

# Far more than anything takes on a machine that works on many things, and less than the hang limit.
PATIENCE = 60.0


async def until(reached: Callable[[], Any], what: str = "nothing came of it") -> None:
    """Let the loop run until something is true."""
    limit = time.monotonic() + PATIENCE
    while not reached():
        assert time.monotonic() < limit, what
        await asyncio.sleep(0.002)


def until_now(reached: Callable[[], Any], what: str = "nothing came of it") -> None:
    """Block this thread until something is true."""
    limit = time.monotonic() + PATIENCE
    while not reached():
        assert time.monotonic() < limit, what
        time.sleep(0.002)


def descriptors() -> int:
    """Count the open descriptors; the engine closes those of a peer a moment after the loop has heard of its end."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def open_descriptors() -> set[int]:
    """Return the numbers of the open descriptors, without that of the listing itself, which is gone again."""
    found = set()
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            os.fstat(fd)
            found.add(fd)
    return found


def native_threads() -> int:
    """Count the engine's threads. One that was joined may still be on its way out: wait for a number with `until`."""
    found = 0
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/comm") as comm:
            found += comm.read().startswith("adt-")
    return found


def held() -> tuple[int, int]:
    """Count what must not grow: descriptors, and the engine's threads."""
    return descriptors(), native_threads()


def no_more(now: tuple[int, ...], before: tuple[int, ...]) -> bool:
    return all(one <= other for one, other in zip(now, before, strict=True))


@contextlib.contextmanager
def reserved_address() -> Iterator[str]:
    """Keep a port for those who listen there one after the other: between two of them nobody else can get it."""
    with socket.socket() as keeper:
        # Listeners with the same option may share the port with a socket that does not listen.
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{keeper.getsockname()[1]}"
