"""A silo in a federation of others: where it lies is said by its own operator, never by a server."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.deployment.charter import Charter
from fedloom.deployment.directories import POLICY, SILO, Invitation, SiloDirectory
from fedloom.deployment.hosted.run import charter_in
from fedloom.deployment.policy import policy_text
from fedloom.deployment.processes import locked
from fedloom.engines.remote.frames import Frame
from fedloom.engines.remote.work import TASK, RefusedError, failure, refusal, refused
from fedloom.errors import FedloomError
from fedloom.runs.files import explained, write_atomically

log = logging.getLogger(__name__)
Worker = Callable[[Frame], Frame]
Waking = Callable[[Path, Path, str], Worker]


@dataclass(frozen=True)
class Said:
    """What a machine's operator says of the silo there, and where he says it."""

    values: Mapping[str, Any]
    where: str


@dataclass(frozen=True)
class Seat:
    """Whose silo it is, and where it lies."""

    silo: str
    home: Path  # the silo's folder: policy, ledger, rounds
    data: Path
    source: str = ""  # of the records, where the data do not speak for themselves

    @classmethod
    def of(cls, said: Said) -> Seat:
        """As its operator says."""
        found = said.values
        for key in ("silo", "home", "data"):
            if not found.get(key):
                raise RefusedError(f"{said.where} does not say '{key}'")
        return cls(str(found["silo"]), Path(str(found["home"])), Path(str(found["data"])), str(found.get("source", "")))

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


def awake(folder: Path, data: Path, source: str) -> Worker:
    """A worker with its records loaded."""
    from fedloom.deployment.worker import answering

    return answering(folder, data, source)


def answer_at(said: Said, told: Mapping[str, Any], frame: Frame, awake: Waking = awake) -> Frame:
    """What the silo answers; why it cannot stands in its own log, and no other words of it leave."""
    try:
        if frame.kind != TASK:  # the rest needs a node that signs, or is the node's own to ask
            raise RefusedError("a silo in a federation of others answers the tasks of rounds, and nothing else")
        seat = Seat.of(said)
        with refused():
            charter = charter_in(told)
        home = seat.directory(charter)
        with _heard(home), locked(home.lock, f"silo '{seat.silo}' is at work already, in another process"):
            return _answered(home, seat, frame, awake)
    except RefusedError as error:
        log.warning("refused: %s", error)
        return refusal(str(error))
    except Exception:  # the engine would send its text
        log.exception("failed")
        return failure("the silo failed; its own log says why")


def _answered(home: SiloDirectory, seat: Seat, frame: Frame, awake: Waking) -> Frame:
    try:
        return awake(home.path, seat.data, seat.source)(frame)
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
