"""State machines over the simulated cluster: Hypothesis looks for the steps that break a rule, and for the fewest.

Each machine does what users do and what goes wrong, in any order, and checks while it happens and at rest: memory is
touched only by who may, every operation ends once, both sides agree, nothing is held, told twice, lost or left over.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule, run_state_machine_as_test

import aiodatadist as adt

from .sim_machine import LONGEST, Broken, Operation, Shadow, SimMachine, holdups, pauses, ways

OWNER, USERS = 1, (2, 3)
KEY = adt.BlocksCacheKey(OWNER)
BLOCKS, BLOCK_BYTES, TENSORS, LAYERS = 24, 256, 4, 2
SOURCES, TARGETS = range(BLOCKS // 2), range(BLOCKS // 2, BLOCKS)  # of the owner: users pull from these, push to those
POISON = 0xEE

# A failure is made smaller, which takes a while.
pytestmark = pytest.mark.hang_limit(600)

seeds = st.integers(0, 2**20)
users = st.sampled_from(USERS)


def play(machine: type[SimMachine], examples: int, steps: int) -> None:
    """Run a machine; --scale counts."""
    scale = hypothesis.settings.default.max_examples / 100
    settings = hypothesis.settings(
        max_examples=max(3, round(examples * scale)),
        stateful_step_count=steps,
        deadline=None,
        database=None,
        derandomize=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    run_state_machine_as_test(machine, settings=settings)


# Transfers. -------------------------------------------------------------------------------------------------


class Transfers(SimMachine):
    """Users pull from an owner and push to it, at once and layer by layer, and everything comes between."""

    @initialize(
        seed=seeds, way=ways, drain=st.sampled_from((0.0, 0.05, 1.0)), transport=st.sampled_from(("sim", "sim", "tcp"))
    )
    def start(self, seed: int, way: str, drain: float, transport: str) -> None:
        self.config: dict[str, Any] = {"drain_timeout": drain, "heartbeat_limit": 2.0, "transports": (transport,)}
        self.mine: dict[int, adt.Cache] = {}
        self.free = {user: list(range(BLOCKS)) for user in USERS}
        self.poisoned: set[tuple[int, int]] = set()
        self.targets: dict[int, Operation | None] = dict.fromkeys(TARGETS)  # and who may still write to them
        self.gates: list[tuple[adt.LayerGate, set[int]]] = []
        self.numbers = 0

        async def start() -> None:
            self.shadow = Shadow(self.sim, BLOCK_BYTES)
            await self.start_owner()
            for user in USERS:
                dd = await self.sim.datadist(user, adt.Role.DECODER, **self.config)
                tensors = [np.full((BLOCKS, BLOCK_BYTES), POISON, np.uint8) for _ in range(TENSORS)]
                self.mine[user] = dd.cache_manager.register_blocks_cache(tensors, remote=None)
                self.poisoned |= {(user, block) for block in range(BLOCKS)}
                await self.link(user)

        self.begin(seed, way, start)

    async def start_owner(self) -> None:
        if OWNER in self.sim._datadists:
            owner = await self.sim.restart(OWNER)
        else:
            owner = await self.sim.datadist(OWNER, adt.Role.PROMPT, **self.config)
        self.targets = dict.fromkeys(TARGETS)
        await self.register(owner)

    async def register(self, owner: adt.DataDist) -> None:
        tensors = [
            (np.arange(BLOCKS, dtype=np.uint8)[:, None] + TENSORS * i).repeat(BLOCK_BYTES, 1) for i in range(TENSORS)
        ]
        self.theirs = owner.cache_manager.register_blocks_cache(tensors, key=KEY)
        await self.theirs.ready()

    async def link(self, user: int) -> None:
        """Link, and wait a while for the owner's cache. Neither has to work out: the network may be held up."""
        with contextlib.suppress(adt.LinkError, adt.ClosedError):
            link = await self.sim[user].link(self.sim.info(OWNER), timeout=5.0)
            for _ in range(20):
                if adt.CacheKeyByIdAndIndex(OWNER, self.theirs.id) in link.table:
                    break
                await asyncio.sleep(5e-3)

    # What users do.

    @rule(
        user=users,
        kind=st.sampled_from(("pull", "push", "layers")),
        count=st.integers(0, 5),
        timeout=st.sampled_from((0.003, 0.05, 20.0)),
    )
    def move(self, user: int, kind: str, count: int, timeout: float) -> None:
        self.run(self.start_transfer(user, kind, count, timeout))

    async def start_transfer(self, user: int, kind: str, count: int, timeout: float) -> None:
        caches, cache, of_owner = self.sim[user].cache_manager, self.mine[user], self.theirs
        mine = self.free[user][:count]
        usable = list(SOURCES) if kind == "pull" else [n for n, last in self.targets.items() if not last or last.quiet]
        theirs = usable[: len(mine)]
        mine = mine[: len(theirs)]
        self.numbers += 1
        operation = Operation(self.sim, kind, user, OWNER, mine, theirs)
        # Before the call: it may move bytes at once.
        self.shadow.operations.append(operation)
        for tensor in cache.tensors if kind != "pull" else ():
            tensor[mine] = self.numbers % 0x80
        future: asyncio.Future[Any]
        try:
            if kind == "pull":
                future = caches.pull_blocks(KEY, cache, theirs, mine, timeout=timeout)
            elif kind == "push":
                future = caches.push_blocks(KEY, cache, mine, theirs, timeout=timeout)
            else:
                gate = adt.LayerGate(LAYERS)
                target = adt.TransferWithCacheKeyConfig(KEY)
                future = caches.transfer_cache_async(cache, gate, [target], mine, theirs, timeout=timeout)
                self.gates.append((gate, set(range(LAYERS))))
        except adt.DataDistError:
            self.shadow.operations.remove(operation)
            for tensor in cache.tensors:
                tensor[mine] = POISON
            return
        operation.future = future
        del self.free[user][: len(mine)]
        self.poisoned -= {(user, block) for block in mine}
        if kind != "pull":
            self.targets.update(dict.fromkeys(theirs, operation))

        def ended(future: asyncio.Future[Any]) -> None:
            operation.ends += 1
            error = None if future.cancelled() else future.exception()
            if error is not None and not isinstance(error, adt.DataDistError):
                raise Broken(f"{operation} ended with {error!r}")
            well = error is None and not future.cancelled()
            if well and kind == "layers":
                (result,) = future.result()
                well = result.error is None
                assert well is (result.layers_done == LAYERS), result
            if well and self.sim.network.host(OWNER).incarnation == operation.incarnations[OWNER]:
                for ours, other in zip(cache.tensors, of_owner.tensors, strict=False):
                    if not np.array_equal(ours[mine], other[theirs]):
                        raise Broken(f"{operation} ended well, and the two sides differ")
            operation.well = well
            for tensor in cache.tensors:
                tensor[mine] = POISON
            self.poisoned.update((user, block) for block in mine)
            self.free[user] += mine

        future.add_done_callback(ended)

    def pending(self) -> list[Operation]:
        return [one for one in self.shadow.operations if one.future is not None and not one.future.done()]

    @precondition(lambda self: self.pending())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        operation = data.draw(st.sampled_from(self.pending()))

        async def cancel() -> None:
            assert operation.future is not None
            if operation.future.done():
                return  # in the turn since it was drawn
            assert operation.future.cancel() is True
            done = operation.future.done()  # at once, if it had nothing under way
            assert operation.future.cancel() is not done

        self.run(cancel())

    @precondition(lambda self: self.gates)
    @rule(data=st.data(), fails=st.sampled_from((False, False, False, True)))
    def record(self, data: st.DataObject, fails: bool) -> None:
        gate, left = data.draw(st.sampled_from(self.gates))
        layer = data.draw(st.sampled_from(sorted(left)))
        left.discard(layer)
        if not left:
            self.gates.remove((gate, left))

        async def record() -> None:
            if fails:
                gate.fail(layer)
            else:
                gate.record(layer)

        self.run(record())

    @rule(user=users)
    def fence(self, user: int) -> None:
        async def fence() -> None:
            before, incarnation = list(self.shadow.operations), self.sim.network.host(OWNER).incarnation
            with contextlib.suppress(adt.DataDistError):
                await self.sim[OWNER].fence(user, timeout=60.0)
                for operation in before:
                    if operation.user == user and operation.incarnations[OWNER] == incarnation:
                        operation.fenced = True

        self.run(self.spawn(fence()))

    @rule()
    def register_anew(self) -> None:
        """Unregister the owner's cache; a new one takes its place."""

        async def unregister(cache: adt.Cache) -> None:
            incarnation = self.sim.network.host(OWNER).incarnation
            with contextlib.suppress(adt.ClosedError, adt.MemoryStillExposed):
                await self.sim[OWNER].cache_manager.unregister_cache(cache)
                self.shadow.unregistered(OWNER, incarnation, cache.id)

        async def change() -> None:
            old = self.theirs
            await self.spawn(unregister(old))
            await asyncio.sleep(0)
            self.targets = dict.fromkeys(TARGETS)
            await self.register(self.sim[OWNER])

        self.run(change())

    # What goes on, and what goes wrong.

    @rule(seconds=pauses)
    def time_passes(self, seconds: float) -> None:
        self.go_on(seconds)

    @rule(user=users, force=st.booleans())
    def unlink_and_link(self, user: int, force: bool) -> None:
        async def both() -> None:
            with contextlib.suppress(adt.LinkError, adt.ClosedError):
                await self.sim[user].unlink(adt.ClusterInfo(OWNER), timeout=5.0, force=force)
            await self.link(user)

        self.run(self.spawn(both()))

    @precondition(lambda self: any(OWNER not in self.sim[user].links for user in USERS))
    @rule()
    def link_who_is_not(self) -> None:
        for user in USERS:
            if OWNER not in self.sim[user].links:
                self.run(self.spawn(self.link(user)))

    @rule(user=users, to_owner=st.booleans(), seconds=holdups)
    def stall(self, user: int, to_owner: bool, seconds: float) -> None:
        async def stall() -> None:
            self.sim.stall(*((user, OWNER) if to_owner else (OWNER, user)), seconds)

        self.run(stall())

    @rule(who=st.sampled_from((OWNER, *USERS)), seconds=holdups)
    def stop(self, who: int, seconds: float) -> None:
        async def stop() -> None:
            self.sim.stop(who)
            asyncio.get_running_loop().call_later(seconds, self.sim.resume, who)

        self.run(stop())

    @rule(user=users)
    def cut(self, user: int) -> None:
        async def cut() -> None:
            self.sim.cut(OWNER, user)

        self.run(cut())

    @rule(silent=st.booleans(), pause=st.sampled_from((0.0, 0.01)))
    def crash(self, silent: bool, pause: float) -> None:
        async def crash() -> None:
            self.sim.crash(OWNER, silent=silent)
            await asyncio.sleep(pause)
            await self.start_owner()

        self.run(crash())

    # What must hold.

    @invariant()
    def nobody_writes_into_free_blocks(self) -> None:
        if self.runner is not None:
            for user, block in self.poisoned:
                for tensor in self.mine[user].tensors:
                    if not (tensor[block] == POISON).all():
                        raise Broken(f"block {block} of {user} is free, and was written")

    async def end(self) -> None:
        await self.settle()
        futures = [one.future for one in self.shadow.operations if one.future is not None]
        if futures:
            _, left = await asyncio.wait(futures, timeout=LONGEST)
            if left:
                raise Broken(f"these never end: {left}")
            await asyncio.sleep(0)  # their callbacks
        for operation in self.shadow.operations:
            assert operation.ends == 1, operation
        assert {user: sorted(free) for user, free in self.free.items()} == {user: list(range(BLOCKS)) for user in USERS}
        await self.at_rest(*(self.sim[number] for number in (OWNER, *USERS)))
        # Whatever happened, everything goes well again. What is still on its way is a fence that has shut a peer out.
        await asyncio.sleep(1.0)
        for user in USERS:
            await self.link(user)
            await self.start_transfer(user, "pull", 3, 20.0)
            operation = self.shadow.operations[-1]
            assert operation.future is not None, self.sim[user].links
            await operation.future
            assert len(operation.mine) == 3
        self.nobody_writes_into_free_blocks()


def test_transfers() -> None:
    play(Transfers, examples=25, steps=25)


# Links. -----------------------------------------------------------------------------------------------------

NODES = (1, 2, 3)
nodes = st.sampled_from(NODES)
LEGAL = {
    ("idle", "linking"),
    ("linking", "ready"),
    ("linking", "broken"),
    ("linking", "closed"),
    ("linking", "idle"),
    ("ready", "broken"),
    ("ready", "closed"),
    ("broken", "linking"),
    ("broken", "ready"),
    ("closed", "linking"),
    ("closed", "ready"),
    ("idle", "ready"),
    ("broken", "closed"),
    ("broken", "idle"),
}


class Links(SimMachine):
    """Three nodes link and unlink each other, from both sides at once, and lose each other."""

    @initialize(seed=seeds, way=ways, transport=st.sampled_from(("sim", "tcp")))
    def start(self, seed: int, way: str, transport: str) -> None:
        self.config: dict[str, Any] = {"drain_timeout": 0.5, "heartbeat_limit": 2.0, "transports": (transport,)}
        self.changes: dict[tuple[int, int], list[adt.LinkStateChanged]] = {}
        self.caches: dict[int, adt.Cache] = {}
        self.hearing: set[asyncio.Task[None]] = set()

        async def start() -> None:
            for node in NODES:
                await self.start_node(node)

        self.begin(seed, way, start)

    async def start_node(self, node: int) -> None:
        dd = await (self.sim.restart(node) if node in self.caches else self.sim.datadist(node, **self.config))
        tensor = np.full((4, 64), node, np.uint8)
        self.caches[node] = dd.cache_manager.register_blocks_cache([tensor], key=adt.BlocksCacheKey(node))
        life = self.sim.network.host(node).incarnation

        async def hear() -> None:
            async for event in dd.events():
                if isinstance(event, adt.LinkStateChanged):
                    self.changes.setdefault((node * 1000 + life, event.cluster_id), []).append(event)

        self.hearing.add(asyncio.create_task(hear()))  # ends with the DataDist

    @rule(one=nodes, other=nodes, timeout=st.sampled_from((0.01, 3.0, 10.0)), auto=st.sampled_from((None, None, True)))
    def link(self, one: int, other: int, timeout: float, auto: bool | None) -> None:
        async def link() -> None:
            with contextlib.suppress(adt.LinkError, adt.ClosedError):
                options: dict[str, Any] = {} if auto is None else {"auto_relink": auto}
                made = await self.sim[one].link(self.sim.info(other), timeout=timeout, **options)
                assert made.cluster_id == other

        self.run(self.spawn(link()))

    @rule(one=nodes, other=nodes, count=st.integers(2, 6))
    def many_at_once(self, one: int, other: int, count: int) -> None:
        """Callers of one link share it; those who are cancelled leave it to the others."""

        async def link(cancelled: bool) -> adt.Link | None:
            task = asyncio.ensure_future(self.sim[one].link(self.sim.info(other), timeout=5.0))
            if cancelled:
                await asyncio.sleep(1e-4)
                task.cancel()
            try:
                return await task
            except (adt.LinkError, adt.ClosedError):
                return None
            except asyncio.CancelledError:
                assert cancelled
                return None

        async def all_of_them() -> None:
            made = await asyncio.gather(*(link(number % 3 == 1) for number in range(count)))
            assert len({id(each) for each in made if each is not None}) <= 2, made

        self.run(self.spawn(all_of_them()))

    @rule(one=nodes, other=nodes, force=st.booleans())
    def unlink(self, one: int, other: int, force: bool) -> None:
        async def unlink() -> None:
            with contextlib.suppress(adt.LinkError, adt.ClosedError):
                await self.sim[one].unlink(adt.ClusterInfo(other), timeout=5.0, force=force)

        self.run(self.spawn(unlink()))

    @rule(seconds=pauses)
    def time_passes(self, seconds: float) -> None:
        self.go_on(seconds)

    @rule(one=nodes, other=nodes)
    def cut(self, one: int, other: int) -> None:
        async def cut() -> None:
            self.sim.cut(one, other)

        self.run(cut())

    @rule(one=nodes, other=nodes, seconds=holdups)
    def stall(self, one: int, other: int, seconds: float) -> None:
        async def stall() -> None:
            if one != other:
                self.sim.stall(one, other, seconds)

        self.run(stall())

    @rule(node=nodes, seconds=holdups)
    def stop(self, node: int, seconds: float) -> None:
        async def stop() -> None:
            self.sim.stop(node)
            asyncio.get_running_loop().call_later(seconds, self.sim.resume, node)

        self.run(stop())

    @rule(node=nodes, silent=st.booleans())
    def crash(self, node: int, silent: bool) -> None:
        async def crash() -> None:
            self.sim.crash(node, silent=silent)
            await self.start_node(node)

        self.run(crash())

    @rule(node=nodes)
    def close_and_start_anew(self, node: int) -> None:
        """An orderly end: peers hear of it."""

        async def close() -> None:
            with contextlib.suppress(adt.MemoryStillExposed):
                await self.sim[node].aclose(5.0)
            self.sim.crash(node)
            await self.start_node(node)

        self.run(close())

    async def end(self) -> None:
        await self.settle()
        # Longer than any attempt, and than silence is borne.
        await asyncio.sleep(30.0)
        for one in NODES:
            for other in NODES:
                if one < other:
                    here, there = other in self.sim[one].links, one in self.sim[other].links
                    if here is not there:
                        raise Broken(f"{one} says {here} of the link to {other}, and {other} says {there}")
        for (name, peer), changes in self.changes.items():
            for before, after in itertools.pairwise(changes):
                if after.old is not before.new:
                    raise Broken(f"{name} heard of the link to {peer}: {before}, and then {after}")
            for change in changes:
                if (change.old.value, change.new.value) not in LEGAL:
                    raise Broken(f"{name} heard of the link to {peer}: {change}")
            epochs = [change.epoch for change in changes]
            if epochs != sorted(epochs):
                raise Broken(f"{name}: the epochs of the link to {peer} go back: {epochs}")
        await self.at_rest(*(self.sim[node] for node in NODES))
        # Nobody is black-listed, and memory of the newest incarnation is what one gets.
        for one in NODES:
            mine = np.zeros((4, 64), np.uint8)
            cache = self.sim[one].cache_manager.register_blocks_cache([mine], remote=None)
            for other in NODES:
                if one == other:
                    continue
                link = await self.sim[one].link(self.sim.info(other), timeout=10.0)
                while adt.CacheKeyByIdAndIndex(other, self.caches[other].id) not in link.table:
                    await asyncio.sleep(0.01)
                await self.sim[one].cache_manager.pull_blocks(adt.BlocksCacheKey(other), cache, [1, 2], [0, 3])
                assert (mine[[0, 3]] == other).all()


def test_links() -> None:
    play(Links, examples=25, steps=20)


# Leases. ----------------------------------------------------------------------------------------------------


class Held:
    """A lease of the owner, and what is known of it."""

    def __init__(self, lease: adt.Lease, user: int | None, ttl: float, began: float) -> None:
        self.lease, self.user, self.ttl, self.began = lease, user, ttl, began
        self.released = False  # by anyone
        self.told: adt.LeaseEnd | None = None


class Leases(SimMachine):
    """An owner holds blocks for users, who adopt, release, forget, or are gone."""

    @initialize(seed=seeds, way=ways, transport=st.sampled_from(("sim", "tcp")))
    def start(self, seed: int, way: str, transport: str) -> None:
        self.config: dict[str, Any] = {"drain_timeout": 0.5, "heartbeat_limit": 2.0, "transports": (transport,)}
        self.leases: list[Held] = []
        self.crashed: set[int] = set()

        async def start() -> None:
            owner = await self.sim.datadist(OWNER, adt.Role.PROMPT, **self.config)
            self.cache = owner.cache_manager.register_blocks_cache([np.zeros((BLOCKS, 64), np.uint8)], key=KEY)
            await self.cache.ready()
            for user in USERS:
                await self.sim.datadist(user, adt.Role.DECODER, **self.config)
                await self.link(user)

        self.begin(seed, way, start)

    async def link(self, user: int) -> None:
        with contextlib.suppress(adt.LinkError, adt.ClosedError):
            await self.sim[user].link(self.sim.info(OWNER), timeout=5.0)

    @rule(
        user=st.sampled_from((*USERS, None)),
        blocks=st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=6),
        ttl=st.sampled_from((0.05, 0.5, 30.0)),
    )
    def hold(self, user: int | None, blocks: list[int], ttl: float) -> None:
        async def hold() -> None:
            lease = self.sim[OWNER].cache_manager.hold(self.cache, blocks, ttl, peer=user)
            held = Held(lease, user, ttl, self.sim.now())
            self.leases.append(held)
            await self.spawn(over(held))

        async def over(held: Held) -> None:
            end = await held.lease.wait_over()
            assert held.told is None
            held.told = end
            late = self.sim.now() - held.began
            if end is adt.LeaseEnd.RELEASED and not held.released:
                raise Broken(f"{held.lease} counts as released, and nobody has released it")
            if end is adt.LeaseEnd.EXPIRED and late < held.ttl - 1e-6:
                raise Broken(f"{held.lease} has expired after {late} of {held.ttl} s")

        self.run(hold())

    def alive(self) -> list[Held]:
        return [held for held in self.leases if held.told is None]

    @precondition(lambda self: self.alive())
    @rule(data=st.data(), user=users, seconds=pauses, releases=st.booleans())
    def adopt(self, data: st.DataObject, user: int, seconds: float, releases: bool) -> None:
        held = data.draw(st.sampled_from(self.alive()))

        async def adopt() -> None:
            try:
                await self.sim[user].adopt_lease(OWNER, held.lease.id, timeout=5.0)
            except (adt.LeaseError, adt.LinkError, adt.ClosedError, adt.TransferError):
                return
            if held.user not in (None, user):
                raise Broken(f"{user} has adopted {held.lease} of {held.user}")
            await asyncio.sleep(seconds)
            if releases:
                held.released = True
                with contextlib.suppress(adt.DataDistError):
                    await self.sim[user].release_lease(OWNER, held.lease.id, timeout=5.0)

        self.run(self.spawn(adopt()))

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.alive()))

        async def release() -> None:
            held.released = True
            held.lease.release()

        self.run(release())

    @precondition(lambda self: self.alive())
    @rule(data=st.data(), user=users)
    def refuse(self, data: st.DataObject, user: int) -> None:
        """Release without having adopted it, as one does who refuses a request at admission."""
        held = data.draw(st.sampled_from(self.alive()))

        async def refuse() -> None:
            held.released = held.released or held.user in (None, user)
            with contextlib.suppress(adt.DataDistError):
                await self.sim[user].release_lease(OWNER, held.lease.id, timeout=5.0)

        self.run(self.spawn(refuse()))

    @rule(seconds=pauses)
    def time_passes(self, seconds: float) -> None:
        self.go_on(seconds)

    @rule(user=users, seconds=holdups, to_owner=st.booleans())
    def stall(self, user: int, seconds: float, to_owner: bool) -> None:
        async def stall() -> None:
            self.sim.stall(*((user, OWNER) if to_owner else (OWNER, user)), seconds)

        self.run(stall())

    @rule(who=st.sampled_from((OWNER, *USERS)), seconds=holdups)
    def stop(self, who: int, seconds: float) -> None:
        async def stop() -> None:
            self.sim.stop(who)
            asyncio.get_running_loop().call_later(seconds, self.sim.resume, who)

        self.run(stop())

    @rule(user=users, force=st.booleans())
    def unlink_and_link(self, user: int, force: bool) -> None:
        async def both() -> None:
            with contextlib.suppress(adt.LinkError, adt.ClosedError):
                await self.sim[user].unlink(adt.ClusterInfo(OWNER), timeout=5.0, force=force)
            await self.link(user)

        self.run(self.spawn(both()))

    @rule(user=users, silent=st.booleans())
    def crash(self, user: int, silent: bool) -> None:
        async def crash() -> None:
            self.sim.crash(user, silent=silent)
            await self.sim.restart(user)
            await self.spawn(self.link(user))

        self.run(crash())

    @invariant()
    def what_is_leased_is_held(self) -> None:
        if self.runner is None:
            return

        async def check() -> None:
            held = self.sim[OWNER].cache_manager.held(self.cache)
            wanted = np.zeros(BLOCKS, bool)
            for one in self.leases:
                if one.lease.state != "over":
                    wanted[one.lease.blocks] = True
            if (held != wanted).any():
                raise Broken(f"held are {np.flatnonzero(held)}, leases have {np.flatnonzero(wanted)}")

        self.run(check())

    async def end(self) -> None:
        self.sim.heal()
        # What was adopted and is not released lives as long as the link.
        await asyncio.sleep(10.0)
        for user in USERS:
            with contextlib.suppress(adt.LinkError):
                await self.sim[user].unlink(adt.ClusterInfo(OWNER), timeout=10.0)
        await self.settle()
        for held in self.leases:
            assert held.told is held.lease.end is not None, held.lease
        await self.at_rest(*(self.sim[number] for number in (OWNER, *USERS)))
        stats = self.sim[OWNER].stats()["leases"]
        assert stats["next_expiry"] is None
        for user in USERS:
            assert not self.sim[user].stats()["leases"]["adopted"]


def test_l1_l7_leases() -> None:
    play(Leases, examples=25, steps=20)


# Notifications. ---------------------------------------------------------------------------------------------


class Notifications(SimMachine):
    """Users say something with their transfers; the owner reads it, or does not, and hears each word once."""

    @initialize(seed=seeds, way=ways, transport=st.sampled_from(("sim", "tcp")), credits=st.sampled_from((1, 3, 256)))
    def start(self, seed: int, way: str, transport: str, credits: int) -> None:
        self.config: dict[str, Any] = {
            "drain_timeout": 0.5,
            "heartbeat_limit": 2.0,
            "transports": (transport,),
            "notify_credits": credits,
        }
        self.said: dict[bytes, asyncio.Future[Any]] = {}
        self.said_by: dict[int, list[bytes]] = {user: [] for user in USERS}
        self.disturbed: set[bytes] = set()  # what may be lost with its link
        self.heard: list[bytes] = []
        self.reading: list[asyncio.Task[None]] = []
        self.caches: dict[int, adt.Cache] = {}

        async def start() -> None:
            owner = await self.sim.datadist(OWNER, adt.Role.PROMPT, **self.config)
            cache = owner.cache_manager.register_blocks_cache([np.zeros((BLOCKS, 64), np.uint8)], key=KEY)
            await cache.ready()
            for user in USERS:
                dd = await self.sim.datadist(user, adt.Role.DECODER, **self.config)
                mine = [np.zeros((BLOCKS, 64), np.uint8)]
                self.caches[user] = dd.cache_manager.register_blocks_cache(mine, remote=None)
                link = await dd.link(self.sim.info(OWNER))
                while adt.CacheKeyByIdAndIndex(OWNER, cache.id) not in link.table:
                    await asyncio.sleep(1e-3)

        self.begin(seed, way, start)

    @rule(user=users, count=st.integers(0, 4), timeout=st.sampled_from((0.01, 60.0)), times=st.integers(1, 4))
    def say(self, user: int, count: int, timeout: float, times: int) -> None:
        async def say() -> None:
            blocks = list(range(count))
            for _ in range(times):
                word = b"%d" % len(self.said)
                with contextlib.suppress(adt.NotLinkedError, adt.CacheNotFound):
                    pull = self.sim[user].cache_manager.pull_blocks
                    self.said[word] = pull(KEY, self.caches[user], blocks, blocks, timeout=timeout, notify=word)
                    self.said_by[user].append(word)

        self.run(say())

    @rule(count=st.integers(1, 5))
    def listen(self, count: int) -> None:
        """Read some, in competition with other readers."""

        async def listen() -> None:
            left = count
            async for note in self.sim[OWNER].notifications():
                self.heard.append(note.payload)
                assert note.payload in self.said_by[note.cluster_id]
                left -= 1
                if not left:
                    break

        async def begin() -> None:
            self.reading.append(asyncio.create_task(listen()))

        self.run(begin())

    @precondition(lambda self: self.reading)
    @rule()
    def hush(self) -> None:
        """Cancel a reader: what it has not got is for others."""

        async def hush() -> None:
            task = self.reading.pop(0)
            task.cancel()
            await asyncio.wait([task])

        self.run(hush())

    def pending(self) -> list[bytes]:
        return [word for word, future in self.said.items() if not future.done()]

    @precondition(lambda self: self.pending())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        word = data.draw(st.sampled_from(self.pending()))

        async def cancel() -> None:
            self.said[word].cancel()

        self.run(cancel())

    @rule(seconds=pauses)
    def time_passes(self, seconds: float) -> None:
        self.go_on(seconds)

    @rule(user=users, seconds=st.sampled_from((1e-3, 0.05, 0.5)), to_owner=st.booleans())
    def stall(self, user: int, seconds: float, to_owner: bool) -> None:
        """Not for long enough to lose the link."""

        async def stall() -> None:
            self.sim.stall(*((user, OWNER) if to_owner else (OWNER, user)), seconds)

        self.run(stall())

    @rule(user=users)
    def cut_and_link(self, user: int) -> None:
        async def link() -> None:
            with contextlib.suppress(adt.LinkError):
                await self.sim[user].link(self.sim.info(OWNER), timeout=5.0)

        async def cut() -> None:
            self.disturbed.update(self.said_by[user])
            self.sim.cut(OWNER, user)
            await asyncio.sleep(0.01)
            await self.spawn(link())

        self.run(cut())

    @invariant()
    def nothing_is_heard_twice(self) -> None:
        if self.runner is not None:
            assert len(self.heard) == len(set(self.heard)), self.heard

    async def end(self) -> None:
        await self.settle()
        self.listen_to_all = asyncio.create_task(self.hear_all())
        if self.said:
            _, left = await asyncio.wait(self.said.values(), timeout=LONGEST)
            if left:
                raise Broken(f"these never end: {left}")
        await asyncio.sleep(5.0)
        for task in (*self.reading, self.listen_to_all):
            task.cancel()
        await asyncio.wait((*self.reading, self.listen_to_all))
        self.nothing_is_heard_twice()
        well = {word for word, one in self.said.items() if not one.cancelled() and one.exception() is None}
        if lost := well - self.disturbed - set(self.heard):
            raise Broken(f"these transfers have ended well, and their words were not heard: {sorted(lost)}")
        assert set(self.heard) <= set(self.said)
        assert not self.sim[OWNER].stats()["unread"]
        await self.at_rest(*(self.sim[number] for number in (OWNER, *USERS)))

    async def hear_all(self) -> None:
        async for note in self.sim[OWNER].notifications():
            self.heard.append(note.payload)


def test_notifications() -> None:
    play(Notifications, examples=25, steps=20)
