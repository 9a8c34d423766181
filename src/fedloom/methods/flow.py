"""Flow matching on embeddings: a small network that carries noise to labelled vectors, averaged over everybody.

Lipman, Chen, Ben-Hamu, Nickel, Le: "Flow Matching for Generative Modeling", ICLR 2023 (arXiv 2210.02747), equation 23
with straight paths (sigma_min = 0); averaged after McMahan et al., AISTATS 2017. Its widths are those of
``model.hidden``; the noise it starts from is as long as the vectors, ``scale`` times a standard normal one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from fedloom.federation.rounds import Site
from fedloom.methods.base import Method, OptimizerRule, Pathway, Phase, Recipe, SampleInputs, Setting
from fedloom.methods.labels import VECTORS, LabelOptions, require_classes, with_labels
from fedloom.methods.steps import Merged
from fedloom.models.labelled import ConditionalFlow, Told
from fedloom.objectives.labelled import FlowMatching
from fedloom.settings import at_least
from fedloom.sharing.plan import GLOBAL, SharingPlan


@dataclass(frozen=True, kw_only=True)
class FlowOptions(LabelOptions):
    """``scale`` 0 is 1 / sqrt(d), which makes the noise about as long as vectors of length 1."""

    scale: float = field(default=0.0, metadata=at_least(0))
    steps: int = field(default=20, metadata=at_least(1))  # of Euler's method


def build(setting: Setting, _: Site) -> ConditionalFlow:
    """A velocity network with fresh weights, told time and class."""
    width = setting.shape[0]
    return ConditionalFlow(Told(width + 1, setting.config.model.hidden, width, len(setting.classes)))


def carried(steps: int, scale: float, model: nn.Module, inputs: SampleInputs) -> Tensor:
    """Noise, moved along the velocity from time 0 to time 1."""
    assert isinstance(model, ConditionalFlow)
    x = scale * inputs.noise["e"]
    for step in range(steps):
        time = torch.full((x.shape[0], 1), (step + 0.5) / steps, device=x.device)
        x = x + model.velocity(x, time, inputs.condition) / steps
    return x


def make(setting: Setting, options: FlowOptions) -> Method:
    """One block, GLOBAL."""
    require_classes(setting, "flow")
    width = setting.shape[0]
    scale = options.scale or width**-0.5
    plan = SharingPlan({"flow": GLOBAL}, setting.groups).with_scopes(setting.config.sharing.scopes)
    generate = partial(carried, options.steps, scale)
    method = Method(
        name="flow",
        plan=plan,
        build=partial(build, setting),
        phases=(Phase("flow", ("flow",), FlowMatching(width, scale), OptimizerRule.of(setting.config.local)),),
        server_step=Merged(),
        pathways={"flow": Pathway({"e": (width,)}, generate, "noise, y -> x along a flow", ("flow",), labelled=True)},
    )
    return with_labels(method, setting, options)


RECIPE = Recipe(
    "flow", "flow matching on embeddings, one small network averaged over everybody", FlowOptions, make, VECTORS
)
