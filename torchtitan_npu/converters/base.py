"""What every converter does: find its targets, replace them, say so, and refuse loudly when something is off.

A converter is a name in ``model.converters``. TorchTitan calls :meth:`Converter.convert` on the model as built, on the
meta device, before it is parallelised, checkpointed or compiled. A converter matches modules by type and structure,
never by the model's name; it keeps every parameter: the object itself, hence its name, shape, dtype and initial value.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Any, ClassVar, TypeVar

import torch.distributed as dist
from torch import nn
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.model_converter import register_model_converter
from torchtitan.tools.logging import logger

from torchtitan_npu import platform
from torchtitan_npu.config import npu_options
from torchtitan_npu.errors import UsageError

CONVERTERS: dict[str, type[Converter]] = {}
"""This package's converters, by name."""

_MARK = "_converted_by"  # a plain attribute of the model: converter names, no part of its state


class Converter(ABC):
    """One name in ``model.converters``. A subclass says what it looks for and what it puts there."""

    name: ClassVar[str]
    """What the user lists in ``model.converters``."""
    looks_for: ClassVar[str]
    """What it replaces, as logs and errors call it: ``"nn.RMSNorm"``."""

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims):
        self.job_config = job_config
        self.parallel_dims = parallel_dims

    @abstractmethod
    def targets(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """The modules to replace, each once, with its name."""

    @abstractmethod
    def replacement(self, fqn: str, module: nn.Module) -> nn.Module:
        """The module to put in the place of ``module``; often :func:`retyped`. It must not change ``module`` itself."""

    def refusals(self, fqn: str, module: nn.Module) -> list[str]:
        """What an NPU's kernels would refuse of this target (see :meth:`torchtitan_npu.ops.Op.refusals`)."""
        return []

    def found_targets(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """The :meth:`targets`, of which there must be some."""
        targets = self.targets(model)
        if not targets:
            raise UsageError(
                f"model.converters: {self.name} found no {self.looks_for} in {type(model).__name__}; "
                f"take it off the list, or check that the model is the one you meant"
            )
        return targets

    def convert(self, model: nn.Module) -> None:
        """Replace every target in ``model``, in place."""
        done = getattr(model, _MARK, ())
        if self.name in done:
            raise UsageError(f"model.converters: {self.name} is listed twice; list it once")
        targets = self.found_targets(model)
        self._check_limits(targets)
        replacements = {module: self.replacement(fqn, module) for fqn, module in targets}
        replace_modules(model, replacements)
        setattr(model, _MARK, (*done, self.name))
        log_once(f"{self.name}: replaced {len(replacements)} {self.looks_for}")

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """TorchTitan calls it after each optimizer step; there is nothing to do unless a subclass says otherwise."""
        return

    def _check_limits(self, targets: list[tuple[str, nn.Module]]) -> None:
        """What an NPU would refuse is an error there, and elsewhere one line (with ``npu.strict_limits``, an error)."""
        refused = [f"{fqn}: {text}" for fqn, module in targets for text in self.refusals(fqn, module)]
        if not refused:
            return
        message = f"{self.name}: an NPU would refuse {refused[0]}"
        if len(refused) > 1:
            message += f" (and {len(refused) - 1} more)"
        if npu_options(self.job_config).strict_limits or platform.home() == "npu":
            raise UsageError(message)
        log_once(message)


ConverterClass = TypeVar("ConverterClass", bound=type[Converter])


def register(cls: ConverterClass) -> ConverterClass:
    """Class decorator: make the converter known to TorchTitan under its name."""
    register_model_converter(cls, cls.name)
    CONVERTERS[cls.name] = cls
    return cls


def modules_of_type(model: nn.Module, cls: type[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Every submodule whose class is exactly ``cls``, with its name; a subclass may compute something else."""
    return [(fqn, module) for fqn, module in model.named_modules() if type(module) is cls and module is not model]


ModuleType = TypeVar("ModuleType", bound=nn.Module)


def retyped(module: nn.Module, cls: type[ModuleType]) -> ModuleType:
    """A ``cls`` with everything ``module`` has: the same parameter, buffer and child objects, hooks and attributes.

    ``cls`` is a subclass of ``module``'s class that computes the same in another way. ``module`` stays as it is.
    """
    if not issubclass(cls, type(module)):
        raise TypeError(f"{cls.__name__} is no subclass of {type(module).__name__}")
    new = cls.__new__(cls)
    # the registries (parameters, hooks, ...) are dicts and sets of their own; what they hold is shared
    state: dict[str, Any] = {
        key: copy.copy(value) if isinstance(value, (dict, set)) else value for key, value in vars(module).items()
    }
    vars(new).update(state)
    return new


def replace_modules(model: nn.Module, replacements: dict[nn.Module, nn.Module]) -> None:
    """Put each replacement wherever the module it replaces is registered, under every name it has."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in replacements:
                parent._modules[name] = replacements[child]


def log_once(message: str) -> None:
    """Log on the first rank only."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.info(message)
