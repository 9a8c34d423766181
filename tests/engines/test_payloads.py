"""Payloads that silos compute: in every engine, with noise that was planned, charged, declared and logged."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn

from fedloom.config import Config
from fedloom.engines import reference
from fedloom.engines.base import FederationState, Job, Result, Task, initial_state
from fedloom.engines.charging import Charging, privacy_of_silos
from fedloom.engines.choice import make_engine
from fedloom.engines.fused import FusedEngine, FusedOptions
from fedloom.engines.reference import ReferenceEngine
from fedloom.engines.remote.inspection import Inspection, RejectedError
from fedloom.engines.training import Trainer
from fedloom.errors import ConfigError, EgressError
from fedloom.experiment import Experiment
from fedloom.federation.records import Batch, Federation
from fedloom.federation.rounds import RoundContext, Site
from fedloom.methods.base import Method, PayloadRule
from fedloom.methods.steps import ServerRound, ServerState, ServerStep, Stepped
from fedloom.privacy.accounting import Budget, Gaussian, NoGuarantee, spent
from fedloom.privacy.ledger import Ledger, format_epsilon, read_accounts
from fedloom.privacy.noise import NoiseKey, StreamNoise
from fedloom.privacy.payload_sums import BoundedSum, Query, Statistic, Unbounded
from fedloom.privacy.silo_privacy import whole_noise
from fedloom.privacy.summary import summarise
from fedloom.sharing.plan import RECORD_COUNT, SERVER, BlockKey, Payload, SharingPlan, Tensors
from fedloom.sharing.update import Update
from fedloom.streams import Streams
from support import equal_bits, federation_of, tiny_config

WIDTH, BOUND = 6, 1.5
FEDERATION = federation_of([0] * 20, [1] * 33, [0] * 16)
MOMENTS = BlockKey("moments", "server")
DP = ("privacy.mechanism=dp-sgd", "privacy.epsilon=3", "privacy.delta=1e-3", "privacy.accountant=rdp")
SEEDED = (*DP, "privacy.noise=test")
When = Literal["first", "every", "last"]


def contribution(model: nn.Module, batch: Batch) -> Tensors:
    """A count, and the record itself."""
    return {"count": torch.ones(len(batch.x)), "sum": batch.x}


def median(query: Query) -> Tensors:
    return {"sum": query.records.x.median(dim=0).values}


PAYLOAD = Payload("moments", "a noisy sum", {"count": (), "sum": (WIDTH,)})
SUM = BoundedSum(contribution, BOUND)
RELEASE = PayloadRule(PAYLOAD, SUM)
UNSAFE = PayloadRule(Payload("median", "in clear", {"sum": (WIDTH,)}), Unbounded(median, "medians are not noised"))


def with_rules(method: Method, *rules: PayloadRule) -> Method:
    plan = replace(method.plan, payloads=(*method.plan.payloads, *(rule.payload for rule in rules)))
    return replace(method, plan=plan, payloads=rules)


class Moments(nn.Module):
    """The server's model: nothing but a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.moments = nn.Linear(1, WIDTH)


def build_moments(_: Site) -> nn.Module:
    return Moments()


class Pool(ServerStep):
    """A server step that reads payloads alone."""

    def initial(self, streams: Streams) -> ServerState:
        return ServerState({MOMENTS: {"weight": torch.zeros(WIDTH, 1), "bias": torch.zeros(WIDTH)}})

    def __call__(self, round: ServerRound) -> Stepped:
        sent = [update.payloads["moments"] for update in round.updates if update.payloads]
        if not sent:
            return Stepped(round.state)
        mean = torch.stack([s["sum"] for s in sent]).sum(dim=0) / torch.stack([s["count"] for s in sent]).sum()
        return Stepped(ServerState({MOMENTS: {**round.state.blocks[MOMENTS], "bias": mean}}))


def one_shot(release: PayloadRule = RELEASE) -> Method:
    """Releases and no phases."""
    plan = SharingPlan({"moments": SERVER}, ("a", "b"))
    return with_rules(Method("one-shot", plan, build_moments, (), Pool(), {}), release)


def trainer_of(
    *overrides: str, payloads: tuple[PayloadRule, ...] = (RELEASE,), federation: Federation = FEDERATION
) -> Trainer:
    config = tiny_config(*overrides)
    experiment = Experiment.of(config, federation)
    return planned(config, with_rules(experiment.method, *payloads), federation)


def planned(config: Config, method: Method, federation: Federation) -> Trainer:
    bare = Trainer(config, method, federation)
    rounds = [
        tuple(silo for silo, attended in enumerate(bare.attended) if number in attended)
        for number in range(1, config.rounds + 1)
    ]
    return Trainer(config, method, federation, privacy_of_silos(config, federation, method, rounds))


def sent_by(engine: ReferenceEngine | FusedEngine, trainer: Trainer, rounds: int = 2) -> dict[tuple[int, int], Tensors]:
    """(round, silo) -> the payload of each release, from everything that the engine reports."""
    found: dict[tuple[int, int], Tensors] = {}

    def hear(result: Result) -> None:
        for name, tensors in result.update.payloads.items():
            for part, tensor in tensors.items():
                found.setdefault((result.update.round, result.silo), {})[f"{name}/{part}"] = tensor

    state: FederationState = initial_state(trainer.method, trainer.federation, trainer.config)
    for number in range(1, rounds + 1):
        state, _ = engine.round(Job(state, RoundContext(number, rounds, tuple(range(len(trainer.federation)))), hear))
    engine.close()
    return found


@pytest.mark.parametrize(
    ("when", "rounds"), [("first", {1}), ("every", {1, 2}), ("last", {2})], ids=["first", "every", "last"]
)
def test_without_a_mechanism_the_plain_sum_is_sent_when_it_is_due(when: When, rounds: set[int]) -> None:
    trainer = trainer_of(payloads=(replace(RELEASE, when=when),))
    found = sent_by(ReferenceEngine(trainer), trainer)
    assert set(found) == {(number, silo) for number in rounds for silo in range(3)}
    for (_, silo), tensors in found.items():
        x = FEDERATION.silos[silo].train.x
        assert tensors["moments/count"].item() == len(x)
        torch.testing.assert_close(tensors["moments/sum"], x.sum(dim=0))


def fused(trainer: Trainer) -> FusedEngine:
    return FusedEngine(trainer, FusedOptions(torch.device("cpu"), chunk=2))


class OverTheBoundary(ReferenceEngine):
    """Every task and result takes the form in which worker processes exchange them."""

    def train(self, tasks: list[Task]) -> Iterator[Result]:
        reference._trainer = self._trainer
        for task in tasks:
            yield reference._unpacked(*reference._train_in_worker(*reference._packed(task)))


@pytest.mark.parametrize(("engine", "overrides"), [(fused, ()), (OverTheBoundary, SEEDED)], ids=["fused", "workers"])
def test_engines_send_the_same_bits(
    engine: Callable[[Trainer], ReferenceEngine | FusedEngine], overrides: tuple[str, ...]
) -> None:
    """Workers carry payloads over the process boundary; the fused engine asks the same function."""
    trainer = trainer_of(*overrides, payloads=(replace(RELEASE, when="every"), UNSAFE))
    plain, other = sent_by(ReferenceEngine(trainer), trainer), sent_by(engine(trainer), trainer)
    assert {key.partition("/")[0] for key in plain[1, 0]} == {"moments", "median"}
    assert other.keys() == plain.keys()
    assert all(equal_bits(other[key], plain[key]) for key in plain)


def test_what_the_model_learned_may_be_used() -> None:
    """The release comes after the round's training."""

    def decoder_bias(model: nn.Module, batch: Batch) -> Tensors:
        bias = dict(model.named_parameters())["decoder.layers.2.bias"]
        return {"sum": bias[:WIDTH].expand(len(batch.x), -1)}

    payload = Payload("bias", "for a test", {"sum": (WIDTH,)})
    trainer = trainer_of(payloads=(PayloadRule(payload, BoundedSum(decoder_bias)),))
    (task, *_) = ReferenceEngine(trainer).tasks(
        initial_state(trainer.method, FEDERATION, trainer.config), RoundContext(1, 2, (0,))
    )
    update = trainer.train(task).update
    learned = update.blocks[BlockKey("decoder", "group=a")]["layers.2.bias"]
    torch.testing.assert_close(update.payloads["bias"]["sum"], 20 * learned[:WIDTH])


def test_nothing_is_sent_in_a_trial() -> None:
    """Engines try a few steps before a run, for which nobody was charged."""
    trainer = trainer_of(*SEEDED)
    (task,) = ReferenceEngine(trainer).tasks(
        initial_state(trainer.method, FEDERATION, trainer.config), RoundContext(1, 2, (0,))
    )
    assert trainer.train(task).update.payloads
    assert not trainer.train(replace(task, step_limit=1)).update.payloads


def test_noise_is_what_the_share_buys_and_all_together_stay_within_the_budget() -> None:
    """A share s of the budget: the noise of one sum that spends it all, divided by sqrt(s), times sqrt(sums)."""
    trainer = trainer_of(*DP, "privacy.shares.moments=0.25", payloads=(replace(RELEASE, when="every"),))
    alone = trainer_of(*DP, payloads=()).privacy
    for plan, without in zip(trainer.privacy, alone, strict=True):
        budget = plan.budget
        assert budget == Budget(3.0, 1e-3, "rdp")
        multiplier = plan.payload_noise["moments"]
        assert multiplier == whole_noise(budget) * math.sqrt(2 / 0.25)
        events = [event for number in (1, 2) for event in plan.events(number).values()]
        assert events.count(Gaussian(multiplier)) == 2
        assert len(events) == 4
        assert 0.99 * 3 <= spent(events, 1e-3, "rdp") <= 3
        assert plan.noise[1] > without.noise[1]  # training has less of the budget than it had alone


def test_payloads_alone_share_the_whole_budget() -> None:
    other = PayloadRule(replace(PAYLOAD, name="again"), SUM, share=0.3)
    method = with_rules(one_shot(), replace(RELEASE, share=0.1), other)
    plan = planned(tiny_config(*DP), method, FEDERATION).privacy[0]
    whole = whole_noise(plan.budget)
    assert plan.payload_noise == {"moments": whole * math.sqrt(0.4 / 0.1), "again": whole * math.sqrt(0.4 / 0.3)}
    events = plan.events(1)
    assert set(events) == {"moments", "again"}  # there is no update to pay for
    assert 0.985 * 3 <= spent(events.values(), 1e-3, "rdp") <= 3
    assert plan.events(2) == {}


def test_what_is_sent_is_the_clipped_sum_with_exactly_the_planned_noise() -> None:
    trainer = planned(tiny_config(*SEEDED), one_shot(), FEDERATION)
    found = sent_by(ReferenceEngine(trainer), trainer)
    for silo, plan in enumerate(trainer.privacy):
        noise = StreamNoise(Streams(trainer.config.seed)).normal(1 + WIDTH, NoiseKey(silo, 1, 0, "moments"))
        x = FEDERATION.silos[silo].train.x
        rows = torch.cat((torch.ones(len(x), 1), x), dim=1)
        clipped = rows * (BOUND / rows.norm(dim=1, keepdim=True)).clamp(max=1.0)
        wanted = clipped.sum(dim=0) + plan.payload_noise["moments"] * BOUND * noise
        torch.testing.assert_close(
            torch.cat((found[1, silo]["moments/count"][None], found[1, silo]["moments/sum"])), wanted
        )


def test_subjects_are_clipped_whole() -> None:
    subject = torch.arange(20) // 5  # four subjects of five records
    silo = FEDERATION.silos[0]
    alone = replace(FEDERATION, silos=(replace(silo, train=replace(silo.train, subject=subject)),))
    trainer = planned(tiny_config(*SEEDED, "privacy.unit=subject"), one_shot(), alone)
    assert trainer.privacy[0].units == 4
    total = SUM.clipped(silo.train, Moments(), subject)
    noise = StreamNoise(Streams(trainer.config.seed)).normal(1 + WIDTH, NoiseKey(0, 1, 0, "moments"))
    sent = sent_by(ReferenceEngine(trainer), trainer)[1, 0]
    scale = trainer.privacy[0].payload_noise["moments"] * BOUND
    torch.testing.assert_close(sent["moments/count"].double(), total["count"] + scale * noise[0].double())


@pytest.mark.parametrize(("unit", "counts"), [("record", (20, 12, 8)), ("subject", (4, 3, 2))])
def test_only_the_number_of_units_weighs_a_silo(unit: str, counts: tuple[int, ...], tmp_path: Path) -> None:
    """Four subjects of five records; the third has records of both groups."""
    silo = FEDERATION.silos[0]
    train = replace(silo.train, subject=torch.arange(20) // 5, group=(torch.arange(20) >= 12).long())
    data = replace(FEDERATION, silos=(replace(silo, train=train),), groups=("a", "b"))
    trainer = planned(tiny_config(*DP, f"privacy.unit={unit}"), one_shot(), data)
    found = dict(zip(("all", "group=a", "group=b"), counts, strict=True))
    assert trainer.counts(0) == found
    Inspection(trainer, 20).passed(0, Update(silo.name, 1, {}, trainer.counts(0)), (), {}, "")
    assert found["all"] == trainer.privacy[0].units
    adjacency = summarise(trainer.config.privacy, tmp_path / "none.sqlite").parts["adjacency"]
    assert f"the number of {unit}s, in all and in each of the silo's groups, is declared public" in adjacency
    assert "in all and in each of its groups" in RECORD_COUNT.cost


def test_a_run_of_payloads_alone_is_charged_logged_and_summed_up(tmp_path: Path) -> None:
    """Releases and no phases: no steps, one charge for each silo, every payload in the egress log."""
    experiment = Experiment.of(tiny_config(*DP, "engine.workers=0", "engine.threads=0"), FEDERATION)
    run = Experiment(experiment.config, FEDERATION, one_shot()).run(tmp_path / "run")
    assert [row["steps"] for row in run.metrics()] == [0, 0]
    accounts = read_accounts(run.folder.ledger)
    assert [[(r.name, r.charges) for r in account.releases] for account in accounts] == [[("moments", 1)]] * 3
    assert all(0.98 * 3 <= account.spent <= 3 for account in accounts)
    rows = run.folder.egress()
    shapes = {"records": {}, "moments": {"count": [], "sum": [WIDTH]}}
    assert [row["payloads"] for row in rows] == [shapes] * 3 + [{"records": {}}] * 3
    assert [row["bytes"] for row in rows] == [16 + 4 * (1 + WIDTH)] * 3 + [16] * 3
    told_of = summarise(run.config.privacy, run.folder.ledger)
    assert told_of.parts["mechanism"] == "noisy sums of bounded contributions (moments)"
    assert told_of.guarantee.startswith(f"({format_epsilon(accounts[0].spent)}, 0.001)-diff")


def test_a_silo_is_charged_before_its_payload_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = Experiment(tiny_config(*DP), FEDERATION, one_shot())
    charged: list[set[str]] = []
    value = BoundedSum.value

    def watched(*arguments: object) -> Tensors:
        ledger = Ledger(tmp_path / "run" / "ledger.sqlite")
        charged.append({silo.name for silo in FEDERATION.silos if ledger.events(silo.name, "moments")})
        ledger.close()
        return value(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(BoundedSum, "value", watched)
    experiment.run(tmp_path / "run")
    assert charged == [{"silo-0", "silo-1", "silo-2"}] * 3


def test_a_silo_that_cannot_pay_sends_nothing(tmp_path: Path) -> None:
    trainer = planned(
        tiny_config("privacy.mechanism=dp-sgd", "privacy.noise_multiplier=1", "rounds=2"),
        one_shot(replace(RELEASE, when="every")),
        FEDERATION,
    )
    assert trainer.privacy[0].payload_noise == {"moments": 1.0}
    poor = replace(trainer.privacy[1], settings=replace(trainer.privacy[1].settings, epsilon=4.5))
    trainer = replace(trainer, privacy=(trainer.privacy[0], poor, trainer.privacy[2]))
    charging = Charging(trainer, tmp_path / "ledger.sqlite", b"secret")
    state = initial_state(trainer.method, FEDERATION, trainer.config)
    assert charging.admitted(state, RoundContext(1, 2, (0, 1, 2)))[0].participants == (0, 1, 2)
    with pytest.warns(UserWarning, match="silo 'silo-1' sits out round 2: release 'moments' would raise its epsilon"):
        assert charging.admitted(state, RoundContext(2, 2, (0, 1, 2)))[0].participants == (0, 2)
    charging.close()


def test_a_payload_without_a_bound_voids_the_guarantee_and_says_so(tmp_path: Path) -> None:
    experiment = Experiment(tiny_config(*DP), FEDERATION, one_shot(UNSAFE))
    plan = experiment.trainer.privacy[0]
    assert plan.events(1) == {"median": NoGuarantee("medians are not noised")}
    assert plan.budget.epsilon == math.inf
    experiment = Experiment(
        tiny_config(*DP), FEDERATION, with_rules(Experiment.of(tiny_config(*DP), FEDERATION).method, RELEASE, UNSAFE)
    )
    run = experiment.run(tmp_path / "run")
    assert summarise(run.config.privacy, run.folder.ledger).guarantee == "no DP guarantee: medians are not noised"


def test_without_a_mechanism_a_payload_has_no_guarantee(tmp_path: Path) -> None:
    run = Experiment(tiny_config(), FEDERATION, one_shot()).run(tmp_path / "run")
    assert summarise(run.config.privacy, run.folder.ledger).guarantee == "no DP guarantee"


def test_a_payload_that_the_plan_does_not_declare_stays() -> None:
    experiment = Experiment.of(tiny_config(), FEDERATION)
    trainer = Trainer(experiment.config, replace(experiment.method, payloads=(RELEASE,)), FEDERATION)
    with pytest.raises(EgressError, match="silo 'silo-0' tried to send payload 'moments'"):
        sent_by(ReferenceEngine(trainer), trainer)


def of_the_batch(model: nn.Module, batch: Batch) -> Tensors:
    return {"sum": batch.x - batch.x.mean(dim=0)}


@pytest.mark.parametrize(
    ("overrides", "statistic", "complaint"),
    [
        (("privacy.shares.noise_key=0.1",), None, "privacy.shares: unknown payload 'noise_key'"),
        (("privacy.shares.moments=0.0",), None, r"privacy.shares.moments = 0 must be greater than 0"),
        (("privacy.shares.moments=1.0",), None, "privacy.shares: other releases take 1 of the budget of silo 'silo-0'"),
        ((), BoundedSum(of_the_batch), "what a record contributes to 'sum' depends on the other records of its batch"),
    ],
)
def test_mistakes_are_named_before_a_folder_exists(
    overrides: tuple[str, ...], statistic: Statistic | None, complaint: str, tmp_path: Path
) -> None:
    release = RELEASE if statistic is None else replace(RELEASE, statistic=statistic)
    config = tiny_config(*DP, *overrides)
    method = with_rules(Experiment.of(tiny_config(), FEDERATION).method, release)
    with pytest.raises(ConfigError, match=complaint):
        Experiment(config, FEDERATION, method).run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["auto", "fused", "reference"])
def test_every_engine_takes_a_method_that_trains_nothing(name: str) -> None:
    trainer = planned(tiny_config(f"engine.name={name}"), one_shot(), FEDERATION)
    state = initial_state(trainer.method, FEDERATION, trainer.config)
    engine = make_engine(trainer)
    after, report = engine.round(Job(state, RoundContext(1, 2, (0, 1, 2)), lambda _: None))
    assert (report.steps, report.terms) == (0, {})
    pooled = torch.cat([silo.train.x for silo in FEDERATION.silos]).mean(dim=0)
    torch.testing.assert_close(after.server.blocks[MOMENTS]["bias"], pooled)


def length(trainer: Trainer, over: float) -> float:
    """How long a payload of the first silo, with its 20 records, can be; times ``over``."""
    noise = trainer.privacy[0].payload_noise["moments"]
    return over * BOUND * (20 + noise * (math.sqrt(1 + WIDTH) + 8))


@pytest.mark.parametrize(
    ("overrides", "release", "over", "refused"),
    [
        (DP, RELEASE, 0.999, False),
        (DP, RELEASE, 1.001, True),
        ((), RELEASE, 100.0, False),  # nothing is clipped
        (DP, replace(RELEASE, statistic=Unbounded(median, "in clear")), 100.0, False),
    ],
)
def test_the_server_takes_no_payload_that_is_longer_than_records_and_noise_can_make_it(
    overrides: tuple[str, ...], release: PayloadRule, over: float, refused: bool
) -> None:
    trainer = planned(tiny_config(*overrides), one_shot(release), FEDERATION)
    bounded = planned(tiny_config(*DP), one_shot(), FEDERATION)
    payload = {"count": torch.tensor(length(bounded, over)), "sum": torch.zeros(WIDTH)}
    update = Update(FEDERATION.silos[0].name, 1, {}, trainer.counts(0), {"moments": payload})
    expected = pytest.raises(RejectedError, match=r"sent payload 'moments' with norm .*; 20 records or subjects")
    with expected if refused else contextlib.nullcontext():
        Inspection(trainer, 100).passed(0, update, ("moments",), {}, "")
