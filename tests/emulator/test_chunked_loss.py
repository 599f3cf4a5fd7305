"""The chunked loss on the emulated NPU: torch_npu's operator adds the chunks of the weight's gradient."""

from __future__ import annotations

import pytest
import torch

from tests._helpers.linear_cross_entropy import chunked, eager, squared_errors
from torchtitan_npu.components import chunked_loss


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_it_is_as_accurate_as_eager_on_the_cpu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_loss, "VOCABULARY_STEP", 16)  # as many calls as a large vocabulary needs
    ours, theirs = squared_errors(chunked, dtype, "npu"), squared_errors(eager, dtype)
    # in float32 the order of the sums decides about the last digit
    assert (ours <= (1.01 if dtype == torch.bfloat16 else 2) * theirs).all(), (ours, theirs)
