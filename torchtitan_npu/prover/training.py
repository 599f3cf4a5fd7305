"""Run gloo ranks, each a process forked from one that has imported TorchTitan. Each trains a job with the real Trainer,
and compares every gradient with those of one rank.

Random rounding of float32 operators measures how much rounding changes the results of a run.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import math
import multiprocessing
import os
import pickle
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import TCPStore
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import IGNORE_INDEX

from torchtitan_npu.prover.job import parse
from torchtitan_npu.torch_internals.dispatch import OpOverload, TorchDispatchMode
from torchtitan_npu.trainer import Trainer

GRACE_S = 5.0
"""Other ranks get this long to finish after one has failed. They may wait for it in a collective."""
LONGEST_REPORT = 8000
"""Characters of a rank's standard error that are reported, from its end."""


class RankError(RuntimeError):
    """A rank raised or died."""


class RankTimeout(RankError):
    """No rank raised, and one did not finish in time."""


def run_on_ranks(world_size: int, timeout_s: float, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call ``function(*args)`` on every rank with torchrun's variables, and return the results in rank order.

    Raise :class:`RankError` with the standard error of the first rank that raises or dies.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the ranks share the machine's cores
    # Importing TorchTitan takes seconds: the fork server does it once for all ranks.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torchtitan_npu.prover.preload"])
    # As with torchrun, the parent opens the store: a free port could be taken before rank 0 opens it.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1"}
    variables |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    processes, receivers = [], []
    with tempfile.TemporaryDirectory() as folder:
        errors = [Path(folder) / f"rank{rank}" for rank in range(world_size)]
        try:
            for rank in range(world_size):
                receiver, sender = context.Pipe(duplex=False)
                of_rank = variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                call = (sender, str(errors[rank]), of_rank, function, args)
                processes.append(context.Process(target=_run, args=call, daemon=True))
                processes[-1].start()
                sender.close()
                receivers.append(receiver)
            return _collect(receivers, errors, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(receivers: list[Connection], errors: list[Path], timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    failure = ""
    deadline = time.monotonic() + timeout_s
    waiting = {receiver: rank for rank, receiver in enumerate(receivers)}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for receiver in ready:
            rank = waiting.pop(receiver)  # type: ignore[call-overload]
            try:
                results[rank] = pickle.loads(receiver.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                # the first failure is usually the cause of later ones
                text = errors[rank].read_text(errors="replace").strip() if errors[rank].exists() else ""
                failure = failure or f"rank {rank} of {len(receivers)}: {text[-LONGEST_REPORT:] or 'the process died'}"
                deadline = min(deadline, time.monotonic() + GRACE_S)
    if failure:
        raise RankError(failure)
    if waiting:
        raise RankTimeout(f"{len(waiting)} of {len(receivers)} ranks ran longer than {timeout_s:g} s")
    return [results[rank] for rank in range(len(receivers))]


def _run(
    sender: Connection, errors: str, variables: dict[str, str], function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)  # an exception ends the process, and its traceback is there
    faulthandler.enable()  # show the Python stack of a crash in native code
    os.environ |= variables
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    result = function(*args)
    sender.send_bytes(pickle.dumps(result))  # send() would pass tensors through files of this process, which ends


Batches = Iterator[tuple[dict[str, Tensor], Tensor]]


@dataclass
class Run:
    """The results on one rank, by step."""

    losses: list[float] = field(default_factory=list)
    """The mean over all labels; negative on all but the last stage of a pipeline."""
    norms: list[float] = field(default_factory=list)
    differences: list[dict[str, float]] = field(default_factory=list)
    """By parameter: the norm of the gradient's difference from the reference, divided by the reference's norm."""
    biases: list[dict[str, list[float]]] = field(default_factory=list)
    """Expert biases after their update. The loads of the experts are integers, so they are equal, not close."""
    longest_sum: int = 0
    """The most terms that a product may add: the largest dimension of a parameter, or the tokens of a step."""


def train_reference(path: str, masked_labels: bool, gradients: str, samples: int, first_seed: int) -> list[Run]:
    """Train on one rank: once as it is, and ``samples`` times with other rounding. The first run is the reference.

    Its gradients are written to the file ``gradients``, unless there is one.
    """
    runs = []
    for sample in range(samples + 1):
        rounding = RandomRounding(first_seed + sample) if sample else nullcontext()
        runs.append(_train(path, masked_labels, Path(gradients), rounding))
        gc.collect()  # a Trainer has reference cycles
    return runs


def train(path: str, masked_labels: bool, gradients: str) -> Run:
    """Train as one rank of the job, and compare with the ``gradients`` of the reference."""
    return _train(path, masked_labels, Path(gradients), nullcontext())


def _train(path: str, masked_labels: bool, file: Path, rounding: Any) -> Run:
    config = parse(path)
    reference = torch.load(file, mmap=True) if file.exists() else None
    recorded: list[dict[str, Tensor]] = []
    run = Run()
    with tempfile.TemporaryDirectory() as folder:
        config.job.dump_folder = folder
        trainer = Trainer(config)
        sizes = [size for part in trainer.model_parts for parameter in part.parameters() for size in parameter.shape]
        run.longest_sum = max(*sizes, config.training.global_batch_size * config.training.seq_len)

        def log(step: int, loss: float, max_loss: float, norm: float, **kwargs: Any) -> None:
            run.losses.append(loss)
            run.norms.append(norm)

        def keep(*_: Any) -> None:
            step, gradients = len(run.biases), full_gradients(trainer.model_parts)
            if reference is None:
                recorded.append(gradients)
            else:
                exact = reference[step]
                run.differences.append({name: difference(g, exact.get(name)) for name, g in gradients.items()})
            run.biases.append(expert_biases(trainer.model_parts))  # the hook that balances experts has run before

        trainer.metrics_processor.log = log  # type: ignore[method-assign]
        trainer.optimizers.register_step_pre_hook(keep)
        batches = trainer.batch_generator(trainer.dataloader)
        if masked_labels:
            batches = with_masked_labels(batches)
        for _ in range(config.training.steps):
            trainer.step += 1
            with rounding:
                trainer.train_step(batches)
        trainer.close()
    if reference is None:
        torch.save(recorded, file)
        run.differences = [dict.fromkeys(gradients, 0.0) for gradients in recorded]
    return run


def with_masked_labels(batches: Batches) -> Batches:
    """Mask the start of each row: nothing, a quarter, a half, three quarters or all of it, depending on its labels.

    So there are rows, microbatches and parts of sequences without a label, on the same tokens with every layout.
    """
    for inputs, labels in batches:
        quarters = labels.sum(dim=1, keepdim=True) % 5  # (rows, 1)
        position = torch.arange(labels.shape[1], device=labels.device)
        yield inputs, labels.masked_fill(4 * position < quarters * labels.shape[1], IGNORE_INDEX)


def full_gradients(parts: list[nn.Module]) -> dict[str, Tensor]:
    """Return the unsharded gradients of these model parts, by the parameter's name without wrappers."""
    gradients = {}
    for name, parameter in (entry for part in parts for entry in part.named_parameters()):
        if (grad := parameter.grad) is not None:
            gradients[plain(name)] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).detach().clone()
    return gradients


def expert_biases(parts: list[nn.Module]) -> dict[str, list[float]]:
    buffers = (entry for part in parts for entry in part.named_buffers())
    return {plain(name): buffer.tolist() for name, buffer in buffers if name.endswith("expert_bias")}


def plain(name: str) -> str:
    """Return a parameter's name without the wrappers of compilation and activation checkpointing."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def difference(gradient: Tensor, reference: Tensor | None) -> float:
    """Return the norm of the difference, divided by that of ``reference`` unless it is zero."""
    if reference is None or gradient.shape != reference.shape:
        return math.inf
    distance, norm = (gradient.double() - reference.double()).norm(), reference.double().norm()
    return (distance / norm if norm > 0 else distance).item()


aten = torch.ops.aten
PRODUCTS = {aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1}
"""Matrix products, and which argument's last dimension they sum over."""
ELEMENTWISE = {
    *(aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.rsqrt.default, aten.exp.default),
    *(aten.silu.default, aten.silu_backward.default, aten.sigmoid.default, aten.sigmoid_backward.default),
    *(aten.mean.dim, aten._softmax.default, aten._softmax_backward_data.default),
    *(aten._log_softmax.default, aten._log_softmax_backward_data.default),
    *(aten._fused_rms_norm.default, aten._fused_rms_norm_backward.default),
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
}
"""Operators that round each element. Sums and counts of tokens are left alone: they must stay integers."""


class RandomRounding(TorchDispatchMode):
    """Multiply each float32 result by ``1 + u·√n·x``: x uniform in [-1, 1], u half a unit in the last place.

    n is the number of products that an element sums. √n·u is the size of the rounding error of a sum of n terms if the
    errors of single additions are independent. For elementwise operators n is 4: exp and sigmoid are off by up to a
    whole unit, and less would often round back to the same number, so that two equal scores stay equal.

    Integers stay: positions and counts are exact on every layout, and ``floor`` of a rounded one would be another
    position.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in PRODUCTS:
            self._perturb(result, args[PRODUCTS[func]].shape[-1])
        elif func in ELEMENTWISE:
            for tensor in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(tensor, Tensor):
                    self._perturb(tensor, 4)
        return result

    def _perturb(self, tensor: Tensor, terms: int) -> None:
        if tensor.dtype == torch.float32 and tensor.numel() > 1:
            size = torch.finfo(torch.float32).eps / 2 * math.sqrt(terms)
            noise = torch.rand(tensor.shape, generator=self.generator, dtype=torch.float64)
            rounded = tensor.double() * (1 + size * (2 * noise - 1))
            tensor.copy_(torch.where(tensor == tensor.round(), tensor, rounded))
