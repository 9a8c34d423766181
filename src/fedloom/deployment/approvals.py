"""Four eyes: people at a silo sign an experiment's digest before it may run there."""

from __future__ import annotations

import re
from pathlib import Path

from fedloom.deployment.directories import SiloDirectory
from fedloom.deployment.policy import Policy
from fedloom.errors import ConfigError
from fedloom.privacy.signatures import fingerprint, is_signed, public_line, read_private_key, sign
from fedloom.runs.files import write_atomically

DIGEST = re.compile(r"[0-9a-f]{8,64}")


def approve(home: SiloDirectory, digest: str, key: Path) -> Path:
    """Sign an experiment's digest in the silo's folder, with a key that its policy names; returns the file."""
    if not DIGEST.fullmatch(digest):
        raise ConfigError(f"'{digest}' is no experiment's digest; 'fedloom inspect' and refusals show it")
    try:
        own = read_private_key(key.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key} is no private key that can be read: {error}") from error
    line = public_line(own)
    if line not in _lines(home.policy()):
        raise ConfigError(f"policy.toml does not name the key {line.decode()} among its approvers")
    path = _folder(home, digest) / f"{fingerprint(line).replace(' ', '')}.sig"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, sign(_words(home, digest), own).hex().encode() + b"\n")
    return path


def approvals_objection(home: SiloDirectory, policy: Policy, digest: str) -> str:
    """Why an experiment may not run before more people have signed it; empty where it may."""
    if not policy.approvals:
        return ""
    files = [path.read_text(encoding="ascii", errors="replace").strip() for path in _folder(home, digest).glob("*.sig")]
    signatures = [bytes.fromhex(text) for text in files if re.fullmatch(r"([0-9a-f]{2})+", text)]
    words = _words(home, digest)
    approved = {line for line in _lines(policy) if any(is_signed(words, each, line) for each in signatures)}
    if len(approved) >= policy.approvals:
        return ""
    return (
        f"the experiment {digest} is approved by {len(approved)} of the {policy.approvals} people whom policy.toml "
        "asks for"
    )


def _lines(policy: Policy) -> set[bytes]:
    """The keys of a policy, without comments: one that is named twice is one."""
    return {" ".join(line.split()[:2]).encode() for line in policy.approvers}


def _words(home: SiloDirectory, digest: str) -> bytes:
    """What is signed: for this silo of this federation, and for nothing else."""
    charter = home.invitation.charter
    return f"fedloom approval\n{charter.name}\n{home.name}\n{digest}\n".encode()


def _folder(home: SiloDirectory, digest: str) -> Path:
    return home.path / "approvals" / digest
