"""Tiny labelled images of two groups that share one class of three, and configurations for them."""

from __future__ import annotations

import torch

from fedloom.config import Config
from fedloom.federation.records import Federation, Records, Silo
from fedloom.settings import override, parse

GROUPS, CLASSES = ("day", "night"), ("left", "right", "top")
LEFT, RIGHT, TOP = range(3)
OF_GROUP = ((LEFT, RIGHT), (RIGHT, TOP))  # the classes that each has
BRIGHT = (0.9, 0.6)
SIDE = 8


def patterns() -> torch.Tensor:
    """The middle of each group and class: one half of the square is bright, less so at night."""
    x, half = torch.full((2, 3, 1, SIDE, SIDE), 0.1), SIDE // 2
    for group, bright in enumerate(BRIGHT):
        x[group, LEFT, :, :, :half] = bright
        x[group, RIGHT, :, :, half:] = bright
        x[group, TOP, :, :half] = bright
    return x


def pictures(group: int, count: int, seed: int, often: float = 0.75) -> Records:
    """Records of a group, ``often`` of its first class, every pixel a little off."""
    generator = torch.Generator().manual_seed(seed)
    first, second = OF_GROUP[group]
    y = torch.where(torch.arange(count) < round(often * count), first, second)
    noise = torch.rand(count, 1, SIDE, SIDE, generator=generator)
    x = patterns()[group][y] + 0.1 * (2 * noise - 1)
    return Records(x, y, torch.full((count,), group))


def picture_federation(count: int = 40) -> Federation:
    """Two silos of each group."""
    silos = tuple(
        Silo(f"{name}-{i}", pictures(group, count, 10 * group + i))
        for group, name in enumerate(GROUPS)
        for i in range(2)
    )
    tables = [pictures(group, 100, 90 + group, often=0.5) for group in range(2)]
    test = Records(*(torch.cat([getattr(t, name) for t in tables]) for name in ("x", "y", "group")))
    return Federation("pictures", silos, test, GROUPS, CLASSES)


def picture_config(method: str, *overrides: str) -> Config:
    """Small networks, the reference engine, a seed."""
    small = (
        "rounds=2",
        "model.hidden=[16]",
        "model.latent=2",
        "local.batch_size=20",
        "evaluation.metrics=[]",
        "evaluation.samples=20",
        "engine.name=reference",
        "engine.workers=1",
        "engine.threads=1",
    )
    return parse(Config, override({"method": {"name": method}}, [*small, *overrides]))


def nearest_class(x: torch.Tensor, group: int) -> torch.Tensor:
    """The class whose pattern is nearest: right about every real image."""
    return torch.cdist(x.flatten(1), patterns()[group].flatten(1)).argmin(dim=1)
