"""What a reader should know before trusting a run, in plain words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fedloom.evaluation.metric import Reading, described, metric_title, reading_of
from fedloom.reports.charts import number
from fedloom.reports.facts import RunFacts
from fedloom.reports.logs import last
from fedloom.runs.health import COLLAPSED
from fedloom.runs.metrics import TRAINING, is_metric, sample_count, split_key, uncounted

BLENDED = 0.5  # share of samples that look like a mixture of groups
OWN_GROUP = 0.8  # share of samples that look like their own group, below which groups are mixed up
SILENT_CODE = 0.5  # nats of KL over the whole code: less than one bit tells an image from the average one
WORSE = 2.0  # times the distance of reconstructions
FAR_BELOW = 0.1  # of accuracy that a balanced accuracy lies under it
RECONSTRUCTION = "-reconstruction"  # suffix of a metric that was computed on reconstructions
FEATURES = {"efficientnet-lite": 1280, "inception-2015": 2048}  # dimensions of an extractor, by how its name begins


@dataclass(frozen=True)
class Finding:
    """One warning: its kind for programs, its sentence for people."""

    kind: str
    sentence: str


def findings(facts: RunFacts) -> list[Finding]:
    """Every warning that the numbers call for; none for a healthy run."""
    return [Finding(kind, sentence) for kind, rule in RULES.items() for sentence in rule(facts)]


def _diverged(facts: RunFacts) -> Iterator[str]:
    state = facts.status.get("state")
    if state == "diverged":
        yield f"Training diverged in round {facts.status.get('round')}: {facts.status.get('reason')}."


def _unfinished(facts: RunFacts) -> Iterator[str]:
    if facts.rounds_done < facts.rounds_planned and facts.status.get("state") != "diverged":
        yield f"The run is not finished: {facts.rounds_done} of {facts.rounds_planned} rounds are done."


def _current(facts: RunFacts) -> dict[str, str]:
    """Each metric's key as it was measured last, and then with most samples, by the key without that number."""
    order = sorted(filter(is_metric, facts.metrics), key=lambda key: (max(facts.metrics[key]), sample_count(key) or 0))
    return {uncounted(key): key for key in order}


def _blending(facts: RunFacts) -> Iterator[str]:
    current = _current(facts)
    for plain, key in current.items():
        if not plain.startswith("blend/") or not (group := split_key(plain)[1]):
            continue
        hits = facts.metrics.get(current.get(plain.replace("blend/", "domain-hit/", 1), ""), {})
        blend, hit = last(facts.metrics[key]), last(hits)
        if (blend is not None and blend > BLENDED) or (hit is not None and hit < OWN_GROUP):
            looks = "blended" if blend is None or blend > BLENDED else "like other groups"
            parts = [f"the classifier cannot tell the group of {blend:.0%}"] if blend is not None else []
            parts += [f"for {hit:.0%} its best guess is {group}"] if hit is not None else []
            yield f"Samples of {group} look {looks}: {', and '.join(parts)} ({plain.split('/')[1]})."


def _posterior_collapse(facts: RunFacts) -> Iterator[str]:
    for key, history in facts.metrics.items():
        value = last(history)
        trained = key.startswith(TRAINING) and key.rpartition("/")[2].startswith("kl")
        measured = key.startswith("kl/nats/") and not split_key(key)[1]
        if (trained or measured) and value is not None and value < SILENT_CODE:
            term = f"{described(key).removeprefix(TRAINING)} = {number(value)} nats"
            yield f"Posterior collapse: the latent code says almost nothing about a record ({term})."


def _samples_worse(facts: RunFacts) -> Iterator[str]:
    newest = {plain: last(facts.metrics[key]) for plain, key in _current(facts).items()}
    for rebuilt, reconstructions in newest.items():
        metric, slash, rest = rebuilt.partition("/")
        plain = metric.removesuffix(RECONSTRUCTION) + slash + rest
        samples = newest.get(plain)
        if not metric.endswith(RECONSTRUCTION) or samples is None or reconstructions is None:
            continue
        if samples > WORSE * reconstructions:
            yield (
                f"Samples are worse than reconstructions: {described(plain)} is {number(samples)} for samples and "
                f"{number(reconstructions)} for reconstructions, so the prior misses where the encoder puts images."
            )


def _few_samples(facts: RunFacts) -> Iterator[str]:
    least: dict[str, tuple[int, Reading]] = {}  # by metric: from how many samples of a group, and what they are for
    for plain, key in _current(facts).items():
        metric, count, reading = split_key(plain)[0], sample_count(key), reading_of(key)
        if count is not None and reading and reading.fewest:
            least[metric] = (min(count, least.get(metric, (count,))[0]), reading)
    for metric, (count, reading) in least.items():
        dimension = _dimension(metric, facts.shape) if metric.startswith("frechet/") else 0
        if count < dimension:
            yield (
                f"{metric_title(metric)}: {count:,} samples are too few for {dimension:,} features; "
                "the distance is biased upwards."
            )
        elif count < reading.fewest:
            yield f"{metric_title(metric)}: {count:,} {reading.counts} are too few; take at least {reading.fewest}."


def _dimension(metric: str, shape: tuple[int, ...]) -> int:
    features = metric.split("/")[1]
    if features == "pixels":
        return math.prod(shape)
    return next((size for name, size in FEATURES.items() if features.startswith(name)), 0)


def _all_alike(facts: RunFacts) -> Iterator[str]:
    for key, history in facts.metrics.items():
        value = last(history)
        if key.startswith("spread/") and value is not None and value < COLLAPSED:
            group = split_key(key)[1] or "all groups"
            yield f"Samples of {group} are almost all alike ({metric_title(key)}: {number(value)})."


def _not_finite(facts: RunFacts) -> Iterator[str]:
    for key, history in facts.metrics.items():
        broken = [round_number for round_number, value in history.items() if value is None]
        if broken and (is_metric(key) or key.startswith(TRAINING)):
            rounds = f"round {broken[0]}" if len(broken) == 1 else f"{len(broken)} rounds, first in round {broken[0]}"
            yield f"{described(key)} is not a finite number in {rounds}."


def _silent_silos(facts: RunFacts) -> Iterator[str]:
    silent = [silo.name for silo in facts.silos if not silo.rounds]
    if silent and len(silent) < len(facts.silos):
        more = f" and {len(silent) - 5} more" if len(silent) > 5 else ""
        yield f"Some silos never took part, so nothing was learned from them: {', '.join(silent[:5])}{more}."


def _refuted(facts: RunFacts) -> Iterator[str]:
    if facts.audit.refuted:
        yield f"The claim of privacy is refuted by an attack: {'; '.join(facts.audit.sentences[:1])}."


def _not_for_release(facts: RunFacts) -> Iterator[str]:
    if facts.not_for_release:
        yield f"{facts.not_for_release.capitalize()}."


def _one_sided(facts: RunFacts) -> Iterator[str]:
    for end, what in ((0.0, "the silos' own records add nothing"), (1.0, "nothing was gained from the federation")):
        if len(facts.downstream.lambdas) > 1 and set(facts.downstream.lambdas) == {end}:
            yield f"Every silo's lambda is {end:g}: {what}."


def _classes_missed(facts: RunFacts) -> Iterator[str]:
    for row, tests in facts.downstream.rows.items():
        for test, scores in tests.items():
            accuracy, balanced = scores.get("accuracy"), scores.get("balanced_accuracy")
            if accuracy is not None and balanced is not None and accuracy - balanced > FAR_BELOW:
                yield (
                    f"Rare classes are missed by {row} ({test} test): the balanced accuracy is {balanced:.1%}, "
                    f"the accuracy {accuracy:.1%}."
                )


def _most_clipped(facts: RunFacts) -> Iterator[str]:
    privacy = facts.config.get("privacy", {})
    if privacy.get("mechanism") != "dp-sgd" or privacy.get("clipping") != "fixed":
        return
    for key, history in facts.metrics.items():
        value = last(history)
        if key.startswith("gradient-norm/") and value is not None and value > privacy["clip"]:
            yield (
                f"Most gradients are clipped: half of them are longer than {number(value)}, "
                f"and privacy.clip is {number(privacy['clip'])} ({described(key)})."
            )


def _not_nearer(facts: RunFacts) -> Iterator[str]:
    for key, history in facts.metrics.items():
        known = [value for _, value in sorted(history.items()) if value is not None]
        if key.startswith("sliced-wasserstein/") and len(known) > 1 and known[-1] >= known[0]:
            far, now = number(known[0]), number(known[-1])
            yield f"Samples do not come nearer to real records: {described(key)} was {far} and is {now}."


def _unreadable(facts: RunFacts) -> Iterator[str]:
    yield from (f"A file of the run is damaged: {problem}." for problem in facts.problems)


RULES: dict[str, Callable[[RunFacts], Iterator[str]]] = {
    "diverged": _diverged,
    "unfinished": _unfinished,
    "blending": _blending,
    "posterior-collapse": _posterior_collapse,
    "samples-worse-than-reconstructions": _samples_worse,
    "collapsed-samples": _all_alike,
    "too-few-samples": _few_samples,
    "not-finite": _not_finite,
    "silent-silos": _silent_silos,
    "one-sided-mixture": _one_sided,
    "rare-classes-missed": _classes_missed,
    "most-gradients-clipped": _most_clipped,
    "no-nearer-to-real": _not_nearer,
    "refuted": _refuted,
    "not-for-release": _not_for_release,
    "damaged": _unreadable,
}
