"""`SimCluster`: DataDists in simulated processes, on a virtual clock, and what goes wrong between them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self

from ..config import Config
from ..control.center import State
from ..datadist import DataDist
from ..errors import ArgumentError, ArgumentTypeError
from ..types import ClusterInfo, Role
from .clock import VirtualLoop
from .faults import Fault, FaultScript, Way, check_pair
from .network import FIRST_PORT, Access, Host, Network, SimRuntime
from .trace import Trace

__all__ = ["SimCluster"]


_LAST_WORDS: Final = 1.0
"""Virtual seconds for what the closing has sent."""


class SimCluster:
    """A cluster of simulated processes: ``async with SimCluster(seed=7) as sim:``, in a `VirtualLoop`.

    Its DataDists are ordinary ones, with the same code but for streams, time and chance. All that happens is decided by
    the seed, and by what is called: a failure comes again with its seed, which is noted at the exception.

    Parameters
    ----------
    seed : int
    way : Way
        How messages go between all processes, unless `set_way` says otherwise.
    script : FaultScript, optional
        Faults that come by themselves, from the start on. One that comes before its process was started is an error;
        `play` has a script begin later.
    limit : float
        Virtual seconds after which the simulation counts as stuck: `SimulationStuck` is raised out of the loop.
    replay : Trace, optional
        A saved run, with the same program, and as that in a loop of its own. Its seed and script are taken, and at the
        first event that differs `ReplayDiverged` is raised out of the loop.
    left_out : sequence of str
        For tests of tests: rules that the library breaks here: ``"drain"``, ``"epoch"``, ``"fence"`` or ``"key"``.

    Attributes
    ----------
    trace : Trace
        What has happened.
    random : random.Random
        For the test's own choices.
    network : Network
        The simulated network.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        way: Way | None = None,
        script: FaultScript | None = None,
        limit: float = 3600.0,
        replay: Trace | None = None,
        left_out: tuple[str, ...] = (),
    ) -> None:
        if replay is not None:
            seed = replay.seed
            script = FaultScript.from_list(replay.script) if replay.script is not None else None
        self.seed = seed
        if not limit > 0:
            raise ArgumentError(f"limit must be more than 0 seconds, got {limit!r}")
        self.random = random.Random(f"{seed}/test")
        self.script = script
        self.trace = Trace(seed, script.as_list() if script is not None else None, replay)
        self.network: Network
        self._way = way or Way()
        self._limit = limit
        self._left_out = left_out
        self._loop: VirtualLoop
        self._datadists: dict[int, DataDist] = {}
        self._options: dict[int, dict[str, Any]] = {}
        self._gone: list[DataDist] = []
        self._playing: list[asyncio.Task[None]] = []
        self._stalls: list[asyncio.TimerHandle] = []

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        if not isinstance(loop, VirtualLoop):
            raise RuntimeError(
                "a SimCluster needs a virtual clock: run the test with aiodatadist.testing.run, or use the fixtures of"
                " the pytest plug-in"
            )
        if loop.world is not None:
            raise RuntimeError("this loop has a SimCluster already")
        self._loop = loop
        self.network = Network(loop, self.seed, self._way, self.trace, self._left_out)
        self.network.describe = self._describe
        loop.world = self.network
        loop.end_ns = loop.now_ns + int(self._limit * 1e9)
        if self.script is not None:
            self.play(self.script)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            error.add_note(f"simulation: seed {self.seed}, {len(self.trace.events)} events, hash {self.trace.hash}")
        try:
            for task in self._playing:
                task.cancel()
            for timer in self._stalls:
                timer.cancel()
            await asyncio.gather(*self._playing, return_exceptions=True)
            self.heal()
            for datadist in self._datadists.values():
                if error is not None:
                    datadist.abort()
                else:
                    await datadist.aclose()
            for datadist in (*self._datadists.values(), *self._gone):
                await datadist.wait_closed()
            await asyncio.sleep(_LAST_WORDS)
            if error is None:
                self._loop.raise_failure()
        finally:
            self._loop.failure = None
            self._loop.world = None
            self._loop.end_ns = None
            self.network.close()

    # Processes. ---------------------------------------------------------------------------------------------

    async def datadist(
        self,
        cluster_id: int,
        role: Role = Role.MIX,
        *,
        listen: str | tuple[str, int] | None = f"0.0.0.0:{FIRST_PORT}",
        config: Config | None = None,
        **fields: Any,
    ) -> DataDist:
        """Start a process with one DataDist, which is open when this returns. The cluster closes it at the end.

        Parameters
        ----------
        cluster_id : int
            After `crash` it may be started again: a new incarnation at the same address.
        role : Role
        listen : str or pair, optional
            As for a DataDist; hosts are ``0.0.0.0`` or `address`'s. None: it does not listen.
        config : Config, optional
            Its ``transports`` has to name ``"sim"`` if the data is to go by it.
        **fields
            Fields of a Config where `config` is left out. ``transports`` is ``("sim",)`` unless it is given; ``"tcp"``
            runs the tcp transport over the simulated network.
        """
        if config is not None and fields:
            raise ArgumentTypeError(f"give either config= or its fields, not both; got config and {', '.join(fields)}")
        if config is None:
            fields.setdefault("transports", ("sim",))
            config = Config(**fields)
        old = self._datadists.get(cluster_id)
        if old is not None:
            if not self.network.host(cluster_id).crashed:
                raise RuntimeError(f"cluster {cluster_id} runs already: crash it first")
            self._gone.append(old)
        host = self.network.new_host(cluster_id)
        datadist = DataDist(cluster_id, role, listen=listen, config=config, _make_runtime=lambda: SimRuntime(host))
        self._options[cluster_id] = {"role": role, "listen": listen, "config": config}
        await self._loop.create_task(datadist.open(), context=host.context)
        self._datadists[cluster_id] = datadist
        return datadist

    async def restart(self, cluster_id: int) -> DataDist:
        """Start a crashed process anew, as it was started before; one that runs is crashed. Returns its DataDist."""
        self.crash(cluster_id)
        return await self.datadist(cluster_id, **self._options[cluster_id])

    def __getitem__(self, cluster_id: int) -> DataDist:
        self._host(cluster_id)
        return self._datadists[cluster_id]

    def info(self, cluster_id: int) -> ClusterInfo:
        """Return what `DataDist.link` needs to link this cluster id."""
        return ClusterInfo(cluster_id, f"{self._host(cluster_id).ip}:{FIRST_PORT}")

    def _host(self, cluster_id: int) -> Host:
        return self.network.host(cluster_id)

    # Faults. ------------------------------------------------------------------------------------------------

    def crash(self, cluster_id: int, *, silent: bool = False) -> None:
        """End a process at once, as SIGKILL does. Futures of its DataDist end with ClosedError.

        Parameters
        ----------
        cluster_id : int
        silent : bool
            Its host is gone with it: nothing tells its peers, which notice its silence.
        """
        host = self._host(cluster_id)
        if host.crashed:
            return
        self.network.crash(host, silent=silent)
        self.network.resume(host)
        host.context.run(self._datadists[cluster_id].abort)

    def stop(self, cluster_id: int) -> None:
        """Stop a process, as SIGSTOP does, until `resume`. Tasks that the test itself has started go on."""
        self.network.stop(self._host(cluster_id))

    def resume(self, cluster_id: int) -> None:
        """Undo `stop`."""
        self.network.resume(self._host(cluster_id))

    def cut(self, one: int, other: int) -> None:
        """Break all connections between two processes. Data that is under way arrives."""
        self.network.cut(self._host(one), self._host(other))

    def block(self, source: int, target: int) -> None:
        """Let nothing arrive in this direction until `unblock`. Nothing is lost."""
        self.network.note("block", source, target)
        self.network.set_way(self.network.way_between(source, target).replace(blocked=True), source, target)

    def unblock(self, source: int, target: int) -> None:
        """Undo `block`."""
        self.network.note("unblock", source, target)
        self.network.set_way(self.network.way_between(source, target).replace(blocked=False), source, target)

    def stall(self, source: int, target: int, seconds: float) -> None:
        """Block a direction for a while."""
        if not seconds >= 0:
            raise ArgumentError(f"seconds must not be negative, got {seconds!r}")
        self.block(source, target)
        self._stalls = [timer for timer in self._stalls if timer.when() > self._loop.time()]
        self._stalls.append(self._loop.call_later(seconds, self.unblock, source, target))

    def set_way(self, way: Way, source: int | None = None, target: int | None = None) -> None:
        """Say how messages go from one cluster id to another from now on; None is every one, those to come included."""
        self.network.set_way(way, source, target)

    def lag(self, cluster_id: int, least: float, most: float) -> None:
        """Make a process slow: whatever comes to it is looked at only after so many seconds, drawn each time."""
        check_pair("lag", (least, most))
        self._host(cluster_id).lag = (least, most)

    def heal(self) -> None:
        """Open all ways, and let all processes go on."""
        self.network.heal()

    def play(self, script: FaultScript) -> None:
        """Have faults come by themselves, from now on. What one raises is raised out of the loop."""

        async def play() -> None:
            start = self._loop.time()
            for fault in script.faults:
                await asyncio.sleep(max(0.0, start + fault.at - self._loop.time()))
                try:
                    await self.apply(fault)
                except Exception as why:
                    why.add_note(f"{fault} of the script has failed")
                    self._loop.failure = why
                    return

        self._playing.append(self._loop.create_task(play()))

    async def apply(self, fault: Fault) -> None:
        """Have a fault come now."""
        coming = getattr(self, fault.name)(*fault.args)
        if asyncio.iscoroutine(coming):
            await coming

    def _describe(self) -> list[str]:
        lines = []
        for cluster_id, datadist in self._datadists.items():
            center = datadist._center
            rows = center.rows() if center.state is State.OPEN else []
            lines.append(f"cluster {cluster_id}: {center.state.value}")
            lines += [f"  {row}" for row in rows]
        return lines

    # What is seen. ------------------------------------------------------------------------------------------

    def now(self) -> float:
        """Return the virtual time in seconds."""
        return self._loop.time()

    def watch(self, hook: Callable[[Access], None]) -> None:
        """Call `hook` with each `Access` to memory from now on, while it happens."""
        self.network.on_access.append(hook)
