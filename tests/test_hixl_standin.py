"""The STAND-IN for HIXL itself: its ABI against what is published, and what a program sees that knows no more."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from . import hixl_standin
from .waiting import PATIENCE

pytestmark = pytest.mark.hixl

SUCCESS, PARAM_INVALID, TIMEOUT, NOT_CONNECTED, ALREADY_CONNECTED = 0, 103900, 103901, 103902, 103903
UNSUPPORTED, RESOURCE_EXHAUSTED, FAILED = 103905, 203900, 503900
DEVICE, HOST = 0, 1
READ, WRITE = 0, 1
WAITING, COMPLETED, REQUEST_FAILED = 0, 1, 3
NOT_CONNECT, CONNECTED, CONNECT_FAILED = 0, 3, 4
MIB = 1 << 20

# The published methods, as the Itanium ABI names them.
A = "RKN2ge12AscendStringE"
PUBLISHED = {
    "libmetadef.so": {
        "_ZN2ge12AscendStringC1EPKc",
        "_ZN2ge12AscendStringC1EPKcm",
        "_ZNK2ge12AscendString9GetStringEv",
        "_ZNK2ge12AscendString9GetLengthEv",
        *(f"_ZNK2ge12AscendString{operator}ERKS0_" for operator in ("lt", "gt", "le", "ge", "eq", "ne")),
    },
    "libcann_hixl.so": {
        "_ZN4hixl4HixlC1Ev",
        "_ZN4hixl4HixlD1Ev",
        f"_ZN4hixl4Hixl10InitializeE{A}RKSt3mapIS2_S2_St4lessIS2_ESaISt4pairIS3_S2_EEE",
        "_ZN4hixl4Hixl8FinalizeEv",
        "_ZN4hixl4Hixl11RegisterMemERKNS_7MemDescENS_7MemTypeERPv",
        "_ZN4hixl4Hixl13DeregisterMemEPv",
        f"_ZN4hixl4Hixl7ConnectE{A}i",
        f"_ZN4hixl4Hixl10DisconnectE{A}i",
        f"_ZN4hixl4Hixl12ConnectAsyncE{A}i",
        f"_ZN4hixl4Hixl15DisconnectAsyncE{A}i",
        f"_ZN4hixl4Hixl21GetAsyncConnectStatusE{A}RNS_18AsyncConnectStatusE",
        "_ZN4hixl4Hixl21GetAsyncConnectStatusERSt3mapIN2ge12AscendStringENS_18AsyncConnectStatusESt4lessIS3_E"
        "SaISt4pairIKS3_S4_EEE",
        f"_ZN4hixl4Hixl12TransferSyncE{A}NS_10TransferOpERKSt6vectorINS_14TransferOpDescESaIS7_EEi",
        f"_ZN4hixl4Hixl13TransferAsyncE{A}NS_10TransferOpERKSt6vectorINS_14TransferOpDescESaIS7_EE"
        "RKNS_12TransferArgsERPv",
        "_ZN4hixl4Hixl17GetTransferStatusERKPvRNS_14TransferStatusE",
        "_ZN4hixl4Hixl17GetTransferStatusERKNS_21GetTransferStatusArgsERSt6vectorINS_14TransferResultESaIS5_EE",
        f"_ZN4hixl4Hixl10SendNotifyE{A}RKNS_10NotifyDescEi",
        "_ZN4hixl4Hixl11GetNotifiesERSt6vectorINS_10NotifyDescESaIS2_EE",
        "_ZN4hixl4Hixl13GetCapabilityENS_11FeatureTypeERi",
    },
}


@pytest.mark.parametrize("library", PUBLISHED)
def test_the_exported_symbols_are_the_published_ones(library: str) -> None:
    path = hixl_standin.build() / "lib64" / library
    lines = subprocess.check_output(["nm", "-D", "--defined-only", str(path)], text=True).splitlines()
    exported = {line.split()[-1] for line in lines}
    # Each constructor and destructor has a second name for base classes.
    twins = {name.replace(f"{kind}1E", f"{kind}2E") for name in PUBLISHED[library] for kind in "CD"}
    assert {name for name in exported if not name.startswith("standin_")} == PUBLISHED[library] | twins


class Driver:
    """A process that does to the stand-in what it is told."""

    def __init__(self, program: Path, environ: dict[str, str]) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("HIXL_STANDIN_")}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([program], stdin=pipe, stdout=pipe, text=True, env={**clean, **environ})
        self.name = ""

    def do(self, command: str, *arguments: object) -> list[str]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(command, *arguments, file=self.process.stdin, flush=True)
        return self.process.stdout.readline().split()

    def status(self, command: str, *arguments: object) -> int:
        return int(self.do(command, *arguments)[0])

    def value(self, command: str, *arguments: object) -> int:
        status, value = self.do(command, *arguments)
        assert int(status) == SUCCESS, status
        return int(value)

    def start(self, *options: str, port: bool = True) -> Driver:
        """Choose a device and initialise the engine."""
        assert self.status("device", 0) == 0
        with socket.socket() as reserved:
            reserved.bind(("127.0.0.1", 0))
            number = reserved.getsockname()[1]
        self.name = f"127.0.0.1:{number}" if port else "127.0.0.1"
        assert self.status("init", self.name, *options) == SUCCESS
        return self

    def device(self, size: int, value: int, *, register: bool = True) -> int:
        """Allocate device memory filled with a byte."""
        address = self.value("malloc", size, 0)
        assert self.status("fill", address, size, value) == 0
        if register:
            self.value("register", address, size, DEVICE)
        return address

    def host(self, size: int, value: int) -> int:
        address = self.value("host", size)
        assert self.status("fill", address, size, value) == 0
        self.value("register", address, size, HOST)
        return address

    def look(self, address: int, size: int) -> str:
        return self.do("look", address, size)[1]

    def finish(self, remote: Driver, op: int, *descs: int, user_data: int = 0) -> int:
        """Transfer, and ask until it is over."""
        request = self.value("transfer", remote.name, op, user_data, *descs)
        limit = time.monotonic() + PATIENCE
        while (state := self.value("query", request)) == WAITING:
            assert time.monotonic() < limit
            time.sleep(0.001)
        return state

    def until(self, counter: str, least: int) -> None:
        limit = time.monotonic() + PATIENCE
        while self.value("count", counter) < least:
            assert time.monotonic() < limit
            time.sleep(0.001)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hixl") / "driver"
    hixl_standin.compile_program(hixl_standin.HERE / "driver.cpp", path)
    return path


@pytest.fixture
def driver(program: Path) -> Iterator[Callable[..., Driver]]:
    started: list[Driver] = []

    def start(**environ: str) -> Driver:
        started.append(Driver(program, {f"HIXL_STANDIN_{name}": value for name, value in environ.items()}))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.communicate()


def linked(driver: Callable[..., Driver], size: int = 4 * MIB, **environ: str) -> tuple[Driver, Driver, int, int]:
    """Two processes with device memory of 1s and 2s; the first has connected to the second."""
    near, far = driver(**environ).start(), driver(**environ).start()
    here, there = near.device(size, 1), far.device(size, 2)
    assert near.status("connect", far.name, 1000) == SUCCESS
    return near, far, here, there


def test_bytes_move_between_processes(driver: Callable[..., Driver]) -> None:
    near, far, here, there = linked(driver)
    assert near.finish(far, READ, here, there, MIB) == COMPLETED
    assert near.look(here, MIB) == "2"
    assert near.look(here + MIB, 3 * MIB) == "1"
    # Several pieces, which cross what is moved at once.
    assert near.finish(far, WRITE, here + MIB, there + 3, 3 * MIB - 4096, here, there + 3 * MIB, 5) == COMPLETED
    assert far.look(there, 3) == "2"
    assert far.look(there + 3, 3 * MIB - 4096) == "1"
    assert far.look(there + 3 * MIB - 4093, MIB) == "2"
    assert near.do("violations") == ["0"]


@pytest.mark.parametrize("op", [READ, WRITE])
def test_between_host_and_device(driver: Callable[..., Driver], op: int) -> None:
    near, far = driver().start(port=False), driver().start()
    here, there = near.host(MIB, 1), far.device(MIB, 2)
    assert near.status("connect", far.name, 1000) == SUCCESS
    assert near.finish(far, op, here, there, MIB) == COMPLETED
    assert near.look(here, MIB) == far.look(there, MIB) == ("2" if op == READ else "1")


def test_the_host_cannot_touch_device_memory(driver: Callable[..., Driver]) -> None:
    one = driver().start()
    address = one.device(MIB, 7)
    assert one.look(address, MIB) == "7"
    byte = ctypes.create_string_buffer(1)
    here, there = (ctypes.c_void_p * 2)(ctypes.addressof(byte), 1), (ctypes.c_void_p * 2)(address, 1)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.process_vm_readv(one.process.pid, here, 1, there, 1, 0) == -1
    assert ctypes.get_errno() == errno.EFAULT
    one.do("touch", address)
    assert one.process.wait(PATIENCE) == -signal.SIGSEGV


def test_the_wrong_kind_of_memory_is_refused(driver: Callable[..., Driver]) -> None:
    one = driver().start()
    device, host = one.device(MIB, 1, register=False), one.value("host", MIB)
    assert one.status("register", device, MIB, HOST) == PARAM_INVALID
    assert one.status("register", host, MIB, DEVICE) == PARAM_INVALID
    assert one.status("register", device, 2 * MIB, DEVICE) == PARAM_INVALID  # more than was allocated
    assert one.status("register", device, 0, DEVICE) == PARAM_INVALID


def test_registrations(driver: Callable[..., Driver]) -> None:
    one = driver(MAX_REGISTRATIONS="2").start()
    first = one.device(4 * MIB, 1, register=False)
    handle = one.value("register", first, MIB, DEVICE)
    assert one.value("register", first, MIB, DEVICE) == handle  # the same
    assert one.status("register", first, 2 * MIB, DEVICE) == PARAM_INVALID  # overlaps
    one.value("register", first + 2 * MIB, MIB, DEVICE)
    assert one.status("register", first + 3 * MIB, MIB, DEVICE) == RESOURCE_EXHAUSTED
    assert one.status("deregister", 0) == PARAM_INVALID
    assert one.status("deregister", handle) == SUCCESS
    assert one.status("deregister", handle) == SUCCESS
    one.value("register", first + 3 * MIB, MIB, DEVICE)


def test_memory_comes_before_the_connection(driver: Callable[..., Driver]) -> None:
    near, far, here, there = linked(driver)
    late_here, late_there = near.device(MIB, 3), far.device(MIB, 4)
    assert near.status("transfer", far.name, READ, 0, late_here, there, MIB) == PARAM_INVALID
    assert near.status("transfer", far.name, READ, 0, here, late_there, MIB) == PARAM_INVALID
    assert "local_memory" in near.do("violations")[0]
    assert near.status("disconnect", far.name, 1000) == SUCCESS
    assert near.status("connect", far.name, 1000) == SUCCESS
    assert near.finish(far, READ, late_here, late_there, MIB) == COMPLETED
    # A part of what is registered will do; more than it will not.
    assert near.finish(far, READ, here + 5, there + 6, 7) == COMPLETED
    assert near.status("transfer", far.name, READ, 0, here, there + MIB, 4 * MIB) == PARAM_INVALID


def test_memory_stays_while_connected(driver: Callable[..., Driver]) -> None:
    near, far = driver().start(), driver().start()
    mine, handle = near.device(MIB, 1, register=False), 0
    handle = near.value("register", mine, MIB, DEVICE)
    theirs = far.value("register", far.device(MIB, 2, register=False), MIB, DEVICE)
    assert near.status("connect", far.name, 1000) == SUCCESS
    assert near.status("deregister", handle) == FAILED
    assert far.status("deregister", theirs) == FAILED
    assert near.status("disconnect", far.name, 1000) == SUCCESS
    assert near.status("deregister", handle) == SUCCESS
    assert far.status("deregister", theirs) == SUCCESS  # heard of it before Disconnect returned


def test_only_the_side_that_connected_may_ask(driver: Callable[..., Driver]) -> None:
    near, far, here, there = linked(driver)
    assert far.status("transfer", near.name, READ, 0, there, here, MIB) == NOT_CONNECTED
    assert far.status("connect", near.name, 1000) == SUCCESS
    assert far.finish(near, READ, there, here, MIB) == COMPLETED


def test_connecting(driver: Callable[..., Driver]) -> None:
    near, far, _, _ = linked(driver)
    assert near.status("connect", far.name, 1000) == ALREADY_CONNECTED
    assert near.status("connect", near.name, 1000) == PARAM_INVALID
    assert near.status("connect", "nowhere", 1000) == PARAM_INVALID
    assert near.status("disconnect", near.name, 1000) == NOT_CONNECTED
    far.do("finalize")
    assert near.status("disconnect", far.name, 1000) == SUCCESS
    assert near.status("connect", far.name, 1000) == FAILED


def test_a_connection_times_out(driver: Callable[..., Driver]) -> None:
    near, far = driver().start(), driver(CONNECT_STALLS="1").start()
    assert near.status("connect", far.name, 20) == TIMEOUT
    slow = driver(CONNECT_MS="10").start()
    assert near.status("connect", slow.name, 5000) == SUCCESS


def test_asynchronous_connections(driver: Callable[..., Driver]) -> None:
    near, far = driver().start(), driver().start()
    assert near.status("connect_async", far.name, 0) == PARAM_INVALID
    assert near.value("connect_status", far.name) == NOT_CONNECT
    assert near.status("connect_async", far.name, 1000) == SUCCESS
    limit = time.monotonic() + PATIENCE
    while (state := near.value("connect_status", far.name)) != CONNECTED:
        assert state != CONNECT_FAILED
        assert time.monotonic() < limit
    assert near.status("disconnect_async", far.name, 1000) == SUCCESS
    while near.value("connect_status", far.name) != NOT_CONNECT:
        assert time.monotonic() < limit
    far.do("finalize")
    assert near.status("connect_async", far.name, 1000) == SUCCESS
    while near.value("connect_status", far.name) != CONNECT_FAILED:
        assert time.monotonic() < limit
    assert near.do("connect_statuses") == ["0", f"{far.name}={CONNECT_FAILED}"]


def test_a_request_is_over_once(driver: Callable[..., Driver]) -> None:
    near, far, here, there = linked(driver, DELAY_US="20000")
    request = near.value("transfer", far.name, READ, 0, here, there, MIB)
    assert near.value("query", request) == WAITING
    limit = time.monotonic() + PATIENCE
    while (state := near.value("query", request)) == WAITING:
        assert time.monotonic() < limit
    assert state == COMPLETED
    assert near.status("query", request) == PARAM_INVALID
    assert near.status("query", 0) == FAILED
    assert near.value("count", "violations") == 1


def test_a_handle_may_be_given_out_again(driver: Callable[..., Driver]) -> None:
    near, far, here, there = linked(driver, REUSE="1")
    assert near.finish(far, READ, here, there, MIB) == COMPLETED
    near.do("set", "DELAY_US", 1000000)
    first, second = (near.value("transfer", far.name, READ, 0, here, there, 1) for _ in range(2))
    assert (first, second) == (1, 2)


def test_the_bulk_query(driver: Callable[..., Driver]) -> None:
    near, far, here, there = linked(driver, ENGINE="client-server")
    requests = [near.value("transfer", far.name, READ, 70 + i, here, there, 9) for i in range(3)]
    near.do("set", "STALL", 1)
    stalled = near.value("transfer", far.name, READ, 73, here, there, 9)
    near.until("stalls", 1)
    assert near.do("query_all", 1, 0) == ["0", f"{requests[0]}:70:{COMPLETED}"]
    finished = [f"{request}:{71 + i}:{COMPLETED}" for i, request in enumerate(requests[1:])]
    assert near.do("query_all", 99, 1) == ["0", *finished]
    assert near.do("query_all", 99, 0) == ["0", f"{stalled}:73:{WAITING}"]


@pytest.mark.parametrize(
    ("environ", "options", "status"),
    [
        ({}, [], UNSUPPORTED),
        ({"SOC": "Ascend950PR"}, [], SUCCESS),
        ({}, ["LocalCommRes", '{"version":"1.3"}'], SUCCESS),
        ({}, ["LocalCommRes", '{"version":"1.2"}'], UNSUPPORTED),
        ({}, ["GlobalResourceConfig", '{"comm_resource_config.protocol_desc":"roce:device"}'], SUCCESS),
        ({"SOC": "Ascend950PR"}, ["EnableUseFabricMem", "1"], UNSUPPORTED),
        ({"SOC": "Ascend950PR", "BULK": "0"}, [], UNSUPPORTED),
    ],
)
def test_which_engines_know_it(
    driver: Callable[..., Driver], environ: dict[str, str], options: list[str], status: int
) -> None:
    assert driver(**environ).start(*options).status("query_all", 9, 0) == status


@pytest.mark.parametrize(
    "option",
    ["RdmaTrafficClass 3", "RdmaTrafficClass 256", "RdmaServiceLevel 8", "AutoConnect yes", "GlobalResourceConfig x"],
)
def test_options_are_checked(driver: Callable[..., Driver], option: str) -> None:
    one = driver()
    one.do("device", 0)
    assert one.status("init", "127.0.0.1", option) == PARAM_INVALID


@pytest.mark.parametrize("op", [READ, WRITE])
def test_what_stalls_writes_until_it_is_disconnected(driver: Callable[..., Driver], op: int) -> None:
    near, far, here, there = linked(driver, STALL="1", DISCONNECT_MS="10")
    side, address = (near, here) if op == READ else (far, there)
    request = near.value("transfer", far.name, op, 0, here, there, MIB, here + MIB, there + MIB, MIB)
    near.until("late_writes", 3)
    assert near.value("query", request) == WAITING
    assert side.look(address, 64) == str(0xEE)
    assert near.status("disconnect", far.name, 1000) == SUCCESS
    written = near.value("count", "late_writes")
    side.do("fill", address, MIB, 9)
    assert near.value("query", request) == REQUEST_FAILED
    time.sleep(0.02)
    assert side.look(address, MIB) == "9"
    assert near.value("count", "late_writes") == written


def test_a_stall_may_end(driver: Callable[..., Driver]) -> None:
    near, far, here, there = linked(driver, STALL="1", STALL_MS="10")
    assert near.finish(far, READ, here, there, MIB) == COMPLETED
    assert near.value("count", "late_writes") > 0
    assert near.look(here, MIB) == "2"


def test_the_synchronous_transfer(driver: Callable[..., Driver]) -> None:
    near, far, here, there = linked(driver, STALL="2")
    assert near.status("transfer_sync", far.name, READ, 5000, here, there, MIB) == SUCCESS
    assert near.status("transfer_sync", far.name, READ, 10, here, there, MIB) == TIMEOUT
    near.until("late_writes", 3)
    assert near.status("disconnect", far.name, 1000) == SUCCESS


def test_a_failure_breaks_the_connection(driver: Callable[..., Driver]) -> None:
    near, far, here, there = linked(driver, FAIL="2")
    assert near.finish(far, READ, here, there, MIB) == COMPLETED
    assert near.finish(far, READ, here, there, MIB) == REQUEST_FAILED
    assert near.status("transfer", far.name, READ, 0, here, there, MIB) == FAILED
    assert near.status("disconnect", far.name, 1000) == SUCCESS
    assert near.status("connect", far.name, 1000) == SUCCESS
    assert near.finish(far, READ, here, there, MIB) == COMPLETED


@pytest.mark.parametrize("way", ["kill", "finalize"])
def test_a_peer_that_is_gone(driver: Callable[..., Driver], way: str) -> None:
    near, far, here, there = linked(driver)
    if way == "kill":
        far.process.kill()
        far.process.wait()
    else:
        far.do("finalize")
    assert near.finish(far, READ, here, there, MIB) == REQUEST_FAILED
    assert near.status("disconnect", far.name, 1000) == SUCCESS


def test_queries_may_fail(driver: Callable[..., Driver]) -> None:
    near, far, here, there = linked(driver, QUERY_FAILS="1")
    request = near.value("transfer", far.name, READ, 0, here, there, MIB)
    assert near.status("query", request) == FAILED
    limit = time.monotonic() + PATIENCE
    while (state := near.value("query", request)) == WAITING:
        assert time.monotonic() < limit
    assert state == COMPLETED


def test_limits(driver: Callable[..., Driver]) -> None:
    near, far, here, there = linked(driver, MAX_LINKS="1", MAX_REQUESTS="1", DELAY_US="1000000")
    assert near.status("connect", driver().start().name, 1000) == RESOURCE_EXHAUSTED
    assert near.status("transfer", far.name, READ, 0, here, there, 1) == SUCCESS
    assert near.status("transfer", far.name, READ, 0, here, there, 1) == RESOURCE_EXHAUSTED


def test_memory_that_a_wire_cannot_reach(driver: Callable[..., Driver]) -> None:
    near, far = driver(ALIGN=str(2 * MIB), PINNED_HOST="1").start(), driver().start()
    handle = near.value("register", near.device(MIB, 1, register=False) + 4096, 4096, DEVICE)
    assert near.status("connect", far.name, 1000) == FAILED
    near.do("deregister", handle)
    handle = near.value("register", near.value("host", MIB), MIB, HOST)
    assert near.status("connect", far.name, 1000) == FAILED
    near.do("deregister", handle)
    near.device(MIB, 1)
    near.value("register", near.value("pinned", MIB), MIB, HOST)
    assert near.status("connect", far.name, 1000) == SUCCESS


def test_threads_need_the_context(driver: Callable[..., Driver]) -> None:
    one = driver()
    assert one.status("init", "127.0.0.1") == FAILED  # no device
    one.start()
    assert one.status("elsewhere") == FAILED
    assert one.value("count", "violations") == 2
    one.do("set", "ANY_THREAD", 1)
    assert one.status("elsewhere") == SUCCESS


def test_notifications_and_capabilities(driver: Callable[..., Driver]) -> None:
    near, far, _, _ = linked(driver)
    assert near.status("notify", far.name, "done", 1024) == SUCCESS
    assert near.status("notify", far.name, "long", 1025) == PARAM_INVALID
    assert near.status("notify", near.name, "x", 1) == NOT_CONNECTED
    assert far.do("notifies") == ["0", "done:1024"]
    assert far.do("notifies") == ["0"]
    assert [near.value("capability", feature) for feature in (0, 1, 2)] == [1, 1, 0]
