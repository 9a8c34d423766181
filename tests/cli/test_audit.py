"""``fedloom audit`` from end to end: a planted fault is caught, and what was found is shown wherever a run is shown."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from PIL import Image

from fedloom.privacy.dp_sgd import DPSGD
from html_pages import Page
from support import tiny_config

Command = Callable[..., Result]
Refused = Callable[..., str]

PRIVATE = ("privacy.mechanism=dp-sgd", "privacy.noise_multiplier=12", "privacy.accountant=rdp", "engine.name=reference")
OVERFITTING = (
    "local.epochs=40",
    "local.learning_rate=0.01",
    "model.hidden=[64]",
    "model.latent=32",
    "model.kl_weight=0.1",
)


@pytest.fixture(scope="module")
def toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One silo of 54 small images of noise with 200 canaries."""
    folder = tmp_path_factory.mktemp("audited")
    values = np.random.default_rng(0).integers(0, 256, (60, 8, 8), dtype=np.uint8)
    np.savez(folder / "noise.npz", x_train=values)
    settings = ("rounds=1", "data.source=npz", f"data.path='{folder / 'noise.npz'}'", "data.partition=iid")
    config = tiny_config(*settings, "data.silos=1", "method={name='fedvae'}", "audit.canaries=200", *PRIVATE)
    (folder / "audited.toml").write_text(config.to_toml())
    return folder / "audited.toml"


@pytest.fixture(scope="module")
def faulty(fedloom: Command, toml: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose noise is switched off, although its ledger charges for noise."""
    out = tmp_path_factory.mktemp("runs") / "faulty"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DPSGD, "gradient_noise", 0.0)
        assert fedloom("run", toml, *OVERFITTING, "--out", out).exit_code == 0
    return out


def test_noise_that_was_switched_off_is_caught(fedloom: Command, faulty: Path) -> None:
    result = fedloom("audit", faulty, "--attack", "canaries")
    assert result.exit_code == 1
    text = " ".join(result.stdout.split())
    assert "canaries: the claim of epsilon" in text
    assert "is refuted" in text
    found = json.loads((faulty / "audit.json").read_text())
    canaries = found["attacks"]["canaries"]
    assert canaries["claimed"] < 1 < canaries["lower_bound"]
    coins = json.loads((faulty / "canaries.json").read_text())["included"]["silo-0"]
    assert (len(coins), sum(coins)) == (200, canaries["included"])


def test_an_honest_run_is_not_refuted_and_that_proves_nothing(fedloom: Command, toml: Path, tmp_path: Path) -> None:
    assert fedloom("run", toml, *OVERFITTING, "--out", tmp_path / "honest").exit_code == 0
    result = fedloom("audit", tmp_path / "honest", "--json", "--confidence", "0.9")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    privacy = found.pop("privacy")
    assert found == json.loads((tmp_path / "honest" / "audit.json").read_text())
    assert privacy["guarantee"] == found["claimed"]
    assert 0 < privacy["epsilon"] <= 1000
    assert found["confidence"] == found["attacks"]["canaries"]["confidence"] == 0.9
    assert "no evidence of privacy" in found["sentences"][0]
    assert found["attacks"]["canaries"]["scores"] == {"silo-0": "loss"}
    assert {row["attack"] for row in found["attacks"]["membership"]} == {
        *("loss", "closest output", "nearest sample", "density of samples")
    }
    assert "none were put in" in found["sentences"][-1]


def test_canaries_mark_a_run_wherever_it_is_shown(fedloom: Command, faulty: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(faulty, tmp_path / "run"))
    assert fedloom("audit", run, "--attack", "canaries").exit_code == 1
    mark = "not for release: 200 canaries were put among its training records"
    shown = " ".join(fedloom("inspect", run).stdout.split())
    assert mark in shown
    assert "audit of round 1, canaries: the claim of epsilon" in shown
    sampled = fedloom("sample", run, "--group", "all", "--n", "1", "--out", tmp_path / "grid.png")
    assert mark in sampled.stderr
    assert fedloom("report", run).exit_code == 0
    page = Page((run / "report.html").read_text(encoding="utf-8"))
    numbers = json.loads((run / "report.json").read_text())["runs"][0]
    assert {"refuted", "not-for-release"} <= {finding["kind"] for finding in numbers["findings"]}
    assert numbers["audit"]["refuted"] is True
    assert "The claim of privacy is refuted by an attack: canaries: the claim of epsilon" in page.text


def test_outliers_are_counted_and_drawn(fedloom: Command, tiny_toml: Path, tmp_path: Path) -> None:
    settings = ("data.source=mnist-sample", "data.partition=iid", "method={name='fedvae'}", "rounds=1")
    outliers = ("data.outliers={source='fashion-mnist-sample', share=0.5, silos=['silo-0']}",)
    run = tmp_path / "run"
    assert fedloom("run", tiny_toml, *settings, *outliers, "--out", run).exit_code == 0
    result = fedloom("audit", run, "--records", "20", "--samples", "50")
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "the run has none (audit.canaries), so no lower bound of epsilon could be found" in text
    assert "privacy: no DP guarantee" in text
    rows = json.loads((run / "audit.json").read_text())["attacks"]["outliers"]
    assert [row["counts"]["outliers"] for row in rows] == [20, 20]
    with Image.open(run / "audit" / "outliers-group_mnist.png") as image:
        assert image.size == (10 * 30 + 2, 3 * 30 + 2)
    assert fedloom("report", run).exit_code == 0
    page = Page((run / "report.html").read_text(encoding="utf-8"))
    assert "the closest output of the generator that a search found" in page.text
    assert "held-out records" in page.text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--attack", "canary"], ["unknown attack 'canary'", "did you mean 'canaries'"]),
        (["--attack", "canaries"], ["--attack canaries needs a run with canaries"]),
        (["--attack", "outliers"], ["--attack outliers needs a run with outliers"]),
        (["--confidence", "2"], ["confidence = 2.0 must be at least 0.5 and below 1"]),
        (["--round", "9"], ["no checkpoint of round 9"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_mistakes_are_named(refused: Refused, finished: Path, arguments: list[str], words: list[str]) -> None:
    sentence = refused("audit", finished, *arguments)
    assert all(word in sentence for word in words), sentence


def test_a_damaged_audit_is_named(fedloom: Command, refused: Refused, finished: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "damaged"))
    (run / "audit.json").write_text("{")
    assert "audit.json is damaged" in refused("inspect", run)
