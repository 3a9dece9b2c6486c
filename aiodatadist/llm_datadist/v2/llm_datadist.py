"""`LLMDataDist`: one node."""

from __future__ import annotations

from typing import ClassVar

from ..configs import LLMClusterInfo, LLMRole
from ..status import LLMStatusCode
from ..utils.utils import check_isinstance, check_uint64
from .cache_manager import CacheManager
from .config import EngineConfig as EngineConfig
from .llm_types import RegisterMemStatus

__all__ = ["LLMDataDist"]


class LLMDataDist:
    """One node."""

    llm_engine_instance: ClassVar[LLMDataDist | None] = None

    def __init__(self, role: LLMRole, cluster_id: int) -> None:
        check_isinstance("role", role, LLMRole)
        check_uint64("cluster_id", cluster_id)
        self._role = role
        self._cluster_id = int(cluster_id)
        self._engine_options: dict[str, str] = {}
        self._is_initialized = False

    def init(self, options: dict[str, str]) -> None:
        """Open the node."""

    def finalize(self) -> None:
        """Close the node."""

    @property
    def cluster_id(self) -> int:
        """Its id."""
        return self._cluster_id

    @property
    def cache_manager(self) -> CacheManager:
        """Its caches."""
        raise RuntimeError("llm datadist is not initialized")

    def link_clusters(
        self, clusters: list[LLMClusterInfo], timeout: int = 3000
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        """Link peers."""
        raise RuntimeError("llm datadist is not initialized")

    def unlink_clusters(
        self, clusters: list[LLMClusterInfo], timeout: int = 3000, force: bool = False
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        """Unlink peers."""
        raise RuntimeError("llm datadist is not initialized")

    # Two-sided links: rank_table.py.

    def link(self, comm_name: str, cluster_rank_info: dict[int, int], rank_table: str) -> int:
        """Join a communicator."""
        raise RuntimeError("llm datadist is not initialized")

    def unlink(self, comm_id: int) -> None:
        """Leave a communicator."""
        raise RuntimeError("llm datadist is not initialized")

    def query_register_mem_status(self, comm_id: int) -> RegisterMemStatus:
        """Say how far a communicator is."""
        raise RuntimeError("llm datadist is not initialized")


def _shutdown_handler() -> None:
    """Finalize the live instance."""
