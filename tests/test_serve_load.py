"""Many clients at once on one router, while workers are killed, clients leave and requests are aborted."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="serving needs aiohttp")
pytest.importorskip("prometheus_client", reason="serving needs prometheus-client")

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector

from aiodatadist.commands.serve_cluster import local_cluster
from aiodatadist.serve.errors import CODES

from .conftest import Scale
from .test_serve import all_idle, complete, wait_for
from .waiting import PATIENCE

CLIENTS = 200
PROMPTS = [f"Once upon a time there were {number} goats" for number in range(8)]


@pytest.mark.hang_limit(600)
async def test_nothing_hangs_leaks_or_is_wrong_under_kills_disconnects_and_aborts(scale: Scale) -> None:
    rng = random.Random(7)
    router_options = ("--queue-wait", "60")
    async with (
        ClientSession(timeout=ClientTimeout(PATIENCE * 3), connector=TCPConnector(limit=0)) as http,
        local_cluster({"prefill": 2, "decode": 2}, router_options=router_options) as cluster,
    ):
        mixed = await cluster.start("mixed")
        await mixed.wait_ready()
        await wait_for(http, cluster, prefill=2, decode=2)
        asked: dict[str, Any] = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
        answers = await asyncio.gather(*(complete(http, mixed.url, False, prompt=each, **asked) for each in PROMPTS))
        expected = {prompt: answer["tokens"] for prompt, answer in zip(PROMPTS, answers, strict=True)}
        ends: list[str] = []

        async def one(number: int) -> None:
            prompt, how = PROMPTS[number % len(PROMPTS)], rng.random()
            await asyncio.sleep(rng.random())
            body = {"model": "small", "prompt": prompt, "stream": True, "return_token_ids": True, **asked}
            tokens: list[int] = []
            try:
                async with http.post(f"{cluster.url}/v1/completions", json=body) as reply:
                    if reply.status != 200:
                        ends.append((await reply.json())["error"]["code"])
                        return
                    async for line in reply.content:
                        if line == b"data: [DONE]\n":
                            assert tokens == expected[prompt]
                            ends.append("ok")
                            return
                        if not line.startswith(b"data: "):
                            continue
                        event = json.loads(line[6:])
                        if "error" in event:
                            ends.append(event["error"]["code"])
                            return
                        tokens += event["choices"][0]["token_ids"]
                        assert tokens == expected[prompt][: len(tokens)]
                        if how < 0.1:
                            ends.append("left")
                            return
                        if how < 0.2:
                            job = {"request_ids": [event["id"]]}
                            await (await http.post(f"{cluster.url}/v1/abort_requests", json=job)).read()
                            how = 1.0
            except ClientError as why:
                raise AssertionError(f"request {number} ended without a code") from why
            ends.append("cut off")

        for _ in range(scale(1)):
            clients = [asyncio.create_task(one(number)) for number in range(CLIENTS)]
            for role in ("decode", "prefill"):
                await asyncio.sleep(rng.random() + 0.5)
                victim = rng.choice([name for name in cluster.workers if name.startswith(role)])
                cluster.workers.pop(victim).kill()
                replacement = await cluster.start(role, ("--router", cluster.url))
                await replacement.wait_ready()
            await asyncio.gather(*clients)
        assert len(ends) == CLIENTS * scale(1)
        assert set(ends) <= {"ok", "left", *CODES}, set(ends)
        assert "internal_error" not in ends
        assert ends.count("ok") > CLIENTS // 2
        await wait_for(http, cluster, prefill=2, decode=2)
        await all_idle(http, cluster)
        assert (await complete(http, cluster.url, True, prompt=PROMPTS[0], **asked))["tokens"] == expected[PROMPTS[0]]
