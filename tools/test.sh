#!/usr/bin/env bash
# Sets up and runs everything CI runs: ruff, mypy, pytest, and the rehearsal against the real torch_npu. Arguments go to
# pytest; then there is no rehearsal.
set -euo pipefail
. "$(dirname "$0")/setup_env.sh"
if [ $# = 0 ]; then
    (. tools/rehearsal_env.sh) & # beside what follows, which has a core to spare at first
    rehearsal=$!
    trap 'echo "waiting for the rehearsal environment" >&2; wait' EXIT
fi
ruff check .
ruff format --check .
mypy
OMP_NUM_THREADS=1 python -m pytest -n 2 --dist worksteal "$@"
if [ $# = 0 ]; then
    wait "$rehearsal"
    trap - EXIT
    (
        . tools/rehearsal_env.sh
        OMP_NUM_THREADS=1 python -m pytest -n 2 --dist worksteal tests/rehearsal
    )
fi
