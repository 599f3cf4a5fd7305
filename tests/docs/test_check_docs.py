"""tools/check_docs.py on small samples, good and bad."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import check_docs


def page(folder: Path, text: str) -> Path:
    path = folder / "page.md"
    path.write_text(text)
    return path


def blocks(folder: Path, text: str) -> list[check_docs.Block]:
    return list(check_docs.prose(page(folder, text), folder))


def sentence(count: int) -> str:
    return "Words " + "word " * (count - 2) + "end."


def test_a_sentence_of_46_words_is_an_error(tmp_path: Path) -> None:
    text = f"{sentence(45)} Short one.\n\n- {sentence(46)}\n"
    (error,) = check_docs.sentence_errors(blocks(tmp_path, text))
    assert error.startswith("page.md:3: a sentence of 46 words, at most 45")


def test_inline_code_is_one_word(tmp_path: Path) -> None:
    text = sentence(45).replace("end.", "`a b c` end.")
    assert [check_docs.words(block.text) for block in blocks(tmp_path, text)] == [46]


def test_code_tables_headings_and_captions_are_no_prose(tmp_path: Path) -> None:
    text = (
        "# Title\n\nOne two.\n\n```bash\nhome mended\n```\n| a home | b |\n|---|---|\n\n"
        "*One H200, 2026-11-16: `command`.*\n<!-- a\ncomment -->\n![a home](x.png)\nThree\nfour.\n"
    )
    found = blocks(tmp_path, text)
    assert [(block.where, block.text) for block in found] == [("page.md:3", "One two."), ("page.md:15", "Three four.")]


def test_private_metaphors_are_errors(tmp_path: Path) -> None:
    path = page(tmp_path, "The home.\n\nNo homework; a commendation; hands-on.\n| was | mended |\n```\nhome\n```\n")
    assert list(check_docs.word_errors(check_docs.text_lines(path, tmp_path))) == [
        "page.md:1: 'home': use backend",
        "page.md:4: 'mended': use fix, work around",
    ]


def test_links_and_anchors(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# The `first` one\n## Twice\n## Twice\n")
    text = (
        "[a](other.md) [b](other.md#the-first-one) [c](other.md#twice-1) [d](https://example.org/x.md)\n"
        "[e](missing.md) [f](other.md#second) [g](#here) `tools/no_such_file.py`\n"
    )
    errors = list(check_docs.link_errors(page(tmp_path, text), tmp_path))
    assert errors == [
        "page.md:2: no file missing.md",
        "page.md:2: no heading other.md#second",
        "page.md:2: no heading #here",
        "page.md:2: no file tools/no_such_file.py",
    ]


ENGLISH = (
    "# Run\n[中文](zh-CN/run.md)\n\n## Two\nSet `A` to 5, see [that](other.md#here).\n\n"
    "| a | b |\n|---|---|\n| 1 | `x` |\n\n"
    "```bash\nrun --it   # now\n```\n"
)
CHINESE = (
    "# 运行\n[English](../run.md)\n\n## 二\n见[那里](../other.md#这里)，把 `A` 设为 5。\n\n"
    "| 甲 | 乙 |\n|---|---|\n| 1 | `x` |\n\n"
    "```bash\nrun --it # 现在\n```\n"
)


def translated(folder: Path, chinese: str) -> list[str]:
    """Return the differences between ENGLISH and ``chinese``."""
    english, translation = folder / "docs/run.md", folder / "docs/zh-CN/run.md"
    translation.parent.mkdir(parents=True)
    english.write_text(ENGLISH)
    translation.write_text(chinese)
    return list(check_docs.translation_errors(english, translation, folder))


def test_a_translation_may_translate_words_comments_and_anchors(tmp_path: Path) -> None:
    assert translated(tmp_path, CHINESE) == []
    assert check_docs.pages(tmp_path)[2:] == [tmp_path / "docs/run.md"]  # Chinese words are not counted


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("## 二", "### 二", "heading 2 is '###'; in docs/run.md it is '##'"),
        ("run --it", "run", "code block 1 is 'bash\\nrun'; in docs/run.md it is 'bash\\nrun --it'"),
        ("| 1 | `x` |\n", "", "table row 3 is None; in docs/run.md it is '2 cells'"),
        ("`A`", "A", "no name 'A', which docs/run.md has"),
        (" 5", " 5 或 6", "number '6', which docs/run.md does not have"),
        ("../other.md", "../more.md", "no link 'docs/other.md', which docs/run.md has"),
        ("[English](../run.md)", "", "no link to the page in the other language"),
    ],
)
def test_differences_of_a_translation(tmp_path: Path, old: str, new: str, error: str) -> None:
    assert translated(tmp_path, CHINESE.replace(old, new))[0] == f"docs/zh-CN/run.md: {error}"


def test_a_translation_links_to_translations(tmp_path: Path) -> None:
    assert translated(tmp_path, CHINESE) == []
    (tmp_path / "docs/zh-CN/other.md").write_text("")
    english = tmp_path / "docs/run.md"
    missing, wrong = check_docs.translation_errors(english, tmp_path / "docs/zh-CN/run.md", tmp_path)
    assert "no link 'docs/other.md'" in missing and "link 'docs/other.md in English'" in wrong


def test_pages_that_code_names(tmp_path: Path) -> None:
    for folder in (*check_docs.CODE_FOLDERS, "train_configs", "docs"):
        (tmp_path / folder).mkdir()
    (tmp_path / "docs/there.md").write_text("")
    (tmp_path / "tools/a.py").write_text('"""See docs/there.md and docs/gone.md."""\n')
    assert list(check_docs.named_page_errors(tmp_path)) == ["tools/a.py: no page docs/gone.md"]


def test_docstrings(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(f'class A:\n    """Do it.\n\n        home()\n    """\n\n    x = 1\n    """{sentence(46)}"""\n')
    found = list(check_docs.docstrings(path, tmp_path))
    assert [(block.where, check_docs.words(block.text)) for block in found] == [("module.py:2", 2), ("module.py:8", 46)]


def test_comments(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("x = 1  # the home\ny = '# no comment'\n")
    assert list(check_docs.comments(path, tmp_path)) == [check_docs.Block("module.py:1", "the home")]


def test_words_of_this_project(tmp_path: Path) -> None:
    text = "Two places of a row; in place, a unit in the last place.\n"
    assert list(check_docs.word_errors(blocks(tmp_path, text), check_docs._PROSE)) == [
        "page.md:1: 'places': use position, slot, entry"
    ]


def test_names_of_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(check_docs, "_NAMES", {re.compile("old_(word|name)"): "new word"})
    folder = tmp_path / "torchtitan_npu"
    folder.mkdir()
    (folder / "a.py").write_text("class OldWord:\n    def add(self, old_names):\n        x, older = 1, OldWord\n")
    assert list(check_docs.package_word_errors(tmp_path)) == [
        "torchtitan_npu/a.py:1: 'old_word': use new word",
        "torchtitan_npu/a.py:2: 'old_name': use new word",
    ]


def test_the_amount_of_prose_is_limited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "CONTRIBUTING.md").write_text("Not counted.\n")
    (tmp_path / "CHANGELOG.md").write_text("")
    (tmp_path / "README.md").write_text("# A title\n\nOne, `two three`.\n\n| a | b |\n\n```\ncode\n```\n")
    assert not list(check_docs.prose_errors(tmp_path))
    monkeypatch.setattr(check_docs, "MOST_WORDS", 5)
    assert list(check_docs.prose_errors(tmp_path)) == ["6 words outside tables and fences, at most 5"]


def test_runnable_examples(tmp_path: Path) -> None:
    text = (
        "```python run\nx = 1\n```\n```python\nnot run\n```\n```python run\nassert x == 1\nopen('page.md')\n```\n"
        "```bash run\ntest -e page.md && python -c 'print(1)' | grep -q 1\n```\n"
    )
    assert list(check_docs.run_examples([page(tmp_path, text)], tmp_path)) == []
    failing = "```python run\nraise ValueError(3)\n```\n\n```bash run\nfalse\necho on\n```\n```c run\n```\n"
    bash, other, python = check_docs.run_examples([page(tmp_path, failing)], tmp_path)
    assert python.startswith("page.md: python: the example ends with exit code 1") and "ValueError: 3" in python
    assert "line 2, in <module>" in python  # as in the page
    assert bash.startswith("page.md:5: the example ends with exit code 1")
    assert other == "page.md:9: only bash and python examples can be run, not 'c'"
