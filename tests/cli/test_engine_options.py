"""``--engine``, ``--device`` and ``--precision`` of ``fedloom run`` and ``fedloom resume``."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result

from fedloom import experiment
from fedloom.config import Config, EngineConfig
from fedloom.errors import FedloomError
from fedloom.runs.folder import RunFolder

Command = Callable[..., Result]
Refused = Callable[..., str]

OPTIONS = [
    ([], {}),
    (["--engine", "fused"], {"name": "fused"}),
    (["--engine", "reference", "--device", "cpu"], {"name": "reference", "device": "cpu"}),
    (["--device", "cuda", "--precision", "bf16"], {"device": "cuda", "precision": "bf16"}),
    (["--engine", "auto", "--device", "auto", "--precision", "tf32"], {"precision": "tf32"}),
]


@pytest.mark.parametrize(("options", "settings"), OPTIONS, ids=lambda value: " ".join(value))
def test_what_is_said_of_the_engine_reaches_a_new_run(
    options: list[str], settings: dict[str, Any], refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Config] = []

    def noted(config: Config, *_: object, **__: object) -> None:
        seen.append(config)
        raise FedloomError("that is all")

    monkeypatch.setattr(experiment, "train", noted)
    assert "that is all" in refused("run", "demo", *options, "--out", tmp_path / "out")
    assert [config.engine for config in seen] == [EngineConfig(**settings)]


@pytest.mark.parametrize("options", [options for options, _ in OPTIONS], ids=" ".join)
def test_what_is_said_of_the_engine_reaches_a_run_that_goes_on(
    options: list[str], refused: Refused, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, str]] = []

    def noted(*_: object, engine: dict[str, str], **__: object) -> None:
        seen.append(engine)
        raise FedloomError("that is all")

    monkeypatch.setattr(experiment, "resume", noted)
    assert "that is all" in refused("resume", finished, *options)
    said = dict(zip([name.removeprefix("--") for name in options[::2]], options[1::2], strict=True))
    assert seen == [{"name" if name == "engine" else name: value for name, value in said.items()}]


def test_an_option_outranks_the_file_and_the_override(fedloom: Command, tiny_toml: Path, tmp_path: Path) -> None:
    result = fedloom("run", tiny_toml, "engine.name=reference", "--engine", "fused", "--out", tmp_path / "out")
    assert result.exit_code == 0
    folder = RunFolder.open(tmp_path / "out")
    assert folder.config.engine.name == "fused"
    assert folder.environment["engine"].startswith("fused on cpu, float32")
    assert "engine  fused on cpu, float32" in result.stdout


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--engine", "fast"], "engine.name: unknown value 'fast'"),
        (["--device", "tpu"], "engine.device: unknown value 'tpu'; did you mean 'cpu'? (allowed: auto, cpu, cuda)"),
        (["--precision", "float16"], "engine.precision: unknown value 'float16'"),
        (["--device", "cuda"], "engine.device = 'cuda', but no CUDA device can be used here; ask for 'cpu' or 'auto'"),
        (["--engine", "fused", "--device", "cuda"], "engine.device = 'cuda', but no CUDA device can be used here"),
        (["--precision", "bf16"], "engine.precision = 'bf16' needs a CUDA device; on the cpu it is 'float32'"),
        (["--engine", "reference", "--precision", "tf32"], "engine.precision = 'tf32' needs engine.name = 'fused'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_had_is_one_sentence(
    options: list[str],
    sentence: str,
    refused: Refused,
    tiny_toml: Path,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert sentence in refused("run", tiny_toml, *options, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    stopped = shutil.copytree(finished, tmp_path / "stopped")
    (stopped / "status.json").unlink()
    assert sentence in refused("resume", stopped, *options)
