"""The training FLOPs per token, from which utilisation is reported."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from tests._helpers.deepseek_v32_models import model_args
from torchtitan_npu.models.deepseek_v32 import DeepSeekV32Model

SEQUENCE = 1024

# numbers of parameters, for the sizes of tests/_helpers/deepseek_v32_models.py
EMBEDDING = OUTPUT = 96 * 48
QUERIES = 48 * 18 + 18 + 18 * 4 * (12 + 16)
"""Down projection, norm, up projection to 4 heads."""
KEYS_AND_VALUES = 48 * (20 + 16) + 20 + 20 * 4 * (12 + 10)
INDEXER = 18 * 16 * 26 + 48 * 26 + 2 * 26 + 48 * 16
"""Queries, keys, the norm's weight and bias, head weights."""
ATTENTION = QUERIES + KEYS_AND_VALUES + 4 * 10 * 48 + INDEXER
EXPERT = 3 * 48 * 24
DENSE_LAYER = ATTENTION + 2 * 48 + 3 * 48 * 80
MOE_LAYER = ATTENTION + 2 * 48 + 8 * 48 + 3 * EXPERT + 2 * EXPERT
"""The experts of a token: 3 of 8, and 2 shared ones."""
UNMET = 5 * EXPERT
MTP_LAYER = MOE_LAYER + 3 * 48 + 2 * 48 * 48
"""Three more norms, and a projection."""


@pytest.mark.parametrize(
    ("changes", "layers", "met", "unmet", "width", "keys", "scored"),
    [
        # absorbed: queries and keys of 20 + 16, values of 20; the indexer scores 7 keys in the backward pass
        ({}, 3, 0, 0, 20 + 16 + 20, 7, 2 * SEQUENCE + 4 * 7),
        ({"absorb": False}, 3, 0, 0, 12 + 16 + 10, 7, 2 * SEQUENCE + 4 * 7),
        ({"indexer_loss": False}, 3, 0, 0, 20 + 16 + 20, 7, 2 * SEQUENCE),
        ({"index_topk": 4096}, 3, 0, 0, 20 + 16 + 20, SEQUENCE, 6 * SEQUENCE),
        ({"warmup": True}, 3, 0, 0, 12 + 16 + 10, SEQUENCE, 6 * SEQUENCE),
        ({"n_mtp_layers": 2}, 5, 2 * MTP_LAYER, 2 * UNMET, 20 + 16 + 20, 7, 2 * SEQUENCE + 4 * 7),
    ],
    ids=[
        "absorbed",
        "not absorbed",
        "frozen indexer",
        "top-k beyond the sequence",
        "warm-up",
        "multi-token prediction",
    ],
)
def test_flops(changes: dict[str, Any], layers: int, met: int, unmet: int, width: int, keys: int, scored: int) -> None:
    args = model_args()
    for name, value in changes.items():
        setattr(args, name, value)
    with torch.device("meta"):
        parameters, flops = args.get_nparams_and_flops(DeepSeekV32Model(args), SEQUENCE)
    met += DENSE_LAYER + 2 * MOE_LAYER + 48 + OUTPUT  # the last norm
    assert parameters == EMBEDDING + met + 2 * UNMET + unmet
    further_outputs = (layers - 3) * OUTPUT
    attention = 4 * width * keys  # 4 heads
    indexer = 16 * (26 + 1) * scored  # 16 heads; a product of 26 elements, and one with the head's weight
    assert flops == 6 * (met + further_outputs) + layers * (6 * attention + indexer)


def test_a_short_sequence_has_no_more_keys_than_tokens() -> None:
    args = model_args()
    with torch.device("meta"):
        model = DeepSeekV32Model(args)
    costs = [args.get_nparams_and_flops(model, length)[1] for length in (5, 6, 7, 8)]
    # up to 7 tokens, each adds a key to attend to and a key to score; then only a key to score
    attended, scored = 3 * 6 * 4 * (20 + 16 + 20) + 3 * 16 * 27 * 4, 3 * 16 * 27 * 2
    assert [after - before for before, after in pairwise(costs)] == [
        attended + scored,
        attended + scored,
        scored,
    ]
