"""Where server and silo keep what belongs to a federation: two folders, each on the machine of its owner."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import tomli_w

from fedloom.deployment.charter import Charter
from fedloom.deployment.doors import Door
from fedloom.deployment.keys import (
    code_key,
    make_authority,
    make_code,
    make_node_key,
    make_server_certificate,
    make_silo_certificate,
    read_public_key,
)
from fedloom.deployment.policy import Policy, policy_text
from fedloom.engines.remote.rules import RoundRules
from fedloom.errors import ConfigError, RunFolderError, unknown
from fedloom.operations.trail import AUDIT, Trail
from fedloom.privacy.signatures import fingerprint
from fedloom.runs.files import explained, write_atomically
from fedloom.settings import parse, read_toml

FEDERATION, SILO, POLICY = "federation.toml", "silo.toml", "policy.toml"
HEADING = """\
# A federation: its charter, which every invitation carries, and below it what concerns the server alone.
# An invitation that has been sent is not changed by what is changed here.
"""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What concerns the server alone."""

    listen: str = ""  # where the hub listens, host:port or port; empty: the port of the address, on every interface
    public_set: str = ""  # an .npz file of records that belong to nobody, to measure the run on


@dataclass(frozen=True)
class ServerDirectory:
    """The coordinator's folder: charter, keys, admitted silos, and what is on its way to them."""

    path: Path

    @classmethod
    def create(cls, path: Path, charter: Charter, settings: ServerSettings, rules: RoundRules) -> ServerDirectory:
        """A new federation: authority, server certificate, one invitation for each silo."""
        charter.require_direct(path)
        _new(path)
        home = cls(path)
        path.chmod(0o700)
        tree = {"charter": charter.to_mapping(), "server": asdict(settings), "rounds": asdict(rules)}
        for folder in (home.keys, path / "invitations", home.admitted, home.pending, home.logs):
            folder.mkdir()
        home.keys.chmod(0o700)
        make_authority(home.keys, charter.name)
        make_server_certificate(home.keys, charter.host)
        write_atomically(path / FEDERATION, (HEADING + tomli_w.dumps(tree)).encode())
        for silo in charter.silos:
            home.invite(silo)
        return home

    @classmethod
    def open(cls, path: Path) -> ServerDirectory:
        """The federation that lies in a folder already; its file is checked."""
        if not (path / FEDERATION).is_file():
            raise ConfigError(f"{path} is not a federation's folder: it holds no {FEDERATION}; see 'federation init'")
        home = cls(path)
        home.charter.require_direct(path)
        _ = home.settings, home.rules
        return home

    @cached_property
    def _tree(self) -> dict[str, Any]:
        return read_toml(self.path / FEDERATION)

    @cached_property
    def charter(self) -> Charter:
        """The terms that every invitation carries, and the silos by name."""
        return Charter.of(self._tree.get("charter", {}))

    @cached_property
    def settings(self) -> ServerSettings:
        """The server's own settings."""
        tree = dict(self._tree.get("server", {}))
        tree.pop("port", None)  # of an earlier version, whose SuperLink listened there
        return parse(ServerSettings, tree, "server")

    @cached_property
    def rules(self) -> RoundRules:
        """How long rounds wait, and for whom."""
        return parse(RoundRules, self._tree.get("rounds", {}), "rounds")

    @property
    def keys(self) -> Path:
        """Certificates and private keys of authority and server."""
        return self.path / "keys"

    @property
    def admitted(self) -> Path:
        """Public keys of the silos that may join."""
        return self.path / "admitted"

    @property
    def pending(self) -> Path:
        """Public keys of those who were invited, and ask to be admitted."""
        return self.path / "pending"

    @property
    def post(self) -> Path:
        """Orders and answers that are on their way."""
        return self.path / "post"

    @property
    def door(self) -> Door:
        """Where its hub is reached on this machine."""
        return Door(self.path / "door")

    @property
    def listening(self) -> str:
        """Where it takes calls of silos, host:port."""
        listen = self.settings.listen or str(self.charter.port)
        return listen if ":" in listen else f"[::]:{listen}"

    def invitation(self, silo: str) -> Path:
        """The file that invites a silo."""
        return self.path / "invitations" / f"{silo}.toml"

    def certificate(self, silo: str) -> Path:
        """The newest certificate of a silo that was admitted."""
        return self.admitted / f"{silo}.crt"

    def invite(self, silo: str) -> Path:
        """A new invitation, which makes the silo's older ones worthless, with a one-time code."""
        self.charter.index(silo)
        if line := self.key_admitted(silo):
            # Whoever is admitted needs another invitation because its certificate has ended.
            write_atomically(self.certificate(silo), make_silo_certificate(self.keys, silo, line))
        code = make_code(self.keys, silo)
        path = self.invitation(silo)
        write_atomically(path, Invitation(silo, self.charter, self.authority, code).to_toml().encode(), 0o600)
        (self.pending / f"{silo}.pub").unlink(missing_ok=True)
        return path

    def asking(self) -> dict[str, str]:
        """The fingerprint of each silo's key that waits to be admitted."""
        return {
            silo: fingerprint(read_public_key(path)[1])
            for silo in self.charter.silos
            if (path := self.pending / f"{silo}.pub").is_file()
        }

    def revoke(self, silo: str) -> None:
        """Take an admission back: the silo's key and certificate are worth nothing from now on."""
        self.charter.index(silo)
        for path in (self.admitted / f"{silo}.pub", self.certificate(silo), self.pending / f"{silo}.pub"):
            path.unlink(missing_ok=True)
        self.invitation(silo).unlink(missing_ok=True)
        Trail(self.path / AUDIT).note("taken back", {"silo": silo})

    def renew(self) -> datetime:
        """New certificates of the server and of all admitted silos, which fetch theirs; returns when they expire."""
        ends = make_server_certificate(self.keys, self.charter.host)
        Trail(self.path / AUDIT).note("renewed", {"until": f"{ends:%Y-%m-%d}"})
        for silo, line in self.keys_admitted().items():
            write_atomically(self.certificate(silo), make_silo_certificate(self.keys, silo, line))
        return ends

    @property
    def logs(self) -> Path:
        """Where the server's processes write what they have to say."""
        return self.path / "logs"

    @property
    def authority(self) -> str:
        """The certificate of the authority that signed the server's."""
        return (self.keys / "ca.crt").read_text(encoding="utf-8")

    def admit(self, key: Path) -> tuple[str, str]:
        """Let the holder of a key join as the silo that it names; returns that name and the key's fingerprint."""
        silo, line = read_public_key(key)
        if silo not in self.charter.silos:
            raise ConfigError(f"{key}: " + unknown("silo", silo, self.charter.silos))
        Trail(self.path / AUDIT).note("admitted", {"silo": silo, "key": fingerprint(line)})
        write_atomically(self.certificate(silo), make_silo_certificate(self.keys, silo, line))
        write_atomically(self.admitted / f"{silo}.pub", line + b"\n")
        (self.pending / f"{silo}.pub").unlink(missing_ok=True)
        return silo, fingerprint(line)

    def key_admitted(self, silo: str) -> bytes:
        """The public key of a silo, as one line; empty while it is not admitted."""
        path = self.admitted / f"{silo}.pub"
        return path.read_bytes().strip() if path.is_file() else b""

    def keys_admitted(self) -> dict[str, bytes]:
        """The public key of each silo that was admitted."""
        return {silo: key for silo in self.charter.silos if (key := self.key_admitted(silo))}


@dataclass(frozen=True)
class Invitation:
    """What a silo is told to join with; it must come from the right hands.

    Its one-time code lets whoever has it ask to be admitted, and do nothing else. The coordinator admits a key whose
    fingerprint the silo has told by another way.
    """

    silo: str
    charter: Charter
    authority: str  # certificate
    code: str = ""

    def to_toml(self) -> str:
        """The text of the file that the coordinator sends."""
        code = {"code": self.code} if self.code else {}
        tree = {"silo": self.silo, "authority": self.authority, **code, "charter": self.charter.to_mapping()}
        return tomli_w.dumps(tree, multiline_strings=True)

    @classmethod
    def read(cls, path: Path) -> Invitation:
        """The invitation in a file; the silo must be one of its charter."""
        tree = read_toml(path)
        try:
            code = str(tree.get("code", ""))
            invitation = cls(str(tree["silo"]), Charter.of(tree["charter"]), str(tree["authority"]), code)
        except (KeyError, TypeError) as error:
            raise ConfigError(f"{path} is no invitation: it lacks {error}") from error
        invitation.charter.index(invitation.silo)
        return invitation

    @property
    def fingerprint(self) -> str:
        """Of the authority, to compare with the coordinator's."""
        return fingerprint(self.authority.encode())

    @property
    def code_key(self) -> bytes:
        """The public key of its code."""
        return code_key(self.code)


@dataclass(frozen=True)
class SiloDirectory:
    """A silo's folder: its key, its policy, its ledger, its own reports."""

    path: Path

    @classmethod
    def create(cls, path: Path, invitation: Invitation) -> SiloDirectory:
        """Accept an invitation: the silo's key is made here and never leaves."""
        invitation.charter.require_direct(path)
        _new(path)
        home = cls(path)
        path.chmod(0o700)
        write_atomically(path / "ca.crt", invitation.authority.encode())
        make_node_key(path, invitation.silo)
        write_atomically(path / POLICY, policy_text().encode())
        write_atomically(path / SILO, invitation.to_toml().encode())
        home.logs.mkdir()
        (path / "approvals").mkdir()
        return home

    @classmethod
    def is_at(cls, path: Path) -> bool:
        """Whether a folder is a silo's."""
        return (path / SILO).is_file()

    @classmethod
    def open(cls, path: Path) -> SiloDirectory:
        """The silo that lies in a folder already; its invitation and policy are checked."""
        if not cls.is_at(path):
            raise ConfigError(f"{path} is not a silo's folder: it holds no {SILO}; see 'federation enroll'")
        home = cls(path)
        _ = home.invitation, home.policy()
        return home

    def invited(self, invitation: Invitation) -> SiloDirectory:
        """The same silo by another invitation: by its code it asks for a certificate where its own has ended."""
        if replace(invitation, code="") != replace(self.invitation, code=""):
            whose = f"silo '{self.name}' of federation '{self.invitation.charter.name}'"
            raise ConfigError(f"{self.path} is of {whose}, to which this is no invitation; choose another --out")
        write_atomically(self.path / SILO, invitation.to_toml().encode())
        return SiloDirectory(self.path)

    @cached_property
    def invitation(self) -> Invitation:
        """What it was invited to."""
        return Invitation.read(self.path / SILO)

    @property
    def name(self) -> str:
        """The silo's name, as the charter has it."""
        return self.invitation.silo

    def policy(self) -> Policy:
        """What it agrees to, as its file says now."""
        return Policy.of(read_toml(self.path / POLICY))

    @property
    def lock(self) -> Path:
        """Held while it has joined."""
        return self.path / "joined.lock"

    @property
    def settled(self) -> tuple[Path, ...]:
        """What its operator alone changes."""
        return tuple(self.path.resolve() / name for name in (SILO, POLICY, "ca.crt", "node.pub", "logs", "approvals"))

    @property
    def public_key(self) -> Path:
        """The key that the coordinator needs to admit the silo."""
        return self.path / "node.pub"

    @property
    def certificate(self) -> Path:
        """Shows the server whose the silo's key is, once it is admitted."""
        return self.post / "node.crt"

    @property
    def post(self) -> Path:
        """Orders and answers that are on their way."""
        return self.path / "post"

    @property
    def logs(self) -> Path:
        """Where the silo's processes write what they have to say."""
        return self.path / "logs"


def known_fingerprints(path: Path) -> dict[str, str]:
    """The fingerprints of silos' keys as a folder knows them: a server's of those admitted, a silo's of its own."""
    if SiloDirectory.is_at(path):
        silo, line = read_public_key(SiloDirectory.open(path).public_key)
        return {silo: fingerprint(line)}
    return {silo: fingerprint(line) for silo, line in ServerDirectory.open(path).keys_admitted().items()}


def _new(path: Path) -> None:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise RunFolderError(f"{path} exists already and is not empty; choose another folder")
    with explained(path):
        path.mkdir(parents=True, exist_ok=True)
