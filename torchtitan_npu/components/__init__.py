"""Parts of a training job: checkpoints, data, job control, losses, metrics, non-finite steps, optimizers, replay."""
