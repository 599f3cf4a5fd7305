"""The Ascend chips that torch_npu 2.13 knows, by the names that ``torch.npu.get_device_name()`` returns."""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan_npu.errors import UsageError, did_you_mean


@dataclass(frozen=True)
class Chip:
    """What this package knows of a chip."""

    series: str
    """A key of :data:`SERIES`: the chips that share CANN's documents."""
    memory: int | None
    """Bytes of one device, as ``torch.npu.get_device_properties(0).total_memory`` reports them. ``None``: no report."""


SERIES = {
    "910": ("PremiumA", "ProA", "A", "ProB", "B"),
    "910B": ("B1", "B2", "B2C", "B3", "B4", "B4-1"),
    "910_93": ("_9362", "_9363", "_9372", "_9381", "_9382", "_9391", "_9392"),
    "950": (
        *("DT_950x", "DT_950y", "PR_950z"),
        *(f"DT_{name}" for name in ["9571", "9572", "9573", "9574", "9575", "9576", "9577", "9578"]),
        *(f"DT_{name}" for name in ["9581", "9582", "9582x", "9583", "9584", "9585", "9586", "9587", "9588"]),
        *(f"DT_{name}" for name in ["9591", "9592", "9595", "9596", "95A1", "95A2"]),
        *(f"PR_{name}" for name in ["9579", "957b", "957bx", "957c", "957d", "9589", "958b", "9599"]),
    ),
    "310P": ("P1", "P2", "P3", "P4", "P5", "P7"),
    "310B": ("B1", "B2", "B3", "B4"),
}
"""Chips by series. CANN's documents name the series "Atlas training" (910), A2 (910B), A3 (910_93), "Ascend 950"
(950), "Atlas inference" (310P) and "Atlas 200I/500 A2" (310B)."""

GIB = 2**30

_MEMORY = {
    # 64 GB of HBM: "60.96 GiB total capacity" in vllm-project/vllm-ascend#1670 and #5020 (Atlas A2);
    # 60.97 in others, such as hiyouga/LlamaFactory#5491.
    **dict.fromkeys(("Ascend910B1", "Ascend910B2", "Ascend910B2C", "Ascend910B3", "Ascend910B4-1"), 60.96),
    # 32 GB: "29.50 GiB total capacity" in public reports of the 910B4.
    "Ascend910B4": 29.50,
    # 64 GB for each of the two dies: "61.27 GiB total capacity" in sgl-project/sglang#29838 (Atlas A3).
    **dict.fromkeys((f"Ascend910{name}" for name in SERIES["910_93"]), 61.27),
}

CHIPS = {
    name: Chip(series, int(_MEMORY[name] * GIB) if name in _MEMORY else None)
    for series, names in SERIES.items()
    for name in (f"Ascend{series[:3]}{suffix}" for suffix in names)
}
"""Chips by name."""

DEFAULT_CHIP = "Ascend910B3"


def find_chip(name: str) -> Chip:
    """Return the chip ``name``. Raise :class:`UsageError` with the known names if there is none."""
    if name not in CHIPS:
        raise UsageError(f"{name} is no chip of torch_npu{did_you_mean(name, CHIPS)}; chips: {', '.join(CHIPS)}")
    return CHIPS[name]
