"""The classifiers of a post stage: of each silo's own records, of synthetic ones, of all records pooled."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedloom.errors import ConfigError
from fedloom.evaluation.classification import Head, fit_head
from fedloom.federation.records import Federation, Silo, concatenate
from fedloom.methods.generator import Generator
from fedloom.models.labelled import LinearHead
from fedloom.outline import in_outline

SYNTHETIC, FEDERATED = "synthetic-only", "federated"


@dataclass(frozen=True, eq=False)
class Common:
    """What a silo gets from the federation: a classifier, and which label shares it has learned from, if known."""

    __repr__ = in_outline

    head: Head
    shares: Tensor | None
    x: Tensor | None = None  # the synthetic records that it learned from
    y: Tensor | None = None

    def at(self, prior: Tensor, x: Tensor) -> Tensor:
        """Probabilities where labels are as frequent as ``prior`` says, by Bayes' rule."""
        found = self.head.probabilities(x)
        if self.shares is None:
            return found
        found = found * (prior / self.shares)
        return found / found.sum(dim=1, keepdim=True)


@dataclass(frozen=True, eq=False)
class Heads:
    """Trains what is asked for, each once."""

    federation: Federation
    generator: Generator
    synthetic: int
    pathway: str
    seed: int
    local_labels: bool  # synthetic labels as at each silo, which only the silo may know

    @property
    def kind(self) -> str:
        """Where the common classifier comes from."""
        return SYNTHETIC if self.generator.method.pathways else FEDERATED

    @cached_property
    def local(self) -> list[Head]:
        """Of each silo, from its own training records."""
        return [self._fit(silo.train.x, silo.train.y) for silo in self.federation.silos]

    @cached_property
    def centralised(self) -> Head:
        """Of all training records pooled: an upper bound that only a simulation knows."""
        pooled = concatenate([silo.train for silo in self.federation.silos])
        return self._fit(pooled.x, pooled.y)

    @cached_property
    def common(self) -> list[Common]:
        """Of each silo; one and the same for all unless it depends on the silo's labels."""
        silos = self.federation.silos
        if self.kind == FEDERATED:
            return [self._federated(silo) for silo in silos]
        if self.local_labels:
            own = (label_shares(silo.train.y, len(self.federation.classes)) for silo in silos)
            return [self._synthetic(self.generator.tempered(shares)) for shares in own]
        return [self._synthetic(None)] * len(silos)

    def _synthetic(self, shares: Tensor | None) -> Common:
        """Samples of every group, to convergence; of classes by these shares, or by those of each group."""
        groups, parts, labels = self.generator.groups, [], []
        for number, group in enumerate(groups):
            count = self.synthetic // len(groups) + (number < self.synthetic % len(groups))
            of_group = self.generator.label_shares_of(group) if shares is None else shares
            wanted = self.generator.labels(count, seed=self.seed, shares=of_group)
            way, seed = self.pathway, self.seed
            parts.append(self.generator.sample(count, group=group, seed=seed, pathway=way, labels=wanted))
            labels.append(wanted)
        x, y = torch.cat(parts), torch.cat(labels)
        if not torch.isfinite(x).all():
            raise ConfigError("the generator gives values that are not finite, so no classifier can learn from them")
        return Common(self._fit(x, y), self.generator.label_shares if shares is None else shares, x, y)

    def _federated(self, silo: Silo) -> Common:
        model = self.generator.model(self.generator.groups[silo.groups[0]])
        if not isinstance(model, LinearHead):
            raise ConfigError(f"method '{self.generator.method.name}' neither generates records nor classifies them")
        head = model.head
        return Common(Head(head.weight.detach().double(), head.bias.detach().double()), None)

    def _fit(self, x: Tensor, y: Tensor) -> Head:
        return fit_head(self.federation.modality.decode(x).flatten(1), y, len(self.federation.classes))


def label_shares(labels: Tensor, classes: int, smoothing: float = 0.0) -> Tensor:
    """How frequent each class is; ``smoothing`` imagines so many more records of each."""
    counts = torch.bincount(labels, minlength=classes).double() + smoothing
    return counts / counts.sum()
