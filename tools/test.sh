#!/usr/bin/env bash
# Sets up and runs everything CI runs: ruff, mypy, pytest. Arguments go to pytest.
set -euo pipefail
. "$(dirname "$0")/setup_env.sh"
ruff check .
ruff format --check .
mypy
OMP_NUM_THREADS=1 python -m pytest "$@"
