"""Layer by layer: a prefill node pushes each layer's KV cache while its model computes the next, to two decode nodes.

    python examples/layerwise.py

The model runs in a thread, as in most serving frameworks, and tells a LayerGate which layers are final. Nothing else
joins it with the event loop: the engine posts a layer in `record` itself. The decode side is a pipeline of two stages,
processes with half of the layers each. A scheduler has given the request the same blocks in both.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

import numpy as np

import aiodatadist as adt

PREFILL, STAGES = 1, (2, 3)  # cluster ids
LAYERS = 8
HALF = LAYERS // 2
BLOCK_SHAPE = (16, 8, 64)  # tokens, heads, head size: 32 KiB of float32 in each tensor, 2 tensors a layer

PREFILL_BLOCKS = [7, 3, 11, 12]
DECODE_BLOCKS = [0, 1, 2, 5]


def content(layer: int, part: int, block: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Return what a block of K (part 0) or V (part 1) of a layer holds."""
    return np.random.default_rng([layer, part, block]).random(BLOCK_SHAPE, dtype=np.float32)


# Prefill. -----------------------------------------------------------------------------------------------------


def run_model(kv: adt.Cache, gate: adt.LayerGate) -> None:
    """Do the model's work; in a thread of its own."""
    layer = 0
    try:
        for layer in range(LAYERS):
            for part, tensor in enumerate(kv.tensors[2 * layer : 2 * layer + 2]):
                for block in PREFILL_BLOCKS:
                    tensor[block] = content(layer, part, block)
            gate.record(layer)  # from here on these blocks belong to the transfer
    except Exception as why:
        gate.fail(layer, why)  # targets that need this layer end now, and not by their deadline


async def prefill(addresses: list[str], config: adt.Config) -> None:
    async with adt.DataDist(PREFILL, adt.Role.PROMPT, config=config) as dd:
        caches = dd.cache_manager
        kv = caches.allocate_blocks_cache(adt.CacheDesc(2 * LAYERS, (32, *BLOCK_SHAPE), "float32"), remote=None)
        await kv.ready()
        for cluster, address in zip(STAGES, addresses, strict=True):
            link = await dd.link(adt.ClusterInfo(cluster, address), timeout=5.0)
            print(f"linked cluster {cluster} over {link.path}")

        gate = adt.LayerGate(LAYERS)
        # Stage 0 has the lower half of the layers; the upper half are layers 0 to 3 of stage 1.
        targets = [
            adt.TransferWithCacheKeyConfig(adt.BlocksCacheKey(STAGES[0]), range(HALF), range(HALF)),
            adt.TransferWithCacheKeyConfig(adt.BlocksCacheKey(STAGES[1]), range(HALF, LAYERS), range(HALF)),
        ]
        task = caches.transfer_cache_async(
            kv,
            gate,
            targets,
            PREFILL_BLOCKS,
            DECODE_BLOCKS,
            timeout=30.0,  # of all, the time to compute included
            notify=b"request 1",
        )
        model = asyncio.create_task(asyncio.to_thread(run_model, kv, gate))
        early = 0
        async for stage, layer in task.layers():  # only for those who want to know: nothing waits for this loop
            early += not gate.recorded(LAYERS - 1)
            print(f"layer {layer} is at stage {stage}")
        print(f"{early} of {LAYERS} layers were there, and this loop knew, before the last one was computed")

        for stage, result in enumerate(await task):  # one that failed is no exception, and stops no other
            outcome = "all right" if result.error is None else f"failed: {result.error}"
            print(f"stage {stage} was sent {result.layers_done} layers, {result.bytes_done} bytes: {outcome}")
        await model
        task.raise_for_errors()  # for those to whom any failure is one


# Decode. ------------------------------------------------------------------------------------------------------


async def decode(stage: int, config: adt.Config) -> None:
    cluster = STAGES[stage]
    async with adt.DataDist(cluster, adt.Role.DECODER, listen="127.0.0.1:0", config=config) as dd:
        kv = dd.cache_manager.allocate_blocks_cache(
            adt.CacheDesc(2 * HALF, (16, *BLOCK_SHAPE), "float32"), key=adt.BlocksCacheKey(cluster), remote="rw"
        )
        await kv.ready()
        events = dd.events()
        print(dd.listen_address, flush=True)
        async for event in events:
            # A node that begins with the first layers while the last ones are on their way would do so here.
            if isinstance(event, adt.LayerArrived) and event.layers_left == 0:
                break
        async for note in dd.notifications():  # this alone says it all, too: it comes after the last layer
            print(f"stage {stage} has {note.payload.decode()!r}")
            break
        for index, tensor in enumerate(kv.tensors):
            for theirs, mine in zip(PREFILL_BLOCKS, DECODE_BLOCKS, strict=True):
                if not np.array_equal(tensor[mine], content(stage * HALF + index // 2, index % 2, theirs)):
                    sys.exit(f"stage {stage}: block {mine} of tensor {index} is wrong")
        print(f"stage {stage}: every block is right", flush=True)


# All of it. ---------------------------------------------------------------------------------------------------


async def everything(transports: str, config: adt.Config) -> None:
    """Start the decode nodes, be the prefill node, and print what the others say."""
    nodes = []
    try:
        for stage in range(len(STAGES)):
            command = (sys.executable, __file__, "--transports", transports, "--stage", str(stage))
            nodes.append(await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE))
        outputs = [node.stdout for node in nodes if node.stdout is not None]
        addresses = [(await output.readline()).decode().strip() for output in outputs]
        if not all(addresses):
            sys.exit("a decode node did not come up")
        await prefill(addresses, config)
        for output in outputs:
            print((await output.read()).decode(), end="", flush=True)
        if any([await node.wait() for node in nodes]):
            sys.exit("a decode node failed")
    finally:
        for node in nodes:
            if node.returncode is None:
                node.kill()
                await node.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, choices=(0, 1), help="be this decode node")
    parser.add_argument("--transports", default="shm,tcp", help="best first")
    options = parser.parse_args()
    config = adt.Config(transports=tuple(options.transports.split(",")))
    asyncio.run(everything(options.transports, config) if options.stage is None else decode(options.stage, config))


if __name__ == "__main__":
    main()
