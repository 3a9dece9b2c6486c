"""The virtual environments of the comparison, one for each peer and one for aiodatadist, below build/peers."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

__all__ = ["FOLDER", "HERE", "Unavailable", "environment"]

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parent.parent
FOLDER: Final = ROOT / "build" / "peers"

_INSTALLS: Final[dict[str, tuple[tuple[str, ...], ...]]] = {
    "aiodatadist": ((str(ROOT),),),
    # Without what it depends on: it declares torch, and does not need it.
    "nixl": (("--no-deps", "nixl-cu12==1.5.1"), ("numpy",)),
    "mooncake": (("mooncake-transfer-engine-non-cuda==0.3.13.post1", "numpy"),),
    "libfabric": (("numpy",),),
    "pyzmq": (("pyzmq==27.3.0", "numpy"),),
    "gloo": (("torch==2.13.0", "numpy"),),
}
_PIP: Final = ("-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-input", "--root-user-action=ignore")
_C_SOURCE: Final = HERE / "libfabric.c"
_C_FLAGS: Final = ("-std=gnu11", "-O3", "-Wall", "-Wextra", "-shared", "-fPIC")


class Unavailable(Exception):
    """A peer cannot be installed or run; the text says why."""


def _run(command: list[str], log: Path) -> None:
    """Run a command; what it prints goes to the log. Raises Unavailable."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("AIODATADIST_")}
    variables.pop("PYTHONPATH", None)
    with log.open("ab") as file:
        file.write(f"$ {shlex.join(command)}\n".encode())
        file.flush()
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=variables)
        except OSError as why:
            raise Unavailable(f"{command[0]}: {why.strerror}") from None
    if done.returncode:
        raise Unavailable(f"{shlex.join(command[:4])} ... failed: {complaint(log)}")


def complaint(log: Path) -> str:
    """Return what looks most like a reason in the last lines of a log."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()][-40:]
    errors = [line for line in lines if "error" in line.lower() and not line.startswith(("note:", "hint:"))]
    return f"{(errors or lines or ['no output'])[-1]:.300} ({log})"


def _sources() -> str:
    """Return a digest of what aiodatadist is built from."""
    digest = hashlib.sha256()
    files = [ROOT / "setup.py"]
    for folder in (ROOT / "aiodatadist", ROOT / "include"):
        files += (file for file in folder.rglob("*") if file.suffix in (".py", ".pyx", ".pxd", ".pxi", ".h", ".hpp"))
        # What Cython made of a .pyx is no source.
        files += (file for file in folder.rglob("*.cpp") if not file.with_suffix(".pyx").exists())
    for file in sorted(files):
        digest.update(f"{file.relative_to(ROOT)}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _wanted(name: str) -> str:
    """Return what an environment is made of: with a change of it, it is made anew."""
    wanted: list[object] = [sys.version, _INSTALLS[name]]
    if name == "aiodatadist":
        wanted.append(_sources())
    if name == "libfabric":
        wanted.append(_C_SOURCE.read_text())
    return json.dumps(wanted)


def environment(name: str) -> Path:
    """Make an environment unless it is there; return its Python.

    Raises
    ------
    Unavailable
        It cannot be made.
    """
    folder = FOLDER / name
    stamp, python, log = folder / "made-of.json", folder / "bin" / "python", FOLDER / f"{name}-install.log"
    wanted = _wanted(name)
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"installing {name} in {folder}", file=sys.stderr, flush=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    log.write_bytes(b"")
    _run([sys.executable, "-m", "venv", str(folder)], log)
    for arguments in _INSTALLS[name]:
        _run([str(python), *_PIP, *arguments], log)
    if name == "libfabric":
        compiler = shlex.split(os.environ.get("CC", "cc"))
        library = folder / "lib" / "libpeer_libfabric.so"
        _run([*compiler, *_C_FLAGS, str(_C_SOURCE), "-lfabric", "-o", str(library)], log)
    stamp.write_text(wanted)
    return python
