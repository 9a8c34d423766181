"""How far an update may move, whatever its tensors hold."""

from __future__ import annotations

import torch

from fedloom.engines.remote.inspection import outliers
from fedloom.sharing.plan import BlockKey
from fedloom.sharing.update import Update

ENCODER = BlockKey("encoder", "all")
KNOWN = {ENCODER: {"w": torch.zeros(2), "count": torch.tensor(7), "mask": torch.tensor([True, False])}}


def moved(silo: str, w: float, count: int, *mask: bool) -> Update:
    tensors = {"w": torch.tensor([w, 0.0]), "count": torch.tensor(7 + count), "mask": torch.tensor(mask)}
    return Update(silo, 1, {ENCODER: tensors}, {"all": 1.0})


def test_moves_of_counters_and_masks_count_as_well() -> None:
    """Others move by 2. Two flips of a mask make that sqrt(4 + 2), 1.22 times as far; 4 by weight, 4 by count and two
    flips are sqrt(16 + 16 + 2) = 5.83.
    """
    usual = [moved(silo, 2.0, 0, True, False) for silo in "abc"]
    assert outliers([*usual, moved("d", 2.0, 0, False, True)], KNOWN, 1.3) == {}
    assert set(outliers([*usual, moved("d", 2.0, 0, False, True)], KNOWN, 1.2)) == {"d"}
    found = outliers([*usual, moved("d", 4.0, -4, False, True)], KNOWN, 2.0)
    assert found == {"d": "silo 'd' sent an update of 'encoder@all' with norm 5.83, more than 2 times the others' 2"}
