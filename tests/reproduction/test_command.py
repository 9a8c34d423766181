"""``fedloom reproduce``: what it prints and leaves behind, and one sentence for every mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from fedloom.cli import app


def invoke(paper: Path, *arguments: str) -> Result:
    places = ["--papers", str(paper.parent), "--out", str(paper.parents[1] / "runs")]
    return CliRunner().invoke(app, ["reproduce", *arguments, *places])


def test_a_table_is_run_written_and_not_run_again(paper: Path) -> None:
    arguments = ("tiny/table1", "--rows", "first/d", "--seeds", "1", "--set", "engine.name=reference")
    first = invoke(paper, *arguments)
    assert first.exit_code == 0, first.output
    assert first.stdout.splitlines()[0] == "1 run: 1 finished"
    text = (paper / "README.md").read_text()
    value = json.loads((paper / "results" / "table1" / "first-d-seed-0.json").read_text())["metrics"]
    assert f"| +D | 30.00 | {value['spread/pixels/n30/group=mnist']:.4f} | 0.25 | - | 1 |" in text
    again = json.loads(invoke(paper, *arguments, "--json").stdout)
    assert again == {"runs": {}, "written": []}
    (paper / "README.md").write_text(text.replace("30.00", "31.00"))
    assert json.loads(invoke(paper, "tiny/table1", "--render", "--json").stdout)["runs"] == {}
    assert (paper / "README.md").read_text() == text


def test_a_worker_that_fails_is_told_and_ends_with_1(paper: Path) -> None:
    (paper.parents[1] / "runs").write_text("in the way")
    arguments = ("tiny/table1", "--rows", "first/d", "--seeds", "1", "--set", "engine.name=reference")
    result = invoke(paper, *arguments, "--workers", "2")
    assert (result.exit_code, result.stdout.splitlines()[0]) == (1, "1 run: 1 failed")
    assert "tiny-table1-first-d-seed-0: cannot write" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tiny/tabel1"], "unknown table 'tiny/tabel1'; did you mean 'tiny/table1'?"),
        (["tiny/table1", "--rows", "frist/d"], "tiny/table1: unknown row 'frist/d'; did you mean 'first/d'?"),
        (["tiny/table1", "--set", "rounds=3"], "rounds=3 would make another experiment of row 'first/fedvae'"),
        (["tiny/table1", "--pack", "one"], "--pack = 'one' must be auto, off or a number of at least 2"),
        (["tiny/table1", "--device", "gpu"], "engine.device: unknown value 'gpu'"),
    ],
)
def test_a_mistake_is_one_sentence(paper: Path, arguments: list[str], words: str) -> None:
    result = invoke(paper, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_folder_that_cannot_be_written_is_named(paper: Path) -> None:
    (paper.parents[1] / "runs").write_text("in the way")
    result = invoke(paper, "tiny/table1", "--rows", "first/d", "--seeds", "1", "--set", "engine.name=reference")
    assert result.exit_code == 1
    assert "cannot write" in result.stderr
    (paper / "results").write_text("in the way")
    (paper.parents[1] / "runs").unlink()
    result = invoke(paper, "tiny/table1", "--rows", "first/d", "--seeds", "1", "--set", "engine.name=reference")
    assert (result.exit_code, result.stderr.count("cannot write")) == (2, 1)
