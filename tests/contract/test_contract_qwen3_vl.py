"""Qwen3-VL on fake npu tensors, with images: both rotary converters call their operators, every gradient exists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torchtitan.protocols.train_spec import _extra_train_specs, get_train_spec, register_train_spec

from tests.contract import contract_step as step
from tests.contract.contract_step import Step, check_calls, step_name
from torchtitan_npu.converters.attention import NpuDocumentMask
from torchtitan_npu.layers.documents import CuSeqlens, Documents
from torchtitan_npu.models.qwen3_vl import (
    Grids,
    Qwen3VLModel,
    check_visual_tokens,
    patch_coordinates,
    position_ids,
    qwen3_vl_args,
)
from torchtitan_npu.models.qwen3_vl.patch_grids import patches_of
from torchtitan_npu.planner import Calls, fake_device, fake_ranks

GRIDS = Grids(images=[(1, 32, 48), (1, 16, 16)], videos=[(4, 16, 32)])
LAYERS, TOWER = 3, 3
SMALLER = {"n_layers": LAYERS, "vision.n_layers": TOWER, "vision.deepstack_layers": (0, 1)}
MODELS = {
    "qwen3_vl": ("qwen3_vl_with_images", "8B", SMALLER),
    "qwen3_vl_moe": ("qwen3_vl_with_images", "30B-A3B", {**SMALLER, "moe_args.num_experts": 16}),
}
CONVERTERS = ("npu_rms_norm", "npu_rope", "npu_mrope")


def batch_on_host() -> dict[str, Tensor]:
    """Return a batch on the host: two images and a video in the first row, text in the second."""
    args = qwen3_vl_args["8B"]  # the batch is the same for all flavors
    row = [0] * 100
    for kind, grids in ((args.image_token_id, GRIDS.images), (args.video_token_id, GRIDS.videos)):
        for t, h, w in grids:
            features = [kind] * (h * w // args.vision.patches_per_token)
            row += [args.vision_start_token_id, *features, args.vision_end_token_id, 0] * t
    tokens = torch.zeros(step.BATCH, step.SEQUENCE, dtype=torch.int64)
    tokens[0, : len(row)] = torch.tensor(row)
    check_visual_tokens(tokens, GRIDS, args)
    all_grids = GRIDS.images + GRIDS.videos
    return {
        "tokens": tokens,
        "positions": position_ids(tokens, GRIDS, args),
        "patches": torch.zeros(patches_of(all_grids), args.vision.patch_dim),
        "coordinates": patch_coordinates(all_grids, args.vision.merge_size),
    }


ON_HOST = batch_on_host()


class WithImages(Qwen3VLModel):
    """Make fake batches with the shapes of :data:`ON_HOST`; those of a dry run have tokens only."""

    def forward(self, tokens: Tensor, **_: Any) -> Tensor:  # type: ignore[override]
        assert tokens.shape == ON_HOST["tokens"].shape
        batch = {name: torch.empty(x.shape, dtype=x.dtype, device=tokens.device) for name, x in ON_HOST.items()}
        return super().forward(**batch, grids=GRIDS)


@pytest.fixture(autouse=True)
def models(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    register_train_spec("qwen3_vl_with_images", replace(get_train_spec("qwen3_vl"), model_cls=WithImages))
    for name, model in MODELS.items():
        monkeypatch.setitem(step.MODELS, name, model)
    yield
    del _extra_train_specs["qwen3_vl_with_images"]


def npu_calls(result: Step) -> Counter[str]:
    names = ("npu_rotary_mul", "npu_rotary_mul_backward", "npu_mrope", "npu_rms_norm", "npu_rms_norm_backward")
    return Counter({name: times for name, times in result.calls.count("npu").items() if name in names})


def assert_complete_step(result: Step, converters: tuple[str, ...]) -> None:
    assert result.gradients == {name for name, _ in result.model.named_parameters()}
    calls = npu_calls(result)
    rotated = ("npu_rope" in converters) * 2 * TOWER + ("npu_mrope" in converters) * 2 * LAYERS
    assert calls["npu_rotary_mul"] == calls["npu_rotary_mul_backward"] == rotated
    assert calls["npu_mrope"] == 0  # torch_npu has no gradients for it
    if not any(getattr(block, "moe_enabled", False) for block in result.model.layers.values()):  # type: ignore[union-attr, operator]
        # attention is torch_npu's fused one, in the tower once per frame size, without synchronisation
        assert result.calls.count("npu")["npu_fusion_attention_v3"] == LAYERS + 3 * TOWER
        assert not result.calls.count("aten")["_local_scalar_dense"] and not result.calls.count("aten")["nonzero"]


@pytest.mark.parametrize(
    ("model", "converters"),
    [("qwen3_vl", ()), ("qwen3_vl", ("npu_mrope",)), ("qwen3_vl", CONVERTERS), ("qwen3_vl_moe", CONVERTERS)],
    ids=str,
)
def test_a_step_on_one_device(model: str, converters: tuple[str, ...]) -> None:
    result = step.run_step(model, converters)
    assert_complete_step(result, converters)
    if converters:
        check_calls(step_name(model, only="" if converters == CONVERTERS else converters[0]), result.calls)
    if "npu_rope" in converters:
        assert result.targets["npu_rope"] == TOWER and result.targets["npu_mrope"] == LAYERS + 1


def test_frames_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = NpuDocumentMask()(ON_HOST["positions"]).cu_seqlens_k.integers

    def documents(self: NpuDocumentMask, positions: Tensor) -> Documents:
        """Return the documents of :data:`ON_HOST`; fake tensors have no values to find them by."""
        return Documents(*[CuSeqlens.from_integers(ends, positions.device)] * 2)

    monkeypatch.setattr(NpuDocumentMask, "forward", documents)
    result = step.run_step("qwen3_vl", (*CONVERTERS, "npu_attention"))
    assert result.gradients == {name for name, _ in result.model.named_parameters()}
    assert result.calls.count("npu")["npu_fusion_attention"] == LAYERS + TOWER
    check_calls("qwen3_vl, npu_attention", result.calls)


@pytest.mark.parametrize("in_training", [False, True])
def test_npu_mrope_in_one_call(in_training: bool) -> None:
    """Evaluation, and training with our autograd function."""
    config = step.job("qwen3_vl", CONVERTERS, {})
    config.npu.mrope_in_training = in_training
    with fake_ranks(1):
        if in_training:
            result = step.train_step(config, step.model_args("qwen3_vl", config))
            assert result.gradients == {name for name, _ in result.model.named_parameters()}
            check_calls("qwen3_vl, mrope_in_training", result.calls)
            calls = result.calls
        else:
            from torchtitan.protocols.model_converter import build_model_converters

            model = step._build(config, step.model_args("qwen3_vl", config))
            build_model_converters(config, step.ONE_RANK).convert(model)
            model.to(torch.bfloat16)  # before: a module of fake tensors may not change its dtype
            with fake_device(), torch.no_grad(), Calls() as calls:
                model.to_empty(device="npu")
                model(torch.zeros(2, 2048, dtype=torch.int64, device="npu"))
    counted = calls.count("npu")
    assert counted["npu_mrope"] == (2 * LAYERS if in_training else LAYERS)  # once more in the backward pass
    assert counted["npu_rotary_mul"] == 2 * TOWER
