"""Random rounds in a simulated cluster: one seed, one cluster, and rules that must hold whatever happens in it.

A shadow of the memory sees each access while it happens, and knows which operation may make it:

* the memory of who started an operation is quiet once its future is done, however it ended;
* that of the other side is quiet once it has ended well, and once a fence that began after it has;
* no operation reaches another incarnation than the one it was started for.

Beyond that every future ends, once; both sides agree on what was moved; leases and operations are gone at rest; nothing
gets stuck.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

import aiodatadist as adt
from aiodatadist import testing
from aiodatadist.testing import Access, SimCluster, Way

from .quiet import Broken, Tally

OWNER = 1
KEY = adt.BlocksCacheKey(OWNER)
BLOCKS, BLOCK_BYTES, TENSORS, LAYERS = 32, 256, 4, 2
LONGEST = 300.0  # virtual seconds in which all must end that has a deadline

WAYS = (
    Way(fragment=128),
    Way(latency=(1e-5, 2e-3), loss=0.05, resend=0.02, split=0.2, fragment=128),
    Way(latency=(1e-5, 5e-3), reorder=0.5, reorder_by=0.05, duplicate=0.3, visible=(0.0, 0.02), fragment=64),
    Way(latency=(1e-3, 2e-3), bandwidth=2e5, fragment=256),
)


@dataclasses.dataclass
class Watched:
    """An operation, and what is known of it."""

    future: asyncio.Future[Any]
    user: int
    incarnation: int  # of the owner
    fenced: bool = False


class Shadow:
    """Sees every access to memory, and breaks the round at the first that must not be."""

    def __init__(self, sim: SimCluster) -> None:
        self.sim = sim
        self.operations: dict[tuple[int, int, int], Watched] = {}
        sim.watch(self.see)

    def add(self, future: adt.Transfer[Any], user: int) -> None:
        op = getattr(future, "_op", 0)
        if op:
            key = user, self.sim.network.host(user).incarnation, op
            self.operations[key] = Watched(future, user, self.sim.network.host(OWNER).incarnation)

    def of(self, user: int) -> list[Watched]:
        return [operation for operation in self.operations.values() if operation.user == user]

    def see(self, access: Access) -> None:
        operation = self.operations.get((access.by_cluster, access.by_incarnation, access.op_id))
        if operation is None:
            return
        future = operation.future
        broken = ""
        if access.cluster_id == access.by_cluster:
            broken = "its future is done" if future.done() else ""
        elif access.incarnation != operation.incarnation:
            broken = "it was for another incarnation"
        elif operation.fenced:
            broken = "it was fenced off"
        elif future.done() and not future.cancelled() and future.exception() is None:
            broken = "it has ended well"
        if broken:
            raise Broken(f"seed {self.sim.seed}: {access} although {broken}")


class Round:
    """One seed."""

    def __init__(self, sim: SimCluster) -> None:
        self.sim = sim
        self.chance = sim.random
        self.shadow = Shadow(sim)
        self.tally = Tally(rounds=1)
        self.users = list(range(2, 2 + self.chance.choice((1, 1, 2))))
        self.mine: dict[int, adt.Cache] = {}
        self.theirs: adt.Cache
        self.free: dict[int, list[int]] = {user: list(range(BLOCKS)) for user in self.users}
        # Every user has blocks of the owner's to itself: two writes to one block would be a race of this test's.
        self.remote: dict[int, list[int]] = {
            user: list(range(number, BLOCKS, len(self.users))) for number, user in enumerate(self.users)
        }
        self.running: list[adt.Transfer[Any]] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.poisoned: dict[tuple[int, int], None] = {}
        self.config: dict[str, Any] = {
            "drain_timeout": self.chance.choice((0.0, 0.05, 1.0)),
            "heartbeat_limit": self.chance.choice((1.0, 10.0)),
            "transports": (self.chance.choice(("sim", "sim", "sim", "tcp")),),
        }

    async def start(self) -> None:
        await self.start_owner(first=True)
        for user in self.users:
            dd = await self.sim.datadist(user, adt.Role.DECODER, **self.config)
            tensors = [np.full((BLOCKS, BLOCK_BYTES), user, np.uint8) for _ in range(TENSORS)]
            self.mine[user] = dd.cache_manager.register_blocks_cache(tensors)
            await self.link(user)

    async def start_owner(self, *, first: bool = False) -> None:
        owner = await (self.sim.datadist(OWNER, adt.Role.PROMPT, **self.config) if first else self.sim.restart(OWNER))
        tensors = [np.full((BLOCKS, BLOCK_BYTES), 100 + i, np.uint8) for i in range(TENSORS)]
        self.theirs = owner.cache_manager.register_blocks_cache(tensors, key=KEY)

    async def link(self, user: int) -> None:
        """Link, and wait a while for the owner's cache; neither has to work out."""
        try:
            link = await self.sim[user].link(self.sim.info(OWNER), timeout=5.0)
        except adt.DataDistError:
            return
        for _ in range(50):
            if adt.CacheKeyByIdAndIndex(OWNER, self.theirs.id) in link.table:
                return
            await asyncio.sleep(5e-3)

    # What is done. ------------------------------------------------------------------------------------------

    def pick(self, user: int) -> tuple[list[int], list[int]]:
        count = self.chance.randint(0, min(6, len(self.free[user]), len(self.remote[user])))
        mine = [self.free[user].pop(self.chance.randrange(len(self.free[user]))) for _ in range(count)]
        theirs = [self.remote[user].pop(self.chance.randrange(len(self.remote[user]))) for _ in range(count)]
        return mine, theirs

    def move(self, user: int) -> None:
        """Start a transfer. Its blocks are given back when its future is done, and poisoned."""
        caches = self.sim[user].cache_manager
        mine, theirs = self.pick(user)
        for block in mine:
            self.poisoned.pop((user, block), None)
        kind = self.chance.choice(("pull", "pull", "push", "layers"))
        timeout = self.chance.choice((0.003, 0.05, 20.0, 20.0))
        notify = self.chance.choice((None, None, b"note"))
        cache, of_owner = self.mine[user], self.theirs
        options: dict[str, Any] = {"timeout": timeout, "notify": notify}
        gate: adt.LayerGate | None = None
        future: Any
        try:
            if kind == "pull":
                future = caches.pull_blocks(KEY, cache, theirs, mine, **options)
            elif kind == "push":
                future = caches.push_blocks(KEY, cache, mine, theirs, **options)
            else:
                gate = adt.LayerGate(LAYERS)
                target = adt.TransferWithCacheKeyConfig(KEY)
                future = caches.transfer_cache_async(cache, gate, [target], mine, theirs, **options)
        except adt.DataDistError:
            self.give_back(user, mine, theirs)
            return
        self.tally.causes[kind] += 1
        if kind != "layers":
            self.shadow.add(future, user)
        incarnation = self.sim.network.host(OWNER).incarnation

        def ended(future: asyncio.Future[Any]) -> None:
            error = None if future.cancelled() else future.exception()
            self.tally.ends["cancelled" if future.cancelled() else type(error).__name__ if error else "ok"] += 1
            if error is not None and not isinstance(error, adt.DataDistError):
                raise Broken(f"seed {self.sim.seed}: a {kind} ended with {error!r}")
            well = error is None and not future.cancelled()
            if well and kind == "layers":
                well = all(target.error is None for target in future.result())
            if well and kind != "layers" and self.sim.network.host(OWNER).incarnation == incarnation:
                for ours, other in zip(cache.tensors, of_owner.tensors, strict=False):
                    if not np.array_equal(ours[mine], other[theirs]):
                        raise Broken(f"seed {self.sim.seed}: a {kind} ended well, and the two sides differ")
            for tensor in cache.tensors:
                tensor[mine] = 0xEE
            for block in mine:
                self.poisoned[user, block] = None
            self.give_back(user, mine, theirs if kind == "pull" or well else [])

        future.add_done_callback(ended)
        self.running.append(future)
        if gate is not None:
            self.record(gate)

    def record(self, gate: adt.LayerGate) -> None:
        """Record layers later on, or one now and one not at all."""
        loop = asyncio.get_running_loop()
        layers = list(range(LAYERS))
        self.chance.shuffle(layers)
        for layer in layers:
            if self.chance.random() < 0.9:
                loop.call_later(self.chance.uniform(0, 0.02), gate.record, layer)
            else:
                loop.call_later(self.chance.uniform(0, 0.02), gate.fail, layer)

    def give_back(self, user: int, mine: list[int], theirs: list[int]) -> None:
        self.free[user] += mine
        self.remote[user] += theirs

    def cancel(self, user: int) -> None:
        if self.running:
            self.running[self.chance.randrange(len(self.running))].cancel()

    def fence(self, user: int) -> None:
        async def fence() -> None:
            before = self.shadow.of(user)
            incarnation = self.sim.network.host(OWNER).incarnation
            try:
                await self.sim[OWNER].fence(user, timeout=self.chance.choice((5.0, 60.0)))
            except adt.DataDistError:
                return
            for operation in before:
                if operation.incarnation == incarnation:
                    operation.fenced = True

        self.spawn(fence())

    def lease(self, user: int) -> None:
        """Hold blocks for a user, who adopts and releases, or does not."""

        async def hold() -> None:
            try:
                lease = self.sim[OWNER].cache_manager.hold(
                    self.theirs, [0, 1], self.chance.uniform(0.05, 1.0), peer=user
                )
                how = self.chance.choice(("nothing", "adopt", "release", "owner"))
                if how == "owner":
                    await lease.release()
                elif how != "nothing":
                    await self.sim[user].adopt_lease(OWNER, lease.id, timeout=5.0)
                    await asyncio.sleep(self.chance.uniform(0, 0.5))
                    if how == "release":
                        await self.sim[user].release_lease(OWNER, lease.id, timeout=5.0)
            except adt.DataDistError:
                return

        self.spawn(hold())

    def unlink(self, user: int) -> None:
        async def unlink() -> None:
            try:
                await self.sim[user].unlink(adt.ClusterInfo(OWNER), timeout=5.0, force=self.chance.random() < 0.3)
            except adt.DataDistError:
                return
            await self.link(user)

        self.spawn(unlink())

    def stall(self, user: int) -> None:
        ends = (user, OWNER) if self.chance.random() < 0.5 else (OWNER, user)
        self.sim.stall(*ends, self.chance.choice((0.01, 0.2, 3.0)))

    def stop(self, user: int) -> None:
        who = self.chance.choice((OWNER, user))
        self.sim.stop(who)
        asyncio.get_running_loop().call_later(self.chance.choice((0.01, 0.2, 3.0)), self.sim.resume, who)

    def cut(self, user: int) -> None:
        self.sim.cut(OWNER, user)

    async def crash(self, user: int) -> None:
        """Kill the owner, with what is on its way to it, and start it anew."""
        if self.chance.random() < 0.7:
            self.sim.stall(user, OWNER, self.chance.choice((0.02, 0.2)))
        await asyncio.sleep(self.chance.uniform(0, 0.005))
        self.sim.crash(OWNER, silent=self.chance.random() < 0.2)
        await asyncio.sleep(self.chance.choice((0.0, 0.0, 0.1)))
        await self.start_owner()

    def spawn(self, coroutine: Any) -> None:
        self.tasks.append(asyncio.get_running_loop().create_task(coroutine))

    ACTIONS = ("move",) * 10 + ("cancel",) * 3 + ("fence",) * 2 + ("lease", "unlink", "stall", "stall", "stop", "cut")

    async def run(self) -> Tally:
        await self.start()
        crashes = self.chance.random() < 0.4
        for _ in range(self.chance.randint(4, 16)):
            user = self.chance.choice(self.users)
            if crashes and self.chance.random() < 0.15:
                await self.crash(user)
            elif OWNER not in self.sim[user].links and self.chance.random() < 0.7:
                self.spawn(self.link(user))
            else:
                getattr(self, self.chance.choice(self.ACTIONS))(user)
            if self.chance.random() < 0.4:
                await asyncio.sleep(self.chance.choice((0.0, 1e-4, 1e-3, 1e-2, 1e-1)))
        await self.end()
        return self.tally

    # What must hold. ----------------------------------------------------------------------------------------

    async def end(self) -> None:
        self.sim.set_way(self.sim.network.way_between(OWNER, self.users[0]).replace(loss=0.0))
        self.sim.heal()
        pending = {*self.running, *self.tasks}
        if pending:
            _, left = await asyncio.wait(pending, timeout=LONGEST)
            if left:
                raise Broken(f"seed {self.sim.seed}: {len(left)} operations never end: {list(map(repr, left))}")
        for task in self.tasks:
            task.result()
        for user, block in self.poisoned:
            for tensor in self.mine[user].tensors:
                if not (tensor[block] == 0xEE).all():
                    raise Broken(
                        f"seed {self.sim.seed}: block {block} of cluster {user} was written after its transfer"
                    )
        # What was adopted and not released is renewed for as long as there is the link.
        await asyncio.wait([self.sim[user].unlink(adt.ClusterInfo(OWNER)) for user in self.users])
        until = self.sim.now() + LONGEST
        while not self.at_rest():
            if self.sim.now() > until:
                raise Broken(f"seed {self.sim.seed}: no rest: {[dd.dump() for dd in self.datadists()]}")
            await asyncio.sleep(0.25)

    def datadists(self) -> list[adt.DataDist]:
        return [self.sim[number] for number in (OWNER, *self.users)]

    def at_rest(self) -> bool:
        return not any(
            dd.dump() or dd.stats()["leases"]["held"] or dd.stats()["leases"]["ending"] for dd in self.datadists()
        )


def play(seed: int, left_out: tuple[str, ...] = ()) -> Tally:
    """Play one round. Raises `Broken`, or what else is wrong, with the seed."""

    failures: list[dict[str, Any]] = []

    async def main() -> Tally:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context))
        async with SimCluster(seed, limit=7200.0, left_out=left_out) as sim:
            sim.set_way(WAYS[seed % len(WAYS)])
            tally = await Round(sim).run()
        if any(not host.engine.released for host in sim.network.running if host.engine) or any(
            host.ends for host in sim.network.hosts.values()
        ):
            raise Broken(f"seed {seed}: something outlives the cluster")
        return tally

    tally = testing.run(main())
    if failures:
        raise Broken(f"seed {seed}: {failures}") from failures[0].get("exception")
    return tally


def play_all(seeds: Iterable[int]) -> Tally:
    """Play a round for each seed."""
    total, began = Tally(), time.monotonic()
    for seed in seeds:
        total += play(seed)
    total.seconds = time.monotonic() - began
    return total
