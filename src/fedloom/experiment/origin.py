"""What a run is trained on, said as it is: a source, the records of a program, or the silos of a deployment."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from fedloom.config import Config, DataConfig
from fedloom.federation.records import Federation
from fedloom.federation.sources import SOURCES, is_public
from fedloom.runs.folder import DataSource

IN_MEMORY = "in memory"


def origin_of(config: Config, federation: Federation) -> DataSource:
    """The data source of a run with these settings on this federation."""
    if federation.is_remote:
        return DataSource(f"the silos of federation {federation.name}", federation.digest, config.data.public)
    known = all(silo.train.subject is not None for silo in federation.silos)
    if federation.described is not None and _records(federation.described) == _records(config.data):
        medical = SOURCES.get(config.data.source, "data.source").medical
        return DataSource(config.data.source, federation.digest, is_public(config.data), medical, known)
    name = f"{IN_MEMORY} ({_caller()})"
    return DataSource(name, federation.digest, config.data.public, knows_subjects=known)


def _records(config: DataConfig) -> DataConfig:
    """What settings say of the records themselves."""
    return replace(config, layout="federated", public=False)


def _caller() -> str:
    """The program that had the records in memory, without its place on this machine."""
    name = Path(sys.argv[0]).name
    return "Python" if name in ("", "-c") else name
