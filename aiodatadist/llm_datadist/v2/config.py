"""What the first version made of its options."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..configs import LLMRole

__all__ = ["ClusterConfig", "EngineConfig"]


@dataclass(frozen=True)
class ClusterConfig:
    """A node of the first version: its id, its role, and the content of ``llm.ClusterInfo``."""

    cluster_id: int
    role: LLMRole
    info: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_options(cls, cluster_id: int, role: LLMRole, options: Mapping[str, str]) -> ClusterConfig:
        """Read it from the options of `LLMConfig`."""
        return cls(cluster_id, role, json.loads(options.get("llm.ClusterInfo") or "{}"))


@dataclass(frozen=True)
class EngineConfig:
    """What an engine is started with."""

    cluster_id: int
    role: LLMRole
    options: Mapping[str, str] = field(default_factory=dict)
