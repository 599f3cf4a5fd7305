#!/usr/bin/env bash
# usage: bash tools/demo.sh [--model NAME] [--out DIR] [--steps N]
# Create .venv if it does not exist. Train the debug model of DeepSeek-V3.2, or of another --model, twice on this
# machine: eager and with all converters. Compare the loss curves. The arguments are those of `torchtitan-npu demo`.
set -euo pipefail
case " $* " in *" --help "* | *" -h "*)
    sed -n '2,/^set /{/^#/s/^# //p}' "$0"
    exit
    ;;
esac
. "$(dirname "$0")/setup_env.sh"
torchtitan-npu demo "$@"
