"""How images are drawn along a flow, whichever network gives its velocity."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedloom.methods.base import Pathway, SampleInputs
from fedloom.models.flow import SOLVERS, Solver
from fedloom.models.unet import FlowUNet
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
        """As many at a time as fit: what a solver needs does not grow with its steps."""
        assert isinstance(model, FlowUNet)
        start = inputs.noise["e"]
        rows = max(1, AT_ONCE // (self.width * start.shape[2] * start.shape[3]))
        label = inputs.condition if self.labelled else torch.full_like(inputs.group, self.classes)
        parts = zip(*(torch.split(column, rows) for column in (start, inputs.group, label)), strict=True)
        return torch.cat([self._carried(model, *part) for part in parts])

    def _carried(self, model: FlowUNet, start: Tensor, group: Tensor, label: Tensor) -> Tensor:
        nobodys = torch.full_like(label, self.classes)

        def velocity(x: Tensor, time: Tensor) -> Tensor:
            found = model.velocity(x, time, group, label)
            if self.labelled and self.guidance:
                found = found + self.guidance * (found - model.velocity(x, time, group, nobodys))
            return found

        return pixels(SOLVERS[self.solver](velocity, start, self.steps))


def image_ways(flow: ImageFlow, shape: tuple[int, ...], blocks: tuple[str, ...]) -> dict[str, Pathway]:
    """Without a class, and first where the network knows classes with one."""
    plain = Pathway({"e": shape}, replace(flow, guidance=0.0), "noise -> x along a flow", blocks)
    if not flow.classes:
        return {"flow": plain}
    labelled = replace(flow, labelled=True)
    return {
        "labelled": Pathway({"e": shape}, labelled, "noise, y -> x along a flow", blocks, labelled=True),
        "flow": plain,
    }
