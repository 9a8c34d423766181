"""A run that is killed at any moment and resumed equals one that was left alone, bit for bit."""

from __future__ import annotations

import itertools
import json
import os
import random
from pathlib import Path

import pytest

from engines.killing import resume_until_write, train_until_killed, train_until_write
from fedloom.engines.base import RoundReport
from fedloom.errors import RunFolderError
from fedloom.experiment import Observer, resume, train
from fedloom.runs.checkpoint import checkpoint_rounds, folder_of, load_checkpoint
from fedloom.runs.folder import RunFolder
from support import assert_same_run, federation_of, logged, tiny_config

# Everything that a silo can keep from round to round, silos that sit out a round, and a round in several batches.
KEEPING = ("rounds=4", "participation.rate=0.7", "local.keep_optimizer=true", "sharing.scopes.encoder=silo")
TIGHT = "engine.state_memory=0.02"  # MB; a silo keeps 0.26
WRITES_A_ROUND = 7  # egress, metrics; server, silos, index, the checkpoint's folder and the folder around it


class CountWrites(Observer):
    """How many durable writes there were up to the end of each round."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.after_round: list[int] = []
        self.writes, fsync = 0, os.fsync

        def counted(descriptor: int) -> None:
            self.writes += 1
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", counted)

    def round_done(self, report: RoundReport, metrics: dict[str, float]) -> None:
        self.after_round.append(self.writes)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A whole run, and the number of its writes after each round."""
    path = tmp_path_factory.mktemp("undisturbed") / "run"
    with pytest.MonkeyPatch.context() as monkeypatch:
        counter = CountWrites(monkeypatch)
        train(tiny_config(*KEEPING), path, observer=counter)
    return path, counter.after_round


def test_the_writes_of_a_round_are_known(undisturbed: tuple[Path, list[int]]) -> None:
    before_the_last = undisturbed[1][:-1]  # the last round draws samples as well
    assert {after - before for before, after in itertools.pairwise(before_the_last)} == {WRITES_A_ROUND}


@pytest.mark.parametrize("write", range(1, WRITES_A_ROUND + 1))
def test_killed_at_any_write_of_round_3(write: int, undisturbed: tuple[Path, list[int]], tmp_path: Path) -> None:
    """Before or between the logs, between log and checkpoint, inside the checkpoint, after its renaming."""
    whole, writes = undisturbed
    train_until_write(tiny_config(*KEEPING), tmp_path / "run", writes[1] + write)
    assert RunFolder.open(tmp_path / "run").rounds_done == (3 if write == WRITES_A_ROUND else 2)
    resume(tmp_path / "run")
    assert_same_run(tmp_path / "run", whole)


def test_killed_before_the_first_checkpoint(undisturbed: tuple[Path, list[int]], tmp_path: Path) -> None:
    whole, writes = undisturbed
    train_until_write(tiny_config(*KEEPING), tmp_path / "run", writes[0] - 2)
    assert RunFolder.open(tmp_path / "run").rounds_done == 0
    assert len(logged(tmp_path / "run")["metrics"]) == 1
    resume(tmp_path / "run")
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.parametrize("write", [1, 3, 6])
def test_killed_again_while_resuming(write: int, undisturbed: tuple[Path, list[int]], tmp_path: Path) -> None:
    """The second kill hits the rewinding of the logs, or the first round after it."""
    whole, writes = undisturbed
    train_until_write(tiny_config(*KEEPING), tmp_path / "run", writes[1] + 3)
    resume_until_write(tmp_path / "run", write)
    resume(tmp_path / "run")
    assert_same_run(tmp_path / "run", whole)


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """The same run, but hardly anything of what silos keep has room in memory."""
    path = tmp_path_factory.mktemp("overflowing") / "run"
    with pytest.MonkeyPatch.context() as monkeypatch:
        counter = CountWrites(monkeypatch)
        train(tiny_config(*KEEPING, TIGHT), path, observer=counter)
    return path, counter.after_round


@pytest.mark.parametrize("engine", ["reference", "fused"])
def test_what_lies_on_disk_changes_nothing(
    engine: str,
    undisturbed: tuple[Path, list[int]],
    overflowing: tuple[Path, list[int]],
    tmp_path: Path,
) -> None:
    one, other = undisturbed[0], overflowing[0]
    if engine == "fused":
        one, other = tmp_path / "roomy", tmp_path / "tight"
        train(tiny_config(*KEEPING, "engine.name=fused", "engine.workers=0"), one)
        train(tiny_config(*KEEPING, "engine.name=fused", "engine.workers=0", TIGHT), other)
    assert_same_run(one, other)
    assert not (other / "overflow").exists()
    stacks = [json.loads((folder_of(path, 4) / "index.json").read_text())["stacks"] for path in (one, other)]
    assert len(stacks[0]) == 1 < len(stacks[1])  # in the second run they were written when they came


@pytest.mark.parametrize("write", [1, 3, 5, 8])
def test_killed_while_what_silos_keep_lies_on_disk(
    write: int, undisturbed: tuple[Path, list[int]], overflowing: tuple[Path, list[int]], tmp_path: Path
) -> None:
    train_until_write(tiny_config(*KEEPING, TIGHT), tmp_path / "run", overflowing[1][1] + write)
    resume(tmp_path / "run")
    assert_same_run(tmp_path / "run", undisturbed[0])
    assert not (tmp_path / "run" / "overflow").exists()


def test_killed_from_outside_at_random_moments(tmp_path: Path) -> None:
    config = tiny_config(*KEEPING, "rounds=40", "engine.checkpoint_every=3", "engine.keep_checkpoints=1")
    train(config, tmp_path / "whole")
    moments = random.Random(8)
    for attempt in range(3):
        path = tmp_path / f"killed-{attempt}"
        train_until_killed(config, path, rounds=moments.randint(2, 9), delay=moments.uniform(0, 0.1))
        assert RunFolder.open(path).rounds_done < 40
        resume(path)
        assert_same_run(path, tmp_path / "whole")


def test_what_silos_keep_lies_in_the_checkpoint_and_not_at_the_server(undisturbed: tuple[Path, list[int]]) -> None:
    checkpoint = load_checkpoint(undisturbed[0])
    assert not any("encoder" in name for name in checkpoint.server)
    assert len(checkpoint.silos) == 4
    for tensors in checkpoint.silos.values():
        assert {name.rpartition("/")[2] for name in tensors if name.startswith("optimizer/")} == {
            "step",
            "exp_avg",
            "exp_avg_sq",
        }
        assert any(name.startswith("model/encoder.") for name in tensors)
    weights = [tensors["model/encoder.layers.0.weight"] for tensors in checkpoint.silos.values()]
    assert all(not one.equal(other) for one, other in itertools.combinations(weights, 2))
    assert all("encoder" not in key for row in logged(undisturbed[0])["egress"] for key in row["blocks"])


def test_resuming_a_finished_run_changes_nothing(undisturbed: tuple[Path, list[int]]) -> None:
    path = undisturbed[0]
    before = {name: (path / name).read_bytes() for name in ("metrics.jsonl", "egress.jsonl")}
    resume(path)
    assert {name: (path / name).read_bytes() for name in before} == before
    assert checkpoint_rounds(path) == [3, 4]


def test_a_changed_configuration_or_federation_is_refused(tmp_path: Path) -> None:
    federation = federation_of([0] * 5, [1] * 4)
    train(tiny_config("rounds=1"), tmp_path / "run", federation)
    with pytest.raises(RunFolderError, match="the data have changed"):
        resume(tmp_path / "run", federation_of([0] * 5, [1] * 5))
    toml = tmp_path / "run" / "run.toml"
    toml.write_text(toml.read_text().replace("rounds = 1", "rounds = 2"))
    with pytest.raises(RunFolderError, match=r"run.toml is not the one"):
        resume(tmp_path / "run", federation)
