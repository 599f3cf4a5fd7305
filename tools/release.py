"""Make a release of this checkout: version, commit, wheel, tag and notes.

    python tools/release.py 0.2.0 --dry-run    # check, print the notes and the commands, change nothing
    python tools/release.py 0.2.0

CHANGELOG.md must have a section ``## 0.2.0``: the text of the tag and of dist/notes-0.2.0.md. Nothing is pushed.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def notes(changelog: str, version: str) -> str:
    """Return the section of ``version``, without its heading."""
    section = re.search(rf"^## {re.escape(version)}\b.*?\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if not section or not section[1].strip():
        raise SystemExit(f"CHANGELOG.md has no section '## {version}' with text")
    return section[1].strip() + "\n"


def main(argv: list[str], root: Path = ROOT) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="such as 0.2.0")
    parser.add_argument("--dry-run", action="store_true", help="change nothing")
    args = parser.parse_args(argv)
    git, tag = ["git", "-C", str(root)], f"v{args.version}"
    project, file = root / "pyproject.toml", root / f"dist/notes-{args.version}.md"
    text = notes((root / "CHANGELOG.md").read_text(), args.version)
    if subprocess.run([*git, "rev-parse", "-q", "--verify", f"refs/tags/{tag}"], capture_output=True).returncode == 0:
        raise SystemExit(f"the tag {tag} exists")
    if not args.dry_run and subprocess.run([*git, "status", "--porcelain"], capture_output=True).stdout:
        raise SystemExit("commit or stash the changes of this checkout first")
    bumped = re.sub(
        r'^version = ".*"$', f'version = "{args.version}"', project.read_text(), count=1, flags=re.MULTILINE
    )
    if not args.dry_run:
        project.write_text(bumped)
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    for command in (
        [*git, "commit", "--allow-empty", "-m", f"Release {args.version}", "pyproject.toml"],
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", str(root / "dist"), str(root)],
        [*git, "tag", "-a", tag, "-F", str(file)],
    ):
        print(shlex.join(command))
        if not args.dry_run:
            subprocess.run(command, check=True)
    print(f"\n{text}\nNext: git push origin HEAD {tag}, and publish the wheel of dist/ with these notes.")


if __name__ == "__main__":
    main(sys.argv[1:])
