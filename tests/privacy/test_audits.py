from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import binomtest
from torch import Tensor, nn

from fedloom.errors import ConfigError
from fedloom.federation.canaries import canary_coins
from fedloom.privacy.accounting import Gaussian, spent
from fedloom.privacy.audits import (
    Rate,
    attack_area,
    audit_canaries,
    chance_of_guessing,
    density_scores,
    epsilon_lower_bound,
    nearest_distances,
    recognisable,
    true_positive_rate,
    usual_distance,
)
from fedloom.privacy.clipping import Fixed
from fedloom.privacy.dp_sgd import DPSGD
from fedloom.privacy.noise import NoiseKey, StreamNoise
from fedloom.streams import Streams
from support import written_out


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
    values = 5.0 * w
    total = dp.clipped_sum(values, coins.float(), {"w": w}, dp.clipping.start(), written_out(values, {"w": w}))
    gradients, _ = dp.release(total, dp.draw({"w": w}, StreamNoise(streams), NoiseKey(0, 1, 0)))
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
    assert not faulty.refutes(None)
    assert faulty.sentence(None).endswith("the run claims no epsilon")


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
        "distance": lambda points, made: -nearest_distances(points, made),
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
    assert nearest_distances(middle, synthetic) < nearest_distances(outlier, synthetic)
    assert density_scores(outlier, synthetic, reference) > density_scores(middle, synthetic, reference) + 2


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


def test_a_record_is_recognisable_where_its_output_is_close_and_shows_nobody_else() -> None:
    """On a line, typical records at 0 and 10: close means within 2, and the nearer of the record and 0 or 10 wins."""
    typical = torch.tensor([[0.0], [10.0]])
    points = torch.tensor([[5.0], [5.0], [1.0], [5.0], [5.0]])
    outputs = torch.tensor([[5.0], [3.0], [0.4], [2.4], [2.9]])
    #   exact; exactly at the limit; nearer to 0 than to the point; as near to 0, but beyond the limit; beyond the limit
    assert recognisable(points, outputs, typical, limit=2.0).tolist() == [True, True, False, False, False]
    assert recognisable(points, outputs, typical, limit=2.0, chunk=2).tolist() == [True, True, False, False, False]


def test_nothing_is_compared_with_itself() -> None:
    typical = torch.tensor([[0.0], [10.0]])
    assert not recognisable(typical, typical, typical, limit=1.0).any(), "each is as near to itself as to the record"
    assert recognisable(typical, typical, typical, limit=1.0, own=torch.tensor([0, 1])).all()


def test_what_is_usual_is_the_95th_percentile_of_typical_records() -> None:
    typical = torch.zeros(101, 2, 1)
    outputs = torch.arange(101.0).reshape(101, 1, 1) * torch.tensor([0.6, 0.8]).reshape(1, 2, 1)
    assert usual_distance(typical, outputs) == pytest.approx(95)


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
