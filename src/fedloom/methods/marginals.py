"""Tables from sums alone: every silo counts pairs of levels once, and the server fits a mixture of products to them.

One release of counts with the Gaussian mechanism, accounted exactly, of all pairs of columns, in each of which a record
is one count. To measure marginals and to fit a model to them is the scheme of McKenna, Miklau, Sheldon, "Winning the
NIST Contest: a scalable and general approach to differentially private synthetic data", 2021, who choose which pairs to
measure; the model here is a mixture of products, whose pairs are one product of matrices, so that none is left out. How
far it is fitted, the noise says (:func:`fedloom.models.product_mixture.fitted`). Where the schema names a target of few
levels, pairs of the other columns are counted and fitted for each of its levels: a component then has one of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor

from fedloom.errors import ConfigError
from fedloom.federation.rounds import Site
from fedloom.methods.base import Method, Pathway, Recipe, Setting
from fedloom.methods.moments import DECODER, FROM_SERVER, payload_sum
from fedloom.methods.pair_counts import PairCounts, require_small
from fedloom.methods.pair_releases import COLUMNS, PAIRS, releases
from fedloom.methods.steps import ServerRound, ServerState, ServerStep, Stepped
from fedloom.methods.table_rows import FromMixture
from fedloom.modalities.table import schema_of
from fedloom.models.product_mixture import ProductMixture, fitted, joined, record_count
from fedloom.settings import at_least
from fedloom.sharing.plan import RECORD_COUNT, SharingPlan, Tensors
from fedloom.streams import Streams


@dataclass(frozen=True, kw_only=True)
class MarginalsOptions:
    """Nothing here depends on records; the defaults do at every budget that was tried."""

    components: int = field(default=400, metadata=at_least(1))  # of the mixture
    steps: int = field(default=1500, metadata=at_least(1))  # of the fit, at most
    target_levels: int = field(default=4, metadata=at_least(0))  # of a target for each of which pairs are counted
    levels: int = field(default=0, metadata=at_least(0))  # of a column that pairs are counted of; 0: all, in one round
    rows: int = field(default=1, metadata=at_least(1))  # of a subject that count, where subjects are protected


@dataclass(frozen=True)
class FitPairs(ServerStep):
    """Fits the mixture to the pairs of all silos, which add up."""

    pairs: PairCounts
    options: MarginalsOptions
    seed: int

    def initial(self, _: Streams, /) -> ServerState:
        """A mixture that knows nothing."""
        return ServerState({DECODER: dict(build(self.pairs, self.options.components, None).decoder.state_dict())})

    def __call__(self, round: ServerRound) -> Stepped:
        """The fit, where counts have come: those of silos that come later are added to the ones before."""
        known = round.state.blocks[DECODER]
        if single := payload_sum(round.updates, COLUMNS):
            return Stepped(replace(round.state, blocks={DECODER: known | self.pairs.merged.merged(single["counts"])}))
        if not (sent := payload_sum(round.updates, PAIRS)):
            return Stepped(round.state)
        counts = sent["counts"] + round.state.memory.get("counts", 0.0)
        made = known | self._fit(counts)
        return Stepped(ServerState({DECODER: made}, {**round.state.memory, "counts": counts}))

    def _fit(self, counts: Tensor) -> Tensors:
        pairs, options = self.pairs, self.options
        # The noise is what makes a count negative: half a normal distribution around counts of nobody.
        below = counts[counts < 0]
        noise = float(below.square().mean()) if len(below) else 0.0
        each, made, totals = options.components // pairs.parts, [], []
        for row, matrix in zip(counts, pairs.matrices(counts), strict=True):
            chance = max(1.0, float(row.mean()))  # the variance of a count of records drawn anew
            made.append(fitted(pairs.sizes, matrix, math.sqrt(noise + chance), each, options.steps, self.seed))
            totals.append(record_count(pairs.sizes, matrix))
        return made[0] if pairs.target is None else joined(made, totals, sum(pairs.merged.sizes[: pairs.target]))


def build(pairs: PairCounts, components: int, _: Site | None) -> ProductMixture:
    """The same model everywhere, all zeros; a component has one level of a target that divides the counts."""
    return ProductMixture(pairs.merged.sizes, components // pairs.parts * pairs.parts, sum(pairs.merged.levels))


def make(setting: Setting, options: MarginalsOptions) -> Method:
    """No phases: one release in a silo's first round, or in its second where the first one chooses levels."""
    schema = schema_of(setting.modality.name)
    require_small(schema, options.levels)
    pairs = PairCounts(schema, options.target_levels, options.levels)
    if options.components < pairs.parts:
        raise ConfigError(f"method.components = {options.components} is below {pairs.parts}, the levels of the target")
    rules, rows = releases(setting.config, pairs, options.rows), FromMixture(schema, pairs.merged)
    return Method(
        name="marginals",
        plan=SharingPlan({"decoder": FROM_SERVER}, setting.groups, (RECORD_COUNT, *(rule.payload for rule in rules))),
        build=partial(build, pairs, options.components),
        phases=(),
        server_step=FitPairs(pairs, options, setting.streams.torch_seed("marginals")),
        pathways={"mixture": Pathway(rows.noise, rows, "k ~ shares, x_j ~ p_kj", ("decoder",))},
        payloads=rules,
    )


RECIPE = Recipe(
    "marginals",
    "tables: noisy counts of pairs, sent once, and a mixture fitted to them",
    MarginalsOptions,
    make,
    ("table",),
)
