"""Workaround: TorchTitan saves a complete checkpoint only at its interval.

In TorchTitan 0.2.2, ``CheckpointManager.save`` saves at every ``checkpoint.interval`` steps. With ``last_step=True`` it
saves the model only, unless ``checkpoint.last_save_model_only`` is false. A job that stops between two intervals needs
the complete state, on disk before the process ends, also with asynchronous saves.

Delete this file when ``save`` takes an argument for a complete checkpoint now, and a method waits for it.
"""

from __future__ import annotations

from torchtitan.components.checkpoint import CheckpointManager


def save_before_stop(checkpointer: CheckpointManager, step: int) -> str | None:
    """Save ``step`` unless it has just been saved, wait for it, and return its folder; ``None`` if saving is off."""
    if not checkpointer.enable or checkpointer.load_only:
        return None
    if not checkpointer._should_save(step):
        interval, checkpointer.interval = checkpointer.interval, 1
        try:
            checkpointer.save(step)
        finally:
            checkpointer.interval = interval
    checkpointer._async_wait()
    return checkpointer._create_checkpoint_id(step)
