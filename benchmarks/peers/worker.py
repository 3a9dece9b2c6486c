"""One process of a pair: what it is asked for over a socket, and what a peer's script adds to that.

The active process reads blocks of the passive one into its own, and writes its own to there. A peer's script derives a
class from `Side` and passes it to `main`; `compare.py` starts the script twice.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time
import traceback
from abc import ABC, abstractmethod
from typing import Any, Final

from pattern import Indices, Memory, fill, scattered, touched, wrong

__all__ = ["OrdinaryMemory", "Side", "main", "readable"]

_SEED: Final = {True: 1, False: 2}
"""Of the blocks and of their content, for the active process and for the passive one."""


def readable(line: int) -> bool:
    """Say whether the process is asked for something."""
    return bool(select.select([line], [], [], 0)[0])


class Side(ABC):
    """One of the two processes.

    Parameters
    ----------
    active : bool
    variant : str
        Which of its ways to move data the peer shall take.
    nbytes : int
        Size of the pool.
    huge_pages : bool
        Whether to ask for huge pages in ordinary memory.

    Attributes
    ----------
    pool : array of uint8, [blocks, bytes of a block]
        From `prepare` on.
    here : array of int64
        The blocks of the pool that move.
    there : array of int64
        Those of the other process, in the same order.
    """

    pool: Memory
    here: Indices
    there: Indices

    def __init__(self, active: bool, variant: str, nbytes: int, huge_pages: bool) -> None:
        self.active = active
        self.variant = variant
        self.nbytes = nbytes
        self.huge_pages = huge_pages
        self.block = 0

    # What a peer does. ---------------------------------------------------------------------------------------

    @abstractmethod
    def version(self) -> str:
        """Return the version of the peer's software."""

    @abstractmethod
    def open(self) -> Any:
        """Start it, register memory; return what the other process must know, fit for JSON."""

    @abstractmethod
    def meet(self, other: Any) -> None:
        """Connect to the other process, which does the same at that time; `other` is what its `open` returned."""

    def make_pool(self) -> Memory:
        """Return the pool, in blocks of ``self.block`` bytes."""
        raise NotImplementedError

    def prepare(self) -> None:  # noqa: B027 - nothing to do is usual
        """Do what can be done before blocks of one size move. The passive process is first."""

    @abstractmethod
    def move(self, write: bool) -> float:
        """Read or write all blocks that move; return the seconds until they were there."""

    @abstractmethod
    def each(self, write: bool, count: int) -> list[float]:
        """Read or write the first `count` blocks one by one; return the seconds of each."""

    def serve(self, line: int) -> None:  # noqa: B027 - nothing to do is usual
        """In the passive process: do what the active one needs meanwhile, until `line` is readable."""

    # What compare.py asks for. -------------------------------------------------------------------------------

    def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Do what is asked for."""
        return getattr(self, f"do_{name}")(**arguments)

    def do_version(self) -> str:
        return self.version()

    def do_open(self) -> Any:
        return self.open()

    def do_meet(self, other: Any) -> None:
        self.meet(other)

    def do_prepare(self, block: int) -> None:
        self.block = block
        self.pool = self.make_pool()
        blocks = self.nbytes // block
        self.here, self.there = (
            scattered(blocks, blocks // 2, _SEED[active] * block) for active in (self.active, not self.active)
        )
        self.prepare()

    def do_fill(self) -> None:
        fill(self.pool, self.here, _SEED[self.active])

    def do_wrong(self, count: int) -> int:
        """Count those of the first `count` blocks that do not hold what the other process filled its blocks with."""
        return wrong(self.pool, self.here[:count], _SEED[not self.active], self.there[:count])

    def do_move(self, write: bool) -> float:
        return self.move(write)

    def do_each(self, write: bool, count: int) -> list[float]:
        return self.each(write, count)

    def do_serve(self) -> float:
        """Return the CPU seconds of this process; from now on it serves."""
        return time.process_time()

    def do_rest(self) -> float:
        """Return the CPU seconds of this process; it serves no longer."""
        return time.process_time()


class OrdinaryMemory(Side):
    """A side whose pool is ordinary memory, the same for all sizes of blocks."""

    def __init__(self, active: bool, variant: str, nbytes: int, huge_pages: bool) -> None:
        super().__init__(active, variant, nbytes, huge_pages)
        self.memory = touched(nbytes, huge_pages)
        self.address = int(self.memory.ctypes.data)

    def make_pool(self) -> Memory:
        return self.memory.reshape(-1, self.block)


def main(kind: type[Side]) -> None:
    """Run one process: the arguments are a descriptor, role, variant, size of the pool, and ``huge`` or ``usual``."""
    line = socket.socket(fileno=int(sys.argv[1]))
    active, variant, nbytes = sys.argv[2] == "active", sys.argv[3], int(sys.argv[4])
    side: Side | None = None
    serves = False
    with line.makefile("r", encoding="utf-8") as calls:
        while True:
            if serves and side is not None:
                side.serve(line.fileno())
            if not (text := calls.readline()):
                break
            name, arguments = json.loads(text)
            try:
                if side is None:
                    side = kind(active, variant, nbytes, sys.argv[5] == "huge")
                answer = ["", side.call(name, arguments)]
            except Exception as why:
                traceback.print_exc()
                answer = [f"{type(why).__name__}: {why}", None]
            serves = name == "serve"
            line.sendall(json.dumps(answer).encode() + b"\n")
    # Nothing is left to be done well: some of the software waits for ever here, or crashes.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
