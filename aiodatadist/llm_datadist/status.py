"""Status codes and `LLMException`, and what an error of aiodatadist becomes here."""

from __future__ import annotations

from enum import IntEnum

from ..errors import ArgumentTypeError, DataDistError
from .utils import log

__all__ = [
    "LLMException",
    "LLMStatusCode",
    "Status",
    "code_2_status",
    "handle_llm_status",
    "llm_error",
    "raise_if_false",
    "raise_if_true",
]


class LLMStatusCode(IntEnum):
    """The outcome of a call, with the numbers of the original."""

    LLM_SUCCESS = 0x0
    LLM_FAILED = 0xFFFFFFFF
    LLM_WAIT_PROCESS_TIMEOUT = 0x5010B001
    LLM_KV_CACHE_NOT_EXIST = 0x5010B002
    LLM_REPEAT_REQUEST = 0x5010B003
    LLM_REQUEST_ALREADY_COMPLETED = 0x5010B004
    LLM_PARAM_INVALID = 0x5010B005
    LLM_ENGINE_FINALIZED = 0x5010B006
    LLM_NOT_YET_LINK = 0x5010B007
    LLM_ALREADY_LINK = 0x5010B008
    LLM_LINK_FAILED = 0x5010B009
    LLM_UNLINK_FAILED = 0x5010B00A
    LLM_NOTIFY_PROMPT_UNLINK_FAILED = 0x5010B00B
    LLM_CLUSTER_NUM_EXCEED_LIMIT = 0x5010B00C
    LLM_PROCESSING_LINK = 0x5010B00D
    LLM_DEVICE_OUT_OF_MEMORY = 0x5010B00E
    LLM_PREFIX_ALREADY_EXIST = 0x5010B00F
    LLM_PREFIX_NOT_EXIST = 0x5010B010
    LLM_SEQ_LENOVERLIMIT = 0x5010B011
    LLM_NO_FREE_BLOCK = 0x5010B012
    LLM_BLOCKS_OUT_OF_MEMORY = 0x5010B013
    LLM_EXIST_LINK = 0x5010B018
    LLM_FEATURE_NOT_ENABLED = 0x5010B019
    LLM_TIMEOUT = 0x5010B01A
    LLM_LINK_BUSY = 0x5010B01B
    LLM_OUT_OF_MEMORY = 0x5010B01C
    LLM_DEVICE_MEM_ERROR = 507053
    LLM_SUSPECT_REMOTE_ERROR = 507057
    LLM_UNKNOWN_ERROR = -1

    def __str__(self) -> str:
        return f"LLMStatusCode.{self.name}"


class LLMException(RuntimeError):
    """What most calls raise when they fail.

    Parameters
    ----------
    *args : object
        As of any exception.
    status_code : LLMStatusCode
        Why. Where it is omitted it is ``LLM_SUCCESS``, as in the original.
    """

    def __init__(self, *args: object, status_code: LLMStatusCode = LLMStatusCode.LLM_SUCCESS) -> None:
        super().__init__(*args)
        self._status_code = status_code

    @property
    def status_code(self) -> LLMStatusCode:
        """Why the call failed."""
        return self._status_code


class Status:
    """A status code that can be asked whether it is good.

    Parameters
    ----------
    status : LLMStatusCode
    """

    def __init__(self, status: LLMStatusCode) -> None:
        self._status = status

    def is_ok(self) -> bool:
        """Return whether it is ``LLM_SUCCESS``."""
        return self._status == LLMStatusCode.LLM_SUCCESS

    @property
    def status_code(self) -> LLMStatusCode:
        """The code."""
        return self._status


def code_2_status(code: int) -> LLMStatusCode:
    """Return the status of a number; one without a name is ``LLM_FAILED``."""
    try:
        status = LLMStatusCode(code)
    except ValueError:
        return LLMStatusCode.LLM_FAILED
    return LLMStatusCode.LLM_FAILED if status is LLMStatusCode.LLM_UNKNOWN_ERROR else status


def handle_llm_status(status: int, call: str, context: object = "") -> None:
    """Raise the exception for the number that a call of the wrapper returned, unless it is success.

    Raises
    ------
    LLMException
        With the status of that number, the name of the call and `context` in its message.
    """
    code = code_2_status(status)
    if code is not LLMStatusCode.LLM_SUCCESS:
        raise LLMException(f"[{call}] failed, error code is {code}, {context}", status_code=code)


def llm_error(call: str, error: DataDistError) -> Exception:
    """Return what an error of aiodatadist is here; raise it ``from`` the error.

    Parameters
    ----------
    call : str
        Name of the call that failed.
    error : DataDistError

    Returns
    -------
    LLMException or TypeError
        With the status of the error, and its reason and remedy in the message. A TypeError where the type of an
        argument is wrong.
    """
    if isinstance(error, ArgumentTypeError):
        return TypeError(f"[{call}] failed: {error}")
    code = code_2_status(error.status)
    return LLMException(f"[{call}] failed, error code is {code}: {error}", status_code=code)


def raise_if_false(
    condition: object,
    message: str,
    *args: object,
    status_code: LLMStatusCode = LLMStatusCode.LLM_PARAM_INVALID,
    **kwargs: object,
) -> None:
    """Raise unless a condition holds, and log it as an error.

    Parameters
    ----------
    condition : object
    message : str
        With arguments it is the template of ``str.format``; alone it is taken as it is, braces included.
    status_code : LLMStatusCode

    Raises
    ------
    LLMException
        `condition` is false.
    """
    if not condition:
        text = message.format(*args, **kwargs) if args or kwargs else message
        log.error("%s", text)
        raise LLMException(text, status_code=status_code)


def raise_if_true(
    condition: object,
    message: str,
    *args: object,
    status_code: LLMStatusCode = LLMStatusCode.LLM_PARAM_INVALID,
    **kwargs: object,
) -> None:
    """Raise if a condition holds; see `raise_if_false`."""
    raise_if_false(not condition, message, *args, status_code=status_code, **kwargs)
