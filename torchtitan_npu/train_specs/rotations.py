"""The rotations of TorchTitan's models. Importing this module registers them for ``npu_rope``.

In TorchTitan 0.2.2 every model has its own ``apply_rotary_emb``. Between the model's forward and that call, positions
and angles are only passed on.
"""

from __future__ import annotations

from torchtitan.models.deepseek_v3.model import model as deepseek_v3
from torchtitan.models.gpt_oss.model import model as gpt_oss
from torchtitan.models.llama3.model import model as llama3
from torchtitan.models.llama4.model import model as llama4
from torchtitan.models.qwen3.model import model as qwen3

from torchtitan_npu.layers.rotary.registry import register_passthrough_package, register_rotation
from torchtitan_npu.layers.rotary.tables import HALF, INTERLEAVE

register_rotation(llama3.apply_rotary_emb, INTERLEAVE, tensors=2)
register_rotation(
    llama4.apply_rotary_emb,
    INTERLEAVE,
    tensors=2,
    runs_in=lambda module: getattr(module, "use_rope", True),  # every n-th layer has no rotation
)
register_rotation(deepseek_v3.apply_rotary_emb, INTERLEAVE, tensors=1)
register_rotation(qwen3.apply_rotary_emb, HALF, tensors=2)
register_rotation(gpt_oss.apply_rotary_emb, HALF, tensors=2)

for module in (llama3, llama4, deepseek_v3, qwen3, gpt_oss):
    register_passthrough_package(module.__name__)
