"""A model in which no converter finds a target. Importing this module registers it, for experimental.custom_import."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn
from torchtitan.protocols.model import BaseModelArgs
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec


@dataclass
class Args(BaseModelArgs):
    def update_from_config(self, job_config, **kwargs) -> None:  # type: ignore[no-untyped-def]
        pass

    def get_nparams_and_flops(self, model, seq_len):  # type: ignore[no-untyped-def]
        return 1, 1


class PlainModel(nn.Module):
    def __init__(self, args: Args) -> None:
        super().__init__()
        self.output = nn.Linear(4, 4)


register_train_spec(
    "without_norms", replace(get_train_spec("llama3"), model_cls=PlainModel, model_args={"debugmodel": Args()})
)
