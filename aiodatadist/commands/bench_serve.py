"""``bench serve``: what clients of a serving cluster see, where the time goes, and what the router costs."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .failure import CommandError
from .serve_cluster import Cluster

if TYPE_CHECKING:
    from aiohttp import ClientSession

__all__ = ["add_serve_arguments", "run_serve"]

_PERCENTILES: Final = (50, 90, 99)
_ROUTER_SHARE: Final = 0.10
"""Of a mixed worker's processor time for the same request: what a router may take at most."""


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench serve`."""
    group = parser.add_argument_group("of serve")
    group.add_argument("--url", metavar="URL", help="the router, or a mixed worker, to load")
    group.add_argument("--requests", type=int, default=64, metavar="N", help="requests in all (64)")
    group.add_argument("--clients", type=int, default=8, metavar="N", help="of them at a time (8)")
    group.add_argument("--prompt-bytes", type=int, default=256, metavar="N", help="of each prompt (256)")
    group.add_argument("--new-tokens", type=int, default=64, metavar="N", help="of each answer (64)")
    group.add_argument(
        "--mixed", metavar="URL", help="a mixed worker to compare the router's processor time with (one is started)"
    )
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help="holds the key that the API asks for")
    group.add_argument(
        "--cluster-key-file", type=Path, metavar="FILE", help="holds the secret of the cluster, to see its phases"
    )


@dataclass(slots=True)
class _Load:
    """What clients saw: seconds, and how requests ended."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    e2e: list[float] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Row:
    what: str
    mean: float
    percentiles: list[float]


def run_serve(arguments: argparse.Namespace) -> int:
    """Load a cluster, and print what was seen."""
    if arguments.url is None:
        raise CommandError("bench serve needs --url URL: the router of `aiodatadist serve pd`, say")
    for name in ("requests", "clients", "prompt_bytes", "new_tokens"):
        if getattr(arguments, name) < 1:
            raise CommandError(f"--{name.replace('_', '-')} is {getattr(arguments, name)}; give at least 1")
    headers = {}
    if arguments.api_key_file is not None:
        headers["Authorization"] = f"Bearer {arguments.api_key_file.read_text().strip()}"
    if arguments.cluster_key_file is not None:
        from aiodatadist.serve.protocol import KEY_HEADER, internal_token

        headers[KEY_HEADER] = internal_token(arguments.cluster_key_file.read_bytes().strip())
    result, rows = asyncio.run(_measure(arguments, headers))
    if arguments.json == "-":
        print(json.dumps(result, indent=2))
    elif arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=2) + "\n")
    else:
        _print(result, rows)
    return 0 if result["ends"].keys() == {"ok"} else 1


async def _measure(arguments: argparse.Namespace, headers: dict[str, str]) -> tuple[dict[str, Any], list[_Row]]:
    from aiohttp import ClientError, ClientSession, TCPConnector

    url = arguments.url.rstrip("/")
    async with ClientSession(headers=headers, connector=TCPConnector(limit=0)) as http:
        try:
            async with http.get(f"{url}/v1/models") as reply:
                said = await reply.json()
        except (ClientError, OSError, ValueError) as why:
            raise CommandError(f"{url} does not answer: {why}") from None
        if reply.status != 200 or not said["data"]:
            raise CommandError(f"{url} serves no model: {said}")
        model = said["data"][0]["id"]
        async with _mixed(arguments.mixed, model, url) as mixed:
            # Linking, first touches of memory and the like are not what is measured.
            for each in (url, mixed):
                await _load(http, each, model, arguments, requests=min(arguments.clients, arguments.requests))
            before, workers = await _cpu(http, url), await _phases(http, url)
            load = await _load(http, url, model, arguments, requests=arguments.requests)
            after, phases = await _cpu(http, url), _difference(workers, await _phases(http, url))
            mixed_before = await _cpu(http, mixed)
            compared = await _load(http, mixed, model, arguments, requests=arguments.requests)
            mixed_after = await _cpu(http, mixed)
    share = None
    router_cpu = (after - before) / arguments.requests
    mixed_cpu = (mixed_after - mixed_before) / arguments.requests
    if load.ends.keys() == compared.ends.keys() == {"ok"} and mixed_cpu > 0:
        share = router_cpu / mixed_cpu
    rows = [_row(name, getattr(load, name)) for name in ("ttft", "tpot", "e2e")]
    result = {
        "url": url, "model": model, "requests": arguments.requests, "clients": arguments.clients,
        "ends": dict(load.ends), "requests_per_second": arguments.requests / load.seconds,
        "rows": [asdict(row) for row in rows], "phases": phases,
        "router_cpu_seconds": router_cpu, "mixed_cpu_seconds": mixed_cpu, "router_share": share,
    }  # fmt: skip
    return result, rows


@contextlib.asynccontextmanager
async def _mixed(given: str | None, model: str, url: str) -> AsyncIterator[str]:
    """Yield the URL of a mixed worker of the same model, which knows no router."""
    if given is not None:
        yield given.rstrip("/")
        return
    cluster = Cluster()
    child = await cluster.start("mixed", ("--model", model))
    try:
        await child.wait_ready()
        yield child.url
    finally:
        await child.stop()


async def _load(http: ClientSession, url: str, model: str, arguments: argparse.Namespace, requests: int) -> _Load:
    load, numbers = _Load(), iter(range(requests))

    async def one_client() -> None:
        for number in numbers:
            await _ask(http, url, load, _body(model, arguments, number))

    began = time.perf_counter()
    await asyncio.gather(*(one_client() for _ in range(arguments.clients)))
    load.seconds = time.perf_counter() - began
    return load


def _body(model: str, arguments: argparse.Namespace, number: int) -> dict[str, Any]:
    # A beginning of its own each time, so that no prefix of the requests before is found.
    prompt = (f"{os.urandom(8).hex()} {number} " + "Once upon a time " * (arguments.prompt_bytes // 17 + 1))[
        : arguments.prompt_bytes
    ]
    return {
        "model": model, "prompt": prompt, "max_tokens": arguments.new_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


async def _ask(http: ClientSession, url: str, load: _Load, body: dict[str, Any]) -> None:
    from aiohttp import ClientError

    began, first, tokens, code = time.perf_counter(), 0.0, 0, "broken"
    try:
        async with http.post(f"{url}/v1/completions", json=body) as reply:
            if reply.status != 200:
                load.ends[(await reply.json())["error"]["code"]] += 1
                return
            async for line in reply.content:
                if not line.startswith(b"data: "):
                    continue
                first = first or time.perf_counter()
                if line.startswith(b"data: [DONE]"):
                    code = "ok"
                elif b'"usage":{' in line:
                    tokens = json.loads(line[6:])["usage"]["completion_tokens"]
                elif line.startswith(b'data: {"error"'):
                    code = json.loads(line[6:])["error"]["code"]
    except (ClientError, OSError, ValueError, KeyError) as why:
        code = type(why).__name__
    ended = time.perf_counter()
    load.ends[code] += 1
    if code == "ok":
        load.ttft.append(first - began)
        load.e2e.append(ended - began)
        if tokens > 1:
            load.tpot.append((ended - first) / (tokens - 1))


async def _metrics(http: ClientSession, url: str) -> dict[str, float]:
    async with http.get(f"{url}/metrics") as reply:
        lines = (await reply.text()).splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


async def _cpu(http: ClientSession, url: str) -> float:
    return (await _metrics(http, url))["process_cpu_seconds_total"]


_PHASES: Final = ("queue", "prefill", "handover", "transfer", "decode")


def _metric(phase: str, kind: str) -> str:
    """Return the name of a phase's sum or count of seconds, of routers or of workers."""
    if phase == "queue":
        return f"aiodatadist_router_queue_seconds_{kind}"
    return f'aiodatadist_phase_seconds_{kind}{{phase="{phase}"}}'


async def _phases(http: ClientSession, url: str) -> Counter[str]:
    """Return the sums of the phases of a router, or a mixed worker, and of all workers behind it that it names."""
    from aiohttp import ClientError

    found: Counter[str] = Counter()
    wanted = {_metric(phase, kind) for phase in _PHASES for kind in ("sum", "count")}
    with contextlib.suppress(ClientError, OSError):
        async with http.get(f"{url}/registered") as reply:
            registered = await reply.json() if reply.status == 200 else {}
        for each in (url, *(worker["url"] for role in registered.values() for worker in role)):
            for name, value in (await _metrics(http, each)).items():
                if name in wanted:
                    found[name] += value  # type: ignore[assignment]
    return found


def _difference(before: Counter[str], after: Counter[str]) -> dict[str, float]:
    """Return the mean seconds of each phase between two readings."""
    means = {}
    for phase in _PHASES:
        total, count = (after[name] - before[name] for name in (_metric(phase, "sum"), _metric(phase, "count")))
        if count > 0:
            means[phase] = total / count
    return means


def _row(what: str, samples: Sequence[float]) -> _Row:
    import numpy as np

    if not samples:
        return _Row(what, float("nan"), [float("nan")] * len(_PERCENTILES))
    return _Row(what, float(np.mean(samples)), [float(each) for each in np.percentile(samples, _PERCENTILES)])


def _print(result: dict[str, Any], rows: Sequence[_Row]) -> None:
    ends = ", ".join(f"{count} {code}" for code, count in sorted(result["ends"].items()))
    print(f"{result['requests']} requests by {result['clients']} clients: {ends}; "
          f"{result['requests_per_second']:.1f} a second")  # fmt: skip
    print(f"{'ms':<10}{'mean':>10}" + "".join(f"{f'p{each}':>10}" for each in _PERCENTILES))
    for row in rows:
        values = (row.mean, *row.percentiles)
        print(f"{row.what:<10}" + "".join(f"{value * 1e3:>10.2f}" for value in values))
    for name, mean in result["phases"].items():
        print(f"{name:<10}{mean * 1e3:>10.2f}")
    print(
        f"processor time a request: {result['router_cpu_seconds'] * 1e3:.2f} ms here, "
        f"{result['mixed_cpu_seconds'] * 1e3:.2f} ms in a mixed worker on the same requests"
    )
    share = result["router_share"]
    if share is None:
        print("no ratio: not all requests ended well", file=sys.stderr)
    else:
        print(f"ratio: {share:.1%} (a router: at most {_ROUTER_SHARE:.0%})")
