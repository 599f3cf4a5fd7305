"""Checkpoints in Hugging Face's format, as DeepSeek-V3.2 is released."""

from __future__ import annotations

from torchtitan.models.deepseek_v3.model.state_dict_adapter import DeepSeekV3StateDictAdapter

from torchtitan_npu.models.deepseek_v32.args import DeepSeekV32ModelArgs

INDEXER = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")


class DeepSeekV32StateDictAdapter(DeepSeekV3StateDictAdapter):
    """TorchTitan's for DeepSeek-V3, with the indexer's weights.

    The release's FP8 weights, a scale for each 128 × 128 of them, come in float32 from the storage reader it chooses
    (``checkpoint.initial_load_in_hf_quantized``), which reads no more of a file than a rank's part of the model.
    """

    def __init__(self, model_args: DeepSeekV32ModelArgs, hf_assets_path: str | None) -> None:
        super().__init__(model_args, hf_assets_path)
        self.from_hf_map |= {
            f"model.layers.{{}}.self_attn.indexer.{name}": f"layers.{{}}.attention.indexer.{name}" for name in INDEXER
        }
