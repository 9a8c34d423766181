from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants import PRVAccountant, RDPAccountant
from scipy.special import logsumexp
from scipy.stats import norm

from fedloom.errors import ConfigError, FedloomError, FedloomWarning
from fedloom.privacy.accounting import (
    ORDERS,
    Budget,
    Event,
    Gaussian,
    Neighbours,
    NoGuarantee,
    Vector,
    allocation,
    calibrate,
    check_delta,
    default_delta,
    event_of,
    noise_by_round,
    noise_multiplier,
    renyi_divergence,
    spent,
    to_mapping,
)


def random_cases(count: int) -> Iterator[tuple[float, float, int, float]]:
    """(rate, noise multiplier, steps, delta) over the orders of magnitude that occur, where epsilon stays below 20."""
    draw = random.Random(6)
    while count:
        rate, noise, steps = (
            10 ** draw.uniform(-2.5, -0.5),
            10 ** draw.uniform(0.25, 1),
            int(10 ** draw.uniform(0, 3.3)),
        )
        delta = 10 ** draw.uniform(-7, -4)
        if rate * math.sqrt(steps) / noise < 2:
            count -= 1
            yield rate, noise, steps, delta


def close(one: float, other: float) -> bool:
    return abs(one - other) <= max(0.01 * other, 0.02)


@pytest.mark.filterwarnings("ignore:Optimal order")
def test_pld_agrees_with_a_library_that_is_not_called_here() -> None:
    for rate, noise, steps, delta in random_cases(200):
        theirs = PRVAccountant()
        theirs.history = [(noise, rate, steps)]
        found = spent([Gaussian(noise, rate, steps)], delta)
        assert close(found, theirs.get_epsilon(delta)), (rate, noise, steps, delta)


@pytest.mark.filterwarnings("ignore:Optimal order")
def test_rdp_agrees_with_a_library_that_is_not_called_here() -> None:
    for rate, noise, steps, delta in random_cases(200):
        theirs = RDPAccountant()
        theirs.history = [(noise, rate, steps)]
        found = spent([Gaussian(noise, rate, steps)], delta, "rdp")
        assert close(found, theirs.get_epsilon(delta, alphas=list(ORDERS))), (rate, noise, steps, delta)


OTHER: dict[Neighbours, float] = {"added": 0.0, "replaced": -1.0}  # what the neighbour has in place of a record's 1
BOTH = pytest.mark.parametrize("neighbours", OTHER)


def densities(noise: float, rate: float, other: float, x: Vector) -> tuple[Vector, Vector]:
    """Of (1-q) N(0, s) + q N(1, s), and of the same with another number in place of 1."""
    one, two = ((1 - rate) * norm.pdf(x, 0, noise) + rate * norm.pdf(x, at, noise) for at in (1.0, other))
    return one, two


def delta_by_integration(noise: float, rate: float, other: float, epsilon: float) -> float:
    """The larger hockey-stick divergence between the two, by the trapezoid rule."""
    x = np.linspace(-1 - 12 * noise, 1 + 12 * noise, 400_001)
    one, two = densities(noise, rate, other, x)
    gaps = (one - math.exp(epsilon) * two, two - math.exp(epsilon) * one)
    return max(float(np.trapezoid(np.maximum(gap, 0), x)) for gap in gaps)


@BOTH
@pytest.mark.parametrize(("noise", "rate"), [(0.7, 1.0), (2.0, 1.0), (0.8, 0.1), (1.5, 0.3)])
@pytest.mark.parametrize("delta", [1e-3, 1e-5])
def test_a_single_release_agrees_with_direct_integration(
    noise: float, rate: float, delta: float, neighbours: Neighbours
) -> None:
    epsilon = spent([Gaussian(noise, rate)], delta, neighbours=neighbours)
    assert delta_by_integration(noise, rate, OTHER[neighbours], epsilon) <= delta * 1.0001
    assert delta_by_integration(noise, rate, OTHER[neighbours], epsilon * 0.99 - 1e-4) > delta


@BOTH
def test_two_releases_agree_with_direct_integration(neighbours: Neighbours) -> None:
    """Different noise and rates, over the square of all pairs of results."""
    first, second, delta = Gaussian(0.9, 0.1), Gaussian(1.4, 0.5), 1e-4
    sides = []
    for event in (first, second):
        x = np.linspace(-1 - 9 * event.noise_multiplier, 1 + 9 * event.noise_multiplier, 2001)
        pair = densities(event.noise_multiplier, event.rate, OTHER[neighbours], x)
        sides.append([each * (x[1] - x[0]) for each in pair])
    one, two = (np.outer(a, b) for a, b in zip(*sides, strict=True))

    def delta_at(epsilon: float) -> float:
        return max(float(np.maximum(p - math.exp(epsilon) * q, 0).sum()) for p, q in ((one, two), (two, one)))

    epsilon = spent([first, second], delta, neighbours=neighbours)
    assert delta_at(epsilon) <= delta * 1.001
    assert delta_at(epsilon * 0.99 - 1e-4) > delta


def test_no_other_two_records_are_told_apart_more_easily() -> None:
    """Their contributions v and w are vectors of any direction and length up to 1; here in the plane."""
    noise, rate, delta = 0.8, 0.3, 1e-3
    draw = np.random.default_rng(4)
    axis = np.linspace(-1 - 8 * noise, 1 + 8 * noise, 301)
    x, y = np.meshgrid(axis, axis)
    cell = (axis[1] - axis[0]) ** 2

    def density(at: complex) -> Vector:
        parts = ((1 - rate, 0j), (rate, at))
        return sum(w * norm.pdf(x, c.real, noise) * norm.pdf(y, c.imag, noise) * cell for w, c in parts)

    def delta_of(v: complex, w: complex) -> float:
        return float(np.maximum(density(v) - math.exp(epsilon) * density(w), 0).sum())

    epsilon = spent([Gaussian(noise, rate)], delta, neighbours="replaced")
    assert delta_of(1, -1) == pytest.approx(delta, rel=2e-3)
    for _ in range(60):
        v, w = np.sqrt(draw.random(2)) * np.exp(2j * np.pi * draw.random(2))
        assert delta_of(v, w) < delta * 1.002
        assert delta_of(v / abs(v), w / abs(w)) < delta * 1.002


@pytest.mark.parametrize("noise", [0.7, 3.0, 20.0])
@pytest.mark.parametrize("delta", [1e-2, 1e-6])
def test_to_replace_a_record_that_is_always_in_the_batch_is_to_halve_the_noise(noise: float, delta: float) -> None:
    """Against the exact delta of a Gaussian (Balle, Wang 2018), and exactly by RDP."""

    def exact(epsilon: float) -> float:
        s = noise / 2
        upper, lower = norm.logcdf(0.5 / s - epsilon * s), norm.logcdf(-0.5 / s - epsilon * s)
        return math.exp(upper) - math.exp(epsilon + lower)

    epsilon = spent([Gaussian(noise)], delta, neighbours="replaced")
    assert exact(epsilon) <= delta * 1.0001
    assert exact(epsilon * 0.999 - 1e-4) > delta
    halved = [Gaussian(noise / 2, steps=7)]
    assert spent([Gaussian(noise, steps=7)], delta, "rdp", "replaced") == spent(halved, delta, "rdp")


@BOTH
@pytest.mark.parametrize(("noise", "rate"), [(0.3, 0.9), (0.6, 0.02), (1.0, 0.3), (4.0, 0.9999)])
def test_renyi_divergences_agree_with_direct_integration(noise: float, rate: float, neighbours: Neighbours) -> None:
    orders = np.array([1.5, 4.0, 9.0, 64.0])  # of the last the integrand peaks at 64 or, with a record replaced, 127
    x = np.linspace(-1 - 14 * noise, 128 + 14 * noise, 1_000_001)
    one, two = (
        np.logaddexp(math.log1p(-rate) + norm.logpdf(x, 0, noise), math.log(rate) + norm.logpdf(x, at, noise))
        for at in (1.0, OTHER[neighbours])
    )
    wanted = [(logsumexp(a * one + (1 - a) * two) + math.log(x[1] - x[0])) / (a - 1) for a in orders]
    assert renyi_divergence(noise, rate, orders, neighbours) == pytest.approx(np.array(wanted), rel=1e-6)


def test_full_batches_compose_to_one_gaussian() -> None:
    """Sums with noise 3, 4 and 4 are one with 1 / sqrt(1/9 + 2/16)."""
    once = Gaussian(1 / math.sqrt(1 / 9 + 2 / 16))
    for events in ([Gaussian(3.0), Gaussian(4.0, steps=2)], [Gaussian(4.0), Gaussian(3.0), Gaussian(4.0)]):
        assert spent(events, 1e-5) == pytest.approx(spent([once], 1e-5), rel=2e-3)


def test_the_reference_implementation_spends_four_times_what_it_prints() -> None:
    """Noise for epsilon 1 over 20 epochs of 7 steps, used for 250 epochs (DP-CVAE); the right noise is about 19."""
    printed = noise_multiplier(Budget(1.0, 1e-4), rate=1 / 7, steps=140)
    assert printed == pytest.approx(5.5, rel=0.02)
    assert 4.18 < spent([Gaussian(printed, 1 / 7, 1750)], 1e-4) < 4.32
    assert noise_multiplier(Budget(1.0, 1e-4), rate=1 / 7, steps=1750) == pytest.approx(19, rel=0.02)


@pytest.mark.parametrize("accountant", ["pld", "rdp", "filter"])
@pytest.mark.parametrize(
    ("epsilon", "rate", "steps"), [(0.05, 0.01, 30), (1.0, 1.0, 50), (8.0, 0.05, 400), (30.0, 0.1, 20)]
)
def test_calibrated_noise_spends_the_budget_and_no_more(accountant, epsilon: float, rate: float, steps: int) -> None:
    budget = Budget(epsilon, 1e-5, accountant)
    found = budget.spent([Gaussian(noise_multiplier(budget, rate=rate, steps=steps), rate, steps)])
    assert 0.99 * epsilon <= found <= epsilon


def test_calibration_leaves_room_for_other_releases() -> None:
    budget, other = Budget(2.0, 1e-5), Gaussian(5.0)
    alone = noise_multiplier(budget, rate=0.1, steps=50)
    beside = noise_multiplier(budget, rate=0.1, steps=50, releases=[other])
    assert beside > alone
    assert 1.98 <= budget.spent([other, Gaussian(beside, 0.1, 50)]) <= 2.0
    with pytest.raises(ConfigError, match="other releases of the plan already spend it"):
        noise_multiplier(budget, rate=0.1, steps=50, releases=[Gaussian(0.5)])


def test_rounds_may_share_the_budget_unequally() -> None:
    weights = allocation(16, "late")
    assert (weights[0], weights[-1]) == (1, 3)
    assert weights == sorted(weights)
    assert allocation(3, "uniform") == [1, 1, 1]
    budget = Budget(4.0, 1e-5, "rdp")
    noises = noise_by_round(budget, weights, rate=0.1, steps=20)
    assert noises[0] / noises[-1] == pytest.approx(math.sqrt(3))
    assert 3.96 <= budget.spent([Gaussian(noise, 0.1, 20) for noise in noises]) <= 4.0


@settings(max_examples=20)
@given(st.lists(st.builds(Gaussian, st.floats(0.5, 20), st.floats(0.001, 1), st.integers(1, 500)), min_size=1))
def test_to_replace_costs_more_than_to_add_and_less_than_to_remove_and_then_add(events: list[Event]) -> None:
    """D_{2e} of the two ends of a path is at most (1 + exp(e)) times the largest D_e of its two parts."""
    for budget in (Budget(1.0, 1e-9, "rdp"), Budget(1.0, 1e-9, "filter")):
        added = budget.spent(events)
        assert budget.spent(events, "replaced") >= added
    added = spent(events, 1e-9, "rdp")
    if added < 15:
        assert spent(events, 1e-9 * (1 + math.exp(added)), neighbours="replaced") <= 2 * added


def test_more_noise_fewer_steps_and_lower_rates_cost_less_where_a_record_is_replaced() -> None:
    for accountant in ("pld", "rdp"):
        costs = [
            spent([Gaussian(*each)], 1e-5, accountant, "replaced")
            for each in ((3.0, 0.1, 50), (2.0, 0.1, 50), (2.0, 0.1, 70), (2.0, 0.15, 70), (2.0, 1.0, 70))
        ]
        assert costs == sorted(costs)
        assert len(set(costs)) == 5


gaussians = st.builds(Gaussian, st.floats(0.5, 20), st.floats(0.001, 1), st.integers(0, 500))


@settings(max_examples=20)
@given(st.lists(gaussians, max_size=2), gaussians)
def test_every_further_release_costs_and_none_is_forgotten(before: list[Event], event: Gaussian) -> None:
    less, more = spent(before, 1e-5, "rdp"), spent([*before, event], 1e-5, "rdp")
    assert more >= less
    assert spent([event, *before], 1e-5, "rdp") == pytest.approx(more)
    twice = Gaussian(event.noise_multiplier, event.rate, 2 * event.steps)
    assert spent([event, event], 1e-5, "rdp") == spent([twice], 1e-5, "rdp")


@BOTH
@pytest.mark.parametrize("accountant", ["pld", "rdp", "filter"])
def test_a_release_without_a_guarantee_or_noise_costs_everything(accountant, neighbours: Neighbours) -> None:
    def cost(*events: Event) -> float:
        return Budget(1.0, 1e-5, accountant).spent(events, neighbours)

    assert cost(Gaussian(9.0), NoGuarantee("the clip bound is a median of private norms")) == math.inf
    assert cost(Gaussian(0.0)) == cost(Gaussian(9.0), Gaussian(0.0)) == math.inf
    assert cost() == 0 == cost(Gaussian(1.0, steps=0))


@BOTH
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("noise", [1e-300, 1e-160])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_noise_too_small_for_the_numbers_is_no_guarantee(accountant, noise: float, neighbours: Neighbours) -> None:
    assert spent([Gaussian(noise, 0.5, 10)], 1e-5, accountant, neighbours) == math.inf


def test_a_budget_without_a_limit_allows_everything_and_still_counts() -> None:
    assert Budget(math.inf, 1e-5).allows([NoGuarantee("none"), Gaussian(0.0)])
    assert Budget(math.inf, 1e-5).spent([Gaussian(2.0)]) == spent([Gaussian(2.0)], 1e-5)


@pytest.mark.parametrize("accountant", ["pld", "rdp", "filter"])
def test_a_budget_allows_what_it_can_pay_for(accountant) -> None:
    event = Gaussian(3.0, 0.1, 40)
    price = Budget(1.0, 1e-5, accountant).spent([event])
    assert Budget(1.0, 1e-5, accountant).allows([event]) == (price <= 1.0)
    if accountant != "filter":  # its order, and so its price, depends on the budget
        assert Budget(price * 1.001, 1e-5, accountant).allows([event])
        assert not Budget(price * 0.999, 1e-5, accountant).allows([event])


def test_no_memory_is_lost_to_epsilons_that_say_nothing() -> None:
    assert spent([Gaussian(0.01, steps=1000)], 1e-5) > 1e6


@given(gaussians | st.builds(NoGuarantee, st.text()))
def test_events_survive_json(event: Event) -> None:
    assert event_of(json.loads(json.dumps(to_mapping(event)))) == event


def test_the_filter_costs_more_than_a_plan_fixed_in_advance() -> None:
    """One Renyi order, fixed before anything is known, is never better than the best one."""
    events = [Gaussian(6.0, 0.2, 30), Gaussian(9.0)]
    chosen, planned = Budget(1.0, 1e-5, "filter"), Budget(1.0, 1e-5, "rdp")
    assert planned.spent(events) * 0.999 <= chosen.spent(events) < 1.3 * planned.spent(events)


def test_the_order_of_the_filter_is_close_to_the_best_for_gaussian_noise_that_spends_the_budget() -> None:
    budget = Budget(2.0, 1e-6, "filter")
    event = Gaussian(noise_multiplier(budget, rate=1.0, steps=1))

    def cost(order: float, distance: float = 1.0) -> float:
        """RDP of a Gaussian at an order, converted (Canonne, Kamath, Steinke 2020, proposition 12)."""
        renyi = distance**2 * order / (2 * event.noise_multiplier**2)
        return renyi + math.log1p(-1 / order) - math.log(1e-6 * order) / (order - 1)

    assert budget.spent([event]) == pytest.approx(cost(budget.order), rel=1e-9)
    assert budget.spent([event], "replaced") == pytest.approx(cost(budget.order, distance=2.0), rel=1e-9)
    assert cost(budget.order) <= 1.03 * min(cost(1 + x / 10) for x in range(1, 1000))


def test_a_filter_does_not_take_the_word_of_an_accountant_that_picks_its_order_afterwards() -> None:
    events, budget = [Gaussian(0.8, 0.01, 400)], Budget(3.0, 1e-5, "filter")
    assert spent(events, 1e-5, "rdp") <= 3.0 < budget.spent(events)
    assert not budget.allows(events)


@pytest.mark.parametrize(
    ("records", "delta"), [(1, 0.1), (2, 0.01), (10, 0.01), (1000, 1e-4), (1001, 1e-5), (12523, 1e-6)]
)
def test_delta_defaults_to_a_power_of_ten_of_at_most_a_tenth_of_one_record(records: int, delta: float) -> None:
    assert default_delta(records) == delta
    assert delta / 1.0001 <= 1 / (10 * records) < 10 * delta * 1.0001


def test_a_delta_above_one_record_warns() -> None:
    assert check_delta(1e-4, 1000) == 1e-4
    with pytest.warns(FedloomWarning, match=r"delta 0\.01 is above 1/n = 0\.001"):
        check_delta(0.01, 1000)


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        (lambda: Budget(0, 1e-5), "epsilon is 0; it must be greater than 0"),
        (lambda: Budget(1, 0), "delta is 0; it must lie between 0 and 1"),
        (lambda: Budget(1, 1e-5, "prv"), "unknown accountant 'prv'"),
        (lambda: check_delta(-1, 10), "delta is -1; it must lie between 0 and 1"),
        (lambda: spent([Gaussian(1.0)], 1.0), "delta is 1.0; it must lie between 0 and 1"),
        (lambda: spent([], 1e-5, "moments"), "unknown accountant 'moments'"),
        (lambda: Gaussian(-1.0), "noise_multiplier is -1.0; it must be a finite number of at least 0"),
        (lambda: Gaussian(1.0, 1.5), "rate is 1.5; a sampling rate must be greater than 0 and at most 1"),
        (lambda: Gaussian(1.0, steps=-1), "steps is -1; it must be at least 0"),
        (lambda: noise_multiplier(Budget(1, 1e-5), rate=0.1, steps=0), "steps is 0; a calibration needs at least 1"),
        (lambda: calibrate(lambda _: [], Budget(1, 1e-5)), "has no release that noise could make cheaper"),
        (lambda: noise_multiplier(Budget(math.inf, 1e-5), rate=0.1, steps=1), "for a finite epsilon only"),
        (lambda: default_delta(0), "the number of records is 0"),
        (lambda: allocation(3, "early"), "unknown allocation 'early'"),
    ],
)
def test_mistakes_are_named(mistake, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        mistake()


def test_an_event_of_a_later_version_is_refused() -> None:
    with pytest.raises(FedloomError, match="unknown privacy event 'tree'"):
        event_of({"kind": "tree"})
