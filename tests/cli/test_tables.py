"""Tables by commands alone: a proposed schema, a federation by a schema, rows that are handed on, mistakes."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedloom.cli import app
from fedloom.experiment import load
from fedloom.release.export import load_generators
from mixed_rows import SCHEMA, rows, schema, schema_file, write_rows


def said(*words: str, code: int = 0) -> str:
    """What a command prints; on one line."""
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def test_a_schema_is_proposed_shown_or_written_once(tmp_path: Path) -> None:
    file, out = str(write_rows(tmp_path / "a.csv", rows(60))), tmp_path / "proposed.toml"
    shown = CliRunner().invoke(app, ["data", "schema", file]).output
    said("data", "schema", file, "--out", str(out))
    assert out.read_text(encoding="utf-8") == shown
    assert tomllib.loads(shown)["columns"]["sex"]["levels"] == ["female", "male"]
    assert "exists already; nothing was written" in said("data", "schema", file, "--out", str(out), code=2)
    assert "say table data.path=" in said("data", "show", file, code=2)


def test_a_federation_is_founded_by_a_schema(tmp_path: Path) -> None:
    found, file = schema(tmp_path), str(tmp_path / "schema.toml")
    init = ("federation", "init", str(tmp_path / "wards"), "--silos", "a,b", "--address", "localhost:8443")
    assert "leave out --shape and --modality" in said(*init, "--schema", file, "--shape", "8", code=2)
    assert "--shape is missing" in said(*init, code=2)
    said(*init, "--schema", file)
    charter = tomllib.loads((tmp_path / "wards" / "federation.toml").read_text(encoding="utf-8"))["charter"]
    assert charter["shape"] == [8]
    assert charter["modality"] == f"table/{found.text}"


def test_rows_are_learned_and_handed_on_with_their_rules(tmp_path: Path) -> None:
    schema_file(tmp_path)
    write_rows(tmp_path / "a.csv", rows(80))
    write_rows(tmp_path / "b.csv", rows(80, 1))
    run, out = str(tmp_path / "run"), tmp_path / "out"
    small = ("method.components=20", "method.steps=50", "privacy.unit=subject", "method.rows=2")
    told = said("run", "tables/demo", "data.source=table", f"data.path={tmp_path}", *small, "--out", run)
    assert "--out grid.csv" in told
    assert "guessing: 50%" in said("audit", run)
    assert "--attack canaries needs a run with canaries" in said("audit", run, "--attack", "canaries", code=2)
    said("synthesize", run, "--n", "50", "--format", "csv", "--out", str(out), "--accept-risk")
    assert len((out / "data" / "train.csv").read_text(encoding="utf-8").splitlines()) == 51
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "Every record keeps to these rules" in card
    assert "admitted &lt;= discharged" in card
    manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["columns"]["age"] == "int64"
    assert manifest["columns"]["discharged"] == "date32"
    assert "--format onnx holds numbers alone, and rows of 8 columns are more; use safetensors" in said(
        "export", run, "--format", "onnx", "--out", str(tmp_path / "graph"), "--accept-risk", code=2
    )
    said("export", run, "--out", str(tmp_path / "generators"), "--accept-risk")
    ours, theirs = (
        found.sample(30, group="all", seed=2) for found in (load(run), load_generators(tmp_path / "generators"))
    )
    np.testing.assert_array_equal(ours.numpy(), theirs.numpy())  # no value is like no value
    said("report", run)
    said("inspect", run)


@pytest.mark.parametrize(
    ("schema_text", "complaint"),
    [
        (SCHEMA.replace("[0.5, 200]", "[0.5, 20]"), "a: column 'weight' has"),
        (SCHEMA.replace('"some", ', ""), "cells that are not a level of the schema"),
        (SCHEMA.replace("admitted <=", "admited <="), "unknown column 'admited'; did you mean 'admitted'?"),
        (SCHEMA + "kind = [", "schema.toml is not valid TOML"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path: Path, schema_text: str, complaint: str) -> None:
    schema_file(tmp_path, schema_text)
    write_rows(tmp_path / "a.csv", rows(40))
    assert complaint in said("data", "show", "table", f"data.path={tmp_path}", code=2)
