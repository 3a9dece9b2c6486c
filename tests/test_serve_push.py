"""Push: the decode worker reserves, the prefill worker writes while it computes, with real processes."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("aiohttp", reason="serving needs aiohttp")


from aiodatadist.commands.serve_cluster import local_cluster

from .test_serve import all_idle, client, complete, gauges, same_as_mixed, wait_for

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
        count = await same_as_mixed(http, cluster, mixed.url)
        found = [await gauges(http, cluster.workers[f"decode-{number}"]) for number in (0, 1)]
        taken = [one.get('aiodatadist_phase_seconds_count{phase="handover"}', 0) for one in found]
        assert sum(taken) == count  # the other half was pulled: modes take turns
        writers = [await gauges(http, cluster.workers[f"prefill-{number}"]) for number in (0, 1)]
        pushed = 'aiodatadist_kv_transfer_seconds_count{mode="push"}'
        assert sum(one.get(pushed, 0) for one in writers) == count
        moved = [one.get('aiodatadist_kv_bytes_total{mode="push"}', 0) for one in writers]
        pulled = [one.get('aiodatadist_kv_bytes_total{mode="pull"}', 0) for one in found]
        assert min(moved) > 0  # of both, and to both
        assert min(pulled) > 0
        await all_idle(http, cluster)


@pytest.mark.hang_limit(240)
@pytest.mark.parametrize("victim", ["prefill-0"])
async def test_a_worker_that_dies_while_prompts_are_pushed_takes_no_block_along(victim: str) -> None:
    async with (
        client() as http,
        local_cluster({"prefill": 2, "decode": 2}, router_options=PUSH, worker_options=PUSH) as cluster,
    ):
        await wait_for(http, cluster, prefill=2, decode=2)
        case = {"temperature": 0, "ignore_eos": True, "max_tokens": 4}
        texts = [f"{number} " + "a" * 1500 for number in range(12)]
        asked = [asyncio.create_task(complete(http, cluster.url, False, prompt=text, **case)) for text in texts]
        while (await gauges(http, cluster.workers[victim]))["aiodatadist_free_blocks"] == 2048:
            await asyncio.sleep(0.002)
        cluster.workers[victim].kill()
        # Whoever was not answered yet goes to another pair; what had been answered by then is right.
        ends = await asyncio.gather(*asked, return_exceptions=True)
        answers = [end for end in ends if isinstance(end, dict)]
        assert len(answers) >= len(texts) // 2, ends
        role = victim.split("-")[0]
        await wait_for(http, cluster, **{"prefill": 2, "decode": 2} | {role: 1})
        del cluster.workers[victim]
        await all_idle(http, cluster)
        assert (await complete(http, cluster.url, False, prompt=texts[0], **case))["completion_tokens"] == 4
