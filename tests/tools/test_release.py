"""tools/release.py in a repository of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools import release

CHANGELOG = "# Changelog\n\n## Unreleased\n\n- Later.\n\n## 0.2.0 (2026-12-01)\n\n- Faster.\n\n## 0.1.0\n\n- First.\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "0.1.0"\n')
    git(tmp_path, "init", "-q")
    return tmp_path


def git(folder: Path, *arguments: str) -> str:
    settings = ("-c", "user.name=Test", "-c", "user.email=test@example.org")
    return subprocess.run(["git", *settings, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


def test_a_dry_run_prints_commands_and_notes_and_changes_nothing(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    release.main(["0.2.0", "--dry-run"], checkout)
    printed = capsys.readouterr().out
    assert "tag -a v0.2.0" in printed and "pip wheel" in printed and "\n- Faster.\n" in printed
    assert "Later" not in printed and "First" not in printed
    assert 'version = "0.1.0"' in (checkout / "pyproject.toml").read_text() and not (checkout / "dist").exists()


def test_a_release_needs_a_section_of_the_changelog(checkout: Path) -> None:
    with pytest.raises(SystemExit, match=r"no section '## 0\.3\.0'"):
        release.main(["0.3.0", "--dry-run"], checkout)


def test_a_release_needs_a_new_tag(checkout: Path) -> None:
    git(checkout, "add", ".")
    git(checkout, "commit", "-q", "-m", "First")
    git(checkout, "tag", "v0.2.0")
    with pytest.raises(SystemExit, match=r"the tag v0\.2\.0 exists"):
        release.main(["0.2.0", "--dry-run"], checkout)


def test_changes_must_be_committed_first(checkout: Path) -> None:
    with pytest.raises(SystemExit, match="commit or stash"):
        release.main(["0.2.0"], checkout)
