"""Attacks on generators whose memory is known: a table of images, each given out for an equal share of the noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fedloom.config import AuditConfig, EvaluationConfig
from fedloom.errors import ConfigError
from fedloom.evaluation.attacks import Target, targets_of, trained_on
from fedloom.evaluation.auditing import ATTACKS, Audit, Claim, Effort
from fedloom.evaluation.evidence import Evaluation, Real
from fedloom.federation.canaries import with_canaries
from fedloom.federation.outliers import OUTLIER
from fedloom.federation.records import Federation, Records, Silo, concatenate
from fedloom.methods.base import Method, Pathway, SampleInputs
from fedloom.methods.generator import Generator
from fedloom.methods.steps import Merged, ServerState
from fedloom.sharing.plan import GLOBAL, SILO, UPLOAD, BlockKey, BlockRule, SharingPlan
from fedloom.streams import Streams

SIDE = 6


class Table(nn.Module):
    """Gives out image k where the noise lies in the k-th of equally likely intervals, smoothly from one to the next."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.register_buffer("images", torch.zeros(count, 1, SIDE, SIDE))

    def forward(self, z: Tensor) -> Tensor:
        count = len(self.images)
        place = count * torch.special.ndtr(z) - 0.5
        weights = torch.softmax(-40 * (place - torch.arange(count)).square(), dim=1)
        return torch.einsum("bk,kchw->bchw", weights, self.images)


class Model(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.decoder = Table(count)


def from_table(model: nn.Module, inputs: SampleInputs) -> Tensor:
    assert isinstance(model, Model)
    return model.decoder(inputs.noise["z"])


def images(seed: int, count: int, bright: bool = False) -> Records:
    """Typical images are dark with a bright column, outliers bright with a dark row; all with noise of their own."""
    draw = torch.Generator().manual_seed(seed)
    place = torch.randint(SIDE, (count,), generator=draw)
    lines = nn.functional.one_hot(place, SIDE).float()
    x = 0.8 * (1 - lines)[:, None, :, None] if bright else 0.8 * lines[:, None, None, :]
    x = x.expand(-1, 1, SIDE, SIDE) + 0.2 * torch.rand(count, 1, SIDE, SIDE, generator=draw)
    return Records(x, torch.full((count,), int(bright)), torch.zeros(count, dtype=torch.int64))


def federation(canaries: int = 0) -> Federation:
    """One silo of 30 typical records with 10 outliers, one of 30 without."""
    first = concatenate([images(0, 30), images(1, 10, bright=True)])
    silos = (Silo("north", first), Silo("south", images(2, 30)))
    plain = Federation("toy", silos, images(3, 80), ("all",), ("typical", OUTLIER))
    plain = replace(plain, unseen_outliers=images(4, 40, bright=True))
    return with_canaries(plain, AuditConfig(canaries=canaries), Streams(0))


def evaluation(data: Federation, memory: Mapping[str, Records], decoder: BlockRule = GLOBAL) -> Evaluation:
    """A run whose server holds, for each owner, a decoder that knows some records by heart."""
    plan = SharingPlan({"decoder": decoder}, data.groups)
    sizes = {owner: len(records) for owner, records in memory.items()}
    method = Method(
        name="table",
        plan=plan,
        build=lambda site: Model(sizes.get(f"silo={site.name}", sizes.get("all", 1))),
        phases=(),
        server_step=Merged(),
        pathways={"z": Pathway({"z": (1,)}, from_table, "", ("decoder",))},
    )
    blocks = {BlockKey("decoder", owner): {"images": records.x} for owner, records in memory.items()}
    real = Real(data, EvaluationConfig(), Streams(0))
    return Evaluation(real, Generator(method, ServerState(blocks), data.groups))


def attacked(name: str, found: Evaluation, claims: Mapping[str, Claim] | None = None, records: int = 60):  # type: ignore[no-untyped-def]
    return ATTACKS[name](Audit(found, claims or {}, Effort(records=records, samples=1000)))


def typical_of(data: Federation) -> Records:
    (target,) = targets_of(evaluation(data, {"all": images(0, 1)}))
    return trained_on(data, target).typical


def test_a_generator_that_knows_its_outliers_by_heart_exposes_them_all() -> None:
    data = federation()
    everything = concatenate([silo.train for silo in data.silos])
    rows = attacked("outliers", evaluation(data, {"all": everything})).values
    assert [row["way"] for row in rows] == ["reconstructed", "generated"]
    for row in rows:
        assert row["counts"] == {"outliers": 10, "unseen_outliers": 40, "typical": 60, "unseen_typical": 60}
        assert row["outliers"]["value"] == 1
        assert row["memorised"]
        assert row["typical"]["value"] >= 0.94  # known by heart as well; the rule leaves out the farthest 5 %
        assert row["unseen_typical"]["value"] < 0.1


def test_a_generator_that_never_saw_outliers_exposes_none() -> None:
    data = federation()
    found = attacked("outliers", evaluation(data, {"all": typical_of(data)}))
    for row in found.values:
        assert row["outliers"]["value"] == row["unseen_outliers"]["value"] == 0
        assert not row["memorised"]
    assert found.sentences[0].startswith("outliers: group=all: 0.0% (0.0% to 30.8%) of outliers are reconstructed")


def test_a_generator_that_has_learned_nothing_exposes_nobody() -> None:
    """Grey is nearer to a bright outlier than to any dark record, but no nearer to this one than to other outliers."""
    data = federation()
    grey = replace(images(0, 3), x=torch.full((3, 1, SIDE, SIDE), 0.5))
    for row in attacked("outliers", evaluation(data, {"all": grey})).values:
        assert row["outliers"]["value"] <= 0.1, "one at most can be nearest to grey"
        assert row["unseen_outliers"]["value"] <= 0.05


def test_a_control_without_outliers_says_so() -> None:
    data = federation()
    silos = tuple(Silo(silo.name, silo.train.take(torch.arange(30))) for silo in data.silos)
    control = replace(data, silos=silos)
    found = attacked("outliers", evaluation(control, {"all": typical_of(control)}))
    assert found.values[0]["outliers"] is None
    assert (
        "no outlier was put in; reconstructed recognisably are 0.0% of outliers never trained on" in found.sentences[0]
    )
    nothing = attacked("outliers", evaluation(replace(data, unseen_outliers=None), {"all": images(0, 5)}))
    assert nothing.values == []
    assert "none were put in" in nothing.sentences[0]


def test_uploaded_decoders_are_attacked_one_by_one_with_their_own_records() -> None:
    """North's decoder knows its outliers by heart, south's has none to show."""
    data = federation()
    memory = {f"silo={silo.name}": silo.train for silo in data.silos}
    run = evaluation(data, memory, UPLOAD)
    targets = targets_of(run)
    assert [target.name for target in targets] == ["silo=north", "silo=south"]
    assert [len(trained_on(data, target).outliers) for target in targets] == [10, 0]
    rows = attacked("outliers", run).values
    assert {row["target"] for row in rows} == {"silo=north"}
    assert rows[0]["outliers"]["value"] == 1


def test_pictures_show_outlier_output_and_nearest_typical_record() -> None:
    data = federation()
    everything = concatenate([silo.train for silo in data.silos])
    (pictures,) = attacked("outliers", evaluation(data, {"all": everything})).pictures.values()
    assert pictures.outliers.shape == pictures.outputs.shape == pictures.typical.shape == (10, 1, SIDE, SIDE)
    torch.testing.assert_close(pictures.outputs, pictures.outliers, atol=1e-3, rtol=0)
    known = typical_of(data).x
    assert all(bool((known == row).flatten(1).all(dim=1).any()) for row in pictures.typical)


def test_what_a_silo_never_saw_is_of_the_classes_that_it_saw() -> None:
    """A silo of dark images beside one of bright ones: a dark image that neither saw must not look like a member."""
    dark, bright = images(0, 30), images(1, 30, bright=True)
    test = concatenate([images(3, 40), images(4, 40, bright=True)])
    data = Federation("toy", (Silo("dark", dark), Silo("bright", bright)), test, ("all",), ("dark", "bright"))
    averages = replace(images(5, 6), x=torch.stack([images(s, 200).x.mean(dim=0) for s in range(6)]))
    found = attacked("membership", evaluation(data, {"silo=dark": averages}, UPLOAD), records=80).values
    assert {row["others"] for row in found} == {20}  # half of the dark ones; the rest is for reference
    by_output = next(row for row in found if row["attack"] == "closest output")
    assert by_output["area"] == pytest.approx(0.5, abs=0.2)


@pytest.mark.parametrize("attack", ["closest output", "nearest sample", "density of samples"])
def test_members_are_told_from_others_where_they_were_learned_by_heart_and_only_there(attack: str) -> None:
    data = federation()
    areas = {}
    for name, memory in {"memoriser": typical_of(data), "innocent": images(9, 100)}.items():
        rows = attacked("membership", evaluation(data, {"all": memory})).values
        (row,) = (row for row in rows if row["attack"] == attack)
        areas[name] = row["area"]
        assert (row["members"], row["others"]) == (60, 30)
    assert areas["memoriser"] > 0.9
    assert areas["innocent"] == pytest.approx(0.5, abs=0.15)


def test_membership_without_a_search_leaves_out_the_closest_output_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found = evaluation(federation(), {"all": images(9, 100)})
    whole = attacked("membership", found).values
    monkeypatch.setattr(Target, "reconstructions", None)
    quick = ATTACKS["membership"](Audit(found, {}, Effort(records=60, samples=1000, search=False))).values
    assert quick == [row for row in whole if row["attack"] != "closest output"] != whole


def test_canaries_that_were_learned_by_heart_refute_a_small_claim() -> None:
    data = federation(canaries=200)
    learned = concatenate([found.trained for found in data.canaries])
    claims = {"north": Claim(0.5, 1e-5), "south": Claim(1.0, 1e-6)}
    found = attacked("canaries", evaluation(data, {"all": learned}), claims)
    assert found.values["claimed"] == 1.0, "the weaker of both"
    assert found.values["delta"] == 1e-5
    assert found.values["scores"] == {"north": "closest output", "south": "closest output"}
    assert found.values["lower_bound"] > 2
    assert found.values["refuted"]
    assert "the claim of epsilon 1 is refuted" in found.sentences[0]


def test_canaries_that_left_no_trace_refute_nothing() -> None:
    data = federation(canaries=200)
    found = attacked("canaries", evaluation(data, {"all": typical_of(data)}), {"north": Claim(0.1, 1e-5)})
    assert found.values["claimed"] is None, "south claims nothing"
    assert found.values["lower_bound"] < 0.1
    assert not found.values["refuted"]
    alone = attacked(
        "canaries", evaluation(data, {"all": typical_of(data)}), dict.fromkeys(("north", "south"), Claim(9, 1e-5))
    )
    assert "no evidence of privacy" in alone.sentences[0]


def test_runs_without_canaries_or_generators_are_told_so() -> None:
    assert (
        "so no lower bound of epsilon could be found" in attacked("canaries", evaluation(federation(), {})).sentences[0]
    )
    silent = evaluation(federation(canaries=20), {}, SILO)
    assert targets_of(silent) == []
    assert attacked("canaries", silent).values is None
    assert "their coins could not be guessed" in attacked("canaries", silent).sentences[0]
    assert "nothing that generates left a silo" in attacked("membership", silent).sentences[0]


def test_canaries_are_no_members() -> None:
    """They were put in on purpose: membership is about the silo's own records."""
    assert len(typical_of(federation(canaries=100))) == 60


def test_confidence_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"confidence = 1\.5 must be at least 0\.5 and below 1"):
        Effort(confidence=1.5)
