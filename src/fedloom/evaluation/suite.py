"""The metrics by name: each a function of an :class:`Evaluation` that gives values under their full keys."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from fedloom.config import EvaluationConfig
from fedloom.errors import ConfigError, DataError, unknown
from fedloom.evaluation.cost import parameters, silo_cost
from fedloom.evaluation.domain import blend_rate, class_coverage, domain_hit_rate
from fedloom.evaluation.evidence import Autoencoder, Evaluation, Real
from fedloom.evaluation.frechet import Moments, frechet_distance
from fedloom.evaluation.gradients import gradient_norms
from fedloom.evaluation.inception_score import inception_score
from fedloom.evaluation.kernel import kernel_distance
from fedloom.evaluation.keys import metric_key
from fedloom.evaluation.labelled import class_variance, posterior, sliced_distance, synthetic_utility
from fedloom.evaluation.likelihood import Likelihoods, bits_per_dimension, likelihoods, paper_reconstruction
from fedloom.evaluation.manifold import manifold_scores
from fedloom.evaluation.probe import ProbeScores, paper_fifth, paper_probe, probe
from fedloom.evaluation.secret_priors import ATTEMPTS, HANDFUL, attack_prior
from fedloom.evaluation.spread import spread
from fedloom.evaluation.steepness import lipschitz
from fedloom.federation.outliers import is_outlier
from fedloom.federation.records import UNLABELLED, Federation
from fedloom.federation.rounds import Site
from fedloom.methods.generator import Generator
from fedloom.sharing.plan import Tensors
from fedloom.streams import Streams

Values = dict[str, float]

NEIGHBOURS = 5
SPLITS = 10
NO_ENCODER = "it needs an encoder and a decoder, and neither the server nor a silo of this run holds both"


def domain(evaluation: Evaluation) -> Values:
    """How often samples of a group look like that group, and how often like a blend, to a classifier of real images."""
    found: Values = {}
    if len(evaluation.groups) == 1:
        return evaluation.skip("domain", "there is one group only, so there are no others to tell it from")
    for pathway in evaluation.generator.pathways:
        first = pathway == next(iter(evaluation.generator.method.pathways))
        variant, hits, blends = "domain-cnn" if first else f"domain-cnn-{pathway}", {}, {}
        for index, group in enumerate(evaluation.groups):
            images = evaluation.samples[group] if first else evaluation.sample(group, pathway)
            probabilities = evaluation.real.domain_classifier.probabilities(images)
            hits[group] = domain_hit_rate(probabilities, index)
            blends[group] = blend_rate(probabilities)
        found |= _with_mean("domain-hit", variant, evaluation.config.samples, hits)
        found |= _with_mean("blend", variant, evaluation.config.samples, blends)
    return found


def classes(evaluation: Evaluation) -> Values:
    """How many of its group's classes samples reach, to a classifier of real images."""
    found, classifier = {}, evaluation.real.class_classifier
    if classifier is None:
        return evaluation.skip("classes", "no held-out record has a class")
    for index, group in enumerate(evaluation.groups):
        labels = evaluation.real.federation.test.of_group(index).y
        if (labels >= 0).any():
            probabilities = classifier.probabilities(evaluation.samples[group])
            found[group] = class_coverage(probabilities, labels[labels >= 0])
    return _with_mean("class-coverage", "class-cnn", evaluation.config.samples, found)


def _with_mean(metric: str, variant: str, count: int, values: Mapping[str, float]) -> Values:
    """Each group's value, and over all, where each has the same number of samples, their mean."""
    found = {metric_key(metric, variant, count * len(values)): mean(values.values())}
    return found | {metric_key(metric, variant, count, group): value for group, value in values.items()}


def pixel_spread(evaluation: Evaluation) -> Values:
    """How much a group's samples differ from each other, as a share of how much its held-out images do."""
    count, found = evaluation.config.samples, {}
    for index, group in enumerate(evaluation.groups):
        real = evaluation.real.federation.test.of_group(index).to(evaluation.real.device).values
        found[metric_key("spread", "pixels", count, group)] = spread(evaluation.samples[group], real)
    return found


def frechet(evaluation: Evaluation) -> Values:
    """The Frechet distance of samples, and of reconstructions where there is an encoder, to held-out records."""
    real, name = evaluation.real, evaluation.backbone
    found = {
        metric_key("frechet", name, len(features), group): frechet_distance(real.moments[group], Moments.of(features))
        for group, features in evaluation.features.items()
    }
    rebuilt = [real.extractor.features(vae.reconstructions) for vae in evaluation.autoencoders]
    for vae, features in zip(evaluation.autoencoders, rebuilt, strict=True):
        reference = real.moments[vae.group] if vae.group else Moments.of(_held_out_features(evaluation, vae))
        key = metric_key("frechet-reconstruction", name, len(features), vae.group, vae.silo)
        found[key] = frechet_distance(reference, Moments.of(features))
    if rebuilt and evaluation.autoencoders[0].group:
        everybody = torch.cat(rebuilt)
        key = metric_key("frechet-reconstruction", name, len(everybody))
        found[key] = frechet_distance(real.moments[None], Moments.of(everybody))
    return found


def paper_frechet(evaluation: Evaluation) -> Values:
    """The Frechet distance by ALIGN-FL's protocol: a fifth of the held-out records, and only as many samples."""
    if len(evaluation.groups) > 1:
        return evaluation.skip("frechet-paper", "it is a protocol for a single group")
    real, (group,) = evaluation.real, evaluation.groups
    table = real.federation.test.of_group(0)
    fifth = paper_fifth(len(table), evaluation.streams)
    images = evaluation.generator.sample(len(fifth), group=group, seed=evaluation.streams.seed, device=real.device)
    extract = real.extractor.features
    distance = frechet_distance(Moments.of(extract(table.x[fifth])), Moments.of(extract(images)))
    return {metric_key("frechet", f"paper-{evaluation.backbone}", len(fifth)): distance}


def pathway_frechet(evaluation: Evaluation) -> Values:
    """The Frechet distance of samples along every way to generate but the first, which is that of ``frechet``."""
    found, real = {}, evaluation.real
    for pathway in evaluation.generator.pathways[1:]:
        features = [
            real.extractor.features(evaluation.sample(group, pathway)[: len(table)])
            for group, table in real.held_out.items()
        ]
        whole = dict(zip((None, *evaluation.groups), (torch.cat(features), *features), strict=True))
        for group, part in whole.items():
            key = metric_key("frechet", f"{evaluation.backbone}-{pathway}", len(part), group)
            found[key] = frechet_distance(real.moments[group], Moments.of(part))
    return found


def _held_out_features(evaluation: Evaluation, vae: Autoencoder) -> Tensor:
    """The real features that stand beside a silo's reconstructions, group after group as there."""
    groups = torch.unique(vae.held_out.group).tolist()
    return torch.cat([evaluation.real.features[evaluation.groups[group]] for group in groups])


def kernel(evaluation: Evaluation) -> Values:
    """The kernel distance of samples to held-out records."""
    return {
        metric_key("kernel", evaluation.backbone, len(features), group): kernel_distance(
            evaluation.real.features[group], features
        )
        for group, features in evaluation.features.items()
    }


def backbone_score(evaluation: Evaluation) -> Values:
    """The inception score of the backbone's own classes, mean over ten parts in random order."""
    found = {}
    for group, features in evaluation.features.items():
        order = evaluation.streams.permutation("inception-score", len(features)).to(features.device)
        logits = evaluation.real.extractor.backbone.classify(features[order])
        score = inception_score(logits, splits=min(SPLITS, len(logits)))
        found[metric_key("inception-score", evaluation.backbone, len(logits), group)] = score.mean
    return found


def manifold(evaluation: Evaluation) -> Values:
    """Precision, recall, density and coverage by balls to the fifth neighbour."""
    found, variant = {}, f"{evaluation.backbone}-k{NEIGHBOURS}"
    for group, features in evaluation.features.items():
        scores = manifold_scores(evaluation.real.features[group], features, NEIGHBOURS)
        for name, value in asdict(scores).items():
            found[metric_key(name, variant, len(features), group)] = value
    return found


def likelihood(evaluation: Evaluation) -> Values:
    """Reconstruction NLL, ELBO and importance-weighted bound of held-out records."""
    if not evaluation.autoencoders:
        return evaluation.skip("likelihood", NO_ENCODER)
    samples, parts = evaluation.config.importance_samples, []
    found: Values = {}
    for vae in evaluation.autoencoders:
        values = likelihoods(vae.model, *vae.inputs(vae.held_out), samples, evaluation.streams)
        found |= _likelihood_values(evaluation, vae, [values], vae.group, vae.silo)
        parts.append(values)
    if (first := evaluation.autoencoders[0]).group:
        found |= _likelihood_values(evaluation, first, parts)
    return found


def _likelihood_values(
    evaluation: Evaluation,
    vae: Autoencoder,
    parts: Sequence[Likelihoods],
    group: str | None = None,
    silo: str | None = None,
) -> Values:
    """The mean of each value over the records of all parts, in every unit."""
    dimensions, draws = vae.held_out.x[0].numel(), f"k{evaluation.config.importance_samples}"
    nll, elbo, importance = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("reconstruction", "elbo", "importance")
    )
    nats = {"nll": nll.mean().item(), "elbo": elbo.mean().item(), "importance": importance.mean().item()}
    values = {
        ("nll", "nats"): nats["nll"],
        ("nll", "paper"): paper_reconstruction(vae.model, nats["nll"], dimensions),
        ("elbo", "nats"): nats["elbo"],
        ("importance-bound", f"nats-{draws}"): nats["importance"],
        ("bits-per-dimension", "elbo"): bits_per_dimension(nats["elbo"], dimensions),
        ("bits-per-dimension", f"importance-bound-{draws}"): bits_per_dimension(nats["importance"], dimensions),
    }
    return {metric_key(*names, len(nll), group, silo): value for names, value in values.items()}


def representation(evaluation: Evaluation) -> Values:
    """A logistic probe on the encoder's means: learned from training records, tested on all held-out ones."""
    if not evaluation.autoencoders:
        return evaluation.skip("probe", NO_ENCODER)
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


def copies(evaluation: Evaluation) -> Values:
    """How near samples lie to their nearest training record, beside how near held-out records do."""
    found = {}
    for group, result in evaluation.memorisation.items():
        count = len(result.sample_distances)
        found[metric_key("memorisation", "pixels-distance-ratio", count, group)] = result.distance_ratio
        found[metric_key("memorisation", "pixels-copy-rate", count, group)] = result.copy_rate()
    return found


def secret_priors(evaluation: Evaluation) -> Values:
    """Whether another group's prior still gives a group's images, and whether a handful of images reveal the prior."""
    vaes = evaluation.autoencoders
    if not vaes or vaes[0].silo:
        return evaluation.skip("secret-priors", "the server of this run holds no encoder")
    means = vaes[0].model.prior_means
    if (means == means[0]).all():
        return evaluation.skip("secret-priors", "all groups have the same prior, so there is none to keep secret")
    return _prior_swaps(evaluation) | _prior_attacks(evaluation)


def _prior_swaps(evaluation: Evaluation) -> Values:
    found, count = {}, evaluation.config.samples
    generator = evaluation.generator
    ways = [name for name in generator.pathways if generator.method.pathways[name].uses_prior]
    for index, group in enumerate(evaluation.groups):
        for pathway in ways:
            for other in evaluation.groups:
                if other != group:
                    images = evaluation.sample(group, pathway, prior_of=other)
                    hits = domain_hit_rate(evaluation.real.domain_classifier.probabilities(images), index)
                    found[metric_key("domain-hit", f"domain-cnn-{pathway}-prior-of-{other}", count, group)] = hits
    return found


def _prior_attacks(evaluation: Evaluation) -> Values:
    found, variant = {}, f"encoder-{HANDFUL}-images"
    for index, vae in enumerate(evaluation.autoencoders):
        attack = attack_prior(vae.model, vae.inputs(vae.held_out)[0], index, evaluation.streams)
        found[metric_key("prior-attack-identified", variant, ATTEMPTS, vae.group)] = attack.identified
        found[metric_key("prior-attack-error", variant, ATTEMPTS, vae.group)] = attack.relative_error
    return found


def cost(evaluation: Evaluation) -> Values:
    """Bytes up and down in all and per silo and round, parameters, steps, seconds; n counts rounds."""
    method, server, rounds = evaluation.generator.method, evaluation.generator.server, len(evaluation.rounds)
    found, up, down = {}, 0, 0
    for silo in evaluation.real.federation.silos:
        traffic = silo_cost(method, server, Site(silo.name, silo.groups), evaluation.egress)
        up, down = up + traffic.bytes_up, down + traffic.bytes_down
        if traffic.rounds:
            for name, total in (("bytes-up", traffic.bytes_up), ("bytes-down", traffic.bytes_down)):
                key = metric_key("cost", f"{name}-per-round", traffic.rounds, silo=silo.name)
                found[key] = total / traffic.rounds
    largest = max(parameters(method, Site(silo.name, silo.groups)) for silo in evaluation.real.federation.silos)
    totals = {
        "bytes-up": up,
        "bytes-down": down,
        "parameters": largest,
        "steps": sum(row["steps"] for row in evaluation.rounds),
        "seconds": sum(row["seconds"] for row in evaluation.rounds),
    }
    return {metric_key("cost", name, rounds): float(total) for name, total in totals.items()} | found


METRICS: dict[str, Callable[[Evaluation], Values]] = {
    "domain": domain,
    "classes": classes,
    "spread": pixel_spread,
    "frechet": frechet,
    "frechet-paper": paper_frechet,
    "pathways": pathway_frechet,
    "kernel": kernel,
    "inception-score": backbone_score,
    "manifold": manifold,
    "likelihood": likelihood,
    "probe": representation,
    "memorisation": copies,
    "secret-priors": secret_priors,
    "lipschitz": lipschitz,
    "utility": synthetic_utility,
    "sliced-wasserstein": sliced_distance,
    "class-variance": class_variance,
    "posterior": posterior,
    "gradients": gradient_norms,
    "cost": cost,
}
OF_LABELS = {"utility", "class-variance"}
ON_FEATURES = {"frechet", "frechet-paper", "pathways", "kernel", "inception-score", "manifold"}
OF_SAMPLES = {"domain", "classes", "spread", "memorisation", "sliced-wasserstein", *OF_LABELS, *ON_FEATURES}
NO_SAMPLES = "what it takes to generate images of every group never reached the server"


@dataclass(frozen=True, eq=False)
class Evaluator:
    """Measures a run at any of its rounds; what depends on real records alone is computed once."""

    federation: Federation
    config: EvaluationConfig
    streams: Streams
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        """Find out before a long training, not after it, what could not be measured."""
        for name in self.config.metrics:
            if name not in METRICS:
                raise ConfigError("evaluation.metrics: " + unknown("metric", name, METRICS))
            if (sensible := self.federation.modality.metrics) and name not in sensible:
                raise ConfigError(
                    f"evaluation.metrics: metric '{name}' makes no sense of {self.federation.modality.plural} "
                    f"(allowed: {', '.join(sensible)})"
                )
        if ON_FEATURES & set(self.config.metrics):
            backbone = self.real.extractor.backbone
            trial = backbone.features(self.federation.test.take(torch.arange(1)).values)
            if "inception-score" in self.config.metrics:
                backbone.classify(trial)

    @cached_property
    def real(self) -> Real:
        """The real side."""
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
        for name in self.config.metrics:
            start = time.perf_counter()
            if name in OF_SAMPLES and not evaluation.generates:
                values = evaluation.skip(name, NO_SAMPLES)
            else:
                values = METRICS[name](evaluation)
            yield name, values, time.perf_counter() - start

    def evaluate(
        self,
        generator: Generator,
        silos: Mapping[str, Tensors] | None = None,
        rounds: Sequence[Mapping[str, Any]] = (),
        egress: Sequence[Mapping[str, Any]] = (),
    ) -> Values:
        """Every configured metric by its full key."""
        measured = self.measure(self.evaluation(generator, silos, rounds, egress))
        return {key: value for _, values, _ in measured for key, value in values.items()}
