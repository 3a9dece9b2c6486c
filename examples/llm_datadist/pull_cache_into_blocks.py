"""The prompt node keeps requests in a contiguous cache of a memory pool; the decoder pulls one by its key, into blocks.

Start one process with `--role p` and one with `--role d`; shared.py says how.
"""

from __future__ import annotations

import argparse
import json

import shared
from llm_datadist import BlocksCacheKey, CacheDesc, CacheKey, DataType, LLMConfig, LLMDataDist, LLMRole

PROMPT, DECODER = 1, 2
TENSORS = 4  # K and V of 2 layers
SLOTS = (2, 48, 8)  # requests, tokens, elements of a token
BLOCKS = (8, 16, 8)  # blocks, tokens, elements: 3 blocks for a request
REQUESTS = [101, 102]


def prompt(options: argparse.Namespace) -> None:
    config = LLMConfig()
    config.device_id = options.device_id
    config.enable_cache_manager = True
    config.listen_ip_info = options.prompt
    config.mem_pool_cfg = json.dumps({"memory_size": 4 << 20, "page_shift": 16})
    datadist = LLMDataDist(LLMRole.PROMPT, PROMPT)
    datadist.init(config.generate_options())
    manager = datadist.cache_manager

    keys = [CacheKey(PROMPT, req_id=request, model_id=0) for request in REQUESTS]
    cache = manager.allocate_cache(CacheDesc(TENSORS, SLOTS, DataType.DT_FLOAT16), keys)
    tensors = shared.tensors_at(options, cache.tensor_addrs, SLOTS)
    shared.fill(tensors, range(len(REQUESTS)))
    with shared.Partner(options) as decoder:
        decoder.meet("filled")
        # The memory is freed when the keys are gone: one is pulled, and one is taken back.
        manager.deallocate_cache(cache)
        manager.remove_cache_key(keys[0])
        decoder.meet("unlinked")
    datadist.finalize()
    print("a request was pulled")


def decoder(options: argparse.Namespace) -> None:
    datadist = shared.start(options, LLMRole.DECODER, DECODER, remote_accessible=False)
    manager = datadist.cache_manager
    tensors = shared.make_tensors(options, TENSORS, BLOCKS)
    desc = CacheDesc(TENSORS, BLOCKS, DataType.DT_FLOAT16)
    cache = manager.register_blocks_cache(desc, shared.addresses_of(tensors), BlocksCacheKey(DECODER))
    cluster = shared.cluster_at(PROMPT, options.prompt)
    with shared.Partner(options) as prompt:
        prompt.meet("filled")
        shared.link(datadist, cluster)
        manager.pull_blocks(CacheKey(PROMPT, req_id=102, model_id=0), cache, [], [5, 2, 7])
        for block in (5, 2, 7):
            shared.check(tensors, [block], [1])
        shared.unlink(datadist, cluster)
        prompt.meet("unlinked")
    manager.unregister_cache(cache.cache_id)
    datadist.finalize()
    print("every block is right")


if __name__ == "__main__":
    options = shared.parser(__doc__).parse_args()
    (prompt if options.role == "p" else decoder)(options)
