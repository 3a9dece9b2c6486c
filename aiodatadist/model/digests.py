"""Digests of a paged KV cache, one for each layer and block, to prove that a transfer moved every byte."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

from .transformer import TENSORS_PER_LAYER, BlockTable, KVCache

if TYPE_CHECKING:
    from collections.abc import Iterable


class BlockDigest(NamedTuple):
    """The digest of one block of one layer.

    Attributes
    ----------
    layer
        Index of the layer.
    logical_block
        Index in the block table, not in the cache: the same text has the same digests wherever its blocks
        lie.
    hexdigest
        BLAKE2b-128 of the block's filled rows, those of K and then those of V, in hexadecimal.
    """

    layer: int
    logical_block: int
    hexdigest: str


def block_digests(kv: KVCache, block_table: BlockTable, length: int) -> list[BlockDigest]:
    """Digest the rows of positions `0 .. length - 1`.

    Parameters
    ----------
    kv
        K and V of each layer, `[num_blocks, block_size, kv_heads, head_dim]`.
    block_table
        Physical block of each logical block; must cover `length` positions.
    length
        Positions in tokens. Rows of the last block beyond it are left out: they hold whatever the block held
        before.

    Returns
    -------
    digests
        By layer, then by logical block.
    """
    block_size = kv[0].shape[1]
    count = -(-length // block_size)
    table = [int(block) for block in block_table[:count]]
    if len(table) < count:
        raise ValueError(f"{length} positions need {count} blocks, the block table has {len(table)}")
    digests = []
    for layer in range(len(kv) // TENSORS_PER_LAYER):
        tensors = kv[TENSORS_PER_LAYER * layer : TENSORS_PER_LAYER * (layer + 1)]
        for logical, physical in enumerate(table):
            filled = min(block_size, length - logical * block_size)
            digest = hashlib.blake2b(digest_size=16)
            for tensor in tensors:
                digest.update(tensor[physical, :filled].tobytes())
            digests.append(BlockDigest(layer, logical, digest.hexdigest()))
    return digests


def differing_blocks(expected: Iterable[BlockDigest], actual: Iterable[BlockDigest]) -> list[tuple[int, int]]:
    """Return every (layer, logical block) whose digest differs or that only one side has, sorted."""
    pairs = set(expected) ^ set(actual)
    return sorted({(digest.layer, digest.logical_block) for digest in pairs})
