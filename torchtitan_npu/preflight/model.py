"""Checks of TorchTitan's section ``[model]``: name, flavor and converters."""

from __future__ import annotations

import os
from collections import Counter

from torchtitan_npu import platform
from torchtitan_npu.config.allowed import check_known
from torchtitan_npu.errors import UsageError
from torchtitan_npu.preflight.job_context import JobContext
from torchtitan_npu.titan_internals.converter_registry import build_converter, is_of_torchtitan, known_converters
from torchtitan_npu.train_specs.registry import known_models

TOKENIZER_ERRORS = (OSError, ValueError, TypeError, LookupError, AttributeError)
"""What TorchTitan's tokenizer raises for files that are damaged or not what their names say. The library tokenizers,
written in Rust, raises ``Exception`` itself, no subclass, for a damaged ``tokenizer.json``."""


def check_model(job: JobContext) -> None:
    model = job.config.model
    check_known("model.name", model.name, known_models(model.name))
    check_known("model.flavor", model.flavor, job.train_spec.model_args)
    for name, times in Counter(model.converters).items():
        check_known("model.converters:", name, known_converters())
        if times > 1:
            raise UsageError(f"model.converters lists {name!r} {times} times; list it once")


def check_attention(job: JobContext) -> None:
    """Raise for flex and varlen attention outside CUDA, the only backend with kernels for them, without a converter."""
    if platform.job_backend() == "cuda" or job.attention not in ("flex", "varlen"):
        return
    if "npu_attention" in job.config.model.converters:
        return
    flavors = job.train_spec.model_args.items()
    trainable = [name for name, args in flavors if getattr(args, "attn_type", "sdpa") == "sdpa"]
    raise UsageError(
        f"model.flavor {job.config.model.flavor!r} has {job.attention} attention, which trains on CUDA only; "
        f"add npu_attention to model.converters, or choose a flavor that trains here: {', '.join(trainable) or 'none'}"
    )


def check_model_options(job: JobContext) -> None:
    """Let the model check the job."""
    if hasattr(job.flavor_args, "check_job"):
        job.flavor_args.check_job(job.config)


def check_tokenizer(job: JobContext) -> None:
    """Raise if the tokenizer cannot be loaded, or has tokens for which the model has no embedding."""
    path = job.config.model.hf_assets_path
    if not os.path.exists(path):  # the parser has refused it; a configuration made in Python may have no tokenizer
        return
    try:
        tokenizer = job.tokenizer
    except Exception as error:
        if type(error) is not Exception and not isinstance(error, TOKENIZER_ERRORS):
            raise
        reason = str(error).partition("\n")[0]
        raise UsageError(f"model.hf_assets_path {path}: the tokenizer cannot be loaded: {reason}") from error
    size = getattr(job.model_args, "vocab_size", None)
    if tokenizer is not None and size is not None and (tokens := tokenizer.get_vocab_size()) > size:
        raise UsageError(
            f"model.hf_assets_path {path}: the tokenizer has {tokens} tokens, and vocab_size of model.flavor "
            f"{job.config.model.flavor!r} is {size}"
        )


def check_converters(job: JobContext) -> None:
    """Let each converter check the job. TorchTitan's check it when they are built; only the job builds a user's."""
    for converter in job.converters:
        converter.check_job()
    if platform.job_backend() == platform.backend():  # they ask this machine for its devices
        for name in filter(is_of_torchtitan, job.config.model.converters):
            try:
                build_converter(name, job.config, job.dims)
            except (AssertionError, ImportError, ValueError) as error:
                raise UsageError(f"model.converters: {name}: {error}") from error


def check_converter_targets(job: JobContext) -> None:
    """Let each converter check its targets in the model against the limits of the NPU's kernels."""
    for converter in job.converters:
        converter.check_limits(converter.found_targets(job.model))
