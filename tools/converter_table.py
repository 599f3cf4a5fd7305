"""Write the table to docs/reference/converters.md and its translation: ``python tools/converter_table.py``."""

from __future__ import annotations

import argparse
import copy
import importlib
import logging
import pkgutil
from collections import Counter
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "reference/converters.md"
PAGES = (PAGE, PAGE.parents[1] / "zh-CN/reference/converters.md")
START, END = "<!-- made by tools/converter_table.py -->\n", "<!-- end -->\n"


def table() -> str:
    """Return the table. A cell has the replaced modules of a debug model and their number."""
    from torchtitan_npu.converters import CONVERTERS
    from torchtitan_npu.models import PACKAGE_MODELS

    rows = {name: job(name) for name in titan_models() | set(PACKAGE_MODELS)}
    rows["flux"] = job("flux", "flux-debug")
    rows["qwen3_vl, MoE"] = job("qwen3_vl", "debugmodel_moe")
    rows["qwen3, MoE"] = job("qwen3", "debugmodel_moe")
    rows["deepseek_v3, DeepEP"] = job("deepseek_v3", backend="deepep")
    names = sorted(CONVERTERS)
    lines = [f"| model | {' | '.join(f'`{name}`' for name in names)} |", f"|---|{'---|' * len(names)}"]
    for title, config in sorted(rows.items()):
        model = built(config)
        lines.append(f"| {title} | {' | '.join(cell(name, config, model) for name in names)} |")
    return "\n".join(lines) + "\n"


def titan_models() -> set[str]:
    """Return the names of TorchTitan's own models, without its experiments."""
    from torchtitan import models

    names = (module.name for module in pkgutil.iter_modules(models.__path__) if module.ispkg)
    return {name for name in names if hasattr(importlib.import_module(f"{models.__name__}.{name}"), "get_train_spec")}


def job(model: str, flavor: str = "debugmodel", backend: str = "standard") -> Any:
    """Return a job with the model and a backend of expert parallelism."""
    from torchtitan_npu.config.job_config import JobConfig

    config = JobConfig()
    config.model.name, config.model.flavor = model, flavor
    config.parallelism.expert_parallel_comm_backend = backend  # type: ignore[assignment]
    return config


def built(config: Any) -> Any:
    """Build the model of the job on the meta device."""
    from torchtitan_npu.preflight.job_context import build_on_meta

    config = copy.deepcopy(config)
    config.parallelism.expert_parallel_comm_backend = "standard"  # a model with DeepEP needs its package
    return build_on_meta(config)


def cell(name: str, config: Any, model: Any) -> str:
    """Return a cell: the replaced modules, with "not alone" if another converter is needed, or "—" or "error"."""
    from torchtitan_npu.converters import CONVERTERS
    from torchtitan_npu.errors import UsageError

    applicable = [other for other in sorted(CONVERTERS) if converter(other, [], config).targets(model)]
    if name not in applicable:
        return "—"
    for listed, note in (([name], ""), (applicable, ", not alone")):
        try:
            return replaced(name, listed, config, model) + note
        except UsageError:
            continue
    return "error"


def replaced(name: str, listed: list[str], config: Any, model: Any) -> str:
    """Return the modules that the converter ``name`` replaces in a job with the ``listed`` converters."""
    one = converter(name, listed, config)
    one.check_job()
    counts = Counter(type(module).__name__ for _, module in one.found_targets(model))
    return ", ".join(f"{n} `{kind}`" for kind, n in counts.items())


def converter(name: str, listed: list[str], config: Any) -> Any:
    """Build the converter ``name`` for one rank."""
    from torchtitan_npu.converters import CONVERTERS
    from torchtitan_npu.distributed.parallel_dims import ParallelDims

    config = copy.deepcopy(config)
    config.model.converters = listed
    one_rank = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)
    return CONVERTERS[name](config, one_rank)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    from torchtitan_npu import platform, register

    platform.prepare()
    register()
    logging.disable()
    text = table()
    for page in PAGES:
        before, _, rest = page.read_text().partition(START)
        _, _, after = rest.partition(END)
        page.write_text(before + START + text + END + after)


if __name__ == "__main__":
    main()
