"""How far apart two tables are in what counts of one, two and three columns at a time say."""

from __future__ import annotations

import itertools
import math

import numpy as np

from fedloom.evaluation.evidence import Evaluation
from fedloom.evaluation.metric import FEW, Metric, Reading, Values
from fedloom.evaluation.needs import SAMPLES, SILO_RECORDS
from fedloom.evaluation.table_rows import TABLE, tables_of
from fedloom.modalities.schema import Codes, Numbers, Schema
from fedloom.runs.metrics import metric_key
from fedloom.streams import Streams

MOST = 100  # sets of columns that are looked at: all pairs of 14 columns, and of more than nine a draw of triples
_CHOICE = Streams(0)  # the same for all runs, so that they can be compared
WAYS = (1, 2, 3)


def marginal_distance(schema: Schema, rows: Numbers, others: Numbers, ways: int) -> float:
    """The total variation distance of so many columns together, averaged over sets of them."""
    return float(np.mean(list(marginal_distances(schema, rows, others, ways).values())))


def marginal_distances(schema: Schema, rows: Numbers, others: Numbers, ways: int) -> dict[tuple[int, ...], float]:
    """That of each set of columns, by their numbers."""
    one, two, sizes = schema.codes(rows), schema.codes(others), schema.sizes
    return {chosen: _distance(one, two, chosen, sizes) for chosen in column_sets(len(sizes), ways)}


def column_sets(columns: int, ways: int) -> list[tuple[int, ...]]:
    """All sets of so many columns; of triples a draw that is the same for everybody, where there are many."""
    every = list(itertools.combinations(range(columns), ways))
    if ways < 3 or len(every) <= MOST:
        return every
    drawn = _CHOICE.permutation("marginals", len(every))[:MOST]
    return [every[number] for number in drawn.sort().values.tolist()]


def _distance(one: Codes, two: Codes, chosen: tuple[int, ...], sizes: tuple[int, ...]) -> float:
    cells = math.prod(sizes[number] for number in chosen)
    shares = []
    for codes in (one, two):
        cell = np.zeros(len(codes), dtype=np.int64)
        for number in chosen:
            cell = cell * sizes[number] + codes[:, number]
        found, counts = np.unique(cell, return_counts=True)  # cells are many, those with a record are not
        shares.append((found, counts / len(codes)))
    (first, p), (second, q) = shares
    together, place = np.unique(np.concatenate([first, second]), return_inverse=True)
    assert cells < 2**62, "the number of a cell is a whole number of 64 bits"
    difference = np.bincount(place, np.concatenate([p, -q]), len(together))
    return float(np.abs(difference).sum() / 2)


def marginals(evaluation: Evaluation) -> Values:
    """Total variation of counts of one, two and three columns, of samples and of held-out rows to training rows."""
    found = {}
    for table in tables_of(evaluation):
        for name, rows in (("", table.synthetic), ("-held-out", table.held_out)):
            for ways in WAYS[: len(table.schema.columns)]:
                key = metric_key("marginals", f"{ways}-way{name}", len(rows), table.group)
                found[key] = marginal_distance(table.schema, rows, table.training, ways)
    return found


METRIC = Metric(
    "marginals",
    marginals,
    (
        Reading("marginals/*-held-out", "Distance of real marginals", counts="held-out rows", fewest=FEW),
        Reading("marginals/*", "Distance of marginals", better="lower", counts="rows", fewest=FEW),
    ),
    needs=(TABLE, SILO_RECORDS, SAMPLES),
)
