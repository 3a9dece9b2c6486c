"""`doctor ascend`: what it reads of a machine, and what it makes of that. No NPU and no CANN is needed.

The outputs of tools are samples of our own, made after their published descriptions; none comes from a device.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aiodatadist.commands import ascend_host, doctor_ascend, main, rdma_devices
from aiodatadist.commands.ascend_host import Answer, Npu, Ping, Port, Toolkit
from aiodatadist.commands.ascend_variables import judged

from .sysfs import Sysfs

ROOT = Path(__file__).parent.parent
LINK = "link status: UP\n"
ADDRESS = "ipaddr:10.20.0.{number}\nnetmask:255.255.255.0\n"
TLS = (
    "dev_id:{number}, tls switch[{switch}](0:disable, 1:enable), tls preconfigured[1](0:non-preset, 1:preset), "
    "tls alarm time threshold[60]days\n"
)
PING = """device {number} PING {address}
recv seq=0, time=0.081000ms
recv seq=1, time=0.060000ms
recv seq=2, time=0.059000ms
3 packets transmitted, {received} received, {loss}% packet loss
"""


@pytest.fixture(autouse=True)
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without anything, and an environment that says nothing."""
    for name in list(os.environ):
        if name.startswith(("AIODATADIST_", "HCCL_", "ASCEND_")):
            monkeypatch.delenv(name)
    tree = Sysfs(tmp_path)
    monkeypatch.setattr(rdma_devices, "SYS", tree.sys)
    monkeypatch.setattr(ascend_host, "DEV", tree.dev)
    monkeypatch.setattr(ascend_host, "ASCEND", tmp_path / "ascend")
    monkeypatch.setattr(ascend_host, "ETC", tmp_path / "etc")
    (tmp_path / "etc").mkdir()
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    # Other tests may have loaded a stand-in for HIXL into this process.
    monkeypatch.setattr(doctor_ascend, "probed", lambda _: (False, "there is no libcann_hixl.so"))


def machine(folder: Path, count: int = 2) -> None:
    """NPUs, their driver, and CANN."""
    for number in range(count):
        (folder / "dev" / f"davinci{number}").touch()
    (folder / "dev/davinci_manager").touch()
    (folder / "ascend/driver").mkdir(parents=True)
    (folder / "ascend/driver/version.info").write_text("Version=25.5.0\nascendhal_version=7.35.19\n")
    (folder / "ascend/cann/aarch64-linux").mkdir(parents=True)
    (folder / "ascend/cann/aarch64-linux/ascend_toolkit_install.info").write_text(
        "package_name=Ascend-cann-toolkit\nversion=9.1.0\narch=aarch64\n"
    )


def tool(folder: Path, text: str, where: str = "bin") -> Path:
    """Make an hccn_tool of Python code; `number` is the NPU and `what` the rest of its command line."""
    path = folder / where / "hccn_tool"
    path.parent.mkdir(parents=True, exist_ok=True)
    script = f"import sys\nnumber, what = int(sys.argv[2]), sys.argv[3:]\n{text}"
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -SEc {shlex.quote(script)} "$@"\n')
    path.chmod(0o755)
    return path


def talking(switch: str = "0", received: int = 3) -> str:
    loss = 100 - 100 * received // 3
    return f"""
if what == ["-link", "-g"]: print({LINK!r})
elif what == ["-ip", "-g"]: print({ADDRESS!r}.format(number=10 + number))
elif what == ["-tls", "-g"]: print({TLS!r}.format(number=number, switch={switch}))
elif what[:3] == ["-ping", "-g", "address"]:
    print({PING!r}.format(number=number, address=what[3], received={received}, loss={loss}))
else: sys.exit(f"unknown: {{what}}")
"""


def reported(capsys: pytest.CaptureFixture[str], code: int = 1) -> dict[str, Any]:
    assert main(["doctor", "ascend", "--json"]) == code
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def told(capsys: pytest.CaptureFixture[str], code: int = 1) -> str:
    assert main(["doctor", "ascend"]) == code
    return capsys.readouterr().out


def found(report: dict[str, Any]) -> dict[str, str]:
    return {one["what"]: one["why"] for one in report["findings"]}


# What tools say. ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "link"),
    [
        (LINK, "UP"),
        ("link status: DOWN", "DOWN"),
        ("dev_id:0\nLink status : up\n", "UP"),
        ("link status: UPWARD", None),
        ("", None),
        ("the device does not exist", None),
    ],
)
def test_link(text: str, link: str | None) -> None:
    assert ascend_host.parse_link(text) == link


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ADDRESS.format(number=7), ("10.20.0.7", "255.255.255.0")),
        ("ipaddr: fe80::1\nnetmask: 64", ("fe80::1", "64")),
        ("IP address: 10.0.0.1\r\nNet mask: 255.0.0.0\r\n", ("10.0.0.1", "255.0.0.0")),
        ("ipaddr:10.0.0.1", ("10.0.0.1", None)),
        ("ipaddr: none", (None, None)),
        ("", (None, None)),
    ],
)
def test_address(text: str, expected: tuple[str | None, str | None]) -> None:
    assert ascend_host.parse_address(text) == expected


@pytest.mark.parametrize(
    ("text", "on"),
    [
        (TLS.format(number=0, switch=0), False),
        (TLS.format(number=3, switch=1), True),
        ("dev_id:0, tls switch[ 1 ], tls alarm time threshold[60]days\ndev_id:0, [pub cert] info:\n", True),
        ("tls switch[2]", None),
        ("", None),
    ],
)
def test_tls(text: str, on: bool | None) -> None:
    assert ascend_host.parse_tls(text) is on


@pytest.mark.parametrize(
    ("text", "counted"),
    [
        (PING.format(number=0, address="10.0.0.1", received=3, loss=0), (3, 3)),
        ("3 packets transmitted, 0 packets received, 100.00% packet loss", (3, 0)),
        ("1 packet transmitted, 1 packet received", (1, 1)),
        ("ping: unknown host", None),
    ],
)
def test_ping(text: str, counted: tuple[int, int] | None) -> None:
    assert ascend_host.parse_ping(text) == counted


def test_a_ping_is_good_only_if_all_packets_came_back() -> None:
    assert Ping("a", 3, 3, None).works
    assert not any(one.works for one in (Ping("a", 3, 2, None), Ping("a", 3, 0, None), Ping("a", 0, 0, None)))
    assert not Ping("a", None, None, "no answer").works


def test_asking_a_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tool(tmp_path, "if number == 1: sys.exit('no such device')\nprint(what)"))
    assert ascend_host.ask(path, 0, "-x", "y") == Answer("hccn_tool -i 0 -x y", "['-x', 'y']\n", None)
    assert ascend_host.ask(path, 1).error == "exit status 1: no such device"
    missing = ascend_host.ask(str(tmp_path / "nothing"), 0).error
    assert missing is not None
    assert "No such file" in missing
    monkeypatch.setattr(ascend_host, "_TOOL_SECONDS", 0.2)
    sleepy = str(tool(tmp_path, "import time; time.sleep(60)", "sleepy"))
    assert ascend_host.ask(sleepy, 0).error == "no answer within 0.2 s"


def test_a_tool_that_says_other_things(tmp_path: Path) -> None:
    path = str(tool(tmp_path, "print('\\nwhat is  this\\n')"))
    port = ascend_host.port_of(path, 4)
    assert port == Port(4, None, None, None, None, port.errors)
    assert port.errors == [
        f"hccn_tool -i 4 {what} -g: cannot be understood: 'what is this'" for what in ("-link", "-ip", "-tls")
    ]
    silent = str(tool(tmp_path, "", "silent"))
    assert ascend_host.ping(silent, 0, "10.0.0.1") == Ping("10.0.0.1", None, None, "it said nothing")


def test_a_failed_ping_has_numbers_as_well(tmp_path: Path) -> None:
    text = PING.format(number=0, address="10.0.0.1", received=1, loss=66)
    path = str(tool(tmp_path, f"print({text!r}); sys.exit(3)"))
    assert ascend_host.ping(path, 0, "10.0.0.1") == Ping("10.0.0.1", 3, 1, None)


# What files say. ------------------------------------------------------------------------------------------------


def test_driver_and_cann(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ascend_host.driver_version() is None
    assert ascend_host.toolkits({}) == []
    machine(tmp_path)
    assert ascend_host.driver_version() == "25.5.0"
    home = str(tmp_path / "ascend/cann")
    assert ascend_host.toolkits({}) == [Toolkit(home, "9.1.0", False)]
    assert ascend_host.toolkits({"ASCEND_HOME_PATH": home}) == [Toolkit(home, "9.1.0", True)]
    other = tmp_path / "mine"
    other.mkdir()
    assert ascend_host.toolkits({"ASCEND_HOME_PATH": str(other)}) == [
        Toolkit(str(other), None, True),
        Toolkit(home, "9.1.0", False),
    ]
    (other / "version.info").write_text("# of the tests\nVersion = '8.5.0'\n")
    assert ascend_host.toolkits({"ASCEND_HOME_PATH": str(other)})[0].version == "8.5.0"
    elsewhere = tmp_path / "opt"
    (elsewhere / "driver").mkdir(parents=True)
    (elsewhere / "driver/version.info").write_text("Version=24.1.0")
    (tmp_path / "etc/ascend_install.info").write_text(f"UserName=HwHiAiUser\nDriver_Install_Path_Param={elsewhere}\n")
    assert ascend_host.driver_version() == "24.1.0"


def test_npus_in_their_order(tmp_path: Path) -> None:
    machine(tmp_path, 11)
    (tmp_path / "dev/davinci1x").touch()
    npus, cards = ascend_host.npus()
    assert [one.number for one in npus] == list(range(11))
    assert npus[10] == Npu(10, str(tmp_path / "dev/davinci10"), None)
    assert cards == 0


def test_addresses_of_a_file(tmp_path: Path) -> None:
    assert ascend_host.configured_addresses([0]) == {}
    (tmp_path / "etc/hccn.conf").write_text(
        "address_0=10.20.0.10\nnetmask_0=255.255.255.0\naddress_1=10.20.0.11\naddress_9=10.20.0.19\naddress_2=\n"
    )
    assert ascend_host.configured_addresses([0, 1, 2]) == {0: "10.20.0.10", 1: "10.20.0.11"}


# The environment. -----------------------------------------------------------------------------------------------


def verdicts(transfer: float = 1.0, **values: str) -> dict[str, tuple[str, str]]:
    short = {f"HCCL_{name}": value for name, value in values.items()}
    return {one.name.removeprefix("HCCL_"): (one.verdict, one.judgement) for one in judged(short, transfer)}


def test_an_environment_that_says_nothing() -> None:
    said = verdicts()
    assert {name: verdict for name, (verdict, _) in said.items()} == {
        "RDMA_TC": "fine",
        "RDMA_SL": "fine",
        "RDMA_RETRY_CNT": "fine",
        "RDMA_TIMEOUT": "look",
        "INTRA_ROCE_ENABLE": "fine",
        "INTRA_PCIE_ENABLE": "fine",
    }
    assert "the default gives up after 34.4 s" in said["RDMA_TIMEOUT"][1]
    assert all(one.value is None and one.means for one in judged({"HCCL_RDMA_TC": "  "}, 1.0))


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("RDMA_TC", "0 132 252", "-4 3 256 0x84 132.0 ¹ 99999999999999999999 " + "9" * 5000),
        ("RDMA_SL", "0 4 7", "8 -1 four"),
        ("RDMA_RETRY_CNT", "1 7", "0 8"),
        ("RDMA_TIMEOUT", "15", "4 21 x"),
        ("INTRA_ROCE_ENABLE", "0", "2 true"),
        ("INTRA_PCIE_ENABLE", "0 1", "2 no"),
    ],
)
def test_bounds(name: str, good: str, bad: str) -> None:
    for value in good.split():
        assert verdicts(**{name: value})[name][0] == "fine", value
    for value in bad.split():
        verdict, said = verdicts(**{name: value})[name]
        assert verdict == "wrong", value
        assert "it must be a whole number from" in said


@pytest.mark.parametrize(
    ("transfer", "retries", "best", "seconds"),
    [(1.0, "7", 15, "1.07"), (1.0, "3", 16, "1.07"), (30.0, "7", 20, "34.4"), (0.1, "7", 12, "0.134")],
)
def test_the_formula(transfer: float, retries: str, best: int, seconds: str) -> None:
    verdict, said = verdicts(transfer, RDMA_TIMEOUT=str(best), RDMA_RETRY_CNT=retries)["RDMA_TIMEOUT"]
    assert verdict == "fine"
    assert f"ceil(log2({transfer:g} x 10^6 / ({retries} + 1) / 4.096)) = {best}: " in said
    assert said.endswith(f"gives up after {seconds} s")
    verdict, said = verdicts(transfer, RDMA_TIMEOUT=str(best - 1), RDMA_RETRY_CNT=retries)["RDMA_TIMEOUT"]
    assert verdict == "look"
    assert "before such a transfer times out" in said
    if best < 20:
        verdict, said = verdicts(transfer, RDMA_TIMEOUT=str(best + 1), RDMA_RETRY_CNT=retries)["RDMA_TIMEOUT"]
        assert verdict == "look"
        assert "still tries when such a transfer has timed out" in said


def test_the_formula_is_bounded() -> None:
    assert "= 35, bounded to 20:" in verdicts(1e6)["RDMA_TIMEOUT"][1]
    assert "bounded to 5:" in verdicts(1e-4)["RDMA_TIMEOUT"][1]


def test_roce_within_a_server() -> None:
    assert verdicts(INTRA_ROCE_ENABLE="1")["INTRA_ROCE_ENABLE"][0] == "look"
    assert verdicts(INTRA_ROCE_ENABLE="1", INTRA_PCIE_ENABLE="0")["INTRA_ROCE_ENABLE"] == (
        "fine",
        "RoCE within a server",
    )


# The command. ---------------------------------------------------------------------------------------------------


def test_a_machine_without_an_npu(capsys: pytest.CaptureFixture[str]) -> None:
    report = reported(capsys)
    assert report["status"] == "no NPU"
    assert list(found(report))[:3] == ["no NPU", "no CANN", "not usable"]
    assert report["npus"] == report["toolkits"] == []
    assert (report["driver"], report["cards"], report["usable"]) == (None, 0, False)
    text = told(capsys)
    assert "PROBLEM: no NPU: " in text
    assert text.endswith("HIXL cannot be used: no NPU. Host memory needs none of it: shm, tcp and verbs carry that.\n")


def test_a_child_says_the_same() -> None:
    """The command as users start it, on this very machine."""
    done = subprocess.run(
        [sys.executable, "-m", "aiodatadist", "doctor", "ascend"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""
    assert done.returncode == (0 if done.stdout.endswith("HIXL can be used.\n") else 1)


def test_a_card_without_its_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = Sysfs(tmp_path / "other")
    tree.pci("pci0000:80", "0000:80:01.0", "0000:81:00.0", kind="0x120000", vendor="0x19e5")
    monkeypatch.setattr(rdma_devices, "SYS", tree.sys)
    report = reported(capsys)
    assert report["status"] == "no driver"
    assert report["cards"] == 1


@pytest.fixture
def usable(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(doctor_ascend, "probed", lambda _: (True, "libcann_hixl.so"))


def test_a_machine_where_all_is_well(
    tmp_path: Path, usable: Callable[[], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine(tmp_path)
    tool(tmp_path, talking(), "ascend/driver/tools")
    monkeypatch.setenv("HCCL_RDMA_TIMEOUT", "15")
    usable()
    report = reported(capsys, 0)
    assert report["status"] == "ready"
    assert report["findings"] == []
    network = report["network"]
    assert network["tool"] == str(tmp_path / "ascend/driver/tools/hccn_tool")
    assert [(port["link"], port["address"], port["tls"], port["errors"]) for port in network["ports"]] == [
        ("UP", "10.20.0.10", False, []),
        ("UP", "10.20.0.11", False, []),
    ]
    assert [(ping["address"], ping["sent"], ping["received"]) for ping in network["pings"]] == [
        ("10.20.0.11", 3, 3),
        ("10.20.0.10", 3, 3),
    ]
    text = told(capsys, 0)
    for row in (
        "NPU driver              25.5.0",
        f"CANN                    9.1.0 in {tmp_path / 'ascend/cann'}",
        "NPU 1                   link UP, address 10.20.0.11, netmask 255.255.255.0, TLS off",
        "ping 10.20.0.10         3 of 3 packets came back",
        "HCCL_RDMA_TIMEOUT       15",
    ):
        assert f"\n  {row}\n" in text, text
    assert text.endswith("\nHIXL can be used.\n")


def test_what_is_not_well_with_the_network(
    tmp_path: Path, usable: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    machine(tmp_path)
    usable()
    report = reported(capsys, 0)
    assert "neither in PATH nor beside the driver" in found(report)["no hccn_tool"]
    (tmp_path / "etc/hccn.conf").write_text("address_0=10.20.0.10\n")
    assert "no hccn_tool" not in found(reported(capsys, 0))
    assert "hccn.conf               NPU 0: 10.20.0.10" in told(capsys, 0)
    tool(tmp_path, talking("number", 1).replace("UP", "DOWN"))
    report = reported(capsys)
    assert report["status"] == "tls"
    assert found(report)["tls"] == "it is on for NPUs [1] and off for the others"
    assert found(report)["ping"] == "10.20.0.10: 1 of 3 packets came back"
    assert "the port of NPU 1 is down" in found(report)["link down"]
    tool(tmp_path, talking("1"))
    assert "linking takes longer" in found(reported(capsys, 0))["tls"]


def test_one_npu_pings_nobody(tmp_path: Path, usable: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> None:
    machine(tmp_path, 1)
    tool(tmp_path, talking())
    usable()
    assert reported(capsys, 0)["network"]["pings"] == []


def test_a_wrong_variable_is_wrong_use(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HCCL_RDMA_TC", "131")
    report = reported(capsys, 2)
    assert found(report)["variable"] == "HCCL_RDMA_TC=131: it must be a whole number from 0 to 255 in steps of 4"
    monkeypatch.delenv("HCCL_RDMA_TC")
    monkeypatch.setenv("AIODATADIST_COPY_THREADS", "many")
    assert main(["doctor", "ascend"]) == 2
    assert "AIODATADIST_COPY_THREADS" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--transfer-timeout", "0"], ["--transfer-timeout", "inf"]])
def test_wrong_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "ascend", *arguments])
    assert ended.value.code == 2
    assert "usage: aiodatadist doctor ascend" in capsys.readouterr().err
