"""Measuring a run by every metric that its configuration names."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from fedloom.config import EvaluationConfig
from fedloom.errors import ConfigError
from fedloom.evaluation.evidence import Evaluation, Real
from fedloom.evaluation.metric import METRICS, Metric, Values
from fedloom.federation.records import Federation
from fedloom.methods.generator import Generator
from fedloom.sharing.plan import Tensors
from fedloom.streams import Streams


@dataclass(frozen=True, eq=False)
class Evaluator:
    """Measures a run at any of its rounds; what depends on real records alone is computed once."""

    federation: Federation
    config: EvaluationConfig
    streams: Streams
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        """Find out before a long training, not after it, what could not be measured."""
        sensible = self.federation.modality.metrics
        for metric in self.metrics:
            if sensible and metric.name not in sensible:
                raise ConfigError(
                    f"evaluation.metrics: metric '{metric.name}' makes no sense of {self.federation.modality.plural} "
                    f"(allowed: {', '.join(sensible)})"
                )
        for need in dict.fromkeys(need for metric in self.metrics for need in metric.needs):
            need.check(self.real)

    @cached_property
    def metrics(self) -> tuple[Metric, ...]:
        """Those that the configuration names."""
        return tuple(METRICS.get(name, "evaluation.metrics") for name in self.config.metrics)

    @cached_property
    def real(self) -> Real:
        """Real records and their features, found once for all evaluations of a run."""
        return Real(self.federation, self.config, self.streams, self.device)

    def evaluation(
        self,
        generator: Generator,
        silos: Mapping[str, Tensors] | None = None,
        rounds: Sequence[Mapping[str, Any]] = (),
        egress: Sequence[Mapping[str, Any]] = (),
    ) -> Evaluation:
        """A run at one moment: its generators, what its silos keep of their models, and its logs so far."""
        return Evaluation(self.real, generator, silos or {}, rounds, egress)

    def measure(self, evaluation: Evaluation) -> Iterator[tuple[str, Values, float]]:
        """Each configured metric with its values and how many seconds they took, as soon as it is known."""
        for metric in self.metrics:
            start = time.perf_counter()
            values = metric.measure(evaluation)
            yield metric.name, values, time.perf_counter() - start

    def evaluate(
        self,
        generator: Generator,
        silos: Mapping[str, Tensors] | None = None,
        rounds: Sequence[Mapping[str, Any]] = (),
        egress: Sequence[Mapping[str, Any]] = (),
    ) -> Values:
        """Every configured metric by its full key."""
        return self.values(self.evaluation(generator, silos, rounds, egress))

    def values(self, evaluation: Evaluation) -> Values:
        """Every configured metric of a run at one moment."""
        return {key: value for _, values, _ in self.measure(evaluation) for key, value in values.items()}
