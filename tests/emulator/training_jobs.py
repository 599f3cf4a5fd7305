"""Train tiny models from the same weights, on the backend of this process.

python -m tests.emulator.training_jobs JOBS RECORDS    # run a pickled dictionary of jobs, and pickle their records
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from tests._helpers import deepseek_v32_training, layouts
from tests._helpers.multirank import run_on_ranks
from tests._helpers.training import Record, plain, recording, state, together, train_until

ROOT = Path(__file__).parents[2]
STEPS = 5
VISION = {"n_heads": 2, "n_kv_heads": 1, "head_dim": 128, "mrope_section": (24, 20, 20)}
"""Heads and MRoPE sections are those of the released models, which alone npu_mrope supports."""
DSA = {
    "n_heads": 32,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_n_heads": 8,
    "index_head_dim": 128,
    "index_topk": 1024,
}
"""The smallest sizes that the NPU's sparse attention supports."""
MODELS_AND_SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v32_dsa": ("deepseek_v32", DSA),
    # three layers share an indexer
    "glm_moe_dsa": ("glm_moe_dsa", {**DSA, "n_layers": 3, "index_topk_pattern": "FSS"}),
    "qwen3_vl": ("qwen3_vl", VISION),
}
"""Names of ``layouts.TINY``, and changes to the sizes, by name. Other models have the sizes of ``layouts.TINY``."""


class Job(NamedTuple):
    model: str
    """A key of ``layouts.TINY`` or of :data:`MODELS_AND_SIZES`."""
    ranks: int = 1
    layout: dict[str, int] = {}  # noqa: RUF012
    options: dict[str, Any] = {}  # noqa: RUF012
    sizes: dict[str, Any] = {}  # noqa: RUF012
    """More changes to the sizes."""

    def run(self, timeout: float = 120) -> Record:
        """Train on the ranks of this process's backend, and merge their records."""
        return together(run_on_ranks(self.ranks, train, self, process_group=False, timeout=timeout))


MODELS = ["llama3", "qwen3", "qwen3_moe", "deepseek_v3", "deepseek_v32", "qwen3_vl"]
DSA_OPTIONS = {
    "model.converters": deepseek_v32_training.CONVERTERS,
    "training.global_batch_size": 4,
    "training.local_batch_size": 2,
}
DSA_BFLOAT16 = {**DSA_OPTIONS, "training.mixed_precision_param": "bfloat16"}
ON_CPU = {model: Job(model) for model in MODELS} | {
    "npu_dsa float32": Job("deepseek_v32_dsa", options=DSA_OPTIONS),
    "npu_dsa {}": Job("deepseek_v32_dsa", options=DSA_BFLOAT16),
    "npu_dsa {'cp': 2}": Job("deepseek_v32_dsa", 2, {"cp": 2}, DSA_BFLOAT16),
    "glm_moe_dsa float32": Job("glm_moe_dsa", options=DSA_OPTIONS),
    "glm_moe_dsa": Job("glm_moe_dsa", options=DSA_BFLOAT16),
}
"""The runs of the CPU backend that the tests of the default run compare with, all in one process."""


def run_on_cpu(jobs: dict[str, Job]) -> dict[str, Record]:
    """Train in a process that does not load torch_npu."""
    with tempfile.TemporaryDirectory() as folder:
        requested, found = Path(folder, "jobs"), Path(folder, "records")
        requested.write_bytes(pickle.dumps(jobs))
        command = [sys.executable, "-m", "tests.emulator.training_jobs", str(requested), str(found)]
        subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
        return pickle.loads(found.read_bytes())


def train(job: Job) -> Record:
    """Train on this rank, and return the record with its tensors on the CPU."""
    with started(job) as (trainer, record):
        train_until(trainer, trainer.job_config.training.steps)
        record.weights = state(trainer.model_parts)
    return on_host(record)


def train_and_count(job: Job) -> tuple[Record, Counter[str]]:
    """Also return the number of calls of each ``npu`` operator."""
    from torchtitan_npu.planner import Calls

    with Calls() as calls:
        record = train(job)
    return record, Counter(calls.count("npu"))


def train_and_export(job: Job) -> Record:
    """Also save the weights of the last step as a checkpoint, and in Hugging Face's format as another step."""
    with started(job) as (trainer, record):
        train_until(trainer, STEPS)
        record.weights = state(trainer.model_parts)
        trainer.checkpointer.last_save_in_hf, trainer.checkpointer.last_save_model_only = False, False
        trainer.checkpointer.save(STEPS, last_step=True)
        trainer.checkpointer.last_save_in_hf, trainer.checkpointer.last_save_model_only = True, True
        trainer.checkpointer.save(STEPS + 1, last_step=True)
    return on_host(record)


def train_until_killed(job: Job, step: int) -> None:
    """Train on this rank until it kills itself after ``step``, without a chance to clean up."""
    with started(job) as (trainer, _):
        train_until(trainer, step)
        os.kill(os.getpid(), signal.SIGKILL)


def on_host(record: Record) -> Record:
    for tensors in (record.gradients, record.biases, record.weights):
        tensors.update({name: tensor.cpu() for name, tensor in tensors.items()})
    return record


@contextmanager
def started(job: Job) -> Iterator[tuple[Any, Record]]:
    """Yield the Trainer, at its last checkpoint or else with :func:`weights`, and the record of its steps."""
    with recording(job_config(job)) as (trainer, record):
        if trainer.step == 0:
            for part in trainer.model_parts:
                set_weights(part)
        yield trainer, record


def job_config(job: Job) -> Any:
    model, sizes = MODELS_AND_SIZES.get(job.model, (job.model, {}))
    options: dict[str, Any] = {"training.steps": STEPS, "training.mixed_precision_param": "float32"}
    if model == "qwen3_vl":
        options |= layouts.PICTURES
    elif model in ("deepseek_v32", "glm_moe_dsa"):
        options["training.seq_len"] = 32
    return layouts.job_config(model, job.layout, {**options, **job.options}, {**sizes, **job.sizes})


def set_weights(part: nn.Module) -> None:
    """Give each parameter values that depend on its name alone: random numbers of the backends differ."""
    with torch.no_grad():
        for name, parameter in part.named_parameters():
            values = weights(plain(name), parameter.shape).to(parameter.device, parameter.dtype)
            if isinstance(parameter, DTensor):
                values = distribute_tensor(values, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.copy_(values)


def weights(name: str, shape: torch.Size) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    return 1 + 0.1 * values if len(shape) == 1 and name.endswith("weight") else 0.05 * values


if __name__ == "__main__":
    _, requested, found = sys.argv
    jobs: dict[str, Job] = pickle.loads(Path(requested).read_bytes())
    Path(found).write_bytes(pickle.dumps({name: job.run(timeout=600) for name, job in jobs.items()}))
