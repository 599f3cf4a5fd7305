"""Grids of patches: the size of each image and video in patches, the coordinates of patches, the positions of tokens.

A grid is (frames, rows, columns) of patches. The patches of a frame are ordered in blocks, row by row. A block is the
``merge_size`` × ``merge_size`` patches that the tower merges into one token, also row by row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from torchtitan_npu.errors import UsageError
from torchtitan_npu.models.qwen3_vl.args import Qwen3VLModelArgs

Grid = tuple[int, int, int]


class Grids:
    """The grids of a batch's images and of its videos, in the order of their tokens.

    They determine shapes, so they stay on the host when a batch moves to a device. Reading them there would
    synchronise.
    """

    def __init__(self, images: Iterable[Sequence[int]] = (), videos: Iterable[Sequence[int]] = ()) -> None:
        self.images: tuple[Grid, ...] = tuple((int(t), int(h), int(w)) for t, h, w in images)
        self.videos: tuple[Grid, ...] = tuple((int(t), int(h), int(w)) for t, h, w in videos)

    def to(self, *args: object, **kwargs: object) -> Grids:
        return self

    def check(self, merge_size: int) -> None:
        for grid in (*self.images, *self.videos):
            if min(grid) < 1 or grid[1] % merge_size or grid[2] % merge_size:
                raise UsageError(f"grid {grid}: its rows and columns must be multiples of merge_size {merge_size}")

    def __bool__(self) -> bool:
        return bool(self.images or self.videos)

    def __repr__(self) -> str:
        return f"Grids(images={list(self.images)}, videos={list(self.videos)})"


def patches_of(grids: Iterable[Grid]) -> int:
    return sum(t * h * w for t, h, w in grids)


def patch_coordinates(grids: Sequence[Grid], merge_size: int, device: torch.device | None = None) -> Tensor:
    """Return row and column of each patch in its frame, and the frame's rows and columns: (patches, 4) int64."""
    coordinates = []
    for t, h, w in grids:
        rows = torch.arange(h, device=device).view(-1, merge_size)
        columns = torch.arange(w, device=device).view(-1, merge_size)
        # blocks, then patches of a block: (h / merge_size, w / merge_size, merge_size, merge_size)
        row, column = torch.broadcast_tensors(rows[:, None, :, None], columns[None, :, None, :])
        coordinate = torch.stack((row, column, torch.full_like(row, h), torch.full_like(row, w)), dim=-1)
        coordinates.append(coordinate.reshape(-1, 4).repeat(t, 1))
    return torch.cat(coordinates)


def interpolation(coordinates: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Return the 4 of ``side`` × ``side`` learned positions around each patch, and their weights: both (patches, 4).

    This is bilinear interpolation with aligned corners. ``coordinates`` are those of :func:`patch_coordinates`.
    """
    coordinate, size = coordinates.float().chunk(2, dim=-1)  # (patches, 2) each: rows and columns
    coordinate = coordinate * (side - 1) / (size - 1).clamp(min=1)
    low = coordinate.floor()
    far = coordinate - low  # (patches, 2): distance from the lower neighbour, in rows and in columns
    near = torch.stack((1 - far, far), dim=-1)  # (patches, 2, 2)
    neighbours = torch.stack((low, low + 1), dim=-1).long().clamp(max=side - 1)  # (patches, 2, 2)
    index = neighbours[:, 0, :, None] * side + neighbours[:, 1, None, :]
    weight = near[:, 0, :, None] * near[:, 1, None, :]
    return index.flatten(1), weight.flatten(1)


def frame_runs(grids: Sequence[Grid]) -> list[tuple[int, int]]:
    """Return (frames, patches per frame) of each run of frames of one size. Attention stays within a frame."""
    runs: list[tuple[int, int]] = []
    for t, h, w in grids:
        if runs and runs[-1][1] == h * w:
            runs[-1] = (runs[-1][0] + t, h * w)
        else:
            runs.append((t, h * w))
    return runs


def position_ids(tokens: Tensor, grids: Grids, args: Qwen3VLModelArgs) -> Tensor:
    """Return the positions (3, bsz, seqlen) of ``tokens`` (bsz, seqlen), where each row is one document.

    Text tokens have consecutive positions, the same on all three axes. An image or a frame of a video starts at the
    next position p: its time is p, and its rows and columns count from p. The next token's position follows its longer
    side. Each frame of a video is a separate run of tokens, with its time as text in between.
    """
    grids.check(args.vision.merge_size)
    video_frames = ((1, h, w) for t, h, w in grids.videos for _ in range(t))
    frames: dict[int, Iterator[Grid]] = {args.image_token_id: iter(grids.images), args.video_token_id: video_frames}
    rows = [_row(row, frames, args) for row in tokens.tolist()]
    for name, left in zip(("image", "video"), frames.values(), strict=True):
        if extra := list(left):
            raise UsageError(f"the grids have {len(extra)} more {name} frames than the tokens")
    return torch.stack(rows, dim=1).to(tokens.device)


def _row(tokens: list[int], frames: Mapping[int, Iterator[Grid]], args: Qwen3VLModelArgs) -> Tensor:
    parts, index, start = [], 0, 0
    while index < len(tokens):
        token = tokens[index]
        if token in frames:
            grid = next(frames[token], None)
            t, h, w = grid or (0, 0, 0)
            h, w = h // args.vision.merge_size, w // args.vision.merge_size
            length = t * h * w
            if grid is None or tokens[index : index + length] != [token] * length:
                raise UsageError(
                    f"token {index} starts an image or frame of grid {grid}, which needs {length} tokens {token}"
                )
            part = torch.cartesian_prod(torch.arange(t), torch.arange(h), torch.arange(w)).view(-1, 3).T
            advance = max(h, w)
        else:
            end = index
            while end < len(tokens) and tokens[end] not in frames:
                end += 1
            length = advance = end - index
            part = torch.arange(length).expand(3, -1)
        parts.append(part + start)
        index, start = index + length, start + advance
    return torch.cat(parts, dim=1)


def check_visual_tokens(tokens: Tensor, grids: Grids, args: Qwen3VLModelArgs) -> None:
    """Raise unless ``tokens`` (bsz, seqlen) have one placeholder for each feature that the tower makes of ``grids``.

    The data loader calls this on each batch, while the tokens are on the host. In the model the count would synchronise
    with the device. Without the check, missing placeholders would drop features silently.
    """
    grids.check(args.vision.merge_size)
    media = (("image", args.image_token_id, grids.images), ("video", args.video_token_id, grids.videos))
    for name, token, its_grids in media:
        found, needed = int((tokens == token).sum()), patches_of(its_grids) // args.vision.patches_per_token
        if found != needed:
            raise UsageError(f"the batch has {found} {name} tokens ({token}), but {grids} needs {needed}")
