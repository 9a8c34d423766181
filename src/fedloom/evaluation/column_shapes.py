"""How alike single columns are, as SDMetrics has it: its ``Column Shapes``."""

from __future__ import annotations

import numpy as np

from fedloom.evaluation.evidence import Evaluation
from fedloom.evaluation.metric import FEW, Metric, Reading, Values
from fedloom.evaluation.needs import SAMPLES, SILO_RECORDS
from fedloom.evaluation.table_rows import TABLE, tables_of
from fedloom.modalities.schema import Numbers, Schema
from fedloom.runs.metrics import metric_key


def column_shapes(schema: Schema, real: Numbers, synthetic: Numbers) -> float:
    """The mean over columns of 1 minus a distance: of levels the total variation, of numbers Kolmogorov and Smirnov's.

    Where a table has no value it does not count; a column without any is left out.
    """
    found = []
    for number, column in enumerate(schema.columns):
        one, two = (rows[~np.isnan(rows[:, number]), number] for rows in (real, synthetic))
        if len(one) and len(two):
            found.append(1 - (_variation(one, two) if column.levels else _kolmogorov_smirnov(one, two)))
    return float(np.mean(found)) if found else np.nan


def _variation(one: Numbers, two: Numbers) -> float:
    values = np.union1d(one, two)
    shares = [np.bincount(np.searchsorted(values, each), minlength=len(values)) / len(each) for each in (one, two)]
    return float(np.abs(shares[0] - shares[1]).sum() / 2)


def _kolmogorov_smirnov(one: Numbers, two: Numbers) -> float:
    """The largest difference of the shares of values up to any number."""
    values = np.union1d(one, two)
    shares = [np.searchsorted(np.sort(each), values, side="right") / len(each) for each in (one, two)]
    return float(np.abs(shares[0] - shares[1]).max())


def shapes(evaluation: Evaluation) -> Values:
    """How alike single columns of samples and of training rows are, as SDMetrics' Column Shapes; 1: the same."""
    return {
        metric_key("column-shapes", "mean", len(table.synthetic), table.group): column_shapes(
            table.schema, table.training, table.synthetic
        )
        for table in tables_of(evaluation)
    }


METRIC = Metric(
    "column-shapes",
    shapes,
    (Reading("column-shapes/*", "Likeness of columns", better="higher", counts="rows", fewest=FEW),),
    needs=(TABLE, SILO_RECORDS, SAMPLES),
)
