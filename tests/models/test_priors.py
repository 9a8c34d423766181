from __future__ import annotations

import pytest
import torch

from fedloom.errors import ConfigError
from fedloom.models.priors import PRIORS, prior_means
from fedloom.streams import Streams

EXACT = {
    ("identical", 2): [[0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]],
    ("identical", 5): [[0, 0, 0, 0, 0, 0]] * 5,
    ("learnable", 2): [[0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]],  # not used by any loss
    ("one-hot", 2): [[1, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0]],
    ("one-hot", 5): [
        [1, 0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
    ],
    ("symmetrical", 2): [[-1] * 6, [1] * 6],
    ("symmetrical", 5): [[-2] * 6, [-1] * 6, [0] * 6, [1] * 6, [2] * 6],
    ("wave", 2): [[1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1]],
    # Coordinate j belongs to group floor(5 j / 6): 0, 0, 1, 2, 3, 4.
    ("wave", 5): [
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ],
}


@pytest.mark.parametrize(("name", "groups"), EXACT)
def test_means_are_exact(name: str, groups: int) -> None:
    found = prior_means(name, groups, 6, Streams(0))
    assert found.dtype is torch.float32
    assert found.tolist() == EXACT[name, groups]


@pytest.mark.parametrize("groups", [2, 5])
def test_random_means_are_standard_normal_draws_fixed_by_the_seed(groups: int) -> None:
    found = prior_means("random", groups, 6, Streams(3))
    assert torch.equal(found, Streams(3).normal("prior", groups, 6))
    assert torch.equal(found, prior_means("random", groups, 6, Streams(3)))
    assert not torch.equal(found, prior_means("random", groups, 6, Streams(4)))


def test_every_prior_is_tested() -> None:
    assert {name for name, _ in EXACT} | {"random"} == set(PRIORS)


@pytest.mark.parametrize("groups", [1, 3, 4])
def test_symmetrical_means_are_distinct_and_cancel(groups: int) -> None:
    levels = prior_means("symmetrical", groups, 1, Streams(0)).flatten().tolist()
    assert len(set(levels)) == groups
    assert sum(levels) == 0


@pytest.mark.parametrize("name", ["one-hot", "wave"])
def test_a_latent_too_small_for_the_groups_is_refused(name: str) -> None:
    assert prior_means(name, 5, 5, Streams(0)).sum() == 5
    with pytest.raises(ConfigError, match=f"method.prior = '{name}'.* 5 groups.*model.latent = 4.*at least 5"):
        prior_means(name, 5, 4, Streams(0))


def test_an_unknown_prior_is_named() -> None:
    with pytest.raises(ConfigError, match=r"method.prior: unknown prior 'wavy'; did you mean 'wave'\?"):
        prior_means("wavy", 2, 4, Streams(0))
