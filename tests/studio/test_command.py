"""``fedloom studio``: what it says, and what it says when it cannot."""

from __future__ import annotations

import builtins
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedloom.cli import app


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["studio", str(tmp_path / "nowhere")])
    assert found.exit_code == 2
    assert f"there is no folder '{tmp_path / 'nowhere'}'; name the folder that your runs lie in" in found.stderr


def test_without_its_packages_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "uvicorn":
            raise ImportError("no module", name="uvicorn")
        return imported(name, *rest)

    for name in [name for name in sys.modules if name.startswith("fedloom.studio.server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    found = CliRunner().invoke(app, ["studio", str(tmp_path)])
    assert found.exit_code == 2
    assert "the studio needs the package 'uvicorn'; install it with: pip install 'fedloom[studio]'" in found.stderr
