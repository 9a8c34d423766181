"""DP-SGD in a run: the loop against plain PyTorch, plans, the ledger, refusals."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engines.killing import train_until_write
from fedloom.engines import poisson_batches
from fedloom.engines.base import FederationState, initial_state, site_of
from fedloom.engines.charging import Charging, noise_source, privacy_of_silos
from fedloom.engines.private_training import parameters_of, public_batch, watched_trial
from fedloom.engines.reference import ReferenceEngine
from fedloom.engines.training import Trainer
from fedloom.errors import ConfigError, FedloomError, FedloomWarning
from fedloom.experiment import Experiment, resume, train
from fedloom.federation.records import UNLABELLED, Batch, Federation
from fedloom.federation.rounds import RoundContext
from fedloom.methods.base import METHODS
from fedloom.objectives.base import Losses, Objective, Step
from fedloom.privacy import silo_privacy
from fedloom.privacy.accounting import Event, Gaussian, default_delta, spent
from fedloom.privacy.ledger import Ledger, read_accounts
from fedloom.privacy.noise import NoiseKey, Randomness, SecureNoise, StreamNoise
from fedloom.privacy.sampling import poisson_sample
from fedloom.runs.checkpoint import load_checkpoint
from fedloom.streams import Streams
from support import NARROW, assert_same_run, equal_bits, federation_of, tiny_config

DP = ("privacy.mechanism=dp-sgd", "privacy.epsilon=5")
SEEDED = "privacy.noise=test"
RDP = (*DP, "privacy.accountant=rdp")  # quicker than PLD where the numbers do not matter


def trainer_of(federation: Federation, *overrides: str) -> tuple[Trainer, FederationState]:
    experiment = Experiment.of(tiny_config(*overrides), federation)
    return experiment.trainer, initial_state(experiment.method, experiment.federation, experiment.config)


def with_subjects(federation: Federation, silo: int, subject: Tensor) -> Federation:
    owner = federation.silos[silo]
    silos = list(federation.silos)
    silos[silo] = replace(owner, train=replace(owner.train, subject=subject))
    return replace(federation, silos=tuple(silos))


@pytest.mark.parametrize(
    ("unit", "optimizer", "rows"),
    [("record", "adam", None), ("record", "sgd", 8), ("subject", "sgd", None)],  # 8 rows: more than one pass
)
def test_training_equals_a_hand_written_loop(
    unit: str, optimizer: str, rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records one at a time through plain PyTorch, clipped, summed, noised, divided by the expected batch size."""
    subject = torch.arange(40) // 2 if unit == "subject" else torch.arange(40)
    units, size, clip, sigma = int(subject.max()) + 1, 10, 0.7, 1.3
    federation = with_subjects(federation_of([0] * 12, [1] * 40), 1, subject)
    federation = with_subjects(federation, 0, torch.arange(12))
    trainer, start = trainer_of(
        federation,
        "privacy.mechanism=dp-sgd",
        "privacy.noise=test",
        f"privacy.noise_multiplier={sigma}",
        f"privacy.clip={clip}",
        f"privacy.unit={unit}",
        f"local.batch_size={size}",
        f"local.optimizer={optimizer}",
        "local.epochs=2",
    )
    if rows is not None:
        monkeypatch.setattr(poisson_batches, "capacity", lambda *_: rows)
    (task,) = ReferenceEngine(trainer).tasks(start, RoundContext(2, 2, (1,)))
    result = trainer.train(task)

    model = trainer.method.build(site_of(federation, 1))
    model.load_state_dict(task.received)
    named = dict(model.named_parameters())
    rule = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[optimizer](named.values(), lr=1e-3)
    streams, x, mean_losses, counts = trainer.streams, federation.silos[1].train.x, [], []
    for step in range(2 * math.ceil(units / size)):
        randomness, now = StreamNoise(streams), NoiseKey(silo=1, round=2, step=step)
        coins = randomness.uniform(units, now)
        chosen = [
            index
            for number in torch.nonzero(coins < size / units).flatten()
            for index in torch.nonzero(subject == number).flatten()
        ]
        noise = streams.normal("noise/vae/z1", len(chosen), 4, silo=1, round=2, step=step)
        gradients: dict[int, list[Tensor]] = {}
        losses = []
        for row, index in enumerate(chosen):
            mean, log_variance = model.encoder(x[index : index + 1]).chunk(2, dim=1)
            logits = model.decoder(mean + torch.exp(log_variance / 2) * noise[row])
            loss = functional.binary_cross_entropy_with_logits(logits, x[index : index + 1], reduction="sum")
            loss = loss + 0.5 * (torch.exp(log_variance) + mean**2 - 1 - log_variance).sum()
            found = torch.autograd.grad(loss, list(named.values()))
            old = gradients.get(int(subject[index]))
            gradients[int(subject[index])] = [a + b for a, b in zip(old, found, strict=True)] if old else list(found)
            losses.append(loss.item())
        total = [torch.zeros_like(parameter) for parameter in named.values()]
        for found in gradients.values():
            norm = torch.cat([part.flatten() for part in found]).norm()
            total = [a + b * min(1.0, clip / norm) for a, b in zip(total, found, strict=True)]
        flat = randomness.normal(1 + sum(p.numel() for p in named.values()), now)[:-1]
        parts = flat.split([p.numel() for p in named.values()])
        for parameter, summed, part in zip(named.values(), total, parts, strict=True):
            parameter.grad = (summed + sigma * clip * part.reshape(summed.shape)) / size
        rule.step()
        mean_losses.append(sum(losses) / max(1, len(losses)))
        counts.append(len(chosen))

    assert len(set(counts)) > 1
    if rows is not None:
        assert max(counts) > rows
    assert result.steps == len(counts)
    wanted = trainer.method.plan.split(model.state_dict(), site_of(federation, 1))
    for key, tensors in result.update.blocks.items():
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, wanted[key][name], rtol=1e-6, atol=1e-6)
    assert result.terms["vae/loss"] == pytest.approx(sum(mean_losses) / len(mean_losses), rel=1e-5)


def latent_draws(seed: int, secret: Randomness | None, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """What the objective of a silo's round was given as its own noise."""
    trainer, start = trainer_of(federation_of([0] * 40), *RDP, SEEDED, f"seed={seed}")
    trainer = replace(trainer, secret=secret)
    objective, given = type(trainer.method.phases[0].objective), []
    call = objective.__call__

    def noting(self: Objective, model: nn.Module, step: Step) -> Losses:
        if step.context.round == 2:  # the trials before it are none
            given.append(step.noise["z1"])
        return call(self, model, step)

    with monkeypatch.context() as patched:
        patched.setattr(objective, "__call__", noting)
        (task,) = ReferenceEngine(trainer).tasks(start, RoundContext(2, 2, (0,)))
        trainer.train(task)
    return torch.cat(given)


def test_who_knows_the_seed_does_not_know_the_objectives_noise_of_a_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = StreamNoise(Streams(77))  # stands in for the operating system's, so that two runs can be compared
    one, other, public = (latent_draws(*each, monkeypatch) for each in ((1, secret), (2, secret), (1, None)))
    assert torch.equal(one, other)
    assert one.shape[1:] == public.shape[1:]
    assert not torch.isin(one, public).any()
    assert len(one.unique()) == one.numel(), "no number of a step comes again in another"
    assert abs(float(one.mean())) < 7 / math.sqrt(one.numel())
    assert one.dtype == latent_draws(1, SecureNoise(), monkeypatch).dtype == torch.float32


def test_empty_batches_are_noise_alone() -> None:
    federation = federation_of([0] * 12)
    trainer, start = trainer_of(federation, *DP, SEEDED, "local.batch_size=1", "local.optimizer=sgd")
    result = next(iter(ReferenceEngine(trainer).train(ReferenceEngine(trainer).tasks(start, RoundContext(1, 2, (0,))))))
    counts = [
        len(poisson_sample(StreamNoise(trainer.streams), 12, 1 / 12, NoiseKey(0, 1, step)))
        for step in range(result.steps)
    ]
    assert 0 in counts
    assert all(torch.isfinite(tensor).all() for part in result.update.blocks.values() for tensor in part.values())


OVERRIDES = {
    "marginals": ("data.source=adult-sample", "method.components=5", "method.steps=10"),
    **NARROW,
    "fissionvae": ("method.prior=learnable", "method.hierarchy=true", "model.top_hidden=[8]", "model.top_latent=3"),
}


@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name].modalities != ("vector",)])
@pytest.mark.parametrize("layout", ["federated", "centralised"])
def test_every_method_of_the_house_runs_private(name: str, layout: str, tmp_path: Path) -> None:
    few = ("rounds=1", "data.records_per_silo=20", "local.batch_size=8", f"data.layout={layout}")
    run = train(tiny_config(*RDP, *few, f"method.name={name}", *OVERRIDES.get(name, ())), tmp_path / "run")
    (row,) = run.metrics()
    assert 4.9 < row["privacy/epsilon/max"] <= 5
    assert run.folder.status["state"] == "finished"


@pytest.mark.parametrize(("allocation", "accountant"), [("uniform", "pld"), ("late", "rdp")])
def test_the_ledger_holds_what_the_plan_says(
    allocation: str, accountant: Literal["pld", "rdp"], tmp_path: Path, tiny_federation: Federation
) -> None:
    """Each silo has noise of its own, for its own number of rounds, and spends no more than its budget."""
    first = tiny_federation.silos[0].name
    own = (f"privacy.allocation={allocation}", f"privacy.accountant={accountant}", f"privacy.budgets.{first}=2")
    experiment = Experiment.of(tiny_config(*DP, *own, "rounds=6", "participation.rate=0.6"), tiny_federation)
    run = experiment.run(tmp_path / "run")
    plans = {plan.silo: plan for plan in experiment.trainer.privacy}
    ledger = Ledger(run.folder.ledger)
    for account in ledger.accounts():
        plan = plans[account.silo]
        granted = 2 if account.silo == first else 5
        assert (plan.units, plan.rate, plan.steps) == (40, 16 / 40, 3)
        events = [Gaussian(plan.noise[number], 16 / 40, 3) for number in plan.rounds]
        assert ledger.events(account.silo) == events
        assert (account.budget.epsilon, account.budget.delta) == (granted, default_delta(40))
        assert account.spent == spent(events, default_delta(40), accountant)
        if events:
            assert 0.98 * granted < account.spent <= granted
        early, *_, late = plan.noise.values()
        assert (late < early) == (allocation == "late")
    ledger.close()
    assert run.metrics()[-1]["privacy/epsilon/max"] == max(
        account.spent for account in read_accounts(run.folder.ledger)
    )
    epsilons = [row["privacy/epsilon/max"] for row in run.metrics()]
    assert epsilons == sorted(epsilons)
    assert [row["participants"] for row in run.metrics()] == [
        [index for index, plan in enumerate(plans.values()) if number in plan.rounds] for number in range(1, 7)
    ]
    counts = {len(plan.rounds): plan.noise[plan.rounds[0]] for plan in plans.values() if plan.silo != first}
    assert [counts[n] for n in sorted(counts)] == sorted(counts.values())  # more rounds, more noise
    assert len(counts) > 1


def test_a_silo_whose_budget_is_spent_sits_out(tmp_path: Path) -> None:
    """Noise 1.5 for 3 steps a round: epsilon 3 pays for some rounds of all, epsilon 0.1 for none."""
    federation = federation_of([0] * 40, [1] * 40)
    config = tiny_config(
        *RDP, "privacy.epsilon=4", "privacy.noise_multiplier=1.5", "privacy.budgets.silo-1=0.1", "rounds=8"
    )
    with pytest.warns(FedloomWarning) as caught:
        run = train(config, tmp_path / "run", federation)
    sentences = [str(each.message) for each in caught]
    assert any(
        "silo 'silo-1' sits out: its budget of epsilon 0.1" in s and "smaller than the cost of one round" in s
        for s in sentences
    )
    assert any(re.search(r"silo 'silo-0' sits out round \d: .* beyond 4", sentence) for sentence in sentences)
    one = Gaussian(1.5, 16 / 40, 3)
    paid = max(n for n in range(9) if spent([one] * n, default_delta(40), "rdp") <= 4)
    assert 1 <= paid < 8
    assert [row["participants"] for row in run.metrics()] == [[0]] * paid + [[]] * (8 - paid)
    assert run.folder.status["state"] == "finished"
    assert [account.spent for account in read_accounts(run.folder.ledger)] == [
        spent([one] * paid, default_delta(40), "rdp"),
        0,
    ]


def test_planted_noise_for_one_round_used_in_all_is_stopped_by_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(
        budget: silo_privacy.Budget,
        rounds: int,
        kind: str,
        rate: float,
        steps: int,
        given: float,
        beside: tuple[Event, ...],
    ) -> tuple[float, ...]:
        return calibrated(budget, 1, kind, rate, steps, given, beside) * rounds

    calibrated = silo_privacy._calibrated
    monkeypatch.setattr(silo_privacy, "_calibrated", forgetful)
    with pytest.warns(FedloomWarning, match="sits out round 2"):
        run = train(tiny_config(*RDP), tmp_path / "run", federation_of([0] * 40))
    assert [row["participants"] for row in run.metrics()] == [[0], []]
    assert all(account.spent <= 5 for account in read_accounts(run.folder.ledger))


# All that can lie at a silo under DP-SGD: a searched bound, moments, a private block.
KEEPING = (*RDP, "privacy.clipping=quantile", "local.keep_optimizer=true", "sharing.scopes.encoder=silo", "rounds=3")


# In the logs and in the checkpoint of round 2, whose silos have paid; to keep a secret takes four writes.
@pytest.mark.parametrize(("noise", "write"), [("test", 14), ("test", 17), ("secure", 18), ("secure", 21)])
def test_a_killed_run_resumes_bit_for_bit_and_pays_nothing_twice(noise: str, write: int, tmp_path: Path) -> None:
    """As the whole run from the same seed; with a secret, which no other run has, as a copy of what was left."""
    config = tiny_config(*KEEPING, f"privacy.noise={noise}")
    whole = train(config, tmp_path / "whole").folder
    train_until_write(config, tmp_path / "run", write)
    before = read_accounts(tmp_path / "run" / "ledger.sqlite")
    assert (load_checkpoint(tmp_path / "run").round, before[0].releases[0].charges) == (1, 2)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    for name in ("run", "copy"):
        assert (tmp_path / name / "noise.key").exists() == (noise == "secure")
        resume(tmp_path / name)
        assert not (tmp_path / name / "noise.key").exists()
        assert read_accounts(tmp_path / name / "ledger.sqlite") == read_accounts(whole.ledger)
    assert_same_run(tmp_path / "run", whole.path if noise == "test" else tmp_path / "copy")
    ours, others = (load_checkpoint(path).server for path in (tmp_path / "run", whole.path))
    assert all(torch.equal(tensor, others[name]) for name, tensor in ours.items()) == (noise == "test")


@pytest.mark.parametrize("noise", ["test", "secure"])
def test_who_tries_all_seeds_finds_no_noise_to_take_away(noise: str, tmp_path: Path) -> None:
    """The attack: the decoder that was handed on moved by the noise of one step, which some seed of a hundred gives."""
    settings = (*RDP, "seed=41", "privacy.epsilon=0.05", "local.optimizer=sgd", "local.steps=1", "rounds=1")
    config = tiny_config(*settings, "method.name=fedvae", f"privacy.noise={noise}")
    federation = federation_of([0] * 40)
    experiment = Experiment.of(config, federation)
    start = initial_state(experiment.method, federation, config).server.blocks
    left = train(config, tmp_path / "run", federation).generator().server.blocks
    moved = torch.cat([(left[key][name] - old).flatten() for key in start for name, old in start[key].items()]).double()
    count = len(moved)

    def likeness(seed: int) -> float:
        """In standard errors: what is looked for has all of the noise, in the order of the phase's parameters."""
        trainer = replace(experiment.trainer, config=replace(config, seed=seed))
        drawn = trainer.seeded.normal(1 + count, NoiseKey(0, 1, 0))[:count].double()
        return abs(float(torch.corrcoef(torch.stack((drawn, moved)))[0, 1])) * math.sqrt(count)

    found = [seed for seed in range(100) if likeness(seed) > 6]
    assert found == ([41] if noise == "test" else [])
    assert all("clip-bound/vae" in tensors for tensors in load_checkpoint(tmp_path / "run").silos.values())


@pytest.mark.parametrize(
    ("before", "after", "charges"),
    [
        ({"device": "cpu", "threads": 1}, {"device": "cpu", "chunk": 4}, 1),
        ({"device": "cuda", "chunk": 4}, {"device": "cuda", "chunk": 4}, 1),
        ({"device": "cuda", "chunk": 4}, {"device": "cuda", "chunk": 2}, 1),
        ({"device": "cpu"}, {"device": "cuda", "chunk": 2}, 2),
        ({"device": "cuda", "gpu": "A100"}, {"device": "cuda", "gpu": "H200"}, 2),
        ({"device": "cuda", "precision": "float32"}, {"device": "cuda", "precision": "bf16"}, 2),
    ],
)
def test_a_round_that_is_done_again_with_other_noise_is_paid_for_again(
    before: dict[str, object], after: dict[str, object], charges: int, tmp_path: Path
) -> None:
    trainer, start = trainer_of(federation_of([0] * 40), *RDP, "privacy.noise_multiplier=4")
    for choice in (before, after):
        charging = Charging(trainer, tmp_path / "ledger.sqlite", b"secret")
        assert charging.admitted(start, RoundContext(1, 2, (0,)), noise_source(choice))[0].participants == (0,)
        charging.close()
    (account,) = read_accounts(tmp_path / "ledger.sqlite")
    assert [release.charges for release in account.releases] == [charges]


@pytest.mark.parametrize("window", [{"last": 1}, {"first": 2}])
def test_phases_of_some_rounds_are_refused(window: dict[str, int]) -> None:
    """Private steps would train them in every round, and the ledger would charge for that."""
    trainer, _ = trainer_of(federation_of([0] * 40), *RDP)
    (phase,) = trainer.method.phases
    staged = replace(trainer.method, phases=(replace(phase, **window),))
    with pytest.raises(ConfigError, match=f"^method '{staged.name}' trains '{phase.name}' in some rounds only"):
        privacy_of_silos(trainer.config, trainer.federation, staged, [(0,), (0,)])


def test_a_ledger_of_other_data_is_refused(tmp_path: Path) -> None:
    ours, others = (trainer_of(federation_of([0] * records), *RDP)[0] for records in (40, 41))
    Charging(others, tmp_path / "ledger.sqlite", b"secret").close()
    with pytest.raises(FedloomError, match="keeps account of other data than those of silo 'silo-0'"):
        Charging(ours, tmp_path / "ledger.sqlite", b"secret")


@pytest.mark.parametrize(
    ("setting", "reason"),
    [("privacy.clipping=median", "median"), ("privacy.blocks=['decoder']", "only decoder is privatised")],
)
def test_shortcuts_run_without_a_number(setting: str, reason: str, tmp_path: Path) -> None:
    run = train(tiny_config(*RDP, setting, "rounds=1"), tmp_path / "run", federation_of([0] * 40))
    assert "privacy/epsilon/max" not in run.metrics()[0]
    (account,) = read_accounts(run.folder.ledger)
    assert (account.spent, account.budget.epsilon) == (math.inf, math.inf)
    ledger = Ledger(run.folder.ledger)
    assert reason in str(ledger.events("silo-0"))
    ledger.close()


def test_naming_all_blocks_is_no_shortcut() -> None:
    trainer, _ = trainer_of(federation_of([0] * 40), *RDP, "privacy.blocks=['decoder', 'encoder']")
    assert trainer.privacy[0].problem == ""


@dataclass(frozen=True)
class Onlooker:
    """An objective that notes what its phase was shown."""

    inner: Objective
    seen: list[Batch]

    @property
    def noise(self) -> Mapping[str, tuple[int, ...]]:
        return self.inner.noise

    def __call__(self, model: nn.Module, step: Step) -> Losses:
        self.seen.append(step.batch)
        return self.inner(model, step)


def test_a_generator_sees_a_public_number_of_rows_and_no_record(tiny_federation: Federation) -> None:
    trainer, start = trainer_of(tiny_federation, *RDP, SEEDED, "method.name=fedgan", "model.channels=[4]")
    judge, make = trainer.method.phases
    looking = replace(make, objective=Onlooker(make.objective, []))
    trainer = replace(trainer, method=replace(trainer.method, phases=(judge, looking)))
    (task,) = ReferenceEngine(trainer).tasks(start, RoundContext(1, 2, (0,)))
    result = trainer.train(task)
    seen = looking.objective.seen  # type: ignore[attr-defined]
    assert len(seen) == result.steps == 3
    assert all(batch.x.shape == (16, 1, 28, 28) and not batch.x.any() for batch in seen)


def test_what_phases_are_tried_on_is_the_same_whatever_the_records_are() -> None:
    """Values, labels and whose they are; shapes, and the groups of the silo, are public."""
    one = with_subjects(federation_of([0, 1] * 20), 0, torch.arange(40))
    other = with_subjects(federation_of([0] * 39 + [1]), 0, 7 + torch.arange(40) // 2)
    other.silos[0].train.x.mul_(0.5)
    other.silos[0].train.y.add_(1)
    found, wanted = (trainer_of(each, *RDP)[0].made_up(0).columns() for each in (other, one))
    assert equal_bits(found, wanted)
    assert set(found) == {"x", "y", "group", "subject"}


@pytest.mark.parametrize(
    ("overrides", "enough"),
    [
        ((), True),
        (("method.name=fedprox",), False),  # pulls at parameters themselves
        (("model.penalty=jacobian", "model.penalty_limit=0.01"), False),  # looks at derivatives of layers
    ],
    ids=["fedvae", "parameters", "derivatives"],
)
def test_gradients_are_taken_from_layers_only_where_these_say_it_all(overrides: tuple[str, ...], enough: bool) -> None:
    trainer, _ = trainer_of(federation_of([0] * 40), *RDP, "method.name=fedvae", *overrides)
    (phase,), model = trainer.method.phases, trainer.method.build(site_of(trainer.federation, 0))
    watch, quick = watched_trial(model, phase, parameters_of(phase, model), trainer.made_up(0), trainer.streams)
    assert watch.complete
    assert quick == enough


def test_groups_take_turns_in_a_public_batch() -> None:
    batch = public_batch(federation_of([2, 0, 0, 0]).silos[0], 5)
    assert batch.group.tolist() == [0, 2, 0, 2, 0]
    assert batch.mask.tolist() == [1] * 5
    assert batch.y.tolist() == [UNLABELLED] * 5


@dataclass(frozen=True)
class Mixing(Onlooker):
    """The loss of each example against the mean of the batch."""

    def __call__(self, model: nn.Module, step: Step) -> Losses:
        mixed = replace(step.batch, x=0.5 * (step.batch.x + step.batch.x.mean(dim=0)))
        return super().__call__(model, replace(step, batch=mixed))


@dataclass(frozen=True)
class Counting(Onlooker):
    """The loss of each example, weighted by the groups of the whole batch: no gradient at the records shows that."""

    def __call__(self, model: nn.Module, step: Step) -> Losses:
        losses = super().__call__(model, step)
        return replace(losses, total=losses.total * (1 + step.batch.group.float().mean()))


@dataclass(frozen=True)
class Hidden(Onlooker):
    """A mean over the batch that shows in gradients alone: its values cancel."""

    def __call__(self, model: nn.Module, step: Step) -> Losses:
        mean = step.batch.x.mean(dim=0)
        mixed = replace(step.batch, x=step.batch.x + mean - mean.detach())
        return super().__call__(model, replace(step, batch=mixed))


@pytest.mark.parametrize("kind", [Mixing, Counting, Hidden])
def test_an_objective_that_mixes_examples_is_refused_by_name(kind: type[Onlooker]) -> None:
    trainer, _ = trainer_of(federation_of([0, 1] * 20), *RDP)
    (phase,) = trainer.method.phases
    trainer.check_privacy()
    mixing = replace(trainer.method, phases=(replace(phase, objective=kind(phase.objective, [])),))
    with pytest.raises(ConfigError, match=rf"objective '{kind.__name__}' mixes examples.* use "):
        replace(trainer, method=mixing).check_privacy()


def test_running_statistics_are_refused_by_name() -> None:
    trainer, _ = trainer_of(federation_of([0] * 40), *RDP)
    build = trainer.method.build

    def with_batch_norm(site: object) -> nn.Module:
        model = build(site)  # type: ignore[arg-type]
        model.encoder.layers.insert(0, nn.BatchNorm1d(6))  # type: ignore[union-attr, operator]
        return model

    with pytest.raises(
        ConfigError, match=r"phase 'vae' changes the buffer 'encoder.layers.0.running_mean'.* group norm"
    ):
        replace(trainer, method=replace(trainer.method, build=with_batch_norm)).check_privacy()


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (("privacy.epsilon=0",), "needs privacy.epsilon, or privacy.noise_multiplier, greater than 0"),
        (("privacy.epsilon=-1",), r"privacy.epsilon = -1 must be at least 0"),
        (("privacy.delta=-0.1",), r"privacy.delta = -0.1 must be at least 0 and below 1"),
        (("privacy.delta=1",), r"privacy.delta = 1 must be at least 0 and below 1"),
        (("privacy.clip=0",), r"privacy.clip = 0 must be greater than 0"),
        (("privacy.budgets.silo-0=0",), r"privacy.budgets.silo-0 = 0 must be greater than 0"),
        (("privacy.budgets.silo-9=1",), r"privacy.budgets: unknown silo 'silo-9'"),
        (("privacy.blocks=['decodr']",), r"privacy.blocks: unknown block 'decodr'; did you mean 'decoder'"),
        (("privacy.trust=distributed",), r"privacy.trust = 'distributed' is for one clipped sum in a round, but"),
        (("privacy.unit=subject",), r"privacy.unit = 'subject', but the records of silo 'silo-0' do not say whose"),
        (("local.batch_size=41",), r"local.batch_size is 41, but silo 'silo-0' holds 40"),
    ],
)
def test_what_cannot_be_had_is_one_sentence_and_leaves_nothing(
    overrides: tuple[str, ...], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        train(tiny_config(*RDP, *overrides), tmp_path / "run", federation_of([0] * 40))
    assert not (tmp_path / "run").exists()


def test_a_large_delta_is_warned_of() -> None:
    with pytest.warns(FedloomWarning, match=r"delta 0.1 is above 1/n = 0.025"):
        trainer_of(federation_of([0] * 40), *RDP, "privacy.delta=0.1")


def test_without_dp_there_is_neither_plan_nor_ledger(tmp_path: Path) -> None:
    experiment = Experiment.of(tiny_config(), federation_of([0] * 40))
    assert privacy_of_silos(experiment.config, experiment.federation, experiment.method, [(0,), (0,)]) == ()
    assert not experiment.run(tmp_path / "run").folder.ledger.exists()
