"""The page of emulated operators in the docs is current."""

from tools.emulated_operators import PAGE, page


def test_the_page_of_operators_is_current() -> None:
    assert PAGE.read_text() == page(), "run python tools/emulated_operators.py"
