"""The one shape that all modalities have, and where they are found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import fedloom.modalities
from fedloom.errors import ConfigError, unknown
from fedloom.modalities.likelihoods import Likelihood
from fedloom.registry import Registry, values_in

Shape = tuple[int, ...]
Tiles = NDArray[np.uint8]  # (n, height, width, 1 or 3)


@dataclass(frozen=True)
class Modality:
    """What a record is, and all that depends on it.

    Records are stored as their source gives them (``read``), models see float32 (``decode``), and what models make is
    stored again as a source would (``encode``). Silos of one federation share the modality and the shape of a record.
    """

    name: str
    plural: str  # how people call several of its records
    read: Callable[[NDArray[Any], str], Tensor]  # an array by its name, checked, as stored
    objection: Callable[[Tensor], str]  # what stored values are that cannot be records; empty if they can
    decode: Callable[[Tensor], Tensor]  # stored values as models see them; values that models made stay
    encode: Callable[[Tensor], NDArray[Any]]  # values that models made, as stored
    tiles: Callable[[Tensor], Tiles | None]  # each record as a small picture; None where it has none
    likelihoods: Mapping[str, Callable[[float], Likelihood]]  # the usual one first; given ``model.variance``
    network: str = "mlp"  # the usual one
    values: str = ""  # what the numbers of a record are, where that can be said
    metrics: tuple[str, ...] = ()  # those that make sense; empty: all
    learned_as: str = ""  # another modality whose methods can learn it as well
    is_picture: bool = False  # whether it has channels, height and width, so that a PNG file may hold the whole record

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by its name: another process finds it in its own registry."""
        return modality_of, (self.name, ())

    def shows(self, shape: Shape) -> bool:
        """Whether records of that shape have tiles."""
        return self.tiles(torch.zeros(1, *shape)) is not None

    def likelihood(self, name: str, variance: float, field: str = "model.likelihood") -> Likelihood:
        """The likelihood of that name."""
        if name not in self.likelihoods:
            raise ConfigError(f"{field}: " + unknown("likelihood", name, self.likelihoods))
        return self.likelihoods[name](variance)


MODALITIES: Registry[Modality] = Registry(
    "modality", "fedloom.modalities", Modality, lambda: values_in(fedloom.modalities, "MODALITY")
)  # adding one is adding a file


def modality_of(name: str, shape: Shape) -> Modality:
    """By name; records that name no modality are images where they have height and width, else vectors."""
    return MODALITIES[name or ("image" if len(shape) in (2, 3) else "vector")]
