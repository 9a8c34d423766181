from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import binomtest
from torch import Tensor, nn

from fedloom.errors import ConfigError
from fedloom.privacy.accounting import Gaussian, spent
from fedloom.privacy.audits import (
    Rate,
    attack_area,
    audit_canaries,
    canary_coins,
    chance_of_guessing,
    density_scores,
    distance_scores,
    epsilon_lower_bound,
    loss_scores,
    nearest_distances,
    outlier_exposure,
    true_positive_rate,
)
from fedloom.privacy.clipping import Fixed
from fedloom.privacy.dp_sgd import DPSGD
from fedloom.privacy.noise import DeviceNoise, Moment
from fedloom.streams import Streams


def test_guessing_everything_right_bounds_epsilon_in_closed_form() -> None:
    """All r right has probability (e^eps / (1 + e^eps))^r: at 95 % eps is above log(p / (1 - p)), p = 0.05^(1/r)."""
    p = 0.05 ** (1 / 40)
    assert epsilon_lower_bound(100, 40, 40, delta=0.0) == pytest.approx(math.log(p / (1 - p)), abs=1e-3)


def test_half_the_guesses_right_shows_nothing() -> None:
    assert epsilon_lower_bound(100, 100, 50, delta=1e-5) == 0
    assert epsilon_lower_bound(100, 0, 0, delta=1e-5) == 0


def test_delta_weakens_the_bound_by_its_own_term() -> None:
    """v = r = 2, fair coins: tail 1/4; masses 1/2 and 1/2 + 1/4 over 2, so the slack is 1/2; 2 m delta = 0.02."""
    assert chance_of_guessing(0.0, 0.001, 10, 2, 2) == pytest.approx(0.25 + 0.02 * 0.5)
    assert epsilon_lower_bound(1000, 200, 150, delta=1e-3) < epsilon_lower_bound(1000, 200, 150, delta=0.0)


def randomised_response(epsilon: float, canaries: int, seed: int) -> tuple[Tensor, Tensor]:
    """The mechanism for which the bound is tight: each coin is told truly with probability e^eps / (1 + e^eps)."""
    draw = torch.Generator().manual_seed(seed)
    coins = torch.rand(canaries, generator=draw) < 0.5
    truth = torch.rand(canaries, generator=draw) < 1 / (1 + math.exp(-epsilon))
    scores = torch.where(coins == truth, 1.0, 0.0) + 1e-3 * torch.rand(canaries, generator=draw)
    return scores, coins


def test_the_bound_holds_as_often_as_it_says_and_is_not_idle() -> None:
    bounds = [
        audit_canaries(*randomised_response(1.0, 500, seed), delta=0.0, guesses=[500]).lower_bound
        for seed in range(100)
    ]
    wrong = sum(bound > 1.0 for bound in bounds)
    assert wrong <= 12, "at most 5 % and chance"
    assert sorted(bounds)[50] > 0.7


def trained_with_canaries(noise: float, count: int = 1000) -> tuple[Tensor, Tensor]:
    """One full-batch step of DP-SGD, in which canary i pulls at weight i alone; its score is how far that moved."""
    streams = Streams(8)
    coins = canary_coins(streams, count)
    w = nn.Parameter(torch.zeros(count))
    dp = DPSGD(noise, rate=1.0, expected=1.0, clipping=Fixed(1.0))
    total = dp.clipped_sum(5.0 * w, coins.float(), {"w": w}, dp.clipping.start())
    gradients, _ = dp.release(total, dp.draw({"w": w}, DeviceNoise(streams), Moment(0, 1, 0)))
    return gradients["w"], coins


def test_an_honest_mechanism_is_not_refuted_and_one_with_less_noise_is() -> None:
    claimed = spent([Gaussian(2.0)], 1e-5)
    honest = audit_canaries(*trained_with_canaries(2.0), delta=1e-5)
    assert 0 < honest.lower_bound < claimed
    assert not honest.refutes(claimed)
    assert "not refuted, which is no evidence of privacy" in honest.sentence(claimed)
    faulty = audit_canaries(*trained_with_canaries(0.3), delta=1e-5)
    assert faulty.refutes(claimed)
    assert faulty.sentence(claimed).startswith("the claim of epsilon 1.99 is refuted")


def test_canaries_are_fair_and_known_before_training() -> None:
    coins = canary_coins(Streams(1), 4000)
    assert torch.equal(coins, canary_coins(Streams(1), 4000))
    assert binomtest(int(coins.sum()), 4000).pvalue > 0.001


def test_trying_several_numbers_of_guesses_is_paid_for() -> None:
    scores, coins = randomised_response(2.0, 300, 0)
    one = audit_canaries(scores, coins, delta=0.0, guesses=[300])
    several = audit_canaries(scores, coins, delta=0.0, guesses=[300, 300, 300])
    assert several.lower_bound < one.lower_bound
    assert several.lower_bound == epsilon_lower_bound(300, 300, one.correct, 0.0, 1 - 0.05 / 3)


# Membership inference


def overfitted(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Members, others, synthetic data that repeat members with little change, and reference data."""
    draw = torch.Generator().manual_seed(seed)
    members, others, reference = (torch.randn(200, 6, generator=draw) for _ in range(3))
    return members, others, members[:100] + 0.05 * torch.randn(100, 6, generator=draw), reference


@pytest.mark.parametrize("attack", ["distance", "density"])
def test_memorised_members_are_found_in_synthetic_data(attack: str) -> None:
    members, others, synthetic, reference = overfitted()
    fresh = torch.randn(100, 6, generator=torch.Generator().manual_seed(9))
    scores = {
        "distance": lambda points, made: distance_scores(points, made),
        "density": lambda points, made: density_scores(points, made, reference),
    }[attack]
    found = true_positive_rate(scores(members, synthetic), scores(others, synthetic), 0.01)
    assert found.low > 0.35, "half the members were repeated"
    assert attack_area(scores(members, fresh), scores(others, fresh)) == pytest.approx(0.5, abs=0.08)


def test_the_density_ratio_forgives_records_that_are_common_anyway() -> None:
    """A point in the middle is close to any synthetic data; only the ratio knows that this means nothing."""
    draw = torch.Generator().manual_seed(0)
    reference, synthetic = torch.randn(400, 2, generator=draw), torch.randn(400, 2, generator=draw)
    outlier = torch.tensor([[6.0, 6.0]])
    synthetic = torch.cat((synthetic, outlier + 0.1))
    middle = torch.zeros(1, 2)
    assert distance_scores(middle, synthetic) > distance_scores(outlier, synthetic)
    assert density_scores(outlier, synthetic, reference) > density_scores(middle, synthetic, reference) + 2


def test_losses_are_calibrated_by_a_reference() -> None:
    losses, reference = torch.tensor([1.0, 3.0]), torch.tensor([1.5, 9.0])
    assert loss_scores(losses).tolist() == [-1, -3]
    assert loss_scores(losses, reference).tolist() == [0.5, 6]


def test_nearest_distances_do_not_depend_on_chunks() -> None:
    points, samples = torch.randn(7, 2, 3), torch.randn(5, 2, 3)
    expected = torch.stack([(p - samples).flatten(1).norm(dim=1).min() for p in points])
    torch.testing.assert_close(nearest_distances(points, samples, chunk=2), expected)


@pytest.mark.parametrize(("allowed", "found"), [(0.0, 0.25), (0.1, 0.5), (0.2, 0.75)])
def test_the_true_positive_rate_is_that_at_the_threshold_of_the_false_one(allowed: float, found: float) -> None:
    """Others 0 to 9, members 9.5, 8.5, 7.5 and 1."""
    rate = true_positive_rate(torch.tensor([9.5, 8.5, 7.5, 1.0]), torch.arange(10.0), allowed)
    assert rate.value == found
    assert rate.low < found < rate.high


def test_the_area_is_the_chance_of_ranking_right() -> None:
    assert attack_area(torch.tensor([2.0, 0.5]), torch.tensor([1.0, 0.0])) == pytest.approx(3 / 4)
    assert attack_area(torch.zeros(3), torch.zeros(2)) == 0.5


@pytest.mark.parametrize(("hits", "trials"), [(0, 10), (3, 10), (10, 10)])
def test_rates_have_exact_intervals(hits: int, trials: int) -> None:
    theirs = binomtest(hits, trials).proportion_ci(0.95, "exact")
    found = Rate.of(hits, trials)
    assert (found.value, found.low, found.high) == pytest.approx((hits / trials, theirs.low, theirs.high))


# Outliers


def test_outliers_that_were_learned_by_heart_are_exposed_and_typical_points_are_not() -> None:
    draw = torch.Generator().manual_seed(0)
    typical, typical_out = torch.randn(200, 8, generator=draw), torch.randn(200, 8, generator=draw)
    outliers, unseen = 5 + torch.randn(60, 8, generator=draw), 5 + torch.randn(200, 8, generator=draw)
    samples = torch.cat((torch.randn(500, 8, generator=draw), outliers[:30] + 0.01))
    found = outlier_exposure((outliers, unseen), (typical, typical_out), lambda x: nearest_distances(x, samples))
    assert found.outliers.value == pytest.approx(0.5, abs=0.1)
    assert found.typical.low <= found.level <= found.typical.high
    harmless = outlier_exposure(
        (outliers, unseen), (typical, typical_out), lambda x: nearest_distances(x, samples[:500])
    )
    assert harmless.outliers.low <= harmless.level


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        (lambda: epsilon_lower_bound(10, 11, 3, 0.0), "3 right of 11 guesses about 10 canaries"),
        (lambda: audit_canaries(torch.zeros(1), torch.zeros(1), delta=0.0), "not 1 scores"),
        (lambda: true_positive_rate(torch.zeros(2), torch.zeros(2), 1.0), "the false positive rate is 1.0"),
    ],
)
def test_mistakes_are_named(mistake, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        mistake()
