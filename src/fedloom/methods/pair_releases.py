"""What silos release of tables for ``marginals``: counts of pairs, and before them what they are counted of."""

from __future__ import annotations

from fedloom.config import Config
from fedloom.errors import ConfigError
from fedloom.methods.base import PayloadRule
from fedloom.methods.pair_counts import PairCounts
from fedloom.privacy.payload_sums import Tally
from fedloom.sharing.plan import payload_of_sums

PAIRS = "pairs"
COLUMNS = "columns"
SHARE = 0.1  # of the budget, for counts of single columns


def releases(config: Config, pairs: PairCounts, rows: int) -> tuple[PayloadRule, ...]:
    """Counts of pairs, and in the round before those of columns whose levels are to be merged, where there are some."""
    merged = pairs.merged
    payload = payload_of_sums(PAIRS, "counts of pairs of levels, once", {"counts": pairs.shape})
    tally = Tally(pairs.count, pairs.of_one, rows)
    if not merged.wide:
        return (PayloadRule(payload, tally, share=1.0),)
    if config.rounds < 2 or config.participation.rate < 1:
        raise ConfigError(
            f"method.levels = {pairs.kept} needs rounds = 2 and participation.rate = 1: the first round says how "
            f"levels of '{pairs.schema.names[merged.wide[0]]}' are merged, and the second counts pairs of them"
        )
    single = payload_of_sums(COLUMNS, "counts of single levels, once", {"counts": (sum(merged.levels),)})
    first = PayloadRule(single, Tally(merged.count, merged.of_one, rows), share=SHARE)
    return first, PayloadRule(payload, tally, when=slice(1, 2), share=1 - SHARE)
