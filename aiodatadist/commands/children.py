"""The environment of child processes that run this very package."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import aiodatadist

__all__ = ["child_environment"]


def child_environment() -> dict[str, str]:
    """Return this process's environment, with one BLAS thread and with this package on the path."""
    environment = dict(os.environ)
    # Several BLAS threads divide a product differently, and its last bits differ with that.
    for variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "BLIS_NUM_THREADS"):
        environment[variable] = "1"
    root = str(Path(aiodatadist.__file__).parent.parent)
    if root not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        # The children run this very package, also from a checkout that is not installed.
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return environment
