"""Kernels of torch's ordinary operators: the same call on "npu", through torch_npu, and on "cpu".

Results are bit-identical unless a test says otherwise: the kernels compute with torch's CPU operators.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from torchtitan_npu.emulator.kernels.registry import KERNELS, prototypes

FLOATING = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.uint8, torch.bool)
Function = Callable[..., Any]


def sample(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return random numbers: normal, or integers from 0 to 4."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    if dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=dtype)
    return torch.randint(0, 5, shape, generator=generator).to(dtype)


def layouts(dtype: torch.dtype, seed: int = 0) -> Iterator[Tensor]:
    """Return tensors of awkward shapes and strides."""
    yield sample((), dtype, seed)
    yield sample((0, 3), dtype, seed)
    yield sample((17,), dtype, seed)
    yield sample((3, 5), dtype, seed).t()
    yield sample((4, 6, 3), dtype, seed)[::2, 1:, 1]
    yield sample((1, 4), dtype, seed).expand(3, 4)


def to(device: str, arguments: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), arguments)


def assert_same(got: Any, expected: Any, **tolerance: float) -> None:
    torch.testing.assert_close(to("cpu", got), expected, equal_nan=True, **{"rtol": 0, "atol": 0, **tolerance})


def compare(function: Function, *arguments: Any, **tolerance: float) -> None:
    expected = function(*(to("cpu", argument) if isinstance(argument, Tensor) else argument for argument in arguments))
    assert_same(function(*to("npu", arguments)), expected, **tolerance)


def compare_gradients(function: Function, *arguments: Any, **tolerance: float) -> None:
    """Compare the result and the gradients of every floating tensor among the arguments."""

    def run(device: str) -> tuple[Tensor, ...]:
        moved = [
            argument.to(device).detach().requires_grad_(argument.is_floating_point())
            if isinstance(argument, Tensor)
            else argument
            for argument in arguments
        ]
        result = function(*moved)
        leaves = [leaf for leaf in moved if isinstance(leaf, Tensor) and leaf.requires_grad]
        gradients = torch.autograd.grad(result, leaves, sample(tuple(result.shape), result.dtype, 9).to(device))
        return result.detach(), *gradients

    assert_same(run("npu"), run("cpu"), **tolerance)


def test_every_kernel_takes_the_arguments_of_its_prototype() -> None:
    for name, kernel in KERNELS.items():
        assert name in prototypes(), f"{name} has no prototype"
        inspect.signature(kernel).bind(*prototypes()[name]["types"])


ONE_TENSOR = """abs acos acosh asin asinh atan atanh ceil cos cosh erf erfc erfinv exp exp2 expm1 floor frac log log10
    log1p log2 neg reciprocal round rsqrt sigmoid sign sin sinc sinh sqrt square tan tanh trunc"""
PREDICATES = ["isfinite", "isinf", "isnan", "isneginf", "isposinf", "logical_not", "signbit"]


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("name", ONE_TENSOR.split())
def test_of_one_tensor(name: str, dtype: torch.dtype) -> None:
    function = getattr(torch, name)
    for x in layouts(dtype):
        compare(function, x)
    x = sample((5, 7), dtype)
    expected, ulp = function(x), torch.finfo(dtype).eps
    assert_same(getattr(x.npu(), f"{name}_")(), expected)
    # torch's CPU kernels round differently in the last elements of a vector
    assert_same(getattr(x.t().contiguous().npu().t(), f"{name}_")(), expected, rtol=ulp)
    assert_same(function(x.npu(), out=torch.empty(7, 5, dtype=dtype, device="npu").t()), expected, rtol=ulp)


@pytest.mark.parametrize("name", PREDICATES)
def test_predicates(name: str) -> None:
    for dtype in FLOATING:
        compare(getattr(torch, name), torch.tensor([0.0, -0.0, 1, -1, math.inf, -math.inf, math.nan], dtype=dtype))


TWO_TENSORS = """add sub mul div atan2 floor_divide fmod remainder maximum minimum pow eq ne lt le gt ge logical_and
    logical_or logical_xor logaddexp copysign hypot xlogy"""
OF_INTEGERS = """add sub mul floor_divide remainder maximum minimum eq ne lt le gt ge bitwise_and bitwise_or
    bitwise_xor bitwise_left_shift bitwise_right_shift logical_and logical_or gcd"""
WITH_NUMBER = """add sub mul div floor_divide fmod remainder pow eq ne lt le gt ge clamp_min clamp_max rsub"""


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("name", TWO_TENSORS.split())
def test_of_two_tensors(name: str, dtype: torch.dtype) -> None:
    function = getattr(torch, name)
    for left, right in zip(layouts(dtype), layouts(dtype, seed=1), strict=True):
        compare(function, left, right)
    compare(function, sample((4, 1, 3), dtype), sample((5, 1), dtype, 1))  # broadcast
    compare(function, sample((4, 3), dtype), sample((4, 3), torch.float32, 1))  # promoted
    compare(function, sample((4, 3), dtype), sample((), torch.float32, 1))
    if hasattr(Tensor, f"{name}_"):
        compare(lambda x, y: getattr(x.clone().t(), f"{name}_")(y), sample((3, 4), dtype), sample((4, 3), dtype, 1))


NOT_OF_BOOL = ["sub", "floor_divide", "remainder", "gcd", "bitwise_left_shift", "bitwise_right_shift"]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(x, dtype) for x in OF_INTEGERS.split() for dtype in INTEGERS if dtype != torch.bool or x not in NOT_OF_BOOL],
)
def test_of_integers(name: str, dtype: torch.dtype) -> None:
    left, right = sample((4, 5), dtype), sample((4, 5), dtype, 1)
    right = right if dtype == torch.bool else right + 1
    compare(getattr(torch, name), left, right)
    compare(getattr(torch, name), left.t(), right.t())


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("name", WITH_NUMBER.split())
def test_with_a_number(name: str, dtype: torch.dtype) -> None:
    for x in layouts(dtype):
        compare(lambda x: getattr(torch, name)(x, 0.3), x)
        compare(lambda x: getattr(torch, name)(x, 2), x)
    if hasattr(Tensor, f"{name}_"):
        compare(lambda x: getattr(x.clone(), f"{name}_")(0.3), sample((3, 4), dtype))


X, Y, Z = sample((4, 6), seed=1), sample((4, 6), seed=2), sample((4, 6), seed=3)
INDEX = torch.tensor([[0, 2, 2], [3, 1, 0]])
MASK = X > 0
COUNTS = torch.tensor([2, 0, 3, 1])
LONG = sample((5, 4), torch.int64)

CALLS: dict[str, tuple[Any, ...]] = {
    # fused element-wise
    "add alpha": (lambda x, y: torch.add(x, y, alpha=0.3), X, Y),
    "sub alpha": (lambda x, y: torch.sub(x, y, alpha=0.3), X, Y),
    "addcmul": (lambda x, y, z: torch.addcmul(x, y, z, value=0.3), X, Y, Z),
    "addcdiv": (lambda x, y, z: torch.addcdiv(x, y, z, value=0.3), X, Y, Z),
    "clamp": (lambda x: x.clamp(-0.2, 0.4), X),
    "clamp of a tensor": (torch.clamp, X, Y.minimum(Z), Y.maximum(Z)),
    "div trunc": (lambda x, y: torch.div(x, y, rounding_mode="trunc"), X, Y),
    "div floor": (lambda x: torch.div(x, 0.3, rounding_mode="floor"), X),
    "lerp": (torch.lerp, X, Y, Z),
    "lerp by a number": (lambda x, y: torch.lerp(x, y, 0.3), X, Y),
    "where of a number": (lambda m, x: torch.where(m, x, 0.5), MASK, X),
    "nan_to_num": (torch.nan_to_num, torch.tensor([math.nan, math.inf, -math.inf, 1.0])),
    "pow of a number": (lambda x: 2**x, X),
    "isclose": (torch.isclose, X, X + 1e-6),
    "isin": (torch.isin, LONG, torch.tensor([1, 3])),
    "equal": (torch.equal, X, X.clone()),
    "integer by integer": (lambda x: x / (x + 2), LONG),
    "bool plus bool": (lambda m: m + m, MASK),
    "bool times float": (torch.mul, MASK, X),
    # complex numbers
    "complex": (torch.complex, X, Y),
    "polar": (torch.polar, X.abs(), Y),
    "complex product": (torch.mul, torch.complex(X, Y), torch.complex(Y, Z)),
    "view_as_real": (lambda x, y: torch.view_as_real(torch.view_as_complex(x) * torch.view_as_complex(y)),
                     sample((3, 4, 2)), sample((3, 4, 2), seed=1)),
    "conj": (lambda x: x.conj() * x, torch.complex(X, Y)),
    # copies
    "cat": (lambda x, y: torch.cat([x, y[:1], y[:0]]), X, Y),
    "cat of dtypes": (lambda x, y: torch.cat([x, y.bfloat16()], 1), X, Y),
    "stack": (lambda x, y: torch.stack([x, y], -1), X, Y),
    "split copy": (lambda x: torch.split_with_sizes_copy(x, [1, 2, 3], 1), X),
    "chunk_cat": (lambda x, y: torch._chunk_cat([x, y[:3], y[0]], 0, 2), X, Y),
    "pad": (lambda x: F.pad(x, (1, 2, 0, 1), value=0.5), X),
    "negative pad": (lambda x: F.pad(x, (-1, 2)), X),
    "reflection pad": (lambda x: F.pad(x[None], (1, 2), mode="reflect"), X),
    "replication pad": (lambda x: F.pad(x[None], (1, 2), mode="replicate"), X),
    "flip": (lambda x: x.flip(0, 1), X),
    "roll": (lambda x: x.roll((1, -2), (0, 1)), X),
    "roll flattened": (lambda x: x.roll(3), X),
    "repeat": (lambda x: x.repeat(2, 1, 3), X),
    "repeat_interleave": (lambda x: x.repeat_interleave(3, 1), X),
    "repeat_interleave of a tensor": (lambda x, n: x.repeat_interleave(n, 0), X, COUNTS),
    "repeat_interleave flattened": (lambda x: x.repeat_interleave(2), X),
    "repeat_interleave of counts": (torch.repeat_interleave, COUNTS),
    "tril": (lambda x: x.tril(1), X),
    "triu in place": (lambda x: x.clone().triu_(-1), X),
    "strided copy": (lambda x: torch.zeros(6, 4, device=x.device).copy_(x.t()), X),
    "copy to a slice": (lambda x: torch.zeros(8, 12, device=x.device)[::2, ::2].copy_(x), X),
    "copy with a cast": (lambda x: torch.zeros(4, 6, dtype=torch.float16, device=x.device).copy_(x), X),
    "cast to integer": (lambda x: (x * 3).to(torch.int32), X),
    "cast to bool": (lambda x: x.bool(), LONG),
    "contiguous": (lambda x: x.permute(2, 0, 1).contiguous(), sample((2, 3, 4))),
    "diagonal fill": (lambda x: x.clone().fill_diagonal_(2.0), X),
    "fill with a tensor": (lambda x, y: x.clone().fill_(y[0, 0]), X, Y),
    # reductions
    "sum": (torch.sum, X),
    "sum along": (lambda x: x.sum((0, -1), keepdim=True), sample((3, 4, 5))),
    "sum with a dtype": (lambda x: x.bfloat16().sum(0, dtype=torch.float32), X),
    "sum of bool": (torch.sum, MASK),
    "mean": (lambda x: x.mean(-1), X),
    "prod": (torch.prod, X),
    "prod along": (lambda x: x.prod(0), X),
    "var": (lambda x: x.var(0, unbiased=False), X),
    "std": (lambda x: x.std(), X),
    "var_mean": (lambda x: torch.var_mean(x, 1), X),
    "amax": (lambda x: x.amax((0, 1)), X),
    "amin": (lambda x: x.amin(1), X),
    "aminmax": (lambda x: torch.aminmax(x), X),
    "max": (torch.max, X),
    "max along": (lambda x: torch.max(x, 1, keepdim=True), X),
    "min along": (lambda x: torch.min(x, 0), X),
    "argmax": (torch.argmax, X),
    "argmin along": (lambda x: x.argmin(1, keepdim=True), X),
    "all": (torch.all, MASK),
    "any along": (lambda m: m.any(1), MASK),
    "all of a number": (lambda m: m[0, 0].all(), MASK),
    "norm along": (lambda x: torch.linalg.vector_norm(x, 1, 1), X),
    "infinite norm": (lambda x: torch.linalg.vector_norm(x, math.inf), X),
    "cumsum of integers": (lambda x: x.cumsum(-1, dtype=torch.int32), LONG),
    "cumprod": (lambda x: x.cumprod(1), X),
    "cummax": (lambda x: x.cummax(1), X),
    "logsumexp": (lambda x: x.logsumexp((0, 1)), X),
    "median": (torch.median, X),
    "median along": (lambda x: x.median(1), X),
    "kthvalue": (lambda x: x.kthvalue(2, 1), X),
    "histc": (lambda x: torch.histc(x if x.is_npu else x.double(), 5, 0, 5).long(), LONG),
    "histc of float": (lambda x: torch.histc(x, 6, -1, 2), X),
    "bincount": (lambda x: torch.bincount(x.flatten(), minlength=9), LONG),
    "count_nonzero": (torch.count_nonzero, LONG),
    # indices
    "index of a column": (lambda x, i: x[:, i], X, INDEX),
    "index of two": (lambda x, i: x[i[0], i[1]], X, INDEX),
    "index of separate dims": (lambda x, i: x[i[0], :, i[1]], sample((4, 3, 5)), INDEX),
    "index by nothing": (lambda x, i: x[i[0, :0]], X, INDEX),
    "index integers by nothing": (lambda x, i: x[:, i[0, :0]], LONG, INDEX),
    "index by a mask": (lambda x, m: x[m], X, MASK),
    "index_put": (lambda x, i: x.clone().index_put_((i[0, :2],), torch.tensor(1.0, device=x.device)), X, INDEX),
    "index_put of a column": (lambda x, i, y: index_assign(x, (slice(None), i[0, :2]), y[:, :2]), X, INDEX, Y),
    "index_put by nothing": (lambda x, i: index_assign(x, i[0, :0], 7), LONG, INDEX),
    "index_put by a mask": (lambda x, m: index_assign(x, m, 0.5), X, MASK),
    "index_put accumulated": (
        lambda x, i: x.clone().index_put_((i[0],), torch.ones(3, 6, device=x.device), accumulate=True), X, INDEX),
    "index_select": (lambda x, i: x.index_select(1, i[0]), X, INDEX),
    "index_add": (lambda x, i, y: x.index_add(0, i[0], y[:3], alpha=0.5), X, INDEX, Y),
    "index_copy": (lambda x, i, y: x.index_copy(0, i[1], y[:3]), X, INDEX, Y),
    "index_fill": (lambda x, i: x.index_fill(0, i[0], 0.5), X, INDEX),
    "take": (lambda x, i: x.take(i), X, INDEX),
    "scatter": (lambda x, i, y: x.scatter(1, i, y), X, INDEX[:, ::2], Y),
    "scatter of a number": (lambda x, i: x.scatter(1, i, 0.5), X, INDEX),
    "scatter_reduce": (lambda x, i, y: x.scatter_reduce(0, i, y, "amax", include_self=False), X, INDEX, Y),
    "masked_fill": (lambda x, m: x.masked_fill(m, -math.inf), X, MASK),
    "masked_fill broadcast": (lambda x, m: x.masked_fill(m[:, :1], 0.5), X, MASK),
    "masked_scatter": (lambda x, m, y: x.masked_scatter(m, y), X, MASK, Y),
    "masked_select": (torch.masked_select, X, MASK),
    "nonzero": (torch.nonzero, MASK),
    "nonzero of nothing": (torch.nonzero, torch.zeros(3, 4)),
    "nonzero as tuple": (lambda m: torch.nonzero(m, as_tuple=True), MASK),
    "unique": (lambda x: torch.unique(x, return_inverse=True, return_counts=True), LONG),
    "unique values": (torch.unique, LONG),
    "unique rows": (lambda x: torch.unique(x, dim=0), LONG % 2),
    "unique_consecutive": (lambda x: torch.unique_consecutive(x, return_counts=True), LONG.flatten().sort().values),
    "one_hot": (lambda x: F.one_hot(x, 6), LONG),
    "sort": (lambda x: torch.sort(x, 0, descending=True), X),
    "stable sort": (lambda x: torch.sort(x, stable=True), LONG),
    "argsort": (lambda x: torch.argsort(x, 1), X),
    "stable argsort": (lambda x: torch.argsort(x.flatten(), stable=True), LONG),
    "topk": (lambda x: torch.topk(x, 3), X),
    "smallest": (lambda x: torch.topk(x, 2, dim=0, largest=False), X),
    "searchsorted": (lambda x, y: torch.searchsorted(x, y, right=True), X.sort().values, Y),
    "bucketize": (lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0], device=x.device)), X),
    # matrix products
    "mm": (torch.mm, X, Y.t()),
    "mm of nothing": (torch.mm, X[:, :0], Y[:, :0].t()),
    "mv": (torch.mv, X, Y[0]),
    "dot": (torch.dot, X[0], Y[0]),
    "matmul": (torch.matmul, sample((2, 1, 3, 4)), sample((3, 4, 5))),
    "einsum": (lambda x, y: torch.einsum("bij,bkj->bik", x, y), sample((2, 3, 4)), sample((2, 5, 4))),
    "addmm": (lambda x, y, z: torch.addmm(z[0, :4], x, y, beta=0.5, alpha=2), X, Y.t(), Z),
    "addmm in place": (lambda x, y, z: z[:, :4].clone().addmm_(x, y), X, Y.t(), Z),
    "baddbmm": (torch.baddbmm, sample((2, 3, 5)), sample((2, 3, 4)), sample((2, 4, 5))),
    "addbmm": (torch.addbmm, sample((3, 5)), sample((2, 3, 4)), sample((2, 4, 5))),
    "addmv": (lambda x, y, z: torch.addmv(z[:, 0], x, y[0], beta=0.5, alpha=2), X, Y, Z),
    "addr": (lambda x, y: torch.addr(x, y[:, 0], y[0], beta=0.5, alpha=2), X, Y),
    # losses
    "softmax with a dtype": (lambda x: torch.softmax(x.bfloat16(), -1, dtype=torch.float32), X),
    "nll without reduction": (lambda x: F.nll_loss(x, torch.arange(4, device=x.device), reduction="none"), X),
}  # fmt: skip


def index_assign(x: Tensor, index: Any, value: Any) -> Tensor:
    x = x.clone()
    x[index] = value
    return x


@pytest.mark.parametrize("name", CALLS)
def test_call(name: str) -> None:
    compare(*CALLS[name])


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("name", ["sum", "mean", "var", "std", "amax", "logsumexp", "cumsum", "sort", "softmax"])
def test_of_one_dimension(name: str, dtype: torch.dtype) -> None:
    for x in (sample((), dtype), sample((17, 3), dtype), sample((3, 5), dtype).t(), sample((4, 0, 3), dtype)):
        if x.numel() > 1 or name not in ("var", "std"):
            compare(lambda x: getattr(torch, name)(x, 0), x)


@pytest.mark.parametrize(
    ("name", "function"),
    {
        "arange": lambda device: torch.arange(2, 17, 3, device=device),
        "arange of float": lambda device: torch.arange(0, 1, 0.1, device=device),
        "arange of bfloat16": lambda device: torch.arange(0, 8, 0.5, device=device, dtype=torch.bfloat16),
        "linspace": lambda device: torch.linspace(-1, 2, 7, device=device),
        "eye": lambda device: torch.eye(3, 5, device=device),
        "full": lambda device: torch.full((3, 2), 0.3, device=device, dtype=torch.bfloat16),
        "ones": lambda device: torch.ones(3, device=device, dtype=torch.int32),
        "zeros": lambda device: torch.zeros(3, device=device, dtype=torch.bool),
        "tensor": lambda device: torch.tensor([1, 2.5], device=device),
        "tril_indices": lambda device: torch.tril_indices(3, 3, device=device),
    }.items(),
)
def test_factories(name: str, function: Function) -> None:
    assert_same(function("npu"), function("cpu"))


TARGET = torch.tensor([2, -100, 5, 0])
GRADIENTS: dict[str, tuple[Any, ...]] = {
    "silu": (F.silu, X),
    "gelu": (lambda x: F.gelu(x, approximate="tanh"), X),
    "sigmoid": (torch.sigmoid, X),
    "tanh": (torch.tanh, X),
    "relu": (torch.relu, X),
    "leaky_relu": (lambda x: F.leaky_relu(x, 0.1), X),
    "elu": (F.elu, X),
    "softplus": (F.softplus, X),
    "hardswish": (F.hardswish, X),
    "hardtanh": (F.hardtanh, X),
    "mish": (F.mish, X),
    "glu": (F.glu, X),
    "softmax": (lambda x: torch.softmax(x, 0), X),
    "log_softmax": (lambda x: torch.log_softmax(x, -1), X),
    "product": (torch.mul, X, Y),
    "quotient": (torch.div, X, Y),
    "power": (lambda x: x**3, X),
    "matmul": (torch.matmul, X, Y.t()),
    "linear": (F.linear, X, Y, Z[0, :4]),
    "bmm": (torch.bmm, sample((2, 3, 4)), sample((2, 4, 5))),
    "sum": (lambda x: x.sum(1), X),
    "mean": (torch.mean, X),
    "amax": (lambda x: x.amax(1), X),
    "max": (lambda x: x.max(0).values, X),
    "sort": (lambda x: x.sort().values, X),
    "topk": (lambda x: x.topk(2).values, X),
    "cumsum": (lambda x: x.cumsum(1), X),
    "norm": (torch.linalg.vector_norm, X),
    "index": (lambda x, i: x[i], X, INDEX),
    "gather": (lambda x, i: x.gather(0, i), X, INDEX),
    "scatter_add": (lambda x, i, y: x.scatter_add(0, i, y), X, INDEX, Y[:2, :3]),
    "index_select": (lambda x, i: x.index_select(0, i[0]), X, INDEX),
    "masked_fill": (lambda x, m: x.masked_fill(m, 0.0), X, MASK),
    "where": (torch.where, MASK, X, Y),
    "cat": (lambda x, y: torch.cat([x, y], 1), X, Y),
    "pad": (lambda x: F.pad(x, (1, 2)), X),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, 0), X),
    "embedding": (F.embedding, INDEX, X),
    "embedding with padding": (lambda i, x: F.embedding(i, x, padding_idx=2), INDEX, X),
    "cross_entropy": (lambda x, t: F.cross_entropy(x, t), X, TARGET),
    "sum of cross_entropy": (lambda x, t: F.cross_entropy(x, t, reduction="sum"), X, TARGET),
    "smoothed cross_entropy": (lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), X, TARGET),
    "weighted nll_loss": (lambda x, t, w: F.nll_loss(x, t, w.detach().abs()), X, TARGET, Y[0]),
    "mse_loss": (F.mse_loss, X, Y),
    "smooth_l1_loss": (lambda x, y: F.smooth_l1_loss(x, y.detach()), X, Y),
    "conv1d": (lambda x, w: F.conv1d(x[None], w[:, :, None]), X, sample((3, 4))),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1), sample((2, 3, 5, 6)), sample((4, 3, 3, 3)),
               sample((4,))),
    "conv3d": (lambda x, w, b: F.conv3d(x, w, b, stride=(2, 4, 4)), sample((3, 3, 2, 4, 4)), sample((8, 3, 2, 4, 4)),
               sample((8,))),
}  # fmt: skip
WITHOUT_GRADIENT_OF = {"weighted nll_loss": 1, "smooth_l1_loss": 1}
"""The number of last floating arguments without a gradient."""


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name: str) -> None:
    function, *arguments = GRADIENTS[name]
    first = len(arguments) - WITHOUT_GRADIENT_OF.get(name, 0)
    constants = arguments[first:]
    compare_gradients(lambda *moved: function(*moved, *to(str(moved[0].device), constants)), *arguments[:first])


def test_gelu_is_approximate() -> None:
    """CANN's operator approximates by tanh, and torch_npu calls it for either kind."""
    x = torch.linspace(-4, 4, 100)
    assert_same(F.gelu(x.npu()), F.gelu(x, approximate="tanh"))
    assert not torch.allclose(F.gelu(x), F.gelu(x, approximate="tanh"), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["silu", "gelu", "softmax", "log_softmax", "matmul", "linear", "mean", "embedding"])
@pytest.mark.parametrize("dtype", FLOATING[1:])
def test_gradients_of_half_precision(name: str, dtype: torch.dtype) -> None:
    function, *arguments = GRADIENTS[name]
    compare_gradients(function, *(a.to(dtype) if a.is_floating_point() else a for a in arguments))


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize(
    ("name", "function", "weights"),
    [
        ("layer_norm", lambda x, w, b: F.layer_norm(x, (6,), w, b), 6),
        ("group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), 4),
        ("batch_norm", lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), 4),
    ],
)
def test_normalisation(name: str, function: Function, weights: int, dtype: torch.dtype) -> None:
    """torch_npu keeps float32 statistics for a bfloat16 input, the CPU does not: gradients differ by a rounding."""
    arguments = sample((3, 4, 6)), sample((weights,), seed=1), sample((weights,), seed=2)
    eps = torch.finfo(dtype).eps
    tolerance = {"rtol": 4 * eps, "atol": 16 * eps}
    compare_gradients(function, *(a.to(dtype) for a in arguments), **tolerance)


FOREACH_ONE = """abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac log log10 log1p log2 neg reciprocal
    round sigmoid sign sin sinh sqrt tan tanh trunc"""
FOREACH_TWO = ["add", "sub", "mul", "div", "maximum", "minimum", "pow"]


def some_tensors(dtype: torch.dtype, seed: int = 0, count: int = 30) -> list[Tensor]:
    """Return more tensors than torch_npu passes in one launch, empty ones and numbers among them."""
    shapes = [(), (3,), (2, 5), (0,), (4, 1, 2)]
    return [sample(shapes[i % len(shapes)], dtype, seed + i).abs() for i in range(count)]


def compare_foreach(name: str, first: list[Tensor], *rest: Any) -> None:
    expected = getattr(torch, f"_foreach_{name}")(first, *rest)
    moved, *more = to("npu", [first, *rest])
    assert_same(getattr(torch, f"_foreach_{name}")(moved, *more), expected)
    getattr(torch, f"_foreach_{name}_")(moved, *more)
    # On the CPU, torch._foreach_mul_ rounds a number to the dtype of the tensors; torch._foreach_mul does not.
    assert_same(moved, expected)


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("name", FOREACH_ONE.split())
def test_foreach(name: str, dtype: torch.dtype) -> None:
    compare_foreach(name, some_tensors(dtype))


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("name", FOREACH_TWO)
def test_foreach_of_two(name: str, dtype: torch.dtype) -> None:
    left, right = some_tensors(dtype), some_tensors(dtype, 50)
    compare_foreach(name, left, right)
    compare_foreach(name, left, 0.3)
    compare_foreach(name, left, [0.3 + i for i in range(len(left))])


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("name", ["addcmul", "addcdiv"])
def test_foreach_of_three(name: str, dtype: torch.dtype) -> None:
    x, left, right = some_tensors(dtype), some_tensors(dtype, 50), some_tensors(dtype, 90)
    compare_foreach(name, x, left, right, 0.3)
    compare_foreach(name, x, left, right, [0.3 + i for i in range(len(left))])


@pytest.mark.parametrize("dtype", FLOATING)
def test_foreach_others(dtype: torch.dtype) -> None:
    left, right = some_tensors(dtype), some_tensors(dtype, 50)
    compare_foreach("lerp", left, right, 0.3)
    compare_foreach("lerp", left, right, some_tensors(dtype, 90))
    compare(lambda x: torch._foreach_norm(x, 2), left)
    compare(lambda x: torch._foreach_norm(x, 1), left)
    compare(lambda x: torch._foreach_norm(x, math.inf), [x for x in left if x.numel()])

    def copied_and_zeroed(first: list[Tensor], second: list[Tensor]) -> list[Tensor]:
        first, second = [x.clone() for x in first], [x.clone() for x in second]
        torch._foreach_copy_(first, second)
        torch._foreach_zero_(second)
        return first + second

    compare(copied_and_zeroed, left, right)


def steps(device: str, optimizer: Function, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    parameters = [sample(shape, dtype, 7).to(device).requires_grad_() for shape in ((5, 3), (4,), ())]
    made = optimizer(parameters)
    for step in range(4):
        for parameter in parameters:
            parameter.grad = sample(tuple(parameter.shape), dtype, step).to(device)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        made.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("dtype", FLOATING[:2])
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad"])
def test_optimizers(name: str, foreach: bool, dtype: torch.dtype) -> None:
    def optimizer(parameters: list[Tensor]) -> torch.optim.Optimizer:
        momentum = {"momentum": 0.9} if name == "SGD" else {}
        return getattr(torch.optim, name)(parameters, lr=1e-2, weight_decay=0.1, foreach=foreach, **momentum)

    assert_same(steps("npu", optimizer, dtype), steps("cpu", optimizer, dtype))


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"maximize": True}])
def test_fused_adamw(options: dict[str, bool]) -> None:
    """The operator takes its numbers (learning rate, betas) in float32."""

    def optimizer(parameters: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2, fused=True, **options)

    assert_same(steps("npu", optimizer), steps("cpu", optimizer), rtol=1e-6, atol=1e-6)
    half = steps("npu", optimizer, torch.bfloat16)
    assert_same(half, steps("cpu", optimizer, torch.bfloat16), rtol=2**-7, atol=2**-8)


def test_gradient_scaler() -> None:
    def run(device: str) -> tuple[Tensor, ...]:
        parameter = sample((5,)).to(device).requires_grad_()
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        scaler = torch.amp.GradScaler(device, init_scale=8.0, growth_interval=2)
        scales = []
        for factor in (1.0, 1.0, math.inf, 1.0):
            optimizer.zero_grad()
            scaler.scale((parameter * factor).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return parameter.detach(), torch.tensor(scales)

    assert_same(run("npu"), run("cpu"))


DRAWS = {
    "rand": lambda: torch.rand(1000, device="npu"),
    "randn": lambda: torch.randn(1000, device="npu"),
    "randn of bfloat16": lambda: torch.randn(1000, device="npu", dtype=torch.bfloat16),
    "randint": lambda: torch.randint(3, 90, (1000,), device="npu"),
    "randperm": lambda: torch.randperm(1000, device="npu"),
    "bernoulli": lambda: torch.zeros(1000, device="npu").bernoulli_(0.3),
    "bernoulli of a tensor": lambda: torch.bernoulli(torch.full((1000,), 0.3, device="npu")),
    "exponential": lambda: torch.zeros(1000, device="npu").exponential_(2.0),
    "multinomial": lambda: torch.multinomial(torch.arange(9.0, device="npu"), 1000, replacement=True),
    "normal of tensors": lambda: torch.normal(torch.arange(1000.0, device="npu"), torch.ones(1000, device="npu")),
    "uniform": lambda: torch.zeros(10, 100, device="npu").t().uniform_(-2, 3),
    "trunc_normal": lambda: torch.nn.init.trunc_normal_(torch.zeros(1000, device="npu"), std=0.02),
    "dropout": lambda: F.dropout(torch.ones(1000, device="npu"), 0.3),
}


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_depend_on_seed_and_offset(name: str) -> None:
    torch.npu.manual_seed(5)
    first, second = DRAWS[name]().cpu(), DRAWS[name]().cpu()
    torch.npu.manual_seed(5)
    again = DRAWS[name]().cpu()
    torch.npu.manual_seed(6)
    other = DRAWS[name]().cpu()
    assert_same(again, first)
    assert not torch.equal(first, second) and not torch.equal(first, other)


def test_distributions() -> None:
    torch.npu.manual_seed(5)
    normal = torch.randn(100_000, device="npu").cpu() * 2 + 3
    assert normal.mean().item() == pytest.approx(3, abs=0.05) and normal.std().item() == pytest.approx(2, abs=0.05)
    uniform = torch.empty(100_000, device="npu", dtype=torch.bfloat16).uniform_(-1, 2).cpu()
    assert uniform.min() >= -1 and uniform.max() < 2 and uniform.float().mean().item() == pytest.approx(0.5, abs=0.02)
    integers = torch.randint(3, 9, (10_000,), device="npu").cpu()
    assert integers.unique().tolist() == [3, 4, 5, 6, 7, 8]
    assert torch.randperm(1000, device="npu").cpu().sort().values.equal(torch.arange(1000))
    drawn = torch.multinomial(torch.tensor([0.0, 1.0, 3.0], device="npu"), 10_000, replacement=True).cpu()
    assert drawn.bincount(minlength=3)[0] == 0 and drawn.float().mean().item() == pytest.approx(1.75, abs=0.03)
    assert torch.empty(100_000, device="npu").exponential_(2.0).mean().item() == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("dtype", FLOATING)
def test_dropout(dtype: torch.dtype) -> None:
    x = sample((37, 9), dtype).npu().requires_grad_()
    y = F.dropout(x, 0.25)
    (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
    survives = gradient.cpu() != 0
    assert 0.6 < survives.float().mean() < 0.9
    assert_same(y.detach(), torch.where(survives, x.detach().cpu() * (1 / 0.75), 0))
    assert_same(gradient, torch.where(survives, torch.tensor(1 / 0.75, dtype=dtype), 0))


def test_an_output_may_overlap_an_input() -> None:
    x = sample((4, 4))
    expected = x * x[0]
    KERNELS["aclnnMul"](x, x[0], x)
    assert torch.equal(x, expected)
    x, y = sample((4, 4)), sample((4, 4), seed=1)
    expected = x + y.t()
    KERNELS["aclnnAdd"](x, y.t(), 1, y)
    assert torch.equal(y, expected)


def test_an_output_of_the_wrong_size_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"the result has shape \[4\], the output \[3, 4\]"):
        KERNELS["aclnnAbs"](torch.zeros(4), torch.zeros(3, 4))


def test_the_default_dtype_does_not_reach_the_kernels() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        torch.npu.manual_seed(1)
        assert torch.arange(1000, device="npu").cpu().equal(torch.arange(1000))
        assert torch.randn(1000, device="npu", dtype=torch.float32).cpu().unique().numel() > 900
        compare(lambda x: F.one_hot(x, 300), torch.arange(300))
        compare(lambda x: F.cross_entropy(x, torch.arange(4, device=x.device)), X)
    finally:
        torch.set_default_dtype(torch.float32)
