"""The forward of a converted gpt_oss on the CPU, where flex attention has no gradient."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from tests._helpers.converted_models import BATCH, SEQUENCE, assert_no_further, build

WINDOW = 4
ALL = ("npu_rms_norm", "npu_rope", "npu_permute", "npu_gmm")


def forward(*converters: str, dtype: torch.dtype = torch.float32) -> Tensor:
    model = build("gpt_oss", *converters, dtype=dtype, n_layers=2, vocab_size=512)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".moe." in name or ".attention." in name:  # initial weights would hide the blocks behind the embedding
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    for module in model.modules():
        if hasattr(module, "use_grouped_mm"):
            module.use_grouped_mm = False
    size = (None, None, SEQUENCE, SEQUENCE)
    masks = {
        "basic_mask": create_block_mask(lambda b, h, q, k: q >= k, *size, device="cpu"),
        "sliding_window_mask": create_block_mask(lambda b, h, q, k: (q >= k) & (q - k < WINDOW), *size, device="cpu"),
    }
    tokens = torch.randint(0, 512, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1))
    # eager: TorchTitan would autotune flex attention for minutes
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        return model(tokens, masks)


def test_a_converted_gpt_oss_computes_the_same() -> None:
    assert_no_further("logits", forward(*ALL), forward(), forward(dtype=torch.float64))
