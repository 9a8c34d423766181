"""The metrics of a run: named, computed from generators and the federation's held-out records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from fedloom.config import EvaluationConfig
from fedloom.errors import ConfigError, unknown
from fedloom.evaluation.domain import DomainClassifier, blend_rate, domain_hit_rate
from fedloom.evaluation.keys import metric_key
from fedloom.evaluation.spread import spread
from fedloom.federation.records import Federation, as_float
from fedloom.methods.generator import Generator
from fedloom.streams import Streams


@dataclass(frozen=True)
class Evaluator:
    """Measures generators of one run; what depends on real records alone is computed once."""

    federation: Federation
    config: EvaluationConfig
    streams: Streams

    def __post_init__(self) -> None:
        for name in self.config.metrics:
            if name not in METRICS:
                raise ConfigError("evaluation.metrics: " + unknown("metric", name, METRICS))

    @cached_property
    def domain_classifier(self) -> DomainClassifier:
        """Trained on the held-out records."""
        return DomainClassifier.fit(self.federation.test, len(self.federation.groups), self.streams)

    def evaluate(self, generator: Generator) -> dict[str, float]:
        """Every configured metric by its full key."""
        found: dict[str, float] = {}
        for name in self.config.metrics:
            found.update(METRICS[name](self, generator))
        return found


def domain(evaluator: Evaluator, generator: Generator) -> dict[str, float]:
    """How often samples of a group look like that group, and how often like a blend, to a classifier of real images."""
    count, found = evaluator.config.samples, {}
    for index, group in enumerate(evaluator.federation.groups):
        images = generator.sample(count, group=group, seed=evaluator.streams.seed)
        probabilities = evaluator.domain_classifier.probabilities(images)
        found[metric_key("domain-hit", "domain-cnn", count, group=group)] = domain_hit_rate(probabilities, index)
        found[metric_key("blend", "domain-cnn", count, group=group)] = blend_rate(probabilities)
    return found


def pixel_spread(evaluator: Evaluator, generator: Generator) -> dict[str, float]:
    """How much a group's samples differ from each other, as a share of how much its held-out images do."""
    count, found = evaluator.config.samples, {}
    for index, group in enumerate(evaluator.federation.groups):
        images = generator.sample(count, group=group, seed=evaluator.streams.seed)
        real = as_float(evaluator.federation.test.of_group(index).x)
        found[metric_key("spread", "pixels", count, group=group)] = spread(images, real)
    return found


METRICS: dict[str, Callable[[Evaluator, Generator], dict[str, float]]] = {"domain": domain, "spread": pixel_spread}
