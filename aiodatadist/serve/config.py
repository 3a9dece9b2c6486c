"""Settings of routers and workers, with their defaults, and what is wrong about them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from aiodatadist.errors import ConfigError

from .protocol import ROLES

__all__ = [
    "DEFAULT_LIMITS",
    "MODES",
    "RUNNING_PER_SLOT",
    "HealthLimits",
    "RouterConfig",
    "SchedulerConfig",
    "Timeouts",
    "WorkerConfig",
]

MODES = ("pull", "push")
RUNNING_PER_SLOT = 4
"""Requests with decode and mixed workers for each of their slots: some are in prefill, some wait for the next step."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. Every wait on another process has one of these.

    Attributes
    ----------
    connect
        To connect to a worker.
    prefill
        Until a prefill worker has answered.
    first_token
        Until a decode or mixed worker has sent its first bytes; of an answer that is not streamed, all of it has
        `request`.
    idle
        Between two pieces of a stream.
    request
        All of it.
    transfer
        To link the other worker and to move the blocks; of a push, what is left when the prompt is computed.
    lease
        How long a ticket's blocks stay without a sign of life of whoever is to pull them.
    reservation
        How long reserved blocks wait for a push to begin, and pushed ones to be asked for.
    """

    connect: float = 2.0
    prefill: float = 60.0
    first_token: float = 60.0
    idle: float = 30.0
    request: float = 600.0
    transfer: float = 10.0
    lease: float = 30.0
    reservation: float = 30.0

    def __post_init__(self) -> None:
        for field_ in fields(self):
            if not getattr(self, field_.name) > 0:
                raise ConfigError(f"the timeout {field_.name} is {getattr(self, field_.name):g} s; give more than 0")


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """When a router stops, and begins again, to send requests to a worker. Times are in seconds.

    Attributes
    ----------
    failures
        Failed requests in a row that open the breaker.
    open_time
        Until it lets trials pass.
    passes
        Good trials that close it.
    probe_period
        Between two probes.
    probe_failures, probe_passes
        Probes in a row that take a worker out, and bring it back.
    slow_start
        Until a new or recovered worker has its full share.
    drain
        Until what a worker that drains still works on is aborted.
    """

    failures: int = 5
    open_time: float = 10.0
    passes: int = 2
    probe_period: float = 2.0
    probe_failures: int = 3
    probe_passes: int = 2
    slow_start: float = 10.0
    drain: float = 60.0

    def __post_init__(self) -> None:
        for name in ("failures", "passes", "probe_failures", "probe_passes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of the health limits is {getattr(self, name)}; give at least 1")
        for name in ("open_time", "probe_period", "slow_start", "drain"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} of the health limits is {getattr(self, name):g} s; give at least 0")


DEFAULT_LIMITS = HealthLimits()


def _check_mode(modes: tuple[str, ...]) -> None:
    if not modes or any(mode not in MODES for mode in modes):
        raise ConfigError(f"modes are {modes}; give one or both of {', '.join(MODES)}")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Where routers share their work: a Redis server, 6.2 or newer.

    Attributes
    ----------
    host, port, password
        Of Redis.
    topic
        What the names of all keys begin with. Routers of one topic work together.
    ttl
        Seconds that Redis keeps what nobody asks for any more.
    limit
        Requests with the scheduler, waiting and being served; more are refused.
    """

    host: str = "127.0.0.1"
    port: int = 6379
    password: str | None = field(default=None, repr=False)
    topic: str = "fd"
    ttl: int = 900
    limit: int = 1024

    def __post_init__(self) -> None:
        if not self.topic:
            raise ConfigError("the scheduler's topic is empty; give a name")
        if self.ttl < 10:
            raise ConfigError(f"the scheduler's ttl is {self.ttl} s; give at least 10")
        if self.limit < 1:
            raise ConfigError(f"the scheduler's limit is {self.limit}; give at least 1")


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Settings of a router.

    Attributes
    ----------
    host, port
        Where its HTTP listens; port 0: any.
    modes
        Hand-overs to use; two of them take turns.
    prefill_policy, decode_policy, mixed_policy
        Of `policies.POLICIES`.
    heartbeat
        Seconds between two heartbeats of a worker. Three that are missing make it a lost one.
    retries
        Attempts after the first, for each request, before its first byte.
    migrate
        How often an answer whose worker dies after that is begun anew by another, and goes on where it was.
    max_running
        Requests that are with workers at once; None: `RUNNING_PER_SLOT` for each slot of decode and mixed workers.
    queue_size, queue_wait
        Most requests that wait for that, and seconds that each waits.
    health
    api_key
        What clients have to bring; None: nothing.
    cluster_key
        What workers have to prove.
    scheduler
        Share the work with other routers by way of Redis; None: each request is served where it comes in.
    wait_for_room
        Requests wait while workers have no room (with a scheduler also while there are none); False: they fail at once.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    modes: tuple[str, ...] = ("pull",)
    prefill_policy: str = "round_robin"
    decode_policy: str = "round_robin"
    mixed_policy: str = "round_robin"
    heartbeat: float = 2.0
    retries: int = 2
    migrate: int = 0
    max_running: int | None = None
    queue_size: int = 256
    queue_wait: float = 10.0
    health: HealthLimits = DEFAULT_LIMITS
    api_key: str | None = field(default=None, repr=False)
    cluster_key: bytes | None = field(default=None, repr=False)
    scheduler: SchedulerConfig | None = None
    wait_for_room: bool = True
    timeouts: Timeouts = Timeouts()

    def __post_init__(self) -> None:
        _check_mode(self.modes)
        if self.max_running is not None and self.max_running < 1:
            raise ConfigError(f"max_running is {self.max_running}; give at least 1")
        if not 0.05 <= self.heartbeat <= 1000:
            raise ConfigError(f"the heartbeat is {self.heartbeat:g} s; give 0.05 to 1000")
        if self.retries < 0:
            raise ConfigError(f"retries is {self.retries}; give at least 0")
        if self.migrate < 0:
            raise ConfigError(f"migrate is {self.migrate}; give at least 0")
        if self.queue_size < 0 or self.queue_wait <= 0:
            raise ConfigError(
                f"queue_size is {self.queue_size}, queue_wait {self.queue_wait:g} s; give at least 0, and more than 0"
            )


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Settings of a worker.

    Attributes
    ----------
    role
        ``prefill``, ``decode`` or ``mixed``.
    host, port
        Where its HTTP listens; port 0: any.
    advertise
        The host under which others reach HTTP and KV; None: `host`, which must not be ``0.0.0.0`` then.
    kv_port
        Port of the library; 0: any.
    metrics_port
        Where ``/metrics`` is served as well; None: at `port` alone.
    routers
        URLs to register with; none for a worker that is used alone.
    model
        Of `aiodatadist.model.MODEL_NAMES`.
    num_blocks
        Of each engine's KV cache; None: as `worker.DEFAULT_BLOCKS` says.
    slots
        Sequences that each engine decodes at once.
    engines
        Engines behind this worker, each with a cache of its own.
    modes
        Hand-overs to take part in.
    transports
        Of the library, best first. What else its Config has comes from the environment.
    drain
        Seconds for what is under way when the worker is told to stop; 0: it is aborted at once.
    api_key
        As in `RouterConfig`; for mixed workers, which clients may use directly.
    digests
        Have a digest of each block travel with a prompt, so that decode workers compare what has arrived: slow.
    damage
        For tests: damage each prompt that arrives, in one of the ways of `damage.WAYS`.
    """

    role: str
    host: str = "127.0.0.1"
    port: int = 0
    advertise: str | None = None
    kv_port: int = 0
    metrics_port: int | None = None
    routers: tuple[str, ...] = ()
    model: str = "small"
    num_blocks: int | None = None
    slots: int = 8
    engines: int = 1
    modes: tuple[str, ...] = ("pull",)
    transports: tuple[str, ...] = ("shm", "tcp")
    drain: float = 0.0
    api_key: str | None = field(default=None, repr=False)
    cluster_key: bytes | None = field(default=None, repr=False)
    digests: bool = False
    damage: str | None = None
    timeouts: Timeouts = Timeouts()

    def __post_init__(self) -> None:
        _check_mode(self.modes)
        if self.role not in ROLES:
            raise ConfigError(f"role is {self.role!r}; give one of {', '.join(ROLES)}")
        if self.advertise is None and self.host in ("0.0.0.0", "::"):
            raise ConfigError(
                f"host {self.host} is no address that others can reach", hint="give the host to advertise"
            )

    @property
    def reachable_host(self) -> str:
        """The host that others are told."""
        return self.host if self.advertise is None else self.advertise
