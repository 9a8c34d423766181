"""fedloom: federated generative modelling. Silos learn generators together; their data stay at home."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

# Spinning OpenMP barriers make small models many times slower on shared cores; torch reads this when it is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"

_HOMES = {
    "Config": "fedloom.config",
    "load_config": "fedloom.config",
    "FedloomError": "fedloom.errors",
    "Federation": "fedloom.federation.records",
    "Streams": "fedloom.streams",
    "build_federation": "fedloom.federation.building",
    "federation_from_arrays": "fedloom.federation.building",
    "Experiment": "fedloom.experiment",
    "Run": "fedloom.experiment",
    "estimate": "fedloom.experiment",
    "train": "fedloom.experiment",
    "resume": "fedloom.experiment",
    "load": "fedloom.experiment",
    "load_generators": "fedloom.release.export",
}

__all__ = [
    "Config",
    "Experiment",
    "Federation",
    "FedloomError",
    "Run",
    "Streams",
    "build_federation",
    "estimate",
    "federation_from_arrays",
    "load",
    "load_config",
    "load_generators",
    "resume",
    "train",
]

if TYPE_CHECKING:
    from fedloom.config import Config, load_config
    from fedloom.errors import FedloomError
    from fedloom.experiment import Experiment, Run, estimate, load, resume, train
    from fedloom.federation.building import build_federation, federation_from_arrays
    from fedloom.federation.records import Federation
    from fedloom.release.export import load_generators
    from fedloom.streams import Streams


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that ``import fedloom`` does not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'fedloom' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
