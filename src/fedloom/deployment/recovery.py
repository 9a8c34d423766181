"""After a restore: what a silo paid since the backup, from its surviving audit log and from what the server asked.

The audit log has every charge as it stood in the ledger; a ledger that is filled up from it ends with the very chain
that it had. What the log does not reach is taken from the coordinator's account, signed by the federation's authority:
every round for which the silo was asked and did not refuse counts as released, as often as it was asked.
"""

from __future__ import annotations

import json
import shutil
import tomllib
from collections import Counter
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedloom.config import Config
from fedloom.deployment.directories import ServerDirectory, SiloDirectory
from fedloom.deployment.submissions import Submission
from fedloom.engines.remote.silo import SiloService
from fedloom.errors import ConfigError, FedloomError, unknown
from fedloom.operations.spending import Hold, paid_in
from fedloom.operations.trail import AUDIT, Trail, TrailError
from fedloom.privacy.accounts import LedgerRow
from fedloom.privacy.ledger import BudgetSpentError, Ledger
from fedloom.privacy.signatures import is_signed, sign
from fedloom.privacy.statements import canonical
from fedloom.runs.files import read_lines
from fedloom.settings import parse

DOMAIN = b"fedloom account 1\n"  # begins what is signed, so that it can be taken for nothing else


@dataclass(frozen=True)
class AskedRun:
    """How often a silo was asked for each round of a run, without the times that it refused."""

    run: str
    experiment: str  # TOML
    rounds: dict[str, int]


@dataclass(frozen=True)
class CoordinatorAccount:
    """All that a server ever asked of one silo, in answer to the ticket of one restore."""

    federation: str
    silo: str
    ticket: str
    runs: tuple[AskedRun, ...]

    @classmethod
    def of(cls, home: ServerDirectory, silo: str, ticket: str) -> CoordinatorAccount:
        """From the journals of all runs; one that is gone cannot be told of."""
        if silo not in home.charter.silos:
            raise ConfigError(unknown("silo", silo, home.charter.silos))
        runs: dict[str, AskedRun] = {}
        for path in sorted((home.path / "submissions").glob("*.json")):
            found = Submission.open(home, path.stem)
            journal = found.folder / "silos.jsonl"
            if not found.folder.is_dir():
                raise FedloomError(f"{found.folder} is gone: what silo '{silo}' was asked there cannot be told")
            rounds = Counter[str]()
            for row in (row for row in read_lines(journal) if row["silo"] == silo):
                rounds[str(row["round"])] += {"asked": 1, "refused": -1}.get(row["event"], 0)
            runs[found.run] = AskedRun(found.run, found.config.to_toml(), dict(+rounds))
        return cls(home.charter.name, silo, ticket, tuple(runs.values()))

    def signed(self, home: ServerDirectory) -> bytes:
        """The file, with the signature of the federation's authority."""
        key = serialization.load_pem_private_key((home.keys / "ca.key").read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        body = asdict(self)
        return canonical({"body": body, "signature": sign(DOMAIN + canonical(body), key).hex()}) + b"\n"

    @classmethod
    def read(cls, path: Path, home: SiloDirectory, ticket: str) -> CoordinatorAccount:
        """The account in a file, if it is of this silo, of its own federation, and in answer to the ticket."""
        try:
            tree = json.loads(path.read_bytes())
            words, signature = dict(tree["body"]), bytes.fromhex(tree["signature"])
            found = parse(cls, words)
        except (OSError, ValueError, KeyError, TypeError, FedloomError) as error:
            raise ConfigError(f"{path} is no account that 'fedloom federation account' made: {error}") from error
        authority = x509.load_pem_x509_certificate(home.invitation.authority.encode()).public_key()
        line = authority.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        if not is_signed(DOMAIN + canonical(words), signature, line):
            raise FedloomError(f"{path} is not signed by the authority of this silo's federation")
        if (found.silo, found.ticket) != (home.name, ticket):
            raise FedloomError(
                f"{path} answers for silo '{found.silo}' and ticket {found.ticket}; ask the coordinator for 'fedloom "
                f"federation account DIR {home.name} {ticket}'"
            )
        return found


@dataclass(frozen=True)
class Confirmation:
    """What a restored ledger got back before it may pay again."""

    replayed: int  # charges from the audit log
    made_up: int  # charges for what was asked and nothing else tells of


def confirm(home: SiloDirectory, service: SiloService, account: Path, audit: Path | None = None) -> Confirmation:
    """Fill up a restored ledger, and let it pay again; what cannot be told leaves the hold where it is."""
    hold = Hold.at(home.path)
    if hold is None:
        raise ConfigError(f"{home.path} was not restored, or was confirmed already")
    found = CoordinatorAccount.read(account, home, hold.ticket)
    trail = Trail(home.path / AUDIT)
    if audit is not None:
        _take_up(Trail(audit), trail, hold)
    ledger = home.path / "ledger.sqlite"
    replayed = _replayed(ledger, trail) if ledger.is_file() else 0
    try:
        made_up = sum(_made_up(service, home.name, run) for run in found.runs)
    except BudgetSpentError as error:
        raise FedloomError(
            f"what silo '{home.name}' was asked since the backup costs more than is left, so it pays nothing any more: "
            f"{error}"
        ) from error
    trail.note("confirmed", {"ticket": hold.ticket, "replayed": replayed, "made up": made_up})
    Hold.lift(home.path)
    return Confirmation(replayed, made_up)


def _take_up(survived: Trail, own: Trail, hold: Hold) -> None:
    """Put the lost folder's audit log in place of the restored one, if it is its continuation."""
    survived.require(hold.lines, hold.head)
    if not list(survived.entries()):
        raise TrailError(f"{survived.path} is no audit log")
    restored = own.path.with_suffix(".restored.jsonl")
    own.path.replace(restored)  # kept: it says when was restored
    shutil.copyfile(survived.path, own.path)
    own.path.chmod(0o600)
    own.note("restored", {"backup": hold.backed_up, "ticket": hold.ticket})


def _replayed(path: Path, trail: Trail) -> int:
    """Charges of the audit log that the ledger lacks, each written as it stood; the chain must come out as noted."""
    with closing(Ledger(path)) as ledger:
        count = ledger.chain().charges
        for entry in paid_in(trail, ledger.identity):
            facts = dict(entry.facts)
            head, _ = facts.pop("head"), facts.pop("ledger")
            row = LedgerRow(**facts)
            if row.charge > ledger.chain().charges:
                ledger.take_over(row)
            if ledger.chain().heads[row.charge] != head:
                raise TrailError(
                    f"{trail.path}: charge {row.charge} does not fit {path}; it is of another ledger's life"
                )
        return ledger.chain().charges - count


def _made_up(service: SiloService, silo: str, asked: AskedRun) -> int:
    """Charge every round that was asked more often than the ledger knows of."""
    if not asked.rounds:
        return 0
    prepared = service.ready(parse(Config, tomllib.loads(asked.experiment)))
    if prepared.privacy is None:
        return 0
    count = 0
    with closing(service.ledger(prepared.grant)) as ledger:
        known = Counter({each.round: each.attempt + 1 for each in ledger.charges(asked.run, silo)})
        for number, times in sorted((int(number), times) for number, times in asked.rounds.items()):
            for _ in range(times - known[number]):
                count += len(ledger.charge_all(asked.run, silo, number, prepared.events(number), content=None))
    return count
