"""A method of plain modules is one like any other: both engines, DP-SGD, and nothing undeclared leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedloom.errors import ConfigError
from fedloom.experiment import Run, train
from fedloom.methods.base import METHODS
from fedloom.methods.plain import PlainMethod
from fedloom.models.networks import NETWORKS, Network
from support import tiny_config

LATENT = 4
ENCODER = nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.ReLU(), nn.Linear(8, 2 * LATENT))
DECODER = nn.Sequential(nn.Linear(LATENT, 8), nn.ReLU(), nn.Linear(8, 784), nn.Unflatten(1, (1, 28, 28)))
BLOCKS = {"encoder": ENCODER, "decoder": DECODER}


def loss(blocks: nn.Module, x: Tensor, z: Tensor) -> Tensor:
    mean, log_variance = blocks.encoder(x).chunk(2, dim=1)
    shown = torch.sigmoid(blocks.decoder(mean + torch.exp(log_variance / 2) * z))
    divergence = 0.5 * (mean**2 + log_variance.exp() - log_variance - 1).sum(dim=1)
    return ((shown - x) ** 2).flatten(1).sum(dim=1) + divergence


def generate(blocks: nn.Module, z: Tensor) -> Tensor:
    return torch.sigmoid(blocks.decoder(z))


@pytest.fixture(autouse=True)
def names() -> Iterator[None]:
    before = dict(METHODS.own), dict(NETWORKS.own)
    yield
    for own, known in zip((METHODS.own, NETWORKS.own), before, strict=True):
        own.clear()
        own.update(known)


def run_of(method: PlainMethod, out: Path, *settings: str) -> Run:
    method.named("mine")
    return train(tiny_config("method={name='mine'}", *settings), out)


def test_what_is_shared_is_what_was_said(tmp_path: Path) -> None:
    run = run_of(PlainMethod(BLOCKS, loss, generate, LATENT, {"encoder": "silo"}), tmp_path / "run")
    left = {block for row in run.folder.egress() for block in row["blocks"]}
    assert {block.partition("@")[0].partition("/")[0] for block in left} == {"decoder"}
    assert run.sample(3, group="mnist", seed=1).shape == (3, 1, 28, 28)
    assert run.metrics()[1]["train/plain/loss"] < run.metrics()[0]["train/plain/loss"]


def test_a_block_of_each_group_is_merged_inside_it_alone(tmp_path: Path) -> None:
    run = run_of(PlainMethod(BLOCKS, loss, generate, LATENT, {"decoder": "group"}), tmp_path / "run")
    sent = [sorted(row["blocks"]) for row in run.folder.egress() if row["round"] == 1]
    assert sent == [[f"decoder@group={group}", "encoder@all"] for group in ("mnist", "fashion-mnist") for _ in range(2)]
    assert not torch.equal(*(run.sample(2, group=group, seed=1) for group in ("mnist", "fashion-mnist")))


def test_a_silo_of_two_groups_has_no_plain_block_of_one(tmp_path: Path) -> None:
    method = PlainMethod(BLOCKS, loss, generate, LATENT, {"decoder": "group"})
    with pytest.raises(ConfigError, match="holds 2 groups, and block 'decoder' is one group's"):
        run_of(method, tmp_path / "run", "data.partition=iid")


def test_both_engines_and_a_mechanism_take_it(tmp_path: Path) -> None:
    method = PlainMethod(BLOCKS, loss, generate, LATENT)
    private = ("privacy.mechanism=dp-sgd", "privacy.noise_multiplier=1", "privacy.noise=test")
    one, other = (
        run_of(method, tmp_path / name, *private, f"engine.name={name}").sample(2, group="mnist")
        for name in ("reference", "fused")
    )
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_a_generator_that_stays_at_home_makes_no_samples_elsewhere(tmp_path: Path) -> None:
    run = run_of(PlainMethod(BLOCKS, loss, generate, LATENT, {"decoder": "silo"}), tmp_path / "run")
    assert run.generator().pathways == ()


def mean_loss(blocks: nn.Module, x: Tensor, z: Tensor) -> Tensor:
    return loss(blocks, x, z).mean()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PlainMethod(BLOCKS, mean_loss, generate, LATENT), r"the loss gives \(\) for 16 examples; give one"),
        (
            lambda: PlainMethod(BLOCKS, loss, generate, LATENT + 1),
            r"generate\(blocks, z\) fails for z of shape \(1, 5\)",
        ),
        (lambda: PlainMethod(BLOCKS, loss, generate, LATENT, {"encodr": "silo"}), "did you mean 'encoder'"),
        (lambda: PlainMethod(BLOCKS, loss, generate, LATENT, {"encoder": "town"}), "share of 'encoder'"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(make: Callable[[], PlainMethod], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        run_of(make(), tmp_path / "run")


def test_own_networks_have_weights_of_their_own(tmp_path: Path) -> None:
    Network(ENCODER, DECODER).named("own")
    settings = ("model.network=own", f"model.latent={LATENT}", "method={name='fedvae'}")
    first, again, other = (
        train(tiny_config(*settings, f"seed={seed}"), tmp_path / f"{number}").sample(2, group="mnist", seed=5)
        for number, seed in enumerate((1, 1, 2))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (Network(DECODER, DECODER), r"the encoder does not take what has shape \(1, 28, 28\)"),
        (
            Network(nn.Flatten(), DECODER),
            r"the encoder gives \(784,\) for one example, and is to give \(8,\)",
        ),
        (Network(ENCODER, DECODER[:3]), r"the decoder gives \(784,\) for one example, and is to give \(1, 28, 28\)"),
    ],
)
def test_own_networks_that_do_not_fit_are_refused(network: Network, message: str, tmp_path: Path) -> None:
    network.named("own")
    with pytest.raises(ConfigError, match=message):
        train(tiny_config("model.network=own", f"model.latent={LATENT}"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
