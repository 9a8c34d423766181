"""The inception score (Salimans et al., 2016) of any classifier's logits; the key names the classifier."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.errors import DataError
from fedloom.evaluation.evidence import Evaluation
from fedloom.evaluation.metric import FEW, Metric, Reading, Values
from fedloom.evaluation.needs import CLASS_SCORES, FEATURES, SAMPLES
from fedloom.runs.metrics import metric_key

SPLITS = 10


@dataclass(frozen=True)
class InceptionScore:
    """Mean and standard deviation over splits."""

    mean: float
    deviation: float


def inception_score(logits: Tensor, splits: int = 10) -> InceptionScore:
    """exp of the mean KL(p(y|x) || p(y)), per split in the given order: from 1 to the number of classes."""
    if not 1 <= splits <= len(logits):
        raise DataError(f"splits = {splits} must be at least 1 and at most the {len(logits)} samples")
    scores = []
    for part in torch.tensor_split(logits.to(torch.float64), splits):
        log_conditional = part.log_softmax(dim=1)
        conditional = log_conditional.exp()
        # logsumexp keeps the marginal of a class that nobody predicts finite.
        log_marginal = log_conditional.logsumexp(dim=0) - math.log(len(part))
        scores.append((conditional * (log_conditional - log_marginal)).sum(dim=1).mean().exp())
    values = torch.stack(scores)
    return InceptionScore(values.mean().item(), values.std(correction=0).item())


def backbone_score(evaluation: Evaluation) -> Values:
    """The inception score of the backbone's own classes, mean over ten parts in random order."""
    found = {}
    for group, features in evaluation.features.items():
        order = evaluation.streams.permutation("inception-score", len(features)).to(features.device)
        logits = evaluation.real.extractor.backbone.classify(features[order])
        score = inception_score(logits, splits=min(SPLITS, len(logits)))
        found[metric_key("inception-score", evaluation.backbone, len(logits), group)] = score.mean
    return found


METRIC = Metric(
    "inception-score",
    backbone_score,
    (Reading("inception-score/*", "Inception score", better="higher", fewest=FEW, of_records=False),),
    needs=(SAMPLES, FEATURES, CLASS_SCORES),
)
