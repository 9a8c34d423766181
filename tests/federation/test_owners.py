"""Who holds what is never lost without a word: records that have owners are dealt anew only where it is asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedloom.cli import app
from fedloom.errors import ConfigError
from fedloom.experiment import Experiment, resume, train
from support import tiny_config

HOSPITALS = ("hospital-a", "hospital-b", "hospital-c")


@pytest.fixture
def records(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (60, 28, 28), dtype=np.uint8)
    np.savez(tmp_path / "own.npz", x_train=pixels, owner_train=np.tile(HOSPITALS, 20))
    return tmp_path / "own.npz"


def settings(records: Path) -> list[str]:
    return ["data.source=npz", f"data.path={records}", "method={name='fedvae'}", "rounds=1", "local.steps=1"]


def test_a_preset_that_divides_by_itself_is_refused_in_one_sentence(records: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, ["run", "fissionvae/mixed-mnist", *settings(records), "--out", str(tmp_path / "r")]
    )
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert (
        "'own' says who holds what (3 silos: hospital-a, hospital-b, hospital-c), and data.partition = 'groups' deals "
        "their records anew among 10 silos; data.partition = 'natural' keeps them, data.redeal = true"
    ) in result.stderr
    assert not (tmp_path / "r").exists()
    shown = CliRunner().invoke(app, ["data", "show", "npz", f"data.path={records}", "data.partition=iid"])
    assert shown.exit_code == 0
    assert "deals their records anew among 10 silos" in shown.stderr


def test_who_asks_for_it_gets_it_and_it_is_the_same_experiment(records: Path, tmp_path: Path) -> None:
    changes = [*settings(records), "data.partition=iid", "data.silos=2"]
    silent, asked = tiny_config(*changes), tiny_config(*changes, "data.redeal=true")
    assert silent.digest() == asked.digest()
    run = train(asked, tmp_path / "run")
    assert run.folder.rounds_done == 1
    # A run that an older version began has no flag, and goes on.
    text = (tmp_path / "run" / "run.toml").read_text(encoding="utf-8")
    (tmp_path / "run" / "run.toml").write_text(text.replace("redeal = true", "redeal = false"), encoding="utf-8")
    assert resume(tmp_path / "run").folder.status["state"] == "finished"
    with pytest.raises(ConfigError, match=r"deals their records anew among 2 silos; .* data\.redeal = true"):
        train(silent, tmp_path / "other")


@pytest.mark.parametrize("changes", [("data.partition=natural",), ("data.partition=iid", "data.layout=centralised")])
def test_nothing_is_asked_where_nothing_is_lost(changes: tuple[str, ...], records: Path) -> None:
    """All in one place is no other silo's."""
    experiment = Experiment.of(tiny_config(*settings(records), *changes))
    assert experiment.federation.redealt == ()
