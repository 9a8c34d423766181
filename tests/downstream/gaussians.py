"""Normal classes about the axes, divided among silos that each know some classes better than others."""

from __future__ import annotations

import torch

from fedloom.config import Config
from fedloom.federation.records import Federation, Records, Silo
from fedloom.settings import override, parse

WIDTH, CLASSES = 6, ("ant", "bee", "cat")
# What a VAE takes whose vectors are not between 0 and 1.
ANY_VECTORS = ("model.posterior=closed-form", "model.likelihood=gaussian", "model.hidden=[]")


def records(seed: int, *counts: int) -> Records:
    """So many of each class, in random order; unit vectors."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    y = y[torch.randperm(len(y), generator=generator)]
    x = torch.eye(max(3, len(counts)), WIDTH)[y] + 0.35 * torch.randn(len(y), WIDTH, generator=generator)
    return Records(x / x.norm(dim=1, keepdim=True), y, torch.zeros(len(y), dtype=torch.int64))


def lopsided(validation: bool = True) -> Federation:
    """Three silos, each without one class, or nearly so."""
    counts = ((30, 28, 2), (2, 30, 28), (28, 0, 30))
    silos = tuple(
        Silo(f"silo-{i}", records(i, *each), records(50 + i, *(count // 2 for count in each)) if validation else None)
        for i, each in enumerate(counts)
    )
    return Federation("gaussians", silos, records(99, 100, 100, 100), ("all",), CLASSES)


def config(method: str, *overrides: str) -> Config:
    small = (
        "rounds=1",
        "model.hidden=[8]",
        "model.latent=3",
        "local.batch_size=20",
        "evaluation.metrics=[]",
        "evaluation.samples=300",
        "engine.name=reference",
        "engine.workers=1",
        "engine.threads=1",
    )
    fitting = ANY_VECTORS if method == "fedvae" else ()
    return parse(Config, override({"method": {"name": method}}, [*small, *fitting, *overrides]))
