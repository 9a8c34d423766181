"""Public ways to shorten and scale features: nothing here ever looks at a record."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedloom.backbones.base import Backbone
from fedloom.errors import ConfigError, unknown
from fedloom.streams import Streams


def head_directions(backbone: Backbone, width: int, count: int, _seed: int) -> Tensor:
    """The first right singular vectors of the public class head: the directions that its classes differ in."""
    weight = backbone.head.to("cpu", torch.float64)
    return _columns(torch.linalg.svd(weight, full_matrices=False).Vh.T, width, count)


def random_directions(_backbone: Backbone, width: int, count: int, seed: int) -> Tensor:
    """Orthonormal directions drawn from a public seed."""
    drawn = Streams(seed).normal("projection", width, min(width, count)).to(torch.float64)
    return _columns(torch.linalg.qr(drawn).Q, width, count)


def _columns(directions: Tensor, width: int, count: int) -> Tensor:
    available = directions.shape[1]
    if directions.shape[0] != width or not 1 <= count <= available:
        raise ConfigError(f"{count} directions were asked for, but features of length {width} have 1 to {available}")
    return directions[:, :count]


PROJECTIONS: dict[str, Callable[[Backbone, int, int, int], Tensor]] = {
    "head": head_directions,
    "random": random_directions,
}


def directions(name: str, backbone: Backbone, width: int, count: int, seed: int = 0) -> Tensor:
    """An orthonormal (width, count) matrix in float64; features times it are the shortened ones."""
    if name not in PROJECTIONS:
        raise ConfigError(unknown("projection", name, PROJECTIONS))
    return PROJECTIONS[name](backbone, width, count, seed)


def unit_length(features: Tensor) -> Tensor:
    """Rows scaled to length 1, so that a bound on each record holds by construction; a row of zeros stays."""
    wide = features.to(torch.float64)  # where the square of a tiny float32 does not vanish
    lengths: Tensor = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
    return (wide / lengths.clamp_min(1e-300)).to(features.dtype)


SCALINGS: dict[str, Callable[[Tensor], Tensor]] = {"none": lambda features: features, "l2": unit_length}
