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
    peak_flops: float | None
    """Operations per second of matrix products in bfloat16. ``None``: the chip has no bfloat16."""


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

_CUBES = {
    "910B": {"B1": (24, 1.85), "B2": (24, 1.8), "B2C": (24, 1.8), "B3": (20, 1.8), "B4": (20, 1.5), "B4-1": (20, 1.5)},
    "910_93": {
        **dict.fromkeys(("_9362", "_9363"), (20, 1.5)),
        "_9372": (20, 1.8),
        **dict.fromkeys(("_9381", "_9382"), (24, 1.8)),
        **dict.fromkeys(("_9391", "_9392"), (24, 1.85)),
    },
    "950": {
        **dict.fromkeys(("DT_950x", "DT_950y"), (8, 1.65)),
        "PR_950z": (4, 1.65),
        **{name: (28, 1.65) for name in SERIES["950"] if name[3:6] == "957"},
        **{name: (32, 1.65) for name in SERIES["950"] if name[3:6] == "958"},
        **{name: (36, 1.8) for name in SERIES["950"] if name[3:6] in ("959", "95A")},
    },
}
"""Matrix units (``cube_core_cnt``) and their clock in GHz (``cube_freq``) by series and chip, from the public
repository hicann/runtime, ``src/platform/platform_config/*.ini``. A unit multiplies two 16 x 16 matrices per cycle."""

FLOPS_PER_CYCLE = 2 * 16**3


def _peak_flops(series: str, suffix: str) -> float | None:
    cubes, ghz = _CUBES.get(series, {}).get(suffix, (0, 0.0))
    return cubes * ghz * 1e9 * FLOPS_PER_CYCLE or None


CHIPS = {
    name: Chip(series, int(_MEMORY[name] * GIB) if name in _MEMORY else None, _peak_flops(series, suffix))
    for series, names in SERIES.items()
    for suffix in names
    for name in [f"Ascend{series[:3]}{suffix}"]
}
"""Chips by name."""

DEFAULT_CHIP = "Ascend910B3"


def find_chip(name: str) -> Chip:
    """Return the chip ``name``. Raise :class:`UsageError` with the known names if there is none."""
    if name not in CHIPS:
        raise UsageError(f"{name} is no chip of torch_npu{did_you_mean(name, CHIPS)}; chips: {', '.join(CHIPS)}")
    return CHIPS[name]
