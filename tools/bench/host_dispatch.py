#!/usr/bin/env python
"""Measure the host time to launch parts of DeepSeek-V3.2 and a block of Llama 3, eager and compiled.

    python tools/bench/host_dispatch.py [--device cuda] [--parts prolog block] [--modes eager bypassed] [--json FILE]

Sizes are so small that the host time dominates on a CPU and on a GPU. With ``tp``, weights are DTensors of two
tensor-parallel ranks as in training; the other rank is fake, and collectives return immediately. ``fused`` uses the
converters npu_rms_norm, npu_rope and npu_dsa, and those of experts. On a CPU their operators are launched but compute
nothing. ``bypassed`` is ``npu.bypass_codegen``, ``inductor`` generates kernels, ``lite`` is Inductor's mode without
code generation, if torch has it, and ``lite_cpp`` is the same with a C++ wrapper, which g++ compiles.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import logging
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from harness import machine, need_gpu, write, write_partial
from torch import Tensor
from torch._inductor import list_mode_options
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import make_fx

from torchtitan_npu import platform, register

platform.prepare()
register()

from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.models.llama4.infra.parallelize import apply_moe_ep_tp  # noqa: E402
from torchtitan.models.moe.moe import GroupedExperts  # noqa: E402
from torchtitan.protocols.train_spec import get_train_spec  # noqa: E402

from torchtitan_npu.compile import backend  # noqa: E402
from torchtitan_npu.compile.block_regions import OPTIONS, compile_block  # noqa: E402
from torchtitan_npu.components.auxiliary_loss import auxiliary_losses  # noqa: E402
from torchtitan_npu.config.job_config import JobConfig  # noqa: E402
from torchtitan_npu.converters import CONVERTERS  # noqa: E402
from torchtitan_npu.converters.rotary_table_hooks import PositionTables  # noqa: E402
from torchtitan_npu.models.deepseek_v32.tensor_parallel import apply_non_moe_tp  # noqa: E402
from torchtitan_npu.ops import OPS  # noqa: E402
from torchtitan_npu.ops.core.arguments import by_name  # noqa: E402
from torchtitan_npu.torch_internals.graph_interpreter import interpret  # noqa: E402
from torchtitan_npu.upstream.moe_gradients import fix_moe_gradients  # noqa: E402

SEQUENCE = 8
TINY = {"n_layers": 1, "dim": 16, "inter_dim": 16, "moe_inter_dim": 16, "n_heads": 2, "vocab_size": 64}
WITH_EXPERTS = {"n_dense_layers": 0, "dim": 64, "moe_inter_dim": 128}
"""Sizes of ``moe_block``. Grouped matmul on a GPU needs bfloat16 and multiples of 64 on each rank. Otherwise a loop
waits for the token count of each expert, and the result is not the host time."""
TINY_LLAMA = {"n_layers": 1, "dim": 16, "n_heads": 2, "n_kv_heads": 2, "vocab_size": 64}
FUSED = {"deepseek_v32": ["npu_rms_norm", "npu_rope", "npu_dsa"], "llama3": ["npu_rms_norm", "npu_rope"]}
"""The applicable converters of each model."""
OF_EXPERTS = ["npu_permute", "npu_gmm"]
"""Additional converters of ``moe_block``, the only part with experts."""


def build(part: str, device: str, mesh: Any, fused: bool) -> Any:
    """Build a model with one block that contains ``part``, converted if ``fused``.

    With a mesh, its weights are DTensors.
    """
    name = "llama3" if part == "llama3" else "deepseek_v32"
    spec = get_train_spec(name)
    sizes: dict[str, Any] = TINY_LLAMA if part == "llama3" else {**TINY, "n_dense_layers": int(part != "moe_epilog")}
    if part == "moe_block":
        sizes |= WITH_EXPERTS
    args: Any = dataclasses.replace(copy.deepcopy(spec.model_args["debugmodel"]), **sizes)
    args.moe_impl = "standard"  # as a job config sets it
    model: Any = spec.model_cls(args)
    for parameter in model.parameters():  # buffers keep their dtype, as in training
        parameter.data = parameter.data.to(dtype_of(part, device))
    for experts in model.modules():
        if isinstance(experts, GroupedExperts) and device == "cpu":
            experts.use_grouped_mm = False  # as in training: CUDA only
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
            fix_moe_gradients(model, mesh, tokens_are_split=False)
    model.to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    for loss in auxiliary_losses([model]):
        loss.start_step()
        loss.start_batch(torch.ones((), device=device))
    return model


def dtype_of(part: str, device: str) -> torch.dtype:
    """Return the dtype of weights and activations. bfloat16 is slow on a CPU."""
    return torch.bfloat16 if part == "moe_block" and device == "cuda" else torch.float32


def launches_only() -> None:
    """Let each fused operator on the CPU return uninitialized memory.

    The reference kernel runs dozens of operators, whose time would count as host time. On an NPU, and in this
    measurement, the operator is one launch.
    """
    for op in OPS.values():
        overload = op.overload("npu")

        def kernel(*args: Any, op: Any = op, overload: Any = overload, **kwargs: Any) -> Any:
            return op.fake(**by_name(overload, args, kwargs))

        _library.impl(op.name, kernel, "CPU", allow_override=True)


_library = torch.library.Library("npu", "IMPL")


def calls(part: str, options: dict[str, Any], model: Any, device: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return the forward of the part, and its forward and backward. Compile it if there are ``options``."""
    block, (freqs_cis, positions) = model.layers["0"], angles(model, device)
    split = any(isinstance(weight, DTensor) for weight in block.parameters())
    # Between blocks the sequence is sharded.
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

    gradients: list[Tensor] = []  # with the strides of the outputs, as usual in training

    def both() -> None:
        outputs = run()
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        outputs = [output for output in outputs if output.requires_grad]
        if not gradients:
            gradients.extend(map(torch.ones_like, outputs))
        torch.autograd.backward(outputs, gradients)

    return run, both


def angles(model: Any, device: str) -> tuple[Tensor, Tensor | None]:
    """Return the arguments of a block: the angles, and the positions or the tables of ``npu_rope``."""
    model.freqs_cis = model.freqs_cis.to(device)
    for hook in model._forward_pre_hooks.values():
        if isinstance(hook, PositionTables):
            args, _ = hook(model, (torch.zeros(1, SEQUENCE, dtype=torch.long, device=device),), {})
            return model.freqs_cis, args[-1]
    return model.freqs_cis, None


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def start_alone(device: str) -> Any:
    """Return a mesh of two ranks, one of them fake. Collectives return immediately."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    return init_device_mesh(device, (2,), mesh_dim_names=("tp",))


MODES: dict[str, dict[str, Any]] = {
    "eager": {},
    "bypassed": OPTIONS,
    "inductor": {"backend": "inductor", "fullgraph": True},
    "lite": {"mode": "lite", "fullgraph": True},
}
"""Options of :func:`torch.compile` for each mode."""
if "lite" in list_mode_options():
    MODES["lite_cpp"] = {"options": {**list_mode_options("lite"), "cpp_wrapper": True}, "fullgraph": True}
PARTS = ("prolog", "epilog", "moe_epilog", "feed_forward", "block", "moe_block", "llama3", "linear")
VIEWS = ("aten::t", "aten::view", "aten::_unsafe_view", "aten::transpose")
PROFILED = ("eager", "bypassed")
WARM_UP, ROUNDS, CALLS = 3, 9, 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if platform.backend() == "cuda" else "cpu")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--modes", "--ways", nargs="+", choices=list(MODES), default=["eager", "bypassed", "inductor"])
    parser.add_argument("--weights", nargs="+", choices=["tp", "local"], default=["tp", "local"])
    parser.add_argument("--operators", nargs="+", choices=["fused", "small"], default=["fused", "small"])
    parser.add_argument("--json", type=Path, help="write the results")
    options = parser.parse_args()
    if "linear" in options.parts and not set(PROFILED) & set(options.modes):
        parser.error(f"--parts linear needs {' or '.join(PROFILED)} in --modes")
    device = options.device
    if device == "cuda":
        need_gpu()
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    if device == "cpu" and "fused" in options.operators:
        launches_only()
    print(
        f"{machine(device)}, torch {torch.__version__}; host time per call in µs, median of {ROUNDS} rounds; "
        "speed-up over eager in brackets"
    )
    mesh = start_alone(device)
    costs = launch_costs(device)
    print(", ".join(f"{what} {us:.1f}" for what, us in costs.items()))
    rows: list[dict[str, Any]] = []
    for weights in options.weights:
        for operators in options.operators:
            for part in options.parts:
                if part == "llama3" and weights == "tp":  # llama3 shows a block that is one region
                    continue
                times = measured(part, options.modes, device, mesh if weights == "tp" else None, operators == "fused")
                rows += shown({"weights": weights, "operators": operators, "part": part}, times)
                if options.json:
                    write_partial(options.json, rows, device, launch_costs=costs)
    if options.json:
        write(options.json, rows, device, launch_costs=costs)
    dist.destroy_process_group()


def shown(of: dict[str, str], times: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """Print and return a row for each pass, with the µs of each mode."""
    rows = []
    for what in next(iter(times.values())):
        us = {mode: times_of_mode[what] for mode, times_of_mode in times.items()}
        eager = us.get("eager")
        cells = [f"{mode} {t:7.0f}" + (f" ({eager / t:.2f})" if eager else "") for mode, t in us.items()]
        print(f"{of['weights']:6}{of['operators']:6}{of['part']:13}{what:21}" + "  ".join(cells), flush=True)
        rows.append({**of, "what": what, "us": us})
    return rows


def measured(part: str, modes: list[str], device: str, mesh: Any, fused: bool) -> dict[str, dict[str, float]]:
    """Return the host time in µs of each mode, for forward and for both passes.

    The modes take turns in each round, so that other load on the machine affects all of them.
    """
    torch._dynamo.reset()
    if part == "linear":
        return {
            mode: {"forward": linear_time(mode, build(part, device, mesh, fused), device)}
            for mode in modes
            if mode in PROFILED
        }
    runs = {}
    for mode in modes:
        forward, both = calls(part, MODES[mode], build(part, device, mesh, fused), device)
        both()
        runs[mode] = {"forward": forward, "forward and backward": both}
    times: dict[str, dict[str, float]] = {mode: {} for mode in modes}
    for what in ("forward", "forward and backward"):
        rounds = [{mode: host_time(runs[mode][what], device) for mode in modes} for _ in range(ROUNDS)]
        for mode in modes:
            times[mode][what] = statistics.median(times_of_round[mode] for times_of_round in rounds)
    return times


def linear_time(mode: str, model: Any, device: str) -> float:
    """Return the host time in µs of the layer ``wq_b`` in the prolog, from a profile.

    In eager mode this is the span of ``aten::linear``, in a compiled region the matmul and the views around it. The
    profiler adds overhead to each operator in both modes.
    """
    layer = model.layers["0"].attention.wq_b
    run, _ = calls("prolog", MODES[mode], model, device)
    for _ in range(WARM_UP):
        run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        for _ in range(CALLS):
            run()
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    if mode == "eager":
        spans = [
            event.time_range.elapsed_us()
            for event in events
            if event.name == "aten::linear" and list(layer.weight.shape) in event.input_shapes
        ]
    else:
        # There, DTensor weights are local shards.
        product = [SEQUENCE, layer.in_features], list(local(layer.weight).t().shape)
        top = [event for event in events if event.cpu_parent is not None and event.cpu_parent.name == "launch"]
        spans = []
        for place, event in enumerate(top):
            if event.name != "aten::mm" or tuple(event.input_shapes[:2]) != product:
                continue
            first = last = place
            while top[first - 1].name in VIEWS:
                first -= 1
            while last + 1 < len(top) and top[last + 1].name in VIEWS:
                last += 1
            spans.append(top[last].time_range.end - top[first].time_range.start)
    assert len(spans) == CALLS, f"{mode}: {len(spans)} linear layers in {CALLS} calls"
    return statistics.median(spans)


def launch_costs(device: str) -> dict[str, float]:
    """Return the µs of single launches: from Python, in the interpreter, and in a region with one operator."""
    x, y = (torch.ones(8, 8, device=device) for _ in range(2))
    aten = torch.ops.aten

    def fifty(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
        for _ in range(10):
            x = aten.view(aten.view(aten.add(aten.mm(x, aten.t(y)), y), [64]), [8, 8])
        return (x,)

    launch = interpret(make_fx(fifty, tracing_mode="fake")(x, y))
    torch._dynamo.reset()
    region = torch.compile(lambda x: x + 1, **OPTIONS)
    w = torch.ones(8, 8, device=device, requires_grad=True)
    with patch.object(backend, "region_function", lambda *args: None):
        general = torch.compile(lambda x: x + 1, **OPTIONS)
        general(w)
    runs: dict[str, Callable[[], Any]] = {
        "mm": lambda: torch.mm(x, y),
        "add": lambda: torch.add(x, y),
        "view": lambda: x.view(64),
        "fifty from Python": lambda: fifty(x, y),
        "fifty in the interpreter": lambda: launch([x, y]),
        "an operator with a gradient": lambda: w + 1,
        "a region of it": lambda: region(w),
        "its backward pass": lambda: (w + 1).sum().backward(),
        "that of the region": lambda: region(w).sum().backward(),
        "the region in AOTAutograd's runtime": lambda: general(w),
        "its backward pass there": lambda: general(w).sum().backward(),
    }
    rounds = [{what: host_time(run, device) for what, run in runs.items()} for _ in range(ROUNDS)]
    return {what: statistics.median(times[what] for times in rounds) for what in runs}


def host_time(call: Callable[[], Any], device: str) -> float:
    """Return the host time in µs per call, over one round.

    On a CPU it is process time, which excludes other processes. On a GPU it is the time until the call returns, with
    an idle device at the start of the round.
    """
    clock = time.perf_counter if device == "cuda" else time.process_time
    for _ in range(WARM_UP):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    start = clock()
    for _ in range(CALLS):
        call()
    return (clock() - start) / CALLS * 1e6


if __name__ == "__main__":
    main()
