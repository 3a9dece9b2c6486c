"""The prompts that a prefill worker holds for decode workers: each a lease of the library, and single use."""

from __future__ import annotations

from msgspec.structs import replace

import aiodatadist as adt

from .background import Tasks, have_seen
from .damage import digests_of
from .protocol import Generation, Peer, Ticket
from .pushing import Pushed
from .units import Placed

__all__ = ["Tickets"]


class Tickets:
    """Held prompts by request id and attempt.

    The blocks stay as long as the library's lease: until it is released, or nobody has renewed it for its TTL, and
    then until no transfer can touch them any more.

    Parameters
    ----------
    dd : DataDist
    peer : Peer
        This worker; `rank` is filled in.
    ttl : float
        Seconds.
    digests : bool
        Have tickets say what is in the blocks.
    """

    def __init__(self, dd: adt.DataDist, peer: Peer, ttl: float, *, digests: bool = False) -> None:
        self._caches = dd.cache_manager
        self._peer = peer
        self._ttl = ttl
        self._digests = digests
        self._held: dict[tuple[str, int], adt.Lease] = {}
        self._keepers = Tasks()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: tuple[str, int]) -> bool:
        return key in self._held

    def hold(self, generation: Generation, attempt: int, placed: Placed, token: int) -> Ticket:
        """Hold a computed prompt. From here on its blocks are freed by the end of the lease alone."""
        unit, reserved = placed
        assert unit.cache is not None
        lease = self._caches.hold(unit.cache, reserved.blocks, self._ttl)
        key = (generation.request_id, attempt)
        self._held[key] = lease
        self._keepers.start(self._keep(key, lease, placed))
        digests = digests_of(unit.cache.tensors, reserved.blocks) if self._digests else []
        return self._ticket(key, placed, token, digests, lease.id)

    def pushed(self, generation: Generation, attempt: int, placed: Placed, pushed: Pushed) -> Ticket:
        """Say what was pushed into a reservation; nothing is held."""
        return self._ticket((generation.request_id, attempt), placed, pushed.token, pushed.digests, None)

    def _ticket(
        self, key: tuple[str, int], placed: Placed, token: int, digests: list[str], lease: int | None
    ) -> Ticket:
        unit, reserved = placed
        return Ticket(
            request_id=key[0],
            attempt=key[1],
            owner=replace(self._peer, rank=unit.rank),
            lease=0 if lease is None else lease,
            blocks=[] if lease is None else reserved.blocks,
            prompt_tokens=len(reserved.prompt),
            cached_tokens=reserved.cached,
            token=token,
            ttl_s=self._ttl,
            pushed=lease is None,
            digests=digests,
        )

    def release(self, request_id: str, attempt: int) -> int:
        """Give a ticket up; return how many there were. Freed a little later, by the library's word."""
        lease = self._held.get((request_id, attempt))
        if lease is None:
            return 0
        lease.release().add_done_callback(have_seen)
        return 1

    async def close(self) -> None:
        """Release all, and wait for it."""
        for request_id, attempt in list(self._held):
            self.release(request_id, attempt)
        await self._keepers.wait(2.0)

    async def _keep(self, key: tuple[str, int], lease: adt.Lease, placed: Placed) -> None:
        try:
            await lease.wait_over()
        finally:
            del self._held[key]
            placed.free()
