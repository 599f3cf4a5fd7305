"""deepseek_v3's large flavors without flex attention."""

from __future__ import annotations

from torchtitan.protocols.train_spec import get_train_spec

import torchtitan_npu


def test_the_large_flavors_differ_in_their_attention_only() -> None:
    """If TorchTitan's own flavors have SDPA, the workaround can be deleted."""
    torchtitan_npu.register()
    flavors = get_train_spec("deepseek_v3").model_args
    for name in ("16B", "236B", "671B"):
        flex, sdpa = vars(flavors[name]), vars(flavors[f"{name}_sdpa"])
        assert flex["attn_type"] == "flex" and sdpa["attn_type"] == "sdpa"
        assert {key for key in flex if flex[key] != sdpa[key]} <= {"attn_type", "attn_mask_type"}
    assert not any(name.startswith("debug") for name in flavors if name.endswith("_sdpa"))
