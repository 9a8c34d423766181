"""One-shot moments: every silo sends noisy class sums, products and counts once, and the server makes a generator.

A sound and strong baseline for embeddings under differential privacy, with the Gaussian mechanism of Dwork, Roth, "The
Algorithmic Foundations of Differential Privacy", 2014, theorem A.1 (accounted exactly here): a normal distribution for
each class with a shared covariance, whose best classifier is Fisher's linear discriminant. Records must be no longer
than ``radius``, as those of ``fedloom embed`` are; longer ones are cut to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from fedloom.federation.rounds import Site
from fedloom.methods.base import Method, Pathway, PayloadRule, Recipe, SampleInputs, Setting
from fedloom.methods.generator import LABEL_SHARES
from fedloom.methods.labels import VECTORS, TemperedLabels, require_classes
from fedloom.methods.steps import ServerRound, ServerState, ServerStep, Stepped
from fedloom.models.class_gaussian import ClassGaussian, Contribution, Estimate, estimate, square_root
from fedloom.privacy.payload_sums import BoundedSum
from fedloom.settings import above
from fedloom.sharing.plan import RECORD_COUNT, BlockKey, BlockRule, Down, Scope, SharingPlan, Tensors, payload_of_sums
from fedloom.sharing.update import Update
from fedloom.streams import Streams

DECODER = BlockKey("decoder", "server")
FROM_SERVER = BlockRule(Scope.SERVER, up=False, down=Down.SERVER)  # the server's alone, and everybody gets it
MOMENTS = "moments"


@dataclass(frozen=True, kw_only=True)
class MomentsOptions(TemperedLabels):
    """The two weights divide the budget between class sums (1), products and counts."""

    radius: float = field(default=1.0, metadata=above(0))
    product_weight: float = field(default=1.0, metadata=above(0))
    count_weight: float = field(default=0.2, metadata=above(0))


@dataclass(frozen=True)
class MomentsStep(ServerStep):
    """Adds up what has ever come, in whichever round, and makes a generator of it."""

    width: int
    how: Contribution

    def initial(self, _: Streams, /) -> ServerState:
        """A generator that knows nothing."""
        return ServerState({DECODER: dict(ClassGaussian(self.how.classes, self.width).decoder.state_dict())})

    def __call__(self, round: ServerRound) -> Stepped:
        """The generator, where moments have come: those of all rounds are about the same centre."""
        if not (sent := payload_sum(round.updates, MOMENTS)):
            return Stepped(round.state)
        known, memory = round.state.blocks[DECODER], round.state.memory
        sums = {name: tensor + memory.get(f"{MOMENTS}/{name}", 0.0) for name, tensor in sent.items()}
        found = estimate(sums, sums["records"].item(), known["centre"], self.how)
        # The centre stays, so that silos which take part for the first time later on send moments about it, too.
        made = generator_of(found.about(known["centre"].to(torch.float64)))
        kept = {f"{MOMENTS}/{name}": tensor for name, tensor in sums.items()}
        return Stepped(ServerState({DECODER: {**known, **made}}, {**memory, **kept, LABEL_SHARES: found.shares}))


def build(classes: int, width: int, _: Site) -> ClassGaussian:
    """The same model everywhere, all zeros."""
    return ClassGaussian(classes, width)


def payload_sum(updates: Sequence[Update], payload: str) -> Tensors:
    """A payload added up over the silos that sent it, and how many ``records`` they have; nothing if none did."""
    total: Tensors = {}
    for update in (update for update in updates if payload in update.payloads):
        records = torch.tensor(update.counts["all"], dtype=torch.float64)
        for name, tensor in {**update.payloads[payload], "records": records}.items():
            total[name] = total.get(name, torch.zeros_like(records)) + tensor.to(torch.float64)
    return total


def generator_of(found: Estimate) -> Tensors:
    """The decoder's tensors, float32."""
    parts = {name: getattr(found, name) for name in ("centre", "offsets", "covariance", "metric", "weights", "bias")}
    parts["factor"] = square_root(found.within)
    return {name: tensor.to(torch.float32) for name, tensor in parts.items()}


def from_class(model: nn.Module, inputs: SampleInputs) -> Tensor:
    """Normal vectors of each label's class."""
    assert isinstance(model, ClassGaussian)
    return model.generate(inputs.noise["e"], inputs.condition)


def make(setting: Setting, options: MomentsOptions) -> Method:
    """No phases: one release in a silo's first round."""
    require_classes(setting, "moments")
    width, classes = setting.shape[0], len(setting.classes)
    how = Contribution(classes, options.radius, options.product_weight, options.count_weight)
    payload = payload_of_sums(MOMENTS, "class sums, products and counts, once", how.shapes(width))
    return Method(
        name="moments",
        plan=SharingPlan({"decoder": FROM_SERVER}, setting.groups, (RECORD_COUNT, payload)),
        build=partial(build, classes, width),
        phases=(),
        server_step=MomentsStep(width, how),
        pathways={"class": Pathway({"e": (width,)}, from_class, "e ~ N(0, I), y -> x", ("decoder",), labelled=True)},
        payloads=(PayloadRule(payload, BoundedSum(how, how.bound), share=1.0),),
        label_exponent=options.label_exponent,
    )


RECIPE = Recipe(
    "moments", "class means, shared covariance and counts, sent once: a generator", MomentsOptions, make, VECTORS
)
