"""How images are drawn along a flow, whichever network gives its velocity."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedloom.errors import ConfigError
from fedloom.methods.base import Pathway, SampleInputs
from fedloom.models.flow import SOLVERS, Solver
from fedloom.models.unet import VelocityBlocks
from fedloom.objectives.rectified_flow import pixels

AT_ONCE = 2**27  # numbers in the largest layer of a pass: a fixed one, so that no sample depends on the machine


@dataclass(frozen=True)
class ImageFlow:
    """Noise, carried to images; with classes, leaning towards those that are asked for by ``guidance``."""

    solver: Solver
    steps: int
    width: int  # of the network at the images' full size
    classes: int = 0  # that the network knows
    guidance: float = 0.0
    labelled: bool = False  # whether a class is asked for

    def __call__(self, model: nn.Module, inputs: SampleInputs) -> Tensor:
        """Images."""
        return pixels(self.drawn(model, inputs))

    def drawn(self, model: nn.Module, inputs: SampleInputs) -> Tensor:
        """What the noise of samples is carried to."""
        label = inputs.condition if self.labelled else torch.full_like(inputs.group, self.classes)
        return self.ends(model, inputs.noise["e"], inputs.group, label)

    def ends(self, model: nn.Module, start: Tensor, group: Tensor, label: Tensor) -> Tensor:
        """Where noise is carried to, as many at a time as fit: what a solver needs does not grow with its steps."""
        assert isinstance(model, VelocityBlocks)
        rows = max(1, AT_ONCE // (self.width * start.shape[2] * start.shape[3]))
        parts = zip(*(torch.split(column, rows) for column in (start, group, label)), strict=True)
        return torch.cat([self._carried(model, *part) for part in parts])

    def _carried(self, model: VelocityBlocks, start: Tensor, group: Tensor, label: Tensor) -> Tensor:
        nobodys = torch.full_like(label, self.classes)

        def velocity(x: Tensor, time: Tensor) -> Tensor:
            found = model.velocity(x, time, group, label)
            if self.labelled and self.guidance:
                found = found + self.guidance * (found - model.velocity(x, time, group, nobodys))
            return found

        return SOLVERS[self.solver](velocity, start, self.steps)


def image_ways(flow: ImageFlow, shape: tuple[int, ...], blocks: tuple[str, ...], few: int) -> dict[str, Pathway]:
    """With a class where the network knows classes, and without one; first in ``few`` steps, where they suffice."""
    if flow.guidance and not flow.classes:
        raise ConfigError(f"method.guidance = {flow.guidance:g} needs classes to lean on: add 'label' to method.told")
    ways = {"flow": flow}
    if few:
        ways = {"few": replace(flow, solver="euler", steps=few), **ways}
    found = {}
    for name, way in ways.items():
        if way.classes:
            labelled = replace(way, labelled=True)
            told = Pathway({"e": shape}, labelled, f"noise, y -> x in {way.steps} steps", blocks, labelled=True)
            found["labelled" if name == "flow" else "labelled-few"] = told
        plain = replace(way, guidance=0.0)
        found[name] = Pathway({"e": shape}, plain, f"noise -> x in {way.steps} steps", blocks)
    return found
