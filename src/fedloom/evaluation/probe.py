"""How much a representation knows of the classes: a logistic-regression probe."""

from __future__ import annotations

import importlib
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.errors import DataError, MissingExtraError
from fedloom.evaluation.evidence import Evaluation
from fedloom.evaluation.metric import Metric, Reading, Values
from fedloom.evaluation.needs import AUTOENCODER, SILO_RECORDS
from fedloom.federation.outliers import is_outlier
from fedloom.federation.records import UNLABELLED
from fedloom.runs.metrics import metric_key
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


def representation(evaluation: Evaluation) -> Values:
    """A logistic probe on the encoder's means: learned from training records, tested on all held-out ones."""
    test, tables = evaluation.real.federation.test, []
    found: Values = {}
    for vae in evaluation.autoencoders:
        groups = torch.unique(vae.held_out.group)
        whole = test.take(torch.nonzero(torch.isin(test.group, groups)).flatten())
        labels = vae.training.y.masked_fill(is_outlier(evaluation.real.federation, vae.training), UNLABELLED)
        tables.append((vae.codes(vae.training), labels, vae.codes(whole), whole.y))
        found |= _probe_values(*tables[-1], vae.group, vae.silo)
    if evaluation.autoencoders[0].group:
        train, train_labels, codes, labels = (torch.cat(column) for column in zip(*tables, strict=True))
        if everybody := _probe_values(train, train_labels, codes, labels):
            found |= everybody | _paper_probe_values(evaluation, codes, labels)
    return found or evaluation.skip("probe", "it needs records of at least two classes")


def _probe_values(
    train: Tensor,
    train_labels: Tensor,
    test: Tensor,
    labels: Tensor,
    group: str | None = None,
    silo: str | None = None,
) -> Values:
    """All scores of a probe; none where there are no two classes to tell apart."""
    known, tested = train_labels >= 0, labels >= 0
    if len(torch.unique(train_labels[known])) < 2 or not tested.any():
        return {}
    scores = probe(train[known], train_labels[known], test[tested], labels[tested])
    return _score_values("", scores, int(tested.sum()), group, silo)


def _paper_probe_values(evaluation: Evaluation, codes: Tensor, labels: Tensor) -> Values:
    tested = labels >= 0
    try:
        scores = paper_probe(codes[tested], labels[tested], evaluation.streams)
    except DataError as error:
        return evaluation.skip("probe/paper", str(error))
    fifth = int(tested.sum()) - 4 * int(tested.sum()) // 5
    return _score_values("paper-", scores, -(-fifth // 5), None, None)


def _score_values(prefix: str, scores: ProbeScores, count: int, group: str | None, silo: str | None) -> Values:
    return {
        metric_key("probe", prefix + name.replace("_", "-"), count, group, silo): value
        for name, value in asdict(scores).items()
    }


METRIC = Metric(
    "probe",
    representation,
    (
        Reading("probe/*", "Linear probe", better="higher", counts="records"),
        Reading("probe/paper-*", "Linear probe by ALIGN-FL's protocol", better="higher", counts="records"),
    ),
    needs=(SILO_RECORDS, AUTOENCODER),
)
