"""What says that a layer has been computed: gates, synchronizers, events and futures, device events.

All become a `LayerGate`, which the engine follows without the event loop and without the GIL: `open_source`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias

from . import _core
from .errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from ._loop import Runtime

__all__ = ["LayerGate", "LayerSignal", "LayerSource", "OpenSource", "open_source"]

LayerSignal = _core.LayerSignal

LayerSource: TypeAlias = "LayerGate"
"""What `CacheManager.transfer_cache_async` takes for `layers`."""


class LayerGate(_core.Gate):
    """Says which layers of a model have been computed: what a model records, layer-wise transfers push.

    Belongs to no event loop and no DataDist. Several transfers may wait at one gate, also such that are started after
    layers were recorded. An idle gate costs nothing. When it is dropped before all layers are recorded, and no
    `LayerSignal` of it is pending, transfers that wait for the others end with `LayerFailed`.

    Parameters
    ----------
    num_layers : int
        Layers are numbered from 0, as those of the source cache. At most a million.
    """

    def record(self, layer: SupportsIndex) -> None:
        """Say that the tensors of a layer are final.

        From any thread. The engine posts the layer of every waiting transfer in this call, without the event loop,
        which takes microseconds; the memory may be read until those transfers are done. Order is free: layers go in
        the order of their recording. Nothing happens for transfers that have ended, or were cancelled.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            `layer` is not one of the gate's.
        GateError
            It was recorded, or failed, before.
        ForkedError
            In a forked child.
        """
        super().record(layer)

    def fail(self, layer: SupportsIndex, error: BaseException | None = None) -> None:
        """Say that a layer will not come: targets whose range holds it end with `LayerFailed`, others go on.

        From any thread. `error` becomes the cause of their errors.

        Raises
        ------
        ArgumentError, ArgumentTypeError, GateError, ForkedError
            As for `record`.
        """
        super().fail(layer, error)

    def recorded(self, layer: SupportsIndex) -> bool:
        """Say whether a layer was recorded."""
        return super().recorded(layer)

    def native(self, layer: SupportsIndex) -> LayerSignal:
        """Make a C function and context that record a layer: for C, C++ and device runtimes' host callbacks.

        For instance ``cudaLaunchHostFunc(stream, signal.function, signal.context)``, behind the kernels of the layer.
        Callable once from any thread, with or without the GIL. Holds the gate until then, or until
        `LayerSignal.release`, also when the returned object is dropped.
        """
        return super().native(layer)


class OpenSource:
    """A layer source in use by one task.

    Attributes
    ----------
    gate : _core.Gate
        Which the engine follows.
    """

    def __init__(self, gate: _core.Gate) -> None:
        self.gate = gate

    def close(self) -> None:
        """Let go: the task has ended, and nobody waits for further layers."""


def open_source(layers: Any, needed: Sequence[int], num_layers: int, runtime: Runtime) -> OpenSource:
    """Turn what a caller gave for `layers` into a gate.

    Parameters
    ----------
    layers : LayerGate
    needed : sequence of int
        The layers that any target moves, ascending.
    num_layers : int
        Of the source cache.
    runtime : Runtime
        Of the DataDist.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        It is no source, or does not have a needed layer.
    """
    if isinstance(layers, _core.Gate):
        if needed and needed[-1] >= layers.num_layers:
            raise ArgumentError(
                f"layer {needed[-1]} is outside the gate's 0..{layers.num_layers - 1}",
                hint=f"make the gate for the {num_layers} layers of the cache",
            )
        return OpenSource(layers)
    raise ArgumentTypeError(f"layers must be a LayerGate, got {type(layers).__name__}")
