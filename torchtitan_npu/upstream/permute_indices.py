"""TorchTitan's expert permutation indices in plain PyTorch, for homes that have no Triton of TorchTitan's kind.

``torchtitan.models.moe.kernels`` imports Triton at its top, and so does everything that imports TorchTitan's MoE.
Where that kernel cannot run, ``platform.prepare`` puts this module in its place, under its name.
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
    """Where each expert's tokens lie after an all-to-all, each expert's share padded to a multiple of ``alignment``.

    ``tokens_per_expert_group`` (num_ranks * experts_per_rank,) counts tokens by source rank, then by local expert; the
    tokens lie in that order. Returns ``indices`` (max_len,) int32, the token to put at each place, -1 for padding;
    ``sizes`` and ``offsets`` (experts_per_rank,) int32, each expert's padded count and their cumulative sum. Tensor
    operations only: nothing is read back to the host.
    """
    counts = tokens_per_expert_group.view(num_ranks, experts_per_rank).long()
    # an expert without tokens still gets one aligned block, as TorchTitan's kernel gives it
    sizes = (counts.sum(0).clamp_min(alignment) + alignment - 1) // alignment * alignment
    offsets = sizes.cumsum(0)
    # a group's first place: its expert's block, then the tokens that lower ranks sent to that expert
    first_place = (offsets - sizes) + counts.cumsum(0) - counts  # (num_ranks, experts_per_rank)

    ends = counts.flatten().cumsum(0)
    token = torch.arange(max_len, device=counts.device)
    group = torch.searchsorted(ends, token, right=True).clamp_max(ends.numel() - 1)
    place = first_place.flatten()[group] + token - (ends - counts.flatten())[group]
    # ``max_len`` exceeds the token count; what is no token goes to one spare place at the end
    place = torch.where(token < ends[-1], place, max_len)
    indices = torch.full((max_len + 1,), -1, dtype=torch.int32, device=counts.device)
    indices.scatter_(0, place, torch.where(token < ends[-1], token, -1).int())
    return indices[:max_len], sizes.int(), offsets.int()
