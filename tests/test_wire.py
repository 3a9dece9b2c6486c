"""The sans-IO parts of the control plane: preamble, frames, messages, and the cache table."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aiodatadist.control import wire
from aiodatadist.control.table import LocalRecord, LocalTable, RemoteTable, TableFeed, wire_geometry, wire_slots
from aiodatadist.errors import CacheNotFound, InternalError, ProtocolError
from aiodatadist.keys import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from aiodatadist.types import Geometry

ID = bytes(range(16))
GEOMETRY = Geometry.of("bfloat16", (32, 4, 8), 6)

IDENTITY: dict[str, Any] = {
    "version": 1,
    "min_version": 1,
    "cluster_id": 2**64 - 1,
    "incarnation": ID,
    "role": 2,
    "listen": ["10.0.0.1:26000", "[::1]:26000"],
    "capabilities": ["leases"],
    "transports": ["shm", "tcp"],
    "heartbeat_limit": 10.0,
    "notify_credits": 256,
    "notify_max_bytes": 65536,
    "max_message": 4 << 20,
    "tcp_connections": 2,
}

MESSAGES: list[wire.Message] = [
    wire.Hello(target=7, **IDENTITY),
    wire.Hello(target=7, challenge=2 * ID, **IDENTITY),
    wire.Challenge(challenge=2 * ID),
    wire.Proof(mac=2 * ID),
    wire.HelloReply(token=ID, host=wire.HostOffer(name=b"aiodatadist-1", nonce=ID), **IDENTITY),
    wire.HelloReply(token=ID, **IDENTITY),
    wire.Refused(kind="duplicate", reason="taken", status=5),
    wire.HostProof(proved=True, nonce=ID, answer=ID, address=2**63, secret=bytes(32)),
    wire.HostProof(proved=False, reason="another host"),
    wire.Agree(transports=["tcp"], data_connections=2),
    wire.Attached(),
    wire.Settled(failed={"verbs": "nothing arrives"}),
    wire.CacheAnnounce(
        version=3,
        cache_id=9,
        model_id=0,
        access="rw",
        geometry=wire_geometry(GEOMETRY),
        keys=[wire.ExportedKey(transport="shm", data=b"k", fd=1), wire.ExportedKey(transport="tcp", data=b"")],
    ),
    wire.CacheWithdraw(version=4, cache_id=9),
    wire.TableEnd(version=2**64 - 1),
    wire.Ready(),
    wire.Unlink(reason="closing"),
    wire.UnlinkAck(),
    wire.Notify(payload=b"\0\xff" * 100),
    wire.NotifyCredit(count=12),
    wire.Changed(role=3, listen=["[::1]:26000"]),
]


# The preamble. ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", wire.ConnectionKind)
def test_preamble_round_trip(kind: wire.ConnectionKind) -> None:
    control = kind is wire.ConnectionKind.CONTROL
    preamble = wire.Preamble(kind) if control else wire.Preamble(kind, 7, ID, 2 * ID)
    packed = preamble.pack()
    assert len(packed) == wire.PREAMBLE_SIZE
    assert packed.startswith(b"ADT1")
    assert wire.Preamble.unpack(packed) == preamble


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: p[:-1], "64 bytes"),
        (lambda p: b"HTTP" + p[4:], "began with"),
        (lambda p: p[:4] + b"\x09" + p[5:], "kind 9"),
        (lambda p: p[:4] + b"\x02\x02" + p[6:], "version 2"),
        (lambda p: p[:-1] + b"\x01", "not zero"),
    ],
)
def test_preamble_of_something_else(change: Any, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        wire.Preamble.unpack(change(wire.Preamble(wire.ConnectionKind.CONTROL).pack()))


def test_control_preamble_of_a_later_version_is_let_in_to_be_answered() -> None:
    packed = bytearray(wire.Preamble(wire.ConnectionKind.CONTROL).pack())
    packed[5] = 9
    packed[-1] = 1
    assert wire.Preamble.unpack(packed).kind is wire.ConnectionKind.CONTROL


@given(st.binary(min_size=64, max_size=64))
def test_x1_preamble_of_random_bytes(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        wire.Preamble.unpack(data)


# Frames and messages. ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_message_round_trip(message: wire.Message) -> None:
    reader = wire.FrameReader()
    reader.feed(wire.encode(message))
    assert reader.next_message() == message
    assert reader.next_message() is None
    assert reader.pending == 0


@given(st.lists(st.sampled_from(MESSAGES), max_size=20), st.lists(st.integers(1, 200), min_size=1, max_size=50))
def test_frames_survive_any_cutting(messages: list[wire.Message], cuts: list[int]) -> None:
    data = b"".join(wire.encode(message) for message in messages)
    reader, received, at, turn = wire.FrameReader(), [], 0, 0
    while at < len(data):
        size = cuts[turn % len(cuts)]
        reader.feed(data[at : at + size])
        at, turn = at + size, turn + 1
        while (message := reader.next_message()) is not None:
            received.append(message)
    assert received == messages
    assert reader.pending == 0


@pytest.mark.parametrize("length", [0, wire.HANDSHAKE_MAX_BYTES + 1, 2**32 - 1])
def test_x1_length_is_checked_before_anything_is_kept(length: int) -> None:
    reader = wire.FrameReader()
    reader.feed(struct.pack("<I", length))
    with pytest.raises(ProtocolError, match=f"message of {length} bytes"):
        reader.next_message()


def test_limit_may_grow_after_the_handshake() -> None:
    frame = wire.encode(wire.Notify(payload=bytes(100_000)), 1 << 20)
    reader = wire.FrameReader(1 << 20)
    reader.feed(frame)
    assert reader.next_message() == wire.Notify(payload=bytes(100_000))
    with pytest.raises(ProtocolError, match="the peer accepts"):
        wire.encode(wire.Notify(payload=bytes(100_000)))


@given(st.binary(max_size=300))
def test_x1_random_bytes_end_in_a_message_or_a_protocol_error(body: bytes) -> None:
    reader = wire.FrameReader()
    reader.feed(struct.pack("<I", len(body)) + body)
    try:
        while reader.next_message() is not None:
            pass
    except ProtocolError:
        pass


@given(st.sampled_from(MESSAGES), st.data())
def test_x1_damaged_messages_end_in_a_message_or_a_protocol_error(message: wire.Message, data: st.DataObject) -> None:
    frame = bytearray(wire.encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(4, len(frame) - 1))] = data.draw(st.integers(0, 255))
    reader = wire.FrameReader()
    reader.feed(frame)
    with contextlib.suppress(ProtocolError):
        reader.next_message()


# What msgpack can say, numbers beyond every limit and text where numbers belong included.
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=70)
    | st.text(max_size=70)
    | st.sampled_from([0, 1, 16, 2**32 - 1, 2**32, 2**63, 2**64 - 1, -1, bytes(16), bytes(32), "tcp", "rw"]),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8) | st.integers(0, 99), inner, max_size=5)
    ),
    max_leaves=8,
)


@given(st.sampled_from(MESSAGES), st.data())
def test_x1_fields_of_any_kind_end_in_a_message_or_a_protocol_error(message: wire.Message, data: st.DataObject) -> None:
    """Maps that look like a message, with fields changed, left out, put in, or put in the wrong message."""
    fields = msgspec.msgpack.decode(wire.encode(message)[4:], strict=False)
    names = sorted({*fields, "t", "geometry", "keys", "host", "listen", "payload", "x"})
    for name in data.draw(st.lists(st.sampled_from(names), max_size=4)):
        fields[name] = data.draw(VALUES)
    for name in data.draw(st.lists(st.sampled_from(names), max_size=2)):
        fields.pop(name, None)
    body = msgspec.msgpack.encode(fields)
    reader = wire.FrameReader()
    reader.feed(struct.pack("<I", len(body)) + body)
    try:
        read = reader.next_message()
    except ProtocolError:
        return
    assert isinstance(read, wire.Message)
    assert reader.pending == 0
    # What was let in can be sent on, and means the same there: nothing in it is beyond what this version checks.
    again = wire.FrameReader()
    again.feed(wire.encode(read))
    assert wire.encode(again.next_message()) == wire.encode(read)  # type: ignore[arg-type]


@given(st.integers(1, 5000), st.lists(st.binary(min_size=1, max_size=400), max_size=30))
def test_x1_a_reader_never_holds_more_than_its_limit_and_what_it_was_fed(limit: int, chunks: list[bytes]) -> None:
    reader = wire.FrameReader(limit)
    for chunk in chunks:
        reader.feed(chunk)
        try:
            while reader.next_message() is not None:
                pass
        except ProtocolError:
            return
        assert reader.pending < 4 + limit


@pytest.mark.parametrize(
    "body",
    [
        b"\x82\xa1t\x0e\xa5count" + b"\xdd\x7f\xff\xff\xff",  # a list of two billion instead of an integer
        b"\x82\xa1t\x0d\xa7payload\xc6\xff\xff\xff\xff",  # 4 GiB of bytes announced
        b"\x82\xa1t\x0c\xa1z" + b"\x91" * 5000,  # nesting
        b"\x82\xa1t\x0c\xa1z\xa2\xff\xfe",  # text that is none
        b"\x81\xa1t\xa1\xff",
        b"\x81\xa1t\x63",
        b"\xc1",
        b"\x90",
    ],
)
def test_x1_bombs_are_protocol_errors(body: bytes) -> None:
    reader = wire.FrameReader()
    reader.feed(struct.pack("<I", len(body)) + body)
    try:
        message = reader.next_message()
    except ProtocolError:
        return
    assert isinstance(message, wire.Message)  # an unknown field, skipped


def test_unknown_fields_are_ignored_and_unknown_messages_are_not() -> None:
    later = msgspec.msgpack.encode({"t": 12, "since_version": 2})
    reader = wire.FrameReader()
    reader.feed(struct.pack("<I", len(later)) + later)
    assert reader.next_message() == wire.UnlinkAck()
    unknown = msgspec.msgpack.encode({"t": 77})
    reader.feed(struct.pack("<I", len(unknown)) + unknown)
    with pytest.raises(ProtocolError, match="cannot be read"):
        reader.next_message()


@pytest.mark.parametrize(
    "change",
    [
        {"cluster_id": -1},
        {"incarnation": b"short"},
        {"transports": ["x"] * 33},
        {"listen": ["x" * 301]},
        {"heartbeat_limit": 0.0},
        {"heartbeat_limit": float("nan")},
        {"max_message": 100},
        {"tcp_connections": 0},
        {"version": 2**16},
    ],
    ids=str,
)
def test_impossible_hellos(change: dict[str, Any]) -> None:
    body = msgspec.msgpack.encode({"t": 1, "target": 1, **IDENTITY, **change})
    reader = wire.FrameReader()
    reader.feed(struct.pack("<I", len(body)) + body)
    with pytest.raises(ProtocolError):
        reader.next_message()


# The cache table. -------------------------------------------------------------------------------------------


def record(cache_id: int, model_id: int | None = None, slots: dict[int, CacheKey] | None = None) -> LocalRecord:
    key = None if model_id is None else BlocksCacheKey(1, model_id)
    native: Any = SimpleNamespace()
    return LocalRecord(cache_id, key, GEOMETRY, "rw", native, {} if slots is None else slots)


def announce(
    version: int, cache_id: int, model_id: int | None = None, slots: Sequence[wire.SlotKey] = (), **changes: Any
) -> wire.CacheAnnounce:
    geometry = msgspec.structs.replace(wire_geometry(GEOMETRY), **changes)
    return wire.CacheAnnounce(
        version=version, cache_id=cache_id, model_id=model_id, access="r", geometry=geometry, keys=[], slots=list(slots)
    )


def slot_key(slot: int, req_id: int | None = None, prefix_id: int | None = None) -> wire.SlotKey:
    return wire.SlotKey(slot=slot, model_id=0, req_id=req_id, prefix_id=prefix_id)


class Imported:
    path = "fake"

    def __init__(self) -> None:
        self.released = 0

    def release(self) -> None:
        self.released += 1


def remote_table(imported: list[Imported] | None = None) -> RemoteTable:
    def import_cache(cache_id: int, geometry: Any, keys: Any) -> Any:
        assert geometry == (6, 32, 64, 64)
        one = Imported()
        if imported is not None:
            imported.append(one)
        return one

    link: Any = None
    return RemoteTable(link, 1, import_cache)


def test_feed_begins_with_what_is_there_and_goes_on_with_changes() -> None:
    table, woken = LocalTable(), []
    table.add(record(1))
    table.add(record(2))
    feed = table.feed(lambda: woken.append(1))
    first, second = feed.take(), feed.take()
    assert first is not None
    assert second is not None
    assert [first.cache_id, second.cache_id] == [1, 2]
    assert feed.take() is None
    assert not woken
    table.remove(1)
    assert woken == [1]
    gone = feed.take()
    assert gone is not None
    assert gone.record is None
    assert gone.version > second.version
    feed.close()
    table.add(record(3))
    assert feed.take() is None
    assert woken == [1]


def test_what_comes_and_goes_unsent_is_never_told() -> None:
    table = LocalTable()
    feed = table.feed(lambda: None)
    table.add(record(1))
    table.remove(1)
    assert feed.take() is None
    table.remove(1)
    assert table.version == 2


@pytest.mark.parametrize("end", ["key", "cache"])
def test_a_key_that_moved_to_another_cache_is_told_in_that_order(end: str) -> None:
    table, remote = LocalTable(), remote_table()
    feed = table.feed(lambda: None)
    slots = {0: CacheKey(1, 10), 1: CacheKey(1, 11)}
    table.add(record(1, slots=slots))
    assert FollowedTable.send_one(feed, remote)
    moved = slots.pop(0)
    table.slot_gone(1, 0)
    table.add(record(2, slots={5: moved}))
    if end == "key":
        del slots[1]
        table.slot_gone(1, 1)
    else:
        table.remove(1)
    while FollowedTable.send_one(feed, remote):
        pass
    assert {key: (entry.cache_id, slot) for key, (entry, slot) in remote.by_slot_key.items()} == {moved: (2, 5)}


def test_adding_twice_is_a_fault() -> None:
    table = LocalTable()
    table.add(record(1))
    with pytest.raises(InternalError):
        table.add(record(1))


def test_remote_entries_are_found_by_key_and_by_id() -> None:
    imported: list[Imported] = []
    remote = remote_table(imported)
    entry = remote.announce(announce(1, 5, 3), [])
    assert remote.by_key == {CacheKeyByIdAndIndex(1, 5): entry, BlocksCacheKey(1, 3): entry}
    assert (entry.access, entry.geometry, entry.key) == ("r", GEOMETRY, BlocksCacheKey(1, 3))
    entry.pairs[1] = object()
    assert remote.withdraw(wire.CacheWithdraw(version=2, cache_id=5)) is entry
    assert remote.by_key == {}
    assert entry.pairs == {}
    assert imported[0].released == 1
    remote.announce(announce(3, 6), [])
    assert [gone.cache_id for gone in remote.clear()] == [6]
    assert remote.by_key == {}
    assert imported[1].released == 1


def test_one_cache_out_of_reach_leaves_the_others() -> None:
    def refuse(cache_id: int, geometry: Any, keys: Any) -> Any:
        raise CacheNotFound("closed meanwhile")

    link: Any = None
    remote = RemoteTable(link, 1, refuse)
    entry = remote.announce(announce(1, 5, 3), [])
    assert entry.native is None
    assert isinstance(entry.error, CacheNotFound)
    remote.clear()


@pytest.mark.parametrize(
    "lie",
    [
        lambda remote: remote.announce(announce(2, 1), []),  # twice
        lambda remote: remote.announce(announce(2, 2, 7), []),  # the key belongs to another
        lambda remote: remote.announce(announce(0, 2), []),  # the version goes back
        lambda remote: remote.withdraw(wire.CacheWithdraw(version=1, cache_id=1)),  # the version stands still
        lambda remote: remote.withdraw(wire.CacheWithdraw(version=2, cache_id=2)),  # never announced
        lambda remote: remote.announce(announce(2, 2, stride=1), []),
        lambda remote: remote.announce(announce(2, 2, num_blocks=33), []),
        lambda remote: remote.announce(announce(2, 2, dtype="float8_e3m4"), []),
        lambda remote: remote.announce(announce(2, 2, shape=[2**62, 2**62], num_blocks=2**62), []),
        lambda remote: remote.announce(announce(2, 2, slots=[slot_key(32, 1)]), []),  # outside
        lambda remote: remote.announce(announce(2, 2, slots=[slot_key(0, 1), slot_key(0, 2)]), []),
        lambda remote: remote.announce(announce(2, 2, slots=[slot_key(0, 1), slot_key(1, 1)]), []),
        lambda remote: remote.announce(announce(2, 2, slots=[slot_key(0, 70)]), []),  # another cache has it
        lambda remote: remote.announce(announce(2, 2, slots=[slot_key(0)]), []),
        lambda remote: remote.announce(announce(2, 2, slots=[slot_key(0, 1, 1)]), []),
        lambda remote: remote.announce(announce(2, 2, slots=[slot_key(0, 2**64 - 1)]), []),
        lambda remote: remote.slots_gone(wire.SlotsGone(version=2, cache_id=2, slots=[0])),
        lambda remote: remote.slots_gone(wire.SlotsGone(version=0, cache_id=1, slots=[0])),
    ],
)
def test_lies_about_the_table(lie: Any) -> None:
    remote = remote_table()
    remote.announce(announce(1, 1, 7, [slot_key(0, 70)]), [])
    with pytest.raises(ProtocolError):
        lie(remote)


def test_slots_that_never_had_a_key_may_lose_it() -> None:
    remote = remote_table()
    remote.announce(announce(1, 1, slots=[slot_key(3, 70), slot_key(4, prefix_id=70)]), [])
    remote.slots_gone(wire.SlotsGone(version=2, cache_id=1, slots=[3, 3, 9, 2**32 - 1]))
    assert set(remote.by_slot_key) == {CacheKey(1, prefix_id=70)}
    remote.withdraw(wire.CacheWithdraw(version=3, cache_id=1))
    assert remote.by_slot_key == {}


class FollowedTable(RuleBasedStateMachine):
    """However registering, unregistering and sending interleave, the peer ends with the same caches and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LocalTable()
        self.next_id = 1
        self.feeds: list[tuple[TableFeed, RemoteTable]] = []

    @rule()
    def link(self) -> None:
        if len(self.feeds) < 3:
            self.feeds.append((self.table.feed(lambda: None), remote_table()))

    @rule(keyed=st.booleans(), slots=st.sets(st.integers(0, 31), max_size=4))
    def register(self, keyed: bool, slots: set[int]) -> None:
        taken = {key for one in self.table.records.values() for key in one.slots.values()}
        names = {CacheKey(1, slot % 4): slot for slot in slots}
        keys = {slot: key for key, slot in names.items() if key not in taken}
        self.table.add(record(self.next_id, self.next_id if keyed else None, keys))
        self.next_id += 1

    @precondition(lambda self: any(one.slots for one in self.table.records.values()))
    @rule(data=st.data())
    def lose_a_key(self, data: st.DataObject) -> None:
        keyed = [one for one in self.table.records.values() if one.slots]
        one: Any = data.draw(st.sampled_from(keyed))
        slot = data.draw(st.sampled_from(sorted(one.slots)))
        del one.slots[slot]
        self.table.slot_gone(one.cache_id, slot)

    @precondition(lambda self: self.table.records)
    @rule(data=st.data())
    def unregister(self, data: st.DataObject) -> None:
        self.table.remove(data.draw(st.sampled_from(sorted(self.table.records))))

    @precondition(lambda self: self.feeds)
    @rule(data=st.data(), most=st.integers(1, 5))
    def send(self, data: st.DataObject, most: int) -> None:
        feed, remote = data.draw(st.sampled_from(self.feeds))
        for _ in range(most):
            self.send_one(feed, remote)

    @staticmethod
    def send_one(feed: TableFeed, remote: RemoteTable) -> bool:
        delta = feed.take()
        if delta is None:
            return False
        if delta.record is None:
            remote.withdraw(wire.CacheWithdraw(version=delta.version, cache_id=delta.cache_id))
        elif delta.gone is not None:
            remote.slots_gone(wire.SlotsGone(version=delta.version, cache_id=delta.cache_id, slots=delta.gone))
        else:
            key, slots = delta.record.key, wire_slots(delta.record.slots)
            remote.announce(announce(delta.version, delta.cache_id, key and key.model_id, slots), [])
        return True

    @invariant()
    def nothing_waits_twice(self) -> None:
        for feed, _ in self.feeds:
            assert len(feed) <= self.next_id

    def teardown(self) -> None:
        for feed, remote in self.feeds:
            while self.send_one(feed, remote):
                pass
            assert {entry.cache_id for entry in remote.by_key.values()} == set(self.table.records)
            expected = {
                key: (one.cache_id, slot) for one in self.table.records.values() for slot, key in one.slots.items()
            }
            assert {key: (entry.cache_id, slot) for key, (entry, slot) in remote.by_slot_key.items()} == expected


TestFollowedTable = FollowedTable.TestCase
