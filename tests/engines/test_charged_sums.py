"""What a silo does against what it is charged for: as many noisy sums, each with coins and noise of its own."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from fedloom.engines.base import initial_state
from fedloom.engines.reference import ReferenceEngine
from fedloom.experiment import Experiment
from fedloom.federation.records import Federation
from fedloom.federation.rounds import RoundContext
from fedloom.privacy.accounting import Gaussian
from fedloom.privacy.noise import NoiseKey, StreamNoise
from fedloom.streams import Streams
from support import tiny_config

DP = ("privacy.mechanism=dp-sgd", "privacy.epsilon=5", "privacy.accountant=rdp", "local.epochs=2")


@dataclass(frozen=True)
class Noting(StreamNoise):
    """Notes which coins and which noise of sums were asked for."""

    tossed: list[NoiseKey] = field(default_factory=list)
    added: list[NoiseKey] = field(default_factory=list)

    def coins(self, count: int, silo: int | Tensor, round: int, steps: Tensor) -> Tensor:
        self.tossed.extend(NoiseKey(int(silo), round, step) for step in steps.flatten().tolist())
        return super().coins(count, silo, round, steps)

    def normal(self, count: int, noise_key: NoiseKey, device: torch.device | str = "cpu") -> Tensor:
        if not noise_key.use.startswith("objective/"):  # of the training itself, which any noise will do
            self.added.append(noise_key)
        return super().normal(count, noise_key, device)


@pytest.mark.parametrize(
    ("overrides", "phases"),
    [
        (("method.name=fedvae",), 1),
        (("method.name=flow_vae",), 2),
        (("method.name=fedgan", "model.channels=[4]"), 1),  # its generator sees the discriminator alone
        (("method.name=fedvae", "sharing.scopes.encoder=silo", "privacy.pretraining=3"), 1),
        (
            (
                "method.name=flow_vae",
                "sharing.scopes.encoder=silo",
                "sharing.scopes.flow=silo",
                "privacy.pretraining=3",
            ),
            2,
        ),
    ],
    ids=["one phase", "two phases", "one of two phases", "pretraining", "pretraining of two"],
)
def test_as_many_sums_are_charged_as_are_made_each_with_coins_and_noise_of_its_own(
    overrides: tuple[str, ...], phases: int, tiny_federation: Federation
) -> None:
    experiment = Experiment.of(tiny_config(*DP, *overrides), tiny_federation)
    noise = Noting(Streams(3))
    trainer = replace(experiment.trainer, secret=noise)
    start = initial_state(trainer.method, tiny_federation, trainer.config)
    for round in (1, 2):
        noise.tossed.clear()
        noise.added.clear()
        (task,) = ReferenceEngine(trainer).tasks(start, RoundContext(round, 2, (0,)))
        trainer.train(task)
        charged = trainer.privacy[0].events(round)
        assert charged["update"].steps == phases * 2 * 3  # type: ignore[union-attr] # 16 of 40 records, two epochs
        sums = sum(event.steps for event in charged.values() if isinstance(event, Gaussian))
        assert len(noise.added) == len(set(noise.added)) == sums
        assert len(noise.tossed) == sums
        assert set(noise.tossed) == set(noise.added)
