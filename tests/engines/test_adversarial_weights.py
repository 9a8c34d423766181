"""Whoever sets weights sets gradients: in either engine no record moves a sum by more than the clip bound."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engines.one_answer import CONVOLUTIONS, METHODS, PRIVATE, config_of, rounds_of, trainer_of
from fedloom.engines.base import Engine
from fedloom.engines.fused import FusedEngine, FusedOptions
from fedloom.engines.reference import ReferenceEngine
from fedloom.engines.training import Trainer
from fedloom.federation.records import Federation, Records, Silo
from fedloom.privacy import noise
from fedloom.privacy.dp_sgd import DPSGD, ClippedSum
from fedloom.sharing.update import DivergedError

RECORDS, EXPECTED, CLIP = 8, 7, 1e-3
Craft = Callable[[str, Tensor], Tensor]
ENGINES: dict[str, Callable[[Trainer], Engine]] = {
    "reference": ReferenceEngine,
    "fused": lambda trainer: FusedEngine(trainer, FusedOptions(torch.device("cpu"), chunk=2)),
}
MODELS = {
    "mlp": (),
    "convolutions, also transposed": METHODS["convolutions"],
    "group norm": METHODS["fedgan"],
    "written out": METHODS["fedprox"],
    "subjects": ("privacy.unit=subject", "privacy.clipping=quantile"),
}


def federation() -> Federation:
    """Two silos whose last record is as bright as can be."""
    x = torch.rand(2, RECORDS, 1, 9, 8, generator=torch.Generator().manual_seed(2))
    x[:, -1] = 1.0
    number, group = torch.arange(RECORDS), torch.zeros(RECORDS, dtype=torch.int64)
    silos = tuple(Silo(f"silo-{n}", Records(own, group, group, number)) for n, own in enumerate(x))
    return Federation("bright", silos, silos[0].train, ("a",))


def detecting(name: str, tensor: Tensor) -> Tensor:
    """What a layer gives for bright images is too much for the next one, and nothing for others."""
    return torch.full_like(tensor, -5e4 if name.endswith("bias") else 1e3)


def of_many_scales(seed: int) -> Craft:
    """Every tensor at one of the scales at which float32 loses numbers, or their squares, or their products."""

    def craft(name: str, tensor: Tensor) -> Tensor:
        exponent = random.Random(f"{seed}/{name}").choice((-40, -30, -23, -18, -9, -3, 0, 3, 9, 17, 18, 30, 36))
        return (tensor.double() * 10.0**exponent).clamp(-3e38, 3e38).float()

    return craft


CRAFTS: dict[str, Craft] = {
    "as they are": lambda _, tensor: tensor,
    "detecting": detecting,
    "zeros": lambda _, tensor: torch.zeros_like(tensor),
    **{f"times {scale:g}": lambda _, tensor, scale=scale: scale * tensor for scale in (1e-30, 1e-19, 1e6)},  # type: ignore[misc]
    **{f"of many scales, {seed}": of_many_scales(seed) for seed in range(8)},
}


def clipped_sums(engine: str, trainer: Trainer, craft: Craft, last: bool) -> list[dict[str, Tensor]]:
    """Those of a step of each silo, of all records or all but the ``last``; no noise is added, and nothing moved."""
    _, start = trainer_of(trainer.config, trainer.federation)
    blocks = {key: {n: craft(n, t) for n, t in part.items()} for key, part in start.server.blocks.items()}
    found: list[dict[str, Tensor]] = []
    toss = noise.coins

    def tossed(*arguments: object, **options: object) -> Tensor:
        coins = torch.zeros_like(toss(*arguments, **options))  # type: ignore[arg-type]
        coins[..., -1] = 0.0 if last else 1.0
        return coins

    def noted(_: DPSGD, total: ClippedSum, __: object, scale: object = None) -> tuple[Mapping[str, Tensor], Tensor]:
        stacked = {n: g if scale is not None else g.unsqueeze(0) for n, g in total.gradients.items()}
        silos = len(next(iter(stacked.values())))
        found.extend({n: EXPECTED * g[silo].double() for n, g in stacked.items()} for silo in range(silos))
        return {n: torch.zeros_like(g) for n, g in total.gradients.items()}, total.bound

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(DivergedError):  # of a phase without records
        patch.setattr(noise, "coins", tossed)
        patch.setattr(DPSGD, "release", noted)
        rounds_of(ENGINES[engine](trainer), replace(start, server=replace(start.server, blocks=blocks)), ((0, 1),))
    return found


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    return float(torch.linalg.vector_norm(torch.cat([(one[name] - other[name]).flatten() for name in one])))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model", MODELS)
def test_no_weights_let_a_record_move_a_sum_by_more_than_the_bound(model: str, engine: str) -> None:
    """Neighbours: with the last record of each silo and without, in which nothing else differs."""
    overrides = (*PRIVATE, f"privacy.clip={CLIP}", f"local.batch_size={EXPECTED}", "local.steps=1", CONVOLUTIONS)
    trainer, _ = trainer_of(config_of(*overrides, *MODELS[model]), federation())
    moved: dict[str, list[float]] = {}
    for name, craft in CRAFTS.items():
        pairs = zip(*(clipped_sums(engine, trainer, craft, last) for last in (True, False)), strict=True)
        moved[name] = [distance(with_it, without) for with_it, without in pairs]
        assert len(moved[name]) == 2
        assert max(moved[name]) <= CLIP * (1 + 1e-4), name
    assert min(moved["as they are"]) == pytest.approx(CLIP, rel=1e-3), (
        "a record that matters moves the sum by all of it"
    )
