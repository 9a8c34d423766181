"""A flow of codes: shapes at all sizes, two stages of which each leaves the other alone, and one answer everywhere."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.config import Config
from fedloom.engines.base import FederationState, Job, initial_state
from fedloom.engines.reference import ReferenceEngine
from fedloom.engines.remote.rounds import RemoteEngine
from fedloom.engines.remote.rules import RoundRules
from fedloom.engines.training import Trainer
from fedloom.errors import ConfigError
from fedloom.experiment import Experiment, resume, train
from fedloom.federation.records import Batch
from fedloom.federation.rounds import RoundContext, Site
from fedloom.methods.base import Method, Pathway, SampleInputs, Setting, make_method
from fedloom.models.grid import FromGrid, ToGrid, grid_of
from fedloom.models.unet import CodeFlow
from fedloom.objectives.base import Step
from fedloom.objectives.rectified_flow import OfCodes, RectifiedFlow
from labelled_images import GROUPS, picture_config, picture_federation
from support import assert_same_run, equal_bits

CODES = (
    "method.latent=vae",
    "method.latent_rounds=2",
    "rounds=4",
    "model.network=grid",
    "model.channels=[4]",
    "model.latent=32",  # 2 x 4 x 4 of images of 8 x 8
    "model.likelihood=gaussian",
    "model.kl_weight=0.1",
    "method.widths=[8]",
    "method.attention=0",
    "method.steps=2",
    "local.epochs=1",
)
FLOW, VAE = ("embedding", "down", "middle", "up"), ("encoder", "decoder")
CONTEXT = RoundContext(1, 4, (0,))


def config(*overrides: str) -> Config:
    return picture_config("fission_flow", *CODES, *overrides)


def method_of(*overrides: str) -> Method:
    return Experiment.of(config(*overrides), picture_federation()).method


@pytest.mark.parametrize(
    ("size", "colours", "channels", "depth", "grid", "widths"),
    [
        (28, 1, "[4]", 2, 14, "[8, 8]"),
        (32, 3, "[4, 4]", 4, 8, "[8, 8]"),
        (64, 3, "[4, 4, 4]", 4, 8, "[8, 8]"),
        (64, 1, "[4, 4]", 1, 16, "[8]"),
        (128, 3, "[4, 4, 4]", 4, 16, "[8, 8]"),
        (128, 1, "[4, 4, 4, 4]", 2, 8, "[8]"),
    ],
)
def test_the_flow_is_of_small_codes_and_samples_are_images(
    size: int, colours: int, channels: str, depth: int, grid: int, widths: str
) -> None:
    shape, latent = (colours, size, size), depth * grid**2
    overrides = (f"model.channels={channels}", f"model.latent={latent}", f"method.widths={widths}")
    method = make_method(Setting(config(*overrides), shape, GROUPS, ()))
    model = method.build(Site("here", (0,)))
    assert isinstance(model, CodeFlow)
    _, flow = method.phases
    assert flow.objective.noise == {"e": (1, depth, grid, grid), "time": (1, 1), "z1": (latent,)}
    way: Pathway = method.pathways["flow"]
    assert way.noise == {"e": (depth, grid, grid)}
    nobody = torch.zeros(2, dtype=torch.int64)
    batch = Batch(torch.rand(2, *shape), nobody, nobody, torch.ones(2))
    for phase in method.phases:
        noise = {name: torch.randn(2, *each) for name, each in phase.objective.noise.items()}
        assert phase.objective(model, Step(batch, noise, {}, CONTEXT)).total.shape == (2,)
    with torch.no_grad():
        images = way.generate(model, SampleInputs({"e": torch.randn(2, depth, grid, grid)}, nobody, nobody))
    assert images.shape == (2, *shape)


def test_what_is_near_in_an_image_is_near_in_its_code() -> None:
    """A pixel of a corner reaches the corner of the grid, and a number there no other corner of the image."""
    torch.manual_seed(0)
    shape, channels = (1, 32, 32), (16, 16)
    encoder, decoder = ToGrid(shape, channels, 2), FromGrid((2, 8, 8), channels, shape)
    images = torch.zeros(2, *shape)
    images[1, 0, 0, 0] = 1.0
    rows = encoder(images)
    assert rows.shape == (2, 2 * 8 * 8)
    moved = (rows[1] != rows[0]).reshape(2, 8, 8).any(dim=0)
    assert moved[0, 0]
    assert not moved[4:].any()
    assert not moved[:, 4:].any()
    codes = torch.zeros(2, 2 * 8 * 8)
    codes[1, 0] = 1.0
    seen = decoder(codes)
    changed = (seen[1] != seen[0]).reshape(32, 32)
    assert changed[:2, :2].any()
    assert not changed[16:].any()
    assert not changed[:, 16:].any()


def after(rounds: int, method: Method, *overrides: str) -> list[FederationState]:
    """The states after each round of both silos of both groups."""
    settings, federation = config(*overrides), picture_federation()
    engine = ReferenceEngine(Trainer(settings, method, federation))
    states = [initial_state(method, federation, settings)]
    for number in range(1, rounds + 1):
        state, _ = engine.round(Job(states[-1], RoundContext(number, 4, (0, 1, 2, 3)), lambda _: None))
        states.append(state)
    return states


def test_each_stage_moves_its_own_blocks_and_leaves_the_others_as_they_are_to_the_bit() -> None:
    states = after(4, method_of("local.optimizer=adamw", "local.weight_decay=0.1"))
    for number, (before, now) in enumerate(itertools.pairwise(states), start=1):
        moved = {
            key.block for key, block in now.server.blocks.items() if not equal_bits(block, before.server.blocks[key])
        }
        assert moved == set(VAE if number <= 2 else FLOW)


def test_losses_are_told_of_the_stage_that_there_is(tmp_path: Path) -> None:
    run = train(config(), tmp_path / "run", picture_federation())
    terms = [{name for name in row if name.startswith("train/")} for row in run.metrics()]
    assert terms == [{"train/vae/loss", "train/vae/nll", "train/vae/kl"}] * 2 + [{"train/flow/loss"}] * 2


@pytest.mark.parametrize(
    ("scopes", "owners"),
    [
        ({}, {"encoder": "global", "decoder": "group", "up": "group"}),
        ({"decoder": "global", "up": "global"}, {"encoder": "global", "decoder": "global", "up": "global"}),
        (
            {"encoder": "silo", "middle": "group"},
            {"encoder": "silo", "decoder": "group", "middle": "group", "up": "group"},
        ),
    ],
)
def test_scopes_move_exactly_their_blocks(tmp_path: Path, scopes: dict[str, str], owners: dict[str, str]) -> None:
    overrides = (f"sharing.scopes.{block}={scope}" for block, scope in scopes.items())
    run = train(config("rounds=3", *overrides), tmp_path / "run", picture_federation())
    whole = dict.fromkeys((*FLOW, *VAE), "global") | owners
    copies = {"global": ("all",), "group": tuple(f"group={name}" for name in GROUPS), "silo": ()}
    expected = {f"{block}@{owner}" for block, scope in whole.items() for owner in copies[scope]}
    assert {str(key) for key in run.generator().server.blocks} == expected
    assert run.generator().sample(3, group="night").shape == (3, 1, 8, 8)


def test_a_resumed_run_is_the_same_to_the_bit_across_the_stages(tmp_path: Path) -> None:
    kept = ("local.keep_optimizer=true", "local.schedule=cosine", "server.averaging=0.5")
    whole = train(
        config(*kept, "rounds=3", "engine.keep_checkpoints=3"), tmp_path / "whole", picture_federation()
    ).folder.path
    stopped = tmp_path / "stopped"
    shutil.copytree(whole, stopped)
    for number in (2, 3):  # before the last round of the first stage
        shutil.rmtree(stopped / "checkpoints" / f"round-{number:04d}")
    (stopped / "status.json").unlink()
    resume(stopped, federation=picture_federation())
    assert_same_run(stopped, whole)


def test_the_flow_learns_codes_that_the_encoder_draws_and_teaches_it_nothing() -> None:
    """Its loss is that of the plain flow for ways that end at the code."""
    method = method_of()
    torch.manual_seed(0)
    model = method.build(Site("here", (0,)))
    assert isinstance(model, CodeFlow)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    objective = method.phases[1].objective
    assert isinstance(objective, OfCodes)
    noise = {name: torch.randn(3, *shape) for name, shape in objective.noise.items()}
    nobody = torch.zeros(3, dtype=torch.int64)
    step = Step(Batch(torch.rand(3, 1, 8, 8), nobody, nobody, torch.ones(3)), noise, {}, CONTEXT)
    loss = objective(model, step).total
    code = model.encode(step.batch.x, nobody).sample(noise["z1"]).detach().reshape(3, 2, 4, 4)
    torch.testing.assert_close(loss, RectifiedFlow((2, 4, 4)).towards(code, model, step).total)
    loss.sum().backward()  # type: ignore[no-untyped-call]
    taught = {name.partition(".")[0] for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert taught == set(FLOW)


def test_samples_are_what_the_groups_decoder_makes_of_codes(tmp_path: Path) -> None:
    generator = train(config("rounds=3"), tmp_path / "run", picture_federation()).generator()
    before = {group: generator.sample(4, group=group) for group in GROUPS}
    (key,) = (key for key in generator.server.blocks if str(key) == "decoder@group=night")
    for tensor in generator.server.blocks[key].values():
        tensor.add_(0.3)
    assert torch.equal(generator.sample(4, group="day"), before["day"])
    assert not torch.equal(generator.sample(4, group="night"), before["night"])


def test_labels_may_be_told(tmp_path: Path) -> None:
    settings = config("rounds=3", "method.told=['group', 'label']", "method.guidance=1.0")
    generator = train(settings, tmp_path / "run", picture_federation()).generator()
    left, right = (generator.sample(3, group="day", label=label) for label in ("left", "right"))
    assert left.shape == right.shape == (3, 1, 8, 8)
    assert not torch.equal(left, right)


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (("model.network=mlp",), "method.latent = 'vae' needs codes that have places, and model.network = 'mlp' makes"),
        (("method.latent_rounds=0",), "method.latent_rounds = 0 must be at least 1 and below rounds = 4"),
        (("method.latent_rounds=4",), "method.latent_rounds = 4 must be at least 1 and below rounds = 4"),
        (("model.latent=33",), "model.latent = 33 fills no grid of 4 x 4 places, .* give a multiple of 16"),
        (("method.widths=[8, 8, 8, 8]",), "needs sides divisible by 8; these have 4 x 4 pixels"),
        (("method.reflow=2",), "method.reflow straightens the ways of pixels; it needs method.latent = 'none'"),
        (("server.step=adam",), "server.step = 'adam' would move the VAE on after its rounds"),
        (("sharing.compression=int8",), "sharing.compression = 'int8' would move the VAE on after its rounds"),
        (("privacy.mechanism=dp-sgd", "privacy.epsilon=3"), "two stages, which the accounts of privacy.mechanism"),
        (("model.silos.day-0.latent=16",), "model.silos gives silos networks of their own"),
    ],
)
def test_what_cannot_be_is_refused_by_a_sentence(overrides: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        method_of(*overrides)


def test_late_weights_of_the_first_stage_are_not_taken_into_the_second() -> None:
    wire: Any = None
    late = RoundRules(stragglers="use")
    trainer = Experiment.of(config(), picture_federation()).trainer
    with pytest.raises(ConfigError, match="after the rounds in which method 'fission_flow' trains them; use 'drop'"):
        RemoteEngine(trainer, "run", wire, late, {}, lambda event: None)


def test_a_grid_has_as_many_places_as_the_image_halved() -> None:
    assert grid_of(4096, (8, 8), (3, 128, 128)) == (4, 32, 32)
    assert grid_of(196, (8, 8), (1, 28, 28)) == (4, 7, 7)
