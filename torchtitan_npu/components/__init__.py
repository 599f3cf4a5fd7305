"""Parts of a training job other than the model: losses, metrics, validation, data, the swap optimizer."""
