"""`DataDist`: one node of the cluster, its links and its life."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Mapping
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, SupportsIndex

from . import _core
from ._loop import Runtime
from .cache import CacheManager
from .config import Config
from .control.center import Center, State
from .errors import (
    ArgumentError,
    ArgumentTypeError,
    ClosedError,
    ForkedError,
    WrongLoopError,
)
from .observe import PendingOperation
from .registry import DEFAULT_TIMEOUT, Timeout, seconds_of
from .types import Address, ClusterInfo, Role, as_integer, parse_address

if TYPE_CHECKING:
    from collections.abc import Callable

    from .control.events import EventStream, NotificationStream
    from .control.links import Link
    from .control.operations import Running
    from .control.table import LocalTable
    from .transfer import Transfer

__all__ = ["DataDist"]


class _Keep(enum.Enum):
    LISTENING = "as before"


_NOWHERE = -1  # no thread has this id


class DataDist:
    """One node: it links peers, and its caches move to and from theirs.

    Belongs to the event loop and the thread in which it was opened; several may live in one loop. Use it as
    ``async with DataDist(...) as dd:``, or `open` and `aclose` it. Making one starts nothing and needs no loop.

    Parameters
    ----------
    cluster_id : int
        0 to 2**64 - 1, unique among all that link each other.
    role : Role
        What this node is for. Peers see it; it restricts nothing.
    listen : str or pair, optional
        ``"host:port"`` or ``(host, port)`` where peers may link this node; port 0 takes any free one. ``0.0.0.0``
        is every IPv4 address of the host, ``[::]`` every address, IPv4 included. A name is the first of its
        addresses that can be had. Without it only this node can link others.
    config : Config, optional
        `Config.from_env()` where it is left out.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An argument cannot be used.
    ConfigError
        A variable of the environment cannot be used.

    Notes
    -----
    An unclosed DataDist is stopped, with a ResourceWarning, when it is collected, when asyncio.run ends, or
    at the interpreter's exit. In a forked child it is inert: every use raises `ForkedError`.
    """

    def __init__(
        self,
        cluster_id: SupportsIndex,
        role: Role = Role.MIX,
        *,
        listen: str | tuple[str, int] | None = None,
        config: Config | None = None,
        _make_runtime: Callable[[], Runtime] = Runtime,
    ) -> None:
        self.cluster_id: int = as_integer(cluster_id, "cluster_id")
        first_role = _role_of(role)
        if config is not None and not isinstance(config, Config):
            raise ArgumentTypeError(f"config must be a Config, got {type(config).__name__}")
        self._config = Config.from_env() if config is None else config
        address = None if listen is None else _listen_address(listen)
        self._thread_id = _NOWHERE
        self._links: Mapping[int, Link] = {}
        self._cache_manager: CacheManager | None = None
        face = weakref.ref(self)

        def on_closing() -> None:
            # From here on the fast paths fail, and the slow ones say why.
            if (dd := face()) is not None:
                dd._thread_id = _NOWHERE
                if dd._cache_manager is not None:
                    dd._cache_manager._close_short_way()

        def on_cache_quiet(cache_id: int) -> None:
            if (dd := face()) is not None and dd._cache_manager is not None:
                dd._cache_manager._on_cache_quiet(cache_id)

        def exposed() -> tuple[str, ...]:
            dd = face()
            if dd is None or dd._cache_manager is None:
                return ()
            return tuple(repr(cache) for cache in dd._cache_manager.caches.values() if cache.remote is not None)

        self._center = Center(
            self.cluster_id,
            first_role,
            address,
            self._config,
            _make_runtime,
            on_closing,
            on_cache_quiet,
            exposed,
        )

    def __repr__(self) -> str:
        state, address = self._center.state, self.listen_address
        where = f", listening on {address}" if state is State.OPEN and address is not None else ""
        return f"<DataDist {self.cluster_id}: {state.value}{where}>"

    # Life. --------------------------------------------------------------------------------------------------

    async def open(self) -> Self:
        """Start: engine, links, and listening if asked for. Undone if it fails or is cancelled.

        Returns
        -------
        DataDist
            This one.

        Raises
        ------
        ClosedError
            It was opened before. Make a new one instead.
        ForkedError
            This process was forked while its parent had one open.
        TransportError
            The address cannot be listened on, or no transport of the config works here.
        """
        if self._center.state is not State.NEW:
            raise ClosedError(f"this DataDist is {self._center.state.value}", hint="make a new one; each opens once")
        if _core.forked():
            raise ForkedError(
                "this process was forked while its parent had a DataDist open, whose native threads are not here",
                hint="start workers with spawn, or fork while none is open",
            )
        await self._center.open()
        self._thread_id = self._center.thread_id
        self._links = self._center.links.ready
        self._cache_manager = CacheManager(self)
        return self

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose(self._config.link_timeout)

    async def aclose(self, timeout: float | None = None) -> None:
        """Close in good order: no new work, running transfers end, peers are told, memory becomes quiet.

        Transfers of this DataDist run to their end; those that peers run on its memory end with an error there. Then
        the tensors of all caches are the caller's again.

        Parameters
        ----------
        timeout : float or None
            Seconds after which force replaces patience; None waits as long as it takes. Leaving ``async
            with`` uses ``Config.link_timeout``.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            The timeout cannot be used; nothing was closed.
        MemoryStillExposed
            Even force could not make sure that no peer touches the memory of the caches named: a process of
            this host is stopped, perhaps. Their tensors stay referenced, and `wait_closed` waits for the
            rest.

        Notes
        -----
        Cancelling it ends in `abort`. Closing again is no error, and waits for the closing that runs.
        """
        if self._center.state in (State.OPENING, State.OPEN, State.CLOSING):
            self._check_loop()
        await self._center.aclose(seconds_of(timeout, 0.0) or None)
        self._let_go()

    def abort(self) -> None:
        """Close at once, without waiting: transfers and links end, and peers see a closed link.

        Local memory is quiet when `wait_closed` returns, not before.
        """
        if self._center.state in (State.OPENING, State.OPEN, State.CLOSING):
            self._check_loop()
        self._center.abort()

    async def wait_closed(self) -> None:
        """Wait until the closing that was begun has ended, and no peer can touch local memory any more."""
        await self._center.wait_closed()
        self._let_go()

    def _let_go(self) -> None:
        """Give the tensors back: all is quiet."""
        if self._center.state is State.CLOSED and self._cache_manager is not None:
            for cache_id in self._cache_manager.caches:
                self._cache_manager._on_cache_quiet(cache_id)

    def __del__(self) -> None:
        center = getattr(self, "_center", None)
        if center is not None:
            center.dropped()

    def _check_loop(self) -> None:
        if not self._center.runtime.is_current():
            raise WrongLoopError(
                f"{self!r} was used outside the event loop and thread in which it was opened",
                hint="use loop.call_soon_threadsafe or asyncio.run_coroutine_threadsafe",
            )

    def _check_usable(self) -> None:
        """Raise what is wrong, if the DataDist cannot be used here and now."""
        state = self._center.state
        if state is State.OPEN:
            self._check_loop()
        elif state is State.FORKED:
            raise ForkedError(
                f"{self!r} belongs to the parent process", hint="start workers with spawn, or fork before opening"
            )
        else:
            hint = "use async with, or await open()" if state is State.NEW else None
            raise ClosedError(f"this DataDist is {state.value}", hint=hint)

    # What it consists of. -----------------------------------------------------------------------------------

    @property
    def role(self) -> Role:
        """What this node is for; see `switch_role`."""
        return self._center.role

    @property
    def listen_address(self) -> Address | None:
        """Host and port where it listens; None where it does not, or before `open`. After closing: where it did."""
        return self._center.listen_address

    @property
    def transports(self) -> Mapping[str, str]:
        """The transports of `Config.transports`: each with an empty text where it works here, or with why it does not.

        Raises
        ------
        ClosedError, ForkedError, WrongLoopError
            It is not open, or used from elsewhere.
        """
        self._check_usable()
        own = self._center.own
        return {name: own.unusable.get(name, "") for name in own.config.transports}

    @property
    def cache_manager(self) -> CacheManager:
        """Registers caches and moves blocks.

        Raises
        ------
        ClosedError
            The DataDist was not opened.
        """
        if self._cache_manager is None:
            raise ClosedError("this DataDist is not open yet", hint="use async with, or await open()")
        return self._cache_manager

    @property
    def links(self) -> Mapping[int, Link]:
        """The links that are ready, by cluster id: a view that changes."""
        return MappingProxyType(self._links)

    @property
    def _runtime(self) -> Runtime:
        return self._center.runtime

    @property
    def _node(self) -> _core.Node:
        return self._center.node

    @property
    def _ring(self) -> _core.Ring:
        return self._center.ring

    @property
    def _table(self) -> LocalTable:
        return self._center.table

    # Links. -------------------------------------------------------------------------------------------------

    def link(
        self, info: ClusterInfo, *, timeout: Timeout = DEFAULT_TIMEOUT, auto_relink: bool | None = None
    ) -> Transfer[Link]:
        """Link a peer, or return the link that exists.

        Parameters
        ----------
        info : ClusterInfo
            Who, and where it listens. Several addresses are tried in order, also all those that a name has. One
            that neither connects nor fails gets a quarter of a second before the next is tried beside it, and one that
            connects but does not answer a second.
        timeout : float or None, optional
            Seconds; omitted: ``Config.link_timeout``, None: no deadline.
        auto_relink : bool, optional
            True: once linked, link again in the background whenever the peer is lost, until it is there, one side
            unlinks, or either DataDist closes. Attempts come at growing, random intervals of up to 15 s, each with
            ``Config.link_timeout``, and show in `events` with their number. Nothing waits for them: without a link,
            transfers raise `NotLinkedError` at once, a `link` of your own tries at once, and a new link has a new
            epoch. False: no longer. Omitted: as it is.

        Returns
        -------
        Transfer
            Its result is the `Link`. This DataDist's own cluster id gives one that is ready and moves nothing. Callers
            that link the same peer at the same time share one handshake; cancelling one leaves the others.

        Raises
        ------
        ArgumentError
            No address is known, or ``auto_relink=True`` without one.
        ClosedError, WrongLoopError, ForkedError
            The DataDist cannot be used.

        Raises (when awaited)
        ---------------------
        LinkTimeout
            The deadline passed. The message says what it waited for.
        HandshakeError
            Another cluster id listens there, or versions or transports do not fit.
        LinkRefusedError
            The peer said no: another node with this cluster id is linked to it and alive, or it is closing.
        FileLimitError
            This process may open too few files for another link. The limit is named.
        LinkError, PeerLostError
            It cannot be reached, or was lost on the way. Each address is named with its reason.
        """
        self._check_usable()
        _check_info(info)
        if auto_relink is not None and not isinstance(auto_relink, bool):
            raise ArgumentTypeError(f"auto_relink must be a bool, got {type(auto_relink).__name__}")
        return self._center.links.link(info, self._seconds(timeout), auto_relink)

    def unlink(self, info: ClusterInfo, *, timeout: Timeout = DEFAULT_TIMEOUT, force: bool = False) -> Transfer[None]:
        """End the link to a peer, on both sides. Transfers on it end with a ClosedError or PeerLostError.

        Parameters
        ----------
        info : ClusterInfo
            Only the cluster id matters. One that is not linked is no error.
        timeout : float or None, optional
            Seconds; omitted: ``Config.link_timeout``, None: no deadline.
        force : bool
            Do not wait for the peer. It may touch local memory a moment longer: see `fence`.

        Returns
        -------
        Transfer
            Ends when the peer has unlinked, too, and can no longer touch local memory. The link is ended here
            at the call, or with the peer's answer, or at the deadline: in any case.

        Raises
        ------
        ClosedError, WrongLoopError, ForkedError
            The DataDist cannot be used.

        Raises (when awaited)
        ---------------------
        LinkTimeout
            The deadline passed. The link is ended here; the peer may not know, or may not be quiet.
        """
        self._check_usable()
        _check_info(info)
        return self._center.links.unlink(info.cluster_id, self._seconds(timeout), force=force)

    def fence(self, cluster_id: SupportsIndex, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Transfer[None]:
        """Wait until no operation that a peer has started before can still touch local memory.

        Parameters
        ----------
        cluster_id : int
            The peer.
        timeout : float or None, optional
            Seconds; omitted: ``Config.link_timeout``, None: no deadline.

        Returns
        -------
        Transfer
            Operations that the peer starts later are not waited for. Cancelling ends the wait, and nothing else.
            For a peer whose link is gone it ends when what is left of that link is quiet.

        Raises
        ------
        NotLinkedError
            That cluster id was never linked.
        ClosedError, WrongLoopError, ForkedError
            The DataDist cannot be used.

        Raises (when awaited)
        ---------------------
        LinkTimeout
            The deadline passed. Memory may still be touched.
        """
        self._check_usable()
        return self._center.links.fence(as_integer(cluster_id, "cluster_id"), self._seconds(timeout))

    # Role and listening. ------------------------------------------------------------------------------------

    def switch_role(
        self,
        role: Role,
        *,
        listen: str | tuple[str, int] | Literal[_Keep.LISTENING] | None = _Keep.LISTENING,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> Transfer[None]:
        """Take another role, and start, move or stop listening. Links go on, and linked peers are told.

        Parameters
        ----------
        role : Role
            The same one is no error.
        listen : str or pair or None, optional
            As in `start_listening`; None: stop. Omitted, listening stays as it is.
        timeout : float or None, optional
            Seconds; omitted: ``Config.link_timeout``, None: no deadline. Only resolving a name may take long.

        Returns
        -------
        Transfer
            When it is done, new links see the role. Peers see it in ``link.role`` and as a `PeerChanged` event.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            An argument cannot be used.
        ClosedError, WrongLoopError, ForkedError
            The DataDist cannot be used.

        Raises (when awaited)
        ---------------------
        TransportError, LinkTimeout
            As `start_listening`. Role and listening are as before.
        """
        self._check_usable()
        new = _role_of(role)
        address = None if listen is None or listen is _Keep.LISTENING else _listen_address(listen)
        center = self._center

        async def switch(running: Running) -> None:
            running.state = lambda: f"starting to listen on {address}"
            if address is not None:
                await center.start_listening(address)
            elif listen is None:
                center.stop_listening()
            center.switch_role(new)

        return center.operations.start("switch_role", self.cluster_id, self._seconds(timeout), switch)

    def start_listening(
        self, address: str | tuple[str, int], *, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> Transfer[Address]:
        """Listen for links, and no longer where it did before. Links go on, and linked peers are told.

        Parameters
        ----------
        address : str or pair
            As ``listen=`` of the constructor. Nothing happens where it listens there already; port 0 is any port.
        timeout : float or None, optional
            Seconds; omitted: ``Config.link_timeout``, None: no deadline. Only resolving a name may take long.

        Returns
        -------
        Transfer
            Its result is the address with its port. Handshakes under way at an old address may fail.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            The address cannot be used.
        ClosedError, WrongLoopError, ForkedError
            The DataDist cannot be used.

        Raises (when awaited)
        ---------------------
        TransportError
            The port is taken, or the address not to be had. Where it listened before it still does.
        LinkTimeout
            The deadline passed, likewise.
        """
        self._check_usable()
        wanted = _listen_address(address)
        center = self._center

        async def listen(running: Running) -> Address:
            running.state = lambda: f"starting to listen on {wanted}"
            return await center.start_listening(wanted)

        return center.operations.start("listen", self.cluster_id, self._seconds(timeout), listen)

    def stop_listening(self) -> Transfer[None]:
        """Stop listening, at once. Links go on, and linked peers are told. No error where it does not listen.

        Raises
        ------
        ClosedError, WrongLoopError, ForkedError
            The DataDist cannot be used.
        """
        self._check_usable()
        self._center.stop_listening()
        return self._center.operations.done(None)

    # Leases. ------------------------------------------------------------------------------------------------

    def adopt_lease(
        self, cluster_id: SupportsIndex, lease_id: SupportsIndex, *, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> Transfer[float]:
        """Adopt a lease that a peer holds for this node: its blocks stay until it is released here, or the link ends.

        The engine renews what is adopted, also while Python computes or the loop is blocked.

        Parameters
        ----------
        cluster_id : int
            The owner, linked.
        lease_id : int
            Its `Lease.id`, which the application brings here.
        timeout : float or None, optional
            Seconds; omitted: ``Config.link_timeout``, None: no deadline.

        Returns
        -------
        Transfer
            Its result is the TTL in seconds. From then on the blocks are held, until `release_lease` or a `LeaseLost`
            in `events`. Adopting twice is no error. If it is cancelled or late, the lease is given back as by
            `release_lease`, unless another call has adopted it.

        Raises
        ------
        NotLinkedError
            The owner is not linked.
        LeaseError
            The owner's version has no leases.
        BusyError
            65,536 leases of the peer are adopted.
        ArgumentError, ClosedError, WrongLoopError, ForkedError
            The call is wrong, or the DataDist cannot be used.

        Raises (when awaited)
        ---------------------
        LeaseError
            It is over, or was never held for this node.
        LinkTimeout
            The deadline passed.
        PeerLostError
            The link ended.
        """
        self._check_usable()
        cluster, lease = as_integer(cluster_id, "cluster_id"), as_integer(lease_id, "lease_id")
        return self._center.leases.adopt(cluster, lease, self._seconds(timeout))

    def release_lease(
        self, cluster_id: SupportsIndex, lease_id: SupportsIndex, *, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> Transfer[bool]:
        """Tell the owner of a lease that this node needs it no more, adopted or not.

        The owner is told at the call, and gives the blocks free once no operation of this node can touch them.

        Parameters
        ----------
        cluster_id : int
            The owner.
        lease_id : int
            Its `Lease.id`.
        timeout : float or None, optional
            Seconds; omitted: ``Config.link_timeout``, None: no deadline.

        Returns
        -------
        Transfer
            True: the lease was held until now, so what was pulled before is what it held. False: it was over before, or
            the owner is not linked and could not be asked; then the lease runs out by itself. Cancelling ends the wait,
            and nothing else.

        Raises
        ------
        ArgumentError, ClosedError, WrongLoopError, ForkedError
            The call is wrong, or the DataDist cannot be used.

        Raises (when awaited)
        ---------------------
        LinkTimeout
            The deadline passed.
        """
        self._check_usable()
        cluster, lease = as_integer(cluster_id, "cluster_id"), as_integer(lease_id, "lease_id")
        return self._center.leases.release_adopted(cluster, lease, self._seconds(timeout))

    def _seconds(self, timeout: Timeout) -> float | None:
        if timeout is DEFAULT_TIMEOUT:
            return self._config.link_timeout
        return seconds_of(timeout, 0.0) or None

    # What happens. ------------------------------------------------------------------------------------------

    def events(self) -> EventStream:
        """Return the events from now on, as an asynchronous iterator.

        Every reader gets all of them: `LinkStateChanged`, `PeerChanged`, `CacheAnnounced`, `CacheGone`,
        `TransferEnded`, `LeaseExpired`, `LeaseReleased`, `LeaseLost`, and `EventsLagged` where it was too slow. The
        iterator ends when the DataDist is closed. Dropping it ends the subscription; cancelling a reader loses no
        event.
        """
        self._check_usable()
        return self._center.events.stream()

    def notifications(self) -> NotificationStream:
        """Return what peers send with ``notify=``, as an asynchronous iterator of `Notification`.

        There is one inbox: readers compete, and each notification goes to one of them. None is dropped, also not
        by cancelling a reader; peers wait instead when ``Config.notify_credits`` of theirs are unread. The iterator
        ends when the DataDist is closed and all is read.
        """
        self._check_usable()
        from .control.events import NotificationStream

        return NotificationStream(self._center.inbox)

    def stats(self) -> dict[str, Any]:
        """Return counts, as plain values.

        Returns
        -------
        dict
            ``total``: counts and latencies of all transfers with peers (see `Counters`); ``links``: for each linked
            cluster id its state, epoch, path, number of known caches and counts; ``copies``: counts and
            latencies of copies between own caches, whose bytes count as pulled; ``pending``: operations that have not
            ended; ``unread``: notifications that wait; ``leases``: of this side the number ``held`` and ``ending``
            (ended, while their peer may still touch the blocks), the ``blocks`` and ``bytes`` of both, each block once,
            ``deferred_bytes`` (of the ending ones), ``next_expiry`` (seconds until the first ends if nobody renews it,
            or None) and how many ``ended``, by `LeaseEnd`; of peers' leases how many are ``adopted`` and were ``lost``,
            by `LeaseEnd`; ``rdma``: of the whole process, the memory ``registrations`` that exist, their
            ``registered_bytes``, how many were ``registrations_made`` and ``registrations_shared`` between caches, the
            ``queue_pairs`` that exist, and ``rebuilds``: how many were flushed and made anew; ``hixl``: of the whole
            process, the ``engines``, memory ``registrations``, their ``registered_bytes`` and the ``connections`` made
            from here that exist, how many of these were ended (``disconnects``), and of those, before all had drained
            (``forced``), the ``requests`` handed to HIXL, their ``failures``, and ``polls``: how often it was asked.
        """
        self._check_usable()
        return {
            "total": self._center.links.counted().as_dict(),
            "links": {
                cluster_id: {
                    "state": link.state.value,
                    "epoch": link.epoch,
                    "path": str(link.path),
                    "caches": len({entry.cache_id for entry in link.table.values()}),
                    "counters": link._counters.as_dict(),
                }
                for cluster_id, link in self._links.items()
            },
            "copies": self._center.copied.as_dict(),
            "pending": len(self.dump()),
            "unread": len(self._center.inbox),
            "leases": self._center.leases.stats(),
            "rdma": _core.rdma_stats(),
            "hixl": _core.hixl_stats(),
        }

    def dump(self) -> list[PendingOperation]:
        """Return the operations that have not ended: age, peer, state and bytes of each, a line in ``str()``."""
        self._check_usable()
        return self._center.rows() + self.cache_manager._rows()


def _role_of(role: Role) -> Role:
    try:
        return Role(role)
    except ValueError:
        raise ArgumentError(f"role={role!r} is unknown", hint="use a Role") from None


def _listen_address(address: str | tuple[str, int]) -> Address:
    return parse_address(address, "listen", port_zero=True)


def _check_info(info: ClusterInfo) -> None:
    if not isinstance(info, ClusterInfo):
        raise ArgumentTypeError(
            f"expected a ClusterInfo, got {type(info).__name__}", hint='ClusterInfo(1, "10.0.0.1:26000")'
        )
