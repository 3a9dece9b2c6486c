# Helpers of .ci/run and .ci/soak; sourced, never run.
# shellcheck shell=bash

# The checkout that these scripts belong to.
ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf '%s\n' "$*"; }

die() {
    printf '%s\n' "$*" >&2
    exit 1
}

# Print the first Python that is new enough and has its headers. $PYTHON, when set, is the only candidate.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if "$candidate" - 2>/dev/null <<'PY'; then
import ensurepip, os, sys, sysconfig, venv
headers = os.path.join(sysconfig.get_path("include"), "Python.h")
sys.exit(not (sys.version_info >= (3, 11) and os.path.exists(headers)))
PY
            # A version manager's shim would resolve differently in another folder.
            "$candidate" -c 'import os, sys; print(os.path.realpath(sys.executable))'
            return
        fi
    done
    say "no Python 3.11 or newer with headers, venv and ensurepip found" >&2
    return 1
}

# make_venv FOLDER: an empty environment.
make_venv() {
    local python
    python=$(find_python)
    "$python" -m venv "$1"
}

# in_venv FOLDER COMMAND...: run with that environment active.
in_venv() {
    local venv=$1
    shift
    env -u PYTHONPATH -u PYTHONHOME VIRTUAL_ENV="$venv" PATH="$venv/bin:$PATH" "$@"
}

# pip_in FOLDER ARGUMENTS...: pip install there, quiet unless it fails.
pip_in() {
    local venv=$1
    shift
    in_venv "$venv" python -m pip install -qq --disable-pip-version-check --no-input --root-user-action=ignore "$@"
}

# requirements EXTRA...: the packages of these extras of pyproject.toml, one a line; "." stands for the required ones.
requirements() {
    "$(find_python)" - "$ROOT/pyproject.toml" "$@" <<'PY'
import sys, tomllib
with open(sys.argv[1], "rb") as f:
    project = tomllib.load(f)["project"]
for extra in sys.argv[2:]:
    print("\n".join(project["dependencies"] if extra == "." else project["optional-dependencies"][extra]))
PY
}

# copy_checkout FOLDER: all files git knows or would add, and nothing that was built.
copy_checkout() {
    local name
    mkdir -p "$1"
    # Files deleted but not yet committed are still listed.
    git -C "$ROOT" ls-files -z --cached --others --exclude-standard |
        while IFS= read -r -d '' name; do
            if [[ -e $ROOT/$name ]]; then printf '%s\0' "$name"; fi
        done |
        tar -C "$ROOT" --null --files-from=- -cf - | tar -C "$1" -xf -
}

# readme_block N: the N-th fenced sh block of the README.
readme_block() {
    awk -v wanted="$1" '
        /^```sh$/ { number++; inside = number == wanted; next }
        /^```$/ { inside = 0 }
        inside' "$ROOT/README.md"
}

# runtime NAME PACKAGE...: the path of a shared library of the compiler, its packages installed if it is missing.
runtime() {
    local name=$1 path
    shift
    path=$("${CC:-gcc}" -print-file-name="$name")
    if [[ ! -e $path ]]; then
        { apt-get update && apt-get install -y --no-install-recommends "$@"; } >&2
        path=$("${CC:-gcc}" -print-file-name="$name")
    fi
    [[ -e $path ]] || die "$name is missing"
    say "$path"
}

# A prefix for sanitized programs. Some kernels randomise more bits of addresses than the shadow memory allows for.
FIXED=()
if setarch -R true 2>/dev/null; then FIXED=(setarch -R); fi

# sanitizer_env SUPPRESSIONS REPORT PRELOAD: set SANITIZER_ENV to what goes before a command that is to run with a
# sanitizer: variables, and programs to start it with. Reports go to files whose names begin with REPORT.
sanitizer_env() {
    local suppressions=$1 report="log_path=$2" preload=$3
    # shellcheck disable=SC2034  # for the scripts that source this
    SANITIZER_ENV=(
        PYTHONMALLOC=malloc OPENBLAS_NUM_THREADS=1
        ASAN_OPTIONS="detect_leaks=0:allocator_may_return_null=1:$report"
        UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1:$report"
        TSAN_OPTIONS="suppressions=$suppressions:die_after_fork=0:report_signal_unsafe=0:history_size=4:exitcode=66:$report"
        "${FIXED[@]}" env LD_PRELOAD="$preload"
    )
}
