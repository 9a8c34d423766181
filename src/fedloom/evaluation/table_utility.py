"""What synthetic rows are good for: boosted trees learn the schema's target from them and are tested on real rows."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import numpy as np

from fedloom.evaluation.evidence import Evaluation
from fedloom.evaluation.metric import FEW, Metric, Need, Reading, Values
from fedloom.evaluation.needs import SAMPLES, SILO_RECORDS
from fedloom.evaluation.probe import sklearn
from fedloom.evaluation.table_rows import TABLE, tables_of
from fedloom.modalities.schema import Codes, Numbers, Schema
from fedloom.modalities.table import schema_of
from fedloom.runs.metrics import metric_key

MOST_LEVELS = 255  # of a column that trees divide by its levels; one of more is a number to them


@dataclass(frozen=True)
class Learned:
    """What a classifier's answers are worth on the rows that it was tested on."""

    auc: float  # of each level against all others, averaged by how frequent the levels are
    accuracy: float
    worst_level: float  # the lowest accuracy among rows that share a level, of any column of levels


def learned(schema: Schema, rows: Numbers, test: Numbers) -> Learned:
    """Learn the target, by its levels or bins, from some rows, and foretell it of others."""
    number = schema.names.index(schema.target)
    others = [each for each in range(len(schema.columns)) if each != number]
    answers, truth = schema.columns[number].codes(rows[:, number]), schema.columns[number].codes(test[:, number])
    chances = np.zeros((len(test), schema.sizes[number]))
    if len(np.unique(answers)) == 1:  # nothing to learn: the one answer is all there is
        chances[:, answers[0]] = 1.0
    else:
        columns = [schema.columns[each] for each in others]
        unordered = [each.kind == "categorical" and each.size <= MOST_LEVELS for each in columns]
        forest = sklearn("ensemble").HistGradientBoostingClassifier(categorical_features=unordered, random_state=0)
        forest.fit(rows[:, others], answers)
        chances[:, forest.classes_] = forest.predict_proba(test[:, others])
    right = chances.argmax(axis=1) == truth
    return Learned(_auc(chances, truth), float(right.mean()), _worst(schema, schema.codes(test), right, number))


def _auc(chances: Numbers, truth: Codes) -> float:
    metrics, levels = sklearn("metrics"), np.unique(truth)
    if len(levels) < 2:
        return float("nan")
    found = [metrics.roc_auc_score(truth == level, chances[:, level]) for level in levels]
    return float(np.average(found, weights=[float(np.mean(truth == level)) for level in levels]))


def _worst(schema: Schema, codes: Codes, right: np.ndarray[tuple[int], np.dtype[np.bool_]], target: int) -> float:
    found = [float(right.mean())]
    for number, column in enumerate(schema.columns):
        if column.levels and number != target:
            shared = [right[codes[:, number] == level] for level in range(column.size)]
            found += [float(part.mean()) for part in shared if len(part) >= FEW]
    return min(found)


TARGET = Need(
    lambda evaluation: bool(schema_of(evaluation.real.federation.modality.name).target),
    "the schema names no target, a column to foretell",
)
TREES = Need(
    lambda _: importlib.util.find_spec("sklearn") is not None,
    "it needs the package 'scikit-learn'; install it with: pip install 'fedloom[eval]'",
)


def table_utility(evaluation: Evaluation) -> Values:
    """Boosted trees learn the target from samples, or from training rows, and are tested on held-out rows."""
    found = {}
    for table in tables_of(evaluation):
        for name, rows in (("synthetic", table.synthetic), ("real", table.training)):
            scores = learned(table.schema, rows, table.held_out)
            for kind, value in (
                ("auc", scores.auc),
                ("accuracy", scores.accuracy),
                ("worst-level", scores.worst_level),
            ):
                found[metric_key("table-utility", f"{name}-{kind}", len(rows), table.group)] = value
    return found


METRIC = Metric(
    "table-utility",
    table_utility,
    (
        Reading("table-utility/synthetic-*", "Trees learned from samples", better="higher", counts="rows"),
        Reading("table-utility/real-*", "Trees learned from training rows", counts="rows"),
    ),
    needs=(TABLE, TARGET, TREES, SILO_RECORDS, SAMPLES),
)
