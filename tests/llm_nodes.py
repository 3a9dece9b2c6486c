"""Nodes of the drop-in for its tests: several in one process, which the interface itself forbids."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from aiodatadist.llm_datadist import (
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
)

from .hixl_standin import Acl
from .waiting import reserved_address, until_now

SUCCESS = LLMStatusCode.LLM_SUCCESS
INVALID = LLMStatusCode.LLM_PARAM_INVALID
PROMPT, DECODER = 1, 2
# Pages of a pool, of which each cache takes at least one.
POOL = '{"memory_size": 1048576, "page_shift": 12}'


def options(address: str = "", *, remote: bool = True, **changes: Any) -> dict[str, str]:
    """Return options as a script makes them; `changes` are properties of LLMConfig."""
    config = LLMConfig()
    config.device_id = 0
    config.enable_cache_manager = True
    config.enable_remote_cache_accessible = remote
    config.listen_ip_info = address
    config.sync_kv_timeout = 60_000
    for name, value in changes.items():
        setattr(config, name, value)
    return config.generate_options()


@contextlib.contextmanager
def node(cluster_id: int, address: str = "", role: LLMRole = LLMRole.MIX, **changes: Any) -> Iterator[LLMDataDist]:
    """Have an open node around the body, whether or not there are others."""
    made = LLMDataDist(role, cluster_id)
    others, LLMDataDist.llm_engine_instance = LLMDataDist.llm_engine_instance, None
    try:
        made.init(options(address, **changes))
    finally:
        LLMDataDist.llm_engine_instance = others
    try:
        yield made
    finally:
        made.finalize()


def cluster(cluster_id: int, address: str | None = None) -> list[LLMClusterInfo]:
    """Return what a script links or unlinks by."""
    info = LLMClusterInfo()
    info.remote_cluster_id = cluster_id
    info.append_local_ip_info("127.0.0.1", 0)
    if address is not None:
        ip, port = address.split(":")
        info.append_remote_ip_info(ip, int(port))
    return [info]


def linked_ids(one: LLMDataDist) -> set[int]:
    """Return the peers that a node is linked to."""
    assert one._llm_datadist is not None
    return set(one._llm_datadist.node.links)


def until_linked(one: LLMDataDist, *peers: int) -> None:
    """Wait until a node has heard of exactly these links."""
    until_now(lambda: linked_ids(one) == set(peers), f"{peers} are not linked")


@contextlib.contextmanager
def pair(**changes: Any) -> Iterator[tuple[LLMDataDist, LLMDataDist]]:
    """Have a prompt and a decoder that has linked it."""
    with (
        reserved_address() as address,
        node(PROMPT, address, LLMRole.PROMPT, **changes) as prompt,
        node(DECODER, "", LLMRole.DECODER, **changes) as decoder,
    ):
        assert decoder.link_clusters(cluster(PROMPT, address), 60_000) == (SUCCESS, [SUCCESS])
        until_linked(prompt, DECODER)
        yield prompt, decoder


class Memory:
    """Tensors of random bytes, and the cache that a node has over them."""

    npu: ClassVar[Acl | None] = None  # the stand-in, where tensors are to be an NPU's memory
    _held: ClassVar[list[int]] = []

    @classmethod
    @contextlib.contextmanager
    def on_npu(cls) -> Iterator[None]:
        """Have all tensors in memory of the stand-in's NPU, until the end of the block."""
        cls.npu = Acl()
        cls.npu.set_device()
        try:
            yield
        finally:
            for address in cls._held:
                cls.npu.free(address)
            cls._held.clear()
            cls.npu = None

    def __init__(
        self,
        owner: LLMDataDist,
        blocks: int = 8,
        nbytes: int = 64,
        tensors: int = 4,
        *,
        contiguous: bool = False,
        model: int = 0,
        seed: int = 1,
        shape: Sequence[int] = (),
        **register: Any,
    ) -> None:
        random = np.random.default_rng(seed)
        self._tensors = [random.integers(0, 255, (blocks, nbytes), np.uint8) for _ in range(tensors)]
        self._places: list[int] = []
        if self.npu is not None:
            self._places = [self.npu.malloc(blocks * nbytes) for _ in range(tensors)]
            self._held.extend(self._places)
            for place, tensor in zip(self._places, self._tensors, strict=True):
                self.npu.write(place, tensor.tobytes())
        self.desc = CacheDesc(tensors, list(shape) or [blocks, nbytes], DataType.DT_UINT8)
        caches = owner.cache_manager
        self.cache: Cache
        if contiguous:
            self.cache = caches.register_cache(self.desc, self.addrs, **register)
        else:
            self.cache = caches.register_blocks_cache(
                self.desc, self.addrs, BlocksCacheKey(owner.cluster_id, model), **register
            )

    @property
    def tensors(self) -> list[np.ndarray]:
        """The tensors, of which those on an NPU are copies."""
        if self.npu is None:
            return self._tensors
        contents = [self.npu.read(place, self._tensors[0].nbytes) for place in self._places]
        return [np.frombuffer(content, np.uint8).reshape(self._tensors[0].shape) for content in contents]

    def write(self, tensor: int, value: int) -> None:
        """Fill one tensor with a byte."""
        self._tensors[tensor][...] = value
        if self.npu is not None:
            self.npu.write(self._places[tensor], self._tensors[tensor].tobytes())

    @property
    def addrs(self) -> list[int]:
        return self._places or [int(tensor.ctypes.data) for tensor in self._tensors]


def status_of(error: BaseException) -> LLMStatusCode | None:
    return error.status_code if isinstance(error, LLMException) else None


@contextlib.contextmanager
def fails(status: LLMStatusCode, match: str | None = None) -> Iterator[None]:
    with pytest.raises(LLMException, match=match) as why:
        yield
    assert why.value.status_code is status, str(why.value)


class Waiter:
    """A thread that waits in a call, and what came of it."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.outcome: Any = None
        self._call = call
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.outcome = self._call()
        except LLMException as why:
            self.outcome = why.status_code
        except BaseException as why:
            self.outcome = why

    def join(self) -> Any:
        self.thread.join(60)
        assert not self.thread.is_alive()
        return self.outcome
