"""The two-sided link: both call `link` with the same name, ranks and rank table, and neither listens.

Start one process with `--role p` and one with `--role d`; shared.py says how. With `--decoder_host` the decoder is on
another host, and the rank table says so.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import shared
from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMDataDist, LLMRole, RegisterMemStatus

PROMPT, DECODER = 1, 2
TENSORS, SHAPE = 4, (16, 16, 8)  # K and V of 2 layers; blocks, tokens, elements of a token
OFFSETS = {PROMPT: 0, DECODER: 1000}  # so that the two do not write the same


def rank_table(prompt_host: str, decoder_host: str) -> str:
    """Describe device 0 of the prompt node, and another one of the decoder."""
    devices = {
        host: [
            {"rank_id": str(rank), "device_id": str(rank), "device_ip": f"192.168.0.{rank + 1}"}
            for rank, where in enumerate((prompt_host, decoder_host))
            if where == host
        ]
        for host in (prompt_host, decoder_host)
    }
    servers = [{"server_id": host, "device": held} for host, held in devices.items()]
    table = {"version": "1.0", "status": "completed", "server_count": str(len(servers)), "server_list": servers}
    return json.dumps(table)


def until_ready(datadist: LLMDataDist, comm_id: int) -> None:
    while (status := datadist.query_register_mem_status(comm_id)) == RegisterMemStatus.PREPARING:
        time.sleep(0.01)
    if status != RegisterMemStatus.OK:
        sys.exit("linking failed")


def main(options: argparse.Namespace) -> None:
    prompt = options.role == "p"
    me, other = (PROMPT, DECODER) if prompt else (DECODER, PROMPT)
    datadist = shared.start(options, LLMRole.PROMPT if prompt else LLMRole.DECODER, me)
    manager = datadist.cache_manager
    tensors = shared.make_tensors(options, TENSORS, SHAPE)
    desc = CacheDesc(TENSORS, SHAPE, DataType.DT_FLOAT16)
    cache = manager.register_blocks_cache(desc, shared.addresses_of(tensors), BlocksCacheKey(me))
    shared.fill(tensors, [1, 2], OFFSETS[me])

    prompt_host, _ = shared.split(options.prompt)
    table = rank_table(prompt_host, options.decoder_host or prompt_host)
    comm_id = datadist.link(options.name, {PROMPT: 0, DECODER: 1}, table)
    until_ready(datadist, comm_id)
    with shared.Partner(options) as partner:
        partner.meet("ready")
        manager.pull_blocks(BlocksCacheKey(other), cache, [1, 2], [10, 11])
        shared.check(tensors, [10, 11], [1, 2], OFFSETS[other])
        partner.meet("pulled")
    datadist.unlink(comm_id)
    manager.unregister_cache(cache.cache_id)
    datadist.finalize()
    print("every block is right")


if __name__ == "__main__":
    parser = shared.parser(__doc__)
    parser.add_argument("--name", default="prompt-decoder", help="of the communicator")
    parser.add_argument("--decoder_host", metavar="IP", default="", help="the prompt node's, if it is left out")
    main(parser.parse_args())
