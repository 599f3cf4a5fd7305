"""Checks of the section ``[dsa]``."""

from __future__ import annotations

from torchtitan_npu.errors import UsageError
from torchtitan_npu.preflight.check_helpers import takes_section
from torchtitan_npu.preflight.job_context import JobContext


def check_dsa(job: JobContext) -> None:
    if not takes_section(job, "dsa"):
        return
    dsa = job.config.dsa
    if dsa.stage == "warmup" and not dsa.indexer_loss:
        raise UsageError('dsa.indexer_loss must be true with dsa.stage = "warmup", which trains only the indexers')
    if dsa.stage == "warmup" and job.dims.pp_enabled:
        _check_every_stage_has_indexers(job)
    if dsa.document_mask and (context := job.context_parallel_without_masks):
        raise UsageError(
            f"dsa.document_mask must be false: npu.context_parallel {context.__name__} takes no attention masks"
        )
    if dsa.document_mask and job.tokenizer is not None and job.tokenizer.eos_id is None:
        raise UsageError("dsa.document_mask needs a tokenizer with an end-of-sequence token (model.hf_assets_path)")


def _check_every_stage_has_indexers(job: JobContext) -> None:
    """Raise if a pipeline stage has no layer with an indexer, and so nothing to train."""
    stages = job.pipeline_stages
    trained = {f"layers.{number}" for number in range(job.n_layers) if job.flavor_args.has_indexer(number)}
    if job.config.parallelism.module_fqns_per_model_part is not None:
        remedy = "list a layer for it in parallelism.module_fqns_per_model_part"
    else:
        remedy = (
            "set parallelism.pipeline_parallel_first_stage_less_layers = 0 and "
            "parallelism.pipeline_parallel_last_stage_less_layers = 0, or use fewer stages"
        )
    for number, modules in enumerate(stages, 1):
        if not trained.intersection(modules):
            raise UsageError(
                f'dsa.stage = "warmup" trains only the indexers, and pipeline stage {number} of {len(stages)} has '
                f"no layer with one ({', '.join(modules)}): {remedy}"
            )
