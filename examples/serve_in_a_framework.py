"""Disaggregated serving in aiohttp: a decode server whose request handler awaits a pull from a prefill process.

    python examples/serve_in_a_framework.py              # both processes; then, in another shell:
    curl -d '{"prompt": "hello"}' http://127.0.0.1:8100/generate

    python examples/serve_in_a_framework.py --check      # both, some requests, good and bad ones, and the end

What to look at is `Decode.generate`: the blocks it took go back to the pool in one `finally`, which is right only
because a transfer that has ended, no matter how, no longer touches them. There is no model in here: "prefill" writes
values that follow from the prompt, "decode" answers with a digest of what it pulled.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import itertools
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any

import numpy as np
from aiohttp import ClientError, ClientSession, ClientTimeout, web

import aiodatadist as adt

PREFILL, DECODE = 1, 2  # cluster ids
TENSORS, BLOCKS, TOKENS = 8, 512, 16  # K and V of four layers; tokens of a block
DESC = adt.CacheDesc(TENSORS, (BLOCKS, TOKENS, 4, 128), "float16")
KEY = adt.BlocksCacheKey(PREFILL)


class Pool:
    """The numbers of the blocks that are free."""

    def __init__(self) -> None:
        self.free = list(range(BLOCKS))

    def take(self, count: int) -> list[int]:
        if count > len(self.free):
            raise web.HTTPServiceUnavailable(text=f"{count} blocks are wanted, {len(self.free)} are free")
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def give(self, blocks: list[int]) -> None:
        self.free += blocks


def prefilled(prompt: str) -> Iterator[np.ndarray[Any, np.dtype[np.float16]]]:
    """Return what the blocks of a prompt hold, one ``[TENSORS, tokens, heads, head size]`` for each block."""
    for start in range(0, len(prompt), TOKENS):
        seed = list(prompt[start : start + TOKENS].encode())
        value = np.random.default_rng(seed).random(TENSORS, dtype=np.float32).astype(np.float16)
        yield np.broadcast_to(value[:, None, None, None], (TENSORS, *DESC.shape[1:]))


def digest(blocks: Iterator[np.ndarray[Any, np.dtype[np.float16]]]) -> str:
    total = hashlib.blake2b(digest_size=8)
    for block in blocks:
        total.update(block.tobytes())
    return total.hexdigest()


# The prefill process. -----------------------------------------------------------------------------------------


class Prefill:
    """Fills blocks on request, and keeps them until the decode side has them or wants them no more."""

    def __init__(self, dd: adt.DataDist) -> None:
        self.pool = Pool()
        self.held: dict[int, list[int]] = {}
        self.numbers = itertools.count(1)
        self.dd = dd
        self.kv = dd.cache_manager.allocate_blocks_cache(DESC, key=KEY, remote="r")

    async def prefill(self, request: web.Request) -> web.Response:
        prompt = (await request.json())["prompt"]
        blocks = self.pool.take(-(-len(prompt) // TOKENS))
        for block, content in zip(blocks, prefilled(prompt), strict=True):
            for tensor, values in zip(self.kv.tensors, content, strict=True):
                tensor[block] = values
        number = next(self.numbers)
        self.held[number] = blocks
        return web.json_response({"number": number, "blocks": blocks})

    async def release(self, request: web.Request) -> web.Response:
        """Hear that the decode side gave a request up: its pull has ended, or never began."""
        self.let_go(int(request.match_info["number"]))
        return web.Response()

    async def free(self, _request: web.Request) -> web.Response:
        return web.json_response(len(self.pool.free))

    def let_go(self, number: int) -> None:
        self.pool.give(self.held.pop(number, []))

    async def read_notifications(self) -> None:
        """Free what was pulled: the word arrives after the data has."""
        async for note in self.dd.notifications():
            self.let_go(int(note.payload))

    async def read_events(self) -> None:
        """Free everything when the only decode process there is goes away."""
        async for event in self.dd.events():
            match event:
                case adt.LinkStateChanged(new=adt.LinkState.BROKEN | adt.LinkState.CLOSED):
                    # Unlike a push, a pull of a peer that is lost cannot damage what these blocks hold next.
                    for number in list(self.held):
                        self.let_go(number)


async def run_prefill() -> None:
    async with adt.DataDist(PREFILL, adt.Role.PROMPT, listen="127.0.0.1:0") as dd:
        prefill = Prefill(dd)
        await prefill.kv.ready()
        app = web.Application(client_max_size=2**24)
        app.add_routes(
            [
                web.post("/prefill", prefill.prefill),
                web.delete("/prefill/{number}", prefill.release),
                web.get("/free", prefill.free),
            ]
        )
        async with serving(app, 0) as port, asyncio.TaskGroup() as tasks:
            tasks.create_task(prefill.read_notifications())
            tasks.create_task(prefill.read_events())
            print(f"{port} {dd.listen_address}", flush=True)


# The decode process. ------------------------------------------------------------------------------------------


class Decode:
    """Answers requests: prefill elsewhere, pull the blocks, decode."""

    def __init__(self, dd: adt.DataDist, http: ClientSession, prefill: str, peer: str) -> None:
        self.pool = Pool()
        self.dd = dd
        self.http = http
        self.prefill = prefill
        self.peer = adt.ClusterInfo(PREFILL, peer)
        self.kv = dd.cache_manager.allocate_blocks_cache(DESC, remote=None)
        self.background: set[asyncio.Task[Any]] = set()

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        prompt, timeout = body["prompt"], min(float(body.get("timeout", 5.0)), 30.0)
        blocks = self.pool.take(-(-len(prompt) // TOKENS))
        # A task of its own, because it must be heard out even if the client hangs up: it takes blocks over there.
        asking = self.start(self.ask_prefill(prompt))
        pulled = False
        try:
            theirs = await asyncio.shield(asking)
            await self.dd.link(self.peer, timeout=timeout)  # done at once while the link lives
            await self.dd.cache_manager.pull_blocks(
                KEY, self.kv, theirs["blocks"], blocks, timeout=timeout, notify=str(theirs["number"]).encode()
            )
            pulled = True
            return web.json_response({"text": self.decode(blocks)})
        except (adt.TransferTimeout, adt.LinkTimeout) as why:
            raise web.HTTPGatewayTimeout(text=str(why)) from why
        except (adt.LinkError, adt.TransferError, adt.CacheNotFound, adt.ClosedError, ClientError) as why:
            raise web.HTTPServiceUnavailable(text=str(why)) from why
        finally:
            # Here also when the client hung up and aiohttp cancelled the handler: the pull was cancelled with it,
            # and the await ended only when nothing wrote into the blocks any more.
            self.pool.give(blocks)
            if not pulled:
                _ = self.start(self.give_up(asking))

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self.background.add(task)  # the loop alone would not keep it
        task.add_done_callback(self.background.discard)
        return task

    async def ask_prefill(self, prompt: str) -> Any:
        async with self.http.post(f"{self.prefill}/prefill", json={"prompt": prompt}) as answer:
            answer.raise_for_status()
            return await answer.json()

    async def give_up(self, asking: asyncio.Task[Any]) -> None:
        with contextlib.suppress(ClientError):  # no answer: nothing was taken, or the process is gone
            theirs = await asking
            await self.http.delete(f"{self.prefill}/prefill/{theirs['number']}")

    def decode(self, blocks: list[int]) -> str:
        return digest(np.stack([tensor[block] for tensor in self.kv.tensors]) for block in blocks)


@contextlib.asynccontextmanager
async def serving(app: web.Application, port: int) -> AsyncIterator[int]:
    # aiohttp lets handlers run on when the client is gone, unless it is told to cancel them.
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def both(port: int) -> AsyncIterator[tuple[str, Decode, asyncio.subprocess.Process]]:
    """Start the prefill process, and the decode server in this one."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--role", "prefill", stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        said = (await process.stdout.readline()).decode().split()
        if len(said) != 2:
            sys.exit("the prefill process did not come up")
        async with adt.DataDist(DECODE, adt.Role.DECODER) as dd, ClientSession() as http:
            decode = Decode(dd, http, f"http://127.0.0.1:{said[0]}", said[1])
            app = web.Application(client_max_size=2**24)
            app.add_routes([web.post("/generate", decode.generate)])
            async with serving(app, port) as bound:
                yield f"http://127.0.0.1:{bound}/generate", decode, process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


# The self-check. ----------------------------------------------------------------------------------------------


def must(condition: bool, what: str) -> None:
    print(f"{'ok' if condition else 'WRONG'}: {what}", flush=True)
    if not condition:
        sys.exit(1)


async def all_free(decode: Decode) -> bool:
    """Wait until every block is free on both sides."""
    for _ in range(200):
        async with decode.http.get(f"{decode.prefill}/free") as answer:
            theirs = await answer.json()
        if theirs == len(decode.pool.free) == BLOCKS:
            return sorted(decode.pool.free) == list(range(BLOCKS))
        await asyncio.sleep(0.05)
    return False


async def check() -> None:
    long_prompt = "".join(f"{i:15d} " for i in range(BLOCKS))  # fills the whole cache: 64 MiB to pull
    async with both(0) as (url, decode, process), ClientSession(timeout=ClientTimeout(60)) as client:

        async def ask(prompt: str, **more: float) -> tuple[int, str]:
            async with client.post(url, json={"prompt": prompt, **more}) as answer:
                return answer.status, (await answer.json())["text"] if answer.ok else await answer.text()

        prompts = [f"{i} is a number, and this is a prompt about it" for i in range(20)]
        answers = await asyncio.gather(*(ask(prompt) for prompt in prompts))
        must(answers == [(200, digest(prefilled(prompt))) for prompt in prompts], "20 requests at once are answered")
        must(await all_free(decode), "all blocks are free again")

        status, text = await ask(long_prompt, timeout=0.0005)
        must(status == 504, f"a pull that is too slow is a 504: {text}")
        must(await all_free(decode), "all blocks are free again")

        def cancelled() -> int:
            return int(decode.dd.stats()["links"][PREFILL]["counters"]["cancelled"])

        for _ in range(100):  # the pull may end before the client has hung up
            asking = asyncio.ensure_future(ask(long_prompt))
            while not (asking.done() or any(row.kind == "pull" for row in decode.dd.dump())):  # noqa: ASYNC110
                await asyncio.sleep(0)
            asking.cancel()  # the client hangs up while its blocks are on the way
            await asyncio.wait([asking])
            must(await all_free(decode), "a client hung up, and all blocks are free again")
            if cancelled():
                break
        must(cancelled() == 1, "the pull was cancelled with its request")
        must(await ask(long_prompt) == (200, digest(prefilled(long_prompt))), "the next request is answered")

        process.kill()
        await process.wait()
        status, text = await ask("is anybody there?")
        must(status == 503, f"without the prefill process it is a 503: {text}")
        must(len(decode.pool.free) == BLOCKS, "all blocks are free again")


async def serve(port: int) -> None:
    async with both(port) as (url, _, process):
        print(f"""curl -d '{{"prompt": "hello"}}' {url}""", flush=True)
        await process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="send some requests and exit")
    parser.add_argument("--port", type=int, default=8100, help="where the decode server listens")
    parser.add_argument("--role", choices=("both", "prefill"), default="both")
    options = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        if options.role == "prefill":
            asyncio.run(run_prefill())
        else:
            asyncio.run(check() if options.check else serve(options.port))


if __name__ == "__main__":
    main()
