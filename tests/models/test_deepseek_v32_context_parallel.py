"""Context parallel of DeepSeek-V3.2: its collectives, its distribution of tokens, and a user's own class."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests._helpers.deepseek_v32_models import BATCH, SEQUENCE, build, model_args, start_batch, tokens
from tests._helpers.deepseek_v32_training import assert_as_on_one_rank, one_rank, train_on
from tests._helpers.multirank import run_on_ranks
from tests.preflight.test_job_checks import job
from torchtitan_npu.distributed.context_parallel import ContextParallel
from torchtitan_npu.errors import UsageError
from torchtitan_npu.layers.documents import Documents
from torchtitan_npu.models.deepseek_v32.context_parallel import AllGatherKV, DSAContextParallel
from torchtitan_npu.planner import Calls
from torchtitan_npu.preflight.job import check_job

LAYERS = 3


class Rank:
    """A mesh of any size seen from any rank, without processes."""

    device_type = "cpu"

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks

    def size(self) -> int:
        return self.ranks

    def get_local_rank(self) -> int:
        return self.rank


def context(rank: int, ranks: int, load_balancer: str | None) -> DSAContextParallel:
    return DSAContextParallel(Rank(rank, ranks), load_balancer)  # type: ignore[arg-type]


def collectives(load_balancer: str | None) -> list[dict[str, int]]:
    """Return the collectives of a forward and a backward pass on one rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = build(model_args())
    parallel = DSAContextParallel(mesh, load_balancer)
    parallel.parallelize(model)
    start_batch(model)
    inputs, _, extra = parallel.prepare(tokens(), tokens(), {})
    with Calls() as forward:
        logits = model(inputs, **extra)
    with Calls() as backward:
        logits.sum().backward()
    return [
        {name: n for name, n in calls.count("_c10d_functional").items() if name != "wait_tensor" and name[0] != "_"}
        for calls in (forward, backward)
    ]


@pytest.mark.parametrize("load_balancer", ["headtail", None])
def test_a_layer_has_one_all_gather_and_one_reduce_scatter(load_balancer: str | None) -> None:
    for forward, backward in run_on_ranks(2, collectives, load_balancer):
        assert forward == {"all_gather_into_tensor": LAYERS}
        assert backward == {"reduce_scatter_tensor": LAYERS}


@pytest.mark.parametrize("load_balancer", ["headtail", None])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_chunks_cover_the_tokens_of_a_rank(load_balancer: str | None, ranks: int) -> None:
    everything: list[int] = []
    for rank in range(ranks):
        own = context(rank, ranks, load_balancer)
        chunks = own.chunks(SEQUENCE // ranks)
        places = [place for chunk in chunks for place in range(chunk.start, chunk.start + chunk.length)]
        assert own.token_indices(SEQUENCE).tolist() == places
        assert [c.first for c in chunks] == [sum(s.length for s in chunks[:n]) for n in range(len(chunks))]
        everything += places
    assert sorted(everything) == list(range(SEQUENCE))


@pytest.mark.parametrize("load_balancer", ["headtail", None])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gathered_keys_are_in_the_order_of_one_rank(load_balancer: str | None, ranks: int) -> None:
    keys = torch.arange(BATCH * SEQUENCE * 2).view(BATCH, SEQUENCE, 2)
    gathered = torch.stack([keys[:, context(r, ranks, load_balancer).token_indices(SEQUENCE)] for r in range(ranks)])
    gather = AllGatherKV(Rank(0, ranks), context(0, ranks, load_balancer).split)  # type: ignore[arg-type]
    assert torch.equal(gather.in_order(gathered), keys)


def test_a_part_of_the_documents() -> None:
    documents = Documents.from_tokens(torch.tensor([[1, 0, 1, 1, 1, 1, 0, 1], [1] * 8]), eos_id=0)
    assert documents.cu_seqlens_k.integers == (2, 7, 8, 16)
    for row, first, last, start, queries, keys in (
        (0, 0, 4, 0, (2, 4), (2, 4)),
        (0, 4, 8, 2, (3, 4), (5, 6)),  # the document of token 4 starts at 2
        (0, 2, 4, 2, (2,), (2,)),
        (1, 4, 8, 0, (4,), (8,)),
    ):
        begins, part = documents.part(row, 8, first, last)
        assert (begins, part.cu_seqlens_q.integers, part.cu_seqlens_k.integers) == (start, queries, keys)
        assert part.cu_seqlens_k.tensor.tolist() == list(keys)


def test_the_documents_of_each_microbatch() -> None:
    documents = Documents.from_tokens(torch.tensor([[1, 0, 1, 1], [1, 1, 1, 0], [0, 0, 1, 1], [1] * 4]), eos_id=0)
    for number, ends in ((1, [documents.cu_seqlens_k.integers]), (2, [(2, 4, 8), (1, 2, 4, 8)])):
        parts = documents.split(number)
        assert [part.cu_seqlens_k.integers for part in parts] == ends
        assert [part.cu_seqlens_q.tensor.tolist() for part in parts] == [list(each) for each in ends]


def test_a_users_own_context_parallel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the example of the docs."""
    page = Path(__file__).parents[2] / "docs" / "explanation/context-parallel.md"
    toml, code = (page.read_text().split(f"```{language}\n")[-1].split("```")[0] for language in ("toml", "python"))
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "context.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)  # for the rank processes too
    job = tomllib.loads(toml)
    options = {f"{section}.{key}": value for section in job for key, value in job[section].items()}
    assert options.pop("parallelism.context_parallel_load_balancer") == ""
    options["parallelism.context_parallel_load_balancer"] = None  # as parsed from a job file
    assert_as_on_one_rank(train_on(2, {"cp": options.pop("parallelism.context_parallel_degree")}, options), one_rank())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:Class", r'npu.context_parallel .* is not "module:Class": No module named'),
        ("torchtitan_npu.config.job_config:NoSuchClass", "has no attribute 'NoSuchClass'"),
        ("torchtitan_npu.config.job_config:JobConfig", "is not a subclass of .*ContextParallel"),
        ("torchtitan_npu.config.job_config", 'is not "module:Class"'),
        ("torchtitan_npu.distributed.context_parallel:ContextParallel", r"npu\.context_parallel .* has no parallelize"),
    ],
)
def test_a_wrong_name_is_an_error(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_job(job(npu__context_parallel=name, parallelism__context_parallel_degree=2), world_size=2)


def test_a_model_without_its_attention_is_an_error() -> None:
    name = f"{DSAContextParallel.__module__}:{DSAContextParallel.__name__}"
    with pytest.raises(UsageError, match=r"npu\.context_parallel: .* has no attention of DeepSeek-V3\.2"):
        check_job(job(npu__context_parallel=name, parallelism__context_parallel_degree=2), world_size=2)


def test_errors_without_preflight() -> None:
    with pytest.raises(ValueError, match="10 tokens cannot be split over 4 context-parallel ranks"):
        context(0, 4, "headtail").token_indices(10)
    with pytest.raises(ValueError, match="DSAContextParallel has no load balancer 'ptrr'"):
        context(0, 2, "ptrr")
    with pytest.raises(ValueError, match="ContextParallel has no load balancer 'headtail'"):
        ContextParallel(Rank(0, 2), "headtail")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Linear has no attention of DeepSeek-V3\.2"):
        context(0, 2, None).parallelize(nn.Linear(1, 1))


def test_the_base_class_accepts_no_masks() -> None:
    base = ContextParallel(Rank(0, 2), None)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="takes no attention masks"):
        base.prepare(tokens(), tokens(), {"attention_masks": object()})
    inputs, labels, extra = base.prepare(tokens(), tokens() + 1, {})
    assert torch.equal(inputs, tokens()[:, : SEQUENCE // 2]) and torch.equal(labels, inputs + 1)
    assert extra["positions"].tolist() == [list(range(SEQUENCE // 2))] * BATCH
