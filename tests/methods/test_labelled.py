"""Methods that learn labelled vectors: DP-CVAE, its baselines, and the mistakes of its reference code."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedloom.config import Config
from fedloom.engines.base import fresh_blocks, initial_state
from fedloom.errors import ConfigError, DataError, FedloomWarning
from fedloom.experiment import Experiment, Run, train
from fedloom.federation.records import Batch, Federation, Records, Silo
from fedloom.federation.rounds import RoundContext, Site
from fedloom.methods.base import METHODS, Method
from fedloom.methods.generator import LABEL_SHARES, Generator
from fedloom.methods.labels import COUNTS
from fedloom.methods.steps import ServerState
from fedloom.models.gaussian import DiagonalGaussian, kl_divergence
from fedloom.models.labelled import ConditionalVAE, LinearConditionalVAE, LinearHead
from fedloom.objectives.base import Step
from fedloom.objectives.labelled import ConditionalAdversarial, ConditionalElbo, CrossEntropy, drawn_labels
from fedloom.privacy.accounting import spent
from fedloom.privacy.ledger import Ledger
from fedloom.settings import override, parse
from fedloom.sharing.update import Update
from fedloom.streams import Streams
from support import round_of

SMALL = {"dp_cgan": ("method.generator_hidden=[8]", "method.discriminator_hidden=[8]")}
WIDTH, CLASSES = 6, ("ant", "bee", "cat")
CONTEXT = RoundContext(1, 4, (0,))


def vectors(count: int, seed: int, classes: tuple[int, ...] = (0, 1, 2)) -> Records:
    """Unit vectors about the first three axes, one for each class."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.tensor(classes)[torch.randint(0, len(classes), (count,), generator=generator)]
    x = torch.eye(3, WIDTH)[y] + 0.25 * torch.randn(count, WIDTH, generator=generator)
    return Records(x / x.norm(dim=1, keepdim=True), y, torch.zeros(count, dtype=torch.int64))


def federation(silos: int = 3, count: int = 60) -> Federation:
    members = tuple(Silo(f"silo-{i}", vectors(count, i), vectors(20, 90 + i)) for i in range(silos))
    return Federation("vectors", members, vectors(300, 77), ("all",), CLASSES)


def config(method: str, *overrides: str) -> Config:
    small = (
        "rounds=3",
        "model.hidden=[8]",
        "model.latent=3",
        "local.batch_size=20",
        "local.epochs=2",
        "evaluation.metrics=[]",
        "engine.name=reference",
        "engine.workers=1",
        "engine.threads=1",
    )
    return parse(Config, override({"method": {"name": method}}, [*small, *overrides]))


def method_of(name: str, *overrides: str) -> Method:
    return Experiment.of(config(name, *overrides), federation()).method


def batch_of(records: Records) -> Batch:
    return Batch(records.x, records.y, records.group, torch.ones(len(records)))


def noise_for(objective: object, rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(rows, *shape, generator=generator) for name, shape in objective.noise.items()}  # type: ignore


# DP-CVAE


def cvae(**options: str) -> ConditionalVAE:
    torch.manual_seed(0)
    model = method_of("dp_cvae", *(f"method.{key}={value}" for key, value in options.items())).build(Site("s", (0,)))
    assert isinstance(model, ConditionalVAE)
    return model


def test_encoders_stay_at_home_and_the_decoder_is_averaged() -> None:
    plan = method_of("dp_cvae").plan
    assert (plan.blocks["encoder"].up, plan.blocks["decoder"].up) == (False, True)
    assert plan.blocks["decoder"].scope == "global"


def test_the_loss_sums_over_dimensions_and_leaves_the_batch_to_the_engine() -> None:
    model, batch = cvae(), batch_of(vectors(5, 1))
    objective = ConditionalElbo(3, kl_weight=2.0)
    noise = noise_for(objective, 5)
    losses = objective(model, Step(batch, noise, {}, CONTEXT))
    posterior = model.encode(batch.x, batch.y)
    mean = model.decode(posterior.mean + torch.exp(posterior.log_variance / 2) * noise["z"], batch.y)
    divergence = 0.5 * (posterior.log_variance.exp() + posterior.mean**2 - 1 - posterior.log_variance).sum(1)
    torch.testing.assert_close(losses.terms["kl"], divergence)
    # The variance of a decoded number is 1 / (2 d), so half its inverse is d = 6.
    torch.testing.assert_close(losses.total, 6.0 * (batch.x - mean).square().sum(1) + 2.0 * divergence)


def test_the_reference_loss_weighs_the_divergence_by_the_batch_and_says_so() -> None:
    with pytest.warns(FedloomWarning, match="the latent then carries nothing"):
        method = method_of("dp_cvae", "method.loss=reference")
    (phase,) = method.phases
    batch = batch_of(vectors(5, 1))
    losses = phase.objective(cvae(), Step(batch, noise_for(phase.objective, 5), {}, CONTEXT))
    torch.testing.assert_close(
        losses.total, losses.terms["squared-error"] / WIDTH + 0.1 * 20 * losses.terms["kl"]
    )  # local.batch_size is 20


def trained(loss: str, tmp_path: Path) -> tuple[Run, float]:
    """A run without noise, and its divergence in nats in the last round."""
    settings = ("method.variance=0.003", "rounds=15", "local.learning_rate=0.01", "local.epochs=5")
    run = train(config("dp_cvae", f"method.loss={loss}", *settings), tmp_path / loss, federation(2, 100))
    return run, run.metrics()[-1]["train/cvae/kl"]


@pytest.mark.filterwarnings("ignore:method.loss")
def test_the_posterior_collapses_with_the_reference_loss_alone(tmp_path: Path) -> None:
    run, divergence = trained("bound", tmp_path)
    _, collapsed = trained("reference", tmp_path)
    assert divergence > 1.0
    assert collapsed < 0.01
    ratios = []
    for label, name in enumerate(CLASSES):
        real = federation().test
        samples = run.generator().sample(2000, group="all", label=name, pathway="x")
        ratios.append((samples.var(0).sum() / real.x[real.y == label].var(0).sum()).item())
    assert 0.5 < sum(ratios) / 3 < 2.0, ratios


@pytest.mark.parametrize(("kind", "rows"), [("learned", 1), ("class", 3)])
def test_the_latent_variance_can_be_learned_for_all_or_for_each_class(kind: str, rows: int) -> None:
    model = cvae(prior_variance=kind)
    scale = model.decoder.log_scale
    assert scale is not None
    assert scale.shape == (rows, 3)
    with torch.no_grad():
        scale[-1] = torch.log(torch.tensor(2.0))
    prior = model.prior(torch.tensor([2]))
    assert prior.sample(torch.ones(1, 3)).tolist() == [[2.0, 2.0, 2.0]]
    # KL(N(0, 1) || N(0, 4)) = log 2 + 1/8 - 1/2 for each latent.
    nn.init.zeros_(model.encoder.layers[-1].weight)  # type: ignore[arg-type]
    nn.init.zeros_(model.encoder.layers[-1].bias)  # type: ignore[arg-type]
    batch = batch_of(vectors(4, 1, classes=(2,)))
    objective = ConditionalElbo(3)
    losses = objective(model, Step(batch, noise_for(objective, 4), {}, CONTEXT))
    expected = 3 * (torch.tensor(2.0).log() + 0.125 - 0.5)
    torch.testing.assert_close(losses.terms["kl"], expected.expand(4))


LINEAR = ("model.posterior=closed-form", "model.hidden=[]", "model.latent=2", "method.labels=uniform")


def linear_cvae() -> LinearConditionalVAE:
    torch.manual_seed(4)
    model = method_of("dp_cvae", *LINEAR).build(Site("s", (0,)))
    assert isinstance(model, LinearConditionalVAE)
    nn.init.normal_(model.decoder.layers[0].weight, std=0.3)  # type: ignore[arg-type]
    return model


def test_latents_of_a_linear_decoder_are_the_best_there_are() -> None:
    model, batch = linear_cvae(), batch_of(vectors(5, 1))
    found = model.encode(batch.x, batch.y)
    mean = found.mean.clone().requires_grad_()
    log_variance = found.log_variance.clone().requires_grad_()
    # The bound of a linear decoder without sampling: E|x - W z - b|^2 = |x - W m - b|^2 + sum_i v_i |W_i|^2.
    columns = model.decoder.layers[0].weight[:, :2].detach().square().sum(0)  # type: ignore[index, union-attr]
    squared = (batch.x - model.decode(mean, batch.y)).square().sum(1) + (log_variance.exp() * columns).sum(1)
    q = DiagonalGaussian(mean, log_variance)
    bound = (squared / (2 * model.variance) + kl_divergence(q, model.prior(batch.y))).sum()
    for slope in torch.autograd.grad(bound, [mean, log_variance]):
        torch.testing.assert_close(slope, torch.zeros_like(slope), atol=2e-4, rtol=0)


def test_without_an_encoder_only_the_decoder_learns_and_leaves() -> None:
    method = method_of("dp_cvae", *LINEAR)
    assert list(method.plan.blocks) == ["decoder"]
    assert [(phase.trains, phase.touches_records) for phase in method.phases] == [(("decoder",), True)]
    model = method.build(Site("s", (0,)))
    assert {name.split(".")[0] for name, _ in model.named_parameters()} == {"decoder"}


def test_an_encoder_that_learns_from_the_decoder_looks_at_no_record() -> None:
    method = method_of("dp_cvae", "model.posterior=from-decoder")
    assert [(phase.trains, phase.touches_records) for phase in method.phases] == [
        (("encoder",), False),
        (("decoder",), True),
    ]
    objective, model = method.phases[0].objective, cvae()
    noise = noise_for(objective, 5)
    losses = [objective(model, Step(batch_of(vectors(5, seed)), noise, {}, CONTEXT)).total for seed in (1, 2)]
    assert torch.equal(*losses)
    label = drawn_labels(noise["label"], 3)
    dreamt = model.decode(noise["z"], label) + noise["x"] / math.sqrt(12)  # the variance is 1 / (2 * 6)
    torch.testing.assert_close(losses[0], -model.encode(dreamt, label).log_density(noise["z"]))
    (slope,) = torch.autograd.grad(losses[0].sum(), [model.decoder.layers[0].weight], allow_unused=True)  # type: ignore
    assert slope is None


def test_a_linear_decoder_learns_where_noise_is_shared(tmp_path: Path) -> None:
    """A round is one sum over all silos, which an encoder at each silo would make impossible."""
    shared = (*PRIVATE, "privacy.trust=distributed", "local.steps=1", "local.optimizer=sgd", "local.batch_size=60")
    settings = (*shared, "rounds=15", "local.learning_rate=2")
    generator = train(config("dp_cvae", *LINEAR, *settings), tmp_path / "run", federation()).generator()
    for label, name in enumerate(CLASSES):
        assert generator.sample(500, group="all", label=name, pathway="x").mean(0).argmax().item() == label
    with pytest.raises(ConfigError, match="block 'encoder' has scope 'silo', not 'global'"):
        Experiment.of(config("dp_cvae", *settings, "method.labels=uniform"), federation()).trainer.check_privacy()


@pytest.mark.parametrize(
    "wrong", ["model.hidden=[8]", "model.kl_weight=2", "method.loss=reference", "method.prior_variance=class"]
)
@pytest.mark.filterwarnings("ignore:method.loss")
def test_known_latents_need_a_linear_decoder_and_the_plain_bound(wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"needs model.hidden = \[\], model.kl_weight = 1"):
        method_of("dp_cvae", *LINEAR, wrong)


def test_noise_is_calibrated_for_all_rounds_and_all_of_it_is_spent(tmp_path: Path) -> None:
    """The reference calibrates for 20 epochs and trains 250: its epsilon of 1 is really about 4."""
    private = config(
        "dp_cvae", "privacy.mechanism=dp-sgd", "privacy.epsilon=1", "privacy.delta=1e-5", "privacy.accountant=rdp"
    )
    train(private, tmp_path / "run", federation())
    ledger = Ledger(tmp_path / "run" / "ledger.sqlite")
    events = list(ledger.events("silo-0"))
    ledger.close()
    updates = [event for event in events if event.rate < 1]  # type: ignore[union-attr]
    assert sum(event.steps for event in updates) == 3 * 2 * 3  # type: ignore[union-attr]
    assert len(events) == 4  # an update in each round, and the class counts once
    assert 0.98 < spent(events, 1e-5, "rdp") <= 1.0
    assert spent(events[:3], 1e-5, "rdp") < 0.9


def test_counts_of_all_rounds_make_the_label_shares() -> None:
    """A silo sends them in its own first round, and in a deployment perhaps late: others' still count."""
    step, server = method_of("dp_cvae").server_step, ServerState({})
    for number, counts in enumerate(([30.0, 10.0, 0.0], [0.0, 20.0, 40.0]), start=1):
        sent = {COUNTS: {"counts": torch.tensor(counts)}}
        updates = [Update(f"silo-{number}", number, {}, {"all": 60.0}, sent)]
        server = step(round_of(server, updates, CONTEXT, Streams(1))).state
    torch.testing.assert_close(server.memory[LABEL_SHARES], torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64))


@pytest.mark.parametrize("name", ["dp_cvae", "flow", "dp_cgan", "moments", "refined_moments"])
def test_payloads_are_called_noisy_only_under_a_mechanism(name: str) -> None:
    sent = [rule.payload for rule in method_of(name, *SMALL.get(name, ())).payloads]
    assert sent
    for payload in sent:
        what, _, noise = payload.cost.rpartition("; ")
        assert noise == "noisy, at a share of the budget, under a privacy mechanism, else exact"
        assert "noisy" not in what


def test_labels_follow_noisy_counts_and_no_class_is_lost(tmp_path: Path) -> None:
    lopsided = tuple(Silo(f"silo-{i}", vectors(60, i, classes=(0, 0, 0, 1))) for i in range(3))
    data = Federation("vectors", lopsided, vectors(30, 77), ("all",), CLASSES)
    run = train(config("dp_cvae"), tmp_path / "plain", data)
    shares = run.generator().server.memory[LABEL_SHARES]
    counts = torch.bincount(torch.cat([silo.train.y for silo in lopsided]), minlength=3).double()
    floored = counts.clamp_min(0.05 * 60)  # the class that nobody has is still generated
    torch.testing.assert_close(shares, floored / floored.sum())
    drawn = run.generator().labels(20_000)
    torch.testing.assert_close(torch.bincount(drawn).double() / 20_000, shares, atol=0.01, rtol=0)
    alike = train(config("dp_cvae", "method.labels=uniform"), tmp_path / "alike", data)
    assert alike.generator().label_shares.tolist() == pytest.approx([1 / 3] * 3)
    sent = [[set(row["payloads"]) for row in each.folder.egress()] for each in (run, alike)]
    assert sent == [[{"records", "class-counts"}] * 3 + [{"records"}] * 6, [{"records"}] * 9]


@pytest.mark.parametrize("name", ["dp_cvae", "flow", "dp_cgan", "moments", "refined_moments"])
@pytest.mark.parametrize(
    ("exponent", "expected"),
    [(0, [1 / 3, 1 / 3, 1 / 3]), (0.5, [8 / 13, 4 / 13, 1 / 13]), (1, [64 / 81, 16 / 81, 1 / 81])],
)
def test_an_exponent_flattens_the_tail_of_the_labels(name: str, exponent: float, expected: list[float]) -> None:
    method = method_of(name, f"method.label_exponent={exponent}", *SMALL.get(name, ()))
    shares = torch.tensor([64, 16, 1], dtype=torch.float64) / 81
    generator = Generator(method, ServerState({}, {LABEL_SHARES: shares}), ("all",), CLASSES)
    assert generator.label_shares.tolist() == pytest.approx(expected)
    assert len(method.payloads) == len(method_of(name, *SMALL.get(name, ())).payloads)  # nothing more leaves
    # A class that a silo has never met stays out of labels that are as at the silo, whatever the exponent.
    at_home = generator.tempered(torch.tensor([0.8, 0.2, 0.0], dtype=torch.float64)).tolist()
    assert at_home == pytest.approx({0: [0.5, 0.5, 0], 0.5: [2 / 3, 1 / 3, 0], 1: [0.8, 0.2, 0]}[exponent])


@pytest.mark.parametrize("exponent", [-0.1, 1.1])
def test_an_exponent_beyond_its_bounds_is_named(exponent: float) -> None:
    sentence = rf"method.label_exponent = {exponent} must be at least 0 and at most 1"
    with pytest.raises(ConfigError, match=sentence):
        method_of("dp_cvae", f"method.label_exponent={exponent}")


# GANs, flows, heads


def test_a_gans_weights_persist_from_round_to_round(tmp_path: Path) -> None:
    """The reference draws both networks anew in every round."""
    small = config("dp_cgan", "method.generator_hidden=[8]", "method.discriminator_hidden=[8]", "method.rate=1e-9")
    run = train(small, tmp_path / "run", federation())
    generator = run.generator()
    start = fresh_blocks(generator.method, Site("silo-0", (0,)), Streams(0))
    for key, block in generator.server.blocks.items():
        for name, tensor in block.items():  # three rounds at a rate of nothing leave the first weights
            torch.testing.assert_close(tensor, start[key][name], atol=1e-6, rtol=0)


def test_a_fakes_label_depends_on_no_record() -> None:
    method = method_of("dp_cgan", "method.generator_hidden=[8]", "method.discriminator_hidden=[8]")
    model, objective = method.build(Site("s", (0,))), ConditionalAdversarial("discriminator", 3, 3)
    noise, batch = noise_for(objective, 5), batch_of(vectors(5, 1))
    other = replace(batch, y=(batch.y + 1) % 3)
    one, another = (objective(model, Step(each, noise, {}, CONTEXT)).terms for each in (batch, other))
    assert torch.equal(one["fake"], another["fake"])
    assert not torch.equal(one["real"], another["real"])
    assert torch.bincount(drawn_labels(torch.randn(30_000), 3)).tolist() == pytest.approx([10_000] * 3, rel=0.05)


def test_only_the_discriminator_touches_records() -> None:
    method = method_of("dp_cgan")
    assert [(phase.name, phase.touches_records) for phase in method.phases] == [
        ("discriminator", True),
        ("generator", False),
    ]
    assert not method.plan.blocks["discriminator"].up


def test_a_flow_learns_where_the_classes_are(tmp_path: Path) -> None:
    many = config("flow", "rounds=20", "local.learning_rate=0.01", "model.hidden=[32]", "local.epochs=5")
    generator = train(many, tmp_path / "run", federation(2, 100)).generator()
    for label, name in enumerate(CLASSES):
        mean = generator.sample(500, group="all", label=name).mean(0)
        assert mean.argmax().item() == label
        assert 0.6 < mean[label] < 1.1


def head() -> LinearHead:
    model = LinearHead(WIDTH, 3)
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    return model


@pytest.mark.parametrize(("number", "factor"), [(1, 1.0), (5, 1.0), (6, 0.1), (7, 0.1), (8, 0.01), (10, 0.01)])
def test_the_rate_falls_over_rounds_and_not_within_one(number: int, factor: float) -> None:
    """The reference's milestones count local epochs, so that its rate is a hundredth from round 8 of 50 on."""
    objective = CrossEntropy(milestones=(0.5, 0.72))
    losses = objective(head(), Step(batch_of(vectors(4, 1)), {}, {}, RoundContext(number, 10, (0,))))
    torch.testing.assert_close(losses.total, factor * torch.log(torch.tensor(3.0)).expand(4))


def test_the_proximal_term_changes_the_gradient_by_mu_times_the_way_gone() -> None:
    (plain,), (prox,) = (method_of("linear_head", f"method.proximal={mu}").phases for mu in (0, 0.5))
    model, batch = head(), batch_of(vectors(8, 1))
    received = {name: torch.full_like(tensor, -0.2) for name, tensor in model.named_parameters()}
    gradients = []
    for phase in (plain, prox):
        total = phase.objective(model, Step(batch, {}, received, CONTEXT)).total.mean()
        gradients.append(torch.autograd.grad(total, [model.head.weight])[0])
    torch.testing.assert_close(gradients[1] - gradients[0], torch.full_like(gradients[0], 0.5 * 0.2))


def test_a_head_learns_and_generates_nothing(tmp_path: Path) -> None:
    run = train(config("linear_head", "rounds=10", "local.learning_rate=0.05"), tmp_path / "run", federation())
    generator, test = run.generator(), federation().test
    model = generator.model("all")
    assert isinstance(model, LinearHead)
    assert (model.logits(test.x).argmax(1) == test.y).double().mean() > 0.9
    assert generator.pathways == ()
    with pytest.raises(ConfigError, match="'linear_head' classifies and generates nothing"):
        generator.sample(3, group="all")


# Labels and mistakes


def test_a_class_is_generated_by_its_name_or_number(tmp_path: Path) -> None:
    generator = train(config("dp_cvae"), tmp_path / "run", federation()).generator()
    numbers = torch.tensor([2, 0, 1, 1])
    mixed = generator.sample(4, group="all", labels=numbers)
    for row, number in enumerate(numbers.tolist()):
        alone = generator.sample(4, group="all", label=CLASSES[number])
        torch.testing.assert_close(alone[row], mixed[row])
    with pytest.raises(ConfigError, match="unknown class 'bat'; did you mean 'cat'"):
        generator.sample(2, group="all", label="bat")
    with pytest.raises(ConfigError, match="4 labels were given for 3 samples"):
        generator.sample(3, group="all", labels=numbers)


LABELLED = sorted(name for name, recipe in METHODS.listed() if recipe.modalities == ("vector",))
PRIVATE = ("privacy.mechanism=dp-sgd", "privacy.epsilon=5", "privacy.accountant=rdp")


def test_all_of_them_are_known() -> None:
    assert LABELLED == ["dp_cgan", "dp_cvae", "flow", "linear_head", "moments", "refined_moments"]


@pytest.mark.parametrize("name", LABELLED)
@pytest.mark.parametrize("layout", ["federated", "centralised"])
def test_every_method_for_vectors_runs_private(name: str, layout: str, tmp_path: Path) -> None:
    settings = config(name, *PRIVATE, f"data.layout={layout}", *SMALL.get(name, ()))
    run = train(settings, tmp_path / "run", federation())
    assert 4.9 < run.metrics()[-1]["privacy/epsilon/max"] <= 5
    assert run.folder.status["state"] == "finished"


@pytest.mark.parametrize("name", [name for name in LABELLED if name != "linear_head"])
def test_nothing_is_generated_on_another_device_than_asked_for(name: str) -> None:
    """The device "meta" computes shapes only, and refuses to meet tensors of the CPU."""
    data, settings = federation(), config(name, *SMALL.get(name, ()))
    method = Experiment.of(settings, data).method
    generator = Generator(method, initial_state(method, data, settings).server, data.groups, data.classes)
    for pathway in generator.pathways:
        found = generator.sample(11, group="all", pathway=pathway, device="meta")
        assert (found.device.type, found.shape) == ("meta", (11, WIDTH))


@pytest.mark.parametrize("name", LABELLED)
def test_what_has_no_classes_or_is_no_vector_is_refused(name: str) -> None:
    plain = federation()
    silo = plain.silos[0]
    unknown = replace(silo, train=replace(silo.train, y=torch.where(torch.arange(60) < 2, -1, silo.train.y)))
    images = replace(silo, train=replace(silo.train, x=torch.rand(60, 1, 2, 3)), validation=None)
    for data, sentence in (
        (replace(plain, classes=()), "needs records of at least two classes, not 0"),
        (replace(plain, classes=("ant",)), "needs records of at least two classes, not 1"),
        (replace(plain, silos=(unknown,)), "2 of the 60 records of silo 'silo-0' have no label"),
        (replace(plain, silos=(images,), test=images.train), r"needs vectors, but the records have shape \(1, 2, 3\)"),
    ):
        with pytest.raises((ConfigError, DataError), match=sentence):
            Experiment.of(config(name), data)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("method.milestones=[0.5]",), "method.milestones scales the loss"),
        (("method.milestones=[50]",), "method.milestones = .* must be numbers between 0 and 1"),
        (("method.proximal=-1",), "method.proximal = -1 must be at least 0"),
    ],
)
def test_a_heads_mistakes_are_named(overrides: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        method_of("linear_head", *overrides)


def test_a_silo_with_fewer_records_than_a_batch_is_named(tmp_path: Path) -> None:
    small = replace(federation(), silos=(*federation().silos[:2], Silo("tiny", vectors(12, 5))))
    private = config("dp_cvae", "privacy.mechanism=dp-sgd", "privacy.epsilon=1")
    with pytest.raises(ConfigError, match=r"local.batch_size is 20, but silo 'tiny' holds 12"):
        train(private, tmp_path / "run", small)
    assert not (tmp_path / "run").exists()
    train(config("dp_cvae"), tmp_path / "plain", small)  # without privacy a small batch does
