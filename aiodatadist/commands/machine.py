"""What `doctor` finds out about the process and its machine.

Nothing here raises for what cannot be read or tried: that is part of what is found, with the reason.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import platform
import resource
import secrets
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aiodatadist import _core

__all__ = [
    "YAMA_MEANS",
    "Access",
    "Container",
    "Cpu",
    "Feature",
    "Limit",
    "Rights",
    "container",
    "cpu",
    "features",
    "limits",
    "memory_access",
    "ptrace_scope",
    "rights",
    "system_limits",
]

_CHILD_SECONDS: Final = 20.0
_SECRET_BYTES: Final = 32

# Modules say where they look, so that tests can put something else there.
PROC: Final = Path("/proc")
CGROUPS: Final = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
MARKS: Final = (Path("/.dockerenv"), Path("/run/.containerenv"))

YAMA_MEANS: Final = {
    0: "a process may touch any other of its user",
    1: "a process must be allowed by the other one; links do that for one peer (Config.allow_any_ptracer: for all)",
    2: "only with CAP_SYS_PTRACE; without it ordinary memory travels over tcp",
    3: "never; ordinary memory travels over tcp",
}


def _said(why: OSError) -> str:
    return why.strerror or str(why)


def _text(path: Path) -> str | None:
    """Return what a file holds; None where there is none. Other failures raise OSError."""
    try:
        return path.read_text(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None


# Kernel. ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Feature:
    """Something the library needs of the kernel.

    Attributes
    ----------
    name : str
    works : bool
        It was tried just now.
    detail : str
        What it is needed for; where it does not work, why not and what that costs.
    """

    name: str
    works: bool
    detail: str


def _try_memfd() -> None:
    fd = os.memfd_create("aiodatadist-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        with mmap.mmap(fd, mmap.PAGESIZE) as memory:
            memory[0] = 1
    finally:
        os.close(fd)


def _try_pidfd() -> None:
    os.close(os.pidfd_open(os.getpid()))


def _try_eventfd() -> None:
    fd = os.eventfd(1, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    try:
        with select.epoll() as poll:
            poll.register(fd, select.EPOLLIN)
            if not poll.poll(0):
                raise OSError(errno.EIO, "epoll does not see a ready eventfd")
    finally:
        os.close(fd)


def _try_populate() -> None:
    with mmap.mmap(-1, mmap.PAGESIZE) as memory:
        for advice in (22, 23):  # MADV_POPULATE_READ and _WRITE, Linux 5.14
            memory.madvise(advice)


_FEATURES: Final[tuple[tuple[str, Callable[[], None], str, str], ...]] = (
    ("memfd, seals", _try_memfd, "library memory and the same-host proof", "no shm"),
    ("pidfd", _try_pidfd, "sees the end of a peer's process on this host", "no shm"),
    ("eventfd, epoll", _try_eventfd, "completions, and all waiting", "nothing works without them"),
    ("MADV_POPULATE", _try_populate, "takes library memory ahead of its use", "memory is taken as it is touched"),
)


def features() -> list[Feature]:
    """Try what the library needs of the kernel."""
    found = []
    for name, attempt, purpose, cost in _FEATURES:
        try:
            attempt()
        except OSError as why:
            found.append(Feature(name, False, f"{_said(why)}: {cost}"))
        else:
            found.append(Feature(name, True, purpose))
    return found


# Access to the memory of other processes. -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Access:
    """Whether one process may copy from another one's memory.

    Attributes
    ----------
    who : str
        ``"own process"``, ``"child"`` (of this process) or ``"by a child"`` (on this process, as a peer would).
    error : int or None
        The errno; None: it works, or it could not be tried.
    detail : str
        Empty: it works.
    """

    who: str
    error: int | None
    detail: str

    @property
    def works(self) -> bool:
        """Whether the secret of the other process was read."""
        return not self.detail


# The child shows a secret, then reads this process's. It loads nothing but ctypes.
_CHILD: Final = """
import ctypes, os, sys
own = ctypes.create_string_buffer(bytes.fromhex(sys.argv[1]))
print(ctypes.addressof(own), flush=True)
pid, address, size = map(int, sys.stdin.readline().split())
libc = ctypes.CDLL(None, use_errno=True)
class Vector(ctypes.Structure):
    _fields_ = ("base", ctypes.c_void_p), ("size", ctypes.c_size_t)
found = ctypes.create_string_buffer(size)
here, there = Vector(ctypes.addressof(found), size), Vector(address, size)
libc.process_vm_readv.restype = ctypes.c_ssize_t
one = ctypes.c_ulong(1)
done = libc.process_vm_readv(pid, ctypes.byref(here), one, ctypes.byref(there), one, ctypes.c_ulong(0))
print(ctypes.get_errno() if done < 0 else 0, found.raw.hex(), flush=True)
"""


def _outcome(who: str, code: int) -> Access:
    if not code:
        return Access(who, None, "")
    if code == errno.EBADMSG:
        return Access(who, code, "other bytes were read than the process holds")
    return Access(who, code, os.strerror(code))


def memory_access() -> list[Access]:
    """Try process_vm_readv on this process, on a child, and by the child on this process."""
    secret = _core.Secret()
    found = [_outcome("own process", _core.probe_process_vm(os.getpid(), secret.address, secret.value))]
    shown = secrets.token_bytes(_SECRET_BYTES)
    try:
        with _child(shown) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            address = int(process.stdout.readline())
            found.append(_outcome("child", _core.probe_process_vm(process.pid, address, shown)))
            process.stdin.write(f"{os.getpid()} {secret.address} {len(secret.value)}\n")
            process.stdin.flush()
            code, read = process.stdout.readline().split()
            wrong = int(code) == 0 and bytes.fromhex(read) != secret.value
            found.append(_outcome("by a child", errno.EBADMSG if wrong else int(code)))
    except (OSError, ValueError) as why:
        said = _said(why) if isinstance(why, OSError) else "it ended early"
        missing = ("child", "by a child")[len(found) - 1 :]
        found += [Access(who, None, f"not tried: a child process of {sys.executable!r}: {said}") for who in missing]
    return found


@contextlib.contextmanager
def _child(secret: bytes) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable or "python3", "-I", "-S", "-c", _CHILD, secret.hex()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    # A child that hangs ends, and with it the wait for its answer.
    limit = threading.Timer(_CHILD_SECONDS, process.kill)
    limit.start()
    try:
        with process:
            yield process
    finally:
        limit.cancel()
        process.kill()


def ptrace_scope() -> tuple[int | None, str]:
    """Return Yama's setting, None where it is not known, and what it means."""
    try:
        content = _text(PROC / "sys/kernel/yama/ptrace_scope")
    except OSError as why:
        return None, f"cannot be read: {_said(why)}"
    if content is None:
        return None, "Yama is not active"
    try:
        scope = int(content)
    except ValueError:
        return None, f"cannot be understood: {content!r:.40}"
    return scope, YAMA_MEANS.get(scope, "unknown to this version")


@dataclass(frozen=True, slots=True)
class Rights:
    """What the kernel lets this process do.

    Attributes
    ----------
    user : int
        Effective user id.
    ptrace, ipc_lock : bool or None
        CAP_SYS_PTRACE and CAP_IPC_LOCK; None: not known.
    seccomp : str or None
        ``"off"``, ``"strict"`` or ``"filter"``. A filter may refuse system calls: what was tried says which.
    unreadable : str or None
        Why the rest is not known.
    """

    user: int
    ptrace: bool | None
    ipc_lock: bool | None
    seccomp: str | None
    unreadable: str | None = None

    def __str__(self) -> str:
        if self.unreadable is not None:
            return f"user {self.user}; {self.unreadable}"
        named = {"CAP_SYS_PTRACE": self.ptrace, "CAP_IPC_LOCK": self.ipc_lock}
        held = [name if has else f"no {name}" for name, has in named.items() if has is not None]
        return ", ".join((f"user {self.user}", *held, f"seccomp {self.seccomp or 'unknown'}"))


def rights() -> Rights:
    """Read the status of this process."""
    status = PROC / "self/status"
    try:
        content = _text(status)
    except OSError as why:
        return Rights(os.geteuid(), None, None, None, f"{status} cannot be read: {_said(why)}")
    if content is None:
        return Rights(os.geteuid(), None, None, None, f"there is no {status}")
    rows = dict(line.split(":", 1) for line in content.splitlines() if ":" in line)
    capabilities: int | None = None
    with contextlib.suppress(KeyError, ValueError):
        capabilities = int(rows["CapEff"], 16)
    ptrace, ipc_lock = (None if capabilities is None else bool(capabilities >> bit & 1) for bit in (19, 14))
    seccomp = {"0": "off", "1": "strict", "2": "filter"}.get(rows.get("Seccomp", "").strip())
    return Rights(os.geteuid(), ptrace, ipc_lock, seccomp)


# Limits. ----------------------------------------------------------------------------------------------------


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


def limits() -> dict[str, Limit]:
    """Return the limits of this process that matter to transfers."""
    return {
        "memlock": Limit.of(resource.RLIMIT_MEMLOCK, "bytes"),
        "open_files": Limit.of(resource.RLIMIT_NOFILE, "files"),
        "processes": Limit.of(resource.RLIMIT_NPROC, "threads of the user"),
        "address_space": Limit.of(resource.RLIMIT_AS, "bytes"),
    }


_SETTINGS: Final = ("net/core/rmem_max", "net/core/wmem_max", "net/core/somaxconn", "vm/max_map_count", "fs/file-max")


def system_limits() -> dict[str, int | str]:
    """Return limits of the whole system; a text says why one is not known."""
    found: dict[str, int | str] = {"IOV_MAX": os.sysconf("SC_IOV_MAX")}
    for name in _SETTINGS:
        said = name.replace("/", ".")
        try:
            content = _text(PROC / "sys" / name)
            found[said] = "not there" if content is None else int(content)
        except OSError as why:
            found[said] = f"cannot be read: {_said(why)}"
        except ValueError:
            found[said] = "cannot be understood"
    return found


# Container. -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Container:
    """What hints at a container, and what it limits.

    Attributes
    ----------
    hints : list of str
        Empty: nothing hints at one.
    cgroup : str
        Which kind of cgroup limits were looked at, or why none.
    memory_max : int or None
        Bytes; the least of the own cgroup and those above. None: no limit was found.
    pids_max : int or None
        Threads and processes.
    cpu_max : float or None
        CPUs.
    namespaces : dict
        Names of the namespaces. Peers share memory only if both are in the same ones of ``pid`` and ``net``.
    """

    hints: list[str]
    cgroup: str
    memory_max: int | None
    pids_max: int | None
    cpu_max: float | None
    namespaces: dict[str, str]


def _hints() -> list[str]:
    hints = [str(mark) for mark in MARKS if _exists(mark)]
    hints += [f"${name}" for name in ("container", "KUBERNETES_SERVICE_HOST") if os.environ.get(name)]
    return hints


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


def _namespaces() -> dict[str, str]:
    found = {}
    for name in ("pid", "net", "user"):
        try:
            found[name] = os.readlink(PROC / "self/ns" / name)
        except OSError as why:
            found[name] = f"cannot be read: {_said(why)}"
    # Fixed in Linux since it has namespaces: include/linux/proc_ns.h.
    for name, number in (("pid", 0xEFFFFFFC), ("user", 0xEFFFFFFD)):
        if found[name] == f"{name}:[{number}]":
            found[name] += ", that of the host"
    return found


def _least(values: list[float]) -> float | None:
    return min(values, default=None)


def _cpus(text: str) -> float:
    quota, period = text.split()
    return int(quota) / int(period)


def container() -> Container:
    """Look for hints, and for limits of cgroup v2 from the own cgroup upwards."""
    found: dict[str, list[float]] = {"memory.max": [], "pids.max": [], "cpu.max": []}
    faults: list[str] = []
    said = _walk_cgroups(found, faults)
    memory, pids = (_least(found[name]) for name in ("memory.max", "pids.max"))
    return Container(
        hints=_hints(),
        cgroup="; ".join((said, *faults)),
        memory_max=None if memory is None else int(memory),
        pids_max=None if pids is None else int(pids),
        cpu_max=_least(found["cpu.max"]),
        namespaces=_namespaces(),
    )


def _walk_cgroups(found: dict[str, list[float]], faults: list[str]) -> str:
    """Collect the limits of the own cgroup and those above it; return what was looked at."""
    try:
        content = _text(PROC / "self/cgroup")
    except OSError as why:
        return f"{PROC / 'self/cgroup'} cannot be read: {_said(why)}"
    own = next((line[3:] for line in (content or "").splitlines() if line.startswith("0::")), None)
    root = next((path for path in CGROUPS if _exists(path / "cgroup.controllers")), None)
    if own is None or root is None:
        return "no cgroup v2 here; limits of v1 are not looked at" if content else "no cgroups here"
    # Seen from inside a container, the own cgroup may be above the root that is mounted here.
    parts = [part for part in own.split("/") if part not in ("", "..")]
    seen = 0
    for depth in range(len(parts), -1, -1):
        folder = root.joinpath(*parts[:depth])
        for name, values in found.items():
            try:
                text = _text(folder / name)
                if text is None:
                    continue
                seen += 1
                if not text.startswith("max"):
                    values.append(_cpus(text) if name == "cpu.max" else int(text))
            except OSError as why:
                faults.append(f"{folder / name} cannot be read: {_said(why)}")
            except (ValueError, ZeroDivisionError):
                faults.append(f"{folder / name} cannot be understood")
    if seen or faults:
        return f"v2, {own}"
    return f"v2, {own}, without limits of memory, pids and cpu; those of v1 are not looked at"


# Processor. -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cpu:
    """The processor.

    Attributes
    ----------
    machine, model : str
    count, usable : int
        In the machine, and open to this process.
    features : list of str
        Those that copy kernels choose by.
    copy_kernel : str
        The copy loop chosen for large transfers over mapped memory.
    """

    machine: str
    model: str
    count: int
    usable: int
    features: list[str]
    copy_kernel: str


_CPU_FEATURES: Final = ("sse2", "avx2", "avx512f", "erms", "asimd", "sve", "sve2")


def cpu() -> Cpu:
    """Look at the processor."""
    try:
        content = _text(PROC / "cpuinfo") or ""
    except OSError as why:
        content = f"model name: unknown: /proc/cpuinfo cannot be read: {_said(why)}"
    rows: dict[str, str] = {}
    for line in content.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            rows.setdefault(name.strip(), value.strip())
    flags = set((rows.get("flags") or rows.get("Features") or "").split())
    return Cpu(
        machine=platform.machine(),
        model=rows.get("model name") or rows.get("CPU part") or "unknown",
        count=os.cpu_count() or 1,
        usable=len(os.sched_getaffinity(0)),
        features=[name for name in _CPU_FEATURES if name in flags],
        copy_kernel=_core.copy_kernel(),
    )
