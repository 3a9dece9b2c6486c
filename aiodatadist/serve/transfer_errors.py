"""What the library has to say of a transfer, in serving's words."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import aiodatadist as adt

from .errors import ServeError

__all__ = ["transfer_errors"]


@contextlib.contextmanager
def transfer_errors(request_id: str) -> Iterator[None]:
    """Make ServeErrors of the library's errors in the body.

    Raises
    ------
    ServeError
        ``ticket_gone``, ``transfer_timeout``, ``layout_mismatch`` or ``transfer_failed``.
    """
    try:
        yield
    except adt.LeaseError as why:
        raise ServeError("ticket_gone", f"{request_id} is not held any more: {why}") from why
    except (adt.TransferTimeout, adt.LinkTimeout) as why:
        raise ServeError("transfer_timeout", f"{request_id}: {why}") from why
    except adt.CacheMismatch as why:
        raise ServeError("layout_mismatch", f"{request_id}: {why}") from why
    except adt.DataDistError as why:
        raise ServeError("transfer_failed", f"{request_id}: {why}") from why
