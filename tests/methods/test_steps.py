"""Server steps as values: one after the other, each with what it needs."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from engines.one_answer import DISTIL, FISSION, UNEQUAL, config_of, rounds_of, trainer_of
from fedloom.engines.fused import FusedEngine, FusedOptions
from fedloom.federation.rounds import RoundContext
from fedloom.methods.steps import Merged, ServerRound, ServerState, ServerStep, Stepped, Steps
from fedloom.sharing.plan import GLOBAL, BlockKey, SharingPlan
from fedloom.sharing.update import Update
from fedloom.streams import Streams
from support import round_of

KEY, PLAN = BlockKey("body", "all"), SharingPlan({"body": GLOBAL}, ("a",))
STREAMS = Streams(0)


@dataclass(frozen=True)
class Times(ServerStep):
    """Multiplies what it finds, and remembers what the round found."""

    factor: float

    def initial(self, _: Streams, /) -> ServerState:
        return ServerState({BlockKey("own", "server"): {}}, {f"times {self.factor}": torch.zeros(())})

    def __call__(self, round: ServerRound) -> Stepped:
        found = self.factor * round.state.blocks[KEY]["w"]
        memory = {**round.state.memory, f"times {self.factor}": round.before.blocks[KEY]["w"]}
        return Stepped(ServerState({KEY: {"w": found}}, memory), terms={f"x{self.factor}": found.item()})


def start(value: float) -> ServerState:
    return ServerState({KEY: {"w": torch.tensor(value)}})


def test_each_step_goes_on_from_the_one_before() -> None:
    """Silos of 10 and 30 records send 2 and 6: 5 by size, times 3, times -2; the round began at 7."""
    updates = [
        Update(f"s{n}", 1, {KEY: {"w": torch.tensor(value)}}, {"all": n}) for n, value in ((10.0, 2.0), (30.0, 6.0))
    ]
    steps = Steps((Merged(), Steps((Times(3.0), Times(-2.0)))))
    found = steps(round_of(start(7.0), updates, RoundContext(1, 1, (0, 1)), STREAMS, PLAN))
    assert found.state.blocks[KEY]["w"].item() == -30
    assert {name: tensor.item() for name, tensor in found.state.memory.items()} == {"times 3.0": 7.0, "times -2.0": 7.0}
    assert found.terms == {"x3.0": 15.0, "x-2.0": -30.0}
    assert found.distillation is None
    assert steps.initial(STREAMS).memory.keys() == {"times 3.0", "times -2.0"}


@pytest.mark.parametrize(
    ("overrides", "needs_each"),
    [
        ((FISSION, "server.step=mean+distil"), False),
        (("method.name=fedvae", "server.step=mean+distil", "server.teachers=silos"), True),
        (("method.name=align_fl",), True),
        (("method.name=fedvae",), False),
        (("method.name=fedvae", "server.merge.name=norm-bound"), True),
    ],
)
def test_copies_leave_the_device_only_where_somebody_looks_at_them(
    overrides: tuple[str, ...], needs_each: bool
) -> None:
    trainer, state = trainer_of(config_of(*overrides, *DISTIL), UNEQUAL)
    engine = FusedEngine(trainer, FusedOptions(torch.device("cpu"), chunk=3))
    _, _, results = rounds_of(engine, state, ((0, 1, 2, 3, 4),))
    assert [bool(result.update.blocks) for result in results] == [needs_each] * 5
