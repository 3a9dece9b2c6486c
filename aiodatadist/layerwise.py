"""Layer-wise transfers: pushing each layer as soon as it is computed, while the next ones are.

A `TransferTask` has a target for each config. A target is a transfer of its own: it fails, misses its deadline or ends
well without the others. In the engine it is one operation at a gate, or several where raw addresses lie in several
caches of the peer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from . import _core
from ._sides import Blocks, Named, check_access, check_reachable, layer_range, resolve
from ._starting import end_of_link, find, index_key, not_found, notifier
from .errors import (
    ArgumentError,
    ArgumentTypeError,
    BlockIndexError,
    CacheNotFound,
    ClosedError,
    DataDistError,
    LayerFailed,
    NativeStatus,
    NotLinkedError,
    TransferTimeout,
)
from .keys import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, Key
from .layers import OpenSource, open_source
from .transfer import Progress, Transfer, measured_time
from .types import U32_MAX, as_integer, shown

if TYPE_CHECKING:
    from ._loop import Timer
    from .cache import CacheManager
    from .control.events import Readers
    from .control.links import Link
    from .control.table import RemoteEntry
    from .registry import Cache

__all__ = ["LayerTransferResult", "TransferConfig", "TransferTask", "TransferWithCacheKeyConfig", "start"]


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """A target of a layer-wise transfer that is named by addresses in the peer's process.

    Parameters
    ----------
    dst_cluster_id : int
    dst_addrs : sequence of int
        One for each tensor of the layers, in their order; each lies in a cache that the peer has registered with
        ``remote="rw"``, where `Cache.addresses` says the tensors' beginnings. Where a batch slot is moved, each is the
        address of the peer's slot; where blocks are, that of its block 0, and blocks lie as far apart as here.
    src_layer_range : range, optional
        Layers of the source cache; all if omitted.
    src_batch_index : int
        Batch slot of the source cache, where blocks are not named.
    """

    dst_cluster_id: int
    dst_addrs: Sequence[int]
    src_layer_range: range | None = None
    src_batch_index: int = 0


@dataclass(frozen=True, slots=True)
class TransferWithCacheKeyConfig:
    """A target of a layer-wise transfer that is named by a cache key.

    Parameters
    ----------
    cache_key : BlocksCacheKey, CacheKeyByIdAndIndex or CacheKey
        Names the peer, its cache, and its batch slot where none of the peer's blocks are named.
    src_layer_range, dst_layer_range : range, optional
        Layers of both caches, as many; all if omitted. Pairs are relative to the starts of the ranges.
    src_batch_index : int
        As for `TransferConfig`.
    """

    cache_key: BlocksCacheKey | CacheKeyByIdAndIndex | CacheKey
    src_layer_range: range | None = None
    dst_layer_range: range | None = None
    src_batch_index: int = 0


Config = TransferConfig | TransferWithCacheKeyConfig
E = TypeVar("E", bound=Exception)


@dataclass(frozen=True, slots=True)
class LayerTransferResult:
    """What became of one target.

    Attributes
    ----------
    config : TransferConfig or TransferWithCacheKeyConfig
        The object that was given.
    error : BaseException or None
        None: all layers are in the peer's memory, and the notification was handed over.
    layers_done : int
        Layers all of whose bytes are visible at the peer. After an error their content counts, that of other layers
        is undefined.
    bytes_done : int
    """

    config: Config
    error: BaseException | None
    layers_done: int
    bytes_done: int


class _Work(NamedTuple):
    """One native operation of a target."""

    pair: _core.Pair
    local: Any
    remote: Any
    first_layer: int
    per_layer: int
    tensors: list[tuple[int, int, int]]
    starts: list[int]
    view: tuple[int, int, int, int]


class _Part:
    """A running native operation, which drives its target."""

    __slots__ = ("_target", "bytes_done", "native", "op")

    def __init__(self, target: _Target) -> None:
        self._target = target
        self.native: _core.Pair | None = None
        self.op = 0
        self.bytes_done = 0

    def _native_started(self, native: _core.Pair, op: int, nbytes: int) -> None:
        self.native = native
        self.op = op
        self._target._bytes_total += nbytes

    def _native_layer(self, layer: int, elapsed_ns: int) -> None:
        self._target._layer_landed(layer, elapsed_ns)

    def _native_done(self, status: int, nbytes: int) -> None:
        self.bytes_done = nbytes
        native, self.native = self.native, None  # lets go of the caches
        self._target._part_done(status, native)

    def cancel(self) -> None:
        if self.native is not None:
            self.native.cancel(self.op)

    def progress(self) -> int:
        if self.native is not None and (running := self.native.progress(self.op)) is not None:
            self.bytes_done = running
        return self.bytes_done


class _Target(Transfer[None]):
    """The transfer to one target. Ends when all its parts are quiet."""

    __slots__ = (
        "_addresses",
        "_at_end",
        "_failures",
        "_landed",
        "_layers",
        "_link",
        "_parts",
        "_parts_left",
        "_status",
        "_task",
        "_works",
        "config",
        "index",
        "layers_done",
    )

    def __init__(self, task: TransferTask, index: int, config: Config, layers: range, addresses: list[int]) -> None:
        super().__init__(loop=task.get_loop())
        self._task = task
        self.index = index
        self.config = config
        self.layers_done = 0
        self._layers = layers
        self._addresses = addresses
        self._works = 0
        self._link: Link | None = None
        self._landed: dict[int, int] = {}
        self._parts: list[_Part] = []
        self._parts_left = 0
        self._status = 0
        self._op = 0
        self._failures: Mapping[int, BaseException | None] = {}
        self._bytes_total = self._bytes_done = 0
        self._pull = False
        self._on_cancel = self._stop

    @property
    def progress(self) -> Progress:
        """Bytes that have landed and bytes in all."""
        return Progress(sum(part.progress() for part in self._parts), self._bytes_total)

    def take(self, link: Link) -> None:
        """Keep the link of the call, whose closing waits for all that are counted as started."""
        self._link = link
        self._peer = link.cluster_id
        self._counters = counters = link._counters
        counters.started += 1

    def begin(self, works: list[_Work], source: OpenSource, seconds: float) -> None:
        """Give the work to the engine."""
        self._failures = source.gate.failures
        self._started = measured_time(self.get_loop())
        self._parts_left = self._works = len(works)
        failure: Exception | None = None
        for work in works:
            part = _Part(self)
            if failure is None:
                try:
                    work.pair.submit_layers(
                        part, work.local, work.remote, source.gate, work.first_layer, work.per_layer, work.tensors,
                        work.starts, work.view, seconds,
                    )  # fmt: skip
                    self._parts.append(part)
                    continue
                except Exception as why:  # whatever it is, the parts that run must end before this target does
                    failure = _bare(why)
            self._parts_left -= 1
        if failure is not None:
            self._at_end = failure
            self._stop()
        if not self._parts_left:
            self._end()

    def _stop(self) -> None:
        for part in self._parts:
            part.cancel()

    def _layer_landed(self, layer: int, elapsed_ns: int) -> None:
        left = self._landed.get(layer, self._works) - 1
        self._landed[layer] = left
        if left == 0:
            self.layers_done += 1
            self._task._landed(self.index, self._layers[layer], elapsed_ns)

    def _part_done(self, status: int, native: _core.Pair | None) -> None:
        self._parts_left -= 1
        if status != NativeStatus.OK and self._status == NativeStatus.OK:
            self._status = status
            self._native = native  # whose transport the error names
            self._stop()  # what is left of this target is of no use
        if self._parts_left == 0:
            self._end()

    def _end(self) -> None:
        nbytes = sum(part.bytes_done for part in self._parts)
        self._bytes_done = nbytes
        error = getattr(self, "_at_end", None)
        if error is None and self._status == NativeStatus.LAYER:
            error = self._layer_error(nbytes)
        if error is None or self.done():
            self._native_done(self._status, nbytes)
            return
        self._native = None  # lets go of the caches
        self._count(asyncio.CancelledError() if self.cancelling() else error, nbytes)
        self._fail(error)

    def _layer_error(self, nbytes: int) -> LayerFailed:
        for layer in self._layers:
            if layer in self._failures:
                cause = self._failures[layer]
                error = LayerFailed(
                    f"layer {layer} failed" + (f": {cause!r}" if cause is not None else ""),
                    layer=layer, peer=self._peer, bytes_done=nbytes, bytes_total=self._bytes_total,
                    hint="look at what was recorded as its failure",
                )  # fmt: skip
                error.__cause__ = cause
                return error
        return LayerFailed(
            "the gate was dropped before all layers were recorded",
            peer=self._peer, bytes_done=nbytes, bytes_total=self._bytes_total,
            hint="keep the gate until the last layer is recorded",
        )  # fmt: skip


class TransferTask(Transfer[list[LayerTransferResult]]):
    """A running layer-wise transfer to any number of targets.

    Awaiting it gives a `LayerTransferResult` for each config, in their order. The failure, the deadline or the loss of
    a target is in its result and does not raise; only a cancel does. Cancelling drains all targets.
    """

    __slots__ = ("_log", "_loop_readers", "_readers", "_source", "_targets", "_times", "_unfinished")

    def __init__(self, loop: asyncio.AbstractEventLoop, readers: Readers) -> None:
        super().__init__(loop=loop)
        self._loop_readers = readers
        self._targets: list[_Target] = []
        self._log: list[tuple[int, int]] = []
        self._times: list[int] = []
        self._readers: list[asyncio.Future[None]] = []
        self._source: OpenSource | None = None
        self._unfinished = 0  # targets
        self._peer = None
        self._pull = False
        self._on_cancel = self._cancel_targets

    @property
    def progress(self) -> Progress:
        """Bytes that have landed and bytes in all, of all targets. Exact once the task is done."""
        each = [target.progress for target in self._targets]
        return Progress(sum(one.bytes_done for one in each), sum(one.bytes_total for one in each))

    def raise_for_errors(self) -> None:
        """Raise an ExceptionGroup of the errors of all targets that failed; nothing if none did.

        Raises
        ------
        ExceptionGroup
        asyncio.InvalidStateError
            The task is not done.
        asyncio.CancelledError
            It was cancelled.
        """
        results = self.result()
        errors = [result.error for result in results if isinstance(result.error, Exception)]
        if errors:
            raise ExceptionGroup(f"{len(errors)} of {len(results)} targets of a layer-wise transfer failed", errors)

    async def layers(self) -> AsyncIterator[tuple[int, int]]:
        """Yield ``(config_index, layer)`` as layers land: all their bytes are visible at that config's peer.

        `layer` is the source cache's number. Begins with the first that has landed, whenever it is called, and ends
        with the task, also with a cancelled one; look at the results then. Leaving it early changes nothing else.
        """
        at = 0
        while True:
            while at < len(self._log):
                yield self._log[at]
                at += 1
            if self.done():
                return
            reader = self.get_loop().create_future()
            self._readers.append(reader)
            try:
                with self._loop_readers.of_layers():
                    await reader
            finally:
                if reader in self._readers:
                    self._readers.remove(reader)

    # Driven by the targets. ----------------------------------------------------------------------------------

    def _landed(self, index: int, layer: int, elapsed_ns: int) -> None:
        self._log.append((index, layer))
        self._times.append(elapsed_ns)
        self._wake()

    def _wants(self, layer: int, failed: Sequence[int]) -> bool:
        """Say whether any target still waits for a layer, given those that failed. From any thread."""
        return not self.cancelling() and any(
            layer in target._layers and not target.done() and not any(other in target._layers for other in failed)
            for target in self._targets
        )

    def _wake(self) -> None:
        readers, self._readers = self._readers, []
        for reader in readers:
            if not reader.done():
                reader.set_result(None)

    def _cancel_targets(self) -> None:
        for target in self._targets:
            target.cancel(getattr(self, "_cancel_message", None))

    def _target_done(self, target: asyncio.Future[None]) -> None:
        if not target.cancelled():
            target.exception()  # is in the results
        self._unfinished -= 1
        if self._unfinished:
            return
        if self._source is not None:
            self._source.close()
            self._source = None
        if self.cancelling():
            self._finish_cancelled()
        else:
            self._finish([self._result(one) for one in self._targets])
        self._wake()

    def _result(self, target: _Target) -> LayerTransferResult:
        error: BaseException | None
        if target.cancelled():
            error = ClosedError("the DataDist was closed before the notification was handed over")
        else:
            error = target.exception()
        return LayerTransferResult(target.config, error, target.layers_done, target.progress.bytes_done)


# Starting. --------------------------------------------------------------------------------------------------


def start(
    manager: CacheManager,
    cache: Cache,
    layers: Any,
    targets: Sequence[Config],
    src_blocks: Blocks | None,
    dst_blocks: Blocks | None,
    per_layer: int,
    seconds: float,
    notify: bytes | None,
) -> TransferTask:
    """Start `CacheManager.transfer_cache_async`, whose checks of the caches' state are done."""
    count = as_integer(per_layer, "tensor_num_per_layer", low=1, high=U32_MAX)
    if cache.geometry.num_tensors % count:
        raise ArgumentError(
            f"the cache has {cache.geometry.num_tensors} tensors, not a multiple of tensor_num_per_layer={count}",
            hint="give the number of tensors that make a layer",
        )
    num_layers = cache.geometry.num_tensors // count
    source_list, destination_list = _lists(cache, src_blocks, dst_blocks)
    if isinstance(targets, (str, bytes, Mapping)) or not isinstance(targets, Sequence):
        raise ArgumentTypeError(f"targets must be a sequence of configs, got {type(targets).__name__}")
    configs = list(targets)
    checked = [
        _check_config(config, i, cache, num_layers, count, source_list, destination_list)
        for i, config in enumerate(configs)
    ]
    if notify is not None and not isinstance(notify, (bytes, bytearray, memoryview)):
        raise ArgumentTypeError(f"notify must be bytes, got {type(notify).__name__}")
    payload = None if notify is None else bytes(notify)
    most = manager._dd._config.notify_max_bytes
    if payload is not None and len(payload) > most:
        raise ArgumentError(
            f"notify has {len(payload)} bytes, more than {most}", hint="send a reference, or raise notify_max_bytes"
        )
    needed = sorted({layer for layers_of, _ in checked for layer in layers_of})
    source = open_source(layers, needed, num_layers, manager._runtime, seconds)

    task = TransferTask(manager._loop, manager._dd._center.readers)
    task._source = source
    task._targets = [_Target(task, i, config, *checked[i]) for i, config in enumerate(configs)]
    task._unfinished = len(configs)
    if configs:
        task._peer = _cluster_of(configs[0])
    for target in task._targets:
        target.add_done_callback(task._target_done)
    if not configs:
        source.close()
        task._finish([])
        return task
    source.start(task)
    starter = Starter(manager, task, cache, source_list, destination_list, count, seconds, payload)
    starter.take_links(manager)
    if cache._native is not None:
        starter.start()
    else:
        starter.wait()
    return task


def _lists(
    cache: Cache, src_blocks: Blocks | None, dst_blocks: Blocks | None
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Check what can be checked of the block lists without a peer, in a form that nobody changes."""
    source = None if src_blocks is None else _core.frozen_blocks(src_blocks, "src_blocks")
    destination = None if dst_blocks is None else _core.frozen_blocks(dst_blocks, "dst_blocks")
    if source is not None:
        if destination is None:
            raise ArgumentError("src_blocks is given without dst_blocks", hint="give one destination for each source")
        if len(source) != len(destination):
            raise BlockIndexError(
                f"src_blocks has {len(source)} entries and dst_blocks has {len(destination)}",
                hint="give one destination for each source",
            )
        most = cache.geometry.num_blocks - 1
        for at, block in enumerate(source):
            if not 0 <= block <= most:
                raise BlockIndexError(
                    f"src_blocks[{at}]={shown(block)} is outside the local cache's 0..{most}",
                    hint="give indices below the cache's number of blocks",
                )
    if destination is not None:
        seen: set[int] = set()
        for at, block in enumerate(destination):
            if block < 0:
                raise BlockIndexError(f"dst_blocks[{at}]={shown(block)} is negative", hint="give block indices")
            if block in seen:
                raise BlockIndexError(
                    f"dst_blocks[{at}]={block} is named twice", hint="each destination may appear once"
                )
            seen.add(block)
    return source, destination


def _cluster_of(config: Config) -> int:
    return int(config.dst_cluster_id if isinstance(config, TransferConfig) else config.cache_key.cluster_id)


def _check_config(
    config: Any,
    index: int,
    cache: Cache,
    num_layers: int,
    per_layer: int,
    src_blocks: tuple[int, ...] | None,
    dst_blocks: tuple[int, ...] | None,
) -> tuple[range, list[int]]:
    """Check what is wrong with a config whatever the peer has; return its source layers and a copy of its addresses."""
    name = f"targets[{index}]"
    if not isinstance(config, (TransferConfig, TransferWithCacheKeyConfig)):
        raise ArgumentTypeError(
            f"{name} must be a TransferConfig or TransferWithCacheKeyConfig, got {type(config).__name__}"
        )
    batch = as_integer(config.src_batch_index, f"{name}.src_batch_index", high=U32_MAX)
    if src_blocks is not None and batch:
        raise ArgumentError(
            f"{name}.src_batch_index={batch} names a batch slot, and src_blocks names blocks", hint="give one of both"
        )
    if src_blocks is None and batch >= cache.geometry.num_blocks:
        raise BlockIndexError(
            f"{name}.src_batch_index={batch} is outside the local cache's 0..{cache.geometry.num_blocks - 1}",
            hint="give an index below the cache's number of batch slots",
        )
    layers = layer_range(config.src_layer_range, f"{name}.src_layer_range", num_layers, "local")
    addresses: list[int] = []
    if isinstance(config, TransferConfig):
        as_integer(config.dst_cluster_id, f"{name}.dst_cluster_id")
        cluster = int(config.dst_cluster_id)
        if isinstance(config.dst_addrs, (str, bytes, Mapping)) or not isinstance(config.dst_addrs, Sequence):
            raise ArgumentTypeError(
                f"{name}.dst_addrs must be a sequence of addresses, got {type(config.dst_addrs).__name__}",
                hint="give a list or tuple, such as the peer's Cache.addresses",
            )
        addresses = [
            as_integer(address, f"{name}.dst_addrs[{at}]", low=1) for at, address in enumerate(config.dst_addrs)
        ]
        if len(addresses) != len(layers) * per_layer:
            raise ArgumentError(
                f"{name}.dst_addrs has {len(addresses)} addresses, and its {len(layers)} layers have "
                f"{len(layers) * per_layer} tensors",
                hint="give one address for each tensor",
            )
    else:
        if not isinstance(config.cache_key, (BlocksCacheKey, CacheKeyByIdAndIndex, CacheKey)):
            raise ArgumentTypeError(
                f"{name}.cache_key must be a BlocksCacheKey, CacheKeyByIdAndIndex or CacheKey, "
                f"got {type(config.cache_key).__name__}"
            )
        index_key(config.cache_key)
        if dst_blocks is None and isinstance(config.cache_key, BlocksCacheKey):
            raise ArgumentError(
                f"{name}.cache_key={config.cache_key} names no batch slot",
                hint="give dst_blocks, or a CacheKey or CacheKeyByIdAndIndex",
            )
        if dst_blocks is not None and isinstance(config.cache_key, CacheKey):
            raise ArgumentError(
                f"{name}.cache_key={config.cache_key} names a batch slot, and dst_blocks names blocks",
                hint="omit dst_blocks, or name the cache by a BlocksCacheKey or by its id",
            )
        cluster = config.cache_key.cluster_id
        if config.dst_layer_range is not None:
            there = layer_range(config.dst_layer_range, f"{name}.dst_layer_range", U32_MAX, "remote")
            if len(there) != len(layers):
                raise ArgumentError(
                    f"{name} names {len(layers)} source layers and {len(there)} destination layers",
                    hint="give ranges of one length",
                )
    own = cache._manager()
    if own is not None and cluster == own._dd.cluster_id:
        raise ArgumentError(f"{name}: cluster {cluster} is this DataDist itself", hint="use copy_cache or copy_blocks")
    return layers, addresses


class Starter:
    """What a task needs until all its targets have begun: at once, or when the local cache is registered.

    Holds the manager weakly: a waiting transfer must not keep its DataDist from being dropped.
    """

    def __init__(
        self,
        manager: CacheManager,
        task: TransferTask,
        cache: Cache,
        src_blocks: tuple[int, ...] | None,
        dst_blocks: tuple[int, ...] | None,
        per_layer: int,
        seconds: float,
        payload: bytes | None,
    ) -> None:
        self._manager = manager._weak
        self._runtime = manager._runtime
        self._waiting = manager._waiting
        self._task = task
        self._cache = cache
        self._src_blocks = src_blocks
        self._dst_blocks = dst_blocks
        self._per_layer = per_layer
        self._seconds = seconds
        self._payload = payload
        self._timer: Timer | None = None
        self._until = self._runtime.now() + seconds

    # The local cache is not ready. ---------------------------------------------------------------------------

    def take_links(self, manager: CacheManager) -> None:
        """Find the links of all targets; those that have none fail."""
        for target in self._task._targets:
            try:
                target.take(self._link(manager, _cluster_of(target.config)))
            except DataDistError as why:
                target._told(_bare(why))

    def wait(self) -> None:
        """Start when the registration of the local cache has ended."""
        task, cache = self._task, self._cache
        task._on_cancel = lambda: self._end(asyncio.CancelledError())
        self._timer = self._runtime.call_later(self._seconds, self._late) if self._seconds else None
        cache._late[self] = None
        self._waiting.add(task, "waiting for the registration of its cache", self._end)
        cache._registered.add_done_callback(self._go_on)

    def _go_on(self, _: object = None) -> None:
        task, cache = self._task, self._cache
        if task.done():
            self._over()
            return
        error = cache._registered.exception() if cache._registered.done() else None
        if error is None and cache.closed:
            error = ClosedError(f"cache {cache.id} is unregistered")
        if error is not None:
            self._end(error)
        elif cache._registered.done():
            self._over()
            self.start()

    def _late(self) -> None:
        self._end(
            TransferTimeout(
                f"the {self._seconds:g} s of the transfer passed while waiting for the registration of its cache",
                bytes_done=0,
            )
        )

    def _end(self, error: BaseException) -> None:
        self._over()
        for target in self._task._targets:
            target._told(error)

    def _over(self) -> None:
        self._task._on_cancel = self._task._cancel_targets  # what has ended, or begun, lets go of the cache
        self._waiting.remove(self._task)
        self._cache._late.pop(self, None)
        self._cache._registered.remove_done_callback(self._go_on)
        if self._timer is not None:
            self._timer.cancel()

    # Starting. -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin all targets. What is wrong with one of them is in its result."""
        task, manager = self._task, self._manager()
        source = task._source
        assert source is not None
        for target in tuple(task._targets):
            link = target._link
            if link is None or target.done():
                continue
            try:
                if manager is None:
                    raise ClosedError("the DataDist was dropped")
                self._check(link, manager)
                left = max(self._until - self._runtime.now(), 1e-6) if self._seconds else 0.0
                if self._payload is not None:
                    target._then = notifier(manager, link, self._payload, left)
                works = (
                    self._by_address(manager, link, target.config, target._layers, target._addresses)
                    if isinstance(target.config, TransferConfig)
                    else self._by_key(manager, link, target.config, target._layers)
                )
                target.begin(works, source, left)
            except Exception as why:  # whatever it is, the other targets go on, and the task ends
                target._told(_bare(why))
        source.begun()

    def _link(self, manager: CacheManager, cluster_id: int) -> Link:
        link = manager._dd._links.get(cluster_id)
        if link is None:
            raise NotLinkedError(
                f"cluster {cluster_id} is not linked",
                peer=cluster_id,
                hint=f"await dd.link(ClusterInfo({cluster_id}, ...)) first",
            )
        self._check(link, manager)
        return link

    @staticmethod
    def _check(link: Link, manager: CacheManager) -> None:
        if link.error is not None:
            error = end_of_link(link.error, manager)
            assert isinstance(error, DataDistError)
            raise error

    def _by_key(
        self, manager: CacheManager, link: Link, config: TransferWithCacheKeyConfig, layers: range
    ) -> list[_Work]:
        key: Key = config.cache_key
        found = find(link, key)
        if found is None:
            raise not_found(key)
        entry, slot = found
        cache, per_layer = self._cache, self._per_layer
        if self._src_blocks is not None or self._dst_blocks is not None:
            slot = None
        named = Named(
            _core.WRITE, key, self._src_blocks, self._dst_blocks,
            None if self._src_blocks is not None else int(config.src_batch_index), -1,
            config.src_layer_range, config.dst_layer_range, per_layer,
        )  # fmt: skip
        sides = resolve(named, cache, entry, slot)
        return [
            _Work(
                manager._pair(entry, cache), sides.local, sides.remote, layers.start, per_layer,
                [(sides.local_tensor + i, sides.remote_tensor + i, 0) for i in range(sides.num_tensors)],
                list(range(0, sides.num_tensors + 1, per_layer)),
                _view(entry),
            )
        ]  # fmt: skip

    def _by_address(
        self, manager: CacheManager, link: Link, config: TransferConfig, layers: range, addresses: list[int]
    ) -> list[_Work]:
        cache, per_layer = self._cache, self._per_layer
        here = cache.geometry
        places = [self._place(link, address, i) for i, address in enumerate(addresses)]
        entries: dict[int, RemoteEntry] = {entry.cache_id: entry for entry, _, _ in places}
        works = []
        for entry in entries.values():
            check_reachable(entry, cache)
            check_access(_core.WRITE, entry, cache)
            there = entry.geometry
            bases = [offset for other, _, offset in places if other is entry]
            room = there.stride * (there.num_blocks - 1) + there.block_bytes - max(bases)
            local: Any
            remote: Any
            if self._dst_blocks is None:
                local = _core.Slot(int(config.src_batch_index), 0, here.block_bytes)
                remote = _core.Slot(0, 0, here.block_bytes)
                block_bytes = stride = here.block_bytes
            elif self._src_blocks is None:
                local = _core.Slot(int(config.src_batch_index), 0, _core.WHOLE)
                remote = self._dst_blocks
                block_bytes, stride = there.block_bytes, there.stride
            else:
                local, remote = self._src_blocks, self._dst_blocks
                block_bytes, stride = here.block_bytes, here.stride
            if room < block_bytes:
                raise BlockIndexError(
                    f"{block_bytes} bytes from {max(bases):#x} of a tensor on reach beyond the "
                    f"tensors of the peer's cache {entry.cache_id}",
                    peer=link.cluster_id,
                    hint="give the addresses of the peer's tensors, or of one batch slot in them",
                )
            tensors, starts = [], [0]
            for layer in range(len(layers)):
                for k in range(layer * per_layer, (layer + 1) * per_layer):
                    other, tensor, offset = places[k]
                    if other is entry:
                        tensors.append((layers.start * per_layer + k, tensor, offset))
                starts.append(len(tensors))
            works.append(
                _Work(
                    manager._pair(entry, cache), local, remote, layers.start, per_layer, tensors, starts,
                    (there.num_tensors, (room - block_bytes) // stride + 1, block_bytes, stride),
                )
            )  # fmt: skip
        return works

    def _place(self, link: Link, address: int, index: int) -> tuple[RemoteEntry, int, int]:
        found = link._remote.find_address(address)
        if found is None:
            raise CacheNotFound(
                f"dst_addrs[{index}]={address:#x} lies in no cache that cluster {link.cluster_id} lets peers write",
                peer=link.cluster_id,
                hint='register it there with remote="rw", and give addresses from its Cache.addresses',
            )
        return found


def _bare(error: E) -> E:
    """Take the frames from an error that a result keeps: they hold the caller's, and so a gate that he drops."""
    error.__context__ = None
    return error.with_traceback(None)


def _view(entry: RemoteEntry) -> tuple[int, int, int, int]:
    g = entry.geometry
    return g.num_tensors, g.num_blocks, g.block_bytes, g.stride
