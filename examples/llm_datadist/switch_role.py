"""Two nodes change places: the decoder pulls, both unlink and switch roles, and then the other one links and pulls.

Start one process with `--role p` and one with `--role d`, what each is at first; shared.py says how. `--decoder` says
where the decoder listens once it is the prompt node.
"""

from __future__ import annotations

import argparse
from typing import Any

import shared
from llm_datadist import BlocksCacheKey, Cache, CacheDesc, DataType, LLMConfig, LLMDataDist, LLMRole

FIRST, SECOND = 1, 2
TENSORS, SHAPE = 4, (16, 16, 8)  # K and V of 2 layers; blocks, tokens, elements of a token
OFFSETS = {FIRST: 0, SECOND: 1000}  # so that the two do not write the same


def pull(datadist: LLMDataDist, cache: Cache, tensors: list[Any], cluster_id: int, address: str) -> None:
    """Be the decoder."""
    cluster = shared.cluster_at(cluster_id, address)
    shared.link(datadist, cluster)
    datadist.cache_manager.pull_blocks(BlocksCacheKey(cluster_id), cache, [1, 2], [10, 11])
    shared.check(tensors, [10, 11], [1, 2], OFFSETS[cluster_id])
    shared.unlink(datadist, cluster)


def main(options: argparse.Namespace) -> None:
    first = options.role == "p"
    me, other = (FIRST, SECOND) if first else (SECOND, FIRST)
    role = LLMRole.PROMPT if first else LLMRole.DECODER
    datadist = shared.start(options, role, me, options.prompt if first else "")
    manager = datadist.cache_manager
    tensors = shared.make_tensors(options, TENSORS, SHAPE)
    desc = CacheDesc(TENSORS, SHAPE, DataType.DT_FLOAT16)
    cache = manager.register_blocks_cache(desc, shared.addresses_of(tensors), BlocksCacheKey(me))
    shared.fill(tensors, [1, 2], OFFSETS[me])
    with shared.Partner(options) as partner:
        partner.meet("filled")
        if not first:
            pull(datadist, cache, tensors, other, options.prompt)
        partner.meet("unlinked")
        if first:
            datadist.switch_role(LLMRole.DECODER)
        else:
            config = LLMConfig()
            config.listen_ip_info = options.decoder
            datadist.switch_role(LLMRole.PROMPT, config.generate_options())
        partner.meet("switched")
        if first:
            pull(datadist, cache, tensors, other, options.decoder)
        partner.meet("unlinked")
    manager.unregister_cache(cache.cache_id)
    datadist.finalize()
    print("pulled in both roles, every block is right")


if __name__ == "__main__":
    main(shared.parser(__doc__).parse_args())
