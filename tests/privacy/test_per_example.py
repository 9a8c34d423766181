from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, jvp, stack_module_state, vjp, vmap
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm

from fedloom.config import load_config
from fedloom.errors import ConfigError
from fedloom.federation.records import Batch
from fedloom.federation.rounds import RoundContext, Site
from fedloom.methods.base import Setting, make_method
from fedloom.objectives.base import Step
from fedloom.privacy.gradient_forms import ROUNDING, Form, Outer, Rows, Total, Whole, by_subject, joint_norms
from fedloom.privacy.lipschitz import Bounded
from fedloom.privacy.per_example import Watch, layers_suffice, watched_gradients
from fedloom.privacy.separation import require_same_alone, require_separate_examples
from support import written_out

Losses = Callable[[nn.Module, Tensor], Tensor]  # of each row of x


class Twice(nn.Module):
    """A layer that is used twice, in opposite directions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) - 0.3 * self.layer(torch.sin(x))


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(5, 3), (5,)),
    "linear without bias": (lambda: nn.Linear(5, 3, bias=False), (5,)),
    "linear on sequences": (lambda: nn.Linear(5, 3), (4, 5)),
    "used twice": (Twice, (5,)),
    "halving conv": (lambda: nn.Conv2d(2, 3, 4, 2, 1), (2, 6, 8)),
    "conv with a remainder": (lambda: nn.Conv2d(2, 3, 4, 2, (2, 1)), (2, 7, 5)),
    "dilated conv": (lambda: nn.Conv2d(2, 3, (3, 2), dilation=2), (2, 7, 6)),
    "large conv on a small image": (lambda: nn.Conv2d(8, 8, 4, 2, 1), (8, 4, 4)),
    "transposed conv": (lambda: nn.ConvTranspose2d(2, 3, 4, 2, 1), (2, 4, 3)),
    "transposed conv, odd": (lambda: nn.ConvTranspose2d(2, 3, 4, 2, 2, 1), (2, 4, 3)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (4, 3, 3)),
    "bounded": (lambda: Bounded(nn.Linear(5, 3), 0.4), (5,)),
    "bounded, tall, on sequences": (lambda: Bounded(nn.Linear(3, 5), 0.4), (4, 3)),
    "bounded, within its bound": (lambda: Bounded(nn.Linear(5, 3), 9.0), (5,)),
}
HOUSE = {
    "mlp": ("fedvae", []),
    "conv": ("fedvae", ["model.network='conv'", "model.channels=[4,6]"]),
    "branches": ("fissionvae", []),
    "two levels": ("fissionvae", ["method.hierarchy=true", "method.prior='identical'"]),
    "gan": ("fedgan", ["model.channels=[4,6]"]),
    "certified": ("fedvae", ["model.lipschitz=0.5"]),
}


def squares(model: nn.Module, x: Tensor) -> Tensor:
    """A loss whose gradient depends on everything."""
    output = model(x)
    return (
        (output * torch.linspace(0.5, 2, output[0].numel()).reshape(output.shape[1:]) - 0.3).square().flatten(1).sum(1)
    )


def house_case(name: str) -> tuple[nn.Module, list[str], Losses, Tensor]:
    method_name, overrides = HOUSE[name]
    config = load_config(
        "demo",
        [
            f"method={{name='{method_name}'}}",
            "model.hidden=[7]",
            "model.latent=3",
            "model.top_hidden=[6]",
            "model.top_latent=2",
            *overrides,
        ],
    )
    method = make_method(Setting(config, (1, 9, 10), ("a", "b"), ()))
    model = method.build(Site("both", (0, 1)))
    phase = method.phases[0]
    names = [n for n, _ in model.named_parameters() if n.startswith(tuple(f"{b}." for b in phase.trains))]

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        """The noise of a row depends on its record alone, whatever batch it is in."""
        rows = torch.sin(1e3 * x.detach().flatten(1).sum(1, keepdim=True))
        noise = {k: torch.sin(rows * torch.arange(1.0, 1 + s[0])) for k, s in phase.objective.noise.items()}
        group = (x.flatten(1)[:, 0] > 0.5).long()
        batch = Batch(x, torch.zeros(len(x), dtype=torch.int64), group, torch.ones(len(x)))
        return phase.objective(model, Step(batch, noise, {}, RoundContext(1, 1, (0,)))).total

    return model, names, losses, torch.rand(6, 1, 9, 10)


def case(name: str) -> tuple[nn.Module, list[str], Losses, Tensor]:
    torch.manual_seed(3)
    if name in HOUSE:
        return house_case(name)
    make, shape = LAYERS[name]
    model = make()
    return model, [n for n, _ in model.named_parameters()], squares, torch.randn(6, *shape)


def micro_batches(model: nn.Module, names: list[str], losses: Losses, x: Tensor) -> dict[str, Tensor]:
    """Each example alone."""
    parameters = [dict(model.named_parameters())[name] for name in names]
    rows = [torch.autograd.grad(losses(model, x[i : i + 1])[0], parameters) for i in range(len(x))]
    return {name: torch.stack([row[i] for row in rows]) for i, name in enumerate(names)}


def assert_same(forms: dict[str, Form], truth: dict[str, Tensor]) -> None:
    factors = torch.tensor([1.0, 0.0, 0.3, 2.0, 0.5, 1.0])
    norms = sum(rows.double().flatten(1).square().sum(1) for rows in truth.values())
    torch.testing.assert_close(joint_norms(forms), norms.sqrt(), rtol=1e-5, atol=1e-6)
    for name, rows in truth.items():
        scale = float(rows.abs().max())
        expected = torch.einsum("b,b...->...", factors, rows)
        torch.testing.assert_close(forms[name].weighted_sum(factors), expected, rtol=1e-4, atol=2e-6 * scale)


@pytest.mark.parametrize("name", [*LAYERS, *HOUSE])
def test_gradients_of_examples_are_those_of_micro_batches(name: str) -> None:
    model, names, losses, x = case(name)
    parameters = {n: p for n, p in model.named_parameters() if n in names}
    truth = micro_batches(model, names, losses, x)
    assert_same(written_out(losses(model, x), parameters)(), truth)
    with Watch(model, names) as watch:
        values = losses(model, x)
    assert layers_suffice(lambda: losses(model, x), watch, parameters)
    assert_same(watched_gradients(values, watch), truth)
    calls = len(watch.calls)
    losses(model, x)
    assert len(watch.calls) == calls > 0, "nothing is noted after the watch has ended"


@pytest.mark.parametrize("name", ["mlp", "two levels", "conv", "certified"])
def test_all_silos_of_one_batched_program_get_the_same_norms_and_sums(name: str) -> None:
    """Taps give the gradients at outputs that exist only inside vmap."""
    model, names, losses, x = case(name)
    models = [model, *(case(name)[0] for _ in range(2))]
    for other in models[1:]:
        for parameter in other.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    xs = torch.rand(3, *x.shape)
    state, _ = stack_module_state(models)

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor, *taps: Tensor) -> tuple[Tensor, list[Tensor]]:
            with Watch(self.model, names) as watch:
                return watch.tapped(lambda: losses(self.model, x), taps)

    with Watch(model, names) as watch:
        losses(model, x)
    taps = [torch.zeros(3, *call.output.shape, requires_grad=True) for call in watch.calls]
    program = Loss()
    stacked = {f"model.{name}": tensor for name, tensor in state.items()}
    values, inputs = vmap(lambda s, x, *t: functional_call(program, s, (x, *t)))(stacked, xs, *taps)
    gradients = torch.autograd.grad(values.sum(), taps)
    factors = torch.rand(3, len(x))

    def norms_and_sums(
        inputs: list[Tensor], gradients: list[Tensor], weights: dict[str, Tensor], factors: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        forms = watch.forms(inputs, gradients, weights)
        return joint_norms(forms), {name: form.weighted_sum(factors) for name, form in forms.items()}

    needed = {parameter: state[parameter].detach() for parameter in watch.needed}
    norms, sums = vmap(norms_and_sums)([t.detach() for t in inputs], list(gradients), needed, factors)
    for silo, each in enumerate(models):
        with Watch(each, names) as alone:
            own = losses(each, xs[silo])
        forms = watched_gradients(own, alone)
        torch.testing.assert_close(norms[silo], joint_norms(forms), rtol=1e-4, atol=1e-6)
        for parameter, form in forms.items():
            torch.testing.assert_close(sums[parameter][silo], form.weighted_sum(factors[silo]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "used twice"])
def test_every_rule_can_be_batched_over_silos(name: str) -> None:
    layer, names, losses, x = case(name)
    with Watch(layer, names) as watch:
        values = losses(layer, x)
    (gradient,) = torch.autograd.grad(values.sum(), watch.calls[0].output)
    inputs, gradients = torch.stack((x, 2 * x)), torch.stack((gradient, -gradient))
    norms = vmap(lambda x, gradient: joint_norms(watch.forms([x], [gradient])))(inputs, gradients)
    alone = [joint_norms(watch.forms([i], [g])) for i, g in zip(inputs, gradients, strict=True)]
    torch.testing.assert_close(norms, torch.stack(alone))


@given(
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 4)),
    bias=st.booleans(),
    limit=st.sampled_from([1e-3, 0.5, 50.0]),
    uses=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_bounded_layers_of_any_shape_have_the_norms_of_explicit_gradients(
    sizes: tuple[int, int, int], bias: bool, limit: float, uses: int, seed: int
) -> None:
    """Beyond their bound or within it, used several times; also of a record of zeros, and of one without a gradient."""
    torch.manual_seed(seed)
    into, out, places = sizes
    layer = Bounded(nn.Linear(into, out, bias=bias), limit).double()
    x = torch.randn(4, places, into, dtype=torch.float64)
    x[1], x[2, 0, 0] = 0.0, 7.0

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        values = [((-0.7) ** use * model(x + use)).sin().flatten(1).sum(1) for use in range(uses)]
        return torch.stack(values).sum(0) * (x[:, 0, 0] != 7.0)

    names = [name for name, _ in layer.named_parameters()]
    truth = micro_batches(layer, names, losses, x)
    with Watch(layer, names) as watch:
        forms = watched_gradients(losses(layer, x), watch)
    assert forms.keys() == truth.keys()
    for name, rows in truth.items():
        torch.testing.assert_close(forms[name].written_out().gradient, rows, rtol=1e-9, atol=1e-12)
    exact = torch.cat([rows.flatten(1) for rows in truth.values()], dim=1).norm(dim=1)
    found, weight = joint_norms(forms), forms["weight"]
    assert isinstance(weight, Outer)
    size = (weight.left.values.norm(dim=2) * weight.right.values.norm(dim=2)).sum(1)
    assert found[2] <= 1e-15
    assert (found >= exact * (1 - 1e-12) - 1e-14).all()
    assert (found <= (exact.square() + ROUNDING * size.square()).sqrt() * (1 + 1e-12) + 1e-14).all()


def test_cancelling_uses_of_a_layer_never_make_a_norm_too_small() -> None:
    """Two uses whose gradients cancel to a millionth: in float32 the difference of their squares is mere rounding."""
    layer, x = nn.Linear(50, 50, bias=False), torch.randn(40, 50)
    with Watch(layer, ["weight"]) as watch:
        values = 1e3 * (layer(x) - layer(x * (1 + 1e-6))).sum(1)
    truth = micro_batches(layer, ["weight"], lambda _, x: 1e3 * (layer(x) - layer(x * (1 + 1e-6))).sum(1), x)
    assert (joint_norms(watched_gradients(values, watch)) >= truth["weight"].flatten(1).norm(dim=1)).all()


def test_layers_without_a_rule_are_left_to_the_exact_path() -> None:
    unlike = (
        nn.Conv2d(2, 2, 3, groups=2),
        nn.Conv2d(2, 2, 3, padding="same"),
        nn.Conv2d(2, 2, 3, 1, 1, padding_mode="reflect"),
    )
    for layer in (nn.Embedding(3, 2), *unlike, spectral_norm(nn.Linear(2, 2))):
        assert not Watch(layer, [name for name, _ in layer.named_parameters()]).complete


def test_a_parameter_used_behind_its_layers_back_is_found() -> None:
    layer, x = nn.Linear(3, 3), torch.randn(4, 3)
    watch, parameters = Watch(layer, ["weight", "bias"]), dict(layer.named_parameters())
    before = layer.weight
    assert layers_suffice(lambda: layer(layer(x)).square().sum(1), watch, parameters)
    assert not layers_suffice(lambda: functional.linear(layer(x), layer.weight).square().sum(1), watch, parameters)
    flat = (layer.weight - layer.weight.detach()).square().sum()  # as a proximal term is before the first step
    assert not layers_suffice(lambda: layer(x).sum(1) + flat, watch, parameters)
    assert layer.weight is before


def steepness(layer: nn.Module, x: Tensor, way: str) -> Tensor:
    """The length of a gradient, by either direction of differentiation."""
    if way == "forward":
        return jvp(layer, (x,), (torch.ones_like(x),))[1].square().sum(1)
    if way == "backward":
        return vjp(layer, x)[1](torch.ones_like(x))[0].square().sum(1)
    x = x.clone().requires_grad_()
    return torch.autograd.grad(layer(x).sum(), x, create_graph=True)[0].square().sum(1)


@pytest.mark.parametrize("way", ["forward", "backward", "twice backward"])
def test_derivatives_of_layers_inside_a_loss_are_found_even_where_they_do_not_count(way: str) -> None:
    layer, x = nn.Linear(3, 3), torch.randn(4, 3)
    watch, parameters = Watch(layer, ["weight", "bias"]), dict(layer.named_parameters())
    assert not layers_suffice(lambda: layer(x).sum(1) + 0 * steepness(layer, x, way), watch, parameters)


def test_derivatives_are_found_behind_another_layer_that_has_gradients_itself() -> None:
    before, layer, x = nn.Linear(3, 3), nn.Linear(3, 3), torch.randn(4, 3)
    watch, parameters = Watch(layer, ["weight", "bias"]), dict(layer.named_parameters())
    assert layers_suffice(lambda: layer(before(x)).sum(1), watch, parameters)
    assert not layers_suffice(
        lambda: layer(before(x)).sum(1) + steepness(layer, before(x), "forward"), watch, parameters
    )


def test_factors_are_weighted_anew_for_every_sum() -> None:
    """Several parameters may share them, and what is kept of one sum must not go into another."""
    rows = Rows(torch.tensor([[[1.0]], [[10.0]]]))
    weight, bias = Outer(rows, Rows(torch.ones(2, 1, 1)), torch.Size((1,))), Total(rows)
    for factors, total in ((torch.tensor([1.0, 0.0]), 1.0), (torch.tensor([0.5, 0.5]), 5.5)):
        assert weight.weighted_sum(factors).item() == bias.weighted_sum(factors).item() == total


def test_parameters_that_layers_share_are_found() -> None:
    x = torch.randn(4, 3)
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    watch, parameters = Watch(tied, ["0.weight"]), {"0.weight": tied[0].weight}
    assert not layers_suffice(lambda: tied(x).sum(1), watch, parameters)


def test_rows_must_belong_to_examples() -> None:
    layer, x = nn.Linear(3, 1), torch.randn(4, 3)
    with Watch(layer, ["weight", "bias"]) as watch:
        values = layer(torch.cat((x, x)))[:4, 0]
    with pytest.raises(ConfigError, match="layer '' saw 8 rows for 4 examples"):
        watched_gradients(values, watch)


def test_the_gradients_of_a_subject_are_summed_and_padding_is_nobodys() -> None:
    rows = torch.tensor([[1.0], [2.0], [4.0], [torch.nan]])
    subject, mask = torch.tensor([17, 3, 17, 17]), torch.tensor([1.0, 1.0, 1.0, 0.0])
    factored = Outer(Rows(rows.unsqueeze(1)), Rows(torch.ones(4, 1, 1)), torch.Size((1,)))
    for form in (Whole(rows), factored):
        forms, counted = by_subject({"w": form}, subject, mask)
        assert isinstance(forms["w"], Whole)
        assert forms["w"].gradient.tolist() == [[5], [2], [0], [0]]
        assert counted.tolist() == [1, 1, 0, 0]


def test_padding_does_not_stand_for_a_subject_of_the_same_number() -> None:
    """Wherever it lies: a padding row is a copy of somebody's record."""
    rows = torch.tensor([[9.0], [1.0], [4.0]])
    forms, counted = by_subject({"w": Whole(rows)}, torch.tensor([17, 17, 17]), torch.tensor([0.0, 1.0, 1.0]))
    assert forms["w"].written_out().gradient[counted > 0].tolist() == [[5]]


@pytest.mark.parametrize("mixing", ["batch norm", "interpolation", "the first row in all others"])
def test_objectives_that_mix_examples_are_refused_by_name(mixing: str) -> None:
    norm = nn.BatchNorm1d(3)
    losses: dict[str, Callable[[Tensor], Tensor]] = {
        "batch norm": lambda x: norm(x).pow(3).sum(1),
        "interpolation": lambda x: (0.5 * x + 0.5 * x.roll(1, 0)).square().sum(1),
        "the first row in all others": lambda x: x.square().sum(1) + x[0].sum() * (torch.arange(4) > 0),
    }
    with pytest.raises(ConfigError, match=f"'{mixing}' mixes examples.*use group norm"):
        require_separate_examples(losses[mixing], torch.randn(4, 3), mixing, "group norm")


@pytest.mark.parametrize(
    "change", [0.0, 0.01, math.nan], ids=["the same alone", "another value", "a number in company alone"]
)
def test_objectives_whose_losses_change_with_the_company_are_refused_by_name(change: float) -> None:
    """By labels or groups, which no gradient at the records shows."""
    together = torch.tensor([1.0, 2.0, torch.nan])  # one that is never a number mixes nothing
    alone = (together + torch.tensor([0.0, change, 0.0])).split(1)
    if change == 0.0:
        require_same_alone(together, alone, "", "")
    else:
        with pytest.raises(ConfigError, match=r"'counting' mixes examples.*use group norm"):
            require_same_alone(together, alone, "counting", "group norm")


@pytest.mark.parametrize("name", HOUSE)
def test_the_objectives_of_the_house_keep_examples_apart(name: str) -> None:
    model, _, losses, x = case(name)
    require_separate_examples(lambda x: losses(model, x), x, name, "")
