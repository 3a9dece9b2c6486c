"""The prompt node sends a request layer by layer while it computes, to addresses that the decoder has told it.

Start one process with `--role p` and one with `--role d`; shared.py says how.
"""

from __future__ import annotations

import argparse
import sys

import shared
from llm_datadist import CacheDesc, DataType, LLMRole, LLMStatusCode, TransferConfig

PROMPT, DECODER = 1, 2
LAYERS, SHAPE = 4, (4, 256, 8)  # requests, tokens, elements of a token
SLOT_BYTES = 256 * 8 * 2
PROMPT_SLOT, DECODER_SLOT = 1, 2


def prompt(options: argparse.Namespace) -> None:
    datadist = shared.start(options, LLMRole.PROMPT, PROMPT, options.prompt, remote_accessible=False)
    manager = datadist.cache_manager
    tensors = shared.make_tensors(options, 2 * LAYERS, SHAPE)
    cache = manager.register_cache(CacheDesc(2 * LAYERS, SHAPE, DataType.DT_FLOAT16), shared.addresses_of(tensors))
    with shared.Partner(options) as decoder:
        addresses = decoder.exchange(None)
        layers = shared.Layers(options, LAYERS)
        config = TransferConfig(DECODER, addresses, range(LAYERS), PROMPT_SLOT)
        task = manager.transfer_cache_async(cache, layers, [config])
        for layer in range(LAYERS):
            for number in (2 * layer, 2 * layer + 1):  # K and V: the model's work
                tensors[number][PROMPT_SLOT] = shared.value(number, PROMPT_SLOT)
            layers.record(layer)
        if task.synchronize(10_000) != LLMStatusCode.LLM_SUCCESS:
            sys.exit(f"the transfer failed: {task.get_results()}")
        decoder.meet("sent")
        decoder.meet("unlinked")
    manager.unregister_cache(cache.cache_id)
    datadist.finalize()
    print("the request was sent layer by layer")


def decoder(options: argparse.Namespace) -> None:
    datadist = shared.start(options, LLMRole.DECODER, DECODER, remote_accessible=False)
    manager = datadist.cache_manager
    tensors = shared.make_tensors(options, 2 * LAYERS, SHAPE)
    cache = manager.register_cache(
        CacheDesc(2 * LAYERS, SHAPE, DataType.DT_FLOAT16), shared.addresses_of(tensors), remote_accessible=True
    )
    cluster = shared.cluster_at(PROMPT, options.prompt)
    with shared.Partner(options) as prompt:
        shared.link(datadist, cluster)
        prompt.exchange([address + DECODER_SLOT * SLOT_BYTES for address in cache.tensor_addrs])
        prompt.meet("sent")
        shared.check(tensors, [DECODER_SLOT], [PROMPT_SLOT])
        shared.unlink(datadist, cluster)
        prompt.meet("unlinked")
    manager.unregister_cache(cache.cache_id)
    datadist.finalize()
    print("every layer is right")


if __name__ == "__main__":
    options = shared.parser(__doc__).parse_args()
    (prompt if options.role == "p" else decoder)(options)
