"""A ledger that vanishes, goes back, or is doubled is missed; what the registry knows tells nobody of records."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import shutil
import sqlite3
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fedloom.errors import FedloomError, RunFolderError
from fedloom.federation.records import Records, Silo
from fedloom.privacy.accounting import Budget
from fedloom.privacy.deployment import data_ledger
from fedloom.privacy.ledger import GrantError, Ledger, read_accounts
from fedloom.privacy.registry import SKETCH, LedgerRegistry, RegisteredLedger, overlap, registry_folder
from privacy.sqlite_faults import EVENT


def silo_of(x: Tensor, name: str = "north") -> Silo:
    return Silo(name, Records(x, torch.zeros(len(x), dtype=torch.int64), torch.zeros(len(x), dtype=torch.int64)))


def numbered(*numbers: int) -> Tensor:
    """A record for each number, unlike all others."""
    return torch.tensor(numbers, dtype=torch.float32).unsqueeze(1)


SILO = silo_of(numbered(*range(40)))
OTHER = silo_of(numbered(*range(100, 140)), "south")


def opened(path: Path, silo: Silo = SILO) -> Ledger:
    return data_ledger(path, silo, 50.0, 1e-5)


def spend(path: Path, silo: Silo = SILO, run: str = "run") -> None:
    """One round's charge, in a process that ends well."""
    ledger = opened(path, silo)
    ledger.charge(run, silo.name, 1, "update", EVENT, content=None)
    ledger.close()


def charged(path: Path) -> int:
    return sum(release.charges for account in read_accounts(path) for release in account.releases)


def entries() -> list[RegisteredLedger]:
    with contextlib.closing(LedgerRegistry()) as registry:
        return registry.entries()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A ledger with two charges."""
    found = tmp_path / "silo" / "ledger.sqlite"
    found.parent.mkdir()
    spend(found)
    spend(found)
    return found


def test_the_registry_follows_every_charge(path: Path, registry: Path) -> None:
    (entry,) = entries()
    assert (entry.path, entry.silo, entry.charges) == (path, "north", 2)
    assert (entry.ledger, entry.head) == (Ledger(path).identity, Ledger(path).chain().heads[2])
    spend(path)
    assert [entry.charges for entry in entries()] == [3]
    assert registry_folder() == registry


def test_a_ledger_is_known_from_its_beginning(tmp_path: Path) -> None:
    """Else two that are begun at once would each be charged from nothing."""
    path = tmp_path / "ledger.sqlite"
    opened(path).close()
    assert [(entry.path, entry.charges, entry.head) for entry in entries()] == [
        (path, 0, Ledger(path).chain().heads[0])
    ]
    with pytest.raises(GrantError, match="would be a second ledger"):
        opened(tmp_path / "second.sqlite")


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("emptied", [False, True])
def test_a_ledger_that_was_deleted_does_not_begin_anew(path: Path, elsewhere: bool, emptied: bool) -> None:
    path.unlink()
    if emptied:
        path.touch()
    other = path.with_name("other.sqlite") if elsewhere else path
    sentence = (
        f"the ledger of the records of silo 'north' is gone from {path}, and a new one at {other} would begin their "
        f"budget anew: put it back, or give up what it counted: fedloom ledger --forget {path}"
    )
    if elsewhere and emptied:
        sentence = f"{other} would be a second ledger of the records"  # an empty file may be one that cannot be read
    for _ in range(2):
        with pytest.raises(GrantError) as caught:
            opened(other)
        assert str(caught.value).startswith(sentence)
        assert not (elsewhere and other.exists()), "nothing is made where nothing may be"
        assert emptied or not path.exists()


def test_another_name_for_the_same_records_has_no_budget_of_its_own(path: Path) -> None:
    """In the ledger that they have, where it lies and moved to another silo's folder."""
    for ledger in (path, path.with_name("moved.sqlite")):
        if ledger != path:
            opened(Path(shutil.move(path, ledger))).close()
        with pytest.raises(GrantError, match=r"would be a second ledger of records .*100 % of those of silo 'south'"):
            opened(ledger, replace(SILO, name="south"))
        assert [account.silo for account in read_accounts(ledger)] == ["north"]


def test_a_ledger_that_was_given_up_may_begin_anew(path: Path) -> None:
    path.unlink()
    with contextlib.closing(LedgerRegistry()) as registry:
        (struck,) = registry.forget(path)
        assert struck.charges == 2
        with pytest.raises(FedloomError, match=f"no ledger at {path} is registered in"):
            registry.forget(path)
    spend(path)
    assert [entry.charges for entry in entries()] == [1]


def test_to_give_up_one_ledger_leaves_the_others(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.sqlite"
    spend(other, OTHER)
    with contextlib.closing(LedgerRegistry()) as registry:
        registry.forget(path)
    assert [(entry.silo, entry.path) for entry in entries()] == [("south", other)]


def test_an_older_copy_in_its_place_is_refused(path: Path) -> None:
    older = Path(shutil.copy(path, path.with_name("backup")))
    spend(path)
    newest = path.read_bytes()
    older.replace(path)
    with pytest.raises(GrantError, match=f"{path}, with 2 charges, is older than the ledger that was at {path} with 3"):
        opened(path)
    behind = Ledger(path)  # somebody who tells the registry nothing makes up for what is missing, but not with the same
    behind.charge("another", "north", 1, "update", EVENT, content=None)
    behind.close()
    with pytest.raises(GrantError, match=f"{path}, with 3 charges, is older than .* with 3: put the newest one back"):
        opened(path)
    path.write_bytes(newest)
    spend(path)
    assert charged(path) == 4


def test_a_second_ledger_of_the_same_records_is_refused(path: Path, tmp_path: Path) -> None:
    second = tmp_path / "second.sqlite"
    with pytest.raises(GrantError, match=f"{second} would be a second ledger of the records .* which {path} keeps"):
        opened(second)
    with pytest.raises(GrantError, match=f"{second} would be a second ledger of records that {path} .* about 100 % of"):
        opened(second, replace(SILO, name="in another federation"))
    with pytest.raises(GrantError, match=r"about 100 %"):
        opened(second, silo_of(SILO.train.x.flip(0)))
    assert not second.exists()
    spend(second, OTHER)
    assert [entry.silo for entry in entries()] == ["south", "north"]


@pytest.mark.parametrize(("common", "refused"), [(1, False), (2, True)])
def test_five_percent_of_the_records_are_too_many(path: Path, tmp_path: Path, common: int, refused: bool) -> None:
    silo = silo_of(numbered(*range(40 - common, 80 - common)), "south")
    expected = pytest.raises(GrantError, match=r"about 5 % of those of silo 'south'") if refused else None
    with expected or contextlib.nullcontext():
        spend(tmp_path / "second.sqlite", silo)
    assert len(entries()) == 2 - refused


def test_the_same_pictures_are_the_same_however_they_are_stored(tmp_path: Path) -> None:
    pictures = torch.arange(40, dtype=torch.uint8).reshape(10, 1, 2, 2)
    spend(tmp_path / "one.sqlite", silo_of(pictures))
    with pytest.raises(GrantError, match="about 100 %"):
        opened(tmp_path / "two.sqlite", silo_of((pictures / 255).flatten(1), "south"))


def test_sketches_find_a_small_set_in_a_large_one() -> None:
    """A tenth of a small set's records lie in one 40 times as large; each sketch alone would see 1 in 400."""
    hashes = np.random.default_rng(3).integers(0, 2**63, 40_000 + 1_000, dtype=np.uint64)
    large, small = hashes[:40_000], hashes[39_900:40_900]
    sketches = [np.unique(part)[:SKETCH] for part in (large, small)]
    reach = int(sketches[0][-1])
    sample = small[small <= reach]
    assert 15 < len(sample) < 40
    assert overlap(*sketches) == overlap(*reversed(sketches)) == np.isin(sample, large).mean()
    assert 0 < overlap(*sketches) < 0.3
    assert overlap(sketches[0], sketches[0]) == 1
    assert overlap(sketches[0], np.unique(hashes[40_000:])) == 0
    assert overlap(sketches[1], np.array([], dtype=np.uint64)) == 0


@pytest.mark.parametrize("silo", [SILO, OTHER], ids=["its own records", "others"])
def test_a_copy_is_refused_while_the_original_is_there(path: Path, tmp_path: Path, silo: Silo) -> None:
    copy = Path(shutil.copy(path, tmp_path / "copy.sqlite"))
    with pytest.raises(GrantError, match=f"{copy} is a copy of {path}, which is still there, and each would spend"):
        opened(copy, silo)
    assert [account.silo for account in read_accounts(copy)] == ["north"]


def test_a_ledger_that_was_moved_is_found(path: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved.sqlite"
    backup = shutil.copy(path, tmp_path / "backup.sqlite")
    path.rename(moved)
    spend(path, OTHER)  # another silo has taken its place
    spend(moved)
    assert {(entry.silo, entry.path, entry.charges) for entry in entries()} == {("north", moved, 3), ("south", path, 1)}
    shutil.copy(backup, path)
    with pytest.raises(GrantError, match=f"{path} is a copy of {moved}"):
        opened(path)
    moved.unlink()
    with pytest.raises(GrantError, match=f"{path}, with 2 charges, is older than the ledger that was at {moved}"):
        opened(path)


def test_a_ledger_that_cannot_be_read_counts_as_there(path: Path, tmp_path: Path) -> None:
    copy = shutil.copy(path, tmp_path / "copy.sqlite")
    path.write_bytes(b"no ledger any more" * 100)
    with pytest.raises(GrantError, match="is a copy of"):
        opened(copy)


def test_a_ledger_of_two_silos_is_followed_in_both(path: Path) -> None:
    spend(path, OTHER)
    assert {(entry.silo, entry.charges) for entry in entries()} == {("north", 3), ("south", 3)}
    with contextlib.closing(LedgerRegistry()) as registry:
        assert len(registry.forget(path)) == 2


def test_two_who_have_the_ledger_open_do_not_take_each_other_for_a_copy(path: Path) -> None:
    one, other = opened(path), opened(path)
    for number, ledger in enumerate((one, other, one, one, other)):
        ledger.charge("run", "north", 2 + number, "update", EVENT, content=None)
    assert [entry.charges for entry in entries()] == [7]


def test_a_charge_of_another_process_in_between_is_no_loss(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes after the registry was opened, and just before it is this process's turn there."""
    one, others, transaction = opened(path), [opened(path)], LedgerRegistry._transaction
    turns = itertools.count(1)

    def late(registry: LedgerRegistry) -> contextlib.AbstractContextManager[None]:
        if next(turns) == 3:  # after making the tables and the key
            others[0].charge("another", "north", 1, "update", EVENT, content=None)
        return transaction(registry)

    monkeypatch.setattr(LedgerRegistry, "_transaction", late)
    one.charge("run", "north", 2, "update", EVENT, content=None)
    assert [entry.charges for entry in entries()] == [4]


STEPS = (
    (Ledger, "enrol"),
    (Ledger, "rebind"),
    (LedgerRegistry, "bind"),
    (LedgerRegistry, "check"),
    (LedgerRegistry, "register"),
)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("owner", "name"), STEPS, ids=[name for _, name in STEPS])
@pytest.mark.parametrize("older", [False, True])
def test_a_crash_while_a_ledger_is_begun_leaves_what_can_go_on(
    tmp_path: Path, owner: type, name: str, late: bool, older: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, step = tmp_path / "ledger.sqlite", getattr(owner, name)
    if older:
        with contextlib.closing(Ledger(path)) as ledger:
            ledger.enrol("north", SILO.digest, Budget(50.0, 1e-5, "filter"))
            ledger.charge("before", "north", 1, "update", EVENT, content=None)

    def crashing(*arguments: object, **options: object) -> None:
        if late:
            step(*arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, crashing)
        if older or name != "rebind":
            with pytest.raises(KeyboardInterrupt):
                opened(path)
    spend(path)
    assert [(entry.path, entry.charges) for entry in entries()] == [(path, charged(path))]
    assert charged(path) == 1 + older


@pytest.mark.parametrize("late", [False, True])
def test_a_crash_between_ledger_and_registry_releases_nothing(
    path: Path, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger may lead by what was not released, so that even a copy from before the charge loses nothing."""
    before, register = path.read_bytes(), LedgerRegistry.register
    ledger = opened(path)

    def crashing(registry: LedgerRegistry, silo: Silo, moved: Ledger) -> None:
        if late:
            register(registry, silo, moved)
        raise KeyboardInterrupt

    def make() -> bytes:
        pytest.fail("something was made that the registry does not know of")

    with monkeypatch.context() as patch:
        patch.setattr(LedgerRegistry, "register", crashing)
        with pytest.raises(KeyboardInterrupt):
            ledger.released("run", "north", 2, {"update": EVENT}, content=None, stored=None, make=make, store=print)
    ledger.close()
    assert charged(path) == 3
    assert [entry.charges for entry in entries()] == [3 if late else 2]
    after = path.read_bytes()
    path.write_bytes(before)
    with pytest.raises(GrantError, match="is older") if late else contextlib.nullcontext():
        opened(path).close()
    path.write_bytes(after)
    spend(path)
    assert [entry.charges for entry in entries()] == [4]


def made_by_schema(path: Path, schema: int) -> None:
    """As an older version left the ledger: with the plain digest, and without what it did not know of."""
    with contextlib.closing(Ledger(path)) as ledger:
        ledger.enrol("north", SILO.digest, Budget(50.0, 1e-5, "filter"))
        ledger.charge("before", "north", 1, "update", EVENT, content=None)
    with contextlib.closing(sqlite3.connect(path)) as older:
        older.execute("DROP TABLE identity")
        if schema == 1:
            older.execute("ALTER TABLE silos DROP COLUMN unit")
        older.execute(f"PRAGMA user_version = {schema}")
        older.execute("VACUUM")


def test_an_older_ledger_goes_on_with_a_keyed_digest(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    made_by_schema(path, 2)
    before = path.read_bytes()
    assert SILO.digest.encode() in before
    assert [account.data for account in read_accounts(path)] == [SILO.digest]
    assert Ledger(path, read_only=True).identity == ""
    assert path.read_bytes() == before, "whoever reads changes nothing"
    spend(path)
    assert [entry.charges for entry in entries()] == [2]
    (account,) = read_accounts(path)
    with contextlib.closing(LedgerRegistry()) as registry:
        assert account.data == registry.digest(SILO)
    assert account.budget == Budget(50.0, 1e-5, "filter")
    assert SILO.digest.encode() not in path.read_bytes()
    vandal = sqlite3.connect(path)
    for change in ("UPDATE silos SET data = ''", "UPDATE identity SET ledger = ''", "DELETE FROM identity"):
        with pytest.raises(sqlite3.IntegrityError, match="for good"):
            vandal.execute(change)


def test_an_older_ledger_of_other_data_stays_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    made_by_schema(path, 2)
    with pytest.raises(GrantError, match="keeps account of other data than those of silo 'north'"):
        opened(path, replace(OTHER, name="north"))
    assert [account.data for account in read_accounts(path)] == [SILO.digest]
    assert entries() == []


def test_a_ledger_of_the_first_version_gets_an_identity_and_no_charge(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    made_by_schema(path, 1)
    with pytest.raises(GrantError, match="was begun by an older version"):
        opened(path)
    assert len(Ledger(path, read_only=True).identity) == 32
    assert charged(path) == 1


def test_digests_are_told_by_nobody_without_the_key(path: Path, registry: Path, tmp_path: Path) -> None:
    """Whoever guesses the records can hash them, but finds nothing of that in either file."""
    (account,) = read_accounts(path)
    plain = hashlib.blake2b(SILO.train.x[7].numpy().tobytes(), digest_size=8).digest()
    for file in (path, registry / "registry.sqlite"):
        content = file.read_bytes()
        assert account.data.encode() in content
        assert SILO.digest.encode() not in content
        assert bytes.fromhex(SILO.digest) not in content
        assert plain not in content
        assert (registry / "registry.key").read_bytes() not in content
    with contextlib.closing(LedgerRegistry(tmp_path / "of another user")) as other:
        assert other.digest(SILO).rpartition(":")[2] != account.data.rpartition(":")[2]
        assert other.digest(SILO) == other.digest(silo_of(SILO.train.x.clone()))
        assert not np.intersect1d(other._sketch(SILO), np.frombuffer(entries()[0].sketch, np.uint64)).size


def test_the_registry_is_its_owners_alone(path: Path, registry: Path) -> None:
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (registry, *registry.iterdir())}
    assert modes == {registry.name: 0o700, "registry.sqlite": 0o600, "registry.key": 0o600}


def test_a_registry_without_its_key_is_refused(path: Path, registry: Path) -> None:
    key = registry / "registry.key"
    before = key.read_bytes()
    key.write_bytes(bytes(32))
    with pytest.raises(RunFolderError, match=r"registry.key is not the key that the registry .* was begun with"):
        opened(path)
    key.unlink()
    with pytest.raises(RunFolderError, match=r"cannot use the registry's key .*registry.key: No such file"):
        opened(path)
    key.write_bytes(before)
    spend(path)


def test_a_registry_that_was_lost_is_made_again_from_its_key(path: Path, registry: Path) -> None:
    (registry / "registry.sqlite").unlink()
    spend(path)
    assert [entry.charges for entry in entries()] == [3]


def test_a_ledger_from_another_machine_asks_for_its_registry(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLOOM_REGISTRY", str(path.parent / "new machine"))
    with pytest.raises(GrantError, match=r"by the key of another registry than .*new machine; bring the folder"):
        opened(path)
    assert entries() == []


def test_the_registry_lies_with_the_users_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FEDLOOM_REGISTRY")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert registry_folder() == tmp_path / ".local" / "state" / "fedloom"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert registry_folder() == tmp_path / "state" / "fedloom"


def test_a_folder_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEDLOOM_REGISTRY", str(tmp_path / "file" / "below"))
    with pytest.raises(RunFolderError, match=r"cannot use the registry's folder .*below: Not a directory"):
        opened(tmp_path / "ledger.sqlite")
    assert not (tmp_path / "ledger.sqlite").exists()
