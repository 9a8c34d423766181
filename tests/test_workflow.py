"""Everything a person needs is a function of the package, and shows itself on one screen."""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedloom
from fedloom.errors import ConfigError
from fedloom.experiment.inline import InlineProgress
from fedloom.federation.building import federation_from_arrays
from fedloom.federation.records import Federation
from fedloom.privacy.ledger import Ledger
from fedloom.shown import MOST_ROWS, Shown
from support import tiny_config


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> fedloom.Run:
    return fedloom.train(tiny_config("evaluation.metrics=['spread']"), tmp_path_factory.mktemp("workflow") / "run")


def test_no_public_name_is_a_modules_too() -> None:
    """Else an import somewhere would put the module in its place."""
    assert {module.name for module in pkgutil.iter_modules(fedloom.__path__)} & set(fedloom.__all__) == set()
    for name in fedloom.__all__:
        assert getattr(fedloom, name).__doc__


def test_the_package_is_imported_without_torch() -> None:
    program = "import sys, fedloom; dir(fedloom); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_run_is_measured_attacked_reported_certified_and_handed_on(run: fedloom.Run, tmp_path: Path) -> None:
    """By itself or by its folder, at places that are texts or paths."""
    found = fedloom.evaluate(str(run.folder.path), metrics=["spread"], samples=16)
    assert len(found) == 2
    assert all(key.startswith("spread/") and "/n16/group=" in key for key in found)
    assert fedloom.audit_run(run, attacks=["membership"])["refuted"] is False
    assert fedloom.report(run, str(tmp_path / "one.html")).read_text(encoding="utf-8").startswith("<!")
    assert fedloom.report([run, run.folder.path], tmp_path / "two.html").is_file()
    made = fedloom.synthesize(run, str(tmp_path / "synthetic"), 8, form="npz", accept_risk=True)
    assert made["records"] == 8
    assert fedloom.certify(run, tmp_path / "certificate").verdict
    assert json.loads((tmp_path / "certificate" / "certificate.json").read_text(encoding="utf-8"))["sections"]
    with pytest.raises(ConfigError, match="no runs to report"):
        fedloom.report([])


def test_a_sweep_goes_over_its_grid(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(tiny_config("rounds=1").to_toml(), encoding="utf-8")
    (tmp_path / "sweep.toml").write_text('base = "tiny.toml"\n[grid]\nseed = [1, 2]\n', encoding="utf-8")
    outcomes = fedloom.run_sweep(str(tmp_path / "sweep.toml"), str(tmp_path / "out"))
    assert [outcome.state for outcome in outcomes.values()] == ["finished", "finished"]


def test_images_become_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "cache"))
    pixels = np.random.default_rng(0).integers(0, 256, (20, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "own.npz", x_train=pixels)
    about = fedloom.embed(tmp_path / "own.npz", str(tmp_path / "out.npz"), backbone="pixels")
    assert (about["train"], about["test"], about["dimension"]) == (18, 2, 64)


@pytest.fixture
def arrays() -> Federation:
    """Forty silos, one with a name that a page must not take for markup."""
    names = ["<b>north</b>", *(f"silo-{number}" for number in range(39))]
    return federation_from_arrays({name: torch.full((3, 1, 4, 4), 0.1234) for name in names})


def test_a_federation_is_one_screen_without_a_pixel(arrays: Federation) -> None:
    text = str(arrays)
    assert len(text.splitlines()) == 1 + 2 + 1 + MOST_ROWS + 1
    assert text.splitlines()[0] == "arrays: 40 silos"
    assert text.splitlines()[-1] == "and 20 more"
    assert "1234" not in text
    html = arrays._repr_html_()
    assert "&lt;b&gt;north" in html
    assert "<b>north" not in html


def test_a_run_shows_itself_with_what_it_promises_and_makes(run: fedloom.Run) -> None:
    lines = str(run).splitlines()
    assert lines[1] == "fissionvae is finished, 2 of 2 rounds done"
    assert lines[2].startswith("privacy: no DP guarantee")
    html = run._repr_html_()
    assert html.count("data:image/png;base64,") == 2  # a grid for each group
    assert "samples of mnist" in html
    assert "no metrics yet" not in str(run.table())
    assert run.grid(4, group="mnist").size == (2 * 30 + 2, 2 * 30 + 2)


def test_a_ledger_shows_what_was_spent(tmp_path: Path) -> None:
    private = tiny_config("privacy.mechanism=dp-sgd", "privacy.epsilon=5", "rounds=1")
    made = fedloom.train(private, tmp_path / "run")
    ledger = Ledger(made.folder.ledger, read_only=True)
    html = ledger._repr_html_()
    ledger.close()
    assert html.count("<tr>") == 1 + 4
    assert "fashion-mnist-1" in html


def test_a_run_remembers_the_federation_that_it_was_given(tmp_path: Path) -> None:
    federation = federation_from_arrays({"a": torch.rand(30, 1, 28, 28), "b": torch.rand(30, 1, 28, 28)})
    config = tiny_config("method={name='fedvae'}", "rounds=1", "evaluation.metrics=['spread']")
    made = fedloom.train(config, tmp_path / "run", federation)
    assert fedloom.evaluate(made, samples=8)
    assert "rand" not in repr(made)


def test_a_notebook_sees_a_line_that_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    class Handle:
        def update(self, value: Shown) -> None:
            shown.append(str(value))

    def display(value: Shown, display_id: bool) -> Handle:
        shown.append(str(value))
        return Handle()

    real = importlib.import_module
    page: Any = type("Page", (), {"display": staticmethod(display)})
    monkeypatch.setattr(importlib, "import_module", lambda name: page if name == "IPython.display" else real(name))
    fedloom.train(tiny_config("rounds=3"), tmp_path / "run", observer=InlineProgress(seconds=0))
    assert shown[0].startswith("fissionvae on mixed-mnist-sample, reference")
    assert [line.splitlines()[1].partition(":")[0] for line in shown[1:]] == [f"round {n} of 3" for n in (1, 2, 3)]
    assert shown[-1].endswith("; 0 s left")
