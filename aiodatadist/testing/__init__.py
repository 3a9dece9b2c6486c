"""For tests of what is built on aiodatadist: a simulated cluster on a virtual clock, and helpers for real processes.

Importing this imports nothing else; each name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .peers import PeerDied, PeerError, PeerFailed, PeerProcess, TestSide, spawn_peer
    from .proxy import FaultProxy

_WHERE = {
    "FaultProxy": "proxy",
    "PeerDied": "peers",
    "PeerError": "peers",
    "PeerFailed": "peers",
    "PeerProcess": "peers",
    "TestSide": "peers",
    "spawn_peer": "peers",
}

__all__ = [
    "FaultProxy",
    "PeerDied",
    "PeerError",
    "PeerFailed",
    "PeerProcess",
    "TestSide",
    "spawn_peer",
]


def __getattr__(name: str) -> Any:
    module = _WHERE.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{module}", __name__), name)
