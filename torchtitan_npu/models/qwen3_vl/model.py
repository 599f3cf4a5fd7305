"""Qwen3-VL: Qwen3 with a vision tower, and token positions in time, height and width."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.models.qwen3.model.model import Attention as Qwen3Attention
from torchtitan.models.qwen3.model.model import Qwen3Model

from torchtitan_npu.errors import UsageError
from torchtitan_npu.layers.packed_attention import DocumentMask, MaskedAttention
from torchtitan_npu.layers.rotary import MRoPERotation, MRoPETables, RotaryTables
from torchtitan_npu.models.qwen3_vl.args import Qwen3VLModelArgs
from torchtitan_npu.models.qwen3_vl.patch_grids import Grids, patch_coordinates, patches_of, position_ids
from torchtitan_npu.models.qwen3_vl.vision import VisionTower


class Qwen3VLAttention(Qwen3Attention):
    """Qwen3's attention with :class:`MRoPERotation`, and a mask for packed documents."""

    def __init__(self, args: Qwen3VLModelArgs) -> None:
        super().__init__(args)
        self.inner_attention = MaskedAttention()
        self.rotation = MRoPERotation(
            args.mrope_section, args.mrope_interleaved, args.n_heads, args.n_kv_heads, args.head_dim
        )

    def forward(
        self,
        x: Tensor,
        rope_cache: Tensor,
        attention_masks: Any,
        positions: Tensor | RotaryTables | None = None,
    ) -> Tensor:
        """Attend from ``x`` (bsz, seqlen, dim), with ``rope_cache`` and ``positions`` from :class:`MRoPETables`.

        ``attention_masks`` is the output of the model's ``document_mask``; ``None`` is causal.
        """
        bsz, seqlen, _ = x.shape
        # -1: the number of heads on this rank, under tensor parallel
        xq, xk, xv = (w(x).view(bsz, seqlen, -1, self.head_dim) for w in (self.wq, self.wk, self.wv))
        xq, xk = self.q_norm(xq), self.k_norm(xk)  # type: ignore[misc]

        # local heads from here on: DTensor has no sharding rule for attention with a mask
        xq, xk, xv, rope_cache = (t.to_local() if isinstance(t, DTensor) else t for t in (xq, xk, xv, rope_cache))
        xq, xk = self.rotation(xq, xk, rope_cache, positions)
        q, k, v = (t.transpose(1, 2) for t in (xq, xk, xv))  # (bsz, heads, seqlen, head_dim)
        output = self.inner_attention(q, k, v, attention_masks, scale=self.scaling, enable_gqa=self.enable_gqa)
        return self.wo(output.transpose(1, 2).reshape(bsz, seqlen, -1))


class ScatterFeatures(nn.Module):
    """Puts the tower's features at their tokens, zeros elsewhere. A module, so that tensor parallel can shard it."""

    def forward(self, features: tuple[Tensor, ...], row: Tensor, is_visual: Tensor) -> tuple[Tensor, ...]:
        """Return the mask of text tokens (bsz, seqlen, 1), then each of ``features`` (rows, dim) as (bsz, seqlen, dim).

        ``row`` (bsz, seqlen) is a token's row in the features if it ``is_visual`` (bsz, seqlen).
        """
        is_visual = is_visual.unsqueeze(-1)
        return ~is_visual, *(F.embedding(row, feature) * is_visual for feature in features)


class Qwen3VLModel(Qwen3Model):
    """TorchTitan's Qwen3 with a vision tower, and another attention and forward."""

    def __init__(self, model_args: Qwen3VLModelArgs) -> None:
        super().__init__(model_args)
        self.model_args: Qwen3VLModelArgs = model_args
        blocks: Any = self.layers.values()
        for block in blocks:
            block.attention = Qwen3VLAttention(model_args)
        self.mrope = MRoPETables(model_args.mrope_section, model_args.mrope_interleaved)
        self.vision = VisionTower(model_args.vision, model_args.dim)
        self.scatter_features = ScatterFeatures()
        self.document_mask = DocumentMask()

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        super().init_weights(buffer_device)
        self.vision.init_weights()

    def forward(
        self,
        tokens: Tensor,
        attention_masks: Any = None,
        positions: Tensor | None = None,
        patches: Tensor | None = None,
        coordinates: Tensor | None = None,
        grids: Grids | None = None,
    ) -> Tensor:
        """Return the logits (bsz, seqlen, vocab_size) of ``tokens`` (bsz, seqlen).

        Args:
            tokens: (bsz, seqlen), with a placeholder for each merged patch. The data loader checks their number
                (:func:`check_visual_tokens`), while the tokens are on the host.
            attention_masks: made from ``positions`` by ``document_mask`` by default
            positions: (3, bsz, seqlen) or packed (3, bsz * seqlen), restarting at 0 with each document; tokens attend
                to their own document. Without them a row is one document. If it has images, its positions are computed
                here, which synchronises with the device.
            patches: (patches, patch_dim), first those of images, then those of videos
            coordinates: (patches, 4), by default :func:`patch_coordinates` of ``grids``
            grids: the grids of images and videos
        """
        grids = grids or Grids()
        if positions is not None:
            positions = self.mrope.checked(positions, tokens.shape)
            if attention_masks is None:
                attention_masks = self.document_mask(positions)
        elif grids:
            positions = position_ids(tokens, grids, self.model_args)
        else:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand(3, *tokens.shape)
        is_text, visual, *deepstack = self.visual_features(tokens, patches, coordinates, grids)

        h = self.tok_embeddings(tokens)  # (bsz, seqlen, dim)
        h = h * is_text + visual
        rope_cache, positions = self.mrope(self.rope_cache, positions, tokens.shape, h.dtype)
        for number, layer in enumerate(self.layers.values()):
            h = layer(h, rope_cache, attention_masks, positions)
            if number < len(deepstack):
                h = h + deepstack[number]
        return self.output(self.norm(h))

    def visual_features(
        self, tokens: Tensor, patches: Tensor | None, coordinates: Tensor | None, grids: Grids
    ) -> tuple[Tensor, ...]:
        """Return the output of :class:`ScatterFeatures` for this batch.

        For a batch of text the tower runs on one block of zeros. So its parameters have gradients in every step, and
        with FSDP every rank takes part in its collectives.
        """
        args, merge_size = self.model_args, self.model_args.vision.merge_size
        grids.check(merge_size)
        all_grids = grids.images + grids.videos
        counts = {"patches": 0 if patches is None else len(patches)}
        if coordinates is not None:
            counts["coordinates"] = len(coordinates)
        for name, count in counts.items():
            if count != patches_of(all_grids):
                raise UsageError(f"{count} {name} given, but {grids} has {patches_of(all_grids)} patches")
        if patches is None or not all_grids:
            all_grids = ((1, merge_size, merge_size),)
            patches = torch.zeros(args.vision.patches_per_token, args.vision.patch_dim, device=tokens.device)
            coordinates = patch_coordinates(all_grids, merge_size, tokens.device)
        elif coordinates is None:
            coordinates = patch_coordinates(all_grids, merge_size).to(tokens.device)
        features = self.vision(patches, coordinates, all_grids)
        is_image = (tokens == args.image_token_id) & bool(grids.images)
        is_video = (tokens == args.video_token_id) & bool(grids.videos)
        # features are ordered: all images, then all videos
        image_row = is_image.flatten().cumsum(0).view_as(tokens) - 1
        video_row = is_video.flatten().cumsum(0).view_as(tokens) - 1
        video_row = video_row + patches_of(grids.images) // args.vision.patches_per_token
        row = torch.where(is_video, video_row, image_row).clamp(min=0) * (is_image | is_video)
        return self.scatter_features(features, row, is_image | is_video)
