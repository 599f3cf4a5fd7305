"""Checkpoints in the Hugging Face format of the Qwen3-VL release.

Three weights are not renamed one to one. A tower layer's queries, keys and values are one matrix there. Patches are
embedded by a convolution. The experts' two input matrices are one, and all expert matrices are transposed.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from torchtitan_npu.models.qwen3_vl.args import Qwen3VLModelArgs

TEXT = {
    "tok_embeddings.weight": "embed_tokens.weight",
    "layers.{}.attention_norm.weight": "layers.{}.input_layernorm.weight",
    "layers.{}.attention.wq.weight": "layers.{}.self_attn.q_proj.weight",
    "layers.{}.attention.wk.weight": "layers.{}.self_attn.k_proj.weight",
    "layers.{}.attention.wv.weight": "layers.{}.self_attn.v_proj.weight",
    "layers.{}.attention.wo.weight": "layers.{}.self_attn.o_proj.weight",
    "layers.{}.attention.q_norm.weight": "layers.{}.self_attn.q_norm.weight",
    "layers.{}.attention.k_norm.weight": "layers.{}.self_attn.k_norm.weight",
    "layers.{}.ffn_norm.weight": "layers.{}.post_attention_layernorm.weight",
    "layers.{}.feed_forward.w1.weight": "layers.{}.mlp.gate_proj.weight",
    "layers.{}.feed_forward.w2.weight": "layers.{}.mlp.down_proj.weight",
    "layers.{}.feed_forward.w3.weight": "layers.{}.mlp.up_proj.weight",
    "layers.{}.moe.router.gate.weight": "layers.{}.mlp.gate.weight",
    "norm.weight": "norm.weight",
}
VISION_MODULES = {
    "layers.{}.attention_norm": "blocks.{}.norm1",
    "layers.{}.attention.wo": "blocks.{}.attn.proj",
    "layers.{}.ffn_norm": "blocks.{}.norm2",
    "layers.{}.feed_forward.w1": "blocks.{}.mlp.linear_fc1",
    "layers.{}.feed_forward.w2": "blocks.{}.mlp.linear_fc2",
    "merger.norm": "merger.norm",
    "merger.w1": "merger.linear_fc1",
    "merger.w2": "merger.linear_fc2",
    "deepstack_mergers.{}.norm": "deepstack_merger_list.{}.norm",
    "deepstack_mergers.{}.w1": "deepstack_merger_list.{}.linear_fc1",
    "deepstack_mergers.{}.w2": "deepstack_merger_list.{}.linear_fc2",
}
TO_HF = {
    "output.weight": "lm_head.weight",
    "vision.pos_embed.weight": "model.visual.pos_embed.weight",
    "vision.patch_embed.bias": "model.visual.patch_embed.proj.bias",
    **{name: f"model.language_model.{hf_name}" for name, hf_name in TEXT.items()},
    **{
        f"vision.{name}.{kind}": f"model.visual.{hf_name}.{kind}"
        for name, hf_name in VISION_MODULES.items()
        for kind in ("weight", "bias")
    },
}
"""The weights that are only renamed: this model's name to Hugging Face's."""
FROM_HF = {hf_name: name for name, hf_name in TO_HF.items()}

CONVOLUTION = ("vision.patch_embed.weight", "model.visual.patch_embed.proj.weight")
QKV = re.compile(r"model\.visual\.blocks\.(\d+)\.attn\.qkv\.(weight|bias)")
EXPERTS = re.compile(r"model\.language_model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj")
NOT_RELEASED = ("moe.expert_bias",)
"""Buffers of expert balancing, which Hugging Face's model does not have."""


NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def _renamed(name: str, names: dict[str, str]) -> str | None:
    new = names.get(NUMBER.sub("{}", name))
    return new and new.format(*NUMBER.findall(name))


class Qwen3VLStateDictAdapter(StateDictAdapter):
    model_args: Qwen3VLModelArgs

    def __init__(self, model_args: Qwen3VLModelArgs, hf_assets_path: str | None) -> None:
        super().__init__(model_args, hf_assets_path)
        self.model_args = model_args

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return Hugging Face's state dict. Joined or transposed weights are copies, others the same tensors."""
        left = {name: value for name, value in state_dict.items() if not name.endswith(NOT_RELEASED)}
        if self.model_args.enable_weight_tying:
            left.pop("output.weight", None)
        hf: dict[str, Any] = {}
        if CONVOLUTION[0] in left:
            vision = self.model_args.vision
            kernel = (vision.channels, vision.frames_per_patch, vision.patch_size, vision.patch_size)
            hf[CONVOLUTION[1]] = left.pop(CONVOLUTION[0]).unflatten(1, kernel)
        for name in [name for name in left if ".attention.wq." in name and name.startswith("vision.")]:
            qkv = [left.pop(name.replace(".wq.", f".{w}.")) for w in ("wq", "wk", "wv")]
            layer, kind = name.split(".")[2], name.rsplit(".", 1)[1]
            hf[f"model.visual.blocks.{layer}.attn.qkv.{kind}"] = torch.cat(qkv)
        for name in [name for name in left if name.endswith(".moe.experts.w1")]:
            # (experts, hidden_dim, dim) twice -> (experts, dim, 2 * hidden_dim); (experts, dim, hidden_dim) transposed
            gate, down, up = (left.pop(f"{name[:-2]}{w}") for w in ("w1", "w2", "w3"))
            experts = f"model.language_model.layers.{name.split('.')[1]}.mlp.experts"
            hf[f"{experts}.gate_up_proj"] = torch.cat((gate.mT, up.mT), dim=-1).contiguous()
            hf[f"{experts}.down_proj"] = down.mT.contiguous()
        for name, value in left.items():
            hf_name = _renamed(name, TO_HF)
            if hf_name is None:
                raise KeyError(f"{name} has no counterpart in Hugging Face's Qwen3-VL")
            hf[hf_name] = value
        return hf

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return this model's state dict from Hugging Face's."""
        state_dict: dict[str, Any] = {}
        for name, value in hf_state_dict.items():
            if name == CONVOLUTION[1]:
                state_dict[CONVOLUTION[0]] = value.flatten(1)
            elif found := QKV.fullmatch(name):
                layer, kind = found.groups()
                for w, part in zip(("wq", "wk", "wv"), value.chunk(3), strict=True):
                    state_dict[f"vision.layers.{layer}.attention.{w}.{kind}"] = part
            elif found := EXPERTS.fullmatch(name):
                experts = f"layers.{found[1]}.moe.experts"
                if found[2] == "down":
                    state_dict[f"{experts}.w2"] = value.mT
                else:
                    gate, up = value.chunk(2, dim=-1)
                    state_dict |= {f"{experts}.w1": gate.mT, f"{experts}.w3": up.mT}
            else:
                new_name = _renamed(name, FROM_HF)
                if new_name is None:
                    raise KeyError(f"{name} has no counterpart in qwen3_vl")
                state_dict[new_name] = value
        if self.model_args.enable_weight_tying and "tok_embeddings.weight" in state_dict:
            state_dict["output.weight"] = state_dict["tok_embeddings.weight"]
        return state_dict
