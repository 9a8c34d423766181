"""Tables from sums alone: every silo counts pairs of levels once, and the server fits a mixture of products to them.

One release of counts with the Gaussian mechanism, accounted exactly, of all pairs of columns, in each of which a record
is one count. To measure marginals and to fit a model to them is the scheme of McKenna, Miklau, Sheldon, "Winning the
NIST Contest: a scalable and general approach to differentially private synthetic data", 2021, who choose which pairs to
measure; the model here is a mixture of products, whose pairs are one product of matrices, so that none is left out. How
far it is fitted, the noise says (:func:`fedloom.models.product_mixture.fitted`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from fedloom.federation.rounds import Site
from fedloom.methods.base import Method, Pathway, PayloadRule, Recipe, Setting
from fedloom.methods.moments import DECODER, FROM_SERVER, payload_sum
from fedloom.methods.pair_counts import PairCounts, require_small
from fedloom.methods.steps import ServerRound, ServerState, ServerStep, Stepped
from fedloom.methods.table_rows import FromMixture
from fedloom.modalities.schema import Schema
from fedloom.modalities.table import schema_of
from fedloom.models.product_mixture import ProductMixture, fitted
from fedloom.privacy.payload_sums import Tally
from fedloom.settings import above, at_least
from fedloom.sharing.plan import RECORD_COUNT, SharingPlan, Tensors, payload_of_sums
from fedloom.streams import Streams

PAIRS = "pairs"


@dataclass(frozen=True, kw_only=True)
class MarginalsOptions:
    """Nothing here depends on records; the defaults do at every budget that was tried."""

    components: int = field(default=400, metadata=at_least(1))  # of the mixture
    steps: int = field(default=1500, metadata=at_least(1))  # of the fit, at most
    target_weight: float = field(default=2.0, metadata=above(0))  # of pairs with the schema's target, beside 1
    rows: int = field(default=1, metadata=at_least(1))  # of a subject that count, where subjects are protected


@dataclass(frozen=True)
class FitPairs(ServerStep):
    """Fits the mixture to the pairs of all silos, which add up."""

    pairs: PairCounts
    options: MarginalsOptions
    seed: int

    def initial(self, _: Streams, /) -> ServerState:
        """A mixture that knows nothing."""
        return ServerState({DECODER: dict(build(self.pairs.schema, self.options, None).decoder.state_dict())})

    def __call__(self, round: ServerRound) -> Stepped:
        """The fit, where counts have come: those of silos that come later are added to the ones before."""
        if not (sent := payload_sum(round.updates, PAIRS)):
            return Stepped(round.state)
        weighed = sent["counts"] + round.state.memory.get("counts", 0.0)
        made = self._fit(weighed)
        return Stepped(ServerState({DECODER: made}, {**round.state.memory, "counts": weighed}))

    def _fit(self, weighed: Tensor) -> Tensors:
        weights = self.pairs.weights
        taken = weights > 0
        counts = torch.where(taken, weighed / weights, 0.0)
        # The noise is what makes a count negative: half a normal distribution around counts of nobody.
        below = weighed[taken & (weighed < 0)]
        noise = below.square().mean() if len(below) else torch.zeros((), dtype=torch.float64)
        chance = counts[taken].mean().clamp_min(1.0)  # the variance of an average count, if its records were drawn anew
        deviations = torch.where(taken, (noise / weights.square() + chance).sqrt(), math.inf)
        sizes, (components, steps) = self.pairs.schema.sizes, (self.options.components, self.options.steps)
        return fitted(sizes, counts + counts.T, torch.minimum(deviations, deviations.T), components, steps, self.seed)


def build(schema: Schema, options: MarginalsOptions, _: Site | None) -> ProductMixture:
    """The same model everywhere, all zeros."""
    return ProductMixture(schema.sizes, options.components)


def make(setting: Setting, options: MarginalsOptions) -> Method:
    """No phases: one release in a silo's first round."""
    schema = schema_of(setting.modality.name)
    pairs, levels = PairCounts(schema, options.target_weight), sum(schema.sizes)
    require_small(schema)
    payload = payload_of_sums(PAIRS, "counts of pairs of levels, once", {"counts": (levels, levels)})
    rows = FromMixture(schema)
    return Method(
        name="marginals",
        plan=SharingPlan({"decoder": FROM_SERVER}, setting.groups, (RECORD_COUNT, payload)),
        build=partial(build, schema, options),
        phases=(),
        server_step=FitPairs(pairs, options, setting.streams.torch_seed("marginals")),
        pathways={"mixture": Pathway(rows.noise, rows, "k ~ shares, x_j ~ p_kj", ("decoder",))},
        payloads=(PayloadRule(payload, Tally(pairs.count, pairs.weigh, pairs.of_one, options.rows), share=1.0),),
    )


RECIPE = Recipe(
    "marginals",
    "tables: noisy counts of pairs, sent once, and a mixture fitted to them",
    MarginalsOptions,
    make,
    ("table",),
)
