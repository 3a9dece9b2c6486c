"""``serve pd --check``, as a user runs it: it finds nothing in a cluster that is well, and says what is wrong else."""

from __future__ import annotations

import asyncio
import sys

import pytest

pytest.importorskip("aiohttp", reason="serving needs aiohttp")
pytest.importorskip("prometheus_client", reason="serving needs prometheus-client")
pytest.importorskip("threadpoolctl", reason="serving needs threadpoolctl")

from aiodatadist.commands.children import child_environment


async def check(*options: str) -> tuple[int | None, str, str]:
    command = [sys.executable, "-m", "aiodatadist", "serve", "pd", "--port", "0", "--check", *options]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=child_environment()
    )
    out, errors = await process.communicate()
    return process.returncode, out.decode(), errors.decode()


@pytest.mark.hang_limit(480)
async def test_a_cluster_is_checked_while_its_workers_die() -> None:
    code, out, errors = await check("--prefill", "2", "--decode", "2")
    assert code == 0, errors
    lines = [line.split(maxsplit=1) for line in out.splitlines()]
    rows = {line[0]: line[1] for line in lines[-7:]}
    assert list(rows) == ["identity", "reference", "controls", "decode", "prefill", "rest", "all"]
    assert "answers to 32 prompts" in rows["identity"]
    assert rows["controls"].endswith("flip, swap, layer, zero")
    assert " killed while it worked: " in rows["decode"]
    assert "served again after" in rows["prefill"]
    assert sum(line[-1] == "yes" for line in map(str.split, out.splitlines())) == 16


@pytest.mark.hang_limit(240)
async def test_damaged_kv_is_a_reason_to_fail() -> None:
    code, out, errors = await check("--damage", "flip")
    assert code == 1
    assert "kv_damaged" in errors.splitlines()[-1]
    assert "all is well" not in out
