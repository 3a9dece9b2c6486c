"""All links of a DataDist: who may link whom, and when.

For each peer there is a `_Slot`. It holds at most one link that is ready or about to close, at most one
attempt of ours to link the peer, which all callers of `link` share, and at most one handshake that the peer
has started.

When both sides link each other at once, the connection that the lower cluster id has made counts: that side
refuses the other's Hello as crossed, and the other side gives its own attempt up when the Hello arrives, and
waits. A link that is up is never replaced on the word of a newcomer. The engine of the old peer is asked
first: if it still answers, a newcomer of another incarnation is refused as a duplicate, and one of the same
is told to look again, because its own link exists.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Final

from .. import _core
from .._loop import Deadline, Runtime, Stream, Tasks
from .._race import race
from ..errors import (
    ArgumentError,
    ClosedError,
    DataDistError,
    HandshakeError,
    InternalError,
    LinkError,
    LinkTimeout,
    NotLinkedError,
    PeerLostError,
    ProtocolError,
    Status,
)
from ..observe import Counters, get_logger
from ..types import Address, ClusterInfo, Event, LinkPath, LinkState, LinkStateChanged
from . import wire
from .filelimit import OUT_OF_FILES, file_limit_error, files_are_short
from .handshake import SHORT_CONNECTIONS, Channel, Crossed, Handshaker, Own, Refusal, Session
from .links import Link, copy_error
from .relink import STEADY, Relink
from .waiting import Waiting

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator

    from ..transfer import Transfer
    from .events import Inbox
    from .operations import Operations, Running
    from .peers import NativePeer, NativePeers
    from .table import LocalTable

__all__ = ["LinkManager", "SelfLink"]

_log = get_logger()

_PING_SECONDS: Final = 1.0
_REFUSAL_SECONDS: Final = 1.0
_RETRY_FIRST: Final = 0.02
_RETRY_MOST: Final = 0.5
_SILENT_SECONDS: Final = 1.0
"""Without an answer to Hello for so long, other addresses are tried, and the peer's own connection is let in."""
_FILES_BESIDE_DATA: Final = 7
"""Control, engine and unix connection, pidfd twice, a memfd for a moment, the loop's copy of one data connection."""
_UNLIMITED_HANDSHAKE: Final = 60.0
_MAX_INCOMING: Final = 1024


class _Attempt:
    """Our attempt to link a peer; everybody who wants the link waits for the same one."""

    def __init__(self, info: ClusterInfo, runtime: Runtime) -> None:
        self.info = info
        self.joined = 0
        self.callers = 0
        self.stage = "starting"
        self.failures: list[tuple[Address, Exception]] = []
        self.session: Session | None = None
        self.linking: Link | None = None
        self.link: Link | None = None
        self.error: DataDistError | None = None
        self.over = runtime.event()
        self.greeted_at = math.inf
        self._limit: Deadline | None = None
        self._dial: Deadline | None = None
        self._given_up = False

    def where(self) -> str:
        """Return what the attempt waits for, and what has failed before."""
        stage = self.stage
        if self.linking is not None:
            stage = self.linking._stage
        elif self.session is not None:
            stage = self.session.stage
        said = self.said()
        return f"{stage} ({said})" if said else stage

    def said(self) -> str:
        """Return which addresses have failed, and why."""
        return "; ".join(f"{address}: {_words(why)}" for address, why in self.failures)

    @property
    def background(self) -> bool:
        """Whether no caller of `link` waits for it."""
        return not self.callers

    @property
    def greeted(self) -> bool:
        """Whether a Hello of ours is with the peer."""
        return self.session is not None

    def silent(self, now: float) -> bool:
        """Whether whoever has that Hello should have answered by now."""
        return self.session is not None and self.session.theirs is None and now - self.greeted_at > _SILENT_SECONDS

    def enter(self, limit: Deadline) -> None:
        self._limit = limit
        if self._given_up:
            limit.cancel()

    def enter_dial(self, dial: Deadline | None) -> None:
        self._dial = dial

    def give_up(self, error: DataDistError) -> None:
        """End the attempt."""
        if self.error is None:
            self.error = error
        self._given_up = True
        if self.linking is not None:
            self.linking._end(error, LinkState.CLOSED)
        if self._limit is not None:
            self._limit.cancel()

    def yield_to_peer(self) -> None:
        """Drop our connection; the peer's counts."""
        if self._dial is not None:
            self._dial.cancel()


class _Incoming:
    """A handshake that a peer has started."""

    def __init__(self, incarnation: bytes, scope: Deadline) -> None:
        self.incarnation = incarnation
        self.scope = scope
        self.link: Link | None = None

    def drop(self, error: DataDistError) -> None:
        """End it."""
        if self.link is not None:
            self.link._end(error)
        self.scope.cancel()


class _Slot:
    """What there is between this DataDist and one peer."""

    def __init__(self, cluster_id: int, runtime: Runtime) -> None:
        self.cluster_id = cluster_id
        self.epoch = 0
        self.users = 0
        self.state = LinkState.IDLE
        self.counters = Counters()
        self.link: Link | None = None
        self.making: Link | None = None
        self.attempt: _Attempt | None = None
        self.incoming: _Incoming | None = None
        self.relink: Relink | None = None
        self.linked_at = 0.0
        self.waiting = Waiting(runtime)

    def lost(self, relink: Relink) -> bool:
        """Whether there is no link, and this is still the wish to have one."""
        return self.link is None and self.relink is relink

    @property
    def relink_attempt(self) -> int:
        """Which attempt to link again is under way; 0 if there is none."""
        return self.relink.attempt if self.relink is not None else 0


class SelfLink(Link):
    """The link of a DataDist to itself. It is ready, and good for nothing."""

    def __init__(self, own: Own, epoch: int) -> None:
        self.cluster_id = own.cluster_id
        self.state = LinkState.READY
        self.epoch = epoch
        self.role = own.role
        self.peer_listens_at = own.listen
        self.table = {}
        self.slots = {}
        self.error = None
        self.notify_max_bytes = 0
        self._counters = Counters()
        self._own = own

    @property
    def path(self) -> LinkPath:
        """Nothing of it moves anything."""
        return LinkPath("self")

    def _tell_changes(self) -> None:
        self.role, self.peer_listens_at = self._own.role, self._own.listen

    def _post_notification(self, payload: bytes) -> asyncio.Future[None]:
        """Refuse: there is no peer."""
        raise ArgumentError("a DataDist cannot notify itself", peer=self.cluster_id, hint="use another cluster id")


class LinkManager:
    """Links, makes and ends them.

    Parameters
    ----------
    runtime : Runtime
    own : Own
    node : _core.Node
    peers : NativePeers
    table : LocalTable
    inbox : Inbox
    operations : Operations
    tasks : Tasks
    publish : callable
        Takes an `Event`.

    Attributes
    ----------
    ready : dict
        Links that may be used, by cluster id. An entry vanishes the moment its link ends.
    """

    def __init__(
        self,
        runtime: Runtime,
        own: Own,
        node: _core.Node,
        peers: NativePeers,
        table: LocalTable,
        inbox: Inbox,
        operations: Operations,
        tasks: Tasks,
        handshaker: Handshaker,
        publish: Callable[[Event], None],
    ) -> None:
        self.runtime = runtime
        self.own = own
        self.node = node
        self.peers = peers
        self.table = table
        self.inbox = inbox
        self.publish = publish
        self.ready: dict[int, Link] = {}
        self._handshaker = handshaker
        self._operations = operations
        self._tasks = tasks
        self._slots: dict[int, _Slot] = {}
        self._handshakes = 0
        self._incoming = 0
        self._closing = False

    def _slot(self, cluster_id: int) -> _Slot:
        slot = self._slots.get(cluster_id)
        if slot is None:
            slot = self._slots[cluster_id] = _Slot(cluster_id, self.runtime)
        return slot

    @contextlib.contextmanager
    def _using(self, cluster_id: int) -> Iterator[_Slot]:
        """Hold the slot of a peer; forget it at the end if the peer never got as far as a link.

        Anybody can claim any cluster id, and must not fill our memory with that.
        """
        slot = self._slot(cluster_id)
        slot.users += 1
        try:
            yield slot
        finally:
            slot.users -= 1
            if not slot.epoch and not slot.users:
                self._slots.pop(cluster_id, None)

    def _granted(self, cluster_id: int) -> int:
        return max(0, self.own.config.notify_credits - self.inbox.unread(cluster_id))

    def unended(self) -> int:
        """Return how many transfers of all peers have not ended."""
        return sum(slot.counters.pending for slot in self._slots.values())

    def counted(self) -> Counters:
        """Return the counts of all peers, summed up."""
        total = Counters()
        for slot in self._slots.values():
            total += slot.counters
        return total

    def notification_read(self, cluster_id: int) -> None:
        """Give a credit back to the peer."""
        link = self.ready.get(cluster_id)
        if link is not None:
            link._return_credit()

    # What links tell. ---------------------------------------------------------------------------------------

    def link_changed(self, link: Link, old: LinkState) -> None:
        """Take note that the state of the link is another one."""
        slot = self._slot(link.cluster_id)
        if slot.making is link:
            slot.making = None
        if link.state is LinkState.READY:
            previous, slot.link = slot.link, link
            slot.linked_at = self.runtime.now()
            self.ready[link.cluster_id] = link
            if slot.incoming is not None and slot.incoming.link is link:
                slot.incoming = None
            if previous is not None:
                previous._end(PeerLostError("the peer linked again", peer=link.cluster_id))
            _log.info("linked", cluster_id=link.cluster_id, epoch=link.epoch, path=str(link.path))
            if slow := link._session.slow_path():
                _log.warning("a slow path to a peer that may be on this host", cluster_id=link.cluster_id, reason=slow)
            for name, why in link._session.dropped.items():
                _log.warning("an agreed transport is not used", cluster_id=link.cluster_id, transport=name, reason=why)
        elif self.ready.get(link.cluster_id) is link:
            del self.ready[link.cluster_id]
        if slot.link is None or slot.link is link:
            slot.state = link.state
        reason = str(link.error) if link.error is not None else ""
        self.publish(LinkStateChanged(link.cluster_id, old, link.state, link.epoch, reason, slot.relink_attempt))
        slot.waiting.wake()

    def link_over(self, link: Link) -> None:
        """Take note that nothing but the native peer is left of the link."""
        slot = self._slot(link.cluster_id)
        if slot.link is link:
            slot.link = None
            if link.state is LinkState.CLOSED:
                slot.relink = None  # it was meant to end
        if slot.incoming is not None and slot.incoming.link is link:
            slot.incoming = None
        _log.info("link ended", cluster_id=link.cluster_id, epoch=link.epoch, reason=str(link.error))
        slot.waiting.wake()

    def _make_link(self, slot: _Slot, session: Session, changes: int) -> Link:
        """Turn a finished handshake into a link that runs. `changes` are those that it has told the peer of."""
        slot.epoch += 1
        slot.making = link = Link(self, session, slot.epoch, slot.counters, changes)
        self._begin_linking(slot)
        return link

    def _begin_linking(self, slot: _Slot, attempt: int = 0) -> None:
        """Tell that the peer is being linked, once, whichever side began."""
        old, slot.state = slot.state, LinkState.LINKING
        if old is not LinkState.LINKING:
            self.publish(LinkStateChanged(slot.cluster_id, old, LinkState.LINKING, slot.epoch, "", attempt))

    def tell_changes(self) -> None:
        """Tell all peers that this side has another role, or listens elsewhere."""
        self.own.changes += 1
        for slot in self._slots.values():
            if slot.link is not None:
                slot.link._tell_changes()

    def _files_needed(self) -> int:
        """Return how many files the handshakes under way may still open, with one more."""
        config = self.own.config
        data = config.tcp_connections + SHORT_CONNECTIONS if "tcp" in self.own.usable else 0
        return (self._handshakes + 1) * (_FILES_BESIDE_DATA + data)

    @contextlib.contextmanager
    def _handshaking(self) -> Iterator[None]:
        self._handshakes += 1
        try:
            yield
        finally:
            self._handshakes -= 1

    # Linking. -----------------------------------------------------------------------------------------------

    def link(self, info: ClusterInfo, timeout: float | None, auto_relink: bool | None) -> Transfer[Link]:
        """Link a peer; see `DataDist.link`."""
        with self._using(info.cluster_id) as slot:
            if auto_relink and not info.addresses and info.cluster_id != self.own.cluster_id:
                raise ArgumentError(
                    f"auto_relink=True, and no address of cluster {info.cluster_id} is given",
                    hint="give ClusterInfo the address to link again",
                )
            if auto_relink is False:
                self._end_relink(slot)
            if slot.link is not None and slot.link.state is LinkState.READY:
                if auto_relink:
                    self._keep_linked(slot, info)
                return self._operations.done(slot.link)
            if not info.addresses:
                if info.cluster_id == self.own.cluster_id:
                    return self._operations.done(self._link_self(slot))
                if slot.attempt is None and slot.incoming is None:
                    raise ArgumentError(
                        f"no address of cluster {info.cluster_id} is known", hint="give ClusterInfo an address"
                    )

        async def join(running: Running) -> Link:
            with self._using(info.cluster_id) as slot:
                link = await self._join(slot, info, running)
                if auto_relink and link.state is not LinkState.CLOSED:
                    self._keep_linked(slot, info)
                return link

        return self._operations.start("link", info.cluster_id, timeout, join)

    def _link_self(self, slot: _Slot) -> Link:
        if slot.link is None:
            slot.epoch += 1
            slot.link = SelfLink(self.own, slot.epoch)
            self.publish(LinkStateChanged(slot.cluster_id, slot.state, LinkState.READY, slot.epoch))
            slot.state = LinkState.READY
        return slot.link

    async def _join(self, slot: _Slot, info: ClusterInfo, running: Running | None) -> Link:
        """Wait for the attempt that is under way, or begin one. Without a caller it is one in the background."""
        attempt = slot.attempt
        if attempt is not None and attempt.background and set(info.addresses) - set(attempt.info.addresses):
            # The caller knows better where the peer is.
            self._give_up(slot, LinkError("an attempt to link another address was made", peer=slot.cluster_id))
            attempt = None
        if attempt is None:
            if self._closing:
                raise ClosedError("the DataDist is closing")
            if slot.link is not None and slot.link.state is LinkState.READY:
                return slot.link
            attempt = slot.attempt = _Attempt(info, self.runtime)
            self._tasks.start(self._attempt, slot, attempt, name=f"aiodatadist-attempt-{slot.cluster_id}")
        if running is not None:
            running.state = attempt.where
        attempt.joined += 1
        attempt.callers += running is not None
        try:
            await attempt.over.wait()
        finally:
            attempt.joined -= 1
            attempt.callers -= running is not None
            if not attempt.joined and not attempt.over.is_set():
                # Nobody wants it any more. Whoever comes from now on begins anew.
                attempt.give_up(LinkError("linking was given up", peer=slot.cluster_id))
                self._attempt_over(slot, attempt)
        if attempt.link is not None:
            return attempt.link
        assert attempt.error is not None
        raise copy_error(attempt.error)

    def _give_up(self, slot: _Slot, error: DataDistError) -> None:
        """End the attempt, if there is one. It takes some turns; whoever comes from now on begins anew."""
        if slot.attempt is not None:
            slot.attempt.give_up(error)
            self._attempt_over(slot, slot.attempt)

    def _attempt_over(self, slot: _Slot, attempt: _Attempt) -> None:
        if slot.attempt is attempt:
            slot.attempt = None
            slot.waiting.wake()

    async def _attempt(self, slot: _Slot, attempt: _Attempt) -> None:
        with self._using(slot.cluster_id):
            await self._run_attempt(slot, attempt)

    async def _run_attempt(self, slot: _Slot, attempt: _Attempt) -> None:
        error: DataDistError | None = None
        try:
            with Deadline(None) as limit:
                attempt.enter(limit)
                attempt.link = await self._dial_until_linked(slot, attempt)
        except DataDistError as why:
            error = why
        except Exception as why:
            _log.exception("linking failed", cluster_id=slot.cluster_id)
            error = InternalError(f"linking failed: {why!r}", peer=slot.cluster_id)
            error.__cause__ = why
        finally:
            if attempt.link is None and attempt.error is None:
                attempt.error = error or LinkError("linking was given up", peer=slot.cluster_id)
            self._attempt_over(slot, attempt)
            if not self.runtime.closed:
                attempt.over.set()

    async def _dial_until_linked(self, slot: _Slot, attempt: _Attempt) -> Link:
        pause = _RETRY_FIRST
        while True:
            if slot.link is not None:
                if slot.link.state is LinkState.READY:
                    return slot.link
                attempt.stage = "waiting for the old link to end"
                await slot.waiting.changed()
                continue
            if slot.incoming is not None:
                attempt.stage = "waiting for the connection that the peer has made"
                await slot.waiting.changed()
                continue
            if short := files_are_short(self._files_needed()):
                raise file_limit_error(short, slot.cluster_id)
            try:
                with Deadline(None) as dial, self._handshaking():
                    attempt.enter_dial(dial)
                    return await self._dial(slot, attempt)
            except Crossed:
                attempt.stage = "waiting for the peer, which links at the same time"
                with Deadline(pause):
                    await slot.waiting.changed()
                pause = min(2 * pause, _RETRY_MOST)
            finally:
                attempt.enter_dial(None)
                attempt.session = attempt.linking = None

    async def _dial(self, slot: _Slot, attempt: _Attempt) -> Link:
        """Link the peer at the first of its addresses where it is found."""
        if not attempt.info.addresses:
            raise LinkError("the peer gave its connection up, and its address is not known")
        left = list(dict.fromkeys(attempt.info.addresses))
        silent: set[Address] = set()
        attempt.failures = []
        while True:
            address, stream = await self._connect(attempt, left)
            left.remove(address)
            # The last one may take its time, and so may one that nobody answered for at the first time.
            patience = _SILENT_SECONDS if left and address not in silent else None
            try:
                link = await self._greet(slot, attempt, stream, patience)
            except (HandshakeError, ProtocolError, PeerLostError) as why:
                if attempt.session is not None and attempt.session.theirs is not None:
                    raise  # the peer was found
                # It was somebody else, or nobody.
                if not left and not attempt.failures:
                    raise
                attempt.failures.append((address, why))
                if not left:
                    raise self._unreachable(attempt) from why
            else:
                if link is not None:
                    return link
                silent.add(address)
                left.append(address)
            attempt.session = None

    async def _greet(self, slot: _Slot, attempt: _Attempt, stream: Stream, patience: float | None) -> Link | None:
        """Link over a connection; None if there was no answer to Hello for `patience` seconds."""
        session = Session(Channel(stream, slot.cluster_id), granted=self._granted(slot.cluster_id), dialed=True)
        attempt.session = session
        attempt.greeted_at = self.runtime.now()
        changes = self.own.changes
        link: Link | None = None
        try:
            with Deadline(None) as limit:

                def check() -> None:
                    if session.theirs is None:
                        limit.cancel()

                timer = None if patience is None else self.runtime.call_later(patience, check)
                try:
                    if not await self._handshaker.connect(session, slot.cluster_id):
                        session.close()
                        return self._link_self(slot)
                finally:
                    if timer is not None:
                        timer.cancel()
                link = self._make_link(slot, session, changes)
        finally:
            if link is None:
                session.close()
        if link is None:
            return None
        attempt.linking = link
        self._tasks.start(link._run, name=f"aiodatadist-link-{slot.cluster_id}")
        try:
            await link._until_ready()
        finally:
            if link.state is LinkState.LINKING:
                link._end(LinkError("linking was given up", peer=slot.cluster_id), LinkState.CLOSED)
        return link

    async def _connect(self, attempt: _Attempt, left: list[Address]) -> tuple[Address, Stream]:
        """Connect to one of the addresses that are left. Those that fail go from there to the failures."""
        attempt.stage = f"connecting to {' or '.join(map(str, left))}"
        unreachable: list[tuple[Address, OSError]] = []
        won = await race(left, self.runtime.connect, unreachable)
        attempt.failures += unreachable
        for address, _ in unreachable:
            left.remove(address)
        if won is not None:
            return won
        for _, why in unreachable:
            if why.errno in OUT_OF_FILES:
                raise file_limit_error(_words(why), attempt.info.cluster_id) from why
        raise self._unreachable(attempt) from attempt.failures[0][1]

    def _unreachable(self, attempt: _Attempt) -> LinkError:
        return LinkError(
            f"cannot connect to {attempt.said()}",
            peer=attempt.info.cluster_id,
            hint="check that the peer is open and listens there",
        )

    # Linking again. -----------------------------------------------------------------------------------------

    def _keep_linked(self, slot: _Slot, info: ClusterInfo) -> None:
        """Link the peer again whenever it is lost from now on."""
        if info.cluster_id == self.own.cluster_id or self._closing:
            return
        if slot.relink is not None:
            slot.relink.info = info
            return
        slot.relink = Relink(info, self.runtime.chance)
        self._tasks.start(self._relink, slot, slot.relink, name=f"aiodatadist-relink-{slot.cluster_id}")

    def _end_relink(self, slot: _Slot) -> None:
        """Stop linking the peer again."""
        if slot.relink is not None:
            slot.relink = None
            if slot.attempt is not None and slot.attempt.background:
                self._give_up(slot, LinkError("linking again was given up", peer=slot.cluster_id))
            slot.waiting.wake()

    async def _relink(self, slot: _Slot, relink: Relink) -> None:
        """Hold a link: whenever it is lost, link again until it is there."""
        most = self.own.config.link_timeout or _UNLIMITED_HANDSHAKE
        while slot.relink is relink:
            if not slot.lost(relink):
                relink.attempt = 0
                await slot.waiting.changed()
                continue
            if not relink.attempt and self.runtime.now() - slot.linked_at >= STEADY:
                relink.backoff.reset()
            with Deadline(relink.backoff.pause()):
                while slot.lost(relink):
                    await slot.waiting.changed()
            if slot.lost(relink):
                relink.attempt += 1
                await self._try_again(slot, relink, most)

    async def _try_again(self, slot: _Slot, relink: Relink, most: float) -> None:
        self._begin_linking(slot, relink.attempt)
        reason = f"the peer was not linked within {most:g} s"
        try:
            with Deadline(most):
                await self._join(slot, relink.info, None)
        except DataDistError as why:
            reason = str(why)
        if slot.state is LinkState.LINKING and slot.link is None and slot.making is None:
            slot.state = LinkState.BROKEN if slot.relink is relink else LinkState.CLOSED
            self.publish(
                LinkStateChanged(slot.cluster_id, LinkState.LINKING, slot.state, slot.epoch, reason, relink.attempt)
            )

    # Being linked. ------------------------------------------------------------------------------------------

    async def serve(self, stream: Stream, known: Callable[[], None]) -> None:
        """Serve a control connection that came in, to the end of its link.

        Parameters
        ----------
        stream : Stream
        known : callable
            Called when the peer has said who it is and, with a cluster key, has proved that.
        """
        channel = Channel(stream, receive_limit=wire.HELLO_MAX_BYTES)
        try:
            hello: wire.Hello | None = None
            with Deadline(self.own.config.handshake_timeout):
                hello = await self._handshaker.welcome(channel)
            if hello is not None:
                known()
                await self._serve(channel, hello)
        except Refusal as why:
            _log.info("refused a link", peer=stream.peer, kind=why.kind.value, reason=why.reason)
            channel.send(why.message())
            with Deadline(_REFUSAL_SECONDS):
                try:
                    await stream.flush()
                except OSError as broken:
                    _log.debug("the refusal did not arrive", peer=stream.peer, error=str(broken))
        except DataDistError as why:
            _log.info("an incoming link failed", peer=stream.peer, error=str(why))
        except Exception:
            _log.exception("an incoming link failed", peer=stream.peer)
        finally:
            channel.close()

    async def _serve(self, channel: Channel, hello: wire.Hello) -> None:
        own = self.own
        channel.peer = hello.cluster_id
        if self._closing:
            raise Refusal(wire.RefusalKind.CLOSING, f"cluster {own.cluster_id} is closing")
        if self._incoming >= _MAX_INCOMING:
            raise Refusal(wire.RefusalKind.BUSY, "too many handshakes at once", Status.LINK_BUSY)
        if short := files_are_short(self._files_needed()):
            raise Refusal(wire.RefusalKind.BUSY, f"too many open files there: {short}", Status.LINK_BUSY)
        if hello.target != own.cluster_id:
            raise Refusal(
                wire.RefusalKind.IDENTITY,
                f"cluster {hello.target} was meant, but cluster {own.cluster_id} listens here",
            )
        if hello.cluster_id == own.cluster_id:
            await self._serve_self(channel, hello)
            return
        with self._using(hello.cluster_id) as slot:
            await self._serve_peer(slot, channel, hello)

    async def _serve_peer(self, slot: _Slot, channel: Channel, hello: wire.Hello) -> None:
        own = self.own
        session = Session(channel, granted=self._granted(hello.cluster_id))
        most = own.config.link_timeout or _UNLIMITED_HANDSHAKE
        changes = own.changes
        link: Link | None = None
        self._incoming += 1
        with Deadline(most) as scope, self._handshaking():
            incoming = _Incoming(hello.incarnation, scope)
            try:
                self._check_crossed(slot, incoming)
                slot.incoming = incoming
                await self._check_old(slot, incoming)
                await self._handshaker.accept(session, hello)
                link = incoming.link = self._make_link(slot, session, changes)
            finally:
                self._incoming -= 1
                if link is None:
                    session.drop_connections()
                    if slot.incoming is incoming:
                        slot.incoming = None
                        slot.waiting.wake()
        if link is None:
            _log.info("an incoming link came to nothing", cluster_id=slot.cluster_id, stage=session.stage)
            return
        timer = self.runtime.call_later(most, _end_unready, link, most)
        try:
            await link._run()
        finally:
            timer.cancel()

    async def _serve_self(self, channel: Channel, hello: wire.Hello) -> None:
        own = self.own
        if hello.incarnation != own.incarnation:
            raise Refusal(
                wire.RefusalKind.DUPLICATE,
                f"cluster id {own.cluster_id} is that of the DataDist that listens here",
                Status.ALREADY_LINK,
            )
        channel.send(wire.HelloReply(token=self.runtime.chance.randbytes(wire.ID_SIZE), **own.fields(0)))
        channel.prove()
        with Deadline(_REFUSAL_SECONDS):
            await channel.receive()  # the other end closes when it has seen who it is

    def _check_crossed(self, slot: _Slot, incoming: _Incoming) -> None:
        """Decide between this handshake and others with the same peer that are under way."""
        attempt, other = slot.attempt, slot.incoming
        ours_counts = attempt is not None and attempt.greeted and not attempt.silent(self.runtime.now())
        if ours_counts and self.own.cluster_id < slot.cluster_id:
            raise Refusal(wire.RefusalKind.CROSSED, "both sides link each other at once")
        if other is not None:
            if other.incarnation != incoming.incarnation:
                raise Refusal(
                    wire.RefusalKind.DUPLICATE,
                    f"another DataDist with cluster id {slot.cluster_id} is being linked",
                    Status.ALREADY_LINK,
                )
            other.drop(PeerLostError("the peer began anew", peer=slot.cluster_id))
        if attempt is not None:
            attempt.yield_to_peer()

    async def _check_old(self, slot: _Slot, incoming: _Incoming) -> None:
        """Make room for a new link: the old one has to be dead, or about to end."""
        old = slot.link
        if old is None:
            return
        if old.state is LinkState.READY:
            answered = False
            with Deadline(_PING_SECONDS):
                answered = await old._answers()
            if answered and old.error is None:
                if old._incarnation == incoming.incarnation:
                    raise Refusal(wire.RefusalKind.CROSSED, "the link exists")
                raise Refusal(
                    wire.RefusalKind.DUPLICATE,
                    f"cluster id {slot.cluster_id} is that of another DataDist, which is linked and alive",
                    Status.ALREADY_LINK,
                )
        else:
            with Deadline(_PING_SECONDS):
                await old._until_over()
        old._end(PeerLostError("a new incarnation of the peer took its place", peer=slot.cluster_id))

    # Unlinking and fences. ----------------------------------------------------------------------------------

    def unlink(self, cluster_id: int, timeout: float | None, *, force: bool) -> Transfer[None]:
        """End the link to a peer; see `DataDist.unlink`."""
        slot = self._slots.get(cluster_id)
        if slot is None:
            return self._operations.done(None)
        error = LinkError("the peer was unlinked", peer=cluster_id, hint="link it again")
        self._end_relink(slot)
        self._give_up(slot, error)
        if slot.incoming is not None:
            slot.incoming.drop(error)
        link = slot.link
        if isinstance(link, SelfLink):
            self._unlink_self(slot, link)
            return self._operations.done(None)
        if force:
            if link is not None:
                link._unlink_now()
            return self._operations.done(None)

        if link is not None and link.error is None:
            link._say_unlink("")  # now: whoever links from here on gets another link
        # Those of a link that somebody makes meanwhile are not waited for.
        peers = self.peers.of(cluster_id)

        async def leave(running: Running) -> None:
            if link is not None:
                running.state = lambda: link._stage
                await link._unlink()
            running.state = lambda: "waiting until the peer can no longer touch local memory"
            for peer in peers:
                await peer.wait_quiet()

        return self._operations.start("unlink", cluster_id, timeout, leave)

    def _unlink_self(self, slot: _Slot, link: SelfLink) -> None:
        link.state = slot.state = LinkState.CLOSED
        slot.link = None
        self.publish(LinkStateChanged(slot.cluster_id, LinkState.READY, LinkState.CLOSED, slot.epoch))

    def fence(self, cluster_id: int, timeout: float | None) -> Transfer[None]:
        """Wait until no earlier operation of a peer can touch local memory; see `DataDist.fence`."""
        slot = self._slots.get(cluster_id)
        if cluster_id == self.own.cluster_id:
            return self._operations.done(None)
        if slot is None or not slot.epoch:
            raise NotLinkedError(f"cluster {cluster_id} was never linked", peer=cluster_id, hint="check the cluster id")

        async def fence_all(running: Running) -> None:
            running.state = lambda: "waiting for the peer's answer"
            failures: list[DataDistError] = []

            async def fence_one(peer: NativePeer) -> None:
                try:
                    await peer.fence()
                except DataDistError as why:
                    failures.append(why)

            async with Tasks() as tasks:
                for peer in self.peers.of(cluster_id):
                    tasks.start(fence_one, peer, name=f"aiodatadist-fence-{cluster_id}")
            if failures:
                raise failures[0]

        return self._operations.start("fence", cluster_id, timeout, fence_all)

    # Closing. -----------------------------------------------------------------------------------------------

    def stop_linking(self) -> None:
        """Make no more links, and give up those that are not ready."""
        self._closing = True
        error = ClosedError("the DataDist is closing")
        for slot in tuple(self._slots.values()):
            self._end_relink(slot)
            self._give_up(slot, error)
            if slot.incoming is not None:
                slot.incoming.drop(error)

    async def unlink_all(self) -> None:
        """Unlink all peers at once, and wait until they have ended their side and are quiet."""
        async with Tasks() as tasks:
            for slot in tuple(self._slots.values()):
                if isinstance(slot.link, SelfLink):
                    self._unlink_self(slot, slot.link)
                elif slot.link is not None:
                    tasks.start(self._leave, slot.link, name=f"aiodatadist-unlink-{slot.cluster_id}")

    async def _leave(self, link: Link) -> None:
        try:
            await link._unlink("the DataDist is closing")
        except DataDistError as why:
            _log.info("unlinking failed", cluster_id=link.cluster_id, error=str(why))

    def end_all(self) -> None:
        """End everything at once."""
        self.stop_linking()
        for slot in tuple(self._slots.values()):
            if isinstance(slot.link, SelfLink):
                self._unlink_self(slot, slot.link)
            elif slot.link is not None:
                slot.link._end(ClosedError("the DataDist is closed"), LinkState.CLOSED)


def _words(why: Exception) -> str:
    return str((isinstance(why, OSError) and why.strerror) or (isinstance(why, DataDistError) and why.message) or why)


def _end_unready(link: Link, seconds: float) -> None:
    if link.state is LinkState.LINKING:
        link._end(LinkTimeout(f"the link was not ready within {seconds:g} s while {link._stage}"))
