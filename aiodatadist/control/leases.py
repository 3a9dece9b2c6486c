"""Leases: blocks that a node keeps for a peer until the peer has pulled them, or has been gone for a TTL.

The engine keeps the time, renews what was adopted, and fences the peer at the end of a lease. Here is which blocks a
lease holds, who waits for its end, and what this side has adopted of its peers, which know their leases as `Lease` and
this side by their ids alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self, SupportsFloat, SupportsIndex

import numpy as np

from .. import _core
from ..errors import (
    ArgumentError,
    ArgumentTypeError,
    BlockIndexError,
    BusyError,
    ClosedError,
    ForkedError,
    LeaseError,
    LinkTimeout,
    NativeStatus,
    NotLinkedError,
    PeerLostError,
    WrongLoopError,
)
from ..observe import PendingOperation
from ..transfer import Operation
from ..types import (
    Event,
    LeaseEnd,
    LeaseExpired,
    LeaseLost,
    LeaseReleased,
    as_integer,
    shown,
)

if TYPE_CHECKING:
    from .._loop import Runtime, Timer
    from .._sides import Blocks
    from ..registry import Cache
    from ..transfer import Transfer
    from .links import Link

__all__ = ["MAX_ADOPTED", "Lease", "LeaseBook"]

MAX_ADOPTED: Final = 65536
"""Leases of one peer that may be adopted at a time; the engine of their owner has the same limit for one link."""

_CAPABILITY: Final = "leases"
_TTL_LEAST: Final = 0.01
_TTL_MOST: Final = 30 * 86400.0

_ENDS: Final = {
    NativeStatus.OK: LeaseEnd.RELEASED,
    NativeStatus.TIMEOUT: LeaseEnd.EXPIRED,
    NativeStatus.PEER_LOST: LeaseEnd.PEER_LOST,
    NativeStatus.CLOSED: LeaseEnd.CLOSED,
}


class Lease:
    """Blocks of a cache of this DataDist, held for a peer. Made by `CacheManager.hold`.

    Holding is bookkeeping: nothing in here keeps this process from using the blocks. A lease ends by `release`, by the
    peer's ``DataDist.release_lease``, when nobody has renewed it for `ttl` seconds, or when the cache or the DataDist
    is closed. It is *over* once, besides, no operation that the peer began before can touch local memory: then the
    blocks can be given to somebody else. Dropping the object changes nothing. As a context manager it is released at
    the end of the block, which waits until it is over.

    Attributes
    ----------
    id : int
        Random, never used again: the name by which the peer adopts it.
    cache_id : int
    peer : int or None
        The cluster id that it is held for; None: whoever adopts it first.
    ttl : float
        Seconds.
    blocks : ndarray
        int64, each block once, rising, read-only.
    nbytes : int
        Bytes of the blocks, in all tensors.
    """

    def __init__(
        self, book: LeaseBook, lease_id: int, cache: Cache, peer: int | None, ttl: float, blocks: np.ndarray[Any, Any]
    ) -> None:
        self.id = lease_id
        self.cache_id = cache.id
        self.peer = peer
        self.ttl = ttl
        self.blocks = blocks
        self.nbytes = len(blocks) * cache.geometry.block_bytes * cache.geometry.num_tensors
        self._book = book
        self._end: LeaseEnd | None = None
        self._waiting: dict[Operation[LeaseEnd], None] = {}

    def __repr__(self) -> str:
        return f"<Lease {self.id}: {self.state}, {len(self.blocks)} blocks of cache {self.cache_id} for {self.peer}>"

    @property
    def state(self) -> Literal["held", "ending", "over"]:
        """``"held"``, ``"ending"`` (it has ended, and the peer may still touch the blocks), or ``"over"``."""
        if self._end is not None:
            return "over"
        return "ending" if self._book.row(self.id)[1] else "held"

    @property
    def adopted(self) -> bool:
        """Whether a peer renews it at present."""
        return self._end is None and self._book.row(self.id)[2]

    @property
    def expires_in(self) -> float:
        """Seconds until it ends if nobody renews it; 0.0 once it has ended."""
        return 0.0 if self._end is not None else self._book.row(self.id)[3]

    @property
    def end(self) -> LeaseEnd | None:
        """How it ended; None until it is over."""
        return self._end

    def release(self) -> Transfer[LeaseEnd]:
        """End it now, whatever the peer does.

        Returns
        -------
        Transfer
            As of `wait_over`. Releasing what has ended already changes nothing.

        Raises
        ------
        WrongLoopError, ForkedError
            It belongs to another loop, or to the parent process.
        """
        return self._book.release(self)

    def wait_over(self) -> Transfer[LeaseEnd]:
        """Wait until the blocks may be given to somebody else.

        Returns
        -------
        Transfer
            Its result says how the lease ended. Cancelling it ends the wait, and nothing else.

        Raises
        ------
        WrongLoopError, ForkedError
            It belongs to another loop, or to the parent process.
        """
        return self._book.wait_over(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.release()

    def _over(self, end: LeaseEnd) -> None:
        self._end = end
        waiting, self._waiting = self._waiting, {}
        for waiter in waiting:
            waiter._finish(end)


class _Held:
    """How many leases hold each block of one cache."""

    def __init__(self, cache: Cache) -> None:
        self.counts = np.zeros(cache.geometry.num_blocks, np.uint32)
        self.block_bytes = cache.geometry.block_bytes * cache.geometry.num_tensors
        self.blocks = 0
        self.leases = 0

    def add(self, blocks: np.ndarray[Any, Any]) -> None:
        self.leases += 1
        self.blocks += int(np.count_nonzero(self.counts[blocks] == 0))
        self.counts[blocks] += 1

    def remove(self, blocks: np.ndarray[Any, Any]) -> None:
        self.leases -= 1
        self.counts[blocks] -= 1
        self.blocks -= int(np.count_nonzero(self.counts[blocks] == 0))


class _Adopted:
    """What was adopted over one link."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.leases: set[int] = set()
        self.asked: dict[int, set[int]] = {}  # tokens of adoptions that were not answered, by lease


class _Question(Operation[Any]):
    """What was asked of the owner of a lease and not answered yet."""

    __slots__ = ("adopted", "kind", "lease_id", "since", "timer", "token")

    kind: Literal["adopt", "release"]
    lease_id: int
    adopted: _Adopted
    token: int
    since: float
    timer: Timer | None


class LeaseBook:
    """The leases of a DataDist: those it holds for peers, and those of peers that it has adopted.

    Parameters
    ----------
    runtime : Runtime
    node : _core.Node
    cluster_id : int
        This DataDist's.
    links : mapping of int to Link
        Those that are ready.
    publish : callable
        Takes an `Event`.
    """

    def __init__(
        self,
        runtime: Runtime,
        node: _core.Node,
        cluster_id: int,
        links: Mapping[int, Link],
        publish: Callable[[Event], None],
    ) -> None:
        self._runtime = runtime
        self._node = node
        self._cluster_id = cluster_id
        self._links = links
        self._publish = publish
        self._leases: dict[int, Lease] = {}
        self._held: dict[int, _Held] = {}  # by cache id
        self._ended = dict.fromkeys(LeaseEnd, 0)
        self._adopted: dict[int, _Adopted] = {}  # by the engine's number of the link
        self._questions: dict[int, _Question] = {}  # by token
        self._lost = dict.fromkeys(LeaseEnd, 0)

    def on_event(self, kind: int, peer_id: int, token: int, status: int, nbytes: int) -> None:
        """Take one event of the engine about a lease."""
        if kind == _core.EVENT_LEASE_OVER:
            self._over(token, _ENDS[NativeStatus(status)])
        elif kind == _core.EVENT_LEASE_ANSWER:
            self._answered(token, status, nbytes)
        else:
            adopted = self._adopted.get(peer_id)
            if adopted is not None and token in adopted.leases:
                adopted.leases.remove(token)
                self._lose(adopted, token, _ENDS[NativeStatus(status)])

    # The owner. ---------------------------------------------------------------------------------------------

    def hold(self, cache: Cache, blocks: Blocks, ttl: float, peer: SupportsIndex | None) -> Lease:
        """Hold blocks; see `CacheManager.hold`."""
        seconds = _checked_ttl(ttl)
        cluster = None if peer is None else as_integer(peer, "peer")
        if cluster == self._cluster_id:
            raise ArgumentError(f"peer={cluster} is this DataDist itself", hint="a lease is for another node")
        if cache.closed:
            raise ClosedError(f"cache {cache.id} is unregistered")
        chosen = _checked_blocks(blocks, cache.geometry.num_blocks)
        lease = Lease(self, self._runtime.chance.randrange(1, 2**63), cache, cluster, seconds, chosen)
        if not self._node.hold(lease.id, cache.id, seconds, cluster):
            raise ClosedError("the DataDist is closing")
        self._leases[lease.id] = lease
        self._held.setdefault(cache.id, _Held(cache)).add(chosen)
        return lease

    def held(self, cache: Cache) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return which blocks of a cache are held; see `CacheManager.held`."""
        held = self._held.get(cache.id)
        return np.zeros(cache.geometry.num_blocks, np.bool_) if held is None else held.counts > 0

    def row(self, lease_id: int) -> tuple[int, bool, bool, float]:
        """Return id, whether it has ended, whether it is adopted, and the seconds until it ends."""
        rows = self._node.leases(lease_id)
        return rows[0] if rows else (lease_id, True, False, 0.0)  # that it is over may lie in the ring still

    def release(self, lease: Lease) -> Transfer[LeaseEnd]:
        """End a lease; see `Lease.release`."""
        waiter = self.wait_over(lease)
        if lease.end is None:
            self._node.end_lease(lease.id)
        return waiter

    def wait_over(self, lease: Lease) -> Transfer[LeaseEnd]:
        """Wait for the end of a lease; see `Lease.wait_over`."""
        if _core.forked():
            raise ForkedError(f"{lease!r} belongs to the parent process", hint="start workers with spawn")
        if not self._runtime.is_current():
            raise WrongLoopError(
                f"lease {lease.id} was used outside the event loop and thread of its DataDist",
                hint="use loop.call_soon_threadsafe or asyncio.run_coroutine_threadsafe",
            )
        waiter: Operation[LeaseEnd] = Operation(loop=self._runtime.loop)
        if lease.end is not None:
            waiter._finish(lease.end)
            return waiter

        def leave() -> None:
            lease._waiting.pop(waiter, None)
            waiter._finish_cancelled()

        waiter._on_cancel = leave
        lease._waiting[waiter] = None
        return waiter

    def _over(self, lease_id: int, end: LeaseEnd) -> None:
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return
        held = self._held[lease.cache_id]
        held.remove(lease.blocks)
        if not held.leases:
            del self._held[lease.cache_id]
        self._ended[end] += 1
        lease._over(end)
        kind = LeaseExpired if end in (LeaseEnd.EXPIRED, LeaseEnd.PEER_LOST) else LeaseReleased
        self._publish(kind(lease.id, lease.cache_id, lease.peer, lease.nbytes, end))

    # The consumer. ------------------------------------------------------------------------------------------

    def adopt(self, cluster_id: int, lease_id: int, timeout: float | None) -> Transfer[float]:
        """Adopt a lease of a peer; see `DataDist.adopt_lease`."""
        link = self._link(cluster_id)
        if link is None:
            raise NotLinkedError(
                f"cluster {cluster_id} is not linked",
                peer=cluster_id,
                hint=f"await dd.link(ClusterInfo({cluster_id}, ...)) first",
            )
        if _CAPABILITY not in link._session.peer.capabilities:
            raise LeaseError("the peer's version knows no leases", peer=cluster_id, hint="update it")
        adopted = self._adopted.setdefault(link._native.id, _Adopted(link))
        if lease_id not in adopted.leases and len(adopted.leases) + len(adopted.asked) >= MAX_ADOPTED:
            raise BusyError(
                f"{MAX_ADOPTED} leases of cluster {cluster_id} are adopted", peer=cluster_id, hint="release some"
            )
        token = link._native.adopt_lease(lease_id)
        if token:
            adopted.asked.setdefault(lease_id, set()).add(token)
        return self._ask("adopt", adopted, lease_id, token, timeout)

    def release_adopted(self, cluster_id: int, lease_id: int, timeout: float | None) -> Transfer[bool]:
        """Tell the owner of a lease to end it; see `DataDist.release_lease`."""
        link = self._link(cluster_id)
        if link is None or _CAPABILITY not in link._session.peer.capabilities:
            nobody: Operation[bool] = Operation(loop=self._runtime.loop)
            nobody._finish(False)
            return nobody
        adopted = self._adopted.setdefault(link._native.id, _Adopted(link))
        adopted.leases.discard(lease_id)
        for token in tuple(adopted.asked.get(lease_id, ())):
            question = self._questions[token]
            self._end_question(question)
            question._fail(LeaseError(f"lease {lease_id} was released before it was adopted", peer=cluster_id))
        return self._ask("release", adopted, lease_id, link._native.release_lease(lease_id), timeout)

    def _link(self, cluster_id: int) -> Link | None:
        if cluster_id == self._cluster_id:
            raise ArgumentError(f"cluster {cluster_id} is this DataDist itself", hint="Lease.release ends its own")
        return self._links.get(cluster_id)

    def _ask(
        self, kind: Literal["adopt", "release"], adopted: _Adopted, lease_id: int, token: int, timeout: float | None
    ) -> Transfer[Any]:
        """Return the future of an answer; it ends without the help of a task, so that its state is never late."""
        question = _Question(loop=self._runtime.loop)
        question.kind, question.adopted, question.lease_id, question.token = kind, adopted, lease_id, token
        question.since = self._runtime.now()
        question.timer = None
        if not token:
            self._unanswered(question)
            return question
        self._questions[token] = question

        def cancel() -> None:
            self._give_up(question)
            question._finish_cancelled()

        def late() -> None:
            self._give_up(question)
            question._fail(
                LinkTimeout(
                    f"{kind} missed its deadline of {timeout:g} s while waiting for the owner of the lease",
                    peer=adopted.link.cluster_id,
                )
            )

        question._on_cancel = cancel
        if timeout is not None:
            question.timer = self._runtime.call_later(timeout, late)
        return question

    def _end_question(self, question: _Question) -> None:
        del self._questions[question.token]
        if question.timer is not None:
            question.timer.cancel()
        asked = question.adopted.asked.get(question.lease_id)
        if asked is not None and question.kind == "adopt":
            asked.discard(question.token)
            if not asked:
                del question.adopted.asked[question.lease_id]

    def _give_up(self, question: _Question) -> None:
        self._end_question(question)
        adopted, lease_id = question.adopted, question.lease_id
        if question.kind == "adopt" and lease_id not in adopted.leases and lease_id not in adopted.asked:
            # Nobody wants it, and the engine would renew it for as long as this process lives.
            adopted.link._native.release_lease(lease_id)

    def _answered(self, token: int, status: int, ttl_ns: int) -> None:
        question = self._questions.get(token)
        if question is None:
            return
        self._end_question(question)
        if question.kind == "release":
            question._finish(status == NativeStatus.OK)
        elif status == NativeStatus.OK:
            question.adopted.leases.add(question.lease_id)
            question._finish(ttl_ns * 1e-9)
        else:
            cluster_id = question.adopted.link.cluster_id
            question._fail(
                LeaseError(
                    f"lease {question.lease_id} of cluster {cluster_id} is over, or not held for this node",
                    peer=cluster_id,
                    hint="have the blocks filled again",
                )
            )

    def _unanswered(self, question: _Question) -> None:
        """End a question whose link has ended."""
        if question.kind == "release":
            question._finish(False)
        else:
            peer = question.adopted.link.cluster_id
            question._fail(PeerLostError("the link ended before the lease was adopted", peer=peer))

    def link_changed(self, cluster_id: int) -> None:
        """Drop what was adopted over links to this peer that have ended."""
        for number, adopted in tuple(self._adopted.items()):
            if adopted.link.cluster_id == cluster_id and self._links.get(cluster_id) is not adopted.link:
                del self._adopted[number]
                self._end_adopted(adopted)

    def _end_adopted(self, adopted: _Adopted) -> None:
        for question in [question for question in self._questions.values() if question.adopted is adopted]:
            self._end_question(question)
            self._unanswered(question)
        lost, adopted.leases = adopted.leases, set()
        for lease_id in lost:
            self._lose(adopted, lease_id, LeaseEnd.PEER_LOST)

    def _lose(self, adopted: _Adopted, lease_id: int, end: LeaseEnd) -> None:
        self._lost[end] += 1
        self._publish(LeaseLost(adopted.link.cluster_id, lease_id, end))

    # Closing. -----------------------------------------------------------------------------------------------

    def begin_closing(self) -> None:
        """Let go of the leases of peers, and end this side's; their ends are told as peers answer."""
        for adopted in self._adopted.values():
            for lease_id in adopted.leases:
                adopted.link._native.release_lease(lease_id)
            adopted.leases.clear()
        self._node.end_leases()

    def close(self) -> None:
        """End what nobody answers any more. The engine is quiet."""
        if not self._runtime.is_current():  # nobody is left to tell
            for lease in self._leases.values():
                lease._end = LeaseEnd.CLOSED
            return
        for lease_id in tuple(self._leases):
            self._over(lease_id, LeaseEnd.CLOSED)
        for question in tuple(self._questions.values()):
            self._end_question(question)
            question._fail(ClosedError("the DataDist was closed"))

    # To look at. --------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return what `DataDist.stats` says about leases."""
        rows = self._node.leases()
        left = [seconds for _, ended, _, seconds in rows if not ended]
        ending = [self._leases[number] for number, ended, _, _ in rows if ended and number in self._leases]
        return {
            "held": len(left),
            "ending": len(ending),
            "blocks": sum(held.blocks for held in self._held.values()),
            "bytes": sum(held.blocks * held.block_bytes for held in self._held.values()),
            "deferred_bytes": sum(lease.nbytes for lease in ending),
            "next_expiry": min(left, default=None),
            "ended": {end.value: count for end, count in self._ended.items()},
            "adopted": sum(len(adopted.leases) for adopted in self._adopted.values()),
            "lost": {end.value: count for end, count in self._lost.items()},
        }

    def rows(self) -> list[PendingOperation]:
        """Return the rows of `DataDist.dump`."""
        now = self._runtime.now()
        return [
            PendingOperation(
                id=question.lease_id,
                kind=f"{question.kind}-lease",
                peer=question.adopted.link.cluster_id,
                age=now - question.since,
                state="waiting for the owner of the lease",
            )
            for question in self._questions.values()
        ]


def _checked_blocks(blocks: Blocks, num_blocks: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    given = np.array(_core.frozen_blocks(blocks, "blocks"), np.int64)
    outside = np.flatnonzero((given < 0) | (given >= num_blocks))
    if outside.size:
        at = int(outside[0])
        raise BlockIndexError(
            f"blocks[{at}]={given[at]} is outside the cache's 0..{num_blocks - 1}",
            hint="give indices below the cache's number of blocks",
        )
    chosen = np.unique(given)
    chosen.flags.writeable = False
    return chosen


def _checked_ttl(ttl: float) -> float:
    if isinstance(ttl, bool) or not isinstance(ttl, SupportsFloat):
        raise ArgumentTypeError(f"ttl must be seconds, got {ttl!r:.80}")
    if not _TTL_LEAST <= ttl <= _TTL_MOST:  # compared as it is: a huge int does not fit a float
        number = shown(ttl) if isinstance(ttl, int) else ttl
        raise ArgumentError(f"ttl={number} is outside {_TTL_LEAST:g}..{_TTL_MOST:g} seconds", hint="30.0 is usual")
    return float(ttl)
