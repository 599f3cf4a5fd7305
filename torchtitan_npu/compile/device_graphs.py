"""Device graphs: capture the forward and backward pass of each block once, and replay them in training.

A replay launches all kernels of a block by one call, so the host no longer limits a step of many small kernels. The
same code uses CUDA graphs on a GPU and NPU graphs on an NPU: torch and torch_npu have the same functions for them.

The first microbatch of a job runs as usual. Then the blocks are captured, in the order in which they run: all forward
passes, and the backward passes in reverse. All graphs share one memory pool. In this order a graph may reuse what an
earlier one no longer needs: activations take as much memory as without graphs. Three rules follow:

- Every forward pass is followed by its backward pass before the next one. This is checked.
- A forward pass may overwrite gradients of weights, which are in the pool. Those that are still needed then, as in
  gradient accumulation, are copied before (:meth:`DeviceGraphs.keep_gradients`).
- Arguments are copied to fixed addresses. The output of a block and the gradient of its input are read in place by the
  next graph.

Activation checkpointing and compiled regions are inside the graphs. Calls without gradients, as in validation, run as
without graphs.
"""

from __future__ import annotations

import copy
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.tools.logging import logger

from torchtitan_npu.errors import UsageError
from torchtitan_npu.layers.auxiliary_loss import auxiliary_losses
from torchtitan_npu.layers.rotary import RotaryTables
from torchtitan_npu.torch_internals.autograd import modification_count

GRAPH_CLASSES = {"cuda": "CUDAGraph", "npu": "NPUGraph"}
"""Names in the module of the device. ``torch.accelerator.Graph`` replaces them when torch 2.13 is the oldest."""
GIB = 2**30


class DeviceGraphs:
    """The graphs of all blocks in ``layers`` of the model parts of one rank."""

    def __init__(self, model_parts: Iterable[Any], device_type: str) -> None:
        self.device_type = device_type
        self.device: Any = torch.get_device_module(device_type)
        self.enabled = True
        self.captured = False
        self.gradients_in_pool = False
        self.blocks: list[BlockGraphs] = []
        """In the order in which they run, from the first forward pass on."""
        for part in model_parts:
            for name, block in part.layers.items():
                # an attribute of this block: the hooks of the module stay outside, and parameters keep their names
                block.forward = BlockGraphs(f"layers.{name}", block, self)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Run all blocks as without graphs in this context."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    def capture_once(self) -> None:
        """Capture all blocks that have run, after the first forward and backward pass; later calls do nothing.

        No autograd graph of that pass may be alive.
        """
        if self.captured or not self.enabled or not self.blocks:
            return
        self.captured = True
        started = time.perf_counter()
        self.device.synchronize()
        self.device.empty_cache()
        reserved, random_state = self.device.memory_reserved(), self.device.get_rng_state()
        self.stream, self.pool = self.device.Stream(), self.device.graph_pool_handle()
        self.stream.wait_stream(self.device.current_stream())
        shared: dict[tuple[Any, ...], SharedInput] = {}
        for block in self.blocks:
            block.capture_forward(shared)
        for block in reversed(self.blocks):
            block.capture_backward()
        self.device.current_stream().wait_stream(self.stream)
        self.device.set_rng_state(random_state)
        self.device.empty_cache()
        pool = (self.device.memory_reserved() - reserved) / GIB
        logger.info(
            f"{len(self.blocks)} blocks are captured as device graphs with a memory pool of {pool:.2f} GiB; this took "
            f"{time.perf_counter() - started:.1f} s"
        )

    @contextmanager
    def capturing(self) -> Iterator[Any]:
        """Capture this context in a new graph, which it yields."""
        graph = getattr(self.device, GRAPH_CLASSES[self.device_type])()
        # thread_local: other threads, such as a data loader's, may use the device meanwhile
        with self.device.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            yield graph

    @contextmanager
    def errors_of_synchronization(self) -> Iterator[None]:
        """Make operators that wait for the device raise in this context."""
        before = self.device.get_sync_debug_mode()
        self.device.set_sync_debug_mode("error")
        try:
            yield
        finally:
            self.device.set_sync_debug_mode(before)

    def keep_gradients(self) -> None:
        """Copy gradients of weights out of the pool before a forward pass, which may overwrite them."""
        if self.gradients_in_pool:
            self.gradients_in_pool = False
            for block in self.blocks:
                block.keep_gradients()


class BlockGraphs:
    """The forward function of one block, which replays its graphs after they are captured."""

    def __init__(self, name: str, block: nn.Module, graphs: DeviceGraphs) -> None:
        self.name = name
        self.block = block
        self.graphs = graphs
        self.forward = block.forward
        self.example: Arguments | None = None
        self.gradients: tuple[Tensor | None, ...] = ()
        """Of the activations, then of the parameters."""
        self.runs = 0
        """Forward passes that were replayed."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        graphs = self.graphs
        if not graphs.enabled or not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        if graphs.captured and self.example is not None:
            return self._replay(Arguments(self.name, args, kwargs))
        output = self.forward(*args, **kwargs)
        if self.example is None and not graphs.captured:
            self._keep_example(Arguments(self.name, args, kwargs), output)
        return output

    def _keep_example(self, arguments: Arguments, output: Any) -> None:
        if not isinstance(output, Tensor) or not output.requires_grad:
            raise UsageError(f"npu.device_graphs: {self.name} must return one tensor with a gradient; {REMEDY}")
        blocks = self.graphs.blocks
        before = blocks[-1] if blocks else None
        self.example = arguments.detached()
        self.output = output.detach()
        follows = before is not None and [x.data_ptr() for x in arguments.activations] == [before.output.data_ptr()]
        self.before = before if follows else None
        device_type = self.graphs.device_type
        self.autocast: dict[str, Any] = {
            "device_type": device_type,
            "dtype": torch.get_autocast_dtype(device_type),
            "enabled": torch.is_autocast_enabled(device_type),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        blocks.append(self)

    # Capture

    def capture_forward(self, shared: dict[tuple[Any, ...], SharedInput]) -> None:
        """Run the block with the arguments of its first call until everything is compiled, then capture it."""
        example = self.example
        assert example is not None
        for tensor in example.others:
            if _key(tensor) not in shared:
                shared[_key(tensor)] = SharedInput(tensor)
        self.shared = [shared[_key(tensor)] for tensor in example.others]
        if self.before:  # read where the graph before writes it
            self.activations = [self.before.output.detach()]
            self.activations[0].copy_(example.activations[0])
        else:
            self.activations = [tensor.clone() for tensor in example.activations]
        for tensor in self.activations:
            tensor.requires_grad_()
        self.static = example.with_tensors(self.activations, [each.tensor for each in self.shared])
        self.parameters = [parameter for parameter in self.block.parameters() if parameter.requires_grad]
        self.addresses = {
            (module, name): tensor.data_ptr()
            for module in self.block.modules()
            for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        }
        self._warm_up()
        with self.reasons(), self.graphs.capturing() as self.forward_graph:
            self.attached = self._run_forward()
        self.output = self.attached.detach()

    def capture_backward(self) -> None:
        after = next((block for block in self.graphs.blocks if block.before is self), None)
        # the first gradient is that of the activation; the graph of the next block writes it, instead of a copy
        gradient = after.gradients[0] if after else None
        self.output_gradient = torch.empty_like(self.output) if gradient is None else gradient
        with self.reasons(), self.graphs.capturing() as self.backward_graph:
            self.gradients = self._run_backward(self.attached, self.output_gradient)
        del self.attached  # with it, the activations
        self.example = self.static

    def _warm_up(self) -> None:
        """Run forward and backward passes on the stream of the capture.

        Buffers (token counts) and the sums of auxiliary losses keep their values.
        """
        graphs, buffers = self.graphs, list(self.block.buffers())
        buffers += [loss.total for loss in auxiliary_losses([self.block]) if loss.total is not None]
        before = [buffer.clone() for buffer in buffers]
        graphs.stream.wait_stream(graphs.device.current_stream())
        with graphs.device.stream(graphs.stream):
            self._run_once()  # compiles regions for the arguments of the capture
            with self.reasons(), graphs.errors_of_synchronization():
                self._run_once()
            with torch.no_grad():
                for buffer, value in zip(buffers, before, strict=True):
                    buffer.copy_(value)
        graphs.device.current_stream().wait_stream(graphs.stream)
        graphs.device.synchronize()  # nothing of the warm-up is freed while its stream uses it

    def _run_once(self) -> None:
        output = self._run_forward()
        self._run_backward(output, torch.zeros_like(output))

    def _run_forward(self) -> Tensor:
        with torch.autocast(**self.autocast):
            return self.forward(*self.static.args, **self.static.kwargs)

    def _run_backward(self, output: Tensor, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(output, [*self.activations, *self.parameters], gradient, allow_unused=True)

    @contextmanager
    def reasons(self) -> Iterator[None]:
        """Turn what cannot be captured into an error that names the block and the line."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # the end of a capture fails too, after the error in it
            first = error.__context__ if isinstance(error.__context__, RuntimeError) else error
            if isinstance(first, torch.OutOfMemoryError):
                raise first from None
            raise UsageError(
                f"npu.device_graphs: {self.name} cannot be captured: {str(first).splitlines()[0]}{_line_of(first)}; "
                f"{REMEDY}"
            ) from error

    # Replay

    def _replay(self, arguments: Arguments) -> Tensor:
        expected = self.example
        assert expected is not None
        if arguments.signature != expected.signature:
            raise UsageError(
                f"npu.device_graphs: {self.name} was captured for {expected.signature}, and a later step has "
                f"{arguments.signature}; a job with batches of several shapes needs npu.device_graphs = false"
            )
        for shared, tensor in zip(self.shared, arguments.others, strict=True):
            shared.update(tensor)
        return _Replay.apply(self, *arguments.activations, *self.parameters)

    def run_forward_graph(self, activations: Iterable[Tensor]) -> Tensor:
        for (module, name), address in self.addresses.items():
            if getattr(module, name).data_ptr() != address:
                raise RuntimeError(f"npu.device_graphs: {name} of {self.name} has moved since the capture")
        for static, tensor in zip(self.activations, activations, strict=True):
            if static.data_ptr() == tensor.data_ptr():
                continue
            if self.before:
                raise RuntimeError(
                    f"npu.device_graphs: the input of {self.name} is not the output of {self.before.name}"
                )
            static.copy_(tensor)
        self.graphs.keep_gradients()
        self.copies = [shared.copies for shared in self.shared]
        self.runs += 1
        self.forward_graph.replay()
        return self.output.detach()

    def run_backward_graph(self, run: int, gradient: Tensor) -> list[Tensor | None]:
        if run != self.runs:
            raise RuntimeError(f"npu.device_graphs: {self.name} ran again before the backward pass of its first run")
        if self.copies != [shared.copies for shared in self.shared]:
            raise RuntimeError(f"npu.device_graphs: another block was called with other arguments than {self.name}")
        static = self.output_gradient
        if static.data_ptr() != gradient.data_ptr() or static.stride() != gradient.stride():
            static.copy_(gradient)
        self.backward_graph.replay()
        self.graphs.gradients_in_pool = True
        # new tensors of the same memory, which autograd need not copy
        return [None if gradient is None else gradient.detach() for gradient in self.gradients]

    def keep_gradients(self) -> None:
        for parameter, static in zip(self.parameters, self.gradients[len(self.activations) :], strict=True):
            gradient = parameter.grad
            if gradient is not None and static is not None and gradient.data_ptr() == static.data_ptr():
                parameter.grad = gradient.clone()


REMEDY = "set npu.device_graphs to false"


class _Replay(torch.autograd.Function):
    """Replay the graphs of a block. Its weights are arguments, so that autograd accumulates their gradients."""

    @staticmethod
    def forward(ctx: Any, block: BlockGraphs, *tensors: Tensor) -> Tensor:
        output = block.run_forward_graph(tensors[: len(block.activations)])
        ctx.block, ctx.run = block, block.runs
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.block.run_backward_graph(ctx.run, gradient)


class SharedInput:
    """A tensor without gradient that several blocks read, at a fixed address."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.clone()
        self.source, self.version = tensor, modification_count(tensor)
        self.copies = 0

    def update(self, tensor: Tensor) -> None:
        """Copy ``tensor`` unless it has been copied and not modified since."""
        version = modification_count(tensor)
        if tensor is not self.source or version != self.version:
            self.tensor.copy_(tensor)
            self.source, self.version = tensor, version
            self.copies += 1


class Arguments:
    """The arguments of a block, taken apart: activations have a gradient, other tensors have none."""

    def __init__(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.name, self.args, self.kwargs = name, args, kwargs
        self.activations: list[Tensor] = []
        self.others: list[Tensor] = []
        signature: list[Any] = []
        for key, value in [*enumerate(args), *kwargs.items()]:
            tables = isinstance(value, RotaryTables)
            for part in (value.tables, value.replaced) if tables else (value,):
                if isinstance(part, Tensor):
                    (self.activations if part.requires_grad else self.others).append(part)
                    signature.append((key, tuple(part.shape), part.dtype, part.requires_grad))
                elif part is None or part == () or isinstance(part, bool | int | float | str):
                    signature.append((key, part))
                else:
                    raise UsageError(
                        f"npu.device_graphs: argument {key} of {name} is a {type(part).__name__}; a graph takes "
                        f"tensors and constants; {REMEDY}"
                    )
        self.signature = tuple(signature)

    def detached(self) -> Arguments:
        """Return a copy that keeps no autograd graph alive."""
        new = copy.copy(self)
        new.activations = [tensor.detach() for tensor in self.activations]
        new.args, new.kwargs = new._rebuilt(new.activations, new.others)
        return new

    def with_tensors(self, activations: list[Tensor], others: list[Tensor]) -> Arguments:
        """Return a copy with other tensors instead of these."""
        new = copy.copy(self)
        new.activations, new.others = activations, others
        new.args, new.kwargs = self._rebuilt(activations, others)
        return new

    def _rebuilt(self, activations: list[Tensor], others: list[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # in the order in which the constructor found them
        has_gradient = iter([entry[-1] for entry in self.signature if len(entry) == 4])
        sources = {True: iter(activations), False: iter(others)}

        def rebuild(value: Any) -> Any:
            if isinstance(value, RotaryTables):
                tables, replaced = rebuild(value.tables), rebuild(value.replaced)
                return RotaryTables(tables, value.modes, value.argument, replaced)
            return next(sources[next(has_gradient)]) if isinstance(value, Tensor) else value

        args = tuple(rebuild(value) for value in self.args)
        return args, {key: rebuild(value) for key, value in self.kwargs.items()}


def _key(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _line_of(error: BaseException) -> str:
    """Return where an error was raised, without the frames inside torch and torch_npu."""
    packages = Path(torch.__file__).parents[1]
    inside = (f"{packages}/torch/", f"{packages}/torch_npu/", __file__)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(inside)]
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line})" if frames else ""
