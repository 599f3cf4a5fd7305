"""Multimodal rotary embedding of queries and keys: ``npu_mrope``."""

from torchtitan_npu.ops.mrope import op  # noqa: F401
