"""Moments, refined: a normal distribution for each class whose offsets are then learned to tell the classes apart.

Round 1: a noisy mean. Round 2: noisy moments about it, as in :mod:`fedloom.methods.moments`. All later rounds: the
noisy gradient of -log p(y|x) for p(x|y) = N(centre + C w_y, C), C from the covariance of round 2, so that p(y|x) is a
softmax of w_y . (x - centre). Every round is one bounded sum, so noise may be shared among silos. Learning a generator
by what it says of y given x is the discriminative training of Jebara, "Machine Learning: Discriminative and
Generative", 2004; noisy sums of clipped gradients are those of Abadi et al., "Deep Learning with Differential
Privacy", CCS 2016. A step is taken in the metric that the noisy covariance allows, and the later weights are averaged.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedloom.errors import ConfigError
from fedloom.federation.rounds import RoundContext
from fedloom.methods import moments
from fedloom.methods.base import Method, PayloadRule, Recipe, Setting
from fedloom.methods.generator import LABEL_SHARES
from fedloom.methods.labels import TemperedLabels
from fedloom.methods.moments import DECODER, MomentsStep, generator_of, payload_sum
from fedloom.methods.steps import ServerRound, ServerState, Stepped
from fedloom.models.class_gaussian import BIAS, Contribution, Gradient, Itself, estimate, square_root, told_apart_by
from fedloom.privacy.payload_sums import BoundedSum
from fedloom.settings import above, share
from fedloom.sharing.plan import Tensors, payload_of_sums

CENTRE, GRADIENT = "centre", "gradient"


@dataclass(frozen=True, kw_only=True)
class RefinedOptions(TemperedLabels):
    """``radius`` is that about the centre; ``clip`` bounds one record's gradient, in radii."""

    radius: float = field(default=0.8, metadata=above(0))
    clip: float = field(default=0.3, metadata=above(0))
    step: float = field(default=1.0, metadata=above(0))
    start: float = field(default=0.3, metadata=above(0))  # of the weights that the moments give
    unaveraged: float = field(default=0.25, metadata=share())  # of the gradients' rounds, from the first on


@dataclass(frozen=True)
class RefiningStep(MomentsStep):
    """A centre, then moments, then steps; the generator is up to date after every round."""

    options: RefinedOptions

    def __call__(self, round: ServerRound) -> Stepped:
        """What has come in time is used; what is late is about the centre of another round."""
        known, memory = round.state.blocks[DECODER], round.state.memory
        in_time = [update for update in round.updates if update.round == round.context.round]
        if total := payload_sum(in_time, CENTRE):
            centre = (total["sum"] / total["records"]).to(torch.float32)
            return Stepped(replace(round.state, blocks={DECODER: {**known, "centre": centre}}))
        if sums := payload_sum(in_time, moments.MOMENTS):
            found = estimate(sums, sums["records"].item(), known["centre"], self.how)
            made = generator_of(found)
            start = {name: self.options.start * made[name] for name in ("weights", "bias")}
            return Stepped(ServerState({DECODER: {**known, **made, **start}}, {**memory, LABEL_SHARES: found.shares}))
        gradient = payload_sum(in_time, GRADIENT)
        if not gradient or LABEL_SHARES not in memory:  # without moments there is no metric to take a step in
            return Stepped(round.state)
        refined = self._refined(known, gradient, round.context, memory[LABEL_SHARES])
        return Stepped(replace(round.state, blocks={DECODER: refined}))

    def _refined(self, known: Tensors, gradient: Tensors, context: RoundContext, shares: Tensor) -> Tensors:
        """A step in the metric, and the generator whose classifier is the mean of the weights that count."""
        pace, radius = self.options.step * self.how.classes / gradient["records"], self.options.radius
        slope = pace * radius * gradient["weights"] @ known["metric"].to(torch.float64)
        weights = known["weights"] - slope.to(torch.float32)
        bias = known["bias"] - (pace * gradient["bias"] / (BIAS * self.how.classes)).to(torch.float32)
        counts = context.round - 2 > self.options.unaveraged * (context.rounds - 2)
        mean = weights + (known["mean"] - weights) * (1 - 1 / (known["averaged"] + 1)) if counts else weights.clone()
        offsets, within = told_apart_by(mean.to(torch.float64), known["covariance"].to(torch.float64), shares)
        return {
            **known,
            "weights": weights,
            "bias": bias,
            "mean": mean,
            "averaged": known["averaged"] + float(counts),
            "offsets": offsets.to(torch.float32),
            "factor": square_root(within).to(torch.float32),
        }


def make(setting: Setting, options: RefinedOptions) -> Method:
    """Three kinds of releases, and no phases."""
    if setting.config.rounds < 3 or setting.config.participation.rate < 1:
        raise ConfigError("method 'refined_moments' needs rounds of at least 3 and participation.rate = 1")
    plain = moments.make(setting, moments.MomentsOptions(radius=options.radius, label_exponent=options.label_exponent))
    (sent,), width, classes = plain.payloads, setting.shape[0], len(setting.classes)
    shapes = {"weights": (classes, width), "bias": (classes,)}
    centre = payload_of_sums(CENTRE, "the sum of all records, once", {"sum": (width,)})
    gradient = payload_of_sums(GRADIENT, "a gradient, in every round from the third on", shapes)
    return replace(
        plain,
        name="refined_moments",
        plan=replace(plain.plan, payloads=(*plain.plan.payloads, centre, gradient)),
        server_step=RefiningStep(width, Contribution(classes, options.radius), options),
        payloads=(
            PayloadRule(centre, BoundedSum(Itself()), "first", share=0.05),
            replace(sent, when=slice(1, 2), share=0.2),
            PayloadRule(
                gradient, BoundedSum(Gradient(classes, options.radius), options.clip), slice(2, None), share=0.75
            ),
        ),
    )


RECIPE = Recipe(
    "refined_moments", "moments, then classes learned apart by gradients", RefinedOptions, make, modalities=("vector",)
)
