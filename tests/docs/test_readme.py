"""The tables of README.md and its translation name every converter, model and command."""

from __future__ import annotations

import re

import pytest

from tools.check_docs import ROOT
from tools.converter_table import titan_models
from torchtitan_npu.cli.main import COMMANDS
from torchtitan_npu.converters import CONVERTERS
from torchtitan_npu.models import PACKAGE_MODELS


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_the_tables_are_complete(page: str) -> None:
    rows = [line.split("|")[1] for line in (ROOT / page).read_text().splitlines() if line.startswith("| ")]
    names = {name for row in rows for name in re.findall(r"\[`(\w+)`\]", row)}
    assert {name for name in names if name.startswith("npu_")} == set(CONVERTERS)
    assert names - set(CONVERTERS) == set(COMMANDS) - {"demo"}  # in the text above
    models = {match[1] for row in rows if (match := re.match(r" \[?(\w+)", row, re.ASCII))}
    # flux generates images, llama3_ft is llama3 with another training loop
    assert models >= (titan_models() - {"flux", "llama3_ft"}) | set(PACKAGE_MODELS)
