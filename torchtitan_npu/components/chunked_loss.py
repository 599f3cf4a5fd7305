"""Cross entropy in chunks of tokens, so that the logits of all tokens are never in memory at once.

The model's output layer is replaced by one that returns its input. The loss applies its weight to one chunk of tokens
after another. Each chunk computes its logits, its loss and the gradients of both inputs of the layer. So the backward
pass needs no logits, and nothing is computed twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torchtitan.components.loss import IGNORE_INDEX

from torchtitan_npu.components.loss import LossPerToken
from torchtitan_npu.errors import UsageError

VOCABULARY_STEP = 65408
"""Rows of the output weight whose gradient one call adds to: the operator takes fewer than 65536."""


class DeferredLinear(nn.Linear):
    """An output layer that returns its input. :class:`ChunkedLossPerToken` applies its weight.

    The hooks of FSDP and tensor parallel do not run: the loss does their work. Parameters, plans and checkpoints are
    those of ``nn.Linear``.
    """

    def __call__(self, hidden: Tensor) -> Tensor:
        return hidden


def defer_output(model: Any) -> None:
    """Let ``model``, or a pipeline stage, return hidden states instead of logits. Call it before parallelization."""
    output = getattr(model, "output", None)
    if output is None:  # a pipeline stage other than the last
        return
    if type(output).forward is not nn.Linear.forward or output.bias is not None:
        raise UsageError(
            f"npu.loss_chunk_tokens must be 0: the model's output is {type(output).__name__}, and only an nn.Linear "
            "without bias can be computed in chunks"
        )
    deferred = DeferredLinear(output.in_features, output.out_features, bias=False, device="meta")
    deferred.weight = output.weight  # the same object: it may be the embedding's weight too
    model.output = deferred


class ChunkedLossPerToken(LossPerToken):
    """The cross entropy of a model's hidden states, summed over tokens and divided by :attr:`tokens`."""

    def __init__(self, chunk_tokens: int) -> None:
        super().__init__(lambda hidden, labels: self._divided_sum(hidden, labels, 1.0))
        self.chunk_tokens = chunk_tokens
        self.output: Any = None
        """The output layer. Only the last stage of a pipeline has one."""

    def use_output(self, model_parts: Iterable[nn.Module]) -> None:
        """Take the output layer of the parallelized model, of which :func:`defer_output` has changed each part."""
        for part in model_parts:
            if isinstance(getattr(part, "output", None), DeferredLinear):
                self.output = part.output

    def mean(self, pred: Tensor, labels: Tensor) -> Tensor:
        # gradients are computed in the forward pass: divided there, they are rounded once
        return self._divided_sum(pred, labels, self.tokens)

    def _divided_sum(self, hidden: Tensor, labels: Tensor, divisor: float | Tensor) -> Tensor:
        """Return the sum of the losses of ``hidden`` (bsz, seqlen, dim), divided by ``divisor``.

        Tokens whose ``labels`` (bsz, seqlen) are IGNORE_INDEX have no loss. Under tensor parallel, ``hidden`` is a
        DTensor, and every rank returns the same loss.
        """
        if isinstance(self.output, FSDPModule):
            self.output.unshard()  # does nothing if FSDP has not freed the weight after the forward pass
        weight, shard = self.output.weight, None
        if isinstance(weight, DTensor):
            shard = VocabularyShard.from_weight(weight)
            # each rank computes the part of the gradient that comes from its rows of the weight
            hidden = hidden.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])  # type: ignore[attr-defined]
            weight = weight.to_local()
        if not torch.is_grad_enabled():
            weight = weight.detach()  # a custom function would compute its gradient anyway
        loss = LinearCrossEntropy.apply(
            hidden.flatten(0, 1), weight, labels.flatten(), divisor, self.chunk_tokens, shard
        )
        if isinstance(self.output, FSDPModule) and not torch.is_grad_enabled():
            self.output.reshard()  # in training the backward pass does
        return loss


class VocabularyShard(NamedTuple):
    """The rows of the output weight that this rank has under tensor parallel."""

    group: dist.ProcessGroup
    start: int

    @classmethod
    def from_weight(cls, weight: DTensor) -> VocabularyShard:
        mesh = weight.device_mesh
        if weight.placements != (Shard(0),):
            raise UsageError(
                "npu.loss_chunk_tokens must be 0: the parallel plan places the output's weight as "
                f"{weight.placements}, and only one that is sharded by rows can be computed in chunks"
            )
        return cls(mesh.get_group(), mesh.get_local_rank() * math.ceil(weight.shape[0] / mesh.size()))

    def reduce(self, tensor: Tensor, op: Any) -> None:
        dist.all_reduce(tensor, op, group=self.group)


class LinearCrossEntropy(torch.autograd.Function):
    """Cross entropy of a linear layer's outputs, whose forward pass computes the gradients too.

    As in ``nn.Linear``, matrix products have the dtype of the weight, or that of autocast. The softmax is float32, and
    so is the sum of the weight's gradient over the chunks. It is rounded once, to the dtype of the weight.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        divisor: float | Tensor,
        chunk_tokens: int,
        shard: VocabularyShard | None,
    ) -> Tensor:
        """Return the loss of ``hidden`` (rows, dim), ``weight`` (vocabulary or this rank's shard, dim), ``labels``."""
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        sum_dtype = torch.promote_types(dtype, torch.float32)
        wants_hidden, wants_weight, *_ = ctx.needs_input_grad
        ctx.weight_dtype = weight.dtype
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=sum_dtype) if wants_weight else None
        losses = torch.empty_like(labels, dtype=sum_dtype)
        with torch.autocast(device, enabled=False):
            hidden, weight = hidden.to(dtype), weight.to(dtype)
            for start in range(0, len(labels), chunk_tokens):
                chunk = slice(start, start + chunk_tokens)
                logits = (hidden[chunk] @ weight.t()).to(sum_dtype)
                losses[chunk] = losses_and_gradients_(logits, labels[chunk], divisor, shard)
                grad_logits = logits.to(dtype)
                del logits
                if grad_hidden is not None:
                    grad_hidden[chunk] = grad_logits @ weight
                if grad_weight is not None:
                    add_product_(grad_weight, grad_logits, hidden[chunk])
                del grad_logits
            ctx.save_for_backward(grad_hidden, grad_weight)
            return losses.sum() / divisor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = grad_hidden * grad.to(grad_hidden.dtype)
        if grad_weight is not None:  # rounded without an intermediate result as large as the weight
            rounded = torch.empty_like(grad_weight, dtype=ctx.weight_dtype)
            grad_weight = torch.mul(grad_weight, grad, out=rounded)
        return grad_hidden, grad_weight, None, None, None, None


def losses_and_gradients_(
    logits: Tensor, labels: Tensor, divisor: float | Tensor, shard: VocabularyShard | None
) -> Tensor:
    """Return the loss of each row of ``logits`` (rows, vocabulary). Overwrite them by their gradients / ``divisor``.

    With a ``shard`` of the vocabulary, two reductions of one or two numbers per row complete the softmax.
    """
    has_label = labels != IGNORE_INDEX
    is_local, column = has_label, labels  # the column of the label's logit, if this rank has it
    if shard is not None:
        column = labels - shard.start
        is_local = has_label & (column >= 0) & (column < logits.shape[1])
    column = column.where(is_local, 0).unsqueeze(1)

    maximum = logits.amax(1, keepdim=True)
    if shard is not None:
        shard.reduce(maximum, dist.ReduceOp.MAX)
    logits.sub_(maximum)
    label_logit = logits.gather(1, column).squeeze(1).where(is_local, 0)
    sums = torch.stack([logits.exp_().sum(1), label_logit])
    if shard is not None:
        shard.reduce(sums, dist.ReduceOp.SUM)
    exp_sum, label_logit = sums

    logits.mul_((has_label / (exp_sum * divisor)).unsqueeze(1))  # softmax / divisor
    logits.scatter_(1, column, logits.gather(1, column) - (is_local / divisor).unsqueeze(1))
    return (exp_sum.log() - label_logit).where(has_label, 0)


def add_product_(total: Tensor, grad_logits: Tensor, hidden: Tensor) -> None:
    """Add ``grad_logits.T @ hidden`` to ``total`` (vocabulary, dim), without rounding it to their dtype first."""
    if grad_logits.dtype == total.dtype:
        torch.addmm(total, grad_logits.t(), hidden, out=total)  # FLOP counters do not know addmm_
        return
    rows = torch.full((1,), len(hidden), dtype=torch.int64, device=hidden.device)
    for start in range(0, len(total), VOCABULARY_STEP):
        part = slice(start, start + VOCABULARY_STEP)
        columns = grad_logits[:, part].contiguous()  # the GPU's kernel multiplies no strided matrices
        torch.ops.npu.npu_grouped_matmul_add_(total[part].unsqueeze(0), columns, hidden, rows)
