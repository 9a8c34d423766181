"""The one shape that all modalities have, and where they are found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import fedloom.modalities
from fedloom.errors import ConfigError, DataError, unknown
from fedloom.modalities.likelihoods import Likelihood
from fedloom.registry import Registry, values_in

Shape = tuple[int, ...]
Tiles = NDArray[np.uint8]  # (n, height, width, 1 or 3)
# By name: of each record a number or a text (n,), a list of numbers (n, k), or a picture as among tiles.
Columns = Mapping[str, NDArray[Any]]


def extremes(coins: Tensor, x: Tensor) -> Tensor:
    """The largest of all stored numbers where a coin is true, the least where it is not."""
    return torch.where(coins, x.min(), x.max())


@dataclass(frozen=True, eq=False)
class FromMeans:
    """How a record is drawn from the mean that a model gives, where a mean is no record."""

    noise: Shape  # of the standard normal numbers that one record takes
    draw: Callable[[Tensor, Tensor], Tensor]  # means and noise: records as stored


@dataclass(frozen=True, eq=False)
class Modality:
    """What a record is, and all that depends on it.

    Records are stored as their source gives them (``read``), models see float32 (``decode``), and what models make is
    stored again as a source would (``encode``). Silos of one federation share the modality and the shape of a record.
    """

    name: str  # by which data and configurations know it
    plural: str  # how people call several of its records
    read: Callable[[NDArray[Any], str], Tensor]  # an array by its name, checked, as stored
    objection: Callable[[Tensor], str]  # what stored values are that cannot be records; empty if they can
    decode: Callable[[Tensor], Tensor]  # stored values as models see them; values that models made stay
    encode: Callable[[Tensor], NDArray[Any]]  # values that models made, as stored
    likelihoods: Mapping[str, Callable[[float], Likelihood]]  # the usual one first; given ``model.variance``
    seen: Callable[[Shape], Shape] = lambda shape: shape  # of a record as models see it, by its own
    drawing: FromMeans | None = None  # None: what models make is the mean itself
    network: str = "mlp"  # the usual one
    values: str = ""  # what the numbers of a record are, and their range, where that can be said
    metrics: tuple[str, ...] = ()  # those that make sense; empty: all
    is_picture: bool = False  # whether it has channels, height and width
    tiles: Callable[[Tensor], Tiles | None] = lambda _: None  # each record as a small picture; None where it has none
    in_columns: Callable[[Tensor], Columns] | None = None  # as a table holds them; unless told: one list, "values"
    from_columns: Callable[[Columns], NDArray[Any]] | None = None  # the way back, to what ``read`` takes
    types: Mapping[str, str] = field(default_factory=dict)  # Arrow's names for columns whose cells may be None
    made_up: Callable[[Tensor], Tensor] = lambda uniform: uniform  # records of nobody, from numbers in [0, 1)
    extremes: Callable[[Tensor, Tensor], Tensor] = extremes  # stored ones unlike any, from a coin for each number
    rules: tuple[str, ...] = ()  # what every record keeps to, made-up ones too, as people write it
    compares: bool = True  # whether the distance between two records, as models see them, says how alike they are
    coordinates: Callable[[Tensor], Tensor] | None = None  # of stored records, in which that distance does say it
    made_by: str = ""  # the command that makes such records of others, if one does
    with_schema: Callable[[str], Modality] | None = None  # what ``NAME/SCHEMA`` stands for, where records need one
    learned_as: str = ""  # another modality whose methods can learn it as well

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by its name: another process finds it in its own registry."""
        return modality_of, (self.name, ())

    @property
    def family(self) -> str:
        """Its name without a schema."""
        return self.name.partition("/")[0]

    @property
    def summary(self) -> str:
        """A line about it."""
        return f"{self.plural}; likelihoods {', '.join(self.likelihoods)}"

    def columns(self, x: Tensor) -> Columns:
        """Records that models made as a table holds them."""
        return self.in_columns(x) if self.in_columns else {"values": self.encode(x).reshape(len(x), -1)}

    def shown(self, x: Tensor) -> Tiles | Columns | None:
        """Records as people look at them: pictures, or columns of single numbers and texts; None: not at all."""
        tiles = self.tiles(x)
        if tiles is not None:
            return tiles
        columns = self.columns(x)
        return columns if all(column.ndim == 1 for column in columns.values()) else None

    def shows(self, shape: Shape) -> bool:
        """Whether people can look at records of that shape."""
        return self.shown(torch.zeros(1, *shape)) is not None

    def schema(self, shape: Shape) -> dict[str, Any]:
        """What is said of a record to who sees none: its shape, the meaning of its numbers, its columns' types."""
        columns = {name: str(column.dtype) for name, column in self.columns(torch.zeros(1, *shape)).items()}
        columns |= self.types
        return {"modality": self.name, "shape": list(shape), "values": self.values, "columns": columns}

    def restored(self, columns: Columns, shape: Shape) -> NDArray[Any]:
        """What :meth:`columns` gave, as ``read`` takes it."""
        wanted = self.schema(shape)["columns"]
        if set(columns) != set(wanted):
            raise DataError(f"{self.plural} have the columns {', '.join(wanted)}, not {', '.join(columns) or 'none'}")
        if self.from_columns and "values" not in wanted:
            return self.from_columns({name: columns[name] for name in wanted})
        return columns["values"].reshape(-1, *shape)

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
    family, _, schema = name.partition("/")
    found = MODALITIES[family or ("image" if len(shape) in (2, 3) else "vector")]
    return _with_schema(found, schema) if schema else found


@cache  # one value for each schema, so that modalities can be compared
def _with_schema(family: Modality, schema: str) -> Modality:
    if family.with_schema is None:
        raise ConfigError(f"modality '{family.name}' takes no schema, but '{family.name}/{schema}' gives it one")
    return replace(family.with_schema(schema), name=f"{family.name}/{schema}")
