"""What docs/serving.md says works as it says it, with the tiny model and with a real one; its files are whole."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="serving needs aiohttp")
pytest.importorskip("prometheus_client", reason="serving needs prometheus-client")

from prometheus_client.parser import text_string_to_metric_families

import aiodatadist as adt
from aiodatadist.commands import make_parser
from aiodatadist.commands.children import child_environment
from aiodatadist.commands.serve_cluster import local_cluster
from aiodatadist.serve.errors import CODES

from .test_docs import Block, blocks_of, check_output
from .test_serve import client, complete, wait_for

ROOT = Path(__file__).parent.parent
DOCUMENT = "docs/serving.md"
TEXT = (ROOT / DOCUMENT).read_text()
BLOCKS = blocks_of(DOCUMENT, TEXT)
FILES = ROOT / "examples/serving"
URL, MODEL = "http://127.0.0.1:8000", "smollm2"


def commands(name: str) -> list[str]:
    """Return the commands of the document's shell blocks that begin with a word."""
    lines = [line for block in BLOCKS if block.language == "sh" for line in block.text.replace("\\\n", "").splitlines()]
    return [line for line in lines if line.startswith(f"{name} ")]


@contextlib.asynccontextmanager
async def served(model: str) -> AsyncIterator[str]:
    """Run the command of the quick start, at another port; yields the router's URL."""
    (command,) = (each for each in commands("aiodatadist") if each.endswith(f"serve pd --model {MODEL}"))
    words = shlex.split(command.replace(MODEL, model))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *words, "--port", "0", stdout=asyncio.subprocess.PIPE, env=child_environment()
    )
    assert process.stdout is not None
    try:
        lines = [(await process.stdout.readline()).decode() for _ in range(4)]
        assert lines[3].startswith("curl -N http"), lines
        yield lines[0].split()[1]
        process.terminate()
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await process.stdout.read()


async def run(*words: str) -> str:
    env = child_environment()
    process = await asyncio.create_subprocess_exec(
        *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=env
    )
    out, errors = await process.communicate()
    assert process.returncode == 0, (words, out, errors)
    return out.decode()


MODELS = ["small", pytest.param(MODEL, marks=pytest.mark.smollm2)]


@pytest.mark.hang_limit(420)
@pytest.mark.parametrize("model", MODELS)
async def test_the_quick_start_works(model: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl on PATH")
    (python,) = (block for block in BLOCKS if block.language == "python")
    async with served(model) as url:

        def here(text: str) -> str:
            assert URL in text
            return text.replace(URL, url).replace(MODEL, model)

        models, chat, stream = [
            await run(*shlex.split(here(command)), "--silent", "--fail-with-body") for command in commands("curl")
        ]
        assert [each["id"] for each in json.loads(models)["data"]] == [model]
        answer = json.loads(chat)
        assert answer["usage"]["completion_tokens"] > 0
        pieces = stream.strip().split("\n\n")
        assert pieces[-1] == "data: [DONE]"
        assert json.loads(pieces[0].removeprefix("data: "))["object"] == "text_completion"
        said = answer["choices"][0]["message"]["content"]
        if model == MODEL:
            check_output(python, said)
        try:
            import openai  # noqa: F401
        except ImportError:
            return  # where it is required, tests/test_serve_openai.py says so
        check_output(
            Block(DOCUMENT, python.line, "python", "", "", said), await run(sys.executable, "-c", here(python.text))
        )


# The reference part. ----------------------------------------------------------------------------------------


def said_by(*words: str) -> str:
    parser = make_parser()
    for action in parser._subparsers._group_actions:  # type: ignore[union-attr]
        parser = action.choices[words[0]]  # type: ignore[index]
    if len(words) > 1:
        (action,) = (each for each in parser._actions if each.dest == "what")
        parser = action.choices[words[1]]  # type: ignore[index]
    return parser.format_help()


def test_flags_that_are_named_exist() -> None:
    known = "".join(said_by("serve", role) for role in ("pd", "router", "worker")) + said_by("bench")
    flags, there = (set(re.findall(r"(?<!-)--[a-z][a-z-]*[a-z]", text)) for text in (TEXT, known))
    # FastDeploy's, of which the document says that it is not needed.
    assert flags - there == {"--splitwise"}
    fastdeploy = re.findall(r"^\| (`--[^|]*) \|", TEXT, re.M)
    assert len(fastdeploy) >= 8


def test_codes_that_are_named_exist_and_each_is_named() -> None:
    table = TEXT.split("## When something fails")[1].split("\n## ")[0]
    named = {word for word in re.findall(r"`([a-z_]+)`", TEXT) if word in CODES}
    assert set(re.findall(r"\d{3} `([a-z_]+)`", table)) <= set(CODES)
    inner = {
        # Of the cluster's own business, or explained where keys are.
        "invalid_api_key", "forbidden", "not_found", "duplicate_request", "registration_refused", "layout_mismatch",
        "kv_damaged", "internal_error",
    }  # fmt: skip
    assert set(CODES) - named <= inner


@pytest.mark.hang_limit(240)
async def test_metrics_that_are_named_are_there_and_the_others_are_named() -> None:
    async with client() as http, local_cluster({"prefill": 1, "decode": 1}) as cluster:
        await wait_for(http, cluster, prefill=1, decode=1)
        assert (await complete(http, cluster.url, True, prompt="Once"))["tokens"]
        there: set[str] = set()
        for process in cluster.processes:
            async with http.get(f"{process.url}/metrics") as reply:
                for family in text_string_to_metric_families(await reply.text()):
                    there.add(family.name + "_total" * (family.type == "counter"))
    named = set(re.findall(r"`(aiodatadist_[a-z_0-9]+|process_cpu_seconds_total)`", TEXT))
    assert there - named == set()
    # Counters without a sample so far, of a retry say, have no name on the page either.
    assert named - there <= {"aiodatadist_router_retries_total"}


# Files. -----------------------------------------------------------------------------------------------------


def commands_of_files() -> list[tuple[str, list[str]]]:
    found = []
    for path in sorted(FILES.glob("*.service")):
        text = path.read_text().replace("\\\n", "")
        (line,) = re.findall(r"^ExecStart=\S*/aiodatadist (.*)$", text, re.M)
        roles = ("prefill", "decode", "mixed") if "%i" in line else ("",)
        found += [(path.name, shlex.split(line.replace("%i", role))) for role in roles]
    for line in re.findall(r"^ +command: (.*)$", (FILES / "compose.yaml").read_text(), re.M):
        found.append(("compose.yaml", shlex.split(line)))
    return found


def test_the_commands_of_units_and_containers_are_understood() -> None:
    found = commands_of_files()
    assert len(found) == 1 + 3 + 5
    for _name, words in found:
        asked = make_parser().parse_args(words)
        assert asked.cluster_key_file is not None
        assert getattr(asked, "router", [URL])
    variables = set(re.findall(r"\$\{(\w+)\}", " ".join(" ".join(words) for _, words in found)))
    assert variables == set(re.findall(r"^(\w+)=", (FILES / "cluster.env").read_text(), re.M))
    for file in ("Dockerfile", "compose.yaml", "cluster.env", "aiodatadist-router.service"):
        assert f"`{file}`" in TEXT


def test_systemd_takes_the_units(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze on PATH")
    units = []
    for path in FILES.glob("*.service"):
        name = path.name.replace("@.", "@prefill.")
        # A program that is there, in place of the one that is to be installed.
        (tmp_path / name).write_text(path.read_text().replace("/opt/aiodatadist/bin/aiodatadist", sys.executable))
        units.append(str(tmp_path / name))
    done = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, timeout=100)
    assert "aiodatadist" not in done.stderr, done.stderr
    assert done.returncode == 0, done.stderr


def test_a_scheduler_of_ones_own() -> None:
    env: dict[str, Any] = {**os.environ, "PYTHONPATH": str(Path(adt.__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, FILES / "own_scheduler.py"], capture_output=True, text=True, timeout=100, env=env
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^(\w+ \d): '", done.stdout, re.M)[2:4] == ["interactive 0", "interactive 1"]
    assert "refused: context_length_exceeded" in done.stdout
