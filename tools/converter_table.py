"""Which converter replaces what in which model, asked of the code: ``python tools/converter_table.py`` writes the table
into docs/converters.md."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "converters.md"
START, END = "<!-- made by tools/converter_table.py -->\n", "<!-- end -->\n"


def table() -> str:
    """A row a model, a column a converter; in each cell what is replaced, and how often in the model's debug flavor."""
    from torchtitan_npu.converters import CONVERTERS
    from torchtitan_npu.train_specs import ADAPTED_MODELS

    rows = {name: job(name) for name in ADAPTED_MODELS}
    rows["deepseek_v32"] = job("deepseek_v32")
    rows["qwen3_vl"] = job("qwen3_vl")
    rows["qwen3_vl, MoE"] = job("qwen3_vl", "debugmodel_moe")
    rows["qwen3, MoE"] = job("qwen3", "debugmodel_moe")
    rows["deepseek_v3, DeepEP"] = job("deepseek_v3", backend="deepep")
    names = sorted(CONVERTERS)
    lines = [f"| model | {' | '.join(f'`{name}`' for name in names)} |", f"|---|{'---|' * len(names)}"]
    for title, config in sorted(rows.items()):
        lines.append(f"| {title} | {' | '.join(cell(CONVERTERS[name](config, None), config) for name in names)} |")
    return "\n".join(lines) + "\n"


def job(model: str, flavor: str = "debugmodel", backend: str = "standard") -> Any:
    """A job of the model, with a backend for expert parallel."""
    from torchtitan_npu.config import JobConfig

    config = JobConfig()
    config.model.name, config.model.flavor = model, flavor
    config.parallelism.expert_parallel_comm_backend = backend  # type: ignore[assignment]
    return config


def cell(converter: Any, config: Any) -> str:
    """``"6 `Attention`"``, or why nothing is converted."""
    from torchtitan_npu.preflight import build_on_meta

    if objection := converter.objection():
        return f"refused: {objection}"
    config = copy.deepcopy(config)
    config.parallelism.expert_parallel_comm_backend = "standard"  # DeepEP's model needs its package to be built
    counts = Counter(type(module).__name__ for _, module in converter.targets(build_on_meta(config)))
    return ", ".join(f"{n} `{name}`" for name, n in counts.items()) or f"not applicable: no {converter.looks_for}"


def main() -> None:
    from torchtitan_npu import platform, register

    platform.prepare()
    register()
    logging.disable()
    before, _, rest = PAGE.read_text().partition(START)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + START + table() + END + after)


if __name__ == "__main__":
    main()
