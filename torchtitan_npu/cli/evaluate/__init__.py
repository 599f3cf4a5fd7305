"""The command ``torchtitan-npu evaluate``: perplexity and log-likelihood tasks of a checkpoint."""
