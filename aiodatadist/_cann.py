"""Where CANN, the software of Ascend NPUs, lies on this machine. Nothing here opens a library or asks a device.

HIXL needs three libraries of CANN, all opened at run time: ``libcann_hixl.so`` (HIXL itself), ``libmetadef.so`` (its
strings) and ``libascendcl.so`` (ACL: devices and contexts). They are looked for where `Config.hixl_library` says, in
the folders of CANN's environment variables, in the usual folders of its installers, and at last where the dynamic
loader looks (``LD_LIBRARY_PATH``, ``/etc/ld.so.conf``).
"""

from __future__ import annotations

import importlib.machinery
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["ACL", "HIXL", "HOME_VARIABLES", "METADEF", "CannLibraries", "find_libraries", "homes", "shim_path"]

HIXL: Final = "libcann_hixl.so"
METADEF: Final = "libmetadef.so"
ACL: Final = "libascendcl.so"

HOME_VARIABLES: Final = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
"""Environment variables that CANN's ``set_env.sh`` sets to its folder, in the order in which they count."""

_USUAL: Final = (
    "/usr/local/Ascend/cann",
    "/usr/local/Ascend/ascend-toolkit/latest",
    "/usr/local/Ascend/latest",
)
# Of an installation without root's rights, below the home folder.
_USUAL_OF_USER: Final = ("Ascend/cann", "Ascend/ascend-toolkit/latest", "Ascend/latest")


@dataclass(frozen=True, slots=True)
class CannLibraries:
    """The libraries to open, in this order.

    Attributes
    ----------
    metadef, hixl, acl : str
        A path, or the bare name of a library that was found in no folder and is left to the dynamic loader.
    searched : tuple of str
        Folders that were looked through, for messages.
    """

    metadef: str
    hixl: str
    acl: str
    searched: tuple[str, ...]

    @property
    def found(self) -> bool:
        """Whether HIXL lies in one of the folders. The dynamic loader may know more."""
        return os.sep in self.hixl


def homes(environ: Mapping[str, str] | None = None) -> tuple[Path, ...]:
    """Return the folders where CANN is or may be installed, without those that do not exist.

    Parameters
    ----------
    environ : mapping of str to str, optional
        Read instead of ``os.environ``.

    Returns
    -------
    tuple of Path
        Those that the environment names come first. No folder comes twice.
    """
    environ = os.environ if environ is None else environ
    named = [environ[name] for name in HOME_VARIABLES if environ.get(name)]
    user = environ.get("HOME")
    usual = [*_USUAL, *(f"{user}/{folder}" for folder in _USUAL_OF_USER if user)]
    found: dict[Path, Path] = {}
    for text in (*named, *usual):
        folder = Path(text)
        if folder.is_dir():
            found.setdefault(folder.resolve(), folder)
    return tuple(found.values())


def find_libraries(configured: str | None = None, environ: Mapping[str, str] | None = None) -> CannLibraries:
    """Find the libraries of CANN that HIXL needs.

    Parameters
    ----------
    configured : str, optional
        `Config.hixl_library`: the path of ``libcann_hixl.so`` under whatever name, or the folder that holds it. What
        is not in that folder is looked for in the other places.
    environ : mapping of str to str, optional
        Read instead of ``os.environ``.

    Returns
    -------
    CannLibraries
        What is found in no folder stands there by its bare name, for the dynamic loader.
    """
    folders: list[Path] = []
    hixl: str | None = None
    if configured is not None:
        path = Path(configured).expanduser()
        if path.is_dir():
            folders.append(path)
        else:
            hixl = str(path.absolute())  # also where it is missing: opening it then says so
            folders.append(path.absolute().parent)
    machine = platform.machine()
    for home in homes(environ):
        folders += [home / "lib64", home / f"{machine}-linux" / "lib64"]
    # CANN's driver package brings a copy of ACL's lower half, but none of these three.
    folders = [folder for folder in dict.fromkeys(folders) if folder.is_dir()]
    return CannLibraries(
        metadef=_find(METADEF, folders),
        hixl=hixl or _find(HIXL, folders),
        acl=_find(ACL, folders),
        searched=tuple(str(folder) for folder in folders),
    )


def _find(name: str, folders: list[Path]) -> str:
    for folder in folders:
        if (folder / name).is_file():
            return str(folder / name)
    return name


def shim_path() -> str:
    """Return the path of the package's own small library that calls HIXL."""
    return str(Path(__file__).with_name("_hixl_shim" + importlib.machinery.EXTENSION_SUFFIXES[0]))
