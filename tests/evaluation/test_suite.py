from __future__ import annotations

import sys
import warnings
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
import torch
from torch import Tensor

from fedloom.backbones.base import Backbone
from fedloom.config import EvaluationConfig
from fedloom.errors import ConfigError, FedloomWarning, MissingExtraError
from fedloom.evaluation import evidence
from fedloom.evaluation.class_coverage import class_coverage
from fedloom.evaluation.domain import domain_hit_rate
from fedloom.evaluation.evidence import Evaluation
from fedloom.evaluation.frechet import Moments, frechet_distance
from fedloom.evaluation.kernel import kernel_distance
from fedloom.evaluation.likelihood import likelihoods
from fedloom.evaluation.metric import METRICS
from fedloom.evaluation.needs import FEATURES, ONE_GROUP
from fedloom.evaluation.probe import probe
from fedloom.experiment import Run, train
from fedloom.federation.remote import RemoteSilo
from fedloom.streams import Streams
from support import federation_of, tiny_config

GROUPS = ("mnist", "fashion-mnist")
COUNT = 30
EVERYBODY = 2 * COUNT
SETTINGS = EvaluationConfig(samples=COUNT, backbone="pixels", importance_samples=3, trackers=())

# Thirty images have a singular covariance in 784 dimensions, and everybody is told so.
pytestmark = pytest.mark.filterwarnings("ignore:Frechet distance:fedloom.errors.FedloomWarning")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tiny_config("method.prior=wave"), tmp_path_factory.mktemp("suite") / "run")


@pytest.fixture(scope="module")
def evaluation(run: Run) -> Evaluation:
    """One evaluation that all metrics below share."""
    return run.evaluation(settings=SETTINGS)[1]


def measured(metric: str, evaluation: Evaluation) -> dict[str, float]:
    return METRICS[metric].measure(evaluation)


def parts(metric: str, variant: str, count: int = COUNT, everybody: int = EVERYBODY) -> set[str]:
    """The keys of a metric over all groups and of each."""
    groups = {f"{metric}/{variant}/n{count}/group={group}" for group in GROUPS}
    return groups | {f"{metric}/{variant}/n{everybody}"}


DRAWS = "k3"
BALLS = "pixels-k5"
SCORES = ("accuracy", "macro-f1", "weighted-f1", "balanced-accuracy")
KEYS: dict[str, set[str]] = {
    "domain": parts("domain-hit", "domain-cnn") | parts("blend", "domain-cnn"),
    "classes": parts("class-coverage", "class-cnn"),
    "spread": parts("spread", "pixels") - {f"spread/pixels/n{EVERYBODY}"},
    "frechet": parts("frechet", "pixels") | parts("frechet-reconstruction", "pixels"),
    "kernel": parts("kernel", "pixels"),
    "manifold": set().union(*(parts(name, BALLS) for name in ("precision", "recall", "density", "coverage"))),
    "likelihood": set().union(
        *(
            parts(metric, variant)
            for metric, variant in (
                ("nll", "nats"),
                ("nll", "paper"),
                ("elbo", "nats"),
                ("importance-bound", f"nats-{DRAWS}"),
                ("bits-per-dimension", "elbo"),
                ("bits-per-dimension", f"importance-bound-{DRAWS}"),
            )
        )
    ),
    "probe": set().union(*(parts("probe", score, 1000, 2000) for score in SCORES))
    | {f"probe/paper-{score}/n80" for score in SCORES},
    "memorisation": {
        f"memorisation/pixels-{what}/n{COUNT}/group={group}"
        for what in ("distance-ratio", "copy-rate")
        for group in GROUPS
    },
    "lipschitz": {
        f"lipschitz/{what}/group={group}" for what in ("certified/n1", f"sampled-max/n{COUNT}") for group in GROUPS
    },
    "secret-priors": {
        f"domain-hit/domain-cnn-z1-prior-of-{other}/n{COUNT}/group={group}" for group, other in (GROUPS, GROUPS[::-1])
    }
    | {
        f"prior-attack-{what}/encoder-5-images/n100/group={group}"
        for what in ("identified", "error")
        for group in GROUPS
    },
}


@pytest.mark.parametrize("metric", KEYS)
def test_every_key_says_what_was_computed(metric: str, evaluation: Evaluation) -> None:
    assert set(measured(metric, evaluation)) == KEYS[metric]


def test_no_metric_is_forgotten() -> None:
    of_vectors = {"utility", "sliced-wasserstein", "class-variance", "posterior", "gradients"}  # tests/downstream
    of_labelled_images = {"downstream"}  # test_downstream_metric.py
    of_tables = {"marginals", "column-shapes", "pair-trends", "table-utility", "closest-record", "fidelity"}
    others = {"cost", "inception-score", "frechet-paper", "pathways"}
    assert set(METRICS) == set(KEYS) | of_vectors | of_labelled_images | of_tables | others


class Counting(Backbone):
    """Four blocks of the image as features, their sums as logits; counts the images it was shown."""

    def __init__(self, dimension: int | None = None) -> None:
        super().__init__("counting", dimension, "cpu", batch_size=8)
        self.seen = 0

    def extract(self, images: Tensor) -> Tensor:
        self.seen += len(images)
        return torch.nn.functional.adaptive_avg_pool2d(images, 2).flatten(1)

    def classify(self, features: Tensor) -> Tensor:
        return 10 * features


def test_every_image_is_extracted_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = Counting()
    monkeypatch.setattr(evidence, "load_backbone", lambda *args, **options: backbone)
    of_many = [name for name in METRICS if FEATURES in METRICS[name].needs and ONE_GROUP not in METRICS[name].needs]
    settings = replace(SETTINGS, metrics=tuple(of_many))
    evaluator, first = run.evaluation(settings=settings)
    assert backbone.seen == 1  # the trial
    found = evaluator.evaluate(first.generator)
    assert {key.partition("/")[0] for key in found} == {
        *("frechet", "frechet-reconstruction", "kernel", "inception-score"),
        *("precision", "recall", "density", "coverage"),
    }
    assert backbone.seen == 1 + 3 * EVERYBODY  # held-out records, samples, reconstructions
    evaluator.evaluate(run.generator(1))
    assert backbone.seen == 1 + 5 * EVERYBODY  # another round: the held-out records are known


def test_features_of_real_records_outlive_the_process(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path))
    seen = []
    for _ in range(2):
        backbone = Counting(dimension=4)
        monkeypatch.setattr(evidence, "load_backbone", lambda *args, backbone=backbone, **options: backbone)
        assert run.evaluation(settings=SETTINGS)[1].real.features[None].shape == (EVERYBODY, 4)
        seen.append(backbone.seen)
    assert seen == [EVERYBODY, 0]


def test_distances_compare_equal_numbers_of_held_out_records_and_samples(evaluation: Evaluation) -> None:
    found = measured("frechet", evaluation) | measured("kernel", evaluation)
    real, samples, rebuilt = [], [], []
    for vae, group in zip(evaluation.autoencoders, GROUPS, strict=True):
        images = evaluation.real.held_out[group].values
        real.append(images.flatten(1))
        samples.append(evaluation.generator.sample(COUNT, group=group, seed=1).flatten(1))
        posterior = vae.model.encode(images, vae.held_out.group)
        rebuilt.append(vae.model.decode(posterior.mean, vae.held_out.group).sigmoid().detach().flatten(1))
    for key, kind in (("frechet", samples), ("frechet-reconstruction", rebuilt)):
        expected = frechet_distance(Moments.of(torch.cat(real)), Moments.of(torch.cat(kind)))
        assert found[f"{key}/pixels/n{EVERYBODY}"] == pytest.approx(expected, rel=1e-5)
        expected = frechet_distance(Moments.of(real[1]), Moments.of(kind[1]))
        assert found[f"{key}/pixels/n{COUNT}/group=fashion-mnist"] == pytest.approx(expected, rel=1e-5)
    assert found[f"kernel/pixels/n{COUNT}/group=mnist"] == kernel_distance(real[0], samples[0])


def test_distances_of_the_other_ways_to_generate(evaluation: Evaluation, tmp_path: Path) -> None:
    assert measured("pathways", evaluation) == {}  # a flat VAE has one way alone
    two_levels = train(tiny_config("method.prior=wave", "method.hierarchy=true", "rounds=1"), tmp_path / "run")
    _, two = two_levels.evaluation(settings=SETTINGS)
    found = measured("pathways", two)
    assert set(found) == parts("frechet", "pixels-z1") | parts("frechet", "pixels-roundtrip")
    images = two.generator.sample(COUNT, group="mnist", seed=1, pathway="roundtrip").flatten(1)
    real = two.real.held_out["mnist"].values.flatten(1)
    expected = frechet_distance(Moments.of(real), Moments.of(images))
    key = f"frechet/pixels-roundtrip/n{COUNT}/group=mnist"
    assert found[key] == pytest.approx(expected, rel=1e-5)


def test_a_single_group_is_not_told_from_others(tmp_path: Path) -> None:
    run = train(tiny_config("data.source=mnist-sample", "rounds=1"), tmp_path / "run")
    evaluator, evaluation = run.evaluation(settings=replace(SETTINGS, metrics=("domain",)))
    with pytest.warns(FedloomWarning, match="metric 'domain' is left out: there is one group only"):
        assert evaluator.evaluate(evaluation.generator) == {}


@pytest.fixture(scope="module")
def one_group(tmp_path_factory: pytest.TempPathFactory) -> Evaluation:
    """ALIGN-FL on the digits 0 to 3, with clothes among the records of one silo."""
    outliers = ("source=fashion-mnist-sample", 'silos=["silo-1"]', "share=0.25")
    overrides = ("data.source=mnist-sample", "data.partition=classes", *(f"data.outliers.{x}" for x in outliers))
    config = tiny_config("method.name=align_fl", *overrides, "server.samples=20", "server.epochs=1", "rounds=1")
    return train(config, tmp_path_factory.mktemp("one-group") / "run").evaluation(settings=SETTINGS)[1]


def test_the_papers_distance_is_of_a_fifth_and_as_many_samples(one_group: Evaluation) -> None:
    test, streams = one_group.real.federation.test, one_group.streams
    fifth = streams.permutation("probe/paper", 1000)[800:]
    samples = one_group.generator.sample(200, group="mnist", seed=streams.seed)
    expected = frechet_distance(*(Moments.of(x.flatten(1)) for x in (test.values[fifth], samples)))
    assert measured("frechet-paper", one_group) == {"frechet/paper-pixels/n200": pytest.approx(expected, rel=1e-5)}


def test_outliers_teach_a_probe_nothing(one_group: Evaluation) -> None:
    (vae,), federation = one_group.autoencoders, one_group.real.federation
    own = vae.training.y < 10
    assert (~own).sum() == 10
    assert federation.classes[-1] == "outlier"
    train_records = vae.training.take(torch.nonzero(own).flatten())
    scores = probe(vae.codes(train_records), train_records.y, vae.codes(federation.test), federation.test.y)
    assert measured("probe", one_group)["probe/accuracy/n1000"] == scores.accuracy


def test_held_out_records_are_the_same_for_every_seed(tmp_path: Path) -> None:
    tables = []
    for seed in (1, 2):
        run = train(tiny_config(f"seed={seed}", "rounds=1"), tmp_path / str(seed))
        tables.append(run.evaluation(settings=SETTINGS)[1].real.held_out["mnist"].x)
    assert torch.equal(*tables)


def test_the_mean_over_groups_stands_beside_them(evaluation: Evaluation) -> None:
    found = measured("domain", evaluation)
    groups = [found[f"domain-hit/domain-cnn/n{COUNT}/group={group}"] for group in GROUPS]
    assert found[f"domain-hit/domain-cnn/n{EVERYBODY}"] == mean(groups)


def test_classes_that_samples_reach() -> None:
    labels = torch.tensor([2] * 50 + [3] * 40 + [4] * 10)
    # Of 100 samples: 94 of class 2, 3 of class 3 (a tenth of its share would be 4), 3 of class 4 (would be 1).
    predicted = torch.tensor([2] * 94 + [3] * 3 + [4] * 3)
    probabilities = torch.nn.functional.one_hot(predicted, 6).float()
    assert class_coverage(probabilities, labels) == pytest.approx(2 / 3)
    assert class_coverage(probabilities[:94], labels) == pytest.approx(1 / 3)


def test_likelihood_of_a_group_and_of_all(evaluation: Evaluation) -> None:
    found = measured("likelihood", evaluation)
    values = [
        likelihoods(vae.model, *vae.inputs(vae.held_out), 3, evaluation.streams) for vae in evaluation.autoencoders
    ]
    assert found[f"elbo/nats/n{COUNT}/group=mnist"] == values[0].elbo.mean().item()
    assert found[f"importance-bound/nats-k3/n{EVERYBODY}"] == pytest.approx(
        torch.cat([part.importance for part in values]).mean().item()
    )
    assert found[f"nll/paper/n{EVERYBODY}"] == pytest.approx(found[f"nll/nats/n{EVERYBODY}"] / 784)
    assert found[f"importance-bound/nats-k3/n{EVERYBODY}"] >= found[f"elbo/nats/n{EVERYBODY}"]


def test_the_probe_learns_from_training_records_and_is_tested_on_all_others(evaluation: Evaluation) -> None:
    vae, federation = evaluation.autoencoders[1], evaluation.real.federation
    test, train_records = federation.test.of_group(1), evaluation.real.training["fashion-mnist"]
    assert len(train_records) == 2 * 40
    scores = probe(vae.codes(train_records), train_records.y, vae.codes(test), test.y)
    assert measured("probe", evaluation)["probe/accuracy/n1000/group=fashion-mnist"] == scores.accuracy


def test_a_swapped_prior_moves_the_samples_and_nothing_else(evaluation: Evaluation) -> None:
    found = measured("secret-priors", evaluation)
    images = evaluation.generator.sample(COUNT, group="mnist", seed=1, prior_of="fashion-mnist")
    hits = domain_hit_rate(evaluation.real.domain_classifier.probabilities(images), 0)
    assert found[f"domain-hit/domain-cnn-z1-prior-of-fashion-mnist/n{COUNT}/group=mnist"] == hits
    assert not torch.equal(images, evaluation.samples["mnist"])


def test_runs_of_one_federation_and_seed_share_their_domain_classifier(evaluation: Evaluation) -> None:
    real = evaluation.real
    again, other_seed = replace(real), replace(real, streams=Streams(2))
    assert again.domain_classifier is real.domain_classifier
    assert other_seed.domain_classifier is not real.domain_classifier


def test_cost_by_hand(evaluation: Evaluation) -> None:
    found = measured("cost", evaluation)
    # One hidden layer of 16, latent 4, in float32; beside its blocks a silo sends two counts of 8 bytes.
    parameters = 784 * 16 + 16 + 16 * 8 + 8 + 4 * 16 + 16 + 16 * 784 + 784
    assert found["cost/parameters/n2"] == parameters
    assert found["cost/bytes-down-per-round/n2/silo=mnist-1"] == 4 * parameters
    assert found["cost/bytes-up-per-round/n2/silo=mnist-1"] == 4 * parameters + 16
    assert found["cost/bytes-down/n2"] == 2 * 4 * 4 * parameters
    assert found["cost/bytes-up/n2"] == 2 * 4 * (4 * parameters + 16)
    assert found["cost/steps/n2"] == 2 * 4 * 3  # 40 records in batches of 16
    assert found["cost/seconds/n2"] == sum(row["seconds"] for row in evaluation.rounds)


def test_cost_during_a_run_counts_its_last_round(tmp_path: Path) -> None:
    run = train(tiny_config("rounds=1", 'evaluation.metrics=["cost"]'), tmp_path / "run")
    assert run.metrics()[-1]["cost/steps/n1"] == 12


def test_encoders_that_stay_at_home_are_measured_one_by_one(tmp_path: Path) -> None:
    run = train(tiny_config("sharing.scopes.encoder=silo"), tmp_path / "run")
    evaluation = run.evaluation(settings=SETTINGS)[1]
    silos = [silo.name for silo in evaluation.real.federation.silos]
    found = measured("likelihood", evaluation)
    assert {key for key in found if key.startswith("elbo/")} == {f"elbo/nats/n{COUNT}/silo={silo}" for silo in silos}
    assert len({found[f"elbo/nats/n{COUNT}/silo={silo}"] for silo in silos}) == 4
    assert f"probe/accuracy/n1000/silo={silos[0]}" in measured("probe", evaluation)
    rebuilt = {key for key in measured("frechet", evaluation) if key.startswith("frechet-reconstruction")}
    assert rebuilt == {f"frechet-reconstruction/pixels/n{COUNT}/silo={silo}" for silo in silos}
    vae = evaluation.autoencoders[0]
    kept = evaluation.silos[silos[0]]["encoder.layers.0.weight"]
    assert torch.equal(vae.model.state_dict()["encoder.layers.0.weight"], kept)


@pytest.mark.parametrize(
    ("metric", "overrides", "reason"),
    [
        ("likelihood", ["method.name=fedgan", "model.channels=[2]"], "neither the server nor a silo"),
        ("probe", ["method.name=fedgan", "model.channels=[2]"], "neither the server nor a silo"),
        ("secret-priors", ["method.name=fedgan", "model.channels=[2]"], "holds no encoder"),
        ("secret-priors", ["sharing.scopes.encoder=silo", "method.prior=wave"], "holds no encoder"),
        ("secret-priors", [], "the same prior"),
        ("frechet-paper", [], "it is a protocol for a single group"),
    ],
)
def test_what_does_not_apply_is_left_out_with_one_warning(
    metric: str, overrides: list[str], reason: str, tmp_path: Path
) -> None:
    run = train(tiny_config("rounds=1", *overrides), tmp_path / "run")
    evaluator, evaluation = run.evaluation(settings=replace(SETTINGS, metrics=(metric,)))
    with pytest.warns(FedloomWarning, match=f"'{metric}' is left out: .*{reason}"):
        assert measured(metric, evaluation) == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert evaluator.evaluate(evaluation.generator) == {}


def test_decoders_that_stay_at_home_leave_no_samples_but_whole_models(tmp_path: Path) -> None:
    silo = ("sharing.scopes.encoder=silo", "sharing.scopes.decoder=silo", 'evaluation.metrics=["spread", "cost"]')
    with pytest.warns(FedloomWarning, match="'spread' is left out: .*never reached the server"):
        run = train(tiny_config("rounds=1", *silo), tmp_path / "run")
    assert run.folder.status["state"] == "finished"
    assert {key.partition("/")[0] for key in run.folder.latest_metrics()} == {"cost"}
    evaluation = run.evaluation(settings=SETTINGS)[1]
    assert [vae.silo for vae in evaluation.autoencoders] == [silo.name for silo in evaluation.real.federation.silos]
    assert len(measured("likelihood", evaluation)) == 4 * 6


def test_pathways_that_the_server_cannot_go_are_left_out(tmp_path: Path) -> None:
    hierarchy = ("method.hierarchy=true", "method.prior=wave", "sharing.scopes.top_encoder=silo")
    evaluation = train(tiny_config("rounds=1", *hierarchy), tmp_path / "run").evaluation(settings=SETTINGS)[1]
    found = measured("domain", evaluation)
    variants = {key.split("/")[1] for key in found}
    assert variants == {"domain-cnn", "domain-cnn-z1"}  # the roundtrip needs q(z2 | z1)


def test_records_without_classes_have_no_probe_and_no_class_coverage(tmp_path: Path) -> None:
    federation = federation_of([0] * 10, [1] * 10)
    unlabelled = replace(federation.test, y=torch.full((10,), -1))
    silos = tuple(replace(silo, train=replace(silo.train, y=torch.full((10,), -1))) for silo in federation.silos)
    federation = replace(federation, test=unlabelled, silos=silos)
    run = train(tiny_config("rounds=1"), tmp_path / "run", federation)
    evaluation = run.evaluation(settings=SETTINGS, federation=federation)[1]
    for metric, reason in (("classes", "no held-out record has a class"), ("probe", "at least two classes")):
        with pytest.warns(FedloomWarning, match=reason):
            assert measured(metric, evaluation) == {}


@pytest.mark.parametrize(
    ("settings", "error", "sentence"),
    [
        ({"metrics": ("domian",)}, ConfigError, "did you mean 'domain'"),
        ({"metrics": ("frechet",), "backbone": "pixel"}, ConfigError, "did you mean 'pixels'"),
        ({"metrics": ("inception-score",)}, ConfigError, "'pixels' has no class head"),
        ({"metrics": ("kernel",), "backbone": "efficientnet-lite0"}, MissingExtraError, r"fedloom\[eval\]"),
    ],
)
def test_what_cannot_be_measured_is_said_before_training(
    settings: dict[str, object],
    error: type[Exception],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "efficientnet_lite_pytorch", None)
    config = tiny_config()
    config = replace(config, evaluation=replace(SETTINGS, **settings))
    with pytest.raises(error, match=sentence):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_without_the_records_of_silos_what_looks_at_them_is_left_out(evaluation: Evaluation) -> None:
    federation = evaluation.real.federation
    silos = tuple(RemoteSilo.of(silo.name, silo.groups, federation.shape) for silo in federation.silos)
    at_server = replace(evaluation.real, federation=replace(federation, silos=silos), skipped=set())
    remote = replace(evaluation, real=at_server)
    for metric in ("likelihood", "probe", "memorisation", "gradients"):
        with pytest.warns(FedloomWarning, match=f"'{metric}' is left out: the records of silos stay with them"):
            assert measured(metric, remote) == {}
    assert measured("spread", remote) == measured("spread", evaluation)
