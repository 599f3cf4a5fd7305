"""A job that cannot run fails before anything starts, with one line that names the key."""

from __future__ import annotations

import math
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion
from torchtitan.protocols.train_spec import get_train_spec

import torchtitan_npu
from torchtitan_npu import platform
from torchtitan_npu.components.corpus import ASSETS
from torchtitan_npu.components.replay.record_files import write_header
from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.distributed.context_parallel import ContextParallel
from torchtitan_npu.errors import UsageError
from torchtitan_npu.preflight import compile as compile_checks
from torchtitan_npu.preflight.job import JobContext, check_job, check_start
from torchtitan_npu.preflight.titan_sections import check_checkpoint

torchtitan_npu.register()


class WithoutMasks(ContextParallel):
    def parallelize(self, model: Any) -> None:
        """Change nothing: only the class is inspected."""


SHORT = {
    "pp": "parallelism__pipeline_parallel_degree",
    "tp": "parallelism__tensor_parallel_degree",
    "cp": "parallelism__context_parallel_degree",
    "ep": "parallelism__expert_parallel_degree",
    "etp": "parallelism__expert_tensor_parallel_degree",
    "shard": "parallelism__data_parallel_shard_degree",
    "replicate": "parallelism__data_parallel_replicate_degree",
    "schedule": "parallelism__pipeline_parallel_schedule",
    "layers_per_stage": "parallelism__pipeline_parallel_layers_per_stage",
    "microbatch": "parallelism__pipeline_parallel_microbatch_size",
    "balancer": "parallelism__context_parallel_load_balancer",
    "batch": "training__local_batch_size",
    "model": "model__name",
    "flavor": "model__flavor",
    "converters": "model__converters",
    "ac": "activation_checkpoint__mode",
}
DSA = {"model": "deepseek_v32"}
RECORD = DSA | {"replay__record": "a"}


def job(**options: Any) -> JobConfig:
    """Return a valid job with ``section__key`` options, or those named in ``SHORT``, changed."""
    config = JobConfig()
    config.training.dataset = "tiny_corpus"
    config.training.seq_len = config.validation.seq_len = 64
    for key, value in options.items():
        section, _, name = SHORT.get(key, key).partition("__")
        assert hasattr(getattr(config, section), name)
        setattr(getattr(config, section), name, value)
    return config


@pytest.mark.parametrize("model", ["llama3", "llama4", "qwen3", "deepseek_v3"])
def test_a_valid_job_passes(model: str) -> None:
    options = {"converters": ["npu_rms_norm"], "training__dataset": "TINY_CORPUS"}
    check_job(job(model=model, tp=2, **options), world_size=4)


@pytest.mark.parametrize(
    ("schedule", "batch", "layers_per_stage"),
    [
        ("1F1B", 2, None),
        ("1F1B", 2, 4),
        ("GPipe", 1, None),
        ("Interleaved1F1B", 4, 2),
        ("InterleavedZeroBubble", 6, 1),
        ("ZBVZeroBubble", 1, 2),
    ],
)
def test_a_valid_pipeline_passes(schedule: str, batch: int, layers_per_stage: int | None) -> None:
    pipeline = {"pp": 2, "schedule": schedule, "layers_per_stage": layers_per_stage}
    config = job(**pipeline, batch=batch, ac="none")
    check_job(config, world_size=2)


def test_converters_and_experiments_of_torchtitan_are_known() -> None:
    config = job(converters=["quantize.linear.float8"])
    with pytest.raises(
        UsageError, match=r"model\.converters: quantize\.linear\.float8: Failed to swap to Float8Linear"
    ):
        check_job(config, world_size=1)
    config.quantize.linear.float8.emulate = True
    check_job(config, world_size=1)
    with pytest.raises(UsageError, match=r"model\.flavor 'nonsense' is not known"):
        check_job(job(model="simple_fsdp.llama3", flavor="nonsense"), world_size=1)


EP_OVER_TP = {"parallelism__tensor_parallel_degree": 2, "parallelism__expert_parallel_degree": 2}


@pytest.mark.parametrize(
    ("replaced", "options", "message"),
    [
        (
            "parallelize_fn",
            {"compile__enable": True, "npu__bypass_codegen": "inductor"},
            r"npu\.bypass_codegen needs the",
        ),
        (
            "parallelize_fn",
            {"parallelism__expert_parallel_degree": 2, "model__converters": ["npu_permute"]},
            r"npu_permute with expert parallel needs this package's dispatch: register the TrainSpec",
        ),
        ("build_optimizers_fn", EP_OVER_TP, r"npu\.moe_sequence_parallel must be false: the train spec's build_optim"),
    ],
    ids=["compile", "dispatch", "balance"],
)
def test_a_replaced_function_of_an_adapted_spec_is_named(
    replaced: str, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = job(model__name="deepseek_v3", **options)
    check_job(config, world_size=2)
    monkeypatch.setattr(get_train_spec("deepseek_v3"), replaced, lambda *args: None)
    with pytest.raises(UsageError, match=message):
        check_job(config, world_size=2)
    config.npu.moe_sequence_parallel = replaced != "build_optimizers_fn"
    if not config.npu.moe_sequence_parallel:
        check_job(config, world_size=2)


@pytest.mark.parametrize(
    ("options", "world_size", "message"),
    [
        ({"training__max_nonfinite_steps": 2}, 1, "training.max_nonfinite_steps is 2; without"),
        ({"training__skip_nonfinite_steps": True}, 1, "needs training.max_nonfinite_steps of at least 2, not 1"),
        ({"optimizer__early_step_in_backward": True}, 1, "set training.max_nonfinite_steps = 0"),
        (
            {"model": "simple_fsdp.llama3", "npu__loss_chunk_tokens": 64},
            1,
            "needs the TrainSpec of model.name 'simple_f",
        ),
        ({"model": "lama3"}, 1, "model.name 'lama3' is not known; did you mean 'llama3'?"),
        ({"flavor": "debugmodle"}, 1, "model.flavor 'debugmodle' is not known; did you mean 'debugmodel'?"),
        ({"training__dataset": "tiny_corpsu"}, 1, "did you mean 'tiny_corpus'?"),
        ({"optimizer__name": "Adamw"}, 1, "did you mean 'AdamW'?"),
        ({"converters": ["npu_rmsnorm"]}, 1, "model.converters: 'npu_rmsnorm' is not known; did you mean"),
        ({"converters": ["npu_rms_norm"] * 2}, 1, "model.converters lists 'npu_rms_norm' 2 times"),
        (
            {"tp": 2, "pp": 2},
            3,
            "3 ranks (torchrun's --nproc_per_node × --nnodes) do not fit the layout: "
            "tensor_parallel_degree 2 × pipeline_parallel_degree 2 takes a multiple of 4",
        ),
        ({"shard": 2}, 1, "data_parallel_shard_degree 2 takes 2"),
        ({"ep": 3, "model": "deepseek_v3"}, 4, "tensor_parallel_degree 1 does not divide the 4 ranks"),
        ({"ep": 4, "replicate": 2, "model": "deepseek_v3"}, 4, "does not divide the 2 ranks of a pipeline stage"),
        ({"ep": 2, "etp": 2, "model": "deepseek_v3"}, 4, "expert_tensor_parallel_degree is 2; it must be 1"),
        ({"etp": 1000000000}, 1, "is 1000000000; it must be 1 or tensor_parallel_degree, 1"),
        ({"ep": 2}, 2, "model.flavor 'debugmodel' of llama3 has no experts"),
        ({"ep": 3, "model": "deepseek_v3"}, 3, "parallelism.expert_parallel_degree 3 does not divide the 8 experts"),
        (
            {"ep": 2, "model": "deepseek_v3"},
            10,
            "parallelism.expert_parallel_degree 2: 5 ranks have the same 4 experts of model.flavor 'debugmodel', so "
            "FSDP splits the rows of their weights, and 5 does not divide 256: choose another "
            "parallelism.data_parallel_shard_degree",
        ),
        ({"ep": 2, "etp": 2, "tp": 2, "model": "deepseek_v3"}, 20, "and 5 does not divide 128 and 256"),
        ({"training__gc_debug": True}, 1, "training.gc_debug must be false on a CPU"),
        ({"pp": 2, "model": "qwen3"}, 2, "must be 1: model.flavor 'debugmodel' ties its output"),
        ({"training__dataset_path": "no/such"}, 1, "training.dataset_path no/such: no such file or folder"),
        ({"validation__enable": True, "validation__dataset": "tiny"}, 1, "'tiny' is not known; did you"),
        ({"tp": 3, "training__seq_len": 60}, 3, "tensor_parallel_degree 3 does not divide"),
        ({"pp": 8}, 8, "parallelism.pipeline_parallel_degree 8 exceeds the 6 layers"),
        ({"pp": 2, "schedule": "1F1BB"}, 2, "parallelism.pipeline_parallel_schedule '1F1BB'"),
        ({"pp": 2, "schedule": "DualPipeV"}, 2, "needs an accelerator"),
        ({"training__global_batch_size": 6, "batch": 4}, 1, "training.global_batch_size 6"),
        ({"training__seq_len": 65}, 1, "training.seq_len 65 is not a multiple of 2"),
        ({"validation__enable": True, "validation__seq_len": 62, "cp": 2}, 2, "62 is not a multiple of 4"),
        (
            {"validation__enable": True, "validation__seq_len": 66, "training__seq_len": 64},
            1,
            "validation.seq_len is 66; it must be at most training.seq_len, 64",
        ),
        ({"cp": 2, "balancer": "ptrr"}, 2, "balancer 'ptrr' is not known (known: \"\", headtail)"),
        (
            {"model": "deepseek_v32", "cp": 2, "balancer": "ptrr"},
            2,
            "'ptrr' is not supported by DSAContextParallel: use 'headtail' or ''",
        ),
        (
            {
                "model": "deepseek_v32",
                "npu__context_parallel": "tests.preflight.test_job_checks:WithoutMasks",
                "dsa__document_mask": True,
                "cp": 2,
                "balancer": None,
            },
            2,
            "dsa.document_mask must be false: npu.context_parallel WithoutMasks takes no attention masks",
        ),
        (
            {"pp": 4, "microbatch": 2, "batch": 6},
            4,
            "training.local_batch_size 6 / parallelism.pipeline_parallel_microbatch_size 2 = 3 microbatches are too "
            "few for 1F1B: it needs one for each of the 4 stages",
        ),
        ({"pp": 2, "schedule": "Interleaved1F1B", "batch": 5}, 2, "= 5 microbatches do not fit Interleaved1F1B"),
        (
            {
                "model": "deepseek_v32",
                "dsa__stage": "warmup",
                "pp": 2,
                "schedule": "Interleaved1F1B",
                "parallelism__pipeline_parallel_last_stage_less_layers": 2,
                "batch": 4,
            },
            2,
            'dsa.stage = "warmup" trains only the indexers, and pipeline stage 4 of 4 has no layer with one (norm, '
            "output): set parallelism.pipeline_parallel_first_stage_less_layers = 0 and",
        ),
        (
            {"pp": 2, "layers_per_stage": 2},
            2,
            "parallelism.pipeline_parallel_layers_per_stage 2 splits 6 layers, the embedding and the output into 4 "
            "stages; 1F1B needs one on each of 2 pipeline ranks",
        ),
        (
            {"pp": 2, "schedule": "ZBVZeroBubble", "layers_per_stage": 1, "ac": "none"},
            2,
            "parallelism.pipeline_parallel_layers_per_stage 1 splits 6 layers, the embedding and the output into 8 "
            "stages; ZBVZeroBubble needs two on each of 2 pipeline ranks",
        ),
        (
            {"pp": 2, "schedule": "ZBVZeroBubble", "ac": "full"},
            2,
            'activation_checkpoint.mode must be "none" with parallelism.pipeline_parallel_schedule ZBVZeroBubble',
        ),
        (
            {
                "pp": 2,
                "schedule": "ZBVZeroBubble",
                "shard": 2,
                "parallelism__fsdp_reshard_after_forward": "always",
                "ac": "none",
            },
            4,
            'parallelism.fsdp_reshard_after_forward must not be "always" with '
            "parallelism.pipeline_parallel_schedule ZBVZeroBubble, which computes",
        ),
        ({"pp": 2, "microbatch": 3, "batch": 4}, 2, "parallelism.pipeline_parallel_microbatch_size 3"),
        (
            {"pp": 2, "batch": 4, "validation__enable": True, "validation__local_batch_size": 6},
            2,
            "validation.local_batch_size 6 is not a multiple of training.local_batch_size 4 / ",
        ),
        ({"checkpoint__create_seed_checkpoint": True}, 2, "checkpoint.create_seed_checkpoint needs one rank"),
        ({"checkpoint__create_seed_checkpoint": True}, 1, "needs checkpoint.enable"),
        ({"checkpoint__initial_load_path": "w"}, 1, "checkpoint.initial_load_path needs checkpoint.enable = true"),
        ({"checkpoint__keep_latest_k": 1}, 1, "checkpoint.keep_latest_k is 1; it must be at least 2, or 0"),
        ({"checkpoint__exclude_from_loading": ["data"]}, 1, "'data' is not known; did you mean 'dataloader'?"),
        (
            {"checkpoint__last_save_in_hf": True, "checkpoint__last_save_model_only": False},
            1,
            "checkpoint.last_save_in_hf saves only the model",
        ),
        ({"job__save_config_file": ""}, 1, "must name a file inside job.dump_folder"),
        ({"profiling__enable_profiling": True}, 1, "profiling.enable_profiling needs an accelerator"),
        ({"profiling__npu_level": "level1"}, 1, "profiling.npu_level is for torch_npu's profiler"),
        ({"comm__hccl_buffers": ["ep=64"]}, 1, "comm.hccl_buffers is for HCCL; this job runs on cpu"),
        ({"profiling__enable_memory_snapshot": True}, 1, "profiling.enable_memory_snapshot needs an accelerator"),
        ({"training__enable_cpu_offload": True}, 1, "training.enable_cpu_offload needs an accelerator"),
        ({"checkpoint__async_mode": "async_with_pinned_mem"}, 1, '"async_with_pinned_mem" needs a GPU'),
        (
            {"model": "deepseek_v3", "converters": ["npu_gmm", "quantize.grouped_mm.float8"]},
            1,
            "npu_gmm and quantize.grouped_mm.float8 cannot be combined",
        ),
        (
            {
                "model": "deepseek_v3",
                "converters": ["npu_permute"],
                "parallelism__expert_parallel_comm_backend": "deepep",
            },
            1,
            'npu_permute and parallelism.expert_parallel_comm_backend = "deepep" cannot be combined',
        ),
        ({"optimizer__lr": math.nan}, 1, "optimizer.lr is nan; it must be at least 0 and at most 100"),
        ({"optimizer__beta1": 1.0}, 1, "optimizer.beta1 is 1.0; it must be at least 0 and below 1"),
        ({"training__steps": 1 << 20000}, 1, "training.steps is an integer of 20001 bits; it must be at most 2147"),
        ({"job__description": "x\ny"}, 1, "job.description is 'x\\ny'; it must be one line of text"),
        ({"fault_tolerance__enable": True}, 1, "fault_tolerance.enable must be false"),
        ({"memory_estimation__enable": True}, 1, "memory_estimation.enable must be false; torchtitan-npu plan"),
        ({"lr_scheduler__total_steps": 5, "training__steps": 9}, 1, "it must be at least training.steps, 9"),
        ({"lr_scheduler__total_steps": 5, "lr_scheduler__decay_type": "cosine"}, 1, "would rise again"),
        ({"ac": "memory_budget"}, 1, 'mode = "memory_budget" needs compile.enable = true'),
        (
            {
                "activation_checkpoint__selective_ac_option": "op",
                "activation_checkpoint__per_op_sac_force_recompute_mm_shapes_by_fqns": ["attention"],
            },
            1,
            "'attention' matches layers.0.attention, a Attention; it must match nn.Linear only",
        ),
        ({"compile__enable": True, "compile__backend": "induktor"}, 1, "did you mean 'inductor'?"),
        ({"flavor": "debugmodel_flex_attn"}, 1, "add npu_attention to model.converters"),
        ({"flavor": "debugmodel_varlen_attn"}, 1, "varlen attention"),
        (
            {"model": "deepseek_v3", "flavor": "debugmodel_flex_attn", "converters": ["npu_attention"], "cp": 2},
            2,
            "model.flavor 'debugmodel_flex_attn' of deepseek_v3: Context Parallel only supports SDPA attention",
        ),
        (DSA | {"mtp__layers": 64}, 1, "mtp.layers is 64; it must be less than training.seq_len, 64"),
        (
            DSA | {"mtp__layers": 1, "tp": 2},
            2,
            "mtp.layers is 1; it must be 0 with parallelism.tensor_parallel_degree 2",
        ),
        (DSA | {"mtp__layers": 1, "cp": 2}, 2, "it must be 0 with parallelism.context_parallel_degree 2"),
        (DSA | {"mtp__layers": 1, "pp": 2}, 2, "it must be 0 with parallelism.pipeline_parallel_degree 2"),
        (DSA | {"dsa__stage": "warmup", "dsa__indexer_loss": False}, 1, "dsa.indexer_loss must be true with dsa.stage"),
        (DSA | {"replay__record": "a", "replay__replay": "b"}, 1, "replay.record and replay.replay are both set"),
        (RECORD | {"model": "llama3"}, 1, "[replay] does not apply to model.flavor 'debugmodel' of llama3"),
        (RECORD | {"model": "qwen3_vl", "flavor": "debugmodel_moe"}, 1, "replay.record needs a model of text"),
        (RECORD | {"debug__moe_force_load_balance": True}, 1, "must be empty with debug.moe_force_load_balance"),
        (
            RECORD | {"parallelism__expert_parallel_comm_backend": "deepep"},
            1,
            "replay.record must be empty with parallel",
        ),
        ({"dsa__stage": "warmup"}, 1, "[dsa] does not apply to model.name 'llama3'; remove the section"),
        ({"mtp__layers": 1}, 1, "[mtp] does not apply to model.name 'llama3'; remove the section"),
        ({"cp": 2, "npu__context_parallel": "nowhere:Class"}, 2, "npu.context_parallel 'nowhere:Class' is not"),
    ],
)
def test_an_invalid_job_fails(options: dict[str, Any], world_size: int, message: str) -> None:
    with pytest.raises(UsageError) as error:
        check_job(job(**options), world_size)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_the_record_to_replay_is_checked_before_the_start(tmp_path: Path) -> None:
    def check(**options: Any) -> None:
        check_start(check_job(job(**{"model": "deepseek_v32", **options}), world_size=1))

    with pytest.raises(UsageError, match=r"replay\.replay: .* has no record: there is no header\.json"):
        check(replay__replay=str(tmp_path))
    recorded = check_job(job(model="deepseek_v32", replay__record=str(tmp_path)), world_size=1)
    assert recorded.replay_header["choices"]["keys"] == {"layers": list(range(6)), "top_k": 32, "out_of": 64}
    write_header(tmp_path, recorded.replay_header)
    check(replay__replay=str(tmp_path))
    with pytest.raises(UsageError, match=r"training\.seq_len is 64 in the record and 128 in the job"):
        check(replay__replay=str(tmp_path), training__seq_len=128)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"replay\.record .* is a file, not a folder"):
        check(replay__record=str(tmp_path / "file"))


def test_weight_gradients_in_a_pass_of_their_own_need_torch_2_13(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"pp": 2, "ac": "none"}
    zero_bubble = job(**options, schedule="ZBVZeroBubble")
    check_job(zero_bubble, 2)
    monkeypatch.setattr(torch, "__version__", "2.12.1")
    check_job(job(**options, schedule="Interleaved1F1B", batch=8), 2)
    with pytest.raises(
        UsageError, match=r"pipeline_parallel_schedule ZBVZeroBubble, .* needs torch 2\.13: torch 2\.12"
    ):
        check_job(zero_bubble, 2)


def test_documents_need_a_tokenizer_that_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    config, tokenizer = job(model="deepseek_v32", dsa__document_mask=True), SimpleNamespace(eos_id=0)
    monkeypatch.setattr(get_train_spec("deepseek_v32"), "build_tokenizer_fn", lambda config: tokenizer)
    check_job(config, world_size=1)
    tokenizer.eos_id = None
    with pytest.raises(UsageError, match=r"dsa\.document_mask needs a tokenizer with an end-of-sequence token"):
        check_job(config, world_size=1)


def test_matmul_sharding_with_a_torch_that_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"npu__matmul_sharding": True, "tp": 2}
    check_job(job(**options), world_size=2)
    monkeypatch.setattr(compile_checks, "has_single_dim_strategy", lambda op: True)
    with pytest.raises(UsageError, match=r"npu\.matmul_sharding must be false: .* for aten\.matmul\.default"):
        check_job(job(**options), world_size=2)


@pytest.mark.parametrize("section", ["training", "validation"])
def test_more_than_one_data_worker_is_an_error(section: str) -> None:
    config = job(validation__enable=True, validation__dataset="tiny_corpus_validation")
    getattr(config, section).dataloader.num_workers = 2
    with pytest.raises(UsageError, match=rf"{section}\.dataloader\.num_workers is 2; it must be 0 or 1"):
        check_job(config, world_size=1)
    config.npu.layout_independent_data = False
    check_job(config, world_size=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"profiling__npu_ranks": [2]}, "profiling.npu_ranks: there is no rank 2; the job has 2"),
        ({"profiling__profile_freq": 3}, "profiling.profile_freq is 3; it must be at least profiler_warmup"),
        ({"profiling__enable_profiling": False, "profiling__npu_memory": True}, "profiling.npu_memory needs"),
        ({"comm__hccl_buffers": ["ep"]}, "comm.hccl_buffers: 'ep' is not DIMENSION=MIB"),
        ({"comm__hccl_buffers": ["pe=1"]}, "comm.hccl_buffers: dimension 'pe' is not known"),
        ({"comm__hccl_buffers": ["ep=0"]}, "comm.hccl_buffers: ep is 0; it must be at least 1"),
        ({"comm__hccl_buffers": ["ep=1", "ep=2"]}, "comm.hccl_buffers lists ep twice"),
    ],
    ids=str,
)
def test_keys_for_npus(options: dict[str, Any], message: str) -> None:
    valid = {"profiling__enable_profiling": True, "comm__hccl_buffers": ["ep=64", "tp=32"]}
    with platform.job_for("npu"):
        check_job(job(**valid), world_size=2)
        with pytest.raises(UsageError, match=re.escape(message)):
            check_job(job(**valid | options), world_size=2)


def test_older_torch_sends_no_indices_between_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the debug model's six layers, 0 and 4 have an indexer. Two stages have three each."""
    fields: dict[str, Any] = {"model": "glm_moe_dsa", "pp": 2}
    fields |= {"schedule": "1F1B", "batch": 2}
    check_job(job(**fields), world_size=2)
    monkeypatch.setattr(torch, "__version__", "2.12.1")
    with pytest.raises(UsageError, match=r"pipeline stage 2 starts with layers\.3, .* torch 2\.12\.1 cannot send them"):
        check_job(job(**fields), world_size=2)
    parts = [["tok_embeddings", *(f"layers.{n}" for n in range(4))], ["layers.4", "layers.5", "norm", "output"]]
    check_job(job(**fields, parallelism__module_fqns_per_model_part=parts), world_size=2)


@pytest.mark.parametrize(("version", "is_refused"), [("2.9.1", True), ("2.12.0", True), ("2.13.0+cu130", False)])
def test_saves_from_pinned_memory_need_a_torch_that_keeps_the_stager(
    version: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = JobConfig()
    config.checkpoint.enable, config.checkpoint.async_mode = True, "async_with_pinned_mem"
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    refused = pytest.raises(
        UsageError, match=f"needs torch 2.13: with torch {re.escape(version)} the second save fails"
    )
    with platform.job_for("cuda"), refused if is_refused else nullcontext():
        check_checkpoint(JobContext(config, 1))


TEXTS = str(ASSETS / "corpus/corpus.jsonl")
TEXT = {"training__dataset": "text", "training__dataset_path": TEXTS}
SEVERAL = {"training__dataset": "text", "data__paths": [TEXTS, TEXTS]}
CHAT = {"training__dataset": "chat", "training__dataset_path": str(ASSETS / "chat/chat.jsonl")}
VALIDATION = {"validation__enable": True, "validation__dataset": "chat"}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"data__seed": 1}, r'\[data\] is for training.dataset "text" or "chat"'),
        (
            {"training__dataset": "text"},
            "training.dataset 'text' needs training.dataset_path, or several in data.paths",
        ),
        ({**TEXT, "data__paths": [TEXTS]}, "data.paths and training.dataset_path are both set"),
        ({**SEVERAL, "data__weights": [1.0]}, "data.weights has 1 numbers for the 2 entries of data.paths"),
        ({**TEXT, "data__weights": [1.0]}, "data.weights has 1 numbers for the 0 entries of data.paths"),
        ({**TEXT, "data__too_long": "skip"}, 'data.too_long is for dataset "chat", which the job does not read'),
        ({**TEXT, "data__chat_template": "x"}, 'data.chat_template is for dataset "chat"'),
        ({**CHAT, "data__txt_documents": "line"}, 'data.txt_documents is for dataset "text"'),
        ({**TEXT, "npu__layout_independent_data": False}, "npu.layout_independent_data must be true"),
        ({**TEXT, **VALIDATION}, "validation.dataset 'chat' needs validation.dataset_path"),
        ({**VALIDATION, "validation__dataset_path": TEXTS, "data__paths": [TEXTS]}, "data.paths is for training.dat"),
    ],
)
def test_a_wrong_combination_in_the_data_section(options: dict[str, Any], error: str) -> None:
    with pytest.raises(UsageError, match=error):
        check_job(job(**options), 1)


def test_the_files_are_read_at_the_start_only(tmp_path: Path) -> None:
    assets = {"model__hf_assets_path": str(ASSETS / "tokenizer")}
    missing = check_job(job(**assets, training__dataset="text", training__dataset_path="nowhere"), 1)
    with pytest.raises(UsageError, match=r"training\.dataset_path nowhere: no such file or folder"):
        check_start(missing)
    without_template = check_job(job(**assets, **CHAT), 1)
    with pytest.raises(UsageError, match=r"the tokenizer has no chat template.*set data\.chat_template"):
        check_start(without_template)
    several = job(**assets, **SEVERAL, data__weights=[1.0, 2.0])
    several.training.dataloader.num_workers = 3
    check_start(check_job(several, 1))
    template = str(ASSETS / "chat/template.jinja")
    check_start(check_job(job(**assets, **CHAT, data__chat_template=template), 1))
