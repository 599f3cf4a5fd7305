"""What every converter does: find its targets, replace them, say so, and refuse loudly when something is off.

A converter is a name in ``model.converters``. TorchTitan calls :meth:`Converter.convert` on the model as built, on the
meta device, before it is parallelised, checkpointed or compiled. A converter matches modules by type and structure,
never by the model's name; it keeps every parameter: the object itself, hence its name, shape, dtype and initial value.
"""

from __future__ import annotations

import copy
import functools
from abc import ABC, abstractmethod
from collections import Counter
from typing import Any, ClassVar, TypeVar

from torch import nn
from torchtitan.config import JobConfig
from torchtitan.config.job_config import Training, Validation
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.model_converter import register_model_converter

from torchtitan_npu import platform
from torchtitan_npu.config.job_config import npu_options
from torchtitan_npu.errors import UsageError
from torchtitan_npu.log import log_on_first_rank

CONVERTERS: dict[str, type[Converter]] = {}
"""This package's converters, by name."""

_MARK = "_converted_by"  # a plain attribute of the model: converter names, no part of its state


class Converter(ABC):
    """One name in ``model.converters``. A subclass says what it looks for and what it puts there."""

    name: ClassVar[str]
    """What the user lists in ``model.converters``."""
    looks_for: ClassVar[str]
    """What it replaces, as errors call it: ``"nn.RMSNorm"``."""
    operators: ClassVar[tuple[str, ...]]
    """The fused operators that its modules call; a module's own ``operators`` go before."""
    collides_with: ClassVar[dict[str, str]] = {}
    """Other names in ``model.converters`` that it cannot be listed with, and why."""

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

    def batches(self) -> list[tuple[int, int]]:
        """What a layer may get at once on a rank, in training and if enabled validation: sequences, tokens of each."""
        config, dims = self.job_config, self.parallel_dims
        sections: list[Training | Validation] = [config.training]
        if config.validation.enable:
            sections.append(config.validation)
        microbatches = 1  # a pipeline cuts a batch of validation into as many as one of training
        if dims.pp_enabled:
            size = config.parallelism.pipeline_parallel_microbatch_size
            microbatches = max(1, config.training.local_batch_size // size)
        return [(section.local_batch_size // microbatches, section.seq_len // dims.cp) for section in sections]

    def objection(self) -> str | None:
        """Why this job cannot have the converter, whatever the model; ``None`` if it can."""
        for other, reason in self.collides_with.items():
            if other in self.job_config.model.converters:
                return f"{self.name} and {other} collide: {reason}; list one of them"
        return None

    def check_job(self) -> None:
        """Raise the :meth:`objection`, if there is one."""
        if objection := self.objection():
            raise UsageError(f"model.converters: {objection}")

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
        self.check_job()
        targets = self.found_targets(model)
        if refusal := self.check_limits(targets):
            log_on_first_rank(refusal)
        replacements = {module: self.replacement(fqn, module) for fqn, module in targets}
        replace_modules(model, replacements)
        setattr(model, _MARK, (*done, self.name))
        called = dict.fromkeys(op for new in replacements.values() for op in getattr(new, "operators", self.operators))
        log_on_first_rank(f"{self.name}: {summary(targets)} -> {', '.join(called)}")

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """TorchTitan calls it after each optimizer step; there is nothing to do unless a subclass says otherwise."""
        return

    def check_limits(self, targets: list[tuple[str, nn.Module]]) -> str | None:
        """What an NPU would refuse: an error there, elsewhere a line to log (with ``npu.strict_limits``, an error)."""
        refused = [f"{fqn}: {text}" for fqn, module in targets for text in self.refusals(fqn, module)]
        if not refused:
            return None
        message = f"{self.name}: an NPU would refuse {refused[0]}"
        if len(refused) > 1:
            message += f" (and {len(refused) - 1} more)"
        if npu_options(self.job_config).strict_limits or platform.job_backend() == "npu":
            raise UsageError(message)
        return message


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


def with_forward(module: nn.Module, cls: type[ModuleType]) -> ModuleType:
    """:func:`retyped`, where ``module`` may be of a subclass that has the forward which that of ``cls`` replaces."""
    return retyped(module, cls if issubclass(cls, type(module)) else _both(cls, type(module)))  # type: ignore[arg-type]


@functools.cache
def _both(ours: type[nn.Module], theirs: type[nn.Module]) -> Any:
    return type(f"Npu{theirs.__name__}", (ours, theirs), {})


def replace_modules(model: nn.Module, replacements: dict[nn.Module, nn.Module]) -> None:
    """Put each replacement wherever the module it replaces is registered, under every name it has."""
    # one of the replacements may be a child of another
    for parent in [*model.modules(), *replacements.values()]:
        for name, child in parent._modules.items():
            if child in replacements:
                parent._modules[name] = replacements[child]


def summary(targets: list[tuple[str, nn.Module]]) -> str:
    """``"13 RMSNorm in layers 0-5, norm"``: how many modules of which types, and where."""
    types = Counter(type(module).__name__ for _, module in targets)
    layers, places = set(), set()
    for fqn, _ in targets:
        path = fqn.split(".")
        number = next((i for i, part in enumerate(path) if part.isdecimal()), None)
        if number is None:
            places.add(fqn)
        else:
            layers.add((".".join(path[:number]), int(path[number])))
    paths = sorted({path for path, _ in layers})
    where = [f"{path} {_ranges([n for p, n in layers if p == path])}".strip() for path in paths]
    return f"{', '.join(f'{n} {name}' for name, n in types.items())} in {', '.join([*where, *sorted(places)])}"


def _ranges(numbers: list[int]) -> str:
    """``[0, 1, 2, 5]`` as ``"0-2 5"``."""
    ends = sorted(n for n in numbers if n + 1 not in numbers)
    starts = sorted(n for n in numbers if n - 1 not in numbers)
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
