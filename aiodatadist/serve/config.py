"""Settings of routers and workers, with their defaults, and what is wrong about them."""

from __future__ import annotations

from dataclasses import dataclass, field

from aiodatadist.errors import ConfigError

from .protocol import ROLES

__all__ = ["MODES", "RouterConfig", "Timeouts", "WorkerConfig"]

MODES = ("pull", "push")


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
        To link the prefill worker and to move the blocks.
    lease
        How long a ticket's blocks stay without a sign of life of whoever is to pull them.
    reservation
        How long reserved blocks wait for a push.
    """

    connect: float = 2.0
    prefill: float = 60.0
    first_token: float = 60.0
    idle: float = 30.0
    request: float = 600.0
    transfer: float = 10.0
    lease: float = 30.0
    reservation: float = 30.0


def _check_mode(modes: tuple[str, ...]) -> None:
    if not modes or any(mode not in MODES for mode in modes):
        raise ConfigError(f"modes are {modes}; give one or both of {', '.join(MODES)}")


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
        Seconds between two heartbeats of a worker.
    retries
        Attempts after the first, for each request.
    api_key
        What clients have to bring; None: nothing.
    cluster_key
        What workers have to prove.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    modes: tuple[str, ...] = ("pull",)
    prefill_policy: str = "round_robin"
    decode_policy: str = "round_robin"
    mixed_policy: str = "round_robin"
    heartbeat: float = 2.0
    retries: int = 2
    api_key: str | None = field(default=None, repr=False)
    cluster_key: bytes | None = field(default=None, repr=False)
    timeouts: Timeouts = Timeouts()

    def __post_init__(self) -> None:
        _check_mode(self.modes)


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
        Of the library, best first.
    api_key
        As in `RouterConfig`; for mixed workers, which clients may use directly.
    """

    role: str
    host: str = "127.0.0.1"
    port: int = 0
    advertise: str | None = None
    kv_port: int = 0
    routers: tuple[str, ...] = ()
    model: str = "small"
    num_blocks: int | None = None
    slots: int = 8
    engines: int = 1
    modes: tuple[str, ...] = ("pull",)
    transports: tuple[str, ...] = ("shm", "tcp")
    api_key: str | None = field(default=None, repr=False)
    cluster_key: bytes | None = field(default=None, repr=False)
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
