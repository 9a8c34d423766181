"""FissionVAE and its controls: who shares what, what the pathways do, and what the paper claims, on real images."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest
import torch

from fedloom.config import load_config
from fedloom.engines.base import initial_state
from fedloom.errors import ConfigError
from fedloom.evaluation.suite import Evaluator
from fedloom.experiment import Experiment, train
from fedloom.federation.records import Federation
from fedloom.federation.rounds import Site
from fedloom.methods.base import Method, SampleInputs, Setting, make_method
from fedloom.methods.generator import Generator
from fedloom.models.vae import VAE, HierarchicalVAE
from support import tiny_config

HIERARCHY = ("method.hierarchy=true", "model.top_latent=3", "model.top_hidden=[8]")


def tiny_method(federation: Federation, *overrides: str) -> Method:
    return make_method(Setting.of(tiny_config(*overrides), federation))


@pytest.mark.parametrize(
    ("overrides", "scopes"),
    [
        (["method.name=fedvae"], {"encoder": "global", "decoder": "global"}),
        (["method.decoder=global", "method.prior=symmetrical"], {"encoder": "global", "decoder": "global"}),
        ([], {"encoder": "global", "decoder": "group"}),
        (
            [*HIERARCHY, "method.prior=learnable"],
            {"encoder": "global", "decoder": "group", "top_encoder": "global", "top_decoder": "group"},
        ),
        (["method.name=group_vaes"], {"encoder": "group", "decoder": "group"}),
        (["method.name=conditional"], {"encoder": "global", "decoder": "global"}),
        (["sharing.scopes.encoder=group", "method.decoder=global"], {"encoder": "group", "decoder": "global"}),
    ],
)
def test_variants_differ_in_who_shares_what(
    tiny_federation: Federation, overrides: list[str], scopes: dict[str, str]
) -> None:
    plan = tiny_method(tiny_federation, *overrides).plan
    assert {block: rule.scope.value for block, rule in plan.blocks.items()} == scopes


def generator_of(federation: Federation, *overrides: str) -> Generator:
    """Untrained generators, with prior means far enough apart to see which one was used."""
    experiment = Experiment.of(tiny_config(*overrides), federation)
    state = initial_state(experiment.method, federation, experiment.config)
    return Generator(experiment.method, state.server, federation.groups)


def test_pathways_do_what_their_definition_says(tiny_federation: Federation) -> None:
    generator = generator_of(tiny_federation, *HIERARCHY, "method.prior=symmetrical")
    assert list(generator.method.pathways) == ["z2", "z1", "roundtrip"]
    model = generator.model("fashion-mnist")
    assert isinstance(model, HierarchicalVAE)
    noise = {"z1": torch.randn(5, 4), "z2": torch.randn(5, 3), "z1_hat": torch.randn(5, 4)}
    group, other = torch.ones(5, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)

    def image(z1: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(model.decoder(z1))

    def down(z2: torch.Tensor) -> torch.Tensor:
        centre, log_variance = model.top_decoder(z2).chunk(2, dim=1)
        return centre + torch.exp(0.5 * log_variance) * noise["z1_hat"]

    def up(z1: torch.Tensor) -> torch.Tensor:
        centre, log_variance = model.top_encoder(z1).chunk(2, dim=1)
        return centre + torch.exp(0.5 * log_variance) * noise["z2"]

    # Fashion-MNIST is the second group: its symmetrical prior mean is +1, MNIST's is -1.
    own, swapped = noise["z1"] + 1.0, noise["z1"] - 1.0
    for name, prior, expected in (
        ("z2", group, image(down(noise["z2"]))),
        ("z1", group, image(own)),
        ("z1", other, image(swapped)),
        ("roundtrip", group, image(down(up(own)))),
        ("roundtrip", other, image(down(up(swapped)))),
    ):
        found = generator.method.pathways[name].generate(model, SampleInputs(noise, group, prior))
        assert torch.allclose(found, expected, atol=1e-6)


def test_a_swapped_prior_changes_the_samples_and_is_refused_where_there_is_none(tiny_federation: Federation) -> None:
    generator = generator_of(tiny_federation, *HIERARCHY, "method.prior=wave")
    own = generator.sample(3, group="mnist", pathway="z1")
    assert torch.equal(own, generator.sample(3, group="mnist", pathway="z1", prior_of="mnist"))
    assert not torch.equal(own, generator.sample(3, group="mnist", pathway="z1", prior_of="fashion-mnist"))
    with pytest.raises(ConfigError, match=r"does not draw from a group's prior"):
        generator.sample(3, group="mnist", pathway="z2", prior_of="fashion-mnist")


def test_a_learned_prior_leaves_only_the_pathway_from_the_top(tiny_federation: Federation) -> None:
    assert list(tiny_method(tiny_federation, *HIERARCHY, "method.prior=learnable").pathways) == ["z2"]
    with pytest.raises(ConfigError, match=r"needs method\.hierarchy"):
        tiny_method(tiny_federation, "method.prior=learnable")


def test_a_deeper_branch_leaves_the_other_groups_merge_untouched(tmp_path: Path) -> None:
    """In round 1 all silos start from the same encoder, so MNIST's decoders cannot depend on Fashion's network."""
    plain = train(tiny_config(*HIERARCHY, "rounds=1"), tmp_path / "plain").generator().server.blocks
    overrides = (*HIERARCHY, "rounds=1", "model.branches.fashion-mnist=deeper-mlp")
    mixed = train(tiny_config(*overrides), tmp_path / "mixed").generator().server.blocks
    for key, tensors in plain.items():
        if key.owner == "group=mnist":
            assert all(torch.equal(tensor, mixed[key][name]) for name, tensor in tensors.items())
        if key.owner == "group=fashion-mnist":
            assert len(mixed[key]) == len(tensors) + 4  # two more layers, each with weight and bias


def test_branches_need_decoders_of_their_own(tiny_federation: Federation) -> None:
    with pytest.raises(ConfigError, match="the decoder is shared by all"):
        tiny_method(tiny_federation, "method.decoder=global", "model.branches.mnist=deeper-mlp")
    with pytest.raises(ConfigError, match="did you mean 'mnist'"):
        tiny_method(tiny_federation, "model.branches.mnits=deeper-mlp")


def test_the_conditional_decoder_is_told_the_group(tiny_federation: Federation) -> None:
    model = tiny_method(tiny_federation, "method.name=conditional").build(Site("server", (0, 1)))
    assert isinstance(model, VAE)
    z = torch.randn(2, 4)
    told = torch.cat([z, torch.tensor([[1.0, 0.0], [0.0, 1.0]])], dim=1)
    assert torch.equal(model.decode(z, torch.tensor([0, 1])), model.decoder(told))


@pytest.mark.parametrize("network", ["mlp", "conv"])
def test_one_decoder_as_large_as_all_branches(tiny_federation: Federation, network: str) -> None:
    def size(*overrides: str) -> int:
        method = tiny_method(tiny_federation, f"model.network={network}", "model.channels=[8, 16]", *overrides)
        return sum(p.numel() for n, p in method.build(Site("server", (0, 1))).named_parameters() if n[:3] == "dec")

    wide = size("method.name=fedvae", "method.decoder_size=branches")
    assert wide == pytest.approx(size("method.name=fissionvae"), rel=0.05)


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        # 160 pooled records in batches of 16 make 10 steps an epoch.
        (["local.epochs=3"], 30),
        (["local.epochs=3", "local.updates=matched", "participation.rate=0.5"], 15),
        (["local.epochs=3", "participation.rate=0.01"], 30),
    ],
)
def test_centralised_twins_update_as_often_as_asked(tmp_path: Path, overrides: list[str], steps: int) -> None:
    config = tiny_config("data.layout=centralised", "method.prior=wave", "rounds=1", *overrides)
    run = train(config, tmp_path / "run")
    assert [row["steps"] for row in run.metrics()] == [steps]
    assert {key.owner for key in run.generator().server.blocks} == {"all", "group=mnist", "group=fashion-mnist"}


def test_matched_updates_are_for_the_centralised_layout() -> None:
    with pytest.raises(ConfigError, match=r"data\.layout = 'centralised'"):
        Experiment.of(tiny_config("local.updates=matched"))


def test_a_run_that_leaves_the_finite_numbers_ends_as_diverged_with_its_last_good_checkpoint(tmp_path: Path) -> None:
    config = tiny_config("rounds=5", "local.optimizer=sgd", "local.learning_rate=1e30")
    run = train(config, tmp_path / "run")
    assert run.folder.status["state"] == "diverged"
    assert run.folder.rounds_done == run.folder.status["round"] - 1
    assert "not finite" in run.folder.status["reason"]


def test_group_decoders_keep_domains_apart_where_fedvae_blends_them(tmp_path: Path) -> None:
    """The paper's claim in small: a classifier of real images finds +D's samples in the right domain far more often."""
    small = ["rounds=12", "data.silos=2", "data.records_per_silo=800", "participation.rate=1.0", "engine.workers=1"]
    hits = {}
    for name in ("fedvae", "fissionvae"):
        config = load_config("demo", [*small, f"method.name={name}", "evaluation.every=0", "evaluation.samples=500"])
        experiment = Experiment.of(config)
        run = experiment.run(tmp_path / name)
        metrics = Evaluator(experiment.federation, config.evaluation, experiment.streams).evaluate(run.generator())
        hits[name] = mean(value for key, value in metrics.items() if key.startswith("domain-hit/"))
    assert hits["fissionvae"] > 0.9
    assert hits["fedvae"] < 0.75
