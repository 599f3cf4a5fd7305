"""TorchTitan's debug models, small, with and without converters, and what a step of training gives with them."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.model_converter import build_model_converters
from torchtitan.protocols.train_spec import get_train_spec

import torchtitan_npu

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


def convert(model: nn.Module, *converters: str) -> nn.Module:
    """``model`` after TorchTitan has run ``converters`` over it, as its trainer does."""
    build_model_converters(job(converters), ParallelDims(**LAYOUT)).convert(model)
    return model


def model_args(name: str, **changes: Any) -> Any:
    args = copy.deepcopy(get_train_spec(name).model_args["debugmodel"])
    args.update_from_config(job())
    for field, value in changes.items():
        setattr(args, field, value)
    return args


def build_on_meta(name: str, *converters: str, **changes: Any) -> nn.Module:
    """The debug model on the meta device, as TorchTitan builds and converts it."""
    with torch.device("meta"):
        model = get_train_spec(name).model_cls(model_args(name, **changes))
    return convert(model, *converters) if converters else model


def build(name: str, *converters: str, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """The debug model with weights: the same for the same name, whatever the converters and the dtype."""
    model = build_on_meta(name, *converters, **changes).to_empty(device="cpu")
    initialise(model)
    # Module.to would make complex rotation tables real
    return model._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def initialise(model: nn.Module) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
        for name, parameter in model.named_parameters():
            if "norm" in name:  # norms that start as ones would hide a gain that is left out
                parameter.uniform_(0.5, 1.5)


def tokens() -> Tensor:
    return torch.randint(0, 2048, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(1))


@dataclass
class Step:
    """What one step computes: the loss and every parameter's gradient, by the parameter's own name."""

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
    """The converted model is as near to the float64 model as the plain one, in the loss and gradient by gradient."""
    assert converted.grads.keys() == plain.grads.keys() == oracle.grads.keys()
    values = {"loss": (converted.loss, plain.loss, oracle.loss)}
    values |= {name: (converted.grads[name], plain.grads[name], oracle.grads[name]) for name in oracle.grads}
    for name, (ours, theirs, exact) in values.items():
        assert_no_further(name, ours, theirs, exact)


def assert_no_further(name: str, ours: Tensor, theirs: Tensor, exact: Tensor, roundings: int = 2) -> None:
    """``ours`` is at most twice as far from ``exact`` (float64) as ``theirs``, which may hit it by chance: so many
    roundings more."""
    assert ours.dtype == theirs.dtype and exact.dtype == torch.float64
    budget = 2 * (theirs.double() - exact).norm() + roundings * torch.finfo(theirs.dtype).eps / 2 * exact.norm()
    distance = (ours.double() - exact).norm()
    assert distance <= budget, f"{name}: {distance:.3g} from the float64 result, budget {budget:.3g}"
