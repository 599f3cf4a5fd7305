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
    grad, places = torch.ones(2, 4).npu(), torch.arange(2, dtype=torch.int32).npu()
    torch_npu.npu_moe_token_unpermute_grad_v2(grad, places, 2, grad.dtype, **rows)


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

DSA_CALL = """
import torch, torch_npu
from torchtitan_npu.converters.dsa import NpuSparseAttention
from torchtitan_npu.models.deepseek_v32 import get_train_spec

args = get_train_spec().model_args["671B"]
attention = NpuSparseAttention(args)
tokens, heads, width, rope = 3, 32, args.kv_lora_rank, args.qk_rope_head_dim  # TP 4


def random(*shape, dtype=torch.bfloat16):
    return torch.randn(1, tokens, *shape).to(dtype).npu()


keys = random(1, width)
try:
    attention(
        random(heads, width), random(heads, rope), keys, random(1, rope), keys,
        random(args.index_n_heads, args.index_head_dim), random(args.index_head_dim),
        random(args.index_n_heads, dtype=torch.float32), documents=None, scale=1.0,
    ).cpu()
    print("computed")
except RuntimeError as error:
    print(next(line for line in str(error).splitlines() if "CANN" in line or "supports" in line))
"""


DSA_STEP = """
import copy
import torch
from torch import nn
from torchtitan_npu import platform

platform.prepare()
from torchtitan.config import JobConfig
from torchtitan.protocols.model_converter import build_model_converters
from tests._helpers.converted_models import LAYOUT
from torchtitan.distributed import ParallelDims
from torchtitan_npu.errors import UsageError
from torchtitan_npu.models.deepseek_v32 import deepseekv32_args
from torchtitan_npu.layers.sparse_attention import SparseAttention

config = JobConfig()
config.model.converters, config.training.seq_len = ["npu_dsa"], 1024
config.training.mixed_precision_param = "bfloat16"
try:
    for warmup in (False, True):
        args = copy.deepcopy(deepseekv32_args["debugmodel_npu"])
        args.warmup, args.seq_len = warmup, 1024
        eager, model = SparseAttention(args), nn.ModuleDict({"attention": SparseAttention(args)})
        build_model_converters(config, ParallelDims(**LAYOUT)).convert(model)
        torch.manual_seed(0)
        keys = (1, 128) if args.latent_keys() else (32, 128)
        width = 512 if args.latent_keys() else 128
        sizes = [(32, width), (32, 64), (keys[0], width), (1, 64), (keys[0], width), (64, 128), (128,), (64,)]
        inputs = [torch.randn(1, 6, *size).bfloat16() * 0.3 for size in sizes]
        if args.latent_keys():
            inputs[4] = inputs[2]
        inputs[-1] = inputs[-1].float()
        results = []
        for attention, device, dtype in ((eager, "cpu", torch.float64), (model["attention"], "npu", None)):
            attention.indexer_loss.start_batch(torch.tensor(1.0, device=device))
            moved = [x.to(device, dtype or x.dtype).requires_grad_(number > 4) for number, x in enumerate(inputs)]
            if args.latent_keys():
                moved[4] = moved[2]
            attention(*moved, documents=None, scale=0.07).sum().backward()
            results.append([attention.indexer_loss.total, *(x.grad for x in moved[5:])])
        errors = [(a.cpu().double() - b).abs().max() / b.abs().max() for b, a in zip(*results)]
        print("computed" if max(errors) < 0.02 else errors)  # a few roundings to bfloat16
except UsageError as error:
    print(error)
"""


GATING_STEP = """
from torchtitan_npu import platform

platform.prepare()
from tests._helpers.converted_models import convert
from tests._helpers.moe_layers import build_moe
from torchtitan_npu.errors import UsageError

try:
    convert(build_moe(score_func="sigmoid", route_norm=True), "npu_gating")
    print("converted")
except UsageError as error:
    print(error)
"""

PROGRAMS = {
    "8.5": {"calls": CALLS, "limits": LIMITS, "dsa call": DSA_CALL, "dsa step": DSA_STEP, "gating step": GATING_STEP},
    "9.0": {"dsa call": DSA_CALL, "dsa step": DSA_STEP},
    "9.1": {"calls": CALLS, "limits": LIMITS, "dsa call": DSA_CALL, "gating step": GATING_STEP},
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


def test_sparse_attention_needs_cann_9(outputs: Outputs) -> None:
    """In CANN 8.5 the operators have other limits and known faults."""
    (error,) = outputs("8.5")["dsa step"]
    assert error.startswith("model.converters: npu_dsa needs CANN 9.0 or newer, and 8.5.0 is installed: ")


@pytest.mark.slow
def test_both_stages_of_sparse_attention_compute_with_cann_9(outputs: Outputs) -> None:
    found = outputs("9.0")
    assert found["dsa call"] == ["computed"]
    assert found["dsa step"][-2:] == ["computed"] * 2


def test_gating_needs_cann_9_1(outputs: Outputs) -> None:
    error = outputs("8.5")["gating step"][-1]
    assert error.startswith("model.converters: npu_gating needs CANN 9.1 or newer, and 8.5.0 is installed: it is the ")
    assert outputs("9.1")["gating step"][-1] == "converted"


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


def test_npu_dsa_fails_on_cann_8_5(outputs: Outputs) -> None:
    """DeepSeek-V3.2's weights of the index heads are float32, which CANN 8.5 does not take."""
    (line,) = outputs("8.5")["dsa call"]
    assert "npu_lightning_indexer: weights.dtype is float32; CANN 8.5 on 910B supports float16, bfloat16" in line
    assert outputs("9.1")["dsa call"] == ["computed"]


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
        assert len(entry["types"]) == len(entry["arguments"]) and set(entry["types"]) <= C_TYPES.keys(), name
        assert entry.get("since", "9.0") in list(CANN_VERSIONS)[1:], name
        assert entry["source"], name
