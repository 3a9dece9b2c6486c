"""A hostile peer: data frames and engine messages made by hand, sent to a real node that owns memory."""

from __future__ import annotations

import contextlib
import os
import random
import select
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from aiodatadist import _core

from .conftest import Scale
from .engine_rig import (
    BOUNDS,
    CLOSED,
    DISCONNECT,
    ENDED,
    FENCE,
    FENCE_DONE,
    GOODBYE,
    HEADER,
    MAGIC,
    MESSAGE,
    MODES,
    NOT_FOUND,
    OK,
    PEER_LOST,
    PERMISSION,
    PING,
    PONG,
    PROTOCOL,
    READ_DONE,
    READ_FRAME,
    RUN,
    SECOND,
    WRITE_DONE,
    WRITE_FRAME,
    Call,
    Hand,
    Header,
    Tensors,
    answer,
    hand,
    message,
    request,
)

pytestmark = pytest.mark.sanitize

READ, WRITE = _core.READ, _core.WRITE
SIZE, STRIDE, BLOCKS = 1000, 1500, 8
EXTENT = (BLOCKS - 1) * STRIDE + SIZE
GUARD = 4096
MAX_RUNS, MAX_PAYLOAD, MAX_OUTSTANDING = 1024, 4 << 20, 64


class Owned:
    """A cache whose tensors lie between guards, in one array of a known pattern."""

    def __init__(self, h: Hand, stride: int = STRIDE, *, readable: bool = True, writable: bool = True) -> None:
        self.extent = (BLOCKS - 1) * stride + SIZE
        self.all = np.arange(2 * (self.extent + GUARD) + GUARD, dtype=np.uint8) % 251
        base = int(self.all.ctypes.data) + GUARD
        self.starts = [GUARD, GUARD + self.extent + GUARD]
        self.before = self.all.copy()
        h.kept.append(self.all)
        h.side.next_cache += 1
        self.cache = h.side.node.register_cache(
            h.side.next_cache,
            [base, base + self.extent + GUARD],
            BLOCKS,
            SIZE,
            stride,
            readable,
            writable,
        )

    @property
    def id(self) -> int:
        return self.cache.id

    def at(self, tensor: int, offset: int, length: int) -> bytes:
        start = self.starts[tensor] + offset
        return self.all[start : start + length].tobytes()

    def untouched(self) -> bool:
        return bool((self.all == self.before).all())


@pytest.fixture(params=MODES)
def h(request: pytest.FixtureRequest) -> Iterator[Hand]:
    with hand(request.param) as made:
        yield made


def reply(h: Hand) -> Header:
    head = h.header()
    assert head is not None, "the link ended"
    return head


def read(h: Hand, owned: Owned, runs: list[tuple[int, int, int]]) -> tuple[int, bytes]:
    """Ask for some runs: the status and the bytes."""
    h.send(request(READ_FRAME, owned.id, runs))
    head = reply(h)
    assert head.kind == READ_DONE
    if head.status != OK:
        assert head.payload == 0
        return head.status, b""
    payload = h.receive(head.payload)
    return struct.unpack("<iI", h.receive(8))[0], payload


def write(h: Hand, owned: Owned, runs: list[tuple[int, int, int]], payload: bytes | None = None) -> int:
    data = b"\xee" * sum(run[2] for run in runs) if payload is None else payload
    h.send(request(WRITE_FRAME, owned.id, runs, payload=data))
    head = reply(h)
    assert (head.kind, head.payload) == (WRITE_DONE, 0)
    h.side.node.pending()  # takes the engine's lock: an order of events that the thread sanitizer understands
    return head.status


# --- what is served, and what is refused -----------------------------------------------------------


def test_what_lies_inside_blocks_is_served(h: Hand) -> None:
    owned = Owned(h)
    runs = [(0, 0, SIZE), (1, STRIDE, 1), (1, EXTENT - 1, 1), (0, 3 * STRIDE + 999, 1), (0, 0, SIZE)]
    assert read(h, owned, runs) == (OK, b"".join(owned.at(*run) for run in runs))
    assert owned.untouched()
    assert write(h, owned, [(1, 7 * STRIDE + 10, 20)]) == OK
    assert owned.at(1, 7 * STRIDE + 10, 20) == b"\xee" * 20
    owned.before[owned.starts[1] + 7 * STRIDE + 10 :][:20] = 0xEE
    assert owned.untouched()


OUTSIDE = [
    (0, EXTENT, 1),
    (0, EXTENT - 1, 2),
    (0, SIZE, 1),  # the gap between two blocks
    (0, SIZE - 1, 2),
    (0, STRIDE - 1, 1),
    (0, 0, SIZE + 1),
    (0, 0, STRIDE),
    (0, 0, EXTENT),
    (2, 0, 1),
    (2**32 - 1, 0, 1),
    (0, 2**64 - 1, 1),
    (0, 2**64 - 1, 2),
    (0, 2**64 - 500, 600),
    (0, 2**63, 1),
    (1, EXTENT + GUARD - 1, 1),
]


@pytest.mark.parametrize("run", OUTSIDE, ids=str)
def test_runs_outside_of_blocks(h: Hand, run: tuple[int, int, int]) -> None:
    owned = Owned(h)
    for runs in ([run], [(0, 0, 10), run], [run, (0, 0, 10)]):
        assert read(h, owned, runs) == (BOUNDS, b"")
        # A write is refused as a whole: nothing of its good runs lands either.
        assert write(h, owned, runs) == BOUNDS
    assert owned.untouched()
    assert read(h, owned, [(0, 0, 5)]) == (OK, owned.at(0, 0, 5))


def test_runs_across_contiguous_blocks_are_served(h: Hand) -> None:
    owned = Owned(h, SIZE)
    assert read(h, owned, [(1, 5, owned.extent - 5)]) == (OK, owned.at(1, 5, owned.extent - 5))
    assert read(h, owned, [(1, 5, owned.extent - 4)]) == (BOUNDS, b"")


def test_zero_lengths_are_refused(h: Hand) -> None:
    owned = Owned(h)
    assert read(h, owned, [(0, 0, 10), (0, 0, 0)]) == (BOUNDS, b"")
    assert write(h, owned, [(0, 0, 0), (0, 0, 10)]) == BOUNDS
    assert owned.untouched()


def test_giant_lengths_are_refused_without_reading_on(h: Hand) -> None:
    owned = Owned(h)
    # 1024 runs of 4 GiB do not add up to the payload, whatever 64-bit sums do.
    h.send(request(READ_FRAME, owned.id, [(0, 0, 2**32 - 1)] * MAX_RUNS, nbytes=8))
    assert h.lost() == PROTOCOL
    assert owned.untouched()


def test_rights_and_unknown_caches(h: Hand) -> None:
    hidden, ro, wo = Owned(h, readable=False, writable=False), Owned(h, writable=False), Owned(h, readable=False)
    run = [(0, 0, 10)]
    assert (read(h, hidden, run)[0], write(h, hidden, run)) == (PERMISSION, PERMISSION)
    assert (read(h, ro, run)[0], write(h, ro, run)) == (OK, PERMISSION)
    assert (read(h, wo, run)[0], write(h, wo, run)) == (PERMISSION, OK)
    assert hidden.untouched()
    assert ro.untouched()
    for unknown in (0, 1, 2**64 - 1):
        h.send(request(READ_FRAME, unknown, run, seq=2**64 - 1))
        head = reply(h)
        assert (head.status, head.seq) == (NOT_FOUND, 2**64 - 1)
    ro.cache.close()
    h.turn()
    assert read(h, ro, run)[0] == NOT_FOUND


def test_a_write_that_its_sender_takes_back(h: Hand) -> None:
    """The trailer is the sender's last word on its payload; the answer repeats it."""
    owned = Owned(h)
    for trailer in (-9, -6, 3):
        h.send(request(WRITE_FRAME, owned.id, [(0, 0, 10)], payload=b"\0" * 10, trailer=trailer))
        assert reply(h).status == trailer


# --- frames that end the link ----------------------------------------------------------------------


def bad_frames(cache: int) -> dict[str, bytes]:
    run = [(0, 0, 8)]
    return {
        "no magic": request(READ_FRAME, cache, run, magic=MAGIC ^ 1),
        "type 0": request(0, cache, run),
        "type 5": request(5, cache, run),
        "type 255": request(255, cache, run),
        "no runs": request(READ_FRAME, cache, [], nbytes=8),
        "no payload": request(READ_FRAME, cache, run, nbytes=0),
        "too many runs": request(READ_FRAME, cache, run, count=MAX_RUNS + 1),
        "giant count": request(READ_FRAME, cache, run, count=2**32 - 1),
        "giant payload": request(READ_FRAME, cache, run, nbytes=MAX_PAYLOAD + 1),
        "endless payload": request(WRITE_FRAME, cache, run, nbytes=2**64 - 1),
        "a sum too small": request(READ_FRAME, cache, run, nbytes=9),
        "a sum too large": request(WRITE_FRAME, cache, run, nbytes=7),
        "an answer": answer(READ_DONE, 1, payload=b"12345678"),
        "a write's answer": answer(WRITE_DONE, 1),
        "zeros": bytes(HEADER.size),
        "ones": b"\xff" * HEADER.size,
        "http": b"GET / HTTP/1.1\r\nHost: 127.0.0.1:26000\r\nUser-Agent: curl/8.5.0\r\n\r\n",
    }


@pytest.mark.parametrize("name", bad_frames(0))
def test_bad_frames_end_the_link(h: Hand, name: str) -> None:
    owned = Owned(h)
    assert read(h, owned, [(0, 0, 8)])[0] == OK
    h.send(bad_frames(owned.id)[name])
    assert h.lost() == PROTOCOL
    h.run(lambda: h.side.seen(_core.EVENT_PEER_QUIET))
    assert h.header() is None
    assert owned.untouched()
    owned.cache.close()
    h.run(lambda: h.side.seen(_core.EVENT_CACHE_QUIET, owned.id))


def test_more_requests_than_may_be_outstanding() -> None:
    for mode in MODES:
        with hand(mode, buffers=4096) as h:
            owned = Owned(h, SIZE)
            # The answers are not taken, so they pile up.
            whole = (0, 0, owned.extent)
            h.send(b"".join(request(READ_FRAME, owned.id, [whole] * 100, seq=i) for i in range(MAX_OUTSTANDING + 60)))
            assert h.lost() == PROTOCOL
            h.run(lambda h=h: h.side.seen(_core.EVENT_PEER_QUIET))  # type: ignore[misc]


def test_as_many_requests_as_may_be_outstanding() -> None:
    with hand() as h:
        owned = Owned(h, SIZE)
        whole = [(0, 0, owned.extent)] * 500
        h.send(b"".join(request(READ_FRAME, owned.id, whole, seq=i) for i in range(MAX_OUTSTANDING)))
        for i in range(MAX_OUTSTANDING):
            head = reply(h)
            assert (head.kind, head.status, head.seq) == (READ_DONE, OK, i)
            assert h.receive(head.payload) == owned.at(0, 0, owned.extent) * 500
            assert h.receive(8) == bytes(8)


def test_frames_in_single_bytes(h: Hand) -> None:
    """No boundary of the byte stream means anything."""
    owned = Owned(h)
    for byte in request(WRITE_FRAME, owned.id, [(0, 5, 3), (1, 0, 2)], payload=b"abcde") + request(
        READ_FRAME, owned.id, [(1, 0, 2), (0, 5, 3)], seq=2
    ):
        h.send(bytes([byte]))
        if h.stepped:
            h.turn()
    assert reply(h).status == OK
    head = reply(h)
    assert (head.status, head.seq, h.receive(5)) == (OK, 2, b"deabc")


@pytest.mark.parametrize("kind", [READ_FRAME, WRITE_FRAME])
def test_connections_that_end_within_a_frame(kind: int, scale: Scale) -> None:
    rng = random.Random(kind)
    for mode in MODES:
        for _ in range(scale(10, least=3)):
            with hand(mode) as h:
                owned = Owned(h)
                frame = request(kind, owned.id, [(0, 0, SIZE), (1, 0, SIZE)], payload=b"\xee" * (2 * SIZE))
                h.send(frame[: rng.randrange(1, len(frame))])
                h.turn()
                owned.cache.close()
                h.turn()
                h.data[0].close()
                assert h.lost() == PEER_LOST
                h.run(lambda h=h: h.side.seen(_core.EVENT_CACHE_QUIET))  # type: ignore[misc]
                owned.all[:] = 0x77
                h.turn()
                assert bool((owned.all == 0x77).all())


@pytest.mark.seeds(6)
def test_garbage(seed: int) -> None:
    """Frames with random bits flipped: refused or the end of the link, and never a byte outside of the blocks."""
    rng = random.Random(seed)
    for _ in range(4):
        with hand("step") as h:
            owned = Owned(h)
            inside = np.zeros(owned.all.size, bool)
            for start in owned.starts:
                for block in range(BLOCKS):
                    inside[start + block * STRIDE :][:SIZE] = True
            frames = [
                request(
                    rng.choice([READ_FRAME, WRITE_FRAME]),
                    owned.id,
                    [(rng.randrange(2), rng.randrange(BLOCKS) * STRIDE, rng.randrange(1, SIZE)) for _ in range(3)],
                    payload=b"\xee" * 3000,
                )
                for _ in range(10)
            ]
            stream = bytearray(b"".join(frames))
            for _ in range(rng.choice([1, 5, 200])):
                stream[rng.randrange(len(stream))] ^= 1 << rng.randrange(8)
            with contextlib.suppress(BlockingIOError):
                h.data[0].sendall(stream)
            for _ in range(10):
                h.turn()
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    while h.data[0].recv(65536):
                        pass
            assert bool((owned.all == owned.before)[~inside].all())


# --- answers to this node's requests ---------------------------------------------------------------


def asked(h: Hand, opcode: int, blocks: int = 1, size: int = 4096) -> tuple[Tensors, _core.Pair, Call]:
    here = Tensors((1, blocks, size, size), region=False)
    here.fill(0x11)
    remote = h.side.to_peer.import_cache(99, here.geometry, [("tcp", b"", -1)])
    pair = _core.Pair(h.side.register(here), remote, None)
    call = Call()
    pair.submit(call, opcode, range(blocks), range(blocks), 0, 0, 1, 0.0, False)
    h.kept.append((here, pair))
    return here, pair, call


def test_requests_as_they_are_on_the_wire(h: Hand) -> None:
    here, _, call = asked(h, READ, 3)
    head = reply(h)
    assert (head.kind, head.count, head.cache, head.op, head.payload) == (READ_FRAME, 1, 99, call.op, 3 * 4096)
    assert struct.unpack("<QII", h.receive(RUN.size)) == (0, 0, 3 * 4096)
    h.send(answer(READ_DONE, head.seq, payload=b"\x22" * (3 * 4096)))
    h.run(lambda: call.ended)
    assert (call.status, call.done) == (OK, 3 * 4096)
    assert bool((here.raw[0] == 0x22).all())
    here, _, call = asked(h, WRITE, 2)
    head = reply(h)
    assert (head.kind, head.count, head.payload) == (WRITE_FRAME, 1, 2 * 4096)
    h.receive(RUN.size)
    assert h.receive(head.payload) == b"\x11" * (2 * 4096)
    assert h.receive(8) == bytes(8)
    h.send(answer(WRITE_DONE, head.seq))
    h.run(lambda: call.ended)
    assert (call.status, call.done) == (OK, 2 * 4096)


@pytest.mark.parametrize("status", [-2, -3, -4, -15, -1000, -(2**31)])
def test_refusals_reach_the_transfer(h: Hand, status: int) -> None:
    for opcode, kind in ((READ, READ_DONE), (WRITE, WRITE_DONE)):
        here, _, call = asked(h, opcode)
        head = reply(h)
        h.receive(head.count * RUN.size + (head.payload + 8 if opcode == WRITE else 0))
        h.send(answer(kind, head.seq, status=status))
        h.run(lambda call=call: call.ended)  # type: ignore[misc]
        assert (call.status, call.done) == (status, 0)
        assert bool((here.raw[0] == 0x11).all())
        h.run(lambda call=call: [m for m in h.heard(ENDED) if m[3] == call.op])  # type: ignore[misc]


def test_a_payload_that_its_sender_takes_back(h: Hand) -> None:
    for trailer, status in ((-15, -15), (7, PROTOCOL)):
        _, _, call = asked(h, READ)
        head = reply(h)
        h.receive(RUN.size)
        h.send(answer(READ_DONE, head.seq, payload=bytes(4096), trailer=trailer))
        h.run(lambda call=call: call.ended)  # type: ignore[misc]
        assert call.status == status


BAD_ANSWERS: dict[str, Any] = {
    "another number": lambda seq: answer(READ_DONE, seq + 1, payload=bytes(4096)),
    "number 0": lambda seq: answer(READ_DONE, 0, payload=bytes(4096)),
    "another kind": lambda seq: answer(WRITE_DONE, seq),
    "too short": lambda seq: answer(READ_DONE, seq, payload=bytes(4095)),
    "too long": lambda seq: answer(READ_DONE, seq, payload=bytes(4097)),
    "empty": lambda seq: answer(READ_DONE, seq),
    "giant": lambda seq: answer(READ_DONE, seq, nbytes=2**64 - 1),
    "a refusal with bytes": lambda seq: answer(READ_DONE, seq, status=-4, payload=bytes(4096)),
    "a success of its own": lambda seq: answer(READ_DONE, seq, status=1, payload=bytes(4096)),
    "garbage": lambda seq: os.urandom(HEADER.size),
}


@pytest.mark.parametrize("name", BAD_ANSWERS)
def test_bad_answers_end_the_link(h: Hand, name: str) -> None:
    here, _, call = asked(h, READ)
    head = reply(h)
    h.receive(RUN.size)
    h.send(BAD_ANSWERS[name](head.seq))
    assert h.lost() == PROTOCOL
    h.run(lambda: call.ended)
    assert call.status in (PROTOCOL, PEER_LOST)
    here.fill(0x33)
    h.run(lambda: h.side.seen(_core.EVENT_PEER_QUIET))
    assert bool((here.raw[0] == 0x33).all())


@pytest.mark.parametrize("mode", MODES)
def test_an_answer_before_the_request_was_sent(mode: str) -> None:
    """It must not complete a write whose frame still reads local memory."""
    with hand(mode, buffers=4096) as h:
        here, _, call = asked(h, WRITE, 64, 65536)
        h.turn()
        for seq in range(1, 4):
            h.send(answer(WRITE_DONE, seq))
        assert h.lost() == PROTOCOL
        h.run(lambda: call.ended)
        assert call.status in (PROTOCOL, PEER_LOST)
        here.fill(0x33)
        rest = bytearray()
        while part := h.receive(65536):
            rest += part
        assert b"\x33" * 4096 not in rest


def test_answers_twice(h: Hand) -> None:
    _, _, call = asked(h, WRITE)
    head = reply(h)
    h.receive(RUN.size + 4096 + 8)
    h.send(answer(WRITE_DONE, head.seq))
    h.run(lambda: call.ended)
    assert call.status == OK
    h.send(answer(WRITE_DONE, head.seq))
    assert h.lost() == PROTOCOL


def test_half_an_answer_and_then_the_end(h: Hand) -> None:
    here, _, call = asked(h, READ)
    head = reply(h)
    h.receive(RUN.size)
    h.send(answer(READ_DONE, head.seq, payload=b"\x22" * 4096)[:2000])
    h.run(lambda: bool(here.raw[0][0] == 0x22))
    h.data[0].close()
    h.run(lambda: call.ended)
    assert call.status == PEER_LOST
    here.fill(0x33)
    h.turn()
    assert bool((here.raw[0] == 0x33).all())


# --- short requests, on a connection of their own --------------------------------------------------

SHORT = 2  # of three connections, the one for this node's short requests


@contextlib.contextmanager
def short() -> Iterator[tuple[Hand, Callable[[], None]]]:
    """A hand with such a connection, and what the loop does when something has come over it."""
    with hand("threads", connections=3) as h:
        peer = h.side.peer
        assert peer is not None
        fd = peer.loop_fd()

        def progress() -> None:
            if select.select([fd], [], [], 0.02)[0]:
                peer.loop_progress()

        try:
            yield h, progress
        finally:
            os.close(fd)


def test_short_requests_do_not_wait_for_bulk() -> None:
    """All batches that one large pull may have under way are unanswered, and more of it waits."""
    with short() as (h, progress):
        _, _, bulk = asked(h, READ, 32, 1 << 20)
        heads = [reply(h)]
        h.receive(heads[0].count * RUN.size)
        here, _, call = asked(h, READ)
        head = h.header(SHORT)
        assert head is not None
        assert head.payload == 4096
        h.receive(RUN.size, SHORT)
        h.send(answer(READ_DONE, head.seq, payload=b"\x22" * 4096), SHORT)
        h.run(lambda: progress() or call.ended)
        assert (call.status, call.done) == (OK, 4096)
        assert bool((here.raw[0] == 0x22).all())
        assert not bulk.ended


def test_many_short_requests_leave_room_for_others() -> None:
    """No more are under way than the peer must take, whatever it has to answer besides."""
    with short() as (h, progress):
        calls = [asked(h, READ)[2] for _ in range(100)]
        seen = 0
        while not all(call.ended for call in calls):
            head = h.header(SHORT)
            assert head is not None
            h.receive(RUN.size, SHORT)
            seen += 1
            h.send(answer(READ_DONE, head.seq, payload=bytes(4096)), SHORT)
            h.turn()
            progress()
        assert seen == 100
        assert {call.status for call in calls} == {OK}


@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_short_answers_in_single_bytes(opcode: int) -> None:
    with short() as (h, progress):
        for fill in (0x22, 0x33):
            here, _, call = asked(h, opcode, 1, 64)
            head = h.header(SHORT)
            assert head is not None
            if opcode == READ:
                h.receive(RUN.size, SHORT)
                frame = answer(READ_DONE, head.seq, payload=bytes([fill]) * 64)
            else:
                h.receive(RUN.size + 64 + 8, SHORT)
                frame = answer(WRITE_DONE, head.seq)
            for byte in frame:
                assert not call.ended
                h.send(bytes([byte]), SHORT)
                progress()
            h.run(lambda call=call: progress() or call.ended)  # type: ignore[misc]
            assert call.status == OK
            assert opcode == WRITE or bool((here.raw[0] == fill).all())


@pytest.mark.parametrize("status", [-2, -(2**31)])
def test_refused_short_requests(status: int) -> None:
    with short() as (h, progress):
        for _ in range(2):
            here, _, call = asked(h, READ)
            head = h.header(SHORT)
            assert head is not None
            h.receive(RUN.size, SHORT)
            h.send(answer(READ_DONE, head.seq, status=status), SHORT)
            h.run(lambda call=call: progress() or call.ended)  # type: ignore[misc]
            assert (call.status, call.done) == (status, 0)
            assert bool((here.raw[0] == 0x11).all())


BAD_SHORT_ANSWERS = {
    **BAD_ANSWERS,
    "bytes behind a refusal": lambda seq: answer(READ_DONE, seq, status=-4) + bytes(HEADER.size),
}


@pytest.mark.parametrize("name", BAD_SHORT_ANSWERS)
def test_bad_answers_to_short_requests_end_the_link(name: str) -> None:
    """Also where all of an answer is received at once, and in place."""
    with short() as (h, progress):
        here, _, call = asked(h, READ)
        head = h.header(SHORT)
        assert head is not None
        h.receive(RUN.size, SHORT)
        h.send(BAD_SHORT_ANSWERS[name](head.seq), SHORT)
        h.run(lambda: progress() or h.side.seen(_core.EVENT_PEER_LOST))
        assert h.lost() == PROTOCOL
        h.run(lambda: call.ended)
        assert call.status in (PROTOCOL, PEER_LOST, -4)
        here.fill(0x33)
        h.run(lambda: h.side.seen(_core.EVENT_PEER_QUIET))
        assert bool((here.raw[0] == 0x33).all())


def test_an_answer_that_was_not_asked_for_behind_one_that_was() -> None:
    with short() as (h, progress):
        _, _, call = asked(h, READ)
        head = h.header(SHORT)
        assert head is not None
        h.receive(RUN.size, SHORT)
        good = answer(READ_DONE, head.seq, payload=bytes(4096))
        h.send(good + good, SHORT)
        h.run(lambda: progress() or h.side.seen(_core.EVENT_PEER_LOST))
        assert h.lost() == PROTOCOL
        assert call.status == OK


# --- the engine connection -------------------------------------------------------------------------


def test_pings_are_answered_natively(h: Hand) -> None:
    h.say(message(PING, a=2**64 - 1) + message(PING, a=0) + message(PING, a=7))
    h.run(lambda: len(h.heard(PONG)) == 3)
    assert [m[3] for m in h.heard(PONG)] == [2**64 - 1, 0, 7]
    token = h.side.to_peer.ping()
    h.run(lambda: h.heard(PING))
    assert h.heard(PING)[0][3] == token
    h.say(message(PONG, a=token))
    h.run(lambda: h.side.seen(_core.EVENT_PONG, token))


@pytest.mark.parametrize("kind", [15, 16, 127, 128, 255])
def test_unknown_messages_end_the_link(h: Hand, kind: int) -> None:
    h.say(message(kind))
    assert h.lost() == PROTOCOL


def test_messages_in_single_bytes(h: Hand) -> None:
    for byte in message(PING, a=5) + message(FENCE, a=1):
        h.say(bytes([byte]))
        if h.stepped:
            h.turn()
    h.run(lambda: h.heard(PONG) and h.heard(FENCE_DONE))


def test_half_a_message_and_then_the_end(h: Hand) -> None:
    h.say(message(PING)[: MESSAGE.size - 1])
    h.turn()
    h.wire.close()
    assert h.lost() == PEER_LOST
    assert not h.said


def test_fences_of_a_peer_without_operations(h: Hand) -> None:
    for seq, cache, flags in ((1, 0, 0), (2, 12345, 1), (3, 0, 1), (2, 0, 0), (2**64 - 1, 2**64 - 1, 255)):
        h.say(message(FENCE, flags=flags, a=seq, b=cache))
    h.run(lambda: len(h.heard(FENCE_DONE)) == 5)
    with pytest.raises(Exception, match="closed by its owner"):
        h.side.to_peer.import_cache(12345, (1, 1, 8, 8), [("tcp", b"", -1)])


def test_answers_to_fences_that_were_not_asked(h: Hand) -> None:
    h.say(message(FENCE_DONE, a=1) + message(FENCE_DONE, a=2**64 - 1) + message(PING, a=1))
    h.run(lambda: h.heard(PONG))
    assert h.side.events == []


def test_a_fence_waits_for_operations_and_their_number_travels(h: Hand) -> None:
    _, pair, call = asked(h, READ)
    first = reply(h)
    h.receive(RUN.size)
    h.say(message(FENCE, a=1) + message(PING, a=1))
    h.run(lambda: h.heard(PONG))
    assert not h.heard(FENCE_DONE)
    later = Call()
    pair.submit(later, READ, [0], [0], 0, 0, 1, 0.0, False)
    second = reply(h)
    h.receive(RUN.size)
    assert (first.epoch, second.epoch) == (0, 1)
    h.send(answer(READ_DONE, first.seq, payload=bytes(4096)))
    # The one that started after the fence is not waited for.
    h.run(lambda: h.heard(FENCE_DONE))
    assert call.ended
    assert not later.ended
    h.send(answer(READ_DONE, second.seq, payload=bytes(4096)))
    h.run(lambda: later.ended)


def test_ends_that_the_peer_tells(h: Hand) -> None:
    h.say(message(ENDED, status=-6, a=11, b=22, c=33))
    h.run(lambda: h.side.events)
    (event,) = h.side.events
    assert (event.kind, event.status, event.token, event.cache, event.nbytes) == (
        _core.EVENT_TRANSFER_ENDED,
        -6,
        11,
        22,
        33,
    )


@pytest.mark.parametrize(("status", "told"), [(CLOSED, CLOSED), (PEER_LOST, PEER_LOST), (0, CLOSED), (77, CLOSED)])
def test_orderly_end_by_the_peer(h: Hand, status: int, told: int) -> None:
    owned = Owned(h)
    _, _, call = asked(h, READ)
    reply(h)
    h.say(message(DISCONNECT, status=status) + message(GOODBYE))
    assert h.lost() == told
    h.run(lambda: call.ended)
    assert call.status == PEER_LOST
    h.run(lambda: h.heard(GOODBYE))
    h.run(lambda: h.side.seen(_core.EVENT_PEER_QUIET))
    assert owned.untouched()


def test_a_goodbye_out_of_nothing(h: Hand) -> None:
    h.say(message(GOODBYE))
    assert h.lost() == CLOSED
    h.run(lambda: h.side.seen(_core.EVENT_PEER_QUIET))


@pytest.mark.parametrize("mode", MODES)
def test_a_peer_that_asks_and_never_reads_is_bounded(mode: str, scale: Scale) -> None:
    """Answers to a flood of pings pile up to a limit, then the link ends; meanwhile others are served."""
    with hand(mode) as h:
        h.listen = lambda: None  # type: ignore[method-assign]
        flood = message(PING, a=1) * 4096
        sent = 0
        h.wire.setblocking(False)
        while not h.side.seen(_core.EVENT_PEER_LOST):
            try:
                sent += h.wire.send(flood)
            except BlockingIOError:
                h.turn()
            except ConnectionError:
                break
            assert sent < 200 << 20
        assert h.lost() == PEER_LOST


@pytest.mark.seeds(6)
def test_random_messages(seed: int) -> None:
    """Anything at all on the engine connection: the node answers, ignores or ends the link."""
    rng = random.Random(seed)
    for _ in range(4):
        with hand("step", drain_timeout=0.01) as h:
            owned = Owned(h)
            asked(h, rng.choice([READ, WRITE]), 4)
            h.side.to_peer.fence()
            for _ in range(60):
                h.say(
                    MESSAGE.pack(
                        rng.choice([0, 1, 2, 3, 4, 5, 5, 6, 6, rng.randrange(12)]),
                        rng.randrange(256),
                        rng.randrange(65536),
                        rng.randrange(-20, 3),
                        *(rng.choice([0, 1, 2, owned.id, rng.getrandbits(64)]) for _ in range(3)),
                    )
                )
                h.turn(SECOND // 1000)
                if h.side.seen(_core.EVENT_PEER_LOST):
                    break
            assert owned.untouched()


def test_many_peers_of_one_node(scale: Scale) -> None:
    """A peer that breaks the rules ends its own link only."""
    with hand() as good:
        owned = Owned(good)
        for _ in range(scale(10, least=3)):
            with hand() as bad:
                bad.send(b"\xff" * HEADER.size)
                assert bad.lost() == PROTOCOL
            assert read(good, owned, [(0, 0, 8)])[0] == OK
        assert not good.side.seen(_core.EVENT_PEER_LOST)
