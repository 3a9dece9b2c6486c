"""Variables of the environment that decide how NPUs talk to each other: what they mean, and whether they fit.

HIXL and HCCL read them; here they are only looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from .rdma_choice import TIMEOUTS, recommended_timeout, retransmission_seconds

__all__ = ["Variable", "judged"]

_RETRIES: Final = "HCCL_RDMA_RETRY_CNT"
_TIMEOUT: Final = "HCCL_RDMA_TIMEOUT"
_ROCE: Final = "HCCL_INTRA_ROCE_ENABLE"
_PCIE: Final = "HCCL_INTRA_PCIE_ENABLE"
_DEFAULT_RETRIES: Final = 7
_DEFAULT_TIMEOUT: Final = 20


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable, set or not.

    Attributes
    ----------
    name : str
    value : str or None
        None: not set.
    means : str
        What it is for, and what counts where it is not set.
    verdict : str
        ``"fine"``, ``"look"`` (it works, and something else would be better) or ``"wrong"`` (it will be refused).
    judgement : str
        Why.
    """

    name: str
    value: str | None
    means: str
    verdict: str
    judgement: str


def judged(environ: Mapping[str, str], transfer: float) -> list[Variable]:
    """Judge the variables.

    Parameters
    ----------
    environ : mapping of str to str
    transfer : float
        Seconds that a transfer may take, for HCCL_RDMA_TIMEOUT.
    """
    values = {name: text.strip() for name, text in environ.items() if text.strip()}
    judges: tuple[tuple[str, str, Callable[[], tuple[str, str]]], ...] = (
        ("HCCL_RDMA_TC", "traffic class of RoCE packets, by which switches find the lossless queue; default 132",
         lambda: _number(values, "HCCL_RDMA_TC", 0, 255, 4)),
        ("HCCL_RDMA_SL", "service level of RoCE packets, as the switches have it; default 4",
         lambda: _number(values, "HCCL_RDMA_SL", 0, 7)),
        (_RETRIES, f"how often a NIC sends again what nobody acknowledged; default {_DEFAULT_RETRIES}",
         lambda: _number(values, _RETRIES, 1, 7)),
        (_TIMEOUT, f"a NIC waits 4.096 us x 2^this for an acknowledgement; default {_DEFAULT_TIMEOUT}",
         lambda: _timeout(values, transfer)),
        (_ROCE, "1: NPUs of one server talk over RoCE, not over HCCS or PCIe; default 0",
         lambda: _roce(values)),
        (_PCIE, "0: NPUs of one server do not talk over PCIe; belongs to HCCL_INTRA_ROCE_ENABLE",
         lambda: _number(values, _PCIE, 0, 1)),
    )  # fmt: skip
    return [Variable(name, values.get(name), means, *judge()) for name, means, judge in judges]


def _read(values: Mapping[str, str], name: str, low: int, high: int) -> int | None:
    """Return a number within its bounds, or None."""
    text = values.get(name, "")
    # No more digits than any bound has: int() refuses texts of thousands.
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 9 and low <= int(text) <= high else None


def _number(values: Mapping[str, str], name: str, low: int, high: int, step: int = 1) -> tuple[str, str]:
    if name not in values:
        return "fine", "not set: the default counts"
    number = _read(values, name, low, high)
    if number is None or number % step:
        steps = f" in steps of {step}" if step > 1 else ""
        return "wrong", f"it must be a whole number from {low} to {high}{steps}"
    return "fine", "within its bounds"


def _timeout(values: Mapping[str, str], transfer: float) -> tuple[str, str]:
    low, high = TIMEOUTS
    verdict, said = _number(values, _TIMEOUT, low, high)
    if verdict == "wrong":
        return verdict, said
    retries = _read(values, _RETRIES, 1, 7) or _DEFAULT_RETRIES
    best = recommended_timeout(transfer, retries)
    exact = math.ceil(math.log2(transfer * 1e6 / (retries + 1) / 4.096))
    formula = (
        f"for transfers of {transfer:g} s, ceil(log2({transfer:g} x 10^6 / ({retries} + 1) / 4.096)) = {exact}"
        f"{'' if exact == best else f', bounded to {best}'}: the NIC then gives up after "
        f"{retransmission_seconds(best, retries):.3g} s"
    )
    number = _read(values, _TIMEOUT, low, high)
    number = _DEFAULT_TIMEOUT if number is None else number
    if number == best:
        return "fine", formula
    seconds = retransmission_seconds(number, retries)
    here = f"{'the default' if _TIMEOUT not in values else 'this'} gives up after {seconds:.3g} s"
    if number < best:
        return "look", f"{here}, before such a transfer times out; {formula}"
    return "look", f"{here}, so that a NIC still tries when such a transfer has timed out; {formula}"


def _roce(values: Mapping[str, str]) -> tuple[str, str]:
    verdict, said = _number(values, _ROCE, 0, 1)
    if verdict == "wrong" or values.get(_ROCE) != "1":
        return verdict, said
    if values.get(_PCIE) != "0":
        return "look", f"set {_PCIE}=0 as well, or PCIe may still be used within a server"
    return "fine", "RoCE within a server"
