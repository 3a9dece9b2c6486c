"""Two processes: one fills a paged KV cache, the other pulls blocks of it.

    python examples/pull_blocks.py                                          # starts both here

    python examples/pull_blocks.py --role prefill --listen 10.0.0.1:26000   # or one on each machine
    python examples/pull_blocks.py --role decode --peer 10.0.0.1:26000

Each block's content follows from its number, so that the decode side can check what it pulled.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

import numpy as np

import aiodatadist as adt

PREFILL, DECODE = 1, 2  # cluster ids
LAYERS, BLOCKS = 8, 128
BLOCK_SHAPE = (16, 8, 128)  # tokens, heads, head size: 32 KiB of float16 in each of the 2 * LAYERS tensors

# In a serving system a scheduler decides these and tells both sides.
PREFILL_BLOCKS = [7, 3, 11, 12, 13, 100]
DECODE_BLOCKS = [0, 1, 2, 3, 4, 5]


def content(tensor: int, block: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float16]]:
    """Return what block `block` of tensor `tensor` holds on the prefill side."""
    return np.random.default_rng([tensor, block]).random(BLOCK_SHAPE, dtype=np.float32).astype(np.float16)


async def prefill(listen: str, config: adt.Config) -> None:
    async with adt.DataDist(PREFILL, adt.Role.PROMPT, listen=listen, config=config) as dd:
        caches = dd.cache_manager
        # Memory of the library: peers on this host map it, and a copy is all that a pull costs.
        kv = caches.allocate_blocks_cache(
            adt.CacheDesc(2 * LAYERS, (BLOCKS, *BLOCK_SHAPE), "float16"),
            key=adt.BlocksCacheKey(PREFILL),
            remote="r",
        )
        for block in PREFILL_BLOCKS:  # the model's work
            for index, tensor in enumerate(kv.tensors):
                tensor[block] = content(index, block)
        await kv.ready()  # from now on peers see the cache
        print(f"listening on {dd.listen_address}", flush=True)

        async for note in dd.notifications():
            print(f"cluster {note.cluster_id} says {note.payload.decode()!r}: its blocks may be reused", flush=True)
            break
        await caches.unregister_cache(kv)


async def decode(peer: str, config: adt.Config) -> None:
    async with adt.DataDist(DECODE, adt.Role.DECODER, config=config) as dd:
        caches = dd.cache_manager
        # Any memory will do: here the arrays are this program's own.
        tensors = [np.zeros((BLOCKS, *BLOCK_SHAPE), np.float16) for _ in range(2 * LAYERS)]
        kv = caches.register_blocks_cache(tensors)
        link = await dd.link(adt.ClusterInfo(PREFILL, peer), timeout=5.0)
        print(f"linked over {link.path}", flush=True)

        began = time.perf_counter()
        pull = caches.pull_blocks(
            adt.BlocksCacheKey(PREFILL), kv, PREFILL_BLOCKS, DECODE_BLOCKS, timeout=5.0, notify=b"request 1"
        )
        await pull
        took = time.perf_counter() - began
        print(f"pulled {len(DECODE_BLOCKS)} blocks, {pull.progress.bytes_done} bytes, in {took * 1e3:.1f} ms")

        for theirs, mine in zip(PREFILL_BLOCKS, DECODE_BLOCKS, strict=True):
            for index, tensor in enumerate(tensors):
                if not np.array_equal(tensor[mine], content(index, theirs)):
                    sys.exit(f"block {mine} of tensor {index} is wrong")
        print("every block is right", flush=True)


async def both(transports: str) -> None:
    """Start the prefill process, wait until it listens, start the decode process."""
    this = (sys.executable, __file__, "--transports", transports)
    prefilling = await asyncio.create_subprocess_exec(
        *this, "--role", "prefill", "--listen", "127.0.0.1:0", stdout=asyncio.subprocess.PIPE
    )
    try:
        assert prefilling.stdout is not None
        said = (await prefilling.stdout.readline()).decode()
        print(f"prefill: {said}", end="", flush=True)
        if "listening on " not in said:
            sys.exit("the prefill process did not come up")
        decoding = await asyncio.create_subprocess_exec(*this, "--role", "decode", "--peer", said.split()[-1])
        if await decoding.wait() != 0:
            sys.exit("the decode process failed")
        print(f"prefill: {(await prefilling.stdout.read()).decode()}", end="", flush=True)
        if await prefilling.wait() != 0:
            sys.exit("the prefill process failed")
    finally:
        if prefilling.returncode is None:
            prefilling.kill()
            await prefilling.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--role", choices=("both", "prefill", "decode"), default="both")
    parser.add_argument("--listen", default="127.0.0.1:26000", help="where the prefill process listens")
    parser.add_argument("--peer", default="127.0.0.1:26000", help="where the decode process finds it")
    parser.add_argument("--transports", default="shm,tcp", help="best first")
    options = parser.parse_args()
    config = adt.Config(transports=tuple(options.transports.split(",")))
    match options.role:
        case "prefill":
            asyncio.run(prefill(options.listen, config))
        case "decode":
            asyncio.run(decode(options.peer, config))
        case _:
            asyncio.run(both(options.transports))


if __name__ == "__main__":
    main()
