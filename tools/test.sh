#!/usr/bin/env bash
# usage: bash tools/test.sh [--all]                  everything that CI runs
#        bash tools/test.sh ARGUMENT OF PYTEST ...   just pytest, for example a path or -k rms_norm
# Everything is ruff, the docs site, mypy, pytest (with the docs check), and with the real torch_npu the contract tests
# and those of the emulator. --all adds the tests marked slow.
set -euo pipefail
case " $* " in *" --help "* | *" -h "*)
    sed -n '2,/^set /{/^#/s/^# //p}' "$0"
    exit
    ;;
esac
. "$(dirname "$0")/setup_env.sh"
marked=()
if [ "${1:-}" = --all ]; then
    marked=(-m "slow or not slow")
    shift
fi
if [ $# != 0 ]; then
    exec python -m pytest "${marked[@]}" "$@"
fi
(. tools/contract_env.sh) & # in parallel: the linters leave a core idle
contract=$!
trap 'echo "waiting for the environment of the contract tests" >&2; wait' EXIT
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
OMP_NUM_THREADS=1 python -m pytest -n 2 --dist worksteal "${marked[@]}"
wait "$contract"
trap - EXIT
. tools/contract_env.sh
OMP_NUM_THREADS=1 python -m pytest -n 2 --dist worksteal "${marked[@]}" tests/contract tests/emulator
