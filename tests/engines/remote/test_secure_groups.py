"""Blocks of groups, and payloads beside training, under shared noise: one sum of all silos has every group's slots."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedloom.config import Config
from fedloom.engines.base import Job, initial_state
from fedloom.engines.fused import FusedEngine, FusedOptions
from fedloom.engines.fused_support import UnsupportedError
from fedloom.engines.masked_sums import SummedRounds, check_shared
from fedloom.engines.reference import ReferenceEngine
from fedloom.engines.training import Trainer
from fedloom.errors import ConfigError
from fedloom.experiment import Experiment
from fedloom.federation.records import Federation
from fedloom.federation.rounds import RoundContext
from fedloom.privacy.accounting import Gaussian
from fedloom.privacy.ledger import UPDATE, read_accounts
from fedloom.privacy.silo_privacy import whole_noise
from fedloom.runs.folder import RunFolder
from local_grid import remote
from secure_deployment import SEEDED, SecureDeployment, blocks_of, grouped, shared_config

STEP = ("rounds=2", "local.steps=1", "local.optimizer=sgd", "local.learning_rate=0.5", "sharing.weights=equal")
PLUS_D = ("method.decoder=group",)
PLUS_L_D = (*PLUS_D, "method.prior=one-hot")
COUNTS = "class-counts"


SIX = grouped((0,), (0,), (0, 1), (1,), (1,), (0,))


def simulated_and_real(config: Config, federation: Federation, folder: Path) -> tuple[SecureDeployment, list[str]]:
    """The deployment that has run, and the tensors in which the simulation differs from it."""
    simulated = blocks_of(Experiment.of(config, federation).run(folder / "simulated"))
    place = SecureDeployment(folder, config, federation)
    found = blocks_of(place.run())
    assert simulated.keys() == found.keys()
    return place, [name for name, tensor in simulated.items() if not torch.equal(tensor, found[name])]


@pytest.mark.parametrize("options", [PLUS_D, PLUS_L_D], ids=["+D", "+L+D"])
def test_decoders_of_groups_are_those_of_the_simulation_to_the_last_bit(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    config = shared_config("fissionvae", SEEDED, *STEP, *options)
    place, differing = simulated_and_real(config, SIX, tmp_path)
    assert differing == []
    asked = {silo: frame for silo, frame in place.asked if frame.header.get("turn") == "keys"}
    assert {silo: sorted(frame.parts) for silo, frame in asked.items() if silo in ("s0", "s2", "s4")} == {
        "s0": ["decoder@group=a", "encoder@all"],
        "s2": ["decoder@group=a", "decoder@group=b", "encoder@all"],
        "s4": ["decoder@group=b", "encoder@all"],
    }


def trainer_of(*overrides: str) -> Trainer:
    return Experiment.of(shared_config("fissionvae", SEEDED, *STEP, *overrides), SIX).trainer


def gradients_of(trainer: Trainer) -> list[dict[str, torch.Tensor]]:
    """What each silo adds to the sum of the first round, by name."""
    layout = SummedRounds(trainer.config, trainer.federation, trainer.method, trainer.privacy[0]).of(1)
    start = initial_state(trainer.method, trainer.federation, trainer.config)
    tasks = ReferenceEngine(trainer).tasks(start, RoundContext(1, 2, tuple(range(len(trainer.federation)))))
    return [dict(trainer.train(replace(task, step=layout.step)).update.payloads[UPDATE]) for task in tasks]


def test_every_silo_adds_noise_to_every_groups_sum_and_gradients_to_its_own_alone() -> None:
    """Of the noise that is charged each of six silos adds 1 / sqrt(6 - 1 - 1), to every group's copy."""
    bound = 1 / 20  # a clip bound over the expected batch
    quiet = gradients_of(trainer_of("privacy.epsilon=0", "privacy.noise_multiplier=1e-4", *PLUS_D))
    for silo, group in ((0, "b"), (3, "a"), (5, "b")):
        foreign = [tensor for name, tensor in quiet[silo].items() if f"@group={group}:" in name]
        own = [tensor for name, tensor in quiet[silo].items() if f"@group={group}:" not in name]
        assert len(foreign) == 4
        assert max(tensor.abs().max().item() for tensor in foreign) < 6 * bound * 1e-4 / 2
        assert min(tensor.abs().max().item() for tensor in own) > 10 * bound * 1e-4
    wide = trainer_of("privacy.epsilon=0", "privacy.noise_multiplier=50", *PLUS_D, "model.hidden=[400]")
    for sent in gradients_of(wide):
        for group in ("a", "b"):
            slot = torch.cat([tensor.flatten() for name, tensor in sent.items() if f"@group={group}:" in name])
            deviation = slot.square().mean().sqrt().item()
            assert deviation == pytest.approx(50 * bound / 2, rel=6 / math.sqrt(2 * len(slot)) + 1e-3)


def test_decoders_of_groups_are_the_mean_of_their_groups_steps() -> None:
    """With next to no noise: four silos of group a, three of group b, six in all, by plain arithmetic."""
    trainer = trainer_of("privacy.epsilon=0", "privacy.noise_multiplier=1e-4", *PLUS_D)
    state, context = initial_state(trainer.method, SIX, trainer.config), RoundContext(1, 2, tuple(range(6)))
    sent = gradients_of(trainer)
    after, _ = ReferenceEngine(trainer).round(Job(state, context, lambda _: None))
    for group, members in (("group=a", (0, 1, 2, 5)), ("group=b", (2, 3, 4)), ("all", range(6))):
        for key in (key for key in state.server.blocks if key.owner == group):
            for name, before in state.server.blocks[key].items():
                mean = torch.stack([sent[silo][f"{key}:{name}"] for silo in members]).mean(dim=0)
                moved = before - after.server.blocks[key][name]
                torch.testing.assert_close(moved, 0.5 * mean.float(), rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize(("tolerated", "least"), [(0, 2), (1, 3), (2, 4)])
def test_a_group_in_which_the_tolerated_could_single_one_out_is_refused(tolerated: int, least: int) -> None:
    """Beside those that may collude or drop out there must be two whose sum it is; both ways of asking agree."""

    def complaint(members: int) -> str:
        federation = grouped(*[(0,)] * 7, *[(1,)] * members)
        config = shared_config("fissionvae", *STEP, *PLUS_D, f"privacy.tolerated={tolerated}")
        told = []
        for ask in (
            lambda: Experiment.of(config, federation).trainer,
            lambda: check_shared(
                config,
                remote(federation),
                Experiment.of(config, remote(federation)).method,
                {silo.name: len(silo) for silo in federation.silos},
            ),
        ):
            try:
                ask()
                told.append("")
            except ConfigError as error:
                told.append(str(error))
        assert told[0] == told[1]
        return told[0]

    assert complaint(least) == ""
    told = f"inside group 'b', which has {least - 1} silos, and it takes at least {least}: 2 beside those"
    assert told in complaint(least - 1)


@pytest.mark.system
def test_workers_find_the_same_as_one(tmp_path: Path) -> None:
    """What they hand back is packed by name, as is what they are handed."""
    found = []
    for workers in (1, 2):
        config = shared_config("fissionvae", SEEDED, *STEP, *PLUS_D, "rounds=1", f"engine.workers={workers}")
        found.append(blocks_of(Experiment.of(config, SIX).run(tmp_path / str(workers))))
    assert [name for name, tensor in found[0].items() if not torch.equal(tensor, found[1][name])] == []


def test_the_fused_engine_leaves_such_steps_to_the_plain_loop() -> None:
    with pytest.raises(UnsupportedError, match="the fused engine shares no noise of groups, or beside payloads"):
        FusedEngine(trainer_of(*PLUS_D), FusedOptions(torch.device("cpu")))


LABELS = ("method.labels=global-dp", "sharing.scopes.encoder=global")
FIVE = replace(grouped(*[(0,)] * 5), groups=("all",), test=SIX.silos[0].train)


def test_label_shares_are_one_more_sum_of_the_first_round(tmp_path: Path) -> None:
    _, differing = simulated_and_real(shared_config("dp_cvae", SEEDED, *STEP, *LABELS), FIVE, tmp_path)
    assert differing == []
    rows = [row for row in RunFolder.open(tmp_path / "server").egress() if row["silo"] == "s1"]
    assert [sorted(row["payloads"]) for row in rows] == [[COUNTS, "records", UPDATE], ["records", UPDATE]]
    assert all(row["masked"] for row in rows)


def test_label_shares_have_their_part_of_the_budget_on_the_ledger(tmp_path: Path) -> None:
    """Epsilon 1 pays for two steps and the counts together, and the counts have the noise of a share of 0.02."""
    config = shared_config("dp_cvae", *STEP, *LABELS)
    place = SecureDeployment(tmp_path, config, FIVE, repeatable=False)
    place.run()
    plan = Experiment.of(config, FIVE).trainer.privacy[0]
    (account,) = read_accounts(place.path / "s1" / "ledger.sqlite")
    noises = [event.noise_multiplier for event in account.events if isinstance(event, Gaussian)]
    assert sorted(noises) == sorted([plan.payload_noise[COUNTS], plan.noise[1], plan.noise[2]])
    assert plan.payload_noise[COUNTS] == pytest.approx(whole_noise(plan.granted) / math.sqrt(0.02))
    assert 0.99 < plan.budget.spent(list(account.events)) <= 1.0
