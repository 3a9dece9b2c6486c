"""Helpers of transfers: layer ranges, and the thread that a layer-wise transfer has for its synchronizer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ... import Cache, CacheManager, DataDistError, LayerFailed, LayerGate, TransferTask
from ..status import LLMStatusCode, code_2_status, raise_if_false
from ..utils import log
from ..utils.utils import check_isinstance, check_uint32

if TYPE_CHECKING:
    from .._engine import Engine
    from .llm_types import LayerSynchronizer

__all__ = ["CacheTask", "check_layer_range", "layer_range_to_tensor_indices"]

Begin = Callable[[CacheManager, Cache, LayerGate], TransferTask]


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


def _begin(gate: LayerGate, begin: Begin, caches: CacheManager, cache: Cache) -> TransferTask:
    return begin(caches, cache, gate)


class CacheTask:
    """A layer-wise transfer that runs: made by `CacheManager.transfer_cache_async`.

    Its synchronizer is asked in a thread of its own, layer by layer in rising order, and only for layers that a config
    still needs. Layers are sent while later ones are waited for. A config that fails does not stop the others.
    """

    def __init__(
        self, engine: Engine, cache_id: int, num_layers: int, ranges: Sequence[range], begins: Sequence[Begin]
    ) -> None:
        self._engine = engine
        self._ranges = ranges
        self._gate = gate = LayerGate(num_layers)
        self._results: list[LLMStatusCode | None] = [None] * len(ranges)
        self._running = len(ranges)  # changed by the loop's thread only
        self._late = False
        self._over = threading.Event()
        if not ranges:
            self._over.set()
        self._tasks = engine.start_layerwise(cache_id, [partial(_begin, gate, begin) for begin in begins], self._ended)

    def _start(self, synchronizer: LayerSynchronizer) -> None:
        threading.Thread(target=self._work, args=(synchronizer,), name="llm-datadist-layers", daemon=True).start()

    def _ended(self, index: int, error: BaseException | None) -> None:
        """Take the outcome of a config; called in the loop's thread."""
        self._results[index] = self._status(error)
        if error is not None:
            log.error("config %d of a layer-wise transfer failed: %s", index, error if str(error) else repr(error))
        self._running -= 1
        if self._running == 0:
            self._over.set()

    def _status(self, error: BaseException | None) -> LLMStatusCode:
        if error is None:
            return LLMStatusCode.LLM_SUCCESS
        if isinstance(error, LayerFailed) and error.__cause__ is not None:
            return LLMStatusCode.LLM_FAILED  # the synchronizer raised
        if isinstance(error, DataDistError):
            return code_2_status(error.status)
        return LLMStatusCode.LLM_TIMEOUT if self._late else LLMStatusCode.LLM_FAILED

    def _work(self, synchronizer: LayerSynchronizer) -> None:
        """Ask the synchronizer for each layer, and wait for the end."""
        ranges = list(self._ranges)
        layers = sorted({layer for one in ranges for layer in one})
        for layer in layers:
            if self._over.is_set():
                return
            if not any(layer in one for one in ranges):
                continue  # those that need it have lost an earlier one
            why: BaseException | None = None
            try:
                if synchronizer.synchronize_layer(layer, None):
                    self._gate.record(layer)
                    continue
            except BaseException as raised:
                why = raised
                log.get_logger().error("synchronize_layer(%d) raised", layer, exc_info=why)
            self._gate.fail(layer, why)
            ranges = [one for one in ranges if layer not in one]
        # So long as a transfer of each layer may take.
        if not self._over.wait(self._engine.config.transfer_seconds * max(len(layers), 1)):
            self._late = True
            self._engine.cancel(self._tasks)
            self._over.wait()

    def synchronize(self, timeout_in_millis: int | None = None) -> LLMStatusCode:
        """Wait for the end.

        Parameters
        ----------
        timeout_in_millis : int, optional
            0 to 2**32 - 1; None: as long as it takes.

        Returns
        -------
        LLMStatusCode
            The status of the first config that has failed, or ``LLM_SUCCESS``. ``LLM_TIMEOUT`` when the time has
            passed: the transfer goes on.

        Raises
        ------
        TypeError, ValueError
            The timeout is no such number.
        """
        if not self._wait(timeout_in_millis):
            return LLMStatusCode.LLM_TIMEOUT
        failed = (one for one in self._results if one not in (None, LLMStatusCode.LLM_SUCCESS))
        return next(failed, LLMStatusCode.LLM_SUCCESS) or LLMStatusCode.LLM_SUCCESS

    def get_results(self, timeout_in_millis: int | None = None) -> list[LLMStatusCode | None]:
        """Wait for the end.

        Parameters
        ----------
        timeout_in_millis : int, optional
            As for `synchronize`.

        Returns
        -------
        list of LLMStatusCode
            One for each config, in their order; ``LLM_TIMEOUT`` for all when the time has passed. An exception of the
            synchronizer is ``LLM_FAILED``, and its False ``LLM_PARAM_INVALID``, where the layer was needed.

        Raises
        ------
        TypeError, ValueError
            The timeout is no such number.
        """
        if not self._wait(timeout_in_millis):
            return [LLMStatusCode.LLM_TIMEOUT] * len(self._results)
        return list(self._results)

    def _wait(self, timeout_in_millis: int | None) -> bool:
        if timeout_in_millis is None:
            return self._over.wait()
        check_uint32("timeout_in_millis", timeout_in_millis)
        return self._over.wait(timeout_in_millis / 1000)
