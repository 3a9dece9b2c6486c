"""A virtual clock: an asyncio event loop whose time moves only when nothing is left to do.

A wait of 30 s costs no real time: when every task waits, the clock jumps to the next timer, or to the next thing that
happens in the simulated network. What runs in the loop takes no time, except that a turn in which something runs takes
a microsecond, so that one who polls with ``sleep(0)`` gets on as well.

asyncio only. Nothing in here depends on real time, on hash seeds or on addresses of objects: tasks and
futures are hashed by numbers that count up, because sets of them are walked by asyncio, anyio and tests.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import selectors
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol, TypeVar, TypeVarTuple

from ..errors import UsageError
from ..transfer import Transfer

__all__ = ["SimTask", "SimulationStuck", "VirtualLoop", "need_real_time", "run"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

START_NS: Final = 1_000_000_000
TURN_NS: Final = 1_000
_BUSY_TURNS: Final = 16
"""Turns with something to run after which the simulated network gets a turn."""


class SimulationStuck(AssertionError):
    """Nothing can ever happen again, or the simulation goes on for longer than it may."""


class World(Protocol):
    """What else happens on the loop's clock."""

    def settle(self) -> None:
        """Do what can be done now."""

    def next_due(self) -> int | None:
        """Return when there is something to do again, in ns; None if nothing is planned."""

    def advance(self, ns: int) -> None:
        """Follow the clock, which was moved."""

    def stuck(self) -> Exception:
        """Return what to raise: nothing can ever happen again, or all has gone on for too long."""


class Frozen(Protocol):
    """A simulated process: what its context runs waits while it is stopped."""

    stopped: bool
    parked: list[asyncio.Handle]


HOST: contextvars.ContextVar[Frozen | None] = contextvars.ContextVar("aiodatadist-host", default=None)
"""The simulated process that code belongs to."""


class SimTask(asyncio.Task[T]):
    """A task that is hashed by its number."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], *, loop: VirtualLoop, **options: Any) -> None:
        loop.numbers += 1
        self._number = loop.numbers  # first: it is put into a set as it is made
        super().__init__(coroutine, loop=loop, **options)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class SimFuture(asyncio.Future[T]):
    """A future that is hashed by a number, which it gets when it is first hashed."""

    def __hash__(self) -> int:
        return _hash(self)


def _hash(future: Any) -> int:
    loop = future.get_loop()
    if not isinstance(loop, VirtualLoop):
        return object.__hash__(future)
    number: int | None = getattr(future, "_number", None)
    if number is None:
        loop.numbers += 1
        future._number = number = loop.numbers
    return number


# From here, because a method of the class would cost each `asyncio.gather` of production some time, for nothing.
Transfer.__hash__ = _hash  # type: ignore[assignment]


class _Timer:
    """A timer of a process: fires now, or when the process goes on."""

    __slots__ = ("args", "callback", "handle", "host", "loop")

    def __init__(self, loop: VirtualLoop, host: Frozen, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.loop = loop
        self.host = host
        self.callback = callback
        self.args = args
        self.handle: asyncio.TimerHandle | None = None

    def __call__(self) -> None:
        if self.handle is not None and self.handle.cancelled():
            return
        if self.host.stopped:
            self.host.parked.append(asyncio.Handle(self, (), self.loop, contextvars.copy_context()))
        else:
            self.callback(*self.args)


class _Selector(selectors.EpollSelector):
    """Looks at descriptors without waiting for them, and moves the clock instead."""

    def __init__(self) -> None:
        super().__init__()
        self.loop: VirtualLoop | None = None
        self._order: dict[int, int] = {}
        self._registered = 0
        self.busy = 0

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = super().register(fileobj, events, data)
        self._registered += 1
        self._order[key.fd] = self._registered
        return key

    def _look(self) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if len(ready) > 1:
            ready.sort(key=lambda pair: self._order[pair[0].fd])
        return ready

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        loop = self.loop
        assert loop is not None
        loop.raise_failure()
        world = loop.world
        if timeout is not None and timeout <= 0:
            loop._advance(TURN_NS)
            self.busy += 1
            if world is not None and self.busy % _BUSY_TURNS == 0:
                world.settle()
                loop.raise_failure()
            return self._look()
        limit = None if timeout is None else loop.now_ns + math.ceil(timeout * 1e9)
        while True:
            loop.planned = False
            if world is not None:
                world.settle()
                loop.raise_failure()
            ready = self._look()
            if ready or loop.planned:
                return ready  # what was planned meanwhile may come before the end of this wait
            if limit is not None and loop.now_ns >= limit:
                return []
            due = world.next_due() if world is not None else None
            if due is None and limit is None:
                if world is not None:
                    raise world.stuck()
                if not loop.can_be_woken():
                    if ready := self._look():  # by a thread that has ended since
                        return ready
                    raise SimulationStuck(f"at {loop.time():.6f} s of virtual time: nothing more can happen")
                return super().select(None)
            until = min(time for time in (due, limit) if time is not None)
            if loop.end_ns is not None and until > loop.end_ns:
                raise world.stuck() if world is not None else SimulationStuck("the time of the simulation is over")
            loop._advance(max(until - loop.now_ns, 1))


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio event loop on a virtual clock.

    Threads have no place in it: `run_in_executor` (and so ``asyncio.to_thread``) calls the function at once, in the
    loop's thread.

    Attributes
    ----------
    now_ns : int
        The time, in ns.
    end_ns : int or None
        Going on beyond this time raises `SimulationStuck`.
    world : World or None
        The simulated network, if there is one.
    failure : BaseException or None
        Raised out of the loop in its next turn. For what fails where nobody looks at it: in a callback, or in code that
        catches exceptions.
    """

    def __init__(self) -> None:
        self.now_ns = START_NS
        self.end_ns: int | None = None
        self.world: World | None = None
        self.failure: BaseException | None = None
        self.planned = False  # something was planned since it was last set
        self.frozen = 0  # processes that are stopped
        self.numbers = 0
        self._looks = selector = _Selector()
        super().__init__(selector)
        selector.loop = self
        self._clock_resolution = 1e-9
        self.set_task_factory(_make_task)

    def can_be_woken(self) -> bool:
        """Whether something outside of the loop may still call into it: a descriptor, another thread or a signal."""
        descriptors = len(self._looks.get_map()) - 1  # without its own, by which it is woken
        return descriptors > 0 or threading.active_count() > 1 or bool(self._signal_handlers)  # type: ignore[attr-defined]

    def start_anew(self) -> None:
        """Set time and numbers to those of a new loop, unless something is planned: what comes is the same as there."""
        if any(not timer.cancelled() for timer in self._scheduled):  # type: ignore[attr-defined]
            return
        self.now_ns, self.numbers = START_NS, 0
        self._looks.busy = 0

    def raise_failure(self) -> None:
        """Raise `failure`, once."""
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure

    def _advance(self, ns: int) -> None:
        self.now_ns += ns
        if self.world is not None:
            self.world.advance(ns)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self.now_ns / 1e9

    virtual_time = time  # for those who do not trust other loops' time to be exact

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """Call in the next turn, or when the process goes on to which this belongs."""
        self.planned = True
        if self.frozen:
            place = contextvars.copy_context() if context is None else context
            host = place.get(HOST)
            if host is not None and host.stopped:
                handle = asyncio.Handle(callback, args, self, place)
                host.parked.append(handle)
                return handle
        return super().call_soon(callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """Call at a time, or when the process goes on to which this belongs."""
        self.planned = True
        host = HOST.get() if context is None else context.get(HOST)
        if host is None:
            return super().call_at(when, callback, *args, context=context)
        timer = _Timer(self, host, callback, args)
        timer.handle = handle = super().call_at(when, timer, context=context)
        return handle

    def run_in_executor(  # type: ignore[override]  # typeshed has it return a coroutine-like future of any executor
        self, executor: Any, function: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Call at once, in this thread."""
        future: asyncio.Future[T] = self.create_future()
        try:
            result = function(*args)
        except Exception as why:
            future.set_exception(why)
        else:
            future.set_result(result)
        return future

    def create_future(self) -> asyncio.Future[Any]:
        """Return a future that is hashed by its number."""
        return SimFuture(loop=self)

    def thaw(self, host: Frozen) -> None:
        """Let a process go on."""
        parked, host.parked[:] = list(host.parked), []
        for handle in parked:
            super().call_soon(_run_parked, handle)


def _run_parked(handle: asyncio.Handle) -> None:
    if not handle.cancelled():
        handle._run()


def _make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> SimTask[Any]:
    assert isinstance(loop, VirtualLoop)
    return SimTask(coroutine, loop=loop, **options)


def run(main: Coroutine[Any, Any, T], *, debug: bool | None = None) -> T:
    """Run a coroutine in a `VirtualLoop`, as `asyncio.run` does in a real one.

    Parameters
    ----------
    main : coroutine
    debug : bool, optional
        asyncio's debug mode.

    Returns
    -------
    object
        What `main` returns.
    """
    with asyncio.Runner(debug=debug, loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def need_real_time(what: str) -> None:
    """Refuse to start what does not follow a virtual clock. Raises UsageError."""
    if isinstance(asyncio.get_running_loop(), VirtualLoop):
        raise UsageError(
            f"{what} cannot be started on a virtual clock",
            hint="it needs real time: leave out the fixtures of the simulation in this test",
        )
