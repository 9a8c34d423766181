"""Distillation: what the server keeps, whom it samples, where it starts, and what it refuses."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from engines.one_answer import UNEQUAL, config_of, rounds_of, trainer_of
from fedloom.engines.base import FederationState, conclude
from fedloom.engines.reference import ReferenceEngine
from fedloom.engines.training import Trainer
from fedloom.errors import ConfigError, FedloomError, FedloomWarning
from fedloom.federation.rounds import RoundContext, Site
from fedloom.methods.base import Method, OptimizerRule, Setting, make_method
from fedloom.methods.distil import Distil
from fedloom.methods.generator import Generator
from fedloom.methods.steps import Merged, ServerState, Steps
from fedloom.objectives.elbo import Elbo
from fedloom.privacy.lipschitz import Bounded
from fedloom.sharing.plan import BlockKey, Tensors
from fedloom.sharing.update import DivergedError, Update
from fedloom.streams import Streams
from labelled_vectors import CLASSES, labelled_config
from support import equal_bits, round_of

ALIGN = "method.name=align_fl"
SMALL = ("server.samples=40", "server.epochs=1", "server.batch_size=16")
EVERYBODY = (0, 1, 2, 3, 4)
SERVED = ("method.name=moon", "method.model=server")
GANS = ("method.name=fedgan", "sharing.scopes.generator=upload", "sharing.scopes.discriminator=silo")
AVERAGES = ("method.name=fedvae", "server.step=mean+distil")
DRAWN = "server.targets=samples"
CPU, STREAMS = torch.device("cpu"), Streams(1)


def aligned(*overrides: str) -> tuple[Trainer, FederationState, Distil]:
    trainer, start = trainer_of(config_of(ALIGN, *SMALL, *overrides), UNEQUAL)
    step = distil_of(trainer)
    return trainer, start, step


def distil_of(trainer: Trainer) -> Distil:
    step = trainer.method.server_step
    last = step.steps[-1] if isinstance(step, Steps) else step
    assert isinstance(last, Distil)
    return last


def context(number: int) -> RoundContext:
    return RoundContext(number, 9, EVERYBODY)


def updates_of(trainer: Trainer, state: FederationState, number: int = 1) -> list[Update]:
    engine = ReferenceEngine(trainer)
    return [result.update for result in engine.train(engine.tasks(state, context(number)))]


def decoder_of(silo: str) -> BlockKey:
    return BlockKey("decoder", f"silo={silo}")


def named(tensors: Tensors, value: float) -> Tensors:
    """Tensors of the same names and shapes that can be told apart."""
    return {name: torch.full_like(tensor, value) for name, tensor in tensors.items()}


def sent(update: Update, number: int, value: float) -> Update:
    """The same silo's decoder of another round."""
    return replace(update, round=number, blocks={key: named(part, value) for key, part in update.blocks.items()})


def collected(step: Distil, server: ServerState, updates: Sequence[Update], number: int) -> ServerState:
    averaged = Merged()(round_of(server, updates, context(number), STREAMS, step.method.plan)).state
    return step.collected(replace(round_of(averaged, updates, context(number), STREAMS), before=server))


def test_permuting_the_silos_leaves_every_bit_of_the_distillation_and_the_model_unchanged() -> None:
    trainer, start, step = aligned("server.replay=1", "server.balance=size")
    updates = updates_of(trainer, start)
    distillations = []
    for order in itertools.islice(itertools.permutations(updates), 0, 120, 17):
        server = collected(step, start.server, order, 1)
        distillations.append(step.distillation(server, context(1), STREAMS, CPU))
    first, *others = distillations
    assert len(others) > 5
    distiller = ReferenceEngine(trainer)
    model = distiller.distil(first).weights
    assert not equal_bits(model, first.weights)
    for distillation in others:
        assert torch.equal(distillation.records.x, first.records.x)
        assert torch.equal(distillation.records.group, first.records.group)
        assert equal_bits(distillation.weights, first.weights)
        assert distillation.seed == first.seed
        assert equal_bits(distiller.distil(distillation).weights, model)


def test_teachers_come_by_name_with_their_groups() -> None:
    trainer, start, step = aligned()
    updates = updates_of(trainer, start)
    server = collected(step, start.server, updates, 1)
    only = {teacher.name: teacher.site for teacher in step.teachers.present(server, context(1))}
    assert list(only) == ["a0", "a1", "a2", "b0", "b1"]
    assert [only[name].groups for name in only] == [(0,), (0,), (0,), (1,), (1,)]


@pytest.mark.parametrize(
    ("overrides", "counts"),
    [
        ((), [40, 40, 40, 40, 40]),
        # 200 samples in all, by 5, 17, 16, 21 and 1 of 60 records.
        (("server.balance=size",), [17, 57, 53, 70, 3]),
        (("server.samples=1", "server.balance=size"), [1, 1, 1, 2, 1]),
    ],
)
def test_how_many_samples_each_silo_gives(overrides: tuple[str, ...], counts: list[int]) -> None:
    trainer, start, step = aligned(*overrides)
    server = collected(step, start.server, updates_of(trainer, start), 1)
    # Every decoder is a constant image of its own: which sample came from whom is plain to see.
    shades = {f"silo={name}": 0.1 * i for i, name in enumerate(("a0", "a1", "a2", "b0", "b1"), start=1)}
    blocks = {
        key: {
            n: torch.full_like(t, torch.logit(torch.tensor(shades[key.owner]))) * n.endswith("2.bias")
            for n, t in part.items()
        }
        if key.owner in shades
        else part
        for key, part in server.blocks.items()
    }
    images = step.synthetic(ServerState(blocks, server.memory), context(1), STREAMS, CPU).x
    found = [int(torch.isclose(images, torch.tensor(shade)).all(dim=(1, 2, 3)).sum()) for shade in shades.values()]
    assert found == counts


def test_samples_are_new_in_every_round() -> None:
    trainer, start, step = aligned()
    server = collected(step, start.server, updates_of(trainer, start), 1)
    one, again, two = (step.synthetic(server, context(number), STREAMS, CPU).x for number in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.isclose(one, two).all(dim=(1, 2, 3)).any()


def test_earlier_decoders_are_kept_as_far_back_as_asked_for() -> None:
    trainer, start, step = aligned("server.replay=2")
    update, server, key = updates_of(trainer, start)[0], start.server, decoder_of("a0")
    for number in (1, 2, 3, 4):
        server = collected(step, server, [sent(update, number, float(number))], number)
        assert len(step.synthetic(server, context(number), STREAMS, CPU)) == 40 * min(number, 3)
    kept = {
        k.owner: next(iter(part.values())).unique().tolist()
        for k, part in server.blocks.items()
        if k.block == key.block
    }
    assert kept.pop("server") != [4.0]
    assert kept == {"silo=a0": [4.0], "before-1/silo=a0": [3.0], "before-2/silo=a0": [2.0]}


def test_an_earlier_decoder_is_sampled_where_its_own_latents_were() -> None:
    """A silo's mixture of round 1 sits at -1, that of round 2 at +1, without any width; the decoder shows the side."""
    trainer, start, step = aligned("server.replay=1", "server.latents=mixture", "server.components=1")
    update, server = updates_of(trainer, start)[0], start.server
    for number, place in ((1, -1.0), (2, 1.0)):
        mixture = {"weights": torch.ones(1), "means": torch.full((1, 4), place), "variances": torch.zeros(1, 4)}
        blocks = {key: dict(part) for key, part in update.blocks.items()}
        told = replace(update, round=number, blocks=blocks, payloads={"latents": mixture})
        server = collected(step, server, [told], number)
    images = step.synthetic(server, context(2), STREAMS, CPU).x
    model = trainer.method.build(step.teachers.present(server, context(2))[0].site)
    model.load_state_dict({f"decoder.{n}": t for n, t in update.blocks[decoder_of("a0")].items()}, strict=False)
    decoder = model.get_submodule("decoder")
    for rows, place in ((images[:40], 1.0), (images[40:], -1.0)):
        torch.testing.assert_close(rows, torch.sigmoid(decoder(torch.full((40, 4), place))))


def test_a_late_decoder_is_used_when_it_arrives_unless_a_newer_one_overtook_it() -> None:
    trainer, start, step = aligned()
    first, second = updates_of(trainer, start)[:2]
    server = collected(step, start.server, [sent(first, 1, 1.0)], 1)
    server = collected(step, server, [sent(second, 1, 5.0), sent(first, 3, 3.0)], 3)
    server = collected(step, server, [sent(first, 2, 2.0)], 4)
    assert {name: next(iter(server.blocks[decoder_of(name)].values())).unique().item() for name in ("a0", "b0")} == {
        "a0": 3.0,
        "b0": 5.0,
    }
    assert {teacher.name: teacher.age for teacher in step.teachers.present(server, context(4))} == {"a0": 1, "b0": 3}
    assert step.news(server, context(4)) == {"generators": 2.0, "oldest": 3.0}


def test_a_silo_that_sends_nothing_for_many_rounds_is_warned_of() -> None:
    trainer, start, step = aligned("server.patience=3")
    server = collected(step, start.server, updates_of(trainer, start)[:1], 1)
    step.news(server, context(3))
    with pytest.warns(FedloomWarning, match="silo 'a0' has sent nothing for 3 rounds; .* its generator of round 1"):
        assert step.news(server, context(4))["oldest"] == 3.0


def test_the_age_is_in_the_log_and_the_newest_decoder_goes_on() -> None:
    trainer, start, _ = aligned()
    state, reports, _ = rounds_of(ReferenceEngine(trainer), start, ((0, 1), (1,), (), (1, 2)))
    ages = [(report.terms.get("server/generators"), report.terms.get("server/oldest")) for report in reports]
    assert ages == [(2.0, 0.0), (2.0, 1.0), (None, None), (3.0, 3.0)]
    assert reports[3].terms["server/samples"] == 120.0
    assert state.server.memory["round/a0"].item() == 1


def test_a_round_without_participants_leaves_the_server_as_it_was() -> None:
    trainer, start, _ = aligned()
    after, _, _ = rounds_of(ReferenceEngine(trainer), start, (EVERYBODY,))
    still, _, _ = rounds_of(ReferenceEngine(trainer), after, ((),))
    assert still.server == after.server


@pytest.mark.parametrize("keep", ["true", "false"])
def test_the_server_starts_where_it_ended_with_or_without_its_moments(keep: str) -> None:
    trainer, start, step = aligned(f"server.keep_optimizer={keep}")
    first, _, _ = rounds_of(ReferenceEngine(trainer), start, (EVERYBODY,))
    distillation = step.distillation(first.server, context(2), STREAMS, CPU)
    for block in ("encoder", "decoder"):
        own = first.server.blocks[BlockKey(block, "server")]
        assert equal_bits(
            {f"{block}.{n}": t for n, t in own.items()},
            {n: t for n, t in distillation.weights.items() if n.startswith(block)},
        )
        assert not equal_bits(own, start.server.blocks[BlockKey(block, "server")])
    # 200 samples in batches of 16: 13 steps.
    counts = {tensor.item() for name, tensor in distillation.moments.items() if name.endswith("/step")}
    assert counts == ({13.0} if keep == "true" else set())


@pytest.mark.parametrize("limit", [0.0, 3.0])
def test_the_servers_model_and_training_have_settings_of_their_own(limit: float) -> None:
    """The silos' Lipschitz bound is not the server's, unless it is asked for."""
    overrides = [
        "model.lipschitz=2.0",
        "model.kl_weight=3.0",
        "server.model.kl_weight=0.5",
        "server.learning_rate=0.02",
    ]
    _, _, step = aligned(*overrides, *([f"server.model.lipschitz={limit}"] if limit else []))
    (phase,) = step.student.phases
    assert phase.objective == Elbo(4, 0.5)
    assert phase.optimizer == OptimizerRule("adam", 0.02)
    assert not phase.touches_records
    for method, bounded in ((step.method, True), (step.student, limit > 0)):
        layers = method.build(Site("a0", (0,))).modules()
        assert any(isinstance(layer, Bounded) for layer in layers) is bounded


def test_the_server_gets_better_at_what_it_is_shown() -> None:
    losses = []
    for epochs in (1, 40):
        trainer, start, _ = aligned(f"server.epochs={epochs}")
        _, reports, _ = rounds_of(ReferenceEngine(trainer), start, (EVERYBODY,))
        losses.append(reports[0].terms["server/nll"])
    assert losses[1] < losses[0] - 0.5


def test_generated_images_are_those_of_the_servers_own_decoder() -> None:
    trainer, start, _ = aligned("server.model.latent=3")
    state, _, _ = rounds_of(ReferenceEngine(trainer), start, (EVERYBODY,))
    generator = Generator(trainer.method, state.server, ("a", "b"))
    model = generator.model("a")
    model.load_state_dict(
        {f"decoder.{n}": t for n, t in state.server.blocks[BlockKey("decoder", "server")].items()}, strict=False
    )
    z = Streams(4).normal("sample/z1", 3, 3, silo=0)
    assert torch.equal(generator.sample(3, group="a", seed=4), torch.sigmoid(model.get_submodule("decoder")(z)))
    with pytest.raises(ConfigError, match="cannot generate 0 samples"):
        generator.sample(0, group="a")


@pytest.mark.parametrize(("likelihood", "values"), [("bernoulli", "coins"), ("gaussian", "normal")])
def test_targets_may_be_draws_around_the_mean(likelihood: str, values: str) -> None:
    trainer, start, step = aligned(f"model.likelihood={likelihood}", "server.targets=samples")
    server = collected(step, start.server, updates_of(trainer, start), 1)
    images = step.synthetic(server, context(1), STREAMS, CPU).x
    means = (
        replace(step, settings=replace(step.settings, targets="means")).synthetic(server, context(1), STREAMS, CPU).x
    )
    if values == "coins":
        assert set(images.unique().tolist()) == {0.0, 1.0}
        assert images.mean().item() == pytest.approx(means.mean().item(), abs=0.01)
    else:
        assert (images - means).std().item() == pytest.approx(0.5**0.5, abs=0.01)


def test_after_averaging_the_samples_are_those_of_the_averaged_groups() -> None:
    trainer, start = trainer_of(config_of("method.name=fissionvae", "server.step=mean+distil", *SMALL), UNEQUAL)
    step = distil_of(trainer)
    server = collected(step, start.server, updates_of(trainer, start), 1)
    assert [(t.name, t.site.groups, t.records) for t in step.teachers.present(server, context(1))] == [
        ("a", (0,), 38.0),
        ("b", (1,), 22.0),
    ]
    records = step.synthetic(server, context(1), STREAMS, CPU)
    assert records.group.tolist() == [0] * 40 + [1] * 40
    model = trainer.method.build(replace(step.teachers.present(server, context(1))[1].site))
    model.load_state_dict(
        {f"decoder.{n}": t for n, t in server.blocks[BlockKey("decoder", "group=b")].items()}, strict=False
    )
    z = STREAMS.normal("distil/b/0/z1/0", 40, 4, round=1)
    torch.testing.assert_close(records.x[40:], torch.sigmoid(model.get_submodule("decoder")(z)))


def test_after_averaging_the_samples_may_be_those_of_each_silo() -> None:
    """What the silos sent is sampled, the average is what starts to learn; earlier decoders are replayed as well."""
    options = ("method.name=fedvae", "server.step=mean+distil", "server.trains=merged", "server.teachers=silos")
    trainer, start = trainer_of(config_of(*options, "server.replay=1", *SMALL), UNEQUAL)
    step = distil_of(trainer)
    updates = updates_of(trainer, start)
    server = collected(step, start.server, updates, 1)
    server = collected(step, server, [sent(updates[2], 2, 0.0)], 2)
    assert [(t.name, t.age) for t in step.teachers.present(server, context(2))] == [
        ("a0", 1), ("a1", 0), ("a2", 1), ("b0", 1), ("b1", 1),
    ]  # fmt: skip
    images = step.synthetic(server, context(2), STREAMS, CPU).x
    model = trainer.method.build(step.teachers.present(server, context(2))[0].site)
    for first, update, version in ((0, updates[0], "a0/0"), (80, updates[2], "a1/1")):
        parts = update.blocks[BlockKey("decoder", "all")]
        model.load_state_dict({f"decoder.{n}": t for n, t in parts.items()}, strict=False)
        z = STREAMS.normal(f"distil/{version}/z1/0", 40, 4, round=2)
        torch.testing.assert_close(images[first : first + 40], torch.sigmoid(model.get_submodule("decoder")(z)))
    assert (images[40:80] == 0.5).all()  # the newest of a1, all weights zero
    assert len(images) == 6 * 40
    distillation = step.distillation(server, context(2), STREAMS, CPU)
    average = server.blocks[BlockKey("decoder", "all")]
    assert equal_bits({n: distillation.weights[f"decoder.{n}"] for n in average}, average)


def test_an_average_that_nobody_trained_is_not_replayed() -> None:
    options = ("method.name=fissionvae", "server.step=mean+distil", "server.replay=1")
    trainer, start = trainer_of(config_of(*options, *SMALL), UNEQUAL)
    _, reports, _ = rounds_of(ReferenceEngine(trainer), start, ((0,), EVERYBODY, EVERYBODY))
    # One group, both of them and the first once more, both of them twice.
    assert [report.terms["server/samples"] for report in reports] == [40.0, 120.0, 160.0]


def test_the_average_itself_may_go_on_learning_and_comes_down() -> None:
    """ContrastAvgSynth: silos receive the average after its distillation, and the server has no other model."""
    options = ("method.name=moon", "server.step=mean+distil", "server.trains=merged", *SMALL)
    trainer, start = trainer_of(config_of(*options), UNEQUAL)
    step = distil_of(trainer)
    assert trainer.method.server_plan is None
    averaged = collected(step, start.server, updates_of(trainer, start), 1)
    distillation = step.distillation(averaged, context(1), STREAMS, CPU)
    assert equal_bits(
        {n.removeprefix("encoder."): t for n, t in distillation.weights.items() if n.startswith("encoder.")},
        averaged.blocks[BlockKey("encoder", "all")],
    )
    state, _, _ = rounds_of(ReferenceEngine(trainer), start, (EVERYBODY,))
    assert (
        state.server.blocks.keys()
        == start.server.blocks.keys()
        == {BlockKey("encoder", "all"), BlockKey("decoder", "all")}
    )
    assert not equal_bits(state.server.blocks[BlockKey("encoder", "all")], averaged.blocks[BlockKey("encoder", "all")])


def test_the_servers_own_model_may_replace_the_silos() -> None:
    """ContrastSynthOnly: decoders alone go up, encoder and decoder of the server come down."""
    trainer, start = trainer_of(config_of("method.name=moon", "method.model=server", *SMALL), UNEQUAL)
    engine = ReferenceEngine(trainer)
    state, _, results = rounds_of(engine, start, (EVERYBODY,))
    assert {str(key) for result in results for key in result.update.blocks} == {
        f"decoder@silo={n}" for n in ("a0", "a1", "a2", "b0", "b1")
    }
    for before in (start, state):
        task = engine.tasks(before, context(1))[2]
        wanted = {
            f"{k.block}.{n}": t
            for k, part in before.server.blocks.items()
            if k.owner == "server"
            for n, t in part.items()
        }
        assert equal_bits(task.received, wanted)


class TestWhatIsRefused:
    def test_a_decoder_with_the_wrong_output_size(self) -> None:
        trainer, start, step = aligned()
        update = updates_of(trainer, start)[0]
        part = dict(update.blocks[decoder_of("a0")])
        part["layers.2.weight"], part["layers.2.bias"] = torch.zeros(50, 16), torch.zeros(50)
        with pytest.raises(
            FedloomError,
            match=r"'a0' sent 'decoder@silo=a0/layers.2.bias' of shape \(50,\), but its network has \(72,\): refused",
        ):
            collected(step, start.server, [replace(update, blocks={decoder_of("a0"): part})], 1)

    def test_a_decoder_with_a_part_missing(self) -> None:
        trainer, start, step = aligned()
        update = updates_of(trainer, start)[0]
        part = {n: t for n, t in update.blocks[decoder_of("a0")].items() if n != "layers.0.bias"}
        with pytest.raises(FedloomError, match=r"layers.0.bias' of shape None"):
            collected(step, start.server, [replace(update, blocks={decoder_of("a0"): part})], 1)

    def test_weights_that_are_not_finite(self) -> None:
        trainer, start, _ = aligned()
        engine = ReferenceEngine(trainer)
        results = list(engine.train(engine.tasks(start, context(1))))
        bad = {key: named(part, float("nan")) for key, part in results[0].update.blocks.items()}
        results[0] = replace(results[0], update=replace(results[0].update, blocks=bad))
        with pytest.raises(DivergedError, match="silo 'a0' sent values that are not finite in 'decoder@silo=a0"):
            conclude(trainer.method, start, context(1), results, STREAMS, engine)

    @pytest.mark.parametrize(
        ("overrides", "complaint"),
        [
            (["server.samples=0"], "server.samples = 0 must be at least 1"),
            (["server.step=distil", "method.name=fedvae"], "the silos share the average of 'encoder'"),
            (["server.step=distil", "sharing.scopes.decoder=silo"], "samples the block 'decoder', which the silos do"),
            (["server.trains=merged"], "server.trains = 'merged' needs server.step = 'mean.distil'"),
            (["server.model.depth=3"], "unknown key 'server.model.depth'"),
            (["server.model.latent=0"], "server.model.latent = 0 must be at least 1"),
            ([*SERVED, "server.model.latent=3"], "server.model.latent must not be set"),
            ([*GANS, "server.latents=ball"], "'ball' is for VAEs of one level"),
            ([*GANS, "model.silos.a.latent=3"], "generators of different latent sizes"),
            (["server.latents=mixture", "model.silos.a.latent=9"], "needs one latent size for all silos"),
            ([*AVERAGES, "server.teachers=silos", "privacy.trust=distributed"], "shows the server the sum alone"),
            ([*AVERAGES, "server.latents=mixture"], "'mixture' describes each silo's latents, but averages are"),
            (["model.silos.a.kl_weight=3"], "unknown key 'model.silos.a.kl_weight'"),
            (["model.silos.z.latent=3"], "model.silos: unknown silo 'z'"),
            (["model.silos.a.network=cnov"], "model.silos.a.network: unknown network 'cnov'; did you mean 'conv'"),
            (["model.silos.a.latent=3", "method.name=fedvae"], "networks of its own, but its encoder is shared"),
            (["model.silos.a.channels=[3]", "method.name=fedgan"], "networks of its own, but its generator is shared"),
            ([*SERVED, "model.silos.a.hidden=[3]"], "networks of its own, but its encoder is shared"),
            (["model.likelihood=gaussian", "server.model.likelihood=bernoulli", DRAWN], "lie outside"),
            (["method.name=moon", "sharing.scopes.encoder=silo"], "compares with a model that comes down"),
        ],
    )
    def test_settings_that_do_not_fit(self, overrides: list[str], complaint: str) -> None:
        with pytest.raises(ConfigError, match=complaint):
            self.made(*overrides)

    def test_decoders_that_are_told_the_class(self) -> None:
        config = labelled_config("dp_cvae", "server.step=mean+distil")
        with pytest.raises(ConfigError, match="is not built for decoders that are told the class"):
            make_method(Setting(config, (6,), ("all",), CLASSES, ("one", "two")))

    @staticmethod
    def made(*overrides: str) -> Method:
        config = config_of(ALIGN, "model.channels=[3]", *overrides)
        return make_method(Setting(config, (1, 9, 8), ("g",), (), ("a", "b")))
