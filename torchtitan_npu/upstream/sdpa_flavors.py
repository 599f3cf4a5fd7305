"""deepseek_v3's large flavors with scaled dot-product attention: ``16B_sdpa``, ``236B_sdpa``, ``671B_sdpa``.

TorchTitan 0.2.2 has these sizes with flex attention only, which torch refuses on an NPU, and no option of a job chooses
the attention. Parameters and checkpoints are the same. The mask is not: causal over the whole sequence, so a token also
sees the documents that were packed before its own, where flex attention stops at the document's start.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any


def with_sdpa_flavors(flavors: Mapping[str, Any]) -> dict[str, Any]:
    """``flavors`` and, of those with flex attention, one more each: ``"16B"`` is also there as ``"16B_sdpa"``."""
    more = {}
    for name, args in flavors.items():
        if args.attn_type == "flex" and "debug" not in name:
            more[f"{name}_sdpa"] = copy.deepcopy(args)
            more[f"{name}_sdpa"].attn_type, more[f"{name}_sdpa"].attn_mask_type = "sdpa", "causal"
    return {**flavors, **more}
