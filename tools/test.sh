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
ruff check .
ruff format --check .
NO_MKDOCS_2_WARNING=1 mkdocs build --quiet --strict
mypy & # in parallel: the start of the tests leaves a core idle
types=$!
OMP_NUM_THREADS=1 python -m pytest -n 2 --dist worksteal "${marked[@]}" "$@"
wait "$types"
if [ $# = 0 ]; then
    wait "$contract"
    trap - EXIT
    (
        . tools/contract_env.sh
        OMP_NUM_THREADS=1 python -m pytest -n 2 --dist worksteal "${marked[@]}" tests/contract tests/emulator
    )
fi
