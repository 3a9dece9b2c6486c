"""What can go wrong with a request: one table of stable codes, for clients, routers and workers alike."""

from __future__ import annotations

import enum
from typing import Any, Final, NamedTuple

__all__ = ["CODES", "Code", "Retry", "ServeError"]


class Retry(enum.Enum):
    """What a router may still do before the first byte has gone to the client."""

    NEVER = "never"
    """Tell the client."""
    DECODE = "decode"
    """The ticket is as good as before: try another decode worker."""
    PAIR = "pair"
    """Begin again from prefill, with another pair."""


class Code(NamedTuple):
    """What a code means.

    Attributes
    ----------
    status
        HTTP status.
    retry
        What the router may do.
    at_fault
        True if it counts as a failure of the worker that said so, or did not answer.
    retry_after
        Seconds for the client's ``Retry-After``; None: no such header.
    """

    status: int
    retry: Retry = Retry.NEVER
    at_fault: bool = False
    retry_after: int | None = None


CODES: Final[dict[str, Code]] = {
    # The client's.
    "invalid_request": Code(400),
    "unsupported": Code(400),
    "context_length_exceeded": Code(400),
    "invalid_api_key": Code(401),
    "forbidden": Code(403),
    "not_found": Code(404),
    "model_not_found": Code(404),
    "duplicate_request": Code(409),
    "registration_refused": Code(409),
    "aborted": Code(499),
    # Want of room.
    "queue_full": Code(429, retry_after=1),
    "queue_timeout": Code(503, retry_after=1),
    "no_workers": Code(503, retry_after=2),
    "scheduler_unavailable": Code(503, retry_after=2),  # Redis
    "draining": Code(503, Retry.PAIR, retry_after=2),
    "no_blocks": Code(503, Retry.DECODE, retry_after=1),  # of a decode worker
    "prefill_busy": Code(503, Retry.PAIR, retry_after=1),  # of a prefill or mixed worker
    # Faults.
    "ticket_gone": Code(502, Retry.PAIR),
    "reservation_gone": Code(502, Retry.PAIR),
    "transfer_failed": Code(502, Retry.PAIR),
    "transfer_timeout": Code(504, Retry.PAIR),
    "layout_mismatch": Code(502, Retry.PAIR, at_fault=True),
    "kv_damaged": Code(502, Retry.PAIR, at_fault=True),
    "worker_unreachable": Code(502, Retry.PAIR, at_fault=True),
    "worker_failed": Code(502, Retry.PAIR, at_fault=True),
    "worker_timeout": Code(504, Retry.PAIR, at_fault=True),
    "stream_broken": Code(502, at_fault=True),
    "request_timeout": Code(504),
    "internal_error": Code(500),
}
"""Every code that an error may have. A code is never renamed."""


class ServeError(Exception):
    """A request cannot be served.

    Parameters
    ----------
    code : str
        Of `CODES`.
    message : str
        For people: what, and which value.
    param : str, optional
        Field of the request that is wrong.

    Attributes
    ----------
    worker_id : str
        Who said so, or did not answer; empty: nobody but this process.
    """

    def __init__(self, code: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.worker_id = ""
        self.status, self.retry, self.at_fault, self.retry_after = CODES[code]

    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's shape."""
        kind = "invalid_request_error" if 400 <= self.status < 500 and self.status != 429 else "server_error"
        if self.status == 429:
            kind = "rate_limit_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @classmethod
    def of_answer(cls, status: int, body: Any) -> ServeError:
        """Read the answer of another process; whatever it is, the code is a known one."""
        error = body.get("error") if isinstance(body, dict) else None
        if isinstance(error, dict) and error.get("code") in CODES:
            param = error.get("param")
            return cls(str(error["code"]), str(error.get("message")), param=param if isinstance(param, str) else None)
        return cls("worker_failed", f"a worker answered {status} without a code")
