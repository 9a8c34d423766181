"""The seams hold: methods that later issues need can be written against the public parts alone."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedloom.engines.base import FederationState, Job, conclude, initial_state
from fedloom.engines.reference import ReferenceEngine
from fedloom.engines.training import Trainer
from fedloom.experiment import Experiment, Run, restored
from fedloom.federation.records import Federation
from fedloom.federation.rounds import RoundContext
from fedloom.methods.base import Method
from fedloom.methods.generator import Generator
from fedloom.runs.checkpoint import load_checkpoint
from fedloom.runs.folder import RunFolder
from fedloom.streams import Streams
from methods import probes
from support import assert_same_run, equal_bits, federation_of, logged, tiny_config

FEDERATION = federation_of([0] * 20, [1] * 37, [0, 1] * 5, width=probes.WIDTH)
CONTEXT = RoundContext(1, 3, (0, 1, 2))


def run(method: Method, out: Path, *overrides: str) -> Run:
    return Experiment(tiny_config("rounds=3", *overrides), FEDERATION, method).run(out)


def after_a_round(method: Method, federation: Federation = FEDERATION) -> tuple[FederationState, FederationState]:
    config = tiny_config()
    start = initial_state(method, federation, config)
    after, _ = ReferenceEngine(Trainer(config, method, federation)).round(Job(start, CONTEXT, lambda _: None))
    return start, after


def moved(before: FederationState, after: FederationState) -> set[str]:
    blocks = after.server.blocks
    return {key.block for key in blocks if not equal_bits(blocks[key], before.server.blocks[key])}


def finished(method: Method, out: Path) -> FederationState:
    assert [row["round"] for row in logged(out)["metrics"]] == [1, 2, 3], method.name
    return restored(load_checkpoint(out), FEDERATION)


def sample(method: Method, state: FederationState, group: str = "b") -> Tensor:
    return Generator(method, state.server, FEDERATION.groups).sample(5, group=group, seed=3)


class TestGAN:
    @pytest.mark.parametrize("phase", [0, 1])
    def test_a_phase_moves_its_own_block_alone(self, phase: int) -> None:
        method = probes.gan()
        alone = replace(method, phases=(method.phases[phase],))
        assert moved(*after_a_round(alone)) == set(method.phases[phase].trains)

    def test_both_phases_together_move_both_and_log_finite_losses(self, tmp_path: Path) -> None:
        method = probes.gan()
        run(method, tmp_path / "run")
        state = finished(method, tmp_path / "run")
        assert moved(initial_state(method, FEDERATION, tiny_config()), state) == {"generator", "discriminator"}
        for row in logged(tmp_path / "run")["metrics"]:
            losses = [row["train/discriminator/loss"], row["train/generator/loss"]]
            assert torch.isfinite(torch.tensor(losses)).all()
            assert all(loss > 0 for loss in losses)
        assert sample(method, state).shape == (5, probes.WIDTH)

    def test_each_phase_has_an_optimizer_of_its_own(self) -> None:
        _, after = after_a_round(probes.gan())
        kept = {name.split("/")[1] for silo in after.silos.values() for name in silo.tensors}
        assert kept == {"discriminator"}  # only its plan keeps the optimiser
        count = "optimizer/discriminator/discriminator.layers.0.bias/step"
        # 20, 37 and 10 records in batches of 16.
        assert [after.silos[silo].tensors[count].item() for silo in range(3)] == [2, 3, 1]


class TestPrivateEncoder:
    def test_encoders_never_leave_and_each_silos_persists(self, tmp_path: Path) -> None:
        method = probes.private_encoder()
        run(method, tmp_path / "run", "engine.keep_checkpoints=3")
        for row in logged(tmp_path / "run")["egress"]:
            assert list(row["blocks"]) == ["decoder@all"]
        checkpoints = [load_checkpoint(tmp_path / "run", number) for number in (1, 2, 3)]
        for checkpoint in checkpoints:
            assert {name.split("/")[1] for name in checkpoint.server} == {"decoder@all"}
            encoders = [silo["model/encoder.layers.0.weight"] for silo in checkpoint.silos.values()]
            assert len(encoders) == 3
            assert all(not torch.equal(one, other) for one, other in itertools.combinations(encoders, 2))
        assert not equal_bits(checkpoints[0].silos["silo-0"], checkpoints[1].silos["silo-0"])

    def test_a_silo_that_sits_out_keeps_its_encoder(self) -> None:
        method, config = probes.private_encoder(), tiny_config()
        engine = ReferenceEngine(Trainer(config, method, FEDERATION))
        _, first = after_a_round(method)
        second, _ = engine.round(Job(first, RoundContext(2, 3, (1,)), lambda _: None))
        assert equal_bits(second.silos[0].tensors, first.silos[0].tensors)
        assert not equal_bits(second.silos[1].tensors, first.silos[1].tensors)


class TestDistillation:
    def test_decoders_go_up_nothing_comes_down_and_the_student_learns(self, tmp_path: Path) -> None:
        method, config = probes.distillation(), tiny_config()
        start = initial_state(method, FEDERATION, config)
        assert start.server.blocks.keys() == {probes.STUDENT}
        tasks = ReferenceEngine(Trainer(config, method, FEDERATION)).tasks(start, CONTEXT)
        assert [task.received for task in tasks] == [{}, {}, {}]
        run(method, tmp_path / "run")
        for row in logged(tmp_path / "run")["egress"]:
            assert list(row["blocks"]) == [f"decoder@silo={row['silo']}"]
        state = finished(method, tmp_path / "run")
        assert moved(start, state) == {"student"}
        assert state.server.memory["seen"].item() == 9
        student = probes.decoder()
        student.load_state_dict(state.server.blocks[probes.STUDENT])
        noise = Streams(3).normal("sample/z", 5, probes.LATENT, silo=1)
        torch.testing.assert_close(sample(method, state), torch.sigmoid(student(noise)))

    def test_the_order_in_which_silos_arrive_does_not_matter(self) -> None:
        method, config = probes.distillation(), tiny_config()
        start = initial_state(method, FEDERATION, config)
        engine = ReferenceEngine(Trainer(config, method, FEDERATION))
        results = list(engine.train(engine.tasks(start, CONTEXT)))
        states = [
            conclude(method, start, CONTEXT, [results[i] for i in order], Streams(config.seed))[0]
            for order in itertools.permutations(range(3))
        ]
        for state in states[1:]:
            assert equal_bits(state.server.blocks[probes.STUDENT], states[0].server.blocks[probes.STUDENT])

    def test_the_server_does_not_step_in_a_round_without_participants(self) -> None:
        method, config = probes.distillation(), tiny_config()
        start = initial_state(method, FEDERATION, config)
        after, _ = conclude(method, start, RoundContext(1, 3, ()), [], Streams(config.seed))
        assert moved(start, after) == set()
        assert after.server.memory["seen"].item() == 0

    def test_two_workers_and_a_resumed_run_give_the_same_bits(self, tmp_path: Path) -> None:
        method = probes.distillation()
        run(method, tmp_path / "one")
        run(method, tmp_path / "two", "engine.workers=2")
        assert_same_run(tmp_path / "one", tmp_path / "two")
        checkpoints = tmp_path / "two" / "checkpoints" / "round-0003"
        for path in [*checkpoints.iterdir(), tmp_path / "two" / "status.json"]:
            path.unlink()
        checkpoints.rmdir()
        experiment = Experiment(tiny_config("rounds=3"), FEDERATION, method)
        experiment.resume(RunFolder.open(tmp_path / "two"))
        one, two = load_checkpoint(tmp_path / "one"), load_checkpoint(tmp_path / "two")
        assert equal_bits(one.server, two.server)
        assert logged(tmp_path / "one") == logged(tmp_path / "two")
