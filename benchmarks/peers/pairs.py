"""Pairs of processes, from outside: who there is, and what they can be asked for."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

from environments import FOLDER, HERE, Unavailable, complaint

__all__ = ["OURS", "PEERS", "Candidate", "Pair"]

_ANSWER_SECONDS: Final = 60.0
_EXIT_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """Something that can move blocks.

    Attributes
    ----------
    name : str
    environment : str
        The virtual environment, and the end of the script's name.
    variant : str
        See the script.
    reach : str
        ``host``: only within one host; ``tcp``: also between hosts.
    spins : bool
        Its threads take the processor also while nothing is to be done, so it is stopped while others are measured.
    """

    name: str
    environment: str
    variant: str
    reach: str
    spins: bool = False


OURS: Final = (
    Candidate("library", "aiodatadist", "library", "host"),
    Candidate("ordinary", "aiodatadist", "ordinary", "host"),
    Candidate("tcp", "aiodatadist", "tcp", "tcp"),
)
PEERS: Final = (
    Candidate("nixl", "nixl", "auto", "host"),
    Candidate("nixl-request", "nixl", "auto-request", "host"),
    Candidate("nixl-progress", "nixl", "auto-progress", "host", spins=True),
    Candidate("nixl-tcp", "nixl", "tcp", "tcp"),
    Candidate("nixl-tcp-progress", "nixl", "tcp-progress", "tcp", spins=True),
    Candidate("mooncake", "mooncake", "tcp", "tcp"),
    Candidate("libfabric-shm", "libfabric", "shm", "host"),
    Candidate("libfabric-tcp", "libfabric", "tcp", "tcp"),
    Candidate("pyzmq-ipc", "pyzmq", "ipc", "host"),
    Candidate("pyzmq-tcp", "pyzmq", "tcp", "tcp"),
    Candidate("gloo", "gloo", "tcp", "tcp"),
)


class _Process:
    def __init__(self, candidate: Candidate, python: Path, role: str, nbytes: int, huge_pages: bool) -> None:
        self.role = role
        self._line, theirs = socket.socketpair()
        self._line.settimeout(_ANSWER_SECONDS)
        self._answers: IO[str] = self._line.makefile("r", encoding="utf-8")
        self._log = FOLDER / f"{candidate.name}-{role}.log"
        script = HERE / f"peer_{candidate.environment}.py"
        variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        with theirs, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(python), "-X", "faulthandler", str(script), str(theirs.fileno()), role, candidate.variant,
                 str(nbytes), "huge" if huge_pages else "usual"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[theirs.fileno()], env=variables, cwd=FOLDER,
                # Ctrl-C is for the measuring process; this one ends with it.
                start_new_session=True,
            )  # fmt: skip

    def ask(self, name: str, arguments: dict[str, Any]) -> None:
        try:
            self._line.sendall(json.dumps([name, arguments]).encode() + b"\n")
        except OSError:
            raise self._gone() from None

    def answer(self) -> Any:
        try:
            text = self._answers.readline()
        except TimeoutError:
            reason = f"the {self.role} process did not answer for {_ANSWER_SECONDS:.0f} s: {complaint(self._log)}"
            raise Unavailable(reason) from None
        except OSError:
            text = ""
        if not text:
            raise self._gone()
        fault, value = json.loads(text)
        if fault:
            raise Unavailable(f"the {self.role} process: {fault:.300} ({self._log})")
        return value

    def _gone(self) -> Unavailable:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_SECONDS)
        return Unavailable(f"the {self.role} process ended with {self._process.poll()}: {complaint(self._log)}")

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self) -> None:
        self._answers.close()
        self._line.close()
        self.signal(signal.SIGCONT)
        try:
            self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Pair:
    """The two processes of a candidate, connected. Every method may raise `Unavailable`.

    Attributes
    ----------
    candidate : Candidate
    version : str
    """

    def __init__(self, candidate: Candidate, python: Path, nbytes: int, huge_pages: bool) -> None:
        self.candidate = candidate
        self._nbytes = nbytes
        self._passive = _Process(candidate, python, "passive", nbytes, huge_pages)
        self._active = _Process(candidate, python, "active", nbytes, huge_pages)
        try:
            theirs, ours = self._both("open")
            self._both("meet", {"other": ours}, {"other": theirs})
            self.version = str(self._ask(self._active, "version"))
        except BaseException:
            self.end()
            raise
        self._pause()

    def _ask(self, process: _Process, name: str, **arguments: Any) -> Any:
        process.ask(name, arguments)
        return process.answer()

    def _both(self, name: str, passive: Any = None, active: Any = None) -> tuple[Any, Any]:
        """Ask both at once."""
        self._passive.ask(name, passive or {})
        self._active.ask(name, active or {})
        return self._passive.answer(), self._active.answer()

    def _pause(self) -> None:
        if self.candidate.spins:
            for process in (self._active, self._passive):
                process.signal(signal.SIGSTOP)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Let the processes run around the body. They are ended when it fails."""
        if self.candidate.spins:
            for process in (self._passive, self._active):
                process.signal(signal.SIGCONT)
        try:
            yield
        except BaseException:
            self.end()
            raise
        self._pause()

    def prepare(self, block: int, singles: int) -> None:
        """Prepare for one size of blocks, and look at every block that moves, `singles` of them one by one."""
        for process in (self._passive, self._active):
            self._ask(process, "prepare", block=block)
        # The first transfer connects.
        self.move(False)
        count = self._nbytes // block // 2
        for write in (False, True):
            self._verified(write, count, self.move)
            if singles:
                self._verified(write, singles, partial(self.each, count=singles))

    def _verified(self, write: bool, count: int, step: Callable[[bool], object]) -> None:
        self._both("fill")
        step(write)
        target = self._passive if write else self._active
        if wrong := self._ask(target, "wrong", count=count):
            raise Unavailable(f"{wrong} of {count} blocks are not what was {'written' if write else 'read'}")

    def move(self, write: bool) -> tuple[float, float]:
        """Move all blocks; return the seconds, and the CPU seconds of the passive process meanwhile."""
        before = self._ask(self._passive, "serve")
        took = self._ask(self._active, "move", write=write)
        return took, self._ask(self._passive, "rest") - before

    def each(self, write: bool, count: int) -> list[float]:
        """Move blocks one by one; return the seconds of each."""
        self._ask(self._passive, "serve")
        took: list[float] = self._ask(self._active, "each", write=write, count=count)
        self._ask(self._passive, "rest")
        return took

    def end(self) -> None:
        """End both."""
        self._active.end()
        self._passive.end()
