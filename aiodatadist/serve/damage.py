"""Damaged KV: what tells it, and, for tests of just that, what causes it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

__all__ = ["WAYS", "digests_of", "do_damage"]


def digests_of(tensors: Sequence[Any], blocks: Sequence[int]) -> list[str]:
    """Return a digest of each block in each layer: those of layer 0 in the order of `blocks`, then those of layer 1."""
    found = []
    for keys, values in zip(tensors[::2], tensors[1::2], strict=True):
        for block in blocks:
            digest = hashlib.blake2b(keys[block].tobytes(), digest_size=8)
            digest.update(values[block].tobytes())
            found.append(digest.hexdigest())
    return found


def _flip(tensors: Sequence[Any], blocks: Sequence[int]) -> None:
    # Of the highest byte of the first number: one of a lower byte may well be too small to change a token.
    keys = tensors[0]
    first = keys[blocks[0]].reshape(-1)[:1].copy()
    first.view(np.uint8)[-1] ^= 0x40
    keys[(blocks[0], *(0,) * (keys.ndim - 1))] = first[0]


def _swap(tensors: Sequence[Any], blocks: Sequence[int]) -> None:
    pair, other = [blocks[0], blocks[-1]], [blocks[-1], blocks[0]]
    for tensor in tensors:
        tensor[pair] = tensor[other]


def _forget_layer(tensors: Sequence[Any], blocks: Sequence[int]) -> None:
    for tensor in tensors[-2:]:
        tensor[list(blocks)] = 0


def _zero(tensors: Sequence[Any], blocks: Sequence[int]) -> None:
    for tensor in tensors:
        tensor[list(blocks)] = 0


WAYS: Final[dict[str, Callable[[Sequence[Any], Sequence[int]], None]]] = {
    "flip": _flip,
    "swap": _swap,
    "layer": _forget_layer,
    "zero": _zero,
}
"""Ways to damage a prompt: a byte of its first block flipped, its first and last block swapped (no damage to a prompt
of one block), its last layer not sent (zeros, as in a cache that is new), none of it sent."""


def do_damage(way: str, tensors: Sequence[Any], blocks: Sequence[int]) -> None:
    """Damage a prompt's blocks, in one of `WAYS`."""
    WAYS[way](tensors, blocks)
