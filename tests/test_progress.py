"""Progress: lines in a log file, a spinner on a terminal."""

from __future__ import annotations

import ast
import io
import os
import pty
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from torchtitan_npu import progress
from torchtitan_npu.cli.main import COMMANDS
from torchtitan_npu.progress import Progress, waiting_for


def wait_for(found: io.StringIO, text: str) -> None:
    while text not in found.getvalue():
        time.sleep(0.001)


def test_a_log_gets_a_line_in_each_interval() -> None:
    log = io.StringIO()
    with Progress("first part", log, interval_s=0.001) as shown:
        wait_for(log, "first part")
        shown.update("second part", 0.5)
        wait_for(log, "second part")
    lines = log.getvalue().splitlines()
    assert re.fullmatch(r"first part \(0 s\)", lines[0])
    assert re.fullmatch(r"second part \(0 s, about 0 s left\)", lines[-1])


def test_the_time_left() -> None:
    shown = Progress("work")
    shown.start -= 30
    assert shown.line() == "work (30 s)"
    shown.update("work", 0.25)
    assert shown.line() == "work (30 s, about 90 s left)"
    shown.update("work", 1)
    assert shown.line() == "work (30 s)"


def test_short_work_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("work"):
        pass
    assert list(waiting_for([1, 2], "work", 3)) == [1, 2]
    assert capsys.readouterr().err == ""


def test_many_short_items_print_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The interval does not begin again with each item."""
    monkeypatch.setattr(progress, "LINE_INTERVAL_S", 0.05)
    items = (time.sleep(0.001) for _ in range(2000))
    shown = next((line for _ in waiting_for(items, "work", 2000) if (line := capsys.readouterr().err)), "")
    assert re.fullmatch(r"work, \d+ of 2000 done \(\d s\)\n", shown)


def test_a_hidden_line_is_not_drawn() -> None:
    log = io.StringIO()
    with Progress("work", log, interval_s=0.001) as shown:
        wait_for(log, "work")
        with shown.hidden():
            before = log.getvalue()
            time.sleep(0.01)
            assert log.getvalue() == before


def texts_of(path: Path) -> Iterator[str]:
    """Yield the constant beginning of each text that a module shows."""
    for call in ast.walk(ast.parse(path.read_text())):
        if isinstance(call, ast.Call):
            name = ast.unparse(call.func)
            if name in ("Progress", "progress.update", "waiting_for"):
                text = call.args[name == "waiting_for"]
                first = text.values[0] if isinstance(text, ast.JoinedStr) else text
                yield first.value if isinstance(first, ast.Constant) else ast.unparse(text)


def test_texts_have_one_form() -> None:
    """The command, then what it is doing: ``plan: checking the job``."""
    package = Path(progress.__file__).parent
    files = [*package.glob("planner/*.py"), *package.glob("cli/**/*.py")]
    texts = [text for file in files for text in texts_of(file)]
    form = re.compile(rf"({'|'.join(COMMANDS)}): (\w+ing\b.*)?")
    assert len(texts) > 20 and [text for text in texts if not form.fullmatch(text)] == []


def test_only_rank_0_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    log = io.StringIO()
    with Progress("work", log, interval_s=0.001):
        time.sleep(0.01)
    assert log.getvalue() == ""


def read_to_end(terminal: int) -> bytes:
    """Read what has been written to a pseudo-terminal whose other end is closed. It may arrive in several parts."""
    parts = []
    with suppress(OSError):  # Linux's end of file
        while part := os.read(terminal, 10_000):
            parts.append(part)
    return b"".join(parts)


def test_a_terminal_shows_one_line_and_removes_it() -> None:
    reader, writer = pty.openpty()
    with open(writer, "w") as terminal, Progress("work" * 100, terminal) as shown:
        time.sleep(0.2)
        with shown.hidden():
            terminal.write("printed\n")
            terminal.flush()
        time.sleep(0.2)
    written = read_to_end(reader).decode()
    os.close(reader)
    before, after = written.split("printed\r\n")
    for part in (before, after):
        lines = re.sub(r"\x1b\[[?\d]*[A-Za-z]|\r", "\n", part).split("\n")
        assert any(line[1:6] == " work" for line in lines) and max(map(len, lines)) <= 80
    assert "\x1b[1A" not in after.split(" work")[0]  # what was printed stays
    assert before.endswith("\x1b[2K") and after.endswith("\x1b[2K")


def test_an_error_ends_it() -> None:
    log = io.StringIO()
    with pytest.raises(ValueError, match="stop"), Progress("work", log, interval_s=0.001) as shown:
        raise ValueError("stop")
    assert not shown._thread.is_alive()
