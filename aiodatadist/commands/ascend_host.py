"""The NPUs of a machine, their driver and CANN, and what ``hccn_tool`` says of their network.

Nothing here raises for what cannot be read or run: that is part of what is found. None stands for what is not known.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .rdma_devices import accelerators

__all__ = [
    "Answer",
    "Npu",
    "Ping",
    "Port",
    "Toolkit",
    "ask",
    "configured_addresses",
    "driver_version",
    "hccn_tool",
    "npus",
    "parse_address",
    "parse_link",
    "parse_ping",
    "parse_tls",
    "ping",
    "port_of",
    "toolkits",
]

# Modules say where they look, so that tests can put something else there.
DEV: Final = Path("/dev")
ASCEND: Final = Path("/usr/local/Ascend")
ETC: Final = Path("/etc")

_TOOL_SECONDS: Final = 20.0
_TOOL_BYTES: Final = 64 * 1024


def _pairs(path: Path) -> dict[str, str]:
    """Read a file of ``name=value`` lines; {} for one that cannot be read. Names are in lower case."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return {}
    found = re.findall(r"^[ \t]*(\w+)[ \t]*=[ \t]*(.*?)[ \t\r]*$", text, re.MULTILINE)
    return {name.lower(): value.strip("\"'") for name, value in found}


# Driver, CANN, devices. ---------------------------------------------------------------------------------------


def driver_version() -> str | None:
    """Return the version of the NPU driver."""
    roots = [ASCEND]
    if parent := _pairs(ETC / "ascend_install.info").get("driver_install_path_param"):
        roots.insert(0, Path(parent))
    for root in roots:
        if version := _pairs(root / "driver/version.info").get("version"):
            return version
    return None


@dataclass(frozen=True, slots=True)
class Toolkit:
    """A CANN that is installed.

    Attributes
    ----------
    home : str
    version : str or None
    active : bool
        ASCEND_HOME_PATH names it.
    """

    home: str
    version: str | None
    active: bool


def toolkits(environ: Mapping[str, str]) -> list[Toolkit]:
    """Find CANN where ASCEND_HOME_PATH says, and in the usual folders."""
    named = environ.get("ASCEND_HOME_PATH", "").strip()
    found: list[Toolkit] = []
    seen: set[Path] = set()
    for home in (*([Path(named)] if named else []), ASCEND / "cann", ASCEND / "ascend-toolkit/latest"):
        if not home.is_dir() or (real := home.resolve()) in seen:
            continue
        seen.add(real)
        found.append(Toolkit(str(home), _toolkit_version(home), str(home) == named))
    return found


def _toolkit_version(home: Path) -> str | None:
    files = [*sorted(home.glob("ascend_*_install.info")), *sorted(home.glob("*-linux/ascend_*_install.info"))]
    for file in (*files, home / "version.info", home / "runtime/version.info", home / "compiler/version.info"):
        if version := _pairs(file).get("version"):
            return version
    return None


@dataclass(frozen=True, slots=True)
class Npu:
    """An NPU that the driver shows.

    Attributes
    ----------
    number : int
        That of its file in /dev.
    file : str
    refused : str or None
        Why this process cannot open it.
    """

    number: int
    file: str
    refused: str | None


def npus() -> tuple[list[Npu], int]:
    """Return the NPUs that the driver shows, and how many Ascend cards the PCI bus has."""
    found = []
    for file in DEV.glob("davinci[0-9]*"):
        if (number := file.name.removeprefix("davinci")).isdecimal():
            refused = None if os.access(file, os.R_OK | os.W_OK) else "not permitted to this user"
            found.append(Npu(int(number), str(file), refused))
    cards = sum(one.vendor == "Huawei" for one in accelerators())
    return sorted(found, key=lambda one: one.number), cards


# hccn_tool. ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """What a tool said.

    Attributes
    ----------
    command : str
    text : str
        Its output, at most 64 KiB.
    error : str or None
        Why there is no answer.
    """

    command: str
    text: str
    error: str | None


@dataclass(frozen=True, slots=True)
class Ping:
    """A ping from one NPU to an address.

    Attributes
    ----------
    address : str
    sent, received : int or None
    error : str or None
        Why there are no numbers.
    """

    address: str
    sent: int | None
    received: int | None
    error: str | None

    @property
    def works(self) -> bool:
        """Whether every packet came back."""
        return self.error is None and bool(self.received) and self.received == self.sent


@dataclass(frozen=True, slots=True)
class Port:
    """The network port of an NPU.

    Attributes
    ----------
    number : int
        Of the NPU.
    link : str or None
        ``"UP"`` or ``"DOWN"``.
    address, netmask : str or None
    tls : bool or None
        Whether links of HCCL are encrypted; both ends must agree.
    errors : list of str
        What could not be asked, and why.
    """

    number: int
    link: str | None
    address: str | None
    netmask: str | None
    tls: bool | None
    errors: list[str]


def hccn_tool() -> str | None:
    """Find the tool in PATH or beside the driver."""
    beside = ASCEND / "driver/tools/hccn_tool"
    return shutil.which("hccn_tool") or (str(beside) if os.access(beside, os.X_OK) else None)


def ask(tool: str, number: int, *what: str) -> Answer:
    """Run ``hccn_tool -i NUMBER WHAT...``."""
    command = [tool, "-i", str(number), *what]
    shown = " ".join(["hccn_tool", *command[1:]])
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TOOL_SECONDS)
    except subprocess.TimeoutExpired:
        return Answer(shown, "", f"no answer within {_TOOL_SECONDS:g} s")
    except OSError as why:
        return Answer(shown, "", f"cannot be run: {why.strerror or why}")
    text = done.stdout[:_TOOL_BYTES].decode(errors="replace")
    if done.returncode != 0:
        said = (done.stderr.decode(errors="replace").strip() or text.strip()).splitlines()
        return Answer(shown, text, f"exit status {done.returncode}: {said[-1][:200] if said else 'it said nothing'}")
    return Answer(shown, text, None)


def parse_link(text: str) -> str | None:
    """Read ``-link -g``: ``"UP"``, ``"DOWN"``, or None."""
    found = re.search(r"\blink\s+status\s*[:=]\s*(UP|DOWN)\b", text, re.IGNORECASE)
    return found[1].upper() if found else None


def parse_address(text: str) -> tuple[str | None, str | None]:
    """Read ``-ip -g``: the address and the netmask."""
    values = []
    for name in (r"ip\s?addr(?:ess)?", r"net\s?mask"):
        found = re.search(rf"\b{name}\s*[:=]\s*([0-9A-Fa-f:.]+)", text, re.IGNORECASE)
        values.append(found[1] if found else None)
    return values[0], values[1]


def parse_tls(text: str) -> bool | None:
    """Read ``-tls -g``: whether the switch is on."""
    found = re.search(r"\btls\s+switch\s*\[\s*([01])\s*\]", text, re.IGNORECASE)
    return found[1] == "1" if found else None


def parse_ping(text: str) -> tuple[int, int] | None:
    """Read ``-ping -g``: packets sent and received."""
    found = re.search(r"\b(\d+)\s+packets?\s+transmitted\s*,\s*(\d+)\s+(?:packets?\s+)?received\b", text, re.IGNORECASE)
    return (int(found[1]), int(found[2])) if found else None


def ping(tool: str, number: int, address: str) -> Ping:
    """Ping an address from an NPU."""
    answer = ask(tool, number, "-ping", "-g", "address", address)
    # A ping that fails may end with a status, and its text still has the numbers.
    counted = parse_ping(answer.text)
    if counted is not None:
        return Ping(address, *counted, None)
    return Ping(address, None, None, answer.error or _not_understood(answer))


def _not_understood(answer: Answer) -> str:
    said = " ".join(answer.text.split())
    return f"cannot be understood: {said[:120]!r}" if said else "it said nothing"


def port_of(tool: str, number: int) -> Port:
    """Ask for everything about the port of an NPU."""
    answers = [ask(tool, number, what, "-g") for what in ("-link", "-ip", "-tls")]
    link, tls = parse_link(answers[0].text), parse_tls(answers[2].text)
    address, netmask = parse_address(answers[1].text)
    errors = [
        f"{answer.command}: {answer.error or _not_understood(answer)}"
        for answer, found in zip(answers, (link, address, tls), strict=True)
        if found is None
    ]
    return Port(number, link, address, netmask, tls, errors)


def configured_addresses(numbers: Sequence[int]) -> dict[int, str]:
    """Return the addresses that /etc/hccn.conf gives these NPUs: what HCCL reads where there is no hccn_tool."""
    pairs = _pairs(ETC / "hccn.conf")
    return {number: pairs[f"address_{number}"] for number in numbers if pairs.get(f"address_{number}")}
