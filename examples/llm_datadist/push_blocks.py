"""The prompt node pushes blocks into the decoder's paged cache, over a link that the decoder has made.

Start one process with `--role p` and one with `--role d`; shared.py says how.
"""

from __future__ import annotations

import argparse

import shared
from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMRole

PROMPT, DECODER = 1, 2
TENSORS, SHAPE = 8, (32, 16, 8)  # K and V of 4 layers; blocks, tokens, elements of a token
PROMPT_BLOCKS, DECODER_BLOCKS = [0, 1, 2, 30], [9, 8, 20, 21]


def prompt(options: argparse.Namespace) -> None:
    datadist = shared.start(options, LLMRole.PROMPT, PROMPT, options.prompt)
    manager = datadist.cache_manager
    tensors = shared.make_tensors(options, TENSORS, SHAPE)
    desc = CacheDesc(TENSORS, SHAPE, DataType.DT_FLOAT16)
    cache = manager.register_blocks_cache(desc, shared.addresses_of(tensors), BlocksCacheKey(PROMPT))
    shared.fill(tensors, PROMPT_BLOCKS)
    with shared.Partner(options) as decoder:
        decoder.meet("linked")
        manager.push_blocks(BlocksCacheKey(DECODER), cache, PROMPT_BLOCKS, DECODER_BLOCKS)
        decoder.meet("pushed")
        decoder.meet("unlinked")
    manager.unregister_cache(cache.cache_id)
    datadist.finalize()
    print("the blocks were pushed")


def decoder(options: argparse.Namespace) -> None:
    datadist = shared.start(options, LLMRole.DECODER, DECODER)
    manager = datadist.cache_manager
    tensors = shared.make_tensors(options, TENSORS, SHAPE)
    desc = CacheDesc(TENSORS, SHAPE, DataType.DT_FLOAT16)
    cache = manager.register_blocks_cache(desc, shared.addresses_of(tensors), BlocksCacheKey(DECODER))
    cluster = shared.cluster_at(PROMPT, options.prompt)
    with shared.Partner(options) as prompt:
        shared.link(datadist, cluster)
        prompt.meet("linked")
        prompt.meet("pushed")
        shared.check(tensors, DECODER_BLOCKS, PROMPT_BLOCKS)
        shared.unlink(datadist, cluster)
        prompt.meet("unlinked")
    manager.unregister_cache(cache.cache_id)
    datadist.finalize()
    print("every block is right")


if __name__ == "__main__":
    options = shared.parser(__doc__).parse_args()
    (prompt if options.role == "p" else decoder)(options)
