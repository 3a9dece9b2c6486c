"""What the state machines of `test_sim_machines` have in common: a simulated cluster that waits between their rules.

Nothing happens in it but while a rule runs: `run` starts what the rule asks for and lets the virtual clock go on for as
long as that takes. What hangs raises `SimulationStuck`, with everything that waits, instead of hanging.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine

import aiodatadist as adt
from aiodatadist.testing import Access, SimCluster, VirtualLoop, Way

from .quiet import Broken

T = TypeVar("T")

# Virtual seconds. All that is started has a deadline below.
LONGEST = 300.0

WAYS = {
    "good": Way(fragment=128),
    "lossy": Way(latency=(1e-5, 2e-3), loss=0.05, resend=0.02, split=0.2, fragment=128),
    "jumbled": Way(latency=(1e-5, 5e-3), reorder=0.5, reorder_by=0.05, duplicate=0.3, visible=(0.0, 0.02), fragment=64),
    "slow": Way(latency=(1e-3, 2e-3), bandwidth=2e5, fragment=256),
}
ways = st.sampled_from(sorted(WAYS))
pauses = st.sampled_from((0.0, 1e-4, 1e-3, 1e-2, 0.2, 3.0))
# From one that nobody notices to one that ends the link.
holdups = st.sampled_from((1e-3, 0.05, 0.5, 5.0))


class SimMachine(RuleBasedStateMachine):
    """A machine with a cluster: `begin` makes it, `end` says what must hold at rest."""

    runner: asyncio.Runner | None = None
    left_out: tuple[str, ...] = ()

    def begin(self, seed: int, way: str, start: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Make the cluster, and do what `start` does."""
        self.runner = asyncio.Runner(loop_factory=VirtualLoop)
        self.broken = False
        self.loop_errors: list[str] = []
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.runner.get_loop().set_exception_handler(lambda loop, context: self.loop_errors.append(repr(context)))
        self.sim = SimCluster(seed, way=WAYS[way], limit=1e6, left_out=self.left_out)

        async def enter() -> None:
            await self.sim.__aenter__()
            await start()

        self.run(enter())

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Let time go on until a coroutine has ended."""
        assert self.runner is not None
        try:
            result = self.runner.run(coroutine)
            if self.loop_errors:
                raise Broken(f"the loop's exception handler was called: {self.loop_errors}")
            for task in [task for task in self.tasks if task.done()]:
                del self.tasks[task]
                task.result()
        except BaseException:
            self.broken = True
            raise
        return result

    def go_on(self, seconds: float) -> None:
        """Let so much time pass, or as much as a few turns of the loop take."""
        self.run(asyncio.sleep(seconds))

    async def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Start a task that goes on beside the rules to come. It has to end by itself."""
        self.tasks[asyncio.create_task(coroutine)] = None

    async def end(self) -> None:
        """Check what must hold when everything has come to its end, and is at rest."""
        raise NotImplementedError

    async def settle(self) -> None:
        """Heal what is broken, and wait for the tasks."""
        self.sim.heal()
        if self.tasks:
            _, left = await asyncio.wait(self.tasks, timeout=LONGEST)
            if left:
                raise Broken(f"these never end: {left}")

    async def at_rest(self, *datadists: adt.DataDist) -> None:
        """Wait until no operation and no lease is left."""
        until = self.sim.now() + LONGEST
        while any(left := [what_is_left(dd) for dd in datadists]):
            if self.sim.now() > until:
                raise Broken(f"no rest: {left}")
            await asyncio.sleep(0.1)

    def teardown(self) -> None:
        if self.runner is None:
            return
        try:
            if not self.broken:
                self.run(self.end())
                self.run(self.sim.__aexit__(None, None, None))
                hosts = self.sim.network.hosts.values()
                if any(host.engine is not None and not host.engine.released for host in hosts):
                    raise Broken("an engine outlives its DataDist")
                if any(host.ends for host in hosts):
                    raise Broken("a connection outlives its DataDist")
                tasks = asyncio.all_tasks(self.runner.get_loop())
                if tasks:
                    raise Broken(f"tasks outlive the cluster: {tasks}")
            else:
                # The failure is told already; nothing here may hide it.
                with contextlib.suppress(Exception):
                    why = Broken()
                    self.runner.run(self.sim.__aexit__(type(why), why, None))
        finally:
            with contextlib.suppress(Exception):
                self.runner.close()


def what_is_left(dd: adt.DataDist) -> dict[str, Any]:
    """Return what an idle DataDist must not have."""
    leases = dd.stats()["leases"]
    left: dict[str, Any] = {
        name: leases[name] for name in ("held", "ending", "blocks", "deferred_bytes") if leases[name]
    }
    if rows := dd.dump():
        left["operations"] = rows
    return left


class Operation:
    """A transfer between a user and the owner, and which memory it may touch until when."""

    def __init__(self, sim: SimCluster, kind: str, user: int, owner: int, mine: list[int], theirs: list[int]) -> None:
        self.kind = kind
        self.user, self.owner = user, owner
        self.incarnations = {user: sim.network.host(user).incarnation, owner: sim.network.host(owner).incarnation}
        self.mine, self.theirs = mine, theirs
        self.future: asyncio.Future[Any] | None = None
        self.ends = 0
        self.well = False
        self.fenced = False

    def __repr__(self) -> str:
        return f"<{self.kind} of {self.user}: {self.mine} here, {self.theirs} there, {self.future!r}>"

    @property
    def quiet(self) -> bool:
        """Whether it can touch the memory of the owner no more."""
        return self.fenced or self.well

    def permits(self, access: Access, block: int) -> bool:
        """Say whether an access of its user is one that it may make."""
        if access.incarnation != self.incarnations.get(access.cluster_id):
            return False
        if access.cluster_id == self.user:
            done = self.future is not None and self.future.done()
            return block in self.mine and access.write == (self.kind == "pull") and not done
        return block in self.theirs and access.write == (self.kind != "pull") and not self.quiet


class Shadow:
    """Sees each access to memory while it happens, and knows who may make it.

    Parameters
    ----------
    sim : SimCluster
    block_bytes : int
        Of every cache; each process has one.
    """

    def __init__(self, sim: SimCluster, block_bytes: int) -> None:
        self.sim = sim
        self.block_bytes = block_bytes
        self.operations: list[Operation] = []
        self.caches: dict[tuple[int, int], int] = {}  # by cluster and incarnation
        self.gone: set[tuple[int, int, int]] = set()
        self.seen = 0
        sim.watch(self._see)

    def know(self, cluster_id: int, cache: adt.Cache) -> None:
        """Take note of the cache of a process; an earlier one of it may be touched by what began before, if at all."""
        self.caches[cluster_id, self.sim.network.host(cluster_id).incarnation] = cache.id

    def unregistered(self, cluster_id: int, incarnation: int, cache_id: int) -> None:
        """Nobody may touch this cache any more."""
        self.gone.add((cluster_id, incarnation, cache_id))

    def _see(self, access: Access) -> None:
        self.seen += 1
        if (access.cluster_id, access.incarnation, access.cache_id) in self.gone:
            raise Broken(f"{access}: the cache was unregistered")
        first, last = access.offset // self.block_bytes, (access.offset + access.nbytes - 1) // self.block_bytes
        for block in range(first, last + 1):
            if not any(
                operation.permits(access, block)
                for operation in self.operations
                if operation.user == access.by_cluster
                and operation.incarnations[operation.user] == access.by_incarnation
            ):
                raise Broken(f"{access}: nobody may touch block {block}, among {self.operations}")


def rows(cache: adt.Cache) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
    """Return the tensors of a cache of bytes."""
    return list(cache.tensors)
