"""FSDP of a model whose embedding and output share one weight."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.distributed import ParallelDims
from torchtitan.models.qwen3 import Qwen3Model
from torchtitan.models.qwen3.infra.parallelize import parallelize_qwen3
from torchtitan.protocols.train_spec import get_train_spec

from tests._helpers.layouts import add_flavor
from tests._helpers.multirank import RankError, run_on_ranks
from torchtitan_npu.config.job_config import JobConfig

SIZES = {"n_layers": 1, "dim": 16, "n_heads": 2, "n_kv_heads": 1, "head_dim": 8, "hidden_dim": 16, "vocab_size": 32}
RANKS = 2


def gradient(model: Any, tokens: Tensor) -> Any:
    """Return the gradient of the shared weight, with initial weights that depend on the sizes only."""
    model.to_empty(device="cpu")
    torch.manual_seed(5)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), reduction="sum").backward()
    assert model.output.weight is model.tok_embeddings.weight
    return model.output.weight.grad


def sharded_and_not(corrected: bool) -> tuple[Tensor, Tensor]:
    """Return the gradient of two FSDP ranks with a row of tokens each, and of one rank with both rows."""
    args = add_flavor("qwen3", "tied", SIZES)
    assert args.enable_weight_tying
    config = JobConfig()
    config.activation_checkpoint.mode = "none"
    config.training.mixed_precision_param = "float32"
    with torch.device("meta"):
        plain: nn.Module = Qwen3Model(args)
    dims = ParallelDims(dp_replicate=1, dp_shard=RANKS, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=RANKS)
    parallelize = get_train_spec("qwen3").parallelize_fn if corrected else parallelize_qwen3
    model = parallelize(copy.deepcopy(plain), dims, config)
    tokens = torch.randint(32, (RANKS, 6), generator=torch.Generator().manual_seed(1))
    rank = dist.get_rank()
    return gradient(model, tokens[rank : rank + 1]).full_tensor(), gradient(plain, tokens)


def test_the_gradient_is_that_of_one_rank() -> None:
    for sharded, alone in run_on_ranks(RANKS, sharded_and_not, True):
        torch.testing.assert_close(sharded, alone)


def test_torch_rejects_torchtitans_groups() -> None:
    """If this fails, TorchTitan puts both into one group, and the workaround can be deleted. Torch 2.11 accepts two."""
    error = pytest.raises(RankError, match="is shared with a parameter already managed by another FSDP group")
    with error if torch.__version__ >= "2.13" else nullcontext():
        run_on_ranks(RANKS, sharded_and_not, False)
