"""Train specs whose models this package compiles, as :func:`torchtitan_npu.train_specs.adapt.adapt` makes them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchtitan.config import JobConfig
from torchtitan.protocols.train_spec import TrainSpec

from torchtitan_npu.compile.block_regions import add_input_waits, compile_models, compiles_blocks, without_compile


@dataclass
class AdaptedTrainSpec(TrainSpec):
    """A TrainSpec with what our converters and layouts need.

    This package compiles its models if the job bypasses code generation or has graph passes. Else TorchTitan does.
    """

    def __post_init__(self) -> None:
        parts_of: dict[str, Callable[[Any], list[Any]]] = {
            "parallelize_fn": lambda model: [model],
            "build_loss_fn": lambda loss: [],
            "pipelining_fn": lambda schedule_and_parts: schedule_and_parts[1],
        }
        for name, parts in parts_of.items():
            if (build := getattr(self, name)) is not None:
                setattr(self, name, _compiling(build, parts))


def _compiling(build: Callable[..., Any], parts: Callable[[Any], list[Any]]) -> Callable[..., Any]:
    """Return ``build``, which takes a job's config, with the model ``parts`` of its result compiled by this package."""
    if hasattr(build, "compiles"):  # dataclasses.replace passes functions that are wrapped already
        return build

    @functools.wraps(build)
    def build_and_compile(*args: Any, **kwargs: Any) -> Any:
        config = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, JobConfig)), None)
        if config is None or not config.compile.enable:
            return build(*args, **kwargs)
        if not compiles_blocks(config):
            built = build(*args, **kwargs)
            for block in (block for part in parts(built) for block in part.layers.values()):
                add_input_waits(block)
            return built
        eager = without_compile(config)
        built = build(
            *(eager if arg is config else arg for arg in args),
            **{key: eager if arg is config else arg for key, arg in kwargs.items()},
        )
        compile_models(parts(built), config)
        return built

    build_and_compile.compiles = True  # type: ignore[attr-defined]
    return build_and_compile
