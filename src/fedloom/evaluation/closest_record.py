"""Does a generator of tables copy? Synthetic and held-out rows, each against the closest training row."""

from __future__ import annotations

import numpy as np

from fedloom.evaluation.evidence import Evaluation
from fedloom.evaluation.metric import Metric, Reading, Values
from fedloom.evaluation.needs import SAMPLES, SILO_RECORDS
from fedloom.evaluation.table_rows import TABLE, tables_of
from fedloom.modalities.schema import Numbers, Schema
from fedloom.runs.metrics import metric_key

AT_ONCE = 2**22  # pairs of rows


def closest(schema: Schema, rows: Numbers, others: Numbers) -> Numbers:
    """Of each row the distance to the closest of the others: the mean over columns of how far the values are apart.

    Two levels are 0 or 1 apart, two numbers their difference as a share of the column's bounds, and a value and none 1.
    """
    found, each = [], max(1, AT_ONCE // max(len(others), 1))
    for start in range(0, len(rows), each):
        part = rows[start : start + each]
        total = np.zeros((len(part), len(others)))
        for number, column in enumerate(schema.columns):
            a, b = part[:, number, None], others[None, :, number]
            span = 1.0 if column.levels else max(column.edges[-1] - column.edges[0], 1e-300)
            apart = (a != b).astype(np.float64) if column.levels else np.abs(a - b) / span
            missing = np.isnan(a) | np.isnan(b)
            total += np.where(missing, (np.isnan(a) != np.isnan(b)).astype(np.float64), apart)
        found.append(total.min(axis=1) / len(schema.columns))
    return np.concatenate(found)


def closest_record(evaluation: Evaluation) -> Values:
    """How near rows lie to their closest training row: of samples, beside that of rows which were held out."""
    found = {}
    for table in tables_of(evaluation):
        samples = table.synthetic[: len(table.held_out)]
        for name, rows in (("samples", samples), ("held-out", table.held_out)):
            distances = closest(table.schema, rows, table.training)
            found[metric_key("closest-record", f"{name}-median", len(rows), table.group)] = float(np.median(distances))
            found[metric_key("closest-record", f"{name}-same", len(rows), table.group)] = float(np.mean(distances == 0))
    return found


METRIC = Metric(
    "closest-record",
    closest_record,
    (
        Reading("closest-record/*-median", "Distance to the closest training row", counts="rows"),
        Reading("closest-record/*-same", "Rows that are a training row", counts="rows"),
    ),
    needs=(TABLE, SILO_RECORDS, SAMPLES),
)
