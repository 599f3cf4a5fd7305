"""MXFP8 quantization in Triton, bit by bit the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests._helpers.mxfp8_values import both_elements, both_modes, random_values
from tests.gpu_kernels.kernel_checks import has_strides_of, on
from torchtitan_npu.ops import OPS

QUANT, GROUPED = OPS["npu_dynamic_mx_quant"], OPS["npu_grouped_dynamic_mx_quant"]


def assert_bits(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(actual[0].cpu().view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(actual[1].cpu(), expected[1])


@both_modes
@both_elements
@pytest.mark.parametrize("shape, axis", [((5, 96), -1), ((3, 100), 1), ((70, 33), 0), ((2, 64, 140), 1), ((0, 32), 0)])
def test_quantization(device: str, shape: tuple[int, ...], axis: int, dst_type: int, scale_alg: int) -> None:
    x = random_values(*shape, dtype=torch.float32)
    if x.numel():
        x.view(-1)[3], x.view(-1)[70], x.view(-1)[40:44] = float("inf"), float("nan"), -1e-38
    options = {"axis": axis, "dst_type": dst_type, "scale_alg": scale_alg, "max_low_bound": 0.0}
    assert_bits(QUANT.cuda(input=on(device, x), **options), QUANT.reference(x, **options))


@both_modes
@both_elements
def test_every_16_bit_magnitude(device: str, dst_type: int, scale_alg: int) -> None:
    """Each value of the dtype is the largest of a block; in the interpreter, every 16th."""
    bits = torch.arange(0, 2**15, 16 if device == "cpu" else 1, dtype=torch.int32)
    largest = on(device, bits.to(torch.int16)).view(torch.float16)
    blocks = torch.zeros(len(largest), 32, dtype=torch.float16, device=device)
    blocks[:, 0], blocks[:, 1] = largest, -largest / 3
    options = {"axis": -1, "dst_type": dst_type, "scale_alg": scale_alg, "max_low_bound": 0.0}
    assert_bits(QUANT.cuda(input=blocks, **options), QUANT.reference(blocks.cpu(), **options))


@pytest.mark.parametrize("ends", [[0, 33, 33, 130, 200, 200], [200], [64, 128, 200]], ids=str)
def test_groups(device: str, ends: list[int]) -> None:
    x, index = random_values(200, 40, dtype=torch.float32), torch.tensor(ends, dtype=torch.int32)
    options = {"dst_type": 24, "scale_alg": 1}
    y, codes = GROUPED.cuda(x=on(device, x), group_index=index.to(device), **options)
    assert_bits((y, codes), GROUPED.reference(x, index, **options))


def test_rows_after_the_last_group_are_zero(device: str) -> None:
    x, options = random_values(200, 40, dtype=torch.float32), {"dst_type": 24, "scale_alg": 1}
    for ends in ([33, 130], [64, 150, 150], [0, 0]):
        index, end = torch.tensor(ends, dtype=torch.int32), ends[-1]
        y, codes = GROUPED.cuda(x=on(device, x), group_index=index.to(device), **options)
        expected = GROUPED.reference(x[:end], index, **options)
        assert_bits((y[:end], codes[: len(expected[1])]), expected)
        assert not y[end:].view(torch.uint8).any() and codes[len(expected[1]) :].eq(127).all()


@pytest.mark.parametrize("axis", [0, 1])
def test_lower_bound_of_the_largest_magnitude(device: str, axis: int) -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    x[:32, :32] *= 1e-3
    x[32:, 32:] = 0
    options = {"axis": axis, "dst_type": 24, "scale_alg": 1, "max_low_bound": 0.5}
    assert_bits(QUANT.cuda(input=on(device, x), **options), QUANT.reference(x, **options))


def test_strides(device: str) -> None:
    x = torch.randn(64, 40, device=device).t()
    y, codes = QUANT.cuda(input=x, axis=-1, dst_type=24, scale_alg=1, max_low_bound=0.0)
    assert has_strides_of(y, x) and codes.shape == (40, 1, 2)
    assert_bits((y, codes), QUANT.reference(x.cpu(), axis=-1, dst_type=24, scale_alg=1, max_low_bound=0.0))
