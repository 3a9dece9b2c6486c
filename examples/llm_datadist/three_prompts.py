"""One decoder links three prompt nodes in one call, and pulls from all of them at once, a thread for each.

Start three processes with `--role p --number 1` to 3, each with a `--prompt IP:PORT` of its own, and one with
`--role d --prompts` and the three addresses.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor

import shared
from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMRole

DECODER = 9
TENSORS, SHAPE = 4, (64, 16, 8)  # K and V of 2 layers; blocks, tokens, elements of a token
ROUNDS = 20


def prompt(options: argparse.Namespace) -> None:
    datadist = shared.start(options, LLMRole.PROMPT, options.number, options.prompt)
    tensors = shared.make_tensors(options, TENSORS, SHAPE)
    desc = CacheDesc(TENSORS, SHAPE, DataType.DT_FLOAT16)
    cache = datadist.cache_manager.register_blocks_cache(
        desc, shared.addresses_of(tensors), BlocksCacheKey(options.number)
    )
    shared.fill(tensors, range(64), 256 * options.number)
    with shared.Partner(options) as decoder:
        decoder.meet("filled")
        decoder.meet("unlinked")
    datadist.cache_manager.unregister_cache(cache.cache_id)
    datadist.finalize()
    print("the blocks were pulled")


def decoder(options: argparse.Namespace) -> None:
    datadist = shared.start(options, LLMRole.DECODER, DECODER)
    manager = datadist.cache_manager
    tensors = shared.make_tensors(options, TENSORS, SHAPE)
    desc = CacheDesc(TENSORS, SHAPE, DataType.DT_FLOAT16)
    cache = manager.register_blocks_cache(desc, shared.addresses_of(tensors), BlocksCacheKey(DECODER))
    prompts = [shared.Partner(options, address) for address in options.prompts]
    for prompt in prompts:
        prompt.meet("filled")
    numbers = range(1, len(prompts) + 1)
    clusters = [shared.cluster_at(number, address) for number, address in zip(numbers, options.prompts, strict=True)]
    shared.link(datadist, *clusters)

    def pull(number: int) -> None:
        for block in range(ROUNDS):
            manager.pull_blocks(BlocksCacheKey(number), cache, [block], [20 * (number - 1) + block])

    with ThreadPoolExecutor(len(prompts)) as threads:
        list(threads.map(pull, numbers))
    for number in numbers:
        mine = range(20 * (number - 1), 20 * number)
        shared.check(tensors, mine, range(ROUNDS), 256 * number)
    shared.unlink(datadist, *clusters)
    for prompt in prompts:
        with prompt:
            prompt.meet("unlinked")
    manager.unregister_cache(cache.cache_id)
    datadist.finalize()
    print("every block is right")


if __name__ == "__main__":
    parser = shared.parser(__doc__)
    parser.add_argument("--number", type=int, default=1, help="which prompt node this is, from 1")
    parser.add_argument("--prompts", metavar="IP:PORT", nargs="+", default=[], help="of all prompt nodes, by number")
    options = parser.parse_args()
    (prompt if options.role == "p" else decoder)(options)
