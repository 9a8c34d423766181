"""IFCA: what a record adds to an answer, how much noise each answer has, and that the true groups explain best."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fedloom
from fedloom.discovery.branches import ANSWER, QUESTIONS, RANK, Explained, first_bases, found_by_loss, search
from fedloom.discovery.features import FourierFeatures
from fedloom.discovery.release import RELEASE
from fedloom.engines.before import released
from fedloom.errors import ConfigError
from fedloom.experiment import Experiment
from fedloom.federation.building import build_federation
from fedloom.federation.records import Batch
from fedloom.privacy.accounting import Gaussian
from fedloom.privacy.ledger import Ledger
from fedloom.privacy.noise import StreamNoise
from fedloom.streams import Streams
from local_grid import remote
from support import tiny_config

SEARCH = ("data.groups=discover", "data.silos=3", "data.records_per_silo=120")
BY_LOSS = (*SEARCH, "discovery.by=loss", "discovery.groups=2")
PRIVATE = ("privacy.mechanism=dp-sgd", "privacy.epsilon=200", "privacy.shares.discovery=0.9")
TRUE = {f"{source}-{n}": f"group-{g}" for g, source in ((1, "mnist"), (2, "fashion-mnist")) for n in range(3)}


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_no_record_adds_more_than_a_matrix_of_length_one_whatever_is_asked(scale: float) -> None:
    bases = scale * first_bases(128, 3, 4, generator())
    none = torch.zeros(20, dtype=torch.int64)
    batch = Batch(torch.rand(20, 1, 28, 28), none, none, torch.ones(20))
    rows = Explained(FourierFeatures(64, 1), bases)(nn.Identity(), batch)[ANSWER]
    assert rows.shape == (20, 128, 3 * 4 * RANK)
    assert 0 < float(rows.flatten(1).norm(dim=1).max()) <= 1 + 1e-5


def test_all_answers_together_cost_what_one_release_with_the_charged_noise_would() -> None:
    """So many Gaussian releases cost what one costs whose deviation is smaller by the root of their number."""
    config = tiny_config(*BY_LOSS, *PRIVATE, "privacy.noise=test", "local.batch_size=8")
    trainer = Experiment.of(config).trainer
    exact, noisy = (
        released(each, 0, StreamNoise(Streams(5)))[0].payloads[RELEASE][ANSWER]
        for each in (replace(trainer, privacy=()), trainer)
    )
    privacy = replace(trainer.privacy[0], settings=replace(trainer.privacy[0].settings, noise="secure"))
    (event,) = privacy.events(0).values()
    assert isinstance(event, Gaussian)
    assert (noisy - exact).std().item() == pytest.approx(event.noise_multiplier * math.sqrt(QUESTIONS), rel=0.1)


def test_each_question_has_noise_of_its_own() -> None:
    trainer = Experiment.of(tiny_config(*BY_LOSS, *PRIVATE, "privacy.noise=test", "local.batch_size=8")).trainer
    first, second = (released(trainer, 0, StreamNoise(Streams(5)), step)[0] for step in (0, 1))
    assert not torch.equal(first.payloads[RELEASE][ANSWER], second.payloads[RELEASE][ANSWER])


def silos_in(subspaces: list[Tensor], members: list[int]) -> list[Tensor]:
    """Second moments of silos whose records are of length 1, each in the subspace of its group."""
    return [subspaces[group] @ subspaces[group].T / RANK for group in members]


@pytest.mark.parametrize("restarts", [1, 4])
def test_records_lie_within_the_branch_of_their_group_and_outside_of_all_others(restarts: int) -> None:
    whole = torch.linalg.qr(torch.randn(24, 24, generator=generator(), dtype=torch.float64)).Q
    members = [0, 1, 2, 0, 1, 2, 1]
    moments = silos_in([whole[:, :4], whole[:, 4:8], whole[:, 8:12]], members)
    first = first_bases(24, 3, restarts, generator())
    losses = search(lambda bases: [own @ bases for own in moments], first, 3, restarts, generator())
    found = found_by_loss(losses, torch.zeros(7, dtype=torch.float64), torch.full((7,), 100.0, dtype=torch.float64))
    assert found.labels == (0, 1, 2, 0, 1, 2, 1)
    sorted_losses = losses.sort(dim=1).values
    assert torch.allclose(sorted_losses, torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64).expand(7, 3), atol=1e-9)
    assert found.odds.max(axis=1).tolist() == pytest.approx([1.0] * 7)


def test_a_branch_that_no_silo_takes_makes_no_group() -> None:
    whole = torch.linalg.qr(torch.randn(24, 24, generator=generator(), dtype=torch.float64)).Q
    moments = silos_in([whole[:, :4], whole[:, 4:8]], [0, 0, 1, 1, 1, 0])
    first = first_bases(24, 2, 1, generator())
    losses = search(lambda bases: [own @ bases for own in moments], first, 2, 1, generator())
    unused = torch.cat([torch.full((6, 1), 0.99, dtype=torch.float64), losses], dim=1)
    found = found_by_loss(unused, torch.zeros(6, dtype=torch.float64), torch.ones(6, dtype=torch.float64))
    assert found.labels == (0, 0, 1, 1, 1, 0)
    assert found.odds.shape == found.places.shape == (6, 2)


def test_odds_are_as_sure_as_the_noise_lets_them_be() -> None:
    """The difference of two losses varies twice as much as each of them."""
    losses = torch.tensor([[0.0, 0.4], [0.4, 0.0]], dtype=torch.float64)
    found = found_by_loss(losses, torch.full_like(losses[0], 0.2), torch.ones_like(losses[0]))
    assert found.error == pytest.approx((0.2, 0.2))
    assert found.odds[0, 0] == pytest.approx(1 / (1 + math.exp(-((0.4 / 0.2) ** 2) / 4)))


@pytest.mark.parametrize("privacy", [(), PRIVATE], ids=["exact", "private"])
def test_a_run_whose_silos_take_the_branch_of_the_least_loss(tmp_path: Path, privacy: tuple[str, ...]) -> None:
    run = fedloom.train(tiny_config(*BY_LOSS, *privacy, "local.batch_size=8"), tmp_path)
    assert run.folder.discovery is not None
    assert run.folder.discovery.groups == TRUE
    assert run.folder.discovery.sentence == "2 groups; how many to look for was set, not found"
    assert run.generator().groups == ("group-1", "group-2")
    assert [row["silo"] for row in run.folder.egress() if row["round"] == 0] == [*TRUE] * QUESTIONS
    if privacy:
        with closing(Ledger(run.folder.ledger, read_only=True)) as ledger:
            charges = ledger.charges(run.config.digest(), "mnist-0")
        assert [charge.release for charge in charges if charge.round == 0] == ["discovery"]


def test_what_cannot_be_asked_is_refused_in_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"'loss' needs discovery\.groups of at least 2, .* it is 0"):
        Experiment.of(tiny_config(*SEARCH, "discovery.by=loss"))
    config = tiny_config(*BY_LOSS)
    elsewhere = remote(build_federation(config.data, Streams(config.seed)))
    with pytest.raises(ConfigError, match=r"discovery\.by = 'loss' asks silos several times"):
        Experiment.of(config, elsewhere)
