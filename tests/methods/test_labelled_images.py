"""Methods that learn images with their classes: what they make is of the class, and of the group, that is asked for."""

from __future__ import annotations

import pytest
import torch

from engines.one_answer import assert_one_answer, trainer_of
from fedloom.engines.fused import FusedOptions
from fedloom.errors import ConfigError
from fedloom.experiment import Experiment, Run, train
from fedloom.federation.records import Batch
from fedloom.federation.rounds import RoundContext, Site
from fedloom.methods.base import Method, SampleInputs
from fedloom.methods.generator import LABEL_SHARES, Generator
from fedloom.methods.labels import COUNTS, LabelShares
from fedloom.methods.steps import ServerState
from fedloom.models.labelled import ClassVAE
from fedloom.objectives.base import Step
from fedloom.objectives.labelled import ClassElbo
from labelled_images import CLASSES, GROUPS, LEFT, OF_GROUP, TOP, nearest_class, picture_config, picture_federation

FLOW = ("method.told=['group', 'label']", "method.widths=[8, 16]", "method.attention=0", "method.steps=8")
TRAINED = {
    "class_vae": ("rounds=10", "local.learning_rate=1e-2"),
    "fission_flow": (*FLOW, "rounds=4", "local.epochs=10", "local.learning_rate=3e-3", "method.guidance=1"),
}


def method_of(name: str, *overrides: str) -> Method:
    return Experiment.of(picture_config(name, *overrides), picture_federation()).method


@pytest.fixture(scope="module", params=sorted(TRAINED))
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    config = picture_config(request.param, *TRAINED[request.param])
    return train(config, tmp_path_factory.mktemp("trained") / "run", picture_federation())


def test_samples_are_of_the_class_that_is_asked_for(trained: Run) -> None:
    """As a classifier of real images sees it, which is right about all of these."""
    test = picture_federation().test
    for number, group in enumerate(GROUPS):
        real = test.of_group(number)
        assert torch.equal(nearest_class(real.x, number), real.y)
        for label in OF_GROUP[number]:
            x = trained.generator().sample(50, group=group, label=CLASSES[label], seed=3)
            assert (nearest_class(x, number) == label).double().mean() > 0.9, (group, CLASSES[label])


def test_a_group_has_the_classes_that_its_silos_counted(trained: Run) -> None:
    generator = trained.generator()
    assert generator.label_shares_of("day").tolist() == [0.75, 0.25, 0.0]
    assert generator.label_shares_of("night").tolist() == [0.0, 0.75, 0.25]
    assert generator.label_shares.tolist() == [0.375, 0.5, 0.125]
    drawn = generator.labels(200, seed=5, shares=generator.label_shares_of("night"))
    assert LEFT not in drawn
    wanted = generator.sample(200, group="night", seed=5, labels=drawn)
    assert torch.equal(generator.sample(200, group="night", seed=5), wanted)


# Counts


def shares_of(counts: list[list[float]], exact: bool) -> list[list[float]]:
    return LabelShares(len(counts), exact).shares(torch.tensor(counts, dtype=torch.float64)).tolist()


def test_noise_makes_no_class_of_a_group_that_another_has() -> None:
    # 5 % of a mean of 100 / 3 and of 101 / 3 are about 1.7: fewer are taken for noise.
    assert shares_of([[60, 40, 1.5], [-3, 1, 100]], exact=False) == [
        pytest.approx([0.6, 0.4, 0]),
        pytest.approx([0, 0, 1]),
    ]


def test_without_noise_a_single_record_is_one() -> None:
    assert shares_of([[60, 40, 0], [0, 10, 90]], exact=True) == [[0.6, 0.4, 0], [0, 0.1, 0.9]]
    least = 0.05 * 100 / 3  # as often as this a class is made that is rarer
    assert shares_of([[60, 39, 1], [60, 0, 40]], exact=True)[0][2] == pytest.approx(least / (99 + least))


def test_a_class_that_no_group_seems_to_have_is_rare_in_each() -> None:
    found = shares_of([[60, 40, -5], [60, 40, 1]], exact=False)
    assert found[0] == pytest.approx([60 / (100 + 5 / 3), 40 / (100 + 5 / 3), 5 / 3 / (100 + 5 / 3)])
    least = 0.05 * 101 / 3
    assert found[1] == pytest.approx([60 / (100 + least), 40 / (100 + least), least / (100 + least)])


def test_a_group_that_nobody_has_counted_in_has_all_classes_alike() -> None:
    assert shares_of([[3, 1, 0], [0, 0, 0]], exact=True)[1] == pytest.approx([1 / 3] * 3)


def test_a_record_adds_one_to_the_count_of_its_class_in_its_group() -> None:
    method, test = method_of("class_vae"), picture_federation().test
    (rule,) = method.payloads
    assert rule.payload.shapes == {"counts": (6,)}
    rows = rule.statistic.contribution(torch.nn.Identity(), Batch(test.x, test.y, test.group, torch.ones(len(test))))
    assert rows["counts"].sum(dim=1).tolist() == [1.0] * len(test)
    assert rows["counts"].sum(dim=0).tolist() == [50, 50, 0, 0, 50, 50]


def test_asking_by_number_or_name_is_the_same() -> None:
    generator = Generator(method_of("class_vae"), ServerState({}), GROUPS, ("7", "cat", "0"))
    assert generator.classes_of(["1", "cat,7"]) == ("cat", "7")
    assert generator.class_of("0") == "0"  # a name comes before a number
    assert generator.class_of("2") == "0"
    with pytest.raises(ConfigError, match=r"unknown class '3' \(allowed: 0, 7, cat\)"):
        generator.classes_of(["3"])


def test_a_name_behind_that_of_a_domain_will_do_where_one_class_has_it() -> None:
    classes = ("digits/1", "digits/bag", "clothes/bag", "clothes/shoe")
    generator = Generator(method_of("class_vae"), ServerState({}), GROUPS, classes)
    assert generator.classes_of(["shoe", "1", "2"]) == ("clothes/shoe", "digits/1", "clothes/bag")
    with pytest.raises(ConfigError, match="unknown class 'bag'"):
        generator.class_of("bag")


def test_a_name_with_a_comma_is_one_name() -> None:
    generator = Generator(method_of("class_vae"), ServerState({}), GROUPS, ("bag, large", "bag"))
    assert generator.classes_of(["bag, large", "bag"]) == ("bag, large", "bag")


def test_shares_of_all_groups_hold_for_each_where_no_others_are_known() -> None:
    shares = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    generator = Generator(method_of("class_vae"), ServerState({}, {LABEL_SHARES: shares}), GROUPS, CLASSES)
    assert generator.label_shares_of("night").tolist() == [0.5, 0.3, 0.2]


# The class-conditional VAE


def test_the_bound_is_the_textbooks() -> None:
    torch.manual_seed(0)
    model, test = method_of("class_vae").build(Site("s", (0,))), picture_federation().test
    assert isinstance(model, ClassVAE)
    batch = Batch(test.x, test.y, torch.zeros_like(test.group), torch.ones(len(test)))
    noise = {"z": torch.randn(len(test), 2)}
    losses = ClassElbo(2, kl_weight=3.0)(model, Step(batch, noise, {}, RoundContext(1, 2, (0,))))
    told = torch.eye(3)[test.y] * 3**0.5
    mean, log_variance = model.encoder(test.x, told).chunk(2, dim=1)
    z = mean + (log_variance / 2).exp() * noise["z"]
    logits = model.decoder(torch.cat([z, told], dim=1))
    nll = torch.nn.functional.binary_cross_entropy_with_logits(logits, test.x, reduction="none").sum(dim=(1, 2, 3))
    divergence = 0.5 * (log_variance.exp() + mean.square() - 1 - log_variance).sum(dim=1)
    torch.testing.assert_close(losses.total, nll + 3 * divergence)


def test_decoders_are_the_groups_and_the_encoder_is_everybodys() -> None:
    plan = method_of("class_vae").plan
    assert {block: rule.scope for block, rule in plan.blocks.items()} == {"encoder": "global", "decoder": "group"}
    assert [payload.name for payload in plan.payloads] == ["records", COUNTS]


@pytest.mark.parametrize("overrides", [(), ("model.network=conv", "model.channels=[3, 4]")], ids=str)
def test_the_fused_engine_learns_the_same(overrides: tuple[str, ...]) -> None:
    config = picture_config("class_vae", "local.epochs=2", "local.batch_size=8", *overrides)
    assert_one_answer(
        *trainer_of(config, picture_federation(20)), ((1, 3), (0, 1, 2, 3)), FusedOptions(torch.device("cpu"), chunk=3)
    )


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("model.lipschitz=2",), "model.lipschitz has no place in method 'class_vae'"),
        (("model.branches.day=deeper-mlp",), "model.branches has no place in method 'class_vae'"),
        (("server.step=distil",), "is not built for decoders that are told the class"),
    ],
)
def test_what_does_not_go_with_classes_is_refused(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        method_of("class_vae", *overrides)


# The flow


def test_guidance_needs_classes() -> None:
    with pytest.raises(ConfigError, match=r"method.guidance = 2 needs classes to lean on: add 'label' to method.told"):
        method_of("fission_flow", "method.guidance=2", "method.widths=[8]", "method.attention=0")


def test_guidance_leans_towards_the_class() -> None:
    """The velocity is that with the class, and so many times what the class changes, on top of it."""
    method = method_of("fission_flow", *FLOW, "method.guidance=2", "method.steps=1", "method.solver=euler")
    plain = method_of("fission_flow", *FLOW, "method.steps=1", "method.solver=euler")
    torch.manual_seed(1)
    model = method.build(Site("s", (0,)))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    start, group, label = 0.01 * torch.randn(5, 1, 8, 8), torch.zeros(5, dtype=torch.int64), torch.full((5,), TOP)
    inputs = SampleInputs({"e": start}, group, label)
    with torch.no_grad():
        leaning = method.pathways["labelled"].generate(model, inputs)
        told = plain.pathways["labelled"].generate(model, inputs)
        free = plain.pathways["flow"].generate(model, inputs)
    inside = (leaning > 0) & (leaning < 1) & (told > 0) & (told < 1) & (free > 0) & (free < 1)
    assert inside.double().mean() > 0.5
    torch.testing.assert_close(leaning[inside], (told + 2 * (told - free))[inside], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(told, free)
