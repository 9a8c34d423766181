"""Whole runs whose ledger is interrupted: what was released is paid for, and what was paid stays paid."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engines.killing import live_until_ledger_write
from fedloom.engines.base import Result, RoundReport, initial_state
from fedloom.engines.reference import ReferenceEngine
from fedloom.engines.training import Trainer
from fedloom.errors import RunFolderError
from fedloom.experiment import Experiment, Observer, resume, train
from fedloom.federation.rounds import RoundContext
from fedloom.privacy.ledger import Ledger, read_accounts
from fedloom.privacy.noise import NoiseKey, Randomness, SecureNoise
from fedloom.runs.files import write_json
from fedloom.runs.folder import RunFolder
from fedloom.runs.ledgers import LEDGER
from fedloom.sharing.plan import BlockKey
from support import equal_bits, federation_of, tiny_config

DP = ("privacy.mechanism=dp-sgd", "privacy.epsilon=5", "privacy.accountant=rdp", "method.name=fedvae")
FEDERATION = federation_of([0] * 40, [0] * 20)
ENCODER = BlockKey("encoder", "all")


def test_a_run_killed_at_any_write_of_its_ledger_pays_for_all_that_it_released(tmp_path: Path) -> None:
    """Killed at the first write, gone on with until the second, and so on; then a copy is gone on with as well."""
    config = tiny_config(*DP, "local.steps=1", "evaluation.trackers=[]")
    run, seen = tmp_path / "run", tmp_path / "seen"
    kills = before = 0
    secret = b""
    while not live_until_ledger_write(config, FEDERATION, run, kills + 1):
        kills += 1
        if not (run / "ledger.sqlite").exists():
            continue
        secret = (run / "noise.key").read_bytes()
        # What was cut off is not ended by looking: that is for whoever goes on with the run.
        ledger = Ledger(shutil.copytree(run, tmp_path / f"look-{kills}") / "ledger.sqlite")
        paid = ledger._rows("SELECT round, silo FROM charges")
        ledger.close()
        assert len(paid) >= before, "the spent amount went down"
        released = {line.rpartition("/")[0] for line in seen.read_text().split()} if seen.exists() else set()
        assert released <= {f"{round}/{silo}" for round, silo in paid}, "released, but not paid for"
        before = len(paid)
    assert kills > 15
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    (copy / "status.json").unlink()
    assert not (copy / "noise.key").exists(), "a run that has ended does nothing again"
    (copy / "noise.key").write_bytes(secret)
    shutil.rmtree(copy / "checkpoints" / "round-0002")
    assert live_until_ledger_write(config, FEDERATION, copy, 0)
    for folder in (run, copy):
        assert [account.releases[0].charges for account in read_accounts(folder / "ledger.sqlite")] == [2, 2]
    made = seen.read_text().split()
    assert len(made) > len(set(made)) == 4, "a release that was made again is the same to the bit"


class Stopped(Exception):
    """The machine goes down."""


@dataclass(frozen=True)
class Stopping(Observer):
    """Stops a run in the middle of a round, when all silos have paid; somebody has a copy of what round 1 cost."""

    out: Path
    round: int

    def round_done(self, report: RoundReport, metrics: dict[str, float]) -> None:
        if report.context.round == 1:
            shutil.copy(self.out / "ledger.sqlite", self.out.with_name("older.sqlite"))

    def silo_done(self, context: RoundContext, result: Result) -> None:
        if context.round == self.round:
            raise Stopped


def stopped_in_round(number: int, out: Path, *overrides: str) -> RunFolder:
    with pytest.raises(Stopped):
        train(tiny_config(*DP, "rounds=4", "local.steps=1", *overrides), out, FEDERATION, Stopping(out, number))
    return RunFolder.open(out)


def deleted(ledger: Path) -> None:
    ledger.unlink()


def put_back(ledger: Path) -> None:
    shutil.copy(ledger.parents[1] / "older.sqlite", ledger)


def begun_anew(ledger: Path) -> None:
    ledger.unlink()
    Ledger(ledger).close()


def without_memory(folder: RunFolder) -> None:
    """As an older version would have left it: nothing but its logs tells of a ledger."""
    facts = {key: value for key, value in folder.environment.items() if key != LEDGER}
    write_json(folder.path / "environment.json", facts)
    for index in folder.path.glob("checkpoints/*/index.json"):
        write_json(index, {key: value for key, value in json.loads(index.read_text()).items() if key != LEDGER})


@pytest.mark.parametrize(
    ("change", "stopped", "overrides", "old", "reason"),
    [
        (deleted, 3, (), False, "is gone, and a new one would begin the budgets of all silos anew; put it back"),
        (deleted, 3, (), True, "is gone, and a new one would begin the budgets of all silos anew; put it back"),
        (deleted, 1, (), False, "is gone, and a new one would begin the budgets of all silos anew; put it back"),
        (deleted, 3, ("engine.checkpoint_every=4",), True, "is gone, and a new one would begin the budgets"),
        (begun_anew, 3, (), False, "is not the ledger that the run was begun with; put that one back"),
        (begun_anew, 1, (), False, "is not the ledger that the run was begun with; put that one back"),
        (begun_anew, 3, (), True, r"has no charge for round 1 of silo 'silo-0', in which something left it \(egress"),
        (
            put_back,
            3,
            (),
            False,
            "with 2 charges, is older than the one that the newest checkpoint .* which had 4",
        ),
        (put_back, 3, (), True, r"has no charge for round 2 of silo 'silo-0', in which something left it \(egress"),
        (put_back, 3, ("engine.checkpoint_every=4",), False, "has no charge for round 2 of silo 'silo-0'"),
    ],
)
def test_a_ledger_that_vanished_lags_behind_or_is_another_one_stops_its_run(
    change: Callable[[Path], None],
    stopped: int,
    overrides: tuple[str, ...],
    old: bool,
    reason: str,
    tmp_path: Path,
) -> None:
    """The attack: without its ledger a run went on with a new one, and claimed what the rounds since then had cost."""
    folder = stopped_in_round(stopped, tmp_path / "run", *overrides)
    if old:
        without_memory(folder)
    whole = folder.ledger.read_bytes()
    change(folder.ledger)
    before = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    with pytest.raises(RunFolderError, match=reason):
        resume(folder.path, FEDERATION)
    assert {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()} == before
    folder.ledger.write_bytes(whole)
    resume(folder.path, FEDERATION)
    assert [account.releases[0].charges for account in read_accounts(folder.ledger)] == [4, 4]


@dataclass(frozen=True)
class Nobody:
    """Coins that leave everybody out, and no noise."""

    repeatable = True

    def uniform(self, count: int, noise_key: NoiseKey) -> Tensor:
        return torch.ones(count, dtype=torch.float64)

    def coins(self, count: int, silo: int, round: int, steps: Tensor) -> Tensor:
        return torch.ones(*steps.shape, count, dtype=torch.float64)

    def normal(self, count: int, noise_key: NoiseKey, device: torch.device | str = "cpu") -> Tensor:
        return torch.zeros(count, device=device)

    def examples(self, purpose: str, rows: int, width: int, silo: int, round: int, steps: Tensor) -> Tensor:
        return torch.zeros(*steps.shape, rows, width)


def encoder_after_a_round(secret: Randomness | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Before and after."""
    experiment = Experiment.of(tiny_config(*DP, "privacy.noise=test", "local.optimizer=sgd"), FEDERATION)
    trainer = Trainer(experiment.config, experiment.method, FEDERATION, experiment.trainer.privacy, secret)
    start = initial_state(trainer.method, FEDERATION, trainer.config)
    (task,) = ReferenceEngine(trainer).tasks(start, RoundContext(1, 2, (0,)))
    return start.server.blocks[ENCODER], trainer.train(task).update.blocks[ENCODER]


def test_coins_and_noise_come_from_the_source_that_a_trainer_is_given() -> None:
    """With neither, nothing moves; a deployment's source never gives the same twice, a simulation's always does."""
    assert equal_bits(*encoder_after_a_round(Nobody()))
    secure, again = encoder_after_a_round(SecureNoise())[1], encoder_after_a_round(SecureNoise())[1]
    assert not any(torch.equal(secure[name], again[name]) for name in secure)
    assert equal_bits(encoder_after_a_round(None)[1], encoder_after_a_round(None)[1])
