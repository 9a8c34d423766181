"""DP-CVAE's presets against the paper's protocol, which is written down here a second time."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from fedloom.config import Config, load_config
from fedloom.evaluation.metric import METRICS
from fedloom.federation.rounds import Site
from fedloom.methods.base import Method, Setting, make_method
from fedloom.presets import preset_names

OURS = sorted(name for name in preset_names() if name.startswith("dp-cvae/"))
FEDERATIONS = ("ct-iid", "ct-dirichlet", "camelyon17", "cifar10-iid", "cifar10-dirichlet")
METHODS = {"dp-cvae": "dp_cvae", "cvae": "dp_cvae", "dp-cgan": "dp_cgan", "cgan": "dp_cgan"}
METHODS |= {"fedavg": "linear_head", "fedprox": "linear_head"}
EPSILONS = ("0.1", "0.5", "1", "2", "4", "8", "infinity")
SILOS = (2, 5, 10, 20, 50, 100)

pytestmark = pytest.mark.filterwarnings("ignore:method.loss:fedloom.errors.FedloomWarning")


def made(preset: str, width: int = 256, classes: int = 10) -> tuple[Config, Method]:
    config = load_config(preset)
    names = tuple(f"class-{number}" for number in range(classes))
    silos = tuple(f"silo-{number}" for number in range(config.data.silos))
    return config, make_method(Setting(config, (width,), ("all",), names, silos))


def differences(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    """Settings in which two configurations differ, by their dotted names."""
    found = set()
    for key in one:
        if isinstance(one[key], dict) and isinstance(other[key], dict) and key != "options":
            found |= {f"{key}.{name}" for name in differences(one[key], other[key])}
        elif one[key] != other[key]:
            found.add(key)
    return found - {"name"}


def changed(preset: str, base: str) -> set[str]:
    return differences(asdict(load_config(preset)), asdict(load_config(base)))


@pytest.mark.parametrize("preset", OURS)
def test_a_preset_makes_a_method_and_names_metrics(preset: str) -> None:
    config, method = made(preset)
    method.build(Site("silo-0", (0,)))
    assert set(config.evaluation.metrics) <= set(METRICS)
    assert 0 < config.data.validation < 1
    assert (config.data.source, config.participation.rate) == ("embeddings", 1.0)


@pytest.mark.parametrize("federation", FEDERATIONS)
@pytest.mark.parametrize("row", METHODS)
def test_table_1_has_a_row_for_every_method(federation: str, row: str) -> None:
    config, _ = made(f"dp-cvae/table1/{federation}/{row}")
    assert config.method.name == METHODS[row]
    private = row in ("dp-cvae", "dp-cgan")
    assert (config.privacy.mechanism, config.privacy.epsilon) == (("dp-sgd", 1.0) if private else ("none", 0.0))
    assert (config.rounds, config.local.epochs) == (50, 5)
    assert config.local.batch_size == (128 if "fed" in row else 256)
    layout = {"camelyon17": "natural", "ct-dirichlet": "dirichlet", "cifar10-dirichlet": "dirichlet"}
    assert config.data.partition == layout.get(federation, "iid")


def test_networks_are_as_large_as_the_papers() -> None:
    """On DINOv2 base (768) and 11 classes; the spec counts 291,840 for a decoder of three linear layers."""

    def parameters(row: str) -> dict[str, int]:
        _, method = made(f"dp-cvae/table1/ct-iid/{row}", 768, 11)
        blocks = method.build(Site("silo-0", (0,))).named_children()
        return {name: sum(p.numel() for p in block.parameters()) for name, block in blocks}

    assert parameters("dp-cvae")["decoder"] == 291_840
    assert parameters("dp-cgan") == {"generator": 1_369_856, "discriminator": 1_324_033}
    assert parameters("fedavg") == {"head": 769 * 11}


@pytest.mark.parametrize("method", ["dp-cvae", "refined-moments"])
def test_the_epsilon_curve_changes_one_number(method: str) -> None:
    base = f"dp-cvae/epsilon/{method}/epsilon-1"
    for epsilon in EPSILONS:
        preset = f"dp-cvae/epsilon/{method}/epsilon-{epsilon}"
        privacy = load_config(preset).privacy
        if epsilon == "infinity":
            assert privacy.mechanism == "none"
        else:
            assert privacy.epsilon == float(epsilon)
            assert changed(preset, base) <= {"privacy.epsilon"}


def test_silo_counts_divide_the_same_records() -> None:
    for silos in SILOS:
        data = load_config(f"dp-cvae/silos/{silos}").data
        assert (data.silos, data.silos * data.records_per_silo) == (silos, 20_000)


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [
        ("backbones", {"data.path"}),
        ("silos", {"data.silos", "data.records_per_silo", "local.batch_size"}),
        ("variants", {"method.options", "model.hidden", "model.latent", "data.layout"}),
    ],
)
def test_sweeps_change_what_they_are_about(folder: str, allowed: set[str]) -> None:
    presets = [name for name in OURS if name.startswith(f"dp-cvae/{folder}/")]
    assert len(presets) >= 6
    for preset in presets:
        assert changed(preset, "dp-cvae/cifar10") <= allowed, preset


def test_shared_noise_changes_who_is_trusted() -> None:
    for name in ("moments", "refined-moments"):
        assert changed(f"dp-cvae/baselines/{name}-distributed", f"dp-cvae/baselines/{name}") == {"privacy.trust"}


def test_fed_proxs_weight_is_the_codes() -> None:
    """mu |w - w_g|^2 with mu = 0.05 there, mu / 2 |w - w_g|^2 here."""
    for federation in FEDERATIONS:
        assert load_config(f"dp-cvae/table1/{federation}/fedprox").method.options == {"proximal": 2 * 0.05}
