"""Helpers of transfers: layer ranges, and `CacheTask`."""

from __future__ import annotations

from ..status import raise_if_false
from ..utils.utils import check_isinstance

__all__ = ["CacheTask", "check_layer_range", "layer_range_to_tensor_indices"]


def check_layer_range(name: str, layers: range | None, allow_none: bool = True) -> None:
    """Check a range of layers: step 1, not empty, not negative.

    Raises
    ------
    TypeError
        It is no range.
    LLMException
        It is empty, negative, or has another step.
    """
    check_isinstance(name, layers, range, allow_none=allow_none)
    if layers is not None:
        raise_if_false(layers.step == 1, "{}={} must have step 1", name, layers)
        raise_if_false(0 <= layers.start < layers.stop, "{}={} must not be empty or negative", name, layers)


def layer_range_to_tensor_indices(layers: range | None, tensor_num_per_layer: int = 2) -> list[int]:
    """Return the tensors of a range of layers; an empty list for None."""
    if layers is None:
        return []
    return list(range(layers.start * tensor_num_per_layer, layers.stop * tensor_num_per_layer))


class CacheTask:
    """A layer-wise transfer that runs."""
