"""Measure aiodatadist and its peers in turn, each as a pair of processes that move scattered blocks; see README.md."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from environments import Unavailable, environment
from pairs import OURS, PEERS, Candidate, Pair
from results import Results, size_text

_KIB: Final = 1 << 10
_MIB: Final = 1 << 20
_BLOCKS: Final = (4 * _KIB, 16 * _KIB, 64 * _KIB, 256 * _KIB, _MIB)
_SINGLE_BLOCK: Final = 4 * _KIB
"""The size that is also moved one by one."""
_SINGLES: Final = 1000
_SIZE: Final = re.compile(r"([0-9]{1,9})(KiB|MiB|GiB)\Z")
_FACTORS: Final = {"KiB": _KIB, "MiB": _MIB, "GiB": 1 << 30}


def _size(text: str) -> int:
    if (match := _SIZE.match(text.strip())) is None:
        raise argparse.ArgumentTypeError(f"{text!r:.40} is no size; write 64KiB or 1MiB")
    return int(match[1]) * _FACTORS[match[2]]


def _blocks(text: str) -> list[int]:
    sizes = [_size(part) for part in text.split(",")]
    for size in sizes:
        if not _KIB <= size <= 64 * _MIB:
            raise argparse.ArgumentTypeError(f"a block of {size_text(size)} is outside 1 KiB..64 MiB")
    return list(dict.fromkeys(sizes))


def _peers(text: str) -> list[Candidate]:
    names = {part.strip() for part in text.split(",")}
    known = {peer.name for peer in PEERS} | {peer.environment for peer in PEERS}
    if unknown := names - known:
        raise argparse.ArgumentTypeError(f"there is no peer {', '.join(sorted(unknown))}; there are {_known()}")
    return [peer for peer in PEERS if {peer.name, peer.environment} & names]


def _known() -> str:
    return ", ".join(peer.name for peer in PEERS)


def _rounds(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:4]) <= 1000):
        raise argparse.ArgumentTypeError(f"{text!r:.40} is no number from 1 to 1000")
    return int(text)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="run.sh", description=__doc__)
    parser.add_argument(
        "--peers", type=_peers, default=list(PEERS), metavar="NAME,...", help=f"only these of {_known()} (all)"
    )
    parser.add_argument(
        "--block", type=_blocks, default=list(_BLOCKS), metavar="SIZE,...", help="(4KiB,16KiB,64KiB,256KiB,1MiB)"
    )
    parser.add_argument(
        "--bytes",
        type=_size,
        default=256 * _MIB,
        metavar="SIZE",
        help="that move, in pools of twice the size (256MiB)",
    )
    parser.add_argument("--rounds", type=_rounds, default=5, metavar="N", help="their median counts (5)")
    parser.add_argument(
        "--huge-pages", action="store_true", help="ask for huge pages where memory is not aiodatadist's own"
    )
    parser.add_argument("--json", metavar="FILE", help="write the results there, too")
    parser.add_argument("--install", action="store_true", help="make the environments and measure nothing")
    arguments = parser.parse_args()
    if arguments.bytes < max(arguments.block) or any(arguments.bytes % block for block in arguments.block):
        parser.error(f"--bytes {size_text(arguments.bytes)} is no multiple of every size of blocks")
    return arguments


def _machine() -> dict[str, Any]:
    cpu = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu,
        "cpus_usable": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }


class _Comparison:
    """The pairs that are there, and what became of the others."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.results = Results()
        self.pairs: list[Pair] = []
        self.versions: dict[str, str] = {}
        self.unavailable: dict[str, str] = {}

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def _lost(self, name: str, why: Unavailable) -> None:
        self._say(f"{name} is left out: {why}")
        self.unavailable[name] = str(why)

    def install(self) -> dict[Candidate, Path]:
        """Make the environments; return the Python of each candidate that can be tried."""
        pythons = {}
        missing: dict[str, Unavailable] = {}
        for candidate in (*OURS, *self.arguments.peers):
            try:
                # Several candidates share an environment: what failed is not tried again.
                if candidate.environment in missing:
                    raise missing[candidate.environment]
                pythons[candidate] = environment(candidate.environment)
            except Unavailable as why:
                missing[candidate.environment] = why
                self._lost(candidate.name, why)
        return pythons

    def start(self, pythons: dict[Candidate, Path]) -> None:
        """Start the pairs."""
        for candidate, python in pythons.items():
            self._say(f"starting {candidate.name}")
            try:
                pair = Pair(candidate, python, 2 * self.arguments.bytes, self.arguments.huge_pages)
            except Unavailable as why:
                self._lost(candidate.name, why)
            else:
                self.pairs.append(pair)
                self.versions[candidate.name] = pair.version

    def measure(self) -> None:
        """Measure all sizes."""
        for block in self.arguments.block:
            self._each_pair(self.pairs, f"blocks of {size_text(block)}: looking at the data", block, self._prepare)
            for number in range(self.arguments.rounds):
                # Every other round goes backwards, so that none always follows the same one.
                order = self.pairs if number % 2 == 0 else self.pairs[::-1]
                self._each_pair(order, f"blocks of {size_text(block)}: round {number + 1}", block, self._round)

    def _each_pair(self, pairs: Sequence[Pair], what: str, block: int, step: Any) -> None:
        self._say(what)
        for pair in list(pairs):
            try:
                with pair.turn():
                    step(pair, block)
            except Unavailable as why:
                self.results.drop(pair.candidate.name, block)
                self.pairs.remove(pair)
                self._lost(pair.candidate.name, why)

    @staticmethod
    def _prepare(pair: Pair, block: int) -> None:
        pair.prepare(block, _SINGLES if block == _SINGLE_BLOCK else 0)

    def _round(self, pair: Pair, block: int) -> None:
        name = pair.candidate.name
        nbytes = self.arguments.bytes // block * block
        for write, what in ((False, "read"), (True, "write")):
            took, cpu = pair.move(write)
            self.results.add(name, what, block, "GB/s", nbytes / took / 1e9, cpu / took)
        if block == _SINGLE_BLOCK:
            for write, what in ((False, "single read"), (True, "single write")):
                micros = [seconds * 1e6 for seconds in pair.each(write, _SINGLES)]
                self.results.add(name, f"{what} p50", block, "us", statistics.median(micros))
                self.results.add(name, f"{what} p99", block, "us", statistics.quantiles(micros, n=100)[98])

    def end(self) -> None:
        """End the pairs."""
        for pair in self.pairs:
            pair.end()


def main() -> int:
    """Run the comparison."""
    arguments = _arguments()
    comparison = _Comparison(arguments)
    pythons = comparison.install()
    if arguments.install:
        return 1 if comparison.unavailable else 0
    machine = _machine()
    try:
        comparison.start(pythons)
        comparison.measure()
    finally:
        comparison.end()
    results = comparison.results
    pages = "huge" if arguments.huge_pages else "usual"
    versions = ", ".join(f"{name} {version}" for name, version in comparison.versions.items())
    print(
        f"{machine['date']}, {machine['cpus_usable']} x {machine['cpu']}, Linux {machine['kernel']}\n"
        f"{size_text(arguments.bytes)} in scattered blocks, {pages} pages, {arguments.rounds} rounds: medians\n"
        f"spread: distance between the quartiles\n{versions}\n\n{results.tables()}"
    )
    if comparison.unavailable:
        print("\nNot measured:")
        for name, why in comparison.unavailable.items():
            print(f"  {name}: {why}")
    if arguments.json:
        text = {
            "machine": machine,
            "bytes": arguments.bytes,
            "huge_pages": arguments.huge_pages,
            "rounds": arguments.rounds,
            "versions": comparison.versions,
            "unavailable": comparison.unavailable,
            **results.as_json(),
        }
        Path(arguments.json).write_text(json.dumps(text, indent=2) + "\n")
    # Without ours there is nothing to compare.
    return 1 if any(ours.name in comparison.unavailable for ours in OURS) else 0


if __name__ == "__main__":
    sys.exit(main())
