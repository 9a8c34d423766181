"""A silo at a SuperNode that its own operator runs: where it lies is said by the node's config, never by a server."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.deployment.charter import Charter
from fedloom.deployment.directories import POLICY, SILO, Invitation, SiloDirectory
from fedloom.deployment.flower.folder import charter_in
from fedloom.deployment.policy import policy_text
from fedloom.deployment.processes import locked
from fedloom.engines.flower.frames import Frame
from fedloom.engines.flower.work import RefusedError, failure, refusal, refused
from fedloom.errors import FedloomError
from fedloom.runs.files import explained, write_atomically

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Seat:
    """What a SuperNode's ``--node-config`` says of its silo."""

    silo: str
    home: Path  # the silo's folder: policy, ledger, rounds
    data: Path
    source: str = ""  # of the records, where the data do not speak for themselves

    @classmethod
    def of(cls, node: Mapping[str, Any]) -> Seat:
        """From the config that Flower hands to an app at this node."""
        for key in ("silo", "home", "data"):
            if not node.get(key):
                raise RefusedError(f"this SuperNode's --node-config does not say '{key}'")
        return cls(str(node["silo"]), Path(str(node["home"])), Path(str(node["data"])), str(node.get("source", "")))

    def directory(self, charter: Charter) -> SiloDirectory:
        """The silo's folder, which is made for the first charter that comes, and is for no other from then on."""
        with refused():
            charter.index(self.silo)
        home, invitation = SiloDirectory(self.home), Invitation(self.silo, charter, authority="")
        if not SiloDirectory.is_at(self.home):
            with explained(self.home):
                for folder in (self.home, home.logs, self.home / "approvals"):
                    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not (self.home / POLICY).exists():
                write_atomically(self.home / POLICY, policy_text().encode())
            write_atomically(self.home / SILO, invitation.to_toml().encode())
        if home.invitation.to_toml() != invitation.to_toml():  # as text: the order of silos numbers them
            raise RefusedError(
                f"silo '{self.silo}' has agreed to another charter than this run's; its operator alone can change that"
            )
        return home


def answer_at(node: Mapping[str, Any], told: Mapping[str, Any], frame: Frame) -> Frame:
    """What the silo of a node answers; why it cannot stands in its own log, and no other words of it leave."""
    try:
        seat = Seat.of(node)
        with refused():
            charter = charter_in(told)
        home = seat.directory(charter)
        with _heard(home), locked(home.lock, f"silo '{seat.silo}' is at work already, in another process"):
            return _answered(home, seat, frame)
    except RefusedError as error:
        log.warning("refused: %s", error)
        return refusal(str(error))
    except Exception:  # Flower would send its text
        log.exception("failed")
        return failure("the silo failed; its own log says why")


def _answered(home: SiloDirectory, seat: Seat, frame: Frame) -> Frame:
    try:
        from fedloom.deployment.worker import answering

        return answering(home.path, seat.data, seat.source)(frame)
    except FedloomError as error:
        log.error("failed: %s", error)
        return failure(f"silo '{seat.silo}' failed; its own log says why")


@contextmanager
def _heard(home: SiloDirectory) -> Iterator[None]:
    """What is said meanwhile goes into the silo's log, as the logs of other silos have it."""
    handler = logging.FileHandler(home.logs / "silo.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    own = logging.getLogger("fedloom")
    before = own.level
    own.addHandler(handler)
    own.setLevel(logging.INFO)
    try:
        yield
    finally:
        own.setLevel(before)
        own.removeHandler(handler)
        handler.close()
