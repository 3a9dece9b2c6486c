"""What a fence owes to whom: it never waits for a loop, and it believes no peer over its own eyes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from aiodatadist import _core

from .engine_rig import (
    DISCONNECT,
    FENCE,
    FENCE_DONE,
    FENCED,
    GOODBYE,
    MODES,
    OK,
    PING,
    PONG,
    SECOND,
    WRITE_FRAME,
    Call,
    Hand,
    Tensors,
    hand,
    message,
    request,
    rig,
)

pytestmark = pytest.mark.sanitize

READ = _core.READ
SIZE = 65536


@pytest.fixture(params=MODES)
def h(request: pytest.FixtureRequest) -> Iterator[Hand]:
    with hand(request.param, drain_timeout=0.5) as made:
        yield made


@pytest.fixture(params=MODES)
def patient(request: pytest.FixtureRequest) -> Iterator[Hand]:
    """Whose node waits for as long as a busy machine takes."""
    with hand(request.param, drain_timeout=600.0) as made:
        yield made


def test_a_fence_does_not_wait_for_the_loop_of_a_busy_peer() -> None:
    """More short requests than fit the queue: the later ones are sent when the fence is there already."""
    with rig("tcp-short") as r:
        here, there = r.tensors((1, 32, 4096, 4096), owner=False), r.tensors((1, 32, 4096, 4096))
        pair = r.pair(here, there)
        calls = [r.start(pair, READ, [i], [i]) for i in range(32)]
        token = r.owner.to_peer.fence()
        # The user's loop is blocked: nobody receives there, and its ring is not drained.
        r.loop_fds, kept = {}, r.loop_fds
        while not r.owner.seen(_core.EVENT_FENCED, token):
            r.rings[0].drain()
        r.loop_fds = kept
        r.run(lambda: all(call.ended for call in calls))
        assert [call.status for call in calls] == [OK] * 32


class Owned:
    """A cache of the node, and half of a write of the hand's that is being received into it."""

    def __init__(self, h: Hand) -> None:
        self.memory = np.zeros(SIZE, np.uint8)
        h.kept.append(self.memory)
        self.cache = h.side.node.register_cache(77, [int(self.memory.ctypes.data)], 1, SIZE, SIZE, True, True)
        self.frame = request(WRITE_FRAME, 77, [(0, 0, SIZE)], payload=b"\x11" * SIZE)
        h.send(self.frame[: len(self.frame) // 2])
        h.run(lambda: self.memory[0] == 0x11)

    def rest(self, h: Hand) -> None:
        h.send(self.frame[len(self.frame) // 2 :])


def test_u2_a_fence_waits_for_what_is_being_received_whatever_the_peer_says(patient: Hand) -> None:
    h = patient
    owned = Owned(h)
    token = h.side.to_peer.fence()
    h.run(lambda: h.heard(FENCE))
    h.say(message(FENCE_DONE, a=h.heard(FENCE)[0][3]) + message(PING, a=1))
    h.run(lambda: h.heard(PONG))
    assert not h.side.seen(_core.EVENT_FENCED, token)
    owned.rest(h)
    h.run(lambda: h.side.seen(_core.EVENT_FENCED, token))
    assert h.side.seen(_core.EVENT_FENCED, token)[0].status == OK
    assert (owned.memory == 0x11).all()


@pytest.mark.parametrize("closing", [False, True])
def test_a_peer_that_says_done_and_never_finishes_is_shut_out(h: Hand, closing: bool) -> None:
    owned = Owned(h)
    if closing:
        owned.cache.close()
    else:
        h.side.to_peer.fence()
    kind = _core.EVENT_CACHE_QUIET if closing else _core.EVENT_FENCED
    h.run(lambda: h.heard(FENCE))
    h.say(message(FENCE_DONE, a=h.heard(FENCE)[0][3]))
    # It goes on answering, so it is not silent.
    while not h.side.seen(kind):
        h.say(message(PONG))
        h.turn(SECOND // 100)
    owned.memory[:] = 0x33
    owned.rest(h)
    answer = h.header()
    assert answer is not None
    assert answer.status == FENCED
    assert (owned.memory == 0x33).all()


def test_after_the_end_of_a_link_only_quiet_ends_a_fence(h: Hand) -> None:
    """An honest peer that closes says all of this in one breath, while bytes of its writes are on their way."""
    owned = Owned(h)
    here = Tensors((1, 1, SIZE, SIZE), region=False)
    remote = h.side.to_peer.import_cache(99, here.geometry, [("tcp", b"", -1)])
    pair = _core.Pair(h.side.register(here), remote, None)
    before: list[int] = []
    call = Call(then=lambda _: before.append(len(h.side.seen(_core.EVENT_FENCED))))
    pair.submit(call, READ, [0], [0], 0, 0, 1, 0.0, False)
    h.kept.append((here, pair))
    h.side.to_peer.fence()
    h.run(lambda: h.heard(FENCE))
    h.say(message(DISCONNECT) + message(FENCE_DONE, a=h.heard(FENCE)[0][3]) + message(GOODBYE))
    h.run(lambda: h.side.seen(_core.EVENT_FENCED))
    # The node's own operation ends when the connections do, and then nothing is received any more.
    assert before == [0]
    owned.memory[:] = 0x33
    owned.rest(h)
    h.turn()
    assert (owned.memory == 0x33).all()
