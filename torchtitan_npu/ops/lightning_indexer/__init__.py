"""Selection of the keys that sparse attention attends to: ``npu_lightning_indexer`` and its gradient."""

from torchtitan_npu.ops.lightning_indexer import op  # noqa: F401
