"""Hand-over by push: the decode worker reserves first, the prefill worker pushes layer by layer while it computes.

Memory that a peer may still write must never be given to another request. So a writer has to ask before it begins, and
tells when it has ended. Both go over the link that the blocks travel on, as notifications (`Word`), so that whoever
loses the link knows that no further word comes:

==========  ==============  ================================================================================
word        from, to        meaning
==========  ==============  ================================================================================
``begin``   writer, owner   may I write into this reservation?
``grant``   owner, writer   yes, over this very link
``refuse``  owner, writer   no: it is gone, or never was yours
``commit``  writer, owner   all of it is in your memory, and I will not write again
``ended``   writer, owner   I do not write into it, and never will again; it is not complete
``revoke``  owner, writer   stop, and say ``ended``
==========  ==============  ================================================================================

A reservation is ``reserved`` (nobody may write: it is freed at once), ``receiving`` (granted), ``ready`` (committed).
It runs out while it is ``reserved`` or ``ready``, where it waits for somebody. While it is ``receiving`` it lives as
long as its writer and the link do, because nobody knows how long a prompt takes to compute; the router gives it up when
that is too long.

What is given up while it is ``receiving`` becomes ``quarantined``. Its blocks come back by the writer's ``commit`` or
``ended``, by the end of the link and a fence, which waits until what is left of the link is quiet, or by a deadline,
when the link is torn down. A writer that was granted over a link that is gone does not begin on the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias

import msgspec
from msgspec.structs import replace

import aiodatadist as adt
from aiodatadist.observe import get_logger

from .background import Tasks, have_seen
from .damage import digests_of
from .errors import ServeError
from .metrics import WorkerMetrics
from .protocol import Message, Peer, Reservation, ReserveJob, Sampling, Ticket, encode
from .transfer_errors import transfer_errors
from .units import Placed, Units

__all__ = ["STATES", "Hearer", "Pushed", "Pusher", "Reservations", "Word", "listen"]

STATES: Final = ("reserved", "receiving", "ready", "quarantined")
_REMEMBERED: Final = 10_000
"""Reservations that were given up before they were made: more than a router has in flight."""

Key: TypeAlias = tuple[str, int]
WordName: TypeAlias = Literal["begin", "grant", "refuse", "commit", "ended", "revoke"]

_ASK_AGAIN: Final = 1.0
"""Seconds before the next attempt to have a link's rest quiet."""
_LINK_ENDED: Final = (adt.NotLinkedError, adt.PeerLostError, adt.ClosedError)

_log = get_logger().bind(part="serve")


class Word(Message, frozen=True):
    """What writer and owner of a reservation say to each other."""

    word: WordName
    request_id: str
    attempt: int

    @property
    def key(self) -> Key:
        """Names the reservation."""
        return self.request_id, self.attempt


class Hearer(Protocol):
    """Either side."""

    def hear(self, cluster_id: int, word: Word) -> None:
        """Hear a peer."""

    def look_at_links(self) -> None:
        """Look which links have ended."""


async def listen(dd: adt.DataDist, hearer: Hearer) -> None:
    """Pass on what peers say, and that links have ended, until the DataDist is closed.

    To be run by `forever`: what was said while nobody listened waits, and links that ended then are looked for first.
    """
    hearer.look_at_links()
    async with asyncio.TaskGroup() as both:
        both.create_task(_hear_words(dd, hearer))
        both.create_task(_hear_links(dd, hearer))


async def _hear_words(dd: adt.DataDist, hearer: Hearer) -> None:
    async for note in dd.notifications():
        try:
            word = msgspec.json.decode(note.payload, type=Word)
        except (msgspec.DecodeError, UnicodeDecodeError) as why:
            _log.warning("a notification is no word of a push", peer=note.cluster_id, reason=str(why))
            continue
        try:
            hearer.hear(note.cluster_id, word)
        except Exception:  # of this word: the others must be heard all the same
            _log.exception("a word of a push was not understood", peer=note.cluster_id, word=word)


async def _hear_links(dd: adt.DataDist, hearer: Hearer) -> None:
    async for event in dd.events():
        if isinstance(event, (adt.LinkStateChanged, adt.EventsLagged)):
            hearer.look_at_links()


class _Speaker:
    """Says words: notifications of transfers that move nothing.

    Parameters
    ----------
    dd : DataDist
    cache : Cache
        Any of this worker.
    owner : bool
        An owner may only read at a writer, and a writer only writes at an owner.
    """

    def __init__(self, dd: adt.DataDist, cache: adt.Cache, *, owner: bool) -> None:
        self._caches = dd.cache_manager
        self._cache = cache
        self._owner = owner

    def say(
        self, cluster_id: int, word: WordName, key: Key, failed: Callable[[adt.DataDistError], None] | None = None
    ) -> None:
        """Say a word, and do not wait for it.

        Parameters
        ----------
        cluster_id : int
        word : str
        key : Key
        failed : callable, optional
            Hears of a word that cannot arrive. That the link has ended is seen by the peer as well; anything else is
            logged, and the deadlines of both sides deal with it.
        """
        payload = encode(Word(word=word, request_id=key[0], attempt=key[1]))
        there = adt.BlocksCacheKey(cluster_id)

        def unsaid(why: adt.DataDistError) -> None:
            if not isinstance(why, _LINK_ENDED):
                _log.warning("a word of a push was not said", word=word, peer=cluster_id, request_id=key[0], reason=why)
            if failed is not None:
                failed(why)

        def ended(said: asyncio.Future[None]) -> None:
            if not said.cancelled() and isinstance(why := said.exception(), adt.DataDistError):
                unsaid(why)

        try:
            if self._owner:
                said = self._caches.pull_blocks(there, self._cache, [], [], notify=payload)
            else:
                said = self._caches.push_blocks(there, self._cache, [], [], notify=payload)
        except adt.DataDistError as why:
            unsaid(why)
        else:
            said.add_done_callback(ended)


# The prefill worker. ----------------------------------------------------------------------------------------


class Pushed(NamedTuple):
    """What a push leaves at the writer: the first new token, and digests of the blocks if they are wanted."""

    token: int
    digests: list[str]


class _Push:
    """A prompt on its way into a reservation."""

    def __init__(self, reservation: Reservation, placed: Placed) -> None:
        self.key: Key = (reservation.request_id, reservation.attempt)
        self.reservation = reservation
        self.owner = reservation.owner.cluster_id
        self.placed = placed
        self.link: adt.Link | None = None
        # Of the owner, to ``begin``: empty, or the code of an error.
        self.answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.asked = False
        self.committed = False
        self.work: asyncio.Task[Pushed]
        self.transfer: adt.TransferTask | None = None

    def answered(self, code: str) -> None:
        """Hear the answer."""
        if not self.answer.done():
            self.answer.set_result(code)


class Pusher:
    """Computes prompts and pushes their layers as they come.

    Parameters
    ----------
    dd : DataDist
    units : Units
    timeout : float
        Seconds for linking, for the owner's grant, and for what has not landed when the model is done.
    metrics : WorkerMetrics
    digests : bool
        Say what was in the blocks.
    """

    def __init__(
        self, dd: adt.DataDist, units: Units, timeout: float, metrics: WorkerMetrics, *, digests: bool = False
    ) -> None:
        self._dd = dd
        self._speaker = _Speaker(dd, _first_cache(units), owner=False)
        self._timeout = timeout
        self._metrics = metrics
        self._digests = digests
        self._pushes: dict[Key, _Push] = {}
        self._keepers = Tasks()

    def __len__(self) -> int:
        return len(self._pushes)

    async def push(self, reservation: Reservation, placed: Placed, sampling: Sampling) -> Pushed:
        """Compute a prompt into its blocks and into the reserved ones.

        Takes the blocks over: they are freed when nothing reads them any more, also after an error. A cancel stops the
        push, and does not wait for that.

        Raises
        ------
        ServeError
            ``reservation_gone``, ``transfer_failed``, ``transfer_timeout``, ``layout_mismatch``, ``internal_error``, or
            ``duplicate_request``: this reservation is being pushed to.
        """
        push = _Push(reservation, placed)
        if push.key in self._pushes:
            placed.free()
            raise ServeError("duplicate_request", f"{reservation.request_id} is being pushed, or has not ended yet")
        self._pushes[push.key] = push
        push.work = asyncio.create_task(self._work(push, sampling))
        self._keepers.start(self._keep(push))
        try:
            await asyncio.wait([push.work])
        finally:
            push.work.cancel()
        if push.work.cancelled():
            raise ServeError("reservation_gone", f"{reservation.request_id} was given up by the decode worker")
        return push.work.result()

    def hear(self, cluster_id: int, word: Word) -> None:
        """Hear the owner of a reservation."""
        push = self._pushes.get(word.key)
        if push is not None and push.owner != cluster_id:
            push = None
        if word.word == "revoke":
            if push is not None:
                push.work.cancel()  # `_keep` says when it has ended
            else:
                self._speaker.say(cluster_id, "ended", word.key)
        elif push is not None and word.word in ("grant", "refuse"):
            push.answered("" if word.word == "grant" else "reservation_gone")

    def look_at_links(self) -> None:
        """Give up waiting for a grant where its link has ended; a transfer ends by itself."""
        for push in self._pushes.values():
            if push.link is not None and self._dd.links.get(push.owner) is not push.link:
                push.answered("transfer_failed")

    async def close(self) -> None:
        """Stop all, and wait until they are quiet."""
        for push in self._pushes.values():
            push.work.cancel()
        await self._keepers.wait(2.0)

    async def _work(self, push: _Push, sampling: Sampling) -> Pushed:
        unit, reserved = push.placed
        assert unit.cache is not None
        reservation = push.reservation
        if len(reservation.blocks) != len(reserved.blocks):
            raise ServeError(
                "layout_mismatch", f"{len(reserved.blocks)} blocks do not go into {len(reservation.blocks)} reserved"
            )
        gate = adt.LayerGate(unit.engine.layout.layers)
        # The model begins meanwhile: what it has recorded when the transfer starts goes at once.
        computing = asyncio.ensure_future(unit.engine.prefill(reserved, sampling, gate.record))
        try:
            with transfer_errors(reservation.request_id):
                await self._ask(push)
                # No await between the check of the link and the start: a grant is for the link that it came over.
                push.transfer = self._dd.cache_manager.transfer_cache_async(
                    unit.cache,
                    gate,
                    [adt.TransferWithCacheKeyConfig(adt.BlocksCacheKey(push.owner, reservation.owner.rank))],
                    reserved.blocks,
                    reservation.blocks,
                    timeout=None,  # the model takes its time; what is to be moved then has a deadline below
                    notify=encode(Word(word="commit", request_id=push.key[0], attempt=push.key[1])),
                )
                began = time.perf_counter()
                both: list[asyncio.Future[Any]] = [computing, push.transfer]
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                if not push.transfer.done():
                    computing.result()  # raises what the model has to say
                    await asyncio.wait([push.transfer], timeout=self._timeout)
                    if not push.transfer.done():
                        raise ServeError(
                            "transfer_timeout",
                            f"{reservation.request_id} was not there {self._timeout:g} s after it was computed",
                        )
                (result,) = push.transfer.result()
                if result.error is not None:
                    raise result.error
                push.committed = True
                self._metrics.moved(
                    "push", len(reserved.blocks) * unit.engine.layout.block_bytes, time.perf_counter() - began
                )
                token = await computing
                return Pushed(token, digests_of(unit.cache.tensors, reserved.blocks) if self._digests else [])
        finally:
            computing.cancel()
            computing.add_done_callback(have_seen)

    async def _ask(self, push: _Push) -> None:
        """Link the owner, and have it grant the reservation."""
        push.link = await self._dd.link(
            adt.ClusterInfo(push.owner, push.reservation.owner.listen), timeout=self._timeout
        )
        push.asked = True
        self._speaker.say(push.owner, "begin", push.key, lambda _: push.answered("transfer_failed"))
        self.look_at_links()
        try:
            async with asyncio.timeout(self._timeout):
                refused = await push.answer
        except TimeoutError:
            refused = "transfer_timeout"
        if not refused and self._dd.links.get(push.owner) is not push.link:
            refused = "transfer_failed"
        if refused:
            raise ServeError(refused, f"the decode worker has not granted the reservation of {push.key[0]}")

    async def _keep(self, push: _Push) -> None:
        """Give everything back when it is quiet."""
        await asyncio.wait([push.work])
        if push.transfer is not None:
            push.transfer.cancel()
            await asyncio.wait([push.transfer])
            push.committed = push.committed or _all_landed(push.transfer)
        push.placed.free()
        del self._pushes[push.key]
        if push.asked and not push.committed:
            self._speaker.say(push.owner, "ended", push.key)


def _all_landed(transfer: adt.TransferTask) -> bool:
    if transfer.cancelled() or transfer.exception() is not None:
        return False
    return all(result.error is None for result in transfer.result())


# The decode worker. -----------------------------------------------------------------------------------------


class _Entry:
    """A reservation."""

    def __init__(self, key: Key, placed: Placed, writer: int) -> None:
        self.key = key
        self.placed = placed
        self.writer = writer
        self.state = "reserved"
        self.link: adt.Link | None = None
        self.taken = False
        self.expiry: asyncio.TimerHandle | None = None
        # For whoever takes it: True if all is here.
        self.outcome: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        # For its quarantine: the writer has said its last word, or its link has ended.
        self.news = asyncio.Event()
        self.writer_ended = False

    def stop_expiry(self) -> None:
        """Let it not run out."""
        if self.expiry is not None:
            self.expiry.cancel()
            self.expiry = None

    def decide(self, complete: bool) -> None:
        """Say what becomes of it, once."""
        if not self.outcome.done():
            self.outcome.set_result(complete)


class Reservations:
    """Blocks of a decode worker that prefill workers may write.

    Parameters
    ----------
    dd : DataDist
    peer : Peer
        This worker; `rank` is filled in.
    units : Units
    ttl : float
        Seconds until a writer must have begun, and from its commit until the reservation must be taken.
    timeout : float
        Seconds of a link's end, and of a commit that is on its way.
    """

    def __init__(self, dd: adt.DataDist, peer: Peer, units: Units, ttl: float, timeout: float) -> None:
        self._dd = dd
        self._peer = peer
        self._units = units
        self._ttl = ttl
        self._timeout = timeout
        self._speaker = _Speaker(dd, _first_cache(units), owner=True)
        self._entries: dict[Key, _Entry] = {}
        self._given_up: OrderedDict[Key, None] = OrderedDict()
        self._keepers = Tasks()

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def counts(self) -> dict[str, int]:
        """Return the number of reservations in each state of `STATES`."""
        found = Counter(entry.state for entry in self._entries.values())
        return {state: found[state] for state in STATES}

    def reserve(self, job: ReserveJob, prompt_tokens: int, positions: int) -> Reservation:
        """Reserve blocks for a prompt and its answer.

        Raises
        ------
        ServeError
            ``no_blocks``, ``context_length_exceeded``, ``duplicate_request``, or ``reservation_gone``: it was given up
            before it was made.
        """
        key = (job.generation.request_id, job.attempt)
        if key in self._given_up:
            raise ServeError("reservation_gone", f"{key[0]} was given up before it was reserved")
        if key in self._entries:
            raise ServeError("duplicate_request", f"request {key[0]}, attempt {key[1]}, is reserved already")
        placed = self._units.place(positions, full="no_blocks")
        entry = self._entries[key] = _Entry(key, placed, job.writer)
        self._let_expire(entry)
        layout = placed.unit.engine.layout
        return Reservation(
            request_id=key[0],
            attempt=key[1],
            owner=replace(self._peer, rank=placed.unit.rank),
            blocks=placed.reserved.blocks[: -(-prompt_tokens // layout.block_tokens)],
            ttl_s=self._ttl,
        )

    async def take(self, ticket: Ticket) -> Placed:
        """Take what was pushed: from here on the blocks are the caller's.

        Raises
        ------
        ServeError
            ``reservation_gone``; ``transfer_timeout``: it is not committed. Then, and after a cancel, the reservation
            is given up.
        """
        entry = self._entries.get((ticket.request_id, ticket.attempt))
        if entry is None or entry.taken or entry.state == "quarantined":
            raise ServeError("reservation_gone", f"nothing is reserved for {ticket.request_id}")
        entry.taken = True
        try:
            # The ticket came by another way, and may be faster than the writer's word.
            async with asyncio.timeout(self._timeout):
                complete = await asyncio.shield(entry.outcome)
        except TimeoutError:
            self._give_up(entry)
            raise ServeError("transfer_timeout", f"the push of {ticket.request_id} was not committed") from None
        except asyncio.CancelledError:
            self._give_up(entry)
            raise
        if not complete or entry.state != "ready":
            raise ServeError("reservation_gone", f"the push of {ticket.request_id} has ended without a commit")
        self._forget(entry)
        return entry.placed

    def release(self, request_id: str, attempt: int) -> int:
        """Give a reservation up; return how many there were. What its writer may still write is quarantined."""
        key = (request_id, attempt)
        entry = self._entries.get(key)
        if entry is None:
            # The order to reserve may come behind: on another connection, from a router that does not wait for it.
            self._given_up[key] = None
            if len(self._given_up) > _REMEMBERED:
                self._given_up.popitem(last=False)
            return 0
        if entry.state == "quarantined":
            return 0
        self._give_up(entry)
        return 1

    def hear(self, cluster_id: int, word: Word) -> None:
        """Hear a writer."""
        entry = self._entries.get(word.key)
        if entry is not None and entry.writer != cluster_id:
            entry = None
        if word.word == "begin":
            link = self._dd.links.get(cluster_id)
            may = entry is not None and entry.state == "reserved" and link is not None
            if may and entry is not None:
                entry.state, entry.link = "receiving", link
                entry.stop_expiry()
            self._speaker.say(cluster_id, "grant" if may else "refuse", word.key)
        elif entry is not None and entry.link is not None and word.word in ("commit", "ended"):
            entry.writer_ended = True
            entry.news.set()
            if entry.state == "receiving":
                if word.word == "commit":
                    entry.state = "ready"
                    self._let_expire(entry)
                else:
                    self._free(entry)
                entry.decide(word.word == "commit")

    def look_at_links(self) -> None:
        """Give up what is received over links that have ended."""
        for entry in list(self._entries.values()):
            if entry.link is not None and self._dd.links.get(entry.writer) is not entry.link:
                entry.news.set()
                if entry.state == "receiving":
                    self._give_up(entry)

    async def close(self) -> None:
        """Give all up, and wait until they are quiet, for a moment."""
        for entry in list(self._entries.values()):
            if entry.state != "quarantined":
                self._give_up(entry)
        await self._keepers.wait(2.0)
        self._keepers.cancel()

    def _let_expire(self, entry: _Entry) -> None:
        entry.stop_expiry()
        entry.expiry = asyncio.get_running_loop().call_later(self._ttl, self._expire, entry)

    def _expire(self, entry: _Entry) -> None:
        _log.warning("a reservation ran out", request_id=entry.key[0], state=entry.state)
        self._give_up(entry)

    def _give_up(self, entry: _Entry) -> None:
        entry.decide(False)
        if entry.state in ("reserved", "ready"):
            self._free(entry)  # nobody may write into it: not yet, or not any more
        elif entry.state == "receiving":
            entry.state = "quarantined"
            self._keepers.start(self._keep(entry))

    def _forget(self, entry: _Entry) -> None:
        entry.stop_expiry()
        del self._entries[entry.key]

    def _free(self, entry: _Entry) -> None:
        self._forget(entry)
        entry.state = "freed"  # whoever still holds it must neither take it nor give it up again
        entry.placed.free()

    async def _keep(self, entry: _Entry) -> None:
        """Keep blocks in quarantine until nobody can write into them."""
        self._speaker.say(entry.writer, "revoke", entry.key)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2 * self._timeout):
                await entry.news.wait()
        if not entry.writer_ended:
            _log.warning("the writer of a reservation is not heard any more", request_id=entry.key[0])
            try:
                await self._end_link(entry)
            except adt.ClosedError:
                return  # the memory itself goes, and closing waits for whoever writes
        self._free(entry)

    async def _end_link(self, entry: _Entry) -> None:
        """Wait until nothing of the link that was granted can touch memory."""
        while True:
            try:
                if self._dd.links.get(entry.writer) is entry.link:
                    await self._dd.unlink(adt.ClusterInfo(entry.writer), timeout=self._timeout)
                await self._dd.fence(entry.writer, timeout=self._timeout)
                return
            except adt.ClosedError:
                raise
            except adt.DataDistError as why:
                # Nobody knows whether it still writes. Ask again: what is not known to be quiet is not given away.
                _log.warning("blocks stay in quarantine", request_id=entry.key[0], reason=why)
                await asyncio.sleep(_ASK_AGAIN)


def _first_cache(units: Units) -> adt.Cache:
    cache: adt.Cache | None = next(iter(units)).cache
    assert cache is not None
    return cache
