"""Released checkpoints of DeepSeek-V3.2, in FP8 and with multi-token prediction, on disk and in memory."""

from __future__ import annotations

import copy
import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from tests._helpers import layouts
from tests._helpers.deepseek_v32_models import build
from tests._helpers.multirank import run_on_ranks
from tests._helpers.peak_allocation import NewMemory
from tests._helpers.released_checkpoints import INDEX, exported, mtp_args, quantised, read_back, write
from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.config.shipped_files import shipped
from torchtitan_npu.errors import UsageError
from torchtitan_npu.models.deepseek_v32 import (
    DeepSeekV32Model,
    DeepSeekV32ModelArgs,
    DeepSeekV32StateDictAdapter,
    deepseekv32_args,
)
from torchtitan_npu.models.glm_moe_dsa import GlmMoeDsaModelArgs


def empty(args: DeepSeekV32ModelArgs) -> DeepSeekV32Model:
    model = build(args)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def load(args: DeepSeekV32ModelArgs, folder: Path, in_fp8: bool = False) -> dict[str, Tensor]:
    """Load weights as TorchTitan does, and return the model's weights in the release's format."""
    model, adapter = empty(args), DeepSeekV32StateDictAdapter(args, None)
    state_dict = model.state_dict()
    wanted = adapter.to_hf(state_dict)
    dcp.load(wanted, storage_reader=adapter.get_hf_storage_reader(str(folder), in_fp8))
    model.load_state_dict(adapter.from_hf(wanted), strict=True)
    return adapter.to_hf(model.state_dict())


def test_multi_token_prediction_has_the_released_names() -> None:
    weights, without = exported(mtp_args(1)), exported(mtp_args(0))
    main = [name for name in weights if not name.startswith("model.layers.3.")]
    assert main == list(without)
    further = {name.removeprefix("model.layers.3.") for name in weights if name not in main}
    of_a_block = {name.removeprefix("model.layers.2.") for name in without if name.startswith("model.layers.2.")}
    own = {"eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight"}
    assert further == of_a_block | own | {"embed_tokens.weight", "shared_head.head.weight"}
    assert torch.equal(weights["model.layers.3.embed_tokens.weight"], weights["model.embed_tokens.weight"])
    assert torch.equal(weights["model.layers.3.shared_head.head.weight"], weights["lm_head.weight"])


GLM = {"args_class": GlmMoeDsaModelArgs, "index_topk_pattern": "FS", "n_layers": 2}
"""GLM-5, with one indexer for two layers."""

GLM_LAYER_78 = {
    "eh_proj.weight",
    "enorm.weight",
    "hnorm.weight",
    "shared_head.norm.weight",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "self_attn.q_a_proj.weight",
    "self_attn.q_a_layernorm.weight",
    "self_attn.q_b_proj.weight",
    "self_attn.kv_a_proj_with_mqa.weight",
    "self_attn.kv_a_layernorm.weight",
    "self_attn.kv_b_proj.weight",
    "self_attn.o_proj.weight",
    "self_attn.indexer.wq_b.weight",
    "self_attn.indexer.wk.weight",
    "self_attn.indexer.k_norm.weight",
    "self_attn.indexer.k_norm.bias",
    "self_attn.indexer.weights_proj.weight",
    "mlp.gate.weight",
    "mlp.gate.e_score_correction_bias",
    "mlp.shared_experts.gate_proj.weight",
    "mlp.shared_experts.up_proj.weight",
    "mlp.shared_experts.down_proj.weight",
}
"""Released names of GLM-5's layer of multi-token prediction, without those of the 256 routed experts: 791 in all."""


def test_glm_has_the_released_names_of_multi_token_prediction(tmp_path: Path) -> None:
    """The embedding and the output weights are not repeated, unlike in DeepSeek's release."""
    args = mtp_args(1, **GLM)
    weights = exported(args)
    further = {name.removeprefix("model.layers.2.") for name in weights if name.startswith("model.layers.2.")}
    assert {name for name in further if ".experts." not in name} == GLM_LAYER_78
    write(weights, tmp_path)
    loaded = load(args, tmp_path)
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], value) for name, value in weights.items())

    # a checkpoint to which the two weights were added, as some inference engines need it
    write(weights | {"model.layers.2.embed_tokens.weight": weights["model.embed_tokens.weight"].clone()}, tmp_path)
    assert load(args, tmp_path).keys() == weights.keys()
    saved = DeepSeekV32StateDictAdapter(args, str(tmp_path)).fqn_to_index_mapping
    assert saved is not None and saved.keys() == weights.keys()


@pytest.mark.parametrize(("depths", "model"), [(0, {}), (1, {}), (2, {}), (1, GLM)])
def test_exports_the_released_deepseek_weights(depths: int, model: dict[str, Any]) -> None:
    args = mtp_args(depths, **model)
    weights = exported(args)
    zeros, adapter = empty(args), DeepSeekV32StateDictAdapter(args, None)
    zeros.load_state_dict(adapter.from_hf(weights), strict=True)
    again = adapter.to_hf(zeros.state_dict())
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name], value) for name, value in weights.items())


@pytest.mark.parametrize(
    ("depths", "model"), [(1, {}), (0, {}), (1, GLM)], ids=["with multi-token prediction", "without it", "glm_moe_dsa"]
)
def test_reads_weights_in_fp8(depths: int, model: dict[str, Any], tmp_path: Path) -> None:
    """Weights are quantised in blocks of 128 × 128, as released. The last blocks of these matrices are smaller.

    The release has a layer of multi-token prediction, even if the model does not use it.
    """
    sizes = {"dim": 144, "moe_inter_dim": 136, "q_lora_rank": 130, "kv_lora_rank": 132, "n_layers": 2, "num_experts": 4}
    released_args, args = (mtp_args(n, **{**model, **sizes}, num_expert_groups=None) for n in (1, depths))
    file, expected = quantised(exported(released_args))
    assert any(len(scales) > 1 for name, scales in file.items() if "indexer" in name and name.endswith("scale_inv"))
    write(file, tmp_path)

    loaded = load(args, tmp_path, in_fp8=True)
    assert any(name.startswith("model.layers.2.") for name in loaded) == bool(depths)
    for name, value in loaded.items():
        assert torch.equal(value, expected[name]), name


def test_reading_quantised_weights_as_plain_ones_is_an_error(tmp_path: Path) -> None:
    args = mtp_args(0)
    weights = exported(args) | {"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(1, 1)}
    says = r"model\.layers\.0\.mlp\.up_proj\.weight .* checkpoint\.initial_load_in_hf_quantized"
    with pytest.raises(UsageError, match=says):
        DeepSeekV32StateDictAdapter(args, None).from_hf(weights)
    write(weights, tmp_path)
    with pytest.raises(UsageError, match=says):
        load(args, tmp_path)
    (tmp_path / INDEX).unlink()  # the headers of the files have the names too
    with pytest.raises(UsageError, match=says):
        load(args, tmp_path)
    with pytest.raises(UsageError, match=INDEX):
        load(args, tmp_path, in_fp8=True)


SMALL = {"n_layers": 2, "dim": 64, "inter_dim": 128, "moe_inter_dim": 1024, "q_lora_rank": 24, "index_head_dim": 16}
TINY = SMALL | {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "vocab_size": 2048}


def load_and_export(layout: dict[str, int], source: str, folder: str) -> tuple[int, int]:
    """Load on this rank as a job does; return the memory that loading needs, and the model's."""
    from torchtitan.protocols.train_spec import get_train_spec

    import torchtitan_npu.trainer as trainer_module

    flavors: Any = get_train_spec("deepseek_v32").model_args
    flavors["tiny"] = dataclasses.replace(copy.deepcopy(flavors["debugmodel"]), **TINY)
    options = {
        "model.name": "deepseek_v32",
        "model.flavor": "tiny",
        "model.hf_assets_path": source,
        "mtp.layers": 1,
        "job.dump_folder": folder,
        "training.steps": 1,
        "checkpoint.enable": True,
        "checkpoint.initial_load_in_hf": True,
        "checkpoint.last_save_in_hf": True,
        "checkpoint.last_save_model_only": True,
    }
    trainer = trainer_module.Trainer(layouts.job_config("deepseek_v3", layout, options))
    with NewMemory() as memory:
        trainer.checkpointer.load()
    trainer.checkpointer.save(1, last_step=True)
    trainer.close()
    weights = [p.to_local() if hasattr(p, "to_local") else p for p in trainer.model_parts[0].parameters()]
    return memory.peak, sum(weight.nbytes for weight in weights)


@pytest.mark.parametrize(
    "layout", [{}, pytest.param({"ep": 2}, marks=pytest.mark.slow)], ids=["one rank", "fsdp2 and ep2"]
)
def test_loads_into_the_models_own_memory_and_exports_the_same(layout: dict[str, int], tmp_path: Path) -> None:
    """The release has one more layer of multi-token prediction than the model."""
    args = dataclasses.replace(copy.deepcopy(deepseekv32_args["debugmodel"]), **TINY)
    config = JobConfig()
    config.mtp.layers = 2
    args.update_from_config(config)
    weights = exported(args)
    source, ranks = tmp_path / "released", 2 if layout else 1
    shutil.copytree(shipped("torchtitan_npu/assets/tokenizer"), source)
    write(weights, source, files=3 if layout else 1)
    weights = {name: value for name, value in weights.items() if not name.startswith("model.layers.3.")}
    for taken, model in run_on_ranks(
        ranks, load_and_export, layout, str(source), str(tmp_path / "job"), process_group=False
    ):
        # the repeated weights (two matrices of 2048 × 64), and one or two weights being read
        repeated = 2 * weights["lm_head.weight"].nbytes // ranks
        largest = max(weight.nbytes for weight in weights.values())
        assert taken <= repeated + 2 * largest < model / 2
    (export,) = (tmp_path / "job").glob("checkpoint/step-1")
    again = read_back(export)
    assert again.keys() == weights.keys() and (export / INDEX).exists()
    assert [name for name, value in weights.items() if not torch.equal(again[name], value)] == []
