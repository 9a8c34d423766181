"""Distributed noise: what qualifies, what each silo adds, what the sum then has, and what the server sees."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fedloom.engines.base import Job, initial_state
from fedloom.engines.charging import Charging
from fedloom.engines.distributed import of_sums
from fedloom.engines.masked_sums import SummedRounds
from fedloom.engines.reference import ReferenceEngine
from fedloom.engines.training import Trainer
from fedloom.errors import ConfigError, FedloomWarning
from fedloom.experiment import Experiment
from fedloom.federation.records import Batch
from fedloom.federation.rounds import RoundContext, Site
from fedloom.methods.base import Method, PayloadRule
from fedloom.methods.steps import Merged, ServerRound, ServerStep, Stepped
from fedloom.privacy.ledger import Ledger, read_accounts
from fedloom.privacy.payload_sums import BoundedSum, Unbounded
from fedloom.privacy.summary import summarise
from fedloom.release.provenance import provenance_of
from fedloom.sharing.plan import GLOBAL, RECORD_COUNT, BlockKey, Payload, SharingPlan, Tensors
from fedloom.sharing.update import Update
from support import federation_of, tiny_config

SILOS, TOLERATED, WIDTH, BOUND = 5, 1, 4000, 0.5
FEDERATION = federation_of(*([0] * 20 for _ in range(SILOS)))
EVERYBODY = RoundContext(1, 2, tuple(range(SILOS)))
DISTRIBUTED = (
    "privacy.mechanism=dp-sgd",
    "privacy.epsilon=3",
    "privacy.accountant=rdp",
    "privacy.trust=distributed",
    f"privacy.tolerated={TOLERATED}",
)
SEEDED = "privacy.noise=test"
ONE_STEP = ("method.name=fedvae", "local.steps=1", "local.optimizer=sgd", "local.batch_size=10")


def nothing(model: nn.Module, batch: Batch) -> Tensors:
    """Contributions that are zero, so that what is sent is noise alone."""
    return {"sum": torch.zeros(len(batch.x), WIDTH)}


def build(_: Site) -> nn.Module:
    return nn.Identity()


class Recorder(ServerStep):
    """A server step that keeps what it was shown."""

    def __init__(self) -> None:
        self.shown: list[list[Update]] = []

    def __call__(self, round: ServerRound) -> Stepped:
        self.shown.append(list(round.updates))
        return Stepped(round.state)


PAYLOAD = Payload("noise", "for a test", {"sum": (WIDTH,)})
RELEASE = PayloadRule(PAYLOAD, BoundedSum(nothing, BOUND), "every")


def sums(release: PayloadRule = RELEASE) -> Method:
    plan = SharingPlan({}, ("a",), (RECORD_COUNT, release.payload))
    return Method("sums", plan, build, (), Recorder(), {}, payloads=(release,))


def trainer_of(*overrides: str, method: Method | None = None) -> Trainer:
    experiment = Experiment.of(tiny_config(*DISTRIBUTED, *overrides), FEDERATION)
    return (experiment if method is None else replace(experiment, method=method)).trainer


def updates_of(trainer: Trainer) -> list[Update]:
    tasks = ReferenceEngine(trainer).tasks(initial_state(trainer.method, FEDERATION, trainer.config), EVERYBODY)
    return [trainer.train(task).update for task in tasks]


def test_the_sum_has_the_stated_noise_whoever_is_missing() -> None:
    """Without one of the silos and the noise of another that looks on: sigma^2, to 5 standard errors."""
    trainer = trainer_of(SEEDED, method=sums())
    sigma = trainer.privacy[0].payload_noise["noise"]
    assert all(plan.payload_noise["noise"] == sigma for plan in trainer.privacy)
    sent = [update.payloads["noise"]["sum"].double() for update in updates_of(trainer)]
    error = 5 * math.sqrt(2 / WIDTH)
    for present in itertools.combinations(sent, SILOS - 1 - TOLERATED):
        assert torch.stack(present).sum(dim=0).var().item() == pytest.approx((sigma * BOUND) ** 2, rel=error)
    for present in itertools.combinations(sent, SILOS - TOLERATED):
        assert torch.stack(present).sum(dim=0).var().item() == pytest.approx((sigma * BOUND) ** 2 * 4 / 3, rel=error)


def test_two_payloads_of_a_round_share_no_noise() -> None:
    """Of both the noise alone is sent; whoever has one must not have the other."""
    other = replace(RELEASE, payload=replace(PAYLOAD, name="more noise"))
    method = sums()
    method = replace(
        method,
        plan=replace(method.plan, payloads=(*method.plan.payloads, other.payload)),
        payloads=(RELEASE, other),
    )
    for update in updates_of(trainer_of(SEEDED, method=method)):
        one, two = (update.payloads[name]["sum"] for name in ("noise", "more noise"))
        assert (one == two).double().mean() < 0.01


def test_a_step_has_a_share_of_the_noise() -> None:
    """A step of SGD is linear in the noise: from the step without noise it moves as far as its share says."""
    without, shared = (trainer_of(*ONE_STEP, SEEDED, f"privacy.noise_multiplier={sigma}") for sigma in (1e-9, 2.0))
    alone = trainer_of(*ONE_STEP, SEEDED, "privacy.noise_multiplier=2.0", "privacy.trust=local")
    assert shared.privacy[0].events(1) == alone.privacy[0].events(1)
    weight = (BlockKey("decoder", "all"), "layers.0.weight")
    start, theirs, ours = (
        [update.blocks[weight[0]][weight[1]] for update in updates_of(trainer)] for trainer in (without, alone, shared)
    )
    for silo in range(SILOS):
        share = 1 / math.sqrt(SILOS - 1 - TOLERATED)
        torch.testing.assert_close(ours[silo] - start[silo], share * (theirs[silo] - start[silo]), rtol=1e-3, atol=1e-6)


def test_the_server_is_shown_the_sum_alone() -> None:
    method = sums()
    trainer = trainer_of(SEEDED, method=method)
    sent = updates_of(trainer)
    start = initial_state(trainer.method, FEDERATION, trainer.config)
    ReferenceEngine(trainer).round(Job(start, EVERYBODY, lambda _: None))
    assert isinstance(method.server_step, Recorder)
    ((shown,),) = method.server_step.shown
    assert (shown.silo, shown.counts["all"]) == ("all", 100.0)
    total = torch.stack([update.payloads["noise"]["sum"].double() for update in sent]).sum(dim=0)
    torch.testing.assert_close(shown.payloads["noise"]["sum"], total.float())


def test_the_sum_of_blocks_is_their_plain_mean() -> None:
    key = BlockKey("w", "all")
    updates = [Update(f"s{i}", 1, {key: {"x": torch.tensor([float(i)])}}, {"all": 10.0 * i}) for i in range(4)]
    plan = SharingPlan({"w": GLOBAL}, ("a",))
    method = of_sums(Method("plain", plan, build, (), Merged(), {}))
    found = method.aggregator.delivered(updates, method.plan, {}, each=True)
    assert found.merged[key]["x"].item() == 1.5
    assert [(seen.silo, seen.blocks, seen.counts) for seen in found.updates] == [("all", {}, {"all": 60.0})]


def test_everybody_adds_noise_for_the_strictest() -> None:
    trainer = trainer_of(*ONE_STEP, "privacy.budgets.silo-2=1.0")
    strict, lenient = trainer.privacy[2], trainer.privacy[0]
    assert lenient.noise == strict.noise
    for plan, epsilon in ((strict, 1.0), (lenient, 3.0)):
        spent = plan.budget.spent([plan.events(number)["update"] for number in (1, 2)])
        assert 0.99 <= spent <= 1.0 <= epsilon


def test_a_run_says_whom_to_trust_and_what_each_adds(tmp_path: Path) -> None:
    run = Experiment.of(tiny_config(*DISTRIBUTED, *ONE_STEP), FEDERATION).run(tmp_path / "run")
    assert [row["steps"] for row in run.metrics()] == [SILOS, SILOS]
    told = summarise(run.config.privacy, run.folder.ledger)
    trust = (
        "each of 5 silos adds 0.577 of the noise: one must trust that only the sum is seen (by secure sums; a "
        "simulation acts them out) and that at most 1 silos collude or drop out"
    )
    assert told.parts["trust"] == f"distributed: {trust}"
    assert told.guarantee.endswith(f"for each record, by what every silo has spent so far; {trust}")
    assert provenance_of(run.folder).guarantee == told.guarantee
    assert all(0.99 * 3 <= account.spent <= 3 for account in read_accounts(run.folder.ledger))


@pytest.mark.parametrize(("absent", "present"), [((2,), (0, 1, 3, 4)), ((2, 4), ())])
def test_more_dropouts_than_are_tolerated_stop_the_round(
    absent: tuple[int, ...], present: tuple[int, ...], tmp_path: Path
) -> None:
    """A silo whose budget other runs have spent drops out."""
    trainer = trainer_of(*ONE_STEP)
    charging = Charging(trainer, tmp_path / "ledger.sqlite", b"secret")
    ledger = Ledger(tmp_path / "ledger.sqlite")
    for silo in absent:
        for number in (8, 9):
            ledger.charge(
                "other", f"silo-{silo}", number, "update", trainer.privacy[silo].events(1)["update"], content=""
            )
    with pytest.warns(FedloomWarning) as told:
        context, secrets = charging.admitted(initial_state(trainer.method, FEDERATION, trainer.config), EVERYBODY)
    assert context.participants == tuple(secrets) == present
    stopped = "nobody takes part in round 1: 2 silos are missing, and without their noise"
    assert any(stopped in str(warning.message) for warning in told) == (not present)
    charging.close()
    ledger.close()


UNSAFE = replace(RELEASE, statistic=Unbounded(lambda *_: {}, "it is a median"))


@pytest.mark.parametrize(
    ("overrides", "method", "complaint"),
    [
        ((), None, r"a silo takes \d+ steps in a round; set local.steps = 1"),
        (("local.optimizer=adam",), None, "the steps of 'adam' are not proportional to the sum"),
        (("local.momentum=0.9", "local.keep_optimizer=true"), None, "local.keep_optimizer keeps the momentum of steps"),
        (("sharing.scopes.encoder=silo",), None, "block 'encoder' has scope 'silo', not 'global' or 'group'"),
        (("method.name=flow_vae",), None, "method 'flow_vae' has 2 phases"),
        (("method.name=moon",), None, "block 'history' has scope 'silo', not 'global' or 'group'"),
        (("privacy.clipping=quantile",), None, "privacy.clipping = 'quantile' makes each silo's bound another"),
        (("participation.rate=0.5",), None, r"silos are absent from some rounds \(participation.rate = 0.5\)"),
        (("sharing.weights=equal-groups",), None, "silos weigh differently in the mean; set sharing.weights = 'equal'"),
        ((), sums(UNSAFE), "payload 'noise' is no such sum: it is a median"),
        (("privacy.tolerated=4",), sums(), "5 silos cannot tolerate 4 colluders and dropouts; allowed are 0 to 3"),
    ],
)
def test_what_is_no_single_sum_is_refused_by_name(
    overrides: tuple[str, ...], method: Method | None, complaint: str
) -> None:
    steps = ONE_STEP if overrides else ONE_STEP[:1]
    with pytest.raises(ConfigError, match=complaint):
        trainer_of(*steps, *overrides, method=method)


def bias(model: nn.Module, batch: Batch) -> Tensors:
    """What every record contributes of the model that it is shown."""
    return {"sum": model.decoder.layers[-1].bias.expand(len(batch.x), -1) / 10}  # type: ignore[union-attr, index]


def test_payloads_beside_training_come_from_the_model_as_it_came_down() -> None:
    """A silo's own step would carry what only a share of the noise covers into what it sends."""
    payload = Payload("bias", "for a test", {"sum": (6,)})
    method = Experiment.of(tiny_config(*ONE_STEP), FEDERATION).method
    method = replace(
        method,
        payloads=(PayloadRule(payload, BoundedSum(bias, 1.0)),),
        plan=replace(method.plan, payloads=(RECORD_COUNT, payload)),
    )
    settings = ("privacy.epsilon=0", "privacy.noise_multiplier=1e-6", "privacy.bits=52", "local.learning_rate=1")
    trainer = trainer_of(*ONE_STEP, SEEDED, *settings, method=method)
    layout = SummedRounds(trainer.config, FEDERATION, trainer.method, trainer.privacy[0]).of(1)
    assert sorted(layout.shapes) == ["bias", "update"]
    (task, *_) = ReferenceEngine(trainer).tasks(initial_state(method, FEDERATION, trainer.config), EVERYBODY)
    for number in (1.0, 2.0):
        received = {**task.received, "decoder.layers.2.bias": torch.full((6,), number)}
        sent = trainer.train(replace(task, received=received, step=layout.step)).update.payloads
        torch.testing.assert_close(sent["bias"]["sum"].float(), torch.full((6,), 20 * number / 10), rtol=0, atol=1e-4)
        assert max(gradient.abs().max().item() for gradient in sent["update"].values()) > 1e-2


def test_weights_that_are_changed_after_the_step_are_refused() -> None:
    """The mean of what every silo made of its noisy step is no function of the sum."""
    method = Experiment.of(tiny_config(*ONE_STEP), FEDERATION).method
    with pytest.raises(ConfigError, match="method 'fedvae' changes a silo's weights after its step"):
        trainer_of(*ONE_STEP, method=replace(method, settle=lambda weights: weights))


def test_equal_weights_let_silos_of_unequal_size_share_noise() -> None:
    unequal = federation_of([0] * 20, [0] * 30, [0] * 40)
    settings = (*DISTRIBUTED, *ONE_STEP)
    with pytest.raises(ConfigError, match="silos weigh differently"):
        _ = Experiment.of(tiny_config(*settings), unequal).trainer
    trainer = Experiment.of(tiny_config(*settings, "sharing.weights=equal"), unequal).trainer
    assert len({tuple(plan.noise.values()) for plan in trainer.privacy}) == 1
    assert len({plan.rate for plan in trainer.privacy}) == 3
