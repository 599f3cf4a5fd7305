"""The docs' table of converters and models says what the code does."""

from __future__ import annotations

import torchtitan_npu
from tools.converter_table import END, PAGE, START, table


def test_the_page_has_the_table_that_the_code_gives() -> None:
    torchtitan_npu.register()
    _, _, rest = PAGE.read_text().partition(START)
    assert rest.partition(END)[0] == table(), "run python tools/converter_table.py"
