"""Push: the decode worker reserves, the prefill worker writes while it computes, with real processes."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("aiohttp", reason="serving needs aiohttp")

from aiodatadist.commands.serve_cluster import local_cluster

from .test_serve import NEW_TOKENS, all_idle, client, complete, gauges, prompts, wait_for

PUSH = ("--mode", "push")


@pytest.mark.hang_limit(240)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_pushed_prompts_go_on_as_a_mixed_worker_does(transport: str) -> None:
    async with (
        client() as http,
        local_cluster(
            {"prefill": 2, "decode": 2},
            router_options=("--mode", "both"),
            worker_options=("--mode", "both", "--digests", "--transports", transport),
        ) as cluster,
    ):
        mixed = await cluster.start("mixed")
        await mixed.wait_ready()
        await wait_for(http, cluster, prefill=2, decode=2, mixed=0)
        cases = [
            {"prompt": prompt, "temperature": temperature, "seed": index, "ignore_eos": True}
            for index, prompt in enumerate(prompts())
            for temperature in (0, 0.8)
        ]
        expected = await asyncio.gather(*(complete(http, mixed.url, False, **case) for case in cases))
        assert all(len(answer["tokens"]) == NEW_TOKENS for answer in expected)
        for stream in (False, True):
            asked = (complete(http, cluster.url, stream, **case) for case in cases)
            assert await asyncio.gather(*asked) == expected
        found = [await gauges(http, cluster.workers[f"decode-{number}"]) for number in (0, 1)]
        taken = [one['aiodatadist_phase_seconds_count{phase="handover"}'] for one in found]
        assert sum(taken) == len(cases)  # the other half was pulled: modes take turns
        await all_idle(http, cluster)
