"""For tests of what is built on aiodatadist: a simulated cluster on a virtual clock, and helpers for real processes.

Importing this imports nothing else; each name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .clock import SimulationStuck, VirtualLoop, run
    from .cluster import SimCluster
    from .faults import Fault, FaultScript, Way
    from .network import Access
    from .peers import PeerDied, PeerError, PeerFailed, PeerProcess, TestSide, spawn_peer
    from .proxy import FaultProxy
    from .trace import ReplayDiverged, Trace

_WHERE = {
    "Access": "network",
    "Fault": "faults",
    "FaultProxy": "proxy",
    "FaultScript": "faults",
    "PeerDied": "peers",
    "PeerError": "peers",
    "PeerFailed": "peers",
    "PeerProcess": "peers",
    "ReplayDiverged": "trace",
    "SimCluster": "cluster",
    "SimulationStuck": "clock",
    "TestSide": "peers",
    "Trace": "trace",
    "VirtualLoop": "clock",
    "Way": "faults",
    "run": "clock",
    "spawn_peer": "peers",
}

__all__ = [
    "Access",
    "Fault",
    "FaultProxy",
    "FaultScript",
    "PeerDied",
    "PeerError",
    "PeerFailed",
    "PeerProcess",
    "ReplayDiverged",
    "SimCluster",
    "SimulationStuck",
    "TestSide",
    "Trace",
    "VirtualLoop",
    "Way",
    "run",
    "spawn_peer",
]


def __getattr__(name: str) -> Any:
    module = _WHERE.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{module}", __name__), name)
