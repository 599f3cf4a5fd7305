"""The vision tower of Qwen3-VL: from patches of images and videos to features of merged patches."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.models.utils import trunc_normal_

from torchtitan_npu.layers.packed_attention import FrameAttention
from torchtitan_npu.layers.rotary import HALF_OF_TABLES, RotaryTables, apply_rotary_vision, register_rotation
from torchtitan_npu.models.qwen3_vl.args import VisionArgs
from torchtitan_npu.models.qwen3_vl.patch_grids import Grid, frame_runs, interpolation


class VisionAttention(nn.Module):
    """Attention of every patch to all patches of its frame."""

    def __init__(self, args: VisionArgs) -> None:
        super().__init__()
        self.n_heads, self.head_dim = args.n_heads, args.head_dim
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(args.dim, args.dim) for _ in range(4))
        self.inner_attention = FrameAttention()

    def forward(self, x: Tensor, tables: RotaryTables, runs: list[tuple[int, int]]) -> Tensor:
        patches = x.shape[0]
        # -1: the number of heads on this rank, under tensor parallel
        xq, xk, xv = (w(x).view(patches, -1, self.head_dim) for w in (self.wq, self.wk, self.wv))
        xq, xk = apply_rotary_vision(xq, xk, tables)
        return self.wo(self.inner_attention(xq, xk, xv, runs).flatten(1))


register_rotation(VisionAttention, apply_rotary_vision, HALF_OF_TABLES, tensors=2)


class VisionFeedForward(nn.Module):
    def __init__(self, args: VisionArgs) -> None:
        super().__init__()
        self.w1 = nn.Linear(args.dim, args.hidden_dim)
        self.w2 = nn.Linear(args.hidden_dim, args.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x), approximate="tanh"))


class VisionBlock(nn.Module):
    def __init__(self, args: VisionArgs) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(args.dim, eps=args.norm_eps)
        self.attention = VisionAttention(args)
        self.ffn_norm = nn.LayerNorm(args.dim, eps=args.norm_eps)
        self.feed_forward = VisionFeedForward(args)

    def forward(self, x: Tensor, tables: RotaryTables, runs: list[tuple[int, int]]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), tables, runs)
        return x + self.feed_forward(self.ffn_norm(x))


class Merger(nn.Module):
    """Projects the concatenated ``merge_size``² patches of a block to the decoder's width."""

    def __init__(self, args: VisionArgs, out_dim: int, norm_merged: bool) -> None:
        super().__init__()
        self.merged_dim = args.dim * args.patches_per_token
        self.norm = nn.LayerNorm(self.merged_dim if norm_merged else args.dim, eps=args.norm_eps)
        self.w1 = nn.Linear(self.merged_dim, self.merged_dim)
        self.w2 = nn.Linear(self.merged_dim, out_dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, self.norm.normalized_shape[0])  # patches are merged before or after the norm
        x = self.norm(x).view(-1, self.merged_dim)
        return self.w2(F.gelu(self.w1(x)))


class VisionTower(nn.Module):
    def __init__(self, args: VisionArgs, out_dim: int) -> None:
        super().__init__()
        self.args = args
        # equivalent to a convolution whose stride is its kernel size
        self.patch_embed = nn.Linear(args.patch_dim, args.dim)
        self.pos_embed = nn.Embedding(args.n_positions, args.dim)
        self.layers = nn.ModuleDict({str(number): VisionBlock(args) for number in range(args.n_layers)})
        self.merger = Merger(args, out_dim, norm_merged=False)
        self.deepstack_mergers = nn.ModuleDict(
            {str(number): Merger(args, out_dim, norm_merged=True) for number in range(len(args.deepstack_layers))}
        )

    def forward(self, patches: Tensor, coordinates: Tensor, grids: tuple[Grid, ...]) -> tuple[Tensor, ...]:
        """Return the features (tokens, out_dim) of the last layer, then those of each of ``deepstack_layers``.

        ``patches`` (patches, patch_dim) are those of all ``grids`` in order, with their ``coordinates`` (patches, 4).
        """
        index, weight = interpolation(coordinates, side=round(self.args.n_positions**0.5))
        learned = (self.pos_embed(index) * weight.unsqueeze(-1)).sum(dim=1)  # (patches, dim)
        x = self.patch_embed(patches.to(self.patch_embed.weight.dtype))
        x = x + learned.to(x.dtype)

        tables = self.rotary_tables(coordinates[:, :2])
        runs = frame_runs(grids)
        deepstack: list[Tensor] = []
        for number, block in enumerate(self.layers.values()):
            x = block(x, tables, runs)
            if number in self.args.deepstack_layers:
                deepstack.append(self.deepstack_mergers[str(len(deepstack))](x))
        return self.merger(x), *deepstack

    def rotary_tables(self, coordinates: Tensor) -> RotaryTables:
        """Make the tables of :func:`apply_rotary_vision` for patches at rows and columns ``coordinates`` (patches, 2).

        The first half of the angles follows the row, the second half the column.
        """
        width = self.args.head_dim // 2
        powers = torch.arange(0, width, 2, dtype=torch.float32, device=coordinates.device) / width
        frequencies = 1.0 / self.args.rope_theta**powers
        angles = (coordinates.unsqueeze(-1) * frequencies).flatten(1).tile(2)  # (patches, head_dim)
        return RotaryTables(torch.stack((angles.cos(), angles.sin()))[:, None, :, None], argument="tables")

    def init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, (nn.Linear, nn.Embedding)):
                trunc_normal_(module.weight, std=0.02)
                if isinstance(module, nn.Linear):
                    nn.init.zeros_(cast(Any, module.bias))
