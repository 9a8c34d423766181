"""Nearest neighbours by Euclidean distance, a block of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_ROWS = 1024


def distance_blocks(x: Tensor, y: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of rows of the float64 distance matrix between ``x`` and ``y``, with the rows they stand for."""
    x, y = x.flatten(1).to(torch.float64), y.flatten(1).to(torch.float64)
    for start in range(0, len(x), _ROWS):
        rows = slice(start, min(start + _ROWS, len(x)))
        yield rows, torch.cdist(x[rows], y)


def nearest(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """For every row of ``x`` the distance to its nearest row of ``y`` and that row's index."""
    blocks = [block.min(dim=1) for _, block in distance_blocks(x, y)]
    return torch.cat([block.values for block in blocks]), torch.cat([block.indices for block in blocks])


def neighbour_radii(x: Tensor, neighbours: int) -> Tensor:
    """For every row the distance to its ``neighbours``-th nearest other row."""
    radii = []
    for rows, block in distance_blocks(x, x):
        own = torch.arange(rows.start, rows.stop, device=block.device)
        block[torch.arange(len(block), device=block.device), own] = torch.inf
        radii.append(block.kthvalue(neighbours, dim=1).values)
    return torch.cat(radii)
