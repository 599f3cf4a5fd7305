"""Multimodal rotary position embedding in plain PyTorch. Computes in float32, or in float64 for float64 input."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchtitan_npu.ops.rotary_mul.reference import rotate_pairs, upcast


def npu_mrope(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    mrope_section: Sequence[int] | None,
    rotary_mode: str | None,
    cache_mode: str | None,
) -> tuple[Tensor, Tensor]:
    r"""Rotate the first ``rotary_dim`` channels of each head of ``query`` and ``key`` by the angles of their positions.

    .. math:: y = x \cos\theta_p + \mathrm{rotate\_pairs}(x) \sin\theta_p

    ``query`` and ``key`` (T, heads * head_size). Each row of ``cos_sin_cache`` (max_position, rotary_dim) holds the
    cosines and then the sines of ``rotary_dim / 2`` angles. ``positions`` (T,), or (A, T): a position on each of
    A = 3 or 4 axes (time, height, width). Then ``mrope_section`` and ``cache_mode`` select the axis of each angle, see
    :func:`axis_of_angles`. ``rotary_mode`` selects the pairs of channels, see
    :func:`~torchtitan_npu.ops.rotary_mul.reference.rotate_pairs`.
    """
    rotary_mode = rotary_mode or "half"
    pairs = cos_sin_cache.shape[1] // 2
    angles = cos_sin_cache.index_select(0, positions.flatten()).view(*positions.shape, 2 * pairs)
    if positions.dim() == 2:
        axis = axis_of_angles(mrope_section or (), pairs, cache_mode or "default").to(positions.device)
        angles = angles.gather(0, axis.repeat(2).expand(1, *angles.shape[1:]))[0]
    cos, sin = angles.chunk(2, dim=-1)
    # both channels of a pair have the same angle
    both = (lambda t: t.repeat_interleave(2, -1)) if rotary_mode == "interleave" else (lambda t: t.repeat(1, 2))
    cos, sin = both(cos).unsqueeze(1), both(sin).unsqueeze(1)  # (T, 1, rotary_dim)

    def rotate(x: Tensor) -> Tensor:
        heads = x.reshape(x.shape[0], x.shape[1] // head_size, head_size)
        rotated, unchanged = heads[..., : 2 * pairs], heads[..., 2 * pairs :]
        r, c, s = upcast(rotated, cos, sin)
        rotated = (r * c + rotate_pairs(r, rotary_mode) * s).to(x.dtype)
        return torch.empty_like(x).copy_(torch.cat((rotated, unchanged), dim=-1).flatten(1))

    return rotate(query), rotate(key)


def axis_of_angles(mrope_section: Sequence[int], pairs: int, cache_mode: str) -> Tensor:
    """Return the axis of ``positions`` that each of the ``pairs`` angles uses, (pairs,) int64.

    ``default`` (Qwen2.5-VL): the first ``mrope_section[0]`` angles use axis 0, the next ``mrope_section[1]`` axis 1,
    and so on. ``interleave`` (Qwen3-VL): time, height, width, time, … while height and width have angles left, then
    time.
    """
    if cache_mode == "default":
        return torch.arange(len(mrope_section)).repeat_interleave(torch.tensor(mrope_section))
    axis = torch.zeros(pairs, dtype=torch.int64)
    for number in (1, 2):
        axis[number : 3 * mrope_section[number] : 3] = number
    return axis
