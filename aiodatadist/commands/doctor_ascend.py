"""Say whether HIXL can move memory of NPUs on this machine and, where it cannot, exactly why and how to change it.

Looks at the driver, CANN and its HIXL library, the NPUs, the network port of each (hccn_tool: link, address, TLS, ping
of the next NPU), and the environment that NPUs talk by. Exits 0 if the transport hixl is usable, 1 if not, 2 if a
variable of the environment cannot be used.

With two NPUs, start `aiodatadist doctor ascend --serve 0.0.0.0:26000` for one of them, and for the other
`aiodatadist doctor ascend --check HOST:26000`: that links the two and moves memory between them, step by step. It exits
0 if every step went well. Please report what it prints, or its --json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import aiodatadist
from aiodatadist._hixl import open_engine
from aiodatadist.config import Config

from . import ascend_check, ascend_host
from .ascend_host import Npu, Ping, Port, Toolkit
from .ascend_memory import NpuMemory, PinnedMemory
from .ascend_variables import Variable, judged
from .doctor_rdma import Finding, seconds_above_0
from .failure import CommandError

__all__ = ["NAME", "SUMMARY", "Network", "Report", "add_arguments", "examine", "run"]

NAME: Final = "ascend"
SUMMARY: Final = "say whether HIXL and NPUs work here"

_MOST_PORTS: Final = 64


@dataclass(frozen=True, slots=True)
class Network:
    """What is known of the NPUs' network ports.

    Attributes
    ----------
    tool : str or None
        The hccn_tool that was asked; None: there is none.
    ports : list of Port
    pings : list of Ping
        From each NPU with an address to the next one of this machine; as `ports` without those that have none.
    configured : dict
        Addresses in /etc/hccn.conf, by number of the NPU.
    """

    tool: str | None
    ports: list[Port]
    pings: list[Ping]
    configured: dict[int, str]


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
        What the transport hixl says of itself.
    usable : bool
        What it says of being usable.
    driver : str or None
        Version of the NPU driver.
    toolkits : list of Toolkit
    npus : list of Npu
    cards : int
        Ascend cards on the PCI bus.
    network : Network
    variables : list of Variable
    """

    status: str
    findings: list[Finding]
    transport: str
    usable: bool
    driver: str | None
    toolkits: list[Toolkit]
    npus: list[Npu]
    cards: int
    network: Network
    variables: list[Variable]


# Finding out. -----------------------------------------------------------------------------------------------


def _network(found: Sequence[Npu]) -> Network:
    numbers = [one.number for one in found][:_MOST_PORTS]
    configured = ascend_host.configured_addresses(numbers)
    tool = ascend_host.hccn_tool() if numbers else None
    if tool is None:
        return Network(None, [], [], configured)
    ports = [ascend_host.port_of(tool, number) for number in numbers]
    # One after the other in a ring, so that each is pinged once and pings once.
    ring = [port for port in ports if port.address is not None]
    pings = [
        ascend_host.ping(tool, port.number, str(after.address))
        for port, after in zip(ring, [*ring[1:], *ring[:1]], strict=True)
        if after is not port
    ]
    return Network(tool, ports, pings, configured)


def _about_hardware(
    driver: str | None, found: Sequence[Npu], cards: int, kits: Sequence[Toolkit], usable: bool, detail: str
) -> Iterator[Finding]:
    if not found:
        files = ascend_host.DEV / "davinci*"
        if cards:
            yield Finding(
                "no driver",
                f"the PCI bus has {cards} Ascend cards, and there is no {files}",
                "install the NPU driver and firmware and load it; give the container the files and the driver's folder",
            )
        else:
            yield Finding(
                "no NPU",
                f"there is no {files}, and no Ascend card on the PCI bus",
                "run this on an Ascend host; in a container pass /dev/davinci0 ..., /dev/davinci_manager, "
                "/dev/devmm_svm, /dev/hisi_hdc and the driver's folder into it",
            )
    elif all(one.refused for one in found):
        yield Finding(
            "no access",
            "; ".join(f"{one.file}: {one.refused}" for one in found),
            "run as a user of the group that owns the files (HwHiAiUser)",
        )
    if found and driver is None:
        yield Finding(
            "driver unknown",
            f"{ascend_host.ASCEND / 'driver/version.info'} does not say its version",
            "give the container the driver's folder",
            fatal=False,
        )
    if not kits:
        yield Finding(
            "no CANN",
            f"neither ASCEND_HOME_PATH nor {ascend_host.ASCEND} has it",
            "install the CANN toolkit, and source its set_env.sh in the shell that starts this",
        )
    if not usable:
        yield Finding("not usable", detail, "as the reason says")


def _about_network(network: Network, found: Sequence[Npu]) -> Iterator[Finding]:
    if not found:
        return
    if network.tool is None and not network.configured:
        yield Finding(
            "no hccn_tool",
            "it is neither in PATH nor beside the driver, and /etc/hccn.conf gives no addresses: the ports' addresses "
            "are unknown to CANN as well",
            "give the container driver/tools/hccn_tool or /etc/hccn.conf, or name them in hixl's LocalCommRes",
            fatal=False,
        )
    for port in network.ports:
        if port.link == "DOWN":
            yield Finding(
                "link down",
                f"the port of NPU {port.number} is down: it has no RoCE; HCCS within a server or pod needs none",
                "look at its cable, optics and switch port",
                fatal=False,
            )
    for pinged in network.pings:
        if not pinged.works:
            yield Finding(
                "ping",
                f"{pinged.address}: {pinged.error or f'{pinged.received} of {pinged.sent} packets came back'}",
                "look at addresses, netmasks, gateways and VLANs of both ports",
                fatal=False,
            )
    switches = {port.tls for port in network.ports if port.tls is not None}
    if len(switches) == 2:
        on = [port.number for port in network.ports if port.tls]
        yield Finding(
            "tls", f"it is on for NPUs {on} and off for the others", "make it the same everywhere: hccn_tool -tls"
        )
    elif switches == {True}:
        yield Finding(
            "tls",
            "it is on: linking takes longer, and peers need it as well",
            "give links a timeout of at least 2 s",
            fatal=False,
        )


def _about_variables(variables: Sequence[Variable]) -> Iterator[Finding]:
    for one in variables:
        if one.verdict == "wrong":
            yield Finding("variable", f"{one.name}={one.value}: {one.judgement}", f"change it, or unset {one.name}")


def probed(config: Config) -> tuple[bool, str]:
    """Open HIXL as a DataDist would, and close it again; return whether that went well, and words."""
    engine, words = open_engine(config, None)
    return engine is not None, words


def examine(transfer: float, device: int | None = None) -> Report:
    """Look at this process and this machine.

    Parameters
    ----------
    transfer : float
        Seconds that a transfer may take, for the judgement of HCCL_RDMA_TIMEOUT.
    device : int, optional
        The NPU to open, in the place of `Config.device_id`.

    Raises
    ------
    ConfigError
        An ``AIODATADIST_*`` variable cannot be used.
    """
    variables = judged(os.environ, transfer)
    with warnings.catch_warnings():
        # Of variables that nobody knows: `aiodatadist doctor` names them. Wrong ones of HCCL are findings.
        warnings.simplefilter("ignore")
        config = Config.from_env({name: value for name, value in os.environ.items() if not name.startswith("HCCL_")})
    usable, detail = probed(config if device is None else replace(config, device_id=device))
    found, cards = ascend_host.npus()
    driver, kits, network = ascend_host.driver_version(), ascend_host.toolkits(os.environ), _network(found)
    findings = [
        *_about_variables(variables),
        *_about_hardware(driver, found, cards, kits, usable, detail),
        *_about_network(network, found),
    ]
    return Report(
        status=next((one.what for one in findings if one.fatal), "ready"),
        findings=findings,
        transport=detail,
        usable=usable,
        driver=driver,
        toolkits=kits,
        npus=found,
        cards=cards,
        network=network,
        variables=variables,
    )


# Text. ------------------------------------------------------------------------------------------------------


def _row(name: str, text: str) -> str:
    return f"  {name:<24}{text}"


def _about_port(port: Port) -> str:
    words = [f"link {port.link or 'unknown'}", f"address {port.address or 'unknown'}"]
    if port.netmask is not None:
        words.append(f"netmask {port.netmask}")
    words.append({True: "TLS on", False: "TLS off", None: "TLS unknown"}[port.tls])
    return ", ".join([*words, *port.errors])


def _about_ping(pinged: Ping) -> str:
    return pinged.error or f"{pinged.received} of {pinged.sent} packets came back"


def lines(report: Report) -> Iterator[str]:
    """Return the report as text."""
    yield "software"
    yield _row("transport hixl", f"{'usable' if report.usable else 'NOT usable'}: {report.transport}")
    yield _row("NPU driver", report.driver or "not found")
    if not report.toolkits:
        yield _row("CANN", "not found")
    for kit in report.toolkits:
        yield _row("CANN", f"{kit.version or 'unknown version'} in {kit.home}{', active' if kit.active else ''}")
    yield "NPUs"
    if not report.npus:
        yield _row("none", f"{report.cards} Ascend cards on the PCI bus")
    for one in report.npus:
        yield _row(f"NPU {one.number}", f"{one.file}{f': {one.refused}' if one.refused else ''}")
    if report.npus:
        network = report.network
        yield "network of the NPUs"
        yield _row("hccn_tool", network.tool or "not found")
        for port in network.ports:
            yield _row(f"NPU {port.number}", _about_port(port))
        for pinged in network.pings:
            yield _row(f"ping {pinged.address}", _about_ping(pinged))
        for number, address in network.configured.items():
            yield _row("hccn.conf", f"NPU {number}: {address}")
    yield "environment"
    marks = {"fine": "", "look": "LOOK: ", "wrong": "WRONG: "}
    for variable in report.variables:
        yield _row(variable.name, "not set" if variable.value is None else variable.value)
        yield _row("", variable.means)
        yield _row("", f"{marks[variable.verdict]}{variable.judgement}")
    for finding in report.findings:
        yield f"{'PROBLEM' if finding.fatal else 'NOTE'}: {finding.what}: {finding.why}"
        yield f"  to change it: {finding.fix}"
    if report.status == "ready":
        yield "HIXL can be used."
    else:
        yield f"HIXL cannot be used: {report.status}. Host memory needs none of it: shm, tcp and verbs carry that."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument(
        "--transfer-timeout",
        type=seconds_above_0,
        default=1.0,
        metavar="SECONDS",
        help="how long a transfer may take, for HCCL_RDMA_TIMEOUT (1)",
    )
    sides = parser.add_mutually_exclusive_group()
    sides.add_argument(
        "--check", metavar="PEER", help="move memory to and from an NPU of the side that serves at HOST:PORT"
    )
    sides.add_argument("--serve", metavar="ADDRESS", help="serve one check, at HOST:PORT")
    parser.add_argument("--device", type=_device, metavar="NUMBER", help="the NPU to use (AIODATADIST_DEVICE_ID, or 0)")


def _device(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError(text)
    return number


def run(arguments: argparse.Namespace) -> int:
    """Run the command: print the report, and return the exit code that the module's docstring names."""
    report = examine(arguments.transfer_timeout, arguments.device)
    with_peer = arguments.check is not None or arguments.serve is not None
    if not arguments.json:
        print("\n".join(lines(report)))
    elif not with_peer:
        print(json.dumps(asdict(report), indent=2))
    if report.status == "variable":
        return 2
    if not with_peer:
        return 0 if report.status == "ready" else 1
    if not report.usable:
        raise CommandError(f"HIXL cannot be used: {report.transport}")
    steps = _with_peer(arguments, report)
    if arguments.json:
        print(json.dumps({**asdict(report), "steps": [asdict(step) for step in steps]}, indent=2))
    return 1 if any(step.outcome == "FAILED" for step in steps) else 0


# With a peer. -----------------------------------------------------------------------------------------------


def memories(config: Config) -> tuple[ascend_check.Memory, ascend_check.Memory]:
    """Return where the caches of a check lie: on the NPU, and in host memory."""
    library, device = config.hixl_library, config.device_id or 0
    return NpuMemory(library, device), PinnedMemory(library, device)


def _about(report: Report, device: int) -> dict[str, Any]:
    """Return what the other side should know of this one."""
    address = next((port.address for port in report.network.ports if port.number == device), None)
    address = address or report.network.configured.get(device)
    return {
        "aiodatadist": aiodatadist.__version__,
        "machine": platform.machine(),
        "driver": report.driver,
        "CANN": [kit.version for kit in report.toolkits],
        "hixl": report.transport,
        "NPU": device,
        "addresses": [address] if address else [],
    }


def _with_peer(arguments: argparse.Namespace, report: Report) -> list[ascend_check.Step]:
    config = Config.from_env(transports=ascend_check.TRANSPORTS)
    if arguments.device is not None:
        config = replace(config, device_id=arguments.device)
    device = config.device_id or 0
    steps: list[ascend_check.Step] = []

    def told(step: ascend_check.Step) -> None:
        if not arguments.json:
            print(_row(step.name, f"{step.outcome}: {step.detail} ({step.seconds:.3f} s)"), flush=True)

    def ready(address: str) -> None:
        print(f"serving at {address}; now run --check against it", file=sys.stderr, flush=True)

    async def ping(addresses: Sequence[str]) -> str | None:
        tool = report.network.tool
        if tool is None or not addresses:
            return None
        pinged = [await asyncio.to_thread(ascend_host.ping, tool, device, one) for one in addresses]
        return "; ".join(f"{one.address}: {_about_ping(one)}" for one in pinged)

    # Of this thread, as the event loop is, because ACL sets an NPU for each thread.
    npu, host = memories(config)
    if arguments.serve is not None:
        asyncio.run(ascend_check.serve(config, arguments.serve, npu, host, _about(report, device), ready))
    else:
        steps = asyncio.run(ascend_check.check(config, arguments.check, npu, host, ping, told))
    if not arguments.json and arguments.check is not None:
        bad = [step.name for step in steps if step.outcome == "FAILED"]
        print(f"FAILED: {', '.join(bad)}." if bad else "Every step went well.", "Please report what this printed.")
    return steps
