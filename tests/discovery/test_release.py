"""The one release: how far a record moves it, what it costs, and how noisy the server takes it to be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedloom.config import Config
from fedloom.discovery.features import EMBEDDING
from fedloom.discovery.release import RELEASE, SHARE, statistic
from fedloom.engines.before import found_groups, released
from fedloom.engines.charging import privacy_of_silos
from fedloom.errors import ConfigError
from fedloom.experiment import Experiment
from fedloom.federation.building import build_federation
from fedloom.federation.records import Batch
from fedloom.privacy.accounting import Budget, Gaussian, default_delta
from fedloom.privacy.noise import StreamNoise
from fedloom.privacy.silo_privacy import whole_noise
from fedloom.streams import Streams
from support import tiny_config

SEARCH = ("data.groups=discover", "data.silos=3")
PRIVATE = (*SEARCH, "privacy.mechanism=dp-sgd", "privacy.epsilon=2", "privacy.noise=test")


def whole(config: Config) -> Experiment:
    return Experiment.of(config, build_federation(config.data, Streams(config.seed)))


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 8, 8), (7,)], ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e6, float("nan"), float("inf")])
def test_no_record_adds_more_than_a_vector_of_length_one(shape: tuple[int, ...], scale: float) -> None:
    """That is the sensitivity of the sum: of neighbours, one has one such vector more."""
    x = torch.rand(20, *shape) * scale
    none = torch.zeros(20, dtype=torch.int64)
    rows = statistic(tiny_config()).contribution(nn.Identity(), Batch(x, none, none, torch.ones(20)))[EMBEDDING]
    assert rows.shape == (20, 128)
    assert torch.allclose(
        torch.linalg.vector_norm(rows.double(), dim=1), torch.ones(20, dtype=torch.float64), atol=1e-5
    )
    assert statistic(tiny_config()).bound == 1.0


def test_without_a_mechanism_the_sum_is_exact_and_passes_the_egress_guard() -> None:
    experiment = whole(tiny_config(*SEARCH))
    update, egress = released(experiment.trainer, 2)
    silo = experiment.federation.silos[2]
    rows = statistic(experiment.config).contribution(
        nn.Identity(), Batch(silo.train.values, silo.train.y, silo.train.group, torch.ones(40))
    )[EMBEDDING]
    assert torch.allclose(update.payloads[RELEASE][EMBEDDING], rows.double().sum(dim=0).float(), atol=1e-5)
    assert update.counts == {"all": 40.0, "group=all": 40.0}
    assert egress.round == 0
    assert egress.payloads == {"records": {}, RELEASE: {EMBEDDING: (128,)}}
    assert egress.bytes == 128 * 4 + 2 * 8


def test_the_release_is_paid_for_by_its_share_before_the_first_round_and_training_by_the_rest() -> None:
    experiment = whole(tiny_config(*PRIVATE))
    privacy = experiment.trainer.privacy[0]
    sigma = whole_noise(Budget(2.0, default_delta(40), "pld", "record")) / SHARE**0.5
    assert privacy.payload_noise[RELEASE] == pytest.approx(sigma)
    real = replace(privacy, settings=replace(privacy.settings, noise="secure"))
    assert real.events(0) == {RELEASE: Gaussian(real.payload_noise[RELEASE])}
    assert RELEASE not in real.events(1)
    events = [event for number in (0, 1, 2) for event in real.events(number).values()]
    assert 0.98 * 2.0 <= real.budget.spent(events) <= 2.0
    named = whole(tiny_config(*PRIVATE, "data.groups=source"))
    alone = privacy_of_silos(named.config, named.federation, named.method, [(0,), (0,)])[0]
    assert privacy.noise[1] > alone.noise[1]


def test_noise_is_as_large_as_what_is_charged() -> None:
    experiment = whole(tiny_config(*PRIVATE, "discovery.frequencies=2048"))
    exact, _ = released(replace(experiment.trainer, privacy=()), 0)
    noisy, _ = released(experiment.trainer, 0, StreamNoise(Streams(0)))
    moved = noisy.payloads[RELEASE][EMBEDDING] - exact.payloads[RELEASE][EMBEDDING]
    assert moved.std().item() == pytest.approx(experiment.trainer.privacy[0].payload_noise[RELEASE], rel=0.05)


def test_the_server_takes_a_place_to_be_as_noisy_as_it_is() -> None:
    """Sampling: what vectors of length 1 vary around their mean, over their number; noise on top, over its square."""
    exact, private = whole(tiny_config(*SEARCH)).trainer, whole(tiny_config(*PRIVATE)).trainer
    updates = [released(exact, silo)[0] for silo in range(6)]
    mean = updates[1].payloads[RELEASE][EMBEDDING].double() / 40
    assert found_groups(exact, updates).error[1] ** 2 == pytest.approx((1 - float(mean @ mean)) / 40 / 128)
    sigma = private.privacy[1].payload_noise[RELEASE]
    within = np.clip(1 - max(0.0, float(mean @ mean) - 128 * (sigma / 40) ** 2), 0, 1)
    expected = (sigma / 40) ** 2 + within / 40 / 128
    assert found_groups(private, updates).error[1] ** 2 == pytest.approx(expected)


def test_shared_noise_is_refused_in_one_sentence() -> None:
    config = tiny_config(*PRIVATE, "privacy.trust=distributed", "local.steps=1", "local.optimizer=sgd")
    with pytest.raises(ConfigError, match=r"'discover' needs privacy\.trust = 'local'"):
        _ = whole(config).trainer
