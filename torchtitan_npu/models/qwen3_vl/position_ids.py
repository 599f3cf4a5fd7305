"""Positions of tokens in time, height and width."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from torchtitan_npu.errors import UsageError
from torchtitan_npu.models.qwen3_vl.args import Qwen3VLModelArgs
from torchtitan_npu.models.qwen3_vl.patch_grids import Grid, Grids, patches_of


def position_ids(tokens: Tensor, grids: Grids, args: Qwen3VLModelArgs) -> Tensor:
    """Return the positions (3, bsz, seqlen) of ``tokens`` (bsz, seqlen), where each row is one document.

    Text tokens have consecutive positions, the same on all three axes. An image or a frame of a video starts at the
    next position p: its time is p, and its rows and columns count from p. The next token's position follows its longer
    side. Each frame of a video is a separate run of tokens, with its time as text in between.
    """
    grids.check(args.vision.merge_size)
    frames = {args.image_token_id: iter(grids.images), args.video_token_id: iter(_frames(grids.videos))}
    rows = [_row(row, frames, args) for row in tokens.tolist()]
    for name, left in zip(("image", "video"), frames.values(), strict=True):
        if extra := list(left):
            raise UsageError(f"the grids have {len(extra)} more {name} frames than the tokens")
    return torch.stack(rows, dim=1).to(tokens.device)


def _frames(videos: tuple[Grid, ...]) -> list[Grid]:
    return [(1, h, w) for t, h, w in videos for _ in range(t)]


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
