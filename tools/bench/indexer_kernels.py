#!/usr/bin/env python
"""Check and measure the lightning indexer's kernels on an NVIDIA GPU.

    python tools/bench/indexer_kernels.py [--only check indexer loss peers] [--peers DIR] [--json FILE]

``check`` compares bfloat16 with float64 on small shapes. ``indexer`` times 64 heads of 128 and the top 2048 keys of one
causal sequence of 2k to 128k tokens, with ``attn_gym`` if it is installed, and eager code. ``loss`` times the indexer's
loss with its gradients (128 heads of attention, 512 + 64), and the gradients alone, with eager and compiled code.

``peers`` runs with ``--peers``, on a Hopper GPU. It times our scores and our indexer in turns with public kernels:
``attn_gym``, and ``fp8_mqa_logits`` of DeepGEMM (https://github.com/deepseek-ai/DeepGEMM). DIR holds a module
``deep_gemm_mqa`` that calls it: ``fp8_mqa_logits(q, kv, kv_scales, weights, ks, ke)`` with DeepGEMM's tensors, without
its ``clean_logits``. It computes the scores alone, from queries and keys in FP8 (e4m3). Its limit is the rate of a
large FP8 matmul. Casts to FP8 are not timed.

Times are medians on the device, replayed from a CUDA graph. Rates count the necessary matmuls. The limit is these at
the rate of a large matmul, or the bytes of arguments and results at the rate of a copy, both measured in the same run.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from harness import (
    Machine,
    Row,
    Run,
    check_peer,
    compiled,
    difference,
    in_turns,
    installed,
    mask_of,
    measure_machine,
    need_gpu,
    of_peer,
    parser_of,
    peers_in,
    printed,
    show,
    size,
    store,
    timed,
)
from torch import Tensor
from torch.nn import functional as F

from torchtitan_npu.gpu_kernels.lightning_indexer import gluon
from torchtitan_npu.gpu_kernels.sparse_flash_attention.triton_rows import rows_of
from torchtitan_npu.ops import OPS

HEADS, SIZE, TOP_K = 64, 128, 2048
LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
SMALL_OPS = 4096
PEER_LENGTHS = (4096, 8192)
LOSS_LENGTHS = (4096, 32768)
SCORE_LENGTHS = (4096, 32768)
ATTENTION = {"heads": 128, "size": 512, "rope": 64}


def inputs(length: int, heads: int = HEADS, size: int = SIZE) -> dict[str, Tensor]:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    weights = random(1, length, heads) * heads**-0.5
    return {"query": random(1, length, heads, size), "key": random(1, length, 1, size), "weights": weights}


def indexer(tensors: dict[str, Tensor], top_k: int = TOP_K, return_value: bool = False) -> tuple[Tensor, Tensor]:
    lengths = dict.fromkeys(("actual_seq_lengths_query", "actual_seq_lengths_key"))
    options = {"layout_query": "BSND", "sparse_count": top_k, "sparse_mode": 3, "return_value": return_value}
    return OPS["npu_lightning_indexer"].cuda(**tensors, **lengths, **options)  # type: ignore[misc]


def small_ops(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    """Select keys from the full matrix of scores, like eager code."""
    length = query.shape[1]
    hidden = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    scores = small_scores(query, key, weights).float()
    return scores.masked_fill(hidden, -math.inf).topk(min(TOP_K, length)).indices


def small_scores(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    logits = torch.einsum("bqhd,bkd->bqhk", query, key[:, :, 0]).relu()
    return torch.einsum("bqh,bqhk->bqk", weights, logits)


def attn_gym(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    from attn_gym.sparse import lightning_indexer as peer

    return peer(query, key[:, :, 0], weights, TOP_K, causal=True)


def loss_inputs(length: int, top_k: int) -> dict[str, Any]:
    """Return the arguments of the loss. The softmax statistics belong to zero logits, so no exponential overflows."""
    heads, rope = ATTENTION["heads"], ATTENTION["rope"]
    index, attention = inputs(length), inputs(length, heads, ATTENTION["size"])
    ropes = inputs(length, heads, rope)
    indices, _ = indexer(index, top_k)
    held = (indices >= 0).sum(-1).transpose(1, 2)[..., None].float()
    return {
        **{"query": attention["query"], "key": attention["key"]},
        **{"query_rope": ropes["query"], "key_rope": ropes["key"]},
        **{"query_index": index["query"], "key_index": index["key"], "weights": index["weights"]},
        "softmax_max": torch.zeros(1, 1, length, heads, device="cuda"),
        "softmax_sum": held.repeat(1, 1, 1, heads),
        "sparse_indices": indices,
        **{"actual_seq_qlen": None, "actual_seq_klen": None},
        **{"scale_value": (ATTENTION["size"] + rope) ** -0.5, "layout": "BSND", "sparse_mode": 3},
    }


def loss(call: dict[str, Any], of: str = "cuda") -> tuple[Tensor, ...]:
    op = OPS["npu_sparse_lightning_indexer_grad_kl_loss"]
    return getattr(op, of)(**op.complete(**call))


def gradient_call(call: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the gradient operator, with random gradients of the selected scores."""
    names = {"query": "query_index", "key": "key_index", "weights": "weights", "sparse_indices": "sparse_indices"}
    lengths = dict.fromkeys(("actual_seq_lengths_query", "actual_seq_lengths_key"))
    dy = torch.randn_like(call["sparse_indices"], dtype=call["query"].dtype)
    return {name: call[of] for name, of in names.items()} | lengths | {"dy": dy, "layout": "BSND", "sparse_mode": 3}


def check() -> Iterator[Row]:
    """Yield the relative errors against float64."""
    length, count = 700, 128
    tensors = inputs(length)
    indices, values = indexer(tensors, count, return_value=True)
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    logits = torch.einsum("bqhd,bkd->bqhk", wide["query"], wide["key"][:, :, 0]).relu()
    scores = torch.einsum("bqh,bqhk->bqk", wide["weights"], logits)
    scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    held = indices[:, :, 0] >= 0
    assert torch.equal(held.sum(-1)[0].cpu(), torch.arange(1, length + 1).clamp(max=count))
    chosen = scores.gather(-1, indices[:, :, 0].clamp_min(0).long())
    worst, best_worst = (x.masked_fill(~held, math.inf).amin(-1) for x in (chosen, scores.topk(count).values))
    yield {"what": "indexer: the last key's score, against the exact one", "error": _error(worst, best_worst)}
    yield {"what": "indexer: scores", "error": _error(values[:, :, 0][held], chosen[held])}

    call = loss_inputs(300, 64)
    floats = {name: x for name, x in call.items() if isinstance(x, Tensor) and x.is_floating_point()}
    exact = call | {name: x.double() for name, x in floats.items()}
    names = ("gradient of the query", "gradient of the key", "gradient of the weights", "loss")
    expected = loss(exact, "reference")
    for how in ("", ", in order"):
        torch.use_deterministic_algorithms(bool(how))
        got = loss(call)
        assert not how or all(map(torch.equal, got, loss(call)))
        torch.use_deterministic_algorithms(False)
        for name, one, other in zip(names, got, expected, strict=True):
            yield {"what": f"{name}{how}", "error": _error(one, other)}


def _error(got: Tensor, expected: Tensor) -> float:
    """Return the relative L2 error."""
    error = difference(got, expected)
    assert error < 1e-2, f"{error} is above bfloat16 rounding"
    return error


def pairs(length: int, known: int = TOP_K) -> int:
    """Return the number of scores of a causal sequence, without rows that see at most ``known`` keys."""
    return sum(range(min(known, length) + 1, length + 1))


def indexer_limit(machine: Machine, tensors: dict[str, Tensor]) -> float:
    """Return the limit of the indexer. A row that sees at most TOP_K keys selects all of them and needs no scores."""
    length = tensors["query"].shape[1]
    scored = max(0, length - TOP_K) / length
    moved = scored * size(tensors["query"], tensors["weights"]) + size(tensors["key"]) + 4 * length * TOP_K
    return machine.limit_ms(moved, 2 * HEADS * SIZE * pairs(length))


def indexer_rows(machine: Machine) -> Iterator[Row]:
    for length in LENGTHS:
        tensors = inputs(length)
        flops = 2 * HEADS * SIZE * pairs(length)
        out = 4 * length * TOP_K
        limit = indexer_limit(machine, tensors)
        yield timed(lambda: indexer(tensors), flops, what="indexer", length=length, limit_ms=limit)  # noqa: B023
        if length == SMALL_OPS:
            every = 2 * HEADS * SIZE * pairs(length, 0)
            limit = machine.limit_ms(size(*tensors.values()) + out + out / 2, every)
            run: Run = lambda: indexer(tensors, return_value=True)  # noqa: B023, E731
            yield timed(run, every, what="indexer with scores", length=length, limit_ms=limit)
            yield timed(lambda: small_ops(**tensors), what="small ops", length=length)  # noqa: B023
        if importlib.util.find_spec("attn_gym") and length in PEER_LENGTHS:
            yield of_peer(timed, partial(attn_gym, **tensors), flops, what="attn_gym", length=length)


def small_loss(call: dict[str, Any], mask: Tensor) -> Tensor:
    """Compute the loss from full matrices of scores, like eager code. ``mask`` (S, S) marks selected keys."""
    keys = torch.cat((call["key"], call["key_rope"]), -1)[0, :, 0]
    queries = torch.cat((call["query"], call["query_rope"]), -1)[0]
    logits = torch.einsum("qhd,kd->hqk", queries, keys) * call["scale_value"]
    p = logits.masked_fill(~mask, -math.inf).softmax(-1, dtype=torch.float32).sum(0)
    p = p / p.sum(-1, keepdim=True)
    products = torch.einsum("qhd,kd->qhk", call["query_index"][0], call["key_index"][0, :, 0]).relu()
    scores = torch.einsum("qh,qhk->qk", call["weights"][0], products).float()
    log_softmax = scores.masked_fill(~mask, -math.inf).log_softmax(-1)
    return torch.where(p > 0, p * (p.log() - log_softmax), 0).sum()


def small_selected(query: Tensor, key: Tensor, weights: Tensor, entries: Tensor) -> Tensor:
    """Return the scores of the keys ``entries`` (1, S, K)."""
    return small_scores(query, key, weights).gather(-1, entries)


def small_runs(call: dict[str, Any], gradient: dict[str, Any]) -> Iterator[tuple[str, Run]]:
    """Yield the gradients that the two operators return in eager code, and compiled, arguments their arguments."""
    mask = mask_of(call["sparse_indices"])
    indices = gradient["sparse_indices"][:, :, 0]
    dy, entries = gradient["dy"][:, :, 0].masked_fill(indices < 0, 0), indices.clamp_min(0).long()
    of_loss = {name: call[name].detach().requires_grad_() for name in ("query_index", "key_index", "weights")}
    of_scores = {name: gradient[name].detach().requires_grad_() for name in ("query", "key", "weights")}
    for suffix, compile in (("", lambda function: function), (", compiled", compiled)):
        loss, scores = compile(small_loss), compile(small_selected)
        yield (
            f"loss and gradients, small ops{suffix}",
            lambda loss=loss: torch.autograd.grad(loss(call | of_loss, mask), list(of_loss.values())),
        )
        yield (
            f"gradients, small ops{suffix}",
            lambda scores=scores: torch.autograd.grad(
                scores(**of_scores, entries=entries), list(of_scores.values()), dy
            ),
        )


def loss_rows(machine: Machine) -> Iterator[Row]:
    for length in LOSS_LENGTHS:
        call = loss_inputs(length, TOP_K)
        selected = int((call["sparse_indices"] >= 0).sum())
        index_flops = 2 * HEADS * SIZE * selected
        attention_flops = 2 * ATTENTION["heads"] * (ATTENTION["size"] + ATTENTION["rope"]) * selected
        flops = attention_flops + 4 * index_flops
        results = size(*(call[name] for name in ("query_index", "key_index", "weights")))
        limit = machine.limit_ms(size(*call.values()) + results, flops)
        yield timed(lambda: loss(call), flops, what="loss and gradients", length=length, limit_ms=limit)  # noqa: B023
        gradient = gradient_call(call)
        if length == LOSS_LENGTHS[0]:
            for what, run in small_runs(call, gradient):
                yield of_peer(timed, run, what=what, length=length)
        limit = machine.limit_ms(size(*gradient.values()) + results, 3 * index_flops)
        for in_order in (False, True) if length == LOSS_LENGTHS[0] else (False,):
            torch.use_deterministic_algorithms(in_order)
            what = "gradients, in order" if in_order else "gradients"
            once = partial(OPS["npu_lightning_indexer_grad"].cuda, **gradient)  # type: ignore[misc, arg-type]
            yield timed(once, 3 * index_flops, what=what, length=length, limit_ms=limit)
        torch.use_deterministic_algorithms(False)


def in_fp8(query: Tensor, key: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Return the arguments of ``fp8_mqa_logits`` for one causal sequence, with a power of 2 as the scale of each key.

    Queries have no scale: those of :func:`inputs` are in the range of FP8.
    """
    largest = torch.finfo(torch.float8_e4m3fn).max
    scales = key[0, :, 0].abs().amax(-1).float().div(largest).log2().ceil().exp2()
    starts = torch.zeros(query.shape[1], dtype=torch.int32, device=query.device)
    return {
        "q": query[0].to(torch.float8_e4m3fn),
        "kv": (key[0, :, 0] / scales[:, None]).to(torch.float8_e4m3fn),
        "kv_scales": scales,
        "weights": weights[0].float(),
        "ks": starts,
        "ke": starts + torch.arange(1, query.shape[1] + 1, dtype=torch.int32, device=query.device),
    }


def from_fp8(arguments: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of :func:`in_fp8` in bfloat16, as our kernels take them. They have the same values."""
    key = arguments["kv"].float() * arguments["kv_scales"][:, None]
    tensors = {"query": arguments["q"], "key": key[:, None], "weights": arguments["weights"]}
    return {name: tensor.bfloat16()[None] for name, tensor in tensors.items()}


def scores_run(query: Tensor, key: Tensor, weights: Tensor) -> Run:
    """Compute our scores of all visible keys in one launch. Other entries of the result are undefined."""
    rows = rows_of("BSND", 3, query, key, None, None)

    def run() -> Tensor:
        scores = torch.empty(query.shape[1], key.shape[1], device=query.device)
        gluon.score(query, key, weights, rows, scores, 0)
        return scores

    return run


def deep_gemm_run(arguments: dict[str, Tensor]) -> Run:
    return partial(import_module("deep_gemm_mqa").fp8_mqa_logits, **arguments)


def deep_gemm_error(arguments: dict[str, Tensor], tensors: dict[str, Tensor], most: float, **row: Any) -> Row:
    """Return the difference of DeepGEMM's scores of ``arguments`` from ours of ``tensors``."""
    return row | {"error": check_peer(deep_gemm_run(arguments)().tril(), scores_run(**tensors)().tril(), most)}


def fp8_matmul() -> Run:
    """Return a matmul of 8192 rows, columns and features in FP8, accumulated like DeepGEMM's."""
    a, b = (torch.randn(8192, 8192, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    scale, recipe = torch.ones((), device="cuda"), F.ScalingType.TensorWise
    return lambda: F.scaled_mm(a, b.t(), scale, recipe, scale, recipe, use_fast_accum=True)


def peer_rows(machine: Machine) -> Iterator[Row]:
    matmul = timed(fp8_matmul(), 2 * 8192**3, what="matmul, FP8", length=8192)
    yield matmul
    fp8_machine = replace(machine, matmul_rate=1e12 * matmul["tflops"])
    for length in SCORE_LENGTHS:
        tensors = inputs(length)
        arguments = in_fp8(**tensors)
        for what, of_ours, most in (
            ("scores of DeepGEMM and ours, with the same FP8 inputs", from_fp8(arguments), 1e-2),
            ("scores of DeepGEMM and ours, with bfloat16 inputs for ours", tensors, 5e-2),
        ):
            yield of_peer(deep_gemm_error, arguments, of_ours, most, what=what, length=length)
        builds: dict[str, Callable[[], Run]] = {
            "scores, ours": partial(scores_run, **tensors),
            "scores, DeepGEMM": partial(deep_gemm_run, arguments),
            "indexer, ours": lambda: partial(indexer, tensors),  # noqa: B023
        }
        if importlib.util.find_spec("attn_gym"):
            builds["indexer, attn_gym"] = lambda: partial(attn_gym, **tensors)  # noqa: B023
        every, selected = (2 * HEADS * SIZE * pairs(length, known) for known in (0, TOP_K))
        written = 4 * pairs(length, 0)
        work = {
            "scores, ours": (every, machine.limit_ms(size(*tensors.values()) + written, every)),
            "scores, DeepGEMM": (every, fp8_machine.limit_ms(size(*arguments.values()) + written, every)),
            "indexer, ours": (selected, indexer_limit(machine, tensors)),
            "indexer, attn_gym": (selected, indexer_limit(machine, tensors)),
        }
        yield from in_turns(builds, work, length=length)
        torch.cuda.empty_cache()


PARTS: dict[str, Callable[[Machine], Iterator[Row]]] = {
    "check": lambda _: check(),
    "indexer": indexer_rows,
    "loss": loss_rows,
    "peers": peer_rows,
}


def rows_of_part(part: str, machine: Machine) -> Iterator[Row]:
    return ({"part": part} | row for row in PARTS[part](machine))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS)
    parser.add_argument("--peers", type=Path, help="folder with the module deep_gemm_mqa, for the part peers")
    args = parser.parse_args()
    if "peers" in (args.only or ()) and not args.peers:
        parser.error("--only peers needs --peers DIR")
    need_gpu()
    torch.manual_seed(0)
    machine = measure_machine()
    about: dict[str, Any] = machine.rates()
    if args.peers:
        about |= {"peers": installed(("attn_gym",)) | peers_in(args.peers, {"DeepGEMM": "deep_gemm_mqa"})}
    parts = args.only or [part for part in PARTS if part != "peers" or args.peers]
    store(args.json, printed((rows_of_part(part, machine) for part in parts), show), **about)


if __name__ == "__main__":
    main()
