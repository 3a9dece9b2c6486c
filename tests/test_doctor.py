"""The doctor and the command line around it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import aiodatadist
from aiodatadist import _core
from aiodatadist.commands import CommandError, doctor, main
from aiodatadist.config import KNOWN_TRANSPORTS
from aiodatadist.errors import ArgumentError, TransportError

ROOT = Path(__file__).parent.parent


def test_json_has_every_transport_with_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    transports = {found["name"]: found for found in report["transports"]}
    assert set(transports) == set(KNOWN_TRANSPORTS) - {"sim"}
    assert all(found["detail"] for found in transports.values())
    assert transports["tcp"]["usable"]
    assert report["usable"]
    assert report["copy_kernel"] == _core.copy_kernel()
    assert report["versions"]["aiodatadist"] == aiodatadist.__version__
    assert {"python", "numpy", "torch", "uvloop"} <= set(report["versions"])
    assert report["cpus"] >= report["cpus_usable"] >= 1
    assert {"soft", "hard", "unit"} == set(report["memlock"]) == set(report["open_files"])


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    output = capsys.readouterr().out
    for name, usable, detail in _core.probe_transports():
        assert f"  {name:<14}{'usable' if usable else 'NOT usable'}: {detail}" in output
    for word in ("memlock", "open files", "ptrace_scope", "copy kernel", "kernel", "CPUs", "GIL switch", "numpy"):
        assert f"\n  {word:<14}" in output


def test_nothing_usable_is_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(_core, "probe_transports", lambda: [("tcp", False, "socket: not permitted")])
    assert main(["doctor"]) == 1
    output = capsys.readouterr().out
    assert "  tcp           NOT usable: socket: not permitted\n" in output
    assert "No transport is usable here" in output


@pytest.mark.parametrize(
    ("content", "scope", "said"),
    [
        ("0\n", 0, "any other of its user"),
        ("1\n", 1, "links do that"),
        ("9\n", 9, "unknown"),
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
    file = tmp_path / "ptrace_scope"
    if content is not None:
        file.write_text(content)
    monkeypatch.setattr(doctor, "_YAMA", file)
    assert doctor.examine().ptrace_scope == scope
    main(["doctor"])
    assert said in capsys.readouterr().out


def test_optional_packages_are_not_imported() -> None:
    code = "import sys; from aiodatadist.commands import main; main(['doctor']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "numpy" in loaded
    assert not loaded & {"torch", "uvloop", "rich"}


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
