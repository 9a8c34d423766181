"""The README's example runs as printed, and its promises about length hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def test_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert sum(bool(line.strip()) for line in example.splitlines()) <= 10
    exec(compile(example, "README.md", "exec"), {})
    assert "torch.Size([16, 1, 28, 28])" in capsys.readouterr().out
    assert (tmp_path / "runs" / "first" / "status.json").is_file()


def test_stays_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 90
