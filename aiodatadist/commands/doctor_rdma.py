"""Say whether RDMA works on this machine and, where it does not, exactly why and how to change it.

Lists the RDMA devices with their ports, addresses, interfaces and places, chooses the NICs for the processors and for
each accelerator and says why, recommends HCCL_RDMA_TIMEOUT, and moves blocks between two nodes of this process over
verbs. Exits 0 if those arrived, 1 if not, 2 if a variable of the environment cannot be used.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

import numpy as np

import aiodatadist
from aiodatadist import _core
from aiodatadist.config import Config
from aiodatadist.errors import ConfigError, DataDistError

from . import machine
from .rdma_choice import TIMEOUTS, Choice, choose, recommended_timeout, retransmission_seconds, unusable
from .rdma_devices import LIBRARY, SYS, Accelerator, Device, Library, accelerators, devices

__all__ = ["NAME", "SUMMARY", "Finding", "Loopback", "Report", "add_arguments", "examine", "run", "seconds_above_0"]

NAME: Final = "rdma"
SUMMARY: Final = "say whether RDMA works here, and choose NICs"

_PREFIXES: Final = ("AIODATADIST_RDMA_", "KVCACHE_", "HCCL_RDMA_")
_RETRIES: Final = "HCCL_RDMA_RETRY_CNT"
_TIMEOUT: Final = "HCCL_RDMA_TIMEOUT"

_LOOPBACK_SECONDS: Final = 60.0
_BLOCKS: Final = 64
_BLOCK_BYTES: Final = 16 * 1024


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is in the way.

    Attributes
    ----------
    what : str
        ``"built without verbs"``, ``"no libibverbs"``, ``"no device"``, ``"port down"``, ``"no usable device"``,
        ``"not usable"``, ``"memlock"``, ``"transfer failed"``.
    why : str
    fix : str
    fatal : bool
        Nothing works as long as it is so.
    """

    what: str
    why: str
    fix: str
    fatal: bool = True


@dataclass(frozen=True, slots=True)
class Loopback:
    """A transfer between two nodes of this process.

    Attributes
    ----------
    works : bool or None
        None: it was not tried.
    detail : str
    """

    works: bool | None
    detail: str


@dataclass(frozen=True, slots=True)
class Timeouts:
    """What HCCL_RDMA_TIMEOUT should be.

    Attributes
    ----------
    transfer : float
        Seconds that a transfer may take.
    retries : int
        Of the NIC: HCCL_RDMA_RETRY_CNT.
    recommended : int
    seconds : float
        After which a NIC gives up with what is recommended.
    present : int or None
        HCCL_RDMA_TIMEOUT of this environment.
    present_seconds : float or None
    """

    transfer: float
    retries: int
    recommended: int
    seconds: float
    present: int | None
    present_seconds: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """What `examine` found.

    Attributes
    ----------
    status : str
        ``"ready"``, or what the first fatal finding says.
    findings : list of Finding
        In the order in which to put them right.
    transport : str
        What the transport verbs says of itself.
    library : Library
    devices : list of Device
    accelerators : list of Accelerator
    choices : list of Choice
    settings : dict
        The fields of Config for RDMA.
    variables : dict
        Those of the environment that are about RDMA.
    timeouts : Timeouts
    memlock : machine.Limit
    rights : machine.Rights
    loopback : Loopback
    """

    status: str
    findings: list[Finding]
    transport: str
    library: Library
    devices: list[Device]
    accelerators: list[Accelerator]
    choices: list[Choice]
    settings: dict[str, Any]
    variables: dict[str, str]
    timeouts: Timeouts
    memlock: machine.Limit
    rights: machine.Rights
    loopback: Loopback


# What is in the way. ----------------------------------------------------------------------------------------


def _in_the_way(usable: bool, detail: str, library: Library, found: list[Device]) -> Iterator[Finding]:
    if "built without verbs" in detail:
        fix = "install libibverbs-dev (Debian) or rdma-core-devel (Fedora, openEuler), then install aiodatadist anew"
        yield Finding("built without verbs", "infiniband/verbs.h was not there when this aiodatadist was built", fix)
    if not library.there:
        fix = "install libibverbs1 and ibverbs-providers (Debian) or rdma-core (Fedora, openEuler)"
        yield Finding("no libibverbs", library.error or LIBRARY, fix)
    if not found:
        why = f"{SYS / 'class/infiniband'} has none"
        if library.there and library.error is not None:
            why += f"; {library.error}"
        fix = (
            "load the driver of the NIC (modprobe mlx5_ib, hns_roce_hw_v2, ...); give the virtual machine or the "
            "container one; or make one in software: rdma link add rxe0 type rxe netdev INTERFACE"
        )
        yield Finding("no device", why, fix)
        return
    troubles = {device.name: unusable(device, library) for device in found}
    if all(troubles.values()):
        down = all(device.ports and all(port.state != "ACTIVE" for port in device.ports) for device in found)
        said = "; ".join(f"{name}: {trouble}" for name, trouble in troubles.items())
        yield Finding("port down" if down else "no usable device", said, "as it says for each device")
    elif not usable and library.there and "built without verbs" not in detail:
        fix = "as the reason says; Config.rdma_devices may name one that cannot be used"
        yield Finding("not usable", detail, fix)


def _memlock(limit: machine.Limit, rights: machine.Rights) -> Iterator[Finding]:
    if limit.soft is not None and not rights.ipc_lock:
        yield Finding(
            "memlock",
            f"memory that is registered is locked, and this process may lock {limit.soft:,} bytes",
            "ulimit -l unlimited; LimitMEMLOCK=infinity (systemd); --ulimit memlock=-1 (docker); or CAP_IPC_LOCK",
            fatal=False,
        )


# A transfer. ------------------------------------------------------------------------------------------------


async def _transfer(config: Config) -> str:
    """Pull and push blocks between two nodes and compare them; return how it went."""
    key = aiodatadist.BlocksCacheKey(1)
    shape = (_BLOCKS, _BLOCK_BYTES)
    random = np.random.default_rng(0)
    theirs = [random.integers(0, 256, shape, np.uint8) for _ in range(2)]
    mine = [np.zeros(shape, np.uint8) for _ in range(2)]
    half = _BLOCKS // 2
    async with (
        aiodatadist.DataDist(1, aiodatadist.Role.PROMPT, listen="127.0.0.1:0", config=config) as owner,
        aiodatadist.DataDist(2, aiodatadist.Role.DECODER, config=config) as user,
    ):
        source = owner.cache_manager.register_blocks_cache(theirs, key=key)
        target = user.cache_manager.register_blocks_cache(mine, remote=None)
        await source.ready()
        address = owner.listen_address
        assert address is not None
        link = await user.link(aiodatadist.ClusterInfo(1, address))
        # Backwards, so that each block is a piece of its own.
        there, here = list(range(_BLOCKS)), list(reversed(range(_BLOCKS)))
        await user.cache_manager.pull_blocks(key, target, there, here)
        if not all((a == b[::-1]).all() for a, b in zip(theirs, mine, strict=True)):
            raise DataDistError("blocks that were pulled are not those of their owner")
        for tensor in mine:
            tensor[:half] ^= 0xFF
        await user.cache_manager.push_blocks(key, target, here[half:], there[half:], notify=b"pushed")
        await anext(aiter(owner.notifications()))
        if not all((a == b[::-1]).all() for a, b in zip(theirs, mine, strict=True)):
            raise DataDistError("blocks that were pushed have not arrived")
        moved = sum(tensor.nbytes for tensor in mine)
        return f"{moved:,} bytes pulled and {moved // 2:,} pushed over {link.path.transport}, each block right"


def _loopback(config: Config) -> Loopback:
    try:
        return Loopback(True, asyncio.run(asyncio.wait_for(_transfer(config), _LOOPBACK_SECONDS)))
    except TimeoutError:
        return Loopback(False, f"not done after {_LOOPBACK_SECONDS:g} s")
    except DataDistError as why:
        return Loopback(False, f"{type(why).__name__}: {' '.join(str(why).split())}")


# All of it. -------------------------------------------------------------------------------------------------


def _nodes() -> list[int]:
    """Return the NUMA nodes whose processors this process may run on."""
    mine = os.sched_getaffinity(0)
    return [
        int(folder.name[4:])
        for folder in sorted((SYS / "devices/system/node").glob("node[0-9]*"))
        if any((folder / f"cpu{number}").exists() for number in mine)
    ]


def _whole(name: str, least: int, most: int) -> int | None:
    """Read a whole number from the environment; None: it is not set."""
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    if not text.isdecimal() or not least <= int(text) <= most:
        raise ConfigError(f"{name}={text!r:.40} is no whole number from {least} to {most}", hint=f"unset {name}")
    return int(text)


def _timeouts(transfer: float) -> Timeouts:
    retries, present = _whole(_RETRIES, 1, 7), _whole(_TIMEOUT, *TIMEOUTS)
    retries = 7 if retries is None else retries
    recommended = recommended_timeout(transfer, retries)
    return Timeouts(
        transfer=transfer,
        retries=retries,
        recommended=recommended,
        seconds=retransmission_seconds(recommended, retries),
        present=present,
        present_seconds=None if present is None else retransmission_seconds(present, retries),
    )


def examine(transfer: float) -> Report:
    """Look at this process and this machine, and try a transfer if one can be tried.

    Parameters
    ----------
    transfer : float
        Seconds that a transfer may take, for the recommended timeout.

    Raises
    ------
    ConfigError
        A variable of the environment cannot be used.
    """
    # Before the Config, which reads the same variables under names of its own.
    timeouts = _timeouts(transfer)
    with warnings.catch_warnings():
        # Of variables that nobody knows: `aiodatadist doctor` names them.
        warnings.simplefilter("ignore")
        config = Config.from_env(transports=("verbs",))
    usable, detail = next(
        ((usable, detail) for name, usable, detail in _core.probe_transports() if name == "verbs"),
        (False, "this version has no such transport yet"),
    )
    library, found, computing = Library.ask(), devices(), accelerators()
    memlock, rights = machine.limits()["memlock"], machine.rights()
    findings = [*_in_the_way(usable, detail, library, found), *_memlock(memlock, rights)]
    loopback = Loopback(None, "the transport is not usable")
    if usable:
        loopback = _loopback(config)
        if not loopback.works:
            findings.append(Finding("transfer failed", loopback.detail, "as the reason says; see docs/rdma.md"))
    return Report(
        status="ready" if loopback.works else next((one.what for one in findings if one.fatal), "not usable"),
        findings=findings,
        transport=detail,
        library=library,
        devices=found,
        accelerators=computing,
        choices=choose(found, computing, library, _nodes()),
        settings={one.name: getattr(config, one.name) for one in fields(config) if one.name.startswith("rdma_")},
        variables={name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)},
        timeouts=timeouts,
        memlock=memlock,
        rights=rights,
        loopback=loopback,
    )


# Text. ------------------------------------------------------------------------------------------------------


def _row(name: str, text: str) -> str:
    return f"  {name:<20}{text}"


def _about_device(device: Device) -> Iterator[str]:
    what = f"in software, on {device.software_on}" if device.software_on else device.driver or "unknown driver"
    said = [what, device.kind]
    if device.firmware:
        said.append(f"firmware {device.firmware}")
    if device.place is None:
        said.append("no PCI place")
    else:
        root = f"root port {device.place.root_port}" if device.place.root_port else f"at {device.place.bridge}"
        said.append(f"PCI {device.place.address}, {root}")
        said.append("NUMA node unknown" if device.place.numa_node is None else f"NUMA node {device.place.numa_node}")
    said.append(device.node or "no file")
    yield _row(device.name, ", ".join(said))
    for netdev in device.netdevs:
        words = [netdev.state or "state unknown"]
        if netdev.mtu is not None:
            words.append(f"MTU {netdev.mtu}")
        if netdev.members:
            words.append(f"a bond of {' '.join(netdev.members)}")
        if netdev.bond:
            words.append(f"of the bond {netdev.bond}")
        yield _row(f"  interface {netdev.name}", ", ".join(words))
    for port in device.ports:
        words = [port.state, port.physical, f"{port.link_layer}{' (RoCE)' if port.roce else ''}", port.rate or ""]
        if not port.roce:
            words.append(f"LID {port.lid}, subnet manager {port.subnet_manager}")
        yield _row(f"  port {port.number}", ", ".join(filter(None, words)))
        for gid in port.gids:
            words = [gid.address, gid.kind or "", gid.netdev or ""]
            yield _row(f"    GID {gid.index}", ", ".join(filter(None, words)))


def _about_choice(choice: Choice) -> Iterator[str]:
    yield f"NICs for {choice.whom}"
    for opinion in choice.opinions:
        yield _row(opinion.device, f"{'picked' if opinion.picked else 'refused'}: {opinion.reason}")
    if choice.picked:
        yield _row("use", f"AIODATADIST_RDMA_DEVICES={','.join(choice.picked)}")
    else:
        yield _row("use", "none")


def _about_timeouts(timeouts: Timeouts) -> Iterator[str]:
    yield _row(
        "recommended",
        f"{_TIMEOUT}={timeouts.recommended} for transfers of {timeouts.transfer:g} s with {_RETRIES}="
        f"{timeouts.retries}: the NIC gives up after {timeouts.seconds:.3g} s",
    )
    if timeouts.present is not None:
        yield _row("this environment", f"{_TIMEOUT}={timeouts.present}: after {timeouts.present_seconds:.3g} s")


def _lines(report: Report) -> Iterator[str]:
    yield "transport"
    yield _row("verbs", report.transport)
    library = report.library
    offered = ", ".join(library.devices) or "no device"
    yield _row("libibverbs", f"{LIBRARY} offers {offered}" if library.error is None else library.error)
    yield _row("memlock", f"{report.memlock}; {report.rights}")
    yield "devices"
    if not report.devices:
        yield _row("none", str(SYS / "class/infiniband"))
    for device in report.devices:
        yield from _about_device(device)
    if report.accelerators:
        yield "accelerators"
        for one in report.accelerators:
            where = one.place.root_port or one.place.bridge
            yield _row(one.place.address, f"{one.vendor}, behind {where}, NUMA node {one.place.numa_node}")
    if report.devices:
        for choice in report.choices:
            yield from _about_choice(choice)
    yield "Config and environment"
    for name, value in (*report.settings.items(), *report.variables.items()):
        yield _row(name, f"{value}")
    yield "timeouts"
    yield from _about_timeouts(report.timeouts)
    yield "a transfer between two nodes of this process"
    said = {True: "works", False: "FAILED", None: "not tried"}[report.loopback.works]
    yield _row(said, report.loopback.detail)
    for finding in report.findings:
        yield f"{'PROBLEM' if finding.fatal else 'NOTE'}: {finding.what}: {finding.why}"
        yield f"  to change it: {finding.fix}"
    if report.status == "ready":
        yield "RDMA is ready."
    else:
        yield f"RDMA cannot be used: {report.status}. shm and tcp do not need it."


def seconds_above_0(text: str) -> float:
    """Read a number of seconds of the command line."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(text)
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument(
        "--transfer-timeout",
        type=seconds_above_0,
        default=1.0,
        metavar="SECONDS",
        help="how long a transfer may take, for the recommended HCCL_RDMA_TIMEOUT (1)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command: print the report, and return the exit code that the module's docstring names."""
    report = examine(arguments.transfer_timeout)
    if arguments.json:
        print(json.dumps(asdict(report), indent=2))
    else:
        print("\n".join(_lines(report)))
    return 0 if report.status == "ready" else 1
