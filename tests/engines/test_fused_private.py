"""One answer under DP-SGD: the fused engine draws, clips, sums and noises as the reference engine does."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engines.one_answer import (
    CONVOLUTIONS,
    LARGER,
    METHODS,
    PRIVATE,
    Rounds,
    assert_one_answer,
    config_of,
    image_federation,
    rounds_of,
    trainer_of,
)
from fedloom.engines import fused, fused_private, poisson_batches
from fedloom.engines.base import FederationState
from fedloom.engines.fused import FusedEngine, FusedOptions
from fedloom.engines.training import Trainer
from fedloom.experiment import train
from fedloom.federation.records import Federation
from fedloom.objectives.base import Losses, Objective, Step
from fedloom.privacy.ledger import read_accounts
from support import assert_same_run, federation_of, tiny_config

CPU = torch.device("cpu")
IN_CHUNKS = FusedOptions(CPU, chunk=3)
MIXED = image_federation({"a0": 12, "m0": 21, "b1": 17, "m1": 9, "a2": 16})
ROUNDS: Rounds = ((1, 3), (0, 1, 2, 3, 4), (), (0, 2, 4))
WRITTEN_OUT = "fedprox"  # uses parameters beside their layers, so that gradients must be written out


def private_trainer(federation: Federation, *overrides: str) -> tuple[Trainer, FederationState]:
    return trainer_of(config_of(*PRIVATE, "rounds=4", *overrides), federation)


@pytest.mark.parametrize(
    "name",
    [
        "fedvae",
        "+D",
        "+H+L+D",
        WRITTEN_OUT,
        "private encoder, kept moments",
        "sgd",
        "branches of two architectures",
        "mlp and convolutions",
        "flow_vae with a refiner",
        "fedgan",
    ],
)
def test_fused_equals_reference(name: str) -> None:
    assert_one_answer(*private_trainer(LARGER, *METHODS[name]), ROUNDS, IN_CHUNKS)


def test_a_unet_and_several_draws_for_each_record() -> None:
    trainer, start = private_trainer(LARGER, *METHODS["fission_flow"], "method.draws=2")
    assert_one_answer(trainer, start, ((3,), (0, 3)), IN_CHUNKS)


@pytest.mark.parametrize("name", ["+D", "fedgan"])
def test_silos_of_several_groups(name: str) -> None:
    assert_one_answer(*private_trainer(MIXED, *METHODS[name]), ROUNDS, IN_CHUNKS)


@pytest.mark.parametrize(
    "settings",
    [
        ("privacy.clipping=quantile",),
        ("privacy.clipping=median",),
        ("privacy.blocks=['decoder']",),
        ("privacy.blocks=['decoder']", "model.network=conv", CONVOLUTIONS),
        ("privacy.blocks=['decoder']", *METHODS["sgd"]),  # Adam would not see by how much a whole sum is scaled
        ("privacy.blocks=['decoder']", *METHODS[WRITTEN_OUT]),
        ("model.penalty=jacobian", "model.penalty_limit=0.01"),
        ("model.lipschitz=0.5",),
        ("privacy.noise_multiplier=0", "privacy.epsilon=5", "privacy.budgets.a0=2", "privacy.allocation=late"),
        (*METHODS["sgd"], "local.steps=1", "sharing.weights=equal", "privacy.trust=distributed"),
    ],
    ids=[
        "quantile",
        "median",
        "one block",
        "one block of convolutions",
        "one block, scaled",
        "one block, written out",
        "derivatives",
        "certified",
        "noise of their own",
        "noise of all together",
    ],
)
def test_every_kind_of_mechanism(settings: tuple[str, ...]) -> None:
    assert_one_answer(*private_trainer(LARGER, *settings), ROUNDS, IN_CHUNKS)


def with_subjects(federation: Federation) -> Federation:
    """Somebody with five records, the others with one or two."""
    silos = []
    for silo in federation.silos:
        subject = 100 - torch.arange(len(silo)) // 2
        subject[-5:] = 7
        silos.append(replace(silo, train=replace(silo.train, subject=subject)))
    return replace(federation, silos=tuple(silos))


@pytest.mark.parametrize("name", ["+D", WRITTEN_OUT])
def test_subjects(name: str) -> None:
    federation = with_subjects(image_federation({"a0": 12, "b0": 27, "a1": 19}))
    overrides = ("privacy.unit=subject", "local.batch_size=3", *METHODS[name])
    assert_one_answer(*private_trainer(federation, *overrides), ((0, 1), (0, 1, 2)), IN_CHUNKS)


@pytest.mark.parametrize("unit", ["record", "subject"])
@pytest.mark.parametrize("clipping", ["quantile", "median"])
def test_no_batch_is_cut_short(unit: str, clipping: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of 5 rows for batches of 8 expected records, or 3 expected subjects."""
    monkeypatch.setattr(poisson_batches, "capacity", lambda *_: 5)
    size = {"record": 8, "subject": 3}[unit]
    settings = (f"privacy.unit={unit}", f"privacy.clipping={clipping}", f"local.batch_size={size}")
    trainer, start = private_trainer(with_subjects(LARGER), *settings, *METHODS["fedgan"])
    assert_one_answer(trainer, start, ROUNDS, IN_CHUNKS)


def test_chunks_and_windows_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fused.WINDOW_NUMBERS, "cpu", 1)
    trainer, start = private_trainer(LARGER, *METHODS["fedgan"])
    assert_one_answer(trainer, start, ROUNDS, FusedOptions(CPU, chunk=5, matrix_convolutions=False))


@pytest.mark.parametrize("name", ["+D", WRITTEN_OUT, "fedgan"])
def test_what_is_compiled_computes_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    trainer, start = private_trainer(LARGER, *METHODS[name])
    assert_one_answer(trainer, start, ROUNDS[:2], FusedOptions(CPU, chunk=3, compiled=True))


@dataclass(frozen=True)
class Looking:
    """An objective whose losses tell what its phase is shown."""

    inner: Objective

    @property
    def noise(self) -> Mapping[str, tuple[int, ...]]:
        return self.inner.noise

    def __call__(self, model: nn.Module, step: Step) -> Losses:
        losses, batch = self.inner(model, step), step.batch
        return replace(losses, total=losses.total + 9.0 * batch.x.flatten(1).mean(1) + batch.y + batch.group)


def test_a_phase_that_is_charged_nothing_is_shown_no_record_in_either_engine() -> None:
    trainer, start = private_trainer(MIXED, *METHODS["fedgan"])
    judge, make = trainer.method.phases
    looking = replace(trainer.method, phases=(judge, replace(make, objective=Looking(make.objective))))
    assert_one_answer(replace(trainer, method=looking), start, ((0, 1),), IN_CHUNKS)


@pytest.mark.parametrize("fault", ["noise", "bound", "scale"])
def test_planted_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No noise, a forgotten clip bound, or every silo with the first one's noise: the answers differ."""
    program, clipped = fused_private.PrivateProgram, fused_private.ClippedPhase
    if fault == "noise":
        monkeypatch.setattr(program, "draw", lambda *_: None)
    elif fault == "bound":
        call = clipped.__call__

        def generous(self: fused_private.ClippedPhase, *arguments: Any) -> Any:
            weights, batch, received, bound, share = arguments
            return call(self, weights, batch, received, 10 * bound, share)

        monkeypatch.setattr(clipped, "__call__", generous)
    else:
        load = program.load

        def alike(self: fused_private.PrivateProgram, *arguments: object) -> None:
            load(self, *arguments)  # type: ignore[arg-type]
            self._scales[1] = self._scales[1, 0].clone()

        monkeypatch.setattr(program, "load", alike)
    own = ("privacy.noise_multiplier=0", "privacy.epsilon=5", "privacy.budgets.b0=1")
    with pytest.raises(AssertionError):
        assert_one_answer(*private_trainer(LARGER, *own), ((0, 1),), IN_CHUNKS)


@pytest.mark.parametrize("name", ["+D", WRITTEN_OUT])
def test_a_record_whose_gradient_is_not_a_number_counts_for_nothing_in_either_engine(name: str) -> None:
    """Where gradients are factored, and where they are written out: each from its own record alone."""
    federation = federation_of([0] * 12, [1] * 12)
    federation.silos[1].train.x[3] = torch.nan
    trainer, start = private_trainer(federation, *METHODS[name])
    assert_one_answer(trainer, start, ((0, 1),), IN_CHUNKS)
    state, _, _ = rounds_of(FusedEngine(trainer, IN_CHUNKS), start, ((0, 1),))
    assert all(t.isfinite().all() for block in state.server.blocks.values() for t in block.values())


def test_the_ledger_does_not_depend_on_the_engine(tmp_path: Path) -> None:
    """Whole runs with budgets of their own: charged alike, spent alike, and the same where noise is the same."""
    budgets = ("privacy.noise_multiplier=0", "privacy.epsilon=5", "privacy.budgets.a0=2", "participation.rate=0.6")
    runs = {}
    for noise, engine in itertools.product(("secure", "test"), ("fused", "reference")):
        where = ("rounds=3", f"engine.name={engine}", "engine.device=cpu", f"privacy.noise={noise}")
        run = runs[noise, engine] = train(config_of(*PRIVATE, *budgets, *where), tmp_path / noise / engine, LARGER)
        assert run.folder.environment["engine_choice"]["name"] == engine
    accounts = {key: read_accounts(run.folder.ledger) for key, run in runs.items()}
    assert accounts["secure", "fused"] == accounts["secure", "reference"]
    assert {account.budget.epsilon for account in accounts["secure", "fused"]} == {2, 5}
    assert all(0 < account.spent <= account.budget.epsilon for account in accounts["secure", "fused"])
    assert accounts["test", "fused"] == accounts["test", "reference"]
    assert {account.spent for account in accounts["test", "fused"]} == {math.inf}
    for row, truth in zip(runs["test", "fused"].metrics(), runs["test", "reference"].metrics(), strict=True):
        assert row["participants"] == truth["participants"]
        assert row["train/vae/loss"] == pytest.approx(truth["train/vae/loss"], rel=1e-4)


def test_workers_do_not_change_a_private_run(tmp_path: Path) -> None:
    federation = federation_of([0] * 40, [1] * 50)
    keeping = ("privacy.clipping=quantile", "local.keep_optimizer=true", "sharing.scopes.encoder=silo")
    for workers in (1, 2):
        config = tiny_config(*PRIVATE, *keeping, f"engine.workers={workers}", "engine.name=reference")
        train(config, tmp_path / str(workers), federation)
    assert read_accounts(tmp_path / "1" / "ledger.sqlite") == read_accounts(tmp_path / "2" / "ledger.sqlite")
    assert_same_run(tmp_path / "1", tmp_path / "2")
