"""How long the host takes to launch parts of DeepSeek-V3.2: eager, code generation bypassed, compiled by Inductor.

    python tools/bench/host_dispatch.py [--json FILE] [--parts prolog block] [--ways eager bypassed inductor]

Sizes are so small that the host decides how long a call takes, on a CPU and on a GPU. With ``tp``, weights are DTensors
of two tensor-parallel ranks as in training; the other rank is not there, and collectives return at once.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
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
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from torchtitan.protocols.train_spec import get_train_spec  # noqa: E402

from torchtitan_npu.auxiliary_loss import auxiliary_losses  # noqa: E402
from torchtitan_npu.compile.launcher import launcher  # noqa: E402
from torchtitan_npu.compile.regions import OPTIONS, compile_block  # noqa: E402
from torchtitan_npu.models.deepseek_v32.tensor_parallel import apply_non_moe_tp  # noqa: E402

BACKENDS: dict[str, Any] = {"bypassed": OPTIONS["backend"], "inductor": "inductor"}
PARTS = ("norm", "feed_forward", "epilog", "prolog", "block")
SEQUENCE = 8
TINY = {"n_layers": 1, "n_dense_layers": 1, "dim": 16, "inter_dim": 16, "n_heads": 2, "vocab_size": 64}
WARM_UP, ROUNDS, CALLS = 5, 9, 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--ways", nargs="+", choices=["eager", *BACKENDS], default=["eager", *BACKENDS])
    parser.add_argument("--weights", nargs="+", choices=["local", "tp"], default=["local", "tp"])
    parser.add_argument("--linear", action="store_true", help="also one linear layer, as a line of a compiled region")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = "cuda" if platform.home() == "cuda" else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else python_platform.machine()
    print(f"{name}, torch {torch.__version__}; µs of the host a call, median of {ROUNDS} rounds; × eager in brackets")
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    mesh = init_device_mesh(device, (2,), mesh_dim_names=("tp",))

    rows = []
    if options.linear:
        model = build(device, mesh)
        eager, bypassed = linear_times(model.layers["0"].attention, device)
        print(
            f"a linear layer with tp: eager {eager:.1f}, in a compiled region {bypassed:.1f} ({eager / bypassed:.2f})"
        )
        rows.append({"machine": name, "torch": torch.__version__, "part": "linear", "us": [eager, bypassed]})
    for weights in options.weights:
        for part in options.parts:
            times = {}
            for way in options.ways:
                torch._dynamo.reset()
                start = time.perf_counter()
                forward, both = calls(part, way, build(device, mesh if weights == "tp" else None), device)
                both()
                first = time.perf_counter() - start
                times[way] = {"forward": host_time(forward), "forward and backward": host_time(both), "first": first}
            for what in ("forward", "forward and backward"):
                eager = times.get("eager", {}).get(what)
                cells = [
                    f"{way} {t[what]:7.0f}" + (f" ({eager / t[what]:.2f})" if eager else "") for way, t in times.items()
                ]
                print(f"{weights:6}{part:13}{what:21}" + "  ".join(cells), flush=True)
            rows.append({"machine": name, "torch": torch.__version__, "weights": weights, "part": part, "us": times})
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    dist.destroy_process_group()


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


def calls(part: str, way: str, model: Any, device: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The part's forward, and its forward and backward, compiled in the given way as training does it."""
    block = model.layers["0"]
    attention, angles = block.attention, model.freqs_cis.to(device)
    rows = SEQUENCE // 2 if dist_weights(block) else SEQUENCE  # the sequence is split between a rank's blocks
    x = torch.randn(1, rows, TINY["dim"], device=device, requires_grad=True)
    whole = torch.randn(1, SEQUENCE, TINY["dim"], device=device, requires_grad=True)

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        return function if way == "eager" else torch.compile(function, backend=BACKENDS[way], fullgraph=True)

    run: Callable[[], Any]
    if part == "block":
        if way != "eager":
            compile_block(block, {"backend": BACKENDS[way], "fullgraph": True})

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
        module = compiled(block.attention_norm if part == "norm" else block.feed_forward)

        def run() -> Any:
            return module(x)

    def both() -> None:
        outputs = run()
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        total = sum(local(output).float().sum() for output in outputs if output.requires_grad)
        total.backward()  # type: ignore[union-attr]

    return run, both


def linear_times(attention: Any, device: str) -> tuple[float, float]:
    """µs of a linear layer with DTensor weights: called in training, and as what it is in a compiled region."""
    layer = attention.wq_b
    latent = torch.randn(1, SEQUENCE, layer.weight.shape[1], device=device, requires_grad=True)
    eager = host_time(lambda: layer(latent))
    weight = layer.weight.to_local().detach()
    graph = make_fx(torch.nn.functional.linear, tracing_mode="fake")(latent.detach(), weight)
    launch = launcher(graph)
    with torch.no_grad():
        return eager, host_time(lambda: launch([latent, weight]))


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


def host_time(call: Callable[[], Any]) -> float:
    """µs of the host a call takes, median over the rounds.

    On a CPU it is the process's own time, which other processes do not add to. On a GPU it is the time until the call
    returns, with the device idle at the start of a round.
    """
    on_device = platform.home() == "cuda"
    clock = time.perf_counter if on_device else time.process_time
    for _ in range(WARM_UP):
        call()
    rounds = []
    for _ in range(ROUNDS):
        if on_device:
            torch.cuda.synchronize()
        start = clock()
        for _ in range(CALLS):
            call()
        rounds.append((clock() - start) / CALLS * 1e6)
    return statistics.median(rounds)


if __name__ == "__main__":
    main()
