"""Every mistake gets one sentence on stderr that names what is wrong, exit code 2, and no traceback."""

from __future__ import annotations

import gzip
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from PIL import Image

from fedloom.federation.archives import FILES
from support import assert_same_run

Command = Callable[..., Result]
Refused = Callable[..., str]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["demmo"], ["unknown preset 'demmo'", "did you mean 'demo'"]),
        (["missing.toml"], ["cannot read missing.toml", "No such file"]),
        (["demo", "rounnds=3"], ["unknown key 'rounnds'", "did you mean 'rounds'"]),
        (["demo", "data.silo=3"], ["unknown key 'data.silo'", "did you mean 'data.silos'"]),
        (["demo", "rounds"], ["override 'rounds'", "key.sub=value"]),
        (["demo", "method.name=fedvea"], ["unknown method 'fedvea'", "did you mean 'fedvae'"]),
        (["demo", "method.priors=wave"], ["unknown key 'method.priors'", "did you mean 'method.prior'"]),
        (["demo", "method.nme=fedvae"], ["unknown key 'method.nme'", "did you mean 'method.name'"]),
        (
            ["nosuch"],
            ["unknown preset 'nosuch' (allowed: 'fedloom list presets' names them); a file must end in .toml"],
        ),
        (["demo", "method.prior=wavy"], ["unknown prior 'wavy'", "did you mean 'wave'"]),
        (["demo", "data.source=mnist-sampel"], ["unknown source 'mnist-sampel'", "did you mean 'mnist-sample'"]),
        (["demo", "evaluation.metrics=['domian']"], ["unknown metric 'domian'", "did you mean 'domain'"]),
        (["demo", "rounds=-1"], ["rounds = -1", "at least 1"]),
        (["demo", "rounds=two"], ["rounds = 'two'", "whole number"]),
        (["demo", "participation.rate=0"], ["participation.rate = 0", "greater than 0 and at most 1"]),
        (["demo", "participation.rate=-0.1"], ["participation.rate = -0.1", "greater than 0 and at most 1"]),
        (["demo", "participation.rate=1.5"], ["participation.rate = 1.5", "greater than 0 and at most 1"]),
        (["demo", "method.prior=one-hot", "model.latent=1"], ["'one-hot'", "2 groups", "model.latent = 1"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_run_refuses_a_wrong_setting_and_leaves_nothing(
    refused: Refused, tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    sentence = refused("run", *arguments, "--out", tmp_path / "out")
    assert all(word in sentence for word in words), sentence
    assert not (tmp_path / "out").exists()


def test_a_run_folder_that_exists_is_kept(refused: Refused, tiny_toml: Path, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "thesis.txt").write_text("mine")
    sentence = refused("run", tiny_toml, "--out", taken)
    assert f"{taken} exists already" in sentence
    assert [path.name for path in taken.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--group", "mnits"], ["unknown group 'mnits'", "did you mean 'mnist'"]),
        (["--group", "mnist", "--n", "0"], ["cannot generate 0 samples"]),
        (["--group", "mnist", "--pathway", "z9"], ["unknown pathway 'z9'"]),
        (["--group", "mnist", "--round", "7"], ["no checkpoint of round 7", "1, 2"]),
        (["--group", "mnist", "--out", "grid.jpeg"], ["--out = 'grid.jpeg'", ".png"]),
        (["--group", "mnist", "--out", "nowhere/grid.png"], ["cannot write nowhere/grid.png"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_sample_refuses(refused: Refused, finished: Path, arguments: list[str], words: list[str]) -> None:
    sentence = refused("sample", finished, *arguments)
    assert all(word in sentence for word in words), sentence


@pytest.mark.parametrize("command", [["resume"], ["inspect"], ["compare"], ["sample", "--group", "mnist"]])
def test_every_command_refuses_what_is_no_run_folder(refused: Refused, tmp_path: Path, command: list[str]) -> None:
    assert "is not a run folder: there is no such folder" in refused(*command, tmp_path / "nowhere")


def make_empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def make_foreign(folder: Path) -> None:
    make_empty(folder)
    (folder / "thesis.txt").write_text("mine")


def put_other_toml(folder: Path) -> None:
    (folder / "run.toml").write_text('[package]\nname = "crate"\n')


def put_broken_toml(folder: Path) -> None:
    (folder / "run.toml").write_text("rounds = = 2\n")


def keep_run_toml_alone(folder: Path) -> None:
    text = (folder / "run.toml").read_text()
    make_empty(folder)
    (folder / "run.toml").write_text(text)


def truncate_tensors(folder: Path) -> None:
    path = newest(folder) / "server.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def remove_tensors(folder: Path) -> None:
    (newest(folder) / "server.safetensors").unlink()


def remove_index(folder: Path) -> None:
    (newest(folder) / "index.json").unlink()


def truncate_index(folder: Path) -> None:
    path = newest(folder) / "index.json"
    path.write_text(path.read_text()[:40])


def edit_settings(folder: Path) -> None:
    path = folder / "run.toml"
    path.write_text(re.sub(r"latent = 4", "latent = 5", path.read_text()))


def newest(folder: Path) -> Path:
    return max((folder / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (make_empty, ["is not a run folder", "no run.toml"]),
        (make_foreign, ["is not a run folder", "no run.toml"]),
        (put_other_toml, ["is not a run folder of this version", "unknown key 'package'"]),
        (put_broken_toml, ["is not a run folder of this version", "not valid TOML"]),
        (keep_run_toml_alone, ["environment.json", "missing"]),
        (truncate_tensors, ["round-0002 is damaged", "checksum", "remove it"]),
        (remove_tensors, ["round-0002 is damaged", "No such file"]),
        (remove_index, ["round-0002 is damaged", "index.json"]),
        (truncate_index, ["round-0002 is damaged"]),
        (edit_settings, ["run.toml is not the one that its checkpoints were made with"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_resume_refuses_an_empty_foreign_or_half_written_folder(
    refused: Refused, finished: Path, tmp_path: Path, harm: Callable[[Path], None], words: list[str]
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    harm(folder)
    sentence = refused("resume", folder)
    assert all(word in sentence for word in words), sentence


def test_compare_needs_metrics(refused: Refused, finished: Path) -> None:
    assert "no metrics yet" in refused("compare", finished)


def gzipped(folder: Path, content: bytes) -> Path:
    folder.mkdir()
    for file in FILES.values():
        (folder / file).write_bytes(gzip.compress(content))
    return folder


def cut(folder: Path) -> Path:
    for file in FILES.values():
        data = (folder / file).read_bytes()
        (folder / file).write_bytes(data[:-9])
    return folder


def test_data_get_refuses_files_that_are_missing_wrong_or_cut(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "holds neither train-images" in refused("data", "get", "mnist", "--from", tmp_path / "empty")
    wrong = gzipped(tmp_path / "wrong", b"not the images")
    assert "its checksum differs" in refused("data", "get", "mnist", "--from", wrong)
    assert "not a whole gzip file" in refused("data", "get", "mnist", "--from", cut(wrong))
    assert "did you mean 'mnist'" in refused("data", "get", "mnits")


def test_data_that_is_not_there_or_corrupt_stops_a_run(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = ["run", "demo", "data.source=mixed-mnist", "--out", tmp_path / "out"]
    assert "run 'fedloom data get mnist'" in refused(*run)
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path))
    gzipped(tmp_path / "mnist", b"not the images")
    assert "its checksum differs" in refused(*run)
    assert "its checksum differs" in refused("data", "show", "mnist")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("sizes", "words"),
    [([], ["holds no images"]), ([(8, 8), (8, 9)], ["8x9", "8x8", "one size"])],
    ids=["no images", "mixed sizes"],
)
def test_image_folders_need_images_of_one_size(
    refused: Refused, tmp_path: Path, sizes: list[tuple[int, int]], words: list[str]
) -> None:
    silo = tmp_path / "images" / "hospital"
    silo.mkdir(parents=True)
    for number, size in enumerate(sizes):
        Image.new("L", size).save(silo / f"{number}.png")
    sentence = refused("data", "show", "image-folders", f"data.path={tmp_path / 'images'}", "data.partition=natural")
    assert all(word in sentence for word in words), sentence


def test_data_show_refuses_what_it_does_not_know(refused: Refused) -> None:
    assert "'fedloom list datasets' and 'fedloom list presets' name them" in refused("data", "show", "nosuch")
    assert "unknown data set or preset 'demoo'; did you mean 'demo'" in refused("data", "show", "demoo")


# A checkpoint takes about 27 kB, the grid of sample images after the last round about 50 kB.
SMALLEST = ["model.hidden=[2]", "model.latent=2", "rounds=4"]


@pytest.mark.parametrize(
    ("largest_file", "what", "kept"),
    [
        (20_000, "checkpoints/round-0001", []),
        (30_000, "samples/round-0004/mnist.png", ["round-0002", "round-0003"]),
    ],
    ids=["before the first checkpoint", "in the last round"],
)
def test_a_run_that_no_longer_finds_space_says_so_and_resumes_exactly(
    fedloom: Command, tiny_toml: Path, tmp_path: Path, largest_file: int, what: str, kept: list[str]
) -> None:
    out, whole = tmp_path / "out", tmp_path / "whole"

    def limit_file_size() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))

    stopped = subprocess.run(
        [sys.executable, "-B", "-m", "fedloom", "run", tiny_toml, *SMALLEST, "--out", out],
        preexec_fn=limit_file_size,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (stopped.returncode, stopped.stdout) == (2, ""), stopped.stderr
    *rounds, sentence = stopped.stderr.splitlines()
    assert sentence.startswith(f"Error: cannot write {out / what}: no space is left on the disk")
    assert not any("Error" in line for line in rounds)
    assert not list(out.rglob("*.tmp"))
    assert sorted(path.name for path in out.glob("checkpoints/*")) == kept

    assert fedloom("resume", out).exit_code == 0
    assert fedloom("run", tiny_toml, *SMALLEST, "--out", whole).exit_code == 0
    assert_same_run(out, whole)
