"""Measure transfers between two processes of this machine beside what the machine can do.

  bandwidth     scattered blocks, pulled and pushed; neighbouring blocks
  latency       one block, awaited
  completions   awaited transfers per second, on asyncio and on uvloop
  submit        what starting a transfer of many blocks takes from the loop's thread
  fairness      small pulls while a large one is under way on the same link
  cpu           the processors of both sides during transfers, and while nothing happens
  links         linking and unlinking many peers
  layerwise     layers pushed while a model thread computes the next, and what recording one takes from that thread
  scale         a million blocks, 100 GiB of memory, 10,000 transfers and 512 links, beside an eighth of them
  all           all of them (the default)
  serve         not among them: a cluster of `aiodatadist serve`, under load; see --url

Beside each stands a limit, measured in turn with it in the same run: memcpy, process_vm and plain sockets over the
same blocks, by native loops without protocol, checks or safety. Only the ratio says something about the library; the
values are the machine's.

The data is verified once for every path and size. A debug build is not measured. All of it takes some eight minutes
on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

import aiodatadist
from aiodatadist import _core, _limits
from aiodatadist.errors import ArgumentError, ExtraMissing

from .bench_cpu import CpuScale, measure_cpu
from .bench_fairness import FairnessScale, measure_fairness
from .bench_layers import LayersScale, measure_layers
from .bench_links import LinksScale, measure_links
from .bench_peer import child_environment
from .bench_rows import Progress, Row, Rows, installed, print_table, size_text
from .bench_scale import ScaleSizes, measure_scale
from .bench_serve import add_serve_arguments, run_serve
from .bench_transfers import PATHS, POOL_FACTOR, Scale, Session
from .failure import CommandError

__all__ = ["NAME", "SUMMARY", "add_arguments", "run"]

NAME: Final = "bench"
SUMMARY: Final = "measure transfers beside what the machine can do"

SUBJECTS: Final = (
    "bandwidth", "latency", "completions", "submit", "fairness", "cpu", "links", "layerwise", "scale",
)  # fmt: skip
_BOTH_LOOPS: Final = "completions"
"""The subject that is measured on each event loop: elsewhere it matters little which one runs."""

_KIB: Final = 1 << 10
_MIB: Final = 1 << 20
_BANDWIDTH_BLOCKS: Final = (4 * _KIB, 16 * _KIB, 64 * _KIB, 256 * _KIB, _MIB)
_LATENCY_BLOCKS: Final = (4 * _KIB, 64 * _KIB, _MIB)
_COMPLETION_BLOCKS: Final = (4 * _KIB,)
_LARGE_BLOCKS: Final = (64 * _KIB,)
_LEAST_BLOCK: Final = 64
_MOST_BLOCK: Final = 64 * _MIB
_LEAST_BYTES: Final = 64 * _KIB
_MOST_BYTES: Final = 64 << 30
_SIZE: Final = re.compile(r"([0-9]{1,15})\s*(|[kmg]i?b?|b)\Z", re.ASCII | re.IGNORECASE)
_SCALE: Final = {"": 1, "b": 1, "k": _KIB, "m": _MIB, "g": 1 << 30}
_POOLS: Final = 3
"""Pools alive at a time."""


def _size(text: str) -> int:
    match = _SIZE.match(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r:.40} is no size; write bytes such as 65536, 64KiB or 1MiB")
    return int(match[1]) * _SCALE[match[2].lower()[:1]]


def _block(text: str) -> int:
    size = _size(text)
    if not _LEAST_BLOCK <= size <= _MOST_BLOCK or size % 8:
        limits = f"{size_text(_LEAST_BLOCK)}..{size_text(_MOST_BLOCK)}"
        raise argparse.ArgumentTypeError(f"a block of {size} bytes is outside {limits}, or no multiple of 8")
    return size


def _nbytes(text: str) -> int:
    size = _size(text)
    if not _LEAST_BYTES <= size <= _MOST_BYTES:
        raise argparse.ArgumentTypeError(f"{size} is outside {size_text(_LEAST_BYTES)}..{size_text(_MOST_BYTES)}")
    return size


def _path(text: str) -> str:
    if text not in PATHS:
        raise argparse.ArgumentTypeError(f"{text!r:.40} is no path; there are {', '.join(PATHS)}")
    return text


def _several(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def read(text: str) -> list[Any]:
        return list(dict.fromkeys(kind(part.strip()) for part in text.split(",")))

    return read


def _count(most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and 1 <= int(text[:9]) <= most):
            raise argparse.ArgumentTypeError(f"{text!r:.40} is no number from 1 to {most}")
        return int(text)

    return read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "subject", nargs="?", choices=(*SUBJECTS, "all", "serve"), default="all", help="what to measure"
    )
    parser.add_argument("--all", action="store_true", help="the same as all")
    parser.add_argument(
        "--block",
        type=_several(_block),
        metavar="SIZE,...",
        help="block sizes (4KiB,16KiB,64KiB,256KiB,1MiB; latency: 4KiB,64KiB,1MiB; completions: 4KiB; "
        "cpu, layerwise: 64KiB)",
    )
    parser.add_argument(
        "--bytes",
        type=_nbytes,
        metavar="SIZE",
        help="bytes that move at a time, in pools of twice the size (256MiB)",
    )
    parser.add_argument("--paths", type=_several(_path), metavar="PATH,...", help=f"only these of {','.join(PATHS)}")
    parser.add_argument("--peers", type=_count(4096), metavar="N", help="peers that links links at a time (64)")
    parser.add_argument("--repeat", type=_count(1000), metavar="N", help="rounds; their median counts (7)")
    parser.add_argument(
        "--quick", action="store_true", help="64MiB, 3 rounds, 16 peers and a tenth of scale, unless told otherwise"
    )
    parser.add_argument(
        "--loop", choices=("asyncio", "uvloop"), help="event loop (asyncio; completions: both, where uvloop is there)"
    )
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write machine and rows as one JSON object to FILE, or to stdout instead of the table",
    )
    add_serve_arguments(parser)


def _machine(loop: str) -> dict[str, Any]:
    """Describe what was measured on."""
    cpu = platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return {
        "cpu": cpu,
        "machine": platform.machine(),
        "cpus": os.cpu_count() or 1,
        "cpus_usable": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "load": os.getloadavg()[0],
        "kernel": f"{os.uname().sysname} {os.uname().release}",
        "copy_kernel": _core.copy_kernel(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "aiodatadist": aiodatadist.__version__,
        "loop": loop,
    }


def _available() -> int:
    """Return the bytes of memory that the kernel thinks it can give."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    return int(match[1]) * _KIB if match else sys.maxsize


def _check_memory(nbytes: int) -> None:
    """Refuse pools for which there is no memory: library memory that is not there is found out by a signal."""
    needed = _POOLS * POOL_FACTOR * nbytes
    if needed > (available := _available()):
        raise CommandError(
            f"--bytes {size_text(nbytes)} needs {size_text(needed)} of memory and {available >> 20} MiB are available; "
            "give less"
        )


def run(arguments: argparse.Namespace) -> int:
    """Run the command: measure, then print the table or the JSON object."""
    if arguments.subject == "serve":
        return run_serve(arguments)
    if fault := _limits.build_fault():
        raise CommandError(
            f"this is {fault}, whose speed says nothing; build without AIODATADIST_DEBUG and AIODATADIST_SANITIZE"
        )
    if arguments.json in (*SUBJECTS, "all"):
        raise ArgumentError(f"--json {arguments.json} names a file", hint=f"write bench {arguments.json} --json")
    if arguments.all and arguments.subject != "all":
        raise ArgumentError(f"bench {arguments.subject} --all says two things", hint="leave one of them out")
    if arguments.loop == "uvloop" and not installed("uvloop"):
        raise ExtraMissing(extra="bench", packages=("uvloop",))
    quick = arguments.quick
    nbytes = arguments.bytes or (64 * _MIB if quick else 256 * _MIB)
    if arguments.block and max(arguments.block) > nbytes:
        raise ArgumentError(
            f"a block of {size_text(max(arguments.block))} does not fit into --bytes {size_text(nbytes)}",
            hint="raise --bytes, or leave that block out",
        )
    _check_memory(nbytes)
    repeat = arguments.repeat or (3 if quick else 7)
    amounts = Amounts(
        Scale(nbytes, repeat, 1000 if quick else 5000),
        FairnessScale(nbytes, 10**8 if quick else 10**10, repeat),
        CpuScale(nbytes, repeat, 1.0 if quick else 3.0),
        LinksScale(arguments.peers or (16 if quick else 64), repeat),
        LayersScale(nbytes, repeat, 100 if quick else 1000),
        ScaleSizes(100_000, 8 << 30, 256, 1000, 48, repeat)
        if quick
        else ScaleSizes(1 << 20, 100 << 30, 4096, 10_000, 512, repeat),
    )
    loops = [arguments.loop or "asyncio"]
    progress, rows = Progress(), Rows()
    machine = _machine(loops[0])
    out = None if arguments.json in (None, "-") else _opened(arguments.json)
    subjects = list(SUBJECTS) if arguments.subject == "all" else [arguments.subject]
    if len(subjects) > 1:
        subjects.remove("scale")
    if not arguments.loop and _BOTH_LOOPS in subjects:
        if installed("uvloop"):
            loops.append("uvloop")
        else:
            progress.note(f"{_BOTH_LOOPS} on uvloop is left out: pip install 'aiodatadist[bench]'")
    for number, loop in enumerate(loops):
        with asyncio.Runner(loop_factory=_loop_factory(loop)) as runner:
            runner.run(_measure(subjects if number == 0 else [_BOTH_LOOPS], loop, arguments, amounts, rows, progress))
    if arguments.subject == "all":
        progress.clear()
        rows.rows.extend(_scale_apart(arguments))
    rows.rows.sort(key=lambda row: SUBJECTS.index(row.name.partition(" ")[0]))
    progress.clear()
    if arguments.json:
        text = json.dumps({"machine": machine, "rows": rows.as_json()}, indent=2)
        if out is None:
            print(text)
            return 0
        with out:
            print(text, file=out)
    print_table(rows.rows)
    print(
        "\nvalue: median of the rounds; spread: distance between their quartiles; ratio: value / limit.\n"
        "Of a ratio in % more is better, of a multiple (x) less; target: what it should reach on a quiet machine."
    )
    return 0


def _opened(path: str) -> Any:
    # Before minutes of measuring, not after.
    try:
        return open(path, "w")
    except OSError as why:
        raise CommandError(f"--json {path}: {why.strerror}") from None


def _loop_factory(name: str) -> Callable[[], asyncio.AbstractEventLoop]:
    if name == "uvloop":
        import uvloop

        return uvloop.new_event_loop
    return asyncio.new_event_loop


def _scale_apart(arguments: argparse.Namespace) -> list[Row]:
    """Measure `scale` in a process of its own: memory that others have left would hide what it takes."""
    command = [sys.executable, "-P", "-m", "aiodatadist", NAME, "scale", "--json", "-"]
    command += ["--quick"] * arguments.quick
    for option in ("paths", "repeat", "loop"):
        if value := getattr(arguments, option):
            command += [f"--{option}", ",".join(value) if option == "paths" else str(value)]
    done = subprocess.run(command, stdout=subprocess.PIPE, env=child_environment(), check=False)
    if done.returncode:
        raise CommandError(f"measuring scale ended with exit code {done.returncode}")
    return [Row(**row) for row in json.loads(done.stdout)["rows"]]


@dataclass(frozen=True, slots=True)
class Amounts:
    """How much is measured, for each kind of subject."""

    transfers: Scale
    fairness: FairnessScale
    cpu: CpuScale
    links: LinksScale
    layers: LayersScale
    scale: ScaleSizes


async def _measure(
    subjects: Sequence[str], loop: str, arguments: argparse.Namespace, amounts: Amounts, rows: Rows, progress: Progress
) -> None:
    scale = amounts.transfers

    def blocks(usual: Sequence[int]) -> Sequence[int]:
        return arguments.block or [block for block in usual if block <= scale.nbytes]

    async with Session.open(scale, rows, progress) as session:
        paths = []
        for path in arguments.paths or PATHS:
            if not (why := await session.reached(path)):
                paths.append(path)
            elif arguments.paths:
                raise CommandError(f"the path {path} cannot be measured: {why}")
            else:
                progress.note(f"{path} is left out: {why}")
        if not paths:
            raise CommandError("no path can be measured here; `aiodatadist doctor` says why")
        if "links" in subjects:
            # First: what the others leave behind would serve links as memory.
            await measure_links(session, paths, amounts.links, rows, progress)
        if "bandwidth" in subjects:
            await session.bandwidth(paths, blocks(_BANDWIDTH_BLOCKS))
        if "latency" in subjects:
            await session.latency(paths, blocks(_LATENCY_BLOCKS))
        if "completions" in subjects:
            await session.completions(paths, blocks(_COMPLETION_BLOCKS), loop)
        if "submit" in subjects:
            await session.submit(paths)
        if "fairness" in subjects:
            await measure_fairness(session, paths, amounts.fairness, rows, progress)
        if "cpu" in subjects:
            await measure_cpu(session, paths, blocks(_LARGE_BLOCKS), amounts.cpu, rows, progress)
        if "layerwise" in subjects:
            await measure_layers(session, paths, blocks(_LARGE_BLOCKS), amounts.layers, rows, progress)
        if "scale" in subjects:
            await measure_scale(session, paths, amounts.scale, rows, progress)
