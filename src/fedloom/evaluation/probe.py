"""How much a representation knows of the classes: a logistic-regression probe."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.errors import DataError, MissingExtraError
from fedloom.streams import Streams


@dataclass(frozen=True)
class ProbeScores:
    """What a probe's predictions are worth on its test records."""

    accuracy: float
    macro_f1: float
    weighted_f1: float
    balanced_accuracy: float


def probe(train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor) -> ProbeScores:
    """Fit on training features, score on test features."""
    metrics = sklearn("metrics")
    truth = test_labels.cpu().numpy()
    predicted = predict(train, train_labels, test)
    f1 = {
        average: metrics.f1_score(truth, predicted, average=average, zero_division=0)
        for average in ("macro", "weighted")
    }
    return ProbeScores(
        accuracy=float(metrics.accuracy_score(truth, predicted)),
        macro_f1=float(f1["macro"]),
        weighted_f1=float(f1["weighted"]),
        balanced_accuracy=float(metrics.recall_score(truth, predicted, average="macro", labels=np.unique(truth))),
    )


def paper_probe(features: Tensor, labels: Tensor, streams: Streams) -> ProbeScores:
    """The protocol of ALIGN-FL (Gulati et al., 2025), for comparison with its tables only.

    A random fifth of the TEST set, split 80/20 by class: the probe learns from test images and, of 10,000, is
    scored on 400, so one number is uncertain by four to five points.
    """
    fifth = paper_fifth(len(features), streams).to(features.device)
    chosen, truth = features[fifth], labels[fifth]
    rows = np.arange(len(fifth))
    try:
        train, test = sklearn("model_selection").train_test_split(
            rows, test_size=0.2, random_state=42, stratify=truth.cpu().numpy()
        )
    except ValueError as error:
        raise DataError(
            f"probe/paper needs at least two records of every class in a fifth of the test set: {error}"
        ) from error
    return probe(chosen[train], truth[train], chosen[test], truth[test])


def paper_fifth(count: int, streams: Streams) -> Tensor:
    """The random fifth of a test set to which ALIGN-FL's protocol is confined."""
    return streams.permutation("probe/paper", count)[4 * count // 5 :]


def predict(train: Tensor, train_labels: Tensor, test: Tensor) -> NDArray[Any]:
    """Classes that a multinomial logistic regression (L2, C = 1) predicts for the test features."""
    classes = torch.unique(train_labels)
    if len(classes) < 2:
        raise DataError(f"a classifier needs at least two classes to learn from, not {len(classes)}")
    model = sklearn("linear_model").LogisticRegression(max_iter=1000)
    model.fit(_rows(train), train_labels.cpu().numpy())
    return np.asarray(model.predict(_rows(test)))


def _rows(features: Tensor) -> NDArray[np.float64]:
    return features.flatten(1).to("cpu", torch.float64).numpy()


def sklearn(module: str) -> Any:
    """A module of scikit-learn, which only evaluation needs."""
    try:
        return importlib.import_module(f"sklearn.{module}")
    except ImportError as error:
        raise MissingExtraError(
            "this metric needs the package 'scikit-learn'; install it with: pip install 'fedloom[eval]'"
        ) from error
