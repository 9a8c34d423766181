"""A third modality, which a plug-in brings, across real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedloom.config import load_config
from fedloom.deployment.demo import running, settle
from fedloom.deployment.tail import run_at
from fedloom.experiment import train
from fedloom.federation.building import build_federation
from fedloom.runs.checkpoint import load_checkpoint
from fedloom.streams import Streams
from modalities.toy import FILES, installed, write_counts
from places import POLICY, RULES
from support import equal_bits

pytestmark = pytest.mark.system


def test_separate_processes_learn_counts_as_the_simulation_does(tmp_path: Path) -> None:
    small = ("rounds=2", "engine.name=reference", "engine.workers=1", "engine.threads=1", "evaluation.trackers=[]")
    with installed(tmp_path / "site"):
        config = load_config(str(FILES[1]), [f"data.path={write_counts(tmp_path / 'counts.npz')}", *small])
        federation = build_federation(config.data, Streams(config.seed))
        train(config, tmp_path / "reference")
        place = settle(tmp_path, federation, POLICY + 'plugins = ["counts==1.0"]\n', RULES)
        assert place.server.charter.modality == "counts"
        with running(place, print):
            run_at(place.server, config, tmp_path / "run", print)
        ours, theirs = (load_checkpoint(tmp_path / name) for name in ("run", "reference"))
        assert (ours.round, ours.facts["setting"]["modality"]) == (2, "counts")
        assert equal_bits(ours.server, theirs.server)
