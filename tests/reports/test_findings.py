from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fedloom.reports.audits import AuditFacts
from fedloom.reports.downstream import DownstreamFacts
from fedloom.reports.facts import RunFacts, SiloFacts
from fedloom.reports.findings import RULES, Finding, findings
from fedloom.reports.verdict import Verdict


def silo(name: str, rounds: int) -> SiloFacts:
    return SiloFacts(name, ("mnist",), 10, {}, rounds, 0, (), ())


HEALTHY = RunFacts(
    label="run",
    folder="run",
    name="run",
    method="fedvae",
    options={},
    seed=0,
    rounds_done=4,
    rounds_planned=4,
    status={"state": "finished", "round": 4, "reason": ""},
    verdict=Verdict("green", "Good."),
    modality="image",
    shape=(1, 28, 28),
    groups=("mnist", "fashion"),
    classes=(),
    silos=(silo("one", 4), silo("two", 1)),
    plan={},
    payloads={},
    guarantee="no DP guarantee",
    privacy={},
    parameters={},
    metrics={
        "train/nll": {1: 200.0, 4: 100.0},
        "train/kl": {1: 0.01, 4: 12.0},
        "blend/domain-cnn/n1000/group=mnist": {1: 0.9, 4: 0.1},
        "domain-hit/domain-cnn/n1000/group=mnist": {1: 0.2, 4: 0.95},
        "frechet/efficientnet-lite0-224/n2000/group=mnist": {4: 30.0},
        "frechet-reconstruction/efficientnet-lite0-224/n1000/group=mnist": {4: 20.0},
        "spread/pixels/n1000/group=mnist": {4: 0.9},
        "probe/accuracy/n20": {4: 0.8},
        "cost/bytes-up/n4": {4: 1e9},
    },
    environment={},
    config={},
    reproduce="",
    no_records="",
    problems=(),
)


def with_metrics(values: dict[str, dict[int, float | None]]) -> RunFacts:
    return replace(HEALTHY, metrics={**HEALTHY.metrics, **values})


def test_a_refuted_claim_and_canaries_are_warned_of() -> None:
    refuted = replace(HEALTHY, audit=AuditFacts(refuted=True, sentences=("canaries: refuted",)))
    marked = replace(HEALTHY, not_for_release="not for release: 9 canaries")
    assert findings(refuted) == [Finding("refuted", "The claim of privacy is refuted by an attack: canaries: refuted.")]
    assert findings(marked) == [Finding("not-for-release", "Not for release: 9 canaries.")]


def test_a_healthy_run_has_no_warning() -> None:
    assert findings(HEALTHY) == []


@pytest.mark.parametrize(
    ("key", "value", "kind", "words"),
    [
        (
            "blend/domain-cnn/n1000/group=mnist",
            0.51,
            "blending",
            "look blended: the classifier cannot tell the group of 51%",
        ),
        ("domain-hit/domain-cnn/n1000/group=mnist", 0.79, "blending", "mnist look like other groups: "),
        ("domain-hit/domain-cnn/n1000/group=mnist", 0.79, "blending", "for 79% its best guess is mnist"),
        ("blend/domain-cnn-z1/n1000/group=mnist", 0.51, "blending", "(domain-cnn-z1)"),
        ("train/kl", 0.49, "posterior-collapse", "kl = 0.49 nats"),
        ("train/vae/kl_top", 0.0, "posterior-collapse", "vae/kl_top = 0 nats"),
        ("kl/nats/n300", 0.49, "posterior-collapse", "in nats, 300 records = 0.49 nats"),
        (
            "frechet-reconstruction/efficientnet-lite0-224/n1000/group=mnist",
            14.9,
            "samples-worse-than-reconstructions",
            "is 30 for samples and 14.9 for reconstructions",
        ),
        (
            "frechet/efficientnet-lite0-224/n1279",
            5.0,
            "too-few-samples",
            "1,279 samples are too few for 1,280 features",
        ),
        ("frechet/inception-2015-299/n2047", 5.0, "too-few-samples", "2,047 samples are too few for 2,048 features"),
        ("frechet/pixels/n783", 5.0, "too-few-samples", "783 samples are too few for 784 features"),
        ("recall/pixels-k5/n99/group=mnist", 0.5, "too-few-samples", "99 samples are too few"),
        ("spread/pixels/n1000/group=mnist", 0.04, "collapsed-samples", "Samples of mnist are almost all alike"),
        (
            "kernel/pixels/n1000",
            None,
            "not-finite",
            "(pixels), 1,000 samples is not a finite number in round 4",
        ),
        ("train/nll", None, "not-finite", "train/nll is not a finite number in round 4"),
    ],
)
def test_one_bad_number_gives_one_warning(key: str, value: float | None, kind: str, words: str) -> None:
    (found,) = findings(with_metrics({key: {4: value}}))
    assert found.kind == kind
    assert words in found.sentence


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("blend/domain-cnn/n1000/group=mnist", 0.5),
        ("blend/domain-cnn/n999/group=mnist", 0.9),  # fewer samples than the value that counts
        ("blend/domain-cnn/n2000", 0.9),  # over all groups: the groups' own values tell
        ("domain-hit/domain-cnn/n1000/group=mnist", 0.8),
        ("domain-hit/domain-cnn-z1-prior-of-fashion/n1000/group=mnist", 0.0),  # a swapped prior should miss
        ("train/kl", 0.5),
        ("kl/nats/n300", 0.5),
        ("kl/nats/n300/silo=one", 0.0),  # that of all silos together tells
        ("gradient-norm/vae-median/n10", 9.0),  # without privacy nothing is clipped
        ("sliced-wasserstein/directions-256/n9/group=mnist", 5.0),  # one value does not fall
        ("frechet-reconstruction/efficientnet-lite0-224/n1000/group=mnist", 15.0),
        ("frechet-reconstruction/efficientnet-lite0-224/n1000/group=fashion", 1.0),  # no samples to compare with
        ("frechet/efficientnet-lite2-224/n1280", 5.0),
        ("frechet/efficientnet-lite0-224/n300/group=mnist", 31.0),  # measured again with enough
        ("recall/pixels-k5/n100/group=mnist", 0.5),
        ("spread/pixels/n1000/group=mnist", 0.05),
        ("seconds", None),
    ],
)
def test_a_number_on_the_good_side_gives_none(key: str, value: float | None) -> None:
    assert findings(with_metrics({key: {4: value}})) == []


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (
            {"status": {"state": "diverged", "round": 3, "reason": "loss exploded"}, "rounds_done": 2},
            "diverged",
            "Training diverged in round 3: loss exploded.",
        ),
        ({"rounds_done": 3}, "unfinished", "3 of 4 rounds are done"),
        ({"silos": (silo("one", 4), silo("two", 0))}, "silent-silos", "nothing was learned from them: two."),
        ({"problems": ("egress.jsonl cannot be read",)}, "damaged", "egress.jsonl cannot be read"),
    ],
)
def test_the_state_of_the_run_is_told(change: dict[str, Any], kind: str, words: str) -> None:
    (found,) = findings(replace(HEALTHY, **change))
    assert found.kind == kind
    assert words in found.sentence


def scored(accuracy: float, balanced: float) -> DownstreamFacts:
    return DownstreamFacts({"mixture": {"silo": {"accuracy": accuracy, "balanced_accuracy": balanced}}})


def private(clipping: str, norm: float) -> dict[str, Any]:
    privacy = {"mechanism": "dp-sgd", "clipping": clipping, "clip": 1.5}
    return {"config": {"privacy": privacy}, "metrics": {"gradient-norm/cvae-median/n64": {4: norm}}}


def distances(first: float, later: float) -> dict[str, Any]:
    return {"metrics": {"sliced-wasserstein/directions-256/n9/group=mnist": {4: later, 1: first}}}


BAD_HEADS: list[tuple[dict[str, Any], str, str]] = [
    ({"downstream": DownstreamFacts(lambdas=(0.0, 0.0))}, "one-sided-mixture", "the silos' own records add nothing"),
    ({"downstream": DownstreamFacts(lambdas=(1.0, 1.0))}, "one-sided-mixture", "nothing was gained from the feder"),
    ({"downstream": scored(0.8, 0.69)}, "rare-classes-missed", "mixture (silo test): the balanced accuracy is 69.0%"),
    (private("fixed", 1.6), "most-gradients-clipped", "half of them are longer than 1.6, and privacy.clip is 1.5"),
    (distances(0.2, 0.2), "no-nearer-to-real", "was 0.2 and is 0.2"),
]


@pytest.mark.parametrize(("change", "kind", "words"), BAD_HEADS)
def test_signs_of_failure_after_training_are_told(change: dict[str, Any], kind: str, words: str) -> None:
    (found,) = findings(replace(HEALTHY, **change))
    assert found.kind == kind
    assert words in found.sentence


@pytest.mark.parametrize(
    "change",
    [
        {"downstream": DownstreamFacts(lambdas=(0.0, 0.1))},
        {"downstream": DownstreamFacts(lambdas=(1.0,))},  # a single silo has nobody to differ from
        {"downstream": scored(0.8, 0.71)},
        private("fixed", 1.4),
        private("quantile", 1.6),  # a bound that follows the gradients
        distances(0.2, 0.19),
    ],
)
def test_heads_on_the_good_side_give_no_warning(change: dict[str, Any]) -> None:
    assert findings(replace(HEALTHY, **change)) == []


def test_every_rule_has_been_seen_to_speak() -> None:
    bad = with_metrics(
        {
            "blend/domain-cnn/n1000/group=mnist": {4: 1.0},
            "train/kl": {4: 0.0},
            "frechet-reconstruction/efficientnet-lite0-224/n1000/group=mnist": {4: 1.0},
            "spread/pixels/n50": {4: 0.0},
            "train/nll": {3: None, 4: None},
        }
    )
    run = replace(bad, rounds_done=0, silos=(silo("one", 0), silo("two", 1)), problems=("x",))
    run = replace(run, audit=AuditFacts(refuted=True), not_for_release="not for release")
    unfinished = {finding.kind for finding in findings(run)}
    diverged = {finding.kind for finding in findings(replace(run, status={"state": "diverged"}))}
    assert unfinished | diverged | {kind for _, kind, _ in BAD_HEADS} == set(RULES)
    assert "unfinished" not in diverged
