"""What says that a layer has been computed: gates, synchronizers, events and futures, device events.

`LayerGate` is what a model records itself. `open_source` turns everything else into a gate that the library records:

* a `LayerSynchronizer` is called layer by layer, in a thread of its own or, where its method is a coroutine, in a task;
* futures call back, those of `concurrent.futures` in the thread that sets them;
* an `asyncio.Event` has a task that waits for it;
* device events, and events of threads, can only be asked: one thread does so for all tasks of the process.

What watches holds a `_Feed`, and a feed neither the task nor, once that has ended, its gate: a thread that is stuck in
somebody's synchronizer keeps nothing but itself.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import inspect
import math
import reprlib
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, SupportsIndex, TypeAlias, TypeVar

import numpy as np

from . import _core
from ._loop import at_fork_in_child, fork_generation
from .errors import ArgumentError, ArgumentTypeError, LayerFailed, OutOfMemoryError
from .types import shown

if TYPE_CHECKING:
    from ._loop import Runtime

__all__ = ["DeviceEvent", "LayerGate", "LayerSignal", "LayerSource", "LayerSynchronizer", "OpenSource", "open_source"]

LayerSignal = _core.LayerSignal
E = TypeVar("E", bound=BaseException)

# Seconds between two rounds of asking: short after something has come, doubled up to the longest, and never less than
# keeps the thread idle for four fifths of the time.
_SHORTEST: Final = 0.00005
_LONGEST: Final = 0.002
_IDLE_SHARE: Final = 4.0
_THREADS_HINT: Final = "raise the limit of threads (ulimit -u, or the container's pids.max)"


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


class LayerSynchronizer(ABC):
    """Says layer by layer when each is computed, in answer to a call that waits for it.

    A transfer calls it for the layers that any target moves, in their order, each at most once, until no target waits
    for a further one: a layer that failed ends the targets whose range holds it. A plain method is called in one thread
    for each transfer. It may block, and does not hold up the exit of the interpreter. An ``async def`` is awaited in a
    task of the DataDist's loop, which is cancelled when the transfer has ended.

    Both cost a thread or the loop's attention, and a busy model thread delays both; `LayerGate` has neither.
    """

    @abstractmethod
    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool | Awaitable[bool]:
        """Wait until the tensors of a layer are final.

        Parameters
        ----------
        layer_index : int
            Of the source cache.
        timeout_in_millis : int or None
            Milliseconds until the transfer's deadline, rounded up; None without one. An answer that comes after it, or
            an exception, is not heard: the targets end with `TransferTimeout`.

        Returns
        -------
        bool
            False: the layer will not come. Then, and when an exception is raised, which becomes the cause, the targets
            that need the layer end with `LayerFailed`, and the others go on.
        """


class DeviceEvent(Protocol):
    """An event of a device's stream, such as ``torch.cuda.Event`` and ``torch.npu.Event``.

    Record it in its stream behind the layer's kernels before the transfer is started: an event that was never recorded
    counts as done. `query` is called again and again in a thread of the library and must not block. For an event of
    torch_npu that thread takes the event's NPU as its own, or that of the thread that started the transfer.
    """

    def query(self) -> bool:
        """Say whether the device has passed it."""
        ...

    def synchronize(self) -> Any:
        """Wait until the device has passed it. Not called here."""
        ...


LayerSource: TypeAlias = (
    "LayerGate | LayerSynchronizer | Sequence["
    "asyncio.Event | threading.Event | asyncio.Future[Any] | concurrent.futures.Future[Any] | DeviceEvent]"
)
"""What `CacheManager.transfer_cache_async` takes for `layers`.

In a sequence, element ``i`` is layer ``i``; kinds may be mixed, and only elements of layers that a target moves are
looked at. An event says by being set, a future by its result, that the layer is final; a future's exception or cancel
fails the layer. Events of threads are asked every 0.05 to 2 ms, as device events are.
"""


class _Task(Protocol):
    """A running `TransferTask`."""

    def _wants(self, layer: int, failed: Sequence[int]) -> bool: ...


class OpenSource:
    """A layer source in use by one task.

    Attributes
    ----------
    gate : _core.Gate
        Which the engine follows; until `begun`.
    """

    def __init__(self, gate: _core.Gate) -> None:
        self._gate: _core.Gate | None = gate

    @property
    def gate(self) -> _core.Gate:
        """Which the engine follows."""
        assert self._gate is not None
        return self._gate

    def start(self, task: _Task) -> None:
        """Begin to watch. Raises OutOfMemoryError where there is no thread for it; then nothing is left."""

    def begun(self) -> None:
        """Let go of the gate: the engine follows it now, and a task must not keep a gate that its owner drops."""
        self._gate = None

    def close(self) -> None:
        """Let go: the task has ended, and nobody waits for further layers."""
        self._gate = None


class _Feed:
    """Where what watches records layers: in any thread, until it is closed."""

    __slots__ = ("__weakref__", "_gate", "_generation", "_task")

    def __init__(self, num_layers: int) -> None:
        self._gate: _core.Gate | None = _core.Gate(num_layers)
        self._generation = fork_generation()
        self._task: Callable[[], _Task | None] = lambda: None

    def follow(self, task: _Task) -> None:
        """Ask this task, held weakly, what is wanted."""
        self._task = weakref.ref(task)

    @property
    def closed(self) -> bool:
        """Whether nothing is recorded any more: the task has ended, or this is a forked child."""
        return self._gate is None or self._generation != fork_generation()

    def wants(self, layer: int) -> bool:
        """Say whether any target still waits for a layer."""
        gate, task = self._gate, self._task()
        return not self.closed and gate is not None and task is not None and task._wants(layer, tuple(gate.failures))

    def record(self, layer: int) -> None:
        """Record a layer."""
        gate = self._gate
        if gate is not None and not self.closed:
            gate.record(layer)

    def fail(self, layer: int, error: BaseException) -> None:
        """Record that a layer will not come."""
        gate = self._gate
        if gate is not None and not self.closed:
            gate.fail(layer, error)

    def close(self) -> None:
        """Record no more."""
        self._gate = None


class _Fed(OpenSource):
    """A source with a gate of the library's own."""

    def __init__(self, needed: Sequence[int], num_layers: int, runtime: Runtime) -> None:
        self._feed = _Feed(num_layers)
        assert self._feed._gate is not None
        super().__init__(self._feed._gate)
        self._needed = tuple(needed)
        self._runtime = runtime

    def start(self, task: _Task) -> None:
        self._feed.follow(task)

    def close(self) -> None:
        super().close()
        self._feed.close()

    def __del__(self) -> None:
        # The loop was closed under the task, which nobody has ended: threads must not go on for it.
        if hasattr(self, "_feed"):
            self._feed.close()


# Synchronizers. ---------------------------------------------------------------------------------------------


class _Threaded(_Fed):
    """A synchronizer whose method blocks."""

    def __init__(self, synchronizer: LayerSynchronizer, *args: Any, seconds: float) -> None:
        super().__init__(*args)
        self._synchronizer = synchronizer
        self._until = time.monotonic() + seconds if seconds else None

    def start(self, task: _Task) -> None:
        super().start(task)
        if not self._needed:
            return
        thread = threading.Thread(
            target=_synchronize,
            args=(self._feed, self._synchronizer, self._needed, self._until),
            name="aiodatadist-layers",
            daemon=True,
        )
        try:
            thread.start()
        except RuntimeError as why:
            self.close()
            raise OutOfMemoryError(f"no thread for the LayerSynchronizer: {why}", hint=_THREADS_HINT) from why


def _synchronize(
    feed: _Feed, synchronizer: LayerSynchronizer, needed: tuple[int, ...], until: float | None
) -> None:  # fmt: skip
    for layer in needed:
        if feed.wants(layer):
            millis = _millis(until, time.monotonic())
            try:
                answer = synchronizer.synchronize_layer(layer, millis)
            except BaseException as why:
                if _missed(until, time.monotonic()):
                    return
                feed.fail(layer, _from_there(why))
            else:
                if _missed(until, time.monotonic()):
                    return
                _answered(feed, layer, millis, answer)
                del answer


class _Awaited(_Fed):
    """A synchronizer whose method is a coroutine function."""

    def __init__(self, synchronizer: LayerSynchronizer, *args: Any, seconds: float) -> None:
        super().__init__(*args)
        self._synchronizer = synchronizer
        self._until = self._runtime.now() + seconds if seconds else None
        self._watching: asyncio.Task[None] | None = None

    def start(self, task: _Task) -> None:
        super().start(task)
        if self._needed:
            coroutine = _await_layers(self._feed, self._synchronizer, self._needed, self._until, self._runtime)
            self._watching = self._runtime.free_task(coroutine, "aiodatadist-layers")

    def close(self) -> None:
        super().close()
        task, self._watching = self._watching, None
        if task is not None and not self._runtime.closed:
            task.cancel()


async def _await_layers(
    feed: _Feed, synchronizer: LayerSynchronizer, needed: tuple[int, ...], until: float | None, runtime: Runtime
) -> None:
    for layer in needed:
        if not feed.wants(layer):
            continue
        millis = _millis(until, runtime.now())
        try:
            answer = await synchronizer.synchronize_layer(layer, millis)  # type: ignore[misc]  # is a coroutine function
        except BaseException as why:
            # Whoever ends this task ends all that it waits for; an await inside may also end by a cancel of its own.
            ended = isinstance(why, (GeneratorExit, KeyboardInterrupt, SystemExit)) or runtime.being_cancelled()
            if not ended and _missed(until, runtime.now()):
                return
            error = _from_there(why)
            for lost in needed[needed.index(layer) :] if ended else (layer,):
                feed.fail(lost, error)
            if ended:
                raise
        else:
            if _missed(until, runtime.now()):
                return
            _answered(feed, layer, millis, answer)


def _millis(until: float | None, now: float) -> int | None:
    return None if until is None else max(0, math.ceil((until - now) * 1000))


def _missed(until: float | None, now: float) -> bool:
    """Say whether an answer comes after the deadline, which is what ends the targets then, whatever it says."""
    return until is not None and now >= until


def _answered(feed: _Feed, layer: int, millis: int | None, answer: object) -> None:
    call = f"synchronize_layer({layer}, {millis})"
    if isinstance(answer, (bool, np.bool_)):
        if answer:
            feed.record(layer)
        else:
            feed.fail(layer, LayerFailed(f"{call} returned False", layer=layer))
        return
    if inspect.iscoroutine(answer):
        answer.close()  # nobody else can await it
    feed.fail(layer, _no_bool(call, answer, "return True when the layer is final, and False if it will not come"))


def _no_bool(call: str, answer: object, hint: str) -> ArgumentTypeError:
    # No code of the object's class runs here: it might raise.
    if type(answer) is int:
        said = shown(answer)
    elif answer is None or type(answer) in (str, float):
        said = reprlib.repr(answer)
    else:
        said = f"an object of type {type(answer).__name__}"
    return ArgumentTypeError(f"{call} returned {said}, not a bool", hint=hint)


def _from_there(error: E) -> E:
    """Take our frame from a traceback: it would keep what the frame holds."""
    return error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)


# Sequences. -------------------------------------------------------------------------------------------------


class _Listed(_Fed):
    """A sequence of events and futures."""

    def __init__(self, events: Sequence[Any], *args: Any) -> None:
        super().__init__(*args)
        self._events = [(layer, events[layer]) for layer in self._needed]
        for layer, event in self._events:
            self._check(layer, event)
        self._tasks: list[asyncio.Task[None]] = []
        self._callbacks: list[tuple[asyncio.Future[Any], Callable[[Any], None]]] = []

    def _check(self, layer: int, event: Any) -> None:
        if asyncio.isfuture(event):
            if event.get_loop() is not self._runtime.loop:
                raise ArgumentError(
                    f"layers[{layer}] is a future of another event loop",
                    hint="give a concurrent.futures.Future, which any thread may set",
                )
        elif not isinstance(event, (asyncio.Event, concurrent.futures.Future)) and _question(event) is None:
            raise ArgumentTypeError(
                f"layers[{layer}] is a {type(event).__name__}, which says nothing of a layer",
                hint="give asyncio or threading events, asyncio or concurrent futures, or device events",
            )

    def start(self, task: _Task) -> None:
        super().start(task)
        feed = self._feed
        asked = []
        events, self._events = self._events, []
        for layer, event in events:
            if asyncio.isfuture(event) or isinstance(event, concurrent.futures.Future):
                said = functools.partial(_future_done, feed, layer)
                if event.done():
                    said(event)
                else:
                    event.add_done_callback(said)
                    if asyncio.isfuture(event):
                        self._callbacks.append((event, said))
            elif not isinstance(event, asyncio.Event):
                question = _question(event)
                assert question is not None
                asked.append((layer, question))
            elif event.is_set():
                feed.record(layer)
            else:
                coroutine = _await_event(feed, layer, event)
                self._tasks.append(self._runtime.free_task(coroutine, "aiodatadist-layers"))
        if asked:
            try:
                _watch.add(feed, asked)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        super().close()
        _watch.drop(self._feed)
        callbacks, self._callbacks = self._callbacks, []
        tasks, self._tasks = self._tasks, []
        if self._runtime.closed:
            return
        for future, said in callbacks:
            future.remove_done_callback(said)
        for task in tasks:
            task.cancel()


def _future_done(feed: _Feed, layer: int, future: asyncio.Future[Any] | concurrent.futures.Future[Any]) -> None:
    if feed.closed:
        return  # a concurrent future cannot forget us
    if future.cancelled():
        feed.fail(layer, LayerFailed(f"the future of layer {layer} was cancelled", layer=layer))
        return
    error = future.exception()
    if error is None:
        feed.record(layer)
    else:
        feed.fail(layer, error)


async def _await_event(feed: _Feed, layer: int, event: asyncio.Event) -> None:
    try:
        await event.wait()
    except BaseException as why:
        feed.fail(layer, _from_there(why))
        if not isinstance(why, Exception):
            raise
    else:
        feed.record(layer)


def _question(event: Any) -> Callable[[], object] | None:
    """Return what to ask an event, of a device or of threads, that cannot call back."""
    if callable(getattr(event, "query", None)) and callable(getattr(event, "synchronize", None)):
        return _npu_question(event) or event.query
    if isinstance(event, threading.Event):
        return event.is_set
    return None


_npu_of_thread = threading.local()


def _npu_question(event: Any) -> Callable[[], object] | None:
    """Return what to ask an event of torch_npu; None for others. ACL answers only threads that have set an NPU."""
    if not any(base.__module__.partition(".")[0] == "torch_npu" for base in type(event).__mro__):
        return None
    npu = sys.modules["torch"].npu
    number = getattr(getattr(event, "device", None), "index", None)
    if number is None:
        number = npu.current_device()

    def question() -> object:
        if getattr(_npu_of_thread, "number", None) != number:
            npu.set_device(number)
            _npu_of_thread.number = number
        return event.query()

    return question


class _Watch:
    """Asks events that cannot call back, in one thread for all tasks of the process, while any is pending."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # can be entered twice: a collection inside may end other tasks
        self._pending: dict[_Feed, list[tuple[int, Callable[[], object]]]] = {}
        self._thread: threading.Thread | None = None

    def _after_fork_in_child(self) -> None:
        self.__init__()  # type: ignore[misc]  # the thread is the parent's, and may have held the lock

    def add(self, feed: _Feed, asked: list[tuple[int, Callable[[], object]]]) -> None:
        """Ask on behalf of a feed. Raises OutOfMemoryError."""
        with self._changed:
            self._pending[feed] = asked
            if self._thread is not None:
                self._changed.notify()
                return
            thread = threading.Thread(target=self._run, name="aiodatadist-events", daemon=True)
            try:
                thread.start()
            except RuntimeError as why:
                del self._pending[feed]
                raise OutOfMemoryError(f"no thread to ask events for layers: {why}", hint=_THREADS_HINT) from why
            self._thread = thread

    def drop(self, feed: _Feed) -> None:
        """Ask no more on behalf of a feed."""
        with self._changed:
            if self._pending.pop(feed, None) is not None:
                self._changed.notify()

    def _run(self) -> None:
        pause = _SHORTEST
        while True:
            with self._changed:
                over = [feed for feed, asked in self._pending.copy().items() if not asked or feed.closed]
                while over:
                    self._pending.pop(over.pop(), None)
                if not self._pending:
                    self._thread = None
                    return
            began = time.thread_time()
            news = self._ask_all()
            busy = time.thread_time() - began
            pause = _SHORTEST if news else min(2 * pause, _LONGEST)
            with self._changed:
                if self._pending and self._changed.wait(max(pause, _IDLE_SHARE * busy)):
                    pause = _SHORTEST

    def _ask_all(self) -> bool:
        """Ask every event once. True if any had an answer."""
        news = False
        for feed, asked in self._pending.copy().items():
            left = [one for one in asked if not _ask(feed, *one)]
            news = news or len(left) < len(asked)
            asked[:] = left
        return news


def _ask(feed: _Feed, layer: int, question: Callable[[], object]) -> bool:
    """Say whether the question is answered, for good or bad, or nobody wants to know any more."""
    if feed.closed:
        return True
    try:
        answer = question()
    except BaseException as why:
        feed.fail(layer, _from_there(why))
        return True
    if not isinstance(answer, (bool, np.bool_)):
        hint = "return True once the device has passed the event, and False before"
        feed.fail(layer, _no_bool(f"query() of layers[{layer}]", answer, hint))
        return True
    if answer:
        feed.record(layer)
    return bool(answer)


_watch = _Watch()
at_fork_in_child(_watch)


# Opening. ---------------------------------------------------------------------------------------------------


def open_source(
    layers: Any, needed: Sequence[int], num_layers: int, runtime: Runtime, seconds: float
) -> OpenSource:  # fmt: skip
    """Check what a caller gave for `layers`, which nothing watches yet.

    Parameters
    ----------
    layers : LayerSource
    needed : sequence of int
        The layers that any target moves, ascending.
    num_layers : int
        Of the source cache.
    runtime : Runtime
        Of the DataDist.
    seconds : float
        Until the deadline, from now on; 0 without one.

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
    if isinstance(layers, LayerSynchronizer):
        kind = _Awaited if inspect.iscoroutinefunction(layers.synchronize_layer) else _Threaded
        return kind(layers, needed, num_layers, runtime, seconds=seconds)
    if isinstance(layers, Sequence) and not isinstance(layers, (str, bytes, bytearray, memoryview)):
        if needed and needed[-1] >= len(layers):
            raise ArgumentError(
                f"layers has {len(layers)} elements, and layer {needed[-1]} is to be moved",
                hint=f"give one event or future for each of the {num_layers} layers of the cache",
            )
        return _Listed(layers, needed, num_layers, runtime)
    if isinstance(layers, type) and issubclass(layers, (_core.Gate, LayerSynchronizer)):
        raise ArgumentTypeError(f"layers is the class {layers.__name__}", hint="give an object of it")
    hint = "derive its class from LayerSynchronizer" if hasattr(layers, "synchronize_layer") else None
    raise ArgumentTypeError(
        f"layers must be a LayerGate, a LayerSynchronizer, or a sequence of events or futures, "
        f"got {type(layers).__name__}",
        hint=hint,
    )
