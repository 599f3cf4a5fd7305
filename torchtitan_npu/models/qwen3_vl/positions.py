"""Where each token is, in time, height and width; and which documents a packed row holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from torchtitan_npu.errors import UsageError
from torchtitan_npu.models.qwen3_vl.args import Qwen3VLModelArgs
from torchtitan_npu.models.qwen3_vl.grids import Grid, Grids, patches_of


def position_ids(tokens: Tensor, grids: Grids, args: Qwen3VLModelArgs) -> Tensor:
    """The positions (3, bsz, seqlen) of ``tokens`` (bsz, seqlen), each row one document.

    Text counts on, alike on the three axes. An image or a frame of a video begins at the next position: it has that as
    its time, and its rows and columns are counted from there; what follows it begins after its longer side. Each frame
    of a video is a run of tokens of its own, with text between them that says when it was.
    """
    grids.check(args.vision.merge_size)
    frames = {args.image_token_id: iter(grids.images), args.video_token_id: iter(_frames(grids.videos))}
    rows = [_row(row, frames, args) for row in tokens.tolist()]
    for name, left in zip(("image", "video"), frames.values(), strict=True):
        if extra := list(left):
            raise UsageError(f"grids for {len(extra)} {name} frames more than the tokens have places for")
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
                    f"token {index} begins an image or frame of grid {grid}: {length} tokens {token} wanted"
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
    """Raise unless ``tokens`` (bsz, seqlen) have a place for each feature that the tower makes of ``grids``.

    A dataloader calls it on each batch, where the tokens still are on the host. The model, which gets positions made
    already, would have to wait for the device to count them: with fewer tokens features would be left out silently,
    with more there would be none for the last ones.
    """
    grids.check(args.vision.merge_size)
    kinds = (("image", args.image_token_id, grids.images), ("video", args.video_token_id, grids.videos))
    for name, number, of_kind in kinds:
        found, wanted = int((tokens == number).sum()), patches_of(of_kind) // args.vision.patches_per_token
        if found != wanted:
            raise UsageError(f"{found} {name} tokens ({number}) in a batch whose {grids} want {wanted} of them")


def document_mask(positions: Tensor) -> Tensor:
    """Which keys a query sees (bsz, 1, seqlen, seqlen): those before it in its own document.

    ``positions`` (3, bsz, seqlen) begin anew with each document, and nowhere else are all three 0.
    """
    document = (positions == 0).all(dim=0).cumsum(dim=-1)  # (bsz, seqlen)
    same = document.unsqueeze(-1) == document.unsqueeze(-2)
    return same.tril().unsqueeze(1)
