"""How long a new user waits: the blocks and commands of two how-tos, one after the other.

    python benchmarks/first_minutes.py

Each command is a process of its own in a new folder, as in a person's terminal.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import keep, show

PAGES = [Path(__file__).parents[1] / "docs" / "how-to" / name for name in ("first-data.md", "first-dicom.md")]
PYTHON_BLOCK = r"^```python\n(?P<python>.*?)^```"
PART = re.compile(PYTHON_BLOCK + r"|^    (?P<command>fedloom [^\n]*)|^##? (?P<title>[^\n]*)$", re.M | re.S)
PYTHON, COMMAND, TITLE = "python", "command", "title"


def parts() -> list[tuple[str, str]]:
    """What the pages have, in their order: titles, blocks of Python, and commands."""
    return [
        (str(found.lastgroup), found[str(found.lastgroup)])
        for page in PAGES
        for found in PART.finditer(page.read_text("utf-8"))
    ]


def seconds(command: str) -> tuple[float, int]:
    """By the clock, and the exit code."""
    start = time.perf_counter()
    words = shlex.split(command, comments=True)[1:]
    done = subprocess.run([sys.executable, "-m", "fedloom", *words], capture_output=True, text=True, check=False)
    return time.perf_counter() - start, done.returncode


def main() -> None:
    rows: list[dict[str, Any]] = []
    names: dict[str, Any] = {}
    title = ""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for kind, text in parts():
            if kind == TITLE:
                title = text
            elif kind == PYTHON:
                with contextlib.redirect_stdout(io.StringIO()):
                    exec(text, names)
            else:
                took, code = seconds(text)
                rows.append({"data": title, "command": text, "seconds": round(took, 1), "exit_code": code})
    show("first-minutes", rows)
    print(f"{sum(row['seconds'] for row in rows):.0f} s in all")
    keep("first-minutes-cpu", rows)


if __name__ == "__main__":
    main()
