"""Packed batches of pictures and text that do not depend on the parallel layout.

A row has as many pictures with captions as fit. Each is a document whose positions start at 0. A row is a function of
its number: every rank draws only its rows, and the loader's state is the number of the next row.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import JobConfig
from torchtitan.protocols.train_spec import get_train_spec

from torchtitan_npu.components.checkpoint.restricted_pickle import load_plain
from torchtitan_npu.components.dataloader import (
    LayoutIndependentDataLoader,
    RankBatches,
    build_text_dataloader,
    build_text_validation_dataloader,
    worker_options,
)
from torchtitan_npu.components.validation import Validator
from torchtitan_npu.errors import UsageError
from torchtitan_npu.models.qwen3_vl.args import Qwen3VLModelArgs, VisionArgs
from torchtitan_npu.models.qwen3_vl.patch_grids import Grid, Grids, check_visual_tokens, patch_coordinates, position_ids
from torchtitan_npu.models.qwen3_vl.shapes_dataset import SECONDS_PER_FRAME, SEEDS, Picture, draw


def build_image_text_dataloader(
    dp_world_size: int, dp_rank: int, tokenizer: BaseTokenizer, job_config: JobConfig, infinite: bool = True
) -> BaseDataLoader:
    """Build the training batches of one data-parallel rank, from pictures with captions or from text."""
    if job_config.training.dataset.lower() not in SEEDS:
        return build_text_dataloader(dp_world_size, dp_rank, tokenizer, job_config, infinite)
    return _build("training", dp_world_size, dp_rank, tokenizer, job_config)


def build_image_text_validation_dataloader(
    dp_world_size: int, dp_rank: int, tokenizer: BaseTokenizer, job_config: JobConfig, infinite: bool = False
) -> BaseDataLoader:
    """Build the validation batches of one data-parallel rank, the same at every validation."""
    if job_config.validation.dataset.lower() not in SEEDS:
        return build_text_validation_dataloader(dp_world_size, dp_rank, tokenizer, job_config, infinite)
    return _build("validation", dp_world_size, dp_rank, tokenizer, job_config)


def _build(section: str, dp_world_size: int, dp_rank: int, tokenizer: BaseTokenizer, job_config: JobConfig) -> Any:
    config = getattr(job_config, section)
    options = worker_options(section, job_config)
    args: Any = get_train_spec(job_config.model.name).model_args[job_config.model.flavor]
    args.check_pictures(job_config)  # again: TorchTitan's own entry has no checks before the start
    rows = PictureRows(config.dataset.lower(), tokenizer, args, config.seq_len)
    batches = ImageTextBatches(rows, dp_rank, dp_world_size, config.local_batch_size)
    return LayoutIndependentDataLoader(batches, restart=section == "validation", **options)


@dataclass
class CaptionedPicture:
    """A picture and its caption. Only text tokens have labels."""

    inputs: Tensor
    labels: Tensor
    positions: Tensor
    """(3, tokens)."""
    patches: Tensor
    grid: Grid
    is_video: bool


Row = list[CaptionedPicture]


class PictureRows:
    """The rows of a dataset, indexed by number."""

    def __init__(self, dataset: str, tokenizer: BaseTokenizer, args: Qwen3VLModelArgs, seq_len: int) -> None:
        self.source, self.tokenizer, self.args, self.seq_len = dataset, tokenizer, args, seq_len

    def __getitem__(self, number: int) -> Row:
        """Return as many documents as fit in a row, at least one."""
        row: Row = []
        room = self.seq_len
        for index in count():
            document = self.document(f"{SEEDS[self.source]}/{number}/{index}")
            room -= document.inputs.numel()
            if room < 0:
                break
            row.append(document)
        if not row:
            raise UsageError(
                f"seq_len {self.seq_len} is too short for {self.source}: a document has {-room} more tokens"
            )
        return row

    def document(self, seed: str) -> CaptionedPicture:
        args, vision = self.args, self.args.vision
        picture = draw(seed, vision.patch_size * vision.merge_size, 2 * vision.frames_per_patch)
        patches, grid = patchify(picture, vision)
        is_video = len(picture.frames) > 1
        pad = args.video_token_id if is_video else args.image_token_id
        frame = [args.vision_start_token_id, *[pad] * (grid[1] * grid[2] // vision.patches_per_token)]
        frame.append(args.vision_end_token_id)
        tokens: list[int] = []
        for number in range(grid[0]):
            if is_video:
                # the time at the middle of the merged frames
                seconds = (number + 0.5) * vision.frames_per_patch * SECONDS_PER_FRAME
                tokens += self.encode(f"<{seconds:.1f} seconds>")
            tokens += frame
        tokens += [*self.encode(picture.caption), self.tokenizer.eos_id]
        ids = torch.tensor(tokens)
        inputs, labels = ids[:-1], ids[1:].clone()
        visual = torch.tensor([pad, args.vision_start_token_id, args.vision_end_token_id])
        labels[torch.isin(labels, visual)] = IGNORE_INDEX
        grids = Grids(videos=[grid]) if is_video else Grids(images=[grid])
        return CaptionedPicture(inputs, labels, position_ids(inputs[None], grids, args)[:, 0], patches, grid, is_video)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_bos=False, add_eos=False)


def patchify(picture: Picture, vision: VisionArgs) -> tuple[Tensor, Grid]:
    """Return a picture's patches (patches, patch_dim) in the tower's order, scaled to -1 ... 1, and its grid."""
    frames = picture.frames * 2 - 1
    if len(frames) == 1:
        frames = frames.expand(vision.frames_per_patch, -1, -1, -1)
    size, merge = vision.patch_size, vision.merge_size
    count, channels, height, width = frames.shape
    t, h, w = count // vision.frames_per_patch, height // size, width // size
    blocks = frames.view(t, vision.frames_per_patch, channels, h // merge, merge, size, w // merge, merge, size)
    # order: frame, block, patch in the block; in a patch channels, frames, rows, columns
    patches = blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return patches.reshape(t * h * w, vision.patch_dim), (t, h, w)


def collate(rows: list[Row], args: Qwen3VLModelArgs, seq_len: int, pad: int) -> tuple[dict[str, Any], Tensor]:
    """Return the inputs of :meth:`Qwen3VLModel.forward` for a batch of packed rows, and the labels (bsz, seq_len).

    The end of a row is filled with ``pad`` tokens without labels. Each is a separate document, at position 0.
    """
    tokens = torch.full((len(rows), seq_len), pad)
    labels = torch.full((len(rows), seq_len), IGNORE_INDEX)
    positions = torch.zeros(3, len(rows), seq_len, dtype=torch.int64)
    for number, row in enumerate(rows):
        end = sum(document.inputs.numel() for document in row)
        tokens[number, :end] = torch.cat([document.inputs for document in row])
        labels[number, :end] = torch.cat([document.labels for document in row])
        positions[:, number, :end] = torch.cat([document.positions for document in row], dim=1)
    documents = [document for row in rows for document in row]
    images = [document for document in documents if not document.is_video]
    videos = [document for document in documents if document.is_video]
    grids = Grids([document.grid for document in images], [document.grid for document in videos])
    check_visual_tokens(tokens, grids, args)
    inputs = {
        "input": tokens,
        "positions": positions,
        "patches": torch.cat([document.patches for document in images + videos]),
        "coordinates": patch_coordinates(grids.images + grids.videos, args.vision.merge_size),
        "grids": grids,
    }
    return inputs, labels


class ImageTextBatches(RankBatches):
    """The batches of one rank, each with the position to resume from after it."""

    def __init__(self, rows: PictureRows, dp_rank: int, dp_world_size: int, local_batch_size: int) -> None:
        super().__init__(rows, dp_rank, dp_world_size, local_batch_size)  # type: ignore[arg-type] # a text source there
        self.rows, self.next_row = rows, 0

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Tensor, bytes]]:
        while True:
            rows = [self.rows[self.next_row + number] for number in self.of_rank]
            self.next_row += self.global_size
            pad: int = self.rows.tokenizer.eos_id  # type: ignore[assignment]
            yield *collate(rows, self.rows.args, self.rows.seq_len, pad), self.position

    @property
    def position(self) -> bytes:
        return pickle.dumps({"source": self.rows.source, "row": self.next_row})

    @position.setter
    def position(self, position: bytes) -> None:
        self.next_row = load_plain(position)["row"]


class ImageTextValidator(Validator):
    """Validation on pictures with captions, or on text."""

    build_dataloader = staticmethod(build_image_text_validation_dataloader)
