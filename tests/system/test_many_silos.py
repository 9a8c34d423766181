"""Eight silos in processes of their own: every round ends, with all of them, at the first asking."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedloom.deployment.demo import running, settle
from fedloom.deployment.tail import run_at
from fedloom.experiment import train
from fedloom.federation.building import build_federation
from fedloom.runs.checkpoint import load_checkpoint
from fedloom.runs.files import read_lines
from fedloom.streams import Streams
from places import METHODS, POLICY, RULES
from support import equal_bits, tiny_config

pytestmark = pytest.mark.system
SILOS, ROUNDS = 8, 3


def test_eight_silos_finish_their_rounds(tmp_path: Path) -> None:
    overrides = ("engine.name=reference", f"rounds={ROUNDS}", f"data.silos={SILOS // 2}", *METHODS["fissionvae-d"])
    config, said = tiny_config(*overrides), list[str]()
    federation = build_federation(config.data, Streams(config.seed))
    place = settle(tmp_path, federation, POLICY, RULES)
    with running(place, said.append):
        run_at(place.server, config, tmp_path / "run", said.append)
    train(config, tmp_path / "reference", federation)
    assert equal_bits(load_checkpoint(tmp_path / "run").server, load_checkpoint(tmp_path / "reference").server)
    events = [(row["round"], row["silo"], row["event"]) for row in read_lines(tmp_path / "run" / "silos.jsonl")]
    names = [silo.name for silo in federation.silos]
    for kind in ("asked", "answered"):
        found = sorted((number, silo) for number, silo, event in events if event == kind)
        assert found == sorted((number, silo) for number in range(1, ROUNDS + 1) for silo in names)
    assert {event for _, _, event in events} == {"asked", "answered"}
    assert [line for line in said if "ended and is started again" in line or "Error" in line] == []
