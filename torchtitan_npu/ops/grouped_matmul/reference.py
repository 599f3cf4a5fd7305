"""Grouped matrix products in plain PyTorch, as a loop over the groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops.mxfp8.reference import OUTPUTS, dequantized, dequantized_groups


def npu_grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    bias: list[Tensor] | None,
    group_list: Tensor | None,
    group_type: int,
    group_list_type: int,
    scale: list[Tensor] | None = None,
    per_token_scale: list[Tensor] | None = None,
    output_dtype: int | None = None,
    **_: Any,
) -> list[Tensor]:
    r"""Compute one matrix product for each group: :math:`y_i = x_i \, w_i + b_i`.

    - ``group_type`` 0, the rows of x are grouped (tokens by expert): x [(T, K)], weight [(E, K, N)], bias [(E, N)];
      returns [(T, N)].
    - ``group_type`` 2, the summed dimension is grouped (the gradient of the weights): x [(M, T)], weight [(T, N)];
      returns [(E, M, N)], zero for a group of no tokens.
    - ``group_type`` -1, nothing is grouped: x, weight and bias are lists, x_i (..., K_i), weight_i (K_i, N_i),
      bias_i (N_i); returns as many (..., N_i).

    ``group_list`` (E) int64: the sizes of the groups, or their ends with ``group_list_type`` 0. Computes in float32, or
    in float64 for float64 input.

    An MXFP8 product has float8 factors and their scale codes: ``per_token_scale`` [(T, ceil(K / 64), 2)] and ``scale``
    [(E, ceil(K / 64), N, 2)], or with ``group_type`` 2 [(M, T // 64 + E, 2)] and [(T // 64 + E, N, 2)], as
    ``npu_grouped_dynamic_mx_quant`` returns them. The factors are dequantized to float32, which is exact.
    """
    if scale:
        assert group_list is not None and per_token_scale is not None and output_dtype is not None
        groups: dict[str, Any] = {
            "group_list": group_list,
            "group_type": group_type,
            "group_list_type": group_list_type,
        }
        factors = dequantized_factors(
            x[0], weight[0], scale[0], per_token_scale=per_token_scale, dtype=torch.float32, **groups
        )
        (y,) = npu_grouped_matmul([factors[0]], [factors[1]], bias=None, **groups)
        return [y.to(OUTPUTS[output_dtype])]
    if group_type == -1:
        biases: Sequence[Tensor | None] = bias or [None] * len(x)
        return [_product(*matrices) for matrices in zip(x, weight, biases, strict=True)]
    assert group_list is not None
    tokens, matrices = x[0], weight[0]
    sizes = group_sizes("npu_grouped_matmul", group_list, group_list_type)
    length = tokens.shape[0 if group_type == 0 else 1]
    if sum(sizes) != length:
        what = "rows of x" if group_type == 0 else "columns of x"
        raise UsageError(f"npu_grouped_matmul: group_list must add up to the {length} {what}, not to {sum(sizes)}")
    if group_type == 2:
        y = tokens.new_empty(len(sizes), tokens.shape[0], matrices.shape[1])
        for out, columns, rows in zip(y, tokens.split(sizes, 1), matrices.split(sizes), strict=True):
            out.copy_(_product(columns, rows))
    else:
        y = tokens.new_empty(length, matrices.shape[2])
        for group, (out, rows) in enumerate(zip(y.split(sizes), tokens.split(sizes), strict=True)):
            out.copy_(_product(rows, matrices[group], bias[0][group] if bias else None))
    return [y]


def dequantized_factors(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    per_token_scale: list[Tensor],
    group_list: Tensor,
    group_type: int,
    group_list_type: int,
    dtype: torch.dtype,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Return the factors of an MXFP8 product in ``dtype``, with their strides."""
    if group_type == 0:
        return dequantized(x, per_token_scale[0], -1, dtype), dequantized(weight, scale, 1, dtype)
    ends = group_list if group_list_type == 0 else group_list.cumsum(0)
    columns = dequantized_groups(x.t(), per_token_scale[0].transpose(0, 1), ends, dtype)
    return columns.t(), dequantized_groups(weight, scale, ends, dtype)


def npu_grouped_matmul_add_(
    input: Tensor, x: Tensor, weight: Tensor, group_list: Tensor, *, group_list_type: int, **_: Any
) -> Tensor:
    r"""Add one matrix product for each group of rows to ``input``, in place: :math:`y_i \mathrel{+}= x_i^T \, w_i`.

    ``input`` (E, M, N) float32, ``x`` (T, M), ``weight`` (T, N), ``group_list`` (E) as in :func:`npu_grouped_matmul`;
    rows beyond the last group are ignored. Returns ``input``.
    """
    sizes = group_sizes("npu_grouped_matmul_add_", group_list, group_list_type)
    if sum(sizes) > len(x):
        raise UsageError(
            f"npu_grouped_matmul_add_: group_list must add up to at most the {len(x)} rows of x, not to {sum(sizes)}"
        )
    beyond = len(x) - sum(sizes)
    # the rows beyond the last group are a part without a matrix in ``input``
    for y, rows, other in zip(input, x.split([*sizes, beyond]), weight.split([*sizes, beyond]), strict=False):
        y.add_(rows.to(y.dtype).t() @ other.to(y.dtype))
    return input


def group_sizes(op: str, group_list: Tensor, group_list_type: int) -> list[int]:
    """Return the group sizes: ``group_list`` itself (type 1) or the differences of its ends (type 0)."""
    values = group_list.tolist()
    sizes = values if group_list_type == 1 else [end - start for start, end in zip([0, *values], values, strict=False)]
    if any(size < 0 for size in sizes):
        rule = "hold no negative size" if group_list_type == 1 else "never decrease (group_list_type 0: ends)"
        raise UsageError(f"{op}: group_list must {rule}, not be {values}")
    return sizes


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = x.to(compute) @ weight.to(compute)
    return (y if bias is None else y + bias.to(compute)).to(x.dtype)
