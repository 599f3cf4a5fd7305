"""Qwen3-VL: a vision tower beside Qwen3, whose tokens have positions in time, height and width."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.models.qwen3.model.model import Attention as Qwen3Attention
from torchtitan.models.qwen3.model.model import Qwen3Model

from torchtitan_npu.errors import UsageError
from torchtitan_npu.models.qwen3_vl.args import Qwen3VLModelArgs
from torchtitan_npu.models.qwen3_vl.grids import Grids, patch_places, patches_of
from torchtitan_npu.models.qwen3_vl.positions import document_mask, position_ids
from torchtitan_npu.models.qwen3_vl.vision import VisionTower
from torchtitan_npu.models.rotary.mrope import MRoPERotation, MRoPETables


class Attention(Qwen3Attention):
    """Qwen3's, rotated by :class:`MRoPERotation`, over the tokens of a document where several are packed."""

    def __init__(self, args: Qwen3VLModelArgs) -> None:
        super().__init__(args)
        del self.inner_attention  # which takes no mask
        self.rotation = MRoPERotation(
            args.mrope_section, args.mrope_interleaved, args.n_heads, args.n_kv_heads, args.head_dim
        )

    def forward(
        self, x: Tensor, rope_cache: Tensor, attention_masks: Tensor | None, positions: Tensor | None = None
    ) -> Tensor:
        """``x`` (bsz, seqlen, dim); ``rope_cache`` and ``positions`` as :class:`MRoPETables` gave them.

        ``attention_masks`` (bsz, 1, seqlen, seqlen): which keys a query sees; none for all before it.
        """
        bsz, seqlen, _ = x.shape
        # -1: tensor parallel may have shared out the heads
        xq, xk, xv = (w(x).view(bsz, seqlen, -1, self.head_dim) for w in (self.wq, self.wk, self.wv))
        xq, xk = self.q_norm(xq), self.k_norm(xk)  # type: ignore[misc]

        # from here on the heads of this rank by themselves: DTensor has no rule for attention with a mask
        xq, xk, xv, rope_cache = (t.to_local() if isinstance(t, DTensor) else t for t in (xq, xk, xv, rope_cache))
        xq, xk = self.rotation(xq, xk, rope_cache, positions)
        q, k, v = (t.transpose(1, 2) for t in (xq, xk, xv))  # (bsz, heads, seqlen, head_dim)
        output = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=attention_masks,
            is_causal=attention_masks is None,
            scale=self.scaling,
            enable_gqa=self.enable_gqa,
        )
        return self.wo(output.transpose(1, 2).reshape(bsz, seqlen, -1))


class Spread(nn.Module):
    """The tower's features where their tokens are, zeros elsewhere; a module, for tensor parallel to share out."""

    def forward(self, features: tuple[Tensor, ...], row: Tensor, is_visual: Tensor) -> tuple[Tensor, ...]:
        """Whether a token is text (bsz, seqlen, 1), then each of ``features`` (rows, dim) spread to (bsz, seqlen, dim).

        ``row`` (bsz, seqlen): a token's row of the features, if it ``is_visual`` (bsz, seqlen).
        """
        is_visual = is_visual.unsqueeze(-1)
        return ~is_visual, *(F.embedding(row, feature) * is_visual for feature in features)


class Qwen3VLModel(Qwen3Model):
    """TorchTitan's Qwen3, its blocks and initialisation, with a tower, another attention and another forward."""

    def __init__(self, model_args: Qwen3VLModelArgs) -> None:
        super().__init__(model_args)
        self.model_args: Qwen3VLModelArgs = model_args
        blocks: Any = self.layers.values()
        for block in blocks:
            block.attention = Attention(model_args)
        self.mrope = MRoPETables(model_args.mrope_section, model_args.mrope_interleaved)
        self.vision = VisionTower(model_args.vision, model_args.dim)
        self.spread = Spread()

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        super().init_weights(buffer_device)
        self.vision.init_weights()

    def forward(
        self,
        tokens: Tensor,
        attention_masks: Tensor | None = None,
        positions: Tensor | None = None,
        patches: Tensor | None = None,
        places: Tensor | None = None,
        grids: Grids | None = None,
    ) -> Tensor:
        """The logits (bsz, seqlen, vocab_size) of ``tokens`` (bsz, seqlen).

        ``patches`` (patches, patch_dim) are those of the batch's images, then those of its videos, with their
        ``grids`` and their ``places`` (:func:`patch_places`), which are made here if there are none.

        ``positions`` (3, bsz, seqlen), or packed (3, bsz * seqlen), begin anew where another document does, and tokens
        attend to their own document only. Without them a row is one document, and where there are images its positions
        are made here, for which the host waits for the tokens.

        Whether the tokens have a place for each feature is for the dataloader to check, which has them on the host
        (:func:`check_visual_tokens`).
        """
        grids = grids or Grids()
        if positions is not None:
            positions = self.mrope.checked(positions, tokens.shape)
            if attention_masks is None:
                attention_masks = document_mask(positions)
        elif grids:
            positions = position_ids(tokens, grids, self.model_args)
        else:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand(3, *tokens.shape)
        is_text, visual, *deepstack = self.visual_features(tokens, patches, places, grids)

        h = self.tok_embeddings(tokens)  # (bsz, seqlen, dim)
        h = h * is_text + visual
        rope_cache, positions = self.mrope(self.rope_cache, positions, tokens.shape, h.dtype)
        for number, layer in enumerate(self.layers.values()):
            h = layer(h, rope_cache, attention_masks, positions)
            if number < len(deepstack):
                h = h + deepstack[number]
        return self.output(self.norm(h))

    def visual_features(
        self, tokens: Tensor, patches: Tensor | None, places: Tensor | None, grids: Grids
    ) -> tuple[Tensor, ...]:
        """What :class:`Spread` gives of this batch.

        The tower works for a batch of text too, on one block of nothing: its parameters have gradients in every step,
        and with FSDP every rank takes part in gathering them.
        """
        args, merge_size = self.model_args, self.model_args.vision.merge_size
        grids.check(merge_size)
        all_grids = grids.images + grids.videos
        given = {"patches": 0 if patches is None else len(patches)}
        if places is not None:
            given["places"] = len(places)
        for name, count in given.items():
            if count != patches_of(all_grids):
                raise UsageError(f"{count} {name} do not make the {patches_of(all_grids)} of {grids}")
        if patches is None or not all_grids:
            all_grids = ((1, merge_size, merge_size),)
            patches = torch.zeros(args.vision.patches_per_token, args.vision.patch_dim, device=tokens.device)
            places = patch_places(all_grids, merge_size, tokens.device)
        elif places is None:
            places = patch_places(all_grids, merge_size).to(tokens.device)
        features = self.vision(patches, places, all_grids)
        is_image = (tokens == args.image_token_id) & bool(grids.images)
        is_video = (tokens == args.video_token_id) & bool(grids.videos)
        # in the order of the features: all images, then all videos
        image_row = is_image.flatten().cumsum(0).view_as(tokens) - 1
        video_row = is_video.flatten().cumsum(0).view_as(tokens) - 1
        video_row = video_row + patches_of(grids.images) // args.vision.patches_per_token
        row = torch.where(is_video, video_row, image_row).clamp(min=0) * (is_image | is_video)
        return self.spread(features, row, is_image | is_video)
