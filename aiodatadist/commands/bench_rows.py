"""The rows of `bench`: how samples become a row, and rows become a table."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, TextIO, TypeAlias

import numpy as np

__all__ = ["Progress", "Row", "Rows", "Steps", "in_turn", "installed", "print_table", "size_text"]

_COLUMNS: Final = ("what", "path", "block", "value", "spread", "", "limit", "ratio", "beside", "target")


@dataclass(frozen=True, slots=True)
class Row:
    """One result.

    Attributes
    ----------
    name : str
        What was measured, beginning with the subcommand.
    path : str
        How the bytes moved: ``shm-mapped``, ``shm-process_vm``, ``tcp``, or a raw way for the limits themselves.
    block : int or None
        Bytes of a block; None where there are none.
    value : float
        Median over the repeats.
    unit : str
    spread : float
        Distance between the quartiles of the repeats, in `unit`.
    limit : float or None
        What is possible, in `unit`: the median of the limit measured in turn with it. None: there is none.
    ratio : float or None
        `value` / `limit`.
    limit_name : str or None
        What the limit is.
    better : str
        ``higher`` or ``lower``: which `value` and `ratio` are better.
    target : float or None
        What `ratio` should reach on a quiet machine. None: nothing was promised.
    met : bool or None
        Whether it does.
    """

    name: str
    path: str
    block: int | None
    value: float
    unit: str
    spread: float
    limit: float | None
    ratio: float | None
    limit_name: str | None
    better: str
    target: float | None
    met: bool | None


@dataclass(slots=True)
class Rows:
    """Collects rows."""

    rows: list[Row] = field(default_factory=list)

    def add(
        self,
        name: str,
        path: str,
        block: int | None,
        samples: Sequence[float],
        unit: str,
        better: str,
        limit: tuple[str, Sequence[float]] | None = None,
        target: float | None = None,
    ) -> None:
        """Add the row of one sample a repeat, beside a limit and its samples, and what their ratio should reach."""
        low, value, high = (float(q) for q in np.percentile(samples, (25, 50, 75)))
        bound = float(np.median(limit[1])) if limit else None
        ratio = value / bound if bound else None
        met = None
        if target is not None and ratio is not None:
            met = ratio >= target if better == "higher" else ratio <= target
        self.rows.append(
            Row(
                name,
                path,
                block,
                value,
                unit,
                high - low,
                bound,
                ratio,
                limit[0] if limit else None,
                better,
                target,
                met,
            )
        )

    def as_json(self) -> list[dict[str, Any]]:
        """Return the rows as plain objects."""
        return [asdict(row) for row in self.rows]


Steps: TypeAlias = Mapping[str, Callable[[], Awaitable[Any]]]


async def in_turn(steps: Steps, repeat: int) -> dict[str, list[Any]]:
    """Run the steps in turn, `repeat` times.

    A machine has faster and slower seconds: what is to be compared shares them. Every other round goes backwards, so
    that none always follows the same one.

    Parameters
    ----------
    steps : mapping of str to callable
        Coroutine functions.
    repeat : int

    Returns
    -------
    dict of str to list
        What each step returned, one result a round.
    """
    results: dict[str, list[Any]] = {name: [] for name in steps}
    for number in range(repeat):
        names: Iterable[str] = steps if number % 2 == 0 else reversed(list(steps))
        for name in names:
            results[name].append(await steps[name]())
    return results


class Progress:
    """Says on stderr what is being measured: one line that changes on a terminal, one line each elsewhere."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()

    def __call__(self, text: str) -> None:
        """Show what comes next."""
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r{text[:width]:<{width}}", end="", file=self._stream, flush=True)
        else:
            print(text, file=self._stream, flush=True)

    def note(self, text: str) -> None:
        """Print something that stays."""
        self.clear()
        print(text, file=self._stream, flush=True)

    def clear(self) -> None:
        """Wipe the line."""
        if self._live:
            print(f"\r{'':<{shutil.get_terminal_size().columns - 1}}\r", end="", file=self._stream, flush=True)


def size_text(size: int) -> str:
    """Return a size as people write it."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor and size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"


def installed(name: str) -> bool:
    """Say whether an optional module can be imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:
        return False


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}"


def _ratio(ratio: float, better: str) -> str:
    return f"{ratio * 100:.0f} %" if better == "higher" else f"{ratio:.2f} x"


def _cells(row: Row) -> tuple[str, ...]:
    ratio = "" if row.ratio is None else _ratio(row.ratio, row.better)
    target = "" if row.target is None else f"{_ratio(row.target, row.better)}, {'met' if row.met else 'missed'}"
    return (
        row.name,
        row.path,
        "" if row.block is None else size_text(row.block),
        _number(row.value),
        _number(row.spread),
        row.unit,
        _number(row.limit),
        ratio,
        row.limit_name or "",
        target,
    )


def print_table(rows: Sequence[Row]) -> None:
    """Print rows to stdout: by rich where it is installed and stdout is a terminal, in plain columns elsewhere."""
    table = [_cells(row) for row in rows]
    right = (3, 4, 6, 7)
    if sys.stdout.isatty() and installed("rich"):
        from rich.console import Console
        from rich.table import Table

        rich = Table()
        for number, column in enumerate(_COLUMNS):
            rich.add_column(column, justify="right" if number in right else "left")
        for number, cells in enumerate(table):
            rich.add_row(*cells, end_section=number + 1 < len(table) and table[number + 1][0] != cells[0])
        Console().print(rich)
        return
    widths = [max(len(line[i]) for line in (_COLUMNS, *table)) for i in range(len(_COLUMNS))]
    for line in (_COLUMNS, *table):
        padded = (f"{cell:{'>' if i in right else '<'}{widths[i]}}" for i, cell in enumerate(line))
        print("  ".join(padded).rstrip())
