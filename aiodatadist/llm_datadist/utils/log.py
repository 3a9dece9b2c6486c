"""The logger of the original: ``LLM_DATADIST`` on stdout, at the level of ``ASCEND_GLOBAL_LOG_LEVEL``."""

from __future__ import annotations

import logging
import os
import sys
from functools import cache
from typing import Any, Final

__all__ = ["error", "get_logger", "info", "warn"]

_LEVELS: Final = {"0": logging.DEBUG, "1": logging.INFO, "2": logging.WARNING}


class _Stdout(logging.StreamHandler[Any]):
    """Writes to what ``sys.stdout`` is when a line is written, as ``print`` does."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stdout


@cache
def get_logger() -> logging.Logger:
    """Return the logger, made at its first use.

    Returns
    -------
    logging.Logger
        With one handler, which writes to stdout, and its own level: ``0`` DEBUG, ``1`` INFO, ``2`` WARNING, else ERROR.
    """
    logger = logging.getLogger("LLM_DATADIST")
    logger.setLevel(_LEVELS.get(os.environ.get("ASCEND_GLOBAL_LOG_LEVEL", ""), logging.ERROR))
    logger.propagate = False
    handler = _Stdout()
    handler.setFormatter(logging.Formatter("[%(levelname)s] %(name)s(%(process)d) %(asctime)s %(message)s"))
    logger.addHandler(handler)
    return logger


def _find_caller() -> tuple[str, int]:
    """Return file and line of the first frame outside this module."""
    frame = sys._getframe()
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def _log(level: int, message: str, args: tuple[object, ...]) -> None:
    logger = get_logger()
    if logger.isEnabledFor(level):
        path, line = _find_caller()
        logger.log(level, f"[{os.path.basename(path)}:{line}] {message}", *args)


def info(message: str, *args: object) -> None:
    """Log a line; `args` are filled in by ``%``."""
    _log(logging.INFO, message, args)


def warn(message: str, *args: object) -> None:
    """Log a line; `args` are filled in by ``%``."""
    _log(logging.WARNING, message, args)


def error(message: str, *args: object) -> None:
    """Log a line; `args` are filled in by ``%``."""
    _log(logging.ERROR, message, args)
