#!/usr/bin/env python
"""Host time and speed of training steps with and without ``npu.device_graphs``, on one GPU or NPU.

    python tools/bench/device_graphs.py [--steps 20] [--json FILE]

llama3 has the sizes of Llama-3.2-1B (16 layers, dim 2048, without tied weights), deepseek_v3 8 layers of dim 1024 with
16 experts of which a token uses 4. The batch is one sequence; parameters are float32, products bfloat16.

Each row is one trainer, first without its graphs and then with them. The host time of a step is the median time until
forward and backward pass, gradient clipping and optimizer are launched on an idle device. Tokens per second are those
of the trainer's complete steps, with the data loader. The peak of memory is that of allocated memory in these steps,
the reserved memory is that at the end.
"""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from harness import GIB, Row, parser_of, printed, rank_environment, store

MODELS: dict[str, tuple[str, int]] = {
    "llama3, 256 tokens": ("llama3", 256),
    "llama3, 2048 tokens": ("llama3", 2048),
    "deepseek_v3, 2048 tokens": ("deepseek_v3", 2048),
}
CONVERTERS = {
    "llama3": ["npu_rms_norm", "npu_rope", "npu_attention"],
    "deepseek_v3": ["npu_rms_norm", "npu_rope", "npu_permute", "npu_gmm"],
}
VARIANTS = ("eager", "converters", "compiled")
"""Each adds to the previous one. ``compiled`` is Inductor without code generation."""
FLAVOR = "device_graphs"
WARM_UP = 3


def add_flavors() -> None:
    from torchtitan.protocols.train_spec import get_train_spec

    llama3, deepseek_v3 = (get_train_spec(model).model_args for model in ("llama3", "deepseek_v3"))
    llama = {"dim": 2048, "n_layers": 16, "ffn_dim_multiplier": 1.5, "multiple_of": 1024}
    llama3[FLAVOR] = replace(llama3["8B"], **llama)  # type: ignore[type-var]
    small: Any = deepseek_v3["debugmodel"]
    deepseek_v3[FLAVOR] = replace(
        small,
        dim=1024,
        inter_dim=4096,
        moe_inter_dim=512,
        n_layers=8,
        moe_args=replace(small.moe_args, num_experts=16, top_k=4),
    )


def job_config(model: str, tokens: int, variant: str, folder: str) -> Any:
    from torchtitan_npu.config.job_config import JobConfig
    from torchtitan_npu.config.shipped_files import shipped

    config = JobConfig()
    config.job.dump_folder = folder
    config.model.name, config.model.flavor = model, FLAVOR
    config.model.hf_assets_path = shipped("torchtitan_npu/assets/tokenizer")
    config.model.converters = [] if variant == "eager" else CONVERTERS[model]
    config.training.dataset, config.training.steps = "tiny_corpus", 1000
    config.training.seq_len, config.training.local_batch_size, config.training.global_batch_size = tokens, 1, 1
    config.training.max_nonfinite_steps = 0  # its check waits for the device
    config.activation_checkpoint.mode = "none"
    config.metrics.log_freq = 1 << 30
    config.comm.trace_buf_size = 0
    config.debug.seed = 1
    config.npu.device_graphs = True
    if variant == "compiled":
        config.compile.enable, config.npu.bypass_codegen = True, "inductor"
    return config


def measure(trainer: Any, batches: Any, steps: int) -> dict[str, float]:
    """Measure steps of the trainer after a warm-up."""
    from torchtitan.distributed.utils import clip_grad_norm_
    from torchtitan.tools.utils import device_module

    def train_step() -> None:
        trainer.step += 1
        trainer.train_step(batches)

    training, parameters = trainer.job_config.training, list(trainer.model_parts[0].parameters())
    inputs, labels = next(batches)
    inputs, labels = {key: value.to(trainer.device) for key, value in inputs.items()}, labels.to(trainer.device)
    valid = torch.tensor(float(labels.numel()), device=trainer.device)

    def launch() -> None:
        trainer.optimizers.zero_grad()
        trainer.forward_backward_step(input_dict=dict(inputs), labels=labels, global_valid_tokens=valid)
        clip_grad_norm_(parameters, training.max_norm, foreach=True)
        trainer.optimizers.step()

    for _ in range(WARM_UP):
        train_step()
    device_module.synchronize()
    device_module.reset_peak_memory_stats()
    started = time.perf_counter()
    for _ in range(steps):
        train_step()
    device_module.synchronize()
    seconds = (time.perf_counter() - started) / steps
    peak, host = device_module.max_memory_allocated(), []
    for _ in range(steps):
        started = time.perf_counter()
        launch()
        host.append(1e3 * (time.perf_counter() - started))
        device_module.synchronize()
    return {
        "host_ms": statistics.median(host),
        "step_ms": 1e3 * seconds,
        "tokens_per_second": training.seq_len / seconds,
        "peak_gib": peak / GIB,
        "reserved_gib": device_module.memory_reserved() / GIB,
    }


def measure_both(model: str, tokens: int, variant: str, steps: int) -> dict[str, dict[str, float]]:
    """Train a model in this process, without graphs and then with them."""
    import torchtitan_npu.trainer as trainer_module
    from torchtitan_npu.preflight.job import check_job

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        config = job_config(model, tokens, variant, folder)
        check_job(config, 1)
        trainer = trainer_module.Trainer(config)
        batches = trainer.batch_generator(trainer.dataloader)
        with trainer.device_graphs.disabled():
            found["plain"] = measure(trainer, batches, steps)
        found["graphs"] = measure(trainer, batches, steps)
        trainer.close()
    del trainer, batches
    gc.collect()
    torch.get_device_module().empty_cache()
    return found


def rows(steps: int) -> Iterator[Row]:
    for name, (model, tokens) in MODELS.items():
        for variant in VARIANTS:
            yield {"model": name, "variant": variant, **measure_both(model, tokens, variant, steps)}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    from torchtitan_npu import platform

    if platform.backend() == "cpu":
        raise SystemExit("device_graphs.py needs a GPU or an NPU")
    os.environ.update(rank_environment())
    platform.prepare()
    import torchtitan_npu.train_specs.registry  # noqa: F401

    add_flavors()
    store(options.json, printed([rows(options.steps)], str), platform.backend())


if __name__ == "__main__":
    main()
