"""Run Gluon kernels on the CPU, each warp group in a thread, and check how the groups synchronise.

Triton's interpreter does not take Gluon kernels. :func:`simulated` returns a module's functions with the kernels run in
Python: tensors are torch tensors without layouts, and pointers are flat tensors with offsets. What is asynchronous on a
GPU happens as late as a GPU may do it:

- A copy to shared memory overwrites its destination with NaN when it is issued, and finishes after a random delay.
- The operands of a matrix product are read when it is issued and again when it is waited for, and must not change.
- Reading a product that may be in flight is an error.
- A product that reads memory written by a copy or a store since the last ``fence_async_shared`` is an error.
- A load or store outside of its tensor is an error.
- So is a copy of elements of 2 bytes if its tensor does not start at a multiple of 16 bytes, which Triton needs to copy
  two elements at once, or if it selects one of two.
- Warp groups that wait for ever raise a TimeoutError.

Registers and memory ordering within a warp group are not modelled, nor are layouts, except that of accumulators in
assembly. A fence of one group counts for all groups. Tensors on a GPU are copied to the CPU for a kernel and back, so
other kernels of the module run where its tensors are.
"""

from __future__ import annotations

import importlib.util
import operator
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.language.core import constexpr

from tests.gpu_kernels import ptx
from tests.gpu_kernels.kernel_checks import DEVICE
from torchtitan_npu.ops.core.gpu import is_hopper

DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "int32", "int64")}
THREADS = 128
"""Threads of a warp group, each of which arrives at the barrier of a copy."""
PATIENCE = 20.0
"""Seconds that a warp group may wait for another."""


class Value:
    """A scalar or block of a kernel. Unlike torch tensors, no operator works in address."""

    def __init__(self, data: Any, dtype: torch.dtype | None = None):
        self.data = torch.as_tensor(data, dtype=dtype)
        self.type = SimpleNamespace(layout=None)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Value:
        if not bitcast:
            return Value(self.data.to(dtype))
        data = self.data
        if data.is_floating_point():  # arithmetic on a GPU has one NaN
            data = torch.where(data.isnan(), torch.tensor(2**31 - 1, dtype=torch.int32).view(torch.float32), data)
        return Value(data.view(dtype))

    def reshape(self, shape: list[int]) -> Value:
        return Value(self.data.reshape(shape))

    def permute(self, order: tuple[int, ...]) -> Value:
        return Value(self.data.permute(order))

    def __getitem__(self, index: Any) -> Value:
        return Value(self.data[index])

    def __bool__(self) -> bool:
        return bool(self.data)

    def __index__(self) -> int:
        return int(self.data)

    def __invert__(self) -> Value:
        return Value(~self.data)

    def __neg__(self) -> Value:
        return Value(-self.data)


def _operator(function: Callable[[Any, Any], Any], swapped: bool = False) -> Callable[[Value, Any], Any]:
    def apply(self: Value, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        left, right = self.data, data_of(other)
        return Value(function(right, left) if swapped else function(left, right))

    return apply


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and_", "or_", "xor", "lshift", "rshift"):
    _plain = _name.rstrip("_")
    setattr(Value, f"__{_plain}__", _operator(getattr(operator, _name)))
    setattr(Value, f"__r{_plain}__", _operator(getattr(operator, _name), swapped=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Value, f"__{_name}__", _operator(getattr(operator, _name)))


class Pointer:
    """A pointer, or a block of pointers, into a tensor."""

    def __init__(self, storage: Tensor, offsets: Tensor):
        self.storage, self.offsets = storage, offsets
        self.dtype = SimpleNamespace(element_ty=storage.dtype)

    def __add__(self, other: Any) -> Pointer:
        offset = data_of(other)
        return Pointer(self.storage, self.offsets + (offset.long() if isinstance(offset, Tensor) else offset))

    def selected(self, mask: Any) -> Tensor:
        """Return the offsets at which ``mask`` is set, and 0 elsewhere."""
        chosen = torch.ones_like(self.offsets, dtype=torch.bool) if mask is None else data_of(mask)
        offsets = torch.where(chosen, self.offsets, 0)
        if offsets.numel() and not 0 <= int(offsets.min()) <= int(offsets.max()) < self.storage.numel():
            raise IndexError(f"offsets from {offsets.min()} to {offsets.max()} of {self.storage.numel()} elements")
        return offsets

    def load(self, mask: Any = None, other: Any = 0) -> Tensor:
        loaded = self.storage[self.selected(mask)]
        return loaded if mask is None else torch.where(data_of(mask), loaded, data_of(other)).to(loaded.dtype)


def data_of(value: Any) -> Any:
    if isinstance(value, InFlight):
        raise RuntimeError("a product is read before warpgroup_mma_wait")
    return value.data if isinstance(value, Value) else value


def garbage(dtype: torch.dtype) -> float:
    """Return what shared memory holds before it is written."""
    return torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max


class Memory:
    """A shared memory descriptor. All views of an allocation share ``unfenced``, the addresses written since a fence.

    The address of a slice is that of the memory that it is a slice of.
    """

    def __init__(self, data: Tensor, unfenced: set[int], address: int | None = None):
        self.data, self.unfenced = data, unfenced
        self.address = data.data_ptr() if address is None else address

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def index(self, index: Any) -> Memory:
        return Memory(self.data[int(index)], self.unfenced)

    def permute(self, order: tuple[int, ...]) -> Memory:
        return Memory(self.data.permute(order), self.unfenced, self.address)

    def slice(self, start: int, length: int, dim: int) -> Memory:
        return Memory(self.data.narrow(dim, start, length), self.unfenced, self.address)

    def load(self, layout: Any) -> Value:
        return Value(self.data.clone())

    def store(self, value: Value) -> None:
        self.write(data_of(value))

    def write(self, data: Tensor) -> None:
        if data.shape != self.data.shape or data.dtype != self.data.dtype:
            raise TypeError(f"{data.shape} of {data.dtype} does not fit {self.data.shape} of {self.data.dtype}")
        self.data.copy_(data)
        self.unfenced.add(self.address)

    def operand(self) -> Tensor:
        """Return a copy for a matrix product."""
        if self.address in self.unfenced:
            raise RuntimeError("a product reads shared memory without a fence after the last write")
        return self.data.clone()


class Barrier:
    """An mbarrier. All barriers of a program share one condition. ``errors`` end all waits."""

    def __init__(self, condition: threading.Condition, errors: list[BaseException]):
        self.condition, self.errors = condition, errors
        self.count = self.pending = self.phase = 0

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def arrive(self, count: int) -> None:
        with self.condition:
            self.pending -= count
            if self.pending < 0:
                raise RuntimeError("more arrivals than the barrier counts")
            if self.pending == 0:
                self.phase, self.pending = self.phase ^ 1, self.count
                self.condition.notify_all()

    def wait(self, phase: int) -> None:
        with self.condition:
            if not self.condition.wait_for(lambda: self.phase != phase or self.errors, PATIENCE) or self.errors:
                raise TimeoutError("a barrier was not reached")


class Barriers(tuple[Barrier, ...]):
    def index(self, index: Any) -> Barrier:
        return self[int(index)]


class InFlight:
    """The result of an asynchronous matrix product."""

    def __init__(self, left: Any, right: Memory, total: Any):
        self.operands, self.total = (left, right), total
        self.read = self.read_operands()
        self.result: Value | None = None

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError("a product is read before warpgroup_mma_wait")

    def read_operands(self) -> list[Tensor]:
        return [data_of(t).clone() if isinstance(t, Value) else t.operand() for t in self.operands]

    def finish(self) -> None:
        for before, now in zip(self.read, self.read_operands(), strict=True):
            if not torch.equal(before.nan_to_num(7.0), now.nan_to_num(7.0)):
                raise RuntimeError("an operand changed while a product was in flight")
        left, right = (t.float() for t in self.read)
        total = self.total.result if isinstance(self.total, InFlight) else self.total
        self.result = Value(left @ right + (0 if total is None else data_of(total)))


class Program:
    """One program: its shared memory, its copies and the language that its warp groups run."""

    def __init__(self, program: int, programs: int, seed: int):
        self.ids = program, programs
        self.random = random.Random(seed)
        self.condition = threading.Condition()
        self.unfenced: set[int] = set()
        self.local = threading.local()
        self.errors: list[BaseException] = []
        self.copies: Queue[Callable[[], None] | None] = Queue()

    # gl

    def allocate_shared_memory(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Memory | Barriers | Barrier:
        if dtype == torch.int64:
            barriers = Barriers(Barrier(self.condition, self.errors) for _ in range(shape[0]))
            return barriers if len(shape) == 2 else barriers.index(0)
        return Memory(torch.full(shape, garbage(dtype), dtype=dtype), self.unfenced)

    def warp_specialize(self, functions: list[tuple[Callable[..., None], tuple[Any, ...]]], *_: Any) -> None:
        engine = threading.Thread(target=self.run, args=(self.copy,))
        groups = [threading.Thread(target=self.run, args=(function, *arguments)) for function, arguments in functions]
        for thread in (engine, *groups):
            thread.start()
        for group in groups:
            group.join()
        self.copies.put(None)
        engine.join()
        if self.errors:
            raise self.errors[0]

    def run(self, function: Callable[..., None], *arguments: Any) -> None:
        self.local.products, self.local.copies, self.local.groups = [], [], []
        try:
            function(*arguments)
        except BaseException as error:  # raised in the main thread
            with self.condition:
                self.errors.append(error)
                self.condition.notify_all()

    def copy(self) -> None:
        while (finish := self.copies.get()) is not None:
            finish()

    def pause(self) -> None:
        if self.random.random() < 0.3:
            time.sleep(self.random.random() * 1e-3)

    # async_copy

    def async_copy_global_to_shared(self, memory: Memory, pointer: Pointer, mask: Value) -> None:
        offsets, chosen = torch.broadcast_tensors(pointer.offsets, mask.data)
        source = Pointer(pointer.storage, offsets)
        if source.offsets.shape != memory.data.shape:
            raise TypeError(f"{source.offsets.shape} does not fit {memory.data.shape}")
        source.selected(chosen)
        if pointer.storage.itemsize == 2:
            aligned = pointer.storage.data_ptr() % 16 == 0 and not (offsets[..., ::2] % 2)[chosen[..., ::2]].any()
            if not aligned or (chosen[..., ::2] != chosen[..., 1::2]).any():
                raise ValueError("an asynchronous copy takes at least 4 bytes")
        memory.write(torch.full_like(memory.data, garbage(memory.dtype)))
        self.local.copies.append(lambda: memory.write(source.load(Value(chosen), 0)))

    def finish_copies(self, then: Callable[[], None]) -> None:
        """Finish the copies of this warp group after a while, and call ``then``."""
        copies, self.local.copies = self.local.copies, []

        def finish() -> None:
            self.pause()
            for copy in copies:
                copy()
            then()

        self.copies.put(finish)

    def mbarrier_arrive(self, barrier: Barrier, increment_count: bool) -> None:
        assert not increment_count
        self.finish_copies(lambda: barrier.arrive(THREADS))

    def commit_group(self) -> None:
        finished = threading.Event()
        self.local.groups.append(finished)
        self.finish_copies(finished.set)

    def wait_group(self, num_outstanding: int) -> None:
        while len(self.local.groups) > num_outstanding:
            if not self.local.groups.pop(0).wait(PATIENCE):
                raise TimeoutError("a copy did not finish")

    # mbarrier and warpgroup_mma

    def wait(self, barrier: Barrier, phase: Any) -> None:
        self.pause()
        barrier.wait(int(phase))

    def arrive(self, barrier: Barrier, *, count: int = 1, pred: Any = True) -> None:
        self.pause()
        if pred:
            barrier.arrive(count)
            self.pause()  # what other groups may do now may come first

    def warpgroup_mma(self, left: Any, right: Memory, total: Any, use_acc: bool = True, is_async: bool = False) -> Any:
        assert is_async
        product = InFlight(left, right, total if use_acc else None)
        self.local.products.append(product)
        return product

    def warpgroup_mma_wait(self, num_outstanding: int, deps: list[Any]) -> Any:
        self.pause()
        while len(self.local.products) > num_outstanding:
            self.local.products.pop(0).finish()
        # one that is still in flight may be added to, and is an error to read
        results = [dep.result if isinstance(dep, InFlight) and dep.result is not None else dep for dep in deps]
        return results[0] if len(results) == 1 else tuple(results)

    def language(self) -> SimpleNamespace:
        def elementwise(function: Callable[..., Tensor]) -> Callable[..., Value]:
            return lambda *values, **_: Value(function(*_tensors(values)))

        layouts = ("NVMMASharedLayout", "SwizzledSharedLayout", "NVMMADistributedLayout", "DistributedLinearLayout")
        layouts += ("BlockedLayout", "SliceLayout", "DotOperandLayout")
        return SimpleNamespace(
            **DTYPES,
            **{name: lambda *_, **__: None for name in layouts},
            allocate_shared_memory=self.allocate_shared_memory,
            warp_specialize=self.warp_specialize,
            static_range=range,
            program_id=lambda axis: Value(self.ids[0], torch.int32),
            num_programs=lambda axis: Value(self.ids[1], torch.int32),
            arange=lambda start, end, layout=None: Value(torch.arange(start, end, dtype=torch.int32)),
            zeros=lambda shape, dtype, layout=None: Value(torch.zeros(shape, dtype=dtype)),
            full=lambda shape, value, dtype, layout=None: Value(
                torch.as_tensor(data_of(value)).to(dtype).expand(shape).clone()
            ),
            convert_layout=lambda value, layout, assert_trivial=False: Value(data_of(value)),
            load=lambda pointer, mask=None, other=0: Value(pointer.load(mask, other)),
            store=_store,
            atomic_add=_atomic_add,
            where=elementwise(torch.where),
            maximum=elementwise(torch.maximum),
            minimum=elementwise(torch.minimum),
            **{name: elementwise(getattr(torch, name)) for name in ("exp", "exp2", "log", "log2", "sqrt")},
            inline_asm_elementwise=_assembly,
            max=lambda value, axis: Value(_maximum(data_of(value), axis)),
            min=lambda value, axis: Value(data_of(value).amin(axis)),
            sum=lambda value, axis: Value(data_of(value).sum(axis, dtype=value.dtype)),
            reduce=_reduce,
            associative_scan=_scan,
        )

    def names(self) -> dict[str, Any]:
        """Return what a kernel's module imports from Gluon."""
        return {
            "gl": self.language(),
            "async_copy": SimpleNamespace(
                async_copy_global_to_shared=self.async_copy_global_to_shared,
                mbarrier_arrive=self.mbarrier_arrive,
                commit_group=self.commit_group,
                wait_group=self.wait_group,
            ),
            "mbarrier": SimpleNamespace(
                MBarrierLayout=lambda: None,
                init=lambda barrier, count: barrier.init(count),
                wait=self.wait,
                arrive=self.arrive,
            ),
            "debug_barrier": lambda: None,  # threads of a warp group run in step
            "fence_async_shared": self.unfenced.clear,
            "warpgroup_mma": self.warpgroup_mma,
            "warpgroup_mma_wait": self.warpgroup_mma_wait,
            "range": _range,
        }


def _range(*bounds: Any) -> Iterator[Value]:
    return (Value(index, torch.int32) for index in range(*map(int, bounds)))


def _tensors(values: tuple[Any, ...]) -> list[Tensor]:
    """Return ``values`` as tensors. A Python number has the dtype of the tensor beside it, or else 32 bits."""
    data = [data_of(value) for value in values]
    dtypes = [one.dtype for one in data if isinstance(one, Tensor) and one.dtype != torch.bool]
    return [one if isinstance(one, Tensor) else _number(one, *dtypes[:1]) for one in data]


def _number(value: float, dtype: torch.dtype | None = None) -> Tensor:
    return torch.tensor(value, dtype=dtype or (torch.int32 if isinstance(value, int) else torch.float32))


def _maximum(data: Tensor, axis: int) -> Tensor:
    """Return the maximum without regard to NaN, as a GPU computes it."""
    return (torch.where(data.isnan(), -torch.inf, data) if data.is_floating_point() else data).amax(axis)


def _scan(value: Value, axis: int, combine: Callable[[Value, Value], Value]) -> Value:
    """Return the sums up to each element, the only scan that is simulated."""
    assert combine(Value(2), Value(5)).data == 7
    return Value(data_of(value).cumsum(axis, dtype=value.dtype))


def _reduce(values: tuple[Value, ...], axis: int, combine: Callable[..., tuple[Value, ...]]) -> tuple[Value, ...]:
    """Return the maximum of each of ``values``, the only reduction by a function that is simulated."""
    low, high = [Value(2)] * len(values), [Value(5)] * len(values)
    assert all(value.data == 5 for value in (*combine(*low, *high), *combine(*high, *low)))
    return tuple(Value(data_of(value).amax(axis)) for value in values)


def _assembly(
    assembly: str, constraints: str, values: list[Value], *, dtype: torch.dtype, is_pure: bool, pack: int
) -> Value:
    """Run assembly for numbers of 32 bits, or convert to half precision."""
    assert is_pure
    if dtype == torch.float32:
        return Value(ptx.run(assembly, constraints, _tensors(tuple(values)), pack))
    name = {torch.bfloat16: "bf16x2", torch.float16: "f16x2"}[dtype]
    assert assembly == f"cvt.rn.{name}.f32 $0, $2, $1;" and constraints == "=r,r,r"
    return values[0].to(dtype)


def _targets(pointer: Pointer, value: Any, mask: Any) -> tuple[Tensor, Tensor]:
    """Return the offsets that a store writes to, and what it writes there."""
    chosen = torch.as_tensor(data_of(mask))
    offsets, chosen, data = torch.broadcast_tensors(pointer.offsets, chosen, *_tensors((value,)))
    Pointer(pointer.storage, offsets).selected(Value(chosen))
    return offsets[chosen], data[chosen]


def _store(pointer: Pointer, value: Any, mask: Any = True) -> None:
    offsets, data = _targets(pointer, value, mask)
    if data.dtype != pointer.storage.dtype:
        raise TypeError(f"{data.dtype} is stored in {pointer.storage.dtype}")
    pointer.storage[offsets] = data


def _atomic_add(pointer: Pointer, value: Any, mask: Any = True, *, sem: str) -> Value:
    """Add, and return what was there before."""
    assert sem == "relaxed"
    before = pointer.load(Value(torch.as_tensor(data_of(mask)).expand(pointer.offsets.shape)))
    offsets, data = _targets(pointer, value, mask)
    pointer.storage.index_put_((offsets,), data, accumulate=True)
    return Value(before)


class Kernel:
    """A kernel that is launched as ``kernel[grid](*arguments)``: its programs run one after the other."""

    def __init__(self, module: ModuleType, name: str, seed: int):
        self.module, self.name, self.seed = module, name, seed

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*arguments: Any, num_warps: int, maxnreg: int = 0, **constants: Any) -> None:
            passed = [_flat(value) if isinstance(value, Tensor) else value for value in arguments]
            on_cpu = [value.cpu() if isinstance(value, Tensor) else value for value in passed]
            for program in range(grid[0]):
                names = _names(self.module, Program(program, grid[0], self.seed + program).names())
                names[self.name](*map(_argument, on_cpu), **constants)
            for value, result in zip(passed, on_cpu, strict=True):
                if isinstance(value, Tensor) and value is not result:
                    value.copy_(result)

        return launch


def _flat(tensor: Tensor) -> Tensor:
    """Return the memory from the first to the last element of ``tensor``, (elements,)."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.detach().as_strided((extent,), (1,))


def _argument(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, Tensor):
        return Pointer(value, torch.tensor(0))
    return Value(value, torch.int32 if isinstance(value, int) and abs(value) < 2**31 else None)


def _names(module: ModuleType, of_program: dict[str, Any]) -> dict[str, Any]:
    """Return the names of ``module`` with kernels and constants as plain functions and numbers, and ``of_program``."""
    names = vars(module) | of_program
    for name, value in names.items():
        if isinstance(value, GluonJITFunction):
            imported = value.fn.__module__ != module.__name__
            of_function = _names(sys.modules[value.fn.__module__], of_program) if imported else names
            names[name] = FunctionType(value.fn.__code__, of_function, name, value.fn.__defaults__)
        elif isinstance(value, constexpr):
            names[name] = value.value
    return names


def simulated(module: ModuleType, function: str, seed: int = 0, **replaced: Any) -> Callable[..., Any]:
    """Return ``function`` of a copy of ``module``, which launches Gluon kernels, with these kernels run in Python.

    ``replaced`` are names of the copy: imported functions that launch kernels of another module, or constants.
    """
    spec = module.__spec__
    assert spec is not None and spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    for name, value in vars(module).items():
        if isinstance(value, GluonJITFunction):
            of_kernel = module if value.fn.__module__ == module.__name__ else sys.modules[value.fn.__module__]
            setattr(copy, name, Kernel(of_kernel, name, seed))
    vars(copy).update(replaced)
    return getattr(copy, function)


def on_hopper(module: ModuleType, function: str, **replaced: Any) -> Callable[..., Any]:
    """Return a function of ``module`` if there is a Hopper GPU, or else its simulation."""
    has_gpu = is_hopper(torch.empty(0, device=DEVICE))
    return getattr(module, function) if has_gpu else simulated(module, function, **replaced)


def find_fault(run: Callable[[int], str], expected: str) -> None:
    """Fail unless an error of ``run``, or what it returns, matches ``expected`` for one of 40 seeds.

    Threads may happen to run in an order in which a fault has no effect.
    """
    for seed in range(40):
        try:
            found = run(seed)
        except (RuntimeError, TimeoutError) as raised:
            found = str(raised)
        if re.search(expected, found):
            return
    pytest.fail(f"not detected; at last: {found}")


def with_fault(module: ModuleType, before: str, after: str, folder: Path) -> ModuleType:
    """Return a copy of ``module`` with ``after`` instead of ``before`` in its source, whose file is in ``folder``."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    assert source.count(before) == 1
    file = folder / "changed_kernel.py"
    file.write_text(source.replace(before, after))
    spec = importlib.util.spec_from_file_location("changed_kernel", file)
    assert spec is not None and spec.loader is not None
    changed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(changed)
    return changed
