#!/usr/bin/env bash
# Counts the instructions that a transfer takes, with valgrind's callgrind: a figure that no other process changes.
#
#   bash benchmarks/instructions.sh [PYTHON]
#
# Prints one line for each case: instructions in user space for each block or each awaited transfer, in all threads, by
# the library and by the raw loop beside it. What the kernel does is not in it. Needs valgrind, a C compiler, and an
# installed aiodatadist (or PYTHONPATH) as a release build for PYTHON, by default `python`. Takes about a minute.
set -euo pipefail
python=${1:-python}
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
command -v valgrind >/dev/null || {
    echo "instructions.sh: valgrind is not there; your distribution has it, with its header callgrind.h" >&2
    exit 1
}
work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT
# A count ends, and the next one begins, when the program asks for it.
cat >"$work/mark.c" <<'END'
#include <valgrind/callgrind.h>
void mark(void) { CALLGRIND_DUMP_STATS; }
END
cc -O1 -shared -fPIC -o "$work/mark.so" "$work/mark.c"
PYTHONHASHSEED=0 PYTHONDONTWRITEBYTECODE=1 valgrind --quiet --tool=callgrind --callgrind-out-file="$work/counts" \
    "$python" "$here/instructions.py" measure "$work/cases.json" "$work/mark.so"
"$python" "$here/instructions.py" report "$work/cases.json" "$work/counts"
