"""The parts of DeepSeek-V3.2, and a block of Llama 3, whose host time is measured: small, so that it is the host's."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama4.infra.parallelize import apply_moe_ep_tp
from torchtitan.models.moe.moe import GroupedExperts
from torchtitan.protocols.train_spec import get_train_spec

from torchtitan_npu.compile.regions import compile_block
from torchtitan_npu.components.auxiliary_loss import auxiliary_losses
from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.converters import CONVERTERS
from torchtitan_npu.converters.rotary_tables import ForwardTables
from torchtitan_npu.models.deepseek_v32.tensor_parallel import apply_non_moe_tp
from torchtitan_npu.ops import OPS
from torchtitan_npu.ops.core.arguments import by_name
from torchtitan_npu.upstream.moe_gradients import mend_moe_gradients

SEQUENCE = 8
TINY = {"n_layers": 1, "dim": 16, "inter_dim": 16, "moe_inter_dim": 16, "n_heads": 2, "vocab_size": 64}
WITH_EXPERTS = {"n_dense_layers": 0, "dim": 64, "moe_inter_dim": 128}
"""Of ``moe_block``. A GPU's grouped products take multiples of 64, also of a rank's half, and bfloat16: others are a
loop in which the host waits for how many tokens each expert has, and it is not the host's time that is measured."""
TINY_LLAMA = {"n_layers": 1, "dim": 16, "n_heads": 2, "n_kv_heads": 2, "vocab_size": 64}
FUSED = {"deepseek_v32": ["npu_rms_norm", "npu_rope", "npu_dsa"], "llama3": ["npu_rms_norm", "npu_rope"]}
"""By model, the converters that have something to replace in what is measured."""
OF_EXPERTS = ["npu_permute", "npu_gmm"]
"""And those of ``moe_block``, the one part that has experts."""


def build(part: str, device: str, mesh: Any, fused: bool) -> Any:
    """The model that has ``part``, with one block: as the converters leave it, or in small operators.

    Its weights are DTensors where there is a mesh.
    """
    name = "llama3" if part == "llama3" else "deepseek_v32"
    spec = get_train_spec(name)
    sizes: dict[str, Any] = TINY_LLAMA if part == "llama3" else {**TINY, "n_dense_layers": int(part != "moe_epilog")}
    if part == "moe_block":
        sizes |= WITH_EXPERTS
    args: Any = dataclasses.replace(copy.deepcopy(spec.model_args["debugmodel"]), **sizes)
    args.moe_impl = "standard"  # as a job's config would set it
    model: Any = spec.model_cls(args)
    for parameter in model.parameters():  # buffers stay what they are, as in training
        parameter.data = parameter.data.to(dtype_of(part, device))
    for experts in model.modules():
        if isinstance(experts, GroupedExperts) and device == "cpu":
            experts.use_grouped_mm = False  # as in training: it is CUDA's
    if fused:
        converters = [*FUSED[name], *(OF_EXPERTS if part == "moe_block" else ())]
        config = JobConfig()
        config.model.name, config.model.converters = name, converters
        dims = ParallelDims(1, 1, 1, mesh.size() if mesh else 1, 1, 1, 1, mesh.size() if mesh else 1)
        for converter in converters:
            CONVERTERS[converter](config, dims).convert(model)
    if mesh is not None:
        apply_non_moe_tp(model, mesh, loss_parallel=False, enable_float8_tensorwise_tp=False, cp_enabled=False)
        if part == "moe_block":
            apply_moe_ep_tp(model, tp_mesh=mesh, ep_mesh=None, etp_mesh=None, ep_etp_mesh=None)
            mend_moe_gradients(model, mesh, tokens_are_split=False)
    model.to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    for loss in auxiliary_losses([model]):
        loss.start_step()
        loss.start_batch(torch.ones((), device=device))
    return model


def dtype_of(part: str, device: str) -> torch.dtype:
    """Of weights and activations: a CPU has no use for bfloat16 and takes long over it."""
    return torch.bfloat16 if part == "moe_block" and device == "cuda" else torch.float32


def launches_only() -> None:
    """Let each fused operator return memory as it is found, on the CPU.

    Its kernel there is a reference of dozens of small operators, whose time would be taken for the host's. What it is
    on an NPU, and what is measured here, is one launch.
    """
    for op in OPS.values():
        overload = op.overload("npu")

        def kernel(*args: Any, op: Any = op, overload: Any = overload, **kwargs: Any) -> Any:
            return op.fake(**by_name(overload, args, kwargs))

        _library.impl(op.name, kernel, "CPU", allow_override=True)


_library = torch.library.Library("npu", "IMPL")


def calls(part: str, options: dict[str, Any], model: Any, device: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The part's forward, and its forward and backward; compiled, where there are ``options`` to do it with."""
    block, (freqs_cis, positions) = model.layers["0"], angles(model, device)
    split = any(isinstance(weight, DTensor) for weight in block.parameters())
    # the sequence is split between a rank's blocks
    x = torch.randn(
        (1, SEQUENCE // 2 if split else SEQUENCE, model.model_args.dim),
        dtype=dtype_of(part, device),
        device=device,
        requires_grad=True,
    )

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, **options) if options else function

    run: Callable[[], Any]
    if part in ("block", "moe_block", "llama3"):
        if options:
            compile_block(block, options)

        def run() -> Any:
            return block(x, freqs_cis, None, positions)
    elif part == "prolog":
        prolog = compiled(block.prolog)

        def run() -> Any:
            return prolog(x, freqs_cis, positions)
    elif part in ("epilog", "moe_epilog"):
        epilog = compiled(block.epilog)
        output = block.attention.attend(block.prolog(x, freqs_cis, positions), None).detach().requires_grad_()

        def run() -> Any:
            return epilog(x, output)
    else:
        module = compiled(block.feed_forward)

        def run() -> Any:
            return module(x)

    gradients: list[Tensor] = []  # they lie as what they are of, as most do in training

    def both() -> None:
        outputs = run()
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        outputs = [output for output in outputs if output.requires_grad]
        if not gradients:
            gradients.extend(map(torch.ones_like, outputs))
        torch.autograd.backward(outputs, gradients)

    return run, both


def angles(model: Any, device: str) -> tuple[Tensor, Tensor | None]:
    """What a block gets of the model: its angles, and positions, which ``npu_rope`` has tables in the place of."""
    model.freqs_cis = model.freqs_cis.to(device)
    for hook in model._forward_pre_hooks.values():
        if isinstance(hook, ForwardTables):
            args, _ = hook(model, (torch.zeros(1, SEQUENCE, dtype=torch.long, device=device),), {})
            return model.freqs_cis, args[-1]
    return model.freqs_cis, None


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def start_alone(device: str) -> Any:
    """A mesh of two ranks of which one is here; collectives return at once."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    return init_device_mesh(device, (2,), mesh_dim_names=("tp",))
