"""Shared fixtures; one torch thread in every test process."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch

from fedloom.config import Config, load_config
from fedloom.federation.building import build_federation
from fedloom.federation.records import Federation
from fedloom.streams import Streams

torch.set_num_threads(1)


def tiny_config(*overrides: str) -> Config:
    """Two groups of two silos, 40 records each, small networks: a round takes a few hundredths of a second."""
    small = (
        "rounds=2",
        "data.silos=2",
        "data.records_per_silo=40",
        "model.hidden=[16]",
        "model.latent=4",
        "local.batch_size=16",
        "evaluation.every=0",
        "evaluation.metrics=[]",
        "engine.workers=1",
        "engine.threads=1",
        "participation.rate=1.0",
    )
    return load_config("demo", [*small, *overrides])


@pytest.fixture(scope="session")
def tiny_federation() -> Federation:
    config = tiny_config()
    return build_federation(config.data, Streams(config.seed))
