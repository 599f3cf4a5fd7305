"""Parts of a training job beside the model: losses, metrics, validation, data, the swap optimizer."""
