"""``npu_rope``'s cosines and sines: made once per forward, and correct for every layer in every mode."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import PrepareModuleInput, parallelize_module
from torch.nn.attention.flex_attention import create_block_mask
from torchtitan.config.job_config import ActivationCheckpoint
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.models.llama3.model import model as llama3
from torchtitan.models.qwen3.model import model as qwen3

from tests._helpers.converted_models import initialise
from tests._helpers.multirank import run_on_ranks
from tests._helpers.rope_models import (
    BATCH,
    MAX_SEQ_LEN,
    POSITIONS,
    ROWS,
    SEQUENCE,
    TARGETS,
    Operators,
    assert_as_exact,
    assert_same,
    backward,
    build,
    compute,
    exact_rotations,
    gradients,
    references,
    rows_of,
    tokens,
)
from torchtitan_npu.converters.rope import rotate
from torchtitan_npu.layers.rotary import HALF, HALF_OF_COMPLEX, INTERLEAVE


@pytest.mark.parametrize("name", ["llama3", "qwen3", "deepseek_v32"])
@pytest.mark.parametrize("n_layers", [2, 4])
def test_tables_are_made_once(name: str, n_layers: int) -> None:
    """The first forward makes them from the model's buffer. Later ones only look up rows, if there are positions."""
    model = build(name, "npu_rope", n_layers=n_layers)

    def forward(positions: Tensor | None) -> Counter[str]:
        with Operators() as operators:
            model(tokens(), positions=positions)
        assert len(operators.rotations()) == n_layers * sum(TARGETS[name].values())
        return operators.on_tables()

    first = forward(None)
    assert "aten::cat" in first and max(first.values()) == 1, first
    assert forward(None) == {}
    assert forward(ROWS) == forward(POSITIONS["offset"]) == {"aten::index_select": 1}


def test_a_new_buffer_is_noticed() -> None:
    """``init_weights`` makes a new buffer, here with another theta."""
    model, plain = build("llama3", "npu_rope"), build("llama3")
    before = compute(model)
    for changed in (model, plain):
        changed.model_args.rope_theta = 50
        initialise(changed)
    after = compute(model)
    assert not torch.equal(before["logits"], after["logits"])
    torch.testing.assert_close(after["logits"], compute(plain)["logits"])
    with torch.inference_mode():  # an in-place change
        for changed in (model, plain):
            changed.freqs_cis.copy_(changed.freqs_cis.conj())
    assert not torch.equal(compute(model)["logits"], after["logits"])
    torch.testing.assert_close(compute(model)["logits"], compute(plain)["logits"])


def pipelined(model: nn.Module) -> dict[str, Tensor]:
    """Run two forwards with different positions, then their backwards, as a pipeline stage does."""
    outputs = [model(tokens(seed), positions=positions) for seed, positions in ((3, ROWS), (4, ROWS.flip(0) + 2))]
    for output in outputs:
        backward(output)
    return gradients(model)


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("name", ["llama3", "qwen3", "deepseek_v32"])
def test_overlapping_forwards_keep_their_tables(name: str, mode: str) -> None:
    """Activation checkpointing recomputes the first forward's layers after the second forward."""

    def run(*converters: str) -> dict[str, Tensor]:
        model = build(name, *converters)
        if mode == "full":
            apply_ac(model, ActivationCheckpoint(mode="full"), model_compile_enabled=False, op_sac_save_list=set())
        return pipelined(model)

    with exact_rotations():
        exact = pipelined(build(name, dtype=torch.float64))
    assert_as_exact(run("npu_rope"), run(), exact)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("positions", ["none", "rows"])
def test_trains_after_a_validation(mode: Any, positions: str) -> None:
    model = build("llama3", "npu_rope")
    with mode():
        logits = model(tokens(), positions=POSITIONS[positions])
    with Operators() as operators:
        ours = compute(model, POSITIONS[positions])
    assert torch.equal(ours["logits"], logits)
    # autograd in C++, as in torch_npu, cannot save inference tensors
    assert not any(rotation["r1"].is_inference() for rotation in operators.rotations())
    assert_as_exact(ours, *references("llama3", positions))


def test_a_copy_has_its_own_tables() -> None:
    """Pipeline parallel copies a model for its stages."""
    model = build("llama3", "npu_rope")
    before = compute(model, ROWS)
    twin = copy.deepcopy(model)
    assert_same(compute(twin, ROWS), before)
    twin.model_args.rope_theta = 50
    initialise(twin)
    assert not torch.equal(compute(twin, ROWS)["logits"], before["logits"])
    assert_same(compute(model, ROWS), before)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        pytest.param("llama3", {}, marks=pytest.mark.slow),
        ("qwen3", {}),
        # without experts and the indexer's loss, which are compiled in parts
        ("deepseek_v32", {"n_dense_layers": 2, "indexer_loss": False}),
    ],
    ids=["llama3", "qwen3", "deepseek_v32"],
)
def test_compiles_once(name: str, changes: dict[str, Any]) -> None:
    """Compile each block as TorchTitan does. Other values of positions cause no recompilation."""
    torch._dynamo.reset()
    model, counter = build(name, "npu_rope", **changes), CompileCounterWithBackend("aot_eager")
    for block in model.layers.values():
        block.compile(backend=counter, fullgraph=True)
    assert_as_exact(compute(model, ROWS), *references(name, "rows", **changes))
    compiled = counter.frame_count
    assert compiled
    assert not torch.equal(model(tokens(), positions=ROWS.flip(0)), model(tokens(), positions=ROWS))
    assert counter.frame_count == compiled


def arguments(name: str) -> dict[str, Any]:
    """Return the arguments of a forward besides tokens: positions, or masks for gpt_oss."""
    if name != "gpt_oss":
        return {"positions": ROWS}
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, SEQUENCE, SEQUENCE, device="cpu")
    return {"attention_masks": {"basic_mask": mask, "sliding_window_mask": mask}}


def half_precision(name: str) -> tuple[list[dict[str, Any]], Tensor]:
    """Return the rotations of one rank with FSDP2 in bfloat16, and the model's buffer."""
    model = build(name, "npu_rope")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (2,))
    for module in (*model.layers.values(), model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    outputs: list[torch.dtype] = []
    model.layers["1"].attention.wo.register_forward_hook(lambda module, args, output: outputs.append(output.dtype))
    with Operators() as operators:
        model(tokens(), **arguments(name))
    assert outputs == [torch.bfloat16]
    return operators.rotations(), model.freqs_cis if hasattr(model, "freqs_cis") else model.rope_cache


@pytest.mark.parametrize("name", ["llama3", "qwen3", "deepseek_v32", "gpt_oss"])
def test_fsdp_in_bfloat16_does_not_cast_the_shared_tables(name: str) -> None:
    """FSDP casts floating-point inputs of a block, but not those in RotaryTables."""
    for rotations, cache in run_on_ranks(2, half_precision, name):
        assert len(rotations) == 2 * sum(TARGETS.get(name, {"Attention": 2}).values())
        rows = rows_of(cache, arguments(name).get("positions"), SEQUENCE)
        for rotation in rotations:
            if not cache.is_complex():
                cos, sin = rows.chunk(2, dim=-1)
            elif rotation["rotary_mode"] == "interleave":
                cos, sin = (part.repeat_interleave(2, -1) for part in (rows.real, rows.imag))
            else:
                cos, sin = (torch.cat([part, part], dim=-1) for part in (rows.real, rows.imag))
            assert rotation["input"].dtype == rotation["r1"].dtype == rotation["r2"].dtype == torch.float32
            assert torch.equal(rotation["r1"].flatten(), cos.flatten())
            assert torch.equal(rotation["r2"].flatten(), sin.flatten())


def with_replicated_inputs(name: str) -> tuple[Tensor, Tensor, Counter[str]]:
    """Return the logits without and with the hooks of a tensor-parallel plan, and the operators on tables."""
    model = build(name, "npu_rope")
    with torch.no_grad():
        expected = model(tokens(), **arguments(name))
    replicated = (None, Replicate(), None) if name == "gpt_oss" else (None, Replicate(), None, Replicate())
    plan = PrepareModuleInput(input_layouts=replicated, desired_input_layouts=replicated, use_local_output=True)
    for block in model.layers.values():
        parallelize_module(block.attention, init_device_mesh("cpu", (1,)), plan)
    with torch.no_grad(), Operators() as operators:
        return expected, model(tokens(), **arguments(name)), operators.on_tables()


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_a_plan_that_replicates_positions_and_angles_accepts_the_tables(name: str) -> None:
    """TorchTitan's plans declare both as tensors, under context parallel also the positions."""
    ((expected, logits, operators),) = run_on_ranks(1, with_replicated_inputs, name)
    assert torch.equal(logits, expected)
    assert operators["aten::index_select"] == int(name != "gpt_oss")


def test_a_failed_forward_restores_the_buffer() -> None:
    model = build("gpt_oss", "npu_rope")
    cache = model.rope_cache
    with pytest.raises(AttributeError):
        model(tokens(), None)  # no masks
    assert model.rope_cache is cache and cache.dtype == torch.float32


def rotate_shards() -> list[Tensor]:
    """Rotate heads that are sharded over two ranks; return the differences from unsharded results and gradients."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    results = []
    angles, cosines = llama3.precompute_freqs_cis(16, MAX_SEQ_LEN), qwen3.precompute_rope_cache(16, MAX_SEQ_LEN)
    for pairing, cache in ((INTERLEAVE, angles), (HALF_OF_COMPLEX, angles), (HALF, cosines)):
        for positions in POSITIONS.values():
            x = torch.randn(BATCH, SEQUENCE, 4, 16)
            whole = x.clone().requires_grad_()
            shards = distribute_tensor(x, mesh, [Shard(2)]).requires_grad_()
            replicated = None if positions is None else DTensor.from_local(positions, mesh, [Replicate()])
            y = rotate(pairing, DTensor.from_local(cache, mesh, [Replicate()]), replicated, shards)[0]
            assert isinstance(y, DTensor) and y.placements == (Shard(2),) and y.to_local().shape[2] == 2
            expected = rotate(pairing, cache, positions, whole)[0]
            y.square().sum().backward()
            expected.square().sum().backward()
            assert shards.grad.placements == (Shard(2),)
            results += [y.full_tensor() - expected, shards.grad.full_tensor() - whole.grad]
    return results


def test_rotates_shards_of_heads() -> None:
    for differences in run_on_ranks(2, rotate_shards):
        assert len(differences) == 18 and not any(difference.any() for difference in differences)


def gradient_of_shared_key() -> tuple[Tensor, Tensor]:
    """Rotate a key that the heads of four TP ranks share, by positions of two rows. Return its gradient and ours."""
    generator = torch.Generator().manual_seed(0)
    key, weight = torch.randn(2, 8, 1, 8, generator=generator), torch.randn(2, 8, 4, 8, generator=generator)
    positions = torch.stack([torch.arange(8), torch.arange(8).roll(3)])
    angles = torch.polar(torch.ones(8, 4), torch.randn(8, 4, generator=generator))
    mesh = init_device_mesh("cpu", (4,))
    found = []
    for one, heads in (
        (key.clone(), weight),
        (distribute_tensor(key, mesh, [Replicate()]), distribute_tensor(weight, mesh, [Shard(2)])),
    ):
        leaf = one.requires_grad_()
        (rotate(INTERLEAVE, angles, positions, leaf)[0] * heads).sum().backward()
        assert leaf.grad is not None
        found.append(leaf.grad.full_tensor() if isinstance(leaf.grad, DTensor) else leaf.grad)
    return found[0], found[1]


def test_the_gradient_of_a_key_that_tp_ranks_share_is_split_into_rows() -> None:
    """It is a sum over the ranks. Sharded over the two rows as one sequence, four shards do not end with a row."""
    for expected, found in run_on_ranks(4, gradient_of_shared_key):
        torch.testing.assert_close(found, expected)
