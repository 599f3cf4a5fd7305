"""``npu_attention``: dense attention calls ``npu_fusion_attention``, in the memory layout that the model has.

TorchTitan's models transpose queries, keys and values to (bsz, heads, seqlen, head_dim) for PyTorch's kernels. The
operator takes (bsz, seqlen, heads, head_dim), so the modules here transpose the views back. Nothing is copied, except
under context parallel, which gathers keys and values.
Packed documents are one call over all tokens, with cumulative sequence lengths instead of a mask.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import BlockMask
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.attention import (
    FlexAttentionWrapper,
    ScaledDotProductAttentionWrapper,
    VarlenAttentionWrapper,
    VarlenMetadata,
)
from torchtitan.models.deepseek_v3.model.model import DeepSeekV3Model
from torchtitan.models.llama3.model.model import Transformer
from torchtitan.models.qwen3.model.model import Qwen3Model

from torchtitan_npu.converters.base import Converter, convert_module, register
from torchtitan_npu.dist_utils import Microbatches, SequenceSplit, all_gather_kv, local
from torchtitan_npu.errors import UsageError
from torchtitan_npu.layers.documents import Documents
from torchtitan_npu.layers.packed_attention import DocumentMask, FrameAttention, MaskedAttention, starts_document
from torchtitan_npu.ops.fusion_attention.op import attention, causal_mask, packed_attention

SEQUENCE_DIM = 2  # (bsz, heads, seqlen, head_dim)


class CausalMask:
    """The operator's causal mask, one for all layers of a model. A forward pre-hook of the model makes it."""

    tensor: Tensor | None = None

    def prepare(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        device = next(value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        if self.tensor is None or self.tensor.device != device:
            with torch.inference_mode(False), torch.no_grad():  # training reuses the mask that validation makes
                self.tensor = causal_mask(device)


class NpuCausalAttention(ScaledDotProductAttentionWrapper):
    """Causal attention."""

    mask: CausalMask

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        is_causal: bool = True,
    ) -> Tensor:
        """Attend from ``q`` (bsz, heads, seqlen, head_dim), under tensor parallel perhaps a DTensor."""
        return _with_heads_of(q, self.attend(q, k, v, scale, self.mask.tensor if is_causal else None))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, mask: Tensor | None) -> Tensor:
        """Return this rank's output for its shards."""
        return _attend(local(q), local(k), local(v), scale, mask)


class NpuContextParallelAttention(NpuCausalAttention):
    """Causal attention over a sequence that is sharded on the context-parallel mesh: keys and values are gathered.

    TorchTitan's hooks around the module turn the local q, k and v into DTensors sharded on the sequence, and the
    output back.
    """

    head_tail = False
    """Each rank has two chunks of the sequence, one from each end."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, mask: Tensor | None) -> Tensor:
        assert isinstance(q, DTensor) and isinstance(k, DTensor) and isinstance(v, DTensor) and mask is not None
        split = SequenceSplit(q.device_mesh.size(), self.head_tail)
        keys, values = (split.in_sequence_order(all_gather_kv(x), SEQUENCE_DIM) for x in (k, v))
        chunks, length = split.chunks_of(q.device_mesh.get_local_rank()), keys.shape[SEQUENCE_DIM] // split.chunks
        outputs = []
        for chunk, queries in zip(chunks, q.to_local().chunk(len(chunks), SEQUENCE_DIM), strict=True):
            end = (chunk + 1) * length
            visible = keys.narrow(SEQUENCE_DIM, 0, end), values.narrow(SEQUENCE_DIM, 0, end)
            outputs.append(_attend(queries, *visible, scale, mask))
        return torch.cat(outputs, dim=SEQUENCE_DIM)


class NpuVarlenAttention(VarlenAttentionWrapper):
    """Causal attention within documents, for models with ``attn_type`` "varlen"."""

    mask: CausalMask

    def forward(
        self, xq: Tensor, xk: Tensor, xv: Tensor, attention_masks: VarlenMetadata, scale: float | None = None
    ) -> Tensor:
        """Return (bsz * seqlen, heads, head_dim), from ``xq`` (bsz, heads, seqlen, head_dim)."""
        assert isinstance(attention_masks, VarlenDocuments)
        out = _attend(local(xq), local(xk), local(xv), scale, self.mask.tensor, attention_masks.documents)
        return _with_heads_of(xq, out.transpose(1, 2).flatten(0, 1))


class NpuFlexAttention(FlexAttentionWrapper):
    """Causal attention, within documents if the model's mask has them, for models with ``attn_type`` "flex"."""

    mask: CausalMask

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        score_mod: Any = None,
        block_mask: BlockMask | None = None,
        scale: float | None = None,
        return_lse: bool = False,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Attend from ``q`` (bsz, heads, seqlen, head_dim)."""
        assert isinstance(block_mask, BlockDocuments) and score_mod is None and not return_lse
        out = _attend(local(q), local(k), local(v), scale, self.mask.tensor, block_mask.documents)
        return _with_heads_of(q, out)


class NpuMaskedAttention(MaskedAttention):
    """Causal attention, within documents if there are any."""

    mask: CausalMask

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, attention_masks: Any, *, scale: float, enable_gqa: bool
    ) -> Tensor:
        return _attend(q, k, v, scale, self.mask.tensor, attention_masks)


class NpuDocumentMask(DocumentMask):
    """Returns the documents themselves, for :class:`NpuMaskedAttention`. Synchronises with the device."""

    def forward(self, positions: Tensor) -> Documents:  # type: ignore[override]
        return Documents.from_last_tokens(starts_document(positions).roll(-1, dims=-1))


class NpuFrameAttention(FrameAttention):
    """Attention within the frames of a batch, in one call."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, runs: list[tuple[int, int]]) -> Tensor:
        lengths = (length for frames, length in runs for _ in range(frames))
        return packed_attention(q, k, v, list(accumulate(lengths)), scale=None, mask=None)


def _with_heads_of(q: Tensor, out: Tensor) -> Tensor:
    """Return ``out`` as a DTensor if ``q`` is one, as under qwen3's tensor parallel. Both have the heads in dim 1."""
    if not isinstance(q, DTensor):
        return out
    return DTensor.from_local(out, q.device_mesh, q.placements, run_check=False)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, mask: Tensor | None, documents: Documents | None = None
) -> Tensor:
    """Return the attention of ``q`` (bsz, heads, seqlen, head_dim), in that shape, within ``documents`` if passed."""
    bsz = q.shape[0]
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))  # (bsz, seqlen, heads, head_dim)
    if documents is None:
        return attention(q, k, v, scale, mask).transpose(1, 2)
    q, k, v = (tensor.flatten(0, 1) for tensor in (q, k, v))
    out = packed_attention(q, k, v, documents.cu_seqlens_k.integers, scale, mask)
    return out.unflatten(0, (bsz, -1)).transpose(1, 2)


class VarlenDocuments(VarlenMetadata):
    """The documents of a batch, as the mask of a model with ``attn_type`` "varlen". It needs no metadata on device."""

    documents: Documents

    @classmethod
    def from_documents(cls, documents: Documents) -> VarlenDocuments:
        ends = documents.cu_seqlens_k.tensor
        mask = cls(ends, ends, 0, 0)
        mask.documents = documents
        return mask


class BlockDocuments(BlockMask):
    """The documents of a batch, as the mask of a model with ``attn_type`` "flex". It has no blocks."""

    def __init__(self, documents: Documents | None) -> None:
        self.documents = documents  # without the blocks of BlockMask, which only flex attention reads


class MaskOfBatch:
    """Replaces ``get_attention_masks`` of a model: finds the documents of a batch, once for all layers."""

    def __init__(self, mask: Any, by_document: bool, microbatches: int | None) -> None:
        self.mask, self.by_document, self.microbatches = mask, by_document, microbatches

    def __call__(self, input_batch: Tensor, tokenizer: BaseTokenizer, extra_inputs: Any = None) -> Any:
        if not self.by_document:
            return self.mask(None)
        assert tokenizer.eos_id is not None
        documents = Documents.from_tokens(input_batch, tokenizer.eos_id)
        if self.microbatches is None:
            return self.mask(documents)
        return Microbatches(map(self.mask, documents.split(self.microbatches)))


REPLACEMENTS: dict[type[nn.Module], type[nn.Module]] = {
    ScaledDotProductAttentionWrapper: NpuCausalAttention,
    VarlenAttentionWrapper: NpuVarlenAttention,
    FlexAttentionWrapper: NpuFlexAttention,
    MaskedAttention: NpuMaskedAttention,
    DocumentMask: NpuDocumentMask,
    FrameAttention: NpuFrameAttention,
}
MASKS = {"varlen": VarlenDocuments.from_documents, "flex": BlockDocuments}
"""The masks of TorchTitan's models, by their ``attn_type``."""
MODELS_WITH_MASKS = (Transformer, Qwen3Model, DeepSeekV3Model)
"""Models whose masks are causal or causal within documents, and nothing else."""


@register
class AttentionConverter(Converter):
    """Replaces the attention of TorchTitan's dense models, and that of qwen3_vl's decoder and vision tower."""

    name = "npu_attention"
    looks_for = "dense attention of a TorchTitan model"
    operators = ("npu_fusion_attention",)

    def targets(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        masked = isinstance(model, MODELS_WITH_MASKS)
        return [
            (fqn, module)
            for fqn, module in model.named_modules()
            if type(module) in REPLACEMENTS and (masked or type(module) is not FlexAttentionWrapper)
        ]

    def found_targets(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        targets = super().found_targets(model)
        if not self._masks_documents(model):
            return targets
        if self.parallel_dims.cp_enabled:
            raise UsageError(
                f"model.converters: {self.name} masks documents in this flavor, which context parallel does not split; "
                "choose a flavor without a document mask, or parallelism.context_parallel_degree = 1"
            )
        compiled = self.job_config.compile
        if compiled.enable and "model" in compiled.components:
            raise UsageError(
                f"model.converters: {self.name} masks documents in this model. Their ends are constants of a graph, "
                "which would be compiled again for each batch; choose a flavor without a document mask, remove "
                f"{self.name}, or set compile.enable = false"
            )
        return targets

    def convert(self, model: nn.Module) -> None:
        self.mask = CausalMask()
        super().convert(model)
        model.register_forward_pre_hook(self.mask.prepare, with_kwargs=True)
        args: Any = getattr(model, "model_args", None)
        if getattr(args, "attn_type", None) in MASKS:
            masks: Any = MaskOfBatch(MASKS[args.attn_type], self._masks_documents(model), self.microbatches())
            model.get_attention_masks = masks

    def replacement(self, fqn: str, module: nn.Module) -> nn.Module:
        cls = REPLACEMENTS[type(module)]
        if cls is NpuCausalAttention and self.parallel_dims.cp_enabled:
            cls = NpuContextParallelAttention
        new: Any = convert_module(module, cls)
        new.mask = self.mask
        if isinstance(new, NpuContextParallelAttention):
            new.head_tail = self.job_config.parallelism.context_parallel_load_balancer == "headtail"
        return new

    def _masks_documents(self, model: nn.Module) -> bool:
        args = getattr(model, "model_args", None)
        if getattr(args, "attn_type", None) in MASKS:
            return getattr(args, "attn_mask_type", None) == "block_causal"
        return any(isinstance(module, DocumentMask) for module in model.modules())
