"""A report as a list of blocks, and its two forms: Markdown, and HTML in one file."""

from __future__ import annotations

import base64
import html
import re
from dataclasses import dataclass

from torchtitan_npu.errors import one_line


class Code(str):
    """Text that is shown as it is, such as a path or a value."""


Cell = str | int | Code | None
"""``None`` is shown as a dash. In a plain string, backticks enclose code."""


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    text: str


@dataclass(frozen=True)
class Items:
    """A list."""

    texts: list[str]


@dataclass(frozen=True)
class Table:
    header: list[Cell]
    rows: list[list[Cell]]


@dataclass(frozen=True)
class Picture:
    """A PNG. Markdown links the file ``name``; HTML contains it."""

    name: str
    description: str
    content: bytes


Block = Heading | Paragraph | Items | Table | Picture


def to_markdown(title: str, blocks: list[Block]) -> str:
    """Return the report as Markdown."""
    return "\n\n".join([f"# {_markdown(title)}", *(_markdown_block(block) for block in blocks)]) + "\n"


def _markdown_block(block: Block) -> str:
    match block:
        case Heading():
            return f"{'#' * block.level} {_markdown(block.text)}"
        case Paragraph():
            return _markdown(block.text)
        case Items():
            return "\n".join(f"- {_markdown(text)}" for text in block.texts)
        case Picture():
            return f"![{block.description}]({block.name})"
        case Table():
            rows: list[list[Cell]] = [block.header, ["---" for _ in block.header], *block.rows]
            return "\n".join("| " + " | ".join(map(_markdown_cell, row)) + " |" for row in rows)


def _markdown_cell(cell: Cell) -> str:
    return _markdown(cell).replace("|", "\\|")


def _markdown(cell: Cell) -> str:
    if cell is None:
        return "-"
    text = one_line(cell)
    if isinstance(cell, Code):
        fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
        return f"{fence} {text} {fence}" if len(fence) > 1 else f"`{text}`"
    return text.replace("<", "&lt;")


def to_html(title: str, passed: bool, blocks: list[Block]) -> str:
    """Return the report as one HTML file, which refers to no other file and runs no program."""
    body = "\n".join(_html_block(block) for block in blocks)
    verdict = "passed" if passed else "failed"
    heading = f'<h1 class="{verdict}">{_html(title)}</h1>'
    return _PAGE.format(title=html.escape(one_line(title)), style=_STYLE, heading=heading, body=body)


def _html_block(block: Block) -> str:
    match block:
        case Heading():
            return f"<h{block.level}>{_html(block.text)}</h{block.level}>"
        case Paragraph():
            return f"<p>{_html(block.text)}</p>"
        case Items():
            return "<ul>" + "".join(f"<li>{_html(text)}</li>" for text in block.texts) + "</ul>"
        case Picture():
            source = "data:image/png;base64," + base64.b64encode(block.content).decode()
            return f'<img src="{source}" alt="{html.escape(block.description)}">'
        case Table():
            head = "".join(f'<th scope="col">{_html(cell)}</th>' for cell in block.header)
            rows = "".join("<tr>" + "".join(map(_html_cell, row)) + "</tr>\n" for row in block.rows)
            table = f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody>\n</table>"
            return f'<div class="table">{table}</div>'


def _html_cell(cell: Cell) -> str:
    number = not isinstance(cell, Code) and re.fullmatch(r"-?[\d.]+(e[-+]\d+)?|nan|-?inf", str(cell))
    return f'<td class="number">{_html(cell)}</td>' if number else f"<td>{_html(cell)}</td>"


def _html(cell: Cell) -> str:
    if cell is None:
        return "-"
    text = html.escape(one_line(cell))
    if isinstance(cell, Code):
        return f"<code>{text}</code>"
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", text)


# The policy keeps a browser from loading anything, whatever a name in the report contains.
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{heading}
{body}
</main>
</body>
</html>
"""

_STYLE = """
:root {
  color-scheme: light dark;
  --text: #1f2328; --page: #ffffff; --line: #d1d9e0; --stripe: #f6f8fa;
  --passed: #1a7f37; --failed: #c62828;
}
@media (prefers-color-scheme: dark) {
  :root {
    --text: #e6edf3; --page: #0d1117; --line: #3d444d; --stripe: #151b23;
    --passed: #3fb950; --failed: #ff7b72;
  }
}
body { margin: 0; background: var(--page); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.5rem; line-height: 1.3; border-left: 0.35rem solid; padding-left: 0.75rem; }
h1.passed { color: var(--passed); }
h1.failed { color: var(--failed); }
h2 { font-size: 1.15rem; margin: 2rem 0 0.5rem; border-bottom: 1px solid var(--line); padding-bottom: 0.25rem; }
h3 { font-size: 1rem; margin: 1.25rem 0 0.5rem; }
h1, h2, h3, p, li, code { overflow-wrap: anywhere; }
.table { overflow-x: auto; }
table { border-collapse: collapse; margin: 0.75rem 0; }
th, td { border: 1px solid var(--line); padding: 0.25rem 0.6rem; text-align: left; vertical-align: top; }
th { background: var(--stripe); white-space: nowrap; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
code { font: 0.9em ui-monospace, monospace; background: var(--stripe); padding: 0.1em 0.3em; border-radius: 0.2rem; }
img { display: block; width: 100%; margin: 1rem 0; border: 1px solid var(--line); border-radius: 0.4rem; }
"""
