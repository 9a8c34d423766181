"""Codes of moves: how far what they stand for is from the moves, and that nothing else is taken for codes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedloom.errors import FedloomError
from fedloom.sharing.compression import STEP, STEPS, Compression, coded, decoded, moved

KINDS: tuple[Compression, ...] = ("bfloat16", "int8")
ROUNDING = 1 + 1e-6  # of single precision
LEAST = 1e-37  # below it single precision has fewer digits
LENGTHS = st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=20)


@given(values=LENGTHS, scale=st.sampled_from((1e-12, 1e-3, 1.0, 1e6)))
@settings(max_examples=200, deadline=None)
def test_errors_are_within_the_bounds(values: list[float], scale: float) -> None:
    move = torch.tensor([values]) * scale
    step = move.abs().max().double() / STEPS
    halves, shares = (
        (decoded(coded(kind, {"w": move}))["w"].double() - move.double()).abs() for kind in ("int8", "bfloat16")
    )
    assert (halves <= step / 2 * ROUNDING + LEAST).all(), "half a step"
    assert (shares <= move.double().abs() / 256 * ROUNDING + LEAST).all(), "1/256 of each number"


def test_each_silo_has_a_step_of_its_own() -> None:
    moves = torch.tensor([[[1.27, -0.5], [0.0, 0.004]], [[254.0, -1.0], [0.0, 3.1]], [[0.0, 0.0], [0.0, 0.0]]])
    codes = coded("int8", {"w": moves})
    assert codes["w"].tolist() == [[[127, -50], [0, 0]], [[127, 0], [0, 2]], [[0, 0], [0, 0]]]  # -0.5 steps: to even
    assert codes["w" + STEP].tolist() == pytest.approx([0.01, 2.0, 0.0], abs=1e-9)
    alone = [decoded({name: code[silo] for name, code in codes.items()})["w"] for silo in range(3)]
    assert torch.equal(torch.stack(alone), decoded(codes)["w"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_does_not_become_so(kind: Compression, value: float) -> None:
    back = decoded(coded(kind, {"w": torch.tensor([[1.0, value]])}))["w"]
    assert not torch.isfinite(back).all()


FORM = {"w": torch.zeros(2, 3), "scale": torch.zeros(1), "batches": torch.tensor(0)}
ORIGIN = {"w": torch.ones(2, 3), "scale": torch.tensor([5.0]), "batches": torch.tensor(4)}
REST = {"scale": torch.tensor([6.0]), "batches": torch.tensor(9)}
CODES: dict[Compression, dict[str, Tensor]] = {
    kind: {name: code[0] for name, code in coded(kind, {"w": torch.full((1, 2, 3), 0.5)}).items()} for kind in KINDS
}


@pytest.mark.parametrize("kind", KINDS)
def test_counters_and_single_numbers_travel_as_they_are(kind: Compression) -> None:
    found = moved(kind, ORIGIN, CODES[kind] | REST, FORM)
    wanted = {"w": torch.full((2, 3), 1.5), **REST}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


WRONG: dict[str, dict[str, Tensor]] = {
    "as weights": {"w": torch.zeros(2, 3)},
    "of another kind": {"w": torch.zeros(2, 3, dtype=torch.float16)},
    "that would stretch": {"w": CODES["int8"]["w"][:1]},
    "with a step for each row": {"w" + STEP: torch.ones(2, 1)},
    "with a step of more numbers": {"w" + STEP: torch.tensor(1.0, dtype=torch.float64)},
    "with a step of what has none": {"scale" + STEP: torch.tensor(1.0)},
    "with another name": {"v": CODES["int8"]["w"]},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_whatever_is_no_code_is_refused(wrong: dict[str, Tensor]) -> None:
    (name,) = wrong
    with pytest.raises(FedloomError, match=f"'{name}' does not travel as sharing.compression = 'int8' says"):
        moved("int8", ORIGIN, CODES["int8"] | REST | wrong, FORM)


def test_a_code_without_its_step_is_refused() -> None:
    with pytest.raises(FedloomError, match=f"'w{STEP}' does not travel"):
        moved("int8", ORIGIN, {"w": CODES["int8"]["w"], **REST}, FORM)
