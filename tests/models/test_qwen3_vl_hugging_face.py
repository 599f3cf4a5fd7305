"""Qwen3-VL loads released weights, computes the logits of transformers, and exports the same files."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint import load as load_checkpoint
from transformers import AutoModelForImageTextToText, Qwen3VLConfig, Qwen3VLMoeConfig

from tests._helpers.qwen3_vl_models import Batch, build, hugging_face_config, make_batch, model_args
from tests._helpers.random_weights import distance, randomise
from torchtitan_npu.models.qwen3_vl import (
    Grids,
    Qwen3VLModel,
    Qwen3VLModelArgs,
    Qwen3VLStateDictAdapter,
    position_ids,
    qwen3_vl_args,
)

TOLERANCE = 1e-5
"""Relative to the largest logit. Float32 rounds by 6e-8. A logit passes about forty sums of up to 128 terms, and
rounding errors add up like a random walk: 6e-8 * sqrt(40 * 128) = 4e-6. The worst logit may be twice as far."""

GRIDS = ("image_grid_thw", "video_grid_thw")
BATCHES = {
    "images, videos and text": ("ivi", "", "v", "iv"),
    "images": ("i", "ii"),
    "a video": ("v",),
    "text": ("", ""),
}


@functools.cache
def hugging_face(moe: bool, tied: bool = False) -> Any:
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}  # plain formulas
    model = AutoModelForImageTextToText.from_config(hugging_face_config(moe, tied), **plain).eval()
    randomise(model, small=("embed_tokens", "bias", "pos_embed"))
    return model


@functools.cache
def released(moe: bool, tied: bool = False) -> dict[str, Tensor]:
    """Return weights as in released files, where the experts are transposed compared with transformers."""
    with tempfile.TemporaryDirectory() as folder:
        hugging_face(moe, tied).save_pretrained(folder)
        weights = load_file(f"{folder}/model.safetensors")
    return {name: w.mT.contiguous() if ".mlp.experts." in name else w for name, w in weights.items()}


def loaded(args: Qwen3VLModelArgs, tied: bool = False) -> Qwen3VLModel:
    """Load all released weights, and no others, into our model."""
    model = build(args)
    weights = Qwen3VLStateDictAdapter(args, None).from_hf(released(args.moe_enabled, tied))
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and all(name.endswith("moe.expert_bias") for name in missing)
    return model


def compare(model: Qwen3VLModel, batch: Batch, moe: bool, tied: bool = False, positions: Tensor | None = None) -> float:
    """Return the distance of the logits, without padding tokens."""
    with torch.no_grad():
        ours = model(**batch.ours(), positions=positions)[batch.mask]
        theirs = hugging_face(moe, tied)(**batch.theirs(), position_ids=positions).logits[batch.mask]
    return distance(ours, theirs)


@pytest.mark.parametrize("kinds", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_qwen3_vl_computes_hugging_faces_logits(moe: bool, kinds: tuple[str, ...]) -> None:
    assert compare(loaded(model_args(moe)), make_batch(1, kinds), moe) <= TOLERANCE


def test_computes_the_same_with_tied_weights() -> None:
    model = loaded(model_args(enable_weight_tying=True), tied=True)
    assert compare(model, make_batch(1, ("iv", "i")), moe=False, tied=True) <= TOLERANCE


def scattered_positions(batch: Batch) -> Tensor:
    """Three different positions for every token. Text has equal ones, and cannot distinguish axes and orders."""
    generator = torch.Generator().manual_seed(3)
    order = torch.rand(*batch.tokens.shape, 200, generator=generator).argsort(dim=-1)
    return order[..., :3].movedim(-1, 0) + 1


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_computes_the_same_with_different_positions_on_all_axes(moe: bool) -> None:
    batch = make_batch(2, ("iv", "vi", ""))
    positions = scattered_positions(batch)
    assert (positions[0] != positions[1]).all() and (positions[1] != positions[2]).all()
    assert compare(loaded(model_args(moe)), batch, moe, positions=positions) <= TOLERANCE


@pytest.mark.parametrize(
    "change",
    [{"mrope_interleaved": False}, {"mrope_section": (4, 8, 4)}, {"mrope_section": (4, 4, 8)}, {"rope_theta": 1e6}],
    ids=str,
)
def test_another_convention_is_detected_in_qwen3_vl(change: dict[str, Any]) -> None:
    batch = make_batch(2, ("iv", "vi", ""))
    model = loaded(model_args(**change))
    assert compare(model, batch, moe=False, positions=scattered_positions(batch)) > 10 * TOLERANCE


@pytest.mark.parametrize("seed", range(100))
def test_positions_are_hugging_faces(seed: int) -> None:
    kinds = list(BATCHES.values())[seed % len(BATCHES)]
    batch = make_batch(seed, kinds)
    arguments = {key: value for key, value in batch.theirs().items() if "pixel" not in key}
    theirs, _ = hugging_face(moe=False).model.get_rope_index(**arguments)
    grids = Grids(*(arguments[name].tolist() if name in arguments else () for name in GRIDS))
    ours = position_ids(arguments["input_ids"], grids, model_args())
    assert torch.equal(ours[:, batch.mask], theirs[:, batch.mask])


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_exports_the_released_qwen3_vl_weights(moe: bool, tied: bool) -> None:
    args = model_args(moe, enable_weight_tying=tied)
    exported = Qwen3VLStateDictAdapter(args, None).to_hf(loaded(args, tied).state_dict())
    assert exported.keys() == released(moe, tied).keys()
    for name, value in released(moe, tied).items():
        assert exported[name].dtype == value.dtype and torch.equal(exported[name], value), name


LARGE_TOWER = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]}
SMALL_TOWER = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}
DECODERS = {
    "2B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
    "30B-A3B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32},
}
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}


@pytest.mark.parametrize("flavor", DECODERS)
def test_flavors_have_the_released_sizes(flavor: str) -> None:
    """The sizes are those of config.json of Qwen/Qwen3-VL-*-Instruct, with transformers' defaults."""
    args = qwen3_vl_args[flavor]
    tied, moe = flavor == "2B", flavor == "30B-A3B"
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    text = {**DECODERS[flavor], "num_key_value_heads": 4 if moe else 8, "head_dim": 128, "rope_parameters": rope}
    text |= EXPERTS if moe else {}
    vision = {**(SMALL_TOWER if tied else LARGE_TOWER), "out_hidden_size": text["hidden_size"]}
    config = (Qwen3VLMoeConfig if moe else Qwen3VLConfig)(
        text_config=text | {"tie_word_embeddings": tied}, vision_config=vision, tie_word_embeddings=tied
    )
    with torch.device("meta"):
        theirs = AutoModelForImageTextToText.from_config(config).state_dict()
        ours = Qwen3VLStateDictAdapter(args, None).to_hf(Qwen3VLModel(args).state_dict())
    shapes = {name: (w.mT if ".mlp.experts." in name else w).shape for name, w in theirs.items()}
    if tied:
        del shapes["lm_head.weight"]
    assert {name: w.shape for name, w in ours.items()} == shapes

    assert (args.n_heads, args.head_dim) == (text["num_attention_heads"], text["head_dim"])
    assert (args.rope_theta, args.mrope_interleaved) == (rope["rope_theta"], rope["mrope_interleaved"])
    assert list(args.mrope_section) == rope["mrope_section"] and args.enable_weight_tying == tied
    assert list(args.vision.deepstack_layers) == vision["deepstack_visual_indexes"]
    tower = config.vision_config
    assert (args.vision.n_heads, args.vision.patch_size) == (tower.num_heads, tower.patch_size)
    assert (args.vision.merge_size, args.vision.frames_per_patch) == (
        tower.spatial_merge_size,
        tower.temporal_patch_size,
    )
    ids = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    assert [getattr(args, name) for name in ids] == [getattr(config, name) for name in ids]
    if moe:
        assert args.moe_args.top_k == text["num_experts_per_tok"] and args.moe_args.route_norm
    assert args.norm_eps == config.text_config.rms_norm_eps and args.vocab_size == config.text_config.vocab_size


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_hugging_face_reads_exported_files(moe: bool, tmp_path: Path) -> None:
    args, batch = model_args(moe), make_batch(1, ("iv", "i"))
    exported = Qwen3VLStateDictAdapter(args, None).to_hf(loaded(args).state_dict())
    save_file({name: value.contiguous() for name, value in exported.items()}, tmp_path / "model.safetensors")
    hugging_face_config(moe).save_pretrained(tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, attn_implementation="eager").eval()
    inputs = batch.theirs()
    with torch.no_grad():
        logits = model(**inputs).logits[batch.mask]
        assert distance(hugging_face(moe)(**inputs).logits[batch.mask], logits) <= TOLERANCE


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_reads_released_files(moe: bool, tmp_path: Path) -> None:
    """Read as TorchTitan's checkpointer does: into the tensors of ``to_hf``, then into the model."""
    args = model_args(moe)
    save_file(released(moe), tmp_path / "model.safetensors")
    adapter, model = Qwen3VLStateDictAdapter(args, None), build(args)
    weights = adapter.to_hf(model.state_dict())
    load_checkpoint(weights, storage_reader=adapter.get_hf_storage_reader(str(tmp_path)))
    model.load_state_dict(adapter.from_hf(weights), strict=False)
    assert compare(model, make_batch(1, ("iv", "i")), moe) <= TOLERANCE
