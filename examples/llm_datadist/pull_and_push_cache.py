"""Contiguous caches, one batch entry for each request: the decoder pulls one, and the prompt node pushes another.

Start one process with `--role p` and one with `--role d`; shared.py says how.
"""

from __future__ import annotations

import argparse

import shared
from llm_datadist import CacheDesc, CacheKeyByIdAndIndex, DataType, LLMRole

PROMPT, DECODER = 1, 2
TENSORS, SHAPE = 4, (4, 256, 8)  # K and V of 2 layers; requests, tokens, elements of a token


def prompt(options: argparse.Namespace) -> None:
    datadist = shared.start(options, LLMRole.PROMPT, PROMPT, options.prompt)
    manager = datadist.cache_manager
    tensors = shared.make_tensors(options, TENSORS, SHAPE)
    cache = manager.register_cache(
        CacheDesc(TENSORS, SHAPE, DataType.DT_FLOAT16), shared.addresses_of(tensors), remote_accessible=True
    )
    shared.fill(tensors, range(4))
    with shared.Partner(options) as decoder:
        theirs = decoder.exchange(cache.cache_id)
        decoder.meet("pulled")
        manager.push_cache(CacheKeyByIdAndIndex(DECODER, theirs, 2), cache, src_batch_index=3)
        decoder.meet("pushed")
        decoder.meet("unlinked")
    manager.unregister_cache(cache.cache_id)
    datadist.finalize()
    print("one entry was pulled, and one was pushed")


def decoder(options: argparse.Namespace) -> None:
    datadist = shared.start(options, LLMRole.DECODER, DECODER)
    manager = datadist.cache_manager
    tensors = shared.make_tensors(options, TENSORS, SHAPE)
    cache = manager.register_cache(
        CacheDesc(TENSORS, SHAPE, DataType.DT_FLOAT16), shared.addresses_of(tensors), remote_accessible=True
    )
    cluster = shared.cluster_at(PROMPT, options.prompt)
    with shared.Partner(options) as prompt:
        theirs = prompt.exchange(cache.cache_id)
        shared.link(datadist, cluster)
        manager.pull_cache(CacheKeyByIdAndIndex(PROMPT, theirs, 1), cache, batch_index=0)
        shared.check(tensors, [0], [1])
        # The first 100 tokens of another request, 16 bytes each.
        manager.pull_cache(CacheKeyByIdAndIndex(PROMPT, theirs, 2), cache, batch_index=1, size=100 * 16)
        shared.check_entry(tensors[3][1][:100], shared.value(3, 2))
        shared.check_entry(tensors[3][1][100:], 0.0)
        prompt.meet("pulled")
        prompt.meet("pushed")
        shared.check(tensors, [2], [3])
        shared.unlink(datadist, cluster)
        prompt.meet("unlinked")
    manager.unregister_cache(cache.cache_id)
    datadist.finalize()
    print("every entry is right")


if __name__ == "__main__":
    options = shared.parser(__doc__).parse_args()
    (prompt if options.role == "p" else decoder)(options)
