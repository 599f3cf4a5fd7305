"""Hooks of mkdocs.yml: navigation from the indexes, pages from outside docs/, fences and links as GitHub has them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {
    "README.md": "quick-start.md",
    "README.zh-CN.md": "zh-CN/quick-start.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Files of the repository that are pages of the site, too, and their address there."""


def sections(index: str) -> dict[str, list[Any]]:
    """Return the pages that docs/README.md or its translation links below each heading, as entries of the navigation.

    The name of a section is its heading up to the colon. Links out of the folder, to pages in English, are left out.
    """
    folder, text = os.path.dirname(index), (ROOT / "docs" / index).read_text()
    found: dict[str, list[Any]] = {}
    for heading, tables in re.findall(r"^## (.+?)[:：].*?\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL):
        links = re.findall(r"\[([^\]]+)\]\(([\w/-]+\.md)\)", tables)
        found[heading] = [{title: os.path.join(folder, page)} for title, page in links]
    return found


def on_config(config: MkDocsConfig) -> None:
    """Build the navigation."""
    english: dict[str, list[Any]] = {
        "Home": ["README.md", {"Quick start": "quick-start.md"}],
        **sections("README.md"),
        "Code": [
            {"Architecture": "architecture.md"},
            {"Contributing": "contributing.md"},
            {"Changelog": "changelog.md"},
        ],
    }
    chinese = [{name: pages} for name, pages in sections("zh-CN/README.md").items() if pages]
    config.nav = [{name: pages} for name, pages in english.items()]
    config.nav.append({"中文": ["zh-CN/README.md", {"快速上手": "zh-CN/quick-start.md"}, *chinese]})


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages from outside docs/."""
    for source, address in OUTSIDE.items():
        files.append(File.generated(config, address, content=(ROOT / source).read_text()))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Remove the mark of runnable fences, and let links lead to the pages of the site."""
    address = page.file.src_uri
    source = next((source for source, there in OUTSIDE.items() if there == address), f"docs/{address}")

    def link(match: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(os.path.dirname(source), match[1]))
        if source not in OUTSIDE and target not in OUTSIDE:
            return match[0]
        there = OUTSIDE.get(target, target.removeprefix("docs/"))
        return f"]({os.path.relpath(there, os.path.dirname(address) or '.')}"

    markdown = re.sub(r"^(\s*```\w+) run$", r"\1", markdown, flags=re.MULTILINE)
    return re.sub(r"\]\((?!\w+:|#)([^)#\s]+)", link, markdown)


def on_page_context(context: dict[str, Any], page: Page, config: MkDocsConfig, nav: Any) -> None:
    """Give buttons and labels the language of the page."""
    config.theme["language"] = "zh" if page.file.src_uri.startswith("zh-CN/") else "en"
