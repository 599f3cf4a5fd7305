"""The loss of the lightning indexer over all keys, for its warm-up, and the statistics that it needs."""

from torchtitan_npu.ops.dense_indexer_kl_loss import op  # noqa: F401
