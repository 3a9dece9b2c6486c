"""The files around the code keep their promises."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_readme_begins_with_the_two_commands() -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```$", (ROOT / "README.md").read_text(), re.S | re.M)
    assert len(blocks[0].splitlines()) == len(blocks[1].splitlines()) == 1
    assert blocks[0].startswith("pip install -e . && aiodatadist demo")
    assert blocks[1].startswith("pip install -e '.[test]' && pytest")


def test_changelog_knows_the_version_or_what_comes_next() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[0] in ("Unreleased", PROJECT["version"])


def test_k4_only_small_packages_are_required() -> None:
    names = {re.split(r"[<>=\[ ]", requirement)[0] for requirement in PROJECT["dependencies"]}
    assert names == {"numpy", "anyio", "structlog", "msgspec"}
    extras = {"torch", "npu", "uvloop", "serve", "demo", "bench", "test", "docs"}
    assert extras <= set(PROJECT["optional-dependencies"])
    assert not any(name.startswith("torch") for name in PROJECT["optional-dependencies"]["test"])


def test_the_engine_knows_no_python() -> None:
    sources = [*(ROOT / "aiodatadist/_native").rglob("*"), *(ROOT / "include").rglob("*.h")]
    assert sources
    assert not [path for path in sources if path.is_file() and "Python.h" in path.read_text()]


@pytest.mark.parametrize(
    "script",
    [".ci/run", ".ci/soak", ".ci/lib.sh", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/vm/*.sh"))],
)
def test_scripts_parse(script: str) -> None:
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)
    if script in (".ci/run", ".ci/soak", "tests/vm/run.sh"):
        assert (ROOT / script).stat().st_mode & 0o111


# Faults that users of other transfer libraries met, by the ids under which the project keeps them.
FAULTS = re.findall(
    r"\w+",
    """
    T1 T3 T4 T5 T7 T8 T10   L1 L2 L3 L4 L5 L7 L8   U1 U2 U4 U5 U6 U8   P2 P3 P5 P6 P7   S1 S2 S3   M1 M3 M4 M6
    D1 D2 D4 D5 D6   H1 H2 H4 H5   O2 O3   E1 E2 E3 E4 E6 E7 E8   V1 V2 V3 V4   K2 K3 K4 K5   X1 X2
    """,
)
NOT_YET = {
    "M4": "alignment and numbers of registrations are limits of hixl",
    "D4": "mapping tensor-parallel ranks comes with serving",
    "H1": "metadata in a store comes with serving",
    "V2": "spans come later",
}


def fault_tests() -> dict[str, list[str]]:
    """Return the names of the tests of each fault: ``test_t8_u1_...`` belongs to two."""
    found: dict[str, list[str]] = {}
    for path in (ROOT / "tests").glob("test_*.py"):
        for name in re.findall(r"def (test_\w+)\(", path.read_text()):
            ids = re.match(r"test_((?:[a-z]\d+_)*)", name)
            assert ids
            for fault in ids[1].upper().split("_")[:-1]:
                found.setdefault(fault, []).append(name)
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_that_others_met_has_its_test(fault: str) -> None:
    tests = fault_tests().get(fault)
    if fault in NOT_YET:
        assert not tests, f"{fault} has {tests}: take it from NOT_YET"
    else:
        assert tests, f"name a test test_{fault.lower()}_..."
