"""fedloom as an app of a Flower federation that others run: a SuperLink and two SuperNodes, and ``flwr run``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedloom.deployment.flower.folder import write_app
from fedloom.deployment.hosted.run import HostedRun
from fedloom.experiment import train
from fedloom.federation.building import build_federation
from fedloom.runs.checkpoint import load_checkpoint
from fedloom.runs.folder import RunFolder
from fedloom.streams import Streams
from flower_federation import standing
from places import POLICY, RULES, charter_of, config_of
from support import equal_bits

pytestmark = pytest.mark.system


def test_in_a_federation_of_others_silos_learn_what_the_reference_engine_learns(tmp_path: Path) -> None:
    config = config_of("method.name=fissionvae", "data.silos=1")
    federation = build_federation(config.data, Streams(config.seed))
    charter = charter_of(federation, "flower")
    train(config, tmp_path / "reference", federation)
    write_app(HostedRun(config, charter, RULES, "runs/first"), tmp_path / "app")
    with standing(tmp_path / "others", federation, POLICY) as others:
        said = others.run(tmp_path / "app")
        run = others.folder / "runs" / "first"
        assert run.is_dir(), said.stdout + said.stderr + (others.folder / "superlink.log").read_text()[-4000:]
        found = RunFolder.open(run)
        assert found.status["state"] == "finished", said.stdout + said.stderr
    ours, theirs = load_checkpoint(run), load_checkpoint(tmp_path / "reference")
    assert ours.round == theirs.round == 2
    assert equal_bits(ours.server, theirs.server)
    assert [row["participants"] for row in found.metrics()] == [[0, 1], [0, 1]]
    assert "token" not in json.dumps(found.environment)
    for silo in federation.silos:
        assert RunFolder.open(next((others.folder / silo.name / "runs").iterdir())).status["state"] == "finished"
