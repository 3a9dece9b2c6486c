"""The doctor's look at RDMA: on trees like those of real machines, and on this one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodatadist import _core
from aiodatadist.commands import doctor_rdma, machine, main, rdma_devices
from aiodatadist.commands.rdma_choice import (
    TIMEOUTS,
    Choice,
    choose,
    recommended_timeout,
    retransmission_seconds,
    unusable,
)
from aiodatadist.commands.rdma_devices import Library

from .sysfs import Sysfs, expanded, server

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("AIODATADIST_", "KVCACHE_", "HCCL_")):
            monkeypatch.delenv(name)


@pytest.fixture
def look_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sysfs], Library]:
    """Have the doctor see a tree, with a libibverbs that offers all its devices."""

    def look(tree: Sysfs) -> Library:
        monkeypatch.setattr(rdma_devices, "SYS", tree.sys)
        monkeypatch.setattr(rdma_devices, "DEV", tree.dev)
        monkeypatch.setattr(doctor_rdma, "SYS", tree.sys)
        library = Library(True, None, [device.name for device in rdma_devices.devices()])
        monkeypatch.setattr(Library, "ask", lambda: library)
        return library

    return look


def probe(monkeypatch: pytest.MonkeyPatch, usable: bool, detail: str) -> None:
    monkeypatch.setattr(_core, "probe_transports", lambda: [("tcp", True, "sockets"), ("verbs", usable, detail)])


def reported(capsys: pytest.CaptureFixture[str], code: int = 1) -> dict[str, Any]:
    assert main(["doctor", "rdma", "--json"]) == code
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def told(capsys: pytest.CaptureFixture[str], code: int = 1) -> str:
    assert main(["doctor", "rdma"]) == code
    return capsys.readouterr().out


def decided(choice: Choice) -> dict[str, str]:
    return {one.device: f"{'picked' if one.picked else 'refused'}: {one.reason}" for one in choice.opinions}


# Reading. -----------------------------------------------------------------------------------------------------


def test_a_roce_device_of_a_server(tmp_path: Path, look_at: Callable[[Sysfs], Library]) -> None:
    look_at(server(tmp_path))
    device = next(one for one in rdma_devices.devices() if one.name == "mlx5_1")
    assert (device.kind, device.driver, device.firmware) == ("CA", "mlx5_core", "28.41.1000")
    assert device.place == rdma_devices.Place("0000:bc:00.0", "pci0000:b9", "0000:b9:00.0", 1)
    assert device.node is not None
    assert device.node.endswith("uverbs1")
    assert device.refused is device.software_on is None
    assert [(netdev.name, netdev.state, netdev.mtu) for netdev in device.netdevs] == [("eth1", "up", 1500)]
    (port,) = device.ports
    assert (port.number, port.state, port.physical, port.roce) == (1, "ACTIVE", "LinkUp", True)
    assert port.rate == "100 Gb/sec (4X EDR)"
    # Empty entries of the table are not addresses.
    assert [(gid.index, gid.address, gid.kind, gid.netdev) for gid in port.gids] == [
        (0, "fe80::1", "IB/RoCE v1", "eth1"),
        (1, "fe80::1", "RoCE v2", "eth1"),
        (2, "10.1.1.5", "IB/RoCE v1", "eth1"),
        (3, "10.1.1.5", "RoCE v2", "eth1"),
    ]


def test_an_infiniband_device_with_two_ports(tmp_path: Path, look_at: Callable[[Sysfs], Library]) -> None:
    tree = Sysfs(tmp_path)
    nic = tree.pci("pci0000:80", "0000:80:01.0", "0000:81:00.0", kind="0x020700", driver="mlx5_core")
    tree.device("ibp129s0", nic, layer="InfiniBand", ports=2, state="4: ACTIVE|2: INIT", gids=[("fe80::9", "", "")])
    library = look_at(tree)
    (device,) = rdma_devices.devices()
    assert [(port.number, port.state, port.lid, port.subnet_manager) for port in device.ports] == [
        (1, "ACTIVE", 3, 1),
        (2, "INIT", 3, 1),
    ]
    assert not device.ports[0].roce
    assert device.ports[0].gids[0].kind is None
    assert device.place is not None
    # The kernel's -1.
    assert device.place.numa_node is None
    assert unusable(device, library) is None


def test_a_device_in_software(tmp_path: Path, look_at: Callable[[Sysfs], Library]) -> None:
    tree = Sysfs(tmp_path)
    tree.netdev("rdma0", "unknown")
    tree.device("rxe0", parent="rdma0", gids=[("10.77.0.1", "RoCE v2", "rdma0")])
    library = look_at(tree)
    (device,) = rdma_devices.devices()
    assert device.software_on == "rdma0"
    assert device.place is device.driver is None
    # An interface that does not tell its state is not one that is down.
    assert unusable(device, library) is None


def test_nothing_is_there(tmp_path: Path, look_at: Callable[[Sysfs], Library]) -> None:
    look_at(Sysfs(tmp_path))
    assert rdma_devices.devices() == rdma_devices.accelerators() == []


def test_numbers_are_in_their_order(tmp_path: Path, look_at: Callable[[Sysfs], Library]) -> None:
    tree = Sysfs(tmp_path)
    for number in (10, 9, 1):
        tree.device(f"mlx5_{number}")
    look_at(tree)
    assert [device.name for device in rdma_devices.devices()] == ["mlx5_1", "mlx5_9", "mlx5_10"]


@pytest.mark.parametrize(
    ("kind", "vendor", "found"),
    [
        ("0x120000", "0x19e5", "Huawei"),
        ("0x120000", "0x1d22", "Kunlunxin"),
        ("0x030200", "0x10de", "NVIDIA"),
        ("0x030000", "0x10de", "NVIDIA"),
        ("0x038000", "0x1002", "AMD"),
        ("0x120000", "0x4321", "vendor 0x4321"),
        ("0x030000", "0x1a03", None),  # a console
        ("0x030000", "0x19e5", None),  # another
        ("0x020000", "0x10de", None),  # a NIC of the same maker
    ],
)
def test_what_computes(
    kind: str, vendor: str, found: str | None, tmp_path: Path, look_at: Callable[[Sysfs], Library]
) -> None:
    tree = Sysfs(tmp_path)
    tree.pci("pci0000:3a", "0000:3a:00.0", "0000:3b:00.0", kind=kind, vendor=vendor)
    look_at(tree)
    assert [one.vendor for one in rdma_devices.accelerators()] == ([] if found is None else [found])


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("10.77.0.1", "0000:0000:0000:0000:0000:ffff:0a4d:0001"),
        ("fe80::9", "fe80:0000:0000:0000:0000:0000:0000:0009"),
        ("::", "0000:0000:0000:0000:0000:0000:0000:0000"),
    ],
)
def test_the_trees_write_addresses_as_the_kernel_does(address: str, text: str) -> None:
    assert expanded(address) == text


# Choosing. ----------------------------------------------------------------------------------------------------


def chosen(library: Library, nodes: tuple[int, ...] = (0, 1)) -> list[Choice]:
    return choose(rdma_devices.devices(), rdma_devices.accelerators(), library, nodes)


def test_accelerators_take_the_nic_behind_their_root_port(tmp_path: Path, look_at: Callable[[Sysfs], Library]) -> None:
    choices = chosen(look_at(server(tmp_path)))
    processors, first, second = choices
    assert (first.picked, second.picked) == (["mlx5_0"], ["mlx5_1"])
    assert first.accelerators == ["0000:3c:01.0", "0000:3c:02.0"]
    assert first.whom == "Huawei 0000:3c:01.0, 0000:3c:02.0"
    assert decided(first) == {
        "mlx5_0": "picked: behind the same PCI root port 0000:3a:00.0",
        "mlx5_1": "refused: elsewhere in the machine, and another is nearer",
        "mlx5_2": "refused: on the same NUMA node 0, and another is nearer",
        "mlx5_3": "refused: port 1 is DOWN (Disabled): bring its interface up (ip link set ens4 up), "
        "and look at the cable and the switch",
    }
    assert processors.picked == ["mlx5_2"]
    said = decided(processors)
    assert "shares its root port with 0000:3c:01.0, 0000:3c:02.0: kept for" in said["mlx5_0"]
    assert said["mlx5_2"] == "picked: no accelerator shares its root port, on NUMA node 0"
    assert "port 1 is DOWN" in said["mlx5_3"]


def test_the_next_best_where_the_nic_of_the_root_port_is_down(
    tmp_path: Path, look_at: Callable[[Sysfs], Library]
) -> None:
    tree = server(tmp_path)
    (tree.sys / "class/infiniband/mlx5_0/ports/1/state").write_text("1: DOWN\n")
    _, first, second = chosen(look_at(tree))
    assert first.picked == ["mlx5_2"]
    assert decided(first)["mlx5_2"] == "picked: on the same NUMA node 0; none that can be used shares its root port"
    assert "elsewhere" in decided(first)["mlx5_1"]
    assert second.picked == ["mlx5_1"]


def test_a_bond_is_for_the_processors_wherever_it_sits(tmp_path: Path, look_at: Callable[[Sysfs], Library]) -> None:
    tree = Sysfs(tmp_path)
    way = ("pci0000:3a", "0000:3a:00.0")
    tree.pci(*way, "0000:3b:00.0", kind="0x030200", vendor="0x10de")
    nic = tree.pci(*way, "0000:3c:00.0")
    tree.netdev("bond0", members=["eth0", "eth1"])
    tree.netdev("eth0", pci=nic, bond="bond0")
    tree.device("mlx5_bond_0", nic, gids=[("10.0.0.1", "RoCE v2", "bond0")])
    processors, accelerator = chosen(look_at(tree))
    assert decided(processors) == {"mlx5_bond_0": "picked: it is part of the bond bond0"}
    assert accelerator.picked == ["mlx5_bond_0"]


def test_the_only_nic_serves_all(tmp_path: Path, look_at: Callable[[Sysfs], Library]) -> None:
    tree = Sysfs(tmp_path)
    tree.pci("pci0000:3a", "0000:3a:00.0", "0000:3b:00.0", kind="0x120000", vendor="0x19e5")
    nic = tree.pci("pci0000:3a", "0000:3a:00.0", "0000:3c:00.0")
    tree.device("mlx5_0", nic, gids=[("10.0.0.1", "RoCE v2", "eth0")])
    processors, accelerator = chosen(look_at(tree))
    assert accelerator.picked == processors.picked == ["mlx5_0"]
    assert decided(processors)["mlx5_0"].endswith("0000:3b:00.0: but there is no other")


def test_a_virtual_machine_without_root_ports(tmp_path: Path, look_at: Callable[[Sysfs], Library]) -> None:
    """Everything sits at one host bridge: that is no root port that they share, and each accelerator is alone."""
    tree = Sysfs(tmp_path)
    for number in (3, 4):
        tree.pci("pci0000:00", f"0000:00:0{number}.0", kind="0x030200", vendor="0x10de")
    nic = tree.pci("pci0000:00", "0000:00:05.0")
    tree.device("mlx5_0", nic, gids=[("10.0.0.1", "RoCE v2", "eth0")])
    tree.device("rxe0", gids=[("10.0.1.1", "RoCE v2", "eth1")])
    processors, *accelerators = chosen(look_at(tree))
    assert processors.picked == ["mlx5_0", "rxe0"]
    assert [one.accelerators for one in accelerators] == [["0000:00:03.0"], ["0000:00:04.0"]]
    for one in accelerators:
        said = decided(one)
        assert (
            said["mlx5_0"] == "picked: at the same host bridge pci0000:00; none that can be used shares its root port"
        )
        assert said["rxe0"] == "refused: it has no place on the PCI bus to compare"


def test_those_beside_the_own_processors_come_first(tmp_path: Path, look_at: Callable[[Sysfs], Library]) -> None:
    tree = Sysfs(tmp_path)
    for number in (0, 1):
        nic = tree.pci(f"pci0000:{number}0", f"0000:{number}0:00.0", f"0000:{number}1:00.0", node=number)
        tree.device(f"mlx5_{number}", nic, gids=[("10.0.0.1", "RoCE v2", "eth0")])
    library = look_at(tree)
    assert chosen(library, (0,))[0].picked == ["mlx5_0", "mlx5_1"]
    assert chosen(library, (1,))[0].picked == ["mlx5_1", "mlx5_0"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"kind": "4: RNIC"}, "it is a RNIC, and only InfiniBand and RoCE"),
        ({"node": False}, "load the kernel module ib_uverbs"),
        ({"ports": 0}, "it has no port"),
        ({}, "port 1 has no GID: give its interface an IP address"),
        ({"layer": "InfiniBand", "state": "2: INIT"}, r"port 1 is INIT \(LinkUp\): no subnet manager"),
        ({"layer": "InfiniBand", "state": "1: DOWN", "physical": "2: Polling"}, r"DOWN \(Polling\): look at the cable"),
        ({"state": "1: DOWN|1: DOWN", "ports": 2}, "port 1 is DOWN .*; port 2 is DOWN"),
    ],
)
def test_why_a_device_cannot_be_used(
    options: dict[str, Any], why: str, tmp_path: Path, look_at: Callable[[Sysfs], Library]
) -> None:
    tree = Sysfs(tmp_path)
    tree.device("mlx5_0", **options)
    library = look_at(tree)
    (device,) = rdma_devices.devices()
    said = unusable(device, library)
    assert said is not None
    assert re.search(why, said)
    assert decided(chosen(library)[0]) == {"mlx5_0": f"refused: {said}"}


def test_a_device_whose_file_cannot_be_opened_or_has_no_driver(
    tmp_path: Path, look_at: Callable[[Sysfs], Library]
) -> None:
    tree = Sysfs(tmp_path)
    tree.device("mlx5_0", gids=[("10.0.0.1", "RoCE v2", "eth0")])
    look_at(tree)
    (device,) = rdma_devices.devices()
    assert "has no user space driver" in str(unusable(device, Library(True, None, [])))
    (tree.dev / "infiniband/uverbs0").unlink()
    (device,) = rdma_devices.devices()
    assert "uverbs0 cannot be opened (No such file or directory): pass /dev/infiniband into the container" in str(
        unusable(device, Library(True, None, ["mlx5_0"]))
    )


# What the doctor says. ----------------------------------------------------------------------------------------


def test_built_without_verbs(
    tmp_path: Path,
    look_at: Callable[[Sysfs], Library],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    look_at(server(tmp_path))
    probe(monkeypatch, False, "built without verbs: infiniband/verbs.h was not found")
    output = told(capsys)
    assert "\nPROBLEM: built without verbs: " in output
    assert "libibverbs-dev" in output
    assert output.endswith("RDMA cannot be used: built without verbs. shm and tcp do not need it.\n")
    assert reported(capsys)["loopback"]["works"] is None


def test_no_library(
    tmp_path: Path,
    look_at: Callable[[Sysfs], Library],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    look_at(server(tmp_path))
    monkeypatch.setattr(Library, "ask", lambda: Library(False, "cannot open shared object file", []))
    probe(monkeypatch, False, "cannot open libibverbs.so.1")
    report = reported(capsys)
    assert report["status"] == "no libibverbs"
    assert "ibverbs-providers" in report["findings"][0]["fix"]


def test_no_device(
    tmp_path: Path,
    look_at: Callable[[Sysfs], Library],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    look_at(Sysfs(tmp_path))
    probe(monkeypatch, False, "there is no RDMA device")
    output = told(capsys)
    assert "RDMA cannot be used: no device." in output
    assert "rdma link add rxe0 type rxe" in output


def test_all_ports_down(
    tmp_path: Path,
    look_at: Callable[[Sysfs], Library],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tree = Sysfs(tmp_path)
    tree.netdev("eth0", "down")
    tree.device("rxe0", parent="eth0", state="1: DOWN", physical="3: Disabled")
    look_at(tree)
    probe(monkeypatch, False, "rxe0: port 1: down")
    report = reported(capsys)
    assert report["status"] == "port down"
    assert "ip link set eth0 up" in report["findings"][0]["why"]


def test_a_device_that_can_be_used_and_a_config_that_does_not(
    tmp_path: Path,
    look_at: Callable[[Sysfs], Library],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    look_at(server(tmp_path))
    probe(monkeypatch, False, "mlx5_7: there is no such device")
    report = reported(capsys)
    assert report["status"] == "not usable"
    assert "mlx5_7" in report["findings"][0]["why"]


def test_text_names_everything_on_a_server(
    tmp_path: Path,
    look_at: Callable[[Sysfs], Library],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    look_at(server(tmp_path))
    probe(monkeypatch, False, "built without verbs")
    monkeypatch.setenv("HCCL_RDMA_TIMEOUT", "20")
    monkeypatch.setenv("KVCACHE_RDMA_NICS", "mlx5_0")
    output = told(capsys)
    for line in (
        "  mlx5_0              mlx5_core, CA, firmware 28.41.1000, PCI 0000:3d:00.0, root port 0000:3a:00.0, ",
        "    interface eth0    up, MTU 1500",
        "    port 1            ACTIVE, LinkUp, Ethernet (RoCE), 100 Gb/sec (4X EDR)",
        "      GID 3           10.1.0.5, RoCE v2, eth0",
        "  0000:3c:01.0        Huawei, behind 0000:3a:00.0, NUMA node 0",
        "NICs for the processors",
        "  use                 AIODATADIST_RDMA_DEVICES=mlx5_2",
        "NICs for Huawei 0000:bb:01.0, 0000:bb:02.0",
        "  use                 AIODATADIST_RDMA_DEVICES=mlx5_1",
        "  HCCL_RDMA_TIMEOUT   20",
        "  KVCACHE_RDMA_NICS   mlx5_0",
        "  recommended         HCCL_RDMA_TIMEOUT=15 for transfers of 1 s with HCCL_RDMA_RETRY_CNT=7: ",
        "  this environment    HCCL_RDMA_TIMEOUT=20: after 34.4 s",
    ):
        assert f"\n{line}" in output, line


def test_too_little_memory_may_be_locked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    limits = {**machine.limits(), "memlock": machine.Limit(65536, 65536, "bytes")}
    monkeypatch.setattr(machine, "limits", lambda: limits)
    monkeypatch.setattr(machine, "rights", lambda: machine.Rights(1000, False, False, "off"))
    probe(monkeypatch, False, "there is no RDMA device")
    output = told(capsys)
    assert "NOTE: memlock: " in output
    assert "65,536 bytes" in output
    assert "--ulimit memlock=-1" in output
    monkeypatch.setattr(machine, "rights", lambda: machine.Rights(0, True, True, "off"))
    assert "NOTE: memlock" not in told(capsys)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HCCL_RDMA_TIMEOUT", "21"),
        ("HCCL_RDMA_TIMEOUT", "4"),
        ("HCCL_RDMA_RETRY_CNT", "0"),
        ("HCCL_RDMA_RETRY_CNT", "x"),
    ],
)
def test_variables_that_cannot_be_used(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    assert main(["doctor", "rdma"]) == 2
    assert f"{name}='{value}'" in capsys.readouterr().err


# Timeouts. ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "retries", "exponent"),
    [(1.0, 7, 15), (1.0, 1, 17), (30.0, 7, 20), (0.001, 7, 5), (1e6, 7, 20), (1e-9, 1, 5)],
)
def test_the_documented_formula(seconds: float, retries: int, exponent: int) -> None:
    assert recommended_timeout(seconds, retries) == exponent


@given(st.floats(1e-3, 30.0), st.integers(1, 7))
def test_the_recommended_timeout_is_the_least_that_lasts(seconds: float, retries: int) -> None:
    exponent = recommended_timeout(seconds, retries)
    if exponent < TIMEOUTS[1]:
        assert retransmission_seconds(exponent, retries) >= seconds * (1 - 1e-9)
    if exponent > TIMEOUTS[0]:
        assert retransmission_seconds(exponent - 1, retries) < seconds * (1 + 1e-9)


@pytest.mark.parametrize("seconds", ["0", "-1", "soon", "inf"])
def test_no_such_time(seconds: str) -> None:
    with pytest.raises(SystemExit) as why:
        main(["doctor", "rdma", "--transfer-timeout", seconds])
    assert why.value.code == 2


# This machine. ------------------------------------------------------------------------------------------------


def run_here(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )


def test_built_without_verbs_other_transports_serve() -> None:
    built_with = not any(name == "verbs" and "built without verbs" in why for name, _, why in _core.probe_transports())
    if built_with:
        pytest.skip("this build has verbs: AIODATADIST_VERBS=0 leaves it out")
    done = run_here("-m", "aiodatadist", "doctor", "rdma", "--json")
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["status"] == "built without verbs"
    done = run_here("-c", PULL_ELSEWHERE)
    assert done.returncode == 0, done.stderr
    assert "built without verbs" in done.stdout


def test_this_machine() -> None:
    done = run_here("-m", "aiodatadist", "doctor", "rdma", "--json")
    report = json.loads(done.stdout)
    there = sorted(os.listdir("/sys/class/infiniband")) if os.path.isdir("/sys/class/infiniband") else []
    assert sorted(device["name"] for device in report["devices"]) == there
    assert (report["status"] == "ready") == (done.returncode == 0)
    if not there:
        assert "no device" in [finding["what"] for finding in report["findings"]]


# Prints what a link uses in place of verbs, and why.
PULL_ELSEWHERE = """
import asyncio, numpy as np, aiodatadist as adt
async def main():
    config = adt.Config(transports=("verbs", "shm", "tcp"))
    async with adt.DataDist(1, adt.Role.PROMPT, listen="127.0.0.1:0", config=config) as a, \\
            adt.DataDist(2, adt.Role.DECODER, config=config) as b:
        source = a.cache_manager.register_blocks_cache([np.ones((4, 64), np.uint8)], key=adt.BlocksCacheKey(1))
        target = b.cache_manager.register_blocks_cache([np.zeros((4, 64), np.uint8)], remote=None)
        await source.ready()
        link = await b.link(adt.ClusterInfo(1, a.listen_address))
        await b.cache_manager.pull_blocks(adt.BlocksCacheKey(1), target, [1, 2], [0, 3])
        assert target.tensors[0].sum() == 128
        print(link.path.transport, "|", link.path.reasons["verbs"])
asyncio.run(main())
"""


def test_without_libibverbs_other_transports_serve(tmp_path: Path) -> None:
    """What the loader finds first is no library."""
    (tmp_path / "libibverbs.so.1").write_text("not a library")
    done = run_here("-m", "aiodatadist", "doctor", "rdma", "--json", LD_LIBRARY_PATH=str(tmp_path))
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert not report["library"]["there"]
    assert "no libibverbs" in [finding["what"] for finding in report["findings"]]
    done = run_here("-c", PULL_ELSEWHERE, LD_LIBRARY_PATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    used, _, why = done.stdout.partition(" | ")
    assert used in ("shm", "tcp")
    assert why.strip()
