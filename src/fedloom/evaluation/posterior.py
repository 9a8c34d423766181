"""What the latents of a conditional VAE say of a record."""

from __future__ import annotations

from statistics import mean

import torch
from torch import Tensor

from fedloom.evaluation.evidence import Evaluation
from fedloom.evaluation.metric import Metric, Reading, Values
from fedloom.models.gaussian import DiagonalGaussian
from fedloom.models.labelled import ConditionalVAE
from fedloom.runs.metrics import metric_key


@torch.no_grad()
def posterior(evaluation: Evaluation) -> Values:
    """KL(q(z|x,y) || p(z|y)) in nats on held-out records: near 0 the latents say nothing of a record."""
    found, test = {}, evaluation.real.federation.test
    for silo in evaluation.participants:
        model = evaluation.silo_model(silo)
        if isinstance(model, ConditionalVAE) and not bool((test.y < 0).any()):
            x, y = test.values.to(evaluation.real.device), test.y.to(evaluation.real.device)
            nats = divergence(model.encode(x, y), model.prior(y))
            found[metric_key("kl", "nats", len(test), silo=silo.name)] = nats.mean().item()
    if not found:
        return evaluation.skip("posterior", "it needs a conditional VAE whose encoder is known")
    return {metric_key("kl", "nats", len(test)): mean(found.values())} | found


def divergence(one: DiagonalGaussian, other: DiagonalGaussian) -> Tensor:
    """KL(one || other) in nats, summed over latents."""
    gap = one.log_variance - other.log_variance
    distance = (one.mean - other.mean).square() * torch.exp(-other.log_variance)
    return 0.5 * (gap.exp() + distance - 1 - gap).to(torch.float64).sum(dim=1)


METRIC = Metric(
    "posterior", posterior, (Reading("kl/nats", "KL of the posterior to the prior in nats", counts="records"),)
)
