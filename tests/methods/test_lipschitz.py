"""Decoders that cannot be steep, and penalties on those that can, in whole runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedloom.config import Config
from fedloom.errors import ConfigError
from fedloom.experiment import Experiment, load, train
from fedloom.runs.checkpoint import load_checkpoint
from support import tiny_config

DP = ("privacy.mechanism=dp-sgd", "privacy.noise_multiplier=1", "privacy.accountant=rdp", "engine.name=reference")


def tiny(*settings: str) -> Config:
    small = ("data.source=mnist-sample", "rounds=1", "local.epochs=1", "model.channels=[4, 4]", "model.hidden=[8]")
    return tiny_config(*small, "evaluation.metrics=['lipschitz']", "evaluation.samples=8", *settings)


@pytest.mark.parametrize(
    "settings",
    [
        ("method={name='fedvae'}", "model.network=mlp"),
        ("method={name='fedvae'}", "model.network=conv"),
        ("method={name='fissionvae', hierarchy=true}", "local.learning_rate=0.001"),
        ("method={name='fedvae'}", *DP),
    ],
    ids=["mlp", "conv", "two levels", "dp-sgd"],
)
def test_a_bounded_decoder_keeps_its_constant_in_a_run(tmp_path: Path, settings: tuple[str, ...]) -> None:
    train(tiny("model.lipschitz=0.02", "local.learning_rate=0.1", *settings), tmp_path / "run")
    (found,) = load(tmp_path / "run").metrics()
    certified, sampled = (found[f"lipschitz/{kind}/group=mnist"] for kind in ("certified/n1", "sampled-max/n8"))
    assert 0 < sampled <= certified <= 0.02


@pytest.mark.parametrize("network", ["mlp", "conv"])
@pytest.mark.parametrize("setting", ["model.lipschitz=0.5", "model.penalty=jacobian"], ids=["bound", "penalty"])
def test_both_engines_learn_the_same(tmp_path: Path, network: str, setting: str) -> None:
    config = ("method={name='fedvae'}", f"model.network={network}", setting, "model.penalty_limit=0.01")
    for engine in ("reference", "fused"):
        train(tiny(*config, f"engine.name={engine}"), tmp_path / engine)
    ours, theirs = (load_checkpoint(tmp_path / engine).server for engine in ("reference", "fused"))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


def test_the_certificate_of_a_linear_decoder_is_exact(tmp_path: Path) -> None:
    """The mean image is W z + b, without a sigmoid: its constant is the largest singular value, everywhere."""
    linear = ("model.posterior=closed-form", "model.likelihood=gaussian", "model.hidden=[]")
    train(tiny("method={name='fedvae'}", *linear), tmp_path / "run")
    (found,) = load(tmp_path / "run").metrics()
    certified, sampled = (found[f"lipschitz/{kind}/group=mnist"] for kind in ("certified/n1", "sampled-max/n8"))
    assert sampled == pytest.approx(certified, rel=1e-5)


def test_a_penalty_makes_decoders_flatter(tmp_path: Path) -> None:
    for name, weight in (("without", 0), ("with", 1000)):
        steep = ("model.penalty=jacobian", "model.penalty_limit=0.01", f"model.penalty_weight={weight}")
        train(tiny("method={name='fedvae'}", *steep, "local.epochs=8", "local.learning_rate=0.02"), tmp_path / name)
    found = [load(tmp_path / name).metrics()[0]["lipschitz/sampled-max/n8/group=mnist"] for name in ("without", "with")]
    assert found[1] < 0.5 * found[0]


@pytest.mark.parametrize("method", ["fedvae", "align_fl", "moon", "fedprox"])
@pytest.mark.parametrize("penalty", ["jacobian", "align-penalty"])
def test_every_vae_takes_a_penalty(tmp_path: Path, method: str, penalty: str) -> None:
    settings = (f"method={{name='{method}'}}", f"model.penalty={penalty}", "server.epochs=1", "server.samples=20")
    train(tiny(*settings), tmp_path / "run")
    assert load(tmp_path / "run").metrics()[0][f"train/vae/{penalty}"] > 0


def test_the_jacobian_penalty_can_be_private(tmp_path: Path) -> None:
    train(tiny("method={name='fedvae'}", "model.penalty=jacobian", "model.penalty_limit=0.01", *DP), tmp_path / "run")
    assert load(tmp_path / "run").metrics()[0]["train/vae/jacobian"] > 0


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (("model.lipschitz=-1",), "model.lipschitz = -1 must be at least 0"),
        (("model.penalty=gradient",), "model.penalty: unknown value 'gradient'"),
        (
            ("method={name='fedgan'}", "model.lipschitz=1"),
            "model.lipschitz is for the decoders of VAEs, .* 'fedgan' has",
        ),
        (("method={name='fedgan'}", "model.penalty=jacobian"), "model.penalty is for the decoders of VAEs"),
        (
            (
                "method={name='fedvae'}",
                "model.posterior=closed-form",
                "model.likelihood=gaussian",
                "model.penalty=jacobian",
            ),
            "model.penalty does not fit model.posterior = 'closed-form'",
        ),
        (
            ("model.penalty=align-penalty", *DP),
            "model.penalty = 'align-penalty' interpolates between examples, .* use 'jacobian', or model.lipschitz",
        ),
    ],
)
def test_mistakes_are_named(settings: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Experiment.of(tiny(*settings))
