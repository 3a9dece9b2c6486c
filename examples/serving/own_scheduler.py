"""A scheduler of one's own on the router's parts: interactive requests first, and batches where there is room.

The router's parts are ordinary objects. `router` keeps the registry of workers and serves HTTP; here nobody talks to
its OpenAI endpoints. Requests come from this process, and two things are this scheduler's own:

* in which order requests are sent: `TwoQueues`;
* which prefill worker gets them: `SameBegin`, registered as a policy under a name.

What the router does for each request stays as it is: leases, retries, breaker, hand-over by pull or push.

    python examples/serving/own_scheduler.py

starts its workers in this process, so that it can be tried. In earnest each is a process of its own, on any machine:
`aiodatadist serve prefill --router http://HOST:PORT`.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import json
from collections.abc import Sequence

from aiodatadist.serve.config import RouterConfig, WorkerConfig
from aiodatadist.serve.dispatch import Dispatcher
from aiodatadist.serve.errors import ServeError
from aiodatadist.serve.openai import read_request
from aiodatadist.serve.policies import POLICIES, Question
from aiodatadist.serve.registry import Member
from aiodatadist.serve.router import router
from aiodatadist.serve.worker import worker

INTERACTIVE, BATCH = 0, 1


class SameBegin:
    """A policy: prompts that begin alike go to the same worker, unless it has twice the tokens of another in flight."""

    def choose(self, members: Sequence[Member], question: Question) -> Member:
        """Return one of the members, of which there is at least one."""
        ordered = sorted(members, key=lambda member: member.worker_id)
        wanted = ordered[hash(question.prompt[:64]) % len(ordered)]
        least = min(members, key=lambda member: member.all_tokens)
        return least if wanted.all_tokens > 2 * least.all_tokens + question.tokens else wanted


class TwoQueues:
    """Sends at most `at_once` requests, those with the smaller number first."""

    def __init__(self, dispatcher: Dispatcher, at_once: int) -> None:
        self._dispatcher = dispatcher
        self._free = at_once
        self._queue: list[tuple[int, int, asyncio.Future[None]]] = []
        self._number = itertools.count()

    async def ask(self, prompt: str, kind: int, max_tokens: int) -> str:
        """Return the text. Raises ServeError, whose `code` is one of `aiodatadist.serve.errors.CODES`."""
        body = {"model": "small", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        generation = read_request(json.dumps(body).encode(), chat=False)  # checked, with an id and a seed
        await self._come_in(kind)
        try:
            upstream = await self._dispatcher.open(generation)
            try:
                answer = json.loads(b"".join([chunk async for chunk in upstream.chunks()]))
            finally:
                upstream.close()  # gives back what the request held, also after a cancel
        finally:
            self._leave()
        return str(answer["choices"][0]["text"])

    async def _come_in(self, kind: int) -> None:
        if self._free > 0:
            self._free -= 1
            return
        place = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (kind, next(self._number), place))
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._leave()  # it was let in, and goes
            raise

    def _leave(self) -> None:
        while self._queue:
            _, _, place = heapq.heappop(self._queue)
            if not place.done():
                place.set_result(None)
                return
        self._free += 1


async def main() -> None:
    """Serve eight batch requests and two interactive ones, and show in which order they ended."""
    POLICIES["same_begin"] = lambda role: SameBegin()
    async with contextlib.AsyncExitStack() as stack:
        here = await stack.enter_async_context(router(RouterConfig(port=0, prefill_policy="same_begin")))
        for role in ("prefill", "decode"):
            await stack.enter_async_context(worker(WorkerConfig(role=role, routers=(here.url,), num_blocks=128)))
        while not here.dispatcher.ready():  # noqa: ASYNC110
            await asyncio.sleep(0.01)

        scheduler = TwoQueues(here.dispatcher, at_once=2)
        ends: list[str] = []

        async def one(name: str, kind: int) -> None:
            text = await scheduler.ask(f"Once upon a time {name}", kind, max_tokens=8)
            ends.append(name)
            print(f"{name}: {text!r}")

        async with asyncio.TaskGroup() as group:
            for number in range(8):
                group.create_task(one(f"batch {number}", BATCH))
            for number in range(2):
                group.create_task(one(f"interactive {number}", INTERACTIVE))
        assert max(map(ends.index, ("interactive 0", "interactive 1"))) < 4, ends

        try:
            await scheduler.ask("x" * 3000, INTERACTIVE, max_tokens=8)
        except ServeError as why:
            print("refused:", why.code)


if __name__ == "__main__":
    asyncio.run(main())
