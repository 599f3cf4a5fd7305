"""One training step of TorchTitan's models on fake npu tensors, with models built as the Trainer does."""

from __future__ import annotations

import copy
import functools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import utils as titan
from torchtitan.distributed.context_parallel import prepare_context_parallel_input
from torchtitan.protocols.model_converter import build_model_converters
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.tools.utils import set_default_dtype

from torchtitan_npu.cli.doctor.call_description import describe
from torchtitan_npu.cli.doctor.operators import NOT_CALLED, recorded_calls
from torchtitan_npu.components.chunked_loss import ChunkedLossPerToken
from torchtitan_npu.config.job_config import Dsa, JobConfig
from torchtitan_npu.converters import CONVERTERS, exact_converters
from torchtitan_npu.converters.attention import VarlenDocuments
from torchtitan_npu.distributed.matmul_sharding import use_matmul_sharding
from torchtitan_npu.distributed.parallel_dims import ParallelDims
from torchtitan_npu.distributed.tied_weights import ties_weights
from torchtitan_npu.layers.auxiliary_loss import auxiliary_losses
from torchtitan_npu.layers.documents import CuSeqlens, Documents
from torchtitan_npu.ops import OPS
from torchtitan_npu.ops.core.arguments import by_name
from torchtitan_npu.planner import AssumedLoad, Calls, fake_device, fake_ranks
from torchtitan_npu.preflight.job_context import JobContext
from torchtitan_npu.prover.draws import DEGREES
from torchtitan_npu.torch_internals.dispatch import OpOverload

RANKS = 8
BATCH, SEQUENCE = 2, 2048
ONE_RANK = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)

# Layers have their full size, because fake tensors need no memory. There are two layers, one dense and one with
# experts if the model has both, and few experts, because each calls several small operators.
FEW_EXPERTS = {"n_layers": 2, "moe_args.num_experts": 16}
GROUPED_EXPERTS = {"n_layers": 2, "moe_args.num_experts": 32, "n_dense_layers": 1}  # 8 groups of more than 2 experts
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama3": ("llama3", "8B", {"n_layers": 2}),
    "llama4": ("llama4", "17bx128e", FEW_EXPERTS),
    "qwen3": ("qwen3", "0.6B", {"n_layers": 2}),
    "qwen3_moe": ("qwen3", "30B-A3B", FEW_EXPERTS),
    "deepseek_v3": (
        "deepseek_v3",
        "671B",
        {**GROUPED_EXPERTS, "attn_type": "sdpa", "attn_mask_type": "causal"},
    ),
    "deepseek_v32": ("deepseek_v32", "671B", GROUPED_EXPERTS),
    "gpt_oss": ("gpt_oss", "20b", FEW_EXPERTS),
}
"""By name: the model, its flavor, and changes to its arguments."""


OF_TORCH_NPU = {
    *("npu_fusion_attention_v3", "npu_fusion_attention_grad_v3"),  # scaled dot-product attention
    "npu_gather_backward",
    "repeat_interleave_backward_int",  # of SmallOpAttention
}
"""torch_npu's own ``npu::`` kernels of torch's operators. Neither our limits nor the doctor's samples have them, and
``tests/emulator/test_fused_formulas.py`` and ``test_kernels.py`` run them."""


RECORDED = os.environ.get("RECORDED_CALLS")
"""Set by tools/recorded_calls.py, which reads a file per step there."""


@dataclass
class Step:
    """The observations of a step."""

    targets: dict[str, int]
    """Number of modules that each converter replaced."""
    calls: CallsAndLimits
    """The operators called in forward, backward, gradient clipping and optimizer, and the NPU limits they exceed."""
    gradients: set[str]
    """The parameters that have a gradient."""
    outputs: dict[str, list[Any]]
    """Shape and dtype of each output, by module."""
    model: nn.Module
    """The trained model, or this rank's pipeline stage."""


class CallsAndLimits(Calls):
    """Record also the arguments of our operators, and the limits of the NPU's kernels that a call exceeds."""

    def __init__(self) -> None:
        super().__init__()
        self.limit_errors: list[str] = []
        self.described: dict[str, list[dict[str, Any]]] = {}
        """By operator, the different :func:`descriptions <describe>` of its calls."""

    def call(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if op.namespace == "npu" and (ours := OPS.get(op_name(op))):
            arguments = by_name(op, args, kwargs)
            self.limit_errors += ours.limit_errors(**arguments)
            described, known = describe(op, arguments), self.described.setdefault(ours.name, [])
            if described not in known:
                known.append(described)
        return super().call(op, args, kwargs)


def op_name(op: OpOverload) -> str:
    """Return the name as in ``OPS``."""
    return str(op).removeprefix("npu.").removesuffix(".default")


def run_step(model: str, converters: tuple[str, ...] = (), dsa: dict[str, Any] | None = None, **layout: int) -> Step:
    """Run a step of ``model`` on one device or, with a ``layout``, as the first of :data:`RANKS` ranks.

    The keys of ``layout`` are those of :data:`torchtitan_npu.prover.draws.DEGREES`; remaining ranks are FSDP shards.
    ``dsa`` is the job's section of that name.
    """
    config = job(model, converters, layout)
    config.dsa = Dsa(**(dsa or {}))
    with fake_ranks(RANKS if layout else 1):
        return train_step(config, model_args(model, config))


@functools.cache
def matching(model: str) -> tuple[str, ...]:
    """Return the converters that have targets in ``model``."""
    config = job(model, (), {})
    whole = _build(config, model_args(model, config))
    return tuple(name for name, converter in exact_converters().items() if converter(config, ONE_RANK).targets(whole))


def job(model: str, converters: tuple[str, ...], layout: dict[str, int]) -> JobConfig:
    config = JobConfig()
    config.model.name, config.model.flavor = MODELS[model][:2]
    config.model.converters = list(converters)
    config.training.local_batch_size, config.training.seq_len = BATCH, SEQUENCE
    config.activation_checkpoint.mode = "none"
    for name, degree in layout.items():
        setattr(config.parallelism, DEGREES[name], degree)
    return config


def model_args(model: str, config: JobConfig) -> Any:
    name, flavor, changes = MODELS[model]
    args = copy.deepcopy(get_train_spec(name).model_args[flavor])
    for path, value in changes.items():
        *parents, field = path.split(".")
        owner = args
        for parent in parents:
            owner = getattr(owner, parent)
        assert hasattr(owner, field), path
        setattr(owner, field, value)
    args.update_from_config(config)
    return args


def train_step(config: JobConfig, args: Any) -> Step:
    """Run this rank's step; with a pipeline, one microbatch through the rank's stage. Check the calls of our operators.

    Activations and gradients of a stage are fake. The schedule is left out, because ranks exchange shapes as objects,
    which a fake process group cannot send.
    """
    spec = get_train_spec(config.model.name)
    dims = JobContext(config, torch.distributed.get_world_size()).dims
    dims.build_mesh()  # before fake tensors are enabled: a mesh holds a tensor of ranks
    if dims.tp_enabled:
        use_matmul_sharding(dims.get_mesh("tp"), config.npu.matmul_sharding)
    model = _build(config, args)
    targets = {name: len(CONVERTERS[name](config, dims).targets(model)) for name in config.model.converters}
    build_model_converters(config, dims).convert(model)
    masks = _without_flex(model) if config.model.name == "gpt_oss" else {}
    loss_fn = spec.build_loss_fn(config, parallel_dims=dims)
    device = torch.device("npu")
    if dims.pp_enabled:
        _, (model,), *_ = spec.pipelining_fn(model, dims, config, device, args, spec.parallelize_fn, loss_fn)
    else:
        model = spec.parallelize_fn(model, dims, config)
    if isinstance(loss_fn, ChunkedLossPerToken):
        loss_fn.use_output([model])
    outputs = _record_outputs(model)

    batch = config.training.local_batch_size
    if dims.pp_enabled:
        batch = config.parallelism.pipeline_parallel_microbatch_size
    context = titan.get_train_context(dims.tp_enabled)
    # the backward pass of a device runs in its own thread, where DTensor caches the meshes of an earlier step
    one_thread = torch.autograd.set_multithreading_enabled(False)
    with fake_device(), AssumedLoad(), one_thread:
        model.to_empty(device=device)
        # fake tensors have no values, but init_weights also ties the weights that to_empty has untied
        if ties_weights(model):
            model.output.weight = model.tok_embeddings.weight
        model.train()
        optimizers = spec.build_optimizers_fn([model], config.optimizer, dims)

        def forward_and_backward() -> None:
            for loss in auxiliary_losses([model]):
                loss.start_step()
                loss.start_batch(torch.ones((), device=device))
            tokens = torch.zeros(batch, config.training.seq_len + 1, dtype=torch.int64, device=device)
            inputs, labels = tokens[:, :-1], tokens[:, 1:]
            extra: dict[str, Any] = dict(masks)
            if getattr(args, "takes_attention_masks", False):
                extra["attention_masks"] = _documents(batch, config.training.seq_len, device)
            elif getattr(args, "attn_type", None) == "varlen":
                extra["attention_masks"] = VarlenDocuments.from_documents(
                    _documents(batch, config.training.seq_len, device)
                )
            if dims.cp_enabled:
                own = getattr(model, "context_parallel", None)
                prepare = own.prepare if own else prepare_context_parallel_input
                balancer = config.parallelism.context_parallel_load_balancer
                inputs, labels, extra = prepare(inputs, labels, extra, dims.get_mesh("cp"), device, balancer)
            outputs.clear()
            with context(), titan.maybe_enable_amp(dims, config.training.mixed_precision_param, device.type):
                if model.tok_embeddings is None:
                    length = inputs.shape[1] // dims.tp  # tensor parallel shards the sequence between the layers
                    inputs = torch.zeros(batch, length, args.dim, dtype=torch.bfloat16, device=device)
                    inputs.requires_grad_()
                output = model(inputs, **extra)
                (output.sum() if model.output is None else loss_fn(output, labels)).backward()

        if dims.tp_enabled or dims.cp_enabled:
            # DTensor runs an operator twice on its first call, to infer the output's shape
            forward_and_backward()
        with CallsAndLimits() as calls:
            forward_and_backward()
            parameters = list(model.parameters())
            pp_mesh = dims.get_optional_mesh("pp")
            titan.clip_grad_norm_(parameters, 1.0, foreach=True, pp_mesh=pp_mesh, ep_enabled=dims.ep_enabled)
            optimizers.step()
    assert calls.limit_errors == []
    assert set(calls.count("npu")) <= {name.partition(".")[0] for name in OPS} | OF_TORCH_NPU
    check_sampled(calls)
    gradients = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    return Step(targets, calls, gradients, outputs, model)


def _build(config: JobConfig, args: Any) -> Any:
    with torch.device("meta"), set_default_dtype(TORCH_DTYPE_MAP[config.training.dtype]):
        return get_train_spec(config.model.name).model_cls(args)


class SmallOpAttention(nn.Module):
    """Replaces flex attention, which needs Triton: outputs of the same shapes by small operators, unmasked."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = (q @ k.mT).float() * scale
        return scores.softmax(dim=-1).to(v.dtype) @ v, scores.logsumexp(dim=-1)


def _without_flex(model: Any) -> dict[str, Any]:
    """Replace gpt_oss's flex attention, and return the masks that its forward needs."""
    for block in model.layers.values():
        block.attention.inner_attention = SmallOpAttention()
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 128, device="cpu")
    return {"attention_masks": {"basic_mask": mask, "sliding_window_mask": mask}}


def _documents(batch: int, sequence: int, device: torch.device) -> Documents:
    """Return three documents per sequence; the model would read their ends on the host."""
    ends = [row * sequence + end for row in range(batch) for end in (sequence // 4, sequence // 3, sequence)]
    return Documents(CuSeqlens.from_integers(ends, device), CuSeqlens.from_integers(ends, device))


def _record_outputs(model: nn.Module) -> dict[str, list[Any]]:
    outputs: dict[str, list[Any]] = {}
    for name, module in model.named_modules():

        def record(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
            if isinstance(output, torch.Tensor):
                outputs.setdefault(name, []).append((tuple(output.shape), output.dtype))

        module.register_forward_hook(record)
    return outputs


def check_sampled(calls: CallsAndLimits) -> None:
    """Assert that each call is one that the doctor samples.

    ``tests/emulator/test_tools.py`` runs the doctor's samples on the emulator.
    """
    if not RECORDED:
        for op in calls.described.keys() - set(NOT_CALLED):
            sampled = [call["arguments"] for call in recorded_calls().get(op, [])]
            missing = [call for call in calls.described[op] if call not in sampled]
            assert not missing, f"{op}: call check_calls in this test and run python -m tools.recorded_calls"


def check_calls(step: str, calls: CallsAndLimits) -> None:
    """Assert that the file has exactly the calls of ``step``."""
    if RECORDED:
        (Path(RECORDED) / f"{step}.json").write_text(json.dumps(calls.described))
    else:
        assert _sorted(calls.described) == _sorted(_recorded(step)), "run python -m tools.recorded_calls"


def step_name(model: str, layout: dict[str, int] | None = None, only: str = "") -> str:
    """Return a name such as ``"llama3, cp 4, tp 2"``, or ``"llama3, only npu_rope"`` for a step with one converter."""
    degrees = (f"{name} {degree}" for name, degree in (layout or {}).items())
    return ", ".join([model, *([f"only {only}"] if only else []), *degrees])


def _recorded(step: str) -> dict[str, list[dict[str, Any]]]:
    calls = {
        op: [call["arguments"] for call in recorded if step in call["steps"]]
        for op, recorded in recorded_calls().items()
    }
    return {op: described for op, described in calls.items() if described}


def _sorted(calls: dict[str, list[dict[str, Any]]]) -> dict[str, list[str]]:
    return {op: sorted(json.dumps(call, sort_keys=True) for call in described) for op, described in calls.items()}
