# Sourced by demo.sh and test.sh: a virtual environment in .venv with this checkout installed, set up once and again when
# pyproject.toml or constraints.txt change. VENV and PYTHON choose another place and interpreter, EXTRA the optional
# dependencies (dev).
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV=${VENV:-.venv}
PYTHON=${PYTHON:-python3}
want="$(cat pyproject.toml constraints.txt | cksum) $PWD"
if [ "$(cat "$VENV/.installed" 2>/dev/null)" != "$want" ]; then
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "error: Python 3.11 or newer is needed; name one with PYTHON=..." >&2
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
    # torch first and by its exact version: it may be a CPU build, which a range would replace by gigabytes of CUDA packages
    install "$(grep '^torch==' constraints.txt)"
    install -c constraints.txt -e ".[${EXTRA:-dev}]"
    echo "$want" >"$VENV/.installed"
fi
. "$VENV/bin/activate"
unset PYTHONDONTWRITEBYTECODE # of the thousands of files installed, Python compiles those it imports, once
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
