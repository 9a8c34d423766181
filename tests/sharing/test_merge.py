from __future__ import annotations

import pytest
import torch

from fedloom.engines.fused_merge import StackedMean
from fedloom.federation.rounds import RoundContext, Site
from fedloom.methods.steps import Merged, ServerState
from fedloom.sharing.aggregation import Aggregator, Weighting
from fedloom.sharing.plan import GLOBAL, GROUP, UPLOAD, BlockKey, SharingPlan, Tensors
from fedloom.sharing.update import Update
from fedloom.streams import Streams
from support import round_of

PLAN = SharingPlan({"encoder": GLOBAL, "decoder": GROUP, "critic": UPLOAD}, ("a", "b", "c"))
ENCODER = BlockKey("encoder", "all")


def decoder(group: str) -> BlockKey:
    return BlockKey("decoder", f"group={group}")


def update(silo: str, value: float, **records: int) -> Update:
    """An update whose tensors all hold ``value``, from a silo with so many records of each group."""
    blocks = {key: {"w": torch.full((2,), float(value))} for key in [ENCODER, *map(decoder, records)]}
    blocks[BlockKey("critic", f"silo={silo}")] = {"w": torch.full((2,), float(value))}
    weights = {"all": float(sum(records.values()))} | {f"group={g}": float(n) for g, n in records.items()}
    return Update(silo, 1, blocks, weights)


def merged(updates: list[Update], weighting: Weighting = "size") -> dict[BlockKey, list[float]]:
    return {key: tensors["w"].tolist() for key, tensors in merge(updates, PLAN, weighting).items()}


def merge(updates: list[Update], plan: SharingPlan, weighting: Weighting) -> dict[BlockKey, Tensors]:
    return Aggregator(weighting=weighting).merged(updates, plan, {})


def test_merge_by_size_inside_each_scope() -> None:
    """Silos with 10 and 30 records of a, 60 of b, holding 1, 2 and 4.

    GLOBAL: (10 * 1 + 30 * 2 + 60 * 4) / 100 = 3.1. GROUP a: (10 * 1 + 30 * 2) / 40 = 1.75. GROUP b: 4. Nobody holds
    c, and what is uploaded is not averaged.
    """
    found = merged([update("1", 1, a=10), update("2", 2, a=30), update("3", 4, b=60)])
    expected = {ENCODER: 3.1, decoder("a"): 1.75, decoder("b"): 4.0}
    assert found == {key: [pytest.approx(value)] * 2 for key, value in expected.items()}


def test_equal_groups_gives_every_group_present_the_same_weight() -> None:
    """The same silos: a counts 1/2 in shares 10/40 and 30/40, b counts 1/2.

    GLOBAL: ((10/40) * 1 + (30/40) * 2 + 1 * 4) / 2 = (0.25 + 1.5 + 4) / 2 = 2.875; inside groups sizes still count.
    """
    found = merged([update("1", 1, a=10), update("2", 2, a=30), update("3", 4, b=60)], "equal-groups")
    expected = {ENCODER: 2.875, decoder("a"): 1.75, decoder("b"): 4.0}
    assert found == {key: [pytest.approx(value)] * 2 for key, value in expected.items()}


@pytest.mark.parametrize(
    ("weighting", "encoder"),
    # By size: (20 * 1 + 60 * 2) / 80 = 1.75. Equal groups: silo 1 has 5/15 of a and 15/65 of b, 22/39 in all, silo 2
    # the rest of 2, 56/39: (22/39 * 1 + 56/39 * 2) / 2 = 67/39.
    [("size", 1.75), ("equal-groups", 67 / 39)],
)
def test_a_silo_of_two_groups_counts_in_each_branch_by_its_records_there(weighting: Weighting, encoder: float) -> None:
    """Group a: (5 * 1 + 10 * 2) / 15 = 5/3. Group b: (15 * 1 + 50 * 2) / 65 = 23/13."""
    found = merged([update("1", 1, a=5, b=15), update("2", 2, a=10, b=50)], weighting)
    expected = {ENCODER: encoder, decoder("a"): 5 / 3, decoder("b"): 23 / 13}
    assert found == {key: [pytest.approx(value)] * 2 for key, value in expected.items()}


def test_sums_are_taken_in_float64() -> None:
    """2^24 + 1 - 2^24 loses the 1 in float32; the mean of the three is exactly 1/3."""
    found = merged([update("1", 2.0**24, a=1), update("2", 1.0, a=1), update("3", -(2.0**24), a=1)])
    assert found[ENCODER] == [torch.tensor(1 / 3).item()] * 2
    assert merge([update("1", 1.0, a=1)], PLAN, "size")[ENCODER]["w"].dtype is torch.float32


def counting(silo: str, count: int, weight: float) -> Update:
    """Its encoder counts something, and says whether it has."""
    encoder = {"count": torch.tensor([count, -count]), "has": torch.tensor(count > 0)}
    return Update(silo, 1, {ENCODER: encoder}, {"all": weight})


@pytest.mark.parametrize(
    ("updates", "mean"),
    [
        ([counting("1", 5, 1), counting("2", 6, 3)], 6),  # 5.75
        ([counting("1", 5, 3), counting("2", 6, 1)], 5),  # 5.25
        ([counting("1", 0, 1), counting("2", 7, 2), counting("3", 7, 2)], 6),  # 5.6
        ([counting(str(silo), 20, 0.1 * silo) for silo in (1, 2, 3)], 20),  # 19.999999999999996
    ],
)
def test_the_mean_of_whole_numbers_is_the_nearest_in_every_engine(updates: list[Update], mean: int) -> None:
    plan = SharingPlan({"encoder": GLOBAL}, ("a",))
    plain, stacked = merge(updates, plan, "size")[ENCODER], StackedMean(plan, Aggregator(), {})
    for chunk in (updates[:1], updates[1:]):
        tensors = [update.blocks[ENCODER] for update in chunk]
        weights = {f"encoder.{name}": torch.stack([each[name] for each in tensors]) for name in ("count", "has")}
        stacked.take(stacked.sums(weights, range(len(chunk)), [Site(update.silo, (0,)) for update in chunk], chunk))
    for found in (plain, stacked.result({ENCODER: updates[0].blocks[ENCODER]})[ENCODER]):
        assert found["count"].dtype is torch.int64
        assert found["count"].tolist() == [mean, -mean]
        assert found["has"].tolist() is True


def test_a_group_without_participants_keeps_its_branch() -> None:
    before = {decoder("c"): {"w": torch.tensor([7.0, 8.0])}, ENCODER: {"w": torch.zeros(2)}}
    memory = {"steps": torch.tensor(3)}
    sent = [update("1", 1, a=10)]
    server = Merged()(round_of(ServerState(before, memory), sent, RoundContext(1, 1, (0,)), Streams(0), PLAN)).state
    assert server.blocks[decoder("c")]["w"].tolist() == [7, 8]
    assert server.blocks[ENCODER]["w"].tolist() == [1, 1]
    assert server.memory == memory
    assert before[ENCODER]["w"].tolist() == [0, 0]


def test_merging_leaves_the_updates_as_they_were() -> None:
    updates = [update("1", 1, a=1), update("2", 3, a=1)]
    merge(updates, PLAN, "size")
    assert [u.blocks[ENCODER]["w"].tolist() for u in updates] == [[1, 1], [3, 3]]
