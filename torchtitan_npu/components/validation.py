"""Validation whose loss does not depend on the parallel layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.validate import BaseValidator
from torchtitan.components.validate import Validator as TitanValidator
from torchtitan.config import JobConfig
from torchtitan.distributed.utils import dist_sum
from torchtitan.tools.logging import logger

from torchtitan_npu.components.dataloader import build_text_validation_dataloader
from torchtitan_npu.distributed.context_parallel import context_parallel, model_inputs


class Validator(TitanValidator):
    """TorchTitan's Validator with layout-independent batches and the correct mean under context parallelism.

    TorchTitan divides each rank's loss by the tokens of that rank's part of the sequence and sums over the ranks: the
    loss is too large by the context-parallel degree (components/validate.py).
    """

    build_dataloader = staticmethod(build_text_validation_dataloader)

    def __init__(self, job_config: JobConfig, dp_world_size: int, dp_rank: int, tokenizer: Any, **attributes: Any):
        # not TitanValidator.__init__: it builds TorchTitan's data loader, which knows its own datasets only
        BaseValidator.__init__(self, job_config)
        self.tokenizer = tokenizer
        for name, value in attributes.items():  # TorchTitan's keyword arguments are what validate() reads
            setattr(self, name, value)
        self.validation_dataloader = self.build_dataloader(
            job_config=job_config,
            dp_world_size=dp_world_size,
            dp_rank=dp_rank,
            tokenizer=tokenizer,
            infinite=job_config.validation.steps != -1,
        )
        if job_config.validation.steps == -1:
            logger.warning("validation.steps = -1 can hang if the ranks have unequal numbers of samples")

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor, model_parts: list[nn.Module]
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], dict[str, Any]]:
        dims, model = self.parallel_dims, model_parts[0]
        model_args = getattr(model, "model_args", None)
        inputs, labels, *rest = model_inputs(
            input_dict,
            labels,
            model=model,
            model_args=model_args,
            tokenizer=self.tokenizer,
            dims=dims,
            job_config=self.job_config,
            context=context_parallel(self.job_config, dims, getattr(model_args, "context_parallel", None)),
        )
        if dims.cp_enabled:
            tokens = (labels != IGNORE_INDEX).sum()
            # TorchTitan divides by the tokens of the batch mesh; the right divisor is that of the loss mesh
            divided_by = dist_sum(tokens, dims.get_optional_mesh("batch"))
            self.loss_fn.tokens = dist_sum(tokens, dims.get_mesh("loss")) / divided_by
        return inputs, labels, *rest  # type: ignore[return-value]

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        super().validate(model_parts, step)
        self.loss_fn.tokens = 1.0
