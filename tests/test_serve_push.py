"""Prompts that are handed over by both modes, with real processes: what is written is what one process writes."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="serving needs aiohttp")
pytest.importorskip("prometheus_client", reason="serving needs prometheus-client")
pytest.importorskip("threadpoolctl", reason="serving needs threadpoolctl")

from aiohttp import ClientSession

from aiodatadist.commands.serve_cluster import Cluster, local_cluster
from aiodatadist.model import draw_prompt
from aiodatadist.serve.errors import CODES

from .conftest import Scale
from .test_serve import all_idle, client, complete, gauges, get, post, wait_for

BOTH = ("--mode", "both")
PUSH = ("--mode", "push")
TOPOLOGIES = ((2, 2), (1, 1), (2, 1), (1, 2))


def prompts(new_tokens: int) -> list[list[int]]:
    """Return prompts of every length that could matter: of one token, around a block, of many blocks, the longest."""
    rng = random.Random(5)
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 100, 255, 256, 500, 2048 - new_tokens]
    return [[256, *draw_prompt(rng.getrandbits(30), 2048).text.encode()][:length] for length in lengths]


async def leave(http: ClientSession, url: str, **numbers: int) -> None:
    """Have a router use so many workers of each role, and drain the others."""
    for role, workers in (await get(http, f"{url}/registered")).items():
        for number, each in enumerate(sorted(workers, key=lambda worker: worker["worker_id"])):
            await post(http, f"{url}/drain", worker_id=each["worker_id"], drain=number >= numbers.get(role, 0))


@pytest.mark.hang_limit(240)
@pytest.mark.seeds(1)
async def test_any_number_of_pairs_writes_what_a_mixed_worker_writes_by_both_modes(seed: int, scale: Scale) -> None:
    transport = ("tcp", "shm")[seed % 2]  # the other one is that of test_serve_check
    async with (
        client() as http,
        local_cluster(
            {"prefill": 2, "decode": 2},
            router_options=BOTH,
            worker_options=(*BOTH, "--digests", "--transports", transport),
        ) as cluster,
    ):
        mixed = await cluster.start("mixed")  # knows no router: the reference cannot get the router's requests
        await mixed.wait_ready()
        await wait_for(http, cluster, prefill=2, decode=2, mixed=0)
        new_tokens = scale(16, least=8)
        cases: list[dict[str, Any]] = [
            {"prompt": prompt, "temperature": 0.8 * (index % 2), "seed": index, "max_tokens": new_tokens}
            for index, prompt in enumerate(prompts(new_tokens))
        ]
        expected = await asyncio.gather(*(complete(http, mixed.url, False, **case, ignore_eos=True) for case in cases))
        assert all(len(answer["tokens"]) == new_tokens for answer in expected)
        assert len({tuple(answer["tokens"]) for answer in expected}) > len(cases) // 2
        # The reference agrees with itself, streamed.
        assert await complete(http, mixed.url, True, **cases[-1], ignore_eos=True) == expected[-1]
        asked = 0
        for prefills, decodes in TOPOLOGIES:
            await leave(http, cluster.url, prefill=prefills, decode=decodes)
            for stream in (False, True):
                # The long ones once: the others say what there is to say.
                some = list(zip(cases, expected, strict=True))[: None if (prefills, decodes) == TOPOLOGIES[0] else 9]
                jobs = (complete(http, cluster.url, stream, **case, ignore_eos=True) for case, _ in some)
                assert await asyncio.gather(*jobs) == [answer for _, answer in some]
                asked += len(some)
        found = [await gauges(http, cluster.workers[f"decode-{number}"]) for number in (0, 1)]
        handovers, transfers = (
            [one.get(f'aiodatadist_phase_seconds_count{{phase="{phase}"}}', 0) for one in found]
            for phase in ("handover", "transfer")
        )
        assert sum(transfers) == asked
        assert sum(handovers) == asked / 2  # the other half was pulled: modes take turns
        assert all(transfers)
        await leave(http, cluster.url, prefill=2, decode=2)
        await all_idle(http, cluster)


async def ask(http: ClientSession, cluster: Cluster, text: str) -> tuple[str, list[int]]:
    """Return the code of an answer, empty if it is well, and its tokens."""
    body = {"model": "small", "prompt": text, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    status, said = await post(http, f"{cluster.url}/v1/completions", **body, return_token_ids=True)
    return (said["error"]["code"], []) if status != 200 else ("", said["choices"][0]["token_ids"])


@pytest.mark.hang_limit(240)
@pytest.mark.seeds(1)
async def test_who_dies_while_prompts_are_pushed_takes_no_block_along_and_spoils_no_answer(seed: int) -> None:
    role = ("prefill", "decode")[seed % 2]
    async with (
        client() as http,
        local_cluster({"prefill": 2, "decode": 2}, router_options=PUSH, worker_options=PUSH) as cluster,
    ):
        await wait_for(http, cluster, prefill=2, decode=2)
        texts = [f"{number} " + "a" * 900 for number in range(8)]
        expected = [await ask(http, cluster, text) for text in texts[:2]]
        assert all(not code and len(tokens) == 4 for code, tokens in expected)
        # Others first, so that nothing of what is to be compared is in a cache of the one that dies.
        asked = [asyncio.create_task(ask(http, cluster, text)) for text in (*texts[2:], *texts[:2])]
        victim = cluster.workers.pop(f"{role}-0")
        states = ("pushes",) if role == "prefill" else ("reservations_reserved", "reservations_receiving")
        busy = False
        while not busy:
            numbers = await gauges(http, victim)
            busy = any(numbers[f"aiodatadist_{state}"] for state in states)
            assert not all(task.done() for task in asked)
        victim.kill()
        await victim.stop()
        # Whoever was not answered yet goes to another pair; what is answered is right.
        ends = await asyncio.gather(*asked)
        assert {code for code, _ in ends} <= {"", *CODES}, ends
        assert sum(not code for code, _ in ends) >= len(texts) // 2, ends
        assert all(code or end == right for (code, end), (_, right) in zip(ends[-2:], expected, strict=True))
        retries = await gauges(http, cluster.router)
        assert any(name.startswith("aiodatadist_router_retries_total") for name in retries), "nobody met the death"
        await wait_for(http, cluster, **{"prefill": 2, "decode": 2, role: 1})
        await all_idle(http, cluster)
        # With all of its blocks, each of those that are left serves on.
        for child in cluster.workers.values():
            assert (await gauges(http, child))["aiodatadist_used_blocks"] == 0
        assert [await ask(http, cluster, text) for text in texts[:2]] == expected
