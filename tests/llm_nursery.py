"""Forks processes that run scripts by the drop-in's launcher, so that its imports, and torch's, are paid for once.

Reads commands from stdin, one a line: a JSON list of the launcher's command lines, all to run at once; each may begin
with variables of the environment, ``NAME=VALUE``. Answers with a line, too: a list of ``[exit status, stdout,
stderr]``. Started by `test_llm_scripts`.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import re
import signal
import sys
import tempfile
import time
from typing import IO, Any

from aiodatadist.llm_datadist import __main__ as launcher

# Seconds that the others may still take when one has failed.
AFTER_A_FAILURE = 5.0

Started = dict[int, tuple[int, IO[bytes], IO[bytes]]]


def read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def wait(started: Started, seconds: float) -> list[Any]:
    """Wait for children; kill those that take longer."""
    results: list[Any] = [None] * len(started)
    limit = time.monotonic() + seconds
    while started:
        for pid in list(started):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                index, out, err = started.pop(pid)
                results[index] = [os.waitstatus_to_exitcode(status), read(out), read(err)]
                if status != 0:
                    # The others wait for it.
                    limit = min(limit, time.monotonic() + AFTER_A_FAILURE)
        if time.monotonic() > limit:
            for pid in started:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return results


def main() -> None:
    for name in sys.argv[2:]:
        importlib.import_module(name)
    # Collecting in a child would copy every page that holds an object.
    gc.freeze()
    for line in sys.stdin:
        started: Started = {}
        for index, arguments in enumerate(json.loads(line)):
            out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115  # children write to them
            pid = os.fork()
            if pid == 0:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                while arguments and (variable := re.fullmatch("([A-Z_]+)=(.*)", arguments[0])):
                    os.environ[variable[1]] = variable[2]
                    del arguments[0]
                # Then the interpreter ends as after a script, with its exit handlers.
                launcher.main(arguments)
                return
            started[pid] = (index, out, err)
        print(json.dumps(wait(started, float(sys.argv[1]))), flush=True)


if __name__ == "__main__":
    main()
