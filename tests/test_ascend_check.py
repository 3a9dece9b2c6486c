"""`doctor ascend --check`: its steps with host memory over tcp, where everything but HIXL is as on NPUs."""

from __future__ import annotations

import asyncio
import ctypes
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import aiodatadist as adt
from aiodatadist.commands import CommandError, ascend_check, ascend_memory, doctor_ascend, main
from aiodatadist.commands.ascend_check import Step

from .hixl_standin import Controls
from .waiting import PATIENCE

ROOT = Path(__file__).parent.parent


class HostMemory:
    """Host memory in the place of an NPU's."""

    placement = adt.Placement.HOST

    def __init__(self) -> None:
        self.taken: list[Any] = []

    def take(self, nbytes: int) -> int:
        self.taken.append(ctypes.create_string_buffer(nbytes))
        return ctypes.addressof(self.taken[-1])

    def write(self, address: int, content: bytes) -> None:
        ctypes.memmove(address, content, len(content))

    def read(self, address: int, nbytes: int) -> bytes:
        return ctypes.string_at(address, nbytes)


class Wrong(HostMemory):
    """Memory of which one byte is not what was written."""

    def read(self, address: int, nbytes: int) -> bytes:
        content = bytearray(super().read(address, nbytes))
        content[100] ^= 1
        return bytes(content)


async def run(npu: HostMemory, about: dict[str, Any] | None = None, said: str | None = None) -> list[Step]:
    """Run a check of two sides in this loop."""
    config = adt.Config(transports=("tcp",))
    at: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(
        ascend_check.serve(config, "127.0.0.1:0", HostMemory(), HostMemory(), about or {}, at.set_result)
    )
    told: list[Step] = []
    pinged: list[Sequence[str]] = []

    async def ping(addresses: Sequence[str]) -> str | None:
        pinged.append(addresses)
        return said

    done = await ascend_check.check(config, await at, npu, HostMemory(), ping, told.append)
    await serving
    assert told == done
    assert pinged == [list((about or {}).get("addresses", []))]
    return done


async def test_all_steps() -> None:
    steps = await run(HostMemory(), {"addresses": ["10.0.0.1"], "driver": "25.5"}, "3 of 3 packets came back")
    assert [(step.name, step.outcome) for step in steps if step.outcome != "ok"] == []
    said = {step.name: step.detail for step in steps}
    assert json.loads(said["the other side"])["driver"] == "25.5"
    assert said["hccn_tool ping"] == "3 of 3 packets came back"
    assert said["link"] == "tcp"
    assert said["pull, NPU to NPU"] == "22 blocks of 4 tensors are right"
    assert said["layer by layer"] == "2 layers are right"
    assert "GB/s" in said["speed"]
    assert all(step.seconds >= 0 for step in steps)


async def test_a_wrong_byte_is_found() -> None:
    steps = {step.name: step for step in await run(Wrong())}
    assert steps["hccn_tool ping"].outcome == "skipped"
    for name in ("pull, NPU to NPU", "pull, host to NPU", "register late", "unlink and link again"):
        assert (steps[name].outcome, steps[name].detail) == (
            "FAILED",
            "the bytes that arrived are not those that were sent",
        )
    assert steps["cancel"].outcome == "FAILED"
    # What the other side looks at is right.
    assert steps["push, NPU to NPU"].outcome == steps["pull, NPU to host"].outcome == "ok"


async def test_nobody_serves() -> None:
    told: list[Step] = []

    async def ping(_: Sequence[str]) -> str | None:
        raise AssertionError

    config = adt.Config(transports=("tcp",))
    await ascend_check.check(config, "127.0.0.1:1", HostMemory(), HostMemory(), ping, told.append)
    assert [step.outcome for step in told[:3]] == ["ok", "FAILED", "skipped"]
    assert "LinkError" in told[1].detail or "refused" in told[1].detail
    assert {step.detail for step in told[2:]} == {"link has failed"}


def test_without_hixl_there_is_no_check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor_ascend, "probed", lambda _: (False, "there is no libcann_hixl.so"))
    for option in ("--check", "--serve"):
        assert main(["doctor", "ascend", option, "127.0.0.1:0"]) == 1
        assert "error: HIXL cannot be used: there is no libcann_hixl.so" in capsys.readouterr().err


def test_both_sides_at_once_are_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--check", "a:1", "--serve", "a:1"], ["--device", "-1"]):
        with pytest.raises(SystemExit) as ended:
            main(["doctor", "ascend", *arguments])
        assert ended.value.code == 2
    assert "doctor ascend" in capsys.readouterr().err


def test_the_command_checks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor_ascend, "probed", lambda _: (True, "as on NPUs"))
    monkeypatch.setattr(doctor_ascend, "memories", lambda _: (HostMemory(), HostMemory()))
    assert main(["doctor", "ascend", "--check", "127.0.0.1:1"]) == 1
    text = capsys.readouterr().out
    assert "register here           ok: " in text
    assert text.endswith("FAILED: link. Please report what this printed.\n")
    assert main(["doctor", "ascend", "--check", "127.0.0.1:1", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert [step["outcome"] for step in report["steps"]][:3] == ["ok", "FAILED", "skipped"]
    assert report["transport"] == "as on NPUs"


def test_acl_that_is_not_there(tmp_path: Any) -> None:
    other = tmp_path / "libcann_hixl.so"
    (tmp_path / "libascendcl.so").write_bytes(b"no library")
    with pytest.raises(CommandError, match="cannot be opened"):
        ascend_memory.NpuMemory(str(other), 0)


@pytest.mark.hixl
@pytest.mark.usefixtures("hixl")
def test_two_processes_as_on_npus() -> None:
    """The commands as people with two NPUs start them, over a stand-in for HIXL and ACL."""
    command = [sys.executable, "-m", "aiodatadist", "doctor", "ascend", "--json"]
    serving = subprocess.Popen(
        [*command, "--serve", "127.0.0.1:0"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert serving.stderr is not None
        address = re.match("serving at (.*);", serving.stderr.readline())
        assert address
        checking = subprocess.run(
            [*command, "--check", address[1], "--device", "1"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert checking.returncode == 0, checking.stdout + checking.stderr
        assert serving.wait(PATIENCE) == 0
    finally:
        serving.kill()
        served, _ = serving.communicate()
    steps = {step["name"]: step for step in json.loads(checking.stdout)["steps"]}
    assert {name for name, step in steps.items() if step["outcome"] != "ok"} == {"hccn_tool ping"}
    assert "device: hixl" in steps["link"]["detail"]
    assert json.loads(steps["the other side"]["detail"])["NPU"] == 0
    assert json.loads(served)["usable"]


@pytest.mark.hixl
def test_memory_by_acl(hixl: Controls) -> None:
    """Over the stand-in for ACL, whose device memory the processor cannot touch."""
    content = bytes(range(256)) * 32
    for kind in (ascend_memory.NpuMemory, ascend_memory.PinnedMemory):
        memory = kind(None, 1)
        first, second = memory.take(len(content)), memory.take(len(content))
        memory.write(first, content)
        memory.write(second, content[::-1])
        assert memory.read(first, len(content)) == content
        assert memory.read(second + 8, 16) == content[::-1][8:24]
    with pytest.raises(CommandError, match="aclrtSetDevice failed with ACL status"):
        ascend_memory.NpuMemory(None, 99)
