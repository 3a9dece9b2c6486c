"""What was measured, as rows: values, ratios of ours to each peer's in the same rounds, and what was to be reached."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from pairs import OURS, PEERS, Candidate

__all__ = ["Best", "Measured", "Results", "size_text"]

_KIB: Final = 1 << 10
_MIB: Final = 1 << 20

# Ours, what is measured, bytes of a block, the peer or None for the best one, how many times better than it.
_TARGETS: Final = (
    *(
        ("library", way, block, None, factor)
        for way in ("read", "write")
        for block, factor in ((4 * _KIB, 5.0), (64 * _KIB, 3.0), (_MIB, 2.5))
    ),
    *(
        ("ordinary", way, block, "nixl", factor)
        for way in ("read", "write")
        for block, factor in ((4 * _KIB, 3.0), (64 * _KIB, 1.2), (256 * _KIB, 1.2), (_MIB, 1.0))
    ),
    *(
        ("tcp", way, block, None, factor)
        for way in ("read", "write")
        for block, factor in ((4 * _KIB, 5.0), (_MIB, 1.1))
    ),
    ("library", "single read p50", 4 * _KIB, "nixl", 3.5),
    ("ordinary", "single read p50", 4 * _KIB, "nixl", 1.8),
    ("tcp", "single read p99", 4 * _KIB, "nixl-tcp-progress", 25.0),
)


def size_text(size: int) -> str:
    """Return a size as people write it."""
    for unit, factor in (("MiB", _MIB), ("KiB", _KIB)):
        if size >= factor and size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"


@dataclass(slots=True)
class Measured:
    """One thing that was measured of one candidate.

    Attributes
    ----------
    name : str
        The candidate.
    what : str
        ``read``, ``write``: all blocks at once; ``single read p50`` and the like: one by one.
    block : int
    unit : str
        ``GB/s`` or ``us``.
    samples : list of float
        One a round.
    passive_cpu : list of float
        Share of a core that the passive process took meanwhile, one a round; empty where it is not measured.
    """

    name: str
    what: str
    block: int
    unit: str
    samples: list[float] = field(default_factory=list)
    passive_cpu: list[float] = field(default_factory=list)

    @property
    def value(self) -> float:
        """Median of the rounds."""
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Distance between the quartiles of the rounds."""
        if len(self.samples) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return high - low

    def times_better(self, than: Measured) -> float:
        """Return the median of the rounds' ratios; more than 1: this one is better."""
        pairs = zip(self.samples, than.samples, strict=True)
        return statistics.median(a / b if self.unit == "GB/s" else b / a for a, b in pairs)


@dataclass(frozen=True, slots=True)
class Best:
    """Ours beside the best peer, or beside the one that the target names."""

    ours: str
    what: str
    block: int
    peer: str
    ratio: float
    target: float | None
    met: bool | None


class Results:
    """Collects what was measured."""

    def __init__(self) -> None:
        self._measured: dict[tuple[str, str, int], Measured] = {}

    def add(self, name: str, what: str, block: int, unit: str, sample: float, passive_cpu: float | None = None) -> None:
        """Add the sample of one round."""
        found = self._measured.setdefault((name, what, block), Measured(name, what, block, unit))
        found.samples.append(sample)
        if passive_cpu is not None:
            found.passive_cpu.append(passive_cpu)

    def drop(self, name: str, block: int) -> None:
        """Forget a candidate that failed in the middle of the rounds with one size of blocks."""
        for key in [key for key in self._measured if key[0] == name and key[2] == block]:
            del self._measured[key]

    def _things(self) -> list[tuple[str, int]]:
        return list(dict.fromkeys((what, block) for _, what, block in self._measured))

    def _of(self, candidates: Iterable[Candidate], what: str, block: int) -> list[Measured]:
        keys = ((candidate.name, what, block) for candidate in candidates)
        return [self._measured[key] for key in keys if key in self._measured]

    def _compared(self, ours: Candidate, peer: str, what: str, block: int) -> float | None:
        """Return how many times better ours is than a peer that reaches as far."""
        reach = next(candidate.reach for candidate in PEERS if candidate.name == peer)
        mine, theirs = self._measured.get((ours.name, what, block)), self._measured[peer, what, block]
        return mine.times_better(theirs) if mine is not None and reach == ours.reach else None

    def best(self) -> list[Best]:
        """Return ours beside the best peer that reaches as far, and beside those that targets name."""
        found = []
        for what, block in self._things():
            for ours in OURS:
                mine = self._measured.get((ours.name, what, block))
                peers = self._of((peer for peer in PEERS if peer.reach == ours.reach), what, block)
                if mine is None or not peers:
                    continue
                ratios = {peer.name: mine.times_better(peer) for peer in peers}
                hardest = min(ratios, key=ratios.__getitem__)
                wanted: dict[str | None, float] = {
                    peer: factor for name, thing, size, peer, factor in _TARGETS
                    if (name, thing, size) == (ours.name, what, block)
                }  # fmt: skip
                for peer in dict.fromkeys((hardest, *(name for name in wanted if name in ratios))):
                    assert peer is not None
                    target = wanted.get(peer, wanted.get(None) if peer == hardest else None)
                    ratio = ratios[peer]
                    met = None if target is None else ratio >= target
                    found.append(Best(ours.name, what, block, peer, ratio, target, met))
        return found

    def as_json(self) -> dict[str, Any]:
        """Return all of it as plain objects."""
        rows = []
        for row in self._measured.values():
            peer = any(row.name == candidate.name for candidate in PEERS)
            ratios = {
                ours.name: self._compared(ours, row.name, row.what, row.block) for ours in OURS if peer
            }  # fmt: skip
            ratios = {name: ratio for name, ratio in ratios.items() if ratio is not None}
            rows.append({**asdict(row), "value": row.value, "spread": row.spread, "ours_times_better": ratios})
        return {"rows": rows, "against_the_best_peer": [asdict(best) for best in self.best()]}

    def tables(self) -> str:
        """Return all of it as text."""
        parts = []
        for unit in ("GB/s", "us"):
            lines = [("blocks", "what", "who", unit, "spread", "passive CPU", *(f"{ours.name} is" for ours in OURS))]
            for what, block in self._things():
                rows = self._of((*OURS, *PEERS), what, block)
                lines += [self._line(row) for row in rows if row.unit == unit]
            if len(lines) > 1:
                parts.append(_columns(lines, right=range(3, 9)))
        lines = [("blocks", "what", "ours", "peer", "times better", "target", "")]
        for best in self.best():
            target = "" if best.target is None else f"{best.target:.1f}"
            met = "" if best.met is None else "met" if best.met else "missed"
            lines.append(
                (size_text(best.block), best.what, best.ours, best.peer, f"{best.ratio:.2f}", target, met)
            )  # fmt: skip
        if len(lines) > 1:
            parts.append("Against the best peer, and against those that targets name:\n" + _columns(lines, (4, 5)))
        return "\n\n".join(parts)

    def _line(self, row: Measured) -> tuple[str, ...]:
        cpu = f"{statistics.median(row.passive_cpu) * 100:.0f} %" if row.passive_cpu else ""
        peer = any(row.name == candidate.name for candidate in PEERS)
        name = row.name if peer else f"aiodatadist {row.name}"
        ratios = [self._compared(ours, row.name, row.what, row.block) if peer else None for ours in OURS]
        cells = ("" if ratio is None else f"{ratio:.2f} x" for ratio in ratios)
        return (size_text(row.block), row.what, name, f"{row.value:.2f}", f"{row.spread:.2f}", cpu, *cells)


def _columns(lines: Sequence[tuple[str, ...]], right: Iterable[int]) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    aligned = set(right)
    return "\n".join(
        "  ".join(f"{cell:{'>' if i in aligned else '<'}{widths[i]}}" for i, cell in enumerate(line)).rstrip()
        for line in lines
    )
