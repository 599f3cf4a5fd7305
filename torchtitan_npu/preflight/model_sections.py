"""Checks of the sections ``[dsa]``, ``[mtp]``, ``[mxfp8]`` and ``[replay]``."""

from __future__ import annotations

from pathlib import Path

from torchtitan_npu.components.dataloader import build_text_dataloader
from torchtitan_npu.components.replay.record_files import header_difference, naming_the_option, read_header
from torchtitan_npu.config.sections import Mxfp8
from torchtitan_npu.distributed.context_parallel import ContextParallel
from torchtitan_npu.errors import UsageError
from torchtitan_npu.preflight.files import check_writable
from torchtitan_npu.preflight.job_context import JobContext, check_adapted, takes_section


def check_dsa(job: JobContext) -> None:
    if not takes_section(job, "dsa"):
        return
    dsa = job.config.dsa
    if dsa.stage == "warmup" and not dsa.indexer_loss:
        raise UsageError('dsa.indexer_loss must be true with dsa.stage = "warmup", which trains only the indexers')
    if dsa.stage == "warmup" and job.dims.pp_enabled:
        _check_every_stage_has_indexers(job)
    context = job.context_parallel_class if dsa.document_mask and job.dims.cp_enabled else None
    if context is not None and context.masks is ContextParallel.masks:
        raise UsageError(
            f"dsa.document_mask must be false: npu.context_parallel {context.__name__} takes no attention masks"
        )
    if dsa.document_mask and job.tokenizer is not None and job.tokenizer.eos_id is None:
        raise UsageError("dsa.document_mask needs a tokenizer with an end-of-sequence token (model.hf_assets_path)")


def _check_every_stage_has_indexers(job: JobContext) -> None:
    """Raise if a pipeline stage has no layer with an indexer, and so nothing to train."""
    stages, key = job.pipeline_stages, "parallelism.pipeline_parallel"
    trained = {f"layers.{number}" for number in range(job.n_layers) if job.flavor_args.has_indexer(number)}
    remedy = f"set {key}_first_stage_less_layers = 0 and {key}_last_stage_less_layers = 0, or use fewer stages"
    if job.config.parallelism.module_fqns_per_model_part is not None:
        remedy = "list a layer for it in parallelism.module_fqns_per_model_part"
    for number, modules in enumerate(stages, 1):
        if not trained.intersection(modules):
            raise UsageError(
                f'dsa.stage = "warmup" trains only the indexers, and pipeline stage {number} of {len(stages)} has '
                f"no layer with one ({', '.join(modules)}): {remedy}"
            )


def check_mtp(job: JobContext) -> None:
    if not takes_section(job, "mtp"):
        return
    mtp, parallelism = job.config.mtp, job.config.parallelism
    if mtp.layers == 0:
        return
    for key in ("pipeline_parallel_degree", "tensor_parallel_degree", "context_parallel_degree"):
        if (degree := getattr(parallelism, key)) > 1:
            raise UsageError(
                f"mtp.layers is {mtp.layers}; it must be 0 with parallelism.{key} {degree}: multi-token prediction "
                "supports FSDP, DDP and expert parallelism only"
            )
    if mtp.layers >= job.config.training.seq_len:
        raise UsageError(
            f"mtp.layers is {mtp.layers}; it must be less than training.seq_len, {job.config.training.seq_len}: the "
            "deepest layer would have no token to predict"
        )


def check_mxfp8(job: JobContext) -> None:
    options = job.config.mxfp8
    if "npu_mxfp8" not in job.config.model.converters:
        if options != Mxfp8():
            raise UsageError("section [mxfp8] is for the converter npu_mxfp8, which model.converters does not list")
    elif not (options.linear or options.experts):
        raise UsageError("mxfp8.linear or mxfp8.experts must be true with the converter npu_mxfp8")


def check_replay(job: JobContext) -> None:
    options, config = job.config.replay, job.config
    if not options.is_used:
        return
    key = "replay.record" if options.record else "replay.replay"
    if options.record and options.replay:
        raise UsageError("replay.record and replay.replay are both set; set one of them")
    check_adapted(job, key)
    if job.train_spec.build_dataloader_fn is not build_text_dataloader:
        raise UsageError(
            f"{key} needs a model of text: a record finds a sequence by its tokens, and those of model.name "
            f"{config.model.name!r} are not all of its input"
        )
    if config.debug.moe_force_load_balance:
        raise UsageError(f"{key} must be empty with debug.moe_force_load_balance, which assigns the experts in turn")
    if config.parallelism.expert_parallel_comm_backend == "deepep":
        raise UsageError(f'{key} must be empty with parallelism.expert_parallel_comm_backend = "deepep"')


def check_replay_layers(job: JobContext) -> None:
    """Raise if the model has no routing decisions, or they cannot be recorded."""
    if job.config.replay.is_used and not job.replay_header["choices"]:
        model = job.config.model
        raise UsageError(
            f"[replay] does not apply to model.flavor {model.flavor!r} of {model.name}: it has neither routed experts "
            "nor sparse attention; remove the section"
        )


def check_replay_files(job: JobContext) -> None:
    """Raise if the record to replay is not one of this job's model, or a new one cannot be written."""
    options = job.config.replay
    if options.record:
        check_writable("replay.record", Path(options.record))
    if options.replay:
        with naming_the_option():
            difference = header_difference(read_header(Path(options.replay)), job.replay_header)
        if difference:
            raise UsageError(f"replay.replay {options.replay!r}: {difference}")
