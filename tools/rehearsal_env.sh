# Sourced by test.sh: a virtual environment of its own, .venv-rehearsal, with the real torch_npu and a stub in the place
# of CANN, so that torch_npu loads on a machine without an NPU (docs/explanation/contract-tests.md). Built once, and again when what it is
# built from changes. REHEARSAL_VENV and PYTHON choose another place and interpreter.
VENV=${REHEARSAL_VENV:-.venv-rehearsal}
EXTRA=rehearsal
. "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
stubs=$VIRTUAL_ENV/lib/cann_stub
want="$(cat tools/rehearsal/*.py tools/rehearsal/*.c "$VENV/.installed" | cksum)"
if [ "$(cat "$stubs/.built" 2>/dev/null)" != "$want" ]; then
    python tools/rehearsal/build_stubs.py "$stubs"
    echo "$want" >"$stubs/.built"
fi
export LD_LIBRARY_PATH=$stubs${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
