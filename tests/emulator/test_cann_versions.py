"""A version of CANN is a set of symbols: torch_npu does not find the operators of a later version."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.emulator.conftest import Shared
from torchtitan_npu.emulator.build import C_TYPES, CANN_VERSIONS, PROTOTYPES, BuildError, build, operator_entries
from torchtitan_npu.emulator.environment import process_variables

GATING = "aclnnMoeGatingTopKBackward"
"""The gradient of ``npu_moe_gating_top_k``, of CANN 9.1."""
SINKS = "aclnnSparseFlashAttentionV2"
"""``npu_sparse_flash_attention`` with ``sinks``, after CANN 9.1."""
DSA = (
    "aclnnLightningIndexer",
    "aclnnLightningIndexerGrad",
    "aclnnSparseFlashAttention",
    "aclnnSparseFlashAttentionGrad",
    "aclnnSparseLightningIndexerGradKLLoss",
)

CALLS = """
import torch, torch_npu
from torch_npu.npu.utils import get_cann_version

print(get_cann_version())
scores, grad, experts = torch.ones(4, 8), torch.ones(4, 2), torch.zeros(4, 2, dtype=torch.int32)
query, indices = torch.ones(1, 1, 8, 512, dtype=torch.float16), torch.zeros(1, 1, 1, 2048, dtype=torch.int32)
query, indices, key = query.npu(), indices.npu(), query[:, :, :1].npu()
for call in (
    lambda: torch_npu.npu_moe_gating_top_k_backward(scores.npu(), grad.npu(), experts.npu()),
    lambda: torch_npu.npu_sparse_flash_attention(query, key, key, indices, 1.0, sinks=torch.ones(8).npu()),
):
    try:
        call()
        print("computed")
    except RuntimeError as error:
        print(str(error).splitlines()[0])
"""

LIMITS = """
import torch, torch_npu

key = torch.ones(1, 1, 1, 128, dtype=torch.bfloat16).npu()


def index(heads, count):
    query, weights = key.expand(1, 1, heads, 128).contiguous(), torch.ones(1, 1, heads, dtype=torch.bfloat16).npu()
    torch_npu.npu_lightning_indexer(query, key, weights, sparse_count=count)


def unpermute_grad(**rows):
    grad, slots = torch.ones(2, 4).npu(), torch.arange(2, dtype=torch.int32).npu()
    torch_npu.npu_moe_token_unpermute_grad_v2(grad, slots, 2, grad.dtype, **rows)


for call in (
    lambda: index(64, 1),
    lambda: index(32, 1),
    lambda: index(64, 3072),
    lambda: unpermute_grad(permuted_tokens=torch.ones(2, 4).npu()),
    lambda: unpermute_grad(),
):
    try:
        call()
        torch.npu.synchronize()
        print("computed")
    except RuntimeError as error:
        print(next(line for line in str(error).splitlines() if "CANN" in line or "supports" in line))
"""

CONVERSIONS = """
from torchtitan_npu import platform

platform.prepare()
from tests._helpers.converted_models import build_on_meta, convert
from tests._helpers.moe_layers import build_moe
from torchtitan_npu.errors import UsageError

conversions = {
    "npu_dsa": lambda: build_on_meta("deepseek_v32", "npu_dsa"),
    "npu_gating": lambda: convert(build_moe(score_func="sigmoid", route_norm=True), "npu_gating"),
}
for converter, apply in conversions.items():
    try:
        apply()
        print(converter, "applies")
    except UsageError as error:
        print(error)
"""

TRAINING = """
import os
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
from torchtitan_npu import platform

platform.prepare()
from tests.emulator.training_jobs import DSA_BFLOAT16, Job, train

for stage in ("sparse", "warmup"):
    options = {**DSA_BFLOAT16, "training.steps": 1, "dsa.stage": stage}
    options["model.converters"] = [name for name in options["model.converters"] if name != "npu_gating"]
    gradients = train(Job("deepseek_v32_dsa", options=options)).gradients.values()
    print("computed" if gradients and all(x.isfinite().all() and x.any() for x in gradients) else "wrong")
"""

PROGRAMS = {
    "8.5": {"calls": CALLS, "limits": LIMITS, "conversions": CONVERSIONS},
    "9.0": {"training": TRAINING},
    "9.1": {"calls": CALLS, "limits": LIMITS, "conversions": CONVERSIONS},
}
"""The programs that run in one process, by version of CANN."""

Outputs = Callable[[str], dict[str, list[str]]]


@pytest.fixture(scope="session")
def outputs(shared: Shared[dict[str, list[str]]]) -> Outputs:
    """Return a function that returns the lines that the programs of a version print."""
    return lambda cann: shared(f"cann-{cann}", lambda: run_programs(cann))


def run_programs(cann: str) -> dict[str, list[str]]:
    environment = {**os.environ, **process_variables(build(cann=cann), {})}
    program = "".join(f"print({name!r}, end=':\\n')\n{text}" for name, text in PROGRAMS[cann].items())
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, list[str]] = {}
    for line in ran.stdout.splitlines():
        if line.removesuffix(":") in PROGRAMS[cann]:
            found[line.removesuffix(":")] = lines = []
        else:
            lines.append(line)
    return found


def test_converters_need_a_version(outputs: Outputs) -> None:
    """In CANN 8.5 the operators of npu_dsa have other limits and known faults."""
    dsa, gating = (line for line in outputs("8.5")["conversions"] if "npu_" in line)
    assert dsa.startswith("model.converters: npu_dsa needs CANN 9.0 or newer, and 8.5.0 is installed: ")
    assert gating.startswith("model.converters: npu_gating needs CANN 9.1 or newer, and 8.5.0 is installed: it is the ")
    assert outputs("9.1")["conversions"][-1] == "npu_gating applies"


@pytest.mark.slow
def test_both_stages_of_sparse_attention_compute_with_cann_9(outputs: Outputs) -> None:
    assert outputs("9.0")["training"][-2:] == ["computed"] * 2


def test_a_missing_operator_is_torch_npus_error(outputs: Outputs) -> None:
    version, gating, sinks = outputs("8.5")["calls"]
    assert version == "8.5.0"
    assert gating.startswith(f"{GATING} or {GATING}GetWorkspaceSize not in libopapi.so")
    assert sinks.startswith(f"{SINKS} or {SINKS}GetWorkspaceSize not in libopapi.so")
    version, gating, sinks = outputs("9.1")["calls"]
    assert version == "9.1.0"
    assert "not in libopapi.so" not in gating
    assert sinks.startswith(f"{SINKS} or {SINKS}GetWorkspaceSize not in libopapi.so")


def test_the_limits_of_a_version(outputs: Outputs) -> None:
    """CANN 8.5 has the operators of npu_dsa with narrower limits: 64 heads and 2048 keys.

    Its gradient of unpermute requires the rows even where it does not read them.
    """
    computed, heads, count, with_rows, without_rows = outputs("8.5")["limits"]
    assert computed == with_rows == "computed"
    assert "the number of heads of query is 32; CANN 8.5 on 910B supports 64" in heads
    assert "sparse_count is 3072; CANN 8.5 on 910B supports 1..2048" in count
    assert "whether permuted_tokens is given is False; CANN 8.5 on 910B supports True" in without_rows
    assert outputs("9.1")["limits"] == ["computed"] * 5


@pytest.mark.parametrize(
    ("cann", "present", "absent"),
    [
        ("8.5", DSA, (GATING, SINKS)),
        ("9.0", DSA, (GATING, SINKS)),
        ("9.1", (GATING,), (SINKS,)),
        ("master", (SINKS,), ()),
    ],
)
def test_operators_of_a_version(cann: str, present: tuple[str, ...], absent: tuple[str, ...]) -> None:
    entries = operator_entries([*DSA, GATING, SINKS, "aclnnOfNoVersion"], cann)
    assert all(f"int {name}GetWorkspaceSize(" in entries for name in present)
    assert not any(f"int {name}GetWorkspaceSize(" in entries for name in (*absent, "aclnnOfNoVersion"))


def test_a_version_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_EMULATOR_CANN", "7.0")
    with pytest.raises(BuildError, match=r"no CANN 7\.0; it has 8\.5, 9\.0, 9\.1, master"):
        build()


def test_the_table_of_prototypes() -> None:
    text = Path(PROTOTYPES).read_text()
    table = json.loads(text)
    assert len(text.splitlines()) == len(table) + 2, "one line an operator"
    assert list(table) == sorted(table)
    for name, entry in table.items():
        assert set(entry["types"]) <= C_TYPES.keys(), name
        assert entry.get("since", "9.0") in list(CANN_VERSIONS)[1:], name
        assert entry["source"], name
        types = dict(zip(entry["arguments"], entry["types"], strict=True))
        assert all(types[output] in "tTo" for output in entry["outputs"]), name
        assert entry["outputs"] or name == "aclnnSleep", name
