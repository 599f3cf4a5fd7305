"""The loss that trains the lightning indexer: ``npu_sparse_lightning_indexer_grad_kl_loss``."""

from torchtitan_npu.ops.indexer_kl_loss import op  # noqa: F401
