"""How alike pairs of columns are, as SDMetrics has it: its ``Column Pair Trends``."""

from __future__ import annotations

import itertools
import math

import numpy as np

from fedloom.evaluation.evidence import Evaluation
from fedloom.evaluation.metric import FEW, Metric, Reading, Values
from fedloom.evaluation.needs import SAMPLES, SILO_RECORDS
from fedloom.evaluation.table_rows import TABLE, tables_of
from fedloom.modalities.schema import Codes, Numbers, Schema, SchemaColumn
from fedloom.runs.metrics import metric_key

BINS = 10


def pair_trends(schema: Schema, real: Numbers, synthetic: Numbers) -> float:
    """The mean over pairs of columns of how alike they are.

    Two columns of numbers: 1 minus half the difference of their correlations. Other pairs: 1 minus the total variation
    of their values together, numbers in ten bins, where no value is a value too. A pair of numbers of which one table
    has no correlation is left out.
    """
    columns = list(enumerate(schema.columns))
    binned = [[_levels(column, rows[:, number]) for number, column in columns] for rows in (real, synthetic)]
    found = []
    for (a, one), (b, other) in itertools.combinations(columns, 2):
        if one.levels or other.levels:
            found.append(1 - _variation([np.stack([each[a], each[b]], axis=1) for each in binned]))
        else:
            correlations = [_correlation(rows[:, a], rows[:, b]) for rows in (real, synthetic)]
            found.append(1 - abs(correlations[0] - correlations[1]) / 2)
    known = [value for value in found if not math.isnan(value)]
    return float(np.mean(known)) if known else math.nan


def _levels(column: SchemaColumn, values: Numbers) -> Codes:
    """The number of each value's level or bin; bins are those of the table that they are of, as in SDMetrics."""
    if column.levels:
        return column.codes(values)
    known = values[~np.isnan(values)]
    edges = np.histogram_bin_edges(known, BINS) if len(known) else np.zeros(1)
    found: Codes = np.digitize(values, edges).astype(np.int64)
    return found


def _variation(tables: list[Codes]) -> float:
    _, place = np.unique(np.concatenate(tables), axis=0, return_inverse=True)
    parts = np.split(place.reshape(-1), [len(tables[0])])
    shares = [np.bincount(part, minlength=int(place.max()) + 1) / len(part) for part in parts]
    return float(np.abs(shares[0] - shares[1]).sum() / 2)


def _correlation(one: Numbers, other: Numbers) -> float:
    """Pearson's, of rows that have both values; not a number where one of them does not vary."""
    there = ~np.isnan(one) & ~np.isnan(other)
    a, b = (values[there] - values[there].mean() for values in (one, other)) if there.any() else (one[:0], other[:0])
    scale = math.sqrt(float((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale else math.nan


def trends(evaluation: Evaluation) -> Values:
    """How alike pairs of columns of samples and of training rows are, as SDMetrics' Column Pair Trends; 1: the same."""
    return {
        metric_key("pair-trends", "mean", len(table.synthetic), table.group): pair_trends(
            table.schema, table.training, table.synthetic
        )
        for table in tables_of(evaluation)
    }


METRIC = Metric(
    "pair-trends",
    trends,
    (Reading("pair-trends/*", "Likeness of pairs of columns", better="higher", counts="rows", fewest=FEW),),
    needs=(TABLE, SILO_RECORDS, SAMPLES),
)
