#!/usr/bin/env bash
# What run.sh runs when it is given no command: everything of the verbs transport that a machine with an RDMA device can
# show. Each part runs whether or not those before it passed; the exit code is 0 only if all did. Arguments go to pytest.
set -uo pipefail

python=${PYTHON:-python}
failed=()

part() {
    local name=$1 started=$SECONDS status=0
    shift
    echo "=== $name"
    "$@" </dev/null || status=$?
    if ((status)); then failed+=("$name"); fi
    echo "=== $name: exit $status after $((SECONDS - started)) s"
}

# First, because it says what is wrong where there is no device.
part doctor "$python" -m aiodatadist doctor rdma
# Rounds are for processors, and these are emulated.
part tests "$python" -m pytest -p no:cacheprovider -m verbs --require verbs --min-passed 1 --hang-limit 300 \
    --scale 0.2 --durations 25 "$@"
part demo "$python" -m aiodatadist demo --transport verbs
part layerwise "$python" -m aiodatadist demo --transport verbs --mode layerwise

if ((${#failed[@]})); then
    echo "=== FAILED: ${failed[*]}"
    exit 1
fi
echo "=== all parts passed in $SECONDS s"
