from __future__ import annotations

from dataclasses import fields, replace

import torch

from fedloom.federation.records import Batch
from fedloom.objectives.lending import batch_of_columns, columns_of

BATCH = Batch(
    x=torch.rand(3, 2),
    y=torch.tensor([2, 0, 1]),
    group=torch.tensor([0, 1, 0]),
    mask=torch.tensor([1.0, 1.0, 0.0]),
    subject=torch.tensor([7, 7, 4]),
    attributes=torch.rand(3, 2),
)


def test_a_batch_comes_back_from_its_columns_whole() -> None:
    for batch in (BATCH, replace(BATCH, subject=None), replace(BATCH, attributes=None)):
        found = batch_of_columns(columns_of(batch))
        for field in fields(Batch):
            assert getattr(found, field.name) is getattr(batch, field.name)
