"""Check the documentation: sentence length, wording, links, translations, runnable examples and the amount of prose.

    python tools/check_docs.py              # all checks that take a second
    python tools/check_docs.py --run        # also run every example marked as runnable
    python tools/check_docs.py --docstrings # also check docstrings and comments of the Python files

A fence ```` ```bash run ```` or ```` ```python run ```` marks a runnable example; GitHub renders it as bash or Python.
The Python examples of one page run in one process, in order. Shell examples run with bash in a folder of symbolic links
to the checkout. Exit code 0: nothing is wrong, 1: something is, one line each.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CODE_FOLDERS = ("torchtitan_npu", "tools", "tests")

LONGEST_SENTENCE = 45
"""Words; a longer sentence is an error."""
LONG_SENTENCE = 40
"""Words; at most ``LONG_SHARE`` of the sentences may have as many."""
LONG_SHARE = 0.01
MOST_WORDS = 23_140
"""Words of prose in docs/, README.md and CONTRIBUTING.md."""
MOST_WORDS_OF_PAGE = {"docs/how-to/compile.md": 1500}
"""Words of all text of a page, with tables and code, as ``wc -w`` counts them."""

WORDING = {
    r"homes?": "backend",
    r"mend(s|ed|ing)?": "fix, work around",
    r"hands? on": "pass",
    r"told by": "given by",
    r"as (they|it) lies?": "as it is stored",
    r"lies? (as|so|like)": "has the layout of",
    r"lie token by token|lie head by head": "is stored in the order",
    r"(kept|taken|captured|gathered|left|comes? in|held) whole": "replicated, unsharded, in one graph",
    r"shared? out": "shard, distribute",
    r"rehears\w*": "dry run, plan, contract test",
    r"stand-ins?": "reference kernel",
    r"on (its|their) way": "in flight",
    r"nobody's device": "placeholder",
    r"by whatever name": "under any name",
    r"nudged?": "perturbed",
    r"ugly": "edge-case",
}
"""Private metaphors, as regular expressions of whole words, and the usual word for each."""

NAMED_FILE = re.compile(
    r"(?<![\w/.-])((?:torchtitan_npu|tests|tools|docs|train_configs)/[\w/.-]+(?:\.(?:py|sh|toml|json|env|md)\b|(?=`)))"
)
"""A path of the repository in text or code: a file, or in backticks a folder."""

GENERATED = r"<!-- (\w+): begin -->.*?<!-- \1: end -->|<!-- made by .*?<!-- end -->"
"""Sections that a tool writes: tables, and figures from the same run."""

OTHER_LANGUAGE = "the other language"
"""Stands for the link of a page to its translation, and back."""

_WORDING = {re.compile(rf"(?<![\w-])(?:{phrase})(?![\w-])", re.IGNORECASE): use for phrase, use in WORDING.items()}


@dataclass(frozen=True)
class Block:
    """A paragraph, list item or quotation without its markup."""

    place: str
    """``file:line`` of its first line."""
    text: str


@dataclass(frozen=True)
class Example:
    """A fenced block marked as runnable."""

    page: Path
    line: int
    language: str
    code: str


def pages(root: Path = ROOT) -> list[Path]:
    """Return the English Markdown files, whose prose is counted."""
    found = sorted((root / "docs").rglob("*.md"))
    chinese = root / "docs/zh-CN"
    return [root / "README.md", root / "CONTRIBUTING.md", *(page for page in found if chinese not in page.parents)]


def translations(root: Path = ROOT) -> dict[Path, Path]:
    """Return the Chinese page of each English page that has one."""
    chinese = {root / "docs" / page.relative_to(root / "docs/zh-CN"): page for page in root.glob("docs/zh-CN/**/*.md")}
    if (root / "README.zh-CN.md").exists():
        chinese[root / "README.md"] = root / "README.zh-CN.md"
    return dict(sorted(chinese.items()))


# --- Markdown -------------------------------------------------------------------------------------------------------


def fences(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line number, info string and content of each fenced block."""
    opening: re.Match[str] | None = None
    first, content = 0, [""]
    for number, line in enumerate(text.splitlines(), 1):
        fence = re.match(r"(\s*)(`{3,}|~{3,})\s*(.*)$", line)
        if opening is None:
            if fence:
                opening, first, content = fence, number, []
        elif fence and fence[2].startswith(opening[2]) and not fence[3]:
            yield first, opening[3].strip(), "\n".join(line.removeprefix(opening[1]) for line in content) + "\n"
            opening = None
        else:
            content.append(line)


def without_fences(text: str) -> list[str]:
    """Return the lines of ``text``; those of fenced blocks and HTML comments are empty."""
    lines = text.splitlines()
    for first, _, content in fences(text):
        last = first + content.count("\n") + 1
        lines[first - 1 : last] = [""] * (last - first + 1)
    return re.sub(r"<!--.*?-->", blank_lines, "\n".join(lines), flags=re.DOTALL).split("\n")


def blank_lines(match: re.Match[str]) -> str:
    """Return as many line ends as the match has."""
    return "\n" * match[0].count("\n")


def prose(path: Path, root: Path = ROOT) -> Iterator[Block]:
    """Yield the prose of a Markdown file.

    Code, tables, headings, images, captions (paragraphs in italics) and generated sections are no prose.
    """
    name = path.relative_to(root)
    first = 0
    paragraph: list[str] = []

    def finish() -> Iterator[Block]:
        text = " ".join(paragraph)
        caption = re.fullmatch(r"(\*|_)(?!\1).*\1", text) and not text.startswith("**")
        if text and not caption:
            yield Block(f"{name}:{first}", plain(text))
        paragraph.clear()

    text = re.sub(GENERATED, blank_lines, path.read_text(), flags=re.DOTALL)
    for number, line in enumerate(without_fences(text), 1):
        line = line.strip()
        item = re.match(r"([-*+]|\d+\.|>)\s+", line)
        if not line or line.startswith(("|", "#", "![")) or item:
            yield from finish()
        if not line or line.startswith(("|", "#", "![")):
            continue
        if not paragraph:
            first = number
        paragraph.append(line[item.end() :] if item else line)
    yield from finish()


def text_lines(path: Path, root: Path = ROOT) -> Iterator[Block]:
    """Yield every line of a Markdown file outside code: prose, headings, tables and captions."""
    for number, line in enumerate(without_fences(path.read_text()), 1):
        yield Block(f"{path.relative_to(root)}:{number}", plain(line))


def plain(text: str) -> str:
    """Return ``text`` without markup. Inline code and formulas count as one word."""
    text = re.sub(r"`+[^`]+`+", " CODE ", text)
    text = re.sub(r"\$[^$]+\$", " FORMULA ", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"<https?://[^>]+>", "URL", text)
    return re.sub(r"(\*\*|\*|__)", "", text)


def sentences(text: str) -> list[str]:
    """Split prose into sentences."""
    text = re.sub(r"\b(e\.g|i\.e|etc|vs|cf|approx)\.", r"\1", text)
    return [part for part in re.split(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[]?[A-Z0-9`])", text) if words(part)]


def words(text: str) -> int:
    """Return the number of words."""
    return sum(bool(re.search(r"\w", word)) for word in text.split())


# --- Docstrings -----------------------------------------------------------------------------------------------------


def docstrings(path: Path, root: Path = ROOT) -> Iterator[Block]:
    """Yield the paragraphs of every docstring of a Python file, strings below an attribute included."""
    for statement in statements(ast.parse(path.read_text())):
        text = getattr(getattr(statement, "value", None), "value", None)
        if isinstance(statement, ast.Expr) and isinstance(text, str):
            place = f"{path.relative_to(root)}:{statement.lineno}"
            yield from docstring_blocks(place, text, statement.col_offset)


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements below ``node``. ``ast.walk`` would visit ten times as many nodes."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, field, []):
            yield child
            yield from statements(child)


def docstring_blocks(place: str, text: str, indent: int) -> Iterator[Block]:
    """Yield the paragraphs of a docstring, stored with ``indent`` spaces, without indented code and directives."""
    lines = [line.removeprefix(" " * indent) for line in text.split("\n")]
    paragraph: list[str] = []
    for line in [*lines, ""]:
        ends = not line.strip() or line.startswith(("    ", "..", "- ", "* ", "  "))
        if ends and paragraph:
            yield Block(place, plain(" ".join(paragraph)))
            paragraph = []
        if line.strip() and not line.startswith(("    ", "..")):
            paragraph.append(line.strip().removeprefix("- ").removeprefix("* "))


def comments(path: Path, root: Path = ROOT) -> Iterator[Block]:
    """Yield the comments of a Python file, one per line."""
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield Block(f"{path.relative_to(root)}:{token.start[0]}", plain(token.string.lstrip("# ")))


def python_files(root: Path = ROOT) -> list[Path]:
    """Return the Python files of the package, tools and tests."""
    return [path for folder in CODE_FOLDERS for path in sorted((root / folder).rglob("*.py"))]


# --- Checks ---------------------------------------------------------------------------------------------------------


def sentence_errors(blocks: list[Block]) -> Iterator[str]:
    """Yield each sentence above the limit."""
    for block in blocks:
        for sentence in sentences(block.text):
            if (count := words(sentence)) > LONGEST_SENTENCE:
                yield f"{block.place}: a sentence of {count} words, at most {LONGEST_SENTENCE}: {sentence[:60]} ..."


def wording_errors(blocks: Iterable[Block]) -> Iterator[str]:
    """Yield each private metaphor."""
    for block in blocks:
        for pattern, use in _WORDING.items():
            for match in pattern.finditer(block.text):
                yield f"{block.place}: {match[0]!r}: use {use}"


def long_share(blocks: list[Block]) -> tuple[int, int]:
    """Return the number of long sentences and of all sentences."""
    counts = [words(sentence) for block in blocks for sentence in sentences(block.text)]
    return sum(count >= LONG_SENTENCE for count in counts), len(counts)


def amount_errors(blocks: list[Block]) -> Iterator[str]:
    """Yield an error if there is too much prose or if too many sentences are long."""
    total = sum(words(block.text) for block in blocks)
    if total > MOST_WORDS:
        yield f"{total} words of prose, at most {MOST_WORDS}"
    long, count = long_share(blocks)
    if long >= LONG_SHARE * max(count, 1) and long:
        yield f"{long} of {count} sentences have {LONG_SENTENCE} words or more, the limit is {LONG_SHARE:.0%}"


def page_errors(root: Path = ROOT) -> Iterator[str]:
    """Yield each page with more words than ``MOST_WORDS_OF_PAGE`` allows."""
    for name, most in MOST_WORDS_OF_PAGE.items():
        if (count := len((root / name).read_text().split())) > most:
            yield f"{name}: {count} words, at most {most}"


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    found: set[str] = set()
    for line in without_fences(text):
        if heading := re.match(r"#+\s+(.*)", line):
            title = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).strip().lower()
            slug = re.sub(r"[^\w\- ]", "", title).replace(" ", "-")
            number = next(n for n in range(1000) if (f"{slug}-{n}" if n else slug) not in found)
            found.add(f"{slug}-{number}" if number else slug)
    return found


def link_errors(path: Path, root: Path = ROOT) -> Iterator[str]:
    """Yield each relative link, image, anchor and file name of a page that leads nowhere."""
    name = path.relative_to(root)
    for number, line in enumerate(without_fences(path.read_text()), 1):
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", line)):
            if re.match(r"[a-z]+:", target):
                continue
            file, _, anchor = target.partition("#")
            page = (path.parent / file).resolve() if file else path
            if not page.exists():
                yield f"{name}:{number}: no file {target}"
            elif anchor and page.suffix == ".md" and anchor not in anchors(page.read_text()):
                yield f"{name}:{number}: no heading {target}"
    for number, line in enumerate(path.read_text().splitlines(), 1):
        for file in NAMED_FILE.findall(line):
            if not (root / file).exists():
                yield f"{name}:{number}: no file {file}"


def named_page_errors(root: Path = ROOT) -> Iterator[str]:
    """Yield each page that the code, scripts or train configs name and that does not exist."""
    files = [path for folder in (*CODE_FOLDERS, "train_configs") for path in (root / folder).rglob("*")]
    for path in files:
        if path.suffix in (".py", ".sh", ".toml", ".env") and not path.name.endswith("check_docs.py"):
            for page in re.findall(r"docs/[\w/-]+\.md", path.read_text()):
                if not (root / page).exists():
                    yield f"{path.relative_to(root)}: no page {page}"


# --- Translations ---------------------------------------------------------------------------------------------------


def translation_errors(english: Path, chinese: Path, root: Path = ROOT) -> Iterator[str]:
    """Yield the differences of a page and its translation in everything but words."""
    name = chinese.relative_to(root)
    if not english.exists():
        yield f"{name}: no page {english.relative_to(root)}"
        return
    (ordered, names), (own_ordered, own_names) = facts(english, root), facts(chinese, root)
    for page, found in ((english, names), (chinese, own_names)):
        if OTHER_LANGUAGE not in found["link"]:
            yield f"{page.relative_to(root)}: no link to the page in the other language"
    for topic, parts in ordered.items():
        for number, (part, own) in enumerate(itertools.zip_longest(parts, own_ordered[topic]), 1):
            if part != own:
                yield f"{name}: {topic} {number} is {own!r}; in {english.relative_to(root)} it is {part!r}"
                break
    for topic, wanted in names.items():
        for missing in sorted(wanted - own_names[topic]):
            yield f"{name}: no {topic} {missing!r}, which {english.relative_to(root)} has"
        for more in sorted(own_names[topic] - wanted):
            yield f"{name}: {topic} {more!r}, which {english.relative_to(root)} does not have"


def facts(path: Path, root: Path = ROOT) -> tuple[dict[str, list[str]], dict[str, set[str]]]:
    """Return what a page and its translation have in common: some in the order of the page, the rest as sets.

    Comments in code and anchors of links may be translated.
    """
    text = path.read_text()
    lines = without_fences(text)
    outside = "\n".join(lines)
    words_only = re.sub(r"`[^`]+`", " ", re.sub(r"\]\([^)]*\)", "]", outside))
    ordered = {
        "heading": [match[1] for line in lines if (match := re.match(r"(#+) ", line))],
        "code block": [f"{info}\n{without_comments(info, code)}" for _, info, code in fences(text)],
        "table row": [f"{cells(line)} cells" for line in lines if line.startswith("|")],
    }
    return ordered, {
        "name": set(re.findall(r"`([^`]+)`", outside)),
        "number": set(re.findall(r"(?<![A-Za-z0-9_.])\d+(?:[.,]\d+)*", words_only)),
        "link": set(link_targets(path, outside, root)),
    }


def cells(line: str) -> int:
    """Return the number of cells of a row of a table."""
    return len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]+`", "", line))) - 1


def without_comments(info: str, code: str) -> str:
    """Return ``code`` without comments and alignment, if its language has comments with #."""
    if info.split()[:1] not in (["bash"], ["python"], ["toml"], ["yaml"]):
        return code
    lines = [re.sub(r"\s+", " ", re.sub(r"(^|\s)#(?!!|SBATCH).*", "", line)).rstrip() for line in code.splitlines()]
    return "\n".join(line for line in lines if line)


def link_targets(path: Path, text: str, root: Path) -> Iterator[str]:
    """Yield the addresses and files that a page links, relative to ``root``; for a translated file, the English one."""
    chinese = translations(root)
    english = {page: original for original, page in chinese.items()}
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        file = Path(os.path.normpath(path.parent / target.partition("#")[0]))
        if re.match(r"[a-z]+:", target):
            yield target
        elif path in (chinese.get(file), english.get(file)):
            yield OTHER_LANGUAGE
        elif path in english and file in chinese:
            yield f"{file.relative_to(root)} in English"  # an error: there is a translation
        elif not target.startswith("#"):
            yield str(english.get(file, file).relative_to(root))


# --- Runnable examples ----------------------------------------------------------------------------------------------


def examples(path: Path) -> Iterator[Example]:
    """Yield the runnable examples of a page."""
    for line, info, code in fences(path.read_text()):
        language, *rest = info.split() or [""]
        if "run" in rest:
            yield Example(path, line, language, code)


def run_examples(
    paths: list[Path], root: Path = ROOT, run_python: Callable[[str, str, Path], Iterable[str]] | None = None
) -> Iterator[str]:
    """Run the examples of each page and yield an error for each that fails.

    ``run_python`` runs the Python code of a page, in a new process by default. It also takes the name of the page and
    ``root``, and returns errors.
    """
    for path in paths:
        found = list(examples(path))
        python = [example for example in found if example.language == "python"]
        if python:
            lines: list[str] = []
            for example in python:  # padded, so that a traceback has the line numbers of the page
                lines += [""] * (example.line - len(lines)) + example.code.splitlines()
            code, place = "\n".join(lines), f"{path.relative_to(root)}: python"
            yield from run_python(code, place, root) if run_python else run([sys.executable, "-c", code], place, root)
        for example in found:
            place = f"{path.relative_to(root)}:{example.line}"
            if example.language == "bash":
                yield from run(["bash", "-euo", "pipefail", "-c", example.code], place, root)
            elif example.language != "python":
                yield f"{place}: only bash and python examples can be run, not {example.language!r}"


def run(command: list[str], place: str, root: Path) -> Iterator[str]:
    """Run ``command`` in a folder of links to the checkout; yield an error if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        work, scripts = Path(folder) / "checkout", Path(folder) / "bin"
        work.mkdir()
        scripts.mkdir()
        for entry in root.iterdir():
            if entry.name != "outputs" and not entry.name.startswith("."):
                (work / entry.name).symlink_to(entry)
        # the command as an installed package has it, and this interpreter as `python`
        for name, arguments in {"torchtitan-npu": " -m torchtitan_npu.cli.main", "python": ""}.items():
            script = scripts / name
            script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)}{arguments} "$@"\n')
            script.chmod(0o755)
        environment = os.environ | {
            "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")])),
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True)
    if done.returncode:
        end = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        yield f"{place}: the example ends with exit code {done.returncode}\n{end}"


def statistics(title: str, blocks: list[Block]) -> str:
    """Return one line with the words, sentences and long sentences of ``blocks``."""
    long, count = long_share(blocks)
    total = sum(words(block.text) for block in blocks)
    share = long / max(count, 1)
    return f"{title}: {total} words in {count} sentences, {long} ({share:.1%}) of {LONG_SENTENCE} words or more"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="run the examples marked as runnable")
    parser.add_argument("--docstrings", action="store_true", help="check docstrings and comments of the Python files")
    parser.add_argument("--pages", action="store_true", help="print the words of each page")
    args = parser.parse_args(argv)

    paths = pages()
    blocks = [block for path in paths for block in prose(path)]
    changes = list(prose(ROOT / "CHANGELOG.md"))
    everything = [*blocks, *changes]
    lines = [line for path in (*paths, ROOT / "CHANGELOG.md") for line in text_lines(path)]
    errors = [*sentence_errors(everything), *wording_errors(lines), *amount_errors(blocks), *page_errors()]
    linked = (*paths, *translations().values(), ROOT / "CHANGELOG.md")
    errors += [error for path in linked for error in link_errors(path)]
    errors += [error for pair in translations().items() for error in translation_errors(*pair)]
    errors += named_page_errors()
    print(statistics("docs, README and CONTRIBUTING", blocks))
    if args.pages:
        for path in paths:
            print(f"{sum(words(block.text) for block in prose(path)):6} {path.relative_to(ROOT)}")
    if args.docstrings:
        texts = [block for path in python_files() for block in docstrings(path)]
        print(statistics("docstrings", texts))
        texts += [block for path in python_files() for block in comments(path)]
        errors += [*sentence_errors(texts), *wording_errors(texts)]
    if args.run:
        errors += run_examples(paths)
    print(*errors, sep="\n")
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
