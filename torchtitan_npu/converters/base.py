"""The base class of converters: find the targets, check them, replace them, log the result.

A converter is a name in ``model.converters``. TorchTitan calls :meth:`Converter.convert` on the model on the meta
device, before it is parallelised, checkpointed or compiled. A converter matches modules by type and structure, never by
the model's name. It keeps every parameter object, and with it name, shape, dtype and initial value.
"""

from __future__ import annotations

import copy
import functools
import re
from abc import ABC, abstractmethod
from collections import Counter
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.config.job_config import Training, Validation
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.model_converter import register_model_converter

from torchtitan_npu import cann, platform
from torchtitan_npu.chips import CHIPS
from torchtitan_npu.config.job_config import with_all_sections
from torchtitan_npu.errors import UsageError
from torchtitan_npu.log import log_on_first_rank

CONVERTERS: dict[str, type[Converter]] = {}
"""This package's converters by name."""

_APPLIED = "_applied_converters"  # an attribute of the model that is not part of its state dict


class Converter(ABC):
    """One name in ``model.converters``. A subclass defines its targets and their replacements."""

    name: ClassVar[str]
    """The name that users list in ``model.converters``."""
    looks_for: ClassVar[str]
    """The targets as error messages name them: ``"nn.RMSNorm"``."""
    operators: ClassVar[tuple[str, ...]]
    """The fused operators that the replacements call, unless a replacement has its own ``operators``."""
    conflicts: ClassVar[dict[str, str]] = {}
    """Other names in ``model.converters`` that cannot be combined with this one, and why."""
    chip_series: ClassVar[tuple[str, ...]] = ()
    """The series of the chips (:mod:`torchtitan_npu.chips`) for which CANN documents the operators. Empty: all."""
    chip_limit: ClassVar[str] = ""
    """How an error describes ``chip_series``."""
    exact: ClassVar[bool] = True
    """The results differ by rounding in the dtypes of the job only."""
    sorts_tokens: ClassVar[bool] = False
    """The replacements need the tokens in TorchTitan's order of experts."""

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims):
        self.job_config = with_all_sections(job_config)
        self.parallel_dims = parallel_dims

    @abstractmethod
    def targets(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """Return (fqn, module) pairs to replace, without duplicates."""

    @abstractmethod
    def replacement(self, fqn: str, module: nn.Module) -> nn.Module:
        """Return the replacement of ``module``, often by :func:`convert_module`. Must not change ``module`` itself."""

    def limit_errors(self, fqn: str, module: nn.Module) -> list[str]:
        """Return the NPU limits that this target exceeds (see :class:`torchtitan_npu.ops.Op`)."""
        return []

    def batches(self) -> list[tuple[int, int]]:
        """Return (sequences, tokens per sequence) of a layer's input on one rank, for training and validation."""
        config, dims = self.job_config, self.parallel_dims
        sections: list[Training | Validation] = [config.training]
        if config.validation.enable:
            sections.append(config.validation)
        # a pipeline splits validation batches into as many microbatches as training batches
        microbatches = max(1, self.microbatches() or 1)
        return [(section.local_batch_size // microbatches, section.seq_len // dims.cp) for section in sections]

    def microbatches(self) -> int | None:
        """Return the number of microbatches of a pipeline, or ``None`` without one."""
        if not self.parallel_dims.pp_enabled:
            return None
        config = self.job_config
        return config.training.local_batch_size // config.parallelism.pipeline_parallel_microbatch_size

    def compute_dtype(self) -> torch.dtype:
        """Return the dtype of the activations. TorchTitan has no mixed precision with TP or PP and without FSDP."""
        training, dims = self.job_config.training, self.parallel_dims
        mixed = dims.fsdp_enabled or not (dims.tp_enabled or dims.pp_enabled)
        return TORCH_DTYPE_MAP[training.mixed_precision_param if mixed else training.dtype]

    def job_error(self) -> str | None:
        """Return why this job cannot use the converter with any model, or ``None``."""
        for other, reason in self.conflicts.items():
            if other in self.job_config.model.converters:
                return f"{self.name} and {other} cannot be combined: {reason}; list one of them"
        if self.sorts_tokens and self.job_config.parallelism.expert_parallel_comm_backend == "deepep":
            return (
                f'{self.name} and parallelism.expert_parallel_comm_backend = "deepep" cannot be combined: DeepEP has '
                f'its own order of tokens; set it to "standard", or remove {self.name} from the list'
            )
        installed = platform.cann_version()
        if installed is not None and (error := cann.converter_error(self.name, installed)):
            return f"{error}; install a newer CANN, or remove {self.name} from the list"
        chip = torch.get_device_module("npu").get_device_name() if platform.backend() == "npu" else None
        if chip is not None and (error := self.chip_error(chip)):
            return f"{error}; remove {self.name} from model.converters"
        return None

    @classmethod
    def chip_error(cls, chip: str) -> str | None:
        """Return why ``chip``, the name of an NPU, cannot run the operators, or ``None``."""
        series = CHIPS[chip].series if chip in CHIPS else "unknown"
        if not cls.chip_series or series in cls.chip_series:
            return None
        return f"{cls.chip_limit}, and the series of {chip} is {series}"

    def check_job(self) -> None:
        """Raise the :meth:`job_error`, if there is one."""
        if error := self.job_error():
            raise UsageError(f"model.converters: {error}")

    def found_targets(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """Return the :meth:`targets`, and raise if there are none."""
        targets = self.targets(model)
        if not targets:
            raise UsageError(
                f"model.converters: {self.name} found no {self.looks_for} in {type(model).__name__}; "
                f"remove it from the list, or check model.name"
            )
        return targets

    def convert(self, model: nn.Module) -> None:
        """Replace every target in ``model``, in place."""
        done = getattr(model, _APPLIED, ())
        if self.name in done:
            raise RuntimeError(f"{self.name} has already converted this model")
        self.check_job()
        targets = self.found_targets(model)
        if warning := self.check_limits(targets):
            log_on_first_rank(warning)
        replacements = {module: self.replacement(fqn, module) for fqn, module in targets}
        replace_modules(model, replacements)
        setattr(model, _APPLIED, (*done, self.name))
        called = dict.fromkeys(op for new in replacements.values() for op in getattr(new, "operators", self.operators))
        log_on_first_rank(f"{self.name}: {summary(targets)} -> {', '.join(called)}")

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Do nothing. TorchTitan calls this after each optimizer step."""
        return

    def check_limits(self, targets: list[tuple[str, nn.Module]]) -> str | None:
        """Check the NPU limits of ``targets``. Raise on an NPU or with ``npu.strict_limits``, else return a warning."""
        errors = [f"{fqn}: {text}" for fqn, module in targets for text in self.limit_errors(fqn, module)]
        if not errors:
            return None
        message = f"{self.name}: not supported by the NPU kernel: {errors[0]}"
        if len(errors) > 1:
            message += f" (and {len(errors) - 1} more)"
        if self.job_config.npu.strict_limits or platform.job_backend() == "npu":
            raise UsageError(message)
        return message


ConverterClass = TypeVar("ConverterClass", bound=type[Converter])


def register(cls: ConverterClass) -> ConverterClass:
    """Register the converter with TorchTitan under its name. A class decorator."""
    register_model_converter(cls, cls.name)
    CONVERTERS[cls.name] = cls
    return cls


def exact_converters() -> dict[str, type[Converter]]:
    """Return the converters that change no result by more than rounding, by name."""
    return {name: cls for name, cls in CONVERTERS.items() if cls.exact}


def modules_of_type(model: nn.Module, cls: type[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return every submodule whose class is exactly ``cls``; a subclass may compute something else."""
    return [(fqn, module) for fqn, module in model.named_modules() if type(module) is cls and module is not model]


ModuleType = TypeVar("ModuleType", bound=nn.Module)


def convert_module(module: nn.Module, cls: type[ModuleType]) -> ModuleType:
    """Return a ``cls`` with the parameters, buffers, children, hooks and attributes of ``module``.

    ``cls`` is a subclass of ``module``'s class that computes the same result. ``module`` itself does not change.
    """
    if not issubclass(cls, type(module)):
        raise TypeError(f"{cls.__name__} is not a subclass of {type(module).__name__}")
    new = cls.__new__(cls)
    # copy the registries (parameters, hooks, ...), which are dicts and sets, and share their contents
    state: dict[str, Any] = {
        key: copy.copy(value) if isinstance(value, (dict, set)) else value for key, value in vars(module).items()
    }
    vars(new).update(state)
    return new


def swap_forward(module: nn.Module, cls: type[ModuleType]) -> ModuleType:
    """Like :func:`convert_module`, for a ``module`` whose class may be a sibling of ``cls`` with the same forward."""
    return convert_module(module, cls if issubclass(cls, type(module)) else _derived(cls, type(module)))  # type: ignore[arg-type]


@functools.cache  # one class for all layers
def _derived(cls: type[nn.Module], original: type[nn.Module]) -> Any:
    return type(f"Npu{original.__name__}", (cls, original), {})


def replace_modules(model: nn.Module, replacements: dict[nn.Module, nn.Module]) -> None:
    """Put each replacement in place of its module, under every name that the module has in ``model``."""
    # parents come first, so that a replacement inside another one is set on the new parent
    for fqn, module in list(model.named_modules(remove_duplicate=False)):
        if module in replacements:
            parent, _, name = fqn.rpartition(".")
            setattr(model.get_submodule(parent), name, replacements[module])


def summary(targets: list[tuple[str, nn.Module]]) -> str:
    """Describe ``targets`` by number, type and name: ``"13 RMSNorm in layers 0-5, norm"``."""
    types = Counter(type(module).__name__ for _, module in targets)
    names: list[str] = []
    layers: dict[str, set[int]] = {}  # by the path of their container
    for fqn, _ in targets:
        if number := re.search(r"(?:^|\.)(\d+)(?=\.|$)", fqn):
            layers.setdefault(fqn[: number.start()], set()).add(int(number[1]))
        else:
            names.append(fqn)
    where = []
    for path, numbers in sorted(layers.items()):
        starts, ends = (sorted(n for n in numbers if n + step not in numbers) for step in (-1, 1))
        ranges = " ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
        where.append(f"{path} {ranges}".strip())
    return f"{', '.join(f'{n} {name}' for name, n in types.items())} in {', '.join([*where, *sorted(names)])}"
