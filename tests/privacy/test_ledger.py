from __future__ import annotations

import contextlib
import json
import math
import shutil
import sqlite3
import time
from collections.abc import Iterable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from fedloom.errors import FedloomError, RunFolderError
from fedloom.privacy.accounting import Budget, Event, Gaussian, Neighbours, NoGuarantee, spent
from fedloom.privacy.ledger import BudgetSpentError, GrantError, Ledger, read_accounts
from privacy.sqlite_faults import BUDGET, EVENT, compete, live


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.enrol("north", "digest", BUDGET)
    return ledger


def lines(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


@pytest.mark.parametrize("content", [None, "seeded"])
def test_a_kill_at_any_write_never_leaves_a_release_unpaid(tmp_path: Path, content: str | None) -> None:
    """Three rounds, killed at the first write, then at the second, and so on, each time on the same ledger."""
    path, released = tmp_path / "ledger.sqlite", tmp_path / "released"
    before, kills, number = 0, 0, 1
    while not live(path, released, 3, number, content):
        kills, number = kills + 1, number + 1
        if not path.exists():
            continue
        check = sqlite3.connect(path)
        assert check.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        check.close()
        charged = len(Ledger(path).events("north"))
        assert charged >= before, "the spent amount went down"
        paid, out = charged, lines(released)
        assert paid >= (len(out) if content is None else len(set(out))), "something was released that was not paid for"
        before = charged
    assert kills > 15
    charged, out = len(Ledger(path).events("north")), lines(released)
    # With seeded noise a round done again is the same release; with secure noise it is another one.
    assert charged == 3 if content else charged >= len(out) > 3


def test_a_kill_after_a_release_finds_it_paid(tmp_path: Path) -> None:
    path, released = tmp_path / "ledger.sqlite", tmp_path / "released"
    for last in (1, 2):
        assert not live(path, released, 3, -last, None)
    assert len(Ledger(path).events("north")) == len(lines(released)) == 3


def test_two_processes_cannot_spend_the_same_budget_twice(tmp_path: Path) -> None:
    """The budget pays for 12 rounds exactly, whoever comes first."""
    path, granted = tmp_path / "ledger.sqlite", tmp_path / "granted"
    budget = Budget(spent([Gaussian(4.0, 0.2, 120)], 1e-5, "rdp") * 1.0001, 1e-5, "rdp")
    compete(path, granted, budget, runs=3)
    assert len(lines(granted)) == 12 == len(Ledger(path).events("north"))
    assert Ledger(path).accounts()[0].left < 0.001


def test_what_is_charged_stays_charged(ledger: Ledger) -> None:
    ledger.charge("run", "north", 1, "training", EVENT, content=None)
    vandal = sqlite3.connect(ledger.path)
    for change in ("DELETE FROM charges", "UPDATE charges SET round = 2", "UPDATE silos SET epsilon = 99"):
        with pytest.raises(sqlite3.IntegrityError, match="for good"):
            vandal.execute(change)
    assert ledger.events("north") == [EVENT]


def test_a_head_of_the_chain_is_over_its_ledger_and_all_charges_before(ledger: Ledger, tmp_path: Path) -> None:
    """Two ledgers that differ in the first of two charges, and a third with the same charges as the first."""
    chains = [ledger.chain()]
    for name, run in (("", "run"), ("other", "another run"), ("third", "run")):
        one = Ledger(tmp_path / f"{name}.sqlite") if name else ledger
        if name:
            one.enrol("north", "digest", BUDGET)
        for round, first in ((1, run), (2, "run")):
            one.charge(first, "north", round, "training", EVENT, content=None)
        chains.append(one.chain())
    empty, *full = chains
    assert [chain.charges for chain in chains] == [0, 2, 2, 2]
    assert len({head for chain in full for head in chain.heads}) == 9
    assert full[0].heads[0] == empty.heads[0]
    for number, head in enumerate(full[0].heads):
        assert full[0].goes_on_from(number, head)
        assert not full[1].goes_on_from(number, head)
        assert empty.goes_on_from(number, head) == (number == 0)


def test_a_digest_is_written_anew_only_where_the_old_one_stands_and_the_old_one_leaves(tmp_path: Path) -> None:
    """A longer one is written elsewhere in the file, so that the old one would stay where it was."""
    ledger, old, new = Ledger(tmp_path / "ledger.sqlite"), 16 * "01ab", 22 * "cdef"
    for silo in ("north", "south"):
        ledger.enrol(silo, f"{silo}/{old}", BUDGET)
    ledger.rebind("north", f"south/{old}", new)
    assert [ledger.data_of(silo) for silo in ("north", "south")] == [f"north/{old}", f"south/{old}"]
    ledger.rebind("north", f"north/{old}", new)
    assert [ledger.data_of(silo) for silo in ("north", "south")] == [new, f"south/{old}"]
    assert f"north/{old}".encode() not in ledger.path.read_bytes()
    assert f"south/{old}".encode() in ledger.path.read_bytes()
    with pytest.raises(sqlite3.IntegrityError, match="for good"):
        sqlite3.connect(ledger.path).execute("UPDATE silos SET epsilon = 99")


def test_forgotten_rounds_are_found(ledger: Ledger) -> None:
    """An accountant that is thrown away every round tells the cost of one; ten cost three times as much."""
    for round in range(1, 11):
        ledger.charge("run", "north", round, "training", EVENT, content=None)
    (account,) = ledger.accounts()
    assert account.spent == pytest.approx(spent([Gaussian(4.0, 0.2, 100)], 1e-5, "rdp"))
    assert account.spent > 3 * BUDGET.spent([EVENT])
    assert account.releases[0].charges == 10


def test_the_clock_and_a_copied_run_do_not_matter(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of a run charges the ledger of the data under the same run name: the same release only if seeded."""
    ledger.charge("run", "north", 1, "training", EVENT, content="a")
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert not ledger.charge("run", "north", 1, "training", EVENT, content="a").new
    assert ledger.charge("run", "north", 2, "training", EVENT, content=None).new
    assert ledger.charge("run", "north", 2, "training", EVENT, content=None).new
    assert len(ledger.events("north")) == 3
    shutil.copy(ledger.path, tmp_path / "copy.sqlite")
    assert Ledger(tmp_path / "copy.sqlite").events("north") == ledger.events("north"), "one file is all there is"


def test_other_content_is_another_release(ledger: Ledger) -> None:
    """Its noise is its own, so both are paid for, and each costs nothing when it is made again."""
    first, second = (ledger.charge("run", "north", 1, "training", EVENT, content=content) for content in "ab")
    assert first.new
    assert second.new
    again = [ledger.charge("run", "north", 1, "training", EVENT, content=content) for content in "ab"]
    assert [(charge.number, charge.new) for charge in again] == [(first.number, False), (second.number, False)]
    assert ledger.events("north") == [EVENT, EVENT]


def test_the_same_content_of_another_run_silo_round_or_name_is_another_release(ledger: Ledger) -> None:
    ledger.enrol("south", "other", BUDGET)
    one = ("run", "north", 1, "training")
    others = (("again", *one[1:]), ("run", "south", *one[2:]), ("run", "north", 2, "training"), (*one[:3], "counts"))
    for new in (True, False):
        charges = [ledger.charge(*key, EVENT, content="a") for key in (one, *others)]  # type: ignore[arg-type]
        assert [charge.new for charge in charges] == [new] * 5
        assert [charge.number for charge in charges] == [1, 2, 3, 4, 5]


def test_the_same_content_at_another_cost_is_another_release(ledger: Ledger) -> None:
    """Less noise than was paid for, whatever is said of the content."""
    ledger.charge("run", "north", 1, "training", EVENT, content="a")
    other = Gaussian(1.0, 0.2, 10)
    assert ledger.charge("run", "north", 1, "training", other, content="a").new
    assert ledger.events("north") == [EVENT, other]


def test_a_finished_round_is_not_sent_again_for_one_with_more_releases(ledger: Ledger) -> None:
    def released(*names: str) -> bytes:
        return ledger.released(
            "run",
            "north",
            1,
            dict.fromkeys(names, EVENT),
            content=None,
            stored=b"first",
            make=lambda: b"first",
            store=lambda _: None,
        )

    for _ in range(2):
        released("training")
    assert len(ledger.events("north")) == 1, "what is finished is sent again for nothing"
    released("training", "counts")
    assert (len(ledger.events("north", "training")), len(ledger.events("north", "counts"))) == (2, 1)


def test_a_release_is_paid_for_before_it_is_made_and_noted_before_it_is_stored(tmp_path: Path) -> None:
    """Whoever dies while making it has paid; what the budget does not allow is never made."""
    ledger, happened = Ledger(tmp_path / "ledger.sqlite"), list[str]()
    ledger.enrol("north", "digest", Budget(1.2, 1e-5, "rdp"))

    def made() -> bytes:
        happened.append(f"{len(ledger.events('north'))} paid")
        return b"update"

    def stored(data: bytes) -> None:
        noted = ledger.may_resend("run", "north", 1, "training", sha256(data).hexdigest())
        happened.append(f"noted: {noted}")

    arguments = {"content": None, "stored": None, "make": made, "store": stored}
    ledger.released("run", "north", 1, {"training": EVENT}, **arguments)
    with pytest.raises(BudgetSpentError):
        ledger.released("run", "north", 2, {"training": Gaussian(1.0)}, **arguments)
    assert happened == ["1 paid", "noted: True"]


def test_a_charge_is_on_the_disk_and_the_journal_gone_before_it_is_made(ledger: Ledger) -> None:
    """SQLite's EXTRA: what a power cut could still take back would be released without having been paid for."""
    assert ledger._value("PRAGMA synchronous") == 3
    assert ledger._value("PRAGMA journal_mode") == "delete"


def test_finished_bytes_may_be_sent_again_and_only_those(ledger: Ledger) -> None:
    charge = ledger.charge("run", "north", 1, "training", EVENT, content=None)
    assert not ledger.may_resend("run", "north", 1, "training", "abc")
    ledger.finish(charge, "abc")
    ledger.finish(charge, "abc")
    assert ledger.may_resend("run", "north", 1, "training", "abc")
    assert not ledger.may_resend("run", "north", 1, "training", "xyz")
    assert not ledger.may_resend("run", "north", 2, "training", "abc")
    with pytest.raises(FedloomError, match="already paid for other bytes"):
        ledger.finish(charge, "xyz")


def test_the_budget_is_kept_to_the_last_round(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.enrol("north", "digest", Budget(1.5, 1e-5, "rdp"))
    with pytest.raises(
        BudgetSpentError, match=r"sits out: its budget of epsilon 1.5 .* smaller than the cost of one round, 10"
    ):
        ledger.charge("run", "north", 1, "training", Gaussian(0.5), content=None)
    for round in range(1, 5):
        ledger.charge("run", "north", round, "training", EVENT, content=None)
    with pytest.raises(
        BudgetSpentError, match=r"sits out round 5: release 'training' would raise its epsilon from 1\.425 to 1\.599"
    ):
        ledger.charge("run", "north", 5, "training", EVENT, content=None)
    assert ledger.accounts()[0].spent <= 1.5
    assert len(ledger.events("north")) == 4
    with pytest.raises(BudgetSpentError):
        ledger.charge("other", "north", 1, "training", EVENT, content="another run shares the budget")


def test_events_without_a_guarantee_are_kept_where_nothing_is_promised(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.enrol("north", "digest", Budget(math.inf, 1e-5))
    ledger.charge("run", "north", 1, "training", NoGuarantee("median clipping"), content="a")
    (account,) = ledger.accounts()
    assert (account.spent, account.left) == (math.inf, 0)
    assert account.to_mapping()["spent"] is None


def test_the_statement_tells_what_is_spent_and_left_per_silo_and_release(ledger: Ledger) -> None:
    ledger.enrol("south", "other", Budget(2.0, 1e-6, "rdp"))
    ledger.charge("run", "north", 1, "training", EVENT, content=None)
    ledger.charge("run", "north", 2, "training", EVENT, content=None)
    ledger.charge("run", "north", 2, "class counts", Gaussian(8.0), content=None)
    north, south = read_accounts(ledger.path)
    both = [Gaussian(4.0, 0.2, 20), Gaussian(8.0)]
    assert json.loads(json.dumps(north.to_mapping())) == {
        "silo": "north",
        "data": "digest",
        "epsilon": 50,
        "delta": 1e-5,
        "accountant": "rdp",
        "unit": "record",
        "spent": pytest.approx(BUDGET.spent(both)),
        "replaced": pytest.approx(BUDGET.spent(both, "replaced")),
        "left": pytest.approx(50 - BUDGET.spent(both)),
        "releases": [
            {"name": "class counts", "charges": 1, "spent": pytest.approx(BUDGET.spent(both[1:]))},
            {"name": "training", "charges": 2, "spent": pytest.approx(BUDGET.spent(both[:1]))},
        ],
    }
    assert north.replaced > north.spent
    assert (south.spent, south.replaced, south.left, south.releases) == (0, 0, 2, ())


def test_what_replaced_records_cost_is_not_computed_before_it_is_asked_for(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round charges and looks at accounts; neither may wait for a number that nobody asked for."""
    asked, spent_by = [], Budget.spent

    def noting(budget: Budget, events: Iterable[Event], neighbours: Neighbours = "added") -> float:
        asked.append(neighbours)
        return spent_by(budget, events, neighbours)

    monkeypatch.setattr(Budget, "spent", noting)
    ledger.charge("run", "north", 1, "training", EVENT, content=None)
    (account,) = ledger.accounts()
    assert account.spent > 0
    assert set(asked) == {"added"}
    assert account.replaced == spent_by(BUDGET, [EVENT], "replaced")


def test_a_ledger_of_other_data_or_another_budget_is_refused(ledger: Ledger) -> None:
    ledger.enrol("north", "digest", BUDGET)
    with pytest.raises(FedloomError, match="other data than those of silo 'north'"):
        ledger.enrol("north", "changed", BUDGET)
    with pytest.raises(FedloomError, match=r"grants silo 'north' epsilon 50 .* epsilon 99"):
        ledger.enrol("north", "digest", Budget(99.0, 1e-5, "rdp"))
    with pytest.raises(FedloomError, match=r"grants silo 'north' epsilon 50 at delta 1e-05 .* at delta 0.0001"):
        ledger.enrol("north", "digest", replace(BUDGET, delta=1e-4))
    with pytest.raises(FedloomError, match=r"grants silo 'north' .* by rdp, but .* by pld is asked for"):
        ledger.enrol("north", "digest", replace(BUDGET, accountant="pld"))
    with pytest.raises(GrantError, match=r"keeps account of each record of silo 'north', but privacy.unit = 'subject'"):
        ledger.enrol("north", "digest", replace(BUDGET, unit="subject"))
    with pytest.raises(FedloomError, match="no account for silo 'south'"):
        ledger.charge("run", "south", 1, "training", EVENT, content=None)


def test_a_ledger_that_did_not_note_the_unit_is_read_and_charged_no_more(ledger: Ledger) -> None:
    """As the first version wrote it."""
    ledger.charge("run", "north", 1, "training", EVENT, content=None)
    ledger.close()
    with contextlib.closing(sqlite3.connect(ledger.path)) as older:
        older.execute("ALTER TABLE silos DROP COLUMN unit")
        older.execute("DROP TABLE identity")
        older.execute("PRAGMA user_version = 1")
    before = ledger.path.read_bytes()
    for _ in range(2):
        (account,) = read_accounts(ledger.path)
        assert account.budget == replace(BUDGET, unit="unknown")
        assert account.spent == BUDGET.spent([EVENT])
    assert ledger.path.read_bytes() == before, "whoever reads changes nothing"
    with pytest.raises(GrantError, match=r"begun by an older version, .* records or of subjects of silo 'north'"):
        Ledger(ledger.path).enrol("north", "digest", BUDGET)


def test_whoever_reads_neither_makes_nor_fills_a_ledger(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="cannot use the ledger"):
        Ledger(tmp_path / "nowhere", read_only=True)
    (tmp_path / "empty #?%41").touch()  # signs that mean something in an address
    with pytest.raises(RunFolderError, match="is not a ledger"):
        read_accounts(tmp_path / "empty #?%41")
    assert [(path.name, path.stat().st_size) for path in tmp_path.iterdir()] == [("empty #?%41", 0)]


def test_whoever_reads_cannot_charge(ledger: Ledger) -> None:
    reader = Ledger(ledger.path, read_only=True)
    with pytest.raises(RunFolderError, match="readonly"):
        reader.charge("run", "north", 1, "training", EVENT, content=None)
    ledger.charge("run", "north", 1, "training", EVENT, content=None)
    assert reader.events("north") == [EVENT]


def test_a_charge_that_was_cut_off_is_said_to_be_and_read_once_it_is_ended(ledger: Ledger, tmp_path: Path) -> None:
    """The copy is what a crash between writing pages and committing leaves: pages of the new charge, and a journal."""
    ledger.close()
    writer = sqlite3.connect(ledger.path, isolation_level=None)
    writer.execute("PRAGMA cache_size = 1")  # so that pages are written before the commit
    writer.execute("BEGIN IMMEDIATE")
    writer.execute("INSERT INTO silos VALUES ('south', ?, 1, 1e-5, 'pld', 'record')", ("x" * 100_000,))
    for name in ("ledger.sqlite", "ledger.sqlite-journal"):
        shutil.copy(tmp_path / name, tmp_path / f"cut-{name}")
    writer.close()
    with pytest.raises(RunFolderError, match=r"the last charge to the ledger .*cut-ledger.sqlite was cut off"):
        read_accounts(tmp_path / "cut-ledger.sqlite")
    Ledger(tmp_path / "cut-ledger.sqlite").close()
    assert [account.silo for account in read_accounts(tmp_path / "cut-ledger.sqlite")] == ["north"]


def test_files_that_are_no_ledgers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a database, but long enough to look at " * 30)
    with pytest.raises(RunFolderError, match=r"cannot use the ledger .*text"):
        Ledger(tmp_path / "text")
    for schema in range(4):  # as many as ledgers have had
        with contextlib.closing(sqlite3.connect(tmp_path / f"foreign-{schema}")) as foreign:
            foreign.execute("CREATE TABLE things (name TEXT)")
            foreign.execute(f"PRAGMA user_version = {schema}")
        before = (tmp_path / f"foreign-{schema}").read_bytes()
        for read_only in (False, True):
            with pytest.raises(RunFolderError, match=f"foreign-{schema} is not a ledger"):
                Ledger(tmp_path / f"foreign-{schema}", read_only=read_only)
        assert (tmp_path / f"foreign-{schema}").read_bytes() == before
    with pytest.raises(RunFolderError, match=r"there is no ledger at .*nowhere"):
        read_accounts(tmp_path / "nowhere")
