"""What a DataDist consists of while it is open, and how all of it ends.

`Center` owns engine, ring, node, tables, links and tasks. The `DataDist` that users hold is a face in front of it:
nothing in here refers to it strongly, so that one that is dropped unclosed is noticed, warned about and
stopped.

There are three ways to the end, and they meet in `_finish`, which runs once the native side is quiet:

* `aclose` is orderly: it waits for running transfers, unlinks, and waits until no peer can touch local
memory; * `abort` stops everything at once; `_finish` follows by itself as soon as the engine says that all is
quiet; * `stop_native` is for when no loop runs any more: it stops and joins the native side, and only that.
"""

from __future__ import annotations

import atexit
import enum
import errno
import ipaddress
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

from .. import _core
from .._loop import Deadline, Runtime, Tasks, Timer, at_fork_in_child, shielded
from ..errors import ClosedError, MemoryStillExposed, OutOfMemoryError, TransportError
from ..observe import Counters, PendingOperation, get_logger
from ..types import LinkStateChanged
from . import wire
from .events import EventHub, Inbox, Readers
from .handshake import Handshaker, Own, SessionDoor
from .hostproof import HostDoor
from .leases import LeaseBook
from .linking import LinkManager
from .operations import Operations, WaitingTransfers
from .peers import NativePeers
from .reception import Reception
from .table import LocalTable
from .waiting import Waiting

if TYPE_CHECKING:
    import asyncio

    from ..config import Config
    from ..types import Address, Event, Role

__all__ = ["Center", "State"]

_log = get_logger()

_RECHECK_SECONDS: Final = 0.05
_GRACE_SECONDS: Final = 0.5
_LEASE_EVENTS: Final = frozenset((_core.EVENT_LEASE_OVER, _core.EVENT_LEASE_ANSWER, _core.EVENT_LEASE_LOST))
_LISTEN_HINTS: Final = {
    errno.EADDRINUSE: "another process has the port: choose a free one, or port 0 for any",
    errno.EADDRNOTAVAIL: "the address is none of this host's: choose one of them, or 0.0.0.0 or [::] for all",
    errno.EAFNOSUPPORT: "this host has no IPv6: choose an IPv4 address",
    errno.EACCES: "ports below 1024 need a privilege: choose a higher one, or port 0 for any",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}

_centers: weakref.WeakSet[Center] = weakref.WeakSet()


_Rdma: TypeAlias = tuple[bool, str, int, str]
"""Whether RDMA is usable, the device as "name:port", the index of its address, and words."""


_Hixl: TypeAlias = tuple["_core.HixlEngine | None", str]
"""The engine, or None, and words."""


class State(enum.Enum):
    """States of a DataDist."""

    NEW = "not open yet"
    OPENING = "opening"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"
    FORKED = "inert in a forked child"


class Center:
    """An open DataDist, from opening to quiet.

    Parameters
    ----------
    cluster_id : int
    role : Role
    listen : Address or None
    config : Config
    make_runtime : callable
        Makes the `Runtime` of the running loop.
    on_closing : callable
        Called once, when the DataDist may no longer be used.
    on_cache_quiet : callable
        Called with the id of a closed cache that nothing can touch any more.
    exposed : callable
        Names the caches that peers may touch.
    """

    def __init__(
        self,
        cluster_id: int,
        role: Role,
        listen: Address | None,
        config: Config,
        make_runtime: Callable[[], Runtime],
        on_closing: Callable[[], None],
        on_cache_quiet: Callable[[int], None],
        exposed: Callable[[], tuple[str, ...]],
    ) -> None:
        self.state = State.NEW
        self.listen_address: Address | None = None
        self.cluster_id = cluster_id
        self.role = role
        self.config = config
        self.table = LocalTable()
        self.copied = Counters()
        self.thread_id = -1
        self._listen = listen
        self._make_runtime = make_runtime
        self._on_closing = on_closing
        self._on_cache_quiet = on_cache_quiet
        self._exposed = exposed
        self._built = False
        self._finish_when_quiet = False
        self._finishing = False
        self._tasks_over = False
        self._recheck: Timer | None = None
        self._root: asyncio.Task[None] | None = None

    # Opening. -----------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Start everything. Undone if it fails or is cancelled."""
        self.state = State.OPENING
        try:
            self.runtime = self._make_runtime()
            rdma = None
            if "verbs" in self.config.transports:
                rdma = await self.runtime.choose_rdma(self.config.rdma_devices, self.config.rdma_gid_index)
                self._check_opening()
            hixl = None
            if "hixl" in self.config.transports:
                listen = None if self._listen is None else self._listen.host
                hixl = await self.runtime.open_hixl(self.config, listen)
                self._check_opening()
            self._build(rdma, hixl)
            entered = self.runtime.future()
            self._root = self.runtime.root_task(self._run(entered), f"aiodatadist-{self.cluster_id}")
            self._root.add_done_callback(self._root_done)
            await entered
            if self._listen is not None:
                await self.start_listening(self._listen)
            self._check_opening()
        except BaseException:
            self.abort()
            with shielded(), Deadline(_GRACE_SECONDS):
                await self.wait_closed()
            raise
        self.state = State.OPEN

    def _check_opening(self) -> None:
        if self.state is not State.OPENING:
            raise ClosedError("the DataDist was closed while it was being opened")

    def _build(self, rdma: _Rdma | None, hixl: _Hixl | None) -> None:
        """Make all parts. None of them does anything before the task group is entered."""
        config = self.config
        runtime = self.runtime
        usable, unusable = _probe(runtime, config.transports, rdma, hixl)
        self.thread_id = threading.get_ident()
        try:
            self._engine, shared = runtime.acquire_engine(config.copy_threads, config.io_threads)
        except (RuntimeError, MemoryError, OSError) as why:
            raise OutOfMemoryError(
                f"cannot start the engine with {config.copy_threads} copy and {config.io_threads} io threads: {why}",
                hint="raise the limit of threads (ulimit -u, or the container's pids.max) or of open files (ulimit -n)",
            ) from why
        try:
            self._watch = runtime.ring(self._engine, config.inline_budget, shared=shared)
        except BaseException:
            self._engine.release()
            raise
        try:
            self.node = _core.Node(
                self._engine,
                self._watch.ring,
                self.cluster_id,
                self._on_event,
                drain_timeout=config.drain_timeout,
                heartbeat_limit=config.heartbeat_limit,
                inline_bytes=config.inline_bytes,
                populate_limit=config.populate_limit,
                rdma=_rdma_settings(config, rdma) if "verbs" in usable else None,
                hixl=None if hixl is None else hixl[0],
            )
        except BaseException:
            self._watch.release()
            self._engine.release()
            raise
        self.ring = self._watch.ring
        self._stop, self._over = runtime.event(), runtime.event()
        self._waiting = Waiting(runtime)
        self._tasks = Tasks()
        self.readers = Readers(self.node)
        self.events = EventHub(runtime, self.readers)
        self.inbox = Inbox(runtime, lambda cluster_id: self.links.notification_read(cluster_id))
        self.peers = NativePeers(runtime, self.events.publish)
        self.own = Own(
            cluster_id=self.cluster_id,
            incarnation=runtime.chance.randbytes(wire.ID_SIZE),
            role=self.role,
            config=config,
            usable=usable,
            unusable=unusable,
            secret=_core.Secret(),
        )
        self.operations = Operations(runtime, self._tasks)
        self.waiting_transfers = WaitingTransfers(runtime.now)
        sessions = SessionDoor(runtime)
        self._host_door = HostDoor(runtime, self._tasks, config.handshake_timeout)
        self.links = LinkManager(
            runtime,
            self.own,
            self.node,
            self.peers,
            self.table,
            self.inbox,
            self.operations,
            self._tasks,
            Handshaker(runtime, self.own, sessions, self._host_door),
            self._publish,
        )
        self.leases = LeaseBook(runtime, self.node, self.cluster_id, self.links.ready, self.events.publish)
        self._reception = Reception(runtime, self._tasks, config.handshake_timeout, sessions, self.links.serve)
        _centers.add(self)
        at_fork_in_child(self)
        self._built = True

    # Listening. ---------------------------------------------------------------------------------------------

    async def start_listening(self, address: Address) -> Address:
        """Listen, and no longer where it did before. If it cannot, nothing changes."""
        try:
            bound = await self._reception.listen(address)
        except OSError as why:
            raise self._cannot_listen(address, why) from why
        if bound == self.listen_address:
            return bound
        if "shm" in self.own.usable:
            try:
                self._host_door.open()
            except OSError as why:
                _log.warning("peers cannot prove the same host: no unix socket", error=str(why))
        self._listens_at(bound)
        if not ipaddress.ip_address(bound.host).is_loopback and self.config.cluster_key is None:
            _log.warning(
                "listening beyond this host without a cluster key: whoever reaches the port can link",
                cluster_id=self.cluster_id,
                address=str(bound),
            )
        return bound

    def _cannot_listen(self, address: Address, why: OSError) -> TransportError:
        hint = _LISTEN_HINTS.get(why.errno or 0, "choose another address")
        mine = self.listen_address
        if why.errno == errno.EADDRINUSE and mine is not None and mine.port == address.port:
            hint = f"this DataDist itself listens at {mine}: stop_listening() first"
        return TransportError(f"cannot listen on {address}: {why.strerror or why}", transport="tcp", hint=hint)

    def stop_listening(self) -> None:
        """Listen no more, for links and for proofs of the same host."""
        self._reception.stop()
        self._host_door.close()
        if self.listen_address is not None:
            self._listens_at(None)

    def _listens_at(self, address: Address | None) -> None:
        self.listen_address = address
        self.own.listen = () if address is None else (str(address),)
        self.links.tell_changes()

    def switch_role(self, role: Role) -> None:
        """Take another role, and tell the linked peers."""
        if role is not self.role:
            self.role = self.own.role = role
            self.links.tell_changes()

    # The root task. -----------------------------------------------------------------------------------------

    async def _run(self, entered: asyncio.Future[None]) -> None:
        """Hold the task group of this DataDist. Being cancelled is an abort."""
        try:
            async with self._tasks:
                if not entered.done():
                    entered.set_result(None)
                await self._stop.wait()
                self._tasks.cancel()
            self._tasks_over = True
            self._finish()
        except GeneratorExit:
            raise  # the loop is closed, and nothing in here can wait any more
        except BaseException as why:
            await self._run_ended(why)
            raise

    async def _run_ended(self, why: BaseException) -> None:
        """End in good order when the root task is cancelled from outside, as asyncio.run does at its end."""
        self._tasks_over = True
        unclosed = self.state is State.OPEN and not isinstance(why, Exception)
        if isinstance(why, Exception):
            _log.error("a DataDist failed", cluster_id=self.cluster_id, exc_info=why)
        self.abort()
        try:
            with shielded(), Deadline(self.config.drain_timeout + _GRACE_SECONDS):
                await self._over.wait()
        finally:
            if not self._over.is_set():
                self.stop_native()
            if unclosed:  # last, because warnings may be errors
                _warn_unclosed(self.cluster_id)

    def _root_done(self, root: asyncio.Task[None]) -> None:
        if not self._over.is_set():
            # It was cancelled before its first step, or gave up waiting for quiet.
            self._tasks_over = True
            self.abort()

    # Events of the engine. ----------------------------------------------------------------------------------

    def _on_event(
        self, kind: int, peer_id: int, token: int, status: int, cache_id: int, nbytes: int, opcode: int
    ) -> None:
        if kind == _core.EVENT_CACHE_QUIET:
            self._on_cache_quiet(token)
        elif kind in _LEASE_EVENTS:
            self.leases.on_event(kind, peer_id, token, status, nbytes)
        else:
            self.peers.on_event(kind, peer_id, token, status, cache_id, nbytes, opcode)

    def _publish(self, event: Event) -> None:
        """Publish what the links tell."""
        self.events.publish(event)
        if isinstance(event, LinkStateChanged):
            self.leases.link_changed(event.cluster_id)

    # Closing. -----------------------------------------------------------------------------------------------

    def _begin_closing(self) -> None:
        if self.state in (State.NEW, State.OPENING, State.OPEN):
            self.state = State.CLOSING
            self._on_closing()

    async def aclose(self, timeout: float | None) -> None:
        """Close in good order; see `DataDist.aclose`."""
        if self.state is State.NEW:
            self._begin_closing()
            self.state = State.CLOSED
            return
        if self.state in (State.CLOSED, State.FORKED):
            return
        if self.state is State.CLOSING:
            await self._closed_by_another(timeout)
            return
        self._begin_closing()
        try:
            with Deadline(timeout) as limit:
                self._reception.close()
                self.links.stop_linking()
                self.leases.begin_closing()
                # Counted, for the engine knows neither those that wait for their cache nor those still to be told.
                await self._until(
                    lambda: not self.node.pending() and not self.links.unended() and not self.copied.pending
                )
                await self.links.unlink_all()
                await self._until(self.node.quiet)
            if limit.expired:
                _log.info("closing took too long and goes on by force", cluster_id=self.cluster_id)
                self.abort()
                with Deadline(self.config.drain_timeout + _GRACE_SECONDS):
                    await self.wait_closed()
                if not self._over.is_set():
                    raise MemoryStillExposed(caches=self._exposed())
        except BaseException:
            self.abort()
            raise
        self._finish()
        await self.wait_closed()

    async def _closed_by_another(self, timeout: float | None) -> None:
        with Deadline(timeout) as limit:
            await self.wait_closed()
        if limit.expired:
            raise MemoryStillExposed(caches=self._exposed())

    def abort(self) -> None:
        """Stop everything at once; see `DataDist.abort`."""
        if self.state in (State.CLOSED, State.FORKED):
            return
        self._begin_closing()
        if not self._built:
            self.state = State.CLOSED
        elif not self._finish_when_quiet:
            self._finish_when_quiet = True
            self._reception.close()
            self.node.abort()  # before the links end, so that transfers end as closed here, not as a peer's loss
            self.links.end_all()
            self.operations.fail_all(lambda: ClosedError("the DataDist was closed"))
            self.waiting_transfers.end_all(lambda: ClosedError("the DataDist was closed"))
            self._watch.add_listener(self._nudge)
            self._schedule_recheck()
            self.runtime.call_soon(self._nudge)

    def _nudge(self) -> None:
        """Look again whether all is quiet; called after each batch of completions while closing."""
        self._waiting.wake()
        if self._finish_when_quiet and self.state is State.CLOSING and self.node.quiet():
            self._finish()

    async def _until(self, reached: Callable[[], bool]) -> None:
        """Wait until the engine's state is what is wanted, or an abort meanwhile has ended everything."""
        self._watch.add_listener(self._nudge)
        self._schedule_recheck()
        while self.state is State.CLOSING and not reached():
            await self._waiting.changed()

    def _schedule_recheck(self) -> None:
        # Completions nudge; this is for the end of a peer that the ring does not report.
        if self._recheck is None and self.state is State.CLOSING:
            self._recheck = self.runtime.call_later(_RECHECK_SECONDS, self._on_recheck)

    def _on_recheck(self) -> None:
        self._recheck = None
        self._nudge()
        self._schedule_recheck()

    def _finish(self) -> None:
        """Let go of everything, in two steps: the native side is quiet, then the tasks have ended.

        A task that is still being cancelled may speak to the engine, and even connect a peer once more.
        """
        if self.state is not State.CLOSING:
            return
        self._finish_when_quiet = True
        if not self._finishing:
            self._finishing = True
            self.operations.fail_all(lambda: ClosedError("the DataDist was closed"))
            self._stop.set()
        if not self._tasks_over or not self.node.quiet():
            return
        self.state = State.CLOSED
        if self._recheck is not None:
            self._recheck.cancel()
        self._watch.drain_all()  # the last completions may still lie there
        self._release()
        self.events.close()
        self.inbox.close()
        self._over.set()

    def _release(self) -> None:
        _centers.discard(self)
        self._host_door.close()
        self.leases.close()
        self.node.close()
        self._watch.remove_listener(self._nudge)
        self._watch.release()
        self._engine.release()
        self.table.clear()  # a closed DataDist that is still held must not hold library memory

    async def wait_closed(self) -> None:
        """Wait until nothing of this DataDist is left; see `DataDist.wait_closed`."""
        if not self._built or self.state is State.FORKED:
            return
        await self._over.wait()
        if self._root is not None:
            await self.runtime.until_done(self._root)

    # Without a loop. ----------------------------------------------------------------------------------------

    def stop_native(self) -> None:
        """Stop and join the native side without the loop: it is closed, or the interpreter ends."""
        if not self._built or self.state in (State.CLOSED, State.FORKED):
            return
        self._begin_closing()
        self.state = State.CLOSED
        self.node.abort()
        if self.runtime.closed:
            # The tasks of a closed loop may live on, and must not keep the caller's tensors.
            self.links.end_all()
        if not self.node.wait_quiet(self.config.drain_timeout + _GRACE_SECONDS):
            _log.warning("peers may still touch memory", cluster_id=self.cluster_id, caches=list(self._exposed()))
        self._release()

    def dropped(self) -> None:
        """Stop, because the user's DataDist was dropped unclosed. May be called in any thread."""
        if not self._built or self.state in (State.CLOSED, State.FORKED):
            return
        unclosed = self.state is State.OPEN
        if self.runtime.closed:
            self.stop_native()
        elif self.thread_id == threading.get_ident():
            self.abort()
        else:
            self.runtime.call_soon_threadsafe(self.abort)
        if unclosed:  # last, because warnings may be errors
            _warn_unclosed(self.cluster_id)

    def _after_fork_in_child(self) -> None:
        if self.state is State.CLOSED:
            return
        self.state = State.FORKED
        self._on_closing()

    # To look at. --------------------------------------------------------------------------------------------

    def rows(self) -> list[PendingOperation]:
        """Return the rows of `DataDist.dump`."""
        clusters = {peer.id: peer.cluster_id for peer in self.peers}
        rows = self.operations.rows() + self.leases.rows()
        for op, peer, _, opcode, stop, age, done, total, path, at_gate, landed, layers in self.node.pending():
            copying = path == "local"
            state = "draining" if stop else "waiting at its gate" if at_gate else "moving"
            if layers:
                state += f" with {landed} of {layers} layers landed"
            rows.append(
                PendingOperation(
                    id=op,
                    kind="copy" if copying else "pull" if opcode == _core.READ else "push",
                    peer=clusters.get(peer),
                    age=age,
                    state=state,
                    bytes_done=done,
                    bytes_total=total,
                    transport=None if copying else path.partition("-")[0] or None,
                )
            )
        return rows


def _rdma_settings(config: Config, rdma: _Rdma | None) -> tuple[str, int, int, int, int, int] | None:
    """Return what the engine is told of RDMA."""
    if rdma is None:
        return None
    _, device, gid_index, _ = rdma
    return (
        device,
        gid_index,
        config.rdma_traffic_class,
        config.rdma_service_level,
        config.rdma_timeout,
        config.rdma_retry_count,
    )


def _probe(
    runtime: Runtime, transports: tuple[str, ...], rdma: _Rdma | None, hixl: _Hixl | None
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return which transports work on this machine, and why the others do not."""
    found = {name: (usable, reason) for name, usable, reason in runtime.probe_transports(transports)}
    if rdma is not None:
        found["verbs"] = (rdma[0], rdma[3])
    if hixl is not None:
        found["hixl"] = (hixl[0] is not None, hixl[1])
    usable = tuple(name for name in transports if found.get(name, (False, ""))[0])
    unusable = {
        name: found.get(name, (False, "this version does not have it"))[1] for name in transports if name not in usable
    }
    if not usable:
        said = "; ".join(f"{name}: {why}" for name, why in unusable.items())
        raise TransportError(
            f"no transport of Config.transports works here ({said})",
            hint="see `aiodatadist doctor`" if "tcp" in transports else "add tcp to it",
        )
    return usable, unusable


def _warn_unclosed(cluster_id: int) -> None:
    warnings.warn(f"unclosed DataDist of cluster {cluster_id}", ResourceWarning, stacklevel=2)


def _stop_at_exit() -> None:
    # All are stopped before any warning, which may be an error.
    unclosed = [center for center in tuple(_centers) if center.state is State.OPEN]
    for center in tuple(_centers):
        center.stop_native()
    for center in unclosed:
        _warn_unclosed(center.cluster_id)


atexit.register(_stop_at_exit)
