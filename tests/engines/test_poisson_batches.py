"""Whom the coins choose and what noise comes with them, against draws by hand.

Both engines take their batches from the same functions, so that to compare them would say nothing of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engines.one_answer import CONVOLUTIONS, LARGER, PRIVATE, config_of, trainer_of
from fedloom.engines import poisson_batches
from fedloom.engines.base import SiloState, Task
from fedloom.engines.batches import Window
from fedloom.engines.fused_private import PrivateProgram, probed
from fedloom.engines.fused_stack import stacks_of
from fedloom.engines.fused_support import tried
from fedloom.engines.poisson_batches import NOISE
from fedloom.engines.private_training import PrivateTraining
from fedloom.engines.training import Trainer
from fedloom.federation.records import Federation
from fedloom.federation.rounds import RoundContext
from fedloom.methods.base import Phase
from fedloom.privacy.noise import NoiseKey, StreamNoise
from fedloom.privacy.sampling import poisson_sample
from fedloom.sharing.codec import under
from fedloom.streams import Streams

ROUND, ROWS = 3, 5  # of a pass
SILOS = (1, 2, 0)  # in descending order of their steps
SECRETS = {silo: StreamNoise(Streams(1000 + silo)) for silo in SILOS}


def with_subjects(federation: Federation) -> Federation:
    """Somebody with five records, the others with one or two, in no order."""
    silos = []
    for silo in federation.silos:
        subject = (100 - torch.arange(len(silo)) // 2) * 7 % 101
        subject[-5:] = 7
        silos.append(replace(silo, train=replace(silo.train, subject=subject)))
    return replace(federation, silos=tuple(silos))


def trainer_for(unit: str) -> Trainer:
    """Two phases that touch records, and one that does not."""
    size = {"record": 8, "subject": 3}[unit]
    own = ("method.name=fedgan", CONVOLUTIONS, f"privacy.unit={unit}", f"local.batch_size={size}", "rounds=4")
    trainer, _ = trainer_of(config_of(*PRIVATE, *own), with_subjects(LARGER))
    judge, make = trainer.method.phases
    return replace(trainer, method=replace(trainer.method, phases=(judge, make, replace(judge, name="again"))))


def in_a_stack(trainer: Trainer) -> tuple[list[Window], list[int]]:
    """The windows of three silos that train together, and where the records of each begin."""
    (stack,) = stacks_of((trainer,), torch.device("cpu"))
    members = [stack.members[silo] for silo in SILOS]
    probes = [probed(stack, phase) for phase in stack.kind.phases]
    program = PrivateProgram(stack, len(members), tried(stack), "float32", False, probes, host_noise=True)
    program.begin(RoundContext(ROUND, 9, SILOS), [SECRETS[silo] for silo in SILOS])
    return list(program.schedule(members).windows(3)), stack.table.load([member.silo for member in members])


def alone(trainer: Trainer, silo: int) -> list[Window]:
    """The windows of a silo in the plain loop."""
    owner, mechanism = trainer.federation.silos[silo], trainer.privacy[silo].mechanism(ROUND)
    task = Task(silo, RoundContext(ROUND, 9, (silo,)), {}, SiloState())
    size = trainer.config.local.batch_size
    training = PrivateTraining(mechanism, owner, task, trainer.streams, SECRETS[silo], size, {}, trainer.made_up(silo))
    return list(training._batches(trainer.method.phases, trainer.steps(silo)).windows(3))


def by_hand(trainer: Trainer, silo: int, moment: int) -> list[int]:
    """The records of everybody whom the coins of a moment choose."""
    plan, subject = trainer.privacy[silo], trainer.federation.silos[silo].train.subject
    chosen = poisson_sample(SECRETS[silo], plan.units, plan.rate, NoiseKey(silo, ROUND, moment)).tolist()
    if plan.settings.unit == "record":
        return chosen
    assert subject is not None
    names = sorted(set(subject.tolist()))
    return [record for number in chosen for record, name in enumerate(subject.tolist()) if name == names[number]]


def noise_by_hand(streams: Streams, phase: Phase, rows: int, silo: int, step: int) -> dict[str, Tensor]:
    """The rows of an example's noise, one after the other."""
    return {
        name: streams.normal(f"noise/{phase.name}/{name}", rows, *shape, silo=silo, round=ROUND, step=step)
        for name, shape in phase.objective.noise.items()
    }


def check(trainer: Trainer, silo: int, windows: Sequence[Window], place: int, offset: int) -> list[int]:
    """A silo's batches and their noise, step by step; how many passes its first phase made in each step."""
    size, made, step = trainer.config.local.batch_size, [], 0
    for window in windows:
        for number in range(len(window) if window.silos > place else 0):
            private = 0
            for phase, passes in zip(trainer.method.phases, window.step(number), strict=True):
                if not phase.touches_records:
                    (only,) = passes
                    wanted = noise_by_hand(trainer.streams, phase, size, silo, step)
                    assert wanted
                    assert all(torch.equal(under(NOISE, only)[name][place], rows) for name, rows in wanted.items())
                    continue
                real = [each["mask"][place] > 0 for each in passes]
                found = torch.cat([each["index"][place][rows] for each, rows in zip(passes, real, strict=True)])
                records = by_hand(trainer, silo, 2 * step + private)
                assert found.tolist() == [offset + record for record in records]
                assert all(rows.sum() <= ROWS for rows in real)
                for name, wanted_rows in noise_by_hand(
                    SECRETS[silo].streams, phase, len(records) + 1, silo, step
                ).items():
                    drawn = [each[NOISE + name][place][rows] for each, rows in zip(passes, real, strict=True)]
                    assert torch.equal(torch.cat(drawn), wanted_rows[: len(records)])
                made += [len(passes)] if private == 0 else []
                private += 1
            step += 1
    assert step == trainer.steps(silo)
    return made


@pytest.mark.parametrize("unit", ["record", "subject"])
def test_everybody_whom_the_coins_choose_comes_once_with_noise_of_their_own(
    unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every phase that touches records has coins of its own, and they and their noise come from the secret alone."""
    monkeypatch.setattr(poisson_batches, "capacity", lambda *_: ROWS)
    trainer = trainer_for(unit)
    windows, offsets = in_a_stack(trainer)
    assert len(set(offsets)) == len(SILOS)
    assert {window.silos for window in windows} == {1, 2, 3}
    assert {window.usual for window in windows} == {True, False}
    for place, (silo, offset) in enumerate(zip(SILOS, offsets, strict=True)):
        for found, where, first in ((windows, place, offset), (alone(trainer, silo), 0, 0)):
            assert max(check(trainer, silo, found, where, first)) > 1
