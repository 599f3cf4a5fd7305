"""Workaround: TorchTitan's MoE imports Triton, also where its kernel cannot run.

Fault: ``torchtitan.models.moe.kernels`` (TorchTitan 0.2.2) imports Triton at module level, and everything that imports
TorchTitan's MoE imports it. On an NPU that name is triton-ascend's; on a CPU nothing runs the kernel. There,
:func:`torchtitan_npu.platform.prepare` registers this module under that name in ``sys.modules``.

Delete this file when TorchTitan imports Triton lazily.
"""

from __future__ import annotations

import torch


def generate_permute_indices(
    tokens_per_expert_group: torch.Tensor,
    experts_per_rank: int,
    num_ranks: int,
    max_len: int,
    alignment: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the order of tokens by expert after an all-to-all, each expert padded to a multiple of ``alignment``.

    ``tokens_per_expert_group`` (num_ranks * experts_per_rank,) counts tokens by source rank, then by local expert; the
    tokens are in that order. Return ``indices`` (max_len,) int32, the token at each output row, -1 for padding;
    ``sizes`` and ``offsets`` (experts_per_rank,) int32, the padded count per expert and its cumulative sum. Nothing is
    read back to the host.
    """
    counts = tokens_per_expert_group.view(num_ranks, experts_per_rank).long()
    # TorchTitan's kernel gives an expert without tokens one aligned block
    sizes = (counts.sum(0).clamp_min(alignment) + alignment - 1) // alignment * alignment
    offsets = sizes.cumsum(0)
    # a group's first row: its expert's block, then the tokens from lower ranks for that expert
    first_row = (offsets - sizes) + counts.cumsum(0) - counts  # (num_ranks, experts_per_rank)

    ends = counts.flatten().cumsum(0)
    token = torch.arange(max_len, device=counts.device)
    group = torch.searchsorted(ends, token, right=True).clamp_max(ends.numel() - 1)
    row = first_row.flatten()[group] + token - (ends - counts.flatten())[group]
    # ``max_len`` exceeds the token count; indices beyond it go to one spare row at the end
    row = torch.where(token < ends[-1], row, max_len)
    indices = torch.full((max_len + 1,), -1, dtype=torch.int32, device=counts.device)
    indices.scatter_(0, row, torch.where(token < ends[-1], token, -1).int())
    return indices[:max_len], sizes.int(), offsets.int()
