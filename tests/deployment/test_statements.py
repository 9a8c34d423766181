"""Statements of a whole federation in one process: asked for, composed, signed, gathered, and checked elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fedloom.deployment import gathering, server_app
from fedloom.deployment.demo import Neighbourhood, settle
from fedloom.deployment.directories import SiloDirectory
from fedloom.deployment.signing import Signatory
from fedloom.deployment.submissions import Submission
from fedloom.deployment.worker import service
from fedloom.engines.flower.frames import Frame
from fedloom.engines.flower.statement_frames import question, words_frame, words_in
from fedloom.errors import FedloomError
from fedloom.federation.building import build_federation
from fedloom.privacy.ledger import Ledger, read_accounts
from fedloom.privacy.statements import Bundle, read_bundle, verify
from fedloom.runs.files import read_lines
from fedloom.runs.folder import RunFolder
from fedloom.streams import Streams
from local_grid import PROMPT, LocalGrid
from places import DP, POLICY, config_of, private

SECURE = private(8.0, "secure").replace("max_delta", "pace = 0.0\nmax_delta")
Handler = Callable[[Frame], Frame]


@dataclass
class Town:
    """A server and three silos in folders, whose processes are functions."""

    path: Path
    place: Neighbourhood
    grid: LocalGrid
    known: list[str] = field(default_factory=list)

    def run(self, *overrides: str, folder: str = "run") -> Path:
        """From the start, or on from where it stands."""
        where = self.path / folder
        config = config_of("method.name=fedvae", "data.silos=2", *overrides)
        name = str(RunFolder.open(where).environment["engine_choice"]["run"]) if where.is_dir() else ""
        submission = Submission.create(self.place.server, config, where, name)
        problem = server_app.perform(self.place.server, submission.number, self.grid)
        assert problem == ""
        return where

    def bundle(self, folder: str = "run") -> Bundle:
        return read_bundle(RunFolder.open(self.path / folder).statements)

    def sentences(self, folder: str = "run", now: datetime | None = None) -> list[str]:
        return [finding.sentence for finding in verify(self.bundle(folder), now=now)]

    def reasons(self, folder: str = "run") -> dict[str, str]:
        rows = read_lines(self.path / folder / "silos.jsonl")
        return {row["silo"]: row["reason"] for row in rows if row["event"] == "unstated"}


def handler(home: SiloDirectory, data: Path) -> Handler:
    """A silo's node and worker."""
    worker, signatory = service(home, data), Signatory.of(home)
    return lambda frame: signatory.passed(frame, worker.answer(frame))


@pytest.fixture
def town(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Town:
    monkeypatch.setattr(gathering, "ABSENT", 0.5)
    monkeypatch.setattr(gathering, "TICK", 0.05)
    config = config_of()
    whole = build_federation(config.data, Streams(config.seed))
    place = settle(tmp_path, replace(whole, silos=whole.silos[:3]), SECURE, PROMPT, proxy=False)
    handlers = {home.name: handler(home, data) for home, data in zip(place.silos, place.data, strict=True)}
    return Town(tmp_path, place, LocalGrid(handlers))


def test_what_silos_sign_is_what_their_ledgers_say(town: Town) -> None:
    run = town.run(*DP)
    bundle = town.bundle()
    assert verify(bundle) == []
    assert sorted(bundle.keys) == [each.silo for each in bundle.statements] == sorted(town.place.server.charter.silos)
    for statement, home in zip(bundle.statements, sorted(town.place.silos, key=lambda home: home.name), strict=True):
        body, (account,) = statement.body, read_accounts(home.path / "ledger.sqlite")
        assert body.events == list(account.events)
        assert [(each.round, each.release, each.attempt) for each in body.charges] == [(1, "update", 0), (2, "update", 0)]
        assert (body.accountant, body.units, body.delta) == ("pld", 40, 1e-3)
        # What the run was planned to spend, tightly counted: at most it, and at least 99 % of it.
        assert 0.99 * 8 <= body.epsilon <= 8 or account.budget.spent(account.events) <= 8
        assert list(body.left) == RunFolder.open(next((home.path / "runs").iterdir())).egress()
    taken = {(row["round"], row["silo"]): row["sha256"] for row in RunFolder.open(run).egress()}
    stated = {(row["round"], each.silo): row["sha256"] for each in bundle.statements for row in each.body.left}
    assert taken == stated
