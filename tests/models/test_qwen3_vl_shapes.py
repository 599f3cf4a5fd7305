"""Generated pictures with captions: drawing, packing, and independence of the parallel layout."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.hf_datasets.text_datasets import DATASETS

import torchtitan_npu
from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.config.shipped_files import shipped
from torchtitan_npu.errors import UsageError
from torchtitan_npu.models.qwen3_vl import (
    Grids,
    Qwen3VLModel,
    VisionArgs,
    check_visual_tokens,
    position_ids,
    qwen3_vl_args,
)
from torchtitan_npu.models.qwen3_vl.patch_grids import patch_coordinates, patches_of
from torchtitan_npu.models.qwen3_vl.shapes_dataset import COLOURS, MOVES, SEEDS, SIDES, Picture, draw
from torchtitan_npu.train_specs.qwen3_vl_dataloader import PictureRows, build_image_text_dataloader, collate, patchify

torchtitan_npu.register()

ARGS = qwen3_vl_args["debugmodel"]
TOKENIZER = HuggingFaceTokenizer(shipped("torchtitan_npu/assets/tokenizer"))
SEQ_LEN = 96
UNIT = ARGS.vision.patch_size * ARGS.vision.merge_size


def rows(dataset: str = "shapes", seq_len: int = SEQ_LEN) -> PictureRows:
    return PictureRows(dataset, TOKENIZER, ARGS, seq_len)


def loader(rank: int, ranks: int, local_batch_size: int, **options: Any) -> Any:
    config = JobConfig()
    config.model.name, config.model.flavor = "qwen3_vl", "debugmodel"
    config.training.dataset, config.training.seq_len = "shapes", SEQ_LEN
    config.training.local_batch_size = local_batch_size
    config.npu.layout_independent_data = options.pop("layout_independent_data", True)
    for key, value in options.items():
        setattr(config.training.dataloader, key, value)
    return build_image_text_dataloader(ranks, rank, TOKENIZER, config)


def test_a_picture_is_a_function_of_its_seed() -> None:
    pictures = [draw(f"x/{n}", UNIT, 4) for n in range(100)]
    for number, picture in enumerate(pictures):
        again = draw(f"x/{number}", UNIT, 4)
        assert again.caption == picture.caption and torch.equal(again.frames, picture.frames)
    assert len({picture.caption for picture in pictures}) > 50
    assert 10 < sum(len(picture.frames) > 1 for picture in pictures) < 40


def centre(frame: Tensor, colour: str) -> tuple[float, float]:
    """Return the place of the shape of that colour in a frame (3, height, width), down and right from 0 to 1."""
    is_it = (frame - torch.tensor(COLOURS[colour])[:, None, None]).abs().amax(0) < 1e-6
    assert is_it.any(), f"nothing {colour}"
    down, right = is_it.nonzero().float().mean(0).tolist()
    return down / frame.shape[1], right / frame.shape[2]


def test_captions_describe_the_pictures() -> None:
    seen = set()
    for number in range(200):
        picture = draw(f"y/{number}", UNIT, 4)
        words = picture.caption.removesuffix(".").split()
        first, last = (centre(frame, words[1]) for frame in picture.frames[[0, -1]])
        if "moves" in words:
            step = (last[0] - first[0], last[1] - first[1])
            direction = MOVES[words[-1]]
        elif len(words) > 3:
            second = centre(picture.frames[0], words[-2])
            step = (second[0] - first[0], second[1] - first[1])
            direction = SIDES[" ".join(words[3:-3])]
        else:
            continue
        seen.add(direction)
        assert direction[0] * step[0] + direction[1] * step[1] > 0.2, picture.caption
    assert len(seen) == 4


def test_patches_are_in_the_order_of_the_tower() -> None:
    vision = VisionArgs(patch_size=2, merge_size=2, frames_per_patch=2)
    frames, height, width = 4, 8, 12
    # each pixel has a unique value, with a different thousand per channel
    pixels = torch.arange(frames * height * width).view(frames, 1, height, width)
    picture = Picture((pixels + 1000 * torch.arange(3)[:, None, None]) / 2 + 0.5, "")
    patches, grid = patchify(picture, vision)
    assert grid == (2, 4, 6) and patches.shape == (48, vision.patch_dim)
    for number, (row, column, *size) in enumerate(patch_coordinates([grid], 2).tolist()):
        assert size == [4, 6]
        start = number // 24 * 2
        box = picture.frames[start : start + 2, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
        assert torch.equal(patches[number].view(3, 2, 2, 2), box.transpose(0, 1) * 2 - 1)


def test_an_image_is_repeated_for_the_frames_of_a_patch() -> None:
    vision = VisionArgs(patch_size=2, frames_per_patch=2)
    patches, grid = patchify(Picture(torch.rand(1, 3, 4, 4), ""), vision)
    assert grid == (1, 2, 2)
    one, other = patches.view(4, 3, 2, 4).unbind(2)
    assert torch.equal(one, other)


def test_documents_of_a_packed_row_start_at_position_0() -> None:
    batch, labels = collate([rows()[number] for number in range(6)], ARGS, SEQ_LEN, TOKENIZER.eos_id)
    tokens, positions, grids = batch["input"], batch["positions"], batch["grids"]
    assert tokens.shape == labels.shape == (6, SEQ_LEN) and positions.shape == (3, 6, SEQ_LEN)
    assert batch["patches"].shape == (patches_of(grids.images + grids.videos), ARGS.vision.patch_dim)
    assert grids.images and grids.videos
    visual = torch.tensor([ARGS.image_token_id, ARGS.video_token_id])
    assert torch.isin(tokens, visual).sum() * 4 == batch["patches"].shape[0]
    images, videos = iter(grids.images), iter(grids.videos)
    for row, row_tokens in zip([rows()[number] for number in range(6)], tokens, strict=True):
        assert len(row) > 1
        for document in row:
            if document.is_video:
                assert document.grid == next(videos)
            else:
                assert document.grid == next(images)
            grid = Grids(videos=[document.grid]) if document.is_video else Grids(images=[document.grid])
            assert torch.equal(document.positions, position_ids(document.inputs[None], grid, ARGS)[:, 0])
            assert (document.positions[:, 0] == 0).all()
        assert torch.equal(row_tokens[: len(row[0].inputs)], row[0].inputs)


def test_only_text_has_labels() -> None:
    for number in range(20):
        for document in rows()[number]:
            predicted = document.labels != IGNORE_INDEX
            assert torch.equal(document.labels[predicted][:-1], document.inputs[1:][predicted[:-1]])
            assert document.labels[-1] == TOKENIZER.eos_id
            assert TOKENIZER.decode(document.labels[predicted][:-1].tolist()).endswith(".")
            assert not (document.labels >= ARGS.vision_start_token_id).any()
            assert (document.inputs[1:] >= ARGS.vision_start_token_id).sum() == (~predicted).sum()


def test_a_packed_row_gives_the_results_of_its_documents() -> None:
    args = copy.deepcopy(ARGS)
    args.max_seq_len = SEQ_LEN
    torch.manual_seed(0)
    model = Qwen3VLModel(args)
    row = rows()[3]
    batch, _ = collate([row], ARGS, SEQ_LEN, TOKENIZER.eos_id)
    with torch.no_grad():
        model.init_weights()
        packed = model(batch.pop("input"), **batch)[0]
        start = 0
        for document in row:
            grids = Grids(videos=[document.grid]) if document.is_video else Grids(images=[document.grid])
            alone = model(document.inputs[None], patches=document.patches, grids=grids)[0]
            logits = packed[start : start + len(alone)]
            assert (logits - alone).abs().max() <= 1e-5 * alone.abs().max()
            start += len(alone)


def test_batches_do_not_depend_on_the_layout() -> None:
    whole, whole_labels = next(iter(loader(0, 1, 4)))
    (first, first_labels), (second, second_labels) = (next(iter(loader(rank, 2, 2))) for rank in (0, 1))
    assert torch.equal(torch.cat((first["input"], second["input"])), whole["input"])
    assert torch.equal(torch.cat((first["positions"], second["positions"]), dim=1), whole["positions"])
    assert torch.equal(torch.cat((first_labels, second_labels)), whole_labels)
    halves = [first["grids"], second["grids"]]
    assert sum((half.images for half in halves), ()) == whole["grids"].images != ()
    assert sum((half.videos for half in halves), ()) == whole["grids"].videos != ()
    for key in ("patches", "coordinates"):  # all images, then all videos
        images, videos = zip(
            *(
                batch[key].split([patches_of(batch["grids"].images), patches_of(batch["grids"].videos)])
                for batch in (first, second)
            ),
            strict=True,
        )
        assert torch.equal(torch.cat((*images, *videos)), whole[key])


@pytest.mark.parametrize("workers", [0, 1])
def test_resumes_on_another_layout_from_a_position(workers: int) -> None:
    expected = [labels for (_, labels), _ in zip(loader(0, 1, 4), range(3), strict=False)]
    first = loader(0, 1, 4, num_workers=workers)
    next(iter(first))
    halves = []
    for rank in (0, 1):
        resumed = loader(rank, 2, 2)
        resumed.load_state_dict(first.state_dict())
        halves.append([labels for (_, labels), _ in zip(resumed, range(2), strict=False)])
    for number in (0, 1):
        assert torch.equal(torch.cat([halves[0][number], halves[1][number]]), expected[number + 1])


def test_validation_has_other_pictures() -> None:
    assert not torch.equal(rows()[0][0].patches, rows("shapes_validation")[0][0].patches)


def test_a_text_model_reads_the_captions() -> None:
    for name in ("shapes", "shapes_validation"):
        config = DATASETS[name]
        texts = [config.sample_processor(sample) for sample in config.loader(config.path)]
        assert len(texts) == 1000
        assert texts[:20] == [draw(f"{SEEDS[name]}/{number}", UNIT, 4).caption for number in range(20)]


def test_wrong_options_and_grids_are_errors() -> None:
    with pytest.raises(UsageError, match="seq_len 8 is too short for shapes"):
        rows(seq_len=8)[0]
    with pytest.raises(UsageError, match="num_workers is 2; it must be 0 or 1"):
        loader(0, 1, 2, num_workers=2)
    with pytest.raises(UsageError, match=r"npu\.layout_independent_data must be true with training.dataset 'shapes'"):
        loader(0, 1, 2, layout_independent_data=False)
    with pytest.raises(UsageError, match="multiples of merge_size 2"):
        position_ids(torch.zeros(1, 4, dtype=torch.int64), Grids(images=[(1, 3, 2)]), ARGS)
    with pytest.raises(UsageError, match="the grids have 1 more image frames"):
        position_ids(torch.zeros(1, 4, dtype=torch.int64), Grids(images=[(1, 2, 2)]), ARGS)
    with pytest.raises(UsageError, match=r"token 1 starts an image or frame of grid \(1, 2, 4\), which needs 2 tokens"):
        position_ids(torch.tensor([[5, ARGS.image_token_id, 5]]), Grids(images=[(1, 2, 4)]), ARGS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # a missing token, an extra token, tokens of the other medium, and tokens without an image
        (lambda tokens, grids: (tokens[:, 1:], grids), r"7 image tokens \(2042\), but .* needs 8"),
        (lambda tokens, grids: (tokens[:, [0, *range(12)]], grids), r"9 image tokens \(2042\), but .* needs 8"),
        (lambda tokens, grids: (tokens, Grids(videos=grids.images)), r"8 image tokens \(2042\), but .* needs 0"),
        (lambda tokens, grids: (tokens, Grids()), r"8 image tokens \(2042\), but .* needs 0"),
        (lambda tokens, grids: (tokens, Grids(grids.images, [(2, 2, 2)])), r"0 video tokens \(2043\), but .* needs 2"),
    ],
)
def test_wrong_numbers_of_visual_tokens_are_an_error(change: Any, message: str) -> None:
    tokens = torch.tensor([[ARGS.image_token_id] * 8 + [5] * 4])
    grids = Grids(images=[(1, 2, 4), (1, 4, 6)])
    check_visual_tokens(tokens, grids, ARGS)
    with pytest.raises(UsageError, match=message):
        check_visual_tokens(*change(tokens, grids), ARGS)


def test_a_document_that_lost_tokens_is_an_error() -> None:
    row = rows()[0]
    row[0].inputs[row[0].inputs >= ARGS.image_token_id] = 5
    with pytest.raises(UsageError, match=r"tokens .*, but Grids.* needs"):
        collate([row], ARGS, SEQ_LEN, TOKENIZER.eos_id)
