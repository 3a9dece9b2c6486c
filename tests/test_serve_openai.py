"""The official ``openai`` client against the router: what its users do, works."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="serving needs aiohttp")
pytest.importorskip("prometheus_client", reason="serving needs prometheus-client")
pytest.importorskip("threadpoolctl", reason="serving needs threadpoolctl")
pytest.importorskip("openai", reason="needs the openai client")

from openai import APIError, APIStatusError, AsyncOpenAI, AuthenticationError, BadRequestError, NotFoundError

from .serve_local import InnerCluster, inner_cluster
from .test_serve import all_idle, busy_gauges, client, gauges, post, wait_for
from .waiting import PATIENCE

COUNTS = [{"prefill": 1, "decode": 1}, {"mixed": 1}]
LONG = {"ignore_eos": True}


def openai_client(cluster: InnerCluster, key: str = "any") -> Any:  # its overloads do not take a dict
    return AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE)


@pytest.mark.hang_limit(240)
@pytest.mark.parametrize("counts", COUNTS, ids=["pair", "mixed"])
async def test_chats_completions_and_models_with_several_engines_behind_each_worker(counts: dict[str, int]) -> None:
    async with (
        client() as http,
        inner_cluster(counts, worker_options=("--dp", "2", "--num-blocks", "64")) as cluster,
        openai_client(cluster) as ai,
    ):
        await wait_for(http, cluster, **counts)
        assert [model.id async for model in ai.models.list()] == ["small"]

        async def chat(seed: int) -> tuple[str, str]:
            asked = {
                "model": "small",
                "messages": [{"role": "user", "content": f"Tell me story {seed}"}],
                "max_tokens": 24,
                "seed": seed,
            }
            whole = await ai.chat.completions.create(**asked)
            assert whole.usage.completion_tokens > 0
            stream = await ai.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
            text, usage = "", None
            async for chunk in stream:
                usage = chunk.usage or usage
                text += "".join(choice.delta.content or "" for choice in chunk.choices)
            assert usage is not None
            assert usage.completion_tokens == whole.usage.completion_tokens
            return whole.choices[0].message.content, text

        # More than one engine of 64 blocks takes at once.
        found = await asyncio.gather(*map(chat, range(16)))
        assert all(whole == text for whole, text in found)
        assert len(set(found)) > 8
        done = await ai.completions.create(model="small", prompt="Once", max_tokens=8, temperature=0)
        assert done.choices[0].finish_reason in ("stop", "length")
        await all_idle(http, cluster)


@pytest.mark.hang_limit(240)
async def test_keys_are_asked_for_and_faults_have_their_types(tmp_path: Path) -> None:
    (tmp_path / "api").write_text("sesame\n")
    (tmp_path / "cluster").write_text("open-sesame-of-the-cluster\n")
    keys = ("--api-key-file", str(tmp_path / "api"), "--cluster-key-file", str(tmp_path / "cluster"))
    counts = {"prefill": 1, "decode": 1}
    async with (
        client() as http,
        inner_cluster(counts, router_options=keys, worker_options=keys) as cluster,
        openai_client(cluster, "sesame") as ai,
        openai_client(cluster, "simsim") as stranger,
    ):
        limit = 0
        while True:  # the registry is the cluster's own business: the key of clients does not open it
            assert (await post(http, f"{cluster.url}/register"))[0] == 403
            if (await http.get(f"{cluster.url}/ready")).status == 200:
                break
            limit += 1
            assert limit < 1000
            await asyncio.sleep(0.02)
        done = await ai.completions.create(model="small", prompt="Once", max_tokens=4)
        assert done.choices[0].text
        with pytest.raises(AuthenticationError) as refused:
            await stranger.completions.create(model="small", prompt="Once")
        assert refused.value.code == "invalid_api_key"
        with pytest.raises(NotFoundError) as unknown:
            await ai.completions.create(model="large", prompt="Once")
        assert unknown.value.code == "model_not_found"
        with pytest.raises(BadRequestError) as bad:
            await ai.completions.create(model="small", prompt="Once", temperature=9)
        assert (bad.value.code, bad.value.param) == ("invalid_request", "temperature")
        status, said = await post(http, f"{cluster.workers['decode-0'].url}/pd/decode")
        assert (status, said["error"]["code"]) == (403, "forbidden")


@pytest.mark.hang_limit(240)
@pytest.mark.parametrize("counts", COUNTS, ids=["pair", "mixed"])
async def test_an_abort_ends_a_stream_with_a_code_and_a_whole_answer_with_a_status(counts: dict[str, int]) -> None:
    async with client() as http, inner_cluster(counts) as cluster, openai_client(cluster) as ai:
        await wait_for(http, cluster, **counts)
        asked = {"model": "small", "prompt": "Once", "max_tokens": 2000, "extra_body": LONG}
        stream = await ai.completions.create(**asked, stream=True)
        chunks = aiter(stream)
        first = await anext(chunks)
        busy = await busy_gauges(http, cluster.router)
        assert {"aiodatadist_router_in_flight", "aiodatadist_router_load_leases"} <= set(busy)
        status, said = await post(http, f"{cluster.url}/v1/abort_requests", request_ids=[first.id, "nobody"])
        assert (status, said) == (200, {"aborted": 1})
        with pytest.raises(APIError) as broken:
            async for _ in chunks:
                pass
        assert broken.value.code == "aborted"

        whole = asyncio.create_task(ai.completions.create(**asked))
        while (await post(http, f"{cluster.url}/v1/abort_requests", abort_all=True))[1] == {"aborted": 0}:
            await asyncio.sleep(0.01)
        with pytest.raises(APIStatusError) as ended:
            await whole
        assert (ended.value.status_code, ended.value.code) == (499, "aborted")
        await all_idle(http, cluster)


@pytest.mark.hang_limit(240)
async def test_leaving_a_stream_frees_what_it_held() -> None:
    async with client() as http, inner_cluster({"mixed": 1}) as cluster, openai_client(cluster) as ai:
        await wait_for(http, cluster, mixed=1)
        stream = await ai.completions.create(
            model="small", prompt="Once", max_tokens=2000, stream=True, extra_body=LONG
        )
        async for chunk in stream:
            assert json.loads(chunk.to_json())["object"] == "text_completion"
            break
        await stream.close()
        await all_idle(http, cluster)
        assert (await gauges(http, cluster.router))[
            'aiodatadist_router_requests_total{code="client_gone",status="499"}'
        ] == 1
