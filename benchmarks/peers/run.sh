#!/usr/bin/env bash
# Compare aiodatadist with its peers; README.md says what is measured, `bash benchmarks/peers/run.sh --help` the options.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
for python in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
    if "$python" -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        exec "$python" "$here/compare.py" "$@"
    fi
done
echo "no Python 3.11 or newer with venv and ensurepip found; name one in PYTHON" >&2
exit 1
