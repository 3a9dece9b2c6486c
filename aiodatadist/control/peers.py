"""The engine's side of each peer, from the connection until nothing of it can touch local memory any more.

A link ends at once; its native peer may need longer: a stopped process of the same host is quiet only when it
has answered or is gone. So the two have separate lives, and a fence waits for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from .. import _core
from ..errors import DataDistError, NativeStatus, PeerLostError, Status, error_from_native
from ..types import LayerArrived, TransferEnded
from .waiting import Waiting

if TYPE_CHECKING:
    import asyncio

    from .._loop import Runtime
    from .handshake import Session
    from .table import ImportKeys

__all__ = ["NativePeer", "NativePeers"]

_GONE: Final = frozenset({NativeStatus.PEER_LOST, NativeStatus.CLOSED})
_READ: Final = 1  # adt_opcode_t


class NativePeer:
    """One native peer.

    Attributes
    ----------
    cluster_id : int
    lost : bool
        The engine has given it up, or was told to.
    quiet : bool
        It can touch local memory no more.
    on_settled : callable
        Called when an endpoint of a transport moves bytes, with its name and nothing, or never will, and why.
    """

    def __init__(
        self,
        runtime: Runtime,
        native: _core.Peer,
        cluster_id: int,
        on_lost: Callable[[DataDistError, bool], None],
    ) -> None:
        self._runtime = runtime
        self._native = native
        self._on_lost = on_lost
        self.id: int = native.id
        self.cluster_id = cluster_id
        self.lost = False
        self.quiet = False
        self.on_settled: Callable[[str, str], None] = lambda name, reason: None
        self._disconnected = False
        self._pings: dict[int, asyncio.Future[bool]] = {}
        self._fences: dict[int, asyncio.Future[int]] = {}
        self._waiting = Waiting(runtime)
        # The loop receives the answers of short tcp requests itself: a hop to another thread costs more than they do.
        self._short = runtime.watch(fd, self._on_short) if (fd := native.loop_fd()) >= 0 else None

    def import_cache(self, cache_id: int, geometry: tuple[int, int, int, int], keys: ImportKeys) -> _core.RemoteCache:
        """Reach a cache of the peer. Raises DataDistError."""
        return self._native.import_cache(cache_id, geometry, list(keys))

    def adopt_lease(self, lease_id: int) -> int:
        """Adopt a lease of the peer; the token of the answer, or 0 if the link has ended."""
        return 0 if self._disconnected else self._native.adopt_lease(lease_id)

    def release_lease(self, lease_id: int) -> int:
        """Tell the peer to end a lease; the token of the answer, or 0 if the link has ended."""
        return 0 if self._disconnected else self._native.release_lease(lease_id)

    def _on_short(self) -> None:
        if not self._native.loop_progress():
            self._end_short()

    def _end_short(self) -> None:
        short, self._short = self._short, None
        if short is not None:
            short.close()

    def expose(self) -> bool:
        """Call before the peer is given a key. False: it is lost, and must not get one."""
        return not self._disconnected and self._native.expose()

    def disconnect(self, status: NativeStatus) -> None:
        """End operations with this status and start becoming quiet. Only the first call counts."""
        self._end_short()
        if not self._disconnected:
            self._disconnected = True
            self.lost = True
            self._native.disconnect(status)
            self._end_pings()

    async def answers(self) -> bool:
        """Ask the peer's engine whether it is still there; False when it is lost. May wait for ever."""
        if self.lost:
            return False
        token = self._native.ping()
        waiter: asyncio.Future[bool] = self._runtime.future()
        self._pings[token] = waiter
        try:
            return await waiter
        finally:
            self._pings.pop(token, None)

    async def fence(self) -> None:
        """Wait until no earlier operation of the peer can touch local memory; a lost one has to be quiet."""
        if not self.lost:
            token = self._native.fence()
            self._fences[token] = waiter = self._runtime.future()
            try:
                status = await waiter
            finally:
                self._fences.pop(token, None)
            if status == NativeStatus.OK:
                return
            if status not in _GONE:
                raise error_from_native(status, peer=self.cluster_id, detail="fence")
        await self.wait_quiet()

    async def wait_quiet(self) -> None:
        """Wait until the peer can touch local memory no more."""
        while not self.quiet:
            await self._waiting.changed()

    # What the engine reports.

    def _lost_event(self, status: int) -> None:
        if self._disconnected:
            return
        orderly = status == NativeStatus.CLOSED
        if orderly:
            error = PeerLostError("the peer closed the link", peer=self.cluster_id, hint="link it again")
        else:
            error = PeerLostError(
                "the peer died or fell silent", peer=self.cluster_id, hint="link it again when it is back"
            )
        self.lost = True
        self._end_short()
        self._on_lost(error, orderly)
        # The engine has failed all operations; this says that the link needs it no longer.
        self.disconnect(NativeStatus.CLOSED if orderly else NativeStatus.PEER_LOST)

    def _settled_event(self, transport: int) -> None:
        if not self._disconnected:
            name = _core.transport_names()[transport]
            self.on_settled(name, self._native.unsettled(name))

    def _quiet_event(self) -> None:
        self._end_short()
        self.lost = self.quiet = True
        self._end_pings()
        for fence in self._fences.values():
            if not fence.done():
                fence.set_result(NativeStatus.OK)
        self._waiting.wake()

    def _pong_event(self, token: int) -> None:
        waiter = self._pings.get(token)
        if waiter is not None and not waiter.done():
            waiter.set_result(True)

    def _fenced_event(self, token: int, status: int) -> None:
        waiter = self._fences.get(token)
        if waiter is not None and not waiter.done():
            waiter.set_result(status)

    def _end_pings(self) -> None:
        for waiter in self._pings.values():
            if not waiter.done():
                waiter.set_result(False)


class NativePeers:
    """All native peers of a DataDist that are not quiet yet, and the engine's events about them.

    Parameters
    ----------
    runtime : Runtime
    publish : callable
        Called with what peers have done to local memory: `TransferEnded`, `LayerArrived`.
    """

    def __init__(self, runtime: Runtime, publish: Callable[[TransferEnded | LayerArrived], None]) -> None:
        self._runtime = runtime
        self._publish = publish
        self._peers: dict[int, NativePeer] = {}

    def __iter__(self) -> Iterator[NativePeer]:
        return iter(tuple(self._peers.values()))

    def __len__(self) -> int:
        return len(self._peers)

    def of(self, cluster_id: int) -> list[NativePeer]:
        """Return the peers of this cluster id: the linked one, and earlier ones that are not quiet."""
        return [peer for peer in self if peer.cluster_id == cluster_id]

    def connect(self, node: _core.Node, session: Session, on_lost: Callable[[DataDistError, bool], None]) -> NativePeer:
        """Hand the connections of a handshake to the engine. Raises DataDistError.

        Parameters
        ----------
        node : _core.Node
        session : Session
        on_lost : callable
            Called once, with the error and whether the peer ended the link in an orderly way, unless this
            side disconnects first.
        """
        host = session.host
        pid, process_vm = (host.pid, host.process_vm) if host is not None else (0, False)
        engine_fd, data_fds = session.take_connections()
        # The engine owns the descriptors from here on, whatever comes of it.
        address, secret = host.secret if host is not None else (0, b"")
        native = node.connect(
            engine_fd,
            data_fds,
            pid=pid,
            pidfd=host.take_pidfd() if host is not None else -1,
            process_vm=process_vm,
            transports=list(session.transports),
            dialed=session.dialed,
            peer_limit=session.peer.heartbeat_limit,
            exposed=False,
            cluster_id=session.peer.cluster_id,
            secret_address=address,
            secret=secret,
            layers_told="layers" in session.peer.capabilities,
        )
        peer = NativePeer(self._runtime, native, session.peer.cluster_id, on_lost)
        self._peers[peer.id] = peer
        return peer

    def on_event(
        self, kind: int, peer_id: int, token: int, status: int, cache_id: int, nbytes: int, opcode: int
    ) -> None:
        """Take one event of the engine about a peer."""
        peer = self._peers.get(peer_id)
        if peer is None:
            return
        if kind == _core.EVENT_PONG:
            peer._pong_event(token)
        elif kind == _core.EVENT_FENCED:
            peer._fenced_event(token, status)
        elif kind == _core.EVENT_ENDPOINT_SETTLED:
            peer._settled_event(token)
        elif kind == _core.EVENT_PEER_LOST:
            peer._lost_event(status)
        elif kind == _core.EVENT_PEER_QUIET:
            del self._peers[peer_id]
            peer._quiet_event()
        elif kind == _core.EVENT_LAYER_ARRIVED:
            self._publish(LayerArrived(peer.cluster_id, cache_id, token, nbytes, layers_left=status))
        elif kind == _core.EVENT_TRANSFER_ENDED:
            error = error_from_native(status, peer=peer.cluster_id)
            self._publish(
                TransferEnded(
                    cluster_id=peer.cluster_id,
                    cache_id=cache_id,
                    op_id=token,
                    kind="pull" if opcode == _READ else "push",
                    status=Status(error.status),
                    bytes_done=nbytes,
                )
            )
