"""The limit of open files, which is what bounds the number of links first."""

from __future__ import annotations

import errno
import os
import resource
from typing import Final

from ..errors import FileLimitError

__all__ = ["OUT_OF_FILES", "file_limit_error", "files_are_short", "most_files"]

OUT_OF_FILES: Final = frozenset({errno.EMFILE, errno.ENFILE})
_HINT: Final = "raise it (ulimit -n, LimitNOFILE=), or unlink peers"


def most_files() -> int:
    """Return how many files this process may open; a great number if there is no limit."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 2**31 if limit == resource.RLIM_INFINITY else limit


def files_are_short(needed: int) -> str:
    """Return why `needed` more files cannot be opened, in words; empty if they can.

    The kernel gives out the lowest free number, so one look shows how many are left above it; those that are free below
    the highest in use count as in use.
    """
    limit = most_files()
    try:
        fd = os.open("/", os.O_PATH | os.O_CLOEXEC)
    except OSError as why:
        return f"{why.strerror}; the limit of open files is {limit}" if why.errno in OUT_OF_FILES else ""
    os.close(fd)
    if limit - fd >= needed:
        return ""
    return f"the link needs {needed} files, and {max(0, limit - fd)} of the limit of {limit} open files are left"


def file_limit_error(reason: str, peer: int) -> FileLimitError:
    """Return the error for a link that lacks files here."""
    return FileLimitError(f"too many open files: {reason}", peer=peer, hint=_HINT)
