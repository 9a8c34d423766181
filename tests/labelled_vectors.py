"""A tiny federation of labelled vectors, and configurations for it."""

from __future__ import annotations

import torch

from fedloom.config import Config
from fedloom.federation.records import Federation, Records, Silo
from fedloom.settings import override, parse

CLASSES = ("ant", "bee", "cat")


def vectors(seed: int, count: int = 40) -> Records:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (count,), generator=generator)
    x = torch.eye(3, 6)[y] + 0.25 * torch.randn(count, 6, generator=generator)
    return Records(x / x.norm(dim=1, keepdim=True), y, torch.zeros(count, dtype=torch.int64))


def labelled_federation() -> Federation:
    return Federation("vectors", (Silo("one", vectors(1)), Silo("two", vectors(2))), vectors(3), ("all",), CLASSES)


def labelled_config(method: str, *overrides: str) -> Config:
    small = (
        "rounds=3",
        "model.hidden=[8]",
        "model.latent=3",
        "local.batch_size=20",
        "local.steps=2",
        "evaluation.metrics=[]",
        "engine.name=reference",
        "engine.workers=1",
        "engine.threads=1",
    )
    return parse(Config, override({"method": {"name": method}}, [*small, *overrides]))
