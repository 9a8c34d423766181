"""The inception score (Salimans et al., 2016) of any classifier's logits; the key names the classifier."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.errors import DataError


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
