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


def test_only_small_packages_are_required() -> None:
    names = {re.split(r"[<>=\[ ]", requirement)[0] for requirement in PROJECT["dependencies"]}
    assert names == {"numpy", "anyio", "structlog", "msgspec"}
    extras = {"torch", "npu", "uvloop", "serve", "demo", "bench", "test", "docs"}
    assert extras <= set(PROJECT["optional-dependencies"])
    assert not any(name.startswith("torch") for name in PROJECT["optional-dependencies"]["test"])


def test_the_engine_knows_no_python() -> None:
    sources = [*(ROOT / "aiodatadist/_native").rglob("*"), *(ROOT / "include").rglob("*.h")]
    assert sources
    assert not [path for path in sources if path.is_file() and "Python.h" in path.read_text()]


@pytest.mark.parametrize("script", [".ci/run", ".ci/soak", ".ci/lib.sh"])
def test_scripts_parse(script: str) -> None:
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)
    if script != ".ci/lib.sh":
        assert (ROOT / script).stat().st_mode & 0o111
