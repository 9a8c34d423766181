"""Every block of code and every command of the documentation runs, or says why it does not and is checked."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from documentation import PAGES, ROOT, Block, blocks, check, inline_commands
from fedloom.cli import app
from fedloom.methods.base import METHODS

BLOCKS = [block for page in PAGES for block in blocks(page)]
# What is added to commands so that a page takes seconds: the same commands on little data, with small networks.
SMALL = {
    "run": [
        "rounds=3",
        "data.silos=2",
        "data.records_per_silo=40",
        "model.hidden=[16]",
        "model.latent=4",
        "local.epochs=1",
        "local.batch_size=16",
        "server.samples=50",
        "server.epochs=1",
        "evaluation.every=0",
        "evaluation.samples=16",
        "evaluation.metrics=['spread']",
        "participation.rate=1.0",
        "engine.workers=1",
        "engine.threads=1",
    ],
    "evaluate": ["--samples", "16"],
    "audit": ["--records", "8", "--samples", "16"],
    "synthesize": ["--n", "4"],
    "downstream": ["--synthetic", "50"],
}


def run(command: str) -> None:
    """Call a command in this process, on little data."""
    words = shlex.split(command)[1:]
    small = SMALL.get(words[0], [])
    of_tables = "tables/" in command or "tables.toml" in command
    many = "data.groups=discover" in command  # of few silos no groups are found
    words += [
        each
        for each in small
        if not (of_tables and each.startswith("evaluation.metrics")) and not (many and each.startswith("data.silos"))
    ]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, f"{command}\n{result.output}{result.exception or ''}"


@pytest.fixture(scope="session")
def some_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pages call DIR: some run of the demo."""
    folder = tmp_path_factory.mktemp("documentation") / "DIR"
    run(f"fedloom run demo privacy.mechanism=dp-sgd privacy.noise_multiplier=1 --out {folder}")
    return folder


@pytest.fixture
def place(tmp_path: Path, some_run: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of its own, with a run that pages call DIR, and where `make demo` puts its two."""
    for name in ("DIR", "runs/demo/fedvae", "runs/demo/fissionvae-d"):
        shutil.copytree(some_run, tmp_path / name)
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    before = dict(METHODS.own)  # pages show how to add to it
    yield tmp_path
    METHODS.own.clear()
    METHODS.own.update(before)


@pytest.mark.parametrize("page", sorted({block.page for block in BLOCKS if block.kind in ("python", "shell")}))
def test_what_a_page_shows_works_in_its_order(place: Path, page: str) -> None:
    names: dict[str, object] = {}
    for block in BLOCKS:
        if block.page == page and block.kind == "python":
            ast.parse(block.text)
            if not block.reason:
                exec(compile(block.text, str(block), "exec"), names)
        if block.page == page and block.kind == "shell":
            for command in block.commands:
                if not block.runs(command):
                    if command.startswith("fedloom "):
                        check(command)
                else:
                    assert command.startswith("fedloom "), f"{block}: mark '{command}' as not run, with a reason"
                    run(command)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.kind == "toml"], ids=str)
def test_toml_is_valid(block: Block) -> None:
    tomllib.loads(block.text)


def test_a_block_that_nobody_runs_says_why() -> None:
    known = {"python", "shell", "toml", "text"}
    assert [str(block) for block in BLOCKS if block.kind not in known and not block.reason] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_running_text_exist(page: Path) -> None:
    for command in inline_commands(page):
        check(command)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("fedloom rum demo", "no command 'rum'"),
        ("fedloom run demo --otu x", "no option"),
        ("fedloom run demo data.silo=3", "unknown key 'data.silo'"),
        ("fedloom run demo method.priors=wave", "unknown key 'method.priors'"),
        ("fedloom run demmo", "unknown preset 'demmo'"),
        ("fedloom downstream DIR --lamda silo|shared", "no option"),
        ("fedloom evaluate DIR --metrics frechett", "frechett"),
    ],
)
def test_the_check_finds_what_does_not_exist(command: str, words: str) -> None:
    with pytest.raises(Exception, match=re.escape(words)):
        check(command)
