"""The template of a plug-in, installed as a person would install it, and used by the commands."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedloom
from fedloom.cli import app
from fedloom.experiment import train
from fedloom.runs.checkpoint import load_checkpoint
from fedloom.runs.folder import RunFolder
from plugins import install
from support import equal_bits, tiny_config

TEMPLATE = Path(__file__).parents[1] / "examples" / "plugin"
NAMES = ["local_encoders", "looms.local_encoders:RECIPE"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The template as pip leaves it, without asking anything of a network."""
    folder, source = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("source") / "plugin"
    shutil.copytree(TEMPLATE, source, ignore=shutil.ignore_patterns("__pycache__"))
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check")
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(folder), str(source)]
    # An editable fedloom is found by its own path, and pip must not take anything else from this one.
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": ""})
    return folder


@pytest.fixture
def installed(built: Path, plugin_folder: Path) -> Path:
    shutil.copytree(built, plugin_folder, dirs_exist_ok=True)
    return plugin_folder


def called(*arguments: str | Path, code: int = 0) -> str:
    """What a command says, in this process."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


@pytest.mark.parametrize("name", NAMES)
def test_commands_use_a_method_of_another_package(installed: Path, tmp_path: Path, name: str) -> None:
    config = tiny_config(f"method.name={name}")
    (tmp_path / "tiny.toml").write_text(config.to_toml(), encoding="utf-8")
    run = tmp_path / "run"
    assert called("run", tmp_path / "tiny.toml", "--out", run).startswith(f"{name} is finished, 2 of 2 rounds done")
    assert {tuple(row["blocks"]) for row in RunFolder.open(run).egress()} == {("decoder@all",)}
    assert RunFolder.open(run).environment["packages"]["looms"] == "0.1.0"
    shutil.rmtree(run / "checkpoints" / "round-0002")
    (run / "status.json").unlink()
    assert called("resume", run).startswith(f"{name} is finished, 2 of 2 rounds done")
    called("sample", run, "--group", "mnist", "--out", tmp_path / "grid.png")
    assert (tmp_path / "grid.png").stat().st_size > 0
    assert json.loads(called("inspect", run, "--json"))["config"]["method"]["name"] == name
    found = json.loads(called("evaluate", run, "--metrics", "spread", "--samples", "20", "--json"))
    assert any(key.startswith("spread") for key in found["metrics"])
    called("report", run, "--out", tmp_path / "report.html")
    assert name in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_process_of_its_own_finds_it_too(installed: Path, tmp_path: Path) -> None:
    """As a person's terminal: nothing is left over from another command."""
    few = ("rounds=1", "data.records_per_silo=40", "model.hidden=[16]", "evaluation.metrics=[]")
    command = [sys.executable, "-m", "fedloom", "run", "demo", "method.name=local_encoders", *few]
    done = subprocess.run([*command, "--out", str(tmp_path / "run")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert RunFolder.open(tmp_path / "run").status["state"] == "finished"


def test_the_template_passes_its_own_tests(installed: Path, tmp_path: Path) -> None:
    options = ("-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(tmp_path))
    command = [sys.executable, "-m", "pytest", *options, str(TEMPLATE / "tests")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert "2 passed" in done.stdout, done.stdout + done.stderr


def test_lists_say_which_package_a_plug_in_comes_from(installed: Path) -> None:
    methods, priors = (json.loads(called("list", kind, "--json")) for kind in ("methods", "priors"))
    assert methods["local_encoders"] == "every silo its own encoder, one decoder for all (from looms==0.1.0)"
    assert priors["circle"] == "groups on a circle in the first two coordinates (from looms==0.1.0)"
    assert not any("(from" in summary for name, summary in methods.items() if name != "local_encoders")


STANDSTILL = """\
from dataclasses import replace

from fedloom.methods.server_steps import StepRule
from fedloom.methods.steps import ServerStep

RULE = StepRule("takes nothing over", lambda method, setting: replace(method, server_step=ServerStep()))
"""


def test_a_server_step_of_another_package_decides_what_is_kept(plugin_folder: Path, tmp_path: Path) -> None:
    install(plugin_folder, "standstill", "1.0", STANDSTILL, {"fedloom.server_steps": {"still": "RULE"}})
    assert json.loads(called("list", "server-steps", "--json"))["still"] == "takes nothing over (from standstill==1.0)"
    for step, stays in (("still", True), ("mean", False)):
        train(tiny_config(f"server.step={step}"), tmp_path / step)
        first, second = (load_checkpoint(tmp_path / step, number).server for number in (1, 2))
        assert equal_bits(first, second) == stays


BROKEN = "cannot be imported from 'torn:RECIPE' (ModuleNotFoundError: No module named 'no_such_thing')"


def test_a_plug_in_that_fails_to_import_stops_only_who_asks_for_it(plugin_folder: Path, tmp_path: Path) -> None:
    install(plugin_folder, "torn", "0.3", "import no_such_thing\n", {"fedloom.methods": {"ripped": "RECIPE"}})
    (tmp_path / "tiny.toml").write_text(tiny_config("rounds=1").to_toml(), encoding="utf-8")
    called("run", tmp_path / "tiny.toml", "--out", tmp_path / "run")
    listing = CliRunner().invoke(app, ["list", "methods", "--json"])
    assert listing.stderr == f"Warning: method 'ripped' of torn==0.3 {BROKEN}\n"
    assert "fedvae" in json.loads(listing.stdout)
    sentence = called("run", tmp_path / "tiny.toml", "method.name=ripped", "--out", tmp_path / "other", code=2)
    assert sentence.startswith(f"Error: method.name: method 'ripped' of torn==0.3 {BROKEN} (more in")
    assert sentence.count("\n") == 1


def test_a_plug_in_of_a_name_that_is_taken_is_a_mistake(installed: Path, tmp_path: Path) -> None:
    source = "from looms.local_encoders import RECIPE\n"
    install(installed, "shuttles", "2.0", source, {"fedloom.methods": {"local_encoders": "RECIPE", "fedvae": "RECIPE"}})
    (tmp_path / "tiny.toml").write_text(tiny_config().to_toml(), encoding="utf-8")
    ours = called("run", tmp_path / "tiny.toml", "method.name=fedvae", "--out", tmp_path / "run", code=2)
    sentence = "method 'fedvae' comes from fedloom and from shuttles==2.0; uninstall one of them"
    assert ours.startswith(f"Error: method.name: {sentence} (more in")
    two = called("run", tmp_path / "tiny.toml", "method.name=local_encoders", "--out", tmp_path / "run", code=2)
    assert "looms==0.1.0" in two
    assert "shuttles==2.0" in two


def test_the_page_names_every_group_of_entry_points() -> None:
    sources = (path.read_text(encoding="utf-8") for path in Path(fedloom.__file__).parent.rglob("*.py"))
    groups = {group for text in sources for group in re.findall(r'Registry\(\s*"[a-z ]+",\s+"(fedloom\.\w+)"', text)}
    assert {"fedloom.methods", "fedloom.modalities"} <= groups
    page = (TEMPLATE.parents[1] / "docs" / "how-to" / "own-plugin.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(fedloom\.\w+)`", page, re.MULTILINE)) == groups


def test_a_process_that_lists_nothing_imports_no_plug_in(plugin_folder: Path) -> None:
    source = "raise SystemExit('imported')\n"
    install(plugin_folder, "eager", "1.0", source, {"fedloom.methods": {"eager": "RECIPE"}})
    program = "from fedloom.methods.base import METHODS; assert 'eager' in METHODS; METHODS['fedvae']"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("value", "found"), [("class HALF:\n    pass\n", "the class HALF"), ("HALF = 0.5\n", "a float")], ids=str
)
def test_a_merge_that_is_none_ends_with_one_sentence(
    plugin_folder: Path, tmp_path: Path, value: str, found: str
) -> None:
    install(plugin_folder, "halves", "1.0", value, {"fedloom.merges": {"half": "HALF"}})
    (tmp_path / "tiny.toml").write_text(tiny_config("server.merge=half").to_toml(), encoding="utf-8")
    told = called("run", tmp_path / "tiny.toml", "--out", tmp_path / "run", code=2)
    sentence = f"merge 'half' of halves==1.0 is {found}, not a class that derives from Merge"
    assert told.startswith(f"Error: server.merge: {sentence} (more in")
    assert told.count("\n") == 1
