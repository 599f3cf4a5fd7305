"""TorchTitan's debug models in small sizes, with and without converters, and the results of a training step."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.model_converter import build_model_converters
from torchtitan.protocols.train_spec import get_train_spec

import torchtitan_npu
from torchtitan_npu.config.sections import Npu
from torchtitan_npu.errors import UsageError

torchtitan_npu.register()

BATCH, SEQUENCE = 2, 16

LAYOUT = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1, "etp": 1, "world_size": 1}


def job(converters: tuple[str, ...] = ()) -> JobConfig:
    config = JobConfig()
    config.model.converters = list(converters)
    config.training.seq_len = SEQUENCE
    config.training.mixed_precision_param = "float32"
    config.activation_checkpoint.mode = "none"
    return config


def convert(model: nn.Module, *converters: str, **options: Any) -> nn.Module:
    """Convert ``model`` as TorchTitan's trainer does, with ``options`` of the section ``[npu]``, and return it."""
    config: Any = job(converters)
    config.npu = Npu(**options)
    build_model_converters(config, ParallelDims(**LAYOUT)).convert(model)
    return model


def assert_limit(model: nn.Module, name: str, limit: str, caplog: pytest.LogCaptureFixture) -> None:
    """Check that a model beyond an NPU limit is converted and the limit logged, or refused if limits are strict."""
    before = [type(module) for module in model.modules()]
    refusal = f"{name}: not supported by the NPU kernel: {limit}"
    with pytest.raises(UsageError) as error:
        convert(model, name, strict_limits=True)
    assert str(error.value) == refusal
    assert [type(module) for module in model.modules()] == before
    with caplog.at_level(logging.INFO):
        convert(model, name)
    assert refusal in caplog.messages


def model_args(name: str, **changes: Any) -> Any:
    args = copy.deepcopy(get_train_spec(name).model_args["debugmodel"])
    args.update_from_config(job())
    for field, value in changes.items():
        setattr(args, field, value)
    return args


def build_on_meta(name: str, *converters: str, **changes: Any) -> nn.Module:
    """Build and convert the debug model on the meta device."""
    with torch.device("meta"):
        model = get_train_spec(name).model_cls(model_args(name, **changes))
    return convert(model, *converters) if converters else model


def build(name: str, *converters: str, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """Build the debug model with weights that depend on its name only, not on converters or dtype."""
    model = build_on_meta(name, *converters, **changes).to_empty(device="cpu")
    initialise(model)
    # Module.to would cast complex rotation tables to real
    return model._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def initialise(model: nn.Module) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
        for name, parameter in model.named_parameters():
            if "norm" in name:  # norm weights of one would hide a missing multiplication
                parameter.uniform_(0.5, 1.5)


def tokens() -> Tensor:
    return torch.randint(0, 2048, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(1))


@dataclass
class Step:
    """The results of a step: the loss, and each parameter's gradient by name."""

    loss: Tensor
    grads: dict[str, Tensor]


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def step(model: nn.Module) -> Step:
    inputs, labels = tokens()[:, :-1], tokens()[:, 1:]
    logits = full(model(inputs))
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not missing, f"no gradient: {missing}"
    names = {name: name.replace("_checkpoint_wrapped_module.", "") for name, _ in model.named_parameters()}
    return Step(loss.detach(), {names[n]: full(p.grad).detach() for n, p in model.named_parameters()})


def assert_as_exact(converted: Step, plain: Step, oracle: Step) -> None:
    """Check that loss and gradients are as near to the float64 model as the plain model's."""
    assert converted.grads.keys() == plain.grads.keys() == oracle.grads.keys()
    values = {"loss": (converted.loss, plain.loss, oracle.loss)}
    values |= {name: (converted.grads[name], plain.grads[name], oracle.grads[name]) for name in oracle.grads}
    for name, (ours, theirs, exact) in values.items():
        assert_no_further(name, ours, theirs, exact)


def assert_no_further(name: str, ours: Tensor, theirs: Tensor, exact: Tensor, roundings: int = 2) -> None:
    """Check that ``ours`` is at most twice as far from ``exact`` (float64) as ``theirs``, plus some roundings.

    ``theirs`` may be exact by chance."""
    assert ours.dtype == theirs.dtype and exact.dtype == torch.float64
    budget = 2 * (theirs.double() - exact).norm() + roundings * torch.finfo(theirs.dtype).eps / 2 * exact.norm()
    distance = (ours.double() - exact).norm()
    assert distance <= budget, f"{name}: {distance:.3g} from the float64 result, budget {budget:.3g}"
