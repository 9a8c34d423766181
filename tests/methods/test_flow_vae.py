"""A VAE whose latents and details come along flows: what is minimised, what moves, what is generated, what it costs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedloom.engines.base import RoundReport, initial_state
from fedloom.engines.charging import privacy_of_silos
from fedloom.errors import ConfigError
from fedloom.experiment import Experiment, Observer, resume, train
from fedloom.federation.records import Batch, Federation, batch_of
from fedloom.federation.rounds import RoundContext, Site
from fedloom.methods.base import Method, SampleInputs, Setting, make_method
from fedloom.methods.generator import Generator
from fedloom.modalities.likelihoods import Bernoulli
from fedloom.models.flow import FlowVAE, Mixer, Velocity, transported
from fedloom.models.vae import VAE
from fedloom.objectives.base import Losses, Objective, Step
from fedloom.objectives.flows import LatentFlow, Refinement
from fedloom.runs.folder import RunFolder
from support import assert_same_run, federation_of, tiny_config

FLOW = ("method.name=flow_vae", "method.flow=[8]")
REFINED = (*FLOW, "method.refiner=2", "method.refiner_width=5")
LATENT, ROWS = 2, 5


class Constant(nn.Module):
    """Puts out the same row, whatever comes in."""

    def __init__(self, *row: float) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.tensor(row))

    def forward(self, x: Tensor) -> Tensor:
        return self.row.expand(len(x), -1)


class Picked(nn.Module):
    """One channel of its input."""

    def __init__(self, channel: int) -> None:
        super().__init__()
        self.channel = channel

    def forward(self, x: Tensor) -> Tensor:
        return x[:, self.channel : self.channel + 1]


class Ones(nn.Module):
    """Logits of 0 for images of 2 x 2, whatever z is."""

    def forward(self, z: Tensor) -> Tensor:
        return torch.zeros(len(z), 1, 2, 2)


def known_vae(flow: nn.Module, refiner: nn.Module | None = None) -> FlowVAE:
    """q(z | x) = N((3, -1), 4 I), and mean images of 1/2."""
    encoder = Constant(3.0, -1.0, math.log(4.0), math.log(4.0))
    return FlowVAE(VAE(encoder, Ones(), torch.zeros(2, LATENT), Bernoulli()), flow, refiner)


def some_batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    rows = torch.zeros(ROWS, dtype=torch.int64)
    return Batch(torch.rand(ROWS, 1, 2, 2, generator=generator), rows, rows, torch.ones(ROWS))


def drawn(objective: Objective) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {name: torch.randn(ROWS, *shape, generator=generator) for name, shape in objective.noise.items()}


def losses_of(objective: Objective, model: nn.Module, batch: Batch, noise: dict[str, Tensor]) -> Losses:
    return objective(model, Step(batch, noise, {}, RoundContext(1, 1, ())))


def test_the_flow_is_asked_for_the_way_from_noise_to_latent() -> None:
    flow = Velocity(LATENT, ())
    (layer,) = flow.layers
    assert isinstance(layer, nn.Linear)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    with torch.no_grad():
        layer.weight[:, :LATENT] = 2.0 * torch.eye(LATENT)
        layer.weight[0, LATENT] = 5.0  # v(z, t) = 2 z + (5 t, 0)
    objective = LatentFlow(LATENT, draws=3)
    noise = drawn(objective)
    found = losses_of(objective, known_vae(flow), some_batch(), noise).total.tolist()
    for row in range(ROWS):
        z = torch.tensor([3.0, -1.0]) + 2.0 * noise["z1"][row]
        squares = []
        for e, time in zip(noise["e"][row], noise["time"][row], strict=True):
            t = 0.5 * (1.0 + math.erf(float(time) / math.sqrt(2.0)))
            velocity = 2.0 * ((1.0 - t) * e + t * z) + torch.tensor([5.0 * t, 0.0])
            squares.append(float((velocity - (z - e)).square().sum()))
        assert found[row] == pytest.approx(sum(squares) / 3, rel=1e-5)


@pytest.mark.parametrize("channel", [0, 1, 2], ids=["the point on the way", "the mean image", "the time"])
def test_the_refiner_is_asked_for_the_record(channel: int) -> None:
    objective, batch = Refinement(LATENT, (1, 2, 2), 0.3), some_batch()
    noise = drawn(objective)
    found = losses_of(objective, known_vae(Velocity(LATENT, ()), Picked(channel)), batch, noise).total
    t = 0.5 * (1.0 + torch.erf(noise["time"] / math.sqrt(2.0))).reshape(-1, 1, 1, 1)
    seen = ((1 - t) * (0.5 + 0.3 * noise["e"]) + t * batch.x, torch.full_like(batch.x, 0.5), t.expand_as(batch.x))
    wanted = nn.functional.binary_cross_entropy_with_logits(seen[channel], batch.x, reduction="none")
    torch.testing.assert_close(found, wanted.sum(dim=(1, 2, 3)))


def tiny_method(federation: Federation, *overrides: str) -> Method:
    return make_method(Setting.of(tiny_config(*overrides), federation))


def test_the_refiner_learns_from_the_noise_that_it_will_meet(tiny_federation: Federation) -> None:
    """Training and the refined pathway begin at one distance from the mean image, whatever that is set to."""
    method = tiny_method(tiny_federation, *REFINED, "method.refiner_noise=0.25")
    phase = next(phase for phase in method.phases if phase.name == "refiner")
    assert phase.objective == Refinement(4, (1, 28, 28), 0.25)


def test_each_phase_moves_its_own_blocks_alone(tiny_federation: Federation) -> None:
    method = tiny_method(tiny_federation, *REFINED)
    assert {block: rule.scope.value for block, rule in method.plan.blocks.items()} == dict.fromkeys(
        ("encoder", "decoder", "flow", "refiner"), "group"
    )
    assert [(phase.name, phase.trains) for phase in method.phases] == [
        ("vae", ("encoder", "decoder")),
        ("flow", ("flow",)),
        ("refiner", ("refiner",)),
    ]
    model = method.build(Site("here", (0, 1)))
    batch = batch_of(tiny_federation.silos[0].train, torch.arange(ROWS))
    for phase in method.phases:
        total = losses_of(phase.objective, model, batch, drawn(phase.objective)).total.sum()
        gradients = torch.autograd.grad(total, list(model.parameters()), allow_unused=True)
        names = [name for name, _ in model.named_parameters()]
        moved = {name.split(".")[0] for name, g in zip(names, gradients, strict=True) if g is not None}
        assert moved == set(phase.trains)


@pytest.mark.parametrize("beneath", [("method.name=group_vaes",), FLOW], ids=["VAEs", "VAEs and flow"])
def test_what_lies_beneath_is_trained_as_if_it_were_alone(tmp_path: Path, beneath: tuple[str, ...]) -> None:
    """So that one run tells what each lever gives."""
    alone, ours = (
        train(tiny_config(*overrides, "data.records_per_silo=20"), tmp_path / name).generator().server.blocks
        for name, overrides in (("alone", beneath), ("ours", REFINED))
    )
    assert alone.keys() < ours.keys()
    assert all(torch.equal(tensor, ours[key][name]) for key, part in alone.items() for name, tensor in part.items())


def test_a_straight_way_is_gone_exactly_and_ends_at_the_last_guess() -> None:
    start, speed = torch.randn(4, 3), torch.randn(4, 3)
    torch.testing.assert_close(transported(lambda x, _: speed, start, 7), start + speed)
    torch.testing.assert_close(transported(lambda _, t: t.expand(4, 3), start, 4), start + (0 + 1 + 2 + 3) / 16)
    target = torch.rand(4, 3)
    torch.testing.assert_close(transported(lambda x, t: (target - x) / (1.0 - t), start, 5), target)


def test_a_flow_finds_what_no_normal_is() -> None:
    """Latents at -2 and +2, and nothing between them."""
    torch.manual_seed(0)
    flow, objective = Velocity(1, (32, 32)), LatentFlow(1)
    model = FlowVAE(VAE(nn.Flatten(), Ones(), torch.zeros(1, 1), Bernoulli()), flow, None)
    optimizer = torch.optim.Adam(flow.parameters(), 1e-2)
    group = torch.zeros(128, dtype=torch.int64)
    for _ in range(200):
        signs = 4.0 * torch.randint(0, 2, (128, 1)) - 2.0
        batch = Batch(torch.cat([signs, torch.full_like(signs, -20.0)], dim=1), group, group, torch.ones(128))
        noise = {name: torch.randn(128, *shape) for name, shape in objective.noise.items()}
        loss = losses_of(objective, model, batch, noise).total.mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    with torch.no_grad():
        z = transported(lambda z, t: model.velocity(z, t, group[:1].expand(len(z))), torch.randn(500, 1), 50)
    assert float((z.abs() - 2.0).abs().mean()) < 0.25  # a normal of their mean and variance: 0.98
    assert 0.4 < float((z > 0).float().mean()) < 0.6


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 9, 8), (1, 5, 5)])
def test_refiners_fit_images_of_any_size(shape: tuple[int, ...]) -> None:
    network = Mixer(2 * shape[0] + 1, 2, 5, shape)
    assert network(torch.rand(2, 2 * shape[0] + 1, *shape[1:])).shape == (2, *shape)


def test_squares_are_put_back_where_they_were_cut() -> None:
    """Width 32 holds both channels of a square: with layers that change nothing, the image comes out as it was."""
    network, x = Mixer(2, 0, 32, (2, 9, 6)), torch.rand(3, 2, 9, 6)
    for layer in (network.first, network.last):
        nn.init.eye_(layer.weight)
        nn.init.zeros_(layer.bias)
    torch.testing.assert_close(network(x), x, rtol=0, atol=0)


def test_pathways_do_what_their_definition_says(tiny_federation: Federation) -> None:
    config = tiny_config(*REFINED, "method.flow_steps=2", "method.refiner_steps=2", "method.refiner_noise=0.25")
    method = Experiment.of(config, tiny_federation).method
    state = initial_state(method, tiny_federation, config)
    generator = Generator(method, state.server, tiny_federation.groups)
    assert generator.pathways == ("refined", "flow", "z1")
    model = generator.model("mnist")
    assert isinstance(model, FlowVAE)
    assert model.refiner is not None
    group = torch.zeros(3, dtype=torch.int64)
    noise = {"e": torch.randn(3, 4), "pixels": torch.randn(3, 1, 28, 28)}

    def at(x: Tensor, time: float) -> Tensor:
        return torch.cat([x, torch.full((len(x), 1), time)], dim=1)

    def guess(x: Tensor, mean: Tensor, time: float) -> Tensor:
        assert model.refiner is not None
        return torch.sigmoid(model.refiner(torch.cat([x, mean, torch.full_like(x, time)], dim=1)))

    with torch.no_grad():
        z = noise["e"] + model.flow(at(noise["e"], 0.0)) / 2
        z = z + model.flow(at(z, 0.5)) / 2
        mean = torch.sigmoid(model.decoder(z))
        x = mean + 0.25 * noise["pixels"]
        x = x + (guess(x, mean, 0.0) - x) / 2
        for name, expected in (("flow", mean), ("refined", guess(x, mean, 0.5))):
            found = method.pathways[name].generate(model, SampleInputs(noise, group, group))
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


class PullThePlug(Observer):
    """When round 1 is over."""

    def round_done(self, report: RoundReport, metrics: dict[str, float]) -> None:
        if report.context.round == 1:
            raise KeyboardInterrupt


@pytest.mark.parametrize("engine", ["reference", "fused"])
def test_a_run_resumes_and_sends_its_blocks_and_nothing_else(engine: str, tmp_path: Path) -> None:
    small = (*REFINED, "data.records_per_silo=20", f"engine.name={engine}", "engine.device=cpu")
    whole = train(tiny_config(*small), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(tiny_config(*small), tmp_path / "half", observer=PullThePlug())
    assert RunFolder.open(tmp_path / "half").rounds_done == 1
    resume(tmp_path / "half")
    assert_same_run(tmp_path / "half", tmp_path / "whole")
    for row in whole.folder.egress():
        group = row["silo"].rpartition("-")[0]
        assert {key.partition("@")[0] for key in row["blocks"]} == {"encoder", "decoder", "flow", "refiner"}
        assert {key.partition("@")[2] for key in row["blocks"]} == {f"group={group}"}
    assert whole.generator().sample(2, group="mnist").shape == (2, 1, 28, 28)


@pytest.mark.parametrize(("overrides", "phases"), [(FLOW, 2), (REFINED, 3)], ids=["flow", "flow and refiner"])
def test_every_phase_that_sees_records_is_paid_for(
    tiny_federation: Federation, overrides: tuple[str, ...], phases: int
) -> None:
    private = ("privacy.mechanism=dp-sgd", "privacy.noise_multiplier=2", "privacy.accountant=rdp")
    config = tiny_config(*overrides, *private, "local.epochs=3")
    plans = privacy_of_silos(config, tiny_federation, tiny_method(tiny_federation, *overrides), [(0, 1, 2, 3)] * 2)
    assert [plan.steps for plan in plans] == [phases * 3 * 3] * 4  # 3 epochs of 40 records in batches of 16


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (("method.flow=[0]",), r"method.flow = \[0\] must be a list of numbers of at least 1"),
        (("method.refiner_noise=0",), r"method.refiner_noise = 0 must be greater than 0"),
        (("model.silos.silo-0.latent=3",), r"model.silos gives silos networks of their own, which flow_vae has no"),
        (("method.refiner=1",), r"convolutional networks need images"),
        (("model.posterior=from-decoder",), r"model.posterior = 'from-decoder' is for VAEs of one level"),
    ],
)
def test_mistakes_are_named(overrides: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        tiny_method(federation_of([0, 0], [1, 1]), *FLOW, *overrides)
