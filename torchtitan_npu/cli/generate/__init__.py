"""The command ``torchtitan-npu generate``: sample text from a checkpoint."""
