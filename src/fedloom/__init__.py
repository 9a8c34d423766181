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
    "FederationOnDemand": "fedloom.federation.on_demand",
    "SilosOnDemand": "fedloom.federation.on_demand",
    "Streams": "fedloom.streams",
    "build_federation": "fedloom.federation.building",
    "federation_from_arrays": "fedloom.federation.building",
    "Network": "fedloom.models.networks",
    "PlainMethod": "fedloom.methods.plain",
    "Experiment": "fedloom.experiment",
    "Observer": "fedloom.experiment",
    "Run": "fedloom.experiment",
    "estimate": "fedloom.experiment",
    "train": "fedloom.experiment",
    "resume": "fedloom.experiment",
    "load": "fedloom.experiment",
    "evaluate": "fedloom.workflow",
    "audit_run": "fedloom.workflow",
    "embed": "fedloom.workflow",
    "synthesize": "fedloom.workflow",
    "certify": "fedloom.workflow",
    "report": "fedloom.workflow",
    "run_sweep": "fedloom.workflow",
    "load_generators": "fedloom.release.export",
}

__all__ = [
    "Config",
    "Experiment",
    "Federation",
    "FederationOnDemand",
    "FedloomError",
    "Network",
    "Observer",
    "PlainMethod",
    "Run",
    "SilosOnDemand",
    "Streams",
    "audit_run",
    "build_federation",
    "certify",
    "embed",
    "estimate",
    "evaluate",
    "federation_from_arrays",
    "load",
    "load_config",
    "load_generators",
    "report",
    "resume",
    "run_sweep",
    "synthesize",
    "train",
]

if TYPE_CHECKING:
    from fedloom.config import Config, load_config
    from fedloom.errors import FedloomError
    from fedloom.experiment import Experiment, Observer, Run, estimate, load, resume, train
    from fedloom.federation.building import build_federation, federation_from_arrays
    from fedloom.federation.on_demand import FederationOnDemand, SilosOnDemand
    from fedloom.federation.records import Federation
    from fedloom.methods.plain import PlainMethod
    from fedloom.models.networks import Network
    from fedloom.release.export import load_generators
    from fedloom.streams import Streams
    from fedloom.workflow import audit_run, certify, embed, evaluate, report, run_sweep, synthesize


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that ``import fedloom`` does not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'fedloom' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
