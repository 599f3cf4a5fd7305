#!/usr/bin/env python
"""Report the shared memory of each Triton kernel on GPUs of some compute capabilities.

    python tools/kernel_memory.py 80 89 90
    python tools/kernel_memory.py 90 --gluon   # registers and spills of the kernels for Hopper

Kernels are compiled at DeepSeek-V3.2's sizes in bfloat16 and not launched, so no GPU is needed.
"""

from __future__ import annotations

import argparse
import io
from contextlib import redirect_stdout
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from torchtitan_npu.gpu_kernels import grouped_matmul, moe_gating, moe_permute, rms_norm, rotary_mul, swiglu
from torchtitan_npu.gpu_kernels.indexer_kl_loss import gluon as indexer_kl_loss_gluon
from torchtitan_npu.gpu_kernels.indexer_kl_loss import triton as lightning_indexer_kl_loss
from torchtitan_npu.gpu_kernels.lightning_indexer import gluon as lightning_indexer_gluon
from torchtitan_npu.gpu_kernels.lightning_indexer import gluon_grad as lightning_indexer_gluon_grad
from torchtitan_npu.gpu_kernels.lightning_indexer import triton as lightning_indexer
from torchtitan_npu.gpu_kernels.sparse_flash_attention import gluon as sparse_flash_attention_gluon
from torchtitan_npu.gpu_kernels.sparse_flash_attention import gluon_grad as sparse_flash_attention_gluon_grad
from torchtitan_npu.gpu_kernels.sparse_flash_attention import triton as sparse_flash_attention
from torchtitan_npu.gpu_kernels.sparse_flash_attention import triton_grad as sparse_flash_attention_grad

HEADS, LATENT, ROPE, TOP_K = 128, 512, 64, 2048
INDEX_HEADS, INDEX_SIZE = 64, 128
HIDDEN, EXPERT_HIDDEN = 7168, 2048
SHARED_MEMORY = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
"""Bytes of shared memory per block, from the CUDA programming guide."""


class Compiler:
    """Replace Triton's driver in this process. Kernels are compiled for ``capability`` instead of launched."""

    def __init__(self, capability: int):
        self.capability = capability
        self.shared: dict[str, int] = {}
        self.assembly: dict[str, str] = {}
        self.reports: dict[str, str] = {}
        """ptxas' report of each kernel: registers, spills, and waits that it adds."""

    def install(self) -> None:
        knobs.compilation.always_compile = knobs.nvidia.dump_ptxas_log = True
        driver.set_active(self)
        JITFunction.run = lambda function, *args, **options: self.compile(function, *args, **options)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # the key of Triton's cache

    def get_current_stream(self, device: int) -> int:
        return 0

    def compile(self, function: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        with redirect_stdout(io.StringIO()) as report:
            compiled = launch(function, *args, grid=grid, warmup=True, **options)
        # torchtitan_npu.gpu_kernels.lightning_indexer.triton_top_k -> lightning_indexer_top_k
        module = ".".join(function.fn.__module__.split(".")[-2:]).replace(".triton", "")
        name = f"{module}.{function.fn.__name__}"
        if ".gluon" in module and "QUERIES" in options:
            name += f", {options['GROUP']} heads"
            if options["QUERIES"] > 1:
                name += f" of {options['QUERIES']} queries"
            if options.get("IN_ORDER"):
                name += ", in order"
        if ".gluon" in module and self.assembly.get(name, compiled.asm["ptx"]) != compiled.asm["ptx"]:
            name += f" ({sum(known.startswith(name) for known in self.assembly) + 1})"
        self.shared[name] = max(self.shared.get(name, 0), compiled.metadata.shared)
        self.assembly[name] = compiled.asm["ptx"]
        self.reports.setdefault(name, report.getvalue())  # empty if the kernel was compiled before


launch = JITFunction.run


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def attention_inputs(heads: int = HEADS, queries: int = 2, keys: int = 2) -> tuple[Tensor, ...]:
    """Return query, key, query_rope, key_rope and the selected keys."""
    sizes = ((queries, heads, LATENT), (keys, 1, LATENT), (queries, heads, ROPE), (keys, 1, ROPE))
    return *(zeros(1, *size) for size in sizes), torch.zeros(1, queries, 1, TOP_K, dtype=torch.int32)


def loss_arguments(attention: tuple[Tensor, ...], statistics: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """Return the arguments of the indexer's loss for two tokens, with those of the attention and its statistics."""
    names = ("query", "key", "query_rope", "key_rope", "sparse_indices", "softmax_max", "softmax_sum")
    return {
        **dict(zip(names, (*attention, *statistics), strict=True)),
        "query_index": zeros(1, 2, INDEX_HEADS, INDEX_SIZE),
        "key_index": zeros(1, 2, 1, INDEX_SIZE),
        "weights": zeros(1, 2, INDEX_HEADS),
        **dict.fromkeys(("actual_seq_qlen", "actual_seq_klen", "sinks")),
        **{"scale_value": 0.1, "layout": "BSND", "sparse_mode": 3, "pre_tokens": 0, "next_tokens": 0},
    }


def indexer_arguments(keys: int) -> dict[str, Any]:
    """Return the arguments of the indexer for 16 tokens."""
    return {
        "query": zeros(1, 16, INDEX_HEADS, INDEX_SIZE),
        "key": zeros(1, keys, 1, INDEX_SIZE),
        "weights": zeros(1, 16, INDEX_HEADS),
        **dict.fromkeys(("actual_seq_lengths_query", "actual_seq_lengths_key")),
        **{"layout_query": "BSND", "sparse_count": TOP_K, "sparse_mode": 3, "return_value": False},
    }


def call_attention(forward: ModuleType, backward: ModuleType, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Call both passes, the backward pass also with deterministic sums, and return the softmax statistics."""
    query, key, query_rope, key_rope, indices = inputs
    ropes = (query_rope, key_rope)
    out, highest, total = forward.npu_sparse_flash_attention(
        query, key, None, indices, 0.1, None, None, *ropes, "BSND", 3, True
    )
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        backward.npu_sparse_flash_attention_grad(
            query, key, None, indices, out, out, highest, total, 0.1, *ropes, None, None, "BSND", 3
        )
    torch.use_deterministic_algorithms(False)
    return highest, total


def call_gluon() -> None:
    kernels = sparse_flash_attention_gluon, sparse_flash_attention_gluon_grad
    # few heads, as on a rank of tensor parallel 8, for which several queries are a block
    call_attention(*kernels, attention_inputs(heads=16, queries=8, keys=TOP_K))
    inputs = attention_inputs()
    statistics = call_attention(*kernels, inputs)
    indexer_kl_loss_gluon.npu_sparse_lightning_indexer_grad_kl_loss(**loss_arguments(inputs, statistics))
    lightning_indexer_gluon.npu_lightning_indexer(**indexer_arguments(4096))
    lightning_indexer_gluon_grad.npu_lightning_indexer_grad(
        query=zeros(1, 2, INDEX_HEADS, INDEX_SIZE),
        key=zeros(1, 2 * TOP_K, 1, INDEX_SIZE),  # more than are selected, so that shared keys are put first
        dy=torch.zeros_like(inputs[4], dtype=torch.float32),
        sparse_indices=inputs[4],
        weights=zeros(1, 2, INDEX_HEADS),
        **dict.fromkeys(("actual_seq_lengths_query", "actual_seq_lengths_key")),
        **{"layout": "BSND", "sparse_mode": 3},
    )


def reads_before_warp_groups(assembly: str) -> bool:
    """Return whether a kernel reads shared memory, such as the result of a reduction, before its warp groups start.

    Triton 3.6 passes the arguments of ``warp_specialize`` in the same memory, without a barrier between a warp that
    reads the result and one that writes the arguments. Warps then disagree on the result, and a kernel whose loops
    depend on it never ends. Such reads are reported for every Triton: 3.7.1, with which the tests compile, adds the
    barrier. This check and the layout in ``lightning_indexer.gluon._find`` can go when the GPU kernels need Triton 3.7.
    """
    if "setmaxnreg" not in assembly:
        return False
    before, start, _ = assembly.partition("barrier.sync")
    assert start, "the barrier at which warp groups start was not found"
    return "ld.shared" in before or "ldmatrix" in before


def call_triton() -> None:
    inputs = attention_inputs()
    statistics = call_attention(sparse_flash_attention, sparse_flash_attention_grad, inputs)
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        lightning_indexer_kl_loss.npu_sparse_lightning_indexer_grad_kl_loss(**loss_arguments(inputs, statistics))
    for keys in (4096, 131072):
        lightning_indexer.npu_lightning_indexer(**indexer_arguments(keys))


def call_basic(norm_width: int) -> None:
    x, gamma = zeros(256, norm_width), zeros(norm_width)
    _, rstd = rms_norm.npu_rms_norm(x, gamma, 1e-6)
    rms_norm.npu_rms_norm_backward(x, x, gamma, rstd)
    x, angles = zeros(1, 8, HEADS, ROPE), zeros(1, 8, 1, ROPE)
    for mode in ("half", "interleave"):
        rotary_mul.npu_rotary_mul(x, angles, angles, mode)
        rotary_mul.npu_rotary_mul_backward(x, x, angles, angles, mode)
    swiglu.npu_swiglu(zeros(16, 2 * EXPERT_HIDDEN), -1)
    swiglu.npu_swiglu_backward(zeros(16, EXPERT_HIDDEN), zeros(16, 2 * EXPERT_HIDDEN), -1)
    logits = torch.zeros(4, 256)
    y, experts, scores = moe_gating.npu_moe_gating_top_k(
        logits, 8, logits[0], None, None, 4, 8, 1, 0, 1, True, 2.5, 1e-20
    )
    moe_gating.npu_moe_gating_top_k_backward(scores, y, experts, 0, 1, 2.5, 1e-20)
    tokens, probs = zeros(4, HIDDEN), zeros(4, 8)
    permuted, positions = moe_permute.npu_moe_token_permute(tokens, torch.zeros(4, 8, dtype=torch.int64), None)
    moe_permute.npu_moe_token_unpermute(permuted, positions, probs)
    moe_permute.npu_moe_token_unpermute_grad_v2(tokens, positions, 32, torch.bfloat16, probs, permuted)
    ends, config = torch.tensor([128, 256], dtype=torch.int32), grouped_matmul.CONFIG
    x, weight = zeros(256, HIDDEN), zeros(2, HIDDEN, EXPERT_HIDDEN)
    for one in (weight, weight.mT.contiguous().mT):
        grouped_matmul.rows_product(x, one, ends, config)
    for total in (None, torch.zeros(2, HIDDEN, EXPERT_HIDDEN)):
        grouped_matmul.sums_product(x.t(), zeros(256, EXPERT_HIDDEN), ends, config, out=total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("capabilities", type=int, nargs="+", choices=sorted(SHARED_MEMORY), metavar="CAPABILITY")
    parser.add_argument("--norm-width", type=int, default=HIDDEN, help="number of features of RMSNorm")
    parser.add_argument(
        "--without-attention", action="store_true", help="skip the attention kernels, which take minutes to compile"
    )
    parser.add_argument(
        "--gluon", action="store_true", help="only the Gluon kernels, which need 90, and what ptxas reports of them"
    )
    options = parser.parse_args()
    for capability in options.capabilities:
        compiler = Compiler(capability)
        compiler.install()
        if options.gluon:
            call_gluon()
        else:
            call_basic(options.norm_width)
            if not options.without_attention:
                call_triton()
        limit = SHARED_MEMORY[capability]
        print(f"compute capability {capability / 10}, {limit} bytes")
        for name, size in sorted(compiler.shared.items(), key=lambda item: -item[1]):
            print(f"  {size:7} {name}{'  does not fit' if size > limit else ''}", flush=True)
        if options.gluon:
            for name, report in compiler.reports.items():
                if ".gluon" in name:
                    print(name, report, sep="\n")
                    if reads_before_warp_groups(compiler.assembly[name]):
                        print("reads shared memory before its warp groups start")


if __name__ == "__main__":
    main()
