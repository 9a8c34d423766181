"""What helps a person along: completion, suggestions, and where to read on."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import typer
from click.testing import Result
from hatchling.builders.wheel import WheelBuilder
from typer.testing import CliRunner

import fedloom as package
from fedloom.cli import app

Command = Callable[..., Result]
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("fedloom rep", {"reproduce", "report"}),
        ("fedloom data s", {"schema", "show"}),
        ("fedloom list pri", {"priors"}),
        (
            "fedloom run align-fl/best/",
            {"align-fl/best/private", "align-fl/best/probe", "align-fl/best/two-latents", "align-fl/best/wide"},
        ),
        ("fedloom synthesize DIR --acc", {"--accept-risk"}),
    ],
)
def test_a_shell_can_complete(typed: str, offered: set[str]) -> None:
    words = {"_FEDLOOM_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    result = CliRunner().invoke(app, [], prog_name="fedloom", env=words)
    assert set(result.stdout.split()) == offered


def test_completion_can_be_installed() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert "--install-completion" in result.stdout


def test_the_version_is_told(fedloom: Command) -> None:
    assert fedloom("--version").stdout == f"fedloom {package.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [(["runn", "demo"], "run"), (["data", "gett"], "get"), (["federation", "statu"], "status")],
)
def test_a_wrong_command_gets_one_suggestion(fedloom: Command, arguments: list[str], nearest: str) -> None:
    result = fedloom(*arguments)
    assert result.exit_code == 2
    assert re.findall(r"Did you mean '([\w-]+)'\?", result.stderr) == [nearest]


def test_a_wrong_option_gets_a_suggestion(fedloom: Command) -> None:
    result = fedloom("run", "demo", "--otu", "x")
    assert result.exit_code == 2
    assert "Did you mean '--out'?" in result.stderr


@pytest.mark.parametrize("name", sorted(typer.main.get_command(app).commands))  # type: ignore[attr-defined]
def test_every_command_says_in_its_help_where_to_read_on(fedloom: Command, name: str) -> None:
    command = typer.main.get_command(app)
    assert isinstance(command, click.Group)
    found = re.fullmatch(r"\(more in (docs/\S+\.md)\)", command.commands[name].epilog or "")
    assert found is not None
    assert (ROOT / found[1]).is_file()


@pytest.mark.parametrize(
    ("arguments", "page"),
    [
        (["run", "demmo"], "docs/reference/configuration.md"),
        (["run", "demo", "data.source=npz", "data.path=nowhere.npz"], "docs/how-to/own-data.md"),
        (["audit", "nowhere"], "docs/privacy.md"),
        (["synthesize", "nowhere", "--n", "4", "--out", "x"], "docs/release.md"),
        (["federation", "status", "nowhere"], "docs/deployment.md"),
    ],
    ids=" ".join,
)
def test_every_mistake_says_where_to_read_on(refused: Callable[..., str], arguments: list[str], page: str) -> None:
    assert refused(*arguments).endswith(f" (more in {page})\n")
    assert (ROOT / page).is_file()


def test_an_installed_package_has_the_page_that_a_mistake_names(tmp_path: Path) -> None:
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    told = subprocess.run(
        [sys.executable, "-m", "fedloom", "run", "demmo"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        stderr=subprocess.PIPE,
        text=True,
    )
    shipped = tmp_path / "site" / "fedloom" / "docs"
    assert told.returncode == 2
    assert told.stderr.endswith(f" (more in {shipped / 'reference' / 'configuration.md'})\n")
    pages, pictures = (ROOT / "docs").rglob("*.md"), (ROOT / "docs" / "images").iterdir()
    assert {shipped / file.relative_to(ROOT / "docs"): file.read_bytes() for file in (*pages, *pictures)} == {
        file: file.read_bytes() for file in shipped.rglob("*.*")
    }
    assert sum(picture.stat().st_size for picture in (shipped / "images").iterdir()) < 1_000_000


def test_pages_of_the_package_show_no_picture_that_lies_elsewhere() -> None:
    pages = sorted((ROOT / "docs").rglob("*.md"))
    picture = re.compile(r"!\[[^\]]*\]\(([^)]+)\)|<img src=\"([^\"]+)\"")
    shown = [(page.parent / (a or b)).resolve() for page in pages for a, b in picture.findall(page.read_text())]
    assert {file.parent for file in shown} == {ROOT / "docs" / "images"}
    assert set(shown) == set((ROOT / "docs" / "images").iterdir())


def named_pages(source: Path) -> set[str]:
    """The pages that a module's code names, which page_path is to find."""
    calls = (call for call in ast.walk(ast.parse(source.read_text(encoding="utf-8"))) if isinstance(call, ast.Call))
    return {
        ast.literal_eval(call.args[0])
        for call in calls
        if isinstance(call.func, ast.Name)
        and call.func.id in ("page_path", "more")
        and isinstance(call.args[0], ast.Constant)
    }


def test_messages_name_pages_that_exist_and_none_by_a_path_of_its_own() -> None:
    modules = sorted((ROOT / "src" / "fedloom").rglob("*.py"))
    named = set().union(*map(named_pages, modules))
    assert {"deployment.md", "how-to/charm.md", "tutorial.md"} <= named
    assert [page for page in named if not (ROOT / "docs" / page).is_file()] == []
    written = re.compile(r"^[^#\n]*\"[^\"\n]*\bdocs/[^\"\n]*\.md", re.MULTILINE)
    assert [path.name for path in modules if written.search(path.read_text(encoding="utf-8"))] == []


def test_a_run_says_what_may_come_next(
    fedloom: Command, tiny_toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "cache"))
    images, vectors, run = tmp_path / "images", tmp_path / "vectors.npz", tmp_path / "run"
    assert f"or      fedloom sample {images} --group mnist --out" in fedloom("run", tiny_toml, "--out", images).stdout
    fedloom(
        "embed", "mnist-sample", "--backbone", "pixels", "--projection", "random", "--dimension", 8, "--out", vectors
    )
    settings = (f"data.path={vectors}", "data.records_per_silo=50", "evaluation.metrics=[]")
    found = fedloom("run", "dp-cvae/baselines/moments", *settings, "--out", run)
    assert f"or      fedloom downstream {run}\n" in found.stdout


@pytest.mark.parametrize(("name", "source"), [("pictures", "image-folders"), ("records.npz", "npz")])
def test_a_path_in_the_place_of_a_data_set_is_told_where_it_belongs(
    refused: Callable[..., str], tmp_path: Path, name: str, source: str
) -> None:
    (tmp_path / "pictures").mkdir()
    assert f"say {source} data.path={name} to show what is in it" in refused("data", "show", name)
