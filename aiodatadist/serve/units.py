"""The engines behind one worker, each with the cache that its blocks lie in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import aiodatadist as adt

from .engine import Engine, Reserved
from .errors import ServeError
from .openai import token_limit
from .protocol import Generation, Load

__all__ = ["Placed", "Unit", "Units", "answer_room"]


class Unit(NamedTuple):
    """An engine and its cache.

    Attributes
    ----------
    rank : int
        Also the model id in the key of the cache.
    engine : Engine
    cache : Cache or None
        None where nothing is transferred.
    """

    rank: int
    engine: Engine
    cache: adt.Cache | None


class Placed(NamedTuple):
    """Where a request lies."""

    unit: Unit
    reserved: Reserved

    def free(self) -> None:
        """Give it up."""
        self.unit.engine.free(self.reserved)


class Units:
    """The engines of a worker, at least one, all of one model.

    Attributes
    ----------
    prompt_tokens, cached_tokens : int
        Of all prompts that were placed: their tokens, and how many of these were in a cache already.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = list(units)
        self.prompt_tokens = 0
        self.cached_tokens = 0

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self._units)

    @property
    def first(self) -> Engine:
        """What is the same for all may be asked of this one."""
        return self._units[0].engine

    def load(self) -> Load:
        """Return the load of all."""
        loads = [unit.engine.load() for unit in self._units]
        return Load(**{name: sum(getattr(load, name) for load in loads) for name in Load.__struct_fields__})

    def place(self, positions: int, prompt: Sequence[int] = (), *, full: str) -> Placed:
        """Reserve blocks in the engine that has the least to do.

        Parameters
        ----------
        positions : int
        prompt : sequence of int, optional
            As for `Engine.reserve`.
        full : str
            The code of the error when no engine has room.

        Raises
        ------
        ServeError
            `full`, or ``context_length_exceeded``: it would not fit into an empty engine.
        """
        block_tokens = self.first.layout.block_tokens
        if positions > self.first.num_blocks * block_tokens:
            raise ServeError(
                "context_length_exceeded",
                f"{positions} tokens do not fit into the {self.first.num_blocks * block_tokens} of this worker's cache",
            )

        def busy(unit: Unit) -> tuple[int, int]:
            load = unit.engine.load()
            return load.running + load.waiting, -load.free_blocks

        for unit in sorted(self._units, key=busy):
            reserved = unit.engine.reserve(positions, prompt)
            if reserved is not None:
                self.prompt_tokens += len(prompt)
                self.cached_tokens += reserved.cached
                return Placed(unit, reserved)
        needed = -(-positions // block_tokens)
        raise ServeError(full, f"{needed} blocks are wanted, {self.load().free_blocks} are free")


def answer_room(generation: Generation, prompt_tokens: int, max_positions: int) -> int:
    """Return how many tokens the answer may have.

    Raises
    ------
    ServeError
        ``context_length_exceeded``: prompt and wanted answer are too long together.
    """
    limit, room = token_limit(generation), max_positions - prompt_tokens
    if room < 1 or (generation.max_tokens is not None and limit > room):
        raise ServeError(
            "context_length_exceeded",
            f"{prompt_tokens} tokens of prompt and {limit} of answer are more than {max_positions}",
            param="messages" if generation.chat else "prompt",
        )
    return min(limit, room)
