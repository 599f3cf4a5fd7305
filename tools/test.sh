#!/usr/bin/env bash
# usage: bash tools/test.sh [--all] [ARGUMENT OF PYTEST ...]
# Set up and run everything that CI runs: ruff, the docs site, mypy, pytest (with the docs check), and with the real
# torch_npu the contract tests and those of the emulator.
# --all adds the tests marked slow. Other arguments go to pytest, and the tests with torch_npu are left out.
set -euo pipefail
case " $* " in *" --help "* | *" -h "*)
    sed -n '2,/^set /{/^#/s/^# //p}' "$0"
    exit
    ;;
esac
marked=()
if [ "${1:-}" = --all ]; then
    marked=(-m "slow or not slow")
    shift
fi
. "$(dirname "$0")/setup_env.sh"
if [ $# = 0 ]; then
    (. tools/contract_env.sh) & # in parallel: the linters leave a core idle
    contract=$!
    trap 'echo "waiting for the environment of the contract tests" >&2; wait' EXIT
fi
compiled=
if [ ! -e tests/__pycache__ ]; then
    # in parallel to the linters: otherwise each worker of the first run compiles all imported modules
    python -m pytest --collect-only >/dev/null &
    compiled=$!
fi
ruff check .
ruff format --check .
NO_MKDOCS_2_WARNING=1 mkdocs build --quiet --strict
mypy
[ -z "$compiled" ] || wait "$compiled" || true # pytest shows an error again
OMP_NUM_THREADS=1 python -m pytest -n 2 --dist worksteal "${marked[@]}" "$@"
if [ $# = 0 ]; then
    wait "$contract"
    trap - EXIT
    (
        . tools/contract_env.sh
        OMP_NUM_THREADS=1 python -m pytest -n 2 --dist worksteal "${marked[@]}" tests/contract tests/emulator
    )
fi
