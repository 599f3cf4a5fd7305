#!/usr/bin/env bash
# Trains the debug model twice on the CPU, eager and with converters, and compares the two loss curves.
set -euo pipefail
. "$(dirname "$0")/setup_env.sh"
out=${1:-outputs/demo}
python tools/compare_loss.py run --force --out "$out" --nproc 2 --steps 20 --rtol 1e-5 \
    --config torchtitan_npu/train_configs/llama3_debugmodel.toml --candidate-converters npu_rms_norm,npu_rope
echo "the picture: $out/comparison.png"
