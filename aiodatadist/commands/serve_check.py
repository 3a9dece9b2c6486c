"""``serve pd --check``: see that a cluster on this machine writes the right tokens, also while its workers die.

Four parts, in a fresh cluster with both hand-overs and a mixed worker beside it that knows no router:

* **Identity**: prompts of every length that could matter, greedy and sampled, streamed and whole, by pull and by push,
  have to bring the tokens that the mixed worker writes. Decode workers compare digests of all blocks with what was
  sent. The greedy ones are compared with the model alone as well, in this process.
* **Controls**: KV that a decode worker damages when it has arrived, in each way of `damage.WAYS`, has to be found out.
* **Deaths**: a decode and a prefill worker are killed under load. Every answer has to be right, or to end with a known
  code, and requests have to be served again.
* **Rest**: when nobody asks any more, every gauge is 0.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector
from prometheus_client.parser import text_string_to_metric_families

from aiodatadist.model import Model, Tokenizer, draw_prompt, find_model, one_blas_thread
from aiodatadist.serve.config import MODES, WorkerConfig
from aiodatadist.serve.damage import WAYS
from aiodatadist.serve.errors import CODES
from aiodatadist.serve.metrics import LASTING
from aiodatadist.serve.protocol import (
    MODE_HEADER,
    DecodeJob,
    Generation,
    Message,
    PrefillJob,
    Sampling,
    Ticket,
    decode,
    encode,
)
from aiodatadist.serve.worker import worker

from .failure import CommandError
from .serve_cluster import Cluster, ServeProcess, local_cluster

__all__ = ["busy_gauges", "run_check"]

BLOCK: Final = 16
_LENGTHS: Final = {
    "small": (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 31, 32, 33, 48, 100, 255, 256, 257, 500, 1000, 2016),
    "smollm2": (1, BLOCK - 1, BLOCK, BLOCK + 1, 33, 100),
}
"""Tokens of prompts by model: of one token, around blocks, of several, the longest."""
_NEW_TOKENS: Final = {"small": 32, "smollm2": 8}
_AT_ONCE: Final = 8
_ALONE: Final = 257
"""The longest prompt that the model alone is asked for."""
_CLIENTS: Final = 16
_ASK_LIMIT: Final = 60.0
_WAIT_LIMIT: Final = 60.0
_LOOK: Final = 0.01
_COME_AGAIN: Final = 0.2
"""Seconds until a client whose request has failed asks again."""
_SLOW_START: Final = "aiodatadist_router_worker_slow_start"
"""This gauge says how long a worker has been there, not what is under way."""


class _Case(NamedTuple):
    """What is asked for."""

    prompt: tuple[int, ...]
    temperature: float
    seed: int

    def __str__(self) -> str:
        return f"a prompt of {len(self.prompt)} tokens at temperature {self.temperature:g}"


@dataclass(slots=True)
class _Answer:
    """What came: `code` is empty if all went well, and `first` and `last` are seconds since the request."""

    tokens: list[int] = field(default_factory=list)
    code: str = ""
    text: str = ""
    mode: str = ""
    first: float = 0.0
    last: float = 0.0


class _Row(NamedTuple):
    what: str
    result: str


async def run_check(
    counts: dict[str, int],
    model: str,
    *,
    router_options: Sequence[str],
    worker_options: Sequence[str],
    say: Callable[[str], None],
) -> None:
    """Check a cluster of so many workers.

    Raises
    ------
    CommandError
        What is wrong, at the first thing that is.
    """
    began = time.monotonic()
    workers = [*worker_options, "--digests"]
    async with (
        local_cluster(counts, router_options=router_options, worker_options=workers) as cluster,
        ClientSession(timeout=ClientTimeout(_ASK_LIMIT), connector=TCPConnector(limit=0)) as http,
    ):
        alone = await Cluster().start("mixed", ("--model", model))  # it knows no router
        try:
            for child in cluster.processes:
                say(f"{child.name:<12} {child.url}  process {child.process.pid}")
            await alone.wait_ready()
            check = _Check(http, cluster, model, alone.url, say)
            await check.wait_registered(counts)
            rows = [
                *await check.identity(),
                await check.controls(),
                *await check.deaths([*workers, "--router", cluster.url]),
                await check.rest(counts),
            ]
        finally:
            await alone.stop()
    for row in rows:
        say(f"{row.what:<10} {row.result}")
    say(f"all is well, after {time.monotonic() - began:.0f} s")


async def busy_gauges(http: ClientSession, url: str) -> dict[str, float]:
    """Return the gauges of a process that should be 0 when nothing is under way, and are not."""
    async with http.get(f"{url}/metrics") as reply:
        families = list(text_string_to_metric_families(await reply.text()))
    return {
        f"{sample.name}{sample.labels or ''}": sample.value
        for family in families
        if family.type == "gauge" and family.name not in (*LASTING, _SLOW_START)
        for sample in family.samples
        if sample.value
    }


class _Check:
    def __init__(
        self, http: ClientSession, cluster: Cluster, model: str, mixed: str, say: Callable[[str], None]
    ) -> None:
        self._http = http
        self._cluster = cluster
        self._model = model
        self._mixed = mixed
        self._say = say
        self._new_tokens = _NEW_TOKENS[model]
        self._expected: dict[_Case, list[int]] = {}

    # Identity. ----------------------------------------------------------------------------------------------

    async def identity(self) -> list[_Row]:
        """See above."""
        found = find_model(self._model)
        model, tokenizer = await asyncio.to_thread(lambda: (found.load(), found.load_tokenizer()))
        cases = _cases(tokenizer, _LENGTHS[self._model])
        seen: dict[int, list[_Answer]] = {len(case.prompt): [] for case in cases}
        await _several(
            _AT_ONCE,
            [lambda case=case: self._ask_both_ways(case, seen[len(case.prompt)]) for case in cases],  # type: ignore[misc]
        )
        alone, gap = await asyncio.to_thread(self._compare_alone, model, cases)
        block_bytes = sum(4 * int(np.prod(shape[1:])) for shape in model.kv_shapes(1, BLOCK))
        self._say(f"{'prompt':>8}{'KV bytes':>12}{'pulled':>8}{'pushed':>8}{'TTFT ms':>10}{'TPOT ms':>10}  identical")
        for length, answers in seen.items():
            modes = Counter(answer.mode for answer in answers)
            streamed = [answer for answer in answers if answer.last > answer.first]
            ttft = _mean([answer.first for answer in streamed])
            tpot = _mean([(answer.last - answer.first) / (self._new_tokens - 1) for answer in streamed])
            self._say(
                f"{length:>8}{-(-length // BLOCK) * block_bytes:>12}{modes['pull']:>8}{modes['push']:>8}"
                f"{ttft * 1e3:>10.1f}{tpot * 1e3:>10.2f}  yes"
            )
        answers = [answer for each in seen.values() for answer in each]
        modes = Counter(answer.mode for answer in answers)
        return [
            _Row(
                "identity",
                f"{len(answers)} answers to {len(cases)} prompts, {modes['pull']} by pull and {modes['push']} by push, "
                "are those of a mixed worker; all blocks as sent",
            ),
            _Row("reference", f"{alone} of these are the model's alone; its closest call was by {gap:.4f} in a logit"),
        ]

    async def _learn(self, case: _Case) -> None:
        """Have the mixed worker say what is right; the short ones twice, whole and streamed."""
        streams = (False, True) if len(case.prompt) <= _ALONE else (False,)
        answers = [await self._ask(self._mixed, case, stream) for stream in streams]
        for answer in answers:
            if answer.code:
                raise CommandError(f"the mixed worker answers {case} with {answer.code}: {answer.text}")
        if answers[0].tokens != answers[-1].tokens:
            raise CommandError(f"the mixed worker differs from itself on {case}")
        self._expected[case] = answers[0].tokens

    def _compare_alone(self, model: Model, cases: Sequence[_Case]) -> tuple[int, float]:
        """Compare the mixed worker with the model; return on how many prompts, and by how little a token was best."""
        count, gap = 0, np.inf
        with one_blas_thread():
            for case in cases:
                if case.temperature or len(case.prompt) > _ALONE:
                    continue
                blocks = range(-(-(len(case.prompt) + self._new_tokens) // BLOCK))
                kv = model.allocate_kv(len(blocks), BLOCK)
                logits = model.prefill(case.prompt, kv, blocks)
                for step, token in enumerate(self._expected[case]):
                    second, best = np.sort(logits)[-2:]
                    gap = min(gap, float(best - second))
                    if int(logits.argmax()) != token:
                        raise CommandError(f"the model alone differs from the mixed worker on {case}, at token {step}")
                    logits = model.decode_step(token, len(case.prompt) + step, kv, blocks)
                count += 1
        return count, gap

    async def _ask_both_ways(self, case: _Case, seen: list[_Answer]) -> None:
        """Ask until both hand-overs have served the case, by turns as a stream and whole."""
        await self._learn(case)
        missing, stream = set(MODES), case.temperature > 0
        for _ in range(40):
            answer = await self._ask(self._cluster.url, case, stream)
            seen.append(answer)
            if answer.code:
                raise CommandError(f"{case} was answered with {answer.code}: {answer.text}")
            self._compare(case, answer)
            missing.discard(answer.mode)
            if not missing:
                return
            stream = not stream
            # The router's turns go by requests: one more or less brings the other.
            await asyncio.sleep(random.random() * _LOOK)
        raise CommandError(f"{case} was never served by {' and '.join(sorted(missing))}")

    def _compare(self, case: _Case, answer: _Answer) -> None:
        expected, found = self._expected[case], answer.tokens
        at = next((at for at, token in enumerate(found) if token != (*expected, None)[at]), len(found))
        if at < len(found) or (not answer.code and at < len(expected)):
            mode = answer.mode or "broken off"
            raise CommandError(f"{case} has brought other tokens than the mixed worker's, from token {at} on ({mode})")

    async def _ask(self, url: str, case: _Case, stream: bool) -> _Answer:
        answer, began = _Answer(), time.monotonic()
        body = {
            "model": self._model, "prompt": case.prompt, "temperature": case.temperature, "seed": case.seed,
            "max_tokens": self._new_tokens, "ignore_eos": True, "return_token_ids": True, "stream": stream,
        }  # fmt: skip
        try:
            async with self._http.post(f"{url}/v1/completions", json=body) as reply:
                answer.mode = reply.headers.get(MODE_HEADER, "")
                if reply.status != 200:
                    _take_error(answer, await reply.read())
                elif not stream:
                    (choice,) = (await reply.json())["choices"]
                    answer.tokens = choice["token_ids"]
                else:
                    answer.code = "cut_off"  # until the end has come
                    async for line in reply.content:
                        if line == b"data: [DONE]\n":
                            answer.code = ""
                        elif line.startswith(b"data: "):
                            _take_event(answer, line[6:], time.monotonic() - began)
        except (ClientError, OSError, TimeoutError) as why:
            answer.code, answer.text = type(why).__name__, str(why)
        return answer

    # Controls. ----------------------------------------------------------------------------------------------

    async def controls(self) -> _Row:
        """See above."""
        case = max((case for case in self._expected if len(case.prompt) <= _ALONE), key=lambda case: len(case.prompt))
        prefill = next(child for child in self._cluster.workers.values() if child.role == "prefill")
        for way in WAYS:
            generation = Generation(
                request_id=f"control-{way}",
                model=self._model,
                created=int(time.time()),
                prompt=list(case.prompt),
                max_tokens=2,
                sampling=Sampling(temperature=0.0),
            )
            async with worker(WorkerConfig("decode", model=self._model, damage=way)) as damaging:
                status, said = await self._tell(prefill.url, "/pd/prefill", PrefillJob(generation=generation))
                if status != 200:
                    raise CommandError(f"{prefill.name} answers a control with {said.decode(errors='replace')}")
                job = DecodeJob(generation=generation, ticket=decode(said, Ticket))
                status, said = await self._tell(damaging.url, "/pd/decode", job)
            answer = _Answer()
            _take_error(answer, said)
            if status == 200 or answer.code != "kv_damaged":
                raise CommandError(f"a prompt whose KV was damaged ({way}) was not found out: {answer.text}")
        return _Row("controls", f"KV that was damaged is found out: {', '.join(WAYS)}")

    async def _tell(self, url: str, path: str, job: Message) -> tuple[int, bytes]:
        async with self._http.post(url + path, data=encode(job)) as reply:
            return reply.status, await reply.read()

    # Deaths. ------------------------------------------------------------------------------------------------

    async def deaths(self, worker_options: Sequence[str]) -> list[_Row]:
        """See above."""
        load = _Load(self)
        rows = []
        clients = [asyncio.create_task(load.client(random.Random(number))) for number in range(_CLIENTS)]
        try:
            for role, gauge in (("decode", "aiodatadist_running"), ("prefill", "aiodatadist_tokens")):
                await self._until(lambda: load.recent() >= _CLIENTS, clients, "the load is not served")
                victim = next(child for child in self._cluster.workers.values() if child.role == role)
                await self._wait_busy(victim, gauge)
                before = Counter(load.ends)
                victim.kill()
                killed = load.mark()
                replacement = await self._cluster.start(role, worker_options)
                await self._until(lambda: load.recent() > 0, clients, f"no request is served without {victim.name}")
                resumed = time.monotonic() - killed
                await self._cluster.workers.pop(victim.name).stop()
                await replacement.wait_ready()
                await self._wait_busy(replacement, gauge)
                load.mark()
                await self._until(lambda: load.recent() >= _CLIENTS, clients, f"little is served by {replacement.name}")
                ends = load.ends - before
                failed = ", ".join(f"{count} {code}" for code, count in sorted(ends.items()) if code != "ok") or "none"
                rows.append(
                    _Row(
                        role,
                        f"{victim.name} killed while it worked: {ends['ok']} answers right, failed: {failed}; "
                        f"served again after {resumed:.1f} s",
                    )
                )
                load.mark()
        finally:
            load.over = True
            await asyncio.gather(*clients, return_exceptions=True)
        for client in clients:
            client.result()
        return rows

    async def _wait_busy(self, child: ServeProcess, gauge: str) -> None:
        """Wait until a worker has something to do: so it dies in the middle of it."""
        limit = time.monotonic() + _WAIT_LIMIT
        while gauge not in await busy_gauges(self._http, child.url):
            if time.monotonic() > limit:
                raise CommandError(f"{child.name} gets nothing to do")

    async def _until(self, reached: Callable[[], bool], clients: Sequence[asyncio.Task[None]], what: str) -> None:
        limit = time.monotonic() + _WAIT_LIMIT
        while not reached():
            for client in clients:
                if client.done():
                    client.result()
            if time.monotonic() > limit:
                raise CommandError(f"{what} after {_WAIT_LIMIT:g} s")
            await asyncio.sleep(_LOOK)

    async def ask_random(self, rng: random.Random) -> _Answer:
        """Ask for a prompt whose answer is known. Raises CommandError if it is wrong, or fails without a known code."""
        case = rng.choice(list(self._expected))
        answer = await self._ask(self._cluster.url, case, stream=True)
        if answer.code and (answer.code not in CODES or answer.code == "internal_error"):
            raise CommandError(f"{case} has failed without a code of its own: {answer.code} {answer.text}")
        self._compare(case, answer)
        return answer

    # Rest. --------------------------------------------------------------------------------------------------

    async def wait_registered(self, counts: dict[str, int]) -> None:
        """Wait until so many workers are registered, and no other."""
        limit = time.monotonic() + _WAIT_LIMIT
        while True:
            async with self._http.get(f"{self._cluster.url}/registered_number") as reply:
                found = await reply.json()
            if all(found[role] == count for role, count in counts.items()):
                return
            if time.monotonic() > limit:
                raise CommandError(f"registered are {found} after {_WAIT_LIMIT:g} s; wanted are {counts}")
            await asyncio.sleep(_LOOK)

    async def rest(self, counts: dict[str, int]) -> _Row:
        """See above."""
        await self.wait_registered(counts)  # the dead are forgotten
        for number in range(2 * len(MODES)):
            answer = await self.ask_random(random.Random(number))
            if answer.code:
                raise CommandError(f"after the deaths a request fails with {answer.code}: {answer.text}")
        limit = time.monotonic() + _WAIT_LIMIT
        for child in self._cluster.processes:
            while busy := await busy_gauges(self._http, child.url):
                if time.monotonic() > limit:
                    left = ", ".join(f"{name} {value:g}" for name, value in busy.items())
                    raise CommandError(f"{child.name} is not idle {_WAIT_LIMIT:g} s after the last request: {left}")
                await asyncio.sleep(_LOOK)
        return _Row("rest", f"gauges that are not 0 in {len(self._cluster.processes)} idle processes: none")


class _Load:
    """Clients that ask again and again."""

    def __init__(self, check: _Check) -> None:
        self.over = False
        self.ends: Counter[str] = Counter()
        self._check = check
        self._since = 0.0
        self._recent = 0

    def mark(self) -> float:
        """Have `recent` count from now on."""
        self._since, self._recent = time.monotonic(), 0
        return self._since

    def recent(self) -> int:
        """Return how many requests that began after the mark were answered well."""
        return self._recent

    async def client(self, rng: random.Random) -> None:
        """Ask until it is over."""
        while not self.over:
            began = time.monotonic()
            answer = await self._check.ask_random(rng)
            self.ends[answer.code or "ok"] += 1
            if not answer.code:
                self._recent += began >= self._since
            else:
                await asyncio.sleep(_COME_AGAIN)


def _cases(tokenizer: Tokenizer, lengths: Sequence[int]) -> list[_Case]:
    texts = {length: tokenizer.encode(draw_prompt(length, 8 * length + 96).text)[:length] for length in lengths}
    return [_Case(tuple(tokens), temperature, length) for length, tokens in texts.items() for temperature in (0.0, 0.8)]


def _take_error(answer: _Answer, body: bytes) -> None:
    try:
        error = json.loads(body)["error"]
        answer.code, answer.text = str(error["code"]), str(error["message"])
    except (ValueError, KeyError, TypeError):
        answer.code, answer.text = "no_code", body[:200].decode(errors="replace")


def _take_event(answer: _Answer, data: bytes, seconds: float) -> None:
    event: dict[str, Any] = json.loads(data)
    if "error" in event:
        _take_error(answer, data)
        return
    answer.first, answer.last = answer.first or seconds, seconds
    answer.tokens += event["choices"][0]["token_ids"]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


async def _several(at_once: int, jobs: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """Do jobs, so many at a time; the first that fails ends all."""
    left = iter(jobs)

    async def work() -> None:
        for job in left:
            await job()

    tasks = [asyncio.create_task(work()) for _ in range(at_once)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
