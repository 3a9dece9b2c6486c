"""Answers that go on at another worker when the one that writes them dies."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="serving needs aiohttp")
pytest.importorskip("prometheus_client", reason="serving needs prometheus-client")

from aiohttp import ClientSession

from aiodatadist.commands.serve_cluster import local_cluster
from aiodatadist.serve.openai import read_request
from aiodatadist.serve.results import Merged, Result

from .test_serve import all_idle, client, complete, events, gauges, wait_for

LONG: dict[str, Any] = {
    "model": "small", "prompt": "Once upon a time", "max_tokens": 600, "ignore_eos": True, "seed": 5,
    "return_token_ids": True,
}  # fmt: skip


async def stream(http: ClientSession, url: str, begun: asyncio.Event) -> list[int]:
    async with http.post(f"{url}/v1/completions", json=LONG | {"stream": True}) as reply:
        assert reply.status == 200
        parts = []
        async for part in reply.content.iter_any():
            parts.append(part)
            begun.set()
    *found, end = events(b"".join(parts).decode())
    assert end is None, end
    return [token for event in found for token in event["choices"][0]["token_ids"]]


@pytest.mark.hang_limit(240)
async def test_streams_and_answers_go_on_where_their_decode_worker_died() -> None:
    options = ("--migrate", "1", "--decode-policy", "round_robin")
    async with client() as http, local_cluster({"prefill": 1, "decode": 2}, router_options=options) as cluster:
        mixed = await cluster.start("mixed")
        await mixed.wait_ready()
        await wait_for(http, cluster, prefill=1, decode=2)
        expected = await stream(http, mixed.url, asyncio.Event())
        assert len(expected) == LONG["max_tokens"]
        begun = [asyncio.Event() for _ in range(4)]
        asked = [asyncio.create_task(stream(http, cluster.url, each)) for each in begun]
        whole = [asyncio.create_task(complete(http, cluster.url, False, **LONG)) for _ in range(2)]
        for each in begun:
            await each.wait()
        cluster.workers.pop("decode-0").kill()
        # Also of those that were there: no token twice, and none missing.
        assert await asyncio.gather(*asked) == [expected] * 4
        assert [answer["tokens"] for answer in await asyncio.gather(*whole)] == [expected] * 2
        # Three of the six were there, or still on their way.
        assert 1 <= (await gauges(http, cluster.router))["aiodatadist_router_migrations_total"] <= 3
        await wait_for(http, cluster, decode=1)
        await all_idle(http, cluster)


def test_another_answer_is_no_continuation() -> None:
    generation = read_request(b'{"model": "m", "prompt": "a", "stream": true}', chat=False)
    merged = Merged(generation)
    assert merged.take(Result(request_id="r", tokens=[1, 2], text="ab"))
    assert not merged.take(Result(request_id="r", at=3, text_at=3, tokens=[4], text="d"))
    assert merged.lost
    assert merged.take(Result(request_id="r", tokens=[1, 2, 3], text="abc"))
    assert merged.error is None
    merged.take(Result(request_id="r", at=1, text_at=1, tokens=[9, 3], text="xc"))
    assert merged.error is not None
    assert merged.error.code == "stream_broken"
