"""How a command says that it failed."""

from __future__ import annotations

__all__ = ["CommandError"]


class CommandError(Exception):
    """A command cannot go on; the text says why, in one line."""
