"""A second task from the same synthetic records: finding records of the same class by likeness."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

NEAREST = 10
QUERIES, GALLERY = 1000, 5000  # at most


def precision(queries: Tensor, wanted: Tensor, gallery: Tensor, labels: Tensor) -> float:
    """Of the ten records of a gallery with the smallest angle to a query, the share of the query's class."""
    queries, wanted, gallery, labels = queries[:QUERIES], wanted[:QUERIES], gallery[:GALLERY], labels[:GALLERY]
    likeness = functional.normalize(queries.double()) @ functional.normalize(gallery.double()).T
    nearest = likeness.topk(min(NEAREST, len(gallery)), dim=1).indices
    return (labels[nearest] == wanted[:, None]).to(torch.float64).mean().item()
