#!/usr/bin/env bash
# Train the debug model of DeepSeek-V3.2, or of another --model, twice on the CPU: eager and with all converters. Compare
# the loss curves. The arguments are those of `torchtitan-npu demo`.
set -euo pipefail
. "$(dirname "$0")/setup_env.sh"
torchtitan-npu demo "$@"
