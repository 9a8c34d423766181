"""Statements of a whole federation in one process: asked for, composed, signed, gathered, and checked elsewhere."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from fedloom.cli import app
from fedloom.deployment import gathering, performing
from fedloom.deployment.demo import Neighbourhood, settle
from fedloom.deployment.directories import SiloDirectory, known_fingerprints
from fedloom.deployment.flower.grid_wire import FlowerWire
from fedloom.deployment.signing import Signatory
from fedloom.deployment.submissions import Submission
from fedloom.deployment.worker import service
from fedloom.engines.remote.frames import Frame
from fedloom.engines.remote.statement_frames import words_frame
from fedloom.errors import FedloomError
from fedloom.federation.building import build_federation
from fedloom.privacy.accounting import event_of, spent
from fedloom.privacy.ledger import Ledger, read_accounts
from fedloom.privacy.silo_privacy import REPEATABLE
from fedloom.privacy.statements import Bundle, read_bundle, verify
from fedloom.runs.files import read_lines
from fedloom.runs.folder import RunFolder
from fedloom.streams import Streams
from local_grid import PROMPT, LocalGrid
from places import DP, POLICY, config_of, private
from statement_samples import unsigned_bundle

SECURE = private(8.0, "secure").replace("max_delta", "pace = 0.0\nmax_delta")
Handler = Callable[[Frame], Frame]


@dataclass
class Town:
    """A server and three silos in folders, whose processes are functions."""

    path: Path
    place: Neighbourhood
    grid: LocalGrid

    def run(self, *overrides: str, folder: str = "run") -> Path:
        """From the start, or on from where it stands."""
        where = self.path / folder
        config = config_of("method.name=fedvae", "data.silos=2", *overrides)
        name = str(RunFolder.open(where).environment["engine_choice"]["run"]) if where.is_dir() else ""
        submission = Submission.create(self.place.server, config, where, name)
        problem = performing.perform(self.place.server, submission.number, lambda _: FlowerWire(self.grid))
        assert problem == ""
        return where

    def bundle(self, folder: str = "run") -> Bundle:
        return read_bundle(RunFolder.open(self.path / folder).statements)

    def sentences(self, folder: str = "run", now: datetime | None = None) -> list[str]:
        return [flaw.sentence for flaw in verify(self.bundle(folder), now=now)]

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
    place = settle(tmp_path, replace(whole, silos=whole.silos[:3]), SECURE, PROMPT)
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
        assert [(each.round, each.release, each.attempt) for each in body.charges] == [
            (1, "update", 0),
            (2, "update", 0),
        ]
        assert (body.accountant, body.units, body.delta) == ("pld", 40, 1e-3)
        assert body.epsilon == spent(account.events, 1e-3, "pld") < account.spent <= 8.0
        assert list(body.left) == RunFolder.open(next((home.path / "runs").iterdir())).egress()
    taken = {(row["round"], row["silo"]): row["sha256"] for row in RunFolder.open(run).egress()}
    stated = {(row["round"], each.silo): row["sha256"] for each in bundle.statements for row in each.body.left}
    assert taken == stated


@pytest.fixture
def away(town: Town) -> str:
    """A silo that is not there."""
    name = town.place.silos[1].name
    town.grid.offline = {name}
    return name


def test_a_silo_that_is_away_is_missed_and_asked_again(town: Town, away: str) -> None:
    run = town.run(*DP)
    others = town.bundle().statements
    assert town.sentences() == [f"silo '{away}' was drawn for rounds 1, 2 and there is no statement of it"]
    assert town.reasons() == {away: "it was not there, or did not answer in time"}
    assert gathering.unsigned(RunFolder.open(run), tuple(town.place.server.charter.silos)) == [away]
    rounds = RunFolder.open(run).metrics()
    town.grid.offline = set()
    assert town.run(*DP) == run
    assert town.sentences() == []
    found = {each.silo: each for each in town.bundle().statements}
    assert [found[each.silo] for each in others] == list(others)  # nobody else was asked again
    assert (found[away].body.charges, found[away].body.left, found[away].body.epsilon) == ((), (), 0.0)
    assert RunFolder.open(run).metrics() == rounds  # nothing was trained for it


def test_a_silo_that_missed_a_round_is_counted_by_a_filter(town: Town) -> None:
    """Whether it takes part in a round may have been decided by looking at the ones before."""
    silo = town.place.silos[1].name
    honest = town.grid.handlers[silo]

    def moody(frame: Frame) -> Frame:
        if frame.header.get("round") == 2:
            raise RuntimeError("not today")
        return honest(frame)

    town.grid.handlers[silo] = moody
    town.run(*DP)
    assert verify(town.bundle()) == []
    body = next(each for each in town.bundle().statements if each.silo == silo).body
    (account,) = read_accounts(town.place.silos[1].path / "ledger.sqlite")
    assert (body.accountant, [each.round for each in body.charges]) == ("filter", [1])
    assert body.epsilon == account.spent > spent(account.events, 1e-3, "pld")


def test_a_round_that_is_made_again_is_counted_by_a_filter(town: Town) -> None:
    silo = town.place.silos[0]
    town.run(*DP, "rounds=1", "privacy.epsilon=2.0")
    with contextlib.closing(Ledger(silo.path / "ledger.sqlite")) as ledger:
        (first,) = ledger.charges(town.bundle().run, silo.name)
        ledger.charge(town.bundle().run, silo.name, 1, "update", event_of(first.event), content=None)
    RunFolder.open(town.path / "run").statements.unlink()
    town.run(*DP, "rounds=1", "privacy.epsilon=2.0")
    assert town.sentences() == []
    body = next(each for each in town.bundle().statements if each.silo == silo.name).body
    assert [(each.attempt, each.sha256) for each in body.charges] == [(0, first.sha256), (1, "")]
    assert body.accountant == "filter"


@pytest.mark.parametrize(
    ("policy", "overrides", "sentence"),
    [
        (POLICY, (), "no DP guarantee: the experiment asks for no mechanism"),
        (private(8.0, "test"), DP, f"no DP guarantee: {REPEATABLE}"),
    ],
    ids=["none", "repeatable"],
)
def test_without_a_guarantee_a_statement_says_so_and_what_left(
    town: Town, policy: str, overrides: tuple[str, ...], sentence: str
) -> None:
    for home in town.place.silos:
        (home.path / "policy.toml").write_text(policy)
    town.run(*overrides)
    assert town.sentences() == [sentence] * 3
    assert all(flaw.unguarded for flaw in verify(town.bundle()))
    for each in town.bundle().statements:
        assert each.words["epsilon"] is None
        assert [row["round"] for row in each.body.left] == [1, 2]


def test_what_the_server_says_that_it_took_must_have_left(town: Town) -> None:
    """A silo signs no account of rounds that it does not know of."""
    run = town.run(*DP)
    rows = RunFolder.open(run).egress()
    rows[0]["sha256"] = "0" * 64
    (run / "egress.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    RunFolder.open(run).statements.unlink()
    town.run(*DP)
    silo = rows[0]["silo"]
    assert town.reasons() == {silo: f"silo '{silo}' sent nothing in round 1 of what the server says that it took"}


def change_charter(bundle: Bundle) -> Bundle:
    return replace(bundle, charter={**bundle.charter, "name": "other"})


@pytest.mark.parametrize(
    ("asked", "stated", "now", "complaint"),
    [
        (change_charter, {}, None, "was invited to another charter"),
        (None, {"silo": "other"}, None, "signs no statement of 'other'"),
        (None, {"run": "run-2"}, None, "was asked about another run"),
        (None, {"asked": "2020-01-01T00:00:00Z"}, None, "was asked about another time of asking"),
        (None, {}, datetime(2020, 1, 1, tzinfo=UTC), "clock of silo .* is wrong"),
    ],
    ids=["charter", "silo", "run", "asked", "clock"],
)
def test_a_node_signs_nothing_but_what_it_was_asked(
    town: Town,
    asked: Callable[[Bundle], Bundle] | None,
    stated: dict[str, Any],
    now: datetime | None,
    complaint: str,
) -> None:
    home = town.place.silos[0]
    signatory, bundle = Signatory.of(home), replace(unsigned_bundle(), charter=town.place.server.charter.to_mapping())
    words = {**bundle.terms, "silo": home.name}
    assert signatory.signed(bundle, words).silo == home.name
    with pytest.raises(FedloomError, match=complaint):
        signatory.signed(asked(bundle) if asked else bundle, {**words, **stated}, now)


def test_a_worker_cannot_have_anything_signed_that_was_not_asked_for(town: Town) -> None:
    signatory = Signatory.of(town.place.silos[0])
    with pytest.raises(FedloomError, match="a statement was not asked for: kind is 'task'"):
        signatory.passed(Frame({"kind": "task"}), words_frame({"silo": "x"}))


def fedloom(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_statement_that_comes_by_mail_is_collected(town: Town, away: str, tmp_path: Path) -> None:
    run, home = town.run(*DP), town.place.silos[1]
    mail, bundle = tmp_path / "mail.json", RunFolder.open(run).statements
    before = bundle.read_bytes()
    made = fedloom("federation", "statement", home.path, bundle, "--data", town.place.data[1], "--out", mail)
    assert made.exit_code == 0, made.output
    assert "0 at delta 0.001" in made.stdout
    assert known_fingerprints(home.path)[away] in made.stdout
    data = mail.read_bytes()
    mail.write_bytes(data.replace(b'"units":40', b'"units":41'))
    refused = fedloom("federation", "collect", town.place.server.path, run, mail)
    assert refused.exit_code == 2
    assert "its signature does not belong to its words and its key" in " ".join(refused.stderr.split())
    assert bundle.read_bytes() == before
    mail.write_bytes(data)
    assert fedloom("federation", "collect", town.place.server.path, run, mail).exit_code == 0
    assert verify(read_bundle(bundle), known_fingerprints(town.place.server.path)) == []


def test_a_silo_cannot_answer_for_another(town: Town) -> None:
    first, second = (home.name for home in town.place.silos[:2])
    honest = town.grid.handlers[second]
    town.grid.handlers[first] = lambda frame: honest(frame) if frame.kind == "state" else own(frame)
    own = handler(town.place.silos[0], town.place.data[0])
    town.run(*DP)
    assert town.reasons() == {first: f"it sent a statement of '{second}'"}


def test_a_node_needs_no_torch() -> None:
    """It signs, and has no records: torch would only cost it memory."""
    program = "import sys, fedloom.deployment.direct.silo_process; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
