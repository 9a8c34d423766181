"""The examples run as they are, print what they found, and stay short."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from fedloom.runs.folder import RunFolder
from support import names_in

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


def call(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> None:
    """As `python examples/NAME.py ARGUMENTS`."""
    (example,) = (path for path in EXAMPLES if path.stem == name)
    monkeypatch.setattr("sys.argv", [str(example), *map(str, arguments)])
    runpy.run_path(str(example), run_name="__main__")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short(example: Path) -> None:
    assert len(example.read_text(encoding="utf-8").splitlines()) < 60


def test_fissionvae_tour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    call("fissionvae_tour", monkeypatch, "--out", tmp_path / "out", "--rounds", "1", "--records", "40")
    lines = capsys.readouterr().out.splitlines()
    variants = ["FedVAE", "+L", "+D", "+L+D", "+H+L+D"]
    assert [line.split()[0] for line in lines[:-1]] == variants
    grids = [f"{variant} {group}.png" for variant in variants for group in ("mnist", "fashion-mnist")]
    assert names_in(tmp_path / "out") == sorted([*variants, *grids])


def test_private_decoders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    call("private_decoders", monkeypatch, "--out", tmp_path / "out", "--epsilon", "6")
    printed = capsys.readouterr().out
    assert all(f"silo-{number}: epsilon 5.9" in printed for number in range(3))  # calibrated: never more than granted
    assert printed.count(" of 6 spent") == 3
    audit = RunFolder.open(tmp_path / "out").audit
    assert audit is not None
    assert not audit["refuted"]
    assert all(sentence in printed for sentence in audit["sentences"])


def test_embeddings_to_classifier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call("embeddings_to_classifier", monkeypatch, "--out", tmp_path / "out")
    guarantee, *rows = capsys.readouterr().out.splitlines()
    assert guarantee.startswith("(7.9")
    right = {row.split()[0]: float(row.split()[1].rstrip("%")) for row in rows}
    assert list(right) == [
        "silo-only",
        "synthetic-only",
        "synthetic-only+prior",
        "mixture",
        "mixture+prior",
        "centralised",
    ]
    assert right["centralised"] > right["silo-only"] > 30  # ten classes: 10 is a guess
