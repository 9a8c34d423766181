"""What labelled samples are good for: a small network learns from them and names held-out records' classes."""

from __future__ import annotations

import torch

from fedloom.evaluation.classification import confusion, score
from fedloom.evaluation.domain import DomainClassifier
from fedloom.evaluation.evidence import Evaluation
from fedloom.evaluation.metric import FEW, Metric, Reading, Values
from fedloom.evaluation.needs import EVERY_LABEL, SAMPLES, TOLD_CLASSES
from fedloom.federation.records import Records, concatenate
from fedloom.runs.metrics import metric_key
from fedloom.streams import Streams

# The network begins alike in all runs, whatever their seed: differences are those of what it learned from.
_NETWORK = Streams(0)
SYNTHETIC, REAL = "synthetic", "real"


def downstream(evaluation: Evaluation) -> Values:
    """A small network learns from samples, another from as many training records; both name held-out records."""
    test, count = evaluation.real.federation.test, evaluation.config.samples * len(evaluation.groups)
    samples = torch.cat(list(evaluation.samples.values())).cpu()
    labels = torch.cat(list(evaluation.labels.values()))
    learned = _learned(evaluation, Records(samples, labels, labels, kind=test.kind))
    found = _values(evaluation, SYNTHETIC, learned, count)
    training = _training(evaluation)
    if training is None:
        return found
    learned = _learned(evaluation, training)
    obeyed = (learned.probabilities(samples).argmax(dim=1).cpu() == labels).double().mean().item()
    return (
        found | _values(evaluation, REAL, learned, len(training)) | {metric_key("obeyed", "class-cnn", count): obeyed}
    )


def _learned(evaluation: Evaluation, records: Records) -> DomainClassifier:
    """A network that tells the classes of some records apart."""
    classes = len(evaluation.real.federation.classes)
    tables = Records(records.x, records.y, records.y, kind=records.kind)
    return DomainClassifier.fit(tables, classes, _NETWORK).to(evaluation.real.device)


def _training(evaluation: Evaluation) -> Records | None:
    """As many labelled training records of each group as there are samples; None where they stay with silos."""
    if evaluation.real.federation.is_remote:
        return None
    tables = []
    for group in evaluation.groups:
        table = evaluation.real.training[group]
        known = torch.nonzero(table.y >= 0).flatten()
        chosen = _NETWORK.permutation("downstream", len(known))[: evaluation.config.samples]
        tables.append(table.take(known[chosen]))
    return concatenate(tables)


def _values(evaluation: Evaluation, source: str, learned: DomainClassifier, count: int) -> Values:
    test, classes = evaluation.real.federation.test, len(evaluation.real.federation.classes)
    predicted = learned.probabilities(test.values).argmax(dim=1).cpu()
    found = score(confusion(test.y.cpu(), predicted, classes, classes), torch.arange(classes))
    return {
        metric_key("downstream", f"{source}-accuracy", count): found.accuracy,
        metric_key("downstream", f"{source}-worst-class", count): found.worst_group,
    }


METRIC = Metric(
    "downstream",
    downstream,
    (
        Reading("downstream/synthetic-*", "A network that learned from samples", better="higher", fewest=FEW),
        Reading("downstream/real-*", "A network that learned from as many training records", counts="records"),
        Reading("obeyed/*", "Samples of the class that was asked for", better="higher", fewest=FEW),
    ),
    needs=(SAMPLES, TOLD_CLASSES, EVERY_LABEL),
)
