"""FastDeploy's flags, where they mean what ours mean, and those of its Redis scheduler."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from aiodatadist import _core
from aiodatadist._hixl import open_engine
from aiodatadist.config import Config
from aiodatadist.errors import UsageError

if TYPE_CHECKING:
    from aiodatadist.serve.config import SchedulerConfig

__all__ = [
    "add_role",
    "add_scheduler",
    "add_worker",
    "check_worker",
    "router_url",
    "scheduler_config",
    "waits_for_room",
]

_ROLES: Final = ("prefill", "decode", "mixed")
_RDMA: Final = ("verbs", "hixl")
_PROTOCOLS: Final = ("ipc", "rdma", "tcp")
_WAIT_VARIABLE: Final = "PREFILL_CONTINUOUS_REQUEST_DECODE_RESOURCES"


def add_role(parser: argparse.ArgumentParser) -> None:
    """Add the flag that says a worker's role."""
    parser.add_argument(
        "--splitwise-role", dest="role", choices=_ROLES, default="mixed", help="what this worker does (mixed)"
    )


def add_worker(parser: argparse.ArgumentParser) -> None:
    """Add the flags of workers."""
    group = parser.add_argument_group("FastDeploy's flags")
    group.add_argument(
        "--cache-transfer-protocol",
        dest="transports",
        type=_protocols,
        default=argparse.SUPPRESS,
        metavar="A,B",
        help="of ipc (shm), rdma (verbs or hixl) and tcp, in place of --transports",
    )
    group.add_argument("--metrics-port", type=int, metavar="PORT", help="serve /metrics there as well")
    group.add_argument(
        "--pd-comm-port",
        dest="kv_port",
        type=_ports,
        action=_OnePort,
        default=argparse.SUPPRESS,
        metavar="PORT",
        help="as --kv-port",
    )
    group.add_argument("--rdma-comm-ports", type=_ports, action=_NoPort, metavar="PORTS", help="taken, and not needed")
    _add_scheduler_flags(group)


def add_scheduler(parser: argparse.ArgumentParser) -> None:
    """Add the flags of routers that share their work by way of Redis."""
    group = parser.add_argument_group("sharing the work of several routers")
    _add_scheduler_flags(group)
    group.add_argument(
        "--scheduler-limit", type=int, default=1024, metavar="N", help="requests with Redis; more get 429 (1024)"
    )
    group.add_argument("--scheduler-password-file", type=Path, metavar="FILE", help="holds the password of Redis")


def _add_scheduler_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--scheduler-name", choices=("local", "splitwise"), default="local", help="splitwise: by way of Redis (local)"
    )
    group.add_argument("--scheduler-host", default="127.0.0.1", metavar="HOST", help="of Redis (127.0.0.1)")
    group.add_argument("--scheduler-port", type=int, default=6379, metavar="PORT", help="of Redis (6379)")
    group.add_argument("--scheduler-topic", default="fd", metavar="NAME", help="routers of one name work together (fd)")
    group.add_argument(
        "--scheduler-ttl", type=int, default=900, metavar="SECONDS", help="how long Redis keeps what was left (900)"
    )


class _OnePort(argparse.Action):
    """Take the first port of a list, and say so."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if len(values) > 1:
            _note(f"{option_string}: one port serves all that a worker transfers, {values[0]}")
        setattr(namespace, self.dest, values[0])


class _NoPort(argparse.Action):
    """Say that no such port is needed."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        _note(f"{option_string} is not needed: one port serves all that a worker transfers, that of --kv-port")


def _ports(text: str) -> list[int]:
    ports = [int(part) for part in text.split(",")]
    if bad := [port for port in ports if not 0 <= port < 65536]:
        raise argparse.ArgumentTypeError(f"{bad[0]} is no port; give 0 to 65535")
    return ports


def _protocols(text: str) -> tuple[str, ...]:
    """Return our transports for a list of FastDeploy's protocols, in its order."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in _PROTOCOLS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(_PROTOCOLS)}")
    found: list[str] = []
    for name in names:
        if name == "rdma":
            found += _rdma(alone=len(set(names)) == 1)
        else:
            found.append("shm" if name == "ipc" else name)
    return tuple(dict.fromkeys(found)) or ("tcp",)


def _rdma(*, alone: bool) -> list[str]:
    """Return the first RDMA transport that can be used here."""
    probed = {name: (usable, reason) for name, usable, reason in _core.probe_transports()}
    reasons = []
    for name in _RDMA:
        usable, reason = probed.get(name, (False, "not in this build"))
        if name == "hixl":  # only an engine says whether it works
            engine, reason = open_engine(Config.from_env(), None)
            usable = engine is not None
            del engine
        if usable:
            return [name]
        reasons.append(f"{name}: {reason}")
    text = "rdma cannot be used here (" + "; ".join(reasons) + ")"
    if alone:
        raise argparse.ArgumentTypeError(text)
    _note(f"{text}; the other protocols are")
    return []


def router_url(text: str) -> str:
    """Return a router's URL, also of ``HOST:PORT``, as FastDeploy writes it."""
    return (text if "://" in text else f"http://{text}").rstrip("/")


def check_worker(arguments: argparse.Namespace) -> None:
    """Look at what a worker was told of the scheduler. Raises UsageError."""
    if arguments.scheduler_name != "splitwise":
        return
    if not arguments.router:
        raise UsageError("requests reach a worker by its routers, also with --scheduler-name splitwise; give --router")
    _note(
        "--scheduler-name splitwise concerns routers: give it to each of them, and this worker all of their addresses"
    )


def scheduler_config(arguments: argparse.Namespace, password: str | None) -> SchedulerConfig | None:
    """Return the settings of a router's scheduler; None: it works for itself."""
    from aiodatadist.serve.config import SchedulerConfig

    if arguments.scheduler_name != "splitwise":
        return None
    return SchedulerConfig(
        host=arguments.scheduler_host,
        port=arguments.scheduler_port,
        password=password,
        topic=arguments.scheduler_topic,
        ttl=arguments.scheduler_ttl,
        limit=arguments.scheduler_limit,
    )


def waits_for_room() -> bool:
    """Tell if requests wait for room at the workers: FastDeploy's variable, 1 where it is not set."""
    value = os.environ.get(_WAIT_VARIABLE, "1")
    if value not in ("0", "1"):
        raise UsageError(f"{_WAIT_VARIABLE} is {value!r}; give 0 (fail at once) or 1 (wait)")
    return value == "1"


def _note(text: str) -> None:
    print(f"aiodatadist serve: {text}", file=sys.stderr)
