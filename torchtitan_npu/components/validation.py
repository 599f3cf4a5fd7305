"""Validation whose loss does not depend on the parallel layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.validate import Validator as TitanValidator
from torchtitan.distributed.utils import dist_sum
from torchtitan.hf_datasets.text_datasets import build_text_validation_dataloader as titans_dataloader

from torchtitan_npu.components.dataloader import build_text_validation_dataloader
from torchtitan_npu.distributed.context_parallel import context_parallel, with_context
from torchtitan_npu.upstream.rebind import rebound


class Validator(TitanValidator):
    """TorchTitan's Validator with layout-independent batches and the correct mean under context parallelism.

    TorchTitan divides each rank's loss by the tokens of that rank's part of the sequence and sums over the ranks: the
    loss is too large by the context-parallel degree (components/validate.py).
    """

    build_dataloader = staticmethod(build_text_validation_dataloader)

    def __init__(self, **kwargs: Any) -> None:
        rebound(TitanValidator.__init__, {titans_dataloader: self.build_dataloader})(self, **kwargs)
        self._process: Callable[..., Any] | None = None  # which the model decides, and that is not known yet

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor, model_parts: list[nn.Module]
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], dict[str, Any]]:
        dims = self.parallel_dims
        if self._process is None:
            self._process = self._process_for(model_parts[0])
        inputs, labels, *rest = self._process(self, input_dict, labels, [_asked_for_masks(model_parts[0])])
        if dims.cp_enabled:
            tokens = (labels != IGNORE_INDEX).sum()
            # TorchTitan will divide by the first of these, and should by the second
            own_share = dist_sum(tokens, dims.get_optional_mesh("batch"))
            self.loss_fn.tokens = dist_sum(tokens, dims.get_mesh("loss")) / own_share
        return inputs, labels, *rest  # type: ignore[return-value]

    def _process_for(self, model: nn.Module) -> Callable[..., Any]:
        """TorchTitan's way from a batch to the model's inputs, with the context parallel of the job or the model."""
        own = getattr(getattr(model, "model_args", None), "context_parallel", None)
        context = context_parallel(self.job_config, self.parallel_dims, own)
        process = TitanValidator.post_dataloading_process
        return with_context(process, context) if context else process

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        super().validate(model_parts, step)
        self.loss_fn.tokens = 1.0


class _WithoutMasks:
    def get_attention_masks(self, **kwargs: Any) -> None:
        raise TypeError("scaled dot-product attention takes no masks")  # which TorchTitan takes for "none"


def _asked_for_masks(model: nn.Module) -> Any:
    """What TorchTitan's validation, unlike its training, asks for masks whatever the attention is.

    deepseek_v3 and llama4 then make some, which their scaled dot-product attention refuses.
    """
    kind = getattr(getattr(model, "model_args", None), "attn_type", "sdpa")
    return model if kind in ("flex", "varlen") else _WithoutMasks()
