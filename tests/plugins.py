"""Packages that bring plug-ins, as an installer would leave them in a folder on the import path."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

# A method of one line, and a prior.
LOOMS = """\
from dataclasses import dataclass

import torch

from fedloom.methods.base import Recipe
from fedloom.methods.vaes import flat_vae_method
from fedloom.models.priors import Prior
from fedloom.sharing.plan import GLOBAL, SILO


@dataclass(frozen=True, kw_only=True)
class Options:
    prior: str = "identical"


def make(setting, options):
    return flat_vae_method("shuttle", setting, encoder=GLOBAL, decoder=SILO)


RECIPE = Recipe("shuttle", "every silo its own decoder", Options, make)
THREES = Prior("3 everywhere", lambda groups, latent, streams: torch.full((groups, latent), 3.0))
"""
LOOMS_POINTS = {"fedloom.methods": {"shuttle": "RECIPE"}, "fedloom.priors": {"threes": "THREES"}}


def install(folder: Path, package: str, version: str, source: str, points: Mapping[str, Mapping[str, str]]) -> None:
    """A package of one module, with entry points: group -> name -> value of the module."""
    module = package.replace("-", "_")
    (folder / f"{module}.py").write_text(source, encoding="utf-8")
    info = folder / f"{module}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n", encoding="utf-8")
    (info / "top_level.txt").write_text(f"{module}\n", encoding="utf-8")
    lines = [
        line
        for group, values in points.items()
        for line in (f"[{group}]", *(f"{name} = {module}:{value}" for name, value in values.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
