"""Links of the backend hixl: each side links, and each side's link counts.

aiodatadist has one link between two nodes, which either side may end. Here it ends when both have unlinked, or one
forces. So each side must know whether the other one counts. It says so by a cache of one byte, which it registers for
the link's time: `_key_of` names it, and the table of caches, which each side always has of the other, tells of its
coming and going.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

import numpy as np

from .. import Cache, CacheKey, ClusterInfo, DataDist, DataDistError, Link
from .utils import log

__all__ = ["CountedLinks"]

_MARK: Final = 0x6169_6F5F_6C69_6E6B
_ASK: Final = b"aiodatadist: do you see that I have linked you?"
_ANSWER: Final = b"aiodatadist: I see that you have linked me"
_ANSWER_SECONDS: Final = 1.0


def _key_of(owner: int, peer: int) -> CacheKey:
    """Return the key by which `owner` says that it has linked `peer`."""
    return CacheKey(owner, _MARK, peer)


def _log_failure(peer: int, unlinked: asyncio.Future[None]) -> None:
    if not unlinked.cancelled() and (why := unlinked.exception()) is not None:
        log.warn("cluster %d is unlinked here, and has not answered: %s", peer, why)


class CountedLinks:
    """Who of both sides counts a link, for all links of a node. Belongs to its loop.

    Parameters
    ----------
    node : DataDist
        Open.
    """

    def __init__(self, node: DataDist) -> None:
        self._node = node
        self._markers: dict[int, Cache] = {}  # by peer
        self._mine: dict[int, Link] = {}  # that this side has linked
        self._theirs: set[int] = set()  # peers that are known to count
        self._answers: dict[int, asyncio.Event] = {}
        self._watching = (
            asyncio.create_task(self._watch(), name="llm-datadist-watch"),
            asyncio.create_task(self._read(), name="llm-datadist-read"),
        )

    async def close(self) -> None:
        """Stop looking at what peers do."""
        for task in self._watching:
            task.cancel()
        await asyncio.wait(self._watching)

    def is_mine(self, peer: int) -> bool:
        """Say whether there is a link to a peer that this side counts."""
        return peer in self._mine and self._mine[peer] is self._node.links.get(peer)

    async def link(self, info: ClusterInfo, seconds: float) -> None:
        """Link a peer, and count it; it knows when this returns."""
        peer = info.cluster_id
        self._forget(peer)
        # Before the link, so that a new one begins with it.
        marker = self._markers[peer] = self._node.cache_manager.register_cache(
            [np.zeros((1, 1), np.uint8)], keys=[_key_of(self._node.cluster_id, peer)], remote="r"
        )
        try:
            await marker.ready()
            self._mine[peer] = await self._node.link(info, timeout=seconds)
        except BaseException:
            self._forget(peer)
            raise
        if self._counts(peer):
            await self._ask(peer, marker, min(seconds, _ANSWER_SECONDS))

    async def unlink(self, info: ClusterInfo, seconds: float, force: bool) -> None:
        """Count no longer; the link ends if the peer does not count either, or by force."""
        self._forget(info.cluster_id)
        if force or not self._counts(info.cluster_id):
            await self._node.unlink(info, timeout=seconds, force=force)

    def _forget(self, peer: int) -> None:
        self._mine.pop(peer, None)
        marker = self._markers.pop(peer, None)
        if marker is not None:
            # Its memory is nobody else's: when it is quiet does not matter.
            _ = self._node.cache_manager.unregister_cache(marker)

    def _counts(self, peer: int) -> bool:
        """Say whether the peer counts the link."""
        link = self._node.links.get(peer)
        return link is not None and _key_of(peer, self._node.cluster_id) in link.slots

    # The peer's side. -------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """End links that nobody counts any more, and forget what has ended with its link."""
        async for _ in self._node.events():
            for peer in {*self._theirs, *self._mine, *self._node.links}:
                if self._counts(peer):
                    self._theirs.add(peer)
                elif peer in self._theirs:
                    self._theirs.discard(peer)
                    if peer in self._node.links and peer not in self._markers:
                        self._node.unlink(ClusterInfo(peer)).add_done_callback(partial(_log_failure, peer))
                if peer in self._mine and not self.is_mine(peer):
                    self._forget(peer)

    async def _ask(self, peer: int, marker: Cache, seconds: float) -> None:
        """Wait until the peer has seen the marker. A peer that does not answer is no reason to fail."""
        answered = self._answers[peer] = asyncio.Event()
        try:
            async with asyncio.timeout(seconds):
                await self._say(peer, marker, _ASK)
                await answered.wait()
        except (TimeoutError, DataDistError) as why:
            log.warn("cluster %d does not say that it has seen the link: %r", peer, why)
        finally:
            if self._answers.get(peer) is answered:
                del self._answers[peer]

    async def _say(self, peer: int, marker: Cache, text: bytes) -> None:
        """Send a note behind the news of the marker: with a pull of the peer's marker."""
        key = _key_of(peer, self._node.cluster_id)
        await self._node.cache_manager.pull_cache(key, marker, tensor_num_per_layer=1, notify=text)

    async def _read(self) -> None:
        async for note in self._node.notifications():
            if note.payload == _ANSWER and (answered := self._answers.get(note.cluster_id)) is not None:
                answered.set()
            elif note.payload == _ASK and (marker := self._markers.get(note.cluster_id)) is not None:
                try:
                    await self._say(note.cluster_id, marker, _ANSWER)
                except DataDistError as why:
                    log.warn("cluster %d cannot be answered: %s", note.cluster_id, why)
