"""Rows of a table from a mixture of products, which keep to the rules of its schema."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedloom.methods.base import SampleInputs
from fedloom.methods.merged_levels import MergedLevels
from fedloom.modalities.rules import TRIES, keeping
from fedloom.modalities.schema import Schema
from fedloom.models.product_mixture import ProductMixture


@dataclass(frozen=True)
class FromMixture:
    """Rows of the mixture: a code for each column, and a value of that code."""

    schema: Schema
    merged: MergedLevels

    @property
    def noise(self) -> dict[str, tuple[int, ...]]:
        """The numbers that a row is made of; where there are rules, it is the first of several that keeps to them."""
        tries, columns = TRIES if self.schema.rules else 1, len(self.schema.sizes)
        return {"component": (tries, 1), "columns": (tries, columns), "inside": (tries, columns)}

    @torch.no_grad()
    def __call__(self, model: nn.Module, inputs: SampleInputs) -> Tensor:
        """Values as the schema means them, on the device of the noise."""
        assert isinstance(model, ProductMixture)
        component, columns, inside = (inputs.noise[name] for name in self.noise)
        codes = model.generate(component.flatten(0, 1), columns.flatten(0, 1))
        found = (each.cpu().numpy() for each in self.merged.parted(model, codes, inside.flatten(0, 1)))
        draws = self.schema.values(*found).reshape(inside.shape).swapaxes(0, 1)
        return torch.from_numpy(keeping(self.schema.checks, draws)).to(inside.device)
