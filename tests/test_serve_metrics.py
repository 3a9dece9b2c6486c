"""What Prometheus reads, and what `bench serve` makes of it."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest

pytest.importorskip("aiohttp", reason="serving needs aiohttp")
pytest.importorskip("prometheus_client", reason="serving needs prometheus-client")
pytest.importorskip("threadpoolctl", reason="serving needs threadpoolctl")

from prometheus_client.parser import text_string_to_metric_families

from aiodatadist.commands.children import child_environment
from aiodatadist.serve.metrics import Histogram, WorkerMetrics

from .serve_local import inner_cluster
from .test_serve import all_idle, busy_gauges, client, complete, gauges, wait_for


def test_a_histogram_counts_up_to_each_bound() -> None:
    histogram = Histogram()
    for seconds in (0.001, 0.002, 4.0, 1000.0):
        histogram.observe(seconds)
    buckets = dict(histogram.buckets())
    assert (buckets["0.001"], buckets["0.0025"], buckets["2.5"], buckets["5.0"], buckets["+Inf"]) == (1, 2, 2, 3, 4)
    assert histogram.sum == pytest.approx(1004.003)


def test_a_phase_that_fails_is_counted_and_over() -> None:
    metrics = WorkerMetrics()
    with pytest.raises(ValueError), metrics.phase("prefill"):
        raise ValueError
    metrics.moved("pull", 4096, 0.5)
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(metrics.page().decode())
        for sample in family.samples
    }
    assert samples["aiodatadist_phase_running", "prefill"] == 0
    assert samples["aiodatadist_phase_seconds_count", "prefill"] == 1
    assert samples["aiodatadist_kv_bytes_total", "pull"] == 4096


@pytest.mark.hang_limit(240)
async def test_counters_rise_with_requests_and_the_bench_reads_them() -> None:
    counts = {"prefill": 1, "decode": 1}
    async with client() as http, inner_cluster(counts) as cluster:
        await wait_for(http, cluster, **counts)
        prompt = "a" * 100
        for _ in range(2):
            await complete(http, cluster.url, True, prompt=prompt, ignore_eos=True)
        router, prefill, decode = [await gauges(http, process) for process in cluster.processes]
        for name in ("queue", "ttft", "tpot", "e2e"):
            assert router[f"aiodatadist_router_{name}_seconds_count"] == 2
        assert router["aiodatadist_router_ttft_seconds_sum"] < router["aiodatadist_router_e2e_seconds_sum"]
        # 100 tokens and one before them; the second time six blocks of 16 are there.
        assert prefill["aiodatadist_prompt_tokens_total"] == 202
        assert prefill["aiodatadist_prefix_hit_tokens_total"] == 96
        assert decode['aiodatadist_kv_transfer_seconds_count{mode="pull"}'] == 2
        # Seven blocks of 16 tokens, each time: 4 layers, keys and values, 2 heads of 32 numbers of 4 bytes.
        assert decode['aiodatadist_kv_bytes_total{mode="pull"}'] == 2 * 7 * 16 * 4 * 2 * 2 * 32 * 4

        body = {"model": "small", "prompt": prompt, "max_tokens": 1500, "ignore_eos": True, "stream": True}
        reply = await http.post(f"{cluster.url}/v1/completions", json=body)
        busy = await busy_gauges(http, cluster.router)
        assert {"aiodatadist_router_in_flight", "aiodatadist_router_load_leases"} <= set(busy)
        busy = await busy_gauges(http, cluster.workers["decode-0"])
        assert {"aiodatadist_used_blocks", "aiodatadist_running"} <= set(busy)
        reply.close()
        await all_idle(http, cluster)

        command = [sys.executable, "-m", "aiodatadist", "bench", "serve", "--url", cluster.url, "--json", "-"]
        process = await asyncio.create_subprocess_exec(
            *command, "--requests", "8", "--clients", "4", stdout=asyncio.subprocess.PIPE, env=child_environment()
        )
        out, _ = await process.communicate()
        assert process.returncode == 0
        result = json.loads(out)
        assert result["ends"] == {"ok": 8}
        assert [row["what"] for row in result["rows"]] == ["ttft", "tpot", "e2e"]
        assert all(0 < row["percentiles"][0] <= row["percentiles"][2] for row in result["rows"])
        assert set(result["phases"]) == {"queue", "prefill", "transfer", "decode"}
        assert result["router_share"] > 0
