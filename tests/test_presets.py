"""The presets against the papers' tables, which are written down here a second time."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fedloom.config import Config, load_config
from fedloom.engines.training import local_steps
from fedloom.evaluation.metric import METRICS
from fedloom.federation.rounds import Site
from fedloom.federation.sources import SOURCES
from fedloom.methods.base import Method, Setting, make_method
from fedloom.modalities.likelihoods import Bernoulli, Likelihood, Normal
from fedloom.models.vae import VAE
from fedloom.objectives.hierarchical_elbo import HierarchicalElbo
from fedloom.presets import about_preset, preset_names


@dataclass(frozen=True)
class Protocol:
    """What section 3 of FissionVAE says about a data set, and what was chosen where it says nothing."""

    shape: tuple[int, ...]
    groups: tuple[str, ...]
    silos: int  # in a group
    records: int  # for training, in all
    rounds: int
    participation: float
    learning_rate: float
    centralised_epochs: int
    network: str
    likelihood: type[Likelihood]
    latents: tuple[int, int]


PROTOCOLS = {
    "mixed-mnist": Protocol(
        (1, 28, 28), ("mnist", "fashion-mnist"), 10, 120_000, 70, 0.5, 1e-3, 70, "mlp", Bernoulli, (40, 20)
    ),
    "charm": Protocol(
        (3, 32, 32),
        ("animals", "cartoon", "human", "marine", "remote"),
        20,
        100_000,
        500,
        0.25,
        1e-4,
        250,
        "conv",
        Normal,
        (120, 60),
    ),
}
DATASETS = list(PROTOCOLS)
LAYOUTS = ["federated", "centralised", "centralised-matched"]
FLAT_PRIORS = ["identical", "one-hot", "symmetrical", "random", "wave"]

ALL_SHARED = {"encoder": "global", "decoder": "global"}
BRANCHES = {"encoder": "global", "decoder": "group"}
TWO_LEVELS = {"encoder": "global", "top_encoder": "global", "decoder": "group", "top_decoder": "group"}
# Section 1.6 of the paper's method: who shares what; and the prior of z1 on Mixed MNIST and on CHARM.
TABLE_1 = {
    "fedgan": ({"generator": "global", "discriminator": "global"}, None),
    "fedgan-batch-norm": (
        {"generator": "global", "discriminator": "global", "generator_norms": "global", "discriminator_norms": "silo"},
        None,
    ),
    "fedvae": (ALL_SHARED, ("identical", "identical")),
    "l": (ALL_SHARED, ("symmetrical", "wave")),
    "d": (BRANCHES, ("identical", "identical")),
    "l-d": (BRANCHES, ("wave", "wave")),
    "h-l-d": (TWO_LEVELS, ("learnable", "learnable")),
}
# Only p(z1|z2) can be learned in place of a prior, so there is no learnable L+D.
TABLE_2 = [*(("l-d", prior) for prior in FLAT_PRIORS), *(("h-l-d", prior) for prior in [*FLAT_PRIORS, "learnable"])]
TABLE_3 = ["homogeneous", "deeper-mlp", "deeper-mlp-conv"]
CONTROLS = {
    "group-vaes": {"encoder": "group", "decoder": "group"},
    "conditional": ALL_SHARED,
    "wide-decoder": ALL_SHARED,
    "group-encoder": {"encoder": "group", "decoder": "global"},
    "one-reconstruction": TWO_LEVELS,
}
BEST = {"fissionvae/best-mlp", "fissionvae/best"}  # past the paper

FISSIONVAE = {
    *BEST,
    *(f"fissionvae/{data}" for data in DATASETS),
    *(f"fissionvae/table1/{data}/{layout}/{row}" for data in DATASETS for layout in LAYOUTS for row in TABLE_1),
    *(f"fissionvae/table2/{data}/{row}/{prior}" for data in DATASETS for row, prior in TABLE_2),
    *(f"fissionvae/table3/{branch}" for branch in TABLE_3),
    *(f"fissionvae/controls/{data}/{control}" for data in DATASETS for control in CONTROLS),
}

# The sum of each group's prior mean over z1's 40 or 120 coordinates, which tells the predefined priors apart.
MEAN_SUMS = {
    ("identical", "mixed-mnist"): [0.0, 0.0],
    ("one-hot", "mixed-mnist"): [1.0, 1.0],
    ("symmetrical", "mixed-mnist"): [-40.0, 40.0],
    ("wave", "mixed-mnist"): [20.0, 20.0],
    ("identical", "charm"): [0.0] * 5,
    ("one-hot", "charm"): [1.0] * 5,
    ("symmetrical", "charm"): [-240.0, -120.0, 0.0, 120.0, 240.0],
    ("wave", "charm"): [24.0] * 5,
}


def dataset_of(preset: str) -> str:
    return "charm" if "charm" in preset else "mixed-mnist"


def method_of(preset: str) -> Method:
    protocol = PROTOCOLS[dataset_of(preset)]
    return make_method(Setting(load_config(preset), protocol.shape, protocol.groups, ()))


def server_model(preset: str) -> nn.Module:
    """With the branches of all groups."""
    method = method_of(preset)
    return method.build(Site("server", tuple(range(len(method.plan.groups)))))


def scopes(method: Method) -> dict[str, str]:
    return {block: str(rule.scope) for block, rule in method.plan.blocks.items()}


def check_prior(preset: str, prior: str) -> None:
    model, method = server_model(preset), method_of(preset)
    assert isinstance(model, VAE)
    objective = method.phases[0].objective
    if isinstance(objective, HierarchicalElbo):
        assert objective.predefined_prior == (prior != "learnable")
        assert list(method.pathways) == (["z2"] if prior == "learnable" else ["z2", "z1", "roundtrip"])
    else:
        assert list(method.pathways) == ["z1"]
    if prior == "random":
        assert len(set(model.prior_means.flatten().tolist())) == model.prior_means.numel()
    elif prior != "learnable":
        assert model.prior_means.sum(dim=1).tolist() == MEAN_SUMS[prior, dataset_of(preset)]


def test_there_is_a_preset_for_every_row_and_no_other() -> None:
    assert {name for name in preset_names() if name.startswith("fissionvae")} == FISSIONVAE


@pytest.mark.parametrize("preset", preset_names())
def test_a_preset_has_a_line_about_itself(preset: str) -> None:
    assert 20 < len(about_preset(preset)) <= 150


@pytest.mark.parametrize("preset", sorted(FISSIONVAE))
def test_a_preset_names_its_run_after_itself_and_things_that_exist(preset: str) -> None:
    config = load_config(preset)
    assert config.name == preset.replace("/", "-")
    assert config.data.source == dataset_of(preset)
    assert config.data.source in SOURCES
    assert set(config.evaluation.metrics) <= set(METRICS)


def test_lines_about_presets_differ() -> None:
    lines = [about_preset(preset) for preset in preset_names()]
    assert len(set(lines)) == len(lines)


@pytest.mark.parametrize("data", DATASETS)
def test_the_bases_hold_the_papers_protocol(data: str) -> None:
    config, protocol = load_config(f"fissionvae/{data}"), PROTOCOLS[data]
    assert (config.data.partition, config.data.silos, config.data.sizes) == ("groups", protocol.silos, "equal")
    assert config.data.records_per_silo == 0
    assert config.rounds == protocol.rounds
    assert (config.participation.mode, config.participation.rate) == ("bernoulli", protocol.participation)
    assert (config.local.epochs, config.local.batch_size) == (5, 32)
    assert (config.local.optimizer, config.local.keep_optimizer) == ("adam", False)
    assert config.local.learning_rate == protocol.learning_rate
    assert config.model.network == protocol.network
    assert (config.model.latent, config.model.top_latent) == protocol.latents
    assert protocol.latents[0] % len(protocol.groups) == 0  # wave priors need equal blocks
    assert config.model.kl_weight == 1
    model = server_model(f"fissionvae/{data}")
    assert isinstance(model, VAE)
    assert isinstance(model.likelihood, protocol.likelihood)


def test_the_decoder_modules_of_mixed_mnist_have_three_layers() -> None:
    model = server_model("fissionvae/table1/mixed-mnist/federated/h-l-d")
    for block in ("decoder", "top_decoder"):
        for branch in model.get_submodule(f"{block}.branches").children():
            assert sum(isinstance(layer, nn.Linear) for layer in branch.modules()) == 3


@pytest.mark.parametrize("preset", sorted(BEST))
def test_what_goes_past_the_paper_has_its_rounds_silos_and_steps(preset: str) -> None:
    config, base = load_config(preset), load_config("fissionvae/mixed-mnist")
    assert replace(config, name=base.name, method=base.method, model=base.model) == base
    assert replace(config.model, kl_weight=1.0) == base.model
    assert ("refiner" in method_of(preset).plan.blocks) == (preset == "fissionvae/best")
    assert set(scopes(method_of(preset)).values()) == {"group"}


@pytest.mark.parametrize("preset", sorted(name for name in FISSIONVAE - BEST if "/centralised" not in name))
def test_a_federated_row_changes_nothing_but_its_method(preset: str) -> None:
    config, base = load_config(preset), load_config(f"fissionvae/{dataset_of(preset)}")
    model = config.model
    if "fedgan" in preset:
        model = replace(model, latent=base.model.latent, channels=base.model.channels)
    if "table3" in preset:
        model = replace(model, branches={}, channels=base.model.channels)
    sharing = replace(config.sharing, scopes={}) if "group-encoder" in preset else config.sharing
    assert replace(config, name=base.name, method=base.method, model=model, sharing=sharing) == base


@pytest.mark.parametrize("row", TABLE_1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("data", DATASETS)
def test_table_1(data: str, layout: str, row: str) -> None:
    preset = f"fissionvae/table1/{data}/{layout}/{row}"
    expected, priors = TABLE_1[row]
    assert scopes(method_of(preset)) == expected
    if priors is not None:
        check_prior(preset, priors[DATASETS.index(data)])


@pytest.mark.parametrize("row", TABLE_1)
@pytest.mark.parametrize("layout", ["centralised", "centralised-matched"])
@pytest.mark.parametrize("data", DATASETS)
def test_centralised_twins(data: str, layout: str, row: str) -> None:
    preset, protocol = f"fissionvae/table1/{data}/{layout}/{row}", PROTOCOLS[data]
    config, twin = load_config(preset), load_config(f"fissionvae/table1/{data}/federated/{row}")
    assert config.data == replace(twin.data, layout="centralised")
    assert same_but_for_the_layout(config, twin) == twin
    # One training run from start to end: moments of the optimiser are not reset in between.
    assert all(phase.optimizer.keep for phase in method_of(preset).phases)
    # 70 or 250 epochs in the paper; 70 x 5 x 0.5 = 175 or 500 x 5 x 0.25 = 625 to match.
    matched = protocol.rounds * 5 * protocol.participation
    epochs = protocol.centralised_epochs if layout == "centralised" else matched
    steps = config.rounds * local_steps(config, protocol.records)
    assert steps == pytest.approx(epochs * protocol.records / 32, abs=config.rounds / 2)  # each round is rounded


def same_but_for_the_layout(config: Config, twin: Config) -> Config:
    """The centralised one, with what may differ taken from its federated twin."""
    changeable = ("epochs", "updates", "keep_optimizer")
    local = replace(config.local, **{key: getattr(twin.local, key) for key in changeable})
    return replace(config, name=twin.name, rounds=twin.rounds, data=twin.data, local=local)


@pytest.mark.parametrize(("row", "prior"), TABLE_2)
@pytest.mark.parametrize("data", DATASETS)
def test_table_2(data: str, row: str, prior: str) -> None:
    preset = f"fissionvae/table2/{data}/{row}/{prior}"
    assert scopes(method_of(preset)) == {"l-d": BRANCHES, "h-l-d": TWO_LEVELS}[row]
    check_prior(preset, prior)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (f"table1/{data}/federated/{row}", f"table2/{data}/{same}")
        for data in DATASETS
        for row, same in {"d": "l-d/identical", "l-d": "l-d/wave", "h-l-d": "h-l-d/learnable"}.items()
    ]
    + [("table1/mixed-mnist/federated/h-l-d", "table3/homogeneous")]
    + [(data, f"table1/{data}/federated/fedvae") for data in DATASETS],
)
def test_rows_that_the_tables_share_are_one_experiment(one: str, other: str) -> None:
    assert load_config(f"fissionvae/{one}").digest() == load_config(f"fissionvae/{other}").digest()


def test_all_other_rows_are_experiments_of_their_own() -> None:
    shared = 2 * 3 + 1 + 2  # as above
    assert len({load_config(preset).digest() for preset in FISSIONVAE}) == len(FISSIONVAE) - shared


@pytest.mark.parametrize(
    ("branch", "decoder", "top_decoder"),
    [
        ("homogeneous", {nn.Linear: 3}, {nn.Linear: 3}),
        ("deeper-mlp", {nn.Linear: 5}, {nn.Linear: 5}),
        ("deeper-mlp-conv", {nn.Linear: 1, nn.ConvTranspose2d: 3}, {nn.Linear: 5}),
    ],
)
def test_table_3_changes_the_fashion_branch_alone(
    branch: str, decoder: dict[type, int], top_decoder: dict[type, int]
) -> None:
    model = server_model(f"fissionvae/table3/{branch}")

    def layers(name: str) -> dict[type, int]:
        kinds = [type(layer) for layer in model.get_submodule(name).modules()]
        return {kind: kinds.count(kind) for kind in (nn.Linear, nn.ConvTranspose2d) if kind in kinds}

    assert (layers("decoder.branches.1"), layers("top_decoder.branches.1")) == (decoder, top_decoder)
    assert (layers("decoder.branches.0"), layers("top_decoder.branches.0")) == ({nn.Linear: 3}, {nn.Linear: 3})


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("data", DATASETS)
def test_controls(data: str, control: str) -> None:
    assert scopes(method_of(f"fissionvae/controls/{data}/{control}")) == CONTROLS[control]


@pytest.mark.parametrize("data", DATASETS)
def test_the_wide_decoder_has_as_many_parameters_as_the_branches(data: str) -> None:
    def size(preset: str) -> int:
        return sum(p.numel() for p in server_model(preset).get_submodule("decoder").parameters())

    wide, branches = size(f"fissionvae/controls/{data}/wide-decoder"), size(f"fissionvae/table1/{data}/federated/d")
    assert wide == pytest.approx(branches, rel=0.01)


@pytest.mark.parametrize("data", DATASETS)
def test_the_ablation_drops_the_second_reconstruction_alone(data: str) -> None:
    whole, ablated = (
        method_of(f"fissionvae/{preset}").phases[0].objective
        for preset in (f"table1/{data}/federated/h-l-d", f"controls/{data}/one-reconstruction")
    )
    assert isinstance(whole, HierarchicalElbo)
    assert replace(whole, second_reconstruction=False) == ablated != whole


@pytest.mark.parametrize("data", DATASETS)
def test_a_conditional_decoder_is_told_the_group(data: str) -> None:
    model, protocol = server_model(f"fissionvae/controls/{data}/conditional"), PROTOCOLS[data]
    assert isinstance(model, VAE)
    z, groups = torch.zeros(2, protocol.latents[0]), torch.tensor([0, 1])
    with torch.no_grad():
        output = model.decode(z, groups)
    assert not torch.equal(output[0], output[1])


@pytest.mark.parametrize("page", ["docs/fissionvae.md", "papers/fissionvae/appendix.md"])
def test_commands_on_pages_name_presets_and_settings_that_exist(page: str) -> None:
    text = (Path(__file__).parents[1] / page).read_text(encoding="utf-8").replace("\\\n", "")
    commands = re.findall(r"fedloom run (fissionvae/[\w/-]+)((?: +[\w.]+=[^\s`]+)*)", text)
    assert len(commands) >= 4
    for preset, assignments in commands:
        load_config(preset, assignments.split())


def test_the_papers_appendix_has_a_command_for_every_published_row() -> None:
    text = (Path(__file__).parents[1] / "papers/fissionvae/appendix.md").read_text(encoding="utf-8")
    published = {name for name in FISSIONVAE if "/table" in name and "matched" not in name}
    assert published <= set(re.findall(r"`fedloom run (fissionvae/[\w/-]+)`", text))
