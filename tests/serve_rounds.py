"""Rounds of many clients on one router, while workers are killed, clients leave and requests are aborted.

For `test_serve_load` and `soak`. A round is a number of streaming clients and the deaths of a decode and a prefill
worker, which are replaced; all that it does follows from its seed, but for who is faster. Each client compares the
tokens that it gets with those of a mixed worker that knows no router. After a round nobody holds anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector

from aiodatadist.commands.serve_cluster import Cluster, local_cluster
from aiodatadist.serve.errors import CODES

from .test_serve import all_idle, complete, wait_for
from .waiting import PATIENCE

COUNTS = {"prefill": 2, "decode": 2}
PROMPTS = [f"Once upon a time there were {number} goats" + " and a wolf" * (number**2) for number in range(8)]
ASKED: dict[str, Any] = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
GOOD = "ok"
LEFT = "left"
_LEAVE, _CUT, _ABORT = 0.1, 0.2, 0.3
"""Shares: who leaves after some tokens, who at some moment, whose request is aborted; each with those before it."""


def resident(pid: int) -> int:
    """Return the bytes of a process's memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


class Bench:
    """A cluster, and what it should write."""

    def __init__(self, http: ClientSession, cluster: Cluster, options: tuple[str, ...]) -> None:
        self.http = http
        self.cluster = cluster
        self._options = (*options, "--router", cluster.url)
        self._expected: dict[str, list[int]] = {}

    async def learn(self, mixed: str) -> None:
        """Have a mixed worker say what is right."""
        asked = (complete(self.http, mixed, False, prompt=each, **ASKED) for each in PROMPTS)
        answers = await asyncio.gather(*asked)
        self._expected = {prompt: answer["tokens"] for prompt, answer in zip(PROMPTS, answers, strict=True)}

    async def round(self, seed: int, clients: int) -> Counter[str]:
        """Return how the requests ended."""
        rng = random.Random(seed)
        tasks = [asyncio.create_task(self._client(random.Random(rng.random()), number)) for number in range(clients)]
        try:
            for role in rng.sample(("decode", "prefill"), 2):
                await asyncio.sleep(rng.random() * clients / 200)
                victim = rng.choice([name for name in self.cluster.workers if name.startswith(role)])
                self.cluster.workers[victim].kill()
                await self.cluster.workers.pop(victim).stop()
                replacement = await self.cluster.start(role, self._options)
                await replacement.wait_ready()
            ends = Counter(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert ends.total() == clients
        assert set(ends) <= {GOOD, LEFT, *CODES}, ends
        assert "internal_error" not in ends, ends
        await wait_for(self.http, self.cluster, **COUNTS)
        await all_idle(self.http, self.cluster)
        # Service is back, with all that it should have.
        for prompt in PROMPTS[:4]:
            assert (await complete(self.http, self.cluster.url, True, prompt=prompt, **ASKED))["tokens"] == (
                self._expected[prompt]
            )
        return ends

    async def _client(self, rng: random.Random, number: int) -> str:
        prompt, how = rng.choice(PROMPTS), rng.random()
        await asyncio.sleep(rng.random())
        limit = rng.random() if _LEAVE <= how < _CUT else None
        try:
            async with asyncio.timeout(limit):
                return await self._stream(rng, prompt, how)
        except TimeoutError:
            assert limit is not None, f"client {number} waited too long"
            return LEFT
        except ClientError as why:
            raise AssertionError(f"client {number}'s request ended without a code") from why

    async def _stream(self, rng: random.Random, prompt: str, how: float) -> str:
        body = {"model": "small", "prompt": prompt, "stream": True, "return_token_ids": True, **ASKED}
        tokens: list[int] = []
        enough = rng.randrange(ASKED["max_tokens"])
        async with self.http.post(f"{self.cluster.url}/v1/completions", json=body) as reply:
            if reply.status != 200:
                return str((await reply.json())["error"]["code"])
            async for line in reply.content:
                if line == b"data: [DONE]\n":
                    assert tokens == self._expected[prompt]
                    return GOOD
                if not line.startswith(b"data: "):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    return str(event["error"]["code"])
                tokens += event["choices"][0]["token_ids"]
                assert tokens == self._expected[prompt][: len(tokens)]
                if len(tokens) <= enough:
                    continue
                if how < _LEAVE:
                    return LEFT
                if _CUT <= how < _ABORT:
                    how = 1.0
                    job = {"request_ids": [event["id"]]}
                    async with self.http.post(f"{self.cluster.url}/v1/abort_requests", json=job) as said:
                        assert said.status == 200
        return "cut off"


@contextlib.asynccontextmanager
async def bench(transport: str) -> AsyncIterator[Bench]:
    """Run a cluster with both hand-overs over a transport."""
    options = ("--mode", "both", "--transports", transport)
    # Clients leave by closing: no connection is used again.
    connector = TCPConnector(limit=0, force_close=True)
    router_options = ("--mode", "both", "--queue-wait", "60")
    async with (
        ClientSession(timeout=ClientTimeout(PATIENCE * 3), connector=connector) as http,
        local_cluster(COUNTS, router_options=router_options, worker_options=options) as cluster,
    ):
        mixed = await cluster.start("mixed")
        await mixed.wait_ready()
        here = Bench(http, cluster, options)
        await here.learn(mixed.url)
        await wait_for(http, cluster, **COUNTS)
        yield here
