# Sourced by demo.sh and test.sh: create a virtual environment with this checkout installed, and activate it. It is
# created again when pyproject.toml or constraints.txt changes. VENV (.venv) is its folder, PYTHON (python3) the
# interpreter, EXTRA (dev,docs) the optional dependencies.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV=${VENV:-.venv}
PYTHON=${PYTHON:-python3}
want="$(cat pyproject.toml constraints.txt | cksum) $PWD"
if [ "$(cat "$VENV/.installed" 2>/dev/null)" != "$want" ]; then
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "error: Python 3.11 or newer is required; select one with PYTHON=..." >&2
        exit 1
    }
    install() {
        "$VENV/bin/pip" install -q --no-compile "$@" || {
            echo "error: pip could not install into $VENV; is the package index reachable?" >&2
            exit 1
        }
    }
    echo "setting up $VENV (a few minutes the first time)"
    "$PYTHON" -m venv "$VENV"
    # Install torch first, with its exact version: a version range could replace a CPU build by gigabytes of CUDA packages.
    install "$(grep '^torch==' constraints.txt)"
    install -c constraints.txt -e ".[${EXTRA:-dev,docs}]"
    echo "$want" >"$VENV/.installed"
fi
. "$VENV/bin/activate"
unset PYTHONDONTWRITEBYTECODE # cache the bytecode of imported modules
unset PYTHONUNBUFFERED # tests run with the buffers that a user has
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
