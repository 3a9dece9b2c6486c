"""Prefill and decode on two NPUs as an inference framework has them, with llm_datadist; here without an NPU as well.

    python -m aiodatadist.llm_datadist --cpu examples/ascend_pd.py --role p
    python -m aiodatadist.llm_datadist --cpu examples/ascend_pd.py --role d

On Ascend leave `--cpu` out, and give each process an NPU (`--device_id`); `--prompt IP:PORT` says where the prompt node
listens, on both sides, and `--backend hixl` takes HIXL by its name. The port after it is the framework's own.

What a framework does with llm_datadist are the four parts of this file: it sets up a node, it manages a KV cache whose
blocks the node moves, it hands requests over from prefill to decode, and it releases everything in the right order. The
model is a toy whose next token depends on its whole KV cache, so that a wrong block is a wrong answer.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    Placement,
)

PROMPT, DECODER = 1, 2  # cluster ids
LAYERS, BLOCKS, BLOCK_TOKENS, WIDTH = 4, 64, 16, 8
SHAPE = (BLOCKS, BLOCK_TOKENS, WIDTH)
VOCABULARY, NEW_TOKENS = 251, 12
PATIENCE = 60.0  # seconds that one side waits for the other


# 1. A node: once a process and NPU, before anything else. -----------------------------------------------------------


def start_node(options: argparse.Namespace, role: LLMRole, cluster_id: int, listen: str | None) -> LLMDataDist:
    config = LLMConfig()
    config.device_id = options.device_id
    config.enable_cache_manager = True
    config.enable_remote_cache_accessible = True
    config.sync_kv_timeout = 5000
    if options.backend == "hixl":
        config.transfer_backend = "hixl"
    if listen is not None:
        config.listen_ip_info = listen
    node = LLMDataDist(role, cluster_id)
    node.init(config.generate_options())
    return node


# 2. The KV cache: memory of the framework, registered as a whole, and blocks that it gives to requests. -------------


class KvCache:
    """K and V of every layer, in blocks of tokens."""

    def __init__(self, options: argparse.Namespace, node: LLMDataDist, cluster_id: int) -> None:
        self.manager = node.cache_manager
        self.free = list(range(BLOCKS))
        self.on_npu = options.memory == "torch"
        if self.on_npu:
            import torch
            import torch_npu  # noqa: F401  # it gives torch its npu

            torch.npu.set_device(options.device_id)
            self.tensors: list[Any] = [torch.zeros(*SHAPE, dtype=torch.float16).npu() for _ in range(2 * LAYERS)]
            addresses = [tensor.data_ptr() for tensor in self.tensors]
        else:
            self.tensors = [np.zeros(SHAPE, np.float16) for _ in range(2 * LAYERS)]
            addresses = [tensor.ctypes.data for tensor in self.tensors]
        desc = CacheDesc(2 * LAYERS, SHAPE, DataType.DT_FLOAT16, Placement.DEVICE)
        # Registered before the node links anybody, and for as long as it runs.
        self.cache: Cache = self.manager.register_blocks_cache(desc, addresses, BlocksCacheKey(cluster_id))

    def allocate(self, tokens: int) -> list[int]:
        number = -(-tokens // BLOCK_TOKENS)
        if number > len(self.free):
            sys.exit(f"{number} blocks are wanted, and {len(self.free)} are free")
        taken, self.free = self.free[:number], self.free[number:]
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        self.free += blocks

    def write(self, blocks: Sequence[int], position: int, token: int) -> None:
        """Compute K and V of one token: small whole numbers, which float16 has exactly."""
        block, row = blocks[position // BLOCK_TOKENS], position % BLOCK_TOKENS
        for number, tensor in enumerate(self.tensors):
            tensor[block, row] = entry(number, position, token)

    def next_token(self, blocks: Sequence[int], length: int) -> int:
        """Attend to all tokens so far."""
        total = 0
        for number, tensor in enumerate(self.tensors):
            rows = [self.host(tensor[block]) for block in blocks]
            total += (number + 1) * int(np.concatenate(rows)[:length].astype(np.int64).sum())
        return total % VOCABULARY

    def host(self, tensor: Any) -> np.ndarray[Any, Any]:
        if not self.on_npu:
            return np.asarray(tensor)
        return np.asarray(tensor.cpu().numpy())


def entry(number: int, position: int, token: int) -> int:
    return (7 * token + 3 * number + position) % 61


def expected(prompt: Sequence[int]) -> list[int]:
    """Return what one machine alone would answer, without any cache."""
    tokens = list(prompt)
    for _ in range(NEW_TOKENS):
        sums = (
            (number + 1) * WIDTH * entry(number, position, token)
            for number in range(2 * LAYERS)
            for position, token in enumerate(tokens)
        )
        tokens.append(sum(sums) % VOCABULARY)
    return tokens[len(prompt) :]


# 3. The hand-over: requests, first tokens and lists of blocks are the framework's to carry. -------------------------


class Messages:
    """Lines of JSON between the two engines."""

    def __init__(self, connected: socket.socket) -> None:
        connected.settimeout(PATIENCE)
        self.socket = connected
        self.lines = connected.makefile("r")

    def send(self, **message: Any) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        line = self.lines.readline()
        message: dict[str, Any] = json.loads(line) if line else {"kind": "gone"}
        return message

    def close(self) -> None:
        self.lines.close()
        self.socket.close()


def prefill(options: argparse.Namespace) -> None:
    node = start_node(options, LLMRole.PROMPT, PROMPT, options.prompt)
    kv = KvCache(options, node, PROMPT)
    host, port = split(options.prompt)
    held: dict[int, list[int]] = {}  # blocks that the decoder has yet to pull
    with socket.create_server((host, port + 1)) as server:
        server.settimeout(PATIENCE)
        connected, _ = server.accept()
    decoder = Messages(connected)
    while (message := decoder.receive())["kind"] not in ("end", "gone"):
        number = message["request"]
        if message["kind"] == "pulled":
            # Only now: before it the decoder may still be reading them.
            kv.release(held.pop(number))
            continue
        prompt = message["prompt"]
        blocks = held[number] = kv.allocate(len(prompt))
        for position, token in enumerate(prompt):
            kv.write(blocks, position, token)
        if kv.on_npu:
            import torch

            torch.npu.synchronize()  # the blocks are final before anybody hears of them
        decoder.send(kind="filled", request=number, blocks=blocks, token=kv.next_token(blocks, len(prompt)))
    decoder.close()
    # The decoder has unlinked, or is gone: nobody reads here any more.
    release(node, kv, [])
    print(f"prefill is done, and {len(held)} requests were left over")


def decode(options: argparse.Namespace) -> None:
    # With HIXL a node that links has to listen as well.
    node = start_node(options, LLMRole.DECODER, DECODER, options.decoder if options.backend == "hixl" else None)
    kv = KvCache(options, node, DECODER)
    peer = LLMClusterInfo()
    peer.remote_cluster_id = PROMPT
    peer.append_local_ip_info(split(options.decoder)[0], 0)
    peer.append_remote_ip_info(*split(options.prompt))
    host, port = split(options.prompt)
    engine = Messages(connect(host, port + 1))
    link(node, peer)
    wrong = 0
    for number, prompt in enumerate(prompts(options.requests)):
        engine.send(kind="prompt", request=number, prompt=prompt)
        filled = engine.receive()
        if filled["kind"] == "gone":
            sys.exit("the prompt node is gone")
        blocks = kv.allocate(len(prompt) + NEW_TOKENS)
        pull(node, kv, peer, filled["blocks"], blocks[: len(filled["blocks"])])
        engine.send(kind="pulled", request=number)
        answer = [filled["token"]]
        for position in range(len(prompt), len(prompt) + NEW_TOKENS - 1):
            kv.write(blocks, position, answer[-1])
            answer.append(kv.next_token(blocks, position + 1))
        kv.release(blocks)
        wrong += answer != expected(prompt)
        print(f"request {number}: {len(prompt)} tokens in, out {answer}")
    release(node, kv, [peer])
    engine.send(kind="end")
    engine.close()
    if wrong:
        sys.exit(f"{wrong} of {options.requests} answers are wrong")
    print(f"{options.requests} answers are right")


def link(node: LLMDataDist, peer: LLMClusterInfo) -> None:
    """Link, for as long as the prompt node may take to come up."""
    limit = time.monotonic() + PATIENCE
    while (status := node.link_clusters([peer], 5000)[1][0]) != LLMStatusCode.LLM_SUCCESS:
        if time.monotonic() > limit:
            sys.exit(f"linking failed: {status}")
        time.sleep(0.2)


def pull(node: LLMDataDist, kv: KvCache, peer: LLMClusterInfo, there: Sequence[int], here: Sequence[int]) -> None:
    """Fetch blocks; a link that has timed out is made anew, once."""
    for last in (False, True):
        try:
            kv.manager.pull_blocks(BlocksCacheKey(PROMPT), kv.cache, list(there), list(here))
            return
        except LLMException as why:
            if last or why.status_code not in (LLMStatusCode.LLM_TIMEOUT, LLMStatusCode.LLM_NOT_YET_LINK):
                raise
        node.unlink_clusters([peer], 5000, force=True)
        link(node, peer)


# 4. Release: the side that reads unlinks first, then both take their memory back, and end their nodes. --------------


def release(node: LLMDataDist, kv: KvCache, peers: list[LLMClusterInfo]) -> None:
    if peers:
        node.unlink_clusters(peers, 5000)
    kv.manager.unregister_cache(kv.cache.cache_id)
    node.finalize()


# The command line, and what the two engines would else get from their users. ----------------------------------------


def prompts(number: int) -> Iterator[list[int]]:
    for request in range(number):
        length = 5 + 17 * request % 90
        yield [(11 * request + 5 * position) % VOCABULARY for position in range(length)]


def split(address: str) -> tuple[str, int]:
    ip, port = address.split(":")
    return ip, int(port)


def connect(host: str, port: int) -> socket.socket:
    limit = time.monotonic() + PATIENCE
    while True:
        try:
            return socket.create_connection((host, port), timeout=PATIENCE)
        except OSError:
            if time.monotonic() > limit:
                raise
            time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    has_torch = all(importlib.util.find_spec(name) for name in ("torch", "torch_npu"))
    parser.add_argument("--role", choices=("p", "d"), required=True, help="prefill or decode")
    parser.add_argument("--prompt", metavar="IP:PORT", default="127.0.0.1:26000", help="where the prompt node listens")
    parser.add_argument("--decoder", metavar="IP:PORT", default="127.0.0.1:26010", help="where the decoder is")
    parser.add_argument("--device_id", type=int, default=0, help="the NPU")
    parser.add_argument("--backend", choices=("default", "hixl"), default="default", help="llm.TransferBackend")
    parser.add_argument("--memory", choices=("torch", "numpy"), default="torch" if has_torch else "numpy")
    parser.add_argument("--requests", type=int, default=8)
    options = parser.parse_args()
    (prefill if options.role == "p" else decode)(options)


if __name__ == "__main__":
    main()
