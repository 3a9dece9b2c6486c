"""Chooses tokens: a function of logits, seed and position, so that it does not matter which process asks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .protocol import Sampling

__all__ = ["choose"]

_SEED_MASK = 2**64 - 1


def choose(logits: NDArray[np.float32], sampling: Sampling, position: int) -> int:
    """Return the token at `position`.

    Parameters
    ----------
    logits : float32 array ``[vocab]``
    sampling : Sampling
    position : int
        Of the new token in its text.
    """
    if sampling.temperature <= 0 or not np.isfinite(logits).all():
        return int(np.argmax(logits))
    scores: NDArray[Any] = logits.astype(np.float64) / sampling.temperature
    weights = np.exp(scores - scores.max())
    order = np.argsort(-weights, kind="stable")
    sums = np.cumsum(weights[order])
    # The fewest tokens whose probabilities reach top_p.
    count = int(np.searchsorted(sums, sampling.top_p * sums[-1])) + 1 if sampling.top_p < 1 else sums.size
    count = min(count, sums.size)
    # A counter-based generator: seed and position are its key and counter.
    uniform = np.random.Generator(np.random.Philox(key=sampling.seed & _SEED_MASK, counter=position)).random()
    index = int(np.searchsorted(sums[:count], uniform * sums[count - 1], side="right"))
    return int(order[min(index, count - 1)])
