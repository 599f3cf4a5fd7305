"""The page of emulated operators in the docs is current."""

import platform

from tools.emulated_operators import PAGE, page, wheel_sentence


def test_the_page_of_operators_is_current() -> None:
    """The page has the numbers of one processor's wheel. They are compared on that processor; the tables everywhere."""
    written = PAGE.read_text()
    (of_wheel,) = (line for line in written.splitlines() if line.startswith("torch_npu "))
    if f" for {platform.machine()} names " in of_wheel:
        assert of_wheel == wheel_sentence(), "run python tools/emulated_operators.py"
    assert written == page(of_wheel), "run python tools/emulated_operators.py"
