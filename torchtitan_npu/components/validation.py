"""Validation whose loss does not depend on the parallel layout."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.validate import BaseValidator
from torchtitan.components.validate import Validator as TitanValidator
from torchtitan.config import JobConfig
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import device_type

from torchtitan_npu.components.dataloader import build_text_validation_dataloader
from torchtitan_npu.components.expert_balance import reset_token_counts
from torchtitan_npu.distributed.context_parallel import model_inputs


class Validator(TitanValidator):
    """TorchTitan's Validator with layout-independent batches and means, which does not change training.

    TorchTitan divides each rank's loss by the labels of that rank's part of the sequence and sums over the ranks
    (components/validate.py). Under context parallelism the loss is too large by that degree, and not a number if one
    part has no label. Its layers count the tokens of validation for the balance of their experts.
    """

    build_dataloader = staticmethod(build_text_validation_dataloader)

    def __init__(self, job_config: JobConfig, dp_world_size: int, dp_rank: int, tokenizer: Any, **attributes: Any):
        # not TitanValidator.__init__: it builds TorchTitan's data loader, which knows TorchTitan's datasets only
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
        return model_inputs(
            input_dict,
            labels,
            model=model,
            model_args=model_args,
            tokenizer=self.tokenizer,
            dims=dims,
            job_config=self.job_config,
        )

    @torch.no_grad()
    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Log the mean over batches of the mean loss per label. Batches without a label do not count."""
        for model in model_parts:
            model.eval()
        steps = self.job_config.validation.steps
        batches = islice(self.validation_dataloader, None if steps == -1 else steps)
        sums = torch.stack([self._sums(input_dict, labels, model_parts) for input_dict, labels in batches])
        if self.parallel_dims.dp_cp_enabled:
            dist.all_reduce(sums, group=self.parallel_dims.get_mesh("loss").get_group())
        losses, counts = sums.unbind(1)
        if not counts.any():
            logger.warning("No batch of the validation data has a label; the validation loss is not a number")
        loss = (losses[counts > 0] / counts[counts > 0]).mean().item()
        self.metrics_processor.log_validation(loss=loss, step=step)
        reset_token_counts(model_parts)  # else validation tokens would change the balance of the next step
        for model in model_parts:
            model.train()
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    # The last layers stay gathered for a backward pass. A save would not find their optimizer states.
                    module.reshard()

    def _sums(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor, model_parts: list[nn.Module]
    ) -> torch.Tensor:
        """Return the sum of this rank's losses on a batch, and the number of its labels: (2,)."""
        self.metrics_processor.ntokens_since_last_log += labels.numel()
        input_dict = {name: value.to(device_type) for name, value in input_dict.items()}
        inputs, labels, extra_inputs, extra_kwargs = self.post_dataloading_process(
            input_dict, labels.to(device_type), model_parts
        )
        count = (labels != IGNORE_INDEX).sum()
        with self.validation_context():
            if self.parallel_dims.pp_enabled:
                assert self.pp_schedule is not None
                first = (inputs,) if self.pp_has_first_stage else ()
                extra = extra_inputs if self.pp_has_first_stage else {}
                losses: list[torch.Tensor] | None = [] if self.pp_has_last_stage else None
                target = labels if self.pp_has_last_stage else None
                self.pp_schedule.eval(*first, **extra, **extra_kwargs, target=target, losses=losses)
                # the sum over the microbatches on the last stage, -1 on other stages
                loss = torch.stack(losses).sum().to(device_type) if losses else torch.tensor(-1.0, device=device_type)
            else:
                with self.maybe_enable_amp:
                    loss = self.loss_fn(model_parts[0](inputs, **extra_inputs, **extra_kwargs), labels)
        if isinstance(loss, DTensor):
            loss = loss.full_tensor()
        return torch.stack([loss.float(), count.float()])
