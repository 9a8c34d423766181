from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from fedloom.errors import RunFolderError
from fedloom.runs.folder import RunFolder
from support import names_in, tiny_config


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", tiny_config())


def test_a_new_folder_holds_the_resolved_configuration_and_the_environment(folder: RunFolder) -> None:
    assert names_in(folder.path) == ["environment.json", "run.toml"]
    assert RunFolder.open(folder.path) == folder
    assert {"command", "cores", "fedloom", "packages", "platform", "python", "started"} == set(folder.environment)
    assert folder.rounds_done == 0


@pytest.mark.parametrize(("mechanism", "mode"), [("none", 0o755), ("dp-sgd", 0o700)])
def test_the_folder_of_a_private_run_is_its_owners_alone(mechanism: str, mode: int, tmp_path: Path) -> None:
    masked = os.umask(0o022)
    try:
        config = tiny_config(f"privacy.mechanism={mechanism}")
        path = RunFolder.create(tmp_path / "runs" / "run", config).path
    finally:
        os.umask(masked)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o755


def test_notes_are_added_to_the_environment(folder: RunFolder) -> None:
    before = folder.environment
    folder.note({"threads": 2})
    folder.note({"threads": 4, "engine": "reference"})
    assert folder.environment == {**before, "threads": 4, "engine": "reference"}


def test_an_empty_folder_may_become_a_run_but_nothing_is_overwritten(folder: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    RunFolder.create(tmp_path / "empty", tiny_config())
    (tmp_path / "file").write_text("mine")
    for taken in (folder.path, tmp_path / "file"):
        with pytest.raises(RunFolderError, match=f"{taken} exists already; choose another"):
            RunFolder.create(taken, tiny_config())
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        (None, "there is no such folder"),
        ({}, "it holds no run.toml"),
        ({"notes.txt": "hello"}, "it holds no run.toml"),
        ({"run.toml": "rounds = "}, "is not a run folder of this version: .* is not valid TOML"),
        ({"run.toml": "speed = 3"}, "is not a run folder of this version: unknown key 'speed'"),
    ],
)
def test_a_foreign_folder_is_refused(files: dict[str, str] | None, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "foreign"
    if files is not None:
        path.mkdir()
        for name, text in files.items():
            (path / name).write_text(text)
    with pytest.raises(RunFolderError, match=complaint):
        RunFolder.open(path)


@pytest.mark.parametrize("text", [None, "{"])
def test_a_damaged_environment_is_named(text: str | None, folder: RunFolder) -> None:
    path = folder.path / "environment.json"
    path.unlink()
    if text is not None:
        path.write_text(text)
    with pytest.raises(RunFolderError, match=r"environment.json is missing or damaged"):
        _ = folder.environment


def test_rewinding_forgets_what_was_logged_after_a_round(folder: RunFolder) -> None:
    for number in (1, 2, 3):
        folder.record_round({"round": number}, [{"round": number, "silo": s} for s in "ab"])
    with (folder.path / "egress.jsonl").open("a") as file:
        file.write('{"round": 4, "si')
    folder.rewind(2)
    assert folder.metrics() == [{"round": 1}, {"round": 2}]
    assert folder.egress() == [{"round": n, "silo": s} for n in (1, 2) for s in "ab"]
    folder.record_round({"round": 3}, [])
    assert [row["round"] for row in folder.metrics()] == [1, 2, 3]
    assert (folder.path / "egress.jsonl").read_text().endswith('"silo": "b"}\n')


@pytest.mark.parametrize("state", ["finished", "diverged"])
def test_a_secret_is_made_once_for_its_owner_alone_and_gone_when_the_run_has_ended(
    state: str, folder: RunFolder, tmp_path: Path
) -> None:
    secret = folder.secret()
    assert len(secret) == 32
    assert RunFolder.open(folder.path).secret() == secret, "who resumes draws the same"
    assert RunFolder.create(tmp_path / "other", tiny_config()).secret() != secret, "no configuration gives it"
    assert stat.S_IMODE((folder.path / "noise.key").stat().st_mode) == 0o600
    folder.end(state, 2)
    assert names_in(folder.path) == ["environment.json", "run.toml", "status.json"]
    left = b"".join(path.read_bytes() for path in folder.path.iterdir())
    assert secret not in left
    assert secret.hex().encode() not in left


def test_only_a_run_that_had_its_secret_before_its_first_round_is_said_to_have_kept_it(folder: RunFolder) -> None:
    """An older version drew the noise of the rounds before from the seed; a secret that comes late hides none of it."""
    assert not folder.kept_noise_secret
    (folder.path / "checkpoints" / "round-0001").mkdir(parents=True)
    folder.secret()
    assert not folder.kept_noise_secret
    (folder.path / "checkpoints" / "round-0001").rmdir()
    folder.secret()
    assert folder.kept_noise_secret
    (folder.path / "checkpoints" / "round-0001").mkdir()
    folder.secret()
    folder.end("finished", 1)
    assert folder.kept_noise_secret, "also when it is gone"
