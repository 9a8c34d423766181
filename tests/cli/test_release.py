"""``fedloom synthesize`` and ``fedloom export``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from support import names_in

Command = Callable[..., Result]
Refused = Callable[..., str]


def test_synthesize_says_what_it_made(fedloom: Command, finished: Path, tmp_path: Path) -> None:
    result = fedloom("synthesize", finished, "--n", 3, "--out", tmp_path / "out", "--accept-risk")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"{tmp_path / 'out'}: 3 records of 2 groups; README.md is its card\n"
    assert names_in(tmp_path / "out") == ["README.md", "data", "manifest.json"]
    arguments = ("--n", 3, "--out", tmp_path / "npz", "--format", "npz", "--seed", 4, "--licence", "mit", "--json")
    found = json.loads(fedloom("synthesize", finished, *arguments, "--accept-risk").stdout)
    assert (found["out"], found["format"], found["seed"], found["licence"]) == (str(tmp_path / "npz"), "npz", 4, "mit")
    assert found["counts"] == {"mnist": {"": 2}, "fashion-mnist": {"": 1}}


def test_export_says_what_it_made(fedloom: Command, finished: Path, tmp_path: Path) -> None:
    result = fedloom("export", finished, "--out", tmp_path / "out", "--accept-risk")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"{tmp_path / 'out'}: generators of 2 groups as safetensors; README.md is its card\n"
    assert names_in(tmp_path / "out") == ["README.md", "generators.json", "generators.safetensors", "manifest.json"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("synthesize", "--n", 4), ["no DP guarantee", "--accept-risk does it all the same"]),
        (("export",), ["no DP guarantee", "--accept-risk does it all the same"]),
        (("synthesize", "--n", 4, "--format", "folders"), ["--format: unknown format", "did you mean 'folder'?"]),
        (("export", "--format", "onxx"), ["--format: unknown format", "did you mean 'onnx'?"]),
        (("synthesize", "--n", 0, "--accept-risk"), ["--n = 0 must be at least 1"]),
        (("synthesize", "--n", 4, "--labels", "prior"), ["--labels = 'prior' needs generators that are told a class"]),
        (("synthesize", "--n", 4, "--pathway", "z9"), ["--pathway: unknown pathway 'z9'", "z1"]),
        (("synthesize", "--n", 4, "--device", "cuda:99"), ["device = 'cuda:99' is not there"]),
        (("export", "--policy", "nowhere.toml"), ["--policy = 'nowhere.toml' cannot be read"]),
        (("export", "--policy", "policy.toml"), ["policy.max_epsilon", "-1"]),
    ],
    ids=str,
)
def test_a_mistake_is_one_sentence_and_leaves_nothing(
    refused: Refused, finished: Path, tmp_path: Path, arguments: tuple[str, ...], words: list[str]
) -> None:
    (tmp_path / "policy.toml").write_text("max_epsilon = -1\n")
    command, *options = arguments
    sentence = refused(command, finished, "--out", tmp_path / "out", *map(str, options))
    assert all(word in sentence for word in words), sentence
    assert names_in(tmp_path) == ["policy.toml"]


@pytest.mark.parametrize("command", [("synthesize", "--n", "4"), ("export",)], ids=str)
def test_what_lies_at_the_place_already_stays(
    refused: Refused, finished: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    (tmp_path / "out").mkdir()
    name, *options = command
    sentence = refused(name, finished, "--out", tmp_path / "out", *options, "--accept-risk")
    assert "exists already" in sentence
    unfinished = shutil.copytree(finished, tmp_path / "run")
    (unfinished / "status.json").unlink()
    sentence = refused(name, unfinished, "--out", tmp_path / "new", *options, "--accept-risk")
    assert f"{unfinished} is unfinished" in sentence


def test_a_policy_is_one_more_thing_to_keep_to(refused: Refused, finished: Path, tmp_path: Path) -> None:
    (tmp_path / "strict.toml").write_text("max_epsilon = 2.0\n")
    (tmp_path / "open.toml").write_text('privacy = "none"\n')
    policies = ("--policy", "strict.toml", "--policy", "open.toml")
    sentence = refused("export", finished, "--out", tmp_path / "out", *policies)
    assert sentence.count("a silo's policy allows") == 1
    assert "epsilon 2 at delta 0.0001, and no epsilon is known" in sentence


def test_a_method_that_leaves_no_generator_at_the_server_is_refused(
    fedloom: Command, refused: Refused, tiny_toml: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    settings = ("rounds=1", "method.name=fedvae", "sharing.scopes.decoder=silo")
    assert fedloom("run", tiny_toml, *settings, "--out", run).exit_code == 0
    for command in (("synthesize", run, "--n", "4"), ("export", run)):
        sentence = refused(*command, "--out", tmp_path / "out", "--accept-risk")
        assert "method 'fedvae' leaves nothing at the server that generates" in sentence


def test_a_repository_is_laid_out_and_its_upload_is_left_to_people(
    fedloom: Command, finished: Path, tmp_path: Path
) -> None:
    result = fedloom("export", finished, "--out", tmp_path / "out", "--accept-risk", "--to-hub")
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith(f"hf upload YOU/NAME {tmp_path / 'out'} . --repo-type model\n")
    assert ".gitattributes" in names_in(tmp_path / "out")
