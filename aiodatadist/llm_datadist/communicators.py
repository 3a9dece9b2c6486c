"""Communicators: the two-sided ``link``, in which all members call with the same name and the same ranks.

Nobody has to listen beforehand. The members meet at the one with the lowest rank: by the communicator's name on one
host, over TCP at the rank table's address from another. There each says where it can be linked, and when all have come
each links those of lower rank and says so. When all have said so it is done. What is linked is a link like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
import struct
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import anyio
import anyio.abc
import msgspec
from anyio.streams.buffered import BufferedByteReceiveStream

from .. import Address, ClosedError, ClusterInfo, DataDist, DataDistError
from .rank_table import Member
from .status import LLMException, LLMStatusCode
from .utils.log import get_logger
from .v2.llm_types import RegisterMemStatus

__all__ = ["Communicators"]

_PARAM_INVALID: Final = LLMStatusCode.LLM_PARAM_INVALID
_LINK_FAILED: Final = LLMStatusCode.LLM_LINK_FAILED
_UNLINK_FAILED: Final = LLMStatusCode.LLM_UNLINK_FAILED
_NOT_YET_LINK: Final = LLMStatusCode.LLM_NOT_YET_LINK

_MOST: Final = 512
_CONNECT_TIMEOUT: Final = "HCCL_CONNECT_TIMEOUT"
_DEFAULT_SECONDS: Final = 120
_LINE_LIMIT: Final = 64 * 1024
# How long someone who came to a meeting may take to say what for.
_HELLO_SECONDS: Final = 5.0
# More than all members that may come at once, and few against the limit of open files.
_MOST_GUESTS: Final = 256
_CONNECT_SECONDS: Final = 5.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5

_T = TypeVar("_T")
_STRANGE = (msgspec.MsgspecError, anyio.DelimiterNotFound)
_GONE = (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, anyio.IncompleteRead)


class _Hello(msgspec.Struct, frozen=True):
    """What a member says to the one with the lowest rank."""

    name: str
    ranks: dict[int, int]
    cluster_id: int
    address: str  # where it can be linked; empty for the highest rank, whom nobody links


class _Answer(msgspec.Struct, frozen=True):
    """What it hears: the addresses of all, or why not."""

    addresses: dict[int, str] = {}
    refused: str = ""
    later: bool = False  # nobody here calls link with that name yet


class _Linked(msgspec.Struct, frozen=True):
    """A member has linked all of lower rank; as an answer, all have."""

    linked: bool = True


class _Failed(Exception):
    """The members did not meet; the text says why."""


@dataclass(eq=False)
class _Communicator:
    """One call of link."""

    comm_id: int
    name: str
    members: Sequence[Member]  # by rank
    me: Member
    seconds: int
    # Links that something else has made before, by cluster id and epoch: they stay.
    found: dict[int, int]
    status: RegisterMemStatus = RegisterMemStatus.PREPARING
    task: asyncio.Task[None] | None = None
    opened: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)
    # Where the lowest rank is: who has come, with its address, and over which connection.
    present: dict[int, str] = field(default_factory=dict)
    guests: dict[int, object] = field(default_factory=dict)
    linked: set[int] = field(default_factory=set)
    told: set[int] = field(default_factory=set)
    lost: int | None = None  # a member that left while it was linking
    # All have come, have linked, have been told that all have; or it is over.
    all_there: anyio.Event = field(default_factory=anyio.Event)
    all_linked: anyio.Event = field(default_factory=anyio.Event)
    all_told: anyio.Event = field(default_factory=anyio.Event)

    @property
    def lead(self) -> Member:
        """The member with the lowest rank, at whose place the others come together."""
        return self.members[0]

    @property
    def leads(self) -> bool:
        return self.me is self.lead

    @property
    def ranks(self) -> dict[int, int]:
        return {member.cluster_id: member.rank for member in self.members}

    @property
    def peers(self) -> list[Member]:
        return [member for member in self.members if member is not self.me]

    @property
    def on_one_host(self) -> bool:
        return len({member.server_id for member in self.members}) == 1

    @property
    def places(self) -> list[str | Address]:
        """Where to meet, best first: an abstract socket of this host, and what others than this host can reach."""
        clusters = sorted(self.ranks)
        digest = hashlib.sha256(repr((os.geteuid(), self.name, clusters)).encode()).hexdigest()
        found: list[str | Address] = [f"\0aiodatadist-{digest[:40]}"]
        if self.lead.host and not self.on_one_host:
            found.append(Address(self.lead.host, self.lead.port))
        return found

    def own_host(self, stream: anyio.abc.ByteStream | None) -> str:
        """Return the address at which the others can link this node: what the table says, or what the lead sees."""
        if self.on_one_host:
            return "127.0.0.1"
        seen = None if stream is None else stream.extra(anyio.abc.SocketAttribute.local_address)
        return self.me.host or (str(seen[0]) if isinstance(seen, tuple) else "127.0.0.1")

    def objection(self, hello: _Hello) -> str:
        """Say why someone does not belong here, or nothing."""
        if hello.ranks != self.ranks:
            return f"cluster_rank_info is {hello.ranks} at cluster {hello.cluster_id}, and {self.ranks} here"
        if hello.cluster_id not in self.ranks or hello.cluster_id == self.me.cluster_id:
            return f"cluster {hello.cluster_id} is no other member"
        return ""

    @property
    def complete(self) -> bool:
        return len(self.present) == len(self.members)

    def came(self, cluster_id: int, address: str, guest: object = None) -> None:
        self.present[cluster_id] = address
        self.guests[cluster_id] = guest
        if self.complete:
            self.all_there.set()

    def has_linked(self, cluster_id: int) -> None:
        self.linked.add(cluster_id)
        if len(self.linked) == len(self.peers):
            self.all_linked.set()

    def went(self, cluster_id: int, guest: object) -> None:
        """Note that a member is gone: too early, or when it has been told that all have linked."""
        if self.guests.get(cluster_id) is not guest:
            return  # it has come anew
        if not self.complete:
            del self.present[cluster_id], self.guests[cluster_id]
            return
        if not self.all_linked.is_set():
            self.lost = cluster_id
            self.all_linked.set()
        self.told.add(cluster_id)
        if len(self.told) == len(self.peers):
            self.all_told.set()

    def is_over(self) -> None:
        for event in (self.all_there, self.all_linked, self.all_told):
            event.set()


@dataclass(eq=False)
class _Place:
    """A listener to which members come, shared by the communicators that are led there."""

    listener: anyio.abc.Listener[anyio.abc.SocketStream]
    task: asyncio.Task[None]
    users: int = 1


class Communicators:
    """The communicators of one node. Belongs to the event loop of its DataDist.

    Parameters
    ----------
    dd : DataDist
        Open.
    seconds : int
        ``link_total_time``: how long the members may take to find and link each other. 0: ``HCCL_CONNECT_TIMEOUT``
        seconds, or 120.
    """

    def __init__(self, dd: DataDist, seconds: int) -> None:
        self._dd = dd
        self._seconds = seconds
        self._last_id = 0
        self._all: dict[int, _Communicator] = {}
        self._places: dict[str | Address, _Place] = {}
        self._guests = 0
        self._listening: Address | None = None  # what was opened for communicators that prepare

    async def link(self, name: str, members: Sequence[Member], cluster_id: int) -> int:
        """Begin to link the members of a communicator, and return its id, counting from 1.

        Raises
        ------
        LLMException
            LLM_PARAM_INVALID: this node is no member, or there are too many communicators. LLM_LINK_FAILED: as the
            lowest rank, it cannot let the others come.
        """
        me = next((member for member in members if member.cluster_id == cluster_id), None)
        if me is None:
            raise _error(_PARAM_INVALID, f"cluster {cluster_id}, this one, is not in cluster_rank_info")
        if len(self._all) >= _MOST:
            raise _error(_PARAM_INVALID, f"there are {_MOST} communicators; unlink some")
        seconds = self._seconds or _connect_timeout()
        one = _Communicator(self._last_id + 1, name, members, me, seconds, self._found(members))
        if any(other.name == name and other.ranks.keys() == one.ranks.keys() for other in self._preparing()):
            raise _error(_LINK_FAILED, f"{name!r} is being linked already; unlink it first")
        places = one.places
        self._last_id += 1
        async with one.opened:
            if one.leads:
                for where in places:
                    await one.opened.enter_async_context(self._open(where))
            # From here on its task closes what was opened, or `_ended` where that was too fast for it.
            one.opened = one.opened.pop_all()
        self._all[one.comm_id] = one
        one.task = asyncio.create_task(self._prepare(one))
        return one.comm_id

    def status(self, comm_id: int) -> RegisterMemStatus:
        """Return whether the members are linked."""
        return self._known(comm_id).status

    def holds(self, cluster_id: int) -> bool:
        """Say whether a communicator has that cluster as a member."""
        return any(member.cluster_id == cluster_id for one in self._all.values() for member in one.peers)

    def _found(self, members: Sequence[Member]) -> dict[int, int]:
        others = list(self._all.values())
        return {
            member.cluster_id: link.epoch
            for member in members
            if (link := self._dd.links.get(member.cluster_id)) is not None
            and (
                not self.holds(member.cluster_id) or any(self._was_found(other, member.cluster_id) for other in others)
            )
        }

    def _was_found(self, one: _Communicator, cluster_id: int) -> bool:
        link = self._dd.links.get(cluster_id)
        return link is not None and one.found.get(cluster_id) == link.epoch

    async def unlink(self, comm_id: int) -> None:
        """End a communicator, and the links to members that nothing else keeps."""
        one = self._known(comm_id)
        del self._all[comm_id]
        await _ended(one)
        ending = [
            self._dd.unlink(ClusterInfo(member.cluster_id))
            for member in one.peers
            if not self.holds(member.cluster_id) and not self._was_found(one, member.cluster_id)
        ]
        for result in await asyncio.gather(*ending, return_exceptions=True):
            if isinstance(result, DataDistError):
                raise _error(_UNLINK_FAILED, f"communicator {comm_id}, {one.name!r}: {result}") from result
            if result is not None:
                raise result

    async def close(self) -> None:
        """Stop all preparations, and forget all communicators. Links stay."""
        ending = list(self._all.values())
        self._all.clear()
        for one in ending:
            await _ended(one)

    def _known(self, comm_id: int) -> _Communicator:
        one = self._all.get(comm_id)
        if one is None:
            raise _error(_NOT_YET_LINK, f"there is no communicator {comm_id}")
        return one

    def _preparing(self) -> list[_Communicator]:
        return [one for one in self._all.values() if one.status is RegisterMemStatus.PREPARING]

    # Preparing. ---------------------------------------------------------------------------------------------

    async def _prepare(self, one: _Communicator) -> None:
        """Link all members; then, or at the deadline, say so in the status."""
        status = RegisterMemStatus.FAILED
        try:
            async with one.opened:
                with anyio.fail_after(one.seconds):
                    await self._link_all(one)
            status = RegisterMemStatus.OK
        except TimeoutError:
            missing = [member.cluster_id for member in one.peers if member.cluster_id not in self._dd.links]
            _log_failure(one, f"after {one.seconds} s these clusters are not linked: {missing}")
        except (_Failed, DataDistError, LLMException) as why:
            _log_failure(one, str(why))
        finally:
            one.status = status
            one.is_over()
            self._stop_listening()

    async def _link_all(self, one: _Communicator) -> None:
        # From before anyone can link this node, so that none is missed.
        events = self._dd.events()
        await (self._let_come(one) if one.leads else self._go(one))
        # Those of higher rank have linked this node, and the news may arrive a moment later.
        while not {member.cluster_id for member in one.peers} <= self._dd.links.keys():
            async for _ in events:
                break
            else:
                raise _Failed("this node is closed")

    async def _let_come(self, one: _Communicator) -> None:
        """Be the one to whom the others come."""
        one.came(one.me.cluster_id, str(await self._listen(one.own_host(None))))
        await one.all_linked.wait()
        if one.lost is not None:
            raise _Failed(f"cluster {one.lost} left before all were linked")
        await one.all_told.wait()

    async def _go(self, one: _Communicator) -> None:
        """Go to the lowest rank, again and again, until all have come there; link those of lower rank, and say so."""
        pause = _FIRST_PAUSE
        while True:
            async with _connected(one.places) as stream:
                talk = None if stream is None else _Talk(stream)
                answer = None if talk is None else await self._ask(one, talk)
                if talk is not None and answer is not None:
                    for member in one.members:
                        if member.rank < one.me.rank:
                            address = answer.addresses[member.cluster_id]
                            await self._dd.link(ClusterInfo(member.cluster_id, address), timeout=None)
                    try:
                        await talk.say(_Linked())
                        await talk.hear(_Linked)
                    except (*_GONE, *_STRANGE):
                        raise _Failed(f"cluster {one.lead.cluster_id} left before all were linked") from None
                    return
            await anyio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _ask(self, one: _Communicator, talk: _Talk) -> _Answer | None:
        """Return what the lowest rank says once all are there, or None if it has to be asked again."""
        highest = one.me is one.members[-1]
        address = "" if highest else str(await self._listen(one.own_host(talk.stream)))
        try:
            await talk.say(_Hello(one.name, one.ranks, one.me.cluster_id, address))
            answer = await talk.hear(_Answer)
        except _GONE:
            return None
        except _STRANGE as why:
            raise _Failed(f"who listens for cluster {one.lead.cluster_id} speaks another language: {why}") from None
        if answer.later:
            return None
        if answer.refused:
            raise _Failed(f"cluster {one.lead.cluster_id} refuses: {answer.refused}")
        if answer.addresses.keys() != one.ranks.keys():
            raise _Failed(f"cluster {one.lead.cluster_id} names other members: {sorted(answer.addresses)}")
        return answer

    async def _listen(self, host: str) -> Address:
        """Return where this node can be linked; where it did not listen, it does while communicators prepare."""
        now = self._dd.listen_address
        if now is None or (now == self._listening and now.host != host):
            now = self._listening = await self._dd.start_listening((host, 0))
        return Address(host, now.port) if now.host in ("0.0.0.0", "::") else now

    def _stop_listening(self) -> None:
        if self._listening is not None and not self._preparing():
            # Not if it was told to listen elsewhere meanwhile.
            if self._dd.listen_address == self._listening:
                # Refused while closing, which stops it, too.
                with contextlib.suppress(ClosedError):
                    _ = self._dd.stop_listening()
            self._listening = None

    # The place of the lowest rank. --------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _open(self, where: str | Address) -> AsyncIterator[None]:
        place = self._places.get(where)
        if place is None:
            try:
                listener = await _listener(where)
            except OSError as why:
                raise _error(_LINK_FAILED, f"members cannot come to {_shown(where)}: {why}") from why
            place = _Place(listener, asyncio.create_task(listener.serve(self._receive)))
            self._places[where] = place
        else:
            place.users += 1
        try:
            yield
        finally:
            place.users -= 1
            if not place.users:
                del self._places[where]
                place.task.cancel()
                await asyncio.wait((place.task,))
                await place.listener.aclose()
                if not place.task.cancelled() and (broken := place.task.exception()) is not None:
                    get_logger().error("members could not come to %s any more: %s", _shown(where), broken)

    async def _receive(self, stream: anyio.abc.SocketStream) -> None:
        """Take in someone who came."""
        async with stream:
            if not _of_this_user(stream) or self._guests >= _MOST_GUESTS:
                return
            self._guests += 1
            talk = _Talk(stream)
            try:
                with anyio.fail_after(_HELLO_SECONDS):
                    hello = await talk.hear(_Hello)
                await self._answer(hello, talk)
            except (*_GONE, *_STRANGE, TimeoutError) as why:
                get_logger().info("someone came and left, or is no member: %r", why)
            finally:
                self._guests -= 1

    async def _answer(self, hello: _Hello, talk: _Talk) -> None:
        led = [one for one in self._preparing() if one.leads and one.name == hello.name]
        one = next((one for one in led if one.ranks == hello.ranks), led[0] if led else None)
        if one is None:
            await talk.say(_Answer(later=True))
        elif why := one.objection(hello):
            await talk.say(_Answer(refused=why))
        else:
            one.came(hello.cluster_id, hello.address, talk)
            try:
                await _attend(one, hello.cluster_id, talk)
            finally:
                one.went(hello.cluster_id, talk)


async def _attend(one: _Communicator, cluster_id: int, talk: _Talk) -> None:
    """Be with a member, until all are linked."""
    if not await talk.unless_it_leaves(one.all_there) or not one.complete:
        return
    await talk.say(_Answer(addresses=one.present))
    await talk.hear(_Linked)
    one.has_linked(cluster_id)
    if await talk.unless_it_leaves(one.all_linked) and len(one.linked) == len(one.peers):
        await talk.say(_Linked())


class _Talk:
    """Lines of JSON over a connection."""

    def __init__(self, stream: anyio.abc.SocketStream) -> None:
        self.stream = stream
        self._lines = BufferedByteReceiveStream(stream)

    async def say(self, message: msgspec.Struct) -> None:
        await self.stream.send(msgspec.json.encode(message) + b"\n")

    async def hear(self, kind: type[_T]) -> _T:
        line = await self._lines.receive_until(b"\n", _LINE_LIMIT)
        return msgspec.json.decode(line, type=kind)

    async def unless_it_leaves(self, event: anyio.Event) -> bool:
        """Wait for an event while the other end has nothing to say; False if it leaves, or says something."""
        async with anyio.create_task_group() as group:

            async def watch() -> None:
                with contextlib.suppress(*_GONE):
                    await self.stream.receive(1)
                group.cancel_scope.cancel()

            group.start_soon(watch)
            await event.wait()
            group.cancel_scope.cancel()
            return True
        return False


def _error(status: LLMStatusCode, text: str) -> LLMException:
    return LLMException(text, status_code=status)


def _log_failure(one: _Communicator, why: str) -> None:
    get_logger().error("communicator %d, %r, is not linked: %s", one.comm_id, one.name, why)


async def _ended(one: _Communicator) -> None:
    """Stop preparing it; what it opened is closed then."""
    if one.task is not None:
        one.task.cancel()
        await asyncio.wait((one.task,))
    await one.opened.aclose()


def _connect_timeout() -> int:
    text = os.environ.get(_CONNECT_TIMEOUT, "").strip() or str(_DEFAULT_SECONDS)
    if not (text.isascii() and text.isdecimal() and len(text) <= 6 and int(text)):
        raise _error(_PARAM_INVALID, f"{_CONNECT_TIMEOUT}={text!r:.80} is no number of seconds from 1 to 999999")
    return int(text)


def _shown(where: str | Address) -> str:
    return str(where) if isinstance(where, Address) else f"the name {where[1:]!r} of this host"


async def _listener(where: str | Address) -> anyio.abc.Listener[anyio.abc.SocketStream]:
    if isinstance(where, Address):
        return await anyio.create_tcp_listener(local_host=where.host, local_port=where.port)
    return await anyio.create_unix_listener(where)


@contextlib.asynccontextmanager
async def _connected(places: Sequence[str | Address]) -> AsyncIterator[anyio.abc.SocketStream | None]:
    """Connect to the first place where someone of this user listens; None if there is none."""
    for where in places:
        stream: anyio.abc.SocketStream | None = None
        with anyio.move_on_after(_CONNECT_SECONDS), contextlib.suppress(OSError):
            if isinstance(where, Address):
                stream = await anyio.connect_tcp(where.host, where.port)
            else:
                stream = await anyio.connect_unix(where)
        if stream is not None:
            async with stream:
                yield stream if _of_this_user(stream) else None
            return
    yield None


def _of_this_user(stream: anyio.abc.SocketStream) -> bool:
    """Say whether the other end of an abstract socket, which has no permissions, belongs to this user."""
    raw = stream.extra(anyio.abc.SocketAttribute.raw_socket)
    if raw.family != socket.AF_UNIX:
        return True
    _, user, _ = struct.unpack("3i", raw.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return bool(user == os.geteuid())
