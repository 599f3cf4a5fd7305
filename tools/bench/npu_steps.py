#!/usr/bin/env python
"""Count the launches of a training step on the real torch_npu, and measure its host time, on the emulator.

    python tools/bench/npu_steps.py launches [--models llama3 qwen3] [--json FILE]
    python tools/bench/npu_steps.py host_time [--models llama3 qwen3] [--json FILE]

needs the environment of the emulator's tests (``. tools/contract_env.sh``). Models are tiny, in bfloat16, with one
batch per step and without activation checkpointing. Variants are eager, all converters of the model, and compiled.

``launches`` trains with two numbers of layers; the difference is the launches of a layer. ``host_time`` runs with
``--null-kernels``: kernels compute nothing, and what remains is the time of Python, PyTorch and torch_npu. It measures
a step, and forward and backward of the last block alone. Variants take turns in one process. Under tensor parallel the
other rank is fake, and collectives return immediately.
"""

from __future__ import annotations

import bisect
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from harness import CONVERTERS, ROOT, Row, installed, parser_of, printed, rank_environment, store

VARIANTS = ("eager", "converters", "compiled")
NOT_COMPILED = {"qwen3_vl": ["npu_attention"]}
"""Converters that ``compile.enable`` refuses: attention of packed documents has sizes that depend on the data."""
LAYERS = {model: (4, 6) if model == "qwen3_vl" else (2, 4) for model in CONVERTERS}
"""The first layer of a DeepSeek model is dense, and the first three of qwen3_vl add visual features."""
PHASES = ("forward", "backward", "optimizer")
WARM_UP = 2
"""Steps before the measured ones: the first initializes the optimizer, and both may compile."""
ROUNDS = {"step": 9, "block": 27}
"""Rounds in which the host time of each variant is measured."""
TENSOR_PARALLEL = ("llama3", "qwen3_moe", "deepseek_v32")
"""Models whose host time is also measured on two tensor-parallel ranks."""
BATCH = {"training.local_batch_size": 1, "training.global_batch_size": 1, "metrics.log_freq": 1000}
BFLOAT16 = {"training.dtype": "bfloat16", "training.mixed_precision_param": "bfloat16"}


def options(model: str, variant: str) -> dict[str, Any]:
    """Return the ``section.key`` settings of a variant."""
    found: dict[str, Any] = {**BATCH, **BFLOAT16}
    if variant != "eager":
        refused = NOT_COMPILED.get(model, []) if variant == "compiled" else []
        found["model.converters"] = [name for name in CONVERTERS[model] if name not in refused]
    if variant == "compiled":
        found |= {"compile.enable": True, "npu.bypass_codegen": "inductor"}
    return found


class Step:
    """Runs the training steps of one Trainer on one batch."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        # TorchTitan uses autocast on one device only. Larger jobs have no casts of weights in the layers.
        trainer.maybe_enable_amp = nullcontext()
        self.batch = next(trainer.batch_generator(trainer.dataloader))

    def __call__(self) -> None:
        inputs, labels = self.batch
        self.trainer.step += 1
        self.trainer.metrics_processor.data_loading_times.append(0.0)  # it would divide by their number
        self.trainer.train_step(iter([(dict(inputs), labels)]))


@contextmanager
def training(model: str, variant: str, layers: int, tensor_parallel: int = 1) -> Iterator[Step]:
    """Yield the steps of a model, after the warm-up."""
    from tests._helpers import layouts
    from tests._helpers.training import recording
    from tests.emulator import training_jobs

    layout = {"tp": tensor_parallel} if tensor_parallel > 1 else {}
    sizes: dict[str, Any] = {"n_layers": layers}
    if model == "deepseek_v32":
        sizes["n_heads"] = 32 * tensor_parallel  # the indexer loss needs 32 heads per rank
        job = training_jobs.Job("deepseek_v32_dsa", layout=layout, options=options(model, variant), sizes=sizes)
    else:
        job = training_jobs.Job(model, layout=layout, options=options(model, variant))
    name, base, tiny = layouts.TINY.get(model, ("", "", {}))
    with (
        patch.dict(training_jobs.VISION, sizes),
        patch.dict(layouts.TINY, {model: (name, base, {**tiny, **sizes})} if tiny else {}),
        recording(training_jobs.job_config(job)) as (trainer, _),
    ):
        step = Step(trainer)
        for _ in range(WARM_UP):
            step()
        yield step


class Block:
    """Runs forward and backward of a trainer's last block, on the inputs of a step."""

    def __init__(self, step: Step) -> None:
        self.block = list(step.trainer.model_parts[0].layers.values())[-1]
        found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        hook = self.block.register_forward_pre_hook(lambda *args: found.append(args[1:]), with_kwargs=True)
        step()
        hook.remove()
        args, kwargs = found[0]
        self.args, self.kwargs = tuple(map(self.leaf, args)), {key: self.leaf(value) for key, value in kwargs.items()}
        self.gradient = self.forward().detach()
        self.parameters = list(self.block.parameters())

    @staticmethod
    def leaf(value: Any) -> Any:
        """Return an input without the graph of the step that computed it."""
        return value.detach().requires_grad_(value.requires_grad) if hasattr(value, "detach") else value

    def forward(self) -> Any:
        """Return the block's output, or the first of several."""
        output = self.block(*self.args, **self.kwargs)
        return output[0] if isinstance(output, tuple) else output

    def __call__(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        self.forward().backward(self.gradient)


def step_times(step: Step) -> list[float]:
    """Run a step, and return when it began and when forward, backward and optimizer ended, in µs as in the call log."""
    trainer = step.trainer
    times = []

    def mark() -> None:
        times.append(1e6 * time.clock_gettime(time.CLOCK_MONOTONIC))

    def loss_fn(*arguments: Any) -> Any:
        loss = compute_loss(*arguments)
        mark()
        return loss

    def forward_backward_step(**arguments: Any) -> Any:
        loss = forward_backward(**arguments)
        mark()
        return loss

    compute_loss, forward_backward = trainer.loss_fn, trainer.forward_backward_step
    with (
        patch.object(trainer, "loss_fn", loss_fn),
        patch.object(trainer, "forward_backward_step", forward_backward_step),
    ):
        mark()
        step()
        mark()
    return times


def run_launches(model: str, variants: list[str], layers: list[int]) -> list[dict[str, Any]]:
    """Return the times of one step for each variant and number of layers, in a process that logs its launches."""
    import torch

    found = []
    for variant in variants:
        for number in layers:
            torch.compiler.reset()
            with training(model, variant, number) as step:
                found.append({"variant": variant, "layers": number, "times": step_times(step)})
    return found


def count_launches(calls: Iterable[dict[str, Any]], times: list[float]) -> dict[str, Counter[str]]:
    """Count the launches of each operator between consecutive ``times``, which begin the three phases and end them."""
    counts: dict[str, Counter[str]] = {phase: Counter() for phase in PHASES}
    for call in calls:
        phase = bisect.bisect(times, call["launched"]) - 1
        if 0 <= phase < len(PHASES):
            counts[PHASES[phase]][call["operator"]] += 1
    return counts


def logged_steps(
    model: str, variants: Sequence[str], layers: Sequence[int]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the results of :func:`run_launches` in a process on the emulator, and the log of its launches."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "calls.json")
        steps = emulate("launches", model, variants, layers, emulator=["--log", str(log)])
        return steps, json.loads(log.read_text())


def measure_launches(model: str) -> Iterator[Row]:
    """Yield one row per variant: launches of a step with few layers and launches of one more layer, by phase."""
    few, more = LAYERS[model]
    steps, calls = logged_steps(model, VARIANTS, (few, more))
    counts = {(step["variant"], step["layers"]): count_launches(calls, step["times"]) for step in steps}
    for variant in VARIANTS:
        small, large = (counts[variant, layers] for layers in (few, more))
        per_layer = [(large[phase].total() - small[phase].total()) / (more - few) for phase in PHASES]
        operators = sum(large.values(), Counter())
        operators.subtract(sum(small.values(), Counter()))
        yield {
            "model": model,
            "variant": variant,
            "layers": few,
            "step": [small[phase].total() for phase in PHASES],
            "layer": per_layer,
            "operators": {name: number / (more - few) for name, number in sorted(operators.items()) if number},
        }


class Job(NamedTuple):
    model: str
    tensor_parallel: int


def run_host_time(job: Job) -> dict[str, dict[str, list[float]]]:
    """Return the CPU times in ms of steps and of a block, by variant, in a process with null kernels."""
    import torch
    import torch.distributed as dist

    if job.tensor_parallel > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("cpu:fake,npu:fake", rank=0, world_size=job.tensor_parallel, store=FakeStore())
    # One thread runs forward and backward, so that its CPU time is that of the host.
    with ExitStack() as stack, torch.autograd.set_multithreading_enabled(False):
        layers, _ = LAYERS[job.model]
        steps = {
            variant: stack.enter_context(training(job.model, variant, layers, job.tensor_parallel))
            for variant in VARIANTS
        }
        times = {"step": take_turns(steps, ROUNDS["step"])}
        blocks = {variant: Block(step) for variant, step in steps.items()}
        take_turns(blocks, WARM_UP)  # its inputs are leaves, for which regions may be compiled again
        times["block"] = take_turns(blocks, ROUNDS["block"])
    return times


def take_turns(programs: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    """Run each program in each round, and return their CPU times in ms."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    gc.disable()
    for _ in range(rounds):
        gc.collect()
        for name, run in programs.items():
            begin = time.thread_time()
            run()
            times[name].append(1e3 * (time.thread_time() - begin))
    gc.enable()
    return times


def measure_host_time(job: Job) -> Row:
    """Return a row: median host times of each variant, and the median ratios to the eager run in the same round."""
    ranks = {"WORLD_SIZE": str(job.tensor_parallel)}
    times = emulate("host_time", *job, emulator=["--null-kernels"], environment=ranks)
    row: dict[str, Any] = {**job._asdict(), "layers": LAYERS[job.model][0]}
    for what, of_variants in times.items():
        row[what] = {"ms": {}, "of_eager": {}}
        for variant, ms in of_variants.items():
            row[what]["ms"][variant] = statistics.median(ms)
            ratios = [one / eager for one, eager in zip(ms, of_variants["eager"], strict=True)]
            row[what]["of_eager"][variant] = statistics.median(ratios)
    return row


def emulate(what: str, *arguments: Any, emulator: list[str], environment: dict[str, str] | None = None) -> Any:
    """Run one measurement of this program in a new process on the emulator, and return its result."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [sys.executable, "-m", "torchtitan_npu.cli.main", "emulate", *emulator, "--", "python", __file__]
        command += [what, "--process", json.dumps(arguments), "--json", str(result)]
        variables = rank_environment(OMP_NUM_THREADS="1", **(environment or {}))
        ran = subprocess.run(command, env=variables, capture_output=True, text=True)
        if ran.returncode:
            raise SystemExit(f"{ran.stdout}{ran.stderr}\n{what} {arguments}: exit code {ran.returncode}")
        return json.loads(result.read_text())


def run_process(what: str, arguments: list[Any]) -> Any:
    """Run one measurement in this process, which is on the emulator."""
    sys.path.insert(0, str(ROOT))
    from torchtitan_npu import platform

    platform.prepare()
    from tests._helpers import mesh_groups

    mesh_groups.keep_groups()
    if what == "launches":
        return run_launches(*arguments)
    return run_host_time(Job(*arguments))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=["launches", "host_time"])
    parser.add_argument("--models", nargs="+", choices=list(CONVERTERS), default=list(CONVERTERS))
    parser.add_argument("--process", type=json.loads, help="measure in this process, with these arguments")
    args = parser.parse_args()
    if args.process is not None:
        args.json.write_text(json.dumps(run_process(args.what, args.process)))
        os._exit(0)  # threads of torch_npu and of fake groups need not end in order
    if args.what == "launches":
        measured: Iterable[Iterable[Row]] = map(measure_launches, args.models)
    else:
        degrees = {model: (1, 2) if model in TENSOR_PARALLEL else (1,) for model in args.models}
        measured = [(measure_host_time(Job(model, degree)) for model in degrees for degree in degrees[model])]
    store(args.json, printed(measured, str), "cpu", peers=installed(("torch_npu", "torchtitan")))


if __name__ == "__main__":
    main()
