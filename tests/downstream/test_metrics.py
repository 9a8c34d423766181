"""Metrics of labelled vectors against numbers that can be derived."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from downstream.gaussians import config, lopsided
from fedloom.config import EvaluationConfig
from fedloom.errors import FedloomWarning
from fedloom.evaluation.evidence import Evaluation
from fedloom.evaluation.metric import METRICS
from fedloom.evaluation.posterior import divergence
from fedloom.evaluation.sliced_wasserstein import sliced_wasserstein
from fedloom.experiment import Run, train
from fedloom.models.gaussian import DiagonalGaussian
from fedloom.models.labelled import ConditionalVAE, LinearHead
from fedloom.streams import Streams

SETTINGS = EvaluationConfig(metrics=(), samples=300, trackers=())


def evaluated(run: Run) -> Evaluation:
    return run.evaluation(settings=SETTINGS, federation=lopsided())[1]


@pytest.fixture(scope="module")
def moments(tmp_path_factory: pytest.TempPathFactory) -> Evaluation:
    return evaluated(train(config("moments"), tmp_path_factory.mktemp("moments") / "run", lopsided()))


@pytest.fixture(scope="module")
def cvae(tmp_path_factory: pytest.TempPathFactory) -> Evaluation:
    return evaluated(train(config("dp_cvae"), tmp_path_factory.mktemp("cvae") / "run", lopsided()))


def test_a_shift_is_as_far_as_its_mean_square_along_directions() -> None:
    x, shift = torch.randn(50, 6, generator=torch.Generator().manual_seed(1)), torch.tensor([3.0, 0, 0, 0, 0, 0])
    drawn = Streams(0).normal("sliced-wasserstein", 256, 6).double()
    along = drawn[:, 0] / drawn.norm(dim=1)
    expected = 3 * along.square().mean().sqrt().item()
    assert sliced_wasserstein(x, x + shift) == pytest.approx(expected, rel=1e-5)
    assert expected == pytest.approx(3 / math.sqrt(6), rel=0.1)  # over all directions
    order = torch.randperm(50, generator=torch.Generator().manual_seed(2))
    assert sliced_wasserstein(x, x[order]) < 1e-12


def test_a_good_generator_scores_well(moments: Evaluation) -> None:
    utility = METRICS["utility"].measure(moments)
    assert list(utility) == [f"utility/synthetic-{name}/n300" for name in ("accuracy", "balanced-accuracy", "macro-f1")]
    assert all(value > 0.75 for value in utility.values())
    ((key, distance),) = METRICS["sliced-wasserstein"].measure(moments).items()
    assert key == "sliced-wasserstein/directions-256/n300/group=all"
    assert distance < 0.1
    least, average, most = (
        METRICS["class-variance"].measure(moments)[f"class-variance/{name}/n300/group=all"]
        for name in ("least", "mean", "most")
    )
    assert 0.5 < least <= average <= most < 2


def test_an_untrained_decoder_is_far_from_real_records(cvae: Evaluation, moments: Evaluation) -> None:
    (near,), (far,) = (METRICS["sliced-wasserstein"].measure(each).values() for each in (moments, cvae))
    assert far > 2 * near


def test_the_variance_of_a_class_is_that_of_its_own_samples(moments: Evaluation) -> None:
    test, labels = lopsided().test, moments.generator.labels(300, seed=0)
    ratios = [
        (moments.samples["all"][labels == label].var(0).sum() / test.x[test.y == label].var(0).sum()).item()
        for label in range(3)
    ]
    found = METRICS["class-variance"].measure(moments).values()
    assert list(found) == pytest.approx([sum(ratios) / 3, min(ratios), max(ratios)], rel=1e-5)


def test_the_divergence_of_two_normal_distributions_is_the_textbooks() -> None:
    wide, wider = (torch.tensor([[2 * math.log(width)]]) for width in (2.0, 3.0))
    one, other = DiagonalGaussian(torch.tensor([[1.0]]), wide), DiagonalGaussian(torch.tensor([[0.5]]), wider)
    assert divergence(one, other).item() == pytest.approx(math.log(3 / 2) + (4 + 0.25) / (2 * 9) - 0.5)


def test_the_posteriors_divergence_is_that_of_the_silos_own_encoder(cvae: Evaluation) -> None:
    found, test = METRICS["posterior"].measure(cvae), lopsided().test
    values = [found[f"kl/nats/n300/silo=silo-{number}"] for number in range(3)]
    assert found["kl/nats/n300"] == pytest.approx(sum(values) / 3)
    assert len(set(values)) == 3
    model = cvae.silo_model(lopsided().silos[1])
    assert isinstance(model, ConditionalVAE)
    with torch.no_grad():
        posterior = model.encode(test.x, test.y)
    # Against N(0, I), latent by latent.
    variance = posterior.log_variance.exp()
    expected = 0.5 * (variance + posterior.mean.square() - 1 - posterior.log_variance).sum(1).mean()
    assert values[1] == pytest.approx(expected.item(), rel=1e-5)


def test_a_heads_gradients_are_as_long_as_can_be_derived(tmp_path: Path) -> None:
    run = train(config("linear_head"), tmp_path / "run", lopsided())
    ((key, median),) = METRICS["gradients"].measure(evaluated(run)).items()
    assert key == "gradient-norm/head-median/n178"  # 60 + 60 + 58 records, all of them
    model = run.generator().model("all")
    assert isinstance(model, LinearHead)
    norms = []
    for silo in lopsided().silos:
        error = torch.softmax(model.logits(silo.train.x), 1) - torch.eye(3)[silo.train.y]
        norms.append(error.norm(dim=1) * math.sqrt(2))  # times the length of (x, 1), and x has length 1
    assert median == pytest.approx(torch.cat(norms).median().item(), rel=1e-4)


@pytest.mark.parametrize(
    ("metric", "method", "reason"),
    [
        ("posterior", "moments", "it needs a conditional VAE whose encoder is known"),
        ("gradients", "moments", "no silo's whole model is known"),
        ("utility", "fedvae", "the method's first pathway is not told which class to generate"),
        ("class-variance", "fedvae", "the method's first pathway is not told which class to generate"),
    ],
)
def test_what_does_not_apply_is_left_out_with_a_reason(metric: str, method: str, reason: str, tmp_path: Path) -> None:
    evaluation = evaluated(train(config(method), tmp_path / "run", lopsided()))
    with pytest.warns(FedloomWarning, match=f"metric '{metric}' is left out: {reason}"):
        assert METRICS[metric].measure(evaluation) == {}
