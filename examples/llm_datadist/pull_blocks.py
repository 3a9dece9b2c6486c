"""The decoder pulls blocks of the prompt node's paged cache.

Start one process with `--role p` and one with `--role d`; shared.py says how.
"""

from __future__ import annotations

import argparse

import shared
from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMConfig, LLMDataDist, LLMRole, Placement

PROMPT, DECODER = 1, 2
TENSORS, SHAPE = 8, (32, 16, 8)  # K and V of 4 layers; blocks, tokens, elements of a token
PROMPT_BLOCKS, DECODER_BLOCKS = [7, 3, 11, 12, 13], [0, 1, 2, 3, 4]


def prompt(options: argparse.Namespace) -> None:
    config = LLMConfig()
    config.device_id = options.device_id
    config.enable_cache_manager = True
    config.enable_remote_cache_accessible = True
    config.listen_ip_info = options.prompt
    datadist = LLMDataDist(LLMRole.PROMPT, PROMPT)
    datadist.init(config.generate_options())
    manager = datadist.cache_manager

    tensors = shared.make_tensors(options, TENSORS, SHAPE)
    desc = CacheDesc(TENSORS, SHAPE, DataType.DT_FLOAT16, Placement.DEVICE)
    cache = manager.register_blocks_cache(desc, shared.addresses_of(tensors), BlocksCacheKey(PROMPT))
    shared.fill(tensors, PROMPT_BLOCKS)
    with shared.Partner(options) as decoder:
        decoder.meet("filled")
        decoder.meet("unlinked")
    manager.unregister_cache(cache.cache_id)
    datadist.finalize()
    print("the blocks were pulled")


def decoder(options: argparse.Namespace) -> None:
    config = LLMConfig()
    config.device_id = options.device_id
    config.enable_cache_manager = True
    config.enable_remote_cache_accessible = True
    datadist = LLMDataDist(LLMRole.DECODER, DECODER)
    datadist.init(config.generate_options())
    manager = datadist.cache_manager

    tensors = shared.make_tensors(options, TENSORS, SHAPE)
    desc = CacheDesc(TENSORS, SHAPE, DataType.DT_FLOAT16, Placement.DEVICE)
    cache = manager.register_blocks_cache(desc, shared.addresses_of(tensors), BlocksCacheKey(DECODER))
    cluster = shared.cluster_at(PROMPT, options.prompt)
    with shared.Partner(options) as prompt:
        prompt.meet("filled")
        shared.link(datadist, cluster)
        manager.pull_blocks(BlocksCacheKey(PROMPT), cache, PROMPT_BLOCKS, DECODER_BLOCKS)
        shared.check(tensors, DECODER_BLOCKS, PROMPT_BLOCKS)
        # And one layer alone: the second one there becomes the last one here.
        manager.pull_blocks(
            BlocksCacheKey(PROMPT), cache, [7], [20], src_layer_range=range(1, 2), dst_layer_range=range(3, 4)
        )
        shared.check_entry(tensors[6][20], shared.value(2, 7))
        shared.check_entry(tensors[7][20], shared.value(3, 7))
        shared.unlink(datadist, cluster)
        prompt.meet("unlinked")
    manager.unregister_cache(cache.cache_id)
    datadist.finalize()
    print("every block is right")


if __name__ == "__main__":
    options = shared.parser(__doc__).parse_args()
    (prompt if options.role == "p" else decoder)(options)
