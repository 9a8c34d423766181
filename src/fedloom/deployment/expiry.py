"""When the certificates of a folder expire, and what to do before that."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509

from fedloom.errors import ConfigError

SOON = timedelta(days=30)
PLACES = (".", "keys", "admitted", "post")  # where certificates lie in a folder


@dataclass(frozen=True)
class Expiry:
    """A certificate's end."""

    path: Path
    ends: datetime

    def left(self, now: datetime | None = None) -> timedelta:
        """Time that it still has; negative where it has ended."""
        return self.ends - (now or datetime.now(UTC))

    def warning(self, now: datetime | None = None) -> str:
        """One sentence from 30 days before the end on; empty before that."""
        left = self.left(now)
        if left > SOON:
            return ""
        when = f"{self.ends:%Y-%m-%d %H:%M} UTC"
        said = f"expires on {when}, in {left.days} days" if left > timedelta() else f"expired on {when}"
        return f"the certificate {self.path} {said}; {self.remedy}"

    @property
    def remedy(self) -> str:
        """Who does what."""
        if self.path.name == "ca.crt":
            return "it is the federation's authority: the coordinator founds a new federation"
        if self.path.parent.name in ("keys", "admitted"):
            return f"the coordinator runs 'fedloom federation renew {self.path.parent.parent}'"
        if self.left() < timedelta():
            return "ask the coordinator for another invitation, and join with that"
        return "the coordinator runs 'fedloom federation renew', and this silo fetches the new one by itself"


def expiries(folder: Path) -> list[Expiry]:
    """Of all certificates of a server's or a silo's folder, the next to end first."""
    found = []
    for path in sorted(path for place in PLACES for path in (folder / place).glob("*.crt")):
        try:
            certificate = x509.load_pem_x509_certificate(path.read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} is no certificate that can be read: {error}") from error
        found.append(Expiry(path, certificate.not_valid_after_utc))
    return sorted(found, key=lambda each: each.ends)


def warnings_of(folder: Path, now: datetime | None = None) -> list[str]:
    """What status and logs say of certificates that end soon."""
    return [said for each in expiries(folder) if (said := each.warning(now))]
