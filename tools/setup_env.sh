# Sourced by demo.sh and test.sh: create a virtual environment with this checkout installed, and activate it. It is
# created again when pyproject.toml or constraints.txt changes. VENV (.venv) is its folder, PYTHON (python3) the
# interpreter, EXTRA (dev,docs) the optional dependencies.
[ "${BASH_SOURCE[0]}" != "$0" ] || { echo "source this file: . $0" >&2; exit 2; }
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV=${VENV:-.venv}
PYTHON=${PYTHON:-python3}
want="$(cat pyproject.toml constraints.txt | cksum) $PWD"
if [ "$(cat "$VENV/.installed" 2>/dev/null)" != "$want" ]; then
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "error: Python 3.11 or newer is required; select one with PYTHON=..." >&2
        exit 1
    }
    mkdir -p "$VENV"
    setup_log=$VENV/setup.log
    : >"$setup_log"
    # setup_step TEXT COMMAND...: run COMMAND with its output in setup.log. Show TEXT with a spinner, in a log every 10 s.
    setup_step() {
        local text=$1 start=$SECONDS tick=0 before
        before=$(wc -l <"$setup_log")
        shift
        "$@" >>"$setup_log" 2>&1 &
        trap "kill $! 2>/dev/null; exit 130" INT
        while kill -0 $! 2>/dev/null; do
            if [ -t 2 ]; then
                printf '\r\033[K%s %s (%d s)' "$(cut -c $((tick % 4 + 1)) <<<'|/-\')" "$text" $((SECONDS - start)) >&2
            elif [ $((tick % 50)) = 49 ]; then
                echo "$text ($((SECONDS - start)) s)" >&2
            fi
            tick=$((tick + 1))
            sleep 0.2
        done
        trap - INT
        [ ! -t 2 ] || printf '\r\033[K' >&2
        wait $! || {
            # two processes may have written: show what failed, if pip says it
            output=$(tail -n "+$((before + 1))" "$setup_log")
            { grep '^ERROR' <<<"$output" || echo "$output"; } | tail -n 3 >&2
            echo "error: could not $text; is the package index reachable? All output: $setup_log" >&2
            exit 1
        }
        echo "$text: done ($((SECONDS - start)) s)"
    }
    # Install what constraints.txt lists in two processes that take about the same time. For Python 3.11 on Linux it lists
    # everything that a CPU build of torch needs. The last step installs what is missing and checks the result.
    install_pinned() {
        local large='^\(torch\|triton\|pyarrow\|scipy\|transformers\|mkdocs-material\|lm_eval\)==' first= second=
        trap 'kill $first $second 2>/dev/null' TERM
        "$VENV/bin/pip" install --no-compile --no-deps $(grep "$large" constraints.txt) &
        first=$!
        "$VENV/bin/pip" install --no-compile --no-deps $(grep == constraints.txt | grep -v "$large\|^pip==") &
        second=$!
        wait -n && wait -n || {
            kill $first $second 2>/dev/null || true
            wait || true
            return 1
        }
    }
    echo "setting up $VENV (a few minutes the first time)"
    setup_step "create $VENV" "$PYTHON" -m venv "$VENV"
    # The pip that Python 3.11 brings takes 40 seconds longer to find all versions.
    setup_step "install pip" "$VENV/bin/pip" install --no-compile "$(grep '^pip==' constraints.txt)"
    # torch has its exact version: a version range could replace a CPU build by gigabytes of CUDA packages.
    if [ "${EXTRA:-dev,docs} $("$PYTHON" -c 'import sys; print(sys.platform, *sys.version_info[:2])')" = "dev,docs linux 3 11" ]; then
        setup_step "install the versions of constraints.txt" install_pinned
    else
        setup_step "install torch" "$VENV/bin/pip" install --no-compile "$(grep '^torch==' constraints.txt)"
    fi
    setup_step "install torchtitan-npu and what it needs" \
        "$VENV/bin/pip" install --no-compile -c constraints.txt -e ".[${EXTRA:-dev,docs}]"
    echo "$want" >"$VENV/.installed"
fi
. "$VENV/bin/activate"
unset PYTHONDONTWRITEBYTECODE # cache the bytecode of imported modules
unset PYTHONUNBUFFERED # tests run with the buffers that a user has
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
