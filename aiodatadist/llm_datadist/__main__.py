"""``python -m aiodatadist.llm_datadist [--cpu] SCRIPT ARGS...``: run a script written for Ascend, unchanged.

The script runs as ``__main__``, and its ``import llm_datadist`` gives this package.
"""

from __future__ import annotations

import argparse
import builtins
import io
import os
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType

from . import children, host_npu
from .aliases import install


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, and become the script: what it raises, SystemExit included, is the caller's.

    Parameters
    ----------
    arguments : sequence of str, optional
        ``sys.argv[1:]`` if it is omitted.
    """
    parser = argparse.ArgumentParser(
        prog="python -m aiodatadist.llm_datadist",
        usage="%(prog)s [-h] [--cpu] SCRIPT ARGS...",
        description="Run a script that imports llm_datadist, with aiodatadist in its place.",
        allow_abbrev=False,
    )
    parser.add_argument("--cpu", action="store_true", help="host memory in the place of an NPU, also for torch_npu")
    parser.add_argument("script", metavar="SCRIPT", help="a Python file, run as __main__")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="what the script is given")
    options = parser.parse_args(arguments)
    try:
        code = _compiled(options.script)
    except OSError as why:
        parser.error(f"cannot read {options.script!r}: {why.strerror}")
    install()
    paths = [os.path.dirname(children.__file__)]
    if options.cpu:
        host_npu.install()
        paths.append(os.path.join(paths[0], "aiodatadist_cpu"))
        print("aiodatadist: --cpu: no NPU is used; torch.npu and torch_npu here are host memory", file=sys.stderr)
    script = ModuleType("__main__")
    script.__file__ = options.script
    script.__dict__["__builtins__"] = builtins
    # As for `python SCRIPT`: its folder comes in the place of the current one.
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(options.script))
    # For processes that the script starts: those of multiprocessing are given sys.path, all others the variable.
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    sys.path[1:1] = paths
    sys.argv = [options.script, *options.arguments]
    sys.modules["__main__"] = script
    exec(code, script.__dict__)


def _compiled(path: str) -> CodeType:
    with io.open_code(os.path.abspath(path)) as file:
        code: CodeType = compile(file.read(), path, "exec", dont_inherit=True)
    return code


if __name__ == "__main__":
    main()
