"""Text for training: the corpus that ships with the package, and batches that do not depend on the parallel layout.

Importing it enters the corpus into TorchTitan's dataset registry; nothing is read before a loader is built.
"""

from torchtitan_npu.components.corpus import register_datasets
from torchtitan_npu.components.dataloader import build_text_dataloader, build_text_validation_dataloader

__all__ = ["build_text_dataloader", "build_text_validation_dataloader"]

register_datasets()
