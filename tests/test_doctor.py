"""The doctor and the command line around it."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import aiodatadist
from aiodatadist import _core
from aiodatadist.commands import CommandError, doctor, doctor_ascend, machine, main
from aiodatadist.config import KNOWN_TRANSPORTS
from aiodatadist.errors import ArgumentError, ConfigError, TransportError

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("AIODATADIST_"):
            monkeypatch.delenv(name)
    # Other tests may have loaded a stand-in for HIXL into this process.
    monkeypatch.setattr(doctor_ascend, "probed", lambda _: (False, "there is no libcann_hixl.so"))


def reported(capsys: pytest.CaptureFixture[str], code: int = 0) -> dict[str, Any]:
    assert main(["doctor", "--json"]) == code
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def told(capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    assert main(["doctor"]) == code
    return capsys.readouterr().out


def test_k3_json_has_every_transport_with_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    report = reported(capsys)
    transports = {found["name"]: found for found in report["transports"]}
    assert set(transports) == set(KNOWN_TRANSPORTS)
    assert all(found["detail"] for found in transports.values())
    assert transports["tcp"]["usable"]
    assert "SimCluster" in transports["sim"]["detail"]
    assert not transports["sim"]["usable"]
    assert transports["hixl"]["detail"] == "there is no libcann_hixl.so"
    assert not transports["hixl"]["usable"]
    assert report["usable"]
    assert report["cpu"]["copy_kernel"] == _core.copy_kernel()
    assert report["versions"]["aiodatadist"] == aiodatadist.__version__
    assert {"python", "numpy", "torch", "uvloop"} <= set(report["versions"])
    assert report["cpu"]["count"] >= report["cpu"]["usable"] >= 1
    assert {"soft", "hard", "unit"} == set(report["limits"]["memlock"]) == set(report["limits"]["open_files"])
    assert report["system"]["IOV_MAX"] >= 1024
    assert [found["who"] for found in report["memory_access"]] == ["own process", "child", "by a child"]
    assert {path["peer"] for path in report["paths"]} == {"this host", "another host"}
    assert report["settings"]["fields"]["transports"] == ["shm", "tcp"]


def test_k3_text(capsys: pytest.CaptureFixture[str]) -> None:
    output = told(capsys)
    for name, usable, detail in _core.probe_transports():
        if name != "hixl":
            assert f"\n  {name:<20}{'usable' if usable else 'NOT usable'}: {detail}\n" in output
    assert "\n  hixl                NOT usable: there is no libcann_hixl.so\n" in output
    rows = ["memlock", "open files", "ptrace_scope", "copy kernel", "kernel", "CPUs", "GIL switch", "numpy", "pidfd"]
    rows += ["memfd, seals", "eventfd, epoll", "MADV_POPULATE", "process_vm own", "process_vm by child", "/dev/shm"]
    for row in [*rows, "hints", "cgroup", "pid namespace", "heartbeat_limit"]:
        assert f"\n  {row:<20}" in output, row
    for row in ("this host", "another host"):
        assert f"\n  {row}" in output


def test_nothing_usable_is_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(_core, "probe_transports", lambda: [("tcp", False, "socket: not permitted")])
    output = told(capsys, 1)
    assert "\n  tcp                 NOT usable: socket: not permitted\n" in output
    assert "No transport of the Config is usable here" in output
    assert "NO LINK" in output


# What cannot be read or tried is said, never raised. ----------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "scope", "said"),
    [
        ("0\n", 0, "any other of its user"),
        ("1\n", 1, "links do that"),
        ("9\n", 9, "unknown"),
        ("many\n", None, "cannot be understood"),
        (None, None, "not active"),
    ],
)
def test_yama(
    content: str | None,
    scope: int | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "sys/kernel/yama/ptrace_scope"
    if content is not None:
        file.parent.mkdir(parents=True)
        file.write_text(content)
    monkeypatch.setattr(machine, "PROC", tmp_path)
    assert machine.ptrace_scope()[0] == scope
    assert said in told(capsys)


def test_files_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Folders in the place of files: those cannot be read by root either."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    for name in ("sys/kernel/yama/ptrace_scope", "self/status", "cpuinfo", "sys/net/core/rmem_max"):
        (proc / name).mkdir(parents=True)
    (proc / "self/cgroup").write_text("0::/\n")
    (cgroups / "memory.max").mkdir(parents=True)
    (cgroups / "cgroup.controllers").write_text("")
    monkeypatch.setattr(machine, "PROC", proc)
    monkeypatch.setattr(machine, "CGROUPS", (cgroups,))
    output = told(capsys)
    for row in ("ptrace_scope", "rights", "cgroup", "net.core.rmem_max", "pid namespace"):
        (line,) = re.findall(rf"^  {row}  .*$", output, re.M)
        assert "cannot be read" in line, line
    (proc / "self/cgroup").unlink()
    (proc / "self/cgroup").mkdir()
    assert "self/cgroup cannot be read" in machine.container().cgroup


def test_limits_of_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The least of the own cgroup and of those above counts."""
    cgroups, own, mark = tmp_path / "cgroup", tmp_path / "cgroup/pod/box", tmp_path / ".dockerenv"
    own.mkdir(parents=True)
    (cgroups / "cgroup.controllers").write_text("memory pids cpu\n")
    (own / "memory.max").write_text("max\n")
    (own.parent / "memory.max").write_text("2147483648\n")
    (own / "pids.max").write_text("100\n")
    (own.parent / "pids.max").write_text("50\n")
    (own / "cpu.max").write_text("150000 100000\n")
    (own.parent / "cpu.max").write_text("max 100000\n")
    mark.write_text("")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("1:cpu:/elsewhere\n0::/pod/box\n")
    monkeypatch.setattr(machine, "PROC", tmp_path / "proc")
    monkeypatch.setattr(machine, "CGROUPS", (cgroups,))
    monkeypatch.setattr(machine, "MARKS", (mark,))
    found = machine.container()
    assert (found.memory_max, found.pids_max, found.cpu_max) == (2**31, 50, 1.5)
    assert str(mark) in found.hints
    output = told(capsys)
    for said in ("2,147,483,648 bytes", "50 threads", "1.5 CPUs", str(mark), "v2, /pod/box"):
        assert said in output
    (tmp_path / "proc/self/cgroup").write_text("1:cpu:/elsewhere\n")
    assert "no cgroup v2" in machine.container().cgroup


@pytest.mark.parametrize(
    ("call", "row"), [("memfd_create", "memfd, seals"), ("pidfd_open", "pidfd"), ("eventfd", "eventfd, epoll")]
)
def test_a_system_call_that_is_refused(
    call: str, row: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: object) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, call, refused)
    output = told(capsys)
    assert f"\n  {row:<20}does NOT work: Function not implemented: " in output
    if call == "pidfd_open":
        assert "not shm: pidfd: Function not implemented" in output


@pytest.mark.parametrize(
    ("whom", "scope", "path"),
    [("own", None, "tcp"), ("child", None, "tcp"), ("parent", None, "tcp"), ("parent", 1, "shm, process_vm")],
)
def test_process_vm_refused(
    whom: str, scope: int | None, path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = {"own": "own process", "child": "child", "parent": "by a child"}[whom]
    access = [
        machine.Access(who, *((errno.EPERM, "Operation not permitted") if who == refused else (None, "")))
        for who in ("own process", "child", "by a child")
    ]
    monkeypatch.setattr(machine, "memory_access", lambda: access)
    monkeypatch.setattr(machine, "ptrace_scope", lambda: (scope, ""))
    paths = {(found["peer"], found["memory"]): found for found in reported(capsys)["paths"]}
    assert paths["this host", "library"]["path"] == "shm, mapped"
    assert paths["this host", "ordinary"]["path"] == path
    if path == "tcp":
        assert "not permitted" in paths["this host", "ordinary"]["detail"]


@pytest.mark.parametrize("program", ["/nonexistent", "/bin/true"])
def test_no_child_to_try_with(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", program)
    own, *others = machine.memory_access()
    assert own.works
    assert [found.who for found in others] == ["child", "by a child"]
    assert all("not tried" in found.detail and found.error is None for found in others)


@pytest.mark.unprivileged
def test_a_process_that_others_may_not_look_into() -> None:
    """Really refused, by prctl(PR_SET_DUMPABLE, 0), which root may disregard."""
    code = (
        "import ctypes, sys; from aiodatadist.commands import main; "
        "assert ctypes.CDLL(None).prctl(4, 0, 0, 0, 0) == 0; sys.exit(main(['doctor', '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    access = {found["who"]: found for found in report["memory_access"]}
    assert not access["own process"]["detail"]
    assert access["by a child"]["error"] == errno.EPERM
    if report["ptrace_scope"] in (None, 0):
        paths = {(found["peer"], found["memory"]): found for found in report["paths"]}
        assert paths["this host", "ordinary"]["path"] == "tcp"
        assert "of a child on this process: Operation not permitted" in paths["this host", "ordinary"]["detail"]


# The Config. -------------------------------------------------------------------------------------------------


def test_variables_are_shown_with_what_they_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AIODATADIST_TRANSPORTS", "verbs,tcp")
    monkeypatch.setenv("AIODATADIST_COPY_THREADS", "5")
    monkeypatch.setenv("AIODATADIST_IO_THREADS", "")
    monkeypatch.setenv("AIODATADIST_CLUSTER_KEY", "a secret that is not to be shown")
    output = told(capsys)
    assert "\n  copy_threads        5 (from AIODATADIST_COPY_THREADS)\n" in output
    assert "\n  transports          verbs, tcp (from AIODATADIST_TRANSPORTS)\n" in output
    assert "transports names verbs, which is not usable" in output
    assert "AIODATADIST_IO_THREADS is empty" in output
    assert "AIODATADIST_CLUSTER_KEY is unknown" in output
    assert "secret" not in output
    report = reported(capsys)
    assert "secret" not in json.dumps(report)
    assert [path["path"] for path in report["paths"]] == ["tcp", "tcp"]
    assert "has no shm" in report["paths"][0]["detail"]


def test_a_config_without_a_usable_transport(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AIODATADIST_TRANSPORTS", "sim")
    report = reported(capsys, 1)
    assert not report["usable"]
    assert [path["path"] for path in report["paths"]] == [None, None]


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"AIODATADIST_COPY_THREADS": "many"}, ["AIODATADIST_COPY_THREADS='many'"]),
        ({"AIODATADIST_TRANSPORTS": "shm,smoke", "AIODATADIST_DRAIN_TIMEOUT": "-1"}, ["smoke", "drain_timeout"]),
        ({"AIODATADIST_NOTIFY_MAX_BYTES": "1MiB", "AIODATADIST_CONTROL_MAX_BYTES": "64KiB"}, ["does not fit"]),
    ],
)
def test_variables_that_cannot_be_used_are_wrong_usage(
    variables: dict[str, str], said: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    output = told(capsys, 2)
    assert all(word in output for word in said)
    assert output.count("\n  ERROR ") == len(said)
    assert len(reported(capsys, 2)["settings"]["errors"]) == len(said)
    with pytest.raises(ConfigError):
        aiodatadist.DataDist(1)


def test_optional_packages_are_not_imported() -> None:
    # What the required packages import by themselves, if it is there, is theirs.
    code = (
        "import sys, anyio, msgspec, numpy, structlog; theirs = set(sys.modules);"
        "from aiodatadist.commands import main; main(['doctor']); print(*sys.modules.keys() - theirs)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "aiodatadist.commands.doctor" in loaded
    assert not loaded & {"torch", "torch_npu", "uvloop", "rich"}


class TestMain:
    @pytest.mark.parametrize(
        ("error", "code"),
        [(TransportError("no\nway"), 1), (CommandError("no way"), 1), (ArgumentError("no way"), 2)],
    )
    def test_errors_are_one_line(
        self,
        error: Exception,
        code: int,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        def fail() -> None:
            raise error

        monkeypatch.setattr(doctor, "examine", fail)
        assert main(["doctor"]) == code
        assert capsys.readouterr().err == "aiodatadist doctor: error: no way\n"

    def test_interrupt(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        def interrupt() -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(doctor, "examine", interrupt)
        assert main(["doctor"]) == 130
        assert capsys.readouterr().err == "aiodatadist doctor: interrupted\n"

    @pytest.mark.parametrize("arguments", [[], ["cure"], ["doctor", "--yaml"]])
    def test_wrong_usage(self, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as why:
            main(arguments)
        assert why.value.code == 2
        assert "usage: aiodatadist" in capsys.readouterr().err

    def test_help_names_the_commands(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as why:
            main(["--help"])
        assert not why.value.code
        output = capsys.readouterr().out
        assert "demo" in output
        assert "doctor" in output

    def test_as_a_module(self) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "aiodatadist", "--version"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert done.stdout == f"aiodatadist {aiodatadist.__version__}\n"

    def test_reader_that_goes_away(self) -> None:
        reading, writing = os.pipe()
        os.close(reading)
        done = subprocess.run(
            [sys.executable, "-m", "aiodatadist", "doctor"],
            cwd=ROOT,
            stdout=writing,
            stderr=subprocess.PIPE,
            check=False,
        )
        os.close(writing)
        assert done.returncode == 1
        assert done.stderr == b""
