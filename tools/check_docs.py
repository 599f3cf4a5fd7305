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
MOST_WORDS = 17_500
"""Words outside tables and fences of README.md and the English pages of docs/."""

GLOSSARY_IN_PACKAGE = True
"""Whether the words with a pattern for names are errors in the package's names, docstrings and comments, too."""

WORDS = (
    # in prose, in names, the usual word
    (r"homes?", "", "backend"),
    (r"mend(s|ed|ing)?", "", "fix, work around"),
    (r"hands? on", "", "pass"),
    (r"told by", "", "given by"),
    (r"as (they|it) lies?", "", "as it is stored"),
    (r"lies? (as|so|like)", "", "has the layout of"),
    (r"lie token by token|lie head by head", "", "is stored in the order"),
    (r"(kept|taken|captured|gathered|left|comes? in|held) whole", "", "replicated, unsharded, in one graph"),
    (r"shared? out", "", "shard, distribute"),
    (r"rehears\w*", "", "dry run, plan, contract test"),
    (r"stand-ins?", "", "reference kernel"),
    (r"on (its|their) way", "", "in flight"),
    (r"nobody's device", "", "placeholder"),
    (r"by whatever name", "", "under any name"),
    (r"nudged?", "", "perturbed"),
    (r"ugly", "", "edge-case"),
    (r"(?<!in )(?<!last )(?<!takes )places?", r"(?<!in_)places?", "position, slot, entry"),
    (r"ours|theirs", r"own|ours|theirs", "local, this package's, upstream"),
    (
        r"ends of (the )?documents?",
        r"query_ends|key_ends|(?<!_)(?:of_queries|of_keys)",
        "cu_seqlens, cu_seqlens_q, cu_seqlens_k",
    ),
    (r"(flipped|recorded|discrete) choices?", r"(?:flipped|recorded|use|install)_choices", "routing decision"),
    (r"accounts? of", r"accounts?", "aux loss"),
    (r"exchange of keys", r"exchange_keys|own_keys|gathered_keys", "kv_gather; LocalKV, AllGatherKV"),
    (r"by spans|attention spans?", r"by_spans|attention_spans?", "chunk"),
    (r"kept steps?", r"kept_step", "captured step"),
    (r"bundles?", r"bundles?", "bucket"),
    (r"epilogs?", r"(?<!mla_)prolog|epilog", "what it computes"),
    (r"retyped", r"retyped|with_forward|rebound", "convert_module, swap_forward, copy_with_globals"),
)
"""Words of this project alone, as regular expressions of whole words, and the trade's word for each."""

NAMED_FILE = re.compile(
    r"(?<![\w/.-])((?:torchtitan_npu|tests|tools|docs|train_configs)/[\w/.-]+(?:\.(?:py|sh|toml|json|env|md)\b|(?=`)))"
)
"""A path of the repository in text or code: a file, or in backticks a folder."""

GENERATED = r"<!-- (\w+): begin -->.*?<!-- \1: end -->|<!-- made by .*?<!-- end -->"
"""Sections that a tool writes: tables, and figures from the same run."""

OTHER_LANGUAGE = "the other language"
"""Stands for the link of a page to its translation, and back."""


def whole_words(phrase: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w-])(?:{phrase})(?![\w-])", re.IGNORECASE)


_PROSE = {whole_words(phrase): use for phrase, _, use in WORDS}
_METAPHORS = {whole_words(phrase): use for phrase, in_names, use in WORDS if not in_names}
_NAMES = {re.compile(rf"(?<![a-z])(?:{phrase})(?![a-z])"): use for _, phrase, use in WORDS if phrase}


@dataclass(frozen=True)
class Block:
    """A paragraph, list item or quotation without its markup."""

    where: str
    """``file:line`` of its first line."""
    text: str


def pages(root: Path = ROOT) -> list[Path]:
    """Return the English Markdown files."""
    found = sorted((root / "docs").rglob("*.md"))
    chinese = root / "docs/zh-CN"
    return [root / "README.md", root / "CONTRIBUTING.md", *(page for page in found if chinese not in page.parents)]


def counted(root: Path = ROOT) -> list[Path]:
    """Return the pages whose amount of words is limited."""
    return [page for page in pages(root) if page.name != "CONTRIBUTING.md"]


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
    return without(r"<!--.*?-->", "\n".join(lines)).split("\n")


def prose(path: Path, root: Path = ROOT) -> Iterator[Block]:
    """Yield the prose of a Markdown file.

    Code, tables, headings, images, captions (paragraphs in italics) and generated sections are no prose.
    """
    name = path.relative_to(root)
    first = 0
    paragraph: list[str] = []

    def finish() -> Iterator[Block]:
        text = " ".join(paragraph)
        caption = re.fullmatch(r"(\*|_)(?!\1).*\1\.?", text) and not text.startswith("**")
        if text and not caption:
            yield Block(f"{name}:{first}", plain(text))
        paragraph.clear()

    for number, line in enumerate(without_fences(without(GENERATED, path.read_text())), 1):
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


def without(pattern: str, text: str) -> str:
    """Return ``text`` without what matches, with all its line ends."""
    return re.sub(pattern, lambda match: "\n" * match[0].count("\n"), text, flags=re.DOTALL)


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
        if not (isinstance(statement, ast.Expr) and isinstance(text, str)):
            continue
        paragraph: list[str] = []
        for line in [*text.split("\n"), ""]:
            line = line.removeprefix(" " * statement.col_offset)
            ends = not line.strip() or line.startswith(("..", "- ", "* ", "  "))
            if ends and paragraph:
                yield Block(f"{path.relative_to(root)}:{statement.lineno}", plain(" ".join(paragraph)))
                paragraph = []
            if line.strip() and not line.startswith(("    ", "..")):  # neither code nor a directive
                paragraph.append(line.strip().removeprefix("- ").removeprefix("* "))


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements below ``node``. ``ast.walk`` would visit ten times as many nodes."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, field, []):
            yield child
            yield from statements(child)


def comments(path: Path, root: Path = ROOT) -> Iterator[Block]:
    """Yield the comments of a Python file, one per line."""
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield Block(f"{path.relative_to(root)}:{token.start[0]}", plain(token.string.lstrip("# ")))


def names(path: Path, root: Path = ROOT) -> Iterator[Block]:
    """Yield the names that a Python file defines, in snake case, one per block."""
    for node in ast.walk(ast.parse(path.read_text())):
        name = getattr(node, "name", None) or getattr(node, "arg", None)
        if isinstance(getattr(node, "ctx", None), ast.Store):
            name = getattr(node, "id", None) or getattr(node, "attr", None)
        if isinstance(name, str) and not isinstance(node, ast.alias | ast.keyword):
            snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
            yield Block(f"{path.relative_to(root)}:{getattr(node, 'lineno', 0)}", snake)


def python_files(root: Path = ROOT, folders: Iterable[str] = CODE_FOLDERS) -> list[Path]:
    """Return the Python files of the package, tools and tests."""
    return [path for folder in folders for path in sorted((root / folder).rglob("*.py"))]


# --- Checks ---------------------------------------------------------------------------------------------------------


def sentence_errors(blocks: list[Block]) -> Iterator[str]:
    """Yield each sentence above the limit."""
    for block in blocks:
        for sentence in sentences(block.text):
            if (count := words(sentence)) > LONGEST_SENTENCE:
                yield f"{block.where}: a sentence of {count} words, at most {LONGEST_SENTENCE}: {sentence[:60]} ..."


def word_errors(blocks: Iterable[Block], words: dict[re.Pattern[str], str] = _METAPHORS) -> Iterator[str]:
    """Yield each of the ``words`` that a block has."""
    for block in blocks:
        for pattern, use in words.items():
            for match in pattern.finditer(block.text):
                yield f"{block.where}: {match[0]!r}: use {use}"


def package_word_errors(root: Path = ROOT) -> Iterator[str]:
    """Yield each word of the glossary in the package's names, docstrings and comments."""
    for path in python_files(root, ["torchtitan_npu"]):
        yield from word_errors(names(path, root), _NAMES)
        yield from word_errors([*docstrings(path, root), *comments(path, root)], _PROSE)


def amount(path: Path) -> int:
    """Return the number of words of a page outside tables and fences."""
    return sum(len(line.split()) for line in without_fences(path.read_text()) if not line.startswith("|"))


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


def examples(path: Path) -> list[tuple[int, str, str]]:
    """Return line, language and code of each runnable example of a page."""
    return [(line, info.split()[0], code) for line, info, code in fences(path.read_text()) if " run" in info]


def run_examples(
    paths: list[Path], root: Path = ROOT, run_python: Callable[[str, str, Path], Iterable[str]] | None = None
) -> Iterator[str]:
    """Run the examples of each page and yield an error for each that fails.

    ``run_python`` runs the Python code of a page, in a new process by default. It also takes the name of the page and
    ``root``, and returns errors.
    """
    for path in paths:
        lines: list[str] = []
        for line, language, code in examples(path):
            where = f"{path.relative_to(root)}:{line}"
            if language == "python":  # padded, so that a traceback has the line numbers of the page
                lines += [""] * (line - len(lines)) + code.splitlines()
            elif language == "bash":
                yield from run(["bash", "-euo", "pipefail", "-c", code], where, root)
            else:
                yield f"{where}: only bash and python examples can be run, not {language!r}"
        if lines:
            code, where = "\n".join(lines), f"{path.relative_to(root)}: python"
            yield from run_python(code, where, root) if run_python else run([sys.executable, "-c", code], where, root)


def run(command: list[str], where: str, root: Path) -> Iterator[str]:
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
        yield f"{where}: the example ends with exit code {done.returncode}\n{end}"


def prose_errors(root: Path = ROOT) -> Iterator[str]:
    """Yield the errors in the words of all pages."""
    changes = root / "CHANGELOG.md"
    for path in (*pages(root), changes):
        blocks = list(prose(path, root))
        yield from sentence_errors(blocks)
        yield from word_errors(text_lines(path, root))
        yield from word_errors(blocks if path != changes else [], _PROSE)
    if (total := sum(map(amount, counted(root)))) > MOST_WORDS:
        yield f"{total} words outside tables and fences, at most {MOST_WORDS}"


def reference_errors(root: Path = ROOT) -> Iterator[str]:
    """Yield broken links and names of files, and differences between pages and their translations."""
    for path in (*pages(root), *translations(root).values(), root / "CHANGELOG.md"):
        yield from link_errors(path, root)
    for pair in translations(root).items():
        yield from translation_errors(*pair, root)
    yield from named_page_errors(root)


def code_errors(root: Path = ROOT) -> Iterator[str]:
    """Yield the errors in docstrings, comments and names of the Python files."""
    for path in python_files(root):
        blocks = [*docstrings(path, root), *comments(path, root)]
        yield from sentence_errors(blocks)
        yield from word_errors(blocks)
    if GLOSSARY_IN_PACKAGE:
        yield from package_word_errors(root)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="run the examples marked as runnable")
    parser.add_argument("--docstrings", action="store_true", help="check docstrings and comments of the Python files")
    parser.add_argument("--pages", action="store_true", help="print the words of each page")
    args = parser.parse_args(argv)
    errors = [*prose_errors(), *reference_errors()]
    print(f"{sum(map(amount, counted()))} words in README.md and docs/, at most {MOST_WORDS}")
    if args.pages:
        print(*(f"{amount(path):6} {path.relative_to(ROOT)}" for path in counted()), sep="\n")
    if args.docstrings:
        errors += code_errors()
    if args.run:
        errors += run_examples(pages())
    if errors:
        print(*errors, sep="\n")
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
