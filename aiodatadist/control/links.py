"""One link: from the connections of a finished handshake to its end.

A link exists for one epoch. It starts in `LinkState.LINKING`, exchanges cache tables, is `READY` once both
sides have said so, and ends `CLOSED` (asked for by either side) or `BROKEN` (everything else). Linking the
same peer again makes a new `Link`, so that nothing of an old epoch can be mistaken for the new one.

`Link._end` is the one way out. It does not wait, may be called at any moment, and leaves nothing behind:
table, notifications, control stream, unix channel and tasks end with it, and the engine is told. Only the
native peer lives on until it is quiet (`peers.NativePeer`).
"""

from __future__ import annotations

import copy
import os
import struct
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

from .. import _core
from .._loop import Runtime, Tasks, close_all
from ..errors import (
    ArgumentError,
    DataDistError,
    InternalError,
    LinkError,
    NativeStatus,
    PeerLostError,
    ProtocolError,
    TransportUnavailable,
)
from ..keys import CacheKey, Key
from ..observe import Counters, get_logger
from ..types import CacheAnnounced, CacheGone, Event, LinkPath, LinkState, Notification, PeerChanged, Role
from . import wire
from .handshake import refusal_error
from .peers import NativePeer, NativePeers
from .table import (
    DEVICE_TRANSPORTS,
    Delta,
    LocalRecord,
    LocalTable,
    RemoteEntry,
    RemoteTable,
    wire_geometry,
    wire_slots,
)
from .waiting import Waiting

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable, Mapping

    from .events import Inbox
    from .handshake import Own, Session

__all__ = ["Link", "LinkOwner", "copy_error"]

_log = get_logger()

_SETTLING: Final = ("verbs", "hixl")
"""Transports of which it is known only after the handshake whether they move bytes on a link."""

_REFUSED: Final = "HIXL does not connect with it; over RoCE it must be of aclrtMallocHost"

_UNSENT_MOST: Final = 256 * 1024
"""Bytes of control messages that wait for room before nothing more is put in front of them."""
_NOTIFY_OVERHEAD: Final = 64
"""Bytes of a message around its notification, at most."""
_ANNOUNCE_OVERHEAD: Final = 2048
"""Bytes of an announcement around transports' keys and the keys of slots, at most."""
_SLOTS_MOST: Final = 4096
"""Slots that one message names as gone."""
_WORK_SECONDS: Final = 0.001
"""Handling received messages yields to the loop after so much time."""


def copy_error(error: DataDistError) -> DataDistError:
    """Return a copy with the same cause: one exception raised in several tasks would mix their tracebacks."""
    other = copy.copy(error)
    other.__cause__ = error.__cause__
    return other


class LinkOwner(Protocol):
    """What a link needs from the DataDist it belongs to."""

    runtime: Runtime
    own: Own
    node: _core.Node
    peers: NativePeers
    table: LocalTable
    inbox: Inbox

    def link_changed(self, link: Link, old: LinkState) -> None:
        """Take note that the state of the link is another one."""

    def link_over(self, link: Link) -> None:
        """Take note that nothing but the native peer is left of the link."""

    def publish(self, event: Event) -> None:
        """Tell the readers of events."""


class Link(_core.HasTable):
    """A link to a peer, valid for one epoch.

    Attributes
    ----------
    cluster_id : int
        The peer.
    state : LinkState
    epoch : int
        Grows with each link to the same peer.
    path : LinkPath
        Which transport the link uses, and why no other.
    role : Role or None
        What the peer says it is for; None if this version does not know it. Follows its `switch_role`.
    peer_listens_at : tuple of str
        Addresses that the peer names; empty while it does not listen.
    table : dict
        The peer's caches by key. Empty when the link has ended.
    slots : dict
        Entry and batch slot of each key that names a request or a prefix. Empty when the link has ended.
    error : DataDistError or None
        Why the link ended.
    notify_max_bytes : int
        Largest notification that the peer accepts.
    """

    def __init__(self, owner: LinkOwner, session: Session, epoch: int, counters: Counters, changes: int) -> None:
        peer = session.peer
        self.cluster_id = peer.cluster_id
        self.state = LinkState.LINKING
        self.epoch = epoch
        self._path = session.path(owner.own)
        self.role = _role(peer.role)
        self.peer_listens_at = tuple(peer.listen)
        self.error: DataDistError | None = None
        # The peer's own numbers need not fit each other.
        self.notify_max_bytes = min(peer.notify_max_bytes, peer.max_message - _NOTIFY_OVERHEAD)
        self._incarnation = peer.incarnation
        self._counters = counters
        self._owner = owner
        self._runtime = owner.runtime
        self._session = session
        self._channel = session.channel
        self._channel.peer = self.cluster_id
        self._tasks: Tasks | None = None
        self._wake = owner.runtime.event()
        self._wake.set()
        self._waiting = Waiting(owner.runtime)
        self._unlinking = False
        self._changes_told = changes
        self._attached = session.peer_attached
        self._table_told = False
        self._table_known = False
        self._peer_ready = False
        self._credits = peer.notify_credits
        self._granted = session.granted
        self._owed = 0
        self._notifications: deque[tuple[bytes, asyncio.Future[None]]] = deque()
        # The engine first: from here on the peer's operations may arrive, and its loss is noticed.
        self._native: NativePeer = owner.peers.connect(owner.node, session, self._peer_lost)
        self._channel.send(wire.Attached())
        # These connect by way of the engines, and only then it is known whether bytes arrive.
        self._settling = {name for name in session.transports if name in _SETTLING}
        self._settled_badly: dict[str, str] = {}
        self._peer_settling = bool(self._settling)
        self._native.on_settled = self._endpoint_settled
        self._feed = owner.table.feed(self._wake.set)
        self._remote = RemoteTable(self, self.cluster_id, self._native.import_cache)
        self.table = self._remote.by_key
        self.slots: dict[CacheKey, tuple[RemoteEntry, int]] = self._remote.by_slot_key
        self._pulled: dict[tuple[int, int, int, int], None] = {}

    def __repr__(self) -> str:
        return f"<Link to cluster {self.cluster_id}: {self.state}, epoch {self.epoch}, {self.path.transport}>"

    @property
    def _stage(self) -> str:
        """What the link does or waits for."""
        if self._unlinking and self.error is None:
            return "waiting for the peer to unlink"
        if self.error is not None and not self._native.quiet:
            return "waiting until the peer can no longer touch local memory"
        if self.state is not LinkState.LINKING:
            return self.state.value
        if not self._attached:
            return "waiting for the peer's engine"
        if self._settling or self._peer_settling:
            return "waiting until it is known which transports move bytes"
        return "waiting for the peer to be ready" if self._table_known else "exchanging cache tables"

    # Life. --------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Serve the link until it ends."""
        try:
            async with Tasks() as tasks:
                self._tasks = tasks
                if self.error is not None:
                    return
                tasks.start(self._guarded, self._write, name=f"aiodatadist-write-{self.cluster_id}")
                tasks.start(self._guarded, self._read, name=f"aiodatadist-read-{self.cluster_id}")
        finally:
            self._tasks = None
            self._end(LinkError("the link was given up", peer=self.cluster_id), LinkState.CLOSED)

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        """Have every failure of a task end the link, with a typed error."""
        try:
            await work()
        except DataDistError as why:
            self._end(why)
        except OSError as why:
            lost = PeerLostError(f"the control connection broke: {why.strerror or why}", peer=self.cluster_id)
            lost.__cause__ = why
            self._end(lost)
        except Exception as why:
            _log.exception("a link failed", cluster_id=self.cluster_id)
            fault = InternalError(f"the link failed: {why!r}", peer=self.cluster_id)
            fault.__cause__ = why
            self._end(fault)

    def _end(self, error: DataDistError, state: LinkState = LinkState.BROKEN) -> None:
        """End the link at once. Only the first call counts.

        Parameters
        ----------
        error : DataDistError
            Why; kept as `error` and given to everybody who waits for the link.
        state : LinkState
            ``BROKEN`` or ``CLOSED``.
        """
        if self.error is not None:
            return
        if self._unlinking:
            error = self._unlinked()  # however the peer's side of it ended
        elif error.peer is None:
            error.peer = self.cluster_id
        self.error = error
        self._change(LinkState.CLOSED if self._unlinking else state)
        self._feed.close()
        gone = self._remote.clear()
        self._session.close()
        orderly = self.state is LinkState.CLOSED
        self._native.disconnect(NativeStatus.CLOSED if orderly else NativeStatus.PEER_LOST)
        if self._runtime.closed:
            return  # a closed loop has nobody left to tell
        if self._tasks is not None:
            self._tasks.cancel()
        notifications, self._notifications = self._notifications, deque()
        for _, told in notifications:
            _fail(told, error)
        self._waiting.wake()
        for entry in gone:
            self._owner.publish(CacheGone(self.cluster_id, entry.cache_id))
        self._owner.link_over(self)

    def _change(self, state: LinkState) -> None:
        old, self.state = self.state, state
        if old is not state and not self._runtime.closed:
            self._owner.link_changed(self, old)

    def _peer_lost(self, error: DataDistError, orderly: bool) -> None:
        self._end(error, LinkState.CLOSED if orderly else LinkState.BROKEN)

    @property
    def path(self) -> LinkPath:
        """Which transports move which memory of this link, and why no others."""
        if "hixl" not in self._session.transports or not self._owner.node.hixl_refused():
            return self._path
        others = [name for name in self._session.transports if name not in DEVICE_TRANSPORTS]
        return LinkPath(
            self._path.transport,
            {**self._path.memory, "refused by hixl": others[0] if others else "none"},
            {**self._path.reasons, "hixl for some host memory": _REFUSED},
        )

    async def _until_ready(self) -> None:
        """Wait until the link is ready. Raises why it is not, if it ended instead."""
        while self.state is LinkState.LINKING:
            await self._waiting.changed()
        if self.error is not None:
            raise copy_error(self.error)

    async def _until_over(self) -> None:
        """Wait until the link has ended."""
        while self.error is None:
            await self._waiting.changed()

    def _check_ready(self) -> None:
        if self.state is LinkState.LINKING and self._table_known and self._peer_ready:
            # What was read while the link was made has to be granted, too.
            unread = self._owner.inbox.unread(self.cluster_id)
            self._owed = max(0, self._owner.own.config.notify_credits - self._granted - unread)
            self._change(LinkState.READY)
            self._waiting.wake()
            self._wake.set()

    async def _answers(self) -> bool:
        """Ask the peer's engine whether it still has this link. May wait for ever."""
        return await self._native.answers()

    async def _unlink(self, reason: str = "") -> None:
        """Tell the peer, wait until it has ended the link as well, and until it is quiet.

        The caller limits the time. The link takes no new work from the call on, and is ended here whatever
        happens.
        """
        if self.error is None:
            try:
                self._say_unlink(reason)
                await self._until_over()
            finally:
                self._end(self._unlinked(), LinkState.CLOSED)
        await self._native.wait_quiet()

    def _unlink_now(self) -> None:
        """Tell the peer, as far as that goes without waiting, and end the link here."""
        if self.error is None:
            self._say_unlink("")
            self._end(self._unlinked(), LinkState.CLOSED)

    def _say_unlink(self, reason: str) -> None:
        if not self._unlinking:
            if self.state is LinkState.READY:
                self._send_pulled()  # or the owner would keep for ever what nobody will pull again
            self._unlinking = True
            self._change(LinkState.CLOSED)
            self._channel.send(wire.Unlink(reason=reason[:1000]))

    def _unlinked(self) -> LinkError:
        return LinkError("the link was unlinked", peer=self.cluster_id, hint="link it again")

    # Transports. --------------------------------------------------------------------------------------------

    def _endpoint_settled(self, name: str, reason: str) -> None:
        """Take note that a transport moves bytes from here, or, if there is a reason, does not."""
        if name not in self._settling or self.error is not None:
            return
        self._settling.remove(name)
        if reason:
            self._settled_badly[name] = reason[:1000]
        if not self._settling:
            self._channel.send(wire.Settled(failed=self._settled_badly))
            self._drop(self._settled_badly, "")

    def _drop(self, failed: Mapping[str, str], who: str) -> None:
        """Go on without transports that do not work, as long as there is another."""
        for name, reason in failed.items():
            self._session.drop(name, f"{who}{reason}")
        if not self._session.transports:
            name, reason = next(iter(self._session.dropped.items()))
            self._end(TransportUnavailable(transport=name, reason=reason))
            return
        self._path = self._session.path(self._owner.own)
        self._wake.set()

    # Reading. -----------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        began = self._runtime.now()
        while True:
            message = await self._channel.receive()
            if message is None:
                raise PeerLostError("the peer closed the control connection", hint="link it again")
            self._handle(message)
            if self.error is not None:
                return
            if self._runtime.now() - began > _WORK_SECONDS:
                await self._runtime.sleep(0)
                began = self._runtime.now()

    def _handle(self, message: wire.AnyMessage) -> None:
        match message:
            case wire.Unlink():
                self._on_unlink(message)
            case wire.UnlinkAck() if self._unlinking:
                self._end(self._unlinked())
            case _ if self._unlinking:
                pass  # sent before the peer knew
            case wire.Attached() if not self._attached:
                self._attached = True
                self._wake.set()
            case wire.Refused() if not self._attached:
                raise refusal_error(message.kind, message.reason, message.status, self.cluster_id)
            case _ if not self._attached:
                raise ProtocolError(f"the peer sent {type(message).__name__} before its engine was there")
            case wire.Settled() if self._peer_settling:
                self._peer_settling = False
                self._drop({name: why for name, why in message.failed.items() if name in _SETTLING}, "the peer: ")
            case _ if self._peer_settling:
                raise ProtocolError(f"the peer sent {type(message).__name__} before it had said what moves bytes")
            case wire.Notify() if self._peer_ready:
                self._on_notify(message)
            case wire.NotifyCredit() if self._peer_ready:
                self._credits += message.count
                self._wake.set()
            case wire.CacheAnnounce():
                self._on_announce(message)
            case wire.Changed() if self._peer_ready:
                self._on_changed(message)
            case wire.CacheWithdraw():
                entry = self._remote.withdraw(message)
                self._owner.publish(CacheGone(self.cluster_id, entry.cache_id))
            case wire.SlotsGone():
                self._remote.slots_gone(message)
            case wire.SlotPulled() if self._peer_ready:
                self._owner.table.on_pulled(message.cache_id, message.slot, message.tensor, message.count)
            case wire.TableEnd() if not self._table_known:
                self._table_known = True
                self._channel.send(wire.Ready())
                self._check_ready()
            case wire.Ready() if not self._peer_ready:
                self._peer_ready = True
                self._check_ready()
            case _:
                raise ProtocolError(f"the peer sent {type(message).__name__} out of turn")

    def _on_announce(self, message: wire.CacheAnnounce) -> None:
        host, transports = self._session.host, self._session.transports
        keys: list[tuple[str, bytes, int]] = []
        fds: list[int] = []
        try:
            for key in message.keys:
                fd = -1
                if key.fd:
                    if host is None:
                        raise ProtocolError("the peer named a descriptor on a link without shm")
                    fd = host.receive_fd(key.fd)
                    fds.append(fd)
                if key.transport in transports:
                    keys.append((key.transport, key.data, fd))
            keys.sort(key=lambda key: transports.index(key[0]))
            entry = self._remote.announce(message, keys)
        finally:
            close_all(fds)
        if entry.error is not None:
            _log.warning(
                "a cache of the peer cannot be reached",
                cluster_id=self.cluster_id,
                cache_id=entry.cache_id,
                error=str(entry.error),
            )
        self._owner.publish(CacheAnnounced(self.cluster_id, entry.cache_id, entry.key, entry.geometry))

    def _on_changed(self, message: wire.Changed) -> None:
        role, listens_at = _role(message.role), tuple(message.listen)
        if (role, listens_at) != (self.role, self.peer_listens_at):
            self.role, self.peer_listens_at = role, listens_at
            self._owner.publish(PeerChanged(self.cluster_id, role, listens_at))

    def _on_notify(self, message: wire.Notify) -> None:
        if self._granted <= 0:
            raise ProtocolError("the peer sent a notification without a credit")
        most = self._owner.own.config.notify_max_bytes
        if len(message.payload) > most:
            raise ProtocolError(f"the peer sent a notification of {len(message.payload)} bytes, above {most}")
        self._granted -= 1
        self._owner.inbox.put(Notification(self.cluster_id, message.payload))

    def _on_unlink(self, message: wire.Unlink) -> None:
        hint = "link it again"
        reason = f": {message.reason}" if message.reason else ""
        error = LinkError(f"the peer unlinked{reason}", peer=self.cluster_id, hint=hint)
        # The peer sends nothing after Unlink, so that closing with the answer just sent loses nothing.
        self._channel.send(wire.UnlinkAck())
        self._end(error, LinkState.CLOSED)

    # Writing. -----------------------------------------------------------------------------------------------

    async def _write(self) -> None:
        began = self._runtime.now()
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._attached and not (self._settling or self._peer_settling or self._unlinking):
                # Nothing is put in front of a slow peer beyond this; what waits is bounded by tables and
                # credits.
                await self._channel.stream.flush(_UNSENT_MOST)
                if not await self._write_one():
                    break
                if self._runtime.now() - began > _WORK_SECONDS:
                    await self._runtime.sleep(0)
                    began = self._runtime.now()

    async def _write_one(self) -> bool:
        """Send one message; False when there is none."""
        delta = self._feed.take()
        if delta is not None:
            await self._send_delta(delta)
            return True
        if not self._table_told:
            self._table_told = True
            self._channel.send(wire.TableEnd(version=self._feed.version))
            return True
        if self.state is not LinkState.READY:
            return False
        own = self._owner.own
        if self._changes_told != own.changes:
            self._changes_told = own.changes
            self._channel.send(wire.Changed(role=int(own.role), listen=list(own.listen)))
            return True
        if self._owed >= max(1, self._owner.own.config.notify_credits // 2):
            owed, self._owed = self._owed, 0
            self._granted += owed
            self._channel.send(wire.NotifyCredit(count=owed))
            return True
        if self._pulled:
            self._send_pulled()
            return True
        while self._notifications and self._credits:
            payload, told = self._notifications.popleft()
            if not told.done():
                self._send_notification(payload)
                told.set_result(None)
                return True
        return False

    def _export(self, record: LocalRecord) -> list[tuple[str, bytes, int]]:
        """Return the keys of a cache for this peer, without those that are too long for it."""
        most = min(wire.KEY_MAX_BYTES, self._channel.send_limit // 2)
        found = []
        for key in record.native.export_keys():
            if key[0] not in self._session.transports:
                continue
            if len(key[1]) <= most:
                found.append(key)
                continue
            _log.warning(
                "a cache has too many tensors to be shared over a transport",
                cluster_id=self.cluster_id,
                cache_id=record.cache_id,
                transport=key[0],
                tensors=record.geometry.num_tensors,
            )
        return found

    async def _send_delta(self, delta: Delta) -> None:
        record = delta.record
        if record is None:
            self._channel.send(wire.CacheWithdraw(version=delta.version, cache_id=delta.cache_id))
            return
        if delta.gone is not None:
            for at in range(0, len(delta.gone), _SLOTS_MOST):
                slots = delta.gone[at : at + _SLOTS_MOST]
                self._channel.send(wire.SlotsGone(version=delta.version, cache_id=delta.cache_id, slots=slots))
            return
        exported: list[wire.ExportedKey] = []
        copies: list[int] = []
        try:
            found = self._export(record)
            if not self._native.expose():
                raise PeerLostError("the peer was lost", hint="link it again")
            # Copies, because the cache may be closed while the unix connection has no room.
            for i, (transport, data, fd) in enumerate(found):
                if fd >= 0:
                    copies.append(os.dup(fd))
                    found[i] = (transport, data, copies[-1])
            for transport, data, fd in found:
                number = 0
                if fd >= 0:
                    if self._session.host is None:
                        continue
                    number = await self._session.host.send_fd(fd)
                exported.append(wire.ExportedKey(transport=transport, data=data, fd=number))
        except PeerLostError:  # which is an OSError, too
            raise
        except OSError as why:
            # Without descriptors for it the cache is still reachable over the other transports.
            _log.warning(
                "cannot share the memory of a cache with a peer of this host",
                cluster_id=self.cluster_id,
                cache_id=delta.cache_id,
                error=str(why),
            )
            exported += [
                wire.ExportedKey(transport=transport, data=data)
                for transport, data, fd in found
                if fd < 0 and transport not in {key.transport for key in exported}
            ]
        finally:
            close_all(copies)
        if self._unlinking:
            return  # nothing follows Unlink
        taken = sum(len(key.data) for key in exported)
        addresses = self._addresses_that_fit(record, taken)
        self._channel.send(
            wire.CacheAnnounce(
                version=delta.version,
                cache_id=delta.cache_id,
                model_id=record.key.model_id if record.key is not None else None,
                access=record.access,
                geometry=wire_geometry(record.geometry),
                keys=exported,
                slots=self._slots_that_fit(record, taken + len(addresses)),
                counted=record.counted,
                addresses=addresses,
            )
        )

    def _addresses_that_fit(self, record: LocalRecord, taken: int) -> bytes:
        """Return the addresses of a cache that peers may write, if an announcement has room for them."""
        if record.access != "rw" or "layers" not in self._session.peer.capabilities:
            return b""
        packed = struct.pack(f"<{len(record.addresses)}Q", *record.addresses)
        fits = len(packed) <= min(wire.KEY_MAX_BYTES, self._channel.send_limit - taken - _ANNOUNCE_OVERHEAD)
        return packed if fits else b""

    def _slots_that_fit(self, record: LocalRecord, taken: int) -> list[wire.SlotKey]:
        """Return the keys of slots for an announcement, of which `taken` bytes are used already."""
        slots = wire_slots(record.slots)
        most = max(0, self._channel.send_limit - taken - _ANNOUNCE_OVERHEAD) // wire.SLOT_KEY_MAX_BYTES
        if len(slots) > most:
            _log.warning(
                "a cache has more keys than the peer takes in one message; it finds only the first",
                cluster_id=self.cluster_id,
                cache_id=record.cache_id,
                keys=len(slots),
                told=most,
                hint="raise control_max_bytes at the peer",
            )
        return slots[:most]

    def _tell_changes(self) -> None:
        """Tell the peer of another role or address, when there is room."""
        self._wake.set()

    # Caches that the peer has not announced yet. ------------------------------------------------------------

    def _wait_for_key(self, key: Key) -> asyncio.Future[None]:
        """Return a future that is done when the peer announces a cache under this key, or the link has ended.

        Cancelling it ends the wait.
        """
        announced = self._runtime.future()
        if self.error is not None:
            announced.set_result(None)
        else:
            self._remote.want(key, announced)
        return announced

    # Pulls that the peer counts. ----------------------------------------------------------------------------

    def _tell_pulled(self, cache_id: int, slot: int, tensor: int, count: int) -> None:
        """Tell the owner that tensors of a counted slot were pulled. What waits to be told is bounded by its slots."""
        if self.error is None and not self._unlinking:
            self._pulled[cache_id, slot, tensor, count] = None
            self._wake.set()

    def _send_pulled(self) -> None:
        pulled, self._pulled = self._pulled, {}
        for cache_id, slot, tensor, count in pulled:
            self._channel.send(wire.SlotPulled(cache_id=cache_id, slot=slot, tensor=tensor, count=count))

    # Notifications. -----------------------------------------------------------------------------------------

    def _post_notification(self, payload: bytes) -> asyncio.Future[None]:
        """Send a notification when the peer has granted a credit for it.

        Parameters
        ----------
        payload : bytes

        Returns
        -------
        asyncio.Future
            Done when the notification was handed to the socket. Cancelling it before that drops the
            notification. It fails with the link, or if the payload is longer than `notify_max_bytes`.
        """
        told = self._runtime.future()
        if len(payload) > self.notify_max_bytes:
            _fail(
                told,
                ArgumentError(
                    f"notify has {len(payload)} bytes, and the peer accepts {self.notify_max_bytes}",
                    peer=self.cluster_id,
                    hint="send less, or raise notify_max_bytes at the peer",
                ),
            )
        elif self.error is not None or self._unlinking:
            _fail(told, self.error or self._unlinked())
        elif (
            self._credits
            and not self._notifications
            and not self._pulled
            and self.state is LinkState.READY
            and self._channel.stream.unsent <= _UNSENT_MOST
        ):
            self._send_notification(payload)
            told.set_result(None)
        else:
            self._notifications.append((payload, told))
            self._wake.set()
        return told

    def _send_notification(self, payload: bytes) -> None:
        self._credits -= 1
        self._channel.send(wire.Notify(payload=payload))

    def _return_credit(self) -> None:
        """Give a credit back: a notification of this peer was read."""
        self._owed += 1
        self._wake.set()


def _role(number: int) -> Role | None:
    try:
        return Role(number)
    except ValueError:
        return None


def _fail(waiter: asyncio.Future[None], error: DataDistError) -> None:
    if not waiter.done():
        waiter.set_exception(copy_error(error))
        waiter.exception()  # whoever waits still gets it, and nobody has to
