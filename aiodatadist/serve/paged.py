"""Who has which block of a paged KV cache, and which prefixes of prompts lie in them."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["BlockPool", "Found"]


class Found(NamedTuple):
    """Blocks that hold the beginning of a prompt, taken for the caller."""

    blocks: list[int]
    tokens: int


class BlockPool:
    """Counts references to blocks, and keeps those of finished prompts for others that begin the same.

    A block that nobody refers to and that holds a prefix is free, too: it is given away when no empty one is left,
    the longest unused first. Not thread-safe.

    Parameters
    ----------
    num_blocks : int
    block_tokens : int
        Tokens of a block. Only full blocks are shared.
    """

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.hits = 0
        self._references = [0] * num_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()  # without references, oldest first
        self._by_prefix: dict[bytes, int] = {}
        self._prefix_of: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        """Blocks that `take` may give."""
        return len(self._empty) + len(self._kept)

    def take(self, count: int) -> list[int] | None:
        """Take blocks, all or none (None)."""
        if count > self.free:
            return None
        return [self._take_one() for _ in range(count)]

    def _take_one(self) -> int:
        if self._empty:
            block = self._empty.pop()
        else:
            block, _ = self._kept.popitem(last=False)
            del self._by_prefix[self._prefix_of.pop(block)]
        self._references[block] = 1
        return block

    def give(self, blocks: Sequence[int]) -> None:
        """Give references back, one for each block."""
        # The end of a prompt goes before its beginning, which more prompts share.
        for block in reversed(blocks):
            if self._references[block] <= 0:
                raise AssertionError(f"block {block} was given back more often than taken")
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._prefix_of:
                    self._kept[block] = None
                else:
                    self._empty.append(block)

    def find(self, prompt: Sequence[int]) -> Found:
        """Take the blocks that hold the longest known beginning of a prompt, without its last token.

        The last token is left out because somebody has to compute its logits.
        """
        blocks: list[int] = []
        for prefix in self._prefixes(prompt, (len(prompt) - 1) // self.block_tokens):
            block = self._by_prefix.get(prefix)
            if block is None:
                break
            if self._references[block] == 0:
                del self._kept[block]
            self._references[block] += 1
            blocks.append(block)
        self.hits += len(blocks)
        return Found(blocks, len(blocks) * self.block_tokens)

    def keep(self, prompt: Sequence[int], blocks: Sequence[int]) -> None:
        """Remember that these blocks, which the caller has taken, hold the full blocks of a prompt."""
        for prefix, block in zip(self._prefixes(prompt, len(prompt) // self.block_tokens), blocks, strict=False):
            if prefix not in self._by_prefix and block not in self._prefix_of:
                self._by_prefix[prefix] = block
                self._prefix_of[block] = prefix

    def _prefixes(self, prompt: Sequence[int], count: int) -> list[bytes]:
        tokens = np.asarray(prompt[: count * self.block_tokens], dtype=np.int64)
        found, last = [], b""
        for index in range(count):
            part = tokens[index * self.block_tokens : (index + 1) * self.block_tokens]
            last = hashlib.blake2b(last + part.tobytes(), digest_size=16).digest()
            found.append(last)
        return found
