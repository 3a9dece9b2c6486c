"""Say what works on this machine and, where something does not, exactly why.

Looks at each transport, what the kernel and a container allow, the limits that matter to transfers, the paths that
links would take, the Config that a DataDist would have, and the installed versions. Exits 0 if a link can be made, 1
if no transport of the Config is usable, 2 if an AIODATADIST_* variable cannot be used.

`aiodatadist doctor rdma` looks at RDMA alone, and closer; `aiodatadist doctor ascend` at HIXL and NPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from typing import Any, Final

import numpy as np

import aiodatadist
from aiodatadist import _core
from aiodatadist.config import KNOWN_TRANSPORTS, Config
from aiodatadist.errors import ConfigError

from . import doctor_ascend, doctor_rdma, machine

__all__ = ["NAME", "SUMMARY", "Report", "add_arguments", "examine", "run"]

NAME: Final = "doctor"
SUMMARY: Final = "say which transports work here, and exactly why others do not"

_OPTIONAL: Final = ("torch", "torch_npu", "uvloop")
_REQUIRED: Final = ("anyio", "msgspec", "structlog")
_PREFIX: Final = "AIODATADIST_"


@dataclass(frozen=True, slots=True)
class Transport:
    """One transport.

    Attributes
    ----------
    name : str
    usable : bool
    detail : str
        What it uses, or exactly why it cannot be used.
    """

    name: str
    usable: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Variable:
    """An ``AIODATADIST_*`` variable that is set.

    Attributes
    ----------
    name : str
    value : str or None
        None: not shown, as only those of the Config are known to hold no secret.
    error : str or None
        Why it cannot be used, or that it is unknown.
    ignored : bool
        It is no error, but has no effect.
    """

    name: str
    value: str | None
    error: str | None
    ignored: bool = False


@dataclass(frozen=True, slots=True)
class Settings:
    """The Config of a DataDist that is given none.

    Attributes
    ----------
    fields : dict
        By name. Secrets are shown as ``"set"`` or None.
    variables : list of Variable
    errors : list of str
        Why there is no such Config; `fields` then leaves out what cannot be used.
    """

    fields: dict[str, Any]
    variables: list[Variable]
    errors: list[str]


@dataclass(frozen=True, slots=True)
class Path:
    """What a link would use.

    Attributes
    ----------
    peer : str
        ``"this host"`` or ``"another host"``.
    memory : str
        ``"library"`` (`allocate_blocks_cache` at the peer), ``"ordinary"`` or ``"any"``.
    path : str or None
        As in ``link.path``; None: no link can be made.
    detail : str
        How, and why not by something faster.
    """

    peer: str
    memory: str
    path: str | None
    detail: str


@dataclass(frozen=True, slots=True)
class Report:
    """What `examine` found.

    Attributes
    ----------
    transports : list of Transport
    paths : list of Path
    settings : Settings
    features : list of machine.Feature
        Of the kernel.
    memory_access : list of machine.Access
    ptrace_scope : int or None
        Yama's setting; None where Yama is not active or cannot be asked.
    ptrace_means : str
    rights : machine.Rights
    limits : dict
        Of this process, by name.
    system : dict
        Limits of the system, by name.
    container : machine.Container
    cpu : machine.Cpu
    kernel : str
    switch_interval : float
        Seconds after which a thread that wants the GIL asks for it.
    versions : dict
        By name of the distribution; None: not installed.
    debug_build : bool
    """

    transports: list[Transport]
    paths: list[Path]
    settings: Settings
    features: list[machine.Feature]
    memory_access: list[machine.Access]
    ptrace_scope: int | None
    ptrace_means: str
    rights: machine.Rights
    limits: dict[str, machine.Limit]
    system: dict[str, int | str]
    container: machine.Container
    cpu: machine.Cpu
    kernel: str
    switch_interval: float
    versions: dict[str, str | None]
    debug_build: bool

    @property
    def usable(self) -> bool:
        """Whether at least one transport of the Config is usable."""
        wanted = self.settings.fields["transports"]
        return any(transport.usable for transport in self.transports if transport.name in wanted)


def _installed(name: str) -> str | None:
    """Return the version of a distribution without importing it: torch alone takes seconds."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {
        "aiodatadist": aiodatadist.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    versions.update((name, _installed(name)) for name in (*_REQUIRED, *_OPTIONAL))
    return versions


def _transports(config: Config) -> list[Transport]:
    # HIXL is found by what the Config says.
    transports = [
        Transport(name, *doctor_ascend.probed(config)) if name == "hixl" else Transport(name, usable, detail)
        for name, usable, detail in _core.probe_transports()
    ]
    probed = {transport.name for transport in transports}
    transports += [
        Transport(name, False, "this version has no such transport yet")
        for name in KNOWN_TRANSPORTS
        if name not in probed
    ]
    return transports


# Config. ----------------------------------------------------------------------------------------------------


def _variable(name: str, value: str) -> Variable:
    """Try one variable alone."""
    if not value.strip():
        return Variable(name, value, None, ignored=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            Config.from_env({name: value})
        except ConfigError as why:
            return Variable(name, value, str(why))
    if caught:
        return Variable(name, None, "unknown, and ignored", ignored=True)
    return Variable(name, value, None)


def _settings() -> tuple[Settings, Config]:
    environ = {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_PREFIX)}
    variables = [_variable(name, value) for name, value in environ.items()]
    errors = [found.error for found in variables if found.error is not None and not found.ignored]
    good = {found.name: environ[found.name] for found in variables if found.error is None}
    try:
        config = Config.from_env(good)
    except ConfigError as why:
        # Each can be used, and not all together.
        errors.append(str(why))
        config = Config()
    shown = {}
    for field in fields(Config):
        value = getattr(config, field.name)
        shown[field.name] = value if field.repr else (None if value is None else "set")
    return Settings(shown, variables, errors), config


# Paths. -----------------------------------------------------------------------------------------------------


def _paths(
    wanted: tuple[str, ...],
    transports: list[Transport],
    features: list[machine.Feature],
    access: list[machine.Access],
    scope: int | None,
) -> list[Path]:
    """Say what links would use, if the peer is of the same version and has the same Config."""
    usable = [name for name in wanted if any(found.name == name and found.usable for found in transports)]
    far = next((name for name in usable if name != "shm"), None)
    if far is None:
        elsewhere = Path("another host", "any", None, "only shm is usable, which ends at this host")
        if not usable:
            elsewhere = Path("another host", "any", None, "no transport of the Config is usable")
    else:
        elsewhere = Path("another host", "any", far, "")
    first = usable[0] if usable else None
    if first != "shm":
        why = "shm is not usable" if "shm" in wanted else "Config.transports has no shm"
        if "shm" in usable:
            why = f"Config.transports has {first} before shm"
        if first is None:
            why = "no transport of the Config is usable"
        return [Path("this host", "any", first, why), elsewhere]
    missing = [found for found in features if found.name == "pidfd" and not found.works]
    if missing:
        return [Path("this host", "any", far, f"not shm: {missing[0].name}: {missing[0].detail}"), elsewhere]
    own = "peers of one user in the same PID and network namespaces"
    mapped = Path("this host", "library", "shm, mapped", own)
    refused = _refusal(access, scope)
    if refused is None:
        note = f"{own} (Yama: one of them, or all with allow_any_ptracer)" if scope == 1 else own
        return [mapped, Path("this host", "ordinary", "shm, process_vm", note), elsewhere]
    return [mapped, Path("this host", "ordinary", far, f"not process_vm: {refused}"), elsewhere]


def _refusal(access: list[machine.Access], scope: int | None) -> str | None:
    """Say why process_vm would not work with a peer; None: it would."""
    for found in access:
        if found.works or found.error is None:
            continue
        if found.who == "by a child" and scope == 1:
            # As it must be: nobody let the child in. Links do.
            continue
        whom = {"own process": "on the own process", "child": "on a child"}.get(found.who, "of a child on this process")
        said = f"process_vm_readv {whom}: {found.detail}"
        return said if not scope else f"{said} (Yama's ptrace_scope is {scope})"
    return None


def examine() -> Report:
    """Look at this process and this machine."""
    settings, config = _settings()
    transports = _transports(config)
    features, access = machine.features(), machine.memory_access()
    scope, means = machine.ptrace_scope()
    return Report(
        transports=transports,
        paths=_paths(settings.fields["transports"], transports, features, access, scope),
        settings=settings,
        features=features,
        memory_access=access,
        ptrace_scope=scope,
        ptrace_means=means,
        rights=machine.rights(),
        limits=machine.limits(),
        system=machine.system_limits(),
        container=machine.container(),
        cpu=machine.cpu(),
        kernel=f"{os.uname().sysname} {os.uname().release}",
        switch_interval=sys.getswitchinterval(),
        versions=_versions(),
        debug_build=bool(_core.debug),
    )


# Text. ------------------------------------------------------------------------------------------------------


def _row(name: str, text: str) -> str:
    return f"  {name:<20}{text}"


def _about_machine(report: Report) -> Iterator[tuple[str, str]]:
    cpu = report.cpu
    yield "kernel", f"{report.kernel}, {cpu.machine}"
    yield "CPUs", f"{cpu.count}, {cpu.usable} of them open to this process; {cpu.model}"
    yield "CPU features", ", ".join(cpu.features) or "none that copy kernels choose by"
    yield "copy kernel", cpu.copy_kernel
    for feature in report.features:
        yield feature.name, feature.detail if feature.works else f"does NOT work: {feature.detail}"
    yield "rights", str(report.rights)
    scope = "" if report.ptrace_scope is None else f"{report.ptrace_scope}: "
    yield "ptrace_scope", scope + report.ptrace_means
    for access in report.memory_access:
        yield f"process_vm {access.who.replace('own process', 'own').replace('by a', 'by')}", access.detail or "works"
    interval = f"{report.switch_interval * 1e3:g} ms"
    if report.switch_interval > 0.001:
        interval += "; beside a busy model thread a smaller one, sys.setswitchinterval(0.0005), helps the event loop"
    yield "GIL switch", interval


def _about_limits(report: Report) -> Iterator[tuple[str, str]]:
    notes = {"memlock": "; shm and tcp lock no memory", "open_files": ""}
    for name, limit in report.limits.items():
        yield name.replace("_", " "), f"{limit}{notes.get(name, '')}"
    for name, value in report.system.items():
        yield name, f"{value:,}" if isinstance(value, int) else value
    yield "/dev/shm", "not needed: library memory lies in memory files of its own"


def _about_container(report: Report) -> Iterator[tuple[str, str]]:
    found = report.container
    yield "hints", ", ".join(found.hints) or "none: this is probably no container"
    yield "cgroup", found.cgroup
    yield "memory", "no limit found" if found.memory_max is None else f"{found.memory_max:,} bytes, library memory too"
    yield "threads", "no limit found" if found.pids_max is None else f"{found.pids_max:,} threads and processes"
    yield "CPU time", "no limit found" if found.cpu_max is None else f"{found.cpu_max:g} CPUs"
    for name, value in found.namespaces.items():
        note = "" if name == "user" else "; peers share memory only if both are in the same"
        yield f"{name} namespace", value + note


def _about_config(report: Report) -> Iterator[tuple[str, str]]:
    settings = report.settings
    set_by = {found.name for found in settings.variables if found.error is None and not found.ignored}
    for name, value in settings.fields.items():
        variable = _PREFIX + name.upper()
        shown = ", ".join(value) if isinstance(value, tuple) else repr(value)
        yield name, f"{shown} (from {variable})" if variable in set_by else shown
    missing = {found.name: found.detail for found in report.transports if not found.usable}
    for name in settings.fields["transports"]:
        if name in missing:
            yield "NOTE", f"transports names {name}, which is not usable: {missing[name]}"
    for found in settings.variables:
        if found.ignored:
            yield "NOTE", f"{found.name} is {found.error or 'empty, and counts as not set'}"
    for error in settings.errors:
        yield "ERROR", error


def _lines(report: Report) -> Iterator[str]:
    yield "transports"
    for transport in report.transports:
        yield _row(transport.name, f"{'usable' if transport.usable else 'NOT usable'}: {transport.detail}")
    yield "paths to a peer of the same version and Config"
    for path in report.paths:
        where = path.peer if path.memory == "any" else f"{path.peer}, {path.memory} memory"
        yield f"  {where:<28}{path.path or 'NO LINK'}" + (f": {path.detail}" if path.detail else "")
    for title, rows in (
        ("machine", _about_machine(report)),
        ("limits", _about_limits(report)),
        ("container", _about_container(report)),
        ("Config of a DataDist that is given none", _about_config(report)),
    ):
        yield title
        yield from (_row(name, text) for name, text in rows)
    yield "versions"
    for name, version in report.versions.items():
        optional = ", optional" if name in _OPTIONAL else ""
        yield _row(name, version or f"not installed{optional}")
    if report.debug_build:
        yield "This is a debug build: slower, with assertions."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    topics = parser.add_subparsers(title="topics", metavar="TOPIC")
    for topic in (doctor_rdma, doctor_ascend):
        child = topics.add_parser(
            topic.NAME,
            help=topic.SUMMARY,
            description=topic.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        topic.add_arguments(child)
        # In place of the doctor's own.
        child.set_defaults(run=topic.run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command: print the report, and return the exit code that the module's docstring names."""
    report = examine()
    if arguments.json:
        print(json.dumps({"usable": report.usable, **asdict(report)}, indent=2))
    else:
        print("\n".join(_lines(report)))
        if not report.usable:
            print("No transport of the Config is usable here: links cannot be made.")
        if report.settings.errors:
            print("The environment cannot be used: DataDist(...) without a Config raises ConfigError.")
    if report.settings.errors:
        return 2
    return 0 if report.usable else 1
