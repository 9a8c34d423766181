"""The command line in this process, and tiny runs made with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from fedloom.cli import app
from support import tiny_config

Command = Callable[..., Result]


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="session")
def fedloom() -> Command:
    """Call a command; what is not a person's mistake comes up as the exception that it is."""
    return invoke


@pytest.fixture(scope="session")
def tiny_toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("configuration") / "tiny.toml"
    path.write_text(tiny_config().to_toml(), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def finished(tiny_toml: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two rounds; tests that change it take a copy."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    assert invoke("run", tiny_toml, "--out", out).exit_code == 0
    return out


@pytest.fixture
def refused(fedloom: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str]:
    """Call a command that must fail with one sentence, and return that sentence."""
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDLOOM_DATA", raising=False)
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str | Path) -> str:
        result = fedloom(*arguments)
        assert (result.exit_code, result.stdout) == (2, ""), result.output
        assert result.stderr.startswith("Error: ")
        assert result.stderr.count("\n") == 1
        return result.stderr

    return call
