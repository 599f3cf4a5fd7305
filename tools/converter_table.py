"""Which converter replaces what in which model, asked of the code: ``python tools/converter_table.py`` writes the table
into docs/converters.md."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import torch

PAGE = Path(__file__).parents[1] / "docs" / "converters.md"
START, END = "<!-- made by tools/converter_table.py -->\n", "<!-- end -->\n"


def table() -> str:
    """A row a model, a column a converter; in each cell what is replaced, and how often in the model's debug flavor."""
    from torchtitan_npu.config import JobConfig
    from torchtitan_npu.converters import CONVERTERS
    from torchtitan_npu.train_specs import ADAPTED_MODELS

    plain, deepep = JobConfig(), JobConfig()
    deepep.parallelism.expert_parallel_comm_backend = "deepep"
    rows = {name: (build(name, "debugmodel"), plain) for name in ADAPTED_MODELS}
    rows["qwen3, MoE"] = build("qwen3", "debugmodel_moe"), plain
    rows["deepseek_v3, DeepEP"] = build("deepseek_v3", "debugmodel"), deepep
    names = sorted(CONVERTERS)
    lines = [f"| model | {' | '.join(f'`{name}`' for name in names)} |", f"|---|{'---|' * len(names)}"]
    for title, (model, config) in sorted(rows.items()):
        lines.append(f"| {title} | {' | '.join(cell(CONVERTERS[name](config, None), model) for name in names)} |")
    return "\n".join(lines) + "\n"


def build(name: str, flavor: str) -> Any:
    """The model as TorchTitan builds it, without weights."""
    from torchtitan.protocols.train_spec import get_train_spec

    from torchtitan_npu.config import JobConfig

    spec = get_train_spec(name)
    args: Any = copy.deepcopy(spec.model_args[flavor])
    args.update_from_config(JobConfig())
    with torch.device("meta"):
        return spec.model_cls(args)


def cell(converter: Any, model: Any) -> str:
    """``"6 `Attention`"``, or why nothing is converted."""
    if objection := converter.objection():
        return f"refused: {objection}"
    counts = Counter(type(module).__name__ for _, module in converter.targets(model))
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
