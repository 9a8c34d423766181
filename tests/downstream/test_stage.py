from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from downstream.gaussians import config, lopsided, records
from fedloom.downstream.heads import Heads
from fedloom.downstream.stage import downstream
from fedloom.errors import ConfigError, DataError, FedloomWarning
from fedloom.experiment import Run, train
from fedloom.federation.records import Federation, Records, Silo
from fedloom.reports.downstream import read_downstream

ROWS = ["silo-only", "synthetic-only", "synthetic-only+prior", "mixture", "mixture+prior", "centralised"]
PRIVATE = ("privacy.mechanism=dp-sgd", "privacy.epsilon=4", "privacy.delta=1e-5", "privacy.accountant=rdp")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(config("moments"), tmp_path_factory.mktemp("moments") / "run", lopsided())


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(config("moments", *PRIVATE), tmp_path_factory.mktemp("private") / "run", lopsided())


@pytest.fixture(scope="module")
def found(run: Run) -> dict[str, Any]:
    return downstream(run, synthetic=1500, federation=lopsided())


def test_every_head_is_scored_for_everybody_and_for_each_silo(found: dict[str, Any], run: Run) -> None:
    assert list(found["rows"]) == ROWS
    for row in ROWS:
        for test in ("global", "silo"):
            of_silos = [silo["rows"][row][test]["accuracy"] for silo in found["silos"]]
            assert found["rows"][row][test]["accuracy"] == pytest.approx(sum(of_silos) / 3)
    assert found["epsilon"] is None
    assert found["guarantee"] == "no DP guarantee"
    assert json.loads((run.folder.path / "downstream.json").read_text()) == found == run.folder.downstream


def test_synthetic_records_teach_a_silo_the_classes_that_it_lacks(found: dict[str, Any]) -> None:
    rows = found["rows"]
    third = found["silos"][2]["rows"]
    assert third["silo-only"]["global"]["accuracy"] < 2 / 3  # it has never met a bee
    assert third["synthetic-only"]["global"]["accuracy"] > 0.8
    assert rows["mixture"]["global"]["accuracy"] > rows["silo-only"]["global"]["accuracy"] + 0.05
    assert rows["centralised"]["global"]["accuracy"] > rows["silo-only"]["global"]["accuracy"] + 0.1
    for test in ("global", "silo"):
        for name, gain in found["gain"][test].items():
            assert gain == pytest.approx(rows["mixture"][test][name] - rows["silo-only"][test][name])


def test_a_silos_test_is_weighed_by_its_own_classes(found: dict[str, Any], run: Run) -> None:
    """On a test of equal classes, global accuracy and balanced accuracy agree; at a silo they do not."""
    for silo in found["silos"]:
        scores = silo["rows"]["synthetic-only"]
        assert scores["global"]["accuracy"] == pytest.approx(scores["global"]["balanced_accuracy"])
        assert scores["silo"]["accuracy"] != pytest.approx(scores["silo"]["balanced_accuracy"])
    # The third silo has no bees, so that its own head is right at home.
    assert found["silos"][2]["rows"]["silo-only"]["silo"]["accuracy"] > 0.85


def test_the_silos_prior_helps_at_home(found: dict[str, Any]) -> None:
    rows = found["rows"]
    assert rows["synthetic-only+prior"]["silo"]["accuracy"] > rows["synthetic-only"]["silo"]["accuracy"]
    assert rows["synthetic-only+prior"]["global"]["accuracy"] < rows["synthetic-only"]["global"]["accuracy"]


def test_retrieval_finds_classes_among_synthetic_records_that_the_silo_lacks(found: dict[str, Any]) -> None:
    assert found["retrieval"]["nearest"] == 10
    assert 1 / 3 < found["retrieval"]["silo-only"] < found["retrieval"]["synthetic-only"] < 1


@pytest.mark.parametrize(("choice", "size"), [("shared", 1), ("class", 3)])
def test_lambda_is_shared_or_of_each_class(run: Run, choice: str, size: int) -> None:
    other = downstream(run, choice=choice, synthetic=300, federation=lopsided())
    lambdas = [silo["lambda"]["mixture"] for silo in other["silos"]]
    if choice == "shared":
        assert len(set(lambdas)) == size
    else:
        assert [len(each) for each in lambdas] == [size] * 3
    assert other["sentences"] == []


@pytest.mark.parametrize("choice", ["silo", "shared", "class"])
def test_a_private_run_keeps_its_guarantee_unless_counts_leave_the_silos(private: Run, choice: str) -> None:
    found = downstream(private, choice=choice, synthetic=300, federation=lopsided())
    assert read_downstream(private.folder.path / "downstream.json").guarantee == found["guarantee"]
    if choice == "shared":
        ((name, cost),) = found["payloads"].items()
        assert name == "validation hits"
        assert "exact counts" in cost
        assert "leave each silo" in cost
        assert found["guarantee"] == f"no DP guarantee: {cost}"
        assert found["epsilon"] is found["delta"] is None
    else:
        assert found["payloads"] == {}
        assert found["guarantee"].startswith("(3.9")
        assert 3.9 < found["epsilon"] <= 4
        assert found["delta"] == 1e-5


def test_without_validation_records_there_is_no_mixture(tmp_path: Path) -> None:
    data = lopsided(validation=False)
    run = train(config("moments"), tmp_path / "run", data)
    with pytest.warns(FedloomWarning, match=r"no mixture: data\.validation = 0 leaves the silos no records"):
        found = downstream(run, choice="shared", synthetic=300, federation=data)
    assert found["payloads"] == {}
    assert [row for row in ROWS if "mixture" not in row] == list(found["rows"])
    assert found["gain"] == {}
    assert all(silo["lambda"] == {} for silo in found["silos"])


def test_fed_lambda_mixes_the_federated_head(tmp_path: Path) -> None:
    settings = config("linear_head", "rounds=5", "local.learning_rate=0.05")
    run = train(settings, tmp_path / "run", lopsided())
    found = downstream(run, federation=lopsided())
    assert list(found["rows"]) == ["silo-only", "federated", "mixture", "centralised"]
    model, test = run.generator().model("all"), lopsided().test
    right = (model.logits(test.x).argmax(1) == test.y).double().mean().item()  # type: ignore[operator, union-attr]
    assert found["rows"]["federated"]["global"]["accuracy"] == pytest.approx(right)
    assert found["rows"]["federated"]["global"]["accuracy_deviation"] == 0
    assert "synthetic-only" not in found["retrieval"]


def test_labels_as_at_each_silo_teach_nobody_a_new_class(tmp_path: Path) -> None:
    """The authors' way: as many synthetic records of a class as the silo has real ones."""
    run = train(config("dp_cvae", "method.labels=local"), tmp_path / "run", lopsided())
    found = downstream(run, synthetic=300, federation=lopsided())
    scores = [silo["rows"]["synthetic-only"]["global"]["accuracy"] for silo in found["silos"]]
    assert len(set(scores)) > 1  # each silo has a head of its own
    assert scores[2] <= 2 / 3


@pytest.mark.parametrize(("labels", "share"), [("local", (1 / 2, 0)), ("global-dp", (1 / 3, 1 / 3))])
def test_heads_learn_from_labels_without_a_tail(tmp_path: Path, labels: str, share: tuple[float, float]) -> None:
    """The third silo has no bees; with labels as at home it gets none, and else as many as of the others."""
    data = lopsided()
    run = train(config("dp_cvae", f"method.labels={labels}", "method.label_exponent=0"), tmp_path / "run", data)
    third = Heads(data, run.generator(), 300, "", 0, labels == "local").common[2]
    assert third.shares is not None
    assert third.y is not None
    assert third.shares[:2].tolist() == pytest.approx(share)
    assert torch.bincount(third.y, minlength=3)[:2].tolist() == pytest.approx([300 * each for each in share], abs=40)


def test_one_silo_has_no_centralised_row(tmp_path: Path) -> None:
    alone = replace(lopsided(), silos=lopsided().silos[:1])
    found = downstream(train(config("moments"), tmp_path / "run", alone), synthetic=300, federation=alone)
    assert list(found["rows"]) == ROWS[:-1]


NAMES = tuple(f"{kind}|sex={sex}" for kind in ("ant", "bee") for sex in "fm")


def sexed(conditioned: bool) -> Federation:
    """Ants and bees, each of two sexes that lie about axes of their own; classes tell the sex, or not."""

    def known(seed: int, count: int) -> Records:
        drawn = records(seed, count, count, count, count)
        y = drawn.y if conditioned else drawn.y // 2
        return replace(drawn, y=y, attributes=torch.eye(2)[drawn.y % 2])

    silos = tuple(Silo(f"silo-{i}", known(i, 20), known(9 + i, 8)) for i in range(2))
    names = NAMES if conditioned else ("ant", "bee")
    return Federation("sexed", silos, known(99, 30), ("all",), names, ("sex=f", "sex=m"))


@pytest.mark.parametrize(
    ("conditioned", "attribute", "kinds"), [(True, "", NAMES), (False, "sex", NAMES), (False, "", ("ant", "bee"))]
)
def test_answers_are_plain_classes_and_the_worst_group_is_told(
    tmp_path: Path, conditioned: bool, attribute: str, kinds: tuple[str, ...]
) -> None:
    data = sexed(conditioned)
    run = train(config("moments", *(["data.condition=sex"] if conditioned else [])), tmp_path / "run", data)
    found = downstream(run, synthetic=400, federation=data, attribute=attribute)
    assert found["attribute"] == ("sex" if len(kinds) == 4 else "")
    for row, groups in found["groups"].items():
        scores = found["rows"][row]["global"]
        assert tuple(groups) == kinds
        # Groups are of one size, so that their mean is the accuracy.
        assert sum(groups.values()) / len(kinds) == pytest.approx(scores["accuracy"])
        if row in ("synthetic-only", "centralised"):  # one head for all silos
            assert scores["worst_group"] == pytest.approx(min(groups.values()))
    scores = found["rows"]["synthetic-only"]["global"]
    assert scores["accuracy"] > 0.75  # of two classes, not of four
    assert 0.5 < scores["worst_group"] < scores["accuracy"]


def test_a_private_cvae_is_told_the_class_and_the_condition(tmp_path: Path) -> None:
    data = sexed(conditioned=True)
    run = train(config("dp_cvae", "data.condition=sex", *PRIVATE), tmp_path / "run", data)
    assert run.generator().sample(5, group="all", label="bee|sex=m").shape == (5, 6)
    assert run.generator().label_shares.shape == (4,)  # noisy counts of both
    found = downstream(run, synthetic=300, federation=data)
    assert tuple(found["groups"]["synthetic-only"]) == NAMES
    assert 3.9 < found["epsilon"] <= 4


@pytest.mark.parametrize("conditioned", [True, False])
def test_a_silos_worst_group_is_of_those_that_it_has(tmp_path: Path, conditioned: bool) -> None:
    data = sexed(conditioned)
    train_records = data.silos[0].train
    assert train_records.attributes is not None
    women = torch.nonzero(train_records.attributes[:, 0]).flatten()
    first = replace(data.silos[0], train=train_records.take(women), validation=None)
    data = replace(data, silos=(first, replace(data.silos[1], validation=None)))
    run = train(config("moments", *(["data.condition=sex"] if conditioned else [])), tmp_path / "run", data)
    with pytest.warns(FedloomWarning, match="no mixture"):
        found = downstream(run, synthetic=400, federation=data, attribute="sex")
    groups, own = found["groups"]["synthetic-only"], found["silos"][0]["rows"]["synthetic-only"]
    women_only = [groups["ant|sex=f"], groups["bee|sex=f"]]
    assert own["silo"]["worst_group"] == pytest.approx(min(women_only))
    assert own["silo"]["accuracy"] == pytest.approx(sum(women_only) / 2)
    assert own["global"]["worst_group"] == pytest.approx(min(groups.values()))


@pytest.mark.parametrize("where", ["test", "train", "validation"])
def test_records_that_do_not_tell_their_group_are_refused(tmp_path: Path, where: str) -> None:
    """One record whose sex nobody noted is of no group; it must not be counted as the first sex."""
    data = sexed(conditioned=False)
    table = data.test if where == "test" else getattr(data.silos[1], where)
    attributes = table.attributes.clone()
    attributes[3] = 0.0
    unknown = replace(table, attributes=attributes)
    if where == "test":
        data = replace(data, test=unknown)
    else:
        data = replace(data, silos=(data.silos[0], replace(data.silos[1], **{where: unknown})))
    run = train(config("moments"), tmp_path / "run", data)
    done: list[str] = []
    with pytest.raises(ConfigError, match=r"^--attribute = 'sex', but some records do not say what theirs is$"):
        downstream(run, synthetic=50, federation=data, attribute="sex", progress=done.append)
    assert done == []  # nothing was trained
    assert downstream(run, synthetic=50, federation=data)["attribute"] == ""


@pytest.mark.parametrize("everybody", [True, False])
def test_a_silo_is_scored_on_records_that_it_held_out_itself(tmp_path: Path, everybody: bool) -> None:
    """All bees were held out by the second silo; without records of the third's, everybody's are weighed."""
    data, test = lopsided(), lopsided().test
    home = torch.arange(300) % 3
    home[test.y == 1] = 1
    if not everybody:
        home[home == 2] = -1
    data = replace(data, test=replace(test, home=home))
    run = train(config("moments"), tmp_path / "run", data)
    found = downstream(run, synthetic=300, federation=data)
    head = Heads(data, run.generator(), 300, "", run.config.seed, False).common[0].head
    right = head.probabilities(test.x).argmax(dim=1) == test.y
    told = "the records that each silo itself held out" if everybody else "weighed as each silo's classes are"
    assert told in found["tests"]["silo"]
    for number, silo in enumerate(found["silos"]):
        scores = silo["rows"]["synthetic-only"]
        assert scores["global"]["accuracy"] == pytest.approx(right.double().mean().item())
        if everybody:
            assert scores["silo"]["accuracy"] == pytest.approx(right[home == number].double().mean().item())
    lacking = "silo 'silo-2' held out no records of its own, so everybody's are weighed for each silo"
    assert (lacking in found["sentences"]) is not everybody


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"choice": "silos"}, "--lambda: unknown choice 'silos'; did you mean 'silo'"),
        ({"synthetic": 0}, "--synthetic = 0 must be at least 1"),
        ({"pathway": "z"}, "--pathway: unknown pathway 'z'"),
        ({"attribute": "sex"}, "--attribute: unknown attribute 'sex'"),
    ],
)
def test_mistakes_are_named(run: Run, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        downstream(run, federation=lopsided(), **options)


def test_what_has_no_labels_is_refused(tmp_path: Path) -> None:
    data = lopsided()
    unlabelled = replace(data, test=replace(data.test, y=torch.full((300,), -1)))
    blind = train(config("moments"), tmp_path / "one", unlabelled)
    with pytest.raises(ConfigError, match="'gaussians' has no held-out records with labels to score classifiers on"):
        downstream(blind, federation=unlabelled)
    images = train(config("fedvae"), tmp_path / "two", data)
    with pytest.raises(ConfigError, match="method 'fedvae' generates records without labels"):
        downstream(images, federation=data)
    nameless = replace(data, classes=())
    plain = train(config("fedvae"), tmp_path / "three", nameless)
    with pytest.raises(DataError, match="learns classes, and the records of 'gaussians' have no classes"):
        downstream(plain, federation=nameless)
