"""The table of converters and models in the docs is current."""

from __future__ import annotations

import torchtitan_npu
from tools.converter_table import END, PAGES, START, table, titan_models
from torchtitan_npu.models import PACKAGE_MODELS


def test_the_table_of_converters_is_current() -> None:
    torchtitan_npu.register()
    texts = [page.read_text().partition(START)[2].partition(END)[0] for page in PAGES]
    text = table()
    assert texts == [text] * len(PAGES), "run python tools/converter_table.py"
    _, _, *lines = (line.strip("| ").split(" | ") for line in text.splitlines())
    rows = {title: cells for title, *cells in lines}
    assert rows.keys() >= titan_models() | set(PACKAGE_MODELS) >= {"llama3", "qwen3", "deepseek_v3", "flux", "qwen3_vl"}
    for model in ("qwen3_vl", "qwen3_vl, MoE"):
        assert rows[model][-1] == "4 `VisionAttention`, not alone"
    assert rows["deepseek_v3, DeepEP"].count("error") == 2
