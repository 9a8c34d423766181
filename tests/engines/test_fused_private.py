"""One answer under DP-SGD: the fused engine draws, clips, sums and noises as the reference engine does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engines.one_answer import METHODS, Rounds, assert_one_answer, config_of, image_federation
from fedloom.engines.base import FederationState, initial_state
from fedloom.engines.fused import FusedOptions
from fedloom.engines.training import Trainer
from fedloom.experiment import Experiment, train
from fedloom.federation.records import Federation
from fedloom.privacy.ledger import read_accounts

CPU = torch.device("cpu")
IN_CHUNKS = FusedOptions(CPU, chunk=3)
DP = ("privacy.mechanism=dp-sgd", "privacy.noise_multiplier=0.8", "privacy.clip=2", "privacy.accountant=rdp")
# Batches of 8 are expected: silos of one batch, with a rate of one, and of several.
UNEQUAL = image_federation({"a0": 12, "b0": 27, "a1": 17, "b1": 8, "a2": 16})
MIXED = image_federation({"a0": 12, "m0": 21, "b1": 17, "m1": 9, "a2": 16})
ROUNDS: Rounds = ((1, 3), (0, 1, 2, 3, 4), (), (0, 2, 4))


def private_trainer(federation: Federation, *overrides: str) -> tuple[Trainer, FederationState]:
    experiment = Experiment.of(config_of(*DP, "rounds=4", *overrides), federation)
    return experiment.trainer, initial_state(experiment.method, experiment.federation, experiment.config)


@pytest.mark.parametrize("name", METHODS)
def test_fused_equals_reference(name: str) -> None:
    assert_one_answer(*private_trainer(UNEQUAL, *METHODS[name]), ROUNDS, IN_CHUNKS)


def test_the_ledger_does_not_depend_on_the_engine(tmp_path: Path) -> None:
    """A whole run with budgets of their own: charged alike, and spent alike."""
    budgets = ("privacy.noise_multiplier=0", "privacy.epsilon=5", "privacy.budgets.a0=2", "participation.rate=0.6")
    runs = {}
    for engine in ("fused", "reference"):
        config = config_of(*DP, *budgets, "rounds=3", f"engine.name={engine}", "engine.device=cpu")
        runs[engine] = train(config, tmp_path / engine, UNEQUAL)
        assert runs[engine].folder.environment["engine_choice"]["name"] == engine
    ours, wanted = (read_accounts(run.folder.ledger) for run in runs.values())
    assert ours == wanted
    assert {account.budget.epsilon for account in ours} == {2, 5}
    for row, truth in zip(runs["fused"].metrics(), runs["reference"].metrics(), strict=True):
        assert row["participants"] == truth["participants"]
        assert row["train/vae/loss"] == pytest.approx(truth["train/vae/loss"], rel=1e-4)
