"""What a federation pays so that it can be told how near its samples of tables are to the silos' rows.

Where ``evaluation.metrics`` names ``fidelity``, each silo sends noisy counts of all pairs of levels once, at a share of
its budget (``privacy.shares.fidelity``). The method never sees them, so they judge it as fresh records would; the
server compares them with its samples as often as it likes (:mod:`fedloom.evaluation.fidelity`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from fedloom.federation.records import Records
from fedloom.methods.base import Method, PayloadRule, Setting
from fedloom.methods.moments import payload_sum
from fedloom.methods.pair_counts import PairCounts, require_small
from fedloom.methods.steps import ServerRound, ServerStep, Stepped, Steps
from fedloom.modalities.table import FAMILY, schema_of
from fedloom.privacy.payload_sums import VARIANCE, Tally, WithVariance
from fedloom.sharing.plan import Tensors, payload_of_sums

FIDELITY = "fidelity"  # the payload, and the metric that it is for
COUNTS = f"{FIDELITY}/counts"  # in the server's memory: (groups, pairs of levels), added up over silos
NOISE = f"{FIDELITY}/{VARIANCE}"  # of their noise, in squares of what one record adds
SHARE = 0.05  # of the budget, unless ``privacy.shares`` says otherwise


@dataclass(frozen=True)
class CountsOfGroups:
    """The pairs of levels of each group's records; a record adds what it adds to one group."""

    pairs: PairCounts
    groups: int

    def __call__(self, model: nn.Module, records: Records) -> Tensors:
        """(groups, pairs of levels), whole numbers."""
        found = [self.pairs.count(model, records.of_group(group))["counts"] for group in range(self.groups)]
        return {"counts": torch.cat(found)}


class KeepCounts(ServerStep):
    """Adds up what has ever come, in whichever round; no other step sees it."""

    def __call__(self, round: ServerRound) -> Stepped:
        """Counts and how noisy they are."""
        sent, memory = payload_sum(round.updates, FIDELITY), dict(round.state.memory)
        for key, name in ((COUNTS, "counts"), (NOISE, VARIANCE)):
            if name in sent:
                memory[key] = sent[name] + memory.get(key, 0.0)
        return Stepped(replace(round.state, memory=memory))


def with_fidelity(method: Method, setting: Setting) -> Method:
    """The method whose silos release what the metric needs, where the configuration names it for tables."""
    config = setting.config
    if FIDELITY not in config.evaluation.metrics or setting.modality.family != FAMILY:
        return method
    schema = schema_of(setting.modality.name)
    require_small(schema)
    pairs = PairCounts(schema, target_levels=0)
    shapes = {"counts": (len(setting.groups), pairs.shape[1]), VARIANCE: (1,)}
    payload = payload_of_sums(FIDELITY, "counts of pairs of levels, once, to compare samples with", shapes)
    tally = Tally(CountsOfGroups(pairs, len(setting.groups)), pairs.of_one, config.method.options.get("rows", 1))
    share = config.privacy.shares.get(FIDELITY, SHARE)
    # Of a method that only sends sums they make up the whole budget, so they leave this share.
    kept = [rule if method.phases else replace(rule, share=rule.share * (1 - share)) for rule in method.payloads]
    return replace(
        method,
        plan=replace(method.plan, payloads=(*method.plan.payloads, payload)),
        payloads=(*kept, PayloadRule(payload, WithVariance(tally), share=share)),
        server_step=Steps((KeepCounts(), method.server_step)),
    )
