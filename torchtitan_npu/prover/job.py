"""Turn a draw into the TOML file of a job."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli
import tomli_w
from torchtitan.models.moe.moe import MoE
from torchtitan.protocols.train_spec import get_train_spec

from torchtitan_npu.compile.passes import PASSES
from torchtitan_npu.config.allowed import check_known
from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.config.parser import load_job
from torchtitan_npu.config.shipped_files import shipped
from torchtitan_npu.converters import exact_converters
from torchtitan_npu.errors import UsageError
from torchtitan_npu.preflight.job_context import JobContext
from torchtitan_npu.preflight.model import check_model
from torchtitan_npu.prover.draws import DEGREES, Draw, DrawnModel

STEPS = 3
LARGEST = 50_000_000
"""Parameters of the largest model that is trained. Each CPU rank has it in memory, and trains three steps."""
TINY_FLAVORS = "torchtitan_npu.prover.tiny_models"

FIXED: dict[str, Any] = {
    "training.steps": STEPS,
    "training.dtype": "float32",
    "training.mixed_precision_param": "float32",
    "training.max_nonfinite_steps": 0,  # a loss that is not finite is part of the comparison
    "training.skip_nonfinite_steps": False,
    "training.max_norm": 1e9,  # no clipping: it would scale gradients by a rounded norm
    # With a large eps, Adam's step is proportional to the gradient. With a small one it depends only on the signs of
    # the first gradients, so that rounding decides the direction where they are tiny.
    "optimizer.eps": 1.0,
    "optimizer.lr": 0.1,
    "lr_scheduler.warmup_steps": 0,
    "metrics.log_freq": 1,
    "comm.trace_buf_size": 0,
}
"""Settings of every run."""
TEXT = {"model.hf_assets_path": "torchtitan_npu/assets/tokenizer", "training.dataset": "tiny_corpus"}
DATASET_OF_MODEL = {"qwen3_vl": "shapes"}
SHORTEST = {"shapes": 48}
"""The tokens of the longest picture with its caption, with the shipped tokenizer."""
DRAWN_SECTIONS = ("parallelism", "compile", "activation_checkpoint")
UNUSED_SECTIONS = ("checkpoint", "data", "validation", "profiling", "metrics")
"""What a run of three steps without files has no use for."""
USED_KEYS = {"npu": ("context_parallel", "matmul_sharding", "moe_sequence_parallel", "strict_limits")}
"""The keys of a section that stay. Others depend on the converters and on compilation, which are drawn."""
DROPPED_KEYS = {"training": ("dataset_path", "enable_cpu_offload"), "model": ("tokenizer_path",)}
CHECKPOINTING = {
    "none": {"activation_checkpoint.mode": "none"},
    "full": {"activation_checkpoint.mode": "full"},
    "selective 2": {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "2"},
    "selective op": {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"},
}
COMPILE: dict[str, dict[str, Any]] = {
    "off": {"compile.enable": False},
    "aot_eager": {"compile.enable": True, "compile.backend": "aot_eager"},
    "bypass": {"compile.enable": True, "npu.bypass_codegen": "inductor"},
    "passes": {"compile.enable": True, "npu.bypass_codegen": "inductor", "npu.graph_passes": list(PASSES)},
}


@dataclass(frozen=True)
class Subject:
    """A job to prove: the table of its TOML file, and what can be drawn for its model."""

    model: DrawnModel
    table: dict[str, Any]
    converters: list[str]
    """Those with a target in the model."""
    needed: list[str]
    """Converters without which the model does not train on a CPU."""
    documents: dict[str, Any]
    """Settings that restrict attention to documents, if they can be turned on."""

    def settings(self, draw: Draw, seed: int) -> dict[str, Any]:
        """Return the ``section.key`` settings of ``draw`` with this seed of the weights."""
        settings = self.reference(draw, seed)
        for name, key in DEGREES.items():
            if draw[name] not in (None, 1) or name == "shard":
                settings[f"parallelism.{key}"] = draw[name]
        data_ranks = draw["replicate"] * draw["shard"]
        settings["training.local_batch_size"] = draw["batch"] // (data_ranks * draw["accumulation"])
        optional = {
            "parallelism.pipeline_parallel_schedule": draw["schedule"],
            "parallelism.pipeline_parallel_microbatch_size": draw["microbatch"],
            "parallelism.context_parallel_load_balancer": draw["balancer"],
            "parallelism.fsdp_reshard_after_forward": draw["reshard"],
            "npu.loss_chunk_tokens": draw["loss chunk"],
        }
        settings |= {key: value for key, value in optional.items() if value is not None}
        settings |= CHECKPOINTING[draw["checkpointing"]] | COMPILE[draw["compile"]]
        settings["model.converters"] = self._converters(draw, settings["model.converters"])
        return settings

    def reference(self, draw: Draw, seed: int) -> dict[str, Any]:
        """Return the settings of the run on one rank. They are those that change the numbers."""
        settings = {
            **FIXED,
            "debug.seed": seed,
            "training.seq_len": draw["length"],
            "training.global_batch_size": draw["batch"],
            "training.local_batch_size": draw["batch"],
            "parallelism.data_parallel_shard_degree": 1,
            "model.converters": self.needed,
            **CHECKPOINTING["none"],
            **COMPILE["off"],
        }
        return settings | (self.documents if draw["documents"] else {})

    def _converters(self, draw: Draw, needed: list[str]) -> list[str]:
        """Return the converters of ``draw``. ``"some"`` are a subset in random order, which its number selects."""
        drawn = draw["converters"]
        if drawn == "none":
            return needed
        some = [drawn] if drawn in self.converters else self.converters
        if drawn == "some":
            chance = random.Random(draw["subset"])
            some = chance.sample(some, chance.randint(1, max(1, len(some) - 1)))
        return some + [name for name in needed if name not in some]


def tiny_subjects(names: Iterable[str] | None = None) -> list[Subject]:
    """Return a job for each of these tiny models, by default for all."""
    from torchtitan_npu.prover.tiny_models import TINY  # its import adds flavors, which other jobs do not need

    for name in names or ():
        check_known("--models", name, TINY)
    found = []
    for name in names or TINY:
        model = TINY[name][0]
        settings = {**TEXT, "model.name": model, "model.flavor": name, "experimental.custom_import": TINY_FLAVORS}
        if model in DATASET_OF_MODEL:
            settings["training.dataset"] = DATASET_OF_MODEL[model]
        documents: dict[str, Any] = {}
        if f"{name}_documents" in get_train_spec(model).model_args:
            documents = {"model.flavor": f"{name}_documents", "model.converters": ["npu_attention"]}
        found.append(make_subject(name, with_settings({}, settings), documents))
    return found


def subject_of_job(path: str, flavor: str | None) -> Subject:
    """Return the job of a TOML file, with ``flavor`` if it is set, on the shipped texts."""
    name = parse(path).model.name
    table = {}
    for section, keys in tomli.loads(Path(shipped(path)).read_text()).items():
        if section not in (*DRAWN_SECTIONS, *UNUSED_SECTIONS):
            used, dropped = USED_KEYS.get(section, keys), DROPPED_KEYS.get(section, ())
            table[section] = {key: value for key, value in keys.items() if key in used and key not in dropped}
    settings: dict[str, Any] = {"model.flavor": flavor} if flavor else {}
    if table.get("training", {}).get("dataset") not in DATASET_OF_MODEL.values():
        settings |= TEXT
    return make_subject(name, with_settings(table, settings), {})


def make_subject(name: str, table: dict[str, Any], documents: dict[str, Any]) -> Subject:
    """Look up in the model what can be drawn for it."""
    config = config_of(table)
    job = JobContext(config, 1)
    check_model(job)
    check_size(job)
    if "dsa" in getattr(type(job.flavor_args), "config_sections", ()):
        documents = {"dsa.document_mask": True}
    needed = ["npu_attention"] if job.attention in ("flex", "varlen") else []
    found = [one for one, converter in exact_converters().items() if converter(config, job.dims).targets(job.model)]
    has_experts = any(isinstance(module, MoE) for module in job.model.modules())
    model = DrawnModel(name, has_experts, bool(documents), SHORTEST.get(config.training.dataset, 1))
    return Subject(model, table, found, needed, documents)


def config_of(table: Mapping[str, Any]) -> JobConfig:
    """Return the job that the entry would read from a TOML file with ``table``."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(tomli_w.dumps(table))
        file.flush()
        return parse(file.name)


def check_size(job: JobContext) -> None:
    model = job.config.model
    parameters = sum(p.numel() for p in job.model.parameters())
    if parameters > LARGEST:
        flavors = [name for name in job.train_spec.model_args if name != model.flavor]
        small = [name for name in flavors if "debug" in name or "tiny" in name]
        advice = f"choose a smaller one with --flavor: {', '.join(small)}" if small else "register a smaller one"
        raise UsageError(
            f"model.flavor {model.flavor!r} of {model.name} has {parameters:,} parameters; at most {LARGEST:,} train "
            f"on CPU ranks in seconds: {advice}"
        )


def with_settings(table: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``table`` with ``section.key`` settings."""
    changed: dict[str, Any] = {name: dict(keys) for name, keys in table.items()}
    for key, value in settings.items():
        *sections, name = key.split(".")
        keys = changed
        for section in sections:
            keys = keys.setdefault(section, {})
        keys[name] = value
    return changed


def parse(path: str) -> JobConfig:
    """Return the job of a TOML file, as the entry reads it."""
    return load_job(["--job.config_file", path])
