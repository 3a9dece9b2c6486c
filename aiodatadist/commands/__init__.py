"""The command line: ``aiodatadist`` and ``python -m aiodatadist``, one module for each command.

A command's module has `NAME`, `SUMMARY`, `add_arguments(parser)` and `run(arguments) -> int`. What it cannot do it
raises, as `CommandError` or as an error of the library; `main` makes one line of it.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

import aiodatadist
from aiodatadist.errors import DataDistError, UsageError

from . import bench, demo, doctor, serve
from .failure import CommandError

__all__ = ["CommandError", "main"]

COMMANDS = (bench, demo, doctor, serve)

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # as a shell reports SIGINT


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="aiodatadist",
        description="Moves KV caches between the nodes of disaggregated LLM serving.",
        epilog="Exit codes: 0 success, 1 failure, 2 wrong usage. `aiodatadist COMMAND --help` says more.",
    )
    parser.add_argument("--version", action="version", version=f"aiodatadist {aiodatadist.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        child = commands.add_parser(
            command.NAME,
            help=command.SUMMARY,
            description=command.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(child)
        child.set_defaults(run=command.run, name=command.NAME)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments without the program's name; those of the process where it is left out.

    Returns
    -------
    int
        The exit code: 0 success, 1 failure, 2 wrong usage, 130 interrupted. ``--help``, ``--version`` and arguments
        that argparse refuses raise SystemExit, as argparse does.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that lacks a character gets its escape instead of an exception.
            stream.reconfigure(errors="backslashreplace")
    arguments = make_parser().parse_args(argv)
    try:
        code = int(arguments.run(arguments))
        sys.stdout.flush()
    except (CommandError, DataDistError) as why:
        text = " ".join(str(why).split())
        print(f"aiodatadist {arguments.name}: error: {text}", file=sys.stderr)
        for note in getattr(why, "__notes__", ()):
            print(f"aiodatadist {arguments.name}: {note}", file=sys.stderr)
        return EXIT_USAGE if isinstance(why, UsageError) else EXIT_FAILED
    except KeyboardInterrupt:
        print(f"aiodatadist {arguments.name}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has gone (`| head`). The interpreter flushes again at its exit: give it a place.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    return code
