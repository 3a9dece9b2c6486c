"""Say what works on this machine and, where something does not, exactly why.

Looks at each transport, the limits that matter to transfers, the kernel and the installed versions. Exits 0 if
at least one transport is usable.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

import numpy as np

import aiodatadist
from aiodatadist import _core
from aiodatadist.config import KNOWN_TRANSPORTS

__all__ = ["NAME", "SUMMARY", "Report", "add_arguments", "examine", "run"]

NAME: Final = "doctor"
SUMMARY: Final = "say which transports work here, and exactly why others do not"

_OPTIONAL: Final = ("torch", "torch_npu", "uvloop")
_REQUIRED: Final = ("anyio", "msgspec", "structlog")
_YAMA: Final = Path("/proc/sys/kernel/yama/ptrace_scope")
_YAMA_MEANS: Final = {
    0: "a process may touch any other of its user",
    1: "a process must be allowed by the other one; links do that for one peer (Config.allow_any_ptracer: for all)",
    2: "only with CAP_SYS_PTRACE; without it ordinary memory travels over tcp",
    3: "never; ordinary memory travels over tcp",
}
# The transports of the simulated network are for tests, and there is nothing to examine.
_NOT_EXAMINED: Final = ("sim",)


@dataclass(frozen=True, slots=True)
class Transport:
    """One transport.

    Attributes
    ----------
    name : str
    usable : bool
    detail : str
        What it uses, or exactly why it cannot be used.
    """

    name: str
    usable: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit of this process, as getrlimit tells it.

    Attributes
    ----------
    soft, hard : int or None
        None: unlimited.
    unit : str
    """

    soft: int | None
    hard: int | None
    unit: str

    @classmethod
    def of(cls, kind: int, unit: str) -> Limit:
        """Ask the system."""
        soft, hard = (None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(kind))
        return cls(soft, hard, unit)

    def __str__(self) -> str:
        soft, hard = (
            f"{value:,} {self.unit}" if value is not None else "unlimited" for value in (self.soft, self.hard)
        )
        return soft if soft == hard else f"{soft} (may be raised to {hard})"


@dataclass(frozen=True, slots=True)
class Report:
    """What `examine` found.

    Attributes
    ----------
    transports : list of Transport
    copy_kernel : str
        Which copy loop suits the processor.
    memlock, open_files : Limit
    ptrace_scope : int or None
        Yama's setting; None where Yama is not active.
    kernel, machine : str
    cpus, cpus_usable : int
        In the machine, and open to this process.
    switch_interval : float
        Seconds after which a thread that wants the GIL asks for it.
    versions : dict
        By name of the distribution; None: not installed.
    debug_build : bool
    """

    transports: list[Transport]
    copy_kernel: str
    memlock: Limit
    open_files: Limit
    ptrace_scope: int | None
    kernel: str
    machine: str
    cpus: int
    cpus_usable: int
    switch_interval: float
    versions: dict[str, str | None]
    debug_build: bool

    @property
    def usable(self) -> bool:
        """Whether at least one transport is usable."""
        return any(transport.usable for transport in self.transports)


def _installed(name: str) -> str | None:
    """Return the version of a distribution without importing it: torch alone takes seconds."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _ptrace_scope() -> int | None:
    try:
        return int(_YAMA.read_text())
    except (OSError, ValueError):
        return None


def examine() -> Report:
    """Look at this process and this machine."""
    transports = [Transport(*found) for found in _core.probe_transports()]
    probed = {transport.name for transport in transports}
    transports += [
        Transport(name, False, "this version has no such transport yet")
        for name in KNOWN_TRANSPORTS
        if name not in probed and name not in _NOT_EXAMINED
    ]
    versions: dict[str, str | None] = {
        "aiodatadist": aiodatadist.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    versions.update((name, _installed(name)) for name in (*_REQUIRED, *_OPTIONAL))
    return Report(
        transports=[transport for transport in transports if transport.name not in _NOT_EXAMINED],
        copy_kernel=_core.copy_kernel(),
        memlock=Limit.of(resource.RLIMIT_MEMLOCK, "bytes"),
        open_files=Limit.of(resource.RLIMIT_NOFILE, "files"),
        ptrace_scope=_ptrace_scope(),
        kernel=f"{os.uname().sysname} {os.uname().release}",
        machine=platform.machine(),
        cpus=os.cpu_count() or 1,
        cpus_usable=len(os.sched_getaffinity(0)),
        switch_interval=sys.getswitchinterval(),
        versions=versions,
        debug_build=bool(_core.debug),
    )


def _lines(report: Report) -> list[str]:
    lines = ["transports"]
    lines += [
        f"  {transport.name:<14}{'usable' if transport.usable else 'NOT usable'}: {transport.detail}"
        for transport in report.transports
    ]
    scope = report.ptrace_scope
    yama = "Yama is not active" if scope is None else f"{scope}: {_YAMA_MEANS.get(scope, 'unknown to this version')}"
    interval = f"{report.switch_interval * 1e3:g} ms"
    if report.switch_interval > 0.001:
        interval += "; beside a busy model thread a smaller one, sys.setswitchinterval(0.0005), helps the event loop"
    rows = [
        ("copy kernel", report.copy_kernel),
        ("kernel", f"{report.kernel}, {report.machine}"),
        ("CPUs", f"{report.cpus}, {report.cpus_usable} of them open to this process"),
        ("memlock", str(report.memlock)),
        ("open files", str(report.open_files)),
        ("ptrace_scope", yama),
        ("GIL switch", interval),
    ]
    lines += ["machine", *(f"  {name:<14}{text}" for name, text in rows), "versions"]
    for name, version in report.versions.items():
        optional = ", optional" if name in _OPTIONAL else ""
        lines.append(f"  {name:<14}{version or f'not installed{optional}'}")
    if report.debug_build:
        lines.append("This is a debug build: slower, with assertions.")
    return lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(arguments: argparse.Namespace) -> int:
    """Run the command: print the report; 0 if at least one transport is usable."""
    report = examine()
    if arguments.json:
        print(json.dumps({"usable": report.usable, **asdict(report)}, indent=2))
    else:
        print("\n".join(_lines(report)))
        if not report.usable:
            print("No transport is usable here: links cannot be made.")
    return 0 if report.usable else 1
