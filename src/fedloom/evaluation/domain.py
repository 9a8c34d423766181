"""The ``domain-cnn``: a small classifier of the federation's own groups, and the rates read from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedloom.errors import DataError
from fedloom.evaluation.metric import FEW, Metric, Reading, Values
from fedloom.evaluation.needs import SAMPLES, SEVERAL_GROUPS
from fedloom.federation.records import Records
from fedloom.runs.metrics import metric_key
from fedloom.streams import Streams

if TYPE_CHECKING:
    from fedloom.evaluation.evidence import Evaluation


@dataclass(frozen=True)
class DomainClassifier:
    """Tells the groups of real records apart; a blend of two groups gets blended probabilities."""

    network: nn.Module
    device: torch.device

    @classmethod
    def fit(
        cls,
        records: Records,
        groups: int,
        streams: Streams,
        *,
        limit: int = 4000,
        steps: int = 300,
        batch_size: int = 128,
        learning_rate: float = 1e-2,
    ) -> DomainClassifier:
        """Train on at most ``limit`` records, the groups in equal parts; global random state stays."""
        if len(records) == 0:
            raise DataError("the domain classifier needs at least one record")
        table = records.take(_balanced(records.group, groups, limit, streams))
        x, target = table.values, functional.one_hot(table.group, groups).to(torch.float32)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(streams.torch_seed("domain-classifier/init"))
            network = (_of_pictures if table.modality.is_picture else _of_numbers)(x, groups)
        network.to(x.device)
        optimizer = torch.optim.Adam(network.parameters(), lr=learning_rate)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=learning_rate, total_steps=steps)
        batch_size = min(batch_size, len(x))
        batches = math.ceil(len(x) / batch_size)
        for step in range(steps):
            epoch, batch = divmod(step, batches)
            rows = slice(batch * batch_size, (batch + 1) * batch_size)
            order = streams.permutation("domain-classifier/order", len(x), step=epoch)[rows].to(x.device)
            partner = streams.permutation("domain-classifier/partner", len(x), step=epoch)[rows].to(x.device)
            share = _shares(streams.uniform("domain-classifier/share", len(order), step=step)).to(x.device)
            mixed = torch.lerp(x[partner], x[order], share.view(-1, *[1] * (x.dim() - 1)))
            label = torch.lerp(target[partner], target[order], share.view(-1, 1))
            loss = functional.cross_entropy(network(mixed), label)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            schedule.step()
        return cls(network.eval().requires_grad_(False), x.device)

    def to(self, device: torch.device) -> DomainClassifier:
        """Move the classifier to a device; it is fitted on the CPU, so that devices share one yardstick."""
        return DomainClassifier(self.network.to(device), device)

    @torch.inference_mode()
    def probabilities(self, x: Tensor, batch_size: int = 1024) -> Tensor:
        """The probability of every group for values as models generate them: (n, *shape) to (n, groups)."""
        parts = [self.network(part.to(self.device)).softmax(dim=1) for part in torch.split(x, batch_size)]
        return torch.cat(parts)


def domain_hit_rate(probabilities: Tensor, group: int) -> float:
    """The share of samples that the classifier places in ``group``."""
    return (probabilities.argmax(dim=1) == group).double().mean().item()


def blend_rate(probabilities: Tensor, threshold: float = 0.9) -> float:
    """The share of samples whose likeliest group has a probability below ``threshold``."""
    return (probabilities.amax(dim=1) < threshold).double().mean().item()


def _balanced(group: Tensor, groups: int, limit: int, streams: Streams) -> Tensor:
    """At most ``limit // groups`` random rows of every group."""
    chosen = []
    for number in range(groups):
        rows = torch.nonzero(group == number).flatten()
        order = streams.permutation("domain-classifier/rows", len(rows), silo=number).to(rows.device)
        chosen.append(rows[order[: max(1, limit // groups)]])
    return torch.cat(chosen)


def _shares(uniform: Tensor) -> Tensor:
    """Mixing shares: half the batch stays pure, the other half is mixed with a share between 1/4 and 3/4.

    A classifier that never saw a blend is sure of every image; one that learned from convex mixes with soft
    labels says how much of each group is in it.
    """
    return torch.where(uniform < 0.5, 0.25 + uniform, 1.0).to(torch.float32)


class _Standardise(nn.Module):
    """Centre and scale by the training data: per channel of an image, per feature of a vector."""

    mean: Tensor
    scale: Tensor

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        over = [axis for axis in range(x.dim()) if axis != 1]
        self.register_buffer("mean", x.mean(dim=over, keepdim=True))
        self.register_buffer("scale", x.std(dim=over, keepdim=True, correction=0).clamp_min(1e-3))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.scale


def _of_numbers(x: Tensor, groups: int) -> nn.Module:
    """A classifier of vectors, with one hidden layer."""
    width = math.prod(x.shape[1:])
    hidden = nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, groups))
    return nn.Sequential(nn.Flatten(), _Standardise(x.flatten(1)), hidden)


def _of_pictures(x: Tensor, groups: int) -> nn.Module:
    """Two strided convolutions, on images that are pooled to 32x32 at most."""
    channels, height, width = x.shape[1:]
    return nn.Sequential(
        _Standardise(x),
        nn.AdaptiveAvgPool2d((min(height, 32), min(width, 32))),
        nn.Conv2d(channels, 16, kernel_size=3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d((4, 4)),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, groups),
    )


def domain(evaluation: Evaluation) -> Values:
    """How often samples of a group look like that group, and how often like a blend, to a classifier of real images."""
    found: Values = {}
    for pathway in evaluation.generator.pathways:
        first = pathway == next(iter(evaluation.generator.method.pathways))
        variant, hits, blends = "domain-cnn" if first else f"domain-cnn-{pathway}", {}, {}
        for index, group in enumerate(evaluation.groups):
            images = evaluation.samples[group] if first else evaluation.sample(group, pathway)
            probabilities = evaluation.real.domain_classifier.probabilities(images)
            hits[group] = domain_hit_rate(probabilities, index)
            blends[group] = blend_rate(probabilities)
        found |= with_mean("domain-hit", variant, evaluation.config.samples, hits)
        found |= with_mean("blend", variant, evaluation.config.samples, blends)
    return found


def with_mean(metric: str, variant: str, count: int, values: Mapping[str, float]) -> Values:
    """Each group's value, and over all, where each has the same number of samples, their mean."""
    found = {metric_key(metric, variant, count * len(values)): mean(values.values())}
    return found | {metric_key(metric, variant, count, group): value for group, value in values.items()}


METRIC = Metric(
    "domain",
    domain,
    (
        Reading("domain-hit/*", "Samples in their own group", better="higher", fewest=FEW),
        Reading("blend/*", "Samples that look blended", better="lower", fewest=FEW),
    ),
    needs=(SAMPLES, SEVERAL_GROUPS),
)
