"""Tiny finished runs: images without a guarantee, and labelled vectors under differential privacy."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedloom.experiment import Run, train
from labelled_vectors import labelled_config, labelled_federation
from support import tiny_config


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two groups of two silos, no guarantee; tests that change it take a copy."""
    config = tiny_config("evaluation.metrics=['spread']", "evaluation.samples=20", "method.prior=wave", "seed=7")
    return train(config, tmp_path_factory.mktemp("images") / "run")


@pytest.fixture(scope="session")
def private(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """DP-CVAE in one group of two silos and three classes, with a ledger."""
    privacy = ("privacy.mechanism=dp-sgd", "privacy.epsilon=5", "privacy.accountant=rdp", "seed=41")
    config = labelled_config("dp_cvae", *privacy, "data.public=true")  # for the rest is not handed on without a flag
    return train(config, tmp_path_factory.mktemp("private") / "run", labelled_federation())


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Hugging Face without a network, and a cache of its own."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "cache"
