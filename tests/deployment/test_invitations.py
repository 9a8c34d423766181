"""Another invitation for a silo that is there already: the way back for one whose certificate has ended."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from fedloom.deployment.charter import Charter
from fedloom.deployment.directories import Invitation, ServerDirectory, ServerSettings, SiloDirectory
from fedloom.deployment.keys import make_silo_certificate, read_public_key
from fedloom.engines.remote.rules import RoundRules
from fedloom.errors import ConfigError
from fedloom.runs.files import write_atomically

CHARTER = Charter(name="lungs", address="fed.example.org:8443", silos={"north": "all", "south": "all"}, shape=(3,))


def founded(folder: Path) -> ServerDirectory:
    return ServerDirectory.create(folder, CHARTER, ServerSettings(), RoundRules())


def test_whoever_is_admitted_and_invited_anew_gets_a_certificate_that_holds(tmp_path: Path) -> None:
    server = founded(tmp_path / "server")
    silo = SiloDirectory.create(tmp_path / "north", Invitation.read(server.invitation("north")))
    server.admit(silo.public_key)
    ended = make_silo_certificate(server.keys, "north", read_public_key(silo.public_key)[1], days=-1)
    write_atomically(server.certificate("north"), ended)
    invitation = Invitation.read(server.invite("north"))
    fresh = x509.load_pem_x509_certificate(server.certificate("north").read_bytes())
    assert fresh.not_valid_after_utc > datetime.now(UTC) + timedelta(days=300)
    key = silo.public_key.read_bytes()
    found = silo.invited(invitation)
    assert found.invitation.code == SiloDirectory.open(silo.path).invitation.code == invitation.code
    assert found.public_key.read_bytes() == key
    server.invite("south")
    assert not server.certificate("south").exists(), "who was never admitted gets none"


def test_a_silo_takes_no_invitation_to_something_else(tmp_path: Path) -> None:
    server = founded(tmp_path / "server")
    own = Invitation.read(server.invitation("north"))
    silo = SiloDirectory.create(tmp_path / "north", own)
    others = {
        "another silo": Invitation.read(server.invitation("south")),
        "another authority": replace(own, authority=founded(tmp_path / "other").authority),
        "another charter": replace(own, charter=replace(own.charter, address="elsewhere.example.org:8443")),
    }
    for invitation in others.values():
        with pytest.raises(ConfigError, match="of silo 'north' of federation 'lungs', to which this is no invitation"):
            silo.invited(invitation)
    assert SiloDirectory.open(silo.path).invitation == own
