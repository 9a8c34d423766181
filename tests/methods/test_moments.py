"""Generators from noisy sums: what the sums hold, what is made of them, and that one record moves them little."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedloom.config import Config
from fedloom.errors import ConfigError
from fedloom.experiment import Experiment, train
from fedloom.federation.records import Batch, Federation, Records, Silo
from fedloom.federation.rounds import RoundContext
from fedloom.methods.generator import LABEL_SHARES
from fedloom.methods.moments import DECODER
from fedloom.methods.steps import ServerState
from fedloom.models.class_gaussian import (
    BIAS,
    ClassGaussian,
    Contribution,
    Gradient,
    estimate,
    told_apart_by,
    within_unit_ball,
)
from fedloom.settings import override, parse
from fedloom.sharing.update import Update
from support import round_of

WIDTH, CLASSES = 8, 3


def cloud(count: int, seed: int) -> Records:
    """Unit vectors about a common direction, more spread along some axes than along others."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, CLASSES, (count,), generator=generator)
    spread = torch.tensor([0.02, 0.3, 0.3, 0.3, 0.1, 0.1, 0.05, 0.05])
    x = torch.eye(WIDTH)[0] + 0.5 * torch.eye(WIDTH)[1 + y] + spread * torch.randn(count, WIDTH, generator=generator)
    return Records(x / x.norm(dim=1, keepdim=True), y, torch.zeros(count, dtype=torch.int64))


def federation(count: int = 400) -> Federation:
    silos = tuple(Silo(f"silo-{i}", cloud(count, i)) for i in range(4))
    return Federation("cloud", silos, cloud(1000, 99), ("all",), tuple("abc"))


def config(method: str, *overrides: str) -> Config:
    rounds = {"moments": 1, "refined_moments": 12}[method]
    plain = (f"rounds={rounds}", "evaluation.metrics=[]", "engine.name=reference", "engine.workers=1")
    return parse(Config, override({"method": {"name": method}}, [*plain, "engine.threads=1", *overrides]))


def batch_of(records: Records) -> Batch:
    return Batch(records.x, records.y, records.group, torch.ones(len(records)))


@pytest.mark.parametrize("radius", [0.3, 1.0, 3.0])
def test_no_record_contributes_more_than_the_bound(radius: float) -> None:
    model, how = ClassGaussian(CLASSES, WIDTH), Contribution(CLASSES, radius, product_weight=0.7, count_weight=0.4)
    rows = how(model, batch_of(cloud(50, 1)))
    norms = torch.cat([tensor.flatten(1) for tensor in rows.values()], dim=1).norm(dim=1)
    assert bool((norms <= how.bound + 1e-6).all())
    if radius == 0.3:  # then all are cut to it, and the bound is met exactly
        torch.testing.assert_close(norms, torch.full((50,), how.bound))
    assert {name: tuple(tensor.shape[1:]) for name, tensor in rows.items()} == how.shapes(WIDTH)


def lda(model: ClassGaussian, x: Tensor) -> Tensor:
    """What the generator's own densities say of the class."""
    means = (model.decoder["centre"] + model.decoder["offsets"]).double()
    inverse = torch.linalg.pinv((model.decoder["factor"] @ model.decoder["factor"].T).double(), rtol=1e-6)
    return (x.double() @ inverse @ means.T - 0.5 * ((means @ inverse) * means).sum(1)).argmax(1)


def test_without_noise_the_generator_has_the_data_s_own_moments(tmp_path: Path) -> None:
    data = federation()
    generator = train(config("moments"), tmp_path / "run", data).generator()
    model = generator.model("all")
    assert isinstance(model, ClassGaussian)
    pooled = torch.cat([silo.train.x for silo in data.silos])
    y = torch.cat([silo.train.y for silo in data.silos])
    means = torch.stack([pooled[y == label].mean(0) for label in range(CLASSES)])
    torch.testing.assert_close(model.decoder["centre"] + model.decoder["offsets"], means, atol=1e-3, rtol=0)
    centred = pooled - means[y]
    within = centred.T @ centred / len(y)
    torch.testing.assert_close(model.decoder["factor"] @ model.decoder["factor"].T, within, atol=1e-4, rtol=0)
    torch.testing.assert_close(generator.server.memory[LABEL_SHARES], torch.bincount(y).double() / len(y))
    samples = generator.sample(20_000, group="all", label="b")
    torch.testing.assert_close(samples.mean(0), means[1], atol=0.02, rtol=0)
    torch.testing.assert_close(samples.T.cov(), within, atol=0.01, rtol=0)


def noisy_sums(noise: float, count: int = 4000) -> tuple[dict[str, Tensor], Records, Contribution]:
    how, records = Contribution(CLASSES), cloud(count, 5)
    rows = how(ClassGaussian(CLASSES, WIDTH), batch_of(records))
    generator = torch.Generator().manual_seed(8)
    sums = {name: tensor.double().sum(0) for name, tensor in rows.items()}
    return {n: s + noise * torch.randn(s.shape, generator=generator) for n, s in sums.items()}, records, how


def test_an_estimate_told_from_another_centre_says_the_same() -> None:
    sums, records, how = noisy_sums(0.0)
    found = estimate(sums, len(records), torch.zeros(WIDTH), how)
    moved = found.about(torch.full((WIDTH,), 0.4, dtype=torch.float64))
    torch.testing.assert_close(moved.centre + moved.offsets, found.centre + found.offsets)
    x = records.x.double()
    logits = ((x - one.centre) @ one.weights.T + one.bias for one in (moved, found))
    torch.testing.assert_close(next(logits), next(logits))


@pytest.mark.parametrize("noise", [0.0, 20.0, 200.0])
def test_noise_neither_inflates_the_spread_nor_leaves_a_class_without_share(noise: float) -> None:
    sums, records, how = noisy_sums(noise)
    found = estimate(sums, len(records), torch.zeros(WIDTH), how)
    real = sum(records.x[records.y == label].var(0).sum() for label in range(CLASSES)) / CLASSES
    assert 0.5 < found.within.trace() / real < 2.0
    assert found.shares.min() > 0.01
    assert torch.linalg.eigvalsh(found.within).min() > 0
    widest = torch.linalg.eigvalsh(found.metric).max()
    if noise:  # no direction may be trusted further than the edge of the noise's own spectrum
        edge = 2 * math.sqrt(WIDTH) * noise / math.sqrt(2) / len(records)
        assert widest <= 1.15 / edge  # its size is itself read off the noise, from 28 numbers


def test_the_gradient_is_that_of_the_cross_entropy() -> None:
    model, records = ClassGaussian(CLASSES, WIDTH), cloud(30, 2)
    torch.manual_seed(0)
    for name in ("centre", "weights", "bias"):
        model.decoder[name].copy_(0.3 * torch.randn(model.decoder[name].shape))
    rows = Gradient(CLASSES, radius=4.0)(model, batch_of(records))
    weights, bias = (model.decoder[name].clone().requires_grad_() for name in ("weights", "bias"))
    logits = (records.x - model.decoder["centre"]) @ weights.T + bias
    loss = torch.nn.functional.cross_entropy(logits, records.y, reduction="sum")
    expected = torch.autograd.grad(loss, [weights, bias])
    torch.testing.assert_close(4.0 * rows["weights"].sum(0), expected[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(rows["bias"].sum(0) / BIAS, expected[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shares", [(1 / 3, 1 / 3, 1 / 3), (0.7, 0.2, 0.1)])
def test_classes_are_told_apart_by_the_weights_that_they_were_made_from(shares: tuple[float, ...]) -> None:
    torch.manual_seed(1)
    frequent = torch.tensor(shares, dtype=torch.float64)
    root = 0.2 * torch.randn(WIDTH, WIDTH, dtype=torch.float64)
    covariance, weights = root @ root.T, torch.randn(CLASSES, WIDTH, dtype=torch.float64)
    offsets, within = told_apart_by(weights, covariance, frequent)
    found = torch.linalg.solve(within, offsets.T).T
    torch.testing.assert_close(found - found[0], weights - weights[0])  # what they have in common tells nothing apart
    torch.testing.assert_close(frequent @ offsets, torch.zeros(WIDTH, dtype=torch.float64))
    whole = within + offsets.T @ torch.diag(frequent) @ offsets  # of all records: their mean and spread are kept
    torch.testing.assert_close(whole.trace(), covariance.trace())


def test_a_row_is_cut_to_the_unit_ball() -> None:
    cut = within_unit_ball(torch.tensor([[3.0, 4.0], [0.3, 0.4]]))
    torch.testing.assert_close(cut, torch.tensor([[0.6, 0.8], [0.3, 0.4]]))


@pytest.mark.parametrize("trust", ["local", "distributed"])
def test_refining_beats_moments_at_the_same_epsilon(trust: str, tmp_path: Path) -> None:
    private = ("privacy.mechanism=dp-sgd", "privacy.epsilon=2", "privacy.delta=1e-5", f"privacy.trust={trust}")
    data, right = federation(), {}
    for method in ("moments", "refined_moments"):
        settings = config(method, *private, "privacy.accountant=rdp")
        for plan in Experiment.of(settings, data).trainer.privacy:
            events = [event for number in plan.rounds for event in plan.events(number).values()]
            assert 0.97 < plan.budget.spent(events) <= 2.0
        seeded = replace(settings, privacy=replace(settings.privacy, noise="test"))
        model = train(seeded, tmp_path / method, data).generator().model("all")
        assert isinstance(model, ClassGaussian)
        right[method] = (lda(model, data.test.x) == data.test.y).double().mean().item()
    assert right["refined_moments"] > right["moments"] - 0.01
    assert right["refined_moments"] > 0.8


@pytest.mark.parametrize("overrides", [("rounds=2",), ("participation.rate=0.5",)])
def test_refining_needs_everybody_in_at_least_three_rounds(overrides: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"rounds of at least 3 and participation.rate = 1"):
        Experiment.of(config("refined_moments", *overrides), federation())


@pytest.mark.parametrize("late", ["centre", "moments"])
def test_sums_that_come_late_are_left_out(late: str) -> None:
    """They are about the centre of their own round, and of another kind than what this round is for."""
    experiment, sums = Experiment.of(config("refined_moments"), federation()), noisy_sums(0.0)[0]
    step, streams = experiment.method.server_step, experiment.trainer.streams
    payloads = {"centre": {"sum": sums["sums"].sum(0)}, "moments": sums}

    def after(server: ServerState, number: int, *sent: tuple[int, str]) -> ServerState:
        updates = [Update(f"silo-{n}", n, {}, {"all": 4000.0}, {name: payloads[name]}) for n, name in sent]
        return step(round_of(server, updates, RoundContext(number, 12, ()), streams)).state

    first = after(step.initial(streams), 1, (1, "centre"))
    wanted = after(first, 2, (2, "moments"))
    assert LABEL_SHARES in wanted.memory
    second = after(first, 2, (2, "moments"), *([(1, "centre")] if late == "centre" else []))
    third = after(second, 3, *([(2, "moments")] if late == "moments" else []))
    for name, tensor in wanted.blocks[DECODER].items():
        assert torch.equal(third.blocks[DECODER][name], tensor), name


def test_moments_of_all_rounds_are_added_up_also_late_ones() -> None:
    """As many silos, whether they come at once, are first drawn in different rounds, or come late."""
    experiment = Experiment.of(config("moments"), federation())
    step, streams = experiment.method.server_step, experiment.trainer.streams
    how, silos = Contribution(CLASSES), federation().silos

    def sent(server: ServerState, number: int, *which: tuple[int, int]) -> ServerState:
        model = ClassGaussian(CLASSES, WIDTH)  # silos are sent the server's
        model.decoder.load_state_dict(server.blocks[DECODER])
        rows = {silo: how(model, batch_of(silos[silo].train)) for _, silo in which}
        sums = {silo: {name: tensor.double().sum(0) for name, tensor in rows[silo].items()} for silo in rows}
        updates = [Update(f"silo-{silo}", n, {}, {"all": 400.0}, {"moments": sums[silo]}) for n, silo in which]
        return step(round_of(server, updates, RoundContext(number, 3, ()), streams)).state

    at_once = sent(step.initial(streams), 1, (1, 0), (1, 1), (1, 2))
    bit_by_bit = sent(sent(step.initial(streams), 1, (1, 0)), 2, (2, 1))
    assert not torch.equal(bit_by_bit.memory[LABEL_SHARES], at_once.memory[LABEL_SHARES])
    bit_by_bit = sent(bit_by_bit, 3, (2, 2))
    for name, tensor in at_once.blocks[DECODER].items():
        torch.testing.assert_close(bit_by_bit.blocks[DECODER][name], tensor, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(bit_by_bit.memory[LABEL_SHARES], at_once.memory[LABEL_SHARES])


def test_silos_that_are_first_drawn_in_later_rounds_count_as_much(tmp_path: Path) -> None:
    drawn = config("moments", "rounds=12", "participation.rate=0.3", "seed=3")
    some = train(drawn, tmp_path / "some", federation())
    everybody = train(config("moments"), tmp_path / "all", federation())
    taken = [set(row["participants"]) for row in some.metrics()]
    assert len(taken[0]) < 4  # not all at first
    assert len(set().union(*taken)) == 4  # all in the end
    for name, tensor in everybody.generator().server.blocks[DECODER].items():
        torch.testing.assert_close(some.generator().server.blocks[DECODER][name], tensor, atol=1e-6, rtol=1e-6)


def test_gradients_without_moments_leave_the_generator_alone() -> None:
    experiment = Experiment.of(config("refined_moments"), federation())
    step, streams = experiment.method.server_step, experiment.trainer.streams
    gradient = {"weights": torch.ones(CLASSES, WIDTH).double(), "bias": torch.ones(CLASSES).double()}
    before = step.initial(streams)
    update = Update("silo-0", 3, {}, {"all": 400.0}, {"gradient": gradient})
    assert step(round_of(before, [update], RoundContext(3, 12, ()), streams)).state == before
