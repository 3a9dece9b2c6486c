"""The seam between serving and a model: what a worker needs of an engine, and nothing else.

An engine owns a paged KV cache's bookkeeping and computes in its own time; serving decides who gets what, and moves
blocks. The memory itself is the worker's, which registers it with the library and hands it over by `Engine.bind`: so
an engine that brings its own memory (on a device, say) returns its tensors from `Engine.tensors` instead.

`numpy_engine.NumpyEngine` is the built-in one. Another one has to keep three promises:

* **A sequence's blocks are its own** from `reserve` until `free`, and come back to the pool only when no thread or
  device reads or writes them any more. `free` may be called at any time, also while the model works on the sequence.
* **Tokens depend on prompt, sampling and position alone**, not on who else is in the batch or in which process.
* **KV is final when it is told**: after `prefill` has returned, or `on_layer` was called for a layer, the blocks of the
  prompt may be read by others.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .protocol import KVLayout, Load, Sampling

__all__ = ["Decoding", "Engine", "ModelCard", "Reserved"]


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a model is.

    Attributes
    ----------
    name : str
        As clients name it.
    fingerprint : str
        Equal for models that write the same tokens.
    max_positions : int
        Most tokens of prompt and answer together.
    end_tokens : tuple of int
        Each ends an answer.
    """

    name: str
    fingerprint: str
    max_positions: int
    end_tokens: tuple[int, ...]


@dataclass(eq=False, slots=True)
class Reserved:
    """Blocks of one request.

    Attributes
    ----------
    blocks : list of int
        In the order of positions.
    cached : int
        Tokens of the prompt whose KV is there already.
    prompt : sequence of int
        Empty where the KV comes from another worker.
    handle : object
        The engine's own.
    """

    blocks: list[int]
    cached: int = 0
    prompt: Sequence[int] = ()
    handle: Any = field(default=None, repr=False)


class Decoding(Protocol):
    """New tokens of a sequence, as the model writes them.

    Each item is at least one token. The end token is not among them, unless it is ignored.

    Attributes
    ----------
    finish : str
        After the last item: ``"stop"`` (an end token) or ``"length"``.
    """

    finish: str

    def __aiter__(self) -> AsyncIterator[list[int]]:
        """Return itself."""

    async def __anext__(self) -> list[int]:
        """Wait for tokens. Raises ServeError ``internal_error`` if the model failed."""


class Engine(Protocol):
    """A model with its paged KV cache. All methods belong to the event loop in which `start` was awaited.

    Attributes
    ----------
    card : ModelCard
    layout : KVLayout
    num_blocks : int
    slots : int
        Most sequences that are decoded at once; more wait.
    """

    card: ModelCard
    layout: KVLayout
    num_blocks: int
    slots: int

    def tensor_shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of the cache's tensors: K, V of layer 0, K, V of layer 1, ..., blocks first."""

    def bind(self, tensors: Sequence[Any]) -> None:
        """Take the memory of the cache, before `start`."""

    async def start(self) -> None:
        """Begin to compute."""

    async def close(self) -> None:
        """Stop; when this ends, nobody touches the memory."""

    def load(self) -> Load:
        """Say what there is to do, and room for."""

    def reserve(self, positions: int, prompt: Sequence[int] = ()) -> Reserved | None:
        """Take blocks for so many positions, all or nothing (None).

        Parameters
        ----------
        positions : int
        prompt : sequence of int, optional
            Begin with blocks that hold the beginning of this prompt, where there are some.
        """

    async def prefill(
        self, reserved: Reserved, sampling: Sampling, on_layer: Callable[[int], None] | None = None
    ) -> int:
        """Compute the prompt, and return the first new token.

        Parameters
        ----------
        reserved : Reserved
            With its prompt.
        sampling : Sampling
        on_layer : callable, optional
            Called in the model's thread with a layer's index when all of the prompt is in the cache in that layer.

        Raises
        ------
        ServeError
            ``internal_error``: the model failed.
        """

    def decode(self, reserved: Reserved, token: int, position: int, sampling: Sampling, limit: int) -> Decoding:
        """Go on from a filled cache.

        Parameters
        ----------
        reserved : Reserved
            Must cover `position + limit` positions.
        token, position : int
            The newest token, whose KV is not in the cache yet, and its position.
        sampling : Sampling
        limit : int
            Most tokens to write, at least 1.
        """

    def free(self, reserved: Reserved) -> None:
        """End what the model does with these blocks, and give them back when it has. Again is no error."""
