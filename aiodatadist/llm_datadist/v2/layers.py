"""Which layers a pull, a push or a layer-wise transfer moves: checks of ranges and configs."""

from __future__ import annotations

import warnings
from typing import Any

from ... import ArgumentError, Link
from ... import TransferConfig as NativeTransferConfig
from ... import TransferWithCacheKeyConfig as NativeTransferWithCacheKeyConfig
from ..status import raise_if_false, raise_if_true
from ..utils.utils import check_isinstance, check_uint32
from .llm_types import Cache, TransferConfig, TransferWithCacheKeyConfig
from .llm_utils import check_layer_range

__all__ = ["check_block_bytes", "layers_of", "pulled_layers", "pushed_layers"]


def layers_of(config: TransferConfig | TransferWithCacheKeyConfig, num_layers: int, by_blocks: bool) -> range:
    """Check a config against the source, and return the layers of that which it wants."""
    layers = range(num_layers) if config.src_layer_range is None else config.src_layer_range
    raise_if_true(by_blocks and config.src_batch_index != 0, "src_batch_index must be 0 with src_block_indices")
    raise_if_false(layers.stop <= num_layers, "src_layer_range={} exceeds {} layers", layers, num_layers)
    if isinstance(config, TransferConfig):
        raise_if_false(
            len(config.dst_addrs) == 2 * len(layers), "{} dst_addrs for {} layers", len(config.dst_addrs), len(layers)
        )
    else:
        there = config.dst_layer_range
        raise_if_false(
            there is None or len(there) == len(layers),
            "src_layer_range={} and dst_layer_range={} differ in length", layers, there,
        )  # fmt: skip
    return layers


def check_block_bytes(
    given: int,
    here: int | None,
    link: Link | None,
    target: NativeTransferConfig | NativeTransferWithCacheKeyConfig,
) -> None:
    """Refuse a size of the peer's blocks that is not theirs: the bytes would go elsewhere than was meant."""
    there = here
    for entry in link.table.values() if link is not None else ():
        geometry = entry.geometry
        if isinstance(target, NativeTransferConfig):
            extent = geometry.stride * geometry.num_blocks
            found = any(0 <= target.dst_addrs[0] - int(start) < extent for start in entry.addresses)
        else:
            key = target.cache_key
            found = key in (entry.key, (key.cluster_id, entry.cache_id, 0))
        if found:
            there = geometry.block_bytes
            break
    if there not in (None, given) or here not in (None, given):
        raise ArgumentError(f"dst_block_memory_size={given}, and blocks have {there} bytes there and {here} here")


def pulled_layers(call: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Check what a pull may be given by keyword, and return what aiodatadist takes."""
    if not kwargs:
        return {}
    source, destination = kwargs.pop("src_layer_range", None), kwargs.pop("dst_layer_range", None)
    per_layer = kwargs.pop("tensor_num_per_layer", 2)
    if kwargs:
        warnings.warn(f"{call} has no parameters {', '.join(kwargs)}; they are ignored", UserWarning, stacklevel=3)
    check_uint32("tensor_num_per_layer", per_layer)
    raise_if_false(per_layer > 0, "tensor_num_per_layer must be above 0")
    return {
        "src_layer_range": _pulled_range("src_layer_range", source),
        "dst_layer_range": _pulled_range("dst_layer_range", destination),
        "tensor_num_per_layer": per_layer,
    }


def _pulled_range(name: str, layers: range | None) -> range | None:
    check_isinstance(name, layers, range)
    if layers is None:
        return None
    raise_if_false(layers.step == 1, "{}={} must have step 1", name, layers)
    raise_if_false(layers.start >= 0, "{}={} must not be negative", name, layers)
    if not layers:
        return None
    check_uint32(f"{name}.start", layers.start)
    check_uint32(f"{name}.stop", layers.stop)
    return layers


def pushed_layers(
    cache: Cache, source: range | None, destination: range | None, per_layer: int
) -> dict[str, Any] | None:
    """Check the layers of a push, and return what aiodatadist takes; None where there are none."""
    check_uint32("tensor_num_per_layer", per_layer)
    raise_if_false(per_layer > 0, "tensor_num_per_layer must be above 0")
    check_layer_range("src_layer_range", source)
    check_layer_range("dst_layer_range", destination)
    every = range(cache.cache_desc.num_tensors // per_layer)
    source, destination = every if source is None else source, every if destination is None else destination
    raise_if_false(
        len(source) == len(destination),
        "src_layer_range has {} layers and dst_layer_range {}", len(source), len(destination),
    )  # fmt: skip
    if not source:
        return None
    return {"src_layer_range": source, "dst_layer_range": destination, "tensor_num_per_layer": per_layer}
