"""Signed statements of silos that are processes of their own, checked by a process that has nothing but the bundle."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from fedloom.deployment.directories import known_fingerprints
from fedloom.deployment.signing import Signatory
from fedloom.privacy.ledger import read_accounts
from fedloom.privacy.statements import Bundle, read_bundle
from fedloom.runs.folder import RunFolder
from places import DP, Place, private

pytestmark = pytest.mark.system

OFFICER = """\
import json, sys
from pathlib import Path
from fedloom.errors import FedloomError
from fedloom.privacy.statements import read_bundle, verify
try:
    flaws = verify(read_bundle(Path(sys.argv[1])), json.loads(sys.argv[2]))
    print(json.dumps([[each.silo, each.sentence] for each in flaws]))
except FedloomError as error:
    print(json.dumps([["", str(error)]]))
"""


def officer(path: Path, pins: dict[str, str]) -> list[list[str]]:
    """Findings of somebody else, who has the file and the fingerprints that were compared by telephone."""
    call = [sys.executable, "-c", OFFICER, str(path), json.dumps(pins)]
    found: list[list[str]] = json.loads(subprocess.run(call, capture_output=True, text=True, check=True).stdout)
    return found


@pytest.fixture
def agreed(place: Place) -> Iterator[Place]:
    with place.agreeing(private(8.0, "secure")):
        yield place


def test_every_damage_to_what_silos_signed_is_found_by_somebody_else(agreed: Place, tmp_path: Path) -> None:
    place, silos = agreed, sorted(home.name for home in agreed.place.silos)
    pins, file = known_fingerprints(place.place.server.path), tmp_path / "statements.json"
    dp = (*DP[:1], "privacy.epsilon=2.0", *DP[2:])
    older = read_bundle(RunFolder.open(place.run_alone("stated-before", "method.name=fedvae", *dp)).statements)
    folder = RunFolder.open(place.run_alone("stated", "method.name=fedvae", *dp))
    bundle, data = read_bundle(folder.statements), folder.statements.read_bytes()
    first = bundle.statements[0]

    def findings(changed: Bundle | bytes) -> list[list[str]]:
        file.write_bytes(changed if isinstance(changed, bytes) else changed.to_bytes())
        return officer(file, pins)

    assert findings(data) == []
    assert [statement.silo for statement in bundle.statements] == silos
    for statement, home in zip(bundle.statements, sorted(place.place.silos, key=lambda home: home.name), strict=True):
        (account,) = read_accounts(home.path / "ledger.sqlite")
        assert statement.body.events == list(account.events)[2:]
        assert (statement.body.accountant, statement.body.granted.epsilon) == ("pld", account.budget.epsilon)

    for position in range(5, len(data), len(data) // 12):  # any byte
        assert findings(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]) != []
    # A round that is dropped by whoever has the file.
    words = {**first.words, "charges": first.words["charges"][:1], "left": first.words["left"][:1]}
    dropped = bundle.having(replace(first, words=words), bundle.keys[first.silo])
    assert findings(dropped) == [[first.silo, "its signature does not belong to its words and its key"]]
    # An old statement of the same silo, about the same experiment, by the same key.
    replayed = findings(bundle.having(older.statements[0], bundle.keys[first.silo]))
    assert [silos[0], "it is a statement about another run"] in replayed
    # Another silo's key.
    other = findings(replace(bundle, keys={**bundle.keys, silos[0]: bundle.keys[silos[1]]}))
    assert [silo for silo, _ in other] == [silos[0]]
    assert f"{pins[silos[0]]} is known to be its own" in other[0][1]
    # Another charter.
    chartered = findings(replace(bundle, charter={**bundle.charter, "name": "other"}))
    assert chartered == [[silo, "it is a statement about another charter"] for silo in silos]
    # A silo whose clock is a day behind, at the keys' own place: its node signs, and everybody else sees it.
    home = next(home for home in place.place.silos if home.name == silos[0])
    founded = datetime.strptime(first.body.founded, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    late = replace(bundle, asked=(founded + timedelta(days=1)).strftime("%Y-%m-%dT%H:%M:%SZ"))
    behind = Signatory.of(home).signed(late, {**first.words, **late.terms}, founded + timedelta(seconds=1))
    slow = findings(late.having(behind, bundle.keys[silos[0]]))
    assert any(silo == silos[0] and "lies before it was asked for" in sentence for silo, sentence in slow)
    # A silo that is left out; it is asked again, and nobody else is.
    keys = {silo: key for silo, key in bundle.keys.items() if silo != silos[0]}
    partial = replace(bundle, keys=keys, statements=bundle.statements[1:])
    assert findings(partial) == [["", f"silo '{silos[0]}' was drawn for rounds 1, 2 and there is no statement of it"]]
    folder.statements.write_bytes(partial.to_bytes())
    command = [sys.executable, "-m", "fedloom", "resume", str(folder.path), "--federation"]
    again = subprocess.run([*command, str(place.place.server.path)], capture_output=True, text=True, check=True)
    assert again.stdout.startswith(f"nothing is left to resume in {folder.path}")
    whole = read_bundle(folder.statements)
    assert whole.statements[1:] == bundle.statements[1:]
    assert findings(whole) == []
