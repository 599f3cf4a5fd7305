"""The small jobs of a campaign, their planned faults, and their uninterrupted runs."""

from __future__ import annotations

import json
import math
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock

from tests._helpers.entry_ranks import EntryRanks, start_ranks
from tests._helpers.layouts import DEGREES
from tools.campaign import ROOT, code_checksum

STEPS, INTERVAL, VALIDATION = 6, 2, 3
"""A job trains and saves so often; it also validates after its first step."""
FLAVOR = "two_layers"
"""The flavor of each model that the jobs train."""
LAYOUTS = {
    "llama3": ("shard2", "replicate2", "tp2", "cp2", "pp2", "shard2 tp2"),
    "qwen3_moe": ("shard2", "tp2", "ep2", "pp2"),
    "deepseek_v32": ("shard2", "tp2", "ep2", "pp2"),
}
"""Layouts by model. ``ep2`` shards the other parameters over the same two ranks."""
JOBS = {f"{model}:{layout}": (model, layout) for model, layouts in LAYOUTS.items() for layout in layouts}


@dataclass(frozen=True)
class Plan:
    """A planned fault, which ranks get in an environment variable, and whether to count the events of each phase."""

    folder: str
    """The job's dump folder."""
    action: str = ""
    """The name of the fault's action, or an empty string."""
    rank: int = 0
    all_ranks: bool = False
    phase: str = ""
    step: int = 0
    event: int = 0
    largest_file: int = 0
    """In bytes: the disk is full for files above this size. If 0, it is full for new files."""
    moment: float = 0.0
    """Selects the weight whose gradient gets a NaN, from 0 to 1."""
    counts: bool = False

    @property
    def checkpoints(self) -> str:
        return f"{self.folder}{os.sep}checkpoint"

    def variables(self) -> dict[str, str]:
        return {"FAULT_PLAN": json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> Plan:
        return cls(**json.loads(os.environ["FAULT_PLAN"]))


@dataclass(frozen=True)
class Job:
    """A tiny model on a layout."""

    model: str
    layout: str
    asynchronous: bool = False
    """Save asynchronously."""
    swap: bool = False
    """Keep the optimizer's states in host memory."""

    def __str__(self) -> str:
        parts = [self.model, *self.layout.split(), "async" if self.asynchronous else "", "swap" if self.swap else ""]
        return " ".join(filter(None, parts))

    @property
    def degrees(self) -> dict[str, int]:
        return {part.rstrip("0123456789"): int(part[-1]) for part in self.layout.split()}

    @property
    def world_size(self) -> int:
        return max(2, math.prod(degree for name, degree in self.degrees.items() if name != "ep"))

    @property
    def reference(self) -> Job:
        """The job whose curve this one must have. Neither asynchronous saves nor swap change a bit."""
        return Job(self.model, self.layout)

    def start(self, folder: Path, dump_folder: Path, plan: Plan | None = None, **options: str) -> EntryRanks:
        """Start the ranks. ``folder`` gets their output."""
        family = self.model.partition("_moe")[0]
        folder.mkdir(parents=True)
        dump_folder.mkdir(parents=True, exist_ok=True)
        job = {
            "job__config_file": str(ROOT / f"train_configs/{family}_debugmodel.toml"),
            "job__dump_folder": str(dump_folder),
            "model__name": f"{family}_swapping" if self.swap else family,
            "model__flavor": FLAVOR,
            "training__steps": str(STEPS),
            "metrics__enable_tensorboard": "False",
            "validation__enable": "True",
            "validation__dataset": "tiny_corpus_validation",
            "validation__freq": str(VALIDATION),
            "validation__steps": "1",
            "validation__seq_len": "32",
            "validation__local_batch_size": "2",
            "training__local_batch_size": "2",
            "checkpoint__enable": "True",
            "checkpoint__interval": str(INTERVAL),
            "checkpoint__keep_latest_k": "2",
            "checkpoint__async_mode": "async" if self.asynchronous else "disabled",
            "checkpoint__last_save_model_only": "False",
            "experimental__custom_import": "tools.fault_injection.tiny_models",
        }
        if self.swap:
            job["optimizer__swap"] = "True"
        for name, degree in self.degrees.items():
            job[f"parallelism__{DEGREES[name]}"] = str(degree)
        plan = plan or Plan(str(dump_folder))
        environment = plan.variables() | {"TINY_MODEL": self.model}
        return start_ranks(folder, self.world_size, environment=environment, **(job | options))


@dataclass(frozen=True)
class Reference:
    """The uninterrupted run of a job."""

    folder: Path
    """Its dump folder."""
    curve: dict[str, dict[str, str]]
    """See :func:`curve`."""
    events: list[dict[str, int]]
    """The events of each phase, by rank."""


_locks = {job: Lock() for job in JOBS.values()}


def reference(job: Job, work: Path) -> Reference:
    """Return the uninterrupted run of ``job``. The one in the folder ``work`` is used until the code changes."""
    folder = work / "reference" / str(job.reference).replace(" ", "_")
    dump_folder = folder / "job"
    marker, code = folder / "finished", code_checksum()
    with _locks[job.model, job.layout]:  # several cases may need the same one
        if not marker.exists() or marker.read_text() != code:
            shutil.rmtree(folder, ignore_errors=True)
            plan = Plan(str(dump_folder), counts=True)
            options = {"comm__train_timeout_seconds": "120", "checkpoint__keep_latest_k": "0"}
            with job.reference.start(folder / "output", dump_folder, plan, **options) as ranks:
                codes = ranks.exit_codes(240)
                if set(codes) != {0}:
                    raise RuntimeError(f"{job.reference} does not train: exit codes {codes}\n{ranks.log(0)[-4000:]}")
            marker.write_text(code)
    events = [json.loads((dump_folder / f"events{rank}.json").read_text()) for rank in range(job.world_size)]
    return Reference(dump_folder, curve(dump_folder), events)


def curve(dump_folder: Path) -> dict[str, dict[str, str]]:
    """Return the recorded numbers by rank and step. If a step was run more than once, its numbers must be equal."""
    steps: dict[str, dict[str, str]] = {}
    for file in sorted(dump_folder.glob("curve*")):
        for line in file.read_text().splitlines():
            entry = json.loads(line)
            kind = "step" if "step" in entry else "validation"
            name = f"rank {file.name.removeprefix('curve')} {kind} {entry.pop(kind)}"
            if steps.setdefault(name, entry) != entry:
                raise ValueError(f"{name}: {steps[name]} and later {entry}")
    return steps
