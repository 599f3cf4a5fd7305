"""Workaround: deepseek_v3's large flavors have flex attention only. Add ``16B_sdpa``, ``236B_sdpa``, ``671B_sdpa``.

Fault: torch does not support flex attention on an NPU, and TorchTitan 0.2.2 has no option that selects the attention.
Parameters and checkpoints are the same. The mask differs: it is causal over the full sequence, so a token also sees
the documents packed before its own, where flex attention stops at the start of the document.

Delete this file when a job can select the attention of a flavor.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any


def with_sdpa_flavors(flavors: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``flavors`` with an SDPA copy of each large one that has flex attention: ``"16B_sdpa"`` for ``"16B"``."""
    more = {}
    for name, args in flavors.items():
        if args.attn_type == "flex" and "debug" not in name:
            more[f"{name}_sdpa"] = copy.deepcopy(args)
            more[f"{name}_sdpa"].attn_type, more[f"{name}_sdpa"].attn_mask_type = "sdpa", "causal"
    return {**flavors, **more}
