"""How long the host takes to launch parts of DeepSeek-V3.2, and a block of Llama 3: eager, and compiled in three ways.

    python tools/bench/host_dispatch.py [--device cuda] [--json FILE] [--parts prolog block] [--ways eager bypassed]

Sizes are so small that the host decides how long a call takes, on a CPU and on a GPU. With ``tp``, weights are DTensors
of two tensor-parallel ranks as in training; the other rank is not there, and collectives return at once. ``bypassed``
is ``npu.bypass_codegen``; ``inductor`` generates kernels; ``lite`` is Inductor's own way not to, where torch has it.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import os
import platform as python_platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import torchtitan_npu
from torchtitan_npu import platform

platform.prepare()
torchtitan_npu.register()

import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from torchtitan.protocols.train_spec import get_train_spec  # noqa: E402

from torchtitan_npu.auxiliary_loss import auxiliary_losses  # noqa: E402
from torchtitan_npu.compile.regions import OPTIONS, compile_block  # noqa: E402
from torchtitan_npu.models.deepseek_v32.tensor_parallel import apply_non_moe_tp  # noqa: E402

WAYS: dict[str, dict[str, Any]] = {
    "eager": {},
    "bypassed": OPTIONS,
    "inductor": {"backend": "inductor", "fullgraph": True},
    "lite": {"mode": "lite", "fullgraph": True},
}
"""The options of :func:`torch.compile`."""
PARTS = ("linear", "feed_forward", "epilog", "prolog", "block", "llama3")
SEQUENCE = 8
TINY = {"n_layers": 1, "n_dense_layers": 1, "dim": 16, "inter_dim": 16, "n_heads": 2, "vocab_size": 64}
TINY_LLAMA = {"n_layers": 1, "dim": 16, "n_heads": 2, "n_kv_heads": 2, "vocab_size": 64}
VIEWS = ("aten::t", "aten::view", "aten::_unsafe_view", "aten::transpose")
PROFILED = ("eager", "bypassed")
WARM_UP, ROUNDS, CALLS = 3, 9, 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if platform.home() == "cuda" else "cpu")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=["eager", "bypassed", "inductor"])
    parser.add_argument("--weights", nargs="+", choices=["local", "tp"], default=["local", "tp"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = options.device
    name = torch.cuda.get_device_name() if device == "cuda" else f"{os.cpu_count()}-core {python_platform.machine()}"
    print(f"{name}, torch {torch.__version__}; µs of the host a call, median of {ROUNDS} rounds; × eager in brackets")
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    mesh = init_device_mesh(device, (2,), mesh_dim_names=("tp",))
    rows = []
    for weights in options.weights:
        for part in options.parts:
            if part == "llama3" and weights == "tp":  # the one without is there for blocks that have no parts
                continue
            times = measured(part, options.ways, device, mesh if weights == "tp" else None)
            for what in next(iter(times.values())):
                if what == "first call":
                    continue
                eager = times.get("eager", {}).get(what)
                cells = [
                    f"{way} {t[what]:7.0f}" + (f" ({eager / t[what]:.2f})" if eager else "") for way, t in times.items()
                ]
                print(f"{weights:6}{part:13}{what:21}" + "  ".join(cells), flush=True)
            rows.append({"machine": name, "torch": torch.__version__, "weights": weights, "part": part, "us": times})
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    dist.destroy_process_group()


def measured(part: str, ways: list[str], device: str, mesh: Any) -> dict[str, dict[str, float]]:
    """By way, µs of the host for a forward call and for both passes, and seconds of the first call.

    The ways take turns, round by round: what else the machine does then falls on all of them.
    """
    torch._dynamo.reset()
    if part == "linear":
        return {way: {"forward": linear_time(way, build(device, mesh), device)} for way in ways if way in PROFILED}
    runs = {}
    times: dict[str, dict[str, float]] = {}
    for way in ways:
        start = time.perf_counter()
        forward, both = calls(part, way, build_llama(device) if part == "llama3" else build(device, mesh), device)
        both()
        times[way] = {"first call": time.perf_counter() - start}
        runs[way] = {"forward": forward, "forward and backward": both}
    for what in ("forward", "forward and backward"):
        rounds = [{way: host_time(runs[way][what], device) for way in ways} for _ in range(ROUNDS)]
        for way in ways:
            times[way][what] = statistics.median(times_of_round[way] for times_of_round in rounds)
    return times


def build(device: str, mesh: Any) -> Any:
    """The model with one dense block, and with DTensor weights where there is a mesh."""
    spec = get_train_spec("deepseek_v32")
    args = dataclasses.replace(copy.deepcopy(spec.model_args["debugmodel"]), **TINY)
    model: Any = spec.model_cls(args)
    if mesh is not None:
        apply_non_moe_tp(model, mesh, loss_parallel=False, enable_float8_tensorwise_tp=False, cp_enabled=False)
    model.to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    for loss in auxiliary_losses([model]):
        loss.start_step()
        loss.start_batch(torch.ones((), device=device))
    return model


def build_llama(device: str) -> Any:
    spec = get_train_spec("llama3")
    model: Any = spec.model_cls(dataclasses.replace(copy.deepcopy(spec.model_args["debugmodel"]), **TINY_LLAMA))
    model.to(device)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device(device))
    return model


def calls(part: str, way: str, model: Any, device: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The part's forward, and its forward and backward, compiled in the given way as training does it."""
    block = model.layers["0"]
    attention, angles = block.attention, model.freqs_cis.to(device)
    rows = (
        SEQUENCE // 2 if part != "llama3" and dist_weights(block) else SEQUENCE
    )  # the sequence is split between a rank's blocks
    x = torch.randn(1, rows, TINY["dim"], device=device, requires_grad=True)
    whole = torch.randn(1, SEQUENCE, TINY["dim"], device=device, requires_grad=True)

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        return function if way == "eager" else torch.compile(function, **WAYS[way])

    run: Callable[[], Any]
    if part in ("block", "llama3"):
        if way != "eager":
            compile_block(block, WAYS[way])

        def run() -> Any:
            return block(x, angles, None)
    elif part == "prolog":
        prolog, inputs = compiled(attention.prolog), as_attention_gets_it(attention, whole, angles)

        def run() -> Any:
            return prolog(*inputs)
    elif part == "epilog":
        epilog = compiled(attention.epilog)
        output = (
            attention.inner_attention(
                *attention.prolog(*as_attention_gets_it(attention, whole, angles)), documents=None, scale=1.0
            )
            .detach()
            .requires_grad_()
        )

        def run() -> Any:
            return epilog(output)
    else:
        module = compiled(block.feed_forward)

        def run() -> Any:
            return module(x)

    def both() -> None:
        outputs = run()
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        total = sum(local(output).float().sum() for output in outputs if output.requires_grad)
        total.backward()  # type: ignore[union-attr]

    return run, both


def linear_time(way: str, model: Any, device: str) -> float:
    """µs of the host for the layer ``wq_b`` in the prolog, read from a profile.

    In eager it is what ``aten::linear`` spans; in a compiled region the product and the views around it. A profile
    takes time of its own, for each operator: for both ways.
    """
    layer = model.layers["0"].attention.wq_b
    run, _ = calls("prolog", way, model, device)
    for _ in range(WARM_UP):
        run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        for _ in range(CALLS):
            run()
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    if way == "eager":
        spans = [
            event.time_range.elapsed_us()
            for event in events
            if event.name == "aten::linear" and list(layer.weight.shape) in event.input_shapes
        ]
    else:
        # DTensor weights are this rank's part there
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
    assert len(spans) == CALLS, f"{way}: {len(spans)} linear layers in {CALLS} calls"
    return statistics.median(spans)


def as_attention_gets_it(attention: Any, x: torch.Tensor, angles: torch.Tensor) -> tuple[Any, ...]:
    """The prolog's arguments: whole sequences, as DTensors where the weights are."""
    weight = attention.wq_a.weight
    if not isinstance(weight, torch.distributed.tensor.DTensor):
        return x, angles, None
    from torch.distributed.tensor import DTensor, Replicate

    there = [DTensor.from_local(t, weight.device_mesh, [Replicate()], run_check=False) for t in (x, angles)]
    return *there, None


def dist_weights(block: Any) -> bool:
    return isinstance(block.attention.wq_a.weight, torch.distributed.tensor.DTensor)


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor


def host_time(call: Callable[[], Any], device: str) -> float:
    """µs of the host that a call takes, over one round.

    On a CPU it is the process's own time, which other processes do not add to. On a GPU it is the time until the call
    returns, with the device idle at the start of the round.
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
