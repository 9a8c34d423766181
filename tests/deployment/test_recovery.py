"""After a restore nothing is paid before all that may have left since the backup stands in the ledger again."""

from __future__ import annotations

import re
import shutil
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedloom.cli import app
from fedloom.deployment.backup import back_up, restore
from fedloom.deployment.demo import settle
from fedloom.deployment.directories import ServerDirectory, SiloDirectory
from fedloom.deployment.recovery import Confirmation, CoordinatorAccount, confirm
from fedloom.deployment.submissions import Submission
from fedloom.deployment.worker import service
from fedloom.engines.base import initial_state, received_by, site_of
from fedloom.engines.remote.frames import Frame
from fedloom.engines.remote.rules import RoundRules
from fedloom.engines.remote.silo import SiloService
from fedloom.engines.remote.work import Order
from fedloom.errors import ConfigError, FedloomError
from fedloom.experiment import Experiment
from fedloom.federation.building import build_federation
from fedloom.federation.rounds import RoundContext
from fedloom.operations.spending import HOLD, Hold
from fedloom.operations.trail import AUDIT, Trail, TrailError
from fedloom.privacy.ledger import Ledger
from fedloom.privacy.registry import registry_folder
from fedloom.runs.files import append_lines
from fedloom.runs.folder import RunFolder
from fedloom.sharing.codec import packed
from fedloom.streams import Streams
from places import DP, config_of, private

ROUNDS = 4
CONFIG = config_of("method.name=fedvae", "data.silos=2", f"rounds={ROUNDS}", *DP)


def policy(epsilon: float) -> str:
    return private(epsilon, "secure").replace("max_delta", "pace = 0.0\nmax_delta")


@dataclass
class Street:
    """A server and one silo in folders; the wire between them is a function call."""

    path: Path
    server: ServerDirectory
    silo: SiloDirectory
    data: Path
    run: str
    experiment: Experiment

    @property
    def service(self) -> SiloService:
        return service(self.silo, self.data)

    def order(self, number: int) -> Frame:
        """What the server sends for a round: always the first weights, which is enough for a silo to train."""
        trainer = self.experiment.trainer
        plan, site = trainer.method.plan, site_of(trainer.federation, 0)
        state = initial_state(trainer.method, trainer.federation, CONFIG).server
        coming = plan.split(received_by(plan, state, site), site)
        blocks = {key: packed(part) for key, part in coming.items() if part}
        return Order(self.run, CONFIG, RoundContext(number, ROUNDS, tuple(range(3))), settled=0).frame(blocks)

    def ask(self, number: int, *, lost: bool = False) -> str:
        """One round; the kind of the answer."""
        self.journal(number, "asked")
        answer = self.service.answer(self.order(number))
        self.journal(number, "refused" if answer.kind == "refused" else "missing" if lost else "answered")
        return answer.kind

    def journal(self, number: int, event: str) -> None:
        row = {"round": number, "silo": self.silo.name, "event": event}
        append_lines(self.path / "run" / "silos.jsonl", [row])

    def account(self, ticket: str | None = None) -> Path:
        hold = Hold.at(self.silo.path)
        found = CoordinatorAccount.of(self.server, self.silo.name, ticket or (hold.ticket if hold else ""))
        path = self.path / "account.json"
        path.write_bytes(found.signed(self.server))
        return path

    def rows(self) -> list[tuple[int, int]]:
        """Round and attempt of every charge."""
        with closing(Ledger(self.silo.path / "ledger.sqlite")) as ledger:
            return [(each.round, each.attempt) for each in ledger.charges(self.run, self.silo.name)]

    def spent(self) -> float:
        with closing(Ledger(self.silo.path / "ledger.sqlite")) as ledger:
            (account,) = ledger.accounts()
            return account.spent

    def burn(self, *, registry: bool = True) -> Path:
        """The silo's machine is lost; its audit log was kept elsewhere. What is restored is the backup."""
        kept = self.path / "kept.jsonl"
        shutil.copyfile(self.silo.path / AUDIT, kept)
        shutil.rmtree(self.silo.path)
        if registry:
            shutil.rmtree(registry_folder())
        restore(self.path / "backup", self.silo.path)
        self.silo = SiloDirectory.open(self.silo.path)
        return kept


@pytest.fixture
def street(tmp_path: Path) -> Street:
    whole = build_federation(CONFIG.data, Streams(CONFIG.seed))
    place = settle(tmp_path, replace(whole, silos=whole.silos[:3]), policy(8.0), RoundRules())
    submission = Submission.create(place.server, CONFIG, tmp_path / "run")
    RunFolder.create(tmp_path / "run", CONFIG)
    experiment = Experiment.of(CONFIG, place.server.charter.at_the_server())
    return Street(tmp_path, place.server, place.silos[0], place.data[0], submission.run, experiment)


def backed_up(street: Street, *rounds: int) -> None:
    for number in rounds:
        assert street.ask(number) == "update"
    back_up(street.silo.path, street.path / "backup")


def test_a_restored_silo_pays_nothing_before_it_is_confirmed(street: Street) -> None:
    backed_up(street, 1)
    assert street.ask(2) == "update"
    street.burn()
    assert street.rows() == [(1, 0)]
    assert street.ask(3) == "refused"
    assert street.rows() == [(1, 0)]


def test_the_audit_log_gives_back_the_very_ledger(street: Street) -> None:
    backed_up(street, 1)
    assert [street.ask(2), street.ask(3)] == ["update", "update"]
    with closing(Ledger(street.silo.path / "ledger.sqlite")) as ledger:
        chain = ledger.chain()
    spent, kept = street.spent(), street.burn()
    assert street.spent() < spent
    assert confirm(street.silo, street.service, street.account(), kept) == Confirmation(replayed=2, made_up=0)
    assert not (street.silo.path / HOLD).exists()
    with closing(Ledger(street.silo.path / "ledger.sqlite")) as ledger:
        assert ledger.chain() == chain
    assert street.spent() == spent
    assert street.ask(4) == "update"
    assert street.rows() == [(1, 0), (2, 0), (3, 0), (4, 0)]
    events = [each.event for each in Trail(street.silo.path / AUDIT).entries()]
    assert events[-6:] == ["restored", "confirmed", "asked", "approved", "paid", "sent"]


def test_without_the_audit_log_all_that_was_asked_counts_as_released(street: Street) -> None:
    """Also what the server never received: it may have been on its way."""
    backed_up(street, 1)
    assert [street.ask(2), street.ask(3, lost=True)] == ["update", "update"]
    spent = street.spent()
    street.burn()
    assert confirm(street.silo, street.service, street.account()) == Confirmation(replayed=0, made_up=2)
    assert street.rows() == [(1, 0), (2, 0), (3, 0)]
    assert street.spent() == spent


def test_what_was_asked_twice_counts_twice(street: Street) -> None:
    backed_up(street, 1)
    assert street.ask(2) == "update"
    street.journal(2, "asked")
    spent = street.spent()
    street.burn()
    confirm(street.silo, street.service, street.account())
    assert street.rows() == [(1, 0), (2, 0), (2, 1)]
    assert street.spent() > spent


def test_what_the_silo_refused_costs_nothing(street: Street) -> None:
    backed_up(street, 1)
    (street.silo.path / "policy.toml").write_text(policy(8.0).replace('"fedvae", ', ""))
    assert street.ask(2) == "refused"
    street.burn()
    assert confirm(street.silo, street.service, street.account()) == Confirmation(replayed=0, made_up=0)
    assert street.rows() == [(1, 0)]


def test_a_ledger_that_began_after_the_backup_is_counted_from_its_beginning(street: Street) -> None:
    backed_up(street)
    assert [street.ask(1), street.ask(2)] == ["update", "update"]
    spent = street.spent()
    street.burn()
    assert not (street.silo.path / "ledger.sqlite").exists()
    assert street.ask(3) == "refused"
    assert confirm(street.silo, street.service, street.account()) == Confirmation(replayed=0, made_up=2)
    assert street.spent() == spent


def test_more_than_the_budget_leaves_a_silo_that_pays_no_more(street: Street) -> None:
    backed_up(street, 1)
    for _ in range(60):
        street.journal(2, "asked")
    street.burn()
    with pytest.raises(FedloomError, match="costs more than is left, so it pays nothing any more"):
        confirm(street.silo, street.service, street.account())
    assert (street.silo.path / HOLD).exists()
    assert street.ask(3) == "refused"


@pytest.mark.parametrize("change", ["ticket", "silo", "signature", "rounds"])
def test_only_the_coordinators_own_answer_to_this_restore_counts(street: Street, change: str) -> None:
    backed_up(street, 1)
    assert street.ask(2) == "update"
    street.burn()
    path = street.account("0123456789abcdef" if change == "ticket" else None)
    text = path.read_text()
    if change == "signature":
        path.write_text(text.replace(text[-20:-15], "00000"))
    if change == "silo":
        path.write_text(text.replace(f'"silo":"{street.silo.name}"', '"silo":"other"'))
    if change == "rounds":
        path.write_text(text.replace('"2":1', '"2":0'))
    said = "answers for silo" if change == "ticket" else "is not signed by the authority"
    with pytest.raises(FedloomError, match=said):
        confirm(street.silo, street.service, path)
    assert street.rows() == [(1, 0)]


def test_an_audit_log_that_does_not_go_on_from_the_backup_is_none(street: Street) -> None:
    backed_up(street, 1)
    street.ask(2)
    kept = street.burn()
    lines = kept.read_bytes().splitlines(keepends=True)
    kept.write_bytes(lines[0])
    with pytest.raises(TrailError, match="has no line"):
        confirm(street.silo, street.service, street.account(), kept)
    assert (street.silo.path / HOLD).exists()


def test_an_account_needs_every_run_that_was_handed_in(street: Street) -> None:
    shutil.rmtree(street.path / "run")
    with pytest.raises(FedloomError, match="is gone: what silo"):
        CoordinatorAccount.of(street.server, street.silo.name, "0")


def test_an_older_ledger_beside_its_audit_log_pays_nothing(street: Street) -> None:
    """Somebody puts old copies back by hand, of the registry, too."""
    ledger = street.silo.path / "ledger.sqlite"
    street.ask(1)
    shutil.copyfile(ledger, street.path / "old")
    shutil.copytree(registry_folder(), street.path / "old registry")
    street.ask(2)
    shutil.copyfile(street.path / "old", ledger)
    shutil.rmtree(registry_folder())
    shutil.copytree(street.path / "old registry", registry_folder())
    old = street.rows()
    assert street.ask(3) == "refused"
    assert street.rows() == old == [(1, 0)]


def test_every_charge_is_in_the_audit_log_before_it_pays_for_anything(street: Street) -> None:
    street.ask(1)
    entries = list(Trail(street.silo.path / AUDIT).entries())
    assert [each.event for each in entries] == ["asked", "approved", "paid", "sent"]
    paid = entries[2].facts
    assert (paid["round"], paid["charge"], paid["silo"], paid["release"]) == (1, 1, street.silo.name, "update")
    with closing(Ledger(street.silo.path / "ledger.sqlite")) as ledger:
        assert paid["head"] == ledger.chain().heads[1]


def test_without_an_audit_log_nothing_is_paid(street: Street) -> None:
    (street.silo.path / AUDIT).mkdir()
    assert street.service.answer(street.order(1)).kind == "failed"
    assert not (street.silo.path / "ledger.sqlite").exists()


def test_a_backup_comes_back_whole_and_for_its_owner_alone(street: Street) -> None:
    street.ask(1)
    file = street.path / "backup"
    back_up(street.silo.path, file)
    back_up(street.server.path, street.path / "server.backup")
    assert file.stat().st_mode & 0o777 == 0o600
    restore(street.path / "server.backup", street.path / "server2")
    restored = ServerDirectory.open(street.path / "server2")
    assert restored.charter == street.server.charter
    assert restored.keys_admitted() == street.server.keys_admitted()
    assert (restored.keys / "ca.key").read_bytes() == (street.server.keys / "ca.key").read_bytes()
    assert (restored.keys / "ca.key").stat().st_mode & 0o777 == 0o600
    assert not (restored.path / HOLD).exists()
    with pytest.raises(ConfigError, match="exists already"):
        restore(file, street.silo.path)
    data = file.read_bytes()
    for part in range(1, 20):  # somewhere in the archive one bit is another
        damaged = bytearray(data)
        damaged[len(data) * part // 20] ^= 4
        file.write_bytes(damaged)
        with pytest.raises(FedloomError, match=r"is no backup that|is damaged"):
            restore(file, street.path / "silo2")
        assert not (street.path / "silo2").exists()


def test_a_hold_is_not_carried_into_a_backup_and_out_again(street: Street) -> None:
    """A backup of a restored silo is restored under a hold of its own, which an old account does not answer to."""
    backed_up(street, 1)
    street.burn()
    first = street.account()
    back_up(street.silo.path, street.path / "second")
    shutil.rmtree(street.silo.path)
    restore(street.path / "second", street.silo.path)
    with pytest.raises(FedloomError, match="answers for silo"):
        confirm(street.silo, street.service, first)


def said(*words: object, code: int = 0) -> str:
    """What a command prints."""
    result = CliRunner().invoke(app, ["federation", *map(str, words)])
    assert result.exit_code == code, result.output
    return result.output


def test_the_commands_lead_from_a_backup_to_a_silo_that_pays(street: Street, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(street.path)
    silo, name = street.silo.path, street.silo.name
    assert street.ask(1) == "update"
    said("backup", silo, "backup")
    assert street.ask(2) == "update"
    noted = said("audit", silo).split()[-1]
    assert "none changed" in said("audit", silo, "--since", noted, "--last", "3")
    kept = street.path / "kept.jsonl"
    shutil.copyfile(silo / AUDIT, kept)
    shutil.rmtree(silo)
    shutil.rmtree(registry_folder())
    printed = said("restore", "backup", silo)
    ticket = re.search(r"^ticket +(\w+)$", printed, re.MULTILINE)[1]  # type: ignore[index]
    assert f"fedloom federation account DIR {name} {ticket}" in printed
    assert "has no line" in said("audit", silo, "--since", noted, code=2)
    assert "nothing is paid before" in said("doctor", silo, code=2)
    assert "restored from a backup" in said("status", silo)
    said("account", street.server.path, name, ticket)
    confirmed = said("confirm", silo, f"{name}.account.json", "--data", street.data, "--audit", kept)
    assert "from the audit log  1 charge" in confirmed
    assert street.ask(3) == "update"
    assert street.rows() == [(1, 0), (2, 0), (3, 0)]


def test_mistakes_around_backups_are_one_sentence(street: Street, tmp_path: Path) -> None:
    for words, sentence in (
        (("backup", tmp_path / "nowhere", "b"), "is not a federation's folder"),
        (("restore", street.data, tmp_path / "new"), "is no backup that can be read"),
        (("account", street.server.path, "west", "0"), "unknown silo 'west'"),
        (("confirm", street.silo.path, street.data, "--data", street.data), "was not restored, or was confirmed"),
        (("audit", street.silo.path), "nothing was asked yet"),
        (("audit", street.server.path, "--since", "7"), "must be NUMBER:HASH"),
    ):
        assert sentence in " ".join(said(*words, code=2).split())
    assert not (tmp_path / "new").exists()
