"""ALIGN-FL whole: what leaves a silo in every variant, what survives a restart, what is evaluated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.killing import train_until_write
from engines.one_answer import LARGER, UNEQUAL, assert_one_answer, config_of, image_federation, rounds_of, trainer_of
from fedloom.engines.fused import FusedOptions
from fedloom.engines.reference import ReferenceEngine
from fedloom.evaluation.attacks import targets_of
from fedloom.evaluation.suite import Evaluator
from fedloom.experiment import Experiment, KeptModels, load, resume, train
from fedloom.federation.rounds import RoundContext, Site
from fedloom.methods.base import Setting, make_method
from fedloom.methods.generator import Generator
from fedloom.models.vae import VAE
from fedloom.runs.checkpoint import load_checkpoint
from fedloom.sharing.plan import SILO, UPLOAD, BlockKey
from fedloom.streams import Streams
from support import assert_same_run, equal_bits, tiny_config

ALIGN = "method.name=align_fl"
SMALL = ("server.samples=30", "server.epochs=1", "server.batch_size=16")
TWO = image_federation({"a0": 12, "b0": 9})
PRIVATE = ("privacy.mechanism=dp-sgd", "privacy.noise_multiplier=1.0", "privacy.noise=test")
VARIANTS: dict[str, tuple[str, ...]] = {
    "none": (),
    "dp-sgd": PRIVATE,
    "dp-sgd of the decoder, median clip": (*PRIVATE, 'privacy.blocks=["decoder"]', "privacy.clipping=median"),
    "the paper's penalty": ("model.likelihood=gaussian", "model.penalty=align-penalty"),
    "certified": ("model.lipschitz=2.0",),
    "dp-sgd and certified": (*PRIVATE, "model.lipschitz=2.0"),
    "replay and ball": ("server.replay=2", "server.latents=ball"),
    "other networks at the server": ("server.model.network=conv", "server.model.latent=3", "model.channels=[3]"),
}
GENERATORS = ("sharing.scopes.generator=upload", "sharing.scopes.discriminator=silo")
CONTRAST = ("method.name=moon", "method.earlier=2")
AVERAGED_SYNTHETIC = (*CONTRAST, "server.step=mean+distil", "server.trains=merged", "server.teachers=silos")
SYNTHETIC_ONLY = (*CONTRAST, "method.model=server")
# What a silo keeps from round to round.
STATEFUL: dict[str, tuple[tuple[str, ...], str]] = {
    "ALIGN-FL": ((ALIGN, "server.replay=1"), "encoder"),
    "ContrastAvgSynth": (AVERAGED_SYNTHETIC, "history"),
    "ContrastSynthOnly": (SYNTHETIC_ONLY, "history"),
    "a GAN": (("method.name=fedgan", "model.channels=[3, 5]", *GENERATORS), "discriminator"),
}


def egress(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "egress.jsonl").read_text().splitlines()]


def test_its_plan_keeps_encoders_and_sends_decoders() -> None:
    method = make_method(Setting(config_of(ALIGN), (1, 9, 8), ("a", "b"), ()))
    assert method.plan.blocks == {"encoder": SILO, "decoder": UPLOAD}
    assert [payload.name for payload in method.plan.payloads] == ["records"]
    assert method.payloads == ()


def test_the_papers_network_has_the_papers_parameters_and_half_of_them_travel() -> None:
    config = tiny_config(ALIGN, "model.hidden=[512, 256, 128]", "model.latent=2", "model.likelihood=gaussian")
    model = make_method(Setting(config, (1, 28, 28), ("mnist",), ())).build(Site("silo-0", (0,)))
    sizes = {name: sum(p.numel() for p in block.parameters()) for name, block in model.named_children()}
    assert sizes == {"encoder": 566_660, "decoder": 567_184}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_nothing_but_the_decoder_leaves(variant: tuple[str, ...], tmp_path: Path) -> None:
    train(config_of(ALIGN, *SMALL, "rounds=2", *variant), tmp_path / "run", TWO)
    # 4 x 16 + 16 and 16 x 72 + 72 parameters of 4 bytes each; two counts of 8 bytes: of all records, of the group's.
    expected = {"layers.0.weight": [16, 4], "layers.0.bias": [16], "layers.2.weight": [72, 16], "layers.2.bias": [72]}
    rows = egress(tmp_path / "run")
    assert len(rows) == 2 * len(TWO)
    for row in rows:
        assert row["blocks"] == {f"decoder@silo={row['silo']}": expected}
        assert row["bytes"] == 4 * (80 + 1224) + 16
        assert list(row["payloads"]) == ["records"]


@pytest.mark.parametrize("private", [(), PRIVATE], ids=["none", "dp-sgd"])
def test_of_a_gan_nothing_but_the_generator_leaves(private: tuple[str, ...], tmp_path: Path) -> None:
    train(
        config_of("method.name=fedgan", *GENERATORS, *SMALL, "model.channels=[3, 5]", "rounds=2", *private),
        tmp_path / "run",
        TWO,
    )
    # Four latents to 5 channels of 3 x 2, then to 3 channels, then to one; kernels of 4 x 4, a norm before each.
    shapes = {
        "first.weight": [30, 4],
        "first.bias": [30],
        "layers.0.weight": [5],
        "layers.0.bias": [5],
        "layers.2.weight": [5, 3, 4, 4],
        "layers.2.bias": [3],
        "layers.3.weight": [3],
        "layers.3.bias": [3],
        "layers.5.weight": [3, 1, 4, 4],
        "layers.5.bias": [1],
    }
    rows = egress(tmp_path / "run")
    assert len(rows) == 2 * len(TWO)
    for row in rows:
        assert row["blocks"] == {f"generator@silo={row['silo']}": shapes}
        assert row["bytes"] == 4 * (150 + 10 + 243 + 6 + 49) + 16
        assert list(row["payloads"]) == ["records"]


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_engines_agree_on_every_variant(variant: tuple[str, ...]) -> None:
    trainer, start = trainer_of(config_of(ALIGN, *SMALL, "rounds=3", *variant), LARGER)
    assert_one_answer(trainer, start, ((1, 3), (0, 1, 2, 3, 4), (0, 2)), FusedOptions(torch.device("cpu"), chunk=3))


@pytest.mark.parametrize(("latents", "shapes"), [
    ("mixture", {"weights": [3], "means": [3, 4], "variances": [3, 4]}),
    ("histogram", {"counts": [3]}),
])  # fmt: skip
def test_latents_leave_only_where_they_are_asked_for(
    latents: str, shapes: dict[str, list[int]], tmp_path: Path
) -> None:
    options = (f"server.latents={latents}", "server.components=3", "rounds=1")
    train(config_of(ALIGN, *SMALL, *options), tmp_path / "run", UNEQUAL)
    for row in egress(tmp_path / "run"):
        assert row["payloads"]["latents"] == shapes
        assert list(row["blocks"]) == [f"decoder@silo={row['silo']}"]


@pytest.mark.parametrize(("method", "kept"), STATEFUL.values(), ids=STATEFUL.keys())
def test_silos_and_server_survive_a_restart(method: tuple[str, ...], kept: str, tmp_path: Path) -> None:
    """Moments and memories of both, earlier models, silos that sit out: all of it is in the checkpoint."""
    options = ("rounds=4", "participation.rate=0.7", "local.keep_optimizer=true", "server.keep_optimizer=true")
    config = config_of(*method, *SMALL, "data.records_per_silo=20", *options)
    train(config, tmp_path / "whole")
    train_until_write(config, tmp_path / "killed", 25)
    assert 0 < load(tmp_path / "killed").folder.rounds_done < 4
    resume(tmp_path / "killed")
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
    silos = load_checkpoint(tmp_path / "whole").silos
    assert all(any(name.startswith(f"model/{kept}.") for name in tensors) for tensors in silos.values())


@pytest.mark.parametrize(
    ("method", "blocks"),
    [
        (CONTRAST, {"encoder@all", "decoder@all"}),
        (AVERAGED_SYNTHETIC, {"encoder@all", "decoder@all"}),
        (SYNTHETIC_ONLY, {"decoder@silo=a0", "decoder@silo=b0"}),
    ],
    ids=["MOON", "ContrastAvgSynth", "ContrastSynthOnly"],
)
def test_earlier_models_never_leave(method: tuple[str, ...], blocks: set[str], tmp_path: Path) -> None:
    train(config_of(*method, *SMALL, "rounds=2"), tmp_path / "run", TWO)
    assert {name for row in egress(tmp_path / "run") for name in row["blocks"]} == blocks


@pytest.mark.parametrize(
    "method", [CONTRAST, AVERAGED_SYNTHETIC, SYNTHETIC_ONLY], ids=["MOON", "ContrastAvgSynth", "ContrastSynthOnly"]
)
def test_a_silo_remembers_its_newest_encoders_and_is_held_apart_from_them(method: tuple[str, ...]) -> None:
    """Nothing to be held apart from in its first round; two places, so the first of three encoders is forgotten."""
    trainer, state = trainer_of(config_of(*method, *SMALL), TWO)
    engine, contrasts, trained = ReferenceEngine(trainer), [], []
    for _ in range(3):
        state, (report,), _ = rounds_of(engine, state, ((0, 1),))
        kept = state.silos[0].tensors
        contrasts.append(next(value for name, value in report.terms.items() if name.endswith("contrast")))
        trained.append({n: t for n, t in kept.items() if n.startswith("model/history.encoders.0.")})
        assert kept["model/history.filled"].tolist() == [1.0, float(len(trained) > 1)]
    assert contrasts[0] == 0.0
    assert min(contrasts[1:]) > 0.01
    assert not equal_bits(trained[2], trained[1])
    second = {n.replace("encoders.0.", "encoders.1."): t for n, t in trained[1].items()}
    assert equal_bits({n: t for n, t in kept.items() if n.startswith("model/history.encoders.1.")}, second)


def test_silos_go_on_from_their_own_state_and_receive_nothing() -> None:
    trainer, start = trainer_of(config_of(ALIGN, *SMALL), UNEQUAL)
    engine = ReferenceEngine(trainer)
    state, _, _ = rounds_of(engine, start, ((0, 1, 2, 3, 4),))
    tasks = engine.tasks(state, RoundContext(2, 9, (0, 1, 2, 3, 4)))
    assert all(task.received == {} for task in tasks)
    for task in tasks:
        name = UNEQUAL.silos[task.silo].name
        kept = {n.removeprefix("model/decoder."): t for n, t in task.state.tensors.items() if "decoder" in n}
        assert equal_bits(kept, state.server.blocks[BlockKey("decoder", f"silo={name}")])


def test_what_the_server_does_is_of_no_consequence_to_the_silos() -> None:
    """So T rounds are continued local training, and a single upload at the end gives the server the same decoders."""
    found = []
    for options in (("server.samples=30",), ("server.samples=7", "server.model.latent=9", "server.replay=1")):
        trainer, start = trainer_of(config_of(ALIGN, *SMALL, *options), UNEQUAL)
        found.append(rounds_of(ReferenceEngine(trainer), start, ((0, 3), (0,)))[0])
    assert found[0].silos.keys() == found[1].silos.keys()
    assert all(equal_bits(found[0].silos[i].tensors, found[1].silos[i].tensors) for i in found[0].silos)
    assert equal_bits(*(state.server.blocks[BlockKey("decoder", "silo=a0")] for state in found))


def test_what_is_evaluated_is_the_servers_own_model() -> None:
    config = config_of(ALIGN, *SMALL, "server.model.latent=3", "evaluation.samples=4")
    trainer, start = trainer_of(config, UNEQUAL)
    state, _, _ = rounds_of(ReferenceEngine(trainer), start, ((0, 1, 2, 3, 4),))
    generator = Generator(trainer.method, state.server, UNEQUAL.groups)
    evaluator = Evaluator(UNEQUAL, config.evaluation, Streams(0))
    found = evaluator.evaluation(generator, KeptModels(state, UNEQUAL)).autoencoders
    assert [vae.group for vae in found] == ["a", "b"]
    for vae in found:
        state_dict = vae.model.state_dict()
        for block in ("encoder", "decoder"):
            own = state.server.blocks[BlockKey(block, "server")]
            assert equal_bits({n: state_dict[f"{block}.{n}"] for n in own}, own)


@pytest.mark.parametrize(
    ("method", "names"),
    [
        ((ALIGN,), ["group=a", "group=b", "silo=a0", "silo=b0"]),
        (CONTRAST, ["group=a", "group=b"]),
        (AVERAGED_SYNTHETIC, ["group=a", "group=b", "silo=a0", "silo=b0"]),
        (("method.name=fedvae", "server.step=mean+distil"), ["group=a", "group=b", "average=a", "average=b"]),
    ],
    ids=["ALIGN-FL", "MOON", "ContrastAvgSynth", "a model beside the average"],
)
def test_an_audit_attacks_every_generator_that_the_server_holds_once(method: tuple[str, ...], names: list[str]) -> None:
    config = config_of(*method, *SMALL)
    trainer, start = trainer_of(config, TWO)
    state, _, results = rounds_of(ReferenceEngine(trainer), start, ((0, 1),))
    generator = Generator(trainer.method, state.server, TWO.groups)
    targets = targets_of(Evaluator(TWO, config.evaluation, Streams(0)).evaluation(generator, KeptModels(state, TWO)))
    assert [target.name for target in targets] == names
    sent = {f"silo={result.update.silo}": result.update.blocks for result in results}
    for target in targets:
        if target.name in sent:
            decoder = next(part for key, part in sent[target.name].items() if key.block == "decoder")
            assert equal_bits(target.model.get_submodule("decoder").state_dict(), decoder)
            assert not target.has_loss  # its encoder stayed at home, or is in the average alone


def test_four_architectures_in_one_federation() -> None:
    options = ("model.silos.a1.latent=6", "model.silos.b0.network=conv", "model.silos.a2.network=deeper-mlp")
    config = config_of(ALIGN, *SMALL, *options, "server.model.hidden=[12, 5]", "model.channels=[3, 4]")
    method = Experiment.of(config, UNEQUAL).method
    models = {silo.name: method.build(Site(silo.name, silo.groups)) for silo in UNEQUAL.silos}
    models["server"] = method.build(Site("server", (0, 1)))
    assert all(isinstance(model, VAE) for model in models.values())
    assert {name: model.prior_means.shape[1] for name, model in models.items()} == {
        "a0": 4, "b0": 4, "a1": 6, "b1": 4, "a2": 4, "server": 4,
    }  # fmt: skip
    layers = {n: [type(layer).__name__ for layer in m.decoder.modules()] for n, m in models.items()}
    assert [layers[name].count("Linear") for name in ("a0", "a2", "b0", "server")] == [2, 4, 1, 3]
    assert layers["b0"].count("ConvTranspose2d") == 2
    x = torch.rand(2, 1, 9, 8)
    for model in models.values():
        output = model.decode(
            model.encode(x, torch.zeros(2, dtype=torch.int64)).mean, torch.zeros(2, dtype=torch.int64)
        )
        assert output.shape == x.shape
