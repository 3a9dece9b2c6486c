"""With `transfer_backend="hixl"` each side links the other before it pulls, and the link ends when both have unlinked.

Start one process with `--role p` and one with `--role d`; shared.py says how. Both listen.
"""

from __future__ import annotations

import argparse

import shared
from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMConfig, LLMDataDist, LLMRole

PROMPT, DECODER = 1, 2
TENSORS, SHAPE = 4, (16, 16, 8)  # K and V of 2 layers; blocks, tokens, elements of a token
OFFSETS = {PROMPT: 0, DECODER: 1000}  # so that the two do not write the same


def main(options: argparse.Namespace) -> None:
    prompt = options.role == "p"
    me, other = (PROMPT, DECODER) if prompt else (DECODER, PROMPT)
    mine, theirs = (options.prompt, options.decoder) if prompt else (options.decoder, options.prompt)
    config = LLMConfig()
    config.device_id = options.device_id
    config.transfer_backend = "hixl"
    config.enable_cache_manager = True
    config.enable_remote_cache_accessible = True
    config.listen_ip_info = mine
    datadist = LLMDataDist(LLMRole.PROMPT if prompt else LLMRole.DECODER, me)
    datadist.init(config.generate_options())
    manager = datadist.cache_manager

    tensors = shared.make_tensors(options, TENSORS, SHAPE)
    desc = CacheDesc(TENSORS, SHAPE, DataType.DT_FLOAT16)
    cache = manager.register_blocks_cache(desc, shared.addresses_of(tensors), BlocksCacheKey(me))
    shared.fill(tensors, [1, 2], OFFSETS[me])
    cluster = shared.cluster_at(other, theirs)
    with shared.Partner(options) as partner:
        partner.meet("filled")
        shared.link(datadist, cluster)
        partner.meet("linked")
        manager.pull_blocks(BlocksCacheKey(other), cache, [1, 2], [10, 11])
        shared.check(tensors, [10, 11], [1, 2], OFFSETS[other])
        partner.meet("pulled")
        if prompt:
            shared.unlink(datadist, cluster)
        partner.meet("unlinked by one")
        if not prompt:
            # Its own link is there until it unlinks, too.
            manager.pull_blocks(BlocksCacheKey(other), cache, [2], [12])
            shared.check(tensors, [12], [2], OFFSETS[other])
            shared.unlink(datadist, cluster)
        partner.meet("unlinked")
    manager.unregister_cache(cache.cache_id)
    datadist.finalize()
    print("every block is right")


if __name__ == "__main__":
    main(shared.parser(__doc__).parse_args())
