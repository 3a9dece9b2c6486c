"""How many requests a router takes.

Not built yet, and belongs into this file alone: the bounded queue (256 requests, 10 s) before dispatch, with
``queue_full`` (429) and ``queue_timeout`` (503).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

__all__ = ["Admission"]


class Admission:
    """The router's door."""

    def __init__(self) -> None:
        self.inside = 0

    @contextlib.asynccontextmanager
    async def enter(self) -> AsyncIterator[None]:
        """Be inside during the body. Raises ServeError ``queue_full`` or ``queue_timeout``."""
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1
