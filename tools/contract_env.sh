# Sourced by test.sh: the virtual environment of the contract tests and of the emulator's, .venv-contract. It is .venv
# plus the real torch_npu, which loads the emulator in place of CANN (docs/explanation/emulator.md). It is built once, and
# again when its sources change. CONTRACT_VENV chooses another folder.
[ "${BASH_SOURCE[0]}" != "$0" ] || { echo "source this file: . $0" >&2; exit 2; }
. "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
contract=$PWD/${CONTRACT_VENV:-.venv-contract}
packages() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
want="$(cat tools/contract_env.sh "$VENV/.installed" | cksum)"
if [ "$(cat "$contract/.installed" 2>/dev/null)" != "$want" ]; then
    "$VENV/bin/python" -m venv --clear --without-pip "$contract"
    echo "import site; site.addsitedir('$(packages "$VENV")')" >"$(packages "$contract")/venv.pth"
    # without dependencies: they are in .venv, and torch_npu may ask for another build of torch
    "$VENV/bin/pip" --python "$contract/bin/python" install -q --no-compile --no-deps --no-build-isolation \
        "$(grep -o 'torch_npu==[0-9.]*' pyproject.toml)" -e . || {
        echo "error: pip could not install torch_npu into $contract; is the package index reachable?" >&2
        exit 1
    }
    echo "$want" >"$contract/.installed"
fi
. "$contract/bin/activate"
# the newest CANN: torch_npu takes the paths of all operators that it knows
variables="$(python -m torchtitan_npu.emulator.environment --cann master)" || exit 1
eval "$variables"
