"""STAND-IN for tests, not Ascend software: libraries with the published ABI of HIXL, and what tests use of them.

`build` compiles the sources beside this file; README.md there says what they do and what can be switched.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

# A transport to run a test over, beside those that need no stand-in.
HIXL = pytest.param("hixl", marks=pytest.mark.hixl)
HERE = Path(__file__).resolve().parent
# In the order in which they need each other.
LIBRARIES = {
    "libmetadef.so": (["metadef.cpp"], []),
    "libascendcl.so": (["ascendcl.cpp"], []),
    "libcann_hixl.so": (["hixl.cpp", "engine.cpp", "transfers.cpp", "knobs.cpp"], ["-lmetadef", "-lascendcl"]),
}
COUNTERS = ("registrations", "connects", "disconnects", "requests", "queries", "bulk_queries", "stalls", "late_writes")
WARNINGS = ["-Wall", "-Wextra", "-Wconversion", "-Werror"]
# The other ABI of std::string than the library is built with: what is published must not depend on it.
FLAGS = ["-std=c++17", "-O1", "-g1", "-pthread", *WARNINGS]
if "libtsan" in os.environ.get("LD_PRELOAD", ""):
    # The thread sanitizer sees locks and counters of shared strings only in what is compiled for it.
    FLAGS += ["-fsanitize=thread", "-D_GLIBCXX_EXTERN_TEMPLATE=0"]
SHARED = ["-fPIC", "-shared", "-fvisibility=hidden", "-D_GLIBCXX_USE_CXX11_ABI=0", "-Wl,-z,defs", "-Wl,-rpath,$ORIGIN"]


def missing() -> str | None:
    """Say why the stand-in cannot be built here, or None."""
    compiler = shlex.split(os.environ.get("CXX", "g++"))[0]
    return None if shutil.which(compiler) else f"no C++ compiler ({compiler}) to build the stand-in of HIXL with"


@functools.cache
def build() -> Path:
    """Build the stand-in, or find what was built of the same sources before; return its ASCEND_HOME_PATH."""
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    sources = sorted(HERE.glob("*.[chm]*p"))
    content = hashlib.sha256(repr((compiler, LIBRARIES, FLAGS, SHARED)).encode())
    for source in sources:
        content.update(source.name.encode() + b"\0" + source.read_bytes())
    parent = Path(tempfile.gettempdir(), f"aiodatadist-hixl-standin-{os.geteuid()}")
    parent.mkdir(mode=0o700, exist_ok=True)
    # What is loaded from a folder that anybody can write to must be one's own.
    found = parent.lstat()
    own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
    assert own, f"{parent} belongs to somebody else"
    home = parent / content.hexdigest()[:20]
    if not home.exists():
        with tempfile.TemporaryDirectory(dir=parent) as made:
            _compile(compiler, Path(made))
            with contextlib.suppress(OSError):  # somebody else was quicker
                os.rename(made, home)
            Path(made).mkdir(exist_ok=True)
    return home


def _compile(compiler: Sequence[str], home: Path) -> None:
    lib = home / "lib64"
    lib.mkdir()
    (home / "README").write_text("A STAND-IN for aiodatadist's tests, not Ascend software.\n")
    for name, (sources, needed) in LIBRARIES.items():
        arguments = [*FLAGS, *SHARED, f"-Wl,--version-script={HERE / 'exports.map'}", f"-Wl,-soname,{name}", f"-L{lib}"]
        _run([*compiler, *arguments, *(str(HERE / source) for source in sources), *needed, "-o", str(lib / name)])


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"


def compile_program(source: Path, program: Path) -> None:
    """Compile a program that uses the stand-in by the published ABI alone."""
    lib = build() / "lib64"
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    libraries = ["-lcann_hixl", "-lmetadef", "-lascendcl"]
    _run([*compiler, *FLAGS, str(source), f"-L{lib}", f"-Wl,-rpath,{lib}", *libraries, "-o", str(program)])


class Acl:
    """The stand-in's ACL runtime in this process: device memory that the host cannot touch."""

    HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2
    HUGE_FIRST, NORMAL_ONLY = 0, 2

    def __init__(self) -> None:
        self._lib = ctypes.CDLL(str(build() / "lib64" / "libascendcl.so"), mode=ctypes.RTLD_GLOBAL)
        for name in ("aclrtMalloc", "aclrtMallocHost", "aclrtFree", "aclrtFreeHost", "aclrtMemcpy", "aclrtSetDevice"):
            getattr(self._lib, name).restype = ctypes.c_int
        self._lib.standin_device_bytes.restype = ctypes.c_uint64
        self._lib.aclrtMemcpy.argtypes = [
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
        ]

    def set_device(self, device: int = 0) -> None:
        """Choose a device for the calling thread."""
        assert self._lib.aclrtSetDevice(device) == 0

    def malloc(self, size: int, policy: int = HUGE_FIRST) -> int:
        """Return the address of device memory. The calling thread must have a device."""
        address = ctypes.c_void_p()
        assert self._lib.aclrtMalloc(ctypes.byref(address), ctypes.c_size_t(size), policy) == 0
        assert address.value is not None
        return address.value

    def free(self, address: int) -> None:
        assert self._lib.aclrtFree(ctypes.c_void_p(address)) == 0

    def malloc_host(self, size: int) -> int:
        """Return the address of host memory of the kind that a network card of a device can reach."""
        address = ctypes.c_void_p()
        assert self._lib.aclrtMallocHost(ctypes.byref(address), ctypes.c_size_t(size)) == 0
        assert address.value is not None
        return address.value

    def free_host(self, address: int) -> None:
        assert self._lib.aclrtFreeHost(ctypes.c_void_p(address)) == 0

    def write(self, address: int, content: bytes) -> None:
        """Copy bytes into device memory."""
        assert self._lib.aclrtMemcpy(address, len(content), content, len(content), self.HOST_TO_DEVICE) == 0

    def read(self, address: int, size: int) -> bytes:
        """Copy bytes out of device memory."""
        content = ctypes.create_string_buffer(size)
        assert self._lib.aclrtMemcpy(content, size, address, size, self.DEVICE_TO_HOST) == 0
        return content.raw

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory that are allocated."""
        return int(self._lib.standin_device_bytes())

    @contextlib.contextmanager
    def memory(self, *sizes: int) -> Iterator[list[int]]:
        """Device memory of these sizes, freed at the end of the block."""
        self.set_device()
        addresses = [self.malloc(size) for size in sizes]
        try:
            yield addresses
        finally:
            for address in addresses:
                self.free(address)


class Controls:
    """Knobs and counters of the stand-in in this process; what was counted before `reset` does not show."""

    def __init__(self) -> None:
        self._before: dict[str, int] = {}
        lib = build() / "lib64"
        for name in ("libmetadef.so", "libascendcl.so"):
            ctypes.CDLL(str(lib / name), mode=ctypes.RTLD_GLOBAL)
        self._lib = ctypes.CDLL(str(lib / "libcann_hixl.so"), mode=ctypes.RTLD_GLOBAL)
        self._lib.standin_count.restype = ctypes.c_uint64
        self._lib.standin_violations.restype = ctypes.c_size_t
        self._lib.standin_set.argtypes = [ctypes.c_char_p, ctypes.c_int64]
        self._lib.standin_reset.restype = None

    def set(self, knob: str, value: int) -> None:
        """Turn a knob, by its name without HIXL_STANDIN_; the environment counts no more for it in this process."""
        assert self._lib.standin_set(knob.encode(), value) == 0, knob

    def reset(self) -> None:
        """Have the environment count again, and all counters begin at 0."""
        self._lib.standin_reset()
        self._before.clear()
        self._before = {counter: self.count(counter) for counter in COUNTERS}

    def count(self, counter: str) -> int:
        number = int(self._lib.standin_count(counter.encode()))
        assert number != 2**64 - 1, counter
        return number - self._before.get(counter, 0)

    def violations(self) -> list[str]:
        """Return, and forget, which rules of HIXL the library has broken in this process."""
        text = ctypes.create_string_buffer(65536)
        size = self._lib.standin_violations(text, ctypes.c_size_t(len(text)))
        return text.raw[:size].decode().splitlines()
