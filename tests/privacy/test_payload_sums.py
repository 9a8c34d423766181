"""Sums of bounded contributions: what one unit can change, and how much noise hides it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom.errors import ConfigError
from fedloom.federation.records import Batch, Records
from fedloom.privacy import payload_sums
from fedloom.privacy.noise import NoiseKey, SecureNoise, StreamNoise
from fedloom.privacy.payload_sums import BoundedSum, Query, SumNoise
from fedloom.streams import Streams

NOW = NoiseKey(0, 1, 0, "moments")
MODEL = nn.Identity()


def records_of(x: Tensor) -> Records:
    return Records(x, torch.zeros(len(x), dtype=torch.int64), torch.zeros(len(x), dtype=torch.int64))


def moments(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    return {"count": torch.ones(len(batch.x)), "sum": batch.x, "square": batch.x[:, :, None] * batch.x[:, None, :]}


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(((one[name] - other[name]) ** 2).sum()) for name in one))


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    count=st.integers(2, 40),
    scale=st.floats(1e-3, 1e6),
    bound=st.floats(0.01, 100),
    units=st.integers(0, 7),
    chunk=st.integers(1, 16),
)
def test_a_unit_less_moves_the_sum_by_at_most_the_bound(
    seed: int, count: int, scale: float, bound: float, units: int, chunk: int
) -> None:
    """Records, or subjects of several records; huge and not finite values; however the passes fall."""
    generator = torch.Generator().manual_seed(seed)
    x = scale * torch.randn(count, 3, generator=generator)
    x[0] = torch.tensor([math.nan, math.inf, 1.0]) if seed % 3 == 0 else x[0]
    unit = torch.arange(count) if units == 0 else torch.randint(0, units, (count,), generator=generator)
    _, unit = torch.unique(unit, return_inverse=True)
    stays = unit != unit[0]
    _, left = torch.unique(unit[stays], return_inverse=True)
    statistic = BoundedSum(moments, bound)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(payload_sums, "ROWS", chunk)
        whole = statistic.clipped(records_of(x), MODEL, None if units == 0 else unit)
        if not stays.any():
            assert distance(whole, {name: torch.zeros_like(t) for name, t in whole.items()}) <= bound * (1 + 1e-6)
            return
        less = statistic.clipped(records_of(x[stays]), MODEL, None if units == 0 else left)
    assert distance(whole, less) <= bound * (1 + 1e-6) + 1e-9


def test_without_clipping_of_the_whole_a_unit_could_move_it_by_more() -> None:
    """The bound is on all tensors and all records of a subject together."""
    x = torch.ones(4, 3)
    subject = torch.tensor([0, 0, 0, 1])
    statistic = BoundedSum(moments, 1.0)
    alone = statistic.clipped(records_of(x[3:]), MODEL, None)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in alone.items()}
    assert distance(statistic.clipped(records_of(x), MODEL, subject), alone) == pytest.approx(1.0)
    assert distance(statistic.clipped(records_of(x), MODEL, None), alone) == pytest.approx(3.0)  # three records
    assert distance(alone, zeros) == pytest.approx(1.0)


def test_passes_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, subject = torch.rand(50, 3), torch.arange(50) % 7
    statistic = BoundedSum(moments, 2.0)
    for unit in (None, subject):
        whole = statistic.clipped(records_of(x), MODEL, unit)
        monkeypatch.setattr(payload_sums, "ROWS", 9)
        assert distance(whole, statistic.clipped(records_of(x), MODEL, unit)) < 1e-5
        monkeypatch.undo()


@pytest.mark.parametrize("source", [StreamNoise(Streams(1)), SecureNoise()], ids=["streams", "secure"])
def test_the_noise_has_the_stated_width(source: StreamNoise | SecureNoise) -> None:
    """A sum of 40,000 numbers over no more than their own noise: a variance within 5 standard errors of sigma^2."""

    def nothing(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return {"sum": torch.zeros(len(batch.x), 40_000)}

    query = Query(records_of(torch.zeros(2, 1)), MODEL, Streams(0), NOW, SumNoise(3.0, None, source))
    sent = BoundedSum(nothing, 0.5).value(query)["sum"]
    assert sent.var().item() == pytest.approx(1.5**2, rel=5 * math.sqrt(2 / 40_000))


def test_payloads_have_noise_of_their_own() -> None:
    """Noise that another release of the same noise_key also got could be taken out by subtraction."""
    source = StreamNoise(Streams(1))
    draws = [source.normal(64, replace(NOW, use=use)) for use in ("", "moments", "counts")]
    for i in range(3):
        for j in range(i):
            assert abs(torch.corrcoef(torch.stack((draws[i], draws[j])))[0, 1].item()) < 0.5


@pytest.mark.parametrize("bound", [0.0, -1.0, math.inf, math.nan])
def test_a_bound_must_bound(bound: float) -> None:
    with pytest.raises(ConfigError, match="must be greater than 0 and finite"):
        BoundedSum(moments, bound)


def test_every_tensor_of_a_contribution_must_come_of_its_own_record() -> None:
    def second(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return {"count": torch.ones(len(batch.x)), "sum": batch.x - batch.x.mean(dim=0)}

    with pytest.raises(ConfigError, match="what a record contributes to 'sum' depends on the other records of its"):
        BoundedSum(second).check(records_of(torch.rand(6, 3)), MODEL)
