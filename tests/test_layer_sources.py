"""Everything but gates that says when a layer is computed: synchronizers, events, futures, device events."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import aiodatadist as adt
from aiodatadist import layers as sources

from .hixl_standin import HIXL
from .layer_pairs import LAYERS, WHOLE, both, landed, layers_there, part, push
from .pairs import OWNER, Pair, linked, pattern
from .peers import ROOT
from .waiting import PATIENCE, until, until_now

pytestmark = pytest.mark.loop


@contextlib.asynccontextmanager
async def caches(transport: str = "shm") -> AsyncIterator[tuple[Pair, adt.Cache, adt.Cache]]:
    async with linked(transport) as pair:
        here, there = await both(pair)
        yield pair, here, there


def watching() -> list[str]:
    """Name what is there for the sources of running transfers: threads and tasks."""
    names = [thread.name for thread in threading.enumerate()]
    with contextlib.suppress(RuntimeError):
        names += [task.get_name() for task in asyncio.all_tasks()]
    return [name for name in names if name in ("aiodatadist-layers", "aiodatadist-events")]


class Blocking(adt.LayerSynchronizer):
    """Waits, layer by layer, for what the test lets it answer."""

    def __init__(self, **answers: Any) -> None:
        self.answers = [answers.get(f"layer{layer}", True) for layer in range(LAYERS)]
        self.calls: list[int] = []
        self.millis: list[int | None] = []
        self.threads: set[threading.Thread] = set()
        self.free = threading.Semaphore(0)
        self.returned = 0

    def let(self, count: int = LAYERS) -> Any:
        self.free.release(count)
        return self

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> Any:
        self.calls.append(layer_index)
        self.millis.append(timeout_in_millis)
        self.threads.add(threading.current_thread())
        assert self.free.acquire(timeout=PATIENCE)
        self.returned += 1
        return self.answer(layer_index)

    def answer(self, layer: int) -> Any:
        answer = self.answers[layer]
        if isinstance(answer, BaseException):
            raise answer
        return answer


class Awaiting(Blocking):
    """The same in a task."""

    async def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> Any:
        self.calls.append(layer_index)
        self.millis.append(timeout_in_millis)
        self.threads.add(threading.current_thread())
        while not self.free.acquire(blocking=False):
            await asyncio.sleep(0.001)
        self.returned += 1
        return self.answer(layer_index)


class Device:
    """An event of a device that computes at the test's command."""

    def __init__(self) -> None:
        self.passed: Any = False
        self.asked = 0
        self.threads: set[str] = set()

    def query(self) -> Any:
        self.asked += 1
        self.threads.add(threading.current_thread().name)
        if isinstance(self.passed, BaseException):
            raise self.passed
        return self.passed

    def synchronize(self) -> None:
        raise AssertionError("a thread for all events cannot wait for one")


class Unspeakable:
    def __repr__(self) -> str:
        raise SystemExit("a thread that ends here leaves all others waiting")


SYNCHRONIZERS = pytest.mark.parametrize("kind", [Blocking, Awaiting])


# Synchronizers. ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shm", "tcp", HIXL])
@SYNCHRONIZERS
async def test_synchronizers_are_asked_layer_by_layer(kind: type[Blocking], transport: str) -> None:
    async with caches(transport) as (pair, here, there):
        source = kind()
        task = push(pair, here, source, timeout=None)
        for layer in range(LAYERS):
            await until(lambda layer=layer: source.calls == list(range(layer + 1)))  # type: ignore[misc]
            assert layers_there(here, there) == list(range(layer))
            source.let(1)
            await landed(task, layer + 1)
        assert [(one.error, one.layers_done) for one in await task] == [(None, LAYERS)]
        assert source.millis == [None] * LAYERS
        (thread,) = source.threads
        assert (thread is threading.current_thread()) == (kind is Awaiting)
        assert thread is threading.current_thread() or thread.daemon
        await until(lambda: not watching())


@SYNCHRONIZERS
async def test_only_needed_layers_are_asked_for(kind: type[Blocking]) -> None:
    async with caches() as (pair, here, there):
        source = kind().let()
        results = await push(pair, here, source, part(3, 3), part(1, 1), part(1, 1))
        assert [one.error for one in results] == [None] * 3
        assert source.calls == [1, 3]
        assert layers_there(here, there) == [1, 3]
        for targets in ([], [adt.TransferWithCacheKeyConfig(WHOLE.cache_key, range(0), range(0))]):
            manager = pair.user.cache_manager
            await manager.transfer_cache_async(here, source, targets, [1], [2])
        assert source.calls == [1, 3]
        assert not watching()


@SYNCHRONIZERS
async def test_synchronizers_hear_of_the_deadline(kind: type[Blocking]) -> None:
    async with caches() as (pair, here, _):
        source = kind()
        task = push(pair, here, source, timeout=100.0)
        await until(lambda: source.calls)
        await asyncio.sleep(0.03)  # which loops that count in milliseconds take for 29
        source.let()
        await task
        millis = [one for one in source.millis if one is not None]
        assert len(millis) == LAYERS
        assert 100_000 >= millis[0] >= millis[1] + 20 > millis[1] >= millis[2] >= millis[3] > 0


@pytest.mark.parametrize("awaited", [False, True])
@pytest.mark.parametrize("answer", [False, True, TimeoutError("the stream is busy")])
async def test_who_gives_up_at_the_deadline_has_missed_it(
    awaited: bool, answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A synchronizer that waits for as long as it was told: the engine may hear of its answer before of the time."""
    calls: list[int] = []

    def say(millis: int | None) -> bool:
        assert millis is not None
        calls.append(millis)
        if isinstance(answer, BaseException):
            raise answer
        return bool(answer)

    class Blocked(adt.LayerSynchronizer):
        def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
            time.sleep((timeout_in_millis or 0) / 1000)
            return say(timeout_in_millis)

    class Awaited(adt.LayerSynchronizer):
        async def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
            time.sleep((timeout_in_millis or 0) / 1000)  # the loop hears of the end of nothing before this answer
            return say(timeout_in_millis)

    async with caches() as (pair, here, there):
        real = sources.open_source

        def early(*arguments: Any) -> Any:
            return real(*arguments[:-1], arguments[-1] - 0.04)  # the engine is late

        monkeypatch.setattr("aiodatadist.layerwise.open_source", early)
        (result,) = await push(pair, here, Awaited() if awaited else Blocked(), timeout=0.05)
        assert isinstance(result.error, adt.TransferTimeout), result.error
        assert len(calls) <= 1  # nobody is asked after it
        assert layers_there(here, there) == []
        await until(lambda: not watching())


class NpuEvent(Device):
    """An event of torch_npu: ACL answers a thread only after that has set an NPU."""

    __module__ = "torch_npu.npu.streams"
    current = threading.local()

    def __init__(self, number: int | None) -> None:
        super().__init__()
        self.device = None if number is None else SimpleNamespace(index=number)
        self.asked_on: set[int] = set()

    def query(self) -> Any:
        self.asked_on.add(self.current.number)  # AttributeError: no NPU was set
        return super().query()

    @classmethod
    def set_device(cls, number: int) -> None:
        cls.current.number = number

    @classmethod
    def current_device(cls) -> int:
        return int(getattr(cls.current, "number", 0))


async def test_events_of_npus_are_asked_on_their_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(npu=NpuEvent))
    async with caches() as (pair, here, there):
        NpuEvent.set_device(5)
        events = [NpuEvent(number) for number in (0, 1, None, 0)]
        task = push(pair, here, events)
        await until(lambda: all(event.asked > 2 for event in events))
        for event in events:
            event.passed = True
        (result,) = await task
        assert result.error is None
        assert [event.asked_on for event in events] == [{0}, {1}, {5}, {0}]
        assert NpuEvent.current_device() == 5  # nobody has changed that of this thread
        assert layers_there(here, there) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("answer", "cause", "said"),
    [
        (False, adt.LayerFailed, "synchronize_layer(1, None) returned False"),
        (np.False_, adt.LayerFailed, "synchronize_layer(1, None) returned False"),
        (KeyError("stream"), KeyError, "'stream'"),
        (SystemExit("thread"), SystemExit, "thread"),
        (None, adt.ArgumentTypeError, "synchronize_layer(1, None) returned None, not a bool; return True when"),
        (1, adt.ArgumentTypeError, "synchronize_layer(1, None) returned 1, not a bool"),
        (Unspeakable(), adt.ArgumentTypeError, "returned an object of type Unspeakable, not a bool"),
        ("yes" * 1000, adt.ArgumentTypeError, "synchronize_layer(1, None) returned 'yes"),
    ],
)
@SYNCHRONIZERS
async def test_answers_that_fail_a_layer(
    kind: type[Blocking], answer: Any, cause: type[BaseException], said: str
) -> None:
    if isinstance(answer, SystemExit) and kind is Awaiting:
        return  # ends the loop, as in any task
    async with caches() as (pair, here, _):
        source = kind(layer1=answer).let()
        first, second, third = await push(pair, here, source, part(0, 1), part(2, 3), part(0, 0), timeout=None)
        assert isinstance(first.error, adt.LayerFailed)
        assert (first.error.layer, first.error.peer) == (1, OWNER)
        assert isinstance(first.error.__cause__, cause)
        assert said in str(first.error.__cause__)
        assert len(str(first.error)) < 400
        if isinstance(answer, BaseException):
            assert first.error.__cause__ is answer
            assert answer.__traceback__ is not None
            assert answer.__traceback__.tb_frame.f_code.co_name == "synchronize_layer"  # none of ours
        assert [(one.error, one.layers_done) for one in (second, third)] == [(None, 2), (None, 1)]
        assert source.calls == [0, 1, 2, 3]


@SYNCHRONIZERS
async def test_nobody_asks_for_layers_that_no_target_waits_for(kind: type[Blocking]) -> None:
    async with caches() as (pair, here, _):
        source = kind(layer1=False).let()
        (result,) = await push(pair, here, source)
        assert isinstance(result.error, adt.LayerFailed)
        await until(lambda: not watching())
        assert source.calls == [0, 1]
        # A target that the engine has ended needs none, either.
        source = kind()
        stranger = adt.TransferWithCacheKeyConfig(adt.BlocksCacheKey(77))
        task = push(pair, here, source, part(0, 1), stranger)
        await until(lambda: source.calls == [0])
        source.let()
        first, second = await task
        await until(lambda: not watching())
        assert first.error is None
        assert isinstance(second.error, adt.NotLinkedError)
        assert source.calls == [0, 1]


async def test_a_method_that_forgot_to_be_async() -> None:
    class Forgetful(adt.LayerSynchronizer):
        async def wait(self) -> bool:
            return True

        def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> Any:
            return self.wait()

    async with caches() as (pair, here, _):
        (result,) = await push(pair, here, Forgetful())
        assert result.error is not None
        assert isinstance(result.error.__cause__, adt.ArgumentTypeError)
        assert "returned an object of type coroutine, not a bool" in str(result.error.__cause__)


async def test_a_cancelled_await_inside_fails_its_layer_alone() -> None:
    class Inner(Awaiting):
        async def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> Any:
            if layer_index == 1:
                gone = asyncio.get_running_loop().create_future()
                gone.cancel()
                await gone
            return await super().synchronize_layer(layer_index, timeout_in_millis)

    async with caches() as (pair, here, _):
        first, second = await push(pair, here, Inner().let(), part(0, 1), part(2, 3))
        assert isinstance(first.error, adt.LayerFailed)
        assert isinstance(first.error.__cause__, asyncio.CancelledError)
        assert second.error is None


async def test_whoever_cancels_the_task_of_a_source_ends_its_layers() -> None:
    async with caches() as (pair, here, _):
        source = Awaiting()
        task = push(pair, here, source, part(0, 0), part(1, 3), timeout=None)
        await until(lambda: source.calls == [0])
        (watcher,) = [each for each in asyncio.all_tasks() if each.get_name() == "aiodatadist-layers"]
        watcher.cancel()
        for result in await task:
            assert isinstance(result.error, adt.LayerFailed)
            assert isinstance(result.error.__cause__, asyncio.CancelledError)
        assert watcher.cancelled()


def test_synchronizers_are_abstract() -> None:
    with pytest.raises(TypeError, match="synchronize_layer"):
        adt.LayerSynchronizer()  # type: ignore[abstract]


# Sequences. -------------------------------------------------------------------------------------------------


def make(kind: str) -> tuple[Any, Callable[[], object]]:
    """Return something that says a layer is final, and what has it do so."""
    match kind:
        case "asyncio.Event":
            event = asyncio.Event()
            return event, event.set
        case "threading.Event":
            flag = threading.Event()
            return flag, flag.set
        case "asyncio.Future":
            future = asyncio.get_running_loop().create_future()
            return future, lambda: future.set_result(None)
        case "concurrent.Future":
            concurrently: concurrent.futures.Future[int] = concurrent.futures.Future()
            return concurrently, lambda: concurrently.set_result(0)
        case _:
            device = Device()
            return device, lambda: setattr(device, "passed", True)


KINDS = ["asyncio.Event", "threading.Event", "asyncio.Future", "concurrent.Future", "device"]


@pytest.mark.parametrize("kind", KINDS)
async def test_sequences_say_when_layers_are_final(kind: str) -> None:
    async with caches() as (pair, here, there):
        made = [make(kind) for _ in range(LAYERS)]
        made[2][1]()  # before it begins
        task = push(pair, here, [one for one, _ in made], timeout=None)
        await landed(task, 1)
        assert layers_there(here, there) == [2]
        for count, layer in enumerate((3, 0, 1), 2):
            made[layer][1]()
            await landed(task, count)
        assert [(one.error, one.layers_done) for one in await task] == [(None, LAYERS)]
        assert task._log == [(0, 2), (0, 3), (0, 0), (0, 1)]
        await until(lambda: not watching())


async def test_kinds_may_be_mixed_and_only_needed_elements_count() -> None:
    async with linked() as pair:
        count = len(KINDS)
        there = await pair.offer(pattern(1, (2, 64), tensors=2 * (count + 2)))
        here = await pair.take(pattern(2, (2, 64), tensors=2 * (count + 2)))
        made = [make(kind) for kind in KINDS]
        events = (None, *(one for one, _ in made), "no event, and longer than the range", 3, 4, 5)
        named = range(1, count + 1)
        config = adt.TransferWithCacheKeyConfig(WHOLE.cache_key, named, named)
        task = pair.user.cache_manager.transfer_cache_async(here, events, [config], [0, 1], [1, 0])  # type: ignore[arg-type]
        for _, say in made:
            say()
        assert [(one.error, one.layers_done) for one in await task] == [(None, count)]
        for layer in named:
            assert np.array_equal(here.tensors[2 * layer], there.tensors[2 * layer][::-1])


async def test_one_event_may_stand_for_several_layers() -> None:
    async with caches() as (pair, here, there):
        event, future, device = asyncio.Event(), concurrent.futures.Future[None](), Device()
        task = push(pair, here, [event, event, future, future])
        event.set()
        await landed(task, 2)
        future.set_result(None)
        await task
        task = push(pair, here, [device] * LAYERS)
        device.passed = True
        await task
        assert layers_there(here, there) == [0, 1, 2, 3]


async def test_a_concurrent_future_needs_no_loop() -> None:
    """What another thread sets is pushed while this one does not let the loop run."""
    async with caches() as (pair, here, there):
        futures = [concurrent.futures.Future[None]() for _ in range(LAYERS)]
        task = push(pair, here, futures)
        thread = threading.Thread(target=lambda: [future.set_result(None) for future in futures])
        thread.start()
        thread.join()
        until_now(lambda: layers_there(here, there) == [0, 1, 2, 3])
        assert not task.done()
        await task


async def test_a_task_or_a_transfer_is_a_future_as_well() -> None:
    async with caches() as (pair, here, there):
        key = adt.BlocksCacheKey(OWNER)
        before = pair.user.cache_manager.pull_blocks(key, here, [4], [4])
        task = asyncio.create_task(asyncio.sleep(0.01))
        await push(pair, here, [before, task, before, task])
        assert before.done()
        assert layers_there(here, there) == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", ["asyncio.Future", "concurrent.Future"])
@pytest.mark.parametrize("way", ["error", "cancel"])
@pytest.mark.parametrize("early", [False, True])
async def test_futures_fail_their_layers(kind: str, way: str, early: bool) -> None:
    async with caches() as (pair, here, _):
        why = ValueError("no layer")
        made = [make(kind) for _ in range(LAYERS)]

        def fail() -> None:
            made[1][0].cancel() if way == "cancel" else made[1][0].set_exception(why)

        if early:
            fail()
        task = push(pair, here, [one for one, _ in made], part(0, 1), part(2, 3))
        if not early:
            fail()
        for layer in (0, 2, 3):
            made[layer][1]()
        first, second = await task
        assert isinstance(first.error, adt.LayerFailed)
        assert first.error.layer == 1
        if way == "error":
            assert first.error.__cause__ is why
        else:
            assert isinstance(first.error.__cause__, adt.LayerFailed)
            assert "the future of layer 1 was cancelled" in str(first.error.__cause__)
        assert (second.error, second.layers_done) == (None, 2)


async def test_an_event_of_another_loop_fails_its_layer() -> None:
    event = asyncio.Event()

    async def bind() -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(event.wait(), 0.001)

    await asyncio.to_thread(asyncio.run, bind())
    async with caches() as (pair, here, _):
        (result,) = await push(pair, here, [event] * LAYERS)
        assert isinstance(result.error, adt.LayerFailed)
        assert isinstance(result.error.__cause__, RuntimeError)


# Device events. ---------------------------------------------------------------------------------------------


async def test_one_thread_asks_all_events() -> None:
    async with caches() as (pair, here, _):
        devices = [[Device() for _ in range(LAYERS)] for _ in range(5)]
        tasks = [push(pair, here, each) for each in devices]
        await until(lambda: all(device.asked for each in devices for device in each))
        assert watching() == ["aiodatadist-events"]
        for each, task in zip(devices[:4], tasks[:4], strict=True):
            for device in each:
                device.passed = True
            await task
            asked = [device.asked for device in each]
        assert watching() == ["aiodatadist-events"]
        again = devices[4][0].asked
        await until(lambda: devices[4][0].asked > again + 2)
        assert asked == [device.asked for device in devices[3]]  # what has answered is left alone
        tasks[4].cancel()
        await asyncio.wait([tasks[4]])
        await until(lambda: not watching())
        assert {name for each in devices for device in each for name in device.threads} == {"aiodatadist-events"}
        again = devices[4][0].asked
        # And it begins anew when there is something again.
        device = Device()
        task = push(pair, here, [device] * LAYERS)
        await until(lambda: device.asked)
        device.passed = True
        await task
        assert devices[4][0].asked == again


@pytest.mark.parametrize(
    ("answer", "cause", "said"),
    [
        (RuntimeError("an illegal memory access"), RuntimeError, "illegal"),
        (SystemExit(1), SystemExit, "1"),
        (None, adt.ArgumentTypeError, "query() of layers[1] returned None, not a bool; return True once"),
        (0, adt.ArgumentTypeError, "query() of layers[1] returned 0, not a bool"),
        (Unspeakable(), adt.ArgumentTypeError, "query() of layers[1] returned an object of type Unspeakable"),
    ],
)
async def test_events_that_cannot_be_asked_fail_their_layers(
    answer: Any, cause: type[BaseException], said: str
) -> None:
    async with caches() as (pair, here, _):
        devices, others = [Device() for _ in range(LAYERS)], [Device() for _ in range(LAYERS)]
        other = push(pair, here, others)
        task = push(pair, here, devices, part(0, 1), part(2, 3))
        devices[1].passed = answer
        for device in (*devices[2:], *others):
            device.passed = np.True_
        first, second = await task
        assert isinstance(first.error, adt.LayerFailed)
        assert first.error.layer == 1
        assert isinstance(first.error.__cause__, cause)
        assert said in str(first.error.__cause__)
        assert second.error is None
        assert [one.error for one in await other] == [None]


async def test_asking_leaves_the_processor_to_others() -> None:
    """Many events that take some time to answer: their thread is idle for most of it, and ends with the last."""

    class Slow(Device):
        def query(self) -> bool:
            self.asked += 1
            cpu = time.thread_time()
            while time.thread_time() - cpu < 0.002:
                pass
            return False

    async with caches() as (pair, here, _):
        devices = [Slow() for _ in range(LAYERS)]
        task = push(pair, here, devices, timeout=None)
        await until(lambda: devices[0].asked > 1)
        began, asked = time.monotonic(), devices[0].asked
        await until(lambda: devices[0].asked >= asked + 4)
        # Four rounds of 8 ms each were followed by four times as long at least.
        assert time.monotonic() - began > 3 * 4 * 0.008
        task.cancel()
        await asyncio.wait([task])
        await until(lambda: not watching())


# Wrong calls. -----------------------------------------------------------------------------------------------


class Duck:
    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return True


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (None, "layers must be a LayerGate, a LayerSynchronizer, or a sequence of events or futures, got NoneType"),
        (4, "got int"),
        ("events", "got str"),
        (b"events", "got bytes"),
        ({0: threading.Event()}, "got dict"),
        (iter([threading.Event()] * LAYERS), "iterator"),
        (Duck(), "got Duck; derive its class from LayerSynchronizer"),
        (adt.LayerGate, "layers is the class LayerGate; give an object of it"),
        (Blocking, "layers is the class Blocking; give an object of it"),
        ([threading.Event(), threading.Event(), 7, None], r"layers\[2\] is a int, which says nothing of a layer; give"),
        ([threading.Event()] * 3 + [None], r"layers\[3\] is a NoneType"),
        ([threading.Condition()] * 4, r"layers\[0\] is a Condition"),
    ],
)
async def test_what_is_no_source(wrong: Any, said: str) -> None:
    async with caches() as (pair, here, _):
        with pytest.raises(adt.ArgumentTypeError, match=said):
            push(pair, here, wrong)
        assert not watching()
        assert pair.user.dump() == []


async def test_sequences_are_long_enough() -> None:
    async with caches() as (pair, here, _):
        events = [threading.Event() for _ in range(3)]
        with pytest.raises(adt.ArgumentError, match="layers has 3 elements, and layer 3 is to be moved; give one"):
            push(pair, here, events)
        for event in events:
            event.set()
        assert [one.error for one in await push(pair, here, events, part(1, 2))] == [None]


async def test_futures_belong_to_the_loop() -> None:
    async def other() -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()

    foreign = await asyncio.to_thread(asyncio.run, other())
    async with caches() as (pair, here, _):
        with pytest.raises(
            adt.ArgumentError, match=r"layers\[1\] is a future of another event loop; give a concurrent"
        ):
            push(pair, here, [threading.Event(), foreign, threading.Event(), threading.Event()])
        assert not watching()


@pytest.mark.parametrize("kind", ["synchronizer", "device"])
async def test_no_thread_to_be_had(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async with caches() as (pair, here, _):
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", start)
            with pytest.raises(adt.OutOfMemoryError, match="can't start new thread; raise the limit"):
                push(pair, here, Blocking() if kind == "synchronizer" else [Device()] * LAYERS)
        assert pair.user.dump() == []
        device = Device()
        device.passed = True
        for source in (Blocking().let(), [device] * LAYERS):
            assert [one.error for one in await push(pair, here, source)] == [None]


# Ends. ------------------------------------------------------------------------------------------------------


class Failing(adt.LayerSynchronizer):
    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return layer_index == 0


def pending(kind: str) -> tuple[Any, Any]:
    """Return a source whose layer 0 comes, and no other; and what has it come to an end after its transfer."""
    if kind in ("Blocking", "Awaiting"):
        source = (Blocking if kind == "Blocking" else Awaiting)()
        return source.let(1), source.let
    made = [make(kind) for _ in range(LAYERS)]
    made[0][1]()

    def finish() -> None:
        for one, say in made[1:]:
            if not (hasattr(one, "done") and one.done()):
                say()

    return [one for one, _ in made], finish


@pytest.mark.parametrize("kind", ["Blocking", "Awaiting", *KINDS])
@pytest.mark.parametrize("end", ["cancel", "deadline", "unregister", "unlink", "abort"])
async def test_sources_are_closed_with_their_transfers(kind: str, end: str) -> None:
    async with caches() as (pair, here, there):
        for seconds in (0.1, 1.0, 10.0):  # within which a layer is to land, on a busy machine as well
            source, finish = pending(kind)
            task = push(pair, here, source, timeout=seconds if end == "deadline" else None)
            await anext(task.layers(), None)
            if not task.done():
                break
            finish()
        watch = weakref.ref(task._source)
        expected: type[BaseException] = adt.TransferTimeout
        match end:
            case "cancel":
                task.cancel()
            case "unregister":
                await pair.owner.cache_manager.unregister_cache(there)
                expected = adt.CacheNotFound
            case "unlink":
                await pair.user.unlink(adt.ClusterInfo(OWNER))
                expected = adt.PeerLostError
            case "abort":
                pair.user.abort()
                expected = adt.ClosedError
        if end == "cancel":
            await asyncio.wait([task])
            assert task.cancelled()
        else:
            (result,) = await task
            assert isinstance(result.error, expected)
            assert result.layers_done == 1
            del result
        assert task._source is None
        # Only a thread that somebody's synchronizer keeps is still there, and it holds nothing.
        await until(lambda: watching() == (["aiodatadist-layers"] if kind == "Blocking" else []))
        gone = weakref.ref(task)
        del task
        await asyncio.sleep(0)  # what woke this task up has an end
        gc.collect()
        assert (watch(), gone()) == (None, None)
        assert not sources._watch._pending
        if kind == "asyncio.Future":
            assert not any(one._callbacks for one in source[1:])
        finish()  # which nobody hears any more
        await until(lambda: not watching())
        if kind in ("Blocking", "Awaiting"):
            assert source.calls == [0, 1]


@pytest.mark.parametrize("kind", ["Blocking", "Awaiting", *KINDS])
async def test_nothing_is_left_of_a_source(kind: str) -> None:
    async with caches() as (pair, here, _):
        source, finish = pending(kind)
        task = push(pair, here, source)
        finish()
        assert [one.error for one in await task] == [None]
        await until(lambda: not watching())
        gone = [weakref.ref(task), *map(weakref.ref, source if isinstance(source, list) else [source])]
        del task, source, finish
        await asyncio.sleep(0)
        gc.collect()
        await until(lambda: not any(one() for one in gone))


async def test_sources_of_a_transfer_that_waits_for_its_cache() -> None:
    async with linked() as pair:
        await pair.offer(pattern(1, (8, 512), tensors=2 * LAYERS))
        here = pair.user.cache_manager.register_blocks_cache(pattern(2, (8, 512), tensors=2 * LAYERS))
        source = Blocking().let()
        task, other = push(pair, here, source), push(pair, here, Awaiting())
        assert here._native is None, "this is about a cache that is not ready"
        other.cancel()
        assert [one.error for one in await task] == [None]
        await asyncio.wait([other])
        await until(lambda: not watching())


@pytest.mark.parametrize("kind", ["Blocking", "Awaiting", *KINDS])
async def test_sources_keep_no_datadist(kind: str) -> None:
    """One that is dropped unclosed ends, and with it whatever waits."""
    async with linked("tcp") as pair:
        await both(pair)
        dd = await adt.DataDist(3, config=adt.Config(transports=("tcp",))).open()
        link = await dd.link(adt.ClusterInfo(OWNER, str(pair.owner.listen_address)))
        here = dd.cache_manager.register_blocks_cache(pattern(2, (8, 512), tensors=2 * LAYERS))
        await here.ready()
        while WHOLE.cache_key not in link.table:
            await asyncio.sleep(0.001)
        source, finish = pending(kind)
        task = dd.cache_manager.transfer_cache_async(here, source, [WHOLE], [0], [0], timeout=None)
        await landed(task, 1)
        alive = weakref.ref(dd)
        del link, here
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            del dd
            gc.collect()
        assert alive() is None
        assert [str(one.message) for one in warned] == ["unclosed DataDist of cluster 3"]
        (result,) = await task
        assert isinstance(result.error, adt.ClosedError)
        finish()
        await until(lambda: not watching())


SCRIPT = """
import asyncio, os, sys, threading, time
import numpy as np
import aiodatadist as adt

KEY = adt.BlocksCacheKey(1)
stuck = threading.Event()

class Stuck(adt.LayerSynchronizer):
    def synchronize_layer(self, layer, timeout):
        stuck.set()
        threading.Event().wait()

class Polite(adt.LayerSynchronizer):
    calls = 0
    free = threading.Event()
    def synchronize_layer(self, layer, timeout):
        Polite.calls += 1
        stuck.set()
        Polite.free.wait()
        return True

class Never:
    asked = 0
    def query(self):
        self.asked += 1
        return False
    synchronize = query

async def opened():
    owner = await adt.DataDist(1, listen="127.0.0.1:0").open()
    user = await adt.DataDist(2).open()
    there = owner.cache_manager.register_blocks_cache([np.zeros((4, 64)) for _ in range(4)], key=KEY)
    here = user.cache_manager.register_blocks_cache([np.zeros((4, 64)) for _ in range(4)])
    await there.ready(), await here.ready()
    link = await user.link(adt.ClusterInfo(1, owner.listen_address))
    return owner, user, here

def push(user, here, source):
    config = adt.TransferWithCacheKeyConfig(KEY)
    return user.cache_manager.transfer_cache_async(here, source, [config], [0], [0], timeout=None)
"""


def run(source: str) -> list[str]:
    """Run it in an interpreter of its own, which must end well and complain of nothing."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore::ResourceWarning", "-c", SCRIPT + source],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stderr) == (0, ""), ran
    return ran.stdout.split()


def test_a_stuck_synchronizer_does_not_hold_up_the_exit() -> None:
    said = run(
        """
async def main():
    owner, user, here = await opened()
    task = push(user, here, Stuck())
    await asyncio.to_thread(stuck.wait)
    task.cancel()
    await asyncio.wait([task])
    await user.aclose()
    await owner.aclose()
    print(task.cancelled(), [thread.daemon for thread in threading.enumerate() if thread.name == "aiodatadist-layers"])

asyncio.run(main())
"""
    )
    assert said == ["True", "[True]"]


def test_exit_with_sources_that_wait() -> None:
    said = run(
        """
async def main():
    global kept
    owner, user, here = await opened()
    events = [asyncio.Event(), threading.Event()], [Never(), Never()]
    kept = [owner, user, here, *(push(user, here, source) for source in (Stuck(), *events))]
    await asyncio.to_thread(stuck.wait)
    print("left")

asyncio.run(main())
"""
    )
    assert said == ["left"]


def test_sources_end_with_a_loop_that_was_closed_under_them() -> None:
    said = run(
        """
import gc
loop = asyncio.new_event_loop()
owner, user, here = loop.run_until_complete(opened())
never = Never()
class Waiting(adt.LayerSynchronizer):
    async def synchronize_layer(self, layer, timeout):
        await asyncio.Event().wait()
async def asked():
    others = [never, never], Waiting(), [asyncio.Event(), loop.create_future()]
    tasks = [push(user, here, source) for source in (Polite(), *others)]
    while not never.asked or not stuck.is_set():
        await asyncio.sleep(0.001)
    return tasks
tasks = loop.run_until_complete(asked())
loop.close()
del owner, user, here, tasks
gc.collect()
Polite.free.set()
while any(thread.name.startswith("aiodatadist") for thread in threading.enumerate()):
    gc.collect()
    time.sleep(0.01)
print(Polite.calls)
"""
    )
    assert said == ["1"]


def test_sources_are_inert_in_a_forked_child() -> None:
    said = run(
        """
import concurrent.futures, os
from aiodatadist import layers as sources

# A child of a process that has nothing open may open its own, though the thread that asks events is not there.
left = sources._Feed(2)
sources._watch.add(left, [(0, Never().query)])
assert sources._watch._thread.is_alive()
if os.fork() == 0:
    async def child():
        owner, user, here = await opened()
        device = Never()
        task = push(user, here, [device, device])
        while not device.asked:
            await asyncio.sleep(0.001)
        device.query = lambda: True
        task.cancel()
        await asyncio.wait([task])
        await user.aclose()
        await owner.aclose()
        print("anew", flush=True)
    asyncio.run(child())
    os._exit(0)
os.wait()
left.close()

async def main():
    owner, user, here = await opened()
    future, never = concurrent.futures.Future(), Never()
    tasks = [push(user, here, source) for source in (Polite(), [future, future], [never, never])]
    await asyncio.to_thread(stuck.wait)
    if os.fork() == 0:
        future.set_result(None)  # says nothing, and complains of nothing
        asked = never.asked
        time.sleep(0.05)
        assert never.asked == asked and threading.active_count() == 1
        try:
            push(user, here, Polite())
        except adt.ForkedError:
            print("inert", flush=True)
        os._exit(0)
    os.wait()
    asked = never.asked
    while never.asked == asked:
        await asyncio.sleep(0.001)
    never.query = lambda: True
    Polite.free.set()
    future.set_result(None)
    for task in tasks[:2]:
        print([one.error for one in await task], flush=True)
    tasks[2].cancel()
    await asyncio.wait(tasks[2:])
    await user.aclose()
    await owner.aclose()

asyncio.run(main())
"""
    )
    assert said == ["anew", "inert", "[None]", "[None]"]
