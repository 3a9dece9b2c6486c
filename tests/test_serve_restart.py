"""Routers and workers that are killed and started again, under load."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="serving needs aiohttp")
pytest.importorskip("prometheus_client", reason="serving needs prometheus-client")
pytest.importorskip("threadpoolctl", reason="serving needs threadpoolctl")

from aiohttp import ClientError, ClientSession

from aiodatadist.commands.serve_cluster import Cluster, local_cluster
from aiodatadist.serve.config import DEFAULT_LIMITS
from aiodatadist.serve.errors import CODES, ServeError
from aiodatadist.serve.protocol import DecodeJob, PrefillJob

from .serve_local import generation, idle_within, local_router, local_worker, tell, ticket_of
from .test_serve import all_idle, client, complete, wait_for
from .waiting import reserved_address, until

ASKED: dict[str, Any] = {"prompt": "Once upon a time there was", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
HEARTBEAT = 1.0  # half of the usual, for which the test would only wait
RESUMES = HEARTBEAT + DEFAULT_LIMITS.open_time
"""Seconds after which a cluster serves again: a heartbeat, and the time of the breaker."""
TICK = 0.02


def port_of(address: str) -> str:
    return address.rsplit(":", 1)[1]


async def test_a_worker_that_is_restarted_on_its_ports_takes_no_old_ticket() -> None:
    with reserved_address() as here, reserved_address() as data:
        options = ("--port", port_of(here), "--kv-port", port_of(data))
        cluster = Cluster()
        async with (
            client() as http,
            local_router() as router,
            local_worker("decode", routers=(router.url,)) as decode,
        ):
            try:
                first = await cluster.start("prefill", (*options, "--router", router.url))
                await first.wait_ready()
                await until(lambda: len(router.registry.members()) == 2)
                answer = await complete(http, router.url, False, **ASKED)  # links them
                old = await ticket_of(http, first.url, PrefillJob(generation=generation("old", [65] * 100)))
                first.kill()
                await first.stop()
                second = await cluster.start("prefill", (*options, "--router", router.url))
                await second.wait_ready()
                assert second.url == first.url
                with pytest.raises(ServeError) as refused:
                    job = DecodeJob(generation=generation("old", ""), ticket=old)
                    await tell(http, f"{decode.url}/pd/decode", job, dict)
                assert refused.value.code in ("ticket_gone", "transfer_failed")
                # What is new goes over a new link, though the router may still hold the dead one for alive.
                for _ in range(4):
                    assert await complete(http, router.url, False, **ASKED) == answer
                await idle_within(10.0, http, [router.url, second.url, decode.url])
            finally:
                await asyncio.gather(*(child.stop() for child in cluster.workers.values()))


class Clients:
    """Ask again and again, and count how requests end."""

    def __init__(self, http: ClientSession, url: str, expected: list[int]) -> None:
        self.good = 0
        self.bad: set[str] = set()
        self.open = 0
        self._http = http
        self._url = url
        self._expected = expected

    async def run(self) -> None:
        while True:
            try:
                code = await self._one()
            except ClientError:
                code = "gone"  # the router itself
            if code:
                self.bad.add(code)
                await asyncio.sleep(TICK)
            else:
                self.good += 1

    async def _one(self) -> str:
        body = {"model": "small", "stream": True, "return_token_ids": True, **ASKED}
        tokens: list[int] = []
        async with self._http.post(f"{self._url}/v1/completions", json=body) as reply:
            if reply.status != 200:
                return str((await reply.json())["error"]["code"])
            self.open += 1
            try:
                async for line in reply.content:
                    if line == b"data: [DONE]\n":
                        assert tokens == self._expected
                        return ""
                    if line.startswith(b"data: "):
                        event = json.loads(line[6:])
                        if "error" in event:
                            return str(event["error"]["code"])
                        tokens += event["choices"][0]["token_ids"]
                        assert tokens == self._expected[: len(tokens)]
            finally:
                self.open -= 1
        return "gone"

    async def served_again(self) -> float:
        """Return seconds until two requests have ended well, without times in which all processes stood still."""
        before, ticks = self.good, 0
        while self.good < before + 2:
            await asyncio.sleep(TICK)
            ticks += 1
            assert ticks * TICK <= RESUMES, f"not served again within {RESUMES:g} s"
        return ticks * TICK


@pytest.mark.hang_limit(240)
async def test_a_router_that_is_restarted_and_workers_serve_again_within_a_heartbeat_and_the_breakers_time() -> None:
    with reserved_address() as here:
        router_options = ("--port", port_of(here), "--mode", "both", "--heartbeat", str(HEARTBEAT))
        worker_options = ("--mode", "both")
        async with (
            client() as http,
            local_cluster(
                {"prefill": 1, "decode": 1}, router_options=router_options, worker_options=worker_options
            ) as cluster,
        ):
            url = cluster.url
            await wait_for(http, cluster, prefill=1, decode=1)
            expected = (await complete(http, url, False, **ASKED))["tokens"]
            clients = Clients(http, url, expected)
            tasks = [asyncio.create_task(clients.run()) for _ in range(4)]
            try:
                for role in ("router", "decode", "prefill"):
                    await until(lambda: clients.open)
                    clients.bad.clear()
                    victim = next(child for child in cluster.processes if child.role == role)
                    victim.kill()
                    cluster.workers.pop(victim.name, None)
                    await victim.stop()
                    options = router_options if role == "router" else ("--router", url, *worker_options)
                    child = await cluster.start(role, options)
                    await child.wait_ready()
                    await clients.served_again()
                    # Who had a request there was told so, by a code if there was somebody to say it.
                    assert clients.bad
                    assert clients.bad <= ({"gone", *CODES} if role == "router" else set(CODES)), clients.bad
                    assert not any(task.done() for task in tasks)
            finally:
                for task in tasks:
                    task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.gather(*tasks)
            # Nothing is left of what the dead router, or a dead worker, had begun.
            await wait_for(http, cluster, prefill=1, decode=1)
            await all_idle(http, cluster)
