from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedloom.config import Config
from fedloom.engines.base import Job, Result, RoundReport, initial_state, site_of
from fedloom.engines.reference import ReferenceEngine
from fedloom.engines.training import Trainer
from fedloom.errors import ConfigError, EgressError
from fedloom.experiment import Experiment, Observer, resume, train
from fedloom.federation.records import Federation
from fedloom.federation.rounds import RoundContext
from fedloom.methods.base import OptimizerRule, Setting, make_method
from fedloom.runs.checkpoint import load_checkpoint
from fedloom.sharing.plan import GLOBAL, BlockKey
from fedloom.sharing.update import Update, pass_egress
from support import assert_same_run, equal_bits, tiny_config

GENERATOR, DISCRIMINATOR = BlockKey("generator", "all"), BlockKey("discriminator", "all")


def gan_config(*overrides: str) -> Config:
    return tiny_config("method.name=fedgan", "model.channels=[4, 8]", "local.epochs=1", *overrides)


def test_both_blocks_are_shared_by_all_and_only_the_discriminator_touches_records() -> None:
    setting = Setting(gan_config("method.generator_rate=1e-4"), (1, 28, 28), ("mnist", "fashion"), ())
    method = make_method(setting)
    assert method.plan.blocks == {"generator": GLOBAL, "discriminator": GLOBAL}
    assert [(phase.trains, phase.touches_records) for phase in method.phases] == [
        (("discriminator",), True),
        (("generator",), False),
    ]
    assert [phase.optimizer for phase in method.phases] == [
        OptimizerRule("adam", rate, (0.5, 0.999), keep=True) for rate in (2e-4, 1e-4)
    ]


@pytest.mark.parametrize("phase", [0, 1])
def test_a_phase_moves_its_own_block_and_no_other(tiny_federation: Federation, phase: int) -> None:
    experiment = Experiment.of(gan_config(), tiny_federation)
    only = replace(experiment.method, phases=experiment.method.phases[phase : phase + 1])
    state = initial_state(only, tiny_federation, experiment.config)
    engine = ReferenceEngine(Trainer(experiment.config, only, tiny_federation))
    (task,) = engine.tasks(state, RoundContext(1, 1, (0,)))
    (result,) = engine.train([replace(task, step_limit=1)])
    (trained,) = only.phases[0].trains
    for key, block in result.update.blocks.items():
        same = [torch.equal(tensor, state.server.blocks[key][name]) for name, tensor in block.items()]
        assert not any(same) if key.block == trained else all(same)


def test_both_blocks_move_at_every_silo_and_are_averaged_over_all(tiny_federation: Federation) -> None:
    experiment = Experiment.of(gan_config(), tiny_federation)
    state = initial_state(experiment.method, tiny_federation, experiment.config)
    engine = ReferenceEngine(Trainer(experiment.config, experiment.method, tiny_federation))
    results: list[Result] = []
    after, report = engine.round(Job(state, RoundContext(1, 1, (0, 1, 2, 3)), results.append))
    for key in (GENERATOR, DISCRIMINATOR):
        for name, before in state.server.blocks[key].items():
            sent = torch.stack([result.update.blocks[key][name] for result in results])
            assert (sent != before).flatten(1).any(dim=1).all()
            # Silos of equal size, so that the mean has no weights.
            torch.testing.assert_close(after.server.blocks[key][name], sent.mean(dim=0))
    phases = {"discriminator/loss", "discriminator/real", "discriminator/fake", "generator/loss"}
    assert report.terms.keys() == phases


class Interrupted(Observer):
    """Stops a run after its second round."""

    def round_done(self, report: RoundReport, metrics: dict[str, float]) -> None:
        if report.context.round == 2:
            raise KeyboardInterrupt


def test_moments_stay_at_the_silos_through_a_resumption(tiny_federation: Federation, tmp_path: Path) -> None:
    config = gan_config("rounds=3")
    train(config, tmp_path / "whole", tiny_federation)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "resumed", tiny_federation, Interrupted())
    resume(tmp_path / "resumed", tiny_federation)
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")
    silos = load_checkpoint(tmp_path / "resumed").silos
    assert silos.keys() == {silo.name for silo in tiny_federation.silos}
    for tensors in silos.values():
        # 40 records in batches of 16: three steps a round, three rounds.
        counts = {name.split("/")[1]: tensor.item() for name, tensor in tensors.items() if name.endswith("/step")}
        assert counts == {"discriminator": 9, "generator": 9}


def test_moments_can_be_forgotten_after_each_round(tiny_federation: Federation, tmp_path: Path) -> None:
    run = train(gan_config("method.keep_optimizer=false"), tmp_path / "run", tiny_federation)
    assert load_checkpoint(run.folder.path).silos == {}


@pytest.mark.parametrize("layout", ["federated", "centralised"])
def test_training_brings_the_mean_sample_closer_to_the_mean_record(layout: str, tmp_path: Path) -> None:
    rates = ("method.generator_rate=1e-3", "method.discriminator_rate=1e-3", "model.channels=[8, 16]", "local.epochs=2")
    config = gan_config(f"data.layout={layout}", "rounds=10", "engine.keep_checkpoints=10", *rates)
    experiment = Experiment.of(config)
    run = experiment.run(tmp_path / "run")
    target = torch.cat([silo.train.values for silo in experiment.federation.silos]).mean(dim=0)
    samples = {number: run.generator(number).sample(100, group="mnist", seed=1) for number in (1, 10)}
    distance = {number: (images.mean(dim=0) - target).abs().mean().item() for number, images in samples.items()}
    assert torch.isfinite(samples[10]).all()
    assert distance[10] < 0.8 * distance[1]


def test_scopes_can_make_it_one_gan_for_each_group(tmp_path: Path) -> None:
    scopes = ('sharing.scopes={generator = "group", discriminator = "group"}', "data.layout=centralised", "rounds=1")
    run = train(gan_config(*scopes), tmp_path / "run")
    generator = run.generator()
    mnist, fashion = (generator.server.blocks[BlockKey("generator", f"group={name}")] for name in generator.groups)
    assert mnist.keys() == fashion.keys()
    assert not equal_bits(mnist, fashion)
    assert generator.sample(3, group=generator.groups[1]).shape == (3, 1, 28, 28)


# With batch norm

BATCH_NORM = "method.norm=batch"


def test_norms_of_records_stay_at_their_silo_and_no_statistics_are_kept(
    tiny_federation: Federation, tmp_path: Path
) -> None:
    run = train(gan_config(BATCH_NORM, "rounds=2"), tmp_path / "run", tiny_federation)
    sent = {key: set(block) for row in run.folder.egress() for key, block in row["blocks"].items()}
    assert sent.keys() == {"generator@all", "discriminator@all", "generator_norms@all"}
    assert sent["generator_norms@all"] == {f"norms.{n}.{name}" for n in (0, 1) for name in ("weight", "bias")}
    assert all(row["payloads"] == {"records": {}} for row in run.folder.egress())
    kept = [
        {name: tensor for name, tensor in tensors.items() if name.startswith("model/")}
        for tensors in load_checkpoint(run.folder.path).silos.values()
    ]
    own = {f"model/discriminator_norms.norms.0.{name}" for name in ("weight", "bias")}
    assert [tensors.keys() for tensors in kept] == [own] * len(tiny_federation)
    # Each has learned its own, from scales of 1 and shifts of 0.
    scales = torch.stack([tensors["model/discriminator_norms.norms.0.weight"] for tensors in kept])
    assert len(scales.unique(dim=0)) == len(tiny_federation)
    assert (scales != 1).any(dim=1).all()


def test_the_guard_lets_no_norm_of_records_out(tiny_federation: Federation) -> None:
    experiment = Experiment.of(gan_config(BATCH_NORM), tiny_federation)
    plan, site = experiment.method.plan, site_of(tiny_federation, 0)
    parts = plan.split(experiment.method.build(site).state_dict(), site)
    (key,) = (key for key in parts if key.block == "discriminator_norms")
    assert key.owner == f"silo={site.name}"
    for sent in ({"norms.0.weight": torch.ones(8)}, {"norms.0.running_mean": torch.zeros(8)}):
        with pytest.raises(EgressError, match="tried to send block 'discriminator_norms@silo="):
            pass_egress(Update(site.name, 1, {key: sent}, {}), plan, site, parts)
    general = BlockKey("generator_norms", "all")
    statistics = {**parts[general], "norms.0.running_mean": torch.zeros(8)}
    with pytest.raises(EgressError, match=r"tried to send tensor 'norms\.0\.running_mean'"):
        pass_egress(Update(site.name, 1, {general: statistics}, {}), plan, site, parts)


def test_a_silo_goes_on_with_the_norms_that_it_kept(tiny_federation: Federation, tmp_path: Path) -> None:
    config = gan_config(BATCH_NORM, "rounds=3")
    train(config, tmp_path / "whole", tiny_federation)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "resumed", tiny_federation, Interrupted())
    resume(tmp_path / "resumed", tiny_federation)
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")


def test_a_sample_is_the_same_whatever_is_sampled_beside_it(tiny_federation: Federation, tmp_path: Path) -> None:
    generator = train(gan_config(BATCH_NORM), tmp_path / "run", tiny_federation).generator()
    few, many = (generator.sample(count, group="mnist", seed=3) for count in (2, 40))
    torch.testing.assert_close(many[:2], few)


def test_norms_of_the_generator_that_stay_at_silos_leave_nothing_to_sample(
    tiny_federation: Federation, tmp_path: Path
) -> None:
    scopes = "sharing.scopes.generator_norms=silo"
    run = train(gan_config(BATCH_NORM, scopes, "evaluation.metrics=[]"), tmp_path / "run", tiny_federation)
    with pytest.raises(ConfigError, match="'generator_norms@silo=server' never reached the server"):
        run.generator().sample(2, group="mnist")


def test_records_that_share_statistics_are_refused_under_a_mechanism(tiny_federation: Federation) -> None:
    private = ("privacy.mechanism=dp-sgd", "privacy.epsilon=3", "privacy.delta=1e-3", "privacy.noise=test")
    Experiment.of(gan_config(*private), tiny_federation).trainer.check_privacy()
    with pytest.raises(ConfigError, match=r"method.norm = 'batch' .* under privacy.mechanism = 'dp-sgd'.* 'group'"):
        Experiment.of(gan_config(BATCH_NORM, *private), tiny_federation)


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("method.norm=layer", "method.norm"),
        ("method.betas=[0.5]", r"method.betas = \[0.5\] must be a list of two numbers of at least 0 and below 1"),
        ("method.betas=[0.5, 1.0]", "method.betas"),
        ("method.generator_rate=0", "method.generator_rate = 0 must be greater than 0"),
        ("method.rate=1", "unknown key 'method.rate'"),
    ],
)
def test_wrong_options_are_named(override: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        make_method(Setting(gan_config(override), (1, 28, 28), ("mnist",), ()))


def test_records_that_are_no_images_are_refused_before_anything_is_built() -> None:
    with pytest.raises(ConfigError, match="needs images"):
        make_method(Setting(gan_config(), (6,), ("a",), ()))
