"""Train tiny models with and without ``npu.device_graphs`` on the device of this process, and compare the two."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch

from tests._helpers import layouts
from tests._helpers.compiled_training import COMPILED, FULL, SELECTIVE_OP, VALIDATED
from tests._helpers.training import Record, recording, state, train_until

STEPS = 3
MICROBATCHES = 2
"""Per step, as ``layouts.job_config`` sets them."""
NO_RANDOM_STATE = {"activation_checkpoint.preserve_rng_state": False}
ONE_MICROBATCH = {"training.global_batch_size": 2, "training.local_batch_size": 2}
WIDE = "deepseek_v3_wide"
"""Its experts are as wide as the kernels of a GPU need."""
V32 = "deepseek_v32"
"""Its blocks have an auxiliary loss, and experts as wide as those of the model above."""
FLAVORS = {
    WIDE: ("deepseek_v3", "debugmodel", {"n_layers": 3, "n_heads": 4}),
    V32: (V32, "debugmodel", {"n_layers": 2, "absorb": True}),
}


def converted(model: str) -> dict[str, Any]:
    if model == V32:  # its heads are too small for the NPU kernels of npu_dsa
        dsa = ["npu_dsa"] if torch.cuda.is_available() else []
        return {"model.converters": ["npu_rms_norm", "npu_rope", "npu_permute", "npu_gmm", *dsa]}
    return {"model.converters": layouts.FUSED["deepseek_v3" if model == WIDE else model]}


OPTIONS: dict[str, dict[str, Any]] = {
    "accumulated": {},
    "one microbatch": ONE_MICROBATCH,
    "full": {**FULL, **NO_RANDOM_STATE},
    "selective op": {**SELECTIVE_OP, **NO_RANDOM_STATE},
    "compiled": COMPILED,
    "validated": VALIDATED,
}


def train(model: str, options: dict[str, Any]) -> tuple[Record, list[int]]:
    """Train on this rank. Return the record, and the number of replayed forward passes of each block."""
    with patch.dict(layouts.TINY, FLAVORS):
        config = layouts.job_config(model, {}, options)
    with recording(config) as (trainer, record):
        train_until(trainer, STEPS)
        record.weights = state(trainer.model_parts)
        replays = [block.runs for block in trainer.device_graphs.blocks]
    return record, replays


def differences(model: str, options: dict[str, Any]) -> list[str]:
    """Train without graphs and with them, and name everything that is not bit-identical."""
    (plain, none), (graphed, replays) = (train(model, {**options, **graphs}) for graphs in ({}, GRAPHS))
    microbatches = 1 if options.get("training.global_batch_size") == 2 else MICROBATCHES
    assert not none and replays, "blocks were captured without npu.device_graphs, or not captured with it"
    assert set(replays) == {STEPS * microbatches - 1}, replays  # the first microbatch runs without graphs
    assert plain.weights.keys() == graphed.weights.keys()  # same checkpoints
    named = {f"weight {name}": (w, graphed.weights[name]) for name, w in plain.weights.items()}
    named |= {f"gradient {name}": (g, graphed.gradients[name]) for name, g in plain.gradients.items()}
    found = [name for name, (one, other) in named.items() if not torch.equal(one, other)]
    for metric in ("losses", "norms", "indexer_losses", "validation"):
        before, after = getattr(plain, metric), getattr(graphed, metric)
        found += [f"{metric}: {before} and {after}"] if before != after else []
    return found


GRAPHS = {"npu.device_graphs": True}
