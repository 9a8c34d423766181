"""How many classes samples reach, to a classifier of real records."""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.evaluation.domain import with_mean
from fedloom.evaluation.evidence import Evaluation
from fedloom.evaluation.metric import FEW, Metric, Reading, Values
from fedloom.evaluation.needs import CLASSES, SAMPLES


def class_coverage(probabilities: Tensor, labels: Tensor, share: float = 0.1) -> float:
    """The share of the classes in ``labels`` that samples reach: with at least ``share`` of their part there."""
    classes, counts = torch.unique(labels, return_counts=True)
    found = (probabilities.argmax(dim=1).cpu().unsqueeze(1) == classes).double().mean(dim=0)
    return float((found >= share * counts / len(labels)).double().mean())


def classes(evaluation: Evaluation) -> Values:
    """How many of its group's classes samples reach, to a classifier of real images."""
    found = {}
    for index, group in enumerate(evaluation.groups):
        labels = evaluation.real.federation.test.of_group(index).y
        if (labels >= 0).any():
            probabilities = evaluation.real.class_classifier.probabilities(evaluation.samples[group])
            found[group] = class_coverage(probabilities, labels[labels >= 0])
    return with_mean("class-coverage", "class-cnn", evaluation.config.samples, found)


METRIC = Metric(
    "classes",
    classes,
    (Reading("class-coverage/*", "Classes that samples reach", better="higher", fewest=FEW),),
    needs=(SAMPLES, CLASSES),
)
