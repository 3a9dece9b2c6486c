"""How a decode worker gets a prompt's KV by a ticket: adopt the lease, pull the blocks, release.

Or, where it was pushed into a reservation, how it takes that.
"""

from __future__ import annotations

import asyncio
import time

import aiodatadist as adt

from .background import have_seen
from .damage import digests_of, do_damage
from .errors import ServeError
from .metrics import WorkerMetrics
from .protocol import Ticket
from .transfer_errors import transfer_errors
from .units import Placed

__all__ = ["Fetcher"]


class Fetcher:
    """Pulls what tickets name.

    Parameters
    ----------
    dd : DataDist
    timeout : float
        Seconds for linking and moving together.
    metrics : WorkerMetrics
    damage : str, optional
        For tests: see `damage.WAYS`.
    """

    def __init__(self, dd: adt.DataDist, timeout: float, metrics: WorkerMetrics, damage: str | None = None) -> None:
        self._dd = dd
        self._metrics = metrics
        self._timeout = timeout
        self._damage = damage

    def look_at(self, ticket: Ticket, placed: Placed) -> None:
        """Compare what has arrived, in whatever way, with the ticket's digests, if it has any.

        Raises
        ------
        ServeError
            ``kv_damaged``.
        """
        unit, reserved = placed
        assert unit.cache is not None
        tensors = unit.cache.tensors
        blocks = reserved.blocks[: -(-ticket.prompt_tokens // unit.engine.layout.block_tokens)]
        if self._damage is not None:
            do_damage(self._damage, tensors, blocks)
        if ticket.digests:
            pairs = zip(ticket.digests, digests_of(tensors, blocks), strict=True)
            wrong = [index for index, (there, here) in enumerate(pairs) if there != here]
            if wrong:
                layer, block = divmod(wrong[0], len(blocks))
                raise ServeError(
                    "kv_damaged",
                    f"{len(wrong)} of {len(ticket.digests)} blocks of {ticket.request_id} are not what was sent, "
                    f"first block {block} of layer {layer}",
                )

    async def fetch(self, ticket: Ticket, placed: Placed) -> None:
        """Bring the ticket's blocks into the first ones that were reserved.

        When this ends, in whatever way, nothing writes into the reserved blocks any more, and the owner is told that
        the ticket's blocks are free (or, if it cannot be told, its lease runs out).

        Raises
        ------
        ServeError
            ``ticket_gone``, ``transfer_failed``, ``transfer_timeout`` or ``layout_mismatch``.
        """
        unit, reserved = placed
        assert unit.cache is not None
        owner = ticket.owner
        target = reserved.blocks[: len(ticket.blocks)]
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout

        def left() -> float:
            return max(deadline - loop.time(), 0.001)

        adopted = False
        try:
            with transfer_errors(ticket.request_id):
                await self._dd.link(adt.ClusterInfo(owner.cluster_id, owner.listen), timeout=self._timeout)
                await self._dd.adopt_lease(owner.cluster_id, ticket.lease, timeout=left())
                adopted = True
                began = time.perf_counter()
                await self._dd.cache_manager.pull_blocks(
                    adt.BlocksCacheKey(owner.cluster_id, owner.rank),
                    unit.cache,
                    ticket.blocks,
                    target,
                    timeout=left(),
                )
                self._metrics.moved("pull", len(target) * unit.engine.layout.block_bytes, time.perf_counter() - began)
                # False: the lease had ended, so the blocks may have held something else by the time they were read.
                adopted = False
                if not await self._dd.release_lease(owner.cluster_id, ticket.lease, timeout=left()):
                    raise ServeError(
                        "ticket_gone", f"the lease of {ticket.request_id} ended before its blocks were here"
                    )
        finally:
            if adopted:
                # Sent at the call; a task that is being cancelled need not wait for the answer.
                self._dd.release_lease(owner.cluster_id, ticket.lease).add_done_callback(have_seen)
