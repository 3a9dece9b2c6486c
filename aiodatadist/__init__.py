"""aiodatadist: KV caches from the node that prefilled them to the node that decodes, awaited in asyncio.

The names are LLM-DataDist's, the manners are asyncio's: `DataDist` links clusters, its `cache_manager` registers caches
and pulls or pushes blocks, and everything that waits is an awaitable with a deadline and a cancel that drains.
"""

from __future__ import annotations

import os

try:
    from . import _core as _core
except ModuleNotFoundError as why:
    if why.name != f"{__name__}._core":
        raise
    raise ImportError(
        "aiodatadist is not compiled here; run `pip install -e .` in the checkout, or leave its directory"
    ) from why

from .cache import CacheManager
from .config import Config
from .control.events import EventsLagged, EventStream, NotificationStream
from .control.leases import Lease
from .control.links import Link
from .datadist import DataDist
from .errors import (
    ArgumentError,
    ArgumentTypeError,
    BlockIndexError,
    BusyError,
    CacheAccessError,
    CacheError,
    CacheExists,
    CacheMismatch,
    CacheNotFound,
    ClosedError,
    ConfigError,
    DataDistError,
    ExtraMissing,
    FileLimitError,
    ForkedError,
    GateError,
    HandshakeError,
    InternalError,
    LayerFailed,
    LeaseError,
    LinkError,
    LinkRefusedError,
    LinkTimeout,
    MemoryStillExposed,
    ModelError,
    NotLinkedError,
    OutOfMemoryError,
    PartialTransferError,
    PeerLostError,
    ProtocolError,
    RegistrationError,
    Status,
    TransferAborted,
    TransferError,
    TransferTimeout,
    TransportError,
    TransportUnavailable,
    UsageError,
    WrongLoopError,
)
from .keys import NO_ID, BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from .layers import LayerGate, LayerSignal, LayerSynchronizer
from .layerwise import LayerTransferResult, TransferConfig, TransferTask, TransferWithCacheKeyConfig
from .observe import PendingOperation
from .pool import MemoryPool
from .registry import DEFAULT_TIMEOUT, Cache
from .transfer import Progress, Transfer
from .types import (
    Address,
    CacheAnnounced,
    CacheDesc,
    CacheGone,
    ClusterInfo,
    Geometry,
    LayerArrived,
    LeaseEnd,
    LeaseExpired,
    LeaseLost,
    LeaseReleased,
    LinkPath,
    LinkState,
    LinkStateChanged,
    Notification,
    PeerChanged,
    Placement,
    Role,
    TransferEnded,
)

__version__ = "0.1.0"

__all__ = [
    "DEFAULT_TIMEOUT",
    "NO_ID",
    "Address",
    "ArgumentError",
    "ArgumentTypeError",
    "BlockIndexError",
    "BlocksCacheKey",
    "BusyError",
    "Cache",
    "CacheAccessError",
    "CacheAnnounced",
    "CacheDesc",
    "CacheError",
    "CacheExists",
    "CacheGone",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "CacheManager",
    "CacheMismatch",
    "CacheNotFound",
    "ClosedError",
    "ClusterInfo",
    "Config",
    "ConfigError",
    "DataDist",
    "DataDistError",
    "EventStream",
    "EventsLagged",
    "ExtraMissing",
    "FileLimitError",
    "ForkedError",
    "GateError",
    "Geometry",
    "HandshakeError",
    "InternalError",
    "LayerArrived",
    "LayerFailed",
    "LayerGate",
    "LayerSignal",
    "LayerSynchronizer",
    "LayerTransferResult",
    "Lease",
    "LeaseEnd",
    "LeaseError",
    "LeaseExpired",
    "LeaseLost",
    "LeaseReleased",
    "Link",
    "LinkError",
    "LinkPath",
    "LinkRefusedError",
    "LinkState",
    "LinkStateChanged",
    "LinkTimeout",
    "MemoryPool",
    "MemoryStillExposed",
    "ModelError",
    "NotLinkedError",
    "Notification",
    "NotificationStream",
    "OutOfMemoryError",
    "PartialTransferError",
    "PeerChanged",
    "PeerLostError",
    "PendingOperation",
    "Placement",
    "Progress",
    "ProtocolError",
    "RegistrationError",
    "Role",
    "Status",
    "Transfer",
    "TransferAborted",
    "TransferConfig",
    "TransferEnded",
    "TransferError",
    "TransferTask",
    "TransferTimeout",
    "TransferWithCacheKeyConfig",
    "TransportError",
    "TransportUnavailable",
    "UsageError",
    "WrongLoopError",
    "__version__",
    "get_include",
    "install_as_llm_datadist",
]


def get_include() -> str:
    """Return the directory of ``aiodatadist/transport.h``, for out-of-tree transports.

    It lies in the package in an installed wheel, and beside the package in a checkout.
    """
    here = os.path.dirname(os.path.abspath(__file__))
    inside = os.path.join(here, "include")
    return inside if os.path.isdir(inside) else os.path.join(os.path.dirname(here), "include")


def install_as_llm_datadist() -> None:
    """Have ``import llm_datadist``, and any of its submodules, give `aiodatadist.llm_datadist` in this process.

    Call it before anything imports ``llm_datadist``; again is no error. Nothing on disk changes, and an installed
    llm_datadist is not touched.

    Raises
    ------
    UsageError
        Another llm_datadist is imported already. Nothing was changed.
    """
    from .llm_datadist import aliases

    aliases.install()
