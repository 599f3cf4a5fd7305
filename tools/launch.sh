#!/usr/bin/env bash
# Launches a training job with the environment of its home, one log a rank, and the first failure said first.
#
#     [PROFILE=npu] [NPROC=8] bash tools/launch.sh --job.config_file X.toml [--section.key value ...]
#     NNODES=8 NODE_RANK=0 MASTER_ADDR=host0 bash tools/launch.sh ...      # on each node, NODE_RANK from 0 to 7
#
# PROFILE: a file of torchtitan_npu/train_configs/env, by name (default: that of the home), or none. NPROC: ranks of a
# node (default: its devices). MASTER_PORT (29500). LOGS (outputs/logs): best a folder that the nodes share. PYTHON
# (python). See docs/launch.md.
set -euo pipefail
fail() {
    echo "launch: error: $1" >&2
    exit 2
}
for name in NNODES NODE_RANK NPROC MASTER_PORT; do
    [[ ${!name-0} =~ ^(0|[1-9][0-9]*)$ ]] || fail "$name=${!name} is not a number"
done
nodes=${NNODES:-1} options=()
((nodes > 0)) || fail "NNODES=0: at least one node trains"
((${NPROC:-1} > 0)) || fail "NPROC=0: at least one rank trains"
((${NODE_RANK:-0} < nodes)) || fail "NODE_RANK=$NODE_RANK is none of the $nodes nodes, 0 to $((nodes - 1))"
if ((nodes > 1)); then
    [ -n "${NODE_RANK:-}" ] || fail "NODE_RANK is not set: the number of this node, 0 to $((nodes - 1))"
    [ -n "${MASTER_ADDR:-}" ] || fail "MASTER_ADDR is not set: the name or address of node 0, as the others reach it"
    options+=(--nodes "$nodes" --node "$NODE_RANK" --master "$MASTER_ADDR" --port "${MASTER_PORT:-29500}")
fi
[ -z "${PROFILE:-}" ] || options+=(--profile "$PROFILE")
[ -z "${NPROC:-}" ] || options+=(--nproc "$NPROC")
[ -z "${LOGS:-}" ] || options+=(--logs "$LOGS")
exec "${PYTHON:-python}" "$(dirname "${BASH_SOURCE[0]}")/launch.py" "${options[@]}" -- "$@"
