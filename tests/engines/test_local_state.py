"""How a silo's round begins and what is kept of it. Both engines share it: to compare them would say nothing of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engines.one_answer import LARGER, PRIVATE, Rounds, config_of, rounds_of, trainer_of
from engines.pure_noise import Flat
from fedloom.engines.base import FederationState, SiloState
from fedloom.engines.fused import FusedEngine, FusedOptions
from fedloom.engines.local_state import BOUND, MODEL, LocalState
from fedloom.engines.reference import ReferenceEngine
from fedloom.engines.training import Trainer
from fedloom.methods.base import OptimizerRule, Phase
from fedloom.privacy.clipping import Clipping, Fixed, Quantile
from fedloom.privacy.dp_sgd import DPSGD

Engine = Callable[[Trainer], ReferenceEngine | FusedEngine]
ENGINES: dict[str, Engine] = {
    "reference": ReferenceEngine,
    "fused": lambda trainer: FusedEngine(trainer, FusedOptions(torch.device("cpu"))),
}
EVERYBODY = (0, 1, 2, 3, 4)
SEARCHED, START = f"{BOUND}vae", torch.tensor(2.0)  # PRIVATE's bound


@pytest.mark.parametrize("engine", ENGINES)
def test_a_bound_that_is_searched_for_goes_on_from_where_the_last_round_left_it(engine: str) -> None:
    trainer, start = trainer_of(config_of(*PRIVATE, "privacy.clipping=quantile", "rounds=4"), LARGER)

    def following(state: FederationState, rounds: Rounds) -> FederationState:
        return rounds_of(ENGINES[engine](trainer), state, rounds)[0]

    first = following(start, (EVERYBODY,))
    found = {silo: state.tensors[SEARCHED] for silo, state in first.silos.items()}
    assert found.keys() == set(EVERYBODY)
    assert len({bound.item() for bound in (START, *found.values())}) == 1 + len(EVERYBODY)
    forgetful = FederationState(1, first.server, {**first.silos, 3: SiloState({SEARCHED: START})})
    wanted, other = (following(state, (EVERYBODY,)) for state in (first, forgetful))
    bounds = [{silo: state.tensors[SEARCHED].item() for silo, state in each.silos.items()} for each in (wanted, other)]
    assert {silo for silo in EVERYBODY if bounds[0][silo] != bounds[1][silo]} == {3}


@pytest.mark.parametrize(("clipping", "kept"), [(Quantile(initial=3.0), [BOUND + "own"]), (Fixed(3.0), [])])
def test_bounds_are_each_silos_own_and_kept_where_they_are_searched_for(clipping: Clipping, kept: list[str]) -> None:
    """Only phases that touch records have one."""

    rule = OptimizerRule("sgd")
    phases = [
        Phase(name, (), Flat("block", behind=False), rule, touches_records=name == "own") for name in ("own", "public")
    ]
    weights = {"block.weight": torch.zeros(3, 2)}
    mechanism = DPSGD(1.0, 0.5, 4.0, clipping)
    state = LocalState(phases, weights, [weights, weights], weights, mechanism)
    state.load_bounds([{}, {BOUND + "own": torch.tensor(7.0)}], [mechanism] * 2)
    assert {phase: bounds.tolist() for phase, bounds in state.bounds.items()} == {"own": [3.0, 7.0, 0.0]}
    found = [each.tensors for each in state.kept(2)]
    assert [list(each) for each in found] == [kept] * 2
    assert [each[name].item() for name in kept for each in found] == [3.0, 7.0][: 2 * len(kept)]


@pytest.mark.parametrize("engine", ENGINES)
def test_what_a_silo_kept_wins_over_fresh_weights_also_where_it_kept_only_a_part(engine: str) -> None:
    """As after a round in which another block of its own did not exist yet."""
    private = ("sharing.scopes.encoder=silo", "sharing.scopes.decoder=silo")
    trainer, start = trainer_of(config_of(*private, "local.optimizer=sgd", "local.learning_rate=1e-30"), LARGER)
    fresh = rounds_of(ENGINES[engine](trainer), start, ((2,),))[0].silos[2].tensors
    name = next(each for each in fresh if each.startswith(f"{MODEL}encoder."))
    part = FederationState(0, start.server, {**start.silos, 2: SiloState({name: fresh[name] + 1})})
    after = rounds_of(ENGINES[engine](trainer), part, ((2,),))[0].silos[2].tensors
    assert after.keys() == fresh.keys()
    wanted = {each: fresh[each] + (each == name) for each in fresh}
    assert all(torch.equal(after[each], wanted[each]) for each in fresh)
