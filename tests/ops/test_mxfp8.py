"""MXFP8 quantization and products, against torchao's casts, torch's float8 types and float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

from tests._helpers.error_budget import assert_within, rounding_budget, unit_roundoff
from tests._helpers.mxfp8_values import ELEMENTS, both_elements, both_modes, random_values
from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops import OPS
from torchtitan_npu.ops.mxfp8 import reference

quantize = torch.ops.npu.npu_dynamic_mx_quant
quantize_groups = torch.ops.npu.npu_grouped_dynamic_mx_quant
MODES = {0: ScaleCalculationMode.FLOOR, 1: ScaleCalculationMode.RCEIL}


def codes_of(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


def torchao_cast(x: Tensor, dst_type: int, scale_alg: int) -> tuple[Tensor, Tensor]:
    """Return elements and scale codes of torchao, for blocks along the last dimension."""
    scale, elements = to_mx(x.contiguous(), ELEMENTS[dst_type], 32, MODES[scale_alg])
    return elements, codes_of(scale)


@both_modes
@both_elements
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_agrees_with_torchao(dst_type: int, scale_alg: int, dtype: torch.dtype) -> None:
    x = random_values(64, 128, dtype=dtype)
    y, scale = quantize(x, dst_type=dst_type, scale_alg=scale_alg)
    elements, codes = torchao_cast(x, dst_type, scale_alg)
    assert torch.equal(codes_of(y), codes_of(elements)) and torch.equal(scale.flatten(1), codes)


@both_modes
@both_elements
def test_every_bfloat16_magnitude_as_the_largest_of_a_block(dst_type: int, scale_alg: int) -> None:
    """Scales are torchao's for every finite magnitude. Elements are, where the scale code is not 0.

    torchao divides by 2^-126 where the scale is 2^-127. CANN's kernel sets such a block to 0 with ``scale_alg`` 0, and
    multiplies by 2^127 with 1.
    """
    largest = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = largest.isfinite()
    blocks = torch.zeros(len(largest), 32, dtype=torch.bfloat16)
    blocks[:, 0], blocks[:, 1], blocks[:, 2] = largest, -largest / 3, largest / 2**10
    y, scale = reference.quantized(blocks, ELEMENTS[dst_type], scale_alg)
    elements, codes = torchao_cast(blocks, dst_type, scale_alg)
    assert torch.equal(scale[finite], codes.flatten()[finite])
    assert torch.equal(codes_of(y)[scale.ne(0) & finite], codes_of(elements)[scale.ne(0) & finite])
    tiny = blocks[scale == 0].float()
    expected = tiny * 0 if scale_alg == 0 else tiny.double() * 2.0**127
    assert torch.equal(codes_of(y)[scale == 0], codes_of(expected.float().to(ELEMENTS[dst_type])))
    assert scale[~finite].eq(255).all() and codes_of(y)[~finite].eq(0).all()


@both_modes
@both_elements
def test_every_element_code_survives(dst_type: int, scale_alg: int) -> None:
    """The values of all 256 codes quantize to themselves, if the largest element is in the block."""
    element = ELEMENTS[dst_type]
    values = torch.arange(256, dtype=torch.uint8).view(element).float()
    largest = torch.finfo(element).max
    values = values[values.isfinite()]
    blocks = torch.full((len(values), 32), largest)
    blocks[:, 1] = values
    y, scale = reference.quantized(blocks, element, scale_alg)
    assert scale.eq(127).all() and torch.equal(codes_of(y[:, 1]), codes_of(values.to(element)))


@both_elements
def test_rounds_to_nearest_even_and_saturates(dst_type: int) -> None:
    """Each midpoint of two neighbouring elements, and values just beside it, round as torch's cast does."""
    element = ELEMENTS[dst_type]
    values = torch.arange(128, dtype=torch.uint8).view(element).float()
    values = values[values.isfinite()]
    middle = (values[1:] + values[:-1]) / 2
    beside = torch.cat((middle, torch.nextafter(middle, values[1:]), torch.nextafter(middle, values[:-1])))
    blocks = torch.full((len(beside), 32), torch.finfo(element).max)
    blocks[:, 1] = beside
    y, scale = reference.quantized(blocks, element, 0)
    assert scale.eq(127).all() and torch.equal(codes_of(y[:, 1]), codes_of(beside.to(element)))
    # the largest value of a block may be almost 2^(emax + 1), above the largest element
    above = torch.full((1, 32), 1.9990234375 * 2.0 ** reference.EMAX[element])
    y, scale = reference.quantized(torch.cat((above, -above)), element, 0)
    assert scale.eq(127).all() and y[0].float().eq(torch.finfo(element).max).all()
    assert torch.equal(y[1].float(), -y[0].float())


@pytest.mark.parametrize("special", [float("inf"), -float("inf"), float("nan")])
@both_modes
def test_nan_and_infinity(special: float, scale_alg: int) -> None:
    x = torch.ones(2, 64)
    x[0, 40] = special
    y, scale = quantize(x, dst_type=24, scale_alg=scale_alg)
    assert scale[0].tolist() == [[scale[0, 0, 0].item(), 255]] and codes_of(y[0, 32:]).eq(0).all()
    values = reference.dequantized(y, scale, -1, torch.float32)
    assert values[0, 32:].isnan().all() and torch.equal(values[1], x[1])


@pytest.mark.parametrize("shape, axis", [((70, 40), 0), ((3, 100, 8), 1), ((2, 3, 100), -1), ((31,), 0), ((0, 64), -1)])
def test_any_axis_is_the_last_one_transposed(shape: tuple[int, ...], axis: int) -> None:
    """Blocks at the end may be shorter, and two scales of neighbouring blocks are a pair."""
    x = random_values(*shape)
    y, scale = quantize(x, axis=axis, dst_type=24, scale_alg=1)
    rows = x.movedim(axis, -1)
    blocks = -(-rows.shape[-1] // 32)
    filled = torch.nn.functional.pad(rows, (0, 32 * blocks - rows.shape[-1]))
    elements, codes = torchao_cast(filled, 24, 1)
    assert torch.equal(codes_of(y.movedim(axis, -1)), codes_of(elements)[..., : rows.shape[-1]])
    pairs = scale.movedim(axis % x.dim(), -2).flatten(-2)
    assert torch.equal(pairs[..., :blocks], codes) and not pairs[..., blocks:].any()
    torch.library.opcheck(quantize.default, (x,), {"axis": axis, "dst_type": 24})


def test_blocks_of_a_group_hold_its_rows_only() -> None:
    torch.manual_seed(0)
    x, ends = torch.randn(200, 24).bfloat16(), [0, 33, 33, 130, 200, 200]
    y, scale = quantize_groups(x, torch.tensor(ends, dtype=torch.int32), dst_type=24, scale_alg=1)
    assert scale.shape == (200 // 64 + 6, 24, 2)
    for group, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if start == end:
            continue
        rows, codes = quantize(x[start:end], axis=0, dst_type=24, scale_alg=1)
        first = start // 64 + group
        assert torch.equal(codes_of(y[start:end]), codes_of(rows))
        assert torch.equal(scale[first : first + len(codes)], codes)
    values = reference.dequantized_groups(y, scale, torch.tensor(ends), torch.float32)
    assert ((values - x.float()).abs() <= x.float().abs() * 2**-4 + 2**-8).all()  # half a step of E4M3
    torch.library.opcheck(quantize_groups.default, (x, torch.tensor(ends, dtype=torch.int32)), {"dst_type": 24})


def test_groups_must_cover_all_rows() -> None:
    for ends in ([64, 99], [64, 101], []):
        with pytest.raises(UsageError, match="group_index must end at the 100 rows of x"):
            quantize_groups(torch.ones(100, 8), torch.tensor(ends, dtype=torch.int32), dst_type=24)


@both_elements
def test_lower_bound_of_the_largest_magnitude(dst_type: int) -> None:
    """A block of smaller values has the scale of the bound, and one of zeros the code 0."""
    blocks = torch.stack([torch.full((32,), value) for value in (1e-4, 0.5, 3.0, 0.0)])
    y, scale = quantize(blocks, dst_type=dst_type, scale_alg=1, max_low_bound=0.5)
    plain, plain_scale = quantize(blocks, dst_type=dst_type, scale_alg=1)
    bound = plain_scale[1, 0, 0].item()
    assert scale[:, 0, 0].tolist() == [bound, bound, plain_scale[2, 0, 0].item(), 0]
    assert torch.equal(codes_of(y[1:]), codes_of(plain[1:]))
    expected = (blocks[0].double() * 2.0 ** (127 - bound)).to(ELEMENTS[dst_type])
    assert torch.equal(codes_of(y[0]), codes_of(expected))


@both_elements
def test_bfloat16_holds_the_values_from_a_scale_on(dst_type: int) -> None:
    element, exact = ELEMENTS[dst_type], []
    values = torch.arange(256, dtype=torch.uint8).view(element)
    values = values[values.float().isfinite()][:224].view(-1, 32)  # all magnitudes are in the first half
    for code in range(16):
        scale = torch.full((len(values), 1, 2), code, dtype=torch.uint8)
        rounded = reference.dequantized(values, scale, -1, torch.bfloat16)
        exact.append(torch.equal(rounded.double(), reference.dequantized(values, scale, -1, torch.float64)))
    first = 3 if element == torch.float8_e4m3fn else 10
    assert exact == [code >= first for code in range(16)]


def matmul(left: Tensor, right: Tensor, **options: object) -> tuple[Tensor, Tensor, Tensor]:
    """Return the MXFP8 product, and both factors as float64."""
    x1, scale1 = quantize(left, axis=-1, dst_type=24, scale_alg=1)
    x2, scale2 = quantize(right, axis=0, dst_type=23, scale_alg=1)
    scales = {"pertoken_scale": scale1, "pertoken_scale_dtype": 293, "scale_dtype": 293, "group_sizes": [1, 1, 32]}
    y = torch.ops.npu.npu_quant_matmul(x1, x2, scale2, **scales, **options)
    return y, _float64(x1, scale1, -1), _float64(x2, scale2, 0)


def _float64(data: Tensor, scale: Tensor, axis: int) -> Tensor:
    """Dequantize one element after another."""
    data, scale = data.movedim(axis, -1).double(), scale.movedim(axis % data.dim(), -2).flatten(-2)
    powers = torch.exp2(scale.double() - 127)
    return torch.stack([data[..., k] * powers[..., k // 32] for k in range(data.shape[-1])], -1).movedim(-1, axis)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("k", [32, 64, 100])
def test_product(dtype: torch.dtype, k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    left, right = torch.randn(7, k, generator=generator), torch.randn(k, 5, generator=generator)
    bias = torch.randn(5, generator=generator)
    number = {value: key for key, value in reference.OUTPUTS.items()}[dtype]
    for kernel in ("reference", "cuda"):
        y, x1, x2 = matmul(left, right, bias=bias, output_dtype=number)
        if kernel == "cuda":
            (a, s), (b, t) = quantize(left, dst_type=24, scale_alg=1), quantize(right, axis=0, dst_type=23, scale_alg=1)
            y = OPS["npu_quant_matmul"].cuda(x1=a, x2=b, scale=t, pertoken_scale=s, bias=bias, output_dtype=number)
        expected = x1 @ x2 + bias
        budget = (x1.abs() @ x2.abs() * (k + 1) + bias.abs()) * unit_roundoff(torch.float32)
        assert y.dtype == dtype
        assert_within("y", y, expected, budget + rounding_budget(expected, dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("group_type", [0, 2])
def test_grouped_product_on_a_gpu_rounds_its_output_only(group_type: int, dtype: torch.dtype) -> None:
    """The GPU path of these outputs has no kernel, so that it runs on the CPU."""
    generator = torch.Generator().manual_seed(group_type)
    counts = torch.tensor([40, 0, 24])
    left, right = torch.randn(64, 96, generator=generator), torch.randn(64, 32, generator=generator)
    if group_type == 0:
        right = torch.randn(3, 96, 32, generator=generator)
        x, x_scale = quantize(left, dst_type=24, scale_alg=1)
        weight, scale = quantize(right, axis=1, dst_type=24, scale_alg=1)
        factors, columns = _float64(x, x_scale, -1), _float64(weight, scale, 1)
        expected = torch.cat([rows @ m for rows, m in zip(factors.split(counts.tolist()), columns, strict=True)])
    else:
        ends = counts.cumsum(0)
        (x, x_scale), (weight, scale) = (
            quantize_groups(rows, ends.int(), dst_type=24, scale_alg=1) for rows in (left, right)
        )
        factors, columns = (
            reference.dequantized_groups(*rows, ends, torch.float64) for rows in ((x, x_scale), (weight, scale))
        )
        parts = zip(*(rows.split(counts.tolist()) for rows in (factors, columns)), strict=True)
        expected = torch.stack([rows.t() @ m for rows, m in parts])
        x, x_scale = x.t(), x_scale.transpose(0, 1)
    (y,) = OPS["npu_grouped_matmul"].cuda(
        x=[x],
        weight=[weight],
        bias=None,
        scale=[scale],
        per_token_scale=[x_scale],
        group_list=counts,
        group_type=group_type,
        group_list_type=1,
        output_dtype={value: key for key, value in reference.OUTPUTS.items()}[dtype],
    )
    assert y.dtype == dtype
    sums = expected.abs().max() * 96 * unit_roundoff(torch.float32)
    assert_within("y", y, expected, sums + rounding_budget(expected, dtype))
