"""Train on synthetic, test on real: against samples whose worth is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedloom.config import EvaluationConfig
from fedloom.errors import FedloomWarning
from fedloom.evaluation import downstream
from fedloom.evaluation.evidence import Evaluation
from fedloom.evaluation.metric import METRICS, metric_title
from fedloom.experiment import Run, train
from fedloom.federation.records import Federation, Records
from labelled_images import CLASSES, GROUPS, picture_config, picture_federation, pictures
from support import tiny_config

COUNT = 60


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(picture_config("class_vae"), tmp_path_factory.mktemp("run") / "run", picture_federation())


def evaluated(run: Run, federation: Federation | None = None) -> Evaluation:
    settings = EvaluationConfig(metrics=(), samples=COUNT, trackers=())
    return run.evaluation(settings=settings, federation=federation or picture_federation())[1]


def with_samples(evaluation: Evaluation, label_of: dict[int, int]) -> Evaluation:
    """The same run, whose samples are records of each group, all of them called by other names."""
    tables: dict[str, Records] = {group: pictures(number, COUNT, 70 + number) for number, group in enumerate(GROUPS)}
    names = torch.tensor([label_of[number] for number in range(len(CLASSES))])
    evaluation.__dict__["samples"] = {group: table.x for group, table in tables.items()}
    evaluation.__dict__["labels"] = {group: names[table.y] for group, table in tables.items()}
    return evaluation


def test_samples_like_records_are_worth_as_much_as_records(run: Run) -> None:
    found = METRICS["downstream"].measure(with_samples(evaluated(run), {0: 0, 1: 1, 2: 2}))
    assert found == {
        f"downstream/{source}-{name}/n120": 1.0
        for source in ("synthetic", "real")
        for name in ("accuracy", "worst-class")
    } | {"obeyed/class-cnn/n120": 1.0}


def test_labels_that_are_not_obeyed_are_worth_nothing(run: Run) -> None:
    found = METRICS["downstream"].measure(with_samples(evaluated(run), {0: 1, 1: 2, 2: 0}))
    assert found["downstream/synthetic-accuracy/n120"] == 0.0
    assert found["obeyed/class-cnn/n120"] == 0.0
    assert found["downstream/real-accuracy/n120"] == 1.0


def test_a_class_that_samples_confuse_is_the_worst(run: Run) -> None:
    """Half of the held-out records are of class 1, a quarter each of 0 and 2, which are called by each other's name."""
    found = METRICS["downstream"].measure(with_samples(evaluated(run), {0: 2, 1: 1, 2: 0}))
    assert found["downstream/synthetic-accuracy/n120"] == 0.5
    assert found["downstream/synthetic-worst-class/n120"] == 0.0


def test_networks_of_runs_differ_by_what_they_learn_from_alone(run: Run, tmp_path: Path) -> None:
    """Runs of different seeds, and the same training records."""
    other = train(picture_config("class_vae", "seed=9"), tmp_path / "run", picture_federation())
    learned = []
    for each in (evaluated(run), evaluated(other)):
        training = downstream._training(each)
        assert training is not None
        learned.append(downstream._learned(each, training).probabilities(picture_federation().test.x))
    assert torch.equal(*learned)


def test_where_records_stay_with_silos_samples_are_measured_alone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluation = evaluated(run)
    monkeypatch.setattr(Federation, "is_remote", True)
    assert list(METRICS["downstream"].measure(evaluation)) == [
        "downstream/synthetic-accuracy/n120",
        "downstream/synthetic-worst-class/n120",
    ]


def test_people_read_what_was_learned_from() -> None:
    assert metric_title("downstream/synthetic-accuracy/n120") == "A network that learned from samples (accuracy)"
    assert metric_title("obeyed/class-cnn/n120") == "Samples of the class that was asked for (class-cnn)"


@pytest.mark.parametrize(
    ("unlabelled", "reason"),
    [(True, "some held-out records have no label"), (False, "the method's first pathway is not told which class")],
)
def test_what_does_not_apply_is_left_out_with_a_reason(
    unlabelled: bool, reason: str, run: Run, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if unlabelled:
        evaluation = evaluated(run)
        test = evaluation.real.federation.test
        object.__setattr__(
            evaluation.real,
            "federation",
            replace(evaluation.real.federation, test=replace(test, y=test.y.clone().fill_(-1))),
        )
    else:
        other = train(tiny_config("rounds=1"), tmp_path_factory.mktemp("other") / "run")
        evaluation = other.evaluation(settings=EvaluationConfig(metrics=(), samples=COUNT, trackers=()))[1]
    with pytest.warns(FedloomWarning, match=f"metric 'downstream' is left out: {reason}"):
        assert METRICS["downstream"].measure(evaluation) == {}
