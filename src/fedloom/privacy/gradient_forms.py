"""The forms in which gradients of single examples are held: written out, or as factors that are multiplied when asked.

Norms and weighted sums of factors need no tensor that is as large as the weights times the batch (Goodfellow,
"Efficient per-example gradient computations", 2015).

Whoever sets the weights can make a factor as small or as large as float32 goes, so that its square would be lost while
its product with the other factor is not, or let places of an example cancel in rounded sums. So norms are found in
float64, which holds the square of every float32; where they may be too long, they are never too short.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# Sums over examples are rounded also where the places of one of them cancel: so much of their size adds to its norm.
from fedloom.outline import in_outline

ROUNDING = 4e-6
UNIT = 2.0**-24  # what one addition in float32 may lose
FAR = 1e18  # what is longer is not scaled back: numbers that are small enough for that would be lost themselves
BLOCK = 64  # so few numbers can be added up in float32 without losing any beside others


def _norms(values: Tensor, *dim: int) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(values, dim=dim, dtype=torch.float64)
    return norms


def _norms_of_many(rows: Tensor) -> Tensor:
    """Of (examples, numbers), as fast as in float32: a copy of all numbers in float64 would take most of a step.

    These are gradients as they are, so squares that float32 loses are far below any bound.
    """
    full = rows.shape[1] // BLOCK
    blocks = rows[:, : full * BLOCK].reshape(len(rows), full, BLOCK)
    rest = rows[:, full * BLOCK :]
    return torch.hypot(_norms(torch.linalg.vector_norm(blocks, dim=2), 1), _norms(rest, 1))


def _within_reach(norms: Tensor, right: Tensor) -> Tensor:
    """Infinite where a right factor is so long that it brings back what the left one loses.

    The left factor is scaled in float32. What becomes a subnormal number by that, below 1.2e-38, is rounded by up to
    7e-46 or lost, as the processor likes. Beside a right factor below ``FAR`` that is less than 1.2e-20: no bound is as
    small.
    """
    return torch.where(right < FAR, norms, torch.inf)


class Rows:
    """One factor of the gradients of examples, (examples, places, width), which several parameters may share."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self._norms: Tensor | None = None
        self._scaled: tuple[Tensor, Tensor] | None = None

    @property
    def norms(self) -> Tensor:
        """The norm of each example's gradient, shape (examples,)."""
        if self._norms is None:
            self._norms = _norms(self.values, 1, 2)
        return self._norms

    @property
    def finite(self) -> Tensor:
        """Without what is not finite: a gradient of factor 0 must not come back as 0 * inf."""
        return torch.nan_to_num(self.values, nan=0.0, posinf=0.0, neginf=0.0)

    def scaled(self, factors: Tensor) -> Tensor:
        """Each example times its factor; those of factor 0 do not count, whatever they are."""
        # Kept for the next parameter with this factor: a weight and its bias ask with the very same tensor.
        if self._scaled is None or self._scaled[0] is not factors:
            self._scaled = factors, torch.nan_to_num(factors[:, None, None] * self.values, nan=0.0)
        return self._scaled[1]

    def __add__(self, other: Rows) -> Rows:
        return Rows(torch.cat((self.values, other.values), 1))


@dataclass(frozen=True, eq=False)
class Whole:
    """The gradient of each example, written out."""

    __repr__ = in_outline

    gradient: Tensor  # (examples, *shape)

    @property
    def _flat(self) -> Tensor:
        return self.gradient.unsqueeze(-1).flatten(1)  # a parameter may be a single number

    def norms(self) -> Tensor:
        """The norm of each example's gradient, shape (examples,)."""
        return _norms_of_many(self._flat)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """Over the examples; those of factor 0 do not count, whatever their gradient."""
        rows = torch.nan_to_num(self._flat, nan=0.0, posinf=0.0, neginf=0.0)
        return (factors @ rows).reshape(self.gradient.shape[1:])

    def written_out(self) -> Whole:
        """These gradients, which are written out already."""
        return self

    def condensed(self) -> Whole:
        """These gradients, which have no shorter form."""
        return self

    def __add__(self, other: Form) -> Whole:
        assert isinstance(other, Whole), "a parameter has one form"
        return Whole(self.gradient + other.gradient)


@dataclass(frozen=True, eq=False)
class Outer:
    """The gradient of example b is the sum of the outer products of left[b, i] and right[b, i] over i."""

    left: Rows  # (examples, places, p)
    right: Rows  # (examples, places, q)
    shape: torch.Size  # of the parameter, p * q numbers

    def norms(self) -> Tensor:
        """(examples,), the cheapest of three ways."""
        left, right = self.left.values, self.right.values
        if left.shape[-2] == 1:
            return _within_reach(self.left.norms * self.right.norms, self.right.norms)
        if self._bulky:
            return self.written_out().norms()
        # The square of the norm of sum_i l_i r_i' is sum_ij (l_i . l_j)(r_i . r_j): two matrices of places by places.
        # No norm is longer than ``size``; a float32 sum over rows and places is rounded by a share of that even where
        # the products cancel, so that share is added, in squares.
        places = _norms(right, 2)
        size = (_norms(left, 2) * places).sum(dim=1)
        rounding = max(ROUNDING, (2 * len(left) * left.shape[-2] * UNIT) ** 2)
        left, right = left.double(), right.double()
        squares = ((left @ left.mT) * (right @ right.mT)).sum(dim=(1, 2)).clamp_min(0.0)
        return _within_reach((squares + rounding * size.square()).sqrt(), places.amax(dim=1))

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """Over the examples; those of factor 0 do not count, whatever their gradient."""
        left, right = self.left.scaled(factors), self.right.finite
        return (left.flatten(0, 1).mT @ right.flatten(0, 1)).reshape(self.shape)

    def written_out(self) -> Whole:
        """The products summed over places, as large as the parameter."""
        products = torch.einsum("bip,biq->bpq", self.left.values, self.right.values)
        return Whole(products.reshape(-1, *self.shape))

    @property
    def _bulky(self) -> bool:
        """Whether the factors hold more numbers than their products, and more than one product each."""
        (places, p), q = self.left.values.shape[-2:], self.right.values.shape[-1]
        return places > 1 and places * (p + q) > p * q

    def condensed(self) -> Outer | Whole:
        """The same gradients in fewer numbers, where that can be.

        Products that cancel leave other rounding in a norm than in a sum over examples, unless both see them cancelled.
        """
        return self.written_out() if self._bulky else self

    def __add__(self, other: Form) -> Outer:
        assert isinstance(other, Outer), "a parameter has one form"
        return Outer(self.left + other.left, self.right + other.right, self.shape)


@dataclass(frozen=True, eq=False)
class Total:
    """The gradient of example b is the sum of left[b, i] over i: that of a bias beside an :class:`Outer`."""

    left: Rows  # (examples, places, p)

    def norms(self) -> Tensor:
        """The norm of each example's gradient, shape (examples,)."""
        return self.left.norms if self.left.values.shape[-2] == 1 else self.written_out().norms()

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """Over the examples; those of factor 0 do not count, whatever their gradient."""
        return self.left.scaled(factors).sum(dim=(0, 1))

    def written_out(self) -> Whole:
        """The sums over an example's places, as large as the parameter."""
        return Whole(self.left.values.sum(dim=1))

    def condensed(self) -> Total | Whole:
        """These gradients unsummed if each example has a single place; else :meth:`written_out`."""
        return self if self.left.values.shape[-2] == 1 else self.written_out()

    def __add__(self, other: Form) -> Total:
        assert isinstance(other, Total), "a parameter has one form"
        return Total(self.left + other.left)


Form = Whole | Outer | Total


def joint_norms(forms: Mapping[str, Form]) -> Tensor:
    """Of each example's gradient, over all parameters together, in float64; never too short, infinite beyond reach."""
    norms = torch.linalg.vector_norm(torch.stack([form.norms() for form in forms.values()]), dim=0)
    return torch.where(norms < FAR, norms, torch.inf)


def by_subject(forms: Mapping[str, Form], subject: Tensor, mask: Tensor) -> tuple[dict[str, Form], Tensor]:
    """Gradients summed over the real rows of each subject, and which rows stand for one.

    A subject has its sum in the row of its first record; the other rows do not count.
    """
    real = mask > 0
    # own[b, c]: row c is real and of row b's subject; argmax finds the first such c. Padding finds row 0 where it finds
    # none, which changes nothing: its gradient is zero and its mask 0.
    own = (subject.unsqueeze(1) == subject) & real
    first = own.to(torch.int32).argmax(dim=1)
    summed: dict[str, Form] = {}
    for name, form in forms.items():
        gradient = form.written_out().gradient
        rows = torch.where(real.reshape(-1, *[1] * (gradient.dim() - 1)), gradient, 0.0)  # padding is nobody's
        summed[name] = Whole(torch.zeros_like(rows).index_add(0, first, rows))
    return summed, mask * (first == torch.arange(len(subject), device=subject.device))
