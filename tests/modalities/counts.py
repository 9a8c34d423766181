"""Short sequences of counts, such as how many patients came on each day: a modality in one file, as a plug-in."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.errors import DataError
from fedloom.modalities.base import Columns, Modality, Tiles

HEIGHT, WIDTH = 16, 3  # of the largest count's bar


@dataclass(frozen=True)
class Poisson:
    """Each count is Poisson with a rate whose logarithm the decoder gives."""

    steepness: ClassVar[float] = math.inf
    bounds: ClassVar[tuple[float, float]] = (0.0, math.inf)

    def negative_log(self, x: Tensor, output: Tensor) -> Tensor:
        return (output.exp() - x * output + torch.lgamma(x + 1)).flatten(1).sum(dim=1)

    def mean(self, output: Tensor) -> Tensor:
        return output.exp()

    def sample(self, mean: Tensor, noise: Tensor) -> Tensor:
        return (mean + mean.sqrt() * noise).round().clamp_min(0)  # a normal of the same mean and variance


def read(array: NDArray[Any], name: str) -> Tensor:
    if array.ndim != 2 or not np.issubdtype(array.dtype, np.integer) or array.min(initial=0) < 0:
        raise DataError(f"{name} is {array.dtype} of shape {array.shape}; give whole numbers of shape (n, steps)")
    return torch.from_numpy(array.astype(np.int32))


def objection(x: Tensor) -> str:
    return "" if x.dtype == torch.int32 and not (x < 0).any() else f"{x.dtype} values; give counts"


def encode(x: Tensor) -> NDArray[np.int32]:
    counts: NDArray[np.int32] = x.round().clamp_min(0).to(torch.int32).cpu().numpy()
    return counts


def tiles(x: Tensor) -> Tiles:
    heights = encode(x) * HEIGHT / max(1, encode(x).max(initial=0))
    bars = heights[:, None, :] > np.arange(HEIGHT)[::-1, None]
    return np.where(bars, 0, 255).astype(np.uint8).repeat(WIDTH, axis=2)[..., None]


def in_columns(x: Tensor, names: tuple[str, ...] = ()) -> Columns:
    steps = names or tuple(f"step {number}" for number in range(1, x.shape[1] + 1))
    if len(steps) != x.shape[1]:
        raise DataError(f"{len(steps)} steps have a name, but sequences have {x.shape[1]}")
    return dict(zip(steps, encode(x).T, strict=True))


def with_schema(schema: str) -> Modality:
    """Steps by their names: then a table says more than bars do."""
    return replace(
        MODALITY,
        plural=f"sequences of counts ({schema})",
        tiles=lambda _: None,
        in_columns=partial(in_columns, names=tuple(schema.split(","))),
    )


MODALITY = Modality(
    name="counts",
    plural="sequences of counts",
    read=read,
    objection=objection,
    decode=lambda x: x.to(torch.float32),
    encode=encode,
    tiles=tiles,
    likelihoods={"poisson": lambda _: Poisson()},
    values="expected counts",
    metrics=("spread", "likelihood", "frechet", "cost"),
    in_columns=in_columns,
    from_columns=lambda columns: np.stack(list(columns.values()), axis=1),
    made_up=lambda uniform: (10 * uniform).floor(),
    extremes=lambda coins, x: torch.where(coins, 0, x.amax(dim=0)),
    with_schema=with_schema,
)
