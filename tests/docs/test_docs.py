"""The docs of the repository pass tools/check_docs.py, and their examples run."""

from __future__ import annotations

import contextlib
import tempfile

import pytest

from tests._helpers.multirank import run_on_ranks
from tools import check_docs
from tools.check_docs import ROOT

PAGES = [*check_docs.pages(), ROOT / "CHANGELOG.md"]


def test_prose() -> None:
    assert not list(check_docs.prose_errors())


def test_links_and_named_files() -> None:
    pages = [*PAGES, *check_docs.translations().values()]
    assert not [error for page in pages for error in check_docs.link_errors(page)]
    assert not list(check_docs.named_page_errors())


def test_the_index_links_every_page() -> None:
    index = ROOT / "docs/README.md"
    linked = set(check_docs.link_targets(index, index.read_text(), ROOT))
    pages = {str(page.relative_to(ROOT)) for page in check_docs.pages() if page.parent != ROOT and page != index}
    assert not pages - linked  # the navigation of the site is made of these links, see tools/site_pages.py


@pytest.mark.parametrize("english", check_docs.translations(), ids=lambda page: page.stem)
def test_a_translation_has_the_code_names_and_numbers_of_its_page(english: check_docs.Path) -> None:
    assert not list(check_docs.translation_errors(english, check_docs.translations()[english]))


@pytest.mark.parametrize("page", [page for page in PAGES if check_docs.examples(page)], ids=lambda page: page.stem)
def test_examples_run(page: check_docs.Path) -> None:
    assert not list(check_docs.run_examples([page], run_python=run_python))


def run_python(code: str, place: str, root: check_docs.Path) -> list[str]:
    """Run the code in a process that has imported TorchTitan."""
    run_on_ranks(1, execute, code, place, new_processes=True, process_group=False)
    return []


def execute(code: str, place: str) -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        exec(compile(code, place, "exec"), {"__name__": "__main__"})


def test_docstrings_comments_and_names() -> None:
    assert not list(check_docs.code_errors())
