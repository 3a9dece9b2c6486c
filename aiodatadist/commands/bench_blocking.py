"""What a blocking call of the drop-in costs beside the least that it has to do: a part of `bench latency`."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from time import perf_counter_ns
from typing import TYPE_CHECKING, Final

import numpy as np

from aiodatadist.llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    Placement,
)

from .bench_memory import PEER_ID, Half
from .failure import CommandError

if TYPE_CHECKING:
    from .bench_transfers import Seconds, Site

__all__ = ["blocking_pulls", "handed_over_pulls"]

_NODE_ID: Final = PEER_ID + 50
_TIMEOUT_MS: Final = 60_000


@contextlib.contextmanager
def blocking_pulls(site: Site, address: str, count: int) -> Iterator[Callable[[], Seconds]]:
    """Have a node of the drop-in around the body; yields what pulls `count` blocks one by one and times each."""
    config = LLMConfig()
    config.enable_cache_manager = config.enable_remote_cache_accessible = True
    config.sync_kv_timeout = _TIMEOUT_MS
    node = LLMDataDist(LLMRole.DECODER, _NODE_ID)
    node.init(config.generate_options())
    try:
        peer = LLMClusterInfo()
        peer.remote_cluster_id = PEER_ID
        peer.append_local_ip_info("127.0.0.1", 0)
        host, port = address.rsplit(":", 1)
        peer.append_remote_ip_info(host, int(port))
        status, _ = node.link_clusters([peer], _TIMEOUT_MS)
        if status is not LLMStatusCode.LLM_SUCCESS:
            raise CommandError(f"the drop-in cannot link {address}: {status}")
        memory = np.zeros((site.cache.geometry.num_blocks, site.here.block), np.uint8)
        desc = CacheDesc(1, list(memory.shape), DataType.DT_UINT8, Placement.HOST)
        caches = node.cache_manager
        cache = caches.register_blocks_cache(desc, [int(memory.ctypes.data)], remote_accessible=True)
        key = BlocksCacheKey(PEER_ID, site.key.model_id)
        here, there = site.here.index[:count].tolist(), site.remote.index[:count].tolist()

        def pull() -> Seconds:
            took = []
            for source, target in zip([[block] for block in there], [[block] for block in here], strict=True):
                began = perf_counter_ns()
                caches.pull_blocks(key, cache, source, target)
                took.append(perf_counter_ns() - began)
            return np.array(took) * 1e-9

        pull()
        if wrong := Half.of(memory, site.here.index[:count]).wrong(site.remote.index[:count]):
            raise CommandError(f"blocking pulls: {wrong} of {count} blocks are not what was sent")
        yield pull
    finally:
        node.finalize()


def handed_over_pulls(site: Site, count: int, loop: asyncio.AbstractEventLoop) -> Callable[[], Seconds]:
    """Return what does by hand what a blocking call has to do: it wakes the loop, which awaits, and wakes it back."""
    pull, key, cache = site.dd.cache_manager.pull_blocks, site.key, site.cache
    here, there = site.here.index[:count].tolist(), site.remote.index[:count].tolist()

    def step() -> Seconds:
        took = []
        over = threading.Lock()
        over.acquire()

        def ended(transfer: asyncio.Future[None]) -> None:
            failures.append(transfer.exception())
            over.release()

        def start(source: list[int], target: list[int]) -> None:
            transfer = pull(key, cache, source, target)
            if transfer.done():
                ended(transfer)
            else:
                transfer.add_done_callback(ended)

        failures: list[BaseException | None] = []
        for source, target in zip([[block] for block in there], [[block] for block in here], strict=True):
            began = perf_counter_ns()
            loop.call_soon_threadsafe(start, source, target)
            over.acquire()
            took.append(perf_counter_ns() - began)
        if failure := next(filter(None, failures), None):
            raise failure
        return np.array(took) * 1e-9

    return step
