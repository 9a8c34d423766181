"""What the fused engine is compared with the reference engine on; benchmarks/one_answer.py takes it to a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fedloom.config import Config
from fedloom.engines.base import FederationState, Job, Result, RoundReport, SiloState, initial_state
from fedloom.engines.fused import FusedEngine, FusedOptions
from fedloom.engines.fused_records import ChunkTable, RecordTable, WholeTable
from fedloom.engines.reference import ReferenceEngine
from fedloom.engines.training import Trainer
from fedloom.experiment import Experiment
from fedloom.federation.records import Federation, Records, Silo
from fedloom.federation.rounds import RoundContext
from fedloom.methods.base import Method
from fedloom.sharing.plan import Tensors
from support import tiny_config

Rounds = tuple[tuple[int, ...], ...]
Lived = tuple[FederationState, list[RoundReport], list[Result]]
PRIVATE = (
    "privacy.mechanism=dp-sgd",
    "privacy.noise_multiplier=0.8",
    "privacy.clip=2",
    "privacy.accountant=rdp",
    "privacy.noise=test",
)
# Rounds of some, of all, and of nobody.
ROUNDS: Rounds = ((1, 3), (0, 1, 2, 3, 4), (), (0, 2, 4))


def image_federation(sizes: dict[str, int], shape: tuple[int, ...] = (1, 9, 8)) -> Federation:
    """Groups "a" and "b"; the first letter of a silo's name is its group, "m" means both."""
    generator = torch.Generator().manual_seed(3)
    silos = []
    for name, size in sizes.items():
        x = torch.randint(0, 256, (size, *shape), generator=generator, dtype=torch.uint8)
        group = torch.arange(size) % 2 if name[0] == "m" else torch.full((size,), "ab".index(name[0]))
        silos.append(Silo(name, Records(x, torch.zeros(size, dtype=torch.int64), group)))
    return Federation("images", tuple(silos), silos[0].train, ("a", "b"))


# Batches of 8: sizes below one batch, of whole batches, with a last partial one, and of a single record.
UNEQUAL = image_federation({"a0": 5, "b0": 21, "a1": 17, "b1": 1, "a2": 16})
MIXED = image_federation({"a0": 5, "m0": 21, "b1": 17, "m1": 4, "a2": 16})
EVEN = image_federation({"a0": 16, "b0": 16, "a1": 16, "b1": 16, "a2": 16})  # equally many steps at every silo
# Under DP-SGD a silo holds at least one batch: one with a rate of one, others with several; 4, 8, 6, 2 and 4 steps.
LARGER = image_federation({"a0": 12, "b0": 27, "a1": 17, "b1": 8, "a2": 16})

FISSION = "method.name=fissionvae"
HIERARCHY = (FISSION, "method.hierarchy=true", "model.top_latent=3", "model.top_hidden=[8, 8]")
CONVOLUTIONS = "model.channels=[3, 4]"
ALIGN = "method.name=align_fl"
DISTIL = ("server.samples=40", "server.epochs=2", "server.batch_size=16")
METHODS: dict[str, tuple[str, ...]] = {
    "fedvae": (),
    "+D": (FISSION,),
    "+L+D": (FISSION, "method.prior=wave"),
    "+L": (FISSION, "method.prior=symmetrical", "method.decoder=global"),
    "+H+L+D": (*HIERARCHY, "method.prior=wave"),
    "+H learnable, sampled": (*HIERARCHY, "method.prior=learnable", "method.consistency=sampled"),
    "conditional": ("method.name=conditional",),
    "group_vaes": ("method.name=group_vaes",),
    "flow_vae": ("method.name=flow_vae", "method.flow=[8]"),
    "fission_flow": ("method.name=fission_flow", "method.widths=[8]", "method.blocks=1", "method.steps=2"),
    "fission_flow of codes": (  # of 1 x 5 x 4 places; the VAE learns in the first two rounds
        "method.name=fission_flow",
        "method.latent=vae",
        "method.latent_rounds=2",
        "rounds=9",
        "model.network=grid",
        "model.channels=[3]",
        "model.latent=20",
        "model.likelihood=gaussian",
        "method.widths=[8]",
        "method.steps=2",
    ),
    "flow_vae with a refiner": (
        "method.name=flow_vae",
        "method.flow=[8]",
        "method.refiner=2",
        "method.refiner_width=5",
    ),
    "private encoder, kept moments": (FISSION, "sharing.scopes.encoder=silo", "local.keep_optimizer=true"),
    "uploaded decoder": ("sharing.scopes.decoder=upload",),
    "sgd": ("local.optimizer=sgd", "local.learning_rate=1e-4"),
    "gaussian": ("model.likelihood=gaussian",),
    "a number of steps": ("local.steps=7",),  # for some silos more than an epoch, for others less
    "closed-form posterior": (FISSION, "model.posterior=closed-form", "model.hidden=[]", "model.likelihood=gaussian"),
    "encoder on samples": (FISSION, "model.posterior=from-decoder"),
    "equal groups": (FISSION, "sharing.weights=equal-groups"),
    "branches of two architectures": (FISSION, "model.branches.b=deeper-mlp"),
    "convolutions": ("model.network=conv", CONVOLUTIONS),
    "mlp and convolutions": (FISSION, "model.branches.a=deeper-mlp-conv", CONVOLUTIONS),
    "fedgan": ("method.name=fedgan", CONVOLUTIONS),
    "fedgan without its moments": ("method.name=fedgan", CONVOLUTIONS, "method.keep_optimizer=false"),
    "fedgan with batch norm": ("method.name=fedgan", CONVOLUTIONS, "method.norm=batch"),
    "fedprox": ("method.name=fedprox",),
    "moon": ("method.name=moon",),
    "align_fl": (ALIGN, *DISTIL),
    "align_fl, replay by size, moments kept": (
        ALIGN,
        *DISTIL,
        "server.keep_optimizer=true",
        "server.replay=2",
        "server.balance=size",
        "server.targets=samples",
        "server.latents=ball",
    ),
    "align_fl of a mixture": (ALIGN, *DISTIL, "server.latents=mixture", "server.components=3"),
    "align_fl of a histogram": (ALIGN, *DISTIL, "server.latents=histogram", "server.components=8"),
    "align_fl with its penalty": (ALIGN, *DISTIL, "model.penalty=align-penalty"),
    "align_fl of certified decoders": (ALIGN, *DISTIL, "model.lipschitz=2.0"),
    "align_fl of four architectures": (
        ALIGN,
        *DISTIL,
        "model.silos.a1.latent=6",
        "model.silos.b0.network=conv",
        "model.silos.a2.network=deeper-mlp",
        "server.model.latent=3",
        "server.model.hidden=[12, 5]",
        CONVOLUTIONS,
    ),
    "GANs that are distilled": (
        "method.name=fedgan",
        "sharing.scopes.generator=upload",
        "sharing.scopes.discriminator=silo",
        CONVOLUTIONS,
        *DISTIL,
    ),
    "+D, then distilled": (FISSION, "server.step=mean+distil", *DISTIL),
    "ContrastAvgSynth": (
        "method.name=moon",
        "server.step=mean+distil",
        "server.trains=merged",
        "server.teachers=silos",
        *DISTIL,
    ),
    "ContrastSynthOnly": ("method.name=moon", "method.model=server", *DISTIL),
}


@dataclass(frozen=True)
class Played:
    """A step that is played back by taking it."""

    step: Callable[[], None]

    def replay(self) -> None:
        """Once more."""
        self.step()


@dataclass(frozen=True)
class Placed:
    """A step that, like a CUDA graph, reads records where they lay when it was recorded."""

    step: Callable[[], None]
    table: RecordTable
    records: Records

    def replay(self) -> None:
        """Once more, from the old place."""
        assert isinstance(self.table, WholeTable | ChunkTable)
        now, self.table.records = self.table.records, self.records
        self.step()
        self.table.records = now


def config_of(*overrides: str) -> Config:
    """Two epochs of batches of 8."""
    return tiny_config("local.epochs=2", "local.batch_size=8", "method.name=fedvae", *overrides)


def rounds_of(engine: Any, state: FederationState, rounds: Rounds) -> Lived:
    """State, reports and results after some rounds."""
    reports: list[RoundReport] = []
    results: list[Result] = []
    for number, participants in enumerate(rounds, start=state.round + 1):
        state, report = engine.round(Job(state, RoundContext(number, 9, participants), results.append))
        reports.append(report)
    return state, reports, results


def trainer_of(config: Config, federation: Federation, method: Method | None = None) -> tuple[Trainer, FederationState]:
    """A trainer and the state before round 1."""
    experiment = Experiment.of(config, federation)
    trainer = experiment.trainer if method is None else replace(experiment.trainer, method=method)
    return trainer, initial_state(trainer.method, trainer.federation, config)


def assert_alike(ours: Tensors, wanted: Tensors, before: Tensors, tolerance: float = 5e-3) -> None:
    """They differ by little of the way that each tensor has come.

    Not element by element: Adam turns gradients that are zero but for rounding into steps of full length.
    """
    assert ours.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (ours[name].shape, ours[name].dtype) == (tensor.shape, tensor.dtype)
        way = (tensor - before.get(name, torch.zeros(()))).float().norm()
        assert (ours[name] - tensor).float().norm() <= tolerance * way + 1e-6, name


def assert_same_terms(ours: Any, wanted: Any) -> None:
    """Equal names, nearly equal values."""
    assert ours.keys() == wanted.keys()
    for name, value in wanted.items():
        both_not_a_number = math.isnan(ours[name]) and math.isnan(value)
        assert both_not_a_number or math.isclose(ours[name], value, rel_tol=1e-4, abs_tol=1e-4), name


def assert_same_rounds(
    start: FederationState,
    ours: Lived,
    wanted: Lived,
    tolerance: float = 5e-3,
) -> None:
    """Server, silo states, losses, egress and steps after the same rounds."""
    (our_state, our_reports, our_results), (state, reports, results) = ours, wanted
    assert our_state.round == state.round
    assert our_state.server.blocks.keys() == state.server.blocks.keys()
    for key, tensors in state.server.blocks.items():
        assert_alike(our_state.server.blocks[key], tensors, start.server.blocks.get(key, {}), tolerance)
    assert our_state.server.averages.keys() == state.server.averages.keys()
    for key, tensors in state.server.averages.items():
        assert_alike(our_state.server.averages[key], tensors, start.server.blocks.get(key, {}), tolerance)
    assert our_state.silos.keys() == state.silos.keys()
    for silo, kept in state.silos.items():
        before = start.silos.get(silo, SiloState()).tensors
        assert_alike(our_state.silos[silo].tensors, kept.tensors, before, tolerance)
    for our_report, report in zip(our_reports, reports, strict=True):
        assert (our_report.egress, our_report.steps) == (report.egress, report.steps)
        assert_same_terms(our_report.terms, report.terms)
    by_silo = {(result.update.round, result.silo): result for result in our_results}
    assert len(by_silo) == len(results)
    for result in results:
        assert_same_terms(by_silo[result.update.round, result.silo].terms, result.terms)


def assert_one_answer(trainer: Trainer, start: FederationState, rounds: Rounds, options: FusedOptions) -> None:
    """Both engines end with the same after the same rounds."""
    ours = rounds_of(FusedEngine(trainer, options), start, rounds)
    assert_same_rounds(start, ours, rounds_of(ReferenceEngine(trainer), start, rounds))


def pack_of(
    federation: Federation, *runs: tuple[str, ...], options: FusedOptions
) -> tuple[FusedEngine, list[tuple[Trainer, FederationState]]]:
    """An engine for several runs, with their trainers and first states."""
    members = [trainer_of(config_of(*overrides), federation) for overrides in runs]
    trainers = [trainer for trainer, _ in members]
    return FusedEngine(trainers[0], options, packed=trainers[1:]), members


def lived_together(engine: FusedEngine, starts: Sequence[FederationState], attendance: Sequence[Rounds]) -> list[Lived]:
    """State, reports and results of each run after the rounds that it attended."""
    lives: list[Lived] = [(start, [], []) for start in starts]
    for number, attended in enumerate(zip(*attendance, strict=True), start=1):
        jobs = {
            run: Job(lives[run][0], RoundContext(number, 9, chosen), lives[run][2].append)
            for run, chosen in enumerate(attended)
        }
        for run, outcome in engine.rounds(jobs).items():
            assert not isinstance(outcome, Exception)
            lives[run] = outcome[0], [*lives[run][1], outcome[1]], lives[run][2]
    return lives
