"""Serving with real processes: a router, prefill and decode workers, and a mixed worker as the reference."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import pytest

pytest.importorskip("aiohttp", reason="serving needs aiohttp")
pytest.importorskip("prometheus_client", reason="serving needs prometheus-client")
pytest.importorskip("threadpoolctl", reason="serving needs threadpoolctl")

from aiohttp import ClientError, ClientSession, ClientTimeout

from aiodatadist.commands import serve_check
from aiodatadist.commands.children import child_environment
from aiodatadist.commands.serve_cluster import Cluster, ServeProcess, local_cluster

from .serve_local import Inner, InnerCluster, inner_cluster
from .waiting import PATIENCE

NEW_TOKENS = 48
Serving: TypeAlias = Cluster | InnerCluster
Server: TypeAlias = ServeProcess | Inner


@contextlib.asynccontextmanager
async def client() -> AsyncIterator[ClientSession]:
    async with ClientSession(timeout=ClientTimeout(PATIENCE)) as http:
        yield http


async def get(http: ClientSession, url: str) -> Any:
    async with http.get(url) as reply:
        return await reply.json()


async def post(http: ClientSession, url: str, **body: Any) -> tuple[int, Any]:
    async with http.post(url, json=body) as reply:
        return reply.status, await reply.json()


async def wait_for(http: ClientSession, cluster: Serving, **numbers: int) -> None:
    """Wait until so many workers of each role are registered."""
    limit = time.monotonic() + PATIENCE
    while True:
        found = await get(http, f"{cluster.url}/registered_number")
        if all(found[role] == number for role, number in numbers.items()):
            return
        assert time.monotonic() < limit, f"{found} are registered, not {numbers}"
        await asyncio.sleep(0.02)


async def gauges(http: ClientSession, process: Server) -> dict[str, float]:
    """Return all numbers of a process's metrics, gauges or not."""
    async with http.get(f"{process.url}/metrics") as reply:
        lines = (await reply.text()).splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if line and not line.startswith("#")]
    return {name: float(value) for name, value in pairs}


async def busy_gauges(http: ClientSession, process: Server) -> dict[str, float]:
    """Return the gauges that should be 0 when nothing is under way, and are not."""
    return await serve_check.busy_gauges(http, process.url)


async def all_idle(http: ClientSession, cluster: Serving) -> None:
    """Wait until nobody holds anything for a request."""
    limit = time.monotonic() + PATIENCE
    for process in cluster.processes:
        while busy := await busy_gauges(http, process):
            assert time.monotonic() < limit, f"{process.name} still has {busy}"
            await asyncio.sleep(0.02)


def events(text: str) -> list[Any]:
    """Return the events of a stream; the last is None if it ended well."""
    found: list[Any] = []
    for line in text.split("\n\n"):
        if line:
            assert line.startswith("data: "), line
            data = line.removeprefix("data: ")
            found.append(None if data == "[DONE]" else json.loads(data))
    return found


async def complete(http: ClientSession, url: str, stream: bool, **body: Any) -> dict[str, Any]:
    """Ask for a completion; return what matters of the answer, the same whether it was streamed."""
    body = {"model": "small", "return_token_ids": True, "max_tokens": NEW_TOKENS} | body
    if not stream:
        status, answer = await post(http, f"{url}/v1/completions", **body)
        assert status == 200, answer
        (choice,) = answer["choices"]
        return {
            "text": choice["text"],
            "tokens": choice["token_ids"],
            "finish": choice["finish_reason"],
            "prompt_tokens": answer["usage"]["prompt_tokens"],
            "completion_tokens": answer["usage"]["completion_tokens"],
        }
    options = {"stream": True, "stream_options": {"include_usage": True}}
    async with http.post(f"{url}/v1/completions", json=body | options) as reply:
        assert reply.status == 200, await reply.text()
        assert reply.content_type == "text/event-stream"
        *found, usage, end = events(await reply.text())
    assert end is None
    choices = [event["choices"][0] for event in found]
    assert len({event["id"] for event in found}) == 1
    return {
        "text": "".join(choice["text"] for choice in choices),
        "tokens": [token for choice in choices for token in choice["token_ids"]],
        "finish": choices[-1]["finish_reason"],
        "prompt_tokens": usage["usage"]["prompt_tokens"],
        "completion_tokens": usage["usage"]["completion_tokens"],
    }


@pytest.mark.hang_limit(240)
async def test_clients_get_openai_shapes_and_typed_errors() -> None:
    async with client() as http, inner_cluster({"prefill": 1, "decode": 1}) as cluster:
        url = cluster.url
        await wait_for(http, cluster, prefill=1, decode=1)
        assert (await get(http, f"{url}/ready"))["status"] == "ready"
        assert [model["id"] for model in (await get(http, f"{url}/v1/models"))["data"]] == ["small"]

        turns = [{"role": "user", "content": "Once upon a time"}]
        chat = {"model": "small", "messages": turns, "temperature": 0, "max_tokens": 20}
        status, answer = await post(http, f"{url}/v1/chat/completions", **chat)
        assert status == 200
        assert answer["object"] == "chat.completion"
        message = answer["choices"][0]["message"]
        assert message["role"] == "assistant"
        async with http.post(f"{url}/v1/chat/completions", json={**chat, "stream": True}) as reply:
            *found, end = events(await reply.text())
        assert end is None
        deltas = [event["choices"][0]["delta"] for event in found]
        assert deltas[0]["role"] == "assistant"
        assert "".join(delta.get("content", "") for delta in deltas) == message["content"]
        stop = message["content"][5:8]
        status, answer = await post(http, f"{url}/v1/chat/completions", **chat, stop=[stop])
        assert answer["choices"][0]["finish_reason"] == "stop"
        text = message["content"]
        assert answer["choices"][0]["message"]["content"] == text[: text.index(stop)]

        async def refused(path: str, **body: Any) -> tuple[int, str]:
            status, answer = await post(http, url + path, **body)
            assert set(answer["error"]) == {"message", "type", "param", "code"}
            return status, answer["error"]["code"]

        long = {"model": "small", "prompt": [1] * 2048}
        assert await refused("/v1/completions", **long, max_tokens=1) == (400, "context_length_exceeded")
        assert await refused("/v1/completions", model="big", prompt="a") == (404, "model_not_found")
        assert await refused("/v1/completions", model="small", prompt=[258]) == (400, "invalid_request")
        assert await refused("/v1/completions", model="small") == (400, "invalid_request")
        assert await refused("/v1/nothing") == (404, "not_found")
        await all_idle(http, cluster)


@pytest.mark.hang_limit(240)
async def test_a_client_that_goes_takes_its_request_along() -> None:
    async with client() as http, inner_cluster({"prefill": 1, "decode": 1}) as cluster:
        await wait_for(http, cluster, prefill=1, decode=1)
        body = {"model": "small", "prompt": "a" * 500, "max_tokens": 500, "ignore_eos": True, "stream": True}

        async def ask_and_go(seconds: float) -> None:
            with contextlib.suppress(TimeoutError, ClientError):
                async with asyncio.timeout(seconds), http.post(f"{cluster.url}/v1/completions", json=body) as reply:
                    await reply.read()

        # In the prefill, between the legs, in the transfer, in the stream.
        await asyncio.gather(*(ask_and_go(0.01 * 1.5**step) for step in range(12)))
        await all_idle(http, cluster)
        counted = await gauges(http, cluster.router)
        assert counted['aiodatadist_router_requests_total{code="client_gone",status="499"}'] >= 6
        answer = await complete(http, cluster.url, True, prompt="a" * 500)
        assert answer["completion_tokens"] > 0


@pytest.mark.hang_limit(240)
async def test_a_decode_worker_that_dies_in_a_stream_ends_it_with_an_error_and_the_next_goes_elsewhere() -> None:
    async with client() as http, local_cluster({"prefill": 1, "decode": 2}) as cluster:
        await wait_for(http, cluster, prefill=1, decode=2)
        body = {"model": "small", "prompt": "a" * 100, "max_tokens": 600, "ignore_eos": True, "stream": True}
        replies = [await http.post(f"{cluster.url}/v1/completions", json=body) for _ in range(2)]
        cluster.workers["decode-0"].kill()
        ends = [events(await reply.text())[-1] for reply in replies]
        codes = [end and end["error"]["code"] for end in ends]
        assert sorted(codes, key=str) == [None, "stream_broken"]
        # The dead one is still registered: whoever is sent there goes on to the other, by the same ticket.
        answers = await asyncio.gather(*(complete(http, cluster.url, False, prompt="b" * 50) for _ in range(4)))
        assert all(answer["completion_tokens"] for answer in answers)
        await wait_for(http, cluster, prefill=1, decode=1)
        del cluster.workers["decode-0"]
        await all_idle(http, cluster)


@pytest.mark.hang_limit(240)
async def test_one_command_serves() -> None:
    command = [sys.executable, "-m", "aiodatadist", "serve", "pd", "--port", "0", "--prefill", "1", "--decode", "1"]
    process = await asyncio.create_subprocess_exec(
        *command, "--mode", "pull", stdout=asyncio.subprocess.PIPE, env=child_environment()
    )
    assert process.stdout is not None
    try:
        lines = [(await process.stdout.readline()).decode().split() for _ in range(3)]
        assert [line[0] for line in lines] == ["router", "prefill-0", "decode-0"]
        url = lines[0][1]
        async with client() as http:
            limit = time.monotonic() + PATIENCE
            while (await http.get(f"{url}/ready")).status != 200:
                assert time.monotonic() < limit
                await asyncio.sleep(0.02)
            whole = await complete(http, url, False, prompt="Once upon a time", temperature=0)
            assert await complete(http, url, True, prompt="Once upon a time", temperature=0) == whole
        process.terminate()
        assert await process.wait() == 0
        children = [int(line[-1]) for line in lines]
        assert not any(os.path.exists(f"/proc/{pid}") for pid in children)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await process.stdout.read()
