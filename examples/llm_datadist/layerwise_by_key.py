"""The prompt node sends blocks layer by layer while it computes, into the decoder's cache, which it names by its key.

Start one process with `--role p` and one with `--role d`; shared.py says how.
"""

from __future__ import annotations

import argparse
import sys

import shared
from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMRole, LLMStatusCode, TransferWithCacheKeyConfig

PROMPT, DECODER = 1, 2
LAYERS, SHAPE = 4, (32, 16, 8)  # blocks, tokens, elements of a token
PROMPT_BLOCKS, DECODER_BLOCKS = [0, 5, 6], [9, 2, 1]


def prompt(options: argparse.Namespace) -> None:
    datadist = shared.start(options, LLMRole.PROMPT, PROMPT, options.prompt)
    manager = datadist.cache_manager
    tensors = shared.make_tensors(options, 2 * LAYERS, SHAPE)
    desc = CacheDesc(2 * LAYERS, SHAPE, DataType.DT_FLOAT16)
    cache = manager.register_blocks_cache(desc, shared.addresses_of(tensors), BlocksCacheKey(PROMPT))
    with shared.Partner(options) as decoder:
        decoder.meet("linked")
        layers = shared.Layers(options, LAYERS)
        configs = [  # each has a result of its own
            TransferWithCacheKeyConfig(BlocksCacheKey(DECODER), range(1), range(1)),
            TransferWithCacheKeyConfig(BlocksCacheKey(DECODER), range(1, LAYERS), range(1, LAYERS)),
        ]
        task = manager.transfer_cache_async(cache, layers, configs, PROMPT_BLOCKS, DECODER_BLOCKS)
        for layer in range(LAYERS):
            for number in (2 * layer, 2 * layer + 1):  # K and V: the model's work
                for block in PROMPT_BLOCKS:
                    tensors[number][block] = shared.value(number, block)
            layers.record(layer)
        if task.get_results(10_000) != [LLMStatusCode.LLM_SUCCESS] * 2:
            sys.exit(f"the transfer failed: {task.get_results()}")
        decoder.meet("sent")
        decoder.meet("unlinked")
    manager.unregister_cache(cache.cache_id)
    datadist.finalize()
    print("the blocks were sent layer by layer")


def decoder(options: argparse.Namespace) -> None:
    datadist = shared.start(options, LLMRole.DECODER, DECODER)
    manager = datadist.cache_manager
    tensors = shared.make_tensors(options, 2 * LAYERS, SHAPE)
    desc = CacheDesc(2 * LAYERS, SHAPE, DataType.DT_FLOAT16)
    cache = manager.register_blocks_cache(desc, shared.addresses_of(tensors), BlocksCacheKey(DECODER))
    cluster = shared.cluster_at(PROMPT, options.prompt)
    with shared.Partner(options) as prompt:
        shared.link(datadist, cluster)
        prompt.meet("linked")
        prompt.meet("sent")
        shared.check(tensors, DECODER_BLOCKS, PROMPT_BLOCKS)
        shared.unlink(datadist, cluster)
        prompt.meet("unlinked")
    manager.unregister_cache(cache.cache_id)
    datadist.finalize()
    print("every layer is right")


if __name__ == "__main__":
    options = shared.parser(__doc__).parse_args()
    (prompt if options.role == "p" else decoder)(options)
