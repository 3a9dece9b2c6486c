"""The interface of `llm_datadist`, on aiodatadist: blocking calls for code that was written for Ascend.

A program that says ``from llm_datadist import LLMDataDist`` runs with it unchanged. Names, argument rules, exceptions
and numbers are the original's; where that one hangs or loses an error, this one does not: docs/migrating.md lists the
differences. Every call blocks its thread, lets others run, and waits on an event loop in a thread of its own.
"""

from __future__ import annotations

import os
from typing import Any

from .configs import LLMClusterInfo, LLMConfig, LlmConfig, LLMRole
from .data_type import DataType
from .status import LLMException, LLMStatusCode, Status
from .v2.llm_datadist import LLMDataDist
from .v2.llm_types import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    CacheTask,
    KvCache,
    LayerSynchronizer,
    MemInfo,
    Memtype,
    Placement,
    RegisterMemStatus,
    TransferConfig,
    TransferWithCacheKeyConfig,
)

__all__ = [
    "LLMDataDist",
    "LLMConfig",
    "LlmConfig",
    "LLMClusterInfo",
    "LLMRole",
    "LLMStatusCode",
    "LLMException",
    "Status",
    "DataType",
    "Placement",
    "Memtype",
    "MemInfo",
    "RegisterMemStatus",
    "CacheDesc",
    "Cache",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "BlocksCacheKey",
    "KvCache",
    "LayerSynchronizer",
    "TransferConfig",
    "TransferWithCacheKeyConfig",
    "CacheTask",
    "Tensor",  # of the first version, by __getattr__
    "TensorDesc",  # of the first version, by __getattr__
    "KvCacheManager",  # of the first version, by __getattr__
]

_V1_NAMES = ("Tensor", "TensorDesc", "KvCacheManager")

v2_list = [name for name in __all__ if name not in _V1_NAMES]
"""The names of the second version, the only one that is here."""

# Programs that run beside the original's libraries expect it of the import.
os.environ.setdefault("AUTO_USE_UC_MEMORY", "0")


def __getattr__(name: str) -> Any:
    if name in _V1_NAMES:
        raise ImportError(
            f"{name} is of the first version of llm_datadist, which is the package llm_datadist_v1; it is not here",
            name="llm_datadist_v1",
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
