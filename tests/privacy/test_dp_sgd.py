from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

from fedloom.errors import ConfigError
from fedloom.objectives.lending import lone_gradients
from fedloom.privacy.accounting import Budget, Gaussian, NoGuarantee, spent
from fedloom.privacy.clipping import Clipping, Fixed, Lengths, MedianNorm, Quantile, clip_factors
from fedloom.privacy.dp_sgd import DPSGD, ClippedSum, compact, total_of
from fedloom.privacy.gradient_forms import Form, Whole
from fedloom.privacy.lipschitz import bound_spectrally
from fedloom.privacy.noise import NoiseKey, SecureNoise, StreamNoise
from fedloom.privacy.per_example import Watch, watched_gradients
from fedloom.privacy.sampling import passes, poisson_sample
from fedloom.privacy.trust import Distributed, Local
from fedloom.streams import Streams
from support import written_out

NOW = NoiseKey(0, 1, 0)
KINDS = ("mlp", "conv", "up", "certified")


def network(seed: int, kind: str) -> nn.Module:
    torch.manual_seed(seed)
    kinds = {
        "mlp": lambda: nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2)),
        "conv": lambda: nn.Sequential(nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(3, 2)),
        "up": lambda: nn.Sequential(nn.Unflatten(1, (2, 2, 2)), nn.ConvTranspose2d(2, 1, 2, 2), nn.GroupNorm(1, 1)),
        "certified": lambda: bound_spectrally(nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 1)), 0.5),
    }
    return kinds[kind]()


def losses(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return (model(x) - 1.0).square().flatten(1).sum(1)


def lone_forms(model: nn.Module, x: Tensor) -> dict[str, Form]:
    def values(weights: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        return losses(lambda x: functional_call(model, dict(weights), (x,)), rows)

    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {name: Whole(rows) for name, rows in lone_gradients(values, weights, x).items()}


def sum_of(
    mechanism: DPSGD,
    model: nn.Module,
    x: Tensor,
    mask: Tensor | None = None,
    *,
    bound: float | None = None,
    fast: bool = True,
) -> ClippedSum:
    parameters = dict(model.named_parameters())
    with Watch(model, list(parameters)) as watch:
        values = losses(model, x)
    mask = torch.ones(len(x)) if mask is None else mask
    start = mechanism.clipping.start() if bound is None else torch.tensor(bound)
    forms = partial(watched_gradients, values, watch) if fast else partial(lone_forms, model, x)
    return mechanism.clipped_sum(values, mask, parameters, start, forms)


def distance(one: ClippedSum, other: ClippedSum) -> float:
    return math.sqrt(sum((g - other.gradients[n]).double().square().sum().item() for n, g in one.gradients.items()))


def mechanism(bound: float = 1.0, **changes) -> DPSGD:
    return replace(DPSGD(noise_multiplier=1.0, rate=0.1, expected=1.0, clipping=Fixed(bound)), **changes)


@settings(max_examples=1000)
@given(
    seed=st.integers(0, 2**31),
    kind=st.sampled_from(KINDS),
    scale=st.sampled_from([1e-3, 1.0, 1e3, 1e12, 1e30]),
    bound=st.floats(1e-3, 100),
    fast=st.booleans(),
    outlier=st.integers(0, 5),
)
def test_one_record_moves_the_sum_by_at_most_the_bound(
    seed: int, kind: str, scale: float, bound: float, fast: bool, outlier: int
) -> None:
    """Every record of six in turn, one of them an outlier whose gradient may even overflow."""
    model, dp = network(seed, kind), mechanism(bound)
    x = torch.randn(6, 8)
    x[outlier] *= scale
    whole = sum_of(dp, model, x, fast=fast)
    for record in range(6):
        without = torch.ones(6)
        without[record] = 0.0
        # Sums of six clipped gradients are exact to a few units in the last place of a number as large as 6 bounds.
        assert distance(whole, sum_of(dp, model, x, without, fast=fast)) <= bound * (1 + 1e-5)


@pytest.mark.parametrize(("into", "out"), [(8, 1), (1, 8), (5, 5), (30, 20)])
def test_factors_that_cancel_are_clipped_as_they_are_summed(into: int, out: int) -> None:
    """A weight that is always scaled to one length has no gradient along itself: what is left is mere rounding."""
    torch.manual_seed(0)
    layer = nn.Linear(into, out, bias=False)
    layer.weight.data = torch.outer(torch.randn(out), torch.randn(into))
    model = bound_spectrally(nn.Sequential(layer), 0.4)
    left, _, right = torch.linalg.svd(layer.weight.data)
    x = 1e8 * torch.linspace(1, 7, 40).unsqueeze(1) * right[0]
    for record in torch.eye(len(x)):
        with Watch(model, ["0.weight"]) as watch:
            values = model(x) @ left[:, 0]
        clipped = mechanism().clipped_sum(
            values,
            record,
            dict(model.named_parameters()),
            torch.tensor(1.0),
            partial(watched_gradients, values, watch),
        )
        assert clipped.gradients["0.weight"].norm() <= 1 + 1e-5
        assert not clipped.gradients["0.weight"].requires_grad


def per_tensor(model: nn.Module, x: Tensor, bound: float) -> ClippedSum:
    """The planted fault: each tensor of a gradient clipped to the bound by itself."""
    sums = {}
    for name, parameter in model.named_parameters():
        rows = torch.stack([torch.autograd.grad(losses(model, x[i : i + 1])[0], parameter)[0] for i in range(len(x))])
        factors = clip_factors(rows.flatten(1).norm(dim=1), torch.tensor(bound), torch.ones(len(x)))
        sums[name] = torch.einsum("b,b...->...", factors, rows)
    return ClippedSum(sums, torch.tensor(0.0), torch.tensor(bound))


def test_clipping_per_tensor_is_found_out_by_neighbouring_sums() -> None:
    model, x = network(0, "mlp"), 50 * torch.randn(5, 8)
    assert distance(per_tensor(model, x, 1.0), per_tensor(model, x[1:], 1.0)) > 1.5
    assert distance(sum_of(mechanism(), model, x), sum_of(mechanism(), model, x[1:])) <= 1 + 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "clipping", [Fixed(3.0), Quantile(initial=3.0), MedianNorm()], ids=["fixed", "quantile", "median"]
)
def test_the_fast_path_equals_the_exact_one(kind: str, clipping: Clipping) -> None:
    model, x, mask = network(1, kind), torch.randn(7, 8), torch.tensor([1.0, 1, 0, 1, 1, 0, 1])
    dp = mechanism(clipping=clipping)
    fast, exact = sum_of(dp, model, x, mask), sum_of(dp, model, x, mask, fast=False)
    assert any(bool(gradient.any()) for gradient in exact.gradients.values())
    for name, gradient in exact.gradients.items():
        torch.testing.assert_close(fast.gradients[name], gradient, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close((fast.below, fast.bound), (exact.below, exact.bound))


def test_an_overlong_batch_takes_two_passes_and_an_empty_one_is_pure_noise() -> None:
    model, x, dp = network(2, "mlp"), torch.randn(11, 8), mechanism()
    chosen = torch.tensor([0, 3, 4, 7, 9, 10])
    parts = [sum_of(dp, model, x[each.index], each.mask) for each in passes(chosen, 4)]
    assert len(parts) == 2
    assert distance(total_of(parts), sum_of(dp, model, x[chosen])) < 1e-6

    (empty,) = passes(chosen[:0], 4)
    parameters = dict(model.named_parameters())
    noise = dp.draw(parameters, StreamNoise(Streams(0)), NOW)
    gradients, _ = dp.release(sum_of(dp, model, x[empty.index], empty.mask), noise)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, noise[name])


def released(dp: DPSGD, steps: int) -> Tensor:
    """What leaves a one-dimensional model with gradient 5, clipped to 2, at each step."""
    w = nn.Parameter(torch.zeros(1))
    found = []
    for step in range(steps):
        values = 5.0 * w.expand(1)
        total = dp.clipped_sum(values, torch.ones(1), {"w": w}, dp.clipping.start(), written_out(values, {"w": w}))
        gradients, _ = dp.release(total, dp.draw({"w": w}, StreamNoise(Streams(3)), NoiseKey(0, 0, step)))
        found.append(gradients["w"])
    return torch.cat(found)


def noise_is_right(dp: DPSGD, observed: Tensor) -> bool:
    """Mean 2/4; standard deviation 2 s/4: within five standard errors, by a plain Monte Carlo."""
    claimed = 2 * dp.noise_multiplier / 4
    n = len(observed)
    centred = abs(float(observed.mean()) - 0.5) < 5 * claimed / math.sqrt(n)
    return centred and abs(float(observed.std()) / claimed - 1) < 5 / math.sqrt(2 * n)


def test_half_the_noise_is_found_out() -> None:
    honest = mechanism(2.0, noise_multiplier=1.5, expected=4.0)
    assert noise_is_right(honest, released(honest, 1500))
    assert not noise_is_right(honest, released(replace(honest, noise_multiplier=0.75), 1500))


def test_a_parameter_may_be_a_single_number() -> None:
    w = nn.Parameter(torch.tensor(2.0))
    values = torch.arange(1.0, 6) * w
    forms = written_out(values, {"w": w})
    total = mechanism(3.0).clipped_sum(values, torch.ones(5), {"w": w}, torch.tensor(3.0), forms)
    assert total.gradients["w"].item() == pytest.approx(1 + 2 + 3 + 3 + 3)


def test_the_sum_is_divided_by_the_public_expected_size_whatever_was_drawn() -> None:
    model, x = network(4, "mlp"), torch.randn(9, 8)
    silent = mechanism(noise_multiplier=0.0, expected=4.0)
    for rows in (3, 9):
        whole = sum_of(mechanism(), model, x[:rows])
        noise = silent.draw(dict(model.named_parameters()), StreamNoise(Streams(0)), NOW)
        gradients, _ = silent.release(sum_of(silent, model, x[:rows]), noise)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, whole.gradients[name] / 4.0)


def test_all_silos_of_one_batched_program_are_released_as_each_would_be_alone() -> None:
    dp, model = mechanism(clipping=Quantile(initial=2.0)), network(0, "mlp")
    parameters = dict(model.named_parameters())
    sums = [sum_of(dp, model, torch.randn(5, 8), bound=bound) for bound in (0.5, 2.0, 3.0)]
    noises = [dp.draw(parameters, StreamNoise(Streams(0)), NoiseKey(silo, 1, 0)) for silo in range(3)]

    stacked = {name: torch.stack([total.gradients[name] for total in sums]) for name in parameters}
    noise = {name: torch.stack([each[name] for each in noises]) for name in noises[0]}
    below, bound = torch.stack([t.below for t in sums]), torch.stack([t.bound for t in sums])
    gradients, bounds = dp.release(ClippedSum(stacked, below, bound), noise)
    for silo, (total, own) in enumerate(zip(sums, noises, strict=True)):
        alone, following = dp.release(total, own)
        torch.testing.assert_close(bounds[silo], following)
        for name, gradient in alone.items():
            torch.testing.assert_close(gradients[name][silo], gradient)


def test_secure_noise_is_added_in_float64_and_gradients_keep_their_type() -> None:
    model, dp = network(0, "mlp"), mechanism()
    parameters = dict(model.named_parameters())
    noise = dp.draw(parameters, SecureNoise(), NOW)
    assert {part.dtype for part in noise.values()} == {torch.float64}
    gradients, _ = dp.release(sum_of(dp, model, torch.randn(3, 8)), noise)
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}


def test_a_record_whose_gradient_is_not_finite_counts_for_nothing() -> None:
    model, x, dp = network(0, "mlp"), torch.randn(4, 8), mechanism()
    broken = x.clone()
    broken[1] = torch.inf
    assert distance(sum_of(dp, model, broken), sum_of(dp, model, x[[0, 2, 3]])) < 1e-6
    assert distance(sum_of(dp, model, broken, fast=False), sum_of(dp, model, x[[0, 2, 3]])) < 1e-6


def test_a_norm_that_is_no_number_has_no_factor() -> None:
    """Nor has an infinite one; every other gradient is shortened to the bound, or left as it is."""
    norms, mask = torch.tensor([torch.nan, torch.inf, 4.0, 0.5, 0.0, 4.0]), torch.tensor([1.0, 1, 1, 1, 1, 0])
    assert clip_factors(norms, torch.tensor(2.0), mask).tolist() == [0, 0, 0.5, 1, 1, 0]


# Clip bounds


def test_the_bound_follows_the_quantile_and_its_counts_are_paid_for() -> None:
    """Norms 1 to 100: the 30 % quantile is 30. A sum and a count together cost what the multiplier says."""
    clipping = Quantile(target=0.3, initial=1.0, share=0.1)
    dp = DPSGD(2.0, rate=1.0, expected=100.0, clipping=clipping)
    joint = dp.gradient_noise**-2 + (2 * dp.count_noise) ** -2
    assert joint == pytest.approx(2.0**-2)
    assert spent([Gaussian(dp.gradient_noise), Gaussian(2 * dp.count_noise)], 1e-5, "rdp") == pytest.approx(
        spent([dp.event(1)], 1e-5, "rdp")
    )
    w, bound, streams = nn.Parameter(torch.zeros(1)), clipping.start(), StreamNoise(Streams(1))
    for step in range(150):
        values = torch.arange(1.0, 101) * w
        total = dp.clipped_sum(values, torch.ones(100), {"w": w}, bound, written_out(values, {"w": w}))
        clipped = [min(n, float(bound)) for n in range(1, 101)]
        assert float(total.gradients["w"]) == pytest.approx(sum(clipped) / 100, rel=1e-5)
        _, bound = dp.release(total, dp.draw({"w": w}, streams, NoiseKey(0, 0, step)))
    assert 25 < float(bound) < 35


def test_one_record_moves_the_count_by_at_most_a_half() -> None:
    model, x, dp = network(0, "mlp"), torch.randn(5, 8), mechanism(clipping=Quantile(initial=5.0))
    whole = sum_of(dp, model, x)
    for record in range(5):
        without = torch.ones(5)
        without[record] = 0.0
        assert abs(float(whole.below - sum_of(dp, model, x, without).below)) == 0.5


def test_passes_of_one_batch_count_as_the_batch_does() -> None:
    model, x, dp = network(0, "mlp"), torch.randn(11, 8), mechanism(clipping=Quantile(initial=5.0))
    parts = [sum_of(dp, model, x[each.index], each.mask) for each in passes(torch.arange(11), 4)]
    assert len(parts) == 3
    torch.testing.assert_close(total_of(parts).below, sum_of(dp, model, x).below)


def test_the_median_of_private_norms_bounds_nothing() -> None:
    """Norms 1, 2, 9: without the 9 the bound falls, and the sum moves by more than any record's clipped share."""
    w, dp = nn.Parameter(torch.zeros(1)), mechanism(clipping=MedianNorm())

    def total(*norms: float) -> ClippedSum:
        values, weights = torch.tensor(norms) * w, {"w": w}
        ones = torch.ones(len(norms))
        return dp.clipped_sum(values, ones, weights, dp.clipping.start(), written_out(values, weights))

    assert total(1, 2, 9).bound == 2
    assert float(total(1, 2, 2, 2, 9, 9, 9).gradients["w"] - total(1, 2, 2, 2, 9, 9).gradients["w"]) == 2
    assert float(total(1, 1, 9, 9, 9).gradients["w"] - total(1, 1, 9, 9).gradients["w"]) > 9
    assert dp.clipping.bound(Lengths(torch.ones(3), torch.zeros(3), torch.tensor(0.0))) == 0
    assert dp.event(3) == NoGuarantee(
        "the clip bound is the median of private gradient norms, which is released unaccounted"
    )
    assert dp.guarantee.startswith("no DP guarantee: the clip bound is the median")


# What the guarantee covers


def autoencoder() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"encoder": nn.Linear(6, 2), "decoder": nn.Linear(2, 6)})


def train(dp: DPSGD, x: Tensor, mask: Tensor, steps: int) -> ClippedSum:
    """The clipped sum after some steps; the decoder's path is fixed, as if its (public) releases were the same."""
    model = autoencoder()
    parameters = dict(model.named_parameters())
    path = torch.Generator().manual_seed(1)
    for step in range(steps + 1):
        values = (model["decoder"](model["encoder"](x)) - x).square().sum(1)
        total = dp.clipped_sum(values, mask, parameters, dp.clipping.start(), written_out(values, parameters))
        if step == steps:
            return total
        with torch.no_grad():
            for name, parameter in parameters.items():
                change = (
                    total.gradients[name] if not dp.is_private(name) else torch.randn(parameter.shape, generator=path)
                )
                parameter -= 0.005 * change
    raise AssertionError


def test_an_encoder_trained_at_home_breaks_the_bound_of_a_private_decoder() -> None:
    x, mask = torch.randn(20, 6, generator=torch.Generator().manual_seed(2)), torch.ones(20)
    without = mask.clone()
    without[0] = 0.0
    x[0] *= 3
    partial = mechanism(blocks=("decoder",))

    def moved(dp: DPSGD) -> float:
        one, other = train(dp, x, mask, 10), train(dp, x, without, 10)
        return math.sqrt(
            sum(
                (one.gradients[n] - other.gradients[n]).square().sum().item() for n in one.gradients if dp.is_private(n)
            )
        )

    assert moved(partial) > 1.5
    assert moved(mechanism()) <= 1 + 1e-5
    assert isinstance(partial.event(1), NoGuarantee)
    assert (
        partial.guarantee
        == "no DP guarantee: only decoder is privatised, beside blocks that are trained on the records"
    )


def test_open_blocks_get_their_plain_gradient() -> None:
    model, x = autoencoder(), torch.randn(5, 6)
    parameters = dict(model.named_parameters())
    values = (model["decoder"](model["encoder"](x)) - x).square().sum(1)
    plain = torch.autograd.grad(values[:4].sum(), parameters["encoder.weight"], retain_graph=True)[0]
    total = mechanism(blocks=("decoder",)).clipped_sum(
        values, torch.tensor([1.0, 1, 1, 1, 0]), parameters, torch.tensor(1.0), written_out(values, parameters)
    )
    torch.testing.assert_close(total.gradients["encoder.weight"], plain)
    with Watch(model, list(parameters)) as watch:
        values = (model["decoder"](model["encoder"](x)) - x).square().sum(1)
    fast = mechanism(blocks=("decoder",)).clipped_sum(
        values,
        torch.tensor([1.0, 1, 1, 1, 0]),
        parameters,
        torch.tensor(1.0),
        partial(watched_gradients, values, watch),
    )
    assert distance(fast, total) < 1e-5
    noise = mechanism(blocks=("decoder",)).draw(parameters, StreamNoise(Streams(0)), NOW)
    assert set(noise) == {"", "decoder.weight", "decoder.bias"}


def test_a_subject_moves_the_sum_by_at_most_the_bound_however_many_records_it_has() -> None:
    model, x = network(3, "mlp"), 9 * torch.randn(8, 8)
    subject = torch.tensor([7, 7, 7, 5, 5, 9, 9, 9])
    dp = mechanism(unit="subject", clipping=Quantile())  # which counts, too

    def total(rows: Tensor, mask: Tensor) -> ClippedSum:
        values, weights = losses(model, x[rows]), dict(model.named_parameters())
        whose = compact(subject[rows])
        return dp.clipped_sum(values, mask, weights, torch.tensor(1.0), written_out(values, weights), subject=whose)

    everyone = total(torch.arange(8), torch.ones(8))
    assert distance(everyone, total(torch.arange(3, 8), torch.ones(5))) <= 1 + 1e-5
    assert distance(sum_of(mechanism(), model, x), sum_of(mechanism(), model, x[3:])) > 1.5, "records would not do"
    padded = total(torch.tensor([3, 4, 0, 0]), torch.tensor([1.0, 1.0, 0.0, 0.0]))
    assert distance(padded, total(torch.tensor([3, 4]), torch.ones(2))) == 0
    assert padded.below.abs() == 0.5
    with pytest.raises(ConfigError, match="unit is 'subject', but the records do not say whose they are"):
        sum_of(dp, model, x)


def test_the_guarantee_says_whom_to_trust() -> None:
    assert "one record added or removed; each silo adds all its own noise" in mechanism().guarantee
    shared = mechanism(trust=Distributed(10, tolerated=4))
    assert shared.gradient_noise == pytest.approx(1 / math.sqrt(5))
    assert shared.event(7) == mechanism().event(7) == Gaussian(1.0, 0.1, 7)
    assert "at most 4 silos collude or drop out" in shared.guarantee
    assert Local().share == 1


def test_a_private_run_spends_what_its_events_say() -> None:
    """Ten rounds of 30 steps on 200 records: the mean is learned, and the events add up to all 300 steps."""
    torch.manual_seed(0)
    x = torch.randn(200, 2) + 3.0
    dp = DPSGD(3.0, rate=0.2, expected=40.0, clipping=Fixed(2.0))
    w, streams, events = nn.Parameter(torch.zeros(2)), StreamNoise(Streams(5)), []
    for round in range(10):
        for step in range(30):
            noise_key = NoiseKey(0, round, step)
            chosen = poisson_sample(streams, 200, dp.rate, noise_key)
            values = 0.5 * (x[chosen] - w).square().sum(1)
            ones, forms = torch.ones(len(chosen)), written_out(values, {"w": w})
            total = dp.clipped_sum(values, ones, {"w": w}, dp.clipping.start(), forms)
            gradients, _ = dp.release(total, dp.draw({"w": w}, streams, noise_key))
            with torch.no_grad():
                w -= 0.1 * gradients["w"]
        events.append(dp.event(30))
    assert (w - 3.0).abs().max() < 0.3
    assert Budget(9.0, 1e-5).spent(events) == pytest.approx(spent([Gaussian(3.0, 0.2, 300)], 1e-5))


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        (lambda: mechanism(0.0), r"the clip bound is 0; it must lie between 1e-06 and 1e\+06"),
        (lambda: Quantile(initial=1e-7), r"the first clip bound is 1e-07; it must lie between 1e-06 and 1e\+06"),
        (lambda: Quantile(target=1.5), "the clip quantile is 1.5; it must lie between 0 and 1"),
        (lambda: Quantile(share=0.0), "share of the budget is 0.0"),
        (lambda: mechanism(rate=0.0), "rate is 0.0"),
        (lambda: mechanism(expected=0.0), "the expected batch size is 0.0"),
        (lambda: Distributed(3, tolerated=2), "among 3 silos cannot tolerate 2 .* allowed are 0 to 1"),
    ],
)
def test_mistakes_are_named(mistake, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        mistake()
