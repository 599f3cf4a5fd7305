#!/usr/bin/env python
"""Compare training steps compiled without generated kernels with eager ones, on a GPU: results and host time.

    python tools/bench/compiled_steps.py [--steps 6] [--rounds 30] [--json FILE]

Models are debugmodel in bfloat16, on the shipped corpus, on one device and with deterministic algorithms. Each job is
trained from the same seed, eager and compiled; losses, gradient norms and weights must be bit-identical. Then the steps
take turns: the host time ends when the step returns, the step time when the device is done.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from harness import CONVERTERS, ROOT, Row, installed, parser_of, printed, rank_environment, store, trainer_of

MODELS = ("llama3", "deepseek_v3")
SEQUENCE = 512


def job(model: str, converters: list[str], compiled: bool) -> list[str]:
    """Return the arguments of a job."""
    arguments = ["--model.name", model, "--model.flavor", "debugmodel"]
    arguments += ["--model.hf_assets_path", str(ROOT / "torchtitan_npu/assets/tokenizer")]
    arguments += ["--training.dataset", "tiny_corpus", "--training.seq_len", str(SEQUENCE)]
    arguments += ["--training.local_batch_size", "1", "--training.global_batch_size", "1", "--training.steps", "1000"]
    arguments += ["--training.dtype", "bfloat16", "--activation_checkpoint.mode", "none", "--metrics.log_freq", "1000"]
    arguments += ["--debug.seed", "7", "--debug.deterministic", "--debug.deterministic_warn_only"]
    if converters:
        arguments += ["--model.converters", ",".join(converters)]
    return arguments + (["--compile.enable", "--npu.bypass_codegen", "inductor"] if compiled else [])


class Steps:
    """Runs the steps of a job, each on the next batch."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.batches = trainer.batch_generator(trainer.dataloader)
        self.losses: list[Any] = []
        backward = trainer.forward_backward_step

        def forward_backward_step(**arguments: Any) -> Any:
            loss = backward(**arguments)
            self.losses.append(loss.detach())
            return loss

        trainer.forward_backward_step = forward_backward_step

    def __call__(self) -> None:
        self.trainer.step += 1
        self.trainer.train_step(self.batches)

    def results(self) -> dict[str, Any]:
        """Return the losses so far and the weights, as they are now."""
        state = self.trainer.model_parts[0].state_dict()
        return {"losses": [float(loss) for loss in self.losses], **{key: value.clone() for key, value in state.items()}}


def differing(compiled: dict[str, Any], eager: dict[str, Any]) -> list[str]:
    """Name the losses and weights that are not bit-identical."""
    import torch

    names = [name for name, value in eager.items() if isinstance(value, torch.Tensor)]
    found = [name for name in names if not torch.equal(compiled[name], eager[name])]
    return ["losses"] * (compiled["losses"] != eager["losses"]) + found


def timed(steps: dict[str, Steps], rounds: int) -> dict[str, dict[str, float]]:
    """Return the median host time and step time of each variant in ms. Variants take turns."""
    import torch

    def wait() -> None:
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    gc.disable()
    for _ in range(rounds):
        gc.collect()
        for name, step in steps.items():
            wait()
            begin = time.perf_counter()
            step()
            returned = time.perf_counter()
            wait()
            times[name].append((1e3 * (returned - begin), 1e3 * (time.perf_counter() - begin)))
    gc.enable()
    medians = {name: map(statistics.median, zip(*pairs, strict=True)) for name, pairs in times.items()}
    return {name: dict(zip(("host_ms", "step_ms"), pair, strict=True)) for name, pair in medians.items()}


def measure(model: str, steps: int, rounds: int) -> Iterator[Row]:
    """Yield one row per variant of a model, with the names of what differs between compiled and eager."""
    import torch

    differences = {}
    with ExitStack() as stack:
        running: dict[str, Steps] = {}
        for converters in (list[str](), CONVERTERS[model]):
            of_both = {}
            for compiled in (False, True):
                name = ("converters" if converters else "eager") + (", compiled" if compiled else "")
                torch.compiler.reset()
                running[name] = Steps(stack.enter_context(trainer_of(job(model, converters, compiled))))
                for _ in range(steps):
                    running[name]()
                of_both[compiled] = running[name].results()
            differences[name] = differing(of_both[True], of_both[False])
        for name, times in timed(running, rounds).items():
            compared = {"steps_compared": steps, "differing": differences[name]} if name in differences else {}
            yield {"model": model, "variant": name, **compared, **times}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=6, help="steps that are compared (default 6)")
    parser.add_argument("--rounds", type=int, default=30, help="steps of each variant that are timed (default 30)")
    args = parser.parse_args()
    os.environ.update(rank_environment(CUBLAS_WORKSPACE_CONFIG=":4096:8"))
    sys.path.insert(0, str(ROOT))
    from torchtitan_npu import platform

    platform.prepare()
    import torch

    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a launch per allocation
    device = "cuda" if platform.backend() == "cuda" else "cpu"
    measured = (measure(model, args.steps, args.rounds) for model in MODELS)
    rows = store(args.json, printed(measured, str), device, peers=installed(("torchtitan",)))
    if any(row.get("differing") for row in rows):
        raise SystemExit("a compiled job differs from its eager one")


if __name__ == "__main__":
    main()
