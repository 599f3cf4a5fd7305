#!/usr/bin/env bash
# Train the debug model of DeepSeek-V3.2 twice on the CPU, eager and with all converters, and compare the loss curves.
set -euo pipefail
. "$(dirname "$0")/setup_env.sh"
out=${1:-outputs/demo}
torchtitan-npu compare run --force --out "$out" --nproc 2 --steps 15 --rtol 1e-4 \
    --config train_configs/deepseek_v32_debugmodel.toml \
    --candidate-converters npu_rms_norm,npu_rope,npu_gating,npu_permute,npu_gmm,npu_dsa -- --training.seq_len 64
echo "plot: $out/comparison.png"
