"""Tables across real processes: each silo joins with its own CSV file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fedloom.config import load_config
from fedloom.deployment.demo import running, settle
from fedloom.deployment.tail import run_at
from fedloom.experiment import train
from fedloom.federation.records import Federation, Silo
from fedloom.federation.tables import load_own_table
from fedloom.modalities.table import modality_name
from fedloom.runs.checkpoint import load_checkpoint
from fedloom.runs.folder import RunFolder
from fedloom.runs.metrics import is_metric
from mixed_rows import rows, schema, write_rows
from places import RULES
from support import equal_bits

pytestmark = pytest.mark.system

POLICY = """\
methods = ["marginals"]
blocks = []
payloads = ["records", "columns", "pairs", "fidelity"]
privacy = "none"
noise = "test"
"""
SMALL = (
    "evaluation.trackers=[]",
    "method.components=20",
    "method.steps=100",
    "engine.name=reference",
    "engine.workers=1",
    "engine.threads=1",
)


@pytest.mark.parametrize("rounds", [(), ("method.levels=3", "rounds=2")], ids=["all levels", "merged levels"])
def test_separate_processes_release_what_the_simulation_does(rounds: tuple[str, ...], tmp_path: Path) -> None:
    modality = modality_name(schema(tmp_path))
    files = tuple(write_rows(tmp_path / f"{name}.csv", rows(60, seed)) for seed, name in enumerate(("north", "south")))
    own = [load_own_table(file, modality) for file in files]
    silos = tuple(Silo(table.name, table.train) for table in own)
    federation = Federation("wards", silos, own[0].test, own[0].groups)
    private = ("privacy.epsilon=2.0", "privacy.noise=test", "privacy.trust=local")
    config = load_config("tables/demo", [*private, "evaluation.metrics=['marginals', 'fidelity']", *SMALL, *rounds])
    train(config, tmp_path / "reference", federation=federation)
    place = replace(settle(tmp_path, federation, POLICY, RULES), data=files)
    assert place.server.charter.modality == modality
    with running(place, print):
        run_at(place.server, config, tmp_path / "run", print)
    ours, theirs = (load_checkpoint(tmp_path / name) for name in ("run", "reference"))
    assert ours.round == config.rounds
    assert equal_bits(ours.server, theirs.server)
    said, known = (RunFolder.open(tmp_path / name).metrics()[-1] for name in ("run", "reference"))
    told = {key: value for key, value in said.items() if is_metric(key) and not key.startswith("privacy/")}
    assert {key.partition("/")[0] for key in told} == {"fidelity"}  # no other metric does without records
    assert told == {key: known[key] for key in told}
