"""What `LLMDataDist.init` makes of its options."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ..configs import LLMRole
from ..status import raise_if_false

__all__ = ["ClusterConfig", "EngineConfig", "Pool"]

_MIB: Final = 2**20
# What HIXL calls what llm_datadist passes on to it.
_HIXL_NUMBERS: Final = {"rdma_traffic_class": "RdmaTrafficClass", "rdma_service_level": "RdmaServiceLevel"}
_HIXL_TEXTS: Final = (("llm.LocalCommRes", "LocalCommRes"), ("llm.GlobalResourceConfig", "GlobalResourceConfig"))


@dataclass(frozen=True)
class ClusterConfig:
    """A node of the first version: its id, its role, and the content of ``llm.ClusterInfo``."""

    cluster_id: int
    role: LLMRole
    info: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_options(cls, cluster_id: int, role: LLMRole, options: Mapping[str, str]) -> ClusterConfig:
        """Read it from options."""
        return cls(cluster_id, role, json.loads(options.get("llm.ClusterInfo") or "{}"))


@dataclass(frozen=True)
class Pool:
    """Memory that `CacheManager.allocate_cache` allocates from, in bytes."""

    nbytes: int
    page_bytes: int

    @classmethod
    def from_json(cls, key: str, text: str) -> Pool | None:
        """Read ``{"memory_size": bytes, "page_shift": 10..30}``; None for an empty text."""
        if not text:
            return None
        try:
            given = json.loads(text)
        except ValueError as why:
            given = why
        raise_if_false(isinstance(given, dict), "{}={:.200} is no JSON object", key, text)
        size, shift = given.get("memory_size"), given.get("page_shift", 16)
        raise_if_false(type(size) is int and size > 0, "memory_size of {} is {!r}, and must be bytes", key, size)
        raise_if_false(type(shift) is int and 10 <= shift <= 30, "page_shift of {} is {!r}, not 10..30", key, shift)
        raise_if_false(
            1 <= size >> shift < 2**32 - 1, "memory_size={} of {} is no number of pages of 2**{}", size, key, shift
        )
        return cls(size, max(1 << shift, 4096))


@dataclass(frozen=True)
class EngineConfig:
    """The options of the engine, read and checked.

    Attributes
    ----------
    cluster_id : int
    role : LLMRole
    listen : tuple of str and int, or None
        Where to listen.
    transfer_seconds : float
        Deadline of a transfer.
    remote_accessible : bool
        Whether peers name caches by id, and pulls need caches that are registered for peers.
    hixl : bool
        Whether each side links, and each side's link counts.
    local_comm_res : str
    device_pool, host_pool : Pool or None
    link_total_seconds : int
        Of a two-sided link; 0: its default.
    link_retry_count : int
    rdma : tuple of str and int
        Fields of `Config` for verbs that the options set.
    device_id : int or None
        The NPU; None: not given.
    hixl_options : tuple of str and str
        `Config.hixl_options` that the options set.
    """

    cluster_id: int
    role: LLMRole
    listen: tuple[str, int] | None = None
    transfer_seconds: float = 1.0
    remote_accessible: bool = False
    hixl: bool = False
    local_comm_res: str = ""
    device_pool: Pool | None = None
    host_pool: Pool | None = None
    link_total_seconds: int = 0
    link_retry_count: int = 1
    rdma: tuple[tuple[str, int], ...] = ()
    device_id: int | None = None
    hixl_options: tuple[tuple[str, str], ...] = ()

    @classmethod
    def from_options(cls, cluster_id: int, role: LLMRole, options: Mapping[str, str]) -> EngineConfig:
        """Read the options of `LLMDataDist.init`; unknown keys are ignored.

        Raises
        ------
        LLMException
            ``LLM_PARAM_INVALID``: a value cannot be used.
        """
        device_id = _number(options, "ge.exec.deviceId", 0, 0, 2**31 - 1)
        backend = options.get("llm.TransferBackend")
        raise_if_false(backend in (None, "hixl"), "llm.TransferBackend={!r:.80} is not 'hixl'", backend)
        hixl = backend == "hixl"
        traffic_class = _number(options, "llm.RdmaTrafficClass", 132, 0, 255 if hixl else 2**32 - 1)
        raise_if_false(not hixl or traffic_class % 4 == 0, "llm.RdmaTrafficClass={} is no multiple of 4", traffic_class)
        service_level = _number(options, "llm.RdmaServiceLevel", 4, 0, 7 if hixl else 2**32 - 1)
        # The other backend takes any number, and what no device has means nothing.
        rdma = []
        if "llm.RdmaTrafficClass" in options and traffic_class <= 255 and traffic_class % 4 == 0:
            rdma.append(("rdma_traffic_class", traffic_class))
        if "llm.RdmaServiceLevel" in options and service_level <= 7:
            rdma.append(("rdma_service_level", service_level))
        for_hixl = [(_HIXL_NUMBERS[name], str(number)) for name, number in rdma]
        for_hixl += [(name, options[key]) for key, name in _HIXL_TEXTS if options.get(key)]
        port = options.get("llm.ListenPort")
        return cls(
            cluster_id,
            role,
            listen=None if port is None else (options["llm.ListenIp"], int(port)),
            transfer_seconds=_number(options, "llm.SyncKvCacheWaitTime", 1000, 1, 2**31 - 1) / 1000,
            remote_accessible=_flag(options, "llm.EnableRemoteCacheAccessible"),
            hixl=hixl,
            local_comm_res=options.get("llm.LocalCommRes", ""),
            device_pool=Pool.from_json("llm.MemPoolConfig", options.get("llm.MemPoolConfig", "")),
            host_pool=Pool.from_json("llm.HostMemPoolConfig", options.get("llm.HostMemPoolConfig", "")),
            link_total_seconds=_number(options, "llm.LinkTotalTime", 0, 0, 2**31 - 1),
            link_retry_count=_number(options, "llm.LinkRetryCount", 1, 1, 100),
            rdma=tuple(rdma),
            device_id=device_id if "ge.exec.deviceId" in options else None,
            hixl_options=tuple(for_hixl),
        )


def _number(options: Mapping[str, str], key: str, default: int, low: int, high: int) -> int:
    text = options.get(key)
    if text is None:
        return default
    raise_if_false(
        type(text) is str and text.isascii() and text.isdecimal() and len(text) <= 20,
        "{}={!r:.80} is no decimal number", key, text,
    )  # fmt: skip
    raise_if_false(low <= int(text) <= high, "{}={} is outside {}..{}", key, text, low, high)
    return int(text)


def _flag(options: Mapping[str, str], key: str) -> bool:
    text = options.get(key, "0")
    raise_if_false(text in ("0", "1"), "{}={!r:.80} is neither '0' nor '1'", key, text)
    return text == "1"
