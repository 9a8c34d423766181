"""Groups that nobody named, found of six silos that are processes of their own."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from fedloom.federation.building import build_federation
from fedloom.privacy.ledger import Ledger
from fedloom.privacy.statements import read_bundle, verify
from fedloom.runs.files import read_lines
from fedloom.runs.folder import RunFolder
from fedloom.streams import Streams
from places import DP, POLICY, config_of, private, standing

pytestmark = pytest.mark.system
SEARCH = ("method.name=fissionvae", "data.groups=discover", "data.silos=3", "data.records_per_silo=120")
ALLOWED = 'payloads = ["records", "discovery"]\n'


def test_separate_processes_are_grouped_as_in_simulation_and_pay_for_it(tmp_path: Path) -> None:
    config = config_of(*SEARCH)
    federation = build_federation(config.data, Streams(config.seed))
    with standing(tmp_path, federation) as place:
        place.wait_until_all_are_there()
        for name, policy, more in (("exact", POLICY, ()), ("private", private(8.0, "test"), DP)):
            with place.agreeing(policy + ALLOWED):
                folder = RunFolder.open(place.run(name, *SEARCH, *more))
                assert place.same(name)
                assert folder.discovery is not None
                assert folder.discovery == RunFolder.open(tmp_path / f"{name}-reference").discovery
                wrong = verify(read_bundle(folder.statements), {})
                assert [flaw for flaw in wrong if not flaw.unguarded] == []
                for home in place.place.silos if more else ():
                    with closing(Ledger(home.path / "ledger.sqlite", read_only=True)) as ledger:
                        charges = ledger.charges(place.own_name(name), home.name)
                    assert [(each.round, each.release) for each in charges] == [
                        (0, "discovery"),
                        (1, "update"),
                        (2, "update"),
                    ]
        left = read_lines(place.place.silos[0].path / "runs" / place.own_name("exact") / "egress.jsonl")
        assert [(row["round"], sorted(row["payloads"])) for row in left] == [
            (0, ["discovery", "records"]),
            (1, ["records"]),
            (2, ["records"]),
        ]
        place.run_alone("charter", *SEARCH[:1], "rounds=1")  # groups of the charter again
        assert RunFolder.open(tmp_path / "charter").status["state"] == "finished"
