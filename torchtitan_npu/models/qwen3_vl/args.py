"""Sizes and options of Qwen3-VL: those of Qwen3, of the vision tower, and of MRoPE."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import nn
from torchtitan.config import JobConfig
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs

from torchtitan_npu.config.job_config import with_all_sections
from torchtitan_npu.errors import UsageError
from torchtitan_npu.models.qwen3_vl.shapes_dataset import SEEDS
from torchtitan_npu.ops.mrope import section_problem


@dataclass
class VisionArgs:
    """Sizes of the vision tower."""

    n_layers: int = 27
    dim: int = 1152
    hidden_dim: int = 4304
    n_heads: int = 16
    patch_size: int = 16
    """Side of a patch in pixels."""
    frames_per_patch: int = 2
    """Number of frames in a patch of a video. An image is repeated that many times."""
    channels: int = 3
    merge_size: int = 2
    """``merge_size`` × ``merge_size`` patches are merged into one token of the decoder."""
    n_positions: int = 2304
    """Number of learned positions, a square grid that is interpolated to each image."""
    deepstack_layers: tuple[int, ...] = (8, 16, 24)
    """Layers whose outputs are added to the outputs of the decoder's first layers, in this order."""
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def patch_dim(self) -> int:
        """Number of values in a patch: channels × frames × rows × columns."""
        return self.channels * self.frames_per_patch * self.patch_size**2

    @property
    def patches_per_token(self) -> int:
        return self.merge_size**2


@dataclass
class Qwen3VLModelArgs(Qwen3ModelArgs):
    """Sizes of the decoder and the vision tower, and the tokens that stand for pictures."""

    takes_document_positions: ClassVar[bool] = True
    """Pass positions that start at 0 in each document of a batch, if the data marks where documents end."""

    rope_theta: float = 5000000.0

    mrope_section: tuple[int, ...] = (24, 20, 20)
    """Number of a head's angles that follow a token's position in time, height and width."""

    mrope_interleaved: bool = True
    """Interleave the angles of the three axes (Qwen3-VL); otherwise each axis has a block (Qwen2.5-VL)."""

    vision: VisionArgs = field(default_factory=VisionArgs)

    image_token_id: int = 151655
    """Placeholder token for a merged patch of an image."""
    video_token_id: int = 151656
    """Placeholder token for a merged patch of a video."""
    vision_start_token_id: int = 151652
    vision_end_token_id: int = 151653

    def __post_init__(self) -> None:
        if problem := section_problem(self.mrope_section, self.mrope_interleaved, self.head_dim):
            raise UsageError(problem)
        if self.attn_type != "sdpa":
            raise UsageError(f"attn_type must be 'sdpa', not {self.attn_type!r}: qwen3_vl makes its own document mask")
        if list(self.vision.deepstack_layers) != sorted(set(self.vision.deepstack_layers)):
            raise UsageError(
                f"vision.deepstack_layers {self.vision.deepstack_layers} must increase: the first features are "
                "added to the decoder's first layer"
            )
        deepest = max(self.vision.deepstack_layers, default=0)
        if deepest >= self.vision.n_layers or len(self.vision.deepstack_layers) > self.n_layers:
            raise UsageError(
                f"vision.deepstack_layers {self.vision.deepstack_layers} must be below the tower's "
                f"{self.vision.n_layers} layers, and at most as many as the decoder's {self.n_layers} layers"
            )

    def check_job(self, job_config: JobConfig) -> None:
        """Raise :class:`UsageError` for options of a job that the model does not support, before the start."""
        parallelism = job_config.parallelism
        if parallelism.context_parallel_degree > 1:
            raise UsageError(
                f"parallelism.context_parallel_degree is {parallelism.context_parallel_degree}; it must be 1 for "
                "qwen3_vl: context parallel does not split images and their three-axis positions"
            )
        if parallelism.pipeline_parallel_degree > 1:
            raise UsageError(
                f"parallelism.pipeline_parallel_degree is {parallelism.pipeline_parallel_degree}; it must be 1 for "
                "qwen3_vl: images are not split into microbatches, and later stages would need their features"
            )
        if self.vision.n_heads % parallelism.tensor_parallel_degree:
            raise UsageError(
                f"parallelism.tensor_parallel_degree {parallelism.tensor_parallel_degree} does not divide the "
                f"{self.vision.n_heads} heads of the vision tower"
            )
        self.check_pictures(job_config)

    def check_pictures(self, job_config: JobConfig) -> None:
        """Check the options of datasets of pictures."""
        for name in ("training", "validation") if job_config.validation.enable else ("training",):
            dataset = getattr(job_config, name).dataset
            if dataset.lower() in SEEDS and not with_all_sections(job_config).npu.layout_independent_data:
                raise UsageError(
                    f"npu.layout_independent_data must be true with {name}.dataset {dataset!r}: every rank draws its "
                    "own rows, and TorchTitan's loader splits a stream"
                )
        validation = job_config.validation
        if validation.enable and validation.dataset.lower() in SEEDS and validation.steps == -1:
            raise UsageError("validation.steps must be at least 1: the dataset of pictures is infinite")

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Return the number of parameters, and the decoder's FLOPs per token as TorchTitan counts them.

        The tower's FLOPs are not included: they depend on the images, not on the tokens.
        """
        nparams, flops = super().get_nparams_and_flops(model, seq_len)
        tower = sum(p.numel() for name, p in model.named_parameters() if name.startswith("vision."))
        return nparams, flops - 6 * tower
