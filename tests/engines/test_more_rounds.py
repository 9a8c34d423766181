"""A run that is trained on is the run that would have been begun with so many rounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fedloom import Federation, load, resume, train
from fedloom.errors import ConfigError
from fedloom.runs.checkpoint import load_checkpoint
from fedloom.runs.folder import RunFolder
from support import equal_bits, federation_of, tiny_config

KEPT = ("sharing.scopes.encoder=silo", "local.keep_optimizer=true")
PRIVATE = ("privacy.mechanism=dp-sgd", "local.batch_size=4", "privacy.noise_multiplier=1", "privacy.noise=test")


@pytest.fixture
def federation() -> Federation:
    return federation_of([0] * 9, [1] * 8, [0] * 7)


def bits(run: Path) -> dict[str, torch.Tensor]:
    found = load_checkpoint(run)
    silos = {f"{silo}/{name}": t for silo, tensors in found.silos.items() for name, t in tensors.items()}
    return {**found.server, **silos}


@pytest.mark.parametrize("settings", [(), KEPT, ("participation.rate=0.5",)])
def test_rounds_that_are_added_are_those_of_a_longer_run(
    settings: tuple[str, ...], federation: Federation, tmp_path: Path
) -> None:
    train(tiny_config("rounds=4", *settings), tmp_path / "long", federation)
    train(tiny_config("rounds=1", *settings), tmp_path / "short", federation)
    resume(tmp_path / "short", federation, rounds=2)
    resume(tmp_path / "short", federation, rounds=4)
    assert equal_bits(bits(tmp_path / "short"), bits(tmp_path / "long"))
    run = load(tmp_path / "short")
    assert run.folder.status == {"state": "finished", "round": 4, "reason": ""}
    assert [row["round"] for row in run.metrics()] == [1, 2, 3, 4]
    terms = [{k: v for k, v in row.items() if k.startswith("train/")} for row in run.metrics()]
    assert terms == [
        {k: v for k, v in row.items() if k.startswith("train/")} for row in load(tmp_path / "long").metrics()
    ]


def test_whoever_stops_while_a_run_is_reopened_loses_nothing(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tiny_config("rounds=1"), tmp_path / "run", federation)
    monkeypatch.setattr(RunFolder, "note", lambda self, facts: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        resume(tmp_path / "run", federation, rounds=2)
    monkeypatch.undo()
    assert resume(tmp_path / "run", federation).folder.status["state"] == "finished"
    assert resume(tmp_path / "run", federation, rounds=2).folder.rounds_done == 2


@pytest.mark.parametrize(
    ("settings", "rounds", "message"),
    [
        ((), 2, r"has 2 rounds already; rounds = 2 would add none"),
        (PRIVATE, 3, r"planned for 2 rounds: more would cost more privacy than was granted"),
    ],
)
def test_what_was_promised_for_a_number_of_rounds_stays(
    settings: tuple[str, ...], rounds: int, message: str, federation: Federation, tmp_path: Path
) -> None:
    train(tiny_config("rounds=2", *settings), tmp_path / "run", federation)
    before = {file.name: file.read_bytes() for file in (tmp_path / "run").glob("*.*")}
    with pytest.raises(ConfigError, match=message):
        resume(tmp_path / "run", federation, rounds=rounds)
    assert {file.name: file.read_bytes() for file in (tmp_path / "run").glob("*.*")} == before


def test_runs_that_diverged_or_belong_to_silos_get_no_more(federation: Federation, tmp_path: Path) -> None:
    folder = train(tiny_config("rounds=1"), tmp_path / "run", federation).folder
    folder.end("diverged", 1, "no finite number")
    with pytest.raises(ConfigError, match="diverged; more rounds would begin where it broke off"):
        resume(folder.path, federation, rounds=3)
    folder.end("finished", 1)
    environment = json.loads((folder.path / "environment.json").read_text())
    folder.note({"engine_choice": {**environment["engine_choice"], "name": "flower"}})
    with pytest.raises(ConfigError, match="agreed to 1 rounds"):
        resume(folder.path, federation, rounds=3)
