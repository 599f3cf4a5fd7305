"""The Dockerfile installs with the commands of docs/how-to/install.md."""

from __future__ import annotations

import re

from tools.check_docs import ROOT, fences


def test_the_dockerfile_runs_the_commands_of_the_install_page() -> None:
    section = (ROOT / "docs/how-to/install.md").read_text().partition("## On a CPU")[2]
    code = next(code for _, _, code in fences(section) if "constraints.txt" in code)
    dockerfile = (ROOT / "Dockerfile").read_text()
    runs = [command for line in re.findall(r"^RUN (.*)$", dockerfile, re.MULTILINE) for command in line.split(" && ")]
    commands = [command for line in code.splitlines() for command in line.split(" && ")]
    assert [command for command in runs if not re.match(r"apt-get|rm ", command)] == commands
