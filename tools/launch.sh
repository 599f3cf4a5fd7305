#!/usr/bin/env bash
# Launches a training job with the environment of its home, one log a rank, and the first failure said first.
#
#     [PROFILE=npu] [NPROC=8] bash tools/launch.sh --job.config_file X.toml [--section.key value ...]
#     NNODES=8 NODE_RANK=0 MASTER_ADDR=host0 bash tools/launch.sh ...      # on each node, NODE_RANK from 0 to 7
#
# All variables are in docs/how-to/launch.md; PYTHON (python) is the interpreter.
exec "${PYTHON:-python}" "$(dirname "${BASH_SOURCE[0]}")/launch.py" "$@"
