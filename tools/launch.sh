#!/usr/bin/env bash
# Run `torchtitan-npu launch` from a checkout that need not be installed.
#
#     [PROFILE=npu] [NPROC=8] bash tools/launch.sh --job.config_file X.toml [--section.key value ...]
#     NNODES=8 NODE_RANK=0 MASTER_ADDR=host0 bash tools/launch.sh ...      # on each node, NODE_RANK from 0 to 7
#
# docs/how-to/launch.md lists all variables. PYTHON selects the interpreter (default: python).
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$root"
exec "${PYTHON:-python}" -m torchtitan_npu.cli.main launch "$@"
