"""Which worker has been given which beginnings of prompts: a tree whose edges are pieces of prompts."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

__all__ = ["PIECE", "PrefixTree"]

PIECE: Final = 64
"""Bytes of a prompt to an edge: about a block of 16 tokens of text."""
_DEEPEST: Final = 4096
_MOST_WORKERS: Final = 64
"""Of a node: those that were restarted would stay in it for as long as its prompt is in use."""


class _Node:
    __slots__ = ("seen", "workers")

    def __init__(self) -> None:
        self.workers: dict[str, None] = {}
        self.seen = 0.0


class PrefixTree:
    """Remembers prompts by worker, the newest ones.

    The tree is flat: a node's name is a hash of all that leads to it. Two beginnings with one name would make a worker
    look better than it is for a prompt, and nothing worse.

    Parameters
    ----------
    most_nodes : int
    idle : float
        Seconds after which a beginning that nobody asked for is forgotten.
    clock : callable, optional
        Seconds, for tests.
    """

    def __init__(
        self, most_nodes: int = 100_000, idle: float = 300.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most = most_nodes
        self._idle = idle
        self._clock = clock
        # Oldest first; a node is never older than those below it.
        self._nodes: OrderedDict[int, _Node] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def match(self, prompt: bytes) -> dict[str, int]:
        """Return for each worker how many bytes of the prompt's beginning it has been given before."""
        self._forget()
        found: dict[str, int] = {}
        for depth, name in enumerate(_names(prompt), 1):
            node = self._nodes.get(name)
            if node is None:
                break
            for worker in node.workers:
                # All of the way: whoever is missing higher up has forgotten, or never had it.
                if found.get(worker, 0) == (depth - 1) * PIECE:
                    found[worker] = depth * PIECE
        return found

    def put(self, prompt: bytes, worker: str) -> None:
        """Remember that the worker is given the prompt."""
        now = self._clock()
        # From the end, so that the beginning becomes the newest.
        for name in reversed(_names(prompt)):
            node = self._nodes.get(name)
            if node is None:
                node = self._nodes[name] = _Node()
            else:
                self._nodes.move_to_end(name)
            node.seen = now
            node.workers.pop(worker, None)
            node.workers[worker] = None
            if len(node.workers) > _MOST_WORKERS:
                del node.workers[next(iter(node.workers))]
        self._forget()

    def _forget(self) -> None:
        oldest = self._clock() - self._idle
        while self._nodes:
            name, node = next(iter(self._nodes.items()))
            if len(self._nodes) <= self._most and node.seen >= oldest:
                break
            del self._nodes[name]


def _names(prompt: bytes) -> list[int]:
    name, names = 0, []
    for start in range(0, min(len(prompt) // PIECE, _DEEPEST) * PIECE, PIECE):
        name = hash((name, prompt[start : start + PIECE]))
        names.append(name)
    return names
