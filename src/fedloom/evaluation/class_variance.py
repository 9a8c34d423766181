"""How much the samples of a class differ from each other, beside its held-out records."""

from __future__ import annotations

from statistics import mean

import torch
from torch import Tensor

from fedloom.evaluation.evidence import Evaluation
from fedloom.evaluation.metric import Metric, Reading, Values
from fedloom.evaluation.needs import SAMPLES, TOLD_CLASSES
from fedloom.runs.metrics import metric_key


def class_variance(evaluation: Evaluation) -> Values:
    """The variance of a class's samples over that of its held-out records: mean, least and most over classes."""
    found = {}
    for index, group in enumerate(evaluation.groups):
        test, fake = evaluation.real.federation.test.of_group(index), evaluation.samples[group].flatten(1).cpu()
        ratios = []
        for label in range(len(evaluation.real.federation.classes)):
            real, made = test.values[test.y == label].flatten(1), fake[evaluation.labels[group] == label]
            if len(real) > 1 and len(made) > 1 and (spread := _variance(real)) > 0:
                ratios.append(_variance(made) / spread)
        for name, of in (("mean", mean), ("least", min), ("most", max)):
            if ratios:
                found[metric_key("class-variance", name, len(fake), group)] = of(ratios)
    return found


def _variance(rows: Tensor) -> float:
    """The variance about the mean, summed over dimensions."""
    return rows.to(torch.float64).var(dim=0).sum().item()


METRIC = Metric(
    "class-variance",
    class_variance,
    (Reading("class-variance/*", "Variance within a class"),),
    needs=(SAMPLES, TOLD_CLASSES),
)
