"""Whole runs whose ledger is interrupted: what was released is paid for, and what was paid stays paid."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engines.killing import live_until_ledger_write
from fedloom.engines.base import initial_state
from fedloom.engines.reference import ReferenceEngine
from fedloom.engines.training import Trainer
from fedloom.experiment import Experiment
from fedloom.federation.rounds import RoundContext
from fedloom.privacy.ledger import Ledger, read_accounts
from fedloom.privacy.noise import NoiseKey, Randomness, SecureNoise
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
        ledger = Ledger(run / "ledger.sqlite")
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


@dataclass(frozen=True)
class Nobody:
    """Coins that leave everybody out, and no noise."""

    repeatable = True

    def uniform(self, count: int, noise_key: NoiseKey) -> Tensor:
        return torch.ones(count, dtype=torch.float64)

    def coins(self, count: int, silo: int, round: int, steps: Tensor) -> Tensor:
        return torch.ones(len(steps), count, dtype=torch.float64)

    def normal(self, count: int, noise_key: NoiseKey, device: torch.device | str = "cpu") -> Tensor:
        return torch.zeros(count, device=device)

    def examples(self, purpose: str, rows: int, width: int, silo: int, round: int, steps: Tensor) -> Tensor:
        return torch.zeros(len(steps), rows, width)


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
