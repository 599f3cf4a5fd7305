# Sourced by test.sh: a second virtual environment, .venv-contract, with the real torch_npu and a stub of CANN, so that
# torch_npu loads on a machine without an NPU (docs/explanation/contract-tests.md). It is built once, and again when its
# sources change. CONTRACT_VENV and PYTHON choose another folder and interpreter.
VENV=${CONTRACT_VENV:-.venv-contract}
EXTRA=contract
. "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
stubs=$VIRTUAL_ENV/lib/cann_stub
want="$(cat tools/contract/*.py tools/contract/*.c "$VENV/.installed" | cksum)"
if [ "$(cat "$stubs/.built" 2>/dev/null)" != "$want" ]; then
    python tools/contract/build_stubs.py "$stubs"
    echo "$want" >"$stubs/.built"
fi
export LD_LIBRARY_PATH=$stubs${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
