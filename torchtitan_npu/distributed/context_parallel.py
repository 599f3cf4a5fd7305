"""Context parallel for attention that TorchTitan's does not know: a base to write one's own on.

TorchTitan exchanges keys and values inside its own scaled dot-product attention. A model with another attention names
in the job's ``npu.context_parallel`` a class that says how that communicates:

    [npu]
    context_parallel = "my_package.my_module:MyContextParallel"
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.context_parallel import prepare_context_parallel_input

from torchtitan_npu.config.job_config import npu_options
from torchtitan_npu.distributed.microbatches import Microbatches
from torchtitan_npu.errors import UsageError
from torchtitan_npu.upstream.rebind import rebound


class ContextParallel:
    """Gives each rank its part of every sequence; a subclass lets the model's attention communicate.

    With ``load_balancer`` "headtail" a rank has two parts of a sequence: of 2n parts the r-th and the r-th from the
    end, so that causal attention is as much work on every rank. Otherwise it has one, of n.
    """

    load_balancers: ClassVar[tuple[str | None, ...]] = (None,)
    """What a subclass's attention can do with."""

    def __init__(self, mesh: DeviceMesh, load_balancer: str | None) -> None:
        self.check_load_balancer(load_balancer)
        self.mesh = mesh
        self.head_tail = load_balancer == "headtail"

    @classmethod
    def check_load_balancer(cls, load_balancer: str | None) -> None:
        if load_balancer not in cls.load_balancers:
            takes = " or ".join(repr(name or "") for name in cls.load_balancers)
            asked = f"parallelism.context_parallel_load_balancer {load_balancer!r}"
            raise UsageError(f"{asked} is not for {cls.__name__}: {takes}")

    def parallelize(self, model: nn.Module) -> None:
        """Change ``model``, before it is checkpointed, compiled and sharded, so that its attention sees all tokens."""
        raise NotImplementedError

    def places(self, seq_len: int) -> Tensor:
        """Which tokens of a sequence this rank has, (seq_len / ranks), in the order in which it has them."""
        ranks, device = self.mesh.size(), self.mesh.device_type
        if seq_len % (2 * ranks if self.head_tail else ranks):
            raise UsageError(f"sequences of {seq_len} tokens cannot be split over {ranks} ranks")
        rank = self.mesh.get_local_rank()
        parts = torch.arange(seq_len, device=device).chunk(2 * ranks if self.head_tail else ranks)
        return torch.cat([parts[rank], parts[-1 - rank]]) if self.head_tail else parts[rank]

    def prepare(
        self, inputs: Tensor, labels: Tensor, extra_kwargs: dict[str, Any], *_: Any
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """This rank's part of ``inputs`` and ``labels`` (bsz, seqlen), and its tokens' positions for the model.

        It takes what TorchTitan's ``prepare_context_parallel_input`` does.
        """
        places = self.places(inputs.shape[1])
        masks = extra_kwargs.get("attention_masks")
        if isinstance(masks, Microbatches):
            bsz, seqlen = inputs.shape[0] // len(masks.values), inputs.shape[1]
            extra_kwargs = extra_kwargs | {"attention_masks": masks.map(lambda each: self.masks(each, bsz, seqlen))}
        elif masks is not None:
            extra_kwargs = extra_kwargs | {"attention_masks": self.masks(masks, *inputs.shape)}
        positions = places.to(torch.int32).expand(inputs.shape[0], -1)
        return inputs[:, places], labels[:, places], extra_kwargs | {"positions": positions}

    def masks(self, masks: Any, bsz: int, seqlen: int) -> Any:
        """What the model gets in place of the ``masks`` of whole sequences; in a pipeline, of a microbatch's."""
        raise UsageError(f"{type(self).__name__} takes no attention masks")


def context_parallel(job_config: JobConfig, dims: ParallelDims, default: str | None) -> ContextParallel | None:
    """An object of the :func:`context_class`; none where TorchTitan's own context parallel serves, or none is asked."""
    cls = context_class(job_config, default) if dims.cp_enabled else None
    return cls(dims.get_mesh("cp"), job_config.parallelism.context_parallel_load_balancer) if cls else None


def context_class(job_config: JobConfig, default: str | None) -> type[ContextParallel] | None:
    """What the job names, or else the model's ``default``."""
    name = npu_options(job_config).context_parallel or default
    return _named(name) if name else None


def with_context(process: Callable[..., Any], context: ContextParallel) -> Any:
    """``process``, TorchTitan's way from a batch to a model's inputs, with the parts that ``context`` makes of it."""
    ours = rebound(process, {prepare_context_parallel_input: context.prepare})
    assert ours is not process, "TorchTitan prepares context parallel's inputs in another way"
    return ours


def _named(name: str) -> type[ContextParallel]:
    module_name, _, class_name = name.partition(":")
    try:
        cls = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f'npu.context_parallel {name!r} is no "module:Class": {error}') from error
    if not (isinstance(cls, type) and issubclass(cls, ContextParallel)):
        raise UsageError(f"npu.context_parallel {name!r} is no subclass of {__name__}.ContextParallel")
    if cls.parallelize is ContextParallel.parallelize:
        raise UsageError(
            f"npu.context_parallel {name!r} does not say how attention communicates: it has no parallelize"
        )
    return cls
