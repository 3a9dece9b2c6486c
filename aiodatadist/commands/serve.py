"""Serve a language model by OpenAI's API, with prefill and decode in processes of their own.

  aiodatadist serve pd --prefill 2 --decode 2        all on this machine: router, prefill and decode workers
  aiodatadist serve pd --prefill 2 --decode 2 --check    the same, to see that it does what it should, and to end
  aiodatadist serve router                           one process of it: what clients talk to
  aiodatadist serve prefill --router http://HOST:8000
  aiodatadist serve decode --router http://HOST:8000
  aiodatadist serve mixed                            prefill and decode in one process, with a router or without
  aiodatadist serve worker --splitwise-role prefill  the same with FastDeploy's flags

Needs `pip install 'aiodatadist[serve]'`; docs/serving.md says more. The model is a small one that ships; with --model
smollm2 it is a real one, see `aiodatadist demo --help`.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from aiodatadist.errors import ConfigError, ExtraMissing, UsageError
from aiodatadist.model import MODEL_NAMES, find_model

from . import serve_fastdeploy as fastdeploy
from .failure import CommandError
from .serve_cluster import READY, local_cluster

if TYPE_CHECKING:
    from aiodatadist.serve.config import RouterConfig, Timeouts, WorkerConfig

__all__ = ["NAME", "SUMMARY", "add_arguments", "run"]

NAME: Final = "serve"
SUMMARY: Final = "serve a model by OpenAI's API, with prefill and decode workers and a router"

_PACKAGES: Final = ("aiohttp", "prometheus_client", "threadpoolctl")
_MODES: Final = {"pull": ("pull",), "push": ("push",), "both": ("pull", "push")}
_WAYS: Final = ("flip", "swap", "layer", "zero")
_POLICY_HELP: Final = "how to choose %s workers: random, round_robin (the default), power_of_two, least_load or prefix"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands of the command."""
    roles = parser.add_subparsers(title="what to run", metavar="WHAT", required=True, dest="what")
    everything = roles.add_parser("pd", help="a router with prefill and decode workers, on this machine")
    everything.add_argument("--prefill", type=_count, default=1, metavar="N", help="prefill workers (1)")
    everything.add_argument("--decode", type=_count, default=1, metavar="N", help="decode workers (1)")
    everything.add_argument("--port", type=int, default=8000, help="where the router listens (8000; 0: any)")
    _add_mode(everything)
    _add_model(everything)
    _add_policies(everything)
    everything.add_argument(
        "--check",
        action="store_true",
        help="check the tokens of both modes, kill workers under load, print what was found, and end",
    )
    # For tests of the check.
    everything.add_argument("--damage", choices=_WAYS, help=argparse.SUPPRESS)
    _add_limits(everything)
    _add_keys(everything)
    router = roles.add_parser("router", help="what clients talk to")
    _add_listening(router, 8000)
    _add_mode(router)
    _add_policies(router)
    _add_limits(router)
    _add_keys(router)
    fastdeploy.add_scheduler(router)
    for role in ("prefill", "decode", "mixed", "worker"):
        child = roles.add_parser(role, help="a worker" if role == "worker" else f"a {role} worker")
        if role == "worker":
            fastdeploy.add_role(child)
        else:
            child.set_defaults(role=role)
        _add_listening(child, 0)
        child.add_argument(
            "--router",
            type=fastdeploy.router_url,
            action="append",
            default=[],
            metavar="URL",
            help="register here; may be given again",
        )
        child.add_argument(
            "--advertise-host", metavar="HOST", help="under which others reach this worker (that of --host)"
        )
        child.add_argument(
            "--drain",
            type=float,
            default=0.0,
            metavar="S",
            help="seconds for what is under way when told to stop (0: none)",
        )
        child.add_argument("--kv-port", type=int, default=0, metavar="PORT", help="of the KV transfer (any)")
        _add_mode(child)
        _add_model(child)
        _add_timeouts(child)
        _add_proofs(child)
        _add_keys(child)
        fastdeploy.add_worker(child)


def _add_listening(parser: argparse.ArgumentParser, port: int) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="where HTTP listens (127.0.0.1)")
    parser.add_argument("--port", type=int, default=port, help=f"of HTTP ({port or 'any'})")
    # For a parent: stop when stdin ends.
    parser.add_argument("--with-parent", action="store_true", help=argparse.SUPPRESS)


def _add_mode(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mode",
        choices=tuple(_MODES),
        default="pull",
        help="how KV gets from prefill to decode workers (pull); both: by turns",
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODEL_NAMES, default="small", help="what to serve (small)")
    parser.add_argument("--num-blocks", type=_count, metavar="N", help="blocks of an engine's KV cache")
    parser.add_argument("--slots", type=_count, default=8, metavar="N", help="requests decoded at once (8)")
    parser.add_argument("--dp", type=_count, default=1, metavar="N", help="engines behind each worker (1)")
    parser.add_argument(
        "--transports", type=_names, default=("shm", "tcp"), metavar="A,B", help="of the KV transfer (shm,tcp)"
    )


def _add_proofs(parser: argparse.ArgumentParser) -> None:
    # For checks: have workers compare the KV that has arrived with what was sent, and damage it.
    parser.add_argument("--digests", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--damage", choices=_WAYS, help=argparse.SUPPRESS)


def _add_policies(parser: argparse.ArgumentParser) -> None:
    for role in ("prefill", "decode", "mixed"):
        parser.add_argument(f"--{role}-policy", default="round_robin", metavar="NAME", help=_POLICY_HELP % role)
    parser.add_argument("--max-running", type=_count, metavar="N", help="requests with workers at once (4 a slot)")
    parser.add_argument("--queue", type=int, default=256, metavar="N", help="requests that wait for that (256)")
    parser.add_argument("--queue-wait", type=float, default=10.0, metavar="S", help="seconds that each waits (10)")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    _add_timeouts(parser)
    parser.add_argument(
        "--request-timeout-secs", type=float, metavar="S", help="as --timeout request=S, by FastDeploy's name"
    )
    parser.add_argument(
        "--health",
        type=_NamedNumber,
        action="append",
        default=[],
        metavar="NAME=N",
        help="when a worker gets no requests: failures, open_time, passes, probe_period, probe_failures, probe_passes, "
        "slow_start or drain; may be given again",
    )
    parser.add_argument("--heartbeat", type=float, default=2.0, metavar="S", help="of workers; 3 missing: lost (2)")
    parser.add_argument("--retries", type=int, default=2, metavar="N", help="attempts of a request after the first (2)")
    parser.add_argument(
        "--migrate",
        type=int,
        default=0,
        metavar="N",
        help="how often another worker goes on with an answer whose worker dies (0)",
    )


def _add_timeouts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--timeout",
        type=_NamedNumber,
        action="append",
        default=[],
        metavar="NAME=S",
        help="seconds of connect, prefill, first_token, idle, request, transfer, lease or reservation; "
        "may be given again",
    )


class _NamedNumber:
    """An option's value such as ``idle=30``."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.name, _, number = text.partition("=")
        try:
            self.number = float(number)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not NAME=NUMBER") from None


def _settings(default: Any, given: Sequence[_NamedNumber], option: str) -> Any:
    """Return a dataclass of numbers with those that were given."""
    names, numbers = [field.name for field in fields(default)], {}
    for each in given:
        if each.name not in names:
            raise ConfigError(f"{option} {each.text}: {each.name!r} is none of {', '.join(names)}")
        numbers[each.name] = type(getattr(default, each.name))(each.number)
    return replace(default, **numbers)


def _add_keys(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="holds the key that clients have to send")
    parser.add_argument("--cluster-key-file", type=Path, metavar="FILE", help="holds the secret of the cluster")


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def run(arguments: argparse.Namespace) -> int:
    """Run the command until it is told to stop: SIGINT or SIGTERM."""
    packages = (*_PACKAGES, "redis") if getattr(arguments, "scheduler_name", "") == "splitwise" else _PACKAGES
    if missing := tuple(name for name in packages if find_spec(name) is None):
        raise ExtraMissing(extra="serve", packages=missing)
    # The library leaves its logger to the application, and here that is this command.
    # A whole cluster says what it does in its processes.
    level = logging.WARNING if arguments.what == "pd" else logging.INFO
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    if getattr(arguments, "model", None) is not None:
        find_model(arguments.model).fetch(lambda line: print(line, file=sys.stderr, flush=True))
    if arguments.what == "pd":
        asyncio.run(_run_cluster(arguments))
    else:
        asyncio.run(_run_one(arguments))
    return 0


async def _run_one(arguments: argparse.Namespace) -> None:
    async with _stopping(arguments.with_parent) as stop, _process(arguments) as url:
        print(READY, arguments.what, url, flush=True)
        await stop.wait()


def _process(arguments: argparse.Namespace) -> AbstractAsyncContextManager[str]:
    return _router(_router_config(arguments)) if arguments.what == "router" else _worker(_worker_config(arguments))


@asynccontextmanager
async def _router(config: RouterConfig) -> AsyncIterator[str]:
    from aiodatadist.serve.router import router

    async with router(config) as here:
        yield here.url


@asynccontextmanager
async def _worker(config: WorkerConfig) -> AsyncIterator[str]:
    from aiodatadist.serve.worker import worker

    async with worker(config) as here:
        yield here.url


def _router_config(arguments: argparse.Namespace) -> RouterConfig:
    from aiodatadist.serve.config import HealthLimits, RouterConfig

    return RouterConfig(
        host=arguments.host,
        port=arguments.port,
        modes=_MODES[arguments.mode],
        prefill_policy=arguments.prefill_policy,
        decode_policy=arguments.decode_policy,
        mixed_policy=arguments.mixed_policy,
        max_running=arguments.max_running,
        queue_size=arguments.queue,
        queue_wait=arguments.queue_wait,
        api_key=_read_text(arguments.api_key_file),
        cluster_key=_read_bytes(arguments.cluster_key_file),
        heartbeat=arguments.heartbeat,
        retries=arguments.retries,
        migrate=arguments.migrate,
        health=_settings(HealthLimits(), arguments.health, "--health"),
        timeouts=_timeouts(arguments),
        scheduler=fastdeploy.scheduler_config(arguments, _read_text(arguments.scheduler_password_file)),
        wait_for_room=fastdeploy.waits_for_room(),
    )


def _worker_config(arguments: argparse.Namespace) -> WorkerConfig:
    from aiodatadist.serve.config import WorkerConfig

    fastdeploy.check_worker(arguments)
    return WorkerConfig(
        role=arguments.role,
        host=arguments.host,
        port=arguments.port,
        advertise=arguments.advertise_host,
        kv_port=arguments.kv_port,
        metrics_port=arguments.metrics_port,
        routers=tuple(arguments.router),
        model=arguments.model,
        num_blocks=arguments.num_blocks,
        slots=arguments.slots,
        engines=arguments.dp,
        modes=_MODES[arguments.mode],
        transports=arguments.transports,
        drain=arguments.drain,
        digests=arguments.digests,
        damage=arguments.damage,
        api_key=_read_text(arguments.api_key_file),
        cluster_key=_read_bytes(arguments.cluster_key_file),
        timeouts=_timeouts(arguments),
    )


def _timeouts(arguments: argparse.Namespace) -> Timeouts:
    from aiodatadist.serve.config import Timeouts

    given = list(arguments.timeout)
    if getattr(arguments, "request_timeout_secs", None) is not None:
        given.append(_NamedNumber(f"request={arguments.request_timeout_secs}"))
    timeouts: Timeouts = _settings(Timeouts(), given, "--timeout")
    return timeouts


def _read_bytes(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes().strip()
    except OSError as why:
        raise CommandError(f"cannot read {path}: {why.strerror}") from why


def _read_text(path: Path | None) -> str | None:
    key = _read_bytes(path)
    return None if key is None else key.decode()


def _cluster_options(arguments: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return the options of the router and of the workers that ``serve pd`` starts."""
    policies = [
        option
        for role in ("prefill", "decode", "mixed")
        for option in (f"--{role}-policy", getattr(arguments, f"{role}_policy"))
    ]
    mode = "both" if arguments.check else arguments.mode
    router_options = ["--port", str(arguments.port), "--mode", mode, *policies]
    router_options += ["--queue", str(arguments.queue), "--queue-wait", str(arguments.queue_wait)]
    router_options += ["--heartbeat", str(arguments.heartbeat), "--retries", str(arguments.retries)]
    router_options += ["--migrate", str(arguments.migrate)]
    router_options += [word for limit in arguments.health for word in ("--health", limit.text)]
    if arguments.request_timeout_secs is not None:
        router_options += ["--request-timeout-secs", str(arguments.request_timeout_secs)]
    if arguments.max_running is not None:
        router_options += ["--max-running", str(arguments.max_running)]
    worker_options = ["--mode", mode, "--model", arguments.model, "--slots", str(arguments.slots)]
    worker_options += ["--dp", str(arguments.dp), "--transports", ",".join(arguments.transports)]
    if arguments.num_blocks is not None:
        worker_options += ["--num-blocks", str(arguments.num_blocks)]
    if arguments.check and (arguments.api_key_file or arguments.cluster_key_file):
        raise UsageError(
            "--check looks into its workers and has no keys; leave --api-key-file and --cluster-key-file out"
        )
    for option, file in (
        ("--api-key-file", arguments.api_key_file),
        ("--cluster-key-file", arguments.cluster_key_file),
    ):
        for options in (router_options, worker_options):
            options += [] if file is None else [option, str(file)]
    for options in (router_options, worker_options):
        options += [word for limit in arguments.timeout for word in ("--timeout", limit.text)]
    return router_options, worker_options


async def _run_cluster(arguments: argparse.Namespace) -> None:
    router_options, worker_options = _cluster_options(arguments)
    counts = {"prefill": arguments.prefill, "decode": arguments.decode}
    if arguments.check:
        from .serve_check import run_check

        if arguments.damage is not None:
            worker_options += ["--damage", arguments.damage]
        await run_check(
            counts,
            arguments.model,
            router_options=router_options,
            worker_options=worker_options,
            say=lambda line: print(line, flush=True),
        )
        return
    async with (
        _stopping(False) as stop,
        local_cluster(counts, router_options=router_options, worker_options=worker_options) as cluster,
    ):
        await cluster.wait_ready()
        for child in cluster.processes:
            print(f"{child.name:<12} {child.url}  process {child.process.pid}", flush=True)
        print(_curl(cluster.url, arguments.model), flush=True)
        ends = [asyncio.create_task(child.process.wait()) for child in cluster.processes]
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait([stopped, *ends], return_when=asyncio.FIRST_COMPLETED)
        gone = [child for child in cluster.processes if child.process.returncode is not None]
        for task in (stopped, *ends):
            task.cancel()
        if not stop.is_set():
            raise CommandError(f"{gone[0].name} ended with exit code {gone[0].process.returncode}")


def _curl(url: str, model: str) -> str:
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Tell me a story."}}], "stream": true}}'
    return f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"


@asynccontextmanager
async def _stopping(with_parent: bool) -> AsyncIterator[asyncio.Event]:
    """Yield an event that is set when the process is told to stop."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    signals: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, stop.set)
    if with_parent:
        loop.add_reader(0, stop.set)  # nothing is ever sent: readable means that the parent is gone
    try:
        yield stop
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
        if with_parent:
            loop.remove_reader(0)
