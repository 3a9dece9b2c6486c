"""`CacheManager`: registers caches and moves them."""

from __future__ import annotations

__all__ = ["CacheManager"]


class CacheManager:
    """Registers caches and moves them."""
