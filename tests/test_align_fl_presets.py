"""ALIGN-FL's presets against its tables, which are written down here a second time, and its pages against both."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from fedloom.config import Config, load_config
from fedloom.federation.rounds import RoundContext, Site
from fedloom.methods.base import Method, Setting, make_method
from fedloom.methods.distil import Distil
from fedloom.methods.steps import ServerState, Steps
from fedloom.methods.teachers import RECORDS, ROUND
from fedloom.objectives.contrastive import Contrastive
from fedloom.objectives.elbo import Elbo
from fedloom.objectives.lipschitz import WithPenalty
from fedloom.objectives.proximal import Proximal
from fedloom.presets import preset_names

ROOT = Path(__file__).parents[1]
DATASETS = ("mnist", "fashion-mnist")
EPSILONS = ("1", "5", "10", "15", "20", "infinity")
PENALTIES = ("0", "0.01", "0.05", "0.1", "0.5", "1")
BASELINES = ("fedavg", "fedprox", "moon", "contrast-avg-synth", "contrast-synth-only", "align-fl")
PUBLISHED = {
    *(f"align-fl/table2/{data}/{row}" for data in DATASETS for row in ("no-dp", "dp-sgd", "lcd-vae")),
    *(f"align-fl/table3/{row}" for row in BASELINES),
    *(f"align-fl/figure4/{data}/epsilon-{epsilon}" for data in DATASETS for epsilon in EPSILONS),
    *(f"align-fl/figure5/{data}/penalty-{weight}" for data in DATASETS for weight in PENALTIES),
}
OURS = sorted(name for name in preset_names() if name.startswith("align-fl/"))
SILOS = tuple(f"silo-{number}" for number in range(5))


def made(preset: str) -> tuple[Config, Method]:
    config = load_config(preset)
    silos = SILOS if config.data.layout == "federated" else ("centralised",)
    return config, make_method(Setting(config, (1, 28, 28), (config.data.source,), (), silos))


def test_every_published_row_and_point_has_a_preset() -> None:
    assert set(OURS) >= PUBLISHED


@pytest.mark.parametrize("preset", OURS)
def test_a_preset_makes_a_method_on_the_papers_federation(preset: str) -> None:
    config, method = made(preset)
    other = {"mnist": "fashion-mnist", "fashion-mnist": "mnist"}[config.data.source]
    assert (config.data.partition, config.data.silos, config.data.classes_per_silo) == ("classes", 5, 2)
    assert (config.data.records_per_class, config.participation.rate) == (6000, 1.0)
    assert (config.data.outliers.source, config.data.outliers.silos) == (other, ("silo-0",))
    # 600 of them, on top of 5,923 + 6,000 digits or 12,000 clothes.
    own = {"mnist": 11_923, "fashion-mnist": 12_000}[config.data.source]
    assert round(config.data.outliers.share * own) == 600
    method.build(Site("silo-0", (0,)))
    method.build(Site("server", (0,)))


@pytest.mark.parametrize("preset", sorted(name for name in PUBLISHED if "figure" not in name))
def test_table_rows_follow_the_papers_protocol(preset: str) -> None:
    config, method = made(preset)
    assert (config.rounds, config.local.epochs, config.local.batch_size, config.local.learning_rate) == (
        10,
        10,
        128,
        1e-3,
    )
    assert (config.model.hidden, config.model.latent, config.model.likelihood) == ((512, 256, 128), 2, "gaussian")
    assert (config.server.epochs, config.server.batch_size, config.server.latents) == (10, 128, "prior")
    assert not config.local.keep_optimizer
    assert not config.server.keep_optimizer
    blocks = {
        name: sum(p.numel() for p in part.parameters())
        for name, part in method.build(Site("silo-1", (0,))).named_children()
    }
    assert (blocks["encoder"], blocks["decoder"]) == (566_660, 567_184)


@pytest.mark.parametrize(
    ("row", "kind", "distils"),
    [
        ("align-fl", Elbo, True),
        ("fedavg", Elbo, False),
        ("fedprox", Proximal, False),
        ("moon", Contrastive, False),
        ("contrast-avg-synth", Contrastive, True),
        ("contrast-synth-only", Contrastive, True),
    ],
)
def test_table_3_differs_in_loss_and_server_step(row: str, kind: type, distils: bool) -> None:
    config, method = made(f"align-fl/table3/{row}")
    assert type(method.phases[0].objective) is kind
    last = method.server_step.steps[-1] if isinstance(method.server_step, Steps) else method.server_step
    assert isinstance(last, Distil) is distils
    if isinstance(last, Distil):
        # All servers that learn see as many samples in a round, of what each silo sent.
        heard = {f"{kind}{silo}": torch.ones(1) for kind in (ROUND, RECORDS) for silo in SILOS}
        teachers = last.teachers.present(ServerState({}, heard), RoundContext(1, 1, ()))
        assert tuple(teacher.name for teacher in teachers) == SILOS
        assert config.server.samples == 5_000


@pytest.mark.parametrize("data", DATASETS)
def test_the_sweeps_change_one_number(data: str) -> None:
    for epsilon in EPSILONS:
        privacy = load_config(f"align-fl/figure4/{data}/epsilon-{epsilon}").privacy
        assert (privacy.epsilon, privacy.mechanism) == (
            (0.0, "none") if epsilon == "infinity" else (float(epsilon), "dp-sgd")
        )
    for weight in PENALTIES:
        _, method = made(f"align-fl/figure5/{data}/penalty-{weight}")
        objective = method.phases[0].objective
        assert isinstance(objective, WithPenalty)
        assert objective.weight == float(weight)


def test_decoder_only_noise_is_the_papers_shortcut() -> None:
    privacy = load_config("align-fl/variants/dp-sgd-decoder").privacy
    assert (privacy.blocks, privacy.clipping, privacy.epsilon) == (("decoder",), "median", 10.0)


@pytest.mark.parametrize("page", ["docs/align-fl.md", "papers/align-fl/appendix.md"])
def test_commands_on_pages_name_presets_and_settings_that_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    commands = re.findall(r"fedloom run ((?:align-fl|demo)[\w./-]*)((?: +[\w.]+=[^\s`]+)*)", text)
    assert len(commands) >= 4
    for preset, assignments in commands:
        load_config(preset, [assignment.strip("'") for assignment in assignments.split()])
