"""Versions of CANN, and the oldest one that a converter supports. Without torch: the doctor reads it first."""

from __future__ import annotations

import re
from typing import NamedTuple


class Requirement(NamedTuple):
    version: str
    why: str
    optional: bool = False
    """Models train without the converter too, with more launches: the doctor warns of an older CANN."""


CONVERTERS = {
    "npu_dsa": Requirement(
        "9.0",
        "the indexer loss of CANN 8.5 refuses float32 weights and any top-k but 2048, its gradient of sparse "
        "attention is less accurate, and a fault in rows without keys was corrected later",
    ),
    "npu_gating": Requirement(
        "9.1", "it is the first version with the gradient of npu_moe_gating_top_k", optional=True
    ),
    "npu_mxfp8": Requirement(
        "9.1", "it is the first version in which npu_grouped_dynamic_mx_quant takes scale_alg", optional=True
    ),
}
"""The oldest CANN of the converters that need a certain one. From the documents and changes of CANN's operators."""


def converter_error(converter: str, installed: str) -> str | None:
    """Return why ``converter`` does not support the ``installed`` version of CANN, or ``None``."""
    needed = CONVERTERS.get(converter)
    if needed is None or version_numbers(installed) >= version_numbers(needed.version):
        return None
    return f"{converter} needs CANN {needed.version} or newer, and {installed} is installed: {needed.why}"


def version_numbers(version: str) -> tuple[int, ...]:
    """Parse ``"2.12.0.post2+cpu"`` as (2, 12, 0) and ``"8.3.RC1"`` as (8, 3)."""
    leading = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in leading[0].split(".")) if leading else ()
