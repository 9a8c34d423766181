"""What a run is trained on, said as it is: a source, the records of a program, or the silos of a deployment."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from fedloom.config import Config, DataConfig
from fedloom.errors import RunFolderError
from fedloom.federation.records import Federation
from fedloom.federation.sources import SOURCES, is_public
from fedloom.runs.checkpoint import Checkpoint
from fedloom.runs.folder import DataSource, RunFolder

IN_MEMORY, AT_SILOS = "in memory", "the silos of federation"


def origin_of(config: Config, federation: Federation) -> DataSource:
    """The data source of a run with these settings on this federation."""
    if federation.is_remote:
        return DataSource(f"{AT_SILOS} {federation.name}", federation.digest, config.data.public)
    known = all(silo.train.subject is not None for silo in federation.known)
    if federation.described is not None and _records(federation.described) == _records(config.data):
        medical = SOURCES.get(config.data.source, "data.source").medical
        return DataSource(config.data.source, federation.digest, is_public(config.data), medical, known)
    name = f"{IN_MEMORY} ({_caller()})"
    return DataSource(name, federation.digest, config.data.public, knows_subjects=known)


def check_origin(folder: RunFolder, federation: Federation | None) -> None:
    """Complain where a run's settings alone would lead to other records than those that it was trained on."""
    name, path = folder.data_source.name, folder.path
    if federation is None and name.startswith(IN_MEMORY):
        raise RunFolderError(
            f"{path} was trained on records {name}, which its folder does not hold: give them again from Python, "
            f"fedloom.resume('{path}', federation=...) to go on with it, or federation=... to what measures it"
        )
    if federation is None and name.startswith(AT_SILOS):
        raise RunFolderError(
            f"{path} was trained at {name}, whose records are not here: resume it with --federation DIR; what needs "
            "records is measured at the silos"
        )


def check_records(folder: RunFolder, federation: Federation, checkpoint: Checkpoint | None = None) -> None:
    """Complain about records that are not those which the run was begun on, and its checkpoints made with."""
    known = {folder.data_source.digest, checkpoint.facts.get("federation", "") if checkpoint else ""} - {""}
    if known - {federation.digest}:
        raise RunFolderError(
            f"{folder.path}: the data have changed: these are not the records that it was trained on, which were "
            f"{folder.data_source.name}"
        )


def _records(config: DataConfig) -> DataConfig:
    """What settings say of the records themselves."""
    return replace(config, layout="federated", public=False, redeal=False)


def _caller() -> str:
    """The program that had the records in memory, without its place on this machine."""
    name = Path(sys.argv[0]).name
    return "Python" if name in ("", "-c") else name
