"""Checkpoints in the Hugging Face format of the DeepSeek-V3.2 release."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torchtitan.models.deepseek_v3.model.state_dict_adapter import DeepSeekV3StateDictAdapter

from torchtitan_npu.dist_utils import local
from torchtitan_npu.errors import UsageError
from torchtitan_npu.models.deepseek_v32.args import DeepSeekV32ModelArgs

INDEXER = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")
MTP = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head.norm": "final_norm"}
SHARED_WITH_MTP = {"model.embed_tokens.weight": "embed_tokens.weight", "lm_head.weight": "shared_head.head.weight"}
"""Weights that DeepSeek's release repeats in each layer of multi-token prediction, under these names."""
SCALE = "_scale_inv"
INDEX = "model.safetensors.index.json"


class DeepSeekV32StateDictAdapter(DeepSeekV3StateDictAdapter):
    """TorchTitan's adapter for DeepSeek-V3, with the weights of the indexer and of multi-token prediction.

    With ``checkpoint.initial_load_in_hf_quantized``, the storage reader dequantises the released FP8 weights, which
    have a scale for each 128 × 128 block. It reads only this rank's shards of the model.

    Weights are read into the model's own memory: :meth:`to_hf` returns views of it, which :meth:`from_hf` recognises.
    TorchTitan's adapter stacks the experts' views into new tensors, which needs the memory of all experts twice.
    """

    fqn_to_index_mapping: dict[Any, int] | None

    def __init__(self, model_args: DeepSeekV32ModelArgs, hf_assets_path: str | None) -> None:
        super().__init__(model_args, hf_assets_path)
        self.from_hf_map |= {
            f"model.layers.{{}}.self_attn.indexer.{name}": f"layers.{{}}.attention.indexer.{name}" for name in INDEXER
        }
        self.from_hf_map |= {
            f"model.layers.{{}}.{hf_name}.weight": f"layers.{{}}.{name}.weight" for hf_name, name in MTP.items()
        }
        self.has_indexer = model_args.has_indexer
        self.mtp_layers = range(model_args.n_layers, model_args.n_layers + model_args.n_mtp_layers)
        self.repeated = SHARED_WITH_MTP if model_args.mtp_repeats_embeddings else {}
        if self.fqn_to_index_mapping:
            # the file of each weight when the model is saved: as released, without weights that this model lacks
            self.fqn_to_index_mapping = {
                name: file for name, file in self.fqn_to_index_mapping.items() if self._is_saved(name)
            }
        self.experts: WeakValueDictionary[str, Tensor] = WeakValueDictionary()
        """Stacked expert weights that :meth:`to_hf` has split, by name, while they exist."""

    def _is_saved(self, name: str) -> bool:
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if name.endswith(SCALE):
            return False
        if layer is None:
            return True
        if _is_repeated(name) and not self.repeated:
            return False
        number = int(layer[1])
        return number < self.mtp_layers.stop and (".indexer." not in name or self.has_indexer(number))

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> HuggingFaceStorageReader:
        index = Path(path, INDEX)
        if from_quantized and not index.exists():
            raise UsageError(f"{path} has no {INDEX}, which maps quantised weights to their scales")
        if not from_quantized:
            _check_no_scales(_tensor_names(Path(path)))
        return super().get_hf_storage_reader(path, from_quantized)

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        experts = {name: value for name, value in state_dict.items() if ".moe.experts." in name and not value.is_meta}
        self.experts.update(experts)
        hf_state_dict = super().to_hf(state_dict)
        for layer in self.mtp_layers:
            for name, repeated in self.repeated.items():
                if name in hf_state_dict:  # cloned: safetensors files cannot hold one storage under two names
                    hf_state_dict[f"model.layers.{layer}.{repeated}"] = hf_state_dict[name].clone()
        return hf_state_dict

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        _check_no_scales(hf_state_dict)
        remaining = {name: value for name, value in hf_state_dict.items() if not _is_repeated(name)}
        state_dict = {}
        for name, value in self.experts.items():
            views = super().to_hf({name: value})
            if all(one in remaining and _is_same_memory(remaining[one], view) for one, view in views.items()):
                state_dict[name] = value
                for expert in views:
                    del remaining[expert]
        return state_dict | super().from_hf(remaining)


def _is_repeated(name: str) -> bool:
    return name.startswith("model.layers.") and name.endswith(tuple(SHARED_WITH_MTP.values()))


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    one, other = local(one), local(other)
    alike = one.dtype == other.dtype and one.shape == other.shape and one.device == other.device
    return alike and one.data_ptr() == other.data_ptr()


def _tensor_names(folder: Path) -> list[str]:
    """Return the names of the tensors in the safetensors files of ``folder``."""
    if (folder / INDEX).exists():
        return list(json.loads((folder / INDEX).read_text())["weight_map"])
    names: list[str] = []
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names += file.keys()
    return names


def _check_no_scales(names: Any) -> None:
    """Raise if ``names`` has scales: read without them, quantised weights would have wrong values."""
    scales = [name for name in names if name.endswith(SCALE)]
    if scales:
        raise UsageError(
            f"{scales[0].removesuffix(SCALE)} and {len(scales) - 1} more weights are quantised: set "
            "checkpoint.initial_load_in_hf_quantized = true to read them with their scales"
        )
