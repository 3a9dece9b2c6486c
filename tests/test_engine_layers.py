"""The engine's operations that wait at a gate, over every path, verbs too, without what Python makes of them.

And what peers may say of layers.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from aiodatadist import _core

from .engine_rig import (
    ABORT,
    CANCELLED,
    CASES,
    CLOSED,
    ENDED,
    LAYER,
    LAYER_FAILED,
    MODES,
    NOT_FOUND,
    OK,
    PEER_LOST,
    PROTOCOL,
    RUN,
    SECOND,
    TIMEOUT,
    WRITE_DONE,
    Call,
    Hand,
    Rig,
    Tensors,
    answer,
    hand,
    message,
    rig,
)
from .waiting import until_now

pytestmark = pytest.mark.sanitize

Layers = Sequence[Sequence[tuple[int, int, int]]]
EACH: Layers = [[(layer, layer, 0)] for layer in range(4)]


class Case:
    """Four tensors on each side, a gate, and operations between them."""

    def __init__(self, r: Rig, size: int = 512, blocks: int = 8) -> None:
        self.r = r
        geometry = (4, blocks, size, size)
        self.here, self.there = r.tensors(geometry, owner=False, seed=1), r.tensors(geometry, seed=2)
        self.before = self.there.copy()
        self.local = r.user.register(self.here)
        self.owned, self.remote = r.cache(self.there)
        self.pair = _core.Pair(self.local, self.remote, (self.here, self.there))
        self.gate = _core.Gate(4)
        self.blocks = list(range(blocks))

    def start(self, layers: Layers = EACH, blocks: Sequence[int] | None = None, **options: float) -> Call:
        chosen = self.blocks if blocks is None else blocks
        return self.r.start_layers(self.pair, self.gate, chosen, chosen, layers, view=self.there.geometry, **options)

    def record(self, *layers: int) -> None:
        for layer in layers:
            self.gate.record(layer)

    def told(self) -> list[tuple[int, int]]:
        """Return what the owner has heard: layers, and how many were left then."""
        return [(event.nbytes, event.status) for event in self.r.owner.seen(_core.EVENT_LAYER_ARRIVED)]

    def check(self, *moved: int) -> None:
        for tensor, (got, mine, before) in enumerate(zip(self.there.raw, self.here.raw, self.before, strict=True)):
            np.testing.assert_array_equal(got, mine if tensor in moved else before)

    def waits(self) -> bool:
        """Say whether there is one operation, and it has nothing to move."""
        rows = self.r.user.node.pending()
        return len(rows) == 1 and rows[0][9]


@contextlib.contextmanager
def case(path: str, mode: str, **options: float) -> Iterator[Case]:
    with rig(path, mode, **options) as r:
        yield Case(r)


@pytest.mark.parametrize(("path", "mode"), CASES)
def test_layers_go_in_the_order_of_their_recording(path: str, mode: str) -> None:
    with case(path, mode) as c:
        call = c.start()
        assert c.waits()
        for count, layer in enumerate((2, 0, 3, 1), 1):
            c.check(*(2, 0, 3, 1)[: count - 1])
            c.record(layer)
            c.r.run(lambda: len(call.landed) == count)  # noqa: B023
        c.r.run(lambda: call.ended)
        assert (call.status, call.done, call.landed) == (OK, 4 * 8 * 512, [2, 0, 3, 1])
        c.r.run(lambda: len(c.told()) == 4)
        assert c.told() == [(2, 3), (0, 2), (3, 1), (1, 0)]
        c.check(0, 1, 2, 3)


@pytest.mark.parametrize("recorded_first", [True, False])
@pytest.mark.parametrize(("path", "mode"), CASES)
def test_layers_without_a_tensor_here_move_nothing(path: str, mode: str, recorded_first: bool) -> None:
    """As where a target's tensors lie in several caches: no batch is empty, and the owner hears of no such layer."""
    layers: Layers = [[(0, 1, 0)], [], [(1, 3, 0)], []]
    with case(path, mode) as c:
        if recorded_first:
            c.record(0, 1, 2, 3)
        call = c.start(layers)
        if not recorded_first:
            c.record(3, 0, 1, 2)
        c.r.run(lambda: call.ended)
        assert (call.status, call.done, sorted(call.landed)) == (OK, 2 * 8 * 512, [0, 1, 2, 3])
        c.r.run(lambda: len(c.told()) == 2)
        assert sorted(layer for layer, _ in c.told()) == [1, 3]
        assert [left for _, left in c.told()] == [1, 0]
        np.testing.assert_array_equal(c.there.raw[1], c.here.raw[0])
        np.testing.assert_array_equal(c.there.raw[3], c.here.raw[1])
        c.there.raw[1][:], c.there.raw[3][:] = c.before[1], c.before[3]
        c.check()


@pytest.mark.parametrize(("path", "mode"), CASES)
def test_no_blocks_and_no_layers_are_a_success(path: str, mode: str) -> None:
    with case(path, mode) as c:
        nothing = c.start([])
        c.r.run(lambda: nothing.ended)
        assert (nothing.status, nothing.landed) == (OK, [])
        call = c.start(blocks=[])
        c.record(1, 0)
        c.r.run(lambda: len(call.landed) == 2)
        assert not call.ended
        c.record(3, 2)
        c.r.run(lambda: call.ended)
        assert (call.status, call.done, call.landed) == (OK, 0, [1, 0, 3, 2])
        c.check()


@pytest.mark.parametrize(("path", "mode"), CASES)
def test_a_gate_forgets_who_has_ended(path: str, mode: str) -> None:
    with case(path, mode) as c:
        calls = [c.start(blocks=[i]) for i in range(3)]
        calls += [c.start([]), c.start(blocks=[3], timeout=0.001 if mode == "threads" else 1e-6)]
        c.r.run(lambda: calls[3].ended and calls[4].ended)
        assert (calls[3].status, calls[4].status, c.gate.waiting) == (OK, TIMEOUT, 3)
        c.pair.cancel(calls[0].op)
        c.r.run(lambda: calls[0].ended)
        assert (calls[0].status, c.gate.waiting) == (CANCELLED, 2)
        c.record(0, 1, 2, 3)
        # The recording thread waits for no lock: where it was taken, the progress thread tells the operations.
        until_now(lambda: c.gate.waiting == 0, "a gate remembers operations that have heard of all")
        late = [c.start(blocks=[i]) for i in range(4, 7)]
        assert c.gate.waiting == 0
        c.r.run(lambda: all(call.ended for call in calls + late))
        assert {call.status for call in calls[1:3] + late} == {OK}


@pytest.mark.parametrize(("path", "mode"), CASES)
@pytest.mark.parametrize("how", ["fail", "drop"])
def test_a_layer_that_will_not_come_ends_the_operation(path: str, mode: str, how: str) -> None:
    with case(path, mode) as c:
        call, half = c.start(blocks=c.blocks[:4]), c.start(EACH[:2], c.blocks[4:])
        c.record(0, 1)
        c.r.run(lambda: half.ended and len(call.landed) == 2)
        if how == "fail":
            c.gate.fail(3)
        else:
            c.gate = _core.Gate(4)
        c.r.run(lambda: call.ended)
        assert (half.status, call.status, sorted(call.landed)) == (OK, LAYER_FAILED, [0, 1])
        c.check(0, 1)
        c.r.run(lambda: c.r.owner.seen(_core.EVENT_TRANSFER_ENDED))
        assert c.r.owner.seen(_core.EVENT_TRANSFER_ENDED)[0].status == LAYER_FAILED


@pytest.mark.parametrize("side", ["user", "owner"])
@pytest.mark.parametrize(("path", "mode"), CASES)
def test_taking_a_cache_back_ends_what_waits_at_a_gate_and_nothing_else(path: str, mode: str, side: str) -> None:
    with rig(path, mode) as r:
        c = Case(r, 65536, 16)
        waiting = c.start(blocks=[])
        moving = c.start(blocks=c.blocks[:8])
        c.record(0, 1, 2)
        only = c.start(EACH[:3], c.blocks[8:])  # has heard of all its layers
        (c.local if side == "user" else c.owned).close()
        c.r.run(lambda: waiting.ended and moving.ended and only.ended)
        expected = CLOSED if side == "user" else NOT_FOUND
        assert (waiting.status, moving.status) == (expected, expected)
        # Where the owner serves it refuses what comes after the closing, whatever it was asked before.
        served = side == "owner" and not path.startswith("shm")
        assert only.status == OK or (served and only.status == NOT_FOUND)
        closing, number = (c.r.user, c.local.id) if side == "user" else (c.r.owner, c.owned.id)
        c.r.run(lambda: closing.seen(_core.EVENT_CACHE_QUIET, number))
        quiet = c.there.copy()
        c.here.fill(0xEE)
        c.record(3)
        c.r.turn(0.01)
        for got, was in zip(c.there.raw, quiet, strict=True):
            np.testing.assert_array_equal(got, was)


@pytest.mark.parametrize(("path", "mode"), CASES)
def test_a_fence_waits_for_an_operation_at_its_gate(path: str, mode: str) -> None:
    """It may still write: the fence is over when it has ended, and not before."""
    with case(path, mode) as c:
        call = c.start()
        c.record(0)
        c.r.run(lambda: call.landed)
        token = c.r.owner.to_peer.fence()
        for _ in range(10):
            c.r.turn(0.002)
        assert not c.r.owner.seen(_core.EVENT_FENCED, token)
        c.record(1, 2, 3)
        c.r.run(lambda: c.r.owner.seen(_core.EVENT_FENCED, token))
        c.r.run(lambda: call.ended)
        assert call.status == OK


@pytest.mark.parametrize(("path", "mode"), CASES)
def test_the_end_of_a_link_ends_what_waits_at_a_gate(path: str, mode: str) -> None:
    with case(path, mode) as c:
        call = c.start()
        c.record(2)
        c.r.run(lambda: call.landed)
        c.r.owner.to_peer.disconnect(PEER_LOST)
        c.r.run(lambda: call.ended)
        assert call.status == PEER_LOST
        assert c.gate.waiting == 0
        c.record(0, 1, 3)
        c.check(2)


def test_a_gate_outlives_its_engine_and_an_engine_its_gate() -> None:
    gate = _core.Gate(4)
    for path, mode in (("shm-process_vm", "step"), ("tcp", "step")):
        with case(path, mode) as c:
            c.gate, gate = gate, c.gate
            call = c.start()
        assert call.status == CLOSED
    gate.record(0)


def test_the_delay_of_a_layer_counts_by_the_engines_clock() -> None:
    delays = []

    class Timed(Call):
        def _native_layer(self, layer: int, elapsed_ns: int) -> None:
            super()._native_layer(layer, elapsed_ns)
            delays.append(elapsed_ns)

    with case("tcp", "step") as c:
        call = Timed()
        c.pair.submit_layers(call, [0], [0], c.gate, 0, 1, [(0, 0, 0)], [0, 1], c.there.geometry, 0.0)
        c.record(0)
        c.r.run(lambda: call.ended, advance_ns=SECOND)
    assert delays[0] >= SECOND
    assert delays[0] < 1000 * SECOND


@pytest.mark.parametrize("path", ["shm-mapped", "tcp"])
def test_threads_record_while_others_cancel(path: str, scale: Callable[..., int]) -> None:
    """Several gates' layers are recorded by several threads, and operations end at the same time."""
    with rig(path, "threads") as r:
        c = Case(r, 4096, 16)
        for turn in range(scale(30, least=4)):
            c.gate = _core.Gate(4)
            calls = [c.start(blocks=c.blocks[i::4]) for i in range(4)]
            threads = [threading.Thread(target=c.gate.record, args=(layer,)) for layer in range(4)]
            for thread in threads:
                thread.start()
            if turn % 2:
                c.pair.cancel(calls[turn % 4].op)
            for thread in threads:
                thread.join()
            r.run(lambda: all(call.ended for call in calls))  # noqa: B023
            assert {call.status for call in calls} <= {OK, CANCELLED}
            assert all(sorted(call.landed) == [0, 1, 2, 3] for call in calls if call.status == OK)
            assert c.gate.waiting == 0


# Requests that make no sense. ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "starts", "per_layer"),
    [
        ([(0, 0, 0)], [], 1),
        ([(0, 0, 0)], [0], 1),
        ([(0, 0, 0)], [0, 2], 1),
        ([(0, 0, 0), (1, 1, 0)], [0, 2, 1, 2], 1),
        ([(0, 0, 0)], [1, 1], 1),
        ([(0, 0, 0)], [0, 1], 0),
        ([(4, 0, 0)], [0, 1], 1),
        ([(0, 4, 0)], [0, 1], 1),
        ([(0, 0, 1)], [0, 1], 1),
        ([(0, 0, 8 * 512)], [0, 1], 1),
        ([(0, 0, 2**63)], [0, 1], 1),
        ([(0, 0, 2**64 - 512)], [0, 1], 1),
        ([(0, 0, 0), (1, 1, 2**64 - 1)], [0, 2], 1),
    ],
)
def test_what_reaches_beyond_is_refused(tensors: list[tuple[int, int, int]], starts: list[int], per_layer: int) -> None:
    with case("shm-process_vm", "step") as c:
        call = Call()
        with pytest.raises(Exception, match=r".") as caught:
            c.pair.submit_layers(call, [7], [7], c.gate, 0, per_layer, tensors, starts, c.there.geometry, 0.0)
        assert type(caught.value).__name__ in ("CacheMismatch", "BlockIndexError")
        assert call.nbytes == -1
        assert c.gate.waiting == 0
        c.check()


# A peer spoken by hand. ---------------------------------------------------------------------------


@pytest.fixture(params=MODES)
def h(request: pytest.FixtureRequest) -> Iterator[Hand]:
    with hand(request.param) as made:
        yield made


def _own(h: Hand, cache_id: int = 77, *, writable: bool = True) -> _core.LocalCache:
    memory = np.zeros((3, 64), np.uint8)
    h.kept.append(memory)
    return h.side.node.register_cache(cache_id, [int(row.ctypes.data) for row in memory], 1, 64, 64, True, writable)


def test_layers_that_arrive_are_told(h: Hand) -> None:
    _own(h)
    h.say(message(LAYER, a=5, b=77, c=2, status=1) + message(LAYER, a=5, b=77, c=0, status=0))
    h.run(lambda: len(h.side.seen(_core.EVENT_LAYER_ARRIVED)) == 2)
    assert [(e.token, e.cache, e.nbytes, e.status) for e in h.side.seen(_core.EVENT_LAYER_ARRIVED)] == [
        (5, 77, 2, 1),
        (5, 77, 0, 0),
    ]


@pytest.mark.parametrize(
    ("layer", "left", "writable"),
    [(3, 0, True), (2**64 - 1, 0, True), (0, -1, True), (0, -(2**31), True), (0, 0, False)],
)
def test_lies_about_layers_end_the_link(h: Hand, layer: int, left: int, writable: bool) -> None:
    _own(h, writable=writable)
    h.say(message(LAYER, a=1, b=77, c=layer, status=left))
    assert h.lost() == PROTOCOL
    assert not h.side.seen(_core.EVENT_LAYER_ARRIVED)


def test_layers_of_caches_that_are_not_there_are_passed_over(h: Hand) -> None:
    """The owner may have taken the cache back, while the message was on its way."""
    closed = _own(h, 78)
    closed.close()
    _own(h)
    for number in (0, 1, 78, 2**64 - 1):
        h.say(message(LAYER, a=1, b=number, c=2**63, status=-1))
    h.say(message(LAYER, a=1, b=77, c=1))
    h.run(lambda: h.side.seen(_core.EVENT_LAYER_ARRIVED))
    assert [event.cache for event in h.side.seen(_core.EVENT_LAYER_ARRIVED)] == [77]
    assert not h.side.seen(_core.EVENT_PEER_LOST)


def test_a_flood_of_layers_is_bounded(h: Hand) -> None:
    """What a loop has not taken yet does not grow without end, and the node goes on."""
    _own(h)
    for _ in range(80):
        h.wire.setblocking(True)
        h.wire.sendall(message(LAYER, a=1, b=77, c=1) * 1024)
        if h.stepped:
            h.engine.step(1000)
    h.wire.setblocking(False)
    token = h.side.to_peer.ping()
    h.run(lambda: [said for said in h.heard(1) if said[3] == token])
    assert 0 < len(h.side.seen(_core.EVENT_LAYER_ARRIVED)) <= 80 * 1024
    assert not h.side.seen(_core.EVENT_PEER_LOST)


def test_a_layer_does_not_overtake_what_was_ended_by_force_before_it_was_recorded() -> None:
    """Its owner would fill the blocks from that frame afterwards. What was recorded before competes with it anyway."""
    size = 1 << 20
    with hand("step", connections=2, drain_timeout=0.01, buffers=4096) as h:
        geometry = (2, 10, size, size)
        here, there = Tensors(geometry, False), Tensors((2, 1, 1, 1), False)
        h.kept += [here, there]
        local = h.side.register(here)
        remote = h.side.to_peer.import_cache(9, geometry, [("tcp", b"", -1)])
        pair = _core.Pair(local, remote, (here, there))
        forced, call, gate = Call(), Call(), _core.Gate(2)
        pair.submit(forced, _core.WRITE, [0], [0], 0, 0, 1, 0.0, False)
        blocks = list(range(10))
        pair.submit_layers(call, blocks, blocks, gate, 0, 1, [(0, 0, 0), (1, 1, 0)], [0, 1, 2], geometry, 0.0)
        gate.record(0)  # more batches than may be under way: some wait for their turns
        h.turn()
        pair.cancel(forced.op)
        h.run(lambda: forced.ended, advance_ns=SECOND // 10)
        assert forced.status == CANCELLED
        gate.record(1)
        seen: list[list[int]] = [[], []]

        def serve(connection: int) -> None:
            """Take and answer whatever comes there, until nothing does."""
            while True:
                for _ in range(50):
                    h.turn()
                with contextlib.suppress(BlockingIOError):
                    if h.data[connection].recv(1, socket.MSG_PEEK):
                        head = h.header(connection)
                        assert head is not None
                        runs = [RUN.unpack(h.receive(RUN.size, connection)) for _ in range(head.count)]
                        h.receive(head.payload + 8, connection)
                        seen[connection] += [tensor for _, tensor, _ in runs]
                        h.send(answer(WRITE_DONE, head.seq), connection)
                        continue
                return

        serve(1)
        assert len(seen[1]) >= 3
        assert not any(seen[1]), "a layer came while the frame of an ended write was on the wire"
        while not call.ended:
            serve(0)
            serve(1)
        assert (call.status, call.done, call.landed) == (OK, 20 * size, [0, 1])
        assert sorted(seen[0] + seen[1]) == [0] * 11 + [1] * 10


def test_a_peer_that_never_learned_of_layers_hears_of_none(h: Hand) -> None:
    there = Tensors((1, 4, 64, 64), False)
    here = Tensors((1, 4, 64, 64), False)
    h.kept += [here, there]
    local = h.side.register(here)
    remote = h.side.to_peer.import_cache(9, there.geometry, [("tcp", b"", -1)])
    pair = _core.Pair(local, remote, (here, there))
    gate, call = _core.Gate(1), Call()
    pair.submit_layers(call, [], [], gate, 0, 1, [(0, 0, 0)], [0, 1], there.geometry, 0.0)
    gate.record(0)
    h.run(lambda: call.ended)
    assert (call.status, call.landed) == (OK, [0])
    token = h.side.to_peer.ping()
    h.run(lambda: [said for said in h.heard(1) if said[3] == token])
    assert not h.heard(LAYER)
    assert not h.heard(ABORT)
    assert not h.heard(ENDED)
