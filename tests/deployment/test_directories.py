"""Folders of server and silo, the keys in them, and who may join."""

from __future__ import annotations

import re
import ssl
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from fedloom.deployment.charter import Charter
from fedloom.deployment.directories import Invitation, ServerDirectory, ServerSettings, SiloDirectory
from fedloom.deployment.joining import Joining
from fedloom.deployment.keys import make_authority, make_server_certificate, read_public_key
from fedloom.deployment.status import silo_status
from fedloom.engines.remote.rules import RoundRules
from fedloom.errors import ConfigError, FedloomError, RunFolderError
from support import names_in

SILOS = {"north": "all", "south": "all"}


@pytest.fixture
def server(tmp_path: Path) -> ServerDirectory:
    charter = Charter(name="lungs", address="fed.example.org:8443", silos=SILOS, shape=(3,))
    return ServerDirectory.create(tmp_path / "server", charter, ServerSettings(listen="4321"), RoundRules(minimum=2))


def silo_of(server: ServerDirectory, name: str) -> SiloDirectory:
    invitation = Invitation.read(server.path / "invitations" / f"{name}.toml")
    return SiloDirectory.create(server.path.parent / name, invitation)


def test_a_server_finds_its_folder_as_it_was_made(server: ServerDirectory) -> None:
    found = ServerDirectory.open(server.path)
    assert (found.charter, found.settings, found.rules) == (server.charter, server.settings, server.rules)
    assert found.listening == "[::]:4321"
    assert found.rules.minimum == 2
    text = (server.path / "federation.toml").read_text().replace("[server]", "[server]\nport = 9092")
    (server.path / "federation.toml").write_text(text)  # as an earlier version wrote it
    assert ServerDirectory.open(server.path).settings == server.settings


def test_what_was_founded_for_the_wire_flower_is_told_how_to_go_on(server: ServerDirectory, tmp_path: Path) -> None:
    """Its charter names that wire, or none where it is older still; a silo's ledger can be read as ever."""
    silo = silo_of(server, "north")
    sentence = "names the wire 'flower', whose servers fedloom does not run any more: found the federation anew with"
    for wire in ('wire = "flower"\n', ""):
        for path in (server.path / "federation.toml", silo.path / "silo.toml", server.invitation("south")):
            path.write_text(re.sub('wire = "[a-z]+"\n', wire, path.read_text()))
        with pytest.raises(ConfigError, match=sentence):
            ServerDirectory.open(server.path)
        with pytest.raises(ConfigError, match=sentence):
            silo_of(server, "south")
        with pytest.raises(ConfigError, match=sentence), Joining(SiloDirectory.open(silo.path), tmp_path, print):
            pass
        assert silo_status(SiloDirectory.open(silo.path))["joined"] is False


def test_the_server_certificate_holds_for_its_host_and_for_loopback(server: ServerDirectory) -> None:
    certificate = x509.load_pem_x509_certificate((server.keys / "server.crt").read_bytes())
    authority = x509.load_pem_x509_certificate((server.keys / "ca.crt").read_bytes())
    certificate.verify_directly_issued_by(authority)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fed.example.org", "localhost"]
    assert [str(name) for name in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    ssl.create_default_context(cafile=str(server.keys / "ca.crt")).load_verify_locations(str(server.keys / "ca.crt"))


@pytest.mark.parametrize(("days", "valid"), [(10, True), (-1, False)])
def test_a_certificate_ends_when_it_should(tmp_path: Path, days: int, valid: bool) -> None:
    make_authority(tmp_path, "x")
    make_server_certificate(tmp_path, "h", days)
    certificate = x509.load_pem_x509_certificate((tmp_path / "server.crt").read_bytes())
    assert certificate.not_valid_before_utc < certificate.not_valid_after_utc
    now = x509.load_pem_x509_certificate((tmp_path / "ca.crt").read_bytes()).not_valid_before_utc
    assert (certificate.not_valid_after_utc > now) is valid


def test_private_keys_are_for_their_owner_and_travel_nowhere(server: ServerDirectory) -> None:
    silo = silo_of(server, "north")
    assert all(stat.S_IMODE(home.path.stat().st_mode) == 0o700 for home in (server, silo))
    secret = {silo.path / "node.key": (silo.path / "node.key").read_bytes()}
    secret |= {path: path.read_bytes() for path in (server.keys / "ca.key", server.keys / "server.key")}
    for path, key in secret.items():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        elsewhere = [file for file in server.path.parent.rglob("*") if file.is_file() and file != path]
        middle = key.splitlines()[2]
        assert all(middle not in file.read_bytes() for file in elsewhere)


def test_a_silo_is_admitted_by_its_public_key(server: ServerDirectory) -> None:
    silo = silo_of(server, "north")
    assert server.keys_admitted() == {}
    name, found = server.admit(silo.public_key)
    assert name == "north"
    assert len(found.replace(" ", "")) == 32
    assert list(server.keys_admitted()) == ["north"]
    public = load_ssh_public_key(server.keys_admitted()["north"])
    private = load_ssh_private_key((silo.path / "node.key").read_bytes(), None)
    assert private.public_key() == public  # type: ignore[union-attr]


def test_keys_of_strangers_are_refused(server: ServerDirectory, tmp_path: Path) -> None:
    silo = silo_of(server, "north")
    _, line = read_public_key(silo.public_key)
    stranger = tmp_path / "key.pub"
    stranger.write_bytes(line + b" fedloom:west\n")
    with pytest.raises(ConfigError, match="unknown silo 'west'"):
        server.admit(stranger)
    for text in (b"", b"ssh-rsa AAAA x", line + b" somebody\n", b"ecdsa-sha2-nistp384 AAAA fedloom:north"):
        stranger.write_bytes(text)
        with pytest.raises(ConfigError, match="is no public key that 'fedloom federation enroll' made"):
            server.admit(stranger)
    assert server.keys_admitted() == {}


def test_a_new_silo_agrees_to_nothing(server: ServerDirectory) -> None:
    silo = SiloDirectory.open(silo_of(server, "south").path)
    assert silo.name == "south"
    assert silo.policy().methods == ()
    assert silo.policy().privacy == "dp-sgd"
    assert names_in(silo.path) == ["approvals", "ca.crt", "logs", "node.key", "node.pub", "policy.toml", "silo.toml"]


def test_no_folder_is_taken_twice(server: ServerDirectory) -> None:
    silo_of(server, "north")
    with pytest.raises(RunFolderError, match="exists already and is not empty"):
        silo_of(server, "north")


@pytest.mark.parametrize("open_home", [ServerDirectory.open, SiloDirectory.open])
def test_another_folder_is_no_home(tmp_path: Path, open_home: object) -> None:
    with pytest.raises(FedloomError, match="is not a"):
        open_home(tmp_path)  # type: ignore[operator]


def test_an_invitation_says_what_it_lacks(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text("silo = 'north'\n")
    with pytest.raises(ConfigError, match="is no invitation: it lacks 'charter'"):
        Invitation.read(path)
