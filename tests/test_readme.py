"""The README's promises about length hold; tests/test_documentation.py runs what it shows."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_example_is_short() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert sum(bool(line.strip()) for line in example.splitlines()) <= 10


def test_stays_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 135
