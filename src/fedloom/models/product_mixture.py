"""A mixture of product distributions over coded columns, and how it is fitted to noisy counts of pairs.

P(x) = sum_k w_k prod_j p_kj(x_j). With each p_k as one row of levels end to end, all its pairs of columns are a single
product of matrices: P = p' diag(w) p. So a step of the fit costs the same for one pair as for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedloom.modalities.levels import drawn

LEARNING_RATE = 0.1
LEAST = 1e-5  # chance of a level at the start
SPREAD = 0.5  # of the first logits around those of single columns
CERTAIN = 50.0  # logit of a level that its component always has, beside 0
LOOK_EVERY = 10  # steps of a fit between two looks at how much is left over
CALMING = 60  # last steps, in which the rate falls to nothing
ENOUGH = 1.1  # of what noise explains: below it the fit would go on into the noise, by the time that it has calmed down


class Mixture(nn.Module):
    """Logits of components, and of the levels of each, columns end to end."""

    shares: Tensor
    levels: Tensor
    places: Tensor  # of levels that were merged: what each is merged to
    within: Tensor  # and its share of that

    def __init__(self, levels: int, components: int, merged: int) -> None:
        super().__init__()
        self.register_buffer("shares", torch.zeros(components))
        self.register_buffer("levels", torch.zeros(components, levels))
        if merged:
            self.register_buffer("places", torch.zeros(merged, dtype=torch.int64))
            self.register_buffer("within", torch.zeros(merged))


class ProductMixture(nn.Module):
    """Block ``decoder``: the mixture of a schema's columns."""

    def __init__(self, sizes: Sequence[int], components: int, merged: int = 0) -> None:
        super().__init__()
        self.sizes = list(sizes)
        self.decoder = Mixture(sum(sizes), components, merged)

    def generate(self, component: Tensor, columns: Tensor) -> Tensor:
        """Codes (n, columns) from standard normal numbers: (n, 1) for the component and (n, columns)."""
        shares = torch.softmax(self.decoder.shares.double(), 0)
        chosen, _ = drawn(shares.expand(len(component), -1), component[:, 0])
        found = [
            drawn(torch.softmax(levels.double(), 1)[chosen], columns[:, number])[0]
            for number, levels in enumerate(torch.split(self.decoder.levels, self.sizes, dim=1))
        ]
        return torch.stack(found, dim=1)

    @torch.no_grad()
    def negative_log(self, levels: Tensor) -> Tensor:
        """Of each record (n, levels), 1 for the levels that it has and 0 for others, in nats."""
        parts = torch.split(self.decoder.levels.double(), self.sizes, dim=1)
        chances = torch.cat([torch.log_softmax(part, dim=1) for part in parts], dim=1)
        return -torch.logsumexp(levels.double() @ chances.T + torch.log_softmax(self.decoder.shares.double(), 0), dim=1)


def own_column(sizes: Sequence[int]) -> Tensor:
    """(levels, levels): whether two levels are of the same column."""
    column = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return column.unsqueeze(0) == column.unsqueeze(1)


def fitted(
    sizes: Sequence[int], counts: Tensor, deviation: float, components: int, steps: int, seed: int
) -> dict[str, Tensor]:
    """The mixture whose pairs are nearest to those counted, by least squares, as tensors of its decoder.

    ``counts`` of pairs of levels are (levels, levels) and symmetric; each has the same standard deviation.

    It stops where what is left over is about what noise explains, which is one standard deviation squared for each
    count, or after so many steps: so the noise itself says how far to go, and no record is looked at for it.
    """
    same, total = own_column(sizes), record_count(sizes, counts)
    target, weight = (counts / total).float(), torch.where(same, 0.0, (total / deviation) ** 2 / 2)
    cells = int((~same).sum() // 2)  # each pair stands there twice
    levels = _start(sizes, target, same, components, seed).requires_grad_()
    shares = torch.zeros(components, requires_grad=True)
    optimizer, ends = torch.optim.Adam([levels, shares], lr=LEARNING_RATE), steps
    for step in range(steps):
        left = (weight * (_pairs(sizes, levels, shares) - target).square()).sum()
        if step % LOOK_EVERY == 0 and float(left.detach()) < ENOUGH * cells:
            ends = min(ends, step + CALMING)
        if step >= ends:
            break
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (ends - step) / CALMING)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(left)
        optimizer.step()
    return {"shares": shares.detach(), "levels": levels.detach()}


def joined(parts: Sequence[dict[str, Tensor]], totals: Sequence[float], place: int) -> dict[str, Tensor]:
    """One mixture of several, with one more column before the level ``place``, which says whose a component was."""
    shares, levels = [], []
    for number, (part, total) in enumerate(zip(parts, totals, strict=True)):
        own = torch.zeros(len(part["levels"]), len(parts))
        own[:, number] = CERTAIN
        shares.append(torch.log_softmax(part["shares"], 0) + math.log(total))
        levels.append(torch.cat([part["levels"][:, :place], own, part["levels"][:, place:]], dim=1))
    return {"shares": torch.cat(shares), "levels": torch.cat(levels)}


def record_count(sizes: Sequence[int], counts: Tensor) -> float:
    """How many records symmetric counts speak of: every pair of columns counts them all; at least 1, despite noise."""
    columns = len(sizes)
    return max(1.0, float(counts[~own_column(sizes)].sum()) / (columns * (columns - 1)))


def _start(sizes: Sequence[int], target: Tensor, same: Tensor, components: int, seed: int) -> Tensor:
    """Single columns as their pairs have them, a little different in each component."""
    generator = torch.Generator().manual_seed(seed)
    single = torch.where(same, 0.0, target).sum(dim=1) / (len(sizes) - 1)
    parts = [part.clamp_min(LEAST) for part in torch.split(single, list(sizes))]
    known = torch.cat([(part / part.sum()).log() for part in parts])
    return known + SPREAD * torch.randn(components, len(known), generator=generator)


def _pairs(sizes: Sequence[int], levels: Tensor, shares: Tensor) -> Tensor:
    """The chances of all pairs of levels; what stands there for levels of one column means nothing."""
    chances = torch.cat([torch.softmax(part, dim=1) for part in torch.split(levels, list(sizes), dim=1)], dim=1)
    return chances.T @ (torch.softmax(shares, 0).unsqueeze(1) * chances)
