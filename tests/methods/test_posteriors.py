"""Latents that need no encoder trained on records: sound under noise on the decoder alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedloom.engines.base import initial_state, site_of
from fedloom.engines.local_state import MODEL
from fedloom.engines.private_training import parameters_of
from fedloom.engines.reference import ReferenceEngine
from fedloom.engines.training import Trainer
from fedloom.errors import ConfigError
from fedloom.experiment import Experiment, train
from fedloom.federation.records import Federation, batch_of
from fedloom.federation.rounds import RoundContext
from fedloom.objectives.base import Step
from fedloom.privacy.noise import NoiseKey
from fedloom.privacy.summary import summarise
from support import federation_of, tiny_config, written_out

DP = ("privacy.mechanism=dp-sgd", "privacy.epsilon=5", "privacy.accountant=rdp")
LINEAR = ("model.posterior=closed-form", "model.hidden=[]", "model.likelihood=gaussian", "model.variance=0.1")
DREAMT = ("model.posterior=from-decoder",)
FEDERATION = federation_of([0] * 30, [1] * 20)


@dataclass(frozen=True)
class Everybody:
    """Coins that leave nobody out, and no noise."""

    repeatable = True

    def uniform(self, count: int, noise_key: NoiseKey) -> Tensor:
        return torch.zeros(count, dtype=torch.float64)

    def coins(self, count: int, silo: int, round: int, steps: Tensor) -> Tensor:
        return torch.zeros(*steps.shape, count, dtype=torch.float64)

    def normal(self, count: int, noise_key: NoiseKey, device: torch.device | str = "cpu") -> Tensor:
        return torch.zeros(count, device=device)

    def examples(self, purpose: str, rows: int, width: int, silo: int, round: int, steps: Tensor) -> Tensor:
        return torch.zeros(*steps.shape, rows, width)


def without_record(federation: Federation, record: int) -> Federation:
    first = federation.silos[0]
    stays = torch.tensor([row for row in range(len(first)) if row != record])
    return replace(federation, silos=(replace(first, train=first.train.take(stays)), *federation.silos[1:]))


def sum_in_the_second_step(federation: Federation, *overrides: str) -> dict[str, Tensor]:
    """The decoder's clipped sum, given a public decoder and whatever else the first step left at the silo."""
    config = tiny_config(*DP, "sharing.scopes.encoder=silo", "local.learning_rate=0.05", "privacy.clip=0.1", *overrides)
    # An experiment refuses such an outlier, and the bound must hold all the same.
    experiment = replace(Experiment.of(config, FEDERATION), federation=federation)
    trainer = Trainer(config, experiment.method, federation, experiment.trainer.privacy, Everybody())
    start = initial_state(trainer.method, federation, config)
    (task,) = ReferenceEngine(trainer).tasks(start, RoundContext(1, 2, (0,)))
    kept = trainer.train(replace(task, step_limit=1)).state.tensors
    model = trainer.method.build(site_of(federation, 0))
    encoder = {n.removeprefix(MODEL): t for n, t in kept.items() if n.startswith(f"{MODEL}encoder.")}
    model.load_state_dict({**model.state_dict(), **task.received, **encoder})
    phase = trainer.method.phases[-1]
    records = federation.silos[0].train
    batch = batch_of(records, torch.arange(len(records)))
    noise = {name: torch.zeros(len(records), *shape) for name, shape in phase.objective.noise.items()}
    values = phase.objective(model, Step(batch, noise, task.received, task.context)).total
    assert task.mechanism is not None
    decoder = {name: p for name, p in parameters_of(phase, model).items() if name.startswith("decoder.")}
    bound = torch.tensor(0.1)
    mean = task.mechanism.clipped_sum(values, batch.mask, decoder, bound, written_out(values, decoder)).gradients
    return {name: task.mechanism.expected * gradient for name, gradient in mean.items()}


def with_an_outlier(federation: Federation) -> Federation:
    """Record 0 of the first silo is far from all others."""
    first = federation.silos[0]
    x = first.train.x.clone()
    x[0] *= 30
    return replace(federation, silos=(replace(first, train=replace(first.train, x=x)), *federation.silos[1:]))


def moved(record: int, *overrides: str) -> float:
    """How far the sum moves when a record is taken away."""
    federation = with_an_outlier(FEDERATION)
    whole = sum_in_the_second_step(federation, *overrides)
    less = sum_in_the_second_step(without_record(federation, record), *overrides)
    return math.sqrt(sum(float((whole[name] - less[name]).square().sum()) for name in whole))


@pytest.mark.parametrize("overrides", [DREAMT, ("method.name=fedvae", *DREAMT)], ids=["fissionvae", "fedvae"])
@pytest.mark.parametrize("record", [0, 7])
def test_a_record_moves_the_decoders_sum_by_at_most_the_bound(overrides: tuple[str, ...], record: int) -> None:
    """The encoder saw samples of the decoder alone, so it is the same with and without the record."""
    assert moved(record, *overrides, "privacy.blocks=['decoder']") <= 0.1 * (1 + 1e-4)


def test_an_encoder_that_was_trained_on_the_record_moves_it_by_more() -> None:
    """The same question, asked of the shortcut: more than twice the bound."""
    assert moved(0, "privacy.blocks=['decoder']", "local.optimizer=sgd") > 0.2


def test_a_closed_form_moves_it_by_at_most_the_bound() -> None:
    """There is no encoder at all."""
    experiment = Experiment.of(tiny_config(*LINEAR), FEDERATION)
    assert set(experiment.method.plan.blocks) == {"decoder"}
    model = experiment.method.build(site_of(FEDERATION, 0))
    (phase,) = experiment.method.phases
    mechanism = Experiment.of(tiny_config(*DP, *LINEAR), FEDERATION).trainer.privacy[0].mechanism(1)
    parameters = parameters_of(phase, model)

    def clipped(federation: Federation) -> dict[str, Tensor]:
        records = federation.silos[0].train
        batch = batch_of(records, torch.arange(len(records)))
        values = phase.objective(model, Step(batch, {}, {}, RoundContext(1, 1, ()))).total
        forms = written_out(values, parameters)
        mean = mechanism.clipped_sum(values, batch.mask, parameters, torch.tensor(0.1), forms).gradients
        return {name: mechanism.expected * gradient for name, gradient in mean.items()}

    whole, less = clipped(FEDERATION), clipped(without_record(FEDERATION, 3))
    assert 0 < math.sqrt(sum(float((whole[n] - less[n]).square().sum()) for n in whole)) <= 0.1 * (1 + 1e-4)


@pytest.mark.parametrize("overrides", [LINEAR, DREAMT], ids=["closed-form", "from-decoder"])
def test_noise_on_the_decoder_is_then_a_guarantee(overrides: tuple[str, ...], tmp_path: Path) -> None:
    shortcut = Experiment.of(tiny_config(*DP, "privacy.blocks=['decoder']"), FEDERATION).trainer.privacy[0]
    assert "only decoder is privatised" in shortcut.problem
    run = train(tiny_config(*DP, *overrides, "privacy.blocks=['decoder']"), tmp_path / "run", FEDERATION)
    told = summarise(run.config.privacy, run.folder.ledger)
    assert told.epsilon is not None
    assert 4.9 <= told.epsilon <= 5
    assert run.sample(2, group="a").shape == (2, 6)


def test_dreams_teach_the_encoder_the_decoders_latents() -> None:
    """After training on samples of a fixed decoder, the encoder finds the latents of new samples."""
    settings = ("local.epochs=60", "local.learning_rate=0.01", "model.likelihood=gaussian", "model.variance=0.01")
    config = tiny_config(*DREAMT, *settings, "model.latent=1", "method.name=fedvae", "model.hidden=[16]")
    experiment = Experiment.of(config, FEDERATION)
    asleep = replace(experiment.method, phases=experiment.method.phases[:1])
    trainer = Trainer(config, asleep, FEDERATION)
    start = initial_state(asleep, FEDERATION, config)
    for tensors in start.server.blocks.values():
        for name in tensors:
            tensors[name].mul_(3.0)  # a decoder whose samples differ
    (task,) = ReferenceEngine(trainer).tasks(start, RoundContext(1, 2, (0,)))
    result = trainer.train(task)
    assert result.steps == 120
    model = asleep.build(site_of(FEDERATION, 0))
    model.load_state_dict({**task.received, **asleep.plan.join(result.update.blocks, site_of(FEDERATION, 0))})
    z, group = torch.randn(200, 1, generator=torch.Generator().manual_seed(2)), torch.zeros(200, dtype=torch.int64)
    with torch.no_grad():
        found = model.encode(model.likelihood.mean(model.decode(z, group)), group).mean  # type: ignore[union-attr, operator]
    assert torch.corrcoef(torch.stack((z.flatten(), found.flatten())))[0, 1].item() > 0.9


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (("model.posterior=closed-form",), r"needs model.likelihood = 'gaussian'"),
        ((*LINEAR, "model.kl_weight=0.5"), r"model.kl_weight = 1"),
        ((*LINEAR, "method.name=conditional"), "a method whose decoder sees z alone"),
        ((*LINEAR[::2], "model.hidden=[4]"), "needs a linear decoder"),
        ((*DREAMT, "method.hierarchy=true"), "is for VAEs of one level, and method.name = 'fissionvae' is none"),
        ((*DREAMT, "method.name=moon"), "is for VAEs of one level, and method.name = 'moon' is none"),
        (("model.posterior=exact",), "model.posterior: unknown value 'exact'"),
    ],
)
def test_what_does_not_fit_is_one_sentence(overrides: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Experiment.of(tiny_config(*overrides), FEDERATION).method.build(site_of(FEDERATION, 0))
