"""A runs folder with two tiny runs, one of them with two latent dimensions, and a studio over a copy of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from fedloom.experiment import train
from fedloom.studio.app import make_app
from fedloom.studio.catalogue import Catalogue
from fedloom.studio.gate import Admission
from fedloom.studio.studio import Studio
from support import tiny_config

LOCAL = Admission(frozenset({"localhost"}))


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rounds each, evaluated in both."""
    root = tmp_path_factory.mktemp("studio") / "runs"
    train(tiny_config("evaluation.every=1", "method.prior=symmetrical"), root / "four")
    train(tiny_config("evaluation.every=1", "model.latent=2", "method.name=fedvae"), root / "sweep" / "two")
    return root


@pytest.fixture
def root(trained: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(trained, tmp_path / "runs"))


Ask = Callable[..., TestClient]


@pytest.fixture
def ask() -> Ask:
    """A client of the studio over a folder, from the same machine unless told."""

    def call(folder: Path, door: Admission = LOCAL, base_url: str = "http://localhost:8260") -> TestClient:
        return TestClient(
            make_app(Studio.over(folder, folder.parent / "papers"), door), base_url=base_url, follow_redirects=False
        )

    return call


@pytest.fixture
def client(ask: Ask, trained: Path) -> TestClient:
    """The studio over the runs as they are."""
    return ask(trained)


@pytest.fixture(scope="session")
def keys(trained: Path) -> dict[str, str]:
    """The keys of the runs, by name; the same in every copy."""
    return {entry.name: key for key, entry in Catalogue(trained.resolve()).entries().items()}
