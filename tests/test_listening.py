"""Listening that starts, moves and stops; switched roles; IPv6; several addresses of a peer."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import inspect
import os
import socket
import stat
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from aiodatadist import _race
from aiodatadist._loop import Runtime, SocketStream
from aiodatadist.config import Config
from aiodatadist.control import linking
from aiodatadist.datadist import DataDist
from aiodatadist.errors import (
    ArgumentError,
    ArgumentTypeError,
    ClosedError,
    HandshakeError,
    LinkError,
    LinkRefusedError,
    LinkTimeout,
    Status,
    TransportError,
)
from aiodatadist.keys import BlocksCacheKey
from aiodatadist.types import Address, ClusterInfo, LinkState, PeerChanged, Role

from .waiting import reserved_address, until

pytestmark = pytest.mark.loop

LISTEN = "127.0.0.1:0"


def info(dd: DataDist) -> ClusterInfo:
    return ClusterInfo(dd.cluster_id, dd.listen_address)


def listening() -> int:
    """Count the listening sockets of this process, of whatever kind."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # no socket, or gone by now
            if stat.S_ISSOCK(os.stat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as sock:
                    found += sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    return found


def busy_port() -> socket.socket:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen()
    return sock


def array(value: int) -> list[np.ndarray[Any, Any]]:
    return [np.full((4, 64), value, np.uint8) for _ in range(2)]


async def pull_works(b: DataDist, model_id: int = 0) -> None:
    mine = b.cache_manager.register_blocks_cache(array(0), remote=None)
    await b.cache_manager.pull_blocks(BlocksCacheKey(1, model_id), mine, [2], [3])
    assert (mine.tensors[0][3] == 7).all()
    await b.cache_manager.unregister_cache(mine)


# Starting, moving, stopping. --------------------------------------------------------------------------------


@pytest.fixture
def kept_address() -> Iterator[str]:
    with reserved_address() as address:
        yield address


async def test_listening_starts_moves_and_stops_under_a_link_that_goes_on(kept_address: str) -> None:
    before = listening()
    async with DataDist(1) as a, DataDist(2) as b, DataDist(3) as c:
        assert a.listen_address is None
        assert listening() == before
        first = await a.start_listening(kept_address)
        assert a.listen_address == first
        assert str(first) == kept_address
        theirs = a.cache_manager.register_blocks_cache(array(7), key=BlocksCacheKey(1))
        await theirs.ready()
        link = await b.link(ClusterInfo(1, first))
        assert link.path.transport == "shm"
        events = b.events()
        await until(lambda: 2 in a.links)

        second = await a.start_listening(("127.0.0.2", 0))
        assert second.host == "127.0.0.2"
        assert await anext(events) == PeerChanged(1, Role.MIX, (str(second),))
        assert link.peer_listens_at == (str(second),)
        with pytest.raises(LinkError, match="Connection refused"):
            await c.link(ClusterInfo(1, first))
        assert (await c.link(ClusterInfo(1, second))).path.transport == "shm"
        await pull_works(b)

        await a.stop_listening()
        assert a.listen_address is None
        assert await anext(events) == PeerChanged(1, Role.MIX, ())
        assert listening() == before
        await c.unlink(ClusterInfo(1))
        with pytest.raises(LinkError, match="Connection refused"):
            await c.link(ClusterInfo(1, second))
        await a.stop_listening()
        await pull_works(b)
        assert link.state is LinkState.READY

        third = await a.start_listening(first)
        assert third == first
        assert (await c.link(ClusterInfo(1, first))).path.transport == "shm"


async def test_listening_where_one_listens_already_changes_nothing() -> None:
    async with DataDist(1, listen=LISTEN) as a, DataDist(2) as b:
        address = a.listen_address
        assert address is not None
        link = await b.link(info(a))
        changes = a._center.own.changes
        sockets = set(os.listdir("/proc/self/fd"))
        for again in (LISTEN, address, str(address), ("localhost", address.port)):
            assert await a.start_listening(again) == address
        assert set(os.listdir("/proc/self/fd")) == sockets
        assert (a._center.own.changes, link.peer_listens_at) == (changes, (str(address),))


async def test_o2_a_port_that_is_taken_is_named_and_the_old_listener_stays() -> None:
    """faults.md O2."""
    with busy_port() as taken:
        host, port = taken.getsockname()
        with pytest.raises(TransportError, match=rf"cannot listen on {host}:{port}: Address already in use") as caught:
            await DataDist(1, listen=(host, port)).open()
        assert "port 0" in str(caught.value.hint)
        assert isinstance(caught.value.__cause__, OSError)
        async with DataDist(1, Role.PROMPT, listen=LISTEN) as a, DataDist(2) as b:
            old = a.listen_address
            for attempt in (a.start_listening((host, port)), a.switch_role(Role.DECODER, listen=(host, port))):
                with pytest.raises(TransportError, match=f"{host}:{port}"):
                    await attempt
            assert (a.listen_address, a.role) == (old, Role.PROMPT)
            assert (await b.link(info(a))).state is LinkState.READY
            # Any free port can be had, whatever is taken.
            assert (await b.start_listening((host, 0))).port not in (0, port)
        async with DataDist(3) as c:
            before = listening()
            with pytest.raises(TransportError):
                await c.start_listening((host, port))
            assert c.listen_address is None
            assert listening() == before


async def test_the_port_that_one_has_oneself() -> None:
    async with DataDist(1, listen=LISTEN) as a:
        assert a.listen_address is not None
        with pytest.raises(TransportError, match="Address already in use") as caught:
            await a.start_listening(("0.0.0.0", a.listen_address.port))
        assert "stop_listening() first" in str(caught.value.hint)
        assert a.listen_address.host == "127.0.0.1"


async def test_addresses_that_cannot_be_had_say_what_to_do() -> None:
    async with DataDist(1) as a:
        with pytest.raises(TransportError, match=r"192\.0\.2\.7:0") as caught:
            await a.start_listening("192.0.2.7:0")
        assert "none of this host's" in str(caught.value.hint)
        for wrong, error in (("nowhere", ArgumentError), (26000, ArgumentTypeError), ("h:70000", ArgumentError)):
            with pytest.raises(error):
                _ = a.start_listening(wrong)  # type: ignore[arg-type]
            with pytest.raises(error):
                _ = a.switch_role(Role.MIX, listen=wrong)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="role"):
            _ = a.switch_role("prefill")  # type: ignore[arg-type]
    for call in (lambda: a.start_listening(LISTEN), a.stop_listening, lambda: a.switch_role(Role.MIX)):
        with pytest.raises(ClosedError):
            call()


async def test_o3_nothing_listens_but_the_one_port_and_its_unix_door() -> None:
    """faults.md O3."""
    before = listening()
    async with DataDist(1, config=Config(transports=("tcp",))) as a, DataDist(2) as b:
        assert listening() == before
        await a.start_listening(LISTEN)
        assert listening() == before + 1
        await b.start_listening(LISTEN)
        assert listening() == before + 3  # the other one is the unix socket, for proofs of the same host
        await b.link(info(a))
        assert listening() == before + 3
    assert listening() == before


async def test_calls_at_once_end_with_one_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = Runtime.resolve

    async def slow(self: Runtime, address: Address, **options: Any) -> Any:
        await asyncio.sleep(0.002 * (address.port % 3))
        return await resolve(self, address, **options)

    monkeypatch.setattr(Runtime, "resolve", slow)
    before = listening()
    async with DataDist(1) as a:
        for _ in range(5):
            calls = [a.start_listening((f"127.0.0.{1 + number % 3}", 0)) for number in range(6)]
            addresses = await asyncio.gather(*calls)
            assert a.listen_address in addresses
            assert listening() == before + 2
        await a.start_listening(LISTEN)
        waiting = a.start_listening("127.0.0.9:0")
        await asyncio.sleep(0)
        a.abort()
        with pytest.raises(ClosedError):
            await waiting
    await until(lambda: listening() == before)


async def test_a_deadline_and_a_cancel_of_a_name_that_is_not_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(self: Runtime, address: Address, **options: Any) -> Any:
        await asyncio.sleep(3600)

    async with DataDist(1, Role.PROMPT, listen=LISTEN) as a:
        old = a.listen_address
        monkeypatch.setattr(Runtime, "resolve", never)
        with pytest.raises(LinkTimeout, match="starting to listen on some-name:0"):
            await a.switch_role(Role.DECODER, listen="some-name:0", timeout=0.01)
        call = a.start_listening("some-name:0", timeout=None)
        await asyncio.sleep(0)
        assert [row.kind for row in a.dump()] == ["listen"]
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (a.listen_address, a.role) == (old, Role.PROMPT)


# Roles. -----------------------------------------------------------------------------------------------------


async def test_a_switched_role_reaches_the_peers() -> None:
    async with DataDist(1, Role.PROMPT, listen=LISTEN) as a, DataDist(2, Role.DECODER) as b, DataDist(3) as c:
        links = [await b.link(info(a)), await c.link(info(a))]
        own = await a.link(info(a))
        events = [b.events(), c.events()]
        listens_at = (str(a.listen_address),)
        await a.switch_role(Role.PROMPT)
        await a.switch_role(Role.MIX)
        for link, stream in zip(links, events, strict=True):
            assert await anext(stream) == PeerChanged(1, Role.MIX, listens_at)
            assert (link.role, link.state) == (Role.MIX, LinkState.READY)
        assert (a.role, own.role) == (Role.MIX, Role.MIX)
        await a.switch_role(Role.DECODER, listen=None)
        changed = await anext(events[0])
        # Both changes may come as one.
        if changed != PeerChanged(1, Role.DECODER, ()):
            assert changed == PeerChanged(1, Role.MIX, ())
            assert await anext(events[0]) == PeerChanged(1, Role.DECODER, ())
        await a.switch_role(Role.PROMPT, listen=LISTEN)
        assert a.listen_address is not None
        async with DataDist(4) as d:
            assert (await d.link(info(a))).role is Role.PROMPT


@pytest.mark.parametrize("side", ["dials", "listens"])
async def test_a_role_switched_at_any_moment_of_a_handshake_arrives(side: str) -> None:
    async with DataDist(1, listen=LISTEN) as a, DataDist(2) as b:
        switching, other = (b, a) if side == "dials" else (a, b)
        roles = [Role.PROMPT, Role.DECODER]
        for turns in range(0, 60, 2):
            linking_now = b.link(info(a))
            for _ in range(turns):
                await asyncio.sleep(0)
            role = roles[turns // 2 % 2]
            await switching.switch_role(role)
            await linking_now
            await until(lambda: switching.cluster_id in other.links)
            link = other.links[switching.cluster_id]
            await until(lambda link=link, role=role: link.role is role)
            await b.unlink(info(a))
            await until(lambda: not a.links)


# IPv6. ------------------------------------------------------------------------------------------------------


def ipv6_lacks() -> str:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError as why:
        return f"no IPv6 on this machine: {why.strerror}"
    return ""


needs_ipv6 = pytest.mark.skipif(bool(ipv6_lacks()), reason=ipv6_lacks() or "IPv6 is there")


@needs_ipv6
@pytest.mark.parametrize("transports", [("shm", "tcp"), ("tcp",)], ids=lambda names: names[0])
async def test_ipv6(transports: tuple[str, ...], caplog: pytest.LogCaptureFixture) -> None:
    config = Config(transports=transports)
    async with DataDist(1, listen="[::1]:0", config=config) as a, DataDist(2, config=config) as b:
        assert a.listen_address is not None
        assert str(a.listen_address) == f"[::1]:{a.listen_address.port}"
        assert "beyond this host" not in caplog.text
        theirs = a.cache_manager.register_blocks_cache(array(7), key=BlocksCacheKey(1))
        await theirs.ready()
        link = await b.link(ClusterInfo(1, f"[::1]:{a.listen_address.port}"))
        assert link.path.transport == transports[0]
        await pull_works(b)
        with pytest.raises(LinkError, match="Connection refused"):
            await b.link(ClusterInfo(3, ("127.0.0.1", a.listen_address.port)))


@needs_ipv6
async def test_all_ipv6_addresses_are_all_addresses() -> None:
    async with DataDist(1, listen="[::]:0") as a:
        assert a.listen_address is not None
        port = a.listen_address.port
        for number, host in enumerate(("::1", "127.0.0.1")):
            async with DataDist(2 + number) as b:
                assert (await b.link(ClusterInfo(1, (host, port)))).path.transport == "shm"
        assert await a.start_listening(("::", port)) == ("::", port)


@needs_ipv6
async def test_a_link_local_address_keeps_its_interface() -> None:
    with open("/proc/net/if_inet6") as file:
        rows = [line.split() for line in file]
    local = [(row[0], row[5]) for row in rows if row[0].startswith("fe80")]
    if not local:
        pytest.skip("no interface has a link-local address")
    digits, interface = local[0]
    host = ":".join(digits[i : i + 4] for i in range(0, 32, 4)) + f"%{interface}"
    async with DataDist(1, listen=(host, 0)) as a, DataDist(2, config=Config(transports=("tcp",))) as b:
        assert a.listen_address is not None
        assert "%" in a.listen_address.host
        assert (await b.link(info(a))).state is LinkState.READY


# Several addresses. -----------------------------------------------------------------------------------------


_taken: list[socket.socket] = []


@pytest.fixture(autouse=True)
def give_ports_back() -> Iterator[None]:
    yield
    while _taken:
        _taken.pop().close()


def refused() -> Address:
    """Return an address that refuses for as long as the test runs: nobody else can listen there."""
    _taken.append(socket.socket())
    _taken[-1].bind(("127.0.0.1", 0))
    return Address(*_taken[-1].getsockname())


def black_hole(monkeypatch: pytest.MonkeyPatch, *ports: int) -> None:
    """Have connections to these ports neither succeed nor fail."""
    connect = SocketStream.connect

    async def hang(self: SocketStream, sockaddr: tuple[Any, ...]) -> None:
        if sockaddr[1] in ports:
            await asyncio.sleep(3600)
        await connect(self, sockaddr)

    monkeypatch.setattr(SocketStream, "connect", hang)


async def test_each_address_is_named_with_its_reason() -> None:
    first, second = refused(), refused()
    async with DataDist(1, listen=LISTEN) as other, DataDist(2) as b:
        wrong = other.listen_address
        with pytest.raises(LinkError) as caught:
            await b.link(ClusterInfo(7, [first, second]))
        assert f"{first}: Connection refused; {second}: Connection refused" in str(caught.value)
        with pytest.raises(LinkError) as caught:
            await b.link(ClusterInfo(7, [first, wrong]))  # type: ignore[list-item]
        assert f"{first}: Connection refused" in str(caught.value)
        assert f"{wrong}: cluster 7 was meant, but cluster 1 listens here" in str(caught.value)
        assert isinstance(caught.value.__cause__, HandshakeError)
        assert b._center.links._slots == {}


async def test_an_address_where_another_cluster_listens_now_is_passed_by() -> None:
    async with DataDist(1, listen=LISTEN) as a, DataDist(9, listen=LISTEN) as other, DataDist(2) as b:
        link = await b.link(ClusterInfo(1, [other.listen_address, refused(), a.listen_address]))  # type: ignore[list-item]
        assert (link.cluster_id, link.state) == (1, LinkState.READY)
        assert other.links == {}


async def test_what_the_peer_says_itself_counts_at_whatever_address() -> None:
    async with DataDist(1, listen=LISTEN) as a, DataDist(2) as b, DataDist(2) as twin:
        await b.link(info(a))
        with pytest.raises(LinkRefusedError, match="linked and alive") as caught:
            await twin.link(ClusterInfo(1, [a.listen_address, refused()]))  # type: ignore[list-item]
        assert caught.value.status == Status.ALREADY_LINK


async def test_a_black_hole_does_not_eat_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_race, "HEAD_START", 0.01)
    hole = refused()
    black_hole(monkeypatch, hole.port)
    async with DataDist(1, listen=LISTEN) as a, DataDist(2) as b:
        link = await b.link(ClusterInfo(1, [hole, refused(), a.listen_address]), timeout=60)  # type: ignore[list-item]
        assert link.state is LinkState.READY
        with pytest.raises(LinkTimeout, match=f"connecting to {hole}"):
            await b.link(ClusterInfo(7, [hole, refused()]), timeout=0.1)


async def test_a_silent_address_is_passed_by_and_asked_again_when_no_other_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linking, "_SILENT_SECONDS", 0.02)
    with busy_port() as silent:
        async with DataDist(1, listen=LISTEN) as a, DataDist(2) as b:
            link = await b.link(ClusterInfo(1, [silent.getsockname(), a.listen_address]), timeout=60)  # type: ignore[list-item]
            assert link.state is LinkState.READY
            host, port = silent.getsockname()
            gone = refused()
            words = rf"waiting for the answer to Hello \({gone}: Connection refused\)"
            with pytest.raises(LinkTimeout, match=words):
                await b.link(ClusterInfo(7, [(host, port), gone]), timeout=2.0)
            silent.setblocking(False)
            with silent.accept()[0], silent.accept()[0], silent.accept()[0]:
                pass  # one from the first call, two from the second


async def test_a_peer_that_can_reach_us_is_let_in_while_our_own_hello_gets_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linking, "_SILENT_SECONDS", 0.05)
    with busy_port() as silent:
        async with DataDist(1, listen=LISTEN) as low, DataDist(2, listen=LISTEN) as high:
            # The lower id's own connection counts when both link at once, if only it led anywhere.
            hopeless = low.link(ClusterInfo(2, silent.getsockname()), timeout=60)
            slots = low._center.links._slots
            await until(lambda: 2 in slots and slots[2].attempt is not None and slots[2].attempt.greeted)
            link = await high.link(info(low), timeout=60)
            assert link.state is LinkState.READY
            assert (await hopeless).cluster_id == 2


async def test_a_name_with_several_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = refused()
    monkeypatch.setattr(_race, "HEAD_START", 0.01)
    async with DataDist(1, listen="127.0.0.3:0") as a, DataDist(2) as b:
        assert a.listen_address is not None
        port = a.listen_address.port
        resolve = Runtime.resolve

        async def several(self: Runtime, address: Address, **options: Any) -> Any:
            if address.host != "many-homed":
                return await resolve(self, address, **options)
            return [(socket.AF_INET, (host, address.port)) for host in ("127.0.0.7", "127.0.0.8", "127.0.0.3")]

        monkeypatch.setattr(Runtime, "resolve", several)
        link = await b.link(ClusterInfo(1, ("many-homed", port)))
        assert link.state is LinkState.READY
        with pytest.raises(LinkError) as caught:
            await b.link(ClusterInfo(7, ("many-homed", gone.port)))
        for host in ("127.0.0.7", "127.0.0.8", "127.0.0.3"):
            assert f"{host}:{gone.port}: Connection refused" in str(caught.value)


async def test_e1_names_are_resolved_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """faults.md E1, E2."""
    if type(asyncio.get_running_loop()).__module__.startswith("uvloop"):
        pytest.skip("uvloop resolves names in libuv, out of this test's reach")
    loop_ran = threading.Event()
    real = socket.getaddrinfo

    def slow(host: Any, *args: Any, **options: Any) -> Any:
        if host != "slow-name":
            return real(host, *args, **options)
        if options.get("flags", 0) & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "no number")
        assert loop_ran.wait(30), "the loop stood still while a name was resolved"
        return real("127.0.0.1", *args, **options)

    async with DataDist(1, listen=LISTEN) as a, DataDist(2) as b:
        monkeypatch.setattr(socket, "getaddrinfo", slow)
        assert a.listen_address is not None
        link = b.link(ClusterInfo(1, ("slow-name", a.listen_address.port)))
        await asyncio.sleep(0.05)
        assert not link.done()
        loop_ran.set()
        assert (await link).state is LinkState.READY
        assert (await b.start_listening("slow-name:0")).host == "127.0.0.1"


# The race itself. -------------------------------------------------------------------------------------------


class Connection:
    def __init__(self, way: int) -> None:
        self.way = way
        self.closed = False

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("ways", "winner", "failed"),
    [
        (["ok"], 0, []),
        (["no"], None, [0]),
        (["no", "ok"], 1, [0]),
        (["no", "no", "no"], None, [0, 1, 2]),
        (["hang", "ok", "ok"], 1, []),
        (["hang", "no", "hang", "ok"], 3, [1]),
        (["slow", "no", "hang"], 0, [1]),
        (["slow no", "hang", "slow"], 2, [0]),
    ],
)
async def test_races(ways: list[str], winner: int | None, failed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_race, "HEAD_START", 0.01)
    started: list[int] = []
    made: list[Connection] = []

    async def connect(way: int) -> Connection:
        started.append(way)
        kind = ways[way]
        if kind == "hang":
            await asyncio.sleep(3600)
        if "slow" in kind:
            await asyncio.sleep(0.05)
        if "no" in kind:
            raise OSError(errno.ECONNREFUSED, "no")
        made.append(Connection(way))
        return made[-1]

    failures: list[tuple[int, OSError]] = []
    won = await _race.race(range(len(ways)), connect, failures)
    assert (won[0] if won else None) == winner
    assert [way for way, _ in failures] == failed
    assert started == sorted(started)
    assert [connection.way for connection in made if not connection.closed] == ([] if winner is None else [winner])


async def test_a_cancelled_race_leaves_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_race, "HEAD_START", 0.001)
    made: list[Connection] = []

    async def connect(way: int) -> Connection:
        await asyncio.sleep(0)
        made.append(Connection(way))
        return made[-1]

    for turns in range(12):
        race = asyncio.ensure_future(_race.race([0, 1, 2], connect, []))
        for _ in range(turns):
            await asyncio.sleep(0)
        race.cancel()
        await asyncio.wait((race,))
        if race.cancelled():
            assert all(connection.closed for connection in made)
        else:
            assert sum(not connection.closed for connection in made) == 1
        made.clear()


# Deadlines. -------------------------------------------------------------------------------------------------

# Those that end at once; and those that wait for the end of what has a deadline of its own.
NO_DEADLINE = {"stop_listening", "open", "wait_closed"}


def test_t10_whatever_of_a_datadist_waits_takes_a_deadline() -> None:
    """faults.md T10."""
    found = set()
    for name, method in vars(DataDist).items():
        if name.startswith("_") or not inspect.isfunction(method):
            continue
        signature = inspect.signature(method)
        waits = inspect.iscoroutinefunction(method) or "Transfer[" in str(signature.return_annotation)
        if waits and name not in NO_DEADLINE:
            assert "timeout" in signature.parameters, name
            found.add(name)
    assert {"link", "unlink", "fence", "aclose", "switch_role", "start_listening"} <= found
