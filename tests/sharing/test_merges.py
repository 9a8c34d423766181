"""Ways to merge that withstand silos which send what they should not, each by exact numbers, in every engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from fedloom.cli import app
from fedloom.config import Config, load_config
from fedloom.engines.base import Job, initial_state
from fedloom.engines.distributed import of_sums
from fedloom.engines.fused import FusedEngine, FusedOptions
from fedloom.engines.reference import ReferenceEngine
from fedloom.engines.training import Trainer
from fedloom.errors import ConfigError, FedloomWarning
from fedloom.experiment import Experiment
from fedloom.federation.records import Federation, Records, Silo
from fedloom.federation.rounds import RoundContext, Site
from fedloom.methods.base import Method, OptimizerRule, Phase
from fedloom.methods.steps import Merged, ServerRound, ServerStep, Stepped
from fedloom.objectives.base import Losses, Step
from fedloom.sharing.aggregation import Aggregator, Copies, Mean, Merge, PlainSums, Sums
from fedloom.sharing.merges.median import Median
from fedloom.sharing.merges.norm_bound import NormBound
from fedloom.sharing.merges.trimmed_mean import TrimmedMean
from fedloom.sharing.plan import GLOBAL, BlockKey, SharingPlan, Tensors
from support import federation_of, tiny_config

POISON = 2.0**20
HONEST = (1.0, 2.0, 6.0)


def merged(merge: Merge, *values: float, known: float = 0.0, weights: tuple[float, ...] = ()) -> float:
    """What becomes of copies of one number."""
    copies = [{"w": torch.tensor(value)} for value in values]
    return merge(Copies(copies, weights or (1.0,) * len(values), {"w": torch.tensor(known)}))["w"].item()


@pytest.mark.parametrize(
    ("merge", "values", "expected"),
    [
        (Median(), (5.0,), 5.0),
        (Median(), (1.0, 2.0), 1.5),
        (Median(), (6.0, 1.0, 2.0), 2.0),
        (Median(), (6.0, 1.0, 2.0, POISON), 4.0),  # (2 + 6) / 2
        (Median(), (6.0, 1.0, 2.0, POISON, POISON), 6.0),
        (TrimmedMean(), (6.0, 1.0, 2.0), 2.0),
        (TrimmedMean(), (6.0, 1.0, 2.0, -POISON), 1.5),  # (1 + 2) / 2
        (TrimmedMean(trim=2), (6.0, POISON, 1.0, POISON, 2.0, 3.0), 4.5),  # (3 + 6) / 2
        # From 0, moves of 1, 2 and 6 are cut to 3: (1 + 2 + 3) / 3.
        (NormBound(bound=3.0), HONEST, 2.0),
        (NormBound(bound=3.0), (1.0, 2.0, -POISON), 0.0),
        (Mean(), (1.0, 2.0, 6.0), 3.0),
    ],
)
def test_one_number(merge: Merge, values: tuple[float, ...], expected: float) -> None:
    assert merged(merge, *values) == expected


def test_coordinates_are_merged_one_by_one() -> None:
    """The silo whose first number is in the middle is not the one whose second is."""
    copies = [{"w": torch.tensor(values)} for values in ([0.0, 9.0], [4.0, 5.0], [7.0, 1.0])]
    assert Median()(Copies(copies, (1.0, 1.0, 1.0), {}))["w"].tolist() == [4.0, 5.0]


def test_moves_are_weighed_and_measured_over_the_whole_block_from_the_servers_copy() -> None:
    """From (1, 1) moves of (3, 4) and (0, 1) have lengths 5 and 1; bound 2.5 halves the first; weights 1 and 3."""
    copies: list[Tensors] = [
        {"a": torch.tensor(4.0), "b": torch.tensor(5.0)},
        {"a": torch.tensor(1.0), "b": torch.tensor(2.0)},
    ]
    known = {"a": torch.tensor(1.0), "b": torch.tensor(1.0)}
    found = NormBound(bound=2.5)(Copies(copies, (1.0, 3.0), known))
    assert found == {"a": torch.tensor(1.375), "b": torch.tensor(2.25)}  # 1 + 1.5 / 4; 1 + (2 + 3 * 1) / 4


@pytest.mark.parametrize(("merge", "count"), [(Median(), 5), (TrimmedMean(), 5), (NormBound(bound=1.0), 5)])
def test_whole_numbers_stay_whole(merge: Merge, count: int) -> None:
    copies = [{"n": torch.tensor(count), "w": torch.zeros(1)} for count in (4, 5, 7)]
    found = merge(Copies(copies, (1.0, 1.0, 1.0), {}))["n"]
    assert (found.dtype, found.item()) == (torch.int64, count)


# A method whose only number is, after one step of one silo, the mean of the silo's records.


class Number(nn.Module):
    """One block of one number, from zero."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.body.weight)


@dataclass(frozen=True)
class Distance:
    """Half the square of how far the number is from a record."""

    @property
    def noise(self) -> Mapping[str, tuple[int, ...]]:
        return {}

    def __call__(self, model: nn.Module, step: Step) -> Losses:
        assert isinstance(model, Number)
        difference = model.body(torch.ones_like(step.batch.x[:, :1])) - step.batch.x[:, :1]
        return Losses(difference.square().sum(dim=1) / 2, {})


def build(_: Site) -> Number:
    return Number()


def trainer(merge: Merge, *values: float, sums: Sums | None = None) -> Trainer:
    """One silo for each value, which all of its four records have."""
    silos = tuple(
        Silo(
            f"silo-{n}",
            Records(torch.full((4, 1), v), torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)),
        )
        for n, v in enumerate(values)
    )
    method = Method(
        name="number",
        plan=SharingPlan({"body": GLOBAL}, ("a",)),
        build=build,
        phases=(Phase("body", ("body",), Distance(), OptimizerRule("sgd", 1.0)),),
        server_step=Merged(),
        pathways={},
        aggregator=Aggregator(merge, "equal", sums or PlainSums()),
    )
    config = tiny_config("local.steps=1", "local.batch_size=4")
    return Trainer(config, method, Federation("numbers", silos, silos[0].train, ("a",)))


def learned(engine: ReferenceEngine | FusedEngine, trained: Trainer) -> float:
    """The server's number after a round of all silos."""
    state = initial_state(trained.method, trained.federation, trained.config)
    everybody = tuple(range(len(trained.federation)))
    state, _ = engine.round(Job(state, RoundContext(1, 1, everybody), lambda _: None))
    engine.close()
    return state.server.blocks[BlockKey("body", "all")]["weight"].item()


def both(trained: Trainer) -> list[float]:
    """In the reference engine, and in the fused one by chunks of two silos."""
    return [
        learned(ReferenceEngine(trained), trained),
        learned(FusedEngine(trained, FusedOptions(torch.device("cpu"), chunk=2)), trained),
    ]


@pytest.mark.parametrize(
    ("merge", "expected"),
    [
        (Mean(), (9.0 + POISON) / 4),  # ruined
        (Median(), 4.0),
        (TrimmedMean(), 4.0),
        (NormBound(bound=3.0), 2.25),  # (1 + 2 + 3 + 3) / 4
    ],
)
def test_a_poisoned_silo_ruins_the_mean_alone(merge: Merge, expected: float) -> None:
    assert both(trainer(merge, *HONEST, POISON)) == [expected, expected]


def test_a_round_with_too_few_silos_leaves_the_block_as_it_was() -> None:
    trained = trainer(TrimmedMean(), 1.0, 2.0)
    told = (
        "block 'body@all' stays as it was in round 1: server.merge = 'trimmed-mean' with trim = 1 needs 3 copies, and 2"
    )
    with pytest.warns(FedloomWarning, match=told):
        assert both(trained) == [0.0, 0.0]


@dataclass(frozen=True)
class FixedPoint:
    """Sums of whole multiples of 1/4, as a sum that hides its parts would form them."""

    def added(self, total: Tensor | None, copy: Tensor, weight: float) -> Tensor:
        quarters = (4 * weight * copy.double()).round().long()
        return quarters if total is None else total + quarters

    def totals(self, weights: Tensor, copies: Tensor) -> Tensor:
        flat = copies.double().reshape(len(copies), -1)
        return (4 * weights[:, :, None] * flat[None]).round().long().sum(dim=1)

    def mean(self, total: Tensor, weight: float, dtype: torch.dtype) -> Tensor:
        assert total.dtype is torch.int64
        return (total.double() / 4 / weight).to(dtype)


@pytest.mark.parametrize("merge", [Mean(), NormBound(bound=8.0)])
def test_another_way_to_form_sums_needs_no_other_method_or_engine(merge: Merge) -> None:
    """1.1 is taken for 1, and 2.4 for 2.5: (1 + 2.5) / 2."""
    assert both(trainer(merge, 1.1, 2.4, sums=FixedPoint())) == [1.75, 1.75]


# What does not go together is refused.


class Looking(ServerStep):
    """A step that looks at what every silo sent."""

    needs_each = True

    def __call__(self, round: ServerRound) -> Stepped:
        return Stepped(round.state)


def test_where_the_server_sees_sums_alone_nothing_may_look_at_single_silos() -> None:
    method = trainer(Mean(), *HONEST).method
    complaint = "of block 'body' the server sees the sum over the silos alone"
    with pytest.raises(ConfigError, match=f"server.merge = 'median' looks at what every silo sent, but {complaint}"):
        of_sums(replace(method, aggregator=Aggregator(Median(), "equal")))
    with pytest.raises(ConfigError, match=f"the server step of method 'number' looks at .*, but {complaint}"):
        of_sums(replace(method, server_step=Looking()))


ROBUST = ("sharing.weights=equal", "server.merge.name=median")
SHARED = ("privacy.mechanism=dp-sgd", "privacy.epsilon=3", "privacy.trust=distributed")


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (
            ("server.merge.name=medain",),
            r"server.merge: unknown merge 'medain'; did you mean 'median'\? \(allowed: mean,",
        ),
        (
            ("server.merge.name=median", "server.merge.trim=1"),
            r"unknown key 'server.merge.trim'; did you mean 'server.merge.name'",
        ),
        (("server.merge.name=trimmed-mean", "server.merge.trim=0"), r"server.merge.trim = 0 must be at least 1"),
        (("server.merge.name=norm-bound", "server.merge.bound=0"), r"server.merge.bound = 0 must be greater than 0"),
        (("server.merge=5",), r"server.merge = 5 must be a table of settings, such as server.merge.name"),
        (
            ("server.merge=median",),
            "server.merge = 'median' counts every silo once, so sharing.weights must be 'equal', not 'size'",
        ),
        (
            (*ROBUST, *SHARED),
            "server.merge = 'median' looks at what every silo sent, of which privacy.trust = 'distributed' shows the "
            "server the sum alone; use 'mean'",
        ),
        (
            (*ROBUST, "method.name=align_fl"),
            "server.merge = 'median' has nothing to merge: method 'align_fl' averages no block",
        ),
        (
            (
                "sharing.weights=equal",
                "server.merge.name=trimmed-mean",
                "server.merge.trim=2",
                "method.name=fissionvae",
            ),
            r"server.merge = 'trimmed-mean' with trim = 2 needs 5 silos for block 'decoder@group=b', which has 1",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(overrides: tuple[str, ...], complaint: str) -> None:
    silos = federation_of([0] * 20, [0] * 20, [0] * 20, [0] * 20, [0] * 20, [1] * 20)
    with pytest.raises(ConfigError, match=complaint):
        Experiment.of(tiny_config("method.name=fedvae", *overrides), silos)


def test_the_command_refuses_in_one_sentence() -> None:
    found = CliRunner().invoke(
        app, ["run", "demo", "data.silos=1", "server.merge=trimmed-mean", "sharing.weights=equal"]
    )
    assert found.exit_code == 2
    assert "server.merge = 'trimmed-mean' with trim = 1 needs 3 silos for block" in " ".join(found.output.split())


def test_a_name_will_do_in_the_place_of_a_table(tmp_path: Path) -> None:
    path = tmp_path / "robust.toml"
    for text, options in (("merge = 'trimmed-mean'", {}), ("merge = {name = 'trimmed-mean', trim = 2}", {"trim": 2})):
        path.write_text(f"[server]\n{text}\n")
        config = load_config(path)
        assert (config.server.merge.name, config.server.merge.options) == ("trimmed-mean", options)
        path.write_text(config.to_toml())
        assert load_config(path) == config


def test_experiments_of_before_keep_their_digest() -> None:
    """Of the tree as it was before there were ways to merge; another merge is another experiment."""
    assert Config().to_mapping()["server"]["merge"] == {"name": "mean"}
    assert Config().digest() == "23edeec49e30aad97fc532deba29976c549b7fa3465613547ec41f39f0462b11"
    assert load_config("demo", ["server.merge=median"]).digest() != load_config("demo").digest()


def test_all_ways_to_merge_are_listed() -> None:
    found = CliRunner().invoke(app, ["list", "merges", "--json"])
    assert list(json.loads(found.output)) == ["mean", "median", "norm-bound", "trimmed-mean"]


OWN = """
from dataclasses import dataclass

from fedloom.sharing.aggregation import Merge


@dataclass(frozen=True, kw_only=True)
class Largest(Merge):
    name = "largest"
    least_copies: int = 2

    @property
    def least(self):
        return self.least_copies

    def __call__(self, copies):
        return {n: max((each[n] for each in copies.each), key=float) for n in copies.each[0]}
"""


def test_a_way_to_merge_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with settings of its own, which are checked and refused as those of the package are."""
    (tmp_path / "largest_merge.py").write_text(OWN, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    named = ("method.name=fedvae", "sharing.weights=equal", "server.merge.name=largest_merge:Largest")
    silos = federation_of([0] * 20, [0] * 20, [0] * 20)
    merge = Experiment.of(tiny_config(*named), silos).method.aggregator.merge
    assert both(trainer(merge, *HONEST)) == [6.0, 6.0]
    with pytest.raises(
        ConfigError, match=r"server.merge = 'largest' with least_copies = 4 needs 4 silos for block 'encoder@all'"
    ):
        Experiment.of(tiny_config(*named, "server.merge.least_copies=4"), silos)
