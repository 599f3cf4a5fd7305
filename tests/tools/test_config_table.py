"""The reference page of the configuration has the keys, defaults and descriptions of the code."""

from __future__ import annotations

from tools.config_table import END, PAGE, START, table


def test_the_page_is_current() -> None:
    _, _, rest = PAGE.read_text().partition(START)
    text = rest.partition(END)[0]
    assert text == table(), "run python tools/config_table.py"
    for key in ("strict_limits", "swap_fraction", "indexer_loss_weight", "mixed_precision_param"):
        assert f"| `{key}` |" in text
