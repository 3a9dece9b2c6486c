"""Leases in the engine: who may adopt them, when exactly they end, and what must be quiet before they are over."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from aiodatadist import _core

from .engine_rig import (
    ADOPT,
    CLOSED,
    FENCE,
    FENCE_DONE,
    LEASE_ANSWER,
    LEASE_OVER,
    MODES,
    NOT_FOUND,
    OK,
    PEER_LOST,
    PING,
    PONG,
    PROTOCOL,
    RELEASE,
    RENEW,
    SECOND,
    TIMEOUT,
    WRITE_FRAME,
    Event,
    Hand,
    hand,
    message,
    request,
    rig,
)

pytestmark = pytest.mark.sanitize

LEASE = 0x1234_5678_9ABC_DEF0
SIZE = 65536
HAND = 2  # the cluster id of the hand
MAX_ADOPTED = 65536
FENCES = 64


@pytest.fixture(params=MODES)
def h(request: pytest.FixtureRequest) -> Iterator[Hand]:
    with hand(request.param, drain_timeout=0.5) as made:
        yield made


@pytest.fixture
def stepped() -> Iterator[Hand]:
    with hand("step", drain_timeout=0.5, heartbeat_limit=3600.0) as made:
        yield made


def over(h: Hand, lease: int = LEASE) -> list[Event]:
    return h.side.seen(_core.EVENT_LEASE_OVER, lease)


def answer_fences(h: Hand) -> None:
    """Say that nothing older is left, to each fence that was asked for."""
    for fence in h.heard(FENCE):
        h.said.remove(fence)
        h.say(message(FENCE_DONE, a=fence[3]))


def ask(h: Hand, kind: int, lease: int = LEASE, *, flags: int = 0, token: int = 5) -> tuple[int, int]:
    """Ask the node about a lease; return the status and the TTL of its answer."""
    h.said = [said for said in h.said if said[0] != LEASE_ANSWER]
    h.say(message(kind, flags=flags, a=lease, b=token))
    h.run(lambda: h.heard(LEASE_ANSWER))
    ((_, _, status, a, b, c),) = h.heard(LEASE_ANSWER)
    assert (a, b) == (lease, token)
    return status, c


# --- the owner --------------------------------------------------------------------------------------------------------


def test_l4_a_lease_ends_at_its_ttl_and_not_before(stepped: Hand) -> None:
    h, node = stepped, stepped.side.node
    assert node.hold(LEASE, 7, 1.0, 77)  # for a peer that is not linked: nothing has to be quiet
    h.turn(SECOND - 1)
    assert not over(h)
    h.turn(1)
    (event,) = over(h)
    assert (event.status, event.cache) == (TIMEOUT, 7)
    assert node.leases() == []


def test_l4_renewals_count_from_when_they_came(stepped: Hand) -> None:
    h, node = stepped, stepped.side.node
    assert node.hold(LEASE, 7, 1.0, HAND)
    h.turn(SECOND // 2)
    assert ask(h, ADOPT) == (OK, SECOND)
    renewed = h.engine.now_ns()  # some steps after the adoption at most
    for _ in range(5):
        h.turn(SECOND // 10 * 9)
        h.say(message(RENEW))
        h.turn(0)
        renewed = h.engine.now_ns()
        assert not h.heard(FENCE)
    h.turn(SECOND - 1)
    assert not h.heard(FENCE)
    assert not h.heard(LEASE_OVER)
    assert h.engine.now_ns() == renewed + SECOND - 1
    h.turn(1)
    assert [said[2:4] for said in h.heard(LEASE_OVER)] == [(TIMEOUT, LEASE)]
    assert not over(h), "the peer may still touch the blocks"
    assert [(ended, adopted, left) for _, ended, adopted, left in node.leases()] == [(True, False, 0.0)]
    h.run(lambda: h.heard(FENCE))
    answer_fences(h)
    h.run(lambda: over(h))
    assert over(h)[0].status == TIMEOUT


def test_l4_what_the_peer_sent_while_this_process_slept_counts(stepped: Hand) -> None:
    h = stepped
    assert h.side.node.hold(LEASE, 7, 1.0, HAND)
    assert ask(h, ADOPT) == (OK, SECOND)
    h.say(message(RENEW))
    h.turn(10 * SECOND)  # the timer and the message are there at the same time
    assert not h.heard(LEASE_OVER)
    h.turn(SECOND - 1)
    assert not h.heard(LEASE_OVER)
    h.turn(1)
    assert h.heard(LEASE_OVER)


def test_l4_heartbeats_do_not_renew_what_was_not_adopted(stepped: Hand) -> None:
    h, node = stepped, stepped.side.node
    for lease in (LEASE, LEASE + 1):
        assert node.hold(lease, 7, 1.0, HAND)
    assert ask(h, ADOPT) == (OK, SECOND)
    for _ in range(4):
        h.turn(SECOND // 4)
        h.say(message(RENEW) + message(PING))
        h.turn(0)
    h.run(lambda: h.heard(FENCE))
    answer_fences(h)
    h.run(lambda: over(h, LEASE + 1))
    assert [number for number, *_ in node.leases()] == [LEASE]


@pytest.mark.parametrize("idle", [False, True])
def test_l2_a_release_is_answered_at_once_and_over_when_the_peer_is_quiet(h: Hand, idle: bool) -> None:
    assert h.side.node.hold(LEASE, 7, 3600.0, HAND)
    assert ask(h, RELEASE, flags=int(idle))[0] == OK
    if not idle:
        h.run(lambda: h.heard(FENCE))
        assert not over(h)
        answer_fences(h)
    h.run(lambda: over(h))
    assert over(h)[0].status == OK
    assert bool(h.heard(FENCE)) is False
    assert not h.heard(LEASE_OVER), "who has released it knows"


def test_a_release_before_the_end_of_the_link_counts(stepped: Hand) -> None:
    """The farewell comes over another connection, and may be read first."""
    h = stepped
    assert h.side.node.hold(LEASE, 7, 3600.0, HAND)
    h.say(message(RENEW) * 5000 + message(RELEASE, flags=1, a=LEASE, b=9))
    h.side.to_peer.disconnect(CLOSED)
    h.run(lambda: over(h))
    (event,) = over(h)
    assert event.status == OK


@pytest.mark.parametrize("kind", [ADOPT, RELEASE])
def test_l3_unknown_leases_and_those_of_others_are_told_alike(h: Hand, kind: int) -> None:
    node = h.side.node
    assert node.hold(LEASE, 7, 3600.0, 77)
    assert ask(h, kind)[0] == NOT_FOUND
    for unknown in (0, 1, 2**64 - 1):
        assert ask(h, kind, unknown)[0] == NOT_FOUND
    assert [(number, ended, adopted) for number, ended, adopted, _ in node.leases()] == [(LEASE, False, False)]


def test_l3_an_ended_lease_can_be_neither_adopted_nor_released(h: Hand) -> None:
    assert h.side.node.hold(LEASE, 7, 3600.0, HAND)
    h.side.node.end_lease(LEASE)
    h.side.node.end_lease(LEASE)
    h.side.node.end_lease(LEASE + 1)
    assert ask(h, ADOPT)[0] == NOT_FOUND
    assert ask(h, RELEASE)[0] == NOT_FOUND
    h.run(lambda: h.heard(FENCE))
    answer_fences(h)
    h.run(lambda: over(h))
    assert ask(h, RELEASE)[0] == NOT_FOUND
    assert len(over(h)) == 1


def test_the_first_to_adopt_a_lease_for_anyone_has_it(h: Hand) -> None:
    node = h.side.node
    assert node.hold(LEASE, 7, 3600.0)
    assert not node.hold(LEASE, 7, 3600.0), "the id is taken"
    assert ask(h, ADOPT)[0] == OK
    with hand(drain_timeout=0.5) as stranger:  # of another node, with the same cluster id
        assert ask(stranger, ADOPT)[0] == NOT_FOUND
    assert ask(h, ADOPT)[0] == OK, "once more is no error"
    assert node.leases(LEASE)[0][2]


def test_u5_a_lease_is_over_after_what_is_being_received(h: Hand) -> None:
    memory = np.zeros(SIZE, np.uint8)
    h.kept.append(memory)
    h.side.node.register_cache(77, [int(memory.ctypes.data)], 1, SIZE, SIZE, True, True)
    frame = request(WRITE_FRAME, 77, [(0, 0, SIZE)], payload=b"\x11" * SIZE)
    h.send(frame[: len(frame) // 2])
    h.run(lambda: memory[0] == 0x11)
    assert h.side.node.hold(LEASE, 77, 3600.0, HAND)
    # It says that it is idle, and that nothing is left; the engine sees that it is not so.
    assert ask(h, RELEASE, flags=1)[0] == OK
    h.run(lambda: h.heard(FENCE))
    answer_fences(h)
    assert ask(h, RELEASE)[0] == NOT_FOUND
    assert not over(h)
    h.send(frame[len(frame) // 2 :])
    h.run(lambda: over(h))
    assert (memory == 0x11).all()


def test_u5_a_silent_tcp_peer_is_shut_out_at_the_end_of_a_lease(stepped: Hand) -> None:
    h = stepped
    memory = np.zeros(SIZE, np.uint8)
    h.kept.append(memory)
    h.side.node.register_cache(77, [int(memory.ctypes.data)], 1, SIZE, SIZE, True, True)
    frame = request(WRITE_FRAME, 77, [(0, 0, SIZE)], payload=b"\x11" * SIZE)
    h.send(frame[: len(frame) // 2])
    h.run(lambda: memory[0] == 0x11)
    assert h.side.node.hold(LEASE, 77, 1.0, HAND)
    h.run(lambda: over(h), advance_ns=SECOND // 100)
    memory[:] = 0x33
    h.send(frame[len(frame) // 2 :])
    assert h.header() is not None
    assert (memory == 0x33).all()


@pytest.mark.parametrize("how", ["cache", "leases", "node"])
def test_closing_ends_leases(h: Hand, how: str) -> None:
    node = h.side.node
    memory = np.zeros(SIZE, np.uint8)
    cache = node.register_cache(77, [int(memory.ctypes.data)], 1, SIZE, SIZE, True, True)
    h.kept.append(memory)
    assert node.hold(LEASE, 77, 3600.0, HAND)
    assert node.hold(LEASE + 1, 78, 3600.0, 99)
    assert ask(h, ADOPT)[0] == OK
    {"cache": cache.close, "leases": node.end_leases, "node": node.abort}[how]()
    if how != "node":
        h.run(lambda: h.heard(LEASE_OVER) and len(h.heard(FENCE)) == (2 if how == "cache" else 1))
        assert h.heard(LEASE_OVER)[0][2:4] == (CLOSED, LEASE)
        answer_fences(h)
    h.run(lambda: over(h))
    assert over(h)[0].status == CLOSED
    assert len(over(h, LEASE + 1)) == (0 if how == "cache" else 1)
    if how == "node":
        assert not node.hold(LEASE + 2, 77, 1.0)


def test_l7_after_the_end_of_the_link_a_lease_runs_out(stepped: Hand) -> None:
    h, node = stepped, stepped.side.node
    assert node.hold(LEASE, 7, 1.0, HAND)
    assert ask(h, ADOPT) == (OK, SECOND)
    h.turn(SECOND // 2)
    h.say(message(RENEW))
    h.turn(0)
    h.wire.close()
    h.turn(SECOND - 1)
    assert not over(h)
    assert [(ended, adopted) for _, ended, adopted, _ in node.leases()] == [(False, False)]
    h.turn(1)
    assert over(h)[0].status == PEER_LOST


def test_many_leases_that_end_at_once_share_fences(stepped: Hand) -> None:
    h, count = stepped, 1000
    for i in range(count):
        assert h.side.node.hold(LEASE + i, 7, 1.0, HAND)
    h.run(lambda: len(h.heard(FENCE)) == FENCES, advance_ns=SECOND // 10)
    h.turn()
    assert len(h.heard(FENCE)) == FENCES
    answer_fences(h)
    h.run(lambda: h.heard(FENCE))
    h.turn()
    assert len(h.heard(FENCE)) == 1
    answer_fences(h)
    h.run(lambda: len(h.side.seen(_core.EVENT_LEASE_OVER)) == count)
    assert h.side.node.leases() == []


def test_a_peer_may_adopt_so_many_and_no_more(h: Hand) -> None:
    for i in range(MAX_ADOPTED + 1):
        assert h.side.node.hold(LEASE + i, 7, 3600.0, HAND)
    for first in range(0, MAX_ADOPTED, 4096):
        h.said.clear()
        h.say(b"".join(message(ADOPT, a=LEASE + i) for i in range(first, first + 4096)))
        h.run(lambda: len(h.heard(LEASE_ANSWER)) == 4096)
        assert {said[2] for said in h.said if said[0] == LEASE_ANSWER} == {OK}
    assert ask(h, ADOPT, LEASE + MAX_ADOPTED)[0] == NOT_FOUND
    assert ask(h, RELEASE, flags=1)[0] == OK
    assert ask(h, ADOPT, LEASE + MAX_ADOPTED)[0] == OK


# --- the consumer -----------------------------------------------------------------------------------------------------


def adopt(h: Hand, ttl_ns: int = SECOND, status: int = OK, lease: int = LEASE) -> Event:
    token = h.side.to_peer.adopt_lease(lease)
    h.run(lambda: h.heard(ADOPT))
    ((*_, a, b, _),) = h.heard(ADOPT)
    h.said.clear()
    assert (a, b) == (lease, token)
    h.say(message(LEASE_ANSWER, status=status, a=lease, b=token, c=ttl_ns))
    h.run(lambda: h.side.seen(_core.EVENT_LEASE_ANSWER, token))
    return h.side.seen(_core.EVENT_LEASE_ANSWER, token)[0]


def test_what_is_adopted_is_renewed_until_it_is_released(stepped: Hand) -> None:
    h = stepped
    assert (adopt(h).status, adopt(h, SECOND // 10, lease=LEASE + 1).nbytes) == (OK, SECOND // 10)
    for _ in range(4):
        h.turn(SECOND // 40)
    assert len(h.heard(RENEW)) == 4, "at the pace of the shorter one, once for both"
    h.said.clear()
    token = h.side.to_peer.release_lease(LEASE + 1)
    assert token
    h.turn()
    assert h.heard(RELEASE) == [(RELEASE, 1, 0, LEASE + 1, token, 0)]
    h.turn(SECOND // 40)  # was set before
    h.said.clear()
    for _ in range(8):
        h.turn(SECOND // 8)
    assert len(h.heard(RENEW)) == 4
    h.side.to_peer.release_lease(LEASE)
    h.said.clear()
    for _ in range(8):
        h.turn(SECOND // 8)
    assert not h.heard(RENEW)


def test_what_was_refused_or_lost_is_renewed_no_more(stepped: Hand) -> None:
    h = stepped
    assert adopt(h, status=NOT_FOUND).status == NOT_FOUND
    h.turn(SECOND)
    assert not h.heard(RENEW)
    adopt(h)
    h.say(message(LEASE_OVER, status=CLOSED, a=LEASE))
    h.run(lambda: h.side.seen(_core.EVENT_LEASE_LOST, LEASE))
    assert h.side.seen(_core.EVENT_LEASE_LOST)[0].status == CLOSED
    h.said.clear()
    h.turn(SECOND)
    h.turn(SECOND)
    assert not h.heard(RENEW)


@pytest.mark.parametrize("ttl_ns", [0, 1, 2**64 - 1])
def test_no_ttl_that_an_owner_names_makes_the_engine_spin(stepped: Hand, ttl_ns: int) -> None:
    adopt(stepped, ttl_ns)
    for _ in range(100):
        stepped.turn(SECOND // 10_000)
    assert len(stepped.heard(RENEW)) <= 10


def test_answers_that_nobody_waits_for_are_ignored(h: Hand) -> None:
    for kind in (LEASE_ANSWER, LEASE_OVER, RENEW):
        h.say(message(kind, a=LEASE, b=7) * 100)
    h.say(message(PING, a=1))
    h.run(lambda: h.heard(PONG))
    assert adopt(h).status == OK
    assert not h.side.seen(_core.EVENT_LEASE_LOST)
    assert len(h.side.seen(_core.EVENT_LEASE_ANSWER)) == 1


def test_a_release_that_overtakes_an_adoption_wins(stepped: Hand) -> None:
    h = stepped
    first, second = h.side.to_peer.adopt_lease(LEASE), h.side.to_peer.release_lease(LEASE)
    h.say(message(LEASE_ANSWER, a=LEASE, b=first, c=SECOND) + message(LEASE_ANSWER, a=LEASE, b=second))
    h.run(lambda: len(h.side.seen(_core.EVENT_LEASE_ANSWER)) == 2)
    h.turn(SECOND)
    assert not h.heard(RENEW)


@pytest.mark.parametrize("kind", [LEASE_ANSWER, LEASE_OVER])
def test_statuses_that_say_nothing_end_the_link(h: Hand, kind: int) -> None:
    h.say(message(kind, status=-99, a=LEASE))
    assert h.lost() == PROTOCOL


def test_a_link_that_has_ended_asks_nothing(h: Hand) -> None:
    h.wire.close()
    h.lost()
    assert h.side.to_peer.adopt_lease(LEASE) == 0
    assert h.side.to_peer.release_lease(LEASE) == 0


# --- both -------------------------------------------------------------------------------------------------------------


def test_l4_a_consumer_that_is_stopped_loses_its_lease_at_the_ttl() -> None:
    with rig("tcp", "step", engines=2, drain_timeout=0.5, heartbeat_limit=3600.0) as r:
        node = r.owner.node
        assert node.hold(LEASE, 7, 1.0, 1)
        token = r.user.to_peer.adopt_lease(LEASE)
        r.run(lambda: r.user.seen(_core.EVENT_LEASE_ANSWER, token))
        # Neither side's ring is drained: no Python takes part.
        for _ in range(100):
            for engine in r.running:
                engine.step(SECOND // 20)
        assert [ended for _, ended, _, _ in node.leases()] == [False]
        r.running = [r.engines[-1]]
        left = round(node.leases()[0][3] * SECOND)
        assert SECOND // 2 < left <= SECOND
        r.turn(advance_ns=left - 1000)
        assert [ended for _, ended, _, _ in node.leases()] == [False]
        r.turn(advance_ns=1000)
        assert [ended for _, ended, _, _ in node.leases()] == [True]
        assert not r.owner.seen(_core.EVENT_LEASE_OVER)
        r.running = list(r.engines)
        r.run(lambda: r.owner.seen(_core.EVENT_LEASE_OVER) and r.user.seen(_core.EVENT_LEASE_LOST))
        assert r.user.seen(_core.EVENT_LEASE_LOST, LEASE)[0].status == TIMEOUT


@pytest.mark.parametrize("path", ["shm-mapped", "shm-process_vm", "tcp"])
def test_u5_an_expired_lease_is_not_over_while_a_transfer_runs(path: str) -> None:
    with rig(path, "step", engines=2, heartbeat_limit=3600.0) as r:
        here, there = r.tensors((2, 64, SIZE, SIZE), owner=False), r.tensors((2, 64, SIZE, SIZE), seed=1)
        pair = r.pair(here, there)
        order: list[str] = []
        r.user.events.clear()
        assert r.owner.node.hold(LEASE, 2001, 0.01, 1)
        call = r.start(pair, _core.READ, range(64), range(64), then=lambda _: order.append("done"))
        # The TTL passes while the consumer's engine, which moves the bytes, does not come to it.
        r.running = [r.engines[-1]]
        r.turn(advance_ns=SECOND // 10)
        assert [ended for _, ended, _, _ in r.owner.node.leases()] == [True]
        assert not call.ended
        r.running = list(r.engines)
        while not (r.owner.seen(_core.EVENT_LEASE_OVER) and call.ended):
            r.turn()
            if r.owner.seen(_core.EVENT_LEASE_OVER) and "over" not in order:
                order.append("over")
        assert order == ["done", "over"]
        assert call.status == OK
