"""Tiny random Qwen3-VL models and batches, for this package and for Hugging Face."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, Qwen3VLConfig, Qwen3VLMoeConfig

from tests._helpers.tiny_experts import softmax_experts
from torchtitan_npu.models.qwen3_vl import Grids, Qwen3VLModel, Qwen3VLModelArgs, VisionArgs

IMAGE, VIDEO, START, END = 90, 91, 92, 93
TEXT = 80
"""Ids below are text tokens."""
SECTION = (8, 4, 4)
"""Time has more angles than the other axes, so some follow the last interleaved triple."""


def model_args(moe: bool = False, **changes: Any) -> Qwen3VLModelArgs:
    vision = VisionArgs(
        n_layers=3, dim=32, hidden_dim=40, n_heads=2, patch_size=4, n_positions=25, deepstack_layers=(0, 2)
    )
    args = Qwen3VLModelArgs(
        vocab_size=100,
        dim=48,
        n_layers=3,
        n_heads=4,
        n_kv_heads=2,
        head_dim=32,
        hidden_dim=56,
        max_seq_len=256,
        mrope_section=SECTION,
        moe_enabled=moe,
        moe_inter_dim=28,
        moe_args=softmax_experts(num_experts=6, top_k=2),
        vision=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    return replace(args, **changes)


def hugging_face_config(moe: bool = False, tied: bool = False) -> PretrainedConfig:
    """Return Hugging Face's config of the same sizes."""
    text = {
        "vocab_size": 100,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": list(SECTION)},
        "intermediate_size": 56,
        "tie_word_embeddings": tied,
    }
    if moe:
        text |= {"moe_intermediate_size": 28, "num_experts": 6, "num_experts_per_tok": 2}
    vision = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": 48,
        "num_position_embeddings": 25,
        "deepstack_visual_indexes": [0, 2],
    }
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
    cls = Qwen3VLMoeConfig if moe else Qwen3VLConfig
    return cls(text_config=text, vision_config=vision, tie_word_embeddings=tied, **ids)


def build(args: Qwen3VLModelArgs) -> Qwen3VLModel:
    """Build our model with its buffers in float32."""
    with torch.device("meta"):
        model = Qwen3VLModel(args)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    return model


@dataclass
class Batch:
    """Rows of text, images and videos of different lengths and grids, padded at the right."""

    tokens: Tensor
    mask: Tensor
    """True for tokens that are not padding."""
    grids: Grids
    image_patches: Tensor
    video_patches: Tensor

    @property
    def patches(self) -> Tensor:
        return torch.cat((self.image_patches, self.video_patches))

    def ours(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "patches": self.patches, "grids": self.grids}

    def theirs(self) -> dict[str, Any]:
        """Return the batch as Hugging Face's arguments."""
        inputs = {"input_ids": self.tokens, "attention_mask": self.mask.long(), "mm_token_type_ids": self.kinds()}
        if self.grids.images:
            inputs |= {"pixel_values": self.image_patches, "image_grid_thw": torch.tensor(self.grids.images)}
        if self.grids.videos:
            inputs |= {"pixel_values_videos": self.video_patches, "video_grid_thw": torch.tensor(self.grids.videos)}
        return inputs

    def kinds(self) -> Tensor:
        return ((self.tokens == IMAGE).int() + 2 * (self.tokens == VIDEO).int()) * self.mask


def make_batch(seed: int, kinds: tuple[str, ...], patch_dim: int = 96) -> Batch:
    """Make a batch whose rows have text and the images ("i") and videos ("v") of an element of ``kinds``."""
    rng = random.Random(seed)
    rows: list[list[int]] = []
    grids: dict[str, list[tuple[int, int, int]]] = {"i": [], "v": []}

    def words(least: int) -> list[int]:
        return [rng.randrange(TEXT) for _ in range(rng.randint(least, 5))]

    for kind in kinds:
        row = words(0)
        for what in kind:
            frames = rng.randint(2, 3) if what == "v" else 1
            grid = (frames, 2 * rng.randint(1, 3), 2 * rng.randint(1, 4))
            grids[what].append(grid)
            for _ in range(frames):
                row += [*words(1), START, *[{"i": IMAGE, "v": VIDEO}[what]] * (grid[1] * grid[2] // 4), END]
        rows.append([*row, *words(1)])
    length = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows]).bool()
    generator = torch.Generator().manual_seed(seed)
    patches = [torch.randn(sum(t * h * w for t, h, w in grids[kind]), patch_dim, generator=generator) for kind in "iv"]
    return Batch(tokens, mask, Grids(grids["i"], grids["v"]), *patches)
