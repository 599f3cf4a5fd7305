"""Section ``[mxfp8]``: options of the converter ``npu_mxfp8``."""

# no `from __future__ import annotations`: TorchTitan and tyro read the field types
from dataclasses import dataclass, field
from typing import Literal

from torchtitan_npu.config.allowed import NAME, Allowed, ListOf

ALLOWED: dict[str, Allowed] = {"filter_fqns": ListOf(NAME)}


@dataclass
class Mxfp8:
    """Quantization of matrix products by the converter `npu_mxfp8`."""

    recipe_name: Literal["mxfp8_rceil", "mxfp8_rceil_wgrad_with_hp", "mxfp8_floor", "mxfp8_floor_wgrad_with_hp"] = (
        "mxfp8_rceil"
    )
    """
    The recipe. `rceil`, by torchao's names, rounds scales up (`scale_alg` 1 of `npu_dynamic_mx_quant`). `floor`, by
    names of this package, rounds them down (`scale_alg` 0, the OCP specification). `wgrad_with_hp` computes the
    gradients of the weights in the training dtype.
    """

    linear: bool = True
    """Quantize `nn.Linear` modules."""

    experts: bool = True
    """Quantize the experts of MoE layers, through the converter `npu_gmm`."""

    filter_fqns: list[str] = field(default_factory=lambda: ["output", "router.gate", "indexer"])
    """Do not quantize modules whose name contains one of these."""

    gradient_dtype: Literal["float8_e4m3fn", "float8_e5m2"] = "float8_e4m3fn"
    """The element type of gradients of outputs. Inputs and weights are `float8_e4m3fn`."""

    round_mode: Literal["rint"] = "rint"
    """The rounding mode of elements. For float8 the NPU operators have only this one: to nearest, ties to even."""
