"""The end of a run at the server: every silo that was drawn is asked what the run cost its data, and what left."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from fedloom.deployment.directories import ServerDirectory
from fedloom.engines.remote.rounds import Event
from fedloom.engines.remote.statement_frames import question, statement_in
from fedloom.engines.remote.wire import Answer, Question, Wire
from fedloom.errors import FedloomError
from fedloom.privacy.statement_body import drawn_rounds, written_time
from fedloom.privacy.statements import Bundle, Statement, read_bundle, verify
from fedloom.runs.files import write_atomically
from fedloom.runs.folder import RunFolder

# Seconds that the end of a run waits for silos that are not there, and for those that have been asked: who comes later
# is asked when the run is resumed.
ABSENT, BUSY = 10.0, 60.0
TICK = 0.5


def unsigned(folder: RunFolder, silos: tuple[str, ...]) -> list[str]:
    """The silos that were drawn for a run and of which its folder holds no statement."""
    stated = {each.silo for each in read_bundle(folder.statements).statements} if folder.statements.is_file() else set()
    return [silo for silo, rounds in drawn_rounds(folder.config, silos).items() if rounds and silo not in stated]


def begun(home: ServerDirectory, folder: RunFolder, run: str) -> Bundle:
    """The bundle of a run: the one in its folder, if that asks what has to be asked, else a new one."""
    participants: dict[str, dict[str, str]] = {}
    for row in folder.egress():
        participants.setdefault(str(row["round"]), {})[row["silo"]] = row["sha256"]
    asked = Bundle(
        charter=home.charter.to_mapping(),
        experiment=folder.config.to_toml(),
        run=run,
        asked=written_time(datetime.now(UTC)),
        participants=participants,
        keys={},
    )
    known = read_bundle(folder.statements) if folder.statements.is_file() else asked
    return known if known.terms == {**asked.terms, "asked": known.asked} else asked


def gather(home: ServerDirectory, folder: RunFolder, run: str, wire: Wire, journal: Callable[[Event], None]) -> None:
    """Ask all silos whose statement lacks; those that come are in the run's folder, whatever becomes of the others."""
    bundle = begun(home, folder, run)
    write_atomically(folder.statements, bundle.to_bytes())
    lacking = set(unsigned(folder, tuple(home.charter.silos)))
    for answer in _answers(wire, bundle, set(lacking)):
        try:
            bundle = accepted(home, bundle, _statement(answer))
            write_atomically(folder.statements, bundle.to_bytes())
            lacking.discard(answer.silo)
        except FedloomError as error:
            lacking.discard(answer.silo)
            journal(Event(folder.config.rounds, answer.silo, "unstated", str(error), answer.seconds))
    for silo in sorted(lacking):
        journal(Event(folder.config.rounds, silo, "unstated", "it was not there, or did not answer in time"))


def accepted(home: ServerDirectory, bundle: Bundle, statement: Statement) -> Bundle:
    """The bundle with one statement more, if nothing is wrong with that."""
    silo = statement.silo
    key = home.key_admitted(silo).decode()
    grown = bundle.having(statement, key)
    alone = replace(grown, keys={silo: key}, statements=(statement,))
    wrong = [flaw.sentence for flaw in verify(alone) if flaw.silo == silo and not flaw.unguarded]
    if wrong:
        raise FedloomError(f"the statement of silo '{silo}' is not taken: {wrong[0]}")
    return grown


def collect(home: ServerDirectory, folder: RunFolder, paths: list[Path]) -> list[str]:
    """Put statements that came in another way into a run's bundle; returns the silos that still lack."""
    bundle = read_bundle(folder.statements)
    for path in paths:
        try:
            bundle = accepted(home, bundle, Statement.of(json.loads(path.read_bytes())))
        except OSError as error:
            raise FedloomError(f"cannot read {path}: {error.strerror}") from error
        except (FedloomError, ValueError, RecursionError) as error:
            raise FedloomError(f"{path}: {error}") from error
    write_atomically(folder.statements, bundle.to_bytes())
    return unsigned(folder, tuple(home.charter.silos))


def _statement(answer: Answer) -> Statement:
    if answer.frame is None:
        raise FedloomError(answer.problem)
    statement = statement_in(answer.frame)
    if statement.silo != answer.silo:
        raise FedloomError(f"it sent a statement of '{statement.silo}'")
    return statement


def _answers(wire: Wire, bundle: Bundle, waiting: set[str]) -> Iterator[Answer]:
    """Of those who are there, and of those who come soon."""
    start, asked, frame = time.monotonic(), set[str](), question(bundle)
    while waiting:
        online, seconds = wire.online(), time.monotonic() - start
        there = [silo for silo in sorted(waiting - asked) if silo in online]
        if there:
            wire.ask([Question(silo, online[silo], 0, frame) for silo in there], BUSY)
            asked |= set(there)
        elif seconds > ABSENT + BUSY or (seconds > ABSENT and not waiting & asked):
            return
        answer = wire.answer(TICK)
        if answer is not None and answer.silo in waiting:
            waiting.discard(answer.silo)
            yield answer
