"""What stands between a silo's ledger and a payment: the audit log must not know of more, and no restore be open.

The registry of ledgers sees an older ledger in place of a newer one as long as the registry itself is the newest. Where
a whole machine is restored, both are old. So the audit log notes every charge in full, with the ledger's chain, and a
restored folder has a hold, under which nothing is paid until what was spent since the backup is known.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from fedloom.errors import RunFolderError
from fedloom.operations.trail import AUDIT, Entry, Trail
from fedloom.privacy.ledger import GrantError, Ledger
from fedloom.runs.files import write_json

HOLD = "restored.json"


@dataclass(frozen=True)
class Hold:
    """A folder was restored from a backup, and what was spent after that is yet to be told."""

    ticket: str  # the coordinator's account must answer to it: an older account does not count
    backed_up: str  # when
    lines: int  # of the audit log at that time, and the hash of the last
    head: str

    @classmethod
    def at(cls, home: Path) -> Hold | None:
        """The one that a folder is under, if it is."""
        path = home / HOLD
        if not path.is_file():
            return None
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise RunFolderError(f"{path} is damaged ({error}); restore the backup anew") from error

    def write(self, home: Path) -> None:
        """Put a folder under it."""
        write_json(home / HOLD, asdict(self))

    @staticmethod
    def lift(home: Path) -> None:
        """What was spent is known."""
        (home / HOLD).unlink()


def refuse_held(home: Path) -> None:
    """Nothing is paid from a ledger that may be older than what it paid for."""
    if (home / HOLD).exists():
        raise GrantError(
            f"{home} was restored from a backup, and what was spent since is not known: nothing is paid before "
            "'fedloom federation confirm'"
        )


def audited(ledger: Ledger, home: Path) -> Ledger:
    """The ledger, every charge of which is in the audit log before what it pays for is made."""
    trail = Trail(home / AUDIT)
    noted = [each.facts for each in paid_in(trail, ledger.identity)]
    known, head = (noted[-1]["charge"], noted[-1]["head"]) if noted else (0, "")
    if noted and not ledger.chain().goes_on_from(known, head):
        ledger.close()
        raise GrantError(
            f"{ledger.path} is older than its audit log, which knows of {known} charges: put the newest ledger back, "
            "or restore a backup with 'fedloom federation restore'"
        )
    ledger.watch(_Follower(trail, ledger, known))
    return ledger


def paid_in(trail: Trail, ledger: str) -> list[Entry]:
    """The charges of one ledger that an audit log tells of, in order."""
    return [each for each in trail.entries() if each.event == "paid" and each.facts.get("ledger") == ledger]


@dataclass
class _Follower:
    """Notes what was charged since it was last called."""

    trail: Trail
    ledger: Ledger
    known: int  # charges that the audit log has

    def __call__(self) -> None:
        heads = self.ledger.chain().heads
        for row in self.ledger.rows_after(self.known):
            facts = asdict(row) | {"ledger": self.ledger.identity, "head": heads[row.charge]}
            self.trail.note("paid", facts)
            self.known = row.charge
