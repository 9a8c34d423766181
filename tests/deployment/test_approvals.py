"""Experiments that people at a silo have to sign before they run there."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from fedloom.deployment.approvals import approvals_objection, approve
from fedloom.deployment.charter import Charter
from fedloom.deployment.directories import Invitation, SiloDirectory
from fedloom.deployment.policy import Policy
from fedloom.errors import ConfigError
from fedloom.privacy.signatures import public_line

DIGEST, OTHER = "ab" * 8, "cd" * 8


def person(folder: Path, name: str) -> tuple[Path, str]:
    """A private key as ``ssh-keygen`` makes it, and its public line."""
    key = ed25519.Ed25519PrivateKey.generate()
    form = serialization.PrivateFormat.OpenSSH
    path = folder / name
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    return path, f"{public_line(key).decode()} {name}"


@pytest.fixture
def home(tmp_path: Path) -> SiloDirectory:
    charter = Charter(name="x", address="h:1", silos={"north": "all", "south": "all"}, shape=(1,))
    return SiloDirectory.create(tmp_path / "north", Invitation("north", charter, "none"))


def agree(home: SiloDirectory, *lines: str, approvals: int = 2) -> Policy:
    listed = ", ".join(f'"{line}"' for line in lines)
    (home.path / "policy.toml").write_text(f"approvers = [{listed}]\napprovals = {approvals}\n")
    return home.policy()


def test_an_experiment_runs_once_two_people_have_signed_it(home: SiloDirectory, tmp_path: Path) -> None:
    (anna, anna_line), (bert, bert_line), (eve, _) = (person(tmp_path, name) for name in ("anna", "bert", "eve"))
    policy = agree(home, anna_line, bert_line)
    assert f"{DIGEST} is approved by 0 of the 2 people" in approvals_objection(home, policy, DIGEST)
    approve(home, DIGEST, anna)
    approve(home, DIGEST, anna)  # twice is once
    assert "approved by 1 of the 2" in approvals_objection(home, policy, DIGEST)
    with pytest.raises(ConfigError, match="does not name the key"):
        approve(home, DIGEST, eve)
    signed = approve(home, DIGEST, bert)
    assert approvals_objection(home, policy, DIGEST) == ""
    assert "approved by 0 of the 2" in approvals_objection(home, policy, OTHER)
    assert approvals_objection(home, Policy(), OTHER) == ""
    signed.write_text(signed.read_text().replace("0", "1"))
    assert "approved by 1 of the 2" in approvals_objection(home, policy, DIGEST)


def test_a_signature_holds_for_its_experiment_and_its_silo(home: SiloDirectory, tmp_path: Path) -> None:
    anna, line = person(tmp_path, "anna")
    policy = agree(home, line, approvals=1)
    signature = approve(home, DIGEST, anna).read_bytes()
    assert approvals_objection(home, policy, DIGEST) == ""
    elsewhere = home.path / "approvals" / OTHER
    elsewhere.mkdir()
    (elsewhere / "x.sig").write_bytes(signature)
    assert approvals_objection(home, policy, OTHER) != ""
    south = SiloDirectory.create(tmp_path / "south", Invitation("south", home.invitation.charter, "none"))
    (south.path / "approvals" / DIGEST).mkdir()
    (south.path / "approvals" / DIGEST / "x.sig").write_bytes(signature)
    assert approvals_objection(south, agree(south, line, approvals=1), DIGEST) != ""


def test_mistakes_are_sentences(home: SiloDirectory, tmp_path: Path) -> None:
    anna, line = person(tmp_path, "anna")
    agree(home, line, approvals=1)
    with pytest.raises(ConfigError, match="is no experiment's digest"):
        approve(home, "../x", anna)
    with pytest.raises(ConfigError, match="is no private key that can be read"):
        approve(home, DIGEST, tmp_path / "nobody")
    with pytest.raises(ConfigError, match=r"asks for more people than policy\.approvers names: 1"):
        agree(home, line)
