"""Whoever sets weights sets scales: no gradient, however it is held, passes the clip bound at any of them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import vmap

from fedloom.privacy.clipping import LARGEST, SMALLEST, Count, Fixed, Quantile
from fedloom.privacy.dp_sgd import DPSGD, Scale
from fedloom.privacy.gradient_forms import Form, Outer, Rows, Total, Whole

EXAMPLES = 3
# Around those at which float32 loses numbers, their squares, or the products of both, and usual ones.
EXPONENTS = st.sampled_from(
    [
        -44,
        *range(-38, -33),
        -30,
        -24,
        -23,
        -22,
        -20,
        -19,
        -18,
        -9,
        -3,
        0,
        1,
        3,
        9,
        15,
        17,
        18,
        19,
        20,
        30,
        *range(34, 39),
    ]
)
# A factor whose squares are lost beside one whose squares are not, one that is rounded beside one that brings it back,
# or any two.
PAIRS = st.one_of(
    st.sampled_from([(-23, 18), (18, -23), (-22, 17), (17, -22), (-24, 18)]),
    st.sampled_from([(one, other) for one in range(-38, -17) for other in range(34, 39)]),
    st.tuples(EXPONENTS, EXPONENTS),
)


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def scaled(rows: Tensor, exponents: list[int]) -> Tensor:
    """Each place at a scale of its own; what float32 cannot hold becomes 0 or infinite, as it would in a network."""
    powers = torch.tensor([10.0**exponent for exponent in exponents], dtype=torch.float64)
    return (rows.double() * powers[: rows.shape[1], None]).float()


def forms_of(kind: str, left: Tensor, right: Tensor) -> dict[str, Form]:
    """The forms of a layer's weight and bias; factors are (examples, places, width)."""
    rows = Rows(left)
    shape = torch.Size((left.shape[2], right.shape[2]))
    kinds: dict[str, dict[str, Form]] = {
        "outer": {"weight": Outer(rows, Rows(right), shape), "bias": Total(rows)},
        "outer, used twice": {
            "weight": Outer(rows, Rows(right), shape) + Outer(Rows(-left), Rows(right), shape),
            "bias": Total(rows) + Total(Rows(left)),
        },
        "whole": {"weight": Whole(left.flatten(1)), "number": Whole(right[:, 0, 0])},
    }
    return kinds[kind]


def exact(forms: dict[str, Form]) -> Tensor:
    """Each example's gradient in float64, (examples, numbers)."""
    parts = []
    for form in forms.values():
        if isinstance(form, Outer):
            parts.append(torch.einsum("bip,biq->bpq", form.left.values.double(), form.right.values.double()))
        elif isinstance(form, Total):
            parts.append(form.left.values.double().sum(dim=1))
        else:
            parts.append(form.gradient.double().unsqueeze(-1))
    return torch.cat([part.flatten(1) for part in parts], dim=1)


def length(gradients: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))


@settings(max_examples=1500)
@given(
    kind=st.sampled_from(["outer", "outer, used twice", "whole"]),
    sizes=st.sampled_from([(1, 4, 5), (1, 1, 1), (2, 6, 7), (3, 40, 30), (12, 3, 2)]),  # places, and both widths
    exponents=st.lists(PAIRS, min_size=12, max_size=12),
    bound=st.sampled_from([SMALLEST, 1e-3, 1.0, LARGEST]),
    expected=st.sampled_from([1.0, 256.0, 4096.0, 65536.0]),
    subject=st.booleans(),
    seed=st.integers(0, 99),
)
@example("outer", (1, 4, 5), [(-29, 34)] * 12, SMALLEST, 4096.0, False, 3)
@example("outer", (1, 1, 1), [(-27, 36)] * 12, 1e-3, 65536.0, False, 0)
@example("outer", (1, 1, 1), [(-26, 38)] * 12, 1e-3, 256.0, False, 0)
@example("outer", (3, 40, 30), [(-30, 36)] * 12, SMALLEST, 65536.0, False, 1)
@example("outer, used twice", (1, 4, 5), [(-29, 34)] * 12, SMALLEST, 65536.0, False, 1)
def test_no_scale_of_the_factors_lets_an_example_pass_its_bound(
    kind: str,
    sizes: tuple[int, int, int],
    exponents: list[tuple[int, int]],
    bound: float,
    expected: float,
    subject: bool,
    seed: int,
) -> None:
    """Alone, and as one of several silos of a batched program; where nothing is lost, nothing is cut either."""
    places, p, q = sizes
    left = scaled(numbers(seed, EXAMPLES, places, p), [one for one, _ in exponents])
    right = scaled(numbers(seed + 100, EXAMPLES, places, q), [other for _, other in exponents])
    dp = DPSGD(1.0, 0.1, expected, Fixed(bound), unit="subject" if subject else "record")
    whose = torch.zeros(EXAMPLES, dtype=torch.int64) if subject else None
    one = torch.tensor([1.0, *[0.0] * (EXAMPLES - 1)])
    units = torch.ones(EXAMPLES) if subject else one  # one subject with all records, or one record

    def clipped(left: Tensor, right: Tensor) -> dict[str, Tensor]:
        total = dp.clip(forms_of(kind, left, right), units, torch.tensor(bound), whose)
        return {name: expected * gradient.double() for name, gradient in total.gradients.items()}

    alone = clipped(left, right)
    assert length(alone) <= bound * (1 + 1e-5)
    in_stack = vmap(clipped)(torch.stack((left, -left)), torch.stack((right, right)))
    for silo in range(2):
        assert length({name: gradient[silo] for name, gradient in in_stack.items()}) <= bound * (1 + 1e-5)
    truth = exact(forms_of(kind, left, right))[0]
    usual = all(-4 <= exponent <= 4 for pair in exponents[:places] for exponent in pair)
    if usual and not subject and kind != "outer, used twice":
        wanted = min(1.0, bound / float(truth.norm())) * float(truth.norm())
        assert length(alone) == pytest.approx(wanted, rel=3e-3)


@pytest.mark.parametrize("scale", [1e16, 1e18], ids=["within reach", "beyond it"])
@pytest.mark.parametrize("places", [1, 3])
def test_a_record_behind_vanishing_gradients_is_not_let_through(places: int, scale: float) -> None:
    """The attack: what comes back has squares that are lost, what went in is the record times 1e18 or less; a bound
    that is small besides, and noise of its size is no noise at all.
    """
    record = torch.rand(1, places, 784)
    vanishing = torch.full((1, places, 300), 1e-23)
    forms: dict[str, Form] = {"weight": Outer(Rows(vanishing), Rows(scale * record), torch.Size((300, 784)))}
    clipped = DPSGD(100.0, 0.001, 1.0, Fixed(SMALLEST)).clip(forms, torch.ones(1), torch.tensor(SMALLEST))
    assert length(dict(clipped.gradients)) <= SMALLEST * (1 + 1e-5)


@pytest.mark.parametrize("flush", [False, True], ids=["rounded", "lost"])
@pytest.mark.parametrize("places", [1, 2])
@pytest.mark.parametrize(
    ("bound", "expected", "right"),
    [(1e-6, 4096.0, 6e34), (1e-6, 65536.0, 4e33), (1e-3, 65536.0, 4e36), (1e-3, 256.0, 2e38)],
)
def test_what_is_rounded_on_one_side_is_not_brought_back_on_the_other(
    bound: float, expected: float, right: float, places: int, flush: bool
) -> None:
    """The attack: what is scaled to just above half of the smallest float32 is rounded to the whole of it, and twice
    the bound let through. Whether a processor keeps numbers as small as that does not matter.
    """
    width = math.floor((bound / (expected * right * places * 0.502 * 2.0**-149)) ** 2)  # numbers that share the bound
    left = torch.full((1, places, width), 1 / (right * math.sqrt(width)))
    rows = torch.zeros(1, places, 5)
    rows[:, :, 0] = right
    forms: dict[str, Form] = {"weight": Outer(Rows(left), Rows(rows), torch.Size((width, 5)))}
    torch.set_flush_denormal(flush)
    try:
        clipped = DPSGD(1.0, 0.1, expected, Fixed(bound)).clip(forms, torch.ones(1), torch.tensor(bound))
        assert expected * length(dict(clipped.gradients)) <= bound * (1 + 1e-5)
    finally:
        torch.set_flush_denormal(False)


def test_what_no_factor_can_bring_back_counts_for_nothing() -> None:
    """A factor of 2e-45 is rounded to 2.8e-45, which would let a gradient pass its bound by a third."""
    left, right = torch.full((1, 1, 1), 5e17), torch.full((1, 1, 1), 2.3e17)
    forms: dict[str, Form] = {"weight": Outer(Rows(left), Rows(right), torch.Size((1, 1)))}
    clipped = DPSGD(1.0, 0.1, 4096.0, Fixed(SMALLEST)).clip(forms, torch.ones(1), torch.tensor(SMALLEST))
    assert 4096 * length(dict(clipped.gradients)) <= SMALLEST * (1 + 1e-5)


@pytest.mark.parametrize("width", [784, 1536, 3072, 12288])
def test_places_that_cancel_in_float32_alone_are_not_let_through(width: int) -> None:
    """The attack: small entries are lost beside a large one in one product of rows, and not in another."""
    least = 2.0**-24  # what is lost beside 1
    lost, kept = math.sqrt(0.8 * least), math.sqrt(1.02 * least / 0.8)
    left = torch.zeros(1, 4, width)  # two places stand empty, so that a product of rows is made another way
    left[0, 0, 0], left[0, 1, 0] = 1.0, -1.0
    left[0, 0, 1:-1], left[0, 1, 1:-1] = lost, -kept
    left[0, 1, -1] = math.sqrt(3.2e-8 * width)  # what is let through
    right = torch.ones(1, 4, 64)
    for scale in (1.0, 1e3, 1e6):
        forms: dict[str, Form] = {"weight": Outer(Rows(scale * left), Rows(right), torch.Size((width, 64)))}
        bound = float(exact(forms).norm()) / 2
        clipped = DPSGD(1.0, 0.1, 1.0, Fixed(bound)).clip(forms, torch.ones(1), torch.tensor(bound))
        assert length(dict(clipped.gradients)) <= bound * (1 + 1e-5)


@pytest.mark.parametrize("numbers", [2**10, 2**20 + 17, 2**22])
def test_many_small_numbers_are_not_lost_beside_large_ones(numbers: int) -> None:
    gradient = torch.full((1, numbers), math.sqrt(5.9e-8))
    gradient[:, :16] = 1.0
    bound = torch.tensor(1.0)
    clipped = DPSGD(1.0, 0.1, 1.0, Fixed(1.0)).clip({"weight": Whole(gradient)}, torch.ones(1), bound)
    assert 1 - 1e-3 <= length(dict(clipped.gradients)) <= 1 + 1e-5


def test_a_bound_that_follows_a_quantile_never_vanishes() -> None:
    """Gradients that are made to vanish pull the bound down for as long as somebody likes, and its noise with it."""
    clipping = Quantile(initial=1.0)
    low = high = clipping.start()
    for _ in range(2000):
        low = clipping.following(Count(torch.tensor(1.0), low))
        high = clipping.following(Count(torch.tensor(0.0), high))
    assert float(low) == pytest.approx(SMALLEST)
    assert float(high) == pytest.approx(LARGEST)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_the_scale_of_a_silo_in_a_stack_is_its_own(scale: float) -> None:
    """What one example counts is a tensor in a batched program; the bound holds there as it does alone."""
    dp = DPSGD(1.0, 0.1, 256.0, Fixed(0.5))
    rows = scale * numbers(0, 2, 9, 4, 30)  # silos, examples, places, width

    def clipped(rows: Tensor, example: Tensor) -> Tensor:
        total = dp.clip(
            {"weight": Whole(rows)}, torch.tensor([1.0, *[0.0] * 8]), torch.tensor(0.5), scale=Scale(example, 0.0, 0.0)
        )
        return total.gradients["weight"]

    found = vmap(clipped)(rows, torch.tensor([1 / 256, 1.0]))
    lengths = found.double().flatten(1).norm(dim=1) * torch.tensor([256.0, 1.0])
    assert (lengths <= 0.5 * (1 + 1e-5)).all()
