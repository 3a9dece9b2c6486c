"""What only a machine shows whose devices may be taken down: tests/vm/run.sh starts it. Elsewhere it is skipped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import aiodatadist as adt
from aiodatadist.commands import rdma_devices

from .pairs import linked, pattern
from .test_directions import moves, run_moves, sides
from .test_doctor_rdma import PULL_ELSEWHERE

ROOT = Path(__file__).parent.parent
KEY = adt.BlocksCacheKey(1)
BLOCKS, BLOCK_BYTES = 64, 16 * 1024


@pytest.fixture(autouse=True)
def in_the_machine() -> None:
    if not os.environ.get("IN_TEST_VM"):
        pytest.skip("takes RDMA devices down: run it by tests/vm/run.sh")


pytestmark = [pytest.mark.verbs, pytest.mark.hang_limit(300)]


def system(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def devices() -> dict[str, str]:
    """Return the devices in software, by the interface that each was made on."""
    return {device.software_on: device.name for device in rdma_devices.devices() if device.software_on}


def wait_for_ports() -> None:
    deadline = time.monotonic() + 60.0
    while not all(port.state == "ACTIVE" and port.gids for one in rdma_devices.devices() for port in one.ports):
        assert time.monotonic() < deadline, rdma_devices.devices()
        time.sleep(0.05)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_doctor_moves_blocks_over_verbs() -> None:
    done = run("-m", "aiodatadist", "doctor", "rdma", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["status"] == "ready"
    assert report["loopback"]["works"]
    assert "over verbs" in report["loopback"]["detail"]
    found = {device["name"]: device for device in report["devices"]}
    assert sorted(found) == sorted(devices().values()) == sorted(report["library"]["devices"])
    for device in found.values():
        assert device["ports"][0]["state"] == "ACTIVE"
        assert any(gid["kind"] == "RoCE v2" and "." in gid["address"] for gid in device["ports"][0]["gids"])
    (processors,) = report["choices"]
    assert [opinion["picked"] for opinion in processors["opinions"]] == [True] * len(found)


# One process for both, because starting one takes long here.
DOCTOR = """
from aiodatadist.commands import main
assert main(["doctor", "rdma", "--json"]) == 1
"""


def doctor_and_pull() -> dict[str, Any]:
    """Run the doctor, who finds something in the way, and pull over what is left; return what the doctor said."""
    done = run("-c", DOCTOR + PULL_ELSEWHERE)
    assert done.returncode == 0, done.stdout + done.stderr
    said, _, pulled = done.stdout.rstrip().rpartition("\n")
    assert pulled.partition(" | ")[0] in ("shm", "tcp")
    report: dict[str, Any] = json.loads(said)
    return report


@contextlib.contextmanager
def ports_down() -> Iterator[None]:
    interfaces = list(devices())
    try:
        for interface in interfaces:
            system("ip", "link", "set", interface, "down")
        yield
    finally:
        for interface in interfaces:
            system("ip", "link", "set", interface, "up")
        wait_for_ports()


def test_ports_that_are_down() -> None:
    with ports_down():
        report = doctor_and_pull()
        assert report["status"] == "port down"
        assert "is DOWN" in report["findings"][0]["why"]
        assert "ip link set" in report["findings"][0]["why"]


@contextlib.contextmanager
def no_devices() -> Iterator[None]:
    there = devices()
    try:
        for name in there.values():
            system("rdma", "link", "delete", name)
        yield
    finally:
        for interface, name in there.items():
            system("rdma", "link", "add", name, "type", "rxe", "netdev", interface)
        wait_for_ports()


def test_no_device() -> None:
    with no_devices():
        assert doctor_and_pull()["status"] == "no device"


# A wire that loses packets. ------------------------------------------------------------------------------------


@pytest.fixture
def lossy() -> Iterator[tuple[str, str]]:
    """Return the devices at the two ends of a wire on which one packet of fifty is lost, each way."""
    found = devices()
    ends = ("veth0", "veth1")
    assert set(ends) <= set(found), f"run.sh made no wire: {found}"
    try:
        for end in ends:
            system("tc", "qdisc", "replace", "dev", end, "root", "netem", "loss", "2%")
        yield found[ends[0]], found[ends[1]]
    finally:
        for end in ends:
            system("tc", "qdisc", "del", "dev", end, "root")


def lost() -> int:
    """Return how many packets the wire has lost."""
    return sum(int(queue["drops"]) for queue in json.loads(system("tc", "-s", "-j", "qdisc", "show", "root")))


async def test_blocks_over_a_wire_that_loses_packets(lossy: tuple[str, str]) -> None:
    """Sent again by the devices, until each byte is there; cancelling in between ends what it cancels alone."""
    options = [{"rdma_devices": (name,)} for name in lossy]
    async with linked("verbs", owner=options[0], user=options[1]) as pair:
        assert pair.link.path.transport == "verbs"
        theirs, mine = pattern(1, (BLOCKS, BLOCK_BYTES)), pattern(2, (BLOCKS, BLOCK_BYTES))
        await pair.offer(theirs)
        target = await pair.take(mine)
        caches = pair.user.cache_manager
        rounds = 0
        while rounds < 2 or lost() < 20:
            rounds += 1
            for tensor in mine:
                tensor[:] = 0
            pulls = [
                caches.pull_blocks(KEY, target, range(n, BLOCKS, 4), range(n, BLOCKS, 4), timeout=120.0)
                for n in range(4)
            ]
            pulls[1].cancel()
            ended = await asyncio.gather(*pulls, return_exceptions=True)
            assert [isinstance(one, BaseException) for one in ended].count(True) <= 1, ended
            for n in (0, 2, 3):
                assert ended[n] is None or not isinstance(ended[n], BaseException), ended
                assert all((a[n::4] == b[n::4]).all() for a, b in zip(theirs, mine, strict=True))
            await caches.pull_blocks(KEY, target, range(BLOCKS), range(BLOCKS), timeout=120.0)
            assert all((a == b).all() for a, b in zip(theirs, mine, strict=True))
            for tensor in mine:
                tensor ^= 0xFF
            await caches.push_blocks(KEY, target, range(BLOCKS), range(BLOCKS), timeout=120.0)
            assert all((a == b).all() for a, b in zip(theirs, mine, strict=True))
        assert pair.link.error is None


def test_every_direction_over_a_wire_that_loses_packets(lossy: tuple[str, str]) -> None:
    """Random moves of any kind; each gives what numpy gives, while packets are lost."""
    owner_uses, user_uses = ({"rdma_devices": (name,)} for name in lossy)
    before = lost()

    @settings(max_examples=3, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(moves(), min_size=25, max_size=40), st.sampled_from(["uint8", "int64"]))
    def run(sequence: list[dict[str, Any]], dtype: str) -> None:
        async def body() -> None:
            async with sides("verbs", False, dtype, owner=owner_uses, user=user_uses) as (pair, owner, user):
                await run_moves(sequence, pair, owner, user)

        asyncio.run(body())

    run()
    assert lost() > before
