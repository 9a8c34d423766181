"""Shared fixtures; one torch thread in every test process."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch
from hypothesis import settings

import fedloom.registry
from fedloom.federation.building import build_federation
from fedloom.federation.records import Federation
from fedloom.privacy.registry import VARIABLE
from fedloom.registry import _installed, _packages_of, allow_only
from fedloom.streams import Streams
from support import tiny_config

torch.set_num_threads(1)
# No deadline, because machines may be slow; the same examples every time, because a suite must not fail by chance.
settings.register_profile("fedloom", deadline=None, derandomize=True)
settings.load_profile("fedloom")


@pytest.fixture(autouse=True)
def registry(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A registry of ledgers for each test, also for the processes that it starts."""
    folder = tmp_path_factory.getbasetemp() / "registries" / uuid.uuid4().hex
    monkeypatch.setenv(VARIABLE, str(folder))
    return folder


@pytest.fixture(autouse=True)
def all_plugins_allowed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A silo's worker allows few, in all of its process, which in tests is ours; and none has been used yet."""
    monkeypatch.setattr(fedloom.registry, "_used", {})
    yield
    allow_only(None)


@pytest.fixture
def plugin_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the import path, also of processes; what is imported from it is forgotten afterwards."""
    folder, before = tmp_path_factory.mktemp("plugins"), set(sys.modules)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    for found in (_installed, _packages_of):
        found.cache_clear()
    yield folder
    for found in (_installed, _packages_of):
        found.cache_clear()
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
            del sys.modules[name]


@pytest.fixture(scope="session")
def tiny_federation() -> Federation:
    config = tiny_config()
    return build_federation(config.data, Streams(config.seed))
