"""Private pretraining at a silo: its own share of the budget, on blocks that stay, once."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedloom.engines.base import FederationState, SiloState, Task, initial_state, pretraining_phases, site_of
from fedloom.engines.fused import FusedEngine, FusedOptions
from fedloom.engines.fused_support import UnsupportedError
from fedloom.engines.local_state import MODEL
from fedloom.engines.private_training import PrivateTraining, learners_of
from fedloom.engines.reference import ReferenceEngine
from fedloom.engines.training import Trainer, state_of
from fedloom.errors import ConfigError
from fedloom.experiment import Experiment, train
from fedloom.federation.rounds import RoundContext
from fedloom.privacy.accounting import Budget, Gaussian, noise_multiplier
from fedloom.privacy.ledger import read_accounts
from fedloom.privacy.silo_privacy import whole_noise
from support import equal_bits, federation_of, tiny_config

FEDERATION = federation_of([0] * 40, [1] * 32)
STEPS = 3
SEEDED = "privacy.noise=test"
DP = ("privacy.mechanism=dp-sgd", "privacy.epsilon=4", "privacy.delta=1e-3", "privacy.accountant=rdp")
SETTINGS = (*DP, "sharing.scopes.encoder=silo", "local.optimizer=sgd", f"privacy.pretraining={STEPS}")


def trainer_of(*overrides: str) -> tuple[Trainer, FederationState]:
    experiment = Experiment.of(tiny_config(*SETTINGS, *overrides), FEDERATION)
    return experiment.trainer, initial_state(experiment.method, FEDERATION, experiment.config)


def task_of(trainer: Trainer, start: FederationState, round: int) -> Task:
    (task,) = ReferenceEngine(trainer).tasks(start, RoundContext(round, 2, (0,)))
    return task


@pytest.mark.parametrize("share", [0.1, 0.4])
def test_it_is_as_private_as_a_sum_with_its_share_and_all_together_stay_within_the_budget(share: float) -> None:
    trainer, _ = trainer_of(f"privacy.shares.pretraining={share}")
    for plan in trainer.privacy:
        whole = Budget(4.0, 1e-3, "rdp")
        part = whole.spent([Gaussian(whole_noise(whole) / math.sqrt(share))])
        noise = noise_multiplier(Budget(part, 1e-3, "rdp"), rate=plan.rate, steps=STEPS)
        first, second = plan.events(1), plan.events(2)
        assert first["pretraining"] == Gaussian(noise, plan.rate, STEPS)
        assert set(second) == {"update"}
        assert 0.99 * 4 <= whole.spent([*first.values(), *second.values()]) <= 4


def test_it_moves_what_stays_at_the_silo_and_nothing_else() -> None:
    """The first round is the pretraining by hand, on the encoder alone, followed by the round without it."""
    trainer, start = trainer_of(SEEDED)
    task, silo = task_of(trainer, start, 1), FEDERATION.silos[0]
    model = trainer.method.build(site_of(FEDERATION, 0))
    trainer._begun(task, model)
    phases = pretraining_phases(trainer.method)
    assert [phase.trains for phase in phases] == [("encoder",)]
    before, mechanism = replace(task, context=RoundContext(0, 2, (0,))), trainer.privacy[0].pretraining_mechanism
    learners = learners_of(phases, model, state_of(phases, model, before))
    bounds = {phase.name: mechanism.clipping.start() for phase in phases}
    private = PrivateTraining(mechanism, silo, before, trainer.streams, trainer.seeded, 16, bounds, trainer.made_up(0))
    fresh = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert len(list(private.steps(STEPS, model, learners, dict(task.received), lambda *_: {}))) == STEPS
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, fresh[name])}
    assert moved == {name for name in fresh if name.startswith("encoder.")}

    kept = {MODEL + name: tensor for name, tensor in model.state_dict().items() if name.startswith("encoder.")}
    without = replace(trainer, privacy=tuple(replace(plan, pretraining=0) for plan in trainer.privacy))
    wanted, found = without.train(replace(task, state=SiloState(kept))), trainer.train(task)
    assert found.steps == wanted.steps == 3
    assert equal_bits(found.state.tensors, wanted.state.tensors)


def test_it_comes_once() -> None:
    """In its second round a silo goes on from what it kept."""
    trainer, start = trainer_of(SEEDED)
    without = replace(trainer, privacy=tuple(replace(plan, pretraining=0) for plan in trainer.privacy))
    task = replace(task_of(trainer, start, 2), state=trainer.train(task_of(trainer, start, 1)).state)
    assert equal_bits(trainer.train(task).state.tensors, without.train(task).state.tensors)


def test_a_run_pays_for_it_before_its_first_round(tmp_path: Path) -> None:
    run = train(tiny_config(*SETTINGS), tmp_path / "run", FEDERATION)
    for account in read_accounts(run.folder.ledger):
        assert [(release.name, release.charges) for release in account.releases] == [("pretraining", 1), ("update", 2)]
        assert account.spent <= 4


def test_a_trial_does_not_pretrain() -> None:
    """Engines try a few steps before a run, for which nobody was charged."""
    trainer, start = trainer_of(SEEDED)
    task = task_of(trainer, start, 1)
    fresh = trainer.method.build(site_of(FEDERATION, 0))
    trainer._begun(task, fresh)
    found = trainer.train(replace(task, step_limit=0))
    encoder: dict[str, Tensor] = {n: t for n, t in found.state.tensors.items() if n.startswith(f"{MODEL}encoder.")}
    assert encoder
    assert all(torch.equal(tensor, fresh.state_dict()[name.removeprefix(MODEL)]) for name, tensor in encoder.items())


def test_what_cannot_be_had_is_said() -> None:
    with pytest.raises(ConfigError, match=r"privacy.pretraining = 3 needs a trained block that nothing comes down for"):
        _ = Experiment.of(tiny_config(*DP, "privacy.pretraining=3"), FEDERATION).trainer
    with pytest.raises(ConfigError, match="other releases take 1 of the budget of silo 'silo-0'"):
        trainer_of("privacy.shares.pretraining=1.0")
    with pytest.raises(ConfigError, match=r"privacy.shares: unknown payload 'pretraining'"):
        trainer_of("privacy.pretraining=0", "privacy.shares.pretraining=0.1")
    with pytest.raises(UnsupportedError, match=r"privacy.pretraining is not built into the fused engine"):
        FusedEngine(trainer_of()[0], FusedOptions(torch.device("cpu")))
