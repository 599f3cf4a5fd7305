"""Train tiny models from the same weights, on the backend of this process.

python -m tests.emulator.training_jobs FILE MODEL ...    # eager runs on one rank, as one pickled dictionary
"""

from __future__ import annotations

import pickle
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from tests._helpers import deepseek_v32_training, layouts
from tests._helpers.multirank import run_on_ranks
from tests._helpers.training import Record, plain, recording, train_until

STEPS = 5
VISION = {
    "n_layers": 4,
    "dim": 64,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 32,
    "hidden_dim": 96,
    "mrope_section": (6, 5, 5),
}


def train(model: str, layout: dict[str, int], options: dict[str, Any]) -> Record:
    """Train ``model`` on this rank, and return the record with its tensors on the CPU."""
    options = {"training.steps": STEPS, "training.mixed_precision_param": "float32", **options}
    if model == "deepseek_v32":
        layouts.add_flavor("deepseek_v32", "tiny", deepseek_v32_training.SMALLER)
        options = {"model.name": "deepseek_v32", "model.flavor": "tiny", "training.seq_len": 32, **options}
        model = "deepseek_v3"
    elif model == "qwen3_vl":
        layouts.TINY["qwen3_vl"] = ("qwen3_vl", "debugmodel", VISION)
        options = {"training.dataset": "shapes", "validation.dataset": "shapes_validation", **options}
    with recording(layouts.job_config(model, layout, options)) as (trainer, record):
        for part in trainer.model_parts:
            set_weights(part)
        train_until(trainer, STEPS)
    record.gradients = {name: grad.cpu() for name, grad in record.gradients.items()}
    record.biases = {name: bias.cpu() for name, bias in record.biases.items()}
    return record


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
    _, file, *models = sys.argv
    records = {model: run_on_ranks(1, train, model, {}, {}, process_group=False)[0] for model in models}
    Path(file).write_bytes(pickle.dumps(records))
